#!/bin/bash
# Runs each case of check_cases.cu, wrong and right, in 20 schedules: eager, lazy and random ones. A wrong one
# must say its kind of mistake, nothing else, and end with status 66; a right one must be silent.
#   check_test.sh [CASE...]
set -uo pipefail
cd "$(dirname "$0")/../../.."
program=build/emu-BF16-check/dev/emu/test/check_cases
make --no-print-directory DEVICE=emu SAN=check PRECISION=BF16 MPI=0 DEBUG=0 "$program" || exit 1

passed=0 failed=0
check() { # what, a command that is true if it passed
    if "${@:2}"; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "$1: status $status, said: $said"
}
run() { # name wrong|right schedule
    said=$(FO_EMU_SCHED=$3 timeout 20 "$program" "$1" "$2" 2>&1) status=$?
}
schedules=(eager lazy)
for i in {1..18}; do schedules+=("random:$i"); done
while read -r name kind; do
    [[ $# == 0 || " $* " == *" $name "* ]] || continue
    for s in "${schedules[@]}"; do
        run "$name" wrong "$s"
        check "$name, wrong, $s" [ "$status:${said%%: "$kind":*}:$(wc -l <<<"$said")" = "66:emu:1" ]
        run "$name" right "$s"
        check "$name, right, $s" [ "$status:$said" = "0:" ]
    done
done < <("$program" list)

# going on after reports: each once, at most 20, and the status is that of a failure
FO_EMU_KEEP_GOING=1 run three_mistakes wrong eager
check "going on" [ "$status:$(grep -c '^emu: ' <<<"$said"):$(wc -l <<<"$said")" = "66:3:3" ]
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
