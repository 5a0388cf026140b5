#!/bin/bash
# Builds DEVICE=cuda for the GPU at hand, runs its tests, times its kernels and trains a few steps: a table for people,
# gpu_check.json, and a closing line `N passed, N failed`. Needs the CUDA toolkit (or PyTorch's wheels and nvcc), no MPI and no
# network. doc/gpu.md says how to read it.
#
#   scripts/gpu_check.sh [FOLDER]     files go to FOLDER, out/gpu_check: gpu_check.json, table.txt, a log of each part
#
# It takes at most GPU_CHECK_SECONDS, 480: each part has a limit of its own, what no longer fits is skipped, and says so. A part
# that fails does not end the rest. Without a GPU: one line, exit status 1. GPU_CHECK_DEVICE=emu tries the script itself, with
# small shapes, in the emulator; its figures mean nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
[[ $# -le 1 && ${1:-} != -* ]] || { echo "usage: scripts/gpu_check.sh [FOLDER]" >&2; exit 2; }
OUT=${1:-out/gpu_check} DEVICE=${GPU_CHECK_DEVICE:-cuda} ALL_SECONDS=${GPU_CHECK_SECONDS:-480}
JOBS=$(nproc) SMALL=$([[ $DEVICE == cuda ]] && echo 0 || echo 1)
die() { echo "gpu_check.sh: $*" >&2; exit 1; }
[[ $DEVICE == cuda || $DEVICE == emu ]] || die "GPU_CHECK_DEVICE=$DEVICE: want cuda or emu"
[[ $ALL_SECONDS =~ ^[1-9][0-9]*$ ]] || die "GPU_CHECK_SECONDS=$ALL_SECONDS: want a number of seconds"
export FO_SHARE_GPUS=1 # ranks are threads that share the GPU
closing='^[0-9]+ passed, [0-9]+ failed$'

# ---- is there a GPU? -------------------------------------------------------------------------------------------------
gpu="the emulator" driver="" memory=0 cap="" power="" clock=""
if [[ $DEVICE == cuda ]]; then
    command -v nvidia-smi >/dev/null || die "no NVIDIA GPU here: there is no nvidia-smi, which comes with the driver"
    fields=name,driver_version,memory.total,compute_cap,power.limit,clocks.max.sm
    smi=$(nvidia-smi --query-gpu=$fields --format=csv,noheader,nounits 2>&1) && [[ $smi == *,*,*,*,* ]] ||
        die "no NVIDIA GPU here: nvidia-smi says: $(tr '\n' ' ' <<<"${smi:-nothing}")"
    IFS=, read -r gpu driver memory cap power clock < <(head -1 <<<"$smi" | sed 's/, */,/g')
    [[ $cap =~ ^[0-9]+\.[0-9]$ ]] || die "nvidia-smi gives no compute capability ('$cap'): a newer driver is needed"
fi
paths=$(bash scripts/cuda_paths.sh) || die "scripts/cuda_paths.sh failed"
path() { sed -n "s/^$1 := *//p" <<<"$paths"; }
[[ $(path CUDA_RUNTIME) == 1 ]] || die "no $(path CUDA_RUNTIME_MISSING): install the CUDA toolkit and set CUDA_HOME"
[[ $(path CUDA_BLAS) == 1 ]] || die "no $(path CUDA_BLAS_MISSING): install cuBLAS with the CUDA toolkit, or its wheel"
nvcc=$(path NVCC)
[[ -n $nvcc || $DEVICE == emu ]] || die "no nvcc: install the CUDA toolkit and set CUDA_HOME (PyTorch's wheels have none)"
command -v "${CC:-gcc}" make >/dev/null || die "no gcc or make"
cudnn=$(path FO_CUDNN)
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) && rm -f "$OUT"/*.log "$OUT"/*.json "$OUT"/*.txt || die "can't write to $OUT"

# ---- parts -----------------------------------------------------------------------------------------------------------
passed=0 failed=0 rows=() train_rows=() bench_rows=() demands=() background=""
left() { echo $((ALL_SECONDS - SECONDS)); }
note() { # STATUS SECONDS NAME NOTE: a row of the table
    rows+=("$1|$2|$3|$4")
    printf '[%3d s] %-8s %s%s\n' $SECONDS "$1" "$3" "$([[ $1 == passed ]] || echo ": $4")"
}
reason() { # why a part failed, from its log, in a few words
    { grep -m1 -E 'failed:|error|Error|ERROR' "$1" || tail -n 1 "$1"; } 2>/dev/null | tr -d '"\\' | tr '\t' ' ' | cut -c1-110
}
# part NAME LIMIT COMMAND...: runs it for at most LIMIT seconds; output in $OUT/NAME.log. OPTIONAL=1: one that is not done by then
# counts as skipped. Sets rc; says nothing of one that ended with 0, that is its caller's
part() {
    local name=$1 limit=$2 start=$SECONDS; shift 2
    log="$OUT/${name//[ :,]/_}.log" took=0 rc=1
    if (($(left) < 8)); then note skipped 0 "$name" "no time left"; rc=75; return; fi
    ((limit <= $(left))) || limit=$(left)
    timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null; rc=$?
    took=$((SECONDS - start))
    if [[ $rc == 124 || $rc == 137 ]]; then
        if [[ ${OPTIONAL:-0} == 1 ]]; then note skipped $took "$name" "not done in $limit s"
        else note failed $took "$name" "not done in $limit s"; failed=$((failed + 1)); fi
    elif [[ $rc != 0 && ${COUNTS:-0} == 0 ]]; then
        note failed $took "$name" "exit status $rc: $(reason "$log")"; failed=$((failed + 1))
    fi
}
ok() { note passed "$took" "$1" "${2:-}"; passed=$((passed + 1)); }
checked() { # a test: as many as its closing lines say
    local p f sum_p=0 sum_f=0 closed=0
    COUNTS=1 part "$@"
    [[ $rc != 124 && $rc != 137 && $rc != 75 ]] || return 0
    while read -r p _ f _; do closed=1 sum_p=$((sum_p + p)) sum_f=$((sum_f + f)); done < <(grep -E "$closing" "$log" | tr -d ,)
    [[ $closed == 1 && ($rc == 0 || $sum_f != 0) ]] || { sum_f=$((sum_f + 1)); }
    passed=$((passed + sum_p)) failed=$((failed + sum_f))
    if [[ $sum_f == 0 ]]; then note passed $took "$1" "$sum_p checks"
    else note failed $took "$1" "$sum_f of $((sum_p + sum_f)); exit status $rc: $(reason "$log")"; fi
}

# ---- closing ---------------------------------------------------------------------------------------------------------
text() { printf '"%s"' "$(tr -d '"\\' <<<"$1" | tr '\n\t' '  ' | sed 's/ *$//')"; }
joined() { local IFS=,; echo "$*"; }
write_json() {
    local r s t n w parts=()
    for r in "${rows[@]}"; do
        IFS='|' read -r s t n w <<<"$r"
        parts+=("
{\"status\": $(text "$s"), \"seconds\": $t, \"name\": $(text "$n"), \"note\": $(text "$w")}")
    done
    echo "{\"date\": $(text "$(date -u +%FT%TZ)"), \"device\": $(text "$DEVICE"), \"gpu\": $(text "$gpu"), \"driver\": $(text "$driver"),"
    echo "\"compute_capability\": $(text "$cap"), \"memory_mib\": ${memory:-0}, \"power_limit_w\": $(text "$power"), \"max_sm_mhz\": $(text "$clock"),"
    echo "\"machine\": $(text "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)"), \"cores\": $JOBS, \"system\": $(text "$(uname -sr)"),"
    echo "\"nvcc\": $(text "$nvcc_version"), \"program\": $(text "$program"), \"commit\": $(text "$commit"), \"seconds\": $SECONDS,"
    echo "\"passed\": $passed, \"failed\": $failed, \"parts\": [$(joined "${parts[@]}")],"
    echo "\"training\": [$(joined "${train_rows[@]}")],"
    echo "\"demands\": [$(joined "${demands[@]}")],"
    echo "\"bench\": [$(joined "${bench_rows[@]}")]}"
}
table() {
    local r s t n w f d
    echo
    echo "# gpu_check, $(date -u +%F), $gpu${driver:+, driver $driver}${nvcc_version:+, nvcc $nvcc_version}, $JOBS cores, commit $commit"
    echo "# ${program:-not built}"
    for f in "$OUT"/kernels_and_GEMMs.log "$OUT"/own_attention.log; do
        [[ -s $f ]] || continue
        echo; echo "## $(basename "$f" .log | tr _ ' ')"; sed -E 's/ +$//; s/ ms +/ ms  /' "$f"
    done
    echo
    echo "## parts; the tp rows: ranks that share one GPU, so they show that it works, not what links can do"
    for r in "${rows[@]}"; do
        IFS='|' read -r s t n w <<<"$r"
        printf '%-8s %4s s  %-30s %s\n' "$s" "$t" "$n" "$w"
    done
    echo
    echo "## demands: judged, not counted as passed or failed"
    for d in "${demands[@]}"; do
        sed -nE 's/.*"name": "(.*)", "got": (.*), "limit": (.*), "met": true.*/met      \1: \2, wanted \3/p
                 s/.*"name": "(.*)", "got": (.*), "limit": (.*), "met": false.*/NOT MET  \1: \2, wanted \3/p' <<<"$d"
    done
    [[ ! -s $OUT/kernels_and_GEMMs.log ]] || sed -nE 's/^# demands: /         /p' "$OUT/kernels_and_GEMMs.log"
    echo "# written: $OUT/gpu_check.json, table.txt and a log of each part; $SECONDS s in all"
    echo "$passed passed, $failed failed"
}
finish() {
    trap - EXIT
    [[ -z $background ]] || { kill "$background" 2>/dev/null; wait "$background" 2>/dev/null; }
    rm -f "$OUT"/shard.bin
    [[ -z ${mfu_124M:-} ]] || demand "MFU of 124M in percent (meant for one H200)" "$mfu_124M" 45
    [[ -z ${mfu_1558M:-} ]] || demand "MFU of 1558M in percent (meant for one H200)" "$mfu_1558M" 50
    for f in "$OUT"/bench*.json; do [[ ! -s $f ]] || bench_rows+=("{\"file\": $(text "$(basename "$f")"), \"run\": $(<"$f")}"); done
    write_json >"$OUT/gpu_check.json"
    table | tee "$OUT/table.txt"
    [[ $failed == 0 && $passed != 0 ]]
    exit
}
trap finish EXIT
trap 'exit 130' INT TERM

