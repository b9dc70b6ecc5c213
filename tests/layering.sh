#!/bin/bash
# The walls of the house (docs/design.md): which folder may include which, no cycles, no CUDA outside
# its backend, programs that link neither CUDA nor oneDNN, and bugs to plant that can be planted. Prints "ok NAME" or "FAIL NAME reason".
#
# usage: tests/layering.sh BUILD
set -u
build=${1:?usage: tests/layering.sh BUILD}
build=$(cd "$build" && pwd) || exit 1
cd "$(dirname "$0")/.." || exit 1
failed=0
ok() { echo "ok layering: $1"; }
fail() {
    echo "FAIL layering: $1 -- $(printf '%s' "$2" | head -5 | tr '\n' ';')"
    failed=1
}
verdict() { if [ -z "$2" ]; then ok "$1"; else fail "$1" "$2"; fi; }

# Source files by suffix, without a version control system's help: a release is checked the same way.
sources() { # SUFFIX...
    local names=() suffix
    for suffix; do names+=(-o -name "*.$suffix"); done
    find base config shm bus kernels stages supervisor tests Makefile examples -type f \
        \( "${names[@]:1}" \) | sort
}
search() { # PATTERN SUFFIX...
    local pattern=$1
    shift
    sources "$@" | xargs grep -nE -- "$pattern"
}

# "FILE INCLUDED" of every include by path. kernels/<backend>/ and the rooms supervisor/<room>/ count
# as folders of their own.
includes() {
    sources c h cpp cu cuh def | while read -r f; do
        [ -f "$f" ] && sed -n "s|^ *# *include *\"\([^\"]*\)\".*|$f \1|p" "$f"
    done
}
folder_of() { # of a path: base, config, shm, bus, kernels, kernels/host, stages, supervisor/core, tests
    awk '{ for (i = 1; i <= 2; i++) { n = split($i, p, "/"); d = p[1]
             if ((d == "kernels" || d == "supervisor") && n > 2) d = d "/" p[2]
             printf "%s ", (n > 1 ? d : ".") } print $1, $2 }'
}
# What each folder may include, besides itself.
allowed() {
    case $1 in
    base) echo ;;
    config | shm) echo base config shm ;; # no cycle between the two: below
    bus) echo base config shm ;;
    kernels) echo base ;;
    kernels/*) echo base kernels ;;
    stages) echo base config shm bus kernels kernels/graph ;;
    supervisor/run) echo base config shm bus ;;
    supervisor/views | supervisor/launch | supervisor/hosts) echo base config shm bus supervisor/run ;;
    supervisor/core) echo base config shm bus supervisor/run supervisor/views supervisor/launch supervisor/hosts ;;
    supervisor/commands) echo base config shm bus supervisor/run supervisor/views supervisor/launch supervisor/hosts supervisor/core ;;
    supervisor) echo base shm supervisor/commands ;; # the programs' main files
    tests) echo base config shm bus kernels kernels/graph kernels/host kernels/ref64 kernels/cuda stages \
        supervisor/run supervisor/views supervisor/launch supervisor/hosts supervisor/core supervisor/commands ;;
    *) echo ;;
    esac
}
all=$(includes)
[ "$(printf '%s\n' "$all" | wc -l)" -gt 100 ] || fail "the includes are found" "only $(printf '%s\n' "$all" | wc -l)"
pairs=$(printf '%s\n' "$all" | folder_of)
bad=$(printf '%s\n' "$pairs" | while read -r from to file included; do
    [ "$from" = "$to" ] && continue
    case " $(allowed "$from") " in *" $to "*) ;; *) echo "$file includes $included" ;; esac
done)
verdict "a folder includes only what lies below it" "$bad"
verdict "supervisor never includes kernels or stages" "$(printf '%s\n' "$pairs" | awk '$1 ~ /^supervisor/ && ($2 ~ /^kernels/ || $2 == "stages")')"
bad=$(printf '%s\n' "$all" | while read -r file included; do
    [ -e "$included" ] || [ -e "$build/gen/$included" ] || echo "$file includes $included"
done)
verdict "a file includes by its path from the root" "$bad"
edges=$(printf '%s\n' "$pairs" | awk '$1 != $2 && $1 != "tests" {print $1, $2}' | sort -u)
verdict "no cycles between folders" "$(printf '%s\n' "$edges" | tsort 2>&1 >/dev/null)"
headers=$(printf '%s\n' "$all" | awk '$1 ~ /\.h$/ && $1 != $2')
verdict "no cycles between headers" "$(printf '%s\n' "$headers" | tsort 2>&1 >/dev/null)"

# Else the bug is planted nowhere, or elsewhere, which is seen only when all are planted (hours).
bad=$(awk '/^== / { name = substr($0, 4); line = 0; next } /^#/ { next } { line++ }
           line == 1 { file = $0 } line == 2 { print name "\t" file "\t" substr($0, 2) }' tests/mutants/mutants.txt |
    while IFS=$'\t' read -r name file old; do
        [ "$(grep -cxF -- "$old" "$file" 2>/dev/null)" = 1 ] || echo "$name: not one line of $file"
    done)
verdict "a planted bug replaces one line" "$bad"

verdict "no conditional compilation for CUDA" "$(search '^ *# *if.*CUDA' c h cpp def)"
# Nor outside the stand-in for them.
verdict "no CUDA header outside kernels/cuda" "$(search '^ *# *include *<(cuda|cublas|cudnn|nccl)' c h cpp | grep -vE '^(kernels/cuda/|tests/stub/cudart\.c)')"
verdict "oneDNN is known to one file" "$(search '^ *# *include *["<](oneapi/dnnl|dnnl)' c h cpp | grep -v '^kernels/host/onednn\.c:')"
verdict "no -march=native" "$(search 'march=native' mk | cat - <(grep -n 'march=native' Makefile) | grep -v '#.*march=native')"
bad=$(for p in "$build"/bin/*; do
    ldd "$p" 2>/dev/null | grep -Eio 'lib(cuda|cublas|cudnn|nccl|dnnl)[^ ]*' | sed "s|^|${p##*/} |"
done)
if ls "$build"/bin/lg* >/dev/null 2>&1; then verdict "no program links CUDA or oneDNN" "$bad"; else fail "no program links CUDA or oneDNN" "no programs in $build/bin"; fi
for role in loader text vae trainer ema ckpt; do
    [ -x "$build/bin/lg-$role" ] || fail "every role is a program of its own" "no $build/bin/lg-$role"
done
[ $failed -eq 0 ]
