/* ops.c -- the layer operations of fo_ops.h on the cpu. matmul.c and attention.c have the other two.
 *
 * All but GELU and softmax are bound by memory. Each operation has three parts: a row function of plain loops
 * that gcc turns into vector code (no intrinsics, no -ffast-math), a function that shares rows out to the
 * device's threads, and the public function, which packs its arguments and queues them. bf16 becomes fp32 on
 * its way into registers and is rounded on its way out.
 *
 * Bits depend neither on the number of threads nor on where rows are cut into calls: what belongs to a row is
 * computed by one thread in one order, and a sum over rows is the sum, in order, of blocks whose size the
 * number of rows decides.
 */
#include "flashoverlap/cpu/cpu.h"
#include "flashoverlap/fo_ops.h"
#include <math.h>

// In front of a for loop over n independent pieces of work.
#if FO_OPENMP
#define PRAGMA(text) _Pragma(#text)
#define PARALLEL_FOR(n) PRAGMA(omp parallel for schedule(static) if ((n) > 1))
#else
#define PARALLEL_FOR(n)
#endif

// `#pragma GCC ivdep` below means: operands are the same memory or do not overlap. Without it gcc checks when
// the loop is entered, and takes in-place calls for overlapping ones.

enum {
    LANES = 64,   // partial sums kept side by side: enough to keep the adders busy, a multiple of any vector
    CHUNK = 1024, // columns of a row held in fp32 at a time: stays in the first-level cache
    PIECE = 8192, // elements that a thread takes at a time in elementwise operations
    MAX_BLOCKS = 128,  // of rows, in sums over rows
    MIN_ROWS = 16,     // of such a block
    NORM_BLOCK = 65536 // elements in a block of fo_square_sum
};

static inline size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}
static inline size_t ceil_div(size_t a, size_t b) {
    return (a + b - 1) / b;
}

// ---- sums and exponentials --------------------------------------------------------------------------------
/* A sum along a row is kept in LANES partial sums, column c in lane c % LANES, so that the loop is vector
 * code and the order of additions is the same for rows of one length. Each has a step that adds some columns:
 * LANES of them, again and again, then the rest.
 */
static float lanes_sum(float* acc) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) {
            acc[k] += acc[k + half];
        }
    }
    return acc[0];
}

static inline void max_step(float* acc, const floatX* x, size_t n) {
    for (size_t k = 0; k < n; k++) {
        float v = fo_float(x[k]);
        acc[k] = v > acc[k] ? v : acc[k];
    }
}

static float row_max(const floatX* x, size_t n) {
    float acc[LANES], max = -INFINITY;
    size_t c = 0;
    for (int k = 0; k < LANES; k++) {
        acc[k] = -INFINITY;
    }
    for (; c + LANES <= n; c += LANES) {
        max_step(acc, x + c, LANES);
    }
    max_step(acc, x + c, n - c);
    for (int k = 0; k < LANES; k++) {
        max = acc[k] > max ? acc[k] : max;
    }
    return max;
}

