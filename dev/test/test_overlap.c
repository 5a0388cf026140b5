/* test_overlap.c -- the flash primitives, executed: P = 1, 2, 3, 4 ranks that are
 * threads.
 *
 * Every primitive in every mode, topology and wire gives the bits of a plain reference. Data are small whole
 * numbers that differ by position, so any order of summing is exact; attention is compared with the same
 * operations, called whole. Inputs are produced by an operation queued just before the call, at a random
 * moment, and overwritten with NaN by one queued right after it; outputs, staging and gathered rows are NaN
 * before. A missing wait is wrong data here some of the time, and a reported race under ThreadSanitizer every
 * time. Which waits were deleted to see that: README.md beside this file. What the schedules themselves must
 * be: test_plan.c.
 */
#include "dev/test/ranks.h"

enum { NH = 2, HS = 4, QKV = 3 * NH * HS };

// ---- all-gather -------------------------------------------------------------------------------------------
typedef struct {
    Rank* k;
    floatX *out, *all;
    size_t row0[16 * FO_MAX_M]; // of the chunks in the order in which they were computed
    int n, most_us;
} Gather;

static void gather_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    Gather* x = (Gather*)ctx;
    x->row0[x->n++] = row0;
    queue_sleep(s, random_below(x->k, x->most_us));
    fo_copy(x->out + row0 * (size_t)C, x->all + row0 * (size_t)C, n * (size_t)C * sizeof(floatX), s);
    if (random_below(x->k, 4) == 0) { queue_sleep(x->k->comm, random_below(x->k, x->most_us)); }
}

// three gathers one after the other through the same buffers, nothing synced in between
static void test_allgather_run(Rank* k, int most_us) {
    enum { CALLS = 3 };
    FoOverlap* o = overlap(k, "gather", FO_ALLGATHER);
    size_t row = C * sizeof(floatX), own = (size_t)k->r * ROWS;
    floatX *all = poisoned_rows(k, k->N, C), *inp[CALLS], *out[CALLS], *seen[CALLS];
    Gather x[CALLS];
    for (int i = 0; i < CALLS; i++) {
        inp[i] = numbers(k, 10 + i, own, ROWS, C);
        out[i] = poisoned_rows(k, k->N, C);
        seen[i] = poisoned_rows(k, k->N, C);
    }
    for (int i = 0; i < CALLS; i++) {
        x[i] = (Gather){k, out[i], all, {0}, 0, most_us};
        produce(k, all + own * C, inp[i], ROWS * row);
        rest(k);
        fo_allgather_run(o, all, row, k->N, gather_chunk, &x[i]);
        rest(k);
        fo_copy(seen[i], all, k->N * row, k->compute); // all of it is there, the own rows too
        queue_poison(k, all, k->N * row);
    }
    for (int i = 0; i < CALLS; i++) {
        CHECK(wrong_rows(k, out[i], 10 + i, 0, k->N, C) == 0);
        CHECK(wrong_rows(k, seen[i], 10 + i, 0, k->N, C) == 0);
        CHECK(x[i].n == (k->P == 1 ? 1 : k->P * k->c.m));
        CHECK(x[i].row0[0] == own); // own first, in every mode
    }
    fo_overlap_destroy(o);
    release(k);
}

// the gather in two halves, hidden under work that depends on none of it
static void test_allgather_halves(Rank* k) {
    enum { CALLS = 2 };
    FoOverlap* o = overlap(k, "halves", FO_ALLGATHER);
    size_t row = C * sizeof(floatX), own = (size_t)k->r * ROWS;
    floatX *all = poisoned_rows(k, k->N, C), *inp[CALLS], *seen[CALLS], *work = poisoned_rows(k, k->N, C);
    for (int i = 0; i < CALLS; i++) {
        inp[i] = numbers(k, 20 + i, own, ROWS, C);
        seen[i] = poisoned_rows(k, k->N, C);
    }
    for (int i = 0; i < CALLS; i++) {
        produce(k, all + own * C, inp[i], ROWS * row);
        if (i == 0) { fo_overlap_mark(o); } // the second time without: it must not stick
        queue_sleep(k->compute, random_below(k, 600));
        queue_poison(k, work, ROWS * row);
        fo_allgather_begin(o, all, row, k->N);
        rest(k);
        queue_poison(k, work, k->N * row);
        fo_allgather_end(o);
        rest(k);
        fo_copy(seen[i], all, k->N * row, k->compute);
        queue_poison(k, all, k->N * row);
    }
    for (int i = 0; i < CALLS; i++) {
        CHECK(wrong_rows(k, seen[i], 20 + i, 0, k->N, C) == 0);
    }
    fo_overlap_destroy(o);
    release(k);
}

