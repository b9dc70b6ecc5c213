#!/bin/bash
# Plants the bugs of mutants.txt, one at a time, and says which the suite notices.
#
# usage: tests/mutants/run.sh BUILD [NAME ...]     (BUILD: an up-to-date build, which is copied)
#
# Works in BUILD-mutants: one copy of the tree per job (MUTANT_JOBS, default 1), results in
# BUILD-mutants/results/NAME. That one is caught is kept until the mutant, its file or the simulations change, so
# an interrupted run goes on where it was; any other verdict is looked for again. The report goes to
# BUILD-mutants/report.md; exit 1 when a mutant survives that is not marked "survives:".
#
# A mutant is caught by a test that fails, which without the mutant passes (looked at once in each run). A test that
# is not done after MUTANT_LIMIT_S (240) s has not failed: the next one is tried, and where none fails the verdict is
# "time limit". The test that docs/mutants.md names comes first, then the others, the quickest first
# (tests/durations), end-to-end scripts last.
set -u
build=${1:?usage: tests/mutants/run.sh BUILD [NAME ...]}
shift
only=" $* "
jobs=${MUTANT_JOBS:-1}
limit_s=${MUTANT_LIMIT_S:-240}
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
work=$root/$build-mutants
list=tests/mutants/mutants.txt
results=$work/results
mkdir -p "$results" || exit 1

