#!/bin/bash
# The whole pipeline on a machine with GPUs: a shortened emoji run twice, stopped and resumed, killed,
# with other numbers of encoders, on two GPUs. Every variant must end with the same bytes.
#
# usage: pipeline.sh BUNDLE DATA [option ...]
#   BUNDLE        directory made by `make bundle`
#   DATA          the emoji shards (examples/emoji/data after `make example-data`)
#   --device D    cuda (default) or host: a small net, to try this script without a GPU
#   --steps N     of the short runs (default 60)
#   --kills N     in the run that is killed (default 20); --seed S chooses whom and when
#   --only LIST   letters of a b c d e, see below (default all)
#   --ranks N     of e, each on a GPU of its own with a VAE encoder (default 2)
#   --victims LIST  who dies in e, as "trainer.0 trainer.1" (default: every role)
#   --pipeline FILE  of the bundle, whose job is called emoji (default examples/emoji/pipeline-gpu.toml)
#   --keep        leaves the runs for a look
#   anything else goes to lgsup start: --set KEY=VALUE
#
# Prints ok/FAIL lines, one line per kill, and "N passed, M failed"; exits with 1 when one failed.
# Needs bash, coreutils, sed, awk; neither network nor write access to BUNDLE and DATA.
set -u
export LC_ALL=C
usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
bundle=$(cd "$1" && pwd) && data=$(cd "$2" && pwd) || usage
shift 2
device=cuda steps=60 kills=20 seed=$((SECONDS + $$ % 30000)) only=abcde ranks=2 victims_of_e= keep= pipeline=examples/emoji/pipeline-gpu.toml extra=()
while [ $# -gt 0 ]; do
    case $1 in
    --device) device=$2; shift ;;
    --steps) steps=$2; shift ;;
    --kills) kills=$2; shift ;;
    --seed) seed=$2; shift ;;
    --only) only=$2; shift ;;
    --ranks) ranks=$2; shift ;;
    --victims) victims_of_e=$2; shift ;;
    --pipeline) pipeline=$2; shift ;;
    --keep) keep=1 ;;
    *) extra+=("$1") ;;
    esac
    shift
done
RANDOM=$seed
lgsup=$bundle/bin/lgsup
T=$(mktemp -d /tmp/lgp.XXXXXX) || exit 1 # short: socket paths end at 107 bytes
mkdir -m 700 "$T/r"
export XDG_RUNTIME_DIR=$T/r
export LG_CUDA_CACHE=${LG_CUDA_CACHE:-$T/algorithms.txt}

pids_of() { # DIR: our programs whose command line names it
    local p words
    for p in /proc/[0-9]*; do
        { mapfile -d '' -t words <"$p/cmdline"; } 2>/dev/null || continue
        case ${words[0]-} in "$bundle"/bin/*) ;; *) continue ;; esac
        case "${words[*]}" in *"$1"*) echo "${p#/proc/}" ;; esac
    done
}
cleanup() {
    trap - EXIT
    local left _
    for _ in 1 2 3 4 5; do
        left=$(pids_of "$T")
        [ -n "$left" ] || break
        kill -9 $left 2>/dev/null
        sleep 0.2
    done
    if [ -n "$keep" ]; then echo "# kept $T"; else rm -rf "$T"; fi
}
trap cleanup EXIT
trap 'echo "FAIL interrupted"; exit 1' INT TERM HUP

passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1${2:+ -- $2}"; failed=$((failed + 1)); }
check() { # NAME COMMAND...
    local name=$1 out
    shift
    if out=$("$@" 2>&1); then ok "$name"; else fail "$name" "$(printf %s "${out:-$*}" | tail -3 | tr '\n' ' ')"; fi
}
now_ms() { local t=${EPOCHREALTIME/./}; echo "${t%???}"; }

# ---- runs ----

if [ "$device" = host ]; then
    small=(--set precision=fp32 --set trainer.global_batch_size=8 --set trainer.micro_batch_size=4
        --set loader.chunk=4 --set text.chunk=4 --set vae.chunk=4 --set loader.instances=1)
    [[ $pipeline != *pipeline-gpu.toml ]] || small+=(--set model.hidden=64 --set model.depth=2 --set model.heads=4)
    gpus=0
else
    # Half the batch fits two ranks too: the same micro-batch everywhere.
    small=(--set trainer.micro_batch_size=256)
    visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)}
    gpus=$(tr ', ' '\n\n' <<<"$visible" | grep -c .)
fi
# start RUN STEPS [...]: to its end or until it is stopped; its exit status.
start() {
    local run=$1 n=$2
    shift 2
    timeout --foreground -k 5 "${RUN_LIMIT_S:-200}" "$lgsup" start "$bundle/$pipeline" \
        --set device="$device" --set data.path="$data" --set job.dir="$run" --set 'sample.captions=[]' \
        --set trainer.lr_steps=1000 --set trainer.max_steps="$n" --set checkpoint.every="${every:-$n}" \
        "${small[@]}" ${extra[@]+"${extra[@]}"} "$@" >>"$run.out" 2>&1 </dev/null
}
finished() { # NAME STATUS RUN
    if [ "$2" = 0 ]; then ok "$1"; else fail "$1" "exit $2: $(tail -3 "$3.out" | tr '\n' ' ')"; fi
}
step_of() {
    local s
    s=$(tail -n 1 "$1/metrics.jsonl" 2>/dev/null | sed -n 's/^{"step": *\([0-9]*\),.*/\1/p')
    echo "${s:-0}"
}
# wait_step RUN STEP SECONDS
wait_step() {
    local end=$((SECONDS + $3))
    until [ "$(step_of "$1")" -ge "$2" ]; do
        [ $SECONDS -lt $end ] && kill -0 "$running" 2>/dev/null || return 1
        sleep 0.01
    done
}
pid_of() { # RUN ROLE INDEX
    timeout 10 "$lgsup" status --json "$1" 2>/dev/null | tr -d '[:space:]' |
        grep -o "\"role\":\"$2\",\"index\":$3,\"pid\":[0-9]*" | grep -o '[0-9]*$'
}
same() { # RUN_A RUN_B STEP: checkpoints, ledger and losses
    local f n=0 a=$1/checkpoints/emoji_step$3 b=$2/checkpoints/emoji_step$3
    for f in $(cd "$a" && find . -name '*.safetensors'); do
        cmp "$a/$f" "$b/$f" || return 1
        n=$((n + 1))
    done
    [ $n -ge 3 ] || { echo "$n files in $a"; return 1; }
    cmp "$1/ledger" "$2/ledger"
}
forget() { [ -n "$keep" ] || rm -rf "$@"; }
rate() { # RUN STEPS: of the second half, samples/s (median) and how much of the time rank 0 waited for data
    tail -n "$(($2 / 2))" "$1/metrics.jsonl" |
        sed -n 's/.*"samples_per_s": *\([0-9.]*\), *"data_wait_s": *\([0-9.]*\),.*"time": *\([0-9.]*\).*/\1 \2 \3/p' |
        sort -n | awk '{ v[NR] = $1; wait += $2; if (NR == 1 || $3 < t0) t0 = $3; if ($3 > t1) t1 = $3 }
            END { printf "%.0f samples/s, rank 0 waited for data %.2f %%", v[int((NR + 1) / 2)], (t1 > t0) ? 100 * wait / (t1 - t0) : 0 }'
}

