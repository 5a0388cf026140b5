#!/bin/bash
# What scripts/run_*.sh have in common: a recipe sets its defaults, then calls recipe_run "$@".
#
#   scripts/run_124M.sh [--dry-run] [OPTION OF train_gpt ...]     (doc/training.md)
#
# Any of the variables below may be set in the environment, so that a recipe also runs on other machines and other data:
# RANKS=2 BATCH=16 OUT=out/try scripts/run_124M.sh. DRY=1 or --dry-run prints the arithmetic and the command, and stops.
#
# The run goes on from its newest checkpoint until that of the last step is there. After a crash it is started again, at
# most TRIES times in a row without a new checkpoint between, with a pause that doubles from PAUSE to MAX_PAUSE seconds.
# An error before the first step that this script has seen ends it at once. Ctrl-C, SIGTERM and SIGUSR1 end it after a
# checkpoint: the program gets SIGUSR1, which launchers hand on. A second one, two seconds later or more, kills.
# shellcheck disable=SC2153 # variables that are set by name, in defaults()
set -euo pipefail
given_batch=${BATCH-}

# defaults NAME=VALUE ... -- sets those variables that the environment does not set
defaults() {
    local each name
    for each in "$@"; do
        name=${each%%=*}
        [[ -n ${!name+set} ]] || printf -v "$name" '%s' "${each#*=}"
    done
}

recipe_die() { echo "${0##*/}: $*" >&2; exit 1; }

# FORMAT EXPRESSION NAME=VALUE ...: printf of an awk expression
calc() {
    local format=$1 expression=$2 each args=()
    shift 2
    for each in "$@"; do args+=(-v "$each"); done
    awk "${args[@]}" "BEGIN {printf \"$format\", $expression}"
}

