#!/bin/bash
# What the pipeline around the trainer costs: DiT-XL/2, class labels, from JPEG pictures against
# precomputed latents; what a checkpoint and the EMA keeper cost the trainer's step.
#
# usage: bench_pipeline.sh BUNDLE DATA [option ...]
#   BUNDLE        directory made by `make bundle`
#   DATA          a directory for the models and shards of noise; made there when absent (300 MB), kept
#   --device D    cuda (default) or host: a tiny net, to try this script without a GPU
#   --steps N     of each run (default 60)
#   --seed S      of the data (default 0)
#   --only LIST   of the words below: latents (always run), pictures, ranks, ema (default all)
#   anything else goes to lgsup start: --set KEY=VALUE
#
# Prints one line per figure, from metrics.jsonl, steps of the warm-up (10) left out; a step's time is
# from commit to commit. Exits with 1 when a run failed.
#   latents     the trainer's own speed: nothing is encoded
#   pictures    loader and VAE encoder work beside it: on the trainer's GPU, and on a second one where
#               there is one
#   ranks       a rank on each of two, four and eight GPUs, as many as there are, with its share of the
#               batch: on latents, and on pictures with an encoder on each GPU
#   data wait   share of the time in which rank 0 had no batch
#   checkpoint  time that the three steps after a checkpoint take more than the median, in % of a step
#   ema         median step against steps during which the keeper was stopped (it works a step later)
set -u
export LC_ALL=C
usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
mkdir -p "$2"
bundle=$(cd "$1" && pwd) && data=$(cd "$2" && pwd) || usage
shift 2
device=cuda steps=60 seed=0 only=pictures,ranks,ema extra=()
while [ $# -gt 0 ]; do
    case $1 in
    --device) device=$2; shift ;;
    --steps) steps=$2; shift ;;
    --seed) seed=$2; shift ;;
    --only) only=$2; shift ;;
    *) extra+=("$1") ;;
    esac
    shift
done
WARM_UP=10
T=$(mktemp -d /tmp/lgb.XXXXXX) || exit 1 # short: socket paths end at 107 bytes
mkdir -m 700 "$T/r"
export XDG_RUNTIME_DIR=$T/r
export LG_CUDA_CACHE=${LG_CUDA_CACHE:-$T/algorithms.txt}
lgsup=$bundle/bin/lgsup
running=
cleanup() {
    trap - EXIT
    local run
    if [ -n "$running" ]; then
        for run in "$T"/*/; do timeout 30 "$lgsup" stop "$run" >/dev/null 2>&1; done
        kill "$running" 2>/dev/null
    fi
    rm -rf "$T"
}
trap cleanup EXIT
trap 'exit 1' INT TERM HUP

# ---- models and data ----

if [ "$device" = host ]; then
    vae=tiny side=64 pictures=200 batch=8 gpus=0
    small=(--set precision=fp32 --set data.size=64 --set model.hidden=64 --set model.depth=2 --set model.heads=4
        --set trainer.global_batch_size=8 --set trainer.micro_batch_size=8 --set loader.instances=1
        --set loader.chunk=4 --set vae.chunk=4)
else
    vae=sd side=256 pictures=4096 batch=256 small=()
    visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)}
    gpus=$(tr ', ' '\n\n' <<<"$visible" | grep -c .)
fi
make_once() { # NAME ARGUMENTS...: appears whole or not at all
    local name=$1
    shift
    [ -d "$data/$name" ] && return
    rm -rf "$data/$name.new"
    "$bundle/bin/lg-random-model" "$@" --seed "$seed" "$data/$name.new" && mv "$data/$name.new" "$data/$name"
}
make_once "vae-$vae" vae --preset $vae || exit 1
make_once "pictures-$side" pictures --count $pictures --size $side || exit 1
make_once "latents-$side" latents --count $pictures --size $((side / 8)) || exit 1

# ---- runs ----

# start RUN [...]: exit status of the run.
start() {
    local run=$1
    shift
    timeout --foreground -k 5 "${RUN_LIMIT_S:-300}" "$lgsup" start "$bundle/examples/dit-xl2/pipeline-class.toml" \
        --set device="$device" --set job.dir="$T/$run" --set trainer.max_steps="$steps" \
        --set 'sample.captions=[]' --set checkpoint.every=0 --set checkpoint.keep=1 \
        ${small[@]+"${small[@]}"} ${extra[@]+"${extra[@]}"} "$@" >"$T/$run.out" 2>&1 </dev/null
}
finish() { # STATUS RUN
    [ "$1" = 0 ] && return
    echo "FAIL $2: exit $1: $(tail -5 "$T/$2.out")"
    for l in "$T/$2"/logs/*.log; do echo "== $l"; tail -3 "$l"; done
    exit 1
}
from_latents=(--set vae.model= --set data.flip=false --set data.path="$data/latents-$side" --set data.latent_size=$((side / 8)))
from_pictures=(--set vae.model="$data/vae-$vae" --set data.path="$data/pictures-$side")

# step ms data_wait_ms ckpt_wait_ms, one line per step after the warm-up
steps_of() {
    sed -n 's/^{"step": *\([0-9]*\),.*"samples_per_s": *\([0-9.]*\), *"data_wait_s": *\([0-9.]*\), *"ckpt_wait_s": *\([0-9.]*\).*/\1 \2 \3 \4/p' \
        "$T/$1/metrics.jsonl" | awk -v b=$batch -v w=$WARM_UP '$1 > w && $2 > 0 { print $1, 1000 * b / $2, 1000 * $3, 1000 * $4 }'
}
# Of numbers on stdin.
median() { sort -n | awk '{ v[NR] = $1 } END { if (NR) print (v[int((NR + 1) / 2)] + v[int(NR / 2 + 1)]) / 2; else print 0 }'; }
report() { # NAME RUN: the run's line; its median step in $ms
    ms=$(steps_of "$2" | awk '{ print $2 }' | median)
    steps_of "$2" | awk -v name="$1" -v ms="$ms" -v b=$batch '
        { t += $2; wait += $3; if (min == "" || $2 < min) min = $2; if ($2 > max) max = $2 }
        END { printf "%-28s %8.1f ms/step (median of %d; %.1f to %.1f)  %.2f steps/s  %.0f img/s  mean %.0f img/s  data wait %.2f %%\n",
              name, ms, NR, min, max, 1000 / ms, 1000 * b / ms, 1000 * b * NR / t, 100 * wait / t }'
}

