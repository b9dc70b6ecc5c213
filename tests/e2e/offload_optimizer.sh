#!/bin/bash
# A state in host memory, updated by the host (memory.offload_optimizer): with device = "host" it decides no bit, however
# ranks are cut and whoever is killed, and a checkpoint is gone on from with it or without. On a GPU, for which a
# stand-in that computes on the host is enough (tests/stub/cuda.c), it is refused at a resume unless it is named.
. "$(dirname "$0")/lib.sh"

key=(--set memory.offload_optimizer=true)

# disturbed NAME RUN [...]: who has the state or reads it dies, one by one and together, the keeper too.
disturbed() {
    local name=$1 run=$2 role
    train "$run" "${key[@]}" "${@:3}"
    wait_step "$run" 5
    for role in "trainer 1" "ema 0" "trainer 0" "ckpt 0"; do
        kill_role "$run" $role
        wait_step "$run" $(($(step_of "$run") + 3))
    done
    kill_role "$run" trainer 0 && kill_role "$run" trainer 1 && kill_role "$run" keeper 0
    wait_step "$run" $(($(step_of "$run") + 3))
    check "$name: ranks were replaced" test "$(restarts_of "$run" trainer)" -ge 4
    settle_same "$name" "$run"
}
disturbed "whole weights" "$T/whole"
disturbed "gathered weights" "$T/gathered" --set parallel.zero=3

# same NAME STEPS [...]: with the key and without.
same() {
    local name=$1 steps=$2 with=$T/with.${1// /_} without=$T/without.${1// /_}
    tiny "$without" --set trainer.max_steps="$steps" "${@:3}"
    expect "$name: without" 0 $?
    tiny "$with" --set trainer.max_steps="$steps" "${key[@]}" "${@:3}"
    expect "$name: with" 0 $?
    check "$name: byte-identical" same_files "$without" "$with" "$steps"
}
if in_all; then
    same "one rank" 20 --set trainer.ranks=1
    same "whole states" 20 --set parallel.zero=0
    same "several micro-batches" 20 --set trainer.micro_batch_size=2
    same "two groups of two" 20 --set trainer.ranks=4 --set trainer.micro_batch_size=2 --set parallel.zero=3 --set parallel.group=2
fi
same "scattered gradients" 20 --set parallel.zero=2 --set trainer.micro_batch_size=2
same "a split sequence" 20 --set trainer.ranks=4 --set parallel.sp=2 --set parallel.zero=3 --set parallel.group=2
same "two threads and groups of parameters" 20 --set trainer.threads=2 \
    --set 'trainer.groups=["transformer_blocks.0.* frozen", "*.bias decay=0"]'

# On from a checkpoint, from one to the other and back.
reference 40
run=$T/turns
tiny "$run" --set trainer.max_steps=20 "${key[@]}"
tiny "$run" --set trainer.max_steps=30
expect "on without it" 0 $?
tiny "$run" --set trainer.max_steps=40 "${key[@]}"
expect "and on with it" 0 $?
check "that it went on is said" grep -q 'resuming tiny at step 30 from' "$run.out"
check "resumed from one to the other and back: byte-identical" same_files "$reference" "$run" 40

# ---- on GPUs ----
stub=$e2e_build/tests/stub/liblg-cuda.so
[ -f "$stub" ] || { fail "the stand-in" "no $stub: make e2e-programs first"; exit 1; }
mkdir "$T/backends"
ln -s "$stub" "$e2e_build/lib/liblg-host.so" "$T/backends"
export LG_BACKEND_DIR=$T/backends LG_STUB=two LG_STUB_MEMORY=1 LG_STUB_HOST=$e2e_build/lib/liblg-host.so
gpu=(--set device=cuda)

out=$T/check.out
timeout 60 "$LGSUP" check "$TINY" "${gpu[@]}" "${key[@]}" --set job.dir="$T/none" >"$out" 2>&1
for region in trainer/0/state/b trainer/1/moments trainer/0/transfer ema/0/state/a; do
    expect "$region lies with the host" host "$(awk -v r=$region '$1 == r {print $2; exit}' "$out")"
done
for region in trainer/0/grad trainer/0/working; do
    expect "$region lies on the GPU" cuda:0 "$(awk -v r=$region '$1 == r {print $2; exit}' "$out")"
done
timeout 60 "$LGSUP" check "$TINY" "${gpu[@]}" "${key[@]}" --set parallel.zero=3 --set job.dir="$T/none" >"$out.3" 2>&1
expect "with gathered weights there are some on the GPU" cuda:0 "$(awk '$1 == "trainer/0/working" {print $2; exit}' "$out.3")"
for role in ema ckpt; do
    expect "$role has no GPU" host "$(awk -v r=$role '$1 == r {print $4; exit}' "$out")"
done
# 2 ranks, 2 text and 2 VAE instances.
expect "contexts" 6 "$(awk '/CUDA contexts/ {print $1}' "$out")"
timeout 60 "$LGSUP" check "$TINY" "${gpu[@]}" --set job.dir="$T/none" >"$out" 2>&1
expect "without it the state lies on the GPU" cuda:0 "$(awk '$1 == "trainer/0/state/b" {print $2; exit}' "$out")"

# One that does everything as late as it may (tests/stub/late.h): nothing is read, counted or given away too early.
export LG_STUB_LATE=1
tiny "$T/late" --set trainer.max_steps=40 "${gpu[@]}"
undisturbed 40
check "a GPU that is late: byte-identical" same_files "$reference" "$T/late" 40
for zero in ${CHECK_ALL:+1} 3; do
    run=$T/gpu$zero
    train "$run" "${gpu[@]}" "${key[@]}" --set parallel.zero=$zero
    wait_step "$run" 5
    kill_role "$run" trainer 1
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" trainer 0 && kill_role "$run" ema 0
    settle "beside a GPU, zero = $zero" "$run"
    undisturbed "${settled:-40}"
    check "beside a GPU, zero = $zero: what the stand-in computes is byte-identical" same_files "$reference" "$run" "${settled:-40}"
done

# It decides bits there: refused by name, unless it is named, in a folder of its own.
run=$T/gpu
tiny "$run" --set trainer.max_steps=20 "${gpu[@]}" "${key[@]}"
expect "a run beside a GPU" 0 $?
from=$(checkpoint_of "$run" 20)
check "the manifest says who made the updates" jq -e '.fingerprint | test("; updates: host isa=")' "$from/manifest.json"
tiny "$run" --set trainer.max_steps=40 "${gpu[@]}"
expect "without it: refused" 10 $?
check "and what to do is said" grep -q 'memory.offload_optimizer was true when the run began and is false now.*name it in trainer.resume_changes' "$run.out"
named=("${gpu[@]}" --set trainer.max_steps=40 --set trainer.resume_from="$from" --set 'trainer.resume_changes=["memory.offload_optimizer"]')
tiny "$T/other" "${named[@]}"
expect "named: it goes on" 0 $?
undisturbed 40
check "named: with the state that was there" same_files "$reference" "$T/other" 40
lineage() { jq -r .lineage "$(checkpoint_of "$1" "$2")/manifest.json"; }
check "named: it is another run" test "$(lineage "$run" 20)" != "$(lineage "$T/other" 40)"
tiny "$T/other" "${gpu[@]}" "${key[@]}" --set trainer.max_steps=60
expect "with it again: refused" 10 $?
