#!/bin/bash
# GPT-2 350M on a third of FineWeb's sample of 100 billion tokens, with the settings of llm.c's run_gpt2_350M.sh; but
# only the newest checkpoints are kept, and one in ten of the others.
# Variables, restarts and --dry-run, which does the arithmetic: scripts/run_common.sh.
cd "$(dirname "$0")/.." && source scripts/run_common.sh
defaults MODEL=d24 STEPS=60000 LR=3e-4 EVERY=2000 KEEP=5 MAJOR=20000 DATASET=fineweb100B \
    PREPARE="python3 data/prepare.py fineweb100B"
recipe_run "$@"
