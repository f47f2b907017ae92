"""bench_cuda.py RESULTS.md: PyTorch's times for the rows of bench_cuda.cu's tables of passes and steps that it has the same
for, on the same GPU, as one more table on stdout. Medians of CUDA events, several calls each; a larger ratio is better
for amp."""
import copy
import re
import sys

import torch
from torch import nn

TURNS, WARM = 15, 3
torch.backends.cudnn.benchmark = True


def median(call, stream, repeat):
    times = []
    for turn in range(TURNS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        for _ in range(repeat): call()
        end.record(stream)
        end.synchronize()
        if turn >= 2: times.append(1e3 * start.elapsed_time(end) / repeat)
    return sorted(times)[len(times) // 2]


def repeats(call, stream):
    """As many calls as take some 4 ms together."""
    for _ in range(WARM): call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for _ in range(10): call()
    end.record(stream)
    end.synchronize()
    return 1 + int(40.0 / (start.elapsed_time(end) + 0.01))


def on_a_stream(make):
    """The call's time, on a stream of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call = make()
        t = median(call, stream, repeats(call, stream))
    torch.cuda.synchronize()
    return t


# --- passes over many tensors -------------------------------------------------------------------------

def random_tensors(count, each, dtype):
    return [torch.rand(each, device="cuda", dtype=torch.float32).mul_(2).sub_(1).to(dtype) for _ in range(count)]


def unscale(count, each, dtype):
    grads, found = random_tensors(count, each, dtype), torch.zeros(1, device="cuda")
    inverse = torch.full((1,), 1 / 1.0009765625, device="cuda")
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)


def adamw(count, each):
    params = random_tensors(count, each, torch.float32)
    for p in params: p.grad = torch.rand_like(p)
    return torch.optim.AdamW(params, lr=1e-3, fused=True).step


# --- training -------------------------------------------------------------------------------------------

def lenet():
    return nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
                         nn.Linear(84, 10))


def dense(*widths):
    layers = []
    for i, o in zip(widths, widths[1:]): layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def training(net, x, low):
    """A step as PyTorch's own recipe for autocast and GradScaler has it, with the fused optimizer."""
    net, labels = copy.deepcopy(net).cuda(), (torch.arange(len(x), device="cuda") * 7 % 10)
    optimizer = torch.optim.Adam(net.parameters(), fused=True, capturable=True)
    scaler = torch.amp.GradScaler("cuda", enabled=low == torch.float16)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=low): logits = net(x)
        scaler.scale(nn.functional.cross_entropy(logits.float(), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
    return step


def eager(net, x, low):
    return lambda: training(net, x, low)


def graphed(net, x, low):
    def make():
        step, graph = training(net, x, low), torch.cuda.CUDAGraph()
        for _ in range(WARM): step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()): step()
        return graph.replay
    return make


PASSES = {
    "unscale and check, one tensor of 1 GB, f32": lambda: unscale(1, 1 << 28, torch.float32),
    "unscale and check, one tensor of 64 MB, f32": lambda: unscale(1, 16384000, torch.float32),
    "unscale and check, 1000 tensors of 64 KB, f32": lambda: unscale(1000, 16384, torch.float32),
    "AdamW, one tensor of 100 M parameters": lambda: adamw(1, 100000000),
    "AdamW, 400 tensors of 256 K parameters": lambda: adamw(400, 262144),
}
STEPS = {
    "LeNet-5, batch 64, f16": (lenet, (64, 1, 28, 28), torch.float16),
    "LeNet-5, batch 1024, f16": (lenet, (1024, 1, 28, 28), torch.float16),
    "MLP 784-512-512-10, batch 256, f16": (lambda: dense(784, 512, 512, 10), (256, 784), torch.float16),
    "MLP 784-2048 (5x)-10, batch 1024, bf16": (lambda: dense(784, *[2048] * 5, 10), (1024, 784), torch.bfloat16),
    "MLP 784-4096 (5x)-10, batch 8192, bf16": (lambda: dense(784, *[4096] * 5, 10), (8192, 784), torch.bfloat16),
}


def times_of(path):
    """The numbers of each row of the results, by the row's name."""
    table = {}
    with open(path) as f:
        for line in f:
            cells = [c.strip() for c in line.strip().strip("|").split("|")]
            if len(cells) > 1 and re.fullmatch(r"[0-9.]+", cells[1]):
                table.setdefault(cells[0], [float(c) for c in cells[1:] if re.fullmatch(r"[0-9.]+", c)])
    return table


def main():
    ours = times_of(sys.argv[1])
    print(f"\n### Beside PyTorch {torch.__version__}, us\n\n"
          "AdamW: PyTorch's has FP32 gradients and no 16-bit copy, which are as many bytes.\n\n"
          "|                                                |      own |  PyTorch | ratio |\n|---|---|---|---|")

    def row(name, own, theirs):
        print(f"| {name:46} | {own:8.1f} | {theirs:8.1f} | {theirs / own:5.2f} |", flush=True)
    for name, make in PASSES.items():
        if name in ours: row(name, ours[name][0], on_a_stream(make))
    for name, (net, shape, low) in STEPS.items():
        if name not in ours: continue
        x = torch.rand(*shape, device="cuda") * 2 - 1
        row(name + ", launches", ours[name][0], on_a_stream(eager(net(), x, low)))
        row(name + ", graph", ours[name][1], on_a_stream(graphed(net(), x, low)))


main()
