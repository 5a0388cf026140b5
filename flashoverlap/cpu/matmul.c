/* matmul.c -- the GEMMs of fo_ops.h on the cpu: forward, dgrad, wgrad, and the device's peak rate.
 *
 * oneDNN computes them where its "brgemm" kernels run (AVX-512 and later; bf16 where the processor has it),
 * plain loops everywhere else and in builds without oneDNN. The reason for the choice is the promise of
 * fo_ops.h that a row has the same bits however rows are cut into calls. oneDNN's older kernels ("gemm:jit",
 * all that a processor with AVX2 gets) round differently for almost any other number of rows. brgemm does
 * not, measured with oneDNN 2.6.3 for bf16 and fp32, but for AMX where the width summed over is above 1024:
 * there wider sums are cut into pieces added in fp32 (K_PIECE). test_matmul.c checks the promise on the
 * machine it runs on.
 */
#include "flashoverlap/cpu/cpu.h"
#include "flashoverlap/fo_ops.h"
#include <pthread.h>
#include <stdlib.h>
#if FO_ONEDNN
#include <dnnl.h>
#endif

#if FO_OPENMP
#define PRAGMA(text) _Pragma(#text)
#define PARALLEL_FOR PRAGMA(omp parallel for schedule(static))
#else
#define PARALLEL_FOR
#endif

/* c = a @ b + bias, or c += a @ b. a [M, K] and b [K, N] have any strides (in elements), c is row-major.
 * a, b and bias are floatX.
 */
typedef struct {
    void* c; // [M, N] of out_type; fp32 if accumulate
    const floatX *a, *b, *bias;
    size_t M, N, K;
    size_t a_row, a_col, b_row, b_col;
    FoDtype out_type;
    int accumulate;
} Gemm;

static size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}
static size_t round_up(size_t a, size_t unit) {
    return (a + unit - 1) / unit * unit;
}

// ---- plain loops ------------------------------------------------------------------------------------------
/* A tile of MR x NR results stays in registers while k runs over all of K. a and b are first copied into fp32
 * panels in the order in which the tile reads them, with zeros beyond the edge: every result is then computed
 * by the same instructions in the same order, wherever it lies. That is all that the promise of equal bits
 * needs.
 */
enum { MR = 12, NR = LANE_NBYTES / 4, B_PANELS_NBYTES = 4 << 20 };

static void pack_a(float* panel, const Gemm* g, size_t m0) {
    size_t rows = min_size(MR, g->M - m0);
    for (size_t k = 0; k < g->K; k++) {
        for (size_t r = 0; r < MR; r++) {
            panel[k * MR + r] = r < rows ? fo_float(g->a[(m0 + r) * g->a_row + k * g->a_col]) : 0.0f;
        }
    }
}

static void pack_b(float* panel, const Gemm* g, size_t n0) {
    size_t cols = min_size(NR, g->N - n0);
    for (size_t k = 0; k < g->K; k++) {
        for (size_t c = 0; c < NR; c++) {
            panel[k * NR + c] = c < cols ? fo_float(g->b[k * g->b_row + (n0 + c) * g->b_col]) : 0.0f;
        }
    }
}

// -std=c11 keeps gcc from fusing a * b + c by itself; in this loop that would cost half the speed
__attribute__((optimize("fp-contract=fast"))) static void tile(float out[MR][NR], const float* a,
                                                               const float* b, size_t K) {
    Lane acc[MR] = {0};
    for (size_t k = 0; k < K; k++) {
        Lane bk;
        memcpy(&bk, b + k * NR, sizeof bk);
        for (int r = 0; r < MR; r++) {
            acc[r] += bk * a[k * MR + (size_t)r];
        }
    }
    memcpy(out, acc, sizeof acc);
}

