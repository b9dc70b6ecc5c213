#!/bin/bash
# Several hosts with GPUs (a stand-in for them, tests/stub/cuda.c, which knows whose memory is whose): gradients through pinned
# host memory (hosts.transport = "ucx") and from GPU to GPU ("nccl", here over TCP, tests/stub/link.c): the bytes of a run of
# hosts without GPUs, whoever is killed, and when a host loses its power. HOSTS_SEED chooses the moments. `make check` takes NCCL's
# way alone, `make check-all` both.
. "$(dirname "$0")/lib.sh"
RANDOM=${HOSTS_SEED:=$((SECONDS + $$ % 30000))}
echo "# HOSTS_SEED=$HOSTS_SEED"
. "$(dirname "$0")/hosts_lib.sh"
mkdir "$T/backends"
ln -s "$e2e_build/tests/stub/liblg-cuda.so" "$e2e_build/lib/liblg-host.so" "$T/backends"
export LG_STUB=two LG_STUB_MEMORY=1 LG_STUB_LATE=1 LG_STUB_HOST=$e2e_build/lib/liblg-host.so
keys=(--set trainer.ranks=2 --set trainer.micro_batch_size=2 --set "hosts.shared=$T/shared")

# ends NAME RUN HOST ...: they end in order.
ends() {
    local name=$1 run=$2
    shift 2
    hosts_wait "$run" "$@"
    expect "$name: all end in order" "$(printf '0 %.0s' "$@")" "$codes "
    [ $e2e_failed -eq 0 ] || tail -n 6 "$T/$run"/*.out
}
files_of() { dirname "$(dirname "$(ls -d "$T/$1"/[0-9]*/checkpoints/tiny_step"$2" 2>/dev/null | head -n 1)")"; }
both() { # RUN STEPS [--set ...]: from the beginning to the end
    hosts_start "$1" "${keys[@]}" --set "hosts.shared=$T/shared.$1" --set trainer.max_steps="$2" "${@:3}"
}
gpu() { # TRANSPORT RUN STEPS [--set ...]
    LG_BACKEND_DIR=$T/backends both "$2" "$3" --set device=cuda --set trainer.gpus=0,1 --set "hosts.transport=$1" "${@:4}"
}
pid_on() { # HOST RUN ROLE INDEX: from outside, which takes no time from the run
    if [ "$3" = keeper ]; then
        pgrep -f -- "$e2e_build/bin/lg-keeper $T/x$1/" | head -n 1
    else
        pgrep -f -- "$e2e_build/bin/lg-$3 --run $T/$2/$1 --index $4 " | head -n 1
    fi
}
same_run() { # NAME OF RUN STEPS
    check "$1: byte-identical to hosts without GPUs" same_files "$(files_of "$2" "$4")" "$(files_of "$3" "$4")" "$4"
}

transports="nccl${CHECK_ALL:+ ucx}"
places 2 0
N=20
for zero in ${CHECK_ALL:+1} 2; do
    both host$zero $N --set parallel.zero=$zero
    ends "no GPUs, zero = $zero" host$zero 0 1
    for transport in $transports; do
        gpu $transport $transport$zero $N --set parallel.zero=$zero
        ends "$transport, zero = $zero" $transport$zero 0 1
        same_run "$transport, zero = $zero" host$zero $transport$zero $N
    done
done
check "they did compute on GPUs" grep -q 'device = "cuda"' "$T/nccl2/0/config.toml"

# Processes of both hosts die, exchanges and ranks above all: in the middle of what they send, add, and let go.
N=200
both calm $N --set parallel.zero=2
ends "$N steps" calm 0 1
for transport in $transports; do
    run=$transport.killed killed=0
    gpu $transport $run $N --set parallel.zero=2
    wait_until 100 step_reached "$T/$run/0" 1
    for victim in exchange.0 trainer.1 exchange.1 trainer.0 exchange.0 keeper.0 exchange.1 vae.0; do
        host=$((RANDOM % 2)) pid=
        sleep "0.0$((RANDOM % 10))"
        for _ in {1..50}; do # one that is just being replaced is waited for
            pid=$(pid_on $host $run "${victim%.*}" "${victim#*.}")
            [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && break
            sleep 0.02
            pid=
        done
        [ -z "$pid" ] || step_reached "$T/$run/$host" $N || killed=$((killed + 1))
        echo "# killed $victim of host $host at step $(step_of "$T/$run/$host")"
    done
    ends "$transport, $killed processes killed" $run 0 1
    expect "$transport: kills while it trained" 8 $killed
    same_run "$transport, killed" calm $run $N
done

# The power of a host: a spare takes its number, and the state into the memory of its GPUs.
places 2 1
for transport in $transports; do
    run=$transport.off
    gpu $transport $run $N --set parallel.zero=2
    wait_until 100 step_reached "$T/$run/1" 30
    "$HOSTS" off 1
    echo "# power of host 1 off at step $(step_of "$T/$run/1")"
    ends "$transport, power of a host off" $run 0 2
    same_run "$transport, power of a host off" calm $run $N
    check "$transport: the spare has trained" grep -q 'took state' "$T/$run/2/logs/exchange.0.log"
    "$HOSTS" on 1
done

# Hosts whose GPUs do not reach each other are not scaled to one that is out of reach, whoever asks, and go on.
places 2 0
export LG_STUB=apart
LG_BACKEND_DIR=$T/backends hosts_start apart --set device=cuda --set trainer.micro_batch_size=2 --set trainer.gpus=1 --set vae.gpus=1 \
    --set text.gpus=1,0 --set text.shards=1
wait_until 100 step_reached "$T/apart/0" 3
wait_until 100 step_reached "$T/apart/1" 3
on 0 env LG_STUB=apart timeout 60 "$LGSUP" scale text 2 "$T/apart/0" >"$T/said" 2>&1
expect "scale to GPUs out of reach" 3 $?
expect "each host says why" 2 "$(grep -c 'not done: .*cuda:0 cannot reach the memory of cuda:1, and this run hands over straight' "$T/said")"
wait_until 100 step_reached "$T/apart/1" $(($(step_of "$T/apart/1") + 3))
expect "they go on" 0 $?
expect "nobody was started there" 1 "$(on 1 "$LGSUP" status --json --host 1 "$T/apart/1" | jq '[.instances[] | select(.role == "text")] | length')"
host_stop apart 0
ends "after that" apart 0 1
