/* test_gpt.cu -- end to end: the program's own model against PyTorch's numbers, at P = 1, 2, 3, 4 rank
 * threads.
 *
 * dev/fixture/ holds two tiny models (an even and an odd number of heads), one batch each, and what a float64
 * reference computes for it: loss, logits, every gradient, ten AdamW steps; dev/fixture/README.md derives the
 * tolerances. Each P, sharding and mode must come within them; all modes of one P must have the same bits.
 * Stop and resume, checkpoints, processes: dev/test/program_test.py.
 */
#define TESTING
#include "train_gpt.cu"
#include "dev/test/check.h"
#include "dev/test/whole.h"

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, loss[11], norm[10], moved[NTENSORS];
    int nvalues;
    struct {
        int tensor;
        size_t index;
        double after;
    } value[256];
} Steps;

typedef struct {
    const char* name; // of the fixture
    GPTConfig config;
    DebugState ref;
    Steps steps;
    TrainOptions opt;
    float* full; // whole tensors in the order of the file; every rank places its part
    size_t first[NTENSORS + 1];
    double loss, losses[11], norms[10];
    float* logits; // [B, V] of the last position of each sequence
    int nsteps;
} Case;

static int tensor_named(const char* name) {
    Tensors ts;
    GPTConfig c = {8, 8, 128, 1, 1, 8};
    tensors_init(&ts, c, cuts_tp(1, 0));
    for (int i = 0; i < NTENSORS; i++) {
        if (!strcmp(ts.t[i].name, name)) { return i; }
    }
    return -1;
}

static void read_steps(const char* path, Steps* s) {
    FILE* f = fopen(path, "r");
    char line[512], name[32];
    fo_require(f != NULL, "no %s", path);
    memset(s, 0, sizeof *s);
    while (fgets(line, sizeof line, f)) {
        int n;
        size_t index;
        double a, b;
        if (sscanf(line, "hyper %lf %lf %lf %lf %lf", &s->lr, &s->beta1, &s->beta2, &s->eps,
                   &s->weight_decay) == 5) {
            continue;
        }
        if (sscanf(line, "step %d %lf %lf", &n, &a, &b) == 3) { s->loss[n - 1] = a, s->norm[n - 1] = b; }
        if (sscanf(line, "final %lf", &a) == 1) { s->loss[10] = a; }
        if (sscanf(line, "moved %31s %lf", name, &a) == 2) { s->moved[tensor_named(name)] = a; }
        if (sscanf(line, "value %31s %zu %lf %lf", name, &index, &a, &b) == 4 && s->nvalues < 256) {
            s->value[s->nvalues].tensor = tensor_named(name);
            s->value[s->nvalues].index = index;
            s->value[s->nvalues++].after = b;
        }
    }
    fclose(f);
}

// this rank's part of all tensors -> the case's whole ones; parts do not overlap but for what every rank has
static void place(Case* c, const GPT* g, const float* local) {
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor* t = &g->ts.t[i];
        if (t->cut == CUT_NONE && g->r != 0) { continue; }
        for (int l = 0; l < t->layers; l++) {
            tensor_place(c->full + c->first[i] + (size_t)l * t->rows * t->cols,
                         local + t->offset + (size_t)l * tensor_local(t), &g->ts, i, g->r, 0, sizeof(float));
        }
    }
}

static double one_pass(Case* c, GPT* g) {
    gpt_batch(g, c->ref.x, c->ref.y, c->ref.B, c->ref.T);
    gpt_forward(g);
    gpt_head(g, 1.0f / (float)g->N);
    gpt_backward(g);
    return (double)gpt_loss(g);
}

static void open_case(Case* c, GPT* g, FoGroup* world) {
    char path[256], err[TRAIN_ERR];
    FoDevice* device = fo_device_open(fo_group_rank(world), fo_group_size(world));
    gpt_open(g, c->config, &c->opt, world, device);
    snprintf(path, sizeof path, "dev/fixture/%s.bin", c->name);
    fo_require(checkpoint_read_model(path, &g->ts, g->params, &g->ts, g->master, g->compute, err) == 0, "%s",
               err);
}

