/* bench_overlap.c -- how much communication each schedule leaves exposed: half a layer, forward or backward,
 * measured.
 *
 * The layers of layer.h run on the primitives of fo_overlap.h, the executor that trains, under every mode in
 * turn. Ranks are threads or, started by mpirun, processes; the link between them is emulated or, across
 * hosts, real. Unless --unpaced each GEMM lasts a given time, so that a rank behaves like an accelerator.
 * dev/bench/README.md says how to read the tables; bench_overlap --help the options.
 */
#include "dev/bench/layer.h"
#include "flashoverlap/fo_model.h"
#include <math.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RATIOS = 16, MAX_TABLES = NLAYER_OPS * MAX_RATIOS + 1, CALIBRATIONS = 5 };

typedef struct {
    // what is measured
    LayerShape shape;
    int L, rounds, nmodes, paced;
    double gemm_ms; // paced: a fc1, fc2 or projection GEMM of all rows lasts so long
    int pace_free;  // real link: gemm_ms is chosen for the ratio
    double ratio;   // T/W; 0: each collective lasts twice as long as the projection
    char transport[8];
    LayerCost cost; // paced: the least, unpaced: median of the mean over ranks; 0 GB/s: from ratio
    int usual;      // the ratio that is demanded of
    int real;       // link: as the transport is
    BenchMode modes[BENCH_MAX_MODES];
    // results
    double layer_ms[BENCH_MAX_MODES][BENCH_MAX_ROUNDS], exposed_ms[BENCH_MAX_MODES][BENCH_MAX_ROUNDS];
    uint64_t hash[BENCH_MAX_MODES]; // of all ranks' output
    int same_bits[BENCH_MAX_MODES]; // in every run, as the first mode's
    double foreign_cores, seconds;
    char name[80];
} Table;

// one rank's part of it; a table of its own, in which each has the same but rank 0's is told
typedef struct {
    Table* t;
    FoGroup* group;
    FoDevice* device;
    Layer y;
    LayerPlan plans[BENCH_MAX_MODES];
    char* slots;  // device memory: 8 bytes of each rank
    double start; // of a run, seconds
} Rank;

static int P_of(const Table* t) {
    return t->shape.P;
}

static double compute_ms(const Table* t) {
    return layer_compute_ms(&t->cost);
}

static size_t shard_nbytes(const Table* t) {
    return layer_shard_nelem(&t->shape) * sizeof(floatX);
}

static double collectives_ms(const Table* t) {
    return layer_collectives_ms(&t->shape, &t->cost);
}

static double predicted_ms(const Table* t, const BenchMode* mode) {
    return layer_predicted_ms(&t->shape, &t->cost, mode);
}

// ---- measuring --------------------------------------------------------------------------------------------
// 8 bytes of each rank, in rank order, at all of them
static void exchange(Rank* k, const void* mine, void* all) {
    const int r = fo_group_rank(k->group), P = P_of(k->t);
    fo_upload(k->slots + 8 * r, mine, 8, k->y.comm);
    fo_allgather(k->group, k->slots, 8, k->y.comm);
    fo_download(all, k->slots, 8 * (size_t)P, k->y.comm);
    fo_stream_sync(k->y.comm);
}

// all ranks of a machine go on at one moment: after a barrier alone, each would start as late as it wakes up
static void common_start(Rank* k) {
    double starts[FO_MAX_RANKS], mine = fo_now() + 3e-3;
    exchange(k, &mine, starts);
    k->start = bench_largest(starts, P_of(k->t));
    if (fo_group_nlocal(k->group) < P_of(k->t)) { // clocks may differ
        fo_group_barrier(k->group);
        k->start = fo_now();
    }
    for (double left; (left = k->start - fo_now()) > 0.0;) {
        struct timespec ts = {0, (long)(left * 1e9)};
        nanosleep(&ts, NULL);
    }
}

static void calibrate(Rank* k) {
    Table* t = k->t;
    double ms[CALIBRATIONS], all[FO_MAX_RANKS];
    for (int part = 0; part < NPARTS; part++) {
        for (int i = -1; i < CALIBRATIONS; i++) { // the first warms up
            common_start(k);
            layer_queue_part(&k->y, (LayerPart)part);
            fo_stream_sync(k->y.compute);
            const double mine = 1e3 * (fo_now() - k->start);
            exchange(k, &mine, all);
            if (i >= 0) { ms[i] = t->paced ? bench_least(all, P_of(t)) : bench_mean(all, P_of(t)); }
        }
        // what is paced takes its nominal time, and anything above it is a late wake-up
        t->cost.part_ms[part] = bench_quantile(ms, CALIBRATIONS, t->paced ? 0.0 : 0.5);
        const int empty = part == ATTENTION_ITSELF
                              ? !layer_is_attention(t->shape.op)
                              : part != OWNERS_SUM && part != GATHER_SIDE && part != SCATTER_SIDE &&
                                    !layer_is_backward(t->shape.op);
        if (empty) { t->cost.part_ms[part] = 0.0; }
    }
}

// T that is asked for, at the speed that was calibrated
// t_m/t_c, means over the layer's collectives, of T/W
static double ratio_of(const Table* t, double T_of_W) {
    return T_of_W * P_of(t) / (P_of(t) - 1);
}

static double wanted_T_ms(const Table* t) {
    if (t->ratio > 0.0) { return t->ratio * compute_ms(t); }
    const LayerPart projection = layer_is_backward(t->shape.op) ? WGRAD_UNDER : SCATTER_SIDE;
    return 2.0 * layer_collectives(t->shape.op) * t->cost.part_ms[projection];
}

