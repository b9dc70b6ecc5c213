#!/bin/bash
# Bad input: the message says what, where and what to do; the exit code is the documented one
# (docs/exit-codes.md); nothing that was complete is lost.
. "$(dirname "$0")/lib.sh"

# says NAME CODE COMMAND... -- PATTERN...: it ends with CODE and every pattern stands in its output.
says() {
    local name=$1 want=$2 code missing=
    local -a cmd=()
    shift 2
    while [ "$1" != -- ]; do cmd+=("$1"); shift; done
    shift
    timeout --foreground -k 5 600 "${cmd[@]}" >"$T/said" 2>&1 </dev/null
    code=$?
    for pattern; do grep -Eqi -- "$pattern" "$T/said" || missing="$missing /$pattern/"; done
    if [ $code -ne "$want" ]; then
        fail "$name" "exit $code, expected $want: $(tail -n 4 "$T/said" | tr '\n' ' ')"
    elif [ -n "$missing" ]; then
        fail "$name" "nothing about$missing in: $(tail -n 6 "$T/said" | tr '\n' ' ')"
    else
        ok "$name"
    fi
}
# config NAME SED...: a copy of tiny.toml with absolute paths and an edit; its path in $config.
config() {
    config=$T/$1.toml
    sed -e "s#\.\./\.\./examples/#$e2e_root/examples/#" -e "s#run-not-set#$T/run-$1#" "$TINY" >"$config"
    shift
    sed -i "$@" "$config"
}
line_of() { grep -n "$1" "$config" | head -1 | cut -d: -f1; }
short=(--set trainer.max_steps=6 --set checkpoint.every=0)

# ---- the config, by check and by start ----
config syntax -e 's/^ranks = 2/ranks = = 2/'
says "broken TOML" 3 "$LGSUP" check "$config" -- "syntax.toml:$(line_of '^ranks = =')"
says "broken TOML, start" 3 "$LGSUP" start "$config" -- "syntax.toml:$(line_of '^ranks = =')"
check "broken TOML: no run directory" test ! -e "$T/run-syntax"
config unknown -e 's/^warmup_steps/warmup_step/'
says "unknown key" 3 "$LGSUP" check "$config" -- "unknown.toml:$(line_of '^warmup_step ')" 'warmup_step\b' 'warmup_steps'
config section -e 's/^\[checkpoint\]/[checkpoints]/'
says "unknown table" 3 "$LGSUP" check "$config" -- "section.toml:$(line_of '^\[checkpoints')" 'checkpoints' 'checkpoint\b'
config type -e 's/^lr = 1e-3/lr = "fast"/'
says "wrong type" 3 "$LGSUP" check "$config" -- "type.toml:$(line_of '^lr = "')" 'trainer\.lr' 'number'
config range -e 's/^decay = 0.99/decay = 1.5/'
says "out of range" 3 "$LGSUP" check "$config" -- "range.toml:$(line_of '^decay')" 'ema\.decay' '1\.5' '0 to 1|at most 1'
config missing -e "s#^model = .*/vae\"#model = \"$T/no-such-vae\"#"
says "missing file" 3 "$LGSUP" check "$config" -- "missing.toml:$(line_of no-such-vae)" 'vae\.model' "$T/no-such-vae"
config missing_data -e "s#^path = .*#path = \"$T/no-such-data.tar\"#"
says "missing data" 3 "$LGSUP" check "$config" -- "missing_data.toml:$(line_of no-such-data)" 'data\.path' 'no-such-data.tar' 'does not exist'
config several -e 's/^ranks = 2/ranks = 0/' -e 's/^keep = 3/kep = 3/' -e 's/^flip = true/flip = 1/'
says "several errors at once" 3 "$LGSUP" check "$config" -- 'trainer\.ranks' 'kep' 'data\.flip'
config first -e 's/^keep = 3/kep = 3/' -e "s#^model = .*/vae\"#model = \"$T/no-such-vae\"#"
says "schema errors come first" 3 "$LGSUP" check "$config" -- 'kep'
if grep -q no-such-vae "$T/said" && [ "$(grep -n -m1 kep "$T/said" | cut -d: -f1)" -gt "$(grep -n -m1 no-such-vae "$T/said" | cut -d: -f1)" ]; then
    fail "schema errors come first" "a missing file is named before them"
