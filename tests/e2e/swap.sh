#!/bin/bash
# `lgsup swap` while training runs: the checkpoint writer again and again under a checkpoint at every
# few steps, every other role, trainers too, and programs that are bad in every way. No checkpoint is
# lost or made twice, the bits are those of an undisturbed run.
#
# SWAPS=1000 for a long campaign: that many swaps of the writer under a checkpoint at every step.
. "$(dirname "$0")/lib.sh"
swaps=${SWAPS:-6}
now_ms() { echo $(($(date +%s%N) / 1000000)); }
swap() { timeout 300 "$LGSUP" swap "$@" >"$T/out" 2>&1; }
program_of() { status_get "$1" "[.instances[] | select(.role == \"$2\" and .index == $3) | .program][0]"; }
runs() { [ "$(readlink "/proc/$(pid_of "$1" "$2" "$3")/exe")" = "$4" ]; }
# Every state that a writer has staged is published once, and its directory is complete.
checkpoints_are_whole() {
    local log=$1/logs/ckpt.0.log staged published
    staged=$(sed -n 's/.* staged state \([0-9]*\) in .*/\1/p' "$log" | sort -n)
    published=$(sed -n 's/.* published .*_step\([0-9]*\) in .*/\1/p' "$log" | sort -n)
    [ -n "$staged" ] || { echo "nothing was staged"; return 1; }
    [ "$staged" = "$published" ] || { echo "staged and published differ: $(diff <(echo "$staged") <(echo "$published") | tr '\n' ' ')"; return 1; }
    [ -z "$(uniq -d <<<"$published")" ] || { echo "published twice: $(uniq -d <<<"$published" | tr '\n' ' ')"; return 1; }
    [ -z "$(find "$1/checkpoints" -name '.tmp*')" ] || { echo "half-written ones are left"; return 1; }
    checkpoints=$(wc -w <<<"$published")
}
# Longest wait of a step for the writer and median step, in ms.
waits() {
    jq -rs '"\(map(.ckpt_wait_s) | max * 1000 | floor) \((map(select(.samples_per_s > 0) | 8 / .samples_per_s) | sort | .[length / 2 | floor]) * 1000 | floor)"' "$1/metrics.jsonl"
}

mkdir -p "$T/next/bin"
cp "$e2e_build"/bin/lg-* "$T/next/bin/"
ln -s "$e2e_build/lib" "$T/next/lib"
for p in other-layout dies-at-work; do cp "$e2e_build/tests/e2e/planted" "$T/next/bin/$p"; done
printf '#!/bin/sh\necho "planted: no" >&2\nexit 1\n' >"$T/exits"
cp "$(command -v sleep)" "$T/lg-sleep" # a name by which it is found
printf '#!/bin/sh\nexec "%s" 1000\n' "$T/lg-sleep" >"$T/lg-hangs"
chmod +x "$T/exits" "$T/lg-hangs"

# ---- the writer, in the middle of its checkpoints ----
every=3
[ "$swaps" -le 50 ] || every=1
export TINY_LIMIT_S=36000
run=$T/writer
tiny_in_background "$run" --set trainer.max_steps=1000000 --set checkpoint.every=$every --set checkpoint.keep=1000000
wait_step "$run" 2
done=0 worst_ms=0
for ((i = 0; i < swaps; i++)); do
    began=$(now_ms)
    swap ckpt --bin "$T/next/bin/lg-ckpt" "$run" || { fail "swap $i" "$(tail -n 2 "$T/out" | tr '\n' ' ')"; break; }
    ms=$(($(now_ms) - began))
    [ $ms -le $worst_ms ] || worst_ms=$ms
    done=$((done + 1))
    sleep "0.0$((RANDOM % 10))"
