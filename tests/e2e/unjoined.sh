#!/bin/bash
# kill -9 of lgsup while a process that it has started hangs, or was stopped, before it has joined the board: the next
# lgsup, started or told to stop, knows it, ends it, and the run goes on. With each role, the keeper too.
. "$(dirname "$0")/lib.sh"

mkdir "$T/bin"
cp "$(command -v sleep)" "$T/lg-sleep" # a name by which it is found
for p in "$e2e_build"/bin/lg-*; do # once, where a file asks for it, a program hangs instead
    role=${p##*/lg-}
    printf '#!/bin/sh\n[ "$1" = --plan ] || ! rm "%s/hang.%s" 2>/dev/null || exec "%s/lg-sleep" 1000\nexec "%s" "$@"\n' \
        "$T" "$role" "$T" "$p" >"$T/bin/lg-$role"
done
chmod +x "$T/bin"/lg-*
export LG_BIN_DIR=$T/bin
hangs() { [ -n "$(e2e_pids "$T/lg-sleep")" ]; }
nothing_hangs() { ! hangs; }
lgsup_lives() { [ "$(pid_of "$1" lgsup 0)" -gt 0 ]; }
# Whoever has joined before it was stopped is ended after hang_s.
start=(--set trainer.max_steps=1000000 --set supervisor.ready_s=5 --set supervisor.hang_s=40 --set supervisor.restarts_max=1000000)
end_lgsup() {
    wait_until 120 lgsup_lives "$1" && lgsup=$(pid_of "$1" lgsup 0) && [ "$lgsup" -gt 0 ] || return 1
    disown $tiny_pid # or the shell would tell of its end
    kill -9 "$lgsup"
    wait_until 120 is_gone "$lgsup"
}

# ---- at the first start ----
run=$T/first
for role in keeper trainer; do
    touch "$T/hang.$role"
    tiny_in_background "$run" "${start[@]}"
    check "$role hangs at the first start" wait_until 120 hangs
    end_lgsup "$run"
    check "$role hangs without lgsup" hangs
    tiny_in_background "$run" "${start[@]}"
    check "$role that hung at the first start is ended" wait_until 120 nothing_hangs
    check "and the run begins" wait_until 300 state_is "$run" running
    [ $role = trainer ] || { disown $tiny_pid; timeout 300 "$LGSUP" stop --kill "$run" >/dev/null 2>&1; }
done

# ---- at a restart ----
for role in loader text vae ema ckpt keeper; do
    touch "$T/hang.$role"
    kill_role "$run" $role 0
    wait_until 120 hangs || { fail "$role hangs at a restart"; continue; }
    end_lgsup "$run"
    hangs || fail "$role hangs without lgsup"
    tiny_in_background "$run" "${start[@]}"
    check "$role that hung at a restart is ended" wait_until 120 nothing_hangs
    wait_until 120 lgsup_lives "$run"
done
at=$(step_of "$run")
check "the run goes on" wait_step "$run" $((at + 3))

# ---- `lgsup stop` of what a dead one has left ----
touch "$T/hang.vae"
kill_role "$run" vae 0
check "a process hangs at a restart" wait_until 120 hangs
end_lgsup "$run"
timeout 300 "$LGSUP" stop "$run" >"$T/out" 2>&1
expect "stop" 0 $?
check "has ended it" nothing_hangs
check "and everybody else" test -z "$(e2e_pids "$T")"

# ---- a keeper that hangs while lgsup lives ----
run=$T/again
touch "$T/hang.keeper"
tiny_in_background "$run" "${start[@]}"
check "a keeper that hangs at the start is followed by another" wait_until 120 state_is "$run" running
check "it is ended" nothing_hangs
check "and said" grep -q 'warning: lg-keeper does not listen after .*another is started' "$run.out"
disown $tiny_pid
timeout 300 "$LGSUP" stop --kill "$run" >"$T/out" 2>&1

# ---- stopped as soon as it is there, lgsup dead at once ----
run=$T/stopped
tiny_in_background "$run" "${start[@]}"
wait_until 300 state_is "$run" running
ended=0
for ((i = 0; i < 8; i++)); do
    wait_until 300 state_is "$run" running
    lgsup=$(pid_of "$run" lgsup 0)
    victim=$(pid_of "$run" vae 0)
    read -r had <"/proc/$lgsup/task/$lgsup/children"
    kill -9 "$victim"
    [ "$lgsup" -gt 0 ] && [ "$victim" -gt 0 ] || { fail "lgsup and a stage"; break; }
    child='' end=$((SECONDS + 120))
    while [ -z "$child" ] && [ $SECONDS -lt $end ]; do # without a fork, or the moment would have passed
        { read -r has <"/proc/$lgsup/task/$lgsup/children"; } 2>/dev/null
        for pid in $has; do
            case " $had " in *" $pid "*) ;; *) child=$pid ;; esac
        done
    done
    [ -n "$child" ] || { fail "a child of lgsup is seen"; break; }
    kill -STOP "$child"
    kill -9 "$lgsup"
    disown $tiny_pid
    wait_until 120 is_gone "$lgsup"
    tiny_in_background "$run" "${start[@]}"
    wait_until 120 is_gone "$child" || { fail "the one that was stopped is ended" "$(tail -n 2 "$run.out" | tr '\n' ' ')"; break; }
    wait_until 120 lgsup_lives "$run" || { fail "the next lgsup starts" "$(tail -n 2 "$run.out" | tr '\n' ' ')"; break; }
    ended=$((ended + 1))
done
expect "stopped before it had joined, lgsup dead: it is ended" 8 $ended
timeout 300 "$LGSUP" stop "$run" >"$T/out" 2>&1
expect "the run ends in order" 0 $?
check "nobody is left" test -z "$(e2e_pids "$T")"
