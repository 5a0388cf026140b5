#!/bin/bash
# Runs each test program ("NAME ARGUMENTS" is one, too) and script (.sh, .py) and closes with the sum of their 'N passed, N failed'.
# A program tries 1, 2, 3 and 4 ranks by itself, as threads. Only test_*_mpi needs processes: it is run at each count (NP).
# One that ends without its closing line, or runs longer than LIMIT seconds, counts as one failed. JOBS run at a time.
# What failed is said again at the end, where one looks first.
set -uo pipefail
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
logs=$(mktemp -d); trap 'rm -rf "$logs"' EXIT
closing='^[0-9]+ passed, [0-9]+ failed$'
n=0 told=0 passed=0 failed=0

# what run number $1 has said, and its counts
tell() {
    local log=$logs/$1 rc seconds before=$failed closed=0
    read -r rc seconds <"$log.rc"; echo "== $(cat "$log.name"), $seconds s"
    grep -vE "$closing" "$log"
    grep -aE ': failed: |  FAILED$' "$log" >>"$logs/failed"
    while read -r p _ f _; do
        closed=1 passed=$((passed + p)) failed=$((failed + f))
    done < <(grep -E "$closing" "$log" | tr -d ,)
    if [[ $closed == 0 || ($rc != 0 && $failed == "$before") ]]; then
        echo "$(cat "$log.name"): failed: exit status $rc, and no failed check says why" | tee -a "$logs/failed"
        failed=$((failed + 1))
    fi
}

run() {
    while (($(jobs -rp | wc -l) >= ${JOBS:-1})); do wait -n; done
    n=$((n + 1)); local log=$logs/$n start=$SECONDS
    echo "$*" >"$log.name"
    { timeout -k 5 "${LIMIT:-300}" "$@" >"$log" 2>&1; echo $? $((SECONDS - start)) >"$log.rc"; } &
    ((${JOBS:-1} > 1)) || wait
    while [[ -s $logs/$((told + 1)).rc ]]; do told=$((told + 1)); tell $told; done
}

for t in "$@"; do
    if [[ $t == *_mpi ]]; then
        for np in ${NP:-1 2 3 4}; do ASAN_OPTIONS=detect_leaks=0 run ${MPIRUN:-mpirun --oversubscribe} -np "$np" "$t"; done
    elif [[ $t == *.sh ]]; then
        run bash "$t"
    elif [[ $t == *.py ]]; then
        run /usr/bin/python3 "$t" # the one that apt installs numpy for
    else
        # shellcheck disable=SC2086
        run $t
    fi
done
wait
while ((told < n)); do told=$((told + 1)); tell $told; done
[[ ! -s $logs/failed ]] || { echo "== failed"; head -n 20 "$logs/failed"; }
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
