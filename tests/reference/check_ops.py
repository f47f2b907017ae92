#!/usr/bin/env python3
"""check_ops.py - compares every operator of the `ops` section with PyTorch.

usage: check_ops.py LIBRARY      a shared library that was built from amp.h, e.g.
       echo '#define AMP_IMPLEMENTATION
       #include "amp.h"' | cc -x c - -I. -O2 -shared -fPIC -o libamp.so -lm

Inputs are FP32 numbers from fixed seeds. The reference is PyTorch in float64; the difference to it is allowed to be
  unit * 2^-24 * size,   size = the same operator over the absolute values where it is a sum of products, so that
the bound is the classical |error| <= gamma_k * sum |a_i b_i| with gamma_k ~ k * 2^-24; results in F16 or BF16 may in
addition be off by the rounding to that type, half a unit in its last place (2^-11 or 2^-8 of the value, 2^-25 in
half's subnormal range). PyTorch in FP32 is compared too, at the same bound on each side."""
import ctypes
import sys

import numpy as np
import torch
import torch.nn.functional as F

F32, F16, BF16 = 1, 2, 3
TORCH = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
EPS = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
TINY = {F32: 2.0**-149, F16: 2.0**-25, BF16: 2.0**-134}
U = 2.0**-24

passed = failed = 0
rng = np.random.default_rng(20)


class Conv(ctypes.Structure):
    _fields_ = [(k, ctypes.c_int) for k in (
        "n channels height width out_channels kernel_h kernel_w stride_h stride_w pad_h pad_w "
        "dilation_h dilation_w groups pad_end_h pad_end_w output_pad_h output_pad_w").split()]


class Gemm(ctypes.Structure):
    _fields_ = [(k, ctypes.c_int) for k in ("trans_a", "trans_b")] + [(k, ctypes.c_size_t) for k in (
        "m n k lda ldb ldc batch a_stride b_stride c_stride").split()]


class Pool(ctypes.Structure):
    _fields_ = [(k, ctypes.c_int) for k in (
        "kind n channels height width kernel_h kernel_w stride_h stride_w pad_h pad_w exclude_pad "
        "pad_end_h pad_end_w").split()]


class Ref(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int)]


class CrossEntropy(ctypes.Structure):
    _fields_ = [("smoothing", ctypes.c_float), ("ld", ctypes.c_size_t), ("ignored", ctypes.c_void_p),
                ("class_weights", ctypes.c_void_p), ("pixels", ctypes.c_size_t)]


class Attention(ctypes.Structure):
    _fields_ = [(k, ctypes.c_size_t) for k in (
        "batch queries keys heads kv_heads head_size ldq ldk ldv ldy key_stride").split()] + [
        ("causal", ctypes.c_int), ("window", ctypes.c_size_t), ("scale", ctypes.c_float), ("lengths", ctypes.c_void_p)]


class Rope(ctypes.Structure):
    _fields_ = [(k, ctypes.c_size_t) for k in "batch positions heads head_size width".split()] + [
        ("theta", ctypes.c_float), ("interleaved", ctypes.c_int), ("offset", ctypes.c_size_t)]


class BatchNorm(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int), ("channels", ctypes.c_int), ("spatial", ctypes.c_int),
                ("eps", ctypes.c_float), ("momentum", ctypes.c_float), ("frozen", ctypes.c_int)]


class GroupNorm(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int), ("channels", ctypes.c_int), ("spatial", ctypes.c_int), ("groups", ctypes.c_int),
                ("eps", ctypes.c_float)]


def normal(*shape, dtype=F32):
    """Standard normal numbers that the type holds exactly."""
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(TORCH[dtype])


def empty(*shape, dtype=F32):
    return torch.full(shape, float("nan"), dtype=TORCH[dtype])


def arg(a):
    """A Python value as ctypes wants it: tensors by address, ints as size_t, floats as float."""
    if isinstance(a, torch.Tensor):
        assert a.is_contiguous()
        return ctypes.c_void_p(a.data_ptr())
    if isinstance(a, float):
        return ctypes.c_float(a)
    if isinstance(a, int):
        return ctypes.c_size_t(a)
    return ctypes.byref(a) if isinstance(a, ctypes.Structure) else a


def enum(v):
    return ctypes.c_int(v)


# Arguments as the calls below give them: r a tensor and its type, g gamma, beta and their type, s a smoothing,
# 0 and f an argument left at 0, . any other.
FORMS = {
    "gemm": "..rr.r.", "linear_forward": "rrrr....", "linear_backward": "rrrrrr.....",
    "conv2d_forward": ".rrrr.", "conv2d_backward": ".rrrrrr..",
    "conv_transpose2d_forward": ".rrrr.", "conv_transpose2d_backward": ".rrrrrr..", "pool2d_forward": ".rr.", "pool2d_backward": ".rrr0.",
    "batch_norm_forward": "..rg....r.", "batch_norm_backward": ".rrr..rg..", "layer_norm_forward": "rg...r...",
    "group_norm_forward": ".rg..r.", "group_norm_backward": ".rrr..rg..",
    "layer_norm_backward": "rrrf..rg....", "rms_norm_forward": "rr..r...", "rms_norm_backward": "rrrf.rr....",
    "activation_forward": ".rr..", "activation_backward": ".rrr0..",
    "leaky_relu_forward": "rr...", "leaky_relu_backward": "rrr0...",
    "softmax_forward": "rr...", "softmax_backward": "rrr0...", "dropout_forward": "rr.....", "add_forward": "rrr..",
    "attention_forward": ".rrrr..", "attention_backward": ".rrrrr.rrr0.", "rope_forward": ".rr.", "rope_backward": ".rr0.",
    "mul_forward": "rrr...", "mul_backward": "rrrrr0...",
    "concat_forward": "r.r....", "concat_backward": "r..r....", "softmax_cross_entropy_forward": "r.s....",
    "softmax_cross_entropy_backward": "r.s..r...", "mse_forward": "rr...", "mse_backward": "rr..r..",
    "bce_with_logits_forward": "rr...", "bce_with_logits_backward": "rr..r..",
}