// a * b + c, in one instruction where there is one; elsewhere fmaf would be a slow call
static inline float mul_add(float a, float b, float c) {
#ifdef __FMA__
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline float float_of_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint32_t bits_of_float(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

/* exp(x) within 2 units in the last place; 0 below -87.7 (where exp is below 8.2e-39), exp(88) above 88; a
 * NaN stays one. For loops that are to be vectorised, as libm's is not.
 *
 * x = k ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low
 * bits, from where a shift makes the exponent of 2^k; k = -127 makes it 0. exp(r) is the Taylor series: its
 * first missing term, r^8/8!, is below 5.2e-9, a tenth of a unit in the last place.
 */
static inline float fast_exp(float x) {
    const float round = 12582912.0f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    float c = x < -88.0f ? -88.0f : x;
    c = c > 88.0f ? 88.0f : c;
    float shifted = mul_add(c, 1.44269504f, round);
    float k = shifted - round;
    float r = mul_add(k, -ln2_high, c); // exact: ln2_high has 9 bits, k at most 7
    r = mul_add(k, -ln2_low, r);
    float p = mul_add(r, 1.0f / 5040, 1.0f / 720);
    p = mul_add(p, r, 1.0f / 120);
    p = mul_add(p, r, 1.0f / 24);
    p = mul_add(p, r, 1.0f / 6);
    p = mul_add(p, r, 0.5f);
    p = mul_add(p * r, r, r) + 1.0f;
    return p * float_of_bits((bits_of_float(shifted) << 23) + 0x3f800000u);
}

/* sqrt(x) within 1 unit in the last place, x >= 1e-37; closer to 0 something between 0 and sqrt(x).
 *
 * sqrtf may set errno, so gcc leaves it out of vector code unless the build says -fno-math-errno. Halving the
 * exponent in the bits gives 1/sqrt(x) within 4 %, and each Newton step squares the error.
 */
static inline float fast_sqrt(float x) {
    float y = float_of_bits(0x5f370000u - (bits_of_float(x) >> 1));
    y = y * (1.5f - 0.5f * x * y * y);
    y = y * (1.5f - 0.5f * x * y * y);
    float root = x * y;
    return mul_add(0.5f * y, mul_add(-root, root, x), root);
}

// ---- sums over rows ---------------------------------------------------------------------------------------
// rows of a block: n alone decides
static size_t block_rows(size_t n) {
    size_t rows = ceil_div(n, MAX_BLOCKS);
    return rows < MIN_ROWS ? MIN_ROWS : rows;
}

// out[c] += sum of parts[b * stride + c] over blocks b in order; parts are overwritten
static void add_blocks(float* out, float* parts, size_t nblocks, size_t stride, size_t C) {
    const size_t nchunks = ceil_div(C, CHUNK / 4);
    PARALLEL_FOR(nchunks)
    for (size_t i = 0; i < nchunks; i++) {
        const size_t first = i * (CHUNK / 4), n = min_size(C - first, CHUNK / 4);
        float* sum = parts + first;
        for (size_t b = 1; b < nblocks; b++) {
            const float* part = sum + b * stride;
            #pragma GCC ivdep
            for (size_t c = 0; c < n; c++) {
                sum[c] += part[c];
            }
        }
        #pragma GCC ivdep
        for (size_t c = 0; c < n; c++) {
            out[first + c] += sum[c];
        }
    }
}

static void add_row(float* sum, const floatX* row, size_t n) {
    #pragma GCC ivdep
    for (size_t c = 0; c < n; c++) {
        sum[c] += fo_float(row[c]);
    }
}

// ---- rows -------------------------------------------------------------------------------------------------
typedef struct {
    floatX* out;
    const floatX* inp;
    const int* idx;
    size_t n, C;
} GatherRows;

static void gather_rows(FoStream* s, void* args) {
    const GatherRows a = *(const GatherRows*)args;
    (void)s;
    PARALLEL_FOR(a.n)
    for (size_t i = 0; i < a.n; i++) {
        memcpy(a.out + i * a.C, a.inp + (size_t)a.idx[i] * a.C, a.C * sizeof(floatX));
    }
}

void fo_gather_rows(floatX* out, const floatX* inp, const int* idx, size_t n, int C, FoStream* s) {
    GatherRows a = {out, inp, idx, n, (size_t)C};
    fo__enqueue(s, gather_rows, &a, sizeof a);
}

typedef struct {
    float* out;
    const floatX* rows;
    const int *dst, *start, *order;
    size_t nuniq, C;
} ScatterAddRows;

static void scatter_add_row(const ScatterAddRows* a, size_t u) {
    float sum[CHUNK];
    for (size_t first = 0; first < a->C; first += CHUNK) {
        const size_t n = min_size(a->C - first, CHUNK);
        float* out = a->out + (size_t)a->dst[u] * a->C + first;
        memset(sum, 0, n * sizeof(float));
        for (int k = a->start[u]; k < a->start[u + 1]; k++) {
            add_row(sum, a->rows + (size_t)a->order[k] * a->C + first, n);
        }
        #pragma GCC ivdep
        for (size_t c = 0; c < n; c++) {
            out[c] += sum[c];
        }
    }
}

static void scatter_add_rows(FoStream* s, void* args) {
    const ScatterAddRows a = *(const ScatterAddRows*)args;
    (void)s;
    // A few tokens are most of any text, so threads take destinations as they become free.
#if FO_OPENMP
#pragma omp parallel for schedule(dynamic, 16) if (a.nuniq > 1)
#endif
    for (size_t u = 0; u < a.nuniq; u++) {
        scatter_add_row(&a, u);
    }
}

void fo_scatter_add_rows(float* out, const floatX* rows, const int* dst, const int* start, const int* order,
                         size_t nuniq, int C, FoStream* s) {
    ScatterAddRows a = {out, rows, dst, start, order, nuniq, (size_t)C};
    fo__enqueue(s, scatter_add_rows, &a, sizeof a);
}

typedef struct {
    float* out;
    const float* rows;
    const int* dst;
    size_t n, C;
} AddRows;

static void add_fp32_row(float* out, const float* row, size_t C) {
    #pragma GCC ivdep
    for (size_t c = 0; c < C; c++) {
        out[c] += row[c];
    }
}

static void add_rows(FoStream* s, void* args) {
    const AddRows a = *(const AddRows*)args;
    (void)s;
    PARALLEL_FOR(a.n)
    for (size_t i = 0; i < a.n; i++) {
        add_fp32_row(a.out + (size_t)a.dst[i] * a.C, a.rows + i * a.C, a.C);
    }
}

void fo_add_rows(float* out, const float* rows, const int* dst, size_t n, int C, FoStream* s) {
    AddRows a = {out, rows, dst, n, (size_t)C};
    fo__enqueue(s, add_rows, &a, sizeof a);
}

typedef struct {
    floatX* out;
    const floatX *rows, *wpe;
    const int *tok, *pos;
    size_t n, C;
} EncoderForward;

static void encoder_forward_row(floatX* out, const floatX* row, const floatX* wpe, size_t C) {
    #pragma GCC ivdep
    for (size_t c = 0; c < C; c++) {
        out[c] = fo_floatx(fo_float(row[c]) + fo_float(wpe[c]));
    }
}

static void encoder_forward(FoStream* s, void* args) {
    const EncoderForward a = *(const EncoderForward*)args;
    (void)s;
    PARALLEL_FOR(a.n)
    for (size_t i = 0; i < a.n; i++) {
        const size_t row = (size_t)a.tok[i];
        encoder_forward_row(a.out + row * a.C, a.rows + i * a.C, a.wpe + (size_t)a.pos[row] * a.C, a.C);
    }
}

void fo_encoder_forward(floatX* out, const floatX* rows, const floatX* wpe, const int* tok, const int* pos,
                        size_t n, int C, FoStream* s) {
    EncoderForward a = {out, rows, wpe, tok, pos, n, (size_t)C};
    fo__enqueue(s, encoder_forward, &a, sizeof a);
}

// ---- layer norm -------------------------------------------------------------------------------------------
typedef struct {
    floatX* out;
    float *mean, *rstd;
    const floatX *inp, *weight, *bias;
    size_t n, C;
} LayernormForward;

static inline void sum_step(float* acc, const floatX* x, size_t n) {
    for (size_t k = 0; k < n; k++) {
        acc[k] += fo_float(x[k]);
    }
}

static float row_sum(const floatX* x, size_t n) {
    float acc[LANES] = {0};
    size_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        sum_step(acc, x + c, LANES);
    }
    sum_step(acc, x + c, n - c);
    return lanes_sum(acc);
}

static inline void square_step(float* acc, const floatX* x, float mean, size_t n) {
    for (size_t k = 0; k < n; k++) {
        float d = fo_float(x[k]) - mean;
        acc[k] += d * d;
    }
}

// sum of (x - mean)^2: from the mean, since the sum of squares minus the square of the sum loses digits
static float row_square_sum(const floatX* x, float mean, size_t n) {
    float acc[LANES] = {0};
    size_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        square_step(acc, x + c, mean, LANES);
    }
    square_step(acc, x + c, mean, n - c);
    return lanes_sum(acc);
}

