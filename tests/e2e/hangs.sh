#!/bin/bash
# Processes that hang, that die while they start or while the run ends, and that die again and again.
. "$(dirname "$0")/lib.sh"
N=80
reference $N

# A stopped process gives no heartbeat: it is killed and replaced, whatever it was doing.
run=$T/hang
tiny_in_background "$run" --set trainer.max_steps=$N --set supervisor.hang_s=2
step=3
for victim in trainer.1 vae.0 ema.0 loader.0; do
    wait_step "$run" $step 30 || break
    kill_role "$run" "${victim%.*}" "${victim#*.}" STOP
    echo "# stopped $victim at step $(step_of "$run")"
    step=$((step + 12))
done
wait $tiny_pid
expect "hung processes: completes" 0 $?
[ $e2e_failed -eq 0 ] || tail -5 "$run.out"
for role in trainer vae loader ema; do
    check "hung $role is replaced" test "$(restarts_of "$run" $role)" -ge 1
done
check "and the log says why" grep -q 'without a heartbeat for 2 s (supervisor.hang_s)' "$run/logs/lgsup.log"
check "hung processes: byte-identical" same_files "$reference" "$run" $N

# Killed as soon as they appear, before they are ready.
run=$T/early
tiny_in_background "$run" --set trainer.max_steps=$N
for victim in trainer.0 text.1 ckpt.0 keeper.0 loader.0; do
    kill_role "$run" "${victim%.*}" "${victim#*.}"
    echo "# killed $victim in state $(status_get "$run" .state)"
done
wait $tiny_pid
expect "killed while starting: completes" 0 $?
check "killed while starting: byte-identical" same_files "$reference" "$run" $N

# Killed while the last checkpoint is made, and while a stop drains.
run=$T/late
tiny_in_background "$run" --set trainer.max_steps=$N --set checkpoint.every=1 --set checkpoint.keep=2
for victim in ckpt.0 ema.0 ckpt.0 trainer.0 ckpt.0; do
    wait_step "$run" $(($(step_of "$run") + 4)) 60
    kill_role "$run" "${victim%.*}" "${victim#*.}"
done
timeout 60 "$LGSUP" stop "$run" >"$T/out" 2>&1 &
stop=$!
wait_until 5 state_is "$run" draining && kill -9 "$(pid_of "$run" ckpt 0 | sed 's/^0$/-/')" 2>/dev/null
wait $stop
expect "killed at every checkpoint and in the drain: stop exits 0" 0 $?
wait $tiny_pid
at=$(status_get "$run" .step)
check "its checkpoint (step $at) is complete" timeout 30 "$LGSUP" verify "$(checkpoint_of "$run" "$at")"
check "nothing half-written is left" test -z "$(find "$run/checkpoints" -name '.tmp*')"
tiny "$run" --set trainer.max_steps=$N
expect "started again it completes" 0 $?
check "killed at checkpoints: byte-identical" same_files "$reference" "$run" $N

# A crash loop parks the run; with the cause removed it goes on.
run=$T/loop
mkdir "$T/bin"
for p in "$e2e_build"/bin/lg-*; do ln -s "$p" "$T/bin/"; done
ln -sfn "$e2e_build/lib" "$T/lib"
tiny_in_background "$run" --set trainer.max_steps=$N
wait_step "$run" 25
timeout 60 "$LGSUP" stop "$run" >/dev/null 2>&1
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
LG_BIN_DIR=$T/bin tiny "$run" --set trainer.max_steps=$N
expect "crash loop: exit code" 11 $?
expect "crash loop: state" parked "$(status_get "$run" .state)"
check "crash loop: the cause names role and message" test -n "$(status_get "$run" 'select(.cause | test("vae.*this program is broken")) | .cause')"
check "crash loop: nothing is left running" nothing_runs
tiny "$run" --set trainer.max_steps=$N
expect "crash loop: cause removed, it goes on" 0 $?
check "crash loop: byte-identical in the end" same_files "$reference" "$run" $N