static void test_allgather_matmul_forward(Rank* k) {
    FoOverlap* o = overlap(k, "F1", FO_ALLGATHER);
    size_t own = (size_t)k->r * ROWS, n = k->N * OC;
    int want[4 * ROWS * OC] = {0}, w = of_rank(2, k->r), b = of_rank(3, k->r);
    floatX *inp = numbers(k, 1, own, ROWS, C), *wsrc = numbers(k, w, 0, OC, C),
           *bsrc = numbers(k, b, 0, 1, OC);
    floatX *all = poisoned_rows(k, k->N, C), *out = poisoned_rows(k, k->N, OC);
    floatX *gelu = poisoned_rows(k, k->N, OC), *want_gelu = poisoned_rows(k, k->N, OC);
    floatX *weight = poisoned_rows(k, OC, C), *bias = poisoned_rows(k, 1, OC);
    add_product(want, 1, 0, k->N, w, OC, C);
    for (size_t i = 0; i < n; i++) {
        want[i] += value(b, 0, (int)(i % OC));
    }
    for (int with_gelu = 0; with_gelu < 2; with_gelu++) {
        queue_poison(k, out, n * sizeof *out);
        produce(k, weight, wsrc, OC * C * sizeof(floatX));
        produce(k, bias, bsrc, OC * sizeof(floatX));
        produce(k, all + own * C, inp, ROWS * C * sizeof(floatX));
        rest(k);
        fo_allgather_matmul_forward(out, with_gelu ? gelu : NULL, all, weight, bias, k->N, C, OC, o);
        rest(k);
        queue_poison(k, all, k->N * C * sizeof(floatX));
        queue_poison(k, weight, OC * C * sizeof(floatX));
        queue_poison(k, bias, OC * sizeof(floatX));
        CHECK(wrong_values(k, out, want, n) == 0);
    }
    fo_gelu_forward(want_gelu, out, n, k->compute);
    CHECK(same_bits(k, gelu, want_gelu, n * sizeof *gelu));
    fo_overlap_destroy(o);
    release(k);
}

static void test_allgather_matmul_dgrad(Rank* k) {
    FoOverlap* o = overlap(k, "B1", FO_ALLGATHER);
    size_t own = (size_t)k->r * ROWS, n = k->N * OC;
    int want[4 * ROWS * OC] = {0}, w = of_rank(5, k->r);
    floatX *inp = numbers(k, 4, own, ROWS, C), *wsrc = numbers(k, w, 0, C, OC);
    floatX *all = poisoned_rows(k, k->N, C), *dinp = poisoned_rows(k, k->N, OC),
           *plain = poisoned_rows(k, k->N, OC);
    floatX *weight = poisoned_rows(k, C, OC), *pre = numbers(k, of_rank(6, k->r), 0, k->N, OC);
    add_product_transposed(want, 4, 0, k->N, w, C, OC);
    for (int with_gelu = 0; with_gelu < 2; with_gelu++) {
        floatX* out = with_gelu ? dinp : plain;
        produce(k, weight, wsrc, OC * C * sizeof(floatX));
        produce(k, all + own * C, inp, ROWS * C * sizeof(floatX));
        rest(k);
        fo_allgather_matmul_dgrad(out, all, with_gelu ? pre : NULL, weight, k->N, OC, C, o);
        rest(k);
        queue_poison(k, all, k->N * C * sizeof(floatX));
        queue_poison(k, weight, OC * C * sizeof(floatX));
    }
    CHECK(wrong_values(k, plain, want, n) == 0);
    fo_gelu_backward(plain, plain, pre, n, k->compute);
    CHECK(same_bits(k, dinp, plain, n * sizeof *plain));
    fo_overlap_destroy(o);
    release(k);
}

// ---- reduce-scatter ---------------------------------------------------------------------------------------
typedef struct {
    Rank* k;
    const char* src; // [N, C] of wire
    FoStaging* st;
    size_t row0[16 * FO_MAX_M];
    int n, most_us;
} Scatter;

static void scatter_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    Scatter* x = (Scatter*)ctx;
    size_t row = C * fo_dtype_nbytes(x->st->wire);
    x->row0[x->n++] = row0;
    queue_sleep(s, random_below(x->k, x->most_us));
    fo_copy((char*)x->st->partial + row0 * row, x->src + row0 * row, n * row, s);
    if (random_below(x->k, 4) == 0) { queue_sleep(x->k->comm, random_below(x->k, x->most_us)); }
}

// the sum over ranks of matrix `m` of each, own rows, plus residual and bias
static void want_sum(Rank* k, int* want, int m, int residual, int bias) {
    size_t own = (size_t)k->r * ROWS;
    for (size_t i = 0; i < ROWS * C; i++) {
        size_t row = own + i / C;
        int col = (int)(i % C);
        want[i] = (residual ? value(residual, row, col) : 0) + (bias ? value(bias, 0, col) : 0);
        for (int p = 0; p < k->P; p++) {
            want[i] += value(of_rank(m, p), row, col);
        }
    }
}

/* Four reduce-scatters one after the other through the same staging, nothing synced in between: with residual
 * and bias; in place; of sums that are there already; once more.
 */
static void test_reducescatter_run(Rank* k, int most_us) {
    enum { CALLS = 4 };
    FoOverlap* o = overlap(k, "scatter", FO_REDUCESCATTER);
    FoStaging st = staging(k);
    size_t nbytes = k->N * C * fo_dtype_nbytes(st.wire), own = (size_t)k->r * ROWS, shard = ROWS * C;
    floatX *residual = numbers(k, 7, own, ROWS, C), *bias = numbers(k, 8, 0, 1, C), *out[CALLS];
    void* src[CALLS];
    Scatter x[CALLS];
    for (int i = 0; i < CALLS; i++) {
        src[i] = numbers_of_type(k, of_rank(30 + i, k->r), 0, k->N, C, st.wire);
        out[i] = poisoned_rows(k, ROWS, C);
    }
    for (int i = 0; i < CALLS; i++) {
        x[i] = (Scatter){k, (const char*)src[i], &st, {0}, 0, most_us};
        if (i == 1) { fo_copy(out[i], residual, shard * sizeof(floatX), k->compute); }
        if (i == 2) { produce(k, st.partial, src[i], nbytes); }
        if (i == 3) { fo_overlap_mark(o); }
        rest(k);
        fo_reducescatter_run(o, &st, C, k->N, i == 2 ? NULL : scatter_chunk, &x[i]);
        if (i > 0) { queue_sleep(k->compute, random_below(k, most_us)); }
        fo_reducescatter_end(o, &st, out[i],
                             i == 0   ? residual
                             : i == 1 ? out[i]
                                      : NULL,
                             i == 0 ? bias : NULL, C, k->N);
        rest(k);
        queue_poison(k, st.partial, nbytes);
        queue_poison(k, st.received, nbytes);
    }
    for (int i = 0; i < CALLS; i++) {
        int want[ROWS * C];
        want_sum(k, want, 30 + i, i < 2 ? 7 : 0, i == 0 ? 8 : 0);
        CHECK(wrong_values(k, out[i], want, shard) == 0);
        int nchunks = k->P == 1 ? 1 : k->P * k->c.m;
        CHECK(x[i].n == (i == 2 ? 0 : nchunks));
        if (i != 2 && (k->c.mode == FO_FLASH || k->P == 1)) { // own last
            CHECK(x[i].row0[nchunks - 1] + k->N / (size_t)nchunks == own + ROWS);
        }
    }
    fo_overlap_destroy(o);
    release(k);
}

