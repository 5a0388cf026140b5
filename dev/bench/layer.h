/* layer.h -- the layers of bench_overlap.c: a transformer layer's halves, forward and backward, on the
 * primitives of fo_overlap.h, in the order in which train_gpt.cu calls them. The bench measures them;
 * dev/sim/predict_layer.c runs them on a simulated device.
 */
#ifndef LAYER_H
#define LAYER_H
#include "flashoverlap/fo_model.h"
#include "flashoverlap/fo_overlap.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_MODES = 12, MAX_ROUNDS = 200, MAX_TABLES = 5, HEAD_SIZE = 64, CALIBRATIONS = 5 };

typedef enum { MLP, ATTENTION, MLP_BACKWARD, ATTENTION_BACKWARD, NOPS } Op;

typedef struct {
    char name[24]; // as on the command line
    FoMode mode;
    int m;
    int query_split; // attention: its queries are computed chunk by chunk, with the projection
} Mode;

/* Parts of a layer's computation, each timed alone before the rounds. Forward: fc1 and GELU, or QKV;
 * attention; fc2, or the projection. Backward: what the first gather hides under (dgrad of fc2 and GELU's, or
 * of the projection, and attention's); weight gradient of fc2 or the projection, under the second; dgrad of
 * fc1 or QKV, whose sums are scattered; their weight gradient, behind it.
 */
enum { GATHER_SIDE, ATTENTION_ITSELF, WGRAD_BETWEEN, SCATTER_SIDE, WGRAD_AFTER, OWNERS_SUM, NPARTS };

// collectives of a layer, in order. A forward pass has no second gather
enum { GATHER, GATHER_AGAIN, SCATTER, NSTEPS };

typedef struct {
    // what is measured
    Op op;
    int P, B, C, L, rounds, nmodes; // B: sequences
    size_t N;
    double gemm_ms;      // a fc1, fc2 or projection GEMM of all rows lasts so long; 0: unpaced
    double ratio;        // T/W; 0: the reduce-scatter lasts twice as long as the projection
    double gbytes_s, us; // 0 GB/s: from ratio, or on a network as it was measured
    int network;         // ranks are processes and the link is what joins them
    FoTopology topology;
    Mode modes[MAX_MODES];
    double start; // common start of a run, seconds; rank 0 writes
    // results, written by rank 0
    double part_ms[NPARTS]; // paced: the least; unpaced: median of the mean over ranks
    double layer_ms[MAX_MODES][MAX_ROUNDS], exposed_ms[MAX_MODES][MAX_ROUNDS];
    uint64_t hash[MAX_MODES]; // of all ranks' output
    int same_bits[MAX_MODES]; // in every run, as the first mode's
    double foreign_cores, seconds;
    char device[160];
} Table;

// one rank's part of it
typedef struct {
    Table* t;
    FoGroup* group;
    FoDevice* device;
    FoStream *compute, *comm;
    FoOverlap* o[MAX_MODES][NSTEPS];
    floatX* x;         // [N/P, C], the layer's input, in host memory
    floatX* all;       // [N, C]
    floatX* again;     // [N, C], backward: what the weight gradients are with
    floatX *w1, *w2;   // [4C/P or 3C/P, C], [C, 4C/P or C/P]
    floatX *pre, *act; // [N, 4C/P]; attention: qkv [N, 3C/P] and att [N, C/P]
    floatX *dpre, *dact;
    float *dw1, *dw2;
    float* lse;    // [N, NH/P]
    floatX* host;  // [N/P, C], output
    double* slots; // [P], what ranks tell each other
    FoStaging st;
} Rank;

static inline const char* op_name(Op op) {
    static const char* const names[NOPS] = {"mlp", "attention", "mlp-backward", "attention-backward"};
    return names[op];
}
static inline int is_mlp(Op op) {
    return op == MLP || op == MLP_BACKWARD;
}
static inline int is_backward(Op op) {
    return op == MLP_BACKWARD || op == ATTENTION_BACKWARD;
}
static inline int has_step(Op op, int step) {
    return step != GATHER_AGAIN || is_backward(op);
}
static inline int ncollectives(Op op) {
    return is_backward(op) ? 3 : 2;
}

static inline size_t shard_nelem(const Table* t) {
    return t->N / (size_t)t->P * (size_t)t->C;
}

// columns of the first matmul, and the width that the second sums over
static inline int width1(const Table* t) {
    return (is_mlp(t->op) ? 4 : 3) * t->C / t->P;
}
static inline int width2(const Table* t) {
    return (is_mlp(t->op) ? 4 : 1) * t->C / t->P;
}

