#!/bin/bash
# Weights that are cast for each use instead of kept (memory.cast_weights), and activations where gradients will lie: the bytes of a
# run without the key, whoever is killed and however ranks are cut, on the host and on a stand-in for GPUs that does everything as late
# as it may (tests/stub).
. "$(dirname "$0")/lib.sh"

stub=$e2e_build/tests/stub/liblg-cuda.so
[ -f "$stub" ] || { fail "the stand-in" "no $stub: make e2e-programs first"; exit 1; }
mkdir "$T/backends"
ln -s "$stub" "$e2e_build/lib/liblg-host.so" "$T/backends"
reference 40
key=(--set memory.cast_weights=true)

out=$T/check.out
timeout 60 "$LGSUP" check "$TINY" "${key[@]}" --set job.dir="$T/none" >"$out" 2>&1
check "no copy of the weights is kept" sh -c "! grep -q '^trainer/0/working' '$out'"
check "activations lie where gradients will" grep -q 'more activations, where gradients lie later: [1-9]' "$out"
timeout 60 "$LGSUP" check "$TINY" "${key[@]}" --set trainer.micro_batch_size=2 --set job.dir="$T/none" >"$out" 2>&1
check "but not with several micro-batches, which add" sh -c "! grep -q 'where gradients lie later' '$out'"

export LG_BACKEND_DIR=$T/backends LG_STUB=two LG_STUB_MEMORY=1 LG_STUB_HOST=$e2e_build/lib/liblg-host.so LG_STUB_LATE=1
# disturbed NAME RUN [...]
disturbed() {
    local name=$1 run=$2 role
    train "$run" "${key[@]}" "${@:3}"
    wait_step "$run" 5
    for role in "trainer 1" "trainer 0" "ema 0"; do
        kill_role "$run" $role
        wait_step "$run" $(($(step_of "$run") + 3))
    done
    kill_role "$run" trainer 0 && kill_role "$run" trainer 1 && kill_role "$run" keeper 0
    wait_step "$run" $(($(step_of "$run") + 3))
    check "$name: ranks were replaced" test "$(restarts_of "$run" trainer)" -ge 4
    settle "$name" "$run"
    undisturbed "${settled:-40}"
    check "$name: byte-identical" same_files "$reference" "$run" "${settled:-40}"
}
disturbed "whole states" "$T/whole" --set device=cuda --set parallel.zero=0
disturbed "cut states" "$T/cut" --set device=cuda --set trainer.gpus=0,1 --set memory.recompute=norms
disturbed "gathered" "$T/gathered" --set device=cuda --set trainer.gpus=0,1 --set parallel.zero=3
disturbed "on the host" "$T/host" --set parallel.zero=1 --set memory.recompute=block --set memory.offload_activations=true

# Several micro-batches: what is added to lies still.
several=(--set trainer.micro_batch_size=2 --set trainer.max_steps=40)
tiny "$T/kept" "${several[@]}"
tiny "$T/cast" "${several[@]}" "${key[@]}"
expect "several micro-batches" 0 $?
check "several micro-batches: byte-identical" same_files "$T/kept" "$T/cast" 40
