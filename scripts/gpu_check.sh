#!/bin/bash
# Builds DEVICE=cuda for the GPU at hand, runs its tests, times its kernels, trains a few steps: a table for people,
# gpu_check.json, and a closing line `N passed, N failed`. Needs the CUDA toolkit (or PyTorch's wheels and nvcc), no
# MPI and no network. doc/gpu.md says how to read it.
#
#   scripts/gpu_check.sh [FOLDER]     FOLDER, out/gpu_check, gets gpu_check.json, table.txt and a log of each part
#
# It takes at most GPU_CHECK_SECONDS, 480. Each part has a limit of its own; what no longer fits is skipped, and says
# so; a part that fails does not end the rest. Without a GPU: one line, exit status 1. GPU_CHECK_DEVICE=emu tries the
# script itself in the emulator, with small shapes: its figures mean nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
[[ $# -le 1 && ${1:-} != -* ]] || { echo "usage: scripts/gpu_check.sh [FOLDER]" >&2; exit 2; }
OUT=${1:-out/gpu_check} DEVICE=${GPU_CHECK_DEVICE:-cuda} ALL_SECONDS=${GPU_CHECK_SECONDS:-480} JOBS=$(nproc)
die() { echo "gpu_check.sh: $*" >&2; exit 1; }
[[ $DEVICE == cuda || $DEVICE == emu ]] || die "GPU_CHECK_DEVICE=$DEVICE: want cuda or emu"
[[ $ALL_SECONDS =~ ^[1-9][0-9]*$ ]] || die "GPU_CHECK_SECONDS=$ALL_SECONDS: want a number of seconds"

# ---- is there a GPU, and what to build with? -------------------------------------------------------------------
gpu="the emulator" driver="" memory=0 cap="" power="" clock=""
if [[ $DEVICE == cuda ]]; then
    command -v nvidia-smi >/dev/null || die "no NVIDIA GPU here: there is no nvidia-smi, which comes with the driver"
    fields=name,driver_version,memory.total,compute_cap,power.limit,clocks.max.sm
    smi=$(nvidia-smi --query-gpu=$fields --format=csv,noheader,nounits 2>&1) && [[ $smi == *,*,*,*,* ]] ||
        die "no NVIDIA GPU here: nvidia-smi says: $(tr '\n' ' ' <<<"${smi:-nothing}")"
    IFS=, read -r gpu driver memory cap power clock < <(head -1 <<<"$smi" | sed 's/, */,/g')
    [[ $cap =~ ^[0-9]+\.[0-9]$ ]] || die "nvidia-smi gives no compute capability ('$cap'): a newer driver is needed"
    [[ $memory =~ ^[0-9]+$ ]] || memory=0
fi
paths=$(bash scripts/cuda_paths.sh) || die "scripts/cuda_paths.sh failed"
path() { sed -n "s/^$1 := *//p" <<<"$paths"; }
[[ $(path CUDA_RUNTIME) == 1 ]] || die "no $(path CUDA_RUNTIME_MISSING): install the CUDA toolkit and set CUDA_HOME"
[[ $(path CUDA_BLAS) == 1 ]] || die "no $(path CUDA_BLAS_MISSING): install cuBLAS with the toolkit, or its wheel"
nvcc=$(path NVCC) cudnn=$([[ $DEVICE == cuda ]] && path FO_CUDNN || echo 0)
[[ -n $nvcc || $DEVICE == emu ]] || die "no nvcc: install the CUDA toolkit and set CUDA_HOME"
for tool in "${CC:-gcc}" make; do command -v "$tool" >/dev/null || die "no $tool"; done
mkdir -p "$OUT" 2>/dev/null && OUT=$(cd "$OUT" && pwd) && rm -f "$OUT"/*.log "$OUT"/*.json "$OUT"/table.txt &&
    : >"$OUT/shard.bin" || die "can't write to $OUT"
nvcc_version=$([[ -z $nvcc ]] || "$nvcc" --version | sed -n 's/.*release \([^ ]*\), \(.*\)/\1 \2/p')
[[ -n $nvcc_version || $DEVICE == emu ]] || die "$nvcc does not run: its --version says nothing"
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown) program=""
cpu="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $JOBS cores"
machine="$gpu${driver:+, driver $driver}${cap:+, compute capability $cap}${nvcc_version:+, nvcc $nvcc_version}, $cpu"
echo "# $(date -u +%FT%TZ), $machine"
echo "# commit $commit, $([[ $cudnn == 1 ]] && echo with || echo without) cuDNN, at most $ALL_SECONDS s"

# ---- parts -----------------------------------------------------------------------------------------------------
passed=0 failed=0 rows=() train_rows=() bench_rows=() demands=() background="" child=""
closing='^[0-9]+ passed, [0-9]+ failed$'
note() { # STATUS SECONDS NAME NOTE: a row of the table
    rows+=("$1|$2|$3|$4")
    printf '[%3d s] %-8s %s%s\n' $SECONDS "$1" "$3" "$([[ $1 == passed ]] || echo ": $4")"
}
pass() { note passed "$took" "$1" "${2:-}"; passed=$((passed + 1)); }
fail() { note failed "$took" "$1" "$2"; failed=$((failed + 1)); }
reason() { # what a log says of its failure, in a few words
    { grep -m1 -E 'failed:|SUMMARY' "$1" || grep -m1 -i error "$1" || tail -n 1 "$1"; } 2>/dev/null |
        tr -d '"\\|' | tr '\t' ' ' | cut -c1-100
}
# part NAME LIMIT COMMAND...: runs it for at most LIMIT seconds, its output to $log. Sets took, and rc: 0 ended well;
# 75 skipped, 124 not done in time, which are on the table already; else its exit status. With SLOW=1, what is not
# done in time is skipped, not failed
part() {
    local name=$1 limit=$2 start=$SECONDS left=$((ALL_SECONDS - SECONDS)); shift 2
    log="$OUT/${name//[ :,]/_}.log" took=0 rc=75
    if ((left < 8)); then note skipped 0 "$name" "no time left"; return; fi
    # in the background: a signal's trap runs at once while the shell waits
    timeout -k 5 $((limit < left ? limit : left)) "$@" >"$log" 2>&1 </dev/null &
    child=$!
    wait $child; rc=$?
    child="" took=$((SECONDS - start))
    if (((took >= left || ${SLOW:-0}) && (rc == 124 || rc == 137))); then
        note skipped $took "$name" "not done in $took s"; rc=75
    elif ((rc == 124 || rc == 137)); then
        fail "$name" "not done in $limit s"; rc=124
    fi
}
done_or_failed() { # the verdict over a part that has no checks of its own: 0 if it ended well
    ((rc == 0 || rc == 75 || rc == 124)) || fail "$1" "exit status $rc: $(reason "$log")"
    ((rc == 0))
}
checked() { # the same arguments as part: a test, whose closing lines count
    local p f sum_p=0 sum_f=0 closed=0
    part "$@"
    ((rc != 75 && rc != 124)) || return 0
    while read -r p _ f _; do
        closed=1 sum_p=$((sum_p + p)) sum_f=$((sum_f + f))
    done < <(grep -E "$closing" "$log" | tr -d ,)
    ((closed && (rc == 0 || sum_f != 0))) || sum_f=$((sum_f + 1)) # a crash
    passed=$((passed + sum_p))
    if ((sum_f == 0)); then note passed $took "$1" "$sum_p checks"; return; fi
    failed=$((failed + sum_f))
    note failed $took "$1" "$sum_f of $((sum_p + sum_f)), exit status $rc: $(reason "$log")"
}

# ---- closing ---------------------------------------------------------------------------------------------------
text() { printf '"%s"' "$(tr -d '"\\' <<<"$1" | tr '\n\t' '  ' | sed 's/ *$//')"; }
joined() { local IFS=,; echo "$*"; }
write_json() {
    local r s t n w parts=()
    for r in "${rows[@]}"; do
        IFS='|' read -r s t n w <<<"$r"
        parts+=($'\n'"{\"status\": $(text "$s"), \"seconds\": $t, \"name\": $(text "$n"), \"note\": $(text "$w")}")
    done
    echo "{\"date\": $(text "$(date -u +%FT%TZ)"), \"device\": $(text "$DEVICE"), \"gpu\": $(text "$gpu"),"
    echo "\"driver\": $(text "$driver"), \"compute_capability\": $(text "$cap"), \"memory_mib\": $memory,"
    echo "\"power_limit_w\": $(text "$power"), \"max_sm_mhz\": $(text "$clock"), \"cpu\": $(text "$cpu"),"
    echo "\"system\": $(text "$(uname -sr)"), \"nvcc\": $(text "$nvcc_version"), \"program\": $(text "$program"),"
    echo "\"commit\": $(text "$commit"), \"seconds\": $SECONDS, \"passed\": $passed, \"failed\": $failed,"
    echo "\"parts\": [$(joined "${parts[@]}")],"
    echo "\"training\": [$(joined "${train_rows[@]}")],"
    echo "\"demands\": [$(joined "${demands[@]}")],"
    echo "\"bench\": [$(joined "${bench_rows[@]}")]}"
}
table() {
    local r s t n w d f
    printf '\n# gpu_check %s, %s, commit %s\n# %s\n' "$(date -u +%F)" "$machine" "$commit" "${program:-not built}"
    for f in "$OUT"/kernels_and_GEMMs.log "$OUT"/own_attention.log; do
        if [[ -s $f ]]; then printf '\n## %s\n' "$(basename "$f" .log | tr _ ' ')"; sed 1d "$f" | tr -s ' '; fi
    done
    printf '\n## parts. tp: ranks that share one GPU, which shows that it works, not what links do\n'
    for r in "${rows[@]}"; do
        IFS='|' read -r s t n w <<<"$r"
        printf '%-7s %4s s  %-29s %s\n' "$s" "$t" "$n" "$w"
    done
    printf '\n## demands: judged, neither passed nor failed\n'
    for d in "${demands[@]}"; do
        sed -nE 's/.*"name": "(.*)", "got": (.*), "limit": (.*), "met": (.*)}/\4: \1 \2, wanted \3/p' <<<"$d"
    done | sed 's/^true:/met:    /; s/^false:/NOT MET:/'
    sed -nE 's/^# demands: /         /p' "$OUT"/kernels_and_GEMMs.log 2>/dev/null
    echo "# written: $OUT/gpu_check.json, table.txt and a log of each part; $SECONDS s in all"
    echo "$passed passed, $failed failed"
}
demand() { # NAME GOT LIMIT: at least that much
    local met; met=$(awk "BEGIN {print ($2 >= $3) ? \"true\" : \"false\"}")
    demands+=($'\n'"{\"name\": $(text "$1"), \"got\": $2, \"limit\": $3, \"met\": $met}")
}
finish() {
    local f
    trap - EXIT
    for f in $child $background; do kill "$f" 2>/dev/null && wait "$f"; done 2>/dev/null
    rm -f "$OUT"/shard.bin
    [[ ${mfu_124M:-0} == 0 ]] || demand "MFU of 124M, percent of one H200" "$mfu_124M" 45
    [[ ${mfu_1558M:-0} == 0 ]] || demand "MFU of 1558M, percent of one H200" "$mfu_1558M" 50
    for f in "$OUT"/bench*.json; do
        [[ ! -s $f ]] || bench_rows+=("{\"file\": $(text "$(basename "$f")"), \"run\": $(<"$f")}")
    done
    write_json >"$OUT/gpu_check.json"
    table | tee "$OUT/table.txt"
    if ((failed > 0 || passed == 0)); then exit 1; fi
    exit 0
}
trap finish EXIT
trap 'took=0; fail interrupted "by a signal"; exit 130' INT TERM

# ---- build -----------------------------------------------------------------------------------------------------
export FO_SHARE_GPUS=1 # ranks are threads that share the GPU
small=(d12 64 1024) large=(gpt2:d48 16 1024) shared=(d12 16 1024) STEPS=20 ntokens=2000000 bytes='\000-\177\000-\177'
kernels=(dev/test/test_ops dev/test/test_matmul dev/test/test_attention) tests=() fp32=("${kernels[@]}" test_gpt)
bench_options=()
for t in dev/test/test_*.c dev/test/test_*.cu test_*.cu; do # those that use a device: the rest is proven without one
    case $t in *_mpi.c | *_tcp.c | *test_plan.c | *test_model.c | *test_options.c | *test_data.c | *test_train.c) ;;
    *) tests+=("${t%.*}") ;; esac
done
if [[ $DEVICE == emu ]]; then
    small=(L=2,C=64,NH=4,V=258,maxT=64 4 64) large=("${small[@]}") shared=("${small[@]}") STEPS=6 ntokens=20000
    bytes='[\000*128][\001*128]' bench_options=(--scale 512 --rounds 1)
    kernels=(dev/test/test_ops) tests=(dev/test/test_ops dev/test/test_device) fp32=(dev/test/test_ops)
fi
B=build/$DEVICE-BF16 B32=build/$DEVICE-FP32
build() { make --no-print-directory DEVICE="$DEVICE" MPI=0 SMS="${cap/./}" "$@"; }
export -f build; export DEVICE cap
part "build bf16" 240 bash -c 'build "$@"' build -j"$JOBS" "${tests[@]/#/$B/}" $B/train_gpt $B/dev/bench/bench_kernels
done_or_failed "build bf16" || exit 1
pass "build bf16"
# the second precision meanwhile: the tests leave most cores idle
timeout 300 bash -c 'build "$@"' build -j$(((JOBS + 1) / 2)) PRECISION=FP32 "${fp32[@]/#/$B32/}" \
    >"$OUT/build_fp32.log" 2>&1 </dev/null &
background=$!

# ---- tests -----------------------------------------------------------------------------------------------------
for t in "${tests[@]}"; do
    checked "bf16 $(basename "$t")" 90 "$B/$t"
    [[ $t != *test_attention || $cudnn == 0 ]] || FO_ATTENTION=own checked "bf16 test_attention, own" 60 "$B/$t"
done

# ---- training --------------------------------------------------------------------------------------------------
byte() { printf "\\x$(printf %02x $(($1 & 255)))"; }
shard() { # a header, then random bytes in pairs: tokens below 32640, or, for the emulator's model, below 258
    printf '\x88\xd8\x34\x01\x01\x00\x00\x00'
    byte "$1"; byte $(($1 >> 8)); byte $(($1 >> 16)); byte $(($1 >> 24))
    head -c 1012 /dev/zero
    head -c $((2 * $1)) /dev/urandom | LC_ALL=C tr '\000-\377' "$bytes"
}
median() { # of what a pattern finds in the step lines, from the third step on
    grep '^step ' "$log" | tail -n +3 | sed -nE "s/.*$1.*/\1/p" | sort -g |
        awk '{v[NR] = $1} END {print NR ? v[int((NR + 1) / 2)] : 0}'
}
best() { awk "BEGIN {print ($1 > $2) ? $1 : $2}"; }
# train NAME LIMIT STEPS MODEL B T OPTION...: sets mfu, 0 if it did not run
train() {
    local name=$1 limit=$2 steps=$3 model=$4 b=$5 t=$6 ms comm exposed loss tokens memory; shift 6
    mfu=0
    part "$name" "$limit" "$B/train_gpt" -i "$OUT/shard.bin" -j "$OUT/shard.bin" -e "$model" -b "$b" -t "$t" \
        -x "$steps" -v 0 -s 0 -l 1e-4 "$@"
    done_or_failed "$name" || return 0
    program=$(sed -nE 's/^\| device +\| (.*[^ ]) +\|$/\1/p' "$log")
    ms=$(median '\| ([0-9.]+) ms \|') comm=$(median 'comm ([0-9.]+) ms') exposed=$(median 'exposed ([0-9.]+) ms')
    loss=$(grep '^step ' "$log" | tail -1 | sed -nE 's/.*loss ([^ ]+) .*/\1/p')
    if ! [[ $loss =~ ^[0-9.]+$ && $ms != 0 ]]; then fail "$name" "loss '$loss', '$ms' ms a step"; return; fi
    mfu=$(median '\| ([0-9.]+)% [a-z0-9]+ MFU') tokens=$(awk "BEGIN {printf \"%.0f\", 1e3 * $b * $t / $ms}")
    memory=$(sed -nE 's/^memory of rank.*in all //p' "$log")
    train_rows+=($'\n'"{\"name\": $(text "$name"), \"model\": $(text "$model"), \"batch\": $b, \"seq_len\": $t,
  \"steps\": $steps, \"options\": $(text "$*"), \"ms\": $ms, \"tok_s\": $tokens, \"mfu_percent\": $mfu,
  \"comm_ms\": $comm, \"exposed_ms\": $exposed, \"last_loss\": $loss, \"memory\": $(text "$memory")}")
    [[ $* == *--tp* ]] && exposed=", exposed $exposed of $comm ms" || exposed=", $mfu % MFU"
    pass "$name" "$ms ms a step, $tokens tok/s$exposed, loss $loss"
}
shard $ntokens >"$OUT/shard.bin"
train "train 124M" 60 $STEPS "${small[@]}" --graph 0; mfu_124M=$mfu
train "train 124M, graph" 60 $STEPS "${small[@]}" --graph 1; mfu_124M=$(best "$mfu" "$mfu_124M")
train "train 1558M, graph" 120 $STEPS "${large[@]}" --graph 1; mfu_1558M=$mfu

# ---- kernels ---------------------------------------------------------------------------------------------------
bench() { # NAME LIMIT FILE OPTION...
    local name=$1 limit=$2 file=$3; shift 3
    part "$name" "$limit" $B/dev/bench/bench_kernels "${bench_options[@]}" --json "$OUT/$file" "$@"
    ! done_or_failed "$name" || pass "$name" "$(sed -n 's/^# demands: //p' "$log")"
}
bench "kernels and GEMMs" 60 bench.json
if [[ $cudnn == 1 || $DEVICE == emu ]]; then
    FO_ATTENTION=own bench "own attention" 30 bench_own_attention.json --only attention
else
    note skipped 0 "own attention" "without cuDNN the rows above are its"
fi

# ---- ranks that share the GPU ----------------------------------------------------------------------------------
for P in 2 4; do
    for mode in none slice:2 flash; do
        train "tp $P on one GPU, $mode" 40 $((STEPS / 2)) "${shared[@]}" --tp $P --overlap $mode
    done
done

# ---- the second precision --------------------------------------------------------------------------------------
log=$OUT/build_fp32.log took=0
while kill -0 "$background" 2>/dev/null && ((ALL_SECONDS - SECONDS > 8)); do sleep 0.2; done
if kill -0 "$background" 2>/dev/null; then
    note skipped 0 "build fp32" "no time left"
elif wait "$background"; rc=$? background=""; done_or_failed "build fp32"; then
    pass "build fp32" "beside other parts"
    for t in "${fp32[@]}"; do checked "fp32 $(basename "$t")" 60 "$B32/$t"; done
fi

# ---- compute-sanitizer -----------------------------------------------------------------------------------------
find_sanitizer() {
    local d
    command -v compute-sanitizer && return
    for d in "$(dirname "${nvcc:-/}")" "${CUDA_HOME:-/usr/local/cuda}"/{bin,compute-sanitizer}; do
        if [[ -x $d/compute-sanitizer ]]; then echo "$d/compute-sanitizer"; return; fi
    done
}
sanitizer=$(find_sanitizer)
sanitize() { # TOOL TEST OPTION...; own kernels alone, the library's attention is not ours to check
    local tool=$1 test=$2 name; shift 2
    name="$tool $(basename "$test")"
    SLOW=1 FO_ATTENTION=own part "$name" 45 "$sanitizer" --tool "$tool" --error-exitcode 77 \
        --target-processes application-only "$@" "$B/$test"
    ! done_or_failed "$name" || pass "$name" "$(grep -m1 'SUMMARY' "$log" | sed 's/^=* *//')"
}
if [[ -n $sanitizer ]]; then
    for t in "${kernels[@]}"; do sanitize memcheck "$t" --report-api-errors no; done
    for t in "${kernels[@]}"; do [[ $t == *test_matmul ]] || sanitize racecheck "$t"; done
    sanitize initcheck dev/test/test_ops
else
    note skipped 0 compute-sanitizer "not found: it comes with the CUDA toolkit"
fi
# last: it is the longest, and --graph 1 has been timed
train "train 1558M" 120 $STEPS "${large[@]}" --graph 0; mfu_1558M=$(best "$mfu" "$mfu_1558M")
