#!/bin/bash
# The U-Nets of SD 2 and SDXL as published ones lie in their folders, tiny: what the files say becomes the config, all weights
# and adapters are trained, whoever dies and however ranks are cut to the same bytes, and drawn; shapes alone begin anew.
. "$(dirname "$0")/lib.sh"
RANDOM_MODEL=$e2e_build/bin/lg-random-model
for kind in sd2 sdxl; do
    check "a pipeline's folder: $kind" "$RANDOM_MODEL" pipeline --preset tiny-$kind --dtype f32 --seed 3 "$T/$kind"
done
config() { # KIND
    cat <<END
pipeline = "$T/$1"
[job]
name = "tiny"
seed = 7
[data]
path = "$MICRO/data/micro-00000.tar"
size = 24
crop = "random"
[loader]
chunk = 4
[text]
length = 16
chunk = 4
[vae]
chunk = 4
[trainer]
ranks = 2
max_steps = 60
global_batch_size = 8
micro_batch_size = 4
lr = 1e-3
[ema]
decay = 0.99
[checkpoint]
every = 20
keep = 100
END
}
use() { # KIND
    TINY=$T/$1.toml
    config "$1" >"$TINY"
}

use sdxl
timeout 120 "$LGSUP" check "$TINY" --set "job.dir=$T/none" >"$T/out" 2>&1
expect "check" 0 $?
[ $e2e_failed -eq 0 ] || { tail -n 5 "$T/out"; exit 1; }
a=$T/a
start_by_start "$a" 40
expect "SDXL: all weights are trained, and gone on with" 0 $?
[ $e2e_failed -eq 0 ] || { tail -n 5 "$T/a.out"; exit 1; }
says() { grep -Eq "$1" "$a/config.toml"; }
check "its kind" says '^kind = "sdxl"'
check "its blocks" says '^depth = 11'
check "its betas" says '^beta_schedule = "scaled_linear"'
check "its guidance when drawn" says '^guidance = 5'
check "what its files say is written back" jq -e '._class_name == "UNet2DConditionModel" and
    .addition_embed_type == "text_time" and .transformer_layers_per_block == [1, 2] and .attention_head_dim == [2, 4]' \
    "$(checkpoint_of "$a" 40)/model/config.json"

same() { # NAME [...]: another way to the same bytes
    local run=$T/${1// /_}
    tiny "$run" --set trainer.max_steps=40 "${@:2}"
    expect "$1" 0 $?
    check "$1: byte-identical" same_files "$a" "$run" 40
    rm -rf "$run"
}
same_in_all_modes

other() { # NAME [...]: trained on something else
    tiny "$T/other" --set trainer.max_steps=20 "${@:2}"
    expect "$1" 0 $?
    check "$1: another loss" test "$(tail -n 1 "$T/other/metrics.jsonl" | jq .loss)" != \
        "$(head -n 20 "$a/metrics.jsonl" | tail -n 1 | jq .loss)"
    rm -rf "$T/other"
}
other "velocities" --set trainer.objective=v --set trainer.zero_snr=true

killed=$T/killed
train "$killed" --set parallel.zero=3
wait_step "$killed" 5
for role in "trainer 1" "text.clip_g 0" "ckpt 0" "vae 0" "trainer 0"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
settle "SDXL, killed" "$killed"
N=${settled:-40}
tiny "$T/own" --set trainer.max_steps="$N"
same_as "SDXL, killed" "$killed" "$T/own" "$N"

lora=(--set adapter.kind=lora --set adapter.rank=4 --set 'adapter.targets=["linear"]')
use sd2
killed=$T/lora
train "$killed" "${lora[@]}" --set parallel.zero=2
wait_step "$killed" 5
for role in "trainer 0" "text 0" "trainer 1"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
settle "SD 2, an adapter, killed" "$killed"
N=${settled:-20}
tiny "$T/own_lora" --set trainer.max_steps="$N" "${lora[@]}"
same_as "SD 2, an adapter, killed" "$killed" "$T/own_lora" "$N"

adapter=$(checkpoint_of "$T/own_lora" "$N")/adapter/pytorch_lora_weights.safetensors
check "under diffusers' names" grep -aq '"unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight"' \
    "$adapter"
check "kohya's layout" timeout 60 "$LGSUP" export "$T/own_lora" --format kohya -o "$T/kohya.safetensors"
check "under its names" grep -aq '"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q.lora_down.weight"' \
    "$T/kohya.safetensors"
check "merged" timeout 60 "$LGSUP" export "$T/own_lora" --merge -o "$T/merged"
check "a whole net" jq -e '._class_name == "UNet2DConditionModel" and .use_linear_projection' "$T/merged/unet/config.json"
check "and no other" test ! -e "$T/merged/transformer"

draw() { timeout 120 "$e2e_build/bin/lg-sample" "a red circle" --steps 4 --seed 3 "$@" >"$T/said" 2>&1; }
check "SDXL can be drawn with" draw --from "$a" -o "$T/a.png"
check "SD 2 with its adapter" draw --from "$T/own_lora" -o "$T/b.png"
check "from the exported folder" draw --from "$T/merged/unet" --config "$T/own_lora/config.toml" -o "$T/c.png"
check "which holds the adapter" cmp "$T/b.png" "$T/c.png"
check "two pictures" test "$(md5sum "$T"/[ab].png | cut -d' ' -f1 | sort -u | wc -l)" = 2

# A new net of a shape.
mkdir "$T/shape"
cp "$T/sd2/unet/config.json" "$T/shape/"
tiny "$T/new" --set model.from="$T/shape" --set model.fresh=true --set trainer.max_steps=20
expect "a new net of a shape" 0 $?
check "other weights" test "$(head -n 1 "$T/new/metrics.jsonl" | jq .loss)" != \
    "$(head -n 1 "$T/own_lora/metrics.jsonl" | jq .loss)"

refused() { # NAME PATTERN [--set ...]
    local name=$1 pattern=$2
    shift 2
    tiny "$T/refused" "$@"
    expect "$name: exit" 3 $?
    check "$name: says why" grep -Eq "$pattern" "$T/refused.out"
}
refused "a split sequence" 'model.kind = "sd2" has no sequence' --set parallel.sp=2
refused "no shape" 'takes its shape from model.from' --set model.from= --set model.kind=sd2 --set pipeline=
refused "another depth" 'model.depth = 4, but' --set model.depth=4
check "nothing is left running" nothing_runs
