#!/bin/bash
# Ctrl-S on the terminal of `lgsup start`: nothing that it says gets through any more, but stages that die
# are started again, `lgsup stop` is obeyed, and lgsup ends. On a real terminal (script); examples/micro.
. "$(dirname "$0")/lib.sh"
TINY=$e2e_root/examples/micro/pipeline.toml
run=$T/run

mkfifo "$T/keys"
script -qefc "$LGSUP start $TINY --set job.dir=$run --set trainer.max_steps=1000000 --set sample.captions=[]" \
    /dev/null <"$T/keys" >"$T/screen" 2>&1 &
terminal=$!
trap 'kill $terminal 2>/dev/null; e2e_cleanup' EXIT
exec 8>"$T/keys"
wait_step "$run" 5 || fail "a run on a terminal" "$(tail -c 300 "$T/screen")"
check "it shows where it is" wait_until 20 grep -q 'loss .* samples/s' "$T/screen"

printf '\023' >&8 # Ctrl-S
# What the terminal still lets through ends within a moment.
frozen() { local n; n=$(stat -c %s "$T/screen"); sleep 0.7; [ "$(stat -c %s "$T/screen")" = "$n" ]; }
check "the terminal is frozen" wait_until 20 frozen
kill_role "$run" vae 0 # said, and not shown
replaced() { [ "$(restarts_of "$run" "$1")" -ge "$2" ]; }
check "a stage that dies is started again" wait_until 20 replaced vae 1
kill_role "$run" trainer 0
check "and a second one" wait_until 20 replaced trainer 1
at=$(step_of "$run")
check "training goes on" wait_step "$run" $((at + 20)) 60
check "the log has it" grep -q 'vae.0: signal 9 (Killed); restarted' "$run/logs/lgsup.log"
lgsup=$(cut -d' ' -f1 "$run/lock")
timeout 60 "$LGSUP" stop "$run" >"$T/out" 2>&1
expect "lgsup stop" 0 $?
check "and lgsup is gone" wait_until 5 is_gone "$lgsup"
expect "the run" stopped "$(status_get "$run" .state)"
check "nothing of this was shown" test -z "$(grep 'restarted' "$T/screen")"
exec 8>&-
wait $terminal
