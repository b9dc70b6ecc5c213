#!/bin/bash
# A crash loop in the middle of a run parks it with its memory kept: a start goes on from the step that
# was committed, a stop lets the memory go, and where it is lost the newest checkpoint counts.
. "$(dirname "$0")/lib.sh"
endless=(--set trainer.max_steps=1000000 --set checkpoint.keep=1000000)
mkdir "$T/bin"
ln -s "$e2e_build/lib" "$T/lib"
mend() { for p in "$e2e_build"/bin/lg-*; do ln -sfn "$p" "$T/bin/"; done; }
# park RUN STEP [...]: a run whose VAE cannot be started any more from STEP on; its step in $at. However slowly
# they die, it is too often.
park() {
    local run=$1 step=$2 from
    from=$(step_of "$run") # nothing is kept of a run that has not committed a step since its start
    shift 2
    mend
    LG_BIN_DIR=$T/bin train "$run" --set supervisor.restart_window_s=86400 "$@"
    wait_step "$run" $((step > from ? step : from + 1))
    wait_until 600 has_checkpoint "$run"
    rm "$T/bin/lg-vae"
    printf '#!/bin/sh\necho "this program is broken" >&2\nexit 1\n' >"$T/bin/lg-vae"
    chmod +x "$T/bin/lg-vae"
    kill -9 $(status_get "$run" '.instances[] | select(.role == "vae" and .pid > 0) | .pid')
    wait $tiny_pid
    code=$?
    at=$(status_get "$run" .step)
}
keeper_alone() { [ "$(e2e_pids "$T" | wc -l)" -eq 1 ]; }

run=$T/run
park "$run" 24
expect "crash loop: exit code" 11 $code
expect "crash loop: state" parked "$(status_get "$run" .state)"
check "what it said last, too" grep -q 'last: exit 1 FAILED; this program is broken' <(status_get "$run" .cause)
check "the cause is in the status" test -n "$(status_get "$run" 'select(.cause | test("vae.* (died|failed) .* times")) | .cause')"
expect "its memory is kept" true "$(status_get "$run" .memory_kept)"
check "by the keeper alone" keeper_alone
check "and lgsup says so" grep -q "memory is kept: remove the cause, then .lgsup start. goes on from step $at" "$run.out"
for change in job.seed=8 job.name=other; do
    timeout 120 "$LGSUP" start "$TINY" --set job.dir="$run" "${endless[@]}" --set $change >"$T/out" 2>&1
    expect "a start with $change is refused" "10 1" "$? $(grep -c "${change%=*} was" "$T/out")"
    expect "and touches nothing" true "$(status_get "$run" .memory_kept)"
done
timeout 120 "$LGSUP" scale vae 3 "$run" >"$T/out" 2>&1
expect "a parked run is not scaled" 8 $?
printf '#!/bin/sh\nexit 1\n' >"$T/bin/lg-vae"
LG_BIN_DIR=$T/bin tiny "$run" "${endless[@]}"
expect "the cause is still there: parked again" 11 $?
check "what others wrote before is not what it said last" grep -q 'last: exit 1 FAILED$' <(status_get "$run" .cause)
expect "and its memory is kept" true "$(status_get "$run" .memory_kept)"
mend
train "$run" --set vae.instances=3
check "the cause removed: it goes on" wait_step "$run" $((at + 1))
check "from step $at in memory, not from a checkpoint" grep -q "going on with tiny at step $at from memory" "$run.out"
check "and not as if an lgsup had died" sh -c "grep -q '^adopted 0 of' '$run.out' && ! grep -q 'has died' '$run.out'"
settle_same "the cause removed" "$run"

# stop lets the memory go. This role may die once, whatever the others may.
run=$T/stop
park "$run" 24 --set supervisor.restarts_max=100000 --set vae.restarts_max=1
expect "a limit of its own: exit code" 11 $code
check "the second death parks" test -n "$(status_get "$run" 'select(.cause | test("^vae.* (died 2 times without a committed step|failed 2 times in a row setting up); last: ")) | .cause')"
check "and the cause is printed" grep -Eq 'parked: vae.* (died|failed) 2 times .*; last: ' "$run.out"
timeout 120 "$LGSUP" stop "$run" >"$T/out" 2>&1
expect "stop of a parked run exits 0" 0 $?
check "and says what it did" grep -q "parked at step $at; its memory has been let go" "$T/out"
check "nothing is left running" nothing_runs
expect "state" stopped "$(status_get "$run" .state)"

# The keeper dies while the run is parked: back to the checkpoint, and said so.
park "$run" 44
check "the keeper dies: there is a checkpoint" has_checkpoint "$run"
newest=$(newest_checkpoint_of "$run")
kill_role "$run" keeper 0 && wait_until 60 is_gone "$killed_pid"
expect "the keeper dies: the status knows" false "$(status_get "$run" .memory_kept)"
mend
train "$run"
check "the keeper dies: it goes on" wait_step "$run" $((at + 1))
check "the keeper dies: said so" wait_until 60 grep -q "memory cannot be used: its keeper has died; starting again from the newest checkpoint" "$run.out"
check "the keeper dies: from the checkpoint of step $newest" wait_until 60 grep -q "resuming tiny at step $newest from" "$run.out"
settle_same "the keeper dies" "$run"

# Where its state lies has changed: its memory is of no use, and said so.
park "$run" 84
mend
train "$run" --set memory.offload_optimizer=true
check "the state lies elsewhere: it goes on" wait_step "$run" $((at + 1))
check "the state lies elsewhere: said so" grep -q "memory cannot be used: where the state lies (memory.offload_optimizer) has changed; starting again from" "$run.out"
settle_same "the state lies elsewhere" "$run"

# The same of its average.
park "$run" 124
mend
train "$run" --set memory.offload_ema=true
check "the average lies elsewhere: it goes on" wait_step "$run" $((at + 1))
check "the average lies elsewhere: said so" grep -q "memory cannot be used: where the average lies (memory.offload_ema) has changed; starting again from" "$run.out"
settle_same "the average lies elsewhere" "$run"
