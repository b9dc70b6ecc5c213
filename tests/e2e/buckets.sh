#!/bin/bash
# Pictures of 40 sizes, in buckets: whoever is killed, the bytes are those of an undisturbed run, and the ledger has every
# item once in an epoch of its bucket (ledger_check computes that from the pictures' sizes alone). What does not decide
# bits decides none here either. A bucket alone, of the square, is the square.
. "$(dirname "$0")/lib.sh"
RANDOM=${KILLS_SEED:=$((SECONDS + $$ % 30000))}
echo "# KILLS_SEED=$KILLS_SEED"
tar=$MICRO/sizes/sizes-00000.tar
items=$(tar -tf "$tar" | grep -c '\.png$')

# variant NAME [SED...]: from here on runs are of buckets.toml, so edited, with references of their own.
variant() {
    local name=$1
    shift
    export E2E_REFERENCE=$T/reference.$name
    LONG_RUN_STEPS=0 # nobody shares them: each is as long as it is needed
    mkdir -p "$E2E_REFERENCE"
    TINY=$T/$name.toml
    sed -e "s#\"made/#\"$MICRO/#" -e 's/^name = .*/name = "tiny"/' "$@" "$e2e_root/examples/micro/buckets.toml" >"$TINY"
}
plan_of() { jq -r "$2" "$1/plan.json"; }
ledger_is_right() { # RUN STEPS [RANKS]
    head -c $((64 * $2)) "$1/ledger" >"$T/ledger"
    "$e2e_build/tests/chaos/ledger_check" --steps "$2" --batch "$(plan_of "$1" .batch)" --tar "$tar" --seed 11 \
        --buckets "$(plan_of "$1" .buckets)" --ranks "$(plan_of "$1" '.instances.trainer')" \
        --micro "$(plan_of "$1" .micro_batch)" "$T/ledger"
}
# killed NAME VICTIM...: a run whose processes die in this order, at random moments.
killed() {
    local name=$1 run=$T/$1 v
    shift
    train "$run"
    wait_step "$run" 1 || fail "$name: the run starts" "$(tail -n 3 "$run.out" | tr '\n' ' ')"
    for v in "$@"; do
        wait_step "$run" $(($(step_of "$run") + 1 + RANDOM % 6)) || break
        sleep "0.$(printf %03d $((RANDOM % 60)))"
        kill_role "$run" "${v%.*}" "${v#*.}" && echo "# $name: killed $v at step $(step_of "$run")"
    done
    settle_same "$name" "$run"
    check "$name: every item once in an epoch, in its bucket" ledger_is_right "$run" "$stopped_at"
    check "$name: verify says so too" sh -c "'$LGSUP' verify '$run' | grep -q 'to $stopped_at, every item once in an epoch, in its bucket'"
}

variant two-ranks
killed two-ranks loader.0 vae.0 trainer.0 trainer.1 text.1 ckpt.0 ema.0 keeper.0
check "several shapes were trained on" test "$(grep -c 'bucket .* items' "$T/two-ranks/logs/loader.0.log")" -ge 4
# Buckets that hold fewer samples in a micro-batch, and two micro-batches a step, of two shapes.
variant rows -e 's/^buckets = .*/buckets = ["16x16", "24x24", "32x32", "16x32", "12x20"]/' -e 's/^micro_batch_size = .*/micro_batch_size = 4/'
killed rows trainer.1 vae.0 loader.0 vae.1 trainer.0
expect "rows of each" "12x20*4,16x16*4,16x32*2,24x24*1,32x32*1" "$(plan_of "$T/rows" .buckets)"
variant one-rank -e 's/^ranks = .*/ranks = 1/' -e 's/^micro_batch_size = .*/micro_batch_size = 4/'
[ -z "${CHECK_ALL:-}" ] || killed one-rank trainer.0 loader.0 vae.0 trainer.0 ema.0

