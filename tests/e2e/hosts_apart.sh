#!/bin/bash
# Several hosts: the same bits in every run, whatever machine, network or lgsup is lost.
. "$(dirname "$0")/lib.sh"
. "$(dirname "$0")/hosts_lib.sh"

# same_hosts NAME RUN STEP OF: the checkpoint and what led to it are the undisturbed run's.
same_hosts() {
    local run=$T/$2/$4
    undisturbed_hosts "$3"
    check "$1: byte-identical to an undisturbed run at step $3" same_files "$plain" "$run" "$3"
    check "$1: the ledger is the undisturbed run's" cmp -n $((64 * $3)) "$plain/ledger" "$run/ledger"
}
# One undisturbed run of as many hosts, which goes on as far as it is needed; its first host in $plain. Where it left that
# checkpoint out, since the one before was being written, one that ends there.
undisturbed_hosts() { # STEP
    plain=$T/plain$hosts_count/0
    [ -d "$(checkpoint_of "$plain" "$1")" ] && return
    places "$hosts_count" 0 "${hosts_batch[@]}"
    if ! has_checkpoint_after "$plain" "$1"; then
        hosts_start "plain$hosts_count"
        check "an undisturbed run of $hosts_n hosts" wait_until 600 has_checkpoint_after "$plain" $(($1 - 1))
        host_stop "plain$hosts_count" 0
        hosts_ended "plain$hosts_count"
        [ -d "$(checkpoint_of "$plain" "$1")" ] && return
    fi
    plain=$T/plain$hosts_count.$1/0
    [ -d "$(checkpoint_of "$plain" "$1")" ] && return
    hosts_start "plain$hosts_count.$1" --set trainer.max_steps="$1"
    hosts_ended "plain$hosts_count.$1"
}
hosts_ended() { # RUN
    hosts_wait "$1" $(seq 0 $((hosts_n - 1)))
    check "it ends in order on all" test -z "${codes//[0 ]/}"
}
hosts_batch=() # --set ...: what makes bits, besides the number of hosts
# settle_hosts NAME RUN HOST CODES I...: a checkpoint after what happened, then HOST stops all; the lgsups of hosts I
# end with CODES.
settle_hosts() {
    local name=$1 run=$2 host=$3 wanted=$4 at found
    shift 4
    at=$(step_of "$T/$run/$host")
    check "$name: goes on after step $at" wait_until 300 hosts_have_checkpoint_after "$run" "$at"
    found=$(hosts_checkpoint_after "$run" "$at")
    host_stop "$run" "$host"
    hosts_wait "$run" "$@"
    expect "$name: stopped from host $host; exit codes" "$wanted" "$codes"
    [ $e2e_failed -eq 0 ] || tail -n 8 "$T/$run"/*.out
    "$HOSTS" down
    [ -z "$found" ] || same_hosts "$name" "$run" "${found#* }" "${found% *}"
}

# Twice, once stopped from the host that does not lead.
hosts_count=2
undisturbed_hosts 60
places 2 0
hosts_start again
wait_until 300 hosts_have_checkpoint_after again 40
settle_hosts "a second time" again 1 "0 0" 0 1

# A machine is lost, and the spare takes its number.
places 2 1 --set "hosts.shared=$T/shared.lost"
hosts_start lost
wait_step "$T/lost/0" 30
"$HOSTS" off 1
check "a lost machine is noticed" wait_until 60 said lost 0 "epoch 2: host 0 of 2"
check "the spare takes its number" wait_until 120 said lost 2 "host 1 of 2, from step"
settle_hosts "a machine is lost" lost 0 "0 0" 0 2

# The one that leads.
places 2 1 --set "hosts.shared=$T/shared.leader"
hosts_start leader
wait_step "$T/leader/1" 30
"$HOSTS" off 0
check "the other one leads" wait_until 60 said leader 1 "host 1 leads"
settle_hosts "the leader is lost" leader 1 "0 0" 1 2

# A cut after which neither side is more than half: both wait, in the same epoch, and go on when it is healed.
places 2 0
hosts_start half
wait_step "$T/half/0" 30
"$HOSTS" cut 1
for i in 0 1; do check "half of the hosts decides nothing: host $i" wait_until 60 said half $i "too few hosts are left"; done
at=$(step_of "$T/half/0")
"$HOSTS" heal
check "healed, they go on" wait_step "$T/half/0" $((at + 5)) 120
check "in the epoch in which they were" test "$(grep -c 'hosts: epoch' "$T/half/0.out")" = 1
settle_hosts "a cut without a majority" half 1 "0 0" 0 1

# A power loss after which what is left is not more than half: the operator says that it goes on.
places 2 0
hosts_start half.lost
wait_step "$T/half.lost/0" 20
"$HOSTS" off 1
"$HOSTS" on 1
host_start half.lost 1
check "a machine that comes back says what it waits for" wait_until 60 said half.lost 1 "the run has lost host 1: this one waits"
check "the operator lets the other one go on" on 0 timeout 60 "$LGSUP" hosts --take "$T/half.lost/0"
check "which takes the machine in again" wait_until 120 said half.lost 1 "host 1 of 2, from step [1-9]"
settle_hosts "half of the hosts is lost" half.lost 0 "0 0" 0 1

# Of three two decide, and go on with the spare; the one that is alone stops and says so when it hears of them.
hosts_batch=(--set trainer.global_batch_size=12)
places 3 1 "${hosts_batch[@]}"
hosts_start cut
wait_step "$T/cut/0" 20
"$HOSTS" cut 2
check "a host is cut off" wait_until 60 said cut 0 "epoch 2: hosts 0, 1 of 3"
check "alone it decides nothing" wait_until 60 said cut 2 "too few hosts are left"
check "the spare takes its number" wait_until 120 said cut 3 "host 2 of 3, from step"
at=$(step_of "$T/cut/2")
check "the majority goes on while it is cut off" wait_step "$T/cut/0" $((at + 10)) 120
check "it makes no step" test "$(step_of "$T/cut/2")" = "$at"
"$HOSTS" heal
hosts_wait cut 2
expect "and has lost when it hears of the others" 7 "$codes"
check "which it says" said cut 2 "goes on without this host"
host_start cut 2
check "started again it is a spare" wait_until 60 said cut 2 "this one waits until one is lost"
settle_hosts "a cut with a majority" cut 1 "0 0 0 0" 0 1 2 3
