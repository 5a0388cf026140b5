/* bench_mesh.c -- whole training steps over an emulated link, under one mode after another: what every
 * collective of doc/overlap.md's table leaves exposed, and how far a step is from one whose communication
 * is free.
 *
 *   bench_mesh [MESH ...] [options]      --help lists them
 *
 * The step is train_gpt.cu's own. Ranks are threads and paced: each GEMM and attention lasts as long as it
 * would at `pace`. Modes take turns in rounds; figures are medians over rounds of the mean over ranks.
 */
#define TESTING
#include "train_gpt.cu"
#include "dev/bench/bench.h"
#include "flashoverlap/fo_model.h"
#include "train/auto.h"
#include "train/fit.h"
#include "train/rng.h"

enum { MAX_ROUNDS = 32, WARM = 1, STEPS = 2, NROWS = NSITES + 1, NMODES = BENCH_MAX_MODES };

static const struct {
    const char* name;
    int dp, up, tp;
} MESHES[] = {{"tp4", 1, 1, 4}, {"up4", 1, 4, 1}, {"dp4", 4, 1, 1}, {"tp2up2", 1, 2, 2}, {"dp2tp2", 2, 1, 2}};
enum { NMESHES = sizeof MESHES / sizeof MESHES[0] };

typedef struct {
    TrainOptions opt;
    GPTConfig config;
    LinkOption link;
    BenchMode modes[NMODES];
    int nmodes, rounds, round, mode;
    double foreign_cores;
    char device[160];
    // ms a step: mean over ranks
    double step[NMODES][MAX_ROUNDS], exposed[NMODES][NROWS][MAX_ROUNDS], comm[NROWS];
    double predicted[NMODES][NROWS];
    AutoChoice choice; // auto's in the last round, and the seconds that it took
    double choice_s;
    double ranks_step[FO_MAX_RANKS], ranks_exposed[FO_MAX_RANKS][NROWS];
} Bench;

// flops that hide one call of an operation, on one rank: those between its first and last message. 0: none
static double hiding_flops(const GPT* g, int site) {
    const double Nt = (double)g->Nt, N = (double)g->N, C = g->config.C, Ca = g->Ca, Cu = g->Cu, F = g->F;
    const double attention =
        2.0 * N * (g->T_max + 1) * Cu; // 4 * hs * pairs of each head, half of them causal
    const double slice = Nt / g->nslices, head = 2.0 * slice * C * g->Vl;
    const double qkv = 2.0 * Nt * C * 3 * Ca, proj = 2.0 * Nt * C * Ca, fc = 2.0 * Nt * C * F;
    const double chunks = g->mesh.tp > 1 ? gpt_site_chunks(g, F1) * g->mesh.tp : 1; // U1, U3: a call a chunk
    switch (site) {
    case F1: return qkv;
    case F2: return (g->mesh.up == 1 ? attention : attention / g->mesh.up) + proj;
    case F3:
    case F4: return fc;
    case H1: return head;
    case H2:
    case H2_NEXT: return 2.0 * head;
    case H3: return 2.0 * head;
    case B1: return fc;
    case B2: return fc;
    case B3: return 2.0 * fc;
    case B4: return g->mesh.up == 1 && !g->layout.zigzag ? proj + 2.5 * attention : proj;
    case B5: return proj;
    case B6: return 2.0 * qkv;
    case U1: return qkv / chunks;
    case U2: return attention;
    case U3: return 2.0 * proj / chunks;
    case U4_KV: return 2.5 * attention;
    case U4_Q: return qkv * 2.0 / 3.0;
    case D1:
    case D1_2:
    case D1_3:
    case D1_4: return fc; // a layer has 12 C^2 of weights in four matrices
    case D2: return head + 2.0 * fc;
    default: return 0.0;
    }
}

// seconds that a call leaves exposed; whole: it is not cut, slices or not
static double exposed_s(const BenchMode* mode, int site, int m, int P, double shard_s, double compute_s) {
    const int whole = site == NSITES || gpt_sites[site].whole || site == B2 || site == B5;
    if (mode->mode != FO_SLICE || whole) {
        return fo_model_exposed_s(mode->mode == FO_NONE ? FO_NONE : FO_FLASH, m, P, shard_s, compute_s);
    }
    if (site != B3 && site != B6) { return fo_model_exposed_s(FO_SLICE, m, P, shard_s, compute_s); }
    // half of the work follows the last slice, and covers it
    const double left = fo_model_exposed_s(FO_SLICE, m, P, shard_s, 0.5 * compute_s) - 0.5 * compute_s;
    return left > 0.0 ? left : 0.0;
}

