#!/bin/bash
# A recipe (RECIPE, 124M) on the machines HOSTS, PER_HOST ranks on each, started by mpirun. As in llm.c's multi-node
# scripts a step of 124M has four times the tokens, and there are as many fewer steps.
#
#   HOSTS=node1,node2 scripts/run_2_nodes.sh [--dry-run] [OPTION OF train_gpt ...]
#
# Every machine must have this folder at the same path, and see DATA and OUT. What mpirun needs beside: MPIRUN_ARGS, for
# example "-x NCCL_SOCKET_IFNAME=eth0 --mca btl_tcp_if_include eth0". doc/multi-node.md.
set -euo pipefail
cd "$(dirname "$0")/.." && source scripts/run_common.sh
defaults HOSTS="" PER_HOST=8 RECIPE=124M MPIRUN_ARGS=""
[[ -n $HOSTS ]] || recipe_die "HOSTS is not set; want the machines' names, as in HOSTS=node1,node2"
[[ -x scripts/run_$RECIPE.sh ]] || recipe_die "RECIPE '$RECIPE': there is no scripts/run_$RECIPE.sh"
[[ $RECIPE != 124M ]] || defaults TOTAL=2097152 STEPS=4716 FINAL_LR=0.1 EVERY=1000 OUT=out/124M_2_nodes
IFS=, read -ra hosts <<<"$HOSTS"
RANKS=$((${#hosts[@]} * PER_HOST))
defaults LAUNCH="mpirun --bind-to none -np $RANKS --host ${HOSTS//,/:$PER_HOST,}:$PER_HOST $MPIRUN_ARGS"
export RANKS LAUNCH TOTAL STEPS FINAL_LR EVERY OUT
exec "scripts/run_$RECIPE.sh" "$@"
