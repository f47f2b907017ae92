"""check_model.py LIBRARY - whole models beside torch: LeNet-5, a residual net with batch norm, a net that uses a layer twice.

LIBRARY is a shared library made of shim_model.c and the implementation of amp.h. Both sides start from the same weights.
Truth is torch in float64. Two bounds are used. Where results depend smoothly on what is rounded (losses), the number of
roundings times their unit: `smooth`. A ReLU, a maximum or AdamW's m / sqrt(v) near zero turns over when a rounding
crosses a border, and then moves a whole contribution; how many do is a matter of the data, so there torch itself, computing in
the same types (float32, or torch.autocast), is the measure: we may be `smooth` plus twice as far from the truth as torch is.
"""
import ctypes
import sys

import numpy as np
import torch
import torch.nn.functional as F

O0, O1, O2 = 0, 1, 2
F32, F16, BF16 = 1, 2, 3
SGD, ADAMW = 0, 2
BATCH = 16
SCALE = 1024.0
UNIT = {F32: 2.0 ** -24, F16: 2.0 ** -11, BF16: 2.0 ** -8}
NAME = {F32: "f32", F16: "f16", BF16: "bf16"}
passed = failed = 0


def check(ok, text):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print("failed:", text)


def load(path):
    lib = ctypes.CDLL(path)
    lib.shim_model_new.restype = ctypes.c_void_p
    lib.shim_model_new.argtypes = [ctypes.c_int] * 5 + [ctypes.c_float] * 4
    lib.shim_model_input_gradient.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int, ctypes.c_void_p]
    for name in ("free", "params", "sync"):
        getattr(lib, "shim_model_" + name).argtypes = [ctypes.c_void_p]
    for name in ("param_size", "weights", "gradient"):
        getattr(lib, "shim_model_" + name).argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.shim_model_param_size.restype = ctypes.c_size_t
    lib.shim_model_weights.restype = lib.shim_model_gradient.restype = ctypes.POINTER(ctypes.c_float)
    lib.shim_model_step.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int, ctypes.c_void_p]
    lib.shim_model_evaluate.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] + [ctypes.c_void_p] * 2
    return lib


class Ours:
    def __init__(self, lib, which, level=O0, low=0, optimizer=SGD, lr=0.0, momentum=0.0, weight_decay=0.0, scale=1.0):
        self.lib = lib
        lr, weight_decay = lr or -1.0, weight_decay or -1.0    # AMP_ZERO: really zero
        self.m = lib.shim_model_new(which, BATCH, level, low, optimizer, lr, momentum, weight_decay, scale)
        assert self.m

    def __del__(self):
        self.lib.shim_model_free(self.m)

    def arrays(self, what):
        f = getattr(self.lib, "shim_model_" + what)
        return [np.ctypeslib.as_array(f(self.m, i), (self.lib.shim_model_param_size(self.m, i),))
                for i in range(self.lib.shim_model_params(self.m)) if f(self.m, i)]     # frozen ones have no gradient

    def put(self, model):
        ours, theirs = self.arrays("weights"), list(model.parameters())
        assert [w.size for w in ours] == [p.numel() for p in theirs]
        for w, p in zip(ours, theirs):
            w[:] = p.detach().float().numpy().ravel()
        assert self.lib.shim_model_sync(self.m) == 0

    def step(self, x, labels):
        loss = ctypes.c_float()
        outcome = self.lib.shim_model_step(self.m, x.ctypes.data, labels.ctypes.data, len(labels), ctypes.byref(loss))
        assert outcome == 0, outcome
        return loss.value

    def input_gradient(self, x):
        out = np.full(x.shape, np.nan, np.float32)
        assert self.lib.shim_model_input_gradient(self.m, x.ctypes.data, len(x), out.ctypes.data) == 0
        return out.ravel()

    def evaluate(self, x, labels):
        loss, correct = ctypes.c_float(), ctypes.c_int()
        assert self.lib.shim_model_evaluate(self.m, x.ctypes.data, labels.ctypes.data, len(labels), ctypes.byref(loss),
                                            ctypes.byref(correct)) == 0
        return loss.value, correct.value


class LeNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = torch.nn.Conv2d(1, 6, 5), torch.nn.Conv2d(6, 16, 5)
        self.l1, self.l2, self.l3 = torch.nn.Linear(400, 120), torch.nn.Linear(120, 84), torch.nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.c1(x)), 2)
        x = F.max_pool2d(torch.relu(self.c2(x)), 2).flatten(1)
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))


class Residual(torch.nn.Module):
    """Registered in the order in which our model is built, so that the parameters line up."""

    def __init__(self):
        super().__init__()
        for i, (a, b, stride) in enumerate([(3, 8, 1), (8, 8, 1), (8, 8, 1), (8, 16, 2)]):
            setattr(self, f"c{i}", torch.nn.Conv2d(a, b, 3, stride, 1, bias=False))
            setattr(self, f"b{i}", torch.nn.BatchNorm2d(b))
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.b0(self.c0(x)))
        y = self.b2(self.c2(torch.relu(self.b1(self.c1(x)))))
        x = torch.relu(x + y)
        return self.head(torch.relu(self.b3(self.c3(x))).mean((2, 3)))


class Frozen(Residual):
    """As for fine-tuning: every batch norm with constant statistics, the first convolution and its norm not trained."""

    def __init__(self):
        super().__init__()
        for layer in (self.c0, self.b0):
            layer.requires_grad_(False)
        for norm in (self.b0, self.b1, self.b2, self.b3):
            norm.eval()


class Segmentation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = torch.nn.Conv2d(2, 12, 3, padding=1), torch.nn.Conv2d(12, 3, 1)

    def forward(self, x):
        return self.c2(torch.relu(self.c1(x)))


class Shared(torch.nn.Module):
    """The convolution c2 is used twice; the loss is the mean of what comes out, without labels."""

    def __init__(self):
        super().__init__()
        self.c1, self.g = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GroupNorm(2, 8)
        self.c2, self.i = torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.InstanceNorm2d(8, affine=True)
        self.r, self.head = torch.nn.RMSNorm((8, 8, 8), eps=1e-6), torch.nn.Linear(512, 10)

    def forward(self, x):
        x = F.silu(self.g(self.c1(x)))
        y = self.c2(F.silu(self.i(self.c2(x))))
        return torch.sigmoid(self.head(self.r(x + y).flatten(1)))


def loss_of(model, logits, labels):
    """Of rows; of maps with weights, smoothing and label 255 left out."""
    if isinstance(model, Shared):
        return logits.mean()
    if logits.dim() == 2:
        return F.cross_entropy(logits, torch.from_numpy(labels).long())
    weights = torch.tensor([1, 0.5, 2], dtype=logits.dtype)
    return F.cross_entropy(logits, torch.from_numpy(labels).long(), weights, ignore_index=255, label_smoothing=float(np.float32(0.1)))


# Name, model, input, the longest sum of one output or gradient, layers with arithmetic. LeNet: a weight gradient of the
# first convolution sums 16 * 28 * 28 products. Residual: 16 * 8 * 8.
MODELS = [("LeNet-5", LeNet, (1, 32, 32), 12544, 7), ("residual net", Residual, (3, 8, 8), 1024, 10),
          ("frozen residual net", Frozen, (3, 8, 8), 1024, 10), ("segmentation net", Segmentation, (2, 6, 5), 480, 3),
          ("net of shared weights", Shared, (3, 8, 8), 2048, 10)]


def data_for(shape, seed):
    rng = np.random.default_rng(seed)
    if shape == (2, 6, 5):
        labels = rng.integers(0, 4, (BATCH, 6, 5)).astype(np.int32)
        return (rng.standard_normal((BATCH,) + shape).astype(np.float32), np.where(labels == 3, np.int32(255), labels))
    return (rng.standard_normal((BATCH,) + shape).astype(np.float32), rng.integers(0, 10, BATCH).astype(np.int32))


