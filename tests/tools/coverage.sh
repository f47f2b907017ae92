#!/bin/sh
# coverage.sh MINIMUM: how many lines of amp.h `make test` reaches, by gcc's own gcov; `make coverage` runs it.
# Prints the percentage and, function by function, the lines never reached. Fails below MINIMUM percent.
# Kernels of instruction sets that this processor does not have are left out: what names AVX-512, or a matrix unit. Without
# AVX-512 the scalar code that only leads to them is not reached either; it is 4 of 100 lines, by which the minimum is less.
cd "$(dirname "$0")/../.." || exit 1
minimum=${1:-95}; out=build/coverage; gcc=${GCC:-gcc}
for tool in $gcc ${GCOV:-gcov}; do command -v "$tool" > /dev/null || { echo "coverage needs gcc and gcov"; exit 1; }; done
mkdir -p $out; rm -f $out/*.gcda
make -s test B=$out CC="$gcc" CFLAGS="-O0 --coverage ${LEAN:-}" || exit 1
${GCOV:-gcov} -t -o $out $out/impl.gcda > $out/gcov.txt || exit 1
absent=_amx_; processor=$(cat /proc/cpuinfo 2> /dev/null)
case $processor in
    *amx_bf16*) absent=;;
    *avx512bw*) ;;
    *) absent="_amx_|AVX512|TARGET_PAIRS|_mm512|_avx512"; minimum=$((minimum - 4));;
esac
# A function or macro is judged as a whole, so its lines wait for its end.
awk -v minimum="$minimum" -v absent="$absent" -F: '                  # count:line:source; ##### = never, - = no code
    function judge(    i, name) {
        if (absent != "" && text ~ absent) { left_out += in_unit; in_unit = 0 }
        lines += in_unit
        for (i = 1; i <= in_unit; i++) if (unit_count[i] ~ /^#/) {
            missed++; name = unit_name[i]
            if (!(name in where)) order[++n] = name
            where[name] = where[name] " " unit_line[i]
        }
        in_unit = 0; text = ""
    }
    /^-+$/ { dashes = 1; next }                     # the same lines again, once for each copy of a function
    dashes { dashes = 0; copy = /^[A-Za-z_][A-Za-z0-9_.]*:$/ }
    copy { next }
    { count = $1; line = $2 + 0; source = substr($0, length($1) + length($2) + 3); gsub(/ /, "", count) }
    line == 0 && source ~ /^Source:/ { judge(); ours = source ~ /amp\.h$/ }
    !ours || line == 0 { next }
    source ~ /^(AMP_DEF|AMPI_|#define|static|typedef)/ { judge() }
    source ~ /^[A-Za-z].*\(/ && source !~ /;$/ {
        name = source; sub(/AMPI_K\(/, "", name); sub(/[()].*/, "", name); sub(/.*[ *]/, "", name)
    }
    { text = text source }
    count ~ /^[0-9#]/ { k = ++in_unit; unit_count[k] = count; unit_name[k] = name; unit_line[k] = line }
    END {
        judge()
        for (i = 1; i <= n; i++) printf "  %s:%s\n", order[i], where[order[i]]
        reached = lines ? 100 * (lines - missed) / lines : 0
        printf "%.2f %% of %d lines of amp.h reached, %d never", reached, lines, missed
        printf left_out ? ", %d for absent instruction sets left out\n" : "\n", left_out
        exit reached < minimum
    }' $out/gcov.txt
