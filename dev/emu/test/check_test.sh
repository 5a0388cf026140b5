#!/bin/bash
# Builds check_cases.cu with the checker and runs each case, wrong and right, in 20 schedules: eager, lazy, random.
# A wrong one must say its kind of mistake, and nothing else, and end with status 66; a right one must be silent.
#   check_test.sh [CASE...]         CUDA_HOME, CXX and CLANG can be set; B: the folder to build in
set -uo pipefail
cd "$(dirname "$0")/../../.."
cuda=${CUDA_HOME:-/usr/local/cuda} clang=${CLANG:-clang} cxx=${CXX:-g++}
out=${B:-build/emu-check}/dev/emu/test
flags="-std=c++17 -g -DFO_EMU=1 -I. -Idev/emu/include -isystem $cuda/include"
mkdir -p "$out"
for f in check check_host exec stream memory launch driver graph; do
    [[ $out/$f.o -nt dev/emu/$f.cpp ]] || $cxx $flags -O2 -Wall -Wextra -Werror -c "dev/emu/$f.cpp" -o "$out/$f.o" || exit 1
done
$clang $flags @dev/emu/check.flags -x c++ -c dev/emu/test/check_cases.cu -o "$out/check_cases.o" &&
    objcopy --redefine-syms=dev/emu/check.syms "$out/check_cases.o" &&
    $cxx -rdynamic "$out"/{check_cases,check,check_host,exec,stream,memory,launch,driver,graph}.o -pthread -ldl -o "$out/check_cases" || exit 1

passed=0 failed=0
check() { # name wrong|right schedule kind
    local said status
    said=$(FO_EMU_SCHED=$3 timeout 20 "$out/check_cases" "$1" "$2" 2>&1); status=$?
    if [[ $2 == wrong && $status == 66 && $said == "emu: $4: "* && $said != *$'\n'* ]] ||
        [[ $2 == right && $status == 0 && -z $said ]]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "$1, $2, $3: status $status, said: $said"
    fi
}
schedules=(eager lazy)
for i in {1..18}; do schedules+=("random:$i"); done
while read -r name kind; do
    [[ $# == 0 || " $* " == *" $name "* ]] || continue
    for s in "${schedules[@]}"; do
        check "$name" wrong "$s" "$kind"
        check "$name" right "$s" "$kind"
    done
done < <("$out/check_cases" list)
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
