/* bench_mesh.c -- whole training steps over an emulated link, under none, slice and flash: what every
 * collective of doc/overlap.md's table leaves exposed, and how far a step is from one whose communication
 * is free.
 *
 *   bench_mesh [MESH ...] [--rounds N] [--pace TFLOPS] [--link GBPS,US] [--model SIZES] [--check]
 *   MESH: tp4 up4 dp4 tp2up2 dp2tp2 (the default: all five). --check: exit status 1 if a demand does not hold
 *
 * The step is train_gpt.cu's own. Ranks are threads and paced: each GEMM and attention lasts as long as it
 * would at `pace`. Modes take turns in rounds; figures are medians over rounds of the mean over ranks.
 */
#define TESTING
#include "train_gpt.cu"
#include "flashoverlap/fo_model.h"
#include "train/rng.h"

enum { MAX_ROUNDS = 32, NMODES = 4, WARM = 1, STEPS = 2, NROWS = NSITES + 1 };

static const struct {
    const char* name;
    OverlapOption overlap;
    int free; // the link costs nothing
} MODES[NMODES] = {{"none", {FO_NONE, 1}, 0},
                   {"slice:4", {FO_SLICE, 4}, 0},
                   {"flash:2", {FO_FLASH, 2}, 0},
                   {"free link", {FO_FLASH, 2}, 1}};

static const struct {
    const char* name;
    int dp, up, tp;
} MESHES[] = {{"tp4", 1, 1, 4}, {"up4", 1, 4, 1}, {"dp4", 4, 1, 1}, {"tp2up2", 1, 2, 2}, {"dp2tp2", 2, 1, 2}};
enum { NMESHES = sizeof MESHES / sizeof MESHES[0] };

