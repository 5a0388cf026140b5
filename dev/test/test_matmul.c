/* test_matmul.c -- fo_matmul_forward, dgrad, those two added, wgrad and the bias gradient: right, the same
 * bits however rows are cut, and run to run.
 *
 * The oracle is a plain triple loop in double, below. The cut test compares one call with many: it is the
 * promise of fo_ops.h that overlapped and plain schedules rest on, and the choice of kernels in cpu/matmul.c
 * is made for it. On cuda the whole is run again with the plain kernel of cuda/matmul.cu, and emulated once
 * more with a library that declines what is not aligned.
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

// counts calls of the emulator; NULL where nothing is emulated
extern long fo_emu_count(const char* what) __attribute__((weak));

static void* host_alloc(size_t nelem, size_t size) {
    void* p = calloc(nelem + 1, size);
    fo_require(p != NULL, "out of memory");
    return p;
}

// host -> device, and back into memory of the caller's; both wait
static void put(void* dst, const void* host, size_t nbytes, FoStream* s) {
    fo_upload(dst, host, nbytes, s);
    fo_stream_sync(s);
}

static void* fetch(const void* src, size_t nbytes, FoStream* s) {
    void* host = host_alloc(nbytes, 1);
    fo_download(host, src, nbytes, s);
    fo_stream_sync(s);
    return host;
}

// device memory of random numbers, and what they are after rounding to floatX
static floatX* random_floatx(FoDevice* d, FoStream* s, float* values, size_t nelem) {
    floatX* p = fo_malloc(d, nelem * sizeof(floatX) + 1);
    floatX* host = host_alloc(nelem, sizeof *host);
    for (size_t i = 0; i < nelem; i++) {
        host[i] = fo_floatx(random_float());
        values[i] = fo_float(host[i]);
    }
    put(p, host, nelem * sizeof *host, s);
    free(host);
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

// of device memory
static void read_out(float* values, const void* out, size_t nelem, FoDtype type, FoStream* s) {
    void* host = fetch(out, nelem * fo_dtype_nbytes(type), s);
    for (size_t i = 0; i < nelem; i++) {
        values[i] = type == FO_FP32 ? ((const float*)host)[i] : fo_bf16_to_float(((const FoBf16*)host)[i]);
    }
    free(host);
}

/* fp32 sums of K products err by at most a few roundings each: below 1e-6 sqrt(K) relative in the 2-norm. A
 * result rounded to bf16 is off by at most 2^-8 of itself.
 */
