"""bench_cuda.py PART [ROW...] [--results FILE...]: PyTorch's times for what bench_cuda.cu measures, on the same GPU, as a
table on stdout; `sh tests/cuda.sh bench` runs it. Parts:

  passes    unscale and AdamW
  eager     the training steps, as single launches and as a CUDA graph
  compiled  the same with torch.compile
  cudnn     the convolutions that the results name among their operators: forward, and both gradients
  attention the calls of attention that the results name, by scaled_dot_product_attention

Rows: those of bench_cuda.cu that begin so; none = all. Convolutional networks have channels last, cuDNN chooses by trial
(cudnn.benchmark), F16 has a GradScaler, optimizers are the fused ones. Medians of CUDA events, several calls each. Ratios
are to the times that the results have, the better of launches and graph: larger is better for amp.
--device cpu --tiny tries the program without a GPU: small sizes, one call, nothing compiled.

All parts of the benchmark, this program's among them, in one command; and where a GPU is at hand for ten minutes, then for
three, those of most worth first:

  sh tests/cuda.sh bench
  sh tests/cuda.sh bench --limit 570 test steps shares bits eager cudnn memcheck compiled-gpt2 compiled-resnet34
  sh tests/cuda.sh bench --limit 170
"""
import argparse, gc, os, re, time
import torch
from torch import nn
import networks

HERE = os.path.dirname(os.path.abspath(__file__))
ROWS = re.findall(r'"(\w+:[\dx]+ b?f16)"', open(os.path.join(HERE, "bench_cuda.cu")).read())
WARM = 3
torch.backends.cudnn.benchmark = True

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("part", choices=["passes", "eager", "compiled", "cudnn", "attention"])
parser.add_argument("rows", nargs="*")
parser.add_argument("--results", nargs="*", default=[])
parser.add_argument("--device", default="cuda")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
on_gpu, tiny = args.device == "cuda", args.tiny
STREAM = torch.cuda.Stream() if on_gpu else None        # a graph is captured where its step has run before


def seconds(call, repeat):
    """Of one call, while `repeat` of them run."""
    if not on_gpu:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat): call()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / repeat


def median(call, turn=0.04):
    """Microseconds; as many calls at a time as take some `turn` seconds."""
    if tiny: return 1e6 * seconds(call, 1)
    for _ in range(WARM): call()
    repeat = 1 + int(turn / (seconds(call, 3) + 1e-5))
    return 1e6 * sorted(seconds(call, repeat) for _ in range(15))[7]


def graph_of(call, count=1):
    """A call that replays `count` calls."""
    if not on_gpu: return call
    for _ in range(WARM): call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count): call()
    return graph.replay


def on_a_stream(run):
    """What `run` returns."""
    if not on_gpu: return run()
    gc.collect()
    torch.cuda.empty_cache()
    with torch.cuda.stream(STREAM): return run()


def megabytes():
    """The most that was allocated since the last call."""
    if not on_gpu: return 0
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return 1e-6 * most


def results():
    """The cells of each row of the results, by the row's name: numbers where they are."""
    table = {}
    for path in args.results:
        for line in open(path):
            cells = [c.strip() for c in line.strip().strip("|").split("|")]
            if len(cells) > 1 and re.fullmatch(r"[0-9.]+", cells[1]):
                table.setdefault(cells[0], [float(c) for c in cells[1:] if re.fullmatch(r"[0-9.]+", c)])
    return table


OURS = results()


def head(title, *columns):
    print(f"\n### Beside PyTorch {torch.__version__}: {title}\n\n|  | " + " | ".join(columns) + " |\n|---|"
          + "---|" * len(columns), flush=True)


def attempt(name, own, run):
    """A row: microseconds of amp and of PyTorch, the ratio, and what else `run` gives."""
    try:
        theirs, *more = run()
        ours, ratio = (f"{own:9.1f}", f"{theirs / own:5.2f}") if own else (" " * 9, " " * 5)
        print(f"| {name:58} | {ours} | {theirs:9.1f} | {ratio} |" + "".join(f" {m:7.0f} |" for m in more), flush=True)
        return True
    except Exception as e:
        print(f"| {name} | failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''} |", flush=True)
        return False


# --- passes over many tensors -------------------------------------------------------------------------

def random_tensors(count, each):
    each = each // 65536 + 64 if tiny else each
    return [torch.rand(each, device=args.device).mul_(2).sub_(1) for _ in range(min(count, 4) if tiny else count)]


def unscale(count, each):
    grads, found = random_tensors(count, each), torch.zeros(1, device=args.device)
    inverse = torch.full((1,), 1 / 1.0009765625, device=args.device)
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)


def adamw(count, each):
    params = random_tensors(count, each)
    for p in params: p.grad = torch.rand_like(p)
    return torch.optim.AdamW(params, lr=1e-3, fused=True).step


def passes():
    """AdamW: PyTorch's has FP32 gradients and no 16-bit copy, which are as many bytes."""
    head("passes, us", "own", "PyTorch", "ratio")
    calls = {"unscale and check, one tensor of 1 GB, f32": lambda: unscale(1, 1 << 28),
             "unscale and check, one tensor of 64 MB, f32": lambda: unscale(1, 16384000),
             "unscale and check, 1000 tensors of 64 KB, f32": lambda: unscale(1000, 16384),
             "AdamW, one tensor of 100 M parameters": lambda: adamw(1, 100000000),
             "AdamW, 400 tensors of 256 K parameters": lambda: adamw(400, 262144)}
    return all([attempt(name, OURS.get(name, [0])[0], lambda: [on_a_stream(lambda: median(make()))])
                for name, make in calls.items()])


# --- training -------------------------------------------------------------------------------------------

