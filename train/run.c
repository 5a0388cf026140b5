/* run.c -- a training run beside the model: checks, files, reports, and its start. See run.h. */
#include "train/run.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "train/generate.h"
#include "train/fit.h"
#include "train/report.h"
#include "train/weights.h"

// ---- before anything is made ------------------------------------------------------------------------------
// a signal that our handler takes ends the sleep: the launcher is ending us
void user_error(int tells, const char* err) {
    if (!tells && sleep(8) != 0) { _exit(1); }
    fo_quit(1, "%s", err);
}

// ---- what is said -----------------------------------------------------------------------------------------
static void print_model(const Trainer* tr, const GPT* g) {
    const TrainOptions* opt = tr->opt;
    const Mesh* m = &g->mesh;
    GPTConfig c = g->config;
    report_row("device", "%s", fo_device_name(g->device));
    report_row("peak TFlops", "%.3f", tr->peak_tflops);
    report_row("precision", "%s", FO_FLOATX == FO_BF16 ? "BF16" : "FP32");
    report_rule();
    report_row("weight init method", "%s", opt->model);
    report_row("max_sequence_length T", "%d", c.maxT);
    report_row("vocab_size V", "%d", c.V);
    report_row("padded_vocab_size Vp", "%d", c.Vp);
    report_row("num_layers L", "%d", c.L);
    report_row("num_heads NH", "%d", c.NH);
    report_row("channels C", "%d", c.C);
    report_row("num_parameters", "%zu", g->ts.ntotal);
    report_rule();
    report_row("ranks dp * up * tp", "%d * %d * %d, as %s", m->dp, m->up, m->tp,
               strcmp(fo_group_transport(tr->world), "local") ? "processes" : "threads");
    report_row("sequence parallel", "%d, %s", opt->sp,
               m->up > 1 || opt->batch % m->tp ? "zig-zag shards" : "whole-sequence shards");
    report_row("zero stage", "%d", opt->zero);
    report_row("recompute", "%d%s", opt->recompute, opt->keep_gathered ? ", gathered inputs kept" : "");
    char overlap[32];
    report_row("overlap", "%s %s, %s on the wire", overlap_name(opt->overlap, overlap),
               opt->topology == FO_RING ? "ring" : "direct", opt->wire == FO_BF16 ? "bf16" : "fp32");
    if (opt->link.gbytes_s > 0.0) {
        report_row("link (emulated)", "%g GB/s, %g us", opt->link.gbytes_s, opt->link.us);
    }
    if (opt->pace > 0.0) { report_row("pace (emulated)", "%g TFLOP/s a rank", opt->pace); }
    report_rule();
}

// of a rank's arrays; what it needs beside them: beside_nbytes
static void print_memory(const char* who, GPTBytes b) {
    printf("memory of %s: %zu MiB for model parameters, %zu MiB for gradients, %zu MiB for AdamW's m, v "
           "and masters, %zu MiB for activations, in all %.1f MiB\n",
           who, b.params >> 20, b.grads >> 20, b.optimizer >> 20, b.acts >> 20,
           (double)total_nbytes(b) / 1048576.0);
}

// of the rank that needs most: before any rank takes it
static void print_most_memory(const TrainOptions* opt, GPTConfig c) {
    const int world = opt->dp * opt->up * opt->tp;
    char who[80];
    int rank;
    const GPTBytes b = fit_most(opt, c, &rank);
    (void)snprintf(who, sizeof who, world > 1 ? "rank %d, which needs most of %d ranks" : "rank %d", rank,
                   world);
    print_memory(who, b);
    fflush(stdout);
}

/* What P threads of a process need beside their arrays, as measured (cpu, models of 0.3 to 1 GB, P = 1, 2, 4,
 * either precision): the program and its libraries 14 MiB; a rank 8 MiB of stacks and scratch, and the
 * largest of what it takes for a while, the 8 Mi numbers with which its peak is measured.
 */
static size_t beside_nbytes(int P) {
    return ((size_t)14 << 20) + (size_t)P * (((size_t)8 << 20) + ((size_t)8 << 20) * sizeof(floatX));
}

void run_print_evaluation(const Trainer* tr) {
    const GPT* g = &tr->gpt;
    const Mesh* m = &g->mesh;
    printf("evaluating %s: %zu parameters, on dp %d * up %d * tp %d ranks\n",
           tr->first_step ? tr->opt->out : tr->opt->model, g->ts.ntotal, m->dp, m->up, m->tp);
    if (tr->first_step) { printf("its checkpoint of step %d\n", tr->first_step); }
    fflush(stdout);
}

// does auto choose? A forward pass alone goes as auto begins, by flash:1, and one rank has nothing to choose
static int chooses(const Trainer* tr) {
    return tr->opt->overlap.m == 0 && !tr->gpt.inference && fo_group_size(tr->world) > 1;
}