static double tolerance(size_t K, FoDtype out_type) {
    return 1e-6 * sqrt((double)K) + (out_type == FO_BF16 ? 0x1p-8 : 0.0);
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

// what a call finds in its output: NaN, or the numbers that it adds to; and behind it one element more, which
// is a number, so that adding to it shows
enum { BEHIND = 0x3c };
static void fill_out(Kind kind, void* out, size_t nelem, FoDtype type, FoStream* s) {
    size_t nbytes = (nelem + 1) * fo_dtype_nbytes(type);
    float* host = host_alloc(nelem + 1, sizeof *host);
    memset(host, 0xff, nbytes);
    for (size_t i = 0; adds(kind) && i < nelem; i++) {
        host[i] = (float)((i * 7919) % 1000) * 0.004f - 2.0f;
    }
    memset((char*)host + nbytes - fo_dtype_nbytes(type), BEHIND, fo_dtype_nbytes(type));
    put(out, host, nbytes, s);
    free(host);
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
    floatX* dx = random_floatx(d, s, x, n * width);
    floatX* dw = random_floatx(d, s, w, (size_t)OC * (size_t)K);
    floatX* dbias = random_floatx(d, s, bias, cols);
    void* out = fo_malloc(d, (n * cols + 1) * fo_dtype_nbytes(type));
    fill_out(kind, out, n * cols, type, s);
    read_out(before, out, n * cols, type, s);
    CHECK_AT("%s n=%zu K=%d OC=%d bias=%d out=%d", kind_names[kind], n, K, OC, with_bias, (int)type);
    if (with_bias) { call(kind, out, dx, dw, dw, n, K, OC, type, s); } // another call's bias is not kept
    call(kind, out, dx, dw, with_bias ? dbias : NULL, n, K, OC, type, s);
    size_t bk = is_forward(kind) ? 1 : (size_t)K, bn = is_forward(kind) ? (size_t)K : 1;
    oracle(want, x, width, 1, w, bk, bn, with_bias ? bias : NULL, adds(kind) ? before : NULL, n, cols, width);
    read_out(got, out, n * cols, type, s);
    CHECK_CLOSE(got, want, n * cols, tolerance(width, type));
    unsigned char poison[4] = {BEHIND, BEHIND, BEHIND, BEHIND};
    void* behind = fetch((char*)out + n * cols * fo_dtype_nbytes(type), fo_dtype_nbytes(type), s);
    CHECK_BITS(behind, poison, fo_dtype_nbytes(type));
    free(behind);
    fo_free(d, dx), fo_free(d, dw), fo_free(d, dbias), fo_free(d, out);
    free(x), free(w), free(bias), free(want), free(got), free(before);
}

// what the GELU of x is, or its slope
static float gelu(float x, int slope) {
    const double c = 0.79788456080286536, v = (double)x, t = tanh(c * (v + 0.044715 * v * v * v));
    double y = 0.5 * v * (1.0 + t),
           dy = 0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * c * (1.0 + 0.134145 * v * v);
    return (float)(slope ? dy : y);
}

/* Not fused, the bits are those of two calls. A sum that is rounded before its GELU is off by 2^-8 twice, and
 * where GELU is not small its slope is at most 1.13.
 */
static void test_gelu(FoDevice* d, FoStream* s, size_t n, int K, int OC, int fuse) {
    const size_t nout = n * (size_t)OC, ninp = n * (size_t)K, nw = (size_t)OC * (size_t)K;
    const double rounded = FO_FLOATX == FO_BF16 ? 0x1p-7 : 1e-6;
    float* x = host_alloc(nout + ninp + nw + (size_t)OC, sizeof *x); // inp, weight, bias, dout
    float *w = x + ninp, *bias = w + nw, *dy = bias + OC;
    float* want = host_alloc(nout + ninp, sizeof *want);
    float* got = host_alloc(nout + ninp, sizeof *got);
    floatX* dx = random_floatx(d, s, x, ninp);
    floatX* dw = random_floatx(d, s, w, nw);
    floatX* dbias = random_floatx(d, s, bias, (size_t)OC);
    floatX* ddy = random_floatx(d, s, dy, nout);
    floatX* out = fo_malloc(d, 4 * (nout + ninp) * sizeof *out); // by one call, and by two
    floatX *act = out + nout, *dinp = act + nout, *out2 = dinp + 2 * ninp, *act2 = out2 + nout,
           *dinp2 = act2 + nout;
    fill_out(FORWARD, out, 4 * (nout + ninp) - 1, FO_FLOATX, s);
    floatX* other = fo_malloc(d, nout * sizeof *other); // what another call was given is not kept
    fo_device_fuse_gelu(d, fuse);
    fo_matmul_gelu_forward(other, act2, dx, dw, dbias, n, K, OC, s);
    fo_matmul_gelu_dgrad(dinp2, ddy, dw, ddy, n, K, OC, s); // OC >= K: there are enough
    fo_matmul_gelu_forward(out, act, dx, dw, dbias, n, K, OC, s);
    fo_matmul_gelu_dgrad(dinp, ddy, dw, dx, n, K, OC, s);
    fo_device_fuse_gelu(d, 0);
    fo_matmul_forward(out2, dx, dw, dbias, n, K, OC, FO_FLOATX, s);
    fo_gelu_forward(act2, out2, nout, s);
    fo_matmul_dgrad(dinp2, ddy, dw, n, K, OC, FO_FLOATX, s);
    fo_gelu_backward(dinp2, dinp2, dx, ninp, s);
    CHECK_AT("gelu n=%zu K=%d OC=%d fuse=%d", n, K, OC, fuse);
    oracle(want, x, (size_t)K, 1, w, 1, (size_t)K, bias, NULL, n, (size_t)OC, (size_t)K);
    read_out(got, out, nout, FO_FLOATX, s);
    CHECK_CLOSE(got, want, nout, tolerance((size_t)K, FO_FLOATX));
    for (size_t i = 0; i < nout; i++) {
        want[i] = gelu(want[i], 0);
    }
    read_out(got, act, nout, FO_FLOATX, s);
    CHECK_CLOSE(got, want, nout, tolerance((size_t)K, FO_FLOATX) + rounded);
    oracle(want, dy, (size_t)OC, 1, w, (size_t)K, 1, NULL, NULL, n, (size_t)K, (size_t)OC);
    for (size_t i = 0; i < ninp; i++) {
        want[i] *= gelu(x[i], 1);
    }
    read_out(got, dinp, ninp, FO_FLOATX, s);
    CHECK_CLOSE(got, want, ninp, tolerance((size_t)OC, FO_FLOATX) + rounded);
    if (!fuse || FO_DEVICE_CPU) {
        void* one = fetch(out, (2 * nout + ninp) * sizeof *out, s);
        void* two = fetch(out2, (2 * nout + ninp) * sizeof *out, s);
        CHECK_BITS(one, two, (2 * nout + ninp) * sizeof *out);
        free(one), free(two);
    }
    fo_free(d, dx), fo_free(d, dw), fo_free(d, dbias), fo_free(d, ddy), fo_free(d, out), fo_free(d, other);
    free(x), free(want), free(got);
}

static void test_wgrad(FoDevice* d, FoStream* s, size_t n, int K, int OC, int with_dbias) {
    size_t nw = (size_t)OC * (size_t)K;
    float* x = host_alloc(n * (size_t)K, sizeof *x);
    float* y = host_alloc(n * (size_t)OC, sizeof *y);
    float* ones = host_alloc(n, sizeof *ones);
    float* want = host_alloc(nw + (size_t)OC, sizeof *want);
    floatX* dx = random_floatx(d, s, x, n * (size_t)K);
    floatX* dy = random_floatx(d, s, y, n * (size_t)OC);
    float* dw = fo_malloc(d, (nw + (size_t)OC) * sizeof *dw);
    float* before = host_alloc(nw + (size_t)OC, sizeof *before);
    for (size_t i = 0; i < nw + (size_t)OC; i++) {
        before[i] = random_float(); // it accumulates
    }
    put(dw, before, (nw + (size_t)OC) * sizeof *dw, s);
    for (size_t i = 0; i < n; i++) {
        ones[i] = 1.0f;
    }
    CHECK_AT("wgrad n=%zu K=%d OC=%d dbias=%d", n, K, OC, with_dbias);
    fo_matmul_wgrad(dw, with_dbias ? dw + nw : NULL, dy, dx, n, K, OC, s);
    float* got = fetch(dw, (nw + (size_t)OC) * sizeof *got, s);
    oracle(want, y, 1, (size_t)OC, x, (size_t)K, 1, NULL, before, (size_t)OC, (size_t)K, n);
    CHECK_CLOSE(got, want, nw, tolerance(n, FO_FP32));
    if (with_dbias) {
        oracle(want, ones, 0, 1, y, (size_t)OC, 1, NULL, before + nw, 1, (size_t)OC, n);
        CHECK_CLOSE(got + nw, want, (size_t)OC, tolerance(n, FO_FP32));
    } else {
        CHECK_BITS(got + nw, before + nw, (size_t)OC * sizeof *got);
    }
    fo_free(d, dx), fo_free(d, dy), fo_free(d, dw);
    free(x), free(y), free(ones), free(want), free(before), free(got);
}

/* A weight gradient in parts, one after the other, the last first. Every other part is left out at first:
 * its rows must not change. On the cpu the parts' bits are those of the whole, but for sums so wide that AMX
 * kernels let them depend on the number of rows (cpu/matmul.c); cuBLASLt may split the sums of one and not of
 * the other.
 */
static void test_wgrad_rows(FoDevice* d, FoStream* s, size_t n, int K, int OC) {
    size_t nw = (size_t)OC * (size_t)K, parts[] = {1, 2, 3, 4, 7};
    float* values = host_alloc(n * (size_t)(K > OC ? K : OC), sizeof *values);
    floatX* x = random_floatx(d, s, values, n * (size_t)K);
    floatX* y = random_floatx(d, s, values, n * (size_t)OC);
    float* dw = fo_malloc(d, nw * sizeof *dw);
    float* before = host_alloc(nw, sizeof *before);
    for (size_t i = 0; i < nw; i++) {
        before[i] = random_float();
    }
    put(dw, before, nw * sizeof *dw, s);
    fo_matmul_wgrad(dw, NULL, y, x, n, K, OC, s);
    float* whole = fetch(dw, nw * sizeof *whole, s);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        put(dw, before, nw * sizeof *dw, s);
        for (size_t pass = 0; pass < 2; pass++) {
            for (size_t p = parts[i]; p-- > 0;) {
                size_t row0 = (size_t)OC * p / parts[i], nrows = (size_t)OC * (p + 1) / parts[i] - row0;
                if (p % 2 == pass) { fo_matmul_wgrad_rows(dw, y, x, row0, nrows, n, K, OC, s); }
            }
            float* got = fetch(dw, nw * sizeof *got, s);
            for (size_t p = 0; p < parts[i]; p++) {
                size_t row0 = (size_t)OC * p / parts[i], nrows = (size_t)OC * (p + 1) / parts[i] - row0;
                const float* want = (p % 2 <= pass ? whole : before) + row0 * (size_t)K;
                CHECK_AT("wgrad n=%zu K=%d OC=%d, part %zu of %zu, pass %zu", n, K, OC, p, parts[i], pass);
                if ((n > 1024 || !FO_DEVICE_CPU) && p % 2 <= pass) {
                    CHECK_CLOSE(got + row0 * (size_t)K, want, nrows * (size_t)K, tolerance(n, FO_FP32));
                } else {
                    CHECK_BITS(got + row0 * (size_t)K, want, nrows * (size_t)K * sizeof *want);
                }
            }
            free(got);
        }
    }
    fo_free(d, x), fo_free(d, y), fo_free(d, dw);
    free(values), free(before), free(whole);
}

