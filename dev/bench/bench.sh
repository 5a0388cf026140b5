#!/bin/bash
# Times a training step of GPT-2 124M on one rank with all cores, beside PyTorch's of the same model in the same run.
# `make bench` calls it with the build folder. MODEL, B, T, STEPS, ROUNDS change what is timed.
set -euo pipefail
build=$1 MODEL=${MODEL:-d12} B=${B:-4} T=${T:-1024} STEPS=${STEPS:-2} ROUNDS=${ROUNDS:-2}
echo "# $(date -u +%F), $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
echo "# training step of $MODEL, B=$B, T=$T; rounds take turns, so that a noisy machine hurts both"
ours=() theirs=()
torch=$(command -v /usr/bin/python3 || command -v python3)
"$torch" -c 'import torch' 2>/dev/null || { torch=; echo "# no PyTorch to compare with: bash scripts/deps.sh --bench"; }
for ((i = 1; i <= ROUNDS; i++)); do
    echo "# round $i: train_gpt"
    out=$("$build/dev/bench/bench_step" "$MODEL" "$B" "$T" "$STEPS")
    [[ $i -lt $ROUNDS ]] || echo "$out"
    ours+=("$(sed -nE 's/^median ([0-9.]+) tok.*/\1/p' <<<"$out")")
    echo "train_gpt ${ours[-1]} tok/s"
    [[ -n $torch ]] || continue
    echo "# round $i: PyTorch, bf16 autocast"
    json=$(mktemp)
    "$torch" dev/bench/torch_step.py --model "$MODEL" -b "$B" -t "$T" --steps $((STEPS > 1 ? STEPS : 2)) \
        --json "$json" >/dev/null
    theirs+=("$(python3 -c "import json, sys; print('%.1f' % json.load(open(sys.argv[1]))['tok_per_s'])" "$json")")
    rm -f "$json"
    echo "PyTorch ${theirs[-1]} tok/s, ratio $(awk "BEGIN {printf \"%.2f\", ${ours[-1]} / ${theirs[-1]}}")"
done
