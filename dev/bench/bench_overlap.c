/* bench_overlap.c -- how much communication each schedule leaves exposed: a layer's forward and backward
 * pass, measured.
 *
 * The layers of layer.h run under every mode in turn. Ranks are threads and the link is emulated, or they are
 * processes on a network; unless --unpaced each GEMM lasts a given time, so that a rank behaves like an
 * accelerator. dev/bench/README.md says how to read the tables;
 * bench_overlap --help the options.
 */
#include "dev/bench/layer.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

// with threads the table is all ranks', with processes each has its own
static int are_processes(void) {
    return fo_ranks_launched() > 1;
}

// ---- measuring --------------------------------------------------------------------------------------------
static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static double quantile(const double* v, int n, double q) {
    double sorted[MAX_ROUNDS];
    memcpy(sorted, v, (size_t)n * sizeof *v);
    qsort(sorted, (size_t)n, sizeof *sorted, compare_doubles);
    return sorted[(int)(q * (n - 1) + 0.5)];
}

static double mean(const double* v, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        sum += v[i];
    }
    return sum / n;
}

static double largest(const double* v, int n) {
    double x = v[0];
    for (int i = 1; i < n; i++) {
        x = v[i] > x ? v[i] : x;
    }
    return x;
}

static double least(const double* v, int n) {
    double x = v[0];
    for (int i = 1; i < n; i++) {
        x = v[i] < x ? v[i] : x;
    }
    return x;
}

// what each rank says, in order
static void tell(Rank* k, double all[FO_MAX_RANKS], double own) {
    fo_upload(k->slots + fo_group_rank(k->group), &own, sizeof own, k->comm);
    fo_allgather(k->group, k->slots, sizeof own, k->comm);
    fo_download(all, k->slots, (size_t)k->t->P * sizeof own, k->comm);
    fo_stream_sync(k->comm);
}

// all ranks go on at one moment: after a barrier alone, each would start as late as it wakes up
static void common_start(Rank* k) {
    fo_group_barrier(k->group);
    if (are_processes()) { // their clocks may differ
        k->t->start = fo_now();
        return;
    }
    if (fo_group_rank(k->group) == 0) { k->t->start = fo_now() + 3e-3; }
    fo_group_barrier(k->group);
    for (double left; (left = k->t->start - fo_now()) > 0.0;) {
        struct timespec ts = {0, (long)(left * 1e9)};
        nanosleep(&ts, NULL);
    }
}

static void calibrate(Rank* k) {
    Table* t = k->t;
    const int paced = t->gemm_ms > 0.0;
    double ms[CALIBRATIONS], all[FO_MAX_RANKS];
    for (int part = 0; part < NPARTS; part++) {
        for (int i = -1; i < CALIBRATIONS; i++) { // the first warms up
            common_start(k);
            queue_part(k, part);
            fo_stream_sync(k->compute);
            tell(k, all, 1e3 * (fo_now() - t->start));
            if (i >= 0) { ms[i] = paced ? least(all, t->P) : mean(all, t->P); }
        }
        // what is paced takes its nominal time, and anything above it is a late wake-up
        if (fo_group_rank(k->group) == 0 || are_processes()) {
            t->part_ms[part] = quantile(ms, CALIBRATIONS, paced ? 0.0 : 0.5);
        }
        fo_group_barrier(k->group);
    }
}

// the bandwidth at which communication and compute are in the ratio asked for; by rank 0
static void choose_link(Table* t) {
    if (t->gbytes_s > 0.0) { return; }
    // attention: a collective lasts twice as long as the projection, of which QKV's dgrad is three
    double projection = t->part_ms[SCATTER_SIDE] / (t->op == ATTENTION_BACKWARD ? 3.0 : 1.0);
    double T_ms = t->ratio > 0.0 ? t->ratio * compute_ms(t) : ncollectives(t->op) * 2.0 * projection;
    double shard_s = 1e-3 * T_ms / (ncollectives(t->op) * (t->P - 1)), wire_s = shard_s - 1e-6 * t->us;
    if (wire_s < 0.1 * shard_s) {
        fo_quit(1, "T/W = %g leaves %.1f us a message, latency included: less than a latency of %g us allows",
                t->ratio, 1e6 * shard_s, t->us);
    }
    t->gbytes_s = 1e-9 * (double)(shard_nelem(t) * sizeof(floatX)) / wire_s;
}

static uint64_t hash_bytes(const void* p, size_t nbytes) {
    const unsigned char* b = (const unsigned char*)p;
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < nbytes; i += 4) {
        uint32_t word;
        memcpy(&word, b + i, nbytes - i < 4 ? nbytes - i : 4);
        h = (h ^ word) * 1099511628211u;
    }
    return h;
}

