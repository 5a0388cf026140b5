#!/bin/bash
# Fuzzes each reader of files for FUZZ_TIME seconds (30), one after the other: `make fuzz`. TARGETS="shard model": those
# alone. Inputs lie in a folder beside the program, which the next run goes on from; what breaks a target is kept there,
# too: FUZZ=shard PROGRAM FILE runs it again. Closes with 'N passed, N failed', a target each.
set -uo pipefail
program=$1 dir=$(dirname "$1") passed=0 failed=0
[[ -x $program ]] || { echo "$program is missing: make fuzz" >&2; exit 1; }
# in memory where that can be had: a target writes its files thousands of times a second
TMPDIR=$(mktemp -d -p "$([[ -w /dev/shm ]] && echo /dev/shm || echo /tmp)"); export TMPDIR
log=$TMPDIR/log; trap 'rm -rf "$TMPDIR"' EXIT
printf '%-12s %12s %8s %8s %8s\n' target executions edges inputs seconds
for t in ${TARGETS:-$("$program")}; do
    corpus=$dir/corpus/$t start=$SECONDS
    mkdir -p "$corpus"
    FUZZ=$t SEEDS=$corpus "$program" || exit 1
    FUZZ=$t "$program" -max_total_time="${FUZZ_TIME:-30}" -timeout=20 -rss_limit_mb=2048 -malloc_limit_mb=1024 \
        -max_len=16384 -len_control=0 -use_value_profile=1 -print_final_stats=1 -artifact_prefix="$dir/$t-" \
        "$corpus" >"$log" 2>&1
    rc=$?
    printf '%-12s %12s %8s %8s %8s\n' "$t" "$(awk '/number_of_executed_units/ {print $2}' "$log")" \
        "$(grep -oE 'cov: [0-9]+' "$log" | tail -1 | cut -c6-)" "$(ls "$corpus" | wc -l)" $((SECONDS - start))
    if [[ $rc == 0 ]]; then passed=$((passed + 1)); else failed=$((failed + 1)); tail -60 "$log"; fi
done
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
