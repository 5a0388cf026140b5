/* test_matmul.c -- fo_matmul_forward, dgrad, those two added, and wgrad: right, the same bits however rows
 * are cut, and run to run.
 *
 * The oracle is a plain triple loop in double, below. The cut test compares one call with many: it is the
 * promise of fo_ops.h that overlapped and plain schedules rest on, and the choice of kernels in cpu/matmul.c
 * is made for it.
 */
#include "dev/test/check.h"
#include "flashoverlap/fo_ops.h"
#include <stdlib.h>

typedef enum { FORWARD, DGRAD, FORWARD_ADD, DGRAD_ADD } Kind;
static const char* const kind_names[] = {"forward", "dgrad", "forward_add", "dgrad_add"};

static int is_forward(Kind kind) {
    return kind == FORWARD || kind == FORWARD_ADD;
}
static int adds(Kind kind) {
    return kind == FORWARD_ADD || kind == DGRAD_ADD;
}

static uint64_t random_state;

static float random_float(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(random_state >> 40) / (float)(1 << 23) - 1.0f;
}

static void* host_alloc(size_t nelem, size_t size) {
    void* p = calloc(nelem + 1, size);
    fo_require(p != NULL, "out of memory");
    return p;
}

// device memory of random numbers, and what they are after rounding to floatX
static floatX* random_floatx(FoDevice* d, float* values, size_t nelem) {
    floatX* p = fo_malloc(d, nelem * sizeof(floatX) + 1);
    for (size_t i = 0; i < nelem; i++) {
        p[i] = fo_floatx(random_float());
        values[i] = fo_float(p[i]);
    }
    return p;
}

// c[m, n] = sum over k of a[m*am + k*ak] * b[k*bk + n*bn] + bias[n] + c[m, n] if it is not NULL
static void oracle(float* out, const float* a, size_t am, size_t ak, const float* b, size_t bk, size_t bn,
                   const float* bias, const float* c, size_t M, size_t N, size_t K) {
    for (size_t m = 0; m < M; m++) {
        for (size_t n = 0; n < N; n++) {
            double sum = bias ? (double)bias[n] : 0.0;
            sum += c ? (double)c[m * N + n] : 0.0;
            for (size_t k = 0; k < K; k++) {
                sum += (double)a[m * am + k * ak] * (double)b[k * bk + n * bn];
            }
            out[m * N + n] = (float)sum;
        }
    }
}

static void read_out(float* values, const void* out, size_t nelem, FoDtype type) {
    for (size_t i = 0; i < nelem; i++) {
        values[i] = type == FO_FP32 ? ((const float*)out)[i] : fo_bf16_to_float(((const FoBf16*)out)[i]);
    }
}

/* fp32 sums of K products err by at most a few roundings each: below 1e-6 sqrt(K) relative in the 2-norm. A
 * result rounded to bf16 is off by at most 2^-9 of itself.
 */
static double tolerance(size_t K, FoDtype out_type) {
    return 1e-6 * sqrt((double)K) + (out_type == FO_BF16 ? 0x1p-9 : 0.0);
}

// type is fp32 and bias NULL where the kind adds
static void call(Kind kind, void* out, const floatX* x, const floatX* w, const floatX* bias, size_t n, int K,
                 int OC, FoDtype type, FoStream* s) {
    switch (kind) {
    case FORWARD: fo_matmul_forward(out, x, w, bias, n, K, OC, type, s); break;
    case DGRAD: fo_matmul_dgrad(out, x, w, n, K, OC, type, s); break;
    case FORWARD_ADD: fo_matmul_forward_add(out, x, w, n, K, OC, s); break;
    case DGRAD_ADD: fo_matmul_dgrad_add(out, x, w, n, K, OC, s); break;
    }
}

// what a call finds in its output: NaN, or the numbers that it adds to
static void fill_out(Kind kind, void* out, size_t nelem, FoDtype type) {
    memset(out, 0xff, nelem * fo_dtype_nbytes(type));
    for (size_t i = 0; adds(kind) && i < nelem; i++) {
        ((float*)out)[i] = (float)((i * 7919) % 1000) * 0.004f - 2.0f;
    }
}