void run_print_start(const Trainer* tr) {
    const GPT* g = &tr->gpt;
    const TrainOptions* opt = tr->opt;
    report_options(opt);
    print_model(tr, g);
    report_row("train_num_batches", "%d", tr->nsteps);
    report_rule();
    if (fo_device_hint(g->device)) { printf("note: %s\n", fo_device_hint(g->device)); }
    int P = g->mesh.up * g->mesh.tp;
    if (g->config.NH % P) { printf("note: %d heads over %d ranks: some have one more\n", g->config.NH, P); }
    printf("num_parameters: %zu => bytes: %zu\n", g->ts.ntotal, g->ts.ntotal * sizeof(floatX));
    printf("batch_size B=%d * seq_len T=%d and total_batch_size=%d\n=> setting grad_accum_steps=%d\n",
           opt->batch, opt->seq_len, opt->total_batch, tr->grad_accum);
    printf("weights here after %.2f s\n", tr->weights_s);
    if (tr->first_step) { printf("resuming at step %d\n", tr->first_step); }
    if (chooses(tr)) { auto_print(&tr->chosen, tr->chosen_s, ""); }
    fflush(stdout);
}

// names of the overlapped operations that this mesh has, each once, and how long this rank has stood waiting
// for them in the last step; returns their number
static int exposed_by_op(const GPT* g, const char* name[NSITES + 1], double ms[NSITES + 1]) {
    int n = 0;
    for (int i = 0; i <= NSITES; i++) {
        const int site = i < NSITES ? i : B7_DP_BACK; // D3 is the replicas', too
        int k = 0;
        if (gpt_site_ranks(g, site) == 1) { continue; }
        name[n] = gpt_op_name(i);
        while (strcmp(name[k], name[n]) != 0) {
            k++;
        }
        if (k == n) { ms[n++] = 0.0; }
        ms[k] += g->last_exposed_ms[i];
    }
    return n;
}

// the operations that auto has cut, and how; returns their number
static int chosen_chunks(const Trainer* tr, const char* name[NSITES], int m[NSITES]) {
    int n = 0;
    for (int i = 0; i < NSITES; i++) {
        if (tr->chosen.P[i] > 0) { name[n] = gpt_sites[i].name, m[n++] = tr->chosen.m[i]; }
    }
    return n;
}

int run_print_step(Trainer* tr, float loss, double loss_z, float norm, double norm_z, float lr,
                   double seconds, Scalars sum, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    double tokens = (double)opt->total_batch, rate = tokens / seconds, P = (double)fo_group_size(tr->world);
    double flops = gpt_flops_a_token(&tr->gpt, opt->seq_len);
    if (tr->step > tr->first_step) { // the first step of a run makes primitives and warms up
        tr->tokens_per_s = 0.95 * tr->tokens_per_s + 0.05 * rate;
        tr->nmeasured++;
        tr->sum_ms += 1e3 * seconds;
        rate = tr->tokens_per_s / (1.0 - pow(0.95, tr->nmeasured));
    }
    if (tr->rank != 0) { return 0; }
    const double mfu = flops * tokens / seconds / (tr->peak_tflops * 1e12);
    const char* op[NSITES + 1];
    double op_ms[NSITES + 1];
    const int nops = exposed_by_op(&tr->gpt, op, op_ms);
    const char* chosen[NSITES];
    int chosen_m[NSITES];
    const int nchosen = tr->step == tr->first_step ? chosen_chunks(tr, chosen, chosen_m) : 0;
    const LogStep log = {.step = tr->step,
                         .loss = loss,
                         .norm = norm,
                         .lr = lr,
                         .loss_z = loss_z,
                         .norm_z = norm_z,
                         .ms = 1e3 * seconds,
                         .mfu = mfu,
                         .tok_s = rate,
                         .comm_ms = sum.comm_ms / P,
                         .exposed_ms = sum.exposed_ms / P,
                         .tokens = (tr->step + 1.0) * tokens,
                         .op = op,
                         .op_ms = op_ms,
                         .nops = nops,
                         .chosen = chosen,
                         .chosen_m = chosen_m,
                         .nchosen = nchosen};
    progress_clear(&tr->progress);
    printf("step %4d/%d | loss %7.6f (%+.2fz)| norm %6.4f (%+.2fz)| lr %.2e | %.2f ms | %.1f%% %s MFU | %.0f "
           "tok/s | comm %.2f ms exposed %.2f ms\n",
           tr->step + 1, tr->nsteps, (double)loss, loss_z, (double)norm, norm_z, (double)lr, 1e3 * seconds,
           100.0 * mfu, FO_FLOATX == FO_BF16 ? "bf16" : "fp32", rate, log.comm_ms, log.exposed_ms);
    if (opt->device_log_every > 0 && (tr->step + 1) % opt->device_log_every == 0) {
        char state[256];
        fo_device_state(tr->gpt.device, state, sizeof state);
        printf("                    %s\n", state);
    }
    fflush(stdout);
    return logger_train(&tr->logger, &log, err);
}

