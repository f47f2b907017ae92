#!/bin/sh
# page.sh PICTURES TABLES: writes the course as one HTML page to stdout: the text of README.md, and in each lesson its
# picture (PICTURES/NN_name.svg), its table (TABLES/NN_name.txt) and its answers. The page needs no network.
book=$(dirname "$0")
cat << 'HEAD'
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Mixed precision in twelve lessons</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2126; --quiet: #5b616a; --line: #d9dce1; --box: #f4f5f7;
        --link: #0b5bd3 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14161a; --ink: #dfe3e8; --quiet: #9aa1ab; --line: #343941; --box: #1d2026; --link: #79b0ff }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, Helvetica, Arial, sans-serif }
main { max-width: 1600px; margin: 0 auto; padding: 1rem 1.5rem 4rem }
h1, h2, h3 { line-height: 1.2 }
h2 { margin: 0 0 1rem }
section { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1.5rem }
p, li, table { max-width: 75ch; overflow-wrap: anywhere }
a { color: var(--link) }
nav { columns: 20rem; list-style: none; margin: 1.5rem 0 }
nav a { display: block; padding: .15rem 0 }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .86em }
pre { background: var(--box); padding: .8rem 1rem; overflow-x: auto; line-height: 1.4; margin: 0 0 1rem }
.lesson { display: grid; gap: 1rem 1.5rem; align-items: start;
          grid-template: "picture" auto "table" auto "text" auto / minmax(0, 1fr) }
.lesson > pre { grid-area: table; font-size: 12px; margin: 0 }
@media (min-width: 1150px) {
  .lesson { grid-template: "picture table" auto "text table" 1fr / minmax(0, 1fr) fit-content(50%) }
  .lesson > pre { font-size: min(12px, .74vw) }      /* 100 letters fit into it */
}
.picture { grid-area: picture; overflow-x: auto }
.text { grid-area: text; min-width: 0 }
.picture svg { display: block; width: 100%; min-width: 36rem; max-width: 940px; height: auto }
details { border-left: 3px solid var(--line); padding-left: 1rem }
summary { cursor: pointer; color: var(--quiet) }
table { border-collapse: collapse; display: block; overflow-x: auto; margin-bottom: 1rem }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left; vertical-align: top;
         overflow-wrap: normal }
