#!/bin/bash
# Runs each test program and script (.sh, .py) and closes with the sum of their 'N passed, N failed'.
# A program tries 1, 2, 3 and 4 ranks by itself, as threads. Only test_*_mpi needs processes: it is run at each count.
# One that ends without its closing line, or runs longer than LIMIT seconds, counts as one failed.
set -uo pipefail
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
passed=0 failed=0 log=$(mktemp); trap 'rm -f "$log"' EXIT
closing='^[0-9]+ passed, [0-9]+ failed$'

run() {
    echo "== $*"
    timeout -k 5 "${LIMIT:-300}" "$@" >"$log" 2>&1; local rc=$? before=$failed closed=0
    grep -vE "$closing" "$log"
    while read -r p _ f _; do
        closed=1 passed=$((passed + p)) failed=$((failed + f))
    done < <(grep -E "$closing" "$log" | tr -d ,)
    if [[ $closed == 0 || ($rc != 0 && $failed == "$before") ]]; then
        echo "$*: exit status $rc, and no failed check says why"; failed=$((failed + 1))
    fi
}

for t in "$@"; do
    if [[ $t == *_mpi ]]; then
        for np in 1 2 3 4; do ASAN_OPTIONS=detect_leaks=0 run ${MPIRUN:-mpirun --oversubscribe} -np $np "$t"; done
    elif [[ $t == *.sh ]]; then
        run bash "$t"
    elif [[ $t == *.py ]]; then
        run /usr/bin/python3 "$t" # the one that apt installs numpy for
    else
        run "$t"
    fi
done
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
