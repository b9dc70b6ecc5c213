#!/bin/bash
# kill -9 of every role, the keeper included, at random moments of one run. It goes on by itself with
# the bits of an undisturbed run. KILLS_SEED chooses moments and order.
. "$(dirname "$0")/lib.sh"
RANDOM=${KILLS_SEED:=$((SECONDS + $$ % 30000))}
echo "# KILLS_SEED=$KILLS_SEED"

victims=(loader.0 text.0 text.1 vae.0 vae.1 trainer.0 trainer.1 ema.0 ckpt.0 keeper.0
    trainer.$((RANDOM % 2)) vae.$((RANDOM % 2)) ckpt.0 trainer.$((RANDOM % 2)))
for ((i = ${#victims[@]} - 1; i > 0; i--)); do # Fisher-Yates
    j=$((RANDOM % (i + 1)))
    swap=${victims[i]} victims[i]=${victims[j]} victims[j]=$swap
done
# The k-th kill comes a random moment after a random step of 5 k .. 5 k + 4, so that each finds its step
# in another phase.
at_step=() wait_ms=()
for ((i = 0; i < ${#victims[@]}; i++)); do
    at_step+=($((1 + 5 * i + RANDOM % 5)))
    wait_ms+=($((RANDOM % 60)))
done

run=$T/run
train "$run"
wait_step "$run" 1 || fail "the run starts" "$(tail -n 3 "$run.out" | tr '\n' ' ')"
killed=0
for ((i = 0; i < ${#victims[@]}; i++)); do
    role=${victims[i]%.*} index=${victims[i]#*.}
    wait_step "$run" "${at_step[i]}" || break
    sleep "0.$(printf %03d "${wait_ms[i]}")"
    kill_role "$run" "$role" "$index" || continue
    echo "# killed $role.$index (pid $killed_pid) at step $(step_of "$run")"
    killed=$((killed + 1))
done
expect "kills while it trained" ${#victims[@]} $killed
restarted() { [ "$(restarts_of "$run" "$1")" -ge "$(printf '%s\n' "${victims[@]}" | grep -c "^$1\.")" ]; }
for role in loader text vae trainer ema ckpt keeper; do wait_until 120 restarted $role; done
settle_same "killed" "$run"
[ $e2e_failed -eq 0 ] || tail -n 20 "$run.out"
for role in loader text vae trainer ema ckpt keeper; do
    want=$(printf '%s\n' "${victims[@]}" | grep -c "^$role\.")
    # One that is just being started when the keeper dies has nowhere to get its memory, ends, and is started again.
    early=$(grep -Ec " $role\.[0-9]+: exit 4 IO: .*(no keeper listens at|the keeper at) .*; restarted" "$run/logs/lgsup.log")
    expect "restarts of $role in the status" "$((want + early))" "$(restarts_of "$run" $role)"
done