def refs(form, args):
    """The call's arguments: references by value in place of tensors and types."""
    args, out = list(args), []
    for kind in form:
        if kind in "rg":
            tensors = [args.pop(0) for _ in range(1 + (kind == "g"))]
            dtype = args.pop(0).value
            out += [Ref(None if x is None else x.data_ptr(), dtype) for x in tensors]
        elif kind == "s":
            s = args.pop(0)
            out.append(ctypes.byref(s if isinstance(s, CrossEntropy) else CrossEntropy(s, 0, None)))
        else:
            out.append(enum(0) if kind == "0" else ctypes.c_float(0) if kind == "f" else arg(args.pop(0)))
    assert not args, form
    return out


def call(name, *args):
    form = FORMS.get(name[len("amp_"):])
    code = getattr(lib, name)(*(refs(form, args) if form else [arg(a) for a in args]))
    if code != 0:
        check(name, None, None, 0, code)


def check(name, got, want, bound, code=0, dtype=F32):
    """|got - want| <= bound + the rounding to dtype; bound may be a tensor."""
    global passed, failed
    if code == 0:
        want = want.double()
        allowed = bound + want.abs() * (EPS[dtype] * 1.001) + TINY[dtype]
        difference = (got.double() - want).abs()
        ok = bool((difference <= allowed).all())
        worst = float((difference / allowed).max()) if difference.numel() else 0.0
        text = "worst %.3g of the bound" % worst
    else:
        ok, text = False, "returned %d" % code
    passed, failed = passed + ok, failed + (not ok)
    if not ok:
        print("FAILED %s: %s" % (name, text))


def both(name, got, op64, op32, bound, dtype=F32):
    """Against float64 within the bound, against PyTorch's FP32 within twice the bound."""
    check(name, got, op64, bound, dtype=dtype)
    check(name + " (FP32)", got, op32, 2 * bound, dtype=dtype)


