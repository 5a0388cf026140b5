/* predict.c -- train_gpt --plan: steps of the program's own code on a simulated device
 * (flashoverlap/sim/sim.h).
 *
 * A step here is train_gpt.cu's: gpt_micro, gpt_reduce, gpt_update. Only run_plan is seen from outside: the
 * Makefile links this, the simulated device and a copy of all that is neutral into one object, and makes the
 * other names local, so that a program has its real device and the simulated one.
 */
#define TESTING
#include "train_gpt.cu"
#include "flashoverlap/sim/sim.h"
#include "train/auto.h"
#include "train/fit.h"
#include "train/rng.h"

enum { NMODES = 5, NBEST = 8 };
static const OverlapOption MODES[NMODES] = {
    {FO_NONE, 1}, {FO_SLICE, 4}, {FO_SLICE, 8}, {FO_FLASH, 1}, {FO_FLASH, 2}};

typedef struct {
    double step_s, comm_s, exposed_s;
    double site_s[NSITES + 1]; // exposed, by operation
    size_t nbytes;             // of a rank
    int failed;                // the timeline could not be written
} Prediction;

// a mesh of so many replicas is simulated with fewer, each of which stands for several
enum { MOST_REPLICAS = 32 };

typedef struct {
    const TrainOptions* opt;
    int alike;
} Simulated;

static int color_of(const void* arg, int nth, int rank) {
    const Mesh m = mesh_of(((const Simulated*)arg)->opt, rank);
    return mesh_color(&m, nth);
}

static int alike_of(const void* arg, int nth) {
    return nth < 0 || nth == SPLIT_REPLICAS || nth == SPLIT_DP ? ((const Simulated*)arg)->alike : 1;
}

// one step of naccum micro-steps; seconds
static double step_s(GPT* g, const int* ids, const TrainOptions* opt, int naccum) {
    const double start = fo_now();
    const FoAdamw a = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.0f, 1.0f, 1};
    for (int micro = 0; micro < naccum; micro++) {
        const int push = g->mesh.rp > 1 && (g->zero == 2 || micro + 1 == naccum);
        gpt_batch(g, ids, ids, opt->batch, opt->seq_len);
        if (push || g->weights_wait) { gpt_batch_replicas(g, ids); }
        gpt_micro(g, 1.0f, push);
        gpt_loss(g);
    }
    gpt_reduce(g, 0.0, 0.0, 0.0);
    gpt_update(g, a, 0.1f, 1);
    return fo_now() - start;
}

static void take_sites(GPT* g, double seconds[NSITES + 1], double* comm_s) {
    double exposed_ms, comm_ms;
    gpt_take_times(g, &exposed_ms, &comm_ms);
    for (int i = 0; i <= NSITES; i++) {
        seconds[i] = 1e-3 * g->exposed_ms[i];
        g->exposed_ms[i] = 0.0;
    }
    *comm_s = 0.0;
    for (int i = 0; i <= NSITES; i++) {
        *comm_s += 1e-3 * g->comm_ms[i];
        g->comm_ms[i] = 0.0;
    }
}

static FoTrace* start_timeline(GPT* g, FoGroup* alone) {
    const FoTraceRow rows[] = {{g->compute, "compute"},
                               {g->comm[GROUP_TP], "comm tp"},
                               {g->comm[GROUP_UP], "comm up"},
                               {g->comm[GROUP_RP], "comm dp"}};
    return fo_trace_start(alone, rows, 1 + NGROUPS);
}

static int end_timeline(FoTrace* timeline, double start, const char* path, char err[TRAIN_ERR]) {
    char why[FO_TRACE_ERR];
    fo_trace_mark(timeline, "step 2", start);
    if (fo_trace_end(timeline, "rank 0 (simulated)", path, NULL, why)) {
        return train_error(err, "--trace: %s", why);
    }
    return 0;
}