static uint64_t hash_of(Rank* k, const void* p, size_t nbytes, void* host) {
    memset(host, 0xff, nbytes); // NaN
    fo_download(host, p, nbytes, k->compute);
    fo_stream_sync(k->compute);
    return hash_bytes(host, nbytes);
}

// of this rank's output, and of the weight gradients, where there are some
static uint64_t hash_output(Rank* k) {
    const Table* t = k->t;
    const size_t w1 = (size_t)width1(t) * (size_t)t->C, w2 = (size_t)width2(t) * (size_t)t->C;
    const floatX* own = k->all + (size_t)fo_group_rank(k->group) * shard_nelem(t);
    uint64_t h[3] = {hash_of(k, own, shard_nelem(t) * sizeof(floatX), k->host), 0, 0};
    if (is_backward(t->op)) {
        void* host = malloc((w1 > w2 ? w1 : w2) * sizeof(float));
        fo_require(host != NULL, "out of memory");
        h[1] = hash_of(k, k->dw1, w1 * sizeof(float), host);
        h[2] = hash_of(k, k->dw2, w2 * sizeof(float), host);
        free(host);
    }
    return hash_bytes(h, sizeof h);
}

static void start_mode(Rank* k, int i) {
    Table* t = k->t;
    const int r = fo_group_rank(k->group);
    const size_t w1 = (size_t)width1(t) * (size_t)t->C, w2 = (size_t)width2(t) * (size_t)t->C;
    const size_t nbytes = shard_nelem(t) * sizeof(floatX);
    fo_upload(k->all + (size_t)r * shard_nelem(t), k->x, nbytes, k->compute);
    if (is_backward(t->op)) {
        fo_upload(k->again + (size_t)r * shard_nelem(t), k->x, nbytes, k->compute);
        fo_zero(k->dw1, w1 * sizeof(float), k->compute);
        fo_zero(k->dw2, w2 * sizeof(float), k->compute);
    }
    fo_stream_sync(k->compute);
    reset_mode(k, i);
}

// L layers under mode i; round -1 only warms up
static void run_mode(Rank* k, int i, int round) {
    Table* t = k->t;
    double ms[FO_MAX_RANKS], exposed[FO_MAX_RANKS], halves[2][FO_MAX_RANKS];
    start_mode(k, i);
    common_start(k);
    for (int l = 0; l < t->L; l++) {
        queue_layer(k, i);
    }
    fo_stream_sync(k->compute);
    const double took = 1e3 * (fo_now() - t->start) / t->L;
    fo_stream_sync(k->comm);
    const uint64_t own = hash_output(k);
    tell(k, ms, took);
    tell(k, exposed, exposed_of(k, i) / t->L);
    tell(k, halves[0], (double)(own >> 32)); // a double holds half of it
    tell(k, halves[1], (double)(uint32_t)own);
    if (fo_group_rank(k->group) != 0) { return; }
    uint64_t hash = hash_bytes(halves[0], (size_t)t->P * sizeof(double)) * 31 +
                    hash_bytes(halves[1], (size_t)t->P * sizeof(double));
    if (round < 0) {
        t->hash[i] = hash;
        t->same_bits[i] = 1;
    } else {
        t->layer_ms[i][round] = largest(ms, t->P);
        t->exposed_ms[i][round] = mean(exposed, t->P);
    }
    t->same_bits[i] &= hash == t->hash[0];
}

typedef struct {
    double now, machine, own; // seconds; CPU seconds of all cores, of this process
} Load;

static Load load_now(void) {
    Load l = {fo_now(), 0.0, 0.0};
    double v[7] = {0}; // user nice system idle iowait irq softirq
    FILE* f = fopen("/proc/stat", "r");
    if (f && fscanf(f, "cpu %lf %lf %lf %lf %lf %lf %lf", v, v + 1, v + 2, v + 3, v + 4, v + 5, v + 6) == 7) {
        l.machine = (v[0] + v[1] + v[2] + v[5] + v[6]) / (double)sysconf(_SC_CLK_TCK);
    }
    if (f) { fclose(f); }
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    l.own = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
            1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    return l;
}

