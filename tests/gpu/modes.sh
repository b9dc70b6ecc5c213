#!/bin/bash
# Every way to cut training over ranks, on a machine with GPUs: a shortened emoji run each, compared with each other, and
# some killed on the way. Two ranks, on a GPU each; where there is one they share it.
#
# usage: modes.sh BUNDLE DATA [--steps N] [--kills N] [--device host] [--only LIST]
#   BUNDLE   directory made by `make bundle`; DATA: the emoji shards
#   LIST     letters of  z: zero  s: sequence  o: optimizer in host memory  t: time of one rank
#            b: buckets, on noise of other shapes  a: adapters, moments of 8 bits
#            h: through host memory, as GPUs do that reach none (LG_CUDA_NO_PEER=1)  x: a split sequence so  (default all)
#
# Prints ok/FAIL lines, samples a second of each run's second half and how much of it rank 0 waited for data, and "N passed, M failed"; exits with 1 when one failed.
set -u
export LC_ALL=C
usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
bundle=$(cd "$1" && pwd) && data=$(cd "$2" && pwd) || usage
shift 2
steps=120 kills=5 device=cuda only=zsotbahx
while [ $# -gt 0 ]; do
    case $1 in
    --steps) steps=$2 ;;
    --kills) kills=$2 ;;
    --device) device=$2 ;;
    --only) only=$2 ;;
    *) usage ;;
    esac
    shift 2
done
lgsup=$bundle/bin/lgsup
T=$(mktemp -d /tmp/lgm.XXXXXX) || exit 1 # short: socket paths end at 107 bytes
mkdir -m 700 "$T/r"
export XDG_RUNTIME_DIR=$T/r LG_CUDA_CACHE=${LG_CUDA_CACHE:-$T/algorithms.txt}
trap 'for d in "$T"/*/; do "$lgsup" stop --kill "$d" >/dev/null 2>&1; done; rm -rf "$T"' EXIT
passed=0 failed=0
check() { # WHAT COMMAND...
    local what=$1
    shift
    if "$@" >"$T/said" 2>&1; then
        echo "ok   $what$(sed -n 's/^\([0-9]* kills\)$/: \1/p' "$T/said")"
        passed=$((passed + 1))
    else
        echo "FAIL $what: $(tail -n 1 "$T/said")"
        failed=$((failed + 1))
    fi
}
small=()
[ "$device" = cuda ] || small=(--set device=host --set precision=fp32 --set model.hidden=64 --set model.depth=3
    --set model.heads=4 --set trainer.global_batch_size=16 --set trainer.micro_batch_size=16 --set text.chunk=8
    --set vae.chunk=8 --set loader.chunk=8)
