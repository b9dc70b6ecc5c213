#!/bin/bash
# A run of several hosts is shown and steered whole from any of them.
. "$(dirname "$0")/lib.sh"
. "$(dirname "$0")/hosts_lib.sh"
lgsup() { # HOST COMMAND ...: in its folder
    local i=$1
    shift
    on "$i" timeout 60 "$LGSUP" "$@"
}
D=$T/seen
whole() { lgsup "$1" status --json "$D/$1" 2>/dev/null; } # HOST
whole_is() { whole "$1" | jq -e "$2" >/dev/null; }        # HOST FILTER

places 2 1 --set "hosts.shared=$T/shared"
hosts_start seen
check "it runs" wait_step "$D/0" 5 300
check "on both hosts" wait_step "$D/1" 5 300

# status, from either host, of all; a machine to spare says that it waits.
for i in 0 1; do
    check "status from host $i has both" wait_until 20 whole_is $i \
        '[.hosts[].status | select(. != null) | select(.state == "running" and .step > 0)] | length == 2'
    check "and says which is which" whole_is $i \
        ".hosts[0].host == 0 and .hosts[0].leads and .hosts[1].host == 1 and .hosts[$i].this and (.hosts[1 - $i].this | not)"
    check "and the processes of each are its own" whole_is $i \
        '[.hosts[0, 1].status.instances[] | select(.role == "trainer") | .pid] | length == 2'
done
# The fields of the whole answer, of each host and of each status in it: those of the schema, no more and no less.
documented='(.required + ["hosts"] | sort), (.properties.hosts.items.required | sort), (.required | sort)'
printed='keys, ([.hosts[] | keys] | unique | .[]), ([.hosts[].status | values | keys] | unique | .[])'
schema=$e2e_root/docs/status.schema.json
for i in 0 1; do
    expect "status --json from host $i: the documented fields" "$(jq -c "$documented" "$schema")" "$(whole $i | jq -c "$printed")"
    expect "--host $i: those of a host" "$(jq -c '.required | sort' "$schema")" \
        "$(lgsup 1 status --json --host $i "$D/1" | jq -c keys)"
done
check "the spare waits" whole_is 1 '.hosts[2] | .host == null and .answers and (.why | test("waits")) and .status == null'
lgsup 1 status "$D/1" >"$T/status.txt"
expect "status as text has a part for each machine" 3 "$(grep -c '^== ' "$T/status.txt")"
check "with both trainers" test "$(grep -c '^trainer\.0' "$T/status.txt")" = 2
expect "--host picks one" 0 "$(lgsup 1 status --host 0 "$D/1" | grep -c 'this one')"
check "--host --json is that host's status" test \
    "$(lgsup 1 status --json --host 0 "$D/1" | jq '.instances[] | select(.role == "trainer") | .pid')" = \
    "$(lgsup 0 status --json "$D/0" | jq '.instances[] | select(.role == "trainer") | .pid')"
lgsup 1 status --host 2 "$D/1" >"$T/none.txt" 2>&1
expect "there is no host 2" 2 $?

# top: a frame of each.
lgsup 0 top --once "$D/0" >"$T/top.txt"
check "top has both trainers" test "$(grep -c '^trainer\.0' "$T/top.txt")" = 2
check "and rates of the other, too" test "$(grep '^trainer\.0' "$T/top.txt" | awk '$5 > 0' | wc -l)" = 2

# logs: of all, by time, with a column; what one says is made printable on the way.
printf '2000-01-01T00:00:00.000Z made up \033[31mred\n' >>"$D/1/logs/vae.0.log"
lgsup 0 logs vae "$D/0" >"$T/logs.txt"
check "logs of both hosts" test "$(awk '{print $1 $2}' "$T/logs.txt" | sort -u | tr '\n' ' ')" = "host0 host1 "
check "by time" grep -q 'made up' <(head -n 1 "$T/logs.txt")
check "without control characters" grep -qF 'made up \x1b[31mred' "$T/logs.txt"
check "each line once" test "$(grep -c '^host 1 ' "$T/logs.txt")" = "$(wc -l <"$D/1/logs/vae.0.log")"
seq -f '2001-01-01T00:00:00.000Z line %06.0f of a file that is longer than an answer may be' 30000 >"$D/1/logs/ema.7.log"
expect "more than an answer holds comes in several" "$(md5sum <"$D/1/logs/ema.7.log")" \
    "$(lgsup 0 logs --host 1 ema.7 "$D/0" | sed 's/^host 1  //' | md5sum)"