static void test_reducescatter_fp32(Rank* k) {
    if (k->c.wire != FO_FP32) { return; }
    FoOverlap* o = overlap(k, "fp32", FO_REDUCESCATTER);
    FoStaging st = staging(k);
    size_t own = (size_t)k->r * ROWS;
    void* src = numbers_of_type(k, of_rank(40, k->r), 0, k->N, C, FO_FP32);
    float* out = (float*)poisoned(k, ROWS * C * sizeof *out);
    int want[ROWS * C];
    want_sum(k, want, 40, 0, 0);
    for (int in_place = 0; in_place < 2; in_place++) {
        Scatter x = {k, (const char*)src, &st, {0}, 0, 300};
        float* to = in_place ? (float*)st.partial + own * C : out;
        fo_reducescatter_run(o, &st, C, k->N, scatter_chunk, &x);
        fo_reducescatter_end_fp32(o, &st, to, C, k->N);
        CHECK(wrong_values_fp32(k, to, want, ROWS * C) == 0);
    }
    fo_overlap_destroy(o);
    release(k);
}

static float rounded_to(float x, FoDtype type) {
    return type == FO_FP32 ? x : fo_bf16_to_float(fo_bf16_from_float(x));
}

// rank order; along a ring from r+1 to r-1, rounded to wire at each hop, and own and others in rank order
static float ordered_sum(const Rank* k, size_t i) {
    int P = k->P, r = k->r;
    float sum = 0.0f, others = P > 1 ? order_value((r + 1) % P, i) : 0.0f;
    if (k->c.topology == FO_DIRECT || P == 1) {
        for (int p = 0; p < P; p++) {
            sum += order_value(p, i);
        }
        return sum;
    }
    for (int hop = 2; hop < P; hop++) {
        others = rounded_to(others + order_value((r + hop) % P, i), k->c.wire);
    }
    return others + order_value(r, i);
}

static void test_order_of_sum(Rank* k) {
    FoOverlap* o = overlap(k, "order", FO_REDUCESCATTER);
    FoStaging st = staging(k);
    size_t nelem = k->N * C, shard = ROWS * C, own = (size_t)k->r * shard;
    char* src = (char*)allocate(k, nelem * fo_dtype_nbytes(st.wire));
    _Alignas(float) char host[4 * ROWS * C * sizeof(float)];
    floatX want[ROWS * C], got[ROWS * C], *out = poisoned_rows(k, ROWS, C);
    for (size_t i = 0; i < nelem; i++) {
        if (st.wire == FO_FP32) {
            ((float*)host)[i] = order_value(k->r, i);
        } else {
            ((FoBf16*)host)[i] = fo_bf16_from_float(order_value(k->r, i));
        }
    }
    for (size_t i = 0; i < shard; i++) {
        want[i] = fo_floatx(ordered_sum(k, own + i));
    }
    fo_upload(src, host, nelem * fo_dtype_nbytes(st.wire), k->compute);
    Scatter x = {k, src, &st, {0}, 0, 100};
    fo_reducescatter_run(o, &st, C, k->N, scatter_chunk, &x);
    fo_reducescatter_end(o, &st, out, NULL, NULL, C, k->N);
    fo_download(got, out, sizeof got, k->compute);
    fo_stream_sync(k->compute);
    CHECK_BITS(got, want, sizeof want);
    if (st.wire == FO_FP32) { // the parts are still there
        float sums[ROWS * C];
        int wrong = 0;
        fo_reducescatter_end_fp32(o, &st, (float*)st.partial + own, C, k->N);
        fo_download(sums, (float*)st.partial + own, sizeof sums, k->compute);
        fo_stream_sync(k->compute);
        for (size_t i = 0; i < shard; i++) {
            wrong += !(sums[i] == ordered_sum(k, own + i));
        }
        CHECK(wrong == 0);
    }
    fo_overlap_destroy(o);
    release(k);
}