done
expect "swaps of the writer" "$swaps" $done
timeout 300 "$LGSUP" stop "$run" >/dev/null 2>&1
wait $tiny_pid
expect "the run ends in order" 0 $?
at=$(status_get "$run" .step)
check "every staged checkpoint is published once" checkpoints_are_whole "$run"
checkpoints_are_whole "$run" >/dev/null
read -r wait_ms step_ms < <(waits "$run")
echo "# $done swaps in $at steps, $checkpoints checkpoints, $((at / every)) due: longest swap $worst_ms ms, longest wait of a step for the writer $wait_ms ms, median step $step_ms ms"
check "verify accepts every one" timeout 120 "$LGSUP" verify "$run"
expect "the writer was never restarted" 0 "$(restarts_of "$run" ckpt)"
check "it ran the new program" grep -q 'took over in' "$run/logs/ckpt.0.log"
if [ "$swaps" -gt 50 ]; then
    tiny "$T/undisturbed" --set trainer.max_steps="$at"
    check "byte-identical to an undisturbed run of $at steps" same_files "$T/undisturbed" "$run" "$at"
    exit
fi

# ---- bad programs, then good ones for every role ----
run=$T/run
start=(--set trainer.max_steps=1000000 --set supervisor.ready_s=8)
tiny_in_background "$run" "${start[@]}"
wait_step "$run" 2
before=$(pid_of "$run" ckpt 0)
# refuse NAME CODE TEXT WORDS...
refuse() {
    local name=$1 want=$2 text=$3 got
    shift 3
    swap "$@" "$run"
    got=$?
    if [ $got -eq "$want" ] && grep -q -- "$text" "$T/out"; then ok "$name"; else
        fail "$name" "exit $got: $(tail -n 2 "$T/out" | tr '\n' ' ')"
    fi
}
refuse "one that exits: rolled back" 1 'former program.*exit 1.*planted: no' ckpt --bin "$T/exits"
refuse "another layout: rolled back, and says which" 10 'the layout of lg_board_row differs' ckpt --bin "$T/next/bin/other-layout"
refuse "another role's program: rolled back" 2 'this program is lg-vae' ckpt --bin "$T/next/bin/lg-vae"
refuse "a missing program" 8 'no program that can be executed' ckpt --bin "$T/none"
refuse "one rank alone" 2 'all ranks run one program' trainer.1
refuse "no such instance" 8 'there is no vae.9' vae.9
refuse "the keeper" 2 'cannot be swapped' keeper
"$LGSUP" swap ckpt --bin "$T/lg-hangs" "$run" >"$T/hanging" 2>&1 &
hanging=$!
preparing() { grep -q 'swap: ckpt is to run.*hangs' "$1/logs/lgsup.log"; }
wait_until 120 preparing "$run"
kill_role "$run" loader 0 STOP # or the run would train thousands of steps in these eight seconds
refuse "a second swap has to wait" 7 'another swap is under way' vae
wait $hanging
expect "one that hangs: rolled back after supervisor.ready_s" 9 $?
kill -CONT "$killed_pid"
check "and said so" grep -q 'without a heartbeat for 8 s (supervisor.ready_s)' "$T/hanging"
expect "the old one has gone on all the while" "$before" "$(pid_of "$run" ckpt 0)"
swap ckpt --bin "$T/next/bin/dies-at-work" "$run"
echo "# dies-at-work: exit $?"
back() { [ "$(program_of "$1" ckpt 0)" = "" ] && runs "$1" ckpt 0 "$e2e_build/bin/lg-ckpt"; }
check "one that dies at work: taken out again" wait_until 120 back "$run"

# The others shall be ready, however slow the machine is.
timeout 300 "$LGSUP" stop "$run" >"$T/out" 2>&1
wait $tiny_pid
start=(--set trainer.max_steps=1000000 --set supervisor.ready_s=600)
at=$(status_get "$run" .step)
tiny_in_background "$run" "${start[@]}"
wait_step "$run" $((at + 1))

swap vae --bin "$T/next/bin/lg-vae" "$run"
expect "all vae instances" 0 $?
swap trainer --bin "$T/next/bin/lg-trainer" "$run"
expect "the trainer ranks" 0 $?
for what in text.1 loader ema ckpt; do
    swap $what --bin "$T/next/bin/lg-${what%.*}" "$run"
    expect "$what" 0 $?
