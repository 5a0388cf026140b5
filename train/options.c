/* options.c -- the table of options, and what reads it: the parser and --help. See options.h. */
#include "train/options.h"
#include "flashoverlap/fo_ops.h" // FO_MAX_RANKS
#include "train/checkpoint.h"    // config_check
#include <ctype.h>
#include <limits.h>
#include <stdlib.h>

typedef enum {
    FLAG,       // int, no value
    INT,        // int in [low, high]
    INT_OR_ALL, // the same, or -1
    FLOAT,      // float in [low, high]
    DOUBLE,
    CHOICE,  // an enum: place in the list `want`, a|b|c
    NAME,    // string, not empty
    TEXT,    // string
    OVERLAP, // OverlapOption
    LINK,    // LinkOption
    STEPS    // StepsOption
} Kind;

typedef struct {
    const char *short_name, *long_name; // NULL: none
    Kind kind;
    size_t offset;        // of its field in TrainOptions
    const char* fallback; // the default, as a user would write it; "" for none
    double low, high;
    const char* want; // what --help shows for the value; of a CHOICE, the list
    const char* help;
    const char* heading; // --help starts a new paragraph here
} Option;

#ifdef FO_PRECISION_FP32
#define WIRE "fp32"
#else
#define WIRE "bf16"
#endif
#define WIRES "bf16|fp32" // in the order of FoDtype

