"""mutants.py HEADER [COUNT] [SEED] [--least PERCENT] [--minutes M] [--table] [--show] [--only N,N] [WORD...]

Plants small faults in a copy of amp.h or amp_cuda.cuh, one a copy, and sees whether a test fails.

The faults are drawn: COUNT (60) lines of the implementation at random, and on each one change of these kinds:
    comparison  another one: < for <=, == for !=, ...      logic     && for ||, || for &&
    number      one more or one less                       sign      + for -, - for +
    statement   left out                                   condition negated: of if, while, ?:
SEED (the date, YYYYMMDD) and the text say which. A fault that does not compile is drawn anew; one that leaves the object
code as it was, say in code for another processor, is counted apart, and so is one of tests/tools/mutants.txt: survivors that
are known, each with its reason. With --table the rows below are planted too: code of instruction sets, which few lines
hold and few processors run. With words, only faults whose room or function contains one of them; --only: of the draw
these numbers; --minutes: none begins later; --show: no test runs.

For amp.h the tests most likely to see a fault run first, in a build without SIMD; then all of them with it; then the
one of threads. amp_cuda.cuh runs on the emulator (tests/emu), compiled for 8.0, 9.0, then 7.5; sanitizers take part. The
first failure, crash or hang ends a fault. Fails if fewer than PERCENT (90) of the faults that are not known are seen, or
if a row of the table does not stand exactly once in the header.
CC, CXX: the compilers (gcc, g++); JOBS: at a time (2); TEST_EVERY: of long lists of cases every n-th (3). Needs Python.
"""
import argparse
import collections
import datetime
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KNOWN = os.path.join(ROOT, "tests", "tools", "mutants.txt")
JOBS = int(os.environ.get("JOBS", "2"))
EVERY = os.environ.get("TEST_EVERY", "3")

# Tests; a piece of amp.h that stands there once, however its lines are broken; what replaces it.
TABLE = [
    ("half", "neon\\0avx2\\0avx512", "neon\\0avx\\0avx512"),
    ("half", "carry = _mm512_set1_epi32(0x7ffe);", "carry = _mm512_set1_epi32(0x7fff);"),
    ("half", "if (limit == 0x7f800000u) return _mm512_fpclass_ps_mask(x, 0x81) != 0;", "if (limit == 0x7f800000u) return 0;"),
    ("half", "0xf000d000b0009,\n        0x7000500030001", "0xf000d000b0009,\n        0x6000500030001"),
    ("gemm", "_mm256_permute2f128_ps(r[i], r[i + 4], 0x31)", "_mm256_permute2f128_ps(r[i], r[i + 4], 0x20)"),
    ("gemm", "t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);", "t[i] = _mm256_unpackhi_ps(r[i], r[i + 1]);"),
    ("gemm", "r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);", "r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);"),
    ("half", "_mm256_permute4x64_epi64(quarters, 0xd8)", "_mm256_permute4x64_epi64(quarters, 0xe4)"),
    ("half", "_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff))", "u, _mm256_set1_epi32(0x8000))"),
    ("half", "_mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 16)", "_mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 15)"),
    ("gemm", "odd ? _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)) :", "odd ? pairs :"),
    ("gemm", "(__m512bh)x.q[0], (__m512bh)y.q[0]", "(__m512bh)y.q[0], (__m512bh)y.q[0]"),
    ("gemm", "even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16,", "even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 16, 18,"),
    ("gemm", "if (!u->first) _tile_loadd(0, sums, ld);", ""),
    ("gemm", "_tile_dpbf16ps(1, 2, 4);", "_tile_dpbf16ps(1, 2, 3);"),
    ("gemm", "if (two) _tile_stored(1, sums + AMPI_LANES, ld);", ""),
    ("gemm", "for (size_t p = k; p < 2 * pairs; p++) ampi_v_clear(x + p * ld, width);", ""),
    ("half", "if (clean || to == AMP_BF16 || from == AMP_BF16)", "if (clean || to == AMP_BF16)"),
    ("optim", "if (AMPI_K(above_reg)(new_w, low) |", "if (0 |"),
    ("optim", "    if (i < n) ampi_update_singly(kind, job, i, n);\n", ""),
    ("scaler", "memcpy(rest, from, (n - i) * size)", "memcpy(rest, from, (n - i - 1) * size)"),
    ("openmp", "own.workspace_size = step;", ";"),
    ("openmp", "return n / shares * share + (share < n % shares ? share : n % shares);", "return n / shares * share;"),
    ("openmp", "__VA_ARGS__; } } while (0)\n  #define AMPI_PARALLEL_ORDERED",
     "AMPI_PRAGMA(omp parallel for if (condition)) __VA_ARGS__; } } while (0)\n  #define AMPI_PARALLEL_ORDERED"),
]

