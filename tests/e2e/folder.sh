#!/bin/bash
# A run directory belongs to one run: a second one in it is refused, with what is there and the ways out;
# what an old run has left is put aside; and neither loses a checkpoint. On examples/micro: short runs.
. "$(dirname "$0")/lib.sh"
TINY=$e2e_root/examples/micro/pipeline.toml
[ -f "$e2e_root/examples/micro/made/.made" ] || { fail "models and pictures of examples/micro" "make micro-data first"; exit 1; }
checkpoints_of() { (cd "$1/checkpoints" && ls -d micro_step* 2>/dev/null | sed 's/micro_step//' | sort -n | tr '\n' ' '); }
checkpoint() { echo "$1/checkpoints/micro_step$2"; }
lineage_of() { jq -r .lineage "$(checkpoint "$1" "$2")/manifest.json"; }
# The first checkpoint and the last are always there; one that is due while another is written is passed over.
short=(--set checkpoint.every=20 --set checkpoint.keep=2)
shorter=(--set checkpoint.every=10 --set checkpoint.keep=2)

tiny "$T/run" "${short[@]}" --set trainer.max_steps=40
expect "a run" 0 $?
expect "its checkpoints" "20 40 " "$(checkpoints_of "$T/run")"
expect "the lineage of its folder is that of its checkpoints" "$(cat "$T/run/lineage")" "$(lineage_of "$T/run" 40)"

# A new run in its folder: the old one's checkpoints would push out the new one's.
cp -r "$T/run" "$T/was"
tiny "$T/run" "${short[@]}" --set trainer.max_steps=20 --set trainer.auto_resume=false
expect "a new run in a used folder is refused" 10 $?
check "and says what is there" grep -Eq 'holds the checkpoint micro_step(20|40) of lineage [0-9a-f]{16}' "$T/run.out"
check "and the ways out" grep -q 'choose another job.dir.*--set-aside.*auto_resume' "$T/run.out"
tiny "$T/run" "${short[@]}" --set trainer.max_steps=60 --set job.name=other
expect "another job in a used folder is refused" 10 $?
tiny "$T/run" "${short[@]}" --set trainer.max_steps=60 --set trainer.auto_resume=false \
    --set trainer.resume_from="$(checkpoint "$T/run" 20)"
expect "a branch from an older checkpoint is refused" 10 $?
check "nothing was touched" diff -r -x lock -x logs "$T/was" "$T/run"

# Put aside, the old run is a run directory, and the new one's are all its own.
tiny "$T/run" "${shorter[@]}" --set trainer.max_steps=20 --set job.seed=5 --set-aside
expect "--set-aside" 0 $?
aside=$T/run/aside/$(cat "$T/was/lineage")
check "it says where the old files are" grep -q "the former run's files are in $aside" "$T/run.out"
expect "checkpoints of the new run" "10 20 " "$(checkpoints_of "$T/run")"
expect "checkpoints of the old one" "20 40 " "$(checkpoints_of "$aside")"
check "verify of the new one" timeout 120 "$LGSUP" verify "$T/run"
check "verify of the old one" timeout 120 "$LGSUP" verify "$aside"
expect "the new one's metrics are its own" "1 20" "$(jq .step "$T/run/metrics.jsonl" | sed -n '1p;$p' | tr '\n' ' ' | sed 's/ $//')"

# A branch from what was put aside, in the background: the path follows, the log too.
timeout 120 "$LGSUP" start "$TINY" --set job.dir="$T/was" "${short[@]}" --set trainer.max_steps=40 --set trainer.auto_resume=false \
    --set trainer.resume_from="$(checkpoint "$T/was" 20)" --set-aside --detach >"$T/detached" 2>&1
expect "a branch with --set-aside --detach" 0 $?
check "it ends" wait_until 120 state_is "$T/was" done
check "its log is in its folder" grep -q . "$T/was/logs/lgsup.log"
expect "it has step 40 again" "40 " "$(checkpoints_of "$T/was")"
expect "in the same lineage" "$(cat "$T/was/lineage")" "$(lineage_of "$T/was" 40)"
for f in model/diffusion_pytorch_model.safetensors ema/diffusion_pytorch_model.safetensors optimizer.safetensors manifest.json; do
    check "the same bytes: $f" cmp "$(checkpoint "$T/was" 40)/$f" "$(checkpoint "$aside" 40)/$f"
done

# A checkpoint that is taken away: back, in the same lineage, to the same bytes.
mv "$(checkpoint "$T/run" 20)" "$T/step20"
tiny "$T/run" "${shorter[@]}" --set trainer.max_steps=30 --set job.seed=5
expect "without its newest checkpoint a run goes on from the one before" 0 $?
check "it says so" grep -q 'resuming micro at step 10 from' "$T/run.out"
check "manifests are the same byte for byte" cmp "$T/step20/manifest.json" "$(checkpoint "$T/run" 20)/manifest.json"
check "every step once" metrics_are_whole "$T/run" 30
check "verify" timeout 120 "$LGSUP" verify "$T/run"

# Somebody else's checkpoint under the run's name.
cp -r "$(checkpoint "$aside" 40)" "$T/run/checkpoints/"
tiny "$T/run" "${short[@]}" --set trainer.max_steps=60 --set job.seed=5
expect "a checkpoint of another run is not gone on from" 10 $?
check "verify names it" sh -c "'$LGSUP' verify '$T/run' 2>&1 | grep -Eq 'micro_step[0-9]+ is of another run'"
rm -r "$(checkpoint "$T/run" 40)"
# Half of a ledger of another run.
cp "$T/run/ledger" "$T/ledger"
dd if="$aside/ledger" of="$T/run/ledger" bs=64 count=10 conv=notrunc 2>/dev/null
check "verify refuses a ledger of two runs" sh -c "'$LGSUP' verify '$T/run' 2>&1 | grep -q 'is of two runs: the record of step 1 '"
cp "$T/ledger" "$T/run/ledger"
check "put back, it is well" timeout 120 "$LGSUP" verify "$T/run"

# What lives keeps its files, also while nobody supervises it.
tiny_in_background "$T/lives" --set trainer.max_steps=1000000
wait_step "$T/lives" 10
read -r pid _ <"$T/lives/lock"
kill -9 "$pid"
wait "$tiny_pid"
tiny "$T/lives" --set job.seed=5 --set-aside
expect "a run that lives is not put aside" 7 $?
check "and it says how to end it" grep -q "set-aside: the run in .* lives.*lgsup stop" "$T/lives.out"
check "its files are where they were" test -s "$T/lives/ledger" -a ! -e "$T/lives/aside"
timeout 120 "$LGSUP" stop "$T/lives" >/dev/null 2>&1
expect "it stops in order" 0 $?
check "verify" timeout 120 "$LGSUP" verify "$T/lives"
tiny "$T/lives" --set job.seed=5 --set trainer.max_steps=10 --set-aside
expect "then it is put aside" 0 $?
check "nothing is left running" nothing_runs