// what joins the ranks: as it was measured, or emulated
static void set_link(Rank* k) {
    Table* t = k->t;
    double all[FO_MAX_RANKS];
    if (t->network) {
        const size_t nbytes = 1 << 20;
        fo_group_measure(k->group, k->comm);
        t->us = 1e6 * fo_group_message_s(k->group, 0);
        t->gbytes_s = 1e-9 * (double)nbytes / (fo_group_message_s(k->group, nbytes) - 1e-6 * t->us);
        return;
    }
    if (fo_group_rank(k->group) == 0) { choose_link(t); }
    tell(k, all, t->gbytes_s);
    fo_group_barrier(k->group);
    if (are_processes()) { t->gbytes_s = all[0]; }
    fo_group_link(k->group, t->gbytes_s, t->us);
}

// the backward pass of attention reads what the forward pass has written
static void prepare(Rank* k) {
    FoOverlap* forward[NSTEPS] = {NULL};
    const Table* t = k->t;
    if (!is_backward(t->op)) { return; }
    fo_upload(k->all + (size_t)fo_group_rank(k->group) * shard_nelem(t), k->x,
              shard_nelem(t) * sizeof(floatX), k->compute);
    for (int step = 0; step < NSTEPS; step += 2) {
        forward[step] = fo_overlap_create("forward", step == SCATTER ? FO_REDUCESCATTER : FO_ALLGATHER,
                                          FO_NONE, 1, FO_DIRECT, k->group, k->compute, k->comm);
    }
    queue_forward(k, forward, 0);
    for (int step = 0; step < NSTEPS; step += 2) {
        fo_overlap_destroy(forward[step]);
    }
}

static void rank_body(FoGroup* g, void* arg) {
    Table* t = (Table*)arg;
    Rank* k = calloc(1, sizeof *k);
    fo_require(k != NULL, "out of memory");
    k->t = t, k->group = g;
    k->device = fo_device_open(fo_group_rank(g), fo_group_nlocal(g));
    open_layer(k);
    prepare(k);
    if (t->gemm_ms > 0.0) {
        fo_device_pace(k->device, 2.0 * (double)t->N * t->C * width2(t) / (1e-3 * t->gemm_ms) / 1e12);
    }
    calibrate(k);
    if (fo_group_rank(g) == 0) { snprintf(t->device, sizeof t->device, "%s", fo_device_name(k->device)); }
    set_link(k);
    open_modes(k);
    for (int i = 0; i < t->nmodes; i++) {
        run_mode(k, i, -1);
    }
    Load before = load_now();
    for (int round = 0; round < t->rounds; round++) { // each mode takes each place in turn
        for (int i = 0; i < t->nmodes; i++) {
            run_mode(k, (i + round) % t->nmodes, round);
        }
    }
    Load after = load_now();
    double own[FO_MAX_RANKS];
    tell(k, own, after.own - before.own);
    if (fo_group_rank(g) == 0) {
        const double ours = are_processes() ? mean(own, t->P) * t->P : own[0];
        t->seconds = after.now - before.now;
        t->foreign_cores = (after.machine - before.machine - ours) / t->seconds;
    }
    close_layer(k);
    fo_device_close(k->device);
    free(k);
}

// ---- report -----------------------------------------------------------------------------------------------
static double layer_median(const Table* t, int i) {
    return quantile(t->layer_ms[i], t->rounds, 0.5);
}
static double exposed_median(const Table* t, int i) {
    return quantile(t->exposed_ms[i], t->rounds, 0.5);
}

// place of the mode of that name, or -1
static int find_mode(const Table* t, const char* name) {
    for (int i = 0; i < t->nmodes; i++) {
        if (strcmp(t->modes[i].name, name) == 0) { return i; }
    }
    return -1;
}

static const char* const LEGEND =
    "# One layer's forward or backward pass. Ranks are threads over an emulated link, or processes. ms a "
    "layer.\n"
    "#   layer    by the wall clock, start to end, slowest rank; median of the rounds, and p25..p75\n"
    "#   vs none  layer / that of mode none - 1\n"
    "#   over W   layer - W: with the owner's sum, and this machine's lateness, in it\n"
    "#   exposed  the compute stream stood waiting for messages, mean over ranks; median, p25..p75. Paced:\n"
    "#            on the stream's virtual clock, which forgives a late wake-up that is made up for\n"
    "#   of none  exposed / that of mode none; the rest is hidden\n"
    "#   model    exposed as fo_model.h predicts it from the parts and the link named above the table\n"
    "#   bits     all ranks' output has the same bits as the first mode's, in every round\n"
    "# paced    each GEMM and attention takes max(its real time, flops / rate). Arithmetic, messages, bits\n"
    "#          and schedule are real; unpaced: the machine as it is\n"
    "# W        the layer without communication: each part alone, timed in this process 5 times just before\n"
    "#          (paced the least, unpaced the median). T: both collectives on the link\n"
    "# foreign  cores that other processes kept busy during the rounds\n";

