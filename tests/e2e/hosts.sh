#!/bin/bash
# Several hosts, as namespaces of this machine with real sockets between them (tests/hosts/hosts.sh): the same bits when
# a run is repeated, on all hosts, however gradients leave, whichever process of which host is killed, and when a host loses
# its power and a spare takes its number. HOSTS_SEED chooses the moments.
. "$(dirname "$0")/lib.sh"
RANDOM=${HOSTS_SEED:=$((SECONDS + $$ % 30000))}
echo "# HOSTS_SEED=$HOSTS_SEED"
export HOSTS_DIR=$T/hosts
H=$e2e_root/tests/hosts/hosts.sh
"$H" able >/dev/null 2>&1 || {
    skip "all of it" "no namespaces for this user and kernel"
    exit 0
}
hosts_down() { "$H" down >/dev/null 2>&1; }
trap 'hosts_down; e2e_cleanup' EXIT
N=40
"$LGSUP" keys "$T/key" >/dev/null || fail "a key"

# One of 40 pictures cannot be read: half of what data.void_ratio_max bears.
mkdir "$T/pictures"
tar -xf "$MICRO/data/micro-00000.tar" -C "$T/pictures"
find "$T/pictures" -type f | sort | tail -n +81 | xargs rm
truncate -s 100 "$(find "$T/pictures" -name '*.png' | sort | head -1)"

