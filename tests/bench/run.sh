#!/bin/bash
# Every figure of docs/bench.md, as JSON lines with units in the names. Usage: tests/bench/run.sh BUILD
#
# "busy" lines are taken with one computing process per core beside the measured ones.
set -eu
build=${1:?usage: tests/bench/run.sh BUILD}
cores=$(nproc)
dir=$(mktemp -d /tmp/lg-bench-run-XXXXXX)
trap 'rm -rf "$dir"' EXIT
config=examples/emoji/pipeline.toml

echo "{\"bench\": \"machine\", \"cores\": $cores, \"cpu\": \"$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1)\", \"date\": \"$(date -u +%F)\", \"commit\": \"$(git rev-parse --short HEAD 2>/dev/null || echo none)\"}"
"$build/tests/bench/bench_handoff" 2000
"$build/tests/bench/bench_handoff" 500 "$cores"
"$build/tests/bench/bench_run" "$build/bin" $config "$dir/run" 9
"$build/tests/bench/bench_pixels"

"$build/tests/bench/bench_loop" "$build" examples/micro/pipeline.toml "$dir/loop" 100

# Checkpoints: the trainer's own account of its waits for the writer, and the steps around one.
for every in 0 20; do
    "$build/bin/lgsup" start $config --set job.dir="$dir/ckpt$every" --set trainer.max_steps=200 \
        --set checkpoint.every=$every --set 'sample.captions=[]' >/dev/null
done
awk -F'[:,]' -v plain="$dir/ckpt0/metrics.jsonl" '
    function read(file, ms, wait,    line, n, f) { n = 0
        while ((getline line < file) > 0) { split(line, f, /[:,]/); n = f[2] + 0
            ms[n] = 16000 / f[10]; wait[n] = 1000 * f[14] } return n }
    function median(a, n,    i, j, t, b) { for (i = 1; i <= n; i++) b[i] = a[i]
        for (i = 2; i <= n; i++) { t = b[i]; for (j = i - 1; j > 0 && b[j] > t; j--) b[j + 1] = b[j]; b[j + 1] = t }
        return b[int((n + 1) / 2)] }
    BEGIN { file = ARGV[1]; n = read(file, ms, wait); read(plain, pms, pwait)
        for (s = 2; s <= n; s++) { r[++k] = ms[s]; q[k] = pms[s] }
        base = median(r, k)
        for (s = 20; s + 3 <= n; s += 20) { c++; blocked += wait[s + 1] + wait[s + 2] + wait[s + 3]
            extra += ms[s + 1] + ms[s + 2] + ms[s + 3] - 3 * base }
        printf "{\"bench\": \"checkpoint\", \"checkpoints\": %d, \"step_ms\": %.2f, \"step_ms_without\": %.2f, \"blocked_ms\": %.3f, \"blocked_percent_of_step\": %.2f, \"extra_ms_of_the_3_steps_after\": %.2f}\n",
            c, base, median(q, k), blocked / c, 100 * blocked / c / base, extra / c }' "$dir/ckpt20/metrics.jsonl"

"$build/tests/bench/bench_step"
if /usr/bin/python3 -c 'import torch' 2>/dev/null; then
    /usr/bin/python3 tests/bench/peer_step.py
    "$build/tests/bench/bench_step"
else
    echo '{"bench": "peer_step", "skipped": "python3-torch is not installed"}'
fi
"$build/tests/bench/bench_ops" 2>/dev/null
