#!/bin/bash
# Branch coverage of shm, bus, supervisor and the checkpoint writer by unit tests and simulations.
#
# usage: tests/coverage.sh BUILD     (BUILD: made with COVERAGE=1)
#
# A branch counts as covered when it was taken at least once. Branches of LG_ASSERT are left out: the
# side that is never taken is the point of it. A killed process writes nothing, so what only ever runs
# in processes that are killed looks uncovered. E2E="resume detach" adds end-to-end scripts. Lines with branches never taken are listed in
# BUILD/coverage/missed.
set -u
build=${1:?usage: tests/coverage.sh BUILD}
cd "$(dirname "$0")/.." || exit 1
out=$PWD/$build/coverage
folders="shm bus supervisor/run supervisor/views supervisor/core supervisor/launch supervisor/commands stages/ckpt"
rm -rf "$out" && mkdir -p "$out" || exit 1
for f in $folders; do find "$build/obj/$f" -name '*.gcda' -delete; done
# All but those that only compute.
names=$(ls tests/unit/test_*.c | sed 's|.*/test_||; s|\.c$||' |
    grep -vE '^(ops_|denoiser|t5|autoencoder|encode|host|sampler|objective|picture|emoji|permute|params|safetensors|samples|source|tar$)')
UNIT_LIMIT_S=400 tests/run_unit.sh "$build" $names | grep -v '^  ok' # a failed test is told, coverage is counted all the same
for s in ${E2E:-}; do "tests/e2e/$s.sh" "$build" | grep '^FAIL'; done
for f in $folders; do
    for o in "$build/obj/$f"/*.gcno; do
        # A file that no test has run has no counts, and counts as uncovered.
        gcov -b -c -p -o "$build/obj/$f" "${o%.gcno}.o" >/dev/null 2>>"$out/gcov.log"
    done
done
mv ./*.gcov "$out" 2>/dev/null
awk -v folders="$folders" -v missed="$out/missed" '
    FNR == 1 { file = ""; skip = 0 }
    /^ *-: *0:Source:/ { sub(/^.*Source:/, ""); file = $0 }
    /^ *[-0-9#=*]+: *[0-9]+:/ {
        text = $0; sub(/^ *[-0-9#=*]+: */, "", text); line = text + 0; sub(/^[0-9]+:/, "", text)
        skip = text ~ /LG_ASSERT|static_assert/
        next
    }
    /^branch/ && file && skip && file ~ /\.c$/ { asserted++ }
    /^branch/ && file && !skip {
        n = split(folders, d, " "); mine = ""
        for (i = 1; i <= n; i++) if (index(file, d[i] "/") == 1) mine = d[i]
        if (mine == "" || file !~ /\.c$/) next
        all[file]++; sum[mine]++
        if ($3 == "never" || $4 == 0) { if (!((file, line) in told)) { told[file, line] = 1; print file ":" line ":" text > missed } }
        else { hit[file]++; sumhit[mine]++ }
    }
    END {
        for (f in all) printf "%6.1f %%  %5d of %5d  %s\n", 100 * hit[f] / all[f], hit[f], all[f], f | "sort -k6"
        close("sort -k6")
        print ""
        n = split(folders, d, " ")
        for (i = 1; i <= n; i++) {
            printf "%6.1f %%  %5d of %5d  %s\n", 100 * sumhit[d[i]] / sum[d[i]], sumhit[d[i]], sum[d[i]], d[i]
            t += sum[d[i]]; h += sumhit[d[i]]
        }
        printf "%6.1f %%  %5d of %5d  branches in all", 100 * h / t, h, t
        printf "; %d of assertions are not counted\n", asserted
    }' "$out"/*.gcov | tee "$out/summary"
