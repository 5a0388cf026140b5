#!/bin/bash
# cluster.sh -- several hosts on one machine, for MPI programs over a real network. Needs root.
#
#   dev/cluster.sh up N [--gbit G] [--us U]      make hosts h0 ... hN-1, joined by a switch. Each has a link that
#                                                carries G Gbit/s in each direction, and a message takes U
#                                                microseconds more from one host to another. Neither: unshaped
#   dev/cluster.sh run [-np P] [--per-host K] COMMAND...    mpirun COMMAND on P ranks, K on each host, h0 first
#                                                (K: 1, or what P needs; P: K on every host)
#   dev/cluster.sh status                        hosts, their links and how many processes run; exit status 1: none
#   dev/cluster.sh down                          end what runs on the hosts and remove them
#
#   dev/cluster.sh up 4 --gbit 10 && dev/cluster.sh run ./train_gpt --dp 2 --tp 2 ...; dev/cluster.sh down
#
# A host is a network namespace with a host name and its share of the cores; files and clock are shared. Ranks of
# different hosts reach each other by TCP alone, at 10.78.0.1 to 10.78.0.N, and count as ranks of several machines.
# Nothing is made outside the namespaces but a folder in /run for Open MPI's files; names hold FO_CLUSTER (fo): with
# another one there is another cluster, apart from this.
# Exit status 77: this machine lacks something (root, a command, namespaces, tbf or netem in its kernel); 2: usage.
set -uo pipefail
name=${FO_CLUSTER:-fo}
files=/run/cluster-$name
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
number='^[0-9]+([.][0-9]+)?$' count='^[1-9][0-9]{0,3}$' most=250

fail() { local status=$1; shift; echo "cluster.sh: $*" >&2; exit "$status"; }

# PACKAGE COMMAND...
need() {
    local package=$1 c; shift
    for c in "$@"; do
        command -v "$c" >/dev/null || fail 77 "needs the command '$c': install $package"
    done
}

need_root_and() {
    [[ $(id -u) == 0 ]] || fail 77 "needs root"
    need iproute2 ip "$@"
}

# WHAT COMMAND...: a step of up; one that fails ends it, with the reason in one line
try() {
    local what=$1 said; shift
    said=$("$@" 2>&1) || fail 77 "this machine can't $what: $* says: ${said%%$'\n'*}"
}

