#!/bin/bash
# Runs tests, several at a time and the longest first, each in a process of its own with a time limit.
#
#     tests/runner.sh JOBS RESULTS <LIST      LIST: lines "KIND BUILD NAME"
#
#     unit BUILD NAME     BUILD/tests/test_NAME, a cmocka program; its output goes to BUILD/tests/test_NAME.log
#     script BUILD NAME   tests/e2e/NAME.sh BUILD (or tests/NAME.sh), which prints "ok ..." and "FAIL ..." lines;
#                         its output goes to BUILD/tests/e2e/NAME.log. Exit code 77: skipped.
#
# A test that crashes, runs out of time or checks nothing has failed, whatever it counted. Prints one line for
# each test as it ends, and what a failed one said. For each test RESULTS gets a file KIND.BUILD.NAME with
# "PASSED FAILED SECONDS", and in RESULTS/failed what failed, in words. Exits 1 when a test has failed.
#
# How long a test takes is looked up in tests/durations ("KIND BUILD NAME SECONDS", BUILD without its folder's
# path): this is for the order alone, so old figures only cost time.
#
# UNIT_LIMIT_S (300) and E2E_LIMIT_S (1200): seconds that one test may take.
set -u
jobs=${1:?usage: tests/runner.sh JOBS RESULTS <LIST}
results=${2:?usage: tests/runner.sh JOBS RESULTS <LIST}
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$results" || exit 1
: >"$results/failed"

say() { # KIND BUILD NAME PASSED FAILED SECONDS
    printf '  %-4s  %-7s %-28s %4d checks, %4d s\n' "$([ "$5" -eq 0 ] && echo ok || echo FAIL)" \
        "$1${2#build}" "$3" $(($4 + $5)) "$6"
}
# Lines about a failed test, for the terminal and for the end of the check.
tell() { # KIND BUILD NAME FAILED LOG; the lines come from standard input
    { echo "$1 $2 $3: $4 failed, log $5:"; tr -d '\000' | sed 's/^/        /'; } | tee -a "$results/failed"
}

run_unit() { # BUILD NAME
    local log=$1/tests/test_$2.log code p f began=$SECONDS
    timeout -k 5 "${UNIT_LIMIT_S:-300}" "$1/tests/test_$2" >"$log" 2>&1 </dev/null
    code=$?
    p=$(grep -ac '^\[       OK \]' "$log")
    # cmocka names a failed test twice: when it fails, and in the list at the end.
    f=$(grep -a '^\[  FAILED  \] [A-Za-z0-9_]*$' "$log" | sort -u | wc -l)
    if [ "$f" -eq 0 ] && { [ $code -ne 0 ] || [ "$p" -eq 0 ]; }; then
        f=1
        echo "exit $code" >>"$log"
    fi
    echo "$p $f $((SECONDS - began))" >"$results/unit.${1##*/}.$2"
    say unit "${1##*/}" "$2" "$p" "$f" $((SECONDS - began))
    [ "$f" -eq 0 ] || grep -av '^\[ *\(OK\|RUN\)' "$log" | tail -25 | tell unit "$1" "$2" "$f" "$log"
    [ "$f" -eq 0 ]
}

# What a script that was itself killed has left: processes named by its directory.
end_leftovers() { # DIR
    local p comm words
    for p in /proc/[0-9]*; do
        { read -r comm <"$p/comm" && mapfile -d '' -t words <"$p/cmdline"; } 2>/dev/null || continue
        case "$comm ${words[*]}" in lg*"$1"*) kill -9 "${p#/proc/}" 2>/dev/null ;; esac
    done
}

run_script() { # BUILD NAME
    local log=$1/tests/e2e/$2.log script=tests/e2e/$2.sh code p f began=$SECONDS
    [ -f "$script" ] || script=tests/$2.sh
    E2E_TMP=$(mktemp -d /tmp/lgc.XXXXXX) || return 1
    export E2E_TMP
    mkdir -p "${log%/*}"
    timeout -k 30 "${E2E_LIMIT_S:-1200}" "$script" "$1" >"$log" 2>&1 </dev/null
    code=$?
    end_leftovers "$E2E_TMP"
    rm -rf "$E2E_TMP"
    if [ $code -eq 77 ]; then
        grep -a '^skip ' "$log"
        echo "0 0 $((SECONDS - began))" >"$results/script.${1##*/}.${2//\//_}"
        return 0
    fi
    p=$(grep -ac '^ok ' "$log") f=$(grep -ac '^FAIL ' "$log")
    if [ $code -eq 124 ] || [ $code -eq 137 ]; then
        echo "FAIL $2: not done after ${E2E_LIMIT_S:-1200} s" >>"$log"
        f=$((f + 1))
    elif [ "$f" -eq 0 ] && { [ $code -ne 0 ] || [ "$p" -eq 0 ]; }; then
        echo "FAIL $2: exit $code after $p checks" >>"$log"
        f=1
    fi
    echo "$p $f $((SECONDS - began))" >"$results/script.${1##*/}.${2//\//_}"
    grep -a '^skip ' "$log"
    say e2e "${1##*/}" "$2" "$p" "$f" $((SECONDS - began))
    [ "$f" -eq 0 ] || grep -aE '^(FAIL |# [A-Z_]*SEED)' "$log" | head -20 | tell script "$1" "$2" "$f" "$log"
    [ "$f" -eq 0 ]
}

# The longest first, so that no slot waits for one at the end.
longest_first() {
    awk 'NR == FNR { if ($1 !~ /^#/) s[$1, $2, $3] = $4; next }
         { b = $2; sub(/.*\//, "", b); print ((($1, b, $3) in s) ? s[$1, b, $3] : 5), $0 }' \
        tests/durations - | sort -k1,1 -nr -s | cut -d' ' -f2-
}

failed=0 running=0
while read -r kind build name; do
    if [ $running -ge "$jobs" ]; then
        wait -n || failed=1
        running=$((running - 1))
    fi
    case $kind in
    unit) run_unit "$build" "$name" & ;;
    script) run_script "$build" "$name" & ;;
    *) echo "tests/runner.sh: no such kind of test: $kind" >&2 && exit 2 ;;
    esac
    running=$((running + 1))
done < <(longest_first)
while [ $running -gt 0 ]; do
    wait -n || failed=1
    running=$((running - 1))
done
exit $failed