#define AT(field) offsetof(TrainOptions, field)
// clang-format off
static const Option options[] = {
    // data and files
    {"-i",  "--train-data", NAME, AT(train_data), "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", 0, 0,
     "FILES", "token shards to train on; a quoted pattern", "Data and files"},
    {"-j",  "--val-data",   NAME, AT(val_data), "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", 0, 0,
     "FILES", "token shards to validate on", NULL},
    {"-e",  "--model",      NAME, AT(model), "gpt2_124M_bf16.bin", 0, 0,
     "MODEL", "checkpoint.bin, d12, gpt2:d12, gpt3:c768, or L=4,C=128,NH=4,V=256,maxT=256", NULL},
    {"-o",  "--out",        NAME, AT(out), "", 0, 0,
     "DIR", "folder for main.log and checkpoints; the last step writes one", NULL},
    {NULL,  "--tokenizer",  NAME, AT(tokenizer), "gpt2_tokenizer.bin", 0, 0,
     "FILE", "turns sampled tokens into text; without it their numbers are printed", NULL},
    {"-n",  "--checkpoint-every", INT, AT(checkpoint_every), "0", 0, INT_MAX,
     "STEPS", "write a checkpoint; 0: only at the end", NULL},
    {"-nk", "--keep-checkpoints", INT, AT(keep_checkpoints), "0", 0, INT_MAX,
     "N", "delete all but the newest N; 0: keep all", NULL},
    {"-nm", "--major-checkpoint-every", INT, AT(major_checkpoint_every), "0", 0, INT_MAX,
     "STEPS", "never delete those of a multiple of STEPS; 0: no such", NULL},
    {"-y",  "--resume",     INT, AT(resume), "0", 0, 1,
     "0|1", "go on from the newest complete checkpoint in the folder", NULL},
    // the batch and its steps
    {"-b",  "--batch",      INT, AT(batch), "4", 1, 1 << 20,
     "B", "sequences that go through the model at a time", "Batch and steps"},
    {"-t",  "--seq-len",    INT, AT(seq_len), "1024", 1, 1 << 20,
     "T", "tokens of a sequence", NULL},
    {"-d",  "--total-batch", INT, AT(total_batch), "0", 0, INT_MAX,
     "TOKENS", "tokens of an optimizer step, a multiple of B*T*dp; 0: B*T*dp", NULL},
    {"-x",  "--max-steps",  INT_OR_ALL, AT(max_steps), "-1", 0, INT_MAX,
     "STEPS", "steps to train; -1: all train data once", NULL},
    {"-a",  "--overfit",    INT, AT(overfit), "0", 0, 1,
     "0|1", "train on one batch of the validation data again and again", NULL},
    {NULL,  "--seed",       INT, AT(seed), "42", 0, INT_MAX,
     "N", "of the initial weights", NULL},
    {NULL,  "--data-seed",  INT, AT(data_seed), "42", 0, INT_MAX,
     "N", "of the order of training data", NULL},
    // the optimizer
    {"-k",  "--schedule",   CHOICE, AT(schedule), "cosine", 0, 0,
     SCHEDULE_NAMES, "how the learning rate goes down", "Optimizer"},
    {"-l",  "--lr",         FLOAT, AT(lr), "3e-4", 0, 1e3,
     "LR", "highest learning rate", NULL},
    {"-u",  "--warmup",     INT, AT(warmup), "0", 0, INT_MAX,
     "STEPS", "steps in which it goes up first", NULL},
    {"-q",  "--final-lr-fraction", FLOAT, AT(final_lr_fraction), "1", 0, 1,
     "X", "of the learning rate, left at the end; 1: it stays", NULL},
    {"-c",  "--weight-decay", FLOAT, AT(weight_decay), "0", 0, 1e3,
     "X", "of weight matrices and embeddings", NULL},
    {NULL,  "--beta1",      FLOAT, AT(beta1), "0.9", 0, 0.99999,
     "X", "AdamW: what a step keeps of the mean of gradients", NULL},
    {NULL,  "--beta2",      FLOAT, AT(beta2), "0.95", 0, 0.99999,
     "X", "AdamW: what a step keeps of the mean of their squares", NULL},
    {NULL,  "--eps",        FLOAT, AT(eps), "1e-8", 1e-20, 1,
     "X", "AdamW: added to what is divided by", NULL},
    {NULL,  "--clip",       FLOAT, AT(clip), "1", 0, 1e9,
     "NORM", "largest norm of the gradient, which is scaled down to it; 0: any", NULL},
    {"-sl", "--skip-loss-z", FLOAT, AT(skip_loss_z), "0", 0, 1e9,
     "Z", "skip an update whose loss is so many deviations high; 0: never", NULL},
    {"-sg", "--skip-grad-z", FLOAT, AT(skip_grad_z), "0", 0, 1e9,
     "Z", "the same of the gradient's norm", NULL},
    {NULL,  "--ignore-nan", INT, AT(ignore_nan), "0", 0, 1,
     "0|1", "go on after a loss or gradient that is not a finite number", NULL},
    {"-w",  "--master-weights", INT, AT(master_weights), "1", 0, 1,
     "0|1", "keep fp32 weights beside bf16 ones; 0: in FP32 builds alone", NULL},
    {NULL,  "--z-loss",     FLOAT, AT(z_loss), "0", 0, 1,
     "X", "adds X * mean of log(Z)^2 to the loss, as 1e-4; the one printed is without it", NULL},
    // looking at it
    {"-v",  "--val-every",  INT, AT(val_every), "20", 0, INT_MAX,
     "STEPS", "validate, and at the end; 0: never", "Evaluation"},
    {"-m",  "--val-batches", INT_OR_ALL, AT(val_batches), "20", 1, INT_MAX,
     "N", "batches of a validation; -1: all validation data", NULL},
    {"-h",  "--hellaswag",  INT, AT(hellaswag), "0", 0, 1,
     "0|1", "HellaSwag's accuracy after every -v steps, and at the end", NULL},
    {NULL,  "--hellaswag-data", NAME, AT(hellaswag_data), "dev/data/hellaswag/hellaswag_val.bin", 0, 0,
     "FILE", "its examples; data/hellaswag.py writes data/hellaswag/hellaswag_val.bin", NULL},
    {"-s",  "--sample-every", INT, AT(sample_every), "20", 0, INT_MAX,
     "STEPS", "write some text, and at the end; 0: never", NULL},
    {"-g",  "--sample-length", INT, AT(sample_length), "64", 1, 1 << 20,
     "TOKENS", "of that text, with the token it starts from", NULL},
    {NULL,  "--prompt",     TEXT, AT(prompt), "", 0, 0,
     "TEXT", "what it goes on from", NULL},
    {NULL,  "--prompt-file", NAME, AT(prompt_file), "", 0, 0,
     "FILE", "several prompts, one a line, that go on at the same time", NULL},
    {NULL,  "--temperature", FLOAT, AT(temperature), "1", 0, 100,
     "X", "below 1: likelier tokens; 0: the likeliest", NULL},
    {NULL,  "--top-k",      INT, AT(top_k), "0", 0, INT_MAX,
     "K", "only the K likeliest tokens; 0: all", NULL},
    {NULL,  "--sample-seed", INT, AT(sample_seed), "1337", 1, INT_MAX,
     "N", "of the text's random numbers", NULL},
    // logs
    {NULL,  "--log-json",   NAME, AT(log_json), "", 0, 0,
     "FILE", "one JSON object a step and a validation; --resume 1 appends", "Logs and profiles"},
    {"-lg", "--device-log-every", INT_OR_ALL, AT(device_log_every), "0", 0, INT_MAX,
     "STEPS", "print clocks, power, heat of rank 0's GPU; cpu: load, memory; 0, -1: never", NULL},
    {NULL,  "--comm-report", FLAG, AT(comm_report), "", 0, 0,
     "", "print after the second step what each rank has sent, by operation", NULL},
    {NULL,  "--trace",      NAME, AT(trace), "", 0, 0,
     "FILE", "timeline of computation and communication, for ui.perfetto.dev", NULL},
    {NULL,  "--trace-steps", STEPS, AT(trace_steps), "second", 0, 0,
     "A-B|second", "first and last step of it", NULL},
    {NULL,  "--profile",    STEPS, AT(profile), "none", 0, 0,
     "A-B|none", "print rank 0's time by operation in these steps; cuda: for nsys -c cudaProfilerApi, too",
     NULL},
    // ranks and overlap
    {NULL,  "--dp",         INT, AT(dp), "0", 0, FO_PLAN_MAX_RANKS,
     "N", "groups of ranks, each with batches of its own; 0: as many as processes were started for",
     "Ranks and overlap"},
    {NULL,  "--up",         INT, AT(up), "1", 1, FO_MAX_RANKS,
     "N", "ranks that share the tokens of a batch (Ulysses)", NULL},
    {NULL,  "--tp",         INT, AT(tp), "1", 1, FO_MAX_RANKS,
     "N", "ranks that share the model (tensor parallelism)", NULL},
    {"-z",  "--zero",       INT, AT(zero), "0", 0, 2,
     "STAGE", "1: dp and up share the optimizer's state; 2: and gradients", NULL},
    {NULL,  "--sp",         INT, AT(sp), "1", 0, 1,
     "0|1", "cut tokens outside attention and MLP, too (sequence parallelism)", NULL},
    {"-r",  "--recompute",  INT, AT(recompute), "1", 0, 3,
     "LEVEL", "in the backward pass: 1: GELU, 2: and layer norms, 3: whole layers", NULL},
    {NULL,  "--keep-gathered", INT, AT(keep_gathered), "0", 0, 1,
     "0|1", "keep gathered layer norm outputs instead of gathering them again", NULL},
    {NULL,  "--overlap",    OVERLAP, AT(overlap), "auto", 0, 0,
     "auto|none|slice:M|flash[:M]",
     "how communication hides; M slices, or sub-chunks for each rank; auto: flash, M as measured", NULL},
    {NULL,  "--topology",   CHOICE, AT(topology), "direct", 0, 0,
     "direct|ring", "who sends to whom", NULL},
    {NULL,  "--wire",       CHOICE, AT(wire), WIRE, 0, 0,
     WIRES, "numbers in which partial sums travel", NULL},
    {NULL,  "--link",       LINK, AT(link), "none", 0, 0,
     "GBPS,US|none", "behave like a link of GBPS GB/s and US microseconds", NULL},
    {NULL,  "--pace",       DOUBLE, AT(pace), "0", 0, 1e6,
     "TFLOPS", "behave like a device of that speed; 0: as fast as it goes", NULL},
    {NULL,  "--timeout",    DOUBLE, AT(timeout), "60", 0.1, 1e6,
     "SECONDS", "how long a rank waits for another that it hears nothing from, before all end", NULL},
    {NULL,  "--graph",      INT, AT(graph), "0", 0, 1,
     "0|1", "cuda: queue layers and head of a micro-step by one call (a CUDA graph)", NULL},
    {"-ge", "--gelu-fusion", INT, AT(gelu_fusion), "0", 0, 2,
     "LEVEL", "cuda: GELU within matmuls, 1: forward, 2: and backward; measure it", NULL},
    {NULL,  "--deterministic", INT, AT(deterministic), "0", 0, 1,
     "0|1", "cuda: the same bits in every run, whatever it costs; the cpu's always are", NULL},
    {"-f",  "--tf32",       INT, AT(tf32), "1", 0, 1,
     "0|1", "cuda, FP32 builds: matmuls may round to TF32, which is faster; cpu: no effect", NULL},
    // processes
    {"-pi", "--init",       CHOICE, AT(init), "auto", 0, 0,
     FO_INIT_NAMES, "how processes meet: at rank 0's port, by a folder; auto: as they were started",
     "Processes (on one machine ranks can be threads: none of these is needed)"},
    {"-pn", "--num-processes", INT, AT(num_processes), "0", 0, FO_MAX_RANKS,
     "N", "processes, one a rank; 0: as mpirun, torchrun or srun say", NULL},
    {"-pr", "--process-rank", INT_OR_ALL, AT(process_rank), "-1", 0, FO_MAX_RANKS - 1,
     "RANK", "number of this process; -1: as they say. mpirun's own always holds", NULL},
    {"-pg", "--processes-per-node", INT, AT(processes_per_node), "0", 0, FO_MAX_RANKS,
     "N", "rank r has GPU r % N of its machine; 0: those of a machine are counted", NULL},
    {"-ps", "--server",     NAME, AT(server), "", 0, 0,
     "HOST", "tcp: name or address of rank 0's machine, if no launcher says it", NULL},
    {NULL,  "--port",       INT, AT(port), "0", 0, 65535,
     "PORT", "tcp: at which rank 0 listens; 0: the launcher's, or 12345", NULL},
    {"-pf", "--init-folder", NAME, AT(init_folder), "", 0, 0,
     "DIR", "fs: a folder that all processes see", NULL},
    // instead of training
    {NULL,  "--generate",   FLAG, AT(generate), "", 0, 0,
     "", "go on from the prompts with the model, and stop", "Instead of training"},
    {NULL,  "--eval",       FLAG, AT(eval), "", 0, 0,
     "", "validate the model (-v 0: don't), with -h 1 on HellaSwag, and stop", NULL},
    {NULL,  "--dry-run",    FLAG, AT(dry_run), "", 0, 0,
     "", "print sizes, memory and plans, and stop", NULL},
    {NULL,  "--plan",       NAME, AT(plan), "", 0, 0,
     "FILE", "print what a step would take on that machine (dev/sim/hardware), and stop", NULL},
    {NULL,  "--world",      INT, AT(world), "0", 0, FO_PLAN_MAX_RANKS,
     "N", "ranks of the dry run or plan, which tries all meshes of them; 0: dp * up * tp", NULL},
    {NULL,  "--help",       FLAG, AT(help), "", 0, 0,
     "", "print this, and stop", NULL},
};
// clang-format on
#define NOPTIONS (sizeof options / sizeof options[0])