rm "$D/1/logs/ema.7.log"
on 0 timeout 60 "$LGSUP" logs -f loader "$D/0" >"$T/follow.txt" 2>&1 &
follower=$!
wait_until 20 grep -q '^host 1' "$T/follow.txt"
echo '2001-01-01T00:00:00.000Z comes later' >>"$D/1/logs/loader.0.log"
check "logs -f goes on with other hosts" wait_until 20 grep -q '^host 1.*comes later' "$T/follow.txt"
expect "and says it once" 1 "$(grep -c 'comes later' "$T/follow.txt")"
kill $follower 2>/dev/null
wait $follower 2>/dev/null

# scale and swap: all, or one; each answers, and says why not.
lgsup 1 scale vae 2 "$D/1" >"$T/scale.txt" 2>&1
expect "scale from host 1" 0 $?
expect "is carried out on both" 2 "$(grep -c 'vae: 2 ready' "$T/scale.txt")"
check "which status shows" whole_is 0 '[.hosts[].status | select(. != null) | .wanted.vae] == [2, 2]'
lgsup 1 scale --host 0 vae 1 "$D/1" >"$T/scale0.txt" 2>&1
expect "scale of one host" 0 $?
check "is of that one" whole_is 1 '[.hosts[].status | select(. != null) | .wanted.vae] == [1, 2]'
lgsup 0 swap vae.1 "$D/0" >"$T/swap1.txt" 2>&1
expect "what one host does not have it refuses" 8 $?
check "and says so" grep -q 'host 0 .*not done: there is no vae.1' "$T/swap1.txt"
check "the other has done it" grep -q '^host 1 .*10\.77\.0\.2.*vae\.1' "$T/swap1.txt"
check "which its log says" grep -q 'swap: vae.1' "$D/1/logs/lgsup.log"
lgsup 0 swap --host 1 --bin /no/such/program vae.0 "$D/0" >"$T/swap.txt" 2>&1
check "a program that is not there is refused by the host where it is not" grep -q 'host 1 .*not done.*/no/such/program' "$T/swap.txt"

# Who has no key asks in vain; who has another run's folder is told.
chmod 644 "$T/key"
lgsup 0 status "$D/0" >"$T/open.txt" 2>&1
check "a key that others may read is not used" grep -q 'only this host is shown.*key' "$T/open.txt"
chmod 600 "$T/key"
cp -r "$D/0" "$D/copy" && echo 0123456789abcdef >"$D/copy/lineage"
check "another run is not shown" grep -q '(10.77.0.2)  another run is there' <(lgsup 0 status "$D/copy")

# A host that is gone is shown as such, and not waited for.
"$HOSTS" off 1
sleep 1
before=$(date +%s%N)
whole 0 >"$T/gone.json"
took=$((($(date +%s%N) - before) / 1000000))
echo "# status without one of the hosts took $took ms"
check "a silent machine is not waited for" test $took -lt 3000
expect "with the documented fields" "$(jq -c "$documented" "$schema")" "$(jq -c "$printed" "$T/gone.json")"
check "it is said how long it is silent" jq -e '.hosts[1] | (.answers | not) and .silent_s > 0.5 and .status == null' "$T/gone.json"
check "the spare takes its number" wait_until 120 whole_is 0 '.hosts[2] | .host == 1 and .status.state == "running"'
host_stop seen 0
hosts_wait seen 0 2
expect "all stop" "0 0" "$codes"
[ $e2e_failed -eq 0 ] || tail -n 5 "$D"/*.out "$T"/*.txt