// F1 and F2 in mode flash, where shards are whole sequences: they take turns
static void predict_in_turn(Bench* x, const GPT* g, const double calls[NROWS]) {
    static const int sites[2] = {F1, F2};
    double shard_s[2], compute_s[2], exposed_s[2];
    int m[2];
    if (g->mesh.tp == 1 || g->layout.zigzag || x->modes[x->mode].mode != FO_FLASH) { return; }
    for (int i = 0; i < 2; i++) {
        m[i] = gpt_site_chunks(g, sites[i]);
        shard_s[i] = 1e-3 * x->comm[sites[i]] / calls[sites[i]] / (g->mesh.tp - 1);
        compute_s[i] = hiding_flops(g, sites[i]) / (x->opt.pace * 1e12);
    }
    fo_model_in_turn(g->mesh.tp, m, shard_s, compute_s, exposed_s);
    for (int i = 0; i < 2; i++) {
        x->predicted[x->mode][sites[i]] = 1e3 * calls[sites[i]] * exposed_s[i];
    }
}

// of the mode at hand; calls: of each operation in a step
static void predict(Bench* x, const GPT* g, const double calls[NROWS]) {
    for (int i = 0; i < NROWS; i++) {
        const int P = i < NSITES ? gpt_site_ranks(g, i) : g->mesh.rp,
                  m = i < NSITES ? gpt_site_chunks(g, i) : 1;
        const double comm_s = 1e-3 * x->comm[i];
        if (P < 2 || calls[i] <= 0.0) { continue; }
        double shard_s = comm_s / calls[i] / (P - 1), flops = i < NSITES ? hiding_flops(g, i) : 0.0;
        if (i == NSITES) { // D3 has the whole forward pass, of which a call has its share
            flops =
                2.0 * (double)g->Nt * 12.0 * g->config.L * g->config.C * g->config.C / g->mesh.tp / calls[i];
        }
        x->predicted[x->mode][i] =
            1e3 * calls[i] * exposed_s(&x->modes[x->mode], i, m, P, shard_s, flops / (x->opt.pace * 1e12));
    }
    predict_in_turn(x, g, calls);
}

static void one_step(GPT* g, const int* ids, FoAdamw* a) {
    const int push = g->mesh.rp > 1;
    gpt_batch(g, ids, ids, g->B_max, g->T_max);
    if (push) { gpt_batch_replicas(g, ids); }
    gpt_micro(g, 1.0f / ((float)g->N * (float)g->mesh.dp), push);
    gpt_loss(g);
    a->t++;
    gpt_reduce(g, 0.0, 0.0, 0.0);
    gpt_update(g, *a, 0.1f, 1);
}

static void choose(Bench* x, GPT* g, int rank) {
    const double start = fo_now();
    const AutoChoice choice = auto_choose(g, &x->opt);
    if (rank > 0) { return; }
    x->choice = choice, x->choice_s = fo_now() - start;
}