static inline FoLayout layout(const Table* t) {
    FoLayout l = {t->B, (int)(t->N / (size_t)t->B), t->P, 0}; // a shard is whole sequences
    return l;
}
static inline int heads(const Table* t) {
    return t->C / HEAD_SIZE / t->P;
}

// ---- the layer --------------------------------------------------------------------------------------------
static inline void fc1_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    const Rank* k = (const Rank*)ctx;
    size_t C = (size_t)k->t->C, w = (size_t)width1(k->t), at = row0 * w;
    fo_matmul_forward(k->pre + at, k->all + row0 * C, k->w1, NULL, n, (int)C, (int)w, FO_FLOATX, s);
    if (is_mlp(k->t->op)) { fo_gelu_forward(k->act + at, k->pre + at, n * w, s); }
}

static inline void queue_forward(Rank* k, FoOverlap* const o[NSTEPS], int query_split) {
    const Table* t = k->t;
    fo_allgather_run(o[GATHER], k->all, (size_t)t->C * sizeof(floatX), t->N, fc1_chunk, k); // F1, F3
    if (is_mlp(t->op)) {
        fo_matmul_reducescatter_forward(&k->st, k->act, k->w2, t->N, width2(t), t->C, o[SCATTER]); // F4
    } else {
        fo_attention_matmul_reducescatter_forward(&k->st, k->act, k->lse, k->pre, k->w2, layout(t), heads(t),
                                                  HEAD_SIZE, t->C, query_split, o[SCATTER]); // F2
    }
}

static inline void wgrad_between(Rank* k) {
    const Table* t = k->t;
    fo_matmul_wgrad(k->dw2, NULL, k->all, k->act, t->N, width2(t), t->C, k->compute);
}
static inline void wgrad_after(Rank* k) {
    const Table* t = k->t;
    fo_matmul_wgrad(k->dw1, NULL, k->dpre, k->again, t->N, t->C, width1(t), k->compute);
}

static inline void queue_backward(Rank* k, FoOverlap* const o[NSTEPS]) {
    const Table* t = k->t;
    fo_overlap_mark(o[GATHER_AGAIN]);
    if (is_mlp(t->op)) { // B1, B4
        fo_allgather_matmul_dgrad(k->dpre, k->all, k->pre, k->w2, t->N, width2(t), t->C, o[GATHER]);
    } else {
        fo_allgather_matmul_attention_backward(k->dpre, k->dact, k->all, k->w2, k->pre, k->act, k->lse,
                                               layout(t), heads(t), HEAD_SIZE, t->C, o[GATHER]);
    }
    fo_allgather_begin(o[GATHER_AGAIN], k->again, (size_t)t->C * sizeof(floatX), t->N); // B2, B5
    wgrad_between(k);
    fo_matmul_reducescatter_dgrad(&k->st, k->dpre, k->w1, t->N, t->C, width1(t), o[SCATTER]); // B3, B6
    fo_allgather_end(o[GATHER_AGAIN]);
    wgrad_after(k);
}

static inline void queue_layer(Rank* k, int i) {
    const Table* t = k->t;
    if (is_backward(t->op)) {
        queue_backward(k, k->o[i]);
    } else {
        queue_forward(k, k->o[i], t->modes[i].query_split);
    }
    floatX* own = k->all + (size_t)fo_group_rank(k->group) * shard_nelem(t);
    fo_reducescatter_end(k->o[i][SCATTER], &k->st, own, NULL, NULL, t->C, t->N);
}

