#!/bin/sh
# budget.sh: what amp.h and amp_cuda.cuh may cost, as a table; fails above a budget. `make budget` runs it.
# Time of compiling is the processor's, beside that of the header at commit OLD, from git's history; without that commit
# these rows are left out; SLACK=1.25 lets times be a quarter longer, for a loaded machine. Machine code is counted on
# x86-64 only.
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-cc}; OLD=${OLD:-20f938e}; SLACK=${SLACK:-1}; out=build/budget; failed=0
mkdir -p $out

row() { # row WHAT NOW BUDGET
    verdict=$(awk "BEGIN { print ($2 <= $3) ? \"ok\" : \"above\" }")
    [ $verdict = ok ] || failed=$((failed + 1))
    printf '| %-44s | %9s | %9s | %-5s |\n' "$1" "$2" "$3" $verdict
}
seconds() { # seconds HEADER OPTION...: of the processor, for one object at -O2; the less of two runs
    header=$1; shift
    printf '#define AMP_IMPLEMENTATION\n#include "%s"\n' "$header" > $out/one.c
    for run in 1 2; do sh -c "$CC -std=c99 -O2 $* -c $out/one.c -o $out/one.o; times" | sed -n 2p; done |
        awk -F'[ms ]+' '{ s = 60 * $1 + $2 } NR == 1 || s < least { least = s } END { print least }'
}

printf '| %-44s | %9s | %9s | %-5s |\n|---|---|---|---|\n' what now budget ""
row "amp.h, lines" "$(wc -l < amp.h)" 12000
row "amp.h, bytes" "$(wc -c < amp.h)" 640000
row "amp_cuda.cuh, lines" "$(wc -l < amp_cuda.cuh)" 7500
new=$(seconds "$PWD/amp.h")
if [ "$(uname -m)" = x86_64 ]; then row "machine code, bytes" "$(size $out/one.o | awk 'NR == 2 { print $1 }')" 450000; fi
if git show "$OLD:amp.h" > $out/old.h 2> $out/log; then
    old=$(seconds "$PWD/$out/old.h"); plain=$(seconds "$PWD/amp.h" -DAMP_NO_SIMD)
    ratio() { awk "BEGIN { printf \"%.3f\", $1 }"; }
    row "time to compile, of the old header's" "$(ratio "$new / $old")" "$(ratio "0.33 * $SLACK")"
    row "time with -DAMP_NO_SIMD, of the old header's" "$(ratio "$plain / $old")" "$(ratio "0.10 * $SLACK")"
    echo "compiling at -O2, seconds of the processor: $old with the header at $OLD, $new now, $plain with -DAMP_NO_SIMD"
else echo "skipped: commit $OLD is not in the history here, so compile times have nothing to stand beside"; fi
[ $failed = 0 ] || { echo "$failed above their budget"; exit 1; }
