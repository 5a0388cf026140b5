#!/bin/bash
# Makes cuDNN's plans of attention for sm_80, sm_90, sm_100 on a machine without a GPU: cudnn_plans.sh [--all]
# --all: every shape that test_gpt and the recipes use, some minutes; else about twenty. Ends with 'N passed,
# N failed'. Where cuDNN or the toolkit's stub of the driver isn't installed it says so, checks nothing and ends
# with status 0.
set -euo pipefail
cd "$(dirname "$0")/../../.."
which=some; [[ ${1:-} != --all ]] || which=all
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
value() { sed -n "s/^$1 := //p" "$tmp/paths"; }
nothing() { echo "cudnn_plans: $*, nothing was checked"; exit 0; }

bash scripts/cuda_paths.sh >"$tmp/paths"
[[ $(value FO_CUDNN) == 1 ]] || nothing "no cuDNN here (needs $(value FO_CUDNN_MISSING))"
flags=$(value CUDA_FLAGS) links=$(value CUDA_LIBS)
# shellcheck disable=SC2086
version=$(($(printf '#include <cudnn.h>\nCUDNN_VERSION\n' | "${CXX:-c++}" $flags -E -P -x c++ - | tail -1)))
((version >= 91100)) || nothing "cuDNN $version is older than 9.11, which can plan without a GPU"
stub='' folders=''
for word in $links; do
    [[ $word == -L* ]] || continue
    folders+=${folders:+:}${word#-L}
    [[ -n $stub || ! -e ${word#-L}/stubs/libcuda.so ]] || stub=${word#-L}/stubs/libcuda.so
done
for home in "${CUDA_HOME:-}" /usr/local/cuda; do
    [[ -n $stub || -z $home || ! -e $home/lib64/stubs/libcuda.so ]] || stub=$home/lib64/stubs/libcuda.so
done
[[ -n $stub ]] || nothing "no stubs/libcuda.so of the CUDA toolkit here"

bash dev/test/cudnn_plans/stub_driver.sh "$stub" "$tmp/driver"
# shellcheck disable=SC2086
"${CXX:-c++}" -std=c++17 -O1 -Wall -Wextra -Werror -I. -D_GNU_SOURCE -DFO_PRECISION_BF16 -DFO_CUDNN=1 $flags \
    -x c++ flashoverlap/cuda/attention_calls.cu flashoverlap/cuda/cudnn_graph.cu \
    dev/test/cudnn_plans/cudnn_plans.cpp -x none $links -o "$tmp/cudnn_plans"
for sm in 80 90 100; do # a process compiles one kernel at a time
    LD_LIBRARY_PATH=$tmp/driver:$folders "$tmp/cudnn_plans" $sm $which >"$tmp/$sm" 2>&1 &
done
wait
closing='^[0-9]+ passed, [0-9]+ failed$'
passed=0 failed=0
for sm in 80 90 100; do
    grep -vE "$closing" "$tmp/$sm" || true
    read -r p _ f _ < <(grep -E "$closing" "$tmp/$sm" || echo "0 passed, 1 failed")
    passed=$((passed + p)) failed=$((failed + f))
done
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
