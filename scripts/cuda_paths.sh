#!/bin/bash
# Prints, as lines for make, where the parts of CUDA are that DEVICE=cuda and DEVICE=emu need: the compiler, headers, libraries.
# Looks in $CUDA_HOME, where nvcc is in PATH, in the toolkit's usual place, and in the wheels that PyTorch brings.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=$PWD/build/wheels/nvidia # of scripts/deps.sh --cuda
[[ -d $wheels ]] || wheels=$(python3 -c 'import nvidia; print("\n".join(nvidia.__path__))' 2>/dev/null | head -1 || true)
nvcc=$(command -v nvcc || true)
roots=() includes=() libs=()
[[ -z ${CUDA_HOME:-} ]] || roots+=("$CUDA_HOME")
[[ -z $nvcc ]] || roots+=("$(dirname "$(dirname "$(readlink -f "$nvcc")")")")
roots+=(/usr/local/cuda)
[[ -z $wheels ]] || roots+=("$wheels"/cu1? "$wheels"/*/)
for root in "${roots[@]}"; do
    for d in "$root"/include "$root"/targets/x86_64-linux/include; do [[ ! -d $d ]] || includes+=("$d"); done
    for d in "$root"/lib64 "$root"/lib "$root"/targets/x86_64-linux/lib; do [[ ! -d $d ]] || libs+=("$d"); done
    [[ -n $nvcc || ! -x $root/bin/nvcc ]] || nvcc=$root/bin/nvcc
done
# the first folder that has the file: dir HEADER FOLDER...
dir() { local f=$1 d; shift; for d in "$@"; do if compgen -G "$d/$f" >/dev/null; then echo "$d"; return; fi; done; }
flags=() links=()
add() { local x=$1; shift; for y in "$@"; do [[ $x != "$y" ]] || return 0; done; return 1; }
has() { # NAME HEADER LIBRARY: NAME := 0 or 1; its folders into flags and links
    local inc lib; inc=$(dir "$2" "${includes[@]:-}"); lib=$(dir "lib$3.so*" "${libs[@]:-}")
    [[ -z $inc ]] || add "-isystem $inc" "${flags[@]:-}" || flags+=("-isystem $inc")
    if [[ -z $inc || -z $lib ]]; then echo "$1 := 0"; echo "$1_MISSING := $2$([[ -n $inc ]] && echo " is there, but not lib$3.so")"; return; fi
    echo "$1 := 1"
    add "-L$lib -Wl,-rpath,$lib" "${links[@]:-}" || links+=("-L$lib -Wl,-rpath,$lib")
    links+=("-l:$(basename "$(compgen -G "$lib/lib$3.so*" | sort | head -1)")")
}
# to variables of this shell too: the calls below must not run in a subshell
out=$(mktemp); trap 'rm -f "$out"' EXIT
{ has CUDA_RUNTIME cuda_runtime.h cudart; has CUDA_BLAS cublasLt.h cublasLt; has FO_CUDNN cudnn.h cudnn_graph; } >"$out"
nccl=$(dir nccl.h "${includes[@]:-}") # its functions are looked up when the program runs
add "-isystem $nccl" "${flags[@]:-}" || [[ -z $nccl ]] || flags+=("-isystem $nccl")
cat "$out"
echo "FO_NCCL := $([[ -n $nccl ]] && echo 1 || echo 0)"
echo "NVCC := $nvcc"
echo "CUDA_FLAGS := ${flags[*]:-}"
echo "CUDA_LIBS := ${links[*]:-}"