static void print_machine(const Table* t) {
    struct utsname u;
    char date[32];
    time_t now = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%d", localtime(&now));
    uname(&u);
    printf("# %s, %ld cores: %s; %s %s\n", date, sysconf(_SC_NPROCESSORS_ONLN), t->device, u.sysname,
           u.release);
}

static void print_table(const Table* t) {
    int none = find_mode(t, "none");
    printf("\n# %s, %s: P=%d N=%zu C=%d", op_name(t->op), t->gemm_ms > 0.0 ? "paced" : "unpaced", t->P, t->N,
           t->C);
    if (!is_mlp(t->op)) { printf(" T=%d heads=%d", layout(t).T, t->C / HEAD_SIZE); }
    printf(" L=%d, %s, %d rounds, modes taking turns; foreign %.2f cores; %.1f s\n", t->L,
           t->topology == FO_DIRECT ? "direct" : "ring", t->rounds, t->foreign_cores, t->seconds);
    static const char* const parts[NOPS][OWNERS_SUM] = {
        {"fc1 and GELU", NULL, NULL, "fc2", NULL},
        {"QKV", "attention", NULL, "projection", NULL},
        {"fc2 dgrad and GELU's", NULL, "fc2 wgrad", "fc1 dgrad", "fc1 wgrad"},
        {"projection dgrad", "attention's", "projection wgrad", "QKV dgrad", "QKV wgrad"}};
    printf("# W %.2f ms", compute_ms(t));
    for (int part = 0, first = 1; part < OWNERS_SUM; part++) {
        if (!parts[t->op][part]) { continue; }
        printf("%s %s %.2f", first ? " =" : ",", parts[t->op][part], t->part_ms[part]);
        first = 0;
    }
    printf("; not in it: the owner's sum %.2f\n", t->part_ms[OWNERS_SUM]);
    printf("# %s %.4f GB/s, %.0f us: T %.2f ms, T/W %.3f; a shard's message %.2f ms (%zu KiB)\n",
           t->network ? "network, as measured:" : "link", t->gbytes_s, t->us, collectives_ms(t),
           collectives_ms(t) / compute_ms(t), shard_ms(t, 1), shard_nelem(t) * sizeof(floatX) / 1024);
    printf("%-9s %8s %16s %8s %7s %8s %14s %8s %7s %5s\n", "mode", "layer", "p25..p75", "vs none", "over W",
           "exposed", "p25..p75", "of none", "model", "bits");
    for (int i = 0; i < t->nmodes; i++) {
        const double *layers = t->layer_ms[i], *waits = t->exposed_ms[i];
        double layer = layer_median(t, i), exposed = exposed_median(t, i);
        printf("%-9s %8.2f %7.2f..%-7.2f %+7.1f%% %7.2f %8.2f %6.2f..%-6.2f %7.1f%% %7.2f %5s\n",
               t->modes[i].name, layer, quantile(layers, t->rounds, 0.25), quantile(layers, t->rounds, 0.75),
               none < 0 ? NAN : 100.0 * (layer / layer_median(t, none) - 1.0), layer - compute_ms(t), exposed,
               quantile(waits, t->rounds, 0.25), quantile(waits, t->rounds, 0.75),
               none < 0 ? NAN : 100.0 * exposed / exposed_median(t, none), predicted_ms(t, &t->modes[i]),
               t->same_bits[i] ? "same" : "DIFF");
    }
    fflush(stdout);
}

// ---- demands ----------------------------------------------------------------------------------------------
typedef enum { EXPOSED_OF, EXPOSED_OF_T, LAYER_OF, OFF_MODEL } Measure;

