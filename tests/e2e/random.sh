#!/bin/bash
# lg-random-model: models and data of noise are what the pipeline takes for real ones, and the same
# command gives the same bytes.
. "$(dirname "$0")/lib.sh"
make_one() { "$e2e_build/bin/lg-random-model" "$@"; }
spiece=$EMOJI/text_encoder/spiece.model
for d in a b; do
    check "models $d" make_one vae --preset tiny --dtype f16 "$T/$d/vae"
    check "text encoder $d" make_one t5 --preset tiny --spiece "$spiece" "$T/$d/t5"
    check "CLIP $d" make_one clip --preset tiny "$T/$d/clip"
    check "pictures $d" make_one pictures --count 40 --size 80 --classes 5 --per-shard 15 "$T/$d/pictures"
    check "clips $d" make_one clips --count 12 --size 24 --frames 9 --classes 5 --per-shard 5 "$T/$d/clips"
    check "latents $d" make_one latents --count 40 --size 8 --classes 5 "$T/$d/latents"
done
check "equal commands, equal bytes" diff -r "$T/a" "$T/b"
make_one latents --count 40 --size 8 --classes 5 --seed 1 "$T/c"
check "another seed, other bytes" sh -c "! cmp -s '$T/a/latents/noise-00000.tar' '$T/c/noise-00000.tar'"
expect "shards" 3 "$(ls "$T/a/pictures" | wc -l)"
expect "vocabulary of the tokenizer" 2048 "$(jq .vocab_size "$T/a/t5/config.json")"
check "the autoencoder of SDXL and PixArt-Sigma" make_one vae --preset sdxl --dtype f16 "$T/sdxl"
expect "its latents' scale" 0.13025 "$(jq .scaling_factor "$T/sdxl/config.json")"
rm -r "$T/sdxl"

common="--set trainer.max_steps=4 --set model.num_classes=5 --set data.latent_size=8"
check "trains on the pictures, labels" tiny "$T/class" $common --set data.path="$T/a/pictures" \
    --set vae.model="$T/a/vae" --set text.model= --set model.kind=dit
check "trains on the latents, captions" tiny "$T/text" $common --set data.path="$T/a/latents" \
    --set vae.model= --set data.flip=false --set text.model="$T/a/t5"
for run in class text; do
    expect "$run: every step has a loss, no sample was void" 4 \
        "$(jq -c 'select(.loss > 0.1 and .loss < 10 and .voids == 0)' "$T/$run/metrics.jsonl" | wc -l)"
done
check "looks the clips over" sh -c "timeout 120 '$LGSUP' data '$T/a/clips' >'$T/said' 2>&1"
for say in "12 samples of clips" "all of them can be read" "frames: 9 to 9" "height: 24 to 24"; do
    check "the clips: $say" grep -q "$say" "$T/said"
done
pipe=(--preset tiny-flux --dtype f32 --spiece "$spiece")
check "a pipeline" make_one pipeline "${pipe[@]}" "$T/flux"
check "its transformer alone" make_one transformer --preset tiny-flux "$T/alone"
check "is the same" diff -r "$T/flux/transformer" "$T/alone"
check "a preset that does not exist" sh -c \
    "'$e2e_build/bin/lg-random-model' vae --preset huge '$T/x' 2>&1 | grep -q 'sd, sdxl, sd3, flux, ltx, ltx-095, tiny, '"
check "a clip preset that does not exist" sh -c \
    "'$e2e_build/bin/lg-random-model' clip --preset g '$T/x' 2>&1 | grep -q 'bigg, tiny and tiny-g'"
check "a format that does not exist" sh -c \
    "'$e2e_build/bin/lg-random-model' clips --count 1 --format avi '$T/x' 2>&1 | grep -q 'gif, webp, mp4, webm and mkv exist'"
check "t5 without a tokenizer" sh -c \
    "'$e2e_build/bin/lg-random-model' t5 --preset tiny '$T/x' 2>&1 | grep -q spiece"
check "a pipeline preset that does not exist" sh -c \
    "'$e2e_build/bin/lg-random-model' pipeline --preset sd4 '$T/x' 2>&1 | grep -q 'there are dit-xl-2, .*sd35-medium, .*tiny-flux'"