done
all_new() {
    local i
    for i in vae.0 vae.1 trainer.0 trainer.1 text.1 loader.0 ema.0 ckpt.0; do
        runs "$1" "${i%.*}" "${i#*.}" "$T/next/bin/lg-${i%.*}" || { echo "$i runs $(readlink "/proc/$(pid_of "$1" "${i%.*}" "${i#*.}")/exe")"; return 1; }
    done
}
check "all of them run the new programs" all_new "$run"
check "text.0 does not" runs "$run" text 0 "$e2e_build/bin/lg-text"
expect "status shows it" "$T/next/bin/lg-vae" "$(program_of "$run" vae 1)"

# lgsup dies as soon as it has started a standby, at whatever it does then with a child that it has just got: the
# standby has not begun, or the next lgsup ends it.
lgsup_lives() { [ "$(pid_of "$1" lgsup 0)" -gt 0 ]; }
no_standby() { [ -z "$(status_get "$1" '.instances[] | select(.state == "standby") | .index')" ]; }
nothing_hangs() { [ -z "$(e2e_pids "$T/lg-sleep")$(e2e_pids "$T/lg-hangs")" ]; }
children() { cat "/proc/$1/task/$1/children"; }
ended=0
for ((i = 0; i < 6; i++)); do
    lgsup=$(pid_of "$run" lgsup 0)
    had=$(children "$lgsup")
    "$LGSUP" swap ema --bin "$T/lg-hangs" "$run" >"$T/orphan" 2>&1 &
    orphan=$!
    end=$((SECONDS + 120))
    while [ $SECONDS -lt $end ]; do # without a fork, or the moment would have passed
        { read -r has <"/proc/$lgsup/task/$lgsup/children"; } 2>/dev/null
        [ "$has" = "${had% }" ] || break
    done
    kill -9 "$lgsup"
    wait_until 120 is_gone "$lgsup"
    wait $orphan
    tiny_in_background "$run" "${start[@]}"
    wait_until 120 lgsup_lives "$run"
    wait_until 120 no_standby "$run" && wait_until 120 nothing_hangs || break
    ended=$((ended + 1))
done
expect "lgsup dies as it starts a standby: nothing is left" 6 $ended

# lgsup dies while there is a standby; then an instance dies: the program in force stays.
"$LGSUP" swap ema --bin "$T/lg-hangs" "$run" >"$T/orphan" 2>&1 &
orphan=$!
hangs() { [ -n "$(e2e_pids "$T/lg-sleep")" ]; }
check "a standby that hangs" wait_until 120 hangs
kill_role "$run" lgsup 0 && wait_until 120 is_gone "$killed_pid"
wait $orphan
expect "lgsup dies meanwhile: the order's end is not known" 1 $?
check "it hangs still" hangs
tiny_in_background "$run" "${start[@]}"
wait_until 120 lgsup_lives "$run"
check "the next lgsup: no standby" wait_until 120 no_standby "$run"
kill_role "$run" vae 0 && wait_until 120 is_gone "$killed_pid"
vae_again() { [ "$(pid_of "$1" vae 0)" -gt 0 ] && runs "$1" vae 0 "$T/next/bin/lg-vae"; }
check "the next lgsup: the one that hung is ended" wait_until 120 nothing_hangs
check "a replacement runs the program in force" wait_until 120 vae_again "$run"
expect "status shows it still" "$T/next/bin/lg-trainer" "$(program_of "$run" trainer 1)"
timeout 300 "$LGSUP" stop "$run" >"$T/out" 2>&1
wait $tiny_pid
expect "it ends in order" 0 $?
[ $e2e_failed -eq 0 ] || tail -n 20 "$run.out"
at=$(status_get "$run" .step)
tiny "$T/calm" --set trainer.max_steps="$at"
check "byte-identical to an undisturbed run of $at steps" same_files "$T/calm" "$run" "$at"
check "metrics.jsonl has every step once" metrics_are_whole "$run" "$at"
check "verify accepts the run" timeout 300 "$LGSUP" verify "$run"
check "nothing is left running" nothing_runs