// ---- communication ----------------------------------------------------------------------------------------
enum { SENT_IDS = NSITES + 1, SENT_SCALARS, SENT_FORGOTTEN, NSENT };

// bytes and messages that this rank has queued so far: of each operation, D3, tokens' ids, scalars; and what
// a group has sent that no operation has counted
static void count_sent(const GPT* g, Sent sent[NSENT]) {
    FoGroup* const groups[] = {g->group[GROUP_TP], g->group[GROUP_UP], g->group[GROUP_RP]};
    memset(sent, 0, NSENT * sizeof *sent);
    for (int i = 0; i < 3; i++) {
        Sent all;
        fo_group_sent(groups[i], &all.nbytes, &all.nmessages);
        sent[SENT_FORGOTTEN].nbytes += all.nbytes;
        sent[SENT_FORGOTTEN].nmessages += all.nmessages;
    }
    for (int i = 0; i <= NSITES; i++) {
        sent[i] = gpt_sent(g, i);
        sent[SENT_FORGOTTEN].nbytes -= sent[i].nbytes;
        sent[SENT_FORGOTTEN].nmessages -= sent[i].nmessages;
    }
    fo_group_sent(g->dp, &sent[SENT_IDS].nbytes, &sent[SENT_IDS].nmessages);
    fo_group_sent(g->world, &sent[SENT_SCALARS].nbytes, &sent[SENT_SCALARS].nmessages);
}

void run_comm_start(Trainer* tr) {
    tr->sent = (Sent*)malloc(NSENT * sizeof(Sent));
    fo_require(tr->sent != NULL, "out of memory");
    count_sent(&tr->gpt, tr->sent);
}

static void print_sent(const char* name, const char* group, const Sent* all, int P, const int* rows,
                       int nrows) {
    printf("%-9s %-5s", name, group);
    for (int r = 0; r < P; r++) {
        Sent sum = {0, 0};
        for (int i = 0; i < nrows; i++) {
            sum.nbytes += all[r * NSENT + rows[i]].nbytes;
            sum.nmessages += all[r * NSENT + rows[i]].nmessages;
        }
        printf(" %12zu %6zu", sum.nbytes, sum.nmessages);
    }
    printf("\n");
}

// one line a name: two operations of one name are one to the reader
static void print_report(const Sent* all, int P) {
    static const char* const groups[] = {"tp", "up", "dp*up"};
    const int d3 = NSITES, ids = SENT_IDS, scalars = SENT_SCALARS, forgotten = SENT_FORGOTTEN;
    for (int i = 0; i < NSITES; i++) {
        int same[NSITES] = {0}, n = 0;
        for (int k = 0; k < NSITES; k++) {
            if (strcmp(gpt_sites[k].name, gpt_sites[i].name) == 0) { same[n++] = k; }
        }
        if (same[0] == i) { print_sent(gpt_sites[i].name, groups[gpt_sites[i].group], all, P, same, n); }
    }
    print_sent(gpt_op_name(d3), groups[GROUP_RP], all, P, &d3, 1);
    print_sent("ids", "dp", all, P, &ids, 1);
    print_sent("scalars", "world", all, P, &scalars, 1);
    print_sent("other", "all", all, P, &forgotten, 1);
}

void run_comm_report(Trainer* tr) {
    const int P = fo_group_size(tr->world);
    Sent now[NSENT], *all = (Sent*)calloc((size_t)P, sizeof now);
    fo_require(all != NULL, "out of memory");
    count_sent(&tr->gpt, now);
    for (int i = 0; i < NSENT; i++) {
        now[i].nbytes -= tr->sent[i].nbytes, now[i].nmessages -= tr->sent[i].nmessages;
    }
    memcpy(all + tr->rank * NSENT, now, sizeof now);
    gpt_gather_host(&tr->gpt, all, sizeof now);
    if (tr->rank == 0) {
        printf("sent in step %d: bytes and messages of ranks 0 to %d\n", tr->step + 1, P - 1);
        print_report(all, P);
        fflush(stdout);
    }
    free(all);
    free(tr->sent);
    tr->sent = NULL;
}

// ---- timeline ---------------------------------------------------------------------------------------------
// which steps
static int check_trace(Trainer* tr, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    StepsOption steps = opt->trace_steps;
    if (!opt->trace[0]) { return 0; }
    if (steps.first == 0) { // the first has primitives to make, and no weights of an update to wait for
        steps.first = steps.last = tr->first_step + 1 + (tr->first_step + 1 < tr->nsteps);
    } else if (steps.last > tr->nsteps) {
        return train_error(err, "--trace-steps %d-%d: the run has %d step%s", steps.first, steps.last,
                           tr->nsteps, tr->nsteps == 1 ? "" : "s");
    }
    tr->traced = steps;
    if (tr->rank == 0 && steps.last <= tr->first_step) {
        printf("note: --trace-steps %d-%d are done already: no timeline\n", steps.first, steps.last);
    }
    return 0;
}

