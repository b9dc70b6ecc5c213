#!/bin/bash
# examples/slurm/train.sbatch under a real Slurm (Debian: slurmctld slurmd slurm-client munge) on pretended hosts: h0 has
# slurmctld, h1 to h3 are nodes. A node is lost; the time limit comes, the job is queued again and goes on. As root.
#
# usage: tests/slurm/run.sh [BUILD]       exit code 77 and a line "skip ..." where that cannot be had
. "$(dirname "$0")/../e2e/lib.sh"
for program in slurmctld slurmd sbatch munged; do
    command -v $program >/dev/null || { skip "Slurm" "no $program (apt install slurmctld slurmd slurm-client munge)"; exit 77; }
done
[ "$(id -u)" -eq 0 ] || { skip "Slurm" "needs root"; exit 77; }
. "$(dirname "$0")/../e2e/hosts_lib.sh"
export SLURM_CONF=$T/slurm.conf
nodes=3

conf() {
    cat <<-C
	ClusterName=pretended
	SlurmctldHost=h0(10.77.0.1)
	SlurmUser=root
	AuthType=auth/munge
	AuthInfo=socket=/run/munge/socket,cred_expire=5
	CredType=cred/munge
	StateSaveLocation=$T/state
	SlurmdSpoolDir=$T/%n/spool
	SlurmctldPidFile=/run/slurmctld.pid
	SlurmdPidFile=/run/slurmd.pid
	SlurmctldLogFile=$T/slurmctld.log
	SlurmdLogFile=$T/%n.slurmd.log
	ProctrackType=proctrack/linuxproc
	TaskPlugin=task/none
	JobAcctGatherType=jobacct_gather/none
	AccountingStorageType=accounting_storage/none
	MpiDefault=none
	SchedulerType=sched/backfill
	SchedulerParameters=sched_interval=2,bf_interval=2
	SelectType=select/linear
	SwitchType=switch/none
	SlurmdTimeout=10
	KillWait=10
	InactiveLimit=0
	MessageTimeout=5
	TCPTimeout=2
	ReturnToService=2
	RebootProgram=/bin/false
	PropagateResourceLimits=NONE
	NodeName=h[1-$nodes] NodeAddr=10.77.0.[2-$((nodes + 1))] CPUs=2 RealMemory=1000 State=UNKNOWN
	PartitionName=all Nodes=h[1-$nodes] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
	C
}
daemons() { # I: munged, and slurmctld on h0, slurmd elsewhere
    "$HOSTS" exec "$1" bash -c '
        mkdir -p /run/munge '"$T"'/h'"$1"'/spool && chmod 755 /run/munge && chmod 700 '"$T"'/h'"$1"'
        munged --force --key-file='"$T"'/munge.key --log-file='"$T"'/h'"$1"'.munge.log --pid-file=/run/munge/pid \
            --seed-file='"$T"'/h'"$1"'.seed --socket=/run/munge/socket --num-threads=2 || exit 1
        if [ $HOSTNAME = h0 ]; then slurmctld -c; else slurmd -N $HOSTNAME; fi' </dev/null >>"$T/daemons.out" 2>&1
}
slurm() { "$HOSTS" exec 0 "$@"; }
all_idle() { [ "$(slurm sinfo -h -N -o %T | grep -c '^idle$')" -eq $nodes ]; }
job_is() { [ "$(slurm squeue -h -j "$job" -o %T)" = "$1" ]; }
job_says() { grep -qE "$1" "$T/job.out"; }
newest_step() { cat "$T"/run/place*/metrics.jsonl 2>/dev/null | sed -n 's/^{"step": *\([0-9]*\),.*/\1/p' | sort -n | tail -n 1; }
trains_beyond() { [ "$(newest_step)" -gt "$1" ] 2>/dev/null; }

mkdir -p "$T/state"
conf >"$SLURM_CONF"
dd if=/dev/urandom of="$T/munge.key" bs=1024 count=1 status=none
chmod 400 "$T/munge.key"
"$HOSTS" up $((nodes + 1)) || { fail "pretended hosts"; exit 1; }
for ((i = 0; i <= nodes; i++)); do daemons $i || fail "daemons of host $i" "$(tail -n 3 "$T/daemons.out")"; done
check "Slurm has $nodes nodes" wait_until 60 all_idle
[ $e2e_failed -eq 0 ] || exit 1

"$LGSUP" keys "$T/cluster.key" >/dev/null
{
    sed "s|\"\.\./\.\./|\"$e2e_root/|; s/^ranks = 2/ranks = 1/; s/^max_steps = .*/max_steps = 1000000/; s/^keep = .*/keep = 100/; s/^instances = 2/instances = 1/" "$TINY"
    printf '[hosts]\ncount = 2\nspare = 1\nkey = "cluster.key"\nshared = "shared"\nsilence_ms = 1500\n'
} >"$T/pipeline.toml"
# How many minutes it may take, and how long before Slurm sends the signal: Slurm looks at limits every 30 s or so.
job=$(RUN=$T/run LGSUP=$LGSUP slurm sbatch --parsable --time=2 --signal=B:HUP@45 --output="$T/job.out" \
    "$e2e_root/examples/slurm/train.sbatch" "$T/pipeline.toml")
check "the job trains" wait_until 90 trains_beyond 30
[ $e2e_failed -eq 0 ] || tail -n 20 "$T/job.out"

# The second node, which is no batch node and not the spare.
at=$(newest_step)
"$HOSTS" off 2
check "the spare takes the lost node's number" wait_until 60 job_says "host 1 of 2, from step [1-9]"
check "and they go on" wait_until 60 trains_beyond $((at + 20))
"$HOSTS" on 2
daemons 2

check "before the limit it stops, with a checkpoint" wait_until 180 job_says "stopped at step|: stopped"
check "and is queued again" wait_until 120 job_says "resuming tiny at step [1-9]|from step [1-9][0-9]*$"
resumed() { [ "$(slurm scontrol show job "$job" | sed -n 's/.*Restarts=\([0-9]*\).*/\1/p')" -ge 1 ]; }
check "Slurm counts a restart" resumed
check "it runs again" wait_until 120 job_is RUNNING
at=$(newest_step)
check "and goes on from there" wait_until 120 trains_beyond $((at + 20))
slurm scancel "$job"
check "scancel ends it" wait_until 90 nothing_runs
[ $e2e_failed -eq 0 ] || { tail -n 40 "$T/job.out" "$T/slurmctld.log"; }
