#!/bin/bash
# A low-rank adapter on a model that was trained before, and a model of which parts are frozen: whoever dies, however ranks
# are cut and from whichever checkpoint it goes on, the same bytes; what is written can be drawn with, and another base model
# is refused.
. "$(dirname "$0")/lib.sh"

reference 20
base=$(checkpoint_of "$reference" 20)
lora=(--set adapter.kind=lora --set adapter.rank=4 --set "trainer.init_from=$base" --set 'adapter.targets=["linear"]')

# settle_own NAME RUN [...]: settles a run, which is then compared with an undisturbed one of these keys.
settle_own() {
    settle "$1" "$2"
    [ -n "$settled" ] || return 0 # said already
    tiny "$2.own" --set trainer.max_steps="$settled" "${@:3}"
    same_as "$1" "$2" "$2.own" "$settled"
}

one=$T/one
start_by_start "$one" 80 "${lora[@]}"
expect "an adapter is trained, and gone on with" 0 $?
check "its newest checkpoint has no whole model" test ! -e "$(checkpoint_of "$one" 80)/model"

# same NAME [...]: another way to the same bytes.
same() {
    local run=$T/${1// /_}
    tiny "$run" --set trainer.max_steps=80 "${lora[@]}" "${@:2}"
    expect "$1" 0 $?
    check "$1: byte-identical" same_files "$one" "$run" 80
}
if in_all; then
    same "whole state" --set parallel.zero=0
    same "gathered weights" --set parallel.zero=3
    same "recomputed" --set memory.recompute=block
    same "optimizer in host memory" --set memory.offload_optimizer=true --set parallel.zero=2
else
    same "gathered, recomputed, optimizer in host memory" --set parallel.zero=3 --set memory.recompute=block --set memory.offload_optimizer=true
fi

killed=$T/killed
train "$killed" "${lora[@]}" --set parallel.zero=3
wait_step "$killed" 5
for role in "trainer 1" "ckpt 0" "trainer 0" "ema 0"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
kill_role "$killed" trainer 0 && kill_role "$killed" trainer 1 && kill_role "$killed" keeper 0
wait_step "$killed" $(($(step_of "$killed") + 3))
check "ranks were replaced" test "$(restarts_of "$killed" trainer)" -ge 4
settle_own "an adapter, killed" "$killed" "${lora[@]}"

# ---- what is made of it ----
draw() { timeout 120 "$e2e_build/bin/lg-sample" a --steps 4 --seed 3 --guidance 1 "$@" >"$T/said" 2>&1; }
check "the newest checkpoint can be drawn with" draw --from "$one" -o "$T/a.png"
check "and its last weights" draw --from "$one" --weights model -o "$T/b.png"
check "and what it adapts" draw --from "$base" --config "$one/config.toml" -o "$T/c.png"
check "which are three pictures" test "$(cat "$T"/[abc].png | wc -c)" -gt 0 -a \
    "$(md5sum "$T"/[abc].png | cut -d' ' -f1 | sort -u | wc -l)" = 3

merged=$T/merged
check "it can be merged" timeout 120 "$LGSUP" export "$one" --merge -o "$merged"
check "and drawn with" draw --from "$merged" --config "$one/config.toml" -o "$T/d.png"
check "the same picture" cmp "$T/a.png" "$T/d.png"

# ---- kohya's layout ----
adapter=$(checkpoint_of "$one" 80)/ema
check "it can be written in kohya's layout" timeout 60 "$LGSUP" export "$one" --format kohya -o "$T/kohya.safetensors"
check "with those names" grep -aq '"lora_unet_transformer_blocks_0_attn1_to_q.lora_down.weight"' "$T/kohya.safetensors"
timeout 60 "$LGSUP" export "$one" --format kohya -o "$T/kohya.safetensors" >"$T/said" 2>&1
check "a file that is there stays" grep -q "kohya.safetensors exists" "$T/said"
timeout 60 "$LGSUP" export "$one" --format kohya --merge -o "$T/not" >"$T/said" 2>&1
check "not merged" grep -q "remove --merge" "$T/said"
timeout 60 "$LGSUP" export "$one" --format a1111 -o "$T/not" >"$T/said" 2>&1
check "in no other layout" grep -q -- "--format a1111: kohya exists" "$T/said"
timeout 60 "$LGSUP" export "$reference" --format kohya -o "$T/not" >"$T/said" 2>&1
check "nor of a whole model" grep -q "is a whole net, no adapter" "$T/said"
mkdir "$T/of_kohya"
cp "$adapter/adapter_config.json" "$T/of_kohya/"
cp "$T/kohya.safetensors" "$T/of_kohya/pytorch_lora_weights.safetensors"
check "and drawn with" draw --from "$T/of_kohya" --config "$one/config.toml" -o "$T/e.png"
check "the same picture" cmp "$T/a.png" "$T/e.png"

# ---- begun with a file, in either layout ----
low() { echo "$(checkpoint_of "$1" "$2")/$3/pytorch_lora_weights.safetensors"; }
for layout in "$adapter/pytorch_lora_weights.safetensors" "$T/kohya.safetensors"; do
    name=$(basename "$layout")
    begun=$T/begun.${name%%.*}
    tiny "$begun" --set trainer.max_steps=1 --set checkpoint.every=1 --set trainer.lr=0 "${lora[@]}" --set adapter.from="$layout"
    expect "begun with $name" 0 $?
    check "begun with $name: its weights" cmp "$(low "$one" 80 ema)" "$(low "$begun" 1 adapter)"
done
begun=$T/begun.killed
train "$begun" "${lora[@]}" --set adapter.from="$T/kohya.safetensors"
for i in 1 2 3; do kill_role "$begun" trainer $((i % 2)); done
wait_step "$begun" 8
kill_role "$begun" trainer 1
settle_own "begun with a file, killed" "$begun" "${lora[@]}" --set adapter.from="$T/kohya.safetensors"
timeout 60 "$LGSUP" check "$TINY" --set job.dir="$T/none3" "${lora[@]}" --set adapter.from="$T/kohya.safetensors" \
    --set 'adapter.targets=["*.to_v"]' >"$T/said" 2>&1
check "one of other linears is refused by check" grep -q "kohya.safetensors.*adapts other linears" "$T/said"

timeout 60 "$LGSUP" export "$one" -o "$T/not" >"$T/said" 2>&1
check "without --merge it says what it is" grep -q -- "--merge exports the model with it" "$T/said"
timeout 60 "$LGSUP" export "$reference" --merge -o "$T/not" >"$T/said" 2>&1
check "a whole model cannot be merged" grep -q "is a whole net, no adapter" "$T/said"
check "nothing is left of that" test ! -e "$T/not"

# ---- what is refused ----
other=$T/other_base
cp -r "$base" "$other"
printf '\1' | dd of="$other/ema/diffusion_pytorch_model.safetensors" bs=1 conv=notrunc \
    seek=$(($(stat -c %s "$other/ema/diffusion_pytorch_model.safetensors") - 3)) 2>/dev/null
tiny "$one" --set trainer.max_steps=200 "${lora[@]}" --set "trainer.init_from=$other"
check "another base model is refused" test $? -ne 0
check "and it is said" grep -q "the model that an adapter adapts, is not what it was" "$one.out"
tiny "$T/none" --set adapter.kind=lora
check "an adapter without a model is refused" test $? -ne 0
check "and the key is named" grep -q "trainer.init_from" "$T/none.out"
tiny "$T/none2" "${lora[@]}" --set 'adapter.targets=["*.to_x"]'
check "a target that fits nothing is refused" test $? -ne 0
check "and it is named" grep -rq 'adapter.targets: "\*.to_x" fits none' "$T/none2.out" "$T/none2/logs"

# ---- a model of which parts are frozen ----
groups=(--set 'trainer.groups=["transformer_blocks.0.* frozen", "*.attn2.*.weight frozen", "*.bias lr=0.5 decay=0"]')
half=$T/half
start_by_start "$half" 40 "${groups[@]}"
expect "parts are frozen" 0 $?
# What is not trained is read from a checkpoint at each one, also when that of the start is gone.
tiny "$half" --set trainer.max_steps=100 --set checkpoint.keep=1 "${groups[@]}"
expect "and gone on with" 0 $?
check "the checkpoint that it went on from is gone" test ! -e "$(checkpoint_of "$half" 40)"
whole=$T/whole
tiny "$whole" --set trainer.max_steps=100 --set checkpoint.keep=1 "${groups[@]}" --set parallel.zero=3
expect "and gathered" 0 $?
check "gathered: byte-identical" same_files "$half" "$whole" 100
disturbed=$T/disturbed
train "$disturbed" "${groups[@]}"
wait_step "$disturbed" 5
for role in "trainer 0" "ckpt 0" "trainer 1"; do
    kill_role "$disturbed" $role
    wait_step "$disturbed" $(($(step_of "$disturbed") + 3))
done
settle_own "parts are frozen, killed" "$disturbed" "${groups[@]}"