// each rank sums over its own number of columns, as with heads that P doesn't divide
static void test_matmul_reducescatter(Rank* k, int dgrad) {
    FoOverlap* o = overlap(k, dgrad ? "B3" : "F4", FO_REDUCESCATTER);
    FoStaging st = staging(k);
    int want[ROWS * C] = {0}, width = 4 + k->r % 3;
    size_t own = (size_t)k->r * ROWS, row = (size_t)width * sizeof(floatX);
    floatX *isrc = numbers(k, of_rank(50, k->r), 0, k->N, width), *inp = poisoned_rows(k, k->N, width);
    floatX* wsrc = dgrad ? numbers(k, of_rank(51, k->r), 0, (size_t)width, C)
                         : numbers(k, of_rank(51, k->r), 0, C, width);
    floatX *weight = poisoned_rows(k, C, width), *out = poisoned_rows(k, ROWS, C);
    for (int p = 0; p < k->P; p++) {
        if (dgrad) {
            add_product_transposed(want, of_rank(50, p), own, ROWS, of_rank(51, p), 4 + p % 3, C);
        } else {
            add_product(want, of_rank(50, p), own, ROWS, of_rank(51, p), C, 4 + p % 3);
        }
    }
    produce(k, weight, wsrc, C * row);
    produce(k, inp, isrc, k->N * row);
    rest(k);
    if (dgrad) {
        fo_matmul_reducescatter_dgrad(&st, inp, weight, k->N, C, width, o);
    } else {
        fo_matmul_reducescatter_forward(&st, inp, weight, k->N, width, C, o);
    }
    queue_poison(k, inp, k->N * row); // before the sum is there
    queue_poison(k, weight, C * row);
    rest(k);
    fo_reducescatter_end(o, &st, out, NULL, NULL, C, k->N);
    queue_poison(k, st.partial, k->N * C * fo_dtype_nbytes(st.wire));
    CHECK(wrong_values(k, out, want, ROWS * C) == 0);
    fo_overlap_destroy(o);
    release(k);
}

/* Three layers as a model has them: gather and matmul, matmul and reduce-scatter, whose result is the next
 * layer's own rows; through the same buffers, nothing synced. Weights have one 1 or -1 a row, so numbers stay
 * small.
 */
static int picked(int layer, int rank, int row, int ncols, int* col) {
    uint32_t h = (uint32_t)(layer * 131 + rank * 31 + row + 7) * 2654435761u;
    *col = (int)((h >> 8) % (uint32_t)ncols);
    return h >> 30 & 1 ? 1 : -1;
}

static floatX* picking_weight(Rank* k, int layer, int rows, int cols) {
    floatX* host = (floatX*)calloc((size_t)(rows * cols), sizeof *host);
    floatX* x = (floatX*)allocate(k, (size_t)(rows * cols) * sizeof *x);
    fo_require(host != NULL, "out of memory");
    for (int i = 0; i < rows; i++) {
        int col, sign = picked(layer, k->r, i, cols, &col);
        host[i * cols + col] = fo_floatx((float)sign);
    }
    fo_upload(x, host, (size_t)(rows * cols) * sizeof *x, k->compute);
    fo_stream_sync(k->compute);
    free(host);
    return x;
}

// x [N, C] after a layer: x + sum over ranks of (x @ w1^T) @ w2^T
static void plain_layer(int* x, size_t N, int P, int layer) {
    for (size_t i = 0; i < N; i++) {
        int y[C];
        for (int c = 0; c < C; c++) {
            y[c] = x[i * C + (size_t)c];
            for (int p = 0; p < P; p++) {
                int h, from, outer = picked(2 * layer + 1, p, c, OC, &h);
                int inner = picked(2 * layer, p, h, C, &from);
                y[c] += outer * inner * x[i * C + (size_t)from];
            }
        }
        for (int c = 0; c < C; c++) {
            x[i * C + (size_t)c] = y[c];
        }
    }
}

static void test_layers(Rank* k) {
    enum { L = 3 };
    FoOverlap *gather = overlap(k, "F3", FO_ALLGATHER), *scatter = overlap(k, "F4", FO_REDUCESCATTER);
    FoStaging st = staging(k);
    size_t own = (size_t)k->r * ROWS * C, shard = ROWS * C * sizeof(floatX);
    floatX *w1[L], *w2[L], *x[L + 1], *all = poisoned_rows(k, k->N, C), *h = poisoned_rows(k, k->N, OC);
    int want[4 * ROWS * C];
    for (size_t i = 0; i < k->N * C; i++) {
        want[i] = value(60, i / C, (int)(i % C)) / 2; // -1, 0, 1; a layer multiplies by P + 1 at most
    }
    for (int l = 0; l < L; l++) {
        w1[l] = picking_weight(k, 2 * l, OC, C);
        w2[l] = picking_weight(k, 2 * l + 1, C, OC);
        x[l + 1] = poisoned_rows(k, ROWS, C);
        plain_layer(want, k->N, k->P, l);
    }
    floatX start[ROWS * C];
    for (size_t i = 0; i < ROWS * C; i++) {
        start[i] = fo_floatx((float)(value(60, (size_t)k->r * ROWS + i / C, (int)(i % C)) / 2));
    }
    x[0] = poisoned_rows(k, ROWS, C);
    fo_upload(x[0], start, shard, k->compute);
    for (int l = 0; l < L; l++) {
        produce(k, all + own, x[l], shard);
        rest(k);
        fo_allgather_matmul_forward(h, NULL, all, w1[l], NULL, k->N, C, OC, gather);
        fo_matmul_reducescatter_forward(&st, h, w2[l], k->N, OC, C, scatter);
        fo_reducescatter_end(scatter, &st, x[l + 1], x[l], NULL, C, k->N);
        rest(k);
    }
    CHECK(wrong_values(k, x[L], want + (size_t)k->r * ROWS * C, ROWS * C) == 0);
    fo_overlap_destroy(gather);
    fo_overlap_destroy(scatter);
    release(k);
}