// added to what is there, and the same bits wherever dout lies
static void test_bias(FoDevice* d, FoStream* s, size_t n, int C) {
    size_t width = (size_t)C;
    float* values = host_alloc(n * width, sizeof *values);
    float* want = host_alloc(width, sizeof *want);
    float* before = host_alloc(width, sizeof *before);
    float* ones = host_alloc(n, sizeof *ones);
    floatX* dout = random_floatx(d, s, values, n * width);
    floatX* apart = fo_malloc(d, (n * width + 1) * sizeof *apart);
    float* dbias = fo_malloc(d, 2 * width * sizeof *dbias);
    for (size_t c = 0; c < width; c++) {
        before[c] = random_float();
    }
    for (size_t i = 0; i < n; i++) {
        ones[i] = 1.0f;
    }
    put(dbias, before, width * sizeof *before, s);
    put(dbias + width, before, width * sizeof *before, s);
    fo_copy(apart + 1, dout, n * width * sizeof *dout, s);
    fo_bias_backward(dbias, dout, n, C, s);
    fo_bias_backward(dbias + width, apart + 1, n, C, s);
    float* got = fetch(dbias, 2 * width * sizeof *got, s);
    oracle(want, ones, 0, 1, values, width, 1, NULL, before, 1, width, n);
    CHECK_AT("bias n=%zu C=%d", n, C);
    CHECK_CLOSE(got, want, width, tolerance(n, FO_FP32));
    CHECK_BITS(got + width, got, width * sizeof *got);
    fo_free(d, dout), fo_free(d, apart), fo_free(d, dbias);
    free(values), free(want), free(before), free(ones), free(got);
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
}