names() { sed -n 's/^== //p' "$list"; }
# FIELD of mutant NAME: file, old, new, why, survives
field() {
    awk -v name="$1" -v want="$2" '
        /^== / { on = substr($0, 4) == name; line = 0; next }
        !on || /^#/ { next }
        { line++ }
        want == "file" && line == 1 { print }
        want == "old" && line == 2 { print substr($0, 2) }
        want == "new" && line == 3 { print substr($0, 2) }
        want == "why" && line == 4 { print }
        want == "survives" && /^survives:/ { print substr($0, 11) }' "$list"
}
# The programs and end-to-end scripts that have to notice.
tests_of_file() {
    case $1 in
    shm/data_set.* | config/data_set.*) echo data_set e2e:data ;;
    shm/window.*) echo sim_protocol window region sim_supervisor e2e:kills ;;
    shm/memo.*) echo memo ;;
    shm/region.* | shm/keeper.*) echo region keeper_store keep e2e:copies ;;
    shm/stamp.*) echo sim_protocol moments ckpt e2e:copies ;;
    stages/trainer/update.* | stages/trainer/state.* | stages/trainer/moments.* | stages/trainer/shards.*) echo moments shards ckpt e2e:kills e2e:adapter e2e:frozen8 e2e:badinput ;;
    stages/trainer/batch.* | stages/trainer/forward.* | stages/trainer/rank_memory.*) echo batch moments e2e:published e2e:buckets e2e:sd3 ;;
    stages/sample/draw.* | stages/sample/first_frame.*) echo draw ;;
    stages/sample/decode_noise.*) echo ltx_vae ;;
    stages/sample/pictures.*) echo pictures ;;
    stages/io/clip_write* | stages/io/av/clip_write* | stages/io/palette.*) echo clip_write pictures ;;
    stages/io/clip_* | stages/io/av/*) echo clip_read clip_times clip_source ;;
    stages/io/source_item.* | stages/io/source_sample.*) echo clip_source source samples ;;
    stages/nets/latte.* | stages/nets/ltx.*) echo clips sequence ;;
    supervisor/hosts/answers.*) echo hosts_answers e2e:hosts_seen ;;
    supervisor/commands/log_files.* | supervisor/commands/logs.*) echo hosts_answers e2e:hosts_seen ;;
    supervisor/commands/elsewhere.* | supervisor/commands/whole.*) echo hosts_status e2e:hosts_seen ;;
    supervisor/core/other_hosts.*) echo e2e:hosts_seen ;;
    supervisor/run/waiting.* | supervisor/commands/hosts.*) echo e2e:hosts_waiting ;;
    supervisor/hosts/*) echo sim_group hosts_channel ;;
    supervisor/views/tensorboard.*) echo tensorboard ;;
    config/sample.*) echo config ;;
    stages/trainer/exchange.*) echo moments ckpt e2e:resume ;;
    stages/stage.*) echo ckpt e2e:copies ;;
    supervisor/core/keep*) echo keep adopt sim_supervisor supervise_deaths supervise_adopt e2e:copies ;;
    supervisor/commands/park_resume.*) echo adopt e2e:park ;;
    supervisor/core/park.*) echo adopt supervise_adopt e2e:park e2e:copies ;;
    shm/scatter.*) echo sim_protocol gradients ;;
    shm/sequence.*) echo sim_protocol e2e:sequence ;;
    stages/trainer/gradients* | stages/trainer/ring.*) echo gradients e2e:cast_weights e2e:zero e2e:apart ;;
    stages/trainer/working.*) echo moments e2e:cast_weights e2e:zero e2e:offload_optimizer e2e:apart ;;
    stages/trainer/exchanges.* | stages/trainer/trainer.*) echo exchanges e2e:sequence e2e:apart e2e:video ;;
    stages/trainer/transfer.*) echo transfer moments e2e:offload_optimizer ;;
    config/output.* | config/plan.*) echo config plan e2e:resume e2e:adapter e2e:determinism ;;
    shm/board.*) echo sim_protocol board sim_supervisor window supervise supervise_deaths supervise_adopt e2e:lgsup_dies ;;
    shm/hosts.*) echo hosts_rules sim_hosts e2e:hosts ;;
    stages/exchange/ucx.*) echo transport_ucx e2e:hosts ;;
    stages/exchange/nccl.*) echo transport_nccl e2e:hosts ;;
    stages/exchange/*) echo exchanger sim_hosts transport_ucx e2e:hosts e2e:gpus ;;
    shm/commit.*) echo sim_protocol sim_hosts commit sim_supervisor e2e:kills ;;
    base/lifetimes.*) echo graph graph_recompute lent ;;
    stages/nets/sincos.*) echo denoiser_golden denoiser_shapes published clips sequence ;;
    stages/nets/latte.* | stages/nets/ltx.* | stages/nets/adaln.*) echo clips sequence ;;
    kernels/graph/grad.*) echo graph_grad graph_attention ;;
    kernels/graph/exchange.*) echo graph_exchange sequence ;;
    kernels/graph/fuse.*) echo graph_fuse ;;
    kernels/graph/recompute.*) echo graph_recompute denoiser_recompute ;;
    kernels/graph/offload.*) echo offload ;;
    stages/io/bpe*) echo bpe ;;
    stages/io/spiece_json.*) echo spiece_json ;;
    stages/io/caption.*) echo caption ;;
    stages/io/csv.*) echo csv source ;;
    stages/io/mixture.*) echo mixture e2e:sources ;;
    stages/io/source.* | stages/io/source_index.* | stages/io/source_parts.*) echo source clip_source samples e2e:sources ;;
    config/tokenizer_files.*) echo bpe config e2e:clip ;;
    config/rules* | config/models.*) echo config plan pretrained e2e:resume ;;
    stages/nets/clip.* | stages/nets/text_encoder.*) echo clip t5 text_storage ;;
    stages/text/*) echo e2e:sd3 ;;
    kernels/graph/*) echo graph graph_grad graph_attention graph_recompute t5 lent ;;
    kernels/op_check.*) echo ops_checks ;;
    kernels/streams.*) echo ops_host denoiser_golden ;;
    stages/nets/autoencoder* | stages/nets/video.* | stages/nets/tiles.*) echo ltx_vae autoencoder ;;
    stages/nets/denoiser_recompute.*) echo denoiser_recompute ;;
    stages/nets/denoiser.*) echo clips denoiser_recompute denoiser_shapes adapter sequence ;;
    stages/nets/adapter_file.*) echo adapter kohya e2e:unet ;;
    stages/nets/adapter* | stages/nets/linear.*) echo adapter kohya sequence denoiser_recompute ;;
    stages/nets/unet* | stages/nets/maps.* | config/unet.*) echo unet ;;
    config/denoisers.*) echo unet config ;;
    stages/nets/kohya*) echo kohya ;;
    stages/stored* | stages/nets/storage* | kernels/rows8*) echo storage rows8 ;;
    stages/nets/joint.*) echo denoiser_golden sequence ;;
    stages/nets/dit.*) echo params denoiser_golden ;;
    stages/nets/sd3.*) echo denoiser_shapes denoiser_golden ;;
    config/texts.*) echo config plan ;;
    stages/nets/objective.* | stages/nets/sampler.* | stages/nets/layers.* | stages/nets/pixart.*) echo published ops_ref denoiser_shapes sequence draw objective sampler ;;
    stages/nets/denoiser_file.*) echo unet pretrained e2e:published ;;
    stages/nets/weights.* | config/pretrained.*) echo pretrained e2e:published ;;
    supervisor/commands/memory*) echo memory e2e:gpus ;;
    supervisor/run/gpus.*) echo e2e:gpus e2e:apart ;;
    supervisor/core/launch_jobs.*) echo e2e:scale e2e:apart sim_supervisor ;;
    supervisor/commands/order.*) echo e2e:scale ;;
    supervisor/commands/check.*) echo check e2e:apart ;;
    supervisor/commands/export.*) echo e2e:published ;;
    kernels/ref64/diffusion.* | kernels/ref64/norm.*) echo ops_ref ops_fd ;;
    stages/nets/sequence.*) echo clips sequence ;;
    kernels/host/isa_clip.*) echo ltx_vae ops_host ;;
    kernels/host/isa_layout.*) echo ops_host long ;;
    kernels/host/isa_train.* | kernels/host/isa_norm.* | kernels/host/linear.*) echo ops_host long ;;
    kernels/adamw8.*) echo ops_ref ;;
    stages/nets/params.*) echo params moments ;;
    stages/ckpt/publish.* | stages/ckpt/retention.*) echo ckpt_files ckpt sim_disk e2e:hosts_files ;;
    stages/ckpt/checkpoint.*) echo ckpt_files ckpt ;;
    kernels/*) echo heartbeat ;;
    stages/stage_memory.*) echo heartbeat e2e:gpus ;;
    stages/io/picture*) echo picture_work picture sizes ;;
    stages/io/order.* | config/buckets.*) echo order buckets e2e:buckets ;;
    stages/io/fit.* | stages/io/resize* | stages/io/wide.*) echo samples sizes picture ;;
    stages/loader/* | stages/vae/*) echo e2e:buckets ;;
    stages/io/charsmap.* | stages/io/tokenizer*) echo tokenizer ;;
    base/json* | stages/io/safetensors_header.*) echo json safetensors ;;
    base/beneath.* | stages/io/source*) echo source sizes ;;
    base/pieces.*) echo pieces params ;;
    base/inherit.*) echo e2e:places ;;
    stages/ema/*) echo host_average e2e:offload_ema ;;
    base/printable.* | base/log.*) echo printable ;;
    base/* | config/* | stages/*) echo sim_disk heartbeat ckpt_files records data_set faults verify ckpt e2e:resume e2e:data ;;
    supervisor/run/run.* | supervisor/run/resume.*) echo run faults e2e:hosts_files ;;
    supervisor/run/child.*) echo run faults ;;
    supervisor/launch/fork.*) echo supervise_orders supervise_adopt e2e:unjoined e2e:swap ;;
    supervisor/run/lock.*) echo run stop e2e:unjoined ;;
    supervisor/run/signals.*) echo e2e:places ;;
    supervisor/run/folder.*) echo folder e2e:folder ;;
    supervisor/run/processes.*) echo former run ;;
    supervisor/core/former.*) echo former ;;
    supervisor/core/watch.*) echo watch sim_supervisor supervise supervise_deaths supervise_adopt e2e:hangs ;;
    supervisor/core/adopt.*) echo adopt sim_supervisor supervise_deaths supervise_adopt e2e:lgsup_dies ;;
    supervisor/core/sockets.* | supervisor/commands/start.*) echo sockets stop former supervise_blocked e2e:hosts_files ;;
    supervisor/core/launch_jobs.* | supervisor/launch/*) echo units_run ;;
    supervisor/views/top.*) echo screen e2e:hosts_seen ;;
    supervisor/views/notify.*) echo supervise_blocked units_run ;;
    systemd/*) echo units ;;
    supervisor/*) echo sim_supervisor restarts supervise supervise_deaths supervise_adopt supervise_orders keeper e2e:lgsup_dies ;;
    esac
}
# Of mutant $1 of file $2, in the order in which they are tried.
tests_of() {
    { sed -n "s/^| $1 |.*| \([a-z0-9_:]*\) |\$/0 \1/p" docs/mutants.md
      tests_of_file "$2" | tr ' ' '\n' | awk 'NR == FNR { s[$3] = $4; next }
          /^e2e:/ { print 1000 + NR, $0; next } { print 1 + s[$0], $0 }' <(grep '^unit build ' tests/durations) -
    } | sort -n -s -k1,1 | cut -d' ' -f2 | awk '!seen[$0]++'
}
key() { # what a result depends on
    { field "$1" file; field "$1" old; field "$1" new; cat "$(field "$1" file)" tests/unit/test_sim_*.c tests/unit/sim* tests/sim/*; } | cksum
}

prepare() { # SLOT: a copy of the tree with its objects, so that one file is compiled per mutant
    local to=$work/tree$1
    mkdir -p "$to"
    tar -c --exclude=./.git --exclude="./$build-*" --exclude="./$build/tests/test_*" . | tar -x -C "$to" || return 1
}

# Replaces the one line; fails when it is not there exactly once.
plant() { # TREE NAME
    local file=$1/$2
    field "$3" old >"$1/.old"
    field "$3" new >"$1/.new"
    awk -v old_file="$1/.old" -v new_file="$1/.new" '
        BEGIN { getline old < old_file; getline new < new_file }
        $0 == old { n++; if (n == 1) { print new; next } }
        { print }
        END { exit n == 1 ? 0 : 1 }' "$root/$2" >"$file.mutant" || { rm -f "$file.mutant"; return 1; }
    mv "$file.mutant" "$file"
}

make_test() { # TREE TEST FILE LOG
    local target=$build/tests/test_$2
    case $3 in kernels/host/* | kernels/ref64/* | kernels/streams.*) target="all $target" ;; esac # which programs open by name
    case $2 in e2e:*) target="all e2e-programs chaos-programs example-data micro-data" ;; esac
    (cd "$1" && env -u MAKEFLAGS -u MAKELEVEL make -s BUILD="$build" WARN=-w CWARN=-w $target) >"$4" 2>&1
}
run_one_test() { # TREE TEST LOG: 0 passes, 124 or 137 was not done in time
    case $2 in
    e2e:*) (cd "$1" && E2E_FIRST=1 timeout -k 10 "$limit_s" "tests/e2e/${2#e2e:}.sh" "$build") >"$3" 2>&1 || return
        ! grep -q '^FAIL ' "$3" ;;
    *)
        local folder group code
        folder=$(mktemp -d /tmp/lgm.XXXXXX) && chmod 711 "$folder" || return
        (cd "$1" && TMPDIR=$folder XDG_RUNTIME_DIR=$folder exec timeout -k 5 "$limit_s" "$build/tests/test_$2") >"$3" 2>&1 &
        group=$! # which timeout makes of itself
        while kill -0 $group 2>/dev/null && ! grep -qa '^\[  FAILED  \]' "$3"; do sleep 0.1; done
        kill -9 -- -$group 2>/dev/null # what has failed already goes no further
        wait $group
        code=$?
        find /proc/[0-9]*/exe -lname "$1/*" 2>/dev/null | cut -d/ -f3 | xargs -r kill -9 2>/dev/null # whom it has left
        rm -rf "$folder"
        if grep -qa '^\[  FAILED  \]' "$3"; then return 1; fi
        return $code
        ;;
    esac
}
# Does the test pass in the tree as it is, without a mutant? It has to come to its end for that.
is_sound() { # TREE TEST FILE
    local limit_s=$((4 * limit_s))
    local said=$sound/${1##*/}.${2//:/_}
    [ -e "$said" ] || {
        make_test "$1" "$2" "$3" "$said.log" && run_one_test "$1" "$2" "$said.log" && echo yes || echo no
    } >"$said"
    grep -q yes "$said"
}
what_failed() { # LOG
    { grep -a '^FAIL ' "$1" || cat "$1"; } | grep -aE 'replay with|, fault [0-9]+: |^ERROR: |assertion failed|^FAIL |cut at|MISSED|^\[  FAILED  \] [a-z]' | head -1 | tr '|\t' '  ' | cut -c1-110
}

try() { # TREE NAME -> verdict on stdout
    local tree=$1 name=$2 file t log=$1/mutant.log
    file=$(field "$name" file)
    plant "$tree" "$file" "$name" || { echo "stale|the line is not there exactly once"; cp "$root/$file" "$tree/$file"; return; }
    local verdict="survived|" caught_by=
    for t in $(tests_of "$name" "$file"); do
        case $t in e2e:*) ;; *) [ -f "tests/unit/test_$t.c" ] || continue ;; esac
        if ! make_test "$tree" "$t" "$file" "$log"; then
            verdict="does not build|$(grep -m1 error "$log" | tr '|' ' ' | cut -c1-110)"
            break
        fi
        run_one_test "$tree" "$t" "$log"
        case $? in
        0) ;;
        124 | 137) verdict="time limit|$t: not done after $limit_s s" ;;
        *) caught_by=$t verdict="caught|$t: $(what_failed "$log")"; break ;;
        esac
    done
    cp "$root/$file" "$tree/$file" # a new time: the next make compiles it again
    [ -z "$caught_by" ] || is_sound "$tree" "$caught_by" "$file" || verdict="unsound|$caught_by fails without the mutant, too"
    echo "$verdict"
}