// ---- right ------------------------------------------------------------------------------------------------
static void test_rows(FoDevice* d, FoStream* s, Kind kind, size_t n, int K, int OC, int with_bias,
                      FoDtype type) {
    size_t width = (size_t)(is_forward(kind) ? K : OC), cols = (size_t)(is_forward(kind) ? OC : K);
    float* x = host_alloc(n * width, sizeof *x);
    float* w = host_alloc((size_t)OC * (size_t)K, sizeof *w);
    float* bias = host_alloc(cols, sizeof *bias);
    float* want = host_alloc(n * cols, sizeof *want);
    float* got = host_alloc(n * cols, sizeof *got);
    float* before = host_alloc(n * cols, sizeof *before);
    floatX* dx = random_floatx(d, x, n * width);
    floatX* dw = random_floatx(d, w, (size_t)OC * (size_t)K);
    floatX* dbias = random_floatx(d, bias, cols);
    void* out = fo_malloc(d, (n * cols + 1) * fo_dtype_nbytes(type));
    memset(out, 0xff, (n * cols + 1) * fo_dtype_nbytes(type)); // NaN
    fill_out(kind, out, n * cols, type);
    read_out(before, out, n * cols, type);
    CHECK_AT("%s n=%zu K=%d OC=%d bias=%d out=%d", kind_names[kind], n, K, OC, with_bias, (int)type);
    call(kind, out, dx, dw, with_bias ? dbias : NULL, n, K, OC, type, s);
    fo_stream_sync(s);
    size_t bk = is_forward(kind) ? 1 : (size_t)K, bn = is_forward(kind) ? (size_t)K : 1;
    oracle(want, x, width, 1, w, bk, bn, with_bias ? bias : NULL, adds(kind) ? before : NULL, n, cols, width);
    read_out(got, out, n * cols, type);
    CHECK_CLOSE(got, want, n * cols, tolerance(width, type));
    uint32_t poison = 0xffffffffu;
    CHECK_BITS((char*)out + n * cols * fo_dtype_nbytes(type), &poison, fo_dtype_nbytes(type));
    fo_free(d, dx), fo_free(d, dw), fo_free(d, dbias), fo_free(d, out);
    free(x), free(w), free(bias), free(want), free(got), free(before);
}

static void test_wgrad(FoDevice* d, FoStream* s, size_t n, int K, int OC, int with_dbias) {
    size_t nw = (size_t)OC * (size_t)K;
    float* x = host_alloc(n * (size_t)K, sizeof *x);
    float* y = host_alloc(n * (size_t)OC, sizeof *y);
    float* ones = host_alloc(n, sizeof *ones);
    float* want = host_alloc(nw + (size_t)OC, sizeof *want);
    floatX* dx = random_floatx(d, x, n * (size_t)K);
    floatX* dy = random_floatx(d, y, n * (size_t)OC);
    float* dw = fo_malloc(d, (nw + (size_t)OC) * sizeof *dw);
    float* before = host_alloc(nw + (size_t)OC, sizeof *before);
    for (size_t i = 0; i < nw + (size_t)OC; i++) {
        before[i] = dw[i] = random_float(); // it accumulates
    }
    for (size_t i = 0; i < n; i++) {
        ones[i] = 1.0f;
    }
    CHECK_AT("wgrad n=%zu K=%d OC=%d dbias=%d", n, K, OC, with_dbias);
    fo_matmul_wgrad(dw, with_dbias ? dw + nw : NULL, dy, dx, n, K, OC, s);
    fo_stream_sync(s);
    oracle(want, y, 1, (size_t)OC, x, (size_t)K, 1, NULL, before, (size_t)OC, (size_t)K, n);
    CHECK_CLOSE(dw, want, nw, tolerance(n, FO_FP32));
    if (with_dbias) {
        oracle(want, ones, 0, 1, y, (size_t)OC, 1, NULL, before + nw, 1, (size_t)OC, n);
        CHECK_CLOSE(dw + nw, want, (size_t)OC, tolerance(n, FO_FP32));
    } else {
        CHECK_BITS(dw + nw, before + nw, (size_t)OC * sizeof *dw);
    }
    fo_free(d, dx), fo_free(d, dy), fo_free(d, dw);
    free(x), free(y), free(ones), free(want), free(before);
}

/* A weight gradient in parts, one after the other, the last first. Every other part is left out at first:
 * its rows must not change. The parts' bits are those of the whole, but for sums so wide that AMX kernels
 * let them depend on the number of rows (cpu/matmul.c).
 */