# ---- build -----------------------------------------------------------------------------------------------------------
folder() { echo "build/$DEVICE-$1"; }
build() { # PRECISION TARGET...
    local precision=$1; shift
    make --no-print-directory -j"$JOBS" DEVICE=$DEVICE MPI=0 PRECISION="$precision" SMS="${cap/./}" "$@"
}
export -f build; export DEVICE JOBS cap
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown) program=""
nvcc_version=$([[ -z $nvcc ]] || "$nvcc" --version 2>/dev/null | sed -n 's/.*release \([^ ]*\), \(.*\)/\1 \2/p')
echo "# $(date -u +%FT%TZ), $gpu${driver:+, driver $driver}${cap:+, compute capability $cap}${nvcc_version:+, nvcc $nvcc_version}"
echo "# cuDNN $([[ $cudnn == 1 && $DEVICE == cuda ]] && echo found || echo "not built in"), commit $commit, at most $ALL_SECONDS s"
B=$(folder BF16)
tests_of() { # the tests that use a device: the others are proven without one
    local t
    for t in dev/test/test_*.c dev/test/test_*.cu test_*.cu; do
        case $t in *_mpi.c | *test_plan.c | *test_model.c | *test_options.c | *test_data.c | *test_train.c) ;;
        *) echo "${t%.*}" ;; esac
    done
}
kernels="dev/test/test_ops dev/test/test_matmul dev/test/test_attention"
tests=$(tests_of) fp32="$kernels test_gpt"
if [[ $SMALL == 1 ]]; then tests="dev/test/test_ops dev/test/test_device" fp32=dev/test/test_ops kernels=dev/test/test_ops; fi
part "build BF16" 240 bash -c "build BF16 $(printf "$B/%s " $tests train_gpt dev/bench/bench_kernels)"
[[ $rc == 0 ]] || exit 1
ok "build BF16"
program=$("$B/dev/bench/bench_kernels" --only attention --model 124M --scale 65536 --rounds 1 2>&1 | sed -n '1s/^# //p')
echo "# $program"
# of the second precision while the GPU is busy with the first
(build FP32 $(printf "$(folder FP32)/%s " $fp32) >"$OUT/build_FP32.log" 2>&1) &
background=$!