# Who encodes, and what is cut, gathered, recomputed or offloaded, decides nothing.
variant two-ranks
N=40
reference $N
for set in "vae.instances=3 loader.instances=2 text.instances=1" "parallel.zero=0" "parallel.zero=2 memory.recompute=norms" \
    "parallel.zero=3 memory.offload_activations=true" "parallel.zero=3 memory.recompute=budget:1MiB" \
    "parallel.zero=3 memory.offload_optimizer=true"; do
    run=$T/mode.${set//[^a-z0-9=]/-}
    tiny "$run" $(printf -- '--set %s ' $set) --set trainer.max_steps=$N --set checkpoint.every=20
    expect "$set" 0 $?
    check "$set: the same bytes" same_files "$reference" "$run" $N
done

# A restart reads no picture's beginning twice; a remembered list that is damaged, or of other pictures, is made again.
run=$T/again
tiny "$run" --set trainer.max_steps=20
printf 'x' | dd of="$run/sizes" bs=1 seek=50 conv=notrunc 2>/dev/null
cp "$run/sizes" "$T/damaged"
tiny "$run" --set trainer.max_steps=$N
expect "with a damaged list of sizes it goes on" 0 $?
check "to the same bytes" same_files "$reference" "$run" $N
check "and the list is whole again" sh -c "! cmp -s '$run/sizes' '$T/damaged'"

# Sizes, ranks and micro-batches decide which item comes when: a run goes on with others only if told so.
run=$T/other
tiny "$run" --set trainer.max_steps=20
tiny "$T/more" --set trainer.max_steps=$N --set trainer.resume_from="$(checkpoint_of "$run" 20)" --set trainer.micro_batch_size=4 \
    --set 'trainer.resume_changes=["trainer.micro_batch_size"]'
expect "other micro-batches are another order of samples" 10 $?
check "which is said" grep -q 'trainer.micro_batch_size decide the order of samples' "$T/more.out"
rm -rf "$T/more"
tiny "$T/more" --set trainer.max_steps=$N --set trainer.resume_from="$(checkpoint_of "$run" 20)" --set trainer.micro_batch_size=4 \
    --set 'trainer.resume_changes=["trainer.micro_batch_size"]' --set data.allow_changed=true
expect "allowed, an epoch begins" 0 $?
check "and verify looks at that" sh -c "'$LGSUP' verify '$T/more' | grep -q 'steps 20 to $N, every item once'"

# One bucket, of the square, is the square; as far as the first epoch's whole groups go.
variant square -e '/^buckets = /d'
steps=$((items / 16))
tiny "$T/square" --set trainer.max_steps=$steps
tiny "$T/alone" --set 'data.buckets=["16x16"]' --set trainer.max_steps=$steps
expect "a bucket of the square alone" 0 $?
check "gives the square's bytes" same_files "$T/square" "$T/alone" $steps
check "and ledger, but for the lineage" cmp <(od -An -v -tx8 -w64 "$T/square/ledger" | awk '{print $1,$2,$3,$4,$5,$6}') \
    <(od -An -v -tx8 -w64 "$T/alone/ledger" | awk '{print $1,$2,$3,$4,$5,$6}')

# Places that stay empty weigh nothing: five pictures in eight places are those five.
mkdir "$T/five"
tar -xf "$MICRO/data/micro-00000.tar" -C "$T/five" 00000.png 00000.txt 00001.png 00001.txt 00002.png 00002.txt 00003.png 00003.txt 00004.png 00004.txt
variant five -e 's/^ranks = .*/ranks = 1/' -e '/^buckets = /d'
five=(--set data.path="$T/five" --set trainer.max_steps=1)
tiny "$T/five-of-five" "${five[@]}" --set trainer.global_batch_size=5 --set trainer.micro_batch_size=5
tiny "$T/five-of-eight" "${five[@]}" --set trainer.global_batch_size=8 --set 'data.buckets=["16x16"]'
same_step() { # RUN RUN: loss and norm, but for the order of sums
    paste <(jq -r '"\(.loss) \(.grad_norm) \(.voids)"' "$1/metrics.jsonl") <(jq -r '"\(.loss) \(.grad_norm) \(.voids)"' "$2/metrics.jsonl") |
        awk 'function far(a, b) { return (a - b > 0 ? a - b : b - a) > 1e-5 * a }
            NF != 6 || $3 != 0 || $6 != 0 || !($1 > 0) || far($1, $4) || far($2, $5) { print; bad = 1 } END { exit bad || NR != 1 }'
}
check "empty places weigh nothing and are no voids" same_step "$T/five-of-five" "$T/five-of-eight"

# Captions in a metadata.csv are those of .txt.
as_csv() { # FOLDER OF .TXT: its captions as CSV
    echo file_name,text
    for f in "$1"/*.txt; do
        printf '%s.png,"%s"\r\n' "$(basename "$f" .txt)" "$(sed 's/"/""/g' "$f")"
    done
}
mkdir "$T/five-csv"
cp "$T"/five/*.png "$T/five-csv"
as_csv "$T/five" >"$T/five-csv/metadata.csv"
tiny "$T/five-of-txt" "${five[@]}" --set trainer.max_steps=4 --set trainer.global_batch_size=5 --set trainer.micro_batch_size=5
tiny "$T/five-of-csv" "${five[@]}" --set data.path="$T/five-csv" --set trainer.max_steps=4 --set trainer.global_batch_size=5 --set trainer.micro_batch_size=5
for run in five-of-txt five-of-csv; do jq -c '[.loss, .grad_norm, .voids]' "$T/$run/metrics.jsonl" >"$T/$run.loss"; done
check "four steps were made" test "$(wc -l <"$T/five-of-csv.loss")" = 4
check "a run with the captions of a metadata.csv is that with .txt" cmp "$T/five-of-txt.loss" "$T/five-of-csv.loss"

# Pictures that are damaged count as squares and are void; an empty one too. lgsup data names them, and copies.
variant broken
mkdir "$T/pictures"
tar -xf "$tar" -C "$T/pictures"
head -c 60 "$T/pictures/00003.png" >"$T/cut.png" && mv "$T/cut.png" "$T/pictures/00003.png"
: >"$T/pictures/00017.png"
cp "$T/pictures/00020.png" "$T/pictures/00021.png"
printf '%s ' a very long caption of many words that is cut >"$T/pictures/00030.txt"
rm "$T/pictures/00031.txt"
timeout 120 "$LGSUP" data "$TINY" --set data.path="$T/pictures" >"$T/data.out" 2>&1
expect "lgsup data" 0 $?
for say in "$items samples of pictures" '00003: PNG is cut off' '00017: picture is empty' '00021 is 00020' 'copies, byte for byte' \
    '1 have none, and would be trained with weight 0' 'are cut at text.length = 8' 'width: 12 to 48 pixels' '16 x 16' 'items are cropped to a neighbour'; do
    check "lgsup data says: $say" grep -q "$say" "$T/data.out"
done
mkdir "$T/pictures-csv"
cp "$T"/pictures/*.png "$T/pictures-csv"
as_csv "$T/pictures" >"$T/pictures-csv/metadata.csv"
timeout 120 "$LGSUP" data "$TINY" --set data.path="$T/pictures-csv" 2>&1 | sed "s,$T/pictures-csv,$T/pictures," >"$T/data-csv.out"
check "lgsup data says the same of captions in a metadata.csv" cmp "$T/data.out" "$T/data-csv.out"
touch "$T/pictures/scan.tiff"
timeout 120 "$LGSUP" data "$T/pictures" >"$T/data.out" 2>&1
expect "lgsup data of a folder" 0 $?
check "names what is left out" grep -q '^left out, files of other kinds: 1 (scan.tiff)$' "$T/data.out"
check "counts words" grep -q 'to 10 words' "$T/data.out"
timeout 120 "$LGSUP" data "$T/nothing" >"$T/data.out" 2>&1
expect "lgsup data of nothing" 3 $?
tiny "$T/broken" --set data.path="$T/pictures" --set trainer.max_steps=20
expect "a run with two broken pictures" 0 $?
check "has voids" test "$(jq -s 'map(.voids) | add' "$T/broken/metrics.jsonl")" -ge 2
check "and verifies" sh -c "'$LGSUP' verify '$T/broken' | grep -q 'every item once'"

# What is remembered of a picture is of its shape: a black wide one has the bytes of a black tall one.
mkdir "$T/black"
base64 -d >"$T/black/wide.png" <<<iVBORw0KGgoAAAANSUhEUgAAABgAAAAMCAAAAABdWyKpAAAADUlEQVR42mNgGAXEAgABLAAB2NTUPgAAAABJRU5ErkJggg==
base64 -d >"$T/black/tall.png" <<<iVBORw0KGgoAAAANSUhEUgAAAAwAAAAYCAAAAADrWUO2AAAADUlEQVR42mNgGAXkAAABOAABQY5HBQAAAABJRU5ErkJggg==
for i in {1..16}; do # as many as a bucket of its own needs
    for shape in wide tall; do
        cp "$T/black/$shape.png" "$T/black/$shape$i.png"
        cp "$T/pictures/00001.txt" "$T/black/$shape$i.txt"
    done
done
rm "$T/black/wide.png" "$T/black/tall.png"
for memo in 0 4MiB; do
    tiny "$T/memo-$memo" --set data.path="$T/black" --set 'data.buckets=["12x24","16x16","24x12"]' --set trainer.max_steps=20 \
        --set data.flip=false --set vae.instances=1 --set vae.memo=$memo --set text.memo=$memo --set checkpoint.every=10
    expect "memo of $memo" 0 $?
done
check "pictures were remembered" grep -Eq '[1-9][0-9]* of [0-9]+ pictures were remembered' "$T/memo-4MiB/logs/vae.0.log"
check "of two shapes" grep -q 'bucket 12x24: 16 items' "$T/memo-4MiB/logs/loader.0.log"
check "of what shape, too" same_files "$T/memo-0" "$T/memo-4MiB" 20

# What cannot be is refused by name.
variant refused
refuses() { # NAME TEXT SET...
    local name=$1 text=$2
    shift 2
    timeout 60 "$LGSUP" check "$TINY" $(printf -- '--set %s ' "$@") >"$T/refused.out" 2>&1
    expect "$name: refused" 3 $?
    check "$name: says why" grep -q "$text" "$T/refused.out"
}
refuses "DiT" 'model.kind = "dit", which is defined for squares only' model.kind=dit
refuses "more ranks than rows" '8x32 with parallel.sp = 8, which is more than the 2 rows of patches' 'data.buckets=["8x32","32x32"]' \
    parallel.sp=8 trainer.ranks=8
refuses "a chunk across micro-batches" 'vae.chunk = 16 does not divide trainer.micro_batch_size = 8' vae.chunk=16
refuses "a side that is no multiple" '18x16: sides must be multiples of 4 pixels' 'data.buckets=["16x16","18x16"]'
refuses "pixart at this size" '"pixart" is a table for data.size = 256, 512 or 1024, not 16' data.buckets=pixart
check "check prints the shapes" sh -c "timeout 60 '$LGSUP' check '$TINY' | grep -q 'buckets of 9 shapes'"
check "nothing is left running" nothing_runs
