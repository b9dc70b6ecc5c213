#!/bin/bash
# The commands besides start and stop: status, logs, check, doctor, verify, sample, encode, decode.
. "$(dirname "$0")/lib.sh"
golden=$e2e_root/tests/golden/emoji.safetensors
reference 80
run=$T/run
cp -r "$reference" "$run"
out=$T/out
lgsup() { timeout 300 "$LGSUP" "$@" >"$out" 2>&1 </dev/null; }

# ---- status ----
status "$run" >"$T/status"
expect "status --json: the documented fields" "$(jq -c '.required | sort' "$e2e_root/docs/status.schema.json")" \
    "$(jq -c 'keys' "$T/status")"
expect "status: job" tiny "$(jq -r .job "$T/status")"
expect "status: state after the end" done "$(jq -r .state "$T/status")"
expect "status: step" '[80,80]' "$(jq -c '[.step, .max_steps]' "$T/status")"
expect "status: fields of an instance" "$(jq -c '.properties.instances.items.required | sort' "$e2e_root/docs/status.schema.json")" \
    "$(jq -c '[.instances[] | keys[] ] | unique' "$T/status")"
expect "status: the instances of the plan" \
    'ckpt.0 ema.0 keeper.0 lgsup.0 loader.0 text.0 text.1 trainer.0 trainer.1 vae.0 vae.1' \
    "$(jq -r '[.instances[] | "\(.role).\(.index)"] | sort | join(" ")' "$T/status")"
rm "$run/board" # as after a restart of the machine
expect "status without the board" 'done 80' "$(status_get "$run" '"\(.state) \(.step)"')"
lgsup status "$run"
check "status for people" grep -Eq '80 of 80|80/80' "$out"

# ---- run directory ----
check "metrics: the documented keys" jq -es 'all(has("step") and has("loss") and has("grad_norm") and has("lr") and has("samples_per_s") and has("data_wait_s"))' "$run/metrics.jsonl"
check "metrics: steps 1 to 80" metrics_are_whole "$run" 80
check "the loss falls" jq -es '(.[:10] | map(.loss) | add) > (.[70:] | map(.loss) | add)' "$run/metrics.jsonl"
expect "ledger: 64 bytes a step" $((64 * 80)) "$(stat -c %s "$run/ledger")"
newest=$(checkpoint_of "$run" 80)
for f in model/config.json model/diffusion_pytorch_model.safetensors ema/config.json \
    ema/diffusion_pytorch_model.safetensors optimizer.safetensors manifest.json; do
    check "checkpoint: $f" test -s "$newest/$f"
done
expect "manifest" '[80,640,7]' "$(jq -c '[.step, .next_n, .seed]' "$newest/manifest.json")"
expect "diffusers' class name" PixArtTransformer2DModel "$(jq -r ._class_name "$newest/model/config.json")"
expect "retention: checkpoint.keep = 3" 'tiny_step40 tiny_step60 tiny_step80' "$(ls "$run/checkpoints" | tr '\n' ' ' | sed 's/ $//')"
check "model and ema differ" test "$(cmp -s "$newest"/{model,ema}/diffusion_pytorch_model.safetensors; echo $?)" -eq 1
check "the effective config is saved" grep -Eq '^max_steps *= *80' "$run/config.toml"

# ---- logs ----
lgsup logs "$run"
expect "logs exits 0" 0 $?
check "logs has every role" sh -c "for r in loader text vae trainer ema ckpt; do grep -q \$r '$out' || { echo no \$r; exit 1; }; done"
lgsup logs trainer "$run"
check "logs ROLE" sh -c "grep -q trainer '$out' && ! grep -q 'vae\.[0-9]' '$out'"

# ---- check, doctor ----
lgsup check "$TINY" --set job.dir="$T/unused"
expect "check exits 0" 0 $?
for r in loader text vae trainer ema ckpt; do check "check names $r" grep -q "$r" "$out"; done
check "check names the instruction set" grep -Eq 'avx512|avx2|sse2' "$out"
check "check shows bytes" grep -Eq '[0-9.]+ *(B|KiB|MiB|GiB|bytes)' "$out"
check "check creates nothing" test ! -e "$T/unused"
# own_of [--set ...]: private bytes of a trainer rank.
own_of() { "$e2e_build/bin/lg-trainer" --plan "$TINY" "$@" | jq '[.private[].bytes] | max'; }
check "check counts what is recomputed" test "$(own_of --set memory.recompute=block)" -lt "$(own_of --set memory.recompute=norms)"
check "recomputing norms takes less than keeping them" test "$(own_of --set memory.recompute=norms)" -lt "$(own_of)"
check "feed-forwards in chunks take less where they are recomputed" \
    test "$(own_of --set memory.recompute=mlp --set memory.mlp_chunks=4)" -lt "$(own_of --set memory.recompute=mlp)"
