"""charts.py: the two pictures of bench.py, as SVG, from the rows of its table."""
import math

OURS, PEERS, INK, GRID = "#1f6f8b", ["#e07a5f", "#81b29a", "#f2cc8f", "#9a8c98"], "#333333", "#cccccc"

def esc(text): return str(text).replace("&", "&amp;").replace("<", "&lt;")
def label(x, y, text, size=11, anchor="start", colour=INK):
    return '<text x="%.1f" y="%.1f" font-size="%d" text-anchor="%s" fill="%s">%s</text>' % (x, y, size, anchor, colour, esc(text))
def rect(x, y, w, h, colour): return '<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>' % (x, y, max(w, 0.5), h, colour)
def stroke(x1, y1, x2, y2, colour, dash=""):
    return '<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"%s/>' % (x1, y1, x2, y2, colour, ' stroke-dasharray="4 3"' if dash else "")
def picture(width, height, parts):
    return ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif">' % (width, height),
            rect(0, 0, width, height, "#ffffff")] + parts + ["</svg>"]

def bars(rows):
    """For each case a bar of ours and one of each peer, as shares of the limit; a column for each number of threads."""
    threads = sorted({r[3] for r in rows})
    names = [n for n in dict.fromkeys(r[8] for r in rows) if n]
    colour = {n: PEERS[i % len(PEERS)] for i, n in enumerate(names)}
    cases = list(dict.fromkeys((r[0], r[1], r[2]) for r in rows))
    left, column, bar, scale, most = 290, 290, 8, 150.0, 1.6      # scale: pixels of the whole limit
    parts, last = [label(8, 18, "Share of the limit of the processor (dashed line); the number is the share in percent", 12)], None
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
            shares = [(OURS, group[0][7])] + [(colour[r[8]], r[7] / r[10]) for r in group if r[8]] if group else []
            for k, (c, share) in enumerate(shares):
                width = scale * min(share, most)
                parts += [rect(left + column * i, y + bar * k, width, bar - 1, c),
                          label(left + column * i + width + 3, y + bar * k + 7, "%.0f" % (100 * share), 8)]
        y += 6 + bar * max(1, *(len(g) + 1 for g in here))
    for i in range(len(threads)): parts.append(stroke(left + column * i + scale, top, left + column * i + scale, y, INK, "dash"))
    return picture(left + column * len(threads), y + 10, parts)

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
        parts.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="2"%s/>' % (path, colour, ' stroke-dasharray="5 3"' if dash else ""))
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