static void layernorm_forward_row(const LayernormForward* a, size_t i) {
    const floatX* x = a->inp + i * a->C;
    const floatX *weight = a->weight, *bias = a->bias;
    floatX* out = a->out + i * a->C;
    const float mean = row_sum(x, a->C) / (float)a->C;
    const float rstd = 1.0f / sqrtf(row_square_sum(x, mean, a->C) / (float)a->C + 1e-5f);
    #pragma GCC ivdep
    for (size_t c = 0; c < a->C; c++) {
        float norm = (fo_float(x[c]) - mean) * rstd;
        out[c] = fo_floatx(norm * fo_float(weight[c]) + fo_float(bias[c]));
    }
    a->mean[i] = mean;
    a->rstd[i] = rstd;
}

static void layernorm_forward(FoStream* s, void* args) {
    const LayernormForward a = *(const LayernormForward*)args;
    (void)s;
    PARALLEL_FOR(a.n)
    for (size_t i = 0; i < a.n; i++) {
        layernorm_forward_row(&a, i);
    }
}

void fo_layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                          const floatX* bias, size_t n, int C, FoStream* s) {
    LayernormForward a = {out, mean, rstd, inp, weight, bias, n, (size_t)C};
    fo__enqueue(s, layernorm_forward, &a, sizeof a);
}