static void test_gelu_sizes(FoDevice* d, FoStream* s) {
    static const int shapes[][3] = {{1, 1, 1}, {5, 3, 7}, {64, 24, 40}, {33, 64, 136}};
    for (size_t i = 0; i < 2 * sizeof shapes / sizeof *shapes; i++) {
        const int* x = shapes[i / 2];
        test_gelu(d, s, (size_t)x[0], x[1], x[2], i % 2);
    }
}

static void test_bias_sizes(FoDevice* d, FoStream* s) {
    static const int sizes[][2] = {{1, 1}, {5, 6}, {64, 8}, {65, 7}, {900, 264}, {3000, 25}, {700, 1300}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        test_bias(d, s, (size_t)sizes[i][0], sizes[i][1]);
    }
}

// no rows: nothing happens
static void test_empty(FoStream* s) {
    float untouched[2] = {1.0f, 2.0f};
    fo_matmul_forward(untouched, NULL, NULL, NULL, 0, 2, 1, FO_FP32, s);
    fo_matmul_forward_add(untouched, NULL, NULL, 0, 2, 1, s);
    fo_matmul_dgrad_add(untouched, NULL, NULL, 0, 2, 1, s);
    fo_matmul_wgrad(untouched, untouched + 1, NULL, NULL, 0, 1, 1, s);
    fo_matmul_wgrad_rows(untouched, NULL, NULL, 0, 1, 0, 1, 1, s);
    fo_matmul_wgrad_rows(untouched, NULL, NULL, 1, 0, 5, 1, 1, s);
    fo_matmul_gelu_forward(NULL, NULL, NULL, NULL, NULL, 0, 1, 1, s);
    fo_matmul_gelu_dgrad(NULL, NULL, NULL, NULL, 0, 1, 1, s);
    fo_bias_backward(untouched, NULL, 0, 2, s);
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
    floatX* x = random_floatx(d, s, values, n * width);
    floatX* w = random_floatx(d, s, values, (size_t)OC * (size_t)K);
    floatX* bias = kind == FORWARD ? random_floatx(d, s, values, cols) : NULL;
    char* out = fo_malloc(d, nbytes + size);
    fill_out(kind, out, n * cols, type, s);
    call(kind, out, x, w, bias, n, K, OC, type, s);
    char* whole = fetch(out, nbytes, s);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        size_t cut = cuts[i], rows = cut < 128 && cut * 7 < n ? cut * 7 : n;
        if (cut >= n) { continue; }
        fill_out(kind, out, n * cols, type, s);
        for (size_t row = 0; row < rows; row += cut) {
            size_t k = row + cut < rows ? cut : rows - row;
            call(kind, out + row * cols * size, x + row * width, w, bias, k, K, OC, type, s);
        }
        char* parts = fetch(out, rows * cols * size, s);
        CHECK_AT("%s n=%zu in calls of %zu, K=%d OC=%d out=%d", kind_names[kind], n, cut, K, OC, (int)type);
        CHECK_BITS(parts, whole, rows * cols * size);
        free(parts);
    }
    fo_free(d, x), fo_free(d, w), fo_free(d, bias), fo_free(d, out);
    free(values), free(whole);
}

