"""check_half.py LIBRARY - compares amp_convert with NumPy's float16 (and float32) casts.

LIBRARY is amp.h as a shared library: cc -shared -fPIC -DAMP_IMPLEMENTATION -x c amp.h -o libamp.so -lm
NaNs count as equal whatever their payload; everything else must agree in every bit.
"""
import ctypes
import sys
import warnings

import numpy as np

F32, F16, BF16, F64 = 1, 2, 3, 4
TYPES = {F32: np.float32, F16: np.float16, F64: np.float64}
ISAS = {1: "scalar", 2: "neon", 3: "avx2", 4: "avx512"}
passed = failed = 0


def check(ok, text):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print("failed:", text)


class Ref(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int)]


def convert(lib, source, src, dst):
    result = np.empty(source.shape, TYPES[dst])
    code = lib.amp_convert(Ref(result.ctypes.data, dst), Ref(source.ctypes.data, src), source.size)
    check(code == 0, f"amp_convert returned {code}")
    return result


def same(got, want):
    """The number of elements that differ, NaNs aside, and the first one's index."""
    integer = {2: np.uint16, 4: np.uint32, 8: np.uint64}[got.itemsize]
    differ = (got.view(integer) != want.view(integer)) & ~(np.isnan(got) & np.isnan(want))
    return int(differ.sum()), int(differ.argmax())


def floats32(rng):
    """Every exponent and sign with 4,096 fractions, edges among them."""
    edges = [0, 1, 0x7FFFFF, 0x400000, 0x3FFFFF, 0x400001, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001]
    top = np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)
    low = rng.integers(0, 1 << 23, (512, 4096), dtype=np.uint32)
    low[:, : len(edges)] = edges
    return (top | low).reshape(-1).view(np.float32)


def floats64(rng):
    """Every exponent and sign, then the midpoints of all halves with their neighbours in double."""
    top = np.arange(4096, dtype=np.uint64)[:, None] << np.uint64(52)
    low = rng.integers(0, 1 << 52, (4096, 256), dtype=np.uint64)
    low[:, 0], low[:, 1], low[:, 2] = 0, (1 << 52) - 1, 1
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = (halves[:-1] + halves[1:]) / 2
    middles = np.append(middles, 65520.0)
    near = [f(x) for x in (halves, middles) for f in
            (lambda x: x, lambda x: np.nextafter(x, np.inf), lambda x: np.nextafter(x, -np.inf), lambda x: -x)]
    return np.concatenate([(top | low).reshape(-1).view(np.float64), *near])


def compare(lib, isa, rng):
    samples = {F32: floats32(rng), F64: floats64(rng), F16: np.arange(65536, dtype=np.uint16).view(np.float16)}
    for src, source in samples.items():
        for dst, kind in TYPES.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                want = source.astype(kind)
            got = convert(lib, source, src, dst)
            wrong, first = same(got, want)
            check(wrong == 0, f"{isa}: {source.dtype} to {got.dtype}: {wrong} of {source.size} differ, first "
                              f"{source[first]!r} gave {got[first]!r}, NumPy {want[first]!r}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lib = ctypes.CDLL(sys.argv[1])
    lib.amp_convert.argtypes = [Ref, Ref, ctypes.c_size_t]
    for isa, name in ISAS.items():
        if lib.amp_cpu_force_isa(isa) == 0:
            compare(lib, name, np.random.default_rng(1))
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed != 0 or passed == 0)


main()