// the bandwidth with which the collectives last so long
static void link_of(Table* t, double T_ms) {
    const double shard_s = 1e-3 * T_ms / (layer_collectives(t->shape.op) * (P_of(t) - 1));
    const double wire_s = shard_s - 1e-6 * t->cost.us;
    if (wire_s < 0.1 * shard_s) {
        bench_refuse(
            "--ratio: T/W = %.4g leaves %.1f us a message, latency included: less than a latency of %g "
            "us allows",
            t->ratio, 1e6 * shard_s, t->cost.us);
    }
    t->cost.gbytes_s = 1e-9 * (double)shard_nbytes(t) / wire_s;
}

static void pace(Rank* k) {
    const Table* t = k->t;
    if (t->paced) { fo_device_pace(k->device, layer_flops(&t->shape) / (1e-3 * t->gemm_ms) / 1e12); }
}

/* T as it is here: each plain collective alone, slowest rank, median. It begins after a pause, as in a layer
 * of mode none, where computation is one: a shaped link lets some bytes pass at once then.
 */
static double measured_T_ms(Rank* k) {
    const BenchMode none = {"none", FO_NONE, 1, FO_DIRECT, 0, 0};
    const LayerShape* s = &k->t->shape;
    LayerPlan p;
    double all[FO_MAX_RANKS], ms[2][CALIBRATIONS];
    layer_plan_open(&k->y, &p, &none);
    for (int i = -1; i < CALIBRATIONS; i++) {
        for (int scatter = 0; scatter < 2; scatter++) {
            usleep(20000);
            common_start(k);
            if (scatter) {
                fo_reducescatter_run(p.scatter, &k->y.st, s->C, s->N, NULL, NULL);
            } else {
                fo_allgather_begin(p.gather, k->y.all, (size_t)s->C * sizeof(floatX), s->N);
                fo_allgather_end(p.gather);
            }
            fo_stream_sync(k->y.compute);
            const double mine = 1e3 * (fo_now() - k->start);
            exchange(k, &mine, all);
            if (i >= 0) { ms[scatter][i] = bench_largest(all, P_of(k->t)); }
        }
    }
    layer_plan_close(&p);
    return (layer_collectives(s->op) - 1) * bench_quantile(ms[0], CALIBRATIONS, 0.5) +
           bench_quantile(ms[1], CALIBRATIONS, 0.5);
}

// the link's figures; and, where it can't be chosen for the ratio, the pace
static void real_link(Rank* k) {
    Table* t = k->t;
    const double T = measured_T_ms(k);
    fo_group_measure(k->group, k->y.comm);
    const double shard_us = 1e3 * T / (layer_collectives(t->shape.op) * (P_of(t) - 1));
    t->cost.us = 1e6 * fo_group_message_s(k->group, 0);
    t->cost.us = t->cost.us < 0.5 * shard_us ? t->cost.us : 0.5 * shard_us;
    link_of(t, T);
    if (t->paced && t->pace_free) {
        t->gemm_ms *= T / wanted_T_ms(t);
        pace(k);
        calibrate(k);
    }
}

static void choose_link(Rank* k) {
    Table* t = k->t;
    const int hosts = fo_group_nlocal(k->group) < P_of(t);
    if (hosts && t->cost.gbytes_s > 0.0) {
        bench_refuse("--link %g,%g: ranks are on several hosts, whose link can't be emulated; want --link "
                     "real, or --ratio for the pace",
                     t->cost.gbytes_s, t->cost.us);
    }
    t->real |= hosts;
    if (t->real) {
        real_link(k);
        return;
    }
    if (t->cost.gbytes_s <= 0.0) { link_of(t, wanted_T_ms(t)); }
    fo_group_link(k->group, t->cost.gbytes_s, t->cost.us);
}

// L layers under mode i; round -1 only warms up
static void run_mode(Rank* k, int i, int round) {
    Table* t = k->t;
    double all[FO_MAX_RANKS];
    uint64_t hashes[FO_MAX_RANKS], hash = 1469598103934665603u;
    layer_start(&k->y, &k->plans[i]);
    common_start(k);
    for (int l = 0; l < t->L; l++) {
        layer_queue(&k->y, &k->plans[i]);
    }
    fo_stream_sync(k->y.compute);
    const double mine = 1e3 * (fo_now() - k->start) / t->L;
    const uint64_t own = layer_hash(&k->y);
    const double waited = layer_exposed_ms(&k->plans[i]) / t->L;
    exchange(k, &own, hashes);
    for (int r = 0; r < P_of(t); r++) {
        hash = (hash ^ hashes[r]) * 1099511628211u;
    }
    exchange(k, &mine, all);
    if (round >= 0) { t->layer_ms[i][round] = bench_largest(all, P_of(t)); }
    exchange(k, &waited, all);
    if (round >= 0) { t->exposed_ms[i][round] = bench_mean(all, P_of(t)); }
    if (round < 0) {
        t->hash[i] = hash;
        t->same_bits[i] = 1;
    }
    t->same_bits[i] &= hash == t->hash[0];
}

