#!/bin/bash
# Two hosts on a machine with two GPUs: two supervisors at two loopback addresses, a GPU each; between them UCX through pinned host
# memory, and NCCL over sockets (its ways within a machine are off). A shortened emoji run each: repeated, and killed on the way.
#
# usage: hosts.sh BUNDLE DATA [--steps N] [--kills N] [--only LIST]
#   BUNDLE   directory made by `make bundle`; DATA: the emoji shards
#   LIST     letters of  u: ucx  n: nccl  and of what is done over them, r: undisturbed, again  2: with gradients that leave unit by
#            unit (zero = 2)  k: killed, every role  b: rates: of the exchange, and of NCCL's send and receive (needs PyTorch)   (default all)
#
# Prints ok/FAIL lines, samples a second, and "N passed, M failed"; exits with 1 when one failed. $LG_NCCL names libnccl.so.2 where the
# loader does not find it. KEEP_LOGS: a folder for the logs of what failed.
set -u
export LC_ALL=C
usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
bundle=$(cd "$1" && pwd) && data=$(cd "$2" && pwd) || usage
shift 2
steps=100 kills=20 only=unr2kb
while [ $# -gt 0 ]; do
    case $1 in
    --steps) steps=$2 ;;
    --kills) kills=$2 ;;
    --only) only=$2 ;;
    *) usage ;;
    esac
    shift 2
done
lgsup=$bundle/bin/lgsup gpu=$(cd "$(dirname "$0")" && pwd)
T=$(mktemp -d /tmp/lgh.XXXXXX) || exit 1 # short: socket paths end at 107 bytes
mkdir -m 700 "$T/r0" "$T/r1"
# Algorithms that are chosen by their time decide bits: both hosts read one file.
export LG_CUDA_CACHE=${LG_CUDA_CACHE:-$T/algorithms.txt}
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo UCX_NET_DEVICES=lo
host() { CUDA_VISIBLE_DEVICES=$1 XDG_RUNTIME_DIR=$T/r$1 "${@:2}"; } # I COMMAND ...: on host I
trap 'for d in "$T"/*/[01]/; do i=$(basename "$d"); host "$i" "$lgsup" stop --kill "$d" >/dev/null 2>&1; done; rm -rf "$T"' EXIT
passed=0 failed=0 port=17000
check() { # WHAT COMMAND...
    local what=$1
    shift
    if "$@" >"$T/said" 2>&1; then
        echo "ok   $what$(sed -n 's/^\([0-9]* kills.*\)$/: \1/p' "$T/said")"
        passed=$((passed + 1))
    else
        echo "FAIL $what: $(tail -n 3 "$T/said" | tr '\n' ' ')"
        failed=$((failed + 1))
    fi
}
keys=(--set data.path="$data" --set trainer.max_steps=$steps --set checkpoint.every=0 --set 'sample.captions=[]' --set trainer.ranks=1
    --set trainer.micro_batch_size=256 --set trainer.warmup_steps=5 --set supervisor.restarts_max=1000)
