#!/bin/bash
# Every test. Called by `make check` and `make check-all`, after `make deps`, as:
#     tests/check.sh BUILD [JOBS]
#
# Builds, then runs on JOBS + 1 slots (some tests wait more than they work), the longest first
# (tests/runner.sh): the unit tests, the layering, the end-to-end scripts, under AddressSanitizer and UBSan
# (BUILD-asan) the unit tests that handle pointers and bytes from outside, under ThreadSanitizer (BUILD-tsan)
# those of shared memory and messages. Simulations run a fixed number of seeds, the fuzz targets replay their
# corpora. Each section says the seconds that passed and those of CPU; the last line is "N passed, N failed".
#
# CHECK_ALL=1 (`make check-all`) runs more: every unit test under the first two sanitizers, whose host backend
# (of all instruction sets then) must compute the same bits; all modes with all others where `make check` takes each once; simulations from a
# fresh seed for a time; new inputs for every parser of untrusted bytes (BUILD-fuzz, clang, FUZZ_S seconds each,
# 2); a run under a real systemd where this machine can.
#
# CHECK_ONLY="unit layering e2e asan tsan fuzz systemd" picks sections, E2E_ONLY="kills cli" end-to-end scripts.
set -u
build=${1:?usage: tests/check.sh BUILD [JOBS]}
jobs=${2:-$(nproc)}
cd "$(dirname "$0")/.." || exit 1
everything=${CHECK_ALL:-}
sections=" ${CHECK_ONLY:-unit layering e2e asan tsan${everything:+ fuzz systemd}} "
passed=0 failed=0 failures=()
# Tests whose threads or processes share memory.
tsan_names="board bus commit keeper region turns window window_threads"
# The simulation of the protocol has one thread, in which nothing can race: AddressSanitizer watches it.
[ -z "$everything" ] || tsan_names+=" sim_protocol"
# What only those of tsan_names are made of.
tsan_library="base config shm bus"
tsan_shared=$(echo tests/unit/{scratch,seeds,shm_fixture,sim,sim_scatter,sim_sequence,sim_stages}.c)
# What AddressSanitizer watches only in check-all:
# tests that compute: finite differences, golden values, numbers against bounds, the same bits in all modes;
computing="adapter autoencoder batch denoiser_events denoiser_fd denoiser_golden denoiser_host denoiser_recompute
    denoiser_shapes draw encode frozen gradients host lent long moments objective offload ops_fd ops_host ops_ref rounding
    sampler sequence storage"
# whole runs of processes, whose code sim_supervisor, faults_supervise, supervise and orders go through as well;
running="former sigkill sockets supervise_adopt supervise_blocked supervise_deaths supervise_views units_run"
# words in shared memory, of which ThreadSanitizer watches every access, and what the disk does in power cuts, whose
# writers ckpt and faults go through.
atomics="sim_disk turns"