// rank 0: makes the folder, which is then this run's; a timeline may be written into it
static int prepare_files(Trainer* tr, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    char why[FO_TRACE_ERR];
    if (opt->out[0] && checkpoint_prepare_folder(opt->out, &tr->lock, err)) { return -1; }
    if (opt->out[0] && err[0]) { printf("note: %s\n", err); }
    if (!opt->trace[0] || fo_trace_check(opt->trace, why) == 0) { return 0; }
    lock_release(&tr->lock);
    return train_error(err, "--trace: %s", why);
}

static int check_profile(const Trainer* tr, char err[TRAIN_ERR]) {
    const StepsOption steps = tr->opt->profile;
    if (steps.last > tr->nsteps) {
        return train_error(err, "--profile %d-%d: the run has %d step%s", steps.first, steps.last, tr->nsteps,
                           tr->nsteps == 1 ? "" : "s");
    }
    if (tr->rank == 0 && steps.first && steps.last <= tr->first_step) {
        printf("note: --profile %d-%d are done already: no profile\n", steps.first, steps.last);
    }
    return 0;
}

void run_trace_start(Trainer* tr) {
    GPT* g = &tr->gpt;
    const int n = tr->step + 1;
    if (n < tr->traced.first || n > tr->traced.last) { return; }
    if (!tr->trace) {
        const FoTraceRow rows[] = {{g->compute, "compute"},
                                   {g->comm[GROUP_TP], "comm tp"},
                                   {g->comm[GROUP_UP], "comm up"},
                                   {g->comm[GROUP_RP], "comm dp"}};
        gpt_graphs_free(g); // they tell no times
        tr->trace = fo_trace_start(tr->world, rows, 1 + NGROUPS);
    }
    tr->trace_start_s = fo_now();
}

int run_trace_end(Trainer* tr, int stop, char err[TRAIN_ERR]) {
    const Mesh* m = &tr->gpt.mesh;
    const int n = tr->step + 1;
    char name[64], why[FO_TRACE_ERR];
    double apart;
    if (!tr->trace) { return 0; }
    (void)snprintf(name, sizeof name, "step %d", n);
    fo_trace_mark(tr->trace, name, tr->trace_start_s);
    if (n < tr->traced.last && !stop) { return 0; }
    (void)snprintf(name, sizeof name, "rank %d (dp %d, up %d, tp %d)", tr->rank, m->d, m->u, m->t);
    int rc = fo_trace_end(tr->trace, name, tr->opt->trace, &apart, why);
    tr->trace = NULL;
    gpt_graphs_free(&tr->gpt); // the next ones tell none
    if (rc) { return train_error(err, "--trace: %s", why); }
    if (tr->rank == 0) {
        printf("timeline up to step %d: %s", n, tr->opt->trace);
        printf(apart > 0.0 ? ", clocks of machines compared to %.1f us\n" : "\n", 1e6 * apart);
        fflush(stdout);
    }
    return 0;
}

static int is_profiled(const Trainer* tr) {
    const int n = tr->step + 1;
    return n >= tr->opt->profile.first && n <= tr->opt->profile.last;
}

void run_profile_start(Trainer* tr) {
    if (is_profiled(tr)) { profile_begin(&tr->profile, &tr->gpt); }
}

void run_profile_end(Trainer* tr, int stop) {
    const int last = tr->step + 1 == tr->opt->profile.last || stop;
    if (is_profiled(tr)) { profile_end(&tr->profile, &tr->gpt, last, tr->rank == 0); }
}

// ---- files ------------------------------------------------------------------------------------------------
// does -e, where it gives sizes, give those of the checkpoint that is resumed?
static int check_sizes(const TrainOptions* opt, const char* path, GPTConfig c, char err[TRAIN_ERR]) {
    GPTConfig e;
    char why[TRAIN_ERR];
    if (model_parse(opt->model, &e, why) != 0) { return 0; }
    if (e.L == c.L && e.C == c.C && e.NH == c.NH && e.V == c.V && e.maxT == c.maxT) { return 0; }
    return train_error(err, "--resume 1: -e %.100s is not the model of %.200s, L=%d,C=%d,NH=%d,V=%d,maxT=%d",
                       opt->model, path, c.L, c.C, c.NH, c.V, c.maxT);
}