static size_t nbytes_of(GPTConfig c, const TrainOptions* opt) {
    GPT sizes;
    gpt_sizes(&sizes, c, opt, 0);
    return total_nbytes(gpt_nbytes(&sizes));
}

/* The second step of a run: the first has no weights under way. With many micro-steps, steps of one and of
 * two tell what each of the others adds.
 */
static Prediction predict(const SimHardware* h, GPTConfig c, const TrainOptions* whole, const char* trace,
                          char err[TRAIN_ERR]) {
    Prediction p, one;
    GPT* g = (GPT*)calloc(1, sizeof *g);
    const int N = whole->batch * whole->seq_len, naccum = whole->total_batch / (N * whole->dp);
    TrainOptions fewer = *whole, *opt = &fewer;
    Simulated x = {opt, 1};
    while (opt->dp * opt->up > MOST_REPLICAS && opt->dp % 2 == 0) {
        opt->dp /= 2, x.alike *= 2;
    }
    int* ids = (int*)malloc((size_t)N * sizeof(int));
    uint64_t rng = 1337;
    fo_require(g && ids, "out of memory");
    for (int i = 0; i < N; i++) {
        ids[i] = (int)(random_u32(&rng) % (uint32_t)c.V);
    }
    FoDevice* device = sim_device_open(h);
    FoGroup* world = sim_world(device, opt->dp * opt->up * opt->tp, (SimColors){color_of, alike_of, &x});
    FoGroup* alone = sim_world(device, 1, (SimColors){NULL, NULL, NULL}); // who tells the timeline
    gpt_open(g, c, opt, world, device);
    if (opt->overlap.m == 0) { auto_choose(g, opt); } // by what the simulated machine takes
    for (int d = 0; d < opt->dp; d++) { // as if the others had sent them; all replicas read the same
        memcpy(g->host_ids + (size_t)d * (size_t)N, ids, (size_t)N * sizeof(int));
    }
    memset(g->host_losses, 0, g->Nt * sizeof(float));
    step_s(g, ids, opt, 1);
    take_sites(g, p.site_s, &p.comm_s);
    FoTrace* timeline = trace ? start_timeline(g, alone) : NULL;
    const double start = fo_now();
    p.step_s = step_s(g, ids, opt, 1);
    p.failed = timeline && end_timeline(timeline, start, trace, err);
    take_sites(g, p.site_s, &p.comm_s);
    if (naccum > 1) {
        one = p;
        p.step_s = one.step_s + (naccum - 1) * (step_s(g, ids, opt, 2) - one.step_s);
        take_sites(g, p.site_s, &p.comm_s);
        p.comm_s = one.comm_s + (naccum - 1) * (p.comm_s - one.comm_s);
        for (int i = 0; i <= NSITES; i++) {
            p.site_s[i] = one.site_s[i] + (naccum - 1) * (p.site_s[i] - one.site_s[i]);
        }
    }
    p.nbytes = nbytes_of(c, whole);
    p.exposed_s = 0.0;
    for (int i = 0; i <= NSITES; i++) {
        p.exposed_s += p.site_s[i];
    }
    gpt_close(g);
    sim_world_free(world);
    sim_world_free(alone);
    fo_device_close(device);
    free(ids);
    free(g);
    return p;
}

// of one rank's peak
static double mfu_of(const SimHardware* h, GPTConfig c, const TrainOptions* opt, double seconds) {
    GPT sizes;
    gpt_sizes(&sizes, c, opt, 0);
    const double flops = gpt_flops_a_token(&sizes, opt->seq_len);
    const double ranks = (double)opt->dp * opt->up * opt->tp;
    return flops * (double)opt->total_batch / seconds / ranks / (1e12 * h->peak_tflops);
}

