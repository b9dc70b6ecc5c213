#!/bin/bash
# The average alone in host memory (memory.offload_ema), made by the GPU that has the weights: a stand-in for GPUs that does
# everything as late as it may (tests/stub) computes the bytes of a run without, whoever is killed and however ranks are cut.
. "$(dirname "$0")/lib.sh"

stub=$e2e_build/tests/stub/liblg-cuda.so
[ -f "$stub" ] || { fail "the stand-in" "no $stub: make e2e-programs first"; exit 1; }
mkdir "$T/backends"
ln -s "$stub" "$e2e_build/lib/liblg-host.so" "$T/backends"
reference 40
export LG_BACKEND_DIR=$T/backends LG_STUB=two LG_STUB_MEMORY=1 LG_STUB_HOST=$e2e_build/lib/liblg-host.so
key=(--set device=cuda --set memory.offload_ema=true)

out=$T/check.out
timeout 60 "$LGSUP" check "$TINY" "${key[@]}" --set trainer.gpus=0,1 --set job.dir="$T/none" >"$out" 2>&1
place() { awk -v r="$1" '$1 == r {print $2; exit}' "$out"; }
expect "the average lies with the host" host "$(place ema/0/state/a)"
expect "the state does not" cuda:1 "$(place trainer/1/state/b)"
check "the keeper computes on both GPUs" grep -Eq '^ema .* cuda:0,1 ' "$out"

export LG_STUB_LATE=1
# disturbed NAME RUN [...]: who makes the average, whom it is made of, who copies it, the keeper of memory.
disturbed() {
    local name=$1 run=$2 role
    train "$run" "${key[@]}" "${@:3}"
    wait_step "$run" 5
    for role in "ema 0" "trainer 1" "ema 0" "ckpt 0"; do
        kill_role "$run" $role
        wait_step "$run" $(($(step_of "$run") + 3))
    done
    kill_role "$run" ema 0 && kill_role "$run" trainer 0 && kill_role "$run" keeper 0
    wait_step "$run" $(($(step_of "$run") + 3))
    check "$name: the keeper of the average was replaced" test "$(restarts_of "$run" ema)" -ge 3
    settle "$name" "$run"
    undisturbed "${settled:-40}"
    check "$name: byte-identical" same_files "$reference" "$run" "${settled:-40}"
}
disturbed "two ranks" "$T/two" --set trainer.gpus=0,1
disturbed "whole states" "$T/whole" --set parallel.zero=0
disturbed "gathered weights" "$T/gathered" --set parallel.zero=3 --set trainer.gpus=0,1

# On from a checkpoint: from one to the other and back.
run=$T/turns
tiny "$run" --set trainer.max_steps=20 "${key[@]}"
tiny "$run" --set trainer.max_steps=30 --set device=cuda
expect "on without it" 0 $?
tiny "$run" --set trainer.max_steps=40 "${key[@]}"
expect "and on with it" 0 $?
check "that it went on is said" grep -q 'resuming tiny at step 30 from' "$run.out"
undisturbed 40
check "resumed from one to the other and back: byte-identical" same_files "$reference" "$run" 40
