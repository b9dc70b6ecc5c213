#!/bin/bash
# A model as it is published, tiny: PixArt with a learned variance and conditions of a picture's size, in a pipeline's folder.
# A run starts from it, is killed, and stays byte-identical, also when a sequence is split; it is exported as a pipeline, and
# another run starts from that.
. "$(dirname "$0")/lib.sh"
RANDOM_MODEL=$e2e_build/bin/lg-random-model
check "a pipeline's folder" "$RANDOM_MODEL" pipeline --preset tiny-pixart --dtype f16 --seed 3 \
    --spiece "$EMOJI/text_encoder/spiece.model" "$T/pixart"
TINY=$T/published.toml
cat >"$TINY" <<END
pipeline = "pixart"
[job]
name = "tiny"
[data]
path = "$MICRO/data/micro-00000.tar"
size = 32
flip = true
[loader]
chunk = 4
[text]
length = 16
chunk = 4
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
END

timeout 60 "$LGSUP" check "$TINY" --set "job.dir=$T/none" >"$T/out" 2>&1
expect "check" 0 $?
chosen() { grep -Eq "^$1 += +$2 +from .*$3\$" "$T/out"; }
check "it says what was chosen: the net" chosen model.depth 2 transformer/config.json
check "its variance" chosen model.learned_variance true transformer/config.json
check "the objective" chosen trainer.objective '"eps"' scheduler/scheduler_config.json
check "and the sampler" chosen sample.sampler '"dpm\+\+"' scheduler/scheduler_config.json
timeout 60 "$LGSUP" check "$TINY" --set model.depth=3 >"$T/out" 2>&1
check "a key that contradicts the weights is refused (exit $?)" \
    grep -q 'model.depth = 3, but the weights of model.from have 2' "$T/out"

b=$T/b
train "$b"
wait_step "$b" 5
kill_role "$b" trainer 0
wait_step "$b" 15
kill_role "$b" loader 0
kill_role "$b" trainer 1
wait_step "$b" 25
kill_role "$b" ema 0
settle "ranks, loader and average killed" "$b"
N=${settled:-40}
tiny "$T/a" --set trainer.max_steps=$N --set sample.captions='["a red apple", "a moon"]' --set sample.steps=4
expect "undisturbed" 0 $?
[ $e2e_failed -eq 0 ] || tail -n 5 "$T/a.out"
same_as "ranks, loader and average killed" "$b" "$T/a" $N
check "pictures are drawn at the end" test -s "$T/a/samples/step$N.png"

# It began with the pipeline's weights, and its variance is trained.
tiny "$T/none" --set trainer.max_steps=1 --set trainer.lr=0 --set checkpoint.every=1
check "the first weights are the pipeline's" cmp "$(checkpoint_of "$T/none" 1)/model/diffusion_pytorch_model.safetensors" \
    "$T/pixart/transformer/diffusion_pytorch_model.safetensors"
tiny "$T/untrained" --set trainer.max_steps=1 --set trainer.variance_loss=none
first_loss() { head -n 1 "$1/metrics.jsonl" | jq .loss; }
check "both parts of the loss are told" jq -es 'all(.loss - .loss_mse - .loss_vb | fabs < 1e-7) and all(.loss_vb > 0)' "$T/none/metrics.jsonl"
check "the noise's part is what it is without the other" jq -en \
    "$(head -n 1 "$T/none/metrics.jsonl" | jq .loss_mse) - $(first_loss "$T/untrained") | fabs < 1e-6"
check "which has no parts" jq -e 'has("loss_vb") | not' <(head -n 1 "$T/untrained/metrics.jsonl")
check "the variance's part is in the loss ($(first_loss "$T/none"), without $(first_loss "$T/untrained"))" \
    jq -en "$(first_loss "$T/none") > $(first_loss "$T/untrained") * 1.001"

# A split sequence: other sums, the same loss; and as byte-identical.
split=(--set parallel.sp=2 --set trainer.max_steps=40)
tiny "$T/split" "${split[@]}"
expect "a split sequence" 0 $?
tiny_in_background "$T/split2" "${split[@]}" --set trainer.max_steps=1000000 --set checkpoint.keep=1000000
wait_step "$T/split2" 8
kill_role "$T/split2" trainer 1
settle "a split sequence, a rank killed" "$T/split2"
tiny "$T/split3" "${split[@]}" --set trainer.max_steps=${settled:-40}
same_as "a split sequence, a rank killed" "$T/split2" "$T/split3" ${settled:-40}
check "its first loss is the whole one's" jq -en \
    "$(first_loss "$T/split") / $(first_loss "$T/none") | . > 0.99999 and . < 1.00001"

# Exported, and begun with again.
timeout 60 "$LGSUP" export "$T/a" -o "$T/made" >"$T/out" 2>&1
expect "export" 0 $?
check "its transformer is the average" cmp "$(checkpoint_of "$T/a" $N)/ema/diffusion_pytorch_model.safetensors" \
    "$T/made/transformer/diffusion_pytorch_model.safetensors"
check "all else is the pipeline's" diff -r --exclude transformer "$T/pixart" "$T/made"
check "nothing else is left there" test -z "$(find "$T" -maxdepth 1 -name '.*exporting')"
timeout 60 "$LGSUP" export "$T/a" -o "$T/made" >"$T/out" 2>&1
check "what is there is not overwritten (exit $?)" grep -q "made exists" "$T/out"
timeout 60 "$LGSUP" export "$(checkpoint_of "$T/a" $N)" -o "$T/made2" --weights model >"$T/out" 2>&1
expect "export of a checkpoint's own weights" 0 $?
check "which they are" cmp "$(checkpoint_of "$T/a" $N)/model/diffusion_pytorch_model.safetensors" \
    "$T/made2/transformer/diffusion_pytorch_model.safetensors"
tiny "$T/again" --set pipeline="$T/made" --set trainer.max_steps=1 --set trainer.lr=0 --set checkpoint.every=1
expect "a run from what was exported" 0 $?
check "begins with its weights" cmp "$(checkpoint_of "$T/again" 1)/model/diffusion_pytorch_model.safetensors" \
    "$T/made/transformer/diffusion_pytorch_model.safetensors"

# The examples, with tiny models in the place of the published ones, here without GPUs.
check "a DiT's folder" "$RANDOM_MODEL" pipeline --preset tiny-dit "$T/dit"
for kind in sd3 flux latte ltx; do
    check "a folder of $kind" "$RANDOM_MODEL" pipeline --preset tiny-$kind --spiece "$EMOJI/text_encoder/spiece.model" "$T/$kind"
done
example() { # NAME PIPELINE
    sed '/^gpus = /d' "$e2e_root/examples/$1.toml" >"$T/example.toml"
    timeout 60 "$LGSUP" check "$T/example.toml" --set pipeline="$T/$2" --set data.path="$MICRO/data" --set data.size=32 \
        --set device=host --set precision=fp32 --set 'sample.captions=["3"]' --set job.dir="$T/none"
}
check "examples/dit-xl-2.toml" example dit-xl-2 dit
check "examples/pixart-alpha.toml" example pixart-alpha pixart
check "examples/pixart-sigma.toml" example pixart-sigma pixart
check "examples/sd35-medium.toml" example sd35-medium sd3
check "examples/flux-lora.toml" example flux-lora flux
check "examples/sd3-medium.toml" example sd3-medium sd3
check "examples/sd35-large.toml" example sd35-large sd3
check "examples/flux-schnell.toml" example flux-schnell flux
check "examples/latte.toml" example latte latte
check "examples/ltx-video.toml" example ltx-video ltx