static void store_tile(const Gemm* g, float tile[MR][NR], size_t m0, size_t n0) {
    size_t rows = min_size(MR, g->M - m0), cols = min_size(NR, g->N - n0);
    for (size_t r = 0; r < rows; r++) {
        size_t at = (m0 + r) * g->N + n0;
        for (size_t c = 0; c < cols; c++) {
            float v = tile[r][c];
            if (g->bias) { v += fo_float(g->bias[n0 + c]); }
            if (g->accumulate) { v += ((float*)g->c)[at + c]; }
            if (g->out_type == FO_FP32) {
                ((float*)g->c)[at + c] = v;
            } else {
                ((FoBf16*)g->c)[at + c] = fo_bf16_from_float(v);
            }
        }
    }
}

static void plain_gemm(FoStream* s, const Gemm* g) {
    // at least one panel, however wide the sum
    size_t cols = round_up(B_PANELS_NBYTES / (sizeof(float) * (g->K + 1)) + 1, NR);
    size_t block = min_size(cols, round_up(g->N, NR)), strips = round_up(g->M, MR) / MR;
    size_t nthreads = (size_t)fo_stream_device(s)->nthreads;
    size_t a_nelem = round_up(g->K * MR, 16);
    float* b_panels = fo__scratch(s, (block * g->K + nthreads * a_nelem) * sizeof(float));
    float* a_panels = b_panels + block * g->K;
    for (size_t n0 = 0; n0 < g->N; n0 += block) {
        size_t panels = round_up(min_size(block, g->N - n0), NR) / NR;
        PARALLEL_FOR
        for (size_t p = 0; p < panels; p++) {
            pack_b(b_panels + p * NR * g->K, g, n0 + p * NR);
        }
        PARALLEL_FOR
        for (size_t i = 0; i < strips; i++) {
            float* a = a_panels;
#if FO_OPENMP
            a += (size_t)omp_get_thread_num() * a_nelem;
#endif
            pack_a(a, g, i * MR);
            for (size_t p = 0; p < panels; p++) {
                float results[MR][NR];
                tile(results, a, b_panels + p * NR * g->K, g->K);
                store_tile(g, results, i * MR, n0 + p * NR);
            }
        }
    }
}

// ---- oneDNN -----------------------------------------------------------------------------------------------
#if FO_ONEDNN
enum { K_PIECE = 1024, ROW_BLOCK = 256 };

// what makes two GEMMs the same primitive; compared as bytes, so it has no padding
typedef struct {
    int64_t M, N, K, a_row, a_col, b_row, b_col;
    int32_t out_type, has_bias, accumulate, zero;
} Key;

// Memory descriptors and the making of a primitive are all in which oneDNN 2 and 3 differ here.
#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t Desc;
typedef const_dnnl_memory_desc_t DescArg;
#define DESC_ARG(d) (d)
#else
typedef dnnl_memory_desc_t Desc;
typedef const dnnl_memory_desc_t* DescArg;
#define DESC_ARG(d) (&(d))
#endif

/* A primitive has no state of its own: its scratchpad and memory objects belong to the call. (In oneDNN's
 * default mode the scratchpad is shared by all threads that use equal primitives, and results are silently
 * wrong.)
 */
typedef struct Primitive {
    struct Primitive* next;
    Key key;
    Desc a, b, c, bias;
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t primitive; // NULL: not to be had with kernels that keep the promise
    size_t scratch_nbytes;
    int wide_depends_on_M; // its bits may, where K > K_PIECE
} Primitive;

struct FoMatmul {
    dnnl_engine_t engine;
    dnnl_stream_t stream;  // keeps no state: oneDNN runs in the calling thread and its OpenMP team
    pthread_mutex_t mutex; // of the list, which only grows
    Primitive* primitives;
};

static void check_dnnl(dnnl_status_t status, const char* what) {
    fo_require(status == dnnl_success, "oneDNN: %s failed with status %d", what, (int)status);
}

static dnnl_data_type_t dnnl_type(FoDtype t) {
    return t == FO_BF16 ? dnnl_bf16 : dnnl_f32;
}

