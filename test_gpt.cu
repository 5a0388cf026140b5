/* test_gpt.cu -- end to end: the program's own model against PyTorch's numbers, on every mesh of dp, up and
 * tp in 1 ... 4 that has 16 rank threads at most.
 *
 * dev/fixture/ holds two tiny models (an even and an odd number of heads), one batch each, and what a float64
 * reference computes for it: loss, logits, every gradient, ten AdamW steps; dev/fixture/README.md derives the
 * tolerances. Each mesh, ZeRO stage, recomputation and mode must come within them; all modes of one mesh, and
 * all stages, must have the same bits. Stop and resume, checkpoints, processes: dev/test/program_test.py.
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
    double loss, norm, losses[11], norms[10];
    int accum; // micro-steps of a step
    int nsteps;
    int chosen; // operations that --overlap auto has cut into more than one chunk a shard
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

// a rank's parts of all tensors, which lie as `ts` says -> the case's whole ones. What all replicas have
// comes from rank 0, what they share from each
static void place(Case* c, const GPT* g, const Tensors* ts, const float* local) {
    const Mesh* m = &g->mesh;
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor* t = &ts->t[i];
        if ((!t->sharded || ts->cuts.nshards == 1) && m->p != 0) { continue; }
        if (t->cut == CUT_NONE && m->t != 0) { continue; }
        for (int l = 0; l < t->layers; l++) {
            tensor_place(c->full + c->first[i] + (size_t)l * t->rows * t->cols,
                         local + t->offset + (size_t)l * tensor_local(t), ts, i, m->t, ts->cuts.shard,
                         sizeof(float));
        }
    }
}

// gradients as they are after gpt_reduce: the sums of matrices at the owners of their rows, of vectors spread
// by the caller
static void place_grads(Case* c, GPT* g) {
    Tensors shared;
    TensorCuts cuts = {g->mesh.tp, g->mesh.t, g->mesh.up, g->mesh.rp, g->mesh.p};
    tensors_init(&shared, c->config, cuts);
    float* local = (float*)calloc(shared.nelem, sizeof(float));
    fo_require(local != NULL, "out of memory");
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor* t = &shared.t[i];
        for (int l = 0; l < t->layers; l++) {
            for (int j = 0; j < tensor_nunits(&shared, i); j++) {
                const TensorUnit u = tensor_unit(&shared, i, j), whole = tensor_unit(&g->ts, i, j);
                size_t at = g->zero == 2 && t->sharded ? u.offset : whole.offset + u.row0 * u.cols;
                memcpy(local + t->offset + (size_t)l * tensor_local(t) + u.offset, gpt_grad(g, i, l) + at,
                       u.nrows * u.cols * sizeof(float));
            }
        }
    }
    place(c, g, &shared, local);
    free(local);
}

// this rank's sequences of micro-step `micro`; where dp does not divide them, every dp rank has all of them,
// which gives the same means
static void one_pass(Case* c, GPT* g, int micro, int push) {
    int dp = g->mesh.dp, B = c->opt.batch, all = dp * B * c->accum != c->ref.B;
    size_t first = (size_t)(all ? 0 : (micro * dp + g->mesh.d) * B) * (size_t)c->ref.T;
    gpt_batch(g, c->ref.x + first, c->ref.y + first, B, c->ref.T);
    if (push) { gpt_batch_replicas(g, c->ref.x + first); }
    gpt_micro(g, 1.0f / ((float)g->N * (float)(dp * c->accum)), push);
}

// a step's gradients; returns the mean loss
static double one_step(Case* c, GPT* g, Scalars* sum) {
    double loss = 0.0, scale = (double)(c->opt.batch * c->ref.T) * g->mesh.dp * c->accum;
    for (int micro = 0; micro < c->accum; micro++) {
        one_pass(c, g, micro, g->mesh.rp > 1 && (g->zero == 2 || micro + 1 == c->accum));
        loss += gpt_loss(g);
    }
    *sum = gpt_reduce(g, g->mesh.t == 0 ? loss : 0.0, 0.0, 0.0);
    return sum->loss / scale;
}

static void open_case(Case* c, GPT* g, FoGroup* world) {
    char path[256], err[TRAIN_ERR];
    FoDevice* device = fo_device_open(fo_group_rank(world), fo_group_size(world));
    // a link that some operations of these tiny models can hide, and others cannot
    const int chooses = c->opt.overlap.m == 0 && fo_group_size(world) > 1;
    if (chooses && fo_device_emulates()) { fo_group_link(world, 0.1, 0.0); }
    gpt_open(g, c->config, &c->opt, world, device);
    snprintf(path, sizeof path, "dev/fixture/%s.bin", c->name);
    fo_require(checkpoint_read_model(path, &g->ts, g->params, &g->os, g->master, g->compute, err) == 0, "%s",
               err);
    if (chooses) { auto_choose(g, &c->opt); }
    for (int i = 0; i < NSITES && fo_group_rank(world) == 0; i++) {
        c->chosen += chooses && g->site_m[i] > 1;
    }
}

static void close_case(GPT* g) {
    FoDevice* device = g->device;
    gpt_close(g);
    fo_device_close(device);
}

// loss and gradients of the fixture's batch
static void gradients_body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    GPT g;
    Scalars sum;
    open_case(c, &g, world);
    double loss = one_step(c, &g, &sum);
    FoAdamw none = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1};
    gpt_spread(&g, none, 0.0f, 0);
    fo_stream_sync(g.compute);
    if (fo_group_rank(world) == 0) { c->loss = loss, c->norm = sqrt(sum.square_sum); }
    place_grads(c, &g);
    fo_group_barrier(world);
    close_case(&g);
}

static void steps_body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    GPT g;
    open_case(c, &g, world);
    for (int i = 0; i < c->nsteps; i++) {
        Scalars sum;
        double loss = one_step(c, &g, &sum);
        float norm = (float)sqrt(sum.square_sum);
        FoAdamw a = {(float)c->steps.lr,
                     (float)c->steps.beta1,
                     (float)c->steps.beta2,
                     (float)c->steps.eps,
                     0.0f,
                     norm > 1.0f ? 1.0f / norm : 1.0f,
                     i + 1};
        gpt_update(&g, a, (float)c->steps.weight_decay, 1);
        if (fo_group_rank(world) == 0) { c->losses[i] = loss, c->norms[i] = (double)norm; }
    }
    Scalars sum;
    double loss = one_step(c, &g, &sum);
    if (fo_group_rank(world) == 0) { c->losses[c->nsteps] = loss; }
    fo_stream_sync(g.compute);
    place(c, &g, &g.os, g.master);
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
    CHECK(relative(c->norm, c->steps.norm[0]) <= tol->norm);
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
            if (i == QKVB && in_layer / C == 1) { continue; } // k's bias: its gradient is rounding
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
    c->opt.seq_len = c->ref.T;
    Tensors ts;
    tensors_init(&ts, c->config, cuts_tp(1, 0));
    for (int i = 0; i < NTENSORS; i++) {
        c->first[i + 1] = c->first[i] + (size_t)ts.t[i].layers * ts.t[i].rows * ts.t[i].cols;
    }
    c->full = (float*)calloc(c->first[NTENSORS], sizeof(float));
    c->nsteps = 10;
    fo_require(c->full, "out of memory");
}

static void case_close(Case* c) {
    debugstate_free(&c->ref);
    free(c->full);
}

typedef struct {
    OverlapOption overlap;
    int sp, zero, recompute, keep, ring, fp32;
} Way;

static const Way WAYS[] = {
    {{FO_NONE, 1}, 1, 0, 1, 0, 0, 0},  {{FO_SLICE, 2}, 1, 1, 2, 0, 0, 0}, {{FO_SLICE, 3}, 1, 2, 0, 0, 0, 0},
    {{FO_SLICE, 4}, 1, 0, 3, 0, 0, 0}, {{FO_FLASH, 1}, 1, 1, 1, 0, 0, 0}, {{FO_FLASH, 1}, 1, 2, 3, 0, 0, 0},
    {{FO_FLASH, 2}, 1, 0, 0, 1, 0, 0}, {{FO_FLASH, 3}, 1, 1, 2, 0, 0, 0}, {{FO_NONE, 1}, 0, 2, 1, 0, 0, 0},
    {{FO_FLASH, 2}, 0, 0, 2, 0, 0, 0}, {{FO_FLASH, 0}, 1, 1, 1, 0, 0, 0}, {{FO_FLASH, 0}, 1, 2, 2, 0, 0, 0},
    {{FO_NONE, 1}, 1, 1, 1, 0, 0, 1},  {{FO_FLASH, 2}, 1, 2, 2, 0, 0, 1}, {{FO_NONE, 1}, 1, 1, 1, 0, 1, 0},
    {{FO_FLASH, 2}, 1, 2, 3, 0, 1, 0}, {{FO_SLICE, 2}, 1, 0, 0, 0, 1, 0}, {{FO_NONE, 1}, 1, 0, 1, 1, 1, 1},
    {{FO_FLASH, 1}, 1, 1, 2, 0, 1, 1}};
enum { NWAYS = sizeof WAYS / sizeof WAYS[0] };

// A sanitizer makes everything ten times slower, and so does emulation, for which cuda's builds are meant
// here: there each mesh goes a quarter of the ways, another mesh others; emulation takes meshes of 4 ranks,
// and one of 8
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif
enum { SLOW = SANITIZED || !FO_DEVICE_CPU };

static void set_mesh(Case* c, int dp, int up, int tp, int accum) {
    c->opt.dp = dp, c->opt.up = up, c->opt.tp = tp, c->accum = accum;
    c->opt.batch = c->ref.B % (dp * accum) ? c->ref.B : c->ref.B / (dp * accum);
}

static void set_way(Case* c, const Way* w) {
    c->opt.overlap = w->overlap, c->opt.sp = w->sp, c->opt.zero = w->zero, c->opt.recompute = w->recompute;
    c->opt.keep_gathered = w->keep, c->opt.topology = w->ring ? FO_RING : FO_DIRECT;
    c->opt.wire = w->fp32 ? FO_FP32 : FO_FLOATX;
}

// can this mesh cut the fixture?
static int fits(const Case* c, int dp, int up, int tp) {
    int P = up * tp, B = c->ref.B % dp ? c->ref.B : c->ref.B / dp;
    return dp * P <= FO_MAX_RANKS && P <= c->config.NH && (up > 1 || B % P ? c->ref.T % (2 * P) == 0 : 1);
}

// PyTorch's gradients in every way; ways that send the same numbers in the same topology: one another's bits,
// which follow each other
static void test_gradients(Case* c, const Tolerance* tol, int dp, int up, int tp) {
    size_t nbytes = c->first[NTENSORS] * sizeof(float);
    float* first = (float*)malloc(nbytes);
    int known = -1; // topology and wire of `first`
    fo_require(first != NULL, "out of memory");
    set_mesh(c, dp, up, tp, 1);
    for (int i = 0; i < NWAYS; i++) {
        const Way* w = &WAYS[i];
        int kind = 2 * w->ring + w->fp32;
        // the largest meshes in three ways alone
        if (dp * up * tp > 4 && w->ring) { continue; }
        if (dp * up * tp > 8 && i != 0 && i != 4 && i != 5) { continue; }
        if (SLOW && i % (FO_DEVICE_CPU ? 4 : 8) != (dp + up + tp) % 4) { continue; }
        set_way(c, w);
        CHECK_AT("%s %d*%d*%d %s:%d sp=%d z=%d r=%d keep=%d %s wire %d", c->name, dp, up, tp,
                 fo_mode_name(w->overlap.mode), w->overlap.m, w->sp, w->zero, w->recompute, w->keep,
                 w->ring ? "ring" : "direct", w->fp32);
        for (size_t j = 0; j < c->first[NTENSORS]; j++) {
            c->full[j] = NAN;
        }
        fo_ranks_run(dp * up * tp, gradients_body, c);
        check_gradients(c, tol);
        if (kind != known) { memcpy(first, c->full, nbytes); }
        known = kind;
        CHECK_BITS(c->full, first, nbytes);
    }
    free(first);
}

// the same ten steps with layers and head as a graph: the same bits
static void test_graph(Case* c) {
    const size_t nbytes = c->first[NTENSORS] * sizeof(float);
    float* eager = (float*)malloc(nbytes);
    double losses[11];
    fo_require(eager != NULL, "out of memory");
    memcpy(eager, c->full, nbytes);
    memcpy(losses, c->losses, sizeof losses);
    c->opt.graph = 1;
    fo_ranks_run(c->opt.dp * c->opt.up * c->opt.tp, steps_body, c);
    c->opt.graph = 0;
    CHECK_BITS(c->full, eager, nbytes);
    CHECK_BITS(c->losses, losses, sizeof losses);
    free(eager);
}

static void test_steps(Case* c, const Tolerance* tol, int dp, int up, int tp) {
    static const Way flash = {{FO_FLASH, 1}, 1, 0, 1, 0, 0, 0};
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
    set_way(c, &flash);
    for (int accum = 1; accum <= 2; accum++) {
        if (c->ref.B % (dp * accum) && accum > 1) { continue; }
        if (accum > 1 && !fits(c, dp * accum, up, tp)) { continue; }
        set_mesh(c, dp, up, tp, accum);
        for (int zero = 0; zero <= (dp * up > 1 ? 2 : 0); zero++) {
            c->opt.zero = zero;
            CHECK_AT("%s %d*%d*%d z=%d, %d micro-steps", c->name, dp, up, tp, zero, accum);
            fo_ranks_run(dp * up * tp, steps_body, c);
            check_steps(c, tol, start);
            if (zero == 0) { memcpy(again, c->full, nbytes); }
            // micro-steps of ZeRO 2 are summed over ranks first, of the others over time first
            if (zero == 1 || (zero == 2 && accum == 1)) { CHECK_BITS(c->full, again, nbytes); }
            if (fo_device_graphs() && (accum == 2 || zero == 2 || dp * up * tp == 1)) { test_graph(c); }
        }
        if (dp * up == 1) { // run after run
            fo_ranks_run(tp, steps_body, c);
            CHECK_BITS(c->full, again, nbytes);
        }
    }
    free(start);
    free(again);
    free(local);
}

int main(int argc, char** argv) {
    static const char* names[] = {"even", "odd"};
    const Tolerance* tol = FO_FLOATX == FO_BF16 ? &TOLERANCE_BF16 : &TOLERANCE_FP32;
    for (int i = 0; i < 2; i++) {
        Case c;
        case_open(&c, names[i]);
        for (int mesh = 0; mesh < 64; mesh++) {
            int tp = mesh % 4 + 1, up = mesh / 4 % 4 + 1, dp = mesh / 16 + 1;
            // for looking at one mesh: test_gpt DP UP TP
            if (argc == 4 && (dp != atoi(argv[1]) || up != atoi(argv[2]) || tp != atoi(argv[3]))) {
                continue;
            }
            if (!fits(&c, dp, up, tp)) { continue; }
            if (!FO_DEVICE_CPU && argc == 1 && dp * up * tp > 4 && !(dp == 2 && up == 2 && tp == 2)) {
                continue;
            }
            test_gradients(&c, tol, dp, up, tp);
            if (!FO_DEVICE_CPU && argc == 1 && (dp + up + tp) % 2 != i) { continue; }
            if (dp * up * tp <= (SLOW ? 2 : 4)) { test_steps(&c, tol, dp, up, tp); }
        }
        CHECK_AT("%s: auto has cut %d operations", c.name, c.chosen);
        CHECK(c.chosen > 0 || argc > 1 || SLOW || !fo_device_emulates());
        case_close(&c);
    }
    return check_report();
}