typedef struct {
    TrainOptions opt;
    GPTConfig config;
    LinkOption link;
    int rounds, round, mode;
    // ms a step: mean over ranks
    double step[NMODES][MAX_ROUNDS], exposed[NMODES][NROWS][MAX_ROUNDS], comm[NROWS];
    double predicted[NROWS]; // of flash
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
    case B1: return 2.0 * fc;
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

// calls: of each operation in a step
static void predict(Bench* x, const GPT* g, const double calls[NROWS]) {
    for (int i = 0; i < NROWS; i++) {
        const int P = i < NSITES ? gpt_site_ranks(g, i) : g->mesh.rp,
                  m = i < NSITES ? gpt_site_chunks(g, i) : 1;
        if (P < 2 || calls[i] <= 0.0) { continue; }
        double shard_s = 1e-3 * x->comm[i] / calls[i] / (P - 1),
               flops = i < NSITES ? hiding_flops(g, i) : 0.0;
        if (i == NSITES) { // D3 has the whole forward pass, of which a call has its share
            flops =
                2.0 * (double)g->Nt * 12.0 * g->config.L * g->config.C * g->config.C / g->mesh.tp / calls[i];
        }
        x->predicted[i] =
            1e3 * calls[i] * fo_model_exposed_s(FO_FLASH, m, P, shard_s, flops / (x->opt.pace * 1e12));
    }
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

static void body(FoGroup* world, void* arg) {
    Bench* x = (Bench*)arg;
    const int rank = fo_group_rank(world), P = fo_group_size(world), B = x->opt.batch, T = x->opt.seq_len;
    GPT* g = (GPT*)calloc(1, sizeof *g);
    int* ids = (int*)malloc((size_t)(B * T) * sizeof(int));
    fo_require(g && ids, "out of memory");
    FoDevice* device = fo_device_open(rank, P);
    LinkOption free_link = {1e6, 0.0}, link = MODES[x->mode].free ? free_link : x->link;
    fo_group_link(world, link.gbytes_s, link.us);
    gpt_open(g, x->config, &x->opt, world, device);
    fo_device_pace(device, x->opt.pace);
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
        if (rank == 0 && x->mode == 0) { x->comm[k] = (g->comm_ms[k] - before_comm[k]) / STEPS; }
        const FoOverlap* o = k < NSITES ? g->o[k] : g->d3[1];
        // an update's weights and rows first travel in the step after it
        const int nsteps = WARM + STEPS - (k == NSITES || k == D3_ROWS);
        if (o->plan.nexchanges) { calls[k] = (double)g->sent[k].nmessages / (nsteps * o->plan.nexchanges); }
    }
    fo_group_barrier(world);
    if (rank == 0 && MODES[x->mode].overlap.mode == FO_FLASH && !MODES[x->mode].free) {
        predict(x, g, calls);
    }
    free(ids);
    gpt_close(g);
    fo_device_close(device);
    free(g);
}

static int by_value(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static double median(const double* values, int n) {
    double sorted[MAX_ROUNDS];
    memcpy(sorted, values, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    return n % 2 ? sorted[n / 2] : 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]);
}

// what is demanded of a mesh, and whether it holds; returns how many do not
static int judge(const char* mesh, const char* what, double is, double most) {
    printf("%-4s %s %s: %.1f %%, at most %.0f %%\n", is <= most ? "ok" : "NOT", mesh, what, is, most);
    return is > most;
}

typedef struct {
    double ms[NMODES], comm, predicted;
} Row;

// two plans of one name are one row
static Row row_of(const Bench* x, const char* op) {
    Row row = {{0.0}, 0.0, 0.0};
    for (int k = 0; k < NROWS; k++) {
        if (strcmp(k < NSITES ? gpt_sites[k].name : "D3", op) != 0) { continue; }
        for (int m = 0; m < NMODES; m++) {
            row.ms[m] += median(x->exposed[m][k], x->rounds);
        }
        row.comm += x->comm[k], row.predicted += x->predicted[k];
    }
    return row;
}

// returns how many demands do not hold
static int print_mesh(const Bench* x, const char* name) {
    double ms[NMODES], total[NMODES] = {0}, hidden[NMODES] = {0};
    printf("\n## %s: dp %d * up %d * tp %d, B=%d a dp rank, T=%d\n", name, x->opt.dp, x->opt.up, x->opt.tp,
           x->opt.batch, x->opt.seq_len);
    printf("%-9s %9s %10s %10s %10s %10s %12s %11s\n", "operation", "comm ms", "none ms", "slice:4 ms",
           "flash:2 ms", "free ms", "predicted ms", "flash/none");
    for (int i = 0; i < NROWS; i++) {
        const char* op = i < NSITES ? gpt_sites[i].name : "D3";
        int before = 0; // has its row been printed?
        for (int k = 0; k < i; k++) {
            before |= strcmp(gpt_sites[k].name, op) == 0;
        }
        const Row row = row_of(x, op);
        if (before || row.comm <= 0.0) { continue; }
        for (int m = 0; m < NMODES; m++) {
            total[m] += row.ms[m];
            hidden[m] += row.predicted == 0.0 ? row.ms[m] : 0.0;
        }
        printf("%-9s %9.2f %10.2f %10.2f %10.2f %10.2f %12.2f %10.1f%%\n", op, row.comm, row.ms[0], row.ms[1],
               row.ms[2], row.ms[3], row.predicted,
               100.0 * (row.ms[2] - row.ms[3]) / (row.ms[0] - row.ms[3]));
    }
    printf("%-9s %9s %10.2f %10.2f %10.2f %10.2f\n", "all", "", total[0], total[1], total[2], total[3]);
    for (int m = 0; m < NMODES; m++) {
        ms[m] = median(x->step[m], x->rounds);
    }
    printf("step ms: none %.1f, slice:4 %.1f, flash:2 %.1f, free link %.1f; over free: %+.1f %%, %+.1f %%, "
           "%+.1f %%; flash against none %+.1f %%\n",
           ms[0], ms[1], ms[2], ms[3], 100.0 * (ms[0] / ms[3] - 1.0), 100.0 * (ms[1] / ms[3] - 1.0),
           100.0 * (ms[2] / ms[3] - 1.0), 100.0 * (ms[2] / ms[0] - 1.0));
    int failed = judge(name, "flash's exposed of none's, operations that the model says can be hidden",
                       100.0 * (hidden[2] - hidden[3]) / (hidden[0] - hidden[3]), 10.0);
    failed += judge(name, "flash's step of a step with free communication", 100.0 * ms[2] / ms[3], 105.0);
    fflush(stdout);
    return failed;
}

static int run_mesh(Bench* x, int mesh) {
    const int P = MESHES[mesh].dp * MESHES[mesh].up * MESHES[mesh].tp;
    x->opt.dp = MESHES[mesh].dp, x->opt.up = MESHES[mesh].up, x->opt.tp = MESHES[mesh].tp;
    x->opt.batch = 4 / x->opt.dp; // the same work on every mesh
    x->opt.zero = x->opt.dp * x->opt.up > 1;
    memset(x->predicted, 0, sizeof x->predicted);
    memset(x->comm, 0, sizeof x->comm);
    for (x->round = 0; x->round < x->rounds; x->round++) {
        for (x->mode = 0; x->mode < NMODES; x->mode++) {
            x->opt.overlap = MODES[x->mode].overlap;
            fo_ranks_run(P, body, x);
            x->step[x->mode][x->round] = 0.0;
            for (int r = 0; r < P; r++) {
                x->step[x->mode][x->round] += x->ranks_step[r] / P;
            }
            for (int k = 0; k < NROWS; k++) {
                x->exposed[x->mode][k][x->round] = 0.0;
                for (int r = 0; r < P; r++) {
                    x->exposed[x->mode][k][x->round] += x->ranks_exposed[r][k] / P;
                }
            }
        }
    }
    return print_mesh(x, MESHES[mesh].name);
}

static double number(const char* option, const char* text, double low, double high, char** rest) {
    double v = strtod(text, rest);
    if (*rest == text || !(v >= low && v <= high)) {
        fo_quit(1, "%s %s: want a number from %g to %g", option, text, low, high);
    }
    return v;
}

int main(int argc, char** argv) {
    static Bench x;
    char err[TRAIN_ERR], *rest;
    char* none[] = {argv[0]};
    const char* model = "L=6,C=512,NH=8,V=16384,maxT=512";
    int wanted[NMESHES] = {0}, any = 0, check = 0;
    if (options_parse(&x.opt, 1, none, err)) { fo_quit(1, "%s", err); }
    x.rounds = 5, x.opt.pace = 0.04, x.link.gbytes_s = 0.5, x.link.us = 20.0, x.opt.seq_len = 256;
    for (int i = 1; i < argc; i++) {
        const char* v = i + 1 < argc ? argv[i + 1] : "";
        int mesh = 0, is_option = 1;
        while (mesh < NMESHES && strcmp(argv[i], MESHES[mesh].name) != 0) {
            mesh++;
        }
        if (mesh < NMESHES) {
            wanted[mesh] = any = 1, is_option = 0;
        } else if (strcmp(argv[i], "--rounds") == 0) {
            x.rounds = (int)number(argv[i], v, 1, MAX_ROUNDS, &rest);
        } else if (strcmp(argv[i], "--pace") == 0) {
            x.opt.pace = number(argv[i], v, 1e-4, 1e3, &rest);
        } else if (strcmp(argv[i], "--link") == 0) {
            x.link.gbytes_s = number(argv[i], v, 1e-6, 1e4, &rest);
            x.link.us = *rest == ',' ? number(argv[i], rest + 1, 0.0, 1e6, &rest) : 20.0;
        } else if (strcmp(argv[i], "--model") == 0) {
            model = v;
        } else if (strcmp(argv[i], "--check") == 0) {
            check = 1, is_option = 0;
        } else {
            fo_quit(
                1,
                "%s: want tp4, up4, dp4, tp2up2, dp2tp2, --rounds N, --pace TFLOPS, --link GBPS,US, --model "
                "SIZES",
                argv[i]);
        }
        i += is_option;
    }
    if (model_parse(model, &x.config, err)) { fo_quit(1, "%s", err); }
    printf(
        "# model %s, paced at %g TFLOP/s a rank, link %g GB/s and %g us for each group, %d rounds of %d "
        "steps\n"
        "# comm: what plain collectives take; none, slice:4, flash:2: what each leaves exposed; predicted: "
        "fo_model.h's flash:2\n",
        model, x.opt.pace, x.link.gbytes_s, x.link.us, x.rounds, STEPS);
    int failed = 0;
    for (int mesh = 0; mesh < NMESHES; mesh++) {
        if (wanted[mesh] || !any) { failed += run_mesh(&x, mesh); }
    }
    return check && failed > 0;
}
