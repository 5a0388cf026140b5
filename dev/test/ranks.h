/* ranks.h -- what the tests share that execute schedules on P ranks: a rank's streams, data, operations that
 * take time.
 *
 * Data are small whole numbers that differ by matrix, row and column, so that sums are exact in any order.
 * Arrays are made NaN before they are written; produce() writes one just before the call under test, early or
 * late. Used by test_overlap.c, test_fetch.c, test_ulysses.c and test_zero.c.
 */
#ifndef RANKS_H
#define RANKS_H
#include "dev/test/check.h"
#include "flashoverlap/fo_overlap.h"
#include <stdatomic.h>
#include <stdlib.h>

enum { ROWS = 12, C = 6, OC = 5, K_MOST = 7 }; // rows of a shard: m = 1, 2, 3, 4 divide them
enum { NAN_NBYTES = 1 << 16, MOST_ARRAYS = 256 };

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
    // of a mesh, beside the group above: the ranks of other such groups with the same r
    FoGroup* up;
    FoStream* up_comm;
    int U, u;
    Config c;
    uint64_t random;
    void* nan; // NAN_NBYTES bytes that are NaN as bf16 and as fp32
    void* mine[MOST_ARRAYS];
    int nmine;
} Rank;

// ---- operations that take time ----------------------------------------------------------------------------
static inline int random_below(Rank* k, int n) {
    k->random = k->random * 6364136223846793005u + 1442695040888963407u;
    return (int)((k->random >> 33) % (uint64_t)n);
}

static inline void sleep_us(void* args) {
    usleep((useconds_t) * (int*)args);
}

static inline void queue_sleep(FoStream* s, int us) {
    fo_stream_call(s, sleep_us, &us, sizeof us);
}

// Stands still until the host opens it. Relaxed: it orders when things happen, not memory for
// ThreadSanitizer.
typedef struct {
    atomic_int open, late, passed;
} Gate;

static inline void pass_gate(void* args) {
    Gate* g = *(Gate**)args;
    for (int i = 0; !atomic_load_explicit(&g->open, memory_order_relaxed); i++) {
        if (i == 40000) { // 20 s: the host, which should have opened it, waits in vain
            atomic_store_explicit(&g->late, 1, memory_order_relaxed);
            break;
        }
        usleep(500);
    }
    atomic_store_explicit(&g->passed, 1, memory_order_relaxed);
}

static inline void queue_gate(FoStream* s, Gate* g) {
    fo_stream_call(s, pass_gate, &g, sizeof g);
}

static inline void open_gate(Gate* g) {
    atomic_store_explicit(&g->open, 1, memory_order_relaxed);
}

static inline int is_set(atomic_int* flag) {
    return atomic_load_explicit(flag, memory_order_relaxed);
}

// Waits until `behind` is passed, then opens `held`; or, if it must not be passed before, gives it 20 ms to
// be.
static inline void open_later(Gate* held, Gate* behind, int want_behind) {
    for (int i = 0; i < 20000 && want_behind && !is_set(&behind->passed); i++) {
        usleep(500);
    }
    if (!want_behind) { usleep(20000); }
    CHECK(is_set(&behind->passed) == want_behind);
    open_gate(held);
}

// ---- data -------------------------------------------------------------------------------------------------
// -2 ... 2, by matrix, row and column; sums of some tens of products are exact in bf16
static inline int value(int matrix, size_t row, int col) {
    uint32_t h = (uint32_t)matrix * 2654435761u ^ (uint32_t)row * 2246822519u ^ (uint32_t)col * 3266489917u;
    h = (h ^ (h >> 15)) * 0x2c1b3c6du;
    h ^= h >> 13;
    return (int)(h % 5u) - 2;
}

// a matrix of which each rank has its own
static inline int of_rank(int matrix, int rank) {
    return 100 * (rank + 1) + matrix;
}

static inline void* allocate(Rank* k, size_t nbytes) {
    fo_require(k->nmine < MOST_ARRAYS, "more than %d arrays in a test", (int)MOST_ARRAYS);
    return k->mine[k->nmine++] = fo_malloc(k->d, nbytes);
}

