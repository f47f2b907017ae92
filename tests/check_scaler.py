"""check_scaler.py LIBRARY - our scaler beside torch.amp.GradScaler("cpu") on random overflow traces, and beside the rules of
systems that are not installed, written out with Python's doubles and NumPy's floats.

LIBRARY is a shared library made of shim_optim.c and the implementation of amp.h. Everything is compared to the bit:
the scale, the tracker, which steps are applied, the unscaled gradients and the weights after SGD.
"""
import ctypes
import random
import sys
import warnings

import numpy as np
import torch

PYTORCH, MANAGER, APEX, ONEFLOW, NNABLA, DEEPSPEED, DEEPSPEED_0_17_0, TF_LEGACY = 0, 2, 4, 5, 8, 10, 12, 15   # amp_scaler_preset
F32 = 1
passed = failed = 0


def check(ok, text):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok and failed <= 20:
        print("failed:", text)


def load(path):
    lib = ctypes.CDLL(path)
    lib.shim_scaler_new.restype = ctypes.c_void_p
    lib.shim_scaler_new.argtypes = [ctypes.c_int, ctypes.c_float] + [ctypes.c_double] * 2 + [ctypes.c_int] * 2
    lib.shim_scaler_scale.restype = lib.shim_scaler_scale_loss.restype = ctypes.c_float
    lib.shim_scaler_scale_loss.argtypes = [ctypes.c_void_p, ctypes.c_float]
    lib.shim_scaler_advance.restype = ctypes.c_double
    lib.shim_scaler_advance.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    for name in ("free", "scale", "tracker", "may_step", "update"):
        getattr(lib, "shim_scaler_" + name).argtypes = [ctypes.c_void_p]
    lib.shim_scaler_unscale.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t,
                                        ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_ulonglong)]
    return lib


def single(x):
    """The nearest float32, as a Python number."""
    return float(np.float32(x))


def trace(lib, rng, number):
    growth, backoff = rng.uniform(1.05, 4.0), rng.uniform(0.1, 0.95)       # doubles, as PyTorch takes them
    interval, init = rng.randint(1, 6), single(2.0 ** rng.uniform(-10, 60))
    rate, n, lr = rng.uniform(0, 0.8), rng.randint(1, 100), 0.125
    theirs = torch.amp.GradScaler("cpu", init_scale=init, growth_factor=growth, backoff_factor=backoff,
                                  growth_interval=interval)
    ours = lib.shim_scaler_new(PYTORCH, init, growth, backoff, interval, 0)
    p = torch.nn.Parameter(torch.from_numpy(np.random.default_rng(number).standard_normal(n).astype(np.float32)))
    optimizer = torch.optim.SGD([p], lr=lr)
    w = p.detach().numpy().copy()
    norm, bad = ctypes.c_double(), ctypes.c_ulonglong()
    for step in range(60):
        place = f"trace {number} step {step}"
        one = torch.ones(())
        scaled = float(theirs.scale(one))
        check(scaled == lib.shim_scaler_scale_loss(ours, 1.0), place + ": scaled loss")
        g = (np.random.default_rng([number, step]).standard_normal(n) * np.float64(scaled)).astype(np.float32)
        if rng.random() < rate:
            for i in rng.sample(range(n), rng.randint(1, n)):
                g[i] = rng.choice([np.inf, -np.inf, np.nan])
        hits = int(np.count_nonzero(~np.isfinite(g)))      # those, and what the scale itself has made too large
        p.grad = torch.from_numpy(g.copy())
        before = p.detach().clone()
        theirs.unscale_(optimizer)
        check(lib.shim_scaler_unscale(ours, g.ctypes.data, F32, n, ctypes.byref(norm), ctypes.byref(bad)) == 0, place)
        check(bad.value == hits, place + ": count")
        may = lib.shim_scaler_may_step(ours)
        theirs.step(optimizer)
        if may:
            check(np.array_equal(g.view(np.uint32), p.grad.numpy().view(np.uint32)), place + ": unscaled gradients")
            w = (w - np.float32(lr) * g).astype(np.float32)     # lr is a power of two: the product is exact
        check(np.array_equal(w, p.detach().numpy()), place + ": weights")
        check(bool(may) == (hits == 0) and (hits == 0 or torch.equal(before, p.detach())), place + ": applied")
        theirs.update()
        useless = not 2.0**-128 < theirs.get_scale() < np.inf      # we call that an error
        check(lib.shim_scaler_update(ours) == (-8 if useless else 0), place + ": update")
        check(np.float32(theirs.get_scale()) == np.float32(lib.shim_scaler_scale(ours)), place + ": scale")
        check(theirs._get_growth_tracker() == lib.shim_scaler_tracker(ours), place + ": tracker")
    lib.shim_scaler_free(ours)