typedef struct {
    floatX* dinp;
    float *dweight, *dbias;
    const floatX *dout, *inp, *weight;
    const float *mean, *rstd;
    size_t n, C;
} LayernormBackward;

static inline void dnorm_step(float* acc, float* acc_norm, const floatX* dout, const floatX* x,
                              const floatX* weight, float mean, float rstd, size_t n) {
    #pragma GCC ivdep
    for (size_t k = 0; k < n; k++) {
        float d = fo_float(dout[k]) * fo_float(weight[k]);
        acc[k] += d;
        acc_norm[k] += d * ((fo_float(x[k]) - mean) * rstd);
    }
}

// means over the row of dnorm and of dnorm * norm, dnorm = dout * weight
static void layernorm_backward_means(const LayernormBackward* a, size_t i, float* dnorm_mean,
                                     float* dnorm_norm_mean) {
    float acc[LANES] = {0}, acc_norm[LANES] = {0};
    const float mean = a->mean[i], rstd = a->rstd[i];
    const floatX* x = a->inp + i * a->C;
    const floatX* dout = a->dout + i * a->C;
    size_t c = 0;
    for (; c + LANES <= a->C; c += LANES) {
        dnorm_step(acc, acc_norm, dout + c, x + c, a->weight + c, mean, rstd, LANES);
    }
    dnorm_step(acc, acc_norm, dout + c, x + c, a->weight + c, mean, rstd, a->C - c);
    *dnorm_mean = lanes_sum(acc) / (float)a->C;
    *dnorm_norm_mean = lanes_sum(acc_norm) / (float)a->C;
}

// dweight and dbias are those of the row's block
static void layernorm_backward_row(const LayernormBackward* a, size_t i, float* dweight, float* dbias) {
    float dnorm_mean, dnorm_norm_mean;
    layernorm_backward_means(a, i, &dnorm_mean, &dnorm_norm_mean);
    const float mean = a->mean[i], rstd = a->rstd[i];
    const floatX* x = a->inp + i * a->C;
    const floatX* dout = a->dout + i * a->C;
    const floatX* weight = a->weight;
    floatX* dinp = a->dinp + i * a->C;
    #pragma GCC ivdep
    for (size_t c = 0; c < a->C; c++) {
        float dy = fo_float(dout[c]);
        float norm = (fo_float(x[c]) - mean) * rstd;
        float d = (dy * fo_float(weight[c]) - dnorm_mean - norm * dnorm_norm_mean) * rstd;
        dinp[c] = fo_floatx(fo_float(dinp[c]) + d);
        dweight[c] += dy * norm;
        dbias[c] += dy;
    }
}

static void layernorm_backward(FoStream* s, void* args) {
    const LayernormBackward a = *(const LayernormBackward*)args;
    const size_t rows = block_rows(a.n), nblocks = ceil_div(a.n, rows);
    if (nblocks == 0) { return; }
    float* parts = fo__scratch(s, nblocks * 2 * a.C * sizeof(float));
    PARALLEL_FOR(nblocks)
    for (size_t b = 0; b < nblocks; b++) {
        float* part = parts + b * 2 * a.C;
        memset(part, 0, 2 * a.C * sizeof(float));
        for (size_t i = b * rows; i < min_size(a.n, (b + 1) * rows); i++) {
            layernorm_backward_row(&a, i, part, part + a.C);
        }
    }
    add_blocks(a.dweight, parts, nblocks, 2 * a.C, a.C);
    add_blocks(a.dbias, parts + a.C, nblocks, 2 * a.C, a.C);
}

void fo_layernorm_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                           const floatX* weight, const float* mean, const float* rstd, size_t n, int C,
                           FoStream* s) {
    LayernormBackward a = {dinp, dweight, dbias, dout, inp, weight, mean, rstd, n, (size_t)C};
    fo__enqueue(s, layernorm_backward, &a, sizeof a);
}

