#!/bin/bash
# GPT-2 774M on one and a half epochs of FineWeb's sample of 100 billion tokens, with the settings of llm.c's
# run_gpt2_774M.sh; but only the newest checkpoints are kept, and one in ten of the others.
# Variables, restarts and --dry-run, which does the arithmetic: scripts/run_common.sh.
cd "$(dirname "$0")/.." && source scripts/run_common.sh
defaults MODEL=d36 STEPS=286102 LR=2.5e-4 BATCH=32 EVERY=4000 KEEP=5 MAJOR=40000 DATASET=fineweb100B \
    PREPARE="python3 data/prepare.py fineweb100B"
recipe_run "$@"
