#!/bin/bash
# What ranks and encoders hand each other through host memory (parallel.exchange = "host", which "auto" chooses where GPUs
# do not reach each other's memory): the same run, byte for byte, whoever is killed.
. "$(dirname "$0")/lib.sh"
key=(--set parallel.exchange=host)

# as NAME RUN [...]: with the key, what RUN is without it. same NAME [...]: as it would be with these keys.
as() {
    local name=$1 without=$2 with=$T/with.${1// /_}
    tiny "$with" --set trainer.max_steps=20 "${key[@]}" "${@:3}"
    expect "$name: with" 0 $?
    check "$name: byte-identical" same_files "$without" "$with" 20
}
same() {
    local without=$T/without.${1// /_}
    tiny "$without" --set trainer.max_steps=20 "${@:2}"
    expect "$1: without" 0 $?
    as "$1" "$without" "${@:2}"
}
# How the state is cut and where it lies decides no bit; whether gradients are whole does, of several micro-batches, whose
# order of sums is another.
tiny "$T/host.4" --set trainer.max_steps=20 && tiny "$T/host.1.whole" --set trainer.max_steps=20 --set trainer.micro_batch_size=1 &&
    tiny "$T/host.1" --set trainer.max_steps=20 --set trainer.micro_batch_size=1 --set parallel.zero=2
expect "without" 0 $?
host() { # MORE MICRO: which of them
    case "$2 $1" in
    "1 "*zero=[23]) host=$T/host.1 ;;
    "1 "*) host=$T/host.1.whole ;;
    *) host=$T/host.4 ;;
    esac
}
for zero in 0 1 2 3; do
    as "zero = $zero" "$T/host.4" --set parallel.zero=$zero
    host zero=$zero 1
    as "zero = $zero, several micro-batches" "$host" --set parallel.zero=$zero --set trainer.micro_batch_size=1
done
many=(--set trainer.ranks=4 --set trainer.micro_batch_size=2)
same "two groups of two" "${many[@]}" --set parallel.group=2
same "one rank" --set trainer.ranks=1
for kind in ulysses fastseq; do
    same "a split sequence, $kind" "${many[@]}" --set parallel.sp=2 --set parallel.sp_kind=$kind
done
as "a state in host memory" "$T/host.4" --set memory.offload_optimizer=true
as "weights that stay" "$T/host.4" --set parallel.zero=3 --set parallel.reshard=false

# disturbed NAME RUN [...]: ranks die one by one and together, and so does the keeper.
disturbed() {
    local name=$1 run=$2
    train "$run" "${key[@]}" "${@:3}"
    wait_step "$run" 5
    kill_role "$run" trainer 1
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" trainer 0 && kill_role "$run" vae 0
    wait_step "$run" $(($(step_of "$run") + 3))
    kill_role "$run" keeper 0 && kill_role "$run" trainer 0
    wait_step "$run" $(($(step_of "$run") + 3))
    check "$name: ranks were replaced" test "$(restarts_of "$run" trainer)" -ge 3
}
for zero in 1 2; do
    disturbed "killed, zero = $zero" "$T/killed$zero" --set parallel.zero=$zero
    settle_same "killed, zero = $zero" "$T/killed$zero"
done
run=$T/killeds
disturbed "a split sequence, killed" "$run" --set parallel.sp=2 --set trainer.micro_batch_size=2
settle "a split sequence, killed" "$run"
if [ -n "$settled" ]; then
    tiny "$T/whole" --set parallel.sp=2 --set trainer.micro_batch_size=2 --set trainer.max_steps="$settled"
    same_as "a split sequence, killed" "$run" "$T/whole" "$settled"
fi

# ---- on GPUs ----
stub=$e2e_build/tests/stub/liblg-cuda.so
[ -f "$stub" ] || { fail "the stand-in" "no $stub: make e2e-programs first"; exit 1; }
mkdir "$T/backends"
ln -s "$stub" "$e2e_build/lib/liblg-host.so" "$T/backends"
export LG_BACKEND_DIR=$T/backends LG_STUB=apart LG_STUB_MEMORY=1 LG_STUB_HOST=$e2e_build/lib/liblg-host.so
gpus=(--set device=cuda --set trainer.gpus=0,1 --set vae.gpus=1,0 --set text.gpus=1,0 --set text.shards=2)

# Two that do not reach each other: said, with what it costs, and planned.
out=$T/check.out
timeout 60 "$LGSUP" check "$TINY" "${gpus[@]}" --set job.dir="$T/none" >"$out" 2>&1
expect "check: two GPUs apart" 0 $?
check "check: which way is taken, and why" grep -q 'goes through host memory: cuda:[01] cannot reach the memory of cuda:[01]' "$out"
check "check: and what it costs" grep -q 'through host memory, of each rank in a step: .* down, .* up' "$out"
for region in trainer/0/grad trainer/1/working window/1/latent window/0/text; do
    expect "check: $region lies with the host" host "$(awk -v r=$region '$1 == r {print $2; exit}' "$out")"
done
for region in trainer/1/state/a text/0/weights text/1/weights/1; do
    expect "check: $region lies on its GPU" cuda:1 "$(awk -v r=$region '$1 == r {print $2; exit}' "$out")"
