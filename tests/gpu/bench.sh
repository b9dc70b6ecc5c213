#!/bin/bash
# Every figure of docs/gpu-results.md on a machine with a GPU: step and encoders alone, PyTorch (where there
# is one) doing the same step, alone and with pictures encoded inline, and our pipeline.
#
# usage: bench.sh [DATA]      lies in a bundle's gpu/; DATA: for models and shards of noise, default
#                             BUNDLE/bench-data
set -u
here=$(cd "$(dirname "$0")" && pwd)
failed=0
run() {
    echo "== ${*##*/}"
    "$@" || { echo "FAIL ${1##*/}: exit $?"; failed=1; }
}
export LG_CUDA_CACHE=${LG_CUDA_CACHE:-${TMPDIR:-/tmp}/lg-algorithms.txt}
for program in "$here"/bin/bench_*; do
    [ -x "$program" ] && run "$program"
done
export PYTHONDONTWRITEBYTECODE=1
if python3 -c 'import torch' 2>/dev/null; then
    run python3 "$here/peer_dit_xl2.py" 256
    run python3 "$here/peer_inline.py" 256
fi
run "$here/bench_pipeline.sh" "$here/.." "${1:-$here/../bench-data}"
exit $failed
