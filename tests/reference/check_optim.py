"""check_optim.py LIBRARY - our optimizers beside torch.optim, and LAMB beside timm's, over 100 steps.

LIBRARY is a shared library made of shim_optim.c and the implementation of amp.h. torch gets the float32 values of all
settings, so that both sides compute with the same constants. LAMB is skipped where timm is not installed.
"""
import ctypes
import importlib
import importlib.util
import sys
import types

import numpy as np
import torch

SGD, ADAM, ADAMW, LAMB, RMSPROP = range(5)
F32, F16, BF16 = 1, 2, 3
STATIC = 15
N, FIRST, STEPS = 2000, 1201, 100
passed = failed = 0


def check(ok, text):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok and failed <= 20:
        print("failed:", text)


def load(path):
    lib = ctypes.CDLL(path)
    for name in ("shim_scaler_new", "shim_optimizer_new"):
        getattr(lib, name).restype = ctypes.c_void_p
    lib.shim_scaler_new.argtypes = [ctypes.c_int, ctypes.c_float] + [ctypes.c_double] * 2 + [ctypes.c_int] * 2 \
        + [ctypes.c_float, ctypes.c_double]
    lib.shim_scaler_scale_loss.argtypes = [ctypes.c_void_p, ctypes.c_float]
    lib.shim_scaler_scale_loss.restype = lib.shim_schedule_lr.restype = ctypes.c_float
    for name in ("shim_scaler_update", "shim_scaler_free", "shim_optimizer_free"):
        getattr(lib, name).argtypes = [ctypes.c_void_p]
    lib.shim_optimizer_new.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
                                       ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
                                       ctypes.c_size_t, ctypes.c_size_t]
    lib.shim_optimizer_freeze.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.shim_optimizer_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_double)]
    lib.shim_schedule_lr.argtypes = [ctypes.c_int] + [ctypes.c_longlong] * 3 + [ctypes.c_float] * 3 + [ctypes.c_longlong]
    return lib


def single(x):
    return float(np.float32(x))


def timm_lamb():
    """timm.optim.lamb without importing the whole of timm, which would need torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None:
        return None
    for name, path in (("timm", spec.submodule_search_locations[0]),
                       ("timm.optim", spec.submodule_search_locations[0] + "/optim")):
        module = types.ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module
    return importlib.import_module("timm.optim.lamb").Lamb


# name, kind, lr, momentum, dampening, weight decay, eps, nesterov, maximize, clip
CASES = [
    ("sgd", SGD, 0.05, 0, 0, 0, 0, 0, 0, 0),
    ("sgd decay", SGD, 0.05, 0, 0, 0.1, 0, 0, 0, 0),
    ("momentum", SGD, 0.02, 0.9, 0, 0, 0, 0, 0, 0),
    ("dampening", SGD, 0.02, 0.9, 0.3, 0.01, 0, 0, 0, 0),
    ("nesterov", SGD, 0.02, 0.8, 0, 0.01, 0, 1, 0, 0),
    ("nesterov ascent", SGD, 0.02, 0.8, 0, 0.01, 0, 1, 1, 0),
    ("momentum clipped", SGD, 0.02, 0.9, 0, 0, 0, 0, 0, 5.0),
    ("adam", ADAM, 0.001, 0, 0, 0, 1e-8, 0, 0, 0),
    ("adam decay", ADAM, 0.01, 0, 0, 0.05, 1e-8, 0, 0, 0),
    ("adam large eps", ADAM, 0.01, 0, 0, 0, 0.25, 0, 1, 0),
    ("adam clipped", ADAM, 0.01, 0, 0, 0, 1e-3, 0, 0, 5.0),
    ("adamw", ADAMW, 0.001, 0, 0, 0.01, 1e-8, 0, 0, 0),
    ("adamw decay", ADAMW, 0.01, 0, 0, 0.3, 1e-4, 0, 0, 0),
    ("lamb", LAMB, 0.005, 0, 0, 0.01, 1e-6, 0, 0, 0),
    ("lamb large decay", LAMB, 0.01, 0, 0, 0.2, 1e-6, 0, 0, 0),
    ("lamb no decay", LAMB, 0.005, 0, 0, 0, 1e-6, 0, 0, 0),
    ("rmsprop", RMSPROP, 0.01, 0, 0, 0, 1e-8, 0, 0, 0),
    ("rmsprop decay", RMSPROP, 0.001, 0, 0, 0.05, 1e-6, 0, 1, 0),
    ("rmsprop momentum", RMSPROP, 0.001, 0.9, 0, 0.01, 1e-3, 0, 0, 0),
    ("rmsprop clipped", RMSPROP, 0.01, 0, 0, 0, 1e-3, 0, 0, 5.0),
]


def torch_optimizer(case, parts, lamb):
    _, kind, lr, momentum, dampening, decay, eps, nesterov, maximize, _ = case
    lr, decay, eps = single(lr), single(decay), single(eps)
    betas = (single(0.9), single(0.999))
    if kind == SGD:
        return torch.optim.SGD(parts, lr=lr, momentum=single(momentum), dampening=single(dampening), weight_decay=decay,
                               nesterov=bool(nesterov), maximize=bool(maximize))
    if kind == LAMB:
        return lamb(parts, lr=lr, betas=betas, eps=eps, weight_decay=decay, max_grad_norm=None, always_adapt=True)
    if kind == RMSPROP:
        return torch.optim.RMSprop(parts, lr=lr, alpha=single(0.99), eps=eps, weight_decay=decay, momentum=single(momentum),
                                   maximize=bool(maximize))
    make = torch.optim.Adam if kind == ADAM else torch.optim.AdamW
    return make(parts, lr=lr, betas=betas, eps=eps, weight_decay=decay, maximize=bool(maximize))


class Theirs:
    """torch's side, in float32 or float64."""

    def __init__(self, case, start, dtype, lamb):
        self.case, self.dtype = case, dtype
        whole = torch.from_numpy(start.copy()).to(dtype)
        self.parts = [torch.nn.Parameter(whole[:FIRST].clone()), torch.nn.Parameter(whole[FIRST:].clone())]
        self.optimizer = torch_optimizer(case, self.parts, lamb)

    def step(self, g, frozen):
        whole = torch.from_numpy(g.copy()).to(self.dtype)
        self.parts[0].grad, self.parts[1].grad = None if frozen else whole[:FIRST].clone(), whole[FIRST:].clone()
        if self.case[-1]:
            torch.nn.utils.clip_grad_norm_(self.parts, self.case[-1])
        self.optimizer.step()

    def weights(self):
        return torch.cat([p.detach() for p in self.parts]).double().numpy()


