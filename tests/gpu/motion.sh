#!/bin/bash
# Do clips go where their captions say? Draws the held-out captions that name a direction from a run of examples/emoji-video, and
# measures the way of the centre of mass (tests/e2e/clip_motion.c). Exits with 0 when at least four of five follow.
#
# usage: tests/gpu/motion.sh BUILD RUN CAPTIONS SIZE [lg-sample's options]
#   BUILD     the build folder, or a bundle with clip_motion in its bin
#   RUN       the run's folder (its newest checkpoint), or a checkpoint
#   CAPTIONS  data/held-out.txt; SIZE: pixels of a side
# Leaves the strips in RUN/motion.png. Any device will do; it is measured on a GPU, hence the folder.
set -eu
build=$1 run=$2 captions=$3 size=$4
shift 4
measure=$build/tests/e2e/clip_motion
[ -x "$measure" ] || measure=$build/bin/clip_motion
grep -E ' moves (left|right|up|down)$' "$captions" | head -64 >"$run/motion.txt"
mapfile -t lines <"$run/motion.txt"
"$build/bin/lgsup" sample "${lines[@]}" --from "$run" --columns 1 -o "$run/motion.png" "$@"
"$measure" "$run/motion.png" "$size" "$run/motion.txt"
