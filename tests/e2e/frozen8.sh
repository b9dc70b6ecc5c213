#!/bin/bash
# An adapter on a model, and a model of which parts are frozen, whose frozen weights are stored in 8 bits: whoever dies, and however
# ranks are cut, the same bytes; a loss as with the whole weights; what is written is of the whole weights.
. "$(dirname "$0")/lib.sh"

reference 20
base=$(checkpoint_of "$reference" 20)
lora=(--set adapter.kind=lora --set adapter.rank=4 --set "trainer.init_from=$base" --set 'adapter.targets=["linear"]')
fp8=("${lora[@]}" --set model.frozen=fp8)

# settle_own NAME RUN [...]: settles a run, which is then compared with an undisturbed one of these keys.
settle_own() {
    settle "$1" "$2"
    [ -n "$settled" ] || return 0 # said already
    tiny "$2.own" --set trainer.max_steps="$settled" "${@:3}"
    same_as "$1" "$2" "$2.own" "$settled"
}

one=$T/one
start_by_start "$one" 40 "${fp8[@]}"
expect "an adapter is trained on weights of 8 bits, and gone on with" 0 $?
same() { # NAME [...]: another way to the same bytes.
    local run=$T/${1// /_}
    tiny "$run" --set trainer.max_steps=40 "${fp8[@]}" "${@:2}"
    expect "$1" 0 $?
    check "$1: byte-identical" same_files "$one" "$run" 40
}
if in_all; then
    same "gathered weights" --set parallel.zero=3
    same "recomputed" --set memory.recompute=block
    same "optimizer in host memory" --set memory.offload_optimizer=true --set parallel.zero=2
else
    same "gathered, recomputed, optimizer in host memory" --set parallel.zero=3 --set memory.recompute=block --set memory.offload_optimizer=true
fi

killed=$T/killed
train "$killed" "${fp8[@]}" --set parallel.zero=3
for i in 1 2 3; do kill_role "$killed" trainer $((i % 2)); done # before, or while, the weights are brought there
wait_step "$killed" 5
for role in "trainer 1" "ckpt 0" "trainer 0" "ema 0"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
kill_role "$killed" trainer 0 && kill_role "$killed" trainer 1 && kill_role "$killed" keeper 0
wait_step "$killed" $(($(step_of "$killed") + 3))
check "ranks were replaced" test "$(restarts_of "$killed" trainer)" -ge 7
settle_own "weights of 8 bits, killed" "$killed" "${fp8[@]}"

# ---- beside other storage ----
other=$T/int8
tiny "$other" --set trainer.max_steps=40 "${lora[@]}" --set model.frozen=int8
expect "an adapter is trained on int8" 0 $?
check "which is another run" test "$(cat "$one/ledger" "$other/ledger" | wc -c)" -gt 0 -a \
    "$(head -n 1 "$one/metrics.jsonl" | jq .loss)" != "$(head -n 1 "$other/metrics.jsonl" | jq .loss)"
whole=$T/whole
tiny "$whole" --set trainer.max_steps=40 "${lora[@]}"
expect "and one on all bits" 0 $?
# A weight of fp8 is off by 2^-4 of itself at most, one of int8 by less; so is, about, a prediction p. Of the loss,
# (p - target)^2 of about (p, target) of one size, that is at most 2 2^-4.
near() {
    jq -sen --slurpfile a "$1/metrics.jsonl" --slurpfile b "$2/metrics.jsonl" \
        'def mean(x): (x | map(.loss) | add) / (x | length); mean($a) / mean($b) | . != 1 and . > 0.875 and . < 1.125'
}
check "fp8: a loss near that of all bits" near "$one" "$whole"
check "int8: a loss near that of all bits" near "$other" "$whole"
bytes() { timeout 60 "$LGSUP" check "$1/config.toml" | awk '/^frozen\/0\/weights/ { print $3 * 1024 }' | cut -d. -f1; }
check "check prints fewer bytes" test "$(bytes "$one")" -lt "$(($(bytes "$whole") * 3 / 4))"
tiny "$one" --set trainer.max_steps=60 "${lora[@]}" --set model.frozen=int8
check "another storage is another run" test $? -ne 0
check "and the key is named" grep -q "model.frozen" "$one.out"
tiny "$T/none" --set model.frozen=fp8
check "where nothing is frozen it is refused" test $? -ne 0
check "and the key is named there" grep -q 'model.frozen = "fp8" is for weights that are not trained' "$T/none.out"

# ---- what is made of it ----
merged=$T/merged
check "it can be merged" timeout 120 "$LGSUP" export "$one" --merge -o "$merged"
check "and drawn with" timeout 120 "$e2e_build/bin/lg-sample" a --steps 4 --seed 3 --guidance 1 --from "$merged" \
    --config "$one/config.toml" -o "$T/a.png"

# ---- a model of which parts are frozen ----
groups=(--set 'trainer.groups=["transformer_blocks.0.* frozen", "*.attn2.*.weight frozen"]' --set model.frozen=int8)
half=$T/half
start_by_start "$half" 40 "${groups[@]}"
expect "parts are frozen" 0 $?
gathered=$T/gathered
tiny "$gathered" --set trainer.max_steps=40 "${groups[@]}" --set parallel.zero=3
expect "and gathered" 0 $?
check "gathered: byte-identical" same_files "$half" "$gathered" 40
# What is frozen is written with all its bits, whatever it is stored in.
first=$T/first
tiny "$first" --set trainer.max_steps=40 "${groups[@]:0:2}"
check "what is frozen is written with all its bits" "$ST_COMPARE" \
    "$(checkpoint_of "$half" 40)/model/diffusion_pytorch_model.safetensors" \
    "$(checkpoint_of "$first" 40)/model/diffusion_pytorch_model.safetensors" 0 \
    transformer_blocks.0.attn1.to_q.weight transformer_blocks.1.attn2.to_k.weight
# Each part stored otherwise: one in fp8, one as it is, of a model that is int8 else.
own=(--set 'trainer.groups=["transformer_blocks.0.ff.* frozen storage=fp8", "transformer_blocks.0.* frozen", "*.attn2.*.weight frozen storage=auto"]' --set model.frozen=int8)
start_by_start "$T/own" 40 "${own[@]}"
expect "parts are stored each in its way" 0 $?
tiny "$T/own2" --set trainer.max_steps=40 "${own[@]}" --set parallel.zero=3
check "gathered: byte-identical" same_files "$T/own" "$T/own2" 40
check "which is none of the others" test "$(jq -c .loss "$T/own/metrics.jsonl" | head -n 3)" != "$(jq -c .loss "$half/metrics.jsonl" | head -n 3)"
check "and takes bytes between" test "$(bytes "$half")" -lt "$(bytes "$T/own")" -a "$(bytes "$T/own")" -lt "$(bytes "$first")"
killed=$T/own.killed
train "$killed" "${own[@]}"
for i in 1 2 3; do kill_role "$killed" trainer $((i % 2)); done
wait_step "$killed" 5
for role in "trainer 1" "trainer 0" "ckpt 0"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
settle_own "parts are stored each in its way, killed" "$killed" "${own[@]}"
tiny "$T/none3" --set 'trainer.groups=["*.bias frozen storage=fp8"]'
check "a storage of nothing is refused" test $? -ne 0
check "and the group is named" grep -q 'trainer.groups.* "\*.bias" is for the matrices' "$T/none3.out"
