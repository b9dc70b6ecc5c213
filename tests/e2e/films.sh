#!/bin/bash
# A data set of films of every kind: what lgsup says of it, with a config and without; what a config asks of its clips.
. "$(dirname "$0")/lib.sh"
mkdir "$T/films"
n=0
for f in tests/fuzz/corpus/clip/*; do # six frames of 16 x 16, 25 a second
    kind=${f##*/*-}
    case $f in
    *-mp4-*) kind=mp4 ;;
    *-mov-*) kind=mov ;;
    *-matroska-*) kind=mkv ;;
    *-webm-*) kind=webm ;;
    esac
    cp "$f" "$T/films/$n.$kind"
    echo "film $n" >"$T/films/$n.txt"
    n=$((n + 1))
done
films=$n
head -c 600 "$(ls "$T"/films/*.mp4 | head -1)" >"$T/films/cut.mp4"
cp "$T/films/0.mp4" "$T/films/again.mp4" 2>/dev/null || cp "$(ls "$T"/films/*.mp4 | head -1)" "$T/films/again.mp4"
base64 -d >"$T/films/picture.png" <<<iVBORw0KGgoAAAANSUhEUgAAABgAAAAMCAAAAABdWyKpAAAADUlEQVR42mNgGAXEAgABLAAB2NTUPgAAAABJRU5ErkJggg==
says() { # FILE WHAT...
    local file=$1
    shift
    for say; do check "lgsup data says: $say" grep -q -- "$say" "$file"; done
}
clips=(--set "data.path=$T/films" --set model.kind=latte --set data.frames=5)

timeout 120 "$LGSUP" data "$T/films" >"$T/alone.out" 2>&1
expect "lgsup data of a folder" 0 $?
says "$T/alone.out" "$((films + 3)) samples of clips and pictures" 'cut: clip is damaged' "clips: $((films + 1)) of $((films + 3)) samples" \
    'frames: 6 to 6, median 6' 'frames a second: 25 to 25' 'byte for byte' 'again is'
timeout 120 "$LGSUP" data "$TINY" "${clips[@]}" --set data.fps=10 >"$T/short.out" 2>&1
expect "lgsup data for a config" 0 $?
says "$T/short.out" "$((films + 1)) clips are too short for 5 frames" '1 pictures, and no bucket of one frame'
timeout 120 "$LGSUP" data "$TINY" "${clips[@]}" --set 'data.buckets=["16x16", "3x16x16", "1x16x16"]' >"$T/buckets.out" 2>&1
expect "lgsup data with buckets" 0 $?
says "$T/buckets.out" "5 x   16 x 16   nearest to $((films + 1))" '    16 x 16   nearest to'
check "which has one for pictures" sh -c "! grep -q 'no bucket of one frame' '$T/buckets.out'"
check "lgsup check prints frames" sh -c "timeout 120 '$LGSUP' check '$TINY' $(printf -- "'%s' " "${clips[@]}") --set 'data.buckets=[\"16x16\", \"3x16x16\"]' 2>&1 | grep -q '3x16x16\*'"