def gradients(function, inputs, dy, dtype=torch.float64):
    """Output and gradients of a function by PyTorch, in dtype."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in inputs]
    y = function(*leaves)
    y.backward(dy.to(dtype) if dy is not None else None)
    return [y.detach()] + [None if t is None else t.grad for t in leaves]


def sizes(function, inputs, dy):
    """The same with absolute values everywhere: the sums of |a*b| of the error bound."""
    return gradients(function, [None if t is None else t.abs() for t in inputs], dy.abs())


# --- matrix products --------------------------------------------------------------------------

def test_gemm():
    for m, n, k in [(1, 1, 1), (3, 5, 7), (17, 33, 65), (64, 48, 129), (200, 10, 300), (5, 257, 40)]:
        for at, bt in [(F32, F32), (F16, F16), (BF16, BF16), (F16, F32)]:
            for ta, tb in [(0, 0), (0, 1), (1, 0), (1, 1)]:
                a, b = normal(*((k, m) if ta else (m, k)), dtype=at), normal(*((n, k) if tb else (k, n)), dtype=bt)
                ct = [F32, F16][(m + ta) % 2]
                c = normal(m, n, dtype=ct)
                alpha, beta = 0.75, [0.0, 0.5][tb]
                A, B = (a.T if ta else a).double(), (b.T if tb else b).double()
                want = alpha * (A @ B) + beta * c.double()
                size = alpha * (A.abs() @ B.abs()) + beta * c.double().abs()
                want32 = alpha * (A.float() @ B.float()) + beta * c.float()
                s = Gemm(ta, tb, m, n, k, a.shape[1], b.shape[1], n)
                call("amp_gemm", s, alpha, a, enum(at), b, enum(bt), beta, c, enum(ct), None)
                both("gemm %dx%dx%d" % (m, n, k), c, want, want32, (k + 3) * U * size, ct)


def test_linear():
    for n, i, o in [(1, 1, 1), (4, 7, 3), (32, 100, 10), (65, 48, 33)]:
        for t in (F32, F16, BF16):
            x, w, b, dy = normal(n, i, dtype=t), normal(o, i, dtype=t), normal(o, dtype=t), normal(n, o, dtype=t)
            ref, ref32 = (gradients(F.linear, (x, w, b), dy, d) for d in (torch.float64, torch.float32))
            size = sizes(F.linear, (x, w, b), dy)
            y, dx, dw, db = empty(n, o), empty(n, i, dtype=t), empty(o, i), empty(o)
            call("amp_linear_forward", x, enum(t), w, enum(t), b, enum(t), y, enum(F32), n, i, o, None)
            call("amp_linear_backward", dy, enum(t), x, enum(t), w, enum(t), dx, enum(t), dw, enum(F32), db, enum(F32),
                 enum(0), n, i, o, None)
            for name, got, j, k, dt in [("y", y, 0, i, F32), ("dx", dx, 1, o, t), ("dw", dw, 2, n, F32), ("db", db, 3, n, F32)]:
                both("linear %dx%dx%d %s" % (n, i, o, name), got, ref[j], ref32[j], (k + 2) * U * size[j], dt)
            call("amp_linear_backward", dy, enum(t), x, enum(t), w, enum(t), None, enum(t), dw, enum(F32), None, enum(F32),
                 enum(1), n, i, o, None)
            check("linear accumulate", dw, 2 * ref[2], (n + 4) * 2 * U * size[2])


def test_conv2d():
    for _ in range(24):
        g = int(rng.choice([1, 1, 2, 4]))
        c, o = g * int(rng.integers(1, 5)), g * int(rng.integers(1, 5))
        if rng.random() < 0.2:
            g = c
            o = c * int(rng.integers(1, 3))
        n, kh, kw = (int(v) for v in rng.integers(1, 4, 3))
        sh, sw, dh, dw_ = (int(v) for v in rng.integers(1, 4, 4))
        ph, pw = (int(v) for v in rng.integers(0, 3, 2))
        h = dh * (kh - 1) + 1 + int(rng.integers(0, 12))
        w_ = dw_ * (kw - 1) + 1 + int(rng.integers(0, 20))
        t = int(rng.choice([F32, F32, F16, BF16]))
        shape = Conv(n, c, h, w_, o, kh, kw, sh, sw, ph, pw, dh, dw_, g)
        x, w, b = normal(n, c, h, w_, dtype=t), normal(o, c // g, kh, kw, dtype=t), normal(o, dtype=t)

        def f(x, w, b):
            return F.conv2d(x, w, b, (sh, sw), (ph, pw), (dh, dw_), g)
        oh, ow = ctypes.c_int(), ctypes.c_int()
        call("amp_conv2d_output", shape, ctypes.byref(oh), ctypes.byref(ow), None)
        dy = normal(n, o, oh.value, ow.value, dtype=t)
        ref, ref32 = (gradients(f, (x, w, b), dy, d) for d in (torch.float64, torch.float32))
        size = sizes(f, (x, w, b), dy)
        y, dx, dw, db = empty(*dy.shape), empty(*x.shape, dtype=t), empty(*w.shape), empty(o)
        call("amp_conv2d_forward", shape, x, enum(t), w, enum(t), b, enum(t), y, enum(F32), None)
        call("amp_conv2d_backward", shape, dy, enum(t), x, enum(t), w, enum(t), dx, enum(t), dw, enum(F32), db,
             enum(F32), enum(0), None)
        pixels = n * oh.value * ow.value
        for name, got, j, k, dt in [("y", y, 0, c // g * kh * kw, F32), ("dx", dx, 1, o // g * kh * kw, t),
                                    ("dw", dw, 2, pixels, F32), ("db", db, 3, pixels, F32)]:
            both("conv2d %s" % name, got, ref[j], ref32[j], (k + 2) * U * size[j], dt)


def test_conv_transpose2d():
    for case in [(2, 3, 4, 5, 6, 4, 4, 2, 2, 1, 1, 1, 1, 1, 0, 0), (1, 32, 7, 7, 16, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1),
                 (2, 4, 3, 3, 4, 1, 1, 2, 3, 0, 0, 1, 1, 1, 1, 2), (2, 24, 6, 9, 24, 3, 3, 2, 2, 1, 1, 1, 1, 24, 1, 1),
                 (1, 6, 4, 4, 3, 3, 2, 1, 1, 0, 0, 2, 3, 3, 0, 0), (8, 100, 1, 1, 64, 4, 4, 1, 1, 0, 0, 1, 1, 1, 0, 0)]:
        n, c, h, w, o, kh, kw, sh, sw, ph, pw, dh, dw, g, oph, opw = case
        for t in (F32, F16, BF16):
            x, weight, b = normal(n, c, h, w, dtype=t), normal(c, o // g, kh, kw, dtype=t), normal(o, dtype=t)

            def f(x, w, b):
                return F.conv_transpose2d(x, w, b, (sh, sw), (ph, pw), (oph, opw), g, (dh, dw))
            dy = normal(*f(x.double(), weight.double(), b.double()).shape, dtype=t)
            shape = Conv(*case[:14], 0, 0, oph, opw)
            height, width = ctypes.c_int(), ctypes.c_int()
            lib.amp_conv_transpose2d_output(ctypes.byref(shape), ctypes.byref(height), ctypes.byref(width), None)
            check("conv transpose size", torch.tensor([height.value, width.value]), torch.tensor(dy.shape[2:]), 0.0)
            ref, size = gradients(f, (x, weight, b), dy), sizes(f, (x, weight, b), dy)
            y, dx, dweight, db = empty(*dy.shape, dtype=t), empty(*x.shape, dtype=t), empty(*weight.shape), empty(o)
            call("amp_conv_transpose2d_forward", shape, x, enum(t), weight, enum(t), b, enum(t), y, enum(t), None)
            call("amp_conv_transpose2d_backward", shape, dy, enum(t), x, enum(t), weight, enum(t), dx, enum(t), dweight,
                 enum(F32), db, enum(F32), enum(0), None)
            for name, got, j, k, dt in [("y", y, 0, c // g * kh * kw, t), ("dx", dx, 1, o // g * kh * kw, t),
                                        ("dw", dweight, 2, n * h * w, F32), ("db", db, 3, dy.numel() // o, F32)]:
                check("conv transpose %s" % name, got, ref[j], (k + 2) * U * size[j], dtype=dt)


# --- pooling and norms --------------------------------------------------------------------------

def test_pool2d():
    for i in range(60):
        kind = i % 2
        n, c = (int(v) for v in rng.integers(1, 4, 2))
        kh, kw = (int(v) for v in rng.integers(1, 6, 2))
        sh, sw = (int(v) for v in rng.integers(1, 5, 2))
        ph, pw = int(rng.integers(0, kh // 2 + 1)), int(rng.integers(0, kw // 2 + 1))
        h, w = kh + int(rng.integers(0, 30)), kw + int(rng.integers(0, 70))
        if i >= 52:
            h, w = [(100, 90), (3, 3000), (3, 5000), (300, 2)][(i - 52) // 2]
        if i >= 56:
            kh, kw, ph, pw = h, w, 0, 0
        exclude = int(rng.integers(0, 2))
        t = int(rng.choice([F32, F16, BF16]))
        x = normal(n, c, h, w, dtype=t)
        if i % 4 == 0:
            x = (x * 2).round()     # many equal maxima

        def f(x):
            if kind == 0:
                return F.max_pool2d(x, (kh, kw), (sh, sw), (ph, pw))
            return F.avg_pool2d(x, (kh, kw), (sh, sw), (ph, pw), count_include_pad=not exclude)
        shape = Pool(kind, n, c, h, w, kh, kw, sh, sw, ph, pw, exclude)
        dy = normal(*f(x.float()).shape, dtype=t)
        ref, ref32, size = gradients(f, (x,), dy), gradients(f, (x,), dy, torch.float32), gradients(f, (x,), dy.abs())
        size[0] = f(x.double().abs()) if kind else torch.zeros_like(ref[0])
        y, dx = empty(*dy.shape, dtype=t), empty(*x.shape, dtype=t)
        call("amp_pool2d_forward", shape, x, enum(t), y, enum(t), None)
        call("amp_pool2d_backward", shape, dy, enum(t), x, enum(t), dx, enum(t), None)
        both("pool2d %d y" % i, y, ref[0], ref32[0], (kh * kw + 1) * U * size[0], t)
        both("pool2d %d dx" % i, dx, ref[1], ref32[1], (kh * kw + 1) * U * size[1], t)


def test_upsample():
    for n, c, h, w, fh, fw in [(2, 3, 7, 5, 2, 2), (1, 2, 4, 9, 3, 3), (2, 2, 1, 30, 1, 4), (1, 1, 33, 70, 5, 2)]:
        for t in (F32, F16, BF16):
            x, dy = normal(n, c, h, w, dtype=t), normal(n, c, h * fh, w * fw, dtype=t)
            ref = gradients(lambda x: F.interpolate(x, scale_factor=(fh, fw), mode="nearest"), (x,), dy)
            sums = F.avg_pool2d(dy.double().abs(), (fh, fw), divisor_override=1)
            shape = Pool(2, n, c, h * fh, w * fw, fh, fw)
            y, dx = empty(*dy.shape, dtype=t), empty(*x.shape, dtype=t)
            call("amp_pool2d_backward", shape, x, enum(t), None, enum(t), y, enum(t), None)
            call("amp_pool2d_forward", shape, dy, enum(t), dx, enum(t), None)
            check("upsample y", y, ref[0], 0.0, dtype=t)
            check("upsample dx", dx, ref[1], fh * fw * U * sums, dtype=t)


def norm_bound(x, mean, gamma, beta, d):
    """Rounding of x - mean (which carries the error of the mean), of invstd, and of the last fma."""
    invstd = 1 / torch.sqrt(((x - mean) ** 2).mean(d, keepdim=True) + 1e-5)
    return U * (6 * (x - mean).abs() + 2 * mean.abs()) * invstd * gamma.abs() + U * beta.abs()


def test_batch_norm():
    for n, c, s, scale in [(2, 1, 1, 1.0), (8, 5, 1, 1.0), (300, 37, 1, 1.0), (3, 4, 6, 1.0), (5, 3, 49, 1.0), (4, 2, 784, 1.0),
                           (2, 3, 3000, 1.0), (16, 4, 100, 1000.0)]:
        for t in (F32, F16, BF16):
            x = (normal(n, c, s) + scale * (scale > 1)).to(TORCH[t])
            gamma, beta, dy = normal(c), normal(c), normal(n, c, s, dtype=t)
            rm, rv = normal(c), normal(c).abs()
            rm64, rv64 = rm.double(), rv.double()
            y, dx, dg, db, mean, inv = empty(n, c, s), empty(n, c, s, dtype=t), empty(c), empty(c), empty(c), empty(c)

            def f(x, g, b):
                return F.batch_norm(x, rm64.to(x.dtype).clone(), rv64.to(x.dtype).clone(), g, b, True, 0.1, 1e-5)
            ref = gradients(f, (x, gamma, beta), dy)
            F.batch_norm(x.double(), rm64, rv64, None, None, True, 0.1, 1e-5)
            shape, name = BatchNorm(n, c, s, 0.0, 0.0), "batch norm %dx%dx%d" % (n, c, s)
            call("amp_batch_norm_forward", shape, enum(1), x, enum(t), gamma, beta, enum(F32), rm, rv, mean, inv, y, enum(F32), None)
            call("amp_batch_norm_backward", shape, dy, enum(t), x, enum(t), gamma, enum(F32), mean, inv, dx, enum(t), dg, db,
                 enum(F32), enum(0), None)
            X, g, b = x.double(), gamma.double().view(1, c, 1), beta.double().view(1, c, 1)
            m = X.mean((0, 2), keepdim=True)
            check(name + " y", y, ref[0], norm_bound(X, m, g, b, (0, 2)))
            check(name + " mean", mean, m.flatten(), 0 * m.flatten())
            check(name + " running mean", rm, rm64, 2 * U * (1 + m.abs().flatten()))
            check(name + " running var", rv, rv64, 2 * U * (1 + rv64))
            xhat = ((X - m) / torch.sqrt(((X - m) ** 2).mean((0, 2), keepdim=True) + 1e-5))
            e = norm_bound(X, m, torch.ones_like(g), 0 * g, (0, 2))
            D = dy.double().abs()
            check(name + " dgamma", dg, ref[2], (D * (e + U * xhat.abs())).sum((0, 2)))
            check(name + " dbeta", db, ref[3], 0 * ref[3])
            k = g.abs() / torch.sqrt(((X - m) ** 2).mean((0, 2), keepdim=True) + 1e-5)
            mean_d, mean_dot = D.mean((0, 2), keepdim=True), (D * xhat.abs()).mean((0, 2), keepdim=True)
            bound = k * (4 * U * (D + mean_d + xhat.abs() * mean_dot) + e * mean_dot + xhat.abs() * (D * e).mean((0, 2), keepdim=True))
            check(name + " dx", dx, ref[1], bound, dtype=t)
            call("amp_batch_norm_forward", shape, enum(0), x, enum(t), gamma, beta, enum(F32), rm, rv, None, None, y, enum(F32), None)
            rm_, rv_ = rm.double().view(1, c, 1), rv.double().view(1, c, 1)
            want = (X - rm_) / torch.sqrt(rv_ + 1e-5) * g + b
            check(name + " evaluate", y, want, U * (4 * ((X - rm_) / torch.sqrt(rv_ + 1e-5) * g).abs() + b.abs()))
            shape.frozen = 1
            ref = gradients(lambda x, g, b: F.batch_norm(x, rm.to(x.dtype), rv.to(x.dtype), g, b, False, 0.1, 1e-5),
                            (x, gamma, beta), dy)
            call("amp_batch_norm_forward", shape, enum(1), x, enum(t), gamma, beta, enum(F32), rm, rv, mean, inv, y, enum(F32), None)
            call("amp_batch_norm_backward", shape, dy, enum(t), x, enum(t), gamma, enum(F32), mean, inv, dx, enum(t), dg, db,
                 enum(F32), enum(0), None)
            check(name + " frozen y", y, want, U * (4 * ((X - rm_) / torch.sqrt(rv_ + 1e-5) * g).abs() + b.abs()))
            check(name + " frozen dx", dx, ref[1], 4 * U * ref[1].abs(), dtype=t)
            check(name + " frozen dgamma", dg, ref[2], (D * 4 * U * ((X - rm_) / torch.sqrt(rv_ + 1e-5)).abs()).sum((0, 2)))
            check(name + " frozen dbeta", db, ref[3], 0 * ref[3])


def test_layer_norm():
    for r, d, offset in [(1, 1, 0), (3, 5, 0), (10, 64, 0), (7, 100, 0), (4, 768, 1000), (3, 2500, 0)]:
        for t in (F32, F16, BF16):
            x, gamma, beta, dy = (normal(r, d) + offset).to(TORCH[t]), normal(d), normal(d), normal(r, d, dtype=t)
            y, dx, dg, db, mean, inv = empty(r, d), empty(r, d, dtype=t), empty(d), empty(d), empty(r), empty(r)

            def f(x, g, b):
                return F.layer_norm(x, (d,), g, b)
            ref = gradients(f, (x, gamma, beta), dy)
            call("amp_layer_norm_forward", x, enum(t), gamma, beta, enum(F32), 0.0, mean, inv, y, enum(F32), r, d, None)
            call("amp_layer_norm_backward", dy, enum(t), x, enum(t), gamma, enum(F32), mean, inv, dx, enum(t), dg, db,
                 enum(F32), enum(0), r, d, None)
            X, g, b, name = x.double(), gamma.double(), beta.double(), "layer norm %dx%d" % (r, d)
            m = X.mean(1, keepdim=True)
            s = torch.sqrt(((X - m) ** 2).mean(1, keepdim=True) + 1e-5)
            xhat, e, D = (X - m) / s, norm_bound(X, m, torch.ones(1), torch.zeros(1), 1), dy.double().abs()
            G = D * g.abs()
            check(name + " y", y, ref[0], norm_bound(X, m, g, b, 1))
            check(name + " dgamma", dg, ref[2], (D * (e + U * xhat.abs())).sum(0))
            check(name + " dbeta", db, ref[3], 0 * ref[3])
            mg, md = G.mean(1, keepdim=True), (G * xhat.abs()).mean(1, keepdim=True)
            bound = (4 * U * (G + mg + xhat.abs() * md) + e * md + xhat.abs() * (G * e).mean(1, keepdim=True)) / s
            check(name + " dx", dx, ref[1], bound, dtype=t)


def test_rms_norm():
    for r, d, offset in [(1, 1, 0), (3, 5, 0), (10, 64, 3), (7, 100, 0), (4, 768, 1000), (3, 2500, 0)]:
        for t in (F32, F16, BF16):
            x, gamma, dy = (normal(r, d) + offset).to(TORCH[t]), normal(d), normal(r, d, dtype=t)
            y, dx, dg, inv = empty(r, d), empty(r, d, dtype=t), empty(d), empty(r)
            ref = gradients(lambda x, g: F.rms_norm(x, (d,), g, 1e-6), (x, gamma), dy)
            call("amp_rms_norm_forward", x, enum(t), gamma, enum(F32), 0.0, inv, y, enum(F32), r, d, None)
            call("amp_rms_norm_backward", dy, enum(t), x, enum(t), gamma, enum(F32), inv, dx, enum(t), dg, enum(F32), enum(0), r, d,
                 None)
            X, g, name = x.double(), gamma.double(), "rms norm %dx%d" % (r, d)
            s = torch.sqrt((X**2).mean(1, keepdim=True) + 1e-6)
            xhat, D = (X / s).abs(), dy.double().abs()
            G = D * g.abs()
            check(name + " y", y, ref[0], 4 * U * xhat * g.abs())
            check(name + " invstd", inv, 1 / s.flatten(), 2 * U / s.flatten())
            check(name + " dgamma", dg, ref[2], (D * 4 * U * xhat).sum(0))
            check(name + " dx", dx, ref[1], (4 * U * G + 6 * U * xhat * (G * xhat).mean(1, keepdim=True)) / s, dtype=t)


def test_group_norm():
    for n, c, s, groups, offset in [(2, 6, 1, 2, 0), (3, 4, 25, 2, 0), (2, 32, 49, 8, 5), (2, 5, 64, 0, 0), (1, 4, 3000, 1, 100)]:
        for t in (F32, F16, BF16):
            x, gamma, beta, dy = (normal(n, c, s) + offset).to(TORCH[t]), normal(c), normal(c), normal(n, c, s, dtype=t)
            g_, rows, shape = groups or c, n * (groups or c), GroupNorm(n, c, s, groups, 0.0)
            y, dx, dg, db, mean, inv = empty(n, c, s), empty(n, c, s, dtype=t), empty(c), empty(c), empty(rows), empty(rows)

            def f(x, g, b):
                return F.group_norm(x, groups, g, b) if groups else F.instance_norm(x, weight=g, bias=b)
            ref = gradients(f, (x, gamma, beta), dy)
            call("amp_group_norm_forward", shape, x, enum(t), gamma, beta, enum(F32), mean, inv, y, enum(F32), None)
            call("amp_group_norm_backward", shape, dy, enum(t), x, enum(t), gamma, enum(F32), mean, inv, dx, enum(t), dg, db,
                 enum(F32), enum(0), None)
            name = "group norm %dx%dx%d of %d" % (n, c, s, g_)
            view = (n, g_, c // g_, s)
            X, D = x.double().view(view), dy.double().abs().view(view)
            g, b = gamma.double().view(1, g_, c // g_, 1), beta.double().view(1, g_, c // g_, 1)
            m = X.mean((2, 3), keepdim=True)
            sd = torch.sqrt(((X - m) ** 2).mean((2, 3), keepdim=True) + 1e-5)
            xhat, e = (X - m) / sd, norm_bound(X, m, torch.ones_like(g), 0 * g, (2, 3))
            G = D * g.abs()
            check(name + " y", y, ref[0], norm_bound(X, m, g, b, (2, 3)).view(n, c, s))
            check(name + " mean", mean, m.flatten(), 0 * m.flatten())
            check(name + " dgamma", dg, ref[2], (D * (e + U * xhat.abs())).sum((0, 3)).flatten())
            check(name + " dbeta", db, ref[3], 0 * ref[3])
            mg, md = G.mean((2, 3), keepdim=True), (G * xhat.abs()).mean((2, 3), keepdim=True)
            bound = (4 * U * (G + mg + xhat.abs() * md) + e * md + xhat.abs() * (G * e).mean((2, 3), keepdim=True)) / sd
            check(name + " dx", dx, ref[1], bound.view(n, c, s), dtype=t)


# --- element by element -------------------------------------------------------------------------

def gelu_tanh(x):
    """The tanh form without its cancellation: (1 + tanh(u)) / 2 = sigmoid(2u)."""
    return x * torch.sigmoid(2 * (2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))


def test_activation():
    # For a GELU of a large negative number PyTorch subtracts nearly equal numbers, in float64 too. The sharp
    # reference is the same formula with erfc or sigmoid; the plain one is compared at FP32's absolute error.
    sharp = [torch.relu, lambda x: x * torch.erfc(-x / 2**0.5) / 2, gelu_tanh, torch.tanh, torch.sigmoid, F.silu,
             F.hardswish]
    plain = [torch.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.tanh, torch.sigmoid, F.silu,
             F.hardswish]
    for i in range(len(sharp)):
        for t in (F32, F16, BF16):
            x = torch.cat([normal(3000), 10 * normal(3000), 1e-3 * normal(1000)]).to(TORCH[t])
            x[x.abs() == 3] = 2     # at hard swish's kinks versions of PyTorch differ
            dy = normal(7000, dtype=t)
            ref, ref32 = gradients(sharp[i], (x,), dy), gradients(plain[i], (x,), dy, torch.float32)
            y, dx, y32 = empty(7000, dtype=t), empty(7000, dtype=t), empty(7000)
            call("amp_activation_forward", enum(i), x, enum(t), y, enum(t), 7000, None)
            call("amp_activation_forward", enum(i), x, enum(t), y32, enum(F32), 7000, None)
            saved, st = (x, t) if i in (1, 2, 5, 6) else (y32, F32)
            call("amp_activation_backward", enum(i), dy, enum(t), saved, enum(st), dx, enum(t), 7000, None)
            X, D = x.double().abs(), dy.double().abs()
            # The functions are good to 4 ulp = 8 units. The tanh form's argument u = 2*0.8*(x + 0.045 x^3) has a relative
            # error of 3 units, which the exponential turns into 3 u units of the result.
            # Factors below 2^-125 are flushed to 0.
            units = 8 + (3 * 1.6 * (X + 0.045 * X**3) if i == 2 else 0)
            check("activation %d y" % i, y, ref[0], units * U * ref[0].abs() + (1 + X) * 2.0**-125, dtype=t)
            check("activation %d y (FP32)" % i, y, ref32[0], 16 * U * (ref[0].abs() + X * (i in (1, 2, 5, 6))), dtype=t)
            # The slopes are sums of terms below 2; a saved output carries its own rounding; u as above.
            check("activation %d dx" % i, dx, ref[1], 16 * U * D, dtype=t)
            check("activation %d dx (FP32)" % i, dx, ref32[1], 32 * U * D, dtype=t)


def test_leaky_relu():
    for slope in (0.01, 0.1, 0.2, 0.0):
        for t in (F32, F16, BF16):
            x, dy = normal(5000, dtype=t), normal(5000, dtype=t)
            ref = gradients(lambda x: F.leaky_relu(x, slope), (x,), dy)
            y, dx = empty(5000, dtype=t), empty(5000, dtype=t)
            call("amp_leaky_relu_forward", x, enum(t), y, enum(t), 5000, slope, None)
            call("amp_leaky_relu_backward", dy, enum(t), y, enum(t), dx, enum(t), 5000, slope, None)
            # the slope is rounded to FP32, then the product
            check("leaky relu y", y, ref[0], 2 * U * ref[0].abs(), dtype=t)
            check("leaky relu dx", dx, ref[1], 2 * U * ref[1].abs(), dtype=t)


def test_mul():
    for c, pixels, shared in [(5, 77, 0), (64, 49, 1), (3, 4, 1), (2, 3000, 1), (7, 1, 1)]:
        for t in (F32, F16, BF16):
            a, dy = normal(3, c, pixels, dtype=t), normal(3, c, pixels, dtype=t)
            b = normal(3, c, 1 if shared else pixels, dtype=t)
            ref = gradients(lambda a, b: a * b, (a, b), dy)
            y, da, db, n = empty(*a.shape, dtype=t), empty(*a.shape, dtype=t), empty(*b.shape), a.numel()
            repeat = n // b.numel()
            call("amp_mul_forward", a, enum(t), b, enum(t), y, enum(t), n, repeat, None)
            call("amp_mul_backward", dy, enum(t), a, enum(t), b, enum(t), da, enum(t), db, enum(F32), n, repeat, None)
            check("mul y", y, ref[0], U * ref[0].abs(), dtype=t)
            check("mul da", da, ref[1], U * ref[1].abs(), dtype=t)
            check("mul db", db, ref[2], 2.0**-50 * (dy.double() * a.double()).abs().sum(2, keepdim=True))


def test_softmax():
    for r, d in [(1, 1), (4, 10), (5, 100), (3, 1000), (2, 3001)]:
        for t in (F32, F16, BF16):
            x, dy = (normal(r, d) * 4).to(TORCH[t]), normal(r, d, dtype=t)
            ref = gradients(lambda x: torch.softmax(x, 1), (x,), dy)
            y, y32, dx = empty(r, d, dtype=t), empty(r, d), empty(r, d, dtype=t)
            call("amp_softmax_forward", x, enum(t), y, enum(t), r, d, None)
            call("amp_softmax_forward", x, enum(t), y32, enum(F32), r, d, None)
            call("amp_softmax_backward", dy, enum(t), y32, enum(F32), dx, enum(t), r, d, None)
            depth = (x.double() - x.double().max(1, keepdim=True).values).abs()
            e = (8 + depth) * U * ref[0]      # the difference to the maximum, rounded, is the exponent
            check("softmax %dx%d y" % (r, d), y, ref[0], e, dtype=t)
            D = dy.double()
            S = (D * ref[0]).sum(1, keepdim=True)
            bound = e * (D - S).abs() + ref[0] * ((e * D.abs()).sum(1, keepdim=True) + 2 * U * (D.abs() + S.abs()))
            check("softmax %dx%d dx" % (r, d), dx, ref[1], 2 * bound, dtype=t)


def attend(causal, window, scale):
    """PyTorch's attention of rows of heads; a window is a mask, as it has none."""
    def f(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        t, s = q.shape[2], k.shape[2]
        behind = torch.arange(t)[:, None] + s - t - torch.arange(s)[None, :]
        mask = (behind >= 0) & (behind < (window or s)) if causal else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale or None, enable_gqa=True).transpose(1, 2)
    return f


