"""check_scaler.py LIBRARY - our scaler beside torch.amp.GradScaler("cpu") on random overflow traces, beside the scalers of the
packages that are installed, and beside rules written out with Python's doubles and NumPy's floats. A line says which packages
ran and which were not there.

LIBRARY is a shared library made of shim_optim.c and the implementation of amp.h. Everything is compared to the bit:
the scale, the tracker, which steps are applied, the unscaled gradients and the weights after SGD.
"""
import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import random
import sys
import types
import warnings

import numpy as np

with contextlib.suppress(ImportError):
    import mindspore                # before torch, whose libraries hide some of its own
import torch

PRESETS = ("PYTORCH MINDSPORE MANAGER FIXED APEX ONEFLOW KERAS FLAX NNABLA MEGATRON DEEPSPEED CONSECUTIVE DEEPSPEED_0_17_0 "
           "PADDLE JMP TF_LEGACY STATIC CELL FAIRSEQ").split()              # amp_scaler_preset
PYTORCH, MINDSPORE, MANAGER, _, APEX, ONEFLOW, KERAS, FLAX, NNABLA, MEGATRON, DEEPSPEED, CONSECUTIVE, DEEPSPEED_0_17_0, \
    PADDLE, JMP, TF_LEGACY, _, CELL, FAIRSEQ = range(len(PRESETS))
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
    lib.shim_scaler_new.argtypes = [ctypes.c_int, ctypes.c_float] + [ctypes.c_double] * 2 + [ctypes.c_int] * 2 \
        + [ctypes.c_float, ctypes.c_double]
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
    ours = lib.shim_scaler_new(PYTORCH, init, growth, backoff, interval, 0, 0, 0)
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
    ours = lib.shim_scaler_new(preset, init, factor, 0.0, window, delay, 0, 0)
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


# --- the systems' own scalers: functions that take (init, growth, backoff, window, delay) and give a function "overflow?" -> scale,
# or None where the system gives up; each imports its package when it is made ----------------------------------------------------

def without_init(*names):
    """Packages whose __init__ is not run, so that one module of them is imported alone."""
    for name in names:
        places = [os.path.join(p, *name.split(".")) for p in sys.path]
        package = types.ModuleType(name)
        package.__path__ = [p for p in places if os.path.isdir(p)]
        if not package.__path__:
            raise ImportError(name)
        sys.modules[name] = package