recipe_defaults() {
    local name
    defaults RANKS=8 UP=1 TP=1 ZERO=1 RECOMPUTE=0 LAUNCH="" PROGRAM=./train_gpt \
        DATASET=fineweb10B SHARDS=fineweb EVERY=5000 KEEP=0 MAJOR=0 \
        BATCH=64 SEQ=1024 TOTAL=524288 SCHEDULE=cosine LR=6e-4 WARMUP=700 FINAL_LR=0 DECAY=0.1 \
        VAL_EVERY=250 VAL_BATCHES=20 SAMPLE_EVERY=0 \
        HELLASWAG=data/hellaswag/hellaswag_val.bin PEAK=312 MFU=0.5 TOK_S="" \
        DRY=0 TRIES=5 PAUSE=10 MAX_PAUSE=600
    name=${0##*run_} name=${name%.sh}
    defaults DATA="data/$DATASET" OUT="out/$name"
    defaults LOG="$OUT/log.json"
    [[ ${RANKS}x${UP}x$TP =~ ^[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*$ ]] ||
        recipe_die "RANKS '$RANKS', UP '$UP', TP '$TP': want whole numbers above 0"
    ((RANKS % (UP * TP) == 0)) ||
        recipe_die "RANKS $RANKS is no multiple of UP $UP * TP $TP = $((UP * TP)); want $((UP * TP)), for example"
    [[ $STEPS =~ ^[1-9][0-9]{0,9}$ ]] || recipe_die "STEPS '$STEPS': want a whole number above 0"
    for name in EVERY KEEP MAJOR TRIES PAUSE MAX_PAUSE; do
        [[ ${!name} =~ ^(0|[1-9][0-9]{0,9})$ ]] || recipe_die "$name '${!name}': want a whole number"
    done
    for name in PEAK MFU ${TOK_S:+TOK_S}; do
        [[ ${!name} =~ ^[0-9.]*[1-9][0-9.]*([eE][-+]?[0-9]+)?$ ]] || recipe_die "$name '${!name}': want a number above 0"
    done
    dp=$((RANKS / (UP * TP)))
    # a recipe's own BATCH is for its own RANKS: with more there may be fewer sequences for each
    while [[ -z $given_batch ]] && ((BATCH > 1 && TOTAL % (BATCH * SEQ * dp) != 0)); do BATCH=$((BATCH / 2)); done
    done_file=$(printf '%s/DONE_%08d' "$OUT" "$STEPS")
}

# the options of train_gpt that the variables stand for
recipe_options() {
    options=(-i "$DATA/${SHARDS}_train_*.bin" -j "$DATA/${SHARDS}_val_*.bin" -e "$MODEL" -o "$OUT"
             -b "$BATCH" -t "$SEQ" -d "$TOTAL" -x "$STEPS" -k "$SCHEDULE" -l "$LR" -u "$WARMUP" -q "$FINAL_LR"
             -c "$DECAY" -v "$VAL_EVERY" -m "$VAL_BATCHES" -s "$SAMPLE_EVERY" -n "$EVERY" -nk "$KEEP" -nm "$MAJOR"
             --dp "$dp" --up "$UP" --tp "$TP" -z "$ZERO" -r "$RECOMPUTE" -y 1)
    [[ -z $LOG ]] || options+=(--log-json "$LOG")
    [[ ! -e $HELLASWAG ]] || options+=(-h 1 --hellaswag-data "$HELLASWAG")
}

# ---- arithmetic -----------------------------------------------------------------------------------------------
# tokens of the shards in DATA, by their lengths: a header of 1024 bytes, then 2 bytes a token, or 4 (doc/formats.md)
data_tokens() {
    local f n=0 nbytes=2
    for f in "$DATA/${SHARDS}"_train_*.bin; do
        [[ -e $f ]] || continue
        [[ $(od -An -td4 -N4 "$f") -ne 20240801 ]] || nbytes=4
        n=$((n + ($(stat -Lc %s "$f") - 1024) / nbytes))
    done
    echo "$n"
}

# what the program says about this model and mesh, in units that people use
recipe_arithmetic() {
    local plan parameters flops checkpoint tokens steps_kept epoch source
    plan=$("$PROGRAM" "${options[@]}" "$@" --dry-run) || exit 1
    parameters=$(awk '$1 == "all" {print $2; exit}' <<<"$plan")
    flops=$(sed -nE 's/^a step has .*a token takes ([0-9]+) .*/\1/p' <<<"$plan")
    checkpoint=$(sed -nE 's/^a checkpoint has ([0-9]+) bytes.*/\1/p' <<<"$plan")
    tokens=$((STEPS * TOTAL)) epoch=$(data_tokens)
    steps_kept=$((EVERY > 0 ? (STEPS + EVERY - 1) / EVERY : 1))
    if ((KEEP > 0 && KEEP + 1 + (MAJOR > 0 ? STEPS / MAJOR : 0) < steps_kept)); then # one more while it is written
        steps_kept=$((KEEP + 1 + (MAJOR > 0 ? STEPS / MAJOR : 0)))
    fi
    if [[ -n $TOK_S ]]; then
        source="as TOK_S says"
    else
        TOK_S=$(calc %.0f "r * p * 1e12 * m / f" r="$RANKS" p="$PEAK" m="$MFU" f="$flops")
        source="if $RANKS ranks do $(calc %g "100 * m" m="$MFU") % of $PEAK TFLOP/s: set PEAK, MFU or TOK_S"
    fi
    echo "model        $MODEL, $parameters parameters, padding included"
    echo "ranks        $RANKS: dp $dp * up $UP * tp $TP"
    echo "a step       $TOTAL tokens: $((TOTAL / (BATCH * SEQ * dp))) times $BATCH sequences of $SEQ for each of dp"
    echo "$plan" | sed -nE 's/^memory of rank ([0-9]+).*in all ([0-9.]+) MiB$/\2 \1/p' | sort -g | tail -1 |
        awk '{printf "memory       %.3g GiB on rank %d, which needs most\n", $1 / 1024, $2}'
    echo "tokens       $tokens: $STEPS steps of $TOTAL"
    ((epoch == 0)) || echo "data         $epoch tokens in $DATA: $(calc %.2f "t / e" t="$tokens" e="$epoch") epochs"
    echo "compute      $(calc %.3g "t * f" t="$tokens" f="$flops") floating point operations"
    echo "time         $(calc %.3g "t / s / 3600" t="$tokens" s="$TOK_S") hours, $(calc %.0f "1000 * d / s" d="$TOTAL" s="$TOK_S") ms a step, at $TOK_S tokens a second," \
        "$source"
    echo "checkpoints  $steps_kept at most of $(calc %.3g "c / 1e9" c="$checkpoint") GB," \
        "$(calc %.3g "n * c / 1e9" n="$steps_kept" c="$checkpoint") GB in $OUT"
}

# ---- running --------------------------------------------------------------------------------------------------
steps_logged() { if [[ -e $OUT/main.log ]]; then grep -c 'trl:' "$OUT/main.log" || true; else echo 0; fi; }
newest_done() { find "$OUT" -maxdepth 1 -name "DONE_*" 2>/dev/null | sort | tail -1 || true; }

# a signal: the program ends after the step at hand, and nothing is started again. Some senders send one twice at once
on_signal() {
    if [[ -z $stopped ]]; then
        stopped_at=$SECONDS
    elif [[ -n $child ]] && ((SECONDS - stopped_at >= 2)); then
        kill -KILL -- "-$child" 2>/dev/null || true
    fi
    stopped=$1
    [[ -z $child ]] || kill "-$2" "$child" 2>/dev/null || true
}

# runs its arguments in a process group of their own, so that Ctrl-C reaches this script alone; sets rc
run_child() {
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    while rc=0; wait "$child" || rc=$?; kill -0 "$child" 2>/dev/null; do :; done
    child=""
}

recipe_loop() {
    local pause=$PAUSE fruitless=0 worked=no logged newest
    child="" stopped="" stopped_at=0 rc=0
    trap 'on_signal 130 USR1' INT
    trap 'on_signal 143 USR1' TERM
    trap 'on_signal 138 USR1' USR1
    mkdir -p "$OUT"
    while [[ ! -e $done_file ]]; do
        logged=$(steps_logged) newest=$(newest_done)
        run_child "$@"
        [[ -z $stopped ]] || exit "$stopped"
        [[ -e $done_file ]] && break
        case $rc in
            0) recipe_die "the program has ended well, but $done_file is not there" ;;
            130 | 138 | 143) exit "$rc" ;; # it was sent a signal itself, and has written its checkpoint
        esac
        [[ $(steps_logged) == "$logged" ]] || worked=yes
        [[ $worked == yes ]] || { echo "${0##*/}: no step was done (exit status $rc): not started again" >&2; exit "$rc"; }
        if [[ $(newest_done) != "$newest" ]]; then fruitless=0 pause=$PAUSE; fi
        fruitless=$((fruitless + 1))
        ((fruitless < TRIES)) ||
            { echo "${0##*/}: ended $TRIES times without a new checkpoint (exit status $rc): giving up" >&2; exit "$rc"; }
        echo "${0##*/}: exit status $rc; starting again in $pause s, $fruitless of $TRIES without a new checkpoint" >&2
        run_child sleep "$pause"
        [[ -z $stopped ]] || exit "$stopped"
        pause=$((2 * pause < MAX_PAUSE ? 2 * pause : MAX_PAUSE))
    done
    echo "$done_file is there: the run is complete"
}

# recipe_run OPTION ... -- the recipe, with these options of train_gpt beside its own
recipe_run() {
    local extra=() each launch command
    for each in "$@"; do
        if [[ $each == --dry-run ]]; then DRY=1; else extra+=("$each"); fi
    done
    recipe_defaults
    [[ -x $PROGRAM ]] || recipe_die "$PROGRAM is missing: make, or make DEVICE=cuda for GPUs"
    recipe_options
    recipe_arithmetic ${extra[@]+"${extra[@]}"}
    read -ra launch <<<"$LAUNCH"
    command=(${launch[@]+"${launch[@]}"} "$PROGRAM" "${options[@]}" ${extra[@]+"${extra[@]}"})
    printf 'command     '; printf ' %q' "${command[@]}"; echo
    if ! compgen -G "$DATA/${SHARDS}_train_*.bin" >/dev/null; then
        each="no $DATA/${SHARDS}_train_*.bin; this makes it: $PREPARE"
        if [[ $DRY == 1 ]]; then echo "note: $each"; else recipe_die "$each"; fi
    fi
    [[ $DRY == 1 ]] || recipe_loop "${command[@]}"
}