done
timeout 60 "$LGSUP" check "$TINY" "${gpus[@]}" --set parallel.exchange=gpu --set job.dir="$T/none" >"$out" 2>&1
expect "check: straight from one to the other is refused" 3 $?
LG_STUB=two timeout 60 "$LGSUP" check "$TINY" "${gpus[@]}" --set job.dir="$T/none" >"$out" 2>&1
check "check: GPUs that reach each other" grep -q 'goes straight from GPU to GPU' "$out"
expect "check: and gradients lie there" cuda:1 "$(awk '$1 == "trainer/1/grad" {print $2; exit}' "$out")"
LG_STUB=two LG_CUDA_NO_PEER=1 timeout 60 "$LGSUP" check "$TINY" --set device=cuda --set job.dir="$T/none" >"$out" 2>&1
check "check: \$LG_CUDA_NO_PEER, on one GPU too" grep -q 'goes through host memory$' "$out"

# They do everything as late as they may (tests/stub/late.h), and neither makes nor maps memory of the other: nothing is read,
# counted or given away too early, and nobody reaches across.
export LG_STUB_LATE=1
for more in parallel.zero=0 parallel.zero=1 parallel.zero=2 parallel.zero=3 parallel.sp=2 memory.offload_optimizer=true; do
    for micro in 4 1; do
        [ $more = parallel.sp=2 ] && micro=$((2 * micro))
        set=(--set $more --set trainer.micro_batch_size=$micro --set trainer.max_steps=20)
        tiny "$T/late.$more.$micro" "${gpus[@]}" "${set[@]}"
        expect "late, $more, micro-batches of $micro" 0 $?
        host $more $micro
        if [ $more = parallel.sp=2 ]; then
            host=$T/host.split.$micro
            (unset LG_BACKEND_DIR && tiny "$host" "${set[@]}")
        fi
        check "late, $more, micro-batches of $micro: byte-identical to the host" same_files "$host" "$T/late.$more.$micro" 20
    done
done
# A shard alone lies on the GPU that is out of reach, as after a restart with fewer encoders than there are shards.
shard=(--set device=cuda --set trainer.gpus=1 --set vae.gpus=1 --set text.gpus=1,0 --set text.instances=1 --set text.shards=2)
timeout 60 "$LGSUP" check "$TINY" "${shard[@]}" --set job.dir="$T/none" >"$out" 2>&1
check "check: a shard out of reach" grep -q 'goes through host memory: cuda:[01] cannot reach the memory of cuda:[01]' "$out"
expect "check: it comes to where it is read, and lies nowhere else" text/1/weights/1 "$(awk '$1 ~ /^text.1/ {print $1}' "$out")"
LG_STUB=two timeout 60 "$LGSUP" check "$TINY" "${shard[@]}" --set job.dir="$T/none" >"$out" 2>&1
check "check: a GPU that has a shard alone is looked at" grep -q '^cuda:0  Stub H200' "$out"
tiny "$T/shard" "${shard[@]}" --set trainer.micro_batch_size=4 --set trainer.max_steps=20
expect "late, a shard out of reach" 0 $?
host parallel.zero=1 4
check "late, a shard out of reach: byte-identical to the host" same_files "$host" "$T/shard" 20
# A run whose GPUs reach each other is not scaled to one that they do not reach, and goes on.
run=$T/scaled
train "$run" "${shard[@]}" --set text.shards=1
wait_step "$run" 3
timeout 60 "$LGSUP" scale text 2 "$run" >"$T/said" 2>&1
expect "scale: a GPU out of reach" 3 $?
check "scale: says why" grep -q 'cuda:0 cannot reach the memory of cuda:1, and this run hands over straight' "$T/said"
wait_step "$run" $(($(step_of "$run") + 3))
expect "scale: nobody was started there" 0 "$(restarts_of "$run" text)"
settle "scale: the run goes on" "$run"
# An lg-device that does not answer, as where a driver holds it up, holds up neither the run nor its end.
mkdir "$T/slow" && cp -r "$e2e_build/bin" "$T/slow/bin" && ln -s "$e2e_build/lib" "$T/slow/lib"
run=$T/unanswered
LGSUP=$T/slow/bin/lgsup train "$run" "${shard[@]}" --set text.shards=1
wait_step "$run" 3
printf '#!/bin/bash\nwhile sleep 0.2; do :; done\n' >"$T/slow/bin/asleep" && chmod +x "$T/slow/bin/asleep"
mv "$T/slow/bin/asleep" "$T/slow/bin/lg-device"
timeout 60 "$LGSUP" scale text 2 "$run" >"$T/said" 2>&1 &
order=$!
check "scale: lg-device is asked" wait_until 30 pgrep -f "$T/slow/bin/lg-device"
wait_step "$run" $(($(step_of "$run") + 3))
pkill -TERM -f "^$T/slow/bin/lgsup start"
check "SIGTERM is heard meanwhile" wait_until 20 grep -q '^stopping: ' "$run.out"
wait "$order"
expect "the order is answered" 7 $?
wait "$tiny_pid"
expect "the run ends in order" 0 $?
pkill -KILL -f "$T/slow/bin/lg-device" # which has no time limit of its own
check "late: the plan says how" jq -e '.apart == 1' "$T/late.parallel.zero=1.4/plan.json"
key=("${gpus[@]}")
for zero in 1 3; do
    run=$T/gpu$zero
    disturbed "two GPUs apart, zero = $zero, killed" "$run" --set parallel.zero=$zero
    settle "two GPUs apart, zero = $zero, killed" "$run"
    [ -n "$settled" ] || continue
    unset LG_BACKEND_DIR
    undisturbed "$settled"
    export LG_BACKEND_DIR=$T/backends
    check "two GPUs apart, zero = $zero, killed: byte-identical to the host" same_files "$reference" "$run" "$settled"
done
