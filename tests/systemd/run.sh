#!/bin/bash
# A run as units of a real systemd: kills of roles, of the keeper, of lgsup, of everything at once;
# restart and stop of lgsup, scale; the result is byte-identical to an undisturbed run. A run has no end of
# its own but one, so that no machine is too slow or too quick for what is done to it.
#
# usage: tests/systemd/run.sh [BUILD]
#
# Boots the machine's own system, as a container without a network, over an overlay of / whose
# changes are thrown away. Needs root, systemd-nspawn (Debian: systemd-container) and overlayfs; where
# one is missing it prints "skip" with the reason and ends with 77.
. "$(dirname "$0")/../e2e/lib.sh"
e2e_name=systemd
endless="--set trainer.max_steps=1000000 --set checkpoint.keep=1000000"
BOOT_S_MAX=60

leave_out() {
    skip "the whole test" "$1"
    exit 77
}
[ "$(id -u)" -eq 0 ] || leave_out "not root"
command -v systemd-nspawn >/dev/null || leave_out "no systemd-nspawn (apt-get install systemd-container)"
[ -x /lib/systemd/systemd ] || leave_out "no systemd to boot (apt-get install systemd-sysv)"

# ---- the container ----

init=0
inside() { nsenter -t "$init" -a env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C "$@"; }
end_container() {
    # The death of its init takes every process of the container along; nspawn follows.
    [ "$init" -eq 0 ] || kill -9 "$init" 2>/dev/null
    [ -z "${nspawn_pid:-}" ] || { wait_until 20 is_gone "$nspawn_pid" || kill -9 "$nspawn_pid"; }
}
trap 'end_container; e2e_cleanup' EXIT

mkdir "$T/overlay" "$T/root" "$T/run"
mount -t tmpfs -o size=1g,mode=755 none "$T/overlay" || leave_out "cannot mount a tmpfs"
e2e_mounts=("$T/overlay")
mkdir "$T/overlay/upper" "$T/overlay/work"
mount -t overlay -o "lowerdir=/,upperdir=$T/overlay/upper,workdir=$T/overlay/work" overlay "$T/root" 2>"$T/mount.err" ||
    leave_out "no overlay of /: $(head -1 "$T/mount.err")"
e2e_mounts=("$T/root" "$T/overlay")
# Only what a service needs: nothing of this machine's own services and timers.
mkdir -p "$T/root/etc/systemd/system"
for u in timers.target getty.target multi-user.target; do ln -sfn /dev/null "$T/root/etc/systemd/system/$u"; done

find_init() {
    [ -r "/proc/$nspawn_pid/task/$nspawn_pid/children" ] || return 1
    read -r init _ <"/proc/$nspawn_pid/task/$nspawn_pid/children"
    [ "${init:-0}" -gt 0 ] && [ "$(cat "/proc/$init/comm")" = systemd ]
}
is_booted() { inside systemctl is-active basic.target; }
systemd-nspawn -D "$T/root" -b --register=no --keep-unit --private-network --link-journal=no \
    --bind-ro="$e2e_root:/lg/src" --bind-ro="$e2e_build:/lg/build" --bind="$T/run:/lg/run" \
    systemd.unit=basic.target </dev/null >"$T/boot.log" 2>&1 &
nspawn_pid=$!
if ! wait_until 20 find_init || ! wait_until $BOOT_S_MAX is_booted; then
    tail -5 "$T/boot.log"
    leave_out "systemd does not boot in a container here: $(tail -1 "$T/boot.log")"
fi

# ---- looks ----

