"""readme.py [--check]: writes what README.md and its neighbours take from elsewhere, between <!-- NAME --> and <!-- /NAME -->.
examples/lessons/README.md      contents: each lesson's program, picture and answers, and the other headings
README.md                       program and its output (examples/train_small.c, build/train_small), gpu: four steps,
                                steps beside PyTorch's, and claims that must be what tests/results.md shows
examples/own_loop.diff          own_loop_fp32.c beside own_loop.c; README shows some of its lines
tests/results.md                demo, proof and bits: what `make demo > build/demo.txt`, `make check` and `make test-bits` wrote
tests/bench/results/README.md   train, speed and gpu, from the newest files there
What was not run is kept as it is. --check compares all that needs no run, and looks for the demo's verdict."""
import difflib, glob, os, platform, re, subprocess, sys, datetime

RESULTS, BENCH, DIFF = "tests/results.md", "tests/bench/results/README.md", "examples/own_loop.diff"

def read(path): return open(path, encoding="utf-8").read()

BOOK = "examples/lessons/README.md"
def anchor(heading): return "#" + re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
def contents():
    """The lessons as a table, and the other headings of the book."""
    headings = re.findall(r"^## (.*)$", read(BOOK), re.M)
    lines = ["| lesson | program | picture |", "|---|---|---|"]
    for h in headings:
        if not h[0].isdigit(): continue
        name = os.path.basename(glob.glob("examples/lessons/%02d_*.c" % int(h.split(".")[0]))[0])[:-2]
        lines.append("| [%s](%s) | [%s.c](%s.c) | [%s.svg](%s.svg) |" % (h, anchor(h), name, name, name, name))
    others = ["[%s](%s)" % (h, anchor(h)) for h in headings if not h[0].isdigit()]
    return "\n".join(lines + ["", ", ".join(others) + ", [answers](answers.md)."])

def program(): return "```c\n" + read("examples/train_small.c").split("*/", 1)[1].strip().replace("../amp.h", "amp.h") + "\n```"

def output():
    if not os.path.exists("build/train_small"): return None
    return "```\n" + subprocess.run(["build/train_small"], capture_output=True, text=True, check=True).stdout + "```"