// ---- values -----------------------------------------------------------------------------------------------
// is the whole of text one number, in plain decimal? No nan, inf, hexadecimal, blanks
static int number_of(const char* text, double* x) {
    char* end;
    if (strspn(text, "0123456789+-.eE") != strlen(text)) { return 0; }
    *x = strtod(text, &end); // infinite if it is too large: then out of range
    return *end == 0 && end != text;
}

// the same of a whole number; one too large for a long becomes the largest: out of range, too
static int integer_of(const char* text, long* x) {
    char* end;
    if (strspn(text, "0123456789+-") != strlen(text)) { return 0; }
    *x = strtol(text, &end, 10);
    return *end == 0 && end != text;
}

// place of text in the list a|b|c, or -1
static int choice_of(const char* text, const char* list) {
    const size_t n = strlen(text);
    for (int i = 0;; i++) {
        const size_t k = strcspn(list, "|");
        if (n == k && strncmp(text, list, n) == 0) { return i; }
        if (list[k] == 0) { return -1; }
        list += k + 1;
    }
}

// what a value may be, in words; returns buf
static const char* range_of(const Option* o, char* buf, size_t nbytes) {
    const char* all = o->kind == INT_OR_ALL ? "-1, or " : "";
    if (o->kind == CHOICE || o->kind == OVERLAP || o->kind == LINK) {
        (void)snprintf(buf, nbytes, "%s", o->want);
    } else if (o->high >= (double)INT_MAX) {
        (void)snprintf(buf, nbytes, "%s%.0f to 2^31-1", all, o->low);
    } else {
        (void)snprintf(buf, nbytes, "%s%g to %.10g", all, o->low, o->high);
    }
    return buf;
}