lgsup check "$TINY" --set job.dir="$T/unused" --set memory.recompute=budget:200KiB
check "check says what a budget recomputes" grep -Eq '^    recomputed: norms in 2 of 2 blocks, mlp in [12] of 2 blocks$' "$out"
lgsup check "$TINY" --set job.dir="$T/unused" --set memory.recompute=budget:1KiB
expect "check of a budget that is too small" 3 $?
check "and says what is needed" grep -Eq 'a budget of 0.00 MiB; .*still take 0\.[0-9]*[1-9][0-9]* MiB: give more, or lower trainer.micro_batch_size' "$out"
lgsup check "$TINY" --set job.dir="$T/unused" --set 'memory.recompute=[0, 2]'
expect "check of blocks that are not there" 3 $?
lgsup check "$EMOJI/pipeline.toml"
expect "check of the example" 0 $?
lgsup doctor
expect "doctor exits 0" 0 $?
check "doctor names every program" sh -c "for p in loader text vae trainer ema ckpt keeper sample encode; do grep -q \"^ok .*lg-\$p\" '$out' || { echo no lg-\$p; exit 1; }; done"

# ---- verify ----
lgsup verify "$run"
expect "verify of the run" 0 $?
lgsup verify "$newest"
expect "verify of a checkpoint" 0 $?
cp -r "$newest" "$T/flipped"
printf '\x01' | dd of="$T/flipped/optimizer.safetensors" bs=1 seek=100001 conv=notrunc 2>/dev/null
if cmp -s "$T/flipped/optimizer.safetensors" "$newest/optimizer.safetensors"; then
    printf '\x02' | dd of="$T/flipped/optimizer.safetensors" bs=1 seek=100001 conv=notrunc 2>/dev/null
fi
lgsup verify "$T/flipped"
expect "verify finds a flipped byte" 5 $?
check "and names the file" grep -q optimizer.safetensors "$out"
rm "$T/flipped/ema/config.json"
lgsup verify "$T/flipped"
expect "verify finds a missing file" 5 $?
cp "$run/ledger" "$T/ledger"
printf '\x7f' | dd of="$run/ledger" bs=1 seek=$((64 * 30 + 9)) conv=notrunc 2>/dev/null
lgsup verify "$run"
expect "verify finds a damaged ledger" 5 $?
check "and names the step" grep -Eq '3[01]' "$out"
head -c $((64 * 50)) "$T/ledger" >"$run/ledger"
lgsup verify "$run"
expect "verify finds a ledger cut short" 5 $?
cp "$T/ledger" "$run/ledger"
lgsup verify "$run"
expect "verify accepts the ledger put back" 0 $?
lgsup verify "$T/nowhere"
expect "verify of nothing" 8 $?

# ---- sample ----
is_png() { [ "$(head -c 8 "$1" | od -An -tx1 | tr -d ' \n')" = 89504e470d0a1a0a ]; }
lgsup sample "red heart" "a rocket" --from "$run" --steps 4 --seed 1 -o "$T/a.png"
expect "sample exits 0" 0 $?
check "sample writes a PNG" is_png "$T/a.png"
lgsup sample "red heart" "a rocket" --from "$newest" --steps 4 --seed 1 -o "$T/b.png"
check "the same seed gives the same picture" cmp "$T/a.png" "$T/b.png"
lgsup sample "red heart" "a rocket" --from "$run" --steps 4 --seed 2 -o "$T/c.png"
check "another seed gives another" test "$(cmp -s "$T/a.png" "$T/c.png"; echo $?)" -eq 1
for seed in 9007199254740992 9007199254740993; do # a double has no place between them
    sed "/^\[sample\]/,/^\[/ s/^seed = .*/seed = $seed/" "$run/config.toml" >"$T/large.toml"
    lgsup sample "red heart" --from "$run" --config "$T/large.toml" --steps 1 -o "$T/$seed.png"
    check "seed $seed of a config" grep -q ": 1 picture from .* seed $seed," "$out"
done
check "neighbours give different pictures" test "$(cmp -s "$T/9007199254740992.png" "$T/9007199254740993.png"; echo $?)" -eq 1
lgsup sample "red heart" --from "$run" --seed 1.5 -o "$T/d.png"
expect "a seed that is no whole number" 2 $?
lgsup sample "red heart" --from "$run" --steps 2.5 -o "$T/d.png"
expect "steps that are no whole number" 2 $?
lgsup sample "red heart" --from "$T/nowhere" -o "$T/d.png"
check "sample from nowhere fails and says so" sh -c "[ $? -ne 0 ] && grep -q nowhere '$out'"

