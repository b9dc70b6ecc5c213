# Shared by the end-to-end scripts; sourced, not run. A script is called as
#
#     tests/e2e/NAME.sh [BUILD]          BUILD: build directory, default build
#
# and prints "ok NAME" or "FAIL NAME reason" per check; it exits non-zero
# when one failed. Each script has a directory of its own under /tmp, and ends every process that was
# started with a path in it. With E2E_KEEP=1 the directory stays.
#
# With E2E_FIRST=1 it ends at the first check that fails.
#
# E2E_REFERENCE=DIR lets scripts of one `make check`, also at the same time, share undisturbed runs: the first one
# that needs a reference makes it there.
set -u

e2e_build=$(cd "${1:-build}" 2>/dev/null && pwd) || { echo "FAIL setup no build directory ${1:-build}"; exit 1; }
e2e_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
e2e_name=$(basename "$0" .sh)
LGSUP=$e2e_build/bin/lgsup
ST_COMPARE=$e2e_build/tests/e2e/st_compare
TINY=$e2e_root/tests/e2e/tiny.toml
EMOJI=$e2e_root/examples/emoji
MICRO=$e2e_root/examples/micro/made
T=$(mktemp -d "${E2E_TMP:-/tmp}/lge.XXXXXX") # short: socket paths end at 107 bytes
e2e_failed=0
# Sockets under our own directory, so that even the keeper's command line names it.
mkdir -m 700 "$T/r"
export XDG_RUNTIME_DIR=$T/r
# What the scripts read is the programs' own text, not a translation; threads come from the plan.
export LC_ALL=C
unset OMP_NUM_THREADS LG_BIN_DIR
[ -x "$LGSUP" ] || { echo "FAIL $e2e_name no $LGSUP: make all first"; rm -rf "$T"; exit 1; }
[ -f "$EMOJI/data/.made" ] && [ -f "$MICRO/.made" ] || {
    echo "FAIL $e2e_name no pictures: make example-data micro-data first"
    rm -rf "$T"
    exit 1
}

# Pids of our programs whose command line holds directory $1. Without a fork: a run goes on meanwhile.
e2e_pids() {
    local p comm words
    for p in /proc/[0-9]*; do
        { read -r comm <"$p/comm"; } 2>/dev/null || continue
        case $comm in lgsup* | lg-*) ;; *) continue ;; esac
        { mapfile -d '' -t words <"$p/cmdline"; } 2>/dev/null || continue
        case "${words[*]}" in *"$1"*) echo "${p#/proc/}" ;; esac
    done
}

e2e_mounts=()
e2e_cleanup() {
    local round left m
    trap - EXIT
    for round in 1 2 3 4 5; do # a supervisor that still lives starts what was killed: again
        left=$(e2e_pids "$T")
        [ -n "$left" ] || break
        kill -9 $left 2>/dev/null
        sleep 0.1
    done
    for m in ${e2e_mounts[@]+"${e2e_mounts[@]}"}; do umount "$m" 2>/dev/null || umount -l "$m"; done
    if [ -n "${E2E_KEEP:-}" ]; then echo "kept $T"; else rm -rf "$T"; fi
    [ "$e2e_failed" -eq 0 ] || exit 1
}
trap e2e_cleanup EXIT
trap 'echo "FAIL $e2e_name interrupted"; e2e_failed=1; exit 1' INT TERM HUP

ok() { echo "ok $e2e_name: $1"; }
fail() {
    echo "FAIL $e2e_name: $1${2:+ -- $2}"
    e2e_failed=1
    [ -z "${E2E_FIRST:-}" ] || exit 1
}
skip() { echo "skip $e2e_name: $1 -- $2"; }
# check NAME COMMAND...: ok when the command succeeds; its output is the reason when it does not.
check() {
    local name=$1 out
    shift
    if out=$("$@" 2>&1); then ok "$name"; else fail "$name" "$(printf %s "${out:-$* failed}" | tail -n 4 | tr '\n' ' ')"; fi
}
# expect NAME WANTED GOT
expect() { if [ "$2" = "$3" ]; then ok "$1"; else fail "$1" "expected '$2', got '$3'"; fi; }

# tiny RUN [--set ...]: a run in the foreground to its end, quiet; output in RUN.out; exit status its own.
tiny() {
    local run=$1
    shift
    timeout --foreground -k 5 "${TINY_LIMIT_S:-900}" "$LGSUP" start "$TINY" --set "job.dir=$run" "$@" >>"$run.out" 2>&1 </dev/null
}
# tiny_in_background RUN [...]: the same, detached from this shell; its pid in $tiny_pid.
tiny_in_background() {
    local run=$1
    shift
    timeout --foreground -k 5 "${TINY_LIMIT_S:-900}" "$LGSUP" start "$TINY" --set "job.dir=$run" "$@" >>"$run.out" 2>&1 </dev/null &
    tiny_pid=$!
}