# start_hosts RUN MACHINES [--set ...]: on each machine, in the background; pids in ${started[@]}.
start_hosts() {
    local run=$1 machines=$2 i list=
    shift 2
    for ((i = 1; i <= machines; i++)); do list+="${list:+,}\"10.77.0.$i\""; done
    started=()
    mkdir -p "$run" && for ((i = 0; i < machines; i++)); do start_host "$run" "$i" "$list" "$@"; done
}
start_host() { # RUN MACHINE LIST [--set ...]
    local run=$1 i=$2 list=$3
    shift 3
    mkdir -p -m 700 "$T/x$i"
    "$H" exec "$i" env XDG_RUNTIME_DIR="$T/x$i" timeout -k 5 "${TINY_LIMIT_S:-900}" "$LGSUP" start "$TINY" \
        --set "job.dir=$run/$i" --set hosts.count=2 --set "hosts.list=[$list]" --set "hosts.key=$T/key" \
        --set "hosts.shared=$run/shared" --set hosts.silence_ms=3000 --set text.instances=1 --set vae.instances=1 \
        --set trainer.micro_batch_size=2 --set "data.path=$T/pictures" --set "trainer.max_steps=$N" "$@" >>"$run/$i.out" 2>&1 </dev/null &
    started+=($!)
}
# end_hosts NAME RUN: waits for all that were started.
end_hosts() {
    local i code=
    for i in "${started[@]}"; do
        wait "$i"
        code+="$? "
    done
    expect "$1: all end in order" "$(printf '0 %.0s' "${started[@]}")" "$code"
    [ $e2e_failed -eq 0 ] || tail -n 6 "$2"/*.out
}
on() { "$H" exec "$1" env XDG_RUNTIME_DIR="$T/x$1" "${@:2}"; }
# A host that was there from the beginning to step $2; the checkpoints are in a folder that all see.
files_of() {
    local host
    for host in "$1"/[0-9]*; do
        [ -d "$host/checkpoints/tiny_step$2" ] && metrics_are_whole "$host" "$2" >/dev/null 2>&1 && echo "$host" && return
    done
}
same_run() { # NAME RUN
    check "$1: byte-identical at step $N" same_files "$reference" "$(files_of "$2" $N)" $N
    check "$1: losses" cmp <(losses_of "$reference" $N) <(losses_of "$(files_of "$2" $N)" $N)
}

"$H" up 3 || fail "three pretended hosts"
start_hosts "$T/first" 2
end_hosts "a run of two hosts" "$T/first"
reference=$T/first/0
check "the leading host has the files" test -f "$(checkpoint_of "$reference" $N)/manifest.json"
check "the others see the same folder" test "$reference/checkpoints" -ef "$T/first/1/checkpoints"
expect "one host has published it" 1 "$(cat "$T"/first/[01]/logs/ckpt.0.log | grep -c "published .*_step$N in")"
check "the hosts' ledgers are the same" cmp "$reference/ledger" "$T/first/1/ledger"
check "their losses too" cmp <(losses_of "$reference" $N) <(losses_of "$T/first/1" $N)
check "each step once in metrics.jsonl" metrics_are_whole "$T/first/1" $N
check "each sample once: a ledger of $N steps of 8 samples" test "$(stat -c %s "$reference/ledger")" = $((64 * N))
check "verify" on 0 timeout 100 "$LGSUP" verify "$reference"

# Gradients that leave unit by unit, weights that are gathered: what is exchanged is the same.
start_hosts "$T/zero3" 2 --set parallel.zero=3
end_hosts "parallel.zero = 3" "$T/zero3"
same_run "parallel.zero = 3" "$T/zero3"

pid_on() { # MACHINE RUN ROLE INDEX
    on "$1" timeout 20 "$LGSUP" status --json "$2" 2>/dev/null |
        jq -r "[.instances[] | select(.role == \"$3\" and .index == $4) | .pid][0] // 0"
}
# A run that is disturbed has no end of its own; it is stopped, and compared with one of as many steps that nobody disturbs.
endless=(--set trainer.max_steps=1000000)
# stop_hosts NAME RUN HOST: from there all are stopped, at step $N.
stop_hosts() {
    wait_until 300 step_reached "$2/$3" $(($(step_of "$2/$3") + 20))
    on "$3" timeout 300 "$LGSUP" stop "$2/$3" >"$T/stop.out" 2>&1
    end_hosts "$1" "$2"
    N=$(step_of "$2/$3")
    start_hosts "$T/calm$N" 2
    end_hosts "$1: $N steps that nobody disturbs" "$T/calm$N"
    reference=$T/calm$N/0
    same_run "$1" "$2"
}

victims=(loader.0 text.0 vae.0 trainer.0 trainer.1 ema.0 ckpt.0 exchange.0 exchange.1 keeper.0 exchange.0 trainer.1)
start_hosts "$T/killed" 2 "${endless[@]}"
killed=0
wait_until 100 step_reached "$T/killed/0" 1
for victim in "${victims[@]}"; do
    host=$((RANDOM % 2)) pid=0
    sleep "0.0$((RANDOM % 10))"
    for _ in {1..50}; do # one that is just being replaced is waited for
        pid=$(pid_on $host "$T/killed/$host" "${victim%.*}" "${victim#*.}")
        [ "${pid:-0}" -eq 0 ] || break
    done
    [ "${pid:-0}" -ne 0 ] && on $host kill -9 "$pid" 2>/dev/null && killed=$((killed + 1))
    echo "# killed $victim of host $host at step $(step_of "$T/killed/$host")"
done
expect "kills while it trained" ${#victims[@]} $killed
stop_hosts "processes of both hosts killed" "$T/killed" 0
check "the ledger is that of the run that nobody disturbed" cmp "$reference/ledger" "$T/killed/0/ledger"

# A host loses its power, the leading one as well; a spare takes its number, and the state of the other. It counts unreadable
# samples from where the others do: in few samples of its own they would be too many.
for victim in 1 0; do
    name="power of host $victim off" run=$T/off$victim
    start_hosts "$run" 3 --set hosts.spare=1 "${endless[@]}"
    wait_until 100 step_reached "$run/$victim" $((40 + RANDOM % 20))
    "$H" off $victim
    at=$(step_of "$run/$victim")
    echo "# $name at step $at"
    wait "${started[victim]}"
    unset "started[$victim]"
    started=("${started[@]}")
    check "$name: the spare has trained" wait_until 120 step_reached "$run/2" $((at + 20))
    check "$name: with the state of the other" grep -q 'took state' "$run/2/logs/exchange.0.log"
    "$H" on $victim # nothing runs there; what is compared with needs it
    stop_hosts "$name" "$run" $((1 - victim))
done
hosts_down
