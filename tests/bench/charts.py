"""charts.py [RESULTS.md]: the three pictures of bench.py, as SVG, from the rows of its table; from a file of them, drawn anew."""
import math, re, sys

# The colours of examples/chart.h, light and dark: ours is FP32's, peers have the others.
OURS, PEERS, INK, GRID = "c0", ["c2", "c3", "c4", "c1", "c6"], "ink", "c6"
LIGHT = ["#2f343b", "#0a62f0", "#bd8a05", "#91328f", "#21a05f", "#a01008", "#8f959f", "#4d535c"]
DARK = ["#e6ebf5", "#3578ff", "#fbc104", "#c468d6", "#52e898", "#d8281a", "#7f858f", "#a9b1bc"]
def rules(colours): return "".join(".%s{fill:%s;stroke:%s}" % ("ink" if i == 7 else "c%d" % i, c, c) for i, c in enumerate(colours))
STYLE = "<style>%s\n@media(prefers-color-scheme:dark){%s}\ntext,rect{stroke:none!important}polyline{fill:none}</style>" % (rules(LIGHT), rules(DARK))

def esc(text): return str(text).replace("&", "&amp;").replace("<", "&lt;")
def label(x, y, text, size=11, anchor="start", colour=INK):
    return '<text x="%.1f" y="%.1f" font-size="%d" text-anchor="%s" class="%s">%s</text>' % (x, y, size, anchor, colour, esc(text))
def rect(x, y, w, h, colour): return '<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" class="%s"/>' % (x, y, max(w, 0.5), h, colour)
def stroke(x1, y1, x2, y2, colour, dash=""):
    return '<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" class="%s"%s/>' % (x1, y1, x2, y2, colour, ' stroke-dasharray="4 3"' if dash else "")
def picture(width, height, parts):
    return ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif">' % (width, height),
            STYLE] + parts + ["</svg>"]

def bars(rows):
    """For each case a bar of ours and one of each peer, as shares of the limit; a column for each number of threads."""
    threads = sorted({r[3] for r in rows})
    names = [n for n in dict.fromkeys(r[8] for r in rows) if n]
    colour = {n: PEERS[i % len(PEERS)] for i, n in enumerate(names)}
    cases = list(dict.fromkeys((r[0], r[1], r[2]) for r in rows))
    left, column, bar, scale, most = 330, 330, 11, 150.0, 1.0     # scale: pixels of the whole limit
    parts, last = [label(8, 18, "Share of the processor's limit as measured (dashed line), in percent; what passed it is cut to 100", 13)], None
    x = 8
    for name, c in [("amp.h", OURS)] + list(colour.items()):
        parts += [rect(x, 26, 10, 10, c), label(x + 14, 35, name)]
        x += 34 + 6 * len(name)
    for i, t in enumerate(threads): parts.append(label(left + column * i, 56, "%d thread%s" % (t, "s" if t > 1 else ""), 12))
    y = top = 62
    for case in cases:
        here = [[r for r in rows if tuple(r[:3]) == case and r[3] == t and r[7] is not None] for t in threads]
        if case[:2] != last: parts.append(label(8, y + 8, "%s  %s" % case[:2], 11))
        last = case[:2]
        parts.append(label(left - 8, y + 8, case[2], 10, "end"))
        for i, group in enumerate(here):
            shares = [(OURS, "amp.h", group[0][7])] if group else []
            shares += [(colour[r[8]], r[8].split(" ")[0].strip(","), r[7] / r[10]) for r in group if r[8]]
            for k, (c, name, share) in enumerate(shares):
                width = scale * min(share, most)
                parts += [rect(left + column * i, y + bar * k, width, bar - 1, c),
                          label(left + column * i + width + 4, y + bar * k + 9, "%.0f %s" % (100 * min(share, most), name), 10)]
        y += 6 + bar * max(1, *(len(g) + 1 for g in here))
    for i in range(len(threads)): parts.append(stroke(left + column * i + scale, top, left + column * i + scale, y, INK, "dash"))
    return picture(left + column * len(threads), y + 10, parts)