RUN=/lg/run/tiny HERE=$T/run/tiny
unit_value() { inside systemctl show -p "$2" --value "$1"; }
main_pid() { unit_value "$1" MainPID; }
active_is() { [ "$(unit_value "$1" ActiveState)" = "$2" ]; }
sub_is() { [ "$(unit_value "$1" SubState)" = "$2" ]; }
status_value() { inside /lg/build/bin/lgsup status --json "$RUN" 2>/dev/null | jq -r "$1"; }
stage_units="lg-loader@0 lg-text@0 lg-text@1 lg-vae@0 lg-vae@1 lg-trainer@0 lg-trainer@1 lg-ema@0 lg-ckpt@0"
stage_pids() { for u in $stage_units; do echo "$u=$(main_pid "$u")"; done; }
kill_unit() { inside systemctl kill -s KILL --kill-who=main "$1.service"; }
grows() { [ "$(step_of "$HERE")" -ge "$1" ]; }
# goes_on NAME: more steps than now
goes_on() { check "$1" wait_until 600 grows $(($(step_of "$HERE") + 3)); }
# new_main UNIT PID: another process fills the unit, and it works
new_main() { local p; p=$(main_pid "$1"); [ "${p:-0}" -gt 0 ] && [ "$p" -ne "$2" ] && active_is "$1" active; }
# live_value LGSUP FILTER: of the status while it runs, seen from its own mounts (a container's boot id is
# not the same everywhere)
live_value() { inside nsenter -t "$(main_pid "$1")" -m /lg/build/bin/lgsup status --json "$RUN" 2>/dev/null | jq -r "$2"; }
live_is() { [ "$(live_value "$1" "$2")" = "$3" ]; }
# instance_ready ROLE INDEX
instance_ready() { live_value lgsup "[.instances[] | select(.role == \"$1\" and .index == $2) | .state][0]" | grep -Eq 'working|waiting'; }
board() { stat -c %i "$HERE/board"; }
nobody_left() { ! nsenter -t "$init" -p -m pgrep -x 'lgsup|lg-(loader|text|vae|trainer|ema|ckpt)'; }
diagnose() {
    inside systemctl --no-pager --plain list-units 'lg*' | head -20
    inside journalctl -q --no-pager -n 40 -u 'lg*' | cut -c1-300
    tail -20 "$HERE/logs/lgsup.log"
}

# ---- the run ----

check "units are written" inside /lg/build/bin/lgsup units /lg/src/tests/e2e/tiny.toml --dir /etc/systemd/system \
    --set job.dir=$RUN $endless --set supervisor.restarts_max=50
out=$(inside sh -c 'systemd-analyze verify /etc/systemd/system/lg*.service /etc/systemd/system/lg.slice' 2>&1)
expect "systemd-analyze verify has nothing to say" "" "$out"
inside systemctl daemon-reload
check "systemctl start lgsup returns when every role is ready" inside timeout 300 systemctl start lgsup
check "status text" grep -q "^running: step [0-9]* of 1000000" <(sleep 1.2; unit_value lgsup StatusText)
expect "nothing was restarted" "0 0" "$(unit_value lg-trainer@0 NRestarts) $(unit_value lgsup NRestarts)"
# What the kernel says of a process, beside what systemd says of its unit.
kernel_says() { inside sed -n "s/^$2:[[:space:]]*//p" "/proc/$(main_pid "$1")/status"; }
for unit in lgsup lg-keeper lg-loader@0 lg-trainer@0 lg-ckpt@0; do
    calls=" $(unit_value $unit SystemCallFilter) "
    expect "$unit: calls are filtered" "memfd_create mmap -" "$(for c in memfd_create mmap mount init_module ptrace keyctl setuid; do
        case $calls in *" $c "*) printf '%s ' $c ;; esac
    done)-"
    check "$unit: what is not allowed fails" grep -qxE '1|EPERM' <(unit_value $unit SystemCallErrorNumber)
    expect "$unit: capabilities" cap_dac_override "$(unit_value $unit CapabilityBoundingSet)"
    expect "$unit: as the kernel has it" "2 1 0000000000000002" \
        "$(kernel_says $unit Seccomp) $(kernel_says $unit NoNewPrivs) $(kernel_says $unit CapBnd)"
done
check "the store has the regions" test "$(unit_value lg-keeper NFileDescriptorStore)" -ge 10
wait_step "$HERE" 4

scale() { inside timeout 300 /lg/build/bin/lgsup scale "$@" "$RUN" >"$T/out" 2>&1; }
has_ended() { active_is "$1" inactive; }
check "scale vae 3" scale vae 3
check "the third is a unit" active_is lg-vae@2 active
check "that is ready" instance_ready vae 2
before=$(main_pid lg-vae@2)
kill_unit lg-vae@2
check "killed, it comes back" wait_until 120 new_main lg-vae@2 "$before"
check "scale vae 1" scale vae 1
check "the third unit has ended" wait_until 120 has_ended lg-vae@2
check "and the second" wait_until 120 has_ended lg-vae@1
check "systemctl restart lgsup" inside timeout 300 systemctl restart lgsup
expect "it knows the number" 1 "$(live_value lgsup .wanted.vae)"
expect "and has no other instance" 1 "$(live_value lgsup '[.instances[] | select(.role == "vae")] | length')"
check "scale vae 2" scale vae 2
check "the second is back" instance_ready vae 1
check "it has its unit" active_is lg-vae@1 active
inside systemctl kill -s STOP --kill-who=main lg-vae@1.service
scale vae 1 &
scaling=$!
check "the order stands" wait_until 120 live_is lgsup .wanted.vae 1
kill_unit lg-vae@1
wait "$scaling"
expect "one that is killed while it should leave" 0 $?
check "is not started again" wait_until 120 has_ended lg-vae@1
check "scale vae 2 again" scale vae 2
inside timeout 20 /lg/build/bin/lgsup swap vae "$RUN" >"$T/out" 2>&1
expect "swap is refused" 2 $?
check "with what to do instead" grep -qF "systemctl restart 'lg-vae@*'" "$T/out"
goes_on "training goes on"