static void run_rounds(Rank* k) {
    Table* t = k->t;
    double all[FO_MAX_RANKS];
    for (int i = 0; i < t->nmodes; i++) {
        run_mode(k, i, -1);
    }
    const BenchLoad before = bench_load();
    for (int round = 0; round < t->rounds; round++) { // each mode takes each place in turn
        for (int i = 0; i < t->nmodes; i++) {
            run_mode(k, (i + round) % t->nmodes, round);
        }
    }
    const BenchLoad after = bench_load();
    const double own = after.own - before.own;
    exchange(k, &own, all); // threads tell all the same
    const int processes = strcmp(fo_group_transport(k->group), "local") != 0;
    t->seconds = after.now - before.now;
    t->foreign_cores = bench_foreign(before, after, processes ? P_of(t) * bench_mean(all, P_of(t)) : own);
    (void)snprintf(t->transport, sizeof t->transport, "%s", fo_group_transport(k->group));
}

static void measure(Rank* k) {
    Table* t = k->t;
    layer_open(&k->y, t->shape, k->group, k->device);
    k->slots = fo_malloc(k->device, 8 * FO_MAX_RANKS);
    pace(k);
    calibrate(k);
    choose_link(k);
    for (int i = 0; i < t->nmodes; i++) {
        layer_plan_open(&k->y, &k->plans[i], &t->modes[i]);
    }
    run_rounds(k);
    for (int i = 0; i < t->nmodes; i++) {
        layer_plan_close(&k->plans[i]);
    }
    fo_free(k->device, k->slots);
    layer_close(&k->y);
}

// Should its bits be the others'? A ring of more than two ranks rounds each partial sum that it passes on
static int has_own_bits(const Table* t, int i) {
    return t->modes[i].topology == FO_RING && P_of(t) > 2;
}

// ---- report -----------------------------------------------------------------------------------------------
static double layer_median(const Table* t, int i) {
    return bench_quantile(t->layer_ms[i], t->rounds, 0.5);
}
static double exposed_median(const Table* t, int i) {
    return bench_quantile(t->exposed_ms[i], t->rounds, 0.5);
}

static int find_mode(const Table* t, const char* name) {
    return bench_find(t->modes, t->nmodes, name);
}

// against mode none, %; NAN where it was not run
static double vs_none(const Table* t, int i) {
    const int none = find_mode(t, "none");
    return none < 0 ? NAN : 100.0 * (layer_median(t, i) / layer_median(t, none) - 1.0);
}
static double hidden_percent(const Table* t, int i) {
    const int none = find_mode(t, "none");
    return none < 0 ? NAN : 100.0 * (1.0 - exposed_median(t, i) / exposed_median(t, none));
}

static const char* const LEGEND =
    "# Half a layer, forward or backward, on ranks that share it (tensor parallel). ms a layer.\n"
    "#   layer    by the wall clock, start to end, slowest rank; median of the rounds, and p25..p75\n"
    "#   vs none  layer / that of mode none - 1\n"
    "#   over W   layer - W: with the owner's sum, and this machine's lateness, in it\n"
    "#   exposed  the compute stream stood waiting for messages, mean over ranks; median, p25..p75. Paced:\n"
    "#            on the stream's virtual clock, which forgives a late wake-up that is made up for\n"
    "#   hidden   1 - exposed / that of mode none\n"
    "#   model    exposed as fo_model.h predicts it from the parts and the link named above the table\n"
    "#   bits     all ranks' output has the same bits as the first mode's, in every round; ring: it adds in\n"
    "#            another order\n"
    "# modes    none: the plain collective; slice:M: M slices of all rows; flash:M: by owner, M sub-chunks\n"
    "#          each, sent to the owner itself; ring:M: the same along a ring; row:M: flash, all QKV,\n"
    "#          then all attention before the first projection\n"
    "# paced    each GEMM and attention takes max(its real time, flops / rate). Arithmetic, messages, bits\n"
    "#          and schedule are real; unpaced: the machine as it is\n"
    "# W        the layer without communication: each part alone, timed in this process 5 times just before\n"
    "#          (paced the least, unpaced the median). T: all collectives on the link\n"
    "# link     emulated, or real: T is then measured, each plain collective alone, 5 times, the median\n"
    "# foreign  cores that other processes kept busy during the rounds\n"
    "# The paper (arXiv 2604.24013) has no backward pass: those tables are this project's own.\n";

static void print_parts(const Table* t) {
    static const char* const names[NLAYER_OPS][NPARTS] = {
        {"fc1 and GELU", "", "", "fc2", "", ""},
        {"QKV", "attention", "", "projection", "", ""},
        {"fc2 dgrad and GELU's", "", "fc2 wgrad", "fc1 dgrad", "fc1 wgrad", ""},
        {"projection dgrad", "attention's", "projection wgrad", "QKV dgrad", "QKV wgrad", ""}};
    printf("# W %.2f ms =", compute_ms(t));
    for (int part = 0; part < OWNERS_SUM; part++) {
        const char* name = names[t->shape.op][part];
        if (name[0]) { printf("%s %s %.2f", part ? "," : "", name, t->cost.part_ms[part]); }
    }
    printf("; not in it: the owner's sum %.2f\n", t->cost.part_ms[OWNERS_SUM]);
    const double T = collectives_ms(t), W = compute_ms(t);
    const LayerCost* c = &t->cost;
    printf(
        "# link %s, %.4f GB/s, %.0f us: T %.2f ms, T/W %.3f (t_m/t_c %.3f); a shard's message %.2f ms (%zu "
        "KiB)\n",
        t->real ? "real" : "emulated", c->gbytes_s, c->us, T, T / W, ratio_of(t, T / W),
        layer_shard_ms(&t->shape, c, 1), shard_nbytes(t) / 1024);
    if (T > W) { printf("# T > W: no schedule can hide all of it\n"); }
}

