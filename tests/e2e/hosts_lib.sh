# Runs of several pretended hosts (tests/hosts/hosts.sh); sourced after lib.sh. Host i has job.dir $T/<run>/<i>.
HOSTS=$e2e_root/tests/hosts/hosts.sh
export HOSTS_DIR=$T/hosts
if ! "$HOSTS" able; then
    skip "several hosts" "this user or kernel cannot make namespaces with a network (root, or unshare -Ur)"
    exit 0
fi
hosts_cleanup() {
    "$HOSTS" down
    e2e_cleanup
}
trap hosts_cleanup EXIT

# places COUNT SPARE [--set ...]: the machines of the runs that follow.
places() {
    hosts_count=$1 hosts_spare=$2 hosts_n=$(($1 + $2))
    local i list=
    for ((i = 0; i < hosts_n; i++)); do list="$list${list:+,}\"10.77.0.$((i + 1))\""; done
    hosts_keys=(--set "hosts.count=$1" --set "hosts.spare=$2" --set "hosts.list=[$list]" --set "hosts.key=$T/key"
        --set trainer.ranks=1 --set text.instances=1 --set vae.instances=1 --set trainer.max_steps=1000000
        --set checkpoint.keep=1000000 --set "hosts.silence_ms=${SILENCE_MS:-1000}" "${@:3}")
    [ -e "$T/key" ] || "$LGSUP" keys "$T/key" >/dev/null
    "$HOSTS" down && "$HOSTS" up $hosts_n || { fail "pretended hosts"; exit 1; }
}
on() { # I COMMAND ...: on host I
    local i=$1
    shift
    mkdir -p "$T/x$i"
    chmod 700 "$T/x$i"
    "$HOSTS" exec "$i" env XDG_RUNTIME_DIR="$T/x$i" "$@"
}
declare -A host_pid
host_start() { # RUN I [--set ...]: in the background
    local run=$1 i=$2
    shift 2
    mkdir -p "$T/$run"
    on "$i" timeout -k 5 "${TINY_LIMIT_S:-900}" "$LGSUP" start "$TINY" --set "job.dir=$T/$run/$i" "${hosts_keys[@]}" "$@" \
        >>"$T/$run/$i.out" 2>&1 </dev/null &
    host_pid[$run.$i]=$!
}
hosts_start() { # RUN [--set ...]: on all
    local i run=$1
    shift
    for ((i = 0; i < hosts_n; i++)); do host_start "$run" "$i" "$@"; done
}
host_stop() { # RUN I: from there all are stopped
    on "$2" timeout 120 "$LGSUP" stop "$T/$1/$2" >"$T/stop.out" 2>&1
}
hosts_wait() { # RUN I ...: their exit codes in $codes
    local i run=$1
    codes=
    shift
    for i; do
        wait "${host_pid[$run.$i]}"
        codes="$codes${codes:+ }$?"
    done
}
said() { grep -q "$3" "$T/$1/$2.out"; } # RUN I TEXT
# The newest of all hosts' checkpoints after that step, as "HOST STEP"; a host that has the ledger up to there.
hosts_checkpoint_after() { # RUN STEP
    local i at
    for ((i = 0; i < hosts_n; i++)); do
        at=$(checkpoint_after "$T/$1/$i" "$2")
        [ -n "$at" ] && [ "$(stat -c %s "$T/$1/$i/ledger")" -ge $((64 * at)) ] && echo "$i $at" && return
    done
    return 1
}
hosts_have_checkpoint_after() { [ -n "$(hosts_checkpoint_after "$@")" ]; }
