#!/bin/sh
# page.sh PICTURES TABLES: writes the course as one HTML page to stdout: the text of README.md, and in each lesson its
# picture (PICTURES/NN_name.svg), its table (TABLES/NN_name.txt), its program with numbered lines and its answers. The
# page needs no network. Panels of a picture are svg elements of their own: narrow windows stack them.
book=$(dirname "$0")
cat << 'HEAD'
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Mixed precision in twelve lessons</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2126; --quiet: #4d535c; --line: #d9dce1; --box: #f4f5f7;
        --link: #0b5bd3 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #dfe3e8; --quiet: #a9b1bc; --line: #343941; --box: #161b22; --link: #79b0ff }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, Helvetica, Arial, sans-serif }
main { max-width: 1700px; margin: 0 auto; padding: 1rem 1.5rem 4rem }
h1, h2, h3 { line-height: 1.2 }
h2 { margin: 0 0 1rem }
section { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1.5rem }
p, li, .text > table { max-width: 75ch }
p, li { overflow-wrap: break-word }
a { color: var(--link) }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px }
nav { columns: 20rem; margin: 1.5rem 0 }
nav a { display: block; padding: .2rem 0 }
.skip { position: absolute; left: -99rem }
.skip:focus { left: 1rem }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 14px }
pre { background: var(--box); padding: .8rem 1rem; overflow-x: auto; line-height: 1.4; margin: 0 0 1rem }
pre.table, pre.program { font-size: 12.5px }
.picture { display: flex; flex-wrap: wrap; gap: .5rem 1rem }
.picture svg { flex: 1 1 412px; min-width: min(100%, 412px); max-width: 620px; height: auto;
               font: 14px system-ui, Helvetica, Arial, sans-serif }
.picture svg.wide { flex-basis: 100%; max-width: 960px }
pre.program { counter-reset: line; max-height: 70vh; overflow: auto; padding-left: 0 }
pre.program code { display: block; counter-increment: line; padding-left: 4.2em; font-size: inherit }
pre.program code::before { content: counter(line); float: left; width: 3em; margin-left: -4em; text-align: right;
                           color: var(--quiet) }
@media (min-width: 1300px) {
  .lesson { display: grid; gap: 0 1.5rem; grid-template-columns: minmax(850px, 7fr) minmax(0, 5fr) }
  .program-side { position: sticky; top: 0; align-self: start }
  pre.program { max-height: calc(100vh - 4rem) }
}
details { border-left: 3px solid var(--line); padding-left: 1rem }
.program-side details { border: 0; padding: 0 }
summary { cursor: pointer; color: var(--quiet); padding: .3rem 0 }
table { border-collapse: collapse; display: block; overflow-x: auto; margin-bottom: 1rem }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left; vertical-align: top }
th { background: var(--box) }
@media (max-width: 600px) {
  main { padding: .5rem .8rem 3rem }
  pre.table, pre.program { font-size: 11px }
  .picture { overflow-x: auto }
  .picture svg.wide { min-width: 820px }
}
form { margin-bottom: 1rem }
form label { display: inline-block; margin-right: .8rem }
form input { width: 8em; font: inherit }
form button { font: inherit }
HEAD
# The colours of all pictures, once.
for picture in "$1"/[0-9]*.svg; do sed -n '/<style>/,/<\/style>/{s/<style>//;s/<\/style>//;p;}' "$picture"; break; done
cat << 'HEAD'
</style>
<main>
<a class="skip" href="#contents">Contents</a>
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
# 2^-20 with a superscript.
function raised(s,    out) {
    while (match(s, /\^(-?[0-9]+([.][0-9]+)?|[a-z]+)/)) {
        out = out substr(s, 1, RSTART - 1) "<sup>" substr(s, RSTART + 1, RLENGTH - 1) "</sup>"
        s = substr(s, RSTART + RLENGTH)
    }
    gsub(/<sup>-/, "<sup>\\&#8722;", out)
    return out s
}
function coded(s,    parts, n, i, out) {
    n = split(s, parts, "`")
    for (i = 1; i <= n; i++) out = out (i % 2 ? raised(emphasised(parts[i])) : "<code>" parts[i] "</code>")
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
    else if (line ~ /^!\[/) picture(line)
    else if (line ~ /^<!--/) leave()
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
# The panels of a picture, or a drawing, which has none and is wide.
function panels(path, alt,    line, inside) {
    print "<div class=\"picture\" role=\"img\" aria-label=\"" escaped(alt) "\">"
    while ((getline line < path) > 0) {
        if (line ~ /^<svg class="ink/) inside = 1
        if (inside) print line
        if (line ~ /^<\/svg>/) inside = 0
    }
    close(path)
    print "</div>"
}
function program(path,    line) {
    print "<div class=\"program-side\"><details open><summary>The program</summary>"
    printf "<pre class=\"program\" tabindex=\"0\">"
    while ((getline line < path) > 0) printf "<code>%s\n</code>", escaped(line)
    close(path)
    print "</pre></details></div>"
}
# The picture of the line of Markdown, and behind that of a lesson its table.
function picture(line,    alt, file, name) {
    leave()
    alt = file = line
    sub(/^!\[/, "", alt)
    sub(/\]\(.*/, "", alt)
    sub(/^.*\]\(/, "", file)
    sub(/\).*$/, "", file)
    panels(pictures "/" file, alt)
    name = names[lesson]
    if (file != name ".svg") return
    print "<pre class=\"table\" tabindex=\"0\">"
    copy(tables "/" name ".txt", 1)
    print "</pre>"
}
function seen(title) {
    leave()
    print "<h2>" inline(title) "</h2>\n<div class=\"lesson\">\n<div class=\"text\">"
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
    print "</details>\n</div>"
    program(book "/" names[number] ".c")
    print "</div>\n</section>"
}
function contents(    path, line, number) {
    leave()
    path = book "/README.md"
    print "<nav id=\"contents\" aria-label=\"Contents\">"
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
    while ((command | getline name) > 0) if (name ~ /^[0-9]/ && sub(/\.txt$/, "", name)) names[name + 0] = name
    close(command)
}
/^<!-- contents -->$/ { contents(); listed = 1; next }
/^<!-- \/contents -->$/ { listed = 0; next }
listed { next }
/^<!-- lesson [0-9]+ -->$/ { leave(); lesson = $3; print "<section id=\"lesson" lesson "\">"; next }
/^<!-- end [0-9]+ -->$/ { answers(lesson); lesson = ""; next }
lesson && /^## / { seen(substr($0, 4)); next }
{ block($0) }
END { leave() }' "$book/README.md"
cat << 'TAIL'
</main>
<script>
// n and p: the next lesson and the one before.
addEventListener("keydown", e => {
  const step = { n: 1, p: -1 }[e.key], all = [...document.querySelectorAll("section")];
  if (!step || e.ctrlKey || e.altKey || e.metaKey || e.target.tagName == "TEXTAREA") return;
  let at = all.filter(s => s.getBoundingClientRect().top < 10).length - 1;
  if (step < 0 && at >= 0 && all[at].getBoundingClientRect().top < -10) at++;
  const to = all[at + step];
  if (to) to.scrollIntoView();
});
</script>
</html>
TAIL