static void body(FoGroup* world, void* arg) {
    Bench* x = (Bench*)arg;
    const int rank = fo_group_rank(world), P = fo_group_size(world), B = x->opt.batch, T = x->opt.seq_len;
    GPT* g = (GPT*)calloc(1, sizeof *g);
    int* ids = (int*)malloc((size_t)(B * T) * sizeof(int));
    fo_require(g && ids, "out of memory");
    FoDevice* device = fo_device_open(rank, P);
    const BenchMode* mode = &x->modes[x->mode];
    LinkOption free_link = {1e6, 0.0}, link = mode->free ? free_link : x->link;
    fo_group_link(world, link.gbytes_s, link.us);
    gpt_open(g, x->config, &x->opt, world, device);
    fo_device_pace(device, x->opt.pace);
    if (mode->m == 0) { choose(x, g, rank); }
    uint64_t rng = 1337 + (uint64_t)g->mesh.d;
    for (int i = 0; i < B * T; i++) {
        ids[i] = (int)(random_u32(&rng) % (uint32_t)x->config.V);
    }
    FoAdamw a = {0.0f, 0.9f, 0.95f, 1e-8f, 0.0f, 1.0f, 0};
    double start = 0.0, before_ms[NROWS] = {0}, before_comm[NROWS] = {0};
    double calls[NROWS] = {0.0};
    for (int i = 0; i < WARM + STEPS; i++) {
        if (i == WARM) {
            fo_group_barrier(world);
            start = fo_now();
        }
        one_step(g, ids, &a);
        for (int k = 0; k < NROWS; k++) {
            if (i < WARM) { before_ms[k] = g->exposed_ms[k], before_comm[k] = g->comm_ms[k]; }
        }
    }
    x->ranks_step[rank] = 1e3 * (fo_now() - start) / STEPS;
    double unused_ms, unused_comm;
    gpt_take_times(g, &unused_ms, &unused_comm);
    gpt_await_weights(g); // the last step's, which another step would hide
    for (int k = 0; k < NROWS; k++) {
        x->ranks_exposed[rank][k] = (g->exposed_ms[k] - before_ms[k]) / STEPS;
        if (rank == 0 && mode->mode == FO_NONE) { x->comm[k] = (g->comm_ms[k] - before_comm[k]) / STEPS; }
        const FoOverlap* o = k < NSITES ? g->o[k] : g->d3[1];
        // an update's weights and rows first travel in the step after it
        const int nsteps = WARM + STEPS - (k == NSITES || k == D3_ROWS);
        if (o->plan.nexchanges) { calls[k] = (double)g->sent[k].nmessages / (nsteps * o->plan.nexchanges); }
    }
    fo_group_barrier(world);
    if (rank == 0 && !mode->free) { predict(x, g, calls); }
    if (rank == 0) { (void)snprintf(x->device, sizeof x->device, "%s", fo_device_name(device)); }
    free(ids);
    gpt_close(g);
    fo_device_close(device);
    free(g);
}

// ---- report -----------------------------------------------------------------------------------------------
typedef struct {
    const char* op;
    BenchSpread ms[NMODES];
    double comm, predicted[NMODES];
} Row;

// of the operations named op: two plans of one name are one row; op NULL: of all
static Row row_of(const Bench* x, const char* op) {
    Row row;
    memset(&row, 0, sizeof row);
    row.op = op;
    for (int m = 0; m < x->nmodes; m++) {
        double ms[MAX_ROUNDS] = {0.0};
        for (int k = 0; k < NROWS; k++) {
            if (op && strcmp(gpt_op_name(k), op) != 0) { continue; }
            for (int round = 0; round < x->rounds; round++) {
                ms[round] += x->exposed[m][k][round];
            }
            row.predicted[m] += x->predicted[m][k];
            row.comm += m == 0 ? x->comm[k] : 0.0;
        }
        row.ms[m] = bench_spread(ms, x->rounds);
    }
    return row;
}

static double step_median(const Bench* x, int mode) {
    return bench_quantile(x->step[mode], x->rounds, 0.5);
}

static int find(const Bench* x, const char* mode) {
    return bench_find(x->modes, x->nmodes, mode);
}

// percent of none's exposed that a mode hides; what ranks wait for on a free link, each other, is in neither
static double hidden_percent(const Bench* x, const Row* row, int mode) {
    const int none = find(x, "none"), free_link = find(x, "free");
    const double base = free_link < 0 ? 0.0 : row->ms[free_link].median;
    if (none < 0 || x->modes[mode].free) { return NAN; }
    return 100.0 * (1.0 - (row->ms[mode].median - base) / (row->ms[none].median - base));
}

// all rows that have something to say; returns how many
static int rows_of(const Bench* x, Row rows[NROWS]) {
    int n = 0;
    for (int i = 0; i < NROWS; i++) {
        int before = 0; // has it a row?
        for (int k = 0; k < i; k++) {
            before |= strcmp(gpt_op_name(k), gpt_op_name(i)) == 0;
        }
        if (before) { continue; }
        rows[n] = row_of(x, gpt_op_name(i));
        n += rows[n].comm > 0.0;
    }
    return n;
}

static void print_row(const Bench* x, const Row* row) {
    printf("%-9s %9.2f", row->op ? row->op : "all", row->comm);
    for (int m = 0; m < x->nmodes; m++) {
        const BenchSpread* s = &row->ms[m];
        printf(" | %8.2f %7.2f..%-7.2f", s->median, s->p25, s->p75);
        if (!x->modes[m].free) { printf(" %6.1f%% %8.2f", hidden_percent(x, row, m), row->predicted[m]); }
    }
    printf("\n");
}

