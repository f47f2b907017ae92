"""check_header.py HEADER [README CC]: what a reader of the header relies on.
Each tag of the table of contents exists once and in that order; each public prototype has a comment above it or beside
it, or belongs to a group that has one; only ASCII; lines and sentences of comments are not too long;
every C block of the README compiles, and its program prints what stands there."""
import re, subprocess, sys, os, tempfile

header = sys.argv[1]
readme, cc = sys.argv[2:4] if len(sys.argv) > 2 else (None, None)
text = open(header, encoding="utf-8").read()
lines = text.split("\n")
passed = failed = 0

def check(ok, message):
    global passed, failed
    if ok: passed += 1
    else:
        failed += 1
        print("failed:", message)

# table of contents
toc = text[text.index("[TOC]"):text.index("*/")]
listed = [w for w in re.findall(r"^     ([a-z]+)  ", toc, re.M)] + re.findall(r"impl-[a-z]+", toc)
tags = re.findall(r"^/\* >>([a-z-]+)", text, re.M)
check(len(tags) == len(set(tags)), "a tag stands twice: %s" % sorted(t for t in set(tags) if tags.count(t) > 1))
check(sorted(listed) == sorted(tags), "table of contents and tags differ: %s" % sorted(set(listed) ^ set(tags)))
last = ("since", "license")
check([t for t in listed if t not in last] == [t for t in tags if t not in last] or set(listed) != set(tags),
      "tags are not in the order of the table of contents")

# each version says what a program written for the one before meets
version = readme and ".".join(re.search(r"#define AMP_VERSION_%s (\d+)" % part, text).group(1) for part in ("MAJOR", "MINOR", "PATCH"))
if readme:
    since = re.findall(r"^   Since (\d+\.\d+\.\d+)", text[text.find("/* >>since"):text.find("/* >>license")], re.M)
    major, minor, patch = map(int, version.split("."))
    check(since and (since[0] == "%d.%d.%d" % (major, minor, patch - 1) or patch == 0), ">>since begins with %s, for %s" % (since[:1], version))
    check("Version %s (" % version in open(readme, encoding="utf-8").read(), "README's version is not %s" % version)

# text
for i, line in enumerate(lines, 1):
    if any(ord(c) > 126 or (ord(c) < 32) for c in line): check(False, "line %d is not ASCII" % i)
    if len(line) > 100: check(False, "line %d has %d columns" % (i, len(line)))
passed += 2
check(not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text), "left-over marks")

# sentences of comments: at most 25 words. They end at . ? ! : ; before a space, and where a row of a table or code
# begins; code in backquotes is one word, signs are none, and a list of names (commas at every third word) may be long.
CODE, ROW = re.compile(r" {6}.*(\);|<<<|^ *#)"), re.compile(r" {5,}\S.*\S  +\S")
def long_sentences(text, most=25): # [(line, words, sentence)]
    found = []
    for comment in re.finditer(r"/\*.*?\*/", text, re.S):
        words, at = [], text.count("\n", 0, comment.start())
        for line in comment.group().split("\n") + [""]:
            at += 1
            if CODE.match(line): line = ""
            line = re.sub("`.*?`", lambda code: code.group().replace(" ", "\0"), line)
            for word in ["."] * (not line.strip() or bool(ROW.match(line))) + line.split(" "):
                words += [(word, at)] * bool(re.search(r"\w", word))
                if not re.search(r"[.?!:;][)\"']?$", word) or word == "e.g.": continue
                if len(words) > most and 3 * sum(w.endswith(",") for w, _ in words) <= len(words):
                    found.append((words[0][1], len(words), " ".join(w for w, _ in words).replace("\0", " ")))
                words = []
    return found
tries = ["word " * 26, "One.\n   Two %s." % ("word\n " * 25), "`%s`." % ("code " * 26), "word " * 25 + "."]
check([len(long_sentences("/* %s */" % s)) for s in tries] == [1, 1, 0, 0], "long sentences are not found, or short ones are")
end = text.find("/* >>license")
for found in long_sentences(text[:end if end > 0 else len(text)]): check(False, "line %d: a sentence of %d words: %s" % found)

# each public prototype has a comment: directly above, at the end of its line, or above the group it stands in
interface = text[:text.index(">>impl ")].split("\n")
for i, line in enumerate(interface):
    m = re.match(r"^(?:AMPI_HD )?AMP_DEF [^(]*?\b(amp_\w+)\(", line)
    if not m: continue
    j = i - 1
    while j >= 0 and interface[j].strip() and not interface[j].rstrip().endswith("*/"): j -= 1
    check(j >= 0 and interface[j].rstrip().endswith("*/") or "/*" in line, "line %d: %s has no comment" % (i + 1, m.group(1)))

# code blocks of the README: each compiles, and the program prints what stands below it
readme_text = open(readme, encoding="utf-8").read() if readme else ""
declared = text + open("amp_cuda.cuh", encoding="utf-8").read() if readme else ""
made = "|".join(re.findall(r"define (?:AMPI_)?X\(name.*?\) (AMP_\w+?_?)##name", declared) + ["AMP_"])  # AMP_STYLE_, ... of lists
for name in sorted(set(re.findall(r"\b(?:amp|AMP)_\w+", readme_text))):
    known = re.search(r"\b%s" % name, declared) or (m := re.match(made, name)) and re.search(r"\(%s,|\b%s," % ((name[m.end():],) * 2), declared)
    check(known, "the README names %s, which no header has" % name)
blocks = re.findall(r"```c\n(.*?)```", readme_text, re.S)
check(not readme or len(blocks) > 0, "no C block in the README")
NAMES = """#include "amp.h"
static amp_model* m; static amp_batch batch; static amp_value logits; static float out[640]; static int count;
static float pixels[28 * 28]; static int32_t labels[1];
void example(void);
int main(void) { (void)m; (void)batch; (void)logits; (void)out; (void)count; (void)pixels; (void)labels; example(); return 0; }
void example(void) {
%s
}
"""
with tempfile.TemporaryDirectory() as d:
    def run(*command): return subprocess.run(command, capture_output=True, text=True)
    def build(name, text, *more):
        open(os.path.join(d, name + ".c"), "w").write(text)
        return run(cc, "-std=c99", "-Wall", "-DAMP_NO_SIMD", "-I.", os.path.join(d, name + ".c"), *more, "-lm", "-o", os.path.join(d, name))
    amp = os.path.join(d, "amp.o")
    if readme:
        r = run(cc, "-std=c99", "-Wall", "-DAMP_NO_SIMD", "-O1", "-DAMP_IMPLEMENTATION", "-I.", "-x", "c", "-c", "amp.h", "-o", amp)
        check(r.returncode == 0, "amp.h does not compile:\n%s" % r.stderr[:800])
    for n, block in enumerate(blocks, 1):
        whole = "int main" in block     # its own implementation is left out, as if it had been included before
        r = build("block%d" % n, block if whole else NAMES % block, *["-DAMPI_IMPLEMENTATION_ONCE"] * whole, amp)
        check(r.returncode == 0, "block %d of the README does not compile:\n%s" % (n, r.stderr[:800]))
        if whole and r.returncode == 0:
            printed = run(os.path.join(d, "block%d" % n)).stdout
            check("```\n" + printed + "```" in readme_text, "the README's program prints something else:\n" + printed)

print("%d passed, %d failed" % (passed, failed))
sys.exit(failed > 0)