// auto, none, slice:M, flash, flash:M
static int overlap_of(const char* text, OverlapOption* o) {
    const size_t k = strcspn(text, ":");
    long m = 1;
    o->mode = FO_FLASH, o->m = 0;
    if (strcmp(text, "auto") == 0) { return 1; }
    if (text[k] == ':' && (!integer_of(text + k + 1, &m) || m < 1 || m > FO_MAX_M)) { return 0; }
    o->m = (int)m;
    if (k == 5 && strncmp(text, "flash", k) == 0) {
        o->mode = FO_FLASH;
    } else if (k == 5 && strncmp(text, "slice", k) == 0 && text[k] == ':') {
        o->mode = FO_SLICE;
    } else {
        o->mode = FO_NONE;
        return strcmp(text, "none") == 0;
    }
    return 1;
}

// none, or GBPS,US
static int link_of(const char* text, LinkOption* l) {
    char gbytes[64];
    const size_t k = strcspn(text, ",");
    if (strcmp(text, "none") == 0) {
        l->gbytes_s = l->us = 0.0;
        return 1;
    }
    if (text[k] != ',' || k >= sizeof gbytes) { return 0; }
    memcpy(gbytes, text, k);
    gbytes[k] = 0;
    return number_of(gbytes, &l->gbytes_s) && number_of(text + k + 1, &l->us) && l->gbytes_s > 1e-6 &&
           l->gbytes_s < 1e6 && l->us >= 0.0 && l->us < 1e9;
}

// second, or A-B
// word: the one that is not A-B
static int steps_of(const char* text, const char* word, StepsOption* s) {
    char first[16];
    long a = 0, b = 0;
    const size_t k = strcspn(text, "-");
    s->first = s->last = 0;
    if (strcmp(text, word) == 0) { return 1; }
    if (text[k] != '-' || k >= sizeof first) { return 0; }
    memcpy(first, text, k);
    first[k] = 0;
    if (!integer_of(first, &a) || !integer_of(text + k + 1, &b) || a < 1 || b < a || b > INT_MAX) {
        return 0;
    }
    s->first = (int)a, s->last = (int)b;
    return 1;
}