namespaces() { ip netns list 2>/dev/null | awk '{print $1}' | grep -xE "$name-(switch|h[0-9]+)"; }
hosts() { namespaces | grep -v -- "-switch$" | sort -V; }
# -lname net:[INODE] -o ...: how find knows their processes, even when the names are gone
marks() {
    local ns first=""
    for ns in $(namespaces); do
        printf '%s-lname\nnet:\\[%s\\]\n' "$first" "$(stat -Lc %i "/run/netns/$ns")"
        first=$'-o\n'
    done
}
# MARK...
processes() { [[ $# == 0 ]] || find /proc/[0-9]*/ns/net -maxdepth 0 \( "$@" \) 2>/dev/null | cut -d/ -f3; }

# SIGNAL SECONDS MARK...: to all that runs on the hosts, again and again until it has ended
end_processes() {
    local signal=$1 end=$((SECONDS + $2)) pids; shift 2
    while mapfile -t pids < <(processes "$@"); [[ ${#pids[@]} != 0 ]] && ((SECONDS <= end)); do
        kill "-$signal" "${pids[@]}" 2>/dev/null
        sleep 0.1
    done
}

remove() {
    local ns marks
    mapfile -t marks < <(marks)
    end_processes TERM 2 "${marks[@]}"
    # without the names nothing can enter: a run that was just starting, its daemons on the way, ends for good
    for ns in $(namespaces); do ip netns del "$ns"; done
    end_processes KILL 5 "${marks[@]}"
    rm -rf "$files"
}

# NAMESPACE DEVICE GBIT US: how fast and how late bytes leave through it; empty: as they come
shape() {
    local parent=(root) burst
    if [[ -n $4 ]]; then
        try "delay messages by $4 us (netem)" tc -n "$1" qdisc add dev "$2" "${parent[@]}" handle 1: \
            netem delay "$4us" limit 20000
        parent=(parent 1:1 handle 2:)
    fi
    if [[ -n $3 ]]; then
        # what a timer that is 100 us late must make up for, and no less than a whole segment, which would be cut
        burst=$(awk "BEGIN {b = $3 * 25000; print int(b > 80000 ? b : 80000)}")
        try "shape a link to $3 Gbit/s (tbf)" tc -n "$1" qdisc add dev "$2" "${parent[@]}" tbf rate "$3gbit" \
            burst "$burst" latency 20ms
    fi
}

up() {
    local n=${1:-} gbit="" us="" i ns marks
    [[ $n =~ $count && $n -le $most ]] || fail 2 "up '$n': want the number of hosts, 1 to $most"
    shift
    while [[ $# != 0 ]]; do
        [[ $1 == --gbit || $1 == --us ]] || fail 2 "up: unknown option '$1'; --gbit and --us are known"
        [[ ${2:-} =~ $number && ${2:-} =~ [1-9] ]] || fail 2 "$1 '${2:-}': want a number above 0"
        if [[ $1 == --gbit ]]; then gbit=$2; else us=$2; fi
        shift 2
    done
    need_root_and tc
    mapfile -t marks < <(marks)
    i=$(processes "${marks[@]}" | wc -w)
    ((i == 0)) || fail 1 "cluster '$name' is up and $i processes run on it: end them, or run: $0 down"
    remove
    trap remove EXIT
    trap 'exit 130' INT; trap 'exit 143' TERM HUP
    try "make a folder" mkdir -m 700 "$files"
    try "make network namespaces" ip netns add "$name-switch"
    try "make a bridge" ip -n "$name-switch" link add br0 type bridge
    try "start a bridge" ip -n "$name-switch" link set br0 up
    for ((i = 0; i < n; i++)); do
        ns=$name-h$i
        try "make network namespaces" ip netns add "$ns"
        try "make pairs of devices (veth)" ip -n "$ns" link add eth0 type veth peer name "h$i" netns "$name-switch"
        try "join a bridge" ip -n "$name-switch" link set "h$i" master br0 up
        try "set an address" ip -n "$ns" addr add "10.78.0.$((i + 1))/24" dev eth0
        try "start a device" ip -n "$ns" link set lo up
        try "start a device" ip -n "$ns" link set eth0 up
        # BBR, where it is the system's, estimates rate anew for each burst: some messages of 128 KiB took 25 ms, not 2
        try "choose TCP's congestion control" ip -n "$ns" route change 10.78.0.0/24 dev eth0 proto kernel \
            scope link src "10.78.0.$((i + 1))" congctl reno
        shape "$ns" eth0 "$gbit" "$us"
        shape "$name-switch" "h$i" "$gbit" ""
    done
    trap - EXIT
}

# the numbers of the cores that this process may use
cores() {
    awk '/^Cpus_allowed_list/ {gsub(",", "\n", $2); print $2}' /proc/self/status |
        while IFS=- read -r first last; do seq "$first" "${last:-$first}"; done
}

# I COMMAND...: becomes the command, on host i, which has its share of FO_CLUSTER_CORES
enter() {
    local i=$1 n c all list; shift
    n=$(hosts | wc -l)
    read -ra all <<<"$FO_CLUSTER_CORES"; c=${#all[@]}
    if ((c < n)); then
        list=${all[i % c]}
    else
        list=$(IFS=,; echo "${all[*]:i * c / n:(i + 1) * c / n - i * c / n}")
    fi
    # shellcheck disable=SC2016
    exec ip netns exec "$name-h$i" unshare --uts taskset -c "$list" sh -c 'hostname "$0" && exec "$@"' "h$i" "$@"
}

run() {
    local np="" per="" n i list=""
    while [[ ${1:-} == -* ]]; do
        [[ $1 == -np || $1 == --per-host ]] || fail 2 "run: unknown option '$1'; -np and --per-host are known"
        [[ ${2:-} =~ $count ]] || fail 2 "$1 '${2:-}': want a whole number, 1 to 9999"
        if [[ $1 == -np ]]; then np=$2; else per=$2; fi
        shift 2
    done
    [[ $# != 0 ]] || fail 2 "run: want a command to run"
    need_root_and
    need util-linux unshare taskset
    need openmpi-bin mpirun
    n=$(hosts | wc -l)
    ((n > 0)) || fail 1 "there is no cluster '$name': make one with: $0 up N"
    per=${per:-$(((${np:-n} + n - 1) / n))} np=${np:-$((n * per))}
    ((np <= n * per)) || fail 2 "-np $np: $n hosts with $per ranks each are $((n * per))"
    for ((i = 0; i < n; i++)); do list+=${list:+,}10.78.0.$((i + 1)):$per; done
    # Open MPI starts its daemons through `cluster.sh remote ADDRESS COMMAND`. It cuts the agent at blanks, which the
    # path to this script may have, so that is found through PATH. It must not bind: each host would use core 0.
    FO_CLUSTER_CORES=$(cores | paste -sd ' ')
    export PATH=$here:$PATH FO_CLUSTER=$name FO_CLUSTER_CORES OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    enter 0 mpirun --mca plm rsh --mca plm_rsh_agent "cluster.sh remote" --mca plm_rsh_no_tree_spawn 1 \
        --host "$list" -np "$np" --map-by slot --bind-to none --mca mpi_yield_when_idle 1 \
        --mca orte_tmpdir_base "$files" --mca btl_vader_backing_directory "$files" \
        --mca pml ob1 --mca btl self,vader,tcp \
        --mca btl_tcp_if_include 10.78.0.0/24 --mca oob_tcp_if_include 10.78.0.0/24 \
        "$@"
}

# ADDRESS COMMAND...: what ssh would do for mpirun; the command is a line for a shell
remote() {
    local address=$1; shift
    enter $((${address##*.} - 1)) sh -c "$*"
}

status() {
    local ns link
    need_root_and tc
    [[ -n $(hosts) ]] || { echo "no cluster '$name'"; exit 1; }
    for ns in $(hosts); do
        link=$(tc -n "$ns" qdisc show dev eth0 | grep -oE '(rate|delay) [^ ]+' | paste -sd ' ')
        printf '%-5s %-12s %s, %d processes\n' "${ns#"$name"-}" \
            "$(ip -n "$ns" -4 -o addr show eth0 | awk '{print $4}')" "${link:-not shaped}" \
            "$(ip netns pids "$ns" | wc -l)"
    done
}

[[ $name =~ ^[a-zA-Z0-9_]+$ ]] || fail 2 "FO_CLUSTER '$name': want letters and digits"
case ${1:-help} in
up | run | remote) "$@" ;;
status) [[ $# == 1 ]] || fail 2 "status takes no '$2'"; status ;;
down)
    [[ $# == 1 ]] || fail 2 "down takes no '$2'"
    need_root_and
    remove
    [[ -z $(namespaces) ]] || fail 1 "could not remove all of cluster '$name'"
    ;;
help | -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" ;;
*) fail 2 "unknown command '$1': want up, run, status or down" ;;
esac