// how far a row is from the model under a mode, ms
static double off_model(const Bench* x, const Row* row, int mode) {
    const int free_link = find(x, "free");
    const double base = free_link < 0 ? 0.0 : row->ms[free_link].median;
    return fabs(row->ms[mode].median - base - row->predicted[mode]);
}

// the row that is farthest from the model under a mode
static const Row* farthest(const Bench* x, const Row rows[], int n, int mode) {
    const Row* worst = &rows[0];
    for (int i = 1; i < n; i++) {
        if (off_model(x, &rows[i], mode) > off_model(x, worst, mode)) { worst = &rows[i]; }
    }
    return worst;
}

static void print_steps(const Bench* x) {
    const int none = find(x, "none"), free_link = find(x, "free");
    printf("%-9s %9s %18s %9s %10s\n", "mode", "step ms", "p25..p75", "vs none", "over free");
    for (int m = 0; m < x->nmodes; m++) {
        const BenchSpread s = bench_spread(x->step[m], x->rounds);
        printf("%-9s %9.1f %8.1f..%-8.1f", x->modes[m].name, s.median, s.p25, s.p75);
        const int others[] = {none, free_link};
        for (int i = 0; i < 2; i++) {
            const double of = others[i] < 0 ? NAN : step_median(x, others[i]);
            printf(" %+8.1f%%", 100.0 * (s.median / of - 1.0));
        }
        printf("\n");
    }
}

// the least median of a step under the modes that are chosen beforehand
static double best_fixed(const Bench* x) {
    double best = INFINITY;
    for (int m = 0; m < x->nmodes; m++) {
        if (x->modes[m].free || x->modes[m].m == 0) { continue; }
        best = fmin(best, step_median(x, m));
    }
    return best;
}

// a demand, and whether it holds; returns how many do not
static int demand(const char* mesh, const char* what, double is, double most) {
    printf("%-4s %s %s: %.1f %%, at most %.0f %%\n", is <= most ? "ok" : "NOT", mesh, what, is, most);
    return !(is <= most);
}

// the largest spread of a mode's steps
static double spread_of(const Bench* x) {
    double spread = 0.0;
    for (int m = 0; m < x->nmodes; m++) {
        const BenchSpread s = bench_spread(x->step[m], x->rounds);
        spread = fmax(spread, (s.p75 - s.p25) / s.median);
    }
    return spread;
}

// what is demanded of flash:2's exposed time and step, and of auto's step; returns how many do not hold
static int judge_steps(const Bench* x, const char* name, const Row rows[], int n, int flash, int free_link) {
    const int none = find(x, "none"), chosen = find(x, "auto");
    double hidden[NMODES] = {0.0};
    int failed = 0;
    for (int i = 0; i < n; i++) {
        for (int m = 0; m < x->nmodes; m++) {
            hidden[m] += rows[i].predicted[flash] == 0.0 ? rows[i].ms[m].median : 0.0;
        }
    }
    if (hidden[none] > hidden[free_link]) {
        failed +=
            demand(name, "flash:2's exposed of none's, operations that the model says can be hidden",
                   100.0 * (hidden[flash] - hidden[free_link]) / (hidden[none] - hidden[free_link]), 10.0);
    }
    failed += demand(name, "flash:2's step of a step with free communication",
                     100.0 * step_median(x, flash) / step_median(x, free_link), 105.0);
    if (chosen >= 0) {
        failed += demand(name, "auto's step of the best other mode's",
                         100.0 * step_median(x, chosen) / best_fixed(x), 103.0);
    }
    return failed;
}

// prints what is demanded of a mesh, every mode's rows included; 0, 1, or BENCH_NOISY
static int judge(const Bench* x, const char* name, const Row rows[], int n) {
    const int flash = find(x, "flash:2"), free_link = find(x, "free");
    if (flash < 0 || free_link < 0) {
        return bench_noisy(name, spread_of(x), x->foreign_cores, 0) ? BENCH_NOISY : 0;
    }
    int failed = judge_steps(x, name, rows, n, flash, free_link);
    const double T = row_of(x, NULL).comm, most = fmax(5.0, 100.0 * 1.0 / T);
    for (int m = 0; m < x->nmodes; m++) {
        if (x->modes[m].free) { continue; }
        const Row* row = farthest(x, rows, n, m);
        char what[96];
        (void)snprintf(what, sizeof what,
                       "%s's row that is farthest from the model, %s, off by %.2f ms: of T", x->modes[m].name,
                       row->op, off_model(x, row, m));
        failed += demand(name, what, 100.0 * off_model(x, row, m) / T, most);
    }
    return bench_noisy(name, spread_of(x), x->foreign_cores, failed) ? BENCH_NOISY : failed > 0;
}