typedef struct {
    float* dbias;
    const floatX* dout;
    size_t n, C;
} BiasBackward;

static void bias_backward(FoStream* s, void* args) {
    const BiasBackward a = *(const BiasBackward*)args;
    const size_t rows = block_rows(a.n), nblocks = ceil_div(a.n, rows);
    if (nblocks == 0) { return; }
    float* parts = fo__scratch(s, nblocks * a.C * sizeof(float));
    PARALLEL_FOR(nblocks)
    for (size_t b = 0; b < nblocks; b++) {
        memset(parts + b * a.C, 0, a.C * sizeof(float));
        for (size_t i = b * rows; i < min_size(a.n, (b + 1) * rows); i++) {
            add_row(parts + b * a.C, a.dout + i * a.C, a.C);
        }
    }
    add_blocks(a.dbias, parts, nblocks, a.C, a.C);
}

void fo_bias_backward(float* dbias, const floatX* dout, size_t n, int C, FoStream* s) {
    BiasBackward a = {dbias, dout, n, (size_t)C};
    fo__enqueue(s, bias_backward, &a, sizeof a);
}

// ---- elementwise ------------------------------------------------------------------------------------------
/* 1 + tanh(u) = 2 / (1 + exp(-2u)), so gelu(x) = x / (1 + e) with e = exp(-2u) and u = sqrt(2/pi) (x +
 * 0.044715 x^3). That needs one exponential and, unlike 1 + tanh(u), loses no digits where x is negative.
 * Beyond |x| = 1e9 the slope is wrong: there e, held below 2^127, is too small for its factors.
 */
static const float GELU_LINEAR = -1.5957691216f; // -2 sqrt(2/pi)
static const float GELU_CUBIC = -0.07135481628f; // that times 0.044715

typedef struct {
    floatX* out;
    const floatX *dout, *inp; // dout: backward
    size_t nelem;
} Gelu;

static void gelu_forward_piece(floatX* out, const floatX* inp, size_t n) {
    #pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        float x = fo_float(inp[i]);
        float e = fast_exp(x * mul_add(GELU_CUBIC, x * x, GELU_LINEAR));
        out[i] = fo_floatx(x / (1.0f + e));
    }
}

static void gelu_forward(FoStream* s, void* args) {
    const Gelu a = *(const Gelu*)args;
    const size_t npieces = ceil_div(a.nelem, PIECE);
    (void)s;
    PARALLEL_FOR(npieces)
    for (size_t p = 0; p < npieces; p++) {
        gelu_forward_piece(a.out + p * PIECE, a.inp + p * PIECE, min_size(a.nelem - p * PIECE, PIECE));
    }
}

void fo_gelu_forward(floatX* out, const floatX* inp, size_t nelem, FoStream* s) {
    Gelu a = {out, NULL, inp, nelem};
    fo__enqueue(s, gelu_forward, &a, sizeof a);
}

// gelu'(x) = g + x g (1 - g) 2u', g = 1 / (1 + e). 1 - g is e g, which loses no digits
static void gelu_backward_piece(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    #pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        float x = fo_float(inp[i]);
        float e = fast_exp(x * mul_add(GELU_CUBIC, x * x, GELU_LINEAR));
        float g = 1.0f / (1.0f + e);
        float du2 = -mul_add(3.0f * GELU_CUBIC, x * x, GELU_LINEAR);
        dinp[i] = fo_floatx(fo_float(dout[i]) * mul_add(x * du2, g * (e * g), g));
    }
}

static void gelu_backward(FoStream* s, void* args) {
    const Gelu a = *(const Gelu*)args;
    const size_t npieces = ceil_div(a.nelem, PIECE);
    (void)s;
    PARALLEL_FOR(npieces)
    for (size_t p = 0; p < npieces; p++) {
        const size_t first = p * PIECE;
        gelu_backward_piece(a.out + first, a.dout + first, a.inp + first, min_size(a.nelem - first, PIECE));
    }
}

void fo_gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t nelem, FoStream* s) {
    Gelu a = {dinp, dout, inp, nelem};
    fo__enqueue(s, gelu_backward, &a, sizeof a);
}

typedef struct {
    floatX* out;
    const void* parts[FO_MAX_RANKS];
    const floatX *residual, *bias;
    size_t n, C;
    int P;
    FoDtype part_type;
} Accumulate;

