#!/bin/bash
# Every test for machines with GPUs: the backend's operations and nets, training and whole nets against PyTorch
# (where there is one), the whole pipeline, and every way to cut it over ranks. Prints their lines and, last, "N passed, M failed" over all.
#
# usage: check.sh DATA [pipeline.sh's options]      lies in a bundle's gpu/; DATA: the emoji shards
set -u
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] && data=$(cd "$1" && pwd) || { sed -n 's/^# \(usage.*\)/\1/p' "$0"; exit 2; }
shift
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
passed=0 failed=0
run() { # COMMAND...: adds its sums, or one for the whole when it prints none
    local sums code
    echo "== ${*##*/}"
    "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    sums=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" | tail -1)
    [ -n "$sums" ] || sums=$([ "$code" = 0 ] && echo 1 0 || echo 0 1)
    passed=$((passed + ${sums% *})) failed=$((failed + ${sums#* }))
}
if compgen -G "$here/bin/test_*" >/dev/null; then run "$here/run.sh"; fi
if [ -d "$here/late" ]; then LG_BACKEND_DIR=$here/late run "$here/run.sh"; fi
# What an older GPU gets: its kernels, as the driver compiles them, where the bundle has them so.
older=(env LG_CUDA_CAPABILITY=8.0)
ampere=("${older[@]}" "$here/run.sh")
[ -d "$here/ptx" ] && ampere=(env LG_BACKEND_DIR="$here/ptx" "${ampere[@]}")
if compgen -G "$here/bin/test_*" >/dev/null; then run "${ampere[@]}"; fi
if compgen -G "$here/bin/test_share*" >/dev/null; then run env LG_CUDA_NO_PEER=1 "$here/run.sh" share; fi
if python3 -c 'import torch' 2>/dev/null; then
    for objective in flow eps; do run python3 "$here/parity_train.py" "$here/.." --objective $objective; done
    run python3 "$here/parity_nets.py" "$here/.."
else
    echo "skip parity_train.py, parity_nets.py: no PyTorch"
fi
run "$here/pipeline.sh" "$here/.." "$data" "$@"
run "$here/modes.sh" "$here/.." "$data"
# The same on an older GPU's path, and on one that reaches no other: twice, killed, on two GPUs.
run "${older[@]}" "$here/pipeline.sh" "$here/.." "$data" --only acd "$@"
run "${older[@]}" LG_CUDA_NO_PEER=1 "$here/pipeline.sh" "$here/.." "$data" --only de "$@"
echo "$passed passed, $failed failed"
[ $failed = 0 ]