# ---- tests -----------------------------------------------------------------------------------------------------------
for t in $tests; do checked "bf16 $(basename "$t")" $([[ $t == test_gpt ]] && echo 100 || echo 60) "$B/$t"; done

# ---- training --------------------------------------------------------------------------------------------------------
# a token shard: header, then random bytes below 128 in pairs, so tokens below 32640; in small, of two values each: below 258
shard() {
    local n=$1 set=$([[ $SMALL == 1 ]] && echo '[\000*128][\001*128]' || echo '\000-\177\000-\177')
    printf '\x88\xd8\x34\x01\x01\x00\x00\x00%b%b%b%b' "$(printf '\\x%02x' $((n & 255)) $((n >> 8 & 255)) $((n >> 16 & 255)) $((n >> 24)))"
    head -c 1012 /dev/zero
    head -c $((2 * n)) /dev/urandom | LC_ALL=C tr '\000-\377' "$set"
}
median() { # of PATTERN's group in the step lines of a log, from the third step on
    grep '^step ' "$log" | tail -n +3 | sed -nE "s/.*$1.*/\1/p" | sort -g | awk '{v[NR]=$1} END {if (NR) print v[int((NR+1)/2)]; else print 0}'
}
# train NAME MODEL B T STEPS LIMIT OPTION...: a row of the table of training
train() {
    local name=$1 model=$2 b=$3 t=$4 steps=$5 limit=$6; shift 6
    part "$name" "$limit" "$B/train_gpt" -i "$OUT/shard.bin" -j "$OUT/shard.bin" -e "$model" -b "$b" -t "$t" -x "$steps" -v 0 -s 0 -l 1e-4 "$@"
    ms=0 mfu=0 tokens=0
    [[ $rc == 0 ]] || return 0
    ms=$(median '\| ([0-9.]+) ms \|') mfu=$(median '\| ([0-9.]+)% [a-z0-9]+ MFU') comm=$(median 'comm ([0-9.]+) ms')
    exposed=$(median 'exposed ([0-9.]+) ms') loss=$(grep '^step ' "$log" | tail -1 | sed -nE 's/.*loss ([-0-9.naif]+) .*/\1/p')
    tokens=$(awk "BEGIN {printf \"%.0f\", $ms > 0 ? $b * $t / $ms * 1e3 : 0}")
    memory_line=$(grep -m1 '^memory of rank' "$log" | sed 's/.*in all //')
    train_rows+=("
{\"name\": $(text "$name"), \"model\": $(text "$model"), \"batch\": $b, \"seq_len\": $t, \"steps\": $steps, \"options\": $(text "$*"), \"ms\": $ms, \"tok_s\": $tokens, \"mfu_percent\": $mfu, \"comm_ms\": $comm, \"exposed_ms\": $exposed, \"last_loss\": $(text "$loss"), \"memory\": $(text "$memory_line")}")
    if [[ $loss =~ ^[0-9.]+$ && $ms != 0 ]]; then ok "$name" "$ms ms a step, $tokens tok/s, $mfu % MFU, loss $loss$([[ $* != *--tp* ]] || echo ", exposed $exposed of $comm ms")"
    else note failed $took "$name" "loss '$loss', $ms ms a step"; failed=$((failed + 1)); fi
}
if [[ $SMALL == 1 ]]; then
    tiny=L=2,C=64,NH=4,V=258,maxT=64
    small=("$tiny" 4 64) large=("$tiny" 4 64) shared=("$tiny" 4 64) STEPS=5 bench_options=(--scale 512 --rounds 1)
    shard 20000 >"$OUT/shard.bin"
else
    small=(d12 64 1024) large=(gpt2:d48 16 1024) shared=(d12 16 1024) STEPS=20 bench_options=()
    shard 2000000 >"$OUT/shard.bin"
fi
best() { awk -v a="$1" -v b="$2" 'BEGIN {print (a > b ? a : b)}'; }
demand() { # NAME GOT LIMIT: at least that much
    local met; met=$(awk -v a="$2" -v b="$3" 'BEGIN {print a >= b ? "true" : "false"}')
    demands+=("
{\"name\": $(text "$1"), \"got\": $2, \"limit\": $3, \"met\": $met}")
}
train "train 124M" "${small[@]}" $STEPS 60 --graph 0; first=$mfu
train "train 124M, graph" "${small[@]}" $STEPS 60 --graph 1; mfu_124M=$(best "$first" "$mfu")
train "train 1558M, graph" "${large[@]}" $STEPS 120 --graph 1; mfu_1558M=$mfu

# ---- kernels ---------------------------------------------------------------------------------------------------------
bench() { # NAME FILE LIMIT OPTION...
    local name=$1 file=$2 limit=$3; shift 3
    part "$name" "$limit" "$B/dev/bench/bench_kernels" "${bench_options[@]}" --json "$OUT/$file" "$@"
    [[ $rc == 0 ]] && ok "$name" "$(grep '^# demands' "$log" | sed 's/# demands: //')"
}
bench "kernels and GEMMs" bench.json 60
if [[ $cudnn == 0 && $DEVICE == cuda ]]; then
    note skipped 0 "own attention" "no cuDNN to compare with: the rows above are its"
else
    FO_ATTENTION=own bench "own attention" bench_own_attention.json 30 --only attention
fi

# ---- ranks that share the GPU ----------------------------------------------------------------------------------------
for P in 2 4; do
    for mode in none slice:2 flash; do
        train "tp $P on one GPU, $mode" "${shared[@]}" $((STEPS / 2)) 40 --tp $P --overlap $mode
    done
done

# ---- the second precision --------------------------------------------------------------------------------------------
while kill -0 "$background" 2>/dev/null && (($(left) > 5)); do sleep 0.2; done
if kill -0 "$background" 2>/dev/null; then
    note skipped 0 "build FP32" "no time left"
else
    wait "$background"; rc=$? background="" took=0 log=$OUT/build_FP32.log
    if [[ $rc == 0 ]]; then
        ok "build FP32" "beside the rest"
        for t in $fp32; do checked "fp32 $(basename "$t")" 60 "$(folder FP32)/$t"; done
    else
        note failed 0 "build FP32" "exit status $rc: $(reason "$log")"; failed=$((failed + 1))
    fi
fi

# ---- compute-sanitizer -----------------------------------------------------------------------------------------------
sanitizer=$(command -v compute-sanitizer || ls "$(dirname "${nvcc:-/}")/compute-sanitizer" "${CUDA_HOME:-/usr/local/cuda}"/{bin,compute-sanitizer}/compute-sanitizer 2>/dev/null | head -1)
sanitize() { # TOOL TEST OPTION...; slow: a test that is not done in its time counts neither way
    local tool=$1 test=$2; shift 2
    OPTIONAL=1 COUNTS=0 part "$tool $(basename "$test")" 45 "$sanitizer" --tool "$tool" --error-exitcode 77 --target-processes application-only "$@" "$B/$test"
    [[ $rc == 0 ]] && ok "$tool $(basename "$test")"
}
if [[ -z $sanitizer ]]; then
    note skipped 0 compute-sanitizer "not found: it comes with the CUDA toolkit"
else
    export FO_ATTENTION=own # the library's kernels are not ours to check
    for t in $kernels; do sanitize memcheck "$t" --report-api-errors no; done
    for t in $kernels; do [[ $t == *matmul ]] || sanitize racecheck "$t"; done
    sanitize initcheck dev/test/test_ops
    unset FO_ATTENTION
fi
# last, since it is the longest and --graph 1 has been timed
train "train 1558M" "${large[@]}" $STEPS 120 --graph 0; mfu_1558M=$(best "$mfu" "$mfu_1558M")