# --- the faults of a text ----------------------------------------------------------------------------------------

TOKEN = re.compile(r"""
      (?P<skip> \s+ | /\*.*?\*/ | //[^\n]*
        | \#(?: /\*.*?\*/ | \\. | [^\\\n] )* )                     # a directive with the lines it goes on
    | (?P<text> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' )
    | (?P<number> \.?\d(?:[eEpP][-+]|[\w.])* )
    | (?P<word> [A-Za-z_]\w* )
    | (?P<sign> <<= | >>= | << | >> | && | \|\| | -> | \+\+ | -- | :: | [-+*/%&|^!<>=]= | . )""", re.X | re.S | re.M)
Token = collections.namedtuple("Token", "text kind start end")
Fault = collections.namedtuple("Fault", "room function line kind start end new before after")

COMPARISONS = {"<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",), "!=": ("==",)}
SWAPS = {"&&": ("logic", "||"), "||": ("logic", "&&"), "+": ("sign", "-"), "-": ("sign", "+"), "+=": ("sign", "-="),
         "-=": ("sign", "+=")}
CLOSES = {"(": ")", "[": "]", "{": "}"}
CONTROL = {"if", "for", "while", "switch"}
NO_STATEMENT = CONTROL | {"else", "do", "case", "default", "goto", "static", "const", "struct", "enum", "union", "typedef",
                          "extern", "constexpr", "using", "template"}