fi
says "no such pipeline.toml" 8 "$LGSUP" check "$T/none.toml" -- "$T/none.toml"
says "wrong --set key" 3 "$LGSUP" check "$TINY" --set trainer.rank=2 -- 'trainer\.rank\b' 'trainer\.ranks'
says "wrong --set value" 3 "$LGSUP" check "$TINY" --set trainer.ranks=many -- 'trainer\.ranks' 'many|whole number'
says "batch that does not divide" 3 "$LGSUP" check "$TINY" --set trainer.ranks=3 -- 'global_batch_size' 'trainer\.ranks = 3' 'multiple of 3'
says "no command: the list of them" 0 "$LGSUP" -- 'lgsup start' 'exit-codes'
says "unknown command" 2 "$LGSUP" strat "$TINY" -- 'strat'
says "unknown option" 2 "$LGSUP" start "$TINY" --frobnicate -- 'frobnicate'
says "status of no run" 8 "$LGSUP" status "$T/nowhere" -- "$T/nowhere" 'not a run directory'
says "stop of no run" 8 "$LGSUP" stop "$T/nowhere" -- "$T/nowhere" 'not a run directory'

# ---- models ----
cp -r "$MICRO/vae" "$T/vae"
truncate -s -1000 "$T/vae/diffusion_pytorch_model.safetensors"
says "truncated VAE, encode" 5 "$LGSUP" encode vae --model "$T/vae" "$e2e_root/tests/golden/emoji.safetensors" "$T/out.safetensors" -- \
    "$T/vae/diffusion_pytorch_model.safetensors" 'truncated|missing|bytes'
check "truncated VAE: no output" test ! -e "$T/out.safetensors"
head -c 20000 "$e2e_root/tests/golden/emoji.safetensors" >"$T/cut.safetensors"
says "truncated input of encode" 5 "$LGSUP" encode vae --model "$EMOJI/vae" "$T/cut.safetensors" "$T/out.safetensors" -- \
    "$T/cut.safetensors" 'truncated|missing|bytes'
says "truncated VAE, check" 5 "$LGSUP" check "$TINY" --set vae.model="$T/vae" -- \
    "diffusion_pytorch_model.safetensors" 'truncated|missing|bytes'
says "truncated VAE, start" 5 "$LGSUP" start "$TINY" --set job.dir="$T/trunc" --set vae.model="$T/vae" "${short[@]}" -- \
    "diffusion_pytorch_model.safetensors" 'truncated|missing|bytes'
check "truncated VAE: no stage was started" test ! -e "$T/trunc/logs/vae.0.log"
check "truncated VAE: nothing is left running" nothing_runs
cp "$MICRO/vae/diffusion_pytorch_model.safetensors" "$T/vae/"
sed -i 's/"layers_per_block": *[0-9]*/"layers_per_block": 7/' "$T/vae/config.json"
says "a VAE of fewer layers than its config says, check" 10 "$LGSUP" check "$TINY" --set vae.model="$T/vae" -- \
    "diffusion_pytorch_model.safetensors" 'tensor .*resnets.* is missing'
cp "$MICRO/vae/config.json" "$T/vae/"
says "the file restored, it goes on" 0 "$LGSUP" start "$TINY" --set job.dir="$T/trunc" --set vae.model="$T/vae" "${short[@]}" -- 'checkpoint'
cp -r "$MICRO/text_encoder" "$T/text_encoder"
truncate -s -1000 "$T/text_encoder/model.safetensors"
says "truncated text encoder, check" 5 "$LGSUP" check "$TINY" --set text.model="$T/text_encoder" -- \
    "text_encoder/model.safetensors" 'truncated|missing|bytes'
