#!/bin/bash
# Runs the fuzz targets of a build and prints one line for each: runs, coverage, crashes. Called by
# `make fuzz`. Fails when an input crashes a target, leaks, or takes longer than 20 s or 3 GB; the
# input is left in BUILD/fuzz/crashes/.
#
# usage: tests/fuzz/run.sh BUILD [SECONDS [JOBS]]      FUZZ_ONLY="tar toml" picks targets
#                                                      FUZZ_SEED=n: the same changes each time
#
# New inputs of one call are kept in BUILD/fuzz/corpus/<target>, so that the next goes on from there;
# the seeds in the tree are never written. To keep a crashing input as a seed, after the fix:
#     cp BUILD/fuzz/crashes/<target>-crash-... tests/fuzz/corpus/<target>/<what it is>
set -u
build=${1:?usage: tests/fuzz/run.sh BUILD [SECONDS [JOBS]]}
export FUZZ_SECONDS=${2:-20}
jobs=${3:-1}
cd "$(dirname "$0")/../.." || exit 1
FUZZ_DIR=$(realpath "$build")/fuzz || exit 1
TMPDIR=$(mktemp -d /tmp/lgf.XXXXXX) || exit 1
export FUZZ_DIR TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
mkdir -p "$FUZZ_DIR/crashes" "$FUZZ_DIR/logs"

targets() { # "TARGET FOLDER" of each
    sed -n 's/^LG_FUZZ(\([a-z_]*\), "\([^"]*\)")$/\1 \2/p' tests/fuzz/targets.def | while read -r t folder; do
        case " ${FUZZ_ONLY:-$t} " in
        *" $t "*) echo "$t${folder:+ $folder}" ;; # xargs joins lines that end in a space
        esac
    done
}

run_one() { # TARGET [FOLDER]
    local t=$1 log=$FUZZ_DIR/logs/$1.log work=$FUZZ_DIR/corpus/$1 code runs cov crashes
    mkdir -p "$work"
    local before
    before=$(find "$FUZZ_DIR/crashes" -name "$t-*" | wc -l)
    # One and a half times the limit and a bit: a machine with more to do must not look like a hang.
    timeout -k 10 $((FUZZ_SECONDS * 3 / 2 + 60)) "$FUZZ_DIR/$t" -max_total_time="$FUZZ_SECONDS" \
        -seed="${FUZZ_SEED:-0}" -max_len=4096 -timeout=20 -rss_limit_mb=3072 -print_final_stats=1 -verbosity=1 \
        -artifact_prefix="$FUZZ_DIR/crashes/$t-" "$work" $(ls -d "tests/fuzz/corpus/$t" ${2:-}) >"$log" 2>&1
    code=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)
    cov=$(grep -o 'cov: [0-9]*' "$log" | tail -1 | cut -d' ' -f2)
    crashes=$(($(find "$FUZZ_DIR/crashes" -name "$t-*" | wc -l) - before))
    printf '  %-4s  %-14s %9s runs  %6s edges covered  %s crashes\n' \
        "$([ $code -eq 0 ] && echo ok || echo FAIL)" "$t" "${runs:-0}" "${cov:-0}" "$crashes"
    if [ $code -ne 0 ]; then
        echo "        exit $code, log $log"
        grep -E '^(bug:|.*ERROR: |SUMMARY: |.*Test unit written to|.*runtime error)' "$log" | tail -5 | sed 's/^/        /'
        touch "$TMPDIR/failed"
    fi
}
export -f run_one

list=$(targets)
[ -n "$list" ] || { echo "no such fuzz target: ${FUZZ_ONLY:-}"; exit 1; }
echo "fuzzing $(echo "$list" | wc -l) targets, $FUZZ_SECONDS s each, $jobs at a time"
echo "$list" | xargs -P "$jobs" -L 1 bash -c 'run_one "$@"' run_one
[ ! -e "$TMPDIR/failed" ]
