#!/bin/bash
# What ranks and encoders hand each other through host memory (parallel.exchange = "host", which "auto" chooses where GPUs
# do not reach each other's memory): the same run, byte for byte, whoever is killed.
. "$(dirname "$0")/lib.sh"
key=(--set parallel.exchange=host)

# same NAME STEPS [...]: with the key and without.
same() {
    local name=$1 steps=$2 with=$T/with.${1// /_} without=$T/without.${1// /_}
    tiny "$without" --set trainer.max_steps="$steps" "${@:3}"
    expect "$name: without" 0 $?
    tiny "$with" --set trainer.max_steps="$steps" "${key[@]}" "${@:3}"
    expect "$name: with" 0 $?
    check "$name: byte-identical" same_files "$without" "$with" "$steps"
}
for zero in 0 1 2 3; do
    same "zero = $zero" 20 --set parallel.zero=$zero
    same "zero = $zero, several micro-batches" 20 --set parallel.zero=$zero --set trainer.micro_batch_size=1
done
many=(--set trainer.ranks=4 --set trainer.micro_batch_size=2)
same "two groups of two" 20 "${many[@]}" --set parallel.group=2
same "one rank" 20 --set trainer.ranks=1
for kind in ulysses fastseq; do
    same "a split sequence, $kind" 20 "${many[@]}" --set parallel.sp=2 --set parallel.sp_kind=$kind
done
same "a state in host memory" 20 --set memory.offload_optimizer=true
same "weights that stay" 20 --set parallel.zero=3 --set parallel.reshard=false

# disturbed NAME RUN [...]: ranks die one by one and together, and so does the keeper.
disturbed() {
    local name=$1 run=$2
    train "$run" "${key[@]}" "${@:3}"
    wait_step "$run" 5
    kill_role "$run" trainer 1
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" trainer 0 && kill_role "$run" vae 0
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" keeper 0 && kill_role "$run" trainer 0
    wait_step "$run" $(($(step_of "$run") + 3))
    check "$name: ranks were replaced" test "$(restarts_of "$run" trainer)" -ge 3
}
for zero in 1 2; do
    disturbed "killed, zero = $zero" "$T/killed$zero" --set parallel.zero=$zero
    settle_same "killed, zero = $zero" "$T/killed$zero"
done
run=$T/killeds
disturbed "a split sequence, killed" "$run" --set parallel.sp=2 --set trainer.micro_batch_size=2
settle "a split sequence, killed" "$run"
if [ -n "$settled" ]; then
    tiny "$T/whole" --set parallel.sp=2 --set trainer.micro_batch_size=2 --set trainer.max_steps="$settled"
    same_as "a split sequence, killed" "$run" "$T/whole" "$settled"
fi
