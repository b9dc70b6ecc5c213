#!/bin/bash
# The same bits whatever happens around a run: run again, stopped and started, other numbers of
# encoders, other thread settings in the environment. And other bits with another seed, so that the
# comparison is known to see a difference.
. "$(dirname "$0")/lib.sh"
N=60
steps=(--set "trainer.max_steps=$N")

reference $N

tiny "$T/again" "${steps[@]}"
check "two runs with one seed are byte-identical" same_files "$reference" "$T/again" $N

train "$T/stop"
wait_step "$T/stop" 28 || fail "stop at about 30" "step 28 not reached"
timeout 300 "$LGSUP" stop "$T/stop" >"$T/stop.log" 2>&1
expect "stop exits 0" 0 $?
wait $tiny_pid
expect "a stopped start exits 0" 0 $?
expect "state after stop" stopped "$(status_get "$T/stop" .state)"
stopped_at=$(status_get "$T/stop" .step)
check "stopped halfway (step $stopped_at)" test "$stopped_at" -ge 28
check "nothing runs after stop" nothing_runs
check "a checkpoint of the step it stopped at" test -f "$(checkpoint_of "$T/stop" "$stopped_at")/manifest.json"
train "$T/stop"
check "started again it goes on" wait_step "$T/stop" $((stopped_at + 1))
check "from that checkpoint" grep -q "resuming tiny at step $stopped_at from" "$T/stop.out"
settle "stopped and resumed" "$T/stop"
if [ "${settled:-0}" -eq $N ]; then calm=$T/again; else undisturbed "${settled:-$N}" && calm=$reference; fi
same_as "stopped and resumed" "$T/stop" "$calm" "$settled"
reference $N

tiny "$T/vae1" "${steps[@]}" --set vae.instances=1
check "1 VAE instance instead of 2: byte-identical" same_files "$reference" "$T/vae1" $N
tiny "$T/vae3" "${steps[@]}" --set vae.instances=3 --set text.instances=1
check "3 VAE instances, 1 text instance: byte-identical" same_files "$reference" "$T/vae3" $N

OMP_NUM_THREADS=2 OMP_DYNAMIC=true DNNL_MAX_CPU_ISA=SSE41 tiny "$T/omp" "${steps[@]}"
check "thread settings of the environment: byte-identical" same_files "$reference" "$T/omp" $N

if same_files "$reference" "$T/again" $N >/dev/null; then
    tiny "$T/seed" "${steps[@]}" --set job.seed=8
    expect "another seed completes" 0 $?
    if same_files "$reference" "$T/seed" $N >/dev/null; then fail "another seed gives other bits"; else ok "another seed gives other bits"; fi
fi
