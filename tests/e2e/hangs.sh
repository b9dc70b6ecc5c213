#!/bin/bash
# Processes that hang, that die while they start or while the run ends, and that die again and again.
. "$(dirname "$0")/lib.sh"

# A stopped process gives no heartbeat: it is killed and replaced, whatever it was doing.
run=$T/hang
# On a machine with other work the limit of 2 s hits the living too; that does not park the run. Of each role that the others
# need there is one, without whom they wait: another autoencoder would train a thousand steps meanwhile.
train "$run" --set supervisor.hang_s=2 --set supervisor.restarts_max=1000000 --set vae.instances=1
replaced() { [ "$(restarts_of "$1" "$2")" -gt "$3" ]; }
step=3
for victim in trainer.1 vae.0 ema.0 loader.0; do
    role=${victim%.*}
    wait_step "$run" $step || break
    before=$(restarts_of "$run" $role)
    kill_role "$run" $role "${victim#*.}" STOP
    echo "# stopped $victim at step $(step_of "$run")"
    check "hung $role is replaced" wait_until 300 replaced "$run" $role "$before"
    step=$(($(step_of "$run") + 3))
done
check "and the log says why" grep -q 'without a heartbeat for 2 s (supervisor.hang_s)' "$run/logs/lgsup.log"
settle_same "hung processes" "$run"

# Killed as soon as they appear, before they are ready.
run=$T/early
train "$run"
for victim in trainer.0 text.1 ckpt.0 keeper.0 loader.0; do
    kill_role "$run" "${victim%.*}" "${victim#*.}"
    echo "# killed $victim in state $(status_get "$run" .state)"
done
settle_same "killed while starting" "$run"

# Killed while checkpoints are made, and while a stop drains.
run=$T/late
train "$run" --set checkpoint.every=1 --set checkpoint.keep=2
for victim in ckpt.0 ema.0 ckpt.0 trainer.0 ckpt.0; do
    wait_step "$run" $(($(step_of "$run") + 4))
    kill_role "$run" "${victim%.*}" "${victim#*.}"
done
writer_lives() { [ "$(pid_of "$run" ckpt 0)" != "$killed_pid" ] && kill_role "$run" ckpt 0 STOP; }
check "the writer is there again" wait_until 120 writer_lives
timeout 300 "$LGSUP" stop "$run" >"$T/out" 2>&1 & # which cannot end without the writer
stop=$!
check "killed in the drain" wait_until 60 state_is "$run" draining
kill_role "$run" ckpt 0
wait $stop
expect "killed at every checkpoint and in the drain: stop exits 0" 0 $?
wait $tiny_pid
at=$(status_get "$run" .step)
check "its checkpoint (step $at) is complete" timeout 60 "$LGSUP" verify "$(checkpoint_of "$run" "$at")"
check "nothing half-written is left" test -z "$(find "$run/checkpoints" -name '.tmp*')"
train "$run"
check "started again it goes on" wait_step "$run" $((at + 1))
settle_same "killed at checkpoints" "$run"

# A crash loop parks the run; with the cause removed it goes on.
run=$T/loop
mkdir "$T/bin"
for p in "$e2e_build"/bin/lg-*; do ln -s "$p" "$T/bin/"; done
ln -sfn "$e2e_build/lib" "$T/lib"
train "$run"
wait_step "$run" 5
timeout 300 "$LGSUP" stop "$run" >/dev/null 2>&1
wait $tiny_pid
rm "$T/bin/lg-vae"
# It still answers what it needs (lg-vae --plan), which a start asks before it starts anything.
cat >"$T/bin/lg-vae" <<END
#!/bin/sh
case "\$*" in *--plan*) exec "$e2e_build/bin/lg-vae" "\$@" ;; esac
echo "this program is broken" >&2
exit 1
END
chmod +x "$T/bin/lg-vae"
at=$(status_get "$run" .step)
LG_BIN_DIR=$T/bin train "$run" --set supervisor.restart_window_s=86400
wait $tiny_pid
expect "crash loop: exit code" 11 $?
expect "crash loop: state" parked "$(status_get "$run" .state)"
check "crash loop: the cause names role and message" test -n "$(status_get "$run" 'select(.cause | test("vae.*this program is broken")) | .cause')"
check "crash loop: nothing is left running" nothing_runs
train "$run"
check "crash loop: cause removed, it goes on" wait_step "$run" $((at + 1))
settle_same "crash loop" "$run"
