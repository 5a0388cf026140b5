#!/bin/bash
# GPT-2 124M on an epoch of FineWeb's sample of 10 billion tokens, with the settings of llm.c's run_gpt2_124M.sh.
# Variables, restarts and --dry-run, which does the arithmetic: scripts/run_common.sh.
cd "$(dirname "$0")/.." && source scripts/run_common.sh
defaults MODEL=d12 STEPS=18865 PREPARE="python3 data/prepare.py fineweb10B"
recipe_run "$@"