static void print_table(const Table* t) {
    printf("\n# %s, %s: P=%d N=%zu C=%d", layer_name(t->shape.op), t->paced ? "paced" : "unpaced", P_of(t),
           t->shape.N, t->shape.C);
    if (layer_is_attention(t->shape.op)) {
        printf(" T=%zu heads=%d", t->shape.N / (size_t)P_of(t), t->shape.C / LAYER_HEAD);
    }
    printf(" L=%d, ranks by %s, %d rounds, modes taking turns; foreign %.2f cores; %.1f s\n", t->L,
           t->transport, t->rounds, t->foreign_cores, t->seconds);
    print_parts(t);
    printf("%-9s %8s %16s %8s %7s %8s %14s %8s %7s %5s\n", "mode", "layer", "p25..p75", "vs none", "over W",
           "exposed", "p25..p75", "hidden", "model", "bits");
    for (int i = 0; i < t->nmodes; i++) {
        const BenchSpread l = bench_spread(t->layer_ms[i], t->rounds),
                          x = bench_spread(t->exposed_ms[i], t->rounds);
        printf("%-9s %8.2f %7.2f..%-7.2f %+7.1f%% %7.2f %8.2f %6.2f..%-6.2f %7.1f%% %7.2f %5s\n",
               t->modes[i].name, l.median, l.p25, l.p75, vs_none(t, i), l.median - compute_ms(t), x.median,
               x.p25, x.p75, hidden_percent(t, i), predicted_ms(t, &t->modes[i]),
               has_own_bits(t, i) ? "ring"
               : t->same_bits[i]  ? "same"
                                  : "DIFF");
    }
    fflush(stdout);
}

// tables of one operation at several ratios: what a mode gains there, and where it no longer does
static void print_crossover(const Table* tables, int n) {
    for (int a = 0, b; a < n; a = b) {
        const Table* t = &tables[a];
        for (b = a + 1; b < n && tables[b].shape.op == t->shape.op && tables[b].paced == t->paced;) {
            b++;
        }
        const int none = find_mode(t, "none");
        if (b - a < 2 || none < 0) { continue; }
        printf("\n# crossover, %s, P=%d: layer vs none, and how much of none's exposed is hidden\n",
               layer_name(t->shape.op), P_of(t));
        printf("%-6s %9s %9s", "T/W", "t_m/t_c", "none ms");
        for (int i = 0; i < t->nmodes; i++) {
            if (i != none) { printf(" %18s", t->modes[i].name); }
        }
        printf("\n");
        for (int j = a; j < b; j++) {
            const Table* u = &tables[j];
            const double ratio = collectives_ms(u) / compute_ms(u);
            printf("%-6.3f %9.3f %9.2f", ratio, ratio_of(u, ratio), layer_median(u, none));
            for (int i = 0; i < u->nmodes; i++) {
                if (i == none) { continue; }
                printf("  %+7.1f%% %7.1f%%", vs_none(u, i), hidden_percent(u, i));
            }
            printf("\n");
        }
    }
}

static void write_json(BenchJson* j, const Table* t) {
    bench_json_begin(j, NULL, '{');
    bench_json_text(j, "name", t->name);
    bench_json_text(j, "op", layer_name(t->shape.op));
    bench_json_number(j, "ranks", P_of(t));
    bench_json_number(j, "rows", (double)t->shape.N);
    bench_json_number(j, "width", t->shape.C);
    bench_json_number(j, "layers", t->L);
    bench_json_text(j, "transport", t->transport);
    bench_json_text(j, "link", t->real ? "real" : "emulated");
    bench_json_number(j, "link_gbytes_s", t->cost.gbytes_s);
    bench_json_number(j, "link_us", t->cost.us);
    bench_json_number(j, "comm_ms", collectives_ms(t));
    bench_json_number(j, "compute_ms", compute_ms(t));
    bench_json_number(j, "ratio", ratio_of(t, collectives_ms(t) / compute_ms(t)));
    bench_json_number(j, "paced", t->paced);
    bench_json_number(j, "gemm_ms", t->paced ? t->gemm_ms : NAN);
    bench_json_number(j, "rounds", t->rounds);
    bench_json_number(j, "foreign_cores", t->foreign_cores);
    bench_json_begin(j, "modes", '[');
    for (int i = 0; i < t->nmodes; i++) {
        const BenchSpread total = bench_spread(t->layer_ms[i], t->rounds);
        bench_json_mode(j, t->modes[i].name, &total, bench_spread(t->exposed_ms[i], t->rounds), vs_none(t, i),
                        hidden_percent(t, i), predicted_ms(t, &t->modes[i]));
        bench_json_number(j, "same_bits", t->same_bits[i]);
        bench_json_end(j, '}');
    }
    bench_json_end(j, ']');
    bench_json_end(j, '}');
}

// ---- demands ----------------------------------------------------------------------------------------------
typedef enum { EXPOSED_OF, EXPOSED_OF_T, LAYER_OF, OFF_MODEL } Measure;
enum { PACED = 1, UNPACED = 2, REAL_LINK = 4, ANY_RATIO = 8 };

// what is demanded of a table: a measure of one mode, in relation to that of another
typedef struct {
    LayerOp op;
    int when; // of the bits below; without ANY_RATIO: at the usual one
    const char* mode;
    Measure measure;
    const char* of;
    int at_least; // else at most
    double limit;
} Demand;

