#!/bin/sh
# coverage.sh MINIMUM: how many lines of amp.h `make test` reaches, by gcc's own gcov; `make coverage` runs it.
# Prints the percentage and, function by function, the lines never reached. Fails below MINIMUM percent.
# Kernels for AVX-512 and for a matrix unit are left out where the processor has none.
cd "$(dirname "$0")/.." || exit 1
minimum=${1:-95}; out=build/coverage; gcc=${GCC:-gcc}
for tool in $gcc ${GCOV:-gcov}; do command -v "$tool" > /dev/null || { echo "coverage needs gcc and gcov"; exit 1; }; done
mkdir -p $out; rm -f $out/*.gcda
make -s test B=$out CC="$gcc" CFLAGS="-O0 --coverage ${LEAN:-}" || exit 1
${GCOV:-gcov} -t -o $out $out/impl.gcda > $out/gcov.txt || exit 1
absent=; grep -q amx_bf16 /proc/cpuinfo 2> /dev/null || absent=_amx_
awk -v minimum="$minimum" -v absent="$absent" -F: '                  # count:line:source; ##### = never, - = no code
    { count = $1; line = $2 + 0; source = substr($0, length($1) + length($2) + 3); gsub(/ /, "", count) }
    line == 0 && source ~ /^Source:/ { ours = source ~ /amp\.h$/ }
    line > 0 && source ~ /^[A-Za-z].*\(/ && source !~ /;$/ {
        name = source; sub(/\(.*/, "", name); sub(/.*[ *]/, "", name); if (source ~ /^ *AMPI_KERNEL/) name = "AMPI_KERNEL"
    }
    !ours || line == 0 || count == "-" || !(count ~ /^[0-9#]/) { next }
    absent != "" && name ~ absent { left_out++; next }
    { lines++ }
    count ~ /^#/ { missed++; if (!(name in where)) order[++n] = name; where[name] = where[name] " " line }
    END {
        for (i = 1; i <= n; i++) printf "  %s:%s\n", order[i], where[order[i]]
        reached = lines ? 100 * (lines - missed) / lines : 0
        printf "%.2f %% of %d lines of amp.h reached, %d never", reached, lines, missed
        printf left_out ? ", %d for a matrix unit left out\n" : "\n", left_out
        exit reached < minimum
    }' $out/gcov.txt