// name: as the user wrote the option
static int value_set(TrainOptions* opts, const Option* o, const char* name, const char* value,
                     char err[TRAIN_ERR]) {
    void* field = (char*)opts + o->offset;
    char range[96];
    double x = 0.0;
    long n = 0;
    int understood = 1;
    switch (o->kind) {
    case FLAG: *(int*)field = 1; return 0;
    case INT:
    case INT_OR_ALL:
        understood = integer_of(value, &n);
        x = (double)n;
        *(int*)field = (int)n;
        break;
    case FLOAT:
    case DOUBLE:
        understood = number_of(value, &x);
        if (o->kind == FLOAT) {
            *(float*)field = (float)x;
        } else {
            *(double*)field = x;
        }
        break;
    case CHOICE:
        *(int*)field = choice_of(value, o->want);
        if (*(int*)field >= 0) { return 0; }
        return train_error(err, "%s '%s': want one of %s", name, value, o->want);
    case NAME:
        if (value[0] == 0) { return train_error(err, "%s '': is empty; want %s", name, o->want); }
        *(const char**)field = value;
        return 0;
    case TEXT: *(const char**)field = value; return 0;
    case OVERLAP:
        if (overlap_of(value, (OverlapOption*)field)) { return 0; }
        return train_error(err, "%s '%s': want auto, none, slice:M, flash or flash:M, with M of 1 to %d",
                           name, value, FO_MAX_M);
    case LINK:
        if (link_of(value, (LinkOption*)field)) { return 0; }
        return train_error(err, "%s '%s': want GB/s above 0 and microseconds, as in 50,5, or none", name,
                           value);
    case STEPS:
        if (steps_of(value, o->fallback, (StepsOption*)field)) { return 0; }
        return train_error(err, "%s '%s': want the first and the last step, from 1 on, as in 3-5, or %s",
                           name, value, o->fallback);
    }
    if (!understood) {
        return train_error(err, "%s '%s': is not a %s; want %s", name, value,
                           o->kind == INT || o->kind == INT_OR_ALL ? "whole number" : "number",
                           range_of(o, range, sizeof range));
    }
    if (!(x >= o->low && x <= o->high) && !(o->kind == INT_OR_ALL && x == -1.0)) {
        return train_error(err, "%s '%s': is out of range; want %s", name, value,
                           range_of(o, range, sizeof range));
    }
    return 0;
}

// ---- names ------------------------------------------------------------------------------------------------
// the option that arg names: -x, --long, or --long=value, of which *value is set
static const Option* option_of(const char* arg, const char** value) {
    for (size_t i = 0; i < NOPTIONS; i++) {
        const Option* o = &options[i];
        const size_t k = strlen(o->long_name);
        *value = NULL;
        if ((o->short_name && strcmp(arg, o->short_name) == 0) || strcmp(arg, o->long_name) == 0) {
            return o;
        }
        if (strncmp(arg, o->long_name, k) == 0 && arg[k] == '=') {
            *value = arg + k + 1;
            return o;
        }
    }
    return NULL;
}

static int unknown_option(const char* arg, char err[TRAIN_ERR]) {
    if (arg[0] != '-') {
        return train_error(err, "'%s' is not an option: options begin with '-'; --help lists them", arg);
    }
    for (size_t i = 0; i < NOPTIONS; i++) { // one of them is the beginning of the other
        const char *s = options[i].short_name, *l = options[i].long_name;
        if (s && arg[1] != '-' && strlen(arg) > 1 && strncmp(arg, s, strlen(s)) == 0) {
            return train_error(err, "unknown option '%s'; did you mean %s (%s)? --help lists all", arg, s, l);
        }
        if (strlen(arg) > 4 && (strncmp(arg, l, strlen(arg)) == 0 || strncmp(arg, l, strlen(l)) == 0)) {
            return train_error(err, "unknown option '%s'; did you mean %s? --help lists all", arg, l);
        }
    }
    return train_error(err, "unknown option '%s'; --help lists all", arg);
}