/* dev/bench/README.md says what was measured and what broken schedules reach. none's and slice:4's own
 * exposure are held to what they must be, too: a slow baseline would flatter flash.
 */
static const Demand DEMANDS[] = {
    {MLP, PACED, "flash:1", EXPOSED_OF, "none", 0, 0.08},
    {MLP, PACED, "flash:2", EXPOSED_OF, "none", 0, 0.05},
    {MLP, PACED, "flash:1", LAYER_OF, "none", 0, 0.70},
    {MLP, PACED, "flash:2", LAYER_OF, "none", 0, 0.70},
    {MLP, PACED, "slice:4", LAYER_OF, "flash:1", 1, 1.08},
    {MLP, PACED, "slice:4", EXPOSED_OF, "none", 1, 0.20},
    {MLP, PACED, "slice:4", EXPOSED_OF, "none", 0, 0.40},
    {MLP, PACED, "none", EXPOSED_OF_T, "T", 1, 0.90},
    {MLP, PACED, "none", EXPOSED_OF_T, "T", 0, 1.15},
    {MLP, PACED | ANY_RATIO, "flash:1", OFF_MODEL, "T", 0, 0.05},
    {MLP, PACED | ANY_RATIO, "flash:2", OFF_MODEL, "T", 0, 0.05},
    {ATTENTION, PACED, "flash:1", EXPOSED_OF, "none", 0, 0.05},
    {ATTENTION, PACED, "flash:2", EXPOSED_OF, "none", 0, 0.05},
    {ATTENTION, PACED, "row:1", EXPOSED_OF, "none", 1, 0.20},
    {ATTENTION, PACED, "row:1", OFF_MODEL, "T", 0, 0.05},
    {ATTENTION, PACED, "none", EXPOSED_OF_T, "T", 1, 0.90},
    {ATTENTION, PACED, "none", EXPOSED_OF_T, "T", 0, 1.15},
    {MLP_BACKWARD, PACED, "flash:1", EXPOSED_OF, "none", 0, 0.05},
    {MLP_BACKWARD, PACED, "flash:2", EXPOSED_OF, "none", 0, 0.05},
    {MLP_BACKWARD, PACED, "flash:1", LAYER_OF, "none", 0, 0.80},
    {MLP_BACKWARD, PACED, "none", EXPOSED_OF_T, "T", 1, 0.90},
    {MLP_BACKWARD, PACED, "none", EXPOSED_OF_T, "T", 0, 1.15},
    {MLP_BACKWARD, PACED | ANY_RATIO, "flash:1", OFF_MODEL, "T", 0, 0.05},
    {MLP_BACKWARD, PACED | ANY_RATIO, "flash:2", OFF_MODEL, "T", 0, 0.05},
    {ATTENTION_BACKWARD, PACED, "flash:1", EXPOSED_OF, "none", 0, 0.05},
    {ATTENTION_BACKWARD, PACED, "flash:2", EXPOSED_OF, "none", 0, 0.05},
    {ATTENTION_BACKWARD, PACED, "none", EXPOSED_OF_T, "T", 1, 0.90},
    {ATTENTION_BACKWARD, PACED, "none", EXPOSED_OF_T, "T", 0, 1.15},
    {MLP, UNPACED, "flash:2", LAYER_OF, "none", 0, 0.92},
    {MLP, PACED | REAL_LINK, "flash:2", LAYER_OF, "none", 0, 0.80},
    {MLP, PACED | REAL_LINK, "flash:2", EXPOSED_OF, "none", 0, 0.15},
};
enum { NDEMANDS = sizeof DEMANDS / sizeof *DEMANDS };

// does the model say so of this mode, if it is flash?
static int hides_all(const Table* t, int i) {
    const BenchMode* mode = &t->modes[i];
    return mode->mode != FO_FLASH || mode->row || predicted_ms(t, mode) < 0.01 * collectives_ms(t);
}

static int applies(const Demand* d, const Table* t) {
    const int when = (t->paced ? PACED : UNPACED) | (t->real ? REAL_LINK : 0);
    if (d->op != t->shape.op || (d->when & ~ANY_RATIO) != when) { return 0; }
    const int i = find_mode(t, d->mode), of = find_mode(t, d->of);
    if (i < 0 || (of < 0 && strcmp(d->of, "T") != 0)) { return 0; }
    if (d->measure == OFF_MODEL) { return t->usual || (d->when & ANY_RATIO); }
    // flash:1 on two ranks has but half of the layer to hide under: only what can be hidden is demanded
    return t->usual && hides_all(t, i) && (of < 0 || hides_all(t, of));
}

static double value_of(const Demand* d, const Table* t) {
    const int i = find_mode(t, d->mode), of = find_mode(t, d->of);
    switch (d->measure) {
    case EXPOSED_OF: return exposed_median(t, i) / exposed_median(t, of);
    case EXPOSED_OF_T: return exposed_median(t, i) / collectives_ms(t);
    case LAYER_OF: return layer_median(t, i) / layer_median(t, of);
    case OFF_MODEL: break;
    }
    return fabs(exposed_median(t, i) - predicted_ms(t, &t->modes[i])) / collectives_ms(t);
}

static int verdict(const Table* t, const char* what, double value, const char* relation, double limit,
                   int ok) {
    printf("%-18s %-7s  %-44s %8.1f %%  %s %5.1f %%  %s\n", layer_name(t->shape.op),
           t->paced ? "paced" : "unpaced", what, 100.0 * value, relation, 100.0 * limit,
           ok ? "ok" : "FAILED");
    return !ok;
}

