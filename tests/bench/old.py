"""old.py OLD NEW [WORD]: two builds of bench.c beside each other, one of an older commit; `make bench-old` runs it.

Each case that both have and whose line has WORD in it ("gemm", "train", "f16", ...) is timed in turn by both, on one
thread (in seconds of the processor) and on two, and printed with the ratio old / new: 1.1 = the new header takes a tenth
less time. The figure is the median of the rounds' ratios; below 0.9 it is marked. AMP_ISA=avx2 (`make bench-old ISA=avx2`)
holds both, THREADS=1 leaves the second thread out."""
import os, statistics, sys
from bench import Ours, bind, listed, processors, short

ROUNDS = 9
SLOWER = 0.9

def lines_of(program):
    """The number of each case's line."""
    return {tuple(case[:3]): line for line, case in enumerate(listed(program))}

def main():
    programs, word = sys.argv[1:3], " ".join(sys.argv[3:])
    lines, cpus = [lines_of(p) for p in programs], processors()
    cases = [case for case in lines[1] if case in lines[0] and word in " ".join(case)]
    slower = measured = 0
    print("| what | shape | type | threads | unit | old | new | old / new |\n|---|---|---|---|---|---|---|---|")
    for threads in sorted({1, min(int(os.environ.get("THREADS", 2)), len(cpus))}):
        bind(0, cpus[-1:] if threads == 1 else cpus)
        both = [Ours(p, threads, *["processor"] * (threads == 1)) for p in programs]
        bind(0, cpus)
        for case in cases:
            unit, work = [o.open(at[case]) for o, at in zip(both, lines)][0]
            seconds = [[o.ours() for o in both] for _ in range(ROUNDS)]
            ratio = statistics.median(old / new for old, new in seconds)
            figures = [1e3 * t if unit == "ms" else 1e-9 * work / t for t in map(statistics.median, zip(*seconds))]
            slower, measured = slower + (ratio < SLOWER), measured + 1
            print("| %s | %s | %s | %d | %s | %s | %s | %.2f%s |" % (*case, threads, unit, short(figures[0]), short(figures[1]),
                  ratio, ", slower" if ratio < SLOWER else ""), flush=True)
        for o in both: o.close()
    print("%d of %d rows are slower" % (slower, measured))

main()