// ---- attention --------------------------------------------------------------------------------------------
// N = P * ROWS rows as whole sequences, one a rank, or as two sequences cut zig-zag
static FoLayout layout_of(const Rank* k, int zigzag) {
    FoLayout whole = {k->P, ROWS, k->P, 0}, cut = {2, ROWS / 2 * k->P, k->P, 1};
    return zigzag ? cut : whole;
}

// the QKV matmul in front of F2: of all ranks' rows, whose gather is under way
typedef struct {
    floatX *rows, *weight, *bias; // [N, C] of all ranks; of rank r
    floatX *all, *seen, *weight_now, *bias_now;
    FoOverlap* o;
    FoColumns columns;
} Qkv;

static Qkv qkv_open(Rank* k) {
    Qkv x;
    memset(&x, 0, sizeof x);
    x.rows = numbers(k, 74, 0, k->N, C);
    x.weight = numbers(k, of_rank(75, k->r), 0, QKV, C);
    x.bias = numbers(k, of_rank(76, k->r), 0, 1, QKV);
    x.all = poisoned_rows(k, k->N, C), x.seen = poisoned_rows(k, k->N, C);
    x.weight_now = poisoned_rows(k, QKV, C), x.bias_now = poisoned_rows(k, 1, QKV);
    x.columns.out = poisoned_rows(k, k->N, QKV);
    const int m = k->c.m;
    if (k->c.mode != FO_NONE) { k->c.m = m % 4 + 1; } // not F2's
    x.o = overlap(k, "F1", FO_ALLGATHER);
    k->c.m = m;
    return x;
}

// what rank p has of it, called whole
static floatX* qkv_of_rank(Rank* k, const Qkv* x, int p) {
    floatX* qkv = poisoned_rows(k, k->N, QKV);
    fo_matmul_forward(qkv, x->rows, numbers(k, of_rank(75, p), 0, QKV, C),
                      numbers(k, of_rank(76, p), 0, 1, QKV), k->N, C, QKV, FO_FLOATX, k->compute);
    return qkv;
}

static void qkv_begin(Rank* k, Qkv* x) {
    const size_t own = (size_t)k->r * ROWS * C;
    produce(k, x->weight_now, x->weight, QKV * C * sizeof(floatX));
    produce(k, x->bias_now, x->bias, QKV * sizeof(floatX));
    produce(k, x->all + own, x->rows + own, ROWS * C * sizeof(floatX));
    rest(k);
    fo_allgather_matmul_begin(&x->columns, x->columns.out, x->all, x->weight_now, x->bias_now, k->N, C, QKV,
                              x->o);
}

// all of it has been consumed, by what is queued
static void qkv_end(Rank* k, Qkv* x) {
    fo_copy(x->seen, x->all, k->N * C * sizeof(floatX), k->compute);
    queue_poison(k, x->all, k->N * C * sizeof(floatX));
    queue_poison(k, x->weight_now, QKV * C * sizeof(floatX));
    queue_poison(k, x->bias_now, QKV * sizeof(floatX));
}

// gathers: F1's gather is under way when F2 is called
static void test_attention_forward(Rank* k, int zigzag, int query_split, int gathers) {
    FoOverlap* o = overlap(k, "F2", FO_REDUCESCATTER);
    FoStaging st = staging(k);
    FoLayout l = layout_of(k, zigzag);
    const int W = NH * HS;
    size_t att_nbytes = k->N * (size_t)W * sizeof(floatX), lse_nbytes = k->N * NH * sizeof(float);
    floatX *out = poisoned_rows(k, ROWS, C), *want = poisoned_rows(k, ROWS, C);
    floatX *residual = numbers(k, 70, (size_t)k->r * ROWS, ROWS, C), *qkv = NULL, *weight = NULL;
    floatX *att = poisoned_rows(k, k->N, W), *own_att = poisoned_rows(k, k->N, W);
    float *lse = (float*)poisoned(k, lse_nbytes), *own_lse = (float*)poisoned(k, lse_nbytes);
    char* partial[FO_MAX_RANKS];
    Qkv x = qkv_open(k);
    for (int p = 0; p < k->P; p++) { // what each rank computes, by the operations called whole
        floatX* q = gathers ? qkv_of_rank(k, &x, p) : numbers(k, of_rank(71, p), 0, k->N, 3 * W);
        floatX *w = numbers(k, of_rank(72, p), 0, C, W), *a = p == k->r ? own_att : poisoned_rows(k, k->N, W);
        float* e = p == k->r ? own_lse : (float*)poisoned(k, lse_nbytes);
        partial[p] = (char*)poisoned(k, k->N * C * fo_dtype_nbytes(st.wire));
        fo_attention_forward(a, e, q, 0, k->N, l, NH, HS, k->compute);
        fo_matmul_forward(partial[p], a, w, NULL, k->N, W, C, st.wire, k->compute);
        if (p == k->r) { qkv = q, weight = w; }
    }
    plain_reducescatter(k, want, partial, residual);
    if (gathers) {
        qkv_begin(k, &x);
    } else {
        produce(k, x.columns.out, qkv, 3 * att_nbytes);
    }
    rest(k);
    fo_attention_matmul_reducescatter_forward(&st, att, lse, &x.columns, weight, l, NH, HS, C, query_split,
                                              o);
    if (gathers) { qkv_end(k, &x); }
    queue_poison(k, x.columns.out, 3 * att_nbytes);
    rest(k);
    fo_reducescatter_end(o, &st, out, residual, NULL, C, k->N);
    queue_poison(k, st.partial, k->N * C * fo_dtype_nbytes(st.wire));
    CHECK(same_bits(k, out, want, ROWS * C * sizeof(floatX)));
    CHECK(same_bits(k, att, own_att, att_nbytes));
    CHECK(same_bits(k, lse, own_lse, lse_nbytes));
    CHECK(!gathers || same_bits(k, x.seen, x.rows, k->N * C * sizeof(floatX)));
    fo_overlap_destroy(o);
    fo_overlap_destroy(x.o);
    release(k);
}

