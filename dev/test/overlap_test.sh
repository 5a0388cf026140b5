#!/bin/bash
# Is communication hidden? bench_overlap's demands on the paced MLP and attention layers, forward and backward, and
# on the unpaced one.
# Timing on a machine that others use can be wrong once: a table that fails is measured again, at most twice.
set -uo pipefail
bench=${B:?the build folder}/dev/bench/bench_overlap
passed=0 failed=0 out=$(mktemp); trap 'rm -f "$out"' EXIT

check() {
    local attempt
    for attempt in 1 2 3; do
        if timeout -k 5 80 "$bench" --check "$@" >"$out" 2>&1; then break; fi
        echo "bench_overlap --check $*: attempt $attempt failed"; grep -E 'FAILED|foreign [0-9]' "$out"
        ((SECONDS < 120)) || break # on a machine so busy that another attempt would not end in time
    done
    sed -n '/^# demands/,$p' "$out"
    passed=$((passed + $(grep -c '  ok$' "$out"))) failed=$((failed + $(grep -c '  FAILED$' "$out")))
    # a crash, or a table that was asked for nothing
    if ! grep -qE '  (ok|FAILED)$' "$out"; then cat "$out"; failed=$((failed + 1)); fi
}

# what is refused is one line that names the option, and exit status 1
refused() {
    local words=$1; shift
    if "$bench" "$@" >"$out" 2>&1 || [[ $(wc -l <"$out") != 1 ]] || ! grep -qF -- "$words" "$out"; then
        echo "bench_overlap $*: wanted one line with '$words', got:"; cat "$out"; failed=$((failed + 1))
    else
        passed=$((passed + 1))
    fi
}

refused "--rank" --rank 4
refused "--ranks 17" --ranks 17
refused "--ranks 4x" --ranks 4x
refused "--link 1" --link 1
refused "--tokens 1000" --op mlp --tokens 1000
refused "--channels 320" --op attention --channels 320
refused "row:1" --op mlp --modes none,row:1
refused "twice" --op mlp --modes none,none
refused "want one of them" --unpaced --gemm-ms 3
refused "at least 7" --check --rounds 3
refused "--json /nowhere/at/all" --json /nowhere/at/all
check --op mlp
check --op attention
check --op mlp-backward --layers 1
check --op attention-backward --layers 1
check --op mlp --unpaced --tokens 1024
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
