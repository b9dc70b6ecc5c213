#!/bin/bash
# Runs the CUDA backend's tests and prints "N passed, N failed". Exits with 1 when one failed or died.
#
# usage: build/gpu/run.sh [FILTER]      FILTER: run programs whose name contains it
#
# PARTS=N in the environment splits what takes long over N processes each.
#
# The algorithms tuned on the way are kept in $LG_CUDA_CACHE (default: a temporary file).
set -u
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export LG_CUDA_CACHE=${LG_CUDA_CACHE:-$tmp/algorithms.txt}
passed=0 failed=0
take() { # PROGRAM[.PART] EXIT_STATUS: adds what its log says
    cat "$tmp/$1.log"
    local sums
    sums=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$tmp/$1.log" | tail -1)
    if [ -z "$sums" ]; then
        echo "FAIL $1: no result, exit status $2"
        failed=$((failed + 1))
    else
        passed=$((passed + ${sums% *})) failed=$((failed + ${sums#* }))
        # A part may have had nothing to do.
        if [ "$2" != 0 ] && [ "${sums#* }" = 0 ] && { [ "$sums" != "0 0" ] || [ "${PARTS:-1}" = 1 ]; }; then
            echo "FAIL $1: exit status $2 after its last line"
            failed=$((failed + 1))
        fi
    fi
}
# Together: most of their time is the reference's, on one core each.
names=() pids=()
for program in "$here"/bin/test_*; do
    name=$(basename "$program")
    case $name in *"${1:-}"*) ;; *) continue ;; esac
    parts=${PARTS:-1}
    case $name in test_share* | test_encoders*) parts=1 ;; esac
    for ((i = 0; i < parts; i++)); do
        part=$name.$i
        PART=$i/$parts timeout 300 "$program" >"$tmp/$part.log" 2>&1 &
        names+=("$part") pids+=($!)
    done
done
for i in "${!pids[@]}"; do
    wait "${pids[i]}"
    take "${names[i]}" $?
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
