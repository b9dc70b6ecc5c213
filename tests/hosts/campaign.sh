#!/bin/bash
# Several hosts under fire: runs of the tiny pipeline on pretended hosts (hosts.sh, real sockets) in which processes of
# every role are killed, whole hosts lose their power and come back as new ones, the network is cut, both ways or one, and
# hosts that lead die. Each run must end by itself with the bytes of an undisturbed one: weights, average, moments, and the
# ledger of every host that was in it at the end.
#
#   campaign.sh [BUILD] [--kills N] [--deaths N] [--cuts N] [--leaders N] [--seed S] [--seconds S] [--out DIR]
#               [--shapes "NAME .."] [--steps N]
#
# Goes on until so many have fallen (500, 100, 50, 20), or --seconds have passed; an interrupted one goes on where it was. A
# line of DIR/records (default build/hosts) tells of each run, DIR/failed.N is one that did not end as it should. Exit code 1:
# there was one. README.md beside this file says more. As root, or within `unshare -Ur --mount --pid --fork --mount-proc`.
build=build kills=500 deaths=100 cuts=50 leaders=20 seed=1 seconds=1000000 out= steps=1500 shapes="two ranks three most pair"
[ $# -eq 0 ] || [ "${1#--}" != "$1" ] || { build=$1 && shift; }
while [ $# -ge 2 ]; do
    case $1 in
    --kills) kills=$2 ;; --deaths) deaths=$2 ;; --cuts) cuts=$2 ;; --leaders) leaders=$2 ;; --seed) seed=$2 ;;
    --seconds) seconds=$2 ;; --out) out=$2 ;; --shapes) shapes=$2 ;; --steps) steps=$2 ;;
    *) break ;;
    esac
    shift 2
done
[ $# -eq 0 ] || { sed -n '7,8p' "$0" && exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
set -- "$build"
. "$root/tests/e2e/lib.sh"
. "$root/tests/e2e/hosts_lib.sh"
out=$(realpath -m "${out:-$e2e_build/hosts}")
mkdir -p "$out" && records=$out/records || exit 1
agents=()
campaign_cleanup() {
    kill "${agents[@]}" 2>/dev/null
    hosts_cleanup
}
trap campaign_cleanup EXIT
export SILENCE_MS=${SILENCE_MS:-1000}
roles=(loader text vae trainer ema ckpt exchange keeper lgsup)
STUCK_S=90 CALM_STEPS=200

# What is drawn by name: hosts, spares, ranks of each, who decides who goes on.
shape_of() {
    case $1 in
    two) shape=(2 1 1 shared) ;;
    ranks) shape=(2 1 2 shared) ;;
    three) shape=(3 1 1 shared) ;;
    most) shape=(3 1 1 most) ;; # more than half of the last epoch's
    pair) shape=(2 0 1 most) ;; # none can go on alone: whoever is cut off waits
    *) echo "no shape $1" && exit 2 ;;
    esac
}
shape_keys() {
    keys=(--set "trainer.ranks=${shape[2]}" --set "trainer.global_batch_size=$((4 * shape[0]))"
        --set "trainer.micro_batch_size=$((4 / shape[2]))" --set "trainer.max_steps=$steps" --set checkpoint.every=100
        --set checkpoint.keep=3 --set supervisor.restarts_max=50)
    [ "${shape[3]}" != shared ] || keys+=(--set "hosts.shared=$T/$run/shared")
}
now_ms() { echo $((${EPOCHREALTIME/./} / 1000)); }
best_step() { # of all hosts
    local i s best=0
    for ((i = 0; i < hosts_n; i++)); do
        s=$(step_of "$T/$run/$i")
        [ "$s" -le "$best" ] || best=$s
    done
    echo "$best"
}
tell() { echo "$(now_ms) step $(best_step) $*" >>"$T/$run/events"; }

# ---- machines ----