static void test_wgrad_rows(FoDevice* d, FoStream* s, size_t n, int K, int OC) {
    size_t nw = (size_t)OC * (size_t)K, parts[] = {1, 2, 3, 4, 7};
    float* values = host_alloc(n * (size_t)(K > OC ? K : OC), sizeof *values);
    floatX* x = random_floatx(d, values, n * (size_t)K);
    floatX* y = random_floatx(d, values, n * (size_t)OC);
    float* whole = fo_malloc(d, nw * sizeof *whole);
    float* before = fo_malloc(d, nw * sizeof *before);
    float* got = fo_malloc(d, nw * sizeof *got);
    for (size_t i = 0; i < nw; i++) {
        whole[i] = before[i] = random_float();
    }
    fo_matmul_wgrad(whole, NULL, y, x, n, K, OC, s);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        fo_copy(got, before, nw * sizeof *got, s);
        for (size_t pass = 0; pass < 2; pass++) {
            for (size_t p = parts[i]; p-- > 0;) {
                size_t row0 = (size_t)OC * p / parts[i], nrows = (size_t)OC * (p + 1) / parts[i] - row0;
                if (p % 2 == pass) { fo_matmul_wgrad_rows(got, y, x, row0, nrows, n, K, OC, s); }
            }
            fo_stream_sync(s);
            for (size_t p = 0; p < parts[i]; p++) {
                size_t row0 = (size_t)OC * p / parts[i], nrows = (size_t)OC * (p + 1) / parts[i] - row0;
                const float* want = (p % 2 <= pass ? whole : before) + row0 * (size_t)K;
                CHECK_AT("wgrad n=%zu K=%d OC=%d, part %zu of %zu, pass %zu", n, K, OC, p, parts[i], pass);
                if (n > 1024 && p % 2 <= pass) {
                    CHECK_CLOSE(got + row0 * (size_t)K, want, nrows * (size_t)K, tolerance(n, FO_FP32));
                } else {
                    CHECK_BITS(got + row0 * (size_t)K, want, nrows * (size_t)K * sizeof *want);
                }
            }
        }
    }
    fo_free(d, x), fo_free(d, y), fo_free(d, whole), fo_free(d, before), fo_free(d, got);
    free(values);
}