// opt's model as sizes and, if it is a file or a checkpoint to resume from, which; speak: name damaged
// checkpoints
static int find_model(const TrainOptions* opt, GPTConfig* c, char path[CHECKPOINT_PATH], int* step, int speak,
                      char err[TRAIN_ERR]) {
    int version;
    path[0] = 0;
    *step = 0;
    if (opt->resume && access(opt->out, F_OK) == 0) {
        char why[TRAIN_ERR];
        int found = checkpoint_find(opt->out, why);
        if (found < 0 && why[0]) { // starting anew would overwrite what is there
            return train_error(err, "--resume 1: %s; to start anew, leave it out", why);
        }
        if (found >= 0) {
            if (why[0] && speak) { printf("note: %s\n", why); }
            *step = found;
            checkpoint_path(path, opt->out, "model", found);
            return checkpoint_read_header(path, c, &version, err) || check_sizes(opt, path, *c, err) ? -1 : 0;
        }
    }
    if (opt->resume && (opt->generate || opt->eval)) {
        return train_error(err, "--resume 1: %s has no complete checkpoint to %s", opt->out,
                           opt->generate ? "generate from" : "evaluate");
    }
    if (speak && !opt->resume && opt->out[0] && !opt->generate && !opt->eval && access(opt->out, F_OK) == 0) {
        char why[TRAIN_ERR];
        const int found = checkpoint_find(opt->out, why);
        if (found >= 0) {
            printf("note: %s has checkpoints of another run, up to step %d: -y 1 goes on from it; -y 1 after "
                   "this run takes the newest of both\n",
                   opt->out, found);
        }
    }
    int kind = model_parse(opt->model, c, err);
    if (kind == 1) {
        if (strlen(opt->model) >= CHECKPOINT_PATH) {
            return train_error(err, "-e: a path of over %d characters", CHECKPOINT_PATH);
        }
        strcpy(path, opt->model);
        return checkpoint_read_header(path, c, &version, err);
    }
    return kind;
}

// our own state of the step that is resumed
static int load_state(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    CheckpointState st;
    char path[CHECKPOINT_PATH], why[TRAIN_ERR];
    memset(&st, 0, sizeof st);
    checkpoint_path(path, tr->opt->out, "state", tr->first_step);
    // the masters have every bit; the model file is them rounded
    int rc =
        checkpoint_read_state(path, &st, &g->ts, g->params, &g->os, g->m, g->v, g->master, g->compute, err);
    if (rc == 0 && st.trainer_nbytes != sizeof tr->state) {
        rc = train_error(err, "%s: was written by another version of this program", path);
    }
    if (rc == 0 && dataloader_restore(&tr->train, st.loader, st.loader_nbytes, why)) {
        rc = train_error(err, "%s: %s; -i, -a and --data-seed must be as they were", path, why);
    } else if (rc == 0 && why[0] && tr->rank == 0) {
        printf("note: %s\n", why);
    }
    if (rc == 0) {
        memcpy(&tr->state, st.trainer, sizeof tr->state);
        if (!outlier_is_sound(&tr->state.loss) || !outlier_is_sound(&tr->state.norm)) {
            rc = train_error(err, "%s: is damaged: its windows of losses and norms", path);
        }
    }
    checkpoint_state_free(&st);
    return rc;
}

// states of llm.c's ranks: its detectors of outliers start anew here, as they do in llm.c
static int load_llmc(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    LlmcPosition at;
    char why[TRAIN_ERR];
    const char* dir = tr->opt->out;
    if (checkpoint_import_llmc(dir, tr->first_step, &at, &g->ts, g->params, &g->os, g->m, g->v, g->master,
                               g->compute, err)) {
        return -1;
    }
    if (tr->rank == 0) {
        printf("note: step %d of %s was written by %d rank%s of llm.c%s%s\n", tr->first_step, dir, at.nproc,
               at.nproc > 1 ? "s" : "", err[0] ? "; " : "", err);
    }
    // as many tokens into the shard, as far as it can be known: llm.c does not store its -b
    size_t sample = at.sample_idx * (size_t)at.nproc / (size_t)g->mesh.dp;
    if (dataloader_seek(&tr->train, 0, 0, at.shard_idx, sample, why)) {
        return train_error(err, "%s: step %d: %s; -i must be as it was", dir, tr->first_step, why);
    }
    return 0;
}

static int load_weights(Trainer* tr, const char* path, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    if (tr->first_step > 0 && !g->inference) {
        return checkpoint_is_llmc(tr->opt->out, tr->first_step) ? load_llmc(tr, err) : load_state(tr, err);
    }
    if (path[0]) {
        return checkpoint_read_model(path, &g->ts, g->params, &g->os, g->master, g->compute, err);
    }
    weights_random(&g->ts, g->params, &g->os, g->master, tr->opt->seed, g->compute);
    return 0;
}

