#!/usr/bin/env python3
"""check_binding.py: cffi reads amp.h's declarations as the preprocessor leaves them, and calls the library through them.

A Python binding needs no second list of declarations: `cc -E -P`, what the C library's headers declare cut off, is a cdef.
"""
import os
import subprocess
import sys

from cffi import FFI

root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(root, "build")
cc = os.environ.get("CC", "cc")
library = os.path.join(out, "binding.so")
checks = failed = 0


def check(holds, what):
    global checks, failed
    checks += 1
    if not holds:
        failed += 1
        print("failed:", what)


text = subprocess.run([cc, "-E", "-P", "-std=c99", "-x", "c", "-"], input='#define AMP_BACKEND_API\n#include "amp.h"\n', cwd=root,
                      capture_output=True, text=True, check=True).stdout
ffi = FFI()
ffi.cdef(text[text.index("typedef enum amp_result"):])
subprocess.run([cc, "-std=c99", "-O1", "-shared", "-fPIC", "-x", "c", "-DAMP_IMPLEMENTATION", "amp.h", "-o",
                os.path.abspath(library), "-lm"], cwd=root, check=True)
amp = ffi.dlopen(os.path.abspath(library))

for name in ("amp_exec", "amp_ref", "amp_model_desc", "amp_backend", "amp_scaler", "amp_optimizer"):
    check(ffi.sizeof(name) > 0, name)
x = ffi.new("float[]", [1, 2, 3, 4])
low = ffi.new("amp_half[4]")
y = ffi.new("float[4]")
check(amp.amp_convert(amp.amp_f16(low), amp.amp_f32(x), 4) == amp.AMP_OK, "amp_convert")
check(low[2].bits == 0x4200, "the half of 3")
shape = ffi.new("amp_gemm_shape*", {"m": 2, "n": 2, "k": 2})
none = ffi.NULL
check(amp.amp_gemm(shape, 1.0, amp.amp_f16(low), amp.amp_f32(x), 0.0, amp.amp_f32(y), none) == amp.AMP_OK, "amp_gemm")
check(list(y) == [7, 10, 15, 22], "a product: %s" % list(y))
model = ffi.new("amp_model**")
desc = ffi.new("amp_model_desc*", {"batch": 2, "precision": {"level": amp.AMP_O2}})
check(amp.amp_model_create(model, desc) == amp.AMP_OK, "amp_model_create")
v = amp.amp_linear(model[0], amp.amp_relu(model[0], amp.amp_linear(model[0], amp.amp_input(model[0], 4, 1, 1), 8)), 3)
amp.amp_softmax_cross_entropy(model[0], v)
check(amp.amp_model_finalize(model[0]) == amp.AMP_OK, ffi.string(amp.amp_model_error(model[0])).decode())
amp.amp_model_destroy(model[0])
print("%d passed, %d failed" % (checks - failed, failed))
sys.exit(failed != 0)
