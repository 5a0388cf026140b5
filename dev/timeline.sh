#!/bin/bash
# Draws doc/timeline.png anew: a layer of a real training step of quickstart's model on 4 ranks, under none, slice:4 and
# flash:1. Paced, on an emulated link (scripts/quickstart.sh says why). Wants an idle machine and python3-matplotlib.
#
#   dev/timeline.sh [OUT.png]
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-doc/timeline.png}")
make --no-print-directory train_gpt >/dev/null
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
# which text it is makes no difference to a timeline
/usr/bin/python3 data/prepare.py README.md --out "$tmp" --name text --tokenizer byte >/dev/null
for mode in none slice:4 flash:1; do
    ./train_gpt -i "$tmp/*_train_*.bin" -j "$tmp/*_val_*.bin" -e L=4,C=128,NH=4,V=256,maxT=128 -b 16 -t 64 --tp 4 \
        --link 0.033,20 --pace 0.002 --overlap "$mode" -x 3 -v 0 -s 0 --trace "$tmp/$mode.json" | grep '^step'
done
/usr/bin/python3 dev/plot_timeline.py "$tmp"/{none,slice:4,flash:1}.json -o "$out" ${ARGS:---around F1 --ms 80}