for unit in vae@0 trainer@1 loader@0 text@1 ema@0 ckpt@0 trainer@0; do
    before=$(main_pid "lg-$unit")
    kill_unit "lg-$unit"
    check "killed $unit comes back" wait_until 120 new_main "lg-$unit" "$before"
done
goes_on "training goes on"

before=$(stage_pids) lgsup=$(main_pid lgsup)
first=$(board)
check "systemctl restart lgsup" inside timeout 300 systemctl restart lgsup
check "another lgsup" new_main lgsup "$lgsup"
expect "the stages have not noticed" "$before" "$(stage_pids)"
goes_on "training goes on after the restart"

lgsup=$(main_pid lgsup)
kill_unit lgsup
check "killed lgsup comes back" wait_until 120 new_main lgsup "$lgsup"
expect "the stages have not noticed that either" "$before" "$(stage_pids)"

keeper=$(main_pid lg-keeper) stored=$(unit_value lg-keeper NFileDescriptorStore)
kill_unit lg-keeper
check "killed keeper comes back" wait_until 120 new_main lg-keeper "$keeper"
expect "with everything" "$stored" "$(unit_value lg-keeper NFileDescriptorStore)"
before=$(main_pid lg-trainer@1)
kill_unit lg-trainer@1
check "a rank finds its memory at the new keeper" wait_until 120 new_main lg-trainer@1 "$before"
goes_on "training goes on with the new keeper"

for unit in lgsup lg-keeper lg-trainer@0; do kill_unit $unit; done
check "lgsup, keeper and a rank at once: all come back" wait_until 120 active_is lgsup active
goes_on "training goes on"
for unit in lgsup lg-keeper $stage_units; do kill_unit $unit; done
goes_on "everything killed at once: training goes on"
expect "from memory, not from a checkpoint" "$first" "$(board)"

# While lgsup comes back, lg-end sees to it, and `systemctl stop lgsup` has nothing to wait for.
state_is() { [ "$(status_value .state)" = "$1" ]; }
fails() { ! "$@"; }
is_drained() {
    check "$1: the run is stopped" wait_until 300 state_is stopped
    check "$1: no stage is left" wait_until 120 nobody_left
    at=$(step_of "$HERE")
    check "$1: it has published its last step $at" test -s "$(checkpoint_of "$HERE" "$at")/manifest.json"
    expect "$1: the store is empty" 0 "$(unit_value lg-keeper NFileDescriptorStore)"
    [ $e2e_failed -eq 0 ] || inside journalctl -q --no-pager -n 40 -u lgsup -u lg-end | cut -c1-300
}
check "systemctl stop lgsup" inside timeout 300 systemctl stop lgsup
is_drained "stop after that"

# More often than systemd starts a unit by default, five times in ten seconds.
for n in 1 2 3 4 5 6; do inside systemctl start lgsup && inside systemctl stop lgsup || fail "start and stop $n"; done
check "start for a stop without lgsup" inside timeout 300 systemctl start lgsup
expect "its end is watched all the same" active "$(unit_value lg-end ActiveState)"
goes_on "it goes on before that"
slow=/run/systemd/system/lgsup.service.d/slow.conf
inside sh -c "mkdir -p ${slow%/*}; printf '[Service]\nRestartSec=1h\n' >$slow; systemctl daemon-reload"
kill_unit lgsup
check "lgsup has no process" wait_until 60 sub_is lgsup auto-restart
check "systemctl stop lgsup then" inside timeout 300 systemctl stop lgsup
is_drained "stop without lgsup"
inside sh -c "rm $slow; systemctl daemon-reload"

check "start for a restart that fails" inside timeout 300 systemctl start lgsup
inside sh -c "printf '[Service]\nExecStart=\nExecStart=/bin/false\n' >$slow; systemctl daemon-reload"
check "systemctl restart lgsup fails" fails inside timeout 300 systemctl restart lgsup
check "lg-end is back" wait_until 60 sub_is lg-end exited
goes_on "training goes on without lgsup"
check "systemctl stop of a failed lgsup" inside timeout 300 systemctl stop lgsup
is_drained "stop of a failed lgsup"
inside sh -c "rm $slow; systemctl daemon-reload"