def network(row):
    """A row of bench_cuda.cu: the network, its input, labels, the type, and whether it has images."""
    name, batch, length, low = re.fullmatch(r"(\w+):(\d+)x?(\d*) (\w+)", row).groups()
    batch, length, divide = (2, 16, 16) if tiny else (int(batch), int(length or 0), 1)
    low = {"f16": torch.float16, "bf16": torch.bfloat16}[low]
    if name.endswith("gpt2"):
        net = networks.GPT2(length, 32, 2, 2, 24) if tiny else networks.GPT2(length)
        x = torch.arange(batch * length) * 7 % net.tokens.num_embeddings
        return net, x.view(batch, length), x, low, False
    if name[0].isdigit():
        *widths, out = map(int, name.split("x"))
        widths = [w // divide for w in widths]
        return networks.dense(*widths, out), torch.rand(batch, widths[0]) * 2 - 1, torch.arange(batch) * 7 % out, low, False
    if name == "lenet5": net, shape, classes = networks.lenet(), (1, 28, 28), 10
    else:
        net, (side, classes, _) = networks.network(name, divide), networks.NETWORKS[name]
        shape = (3, 32, 32) if tiny else (3, side, side)
    return net, torch.rand(batch, *shape) * 2 - 1, torch.arange(batch) * 7 % classes, low, True


def training(row, compiled):
    """A step as PyTorch's own recipe for autocast and GradScaler has it."""
    net, x, labels, low, images = network(row)
    form = {"memory_format": torch.channels_last} if images else {}
    net, x, labels = net.to(args.device, **form), x.to(args.device, **form), labels.to(args.device)
    kind = torch.optim.AdamW if "gpt2" in row else torch.optim.Adam
    optimizer = kind(net.parameters(), fused=True, **({"capturable": True} if on_gpu else {}))
    scaler = torch.amp.GradScaler(args.device, enabled=low == torch.float16)
    if compiled: net = torch.compile(net, backend="inductor" if on_gpu else "aot_eager")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype=low): logits = net(x)
        scaler.scale(nn.functional.cross_entropy(logits.float(), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
    return step


def steps(compiled):
    head("training steps" + (", compiled" if compiled else "") + ", us", "own", "PyTorch", "ratio", "PyTorch, MB")
    done = []
    for row in ROWS:
        if args.rows and not any(row.startswith(r) for r in args.rows): continue
        torch.compiler.reset()
        own, name, step = min(OURS.get(row, [0, 0])[:2]), row + (", compiled" if compiled else ""), None

        def launches():
            nonlocal step
            megabytes()
            step = training(row, compiled)
            return median(step), megabytes()

        done.append(attempt(name + ", launches", own, lambda: on_a_stream(launches)))
        if not done[-1]: continue
        done.append(attempt(name + ", graph", own, lambda: on_a_stream(lambda: (median(graph_of(step)), megabytes()))))
    return all(done)


# --- convolutions ------------------------------------------------------------------------------------------

def convolution(gradient, n, c, h, w, o, kh, kw, s, p, g):
    """Microseconds of one call among several in a graph; channels last, F16."""
    def make(*shape): return torch.rand(*shape, device=args.device, dtype=torch.float16).to(memory_format=torch.channels_last)
    x, weight, bias = make(n, c, h, w), make(o, c // g, kh, kw), torch.rand(o, device=args.device, dtype=torch.float16)
    forward = lambda: torch.nn.functional.conv2d(x, weight, bias, s, p, 1, g)
    if not gradient: call = forward
    else:
        dy, mask = torch.rand_like(forward()), [c != 3, True, True]
        call = lambda: torch.ops.aten.convolution_backward(dy, x, weight, [o], [s, s], [p, p], [1, 1], False, [0, 0], g, mask)
    count = 1 if tiny else 10
    return [on_a_stream(lambda: median(graph_of(call, count), 0.005)) / count]


def convolutions():
    head("cuDNN's convolutions, us of a call", "own", "cuDNN", "ratio")
    done = []
    for name, cells in OURS.items():
        found = re.fullmatch(r"conv2d_(\w+) (\d+)x(\d+)x(\d+)x(\d+):(\d+)x(\d+)x(\d+):s(\d+)p(\d+)g(\d+)", name)
        if not found: continue
        kind, *sizes = found.groups()
        done.append(attempt(name, cells[1] / cells[0], lambda: convolution(kind == "backward", *map(int, sizes))))
    return all(done)


# --- attention ---------------------------------------------------------------------------------------------

def attention(gradient, batch, length, kind):
    """Microseconds of one call among several in a graph; heads lie as a dense layer gives them."""
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    q, k, v, dy = ((torch.rand(batch, length, 2 if tiny else 12, 64, device=args.device) * 2 - 1).to(kind).transpose(1, 2)
                   .requires_grad_(bool(gradient)) for _ in range(4))
    forward = lambda: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def run():
        if not gradient: call = forward
        else:
            y = forward()
            call = lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
        count = 1 if tiny else 10
        return [median(graph_of(call, count), 0.005) / count]
    return on_a_stream(run)


def attentions():
    head("attention, us of a call", "own", "PyTorch", "ratio")
    done = []
    for name, cells in OURS.items():
        found = re.fullmatch(r"attention_(\w+) (\d+)x(\d+) (\w+)(?:, plain)?", name)
        if not found: continue
        done.append(attempt(name, cells[0], lambda: attention(found[1] == "backward", int(found[2]), int(found[3]), found[4])))
    return all(done)


parts = {"passes": passes, "eager": lambda: steps(False), "compiled": lambda: steps(True), "cudnn": convolutions, "attention": attentions}
raise SystemExit(not parts[args.part]())
