#!/bin/bash
# Nobody uses memory of which there is one copy. lgsup stands still (SIGSTOP) from the moment when it has
# started a process; the keeper and everybody who maps the training state die (kill -9); lgsup goes on. The
# run ends with the bytes of an undisturbed one, whatever the moment. And when memory is not what the marks
# on the board say, nobody computes with it.
. "$(dirname "$0")/lib.sh"

# Programs that stop lgsup, their parent, when they are started and $T/stop.ROLE is there.
mkdir "$T/bin"
ln -s "$e2e_build"/bin/* "$T/bin/"
for role in trainer ckpt; do
    rm "$T/bin/lg-$role"
    cat >"$T/bin/lg-$role" <<END
#!/bin/bash
[ "\$1" = --run ] && rm "$T/stop.$role" 2>/dev/null && kill -STOP \$PPID
exec "$e2e_build/bin/lg-$role" "\$@"
END
    chmod +x "$T/bin/lg-$role"
done
export LG_BIN_DIR=$T/bin

run_pids() { status_get "$1" '[.instances[] | select(.role | IN("keeper", "trainer", "ema", "ckpt")) | .pid | select(. > 0)] | join(" ")'; }
has_all() { [ "$(run_pids "$1" | wc -w)" -eq 5 ]; }
lgsup_stands() { [ "$(sed -n 's/.*) \([A-Z]\) .*/\1/p' "/proc/$(pid_of "$1" lgsup 0)/stat")" = T ]; }
# kill_state NAME RUN: with lgsup standing still.
kill_state() {
    check "$1: lgsup stands still" wait_until 60 lgsup_stands "$2"
    check "$1: keeper, ranks, EMA and writer are there" wait_until 60 has_all "$2"
    [ -z "${3:-}" ] || wait_until 3 step_reached "$2" "$3"
    echo "# $1: killed at step $(step_of "$2")"
    kill -9 $(run_pids "$2")
    kill -CONT "$(pid_of "$2" lgsup 0)"
}

run=$T/early
touch "$T/stop.ckpt"
train "$run"
kill_state "as early as can be" "$run"
settle_same "as early as can be" "$run"

run=$T/start
touch "$T/stop.ckpt"
train "$run"
kill_state "after the start" "$run" 10
settle_same "after the start" "$run"

run=$T/restart
train "$run"
wait_step "$run" 10
touch "$T/stop.trainer"
kill_role "$run" trainer 1
kill_state "at a restart" "$run" 20
settle_same "at a restart" "$run"

run=$T/middle
train "$run"
wait_step "$run" 20
kill_role "$run" lgsup 0 STOP
kill_state "in the middle" "$run" 30
settle_same "in the middle" "$run"

# lose REGION...: in $run, whose ranks, EMA and writer have died; what was there is zero now.
lose() {
    local r
    kill_role "$run" lgsup 0 STOP
    check "lost memory: lgsup stands still" wait_until 60 lgsup_stands "$run"
    kill -9 $(status_get "$run" '[.instances[] | select(.role | IN("trainer", "ema", "ckpt")) | .pid | select(. > 0)] | join(" ")')
    for r in "$@"; do check "lost memory: $r is zero" "$e2e_build/tests/e2e/forget" "$(cat "$run/runtime")/keeper" "$r"; done
    kill -CONT "$(pid_of "$run" lgsup 0)"
}
# parked_then_same NAME SAYS
parked_then_same() {
    wait "$tiny_pid"
    expect "$1: the run is parked" 11 $?
    check "$1: said" grep -q "parked: .*memory of this run is lost: $2" "$run.out"
    check "$1: and that nothing of it is kept" grep -q '^ *error: `lgsup start. goes on from the newest checkpoint' "$run.out"
    train "$run"
    settle_same "$1, and a start" "$run"
    check "$1: from a checkpoint" grep -q "resuming tiny at step [0-9]*0 " "$run.out"
}
for lost in "trainer/1/state/a trainer/1/state/b" trainer/1/moments "ema/0/state/a ema/0/state/b"; do
    run=$T/$(tr '/ ' '--' <<<"$lost")
    train "$run"
    wait_step "$run" 25
    check "lost memory: there is a checkpoint" wait_until 60 has_checkpoint "$run" # a slow disk's writer is behind
    lose $lost
    parked_then_same "lost memory of ${lost%% *}" "${lost%% *}\|${lost##* } does not hold state [0-9]*, but nothing"
done
check "nothing is left running" nothing_runs
