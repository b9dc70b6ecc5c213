#!/bin/bash
# Clips, from files to files: Latte and LTX, tiny, train on moving emoji through an autoencoder, whoever dies and however ranks are cut
# to the same bytes, each clip once in an epoch, and draw clips again.
. "$(dirname "$0")/lib.sh"
RANDOM_MODEL=$e2e_build/bin/lg-random-model
check "clips" timeout 120 "$e2e_build/bin/lg-emoji-video" --size 16 --frames 9 --fps 8 --only "red heart" --only dog --only pizza "$T/clips"
CLIPS=$T/clips/clips-00000.tar
for kind in latte ltx; do
    check "$kind: a pipeline's folder" "$RANDOM_MODEL" pipeline --preset tiny-$kind --dtype f32 --seed 3 \
        --spiece "$MICRO/text_encoder/spiece.model" "$T/$kind"
done
# Latte, frame by frame; LTX with its own autoencoder, which is causal in time.
config() { # KIND FRAMES FPS
    cat >"$T/$1.toml" <<END
pipeline = "$T/$1"
[job]
name = "tiny"
seed = 7
[data]
path = "$CLIPS"
size = 16
frames = $2
fps = $3
[loader]
chunk = 4
[text]
chunk = 4
length = 12
[vae]
chunk = 4
[trainer]
ranks = 2
max_steps = 80
global_batch_size = 8
micro_batch_size = 4
lr = 1e-3
[parallel]
zero = 2
[ema]
decay = 0.99
[checkpoint]
every = 20
keep = 100
END
}
config latte 4 4
config ltx 9 8
[ $e2e_failed -eq 0 ] || exit 1

# The ledger has every clip once in an epoch, as often as the data set has clips.
ledger_is_right() { # RUN STEPS
    head -c $((64 * $2)) "$1/ledger" >"$T/ledger"
    "$e2e_build/tests/chaos/ledger_check" --steps "$2" --batch 8 --tar "$CLIPS" --seed 7 "$T/ledger"
}
close() { # RUN RUN STEPS: losses and norms to 1e-5
    paste <(head -n "$3" "$1/metrics.jsonl" | jq -r '"\(.step) \(.loss) \(.grad_norm)"') \
        <(head -n "$3" "$2/metrics.jsonl" | jq -r '"\(.step) \(.loss) \(.grad_norm)"') | awk -v steps="$3" '
        function far(a, b) { return (a - b > 0 ? a - b : b - a) > 1e-5 * a }
        NF != 6 || $1 != $4 || far($2, $5) || far($3, $6) { print; bad = 1 }
        END { exit bad || NR != steps }'
}
draw() { timeout 120 "$e2e_build/bin/lg-sample" "a dog moves right" --steps 3 --seed 3 "$@" >"$T/said" 2>&1; }
refused() { # NAME PATTERN [--set ...]
    tiny "$T/refused" "${@:3}"
    expect "$1: exit" 3 $?
    check "$1: says why" grep -Eq "$2" "$T/refused.out"
    rm -rf "$T/refused" "$T/refused.out"
}

# Of either kind: whoever dies, the same bytes, and each clip once.
whoever_dies() {
    killed=$T/$kind.killed
    train "$killed"
    wait_step "$killed" 5
    for role in "trainer 1" "vae 0" "loader 0" "text 0" "ckpt 0" "ema 0" "trainer 0"; do
        kill_role "$killed" $role
        wait_step "$killed" $(($(step_of "$killed") + 3))
    done
    settle "$kind, killed" "$killed"
    N=${settled:-40}
    tiny "$T/$kind.whole" --set trainer.max_steps="$N"
    same_as "$kind, killed" "$killed" "$T/$kind.whole" "$N"
    check "$kind, killed: its clips" ledger_is_right "$killed" "$N"
}
# A clip is split among two ranks, of two such pairs; a member of each dies in the midst of it.
split_among_ranks() {
    local run=$T/$kind.killed.split
    split=(--set trainer.ranks=4 --set parallel.sp=2 --set trainer.micro_batch_size=2)
    train "$run" "${split[@]}"
    wait_step "$run" 4
    for rank in 1 2 0; do
        kill_role "$run" trainer $rank
        wait_step "$run" $(($(step_of "$run") + 3))
    done
    settle "$kind, split, killed" "$run"
    N=${settled:-20}
    tiny "$T/$kind.split" --set trainer.max_steps="$N" "${split[@]}"
    same_as "$kind, split, killed" "$run" "$T/$kind.split" "$N"
}