static inline void release(Rank* k) {
    fo_stream_sync(k->compute);
    fo_stream_sync(k->comm);
    if (k->up) { fo_stream_sync(k->up_comm); }
    while (k->nmine > 0) {
        fo_free(k->d, k->mine[--k->nmine]);
    }
}

// rows [row0, row0 + rows) of a matrix, in an array of type
static inline void* numbers_of_type(Rank* k, int matrix, size_t row0, size_t rows, int cols, FoDtype type) {
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

static inline floatX* numbers(Rank* k, int matrix, size_t row0, size_t rows, int cols) {
    return (floatX*)numbers_of_type(k, matrix, row0, rows, cols, FO_FLOATX);
}

static inline void queue_poison(Rank* k, void* x, size_t nbytes) {
    fo_require(nbytes <= NAN_NBYTES, "%zu bytes of NaN", nbytes);
    fo_copy(x, k->nan, nbytes, k->compute);
}

static inline void* poisoned(Rank* k, size_t nbytes) {
    void* x = allocate(k, nbytes);
    queue_poison(k, x, nbytes);
    return x;
}

static inline floatX* poisoned_rows(Rank* k, size_t rows, int cols) {
    return (floatX*)poisoned(k, rows * (size_t)cols * sizeof(floatX));
}

static inline FoStaging staging(Rank* k) {
    size_t all = k->N * (size_t)C * fo_dtype_nbytes(k->c.wire);
    FoStaging st = {poisoned(k, all), poisoned(k, all), k->c.wire};
    return st;
}

static inline FoOverlap* overlap(Rank* k, const char* name, FoKind kind) {
    return fo_overlap_create(name, kind, k->c.mode, k->c.m, k->c.topology, k->g, k->compute, k->comm);
}

// with m sub-chunks, in the other group of a mesh; mode none has one
static inline FoOverlap* overlap_up(Rank* k, const char* name, FoKind kind, int m) {
    return fo_overlap_create(name, kind, k->c.mode, k->c.mode == FO_NONE ? 1 : m, FO_DIRECT, k->up,
                             k->compute, k->up_comm);
}

// streams fall behind each other
static inline void stagger(Rank* k) {
    if (random_below(k, 2)) { queue_sleep(k->compute, random_below(k, 600)); }
    if (random_below(k, 2)) { queue_sleep(k->comm, random_below(k, 600)); }
    if (k->up && random_below(k, 2)) { queue_sleep(k->up_comm, random_below(k, 600)); }
}

// an operation that writes dst just before the call under test, early or late
static inline void produce(Rank* k, void* dst, const void* src, size_t nbytes) {
    stagger(k);
    fo_copy(dst, src, nbytes, k->compute);
}

// copies for the test what a call has written, and makes it NaN at once
static inline void* taken(Rank* k, void* x, size_t nbytes) {
    void* copy = allocate(k, nbytes);
    fo_copy(copy, x, nbytes, k->compute);
    queue_poison(k, x, nbytes);
    return copy;
}

static inline void rest(Rank* k) {
    if (k->c.idle) { usleep(10000); }
}

// the values are those wanted, as numbers: -0 is 0, and NaN is nothing
static inline int wrong_values(Rank* k, const floatX* got, const int* want, size_t nelem) {
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

static inline int wrong_values_fp32(Rank* k, const float* got, const int* want, size_t nelem) {
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

static inline int wrong_rows(Rank* k, const floatX* got, int matrix, size_t row0, size_t rows, int cols) {
    int want[4 * ROWS * K_MOST];
    for (size_t i = 0; i < rows * (size_t)cols; i++) {
        want[i] = value(matrix, row0 + i / (size_t)cols, (int)(i % (size_t)cols));
    }
    return wrong_values(k, got, want, rows * (size_t)cols);
}

static inline int same_bits(Rank* k, const void* a, const void* b, size_t nbytes) {
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
static inline void add_product(int* want, int a, size_t row0, size_t rows, int w, int ocs, int cols) {
    for (size_t i = 0; i < rows; i++) {
        for (int o = 0; o < ocs; o++) {
            for (int c = 0; c < cols; c++) {
                want[i * (size_t)ocs + (size_t)o] += value(a, row0 + i, c) * value(w, (size_t)o, c);
            }
        }
    }
}

// want[row][col] += a[row] @ w, w of `cols` columns
static inline void add_product_transposed(int* want, int a, size_t row0, size_t rows, int w, int ocs,
                                          int cols) {
    for (size_t i = 0; i < rows; i++) {
        for (int o = 0; o < ocs; o++) {
            for (int c = 0; c < cols; c++) {
                want[i * (size_t)cols + (size_t)c] += value(a, row0 + i, o) * value(w, (size_t)o, c);
            }
        }
    }
}

// large and small numbers, so that another order of adding gives another sum
static inline float order_value(int rank, size_t i) {
    static const float by_rank[3] = {1.0f, 16777216.0f, -16777216.0f};
    return by_rank[rank % 3] * (i % 2 ? 1.0f : -1.0f);
}

// own rows of residual + the sum over ranks, by the same operations called whole, in the order of the
// topology
static inline void plain_reducescatter(Rank* k, floatX* out, char* const partial[], const floatX* residual) {
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

// ---- a rank -----------------------------------------------------------------------------------------------
static inline void rank_open_on(Rank* k, FoGroup* g, FoDevice* d) {
    memset(k, 0, sizeof *k);
    k->g = g, k->P = fo_group_size(g), k->r = fo_group_rank(g), k->N = (size_t)k->P * ROWS;
    k->d = d, k->U = 1;
    k->compute = fo_stream_create(k->d, "compute"), k->comm = fo_stream_create(k->d, "comm");
    k->random = (uint64_t)(k->P * 16 + k->r);
    unsigned char* nan = (unsigned char*)malloc(NAN_NBYTES);
    fo_require(nan != NULL, "out of memory");
    memset(nan, 0xff, NAN_NBYTES);
    k->nan = fo_malloc(k->d, NAN_NBYTES);
    fo_upload(k->nan, nan, NAN_NBYTES, k->compute);
    fo_stream_sync(k->compute);
    free(nan);
}

static inline void rank_open(Rank* k, FoGroup* g) {
    rank_open_on(k, g, fo_device_open(fo_group_rank(g), fo_group_size(g)));
}

// world = U x P ranks: groups of P neighbours, and of U ranks that are P apart
static inline void mesh_open(Rank* k, FoGroup* world, int P) {
    int rank = fo_group_rank(world), size = fo_group_size(world);
    rank_open_on(k, fo_group_split(world, rank / P), fo_device_open(rank, size));
    k->up = fo_group_split(world, rank % P);
    k->U = fo_group_size(k->up), k->u = fo_group_rank(k->up);
    k->up_comm = fo_stream_create(k->d, "comm up");
    k->random += (uint64_t)(256 * size + 1024 * k->u);
}

static inline void rank_close(Rank* k) {
    CHECK_AT("P=%d r=%d end", k->P, k->r);
    fo_free(k->d, k->nan);
    CHECK(fo_device_nbytes(k->d) == 0);
    fo_stream_destroy(k->compute);
    fo_stream_destroy(k->comm);
    if (k->up) {
        fo_stream_destroy(k->up_comm);
        fo_group_free(k->up);
        fo_group_free(k->g);
    }
    fo_device_close(k->d);
}

// what k->c says, before what is tested in it
static inline void check_at_config(const Rank* k, const char* what) {
    CHECK_AT("U=%d u=%d P=%d r=%d %s%s m=%d %s wire %s%s", k->U, k->u, k->P, k->r, what,
             fo_mode_name(k->c.mode), k->c.m, k->c.topology == FO_RING ? "ring" : "direct",
             k->c.wire == FO_FP32 ? "fp32" : "bf16", k->c.idle ? " idle" : "");
}
#endif
