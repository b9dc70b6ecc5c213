#!/bin/bash
# kill -9 of lgsup: the stages go on, a new lgsup takes them over, what died meanwhile comes back.
. "$(dirname "$0")/lib.sh"
N=80
reference $N

stage_pids() { status_get "$1" '[.instances[] | select(.role != "lgsup") | "\(.role).\(.index)=\(.pid)"] | sort | join(" ")'; }
kill_for_good() { kill_role "$@" && wait_until 5 is_gone "$killed_pid"; }

run=$T/run
tiny_in_background "$run" --set trainer.max_steps=$N
wait_step "$run" 10
kill_for_good "$run" lgsup 0
before=$(stage_pids "$run") at=$(step_of "$run")
check "training goes on without lgsup" wait_step "$run" $((at + 8)) 30
expect "all stages live on" "$before" "$(stage_pids "$run")"
expect "status names no lgsup" 0 "$(pid_of "$run" lgsup 0)"
timeout 20 "$LGSUP" top --once "$run" >"$T/top" 2>&1
expect "top of the orphaned run" 0 $?
check "top: the window, whose source is ahead of the step" grep -Eq '^window +source +([89]|[1-3][0-9])/32 .*latent +[0-9]+/32 .*text +[0-9]+/32' "$T/top"
check "top: the parts of the step" grep -Eq '^step time .*data wait .*compute .*checkpoint wait ' "$T/top"
check "top: every process, lgsup dead" sh -c "grep -c -E '^(loader|text|vae|trainer|ema|ckpt|keeper).* (working|waiting) ' '$T/top' | grep -qx 10 && grep -Eq '^lgsup.0 +- +dead' '$T/top'"
expect "state of the orphaned run" running "$(status_get "$run" .state)"

tiny_in_background "$run" --set trainer.max_steps=$N
lgsup_lives() { [ "$(pid_of "$1" lgsup 0)" -gt 0 ]; }
check "a second lgsup starts" wait_until 20 lgsup_lives "$run"
expect "it has adopted the same processes" "$before" "$(stage_pids "$run")"

# Once more, and a rank with it: it waits for the next start.
wait_step "$run" $(($(step_of "$run") + 3)) 30
kill_for_good "$run" lgsup 0
kill_for_good "$run" trainer 1
tiny "$run" --set trainer.max_steps=$N
expect "the third lgsup completes the run" 0 $?
[ $e2e_failed -eq 0 ] || tail -20 "$run.out"
check "the dead rank was replaced" test "$(restarts_of "$run" trainer)" -ge 1
expect "the others were not" 0 "$(($(restarts_of "$run" vae) + $(restarts_of "$run" text) + $(restarts_of "$run" loader)))"
check "byte-identical to the undisturbed run" same_files "$reference" "$run" $N
check "metrics.jsonl has every step once" metrics_are_whole "$run" $N
check "verify accepts the run" timeout 60 "$LGSUP" verify "$run"
check "nothing is left running" nothing_runs

# lgsup and keeper together: the stages still hold the memory.
run=$T/both
tiny_in_background "$run" --set trainer.max_steps=$N
wait_step "$run" 10
kill_for_good "$run" lgsup 0
kill_for_good "$run" keeper 0
tiny "$run" --set trainer.max_steps=$N
expect "lgsup and keeper dead: completes" 0 $?
check "lgsup and keeper dead: byte-identical" same_files "$reference" "$run" $N

# Every process but the keeper: the memory is still there, nothing is lost.
run=$T/all
tiny_in_background "$run" --set trainer.max_steps=$N
wait_step "$run" 30
kill -9 $(e2e_pids "$run") 2>/dev/null # the keeper's command line does not name the run
only_keeper() { [ "$(e2e_pids "$T" | wc -l)" -eq 1 ]; }
check "only the keeper lives" wait_until 5 only_keeper
at=$(step_of "$run")
tiny "$run" --set trainer.max_steps=$N
expect "only the keeper alive: completes" 0 $?
check "only the keeper alive: goes on at step $at, not at a checkpoint" grep -q 'adopted 0 of 9 processes' "$run.out"
check "only the keeper alive: byte-identical" same_files "$reference" "$run" $N
check "only the keeper alive: every step once" metrics_are_whole "$run" $N

# Everything at once, as after a power cut: on from the newest checkpoint.
run=$T/power
tiny_in_background "$run" --set trainer.max_steps=$N
wait_step "$run" 45
kill -9 $(e2e_pids "$T") 2>/dev/null
wait_until 5 nothing_runs
at=$(step_of "$run")
expect "state after everything died" failed "$(status_get "$run" .state)"
tiny "$run" --set trainer.max_steps=$N
expect "everything dead: completes" 0 $?
check "everything dead (at step $at): on from the newest checkpoint" grep -Eq 'resuming tiny at step (40|60) ' "$run.out"
check "everything dead: byte-identical" same_files "$reference" "$run" $N
check "everything dead: every step once" metrics_are_whole "$run" $N
check "everything dead: verify" timeout 60 "$LGSUP" verify "$run"
