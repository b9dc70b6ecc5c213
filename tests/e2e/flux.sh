#!/bin/bash
# A FLUX as published ones lie in their folder, tiny: what its files say becomes the config, an adapter and the whole net are
# trained, whoever dies and however ranks are cut to the same bytes, and drawn with the guidance that the net is told.
. "$(dirname "$0")/lib.sh"
RANDOM_MODEL=$e2e_build/bin/lg-random-model
check "a pipeline's folder" "$RANDOM_MODEL" pipeline --preset tiny-flux --dtype f32 --seed 3 \
    --spiece "$MICRO/text_encoder/spiece.model" "$T/flux"
TINY=$T/flux.toml
cat >"$TINY" <<END
pipeline = "$T/flux"
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
length = 16
[text.t5]
length = 12
[vae]
chunk = 4
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
timeout 120 "$LGSUP" check "$TINY" --set "job.dir=$T/none" >"$T/out" 2>&1
expect "check" 0 $?
[ $e2e_failed -eq 0 ] || { tail -n 5 "$T/out"; exit 1; }

a=$T/a
start_by_start "$a" 40
expect "all weights are trained, and gone on with" 0 $?
[ $e2e_failed -eq 0 ] || { tail -n 5 "$T/a.out"; exit 1; }
says() { grep -Eq "$1" "$a/config.toml"; }
check "its blocks" says '^depth = 3'
check "its shift" says '^flow_shift_by = "tokens"'
check "its guidance when drawn" says '^guidance = 3.5'
check "what its files say is written back" jq -e '.num_layers == 1 and .num_single_layers == 2 and .guidance_embeds
    and .in_channels == 16 and .axes_dims_rope == [4, 6, 6]' "$(checkpoint_of "$a" 40)/model/config.json"

same() { # NAME [...]: another way to the same bytes
    local run=$T/${1// /_}
    tiny "$run" --set trainer.max_steps=40 "${@:2}"
    expect "$1" 0 $?
    check "$1: byte-identical" same_files "$a" "$run" 40
}
same_in_all_modes

other() { # NAME [...]: trained on something else
    tiny "$T/other" --set trainer.max_steps=20 "${@:2}"
    expect "$1" 0 $?
    check "$1: another loss" test "$(tail -n 1 "$T/other/metrics.jsonl" | jq .loss)" != \
        "$(head -n 20 "$a/metrics.jsonl" | tail -n 1 | jq .loss)"
    rm -rf "$T/other"
}
other "another guidance" --set model.guidance=3.5
other "another shift" --set trainer.flow_shift_by=constant

close_losses() { awk -v a="$1" -v b="$2" 'BEGIN { d = a - b; exit !(a > 0 && (d < 0 ? -d : d) <= 1e-5 * a) }'; }
lora=(--set adapter.kind=lora --set adapter.rank=4 --set 'adapter.targets=["linear"]')
killed=$T/killed
train "$killed" "${lora[@]}" --set parallel.zero=3
wait_step "$killed" 5
for role in "trainer 1" "text.t5 0" "ckpt 0" "text.clip_l 0" "trainer 0"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
settle "an adapter, killed" "$killed"
N=${settled:-40}
tiny "$T/own" --set trainer.max_steps="$N" "${lora[@]}"
same_as "an adapter, killed" "$killed" "$T/own" "$N"

# Two ranks share a micro-batch, each with its rows of texts and image; one is killed in its midst.
tiny "$T/unsplit" --set data.size=32 --set trainer.max_steps=2
expect "four patches" 0 $?
for kind in ulysses fastseq; do
    split=(--set data.size=32 --set parallel.sp=2 --set parallel.sp_kind=$kind)
    killed=$T/$kind
    train "$killed" "${split[@]}"
    wait_step "$killed" 4
    kill_role "$killed" trainer 1
    wait_step "$killed" $(($(step_of "$killed") + 2))
    kill_role "$killed" trainer 0
    settle "split, $kind, killed" "$killed"
    N=${settled:-20}
    tiny "$T/$kind.whole" "${split[@]}" --set checkpoint.keep=1000000 --set trainer.max_steps="$N"
    same_as "split, $kind, killed" "$killed" "$T/$kind.whole" "$N"
    check "split, $kind: one rank's first loss" close_losses "$(head -n 1 "$T/unsplit/metrics.jsonl" | jq .loss)" \
        "$(head -n 1 "$killed/metrics.jsonl" | jq .loss)"
done

draw() { timeout 120 "$e2e_build/bin/lg-sample" "a red circle" --steps 4 --seed 3 "$@" >"$T/said" 2>&1; }
check "it can be drawn with" draw --from "$a" -o "$T/a.png"
check "told another guidance" draw --from "$a" --guidance 1 -o "$T/b.png"
check "with its adapter" draw --from "$T/own" -o "$T/c.png"
check "three pictures" test "$(md5sum "$T"/[abc].png | cut -d' ' -f1 | sort -u | wc -l)" = 3

refused() { # NAME PATTERN [--set ...]
    local name=$1 pattern=$2
    shift 2
    tiny "$T/refused" "$@"
    expect "$name: exit" 3 $?
    check "$name: says why" grep -Eq "$pattern" "$T/refused.out"
}
refused "more ranks than heads" 'parallel.sp = 8 is more than model.heads' --set trainer.ranks=8 --set parallel.sp=8
refused "another depth" 'model.depth = 4, but the weights of model.from have 3' --set model.depth=4
check "nothing is left running" nothing_runs