def stand_in(name, **contents):
    """A module that a scaler imports and whose work is no part of the rule."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(contents)


def original_jmp():
    import jax.numpy as jnp
    import jmp

    def new(init, growth, _backoff, window, _delay):
        at = [jmp.DynamicLossScale(jnp.float32(init), period=window, factor=growth)]

        def step(overflow):
            at[0] = at[0].adjust(jnp.asarray(not overflow))
            return float(at[0].loss_scale)
        return step
    return new


def original_flax():
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale as scale

    def new(init, growth, backoff, window, _delay):
        at = [scale(growth_factor=growth, backoff_factor=backoff, growth_interval=window, scale=jnp.float32(init))]

        def step(overflow):
            slope = jnp.float32(np.inf if overflow else 1)
            at[0] = at[0].value_and_grad(lambda x: x * slope)(jnp.float32(1))[0]
            return float(at[0].scale)
        return step
    return new


def original_keras():
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    def new(init, _growth, _backoff, window, _delay):
        weight = keras.Variable(np.zeros(1, np.float32))
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=init, dynamic_growth_steps=window)
        optimizer.build([weight])

        def step(overflow):
            optimizer.apply([keras.ops.convert_to_tensor(np.float32([np.inf if overflow else 1]))])
            return float(optimizer.dynamic_scale.numpy())
        return step
    return new


def original_mindspore(make):
    if "mindspore" not in globals():
        raise ImportError("mindspore")
    return lambda init, growth, _backoff, window, _delay: make(mindspore, mindspore.Tensor, init, growth, window)


def mindspore_scaler(ms, Tensor, init, growth, window):
    scaler = ms.amp.DynamicLossScaler(init, int(growth), window)
    return lambda overflow: (scaler.adjust(Tensor(not overflow)), float(scaler.scale_value.asnumpy()))[1]


def mindspore_manager(ms, _, init, growth, window):
    scaler = ms.amp.DynamicLossScaleManager(init, growth, window)
    return lambda overflow: (scaler.update_loss_scale(overflow), scaler.get_loss_scale())[1]


def mindspore_cell(ms, Tensor, init, growth, window):
    cell, scale = ms.nn.DynamicLossScaleUpdateCell(init, growth, window), ms.Parameter(Tensor(init, ms.float32))
    return lambda overflow: (cell(scale, Tensor(overflow)), float(scale.asnumpy()))[1]


def original_paddle():
    import paddle

    def new(init, growth, backoff, window, delay):
        scaler = paddle.amp.GradScaler(enable=False)        # without a GPU it takes no settings
        scaler.__dict__.update(_enable=True, _scale=paddle.to_tensor(init, "float32"), _incr_ratio=growth, _decr_ratio=backoff,
                               _incr_every_n_steps=window, _decr_every_n_nan_or_inf=delay, _incr_count=0, _decr_count=0)

        def step(overflow):
            scaler._cache_found_inf = overflow
            with contextlib.redirect_stdout(None):          # it prints each reduction
                scaler._update()
            return scaler._scale.item()
        return step
    return new


def original_fairseq():
    without_init("fairseq", "fairseq.optim")
    scaler = importlib.import_module("fairseq.optim.dynamic_loss_scaler").DynamicLossScaler

    def new(init, growth, _backoff, window, delay):
        at = scaler(init_scale=init, scale_factor=growth, scale_window=window, tolerance=SHARES[delay])

        def step(overflow):
            try:
                at.check_overflow(np.inf if overflow else 1.0)
                at.update()
            except OverflowError:
                pass
            except FloatingPointError:
                return None
            return at.loss_scale
        return step
    return new


def original_megatron():
    without_init("megatron", "megatron.core", "megatron.core.optimizer")
    module = importlib.import_module("megatron.core.optimizer.grad_scaler")
    module.torch = types.SimpleNamespace(float=torch.float, max=torch.max, Tensor=torch.Tensor,     # on this processor
                                         tensor=lambda x, dtype, device: torch.tensor(x, dtype=dtype))

    def new(init, growth, backoff, window, delay):
        at = module.DynamicGradScaler(init, 1.0, growth, backoff, window, delay)
        return lambda overflow: (at.update(overflow), float(at.scale))[1]
    return new


def original_deepspeed(consecutive=False):
    without_init("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16")
    stand_in("deepspeed.runtime.config_utils", DeepSpeedConfigObject=object)
    stand_in("deepspeed.utils", log_dist=None, logger=None)
    stand_in("deepspeed.runtime.utils", has_inf_or_nan=None)
    stand_in("deepspeed.comm", get_rank=lambda: 1)          # rank 0 would print
    sys.modules["deepspeed"].comm = sys.modules["deepspeed.comm"]
    scaler = importlib.import_module("deepspeed.runtime.fp16.loss_scaler").DynamicLossScaler

    def new(init, growth, _backoff, window, delay):
        at = scaler(init, window, 1.0, delay, consecutive)
        at.scale_factor = growth

        def step(overflow):
            try:
                at.update_scale(overflow)
            except Exception:
                return None
            return at.cur_scale
        return step
    return new


SHARES = (0, 0.05, 0.25, 0.5, 1)
ANY, WHOLE, TWO, PAIR = range(4)    # factors: any, whole, 2 alone, or growth and backoff each
# Package; preset; what makes it; traces; its factors; the largest hysteresis; its floor where the preset's is another.
ORIGINALS = (("jmp", JMP, original_jmp, 20, ANY, 1, 0), ("flax", FLAX, original_flax, 10, PAIR, 1, 0),
             ("keras", KERAS, original_keras, 20, TWO, 1, 0), ("paddlepaddle", PADDLE, original_paddle, 20, PAIR, 4, -1),
             ("fairseq", FAIRSEQ, original_fairseq, 200, ANY, 4, 0), ("megatron-core", MEGATRON, original_megatron, 100, PAIR, 4, 0),
             ("deepspeed", DEEPSPEED, original_deepspeed, 100, ANY, 4, 0),
             ("deepspeed", CONSECUTIVE, lambda: original_deepspeed(True), 100, ANY, 4, 0),
             ("mindspore", MINDSPORE, lambda: original_mindspore(mindspore_scaler), 4, WHOLE, 1, 0),
             ("mindspore", MANAGER, lambda: original_mindspore(mindspore_manager), 100, ANY, 1, 0),
             ("mindspore", CELL, lambda: original_mindspore(mindspore_cell), 4, ANY, 1, 0))


def original_trace(lib, rng, name, preset, new, factors, delays, floor):
    """40 steps in a range in which no scale leaves the floats; growth and backoff are doubles. The interval is the system's."""
    init, window, delay = single(2.0 ** rng.uniform(2, 30)), rng.randint(1, 6), rng.randint(1, delays)
    growth = 2.0 if factors == TWO else float(rng.randint(2, 6)) if factors == WHOLE else rng.choice([1.7, 3.0, 5.0, rng.uniform(1.01, 6)])
    backoff = rng.uniform(0.1, 0.9) if factors == PAIR else 0.0
    share = SHARES[delay] if preset == FAIRSEQ else 0
    ours = lib.shim_scaler_new(preset, init, growth, backoff, window, 0 if preset == FAIRSEQ else delay, floor, share)
    theirs, rate, hit = new(init, growth, backoff, window, delay), rng.uniform(0.1, 0.9), ctypes.c_int()
    for step in range(40):
        overflow = rng.random() < rate
        want, got = theirs(overflow), lib.shim_scaler_advance(ours, overflow, ctypes.byref(hit))
        if want is None:
            check(hit.value & 3, f"{name} {PRESETS[preset]}, factor {growth}, step {step}: no limit")
            break
        check(got == want, f"{name} {PRESETS[preset]}, factor {growth}, step {step}: {got!r}, not {want!r}")
    lib.shim_scaler_free(ours)


def version(name):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "?"


def originals(lib, rng):
    ran, missing = [f"torch {torch.__version__}"], []
    for name, preset, make, traces, *rest in ORIGINALS:
        try:
            new = make()
        except ImportError as error:
            missing.append(f"{name} ({error})")
            continue
        for _ in range(traces):
            original_trace(lib, rng, name, preset, new, *rest)
        ran.append(f"{name} {version(name)}: {PRESETS[preset].lower()}")
    print("originals that ran:", "; ".join(ran))
    print("not here:", "; ".join(missing) or "none", "- by rules alone: apex, oneflow, nnabla, tensorflow 1, deepspeed 0.17.0")


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lib, rng = load(sys.argv[1]), random.Random(7)
    for number in range(240):
        trace(lib, rng, number)
    for preset, rule, delays in RULES:
        for _ in range(200):
            rule_trace(lib, rng, preset, rule, delays)
    originals(lib, rng)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