batch=512
[ "$device" = cuda ] || batch=16
visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)}
gpus=0
[ "$(tr ', ' '\n\n' <<<"$visible" | grep -c .)" -lt 2 ] || gpus=0,1
# run NAME RANKS [...]: with a micro-batch that is a rank's whole share, where `micro` does not say otherwise
start() {
    local name=$1 ranks=$2
    shift 2
    exec "$lgsup" start "$bundle/examples/emoji/pipeline-gpu.toml" "${small[@]}" --set job.dir="$T/$name" \
        --set data.path="$data" --set trainer.max_steps=$steps --set checkpoint.every=0 --set 'sample.captions=[]' \
        --set trainer.ranks=$ranks --set trainer.gpus=$gpus --set trainer.micro_batch_size=${micro:-$((batch / ranks))} \
        --set trainer.warmup_steps=5 --set supervisor.restarts_max=1000 "$@"
}
rate() { # of the second half: samples a second by its clock, rank 0's wait
    awk -v from=$((steps / 2)) -v batch=$batch 'match($0, /"step": [0-9]+/) {
        step = substr($0, RSTART + 8, RLENGTH - 8) + 0; match($0, /"time": [0-9.]+/)
        t = substr($0, RSTART + 8, RLENGTH - 8); if (step == from) t0 = t; last = t; n = step }
        step > from && match($0, /"data_wait_s": [0-9.]+/) { wait += substr($0, RSTART + 15, RLENGTH - 15) }
        END { if (last > t0) printf "%.0f samples/s, rank 0 waited for data %.2f %%", (n - from) * batch / (last - t0), 100 * wait / (last - t0) }' "$T/$1/metrics.jsonl"
}
run() { # NAME RANKS [...]
    (start "$@") >"$T/$1.out" 2>&1
    local code=$?
    [ $code = 0 ] && return
    [ -z "${KEEP_LOGS-}" ] || cp -r "$T/$1/logs" "$KEEP_LOGS/modes-$1"
    echo "exit $code: $(tail -n 2 "$T/$1.out" | tr '\n' ' ')"
    return 1
}
timed() { # NAME RANKS [...]
    check "$1 completes" run "$@"
    echo "     $1: $(rate "$1")"
}
killed() { # NAME RANKS [...]: its ranks die, one after the other
    local name=$1 pid n=0 own
    (start "$@") >"$T/$name.out" 2>&1 &
    own=$!
    while kill -0 $own 2>/dev/null && [ $n -lt "$kills" ]; do
        sleep 0.$((RANDOM % 9 + 1))
        [ -s "$T/$name/metrics.jsonl" ] || continue
        pid=$(pgrep -f -- "$bundle/bin/lg-trainer --run $T/$name " | shuf -n 1)
        [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && n=$((n + 1)) && sleep 1
    done
    wait $own || { tail -n 2 "$T/$name.out"; return 1; }
    echo "$n kills"
    [ $n -gt 0 ]
}
same() { # NAME NAME
    local f n=0 of=checkpoints/emoji_step$steps
    for f in $(cd "$T/$1/$of" && find . -name '*.safetensors'); do
        cmp "$T/$1/$of/$f" "$T/$2/$of/$f" || return 1
        n=$((n + 1))
    done
    [ $n -ge 3 ] || { echo "$n files in a checkpoint"; return 1; }
}
loss() { sed -n "s/^{\"step\": $steps, \"loss\": \([0-9.]*\),.*/\1/p" "$T/$1/metrics.jsonl"; }
close() { # NAME NAME: losses of the last step within 2 %
    awk -v a="$(loss "$1")" -v b="$(loss "$2")" 'BEGIN { print a, b; exit !(a > 0 && (a - b) ^ 2 < (0.02 * a) ^ 2) }'
}

timed zero1 2
case $only in *z*)
    for z in 0 2 3; do
        timed zero$z 2 --set parallel.zero=$z
        check "zero = $z: the bytes of zero = 1" same zero1 zero$z
    done
    check "zero = 3, killed" killed killed3 2 --set parallel.zero=3
    check "zero = 3, killed: the same bytes" same zero1 killed3
    ;;
esac
case $only in *s*)
    for kind in ulysses fastseq; do
        micro=$batch timed $kind 2 --set parallel.sp=2 --set parallel.sp_kind=$kind
        check "$kind: the same loss" close zero1 $kind
    done
    micro=$batch check "a split sequence, killed" killed killeds 2 --set parallel.sp=2
    check "a split sequence, killed: the same bytes" same ulysses killeds
    ;;
esac
case $only in *o*)
    timed host 2 --set memory.offload_optimizer=true
    check "optimizer in host memory: the same loss" close zero1 host
    check "optimizer in host memory, killed" killed killedh 2 --set memory.offload_optimizer=true
    check "optimizer in host memory, killed: the same bytes" same host killedh
    ;;
esac
case $only in *t*)
    for z in 1 2 3; do timed one$z 1 --set parallel.zero=$z; done
    check "one rank: zero = 3 gives the bytes of zero = 1" same one1 one3
    ;;