// ---- one mesh, all modes ----------------------------------------------------------------------------------
static void print_sites(const Prediction* p, const int* done) {
    char name[32];
    printf("\nexposed by operation, ms\n%-10s", "");
    for (int k = 0; k < NMODES; k++) {
        if (done[k]) { printf(" %10s", overlap_name(MODES[k], name)); }
    }
    printf("\n");
    for (int i = 0; i <= NSITES; i++) {
        const char* site = gpt_op_name(i);
        double most = 0.0, sums[NMODES] = {0.0};
        int again = 0;
        for (int j = 0; j < i && i < NSITES; j++) {
            again |= strcmp(gpt_sites[j].name, site) == 0; // operations of one name are one to the reader
        }
        for (int j = i; j <= NSITES && !again; j++) {
            if (strcmp(gpt_op_name(j), site) != 0) { continue; }
            for (int k = 0; k < NMODES; k++) {
                sums[k] += done[k] ? p[k].site_s[j] : 0.0;
                most = fmax(most, sums[k]);
            }
        }
        if (most < 5e-7) { continue; }
        printf("%-10s", site);
        for (int k = 0; k < NMODES; k++) {
            if (done[k]) { printf(" %10.3f", 1e3 * sums[k]); }
        }
        printf("\n");
    }
}

static int plan_modes(const SimHardware* h, GPTConfig c, TrainOptions opt, char err[TRAIN_ERR]) {
    Prediction p[NMODES];
    int done[NMODES], any = 0;
    char name[32];
    printf("\n%-10s %12s %12s %12s %9s %8s %12s\n", "overlap", "step ms", "comm ms", "exposed ms", "hidden",
           "MFU", "tok/s");
    for (int k = 0; k < NMODES; k++) {
        opt.overlap = MODES[k];
        done[k] = check_cuts(&opt, c, err) == 0;
        if (!done[k]) { continue; }
        any = 1;
        p[k] = predict(h, c, &opt, NULL, err);
        printf("%-10s %12.3f %12.3f %12.3f", overlap_name(MODES[k], name), 1e3 * p[k].step_s,
               1e3 * p[k].comm_s, 1e3 * p[k].exposed_s);
        if (p[k].comm_s > 0.0) {
            printf(" %8.1f%%", 100.0 * (1.0 - p[k].exposed_s / p[k].comm_s));
        } else {
            printf(" %9s", "-");
        }
        printf(" %7.1f%% %12.0f\n", 100.0 * mfu_of(h, c, &opt, p[k].step_s), opt.total_batch / p[k].step_s);
        if ((double)p[k].nbytes > h->memory_gib * 1073741824.0) {
            printf("           needs %.1f GiB on a rank that has %g\n", (double)p[k].nbytes / 1073741824.0,
                   h->memory_gib);
        }
        fflush(stdout);
    }
    if (!any) { return -1; }
    print_sites(p, done);
    return 0;
}

// ---- all meshes -------------------------------------------------------------------------------------------
typedef struct {
    TrainOptions opt;
    Prediction p;
} Candidate;

// the largest batch, at most as told, that makes whole steps of the tokens; 0: none
static int fit_batch(const TrainOptions* opt, GPTConfig c, int dp) {
    char err[TRAIN_ERR];
    for (int B = opt->batch; B > 0; B--) {
        TrainOptions o = *opt;
        o.batch = B, o.dp = dp;
        const long long tokens = (long long)B * o.seq_len * dp;
        if (o.total_batch % tokens == 0 && check_cuts(&o, c, err) == 0) { return B; }
    }
    return 0;
}

static void insert(Candidate best[NBEST], int* n, const Candidate* x) {
    int at = *n < NBEST ? (*n)++ : NBEST;
    while (at > 0 && best[at - 1].p.step_s > x->p.step_s) {
        if (at < NBEST) { best[at] = best[at - 1]; }
        at--;
    }
    if (at < NBEST) { best[at] = *x; }
}