static int too_noisy(const Table* t, int failed) {
    double spread = 0.0;
    for (int i = 0; i < t->nmodes; i++) {
        const BenchSpread s = bench_spread(t->layer_ms[i], t->rounds);
        spread = fmax(spread, (s.p75 - s.p25) / s.median);
    }
    return bench_noisy(t->name, spread, t->foreign_cores, failed);
}

// prints each demand on the table that its modes allow; returns exit status 0, 1, or BENCH_NOISY
static int judge(const Table* t) {
    int failed = 0, differ = 0;
    for (int i = 0; i < t->nmodes; i++) {
        differ += !t->same_bits[i] && !has_own_bits(t, i);
    }
    for (int j = 0; j < NDEMANDS; j++) {
        const Demand* d = &DEMANDS[j];
        if (!applies(d, t)) { continue; }
        const double value = value_of(d, t);
        char what[64];
        (void)snprintf(what, sizeof what, "%s of %s %s %s",
                       d->measure == LAYER_OF    ? "layer"
                       : d->measure == OFF_MODEL ? "model's error"
                                                 : "exposed",
                       d->mode, d->measure == OFF_MODEL ? "over" : "over that of", d->of);
        const int ok = d->at_least ? value >= d->limit : value <= d->limit;
        failed += verdict(t, what, value, d->at_least ? "at least" : "at most ", d->limit, ok);
    }
    const int noisy = too_noisy(t, failed);
    verdict(t, "modes whose bits differ", (double)differ / t->nmodes, "at most ", 0.0, differ == 0);
    return differ ? 1 : noisy ? BENCH_NOISY : failed > 0; // noise excuses no bit
}

// ---- options ----------------------------------------------------------------------------------------------
static const char* const HELP =
    "usage: [mpirun -np P] bench_overlap [options]\n"
    "Without options: the paced MLP and attention layers at P=4, forward and backward, the unpaced MLP layer "
    "at "
    "P=2,\nand what is demanded of them. By mpirun ranks are processes.\n"
    "  --op OP             mlp, attention, mlp-backward, attention-backward, forward (two), backward (two), "
    "all\n"
    "  --unpaced           the machine as it is (default sizes: P=2, N=2048, C=1024, 11 rounds)\n"
    "  --gemm-ms MS        paced: fc1, fc2 (default 20) or the projection (default 10) lasts so long for all "
    "rows\n"
    "  --ranks P           2 to 16; processes: as many as there are\n"
    "  --rows N            rows of the group; attention: one sequence of N/P a rank\n"
    "  --width C           channels; attention: in heads of 64\n"
    "  --layers L          chained without a barrier (default 2)\n"
    "  --ratio R[,R...]    t_m/t_c = R, of a shard's message and the computation of a chunk; a table for "
    "each.\n"
    "                      Emulated: the link is chosen; real: the pace. Default: T/W 0.558 for mlp (0.744 "
    "at\n"
    "                      P=4); attention: a collective lasts as long as two projections; backward: the "
    "same\n"
    "                      link\n"
    "  --link GBPS,US      this link is emulated: 10^9 bytes a second, microseconds a message\n"
    "  --link real         the transport as it is; ranks on several hosts always have that\n"
    "  --rounds N          1 to 200 (default 7; unpaced 11)\n"
    "  --modes LIST        of none, slice:M, flash:M, ring:M (flash along a ring); attention: row:M (all\n"
    "                      attention before the first projection)\n"
    "  --json FILE         all figures\n"
    "  --check             exit status 1 if a demand is not met; without --modes only the modes demanded\n"
    "Exit status 3, always: the machine is too noisy to tell.\n";

typedef struct {
    const char *op, *modes, *json;
    int unpaced, check, help, sized;     // sized: an option was given that changes what is measured
    int ranks, channels, layers, rounds; // 0: default
    size_t rows;
    int nratios, real;
    double gemm_ms, ratio[MAX_RATIOS], gbytes_s, us;
    FoLaunch launch;
} Options;

static const struct {
    const char* name;
    unsigned ops; // bits
} GROUPS[] = {{"mlp", 1u << MLP},
              {"attention", 1u << ATTENTION},
              {"mlp-backward", 1u << MLP_BACKWARD},
              {"attention-backward", 1u << ATTENTION_BACKWARD},
              {"forward", 1u << MLP | 1u << ATTENTION},
              {"backward", 1u << MLP_BACKWARD | 1u << ATTENTION_BACKWARD},
              {"all", (1u << NLAYER_OPS) - 1}};

static unsigned ops_of(const char* name) {
    for (size_t i = 0; i < sizeof GROUPS / sizeof *GROUPS; i++) {
        if (strcmp(GROUPS[i].name, name) == 0) { return GROUPS[i].ops; }
    }
    bench_refuse("--op %s: want mlp, attention, mlp-backward, attention-backward, forward, backward or all",
                 name);
}

static void parse_ratios(Options* o, const char* list) {
    char text[32];
    for (const char* s = list; *s || o->nratios == 0;) {
        const size_t n = strcspn(s, ",");
        if (o->nratios == MAX_RATIOS) { bench_refuse("--ratio %s: more than %d", list, MAX_RATIOS); }
        if (n >= sizeof text) { bench_refuse("--ratio %s: want numbers with a comma between two", list); }
        memcpy(text, s, n);
        text[n] = 0;
        o->ratio[o->nratios++] = bench_double("--ratio", text, 0.001, 100.0, NULL);
        s += n + (s[n] == ',');
    }
}