class Text:
    """A header's implementation as tokens: which bracket each stands in, in which function, and what can go wrong there."""

    def __init__(self, text):
        self.text = text
        begin, end = text.index("/* >>impl "), text.find("/* >>license")
        self.tokens = [Token(m.group(), m.lastgroup, m.start(), m.end())
                       for m in TOKEN.finditer(text, begin, end if end > 0 else len(text)) if m.lastgroup != "skip"]
        self.rooms = [(m.start(), m.group(1)) for m in re.finditer(r"^/\* >>impl-([a-z]+)", text, re.M)]
        self.starts = [m.end() for m in re.finditer(r"\A|\n", text)]
        n = len(self.tokens)
        self.opener, self.partner, self.function, self.region = [-1] * n, [-1] * n, [""] * n, [""] * n
        self.find_brackets()

    def find_brackets(self):
        """Fills opener (the bracket around a token), partner (of a bracket), and the function and kind of region."""
        stack, head, region, name = [], [], "", ""
        for i, t in enumerate(self.tokens):
            if t.text == "}" and self.text[t.start - 1] == "\n":
                del stack[1:]                                   # at a line's begin it ends all that is open
            if t.text in (")", "]", "}") and stack:
                self.partner[stack[-1]], self.partner[i] = i, stack[-1]
                stack.pop()
            self.opener[i] = stack[-1] if stack else -1
            self.function[i], self.region[i] = name, region
            if stack or t.text == "}":
                if not stack:
                    if region != "type": head = []
                    region = name = ""
                if t.text in CLOSES: stack.append(i)
            elif t.text == "{":
                words = [h.text for h in head]
                if words[-2:] != ["extern", '"C"']:
                    region, name = self.region_of(head)
                    stack.append(i)
                else:
                    head = []
            elif t.text == ";":
                head = []
            else:
                head.append(t)

    @staticmethod
    def region_of(head):
        """What a brace at file scope opens: a function, a table, an enum, a type; and its name."""
        words = [h.text for h in head]
        if "=" in words:
            named = [w for w in words[:words.index("=")] if re.match(r"[A-Za-z_]\w*$", w)]
            return "table", named[-1] if named else ""
        if words and words[0] == "typedef" or "(" not in words:
            return ("enum", "enum") if "enum" in words else ("type", "")
        depth, at = 0, len(words)
        while at > 0:                                           # back over the parameters, and over AMPI_K(name)
            at -= 1
            depth += (words[at] == ")") - (words[at] == "(")
            if words[at] == "(" and depth == 0:
                name = words[at - 2] if words[at - 1] == ")" else words[at - 1]
                return "function", words[at + 1] if name.isupper() else name
        return "type", ""

    def line(self, at):
        low, high = 0, len(self.starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.starts[middle] <= at else (low, middle)
        return low + 1

    def room(self, at):
        return ([""] + [name for start, name in self.rooms if start < at])[-1]

    def within(self, i, stops):
        """The tokens around token i, up to the stops or the bracket around them: first and last."""
        first, last = i, self.partner[i] if self.tokens[i].text in CLOSES and self.partner[i] > 0 else i
        while first > 0:
            t = self.tokens[first - 1].text
            if t in CLOSES or t in stops: break
            first = self.partner[first - 1] if t in CLOSES.values() and self.partner[first - 1] >= 0 else first - 1
        while last + 1 < len(self.tokens):
            t = self.tokens[last + 1].text
            if t in CLOSES.values() or t in stops: break
            last = self.partner[last + 1] if t in CLOSES and self.partner[last + 1] >= 0 else last + 1
        return first, last

    def context(self, i, stops):
        """The expression that a fault at token i changes: at least four tokens, where the statement has so many."""
        first, last = self.within(i, stops)
        wide = {";", ",", "{", "}"}
        if last - first < 3: first, last = self.within(i, wide)
        while last - first < 3 and self.opener[i] >= 0:
            i = self.opener[i]
            if self.tokens[i - 1].text in CONTROL: return i - 1, self.partner[i]
            if self.tokens[i].text == "{" and self.tokens[i - 1].text not in ("=", ",", "{"): break
            first, last = self.within(i, wide)
        return first, last

    def fault(self, kind, i, start, end, new, first, last):
        """The fault that puts `new` at [start, end), told with tokens first to last around it."""
        a, b = max(self.tokens[first].start, start - 80), min(self.tokens[last].end, end + 80)
        def tell(piece): return " ".join(re.sub(r"/\*.*?\*/", "", piece, flags=re.S).split())
        return Fault(self.room(start), self.function[i], self.line(start), kind, start, end, new,
                     tell(self.text[a:b]), tell(self.text[a:start] + new + self.text[end:b]))

    def is_statement(self, i):
        """Does a statement begin at token i that is no declaration and can be left out?"""
        before, t = self.tokens[i - 1].text, self.tokens[i]
        if self.region[i] != "function" or self.opener[i] < 0 or self.tokens[self.opener[i]].text != "{":
            return False
        guarded = before == "else" or before == ")" and self.partner[i - 1] > 0 \
            and self.tokens[self.partner[i - 1] - 1].text in CONTROL
        if before not in (";", "{", "}") and not guarded:
            return False
        if t.kind != "word" and t.text not in ("*", "(", "++", "--") or t.text in NO_STATEMENT:
            return False
        if t.text == "return":
            return guarded
        k = i + 1
        while self.tokens[k].text == "*": k += 1
        return t.kind != "word" or t.text in ("break", "continue") or self.tokens[k].kind != "word"

    def in_declared_bound(self, i):
        """Is token i in the brackets of an array that is declared there?"""
        at = self.opener[i]
        if at < 0 or self.tokens[at].text != "[": return False
        first, _ = self.within(at, {";"})
        words = self.tokens[first:at]
        return len(words) > 1 and words[0].kind == "word" and words[1].kind in ("word", "sign") \
            and words[1].text in ("*",) + (words[1].text,) * (words[1].kind == "word") \
            and "=" not in [w.text for w in words] and words[0].text != "return"

    def faults(self):
        """All of them, in the order of the text."""
        ends = {",", ";", "?", ":", "{", "}", "return"}
        for i, t in enumerate(self.tokens):
            if i == 0 or self.region[i] in ("", "type"): continue
            before = self.tokens[i - 1]
            if t.text in COMPARISONS and self.region[i] == "function":
                for new in COMPARISONS[t.text]:
                    yield self.fault("comparison", i, t.start, t.end, new, *self.context(i, ends | {"&&", "||"}))
            elif t.text in SWAPS and (before.kind in ("word", "number") or before.text in (")", "]")) and before.text != "return":
                kind, new = SWAPS[t.text]
                yield self.fault(kind, i, t.start, t.end, new, *self.context(i, ends if kind == "logic" else ends | {"&&", "||"}))
            elif t.kind == "number" and not self.in_declared_bound(i):
                for step in (" + 1)", " - 1)"):
                    yield self.fault("number", i, t.start, t.end, "(" + t.text + step,
                                     *self.context(i, ends | {"&&", "||"}))
            elif t.text in ("if", "while") and self.tokens[i + 1].text == "(" and self.partner[i + 1] > 0:
                a, b = self.tokens[i + 1].start, self.tokens[self.partner[i + 1]].end
                yield self.fault("condition", i, a, b, "(!" + self.text[a:b] + ")", i, self.partner[i + 1])
            elif t.text == "?":
                first, _ = self.within(i - 1 if before.text not in (")", "]") else max(self.partner[i - 1], 0),
                                       ends | {"="})
                a, b = self.tokens[first].start, before.end
                yield self.fault("condition", i, a, b, "!(" + self.text[a:b] + ")", *self.context(i, {",", ";", "return"}))
            if self.is_statement(i):
                _, last = self.within(i, {";", "{", "}"})
                if last + 1 < len(self.tokens) and self.tokens[last + 1].text == ";":
                    a, b = t.start, self.tokens[last + 1].end
                    blank = ";" + "\n" * self.text.count("\n", a, b)
                    yield self.fault("statement", i, a, b, blank, i, last + 1)._replace(after="nothing")


def key_of(fault):
    return fault.function, fault.kind, fault.before + "  ->  " + fault.after


def known_survivors(header):
    """Of the section [header] in the list: key -> reason."""
    known, section = {}, ""
    if not os.path.exists(KNOWN): return known
    for block in open(KNOWN, encoding="utf-8").read().split("\n\n"):
        lines = [line.strip() for line in block.split("\n") if line.strip() and not line.startswith("#")]
        if lines and lines[0].startswith("["): section = lines.pop(0).strip("[]")
        if len(lines) < 3 or section != header: continue
        function, kind = lines[0].rsplit(": ", 1)
        known[(function, kind, lines[1])] = " ".join(lines[2:])
    return known


def draw(faults, seed):
    """Faults in a random order, one of a line."""
    lines = collections.defaultdict(list)
    for fault in faults: lines[fault.line].append(fault)
    order = random.Random(seed)
    numbers = sorted(lines)
    order.shuffle(numbers)
    for number in numbers:
        yield order.choice(lines[number])


# --- builds and tests --------------------------------------------------------------------------------------------

class Refused(Exception):
    """By the compiler."""


def here(flag):
    """Has this processor that flag of /proc/cpuinfo?"""
    try:
        return " " + flag + " " in open("/proc/cpuinfo").read().replace("\n", " ")
    except OSError:
        return False


def compile_it(compiler, *arguments):
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr[:400])


