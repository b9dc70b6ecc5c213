#!/bin/bash
# The same bits whatever happens around a run: run again, stopped and started, other numbers of
# encoders, less kept for the backward, other thread settings in the environment. And other bits
# with another seed, so that the comparison is known to see a difference.
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

# What is recomputed changes no bits, and may change at a resume.
tiny "$T/recompute" --set trainer.max_steps=40 --set memory.recompute=block
check "every block recomputed: byte-identical" same_files "$reference" "$T/recompute" 40
tiny "$T/recompute" "${steps[@]}" --set memory.recompute=budget:560KiB
check "it goes on from there" grep -q 'resuming tiny at step 40 from' "$T/recompute.out"
check "resumed with a budget that recomputes some: byte-identical" same_files "$reference" "$T/recompute" $N

# Feed-forwards in chunks of tokens: other sums, so another run; resumed in other chunks only where the key is named.
chunks=(--set memory.mlp_chunks=3)
tiny "$T/chunks" --set trainer.max_steps=20 "${chunks[@]}"
tiny "$T/chunks2" --set trainer.max_steps=10 "${chunks[@]}" --set memory.recompute=block
tiny "$T/chunks2" --set trainer.max_steps=20 "${chunks[@]}" --set memory.recompute=mlp
check "feed-forwards in chunks, recomputed and resumed: byte-identical" same_files "$T/chunks" "$T/chunks2" 20
tiny "$T/chunks2" --set trainer.max_steps=30
expect "in other chunks: refused" 10 $?
check "it says which key" grep -q 'memory.mlp_chunks was 3 when the run began and is 1 now.*name it in trainer.resume_changes' "$T/chunks2.out"
tiny "$T/whole" --set trainer.max_steps=30 --set trainer.resume_from="$(checkpoint_of "$T/chunks" 20)" \
    --set 'trainer.resume_changes=["memory.mlp_chunks"]'
expect "in other chunks, where that is named" 0 $?

# A factor on the loss is a power of two: in fp32 it changes no number, neither when it is doubled nor across a resume.
scaled=(--set trainer.loss_scale=1024 --set trainer.loss_scale_steps=7)
tiny "$T/scaled" --set trainer.max_steps=40 "${scaled[@]}"
check "a factor on the loss: byte-identical" same_files "$reference" "$T/scaled" 40
tiny "$T/scaled" "${steps[@]}" "${scaled[@]}"
check "it goes on from there" grep -q 'resuming tiny at step 40 from' "$T/scaled.out"
check "resumed: byte-identical" same_files "$reference" "$T/scaled" $N
check "doubled every 7 steps, across the resume" jq -es 'all(.[]; .loss_scale == 1024 * pow(2; (.step - 1) / 7 | floor))' \
    "$T/scaled/metrics.jsonl"

# Groups: updated apart with the same factors nothing changes; what is frozen stays what it was, and the rest does not.
tiny "$T/groups" "${steps[@]}" --set 'trainer.groups=["*.bias lr=1", "transformer_blocks.1.* decay=1"]'
check "parameters in groups: byte-identical" same_files "$reference" "$T/groups" $N
frozen=(--set 'trainer.groups=["transformer_blocks.0.* frozen", "*.bias decay=0"]')
tiny "$T/frozen" --set trainer.max_steps=10 "${frozen[@]}"
tiny "$T/frozen" --set trainer.max_steps=20 "${frozen[@]}"
model=model/diffusion_pytorch_model.safetensors
at=("$(checkpoint_of "$T/frozen" 10)/$model" "$(checkpoint_of "$T/frozen" 20)/$model")
check "a frozen block stays as it is" "$ST_COMPARE" "${at[@]}" 0 transformer_blocks.0.attn1.to_q.weight \
    transformer_blocks.0.ff.net.2.bias transformer_blocks.0.scale_shift_table
check "another does not" sh -c '! "$@" >/dev/null' _ "$ST_COMPARE" "${at[@]}" 0 transformer_blocks.1.attn1.to_q.weight

# What waits in host memory changes no bits either; of five blocks three have something that waits.
deep=(--set model.depth=5 --set trainer.max_steps=20 --set trainer.global_batch_size=32 --set trainer.micro_batch_size=16)
tiny "$T/deep" "${deep[@]}"
offload=("${deep[@]}" --set memory.recompute=block --set memory.offload_activations=true)
tiny "$T/offload" "${offload[@]}"
check "activations recomputed and offloaded: byte-identical" same_files "$T/deep" "$T/offload" 20
timeout 60 "$LGSUP" check "$TINY" "${offload[@]}" >"$T/plan" 2>&1
check "the plan knows of it" grep -q 'trainer/0/offloaded' "$T/plan"

OMP_NUM_THREADS=2 OMP_DYNAMIC=true DNNL_MAX_CPU_ISA=SSE41 tiny "$T/omp" "${steps[@]}"
check "thread settings of the environment: byte-identical" same_files "$reference" "$T/omp" $N

if same_files "$reference" "$T/again" $N >/dev/null; then
    tiny "$T/seed" "${steps[@]}" --set job.seed=8
    expect "another seed completes" 0 $?
    if same_files "$reference" "$T/seed" $N >/dev/null; then fail "another seed gives other bits"; else ok "another seed gives other bits"; fi
fi