job() { # SLOT
    local name now
    prepare "$1" || { echo "cannot copy the tree"; return 1; }
    for name in $(names); do
        case "$only" in "  " | *" $name "*) ;; *) continue ;; esac
        now=$(key "$name")
        [ "$(head -1 "$results/$name" 2>/dev/null)" = "$now" ] && continue
        mkdir "$results/$name.lock" 2>/dev/null || continue
        local verdict
        verdict=$(try "$work/tree$1" "$name")
        printf '%s\n%s\n' "$now" "$verdict" >"$results/$name"
        rmdir "$results/$name.lock"
        printf '  %-9s %-24s %s\n' "${verdict%%|*}" "$name" "${verdict#*|}"
    done
}

report() {
    local name verdict caught=0 all=0
    for name in $(names); do
        verdict=$(sed -n 2p "$results/$name" 2>/dev/null)
        all=$((all + 1))
        case $verdict in caught*) caught=$((caught + 1)) ;; esac
    done
    echo "# Planted bugs"
    echo
    echo "\`make mutants\` plants each line of tests/mutants/mutants.txt in a copy of the tree and runs the"
    echo "simulations, the unit tests of the module and an end-to-end script until one fails."
    echo
    echo "**$caught of $all are caught** (commit $(git rev-parse --short HEAD))."
    echo
    echo "| bug | file | why it is one | noticed by |"
    echo "|---|---|---|---|"
    for name in $(names); do
        verdict=$(sed -n 2p "$results/$name" 2>/dev/null)
        case $verdict in
        caught*) verdict=$(printf '%s' "${verdict#*|}" | sed 's/: .*//') ;;
        survived*) verdict="**survives**:$(field "$name" survives)" ;;
        "") verdict="not run" ;;
        *) verdict="**${verdict%%|*}**" ;;
        esac
        echo "| $name | $(field "$name" file) | $(field "$name" why) | $verdict |"
    done
}

rmdir "$results"/*.lock 2>/dev/null # of a run that was killed
grep -L '^caught' "$results"/* 2>/dev/null | xargs -r rm -f
sound=$work/sound
rm -rf "$sound" && mkdir "$sound" || exit 1
began=$SECONDS
for ((slot = 0; slot < jobs; slot++)); do job $slot & done
wait
report >"$work/report.md"
bad=0
for name in $(names); do
    verdict=$(sed -n 2p "$results/$name" 2>/dev/null)
    case $verdict in
    caught*) continue ;;
    survived*) [ -n "$(field "$name" survives)" ] && continue ;;
    esac
    case "$only" in "  " | *" $name "*) echo "not caught: $name (${verdict:-not run})" && bad=1 ;; esac
done
grep -E '^\*\*' "$work/report.md"
echo "$((SECONDS - began)) s; $work/report.md"
exit $bad