def test_attention():
    for b, t, s, h, g, d, causal, window, scale in [
            (2, 64, 64, 3, 3, 64, 0, 0, 0.0), (1, 70, 130, 4, 2, 32, 1, 0, 0.0), (2, 150, 150, 2, 1, 16, 1, 40, 0.0),
            (1, 1, 300, 4, 1, 64, 1, 0, 0.0), (1, 33, 520, 2, 2, 80, 0, 0, 0.2), (1, 300, 300, 1, 1, 8, 1, 0, 0.0)]:
        for dt in (F32, F16, BF16):
            q, k, v, dy = (normal(b, n, m, d, dtype=dt) for n, m in ((t, h), (s, g), (s, g), (t, h)))
            shape = Attention(b, t, s, h, g, d, 0, 0, 0, 0, 0, causal, window, scale, None)
            y, lse, dq, dk, dv = empty(b, t, h, d, dtype=dt), empty(b, h, t), *(empty(*x.shape, dtype=dt) for x in (q, k, v))
            call("amp_attention_forward", shape, q, enum(dt), k, enum(dt), v, enum(dt), y, enum(dt), lse, None)
            call("amp_attention_backward", shape, dy, enum(dt), q, enum(dt), k, enum(dt), v, enum(dt), y, enum(dt), lse, dq, enum(dt),
                 dk, enum(dt), dv, enum(dt), None)
            f = attend(causal, window, scale)
            ref = gradients(f, (q, k, v), dy)
            # Scores are sums of d products. Weights, and gradients of scores, are rounded to the type; so is the y of the gradients.
            top = float((q.double().abs().amax() * k.double().abs().amax())) * d * (scale or d**-0.5)
            rounded = 0.0 if dt == F32 else 2 * EPS[dt]
            error = U * (d * top + s + 64) + rounded
            what = "attention %s %d %d" % ("f32 f16 bf16".split()[dt - 1], t, s)
            check(what, y, ref[0], error * float(v.double().abs().amax()), dtype=dt)
            for name, got, want, other in (("dq", dq, ref[1], k), ("dk", dk, ref[2], q), ("dv", dv, ref[3], dy)):
                size = float(other.double().abs().amax()) * float(want.abs().amax() + 1)
                check(what + " " + name, got, want, 4 * error * size * (t * h / g if name != "dq" else 1) ** 0.5, dtype=dt)


