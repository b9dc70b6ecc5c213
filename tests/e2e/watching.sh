#!/bin/bash
# For those who watch: event files for TensorBoard with histograms, figures for Prometheus and previews, on a run that is
# left alone and on one in which lgsup, the drawing process and everything are killed.
. "$(dirname "$0")/lib.sh"
N=400 first=100
port=$((20000 + $$ % 12000))
options=(--set trainer.max_steps=$N --set checkpoint.every=$first --set checkpoint.keep=9 --set tensorboard.enabled=true
    --set tensorboard.histograms_every=$first
    --set sample.every=$first --set 'sample.captions=["red heart"]' --set sample.steps=1000) # long enough to be caught in the middle
tf_steps=$e2e_build/tests/e2e/tf_steps

# Every step once in the event files, whole.
events_are_whole() { # RUN LAST
    local got
    got=$("$tf_steps" scalars "$1"/tensorboard/events.out.tfevents.*) || return 1
    diff <(sort -n <<<"$got") <(seq 1 "$2") >/dev/null || { echo "steps: $(tr '\n' ' ' <<<"$got")"; return 1; }
}
# Steps of the checkpoints (none is removed here) and of the previews. A checkpoint is left out while the
# one before it is still written, so only the first and the last are certain.
checkpoints_of() { ls "$1/checkpoints" | sed -n 's/^tiny_step//p' | sort -n | tr '\n' ' '; }
previews_of() { ls "$1/samples" | sed -n 's/^step\([0-9]*\)\.png$/\1/p' | sort -n | tr '\n' ' '; }
pictures_of() { "$tf_steps" pictures "$1"/tensorboard/events.out.tfevents.* | tr '\n' ' '; }
# What was counted, and what stands in the event files of it.
counted_of() { ls "$1/histograms" | sed -n 's/^step\([0-9]*\)\.json$/\1/p' | sort -n | tr '\n' ' '; }
histograms_of() { "$tf_steps" histograms "$1"/tensorboard/events.out.tfevents.* | tr '\n' ' '; }
same_histograms() { # the first and the last, that both have
    cmp "$1/histograms/step$first.json" "$2/histograms/step$first.json" && cmp "$1/histograms/step$N.json" "$2/histograms/step$N.json"
}
same_previews() { # those that both have
    local s n=0
    for s in $(previews_of "$1"); do
        [ -e "$2/samples/step$s.png" ] || continue
        cmp "$1/samples/step$s.png" "$2/samples/step$s.png" || return 1
        n=$((n + 1))
    done
    [ $n -ge 2 ]
}

# ---- left alone ----
a=$T/a
tiny "$a" "${options[@]}"
expect "a run with previews and event files" 0 $?
expect "a preview of every checkpoint" "$(checkpoints_of "$a")" "$(previews_of "$a")"
check "the first and the last among them" test -s "$a/samples/step$first.png" -a -s "$a/samples/step$N.png"
check "previews differ" test "$(cmp -s "$a/samples/step$first.png" "$a/samples/step$N.png"; echo $?)" -eq 1
check "event files: every step once" events_are_whole "$a" $N
expect "event files: every preview once" "$(previews_of "$a")" "$(pictures_of "$a")"
expect "histograms of every checkpoint" "$(checkpoints_of "$a")" "$(counted_of "$a")"
expect "event files: every histogram once" "$(counted_of "$a")" "$(histograms_of "$a")"
every_weight() { # all of them are counted, in as many groups as the model has
    local bytes counted
    bytes=$(($(stat -c %s "$a/checkpoints/tiny_step$N/ema/diffusion_pytorch_model.safetensors") / 4))
    counted=$(jq '[.histograms[].counts | add] | add' "$a/histograms/step$N.json")
    [ "$counted" -eq "$(jq '[.histograms[].count] | add' "$a/histograms/step$N.json")" ] &&
        [ "$counted" -le "$bytes" ] && [ $((bytes - counted)) -lt 4096 ] # the file's header
}
check "every weight is in a bucket" every_weight
expect "groups" 15 "$(jq '.histograms | length' "$a/histograms/step$N.json")"

# ---- killed ----
b=$T/b
tiny_in_background "$b" "${options[@]}" --set supervisor.prometheus_port=$port --set supervisor.hang_s=86400
sampler() { # its pid
    local p comm
    for p in $(e2e_pids "$b/"); do
        { read -r comm <"/proc/$p/comm"; } 2>/dev/null && [ "$comm" = lg-sample ] && echo "$p" && return
    done
}
is_drawing() { [ -n "$(sampler)" ]; }
# Stopped, so that it does not come to its end meanwhile; not before it has tied itself to lgsup, which it does
# before it opens its device.
catch() { p=$(sampler) && [ -n "$p" ] && grep -q liblg-host "/proc/$p/maps" 2>/dev/null && kill -STOP "$p"; }
nobody_draws() { ! is_drawing; }
scrape() { # into $T/metrics
    exec 3<>"/dev/tcp/127.0.0.1/$port" || return 1
    printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3
    timeout 60 cat <&3 >"$T/metrics"
    exec 3>&-
    grep -q '200 OK' "$T/metrics"
}
check "a first checkpoint" wait_until 600 test -e "$b/checkpoints/tiny_step$first"
kill_role "$b" trainer 0 STOP # so that what follows takes place before the end
check "a preview is being drawn" wait_until 600 catch
check "Prometheus: an answer while it trains" wait_until 120 scrape
check "Prometheus: every rank is up" sh -c "grep -c '^lg_process_up{role=\"trainer\",index=\"[01]\"} 1' '$T/metrics' | grep -qx 2"
check "Prometheus: the state" grep -qx 'lg_run_state{state="running"} 1' "$T/metrics"
kill -9 "$(sampler)"
check "a killed preview is told of" wait_until 120 grep -q 'preview of step [0-9]*: lg-sample: signal 9' "$b.out"
check "and drawn again" wait_until 120 catch
kill_role "$b" lgsup 0
check "the drawing process ends with lgsup" wait_until 120 nobody_draws
tiny_in_background "$b" "${options[@]}" --set supervisor.prometheus_port=$port --set supervisor.hang_s=86400
check "Prometheus: an answer of the next lgsup" wait_until 120 scrape
kill_the_rest() { # lgsup may have started somebody meanwhile
    nothing_runs && return 0
    kill -9 $(e2e_pids "$T") 2>/dev/null
    return 1
}
check "everything is dead" wait_until 120 kill_the_rest
at=$(wc -l <"$b/metrics.jsonl")
tiny "$b" "${options[@]}"
expect "resumed after step $at: completes" 0 $?
check "event files: every step once after all deaths" events_are_whole "$b" $N
expect "a preview of every checkpoint after all deaths" "$(checkpoints_of "$b")" "$(previews_of "$b")"
expect "event files: every preview once after all deaths" "$(previews_of "$b")" "$(pictures_of "$b")"
expect "histograms of every checkpoint after all deaths" "$(checkpoints_of "$b")" "$(counted_of "$b")"
expect "event files: every histogram once after all deaths" "$(counted_of "$b")" "$(histograms_of "$b")"
check "the same histograms" same_histograms "$a" "$b"
check "the same previews" same_previews "$a" "$b"
check "byte-identical to the run left alone" same_files "$a" "$b" $N
check "nothing is left running" nothing_runs
