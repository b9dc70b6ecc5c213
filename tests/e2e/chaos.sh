#!/bin/bash
# The crash campaign in short: at least CHAOS_KILLS kills and every other fault of
# tests/chaos/faults.def over runs of examples/micro. KILLS_SEED repeats a campaign's choices.
. "$(dirname "$0")/lib.sh"
: "${KILLS_SEED:=$((SECONDS + $$ % 30000))}" "${CHAOS_KILLS:=200}"
echo "# KILLS_SEED=$KILLS_SEED"
micro=$e2e_root/examples/micro
[ -f "$micro/made/.made" ] || { fail "models and pictures of examples/micro" "make micro-data first"; exit 1; }

chaos=$e2e_build/tests/chaos/chaos home=$T/home
"$chaos" --build "$e2e_build" --pipeline "$micro/pipeline.toml" --home "$home" --seed "$KILLS_SEED" \
    --kills "$CHAOS_KILLS" --tar "$micro/made/data/micro-00000.tar" >"$T/out" 2>&1
expect "$CHAOS_KILLS kills: every run ends with the same bytes, ledger and losses" 0 $?
sed 's/^/# /' "$T/out"
records=$home/records.jsonl
sum() { jq -s "map($1) | add // 0" "$records"; }
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
[ $e2e_failed -eq 0 ] || cp -r "$home" "$e2e_build/tests/e2e/chaos.failed" 2>/dev/null
check "nothing is left running" nothing_runs
