#!/bin/bash
# A data set that changes under a run is noticed by every loader that comes later, by a resume and by `scale`;
# put back, the run goes on to the same bytes; and who wants the new one says so.
. "$(dirname "$0")/lib.sh"
N=40
data=$T/data
mkdir "$data"
cp "$MICRO/data/micro-00000.tar" "$data/"
add() { cp "$MICRO/data/micro-00000.tar" "$data/micro-00001.tar"; }
put_back() { rm "$data/micro-00001.tar"; }
here=(--set "data.path=$data")
items=$(tar -tf "$data/micro-00000.tar" | sed 's/\..*//' | sort -u | wc -l)
manifest() { cat "$(checkpoint_of "$1" "$2")/manifest.json"; }

# At a resume.
tiny "$T/run" "${here[@]}" --set trainer.max_steps=20
expect "a run" 0 $?
expect "its manifest names the data set" "[[0,0,$items]]" "$(manifest "$T/run" 20 | jq -c '[.data[] | [.first, .epoch, .items]]')"
add
tiny "$T/run" "${here[@]}" --set trainer.max_steps=$N
expect "a resume on a changed data set is refused" 10 $?
check "with the counts" grep -q "the data set has changed: $items items, now $((2 * items))" "$T/run.out"
check "with the first difference" grep -q 'shard micro-00001.tar is new' "$T/run.out"
check "and with what to do" grep -q 'data.allow_changed=true' "$T/run.out"
expect "nothing was trained" 20 "$(step_of "$T/run")"
cp -r "$T/run" "$T/allowed"
put_back
tiny "$T/run" "${here[@]}" --set trainer.max_steps=$N
expect "put back, it goes on" 0 $?
undisturbed $N
same_as "put back" "$T/run" "$reference" $N
check "manifests are the same byte for byte" cmp "$(checkpoint_of "$T/run" $N)/manifest.json" "$(checkpoint_of "$reference" $N)/manifest.json"

# With the new one, knowingly.
add
tiny "$T/allowed" "${here[@]}" --set trainer.max_steps=$N --set data.allow_changed=true
expect "allowed, it goes on" 0 $?
batch=$(manifest "$T/run" 20 | jq '.next_n / .step')
epoch=$(((20 * batch + items - 1) / items))
expect "its manifest lists both" "[[0,0,$items],[$((20 * batch)),$epoch,$((2 * items))]]" \
    "$(manifest "$T/allowed" $N | jq -c '[.data[] | [.first, .epoch, .items]]')"
check "verify says so" sh -c "'$LGSUP' verify '$T/allowed' | grep -q 'has changed, allowed, at step 20: $items items, then $((2 * items))'"
tiny "$T/allowed" "${here[@]}" --set trainer.max_steps=60
expect "from then on that is its data set" 0 $?
check "other samples, other bytes" sh -c "! cmp -s '$(checkpoint_of "$T/allowed" $N)/optimizer.safetensors' '$(checkpoint_of "$T/run" $N)/optimizer.safetensors'"
put_back
tiny "$T/allowed" "${here[@]}" --set trainer.max_steps=80
expect "and the old one is a change" 10 $?
check "with the shard that is gone" grep -q 'shard micro-00001.tar is gone' "$T/allowed.out"

# While it runs: a loader that is replaced, one more loader.
train "$T/live" "${here[@]}"
wait_step "$T/live" 10
add
kill_role "$T/live" loader 0
wait "$tiny_pid"
expect "a loader that comes back to another data set parks the run" 11 $?
check "and says so" sh -c "'$LGSUP' status '$T/live' | grep -q 'the data set has changed'"
put_back
train "$T/live" "${here[@]}"
check "put back, it goes on from memory" wait_until 120 grep -q 'going on with tiny .* from memory' "$T/live.out"
wait_step "$T/live" $(($(step_of "$T/live") + 5))
add
timeout 120 "$LGSUP" scale loader 2 "$T/live" >/dev/null 2>&1
wait "$tiny_pid"
expect "one loader more, on another data set, parks the run" 11 $?
put_back
train "$T/live" "${here[@]}"
wait_step "$T/live" $(($(step_of "$T/live") + 5))
settle_same "after all that" "$T/live"

# The tokenizer's file, exchanged under a run: other tokens, and nobody else would see it.
cp -r "$MICRO/text_encoder" "$T/text"
train "$T/words" "${here[@]}" --set text.model="$T/text"
wait_step "$T/words" 10
printf 'x' >>"$T/text/spiece.model"
kill_role "$T/words" loader 0
wait "$tiny_pid"
expect "a loader that comes back to another tokenizer parks the run" 11 $?
check "and names the file" sh -c "'$LGSUP' status '$T/words' | grep -q 'text/spiece.model has changed'"
timeout 120 "$LGSUP" stop "$T/words" >/dev/null 2>&1
check "nothing is left running" nothing_runs
