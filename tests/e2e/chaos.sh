#!/bin/bash
# The crash campaign in short: at least CHAOS_KILLS kills and every other fault of
# tests/chaos/faults.def over runs of examples/micro. KILLS_SEED repeats a campaign's choices.
. "$(dirname "$0")/lib.sh"
: "${KILLS_SEED:=$((SECONDS + $$ % 30000))}" "${CHAOS_KILLS:=$([ -n "${CHECK_ALL:-}" ] && echo 200 || echo 100)}"
echo "# KILLS_SEED=$KILLS_SEED"
micro=$e2e_root/examples/micro
[ -f "$micro/made/.made" ] || { fail "models and pictures of examples/micro" "make micro-data first"; exit 1; }

chaos=$e2e_build/tests/chaos/chaos home=$T/home
records=$home/records.jsonl
sum() { jq -s "map($1) | add // 0" "$records"; }
# KILLS: goes on from what there is until that many have fallen.
campaign() {
    "$chaos" --build "$e2e_build" --pipeline "$micro/pipeline.toml" --home "$home" --seed "$KILLS_SEED" \
        --kills "$1" --tar "$micro/made/data/micro-00000.tar" >"$T/out" 2>&1
    expect "$1 kills: every run ends with the same bytes, ledger and losses" 0 $?
    sed 's/^/# /' "$T/out"
}
campaign "$CHAOS_KILLS"
# Which faults there are is drawn: in a few short runs there may have been no call that fails, or no message that is spoiled.
for again in 1 2 3; do
    [ "$(sum .sites_failed)" -ge 1 ] && [ "$(sum .messages)" -ge 1 ] || campaign $(($(sum .kills) + 50))
done
check "so many kills fell" test "$(sum .kills)" -ge "$CHAOS_KILLS"
for role in loader text vae trainer ema ckpt keeper lgsup; do
    n=$(sum "[.events[] | select(.killed and .role == \"$role\")] | length")
    check "$role was among them ($n)" test "$n" -ge 1
done
check "messages were spoiled" test "$(sum .messages)" -ge 1
check "calls failed" test "$(sum .sites_failed)" -ge 1
check "a report can be written" "$chaos" --report "$T/report.md" "$home"
check "and says what was done" grep -q "^| kills | \*\*$(sum .kills)\*\* |" "$T/report.md"
echo "# to the next committed step, ms:"
sed -n '/^| role/,/^$/p' "$T/report.md" | sed 's/^/# /'

# A disk that is really full, and rank 0 dies meanwhile: figures of those steps may be gone, the ledger
# has every step, and the run goes on.
run=$T/full TINY=$micro/pipeline.toml
mkdir "$run"
if mount -t tmpfs -o size=64m,mode=700 tmpfs "$run" 2>/dev/null; then
    e2e_mounts+=("$run")
    tiny_in_background "$run" --set trainer.max_steps=1000000 --set checkpoint.every=0
    wait_step "$run" 50
    dd if=/dev/zero of="$run/ballast" bs=4k 2>/dev/null
    check "full disk: said" wait_until 600 grep -q 'metrics.jsonl.*cannot be written' "$run.out"
    kill_role "$run" trainer 0
    restarted() { [ "$(restarts_of "$run" trainer)" -ge 1 ]; }
    check "full disk: a dead rank 0 is replaced" wait_until 120 restarted
    at=$(status_get "$run" .step)
    goes_on() { [ "$(status_get "$run" .step)" -gt $((at + 20)) ]; }
    check "full disk: training goes on" wait_until 600 goes_on
    rm "$run/ballast"
    timeout 300 "$LGSUP" stop "$run" >"$T/out" 2>&1
    wait $tiny_pid
    expect "full disk, then room: ends in order" 0 $?
    check "full disk: the ledger has every sample" "$e2e_build/tests/chaos/ledger_check" --steps "$(status_get "$run" .step)" \
        --batch 16 --seed 11 --tar "$micro/made/data/micro-00000.tar" "$run/ledger"
    check "full disk: verify" timeout 300 "$LGSUP" verify "$run"
else
    skip "a disk that is really full" "this user may not mount"
fi
[ $e2e_failed -eq 0 ] || cp -r "$home" "$e2e_build/tests/e2e/chaos.failed" 2>/dev/null
check "nothing is left running" nothing_runs