Stage = collections.namedtuple("Stage", "name flags tests every")


class Header:
    """What receives the faults, its tests, and how both are built. amp.h here."""
    name = "amp.h"
    out = os.path.join(ROOT, "build", "mutants")
    compiler = os.environ.get("CC", "gcc")
    # The quick ones first. The last four call operators alone: they need not run for a fault in the rooms above these.
    operators = ["nan", "ops", "gemm", "conv"]
    above = "policy scaler optim backend model train file checkpoint report".split()
    tests = "policy report fit gpt files model half checkpoint alloc hostile scaler train optim nan ops gemm conv".split()
    likely = {
        "base": "alloc hostile half report", "cpu": "half", "half": "half", "vector": "gemm conv half optim", "kernels": "gemm conv",
        "convert": "half", "scan": "scaler optim", "gemm": "gemm hostile", "conv": "conv", "math": "ops", "tiles": "ops",
        "pool": "ops", "rows": "ops", "elementwise": "ops", "loss": "ops", "attention": "ops", "policy": "policy",
        "scaler": "scaler", "optim": "optim ops", "backend": "train model", "model": "model train", "train": "train fit",
        "file": "checkpoint files", "checkpoint": "checkpoint", "report": "report" }
    slow = {"ops": 60, "gemm": 60, "conv": 60, "train": 40}    # seconds of the processor; 20 for the others
    memory = 4 << 20                                           # KB
    # Compiles in half the time of -O2; without the second, gcc leaves vzeroupper out and SSE code after AVX crawls.
    flags = ["-std=c99", "-w", "-Og", "-fexpensive-optimizations"] + ([] if here("avx512f") else ["-DAMP_NO_AVX512"])
    test_flags = ["-std=c99", "-w", "-O2", "-DTEST_STOP=1"] + (["-DTEST_FMA"] if here("fma") else [])

    def __init__(self):
        self.lock = threading.Lock()

    def stages(self, room):
        """Where a fault is looked for, the cheap way first."""
        first = self.likely.get(room, "").split()
        rest = [t for t in self.tests if t not in first and not (room in self.above and t in self.operators)]
        seldom = str(3 * int(EVERY))
        if room in self.above: return [Stage("plain", ["-DAMP_NO_SIMD"], first, seldom), Stage("simd", [], rest + first, seldom)]
        return [Stage("plain", ["-DAMP_NO_SIMD"], first, seldom), Stage("simd", [], first, EVERY),
                Stage("simd", [], rest, seldom), Stage("openmp", ["-fopenmp"], ["openmp"], EVERY)]

    def object_of(self, folder, stage):
        """The implementation in this folder."""
        made = os.path.join(folder, "impl.o")
        compile_it(self.compiler, *self.flags, *stage.flags, "-x", "c", "-DAMP_IMPLEMENTATION", "-c",
                   os.path.join(folder, self.name), "-o", made)
        return made

    def test_object(self, test, stage):
        """Compiled when first asked for."""
        made = os.path.join(self.out, test + ".o")
        with self.lock:
            if not os.path.exists(made):
                compile_it(self.compiler, *self.test_flags, *(["-fopenmp"] if test == "openmp" else []), "-c",
                           os.path.join(ROOT, "tests", "test_%s.c" % test), "-o", made)
        return made

    def link(self, test, folder, stage, program):
        compile_it(self.compiler, self.test_object(test, stage), os.path.join(folder, "impl.o"), "-o", program, "-lm",
                   *(["-fopenmp"] if test == "openmp" else []))


