#!/bin/bash
# What is cut over the ranks (ZeRO) decides no bit where a rank has one micro-batch, whoever is killed; with several
# it decides their order alone. A checkpoint is gone on from under another mode and number of ranks.
. "$(dirname "$0")/lib.sh"

# disturbed NAME RUN [...]: ranks die one by one and together, and so does the keeper.
disturbed() {
    local name=$1 run=$2
    train "$run" "${@:3}"
    wait_step "$run" 5
    kill_role "$run" trainer 1
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" trainer 0 && kill_role "$run" trainer 1
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" keeper 0 && kill_role "$run" trainer 0
    wait_step "$run" $(($(step_of "$run") + 3))
    check "$name: ranks were replaced" test "$(restarts_of "$run" trainer)" -ge 4
}

for zero in 0 2 3; do
    disturbed "zero = $zero" "$T/zero$zero" --set parallel.zero=$zero
    settle_same "zero = $zero" "$T/zero$zero"
done

# Weights that stay, blocks that are made again: the same bits.
run=$T/stays
train "$run" --set parallel.zero=3 --set parallel.reshard=false --set memory.recompute=block
wait_step "$run" 5
kill_role "$run" trainer 0
settle_same "reshard = false" "$run"

# Four ranks: cut over two, and held twice.
many=(--set trainer.ranks=4 --set trainer.micro_batch_size=2)
tiny "$T/four" "${many[@]}" --set trainer.max_steps=40
expect "four ranks" 0 $?
tiny "$T/groups" "${many[@]}" --set trainer.max_steps=40 --set parallel.zero=3 --set parallel.group=2
expect "two groups of two" 0 $?
check "two groups of two: byte-identical to one of four" same_files "$T/four" "$T/groups" 40

# Several micro-batches: 2 and 3 add up the same, and differ from 0 and 1 by rounding.
several=(--set trainer.micro_batch_size=1 --set trainer.max_steps=40)
for zero in 1 2 3; do
    tiny "$T/several$zero" "${several[@]}" --set parallel.zero=$zero
    expect "several micro-batches, zero = $zero" 0 $?
done
check "several micro-batches: 2 and 3 are byte-identical" same_files "$T/several2" "$T/several3" 40
close() { # RUN RUN: losses and norms of the same steps, to 1e-5
    paste <(jq -r '"\(.step) \(.loss) \(.grad_norm)"' "$1/metrics.jsonl") \
        <(jq -r '"\(.step) \(.loss) \(.grad_norm)"' "$2/metrics.jsonl") | awk '
        function far(a, b) { return (a - b > 0 ? a - b : b - a) > 1e-5 * a }
        NF != 6 || $1 != $4 || far($2, $5) || far($3, $6) { print; bad = 1 }
        END { exit bad || NR == 0 }'
}
check "several micro-batches: 1 and 2 are close" close "$T/several1" "$T/several2"
check "several micro-batches: but not the same" sh -c "! cmp -s '$(checkpoint_of "$T/several1" 40)/optimizer.safetensors' '$(checkpoint_of "$T/several2" 40)/optimizer.safetensors'"
run=$T/several
train "$run" --set trainer.micro_batch_size=1 --set parallel.zero=3
for role in "trainer 0" "trainer 1" "ckpt 0" "trainer 0" "trainer 1"; do
    wait_step "$run" $(($(step_of "$run") + 4))
    kill_role "$run" $role
done
settle "several micro-batches" "$run"
if [ -n "$settled" ]; then
    tiny "$T/whole" --set trainer.micro_batch_size=1 --set parallel.zero=2 --set trainer.max_steps="$settled"
    same_as "several micro-batches" "$run" "$T/whole" "$settled"
fi

# On from a checkpoint, otherwise.
from=$(checkpoint_of "$T/four" 20)
tiny "$T/other" --set trainer.max_steps=40 --set trainer.resume_from="$from" --set parallel.zero=3
expect "other ranks are refused" 10 $?
check "and what to do is said" grep -q 'trainer.ranks was 4 when the run began and is 2 now.*name it in trainer.resume_changes' "$T/other.out"
named=(--set trainer.resume_from="$from" --set 'trainer.resume_changes=["trainer.ranks","trainer.micro_batch_size","parallel.zero"]')
tiny "$T/four" --set trainer.max_steps=60 "${named[@]}" --set trainer.auto_resume=false --set parallel.zero=3
expect "in the old folder they are refused" 10 $?
rm -rf "$T/other"
tiny "$T/other" --set trainer.max_steps=40 "${named[@]}" --set parallel.zero=3
expect "named, they are not" 0 $?
mkdir "$T/tail" && tail -n 20 "$T/four/metrics.jsonl" >"$T/tail/metrics.jsonl"
check "with the same losses but for rounding" close "$T/tail" "$T/other"
tiny "$T/other" --set trainer.max_steps=60 "${named[@]}" --set parallel.zero=3
expect "and it goes on as any other" 0 $?
check "verify" timeout 120 "$LGSUP" verify "$T/other"
tiny "$T/none" --set 'trainer.resume_changes=["trainer.lr"]'
check "other keys cannot be named" grep -q 'trainer.resume_changes: trainer.lr is not one of' "$T/none.out"
