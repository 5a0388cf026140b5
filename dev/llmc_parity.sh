#!/bin/bash
# Runs llm.c's CPU program and train_gpt, both in fp32, on the same shards (dev/llmc.py) and a checkpoint that train_gpt
# wrote, and compares the losses of 41 steps and 5 validations: they may differ by 1e-5. train_gpt2.c is compiled as it
# is: it runs in a temporary folder, where the files have the names that it opens.
#
#   dev/llmc_parity.sh PATH_TO_LLMC      a checkout of https://github.com/karpathy/llm.c
set -euo pipefail
if [[ $# != 1 || ! -f $1/train_gpt2.c ]]; then
    echo "usage: dev/llmc_parity.sh PATH_TO_LLMC, the folder of train_gpt2.c" >&2
    exit 1
fi
llmc=$(realpath "$1")
cd "$(dirname "$0")/.."
link=$(readlink train_gpt || true)
make --no-print-directory PRECISION=FP32 train_gpt >/dev/null
program=$(realpath train_gpt)
[[ -z $link ]] || ln -sfn "$link" train_gpt # as it was
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
/usr/bin/python3 dev/llmc.py "$tmp"
# gnu89's inline: its headers define functions as inline alone. -O2 keeps the order of sums that its source has
"${CC:-gcc}" -O2 -fgnu89-inline -w -I "$llmc" "$llmc/train_gpt2.c" -lm -o "$tmp/train_gpt2"
cd "$tmp"
read -ra flags <<<"$(cd "$OLDPWD/dev" && /usr/bin/python3 -Bc 'import llmc; print(*llmc.FLAGS)')"
quick=(--link 1000,0 --pace 1000) # no measuring at start
"$program" -e gpt2_124M.bin "${flags[@]}" -x 5 -v 0 -o out "${quick[@]}" >/dev/null
mv out/model_00000005.bin gpt2_124M.bin # written by train_gpt, read by both
./train_gpt2 >theirs.log
"$program" -e gpt2_124M.bin "${flags[@]}" -x 41 -v 10 -m 5 "${quick[@]}" >ours.log
# "step 3: train loss 4.2 (", "step  4/41 | loss 4.2 |", "val loss 4.2"; train_gpt validates once more
numbers() { sed -nE 's/^(step.*|val) loss ([0-9.]+).*/\2/p' "$1" | head -n 46; }
paste <(numbers theirs.log) <(numbers ours.log) | awk '
    { d = $1 - $2; d = d < 0 ? -d : d; if (NF != 2 || $1 <= 0) { bad = 1 } if (d > most) { most = d } n++
      printf "%3d  llm.c %.6f  train_gpt %.6f  %.6f\n", n, $1, $2, d }
    END { printf "%d losses, largest difference %.6f\n", n, most; exit bad || n != 46 || most > 1e-5 }'