// the part of `rows` rows from row0 on, as mode none computes it
static inline void queue_rows(Rank* k, int part, size_t row0, size_t rows) {
    const Table* t = k->t;
    const size_t C = (size_t)t->C, w1 = (size_t)width1(t), w2 = (size_t)width2(t);
    floatX* out = (floatX*)k->st.partial + row0 * C;
    switch (part) {
    case GATHER_SIDE:
        if (!is_backward(t->op)) {
            fc1_chunk(k, row0, rows, k->compute);
            break;
        }
        if (is_mlp(t->op)) {
            floatX* d = k->dpre + row0 * w2;
            fo_matmul_dgrad(d, k->all + row0 * C, k->w2, rows, (int)w2, t->C, FO_FLOATX, k->compute);
            fo_gelu_backward(d, d, k->pre + row0 * w2, rows * w2, k->compute);
        } else {
            fo_matmul_dgrad(k->dact + row0 * w2, k->all + row0 * C, k->w2, rows, (int)w2, t->C, FO_FLOATX,
                            k->compute);
        }
        break;
    case ATTENTION_ITSELF:
        if (t->op == ATTENTION) {
            fo_attention_forward(k->act, k->lse, k->pre, row0, rows, layout(t), heads(t), HEAD_SIZE,
                                 k->compute);
        }
        if (t->op == ATTENTION_BACKWARD) {
            fo_attention_backward(k->dpre, k->dact, k->pre, k->act, k->lse, row0, rows, layout(t), heads(t),
                                  HEAD_SIZE, k->compute);
        }
        break;
    case SCATTER_SIDE:
        if (is_backward(t->op)) {
            fo_matmul_dgrad(out, k->dpre + row0 * w1, k->w1, rows, t->C, (int)w1, FO_FLOATX, k->compute);
        } else {
            fo_matmul_forward(out, k->act + row0 * w2, k->w2, NULL, rows, (int)w2, t->C, FO_FLOATX,
                              k->compute);
        }
        break;
    default: break;
    }
}

// one part of the layer alone, in the chunks of mode none
static inline void queue_part(Rank* k, int part) {
    const Table* t = k->t;
    size_t rows = t->N / (size_t)t->P;
    for (int p = 0; p < t->P; p++) {
        queue_rows(k, part, (size_t)p * rows, rows);
    }
    if (is_backward(t->op) && part == WGRAD_BETWEEN) { wgrad_between(k); }
    if (is_backward(t->op) && part == WGRAD_AFTER) { wgrad_after(k); }
    if (part == OWNERS_SUM) {
        const void* parts[FO_MAX_RANKS];
        for (int p = 0; p < t->P; p++) {
            parts[p] = (const floatX*)k->st.partial + (size_t)p * shard_nelem(t);
        }
        fo_accumulate(k->all, parts, NULL, NULL, rows, t->C, t->P, FO_FLOATX, k->compute);
    }
}

// ---- what it should take ----------------------------------------------------------------------------------
// W: the layer without communication
static inline double compute_ms(const Table* t) {
    double ms = 0.0;
    for (int part = 0; part < OWNERS_SUM; part++) {
        ms += t->part_ms[part];
    }
    return ms;
}

static inline double shard_ms(const Table* t, int m) {
    return 1e3 * fo_model_shard_s(t->gbytes_s, t->us, shard_nelem(t) * sizeof(floatX), m);
}

// T: all collectives of the layer
static inline double collectives_ms(const Table* t) {
    return ncollectives(t->op) * fo_model_collective_s(t->P, shard_ms(t, 1));
}

/* Exposed time, collective by collective. Attention hides what flash sends chunk by chunk of whole sequences,
 * in the forward pass if its queries are split; a slice has a piece of each sequence, so all of attention is
 * before or behind it. The second gather of a backward pass leaves when the first has arrived, so what is
 * left of the computation behind that hides it, too; what a reduce-scatter leaves exposed hides under the
 * weight gradient behind it. In mode none nothing hides.
 */
static inline double predicted_ms(const Table* t, const Mode* mode) {
    const double shard = shard_ms(t, mode->m), T = fo_model_collective_s(t->P, shard);
    const double* part = t->part_ms;
    double before = part[GATHER_SIDE], behind = part[SCATTER_SIDE], second = 0.0;
    if (t->op == ATTENTION && mode->query_split) { behind += part[ATTENTION_ITSELF]; }
    if (t->op == ATTENTION_BACKWARD && mode->mode == FO_FLASH) { before += part[ATTENTION_ITSELF]; }
    const double first = fo_model_exposed_s(mode->mode, mode->m, t->P, shard, before);
    double last = fo_model_exposed_s(mode->mode, mode->m, t->P, shard, behind);
    if (is_backward(t->op)) {
        second = T;
        if (mode->mode != FO_NONE) {
            second -= fmax(part[GATHER_SIDE] + part[ATTENTION_ITSELF] + first - T, 0.0) + part[WGRAD_BETWEEN];
            last -= part[WGRAD_AFTER];
        }
    }
    return first + fmax(second, 0.0) + fmax(last, 0.0);
}

// ---- a rank -----------------------------------------------------------------------------------------------
static inline void fill(floatX* p, size_t nelem, uint64_t seed, double scale) {
    for (size_t i = 0; i < nelem; i++) { // uniform in [-scale, scale)
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        p[i] = fo_floatx((float)(scale * ((double)(seed >> 40) / (double)(1 << 23) - 1.0)));
    }
}