# Starts lgsup on machine I again and again, as a service manager would, until it ends in order.
agent() {
    local i=$1 code
    while [ -d "$T/$run" ] && [ ! -e "$T/$run/over" ]; do
        while [ -e "$T/$run/off.$i" ]; do sleep 0.05; done
        on "$i" "$LGSUP" start "$TINY" --set "job.dir=$T/$run/$i" "${hosts_keys[@]}" "${keys[@]}" \
            >>"$T/$run/$i.out" 2>&1 </dev/null
        code=$?
        echo "$(now_ms) lgsup of machine $i has ended with $code" >>"$T/$run/events"
        [ $code -eq 0 ] && echo "$i" >>"$T/$run/ended" && break
        sleep 0.1
    done
}
start_all() { # NAME OF A RUN
    local i
    run=$1
    shape_keys
    places "${shape[0]}" "${shape[1]}"
    rm -rf "${T:?}/$run" && mkdir -p "$T/$run" && : >"$T/$run/ended" || exit 1
    agents=()
    for ((i = 0; i < hosts_n; i++)); do
        agent $i &
        agents+=($!)
    done
}
ended() { wc -l <"$T/$run/ended"; }
all_ended() { [ "$(ended)" -ge "${shape[0]}" ]; }
# Those that were not in it at the end may not know of it.
end_all() {
    local i pid
    wait_until "$1" all_ended || return 1
    wait_until 5 eval '[ "$(ended)" -eq "$hosts_n" ]'
    touch "$T/$run/over"
    for ((i = 0; i < hosts_n; i++)); do
        rm -f "$T/$run/off.$i"
        for pid in $(e2e_pids "$T/$run/$i"); do kill -9 "$pid" 2>/dev/null; done
    done
    wait "${agents[@]}"
}
power_off() {
    touch "$T/$run/off.$1"
    "$HOSTS" off "$1"
}
power_on() {
    [ -e "$T/$run/off.$1" ] || return 0
    "$HOSTS" on "$1"
    [ $((RANDOM % 2)) -eq 0 ] || rm -rf "${T:?}/$run/$1" # another machine, with empty disks
    rm -f "$T/$run/off.$1"
    tell "machine $1 is on"
}

# ---- who is what ----

# Numbers of hosts are not those of machines: what each lgsup has said last.
said_last() { grep -o "$2" "$T/$run/$1.out" 2>/dev/null | tail -n 1; }
members() { # machines that train
    local i
    for ((i = 0; i < hosts_n; i++)); do
        [ -e "$T/$run/off.$i" ] || [ -z "$(e2e_pids "$T/$run/$i" | sed -n 2p)" ] || echo $i
    done
}
leader() { # its machine
    local i number of
    for i in $(members); do
        of=$(said_last "$i" 'host [0-9]* leads')
        number=$(said_last "$i" '^host [0-9]* of [0-9]*')
        number=${number#host }
        [ "${number%% *}" != "$(echo "$of" | tr -dc 0-9)" ] || { echo "$i" && return; }
    done
}
spare_waits() {
    local i
    for ((i = 0; i < hosts_n; i++)); do
        [ -e "$T/$run/off.$i" ] || [[ $(tail -n 1 "$T/$run/$i.out" 2>/dev/null) != *"waits until one is"* ]] || return 0
    done
    return 1
}
pick() { # one of the words
    local w=("$@")
    [ $# -eq 0 ] || echo "${w[RANDOM % $#]}"
}

# ---- what falls ----

goes_on() { [ "$(best_step)" -ge $(($1 + 3)) ]; }
over_it() { wait_until $STUCK_S eval "goes_on $1 || all_ended"; }
kill_one() {
    local i pid comm candidates=() role
    i=$(pick $(members))
    [ -n "$i" ] || return 1
    role=$(pick "${roles[@]}")
    for pid in $(e2e_pids "$T/$run/$i"); do
        { read -r comm <"/proc/$pid/comm"; } 2>/dev/null || continue
        [ "$comm" != "lg-$role" ] && [ "$comm" != "$role" ] || candidates+=("$pid")
    done
    pid=$(pick "${candidates[@]}")
    [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null || return 1
    tell "killed $role of machine $i"
    fallen_kills=$((fallen_kills + 1))
    by_role[$role]=$((${by_role[$role]:-0} + 1))
}
lose() { # MACHINE: power; says how long it took when a spare waited
    local i=$1 at began ready=0
    spare_waits && ready=1
    began=$(now_ms)
    power_off "$i"
    at=$(best_step)
    tell "machine $i has lost its power"
    [ "${shape[3]}" = shared ] || [ $ready = 1 ] || power_on "$i"
    sleep "0.$((RANDOM % 10))"
    [ $((RANDOM % 3)) -eq 0 ] && [ $ready = 0 ] && power_on "$i"
    [ $ready = 1 ] || { sleep $((RANDOM % 3)) && power_on "$i"; }
    over_it "$at" || return 1
    [ $ready = 0 ] || all_ended || times+=($(($(now_ms) - began)))
    power_on "$i"
}
cut_some() {
    local i j how=$((RANDOM % 4)) at
    i=$((RANDOM % hosts_n)) j=$(((i + 1 + RANDOM % (hosts_n - 1)) % hosts_n))
    case $how in
    0) "$HOSTS" cut $i ;;
    1) "$HOSTS" cut $i $j ;;
    *) "$HOSTS" cut1 $i $j ;;
    esac
    at=$(best_step)
    tell "cut, way $how: machines $i $j"
    sleep "$((RANDOM % 4)).$((RANDOM % 10))"
    [ $((RANDOM % 3)) -ne 0 ] || kill_one
    "$HOSTS" heal
    tell "healed"
    fallen_cuts=$((fallen_cuts + 1))
    over_it "$at"
}
# One of those that are still to fall, the oftener the more of it is left.
draw() {
    local left=($((kills - all_kills - fallen_kills)) $((deaths - all_deaths - fallen_deaths))
        $((cuts - all_cuts - fallen_cuts)) $((leaders - all_leaders - fallen_leaders))) sum=0 i x
    [ "${shape[1]}" -gt 0 ] || left[1]=0 left[3]=0
    for i in 0 1 2 3; do
        [ ${left[i]} -gt 0 ] || left[i]=0
        sum=$((sum + left[i]))
    done
    [ $sum -gt 0 ] || { what=nothing && return; }
    x=$(((RANDOM * 32768 + RANDOM) % sum))
    for i in 0 1 2 3; do
        [ $x -ge ${left[i]} ] || break
        x=$((x - left[i]))
    done
    what=$i
}
fall() {
    local i at
    at=$(best_step)
    draw
    case $what in
    nothing) return 2 ;;
    0)
        kill_one || return 0
        [ $((RANDOM % 6)) -eq 0 ] && kill_one
        over_it "$at"
        ;;
    1)
        [ $((RANDOM % 4)) -eq 0 ] || wait_until 10 spare_waits
        i=$(pick $(members))
        [ -n "$i" ] || return 0
        fallen_deaths=$((fallen_deaths + 1))
        lose "$i"
        ;;
    2) cut_some ;;
    3)
        [ $((RANDOM % 4)) -eq 0 ] || wait_until 10 spare_waits
        i=$(leader)
        [ -n "$i" ] || return 0
        fallen_leaders=$((fallen_leaders + 1)) fallen_deaths=$((fallen_deaths + 1))
        lose "$i"
        ;;
    esac
}

