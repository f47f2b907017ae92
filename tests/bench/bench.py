"""bench.py PROGRAM COMPILER [quick]: amp.h beside other libraries; `make bench` and `make bench-quick` run it.

PROGRAM is bench.c, compiled. Each of its cases is timed in turn with the same case of every peer found here, round by
round, so that what disturbs the machine disturbs all of them: ours, the limit, PyTorch, OpenBLAS, NumPy, ours, ...
A figure is the median of the rounds. A peer that is not installed is skipped with a line. On one thread everything
runs on the same core (BENCH_CPU chooses it, default the last).
Writes tests/bench/results/DATE-PROCESSOR.md (see processor()), and three pictures beside it; quick writes
build/bench-quick.md only. ONLY="train f32" measures the cases with these words in their names; CLOCK=processor, on one
thread, counts seconds of the processor, for a machine on which other programs run. With AMP_ISA=avx2 (`make bench ISA=avx2`)
the peers are held to AVX2 too, and the short list goes to DATE-PROCESSOR-avx2.md."""
import ctypes, datetime, gc, glob, os, platform, re, statistics, subprocess, sys, time
import charts

# Idle threads of one library must not spin while another one runs, and each thread keeps to a processor: left alone, some
# systems wake two on one and leave others idle. Read by the libraries when they start.
os.environ.update(GOMP_SPINCOUNT="10000", KMP_BLOCKTIME="1", OPENBLAS_THREAD_TIMEOUT="16", OMP_DYNAMIC="false",
                  OMP_PROC_BIND="true")
# What holds the peers to the instruction set that ours is held to.
HELD = {"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
                 "OPENBLAS_CORETYPE": "Haswell", "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"}}
held = HELD.get(os.environ.get("AMP_ISA"), {})
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"): os.environ.pop(name, None)      # it chooses well by itself
os.environ.update(held)

def cpu(field):
    """What the system says of the first processor, "" if it says nothing."""
    if not os.path.exists("/proc/cpuinfo"): return ""
    return next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith(field)), "")
# Seconds: a sample, the same calls before it (some processors wake their memory that slowly), a pause before both; of one
# case and library. A call that takes LONG is made once only.
SAMPLE, WARM, REST, ENOUGH, LONG = 0.01, 0.01, 0.002, 0.5, 8.0
HERE = os.path.dirname(os.path.abspath(__file__))

def product(shape):
    """NT:MxNxK -> transposed a, transposed b, m, n, k"""
    trans, sizes = shape.split(":")
    return (trans[0] == "T", trans[1] == "T") + tuple(map(int, sizes.split("x")))

def numbers(text): return [int(n) for n in re.findall(r"\d+", text)]

# Of one thread also in seconds of the processor, which other programs hardly change.
by_processor = os.environ.get("CLOCK") == "processor"
clock = time.process_time if by_processor else time.perf_counter

def loop(call, calls, warm=WARM):
    start = clock()
    while clock() - start < warm: call()
    start = clock()
    for _ in range(calls): call()
    return (clock() - start) / calls

class Sampler:
    """A peer's call: as many of them in a sample as take SAMPLE seconds."""
    def __init__(self, call):
        start = clock()
        call()
        self.call, self.calls, self.once = call, 1, clock() - start
        if self.once > SAMPLE: return
        while (took := loop(call, self.calls)) * self.calls < SAMPLE / 4: self.calls *= 2
        self.calls = 1 + int(SAMPLE / took)
    def seconds(self):
        if self.once > LONG: return self.once
        return loop(self.call, self.calls, WARM if self.once < ENOUGH else 0)

# --- peers ------------------------------------------------------------------------------------------------
# A peer has a name with its version, threads(n), and case(what, shape, type): a call, or None.

