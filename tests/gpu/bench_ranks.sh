#!/bin/bash
# What several GPUs are worth: a training step on one of them, and on N with all that [parallel] can cut. From latents of
# noise, so that nothing but the ranks works, or from pictures of noise; nothing is published.
#
# usage: bench_ranks.sh BUNDLE DATA WORD... [option ...]
#   BUNDLE        directory made by `make bundle`
#   DATA          a directory for shards of noise; made there when absent, kept
#   WORD          dit       DiT-XL/2 at 256 px, BATCH samples for each GPU: one GPU; N with zero = 0, 1, 2, 3
#                 pictures  DiT-XL/2 on N GPUs from JPEG pictures, an encoder on each; its peer is peer_inline.py. The first
#                           steps find a window that was filled before them: take --steps 60, and the mean
#                 split     one sample of a SIDE x SIDE latent, width 2048, depth 28, heads of 64: one GPU; N with sp = N
#                 clip      one clip of FRAMES x SIDE x SIDE cells (default 128 x 168 x 168, 903,168 tokens), a Latte of width 2048 with 28
#                           blocks in frames and 28 along time: N with sp = N
#                 large     DiT of width 3072, depth 48 (8.1 G parameters) at 256 px under zero = 3 on N GPUs
#                 kills     DiT-XL/2 under zero = 3 on N GPUs, undisturbed and again while its ranks are killed: time to the
#                           next commit; loss and norm of every step must be those of the undisturbed run
#   --gpus N      (default 2)
#   --batch N     samples for each GPU (default: dit 256, or 128 on GPUs of less than 120 GB; large 64)
#   --side N      of the latent, of split (default 364: 33,124 tokens, with a label) and clip
#   --frames N    of clip
#   --steps N     after the warm-up (default: dit 20, split 3, large 6)
#   --kills N     of kills (default 8)
#   --zeros LIST  of dit, instead of 0, 1, 2 and 3, as "1 3"; with --one no the one GPU is left out
#   --one no      leaves the run on one GPU out, of dit and split
#   --limit S     seconds for one run (default 120)
#   --device host a tiny net, to try this script without a GPU
#   anything else goes to lgsup start: --set KEY=VALUE
#
# Prints a line for each run: the median step from commit to commit, its range and mean, samples/s (tokens/s) by the median,
# the largest memory in use on a GPU by nvidia-smi and what `lgsup check` had said, and how much of N times the one GPU's speed N have. The
# loss is printed since zero = 0, 1, 2, 3 must have the same. Exits with 1 when a run failed.
set -u
export LC_ALL=C
usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
mkdir -p "$2"
bundle=$(cd "$1" && pwd) && data=$(cd "$2" && pwd) || usage
shift 2
words=() gpus=2 one=yes kills=8 zeros= batch= side= frames=128 steps= limit=120 device=cuda extra=()
while [ $# -gt 0 ]; do
    case $1 in
    dit | pictures | split | clip | large | kills) words+=("$1") ;;
    --batch) batch=$2; shift ;;
    --gpus) gpus=$2; shift ;;
    --one) one=$2; shift ;;
    --side) side=$2; shift ;;
    --frames) frames=$2; shift ;;
    --steps) steps=$2; shift ;;
    --zeros) zeros=$2; shift ;;
    --kills) kills=$2; shift ;;
    --limit) limit=$2; shift ;;
    --device) device=$2; shift ;;
    *) extra+=("$1") ;;
    esac
    shift