static void test_attention_backward(Rank* k, int zigzag) {
    FoOverlap* o = overlap(k, "B4", FO_ALLGATHER);
    FoLayout l = layout_of(k, zigzag);
    const int W = NH * HS;
    size_t own = (size_t)k->r * ROWS, row = C * sizeof(floatX),
           att_nbytes = k->N * (size_t)W * sizeof(floatX);
    floatX *qkv = numbers(k, of_rank(71, k->r), 0, k->N, 3 * W),
           *weight = numbers(k, of_rank(72, k->r), 0, C, W);
    floatX *att = poisoned_rows(k, k->N, W), *dout = numbers(k, 73, 0, k->N, C);
    floatX *datt = poisoned_rows(k, k->N, W), *dqkv = poisoned_rows(k, k->N, 3 * W);
    floatX *want_datt = poisoned_rows(k, k->N, W), *want = poisoned_rows(k, k->N, 3 * W);
    floatX *all = poisoned_rows(k, k->N, C), *seen = poisoned_rows(k, k->N, C);
    float* lse = (float*)poisoned(k, k->N * NH * sizeof(float));
    fo_attention_forward(att, lse, qkv, 0, k->N, l, NH, HS, k->compute);
    fo_matmul_dgrad(want_datt, dout, weight, k->N, W, C, FO_FLOATX, k->compute);
    fo_attention_backward(want, want_datt, qkv, att, lse, 0, k->N, l, NH, HS, k->compute);
    produce(k, all + own * C, dout + own * C, ROWS * row);
    rest(k);
    fo_allgather_matmul_attention_backward(dqkv, datt, all, weight, qkv, att, lse, l, NH, HS, C, o);
    rest(k);
    fo_copy(seen, all, k->N * row, k->compute);
    queue_poison(k, all, k->N * row);
    CHECK(wrong_rows(k, seen, 73, 0, k->N, C) == 0);
    CHECK(same_bits(k, datt, want_datt, att_nbytes));
    CHECK(same_bits(k, dqkv, want, 3 * att_nbytes));
    fo_overlap_destroy(o);
    release(k);
}

// ---- what waits for what, and what is counted -------------------------------------------------------------
static void copy_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    (void)ctx, (void)row0, (void)n, (void)s;
}

/* The communication of each rank stands at a gate. In mode none all that follows the call stands with it; in
 * the other modes what is queued between the two halves goes on, and in a gather the own chunk.
 */
static void test_who_waits(Rank* k) {
    FoStaging st = staging(k);
    FoOverlap *gather = overlap(k, "gather", FO_ALLGATHER),
              *scatter = overlap(k, "scatter", FO_REDUCESCATTER);
    floatX *all = poisoned_rows(k, k->N, C), *out = poisoned_rows(k, ROWS, C);
    int goes_on = k->c.mode != FO_NONE || k->P == 1;
    for (int half = 0; half < 2; half++) {
        Gate held = {0}, behind = {1, 0, 0};
        fo_group_barrier(k->g);
        queue_gate(k->comm, &held);
        if (half == 0) {
            fo_allgather_begin(gather, all, C * sizeof(floatX), k->N);
        } else {
            fo_reducescatter_run(scatter, &st, C, k->N, copy_chunk, NULL);
        }
        queue_gate(k->compute, &behind);
        if (half == 0) {
            fo_allgather_end(gather);
        } else {
            fo_reducescatter_end(scatter, &st, out, NULL, NULL, C, k->N);
        }
        // a ring's adds are among the computes of its run: they can't go on
        int adds = half == 1 && k->c.topology == FO_RING && k->P > 2;
        open_later(&held, &behind, goes_on && !adds);
        fo_stream_sync(k->compute);
        fo_stream_sync(k->comm);
        CHECK(!is_set(&held.late));
    }
    size_t nmessages = k->P == 1 ? 0 : (size_t)((k->P - 1) * k->c.m);
    CHECK(gather->nmessages == nmessages && scatter->nmessages == nmessages);
    CHECK(gather->nbytes_sent == (size_t)(k->P - 1) * ROWS * C * sizeof(floatX));
    CHECK(scatter->nbytes_sent == (size_t)(k->P - 1) * ROWS * C * fo_dtype_nbytes(st.wire));
    // the compute stream stood at the gather's end while the host rested
    if (!goes_on) { CHECK(gather->exposed_ms > 1.0 && scatter->exposed_ms > 1.0); }
    if (k->P == 1) { CHECK(gather->exposed_ms == 0.0 && scatter->exposed_ms == 0.0); }
    fo_overlap_reset(gather);
    CHECK(gather->nmessages == 0 && gather->nbytes_sent == 0 && gather->exposed_ms == 0.0 &&
          gather->comm_ms == 0.0);
    fo_overlap_destroy(gather);
    fo_overlap_destroy(scatter);
    release(k);
}

