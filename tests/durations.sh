#!/bin/sh
# tests/durations, anew from the results of a run of all tests (tests/runner.sh): what took a second or more.
# Usage: tests/durations.sh BUILD/results >tests/durations
set -u
cd "${1:?usage: tests/durations.sh BUILD/results >tests/durations}" || exit 1
echo "# Seconds that tests took, for the order in which tests/runner.sh starts them: KIND BUILD NAME SECONDS CPU_SECONDS."
for f in *.*.*; do
    read -r _ _ seconds cpu <"$f"
    echo "$f $seconds $cpu"
done | sed 's/\./ /; s/\./ /' | awk '$4 >= 1 || $5 >= 1' | sort -k4,4nr -k5,5nr -k1,3