def theirs(model, x, labels, dtype, autocast=None):
    """Loss and gradients of torch, at last that of a Shared one's input; `model` is left with them."""
    model.zero_grad()
    x = torch.from_numpy(x).to(dtype).requires_grad_(isinstance(model, Shared))
    if autocast:
        with torch.autocast("cpu", dtype=autocast):
            logits = model(x)
    else:
        logits = model(x)
    loss = loss_of(model, logits if dtype == torch.float64 else logits.float(), labels)
    loss.backward()
    return loss.item(), [p.grad.double().numpy().ravel() for p in list(model.parameters()) + [x] if p.grad is not None]


def distance(a, b):
    """|a - b| / |b| over all tensors together, and the worst single tensor (those below 1 % of all count as 1 %)."""
    norms = [np.linalg.norm(y) for y in b]
    total = np.sqrt(sum(n * n for n in norms))
    errors = [np.linalg.norm(np.asarray(x, np.float64) - y) for x, y in zip(a, b)]
    return np.sqrt(sum(e * e for e in errors)) / total, max(e / max(n, 0.01 * total) for e, n in zip(errors, norms))


def twins(make, seed):
    torch.manual_seed(seed)
    model = make()
    return model, make().double(), model.state_dict()


def smooth(which, low):
    """FP32: a sum of k terms has k independent roundings, whose sum is about sqrt(k) units; 2 * layers such sums follow each
    other. 16 bits: 3 roundings per layer, there and back, all on the same side."""
    _, _, _, longest, layers = MODELS[which]
    return 2 * layers * longest ** 0.5 * UNIT[F32] if low == F32 else 6 * layers * UNIT[low]


TORCH = {F32: None, F16: torch.float16, BF16: torch.bfloat16}
CASES = [(O0, F32), (O1, F16), (O1, BF16), (O2, F16), (O2, BF16)]


def gradients(lib, which):
    name, make, shape, _, _ = MODELS[which]
    for seed in range(3):
        x, labels = data_for(shape, seed)
        single, double, state = twins(make, seed)
        double.load_state_dict(state)
        loss64, g64 = theirs(double, x, labels, torch.float64)
        for level, low in CASES:
            loss_torch, g_torch = theirs(single, x, labels, torch.float32, TORCH[low])
            ours = Ours(lib, which, level, 0 if low == F32 else low, scale=SCALE if low == F16 else 1.0)
            ours.put(single)
            of_input = [ours.input_gradient(x).astype(np.float64)] if make is Shared else []
            loss = ours.step(x, labels)
            g = [a.astype(np.float64) / (SCALE if low == F16 else 1.0) for a in ours.arrays("gradient")] + of_input
            (all_, worst), (torch_all, torch_worst), bound = distance(g, g64), distance(g_torch, g64), smooth(which, low)
            text = f"{name} O{level} {NAME[low]}"
            check(abs(loss - loss64) <= bound * loss64, f"{text}: loss {loss}, torch in float64 {loss64}")
            check(abs(loss - loss_torch) <= 2 * bound * loss64, f"{text}: loss {loss}, torch {loss_torch}")
            check(all_ <= bound + 2 * torch_all, f"{text}: gradients off by {all_:.3g}, torch by {torch_all:.3g}")
            check(worst <= bound + 2 * torch_worst, f"{text}: a gradient is off by {worst:.3g}, torch's by {torch_worst:.3g}")
            if low == F32:
                check(worst <= bound, f"{text}: a gradient is off by {worst:.3g}, bound {bound:.3g}")
            if seed == 0:
                print(f"{text}: gradients off by {all_:.2g} of their norm, torch by {torch_all:.2g}")


