"""readme.py [--check]: writes the generated parts of README.md, between <!-- NAME --> and <!-- /NAME -->.
program and diff come from examples/, demo, proof and bits from what `make demo > build/demo.txt`, `make check` and
`make test-bits` wrote (build/demo.txt, build/proof.txt and build/bits/table.md; kept as they are when those files are not
there), speed and gpu from the newest files under tests/bench/results. --check only compares program, diff, speed and gpu,
and that the demo shown is a whole one, with its verdict."""
import difflib, glob, os, platform, re, subprocess, sys, datetime

def read(path): return open(path, encoding="utf-8").read()

def program(): return "```c\n" + read("examples/train_small.c").split("*/", 1)[1].strip().replace("../amp.h", "amp.h") + "\n```"

def diff():
    a, b = (read("examples/" + n).split("\n") for n in ("own_loop_fp32.c", "own_loop.c"))
    lines = list(difflib.unified_diff(a, b, "own_loop_fp32.c", "own_loop.c", n=0, lineterm=""))
    changed = sum(1 for l in lines if l[:1] in "+-" and l[:3] not in ("+++", "---"))
    return "%d lines, removed and added ones counted together:\n\n```diff\n%s\n```" % (changed, "\n".join(lines))

def machine():
    cpu = next((l.split(":", 1)[1].strip() for l in read("/proc/cpuinfo").split("\n") if l.startswith("model name")), platform.machine())
    cc = subprocess.run(["cc", "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    return "%s, %s, -O2, %s." % (cpu, cc, datetime.date.today())

def printed(path):
    if not os.path.exists(path): return None
    keep = [l.rstrip() for l in read(path).split("\n") if l.strip() and not re.match(r"^ *O\d +\d+/|^Picture|^\d+ passed", l)]
    return "```\n" + "\n".join(keep) + "\n```\n" + machine()

VERDICT = "\nVerdict: as good as FP32"
def table(path): return "\n" + read(path) if os.path.exists(path) else None

TYPES = {"f32": "FP32", "f16": "FP16", "bf16": "BF16", "f16-fast": "FP16, fast sums", "bf16-fast": "BF16, fast sums"}
def speed_of(path):
    """The short list of one file of results, a row for each case: against the fastest peer, on each number of threads.
    FP16 stands against the fastest in FP16 or FP32 where the unit is the same work in both."""
    head, rest = read(path).split("| what |", 1)
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in rest.split("\n\n")[0].strip().split("\n")[2:]]
    def cell(case, type, threads):
        here = [r for r in rows if r[:4] == case + [type, threads] and r[8] != "memcpy"]
        if not here: return ""
        unit, ours, share = here[0][4], float(here[0][5]), here[0][7]
        others = [r for r in rows if type == "f16" and unit != "GB/s" and r[:4] == case + ["f32", threads]]
        ratios = [float(r[10]) for r in here if r[10] != "-"]
        for theirs in (float(r[9]) for r in others if r[10] != "-"):
            ratios.append(theirs / ours if unit == "ms" else ours / theirs)
        return "%s (%s)" % ("%.2f" % min(ratios) if ratios else "-", share)
    threads = list(dict.fromkeys(r[3] for r in rows))
    types = [t for t in TYPES if t in (r[2] for r in rows)]
    lines = ["| | shape | %s |" % " | ".join(TYPES[t] for t in types), "|---|---|" + "---|" * len(types)]
    for case in dict.fromkeys(tuple(r[:2]) for r in rows):
        cells = [", ".join(filter(None, (cell(list(case), t, n) for n in threads))) for t in types]
        lines.append("| %s |" % " | ".join(list(case) + cells))
    facts = [line for line in head.split("\n") if line.startswith(("- machine", "- compiler", "- peers", "- beside"))]
    name = path[:-3]
    also = [("; as bars", name + ".svg"), ("; held to AVX2", name + "-avx2.md")]
    links = "".join("%s: [%s](%s)" % (what, file, file) for what, file in [("All figures", path)] + also if os.path.exists(file))
    picture = name + "-scaling.svg"
    links += ".\n" + ("\n![a training step over batch and width](%s)\n" % picture if os.path.exists(picture) else "")
    return "\n" + "\n".join(lines + [""] + facts) + "\n\n" + links

def speed():
    """The newest results of each processor: those held to AVX2 only if there are no others."""
    newest = {}
    for path in sorted(glob.glob("tests/bench/results/????-??-??-*.md"), key=lambda p: (not p.endswith("-avx2.md"), p)):
        processor = re.sub("-avx2$", "", path[:-3].split("-", 3)[3])
        if not processor.startswith("cuda"): newest[processor] = path
    return "\n".join(speed_of(newest[processor]) for processor in sorted(newest)) or None

def gpu():
    """Of the newest file: the products of BF16 into BF16 beside cuBLAS, the passes beside a copy, and all beside PyTorch."""
    path = max(glob.glob("tests/bench/results/????-??-??-cuda-*.md"), default=None)
    if not path: return None
    head, *sections = read(path).split("\n### ")
    kept = lambda text: [l for l in text.split("\n") if l.startswith("|")]
    products = [l for l in kept(sections[0]) if "->" not in l or "| bf16 -> bf16 |" in l]
    lines = head.strip("# \n").split("\n")[:2] + ["", "Products, TFLOP/s:", ""] + products
    for section in sections[1:]:
        if section.startswith("Passes"): lines += ["", "Passes over parameters, GB/s:", ""] + kept(section)
        if section.startswith("Beside PyTorch"): lines += ["", section.split("\n")[0] + ":", ""] + kept(section)
    return "\n" + "\n".join(lines + ["", "All figures: [%s](%s)." % (path, path)]) + "\n"

text = before = read("README.md")
parts = {"program": program(), "diff": diff(), "speed": speed(), "gpu": gpu()}
if "--check" not in sys.argv: parts.update({"demo": printed("build/demo.txt"), "proof": printed("build/proof.txt"), "bits": table("build/bits/table.md")})
for name, content in parts.items():
    if content is None: continue
    text, n = re.subn(r"(<!-- %s -->\n).*?(<!-- /%s -->)" % (name, name), lambda m: m.group(1) + content + "\n" + m.group(2), text, flags=re.S)
    if n != 1: sys.exit("README.md has no place for '%s'" % name)
if VERDICT not in text: sys.exit("README.md shows a demo without its verdict: make demo > build/demo.txt, and tests/readme.py")
if "--check" in sys.argv: sys.exit("README.md is behind examples/ or tests/bench/results: run tests/readme.py" if text != before else 0)
open("README.md", "w", encoding="utf-8").write(text)