static void close_case(GPT* g) {
    FoDevice* device = g->device;
    gpt_close(g);
    fo_device_close(device);
}

// loss, gradients and some logits of the fixture's batch
static void gradients_body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    GPT g;
    open_case(c, &g, world);
    int* padded = (int*)malloc((size_t)(c->ref.B * c->ref.T + 64) * sizeof(int));
    float* logits = (float*)malloc((size_t)c->config.V * sizeof(float));
    fo_require(padded && logits, "out of memory");
    for (int b = 0; b < c->ref.B; b++) {
        int t = c->ref.T - b; // different positions
        gpt_next_logits(&g, c->ref.x + b * c->ref.T, t, logits, padded);
        if (g.r == 0) {
            memcpy(c->logits + (size_t)b * (size_t)c->config.V, logits, (size_t)c->config.V * sizeof(float));
        }
    }
    double loss = one_pass(c, &g);
    gpt_reduce(&g, 0.0);
    fo_allgather_begin(g.o[B7_BACK], g.grads + g.ts.ncut, sizeof(float), replicated(&g));
    fo_allgather_end(g.o[B7_BACK]);
    fo_stream_sync(g.compute);
    if (g.r == 0) { c->loss = loss; }
    place(c, &g, g.grads);
    fo_group_barrier(world);
    free(padded);
    free(logits);
    close_case(&g);
}

static void steps_body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    GPT g;
    open_case(c, &g, world);
    for (int i = 0; i < c->nsteps; i++) {
        double loss = one_pass(c, &g);
        Scalars sum = gpt_reduce(&g, 0.0);
        float norm = (float)sqrt(sum.square_sum);
        FoAdamw a = {(float)c->steps.lr,
                     (float)c->steps.beta1,
                     (float)c->steps.beta2,
                     (float)c->steps.eps,
                     0.0f,
                     norm > 1.0f ? 1.0f / norm : 1.0f,
                     i + 1};
        gpt_update(&g, a, (float)c->steps.weight_decay, 1);
        if (g.r == 0) { c->losses[i] = loss, c->norms[i] = (double)norm; }
    }
    double loss = one_pass(c, &g);
    if (g.r == 0) { c->losses[c->nsteps] = loss; }
    fo_stream_sync(g.compute);
    place(c, &g, g.master);
    fo_group_barrier(world);
    close_case(&g);
}

// ---- tolerances: derived in dev/fixture/README.md ---------------------------------------------------------
// relative: of a loss or norm; of the 2-norm of a tensor's difference
typedef struct {
    double logits, final_ln, grad, loss, norm;
    double moved; // how far a tensor moves in ten steps
    double value; // single elements after ten steps, in learning rates
} Tolerance;

static const Tolerance TOLERANCE_FP32 = {1.5e-6, 1e-6, 4e-6, 1e-6, 2e-6, 1e-5, 1e-3};
static const Tolerance TOLERANCE_BF16 = {3e-2, 2e-2, 7e-2, 4e-3, 1e-2, 2e-2, 0.2};

static double relative(double got, double want) {
    return fabs(got - want) / fabs(want);
}

static void check_gradients(Case* c, const Tolerance* tol) {
    Tensors ts;
    char where[sizeof check_where];
    memcpy(where, check_where, sizeof where);
    tensors_init(&ts, c->config, cuts_tp(1, 0));
    CHECK(relative(c->loss, (double)c->ref.loss) <= tol->loss);
    for (int b = 0; b < c->ref.B; b++) {
        int t = c->ref.T - b, V = c->config.V;
        const float* want = c->ref.logits + ((size_t)b * (size_t)c->ref.T + (size_t)t - 1) * (size_t)V;
        CHECK_AT("%.90s logits of sequence %d", where, b);
        CHECK_CLOSE(c->logits + (size_t)b * (size_t)V, want, (size_t)V, tol->logits);
    }
    for (int i = 0; i < NTENSORS; i++) {
        CHECK_AT("%.90s %s", where, ts.t[i].name);
        CHECK_CLOSE(c->full + c->first[i], c->ref.grads + c->first[i], c->first[i + 1] - c->first[i],
                    i == LNFW || i == LNFB ? tol->final_ln : tol->grad);
    }
    memcpy(check_where, where, sizeof where);
}