class Cuda(Header):
    """amp_cuda.cuh on the emulator. Without SIMD amp.h compiles in two thirds of the time."""
    name = "amp_cuda.cuh"
    out = os.path.join(ROOT, "build", "mutants_emu")
    emu = os.path.join(ROOT, "tests", "emu")
    compiler = os.environ.get("CXX", "g++")
    tests = "half gemm optim conv scaler model nn hopper".split()
    own = "half nn".split()      # these hold a copy of the implementation
    likely = {"base": "half model", "half": "half", "gemm": "gemm", "conv": "conv", "scaler": "scaler",
              "optim": "optim", "backend": "model", "launch": "model", "device": "gemm", "hopper": "gemm", "linear": "nn",
              "pool": "nn", "rows": "nn", "attention": "nn", "loss": "nn", "elementwise": "nn"}
    slow = {t: 300 for t in tests}
    memory = 0                   # the address sanitizer reserves terabytes
    flags = ["-std=c++14", "-Og", "-w", "-fsanitize=address,alignment", "-fno-sanitize-recover=alignment",
             "-DTEST_STOP=1", "-DAMP_NO_SIMD", "-I" + emu]

    def stages(self, room):
        first = self.likely.get(room, "").split()
        common = [t for t in first + [t for t in self.tests if t not in first] if t != "hopper"]
        return [Stage("800", ["-DAMP_EMU_ARCH=800"], common, EVERY),
                Stage("900", ["-DAMP_EMU_ARCH=900"], list(dict.fromkeys(first + ["hopper", "gemm"])), EVERY),
                Stage("750", ["-DAMP_EMU_ARCH=750"], ["gemm", "half"], EVERY)]

    def object_of(self, folder, stage):
        emu = os.path.join(folder, "tests", "emu")
        if not os.path.exists(emu):     # a copy of the tests beside the faulty header
            os.makedirs(emu)
            for source in os.listdir(self.emu):
                if source.endswith((".cpp", ".h")): shutil.copy(os.path.join(self.emu, source), emu)
            shutil.copy(os.path.join(ROOT, "tests", "test.h"), os.path.join(folder, "tests"))
            shutil.copy(os.path.join(ROOT, "amp.h"), folder)
        made = os.path.join(folder, "impl.o")
        compile_it(self.compiler, *self.flags, *stage.flags, "-DAMP_IMPLEMENTATION", "-x", "c++", "-c",
                   os.path.join(folder, self.name), "-o", made)
        return made

    def test_object(self, test, stage):
        made = os.path.join(self.out, test + ("" if test == "emu" else stage.name) + ".o")
        source = "emu.cpp" if test == "emu" else "test_cuda_%s.cpp" % test
        with self.lock:
            if not os.path.exists(made):
                compile_it(self.compiler, *self.flags, *stage.flags, "-c", os.path.join(self.emu, source), "-o", made)
        return made

    def link(self, test, folder, stage, program):
        emu = self.test_object("emu", stage)
        if test in self.own:
            compile_it(self.compiler, *self.flags, *stage.flags, os.path.join(folder, "tests", "emu", "test_cuda_%s.cpp" % test),
                       emu, "-o", program, "-lm")
        else:
            compile_it(self.compiler, *self.flags, *stage.flags, self.test_object(test, stage), emu,
                       os.path.join(folder, "impl.o"), "-o", program, "-lm")


