#!/bin/sh
# test_bits.sh [TABLE]: builds bits.c in many ways and compares its hash with the one below; `make test-bits` runs it.
# Writes what was run as a Markdown table (default build/bits/table.md). What is not installed is named there.
# CC: the first compiler, default cc. JOBS: builds at a time, default 2. ONLY: run only cells whose name contains this.
# FEW=1: for each compiler one set of flags, which leaves it most freedom, with threads, not six.
# LEAN: one more flag for what runs here; `make` knows it (-DAMP_NO_AVX512 where that cannot run).
cd "$(dirname "$0")/.." || exit 1
expected=17c5e515a04c178a   # changes only where bits.c or the arithmetic of amp.h is changed on purpose
out=build/bits; rm -rf $out; mkdir -p $out
table=${1:-$out/table.md}
jobs=${JOBS:-2}; n=0
sources="tests/bits.c tests/impl.c"
host="$(uname -s) $(uname -m)"
export NODE_PATH="${NODE_PATH:-/usr/share/nodejs}" WINEDEBUG=-all WINEPREFIX="$PWD/build/wine" OMP_WAIT_POLICY=passive

have() { command -v "$1" > /dev/null 2>&1; }
version() { { "$1" --version || "$1" -v; } 2> /dev/null | sed -n '1s/.*\( [0-9][0-9.]*\).*/\1/p'; }

# A cell writes $d.row, a line of the table, and $d.say, lines for the terminal.
row() { printf '| %s | `%s` | %s | %s |\n' "$1" "$2" "$3" "$4" > $d.row; }
not_run() { echo "skipped: $1, $2: $3" > $d.say; row "$1" "$2" "-" "not run: $3"; }

cell() { # cell PLACE COMPILER FLAGS RUNNER [ENVIRONMENT...]: builds once, runs under each environment
    place=$1 compiler=$2 flags=$3 runner=$4 name=$2${3:+ $3}; shift 4
    case "$place $name" in *"$ONLY"*) ;; *) return;; esac
    for tool in "$compiler" ${runner%% *}; do have "$tool" || { not_run "$place" "$name" "no ${tool##*/}"; return; }; done
    # shellcheck disable=SC2086
    printf '#include <errno.h>\n#include <math.h>\nint main(void) { return 0; }\n' > $d.c && $compiler $flags $d.c -o $d.exe > $d.log 2>&1 && $runner $d.exe > /dev/null 2>&1 ||
        { not_run "$place" "$name" "these flags are not supported here"; return; }
    # shellcheck disable=SC2086
    $compiler $flags $sources -o $d.exe -lm > $d.log 2>&1 ||
        { echo "FAILED  $place, $name: does not build"; tail -n 5 $d.log; } > $d.say
    [ ! -s $d.say ] || { row "$place" "$name" "-" "does not build"; return; }
    [ -n "$compiler" ] && name="$compiler$(version "$compiler")${flags:+ $flags}"
    run "$@"
}
run() { # run [ENVIRONMENT...]: the built program under each; the promise decides what a difference means
    [ $# -gt 0 ] || set -- "A="
    paths=; same=0; differ=0; other=
    for environment in "$@"; do
        # shellcheck disable=SC2086
        env $environment $runner $d.exe 2> $d.log | tr -d '\r' > $d.lines
        path=$(sed -n 's/^path //p' $d.lines); hash=$(sed -n 's/^hash //p' $d.lines)
        case "; $paths" in *"; $path"*) ;; *) paths="$paths${paths:+; }$path";; esac
        if [ "$hash" = "$expected" ]; then same=$((same + 1)); else differ=$((differ + 1)); other="${hash:-no result}"; tail -n 3 $d.log; fi
    done > $d.note
    if [ $differ -eq 0 ]; then word="ok     "; result=same; else word="FAILED "; result="**differs**"; fi
    [ "$promised" = yes ] || { word="ok     "; [ $differ -eq 0 ] && result="same, not promised" || result="differs, not promised"; }
    { echo "$word $place, $name: $paths: $result $other"; [ "$word" = "ok     " ] || cat $d.note; } > $d.say
    row "$place" "$name" "$paths" "$result"
}
promised=yes
start() { # start CELL...: beside the others, $jobs at a time; the order of the table is that of the calls
    n=$((n + 1)); d=$out/$(printf %03d $n)
    { "$@"; [ ! -e $d.say ] || cat $d.say; } &
    [ $((n % jobs)) -ne 0 ] || wait
}