// A marked gather goes while the compute stream stands at a gate behind the mark; one not marked doesn't, nor
// does the plain collective.
static void test_mark(Rank* k) {
    FoOverlap* o = overlap(k, "marked", FO_ALLGATHER);
    size_t own = (size_t)k->r * ROWS, row = C * sizeof(floatX);
    floatX *inp = numbers(k, 90, own, ROWS, C), *all = poisoned_rows(k, k->N, C);
    for (int marked = 1; marked >= 0; marked--) {
        Gate held = {0}, behind = {1, 0, 0};
        produce(k, all + own * C, inp, ROWS * row);
        if (marked) { fo_overlap_mark(o); }
        queue_gate(k->compute, &held);
        fo_allgather_begin(o, all, row, k->N);
        queue_gate(k->comm, &behind);
        open_later(&held, &behind, marked && (k->c.mode != FO_NONE || k->P == 1));
        fo_allgather_end(o);
        CHECK(wrong_rows(k, all, 90, 0, k->N, C) == 0);
        fo_stream_sync(k->comm);
        CHECK(!is_set(&held.late));
        queue_poison(k, all, k->N * row);
    }
    fo_overlap_destroy(o);
    release(k);
}

static void slow_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    (void)row0;
    queue_sleep(s, *(int*)ctx * (int)n / ROWS); // us a shard
}

// all ranks say yes
static int agreed(Rank* k, int yes) {
    int* votes = (int*)allocate(k, (size_t)k->P * sizeof *votes);
    int all[4], sum = 0;
    fo_upload(votes + k->r, &yes, sizeof yes, k->comm);
    fo_allgather(k->g, votes, sizeof *votes, k->comm);
    fo_download(all, votes, (size_t)k->P * sizeof *votes, k->comm);
    fo_stream_sync(k->comm);
    for (int p = 0; p < k->P; p++) {
        sum += all[p];
    }
    return sum == k->P;
}

// whether a gather or reduce-scatter exposes between least and most ms on the emulated link, in one of 20
// tries
static int exposes(Rank* k, FoKind kind, FoMode mode, double least, double most, double want_comm_ms) {
    k->c.mode = mode, k->c.m = 1;
    FoOverlap* o = overlap(k, "link", kind);
    FoStaging st = staging(k);
    floatX *all = poisoned_rows(k, k->N, C), *out = poisoned_rows(k, ROWS, C);
    int us_a_shard = 8000, found = 0;
    for (int try = 0; try < 20 && !found; try++) {
        fo_overlap_reset(o);
        fo_group_barrier(k->g);
        if (kind == FO_ALLGATHER) {
            fo_allgather_run(o, all, C * sizeof(floatX), k->N, slow_chunk, &us_a_shard);
        } else {
            fo_reducescatter_run(o, &st, C, k->N, slow_chunk, &us_a_shard);
            fo_reducescatter_end(o, &st, out, NULL, NULL, C, k->N);
        }
        fo_stream_sync(k->compute);
        fo_stream_sync(k->comm);
        found = agreed(k, o->exposed_ms >= least && o->exposed_ms <= most);
    }
    CHECK(fabs(o->comm_ms - want_comm_ms) < 1e-6 * want_comm_ms);
    fo_overlap_destroy(o);
    release(k);
    return found;
}

/* What all of this is for. A shard's message takes 4 ms, its compute 8 ms: mode none exposes (P-1) 4 ms and
 * flash hides it. Sleeps are late by some ms on a busy machine, hence the slack and the tries; bench_overlap
 * measures.
 */
static void test_link(Rank* k) {
    const double message_ms = 4.0, T = (k->P - 1) * message_ms;
    const size_t nbytes = ROWS * C * sizeof(floatX);
    fo_group_link(k->g, (double)nbytes / (message_ms * 1e-3) / 1e9, 0.0);
    CHECK(fabs(fo_group_message_s(k->g, nbytes) - message_ms * 1e-3) < 1e-9);
    for (int topology = FO_DIRECT; topology <= FO_RING; topology++) {
        for (int kind = FO_ALLGATHER; kind <= FO_REDUCESCATTER; kind++) {
            k->c.topology = (FoTopology)topology, k->c.wire = FO_FLOATX;
            CHECK_AT("P=%d r=%d link, %s %s", k->P, k->r, topology ? "ring" : "direct",
                     kind == FO_ALLGATHER ? "gather" : "reduce-scatter");
            CHECK(exposes(k, (FoKind)kind, FO_NONE, 0.7 * T, 1.5 * T, T));
            CHECK(exposes(k, (FoKind)kind, FO_FLASH, 0.0, 0.4 * T, T));
        }
    }
    fo_group_link(k->g, 0.0, 0.0);
}

// ---- all of it --------------------------------------------------------------------------------------------
static void test_config(Rank* k) {
    check_at_config(k, "");
    test_allgather_run(k, 300);
    test_allgather_halves(k);
    test_allgather_matmul_forward(k);
    test_allgather_matmul_dgrad(k);
    test_reducescatter_run(k, 300);
    test_reducescatter_fp32(k);
    test_order_of_sum(k);
    test_matmul_reducescatter(k, 0);
    test_matmul_reducescatter(k, 1);
    test_layers(k);
    for (int zigzag = 0; zigzag < 2; zigzag++) {
        test_attention_forward(k, zigzag, 0, 1);
        test_attention_forward(k, zigzag, 1, 0);
        test_attention_forward(k, zigzag, 1, 1);
        test_attention_backward(k, zigzag);
    }
}

// Emulation is slow, and needs no luck to see a missing wait: it has fewer sizes, ranks and repetitions.
static int is_tested(const Config* c) {
    return FO_DEVICE_CPU ||
           c->m == (c->mode == FO_SLICE   ? 2
                    : c->mode == FO_FLASH ? 3
                                          : 1) ||
           (c->mode == FO_FLASH && c->m == 1 && c->wire == FO_FLOATX);
}