// ---- the whole line ---------------------------------------------------------------------------------------
// the mesh: dp where it is not given, and that all ranks can be had
static int mesh_check(TrainOptions* o, char err[TRAIN_ERR]) {
    const int launched = o->launch.n, share = o->up * o->tp;
    int world = o->world ? o->world : launched;
    const int dry = o->dry_run || o->plan[0];
    if (o->world && !dry) {
        return train_error(err, "--world %d is for --dry-run and --plan; a run has --dp * --up * --tp ranks",
                           o->world);
    }
    if (dry && !o->world && o->dp) { world = o->dp * share; }
    if (o->dp == 0) {
        if (world == 1) { world = share; }
        if (world % share != 0) {
            const int above = (world / share + 1) * share, below = world / share * share;
            return train_error(err, "%d %s, which --up %d * --tp %d = %d ranks do not divide; want %d", world,
                               o->world ? "ranks" : "processes were started", o->up, o->tp, share,
                               below ? below : above);
        }
        o->dp = world / share;
    }
    if (o->world && o->dp * share != o->world) {
        return train_error(err, "--dp %d * --up %d * --tp %d make %d ranks, not --world %d", o->dp, o->up,
                           o->tp, o->dp * share, o->world);
    }
    const int most = dry ? FO_PLAN_MAX_RANKS : FO_MAX_RANKS;
    if (o->dp * share > most) {
        return train_error(err, "--dp %d * --up %d * --tp %d make %d ranks; %d at most can run", o->dp, o->up,
                           o->tp, o->dp * share, most);
    }
    return 0;
}

// what all processes must be told alike: the options that were given, but for those of this process alone
static void options_told(FoLaunch* l, const char* const seen[]) {
    size_t k = 0;
    for (size_t i = 0; i < NOPTIONS && k < sizeof l->options; i++) {
        const size_t at = options[i].offset;
        if (!seen[i] || at == AT(process_rank) || at == AT(server)) { continue; }
        const int n =
            snprintf(l->options + k, sizeof l->options - k, "%s %s\n", options[i].long_name, seen[i]);
        k += n > 0 ? (size_t)n : 0;
    }
}

// the processes that were started, from what options and launchers say
static int launch_check(TrainOptions* o, const char* const seen[], char err[TRAIN_ERR]) {
    char why[FO_LAUNCH_ERR];
    FoLaunch* l = &o->launch;
    *l = fo_launch_default();
    if (strlen(o->server) >= sizeof l->server || strlen(o->init_folder) >= sizeof l->folder) {
        return train_error(err, "%s: is too long; want %zu characters at most",
                           strlen(o->server) >= sizeof l->server ? "--server" : "--init-folder",
                           strlen(o->server) >= sizeof l->server ? sizeof l->server - 1
                                                                 : sizeof l->folder - 1);
    }
    l->init = o->init, l->n = o->num_processes, l->rank = o->process_rank;
    l->per_node = o->processes_per_node, l->port = o->port, l->timeout_s = o->timeout;
    strcpy(l->server, o->server);
    strcpy(l->folder, o->init_folder);
    options_told(l, seen);
    if (fo_launch_find(l, why)) { return train_error(err, "%s", why); }
    return 0;
}

// what no single option can tell
static int options_check(TrainOptions* o, char err[TRAIN_ERR]) {
    if (mesh_check(o, err) != 0) { return -1; }
    const long long tokens = (long long)o->batch * o->seq_len * o->dp;
    if (tokens > INT_MAX) {
        return train_error(err, "--batch %d * --seq-len %d * --dp %d is %lld tokens; at most %d are possible",
                           o->batch, o->seq_len, o->dp, tokens, INT_MAX);
    }
    if (o->total_batch == 0) { o->total_batch = (int)tokens; }
    if (o->total_batch % tokens != 0) {
        const long long below = o->total_batch / tokens * tokens;
        return train_error(err,
                           "--total-batch %d is not a multiple of --batch %d * --seq-len %d * --dp %d = %lld "
                           "tokens; want %lld, for example",
                           o->total_batch, o->batch, o->seq_len, o->dp, tokens, below > 0 ? below : tokens);
    }
    if (o->out[0] == 0 && (o->resume || o->checkpoint_every > 0)) {
        return train_error(err, "%s needs a folder: --out DIR",
                           o->resume ? "--resume 1" : "--checkpoint-every");
    }
    if (o->trace[0] && (o->generate || o->eval)) {
        return train_error(err, "--trace is of training: not with %s", o->generate ? "--generate" : "--eval");
    }
    if (o->trace_steps.first && !o->trace[0]) {
        return train_error(err, "--trace-steps %d-%d needs a file: --trace FILE", o->trace_steps.first,
                           o->trace_steps.last);
    }
    if (o->profile.first && (o->generate || o->eval || o->trace[0])) {
        return train_error(err,
                           "--profile is of training, and not of steps that --trace is about: want it "
                           "without %s",
                           o->generate ? "--generate"
                           : o->eval   ? "--eval"
                                       : "--trace");
    }
    if (o->log_json[0] && (o->generate || o->eval)) {
        return train_error(err, "--log-json is of training: not with %s",
                           o->generate ? "--generate" : "--eval");
    }
    if (!o->master_weights && FO_FLOATX == FO_BF16) {
        return train_error(
            err, "-w '0': bf16 weights alone would lose the small updates to rounding; want 1 (-z 1 "
                 "shares fp32 weights among the ranks of dp), or a PRECISION=FP32 build");
    }
    if (o->generate + o->eval + o->dry_run + (o->plan[0] != 0) > 1) {
        return train_error(err, "--generate, --eval, --dry-run and --plan: want one of them");
    }
    if (o->eval && o->val_every == 0 && !o->hellaswag) {
        return train_error(err,
                           "--eval has nothing to do: -v 0 leaves validation out; want -h 1, or no -v 0");
    }
    if (o->prompt[0] && o->prompt_file[0]) {
        return train_error(err, "--prompt and --prompt-file: want one of them");
    }
    if (FO_FLOATX == FO_FP32 && o->wire == FO_BF16) {
        return train_error(err, "--wire 'bf16': this is an FP32 build, whose sums travel as fp32; want fp32");
    }
    if (o->graph && !fo_device_graphs()) {
        return train_error(err,
                           "--graph '1': the cpu device has no graphs; want 0, or build with DEVICE=cuda");
    }
    if (!fo_device_emulates() && (o->link.gbytes_s > 0.0 || o->pace > 0.0)) {
        return train_error(err,
                           "%s: a GPU and its links have speeds of their own; build with DEVICE=cpu for that",
                           o->pace > 0.0 ? "--pace" : "--link");
    }
    return 0;
}