// sum[c] += part[at + c]
static void add_part(float* sum, const void* part, size_t at, size_t n, FoDtype type) {
    if (type == FO_BF16) {
        const FoBf16* x = (const FoBf16*)part + at;
        for (size_t c = 0; c < n; c++) {
            sum[c] += fo_bf16_to_float(x[c]);
        }
    } else {
        const float* x = (const float*)part + at;
        #pragma GCC ivdep
        for (size_t c = 0; c < n; c++) {
            sum[c] += x[c];
        }
    }
}

// columns [first, first + n) of row i
static void accumulate_chunk(const Accumulate* a, size_t i, size_t first, size_t n) {
    const size_t at = i * a->C + first;
    float sum[CHUNK] = {0};
    if (a->residual) { add_part(sum, a->residual, at, n, FO_FLOATX); }
    if (a->bias) { add_part(sum, a->bias, first, n, FO_FLOATX); }
    for (int p = 0; p < a->P; p++) {
        add_part(sum, a->parts[p], at, n, a->part_type);
    }
    floatX* out = a->out + at;
    for (size_t c = 0; c < n; c++) {
        out[c] = fo_floatx(sum[c]);
    }
}

static void accumulate(FoStream* s, void* args) {
    const Accumulate a = *(const Accumulate*)args;
    (void)s;
    PARALLEL_FOR(a.n)
    for (size_t i = 0; i < a.n; i++) {
        for (size_t first = 0; first < a.C; first += CHUNK) {
            accumulate_chunk(&a, i, first, min_size(a.C - first, CHUNK));
        }
    }
}

void fo_accumulate(floatX* out, const void* const parts[], const floatX* residual, const floatX* bias,
                   size_t n, int C, int P, FoDtype part_type, FoStream* s) {
    fo_require(P >= 1 && P <= FO_MAX_RANKS, "P=%d, want 1 to %d", P, FO_MAX_RANKS);
    Accumulate a = {out, {NULL}, residual, bias, n, (size_t)C, P, part_type};
    memcpy(a.parts, parts, (size_t)P * sizeof a.parts[0]);
    fo__enqueue(s, accumulate, &a, sizeof a);
}

typedef struct {
    void* acc;
    const void* part;
    size_t nelem;
    FoDtype type;
} Add;

static void add_piece(const Add* a, size_t first, size_t n) {
    if (a->type == FO_FP32) {
        add_part((float*)a->acc + first, a->part, first, n, FO_FP32);
        return;
    }
    FoBf16* acc = (FoBf16*)a->acc + first;
    const FoBf16* part = (const FoBf16*)a->part + first;
    #pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        acc[i] = fo_bf16_from_float(fo_bf16_to_float(acc[i]) + fo_bf16_to_float(part[i]));
    }
}

static void add(FoStream* s, void* args) {
    const Add a = *(const Add*)args;
    const size_t npieces = ceil_div(a.nelem, PIECE);
    (void)s;
    PARALLEL_FOR(npieces)
    for (size_t p = 0; p < npieces; p++) {
        add_piece(&a, p * PIECE, min_size(a.nelem - p * PIECE, PIECE));
    }
}

void fo_add(void* acc, const void* part, size_t nelem, FoDtype type, FoStream* s) {
    Add a = {acc, part, nelem, type};
    fo__enqueue(s, add, &a, sizeof a);
}

typedef struct {
    float* out;
    const float* parts[FO_MAX_RANKS];
    size_t nelem;
    int P;
} Sum;

// out may be any of the parts, so the sum is complete before it is written
static void sum_chunk(const Sum* a, size_t first, size_t n) {
    float sum[CHUNK] = {0};
    for (int p = 0; p < a->P; p++) {
        add_part(sum, a->parts[p], first, n, FO_FP32);
    }
    memcpy(a->out + first, sum, n * sizeof(float));
}

static void sum(FoStream* s, void* args) {
    const Sum a = *(const Sum*)args;
    const size_t nchunks = ceil_div(a.nelem, CHUNK);
    (void)s;
    PARALLEL_FOR(nchunks)
    for (size_t i = 0; i < nchunks; i++) {
        sum_chunk(&a, i * CHUNK, min_size(a.nelem - i * CHUNK, CHUNK));
    }
}