def test_rope():
    """The formula of Hugging Face's apply_rotary_pos_emb; interleaved: complex numbers, as Meta's."""
    for b, t, h, d, theta, offset in [(2, 40, 3, 64, 10000.0, 0), (1, 7, 2, 6, 500000.0, 1000)]:
        for interleaved in (0, 1):
            for dt in (F32, F16, BF16):
                x, dy = normal(b, t, h, d, dtype=dt), normal(b, t, h, d, dtype=dt)
                angle = torch.outer(torch.arange(t).double() + offset, theta ** (-torch.arange(0, d, 2).double() / d))

                def f(x):
                    if interleaved:
                        turn = torch.polar(torch.ones_like(angle), angle)[None, :, None, :]
                        pairs = torch.view_as_complex(x.double().reshape(b, t, h, d // 2, 2))
                        return torch.view_as_real(pairs * turn).reshape(b, t, h, d).to(x.dtype)
                    cos, sin = (torch.cat((w, w), -1)[None, :, None, :].to(x.dtype) for w in (angle.cos(), angle.sin()))
                    return x * cos + torch.cat((-x[..., d // 2:], x[..., :d // 2]), -1) * sin
                y, dx = empty(b, t, h, d, dtype=dt), empty(b, t, h, d, dtype=dt)
                shape = Rope(b, t, h, d, 0, theta, interleaved, offset)
                call("amp_rope_forward", shape, x, enum(dt), y, enum(dt), None)
                call("amp_rope_backward", shape, dy, enum(dt), dx, enum(dt), None)
                ref = gradients(f, (x,), dy)
                check("rope", y, ref[0], 8 * U * float(x.double().abs().amax()), dtype=dt)
                check("rope dx", dx, ref[1], 8 * U * float(dy.double().abs().amax()), dtype=dt)


def test_add_concat_dropout():
    for n in (1, 17, 5000):
        for at, bt, yt in [(F32, F32, F32), (F16, F16, F16), (BF16, F32, BF16), (F16, BF16, F32)]:
            a, b, y = normal(n, dtype=at), normal(n, dtype=bt), empty(n, dtype=yt)
            call("amp_add_forward", a, enum(at), b, enum(bt), y, enum(yt), n, None)
            check("add", y, a.float() + b.float(), 0.0, dtype=yt)
    parts = [normal(6, 5), normal(6, 3, dtype=F16), normal(6, 1500, dtype=BF16)]
    y, column = empty(6, 1508), 0
    for x, t in zip(parts, (F32, F16, BF16)):
        call("amp_concat_forward", x, enum(t), x.shape[1], y, enum(F32), 1508, column, 6, None)
        back = torch.ones_like(x)
        call("amp_concat_backward", y, enum(F32), 1508, column, back, enum(t), x.shape[1], 6, enum(2), None)
        check("concat backward", back, x.double() + 1, 0.0, dtype=t)
        column += x.shape[1]
    check("concat", y, torch.cat([p.double() for p in parts], 1), 0.0)
    x, y = torch.ones(100000), empty(100000)
    call("amp_dropout_forward", x, enum(F32), y, enum(F32), 100000, 0.25, ctypes.c_uint64(7), ctypes.c_uint64(3), None)
    kept = (y != 0).double().mean()
    check("dropout rate", kept, torch.tensor(0.75), 5 * (0.25 * 0.75 / 100000) ** 0.5)   # five standard deviations
    check("dropout scale", y[y != 0], torch.full_like(y[y != 0], 4 / 3), 0.0)


# --- losses ---------------------------------------------------------------------------------------

def test_cross_entropy_of_maps(scale):
    """Maps, class weights, an ignored label, and all of them ignored."""
    ignored = ctypes.c_int32(255)
    for n, k, h, w in [(2, 3, 5, 7), (3, 21, 9, 11), (4, 10, 1, 1), (1, 1, 3, 1), (1, 2100, 1, 2)]:
        for t in (F32, F16, BF16):
            for smoothing, weighted, share in [(0.0, 0, 0.3), (0.0, 1, 0.0), (0.1, 1, 0.3), (0.1, 0, 0.3), (0.1, 1, 1.0)]:
                x = (normal(n, k, h, w) * 3).to(TORCH[t])
                labels = torch.from_numpy(rng.integers(0, k, (n, h, w)).astype(np.int32))
                labels[torch.from_numpy(rng.random((n, h, w)) < share)] = 255
                weights = normal(k).abs() + 0.1 if weighted else torch.ones(k)

                def f(x):
                    return F.cross_entropy(x, labels.long(), weights.to(x.dtype) if weighted else None, ignore_index=255,
                                           label_smoothing=float(np.float32(smoothing)))
                ref, ref32 = gradients(f, (x,), None), gradients(f, (x,), None, torch.float32)
                if (labels == 255).all():     # PyTorch's mean of nothing is NaN, amp's 0
                    assert torch.isnan(ref[0])
                    ref, ref32 = [[torch.zeros_like(v) for v in r] for r in (ref, ref32)]
                desc = CrossEntropy(smoothing, 0, ctypes.addressof(ignored), weights.data_ptr() if weighted else None, h * w)
                loss, dx, name = torch.zeros(1), empty(n, k, h, w, dtype=t), "cross-entropy %dx%dx%dx%d" % (n, k, h, w)
                call("amp_softmax_cross_entropy_forward", x, enum(t), labels, desc, loss, n * h * w, k, None)
                call("amp_softmax_cross_entropy_backward", x, enum(t), labels, desc, ctypes.byref(scale), 0.5, dx, enum(t),
                     n * h * w, k, None)
                used, top = weights[labels[labels != 255].long()].double().sum().clamp(min=0.1), float(x.double().abs().max())
                size = float(weights.max()) * float((labels != 255).sum()) / float(used)
                both(name, loss[0], ref[0], ref32[0], U * (12 + 6 * top) * size)
                p, c = torch.softmax(x.double(), 1), weights.double().view(1, k, 1, 1)
                whole = weights.double().max()
                check(name + " dx", dx, 512 * ref[1], 512 * (10 + 2 * top) * U * whole * (p + c / whole) / used, dtype=t)


def test_losses():
    scale = ctypes.c_float(1024.0)
    for n, k in [(1, 1), (3, 2), (16, 10), (5, 1000), (4, 2100)]:
        for t in (F32, F16, BF16):
            for smoothing in (0.0, 0.1, 0.5):
                x = (normal(n, k) * 3).to(TORCH[t])
                labels = torch.from_numpy(rng.integers(0, k, n).astype(np.int32))

                def f(x):
                    return F.cross_entropy(x, labels.long(), label_smoothing=float(np.float32(smoothing)))
                ref, ref32 = gradients(f, (x,), None), gradients(f, (x,), None, torch.float32)
                loss, dx = torch.zeros(1), empty(n, k, dtype=t)
                call("amp_softmax_cross_entropy_forward", x, enum(t), labels, smoothing, loss, n, k, None)
                call("amp_softmax_cross_entropy_backward", x, enum(t), labels, smoothing, ctypes.byref(scale), 0.5, dx, enum(t),
                     n, k, None)
                top = float(x.double().abs().max())
                both("cross-entropy %dx%d" % (n, k), loss[0], ref[0], ref32[0], U * (8 + 4 * top))
                p = torch.softmax(x.double(), 1)
                bound = 512 * (8 + 2 * top) * U * (p + (1.0 + smoothing)) / n
                check("cross-entropy %dx%d dx" % (n, k), dx, 512 * ref[1], bound, dtype=t)
    test_cross_entropy_of_maps(scale)
    for n in (1, 40, 5000):
        for t in (F32, F16, BF16):
            x, target = (normal(n) * 3).to(TORCH[t]), normal(n).abs().clamp(max=1).to(TORCH[t])
            for name, f in [("mse", F.mse_loss), ("bce_with_logits", F.binary_cross_entropy_with_logits)]:
                ref = gradients(lambda x: f(x, target.to(x.dtype)), (x,), None)
                ref32 = gradients(lambda x: f(x, target.to(x.dtype)), (x,), None, torch.float32)
                loss, dx = torch.zeros(1), empty(n, dtype=t)
                call("amp_%s_forward" % name, x, enum(t), target, enum(t), loss, n, None)
                call("amp_%s_backward" % name, x, enum(t), target, enum(t), ctypes.byref(scale), 0.5, dx, enum(t), n, None)
                size = float((x.double().abs() + 1).mean())
                check(name, loss[0], ref[0], 4 * U * (ref[0].abs() + (size if name[0] == "b" else 0)))
                check(name + " (FP32)", loss[0], ref32[0], (n + 8) * U * (ref[0].abs() + size))
                check(name + " dx", dx, 512 * ref[1], 512 * 4 * U * (x.double().abs() + 1) / n, dtype=t)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    lib = ctypes.CDLL(sys.argv[1])
    tests = [test_pool2d, test_upsample, test_batch_norm, test_layer_norm, test_rms_norm, test_group_norm,
             test_activation, test_leaky_relu, test_mul,
             test_softmax, test_attention, test_rope, test_add_concat_dropout, test_losses]
    for test in [test_gemm, test_linear, test_conv2d, test_conv_transpose2d] + tests:
        if test in tests or hasattr(lib, "amp_gemm"):
            test()
    print("%d passed, %d failed" % (passed, failed))
    sys.exit(1 if failed or not passed else 0)