static void test_same_bits(FoDevice* d, FoStream* s) {
    // few where there are loops whose order the width alone decides, and slow under a sanitizer
    const int few = fo_emu_count || (FO_DEVICE_CPU && !FO_ONEDNN);
    static const int widths[] = {25, 64, 1028, 100, 768, 1000, 1024, 1600, 2048, 3072, 4096, 8192};
    static const int cols[] = {1, 25, 130};
    const size_t n = few ? 270 : 600, nwidths = few ? 3 : sizeof widths / sizeof *widths;
    for (size_t i = 0; i < nwidths; i++) {
        for (size_t j = 0; j < sizeof cols / sizeof *cols; j++) {
            test_cuts(d, s, FORWARD, n, widths[i], cols[j], FO_FP32);
            test_cuts(d, s, DGRAD, n, cols[j], widths[i], FO_FP32);
            test_cuts(d, s, FORWARD_ADD, n, widths[i], cols[j], FO_FP32);
            test_cuts(d, s, DGRAD_ADD, n, cols[j], widths[i], FO_FP32);
        }
        test_cuts(d, s, FORWARD, n, widths[i], 96, FO_FLOATX);
    }
    if (!few) {
        test_cuts(d, s, FORWARD, 4096, 768, 768, FO_FP32);
        test_cuts(d, s, FORWARD, 4096, 3072, 768, FO_FLOATX);
        test_cuts(d, s, DGRAD, 4096, 768, 2304, FO_FLOATX);
    }
}

// ---- streams and devices ----------------------------------------------------------------------------------
enum { RANKS = 3, TIMES = 40 };

// what x and w of rank r are
static float small_number(int r, int i, int K, int which) {
    return (float)(which == 0 ? (i * 7 + i / K + r) % 5 - 2 : (i * 3 + i / K + r) % 7 - 3);
}

