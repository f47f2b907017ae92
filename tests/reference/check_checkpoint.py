#!/usr/bin/env python3
"""Exchange of files with the safetensors library, in both directions.

usage: check_checkpoint.py path/to/libamp.so      (needs numpy and safetensors)
"""
import ctypes
import os
import sys
import tempfile
import zlib

import numpy as np
import safetensors
import safetensors.numpy

F32, F16, BF16, F64 = 1, 2, 3, 4
SIZES = {F32: 4, F16: 2, BF16: 2, F64: 8}
NUMPY = {F32: np.float32, F16: np.float16, F64: np.float64}
FORMAT = {F32: "F32", F16: "F16", BF16: "BF16", F64: "F64"}
SHAPES = [(), (1,), (3,), (0,), (2, 3), (2, 0, 3), (2, 3, 4), (5, 1, 2, 3), (1, 1, 1, 1), (64, 65)]
NAMES = ["w", "conv2d1.weight", "Gr\u00fc\u00df'e", "\u6570\u5b66", "\U0001d11e clef", 'quote " back \\ slash /', "tab\tline\n\x01",
         "", " ", "\\u0041"]
TEXTS = {"format": "np", "": "empty key", "k\u00e9y": 'v "\\\n\x1f \U0001f600', "empty": ""}

passed = failed = 0


def check(condition, what):
    global passed, failed
    if condition:
        passed += 1
    else:
        failed += 1
        print("failed:", what)


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("count", ctypes.c_size_t), ("name", ctypes.c_char_p)]


class FileTensor(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("rank", ctypes.c_int), ("shape", ctypes.c_size_t * 4)]


class FileText(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("value", ctypes.c_char_p)]


def file_tensors(items):
    """items: list of (name, dtype, shape, buffer of bytes)"""
    out = (FileTensor * max(1, len(items)))()
    for t, (name, dtype, shape, buffer) in zip(out, items):
        count = int(np.prod(shape, dtype=np.int64))
        t.tensor = Tensor(ctypes.addressof(buffer) if count else None, dtype, count, name.encode())
        t.rank = len(shape)
        t.shape = (ctypes.c_size_t * 4)(*shape, *[0] * (4 - len(shape)))
    return out


def make_items(rng, dtypes):
    items = []
    for i, shape in enumerate(SHAPES):
        for dtype in dtypes:
            size = int(np.prod(shape, dtype=np.int64)) * SIZES[dtype]
            buffer = ctypes.create_string_buffer(rng.bytes(size), max(1, size))
            items.append(("%s/%d" % (NAMES[i], dtype), dtype, shape, buffer))
    return items


def raw(item):
    size = int(np.prod(item[2], dtype=np.int64)) * SIZES[item[1]]
    return item[3].raw[:size]


def ours_to_theirs(lib, path, rng):
    items = make_items(rng, [F32, F16, BF16, F64])
    texts = (FileText * len(TEXTS))(*[FileText(k.encode(), v.encode()) for k, v in TEXTS.items()])
    r = lib.amp_file_save(path.encode(), file_tensors(items), len(items), texts, len(TEXTS), None)
    check(r == 0, "amp_file_save: %d" % r)
    with open(path, "rb") as f:
        data = f.read()
    theirs = dict(safetensors.deserialize(data))
    check(set(theirs) == {i[0] for i in items}, "names")
    for item in items:
        t = theirs.get(item[0])
        check(t is not None and t["dtype"] == FORMAT[item[1]] and tuple(t["shape"]) == item[2], "head of %r" % item[0])
        check(t is not None and bytes(t["data"]) == raw(item), "data of %r" % item[0])
    with safetensors.safe_open(path, "np") as f:
        crcs = {"amp.crc32." + i[0]: "%08x" % zlib.crc32(raw(i)) for i in items}
        check(f.metadata() == {**TEXTS, **crcs}, "metadata %r" % f.metadata())
        for item in items:
            if item[1] != BF16:
                a = f.get_tensor(item[0])
                check(a.dtype == NUMPY[item[1]] and a.shape == item[2] and a.tobytes() == raw(item), "numpy %r" % item[0])
    header = int.from_bytes(data[:8], "little")
    check(header % 8 == 0 and data[8:9] == b"{", "header is aligned")
    check(lib.amp_file_save(path.encode(), None, 0, None, 0, None) == 0, "empty file")
    check(safetensors.numpy.load_file(path) == {}, "empty file is read")