td code { overflow-wrap: anywhere }
th { background: var(--box) }
</style>
<main>
HEAD
awk -v pictures="$1" -v tables="$2" -v book="$book" '
# Markdown as the book uses it: headings, paragraphs, lists, tables, code, **bold**, *emphasis*, `code`, [links](there).
function escaped(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); return s }
function strong(s,    parts, n, i, out) {
    n = split(s, parts, "[*][*]")
    for (i = 1; i <= n; i++) out = out (i == 1 ? "" : i % 2 ? "</strong>" : "<strong>") parts[i]
    return out
}
function emphasised(s,    out) {
    while (match(s, /[*][^ *]([^*]*[^ *])?[*]/)) {
        out = out substr(s, 1, RSTART - 1) "<em>" substr(s, RSTART + 1, RLENGTH - 2) "</em>"
        s = substr(s, RSTART + RLENGTH)
    }
    return out s
}
function coded(s,    parts, n, i, out) {
    n = split(s, parts, "`")
    for (i = 1; i <= n; i++) out = out (i % 2 ? emphasised(parts[i]) : "<code>" parts[i] "</code>")
    return out
}
function linked(s,    out, middle, link) {
    while (match(s, /\[[^]]+\]\([^)]+\)/)) {
        link = substr(s, RSTART + 1, RLENGTH - 2)
        middle = index(link, "](")
        out = out substr(s, 1, RSTART - 1) "<a href=\"" substr(link, middle + 2) "\">" substr(link, 1, middle - 1) "</a>"
        s = substr(s, RSTART + RLENGTH)
    }
    return out s
}
function inline(s) { return coded(strong(linked(escaped(s)))) }
function flush() { if (text) print inline(text); text = "" }
function enter(tag, opening) {
    if (open == tag) return
    leave()
    open = tag
    print opening
}
function leave() {
    flush()
    if (open == "ul" || open == "ol") print "</li>"
    if (open) print "</" open ">"
    open = ""
}
function item(tag, opening, first) {
    flush()
    if (open == tag) print "</li>"
    enter(tag, opening)
    print "<li>"
    text = first
}
# Whether a number at the start of a line is the next one of a list: a sentence may end and begin there, too.
function counts(number) {
    if (number != 1 && (open != "ol" || number != count + 1)) return 0
    count = number
    return 1
}
function row(line,    cells, n, i, cell) {
    if (line ~ /^\|[-| :]+$/) return
    cell = open == "table" ? "td" : "th"
    enter("table", "<table>")
    n = split(line, cells, "|")
    printf "<tr>"
    for (i = 2; i < n; i++) printf "<%s>%s</%s>", cell, inline(cells[i]), cell
    print "</tr>"
}
function block(line) {
    if (fenced) { if (line ~ /^```/) { fenced = 0; leave() } else print escaped(line) }
    else if (line ~ /^```/) { enter("pre", "<pre>"); fenced = 1 }
    else if (line ~ /^<!--/ || line ~ /^!\[/) leave()
    else if (line ~ /^ *$/) { if (open != "pre") leave() }
    else if (line ~ /^# /) { leave(); print "<h1>" inline(substr(line, 3)) "</h1>" }
    else if (line ~ /^##+ /) { leave(); sub(/^##+ /, "", line); print "<h3>" inline(line) "</h3>" }
    else if (line ~ /^\|/) row(line)
    else if (line ~ /^- /) item("ul", "<ul>", substr(line, 3))
    else if (match(line, /^[0-9]+\. /) && counts(line + 0)) item("ol", "<ol>", substr(line, RLENGTH + 1))
    else if (line ~ /^    / && open != "ol" && open != "ul") { enter("pre", "<pre>"); print escaped(substr(line, 5)) }
    else { if (open != "ol" && open != "ul") enter("p", "<p>"); text = text (text ? "\n" : "") line }
}
# The lines of a file, as they are or escaped; 0 if there is none.
function copy(path, as_text,    line, lines) {
    while ((getline line < path) > 0) { print as_text ? escaped(line) : line; lines++ }
    close(path)
    return lines
}
function seen(number, title,    name, path) {
    leave()
    print "<h2>" inline(title) "</h2>\n<div class=\"lesson\">"
    name = names[number]
    if (name) {
        print "<div class=\"picture\">"
        copy(pictures "/" name ".svg", 0)
        print "</div>\n<pre>"
        copy(tables "/" name ".txt", 1)
        print "</pre>"
    }
    print "<div class=\"text\">"
}
function answers(number,    path, line, inside) {
    leave()
    path = book "/answers.md"
    print "<details><summary>Answers</summary>"
    while ((getline line < path) > 0) {
        if (line == "<!-- end " number " -->") inside = 0
        if (inside && line !~ /^## /) block(line)
        if (line == "<!-- lesson " number " -->") inside = 1
    }
    close(path)
    leave()
    print "</details>\n</div>\n</div>\n</section>"
}
function contents(    path, line, number) {
    leave()
    path = book "/README.md"
    print "<nav>"
    while ((getline line < path) > 0)
        if (line ~ /^## [0-9]+\. /) {
            sub(/^## /, "", line)
            print "<a href=\"#lesson" line + 0 "\">" inline(line) "</a>"
        }
    close(path)
    print "</nav>"
}
BEGIN {
    command = "ls " tables
    while ((command | getline name) > 0) if (sub(/\.txt$/, "", name)) names[name + 0] = name
    close(command)
}
/^<!-- contents -->$/ { contents(); next }
/^<!-- lesson [0-9]+ -->$/ { leave(); lesson = $3; print "<section id=\"lesson" lesson "\">"; next }
/^<!-- end [0-9]+ -->$/ { answers(lesson); lesson = ""; next }
lesson && /^## / { seen(lesson, substr($0, 4)); next }
{ block($0) }
END { leave() }' "$book/README.md"
printf '</main>\n</html>\n'