static floatX* small_numbers(FoDevice* d, FoStream* s, int r, int nelem, int K, int which) {
    floatX* host = host_alloc((size_t)nelem, sizeof *host);
    floatX* p = fo_malloc(d, (size_t)nelem * sizeof *p);
    for (int i = 0; i < nelem; i++) {
        host[i] = fo_floatx(small_number(r, i, K, which));
    }
    put(p, host, (size_t)nelem * sizeof *p, s);
    free(host);
    return p;
}

static void check_together(int r, const float* out, int n, int K, int OC, FoStream* s) {
    float* x = host_alloc((size_t)(n * K), sizeof *x);
    float* w = host_alloc((size_t)(OC * K), sizeof *w);
    float* want = host_alloc((size_t)(n * OC), sizeof *want);
    for (int i = 0; i < n * K; i++) {
        x[i] = small_number(r, i, K, 0);
    }
    for (int i = 0; i < OC * K; i++) {
        w[i] = small_number(r, i, K, 1);
    }
    oracle(want, x, (size_t)K, 1, w, 1, (size_t)K, NULL, NULL, (size_t)n, (size_t)OC, (size_t)K);
    for (int i = 0; i < TIMES; i++) {
        size_t nbytes = (size_t)(n * OC) * sizeof *want;
        void* got = fetch((const char*)out + (size_t)i * nbytes, nbytes, s);
        CHECK_AT("rank %d of %d at once, run %d", r, RANKS, i);
        CHECK_BITS(got, want, nbytes);
        free(got);
    }
    free(x), free(w), free(want);
}

/* Equal primitives run at the same time on the streams of several devices (of one GPU: all are rank 0), and
 * on the streams of one. Exact data: small whole numbers, so any order of adding gives the same.
 */
static void test_together(int one_device) {
    enum { K = 900 };
    const int n = fo_emu_count ? 60 : 300, OC = fo_emu_count ? 90 : 450;
    const size_t out_nbytes = (size_t)(TIMES * n * OC) * sizeof(float);
    FoDevice* d[RANKS];
    FoStream* s[RANKS];
    floatX *x[RANKS], *w[RANKS];
    float* out[RANKS];
    for (int r = 0; r < RANKS; r++) {
        d[r] =
            r == 0 || !one_device ? fo_device_open(FO_DEVICE_CPU ? r : 0, FO_DEVICE_CPU ? RANKS : 1) : d[0];
        s[r] = fo_stream_create(d[r], "test");
        x[r] = small_numbers(d[r], s[r], r, n * K, K, 0);
        w[r] = small_numbers(d[r], s[r], r, OC * K, K, 1);
        out[r] = fo_malloc(d[r], out_nbytes);
    }
    for (int i = 0; i < TIMES * RANKS; i++) {
        int r = i % RANKS;
        float* to = out[r] + (size_t)(i / RANKS) * (size_t)(n * OC);
        fo_matmul_forward(to, x[r], w[r], NULL, (size_t)n, K, OC, FO_FP32, s[r]);
    }
    for (int r = 0; r < RANKS; r++) {
        check_together(r, out[r], n, K, OC, s[r]);
        fo_stream_destroy(s[r]);
        fo_free(d[r], x[r]), fo_free(d[r], w[r]), fo_free(d[r], out[r]);
    }
    for (int r = 0; r < (one_device ? 1 : RANKS); r++) {
        fo_device_close(d[r]);
    }
}

static void test_wgrad_repeats(FoDevice* d, FoStream* s) {
    enum { n = 1500, K = 70, OC = 130, NW = K * OC + OC };
    float* values = host_alloc((size_t)n * OC, sizeof *values);
    floatX* x = random_floatx(d, s, values, (size_t)n * K);
    floatX* y = random_floatx(d, s, values, (size_t)n * OC);
    float* grads = fo_malloc(d, NW * sizeof(float));
    float* first = NULL;
    for (int i = 0; i < 6; i++) {
        fo_zero(grads, NW * sizeof(float), s);
        fo_matmul_wgrad(grads, grads + K * OC, y, x, n, K, OC, s);
        float* again = fetch(grads, NW * sizeof(float), s);
        if (i == 0) { first = again; }
        CHECK_AT("wgrad, run %d", i);
        CHECK_BITS(again, first, NW * sizeof(float));
        if (i > 0) { free(again); }
    }
    fo_free(d, x), fo_free(d, y), fo_free(d, grads);
    free(values), free(first);
}