# ---- encode, decode ----
lgsup encode vae --model "$EMOJI/vae" "$golden" "$T/latents.safetensors"
expect "encode vae exits 0" 0 $?
check "encode vae reproduces the golden latents" "$ST_COMPARE" "$T/latents.safetensors" "$golden" 1e-4 latent_mean latent_logvar
lgsup encode text --model "$EMOJI/text_encoder" "$golden" "$T/text.safetensors"
expect "encode text exits 0" 0 $?
check "encode text reproduces the golden hidden states" "$ST_COMPARE" "$T/text.safetensors" "$golden" 1e-4 text_hidden
lgsup decode vae --model "$EMOJI/vae" "$golden" "$T/decoded.safetensors"
expect "decode vae exits 0" 0 $?
check "decode vae reproduces the golden pictures" "$ST_COMPARE" "$T/decoded.safetensors" "$golden" 1e-4 decoded
# A device that computes in another type than the files: what a GPU in bf16 is too.
lgsup encode text --device ref64 --model "$EMOJI/text_encoder" "$golden" "$T/text.safetensors"
check "encode text on another device" "$ST_COMPARE" "$T/text.safetensors" "$golden" 1e-5 text_hidden
lgsup decode vae --device ref64 --model "$EMOJI/vae" "$golden" "$T/decoded.safetensors"
check "decode vae on another device" "$ST_COMPARE" "$T/decoded.safetensors" "$golden" 1e-5 decoded
lgsup sample "red heart" "a rocket" --device ref64 --from "$run" --steps 1 --seed 1 -o "$T/e.png"
check "sample on another device" is_png "$T/e.png"
lgsup sample "red heart" --device cuda:1024 --from "$run" -o "$T/f.png"
expect "sample on a device that is none" 3 $?
check "compare can fail" sh -c "! '$ST_COMPARE' '$golden' '$golden' 1e-4 latent_mean=latent_logvar"
graph() { "$e2e_build/bin/lg-graph" "$@" >"$T/graph" 2>&1; }
graph "$e2e_root/examples/micro/made/text_encoder" --batch 2 --length 8
expect "lg-graph: a text encoder" 0 $?
check "lg-graph: its last line" grep -Eq '^[0-9]+ nodes, [0-9]+ values, arena [0-9]+ bytes, of which n[0-9]+ uses [0-9]+; scratch [0-9]+ bytes; [0-9.e-]+ GFLOP$' "$T/graph"
graph "$e2e_root/examples/micro/made/vae" --size 16
expect "lg-graph: both halves of an autoencoder" "encoder decoder 2" "$(grep -E '^(encoder|decoder)$' "$T/graph" | xargs) $(grep -c GFLOP "$T/graph")"
recomputes() { grep -Ec '^n[0-9]+ b[0-9]+ backward (linear|attention)_forward ' "$T/graph"; }
graph "$newest/model"
expect "lg-graph: a denoiser" "0 0 1" "$? $(grep -c backward "$T/graph") $(grep -c GFLOP "$T/graph")"
graph "$newest/model" --train --batch 4
check "lg-graph: its backward, by blocks" grep -q '^n[0-9]* b1 backward linear_backward_weight ' "$T/graph"
cp "$T/graph" "$T/trained"
graph "$TINY" --train
check "lg-graph: a pipeline's denoiser is that of its checkpoints" cmp "$T/graph" "$T/trained"
expect "lg-graph: nothing is recomputed" 0 "$(recomputes)"
graph "$TINY" --train --recompute 0 --recompute 1
expect "lg-graph: --recompute" "recomputed: everything in 2 of 2 blocks" "$(head -n 1 "$T/graph")"
check "and there it is" test "$(recomputes)" -gt 10
cp "$T/graph" "$T/recomputed"
graph "$TINY" --train --set memory.recompute=block
check "lg-graph: what a pipeline recomputes" cmp "$T/graph" "$T/recomputed"
graph "$newest/model" --train --batch 4 --recompute 0,1
check "lg-graph: words with commas" cmp "$T/graph" "$T/recomputed"
graph "$newest/model" --train --recompute half
expect "lg-graph: a word that is none" 3 $?
graph "$newest/model" --recompute block
expect "lg-graph: --recompute without --train" 2 $?
graph "$MICRO/vae" --train
expect "lg-graph: --train of an encoder" 2 $?
graph "$T"
expect "lg-graph: a folder that is no model" 8 $?
