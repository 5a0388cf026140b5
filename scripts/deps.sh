#!/bin/bash
# Installs what `make quickstart` and `make test` need on Debian and its relatives, as far as it is missing.
#
#   scripts/deps.sh            compiler, oneDNN, Open MPI, Python, what the checks use
#   scripts/deps.sh --bench    also PyTorch and matplotlib, which comparisons and plots of dev use
#   scripts/deps.sh --cuda     also what builds of DEVICE=cuda and DEVICE=emu need: clang, and, where there is no CUDA toolkit,
#                              NVIDIA's wheels (1.2 GB) in build/wheels
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(gcc make libc6-dev libdnnl-dev libopenmpi-dev openmpi-bin python3 python3-numpy python3-pip procps
          iproute2 ca-certificates git clang-format)
case "$*" in
"") ;;
--bench) packages+=(python3-torch python3-matplotlib) ;;
--cuda) packages+=(g++ clang) ;;
*) echo "deps.sh: unknown option '$*'; want --bench or --cuda" >&2; exit 2 ;;
esac

# NVIDIA's compiler, headers and libraries, if there is not a part of them already
cuda_wheels() {
    mkdir -p build
    bash scripts/cuda_paths.sh >build/cuda-paths.mk
    if ! grep -qE '^(CUDA_RUNTIME|CUDA_BLAS) := 0|^NVCC := *$' build/cuda-paths.mk; then return 0; fi
    echo "deps.sh: no CUDA toolkit here; installing NVIDIA's wheels (1.2 GB) into build/wheels"
    python3 -m pip install -q --no-deps --upgrade --target build/wheels 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' \
        'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-nvrtc==13.0.*' \
        'nvidia-nvtx==13.0.*' 'nvidia-cublas==13.1.*' 'nvidia-nccl-cu13==2.28.*' 'nvidia-cudnn-cu13==9.19.*'
}

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "deps.sh: this is no Debian (no apt-get); please install what corresponds to: ${packages[*]}" >&2
    exit 1
fi
installed=" $(dpkg-query -W -f '${db:Status-Status} ${Package} ' "${packages[@]}" 2>/dev/null || true)"
missing=()
for p in "${packages[@]}"; do
    [[ $installed == *" installed $p "* ]] || missing+=("$p")
done
if [[ ${#missing[@]} == 0 ]]; then
    [[ $* != --cuda ]] || cuda_wheels
    exit 0
fi

root=()
if [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null ||
        { echo "deps.sh: needs root (and there is no sudo) to install: ${missing[*]}" >&2; exit 1; }
    root=(sudo)
fi
echo "deps.sh: installing ${missing[*]}"
apt() { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@"; }
log=$(mktemp); trap 'rm -f "$log"' EXIT
# lists that can't be refreshed may still do; the install says so if not
if ! apt update >"$log" 2>&1; then
    echo "deps.sh: apt-get update failed, trying with the lists at hand:" >&2
    tail -n 3 "$log" >&2
fi
if ! apt install --no-install-recommends "${missing[@]}" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    echo "deps.sh: apt-get could not install: ${missing[*]}" >&2
    exit 1
fi
[[ $* != --cuda ]] || cuda_wheels
