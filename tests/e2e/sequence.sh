#!/bin/bash
# Ranks that compute a micro-batch together, each on its part of the sequence: the same run as one rank's but for
# rounding, and byte-identical to itself whoever is killed.
. "$(dirname "$0")/lib.sh"

# losses and norms of the same steps, to 1e-5
close() { # RUN RUN
    paste <(jq -r '"\(.step) \(.loss) \(.grad_norm)"' "$1/metrics.jsonl") \
        <(jq -r '"\(.step) \(.loss) \(.grad_norm)"' "$2/metrics.jsonl") | awk '
        function far(a, b) { return (a - b > 0 ? a - b : b - a) > 1e-5 * a }
        NF != 6 || $1 != $4 || far($2, $5) || far($3, $6) { print; bad = 1 }
        END { exit bad || NR == 0 }'
}
short=(--set trainer.max_steps=20)
tiny "$T/one" "${short[@]}" --set trainer.ranks=1
expect "one rank" 0 $?
for kind in ulysses fastseq; do
    for ranks in 2 4; do
        run=$T/$kind$ranks
        tiny "$run" "${short[@]}" --set trainer.ranks=$ranks --set parallel.sp=$ranks --set parallel.sp_kind=$kind
        expect "$kind, $ranks ranks" 0 $?
        check "$kind, $ranks ranks: one rank's losses" close "$T/one" "$run"
    done
done

# Whatever else is cut, recomputed or offloaded: the same bytes.
many=(--set trainer.ranks=4 --set parallel.sp=2)
tiny "$T/many" "${short[@]}" "${many[@]}"
expect "two groups of two" 0 $?
check "two groups of two: one rank's losses" close "$T/one" "$T/many"
modes=(parallel.zero=2 "parallel.zero=3 --set memory.recompute=block --set memory.offload_activations=true"
    "parallel.zero=3 --set memory.recompute=uniform:2")
! in_all || modes=(parallel.zero=0 parallel.zero=2 parallel.zero=3 memory.recompute=block memory.recompute=uniform:1 memory.recompute=uniform:2
    memory.offload_activations=true)
for more in "${modes[@]}"; do
    tiny "$T/$more" "${short[@]}" "${many[@]}" --set $more
    expect "with $more" 0 $?
    check "with $more: byte-identical" same_files "$T/many" "$T/$more" 20
done

# Each rank's own tokens in chunks.
chunks=("${many[@]}" --set memory.mlp_chunks=3)
tiny "$T/chunks" "${short[@]}" "${chunks[@]}"
check "feed-forwards in chunks: one rank's losses" close "$T/one" "$T/chunks"
tiny "$T/chunks2" "${short[@]}" "${chunks[@]}" --set memory.recompute=uniform:2 --set parallel.zero=3
check "feed-forwards in chunks, recomputed: byte-identical" same_files "$T/chunks" "$T/chunks2" 20

# Nothing else than ranks of a group dies here: the others are killed elsewhere.
disturbed() { # NAME RUN [...]
    local name=$1 run=$2
    train "$run" "${@:3}"
    wait_step "$run" 5
    kill_role "$run" trainer 1
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" trainer 0
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" trainer 0 && kill_role "$run" trainer 1
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" lgsup 0 && kill_role "$run" trainer 1
    train "$run" "${@:3}"
    settle "$name" "$run"
    [ -n "$settled" ] || return 0
    tiny "$run.whole" "${@:3}" --set checkpoint.keep=1000000 --set trainer.max_steps="$settled"
    same_as "$name" "$run" "$run.whole" "$settled"
}
disturbed "killed" "$T/killed" --set parallel.sp=2
disturbed "killed, several micro-batches, zero = 3" "$T/killed3" --set parallel.sp=2 --set parallel.sp_kind=fastseq \
    --set parallel.zero=3 --set trainer.micro_batch_size=2
disturbed "killed, several micro-batches" "$T/killed1" --set parallel.sp=2 --set trainer.micro_batch_size=2

# What cannot be cut is said.
refused() { # NAME WORDS [...]
    tiny "$T/refused" "${@:3}"
    expect "$1: refused" 3 $?
    check "$1: said" grep -q "$2" "$T/refused.out"
}
refused "three ranks in pairs" 'parallel.sp = 2 does not divide trainer.ranks = 3' --set trainer.ranks=3 --set parallel.sp=2
refused "more ranks than heads" 'parallel.sp = 8 is more than model.heads = 4' --set trainer.ranks=8 --set parallel.sp=8