# ---- a run ----

same_ledgers() {
    local i n=0
    for ((i = 0; i < hosts_n; i++)); do cmp -s "$reference/ledger" "$T/$run/$i/ledger" && n=$((n + 1)); done
    [ $n -ge "${shape[0]}" ] || { echo "only $n hosts have the undisturbed run's ledger" && return 1; }
}
same_checkpoints() {
    local i n=0
    for ((i = 0; i < hosts_n; i++)); do
        [ -d "$(checkpoint_of "$T/$run/$i" "$steps")" ] || continue
        n=$((n + 1))
        same_files "$reference" "$T/$run/$i" "$steps" || return 1
    done
    [ $n -gt 0 ] || { echo "no host has the checkpoint of step $steps" && return 1; }
}
# Nothing dies but by our hand: an abort heals, too, and would not be seen.
no_crashes() {
    local died
    died=$(cat "$T/$run"/[0-9].out | grep -o '[a-z]*\.*[0-9]*: signal [0-9]* ([A-Za-z ]*)' | grep -v 'signal 9 ' | sort | uniq -c)
    [ -z "$died" ] || { echo "$died" && return 1; }
}
undisturbed_of() {
    local i
    reference=$out/undisturbed.${shape[0]}.${shape[2]}.$steps
    [ ! -e "$reference/done" ] || return 0
    start_all plain
    end_all 1200 || { echo "an undisturbed run does not end" && exit 1; }
    for ((i = 0; i < shape[0]; i++)); do [ ! -d "$(checkpoint_of "$T/plain/$i" "$steps")" ] || break; done
    [ "$(stat -c %s "$T/plain/$i/ledger")" = $((64 * steps)) ] || { echo "a ledger of $steps steps" && exit 1; }
    timeout 300 "$LGSUP" verify "$T/plain/$i" >/dev/null || { echo "verify" && exit 1; }
    rm -rf "$reference" && mkdir -p "$reference/checkpoints" && cp -r "$T/plain/$i/checkpoints/tiny_step$steps" \
        "$reference/checkpoints" && cp "$T/plain/$i/ledger" "$reference" && touch "$reference/done"
}
disturbed() { # NUMBER SHAPE: $verdict
    local began=$SECONDS code i
    verdict=good fallen_kills=0 fallen_deaths=0 fallen_cuts=0 fallen_leaders=0 times=()
    declare -gA by_role=()
    start_all "n$1"
    wait_until 120 eval '[ "$(best_step)" -ge 5 ]' || verdict="does not begin"
    while [ "$verdict" = good ] && [ "$(best_step)" -lt $((steps - CALM_STEPS)) ] && ! all_ended; do
        sleep "0.0$((RANDOM % 10))"
        fall
        code=$?
        [ $code -ne 2 ] || break
        [ $code -eq 0 ] || verdict="stuck"
    done
    "$HOSTS" heal
    for ((i = 0; i < hosts_n; i++)); do power_on $i; done
    [ "$verdict" != good ] || end_all 600 || verdict="does not end"
    [ "$verdict" != good ] || verdict=$(same_ledgers && same_checkpoints && no_crashes && echo good)
    [ "$verdict" = good ] || keep_failed "$1"
    all_kills=$((all_kills + fallen_kills)) all_deaths=$((all_deaths + fallen_deaths))
    all_cuts=$((all_cuts + fallen_cuts)) all_leaders=$((all_leaders + fallen_leaders))
    printf 'run %s seed %s shape %s kills %d deaths %d cuts %d leaders %d s %d times %s roles %s: %s\n' "$1" "$seed" "$2" \
        $fallen_kills $fallen_deaths $fallen_cuts $fallen_leaders $((SECONDS - began)) \
        "$(IFS=, && echo "${times[*]:--}")" "$(for i in "${!by_role[@]}"; do printf '%s=%d,' "$i" "${by_role[$i]}"; done)" \
        "${verdict//$'\n'/ }" | tee -a "$records"
    rm -rf "${T:?}/$run"
}
keep_failed() { # NUMBER: and ends what is left of it
    local i pid
    failures=$((failures + 1))
    touch "$T/$run/over"
    for ((i = 0; i < hosts_n; i++)); do
        on $i "$LGSUP" status "$T/$run/$i" >"$T/$run/$i.status" 2>&1
        on $i "$LGSUP" hosts "$T/$run/$i" >>"$T/$run/$i.status" 2>&1
        for pid in $(e2e_pids "$T/$run/$i"); do kill -9 "$pid" 2>/dev/null; done
    done
    rm -f "$T/$run"/off.*
    wait "${agents[@]}"
    rm -rf "$out/failed.$1" && cp -r "$T/$run" "$out/failed.$1"
}

