#!/bin/bash
# A CLIP as text encoder, its tokenizer beside it as in a folder of diffusers': killed, and byte-identical to an undisturbed
# run; in one shard or three; what is wrong with it is said before anything starts.
. "$(dirname "$0")/lib.sh"
p=$T/pipeline
check "a CLIP of random weights" "$e2e_build/bin/lg-random-model" clip --preset tiny --dtype f32 "$p/text_encoder_2"
mkdir "$p/tokenizer_2"
mv "$p/text_encoder_2"/{vocab.json,merges.txt} "$p/tokenizer_2"
echo '{"pad_token": "!"}' >"$p/tokenizer_2/special_tokens_map.json"
clip=(--set text.model="$p/text_encoder_2" --set text.length=16)

check "check says what it needs" timeout 120 "$LGSUP" check "$TINY" --set job.dir="$T/none" "${clip[@]}"
check "lgsup data counts its tokens" sh -c "timeout 120 '$LGSUP' data '$TINY' $(printf -- "'%s' " "${clip[@]}") | grep -q 'tokens, median'"
b=$T/b
train "$b" "${clip[@]}"
wait_step "$b" 5
kill_role "$b" text 0
wait_step "$b" 10
kill_role "$b" loader 0
wait_step "$b" 15
kill_role "$b" trainer 1
wait_step "$b" 20
kill_role "$b" text 1
settle "text encoders, loader and a rank killed" "$b"
N=${settled:-40}
start_by_start "$T/a" $N "${clip[@]}"
expect "a PixArt trains on a CLIP" 0 $?
[ $e2e_failed -eq 0 ] || tail -n 5 "$T/a.out"
same_as "text encoders, loader and a rank killed" "$b" "$T/a" $N
expect "the transformer takes its width" 64 "$(jq .caption_channels "$(checkpoint_of "$T/a" $N)/model/config.json")"
start_by_start "$T/c" $N "${clip[@]}" --set text.instances=1 --set text.shards=3
same_as "one instance, three shards" "$T/c" "$T/a" $N
timeout 300 "$LGSUP" sample "a red circle" --from "$T/a" --steps 4 -o "$T/red.png" >"$T/out" 2>&1
expect "sample of a caption" 0 $?
check "its picture" test -s "$T/red.png"

# A token sees nothing behind it: up to where the caption is cut, its states are those of the whole one.
echo "a red circle on the left" >"$T/caption.txt"
for length in 9 77; do
    check "lg-encode, $length tokens" "$LGSUP" encode text --model "$p/text_encoder_2" --length $length "$T/caption.txt" \
        "$T/$length.safetensors"
done
head_of() { tail -c $(($2 * 64 * 4)) "$1" | head -c $((8 * 64 * 4)); }
check "a shorter caption is the front of a longer one" cmp <(head_of "$T/9.safetensors" 9) <(head_of "$T/77.safetensors" 77)

check "lg-graph prints it, 77 tokens" sh -c "'$e2e_build/bin/lg-graph' '$p/text_encoder_2' | grep -q 'causal=1 .*(1,77,4,16'"

refused() { # NAME PATTERN [--set ...]
    local name=$1 pattern=$2
    shift 2
    tiny "$T/refused" "${clip[@]}" "$@"
    expect "$name: exit" 3 $?
    check "$name: says why" grep -Eq "$pattern" "$T/refused.out"
}
refused "captions of 78 tokens" 'text.length = 78: the text encoder in text.model takes 77 tokens at most' --set text.length=78
mv "$p/tokenizer_2" "$p/elsewhere"
refused "no tokenizer" 'vocab.json with merges.txt, or tokenizer.json, does not exist, nor in .*/tokenizer_2'
mv "$p/elsewhere" "$p/tokenizer_2"

# Another padding gives other states: the files that name it belong to the tokenizer.
train "$T/words" "${clip[@]}"
wait_step "$T/words" 10
echo '{}' >"$p/tokenizer_2/special_tokens_map.json"
kill_role "$T/words" loader 0
wait "$tiny_pid"
expect "a loader that comes back to another tokenizer parks the run" 11 $?
timeout 120 "$LGSUP" stop "$T/words" >/dev/null 2>&1
check "nothing is left running" nothing_runs