static int write_checkpoint(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    FoStream* comm = g->comm[GROUP_TP];
    char path[CHECKPOINT_PATH];
    CheckpointState st;
    gpt_await_weights(g);
    memset(&st, 0, sizeof st);
    st.step = tr->step;
    st.loader_nbytes = DATA_STATE_NBYTES;
    st.loader = malloc(st.loader_nbytes);
    fo_require(st.loader != NULL, "out of memory");
    dataloader_save(&tr->train, st.loader);
    st.trainer = &tr->state;
    st.trainer_nbytes = sizeof tr->state;
    if (tr->rank == 0) { printf("Writing checkpoint at step %d\n", tr->step); }
    if (tr->rank == 0 && checkpoint_remove(tr->opt->out, tr->step, err)) { return -1; }
    checkpoint_path(path, tr->opt->out, "model", tr->step);
    int rc = checkpoint_write_model(path, &g->ts, g->params, g->world, comm, err);
    checkpoint_path(path, tr->opt->out, "state", tr->step);
    if (rc == 0) {
        rc = checkpoint_write_state(path, &g->os, &st, g->m, g->v, g->master, g->world, comm, err);
    }
    free(st.loader);
    if (rc == 0 && tr->rank == 0) { rc = checkpoint_write_done(tr->opt->out, tr->step, err); }
    if (rc != 0 && tr->rank == 0) {
        char why[TRAIN_ERR];
        checkpoint_remove(tr->opt->out, tr->step, why); // a model without its state
    }
    if (rc == 0 && tr->rank == 0) {
        rc = checkpoint_prune(tr->opt->out, tr->step, tr->opt->keep_checkpoints,
                              tr->opt->major_checkpoint_every, err);
    }
    return rc;
}

// Rank 0 writes what may be many GB. The others wait for it, within what is not --timeout, here: at the
// barrier at the latest, so that no exchange of the next step does.
int run_write_checkpoint(Trainer* tr, char err[TRAIN_ERR]) {
    const double start = fo_now();
    fo_group_patience(tr->world, fmax(tr->opt->timeout, FO_PATIENCE_S));
    if (write_checkpoint(tr, err)) { return -1; }
    if (tr->rank == 0) { printf("checkpoint written in %.2f s\n", fo_now() - start); }
    fo_stream_sync(tr->gpt.comm[GROUP_TP]);
    fo_group_barrier(tr->world);
    fo_group_patience(tr->world, tr->opt->timeout);
    return 0;
}

// ---- start ------------------------------------------------------------------------------------------------
static int open_prompts(Trainer* tr, GPTConfig c, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    const char* prompts = opt->prompt[0] ? "--prompt" : opt->prompt_file[0] ? "--prompt-file" : NULL;
    char warning[TRAIN_ERR];
    int bad = tokenizer_init(&tr->tokenizer, opt->tokenizer, warning);
    if (!bad && tr->tokenizer.V > c.V) { // its tokens are no tokens of the model
        bad = train_error(warning, "--tokenizer %s has %d tokens, the model V=%d", opt->tokenizer,
                          tr->tokenizer.V, c.V);
        tokenizer_free(&tr->tokenizer);
    }
    if (bad && prompts) { return train_error(err, "%s needs a tokenizer: %s", prompts, warning); }
    if (bad && tr->rank == 0 && (opt->sample_every > 0 || opt->generate)) {
        printf("%s: samples are token ids\n", warning);
    }
    return prompts_init(&tr->prompts, opt, &tr->tokenizer, c.V, c.maxT, err);
}

// what a model is evaluated on
static int open_evaluation(Trainer* tr, GPTConfig c, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    const Mesh m = mesh_of(opt, tr->rank);
    const int B = opt->batch, T = opt->seq_len;
    if (opt->val_every > 0 && dataloader_init(&tr->val, opt->val_data, B, T, m.d, m.dp, 0, 0, c.V, err)) {
        return -1;
    }
    return opt->hellaswag ? hellaswag_open(&tr->hellaswag, opt->hellaswag_data, c.V, T, err) : 0;
}

static int open_data(Trainer* tr, GPTConfig c, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    const Mesh m = mesh_of(opt, tr->rank);
    int B = opt->batch, T = opt->seq_len, V = c.V;
    const char* train = opt->overfit ? opt->val_data : opt->train_data;
    if (dataloader_init(&tr->train, train, B, T, m.d, m.dp, !opt->overfit, opt->data_seed, V, err)) {
        return -1;
    }
    if (open_evaluation(tr, c, err)) { return -1; }
    tr->nsteps = opt->max_steps >= 0 ? opt->max_steps : (int)(tr->train.ntok / (size_t)opt->total_batch);
    tr->grad_accum = opt->total_batch / (B * T * m.dp);
    tr->micros = (MicroStep*)calloc((size_t)tr->grad_accum, sizeof *tr->micros);
    fo_require(tr->micros != NULL, "out of memory");
    Schedule schedule = {opt->schedule, opt->lr, opt->final_lr_fraction, opt->warmup, tr->nsteps};
    tr->schedule = schedule;
    if (tr->nsteps == 0 && opt->max_steps < 0) {
        return train_error(err, "%s: its %zu tokens do not make one step of -d %d: a smaller -d, or -x STEPS",
                           train, tr->train.ntok, opt->total_batch);
    }
    return open_prompts(tr, c, err);
}