class Torch:
    def __init__(self):
        import torch, networks
        self.t, self.networks = torch, networks
        dnn = re.search(r"(?:oneDNN|MKL-DNN) v([\d.]+)", torch.__config__.show())
        self.name = "PyTorch " + torch.__version__.split("+")[0] + (" (oneDNN %s)" % dnn.group(1) if dnn else "")
        self.types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    def threads(self, n): self.t.set_num_threads(n)
    def fill(self, *shape, dtype=None):
        n = 1
        for s in shape: n *= s
        pattern = (self.t.arange(1009) * 377 % 1009).float() / 504.5 - 1
        return pattern.repeat(n // 1009 + 1)[:n].reshape(shape).to(dtype or self.t.float32).clone()

    def case(self, what, shape, type):
        make = getattr(self, re.sub(r"\W+", "_", what), None)
        return make(shape, self.types[type]) if make else None

    def gemm(self, shape, dt):
        ta, tb, m, n, k = product(shape)
        a = self.fill(k, m, dtype=dt).t() if ta else self.fill(m, k, dtype=dt)
        b = self.fill(n, k, dtype=dt).t() if tb else self.fill(k, n, dtype=dt)
        c = self.t.empty(m, n, dtype=dt)
        return lambda: self.t.mm(a, b, out=c)
    gemm_without_workspace = gemm

    def conv(self, shape, dt):
        n, c, h, w, o, kh, kw, s, p = numbers(shape)
        x, weight = self.fill(n, c, h, w, dtype=dt), self.fill(o, c, kh, kw, dtype=dt)
        return x, weight, s, p
    def conv_forward(self, shape, dt):
        x, w, s, p = self.conv(shape, dt)
        return lambda: self.t.nn.functional.conv2d(x, w, stride=s, padding=p)
    conv_forward_without_workspace = conv_forward
    def conv_gradient(self, shape, dt, mask):
        x, w, s, p = self.conv(shape, dt)
        dy = self.fill(*self.t.nn.functional.conv2d(x, w, stride=s, padding=p).shape, dtype=dt)
        return lambda: self.t.ops.aten.convolution_backward(dy, x, w, None, [s, s], [p, p], [1, 1], False, [0, 0], 1, mask)
    def conv_dx(self, shape, dt): return self.conv_gradient(shape, dt, [True, False, False])
    conv_dx_without_workspace = conv_dx
    def conv_dw(self, shape, dt): return self.conv_gradient(shape, dt, [False, True, False])

    def copy(self, shape, source, target):
        x, y = self.fill(int(shape), dtype=source), self.fill(int(shape), dtype=target)
        return lambda: y.copy_(x)
    def convert_from_f32(self, shape, dt): return self.copy(shape, self.t.float32, dt)
    def convert_to_f32(self, shape, dt): return self.copy(shape, dt, self.t.float32)

    def norm(self, g): return self.t.linalg.vector_norm(g, dtype=self.t.float32)
    def check_and_norm(self, shape, dt):
        g = self.fill(int(shape), dtype=dt)
        return lambda: bool(self.norm(g).isfinite())
    def unscale_check_and_norm(self, shape, dt):
        g, found, inverse = self.fill(int(shape), dtype=dt), self.t.zeros(1), self.t.ones(1)
        def call():
            self.t._amp_foreach_non_finite_check_and_unscale_([g], found, inverse)
            return self.norm(g), bool(found)
        return call

    def optimizer(self, shape, dt, make):
        w = self.fill(int(shape)).requires_grad_()
        w.grad = self.fill(int(shape))
        optimizer, low = make([w]), self.fill(int(shape), dtype=dt)
        found, inverse = self.t.zeros(1), self.t.ones(1)
        if dt == self.t.float32: return optimizer.step
        def call():
            self.t._amp_foreach_non_finite_check_and_unscale_([w.grad], found, inverse)
            self.t.nn.utils.clip_grad_norm_([w], 1.0)
            if not bool(found): optimizer.step()
            with self.t.no_grad(): low.copy_(w)
        return call
    def adam(self, shape, dt): return self.optimizer(shape, dt, lambda w: self.t.optim.Adam(w, fused=True))
    def adamw(self, shape, dt): return self.optimizer(shape, dt, lambda w: self.t.optim.AdamW(w, fused=True))
    def sgd_momentum(self, shape, dt):
        return self.optimizer(shape, dt, lambda w: self.t.optim.SGD(w, lr=0.01, momentum=0.9, fused=True))

    # PyTorch's own kernels, without the tape. In mixed precision its norms keep their parameters in FP32, as ours.
    def layer_norm_forward(self, shape, dt):
        r, d = numbers(shape)
        x, w = self.fill(r, d, dtype=dt), self.fill(d)
        return lambda: self.t.native_layer_norm(x, [d], w, w, 1e-5)
    def layer_norm_backward(self, shape, dt):
        r, d = numbers(shape)
        x, dy, w = self.fill(r, d, dtype=dt), self.fill(r, d, dtype=dt), self.fill(d)
        _, mean, rstd = self.t.native_layer_norm(x, [d], w, w, 1e-5)
        return lambda: self.t.ops.aten.native_layer_norm_backward(dy, x, [d], mean, rstd, w, w, [True, True, True])
    def batch(self, shape, dt):
        n, c, s = numbers(shape)
        return self.fill(n, c, s, 1, dtype=dt), self.fill(c), self.fill(c), self.fill(c).abs()
    def batch_norm_forward(self, shape, dt):
        x, w, mean, var = self.batch(shape, dt)
        return lambda: self.t.native_batch_norm(x, w, w, mean, var, True, 0.1, 1e-5)
    def batch_norm_backward(self, shape, dt):
        x, w, mean, var = self.batch(shape, dt)
        y, m, s = self.t.native_batch_norm(x, w, w, mean, var, True, 0.1, 1e-5)
        return lambda: self.t.ops.aten.native_batch_norm_backward(y, x, w, mean, var, m, s, True, 1e-5, [True, True, True])

    def softmax(self, shape, dt):
        x = self.fill(*numbers(shape), dtype=dt)
        return lambda: self.t.softmax(x, 1)
    # Heads lie side by side in a row, as a dense layer writes them.
    def attention(self, shape, dt):
        b, t, h, d, causal = numbers(shape)
        q, k, v = (self.fill(b, t, h, d, dtype=dt).transpose(1, 2).requires_grad_() for _ in range(3))
        return (q, k, v), lambda: self.t.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))
    def attention_forward(self, shape, dt):
        inputs, call = self.attention(shape, dt)
        for x in inputs: x.requires_grad_(False)
        return call
    def attention_both_ways(self, shape, dt):
        inputs, call = self.attention(shape, dt)
        dy = self.fill(*inputs[0].transpose(1, 2).shape, dtype=dt).transpose(1, 2)
        return lambda: self.t.autograd.grad(call(), inputs, dy)
    def cross_entropy_both_ways(self, shape, dt):
        r, d = numbers(shape)
        x, labels = self.fill(r, d, dtype=dt).requires_grad_(), self.t.arange(r) * 7 % d
        return lambda: self.t.autograd.grad(self.t.nn.functional.cross_entropy(x.float(), labels), x)
    def gelu_forward(self, shape, dt):
        x = self.fill(int(shape), dtype=dt)
        return lambda: self.t.nn.functional.gelu(x)
    def gelu_backward(self, shape, dt):
        x, dy = self.fill(int(shape), dtype=dt), self.fill(int(shape), dtype=dt)
        return lambda: self.t.ops.aten.gelu_backward(dy, x)
    def relu_forward(self, shape, dt):
        x = self.fill(int(shape), dtype=dt)
        return lambda: self.t.relu(x)
    def relu_backward(self, shape, dt):
        x, dy = self.fill(int(shape), dtype=dt), self.fill(int(shape), dtype=dt)
        return lambda: self.t.ops.aten.threshold_backward(dy, x, 0)
    def tanh_forward(self, shape, dt):
        x = self.fill(int(shape), dtype=dt)
        return lambda: self.t.tanh(x)
    def sigmoid_forward(self, shape, dt):
        x = self.fill(int(shape), dtype=dt)
        return lambda: self.t.sigmoid(x)
    def pool(self, shape, dt):
        n, c, h, w, *rest = numbers(shape)
        return self.fill(n, c, h, w, dtype=dt), rest or [2, 2, 0]
    def max_pool_forward(self, shape, dt):
        x, (k, s, p) = self.pool(shape, dt)
        return lambda: self.t.nn.functional.max_pool2d_with_indices(x, k, s, p)
    def max_pool_backward(self, shape, dt):
        x, (k, s, p) = self.pool(shape, dt)
        y, at = self.t.nn.functional.max_pool2d_with_indices(x, k, s, p)
        return lambda: self.t.ops.aten.max_pool2d_with_indices_backward(y, x, [k, k], [s, s], [p, p], [1, 1], False, at)
    def average_pool_forward(self, shape, dt):
        x, (k, s, p) = self.pool(shape, dt)
        return lambda: self.t.nn.functional.avg_pool2d(x, k, s, p)
    def average_pool_backward(self, shape, dt):
        x, (k, s, p) = self.pool(shape, dt)
        y = self.t.nn.functional.avg_pool2d(x, k, s, p)
        return lambda: self.t.ops.aten.avg_pool2d_backward(y, x, [k, k], [s, s], [p, p], False, True, None)

    def train(self, net, x, batch, dt, make=None):
        t = self.t
        labels, low = t.arange(batch) * 7 % 10, dt != t.float32
        optimizer = (make or t.optim.Adam)(net.parameters(), fused=True)
        scaler = t.amp.GradScaler("cpu", enabled=dt == t.float16)
        def call():
            optimizer.zero_grad(set_to_none=True)
            with t.autocast("cpu", dtype=dt if low else t.bfloat16, enabled=low): logits = net(x)
            scaler.scale(t.nn.functional.cross_entropy(logits.float(), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
        return call
    def train_lenet5(self, shape, dt):
        return self.train(self.networks.lenet(), self.fill(int(shape), 1, 28, 28), int(shape), dt)
    def train_mlp(self, shape, dt):
        *widths, batch = numbers(shape)
        return self.train(self.networks.dense(*widths), self.fill(batch, widths[0]), batch, dt)
    layout = "contiguous_format"
    def ready(self, net): return net
    def train_network(self, shape, dt):
        name, batch = shape.split(":")
        side, form = self.networks.NETWORKS[name][0], {"memory_format": getattr(self.t, self.layout)}
        x = self.fill(int(batch), 3, side, side).to(**form)
        return self.train(self.networks.network(name).to(**form), x, int(batch), dt)
    def train_gpt2(self, shape, dt):
        batch, length = numbers(shape)
        net = self.ready(self.networks.GPT2(length))
        x = (self.t.arange(batch * length) * 7 % net.tokens.num_embeddings).view(batch, length)
        call = self.train(net, x, batch * length, dt, self.t.optim.AdamW)
        call()                          # the first one compiles, and makes the optimizer's state
        return call
    train_gpt2_by_hand = train_gpt2

class ChannelsLast(Torch):
    """PyTorch's convolutional networks with the channels of a pixel side by side."""
    layout = "channels_last"
    def __init__(self):
        super().__init__()
        self.name = re.sub(r" \(.*", "", self.name) + ", channels last"
    def case(self, what, shape, type): return super().case(what, shape, type) if what == "train network" else None

class Compiled(Torch):
    """PyTorch's transformer, compiled; minutes before the first step."""
    def __init__(self):
        super().__init__()
        self.name = re.sub(r" \(.*", "", self.name) + ", compiled"
    def ready(self, net): return self.t.compile(net)
    def case(self, what, shape, type): return super().case(what, shape, type) if what == "train gpt2" else None

class OneDNN(Torch):
    """oneDNN's product of FP32, which PyTorch's torch.mm leaves to another library."""
    def __init__(self):
        super().__init__()
        self.product, self.name = self.t.ops.mkldnn._linear_pointwise, re.sub(r".*\((.*)\)", r"\1", self.name)
    def case(self, what, shape, type):
        if what != "gemm" or type != "f32": return None
        ta, tb, m, n, k = product(shape)
        a, b = self.fill(k, m).t() if ta else self.fill(m, k), self.fill(n, k) if tb else self.fill(k, n).t()
        return lambda: self.product(a, b, None, "none", [], "")

class OpenBLAS:
    """NumPy's own, that of the package scipy-openblas32, or the system's: the first that is there."""
    def __init__(self):
        import numpy
        self.np = numpy
        libs = glob.glob(os.path.join(os.path.dirname(numpy.__file__) + ".libs", "*openblas*"))
        libs += glob.glob(os.path.join(os.path.dirname(os.path.dirname(numpy.__file__)), "scipy_openblas32/lib/libscipy*.so"))
        for path in libs + ["libopenblas.so.0", "libopenblas.dylib"]:
            for form in ("scipy_%s64_", "scipy_%s", "%s64_", "%s"):
                if self.load(path, form): return
        raise ImportError("no OpenBLAS")
    def load(self, path, form):
        try:
            lib = ctypes.CDLL(path)
            self.gemm, config = getattr(lib, form % "cblas_sgemm"), getattr(lib, form % "openblas_get_config")
            self.set_threads = getattr(lib, form % "openblas_set_num_threads")
        except (OSError, AttributeError): return False
        config.restype, self.gemm.restype = ctypes.c_char_p, None
        self.name = "OpenBLAS " + config().decode().split()[1]
        self.int = ctypes.c_int64 if "64_" in form else ctypes.c_int
        return True
    def threads(self, n): self.set_threads(n)
    def case(self, what, shape, type):
        if what != "gemm" or type != "f32": return None
        ta, tb, m, n, k = product(shape)
        a, b, c = (self.np.resize((self.np.arange(1009) * 377 % 1009) / 504.5 - 1, s).astype("f4") for s in (m * k, k * n, m * n))
        at = lambda x: x.ctypes.data_as(ctypes.c_void_p)
        args = [101, 112 if ta else 111, 112 if tb else 111, self.int(m), self.int(n), self.int(k), ctypes.c_float(1), at(a),
                self.int(m if ta else k), at(b), self.int(k if tb else n), ctypes.c_float(0), at(c), self.int(n)]
        keep = (a, b, c)
        return lambda: keep and self.gemm(*args)

class NumPy:
    def __init__(self):
        import numpy
        self.np, self.name = numpy, "NumPy " + numpy.__version__
    def threads(self, n): pass
    def case(self, what, shape, type):
        if not what.startswith("convert") or type != "f16": return None
        x, y = (self.np.ones(int(shape), t) for t in (("f4", "f2") if "from" in what else ("f2", "f4")))
        return lambda: self.np.copyto(y, x, casting="unsafe")

class Memcpy:
    """The C library's, over as many bytes as a conversion reads and writes."""
    name = "memcpy"
    def threads(self, n): self.alone = n == 1
    def case(self, what, shape, type):
        if not what.startswith("convert") or not self.alone: return None
        n = int(shape) * 3
        x, y = ctypes.create_string_buffer(b"x" * n, n), ctypes.create_string_buffer(n)
        return lambda: ctypes.memmove(y, x, n)

def processors(): return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
def bind(task, cpus):
    if hasattr(os, "sched_setaffinity"): os.sched_setaffinity(task, cpus)
def tasks(): return {int(t) for t in os.listdir("/proc/self/task")} if os.path.exists("/proc/self/task") else set()

def peers():
    """Those found. Threads that one starts by itself are bound to the processors after the first, as OpenMP's are."""
    found, cpus = [], processors()
    for make in (Torch, ChannelsLast, Compiled, OneDNN, OpenBLAS, NumPy, Memcpy):
        before = tasks()
        try:
            found.append(make())
            found[-1].threads(len(cpus))
        except (ImportError, OSError, AttributeError) as e: print("skipped: %s (%s)" % (make.__name__, e))
        for i, task in enumerate(sorted(tasks() - before)): bind(task, {cpus[(i + 1) % len(cpus)]})
        bind(0, cpus)                   # OpenMP has bound this one to the first
    return found

# --- ours ---------------------------------------------------------------------------------------------------

class Ours:
    def __init__(self, program, threads, *clock):
        self.process = subprocess.Popen([program, "serve", *clock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=dict(os.environ, OMP_NUM_THREADS=str(threads)))
        self.isa, self.threads = self.process.stdout.readline().split()
    def ask(self, request):
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()
    def open(self, line):
        unit, work = self.ask("open %d" % line)
        return unit, float(work)
    def ours(self): return float(self.ask("ours")[0])
    def limit(self): return float(self.ask("limit")[0])
    def close(self):
        self.process.stdin.close()
        self.process.wait()

def listed(program):
    rows = subprocess.run([program, "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [row.split("\t") for row in rows]

def measure(ours, found, line, case, threads, rounds):
    """The rows of one case, whose type ends with -fast where ours runs with AMP_SUMS_FAST: [what, shape, type, threads, unit, ours, limit, share, peer, theirs, ratio], one a peer.
    share and ratio are medians of those of the rounds."""
    unit, work = ours.open(line)
    samplers, names = [ours.ours, ours.limit], []
    for peer in found:
        call = peer.case(*case[:2], case[2].replace("-fast", ""))
        if call:
            samplers.append(Sampler(call).seconds)
            names.append(peer.name)
    seconds = [[] for _ in samplers]
    for done in range(rounds):
        for s, sampler in zip(seconds, samplers):
            if done >= 3 and sum(s) > ENOUGH: continue
            time.sleep(REST)
            s.append(sampler())
    figures = [1e3 * t if unit == "ms" else 1e-9 * work / t for t in map(statistics.median, seconds)]
    against = [statistics.median(b / a for a, b in zip(seconds[0], s)) for s in seconds]
    head = list(case) + [threads, unit] + figures[:2] + [against[1]]
    return [head + list(row) for row in zip(names, figures[2:], against[2:])] or [head + ["", None, None]]

def run(program, found, short, rounds):
    """All rows, or those of the short list, in the order of the cases, and the instruction set."""
    rows, done = [], 0
    cpus = processors()
    sizes = [1] if by_processor else sorted({1, min(4, len(cpus))}, reverse=True)
    cases = [(line, case) for line, (*case, starred) in enumerate(listed(program))
             if (starred == "1" or not short) and all(w in " ".join(case) for w in os.environ.get("ONLY", "").split())]
    total = len(sizes) * len(cases)
    for threads in sizes:
        here = [int(os.environ.get("BENCH_CPU", cpus[-1]))] if threads == 1 else cpus
        bind(0, here)
        ours = Ours(program, threads, *["processor"] * by_processor)
        bind(0, here[:1])                # where the peers' first thread is
        if int(ours.threads) != threads: print("skipped: %d threads (built without OpenMP)" % threads)
        else:
            for peer in found: peer.threads(threads)
            for line, case in cases:
                # With AVX2 alone, PyTorch takes minutes for a step of GPT-2 in 16 bits.
                if ours.isa == "avx2" and case[0].startswith("train gpt2") and case[2] != "f32": continue
                bar("%s %s %s, %s" % (*case, counted(threads)), done, total)
                done += 1
                measured = measure(ours, found, line, case, threads, rounds)
                rows += [(line, threads, row) for row in measured]
                bar("", 1, 1)
                print(spoken(measured), flush=True)
                gc.collect()
        ours.close()
    bind(0, cpus)
    rows = [row for _, _, row in sorted(rows, key=lambda r: r[:2])]
    return rows + ([] if by_processor or "ONLY" in os.environ else start_up(program, found)), ours.isa

def start_up(program, found):
    """A new process, from its start to its end, that makes one small product."""
    def process(command):
        def call(): subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return statistics.median(loop(call, 1) for _ in range(5)) * 1e3
    ours, rows = process([program, "first"]), []
    scripts = {"PyTorch": "import torch; torch.mm(torch.ones(64, 64), torch.ones(64, 64))",
               "NumPy": "import numpy; numpy.ones((64, 64), 'f4') @ numpy.ones((64, 64), 'f4')"}
    for peer in found:
        script = scripts.get(peer.name.split()[0])
        if not script: continue
        theirs = process([sys.executable, "-c", script])
        rows.append(["new process, one gemm", "NN:64x64x64", "f32", 1, "ms", ours, None, None, peer.name, theirs, theirs / ours])
    return rows or [["new process, one gemm", "NN:64x64x64", "f32", 1, "ms", ours, None, None, "", None, None]]

# --- what is written ------------------------------------------------------------------------------------------

def counted(threads): return "%d thread%s" % (threads, "s" if threads > 1 else "")
def bar(label, done, total, width=30):
    """On a terminal, drawn over itself, as chart_progress in examples/chart.h; gone when done."""
    if not sys.stderr.isatty(): return
    full = width * done // total
    sys.stderr.write("\r  [%s%s] %3d %%  %.40s\x1b[K" % ("#" * full, " " * (width - full), 100 * done // total, label) if done < total else "\r\x1b[K")
    sys.stderr.flush()
def spoken(rows, width=30):
    """What a person reads of one case: a line with a name, a figure with its unit and a bar for ours, the limit and each peer."""
    what, shape, type, threads, unit, ours, limit, share = rows[0][:8]
    lines = [("amp.h", ours, "%.0f %% of the limit" % min(100, 100 * share))]
    lines += [(r[8], r[9], "amp.h is %.2f times as fast" % r[10]) for r in rows if r[8]] + [("limit", limit, "")]
    speed = [1 / f if unit == "ms" else f for _, f, _ in lines]
    text = ["", "%s %s %s, %s" % (what, shape, type, counted(threads))]
    for (name, figure, remark), s in zip(lines, speed):
        text.append("  %-32.32s %9s %-8s %-*s %s" % (name, short(figure), unit, width, "#" * max(1, round(width * s / max(speed))), remark))
    return "\n".join(line.rstrip() for line in text)

def short(x): return "-" if x is None else "%.3g" % x if x < 100 else "%.0f" % x
def text(row):
    what, shape, type, threads, unit, ours, limit, share, peer, theirs, ratio = row
    cells = [what, shape, type, str(threads), unit, short(ours), short(limit), "-" if share is None else "%.0f %%" % min(100, 100 * share),
             peer or "-", short(theirs), "-" if ratio is None else "%.2f" % ratio]
    return "| " + " | ".join(cells) + " |"

def table(rows):
    return ["| what | shape | type | threads | unit | ours | limit | of the limit | peer | theirs | ratio |",
            "|---|---|---|---|---|---|---|---|---|---|---|"] + [text(r) for r in rows]

def busy():
    """Seconds that all programs have used a core of this machine so far, and those of this one and its children."""
    try: ticks = open("/proc/stat").readline().split()[1:]
    except OSError: return 0.0, 0.0
    idle, own = int(ticks[3]) + int(ticks[4]), os.times()
    return (sum(map(int, ticks[:8])) - idle) / os.sysconf("SC_CLK_TCK"), sum(own[:4])

def machine():
    name = cpu("model name") or platform.processor() or platform.machine()
    if cpu("cpu family"): name += " (family %s, model %s)" % (cpu("cpu family"), cpu("model"))
    return "%s, %d cores, %s" % (name, os.cpu_count(), platform.system())

def header(isa, compiler, found, others):
    version = subprocess.run(compiler.split()[:1] + ["--version"], capture_output=True, text=True).stdout.split("\n")[0]
    beside = "nothing to speak of" if others < 0.2 else "other programs, which kept %.1f cores busy on average: read the ratios, not the figures" % others
    return ["# Speed, %s" % datetime.date.today(), "",
            "- machine: %s; amp.h took its %s path" % (machine(), isa), "- compiler: %s, `%s`" % (version, compiler),
            "- peers: %s; called from Python, which costs a few microseconds a call" % (", ".join(p.name for p in found) or "none here")
            + (", and held to %s by %s" % (isa, ", ".join("%s=%s" % h for h in held.items())) if held else ""),
            "- beside it ran: " + beside + (" (times are seconds of the processor)" if by_processor else ""),
            "- a share above 100 % of a limit as measured is given as 100; each figure is a median over rounds in which ours, the limit and each peer were timed in turn; ratio: how many",
            "  times as fast ours is (below 1: the peer is faster); limit: see bench.c", ""]

def processor():
    """amd-26-2: the processor's maker, family and model."""
    maker = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(cpu("vendor_id"))
    return "-".join((maker, cpu("cpu family"), cpu("model"))) if maker else re.sub(r"\W+", "-", platform.machine().lower())

def write(path, lines):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f: f.write("\n".join(lines) + "\n")
    print("wrote", os.path.relpath(path))

def main():
    program, compiler, quick = sys.argv[1], sys.argv[2], "quick" in sys.argv[3:]
    found, before = peers(), (time.time(),) + busy()
    gc.disable()
    rows, isa = run(program, found, quick or held, 5 if quick else 7)
    seconds, (all_busy, own) = time.time() - before[0], busy()
    others = max(0.0, (all_busy - before[1]) - (own - before[2])) / seconds
    starred = {(w, s) for w, s, _, star in listed(program) if star == "1"}
    short_list, rest = ([r for r in rows if ((r[0], r[1]) in starred) == s] for s in (True, False))
    lines = header(isa, compiler, found, others) + table(short_list)
    if quick: return write("build/bench-quick.md", lines)
    path = os.path.join(HERE, "results", "%s-%s" % (datetime.date.today(), processor()))
    if held: return write(path + "-%s.md" % isa, lines)
    write(path + ".md", lines + ["", "## Other sizes", ""] + table(rest))
    charts.write_all(path + ".md", rows, short_list, charts.facts_of(path + ".md"))

if __name__ == "__main__": main()