static Desc desc_make(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, FoDtype type) {
    dnnl_dims_t dims = {rows, cols}, strides = {row_stride, col_stride};
    Desc d;
#if DNNL_VERSION_MAJOR >= 3
    check_dnnl(dnnl_memory_desc_create_with_strides(&d, 2, dims, dnnl_type(type), strides),
               "memory descriptor");
#else
    check_dnnl(dnnl_memory_desc_init_by_strides(&d, 2, dims, dnnl_type(type), strides), "memory descriptor");
#endif
    return d;
}

static void desc_free(Desc d) {
#if DNNL_VERSION_MAJOR >= 3
    dnnl_memory_desc_destroy(d);
#else
    (void)d;
#endif
}

static dnnl_status_t make_desc(Primitive* p, dnnl_primitive_attr_t attr, dnnl_engine_t engine) {
    DescArg bias = p->key.has_bias ? DESC_ARG(p->bias) : NULL;
#if DNNL_VERSION_MAJOR >= 3
    return dnnl_matmul_primitive_desc_create(&p->desc, engine, p->a, p->b, bias, p->c, attr);
#else
    dnnl_matmul_desc_t matmul;
    check_dnnl(dnnl_matmul_desc_init(&matmul, &p->a, &p->b, bias, &p->c), "matmul descriptor");
    return dnnl_primitive_desc_create(&p->desc, &matmul, attr, engine, NULL);
#endif
}

static Primitive* primitive_create(struct FoMatmul* m, const Key* key) {
    Primitive* p = calloc(1, sizeof *p);
    fo_require(p != NULL, "out of memory");
    p->key = *key;
    p->a = desc_make(key->M, key->K, key->a_row, key->a_col, FO_FLOATX);
    p->b = desc_make(key->K, key->N, key->b_row, key->b_col, FO_FLOATX);
    p->c = desc_make(key->M, key->N, key->N, 1, (FoDtype)key->out_type);
    p->bias = desc_make(1, key->N, key->N, 1, FO_FLOATX);
    dnnl_primitive_attr_t attr;
    check_dnnl(dnnl_primitive_attr_create(&attr), "attributes");
    check_dnnl(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user), "scratchpad mode");
    if (key->accumulate) {
        dnnl_post_ops_t sum;
        check_dnnl(dnnl_post_ops_create(&sum), "post-ops");
#if DNNL_VERSION_MAJOR >= 3
        check_dnnl(dnnl_post_ops_append_sum(sum, 1.0f, 0, dnnl_data_type_undef), "sum");
#else
        check_dnnl(dnnl_post_ops_append_sum(sum, 1.0f), "sum");
#endif
        check_dnnl(dnnl_primitive_attr_set_post_ops(attr, sum), "post-ops");
        dnnl_post_ops_destroy(sum);
    }
    dnnl_status_t status = make_desc(p, attr, m->engine);
    dnnl_primitive_attr_destroy(attr);
    if (status != dnnl_success) {
        p->desc = NULL; // bf16 on a processor without AVX-512
        return p;
    }
    const char* kernel = "";
    check_dnnl(dnnl_primitive_desc_query(p->desc, dnnl_query_impl_info_str, 0, (void*)&kernel),
               "query of the kernel");
    // "gemm:jit" breaks the promise; its bf16 without bf16 instructions is slower than plain loops besides
    if (strncmp(kernel, "brg", 3) != 0) { return p; }
    p->wide_depends_on_M = DNNL_VERSION_MAJOR >= 3 || strstr(kernel, "amx") != NULL; // 3: not measured
    p->scratch_nbytes =
        dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(p->desc, dnnl_query_scratchpad_md, 0));
    check_dnnl(dnnl_primitive_create(&p->primitive, p->desc), "primitive");
    return p;
}