// device memory with random weights; scale keeps the size of activations about as it is
static inline floatX* random_weights(Rank* k, int OC, int K, uint64_t seed) {
    size_t nelem = (size_t)OC * (size_t)K;
    floatX* host = (floatX*)malloc(nelem * sizeof *host);
    fo_require(host != NULL, "out of memory");
    floatX* w = (floatX*)fo_malloc(k->device, nelem * sizeof *w);
    fill(host, nelem, seed, 1.7 / sqrt((double)K * (OC == k->t->C ? k->t->P : 1)));
    fo_upload(w, host, nelem * sizeof *w, k->compute);
    fo_stream_sync(k->compute);
    free(host);
    return w;
}

static inline floatX* rows_of(Rank* k, size_t width) {
    return (floatX*)fo_malloc(k->device, k->t->N * width * sizeof(floatX));
}

// on k->device, which is open
static inline void open_layer(Rank* k) {
    Table* t = k->t;
    const int r = fo_group_rank(k->group);
    const size_t C = (size_t)t->C, w1 = (size_t)width1(t), w2 = (size_t)width2(t);
    k->compute = fo_stream_create(k->device, "compute");
    k->comm = fo_stream_create(k->device, "comm");
    k->x = (floatX*)malloc(shard_nelem(t) * sizeof *k->x);
    k->host = (floatX*)malloc(shard_nelem(t) * sizeof *k->host);
    fo_require(k->x && k->host, "out of memory");
    fill(k->x, shard_nelem(t), 1000 + (uint64_t)r, 1.7);
    k->w1 = random_weights(k, (int)w1, t->C, 77 + (uint64_t)r);
    k->w2 = random_weights(k, t->C, (int)w2, 99 + (uint64_t)r);
    k->all = rows_of(k, C);
    k->pre = rows_of(k, w1);
    k->act = rows_of(k, w2);
    k->lse = (float*)fo_malloc(k->device, t->N * (C / HEAD_SIZE + 1) * sizeof(float));
    k->slots = (double*)fo_malloc(k->device, FO_MAX_RANKS * sizeof(double));
    if (is_backward(t->op)) {
        k->again = rows_of(k, C);
        k->dpre = rows_of(k, w1);
        k->dact = rows_of(k, w2);
        k->dw1 = (float*)fo_malloc(k->device, w1 * C * sizeof(float));
        k->dw2 = (float*)fo_malloc(k->device, C * w2 * sizeof(float));
    }
    k->st.wire = FO_FLOATX;
    k->st.partial = rows_of(k, C);
    k->st.received = rows_of(k, C);
}

// the plans of each mode
static inline void open_modes(Rank* k) {
    static const char* const names[NSTEPS] = {"gather", "gather again", "scatter"};
    const Table* t = k->t;
    for (int i = 0; i < t->nmodes; i++) {
        for (int step = 0; step < NSTEPS; step++) {
            if (!has_step(t->op, step)) { continue; }
            k->o[i][step] = fo_overlap_create(names[step], step == SCATTER ? FO_REDUCESCATTER : FO_ALLGATHER,
                                              t->modes[i].mode, t->modes[i].m, t->topology, k->group,
                                              k->compute, k->comm);
        }
    }
}

static inline void reset_mode(Rank* k, int i) {
    for (int step = 0; step < NSTEPS; step++) {
        if (k->o[i][step]) { fo_overlap_reset(k->o[i][step]); }
    }
}

// ms of all collectives of mode i since the last reset
static inline double exposed_of(const Rank* k, int i) {
    double ms = 0.0;
    for (int step = 0; step < NSTEPS; step++) {
        ms += k->o[i][step] ? k->o[i][step]->exposed_ms : 0.0;
    }
    return ms;
}

static inline void close_layer(Rank* k) {
    for (int i = 0; i < k->t->nmodes; i++) {
        for (int step = 0; step < NSTEPS; step++) {
            if (k->o[i][step]) { fo_overlap_destroy(k->o[i][step]); }
        }
    }
    void* memory[] = {k->w1,   k->w2,  k->all, k->again, k->pre,   k->act,        k->dpre,
                      k->dact, k->dw1, k->dw2, k->lse,   k->slots, k->st.partial, k->st.received};
    fo_stream_destroy(k->compute);
    fo_stream_destroy(k->comm);
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
        fo_free(k->device, memory[i]);
    }
    free(k->x);
    free(k->host);
}
#endif
