#!/bin/bash
# A published net trained end to end: from latents computed before, from pictures or clips with the encoders on another GPU, and with a
# rank and encoders on each of two GPUs. Random weights, pictures, clips and captions; nothing is published.
#
# usage: bench_online.sh BUNDLE DATA [option ...]
#   BUNDLE        directory made by `make bundle`
#   DATA          a directory for the models and shards; made there when absent (2.5 GB), kept
#   --net NET     sd21 (default): Stable Diffusion 2.1's U-Net on JPEG pictures of 512 px, its encoders of pictures and texts
#                 ltx: LTX-Video's transformer on WebP clips (no libav is needed) of 97 x 448 x 448, 13 x 14 x 14 = 2,548 tokens, with
#                 0.9.0's encoder and T5 v1.1 base
#   --batch N     samples of a rank (default: sd21 32, ltx 4)
#   --steps N     after the warm-up of 6 (default 16)
#   --only LIST   of the words latents,apart,ranks (default all; ranks and apart where there are two GPUs)
#   --limit S     seconds for one run (default 100)
#   --device host a tiny net, to try this script without a GPU
#   anything else goes to lgsup start: --set KEY=VALUE
#
# Prints a line for each run: ms a step (mean and median, from commit to commit), samples a second, rank 0's wait for data, and how much of
# the speed on latents that is, both by the mean: who waits now and then has a median that does not show it. Exits with 1 when a run failed.
set -u
export LC_ALL=C
usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
mkdir -p "$2"
bundle=$(cd "$1" && pwd) && data=$(cd "$2" && pwd) || usage
shift 2
net=sd21 batch= steps=16 only=latents,apart,ranks limit=100 device=cuda extra=()
while [ $# -gt 0 ]; do
    case $1 in
    --net) net=$2; shift ;;
    --batch) batch=$2; shift ;;
    --steps) steps=$2; shift ;;
    --only) only=$2; shift ;;
    --limit) limit=$2; shift ;;
    --device) device=$2; shift ;;
    *) extra+=("$1") ;;
    esac
    shift
done
WARM_UP=6
T=$(mktemp -d /tmp/lgu.XXXXXX) || exit 1 # short: socket paths end at 107 bytes
mkdir -m 700 "$T/r"
export XDG_RUNTIME_DIR=$T/r LG_CUDA_CACHE=${LG_CUDA_CACHE:-$T/algorithms.txt}
trap 'for d in "$T"/*/; do timeout 200 "$bundle/bin/lgsup" stop --kill "$d" >/dev/null 2>&1; done; rm -rf "$T"' EXIT
trap 'exit 1' INT TERM HUP

make_once() { # NAME ARGUMENTS...: appears whole or not at all
    local name=$1
    shift
    [ -d "$data/$name" ] && return
    rm -rf "$data/$name.new"
    "$bundle/bin/lg-random-model" "$@" "$data/$name.new" >/dev/null && mv "$data/$name.new" "$data/$name"
}
model=$data/net-$net
config() { mkdir -p "$model" && cat >"$model/config.json"; } # from standard input
case $net in
sd21)
    pipeline=$bundle/examples/sd2/pipeline.toml side=512 cells=64 channels=4 latent_frames=0 count=512 encoder=sd text=clip-h batch=${batch:-32}
    shape=(--set data.size=$side) latents=(--size $cells)
    if [ "$device" = host ]; then
        side=64 cells=8 count=64 encoder=tiny text=clip-tiny batch=4 shape=(--set data.size=$side) latents=(--size $cells)
        sed 's/"cross_attention_dim": 192/"cross_attention_dim": 64/' "$bundle/examples/emoji-unet/unet/config.json" | config
    else
        config <<'JSON'
{"_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
 "block_out_channels": [320, 640, 1280, 1280], "attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024,
 "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
 "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
 "norm_num_groups": 32, "use_linear_projection": true}
JSON
    fi
    make_once "$text" clip --preset "${text#clip-}" &
    make_once "seen-$net-$side" pictures --count $count --size $side --per-shard 64 &
    ;;
ltx)
    pipeline=$bundle/examples/ltx-video.toml side=448 cells=14 frames=97 latent_frames=13 count=16 encoder=ltx text=t5-base batch=${batch:-4}
    channels=128 heads=32 layers=28 depth=64 width=768
    [ "$device" = cuda ] || { side=16 cells=4 frames=9 latent_frames=5 encoder=tiny-ltx text=t5-tiny batch=4 channels=8 heads=4 layers=2 depth=16 width=64; }
    shape=(--set data.size=$side --set data.frames=$frames --set data.fps=0 --set parallel.sp=1 --set parallel.zero=0 --set memory.recompute=none)
    latents=(--size $cells --channels $channels --frames $latent_frames)
    config <<JSON
{"_class_name": "LTXVideoTransformer3DModel", "in_channels": $channels, "out_channels": $channels, "num_attention_heads": $heads,
 "attention_head_dim": $depth, "num_layers": $layers, "cross_attention_dim": $((heads * depth)), "caption_channels": $width,
 "patch_size": 1, "patch_size_t": 1, "activation_fn": "gelu-approximate", "qk_norm": "rms_norm_across_heads",
 "norm_elementwise_affine": false, "norm_eps": 1e-06, "attention_bias": true, "attention_out_bias": true}
JSON
    make_once "$text" t5 --preset "${text#t5-}" --spiece "$bundle/examples/emoji/text_encoder/spiece.model" &
    make_once "seen-$net-$side" clips --format webp --count $count --size $side --frames $frames --per-shard 4 &
    ;;
