#!/bin/bash
# GPUs as `check`, `start` and `doctor` see them: places, sums, and for each way in which a machine can be
# unfit the message, with what to do, and the exit code. On a machine without a GPU: a stand-in for the
# backend (tests/stub/cuda.c), and where the real one is built, a stand-in for the driver.
. "$(dirname "$0")/lib.sh"

out=$T/said
stub=$e2e_build/tests/stub
export LG_STUB_HOST=$e2e_build/lib/liblg-host.so
[ -f "$stub/liblg-cuda.so" ] || { fail "the stand-in" "no $stub/liblg-cuda.so: make e2e-programs first"; exit 1; }

# says NAME CODE COMMAND... -- PATTERN...
says() {
    local name=$1 want=$2 code missing=
    local -a cmd=()
    shift 2
    while [ "$1" != -- ]; do cmd+=("$1"); shift; done
    shift
    timeout --foreground -k 5 600 "${cmd[@]}" >"$out" 2>&1 </dev/null
    code=$?
    for pattern; do grep -Eq -- "$pattern" "$out" || missing="$missing /$pattern/"; done
    if [ $code -ne "$want" ]; then
        fail "$name" "exit $code, expected $want: $(tail -n 4 "$out" | tr '\n' ' ')"
    elif [ -n "$missing" ]; then
        fail "$name" "nothing about$missing in: $(tail -n 8 "$out" | tr '\n' ' ')"
    else
        ok "$name"
    fi
}
cuda() { # STUB check|start [KEY=VALUE ...]: on cuda:0, the encoders on cuda:1
    local kind=$1 command=$2 set
    shift 2
    local -a sets=(--set device=cuda --set vae.gpus=1 --set text.gpus=0,1 --set job.dir="$T/run")
    for set; do sets+=(--set "$set"); done
    env LG_BACKEND_DIR="$stub" LG_STUB="$kind" "$LGSUP" "$command" "$TINY" "${sets[@]}"
}
export -f cuda
export stub LGSUP TINY T
on() { # NAME CODE STUB check|start [KEY=VALUE ...] -- PATTERN...
    local name=$1 want=$2
    shift 2
    says "$name" "$want" bash -c 'cuda "$@"' cuda "$@"
}

# ---- places and sums ----
on "check names places" 0 two check trainer.gpus=0 -- \
    '^vae .*cuda:1 ' '^text .*cuda:0,1 ' '^trainer .*cuda:0 ' '^ema .*cuda:0 ' '^loader .* host ' \
    '^cuda:1  Stub H200' 'CUDA contexts' 'free now +139\.0 GiB of 140\.0 GiB' '^host'
region=$(awk '$1 == "vae/0/weights" || $1 ~ /^vae.*weights/ {print $2; exit}' "$out")
expect "the VAE's weights lie on its GPU" cuda:1 "$region"
expect "the trainer's state lies on its GPU" cuda:0 "$(awk '$1 ~ /^trainer.0.state/ {print $2; exit}' "$out")"
expect "pixels lie on the host" host "$(awk '$1 ~ /^window.*pixels/ {print $2; exit}' "$out")"
# 2 trainer ranks, EMA and writer, text 0 / text 1 and two VAE instances.
expect "contexts of cuda:0" 5 "$(awk '/^cuda:/ {d = $1} /CUDA contexts/ && d == "cuda:0" {print $1}' "$out")"
expect "contexts of cuda:1" 3 "$(awk '/^cuda:/ {d = $1} /CUDA contexts/ && d == "cuda:1" {print $1}' "$out")"
check "check creates nothing" test ! -e "$T/run"
on "no cuDNN is said" 0 bare check -- 'cuDNN is missing' 'install it, or name libcudnn.so.9 in \$LG_CUDNN'

# The stand-in's folder has no backend of the host.
on "a state in host memory, no host's backend" 8 two check memory.offload_optimizer=true -- \
    'memory\.offload_optimizer: no liblg-host\.so in '
"$LGSUP" keys "$T/key" >/dev/null
hosts=(trainer.micro_batch_size=2 hosts.count=2 hosts.number=0 'hosts.list=["127.0.0.1", "127.0.0.2"]' hosts.key="$T/key" hosts.shared="$T")
on "several hosts, whose gradients go through the host, no host's backend" 8 two check "${hosts[@]}" -- 'hosts\.transport: no liblg-host\.so in '
on "several hosts, from GPU to GPU" 0 two check "${hosts[@]}" hosts.transport=nccl -- '^cuda:0  Stub H200'
mkdir "$T/with-host"
ln -s "$stub/liblg-cuda.so" "$LG_STUB_HOST" "$T/with-host/"
stub=$T/with-host on "a state in host memory" 0 two check memory.offload_optimizer=true -- '^cuda:0  Stub H200'