static void check_steps(Case* c, const Tolerance* tol, const float* start) {
    Tensors ts;
    char where[sizeof check_where];
    memcpy(where, check_where, sizeof where);
    tensors_init(&ts, c->config, cuts_tp(1, 0));
    for (int i = 0; i <= 10; i++) {
        CHECK_AT("%.90s step %d", where, i + 1);
        CHECK(relative(c->losses[i], c->steps.loss[i]) <= tol->loss);
        if (i < 10) { CHECK(relative(c->norms[i], c->steps.norm[i]) <= tol->norm); }
    }
    for (int i = 0; i < NTENSORS; i++) {
        double sum = 0.0;
        size_t C = (size_t)c->config.C;
        for (size_t k = c->first[i]; k < c->first[i + 1]; k++) {
            size_t in_layer = (k - c->first[i]) % (3 * C);
            if (i == QKVB && in_layer >= C && in_layer < 2 * C) {
                continue;
            } // k's bias: its gradient is rounding
            sum += ((double)c->full[k] - (double)start[k]) * ((double)c->full[k] - (double)start[k]);
        }
        CHECK_AT("%.90s %s moved", where, ts.t[i].name);
        CHECK(relative(sqrt(sum), c->steps.moved[i]) <= tol->moved);
    }
    for (int i = 0; i < c->steps.nvalues; i++) {
        double after = c->steps.value[i].after;
        float got = c->full[c->first[c->steps.value[i].tensor] + c->steps.value[i].index];
        CHECK_AT("%.90s %s[%zu]", where, ts.t[c->steps.value[i].tensor].name, c->steps.value[i].index);
        CHECK(fabs((double)got - after) <= tol->value * c->steps.lr);
    }
    memcpy(check_where, where, sizeof where);
}

// ---- cases ------------------------------------------------------------------------------------------------
static void case_open(Case* c, const char* name) {
    char path[256], err[TRAIN_ERR];
    int version;
    char* argv[] = {(char*)"test_gpt"};
    memset(c, 0, sizeof *c);
    c->name = name;
    snprintf(path, sizeof path, "dev/fixture/%s.bin", name);
    fo_require(checkpoint_read_header(path, &c->config, &version, err) == 0, "%s", err);
    snprintf(path, sizeof path, "dev/fixture/%s_debug_state.bin", name);
    fo_require(debugstate_read(path, &c->config, &c->ref, err) == 0, "%s", err);
    snprintf(path, sizeof path, "dev/fixture/%s_steps.txt", name);
    read_steps(path, &c->steps);
    fo_require(options_parse(&c->opt, 1, argv, err) == 0, "%s", err);
    c->opt.batch = c->ref.B, c->opt.seq_len = c->ref.T;
    Tensors ts;
    tensors_init(&ts, c->config, cuts_tp(1, 0));
    for (int i = 0; i < NTENSORS; i++) {
        c->first[i + 1] = c->first[i] + (size_t)ts.t[i].layers * ts.t[i].rows * ts.t[i].cols;
    }
    c->full = (float*)calloc(c->first[NTENSORS], sizeof(float));
    c->logits = (float*)calloc((size_t)c->ref.B * (size_t)c->config.V, sizeof(float));
    c->nsteps = 10;
    fo_require(c->full && c->logits, "out of memory");
}

static void case_close(Case* c) {
    debugstate_free(&c->ref);
    free(c->full);
    free(c->logits);
}

