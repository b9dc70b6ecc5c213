#!/bin/bash
# Three text encoders side by side, as SD3 has them, tiny: each killed, one scaled on the way, byte-identical to an
# undisturbed run; an encoder that sees the empty caption alone; what is wrong with a section is said before anything starts.
. "$(dirname "$0")/lib.sh"
RANDOM_MODEL=$e2e_build/bin/lg-random-model
p=$T/pipeline
check "a CLIP" "$RANDOM_MODEL" clip --preset tiny --dtype f32 --seed 1 "$p/text_encoder"
check "another CLIP" "$RANDOM_MODEL" clip --preset tiny --dtype f32 --seed 2 "$p/text_encoder_2"
mkdir "$p/tokenizer_2"
mv "$p/text_encoder_2"/{vocab.json,merges.txt} "$p/tokenizer_2"
echo '{"pad_token": "!"}' >"$p/tokenizer_2/special_tokens_map.json"
TINY=$T/encoders.toml
cat >"$TINY" <<END
[job]
name = "tiny"
seed = 7
[data]
path = "$MICRO/data/micro-00000.tar"
size = 16
[loader]
chunk = 4
[text]
chunk = 4
[text.clip_l]
model = "$p/text_encoder"
length = 16
[text.clip_g]
model = "$p/text_encoder_2"
length = 16
chunk = 8
[text.t5]
model = "$EMOJI/text_encoder"
length = 12
chunk = 2
shards = 2
[vae]
model = "$MICRO/vae"
chunk = 4
[model]
kind = "sd3"
hidden = 64
depth = 2
heads = 4
[trainer]
ranks = 2
max_steps = 80
global_batch_size = 8
micro_batch_size = 4
lr = 1e-3
[ema]
decay = 0.99
[checkpoint]
every = 20
keep = 100
END
if timeout 60 "$LGSUP" check "$TINY" 2>&1 | grep -q 'model.kind is out of range'; then
    skip "all" "no model of this build has several text encoders"
    exit 0
fi

timeout 120 "$LGSUP" check "$TINY" --set "job.dir=$T/none" >"$T/out" 2>&1
expect "check" 0 $?
[ $e2e_failed -eq 0 ] || { tail -n 5 "$T/out"; exit 1; }
check "it names each encoder's processes" grep -Eq '^text\.clip_g +1 ' "$T/out"
check "and memory" grep -Eq '^text\.t5/1/weights' "$T/out"
check "and texts" grep -Fq '; text.clip_l (16, 64), pooled (64); text.clip_g (16, 64), pooled (64); text.t5 (12, ' "$T/out"
check "lgsup data says for each what is cut" sh -c "timeout 120 '$LGSUP' data '$TINY' --set text.t5.length=3 >'$T/data' 2>&1 &&
    grep -q 'are cut at text.clip_l.length = 16; .* are cut at text.t5.length = 3' '$T/data'"

b=$T/b
train "$b"
wait_step "$b" 5
kill_role "$b" text.t5 0
wait_step "$b" 10
timeout 120 "$LGSUP" scale text.t5 2 "$b" >"$T/out" 2>&1
expect "scale text.t5 2" 0 $?
expect "two of them run" 2 "$(status_get "$b" '[.instances[] | select(.role == "text.t5" and .pid > 0)] | length')"
kill_role "$b" text.clip_l 0
wait_step "$b" 15
kill_role "$b" loader 0
kill_role "$b" text.t5 1
wait_step "$b" 20
kill_role "$b" text.clip_g 0
kill_role "$b" trainer 1
wait_step "$b" 25
timeout 120 "$LGSUP" swap text.clip_g.0 "$b" >"$T/out" 2>&1
expect "swap text.clip_g.0" 0 $?
timeout 60 "$LGSUP" scale text 2 "$b" >"$T/out" 2>&1
check "a role that the run lacks is refused (exit $?)" \
    grep -q 'no text: its text encoders are text.clip_l, text.clip_g, text.t5' "$T/out"
for role in text.clip_l text.clip_g text.t5; do
    wait_until 120 test "$(restarts_of "$b" $role)" -ge 1
    check "$role has come back" test "$(restarts_of "$b" $role)" -ge 1
done
settle "each encoder, loader and a rank killed" "$b"
N=${settled:-40}
start_by_start "$T/a" $N
expect "undisturbed" 0 $?
[ $e2e_failed -eq 0 ] || tail -n 5 "$T/a.out"
same_as "each encoder, loader and a rank killed" "$b" "$T/a" $N
tiny "$T/c" --set trainer.max_steps=20 --set text.t5.instances=2 --set text.t5.shards=1 --set text.clip_l.memo=0
expect "other numbers" 0 $?
same_as "other numbers of instances and shards, no memo" "$T/c" "$T/a" 20
timeout 300 "$LGSUP" sample "a red circle" --from "$T/a" --steps 4 -o "$T/red.png" >"$T/out" 2>&1
expect "sample of a caption" 0 $?
check "its picture" test -s "$T/red.png"

# Each text counts, and its dropout is its own.
loss() { tail -n 1 "$1/metrics.jsonl" | jq .loss; }
for of in clip_l clip_g t5; do
    tiny "$T/$of" --set trainer.max_steps=20 --set text.$of.dropout=1
    expect "text.$of.dropout = 1" 0 $?
    check "text.$of.dropout changes what is trained on" test "$(loss "$T/$of")" != "$(head -n 20 "$T/a/metrics.jsonl" | tail -n 1 | jq .loss)"
done
tiny "$T/all" --set trainer.max_steps=20 --set text.dropout=1
tiny "$T/none" --set trainer.max_steps=20 --set trainer.cond_dropout=1
expect "all encoders without a caption: as cond_dropout" "$(loss "$T/none")" "$(loss "$T/all")"

refused() { # NAME PATTERN [--set ...]
    local name=$1 pattern=$2
    shift 2
    tiny "$T/refused" "$@"
    expect "$name: exit" 3 $?
    check "$name: says why" grep -Eq "$pattern" "$T/refused.out"
}
refused "a T5 in the place of a CLIP" 'text.clip_l.model: .* is a T5, but model.kind = "sd3" has a CLIP there' \
    --set text.clip_l.model="$MICRO/text_encoder"
refused "an encoder that a PixArt lacks" 'text.clip_l.* model.kind = "pixart" has no such text encoder: its text encoders are: t5' \
    --set model.kind=pixart
tiny "$T/a" --set trainer.max_steps=$((N + 20)) --set text.t5.length=13
check "another length cannot be gone on with (exit $?)" grep -q 'text.t5.length was 12' "$T/a.out"
check "nothing is left running" nothing_runs
