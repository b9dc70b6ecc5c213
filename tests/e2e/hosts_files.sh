#!/bin/bash
# Checkpoints of several hosts: in one folder that all see each is published once, also when the host that writes loses
# its power in the middle of it; without such a folder it lies with the host that leads.
. "$(dirname "$0")/lib.sh"
. "$(dirname "$0")/hosts_lib.sh"
D=$T/files S=$T/shared
stall=$e2e_build/tests/stub/libstall.so
written() { cat "$D"/*/logs/ckpt.0.log | grep -c "published .*_step$1 in"; } # STEP: how often
newest() { ls -d "$S/checkpoints"/tiny_step* 2>/dev/null | sed 's/.*_step//' | sort -n | tail -n 1; }
newer_than() { [ "$(newest)" -gt "$1" ] 2>/dev/null; }
half_written() { ls -d "$S/checkpoints"/.tmp-tiny_step* >/dev/null 2>&1; }

places 2 1 --set "hosts.shared=$S" --set checkpoint.every=20 --set checkpoint.keep=1000000
# The first host's writer takes a second for each fsync while $T/stall is there.
export LG_STALL=$T/stall LG_STALL_PROGRAM=lg-ckpt
LD_PRELOAD=$stall host_start files 0
host_start files 1
host_start files 2
check "checkpoints come" wait_until 300 newer_than 20
for i in 0 1; do
    check "host $i sees them in its job.dir" test -f "$D/$i/checkpoints/tiny_step20/manifest.json"
    check "status of host $i names the newest" grep -q 'tiny_step' <(on "$i" "$LGSUP" status --host $i "$D/$i" | grep '^checkpoint')
done
expect "each was published once" 1 "$(written 20)"

# The power of the host that writes goes off in the middle of it.
touch "$T/stall"
check "the leading host is writing" wait_until 120 half_written
half=$(cd "$S/checkpoints" && ls -d .tmp-tiny_step* | sed 's/.*_step\([0-9]*\).*/\1/' | sort -n | tail -n 1)
"$HOSTS" off 0
check "step $half is not published yet" test ! -e "$S/checkpoints/tiny_step$half"
check "another host publishes the same checkpoint" wait_until 120 test -f "$S/checkpoints/tiny_step$half/manifest.json"
check "from what it had staged itself" wait_until 60 grep -q "published .*_step$half in" "$D/1/logs/ckpt.0.log"
expect "once" 1 "$(written "$half")"
check "the run goes on" wait_until 120 newer_than "$half"
check "and what the lost host had half written goes" wait_until 60 test ! -e "$S/checkpoints"/.tmp-tiny_step"$half".*
rm "$T/stall"

# The machine comes back as a spare, while others write; the one that is there leads and stops the run.
"$HOSTS" on 0
mkdir "$S/checkpoints/.tmp-tiny_step999999.ff" # that somebody is writing
LD_PRELOAD=$stall host_start files 0
check "it knows of the run" wait_until 60 said files 0 "goes on with all of its 2 hosts"
at=$(newest)
check "who comes is no trouble" wait_until 120 newer_than "$at"
check "and takes nothing away that another is writing" rmdir "$S/checkpoints/.tmp-tiny_step999999.ff"
on 0 pkill -STOP -x lgsup # is not there to hear the end
host_stop files 1
hosts_wait files 1 2
on 0 pkill -CONT -x lgsup
expect "all stop" "0 0" "$codes"
hosts_wait files 0
expect "and the spare, which hears of it later" 0 "$codes"
[ "$codes" = 0 ] || tail -n 20 "$D/0.out"
last=$(newest)
for n in $(cd "$S/checkpoints" && ls -d tiny_step* | sed 's/.*_step//'); do
    [ "$(written "$n")" -eq 1 ] || fail "step $n was published $(written "$n") times"
done
expect "nothing is left half written" 0 "$(ls -A "$S/checkpoints" | grep -c '^\.')"
check "the folder and host 1's ledger are in order" on 1 timeout 100 "$LGSUP" verify "$D/1"

# Another start of all goes on from there, whichever hosts they are.
host_start files 0
host_start files 2
host_start files 1
check "all go on from the newest one" wait_until 120 grep -q "resuming .* at step $last from\|host [01] of 2, from step $last" "$D"/0.out
check "which is a later one soon" wait_until 120 newer_than "$last"
host_stop files 0
hosts_wait files 0 1 2
expect "all stop again" "0 0 0" "$codes"
[ $e2e_failed -eq 0 ] || tail -n 8 "$D"/*.out

# The same bytes as where there is no such folder, and nobody was disturbed.
places 2 0 --set checkpoint.every=20
hosts_start plain
check "an undisturbed run, without a shared folder" wait_until 600 test -d "$(checkpoint_of "$T/plain/0" "$half")"
host_stop plain 0
hosts_wait plain 0 1
expect "it ends" "0 0" "$codes"
check "step $half is the same, byte for byte" same_files "$T/plain/0" "$D/1" "$half"
check "there the files are with the host that leads" test ! -e "$(checkpoint_of "$T/plain/1" "$half")"

# Started again at its end a run has nothing to do, which only the host with the checkpoint knows by itself.
hosts_start short --set trainer.max_steps=4
hosts_wait short 0 1
hosts_start short --set trainer.max_steps=4
hosts_wait short 0 1
expect "a run that has come to its end ends on all hosts" "0 0" "$codes"
for i in 0 1; do check "host $i says so" said short $i "nothing to do: tiny is at step 4"; done
host_start short 0 --set trainer.max_steps=5
host_start short 1 --set trainer.max_steps=6
hosts_wait short 0 1
expect "with other max_steps they do not begin" "10 10" "$codes"
check "and say why" said short 0 "another trainer.max_steps"

# Whoever starts them one after the other in the background is not kept by the first, which waits for the second.
codes=
for i in 0 1; do
    on $i timeout 60 "$LGSUP" start --detach "$TINY" --set "job.dir=$T/back/$i" "${hosts_keys[@]}" --set trainer.max_steps=4
    codes="$codes${codes:+ }$?"
done
expect "both are started in the background" "0 0" "$codes"
check "the first says what it waited for" grep -q "waits for machine 1" "$T/back/0/logs/lgsup.log"
check "and they train" wait_until 120 step_reached "$T/back/1" 4

# Each would decide alone there, and write where the others do not look.
places 2 0 --set "hosts.shared=$T/mount"
mkdir "$T/mount" "$T/elsewhere"
on 1 mount --bind "$T/elsewhere" "$T/mount"
hosts_start mount
hosts_wait mount 0 1
expect "hosts with different folders as hosts.shared do not begin" "10 10" "$codes"
check "and say so" said mount 0 "another folder as hosts.shared"