void fo_sum(float* out, const float* const parts[], size_t nelem, int P, FoStream* s) {
    fo_require(P >= 1 && P <= FO_MAX_RANKS, "P=%d, want 1 to %d", P, FO_MAX_RANKS);
    Sum a = {out, {NULL}, nelem, P};
    memcpy(a.parts, parts, (size_t)P * sizeof a.parts[0]);
    fo__enqueue(s, sum, &a, sizeof a);
}

// ---- loss -------------------------------------------------------------------------------------------------
typedef struct {
    FoSoftmaxStat* stats;
    const floatX* logits;
    const int* targets;
    size_t n, V, valid;
    int v0;
} SoftmaxStats;

static inline void exp_step(float* acc, const floatX* x, float max, size_t n) {
    for (size_t k = 0; k < n; k++) {
        acc[k] += fast_exp(fo_float(x[k]) - max);
    }
}

static float row_exp_sum(const floatX* x, float max, size_t n) {
    float acc[LANES] = {0};
    size_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        exp_step(acc, x + c, max, LANES);
    }
    exp_step(acc, x + c, max, n - c);
    return lanes_sum(acc);
}

static void softmax_stats_row(const SoftmaxStats* a, size_t i) {
    const floatX* x = a->logits + i * a->V;
    const ptrdiff_t target = (ptrdiff_t)a->targets[i] - a->v0;
    const int has_target = target >= 0 && (size_t)target < a->valid;
    const float max = row_max(x, a->valid);
    FoSoftmaxStat stat = {max, row_exp_sum(x, max, a->valid), has_target ? fo_float(x[target]) : 0.0f};
    a->stats[i] = stat;
}

static void softmax_stats(FoStream* s, void* args) {
    const SoftmaxStats a = *(const SoftmaxStats*)args;
    (void)s;
    PARALLEL_FOR(a.n)
    for (size_t i = 0; i < a.n; i++) {
        softmax_stats_row(&a, i);
    }
}

void fo_softmax_stats(FoSoftmaxStat* stats, const floatX* logits, const int* targets, size_t n, int V,
                      int valid, int v0, FoStream* s) {
    fo_require(valid >= 0 && valid <= V, "valid=%d, want 0 to V=%d", valid, V);
    SoftmaxStats a = {stats, logits, targets, n, (size_t)V, (size_t)valid, v0};
    fo__enqueue(s, softmax_stats, &a, sizeof a);
}

typedef struct {
    float* losses;
    floatX* logits;
    const FoSoftmaxStat* stats;
    const int* targets;
    float dscale, z;
    size_t n, V, valid;
    int v0, P;
} SoftmaxLoss;

static void softmax_gradient_row(floatX* x, float max, float scale, size_t valid, size_t V) {
    #pragma GCC ivdep
    for (size_t v = 0; v < valid; v++) {
        x[v] = fo_floatx(scale * fast_exp(fo_float(x[v]) - max));
    }
    memset(x + valid, 0, (V - valid) * sizeof(floatX)); // the bits of 0 in either type
}

static void softmax_loss_row(const SoftmaxLoss* a, size_t i) {
    const ptrdiff_t target = (ptrdiff_t)a->targets[i] - a->v0;
    floatX* x = a->logits + i * a->V;
    float max = -INFINITY, sum = 0.0f, target_logit = 0.0f;
    for (int p = 0; p < a->P; p++) {
        float m = a->stats[(size_t)p * a->n + i].max;
        max = m > max ? m : max;
    }
    for (int p = 0; p < a->P; p++) {
        FoSoftmaxStat stat = a->stats[(size_t)p * a->n + i];
        sum += stat.sum * fast_exp(stat.max - max); // a rank that has only padding: 0 * exp(-inf)
        target_logit += stat.target;                // all but one are 0
    }
    a->losses[i] = logf(sum) + (max - target_logit);
    if (a->dscale == 0.0f) { return; }
    float target_x = 0.0f;
    const float more = 1.0f + 2.0f * a->z * (logf(sum) + max);
    const int has_target = target >= 0 && (size_t)target < a->valid;
    if (has_target) { target_x = fo_float(x[target]); }
    softmax_gradient_row(x, max, a->dscale * more / sum, a->valid, a->V);
    if (has_target) { x[target] = fo_floatx(a->dscale * (more * (fast_exp(target_x - max) / sum) - 1.0f)); }
}