static void print_mesh(const Bench* x, const char* name, const Row rows[], int n) {
    printf("\n## %s: dp %d * up %d * tp %d, B=%d a dp rank, T=%d; foreign %.2f cores\n", name, x->opt.dp,
           x->opt.up, x->opt.tp, x->opt.batch, x->opt.seq_len, x->foreign_cores);
    printf("%-9s %9s", "", "");
    for (int m = 0; m < x->nmodes; m++) {
        printf(x->modes[m].free ? " | %-25s" : " | %-42s", x->modes[m].name);
    }
    printf("\n%-9s %9s", "operation", "comm");
    for (int m = 0; m < x->nmodes; m++) {
        printf(" | %8s %16s", "exposed", "p25..p75");
        if (!x->modes[m].free) { printf(" %7s %8s", "hidden", "model"); }
    }
    printf("\n");
    for (int i = 0; i < n; i++) {
        print_row(x, &rows[i]);
    }
    const Row all = row_of(x, NULL);
    print_row(x, &all);
    if (find(x, "auto") >= 0) { auto_print(&x->choice, x->choice_s, "# last round: "); }
    print_steps(x);
}

static void json_modes(BenchJson* j, const Bench* x, const Row* row) {
    const int none = find(x, "none");
    bench_json_begin(j, "modes", '[');
    for (int m = 0; m < x->nmodes; m++) {
        const BenchSpread step = bench_spread(x->step[m], x->rounds);
        const double of = none < 0 ? NAN : step_median(x, none);
        bench_json_mode(j, x->modes[m].name, row->op ? NULL : &step, row->ms[m],
                        100.0 * (step.median / of - 1.0), hidden_percent(x, row, m),
                        x->modes[m].free ? NAN : row->predicted[m]);
        bench_json_end(j, '}');
    }
    bench_json_end(j, ']');
}

static void json_mesh(BenchJson* j, const Bench* x, const char* name, const Row rows[], int n) {
    const Row all = row_of(x, NULL);
    const int free_link = find(x, "free");
    bench_json_begin(j, NULL, '{');
    bench_json_text(j, "name", name);
    bench_json_text(j, "op", "step");
    bench_json_number(j, "ranks", x->opt.dp * x->opt.up * x->opt.tp);
    bench_json_number(j, "rows", x->opt.dp * x->opt.batch * x->opt.seq_len);
    bench_json_number(j, "width", x->config.C);
    bench_json_number(j, "layers", x->config.L);
    bench_json_text(j, "link", "emulated");
    bench_json_number(j, "link_gbytes_s", x->link.gbytes_s);
    bench_json_number(j, "link_us", x->link.us);
    bench_json_number(j, "comm_ms", all.comm);
    // what a step takes on a free link: its compute, and what ranks wait for each other
    bench_json_number(j, "compute_ms", free_link < 0 ? NAN : step_median(x, free_link));
    bench_json_number(j, "paced", 1);
    bench_json_number(j, "pace_tflops", x->opt.pace);
    bench_json_number(j, "rounds", x->rounds);
    bench_json_number(j, "foreign_cores", x->foreign_cores);
    json_modes(j, x, &all);
    bench_json_begin(j, "operations", '[');
    for (int i = 0; i < n; i++) {
        bench_json_begin(j, NULL, '{');
        bench_json_text(j, "op", rows[i].op);
        bench_json_number(j, "comm_ms", rows[i].comm);
        json_modes(j, x, &rows[i]);
        bench_json_end(j, '}');
    }
    bench_json_end(j, ']');
    bench_json_end(j, '}');
}

