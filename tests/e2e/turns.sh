#!/bin/bash
# Processes that take turns (shm/turns.h), here those of the host: kills and stops of who may just have the
# turn, and the bits of a run without turns. TURNS_SEED chooses the moments.
. "$(dirname "$0")/lib.sh"
RANDOM=${TURNS_SEED:=$((SECONDS + $$ % 30000))}
echo "# TURNS_SEED=$TURNS_SEED"

reference 80
check "without being asked to, those of the host take no turns" test -z "$(grep -l 'takes turns' "$reference"/logs/*)"

run=$T/run
victims=(trainer.0 vae.0 text.1 trainer.1 vae.1 text.0 trainer.0)
train "$run" --set turns=always --set supervisor.hang_s=3
step=2
for victim in "${victims[@]}"; do
    wait_step "$run" $step || break
    sleep "0.0$((RANDOM % 90 + 10))"
    kill_role "$run" "${victim%.*}" "${victim#*.}"
    echo "# killed $victim at step $(step_of "$run")"
    step=$(($(step_of "$run") + 6))
done
for victim in vae.0 trainer.1; do # stopped, and killed for it: the others go on without the turn
    wait_step "$run" $step || break
    sleep "0.0$((RANDOM % 90 + 10))"
    kill_role "$run" "${victim%.*}" "${victim#*.}" STOP
    echo "# stopped $victim at step $(step_of "$run")"
    step=$(($(step_of "$run") + 8))
done
settle_same "with turns, kills and stops" "$run"
[ $e2e_failed -eq 0 ] || tail -n 5 "$run.out"
for victim in text.0 text.1 vae.0 vae.1 trainer.0 trainer.1; do
    check "$victim has taken turns" grep -Eq ' [1-9][0-9]* turns, ' "$run/logs/$victim.log"
done
check "nobody else has" test "$(grep -l 'takes turns' "$run"/logs/* | wc -l)" -eq 6
