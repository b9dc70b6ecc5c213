#!/bin/bash
# Runs the CUDA backend's tests and prints "N passed, N failed". Exits with 1 when one failed or died.
#
# usage: build/gpu/run.sh [FILTER]      FILTER: run programs whose name contains it
#
# PARTS=N in the environment splits what takes long over N processes each, the nets over 8 N; JOBS=N processes run at a time (default:
# one for each core). A process is ended after LIMIT_S seconds (default 300); TERM ends all, and what had ended by then is counted.
#
# The algorithms tuned on the way are kept in $LG_CUDA_CACHE (default: a temporary file).
set -u
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export LG_CUDA_CACHE=${LG_CUDA_CACHE:-$tmp/algorithms.txt}
export here tmp limit=${LIMIT_S:-300}
passed=0 failed=0
take() { # PROGRAM.PART: adds what its log says
    local sums status=not-ended
    [ ! -e "$tmp/$1.status" ] || status=$(<"$tmp/$1.status")
    [ ! -e "$tmp/$1.log" ] || cat "$tmp/$1.log"
    sums=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$tmp/$1.log" 2>/dev/null | tail -1)
    if [ -z "$sums" ]; then
        echo "FAIL $1: no result, exit status $status"
        failed=$((failed + 1))
    else
        passed=$((passed + ${sums% *})) failed=$((failed + ${sums#* }))
        # A part may have had nothing to do.
        if [ "$status" != 0 ] && [ "${sums#* }" = 0 ] && { [ "$sums" != "0 0" ] || [ "${PARTS:-1}" = 1 ]; }; then
            echo "FAIL $1: exit status $status after its last line"
            failed=$((failed + 1))
        fi
    fi
}
one() { # PROGRAM PART PARTS
    local began=$SECONDS
    PART=$2/$3 timeout "$limit" "$here/bin/$1" >"$tmp/$1.$2.log" 2>&1
    echo $? >"$tmp/$1.$2.status"
    echo "# $1.$2: $((SECONDS - began)) s" >>"$tmp/$1.$2.log"
}
export -f one
# Together: most of their time is the reference's, on one core each. The nets take longest.
for program in "$here"/bin/test_*; do
    name=$(basename "$program") parts=${PARTS:-1} turn=1
    case $name in *"${1:-}"*) ;; *) continue ;; esac
    case $name in
    test_share* | test_encoders*) parts=1 ;;
    test_nets*) turn=0; [ "$parts" = 1 ] || parts=$((8 * parts)) ;;
    esac
    for ((i = 0; i < parts; i++)); do echo "$turn $name $i $parts"; done
done | sort -s -n -k1,1 | cut -d' ' -f2- >"$tmp/list"
setsid xargs -r -P "${JOBS:-$(nproc)}" -L 1 bash -c 'one "$@"' one <"$tmp/list" &
all=$!
trap 'kill -TERM -- -$all 2>/dev/null' TERM INT
wait "$all" || wait "$all"
trap '' TERM INT
while read -r name part _; do take "$name.$part"; done <"$tmp/list"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