def diff():
    """The whole one, and the lines of it that README may show."""
    a, b = (read("examples/" + n).split("\n") for n in ("own_loop_fp32.c", "own_loop.c"))
    lines = list(difflib.unified_diff(a, b, "own_loop_fp32.c", "own_loop.c", n=0, lineterm=""))
    return "\n".join(lines) + "\n", {line[0] + line[1:].strip() for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")}

def changed(): return sum(line[:1] in ("+", "-") and line[:3] not in ("+++", "---") for line in diff()[0].split("\n"))
def shown(text):
    """README's lines of the diff that are not in it."""
    block = text.split("```diff\n")[1].split("```")[0].rstrip("\n").split("\n")
    return [line for line in block if line[0] + line[1:].strip() not in diff()[1]]

def machine():
    cpu = next((l.split(":", 1)[1].strip() for l in read("/proc/cpuinfo").split("\n") if l.startswith("model name")), platform.machine())
    cc = subprocess.run(["cc", "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    return "%s, %s, -O2, %s." % (cpu, cc, datetime.date.today())

def printed(path):
    if not os.path.exists(path): return None
    keep = [l.rstrip() for l in read(path).split("\n") if l.strip() and not re.match(r"^ *O\d +\d+/|^Picture|^Compiling|^\d+ passed", l)]
    return "```\n" + "\n".join(keep) + "\n```\n" + machine()

VERDICT = "\nVerdict: as good as FP32"
def table(path): return "\n" + read(path) if os.path.exists(path) else None

# --- speed --------------------------------------------------------------------------------------------------------

TYPES = {"f32": "FP32", "f16": "FP16", "bf16": "BF16", "f16-fast": "FP16, fast sums", "bf16-fast": "BF16, fast sums"}
def rows_of(path):
    """The rows of the short list of one file of results: what, shape, type, threads, unit, ours, limit, share, peer, theirs, ratio."""
    lines = read(path).split("| what |", 1)[1].split("\n\n")[0].strip().split("\n")[2:]
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines]

def ratio_of(rows, case, type, threads):
    """How many times as fast as the fastest peer. FP16 stands against the fastest in FP16 or FP32 where the unit is the same work
    in both."""
    here = [r for r in rows if r[:4] == case + [type, threads] and r[8] != "memcpy"]
    if not here: return ""
    unit, ours = here[0][4], float(here[0][5])
    others = [r for r in rows if type == "f16" and unit != "GB/s" and r[:4] == case + ["f32", threads]]
    ratios = [float(r[10]) for r in here if r[10] != "-"]
    for theirs in (float(r[9]) for r in others if r[10] != "-"):
        ratios.append(theirs / ours if unit == "ms" else ours / theirs)
    return "%.2f" % min(ratios) if ratios else "-"

def share_of(rows, case, type, threads):
    return next((r[7] for r in rows if r[:4] == case + [type, threads] and r[8] != "memcpy"), "")

def speed_of(path):
    rows = rows_of(path)
    threads = list(dict.fromkeys(r[3] for r in rows))
    columns = [(t, n) for t in TYPES if t in (r[2] for r in rows) for n in threads]
    names = " | ".join("%s, %s thread%s" % (TYPES[t], n, "" if n == "1" else "s") for t, n in columns)
    lines = []
    for title, cell in (("Times as fast as the fastest peer (below 1: the peer is faster):", ratio_of),
                        ("Share of the processor's limit:", share_of)):
        lines += ["", title, "", "| | shape | %s |" % names, "|---|---|" + "---|" * len(columns)]
        for case in dict.fromkeys(tuple(r[:2]) for r in rows):
            lines.append("| %s |" % " | ".join(list(case) + [cell(rows, list(case), t, n) for t, n in columns]))
    head = read(path).split("| what |", 1)[0]
    facts = [line for line in head.split("\n") if line.startswith(("- machine", "- compiler", "- peers", "- beside", "- amp.h"))]
    file = os.path.basename(path)
    links = ["[all figures](%s)" % file]
    for what, end in (("as bars", ".svg"), ("a step as bars", "-steps.svg"), ("a step over batch and width", "-scaling.svg"), ("held to AVX2", "-avx2.md")):
        if os.path.exists(path[:-3] + end): links.append("[%s](%s)" % (what, file[:-3] + end))
    return "\n".join(["### " + re.search(r"machine: (.*?);", head).group(1) + ", " + file[:10], ""] + facts + lines + ["", ", ".join(links).capitalize() + "."])

def results():
    """The newest of each processor: those held to AVX2 only if there are no others."""
    newest = {}
    for path in sorted(glob.glob("tests/bench/results/????-??-??-*.md"), key=lambda p: (not p.endswith("-avx2.md"), p)):
        processor = re.sub("-avx2$", "", path[:-3].split("-", 3)[3])
        if not processor.startswith("cuda") and not processor.endswith("-train"): newest[processor] = path
    return newest

def train():
    """The newest steps beside PyTorch's, the faster of its layouts."""
    path = max(glob.glob("tests/bench/results/????-??-??-*-train.md"), default=None)
    if not path: return None
    rows, lines = rows_of(path), ["| a step of | shape | type | threads | amp | PyTorch | times as fast |", "|---|---|---|---|---|---|---|"]
    for case in dict.fromkeys(tuple(r[:4]) for r in rows):
        best = min((r for r in rows if tuple(r[:4]) == case), key=lambda r: float(r[10]))
        lines.append("| %s | %s | %s | %s | %s ms | %s ms | %s |" % (case[:2] + (TYPES[case[2]], case[3], best[5], best[9], best[10])))
    head = read(path).split("| what |", 1)[0]
    facts = [line for line in head.split("\n") if line.startswith(("- machine", "- compiler", "- beside"))]
    file = os.path.basename(path)
    return "\n" + "\n".join(facts + [""] + lines) + "\n\n[All figures](%s), [as bars](%s-steps.svg).\n" % (file, file[:-3])

NETWORKS = {"lenet5": "LeNet-5", "mlp": "dense", "stack": "3x3", "residual": "residual", "separable": "separable", "bottleneck": "bottleneck",
            "gpt2": "GPT-2"}
def network(row): return next((n for n in NETWORKS if n in row[0] or row[1].startswith(n + ":")), None)

def over_fp32(path, type, shapes):
    """How many times as fast as FP32 the steps of these shapes are in a type, least and most, on one thread: as timed in turn, if the
    file has such rows."""
    turns = [float(m[1]) for m in re.finditer(r"^\| train [^|]*\|[^|]*\| %s \| ([\d.]+) \|$" % type, read(path), re.M)]
    if turns: return "%.2f to %.2f" % (min(turns), max(turns))
    ms = {(tuple(r[:2]), r[2]): float(r[5]) for r in rows_of(path) if r[0].startswith("train") and r[3] == "1"}
    ratios = [ms[c, "f32"] / ms[c, t] for c, t in ms if t == type and c in shapes and (c, "f32") in ms]
    return "%.2f to %.2f" % (min(ratios), max(ratios)) if ratios else "?"

def steps():
    """README's steps: of the newest beside PyTorch's the faster of its layouts, by numbers of threads; what BF16 saves, by processor."""
    path = max(glob.glob("tests/bench/results/????-??-??-*-train.md"), default=None)
    if not path: return None
    rows, zen = rows_of(path), [p for n, p in results().items() if re.match("amd-(25-17|26)", n)]
    threads = sorted({r[3] for r in rows})
    lines = ["|times as fast as PyTorch %s, %s|FP32|BF16|BF16, fast sums|" % (re.search(r"PyTorch ([\d.]+)", read(path)).group(1),
             "/".join(threads) + " thread" + "s" * (threads != ["1"])), "|---|---|---|---|"]
    for name in dict.fromkeys(map(network, rows)):
        found = lambda type: [[float(r[10]) for r in rows if (network(r), r[2], r[3]) == (name, type, n)] for n in threads]
        lines.append("|%s|%s|" % (NETWORKS[name], "|".join("/".join("%.2f" % min(f) for f in found(t) if f) for t in ("f32", "bf16", "bf16-fast"))))
    shapes = {tuple(r[:2]) for r in rows}
    zen = [over_fp32(p, "bf16", shapes).split(" to ") for p in zen]
    return "\n".join(lines + ["", "|a step in BF16, beside FP32 of amp|times as fast|", "|---|---|",
                              "|AMD from Zen 4 (earlier version)|%s to %s|" % (min(z[0] for z in zen), max(z[1] for z in zen)),
                              "|AMX, `AMP_SUMS_FAST`|%s|" % over_fp32(path, "bf16-fast", shapes),
                              "|others|%s; FP16 %s|" % (over_fp32(path, "bf16", shapes), over_fp32(path, "f16", shapes))])

def claims():
    """Sentences of README with figures from tests/results.md."""
    masters = ["%.0f" % float(re.search(r"lr 5e-6 FP16 %s masters +([\d.]+)" % w, read(RESULTS)).group(1)) for w in ("without", "with")]
    return ["at a learning rate of 5e-6 %s %% right, with masters %s" % tuple(masters)]

def speed():
    newest = results()
    return "\n" + "\n\n".join(speed_of(newest[p]) for p in sorted(newest)) + "\n" if newest else None

# --- GPU ------------------------------------------------------------------------------------------------------------

def gpu_files(): return sorted(glob.glob("tests/bench/results/????-??-??-cuda-*.md"), reverse=True)
def gpu_file(): return next(iter(gpu_files()), None)
def cells(line): return [c.strip() for c in line.strip().strip("|").split("|")]
def is_row(line): return line.startswith("|") and not line.startswith("|--") and re.search(r"\d", line)

def first_products(sections): return next((s for s in sections if s.startswith("Products")), "")

def gpu_all():
    """Of the newest file: the products of BF16 into BF16 beside cuBLAS, the passes beside a copy, and all beside PyTorch."""
    path = gpu_file()
    if not path: return None
    head, *sections = read(path).split("\n### ")
    kept = lambda text: [l for l in text.split("\n") if l.startswith("|")]
    products = [l for l in kept(first_products(sections)) if "->" not in l or "| bf16 -> bf16 |" in l]
    lines = head.strip("# \n").split("\n")[:2] + (["", "Products, TFLOP/s:", ""] if products else []) + products
    for section in sections:
        if section.startswith("Passes"): lines += ["", "Passes over parameters, GB/s:", ""] + kept(section)
        if section.startswith("Beside PyTorch") and "cuDNN" not in section.split("\n")[0]: lines += ["", section.split("\n")[0] + ":", ""] + kept(section)
    links = ", ".join("[%s](%s)" % (name, name) for name in map(os.path.basename, gpu_files()))
    return "\n" + "\n".join(lines + ["", "All figures, the newest first: %s." % links]) + "\n"

STEPS = (("gpt2:8x1024 bf16", "GPT-2 124M, 8 x 1024 tokens, BF16"), ("resnet34:128 f16", "ResNet-34, 128 images, FP16"),
         ("lenet5:64 f16", "LeNet-5, 64 images, FP16"), ("784x4096x4096x4096x4096x4096x10:8192 bf16", "MLP of 4096 (5x), 8192 rows, BF16"))

def gpu():
    """Steps of four networks beside PyTorch's best form."""
    path = gpu_file()
    if not path: return None
    head, *sections = read(path).split("\n### ")
    torch = [c for c in map(cells, filter(is_row, "\n".join(s for s in sections if s.startswith("Beside PyTorch")).split("\n")))]
    name = re.findall(r"Beside (PyTorch [\d.]+)", read(path))[0]
    words = head.strip("# \n").split("\n")[0].split(",")
    lines = ["| %s,%s | amp, ms | %s, ms | times as fast |" % (words[0], words[-1], name), "|---|---|---|---|"]
    for wanted, said in STEPS:
        rows = [c for c in torch if c[0].startswith(wanted) and len(c) > 3 and c[1]]
        for c in sorted(rows, key=lambda c: float(c[2]))[:1]:
            lines.append("| %s | %.2f | %.2f | %s |" % (said, float(c[1]) / 1e3, float(c[2]) / 1e3, c[3]))
    return "\n".join(lines)

# --- writing --------------------------------------------------------------------------------------------------------

check = "--check" in sys.argv
files = {"README.md": {"program": program(), "gpu": gpu(), "steps": steps()}, BOOK: {"contents": contents()}, RESULTS: {}, BENCH: {"train": train(), "speed": speed(), "gpu": gpu_all()}}
if not check:
    files["README.md"]["output"] = output()
    files[RESULTS] = {"demo": printed("build/demo.txt"), "proof": printed("build/proof.txt"), "bits": table("build/bits/table.md")}
behind = []
for path, parts in files.items():
    text = before = read(path)
    for name, content in parts.items():
        if content is None: continue
        text, n = re.subn(r"(<!-- %s -->\n).*?(<!-- /%s -->)" % (name, name), lambda m: m.group(1) + content + "\n" + m.group(2), text, flags=re.S)
        if n != 1: sys.exit("%s has no place for '%s'" % (path, name))
    if path == RESULTS and VERDICT not in text: sys.exit("%s shows a demo without its verdict: make demo > build/demo.txt, and tests/tools/readme.py" % path)
    if text != before: behind.append(path)
    if not check: open(path, "w", encoding="utf-8").write(text)
if not os.path.exists(DIFF) or read(DIFF) != diff()[0]:
    behind.append(DIFF)
    if not check: open(DIFF, "w", encoding="utf-8").write(diff()[0])
if check and behind: sys.exit("behind examples/ or tests/bench/results, run tests/tools/readme.py: " + ", ".join(behind))
text = read("README.md")
if shown(text): sys.exit("README.md shows lines that are not in %s:\n%s" % (DIFF, "\n".join(shown(text))))
if "%d changed lines" % changed() not in text: sys.exit("README.md: %d changed lines turn own_loop_fp32.c into own_loop.c" % changed())
for claim in claims():
    if claim not in text: sys.exit("README.md: " + claim)