*) usage ;;
esac
small=()
[ "$device" = cuda ] || { steps=3; small=(--set precision=fp32 --set loader.instances=1 --set loader.chunk=4 --set vae.chunk=4 --set text.chunk=4); }
make_once "vae-$encoder" vae --preset $encoder &
make_once "latents-$net-$cells" latents --count $count "${latents[@]}" &
wait

metric() { # RUN: step's ms, wait's ms; a line for each step after the warm-up, by the commits' clock
    sed -n 's/^{"step": *\([0-9]*\),.*"data_wait_s": *\([0-9.]*\),.*"time": *\([0-9.]*\).*/\1 \2 \3/p' "$T/$1/metrics.jsonl" 2>/dev/null |
        awk -v w=$WARM_UP '$1 > w { print 1000 * ($3 - last), 1000 * $2 } { last = $3 }'
}
median() { sort -n | awk '{ v[NR] = $1 } END { if (NR) print (v[int((NR + 1) / 2)] + v[int(NR / 2 + 1)]) / 2; else print 0 }'; }
failed=0 latents_rate=
run() { # NAME RANKS [...]
    local name=$1 ranks=$2 ms mean pid end=$((SECONDS + limit))
    shift 2
    "$bundle/bin/lgsup" start "$pipeline" --set pipeline= --set device="$device" \
        --set job.dir="$T/$name" --set model.from="$model" --set model.fresh=true --set text.model="$data/$text" --set text.memo=0 \
        --set vae.memo=0 "${shape[@]}" --set trainer.max_steps=100000 --set trainer.warmup_steps=2 --set 'sample.captions=[]' \
        --set checkpoint.every=0 --set checkpoint.keep=1 --set trainer.ranks="$ranks" --set trainer.gpus=0 --set trainer.micro_batch_size="$batch" \
        --set trainer.global_batch_size=$((ranks * batch)) --set loader.instances=8 --set window.batches=8 ${small[@]+"${small[@]}"} ${extra[@]+"${extra[@]}"} "$@" \
        >"$T/$name.out" 2>&1 </dev/null &
    pid=$!
    until [ "$(metric "$name" | wc -l)" -ge "$steps" ] || ! kill -0 $pid 2>/dev/null || [ $SECONDS -ge $end ]; do sleep 0.2; done
    if [ "$(metric "$name" | wc -l)" -lt "$steps" ]; then
        echo "FAIL $name: $(metric "$name" | wc -l) of $steps steps after $((limit - end + SECONDS)) s: $(tail -n 3 "$T/$name.out" | tr '\n' ' ')"
        for l in "$T/$name"/logs/*.log; do [ ! -f "$l" ] || echo "== ${l##*/}: $(tail -n 2 "$l" | cut -c 1-300)"; done
        failed=1
    fi
    exec 3>&2 2>/dev/null # bash says of each process that was killed that it was
    timeout 200 "$bundle/bin/lgsup" stop --kill "$T/$name" >/dev/null || { echo "FAIL $name: not all of its processes have ended"; failed=1; }
    wait $pid
    exec 2>&3
    [ "$device" = host ] || sleep 2 # until the driver has freed its memory
    [ "$(metric "$name" | wc -l)" -ge "$steps" ] || return
    ms=$(metric "$name" | head -n "$steps" | awk '{ print $1 }' | median)
    mean=$(metric "$name" | head -n "$steps" | awk '{ t += $1 } END { print t / NR }')
    [ "$name" != latents ] || latents_rate=$(awk -v b="$batch" -v ms="$mean" 'BEGIN { print 1000 * b / ms }')
    metric "$name" | head -n "$steps" | awk -v name="$name" -v ms="$ms" -v mean="$mean" -v b=$((ranks * batch)) -v one="$latents_rate" '
        { wait += $2; if (min == "" || $1 < min) min = $1; if ($1 > max) max = $1 }
        END { printf "%-10s %8.1f ms (mean of %d; median %.1f, %.1f to %.1f)  %.1f samples/s  data wait %.2f %%", name, mean, NR, ms, min, max,
                  1000 * b / mean, 100 * wait / (mean * NR)
              if (one) printf "  %.3f of one rank on latents", 1000 * b / mean / one
              print "" }'
    rm -rf "${T:?}/$name"
}
wanted() { case ",$only," in *",$1,"*) ;; *) return 1 ;; esac; }
visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)}
gpus=$(tr ', ' '\n\n' <<<"$visible" | grep -c .)
seen=(--set vae.model="$data/vae-$encoder" --set data.path="$data/seen-$net-$side")
other=0 both=0
[ "$gpus" -lt 2 ] || other=1 both=0,1
echo "# $net, $device, $gpus GPUs, $batch samples a rank, $steps steps, $(date -u +%F), $("$bundle/bin/lgsup" version 2>/dev/null | head -1)"
wanted latents && run latents 1 --set vae.model= --set data.path="$data/latents-$net-$cells" --set data.flip=false --set data.crop=center \
    --set data.latent_size=$cells --set data.latent_channels=$channels --set data.latent_frames=$latent_frames --set text.gpus=$other \
    --set text.shards=1 --set text.instances=1
if [ "$gpus" -ge 2 ] || [ "$device" = host ]; then
    wanted apart && run apart 1 "${seen[@]}" --set vae.instances=1 --set vae.gpus=$other --set text.gpus=$other --set text.instances=1 --set text.shards=1
    wanted ranks && run ranks 2 "${seen[@]}" --set trainer.gpus=$both --set vae.instances=2 --set vae.gpus=$both --set text.gpus=$other \
        --set text.instances=1 --set text.shards=1
fi
exit $failed
