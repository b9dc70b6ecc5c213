#!/bin/sh
# Runs every unit test program of a build, each in its own process with a time limit, and prints one
# line a program and what a failed one said. Usage: tests/run_unit.sh BUILD [NAME ...]
# The tally is left in BUILD/tests/tally as "PASSED FAILED" (of single tests, as cmocka counts them),
# and what failed in BUILD/tests/failed, in words.
set -u
build=${1:?usage: tests/run_unit.sh BUILD [NAME ...]}
shift
limit_s=${UNIT_LIMIT_S:-300}
passed=0 failed=0
: >"$build/tests/failed"
if [ $# -gt 0 ]; then set -- $(printf "$build/tests/test_%s " "$@"); else set -- "$build"/tests/test_*; fi
for program in "$@"; do
    [ -x "$program" ] && [ ! -d "$program" ] || continue
    name=$(basename "$program")
    log="$build/tests/$name.log"
    timeout -k 5 "$limit_s" "$program" >"$log" 2>&1
    rc=$?
    ok=$(grep -ac '^\[       OK \]' "$log")
    # cmocka names a failed test twice: when it fails, and in the list at the end.
    bad=$(grep -a '^\[  FAILED  \] [A-Za-z0-9_]*$' "$log" | sort -u | wc -l)
    # A program that crashed, timed out or ran nothing has failed, whatever it counted.
    if [ $rc -ne 0 ] && [ "$bad" -eq 0 ]; then bad=1; fi
    if [ $rc -eq 0 ] && [ "$ok" -eq 0 ]; then bad=1; fi
    if [ "$bad" -eq 0 ]; then
        printf '  ok    %-28s %d\n' "$name" "$ok"
    else
        printf '  FAIL  %-28s exit %d, %d ok, log %s\n' "$name" "$rc" "$ok" "$log"
        printf '%s, exit %d, %d ok, log %s:\n' "$name" "$rc" "$ok" "$log" >>"$build/tests/failed"
        grep -av '^\[ *\(OK\|RUN\)' "$log" | tail -25 | tr -d '\000' | sed 's/^/        /' | tee -a "$build/tests/failed"
    fi
    passed=$((passed + ok)) failed=$((failed + bad))
done
echo "$passed $failed" >"$build/tests/tally"
[ "$failed" -eq 0 ]