static void softmax_loss(FoStream* s, void* args) {
    const SoftmaxLoss a = *(const SoftmaxLoss*)args;
    (void)s;
    PARALLEL_FOR(a.n)
    for (size_t i = 0; i < a.n; i++) {
        softmax_loss_row(&a, i);
    }
}

void fo_softmax_loss(float* losses, floatX* logits, const FoSoftmaxStat* stats, const int* targets,
                     float dscale, float z, size_t n, int V, int valid, int v0, int P, FoStream* s) {
    fo_require(P >= 1, "P=%d, want at least 1", P);
    fo_require(valid >= 0 && valid <= V, "valid=%d, want 0 to V=%d", valid, V);
    SoftmaxLoss a = {losses, logits, stats, targets, dscale, z, n, (size_t)V, (size_t)valid, v0, P};
    fo__enqueue(s, softmax_loss, &a, sizeof a);
}

// ---- optimizer --------------------------------------------------------------------------------------------
typedef struct {
    floatX* param;
    float *master, *m, *v;
    const float* grad;
    size_t nelem;
    FoAdamw a;
} AdamwUpdate;

// one pass: 28 bytes a parameter go to and from memory, and those of param
static void adamw_update_piece(const AdamwUpdate* u, size_t first, size_t n, float m_scale, float v_scale) {
    floatX* param = u->param + first;
    float *master = u->master + first, *m = u->m + first, *v = u->v + first;
    const float* grad = u->grad + first;
    const FoAdamw a = u->a;
    #pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * a.grad_scale, w = master[i];
        float mi = a.beta1 * m[i] + (1.0f - a.beta1) * g;
        float vi = a.beta2 * v[i] + (1.0f - a.beta2) * (g * g);
        w -= a.lr * (mi * m_scale / (fast_sqrt(vi * v_scale) + a.eps) + a.weight_decay * w);
        m[i] = mi;
        v[i] = vi;
        master[i] = w;
        param[i] = fo_floatx(w);
    }
}

static void adamw_update(FoStream* s, void* args) {
    const AdamwUpdate u = *(const AdamwUpdate*)args;
    const float m_scale = (float)(1.0 / (1.0 - pow((double)u.a.beta1, u.a.t)));
    const float v_scale = (float)(1.0 / (1.0 - pow((double)u.a.beta2, u.a.t)));
    const size_t npieces = ceil_div(u.nelem, PIECE);
    (void)s;
    PARALLEL_FOR(npieces)
    for (size_t p = 0; p < npieces; p++) {
        adamw_update_piece(&u, p * PIECE, min_size(u.nelem - p * PIECE, PIECE), m_scale, v_scale);
    }
}

void fo_adamw_update(floatX* param, float* master, float* m, float* v, const float* grad, size_t nelem,
                     FoAdamw a, FoStream* s) {
    fo_require(a.t >= 1, "t=%d, want the step counted from 1", a.t);
    AdamwUpdate u = {param, master, m, v, grad, nelem, a};
    fo__enqueue(s, adamw_update, &u, sizeof u);
}

typedef struct {
    double* out;
    const float* x;
    size_t nelem;
} SquareSum;

static double square_sum_block(const float* x, size_t n) {
    double acc[LANES] = {0};
    size_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        for (int k = 0; k < LANES; k++) {
            acc[k] += (double)x[j + (size_t)k] * (double)x[j + (size_t)k];
        }
    }
    for (size_t k = 0; j + k < n; k++) {
        acc[k] += (double)x[j + k] * (double)x[j + k];
    }
    for (int k = 1; k < LANES; k++) {
        acc[0] += acc[k];
    }
    return acc[0];
}

static void square_sum(FoStream* s, void* args) {
    const SquareSum a = *(const SquareSum*)args;
    const size_t nblocks = ceil_div(a.nelem, NORM_BLOCK);
    double* parts = fo__scratch(s, nblocks * sizeof(double));
    PARALLEL_FOR(nblocks)
    for (size_t b = 0; b < nblocks; b++) {
        parts[b] = square_sum_block(a.x + b * NORM_BLOCK, min_size(a.nelem - b * NORM_BLOCK, NORM_BLOCK));
    }
    for (size_t b = 0; b < nblocks; b++) {
        *a.out += parts[b];
    }
}

void fo_square_sum(double* out, const float* x, size_t nelem, FoStream* s) {
    SquareSum a = {out, x, nelem};
    fo__enqueue(s, square_sum, &a, sizeof a);
}
