#!/bin/sh
# counts.sh [record]: instructions that one call of a few hot paths executes, against those in counts.txt; fails if one
# needs 3 % more. They do not depend on what else the machine does. `make check` runs it; record writes the file anew.
# Counts hold for one compiler, C library and valgrind, and for the AVX2 path, which is what valgrind knows: elsewhere
# they are not compared.
cd "$(dirname "$0")/../.." || exit 1
CC=${CC:-cc}; mode=${1:-compare}; file=tests/bench/counts.txt; out=build/counts; limit=3
mkdir -p $out
command -v valgrind > $out/log || { echo "skipped: valgrind is not here"; exit 0; }
$CC -std=c99 -O2 tests/bench/bench.c -o $out/bench -lm || exit 1

# The name a compiler was called by is not part of its version.
made_with="$($CC --version | sed -n '1s/^[^ ]* //p'); $(valgrind --version); $(ldd --version 2>&1 | sed -n 1p)"

count() { # count WHAT SHAPE TYPE: prints the instructions of one call
    valgrind --tool=callgrind --callgrind-out-file=$out/callgrind --toggle-collect=measured \
        $out/bench count "$1" "$2" "$3" > $out/isa 2> $out/log || { cat $out/log; exit 1; }
    sed -n 's/.*Collected : \([0-9]*\).*/\1/p' $out/log
}
compare() { # compare WHAT SHAPE TYPE BEFORE
    now=$(count "$1" "$2" "$3")
    change=$(awk "BEGIN { printf \"%.1f\", 100 * ($now / $4 - 1) }")
    worse=$(awk "BEGIN { print ($change > $limit) }")
    if [ "$worse" = 1 ]; then failed=$((failed + 1)); word="FAILED "; else passed=$((passed + 1)); word="ok     "; fi
    echo "$word $1, $2, $3: $now instructions, $change %"
}

if [ "$mode" = record ]; then
    { echo "# $made_with"
      while IFS='	' read -r what shape type _; do
          case $what in "#"*) continue;; esac
          printf '%s\t%s\t%s\t%s\n' "$what" "$shape" "$type" "$(count "$what" "$shape" "$type")"
      done < $file; } > $out/new
    mv $out/new $file
    cat $file
    exit 0
fi
if [ "$(sed -n '1s/^# //p' $file)" != "$made_with" ]; then
    echo "skipped: counts are of $(sed -n '1s/^# //p' $file); here is $made_with"; exit 0
fi
count gemm NN:8x8x8 f32 > $out/first
[ "$(cat $out/isa)" = avx2 ] || { echo "skipped: counts are of the AVX2 path"; exit 0; }
passed=0; failed=0
while IFS='	' read -r what shape type before; do
    case $what in "#"*) continue;; esac
    compare "$what" "$shape" "$type" "$before"
done < $file
[ $failed -eq 0 ] || echo "if that is meant: make bench-counts"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