esac
case $only in *a*)
    lora=(--set adapter.kind=lora --set adapter.rank=8 --set trainer.init_from="$T/zero1/checkpoints/emoji_step$steps")
    timed lora 2 "${lora[@]}"
    check "adapters, zero = 3, killed" killed killedl 2 "${lora[@]}" --set parallel.zero=3
    check "adapters, killed: the same bytes" same lora killedl
    timed lora-fp8 2 "${lora[@]}" --set model.frozen=fp8
    check "adapters on 8 bits, killed" killed killedf 2 "${lora[@]}" --set model.frozen=fp8
    check "adapters on 8 bits, killed: the same bytes" same lora-fp8 killedf
    timed adamw8bit 2 --set trainer.optimizer=adamw8bit
    check "moments of 8 bits, killed" killed killed8 2 --set trainer.optimizer=adamw8bit
    check "moments of 8 bits, killed: the same bytes" same adamw8bit killed8
    ;;
esac
# The ranks, and the encoders on other GPUs than theirs.
apart=(--set parallel.exchange=host)
[ $gpus = 0 ] || apart+=(--set vae.gpus=1 --set text.gpus=1,0 --set text.instances=2 --set text.shards=2)
case $only in *h*)
    export LG_CUDA_NO_PEER=1
    for z in 1 0 2 3; do
        timed apart$z 2 "${apart[@]}" --set parallel.zero=$z
        check "through host memory, zero = $z: the bytes of zero = 1" same zero1 apart$z
    done
    for z in 1 2; do
        check "through host memory, zero = $z, killed" killed killedh$z 2 "${apart[@]}" --set parallel.zero=$z
        check "through host memory, zero = $z, killed: the same bytes" same zero1 killedh$z
    done
    check "the ranks knew" grep -q '"apart":[[:space:]]*1' "$T/apart1/plan.json"
    unset LG_CUDA_NO_PEER
    ;;
esac
case $only in *x*)
    micro=$batch timed straight 2 --set parallel.sp=2
    export LG_CUDA_NO_PEER=1
    micro=$batch timed aparts 2 "${apart[@]}" --set parallel.sp=2
    check "a split sequence through host memory: the same bytes" same straight aparts
    micro=$batch check "a split sequence through host memory, killed" killed killedp 2 "${apart[@]}" --set parallel.sp=2
    check "a split sequence through host memory, killed: the same bytes" same straight killedp
    unset LG_CUDA_NO_PEER
    ;;
esac
case $only in *b*)
    # All shapes in one memory; a rank of two micro-batches has two of them in a step.
    "$bundle/bin/lg-random-model" pictures --count 3000 --size 96 --ratio 4 --per-shard 1000 "$T/noise" || exit 1
    data=$T/noise
    shapes=(--set data.buckets=ratio)
    timed shapes 2 "${shapes[@]}"
    check "buckets: several were trained on" test "$(grep -c 'bucket .* items' "$T/shapes/logs/loader.0.log")" -ge 4
    for z in 2 3; do
        timed shapes$z 2 "${shapes[@]}" --set parallel.zero=$z
        check "buckets, zero = $z: the bytes of zero = 1" same shapes shapes$z
    done
    check "buckets, killed" killed killedb 2 "${shapes[@]}" --set parallel.zero=3
    check "buckets, killed: the same bytes" same shapes killedb
    shapes+=(--set vae.chunk=$((batch / 8)))
    micro=$((batch / 4)) timed shapes-of-two 2 "${shapes[@]}"
    micro=$((batch / 4)) check "two shapes a step, killed" killed killedt 2 "${shapes[@]}"
    check "two shapes a step, killed: the same bytes" same shapes-of-two killedt
    check "verify knows every item" sh -c "'$lgsup' verify '$T/killedt' | grep -q 'every item once in an epoch'"
    ;;
esac
echo "$passed passed, $failed failed"
[ $failed = 0 ]