static void test_right(FoDevice* d, FoStream* s) {
    static const int shapes[][3] = {{1, 1, 1},     {5, 3, 7},       {64, 64, 64},   {33, 25, 75},
                                    {100, 48, 96}, {100, 768, 40},  {17, 1500, 31}, {300, 2112, 50},
                                    {7, 31, 1100}, {600, 20, 1601}, {1, 300, 200},  {130, 1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        size_t n = (size_t)shapes[i][0];
        int K = shapes[i][1], OC = shapes[i][2];
        for (int bias = 0; bias < 2; bias++) {
            test_rows(d, s, FORWARD, n, K, OC, bias, FO_FLOATX);
            test_rows(d, s, FORWARD, n, K, OC, bias, FO_FP32);
            test_wgrad(d, s, n, K, OC, bias);
        }
        test_rows(d, s, DGRAD, n, K, OC, 0, FO_FLOATX);
        test_rows(d, s, DGRAD, n, K, OC, 0, FO_FP32);
        test_rows(d, s, FORWARD_ADD, n, K, OC, 0, FO_FP32);
        test_rows(d, s, DGRAD_ADD, n, K, OC, 0, FO_FP32);
        test_wgrad_rows(d, s, n, K, OC);
    }
    test_wgrad(d, s, 2100, 40, 30, 1);
    test_wgrad_rows(d, s, 2100, 40, 30);
    test_wgrad_rows(d, s, 1000, 130, 200);
    float untouched[2] = {1.0f, 2.0f}; // no rows: nothing happens
    fo_matmul_forward(untouched, NULL, NULL, NULL, 0, 2, 1, FO_FP32, s);
    fo_matmul_forward_add(untouched, NULL, NULL, 0, 2, 1, s);
    fo_matmul_dgrad_add(untouched, NULL, NULL, 0, 2, 1, s);
    fo_matmul_wgrad(untouched, untouched + 1, NULL, NULL, 0, 1, 1, s);
    fo_matmul_wgrad_rows(untouched, NULL, NULL, 0, 1, 0, 1, 1, s);
    fo_matmul_wgrad_rows(untouched, NULL, NULL, 1, 0, 5, 1, 1, s);
    fo_stream_sync(s);
    CHECK(untouched[0] == 1.0f && untouched[1] == 2.0f);
}

// ---- the same bits ----------------------------------------------------------------------------------------
/* fp32 results, since a rounding to bf16 would hide most differences; floatX ones too, for the path with a
 * rounding. Rows that a cut leaves over are a call of their own. Of small calls the first few hundred rows
 * will do.
 */
static void test_cuts(FoDevice* d, FoStream* s, Kind kind, size_t n, int K, int OC, FoDtype type) {
    static const size_t cuts[] = {2048, 1024, 512, 256, 300, 128, 100, 64, 37, 16, 1};
    size_t width = (size_t)(is_forward(kind) ? K : OC), cols = (size_t)(is_forward(kind) ? OC : K);
    size_t nbytes = n * cols * fo_dtype_nbytes(type), size = fo_dtype_nbytes(type);
    float* values = host_alloc(n * width + (size_t)OC * (size_t)K + cols, sizeof *values);
    floatX* x = random_floatx(d, values, n * width);
    floatX* w = random_floatx(d, values, (size_t)OC * (size_t)K);
    floatX* bias = kind == FORWARD ? random_floatx(d, values, cols) : NULL;
    char* whole = fo_malloc(d, nbytes);
    char* parts = fo_malloc(d, nbytes);
    fill_out(kind, whole, n * cols, type);
    call(kind, whole, x, w, bias, n, K, OC, type, s);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        size_t cut = cuts[i], rows = cut < 128 && cut * 7 < n ? cut * 7 : n;
        if (cut >= n) { continue; }
        fo_stream_sync(s);
        fill_out(kind, parts, n * cols, type);
        for (size_t row = 0; row < rows; row += cut) {
            size_t k = row + cut < rows ? cut : rows - row;
            call(kind, parts + row * cols * size, x + row * width, w, bias, k, K, OC, type, s);
        }
        fo_stream_sync(s);
        CHECK_AT("%s n=%zu in calls of %zu, K=%d OC=%d out=%d", kind_names[kind], n, cut, K, OC, (int)type);
        CHECK_BITS(parts, whole, rows * cols * size);
    }
    fo_free(d, x), fo_free(d, w), fo_free(d, bias), fo_free(d, whole), fo_free(d, parts);
    free(values);
}

static void test_same_bits(FoDevice* d, FoStream* s) {
#if FO_ONEDNN
    static const int widths[] = {25, 64, 100, 768, 1000, 1024, 1028, 1600, 2048, 3072, 4096, 8192};
    const size_t n = 600;
#else // loops whose order the width alone decides, and slow under a sanitizer
    static const int widths[] = {25, 64, 1028};
    const size_t n = 270;
#endif
    static const int cols[] = {1, 25, 130};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        for (size_t j = 0; j < sizeof cols / sizeof *cols; j++) {
            test_cuts(d, s, FORWARD, n, widths[i], cols[j], FO_FP32);
            test_cuts(d, s, DGRAD, n, cols[j], widths[i], FO_FP32);
            test_cuts(d, s, FORWARD_ADD, n, widths[i], cols[j], FO_FP32);
            test_cuts(d, s, DGRAD_ADD, n, cols[j], widths[i], FO_FP32);
        }
        test_cuts(d, s, FORWARD, n, widths[i], 96, FO_FLOATX);
    }
#if FO_ONEDNN
    test_cuts(d, s, FORWARD, 4096, 768, 768, FO_FP32);
    test_cuts(d, s, FORWARD, 4096, 3072, 768, FO_FLOATX);
    test_cuts(d, s, DGRAD, 4096, 768, 2304, FO_FLOATX);
#endif
}

// ---- streams and devices ----------------------------------------------------------------------------------
enum { RANKS = 3, TIMES = 40 };

/* Equal primitives run at the same time on the streams of several devices, and on two streams of one. Exact
 * data: small whole numbers, so any order of adding gives the same.
 */