/* The same shapes by other means: `name` in the environment is read when a device first multiplies. 1: by the
 * plain kernel of cuda alone; 16: by the library what is aligned, as emulated, by the plain kernel the rest.
 */
static void test_plain(const char* name, const char* value) {
    setenv(name, value, 1);
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "plain");
    static const int shapes[][3] = {{1, 1, 1}, {5, 3, 7}, {64, 64, 64}, {70, 25, 75}, {33, 131, 80}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        size_t n = (size_t)shapes[i][0];
        int K = shapes[i][1], OC = shapes[i][2];
        test_rows(d, s, FORWARD, n, K, OC, 1, FO_FLOATX);
        test_rows(d, s, FORWARD, n, K, OC, 1, FO_FP32);
        test_rows(d, s, DGRAD, n, K, OC, 0, FO_FLOATX);
        test_rows(d, s, FORWARD_ADD, n, K, OC, 0, FO_FP32);
        test_rows(d, s, DGRAD_ADD, n, K, OC, 0, FO_FP32);
        test_wgrad(d, s, n, K, OC, 1);
        test_wgrad_rows(d, s, n, K, OC);
    }
    test_cuts(d, s, FORWARD, 70, 25, 75, FO_FP32);
    test_cuts(d, s, DGRAD, 70, 25, 75, FO_FP32);
    fo_stream_destroy(s);
    fo_device_close(d);
    unsetenv(name);
}

// a shape is planned once, wherever its rows lie, and it is the library that computes it
static void test_planned_once(FoDevice* d, FoStream* s) {
    enum { n = 40, K = 24, OC = 56 };
    float* values = host_alloc(2 * n * (K + OC), sizeof *values);
    floatX* x = random_floatx(d, s, values, 2 * n * K);
    floatX* w = random_floatx(d, s, values, OC * K);
    floatX* out = fo_malloc(d, 2 * n * OC * sizeof *out);
    float* dweight = fo_malloc(d, OC * K * sizeof *dweight);
    long before = fo_emu_count("heuristic"), kernels = fo_emu_count("launch");
    for (int i = 0; i < 6; i++) {
        size_t row = (size_t)(i * 8);
        fo_matmul_forward(out + row * OC, x + row * K, w, NULL, n, K, OC, FO_FLOATX, s);
    }
    CHECK_AT("planned once");
    CHECK(fo_emu_count("heuristic") == before + 1);
    fo_matmul_forward(out, x, w, x, n, K, OC, FO_FLOATX, s); // with a bias it is another
    CHECK(fo_emu_count("heuristic") == before + 2);
    fo_matmul_dgrad(x, out, w, n, K, OC, FO_FLOATX, s);
    fo_matmul_dgrad_add(dweight, w, x, K, K, K, s);
    fo_matmul_forward_add(dweight, w, x, K, K, K, s);
    fo_matmul_wgrad(dweight, NULL, out, x, n, K, OC, s);
    fo_device_fuse_gelu(d, 2);
    fo_matmul_gelu_forward(out, out + n * OC, x, w, w, n, K, OC, s);
    fo_matmul_gelu_dgrad(x, out, w, x + n * K, n, K, OC, s);
    fo_device_fuse_gelu(d, 0);
    fo_stream_sync(s);
    CHECK(fo_emu_count("heuristic") == before + 8);
    CHECK(fo_emu_count("launch") == kernels);
    fo_free(d, x), fo_free(d, w), fo_free(d, out), fo_free(d, dweight);
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
    test_gelu_sizes(d, s);
    test_bias_sizes(d, s);
    test_empty(s);
    test_wgrad_repeats(d, s);
    if (fo_emu_count) { test_planned_once(d, s); }
    test_same_bits(d, s);
    double peak = fo_device_peak_tflops(d);
    CHECK_AT("peak %g TFLOP/s", peak);
    CHECK(peak > 1e-4 && peak < 1e4);
    CHECK(fo_device_peak_tflops(d) == peak);
    fo_stream_destroy(s);
    CHECK(fo_device_nbytes(d) == 0);
    fo_device_close(d);
    test_together(0);
    test_together(1);
    if (!FO_DEVICE_CPU) { test_plain("FO_PLAIN_GEMM", "1"); }
    if (fo_emu_count) { test_plain("FO_EMU_GEMM_ALIGN", "16"); }
    return check_report();
}
