#!/bin/bash
# ptxas.sh NVCC FLAGS FILE...: registers, shared memory, stack and spills of each kernel, as ptxas reports them for sm_90.
# Exit status 1 if a kernel spills registers.
set -euo pipefail
nvcc=$1 flags=$2; shift 2
log=$(mktemp); trap 'rm -f "$log"' EXIT
for f in "$@"; do
    # shellcheck disable=SC2086
    "$nvcc" $flags -MF /dev/null -std=c++17 -O3 -arch=sm_90 -Xptxas -v -cubin -o /dev/null "$f" 2>&1 | c++filt >>"$log"
done
awk '
    /Compiling entry function/ { gsub(/.*entry function ./, ""); gsub(/. for .sm_.*/, ""); name = $0 }
    /bytes stack frame/ { stack = $1; spill = $5 + $9 }
    /Used [0-9]+ registers/ {
        match($0, /Used [0-9]+/); regs = substr($0, RSTART + 5, RLENGTH - 5); smem = 0
        if (match($0, /[0-9]+ bytes smem/)) { smem = substr($0, RSTART, RLENGTH) + 0 }
        printf "%4d registers %6d B shared %5d B stack %5d B spilled  %.110s\n", regs, smem, stack, spill, name
        n++; bad += spill > 0
    }
    END { printf "%d kernels, %d spill\n", n, bad; exit n == 0 || bad > 0 }' "$log"