cp "$MICRO/text_encoder/model.safetensors" "$T/text_encoder/"
cp -r "$T"/trunc/checkpoints/*_step6 "$T/begin"
begun=(--set job.dir="$T/begun" --set trainer.init_from="$T/begin")
says "a net to begin with" 0 "$LGSUP" start "$TINY" "${begun[@]}" "${short[@]}" -- 'checkpoint'
says "of another depth, check" 10 "$LGSUP" check "$TINY" --set trainer.init_from="$T/begin" --set model.depth=7 -- "$T/begin/" 'tensor .* is missing'
find "$T/begin" -name '*.safetensors' -exec truncate -s -1000 {} +
says "truncated net to begin with, check" 5 "$LGSUP" check "$TINY" --set trainer.init_from="$T/begin" -- "$T/begin/" 'truncated|missing|bytes'
says "truncated net that a run has begun with: it goes on" 0 "$LGSUP" start "$TINY" "${begun[@]}" "${short[@]}" --set trainer.max_steps=8 -- 'checkpoint'
spiece=$T/text_encoder/spiece.model # most of it is the character table, whose first part is a trie
head -c 1000 /dev/zero | tr '\0' '\377' | dd of="$spiece" bs=1 seek=$(($(stat -c %s "$spiece") - 230000)) conv=notrunc status=none
says "a damaged tokenizer" 11 "$LGSUP" start "$TINY" --set job.dir="$T/spiece" --set text.model="$T/text_encoder" "${short[@]}" -- \
    'spiece\.model' 'character table'
check "a damaged tokenizer: no restarts" test "$(grep -c 'character table' "$T/spiece/logs/loader.0.log")" -le 1

# ---- data ----
mkdir "$T/pictures"
tar -xf "$MICRO/data/micro-00000.tar" -C "$T/pictures"
find "$T/pictures" -type f | sort | tail -n +81 | xargs rm # 40 pictures, 40 captions
victim=$(find "$T/pictures" -name '*.png' | sort | head -1)
truncate -s $(($(stat -c %s "$victim") / 2)) "$victim"
data=(--set data.path="$T/pictures")
says "a picture cut in half: the run goes on" 0 "$LGSUP" start "$TINY" --set job.dir="$T/void" "${data[@]}" \
    --set trainer.max_steps=10 -- 'void' "$(basename "$victim" .png)"
expect "voids in metrics.jsonl (two epochs of 40)" 2 "$(jq -s 'map(.voids) | add' "$T/void/metrics.jsonl")"
expect "voids in the status" 2 "$(status_get "$T/void" .voids)"
check "loss stays a number" jq -es 'all(.loss | type == "number")' "$T/void/metrics.jsonl"
find "$T/pictures" -name '*.png' | sort | head -20 | xargs truncate -s 100
says "half of the pictures cut: parked" 11 "$LGSUP" start "$TINY" --set job.dir="$T/voids" "${data[@]}" \
    --set trainer.max_steps=40 -- 'unreadable' 'data\.void_ratio_max'
expect "half of the pictures cut: state" parked "$(status_get "$T/voids" .state)"
check "half of the pictures cut: stop lets its memory go" "$LGSUP" stop "$T/voids"
check "half of the pictures cut: nothing is left running" nothing_runs

find "$T/pictures" -name '*.png' | xargs truncate -s 60
says "no picture can be read, in a run of few samples: parked" 11 "$LGSUP" start "$TINY" --set job.dir="$T/allvoid" "${data[@]}" \
    --set trainer.max_steps=2 -- 'none of the' 'logs/loader'
check "no picture can be read: stop lets its memory go" "$LGSUP" stop "$T/allvoid"

head -c $(($(stat -c %s "$MICRO/data/micro-00000.tar") / 2)) "$MICRO/data/micro-00000.tar" >"$T/half.tar"
says "a tar cut in half" 11 "$LGSUP" start "$TINY" --set job.dir="$T/tar" --set data.path="$T/half.tar" "${short[@]}" -- "$T/half.tar" 'byte'
mkdir "$T/empty"
says "an empty data set" 11 "$LGSUP" start "$TINY" --set job.dir="$T/none" --set data.path="$T/empty" "${short[@]}" -- "$T/empty" 'no picture|empty|no sample|nothing'
check "an empty data set: nothing is left running" nothing_runs

# ---- run directory ----
echo text >"$T/file"
says "run directory below a file" 4 "$LGSUP" start "$TINY" --set job.dir="$T/file/run" -- "$T/file/run" 'Not a directory'
says "run directory is a file" 3 "$LGSUP" start "$TINY" --set job.dir="$T/file" -- 'job\.dir' 'not a directory'
mkdir "$T/ro"
if mount -t tmpfs -o ro,size=1m tmpfs "$T/ro" 2>/dev/null; then
    e2e_mounts+=("$T/ro")
    says "read-only run directory" 4 "$LGSUP" start "$TINY" --set job.dir="$T/ro/run" -- "$T/ro/run" 'Read-only'
else
    skip "read-only run directory" "this user may not mount"
fi

# ---- a second start ----
run=$T/second
train "$run"
wait_step "$run" 5
says "second start" 7 "$LGSUP" start "$TINY" --set job.dir="$run" -- "$run" 'already supervised' 'lgsup status|lgsup stop'
says "second start, detached" 7 "$LGSUP" start "$TINY" --set job.dir="$run" --detach -- 'already supervised'
at=$(step_of "$run")
check "the first goes on" wait_step "$run" $((at + 2))
timeout 300 "$LGSUP" stop "$run" >"$T/said" 2>&1
wait $tiny_pid
expect "the first ends in order" 0 $?
check "the first: every step once" metrics_are_whole "$run" "$(status_get "$run" .step)"

# ---- no room at a checkpoint ----
run=$T/full
mkdir -p "$run/checkpoints"
if mount -t tmpfs -o size=64m,mode=700 tmpfs "$run/checkpoints" 2>/dev/null; then
    e2e_mounts+=("$run/checkpoints")
    train "$run" --set checkpoint.keep=3
    wait_until 600 has_checkpoint_after "$run" 0 || fail "first checkpoint"
    # Leave less room than a checkpoint needs, also when an old one has just been removed.
    fill=$run/checkpoints/ballast
    take_room() {
        dd if=/dev/zero of="$fill" bs=64k oflag=append conv=notrunc 2>/dev/null
        truncate -s -256K "$fill"
    }
    take_room
    before=$(newest_checkpoint_of "$run")
    no_room() { take_room; grep -Eq 'checkpoint of step [0-9]+ not written.*(No space|full)' "$run.out"; }
    check "no room: said, with when it is tried again" wait_until 600 no_room
    late=$(sed -n 's/.*checkpoint of step \([0-9]*\) not written.*/\1/p' "$run.out" | head -1)
    at=$(step_of "$run")
    check "no room: training goes on" wait_step "$run" $((at + 10))
    check "no room: the old checkpoint stays" timeout 120 "$LGSUP" verify "$(checkpoint_of "$run" "$before")"
    check "no room: no incomplete checkpoint" test ! -e "$(checkpoint_of "$run" "$late")"
    rm "$fill"
    # Others may follow soon, and keep = 3.
    check "room again: the checkpoint appears" wait_until 600 has_checkpoint_after "$run" $((late - 1))
    timeout 300 "$LGSUP" stop "$run" >"$T/said" 2>&1
    wait $tiny_pid
    expect "room again: the run ends in order" 0 $?
    check "room again: that checkpoint was written" grep -q "published .*_step$late in " "$run/logs/ckpt.0.log"
    check "room again: every step once" metrics_are_whole "$run" "$(status_get "$run" .step)"
    check "room again: verify" timeout 300 "$LGSUP" verify "$run"
