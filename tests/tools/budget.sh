#!/bin/sh
# budget.sh: what the headers and the README may cost a reader and a compiler, as a table; fails above a budget.
# `make budget` runs it, PYTHON and CC come from there. Blank lines, comments and braces are free: tokens are counted.
# Machine code is that of all instruction sets at -O2, on x86-64 only.
cd "$(dirname "$0")/../.." || exit 1
CC=${CC:-cc}; PYTHON=${PYTHON:-python3}; out=build/budget; failed=0
mkdir -p $out

row() { # row WHAT NOW BUDGET
    verdict=ok
    if [ "$2" -gt "$3" ]; then verdict=above; failed=$((failed + 1)); fi
    printf '| %-60s | %7s | %7s | %-5s |\n' "$1" "$2" "$3" $verdict
}
facts() { # facts HEADER TOKENS NINETY LONGEST DEPTH SILENT: rows of a header, with their budgets
    $PYTHON tests/tools/facts.py "$1" > $out/facts || exit 1
    fact() { awk -v name="$1" '$1 == name { print $2 }' $out/facts; }
    row "$1: tokens" "$(fact tokens)" "$2"
    row "$1: lines of code, nine of ten functions" "$(fact ninety)" "$3"
    row "$1: lines of code, the longest function" "$(fact longest)" "$4"
    row "$1: depth of braces" "$(fact depth)" "$5"
    row "$1: functions over 3 lines without a comment above" "$(fact silent)" "$6"
    row "$1: bytes, as tools for code stop at 1 MiB" "$(wc -c < "$1")" 1040000
}

printf '| %-60s | %7s | %7s | %-5s |\n|---|---|---|---|\n' what now budget ""
facts amp.h 179000 25 50 4 60
facts amp_cuda.cuh 89800 25 50 4 60
if [ "$(uname -m)" = x86_64 ]; then
    printf '#define AMP_IMPLEMENTATION\n#include "%s"\n' "$PWD/amp.h" > $out/one.c
    $CC -std=c99 -O2 -c $out/one.c -o $out/one.o || exit 1
    row "amp.h: machine code, bytes" "$(size $out/one.o | awk 'NR == 2 { print $1 }')" 522600
fi
row "README.md: words" "$(wc -w < README.md)" 2600
[ $failed = 0 ] || { echo "$failed above their budget"; exit 1; }