static void test_together(int two_streams_a_device) {
    enum { n = 300, K = 900, OC = 450 };
    FoDevice* d[RANKS];
    FoStream* s[RANKS];
    floatX *x[RANKS], *w[RANKS];
    float* out[RANKS];
    for (int r = 0; r < RANKS; r++) {
        int own = two_streams_a_device ? 0 : r;
        d[r] = r == own ? fo_device_open(r, RANKS) : d[own];
        s[r] = fo_stream_create(d[r], "test");
        x[r] = fo_malloc(d[r], n * K * sizeof(floatX));
        w[r] = fo_malloc(d[r], OC * K * sizeof(floatX));
        out[r] = fo_malloc(d[r], (size_t)TIMES * n * OC * sizeof(float));
        memset(out[r], 0xff, (size_t)TIMES * n * OC * sizeof(float));
        for (int i = 0; i < n * K; i++) {
            x[r][i] = fo_floatx((float)((i * 7 + i / K + r) % 5 - 2));
        }
        for (int i = 0; i < OC * K; i++) {
            w[r][i] = fo_floatx((float)((i * 3 + i / K + r) % 7 - 3));
        }
    }
    for (int i = 0; i < TIMES * RANKS; i++) {
        int r = i % RANKS;
        fo_matmul_forward(out[r] + (size_t)(i / RANKS) * n * OC, x[r], w[r], NULL, n, K, OC, FO_FP32, s[r]);
    }
    float* values = host_alloc((size_t)n * K + OC * K, sizeof *values);
    float* want = host_alloc((size_t)n * OC, sizeof *want);
    for (int r = 0; r < RANKS; r++) {
        fo_stream_sync(s[r]);
        read_out(values, x[r], (size_t)n * K, FO_FLOATX);
        read_out(values + (size_t)n * K, w[r], (size_t)OC * K, FO_FLOATX);
        oracle(want, values, K, 1, values + (size_t)n * K, 1, K, NULL, NULL, n, OC, K);
        for (int i = 0; i < TIMES; i++) {
            CHECK_AT("rank %d of %d at once, run %d", r, RANKS, i);
            CHECK_BITS(out[r] + (size_t)i * n * OC, want, (size_t)n * OC * sizeof(float));
        }
    }
    free(values), free(want);
    for (int r = 0; r < RANKS; r++) {
        fo_stream_destroy(s[r]);
        fo_free(d[r], x[r]), fo_free(d[r], w[r]), fo_free(d[r], out[r]);
    }
    for (int r = 0; r < (two_streams_a_device ? 1 : RANKS); r++) {
        fo_device_close(d[r]);
    }
}

static void test_wgrad_repeats(FoDevice* d, FoStream* s) {
    enum { n = 1500, K = 70, OC = 130, NW = K * OC + OC };
    float* values = host_alloc((size_t)n * OC, sizeof *values);
    floatX* x = random_floatx(d, values, (size_t)n * K);
    floatX* y = random_floatx(d, values, (size_t)n * OC);
    float* first = fo_malloc(d, NW * sizeof(float));
    float* again = fo_malloc(d, NW * sizeof(float));
    fo_matmul_wgrad(first, first + K * OC, y, x, n, K, OC, s);
    for (int i = 0; i < 5; i++) {
        fo_zero(again, NW * sizeof(float), s);
        fo_matmul_wgrad(again, again + K * OC, y, x, n, K, OC, s);
        fo_stream_sync(s);
        CHECK_AT("wgrad, run %d", i);
        CHECK_BITS(again, first, NW * sizeof(float));
    }
    fo_free(d, x), fo_free(d, y), fo_free(d, first), fo_free(d, again);
    free(values);
}

static void die_of_rows(void) {
    fo_matmul_wgrad_rows(NULL, NULL, NULL, 3, 4, 1, 1, 6, NULL);
}

static void die_of_width(void) {
    fo_matmul_forward(NULL, NULL, NULL, NULL, 1, 0, 1, FO_FP32, NULL);
}

int main(void) {
    CHECK_DIES(die_of_width(), "K=0 and OC=1, want both above 0");
    CHECK_DIES(die_of_rows(), "rows 3 to 7 of 6");
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "test");
    test_right(d, s);
    test_wgrad_repeats(d, s);
    test_same_bits(d, s);
    double peak = fo_device_peak_tflops(d);
    CHECK_AT("peak %g TFLOP/s", peak);
    CHECK(peak > 1e-4 && peak < 1e3);
    CHECK(fo_device_peak_tflops(d) == peak);
    fo_stream_destroy(s);
    CHECK(fo_device_nbytes(d) == 0);
    fo_device_close(d);
    test_together(0);
    test_together(1);
    return check_report();
}