# --- rules: generators that take "overflow?" and give the scale, or None where the system gives up -----------------------

def manager(scale, factor, window, _):
    """mindspore.DynamicLossScaleManager: doubles, and a reciprocal."""
    clean = bad = 0
    while True:
        if (yield scale):
            scale, clean, bad = max(scale * (1 / factor), 1.0), 0, bad + 1
        else:
            clean, bad = clean + 1, 0
            if clean % window == 0:
                scale *= factor
        if bad > 1000:
            scale = None


def apex(scale, _factor, window, _):
    scale, clean = min(2.0 ** 24, scale), 0
    while True:
        overflow = yield scale
        clean = 0 if overflow else clean + 1
        if overflow:
            scale /= 2
        if clean == window:
            scale, clean = min(2.0 ** 24, scale * 2), 0


def single_divided(scale, factor, window, _, oneflow=False):
    """OneFlow's kernel, and TensorFlow 1, which keeps a scale that would become infinite."""
    scale, factor, clean = np.float32(scale), np.float32(factor), 0
    while True:
        if (yield float(scale)):
            scale, clean = max(scale / factor, np.float32(1)), 0
        elif clean + 1 < window:
            clean += 1
        else:
            grown, clean = float(scale) * float(factor), 0
            limit = float(np.finfo(np.float32).max)
            scale = np.float32(min(grown, limit)) if oneflow or grown < 3.4028235677973366e38 else scale


def nnabla(scale, factor, window, _):
    counter = retries = 0
    while True:
        if (yield scale):
            scale, counter, retries = scale / factor, 0, retries + 1
            if retries > 100:
                scale = None
        else:
            retries = 0
            if counter > window:
                scale, counter = scale * factor, 0
            counter += 1


def deepspeed(scale, factor, window, delay, late=1):
    step, last, left = 0, -1, delay
    while True:
        if (yield scale):
            last = step
            if left > 1:
                left -= 1
            else:
                scale = None if scale == 1 else max(scale / factor, 1.0)
        elif step - last - late > 0 and (step - last - late) % window == 0:
            scale, left = scale * factor, delay
        step += 1


RULES = ((MANAGER, manager, 1), (APEX, apex, 1), (NNABLA, nnabla, 1), (TF_LEGACY, single_divided, 1),
         (ONEFLOW, lambda *a: single_divided(*a, oneflow=True), 1), (DEEPSPEED, deepspeed, 4),
         (DEEPSPEED_0_17_0, lambda *a: deepspeed(*a, late=0), 4))


def rule_trace(lib, rng, preset, rule, delays):
    init, window, delay = single(2.0 ** rng.uniform(0, 40)), rng.randint(1, 6), rng.randint(1, delays)
    factor, rate = 2.0 if preset == APEX else rng.choice([1.7, 2.5, 3.0, 5.0, 7.0, rng.uniform(1.01, 9)]), rng.uniform(0.1, 0.9)
    ours = lib.shim_scaler_new(preset, init, factor, 0.0, window, delay)
    theirs, hit = rule(init, factor, window, delay), ctypes.c_int()
    next(theirs)
    for step in range(300):
        overflow = rng.random() < rate
        want, got = theirs.send(overflow), lib.shim_scaler_advance(ours, overflow, ctypes.byref(hit))
        if want is None:
            check(hit.value & 3, f"preset {preset}, factor {factor}, step {step}: no limit")
            break
        check(got == want, f"preset {preset}, factor {factor}, step {step}: {got!r}, not {want!r}")
    lib.shim_scaler_free(ours)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lib, rng = load(sys.argv[1]), random.Random(7)
    for number in range(240):
        trace(lib, rng, number)
    for preset, rule, delays in RULES:
        for _ in range(200):
            rule_trace(lib, rng, preset, rule, delays)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
