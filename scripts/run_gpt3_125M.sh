#!/bin/bash
# GPT-3 125M, sequences of 2048 tokens, on three epochs of FineWeb's sample of 100 billion tokens, with the settings of
# llm.c's run_gpt3_125M.sh: updates by unusual losses and gradients are skipped.
# Variables, restarts and --dry-run, which does the arithmetic: scripts/run_common.sh.
cd "$(dirname "$0")/.." && source scripts/run_common.sh
defaults MODEL=gpt3:c768 STEPS=572204 SEQ=2048 BATCH=32 FINAL_LR=0.1 EVERY=10000 KEEP=5 MAJOR=50000 \
    DATASET=fineweb100B PREPARE="python3 data/prepare.py fineweb100B"
recipe_run -sl 7 -sg 7 "$@"