NETWORKS = {"train lenet5": "LeNet-5", "train mlp": "dense 784-512-512-10", "train gpt2": "GPT-2, 124 M",
            "stack": "3x3 convolutions", "residual": "residual network", "separable": "separable convolutions",
            "bottleneck": "bottleneck network"}
KINDS = {"f32": "FP32", "bf16": "BF16", "bf16-fast": "BF16, fast sums"}        # FP16 takes as long as FP32
def network(row):
    """The name of a training step that the chart of steps shows, or None."""
    if row[1] not in ("64", "784x512x512x10:256", "4x64") and row[0] != "train network": return None
    return NETWORKS.get(row[1].split(":")[0] if row[0] == "train network" else row[0])

def milliseconds(t): return "%.3g ms" % t if t < 1000 else "%.2f s" % (t / 1000)
def steps(rows, facts):
    """A training step on one thread, ours and PyTorch's, the faster of its layouts: a bar with its name and its time. A bar of
    eight times the time of ours in FP32 or more is cut."""
    rows = [r for r in rows if r[3] == 1 and r[2] in KINDS and network(r)]
    left, scale, bar, y = 360, 400.0, 20, 84
    parts = [label(8, 22, "A training step on one thread: in FP32 mostly amp.h is faster, in BF16 now PyTorch, now amp.h", 16),
             label(8, 43, facts, 13),
             label(8, 62, "each network has a scale of its own; runs differ by 30 %; PyTorch has the faster of its layouts", 13)]
    for name in dict.fromkeys(network(r) for r in rows):
        here = [r for r in rows if network(r) == name]
        batch = re.search(r"(\d+)(?:x\d+)?$", here[0][1].split(":")[-1] if ":" in here[0][1] else here[0][1])
        times = []
        for kind in KINDS:
            of_kind = [r for r in here if r[2] == kind]
            theirs = [r[9] for r in of_kind if r[8].startswith("PyTorch")]
            if of_kind: times.append(("amp.h " + KINDS[kind], OURS if kind == "f32" else "c2", of_kind[0][5]))
            if theirs and kind != "bf16-fast": times.append(("PyTorch " + KINDS[kind], GRID, min(theirs)))
        ours = next(t for n, _, t in times if n == "amp.h FP32")
        longest = max(t for _, _, t in times if t < 8 * ours)
        parts.append(label(8, y + 12, name + (", batch " + batch.group(1) if here[0][1] != "4x64" else ", 4 x 64 tokens"), 12))
        for who, colour, t in times:
            width = scale * min(t / longest, 1.12)
            parts += [rect(left, y, width, bar - 4, colour), label(left - 6, y + 12, who, 13, "end"),
                      label(left + width + 5, y + 12, milliseconds(t) + (" (bar cut)" if t > longest else ""), 13)]
            y += bar
        y += 10
    return picture(left + 530, y + 4, parts)

def panel(x, y, title, axis, lines):
    """Lines of (name, colour, dash, [(size, milliseconds)]) on two logarithmic axes."""
    width, height = 300, 220
    points = [p for _, _, _, line in lines for p in line]
    if not points: return []
    low, high = (f(math.log(p[0], 2) for p in points) for f in (min, max))
    bottom, top = math.floor(min(math.log10(p[1]) for p in points)), math.ceil(max(math.log10(p[1]) for p in points))
    at_x = lambda v: x + width * (math.log(v, 2) - low) / max(high - low, 1)
    at_y = lambda v: y + height * (top - math.log10(v)) / max(top - bottom, 1)
    parts = [label(x, y - 8, title, 12), label(x + width / 2, y + height + 30, axis, 11, "middle")]
    for e in range(bottom, top + 1):
        parts += [stroke(x, at_y(10.0 ** e), x + width, at_y(10.0 ** e), GRID), label(x - 4, at_y(10.0 ** e) + 4, "%g ms" % 10.0 ** e, 9, "end")]
    for size in sorted({p[0] for p in points}): parts.append(label(at_x(size), y + height + 14, size, 9, "middle"))
    for _, colour, dash, line in lines:
        path = " ".join("%.1f,%.1f" % (at_x(a), at_y(b)) for a, b in sorted(line))
        parts.append('<polyline points="%s" class="%s" stroke-width="2"%s/>' % (path, colour, ' stroke-dasharray="5 3"' if dash else ""))
    return parts

