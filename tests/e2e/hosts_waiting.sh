#!/bin/bash
# A machine that waits for the other hosts of its run, or to spare: it is seen, and it can be stopped, before it has a run of its own
# in job.dir, and where an earlier one lies there.
. "$(dirname "$0")/lib.sh"
. "$(dirname "$0")/hosts_lib.sh"
D=$T/wait
# look I COMMAND ...: its exit code in $code, what it says in $T/look
look() {
    local i=$1
    on "$i" timeout 30 "$LGSUP" "${@:2}" >"$T/look" 2>&1
    code=$?
}
saw() { [ "$code" = "$1" ] && grep -q -- "$2" "$T/look" || { tail -n 3 "$T/look"; echo "exit code $code"; return 1; }; }
waits() { look "$1" status "$D/$1" && saw 0 '^state  *waiting$'; }
ended() { # NAME I: the start has ended, well
    hosts_wait wait "$2"
    expect "$1" 0 "$codes"
}

places 2 1
host_start wait 0
check "status of one that waits" wait_until 60 waits 0
look 0 status "$D/0"
check "it says for what" saw 0 'cause  *machine 0 of hosts.list waits for machine 1'
look 0 status --json "$D/0"
check "in JSON, too" jq -e '.state == "waiting" and .job == "tiny" and .step == 0 and (.cause | test("machine 1")) and
    [.instances[] | .role, .state] == ["lgsup", "waiting"] and .instances[0].pid > 0' "$T/look"
look 0 hosts "$D/0"
check "so does lgsup hosts" saw 0 'waits for machine 1'
look 0 scale loader 2 "$D/0"
check "scale says that nothing runs yet" saw 7 'nothing runs in .* yet: machine 0 of hosts.list waits for machine 1'
look 0 swap loader.0 "$D/0"
check "and swap" saw 7 'nothing runs in .* yet'
look 0 logs "$D/0"
check "and logs" saw 7 'nothing runs in .* yet'
look 0 start "$TINY" --set "job.dir=$D/0" "${hosts_keys[@]}"
check "a second start is refused" saw 7 'already supervised'
look 0 stop "$D/0"
check "stop ends it" saw 0 'it waited for the other hosts, and made no step'
ended "the start ends well" 0
check "and says so" said wait 0 'stopped while it waited'
look 0 status "$D/0"
check "then there is no run" saw 8 'not a run directory'

for signal in INT TERM HUP; do
    host_start wait 0
    wait_until 60 waits 0
    on 0 pkill -"$signal" -x lgsup
    ended "SIG$signal ends one that waits" 0
done
host_start wait 0
wait_until 60 waits 0
look 0 stop --kill "$D/0"
check "stop --kill ends it" saw 0 'killed  *lgsup'
hosts_wait wait 0
host_start wait 0
wait_until 60 waits 0
on 0 pkill -KILL -x lgsup
hosts_wait wait 0
look 0 status "$D/0"
check "what one leaves that is killed says nothing" saw 8 'not a run directory'

hosts_start wait
check "all three: two train" wait_until 120 step_reached "$D/0" 5
check "and the third waits" wait_until 60 waits 2
look 2 status "$D/2"
check "until one is lost" saw 0 'waits until one is'
check "nothing is said of waiting where the run goes on" test ! -e "$D/0/waiting" -a ! -e "$D/1/waiting"
look 2 stop "$D/2"
check "the spare can be stopped" saw 0 'made no step'
ended "it ends well" 2
at=$(step_of "$D/0")
check "the others go on" wait_until 60 step_reached "$D/0" $((at + 20))
host_stop wait 0
hosts_wait wait 0 1
expect "they are stopped" "0 0" "$codes"

# One alone, in the directory of the run that was.
host_start wait 1
check "status is of the waiting, not of the run that was" wait_until 60 waits 1
look 1 stop "$D/1"
check "so is what stop says" saw 0 'made no step'
ended "and it ends well" 1
at=$(step_of "$D/0")
hosts_start wait
check "the run goes on afterwards" wait_until 120 step_reached "$D/0" $((at + 5))
host_stop wait 1
hosts_wait wait 0 1 2
expect "to its end" "0 0 0" "$codes"
