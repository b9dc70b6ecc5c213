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
# "PASSED FAILED SECONDS CPU_SECONDS", and in RESULTS/failed what failed, in words. Exits 1 when a test has failed.
# CPU_SECONDS are those of all its processes, but for what has detached itself: unlike the seconds that passed,
# they say what a test costs also where others use the machine.
#
# How long a test takes is looked up in tests/durations ("KIND BUILD NAME SECONDS CPU_SECONDS", BUILD without its
# folder's path): this is for the order alone, so old figures only cost time. tests/durations.sh writes the file.
#
# What unit tests write lies in memory (/dev/shm), where there is room and programs can be run; UNIT_TMP names another folder.
# Scripts write where users do, on a disk.
#
# UNIT_LIMIT_S (300) and E2E_LIMIT_S (1200): seconds that one test may take.
set -u
jobs=${1:?usage: tests/runner.sh JOBS RESULTS <LIST}
results=${2:?usage: tests/runner.sh JOBS RESULTS <LIST}
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$results" || exit 1
: >"$results/failed"

# Writes the result of a test, and says it: KIND BUILD NAME PASSED FAILED. What it took is in RESULTS/*.took.
say() {
    local file=$results/$1.${2##*/}.${3//\//_} wall user system
    { read -r wall user system <"$file.took"; } 2>/dev/null || wall=0 user=0 system=0
    rm -f "$file.took"
    set -- "$@" "${wall%.*}" "$(awk "BEGIN { printf \"%.1f\", $user + $system }")"
    echo "$4 $5 $6 $7" >"$file"
    printf '  %-4s  %-7s %-28s %4d checks, %4d s, %6s s of CPU\n' "$([ "$5" -eq 0 ] && echo ok || echo FAIL)" \
        "${1/script/e2e}${2#build}" "$3" $(($4 + $5)) "$6" "$7"
}
# timed FILE COMMAND...: runs it; FILE.took says the seconds that passed, of user and of system time.
TIMEFORMAT='%R %U %S'
timed() {
    local file=$1
    shift
    { time "$@" 2>&3 3>&-; } 3>&2 2>"$file.took"
}
# Lines about a failed test, for the terminal and for the end of the check.
tell() { # KIND BUILD NAME FAILED LOG; the lines come from standard input
    { echo "$1 $2 $3: $4 failed, log $5:"; tr -d '\000' | sed 's/^/        /'; } | tee -a "$results/failed"
}

# A test is over sooner there: thousands of small files are made, flushed and removed.
unit_tmp=${UNIT_TMP:-}
if [ -z "$unit_tmp" ]; then
    unit_tmp=/tmp
    if probe=$(mktemp /dev/shm/lgp.XXXXXX 2>/dev/null); then
        free=$(df -Pk /dev/shm | awk 'NR == 2 { print $4 }')
        printf '#!/bin/sh\n' >"$probe" && chmod 700 "$probe" && "$probe" 2>/dev/null && [ "${free:-0}" -ge 4000000 ] &&
            unit_tmp=/dev/shm
        rm -f "$probe"
    fi
fi
run_unit() { # BUILD NAME
    local log=$1/tests/test_$2.log code p f
    TMPDIR=$(mktemp -d "$unit_tmp/lgu.XXXXXX") || return 1 # what a test that crashes leaves
    export TMPDIR XDG_RUNTIME_DIR=$TMPDIR
    chmod 711 "$TMPDIR" # a test plays another user
    timed "$results/unit.${1##*/}.$2" timeout -k 5 "${UNIT_LIMIT_S:-300}" "$1/tests/test_$2" >"$log" 2>&1 </dev/null
    code=$?
    rm -rf "$TMPDIR"
    p=$(grep -ac '^\[       OK \]' "$log")
    # cmocka names a failed test twice: when it fails, and in the list at the end.
    f=$(grep -a '^\[  FAILED  \] [A-Za-z0-9_]*$' "$log" | sort -u | wc -l)
    if [ "$f" -eq 0 ] && { [ $code -ne 0 ] || [ "$p" -eq 0 ]; }; then
        f=1
        echo "exit $code" >>"$log"
    fi
    say unit "${1##*/}" "$2" "$p" "$f"
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
    local log=$1/tests/e2e/$2.log script=tests/e2e/$2.sh code p f
    [ -f "$script" ] || script=tests/$2.sh
    E2E_TMP=$(mktemp -d /tmp/lgc.XXXXXX) || return 1
    export E2E_TMP
    mkdir -p "${log%/*}"
    timed "$results/script.${1##*/}.${2//\//_}" timeout -k 30 "${E2E_LIMIT_S:-1200}" "$script" "$1" >"$log" 2>&1 </dev/null
    code=$?
    end_leftovers "$E2E_TMP"
    rm -rf "$E2E_TMP"
    if [ $code -eq 77 ]; then
        grep -a '^skip ' "$log"
        say script "${1##*/}" "$2" 0 0
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
    grep -a '^skip ' "$log"
    say script "${1##*/}" "$2" "$p" "$f"
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