static void one_round(Bench* x, int P) {
    for (int i = 0; i < x->nmodes; i++) {
        // the first round goes in order, for none has what predictions want
        x->mode = (i + x->round) % x->nmodes;
        const BenchMode* mode = &x->modes[x->mode];
        const OverlapOption overlap = {mode->mode, mode->m};
        x->opt.overlap = overlap, x->opt.topology = mode->topology;
        fo_ranks_run(P, body, x);
        x->step[x->mode][x->round] = bench_mean(x->ranks_step, P);
        for (int k = 0; k < NROWS; k++) {
            x->exposed[x->mode][k][x->round] = 0.0;
            for (int r = 0; r < P; r++) {
                x->exposed[x->mode][k][x->round] += x->ranks_exposed[r][k] / P;
            }
        }
    }
}

static void take_mesh(Bench* x, int mesh) {
    x->opt.dp = MESHES[mesh].dp, x->opt.up = MESHES[mesh].up, x->opt.tp = MESHES[mesh].tp;
    x->opt.batch = 4 / x->opt.dp; // the same work on every mesh
    x->opt.total_batch = x->opt.dp * x->opt.batch * x->opt.seq_len;
    x->opt.zero = x->opt.dp * x->opt.up > 1;
}

static void measure(Bench* x) {
    const int P = x->opt.dp * x->opt.up * x->opt.tp;
    memset(x->predicted, 0, sizeof x->predicted);
    memset(x->comm, 0, sizeof x->comm);
    const BenchLoad before = bench_load();
    for (x->round = 0; x->round < x->rounds; x->round++) {
        one_round(x, P);
    }
    const BenchLoad after = bench_load();
    x->foreign_cores = bench_foreign(before, after, after.own - before.own);
}

// ---- options ----------------------------------------------------------------------------------------------
typedef struct {
    const char *model, *modes, *json;
    int wanted[NMESHES], any, check;
} Options;

static const char* const HELP = "usage: bench_mesh [tp4 up4 dp4 tp2up2 dp2tp2] [options]\n"
                                "Training steps on these meshes of 4 rank threads, or on all five.\n"
                                "  --modes LIST        none first; of none, slice:M, flash:M, ring:M, auto, "
                                "free (flash:2 on a link that costs\n"
                                "                      nothing). Default: "
                                "none,slice:2,slice:4,slice:8,flash:1,flash:2,flash:4,ring:1,auto,free\n"
                                "  --rounds N          1 to 32 (default 3; --check 5)\n"
                                "  --pace TFLOPS       of a rank's matmuls and attention (default 0.04)\n"
                                "  --link GBPS,US      of each group of ranks (default 0.5,20)\n"
                                "  --model SIZES       default L=6,C=512,NH=8,V=16384,maxT=512; steps have 4 "
                                "sequences of 256 tokens, or maxT\n"
                                "  --json FILE         all figures\n"
                                "  --check             exit status 1 if a demand does not hold; without "
                                "--modes none, slice:4, flash:2, auto, free\n"
                                "Exit status 3, always: the machine is too noisy to tell.\n";

// returns how many arguments option i takes
static int parse_option(Options* o, Bench* x, int argc, char** argv, int i) {
    const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : "";
    if (strcmp(a, "--help") == 0) {
        printf("%s", HELP);
        exit(0);
    }
    for (int mesh = 0; mesh < NMESHES; mesh++) {
        if (strcmp(a, MESHES[mesh].name) == 0) { return o->wanted[mesh] = o->any = 1; }
    }
    if (strcmp(a, "--check") == 0) { return o->check = 1; }
    if (strcmp(a, "--rounds") == 0) {
        x->rounds = (int)bench_long(a, v, 1, MAX_ROUNDS);
    } else if (strcmp(a, "--pace") == 0) {
        x->opt.pace = bench_double(a, v, 1e-4, 1e3, NULL);
    } else if (strcmp(a, "--link") == 0) {
        x->link.gbytes_s = bench_double(a, v, 1e-6, 1e4, &v);
        x->link.us = bench_double(a, v, 0.0, 1e6, NULL);
    } else if (strcmp(a, "--model") == 0) {
        o->model = v;
    } else if (strcmp(a, "--modes") == 0) {
        o->modes = v;
    } else if (strcmp(a, "--json") == 0) {
        o->json = v;
    } else {
        bench_refuse("unknown option %s: bench_mesh --help lists them", a);
    }
    if (i + 1 == argc) { bench_refuse("%s needs a value: bench_mesh --help says which", a); }
    return 2;
}

