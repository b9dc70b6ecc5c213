#!/bin/bash
# The crash campaign on a machine that has nothing but the directory that `make chaos-bundle` has made.
#
# usage: chaos.sh --out DIR [--kills N] [--jobs J] [--seconds S] [--seed K] [--steps N] [--gap MS] [--only FAULT]
#
# J runs at a time (default: one for every two cores). DIR gets records.jsonl, report.md and, for each run
# that failed, failed.<run> and failed.<run>.out. A campaign that was interrupted goes on in the same DIR.
# Exit code 0: every run ended as one that was left alone does.
set -u
usage() {
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
}
here=$(cd "$(dirname "$0")" && pwd) || exit 2
out='' kills=20000 steps=1000 jobs=$((($(nproc) + 1) / 2)) more=()
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case $1 in
    --out) out=$2 ;;
    --kills) kills=$2 ;;
    --jobs) jobs=$2 ;;
    --steps) steps=$2 ;;
    --seconds | --seed | --gap | --only) more+=("$1" "$2") ;;
    *) usage ;;
    esac
    shift 2
done
[ -n "$out" ] || usage
chaos=$here/tests/chaos/chaos micro=$here/examples/micro
"$chaos" --build "$here" --pipeline "$micro/pipeline.toml" --tar "$micro/made/data/micro-00000.tar" --home "$out" \
    --commit "$(cat "$here/commit")" --kills "$kills" --jobs "$jobs" --steps "$steps" ${more[@]+"${more[@]}"}
rc=$?
"$chaos" --report "$out/report.md" --notes "$here/tests/chaos/notes.md" "$out" && echo "report: $out/report.md"
exit $rc