// the host rests between calls (20 ms at each) in one config of each mode, with the widest variety of the
// rest
static int is_idle_config(const Config* c) {
    int idle = c->wire == FO_FLOATX && (c->m == 1 || (c->m == 2 && c->mode == FO_FLASH));
    return idle && (FO_DEVICE_CPU || (c->mode == FO_FLASH && c->topology == FO_DIRECT));
}

static void test_configs(Rank* k) {
    for (int mode = FO_NONE; mode <= FO_FLASH; mode++) {
        const int least = FO_DEVICE_CPU || mode != FO_SLICE ? 1 : 2;
        for (int m = 1; m <= (mode == FO_NONE ? 1 : 4); m++) {
            for (int topology = FO_DIRECT; topology <= FO_RING; topology++) {
                for (int fp32 = FO_FLOATX == FO_FP32; fp32 < 2; fp32++) {
                    k->c = (Config){(FoMode)mode, m, (FoTopology)topology, fp32 ? FO_FP32 : FO_BF16, 0};
                    if (!is_tested(&k->c)) { continue; }
                    test_config(k);
                    if (m == least) { test_who_waits(k); }
                    if (m == least && k->P > 1) { test_mark(k); }
                    k->c.idle = is_idle_config(&k->c);
                    if (k->c.idle) { test_config(k); }
                }
            }
        }
    }
}

// ranks fall behind each other and so do their two streams, by up to 3 ms at each chunk
static void test_stress(Rank* k) {
    for (int round = 0; round < (FO_DEVICE_CPU ? 3 : 1); round++) {
        for (int i = 0; i < 4; i++) {
            k->c =
                (Config){i < 2 ? FO_FLASH : FO_SLICE, 1 + round, i % 2 ? FO_RING : FO_DIRECT, FO_FLOATX, 0};
            check_at_config(k, "stress, ");
            test_allgather_run(k, 3000);
            test_reducescatter_run(k, 3000);
        }
    }
}

// destroyed with work queued: it waits for both streams, whose operations still need the events
static void test_destroy(Rank* k) {
    size_t own = (size_t)k->r * ROWS, row = C * sizeof(floatX);
    k->c = (Config){FO_FLASH, 2, FO_DIRECT, FO_FLOATX, 0};
    check_at_config(k, "destroy, ");
    for (int slow_comm = 0; slow_comm < 2; slow_comm++) {
        FoOverlap* o = overlap(k, "destroyed", FO_ALLGATHER);
        floatX *inp = numbers(k, 91, own, ROWS, C), *all = poisoned_rows(k, k->N, C);
        int us_a_shard = slow_comm ? 0 : 5000;
        fo_copy(all + own * C, inp, ROWS * row, k->compute);
        if (slow_comm) { queue_sleep(k->comm, 5000); }
        fo_allgather_run(o, all, row, k->N, slow_chunk, &us_a_shard);
        fo_overlap_destroy(o);
        CHECK(wrong_rows(k, all, 91, 0, k->N, C) == 0);
        release(k);
    }
}

static void body(FoGroup* g, void* arg) {
    Rank k;
    (void)arg;
    rank_open(&k, g);
    test_configs(&k);
    test_stress(&k);
    test_destroy(&k);
    if (k.P > 1 && fo_device_emulates()) { test_link(&k); }
    rank_close(&k);
}

// ---- refusals ---------------------------------------------------------------------------------------------
// what a caller must not do; arg says which
static void wrong_call(FoGroup* g, void* arg) {
    Rank k;
    int which = *(int*)arg;
    rank_open(&k, g);
    k.c = (Config){FO_FLASH, which == 0 ? FO_MAX_M + 1 : 2, FO_RING, FO_BF16, 0};
    FoOverlap *gather = overlap(&k, "G1", FO_ALLGATHER), *scatter = overlap(&k, "S1", FO_REDUCESCATTER);
    FoStaging st = {k.d, k.d, FO_BF16}; // never touched
    if (which == 1) { fo_allgather_run(scatter, k.d, 4, 12, copy_chunk, NULL); }
    if (which == 2) { fo_reducescatter_run(gather, &st, C, 12, copy_chunk, NULL); }
    if (which == 3) { fo_allgather_begin(gather, k.d, 4, 11); }
    if (which == 4) { fo_reducescatter_end_fp32(scatter, &st, NULL, C, 12); }
    if (which > 4) { // shards that are not the ranks'; sequences that are not whole
        const FoLayout l = {3, ROWS, which == 5 ? 3 : 2, 0};
        FoColumns qkv = {NULL, NULL, NULL, NULL, 0, 0, 0, NULL, 0};
        fo_attention_matmul_reducescatter_forward(&st, NULL, NULL, &qkv, NULL, l, NH, HS, C, 1, scatter);
    }
}

static void test_refusals(void) {
    static const char* says[] = {
        "G1: m=17: want 1 to 16",        "S1: a plan of the wrong kind",
        "G1: a plan of the wrong kind",  "G1: N=11 rows are not a multiple of P=2",
        "S1: partial sums are not fp32", "S1: 3 sequences as 3 shards, of 2 ranks",
        "S1: 3 sequences as 2 shards",
    };
    for (int which = 0; which < 7; which++) {
        CHECK_AT("refusal %d", which);
        CHECK_DIES(fo_ranks_run(2, wrong_call, &which), says[which]);
    }
}

int main(void) {
    test_refusals(); // before any thread has started
    for (int P = 1; P <= (FO_DEVICE_CPU ? 4 : 3); P++) {
        fo_ranks_run(P, body, NULL);
    }
    return check_report();
}