cc=${CC:-cc}
lean=${LEAN:+ $LEAN}
start cell "$host" $cc "-O0 -DAMP_NO_SIMD" ""
start cell "$host" $cc "-O2$lean" "" AMP_ISA=scalar AMP_ISA=avx2 AMP_ISA=avx512 AMP_ISA=avx512_bf16 AMP_ISA=neon
threads="OMP_NUM_THREADS=1 OMP_NUM_THREADS=2 OMP_NUM_THREADS=3 OMP_NUM_THREADS=4"
for c in gcc clang clang-19; do
    # shellcheck disable=SC2086
    if [ -n "$FEW" ]; then start cell "$host" $c "-O2 -std=gnu99 -ffp-contract=fast -march=native -fopenmp$lean" "" $threads; continue; fi
    for flags in "-O3 -march=native" "-O2 -std=gnu99 -ffp-contract=fast -march=native"; do start cell "$host" $c "$flags" ""; done
    for flags in -O0 -O1 -O2 "-O2 -flto"; do start cell "$host" $c "$flags" ""; done
done
if [ -z "$FEW" ]; then
    for c in g++ clang++; do start cell "$host" $c "-x c++ -std=c++11 -O2" ""; done
    # shellcheck disable=SC2086
    for c in gcc clang; do start cell "$host" $c "-O2 -fopenmp" "" $threads; done
fi
start cell "$host" tcc "" ""
start cell "32-bit x86 with SSE2" i686-linux-gnu-gcc "-O2 -msse2 -mfpmath=sse$lean" "qemu-i386 -L /usr/i686-linux-gnu"
start cell "32-bit x86 with SSE2" gcc "-m32 -O2 -msse2 -mfpmath=sse" ""
start cell "Windows (Wine)" x86_64-w64-mingw32-gcc -O2 wine AMP_ISA=scalar AMP_ISA=avx2 AMP_ISA=avx512
start cell "WebAssembly (Node.js)" emcc "-O2 -sSINGLE_FILE=1 -sALLOW_MEMORY_GROWTH=1" node
# zig alone, or the Python package ziglang; Node.js brings what wasm32-wasi asks of a system.
if ! have zig && ${PYTHON:-python3} -c 'import ziglang' 2> /dev/null; then
    mkdir -p $out/bin
    printf '#!/bin/sh\nexec %s -m ziglang "$@"\n' "${PYTHON:-python3}" > $out/bin/zig && chmod +x $out/bin/zig
    PATH=$PWD/$out/bin:$PATH
fi
cat > $out/wasi.js << 'WASI'
const { WASI } = require("wasi"), wasi = new WASI({ version: "preview1", args: ["bits"], env: process.env });
const program = new WebAssembly.Module(require("fs").readFileSync(process.argv[2]));
process.exit(wasi.start(new WebAssembly.Instance(program, wasi.getImportObject())) || 0);
WASI
start cell "WebAssembly (WASI, Node.js)" zig "cc -target wasm32-wasi -O2 -D_WASI_EMULATED_PROCESS_CLOCKS -lwasi-emulated-process-clocks" "node --no-warnings $out/wasi.js"
start cell "aarch64 (qemu)" aarch64-linux-gnu-gcc -O2 "qemu-aarch64 -L /usr/aarch64-linux-gnu" AMP_ISA=neon AMP_ISA=scalar
start cell "armhf (qemu)" arm-linux-gnueabihf-gcc -O2 "qemu-arm -L /usr/arm-linux-gnueabihf"
start cell "riscv64 (qemu)" riscv64-linux-gnu-gcc -O2 "qemu-riscv64 -L /usr/riscv64-linux-gnu"
for flags in -O2 "-O2 -std=c99"; do     # strictly, floats may be formed as doubles there
    start cell "s390x, big-endian (qemu)" s390x-linux-gnu-gcc "$flags" "qemu-s390x -L /usr/s390x-linux-gnu"
done
start cell "ppc64le (qemu)" powerpc64le-linux-gnu-gcc -O2 "qemu-ppc64le -L /usr/powerpc64le-linux-gnu"
promised=no             # these are shown for what they do
if [ -z "$FEW" ]; then
    start cell "32-bit x86 with x87" i686-linux-gnu-gcc "-O2 -mfpmath=387 -DAMP_NO_SIMD" "qemu-i386 -L /usr/i686-linux-gnu"
    start cell "$host" gcc -Ofast ""
fi
wait

{ echo '| Where | Compiler | Path, threads | Bits |'; echo '|---|---|---|---|'; cat $out/*.row; } > "$table"
passed=$(cat $out/*.say | grep -c '^ok '); failed=$(cat $out/*.say | grep -c '^FAILED'); skipped=$(cat $out/*.say | grep -c '^skipped')
echo "$passed passed, $failed failed, $skipped skipped (hash $expected, table in $table)"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