def failing_test(header, folder, stage, tests):
    """The first of the tests that fails with the implementation in this folder, and how; None if all pass."""
    for name in tests:
        program, said = os.path.join(folder, "test_" + name), os.path.join(folder, "said")
        header.link(name, folder, stage, program)
        limits = "ulimit -t %d; ulimit -S -f 400000; " % header.slow.get(name, 20)
        if header.memory: limits += "ulimit -v %d; " % header.memory
        # A program that crashes leaves its files. The paths are as long as the tests like them.
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as files:
            done = subprocess.run(["sh", "-c", limits + 'exec "$0" > said 2> /dev/null', program], cwd=folder,
                                  env=dict(os.environ, OMP_WAIT_POLICY="passive", TEST_EVERY=stage.every, TMPDIR=files))
        os.remove(program)
        if done.returncode:
            ended = {signal.SIGKILL: "hangs", signal.SIGXCPU: "hangs"}
            failed = re.findall(r"^FAILED: (\w+)", open(said, errors="replace").read(), re.M)
            return failed[0] if failed else "test_%s %s" % (name, ended.get(-done.returncode, "crashes"))
    return None


def base_object(header, stage):
    """That of the header without a fault."""
    return os.path.join(header.out, "base_" + stage.name + ".o")


def plant(header, text, stages):
    """Looks for the fault that this text holds: (state, how it was seen)."""
    folder = os.path.join(header.out, "%d_%d" % (os.getpid(), threading.get_ident()))
    os.makedirs(os.path.join(folder, "build"), exist_ok=True)
    with open(os.path.join(folder, header.name), "w", encoding="utf-8") as f:
        f.write(text)
    state = "no trace"
    try:
        built = None
        for stage in stages:
            if stage.name != built:
                built, made = stage.name, open(header.object_of(folder, stage), "rb").read()
                same = made == open(base_object(header, stage), "rb").read()
            if same: continue
            state = "SURVIVED"
            found = failing_test(header, folder, stage, stage.tests)
            if found: return "caught", found
    except Refused as complaint:
        return "does not compile", str(complaint)
    finally:
        shutil.rmtree(folder)
    return state, ""