const char* overlap_name(OverlapOption o, char buf[32]) {
    (void)snprintf(buf, 32,
                   o.m == 0            ? "auto"
                   : o.mode == FO_NONE ? "%s"
                                       : "%s:%d",
                   fo_mode_name(o.mode), o.m);
    return buf;
}

int options_parse(TrainOptions* o, int argc, char** argv, char err[TRAIN_ERR]) {
    const char* seen[NOPTIONS] = {NULL}; // value of each option that was given
    memset(o, 0, sizeof *o);
    for (size_t i = 0; i < NOPTIONS; i++) {
        const Option* t = &options[i];
        if (t->kind == NAME || t->kind == TEXT) {
            *(const char**)((char*)o + t->offset) = t->fallback;
        } else if (t->kind != FLAG && value_set(o, t, t->long_name, t->fallback, err) != 0) {
            return -1;
        }
    }
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value, *unused;
        const Option* t = option_of(name, &value);
        if (!t) { return unknown_option(name, err); }
        if (value) { name = t->long_name; }
        if (t->kind == FLAG && value) {
            return train_error(err, "%s takes no value, but has '%s'", name, value);
        }
        if (t->kind != FLAG && !value) {
            value = i + 1 < argc ? argv[++i] : NULL;
            if (!value || option_of(value, &unused)) {
                return train_error(err, "%s needs a value: %s%s%s%s", name, t->want,
                                   value ? ", but is followed by " : "", value ? value : "",
                                   strcmp(name, "-h") == 0 ? "; it is HellaSwag's: help is --help" : "");
            }
        }
        const char** before = &seen[t - options];
        if (*before) {
            return train_error(err, "%s is given twice, as '%s' and as '%s'; want it once", name, *before,
                               value ? value : "");
        }
        *before = value ? value : "";
        if (value_set(o, t, name, value, err) != 0) { return -1; }
        if (o->help) { return 0; }
    }
    return launch_check(o, seen, err) ? -1 : options_check(o, err);
}

#define HELP_INDENT "                                       " // as wide as the names

void options_help(FILE* out, const char* program) {
    fprintf(out,
            "%s trains GPT-2 class models on P ranks, and hides what they say to each other.\n"
            "usage: %s [-x VALUE | --long VALUE | --long=VALUE] ...\n",
            program, program);
    for (size_t i = 0; i < NOPTIONS; i++) {
        const Option* o = &options[i];
        const int is_number =
            o->kind == INT || o->kind == INT_OR_ALL || o->kind == FLOAT || o->kind == DOUBLE;
        char name[64], range[96] = "";
        if (o->heading) { fprintf(out, "\n%s:\n", o->heading); }
        (void)snprintf(name, sizeof name, "%3s%s %s %s", o->short_name ? o->short_name : "",
                       o->short_name ? "," : " ", o->long_name, o->want);
        fprintf(out, "  %-36s%s%s", name, strlen(name) > 36 ? "\n" HELP_INDENT : " ", o->help);
        if (is_number && strcmp(o->want, "0|1") != 0) { (void)range_of(o, range, sizeof range); }
        if (o->fallback[0]) {
            fprintf(out, "%s(%s%sdefault %s)", strlen(o->help) > 40 ? "\n" HELP_INDENT : " ", range,
                    range[0] ? "; " : "", o->fallback);
        }
        fputc('\n', out);
    }
}

