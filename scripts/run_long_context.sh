#!/bin/bash
# 124M parameters with sequences of 16384 tokens, each shared by UP ranks (Ulysses), on 10 billion tokens of FineWeb. For
# longer ones set SEQ, and maxT in MODEL to as much: UP divides a sequence's activations, and 2 * UP * TP must divide SEQ.
# Variables, restarts and --dry-run, which does the arithmetic: scripts/run_common.sh.
cd "$(dirname "$0")/.." && source scripts/run_common.sh
defaults UP=4 SEQ=16384 BATCH=1 STEPS=19073 FINAL_LR=0.1 PREPARE="python3 data/prepare.py fineweb10B"
defaults MODEL="L=12,C=768,NH=12,maxT=$SEQ"
recipe_run "$@"
