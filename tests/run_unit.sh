#!/bin/sh
# Unit tests of a build by themselves: all, or those that are named. UNIT_JOBS (1) at a time.
# Usage: tests/run_unit.sh BUILD [NAME ...]
set -u
build=${1:?usage: tests/run_unit.sh BUILD [NAME ...]}
shift
[ $# -gt 0 ] || set -- $(cd "$build/tests" && ls -d test_* | sed -n 's/^test_\([a-z0-9_]*\)$/\1/p')
printf "unit $build %s\n" "$@" | "$(dirname "$0")/runner.sh" "${UNIT_JOBS:-1}" "$build/tests/results"