static struct FoMatmul* matmul_of(FoDevice* d) {
    struct FoMatmul* m = __atomic_load_n(&d->matmul, __ATOMIC_ACQUIRE);
    if (m) { return m; }
    m = calloc(1, sizeof *m);
    fo_require(m != NULL, "out of memory");
    check_dnnl(dnnl_engine_create(&m->engine, dnnl_cpu, 0), "engine");
    check_dnnl(dnnl_stream_create(&m->stream, m->engine, dnnl_stream_default_flags), "stream");
    pthread_mutex_init(&m->mutex, NULL);
    struct FoMatmul* first = NULL; // another stream of the device may have been faster
    if (!__atomic_compare_exchange_n(&d->matmul, &first, m, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        fo__matmul_free(m);
        return first;
    }
    return m;
}

void fo__matmul_free(struct FoMatmul* m) {
    for (Primitive *p = m->primitives, *next; p; p = next) {
        next = p->next;
        if (p->primitive) { dnnl_primitive_destroy(p->primitive); }
        if (p->desc) { dnnl_primitive_desc_destroy(p->desc); }
        desc_free(p->a);
        desc_free(p->b);
        desc_free(p->c);
        desc_free(p->bias);
        free(p);
    }
    dnnl_stream_destroy(m->stream);
    dnnl_engine_destroy(m->engine);
    pthread_mutex_destroy(&m->mutex);
    free(m);
}

static Primitive* primitive_of(struct FoMatmul* m, const Gemm* g) {
    Key key = {(int64_t)g->M,
               (int64_t)g->N,
               (int64_t)g->K,
               (int64_t)g->a_row,
               (int64_t)g->a_col,
               (int64_t)g->b_row,
               (int64_t)g->b_col,
               (int32_t)g->out_type,
               g->bias != NULL,
               g->accumulate,
               0};
    pthread_mutex_lock(&m->mutex);
    Primitive* p = m->primitives;
    while (p && memcmp(&p->key, &key, sizeof key) != 0) {
        p = p->next;
    }
    if (!p) {
        p = primitive_create(m, &key);
        p->next = m->primitives;
        m->primitives = p;
    }
    pthread_mutex_unlock(&m->mutex);
    return p;
}

static dnnl_memory_t memory_of(struct FoMatmul* m, DescArg desc, const void* data) {
    dnnl_memory_t memory;
    check_dnnl(dnnl_memory_create(&memory, desc, m->engine, (void*)data), "memory");
    return memory;
}

// scratch: p->scratch_nbytes of it
static void execute(struct FoMatmul* m, const Primitive* p, const Gemm* g, void* scratch) {
    dnnl_exec_arg_t args[5] = {
        {DNNL_ARG_SRC, memory_of(m, DESC_ARG(p->a), g->a)},
        {DNNL_ARG_WEIGHTS, memory_of(m, DESC_ARG(p->b), g->b)},
        {DNNL_ARG_DST, memory_of(m, DESC_ARG(p->c), g->c)},
        {DNNL_ARG_SCRATCHPAD,
         memory_of(m, dnnl_primitive_desc_query_md(p->desc, dnnl_query_scratchpad_md, 0), scratch)},
    };
    int nargs = 4;
    if (g->bias) {
        args[nargs++] = (dnnl_exec_arg_t){DNNL_ARG_BIAS, memory_of(m, DESC_ARG(p->bias), g->bias)};
    }
    check_dnnl(dnnl_primitive_execute(p->primitive, m->stream, nargs, args), "matmul");
    check_dnnl(dnnl_stream_wait(m->stream), "stream");
    for (int i = 0; i < nargs; i++) {
        dnnl_memory_destroy(args[i].memory);
    }
}

static void round_rows(FoBf16* out, const float* inp, size_t nelem) {
    enum { PIECE = 8192 };
    PARALLEL_FOR
    for (size_t i = 0; i < nelem; i += PIECE) {
        size_t end = min_size(i + PIECE, nelem);
        for (size_t j = i; j < end; j++) {
            out[j] = fo_bf16_from_float(inp[j]);
        }
    }
}

// dst [rows][width] = the columns of src from k0 on; src has rows of src_width
static void copy_columns(floatX* dst, const floatX* src, size_t rows, size_t width, size_t src_width,
                         size_t k0) {
    PARALLEL_FOR
    for (size_t r = 0; r < rows; r++) {
        memcpy(dst + r * width, src + r * src_width + k0, width * sizeof *dst);
    }
}

/* The part of g that sums over k0 ... k0+K-1, into fp32; all but the first add to what is there. brgemm
 * declines rows that are further apart than they are long, so a, and b if it is a transposed weight, become
 * dense.
 */
static Gemm k_piece(const Gemm* g, size_t k0, size_t K) {
    Gemm piece = *g;
    piece.K = K;
    piece.a_row = K;
    piece.out_type = FO_FP32;
    if (g->b_row == 1) {
        piece.b_col = K;
    } else {
        piece.b += k0 * g->b_row;
    }
    if (k0 > 0) {
        piece.bias = NULL;
        piece.accumulate = 1;
    }
    return piece;
}

// scratch that the pieces of g need at most, or -1 if one of them is no primitive that keeps the promise
static int64_t pieces_scratch(struct FoMatmul* m, const Gemm* g, size_t len) {
    size_t most = 0;
    for (size_t k0 = 0; k0 < g->K; k0 += len) {
        Gemm piece = k_piece(g, k0, min_size(len, g->K - k0));
        Primitive* p = primitive_of(m, &piece);
        if (!p->primitive) { return -1; }
        most = p->scratch_nbytes > most ? p->scratch_nbytes : most;
    }
    return (int64_t)most;
}

/* Sums over K in pieces, in fp32, a block of rows at a time to stay in the cache. K alone decides the pieces.
 * a's rows must be dense. 0: not to be had, and nothing is written.
 */
static int onednn_pieces(FoStream* s, struct FoMatmul* m, const Gemm* g) {
    size_t npieces = (g->K + K_PIECE - 1) / K_PIECE, len = round_up((g->K + npieces - 1) / npieces, 64);
    size_t most = 0, last = g->M % ROW_BLOCK;
    int rounds = g->out_type == FO_BF16, copies_b = g->b_row == 1;
    Gemm rows = *g;
    for (int i = 0; i < 2; i++) { // blocks have at most two sizes
        rows.M = i == 0 ? min_size(ROW_BLOCK, g->M) : last;
        int64_t nbytes = rows.M > 0 ? pieces_scratch(m, &rows, len) : 0;
        if (nbytes < 0) { return 0; }
        most = (size_t)nbytes > most ? (size_t)nbytes : most;
    }
    size_t a_nbytes = round_up(min_size(ROW_BLOCK, g->M) * len * sizeof(floatX), 64);
    size_t b_nbytes = copies_b ? round_up(g->N * g->K * sizeof(floatX), 64) : 0;
    size_t sums_nbytes = rounds ? round_up(min_size(ROW_BLOCK, g->M) * g->N * sizeof(float), 64) : 0;
    char* scratch = fo__scratch(s, a_nbytes + b_nbytes + sums_nbytes + most);
    floatX *a = (floatX*)scratch, *b = (floatX*)(scratch + a_nbytes);
    for (size_t k0 = 0; copies_b && k0 < g->K; k0 += len) {
        copy_columns(b + k0 * g->N, g->b, g->N, min_size(len, g->K - k0), g->K, k0);
    }
    for (size_t row = 0; row < g->M; row += ROW_BLOCK) {
        rows.M = min_size(ROW_BLOCK, g->M - row);
        rows.c = (char*)g->c + row * g->N * fo_dtype_nbytes(g->out_type);
        void* sums = rounds ? scratch + a_nbytes + b_nbytes : rows.c;
        for (size_t k0 = 0; k0 < g->K; k0 += len) {
            Gemm piece = k_piece(&rows, k0, min_size(len, g->K - k0));
            copy_columns(a, g->a + row * g->K, rows.M, piece.K, g->K, k0);
            piece.a = a;
            piece.b = copies_b ? b + k0 * g->N : piece.b;
            piece.c = sums;
            execute(m, primitive_of(m, &piece), &piece, scratch + a_nbytes + b_nbytes + sums_nbytes);
        }
        if (rounds) { round_rows(rows.c, sums, rows.M * g->N); }
    }
    return 1;
}

/* A weight gradient cut by owners has a transposed, of some columns of dout: brgemm declines those too, so
 * they become dense. (Rows that are made dense and transposed at once cost as much, and have other bits than
 * the uncut gradient.) 0: not to be had, and nothing is written.
 */
static int onednn_gemm(FoStream* s, const Gemm* g) {
    struct FoMatmul* m = matmul_of(fo_stream_device(s));
    Gemm dense = *g;
    int copies_a = g->a_row == 1 && g->a_col > g->M;
    if (copies_a) { dense.a_col = g->M; }
    Primitive* p = primitive_of(m, &dense);
    if (!p->primitive) { return 0; }
    // a weight gradient gets the same rows in every mode
    if (p->wide_depends_on_M && g->K > K_PIECE && g->a_col == 1) { return onednn_pieces(s, m, g); }
    size_t a_nbytes = copies_a ? round_up(g->M * g->K * sizeof(floatX), 64) : 0;
    char* scratch = fo__scratch(s, a_nbytes + p->scratch_nbytes);
    if (copies_a) {
        copy_columns((floatX*)scratch, g->a, g->K, g->M, g->a_col, 0);
        dense.a = (floatX*)scratch;
    }
    execute(m, p, &dense, scratch + a_nbytes);
    return 1;
}
#else
static int onednn_gemm(FoStream* s, const Gemm* g) {
    (void)s, (void)g;
    return 0;
}

void fo__matmul_free(struct FoMatmul* m) {
    (void)m;
}
#endif

// ---- fo_ops.h ---------------------------------------------------------------------------------------------
static void gemm_op(FoStream* s, void* args) {
    const Gemm* g = args;
    if (!onednn_gemm(s, g)) { plain_gemm(s, g); }
    fo__pace(s, 2.0 * (double)g->M * (double)g->N * (double)g->K);
}

// name: for times and timelines
static void gemm(FoStream* s, Gemm g, const char* name) {
    if (g.M > 0) { fo__enqueue_named(s, gemm_op, name, &g, sizeof g); }
}

static void check_sizes(int K, int OC, FoDtype out_type) {
    fo_require(K > 0 && OC > 0, "K=%d and OC=%d, want both above 0", K, OC);
    fo_require(out_type == FO_FLOATX || out_type == FO_FP32, "out_type %d, want floatX or fp32",
               (int)out_type);
}

// out = inp @ weight^T
static Gemm forward_gemm(void* out, const floatX* inp, const floatX* weight, size_t n, int K, int OC,
                         FoDtype out_type) {
    check_sizes(K, OC, out_type);
    Gemm g = {.c = out, .a = inp, .b = weight, .M = n, .N = (size_t)OC, .K = (size_t)K};
    g.a_row = (size_t)K, g.a_col = 1;
    g.b_row = 1, g.b_col = (size_t)K; // weight transposed
    g.out_type = out_type;
    return g;
}

// dinp = dout @ weight
static Gemm dgrad_gemm(void* dinp, const floatX* dout, const floatX* weight, size_t n, int K, int OC,
                       FoDtype out_type) {
    check_sizes(K, OC, out_type);
    Gemm g = {.c = dinp, .a = dout, .b = weight, .M = n, .N = (size_t)K, .K = (size_t)OC};
    g.a_row = (size_t)OC, g.a_col = 1;
    g.b_row = (size_t)K, g.b_col = 1;
    g.out_type = out_type;
    return g;
}

void fo_matmul_forward(void* out, const floatX* inp, const floatX* weight, const floatX* bias, size_t n,
                       int K, int OC, FoDtype out_type, FoStream* s) {
    Gemm g = forward_gemm(out, inp, weight, n, K, OC, out_type);
    g.bias = bias;
    gemm(s, g, "matmul_forward");
}

void fo_matmul_gelu_forward(floatX* out, floatX* gelu, const floatX* inp, const floatX* weight,
                            const floatX* bias, size_t n, int K, int OC, FoStream* s) {
    fo_matmul_forward(out, inp, weight, bias, n, K, OC, FO_FLOATX, s);
    fo_gelu_forward(gelu, out, n * (size_t)OC, s);
}

void fo_matmul_forward_add(float* out, const floatX* inp, const floatX* weight, size_t n, int K, int OC,
                           FoStream* s) {
    Gemm g = forward_gemm(out, inp, weight, n, K, OC, FO_FP32);
    g.accumulate = 1;
    gemm(s, g, "matmul_forward");
}

void fo_matmul_dgrad(void* dinp, const floatX* dout, const floatX* weight, size_t n, int K, int OC,
                     FoDtype out_type, FoStream* s) {
    gemm(s, dgrad_gemm(dinp, dout, weight, n, K, OC, out_type), "matmul_dgrad");
}

void fo_matmul_gelu_dgrad(floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pregelu,
                          size_t n, int K, int OC, FoStream* s) {
    fo_matmul_dgrad(dinp, dout, weight, n, K, OC, FO_FLOATX, s);
    fo_gelu_backward(dinp, dinp, pregelu, n * (size_t)K, s);
}

void fo_matmul_dgrad_add(float* dinp, const floatX* dout, const floatX* weight, size_t n, int K, int OC,
                         FoStream* s) {
    Gemm g = dgrad_gemm(dinp, dout, weight, n, K, OC, FO_FP32);
    g.accumulate = 1;
    gemm(s, g, "matmul_dgrad");
}

void fo_matmul_wgrad(float* dweight, float* dbias, const floatX* dout, const floatX* inp, size_t n, int K,
                     int OC, FoStream* s) {
    fo_matmul_wgrad_rows(dweight, dout, inp, 0, (size_t)OC, n, K, OC, s);
    if (dbias && n > 0) { fo_bias_backward(dbias, dout, n, OC, s); }
}

void fo_matmul_wgrad_rows(float* dweight, const floatX* dout, const floatX* inp, size_t row0, size_t nrows,
                          size_t n, int K, int OC, FoStream* s) {
    check_sizes(K, OC, FO_FP32);
    fo_require(row0 + nrows <= (size_t)OC, "rows %zu to %zu of %d", row0, row0 + nrows, OC);
    Gemm g = {.c = dweight + row0 * (size_t)K, .a = dout + row0, .b = inp};
    g.M = nrows, g.N = (size_t)K, g.K = n;
    g.a_row = 1, g.a_col = (size_t)OC; // dout transposed
    g.b_row = (size_t)K, g.b_col = 1;
    g.out_type = FO_FP32;
    g.accumulate = 1;
    if (n > 0) { gemm(s, g, "matmul_wgrad"); }
}

/* The mean over some runs of a GEMM as large as a layer's, on a stream of its own, so that it runs as the
 * others do: what MFU can reach. Not the best run: when all ranks measure at once, each gets its share of the
 * cores now and then more, and the sum must be what the machine can do.
 */
double fo_device_peak_tflops(FoDevice* d) {
    enum { N = 1024, K = 1024 };
    const double window_s = 0.25;
    if (d->peak_tflops > 0.0) { return d->peak_tflops; }
    double pace = d->pace_tflops, begin = 0.0;
    d->pace_tflops = 0.0;
    FoStream* s = fo_stream_create(d, "peak");
    floatX* inp = fo_malloc(d, (size_t)N * K * sizeof(floatX));
    floatX* weight = fo_malloc(d, (size_t)N * K * sizeof(floatX));
    floatX* out = fo_malloc(d, (size_t)N * N * sizeof(floatX));
    int nruns = -1; // the first makes the primitive and is not counted
    while (nruns < 1 || fo_now() - begin < window_s) {
        if (nruns == 0) { begin = fo_now(); }
        fo_matmul_forward(out, inp, weight, NULL, N, K, N, FO_FLOATX, s);
        fo_stream_sync(s);
        nruns++;
    }
    d->peak_tflops = 2e-12 * N * N * K * nruns / (fo_now() - begin);
    fo_free(d, inp);
    fo_free(d, weight);
    fo_free(d, out);
    fo_stream_destroy(s);
    d->pace_tflops = pace;
    return d->peak_tflops;
}