// what of the options says how much memory a rank takes, as the prompts need it
static int size_for_prompts(Trainer* tr, GPTConfig c, TrainOptions* sized, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    // whole cuts of the mesh, for every chunk
    const int P = opt->up * opt->tp, unit = P > 1 ? 2 * P * overlap_cut(opt->overlap) : 1;
    if (check_heads(opt, c, err) || open_prompts(tr, c, err)) { return -1; }
    const int each = (tr->prompts.n + opt->dp - 1) / opt->dp;
    sized->batch = opt->batch < each ? opt->batch : each;
    sized->seq_len = (tr->prompts.longest + unit - 1) / unit * unit;
    sized->recompute = 3, sized->keep_gathered = 0; // no backward pass: one layer's activations at a time
    return 0;
}

// the same of an evaluation
static int size_for_evaluation(Trainer* tr, GPTConfig c, TrainOptions* sized, char err[TRAIN_ERR]) {
    sized->recompute = 3, sized->keep_gathered = 0;
    return check_cuts(tr->opt, c, err) || open_evaluation(tr, c, err) ? -1 : 0;
}

// does a prompt fit the activations that training has?
static int check_prompts(const Trainer* tr, GPTConfig c, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    GPT sizes;
    int B, T;
    gpt_sizes(&sizes, c, opt, tr->rank);
    if (opt->sample_every == 0 || generator_shape(&sizes, 1, tr->prompts.longest, &B, &T)) { return 0; }
    return train_error(err, "a prompt of %d tokens does not fit the batch, -b %d * -t %d: -t %d at least",
                       tr->prompts.longest, opt->batch, opt->seq_len, tr->prompts.longest);
}

void run_open(Trainer* tr) {
    const TrainOptions* opt = tr->opt;
    const int trains = !opt->generate && !opt->eval;
    TrainOptions sized = *opt;
    GPTConfig c;
    char path[CHECKPOINT_PATH], err[TRAIN_ERR] = "";
    memset(&c, 0, sizeof c);
    if (find_model(opt, &c, path, &tr->first_step, tr->rank == 0, err) ||
        (opt->generate ? size_for_prompts(tr, c, &sized, err)
         : opt->eval   ? size_for_evaluation(tr, c, &sized, err)
                       : check_cuts(opt, c, err) || open_data(tr, c, err) || check_prompts(tr, c, err) ||
                           check_trace(tr, err) || check_profile(tr, err))) {
        user_error(tr->rank == 0, err);
    }
    FoDevice* device = fo_device_open(tr->rank, fo_group_nlocal(tr->world));
    if (tr->rank == 0 && !opt->generate) { print_most_memory(&sized, c); }
    fflush(stdout);
    fo_group_barrier(tr->world); // it is told | a rank finds that it does not fit
    // of threads the first that finds out is the one that tells
    const int tells = tr->rank == 0 || strcmp(fo_group_transport(tr->world), "local") == 0;
    if (fit_check(&sized, c, tr->rank, fo_device_free_nbytes(device), err)) { user_error(tells, err); }
    fo_group_barrier(tr->world); // all have looked | memory is taken, and something is written
    if (tr->rank == 0 && trains && prepare_files(tr, err)) { user_error(1, err); }
    fo_device_deterministic(device, opt->deterministic);
    fo_device_fuse_gelu(device, opt->gelu_fusion);
    fo_device_tf32(device, opt->tf32);
    if (opt->link.gbytes_s > 0.0) { fo_group_link(tr->world, opt->link.gbytes_s, opt->link.us); }
    gpt_open(&tr->gpt, c, &sized, tr->world, device);
    const double start = fo_now();
    const int bad = load_weights(tr, path, err);
    tr->weights_s = fo_now() - start;
    if (bad ||
        (trains && logger_init(&tr->logger, opt->out, opt->log_json, tr->rank, tr->first_step > 0, err))) {
        lock_release(&tr->lock);
        user_error(tr->rank == 0, err);
    }
    // all at once, as they will compute; then what a link does while nothing else runs
    fo_group_barrier(tr->world);
    if (trains) { tr->peak_tflops = opt->pace > 0.0 ? opt->pace : fo_device_peak_tflops(device); }
    if (opt->link.gbytes_s <= 0.0) {
        fo_group_measure(tr->gpt.seq, tr->gpt.comm[GROUP_TP]);
        fo_group_barrier(tr->world);
    }
    for (int i = 0; i < NGROUPS && opt->link.gbytes_s <= 0.0; i++) {
        fo_group_measure(tr->gpt.group[i], tr->gpt.comm[i]);
        fo_group_barrier(tr->world);
    }
    fo_device_pace(device, opt->pace);
    const double measured = fo_now();
    if (chooses(tr)) { tr->chosen = auto_choose(&tr->gpt, opt); }
    tr->chosen_s = fo_now() - measured;
}

