"""facts.py HEADER: what a header costs its readers, one fact a line: a name and a number. tests/tools/budget.sh reads them.

tokens      of C, comments left out: words, numbers, strings, operators
ninety      lines of code that nine of ten functions of the implementation have at most
longest     lines of code of the longest one
depth       of braces in the deepest one
silent      functions of more than three lines without a comment above
"""
import re
import sys

TOKEN = re.compile(r"""
      "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'             # a string, a character
    | [A-Za-z_]\w* | \d[\w.]*                            # a word, a number
    | << | >> | && | \|\| | -> | \+\+ | -- | [-+*/%&|^!<>=]=
    | \S""", re.X)
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'')
TYPE = re.compile(r"(typedef|struct|enum|union)\b.*[;{]\s*$")


def without_comments(text):
    """The text with blanks where comments stand, so that its lines keep their numbers."""
    return re.sub(r"/\*.*?\*/", lambda comment: re.sub(r"[^\n]", " ", comment.group()), text, flags=re.S)


def head(lines, at):
    """The head of the function whose first line is lines[at], up to its brace; "" if no function begins there."""
    if not re.match(r"[A-Za-z_]", lines[at]) or "(" not in lines[at] or TYPE.match(lines[at]):
        return ""
    text = lines[at]
    for line in lines[at + 1:at + 7]:
        if "{" in text or ";" in text:
            break
        text += " " + line.strip()
    before = text.split("{")[0]
    is_function = "{" in text and ";" not in before and "=" not in before.split("(")[0]
    return before if is_function else ""


def end_of(lines, at):
    """The last line of the function that begins at lines[at], and the depth of its braces."""
    depth = deepest = 0
    for i in range(at, len(lines)):
        for c in lines[i]:
            depth += (c == "{") - (c == "}")
            deepest = max(deepest, depth)
        if deepest and depth <= 0:
            return i, deepest
    return len(lines) - 1, deepest


def functions(text):
    """Of each function: its lines of code, its depth, whether a comment stands above."""
    lines = LITERAL.sub("0", without_comments(text)).split("\n")
    written = text.split("\n")
    at = 0
    while at < len(lines):
        if head(lines, at):
            end, deepest = end_of(lines, at)
            length = sum(1 for line in lines[at:end + 1] if line.strip())
            above = at - 1
            while written[above].startswith("template"):
                above -= 1
            yield length, deepest, at > 0 and written[above].rstrip().endswith("*/")
            at = end
        at += 1


def main():
    text = open(sys.argv[1], encoding="utf-8").read()
    print("tokens", len(TOKEN.findall(without_comments(text))))
    found = list(functions(text[max(0, text.find(">>impl ")):]))
    lengths = sorted(length for length, _, _ in found)
    print("ninety", lengths[len(lengths) * 9 // 10])
    print("longest", lengths[-1])
    print("depth", max(depth for _, depth, _ in found))
    print("silent", sum(1 for length, _, commented in found if length > 3 and not commented))


main()
