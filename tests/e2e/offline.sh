#!/bin/bash
# A data set encoded beforehand trains to the same bits as one encoded on the way. And with a latent
# that is not finite among them: its steps are skipped, always the same ones, and counted.
. "$(dirname "$0")/lib.sh"
N=20
mkdir "$T/pictures"
tar -xf "$MICRO/data/micro-00000.tar" -C "$T/pictures"
find "$T/pictures" -type f | sort | tail -n +81 | xargs rm # 40 pictures: an epoch is 5 steps
same=(--set trainer.max_steps=$N --set data.flip=false)
# As SD3's and FLUX's: an autoencoder with a shift.
cp -r "$MICRO/vae" "$T/vae"
jq '.shift_factor = 0.25' "$MICRO/vae/config.json" >"$T/vae/config.json"

tiny "$T/online" "${same[@]}" --set vae.model="$T/vae" --set data.path="$T/pictures"
expect "encoded on the way" 0 $?
timeout 300 "$LGSUP" encode dataset --vae "$T/vae" --data "$T/pictures" --out "$T/latents" --size 16 --threads 1 --batch 4 >"$T/out" 2>&1
expect "encode dataset exits 0" 0 $?
# What it says of the latents is what a run has to be told.
latents=(--set vae.model=)
for key in latent_channels latent_size latent_scaling latent_shift; do
    latents+=(--set "data.$key=$(sed -n "s/^$key = //p" "$T/out")")
done
tiny "$T/offline" "${same[@]}" "${latents[@]}" --set data.path="$T/latents"
expect "trained from latents" 0 $?
tiny "$T/shape" "${same[@]}" "${latents[@]}" --set data.latent_size=5 --set data.path="$T/latents" >"$T/shape.out" 2>&1
expect "latents of another size" 11 $?
check "say which key is wrong" grep -q 'the plan says (4, 1, 5, 5): set data.latent_size = \[4, 4\]' "$T/shape/logs/lgsup.log"
check "no VAE process is in the plan" test "$(status_get "$T/offline" '[.instances[] | select(.role == "vae")] | length')" -eq 0
check "latents from files: byte-identical" same_files "$T/online" "$T/offline" $N

# NaN into the first value of one latent.
mkdir "$T/members" "$T/nan"
tar -xf "$T/latents/00000.tar" -C "$T/members"
victim=$(find "$T/members" -name '*.latent.safetensors' | sort | sed -n 7p)
header=$(od -An -tu8 -N8 "$victim" | tr -d ' ')
printf '\x00\x00\xc0\x7f' | dd of="$victim" bs=1 seek=$((8 + header)) conv=notrunc 2>/dev/null
(cd "$T/members" && find . -type f | sed 's#^\./##' | sort | tar -cf "$T/nan/00000.tar" -T -)
tiny "$T/skip" "${same[@]}" "${latents[@]}" --set data.path="$T/nan"
expect "one latent is not finite: the run goes on" 0 $?
expect "one step of each epoch is skipped" 4 "$(jq -s 'map(.skipped) | add' "$T/skip/metrics.jsonl")"
expect "the status counts them" 4 "$(status_get "$T/skip" .skipped_steps)"
expect "their loss is null, the others' a number" 'true' \
    "$(jq -s 'all((.skipped == 1) == (.loss == null))' "$T/skip/metrics.jsonl")"
expect "the manifest counts updates" '[16,4]' "$(jq -c '[.optimizer_steps, .skipped]' "$(checkpoint_of "$T/skip" $N)/manifest.json")"
check "verify accepts it" timeout 120 "$LGSUP" verify "$T/skip"
train "$T/again" "${latents[@]}" --set data.flip=false --set data.path="$T/nan"
wait_step "$T/again" 3
kill_role "$T/again" trainer 1
settle "a rank killed meanwhile" "$T/again"
N=${settled:-$N}
tiny "$T/longer" "${latents[@]}" --set data.flip=false --set trainer.max_steps=$N --set data.path="$T/nan"
same_as "a rank killed meanwhile, the same steps skipped" "$T/again" "$T/longer" $N