for kind in latte ltx; do
    TINY=$T/$kind.toml a=$T/$kind.a
    start_by_start "$a" 40
    expect "$kind: trained" 0 $?
    [ $e2e_failed -eq 0 ] || { tail -n 5 "$a.out"; exit 1; }
    check "$kind: no clip is void" test "$(jq -s 'map(.voids) | add' "$a/metrics.jsonl")" = 0
    check "$kind: its clips" ledger_is_right "$a" 40
    config=$(checkpoint_of "$a" 40)/model/config.json
    if [ $kind = latte ]; then
        check "$kind: its frames are written back" jq -e '.video_length == 4 and .num_layers == 2' "$config"
    else
        check "$kind: its frames are written back" jq -e '._sample_frames == 3 and ._cell_seconds == 0.5 and ._cell_pixels == 8' "$config"
    fi

    same() { # NAME [...]: another way to the same bytes
        local run=$T/${1// /_}
        tiny "$run" --set trainer.max_steps=40 "${@:2}"
        expect "$1" 0 $?
        check "$1: byte-identical" same_files "$a" "$run" 40
        rm -rf "$run"
    }
    others="--set vae.instances=2 --set loader.instances=2"
    [ $kind = latte ] || others+=" --set vae.slice=auto" # LTX's encoder is causal
    if in_all; then
        same "$kind, whole state" --set parallel.zero=0
        same "$kind, gathered weights" --set parallel.zero=3 --set memory.recompute=block
        same "$kind, two autoencoders" $others
    else
        same "$kind, gathered weights, two autoencoders" --set parallel.zero=3 --set memory.recompute=block $others
    fi

    # What dies is the same of both: in `make check` each way with one of them.
    [ $kind = ltx ] && [ -z "${CHECK_ALL:-}" ] || whoever_dies
    [ $kind = latte ] && [ -z "${CHECK_ALL:-}" ] || split_among_ranks

    for ending in gif mp4 png; do
        check "$kind: drawn as $ending" draw --from "$a" -o "$T/$kind.$ending"
        check "$kind: a file" test -s "$T/$kind.$ending"
    done
    draw --from "$a" -o "$T/$kind.again.gif"
    check "$kind: drawn twice alike" cmp "$T/$kind.gif" "$T/$kind.again.gif"
    [ $e2e_failed -eq 0 ] || exit 1
done
check "drawn from a picture" draw --from "$T/ltx.a" --first-frame "$T/ltx.png" -o "$T/from.gif"
check "which is another clip" sh -c "! cmp -s '$T/ltx.gif' '$T/from.gif'"
check "drawn from a picture by a model of eps" sh -c "! '$e2e_build/bin/lg-sample' a --from '$T/latte.a' --first-frame '$T/ltx.png' -o '$T/none.gif' 2>'$T/said' &&
    grep -q 'models of flow alone, not of eps' '$T/said'"

# Pictures beside clips of two lengths, each split among two ranks, of two such pairs; a picture's three rows do not halve. Pairs
# train on what single ranks train on, in the same order: but for rounding the losses are theirs.
"$e2e_build/bin/lg-emoji-video" --size 24 --frames 5 --fps 8 --only fox "$T/short" >/dev/null
mkdir "$T/both" && cp "$CLIPS" "$MICRO/data/micro-00000.tar" "$T/both" && cp "$T/short/clips-00000.tar" "$T/both/short-00000.tar"
both=(--set data.path="$T/both" --set 'data.buckets=["9x16x16","5x16x24","1x24x16"]' --set trainer.micro_batch_size=2 --set vae.chunk=2 \
    --set trainer.clean_first_frame=0.5)
pairs=(--set trainer.ranks=4 --set parallel.sp=2)
tiny "$T/both.one" "${both[@]}" --set trainer.max_steps=20
expect "pictures beside clips" 0 $?
check "pictures beside clips: three shapes" test "$(grep -c 'bucket .*: [1-9].* items (' "$T/both.one/logs/loader.0.log")" = 3
check "pictures beside clips: none is void" test "$(jq -s 'map(.voids) | add' "$T/both.one/metrics.jsonl")" = 0
killed=$T/both.killed
train "$killed" "${both[@]}" "${pairs[@]}"
wait_step "$killed" 4
for role in "trainer 0" "vae 0" "trainer 3" "loader 0"; do
    kill_role "$killed" $role
    wait_step "$killed" $(($(step_of "$killed") + 3))
done
settle "pictures beside clips, split, killed" "$killed"
N=${settled:-40}
start_by_start "$T/both.whole" "$N" "${both[@]}" "${pairs[@]}" --set checkpoint.keep=1000000
same_as "pictures beside clips, split, killed" "$killed" "$T/both.whole" "$N"
check "pictures beside clips, split: single ranks' losses" close "$T/both.one" "$T/both.whole" 20
tiny "$T/both.zero3" "${both[@]}" "${pairs[@]}" --set trainer.max_steps=20 --set parallel.zero=3 --set memory.recompute=block
check "pictures beside clips, split: gathered weights, the same bytes" same_files "$T/both.whole" "$T/both.zero3" 20

refused "ltx, fastseq" 'fastseq.*normed over all heads' --set parallel.sp=2 --set parallel.sp_kind=fastseq
refused "pictures alone" 'data.frames = 9 with model.kind = "pixart"' --set model.from= --set pipeline= --set model.kind=pixart
TINY=$T/latte.toml
refused "more ranks than frames" 'whose frames stay whole' --set trainer.ranks=4 --set parallel.sp=4 --set data.frames=2
check "nothing is left running" nothing_runs
