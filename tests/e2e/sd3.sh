#!/bin/bash
# An SD3 as published ones lie in their folder, tiny: three texts and a latent of 16 channels that is shifted and scaled, trained
# whole and by an adapter, whoever dies and however ranks are cut to the same bytes, drawn, exported and begun with again.
. "$(dirname "$0")/lib.sh"
RANDOM_MODEL=$e2e_build/bin/lg-random-model
check "a pipeline's folder" "$RANDOM_MODEL" pipeline --preset tiny-sd3 --dtype f32 --seed 3 \
    --spiece "$MICRO/text_encoder/spiece.model" "$T/sd3"
TINY=$T/sd3.toml
cat >"$TINY" <<END
pipeline = "$T/sd3"
[job]
name = "tiny"
seed = 7
[data]
path = "$MICRO/data/micro-00000.tar"
size = 32
[loader]
chunk = 4
[text]
chunk = 4
[text.clip_l]
length = 16
[text.clip_g]
length = 16
[text.t5]
length = 12
shards = 2
[vae]
chunk = 4
[trainer]
ranks = 2
max_steps = 80
global_batch_size = 8
micro_batch_size = 4
lr = 1e-3
[ema]
decay = 0.99
[checkpoint]
every = 20
keep = 100
END
timeout 120 "$LGSUP" check "$TINY" --set "job.dir=$T/none" >"$T/out" 2>&1
expect "check" 0 $?
[ $e2e_failed -eq 0 ] || { tail -n 5 "$T/out"; exit 1; }
check "it names three encoders" test "$(grep -Ec '^text\.(clip_l|clip_g|t5) +[0-9]' "$T/out")" = 3

# Killed in between: each encoder of a text, the autoencoder, a rank, who writes.
b=$T/b
train "$b"
wait_step "$b" 5
for role in "text.clip_g 0" "vae 0" "trainer 1" "text.t5 0" "ema 0" "text.clip_l 0" "ckpt 0" "trainer 0"; do
    kill_role "$b" $role
    wait_step "$b" $(($(step_of "$b") + 3))
done
settle "all weights, killed" "$b"
N=${settled:-40}
a=$T/a
start_by_start "$a" "$N" --set checkpoint.keep=1000000
expect "all weights are trained, and gone on with" 0 $?
[ $e2e_failed -eq 0 ] || { tail -n 5 "$T/a.out"; exit 1; }
same_as "all weights, killed" "$b" "$a" "$N"
says() { grep -Eq "$1" "$a/config.toml"; }
check "its blocks" says '^depth = 3'
check "its objective" says '^objective = "flow"'
check "its shift" says '^flow_shift = 3'
check "its guidance when drawn" says '^guidance = 7'
check "its timesteps when drawn" says '^spacing = "linspace"'
check "what its files say is written back" jq -e '.num_layers == 3 and .dual_attention_layers == [0] and .in_channels == 16
    and .qk_norm == "rms_norm" and .pos_embed_max_size == 6 and .joint_attention_dim == 192
    and .pooled_projection_dim == 160' "$(checkpoint_of "$a" 40)/model/config.json"