def run(lib, case, grad_dtype, lamb, thaws=False):
    """thaws: the first parameter is frozen in steps 0 to 29 and 50 to 69; torch finds no gradient then."""
    name, kind, lr, momentum, dampening, decay, eps, nesterov, maximize, clip = case
    rng = np.random.default_rng(len(name))
    scale = 1024.0
    w = rng.uniform(-1, 1, N).astype(np.float32)
    m, v = np.zeros(N, np.float32), np.zeros(N, np.float32)
    stored = np.zeros(N, np.float32 if grad_dtype == F32 else np.uint16)
    settings = np.array([lr, momentum, dampening, decay or -1, 0, 0, eps, clip], np.float32)
    scaler = lib.shim_scaler_new(STATIC, scale, 0, 0, 0, 0, 0, 0)
    ours = lib.shim_optimizer_new(kind, settings.ctypes.data, nesterov, maximize, w.ctypes.data, stored.ctypes.data, grad_dtype,
                                  m.ctypes.data, v.ctypes.data, FIRST, N)
    single_side, double_side = Theirs(case, w, torch.float32, lamb), Theirs(case, w, torch.float64, lamb)
    norm, types16 = ctypes.c_double(), {F16: torch.float16, BF16: torch.bfloat16}
    for step in range(STEPS):
        frozen = thaws and (step < 30 or 50 <= step < 70)
        lib.shim_optimizer_freeze(ours, frozen)
        # Pulls to zero and shakes; the same gradient for all three, as the 16-bit type stores it.
        g = torch.from_numpy((0.3 * double_side.weights() + rng.uniform(-0.5, 0.5, N)).astype(np.float32) * np.float32(scale))
        if grad_dtype != F32:
            half = g.to(types16[grad_dtype])
            stored[:] = half.view(torch.int16).numpy().view(np.uint16)
            g = half.float()
        else:
            stored[:] = g.numpy()
        g = g.numpy() / np.float32(scale)               # a power of two: exact
        lib.shim_scaler_scale_loss(scaler, 1.0)
        check(lib.shim_optimizer_step(ours, scaler, ctypes.byref(norm)) == 1, f"{name} step {step}: not applied")
        check(lib.shim_scaler_update(scaler) == 0, name)
        check(abs(norm.value / np.sqrt(np.sum(g.astype(np.float64) ** 2)) - 1) < 1e-12, f"{name} step {step}: norm {norm.value}")
        single_side.step(g, frozen)
        double_side.step(g, frozen)
    exact = double_side.weights()
    ours_error, their_error = np.abs(w - exact).max(), np.abs(single_side.weights() - exact).max()
    # Each step rounds the weight once (2^-24 of |w| < 4); the update errs by at most four roundings of the moments a step,
    # kept for 100 steps: 400 * 2^-24 of lr * D, with D <= 4 for Adam, 20 for a momentum buffer, 16 for LAMB,
    # 10 for RMSprop (1 / sqrt(1 - alpha), at first), ten times that with momentum.
    largest = {SGD: 20, LAMB: 16, RMSPROP: 100 if momentum else 10}.get(kind, 4)
    bound = STEPS * 2.0 ** -24 * (4 + 400 * lr * largest)
    label = f"{name}, gradients {('f32', 'f16', 'bf16')[grad_dtype - 1]}" + ", thawed" * thaws
    check(ours_error < bound, f"{label}: error {ours_error:.3g}, bound {bound:.3g}")
    check(ours_error < 4 * their_error + 2.0 ** -24, f"{label}: error {ours_error:.3g}, torch in float32 {their_error:.3g}")
    print(f"  {label:37} largest error against float64: ours {ours_error:.2e}, torch float32 {their_error:.2e}")
    lib.shim_optimizer_free(ours)
    lib.shim_scaler_free(scaler)


def schedules(lib):
    for t in range(0, 120):
        lr = lib.shim_schedule_lr(3, 0, 100, 0, 0, 0.1, 0.5, t)
        want = 0.5 * (single(0.1) + (1 - single(0.1)) * (1 + np.cos(np.pi * min(t, 100) / 100)) / 2)
        check(abs(lr / want - 1) < 2.0 ** -23, f"cosine {t}: {lr} {want}")


def main():
    torch.set_num_threads(1)
    lib, lamb = load(sys.argv[1]), timm_lamb()
    for case in CASES:
        if case[1] == LAMB and lamb is None:
            print("skipped: timm is not installed:", case[0])
            continue
        for grad_dtype in (F32, F16, BF16):
            run(lib, case, grad_dtype, lamb)
        if case[1] != LAMB and not case[-1]:            # timm counts for all; torch's clip leaves the frozen out
            run(lib, case, F32, lamb, thaws=True)
    schedules(lib)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
