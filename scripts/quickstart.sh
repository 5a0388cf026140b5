#!/bin/bash
# Trains a small GPT on real text with 4 ranks (threads) over an emulated link, then times the same few steps under each
# schedule and prints a report. `make quickstart` calls it. STEPS=20 shortens the training, OUT says where files go.
set -euo pipefail
cd "$(dirname "$0")/.."
STEPS=${STEPS:-900} OUT=${OUT:-out/quickstart} DATA=${DATA:-data/shakespeare}
LINK=${LINK:-0.25,20} PACE=${PACE:-0.012}
COMPARE_STEPS=${COMPARE_STEPS:-6} COMPARE_LINK=${COMPARE_LINK:-0.033,20} COMPARE_PACE=${COMPARE_PACE:-0.002}

bash data/shakespeare.sh "$DATA"
mkdir -p "$OUT"
model=(-i "$DATA/*_train_*.bin" -j "$DATA/*_val_*.bin" --tokenizer "$(ls "$DATA"/*tokenizer.bin)"
       -e L=4,C=128,NH=4,V=256,maxT=128 -b 16 -t 64 --tp 4)

# Paced: each matmul lasts as long as at PACE TFLOP/s, so a rank behaves like an accelerator of that speed and four of
# them fit on two cores without standing in each other's way. Arithmetic and messages are real.
./train_gpt "${model[@]}" --link "$LINK" --pace "$PACE" -o "$OUT" -x "$STEPS" -l 4e-3 -u 50 -q 0.1 -c 0.1 \
    -v 300 -m 20 -s "$STEPS" -g 300 --temperature 0.8 --prompt "$(printf 'The king\n')" | tee "$OUT/quickstart.log"

# the same steps under each schedule, on a link that has more to hide and at a pace at which timers can be trusted
echo
echo "The same $COMPARE_STEPS steps under each schedule, paced at $COMPARE_PACE TFLOP/s a rank," \
    "link $COMPARE_LINK (GB/s, us):"
for mode in none slice:4 flash; do
    ./train_gpt "${model[@]}" --link "$COMPARE_LINK" --overlap "$mode" --pace "$COMPARE_PACE" \
        -x $((COMPARE_STEPS + 2)) -l 1e-3 -v 0 -s 0 >"$OUT/$mode.log"
done

# field NAME of the step lines of FILE, from step FROM on: median
median() {
    grep '^step ' "$1" | tail -n "+$3" | sed -E "s/.*$2.*/\1/" | sort -g |
        awk '{v[NR]=$1} END {printf "%.2f", v[int((NR+1)/2)]}'
}
ms='\| ([0-9.]+) ms \|' comm='comm ([0-9.]+) ms' exposed='exposed ([0-9.]+) ms'
toks='\| ([0-9.]+) tok.s' mfu='\| ([0-9.]+)% [a-z0-9]+ MFU'
log=$OUT/quickstart.log
echo
echo "# report: medians over steps. communication: what plain collectives would take on this link;"
echo "# exposed: the compute stream stood waiting for a receive, mean over ranks"
first=$(grep -m1 'val loss' "$log" | awk '{print $3}') last=$(grep 'val loss' "$log" | tail -1 | awk '{print $3}')
echo "validation loss       $first -> $last in $STEPS steps (a byte at random: 5.545)"
echo "speed                 $(median "$log" "$toks" 3) tok/s," \
    "$(median "$log" "$mfu" 3) % MFU of the pace, $PACE TFLOP/s a rank"
echo "communication         $(median "$log" "$comm" 3) ms a step," \
    "exposed $(median "$log" "$exposed" 3) ms, on a link of $LINK (GB/s, us)"
echo "written               $OUT/main.log, $(printf "$OUT/model_%08d.bin" "$STEPS")"
echo
printf '%-10s %12s %12s %12s %10s %10s\n' overlap "step ms" "comm ms" "exposed ms" hidden "step/none"
for mode in none slice:4 flash; do
    f=$OUT/$mode.log
    s=$(median "$f" "$ms" 3) c=$(median "$f" "$comm" 3) x=$(median "$f" "$exposed" 3)
    [[ $mode != none ]] || { s0=$s x0=$x; }
    printf '%-10s %12s %12s %12s %9s%% %10s\n' "$mode" "$s" "$c" "$x" \
        "$(awk "BEGIN {printf \"%.1f\", 100 * (1 - $x / ($x0 > 0 ? $x0 : 1))}")" \
        "$(awk "BEGIN {printf \"%.2f\", $s / $s0}")"
done
losses=$(for mode in none slice:4 flash; do
    grep '^step ' "$OUT/$mode.log" | sed -E 's/.*loss ([0-9.]+).*/\1/' | md5sum
done | sort -u | wc -l)
[[ $losses == 1 ]] || { echo "losses of the three differ"; exit 1; }
echo "losses of the three: the same to the last digit"
