#!/bin/bash
# The examples for GPUs of 24, 16 and 12 GB fit such GPUs, as `lgsup check --memory` says where there are none: with folders
# of models that say the published shapes and hold no weights.
. "$(dirname "$0")/lib.sh"
mkdir "$T/models" "$T/none"
ln -s "$e2e_build/lib/liblg-host.so" "$T/none"
export LG_BACKEND_DIR=$T/none # no CUDA
change() { # FILE FILTER
    jq "$2" "$1" >"$T/changed" && mv "$T/changed" "$1"
}
random() { "$e2e_build/bin/lg-random-model" pipeline "$@" >"$T/out" 2>&1; }
sd='.block_out_channels = [128, 256, 512, 512] | .layers_per_block = 2'
dit=$T/models/DiT-XL-2-256 sigma=$T/models/PixArt-Sigma-XL-2-1024-MS
check "a folder of DiT-XL/2" random --preset tiny-dit "$dit"
change "$dit/transformer/config.json" '.attention_head_dim = 72 | .num_attention_heads = 16 | .num_layers = 28 |
    .num_embeds_ada_norm = 1000 | .sample_size = 32'
change "$dit/vae/config.json" "$sd"
check "a folder of PixArt-Sigma" random --preset tiny-pixart --spiece "$EMOJI/text_encoder/spiece.model" "$sigma"
change "$sigma/transformer/config.json" '.attention_head_dim = 72 | .num_attention_heads = 16 | .num_layers = 28 | .sample_size = 128 |
    .caption_channels = 4096 | .cross_attention_dim = 1152 | .interpolation_scale = 2 | .use_additional_conditions = false'
change "$sigma/vae/config.json" "$sd"
change "$sigma/text_encoder/config.json" '.d_model = 4096 | .d_ff = 10240 | .d_kv = 64 | .num_heads = 64 | .num_layers = 24 | .vocab_size = 32128'
# Weights without the embedders of a size, which the net of 1024 pixels has not.
header='{"pos_embed.proj.bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} '
printf "\\x$(printf %x ${#header})\0\0\0\0\0\0\0%s\0\0\0\0" "$header" >"$sigma/transformer/diffusion_pytorch_model.safetensors"

# What a GPU needs in all.
need() { sed -n 's/^  with them  *//p; s/^  together  *//p' "$T/$1.out" | tail -n 1; }
look() { # NAME CARD [...]: the GPU's size is the card's, or $size
    cp "$e2e_root/examples/cards/$2.toml" "$T/$2.toml"
    timeout 120 "$LGSUP" check "$T/$2.toml" --memory "${size:-${2%gb}GiB}" --set data.path="$EMOJI/data-quick" --set job.dir="$T/run" "${@:3}" >"$T/$1.out" 2>&1
}
for card in 24gb 16gb 12gb; do
    look $card $card # the host of this test may be smaller than that of the run
    check "$card: fits its GPU" grep -Eq "^  free now  *${card%gb}\.0 GiB of ${card%gb}\.0 GiB" "$T/$card.out"
    check "$card: nothing is said against the GPU" sh -c "! grep 'of cuda:0' '$T/$card.out'"
    echo "# $card: $(need $card)"
done
look more 24gb --set trainer.optimizer=adamw
check "24gb: moments in fp32 are too much" grep -q 'the run needs .* of cuda:0 (described), which has 24.0 GiB' "$T/more.out"
look more 16gb --set vae.chunk=4
check "16gb: four pictures at once are too much" grep -q 'the run needs .* of cuda:0 (described), which has 16.0 GiB' "$T/more.out"
look more 12gb --set memory.offload_optimizer=false
check "12gb: the state is too much" grep -q 'the run needs .* of cuda:0 (described), which has 12.0 GiB' "$T/more.out"
size=12GiB look small 16gb --set text.storage=fp8
expect "16gb on one of 12 GB, T5 in 8 bits" 0 $?
size=12GiB look pair 16gb --set text.gpus=1 --set parallel.exchange=host
expect "two of 12 GB" 0 $?