else
    skip "no room at a checkpoint" "this user may not mount"
fi

# ---- not finite ----
reference 80
cp -r "$(checkpoint_of "$reference" 80)/model" "$T/nan"
weights=$T/nan/diffusion_pytorch_model.safetensors
header=$(od -An -tu8 -N8 "$weights" | tr -d ' ')
printf '\x00\x00\xc0\x7f' | dd of="$weights" bs=1 seek=$((8 + header + 400)) conv=notrunc 2>/dev/null
says "weights that are not finite: parked" 11 "$LGSUP" start "$TINY" --set job.dir="$T/nonfinite" --set trainer.init_from="$T/nan" \
    --set trainer.ranks=1 --set trainer.nonfinite_max=3 --set checkpoint.every=0 -- 'not finite' 'trainer\.lr'
says "weights that are not finite, in a run of few steps: parked" 11 "$LGSUP" start "$TINY" --set job.dir="$T/nonfinite-few" \
    --set trainer.init_from="$T/nan" --set trainer.ranks=1 --set trainer.max_steps=2 --set checkpoint.every=0 -- 'finite' 'weights'
expect "not finite: state" parked "$(status_get "$T/nonfinite" .state)"
check "not finite: the status has the cause" test -n "$(status_get "$T/nonfinite" 'select(.cause | test("not finite")) | .cause')"
expect "not finite: skipped steps are counted" 3 "$(status_get "$T/nonfinite" .skipped_steps)"
check "not finite: stop lets its memory go" "$LGSUP" stop "$T/nonfinite"
check "not finite, few steps: stop lets its memory go" "$LGSUP" stop "$T/nonfinite-few"
check "not finite: nothing is left running" nothing_runs
