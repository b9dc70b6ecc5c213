#!/bin/bash
# A run of several sources, with captions of tags: loaders that are killed, and more of them, change no byte; the ledger shows that
# every source had its share and each of its items in turn; another weight is another data set.
. "$(dirname "$0")/lib.sh"
N=60
mkdir "$T/curated"
tar -xf "$MICRO/data/micro-00000.tar" -C "$T/curated"
find "$T/curated" -name '*.txt' | sort | tail -n +8 | while read -r f; do rm "${f%.txt}".*; done
for f in "$T/curated"/*.txt; do printf 'style, one, two, three\nstyle, four, five\n' >"$f"; done
curated=$(find "$T/curated" -name '*.txt' | wc -l)
all=$(tar -tf "$MICRO/data/micro-00000.tar" | sed 's/\..*//' | sort -u | wc -l)
sources() { echo "data.source=[{path = '$MICRO/data/micro-00000.tar'$1}, {path = '$T/curated'$2}]"; }
same=(--set data.path= --set data.caption=random --set data.shuffle_tags=true --set data.keep_tags=1)
weights=(--set "$(sources ', weight = 0.75' '')" "${same[@]}")

tiny "$T/one" "${weights[@]}" --set trainer.max_steps=$N
expect "a run of two sources" 0 $?
lines() { "$LGSUP" verify "$1" | grep 'every source by turns'; }
# 8 samples a step; of the last pass of the first source a part.
expect "the ledger: every source had its share" "samples $((N * 6)), $((N * 2))" "$(lines "$T/one" | sed 's/.*; //')"
check "the config of the run names them" grep -q "weight = 0.75" "$T/one/config.toml"

train "$T/killed" "${weights[@]}" --set loader.instances=2
for at in 3 9 14 22 31; do
    wait_step "$T/killed" "$at"
    kill_role "$T/killed" loader $((at % 2))
done
settle "loaders killed" "$T/killed"
tiny "$T/whole" "${weights[@]}" --set trainer.max_steps="$settled" --set loader.instances=3
expect "an undisturbed run of three loaders" 0 $?
same_as "loaders killed" "$T/killed" "$T/whole" "$settled"

# Whose weights are others is another data set, told by name.
tiny "$T/one" --set "$(sources ', weight = 0.5' '')" "${same[@]}" --set trainer.max_steps=$((N + 20))
expect "another weight is refused at a resume" 10 $?
check "by name" grep -q 'the data set has changed.*the weight or the repeats of data.source\[0\]' "$T/one.out"
expect "nothing was trained" $N "$(step_of "$T/one")"
tiny "$T/one" --set "$(sources ', weight = 0.5' '')" "${same[@]}" --set trainer.max_steps=$((N + 20)) --set data.allow_changed=true
expect "allowed, it goes on" 0 $?
expect "with the other shares from there on" "samples 80, 80" "$(lines "$T/one" | sed 's/.*; //')"

# A ledger of other items than the sources give is noticed.
cp -r "$T/whole" "$T/forged"
sed -i 's/weight = 0.75/weight = 0.7500001/' "$T/forged/config.toml" # another data set: nothing to compare with
check "another data set is told" sh -c "'$LGSUP' verify '$T/forged' | grep -q 'not at data.source'"
cp "$T/whole/config.toml" "$T/forged/config.toml"
sed -i 's/^seed = 7/seed = 8/' "$T/forged/config.toml"
check "other items in the ledger are found" sh -c "'$LGSUP' verify '$T/forged' 2>&1 | grep -q 'was trained on other items'"

# Buckets: each item as often as it is repeated.
tiny "$T/buckets" --set "$(sources '' ', repeats = 20')" --set data.path= --set 'data.buckets=["16x16"]' --set trainer.max_steps=40
expect "repeats with buckets" 0 $?
check "the ledger of it" sh -c "'$LGSUP' verify '$T/buckets' | grep -q 'every item as often in an epoch as it is to come'"

timeout 120 "$LGSUP" data "$TINY" "${weights[@]}" >"$T/data.out" 2>&1
expect "lgsup data" 0 $?
for part in "data.source\[0\] .*: $all samples, 75 % of a run's" "data.source\[1\] .*curated: $curated samples, 25 % of a run's" \
    "of $((all + 2 * curated)) lines are cut at text.length = 8"; do
    check "it says: $part" grep -q "$part" "$T/data.out"
done
