#!/bin/bash
# Several hosts with GPUs (a stand-in for them, tests/stub/cuda.c, which knows whose memory is whose): gradients through pinned
# host memory (hosts.transport = "ucx") and from GPU to GPU ("nccl", here over TCP, tests/stub/link.c): the bytes of a run of
# hosts without GPUs, whoever is killed, and when a host loses its power. HOSTS_SEED chooses the moments.
. "$(dirname "$0")/lib.sh"
RANDOM=${HOSTS_SEED:=$((SECONDS + $$ % 30000))}
echo "# HOSTS_SEED=$HOSTS_SEED"
. "$(dirname "$0")/hosts_lib.sh"
mkdir "$T/backends"
ln -s "$e2e_build/tests/stub/liblg-cuda.so" "$e2e_build/lib/liblg-host.so" "$T/backends"
export LG_STUB=two LG_STUB_MEMORY=1 LG_STUB_LATE=1 LG_STUB_HOST=$e2e_build/lib/liblg-host.so
keys=(--set trainer.ranks=2 --set trainer.micro_batch_size=2 --set "hosts.shared=$T/shared")

# ends NAME RUN STEPS HOST ...: they end in order, and the leading host has the files.
ends() {
    local name=$1 run=$2 n=$3
    shift 3
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
pid_on() { # HOST RUN ROLE INDEX
    on "$1" timeout 20 "$LGSUP" status --json "$T/$2/$1" 2>/dev/null |
        jq -r "[.instances[] | select(.role == \"$3\" and .index == $4) | .pid][0] // 0"
}

places 2 1
N=20
hosts_n=2
for zero in 1 2; do
    both "host$zero" $N --set parallel.zero=$zero --set hosts.spare=0 --set 'hosts.list=["10.77.0.1","10.77.0.2"]'
    ends "no GPUs, zero = $zero" "host$zero" $N 0 1
    for transport in ucx nccl; do
        run=$transport$zero
        gpu $transport "$run" $N --set parallel.zero=$zero --set hosts.spare=0 --set 'hosts.list=["10.77.0.1","10.77.0.2"]'
        ends "$transport, zero = $zero" "$run" $N 0 1
        check "$transport, zero = $zero: byte-identical to hosts without GPUs" same_files "$(files_of "host$zero" $N)" "$(files_of "$run" $N)" $N
    done
done