// what is demanded of a table: a measure of one mode, in relation to that of another
typedef struct {
    Op op;
    int paced;
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
    {MLP, 1, "flash:1", EXPOSED_OF, "none", 0, 0.08},
    {MLP, 1, "flash:2", EXPOSED_OF, "none", 0, 0.05},
    {MLP, 1, "flash:1", LAYER_OF, "none", 0, 0.70},
    {MLP, 1, "flash:2", LAYER_OF, "none", 0, 0.70},
    {MLP, 1, "slice:4", LAYER_OF, "flash:1", 1, 1.08},
    {MLP, 1, "slice:4", EXPOSED_OF, "none", 0, 0.40},
    {MLP, 1, "none", EXPOSED_OF_T, "T", 0, 1.15},
    {ATTENTION, 1, "flash:1", EXPOSED_OF, "none", 0, 0.05},
    {ATTENTION, 1, "flash:2", EXPOSED_OF, "none", 0, 0.05},
    {ATTENTION, 1, "row:1", EXPOSED_OF, "none", 1, 0.20},
    {ATTENTION, 1, "row:1", OFF_MODEL, "T", 0, 0.05},
    {ATTENTION, 1, "none", EXPOSED_OF_T, "T", 0, 1.15},
    {MLP_BACKWARD, 1, "flash:1", EXPOSED_OF, "none", 0, 0.08},
    {MLP_BACKWARD, 1, "flash:2", EXPOSED_OF, "none", 0, 0.05},
    {MLP_BACKWARD, 1, "none", EXPOSED_OF_T, "T", 0, 1.15},
    {ATTENTION_BACKWARD, 1, "flash:1", EXPOSED_OF, "none", 0, 0.08},
    {ATTENTION_BACKWARD, 1, "flash:2", EXPOSED_OF, "none", 0, 0.05},
    {ATTENTION_BACKWARD, 1, "none", EXPOSED_OF_T, "T", 0, 1.15},
    {MLP, 0, "flash:2", LAYER_OF, "none", 0, 0.92},
};
enum { NDEMANDS = sizeof DEMANDS / sizeof *DEMANDS };

static int verdict(const Table* t, const char* what, double value, const char* relation, double limit,
                   int ok) {
    printf("%-18s %-7s  %-44s %8.1f %%  %s %5.1f %%  %s\n", op_name(t->op),
           t->gemm_ms > 0.0 ? "paced" : "unpaced", what, 100.0 * value, relation, 100.0 * limit,
           ok ? "ok" : "FAILED");
    return !ok;
}

// prints each demand on the table that its modes allow; returns how many failed
static int judge(const Table* t) {
    int failed = 0, differ = 0;
    for (int i = 0; i < t->nmodes; i++) {
        differ += !t->same_bits[i];
    }
    for (int j = 0; j < NDEMANDS; j++) {
        const Demand* d = &DEMANDS[j];
        int i = find_mode(t, d->mode), of = find_mode(t, d->of);
        if (d->op != t->op || d->paced != (t->gemm_ms > 0.0)) { continue; }
        if (i < 0 || (of < 0 && strcmp(d->of, "T") != 0)) { continue; }
        char what[64];
        double value = 0.0;
        switch (d->measure) {
        case EXPOSED_OF: value = exposed_median(t, i) / exposed_median(t, of); break;
        case EXPOSED_OF_T: value = exposed_median(t, i) / collectives_ms(t); break;
        case LAYER_OF: value = layer_median(t, i) / layer_median(t, of); break;
        case OFF_MODEL:
            value = fabs(exposed_median(t, i) - predicted_ms(t, &t->modes[i])) / collectives_ms(t);
            break;
        }
        snprintf(what, sizeof what, "%s of %s %s %s",
                 d->measure == LAYER_OF    ? "layer"
                 : d->measure == OFF_MODEL ? "model's error"
                                           : "exposed",
                 d->mode, d->measure == OFF_MODEL ? "over" : "over that of", d->of);
        int ok = d->at_least ? value >= d->limit : value <= d->limit;
        failed += verdict(t, what, value, d->at_least ? "at least" : "at most ", d->limit, ok);
    }
    failed += verdict(t, "modes whose bits differ", (double)differ / t->nmodes, "at most ", 0.0, differ == 0);
    return failed;
}

// ---- JSON -------------------------------------------------------------------------------------------------
static void write_list(FILE* f, const char* name, const double* v, int n) {
    fprintf(f, "\"%s\": [", name);
    for (int i = 0; i < n; i++) {
        fprintf(f, "%s%.4f", i ? ", " : "", v[i]);
    }
    fprintf(f, "]");
}

static void write_json(FILE* f, const Table* tables, int n) {
    fprintf(f, "[");
    for (int j = 0; j < n; j++) {
        const Table* t = &tables[j];
        fprintf(
            f,
            "%s\n{\"op\": \"%s\", \"paced\": %s, \"P\": %d, \"N\": %zu, \"C\": %d, \"L\": %d, \"topology\": "
            "\"%s\", "
            "\"device\": \"%s\",\n \"link_gbytes_s\": %.6f, \"link_us\": %g, \"W_ms\": %.4f, \"T_ms\": %.4f, "
            "\"network\": %s, \"foreign_cores\": %.3f, \"modes\": [",
            j ? "," : "", op_name(t->op), t->gemm_ms > 0.0 ? "true" : "false", t->P, t->N, t->C, t->L,
            t->topology == FO_DIRECT ? "direct" : "ring", t->device, t->gbytes_s, t->us, compute_ms(t),
            collectives_ms(t), t->network ? "true" : "false", t->foreign_cores);
        for (int i = 0; i < t->nmodes; i++) {
            fprintf(f, "%s\n  {\"mode\": \"%s\", \"predicted_ms\": %.4f, \"same_bits\": %s,\n   ",
                    i ? "," : "", t->modes[i].name, predicted_ms(t, &t->modes[i]),
                    t->same_bits[i] ? "true" : "false");
            write_list(f, "layer_ms", t->layer_ms[i], t->rounds);
            fprintf(f, ",\n   ");
            write_list(f, "exposed_ms", t->exposed_ms[i], t->rounds);
            fprintf(f, "}");
        }
        fprintf(f, "]}");
    }
    fprintf(f, "\n]\n");
}

