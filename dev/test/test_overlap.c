/* test_overlap.c -- the flash primitives and the fetching of rows, executed: P = 1, 2, 3, 4 ranks that are
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
#include "dev/test/check.h"
#include "flashoverlap/cpu/cpu.h" // fo__enqueue, for operations that take time
#include "flashoverlap/fo_overlap.h"
#include <stdatomic.h>
#include <stdlib.h>

enum { ROWS = 12, C = 6, OC = 5, K_MOST = 7 }; // rows of a shard: m = 1, 2, 3, 4 divide them
enum { NH = 2, HS = 4, V = 11, NAN_NBYTES = 1 << 16 };

typedef struct {
    FoMode mode;
    int m;
    FoTopology topology;
    FoDtype wire;
    int idle; // the host rests between calls, else it goes on at once
} Config;

typedef struct {
    FoGroup* g;
    FoDevice* d;
    FoStream *compute, *comm;
    int P, r;
    size_t N;
    Config c;
    uint64_t random;
    void* nan; // NAN_NBYTES bytes that are NaN as bf16 and as fp32
    void* mine[64];
    int nmine;
} Rank;

// ---- operations that take time ----------------------------------------------------------------------------
static int random_below(Rank* k, int n) {
    k->random = k->random * 6364136223846793005u + 1442695040888963407u;
    return (int)((k->random >> 33) % (uint64_t)n);
}

static void sleep_op(FoStream* s, void* args) {
    (void)s;
    usleep((useconds_t) * (int*)args);
}

static void queue_sleep(FoStream* s, int us) {
    fo__enqueue(s, sleep_op, &us, sizeof us);
}

// Stands still until the host opens it. Relaxed: it orders when things happen, not memory for
// ThreadSanitizer.
typedef struct {
    atomic_int open, late, passed;
} Gate;

static void gate_op(FoStream* s, void* args) {
    Gate* g = *(Gate**)args;
    (void)s;
    for (int i = 0; !atomic_load_explicit(&g->open, memory_order_relaxed); i++) {
        if (i == 40000) { // 20 s: the host, which should have opened it, waits in vain
            atomic_store_explicit(&g->late, 1, memory_order_relaxed);
            break;
        }
        usleep(500);
    }
    atomic_store_explicit(&g->passed, 1, memory_order_relaxed);
}

static void queue_gate(FoStream* s, Gate* g) {
    fo__enqueue(s, gate_op, &g, sizeof g);
}

static void open_gate(Gate* g) {
    atomic_store_explicit(&g->open, 1, memory_order_relaxed);
}

static int is_set(atomic_int* flag) {
    return atomic_load_explicit(flag, memory_order_relaxed);
}

// ---- data -------------------------------------------------------------------------------------------------
// -2 ... 2, by matrix, row and column; sums of some tens of products are exact in bf16
static int value(int matrix, size_t row, int col) {
    uint32_t h = (uint32_t)matrix * 2654435761u ^ (uint32_t)row * 2246822519u ^ (uint32_t)col * 3266489917u;
    h = (h ^ (h >> 15)) * 0x2c1b3c6du;
    h ^= h >> 13;
    return (int)(h % 5u) - 2;
}

// a matrix of which each rank has its own
static int of_rank(int matrix, int rank) {
    return 100 * (rank + 1) + matrix;
}

static void* allocate(Rank* k, size_t nbytes) {
    fo_require(k->nmine < 64, "more than 64 arrays in a test");
    return k->mine[k->nmine++] = fo_malloc(k->d, nbytes);
}

static void release(Rank* k) {
    fo_stream_sync(k->compute);
    fo_stream_sync(k->comm);
    while (k->nmine > 0) {
        fo_free(k->d, k->mine[--k->nmine]);
    }
}

// rows [row0, row0 + rows) of a matrix, in an array of type
static void* numbers_of_type(Rank* k, int matrix, size_t row0, size_t rows, int cols, FoDtype type) {
    size_t nelem = rows * (size_t)cols, nbytes = nelem * fo_dtype_nbytes(type);
    void* host = malloc(nbytes + 1);
    void* x = allocate(k, nbytes);
    fo_require(host != NULL, "out of memory");
    for (size_t i = 0; i < nelem; i++) {
        float v = (float)value(matrix, row0 + i / (size_t)cols, (int)(i % (size_t)cols));
        if (type == FO_FP32) {
            ((float*)host)[i] = v;
        } else {
            ((FoBf16*)host)[i] = fo_bf16_from_float(v);
        }
    }
    fo_upload(x, host, nbytes, k->compute);
    fo_stream_sync(k->compute);
    free(host);
    return x;
}

static floatX* numbers(Rank* k, int matrix, size_t row0, size_t rows, int cols) {
    return (floatX*)numbers_of_type(k, matrix, row0, rows, cols, FO_FLOATX);
}

static void queue_poison(Rank* k, void* x, size_t nbytes) {
    fo_require(nbytes <= NAN_NBYTES, "%zu bytes of NaN", nbytes);
    fo_copy(x, k->nan, nbytes, k->compute);
}

static void* poisoned(Rank* k, size_t nbytes) {
    void* x = allocate(k, nbytes);
    queue_poison(k, x, nbytes);
    return x;
}

static floatX* poisoned_rows(Rank* k, size_t rows, int cols) {
    return (floatX*)poisoned(k, rows * (size_t)cols * sizeof(floatX));
}

static FoStaging staging(Rank* k) {
    size_t all = k->N * (size_t)C * fo_dtype_nbytes(k->c.wire);
    FoStaging st = {poisoned(k, all), poisoned(k, all), k->c.wire};
    return st;
}

static FoOverlap* overlap(Rank* k, const char* name, FoKind kind) {
    return fo_overlap_create(name, kind, k->c.mode, k->c.m, k->c.topology, k->g, k->compute, k->comm);
}

// an operation that writes dst just before the call under test, early or late
static void produce(Rank* k, void* dst, const void* src, size_t nbytes) {
    if (random_below(k, 2)) { queue_sleep(k->compute, random_below(k, 600)); }
    if (random_below(k, 2)) { queue_sleep(k->comm, random_below(k, 600)); }
    fo_copy(dst, src, nbytes, k->compute);
}

static void rest(Rank* k) {
    if (k->c.idle) { usleep(10000); }
}

// the values are those wanted, as numbers: -0 is 0, and NaN is nothing
static int wrong_values(Rank* k, const floatX* got, const int* want, size_t nelem) {
    floatX* host = (floatX*)malloc(nelem * sizeof *host + 1);
    int wrong = 0;
    fo_require(host != NULL, "out of memory");
    fo_download(host, got, nelem * sizeof *host, k->compute);
    fo_stream_sync(k->compute);
    for (size_t i = 0; i < nelem; i++) {
        wrong += !(fo_float(host[i]) == (float)want[i]);
    }
    free(host);
    return wrong;
}

static int wrong_values_fp32(Rank* k, const float* got, const int* want, size_t nelem) {
    float* host = (float*)malloc(nelem * sizeof *host + 1);
    int wrong = 0;
    fo_require(host != NULL, "out of memory");
    fo_download(host, got, nelem * sizeof *host, k->compute);
    fo_stream_sync(k->compute);
    for (size_t i = 0; i < nelem; i++) {
        wrong += !(host[i] == (float)want[i]);
    }
    free(host);
    return wrong;
}

static int wrong_rows(Rank* k, const floatX* got, int matrix, size_t row0, size_t rows, int cols) {
    int want[4 * ROWS * K_MOST];
    for (size_t i = 0; i < rows * (size_t)cols; i++) {
        want[i] = value(matrix, row0 + i / (size_t)cols, (int)(i % (size_t)cols));
    }
    return wrong_values(k, got, want, rows * (size_t)cols);
}

static int same_bits(Rank* k, const void* a, const void* b, size_t nbytes) {
    char *x = (char*)malloc(nbytes + 1), *y = (char*)malloc(nbytes + 1);
    fo_require(x != NULL && y != NULL, "out of memory");
    fo_download(x, a, nbytes, k->compute);
    fo_download(y, b, nbytes, k->compute);
    fo_stream_sync(k->compute);
    int same = memcmp(x, y, nbytes) == 0;
    free(x);
    free(y);
    return same;
}

// want[row][oc] += a[row] . w[oc], a of `cols` columns from row0 on
static void add_product(int* want, int a, size_t row0, size_t rows, int w, int ocs, int cols) {
    for (size_t i = 0; i < rows; i++) {
        for (int o = 0; o < ocs; o++) {
            for (int c = 0; c < cols; c++) {
                want[i * (size_t)ocs + (size_t)o] += value(a, row0 + i, c) * value(w, (size_t)o, c);
            }
        }
    }
}

// want[row][col] += a[row] @ w, w of `cols` columns
static void add_product_transposed(int* want, int a, size_t row0, size_t rows, int w, int ocs, int cols) {
    for (size_t i = 0; i < rows; i++) {
        for (int o = 0; o < ocs; o++) {
            for (int c = 0; c < cols; c++) {
                want[i * (size_t)cols + (size_t)c] += value(a, row0 + i, o) * value(w, (size_t)o, c);
            }
        }
    }
}

// ---- all-gather -------------------------------------------------------------------------------------------
typedef struct {
    Rank* k;
    floatX *out, *all;
    size_t row0[FO_MAX_STEPS]; // of the chunks in the order in which they were computed
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
    size_t row0[FO_MAX_STEPS];
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

// large and small numbers, so that another order of adding gives another sum
static float order_value(int rank, size_t i) {
    static const float by_rank[3] = {1.0f, 16777216.0f, -16777216.0f};
    return by_rank[rank % 3] * (i % 2 ? 1.0f : -1.0f);
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
    char host[4 * ROWS * C * sizeof(float)];
    floatX want[ROWS * C], got[ROWS * C], *out = poisoned_rows(k, ROWS, C);
    for (size_t i = 0; i < nelem; i++) {
        float v = order_value(k->r, i);
        FoBf16 b = fo_bf16_from_float(v);
        memcpy(host + i * fo_dtype_nbytes(st.wire), st.wire == FO_FP32 ? (void*)&v : (void*)&b,
               fo_dtype_nbytes(st.wire));
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

// own rows of residual + the sum over ranks, by the same operations called whole, in the order of the
// topology
static void plain_reducescatter(Rank* k, floatX* out, char* const partial[], const floatX* residual) {
    size_t own = (size_t)k->r * ROWS * C * fo_dtype_nbytes(k->c.wire);
    const void* parts[FO_MAX_RANKS];
    int P = k->P, nparts = P;
    for (int p = 0; p < P; p++) {
        parts[p] = partial[p] + own;
    }
    if (k->c.topology == FO_RING && P > 1) {
        for (int i = 2; i < P; i++) { // the sum travels from r+1 to r-1
            char *from = partial[(k->r + i - 1) % P] + own, *to = partial[(k->r + i) % P] + own;
            fo_add(to, from, ROWS * C, k->c.wire, k->compute);
        }
        int last = (k->r + P - 1) % P;
        parts[0] = partial[last < k->r ? last : k->r] + own;
        parts[1] = partial[last < k->r ? k->r : last] + own;
        nparts = 2;
    }
    fo_accumulate(out, parts, residual, NULL, ROWS, C, nparts, k->c.wire, k->compute);
}

static void test_attention_forward(Rank* k, int zigzag, int query_split) {
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
    for (int p = 0; p < k->P; p++) { // what each rank computes, by the operations called whole
        floatX *q = numbers(k, of_rank(71, p), 0, k->N, 3 * W), *w = numbers(k, of_rank(72, p), 0, C, W);
        floatX* a = p == k->r ? own_att : poisoned_rows(k, k->N, W);
        float* e = p == k->r ? own_lse : (float*)poisoned(k, lse_nbytes);
        partial[p] = (char*)poisoned(k, k->N * C * fo_dtype_nbytes(st.wire));
        fo_attention_forward(a, e, q, 0, k->N, l, NH, HS, k->compute);
        fo_matmul_forward(partial[p], a, w, NULL, k->N, W, C, st.wire, k->compute);
        if (p == k->r) { qkv = q, weight = w; }
    }
    plain_reducescatter(k, want, partial, residual);
    floatX* qkv_now = poisoned_rows(k, k->N, 3 * W);
    produce(k, qkv_now, qkv, 3 * att_nbytes);
    rest(k);
    fo_attention_matmul_reducescatter_forward(&st, att, lse, qkv_now, weight, l, NH, HS, C, query_split, o);
    queue_poison(k, qkv_now, 3 * att_nbytes);
    rest(k);
    fo_reducescatter_end(o, &st, out, residual, NULL, C, k->N);
    queue_poison(k, st.partial, k->N * C * fo_dtype_nbytes(st.wire));
    CHECK(same_bits(k, out, want, ROWS * C * sizeof(floatX)));
    CHECK(same_bits(k, att, own_att, att_nbytes));
    CHECK(same_bits(k, lse, own_lse, lse_nbytes));
    fo_overlap_destroy(o);
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

// ---- fetching rows ----------------------------------------------------------------------------------------
// the table's rows by rank; with three and four ranks one of them has none
static const size_t FIRST[5][5] = {{0}, {0, V}, {0, 5, V}, {0, 4, 4, V}, {0, 3, 7, 7, V}};

// all over the table; one and the same; only own rows, where there are any; rows in blocks
static int token(int batch, int P, size_t row) {
    int p = (int)(row / ROWS);
    if (batch == 0) { return (value(80, row, 0) + 2) * 2 + (int)(row % 3); }
    if (batch == 1) { return 1; }
    if (batch == 2) { return (int)(FIRST[P][p + 1] > FIRST[P][p] ? FIRST[P][p] : 0); }
    return (int)(row / 2 % V);
}

typedef struct {
    size_t nown; // rows of the table here
    int batch, want_out[ROWS * C], want_table[V * C];
    floatX *table, *wpe, *dout, *dout_src, *out[2], *seen[2];
    float* dtable;
    int* pos;
} Fetched;

// a mark that was made before a fetch is spent: the gather that follows waits for its own rows again
static void gather_after_mark(Rank* k, floatX* seen, const floatX* inp, FoOverlap* o) {
    size_t row = C * sizeof(floatX);
    floatX* all = poisoned_rows(k, k->N, C);
    queue_sleep(k->compute, 600);
    fo_copy(all + (size_t)k->r * ROWS * C, inp, ROWS * row, k->compute);
    fo_allgather_begin(o, all, row, k->N);
    fo_allgather_end(o);
    fo_copy(seen, all, k->N * row, k->compute);
}

// E1 and E2, twice in a row through the same staging; E2's first half is hidden under other work
static void fetch_twice(Rank* k, Fetched* x, FoFetch* f, FoOverlap* o) {
    FoStaging st = staging(k);
    floatX* table = poisoned_rows(k, V, C);
    size_t nbytes = k->N * C * sizeof(floatX), row = C * sizeof(floatX);
    for (int i = 0; i < 2; i++) {
        produce(k, table, x->table, x->nown * row);
        if (i == 1) { fo_overlap_mark(o); } // the rows are packed after it: it can't speak for them
        rest(k);
        fo_fetch_encoder_forward(x->out[i], table, x->wpe, x->pos, f, &st, C, o);
        queue_poison(k, table, x->nown * row);
        queue_poison(k, st.partial, nbytes);
        queue_poison(k, st.received, nbytes);
        if (i == 1) { gather_after_mark(k, x->seen[0], x->dout_src, o); }
        produce(k, x->dout, x->dout_src, ROWS * row);
        if (i == 1) { fo_overlap_mark(o); }
        rest(k);
        fo_fetch_encoder_backward_begin(x->dout, f, &st, C, o);
        queue_poison(k, x->dout, ROWS * row);
        queue_sleep(k->compute, random_below(k, 600));
        rest(k);
        fo_fetch_encoder_backward_end(x->dtable, f, &st, C, o);
        queue_poison(k, st.partial, nbytes);
        queue_poison(k, st.received, nbytes);
        if (i == 1) { gather_after_mark(k, x->seen[1], x->dout_src, o); }
    }
}

// rows that occur are in order, and so are the places of each: the order of the sum is that of ranks and rows
static int wrong_order(Rank* k, const FoFetch* f) {
    int dst[4 * ROWS + 1], start[4 * ROWS + 2], order[4 * ROWS + 1], wrong = 0;
    size_t n = f->give[k->P];
    fo_download(dst, f->dst, f->nuniq * sizeof(int), k->compute);
    fo_download(start, f->start, (f->nuniq + 1) * sizeof(int), k->compute);
    fo_download(order, f->order, n * sizeof(int), k->compute);
    fo_stream_sync(k->compute);
    for (size_t u = 0; u < f->nuniq; u++) {
        wrong += u > 0 && dst[u] <= dst[u - 1];
        for (int i = start[u] + 1; i < start[u + 1]; i++) {
            wrong += order[i] <= order[i - 1];
        }
    }
    return wrong + (start[0] != 0) + (start[f->nuniq] != (int)n);
}

static void test_fetch_batch(Rank* k, FoFetch* f, FoOverlap* o, Fetched* x) {
    int ids[4 * ROWS];
    const size_t* first = FIRST[k->P];
    memset(x->want_out, 0, sizeof x->want_out);
    memset(x->want_table, 0, sizeof x->want_table);
    for (size_t n = 0; n < k->N; n++) {
        ids[n] = token(x->batch, k->P, n);
        for (int c = 0; c < C; c++) {
            size_t i = n - (size_t)k->r * ROWS, id = (size_t)ids[n];
            if (n / ROWS == (size_t)k->r) {
                x->want_out[i * C + (size_t)c] = value(81, id, c) + value(82, i * 5 % 7, c);
            }
            if (id >= first[k->r] && id < first[k->r + 1]) { // both calls add
                x->want_table[(id - first[k->r]) * C + (size_t)c] += 2 * value(83, n, c);
            }
        }
    }
    fo_zero(x->dtable, V * C * sizeof(float), k->compute);
    fo_fetch_set(f, ids, k->N, first, k->P, k->r, k->compute);
    fetch_twice(k, x, f, o);
    fo_stream_sync(k->compute); // as fo_fetch_set of the next batch wants it
    CHECK(wrong_order(k, f) == 0);
    CHECK(wrong_rows(k, x->seen[0], 83, 0, k->N, C) == 0);
    CHECK(wrong_rows(k, x->seen[1], 83, 0, k->N, C) == 0);
    CHECK(wrong_values(k, x->out[0], x->want_out, ROWS * C) == 0);
    CHECK(wrong_values(k, x->out[1], x->want_out, ROWS * C) == 0);
    CHECK(wrong_values_fp32(k, x->dtable, x->want_table, x->nown * C) == 0);
}

static void test_fetch(Rank* k) {
    if (k->c.topology != FO_DIRECT || k->c.m != 1) { return; }
    FoOverlap* o = overlap(k, "E1", FO_ALLGATHER);
    FoFetch* f = fo_fetch_create(k->d, k->N);
    const size_t* first = FIRST[k->P];
    Fetched x;
    int pos[ROWS];
    x.nown = first[k->r + 1] - first[k->r];
    for (x.batch = 0; x.batch < 4; x.batch++) {
        x.table = numbers(k, 81, first[k->r], x.nown, C);
        x.wpe = numbers(k, 82, 0, 7, C);
        x.dout_src = numbers(k, 83, (size_t)k->r * ROWS, ROWS, C);
        x.dout = poisoned_rows(k, ROWS, C);
        x.out[0] = poisoned_rows(k, ROWS, C);
        x.out[1] = poisoned_rows(k, ROWS, C);
        x.seen[0] = poisoned_rows(k, k->N, C);
        x.seen[1] = poisoned_rows(k, k->N, C);
        x.dtable = (float*)poisoned(k, V * C * sizeof(float));
        x.pos = (int*)allocate(k, sizeof pos);
        for (int i = 0; i < ROWS; i++) {
            pos[i] = i * 5 % 7;
        }
        fo_upload(x.pos, pos, sizeof pos, k->compute);
        test_fetch_batch(k, f, o, &x);
        release(k);
    }
    fo_fetch_destroy(k->d, f);
    fo_overlap_destroy(o);
}

// ---- what waits for what, and what is counted -------------------------------------------------------------
static void copy_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    (void)ctx, (void)row0, (void)n, (void)s;
}

static void open_later(Gate* held, Gate* behind, int want_behind) {
    for (int i = 0; i < 20000 && want_behind && !is_set(&behind->passed); i++) {
        usleep(500);
    }
    if (!want_behind) { usleep(20000); }
    CHECK(is_set(&behind->passed) == want_behind);
    open_gate(held);
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

// the same for the gradient rows of a fetch, of which every rank has some for each other
static void test_fetch_waits(Rank* k) {
    FoOverlap* o = overlap(k, "E2", FO_ALLGATHER);
    FoFetch* f = fo_fetch_create(k->d, k->N);
    FoStaging st = staging(k);
    floatX* dout = numbers(k, 83, (size_t)k->r * ROWS, ROWS, C);
    float* dtable = (float*)allocate(k, V * C * sizeof *dtable);
    Gate held = {0}, behind = {1, 0, 0};
    int ids[4 * ROWS];
    const size_t first[5] = {0, 1, 2, 3, 4};
    for (size_t n = 0; n < k->N; n++) {
        ids[n] = (int)(n % (size_t)k->P);
    }
    fo_fetch_set(f, ids, k->N, first, k->P, k->r, k->compute);
    queue_gate(k->comm, &held);
    fo_fetch_encoder_backward_begin(dout, f, &st, C, o);
    queue_gate(k->compute, &behind);
    fo_fetch_encoder_backward_end(dtable, f, &st, C, o);
    open_later(&held, &behind, k->c.mode != FO_NONE || k->P == 1);
    fo_stream_sync(k->compute);
    size_t sent = (size_t)(k->P - 1) * (ROWS / (size_t)k->P) * C * sizeof(floatX);
    CHECK(!is_set(&held.late));
    CHECK(o->nbytes_sent == sent && o->nmessages == (size_t)(k->P - 1));
    fo_fetch_destroy(k->d, f);
    fo_overlap_destroy(o);
    release(k);
}

// A marked gather goes while the compute stream stands at a gate behind the mark; one not marked doesn't.
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
        open_later(&held, &behind, marked);
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
    CHECK_AT("P=%d r=%d %s m=%d %s wire %s%s", k->P, k->r, fo_mode_name(k->c.mode), k->c.m,
             k->c.topology == FO_RING ? "ring" : "direct", k->c.wire == FO_FP32 ? "fp32" : "bf16",
             k->c.idle ? " idle" : "");
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
        test_attention_forward(k, zigzag, 0);
        test_attention_forward(k, zigzag, 1);
        test_attention_backward(k, zigzag);
    }
    test_fetch(k);
}

// the host rests between calls (20 ms at each) in one config of each mode, with the widest variety of the
// rest
static int is_idle_config(const Config* c) {
    return c->wire == FO_FLOATX && (c->m == 1 || (c->m == 2 && c->mode == FO_FLASH));
}

static void test_configs(Rank* k) {
    for (int mode = FO_NONE; mode <= FO_FLASH; mode++) {
        for (int m = 1; m <= (mode == FO_NONE ? 1 : 4); m++) {
            for (int topology = FO_DIRECT; topology <= FO_RING; topology++) {
                for (int fp32 = FO_FLOATX == FO_FP32; fp32 < 2; fp32++) {
                    k->c = (Config){(FoMode)mode, m, (FoTopology)topology, fp32 ? FO_FP32 : FO_BF16, 0};
                    test_config(k);
                    if (m == 1) { test_who_waits(k); }
                    if (m == 1 && topology == FO_DIRECT) { test_fetch_waits(k); }
                    if (m == 1 && k->P > 1) { test_mark(k); }
                    k->c.idle = is_idle_config(&k->c);
                    if (k->c.idle) { test_config(k); }
                }
            }
        }
    }
}

// ranks fall behind each other and so do their two streams, by up to 3 ms at each chunk
static void test_stress(Rank* k) {
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            k->c =
                (Config){i < 2 ? FO_FLASH : FO_SLICE, 1 + round, i % 2 ? FO_RING : FO_DIRECT, FO_FLOATX, 0};
            CHECK_AT("P=%d r=%d stress, %s m=%d %s", k->P, k->r, fo_mode_name(k->c.mode), k->c.m,
                     k->c.topology == FO_RING ? "ring" : "direct");
            test_allgather_run(k, 3000);
            test_reducescatter_run(k, 3000);
        }
    }
}

static void body(FoGroup* g, void* arg) {
    static const Rank ZERO;
    Rank k = ZERO;
    (void)arg;
    k.g = g, k.P = fo_group_size(g), k.r = fo_group_rank(g), k.N = (size_t)k.P * ROWS;
    k.d = fo_device_open(k.r, k.P);
    k.compute = fo_stream_create(k.d, "compute"), k.comm = fo_stream_create(k.d, "comm");
    k.random = (uint64_t)(k.P * 16 + k.r);
    unsigned char* nan = (unsigned char*)malloc(NAN_NBYTES);
    fo_require(nan != NULL, "out of memory");
    memset(nan, 0xff, NAN_NBYTES);
    k.nan = fo_malloc(k.d, NAN_NBYTES);
    fo_upload(k.nan, nan, NAN_NBYTES, k.compute);
    fo_stream_sync(k.compute);
    free(nan);
    test_configs(&k);
    test_stress(&k);
    if (k.P > 1) { test_link(&k); }
    CHECK_AT("P=%d r=%d end", k.P, k.r);
    fo_free(k.d, k.nan);
    CHECK(fo_device_nbytes(k.d) == 0);
    fo_stream_destroy(k.compute);
    fo_stream_destroy(k.comm);
    fo_device_close(k.d);
}

// ---- refusals ---------------------------------------------------------------------------------------------
// what a caller must not do; arg says which
static void wrong_call(FoGroup* g, void* arg) {
    static const Rank ZERO;
    Rank k = ZERO;
    int which = *(int*)arg;
    k.g = g, k.P = fo_group_size(g), k.r = fo_group_rank(g), k.N = (size_t)k.P * ROWS;
    k.d = fo_device_open(k.r, k.P);
    k.compute = fo_stream_create(k.d, "compute"), k.comm = fo_stream_create(k.d, "comm");
    k.c = (Config){FO_FLASH, which == 0 ? FO_MAX_M + 1 : 2, FO_RING, FO_BF16, 0};
    FoOverlap *gather = overlap(&k, "G1", FO_ALLGATHER), *scatter = overlap(&k, "S1", FO_REDUCESCATTER);
    FoStaging st = {k.d, k.d, FO_BF16}; // never touched
    FoFetch* f = fo_fetch_create(k.d, 10);
    size_t first[3] = {0, 1, 2};
    int ids[12] = {0};
    if (which == 1) { fo_allgather_run(scatter, k.d, 4, 12, copy_chunk, NULL); }
    if (which == 2) { fo_reducescatter_run(gather, &st, C, 12, copy_chunk, NULL); }
    if (which == 3) { fo_allgather_begin(gather, k.d, 4, 11); }
    if (which == 4) { fo_reducescatter_end_fp32(scatter, &st, NULL, C, 12); }
    if (which == 5) { fo_fetch_encoder_forward(NULL, NULL, NULL, NULL, f, &st, C, gather); }
    if (which == 6) { fo_fetch_set(f, ids, 12, first, k.P, k.r, k.compute); }
    if (which == 7) { fo_fetch_set(f, ids, 9, first, k.P, k.r, k.compute); }
}

static void test_refusals(void) {
    static const char* says[] = {
        "G1: m=17: want 1 to 16",
        "S1: a plan of the wrong kind",
        "G1: a plan of the wrong kind",
        "G1: N=11 rows are not a multiple of P*m=4",
        "S1: partial sums are not fp32",
        "G1: fetching rows wants a direct all-gather plan with m=1",
        "N=12 tokens, want at most 10 and a multiple of 2",
        "N=9 tokens, want at most 10 and a multiple of 2",
    };
    for (int which = 0; which < 8; which++) {
        CHECK_AT("refusal %d", which);
        CHECK_DIES(fo_ranks_run(2, wrong_call, &which), says[which]);
    }
}

int main(void) {
    test_refusals(); // before any thread has started
    for (int P = 1; P <= 4; P++) {
        fo_ranks_run(P, body, NULL);
    }
    return check_report();
}
