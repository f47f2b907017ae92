#!/bin/sh
# run.sh NAME PROGRAM...: runs the programs, as many at a time as there are processors (JOBS says another number), adds up
# their closing lines, and closes with one of its own. A program that ends badly without a closing line counts as one failure.
name=$1; shift
passed=0; failed=0; skipped=0; tests=0
said=$(mktemp -d) || exit 1
trap 'rm -rf "$said"' EXIT
trap 'exit 1' HUP INT TERM
[ ! -t 2 ] || echo "Running $# programs; each says here what it has checked when all are done." >&2
# shellcheck disable=SC2016
printf '%s\n' "$@" | xargs -P "${JOBS:-$(nproc 2>/dev/null || echo 2)}" -I '{}' \
    sh -c '"$1" > "$2/$(basename "$1")" 2>&1; echo $? > "$2/$(basename "$1").status"' sh '{}' "$said"
for program in "$@"; do
    output=$(cat "$said/$(basename "$program")"); status=$(cat "$said/$(basename "$program").status")
    line=$(printf '%s\n' "$output" | grep -E '^[0-9]+ passed, [0-9]+ failed' | tail -n 1)
    p=$(printf '%s' "$line" | sed -n 's/^\([0-9]*\) passed.*/\1/p')
    f=$(printf '%s' "$line" | sed -n 's/.*passed, \([0-9]*\) failed.*/\1/p')
    s=$(printf '%s' "$line" | sed -n 's/.*failed, \([0-9]*\) skipped.*/\1/p')
    t=$(printf '%s' "$line" | sed -n 's/.*checks of \([0-9]*\) tests.*/\1/p')
    if [ -z "$line" ] || { [ "$status" -ne 0 ] && [ "$f" = 0 ]; }; then f=1; fi
    if [ "${f:-0}" -ne 0 ] || [ -n "$(printf '%s\n' "$output" | grep '^skipped:')" ]; then printf '%s\n' "$output"; fi
    printf '%-24s %s\n' "$(basename "$program")" "${line:-ended with status $status}"
    passed=$((passed + ${p:-0})); failed=$((failed + ${f:-0})); skipped=$((skipped + ${s:-0})); tests=$((tests + ${t:-0}))
done
printf '%s:\n%d passed, %d failed, %d skipped (checks of %d tests)\n' "$name" "$passed" "$failed" "$skipped" "$tests"
[ "$failed" -eq 0 ]