static void parse_value(Options* o, const char* a, const char* v) {
    if (strcmp(a, "--op") == 0) {
        (void)ops_of(v);
        o->op = v;
    } else if (strcmp(a, "--gemm-ms") == 0) {
        o->gemm_ms = bench_double(a, v, 0.01, 1e5, NULL);
    } else if (strcmp(a, "--ranks") == 0) {
        o->ranks = (int)bench_long(a, v, 2, FO_MAX_RANKS);
    } else if (strcmp(a, "--rows") == 0) {
        o->rows = (size_t)bench_long(a, v, 1, 1 << 24);
    } else if (strcmp(a, "--width") == 0) {
        o->channels = (int)bench_long(a, v, 1, 1 << 16);
    } else if (strcmp(a, "--layers") == 0) {
        o->layers = (int)bench_long(a, v, 1, 1000);
    } else if (strcmp(a, "--rounds") == 0) {
        o->rounds = (int)bench_long(a, v, 1, BENCH_MAX_ROUNDS);
    } else if (strcmp(a, "--ratio") == 0) {
        o->nratios = 0;
        parse_ratios(o, v);
    } else if (strcmp(a, "--link") == 0) {
        o->real = strcmp(v, "real") == 0;
        o->gbytes_s = o->real ? 0.0 : bench_double(a, v, 1e-6, 1e4, &v);
        o->us = o->real ? 0.0 : bench_double(a, v, 0.0, 1e6, NULL);
    } else {
        *(strcmp(a, "--modes") == 0 ? &o->modes : &o->json) = v;
    }
}

// returns how many arguments option i takes
static int parse_option(Options* o, int argc, char** argv, int i) {
    const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
    if (strcmp(a, "--unpaced") == 0) { return o->unpaced = 1; }
    if (strcmp(a, "--check") == 0) { return o->check = 1; }
    if (strcmp(a, "--help") == 0) { return o->help = 1; }
    static const char* const known[] = {"--op",    "--gemm-ms", "--ranks",  "--rows",  "--width", "--layers",
                                        "--ratio", "--link",    "--rounds", "--modes", "--json"};
    size_t n = 0;
    while (n < sizeof known / sizeof *known && strcmp(a, known[n]) != 0) {
        n++;
    }
    if (n == sizeof known / sizeof *known) {
        bench_refuse("unknown option %s: bench_overlap --help lists them", a);
    }
    if (!v) { bench_refuse("%s needs a value: bench_overlap --help says which", a); }
    o->sized |= strcmp(a, "--op") != 0 && strcmp(a, "--rounds") != 0 && strcmp(a, "--json") != 0;
    parse_value(o, a, v);
    return 2;
}

// what the sizes must be multiples of
static void check_sizes(const Table* t) {
    const int P = P_of(t);
    for (int i = 0; i < t->nmodes; i++) {
        const size_t unit = (size_t)(P * t->modes[i].m);
        if (t->shape.N % unit != 0) {
            bench_refuse("--rows %zu: mode %s on %d ranks wants a multiple of %zu, such as %zu", t->shape.N,
                         t->modes[i].name, P, unit, (t->shape.N / unit + 1) * unit);
        }
    }
    const int unit = layer_is_attention(t->shape.op) ? LAYER_HEAD * P : P;
    if (t->shape.C % unit != 0) {
        bench_refuse("--width %d: %s on %d ranks wants a multiple of %d, such as %d", t->shape.C,
                     layer_name(t->shape.op), P, unit, (t->shape.C / unit + 1) * unit);
    }
}

static const char* usual_modes(const Options* o, LayerOp op, int unpaced) {
    if (unpaced) { return o->check ? "none,flash:2" : "none,slice:4,flash:1,flash:2"; }
    if (op == ATTENTION) {
        return o->check ? "none,row:1,flash:1,flash:2"
                        : "none,slice:2,slice:4,slice:8,row:1,flash:1,flash:2,flash:4,ring:1";
    }
    if (o->check) { return op == MLP ? "none,slice:4,flash:1,flash:2" : "none,flash:1,flash:2"; }
    return "none,slice:2,slice:4,slice:8,flash:1,flash:2,flash:4,ring:1";
}

static void init_table(Table* t, const Options* o, LayerOp op, int unpaced, int which_ratio) {
    const int attention = layer_is_attention(op), P = o->ranks ? o->ranks : unpaced ? 2 : 4;
    LayerShape* s = &t->shape;
    s->op = op;
    s->P = P;
    // paced sizes keep the cores mostly idle, so that a neighbour does no harm; unpaced ones keep the GEMMs
    // efficient
    s->N = unpaced ? 2048 : attention ? 512 * (size_t)P : 1024;
    s->N -= s->N % (size_t)(8 * P);
    s->C = unpaced ? 1024 : 256;
    if (s->C % (LAYER_HEAD * P) != 0 && (attention || s->C % P != 0)) { s->C = LAYER_HEAD * P; }
    if (o->rows) { s->N = o->rows; }
    if (o->channels) { s->C = o->channels; }
    t->L = o->layers ? o->layers : 2;
    t->rounds = o->rounds ? o->rounds : unpaced ? 11 : 7;
    t->paced = !unpaced;
    t->gemm_ms = o->gemm_ms > 0.0 ? o->gemm_ms : attention ? 10.0 : 20.0;
    t->pace_free = o->gemm_ms <= 0.0;
    // a backward pass has twice the work and three collectives for two: 0.75 of the ratio is the same link
    t->ratio = o->nratios  ? o->ratio[which_ratio] * (P - 1) / P
               : attention ? 0.0
               : op == MLP ? 0.558
                           : 0.4185;
    t->usual = !o->nratios && o->gbytes_s <= 0.0;
    t->cost.gbytes_s = o->gbytes_s;
    t->cost.us = o->gbytes_s > 0.0 ? o->us : 20.0;
    t->real = o->real;
    t->nmodes = bench_modes(t->modes, o->modes ? o->modes : usual_modes(o, op, unpaced),
                            op == ATTENTION ? BENCH_ATTENTION : BENCH_LAYER);
    check_sizes(t);
    int n = snprintf(t->name, sizeof t->name, "%s %s P=%d", layer_name(op), unpaced ? "unpaced" : "paced", P);
    if (o->nratios > 1) {
        (void)snprintf(t->name + n, sizeof t->name - (size_t)n, " t_m/t_c=%g", o->ratio[which_ratio]);
    }
}

