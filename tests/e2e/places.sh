#!/bin/bash
# What lgsup inherits from whoever starts it, as cron, daemons, nohup and other programs do: closed descriptors, signals
# that are ignored, limits; and output that nobody can write. On examples/micro: short runs.
. "$(dirname "$0")/lib.sh"
TINY=$e2e_root/examples/micro/pipeline.toml
short=(--set trainer.max_steps=10 --set checkpoint.every=0)

# ---- closed descriptors: what is printed is written into no file of the run ----
for closed in '<&-' '>&-' '<&- >&-' '<&- >&- 2>&-'; do
    run=$T/closed
    rm -rf "$run"
    timeout 120 bash -c "exec \"\$@\" $closed" x "$LGSUP" start "$TINY" --set "job.dir=$run" "${short[@]}" >"$T/out" 2>&1 </dev/null
    expect "closed $closed: exit code" 0 $?
    check "closed $closed: verify" timeout 120 "$LGSUP" verify "$run"
    expect "closed $closed: files with its lines" "" "$(grep -l 'every role is ready' "$run"/* 2>/dev/null)"
done

# ---- signals that are ignored ----
env --ignore-signal=CHLD timeout 120 "$LGSUP" start "$TINY" --set job.dir="$T/chld" "${short[@]}" >"$T/out" 2>&1
expect "SIGCHLD ignored: exit code" 0 $?
endless=(--set trainer.max_steps=1000000)
nohup "$LGSUP" start "$TINY" --set job.dir="$T/nohup" "${endless[@]}" >"$T/nohup.out" 2>&1 </dev/null &
pid=$!
wait_step "$T/nohup" 5 120
kill -HUP "$pid"
check "nohup: a hangup does not end the run" wait_step "$T/nohup" $(($(step_of "$T/nohup") + 20)) 120
expect "nohup: state" running "$(status_get "$T/nohup" .state)"
kill_role "$T/nohup" lgsup 0 STOP # so that it is asked by signal, not by message
(sleep 4; kill -CONT "$pid") &
timeout 120 "$LGSUP" stop "$T/nohup" >"$T/out" 2>&1
expect "nohup: stop by signal, exit codes" "0 0" "$? $(wait "$pid"; echo $?)"
expect "nohup: stopped" stopped "$(status_get "$T/nohup" .state)"

# ---- a limit of the size of files ----
(ulimit -f 100; timeout 120 "$LGSUP" start "$TINY" --set job.dir="$T/small" "${short[@]}") >"$T/out" 2>&1
expect "ulimit -f: no board" "4 1" "$? $(grep -c 'for the board .*File too large' "$T/out")"
(ulimit -f 2500; timeout 120 "$LGSUP" start "$TINY" --set job.dir="$T/limit" "${short[@]}") >"$T/out" 2>&1
expect "ulimit -f: no memory for a checkpoint" "11 1" "$? $(grep -c '^error: parked: ckpt.0 .*File too large' "$T/out")"
timeout 120 "$LGSUP" stop "$T/limit" >"$T/out" 2>&1

# ---- output that nobody can write ----
for words in "status --json $T/chld" "logs $T/chld" "logs -f $T/chld" "verify $T/chld" "check $TINY" "data $TINY"; do
    timeout 120 "$LGSUP" $words >/dev/full 2>"$T/out"
    code=$?
    check "a full disk under the output of ${words%% *}" test $code -eq 6 -o $code -eq 4
    check "and said so" grep -q 'cannot write the output' "$T/out"
done
check "nothing is left running" nothing_runs
