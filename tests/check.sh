#!/bin/bash
# Every test. Called by `make check`, after `make deps`, as: tests/check.sh BUILD [JOBS]
#
# Builds, then: unit tests, layering, end-to-end scripts, the unit tests under AddressSanitizer and
# UBSan (BUILD-asan), those of shared memory and messages under ThreadSanitizer (BUILD-tsan), a short
# fuzzing of every parser (BUILD-fuzz). Says how long each section took, at the end once more what has
# failed; the last line is "N passed, N failed". CHECK_ONLY="unit layering e2e asan tsan fuzz" picks
# sections, E2E_ONLY="kills cli" end-to-end scripts.
set -u
build=${1:?usage: tests/check.sh BUILD [JOBS]}
jobs=${2:-$(nproc)}
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 failures=()
sections=" ${CHECK_ONLY:-unit layering e2e asan tsan fuzz} "
e2e_limit_s=${E2E_LIMIT_S:-1200}
fuzz_s=2
# Tests whose threads or processes share memory.
tsan_names="board bus commit keeper region turns window window_threads sim_protocol"

begin() { section=$1 began=$SECONDS; echo "== $section"; }
end() { echo "== $section: $((SECONDS - began)) s"; }
wanted() { case "$sections" in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
broken() { failed=$((failed + 1)); failures+=("$1"); echo "FAIL $1"; }

make_in() { # BUILD TARGET... [VARIABLE=...]
    local dir=$1
    shift
    env -u MAKEFLAGS -u MAKELEVEL make -s -j"$jobs" BUILD="$dir" "$@" >"$dir/build.log" 2>&1 || {
        grep -E 'error|Error|undefined|\*\*\*' "$dir/build.log" | head -20
        broken "build of $dir (all of it: $dir/build.log)"
        return 1
    }
}
tally() { # BUILD NAME: adds what run_unit.sh left
    local p f
    read -r p f <"$1/tests/tally" || { broken "$2: nothing was run"; return; }
    passed=$((passed + p)) failed=$((failed + f))
    [ "$f" -eq 0 ] || failures+=("$2: $f
$(sed 's/^/    /' "$1/tests/failed")")
    [ "$p" -gt 0 ] || broken "$2: nothing was run"
    echo "$p passed, $f failed"
}
# Two builds whose unit tests have run: did their host backends compute the same? (test_rounding)
same_bits() { # BUILD BUILD
    local a b
    a=$(grep '^  bits ' "$1/tests/test_rounding.log" 2>/dev/null)
    b=$(grep '^  bits ' "$2/tests/test_rounding.log" 2>/dev/null)
    [ -n "$a" ] && [ -n "$b" ] || return 0 # the unit tests say so where one should be there
    [ "$a" = "$b" ] || { broken "the host backends of $1 and $2 compute other bits"; return; }
    passed=$((passed + 1))
}
# Counts the lines "ok ..." and "FAIL ..." of a script. NAME LIMIT_S COMMAND...
script() {
    local name=$1 limit=$2 log=$build/tests/e2e/$1.log began=$SECONDS code p f
    shift 2
    timeout -k 30 "$limit" "$@" >"$log" 2>&1 </dev/null
    code=$?
    if [ $code -eq 77 ]; then grep '^skip ' "$log"; return; fi
    p=$(grep -c '^ok ' "$log") f=$(grep -c '^FAIL ' "$log")
    if [ $code -eq 124 ] || [ $code -eq 137 ]; then echo "FAIL $name: not done after $limit s" >>"$log"; f=$((f + 1)); fi
    if [ $code -ne 0 ] && [ "$f" -eq 0 ]; then echo "FAIL $name: exit $code" >>"$log"; f=1; fi
    if [ "$p" -eq 0 ] && [ "$f" -eq 0 ]; then echo "FAIL $name: nothing was checked" >>"$log"; f=1; fi
    passed=$((passed + p)) failed=$((failed + f))
    [ "$f" -eq 0 ] || failures+=("$name: $f of $((p + f)), log $log:
$(grep -a '^FAIL ' "$log" | head -20 | sed 's/^/        /')")
    grep -E '^(FAIL|skip) ' "$log"
    [ "$f" -eq 0 ] || grep -E '^# KILLS_SEED' "$log"
    printf '  %-4s  %-16s %3d checks, %d s\n' "$([ "$f" -eq 0 ] && echo ok || echo FAIL)" "$name" $((p + f)) $((SECONDS - began))
}
# What a script that was itself killed has left: processes named by its directory.
end_leftovers() {
    local p comm words
    for p in /proc/[0-9]*; do
        { read -r comm <"$p/comm" && mapfile -d '' -t words <"$p/cmdline"; } 2>/dev/null || continue
        case "$comm ${words[*]}" in lg*"$E2E_TMP"*) kill -9 "${p#/proc/}" 2>/dev/null ;; esac
    done
}
run_e2e() {
    local s name
    export E2E_TMP E2E_REFERENCE
    E2E_TMP=$(mktemp -d /tmp/lgc.XXXXXX)
    E2E_REFERENCE=$E2E_TMP/ref
    mkdir -p "$E2E_REFERENCE" "$build/tests/e2e"
    trap 'end_leftovers; rm -rf "$E2E_TMP"' EXIT
    trap 'exit 1' INT TERM HUP
    for s in tests/e2e/*.sh; do
        name=$(basename "$s" .sh)
        [ "$name" != lib ] || continue
        case " ${E2E_ONLY:-$name} " in *" $name "*) ;; *) continue ;; esac
        script "$name" "$e2e_limit_s" "$s" "$build"
        end_leftovers
    done
    run_systemd
}
# Needs more of a machine than the other tests: skipped in one line where that is missing.
run_systemd() {
    case " ${E2E_ONLY:-systemd} " in *" systemd "*) ;; *) return ;; esac
    if [ "$(id -u)" -ne 0 ] || ! command -v systemd-nspawn >/dev/null; then
        echo "skip systemd -- needs root and systemd-nspawn (make check-systemd)"
    else
        script systemd "$e2e_limit_s" tests/systemd/run.sh "$build"
    fi
}
tsan_programs() {
    local n
    for n in $tsan_names; do [ -f "tests/unit/test_$n.c" ] && echo "$n"; done
}

began_all=$SECONDS
mkdir -p "$build"
built=0
case "$sections" in *" unit "* | *" layering "* | *" e2e "*)
    begin build
    make_in "$build" all example-data unit-programs e2e-programs chaos-programs micro-data
    built=$?
    end
    ;;
esac
if [ $built -eq 0 ]; then
    if wanted unit; then
        begin "unit tests"
        tests/run_unit.sh "$build"
        tally "$build" "unit tests"
        end
    fi
    if wanted layering; then
        begin layering
        mkdir -p "$build/tests/e2e"
        script layering 60 tests/layering.sh "$build"
        end
    fi
    if wanted e2e; then
        begin "end to end"
        run_e2e
        end
    fi
fi
if wanted asan; then
    begin "unit tests, address and undefined behaviour sanitizers"
    mkdir -p "$build-asan"
    if make_in "$build-asan" SAN=address OPT=-O1 unit-programs all; then
        # The leak checker crashes over thread-local memory of backends that were closed again.
        ASAN_OPTIONS="abort_on_error=1 intercept_tls_get_addr=0" UBSAN_OPTIONS=print_stacktrace=1 UNIT_LIMIT_S=900 tests/run_unit.sh "$build-asan"
        tally "$build-asan" "unit tests under asan"
        same_bits "$build" "$build-asan"
    fi
    end
fi
if wanted tsan; then
    begin "shared memory and messages, thread sanitizer"
    mkdir -p "$build-tsan"
    names=$(tsan_programs)
    # libzmq is not instrumented: what it does between its own threads looks like a race.
    if make_in "$build-tsan" SAN=thread OPT=-O1 $(printf "$build-tsan/tests/test_%s " $names); then
        TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1" UNIT_LIMIT_S=300 tests/run_unit.sh "$build-tsan" $names
        tally "$build-tsan" "unit tests under tsan"
    fi
    end
fi
if wanted fuzz; then
    begin "fuzzing, $fuzz_s s a parser"
    mkdir -p "$build-fuzz"
    if make_in "$build-fuzz" FUZZ_BUILD=1 CC=clang CXX=clang++ SAN=address OPT=-O1 WARN=-w CWARN=-w fuzz-programs; then
        FUZZ_SEED=1 tests/fuzz/run.sh "$build-fuzz" $fuzz_s "$jobs" >"$build-fuzz/check.log" 2>&1
        grep -vE '^  ok ' "$build-fuzz/check.log"
        p=$(grep -cE '^  ok ' "$build-fuzz/check.log") f=$(grep -cE '^  FAIL ' "$build-fuzz/check.log")
        passed=$((passed + p)) failed=$((failed + f))
        [ "$f" -eq 0 ] || failures+=("fuzzing: $f parsers, crashes in $build-fuzz/fuzz/crashes")
        [ "$p" -gt 0 ] || broken "fuzzing: nothing was run"
        echo "$p parsers passed, $f failed"
    fi
    end
fi
for f in ${failures[@]+"${failures[@]}"}; do echo "failed: $f"; done
echo "all sections: $((SECONDS - began_all)) s"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
