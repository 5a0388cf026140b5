#!/bin/bash
# Measures and predicts what arXiv 2604.24013 reports (Tables 1, 3 and 4) and writes doc/reproduction.md with its plots.
#   dev/reproduce_paper.sh [--quick] [--out FOLDER]
# --quick: few rounds and fewer cases, to see that it works. FOLDER (doc): where the document and its plots go. About 6 minutes
# on two idle cores. Hosts joined by a shaped network are made by dev/cluster.sh: without root that part is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
out=doc rounds=11 quick=0
while [[ $# != 0 ]]; do
    case $1 in
    --quick) quick=1 rounds=3; shift ;;
    --out)
        [[ -d ${2:-} ]] || { echo "reproduce_paper.sh: --out '${2:-}': no such folder" >&2; exit 1; }
        out=$2; shift 2 ;;
    *) echo "reproduce_paper.sh: unknown option '$1'; --quick and --out are known" >&2; exit 1 ;;
    esac
done
python=/usr/bin/python3 # the one that apt installs matplotlib for
"$python" -c 'import matplotlib' 2>/dev/null ||
    { echo "reproduce_paper.sh: matplotlib is missing: bash scripts/deps.sh --bench" >&2; exit 1; }
make --no-print-directory build/cpu-BF16-mpi/predict_layer build/cpu-BF16-mpi/dev/bench/bench_overlap >/dev/null
bench=$PWD/build/cpu-BF16-mpi/dev/bench predict=build/cpu-BF16-mpi/predict_layer
results=$(mktemp -d)
finish() {
    [[ -z ${FO_CLUSTER:-} ]] || dev/cluster.sh down >/dev/null 2>&1 || true
    rm -rf "$results"
}
trap finish EXIT
trap 'exit 130' INT; trap 'exit 143' TERM HUP
steps=$((quick ? 13 : 27)) n=0
# NAME COMMAND...: a table of measurements, into $results/NAME.json
measure() {
    local name=$1; shift
    n=$((n + 1)); echo "[$n/$steps] $name: ${*##*/}"
    "$@" --json "$results/$name.json" >"$results/$name.txt" 2>&1 || { cat "$results/$name.txt" >&2; exit 1; }
}
# NAME OP RANKS SEQUENCES TOKENS
predicted() {
    n=$((n + 1)); echo "[$n/$steps] $1: predicted"
    "$predict" ascend "$2" "$3" "$4" "$5" 4096 "$results/$1.json" >"$results/$1.txt"
}

all=none,slice:4,slice:8,flash:1,flash:2
layer() { local name=$1; shift; measure "$name" "$bench/bench_overlap" --rounds "$rounds" "$@"; }
# Table 1: T/W 0.558
for P in 2 4 8; do layer "mlp_$P" --op mlp --ranks $P --modes $all --ratio 0.558; done
layer mlp_unpaced --op mlp --ranks 2 --unpaced --modes $all --ratio 0.558
# Table 4: attention weighs as much beside the projection as there: T/W 0.25 and 0.35, which is the least it can be
layer attention_4096 --op attention --gemm-ms 15 --rows 9728 --ratio 0.2516 --modes none,slice:4,row:1,flash:1,flash:2
((quick)) || layer attention_8192 --op attention --gemm-ms 15 --rows 14464 --ratio 0.348 \
    --modes none,slice:4,row:1,flash:1,flash:2
((quick)) || layer attention_8192_more --op attention --gemm-ms 15 --rows 14464 --ratio 0.5 \
    --modes none,slice:4,row:1,flash:1,flash:2
layer attention_weak --op attention --modes none,slice:4,slice:8,row:1,row:2,flash:1,flash:2
# ours: backward passes, and where communication outweighs computation
layer mlp_backward --op mlp-backward --modes $all
layer attention_backward --op attention-backward --modes $all
for ratio in $( ((quick)) && echo 2 || echo 0.25 0.75 1 1.25 1.5 2 3); do
    layer "ratio_$ratio" --op mlp --modes $all --ratio "$ratio"
done
# the same MLP layer between hosts
for hosts in "2 0.388" "4 0.58"; do
    read -r P gbit <<<"$hosts"
    ((quick && P == 4)) && continue
    export FO_CLUSTER=paper
    if dev/cluster.sh up "$P" --gbit "$gbit" >"$results/cluster.txt" 2>&1; then
        measure "network_$P" dev/cluster.sh run "$bench/bench_overlap" --rounds "$rounds" --op mlp --rows 2048 \
            --width 512 --link real --ratio 0.558 --modes $all
        dev/cluster.sh down
    else
        n=$((n + 1)); echo "[$n/$steps] no hosts: $(tail -n 1 "$results/cluster.txt")"
        tail -n 1 "$results/cluster.txt" >"$results/no_network.txt"
    fi
done
predicted predicted_mlp mlp 4 32 4096
for s in 1024 2048 8192 16384; do
    ((quick)) || predicted "predicted_mlp_$s" mlp 4 $((131072 / s)) $s
done
predicted predicted_attention_4096 attention 4 16 4096
predicted predicted_attention_8192 attention 4 4 8192
"$python" dev/reproduce_paper.py "$results" "$out"
echo "written: $out/reproduction.md"
