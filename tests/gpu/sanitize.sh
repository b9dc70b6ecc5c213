#!/bin/bash
# The operations' tests under compute-sanitizer: memcheck, initcheck, racecheck, many processes at a time. Prints what
# is not clean, a line for each tool and program, and "N passed, N known, N failed" (processes). Exit 1: one failed.
#
# usage: sanitize.sh [--tool TOOL[,TOOL]] [--jobs N] [FILTER]      lies beside bin/ (build/gpu, a bundle's gpu/)
#
#   FILTER    a regular expression for what follows "test_": programs, with part and arguments where not all are wanted, as
#             "(long_conv|ops_cuda [01]/8 conv2d)"
#   --jobs    processes at a time; default: 12 (the GPU takes turns between them)
#
# Clean is what ends well by itself, with the tool's summary of no error and no hazard, and says nothing of an error of
# the tool. The programs run with SANITIZE=1 (tests/gpu/gpu_test.h): they compare nothing, and scratch memory is what
# nobody has written. Own kernels do what cuDNN could (LG_CUDNN=none); those of cuBLASLt are looked at as well: to leave
# them out makes racecheck fail itself ("failed to handle a hardware exception"). Algorithms are tuned before, without a
# tool, and kept in $LG_CUDA_CACHE (default: a temporary file).
#
# compute-sanitizer is $COMPUTE_SANITIZER, or in PATH, or in /usr/local/cuda/bin. It should be 2026.4 or later (PyPI has it
# as nvidia-cuda-sanitizer-api): the one of CUDA 13.0 names hazards in kernels of cuBLASLt that its successors do not.
#
# Known to initcheck: reads of what a kernel of cuBLASLt has written (by TMA through a tensor map, it seems: not all of
# that is seen by the tool), by its splitKreduce_kernel, and by softmax_kernel, whose scores are such a product. A process
# with errors runs again without these two, must be clean then, and counts as "known". (That the scores have been written
# shows test_ops_cuda without a tool: its scratch memory is NaNs at the start.)
#
# The tools of 2026.4 can die (SIGSEGV in their own threads, in libsanitizer-collection.so, when a program exits: 2 of 750
# short racechecks, 4 of some 20 memchecks on a loaded machine). A process that ended so after its last line, with no error
# and no hazard named, runs up to three times more and must be clean once; so does a process under initcheck without the two.
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

run() { # COMMAND...: fills $log; is it clean?
    PART=$part timeout --foreground 600 "$@" >"$log" 2>&1
    code=$?
    [ "$code" = 0 ] && passed && ! grep -Eqi 'internal|hardware exception|not supported' "$log" || return 1
    [ "$tool" = none ] || no_error
}
no_error() { grep -Eq '^=+ (ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' "$log"; }
died() { [ "$code" = 11 ] && passed; } # the tool, after the program's last line
passed() { grep -Eq '^[1-9][0-9]* passed, 0 failed$' "$log"; }
one() { # TOOL PROGRAM PART ARGUMENTS...: a line in the file of results
    local tool=$1 program=$2 part=$3 began=$SECONDS word=ok check=() log code try
    local without=(--kernel-name-exclude kns=softmax_kernel --kernel-name-exclude kns=splitKreduce_kernel)
    log=$(mktemp -p "$tmp" "$tool.XXXXXX")
    [ "$tool" = none ] || check=("$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 --show-backtrace no)
    shift 3
    if ! run "${check[@]}" "$here/bin/$program" "$@"; then
        word=FAIL
        try=0
        while [ $word = FAIL ] && [ "$tool" != none ] && died && no_error && [ $((try += 1)) -le 3 ]; do
            echo "again $tool: PART=$part $program $*: the tool died at its end"
            run "${check[@]}" "$here/bin/$program" "$@" && word=ok
        done
        if [ $word = FAIL ] && [ "$tool" = initcheck ] && passed && ! no_error; then
            cp "$log" "$log.all"
            for try in 1 2 3; do
                run "${check[@]}" "${without[@]}" "$here/bin/$program" "$@" && word=known
                [ $word = FAIL ] && died && no_error || break
                echo "again $tool: PART=$part $program $*: the tool died at its end"
            done
            [ $word = known ] || cp "$log.all" "$log"
        fi
    fi
    echo "$word $tool $program $((SECONDS - began)) $part $*" >>"$tmp/results"
    [ $word = FAIL ] || return 0
    echo "FAIL $tool: PART=$part $program $*: exit status $code"
    head -15 "$log"
    echo ...
    grep -a '^=' "$log" | tail -8
}
export -f one run passed died no_error
# Apart: the precisions, and what brings cuBLASLt with it, which the tools take long to load.
tasks() { # TOOL: the longest first
    local p i
    for p in fp32 tf32 fp16 bf16; do
        for i in {0..7}; do echo "$1 test_ops_cuda $i/8 !linear,conv2d,attention $p"; done
        for i in {0..7}; do echo "$1 test_ops_cuda $i/8 conv2d $p"; done
        for i in 0 1 2 3; do echo "$1 test_ops_cuda $i/4 attention $p"; done
        for i in 0 1; do echo "$1 test_ops_cuda $i/2 linear $p"; done
    done
    for i in {0..8}; do echo "$1 test_long_conv_cuda $i/9"; done
    for i in {0..4}; do echo "$1 test_long_gradients_cuda $i/5"; done
    for i in {0..23}; do echo "$1 test_long_products_cuda $i/24"; done
    for i in {0..31}; do echo "$1 test_long_attention_cuda $i/32"; done
}
pool() { grep -E "^[a-z]+ [a-z_]*$filter" | xargs -P "$jobs" -L 1 bash -c 'one "$@"' _; }
"$sanitizer" --version | grep Version
summary() {
    awk '{ k = $2 " " $3; n[k]++; bad[k] += $1 == "FAIL"; known[k] += $1 == "known"; if ($4 > most[k] + 0) most[k] = $4 }
         END { for (k in n) printf "%s %s: %d processes, %d not clean, %d known, longest %d s\n", bad[k] ? "FAIL" : "ok  ", k,
                                   n[k], bad[k], known[k], most[k] }' "$tmp/results" | sort -k2
}
# Which of a program's processes they were, for who goes on later with a FILTER of the others.
looked_at() {
    awk '$2 != "none" { k = $2 " " $3; done[k] = done[k] ", " $5 ($6 ? " " $6 : "") ($7 ? " " $7 : "") }
         END { for (k in done) print k " has been looked at for " substr(done[k], 3) }' "$tmp/results" | sort
}
trap 'summary; looked_at; echo "FAIL stopped: these alone have been looked at"; exit 1' TERM
tasks none | pool
for tool in ${tools//,/ }; do tasks "$tool"; done | pool
summary
count() { grep -c "^$1" "$tmp/results"; }
echo "$(count ok) passed, $(count known) known, $(count FAIL) failed"
! grep -q '^FAIL' "$tmp/results"
