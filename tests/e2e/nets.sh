#!/bin/bash
# Random pipelines of every net, each run twice: with other instances, other cuts of the state and other processes killed the bytes are
# the same (tests/chaos/nets.py). On the host, and on a stand-in for two GPUs. `make check-all` has more of them, from fresh seeds.
. "$(dirname "$0")/lib.sh"
command -v python3 >/dev/null || { skip "all" "no python3"; exit 0; }
runs=16 seed=1
in_all && runs=60 seed=${LG_SEEDS:-1}
same() { # NAME [option ...]
    local what=$1 line
    shift
    python3 "$e2e_root/tests/chaos/nets.py" --build "$e2e_build" --home "$T/nets" --seed "$seed" --runs $runs "$@" >"$T/said" 2>&1
    line=$(tail -n 1 "$T/said")
    if grep -Eq '^([0-9]+ refused, )?[0-9]+ same; [0-9]+ killed, [0-9]+ orders obeyed$' <<<"$line"; then
        ok "$what: $line"
    else
        fail "$what" "$(grep -v refused "$T/said" | head -n 3 | tr '\n' ' ') (again: nets.py --seed THAT --runs 1 $*)"
    fi
}
same "on the host"
same "on a stand-in for GPUs" --stand-in