// ---- models -----------------------------------------------------------------------------------------------
typedef struct {
    int n, L, C, NH; // n: the number in the descriptor
} Family;

// by depth, vocabulary of GPT-2, maxT 1024
static const Family gpt2[] = {{6, 6, 384, 6},     {12, 12, 768, 12},  {24, 24, 1024, 16}, {36, 36, 1280, 20},
                              {48, 48, 1600, 25}, {60, 60, 1920, 30}, {72, 72, 2880, 30}, {84, 84, 3456, 36}};
// by channels, maxT 2048. llm.c also has c5140, which it refuses itself: no head size divides it
static const Family gpt3[] = {{384, 6, 384, 6},     {768, 12, 768, 12},    {1024, 24, 1024, 16},
                              {1536, 24, 1536, 16}, {2048, 24, 2048, 16},  {2560, 32, 2560, 32},
                              {4096, 32, 4096, 32}, {12288, 96, 12288, 96}};

static int family_find(const char* text, const char* number, const Family* f, size_t n, int maxT,
                       GPTConfig* c, char err[TRAIN_ERR]) {
    char known[128] = "";
    long x;
    const int is_number = integer_of(number, &x);
    for (size_t i = 0; i < n; i++) {
        if (is_number && x == f[i].n) {
            GPTConfig found = {maxT, 50257, config_padded(50257), f[i].L, f[i].NH, f[i].C};
            *c = found;
            return config_check(c, err);
        }
        const size_t k = strlen(known);
        (void)snprintf(known + k, sizeof known - k, "%s%d", i ? ", " : "", f[i].n);
    }
    return train_error(err,
                       "model '%s': no model of that number; want one of %s, or sizes as in L=4,C=128,NH=4",
                       text, known);
}

// L=4,C=128,NH=4,V=256,maxT=256
static int sizes_parse(const char* text, GPTConfig* c, char err[TRAIN_ERR]) {
    enum { L, C, NH, V, MAXT, NKEYS };
    static const char* const keys[NKEYS] = {"L", "C", "NH", "V", "maxT"};
    long values[NKEYS] = {0, 0, 0, 50257, 1024};
    int seen[NKEYS] = {0};
    char why[TRAIN_ERR];
    for (const char* at = text;; at++) {
        const size_t k = strcspn(at, ","), name = strcspn(at, "=");
        char value[32] = "";
        int key = 0;
        while (key < NKEYS && (name >= k || strlen(keys[key]) != name || strncmp(at, keys[key], name) != 0)) {
            key++;
        }
        if (key == NKEYS) {
            return train_error(err, "model '%s': '%.*s' is not one of L, C, NH, V, maxT with its number",
                               text, (int)k, at);
        }
        if (seen[key]++) { return train_error(err, "model '%s': %s is given twice", text, keys[key]); }
        if (k - name - 1 < sizeof value) { memcpy(value, at + name + 1, k - name - 1); }
        if (!integer_of(value, &values[key]) || values[key] < 1 || values[key] > INT_MAX) {
            return train_error(err, "model '%s': '%.*s': want a whole number above 0", text, (int)k, at);
        }
        at += k;
        if (*at == 0) { break; }
    }
    for (int key = L; key <= NH; key++) {
        if (!seen[key]) {
            return train_error(err, "model '%s': %s is missing; want sizes as in L=4,C=128,NH=4", text,
                               keys[key]);
        }
    }
    GPTConfig found = {(int)values[MAXT], (int)values[V], 0, (int)values[L], (int)values[NH], (int)values[C]};
    if (found.V <= INT_MAX - 128) { found.Vp = config_padded(found.V); }
    if (config_check(&found, why) != 0) { return train_error(err, "model '%s': %s", text, why); }
    *c = found;
    return 0;
}

int model_parse(const char* text, GPTConfig* c, char err[TRAIN_ERR]) {
    const size_t n = strlen(text);
    if (n > 4 && strcmp(text + n - 4, ".bin") == 0) { return 1; }
    if (strchr(text, '=')) { return sizes_parse(text, c, err); }
    if (strncmp(text, "gpt3:c", 6) == 0) {
        return family_find(text, text + 6, gpt3, sizeof gpt3 / sizeof gpt3[0], 2048, c, err);
    }
    const char* number = strncmp(text, "gpt2:d", 6) == 0 ? text + 6 : text[0] == 'd' ? text + 1 : NULL;
    if (number && isdigit((unsigned char)number[0])) {
        return family_find(text, number, gpt2, sizeof gpt2 / sizeof gpt2[0], 1024, c, err);
    }
    return train_error(err,
                       "model '%s': want a file that ends in .bin, d12, gpt2:d24, gpt3:c768, or sizes as in "
                       "L=4,C=128,NH=4,V=256,maxT=256",
                       text);
}