// the model, and whether it can be cut for all meshes that are wanted
static void check_model(Bench* x, const Options* o) {
    char err[TRAIN_ERR] = "";
    const int kind = model_parse(o->model, &x->config, err);
    if (kind) {
        bench_refuse("--model %s: %s", o->model, kind > 0 ? "want sizes such as L=2,C=64,NH=4,V=256" : err);
    }
    x->opt.seq_len = x->config.maxT < 256 ? x->config.maxT : 256;
    for (int mesh = 0; mesh < NMESHES; mesh++) {
        if (!o->wanted[mesh] && o->any) { continue; }
        take_mesh(x, mesh);
        for (int m = 0; m < x->nmodes; m++) {
            const OverlapOption overlap = {x->modes[m].mode, x->modes[m].m};
            x->opt.overlap = overlap;
            if (check_cuts(&x->opt, x->config, err)) { bench_refuse("%s: %s", MESHES[mesh].name, err); }
        }
    }
}

static void print_head(const Bench* x, const char* model) {
    printf("# Training steps on 4 ranks, threads over an emulated link; modes taking turns, ms a step.\n"
           "#   comm     what plain collectives take on this link\n"
           "#   exposed  how long compute stood waiting for the operation: mean over ranks; median of the "
           "rounds, "
           "p25..p75\n"
           "#   hidden   1 - exposed / none's, both less what is exposed on a free link: ranks wait for each "
           "other "
           "there, too\n"
           "#   model    exposed as fo_model.h predicts it, from the matmuls and attention that cover the "
           "operation\n"
           "#   step     by the wall clock, mean over ranks; over free: against the step that no schedule "
           "can beat\n"
           "#   foreign  cores that other processes kept busy\n"
           "# The paper (arXiv 2604.24013) has F1 to F4 alone; all other rows are this project's own.\n"
           "# model %s, paced at %g TFLOP/s a rank, link %g GB/s and %g us for each group, %d rounds of %d "
           "steps\n",
           model, x->opt.pace, x->link.gbytes_s, x->link.us, x->rounds, STEPS);
}

int main(int argc, char** argv) {
    static Bench x;
    BenchJson json;
    char err[TRAIN_ERR];
    char* none[] = {argv[0]};
    Options o = {"L=6,C=512,NH=8,V=16384,maxT=512", NULL, NULL, {0}, 0, 0};
    if (options_parse(&x.opt, 1, none, err)) { fo_quit(1, "%s", err); }
    x.opt.pace = 0.04, x.link.gbytes_s = 0.5, x.link.us = 20.0;
    for (int i = 1; i < argc;) {
        i += parse_option(&o, &x, argc, argv, i);
    }
    if (!x.rounds) { x.rounds = o.check ? 5 : 3; }
    if (!o.modes) {
        o.modes = o.check ? "none,slice:4,flash:2,auto,free"
                          : "none,slice:2,slice:4,slice:8,flash:1,flash:2,flash:4,ring:1,auto,free";
    }
    if (fo_ranks_launched() > 1) { bench_refuse("ranks are threads here: start one process"); }
    x.nmodes = bench_modes(x.modes, o.modes, BENCH_STEP);
    if (find(&x, "none") != 0) { bench_refuse("--modes %s: want none as the first", o.modes); }
    if (o.check && (find(&x, "flash:2") < 0 || find(&x, "free") < 0)) {
        bench_refuse("--check --modes %s: want none, flash:2 and free among them", o.modes);
    }
    check_model(&x, &o);
    bench_json_open(&json, o.json);
    print_head(&x, o.model);
    int status = 0, head = 0;
    for (int mesh = 0; mesh < NMESHES; mesh++) {
        Row rows[NROWS];
        if (!o.wanted[mesh] && o.any) { continue; }
        take_mesh(&x, mesh);
        measure(&x);
        const int n = rows_of(&x, rows);
        if (!head) {
            bench_json_head(&json, "bench_mesh", argc, argv, x.device);
            bench_print_machine(x.device);
        }
        head = 1;
        print_mesh(&x, MESHES[mesh].name, rows, n);
        json_mesh(&json, &x, MESHES[mesh].name, rows, n);
        status = bench_worse(status, judge(&x, MESHES[mesh].name, rows, n));
        fflush(stdout);
    }
    bench_json_close(&json);
    return o.check || status == BENCH_NOISY ? status : 0;
}