def theirs_to_ours(lib, path, rng):
    items = make_items(rng, [F32, F16, BF16, F64])
    spec = {i[0]: {"dtype": {F32: "float32", F16: "float16", BF16: "bfloat16", F64: "float64"}[i[1]],
                   "shape": list(i[2]), "data": raw(i)} for i in items}
    spec["other types/i64"] = {"dtype": "int64", "shape": [3], "data": bytes(range(24))}
    spec["other types/bool"] = {"dtype": "bool", "shape": [5], "data": bytes([0, 1, 1, 0, 1])}
    try:
        blob = safetensors.serialize(spec, TEXTS)
    except TypeError:          # newer versions take TensorSpec objects that point to memory
        keep = {k: ctypes.create_string_buffer(v["data"], max(1, len(v["data"]))) for k, v in spec.items()}
        blob = safetensors.serialize({k: safetensors.TensorSpec(dtype=v["dtype"], shape=v["shape"],
                                                                data_ptr=ctypes.addressof(keep[k]), data_len=len(v["data"]))
                                      for k, v in spec.items()}, TEXTS)
    with open(path, "wb") as f:
        f.write(blob)
    back = [(n, d, s, ctypes.create_string_buffer(b"\xa5" * len(b), len(b))) for n, d, s, b in items]
    order = rng.permutation(len(back))
    r = lib.amp_file_load(path.encode(), file_tensors([back[i] for i in order]), len(back), None)
    check(r == 0, "amp_file_load: %d" % r)
    for item, mine in zip(items, back):
        check(raw(item) == raw(mine), "data of %r" % item[0])
    for key, value in TEXTS.items():
        out = ctypes.create_string_buffer(200)
        r = lib.amp_file_text_of(path.encode(), key.encode(), out, ctypes.c_size_t(200), None)
        check(r == 0 and out.value == value.encode(), "text %r: %r" % (key, out.value))


def numpy_to_ours(lib, path, rng):
    a = rng.standard_normal((4, 5)).astype(np.float32)
    h = rng.standard_normal(7).astype(np.float16)
    safetensors.numpy.save_file({"a": a, "h": h}, path)
    back = [("a", F32, (4, 5), ctypes.create_string_buffer(80)), ("h", F16, (7,), ctypes.create_string_buffer(14))]
    check(lib.amp_file_load(path.encode(), file_tensors(back), 2, None) == 0, "a file of save_file")
    check(raw(back[0]) == a.tobytes() and raw(back[1]) == h.tobytes(), "its values")


def changed_by_them(lib, path, rng):
    """Their writer keeps our texts, in an order of its own. A changed tensor is refused until its checksum goes."""
    items = [(n, F32, (3, 4), ctypes.create_string_buffer(rng.bytes(48))) for n in "abc"]
    check(lib.amp_file_save(path.encode(), file_tensors(items), 3, None, 0, None) == 0, "amp_file_save")
    with safetensors.safe_open(path, "np") as f:
        tensors, texts = {n: f.get_tensor(n) for n in "cab"}, f.metadata()
    safetensors.numpy.save_file(tensors, path, texts)
    check(lib.amp_file_load(path.encode(), file_tensors(items), 3, None) == 0, "a file of the same tensors")
    tensors["b"][1, 2] = 0.5
    safetensors.numpy.save_file(tensors, path, texts)
    check(lib.amp_file_load(path.encode(), file_tensors(items), 3, None) == -10, "a changed tensor")
    check(lib.amp_file_load(path.encode(), file_tensors([items[0], items[2]]), 2, None) == 0, "the others")
    del texts["amp.crc32.b"]
    safetensors.numpy.save_file(tensors, path, texts)
    check(lib.amp_file_load(path.encode(), file_tensors(items), 3, None) == 0, "a changed tensor without checksum")
    check(raw(items[1]) == tensors["b"].tobytes(), "its values")


def verdicts(lib, path, rng, rounds=3000):
    """Whatever we accept of a damaged file, the library accepts too (we may be stricter)."""
    items = [("a", F32, (2, 3), ctypes.create_string_buffer(24)), ("b", F16, (2,), ctypes.create_string_buffer(4))]
    lib.amp_file_save(path.encode(), file_tensors(items), 2, (FileText * 1)(FileText(b"k", b"v")), 1, None)
    with open(path, "rb") as f:
        good = f.read()
    accepted = 0
    alphabet = b'{}[]",:0123456789\\u \nFa\xc3\x00'
    for _ in range(rounds):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 3)):
            at = int(rng.integers(0, len(good) - 28))
            kind = rng.integers(0, 3)
            if kind == 0:
                bad[at] = alphabet[rng.integers(0, len(alphabet))]
            elif kind == 1:
                bad.insert(max(8, at), alphabet[rng.integers(0, len(alphabet))])
            else:
                del bad[max(8, at)]
        if rng.integers(0, 2):
            bad[:8] = (len(bad) - 8 - 28).to_bytes(8, "little")
        with open(path, "wb") as f:
            f.write(bad)
        r = lib.amp_file_load(path.encode(), None, 0, None)
        try:
            safetensors.deserialize(bytes(bad))
            theirs = True
        except safetensors.SafetensorError:
            theirs = False
        accepted += r == 0
        check(r in (0, -10) and (r != 0 or theirs), "accepted here only: %r" % bytes(bad))
    check(0 < accepted < rounds, "%d of %d accepted" % (accepted, rounds))


def main():
    lib = ctypes.CDLL(os.path.abspath(sys.argv[1]))
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        for n, test in enumerate([ours_to_theirs, theirs_to_ours, numpy_to_ours, changed_by_them, verdicts]):
            test(lib, os.path.join(folder, "file%d.safetensors" % n), rng)
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