echo "# $device, $gpus GPUs, $steps steps of $batch, $(date -u +%F), $("$lgsup" version 2>/dev/null | head -1)"

every=$((steps / 3 > WARM_UP ? steps / 3 : WARM_UP + 1))
start latents "${from_latents[@]}" --set checkpoint.every=$every
finish $? latents
report latents latents
latents_ms=$ms
steps_of latents | awk -v ms="$ms" -v every=$every -v last="$steps" '
    $1 > every && ($1 - 1) % every < 3 && $1 <= last - last % every { extra += $2 - ms; n = n > 0 ? n : 0; seen[int(($1 - 1) / every)] = 1; wait += $4 }
    END { for (k in seen) n++
          if (n) printf "%-28s %8.1f ms more in the three steps after one (of %d): %.2f %% of a step; ranks waited %.1f ms for the writer\n",
              "checkpoint", extra / n, n, 100 * extra / n / ms, wait / n }'
rm -rf "$T/latents"

# one RUN NAME OPTIONS...: a run, its line, and its speed beside that of one rank on latents.
one() {
    local run=$1 name=$2
    shift 2
    start "$run" "$@"
    finish $? "$run"
    report "$name" "$run"
    awk -v a="$latents_ms" -v b="$ms" 'BEGIN { printf "%-28s %8.1f %% of the speed on latents\n", "", 100 * a / b }'
    rm -rf "${T:?}/$run"
}
wanted() { case ",$only," in *",$1,"*) ;; *) return 1 ;; esac; }
if wanted pictures; then
    one pictures "pictures, encoder on GPU 0" "${from_pictures[@]}"
    [ "$gpus" -lt 2 ] || one apart "pictures, encoder on GPU 1" "${from_pictures[@]}" --set vae.gpus=1
fi
# ranks N: a rank and an encoder on each of N GPUs
ranks() {
    local n=$1 each=(--set trainer.ranks="$1" --set trainer.micro_batch_size=$((batch / $1))) vae_gpus=()
    if [ "$gpus" -gt 0 ]; then
        each+=(--set trainer.gpus="$(seq -s, 0 $((n - 1)))")
        vae_gpus=(--set vae.gpus="$(seq -s, 0 $((n - 1)))")
    fi
    one ranks "latents, $n ranks" "${from_latents[@]}" "${each[@]}"
    one ranks_vae "pictures, $n ranks" "${from_pictures[@]}" "${each[@]}" ${vae_gpus[@]+"${vae_gpus[@]}"} \
        --set vae.instances="$n"
}
if wanted ranks; then
    for n in 2 4 8; do
        if [ "$gpus" -ge "$n" ] || { [ "$device" = host ] && [ "$n" = 2 ]; }; then ranks $n; fi
    done
fi
wanted ema || exit 0

# The keeper works on state k during step k + 1. Stopped in the middle of step k, it misses state k's
# time: step k + 1 runs without it and needs nothing of it; then it catches up.
step_of() {
    local s
    s=$(tail -n 1 "$T/$1/metrics.jsonl" 2>/dev/null | sed -n 's/^{"step": *\([0-9]*\),.*/\1/p')
    echo "${s:-0}"
}
wait_for() { # RUN STEP
    until [ "$(step_of "$1")" -ge "$2" ]; do
        kill -0 "$running" 2>/dev/null || return 1
        sleep 0.002
    done
}
start ema "${from_latents[@]}" &
running=$!
without=" "
for ((k = WARM_UP + 1; k + 5 < steps; k += 5)); do
    wait_for ema $((k - 1)) || break
    pid=$(timeout 10 "$lgsup" status --json "$T/ema" | tr -d '[:space:]' |
        grep -o '"role":"ema","index":0,"pid":[0-9]*' | grep -o '[0-9]*$')
    now=$(step_of ema)
    wait_for ema $((now + 1)) || break
    sleep "$(awk -v ms="$latents_ms" 'BEGIN { print ms / 2000 }')"
    kill -STOP "$pid" || break
    without="$without$((now + 3)) "
    wait_for ema $((now + 3))
    kill -CONT "$pid"
done
wait "$running"
status=$?
running=
finish $status ema
steps_of ema | awk -v without="$without" '{
    if (index(without, " " $1 " ")) print $2 >"'"$T/without"'"
    else if (!index(without, " " $1 - 1 " ") && !index(without, " " $1 - 2 " ")) print $2 >"'"$T/with"'" }'
touch "$T/with" "$T/without"
awk -v a="$(median <"$T/with")" -v b="$(median <"$T/without")" -v n="$(wc -l <"$T/without")" -v m="$(wc -l <"$T/with")" \
    'BEGIN { if (n && m) printf "%-28s %8.1f ms/step with (%d), %.1f without (%d): %+.2f %%\n", "ema", a, m, b, n, 100 * (a - b) / b
             else print "ema: too few steps" }'