# The host backend's instruction set that runs take here: AddressSanitizer watches that alone, in check-all all three.
best_isa() {
    local flags f
    flags=" $(sed -n 's/^flags[^:]*: //p;T;q' /proc/cpuinfo) "
    case $flags in *" avx2 "*) ;; *) echo sse2 && return ;; esac
    for f in fma avx512f avx512bw avx512dq avx512vl; do
        case $flags in *" $f "*) ;; *) [ $f = fma ] && echo sse2 || echo avx2; return ;; esac
    done
    echo avx512
}
# Seconds of CPU of all that has been waited for: what this costs also where others use the machine.
cpu_s() { awk '{ printf "%d", ($16 + $17) / 100 }' /proc/$$/stat; }
begin() { section=$1 began=$SECONDS began_cpu=$(cpu_s); echo "== $section"; }
end() { echo "== $section: $((SECONDS - began)) s, $(($(cpu_s) - began_cpu)) s of CPU"; }
wanted() { case "$sections" in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
broken() { failed=$((failed + 1)); failures+=("$1"); echo "FAIL $1"; }

make_in() { # BUILD TARGET... [VARIABLE=...]
    local dir=$1
    shift
    mkdir -p "$dir"
    env -u MAKEFLAGS -u MAKELEVEL make -s -j"$jobs" BUILD="$dir" "$@" >"$dir/build.log" 2>&1 || {
        grep -E 'error|Error|undefined|\*\*\*' "$dir/build.log" | head -20
        broken "build of $dir (all of it: $dir/build.log)"
        return 1
    }
}
# Names of the unit tests, but for those in the list $1.
unit_names() {
    local f n
    for f in tests/unit/test_*.c; do
        n=${f##*/test_} n=${n%.c}
        case " $1 " in *" $n "*) ;; *) echo "$n" ;; esac
    done
}
# list KIND BUILD NAME...: lines of a list for tests/runner.sh
list() {
    local kind=$1 in=$2 name
    shift 2
    for name; do echo "$kind $in $name"; done
}
e2e_names() {
    local s name
    for s in tests/e2e/*.sh; do
        name=$(basename "$s" .sh)
        case $name in lib | *_lib) continue ;; esac
        case " ${E2E_ONLY:-$name} " in *" $name "*) echo "$name" ;; esac
    done
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

# ---- builds ----
began_all=$SECONDS
tests=() # lines for tests/runner.sh
begin "builds"
case "$sections" in *" unit "* | *" layering "* | *" e2e "* | *" systemd "*)
    if make_in "$build" all example-data unit-programs e2e-programs chaos-programs micro-data; then
        wanted unit && tests+=("$(list unit "$build" $(unit_names ""))")
        wanted layering && tests+=("$(list script "$build" layering)")
        wanted e2e && tests+=("$(list script "$build" $(e2e_names))")
    fi
    ;;
esac
if wanted asan; then
    names=$(unit_names "$([ -n "$everything" ] || echo $computing $running $atomics)")
    isas=()
    [ -n "$everything" ] || isas=(ISAS="$(best_isa)")
    # Kernels take five times as long to compile when they are optimized, and no bit depends on it.
    if make_in "$build-asan" SAN=address OPT=-O1 KFLAGS="-O1 -fopenmp" ${isas[@]+"${isas[@]}"} all $(printf "$build-asan/tests/test_%s " $names); then
        tests+=("$(list unit "$build-asan" $names)")
    fi
fi
if wanted tsan; then
    # libzmq is not instrumented: what it does between its own threads looks like a race.
    if make_in "$build-tsan" SAN=thread OPT=-O1 LIB_DIRS="$tsan_library" TEST_LIB_SRC="$tsan_shared" $(printf "$build-tsan/tests/test_%s " $tsan_names); then
        tests+=("$(list unit "$build-tsan" $tsan_names)")
    fi
fi
end

# ---- tests ----
results=$build/results
rm -rf "$results"
if [ ${#tests[@]} -gt 0 ]; then
    slots=$((jobs + 1))
    begin "tests, $slots at a time"
    E2E_REFERENCE=$(mktemp -d /tmp/lgr.XXXXXX) || exit 1
    export E2E_REFERENCE
    trap 'rm -rf "$E2E_REFERENCE"' EXIT
    trap 'exit 1' INT TERM HUP
    [ -z "$everything" ] || export LG_SEEDS=${LG_SEEDS:-$((SECONDS + $$ + RANDOM * 32768))}
    [ -z "$everything" ] || echo "# LG_SEEDS=$LG_SEEDS"
    # The leak checker crashes over thread-local memory of backends that were closed again.
    export ASAN_OPTIONS="abort_on_error=1 intercept_tls_get_addr=0" UBSAN_OPTIONS=print_stacktrace=1
    export TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1"
    printf '%s\n' "${tests[@]}" | UNIT_LIMIT_S=900 tests/runner.sh "$slots" "$results"
    while read -r p f _; do passed=$((passed + p)) failed=$((failed + f)); done < <(cat "$results"/*.*.*)
    [ ! -s "$results/failed" ] || failures+=("$(cat "$results/failed")")
    got=$(ls "$results"/*.*.* 2>/dev/null | wc -l) asked=$(printf '%s\n' "${tests[@]}" | wc -l)
    [ "$got" -eq "$asked" ] || broken "$asked tests were to run, $got did"
    [ -z "$everything" ] || same_bits "$build" "$build-asan"
    end
fi
if wanted systemd; then
    begin "a run under systemd"
    if [ "$(id -u)" -ne 0 ] || ! command -v systemd-nspawn >/dev/null; then
        echo "skip systemd -- needs root and systemd-nspawn (make check-systemd)"
    else
        tests/runner.sh 1 "$results/systemd" <<<"script $build systemd/run"
        read -r p f _ < <(cat "$results"/systemd/script.*)
        passed=$((passed + p)) failed=$((failed + f))
        [ "$f" -eq 0 ] || failures+=("$(cat "$results/systemd/failed")")
    fi
    end
fi
if wanted fuzz; then
    begin "fuzzing, ${FUZZ_S:-2} s a parser"
    if make_in "$build-fuzz" FUZZ_BUILD=1 CC=clang CXX=clang++ SAN=address OPT=-O1 WARN=-w CWARN=-w fuzz-programs; then
        FUZZ_SEED=${FUZZ_SEED:-0} tests/fuzz/run.sh "$build-fuzz" "${FUZZ_S:-2}" "$jobs" >"$build-fuzz/check.log" 2>&1
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
echo "all sections: $((SECONDS - began_all)) s, $(cpu_s) s of CPU"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
