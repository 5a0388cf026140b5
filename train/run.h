/* run.h -- a training run beside the model: what it is checked for before it starts, its files, what it says.
 * The loop is in train_gpt.cu.
 */
#ifndef RUN_H
#define RUN_H
#include "data/dataloader.h"
#include "data/tokenizer.h"
#include "flashoverlap/fo_trace.h"
#include "train/auto.h"
#include "train/checkpoint.h"
#include "train/gpt.h"
#include "train/hellaswag.h"
#include "train/logger.h"
#include "train/outlier.h"
#include "train/profile.h"
#include "train/progress.h"
#include "train/prompts.h"
#ifdef __cplusplus
extern "C" {
#endif

// what a resumed run wants to find again beside weights and optimizer state. No times: a state file has the
// same bytes in every run
typedef struct {
    OutlierDetector loss, norm;
} TrainerState;

// a micro-step of the step at hand: the sum of this rank's losses, and where its tokens stand
typedef struct {
    double loss;
    const char* shard;
    size_t first;
} MicroStep;

typedef struct {
    const TrainOptions* opt;
    FoGroup* world;
    int rank, step, first_step, nsteps, grad_accum;
    int failed; // this rank could not read its data: its batches are zeros until all ranks know
    int teller; // the rank that tells the user's error
    GPT gpt;
    DataLoader train, val;
    MicroStep* micros; // [grad_accum]
    Tokenizer tokenizer;
    HellaSwag hellaswag; // empty unless -h 1
    Prompts prompts;     // of samples
    int nsamples;        // so far
    Logger logger;
    FolderLock lock; // of the output folder, on rank 0
    Schedule schedule;
    TrainerState state;
    double peak_tflops;  // of all ranks
    double tokens_per_s; // running mean, not bias corrected
    int nmeasured;
    double sum_ms;
    AutoChoice chosen; // --overlap auto, in chosen_s seconds
    double chosen_s;
    double weights_s;     // that it took to read or draw them
    double data_s;        // in which this rank waited for batches, in the steps of sum_ms
    Sent* sent;           // --comm-report: before the step that it is about
    StepsOption traced;   // --trace: numbers of the steps, as they are printed
    FoTrace* trace;       // under way
    double trace_start_s; // of the step
    Profile profile;
    Progress progress;
} Trainer;

/* user_error -- ends all ranks with the user's error. Of those that call it one tells it, rank 0 if every
 * rank has found it: the others give it time, on a busy machine a launcher takes seconds to end processes.
 * Never returns.
 */
void user_error(int tells, const char* err) __attribute__((noreturn));

/* run_open -- rank tr->rank of tr->opt's mesh: data, model, memory, weights or the checkpoint that is
 * resumed, everything but the training; with --generate, tokenizer, prompts and weights alone; with --eval,
 * data to validate on and weights. Ends all ranks with one line if something is wrong; what can be wrong is
 * looked at before a folder is made and memory taken. Collective. run_close is its opposite.
 */
void run_open(Trainer* tr);
void run_close(Trainer* tr);

// after run_open, by rank 0: options, model, mesh, memory
void run_print_start(const Trainer* tr);
// the same of --eval: model and mesh
void run_print_evaluation(const Trainer* tr);
// one line a step, as llm.c's, ended by what this project is about. Also counts steps, on every rank
int run_print_step(Trainer* tr, float loss, double loss_z, float norm, double norm_z, float lr,
                   double seconds, Scalars sum, char err[TRAIN_ERR]);
/* run_comm_report -- what each rank has sent since run_comm_start, by operation: bytes and messages.
 * Collective; rank 0 prints. "other": what a group has sent beside its operations, 0 or one was forgotten.
 */
void run_comm_start(Trainer* tr);
void run_comm_report(Trainer* tr);

/* run_trace_start, run_trace_end -- around each step: the timeline of those that --trace is about.
 * Collective. The file is written after the last of them, or after a step that is the last because of `stop`;
 * -1 with err on rank 0 if it could not be.
 */
void run_trace_start(Trainer* tr);
int run_trace_end(Trainer* tr, int stop, char err[TRAIN_ERR]);

// around each step, too: the table of --profile is printed after the last of its steps, or of the run.
// Collective
void run_profile_start(Trainer* tr);
void run_profile_end(Trainer* tr, int stop);

// model and state of tr->step, complete or not at all; collective
int run_write_checkpoint(Trainer* tr, char err[TRAIN_ERR]);

// what would be done, without doing it: parameters, memory of each rank, the plan of each operation
int run_dry(const TrainOptions* opt, char err[TRAIN_ERR]);

/* run_plan -- --plan: what steps would take on the machine that opt->plan describes, under each schedule,
 * and, of --world ranks, the meshes that are fastest. The schedules of training run there on a simulated
 * device (flashoverlap/sim), which has all of this program linked to it once more: dev/sim/predict.c. Prints;
 * 0, or
 * -1.
 */
int run_plan(const TrainOptions* opt, char err[TRAIN_ERR]);

#ifdef __cplusplus
}
#endif
#endif