static int choose_tables(Table* tables, Options* o) {
    int n = 0;
    const int suite = !o->op && !o->unpaced && !o->sized;
    const unsigned ops = ops_of(o->op ? o->op : o->unpaced ? "mlp" : o->sized ? "forward" : "all");
    if (o->check && o->rounds > 0 && o->rounds < 7) {
        bench_refuse("--check --rounds %d: want at least 7 rounds", o->rounds);
    }
    if (o->unpaced && o->gemm_ms > 0.0) { bench_refuse("--unpaced and --gemm-ms: want one of them"); }
    if (o->nratios && o->gbytes_s > 0.0) { bench_refuse("--ratio and --link: want one of them"); }
    if (o->nratios && o->real && (o->unpaced || o->gemm_ms > 0.0)) {
        bench_refuse(
            "--ratio, --link real: the ratio chooses the pace, so leave out --unpaced and --gemm-ms");
    }
    if (o->launch.n > 1 && o->ranks && o->ranks != o->launch.n) {
        bench_refuse("--ranks %d: %d processes were started, each of which is a rank", o->ranks, o->launch.n);
    }
    if (o->launch.n > FO_MAX_RANKS) {
        bench_refuse("%d processes were started: want at most %d", o->launch.n, FO_MAX_RANKS);
    }
    if (o->launch.n > 1) { o->ranks = o->launch.n; }
    for (int op = 0; op < NLAYER_OPS; op++) {
        for (int i = 0; i < (o->nratios ? o->nratios : 1) && (ops >> op & 1); i++) {
            init_table(&tables[n++], o, (LayerOp)op, o->unpaced, i);
        }
    }
    if (suite) { init_table(&tables[n++], o, MLP, 1, 0); }
    return n;
}

// ---- the run ----------------------------------------------------------------------------------------------
typedef struct {
    Options o;
    Table tables[MAX_TABLES];
    int first, end; // of this group of ranks
    char device[160];
} Run;

static void rank_body(FoGroup* g, void* arg) {
    Run* run = (Run*)arg;
    Rank* k = calloc(1, sizeof *k);
    Table* own = malloc(sizeof *own);
    fo_require(k && own, "out of memory");
    for (int j = run->first; j < run->end; j++) {
        memset(k, 0, sizeof *k);
        *own = run->tables[j];
        k->t = own, k->group = g, k->device = fo_device_open(fo_group_rank(g), fo_group_nlocal(g));
        fo_group_barrier(g); // all have taken their table
        measure(k);
        if (fo_group_rank(g) == 0) {
            run->tables[j] = *own;
            if (!run->device[0]) {
                (void)snprintf(run->device, sizeof run->device, "%s", fo_device_name(k->device));
                printf("%s", LEGEND);
                bench_print_machine(run->device);
            }
            print_table(own);
        }
        fo_device_close(k->device);
        fo_group_barrier(g);
    }
    free(own);
    free(k);
}

int main(int argc, char** argv) {
    static Run run;
    Options* o = &run.o;
    BenchJson json;
    char err[FO_LAUNCH_ERR];
    o->launch = fo_launch_default();
    for (int i = 1; i < argc;) {
        i += parse_option(o, argc, argv, i);
    }
    const int speaks = fo_launch_speaks();
    if (o->help) {
        if (speaks) { printf("%s", HELP); }
        return 0;
    }
    if (fo_launch_find(&o->launch, err)) { bench_refuse("%s", err); }
    const int n = choose_tables(run.tables, o);
    bench_json_open(&json, speaks ? o->json : NULL);
    for (run.first = 0; run.first < n; run.first = run.end) { // tables on as many ranks
        run.end = run.first + 1;
        while (run.end < n && P_of(&run.tables[run.end]) == P_of(&run.tables[run.first])) {
            run.end++;
        }
        fo_launch_run(&o->launch, P_of(&run.tables[run.first]), rank_body, &run);
    }
    if (!speaks) { return 0; }
    print_crossover(run.tables, n);
    int status = 0;
    const int judges = !o->sized || o->check;
    if (judges) { printf("\n# demands\n"); }
    for (int j = 0; j < n; j++) {
        const Table* t = &run.tables[j];
        status = bench_worse(status, judges ? judge(t) : too_noisy(t, 0) ? BENCH_NOISY : 0);
    }
    bench_json_head(&json, "bench_overlap", argc, argv, run.device);
    for (int j = 0; j < n; j++) {
        write_json(&json, &run.tables[j]);
    }
    bench_json_close(&json);
    return o->check || status == BENCH_NOISY ? status : 0;
}
