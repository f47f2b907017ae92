#!/bin/sh
# web.sh PAGE BUILD: makes the lessons of PAGE (index.html) run in the browser. All programs become one WebAssembly file
# inside the page; a button of each lesson runs it there, draws its picture anew and compares its table with the book's.
# A line "static const float NAME = 0.5;   /* try 0 to 1 */" of a program is a number to change: a field in the page, and
# here a variable, which NAME=VALUE among the arguments sets.
# WASM_CC: a compiler for wasm32-wasi, default `zig cc` or `python -m ziglang cc` where there is one.
book=$(dirname "$0") page=$1 out=$2/web
if [ -z "$WASM_CC" ]; then
    if command -v zig > /dev/null; then WASM_CC="zig cc -target wasm32-wasi"
    elif ${PYTHON:-python3} -c 'import ziglang' 2> /dev/null; then WASM_CC="${PYTHON:-python3} -m ziglang cc -target wasm32-wasi"
    else echo "no compiler for WebAssembly: zig, the Python package ziglang, or WASM_CC"; exit 1; fi
fi
flags="-std=c99 -O2 -w -D_WASI_EMULATED_PROCESS_CLOCKS"
number='^static const \([a-z]*\) \([A-Za-z_]*\) = \([^;]*\);  *\/\* try [-0-9.]* to [0-9.]* \*\/$'
names() { sed -n "s/$number/\2/p" "$1"; }
number_of() { basename "$1" | sed 's/^0*\([0-9]*\)_.*/\1/'; }
mkdir -p "$out"
[ "$out/impl.o" -nt amp.h ] || $WASM_CC $flags -c tests/impl.c -o "$out/impl.o" || exit 1
{
    printf '#include <stdlib.h>\n#include <string.h>\n'
    for file in "$book"/[01]*.c; do
        n=$(number_of "$file")
        printf 'int lesson_%s(int, char**);\n' "$n"
        for name in $(names "$file"); do printf 'void lesson_%s_%s(double);\n' "$n" "$name"; done
    done
    printf 'int main(int argc, char** argv) {\n    static char* args[] = { "lesson", "picture.svg", 0 };\n    int i;\n'
    printf '    switch (argc > 1 ? atoi(argv[1]) : 0) {\n'
    for file in "$book"/[01]*.c; do
        n=$(number_of "$file")
        printf '    case %s:\n        for (i = 2; i < argc; i++) {\n' "$n"
        for name in $(names "$file"); do
            printf '            if (!strncmp(argv[i], "%s=", %d)) lesson_%s_%s(atof(argv[i] + %d));\n' \
                "$name" "$((${#name} + 1))" "$n" "$name" "$((${#name} + 1))"
        done
        printf '        }\n        return lesson_%s(2, args);\n' "$n"
    done
    printf '    }\n    return 2;\n}\n'
} > "$out/main.c"
objects=
for file in "$book"/[01]*.c; do
    n=$(number_of "$file")
    objects="$objects $out/$n.o"
    [ "$out/$n.o" -nt "$file" ] && [ "$out/$n.o" -nt amp.h ] && continue
    echo "Compiling lesson $n for WebAssembly"
    sed "s/$number/static \\1 \\2 = \\3; void lesson_${n}_\\2(double x) { \\2 = (\\1)x; }/" "$file" > "$out/$n.c"
    $WASM_CC $flags -I"$book" -DAMPI_IMPLEMENTATION_ONCE -Dmain=lesson_$n -c "$out/$n.c" -o "$out/$n.o" || exit 1