status() { timeout 120 "$LGSUP" status --json "$1" 2>&1; }
# status_get RUN FILTER: a value of the status, by jq.
status_get() { status "$1" | jq -r "$2" 2>/dev/null; }
# pid_of RUN ROLE INDEX: 0 when there is none just now.
pid_of() { status_get "$1" "[.instances[] | select(.role == \"$2\" and .index == $3) | .pid][0] // 0"; }
# kill_role RUN ROLE INDEX [SIGNAL]: SIGKILL to a process of the run; waits for one that is just being
# replaced, so that one process does not die of two kills. Its pid in $killed_pid.
declare -A killed_before
kill_role() {
    local end=$((SECONDS + 120)) signal=${4:-KILL}
    while [ $SECONDS -lt $end ]; do
        killed_pid=$(pid_of "$1" "$2" "$3")
        [ "${killed_pid:-0}" -gt 0 ] && [ "$killed_pid" != "${killed_before[$1/$2.$3]:-}" ] &&
            kill "-$signal" "$killed_pid" 2>/dev/null && {
            [ "$signal" != KILL ] || killed_before[$1/$2.$3]=$killed_pid
            return 0
        }
        sleep 0.02
    done
    fail "a signal to $2.$3" "no such process at step $(step_of "$1")"
    return 1
}
restarts_of() { status_get "$1" "[.instances[] | select(.role == \"$2\") | .restarts] | add // 0"; }
# The last step of metrics.jsonl, 0 when there is none.
step_of() {
    local line
    line=$(tail -n 1 "$1/metrics.jsonl" 2>/dev/null)
    if [[ $line =~ ^\{\"step\":\ *([0-9]+), ]]; then echo "${BASH_REMATCH[1]}"; else echo 0; fi
}
# Is this `make check-all`, which tries apart what `make check` tries together?
in_all() { [ -n "${CHECK_ALL:-}" ]; }
# However a net's state and activations are cut, computed again or moved to host memory: by the script's own `same NAME [...]`.
same_in_all_modes() {
    if in_all; then
        same "whole state" --set parallel.zero=0
        same "gathered weights" --set parallel.zero=3
        same "recomputed" --set memory.recompute=block
        same "offloaded" --set memory.offload_activations=true --set memory.offload_optimizer=true
    else
        same "gathered, recomputed, offloaded" --set parallel.zero=3 --set memory.recompute=block \
            --set memory.offload_activations=true --set memory.offload_optimizer=true
    fi
}
# wait_until SECONDS COMMAND...: looks again and again, less often after a while: what it waits for needs the cores, too.
# The limit ends a script that would never end; it says nothing of how fast something is, so it is generous.
wait_until() {
    local end=$((SECONDS + $1)) tries=0
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        if [ $((tries += 1)) -le 10 ]; then sleep 0.02; else sleep 0.1; fi
    done
}
step_reached() { [ "$(step_of "$1")" -ge "$2" ]; }
# wait_step RUN STEP [SECONDS]
wait_step() { wait_until "${3:-600}" step_reached "$1" "$2"; }
is_gone() { ! kill -0 "$1" 2>/dev/null; }
state_is() { [ "$(status_get "$1" .state)" = "$2" ]; }

checkpoint_of() { echo "$1/checkpoints/tiny_step$2"; }
# same_files RUN_A RUN_B STEP: are the safetensors of the two checkpoints byte-identical?
same_files() {
    local f a b files="model/diffusion_pytorch_model.safetensors ema/diffusion_pytorch_model.safetensors"
    a=$(checkpoint_of "$1" "$3") b=$(checkpoint_of "$2" "$3")
    [ ! -d "$a/adapter" ] || files="adapter/pytorch_lora_weights.safetensors ema/pytorch_lora_weights.safetensors"
    for f in $files optimizer.safetensors; do
        [ -s "$a/$f" ] || { echo "no $a/$f"; return 1; }
        cmp "$a/$f" "$b/$f" || return 1
    done
}
# Every step from 1 to $2 stands in metrics.jsonl exactly once, in order, every line is JSON.
metrics_are_whole() {
    jq -e . "$1/metrics.jsonl" >/dev/null || { echo "a line of metrics.jsonl is not JSON"; return 1; }
    diff <(jq -r .step "$1/metrics.jsonl") <(seq 1 "$2") >/dev/null || {
        echo "steps of metrics.jsonl are not 1..$2: $(wc -l <"$1/metrics.jsonl") lines"
        return 1
    }
}
# No process of any run of this script; the keeper is known by its socket alone.
nothing_runs() { [ -z "$(e2e_pids "$T")" ]; }

# An undisturbed run with all its checkpoints, each of which is the last of a start: one that is due while another is still
# written would be passed over. Where its end alone is compared, `tiny` in one go costs less.
start_by_start() { # RUN STEPS [...]
    local at first=20
    [ "$2" -le 100 ] || first=$2 # of a long run only the last one is asked for, or what happens to be there
    for at in $(seq "$first" 20 $(($2 - 1))) "$2"; do
        tiny "$1" --set trainer.max_steps="$at" "${@:3}" || return $?
    done
}
# reference STEPS [...]: such a one, in $reference; made once per E2E_REFERENCE. Others that want it meanwhile
# wait for it.
reference() {
    local home=${E2E_REFERENCE:-$T} lock
    reference=$home/reference$1
    exec {lock}>"$reference.lock"
    flock "$lock"
    if [ ! -f "$reference.done" ]; then
        if start_by_start "$reference" "$1" "${@:2}" {lock}>&-; then
            touch "$reference.done"
        else
            fail "reference run of $1 steps" "exit $?: $(tail -n 3 "$reference.out" | tr '\n' ' ')"
            rm -rf "$reference"
            exit 1
        fi
    fi
    exec {lock}>&-
}

# ---- disturbed runs ----
# A run that is to be disturbed has no end of its own: however slow this shell is beside it, it still
# trains when the next blow comes. `train` begins or continues one; `settle` lets it come to a checkpoint
# made after the last blow, stops it and compares up to there with an undisturbed run.

# train RUN [...]: in the background, its pid in $tiny_pid.
train() { tiny_in_background "$1" --set trainer.max_steps=1000000 --set checkpoint.keep=1000000 "${@:2}"; }
# Steps of the complete checkpoints that every run of train() makes, oldest first.
complete_of() {
    find "$1/checkpoints/" -maxdepth 1 -name 'tiny_step*0' -printf '%f\n' 2>/dev/null | sed 's/^tiny_step//' |
        sort -n | awk '$1 % 20 == 0'
}
newest_checkpoint_of() { complete_of "$1" | tail -n 1; }
# A writer that is slower than the training may still be at its first one when the step after it has long passed.
has_checkpoint() { [ -n "$(newest_checkpoint_of "$1")" ]; }
# The first of them after step $2; an undisturbed run is not worth its start for less than 40 steps.
checkpoint_after() { complete_of "$1" | awk -v at="$2" '$1 > at && $1 >= 40 { print; exit }'; }
has_checkpoint_after() { [ -n "$(checkpoint_after "$@")" ]; }
# settle NAME RUN: $settled is the step of the checkpoint that was compared, $stopped_at the last one of the run.
settle() {
    local name=$1 run=$2 at code
    at=$(step_of "$run")
    check "$name: goes on by itself after step $at" wait_until 600 has_checkpoint_after "$run" "$at"
    timeout 300 "$LGSUP" stop "$run" >"$T/stop.out" 2>&1
    code=$?
    wait "$tiny_pid"
    expect "$name: stopped in order, exit codes of stop and start" "0 0" "$code $?"
    [ $e2e_failed -eq 0 ] || tail -n 5 "$run.out" "$T/stop.out"
    settled=$(checkpoint_after "$run" "$at") stopped_at=$(status_get "$run" .step)
    expect "$name: state" stopped "$(status_get "$run" .state)"
    check "$name: every step once in metrics.jsonl" metrics_are_whole "$run" "$stopped_at"
    check "$name: verify" timeout 300 "$LGSUP" verify "$run"
    check "$name: nothing is left running" nothing_runs
}
# undisturbed STEP: $reference is an undisturbed run with a checkpoint of this step: one long run for nearly all,
# else one that ends there (it goes further, or left that checkpoint out since the one before was being written).
LONG_RUN_STEPS=600
undisturbed() {
    if [ "$1" -le $LONG_RUN_STEPS ]; then
        reference $LONG_RUN_STEPS --set checkpoint.keep=1000000
        [ ! -d "$(checkpoint_of "$reference" "$1")" ] || return 0
    fi
    reference "$1"
}
# same_as NAME RUN REFERENCE STEP: up to STEP the same weights, losses, samples.
same_as() {
    check "$1: byte-identical to an undisturbed run at step ${4:-?}" same_files "$3" "$2" "${4:-?}"
    check "$1: losses are the undisturbed run's" cmp <(losses_of "$3" "$4") <(losses_of "$2" "$4")
    check "$1: the ledger is the undisturbed run's" cmp -n $((64 * ${4:-1})) "$3/ledger" "$2/ledger"
}
losses_of() { head -n "$2" "$1/metrics.jsonl" | jq -c '[.step, .loss, .loss_vb, .grad_norm, .skipped, .voids]'; }
# settle_same NAME RUN: both.
settle_same() {
    settle "$@"
    [ -n "$settled" ] || return 0 # said already
    undisturbed "$settled"
    same_as "$1" "$2" "$reference" "$settled"
}