void run_close(Trainer* tr) {
    FoDevice* device = tr->gpt.device;
    lock_release(&tr->lock);
    gpt_close(&tr->gpt);
    fo_device_close(device);
    dataloader_free(&tr->train);
    dataloader_free(&tr->val);
    hellaswag_close(&tr->hellaswag);
    tokenizer_free(&tr->tokenizer);
    prompts_free(&tr->prompts);
    free(tr->micros);
}

// ---- dry run ----------------------------------------------------------------------------------------------
// the plan of each operation, those of all ranks checked against each other; long ones are not printed
static int dry_plans(const GPT* g, const TrainOptions* opt, char* text, size_t nbytes, char err[TRAIN_ERR]) {
    char why[256];
    for (int i = 0; i <= NSITES; i++) {
        const int d3 = i == NSITES, site = d3 ? B7_DP_BACK : i; // a plan for each layer, all alike
        const char* name = gpt_op_name(i);
        const int P = gpt_site_ranks(g, site), m = P > 1 ? gpt_site_chunks(g, site) : 1;
        const FoTopology topology = gpt_site_topology(opt, site);
        FoPlan plan;
        if (P == 1 && gpt_sites[site].group != GROUP_TP) { continue; }
        if (fo_plan_check(gpt_sites[site].kind, opt->overlap.mode, m, topology, P, why) ||
            fo_plan_init(&plan, gpt_sites[site].kind, opt->overlap.mode, m, topology, P, 0, why)) {
            return train_error(err, "%s: %s", name, why);
        }
        if (P <= FO_MAX_RANKS) {
            printf("%s %s\n", name, fo_plan_print(&plan, text, nbytes));
        } else {
            printf("%s %d ranks, %d exchanges each: every message has its receive\n", name, P,
                   plan.nexchanges);
        }
        fo_plan_free(&plan);
    }
    return 0;
}

// what scripts/run_common.sh makes hours and disk space of
static void dry_costs(const GPT* g, const TrainOptions* opt) {
    const size_t model = 1024 + g->ts.ntotal * sizeof(floatX);
    const size_t state = 1024 + DATA_STATE_NBYTES + sizeof(TrainerState) + 12 * g->ts.ntotal;
    const int micro = opt->batch * opt->seq_len * opt->dp;
    printf("a step has %d tokens, %d micro-steps of %d; a token takes %.0f floating point operations\n",
           opt->total_batch, opt->total_batch / micro, micro, gpt_flops_a_token(g, opt->seq_len));
    printf("a checkpoint has %zu bytes: model %zu, state %zu\n", model + state, model, state);
}

int run_dry(const TrainOptions* opt, char err[TRAIN_ERR]) {
    GPTConfig c;
    char path[CHECKPOINT_PATH], text[8192]; // a plan of 16 ranks and 16 sub-chunks has over 5,000 characters
    int step, world = opt->dp * opt->up * opt->tp;
    GPT g;
    memset(&c, 0, sizeof c);
    if (find_model(opt, &c, path, &step, 1, err) || check_cuts(opt, c, err)) { return -1; }
    report_options(opt);
    gpt_sizes(&g, c, opt, 0);
    printf("%-10s %6s %20s %20s %20s\n", "tensor", "layers", "shape", "on rank 0", "parameters");
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor* t = &g.ts.t[i];
        char shape[40], local[40];
        snprintf(shape, sizeof shape, "%zu x %zu", t->rows, t->cols);
        snprintf(local, sizeof local, "%zu x %zu", t->local_rows, t->local_cols);
        printf("%-10s %6d %20s %20s %20zu\n", t->name, t->layers, shape, local,
               (size_t)t->layers * t->rows * t->cols);
    }
    printf("%-10s %69zu\n", "all", g.ts.ntotal);
    size_t total = beside_nbytes(world);
    for (int r = 0; r < world && world <= FO_MAX_RANKS; r++) {
        gpt_sizes(&g, c, opt, r);
        (void)snprintf(text, sizeof text, "rank %d", r);
        print_memory(text, gpt_nbytes(&g));
        total += total_nbytes(gpt_nbytes(&g));
    }
    if (world > 1) { print_most_memory(opt, c); }
    if (world <= FO_MAX_RANKS) {
        printf(
            "memory of the process, ranks as threads: about %zu MiB, of them %zu for libraries, threads and "
            "buffers\n",
            total >> 20, beside_nbytes(world) >> 20);
    }
    gpt_sizes(&g, c, opt, 0);
    dry_costs(&g, opt);
    if (world > 1 && opt->overlap.m == 0) {
        printf("overlap auto: these plans have m=1; a run takes 1, 2 or 4 for each operation\n");
    }
    return dry_plans(&g, opt, text, sizeof text, err);
}
