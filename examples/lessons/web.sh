#!/bin/sh
# web.sh PAGE BUILD: makes the lessons of PAGE (index.html) run in the browser. All programs become one WebAssembly file
# inside the page; a button of each lesson runs it there, draws its picture anew and compares its table with the book's.
# WASM_CC: a compiler for wasm32-wasi, default `zig cc` or `python -m ziglang cc` where there is one.
book=$(dirname "$0") page=$1 out=$2/web
if [ -z "$WASM_CC" ]; then
    if command -v zig > /dev/null; then WASM_CC="zig cc -target wasm32-wasi"
    elif ${PYTHON:-python3} -c 'import ziglang' 2> /dev/null; then WASM_CC="${PYTHON:-python3} -m ziglang cc -target wasm32-wasi"
    else echo "no compiler for WebAssembly: zig, the Python package ziglang, or WASM_CC"; exit 1; fi
fi
flags="-std=c99 -O2 -w -D_WASI_EMULATED_PROCESS_CLOCKS"
mkdir -p "$out"
[ "$out/impl.o" -nt amp.h ] || $WASM_CC $flags -c tests/impl.c -o "$out/impl.o" || exit 1
{
    printf 'int atoi(const char*);\n'
    for file in "$book"/[01]*.c; do n=$(basename "$file" | sed 's/^0*\([0-9]*\)_.*/\1/'); printf 'int lesson_%s(int, char**);\n' "$n"; done
    printf 'int main(int argc, char** argv) {\n    static char* args[] = { "lesson", "picture.svg", 0 };\n'
    printf '    switch (argc > 1 ? atoi(argv[1]) : 0) {\n'
    for file in "$book"/[01]*.c; do
        n=$(basename "$file" | sed 's/^0*\([0-9]*\)_.*/\1/')
        printf '        case %s: return lesson_%s(2, args);\n' "$n" "$n"
    done
    printf '    }\n    return 2;\n}\n'
} > "$out/main.c"
objects=
for file in "$book"/[01]*.c; do
    n=$(basename "$file" | sed 's/^0*\([0-9]*\)_.*/\1/')
    objects="$objects $out/$n.o"
    [ "$out/$n.o" -nt "$file" ] && [ "$out/$n.o" -nt amp.h ] && continue
    echo "Compiling lesson $n for WebAssembly"
    $WASM_CC $flags -DAMPI_IMPLEMENTATION_ONCE -Dmain=lesson_$n -c "$file" -o "$out/$n.o" || exit 1
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
for (const section of document.querySelectorAll("section")) {
  const table = section.querySelector("pre.table"), picture = section.querySelector(".picture");
  const button = document.createElement("button"), told = document.createElement("p"), book = table.textContent.trim();
  button.textContent = "Run it here";
  told.setAttribute("role", "status");
  table.after(button, told);
  button.onclick = () => {
    const worker = new Worker(source), start = Date.now();
    button.disabled = true;
    told.textContent = "running in this browser ...";
    worker.onmessage = ({ data }) => {
      table.textContent = data.out;
      told.textContent = (data.status ? "It failed: " + data.err : data.out.trim() == book ? "The same table as the book's, to the last digit"
        : "Done; times and processors differ from the book's table, a hash does not") + " (" + ((Date.now() - start) / 1000).toFixed(1) + " s).";
      const drawn = new DOMParser().parseFromString(data.svg, "image/svg+xml").querySelectorAll("svg > svg");
      if (drawn.length) picture.replaceChildren(...drawn);
      button.disabled = false;
      worker.terminate();
    };
    worker.postMessage({ wasm, lesson: section.id.replace("lesson", "") });
  };
}
</script>
TAIL
    sed -n '/^<\/main>/,$p' "$page"
} > "$out/index.html" && mv "$out/index.html" "$page" || exit 1
echo "The lessons run in $page ($(wc -c < "$page" | awk '{ printf "%.1f", $1 / 1e6 }') MB)"