def scaling(rows):
    """A training step of the dense network: over the batch at width 512, and over the width at batch 256."""
    shape = lambda r: [int(n) for n in r[1].replace(":", "x").split("x")]
    threads, names = sorted({r[3] for r in rows}), [n for n in dict.fromkeys(r[8] for r in rows) if n]
    sets = [("batch, 784-512-512-10", 4, lambda s: s[1] == 512), ("width W, 784-W-W-10, batch 256", 1, lambda s: s[4] == 256)]
    legend = [("amp.h f32", OURS, ""), ("amp.h bf16", OURS, "dash"), ("limit of FP32", GRID, "")]
    legend += [("%s %s" % (n, t), PEERS[i], d) for i, n in enumerate(names) for t, d in (("f32", ""), ("bf16", "dash"))]
    parts = []
    for i, (name, colour, dash) in enumerate(legend):
        x, y = 12 + 330 * (i % 2), 16 + 16 * (i // 2)
        parts += [stroke(x, y - 4, x + 26, y - 4, colour, dash), label(x + 32, y, name)]
    for i, t in enumerate(threads):
        for k, (axis, key, wanted) in enumerate(sets):
            lines = []
            for kind, dash in (("f32", ""), ("bf16", "dash")):
                own = [r for r in rows if r[3] == t and r[2] == kind and wanted(shape(r))]
                lines.append(("ours", OURS, dash, sorted({(shape(r)[key], r[5]) for r in own})))
                if kind == "f32": lines.append(("limit", GRID, "", sorted({(shape(r)[key], r[6]) for r in own})))
                lines += [(n, PEERS[j], dash, [(shape(r)[key], r[9]) for r in own if r[8] == n]) for j, n in enumerate(names)]
            parts += panel(60 + 380 * k, 90 + 290 * i, "a training step, %d thread%s" % (t, "s" if t > 1 else ""), axis, [l for l in lines if l[3]])
    return picture(780, 100 + 290 * len(threads), parts)

def rows_of(path):
    """The rows of a file of results, its short list first, as bench.py has them."""
    number = lambda text: None if text == "-" else float(text.rstrip(" %"))
    rows, short = [], None
    for line in open(path, encoding="utf-8"):
        if line.startswith("## Other"): short = len(rows)
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) != 11 or cells[0] == "what" or cells[0].startswith("-"): continue
        share = number(cells[7])
        rows.append(cells[:3] + [int(cells[3]), cells[4], number(cells[5]), number(cells[6]), share and share / 100,
                                 cells[8].strip("-"), number(cells[9]), number(cells[10])])
    return rows, rows[:short]

def write_all(path, rows, short_list, facts):
    """The pictures beside a file of results, where they have something to show."""
    pictures = {"-steps": steps(rows, facts), "": bars(short_list), "-scaling": scaling([r for r in rows if r[0] == "train mlp"])}
    if all(r[0].startswith("train") for r in rows): pictures = {"-steps": pictures["-steps"]}
    for end, lines in pictures.items():
        with open(path[:-3] + end + ".svg", "w", encoding="utf-8") as f: f.write("\n".join(lines) + "\n")

def facts_of(path):
    """The line under the title: processor, instruction set, versions, day."""
    head = open(path, encoding="utf-8").read().split("| what |")[0]
    found = lambda pattern: (re.search(pattern, head) or [None, ""])[1]
    return ", ".join(filter(None, (found(r"machine: (.*?), \d+ core"), found(r"took its (\w+) path"), found(r"(PyTorch [\d.]+)"),
                                   found(r"# Speed, ([\d-]+)"))))

if __name__ == "__main__": write_all(sys.argv[1], *rows_of(sys.argv[1]), facts_of(sys.argv[1]))
