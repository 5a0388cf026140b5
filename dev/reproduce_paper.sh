#!/bin/bash
# Measures and predicts what arXiv 2604.24013 reports (Tables 1, 3 and 4) and writes doc/reproduction.md with its plots.
#   dev/reproduce_paper.sh [--quick] [--out FOLDER]
# --quick: few rounds and fewer cases, to see that it works. FOLDER (doc; --quick: build/reproduction): where the document and
# its plots go. About 7 minutes on two idle cores. Hosts joined by a shaped network are made by dev/cluster.sh: without root
# or mpirun that part is left out, and the document says so. A table in which times spread too far is measured again, twice
# at most; then the document says "too noisy" in its place.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")/.."
out=doc rounds=11 quick=0 given=""
while [[ $# != 0 ]]; do
    case $1 in
    --quick) quick=1 rounds=3; shift ;;
    --out)
        given=${2:-}; [[ $given == /* ]] || given=$from/$given
        [[ -n ${2:-} && -d $given ]] || { echo "reproduce_paper.sh: --out '${2:-}': no such folder" >&2; exit 1; }
        shift 2 ;;
    *) echo "reproduce_paper.sh: unknown option '$1'; --quick and --out are known" >&2; exit 1 ;;
    esac
done
if ((quick)) && [[ -z $given ]]; then out=build/reproduction; mkdir -p "$out"; fi
out=${given:-$out}
python=/usr/bin/python3 # the one that apt installs matplotlib for
"$python" -c 'import matplotlib' 2>/dev/null ||
    { echo "reproduce_paper.sh: matplotlib is missing: bash scripts/deps.sh --bench" >&2; exit 1; }
make --no-print-directory build/cpu-BF16-mpi/predict_layer build/cpu-BF16-mpi/dev/bench/bench_overlap >/dev/null
bench=$PWD/build/cpu-BF16-mpi/dev/bench/bench_overlap predict=build/cpu-BF16-mpi/predict_layer
results=$(mktemp -d) hosts_up=0
export FO_CLUSTER=paper$$
finish() {
    ((hosts_up == 0)) || dev/cluster.sh down >/dev/null 2>&1 || true
    rm -rf "$results"
}
trap finish EXIT
trap 'exit 130' INT; trap 'exit 143' TERM HUP
steps=$((quick ? 11 : 29)) n=0
# NAME COMMAND...: a table of measurements, into $results/NAME.json; its exit status, but for that of noise
measure() {
    local name=$1 rc; shift
    n=$((n + 1)); echo "[$n/$steps] $name: bench_overlap ${*##*bench_overlap}"
    for _ in 1 2 3; do
        rc=0; "$@" --json "$results/$name.json" >"$results/$name.txt" 2>&1 || rc=$?
        [[ $rc == 3 ]] || break
        grep "too noisy" "$results/$name.txt"
    done
    [[ $rc == 0 || $rc == 3 ]]
}
layer() {
    local name=$1; shift
    measure "$name" "$bench" --rounds "$rounds" "$@" || { cat "$results/$name.txt" >&2; exit 1; }
}
# NAME P GBIT OPTIONS...: the same between P hosts; what it lacks goes into no_network.txt
network() {
    local name=$1 P=$2 gbit=$3 lacks=""; shift 3
    if ! dev/cluster.sh up "$P" --gbit "$gbit" >"$results/cluster.txt" 2>&1; then
        lacks=$(tail -n 1 "$results/cluster.txt")
    else
        hosts_up=1
        measure "$name" dev/cluster.sh run "$bench" --rounds "$rounds" --link real "$@" ||
            { lacks=$(grep -v '^#' "$results/$name.txt" | tail -n 1); rm -f "$results/$name.json"; }
        dev/cluster.sh down
        hosts_up=0
    fi
    if [[ -n $lacks ]]; then echo "no hosts: $lacks"; echo "$lacks" >"$results/no_network.txt"; fi
}
# NAME OP RANKS SEQUENCES TOKENS
predicted() {
    n=$((n + 1)); echo "[$n/$steps] $1: predicted"
    "$predict" ascend "$2" "$3" "$4" "$5" 4096 "$results/$1.json" >"$results/$1.txt"
}

all=none,slice:4,slice:8,flash:1,flash:2 six=none,slice:4,slice:6,slice:8,flash:1,flash:2 attention=none,slice:4,row:1,flash:1,flash:2
# Table 1: T/W 0.558, which is the default
for P in 2 4 8; do layer "mlp_$P" --op mlp --ranks $P --rows 1152 --modes $six; done
layer mlp_unpaced --op mlp --ranks 2 --unpaced --modes $all
# Table 4: attention weighs as much beside the projection as there. T/W is 0.2516 and, the least it can be, 0.348; then 0.5
layer attention_4096 --op attention --gemm-ms 15 --rows 9728 --ratio 0.3355 --modes $attention
((quick)) || layer attention_8192 --op attention --gemm-ms 15 --rows 14464 --ratio 0.464 --modes $attention
((quick)) || layer attention_8192_more --op attention --gemm-ms 15 --rows 14464 --ratio 0.6667 --modes $attention
layer attention_weak --op attention --modes none,slice:4,slice:8,row:1,row:2,flash:1,flash:2
# ours: backward passes, and where communication outweighs computation
layer mlp_backward --op mlp-backward --modes $all
layer attention_backward --op attention-backward --modes $all
for ratio in $( ((quick)) && echo 2 || echo 0.25 0.5 1 1.25 1.5 2 3 4); do
    layer "ratio_$ratio" --op mlp --modes $all --ratio "$ratio"
done
# the same layers between hosts
network network_2 2 0.388 --op mlp --rows 2304 --width 512 --modes $six
if ((quick == 0)); then
    network network_4 4 0.58 --op mlp --rows 2304 --width 512 --modes $six
    network network_attention_4096 4 0.58 --op attention --rows 9728 --ratio 0.3355 --layers 1 --modes $attention
    network network_attention_8192 4 0.58 --op attention --rows 14464 --ratio 0.464 --layers 1 --modes $attention
fi
predicted predicted_mlp mlp 4 32 4096
for s in 1024 2048 8192 16384; do
    ((quick)) || predicted "predicted_mlp_$s" mlp 4 $((131072 / s)) $s
done
((quick)) || predicted predicted_attention_4096 attention 4 16 4096
((quick)) || predicted predicted_attention_8192 attention 4 4 8192
"$python" dev/reproduce_paper.py "$results" "$out"
echo "written: $out/reproduction.md"