def prepare(header, text, rooms):
    """Builds what no fault changes; runs, without one, the tests that these rooms have."""
    shutil.rmtree(header.out, ignore_errors=True)
    folder = os.path.join(header.out, "base")
    os.makedirs(os.path.join(folder, "build"))
    with open(os.path.join(folder, header.name), "w", encoding="utf-8") as f:
        f.write(text)
    for stage in {stage.name: stage for stage in header.stages("")}.values():
        shutil.copy(header.object_of(folder, stage), base_object(header, stage))
        if stage.name in ("plain", "800"):
            wanted = {t for room in rooms for t in header.likely.get(room, "").split()}
            found = failing_test(header, folder, stage, [t for t in header.tests if t in wanted])
            if found: raise SystemExit("without any fault: " + found)
    shutil.rmtree(folder)


def table_faults(text):
    """The rows as faults, and how many do not stand exactly once."""
    faults, stale = [], 0
    for tests, pattern, new in TABLE:
        places = list(re.finditer(r"\s+".join(re.escape(word) for word in pattern.split()), text.text))
        if len(places) != 1:
            stale += 1
            print("the table's row stands %d times in the header: %s" % (len(places), pattern))
            continue
        at, end = places[0].span()
        begin = max(m.start() for m in re.finditer(r"^(?:AMP_DEF|AMPI_|#define )", text.text[:at + 1], re.M))
        if not here("avx512f") and re.search("AVX512|TARGET_PAIRS|_mm512", text.text[begin:end]): continue
        def tell(piece): return " ".join(piece.split())[:60] or "nothing"
        faults.append(Fault(text.room(at), tests, text.line(at), "table", at, end, new, tell(pattern), tell(new)))
    return faults, stale


def report(number, fault, state, why):
    print("%4s %-10s %5d %-16s %-30s %-10s %s: %s  ->  %s" % (number, fault.room, fault.line, state, why, fault.kind, fault.function,
                                                          fault.before[:100], fault.after[:100]), flush=True)


def run(header, text, faults, wanted, pool, known, end):
    """Plants faults, in this order, until so many have left a trace or the time is over: [(number, fault, state, why)]."""
    def one(numbered):
        number, fault = numbered
        if time.time() > end: return number, fault, "late", ""
        if key_of(fault) in known: return number, fault, "known", ""
        changed = text.text[:fault.start] + fault.new + text.text[fault.end:]
        stages = header.stages(fault.room)
        if fault.kind == "table" and fault.function == "openmp": stages = stages[3:]
        return (number, fault, *plant(header, changed, stages))
    results, faults = [], iter(faults)
    while True:
        left = wanted - sum(r[2] in ("caught", "SURVIVED", "known") for r in results)
        batch = [f for _, f in zip(range(left), faults)]
        if not batch or time.time() > end: return results
        for result in pool.map(one, batch):
            if result[2] == "late": continue
            report(*result)
            results.append(result)


