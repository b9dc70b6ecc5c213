#!/bin/bash
# Pretend hosts h0 .. hN-1 (10.77.0.1 ..) on one Linux machine: each is a process with a network, UTS, mount, IPC and pid
# namespace of its own, hence with its own name, /proc, /sys, /run, /dev/shm and boot id. Killing that process ends all that
# runs there. They meet at a bridge in a namespace of its own; nothing of the machine itself is configured. The file
# system is shared but for /run and /dev/shm.
#
#   hosts.sh up N            make them
#   hosts.sh exec I CMD ...  on host I, in the present directory
#   hosts.sh pid I           of its first process, as seen from outside
#   hosts.sh cut I [J]       nothing passes from and to I (between I and J); the link stays up
#   hosts.sh cut1 I J        nothing passes from I to J, the other way everything
#   hosts.sh heal            all passes again
#   hosts.sh off I           loss of power: cut, then killed, so that no connection is closed
#   hosts.sh on I            starts again, with a new boot id
#   hosts.sh down            removes all
#   hosts.sh able            exit code 0: this kernel and user can do it
#
# HOSTS_DIR: where their state lies. As root, or within `unshare -Ur --mount --pid --fork --mount-proc`.
set -u
dir=${HOSTS_DIR:-/tmp/lg-hosts}
net=10.77.0

die() {
    echo "hosts.sh: $*" >&2
    exit 1
}
pid_of() { cat "$dir/$1.pid" 2>/dev/null; }
at_bridge() { nsenter -t "$(pid_of bridge)" -n "$@"; }
appears() { # FILE
    for _ in $(seq 500); do
        [ -s "$1" ] && return 0
        sleep 0.01
    done
    die "$1 has not appeared in 5 s"
}
gone() { # PID
    for _ in $(seq 500); do
        [ -d "/proc/$1" ] || return 0
        sleep 0.01
    done
    die "process $1 is still there after 5 s"
}

# The first process of a host. Its pid is read before /proc is mounted anew; /sys shows the network namespace it was
# mounted in. Orphans are reaped by bash.
first='
read -r pid _ </proc/self/stat
mount -t proc proc /proc && hostname "$NAME" || exit 1
for d in /run /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $d || exit 1; done
mkdir -p "$PLACE/cgroup" && mount --rbind /sys/fs/cgroup "$PLACE/cgroup" 2>/dev/null
mount -t sysfs sysfs /sys 2>/dev/null && mount --rbind "$PLACE/cgroup" /sys/fs/cgroup
cat /proc/sys/kernel/random/uuid >"$PLACE/boot_id"
mount --bind "$PLACE/boot_id" /proc/sys/kernel/random/boot_id || exit 1
mount --bind "$PLACE/../etc_hosts" /etc/hosts
ip link set lo up
echo $pid >"$PLACE.pid.new" && mv "$PLACE.pid.new" "$PLACE.pid"
trap : TERM INT HUP
while :; do sleep 1000 & wait $!; done'

boot() { # I
    local name=h$1 pid
    rm -f "$dir/$name.pid"
    mkdir -p "$dir/$name"
    NAME=$name PLACE=$dir/$name setsid unshare --net --uts --mount --ipc --pid --fork \
        --propagation private bash -c "$first" </dev/null >"$dir/$name/log" 2>&1 &
    appears "$dir/$name.pid"
    pid=$(pid_of "$name")
    at_bridge ip link add "p$1" type veth peer name eth0 netns "$pid" || die "no veth"
    at_bridge ip link set "p$1" master br0 up
    at_bridge tc qdisc add dev "p$1" clsact || die "no clsact"
    nsenter -t "$pid" -n ip link set eth0 up
    nsenter -t "$pid" -n ip addr add "$net.$(($1 + 1))/24" dev eth0
}

up() { # N
    [ -e "$dir/n" ] && die "$dir is in use: down first"
    mkdir -p "$dir" || exit 1
    echo "$1" >"$dir/n"
    echo 127.0.0.1 localhost >"$dir/etc_hosts"
    for ((i = 0; i < $1; i++)); do echo "$net.$((i + 1)) h$i" >>"$dir/etc_hosts"; done
    PLACE=$dir/bridge setsid unshare --net --fork bash -c '
        read -r pid _ </proc/self/stat
        echo $pid >"$PLACE.pid.new" && mv "$PLACE.pid.new" "$PLACE.pid"
        trap : TERM INT HUP
        while :; do sleep 1000 & wait $!; done' </dev/null >/dev/null 2>&1 &
    appears "$dir/bridge.pid"
    at_bridge ip link add br0 type bridge forward_delay 0 stp_state 0 || die "no bridge"
    at_bridge ip link set br0 up
    for ((i = 0; i < $1; i++)); do boot $i; done
}

down() {
    local pid
    [ -e "$dir/n" ] || return 0
    for name in "$dir"/*.pid; do
        pid=$(cat "$name" 2>/dev/null) && [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && gone "$pid"
    done
    rm -rf --one-file-system "$dir" # no mount of a host is left: its namespace is gone
}

# Classic BPF at the bridge's port: ingress is what the host sends. 2 drops, 0 passes.
drop_all() { # I
    at_bridge tc filter add dev "p$1" ingress bpf da bytecode "1,6 0 0 2" &&
        at_bridge tc filter add dev "p$1" egress bpf da bytecode "1,6 0 0 2" || die "no tc bpf"
}
drop_to() { # FROM TO: IPv4 and ARP for that target
    local a=$(((10 << 24) + (77 << 16) + $2 + 1))
    at_bridge tc filter add dev "p$1" ingress bpf da bytecode \
        "9,40 0 0 12,21 0 2 2048,32 0 0 30,21 3 4 $a,21 0 3 2054,32 0 0 38,21 0 1 $a,6 0 0 2,6 0 0 0" || die "no tc bpf"
}
heal() {
    for ((i = 0; i < $(cat "$dir/n"); i++)); do
        at_bridge tc filter del dev "p$i" ingress 2>/dev/null
        at_bridge tc filter del dev "p$i" egress 2>/dev/null
    done
    return 0
}

command=${1:-}
[ $# -gt 0 ] && shift
case $command in
up) up "${1:?N}" ;;
down) down ;;
pid) pid_of "h$1" ;;
exec)
    pid=$(pid_of "h${1:?I}")
    [ -n "$pid" ] || die "no host $1"
    shift
    exec nsenter -t "$pid" -n -u -m -i -p -- bash -c 'cd "$1" && shift && exec "$@"' _ "$PWD" "$@"
    ;;
cut) if [ $# -eq 2 ]; then drop_to "$1" "$2" && drop_to "$2" "$1"; else drop_all "$1"; fi ;;
cut1) drop_to "$1" "$2" ;;
heal) heal ;;
off)
    drop_all "$1"
    pid=$(pid_of "h$1")
    kill -9 "$pid" && gone "$pid"
    ;;
on)
    at_bridge ip link del "p$1" 2>/dev/null
    boot "$1"
    ;;
able)
    unshare --net --uts --mount --ipc --pid --fork --propagation private bash -c '
        mount -t proc proc /proc && ip link add b0 type bridge && ip link add v0 type veth peer name v1 &&
        tc qdisc add dev v0 clsact && tc filter add dev v0 ingress bpf da bytecode "1,6 0 0 2"' >/dev/null 2>&1
    ;;
*)
    sed -n '2,/^set -u/p' "$0" | sed '$d;s/^# \{0,1\}//'
    exit 2
    ;;
esac
