#!/bin/bash
# Rules that no compiler knows: what the cuda device's sources must not use (they would leave the emulator, or order
# nothing), and which folders may include which.
set -euo pipefail
cd "$(dirname "$0")/../.."
passed=0 failed=0
# no LINES RULE: the lines of grep, if there are any, break the rule
no() {
    if [[ -n $1 ]]; then failed=$((failed + 1)); echo "lint: $2:"; echo "$1"; else passed=$((passed + 1)); fi
}
# code without comments and strings, each line with its place
code() { for f in "$@"; do sed -E 's/"([^"\\]|\\.)*"/""/g; s://.*$::; s:^ \*.*$::; s:/\*.*\*/::g' "$f" | awk -v f="$f" '{print f ":" NR ": " $0}'; done; }
cuda=(flashoverlap/cuda/*.cu flashoverlap/cuda/*.cuh flashoverlap/cuda/*.h)
all=$(code $(ls "${cuda[@]}" 2>/dev/null))
no "$(grep -E '<<<|>>>' <<<"$all" || true)" "launch() starts kernels, not <<< >>>"
no "$(grep -E '\bcudaLaunchKernel' <<<"$all" | grep -v 'cuda_common.cuh' || true)" "launch() starts kernels"
no "$(grep -E '\batomic[A-Z][A-Za-z]*\(' <<<"$all" || true)" "no atomics on the device: sums have an order"
no "$(grep -E '\basm\b|__asm' <<<"$all" | grep -v 'flashoverlap/cuda/ptx.cuh' || true)" "PTX stands in ptx.cuh"
no "$(grep -E '__CUDA_ARCH__' <<<"$all" | grep -v 'flashoverlap/cuda/ptx.cuh' || true)" "the architecture is asked about in ptx.cuh"
no "$(grep -E '\bcuda(Memcpy|Memset|Memcpy2D|MemcpyPeer|StreamCreate|DeviceSynchronize)\(' <<<"$all" || true)" "no work on the legacy stream, no wait for a whole device"
no "$(grep -E 'extern +__shared__' <<<"$all" | grep -v 'cuda_common.cuh' || true)" "DYNAMIC_SHARED names shared memory of a size known at run time"
no "$(grep -E 'cooperative_groups|__activemask|__shfl(_xor|_up|_down)?\(' <<<"$all" || true)" "shuffles have full masks, and no cooperative groups"
neutral=$(grep -nE '#include +"flashoverlap/(cpu|cuda)/' flashoverlap/*.c flashoverlap/*.h train/*.c train/*.h data/*.c data/*.h train_gpt.cu test_gpt.cu || true)
no "$neutral" "a neutral file includes nothing of a device"
no "$(grep -nE '#include +"flashoverlap/cuda/' flashoverlap/cpu/* || true)" "the cpu device includes nothing of cuda"
no "$(grep -nE '#include +"flashoverlap/cpu/' flashoverlap/cuda/* || true)" "the cuda device includes nothing of the cpu's"
no "$(awk 'length > 110 {print FILENAME ":" FNR ": " length " columns"}' $(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' 2>/dev/null) </dev/null)" "lines have 110 columns at most"
long=$(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' '*.py' '*.sh' 2>/dev/null | xargs wc -l | awk '$2 != "total" && $1 > 1200')
no "$long" "a file has 1,200 lines at most"
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