def summary(results, known):
    """Prints what became of them, by room; returns the share caught of those that are not known, in percent."""
    rooms = collections.OrderedDict()
    for _, fault, state, _ in results:
        rooms.setdefault(fault.room, collections.Counter())[state] += 1
    print("\n| room | planted | caught | known | not caught |\n|---|---|---|---|---|")
    for room in sorted(rooms):
        c = rooms[room]
        print("| %s | %d | %d | %d | %d |" % (room, c["caught"] + c["known"] + c["SURVIVED"], c["caught"], c["known"], c["SURVIVED"]))
    all_of = collections.Counter(state for _, _, state, _ in results)
    planted = all_of["caught"] + all_of["known"] + all_of["SURVIVED"]
    print("| all | %d | %d | %d | %d |\n" % (planted, all_of["caught"], all_of["known"], all_of["SURVIVED"]))
    for number, fault, state, _ in results:
        if state == "SURVIVED":
            print("%s, line %d\n%s: %s\n    %s  ->  %s\n" % (number, fault.line, fault.function, fault.kind, fault.before, fault.after))
    share = 100.0 * all_of["caught"] / max(1, planted - all_of["known"])
    print("%d faults, %d caught (%.1f %%); known for a reason %d; %.1f %% of the others caught. Besides, %d left no trace and "
          "%d did not compile" % (planted, all_of["caught"], 100.0 * all_of["caught"] / max(1, planted), all_of["known"], share,
                                  all_of["no trace"], all_of["does not compile"]))
    return share


def main():
    options = argparse.ArgumentParser(description="plants small faults and sees whether a test fails")
    options.add_argument("header", choices=["amp.h", "amp_cuda.cuh"])
    options.add_argument("count", nargs="?", type=int, default=60)
    options.add_argument("seed", nargs="?", type=int, default=int(datetime.date.today().strftime("%Y%m%d")))
    options.add_argument("words", nargs="*", default=[])
    options.add_argument("--least", type=float, default=90.0)
    options.add_argument("--minutes", type=float, default=1e9)
    options.add_argument("--only", default="")
    options.add_argument("--table", action="store_true")
    options.add_argument("--show", action="store_true")
    o = options.parse_intermixed_args()
    began, header = time.time(), Header() if o.header == "amp.h" else Cuda()
    text = Text(open(os.path.join(ROOT, header.name), encoding="utf-8").read())
    faults = list(text.faults())
    known, keys = known_survivors(header.name), {key_of(f) for f in faults}
    for key in known:
        if key not in keys: print("warning: no such place any more for the known survivor %s: %s, %s" % key)
    faults = [f for f in faults if not o.words or any(w in f.room or w in f.function for w in o.words)]
    drawn = list(enumerate(draw(faults, o.seed), 1))
    if o.only: drawn = [d for d in drawn if str(d[0]) in o.only.split(",")]
    rows, stale = table_faults(text) if o.table and header.name == "amp.h" else ([], 0)
    print("%s: %d places on %d lines, seed %d, %d faults" % (header.name, len(faults), len(drawn), o.seed, o.count), flush=True)
    if o.show:
        for number, fault in drawn[:o.count]: report(number, fault, "known" if key_of(fault) in known else "", "")
        return 0
    prepare(header, text.text, {f.room for _, f in drawn[:o.count]})
    with ThreadPoolExecutor(JOBS) as pool:
        end = began + 60 * o.minutes
        results = run(header, text, drawn, o.count, pool, known, end)
        if rows: results += run(header, text, [("row", f) for f in rows], len(rows), pool, {}, end)
    share = summary(results, known)
    print("%.0f s" % (time.time() - began))
    return 0 if results and not stale and share >= o.least else 1


if __name__ == "__main__":
    sys.exit(main())