done
# shellcheck disable=SC2086
$WASM_CC $flags "$out/main.c" $objects "$out/impl.o" -s -Wl,-z,stack-size=1048576 -lwasi-emulated-process-clocks -lm -o "$out/lessons.wasm" || exit 1
sed '/^<\/main>/,$d' "$page" > "$out/page.html"
{
    cat "$out/page.html"
    printf '<script id="wasm" type="text/plain">'
    base64 < "$out/lessons.wasm" | tr -d '\n'
    printf '</script>\n<script id="worker" type="text/plain">\n'
    cat "$book/web.js"
    cat << 'TAIL'
</script>
<script>
const wasm = Uint8Array.from(atob(document.getElementById("wasm").textContent), c => c.charCodeAt(0));
const source = URL.createObjectURL(new Blob([document.getElementById("worker").textContent]));
// What the longer ones take on a processor of 2 GHz, in seconds.
const seconds = { 3: 90, 4: 290, 6: 145, 7: 125, 11: 130, 12: 240 };
const number = /^static const (\w+) (\w+) = (\S+?)f?; +\/\* try (\S+) to (\S+) \*\/$/;
const made = (tag, more) => Object.assign(document.createElement(tag), more);
for (const section of document.querySelectorAll("section")) {
  const table = section.querySelector("pre.table"), picture = section.querySelector(".picture"), book = table.textContent.trim();
  const lesson = section.id.replace("lesson", ""), form = made("form", { noValidate: true }), fields = [];
  const button = made("button", { textContent: "Run it here" }), told = made("p", { textContent: seconds[lesson]
    ? "It takes about " + (seconds[lesson] < 90 ? seconds[lesson] + " seconds" : Math.round(seconds[lesson] / 60) + " minutes") + " here." : "" });
  told.setAttribute("role", "status");
  for (const line of section.querySelectorAll("pre.program code")) {
    const [found, type, name, value, min, max] = number.exec(line.textContent.trim()) || [];
    if (!found) continue;
    const label = made("label", { textContent: name + " = " }), usual = String(Number(value));
    const input = made("input", { type: "number", min, max, step: "any", value: usual });
    label.append(input, " (" + min + " to " + max + ") ");
    form.append(label);
    // What is no number becomes the book's, what is out of range the nearest in it.
    fields.push({ name, usual, input, read: () => {
      let now = input.value == "" || !isFinite(input.value) ? Number(usual) : Math.min(Math.max(input.value, min), max);
      return input.value = String(type == "int" ? Math.round(now) : now);
    } });
  }
  form.append(button);
  table.after(form, told);
  let worker = null, start;
  const end = text => {
    worker.terminate();
    worker = null;
    button.textContent = "Run it here";
    told.textContent = text + " (" + ((Date.now() - start) / 1000).toFixed(1) + " s).";
  };
  form.onsubmit = event => {
    event.preventDefault();
    if (worker) return end("Stopped");
    const changed = fields.filter(f => f.read() != f.usual), numbers = changed.map(f => f.name + "=" + f.input.value);
    const what = changed.length ? "With " + changed.map(f => f.name + " = " + f.input.value + " (the book has " + f.usual + ")").join(", ") + ": " : "";
    worker = new Worker(source);
    start = Date.now();
    button.textContent = "Stop";
    told.textContent = what + "running in this browser ...";
    worker.onmessage = ({ data }) => {
      const drawn = new DOMParser().parseFromString(data.svg, "image/svg+xml").querySelectorAll("svg > svg");
      if (data.out) table.textContent = data.out;
      if (drawn.length) picture.replaceChildren(...drawn);
      end(what + (changed.length && drawn.length ? "table and picture are those of this number"
          + (data.status ? "; the lesson's check, made for the book's, did not hold" : "")
        : data.status ? "It failed: " + data.err : data.out.trim() == book ? "The same table as the book's, to the last digit"
        : "Done; times and processors differ from the book's table, a hash does not"));
    };
    worker.onerror = error => end(what + "it failed: " + error.message);
    worker.postMessage({ wasm, lesson, numbers });
  };
}
</script>
TAIL
    sed -n '/^<\/main>/,$p' "$page"
} > "$out/index.html" && mv "$out/index.html" "$page" || exit 1
echo "The lessons run in $page ($(wc -c < "$page" | awk '{ printf "%.1f", $1 / 1e6 }') MB)"