static void plan_meshes(const SimHardware* h, GPTConfig c, const TrainOptions* opt, int world,
                        char err[TRAIN_ERR]) {
    Candidate best[NBEST];
    int n = 0, tried = 0, too_large = 0;
    for (int tp = 1; tp <= 16 && tp <= world; tp++) {
        for (int up = 1; up <= 16 && up * tp <= world; up++) {
            Candidate x;
            if (world % (up * tp) != 0) { continue; }
            x.opt = *opt;
            x.opt.dp = world / (up * tp), x.opt.up = up, x.opt.tp = tp;
            x.opt.zero = x.opt.zero ? x.opt.zero : x.opt.dp * up > 1;
            x.opt.batch = fit_batch(&x.opt, c, x.opt.dp);
            if (x.opt.batch == 0) { continue; }
            tried++;
            if ((double)nbytes_of(c, &x.opt) > h->memory_gib * 1073741824.0) {
                too_large++;
                continue;
            }
            x.p = predict(h, c, &x.opt, NULL, err);
            insert(best, &n, &x);
        }
    }
    printf("\nmeshes of %d ranks, %d tokens a step: %d tried, %d of them need more memory; the fastest:\n",
           world, opt->total_batch, tried, too_large);
    printf("%6s %4s %4s %5s %6s %12s %12s %8s %12s %10s\n", "dp", "up", "tp", "zero", "B", "step ms",
           "exposed ms", "MFU", "tok/s", "GiB a rank");
    for (int i = 0; i < n; i++) {
        const TrainOptions* o = &best[i].opt;
        const double s = best[i].p.step_s;
        printf("%6d %4d %4d %5d %6d %12.3f %12.3f %7.1f%% %12.0f %10.1f\n", o->dp, o->up, o->tp, o->zero,
               o->batch, 1e3 * s, 1e3 * best[i].p.exposed_s, 100.0 * mfu_of(h, c, o, s), o->total_batch / s,
               (double)best[i].p.nbytes / 1073741824.0);
    }
}

int run_plan(const TrainOptions* opt, char err[TRAIN_ERR]) {
    SimHardware h;
    GPTConfig c;
    GPT sizes;
    char why[SIM_ERR], trace_why[FO_TRACE_ERR], name[32];
    int version;
    memset(&c, 0, sizeof c);
    if (sim_hardware_read(&h, opt->plan, why)) { return train_error(err, "--plan: %s", why); }
    const int kind = model_parse(opt->model, &c, err);
    if (kind < 0 || (kind == 1 && checkpoint_read_header(opt->model, &c, &version, err))) { return -1; }
    if (check_cuts(opt, c, err)) { return -1; }
    if (opt->trace[0] && fo_trace_check(opt->trace, trace_why)) {
        return train_error(err, "--trace: %s", trace_why);
    }
    gpt_sizes(&sizes, c, opt, 0);
    printf("# predicted, not measured: the schedules of training, run on a simulated device\n");
    printf("hardware   %s: GEMM %g, attention %g TFLOP/s, link %g GB/s, %g us; %g ranks a machine, between "
           "them %g "
           "GB/s, %g us\n",
           h.name, h.gemm_tflops, h.attention_tflops, h.link_gbytes_s, h.link_us, h.node_ranks,
           h.node_link_gbytes_s, h.node_link_us);
    printf("model      L=%d,C=%d,NH=%d,V=%d: %zu parameters, %s\n", c.L, c.C, c.NH, c.V, sizes.ts.ntotal,
           FO_FLOATX == FO_BF16 ? "bf16" : "fp32");
    printf("mesh       dp %d * up %d * tp %d, zero %d, B=%d, T=%d, %d tokens a step\n", opt->dp, opt->up,
           opt->tp, opt->zero, opt->batch, opt->seq_len, opt->total_batch);
    if (plan_modes(&h, c, *opt, err)) { return -1; }
    if (opt->trace[0]) {
        if (predict(&h, c, opt, opt->trace, err).failed) { return -1; }
        printf("\ntimeline of a step under %s: %s\n", overlap_name(opt->overlap, name), opt->trace);
    }
    if (opt->world) { plan_meshes(&h, c, opt, opt->world, err); }
    return 0;
}