def torch_run(model, kind, settings, batches, dtype, autocast):
    """20 steps; returns the losses and how far the weights have travelled."""
    f = lambda v: float(np.float32(v))      # torch gets the float32 values of the settings
    lr, momentum, wd = settings
    start = [p.detach().double().numpy().ravel().copy() for p in model.parameters()]
    optimizer = (torch.optim.SGD(model.parameters(), f(lr), f(momentum), weight_decay=f(wd)) if kind == SGD else
                 torch.optim.AdamW(model.parameters(), f(lr), (f(0.9), f(0.999)), f(1e-8), f(wd)))
    losses = []
    for step in range(20):
        losses.append(theirs(model, *batches[step % 4], dtype, autocast)[0])
        optimizer.step()
    return losses, [p.detach().double().numpy().ravel() - s for p, s in zip(model.parameters(), start)]


def run(lib, which, kind, seed, cases):
    """20 steps on 4 batches, for each case: how far weights (as a part of the way they have travelled), losses and the loss of
    an evaluation are from the truth, for us and for torch, and how many answers were right, ours and in truth."""
    _, make, shape, _, _ = MODELS[which]
    settings = (0.01, 0.9, 5e-4) if kind == SGD else (1e-3, 0.0, 0.01)
    batches = [data_for(shape, 100 + i) for i in range(4)]
    single, double, state = twins(make, seed)
    start = {k: v.clone() for k, v in state.items()}
    double.load_state_dict(start)
    losses64, way64 = torch_run(double, kind, settings, batches, torch.float64, None)
    double.eval()
    x, labels = batches[0]
    with torch.no_grad():
        logits = double(torch.from_numpy(x).double())
    want = loss_of(double, logits, labels).item()
    right = 0 if make is Shared else int((logits.argmax(1).numpy() == labels).sum())
    results = []
    for level, low in cases:
        single.load_state_dict(start)
        ours = Ours(lib, which, level, 0 if low == F32 else low, kind, *settings, SCALE if low == F16 else 1.0)
        ours.put(single)
        before = [w.astype(np.float64) for w in ours.arrays("weights")]
        losses = [ours.step(*batches[step % 4]) for step in range(20)]
        way = [w - b for w, b in zip(ours.arrays("weights"), before)]
        torch_losses, torch_way = torch_run(single, kind, settings, batches, torch.float32, TORCH[low])
        off, torch_off = (max(abs(a - b) / b for a, b in zip(l, losses64)) for l in (losses, torch_losses))
        loss, correct = ours.evaluate(x, labels)
        results.append((distance(way, way64)[0], distance(torch_way, way64)[0], off, torch_off,
                        abs(loss - want) / max(want, 1.0), abs(correct - right)))
    return results


def trajectory(lib, which, kind):
    """In 16 bits thousands of borders are crossed, by us and by torch: one run tells. In FP32 a run in eight crosses one, by one
    of us and not by the other: two maxima of a window equal but for their last bits, after which AdamW goes other ways
    (0.07 of its way after 20 steps, else 0.000005). There the median of seven runs counts."""
    measured = [np.median([run(lib, which, kind, seed, CASES[:1])[0] for seed in range(7, 14)], axis=0)]
    measured += run(lib, which, kind, 7, CASES[1:])
    for (level, low), (all_, torch_all, off, torch_off, evaluation, wrong) in zip(CASES, measured):
        bound = smooth(which, low)
        text = f"{MODELS[which][0]} {'SGD' if kind == SGD else 'AdamW'} O{level} {NAME[low]}"
        check(all_ <= bound + 2 * torch_all, f"{text}: the weights are off by {all_:.3g} of their way, torch's by {torch_all:.3g}")
        check(off <= bound + 2 * torch_off, f"{text}: a loss is off by {off:.3g}, torch's by {torch_off:.3g}")
        check(evaluation <= bound + 2 * torch_off, f"{text}: the loss of an evaluation is off by {evaluation:.3g}")
        check(wrong <= (low != F32), f"{text}: {wrong:.0f} answers are others than torch's")
        print(f"{text}: 20 steps, weights off by {all_:.2g} of their way, torch's by {torch_all:.2g}; losses by {off:.2g} and {torch_off:.2g}")


def main():
    torch.set_num_threads(1)
    lib = load(sys.argv[1])
    for which in range(len(MODELS)):
        gradients(lib, which)
        for kind in (SGD, ADAMW):
            trajectory(lib, which, kind)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