check "start again" inside timeout 300 systemctl start lgsup
goes_on "it goes on"
check "systemctl stop again" inside timeout 300 systemctl stop lgsup
expect "it has waited for that" stopped "$(status_value .state)"
check "no stage is left again" wait_until 120 nobody_left
at=$(step_of "$HERE")
# ends_like NAME STEP: $HERE, whose last step that is, is what an undisturbed run would be.
ends_like() {
    reference "$2"
    check "$1: byte-identical to an undisturbed run of $2 steps" same_files "$reference" "$HERE" "$2"
    check "$1: metrics.jsonl has every step once" metrics_are_whole "$HERE" "$2"
    check "$1: verify accepts the run" inside timeout 300 /lg/build/bin/lgsup verify "$RUN"
}
ends_like "after all that" "$at"

RUN=/lg/run/short HERE=$T/run/short
check "units of a run that ends" inside /lg/build/bin/lgsup units /lg/src/tests/e2e/tiny.toml --dir /etc/systemd/system \
    --set job.dir=$RUN --set trainer.max_steps=20
inside systemctl daemon-reload
check "it starts, with the same keeper" inside timeout 300 systemctl start lgsup
check "to the end" wait_until 600 active_is lgsup inactive
expect "state of the finished run" done "$(status_value .state)"
expect "lgsup ended well" "success 0" "$(unit_value lgsup Result) $(unit_value lgsup ExecMainStatus)"
check "no stage is left at the end" wait_until 120 nobody_left
ends_like "to the end" 20
check "stop of the slice ends the keeper" inside timeout 300 systemctl stop lg.slice
expect "keeper at the end" inactive "$(unit_value lg-keeper ActiveState)"
[ $e2e_failed -eq 0 ] || diagnose

# ---- another run beside it, of a user who is not root ----

RUN=/lg/run/mine/tiny HERE=$T/run/mine/tiny
chmod 711 "$T" "$T/run"
inside useradd -m -u 4242 lgtest
mkdir "$T/run/mine" # what it reads has been made for root alone
cp -r "$MICRO/data/micro-00000.tar" "$MICRO/text_encoder" "$MICRO/vae" "$T/run/mine/"
chown -R 4242:4242 "$T/run/mine"
data="--set data.path=/lg/run/mine/micro-00000.tar --set text.model=/lg/run/mine/text_encoder --set vae.model=/lg/run/mine/vae"
check "units of a user" inside setpriv --reuid 4242 --regid 4242 --clear-groups env HOME=/home/lgtest \
    /lg/build/bin/lgsup units /lg/src/tests/e2e/tiny.toml --prefix mine --set job.dir=$RUN $endless $data
inside sh -c "cp $RUN/units/* /etc/systemd/system/ && systemctl daemon-reload"
check "it starts" inside timeout 300 systemctl start minesup
expect "as that user" "4242 4242 4242" "$(for u in minesup mine-keeper mine-vae@1; do stat -c %u "/proc/$init/root/proc/$(main_pid $u)"; done | xargs)"
user_scale() { inside setpriv --reuid 4242 --regid 4242 --clear-groups timeout 300 /lg/build/bin/lgsup scale "$@" $RUN >"$T/out" 2>&1; }
user_scale vae 3
expect "systemd starts nothing for this user: scale is refused" 1 $?
check "with what to do" grep -q 'systemctl start mine-vae@2.service: .*: as root run `systemctl start mine-vae@{2..2}`, and scale again' "$T/out"
expect "nothing has happened" 2 "$(live_value minesup .wanted.vae)"
inside systemctl start mine-vae@2
check "after that it works" user_scale vae 3
check "fewer as well" user_scale vae 2
stage_units=$(echo "$stage_units" | sed 's/lg-/mine-/g')
before=$(stage_pids)
check "systemctl restart" inside timeout 300 systemctl restart minesup
expect "its stages have not noticed" "$before" "$(stage_pids)"
for unit in minesup mine-keeper $stage_units; do kill_unit "$unit"; done
goes_on "everything killed at once: its training goes on"
check "systemctl stop of it" inside timeout 300 systemctl stop minesup
check "it is stopped" wait_until 300 state_is stopped # mine-end sees to it where lgsup was only coming back
ends_like "a user's run" "$(step_of "$HERE")"
[ $e2e_failed -eq 0 ] || { diagnose; inside journalctl -q --no-pager -n 40 -u 'mine*' | cut -c1-300; }