on "the EMA keeper is with every rank" 0 two check trainer.gpus=0,1 -- '^ema .*cuda:0,1 ' '^trainer .*cuda:0,1 '

# ---- GPUs that are not here, without a backend for them ----
mkdir "$T/none"
ln -s "$LG_STUB_HOST" "$T/none"
described() { env LG_BACKEND_DIR="$T/none" "$LGSUP" check "$TINY" --set device=cuda --set vae.gpus=1 --set job.dir="$T/run" "$@"; }
export -f described
says "GPUs are described" 0 bash -c 'described --memory 24GiB' -- '^vae .*cuda:1 ' '^cuda:1  described' \
    'free now +24\.0 GiB of 24\.0 GiB' 'none is asked: kernels of 8\.0; workspaces are bounds' 'activations .*, workspace'
says "GPUs that are described: too small" 6 bash -c 'described --memory 1GiB' -- 'of cuda:0 \(described\), which has 1\.0 GiB'
# What is said to fit does.
"$e2e_build/bin/lg-random-model" latents --count 4 --size 32 "$T/noise" || exit 1
large() {
    env LG_BACKEND_DIR="$T/none" "$LGSUP" check examples/dit-xl2/pipeline-class.toml --set device=cuda --set data.path="$T/noise" --set data.latent_size=32 \
        --set data.flip=false --set vae.model= --set model.depth=8 --set trainer.global_batch_size=256 --set trainer.micro_batch_size=256 \
        --set job.dir="$T/large" "$@"
}
export -f large
export T
says "too small a GPU: a budget" 6 bash -c 'large --memory 20GB' -- 'has 18\.6 GiB: set memory\.recompute = "budget:[0-9.]*GiB", with which it fits \(no bits change\), or lower trainer\.micro'
budget=$(large --memory 20GB 2>&1 | sed -n 's/.*"\(budget:[^"]*\)".*/\1/p')
says "that budget" 0 bash -c "large --memory 20GB --set memory.recompute=$budget" -- 'recomputed: '
deep() { large --set model.depth=28 "$@"; }
export -f deep
budget=$(deep --memory 29GB 2>&1 | sed -n 's/.*"\(budget:[^"]*\)".*/\1/p')
says "a smaller budget" 0 bash -c "deep --memory 29GB --set memory.recompute=$budget" -- 'recomputed: everything but what enters 14 of 28 blocks'
says "too small a GPU: offload" 6 bash -c 'large --memory 12.5GB' -- 'set memory\.recompute = "block" and memory\.offload_activations = true, with'
says "offload" 0 bash -c 'large --memory 12.5GB --set memory.recompute=block --set memory.offload_activations=true' -- 'cuda:0  described'
says "too small a GPU: the average, too" 6 bash -c 'large --memory 11GB' -- 'offload_activations = true and memory\.offload_ema = true, with'
says "too small a GPU: chunks, too" 6 bash -c 'large --memory 9.55GB' -- 'memory\.mlp_chunks = 8, with which it fits \(the last one decides bits'
recomputed() { large "$@" --set memory.recompute=block; }
export -f recomputed
says "room for all" 0 bash -c 'recomputed --memory 40GB' -- 'note: memory\.recompute = "none" fits, too, with less computed twice'
says "room for some" 0 bash -c 'recomputed --memory 20GB' -- 'note: memory\.recompute = "budget:[0-9.]*GiB" fits, too'
says "no room for more" 0 bash -c 'recomputed --memory 14.2GB >"$T/said" && ! grep "note: memory.recompute" "$T/said"' --
says "far too small a GPU" 6 bash -c 'large --memory 4GB' -- 'has 3\.7 GiB: lower trainer\.micro'
says "GPUs that are described: no size" 2 bash -c 'described --memory much' -- '--memory much is no size like 24GiB'
says "GPUs that are described: apart" 0 bash -c 'described --memory 24GiB --set parallel.exchange=host' -- 'goes through host memory'

