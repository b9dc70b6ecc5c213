#!/bin/bash
# The operations' tests under compute-sanitizer: memcheck, initcheck, racecheck, many processes at a time. Prints what
# is not clean, a line for each tool and program, and "N passed, N failed" (processes); exits with 1 when one failed.
#
# usage: sanitize.sh [--tool TOOL[,TOOL]] [--jobs N] [FILTER]      lies beside bin/ (build/gpu, a bundle's gpu/)
#
#   FILTER    programs whose name contains it
#   --jobs    processes at a time; default: 12 (the GPU takes turns between them)
#
# Clean is what ends well by itself, with the tool's summary of no error and no hazard, and says nothing of an error of
# the tool. The programs run with SANITIZE=1 (tests/gpu/gpu_test.h): they compare nothing, and scratch memory is what
# nobody has written. Own kernels do what cuDNN could (LG_CUDNN=none); those of cuBLASLt are looked at as well: to leave
# them out makes racecheck fail itself ("failed to handle a hardware exception"). Algorithms are tuned before, without a
# tool, and kept in $LG_CUDA_CACHE (default: a temporary file). compute-sanitizer is $COMPUTE_SANITIZER, or in PATH, or
# in /usr/local/cuda/bin.
#
# racecheck names one pair in test_long_conv_cuda, where a block takes several tiles: a write of tile_conv.cu's sums and
# a read of them (finish, add_warps). By reading they are ordered: the reader frees the slot, the warp that loads waits
# for that, fills the slot, and the writer waits until it is full. The tool has not confirmed that: it counts as failed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
tools=memcheck,initcheck,racecheck jobs=12 filter=
while [ $# -gt 0 ]; do
    case $1 in
    --tool) tools=$2; shift ;;
    --jobs) jobs=$2; shift ;;
    -*) sed -n 's/^# \(usage.*\)/\1/p' "$0"; exit 2 ;;
    *) filter=$1 ;;
    esac
    shift
done
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || { echo "FAIL no compute-sanitizer: name it in \$COMPUTE_SANITIZER" >&2; exit 1; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
export here tmp sanitizer SANITIZE=1 LG_CUDNN=none LG_CUDA_CACHE=${LG_CUDA_CACHE:-$tmp/algorithms.txt}

one() { # TOOL PROGRAM PART ARGUMENTS...: a line in the file of results; "-": no argument
    local tool=$1 program=$2 part=$3 began=$SECONDS word=ok command=() log code
    log=$(mktemp -p "$tmp" "$tool.XXXXXX")
    [ "$tool" = none ] || command=("$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20)
    shift 3
    PART=$part timeout 300 "${command[@]}" "$here/bin/$program" "$@" >"$log" 2>&1
    code=$?
    [ $code = 0 ] && grep -Eq '^[1-9][0-9]* passed, 0 failed$' "$log" || word=FAIL
    [ "$tool" = none ] || grep -Eq '^=+ (ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' "$log" || word=FAIL
    ! grep -Eqi 'internal|hardware exception|not supported' "$log" || word=FAIL
    echo "$word $tool $program $((SECONDS - began))" >>"$tmp/results"
    [ $word = FAIL ] || return 0
    echo "FAIL $tool: PART=$part $program $*: exit status $code"
    head -15 "$log"
    echo ...
    grep -a '^=' "$log" | tail -8
}
export -f one
# Apart: the precisions, and what brings cuBLASLt with it, which the tools take long to load.
tasks() { # TOOL: the longest first
    local p i
    for p in fp32 tf32 fp16 bf16; do
        for i in linear conv2d attention '!linear,conv2d,attention'; do echo "$1 test_ops_cuda 0/1 $i $p"; done
    done
    for i in {0..8}; do echo "$1 test_long_conv_cuda $i/9"; done
    for i in {0..11}; do echo "$1 test_long_products_cuda $i/12"; done
    for i in 0 1 2 3; do echo "$1 test_long_attention_cuda $i/4"; done
}
pool() { grep -E "^[a-z]+ [a-z_]*$filter" | xargs -P "$jobs" -L 1 bash -c 'one "$@"' _; }
tasks none | pool
for tool in ${tools//,/ }; do tasks "$tool"; done | pool
awk '{ k = $2 " " $3; n[k]++; bad[k] += $1 == "FAIL"; if ($4 > most[k] + 0) most[k] = $4 }
     END { for (k in n) printf "%s %s: %d processes, %d not clean, longest %d s\n", bad[k] ? "FAIL" : "ok  ", k, n[k],
                               bad[k], most[k] }' "$tmp/results" | sort -k2
echo "$(grep -c '^ok' "$tmp/results") passed, $(grep -c '^FAIL' "$tmp/results") failed"
! grep -q '^FAIL' "$tmp/results"
