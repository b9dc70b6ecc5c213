#!/bin/bash
# Moments of 8 bits (trainer.optimizer = "adamw8bit"): a run has its bytes however ranks are cut, wherever its state lies and
# whoever is killed; its losses are close to those with moments of fp32; a checkpoint of either is gone on from with the
# other where that is asked for by name.
. "$(dirname "$0")/lib.sh"

key=(--set 'trainer.optimizer="adamw8bit"')
reference=$T/reference.8bit
tiny "$reference" --set trainer.max_steps=40 "${key[@]}"
expect "undisturbed" 0 $?

# same NAME [...]: as the reference.
same() {
    local name=$1 run=$T/same.${1// /_}
    tiny "$run" --set trainer.max_steps=40 "${key[@]}" "${@:2}"
    check "$name: byte-identical" same_files "$reference" "$run" 40
}
if in_all; then
    same "gathered weights" --set parallel.zero=3
    same "scattered gradients" --set parallel.zero=2
    same "a state in host memory" --set memory.offload_optimizer=true
fi
same "whole states" --set parallel.zero=0
same "gathered weights, a state in host memory" --set memory.offload_optimizer=true --set parallel.zero=3

moments_of() { # RUN STEP PATTERN: the types of its moments
    local file name type
    file=$(checkpoint_of "$1" "$2")/optimizer.safetensors
    tail -c +9 "$file" | head -c "$(od -An -t u8 -N 8 "$file" | tr -d ' ')" |
        jq -r 'to_entries[] | select(.key | startswith("exp_avg.")) | "\(.key[8:]) \(.value.dtype)"' |
        while read -r name type; do [[ $name != $3 ]] || echo "$type"; done | sort -u | xargs
}

# disturbed NAME [...]: who has the state or reads it dies, one by one and together, the keeper too.
disturbed() {
    local name=$1 run=$T/disturbed.${1// /_} role
    train "$run" "${key[@]}" "${@:2}"
    wait_step "$run" 5
    for role in "trainer 1" "ema 0" "trainer 0" "ckpt 0"; do
        kill_role "$run" $role
        wait_step "$run" $(($(step_of "$run") + 3))
    done
    kill_role "$run" trainer 0 && kill_role "$run" trainer 1 && kill_role "$run" keeper 0
    wait_step "$run" $(($(step_of "$run") + 3))
    check "$name: ranks were replaced" test "$(restarts_of "$run" trainer)" -ge 4
    settle "$name" "$run"
    [ -n "$settled" ] || return 0 # said already
    tiny "$run.until" --set trainer.max_steps="$settled" "${key[@]}"
    same_as "$name" "$run" "$run.until" "$settled"
}
# In `make check` each of them once with a part of what else there is; all apart in `make check-all`.
[ -z "${CHECK_ALL:-}" ] || disturbed "kills"
disturbed "kills, gathered weights" --set parallel.zero=3 --set memory.offload_optimizer=true

# On from a checkpoint, twice.
run=$T/turns
tiny "$run" --set trainer.max_steps=20 "${key[@]}"
tiny "$run" --set trainer.max_steps=30 "${key[@]}"
tiny "$run" --set trainer.max_steps=40 "${key[@]}"
check "that it went on is said" grep -q 'resuming tiny at step 30 from' "$run.out"
check "resumed twice: byte-identical" same_files "$reference" "$run" 40

# Its losses beside those of the other.
tiny "$T/full" --set trainer.max_steps=40
loss() { jq -s '[.[-10:][].loss] | add / 10' "$1/metrics.jsonl"; }
check "losses: $(loss "$reference") and $(loss "$T/full"), within 1 %" \
    jq -ne --argjson a "$(loss "$reference")" --argjson b "$(loss "$T/full")" '($a - $b) / $b | fabs < 0.01'
check "but others" test "$(loss "$reference")" != "$(loss "$T/full")"

# From one to the other: refused, unless it is named.
for to in adamw adamw8bit; do
    from=$([ $to = adamw ] && echo "$reference" || echo "$T/full")
    checkpoint=$(checkpoint_of "$from" 40)
    more=(--set trainer.max_steps=45 --set "trainer.optimizer=\"$to\"")
    cp -r "$from" "$T/refused.$to"
    tiny "$T/refused.$to" "${more[@]}"
    expect "to $to: refused" 10 $?
    check "to $to: what to do is said" grep -q 'trainer.optimizer was .*name it in trainer.resume_changes' "$T/refused.$to.out"
    run=$T/to.$to
    tiny "$run" "${more[@]}" --set trainer.resume_from="$checkpoint" --set 'trainer.resume_changes=["trainer.optimizer"]'
    expect "to $to, named: it goes on" 0 $?
    expect "to $to: its moments" "$([ $to = adamw ] && echo F32 || echo "F32 U8")" "$(moments_of "$run" 45 '*')"
done

# What it saves is planned, of a net that is large enough for chunks of more than a few small tensors: 2.2 of 8.5 bytes a parameter.
moments() {
    timeout 60 "$LGSUP" check "$TINY" --set job.dir="$T/none" --set model.hidden=384 --set model.depth=4 "$@" |
        awk '$1 == "trainer/0/moments" && $4 == "MiB" {print $3; exit}'
}
check "moments: $(moments "${key[@]}") MiB, of $(moments)" \
    jq -ne --argjson a "$(moments "${key[@]}")" --argjson b "$(moments)" '$a < 0.35 * $b'

# ---- groups with an optimizer of their own ----
all=$T/all
tiny "$all" --set trainer.max_steps=40 --set 'trainer.groups=["pos_embed.* optimizer=adamw8bit lr=1", "*.ff.* lr=1"]' "${key[@]}"
refused=$?
check "codes for a group without a large tensor: refused" test "$refused" -ne 0
check "and it is named" grep -q '"pos_embed.\*" has optimizer=adamw8bit, which is for tensors of at least' "$all.out" "$all"/logs/* 2>/dev/null
# Parts in 8 bits of a run in fp32, and the other way round.
all=$T/all.8bit
tiny "$all" --set trainer.max_steps=40 --set 'trainer.groups=["*.ff.* optimizer=adamw8bit", "*.attn?.* optimizer=adamw8bit", "* optimizer=adamw8bit"]'
expect "all in 8 bits, by groups" 0 $?
check "all in 8 bits, by groups: byte-identical" same_files "$reference" "$all" 40
some=(--set 'trainer.groups=["*.ff.* optimizer=adamw8bit", "*.bias lr=0.5"]')
rest=(--set 'trainer.groups=["*.ff.* lr=1", "* optimizer=adamw"]' "${key[@]}")
mixed=$T/mixed
tiny "$mixed" --set trainer.max_steps=40 "${some[@]}"
expect "8 bits of a group" 0 $?
expect "its matrices have codes" "U8" "$(moments_of "$mixed" 40 '*.ff.*.weight')"
expect "others none" "F32" "$(moments_of "$mixed" 40 '*.attn?.*.weight')"
run=$T/mixed.gathered
tiny "$run" --set trainer.max_steps=40 "${some[@]}" --set parallel.zero=3
check "8 bits of a group, gathered: byte-identical" same_files "$mixed" "$run" 40
key=("${some[@]}")
disturbed "8 bits of a group, kills" --set parallel.zero=2
run=$T/rest
tiny "$run" --set trainer.max_steps=40 "${rest[@]}"
expect "fp32 of the rest" 0 $?
expect "codes of the group" "U8" "$(moments_of "$run" 40 '*.ff.*.weight')"
expect "fp32 of all others" "F32" "$(moments_of "$run" 40 '*.attn?.*')"

# A changed group is a change that is named.
cp -r "$mixed" "$T/regrouped"
tiny "$T/regrouped" --set trainer.max_steps=45 --set 'trainer.groups=["*.attn1.* optimizer=adamw8bit"]'
expect "other groups: refused" 10 $?
check "and what to do is said" grep -q 'trainer.groups was .*name it in trainer.resume_changes' "$T/regrouped.out"
run=$T/regrouped.on
on=(--set trainer.max_steps=45 --set trainer.resume_from="$(checkpoint_of "$mixed" 40)" --set 'trainer.resume_changes=["trainer.groups"]')
tiny "$run" "${on[@]}" --set 'trainer.groups=["*.attn1.* optimizer=adamw8bit", "transformer_blocks.0.ff.* frozen"]'
expect "named: it goes on" 0 $?
expect "with codes of other moments" "F32 U8" "$(moments_of "$run" 45 '*.attn1.*')"
expect "and none of those before" "F32" "$(moments_of "$run" 45 '*.ff.*')"
again=$T/regrouped.again
tiny "$again" --set trainer.max_steps=50 --set trainer.resume_from="$(checkpoint_of "$run" 45)" --set 'trainer.resume_changes=["trainer.groups"]'
check "what was frozen has no moments to go on with" test $? -ne 0
check "and that is said" grep -rq 'if trainer.groups froze transformer_blocks.0.ff.* when the checkpoint was made' "$again.out" "$again/logs"

# ---- with an adapter, and with a split sequence ----
reference 20
base=$(checkpoint_of "$reference" 20)
eight=(--set 'trainer.optimizer="adamw8bit"')
lora=("${eight[@]}" --set adapter.kind=lora --set adapter.rank=32 --set "trainer.init_from=$base" --set 'adapter.targets=["linear"]')
reference=$T/lora
start_by_start "$reference" 40 "${lora[@]}"
expect "an adapter with moments of 8 bits, gone on with" 0 $?
expect "of what is large enough" "F32 U8" "$(moments_of "$reference" 40 '*.lora_B.weight')"
key=("${lora[@]}")
same "an adapter, gathered" --set parallel.zero=3
[ -z "${CHECK_ALL:-}" ] || disturbed "an adapter, kills" --set parallel.zero=2
reference=$T/split
key=("${eight[@]}" --set parallel.sp=2)
tiny "$reference" --set trainer.max_steps=40 "${key[@]}"
expect "a split sequence" 0 $?
same "a split sequence, whole states" --set parallel.zero=0
[ -z "${CHECK_ALL:-}" ] || disturbed "a split sequence, kills"
key=("${lora[@]}" --set parallel.sp=2)
disturbed "a split sequence, an adapter, kills"
