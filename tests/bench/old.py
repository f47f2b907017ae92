"""old.py OLD NEW [WORD]: two builds of bench.c beside each other, one with an older amp.h; `make bench-old` runs it.

Each case whose line has WORD in it ("gemm", "train", "f16", ...) is timed in turn by both, on one thread (in seconds of
the processor) and on two, and printed with the ratio old / new: 1.1 = the new header takes a tenth less time. The
figure is the median of the rounds' ratios. A ratio below the target of its row is marked. AMP_ISA=avx2 (`make bench-old ISA=avx2`) holds both,
THREADS=1 leaves the second thread out."""
import os, statistics, sys
from bench import Ours, bind, listed, processors, short

ROUNDS = 9

def target(what, shape, type):
    """The least ratio that a case may have, or None."""
    sizes = [int(n) for n in shape.split(":")[-1].replace("s", "x").split("x") if n.isdigit()]
    if type.endswith("-fast") or "without workspace" in what: return None
    if what == "gemm": return 0.6 if min(sizes) <= 16 else 0.85 if max(sizes) <= 128 else 0.95
    if what == "train lenet5": return 0.7
    if what == "train mlp": return 0.93
    if what.startswith("train"): return 0.9
    if what.startswith("convert"): return 0.9 if sizes[0] <= 65536 else 0.7
    if what.startswith(("check", "unscale", "adam", "sgd")): return 0.9
    if what.startswith("conv "): return None
    return 0.6

def main():
    programs, word = sys.argv[1:3], " ".join(sys.argv[3:])
    cases, cpus = [c[:3] for c in listed(programs[1])], processors()
    assert cases == [c[:3] for c in listed(programs[0])], "the two programs have other cases"
    below = measured = 0
    print("| what | shape | type | threads | unit | old | new | old / new | target |\n|---|---|---|---|---|---|---|---|---|")
    for threads in sorted({1, min(int(os.environ.get("THREADS", 2)), len(cpus))}):
        bind(0, cpus[-1:] if threads == 1 else cpus)
        both = [Ours(p, threads, *["processor"] * (threads == 1)) for p in programs]
        bind(0, cpus)
        for line, (what, shape, type) in enumerate(cases):
            if word not in " ".join((what, shape, type)): continue
            unit, work = [o.open(line) for o in both][0]
            seconds = [[o.ours() for o in both] for _ in range(ROUNDS)]
            ratio, least = statistics.median(old / new for old, new in seconds), target(what, shape, type)
            figures = [1e3 * t if unit == "ms" else 1e-9 * work / t for t in map(statistics.median, zip(*seconds))]
            low = least is not None and ratio < least
            below, measured = below + low, measured + (least is not None)
            print("| %s | %s | %s | %d | %s | %s | %s | %.2f | %s |" % (what, shape, type, threads, unit, short(figures[0]), short(figures[1]),
                  ratio, "-" if least is None else "%.2f%s" % (least, ", below" if low else "")), flush=True)
        for o in both: o.close()
    print("%d of %d rows with a target are below it" % (below, measured))

main()
