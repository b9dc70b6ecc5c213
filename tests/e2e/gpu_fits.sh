#!/bin/bash
# Does every kernel fit every GPU for which its predicate says yes? Without a GPU: the operations' tests run over a stand-in
# for CUDA's runtime (tests/stub/cudart.c), once as each GPU, and each launch is held to what the code asks of a block:
# registers, shared memory, threads, and that there is code for that GPU.
#
# `make gpu-fits` builds what it needs, where nvcc is, and runs it. A GPU for which that build has no machine code
# (CUDA_ARCHS) is skipped: what its driver would make of PTX is not known.
. "$(dirname "$0")/lib.sh"
[ -f "$e2e_build/tests/fits/liblg-cuda.so" ] || { skip "kernels over a stand-in for CUDA's runtime" "make gpu-fits makes it"; exit 77; }
export LD_LIBRARY_PATH=$e2e_build/tests/stub/driver LG_BACKEND_DIR=$e2e_build/tests/fits SANITIZE=1 LG_CUDNN=none
export LG_CUDA_CACHE=$T/none LG_STUB_LAUNCHED=$T/launched
fits() { # PROGRAM: it has gone through when it says how many results there are, which are nobody's
    timeout 300 "$e2e_build/gpu/bin/$1" >"$T/log" 2>&1
    code=$?
    grep -Eq '^[0-9]+ passed, [0-9]+ failed$' "$T/log" && ! grep '^FAIL on' "$T/log" && return
    echo "exit status $code: $(tail -n 1 "$T/log")"
    return 1
}
for gpu in 8.0 8.6 8.9 9.0 10.0 12.0; do
    export LG_STUB_CAPABILITY=$gpu
    for program in test_ops_cuda test_long_attention_cuda test_long_conv_cuda test_long_products_cuda; do
        if timeout 60 "$e2e_build/gpu/bin/test_long_attention_cuda" 2>&1 | grep -q 'no machine code for'; then
            skip "kernels on $gpu" "this build has no code for it"
            break
        fi
        check "kernels on $gpu, $program" fits $program
    done
done
# GPUs that are described (`lgsup check --memory`) want at least what these do, on the path that they have, and little more.
at_least() { # ROLE CONFIG [...]; $gpu: capability
    local role=$1 file=$2 real bound
    shift 2
    LG_STUB_CAPABILITY=${gpu:-8.6} "$e2e_build/bin/lg-$role" --plan "$file" "$@" 2>"$T/log" | sed -n '/^{/,$p' >"$T/real" || return 1
    "$e2e_build/bin/lg-$role" --described "$file" "$@" | sed -n '/^{/,$p' >"$T/bound" || return 1
    jq -e --slurpfile b "$T/bound" '.regions == $b[0].regions and (.private | length) > 0' "$T/real" >/dev/null || { echo "regions differ"; return 1; }
    real=$(jq '[.private[].bytes] | add' "$T/real") bound=$(jq '[.private[].bytes] | add' "$T/bound")
    echo "$role: $real bytes, described $bound"
    [ "$bound" -ge "$real" ] && [ "$bound" -le $((real + (1 << 30))) ]
}
gpu_toml=$e2e_root/examples/emoji/pipeline-gpu.toml
cuda=(--set data.path="$EMOJI/data-quick" --set job.dir="$T/run")
dit=(--set model.kind=dit --set vae.model= --set text.model= --set data.size=256 --set model.hidden=1152 --set model.depth=4
    --set model.heads=16 --set model.num_classes=1000 --set trainer.global_batch_size=32 --set trainer.micro_batch_size=32 --set window.batches=8 --set 'sample.captions=[]')
for role in trainer vae text; do check "described: the emoji's $role" at_least $role "$gpu_toml" "${cuda[@]}"; done
check "described: DiT's trainer" at_least trainer "$gpu_toml" "${cuda[@]}" "${dit[@]}"
check "described: DiT's trainer in fp32" at_least trainer "$gpu_toml" "${cuda[@]}" "${dit[@]}" --set precision=tf32
check "described: on the tiny net" at_least trainer "$TINY" --set device=cuda --set precision=bf16
# One picture of 65,536 tokens on two GPUs: what grows with the tokens, where each word of memory.recompute leaves it.
check "latents" "$e2e_build/bin/lg-random-model" latents --count 1 --size 512 "$T/latents"
long=(--set model.kind=dit --set vae.model= --set text.model= --set data.path="$T/latents" --set data.latent_size=512 --set data.flip=false
    --set model.hidden=2048 --set model.depth=12 --set model.heads=32 --set model.num_classes=1000 --set trainer.ranks=2 --set trainer.gpus=0,1
    --set parallel.sp=2 --set parallel.zero=3 --set trainer.global_batch_size=1 --set trainer.micro_batch_size=1 --set loader.instances=1
    --set loader.chunk=1 --set window.batches=8 --set 'sample.captions=[]')
for gpu in 8.6 9.0; do
    for word in norms block uniform:1 uniform:3; do
        check "described: a long picture on $gpu, $word" at_least trainer "$gpu_toml" "${cuda[@]}" "${long[@]}" --set memory.recompute=$word
    done
done
# Each has been launched somewhere, where all are built.
awk '$1 == "launched" { did[$2] } { all[$2] } END { for (k in all) { n++; if (!(k in did)) { m++; print "never launched: " k } }
    print n - m " of " n " kernels were launched" }' "$T/launched" >"$T/coverage" 2>/dev/null && tail -n 1 "$T/coverage"
