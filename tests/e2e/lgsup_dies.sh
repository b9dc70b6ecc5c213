#!/bin/bash
# kill -9 of lgsup: the stages go on, a new lgsup takes them over, what died meanwhile comes back.
. "$(dirname "$0")/lib.sh"

stage_pids() { status_get "$1" '[.instances[] | select(.role != "lgsup") | "\(.role).\(.index)=\(.pid)"] | sort | join(" ")'; }
kill_for_good() { kill_role "$@" && wait_until 60 is_gone "$killed_pid"; }
# A process that ends has no command line any more, but is not dead before the status says so.
living() { status_get "$1" '[.instances[] | select(.pid > 0) | .role] | join(" ")'; }
only_keeper() { [ "$(e2e_pids "$T" | wc -l)" -eq 1 ] && [ "$(living "$run")" = keeper ]; }
nobody() { nothing_runs && [ -z "$(living "$run")" ]; }
# kill_until COMMAND PIDS...: what the words PIDS find is killed until COMMAND; lgsup may have started somebody meanwhile.
kill_until() {
    local end=$((SECONDS + 120)) done=$1 pids
    shift
    until $done; do
        [ $SECONDS -lt $end ] || return 1
        pids=$("$@")
        [ -z "$pids" ] || kill -9 $pids 2>/dev/null || true # one of them may have ended meanwhile
    done
}

run=$T/run
train "$run"
wait_step "$run" 10
wait_until 600 state_is "$run" running # every role has been ready
kill_for_good "$run" lgsup 0
before=$(stage_pids "$run") at=$(step_of "$run")
check "training goes on without lgsup" wait_step "$run" $((at + 8))
expect "all stages live on" "$before" "$(stage_pids "$run")"
expect "status names no lgsup" 0 "$(pid_of "$run" lgsup 0)"
top() { timeout 120 "$LGSUP" top --once "$run" >"$T/top" 2>&1; }
check "top of the orphaned run" top
ahead() { top && grep -Eq '^window +source +([89]|[1-3][0-9])/32 .*latent +[0-9]+/32 .*text +[0-9]+/32' "$T/top"; }
check "top: the window, whose source is ahead of the step" wait_until 120 ahead
check "top: the parts of the step" grep -Eq '^step time .*data wait .*compute .*checkpoint wait ' "$T/top"
check "top: every process, lgsup dead" sh -c "grep -c -E '^(loader|text|vae|trainer|ema|ckpt|keeper).* (working|waiting) ' '$T/top' | grep -qx 10 && grep -Eq '^lgsup.0 +- +dead' '$T/top'"
expect "state of the orphaned run" running "$(status_get "$run" .state)"

train "$run"
lgsup_lives() { [ "$(pid_of "$1" lgsup 0)" -gt 0 ]; }
check "a second lgsup starts" wait_until 120 lgsup_lives "$run"
expect "it has adopted the same processes" "$before" "$(stage_pids "$run")"

# Once more, and a rank with it: it waits for the next start.
wait_step "$run" $(($(step_of "$run") + 3))
kill_for_good "$run" lgsup 0
kill_for_good "$run" trainer 1
train "$run"
check "the third lgsup starts" wait_until 120 lgsup_lives "$run"
rank_replaced() { [ "$(restarts_of "$run" trainer)" -ge 1 ]; }
check "the dead rank is replaced" wait_until 120 rank_replaced
settle_same "killed twice" "$run"
expect "the others were not replaced" 0 "$(($(restarts_of "$run" vae) + $(restarts_of "$run" text) + $(restarts_of "$run" loader)))"

# lgsup and keeper together: the stages still hold the memory.
run=$T/both
train "$run"
wait_step "$run" 10
kill_for_good "$run" lgsup 0
kill_for_good "$run" keeper 0
train "$run"
check "lgsup and keeper dead: a new lgsup" wait_until 120 lgsup_lives "$run"
settle_same "lgsup and keeper dead" "$run"

# Every process but the keeper: the memory is still there, nothing is lost.
run=$T/all
train "$run"
wait_step "$run" 30
# The keeper's command line does not name the run.
check "only the keeper lives" kill_until only_keeper e2e_pids "$run"
at=$(step_of "$run")
train "$run"
check "only the keeper alive: it goes on" wait_step "$run" $((at + 1))
check "only the keeper alive: from memory, not from a checkpoint" grep -q 'adopted 0 of 9 processes' "$run.out"
settle_same "only the keeper alive" "$run"

# Everything at once, as after a power cut: on from the newest checkpoint.
run=$T/power
train "$run"
wait_step "$run" 45
check "there is a checkpoint" wait_until 600 has_checkpoint "$run"
check "everything is dead" kill_until nobody e2e_pids "$T"
at=$(step_of "$run")
newest=$(newest_checkpoint_of "$run")
expect "state after everything died" failed "$(status_get "$run" .state)"
train "$run"
check "everything dead (at step $at): it goes on" wait_step "$run" $((at + 1))
check "everything dead: from the newest checkpoint, of step $newest" grep -q "resuming tiny at step $newest " "$run.out"
settle_same "everything dead" "$run"