# ---- what is unfit, by check and by start ----
for command in check start; do
    on "no GPU, $command" 8 none $command -- 'no GPU here'
    on "driver too old, $command" 10 old $command -- 'driver is too old'
    on "wrong architecture, $command" 10 arch $command -- 'cuda:1 is another kind'
    on "too few GPUs, $command" 8 two $command trainer.gpus=0,2 -- 'no cuda:2'
    on "no peer access, $command" 3 apart $command parallel.exchange=gpu -- 'cuda:[01] cannot reach the memory of cuda:[01]' 'trainer\.gpus'
    on "memory taken, $command" 6 held $command -- 'of cuda:1 \(Stub H200\), where 1\.0 GiB of 140\.0 GiB are free: others hold 139\.0 GiB' 'nvidia-smi'
    on "too small, $command" 6 small $command -- 'of cuda:[01] \(Stub H200\), which has 1\.0 GiB: lower trainer\.micro_batch_size'
    says "no backend, $command" 8 env LG_BACKEND_DIR="$T" "$LGSUP" $command "$TINY" --set device=cuda --set job.dir="$T/run" -- \
        'no liblg-cuda\.so'
done
mkdir "$T/broken"
echo "no library" >"$T/broken/liblg-cuda.so"
says "a backend that does not load" 1 env LG_BACKEND_DIR="$T/broken" "$LGSUP" check "$TINY" --set device=cuda -- \
    'cannot load the backend .*/liblg-cuda\.so: ' 'put beside it'
mkdir "$T/foreign"
sed 's/lg-interface-[0-9a-f]*/lg-interface-0123456789abcdef/' "$stub/liblg-cuda.so" >"$T/foreign/liblg-cuda.so"
says "a backend of another build" 10 env LG_BACKEND_DIR="$T/foreign" LG_STUB=two "$LGSUP" check "$TINY" --set device=cuda -- \
    '/liblg-cuda\.so is not of the same build as this program: install both from one'
check "nothing is left running" nothing_runs
check "no run was begun" test ! -e "$T/run/board"
says "bf16 on the host" 3 "$LGSUP" check "$TINY" --set precision=bf16 -- 'precision = "bf16" needs device = "cuda"'
says "GPUs on the host" 3 "$LGSUP" check "$TINY" --set vae.gpus=1 -- 'vae\.gpus = "1" has no meaning with device = "host"'

# ---- doctor ----
doctor() { env LG_BACKEND_DIR="$T/both" LG_STUB="$1" "$LGSUP" doctor; }
mkdir "$T/both"
ln -s "$stub/liblg-cuda.so" "$LG_STUB_HOST" "$T/both"
export -f doctor
see() { says "$1" "$2" bash -c 'doctor "$1"' doctor "${@:3}"; }
see "doctor: two GPUs" 0 two -- 'ok +cuda:1 +Stub H200, 139\.0 GiB of 140\.0 GiB free, .*reaches cuda:0'
see "doctor: no GPU" 0 none -- 'note +GPUs +no GPU here'
see "doctor: driver too old" 0 old -- 'note +GPUs +the driver is too old'
see "doctor: wrong architecture" 0 arch -- 'ok +cuda:0' 'note +cuda:1 +cuda:1 is another kind'
see "doctor: memory taken" 0 held -- 'note +cuda:1 .* 1\.0 GiB of 140\.0 GiB free' 'nvidia-smi'
see "doctor: no cuDNN" 0 bare -- 'note +cuDNN' 'LG_CUDNN'
see "doctor: no peer access" 0 apart -- 'note +cuda:0 and cuda:1 +do not reach each other' 'through host memory'

# ---- the real backend without a driver, or with one that is unfit ----
if [ ! -f "$e2e_build/lib/liblg-cuda.so" ]; then
    skip "the real backend's messages" "make cuda makes it"
else
    if ! ldconfig -p | grep -q 'libcuda\.so\.1'; then
        says "no driver" 8 "$LGSUP" check "$TINY" --set device=cuda -- 'no NVIDIA driver here: install one that knows CUDA'
    fi
    driver() { # NAME CODE VARIABLE=VALUE PATTERN...
        says "$1" "$2" env LD_LIBRARY_PATH="$stub/driver" "$3" "$LGSUP" check "$TINY" --set device=cuda -- "${@:4}"
    }
    driver "the real backend: driver too old" 10 LG_STUB_VERSION=12040 'too old: it knows CUDA 12\.4 at most, this build needs [0-9.]+: update'
    driver "the real backend: no GPU" 8 LG_STUB_INIT=100 'no GPU here: set device = "host"'
    export CUDA_VISIBLE_DEVICES=7
    driver "the real backend: hidden GPUs" 8 LG_STUB_INIT=100 'no GPU here with CUDA_VISIBLE_DEVICES=7'
    unset CUDA_VISIBLE_DEVICES
    driver "the real backend: no fabric manager" 1 LG_STUB_INIT=802 'nvidia-fabricmanager'
    driver "the real backend: half an update" 1 LG_STUB_INIT=803 'restart the machine'
fi