same() { # NAME [...]: another way to the same bytes
    local run=$T/${1// /_}
    tiny "$run" --set trainer.max_steps=40 "${@:2}"
    expect "$1" 0 $?
    check "$1: byte-identical" same_files "$a" "$run" 40
    rm -rf "$run"
}
same_in_all_modes

# What latents are: (z - shift) scale. Another scale in the autoencoder's file is another latent.
cp -r "$T/sd3" "$T/scaled"
jq '.shift_factor = 0.5' "$T/sd3/vae/config.json" >"$T/scaled/vae/config.json"
tiny "$T/other" --set pipeline="$T/scaled" --set trainer.max_steps=20
expect "another shift of latents" 0 $?
check "another shift of latents: another loss" test "$(tail -n 1 "$T/other/metrics.jsonl" | jq .loss)" != \
    "$(head -n 20 "$a/metrics.jsonl" | tail -n 1 | jq .loss)"

# The positions are the file's, and stay so.
tensor() { # FILE NAME: its bytes' hash
    local n
    n=$(od -An -t u8 -N 8 "$1" | tr -d ' ')
    read -r first end < <(dd if="$1" bs=1 skip=8 count="$n" 2>/dev/null | jq -r ".[\"$2\"].data_offsets | @tsv")
    tail -c +$((8 + n + first + 1)) "$1" | head -c $((end - first)) | md5sum
}
W=diffusion_pytorch_model.safetensors
for of in model ema; do
    expect "$of: positions stay" "$(tensor "$T/sd3/transformer/$W" pos_embed.pos_embed)" \
        "$(tensor "$(checkpoint_of "$a" 40)/$of/$W" pos_embed.pos_embed)"
done

lora=(--set adapter.kind=lora --set adapter.rank=4 --set adapter.targets=attention)
killed=$T/killed
train "$killed" "${lora[@]}" --set parallel.zero=3
wait_step "$killed" 5
for role in "trainer 1" "text.t5 0" "ckpt 0" "vae 0" "text.clip_g 0" "trainer 0"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
settle "an adapter, killed" "$killed"
N2=${settled:-40}
tiny "$T/own" --set trainer.max_steps="$N2" "${lora[@]}"
same_as "an adapter, killed" "$killed" "$T/own" "$N2"

# Texts in 8 bits, each in its way; who fills a shard dies, too.
coded=(--set text.t5.storage=fp8 --set text.clip_g.storage=int8)
killed=$T/coded.killed
train "$killed" "${coded[@]}"
for i in 1 2; do kill_role "$killed" text.t5 0; kill_role "$killed" text.clip_g 0; done
wait_step "$killed" 5
for role in "text.t5 0" "trainer 1" "text.clip_g 0"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
settle "texts in 8 bits, killed" "$killed"
N3=${settled:-40}
tiny "$T/coded" --set trainer.max_steps="$N3" "${coded[@]}"
same_as "texts in 8 bits, killed" "$killed" "$T/coded" "$N3"
check "which is another run" test "$(head -n 1 "$killed/metrics.jsonl" | jq .loss)" != "$(head -n 1 "$a/metrics.jsonl" | jq .loss)"
kib_of() { # CONFIG FIRST_FIELD: what check says, in KiB
    timeout 60 "$LGSUP" check "$1/config.toml" | awk -v name="$2" '$1 == name { print int($4 == "MiB" ? $3 * 1024 : $3); exit }'
}
check "check prints fewer bytes: $(kib_of "$T/coded" text.t5/1/weights) of $(kib_of "$a" text.t5/1/weights) KiB" \
    test "$(kib_of "$T/coded" text.t5/1/weights)" -lt "$(($(kib_of "$a" text.t5/1/weights) * 7 / 10))"
cp -r "$T/coded" "$T/recoded"
tiny "$T/recoded" "${coded[@]}" --set text.t5.storage=int8 --set trainer.max_steps=200
check "another storage is another run" test $? -ne 0
check "and the key is named" grep -q "text.t5.storage was .fp8. when the run began" "$T/recoded.out"

draw() { timeout 120 "$e2e_build/bin/lg-sample" "a red circle" --steps 4 --seed 3 "$@" >"$T/said" 2>&1; }
check "it can be drawn with" draw --from "$a" -o "$T/a.png"
check "with another guidance" draw --from "$a" --guidance 1 -o "$T/b.png"
check "with its adapter" draw --from "$T/own" -o "$T/c.png"
sed -e 's/storage = "fp8"/storage = "auto"/' -e 's/storage = "int8"/storage = "auto"/' "$T/coded/config.toml" >"$T/whole.toml"
check "with texts in 8 bits" draw --from "$T/coded" -o "$T/d.png"
check "and as they are" draw --from "$T/coded" --config "$T/whole.toml" -o "$T/e.png"
check "five pictures" test "$(md5sum "$T"/[abcde].png | cut -d' ' -f1 | sort -u | wc -l)" = 5

timeout 60 "$LGSUP" export "$a" -o "$T/made" >"$T/out" 2>&1
expect "export" 0 $?
check "its transformer is the average" cmp "$(checkpoint_of "$a" "$N")/ema/$W" "$T/made/transformer/$W"
check "all else is the pipeline's" diff -r --exclude transformer "$T/sd3" "$T/made"
tiny "$T/again" --set pipeline="$T/made" --set trainer.max_steps=1 --set trainer.lr=0 --set checkpoint.every=1
expect "a run from what was exported" 0 $?
check "begins with its weights" cmp "$(checkpoint_of "$T/again" 1)/model/$W" "$T/made/transformer/$W"
timeout 60 "$LGSUP" export "$T/own" --merge -o "$T/merged" >"$T/out" 2>&1
expect "export of a merged adapter" 0 $?
check "its texts are the pipeline's" diff -r --exclude transformer "$T/sd3" "$T/merged"

refused() { # NAME PATTERN [--set ...]
    local name=$1 pattern=$2
    shift 2
    tiny "$T/refused" "$@"
    expect "$name: exit" 3 $?
    check "$name: says why" grep -Eq "$pattern" "$T/refused.out"
}
refused "another depth" 'model.depth = 4, but the weights of model.from have 3' --set model.depth=4
refused "CLIPs of two lengths" 'those of both CLIP stand side by side' --set text.clip_l.length=12
# Three rows of patches in one column, of one sample: two tokens and one.
refused "a part of one token, in chunks" "rank 1's part of the sequence is one token, of which there are no chunks" --set 'data.size=[48, 16]' \
    --set parallel.sp=2 --set trainer.micro_batch_size=1 --set parallel.zero=2 --set memory.mlp_chunks=2
refused "T5's section without T5" 'text.t5.shards without text.t5.model' --set text.t5.model=

# Without T5: a folder that has none, as diffusers' pipeline is loaded with text_encoder_3=None; zeros in its place.
mkdir "$T/lean"
for part in "$T"/sd3/*; do case $part in *_3 | *.json) ;; *) ln -s "$part" "$T/lean/" ;; esac; done
jq '.text_encoder_3 = [null, null] | .tokenizer_3 = [null, null]' "$T/sd3/model_index.json" >"$T/lean/model_index.json"
sed -e '/^\[text.t5\]/,/^shards/d' -e "s|^pipeline = .*|pipeline = \"$T/lean\"|" "$TINY" >"$T/lean.toml"
full=$TINY TINY=$T/lean.toml
timeout 120 "$LGSUP" check "$TINY" --set "job.dir=$T/none" >"$T/out" 2>&1
expect "check, without T5" 0 $?
check "it names two encoders" test "$(grep -Ec '^text\.(clip_l|clip_g|t5) +[0-9]' "$T/out")" = 2
check "and what is in T5's place" grep -q '256 zeros in place of text.t5, which has no model' "$T/out"
lean=$T/lean.killed
train "$lean" --set text.t5.length=12
wait_step "$lean" 5
for role in "text.clip_g 0" "trainer 1" "text.clip_l 0" "trainer 0"; do
    kill_role "$lean" $role
    wait_step "$lean" $(($(step_of "$lean") + 3))
done
settle "without T5, killed" "$lean"
N4=${settled:-40}
tiny "$T/lean.own" --set trainer.max_steps="$N4" --set text.t5.length=12
same_as "without T5, killed" "$lean" "$T/lean.own" "$N4"
check "which is another run" test "$(head -n 1 "$lean/metrics.jsonl" | jq .loss)" != "$(head -n 1 "$a/metrics.jsonl" | jq .loss)"
check "its width is the model's" jq -e '.joint_attention_dim == 192' "$(checkpoint_of "$T/lean.own" "$N4")/model/config.json"
check "it can be drawn with" draw --from "$T/lean.own" -o "$T/f.png"
check "and with T5, which is another picture" draw --from "$T/lean.own" --config "$a/config.toml" -o "$T/g.png"
check "indeed" sh -c "! cmp -s '$T/f.png' '$T/g.png'"
tiny "$T/lean.split" --set trainer.max_steps=20 --set text.t5.length=12 --set parallel.sp=2
expect "its sequence can be split" 0 $?
TINY=$full
check "nothing is left running" nothing_runs