// ---- options ----------------------------------------------------------------------------------------------
static const char* const HELP =
    "usage: bench_overlap [options]      without options: the paced MLP and attention layers at P=4, forward "
    "and\n"
    "                                    backward, the unpaced MLP layer at P=2, and what is demanded of "
    "them\n"
    "Ranks are threads over an emulated link. Under mpirun they are processes; without --ratio and --link "
    "they then\n"
    "use the network as it is, of which the link's figures are measured.\n"
    "  --op OP                 mlp, attention (forward passes), mlp-backward, attention-backward, or all\n"
    "  --unpaced               the machine as it is (default sizes: P=2, N=2048, C=1024, 11 rounds)\n"
    "  --gemm-ms MS            paced: fc1, fc2 (default 20) or the projection (default 10) lasts so long for "
    "all rows\n"
    "  --ranks P               2 to 16\n"
    "  --tokens N              rows of the group; attention: one sequence of N/P a rank\n"
    "  --channels C            attention: in heads of 64\n"
    "  --layers L              chained without a barrier (default 2)\n"
    "  --ratio R               link chosen for T/W = R (default 0.558, backward 0.4185; attention: a "
    "collective = 2 x "
    "projection)\n"
    "  --link GBPS,US          this link instead: 10^9 bytes a second, microseconds a message\n"
    "  --topology direct|ring\n"
    "  --rounds N              1 to 200 (default 7; unpaced 11)\n"
    "  --modes LIST            of none, slice:M, flash:M and, for attention, row:M (flash without query "
    "split)\n"
    "  --json FILE             every round's figures\n"
    "  --check                 exit status 1 if a demand is not met; without --modes, unpaced, only the "
    "modes demanded\n";

typedef struct {
    const char *op, *modes, *json;
    int unpaced, check, help, sized;     // sized: an option was given that changes what is measured
    int ranks, channels, layers, rounds; // 0: default
    size_t tokens;
    double gemm_ms, ratio, gbytes_s, us;
    FoTopology topology;
} Options;

static long parse_long(const char* option, const char* s, long low, long high) {
    char* end;
    errno = 0;
    long v = strtol(s, &end, 10);
    if (errno || end == s || *end || v < low || v > high) {
        fo_quit(1, "%s %s: want a whole number from %ld to %ld", option, s, low, high);
    }
    return v;
}

static double parse_double(const char* option, const char* s, double low, double high, const char** rest) {
    char* end;
    double v = strtod(s, &end);
    if (end == s || (rest ? *end != ',' : *end != 0) || !(v >= low && v <= high)) {
        fo_quit(1, "%s %s: want %s from %g to %g", option, s,
                rest ? "two numbers with a comma, the first" : "a number", low, high);
    }
    if (rest) { *rest = end + 1; }
    return v;
}