# runs, kills, deaths, leaders, cuts, bad ones of all records
totals() {
    awk '{ runs++; for (i = 1; i < NF; i++) n[$i] += $(i + 1); bad += $NF != "good" }
        END { print runs + 0, n["kills"] + 0, n["deaths"] + 0, n["leaders"] + 0, n["cuts"] + 0, bad + 0 }' "$records"
}
: >>"$records"
read -r number all_kills all_deaths all_leaders all_cuts failures < <(totals)
end=$((SECONDS + seconds))
names=($shapes)
while [ $SECONDS -lt $end ]; do
    [ "$all_kills" -lt "$kills" ] || [ "$all_deaths" -lt "$deaths" ] || [ "$all_cuts" -lt "$cuts" ] ||
        [ "$all_leaders" -lt "$leaders" ] || break
    number=$((number + 1))
    name=${names[number % ${#names[@]}]}
    RANDOM=$(((seed * 1000 + number) % 32768))
    shape_of "$name"
    undisturbed_of
    disturbed $number "$name"
done
"$HOSTS" down
read -r number all_kills all_deaths all_leaders all_cuts failures < <(totals)
echo "$number runs: $all_kills of $kills processes killed, $all_deaths of $deaths hosts dead ($all_leaders of $leaders that led)," \
    "$all_cuts of $cuts cuts; $failures runs not as they should be"
grep -o 'times [0-9,]*' "$records" | tr -dc '0-9,\n' | tr , '\n' | sort -n | awk 'NF { t[n++] = $1 }
    END { if (n) printf "from a death to the next steps, a spare waiting: %d deaths, p50 %d ms, longest %d ms\n", n,
              t[int(n / 2)], t[n - 1] }'
[ "$failures" -eq 0 ]
