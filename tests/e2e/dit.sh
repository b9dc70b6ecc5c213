#!/bin/bash
# Class labels instead of captions: a DiT with v-prediction and min-SNR weights, no text encoder, from a
# folder of pictures with .cls files; killed, stopped and resumed like the other one.
. "$(dirname "$0")/lib.sh"
mkdir "$T/pictures"
tar -xf "$MICRO/data/micro-00000.tar" -C "$T/pictures"
n=0
find "$T/pictures" -name '*.txt' | sort | while read -r caption; do
    n=$((n + 1))
    if [ $n -gt 64 ]; then rm "$caption" "${caption%.txt}.png"; else echo $((n % 7)) >"${caption%.txt}.cls"; fi
    rm -f "$caption"
done
dit=(--set model.kind=dit --set model.num_classes=7 --set text.model= --set data.path="$T/pictures" --set data.flip=false
    --set trainer.objective=v --set trainer.min_snr_gamma=5 --set trainer.timesteps=uniform)

b=$T/b
train "$b" "${dit[@]}"
wait_step "$b" 5
kill_role "$b" trainer 0
wait_step "$b" 12
timeout 300 "$LGSUP" stop "$b" >"$T/out" 2>&1
expect "stopped" 0 $?
wait $tiny_pid
at=$(status_get "$b" .step)
check "its checkpoint (step $at) is complete" timeout 300 "$LGSUP" verify "$(checkpoint_of "$b" "$at")"
train "$b" "${dit[@]}"
check "resumed" wait_step "$b" $((at + 1))
settle "a rank killed, stopped, resumed" "$b"
check "and from that checkpoint" grep -q "resuming tiny at step $at from" "$b.out"
N=${settled:-40}
tiny "$T/a" "${dit[@]}" --set trainer.max_steps=$N --set sample.captions='["0", "6"]' --set sample.steps=4
expect "a DiT trains" 0 $?
[ $e2e_failed -eq 0 ] || tail -n 5 "$T/a.out"
expect "no text encoder is started" 0 "$(status_get "$T/a" '[.instances[] | select(.role == "text")] | length')"
expect "diffusers' class name" DiTTransformer2DModel "$(jq -r ._class_name "$(checkpoint_of "$T/a" $N)/model/config.json")"
check "pictures are drawn at the end" test -s "$T/a/samples/step$N.png"
same_as "a rank killed, stopped, resumed" "$b" "$T/a" $N
timeout 300 "$LGSUP" sample 3 --from "$T/a" --steps 4 -o "$T/3.png" >"$T/out" 2>&1
expect "sample of a label" 0 $?
timeout 300 "$LGSUP" sample 7 --from "$T/a" --steps 4 -o "$T/7.png" >"$T/out" 2>&1
check "a label that does not exist is refused (exit $?)" sh -c "[ $? -ne 0 ] && grep -Eq 'between 0 and 6' '$T/out'"

# eps, with DDIM's schedule.
tiny "$T/eps" "${dit[@]}" --set trainer.objective=eps --set trainer.max_steps=10
expect "eps" 0 $?
check "the first loss of eps is about 1" jq -en "$(head -1 "$T/eps/metrics.jsonl" | jq .loss) | . > 0.1 and . < 5"
