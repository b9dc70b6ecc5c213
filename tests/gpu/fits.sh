#!/bin/bash
# Does every kernel fit every GPU for which its predicate says yes? Without a GPU: the operations' tests run over a stand-in
# for CUDA's runtime (tests/stub/cudart.c), once as each GPU, and each launch is held to what the code asks of a block:
# registers, shared memory, threads, and that there is code for that GPU. Prints "N passed, N failed"; exit 1: one failed.
#
# usage: tests/gpu/fits.sh BUILD      after `make gpu-fits`, which runs it
#
# A GPU for which this build has no machine code (CUDA_ARCHS) is skipped: what its driver would make of PTX is not known.
set -u
build=$(cd "${1:?usage: tests/gpu/fits.sh BUILD}" && pwd) || exit 2
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export LD_LIBRARY_PATH=$build/tests/stub/driver LG_BACKEND_DIR=$build/tests/fits SANITIZE=1 LG_CUDNN=none LG_CUDA_CACHE=$tmp/none
export LG_STUB_LAUNCHED=$tmp/launched
passed=0 failed=0
for gpu in 8.0 8.6 8.9 9.0 10.0 12.0; do
    for program in test_ops_cuda test_long_attention_cuda test_long_conv_cuda test_long_products_cuda; do
        # The results are nobody's: a program has gone through when it says how many they are.
        LG_STUB_CAPABILITY=$gpu timeout 300 "$build/gpu/bin/$program" >"$tmp/log" 2>&1
        code=$?
        [ $code = 77 ] && { echo "skip $gpu: no machine code in this build"; break; }
        if grep -Eq '^[0-9]+ passed, [0-9]+ failed$' "$tmp/log" && ! grep -q '^FAIL on' "$tmp/log"; then
            passed=$((passed + 1))
        else
            echo "FAIL $gpu, $program: exit status $code: $(tail -n 1 "$tmp/log")"
            failed=$((failed + 1))
        fi
    done
done
[ -f "$tmp/launched" ] && sort -u "$tmp/launched" | awk '{ all[$2]; if ($1 == "launched") did[$2] }
    END { for (k in all) n++; for (k in did) m++; printf "%d of %d kernels were launched\n", m, n }'
echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
