#!/bin/bash
# Where a run starts: auto_resume, resume_from, init_from; and a checkpoint directory that is not
# complete is passed over.
. "$(dirname "$0")/lib.sh"
N=80
reference $N

# resume_from: another run directory, the same end.
tiny "$T/from" --set trainer.max_steps=$N --set trainer.resume_from="$(checkpoint_of "$reference" 60)"
expect "resume_from" 0 $?
check "resume_from: byte-identical end" same_files "$reference" "$T/from" $N
expect "resume_from: goes on at its step" 61 "$(head -1 "$T/from/metrics.jsonl" | jq .step)"
check "resume_from: verify" timeout 120 "$LGSUP" verify "$T/from"

# auto_resume goes first; without it, resume_from. An incomplete checkpoint is passed over.
cp -r "$reference" "$T/auto"
rm "$(checkpoint_of "$T/auto" 80)/manifest.json"
truncate -s 1000 "$(checkpoint_of "$T/auto" 60)/optimizer.safetensors"
tiny "$T/auto" --set trainer.max_steps=$N --set trainer.resume_from="$(checkpoint_of "$reference" 60)"
expect "auto_resume" 0 $?
check "auto_resume: on from step 40, the newest complete one" grep -Eq 'at step 40 from .*tiny_step40' "$T/auto.out"
check "auto_resume: byte-identical end" same_files "$reference" "$T/auto" $N
check "auto_resume: every step once" metrics_are_whole "$T/auto" $N
check "auto_resume: verify" timeout 120 "$LGSUP" verify "$T/auto"

# A writer that died in the middle of a removal after the last step, and everybody with it: nothing is left to
# do but that.
cp -r "$reference" "$T/over"
mkdir -p "$T/over/checkpoints/.old-tiny_step20/ema" "$T/over/checkpoints/.tmp-tiny_step80"
tiny "$T/over" --set trainer.max_steps=$N
expect "a run that is over: nothing to do" 0 $?
check "and says so" grep -q 'nothing to do' "$T/over.out"
expect "what a dead writer has left is gone" "" "$(cd "$T/over/checkpoints" && ls -d .[a-z]* 2>/dev/null)"
check "a run that is over: verify" timeout 120 "$LGSUP" verify "$T/over"

# init_from: the weights alone, from step 0.
tiny "$T/init" --set trainer.max_steps=5 --set trainer.init_from="$(checkpoint_of "$reference" 80)"
expect "init_from a checkpoint" 0 $?
expect "init_from: begins at step 1" 1 "$(head -1 "$T/init/metrics.jsonl" | jq .step)"
check "init_from: its first loss is lower than an untrained net's" jq -en \
    "$(head -1 "$T/init/metrics.jsonl" | jq .loss) < $(head -1 "$reference/metrics.jsonl" | jq .loss)"
tiny "$T/init2" --set trainer.max_steps=5 --set trainer.init_from="$(checkpoint_of "$reference" 80)/ema"
expect "init_from a diffusers folder" 0 $?
check "init_from: a checkpoint means its ema" same_files "$T/init" "$T/init2" 5
tiny "$T/other" --set trainer.max_steps=5 --set trainer.init_from="$(checkpoint_of "$reference" 80)" --set model.hidden=64
expect "init_from another architecture is refused" 10 $?
check "and says which" grep -Eq 'init_from.*(hidden|64|48|shape|config)' "$T/other.out"

# A checkpoint that changed since: nothing is trained on from it.
cp -r "$(checkpoint_of "$reference" 60)" "$T/changed"
printf '\x55\x55' | dd of="$T/changed/optimizer.safetensors" bs=1 seek=200000 conv=notrunc 2>/dev/null
tiny "$T/changed-run" --set trainer.max_steps=$N --set trainer.resume_from="$T/changed"
expect "a damaged checkpoint is refused" 5 $?
check "and the message names the file" grep -q "$T/changed/optimizer.safetensors" "$T/changed-run.out"
cp "$(checkpoint_of "$reference" 60)/optimizer.safetensors" "$T/changed/"
tiny "$T/changed-run" --set trainer.max_steps=$N --set trainer.resume_from="$T/changed"
expect "restored, it is accepted" 0 $?
check "restored: byte-identical end" same_files "$reference" "$T/changed-run" $N

# A checkpoint whose run is gone, with another max_steps: the learning rate's schedule is as long as it was.
schedule=(--set trainer.lr_steps=0 --set trainer.warmup_steps=2)
tiny "$T/short" --set trainer.max_steps=10 "${schedule[@]}"
mkdir "$T/alone" && mv "$(checkpoint_of "$T/short" 10)" "$T/alone/tiny_step10" && rm -r "$T/short"
tiny "$T/longer" --set trainer.max_steps=12 "${schedule[@]}" --set trainer.resume_from="$T/alone/tiny_step10"
expect "a checkpoint alone: its schedule is over" "0 0" "$(jq .lr "$T/longer/metrics.jsonl" | xargs)"