// returns how many arguments option i takes
static int parse_option(Options* o, int argc, char** argv, int i) {
    const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
    if (strcmp(a, "--unpaced") == 0) { return o->unpaced = 1; }
    if (strcmp(a, "--check") == 0) { return o->check = 1; }
    if (strcmp(a, "--help") == 0) { return o->help = 1; }
    static const char* const known[] = {"--op",       "--gemm-ms", "--ranks", "--tokens",
                                        "--channels", "--layers",  "--ratio", "--link",
                                        "--topology", "--rounds",  "--modes", "--json"};
    size_t n = 0;
    while (n < sizeof known / sizeof *known && strcmp(a, known[n]) != 0) {
        n++;
    }
    if (n == sizeof known / sizeof *known) {
        fo_quit(1, "unknown option %s: bench_overlap --help lists them", a);
    }
    if (!v) { fo_quit(1, "%s needs a value: bench_overlap --help says which", a); }
    o->sized |= strcmp(a, "--op") != 0 && strcmp(a, "--rounds") != 0 && strcmp(a, "--json") != 0;
    if (strcmp(a, "--op") == 0) {
        int known_op = strcmp(v, "all") == 0;
        for (int op = 0; op < NOPS; op++) {
            known_op |= strcmp(v, op_name((Op)op)) == 0;
        }
        if (!known_op) {
            fo_quit(1, "--op %s: want mlp, attention, mlp-backward, attention-backward or all", v);
        }
        o->op = v;
    } else if (strcmp(a, "--gemm-ms") == 0) {
        o->gemm_ms = parse_double(a, v, 0.01, 1e5, NULL);
    } else if (strcmp(a, "--ranks") == 0) {
        o->ranks = (int)parse_long(a, v, 2, FO_MAX_RANKS);
    } else if (strcmp(a, "--tokens") == 0) {
        o->tokens = (size_t)parse_long(a, v, 1, 1 << 24);
    } else if (strcmp(a, "--channels") == 0) {
        o->channels = (int)parse_long(a, v, 1, 1 << 16);
    } else if (strcmp(a, "--layers") == 0) {
        o->layers = (int)parse_long(a, v, 1, 1000);
    } else if (strcmp(a, "--rounds") == 0) {
        o->rounds = (int)parse_long(a, v, 1, MAX_ROUNDS);
    } else if (strcmp(a, "--ratio") == 0) {
        o->ratio = parse_double(a, v, 0.001, 100.0, NULL);
    } else if (strcmp(a, "--link") == 0) {
        o->gbytes_s = parse_double(a, v, 1e-6, 1e4, &v);
        o->us = parse_double(a, v, 0.0, 1e6, NULL);
    } else if (strcmp(a, "--topology") == 0) {
        if (strcmp(v, "direct") != 0 && strcmp(v, "ring") != 0) {
            fo_quit(1, "--topology %s: want direct or ring", v);
        }
        o->topology = strcmp(v, "ring") == 0 ? FO_RING : FO_DIRECT;
    } else {
        *(strcmp(a, "--modes") == 0 ? &o->modes : &o->json) = v;
    }
    return 2;
}

static void parse_modes(Table* t, const char* list) {
    for (const char* s = list; *s;) {
        size_t n = strcspn(s, ",");
        Mode* m = &t->modes[t->nmodes];
        if (t->nmodes == MAX_MODES) { fo_quit(1, "--modes %s: more than %d", list, MAX_MODES); }
        if (n == 0 || n >= sizeof m->name) {
            fo_quit(1, "--modes %s: want names with a comma between two", list);
        }
        memcpy(m->name, s, n);
        m->name[n] = 0;
        const char* colon = strchr(m->name, ':');
        size_t stem = colon ? (size_t)(colon - m->name) : n;
        m->m = colon ? (int)parse_long("--modes", colon + 1, 1, FO_MAX_M) : 1;
        int row = t->op == ATTENTION && stem == 3 && strncmp(m->name, "row", 3) == 0;
        if (stem == 5 && strncmp(m->name, "slice", 5) == 0 && colon) {
            m->mode = FO_SLICE;
        } else if (((stem == 5 && strncmp(m->name, "flash", 5) == 0) || row) && colon) {
            m->mode = FO_FLASH;
            m->query_split = t->op == ATTENTION && !row;
        } else if (strcmp(m->name, "none") != 0) {
            fo_quit(1, "--modes %s: want none, slice:M, flash:M%s", m->name,
                    t->op == ATTENTION ? " or row:M" : "");
        }
        if (find_mode(t, m->name) >= 0) { fo_quit(1, "--modes %s: %s stands there twice", list, m->name); }
        t->nmodes++;
        s += n + (s[n] == ',');
    }
    if (t->nmodes == 0) { fo_quit(1, "--modes '': want a list such as none,slice:4,flash:1"); }
}

// what the sizes must be multiples of
static void check_sizes(const Table* t) {
    for (int i = 0; i < t->nmodes; i++) {
        size_t unit = (size_t)(t->P * t->modes[i].m);
        if (t->N % unit != 0) {
            fo_quit(1, "--tokens %zu: mode %s on %d ranks wants a multiple of %zu, such as %zu", t->N,
                    t->modes[i].name, t->P, unit, (t->N / unit + 1) * unit);
        }
    }
    int unit = is_mlp(t->op) ? t->P : HEAD_SIZE * t->P;
    if (t->C % unit != 0) {
        fo_quit(1, "--channels %d: %s on %d ranks wants a multiple of %d, such as %d", t->C, op_name(t->op),
                t->P, unit, (t->C / unit + 1) * unit);
    }
}