done
lgsup=$bundle/bin/lgsup
T=$(mktemp -d /tmp/lgr.XXXXXX) || exit 1 # short: socket paths end at 107 bytes
mkdir -m 700 "$T/r"
export XDG_RUNTIME_DIR=$T/r LG_CUDA_CACHE=${LG_CUDA_CACHE:-$T/algorithms.txt}
cleanup() {
    trap - EXIT
    for d in "$T"/*/; do timeout 200 "$lgsup" stop --kill "$d" >/dev/null 2>&1; done
    rm -rf "$T"
}
trap cleanup EXIT
trap 'exit 1' INT TERM HUP
failed=0
memory() { # MiB in use on the fullest GPU
    [ "$device" = cuda ] || { echo 0; return; }
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | sort -n | tail -n 1
}
total=0
[ "$device" = cuda ] && total=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sort -n | head -n 1)
noise() { # NAME ARGUMENTS...: appears whole or not at all
    local name=$data/$1
    shift
    [ -d "$name" ] && return
    rm -rf "$name.new"
    "$bundle/bin/lg-random-model" "$@" "$name.new" >/dev/null && mv "$name.new" "$name"
}
latents() { noise "latents-$2" latents --count "$1" --size "$2"; } # COUNT SIDE
step_of() {
    local s
    s=$(tail -n 1 "$1/metrics.jsonl" 2>/dev/null | sed -n 's/^{"step": *\([0-9]*\),.*/\1/p')
    echo "${s:-0}"
}
planned() { # RUN: GiB of the fullest GPU, by `lgsup check`
    sed -n 's/^ *with them *\([0-9.]*\) GiB$/\1/p' "$T/$1.check" | sort -n | tail -n 1
}
one_ms= # of the run that others are compared with
# run NAME RANKS SAMPLES WARM_UP STEPS TOKENS [...]: SAMPLES of a step, TOKENS of a sample; in $ms its median step
run() {
    local name=$1 ranks=$2 samples=$3 warm=$4 n=$5 tokens=$6 on=0 pid end reached used=0 before options began=$SECONDS
    shift 6
    [ "$ranks" = 1 ] || [ "$device" = host ] || on=$(seq -s, 0 $((ranks - 1)))
    before=$(memory)
    options=(--set device="$device" --set trainer.max_steps=100000 --set 'sample.captions=[]'
        --set checkpoint.every=0 --set vae.model= --set data.flip=false --set trainer.ranks="$ranks" --set trainer.gpus="$on"
        --set trainer.global_batch_size="$samples" "$@" ${extra[@]+"${extra[@]}"})
    "$lgsup" start "$bundle/examples/dit-xl2/pipeline-class.toml" --set job.dir="$T/$name" "${options[@]}" >"$T/$name.out" 2>&1 </dev/null &
    pid=$!
    end=$((SECONDS + limit))
    [ -z "${victims-}" ] || kill_ranks "$T/$name" $warm "$pid" $end
    until [ "$(step_of "$T/$name")" -ge $((warm + n)) ] || ! kill -0 $pid 2>/dev/null || [ $SECONDS -ge $end ]; do
        sleep 0.2
    done
    used=$(memory)
    reached=$(step_of "$T/$name")
    if [ "$reached" -lt $((warm + n)) ]; then
        echo "FAIL $name: step $reached of $((warm + n)) after $((limit - end + SECONDS)) s: $(tail -n 3 "$T/$name.out" | tr '\n' ' ')"
        for l in "$T/$name"/logs/*.log; do [ ! -f "$l" ] || echo "== ${l##*/}: $(tail -n 3 "$l" | cut -c 1-400)"; done
        failed=1
    else
        timeout 30 "$lgsup" check "$bundle/examples/dit-xl2/pipeline-class.toml" --set job.dir="$T/plan-$name" "${options[@]}" \
            >"$T/$name.check" 2>&1 </dev/null
        ms=$(times "$name" "$warm" "$n" | median)
        times "$name" "$warm" "$n" | awk -v name="$name" -v ms="$ms" -v b="$samples" -v tokens="$tokens" -v used="$used" \
            -v planned="$(planned "$name")" -v one="$one_ms" -v ranks="$ranks" -v batch_of_one="${one_samples:-0}" \
            -v loss="$(loss_at "$name" $((warm + n)))" '
            { sum += $1; if (min == "" || $1 < min) min = $1; if ($1 > max) max = $1 }
            END { printf "%-22s %9.1f ms (%.1f to %.1f, mean %.1f, %d steps) %9.1f samples/s %9.0f tokens/s  GPU %6.2f GiB, planned %6.2f", name, ms,
                      min, max, sum / NR, NR, 1000 * b / ms, 1000 * b * tokens / ms, used / 1024, planned
                  if (one) printf "  efficiency %.3f", one * b / batch_of_one / ms / ranks
                  printf "  loss %s\n", loss }'
    fi
    exec 3>&2 2>/dev/null # bash says of each process that was killed that it was
    timeout 200 "$lgsup" stop --kill "$T/$name" >/dev/null || { echo "FAIL $name: not all of its processes have ended"; failed=1; }
    wait $pid
    exec 2>&3
    for ((i = 0; i < 50 && $(memory) > before + 200; i++)); do sleep 0.1; done # the driver frees it a moment later
    mv "$T/$name/metrics.jsonl" "$T/$name.jsonl"
    [ -z "${KEEP_LOGS-}" ] || { mkdir -p "$KEEP_LOGS/$name" && cp "$T/$name"/logs/*.log "$T/$name".* "$KEEP_LOGS/$name/"; }
    rm -rf "${T:?}/$name"
    [ -z "${KEEP_LOGS-}" ] || echo "# $name: $((SECONDS - began)) s"
}
# kill_ranks DIR FROM PID END: ranks in turns, from step FROM on, each after a random part of a second behind the commit that
# followed the last one; appends the milliseconds from each kill to the next commit to $T/kills.
kill_ranks() {
    local dir=$1 at=$2 pid=$3 end=$4 k victim t0
    for ((k = 0; k < kills; k++)); do
        until [ "$(step_of "$dir")" -ge "$at" ]; do kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt "$end" ] || return; sleep 0.02; done
        sleep 0.$((RANDOM % 90 + 10))
        victim=$(pgrep -f -- "$bundle/bin/lg-trainer --run $dir " | sort -n | sed -n "$((k % gpus + 1))p")
        [ -n "$victim" ] || continue
        at=$(($(step_of "$dir") + 1)) t0=${EPOCHREALTIME/./}
        kill -9 "$victim"
        until [ "$(step_of "$dir")" -ge "$at" ]; do kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt "$end" ] || return; sleep 0.005; done
        echo $(((${EPOCHREALTIME/./} - t0) / 1000)) >>"$T/kills"
    done
}
# Milliseconds of each step after the warm-up, by the commits' clock.
times() { # RUN WARM_UP STEPS
    awk -v from="$2" -v to="$(($2 + $3))" 'match($0, /"step": [0-9]+/) {
        s = substr($0, RSTART + 8, RLENGTH - 8) + 0; match($0, /"time": [0-9.]+/); t = substr($0, RSTART + 8, RLENGTH - 8)
        if (s > from && s <= to) print 1000 * (t - last); last = t }' "$T/$1/metrics.jsonl"
}
figures() { sed -n 's/^{"step": \([0-9]*\), "loss": \([^,]*\), "grad_norm": \([^,]*\),.*/\1 \2 \3/p' "$T/$1.jsonl"; } # RUN
loss_at() { sed -n "s/^{\"step\": $2, \"loss\": \([^,]*\), \"grad_norm\": \([^,]*\),.*/\1, norm \2/p" "$T/$1/metrics.jsonl"; }
median() { sort -n | awk '{ v[NR] = $1 } END { if (NR) print (v[int((NR + 1) / 2)] + v[int(NR / 2 + 1)]) / 2; else print 0 }'; }

echo "# $device, GPUs of $total MiB, $(date -u +%F), $("$lgsup" version 2>/dev/null | head -1)"
for word in "${words[@]}"; do
    one_ms= small=()
    case $word in
    dit)
        b=${batch:-$([ "$total" -gt 120000 ] && echo 256 || echo 128)} n=${steps:-20} s=32
        [ "$device" = cuda ] || { b=4 s=8; small=(--set precision=fp32 --set model.hidden=64 --set model.depth=3 --set model.heads=4 --set loader.chunk=4); }
        latents 4096 $s || exit 1
        common=(--set data.path="$data/latents-$s" --set data.latent_size=$s --set trainer.micro_batch_size="$b" --set loader.instances=2 "${small[@]}")
        [ "$one" = no ] || run one 1 "$b" 5 "$n" 256 "${common[@]}"
        one_ms=${ms-} one_samples=$b
        for z in ${zeros:-0 1 2 3}; do run zero$z "$gpus" $((gpus * b)) 5 "$n" 256 "${common[@]}" --set parallel.zero=$z; done
        ;;
    pictures)
        b=${batch:-$([ "$total" -gt 120000 ] && echo 256 || echo 128)} n=${steps:-20} vae=sd size=256
        [ "$device" = cuda ] || { b=4 vae=tiny size=64; small=(--set precision=fp32 --set data.size=64 --set model.hidden=64 --set model.depth=3 --set model.heads=4 --set loader.chunk=4 --set vae.chunk=4 --set window.batches=8); }
        noise "vae-$vae" vae --preset $vae && noise "pictures-$size" pictures --count 4096 --size $size || exit 1
        on=0
        [ "$device" = host ] || on=$(seq -s, 0 $((gpus - 1)))
        run pictures "$gpus" $((gpus * b)) 5 "$n" 256 --set data.path="$data/pictures-$size" --set vae.model="$data/vae-$vae" --set vae.gpus="$on" \
            --set vae.instances="$gpus" --set loader.instances=$((4 * gpus)) --set trainer.micro_batch_size="$b" "${small[@]}"
        ;;
    split)
        n=${steps:-3} s=${side:-364}
        shape=(--set model.hidden=2048 --set model.depth=28 --set model.heads=32)
        [ "$device" = cuda ] || { s=16; shape=(); small=(--set precision=fp32 --set model.hidden=64 --set model.depth=3 --set model.heads=4); }
        latents 16 $s || exit 1
        # One GPU has the whole state beside the activations of the whole sequence.
        common=(--set data.path="$data/latents-$s" --set data.latent_size=$s --set trainer.micro_batch_size=1 --set loader.instances=1
            --set loader.chunk=1 --set memory.recompute=block --set trainer.optimizer=adamw8bit "${shape[@]}" "${small[@]}")
        [ "$one" = no ] || run split-one 1 1 1 "$n" $((s * s / 4)) "${common[@]}" --set parallel.zero=2
        one_ms=${ms-} one_samples=1
        for kind in ${SPLIT_KINDS-ulysses fastseq}; do
            run split-$kind "$gpus" 1 1 "$n" $((s * s / 4)) "${common[@]}" --set parallel.sp="$gpus" --set parallel.sp_kind=$kind --set parallel.zero=2
        done
        ;;
    clip)
        n=${steps:-3} s=${side:-168}
        shape=(--set model.hidden=2048 --set model.depth=28 --set model.heads=32)
        [ "$device" = cuda ] || { s=8 frames=4 shape=(); small=(--set precision=fp32 --set model.hidden=64 --set model.depth=2 --set model.heads=4); }
        noise "clips-$frames-$s" latents --count 8 --size $s --frames "$frames" || exit 1
        run clip "$gpus" 1 1 "$n" $((frames * s * s / 4)) --set data.path="$data/clips-$frames-$s" --set data.latent_size=$s --set data.frames="$frames" \
            --set model.kind=latte --set text.model="$bundle/examples/emoji/text_encoder" --set text.chunk=1 --set trainer.micro_batch_size=1 \
            --set loader.instances=1 --set loader.chunk=1 --set memory.recompute=block --set memory.cast_weights=true --set trainer.optimizer=adamw8bit \
            --set parallel.sp="$gpus" --set parallel.zero=2 "${shape[@]}" "${small[@]}"
        ;;
    kills)
        b=${batch:-$([ "$total" -gt 120000 ] && echo 256 || echo 128)} s=32 n=$((3 * kills))
        [ "$device" = cuda ] || { b=4 s=8; small=(--set precision=fp32 --set model.hidden=64 --set model.depth=3 --set model.heads=4 --set loader.chunk=4); }
        latents 4096 $s || exit 1
        common=(--set data.path="$data/latents-$s" --set data.latent_size=$s --set trainer.micro_batch_size="$b" --set loader.instances=2
            --set parallel.zero=3 --set supervisor.restarts_max=1000 "${small[@]}")
        run undisturbed "$gpus" $((gpus * b)) 2 "$n" 256 "${common[@]}"
        victims=yes
        run killed "$gpus" $((gpus * b)) 2 "$n" 256 "${common[@]}"
        victims=
        same=$(paste <(figures undisturbed) <(figures killed) | awk -v n=$((n + 2)) 'NR <= n && NF == 6 { all++; same += $1 == $4 && $2 == $5 && $3 == $6 }
            END { print same + 0 " of " all + 0 }')
        sort -n "$T/kills" | awk -v same="$same" '{ v[NR] = $1 } END {
            printf "kills: %d of ranks, to the next commit p50 %d ms, longest %d ms; loss and norm as undisturbed in %s steps\n", NR, v[int((NR + 1) / 2)], v[NR], same }'
        [ "$(wc -l <"$T/kills")" -ge "$kills" ] && [ "$same" = "$((n + 2)) of $((n + 2))" ] || { echo "FAIL kills"; failed=1; }
        ;;
    large)
        b=${batch:-64} n=${steps:-6} s=32
        shape=(--set model.hidden=3072 --set model.depth=48 --set model.heads=24)
        [ "$device" = cuda ] || { b=4 s=8 shape=() small=(--set precision=fp32 --set model.hidden=64 --set model.depth=3 --set model.heads=4 --set loader.chunk=4); }
        latents 4096 $s || exit 1
        run large "$gpus" $((gpus * b)) 2 "$n" 256 --set data.path="$data/latents-$s" --set data.latent_size=$s --set trainer.micro_batch_size="$b" \
            --set loader.instances=2 --set parallel.zero=3 --set memory.recompute=block "${shape[@]}" "${small[@]}"
        ;;
    esac
done
exit $failed
