#!/bin/bash
# GPT-2 1558M on a third of FineWeb-Edu's sample of 100 billion tokens, with the settings of llm.c's run_gpt2_1558M.sh;
# but only the newest checkpoints are kept, and one in four of the others. PEAK is an H100's.
# Variables, restarts and --dry-run, which does the arithmetic: scripts/run_common.sh.
cd "$(dirname "$0")/.." && source scripts/run_common.sh
defaults MODEL=d48 STEPS=32000 TOTAL=1048576 BATCH=16 FINAL_LR=0.1 EVERY=2000 KEEP=5 MAJOR=8000 PEAK=989 \
    DATASET=edu_fineweb100B SHARDS=edu_fineweb PREPARE="python3 data/prepare.py edu_fineweb100B"
recipe_run "$@"
