#!/bin/bash
# start --detach, stop, restart; Ctrl-C once and twice; what may and what may not change at a resume.
. "$(dirname "$0")/lib.sh"
run=$T/run
end=1000000
start=("$LGSUP" start "$TINY" --set job.dir="$run")

timeout 300 "${start[@]}" --detach --set trainer.max_steps=$end >"$T/out" 2>&1
expect "--detach exits 0" 0 $?
expect "every role is ready when it returns" 0 "$(status_get "$run" '[.instances[] | select(.pid == 0 or .state == "setup" or .state == "starting" or .state == "dead")] | length')"
expect "state" running "$(status_get "$run" .state)"
expect "its processes: nine stages, keeper, lgsup" 11 "$(e2e_pids "$T" | wc -l)"
check "it trains" wait_step "$run" 10
timeout 300 "$LGSUP" stop "$run" >"$T/out" 2>&1
expect "stop exits 0" 0 $?
check "stop returns when every process is gone" nothing_runs
expect "state" stopped "$(status_get "$run" .state)"
at=$(status_get "$run" .step)
check "stopped before the end (step $at)" test "$at" -ge 10 -a "$at" -lt $end
check "its checkpoint is complete" timeout 120 "$LGSUP" verify "$(checkpoint_of "$run" "$at")"
timeout 120 "$LGSUP" stop "$run" >"$T/out" 2>&1
expect "a second stop has nothing to do and exits 0" 0 $?

# Keys that decide bits.
for change in model.hidden=64 job.seed=8 trainer.lr=2e-3 vae.chunk=8 trainer.ranks=1; do
    timeout 120 "${start[@]}" --set trainer.max_steps=$end --set $change >"$T/out" 2>&1
    code=$?
    if [ $code -eq 10 ] && grep -q "${change%=*}" "$T/out"; then ok "changed ${change%=*} is refused by name"; else
        fail "changed ${change%=*} is refused by name" "exit $code: $(tail -n 3 "$T/out" | tr '\n' ' ')"
    fi
done
timeout 120 "${start[@]}" --set trainer.max_steps=$((end - 1)) >"$T/out" 2>&1
expect "max_steps may only grow" 10 $?
check "and is refused by name" grep -q 'trainer\.max_steps' "$T/out"
expect "refusals change nothing" "stopped $at" "$(status_get "$run" '"\(.state) \(.step)"')"

# max_steps grows; keys without bits may change.
run=$T/grown end=30
tiny "$run" --set trainer.max_steps=20
expect "a short run" "0 done 20" "$? $(status_get "$run" '"\(.state) \(.step)"')"
tiny "$run" --set trainer.max_steps=$end --set vae.instances=3 --set checkpoint.keep=9
expect "max_steps grows at a resume, with other instances" "0 done $end" "$? $(status_get "$run" '"\(.state) \(.step)"')"
check "every step once" metrics_are_whole "$run" $end
check "verify" timeout 120 "$LGSUP" verify "$run"
before=$(wc -c <"$run/metrics.jsonl")
tiny "$run" --set trainer.max_steps=$end
expect "a run that is done: start exits 0" 0 $?
expect "and does nothing" "$before" "$(wc -c <"$run/metrics.jsonl")"
expect "state stays" done "$(status_get "$run" .state)"

# Ctrl-C once drains, twice kills.
run=$T/interrupt
tiny_in_background "$run" --set trainer.max_steps=1000000
wait_step "$run" 5
kill_role "$run" lgsup 0 INT
wait $tiny_pid
expect "Ctrl-C: exits 0 after a checkpoint" 0 $?
expect "Ctrl-C: state" stopped "$(status_get "$run" .state)"
check "Ctrl-C: checkpoint" timeout 120 "$LGSUP" verify "$run"
tiny_in_background "$run" --set trainer.max_steps=1000000
wait_step "$run" $(($(step_of "$run") + 5))
kill_role "$run" trainer 0 STOP # so that draining takes until the second one
kill_role "$run" lgsup 0 INT
check "Ctrl-C: draining" wait_until 60 state_is "$run" draining
sleep 1.1 # interrupts within one second are one
kill_role "$run" lgsup 0 INT
wait $tiny_pid
expect "Ctrl-C twice exits 130" 130 $?
check "Ctrl-C twice: nothing is left running" nothing_runs
timeout 300 "$LGSUP" start "$TINY" --set job.dir="$run" --set trainer.max_steps=1000000 --detach >"$T/out" 2>&1
expect "and it starts again" 0 $?
timeout 300 "$LGSUP" stop "$run" >/dev/null 2>&1
check "verify after all that" timeout 300 "$LGSUP" verify "$run"