start() { # NAME I TRANSPORT [...]: host I
    local name=$1 i=$2 transport=$3
    shift 3
    host "$i" timeout -k 5 "${RUN_LIMIT_S:-150}" "$lgsup" start "$bundle/examples/emoji/pipeline-gpu.toml" "${keys[@]}" \
        --set job.dir="$T/$name/$i" --set hosts.count=2 --set 'hosts.list=["127.0.0.1","127.0.0.2"]' --set hosts.number="$i" \
        --set hosts.port=$port --set hosts.key="$T/key" --set hosts.shared="$T/$name/shared" --set hosts.silence_ms=5000 \
        --set hosts.transport="$transport" "$@" >"$T/$name.$i.out" 2>&1 &
    own[i]=$!
}
both() { # NAME TRANSPORT [...]
    mkdir -p "$T/$1"
    port=$((port + 10)) own=()
    local name=$1
    start "$name" 0 "${@:2}"
    start "$name" 1 "${@:2}"
}
ended() { # NAME
    local i code=0
    for i in 0 1; do wait "${own[i]}" || code=$?; done
    [ $code = 0 ] && return
    [ -z "${KEEP_LOGS-}" ] || { mkdir -p "$KEEP_LOGS/$1" && cp -r "$T/$1"/[01]/logs "$T/$1".[01].out "$KEEP_LOGS/$1/" 2>/dev/null; }
    echo "exit $code: $(tail -qn 3 "$T/$1".[01].out | tr '\n' ' ')"
    return 1
}
run() {
    both "$@"
    ended "$1"
}
rate() { # of the second half
    awk -v from=$((steps / 2)) -v batch=512 'match($0, /"step": [0-9]+/) {
        step = substr($0, RSTART + 8, RLENGTH - 8) + 0; match($0, /"time": [0-9.]+/)
        t = substr($0, RSTART + 8, RLENGTH - 8); if (step == from) t0 = t; last = t; n = step }
        END { if (last > t0) printf "%.0f samples/s", (n - from) * batch / (last - t0) }' "$T/$1/0/metrics.jsonl"
}
timed() { # NAME TRANSPORT [...]
    check "$1 completes" run "$@"
    echo "     $1: $(rate "$1")"
}
files_of() { dirname "$(ls -d "$T/$1"/[01]/checkpoints/emoji_step$steps/manifest.json 2>/dev/null | head -n 1)"; }
same() { # NAME NAME
    local a b f n=0
    a=$(files_of "$1") b=$(files_of "$2")
    for f in $(cd "$a" && find . -name '*.safetensors'); do
        cmp "$a/$f" "$b/$f" || return 1
        n=$((n + 1))
    done
    [ $n -ge 3 ] || { echo "$n files in a checkpoint"; return 1; }
}
killed() { # NAME TRANSPORT [...]: processes of both hosts die, one after the other, of every role
    local name=$1 pid n=0 roles=(exchange trainer vae text loader ema ckpt keeper) by=() role i
    both "$@"
    while kill -0 "${own[0]}" 2>/dev/null && [ $n -lt "$kills" ]; do
        sleep 0.$((RANDOM % 9 + 1))
        [ -s "$T/$name/0/metrics.jsonl" ] || continue
        role=${roles[n % ${#roles[@]}]} i=$((RANDOM % 2))
        pid=$(pgrep -f -- "$bundle/bin/lg-$role .*$(if [ $role = keeper ]; then echo "$T/r$i/"; else echo "$T/$name/$i "; fi)" | shuf -n 1)
        [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && n=$((n + 1)) && by+=("$role") && sleep 0.5
    done
    ended "$name" || return 1
    echo "$n kills, $(printf '%s\n' "${by[@]}" | sort | uniq -c | awk '{printf "%s%s %s", (NR > 1 ? ", " : ""), $1, $2}')"
    [ $n -gt 0 ]
}
has() { case $only in *$1*) return 0 ;; esac; return 1; }

"$lgsup" keys "$T/key" >/dev/null || exit 1
if has b; then
    for args in "ucx host 600 6" "nccl cuda 600 6" "nccl cuda 2700 3"; do
        timeout -k 2 90 "$gpu/bin/bench_hosts_cuda" $args 2>&1 | tail -n 3 || true
    done
    timeout -k 2 90 python3 "$gpu/peer_sendrecv.py" 16 64 256 2>&1 | grep 'send and receive' || echo "no PyTorch"
fi
timed ucx ucx # finds the algorithms, too
if has u && has r; then
    timed ucx-again ucx
    check "ucx: the same bytes again" same ucx ucx-again
fi
if has n && has r; then
    timed nccl nccl
    check "nccl: the bytes of ucx" same ucx nccl
    timed nccl-again nccl
    check "nccl: the same bytes again" same nccl nccl-again
fi
if has 2; then
    for transport in ucx nccl; do
        has ${transport:0:1} || continue
        timed $transport-zero2 $transport --set parallel.zero=2
        check "$transport, zero = 2: the same bytes" same ucx $transport-zero2
    done
fi
if has k; then
    for transport in nccl ucx; do
        has ${transport:0:1} || continue
        check "$transport, killed" killed $transport-killed $transport
        check "$transport, killed: the same bytes" same ucx $transport-killed
    done
fi
echo "$passed passed, $failed failed"
[ $failed = 0 ]
