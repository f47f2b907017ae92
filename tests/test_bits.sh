#!/bin/sh
# test_bits.sh [MATRIX]: builds bits.c in many ways and compares the hash with that of the plainest build (portable C,
# -O0, one thread). Writes the table of what was run to MATRIX. What is not installed is skipped and named.
cd "$(dirname "$0")/.." || exit 1
out=build/bits; mkdir -p $out
table=${1:-$out/matrix.txt}; : > "$table"
passed=0; failed=0; skipped=0; expected=

row() { printf '| %s | %s |\n' "$1" "$2" >> "$table"; }
have() { command -v "$1" > /dev/null 2>&1; }
cell() { # cell NAME BUILD RUN: BUILD makes $out/bits from the two sources, RUN prints the lines
    if ! sh -c "$2" > $out/log 2>&1; then failed=$((failed + 1)); echo "FAILED  $1: does not build"; tail -n 5 $out/log; row "$1" "does not build"; return; fi
    sh -c "$3" > $out/lines 2>> $out/log; hash=$(sed -n 's/^hash //p' $out/lines)
    [ -n "$expected" ] || { expected=$hash; cp $out/lines $out/expected; echo "reference hash $expected"; }
    if [ -n "$hash" ] && [ "$hash" = "$expected" ]; then passed=$((passed + 1)); echo "ok      $1"; row "$1" "same"
    else failed=$((failed + 1)); echo "FAILED  $1: '$hash'"; diff $out/lines $out/expected | grep '^<'; row "$1" "differs"; fi
}
src="tests/bits.c tests/impl.c -o $out/bits -lm"
native() { # native COMPILER FLAGS [ENVIRONMENT]
    if ! have "$1"; then skipped=$((skipped + 1)); echo "skipped: $1 is not here"; row "$1 $2 $3" "not run"; return; fi
    cell "$1 $2 $3" "$1 $2 $src" "$3 $out/bits"
}
cross() { # cross NAME COMPILER EMULATOR
    have "${2%% *}" && have "${3%% *}" || { skipped=$((skipped + 1)); echo "skipped: $1: ${2%% *} or ${3%% *} is not here"; row "$1" "not run"; return; }
    cell "$1" "$2 -O2 $src" "$3 $out/bits"
}

native gcc "-O0 -DAMP_NO_SIMD"
for isa in scalar avx2 avx512; do native gcc -O2 AMP_ISA=$isa; done
for c in gcc clang clang-19; do
    for flags in -O0 -O2 "-O3 -march=native" "-O2 -flto"; do native $c "$flags"; done
done
native tcc ""
native g++ "-x c++ -std=c++11 -O2"
for n in 1 2 3 4; do native gcc "-O2 -fopenmp" OMP_NUM_THREADS=$n; done
native gcc "-m32 -O2"
native gcc "-m32 -O2 -mfpmath=387 -DAMP_NO_SIMD"
cross aarch64 aarch64-linux-gnu-gcc "qemu-aarch64 -L /usr/aarch64-linux-gnu"
cross armhf arm-linux-gnueabihf-gcc "qemu-arm -L /usr/arm-linux-gnueabihf"
cross riscv64 riscv64-linux-gnu-gcc "qemu-riscv64 -L /usr/riscv64-linux-gnu"
cross "s390x (big-endian)" s390x-linux-gnu-gcc "qemu-s390x -L /usr/s390x-linux-gnu"
cross ppc64le powerpc64le-linux-gnu-gcc "qemu-ppc64le -L /usr/powerpc64le-linux-gnu"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