# The process of the last `start` in the background.
lgsup_of() { # RUN
    local p
    for p in $(pids_of "$1"); do
        case $(tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null) in "$lgsup start "*) echo "$p" ;; esac
    done | head -1
}

# kill_many NAME RUN STEPS KILLS ROLES... -- START_OPTIONS...: kills while it trains. The k-th kill comes
# a random moment after a random step of 5k+1 .. 5k+5, so fast and slow machines kill alike. A killed
# lgsup is started again at once, as an operator would.
kill_many() {
    local name=$1 run=$2 n=$3 count=$4 roles=() victims=() times=() i j swap pid t0 at ms
    shift 4
    while [ "$1" != -- ]; do roles+=("$1"); shift; done
    shift
    for ((i = 0; i < count; i++)); do # every role once, then at random
        if [ $i -lt ${#roles[@]} ]; then victims+=("${roles[i]}"); else victims+=("${roles[RANDOM % ${#roles[@]}]}"); fi
    done
    for ((i = count - 1; i > 0; i--)); do
        j=$((RANDOM % (i + 1))) swap=${victims[i]} victims[i]=${victims[j]} victims[j]=$swap
    done
    start "$run" "$n" "$@" 2>/dev/null &
    running=$!
    local killed=0 supervisors=0 by_role=
    for ((i = 0; i < count; i++)); do
        at=$((1 + 5 * i + RANDOM % 5)) ms=$((RANDOM % 60))
        wait_step "$run" $at 60 || break
        sleep "0.$(printf %03d $ms)"
        pid=
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            if [ "${victims[i]}" = lgsup ]; then
                pid=$(lgsup_of "$run")
            else
                pid=$(pid_of "$run" "${victims[i]%.*}" "${victims[i]#*.}")
            fi
            [ "${pid:-0}" -gt 0 ] && kill -9 "$pid" 2>/dev/null && break
            pid=
            sleep 0.05
        done
        [ -n "$pid" ] || { echo "# no process ${victims[i]} to kill"; continue; }
        at=$(step_of "$run") t0=$(now_ms)
        if [ "${victims[i]}" = lgsup ]; then
            wait $running 2>/dev/null
            start "$run" "$n" "$@" 2>/dev/null &
            running=$! supervisors=$((supervisors + 1))
        fi
        wait_step "$run" $((at + 1)) 60 || break
        times+=($(($(now_ms) - t0)))
        by_role+="${victims[i]} ${times[-1]}"$'\n'
        killed=$((killed + 1))
        echo "# kill $killed ${victims[i]} at step $at: next commit after ${times[-1]} ms"
    done
    wait $running
    finished "$name: completes by itself" $? "$run"
    if [ $killed = "$count" ]; then ok "$name: $count kills, $supervisors of them of lgsup"; else fail "$name: $count kills" "only $killed"; fi
    printf '%s\n' ${times[@]+"${times[@]}"} | sort -n | awk -v what="$name" 'NF { v[++n] = $1 } END {
        if (n) printf "# %s: kill to next commit p50 %d ms, p99 %d ms, max %d ms of %d (seed '"$seed"')\n",
            what, v[int((n + 1) / 2)], v[int(n * 0.99 + 0.999)], v[n], n }'
    printf %s "$by_role" | sort -k1,1 -k2,2n | awk -v what="$name" '
        function told() { if (n) printf "# %s: %-9s %3d kills, median %d ms, longest %d ms\n", what, last, n, v[int((n + 1) / 2)], v[n] }
        $1 != last { told(); n = 0; last = $1 } { v[++n] = $2 } END { told() }'
}

echo "# $device, $gpus GPUs, $steps steps, $kills kills, seed $seed"
started=$SECONDS

# a: two runs are byte-identical. The first one is the reference of b and d.
case $only in *[abd]*)
    start "$T/a1" "$steps"
    finished "a: a run of $steps steps" $? "$T/a1"
    [ $failed = 0 ] || { cat "$T/a1.out"; for l in "$T"/a1/logs/*; do echo "== $l"; tail -5 "$l"; done; exit 1; }
    echo "# $(rate "$T/a1" "$steps")" ;;
esac
case $only in *a*)
    start "$T/a2" "$steps"
    finished "a: again" $? "$T/a2"
    check "a: byte-identical" same "$T/a1" "$T/a2" "$steps"
    check "a: verify" timeout 60 "$lgsup" verify "$T/a2"
    forget "$T/a2" ;;
esac

# b: stopped halfway, started again.
case $only in *b*)
    start "$T/b" "$steps" &
    running=$!
    wait_step "$T/b" $((steps / 2)) 120 || fail "b: reaches half"
    timeout 60 "$lgsup" stop "$T/b" >>"$T/b.out" 2>&1
    wait $running
    half=$(step_of "$T/b")
    if [ "$half" -ge $((steps / 2)) ] && [ "$half" -lt "$steps" ]; then ok "b: stopped at step $half"; else fail "b: stopped halfway" "at $half"; fi
    start "$T/b" "$steps"
    finished "b: resumed to its end" $? "$T/b"
    check "b: byte-identical" same "$T/a1" "$T/b" "$steps"
    forget "$T/b" ;;
esac

# c: kill -9 over all roles.
case $only in *c*)
    n=$((5 * kills + 10)) every=20
    start "$T/c1" $n
    finished "c: an undisturbed run of $n steps" $? "$T/c1"
    echo "# $(rate "$T/c1" $n)"
    kill_many c "$T/c2" $n "$kills" loader.0 text.0 vae.0 trainer.0 ema.0 ckpt.0 keeper.0 lgsup --
    check "c: byte-identical" same "$T/c1" "$T/c2" $n
    every=
    forget "$T/c1" "$T/c2" ;;
esac

# d: the number of encoders changes nothing.
case $only in *d*)
    where=0
    [ "$gpus" -ge 2 ] && where=0,1
    start "$T/d" "$steps" --set vae.instances=2 --set vae.gpus=$where --set text.instances=2 --set text.shards=1
    finished "d: two VAE, two text instances${where#0}" $? "$T/d"
    check "d: byte-identical" same "$T/a1" "$T/d" "$steps"
    forget "$T/d" ;;
esac
forget "$T/a1"

# e: ranks on a GPU each (on the host: that many ranks), undisturbed and killed.
case $only in *e*)
    if [ "$gpus" -ge "$ranks" ] || [ "$device" = host ]; then
        each=$(seq -s, 0 $((ranks - 1)))
        several=(--set trainer.ranks="$ranks" --set vae.instances="$ranks")
        if [ "$device" = host ]; then
            [ "$ranks" -le 2 ] || several+=(--set trainer.micro_batch_size=$((8 / ranks)))
        else
            several+=(--set trainer.gpus="$each" --set vae.gpus="$each")
            [ "$ranks" -le 2 ] || several+=(--set trainer.micro_batch_size=$((512 / ranks)))
        fi
        [ -n "$victims_of_e" ] || victims_of_e="$(printf 'trainer.%d ' ${each//,/ }) $(printf 'vae.%d ' ${each//,/ }) text.0 ema.0 ckpt.0 loader.0 keeper.0 lgsup"
        every=20
        n=$((5 * kills + 10))
        start "$T/e1" $n "${several[@]}"
        finished "e: $ranks ranks, $n steps" $? "$T/e1"
        echo "# $(rate "$T/e1" $n)"
        kill_many e "$T/e2" $n "$kills" $victims_of_e -- "${several[@]}"
        check "e: byte-identical" same "$T/e1" "$T/e2" $n
    else
        echo "skip e: needs $ranks GPUs"
    fi ;;
esac

echo "# $((SECONDS - started)) s"
echo "$passed passed, $failed failed"
[ $failed = 0 ]