static const struct {
    OverlapOption overlap;
    int sp;
} MODES[] = {{{FO_NONE, 1}, 1},  {{FO_SLICE, 2}, 1}, {{FO_SLICE, 3}, 1}, {{FO_SLICE, 4}, 1},
             {{FO_FLASH, 1}, 1}, {{FO_FLASH, 2}, 1}, {{FO_FLASH, 3}, 1}, {{FO_NONE, 1}, 0},
             {{FO_FLASH, 1}, 0}, {{FO_FLASH, 2}, 0}};
enum { NMODES = sizeof MODES / sizeof MODES[0] };

// every mode, with and without sp: PyTorch's gradients, and one another's bits
static void test_gradients(Case* c, const Tolerance* tol, int P) {
    static const FoTopology topologies[] = {FO_DIRECT, FO_RING};
    size_t nbytes = c->first[NTENSORS] * sizeof(float);
    float* first = (float*)malloc(nbytes);
    fo_require(first != NULL, "out of memory");
    for (int wire = 0; wire < 2; wire++) {
        for (int k = 0; k < 2; k++) {
            for (int i = 0; i < NMODES; i++) {
                if (c->ref.B * c->ref.T / P % MODES[i].overlap.m != 0) { continue; }
                c->opt.tp = P, c->opt.topology = topologies[k], c->opt.wire = wire ? FO_FP32 : FO_FLOATX;
                c->opt.overlap = MODES[i].overlap, c->opt.sp = MODES[i].sp;
                CHECK_AT("%s P=%d %s:%d sp=%d %s wire %d", c->name, P, fo_mode_name(c->opt.overlap.mode),
                         c->opt.overlap.m, c->opt.sp, k ? "ring" : "direct", wire);
                for (size_t j = 0; j < c->first[NTENSORS]; j++) {
                    c->full[j] = NAN;
                }
                fo_ranks_run(P, gradients_body, c);
                check_gradients(c, tol);
                if (i == 0) { memcpy(first, c->full, nbytes); }
                CHECK_BITS(c->full, first, nbytes);
            }
        }
    }
    free(first);
}

static void test_steps(Case* c, const Tolerance* tol, int P) {
    Tensors ts;
    char path[256], err[TRAIN_ERR];
    size_t nbytes = c->first[NTENSORS] * sizeof(float);
    float *start = (float*)malloc(nbytes), *again = (float*)malloc(nbytes), *local;
    tensors_init(&ts, c->config, cuts_tp(1, 0));
    local = (float*)malloc(ts.nelem * sizeof(float));
    fo_require(start && again && local, "out of memory");
    snprintf(path, sizeof path, "dev/fixture/%s.bin", c->name);
    fo_require(checkpoint_read_model(path, NULL, NULL, &ts, local, NULL, err) == 0, "%s", err);
    for (int i = 0; i < NTENSORS; i++) {
        memcpy(start + c->first[i], local + ts.t[i].offset, (c->first[i + 1] - c->first[i]) * sizeof(float));
    }
    OverlapOption flash = {FO_FLASH, 1};
    c->opt.tp = P, c->opt.topology = FO_DIRECT, c->opt.wire = FO_FLOATX, c->opt.overlap = flash,
    c->opt.sp = 1;
    CHECK_AT("%s P=%d", c->name, P);
    fo_ranks_run(P, steps_body, c);
    check_steps(c, tol, start);
    memcpy(again, c->full, nbytes);
    fo_ranks_run(P, steps_body, c);
    CHECK_BITS(c->full, again, nbytes); // run after run
    free(start);
    free(again);
    free(local);
}

int main(void) {
    static const char* names[] = {"even", "odd"};
    const Tolerance* tol = FO_FLOATX == FO_BF16 ? &TOLERANCE_BF16 : &TOLERANCE_FP32;
    for (int i = 0; i < 2; i++) {
        Case c;
        case_open(&c, names[i]);
        for (int P = 1; P <= 4; P++) {
            test_gradients(&c, tol, P);
            test_steps(&c, tol, P);
        }
        case_close(&c);
    }
    return check_report();
}