static void init_table(Table* t, const Options* o, Op op, int unpaced) {
    const char* modes =
        op == ATTENTION ? "none,slice:4,row:1,flash:1,flash:2" : "none,slice:4,slice:8,flash:1,flash:2";
    if (unpaced && op == MLP) { modes = o->check ? "none,flash:2" : "none,slice:4,flash:1,flash:2"; }
    t->op = op;
    t->P = o->ranks ? o->ranks : are_processes() ? fo_ranks_launched() : unpaced ? 2 : 4;
    // paced sizes keep the cores mostly idle, so that a neighbour does no harm; unpaced ones keep the GEMMs
    // efficient
    t->N = unpaced ? 2048 : is_mlp(op) ? 1024 : 512 * (size_t)t->P;
    t->N -= t->N % (size_t)(8 * t->P);
    t->C = unpaced ? 1024 : 256;
    if (t->C % (HEAD_SIZE * t->P) != 0 && (!is_mlp(op) || t->C % t->P != 0)) { t->C = HEAD_SIZE * t->P; }
    if (o->tokens) { t->N = o->tokens; }
    if (o->channels) { t->C = o->channels; }
    t->B = t->P; // a sequence a shard
    t->L = o->layers ? o->layers : 2;
    t->rounds = o->rounds ? o->rounds : unpaced ? 11 : 7;
    t->gemm_ms = unpaced ? 0.0 : o->gemm_ms > 0.0 ? o->gemm_ms : is_mlp(op) ? 20.0 : 10.0;
    // a backward pass has three collectives and twice the GEMMs: the same link as the forward pass
    t->ratio = o->ratio > 0.0 ? o->ratio : op == MLP ? 0.558 : op == MLP_BACKWARD ? 0.75 * 0.558 : 0.0;
    t->network = are_processes() && !(o->ratio > 0.0) && !(o->gbytes_s > 0.0);
    t->gbytes_s = o->gbytes_s;
    t->us = o->gbytes_s > 0.0 ? o->us : 20.0;
    t->topology = o->topology;
    parse_modes(t, o->modes ? o->modes : modes);
    check_sizes(t);
}

static int choose_tables(Table* tables, const Options* o) {
    int n = 0, all = !o->op || strcmp(o->op, "all") == 0,
        suite = !o->op && !o->unpaced && !o->sized && !are_processes();
    if (are_processes() && o->ranks && o->ranks != fo_ranks_launched()) {
        fo_quit(1, "--ranks %d: %d processes were started, each of which is a rank", o->ranks,
                fo_ranks_launched());
    }
    if (o->check && o->rounds > 0 && o->rounds < 7) {
        fo_quit(1, "--check --rounds %d: want at least 7 rounds", o->rounds);
    }
    if (o->unpaced && o->gemm_ms > 0.0) { fo_quit(1, "--unpaced and --gemm-ms: want one of them"); }
    if (o->ratio > 0.0 && o->gbytes_s > 0.0) { fo_quit(1, "--ratio and --link: want one of them"); }
    for (int op = 0; op < NOPS; op++) {
        if (all || strcmp(o->op, op_name((Op)op)) == 0) { init_table(&tables[n++], o, (Op)op, o->unpaced); }
    }
    if (suite) { init_table(&tables[n++], o, MLP, 1); }
    return n;
}

int main(int argc, char** argv) {
    Options o = {0};
    for (int i = 1; i < argc;) {
        i += parse_option(&o, argc, argv, i);
    }
    if (o.help) {
        printf("%s", HELP);
        return 0;
    }
    Table* tables = calloc(MAX_TABLES, sizeof *tables);
    fo_require(tables != NULL, "out of memory");
    int n = choose_tables(tables, &o), failed = 0;
    const int speaks = fo_launch_speaks();
    FILE* json = o.json && speaks ? fopen(o.json, "w") : NULL; // now, not after a minute of measuring
    if (o.json && speaks && !json) { fo_quit(1, "--json %s: %s", o.json, strerror(errno)); }
    if (speaks) { printf("%s", LEGEND); }
    for (int j = 0; j < n; j++) {
        fo_ranks_run(tables[j].P, rank_body, &tables[j]);
        if (j == 0 && speaks) { print_machine(&tables[j]); }
        if (speaks) { print_table(&tables[j]); }
    }
    if (speaks && (!o.sized || o.check)) {
        printf("\n# demands\n");
        for (int j = 0; j < n; j++) {
            failed += judge(&tables[j]);
        }
    }
    if (json) {
        write_json(json, tables, n);
        if (fclose(json) != 0) { fo_quit(1, "--json %s: %s", o.json, strerror(errno)); }
    }
    free(tables);
    return o.check && failed > 0;
}
