/* options.h -- the command line of train_gpt: llm.c's flags and defaults, long names, this program's own.
 *
 * One table (options.c) drives parsing, checking and --help, so help is true. Tests: dev/test/test_train.c.
 */
#ifndef OPTIONS_H
#define OPTIONS_H
#include "flashoverlap/fo_launch.h"
#include "flashoverlap/fo_plan.h"
#include "train/logger.h" // TRAIN_ERR
#include "train/schedule.h"
#include "train/tensors.h"
#include <stdio.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    FoMode mode;
    int m; // slices or sub-chunks; 0 (flash): auto, chosen for each operation by auto_choose
} OverlapOption;

typedef struct {
    double gbytes_s, us; // 0 GB/s: no emulated link
} LinkOption;

typedef struct {
    int first, last; // as a step line prints them; 0: the option's default, a word
} StepsOption;

// Strings are argv's or literals; "" where an option is not given and has no default.
typedef struct {
    // data and files
    const char *train_data, *val_data; // glob patterns
    const char* model;                 // what model_parse takes
    const char* out;                   // folder, or ""
    const char* tokenizer;
    int checkpoint_every, keep_checkpoints, major_checkpoint_every;
    int resume;
    // the batch and its steps
    int batch, seq_len; // B, T
    int total_batch;    // tokens of a step: a multiple of B*T; options_parse puts B*T where it is not given
    int max_steps;      // -1: one epoch
    int overfit;
    int seed, data_seed; // of the initial weights; of the order of data
    // the optimizer
    ScheduleKind schedule;
    float lr, final_lr_fraction, weight_decay;
    int warmup;
    float beta1, beta2, eps;        // of AdamW
    float clip;                     // the largest norm of a gradient; 0: any
    float skip_loss_z, skip_grad_z; // 0: never skip
    int ignore_nan;
    int master_weights; // 0 is for FP32 builds alone
    float z_loss;
    // looking at it
    int val_every, val_batches; // 0: never; -1: all
    int hellaswag;
    const char* hellaswag_data;
    int sample_every, sample_length;
    const char *prompt, *prompt_file;
    float temperature;
    int top_k, sample_seed;
    const char* log_json; // file, or ""
    int device_log_every; // below 1: never
    // ranks and overlap
    int dp, up, tp, sp; // dp: options_parse puts in what processes were started for, where it is not given
    int zero;
    int recompute, keep_gathered;
    int graph, gelu_fusion, deterministic, tf32;
    int comm_report;
    const char* trace; // file, or ""
    StepsOption trace_steps;
    StepsOption profile; // first 0: none
    OverlapOption overlap;
    FoTopology topology;
    FoDtype wire;
    LinkOption link;
    double pace;    // TFLOP/s, 0: as fast as it goes
    double timeout; // seconds
    // processes
    FoInit init;
    int num_processes, process_rank, processes_per_node, port; // 0, and rank -1: as the launcher says
    const char *server, *init_folder;                          // ""
    FoLaunch launch;                                           // of these, by options_parse
    // instead of training
    int dry_run, world; // world: ranks of a dry run or plan; 0: dp * up * tp
    const char* plan;   // a machine's file, or ""
    int generate, eval, help;
} TrainOptions;

/* options_parse -- argv into o, defaults where nothing is said.
 *
 * `-x 5`, `--max-steps 5` and `--max-steps=5` are the same. With --help nothing after it is looked at:
 * o->help is 1. Errors: -1 with one line in err that names option and value and says what would work.
 */
int options_parse(TrainOptions* o, int argc, char** argv, char err[TRAIN_ERR]);

// "auto", "none", "slice:4", "flash:1"; returns buf
const char* overlap_name(OverlapOption o, char buf[32]);
// what of a shard's rows the option itself wants to divide: auto takes no m that doesn't
static inline int overlap_cut(OverlapOption o) {
    return o.m > 0 ? o.m : 1;
}

// what --help prints
void options_help(FILE* out, const char* program);

/* model_parse -- what -e says, as sizes.
 *
 * text     d12 = gpt2:d12, gpt3:c768 (llm.c's families), or L=4,C=128,NH=4,V=256,maxT=256 in any order (V
 *          50257, maxT 1024 if not given), or a file that ends in .bin
 * Returns 0: c is set. 1: it is a file's name, and c is not set. -1: err says what is wrong.
 */
int model_parse(const char* text, GPTConfig* c, char err[TRAIN_ERR]);

#ifdef __cplusplus
}
#endif
#endif
