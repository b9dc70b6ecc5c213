#!/bin/bash
# `lgsup scale` while training runs: random orders, instances that die while they leave, lgsup and the
# keeper that die in the middle. The bits are those of an undisturbed run and the trainer hardly waits.
#
# The run lasts as long as the orders do, then it is stopped and compared with an undisturbed one of as
# many steps. SCALE_OPS=1000 for a long campaign, SCALE_SEED=n repeats one. SCALE_SET="KEY=VALUE ..." changes the
# pipeline: with `model.hidden=256 model.depth=6` a step takes the trainer so long that one encoder keeps up with
# it, as in any real run, and what rank 0 waits is due to the orders.
. "$(dirname "$0")/lib.sh"
ops=${SCALE_OPS:-12}
set_keys=()
for key in ${SCALE_SET:-}; do set_keys+=(--set "$key"); done
RANDOM=${SCALE_SEED:=$((SECONDS + $$ % 30000))}
echo "# SCALE_SEED=$SCALE_SEED"

order() { timeout 300 "$LGSUP" scale "$@" >"$T/out" 2>&1; }
# refuse NAME CODE WORDS... -- TEXT: the order is refused with this exit code, and says TEXT.
refuse() {
    local name=$1 want=$2 text=${!#} got
    shift 2
    order "${@:1:$#-1}"
    got=$?
    if [ $got -eq "$want" ] && grep -q -- "$text" "$T/out"; then ok "$name"; else
        fail "$name" "exit $got: $(tail -n 2 "$T/out" | tr '\n' ' ')"
    fi
}
# Living processes of a role that are not on their way out.
there() { status_get "$1" "[.instances[] | select(.role == \"$2\" and .pid > 0 and .state != \"leaving\" and .state != \"dead\")] | length"; }
has() { [ "$(there "$1" "$2")" = "$3" ]; }
# In ms, of the steps 4 to LAST: what rank 0 waited for data, longest and 99th percentile; the median step.
waits() { # RUN LAST
    jq -rs --argjson last "$2" '[.[] | select(.step > 3 and .step <= $last)] |
        (map(.data_wait_s) | sort) as $w |
        "\($w[-1] * 1000 | floor) \($w[length * 0.99 | floor] * 1000 | floor) \((map(select(.samples_per_s > 0) | 8 / .samples_per_s) | sort | .[length / 2 | floor]) * 1000 | floor)"' \
        "$1/metrics.jsonl"
}

refuse "no such run" 8 vae 2 "$T/none" "is not a run directory"
refuse "no such role" 2 foo 2 "$T/none" 'no role "foo"'
refuse "not a number" 2 vae two "$T/none" "not a number"
refuse "trainer ranks are refused with the reason" 2 trainer 3 "$T/none" "decides how sums are rounded"
refuse "the EMA keeper too" 2 ema 2 "$T/none" "there is one ema process"
refuse "the writer too" 2 ckpt 2 "$T/none" "there is one ckpt process"
refuse "none is too few" 2 vae 0 "$T/none" "1 to 64"
refuse "65 are too many" 2 vae 65 "$T/none" "1 to 64"

run=$T/run
export TINY_LIMIT_S=36000
tiny_in_background "$run" --set trainer.max_steps=1000000 ${set_keys[@]+"${set_keys[@]}"}
wait_step "$run" 2
done=0 worst_ms=0
for ((i = 0; i < ops; i++)); do
    roles=(vae text vae text loader)
    role=${roles[RANDOM % 5]} n=$((1 + RANDOM % 4))
    began=$(date +%s%N)
    order $role $n "$run" || { fail "scale $role $n" "$(tail -n 2 "$T/out" | tr '\n' ' ')"; break; }
    ms=$((($(date +%s%N) - began) / 1000000))
    [ $ms -le $worst_ms ] || worst_ms=$ms
    has "$run" $role $n || fail "$role has $n" "$(there "$run" $role) are there"
    done=$((done + 1))
done
expect "random orders carried out" "$ops" $done
ordered=$(step_of "$run") # what follows hangs and dies on purpose
echo "# longest order $worst_ms ms, at step $ordered"

# One that is stopped while it leaves, and killed: what it had claimed passes on, nobody waits for it.
order vae 3 "$run" || fail "scale vae 3" "$(cat "$T/out")"
kill_role "$run" vae 2 STOP
"$LGSUP" scale vae 1 "$run" >"$T/down" 2>&1 &
down=$!
leaving() { [ "$(status_get "$1" '[.instances[] | select(.state == "leaving")] | length')" -gt 0 ]; }
check "an instance is leaving" wait_until 120 leaving "$run"
kill_role "$run" vae 2
wait $down
expect "killed while it leaves: the order is carried out" 0 $?
check "killed while it leaves: forgotten" has "$run" vae 1
check "and said so" wait_until 120 grep -q 'vae.2: .* before it could leave' "$run/logs/lgsup.log"

# The keeper dies while instances start.
"$LGSUP" scale text 4 "$run" >"$T/up" 2>&1 &
up=$!
kill_role "$run" keeper 0
wait $up
expect "the keeper dies meanwhile: the order is carried out" 0 $?
check "the keeper dies meanwhile: all there" has "$run" text 4

# lgsup dies between the order and its end: the next one keeps the wanted numbers.
order vae 2 "$run" || fail "scale vae 2" "$(cat "$T/out")"
kill_role "$run" vae 1 STOP # so that it cannot leave before lgsup is dead
"$LGSUP" scale vae 1 "$run" >"$T/orphan" 2>&1 &
orphan=$!
check "it is told to leave" wait_until 120 leaving "$run"
kill_role "$run" lgsup 0 && wait_until 120 is_gone "$killed_pid"
wait $orphan
expect "lgsup dies meanwhile: the order's end is not known" 1 $?
check "and said so" grep -q 'lgsup ended before it had answered' "$T/orphan"
kill_role "$run" vae 1 CONT
wait_until 120 has "$run" vae 1
tiny_in_background "$run" --set trainer.max_steps=1000000 ${set_keys[@]+"${set_keys[@]}"}
check "the next lgsup keeps what was wanted" wait_until 120 has "$run" text 4
check "and what had left is not started again" has "$run" vae 1
expect "status shows it" "1 4 1" "$(status_get "$run" '"\(.wanted.loader) \(.wanted.text) \(.wanted.vae)"' | sed "s/^[0-9]*/1/")"
timeout 300 "$LGSUP" stop "$run" >"$T/out" 2>&1
wait $tiny_pid
expect "it ends in order" 0 $?
[ $e2e_failed -eq 0 ] || tail -n 20 "$run.out"
at=$(status_get "$run" .step)
calm=$T/undisturbed
tiny "$calm" --set trainer.max_steps="$at" ${set_keys[@]+"${set_keys[@]}"}
check "byte-identical to an undisturbed run of $at steps" same_files "$calm" "$run" "$at"
check "metrics.jsonl has every step once" metrics_are_whole "$run" "$at"
check "losses equal the undisturbed run's" cmp <(jq -c '[.step, .loss, .grad_norm]' "$calm/metrics.jsonl") \
    <(jq -c '[.step, .loss, .grad_norm]' "$run/metrics.jsonl")
check "verify accepts the run" timeout 300 "$LGSUP" verify "$run"
read -r wait_ms wait_99_ms step_ms < <(waits "$run" "$ordered")
read -r calm_ms calm_99_ms calm_step_ms < <(waits "$calm" "$ordered")
echo "# $done orders in $ordered steps: rank 0 waited for data $wait_ms ms at most, $wait_99_ms ms in the 99th percentile" \
    "(undisturbed $calm_ms, $calm_99_ms), median step $step_ms ms ($calm_step_ms)"
refuse "a run that is over" 8 vae 2 "$run" "no lgsup is in charge"
check "nothing is left running" nothing_runs
