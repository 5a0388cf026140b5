/* test_ops.c -- every operation of fo_ops.h but matmul and attention, against the oracle (ref.h).
 *
 * All of it runs three times and every output is recorded: the later runs must give the same bits as the
 * first. On the cpu they have 1, 2 and 3 threads. In the first run each array is an allocation, so that a
 * checker of memory sees what is read beyond its end. In the others it lies between bytes that nothing may
 * write; and in the second it begins at an address that is aligned to its elements alone, which may cost time
 * but change nothing. Inputs are rounded to the type of the array first, so the oracle sees what the
 * operation sees.
 *
 * Tolerances: U = 2^-24 is half a unit in the last place of fp32, relative. Each fp32 operation errs by at
 * most that, so an output that k operations lead to may be off by k * U, in the relative 2-norm. Each test
 * says what its k counts. What bf16 outputs may be off besides is at vec_close.
 */
#include "dev/test/check.h"
#include "dev/test/ref.h"
#include "flashoverlap/fo_ops.h"
#if FO_DEVICE_CPU && FO_OPENMP
#include "flashoverlap/cpu/cpu.h" // to choose the number of threads
#endif
#include <stdlib.h>

enum {
    RUNS = 3,
    MARGIN = 64, // bytes before and after an array, a multiple of any alignment
    MARK = 0xa5, // what they are
};

static const double U = 0x1p-24;

/* A chain of d additions of numbers of random sign: partial sums grow like the final one does, so each
 * addition errs by at most U of about the final sum, and the errors, having random signs too, add up like
 * sqrt(d). 4 is margin.
 */
static double chain(double d) {
    return 4.0 * sqrt(d) * U;
}

// ---- arrays -----------------------------------------------------------------------------------------------
// one array three times: on the device, as the oracle's doubles, and what was read back
typedef struct {
    void* dev;
    double* ref;
    float* got;
    size_t nelem;
    FoDtype type;
} Vec;

typedef struct {
    FoDevice* device;
    FoStream* s;
    uint64_t seed;
    size_t margin;   // bytes before and after each array, 0 or MARGIN
    size_t shift;    // elements by which arrays begin later than aligned
    void* host[256]; // to be freed at the end of a test, as are those of dev
    unsigned char* dev[128];
    size_t dev_nbytes[128], dev_first[128]; // of the array; where it begins
    int nhost, ndev;
    unsigned char mark[MARGIN + sizeof(double)]; // what margins are filled with
    unsigned char* record;                       // all outputs so far, one after the other
    size_t nrecord;
} Test;

static void* test_host(Test* t, size_t nbytes) {
    fo_require(t->nhost < 256, "more than 256 arrays in one test");
    void* p = malloc(nbytes + 1);
    fo_require(p != NULL, "out of memory");
    return t->host[t->nhost++] = p;
}

// nbytes of elements, between margins
static void* test_dev(Test* t, size_t nbytes, size_t elem_nbytes) {
    const int k = t->ndev++;
    fo_require(k < 128, "more than 128 arrays in one test");
    t->dev_nbytes[k] = nbytes;
    t->dev_first[k] = t->margin + t->shift * elem_nbytes;
    t->dev[k] = (unsigned char*)fo_malloc(t->device, t->dev_first[k] + nbytes + t->margin);
    fo_upload(t->dev[k], t->mark, t->dev_first[k], t->s);
    fo_upload(t->dev[k] + t->dev_first[k] + nbytes, t->mark, t->margin, t->s);
    return t->dev[k] + t->dev_first[k];
}

static int is_marked(const unsigned char* p, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i++) {
        if (p[i] != MARK) { return 0; }
    }
    return 1;
}

static void test_clear(Test* t) {
    unsigned char before[MARGIN + sizeof(double)], after[MARGIN];
    int untouched = 1;
    fo_stream_sync(t->s);
    while (t->nhost > 0) {
        free(t->host[--t->nhost]);
    }
    while (t->ndev > 0) {
        const int k = --t->ndev;
        fo_download(before, t->dev[k], t->dev_first[k], t->s);
        fo_download(after, t->dev[k] + t->dev_first[k] + t->dev_nbytes[k], t->margin, t->s);
        fo_stream_sync(t->s);
        untouched &= is_marked(before, t->dev_first[k]) && is_marked(after, t->margin);
        fo_free(t->device, t->dev[k]);
    }
    CHECK(untouched); // what lies around the arrays
}

// the values of ref go to the device, rounded to v's type; ref becomes what they were rounded to
static void vec_upload(Test* t, Vec* v) {
    FoBf16* bf16 = malloc(v->nelem * sizeof(FoBf16) + 1);
    fo_require(bf16 != NULL, "out of memory");
    for (size_t i = 0; i < v->nelem; i++) {
        v->got[i] = (float)v->ref[i];
        bf16[i] = fo_bf16_from_float(v->got[i]);
        if (v->type == FO_BF16) { v->got[i] = fo_bf16_to_float(bf16[i]); }
        v->ref[i] = (double)v->got[i];
    }
    const void* host = v->type == FO_BF16 ? (const void*)bf16 : (const void*)v->got;
    fo_upload(v->dev, host, v->nelem * fo_dtype_nbytes(v->type), t->s);
    fo_stream_sync(t->s);
    free(bf16);
}

static Vec vec_of(Test* t, FoDtype type, size_t nelem) {
    Vec v = {test_dev(t, nelem * fo_dtype_nbytes(type), fo_dtype_nbytes(type)),
             (double*)test_host(t, nelem * sizeof(double)), (float*)test_host(t, nelem * sizeof(float)),
             nelem, type};
    return v;
}

// uniform in [-scale, scale)
static Vec vec_random(Test* t, FoDtype type, size_t nelem, double scale) {
    Vec v = vec_of(t, type, nelem);
    for (size_t i = 0; i < nelem; i++) {
        v.ref[i] = scale * ref_random(&t->seed);
    }
    vec_upload(t, &v);
    return v;
}

// an output: NaN until it is written
static Vec vec_poison(Test* t, FoDtype type, size_t nelem) {
    Vec v = vec_of(t, type, nelem);
    for (size_t i = 0; i < nelem; i++) {
        v.ref[i] = NAN;
    }
    vec_upload(t, &v);
    return v;
}

static Vec vec_copy(Test* t, Vec from) {
    Vec v = vec_of(t, from.type, from.nelem);
    memcpy(v.ref, from.ref, from.nelem * sizeof(double));
    vec_upload(t, &v);
    return v;
}

static int* ints_upload(Test* t, const int* host, size_t n) {
    int* dev = (int*)test_dev(t, n * sizeof(int), sizeof(int));
    fo_upload(dev, host, n * sizeof(int), t->s);
    fo_stream_sync(t->s);
    return dev;
}

static void record(Test* t, const void* p, size_t nbytes) {
    t->record = (unsigned char*)realloc(t->record, t->nrecord + nbytes + 1);
    fo_require(t->record != NULL, "out of memory");
    memcpy(t->record + t->nrecord, p, nbytes);
    t->nrecord += nbytes;
}

// waits for the stream, reads the array back into got and records its bytes
static void vec_read(Test* t, Vec* v) {
    size_t nbytes = v->nelem * fo_dtype_nbytes(v->type);
    void* raw = malloc(nbytes + 1);
    fo_require(raw != NULL, "out of memory");
    fo_download(raw, v->dev, nbytes, t->s);
    fo_stream_sync(t->s);
    record(t, raw, nbytes);
    for (size_t i = 0; i < v->nelem; i++) {
        v->got[i] = v->type == FO_BF16 ? fo_bf16_to_float(((FoBf16*)raw)[i]) : ((float*)raw)[i];
    }
    free(raw);
}

/* got is within tol of the oracle in the relative 2-norm. A bf16 output is rounded once more: each element
 * may be off by half a unit of its own last place (2^(e-8) where 2^e <= |want| < 2^(e+1), so at most 2^-8
 * relative) and by what the fp32 arithmetic erred, counted from the largest element since sums cancel.
 * Truncation, or a second rounding on the way, fails that.
 */
static void vec_close(Test* t, Vec* v, double tol, const char* what, int line) {
    vec_read(t, v);
    float* want = (float*)malloc(v->nelem * sizeof(float) + 1);
    fo_require(want != NULL, "out of memory");
    double largest = 0.0;
    for (size_t i = 0; i < v->nelem; i++) {
        want[i] = (float)v->ref[i];
        largest = fmax(largest, fabs(v->ref[i]));
    }
    check_close_(v->got, want, v->nelem, (v->type == FO_BF16 ? 0x1p-8 : 0.0) + tol, __FILE__, line, what);
    size_t i = 0;
    for (; i < v->nelem && v->type == FO_BF16; i++) {
        int e;
        (void)frexp(v->ref[i], &e); // |ref| is in [2^(e-1), 2^e)
        if (!(fabs((double)v->got[i] - v->ref[i]) <= ldexp(1.0, e - 9) + tol * largest)) { break; }
    }
    if (v->type == FO_BF16) {
        if (i < v->nelem) {
            fprintf(stderr, "%s: element %zu is %.9g, rounded from %.9g\n", what, i, (double)v->got[i],
                    v->ref[i]);
        }
        check_(i == v->nelem, __FILE__, line, what);
    }
    free(want);
}

// the array is what the oracle has, exactly
static void vec_equal(Test* t, Vec* v, const char* what, int line) {
    vec_read(t, v);
    size_t i = 0;
    while (i < v->nelem && (double)v->got[i] == v->ref[i]) {
        i++;
    }
    if (i < v->nelem) {
        fprintf(stderr, "%s: element %zu is %.9g, wanted %.9g\n", what, i, (double)v->got[i], v->ref[i]);
    }
    check_(i == v->nelem, __FILE__, line, what);
}

#define VEC_CLOSE(t, v, tol) vec_close(t, v, tol, #v, __LINE__)
#define VEC_EQUAL(t, v)      vec_equal(t, v, #v, __LINE__)

// to what an array of the type holds
static float round_to(float x, FoDtype type) {
    return type == FO_BF16 ? fo_bf16_to_float(fo_bf16_from_float(x)) : x;
}

// ---- rows -------------------------------------------------------------------------------------------------
static void test_gather(Test* t, size_t n, int C) {
    const int rows = 11;
    int* idx = (int*)test_host(t, n * sizeof(int));
    for (size_t i = 0; i < n; i++) {
        idx[i] = (int)(i * i * 7 + 3) % rows;
    }
    Vec inp = vec_random(t, FO_FLOATX, (size_t)rows * (size_t)C, 1.0);
    Vec out = vec_poison(t, FO_FLOATX, n * (size_t)C);
    fo_gather_rows((floatX*)out.dev, (const floatX*)inp.dev, ints_upload(t, idx, n), n, C, t->s);
    ref_gather_rows(out.ref, inp.ref, idx, n, C);
    VEC_EQUAL(t, &out);
    test_clear(t);
}

// n rows go to nuniq of 2 * nuniq destinations: the first gets half of them, the last none
static void test_scatter_add(Test* t, size_t n, size_t nuniq, int C) {
    int* dst = (int*)test_host(t, nuniq * sizeof(int));
    int* start = (int*)test_host(t, (nuniq + 1) * sizeof(int));
    int* order = (int*)test_host(t, n * sizeof(int));
    for (size_t u = 0; u < nuniq; u++) {
        dst[u] = (int)(2 * nuniq - 1 - 2 * u);
        start[u] = u == 0 ? 0 : (int)(u + 1 == nuniq ? n : n / 2 + u * (n / 2) / nuniq);
    }
    start[nuniq] = (int)n;
    for (size_t k = 0; k < n; k++) {
        order[k] = (int)(n - 1 - k);
    }
    Vec rows = vec_random(t, FO_FLOATX, n * (size_t)C, 1.0);
    Vec out = vec_random(t, FO_FP32, 2 * nuniq * (size_t)C, 1.0);
    fo_scatter_add_rows((float*)out.dev, (const floatX*)rows.dev, ints_upload(t, dst, nuniq),
                        ints_upload(t, start, nuniq + 1), ints_upload(t, order, n), nuniq, C, t->s);
    Vec want = vec_copy(t, out);
    ref_scatter_add_rows(out.ref, rows.ref, dst, start, order, nuniq, C);
    VEC_CLOSE(t, &out, chain((double)n));
    // and exactly: a sum in the order given, then added
    for (size_t u = 0; u < nuniq; u++) {
        for (int c = 0; c < C; c++) {
            float sum = 0.0f;
            for (int k = start[u]; k < start[u + 1]; k++) {
                sum += (float)rows.ref[(size_t)order[k] * (size_t)C + (size_t)c];
            }
            size_t at = (size_t)dst[u] * (size_t)C + (size_t)c;
            want.got[at] = (float)want.ref[at] + sum;
        }
    }
    CHECK_BITS(out.got, want.got, out.nelem * sizeof(float));
    test_clear(t);
}

// every other row of out, backwards; a sum of two is rounded once, so it is exact
static void test_add_rows(Test* t, size_t n, int C) {
    int* dst = (int*)test_host(t, n * sizeof(int));
    for (size_t i = 0; i < n; i++) {
        dst[i] = (int)(2 * (n - 1 - i));
    }
    Vec rows = vec_random(t, FO_FP32, n * (size_t)C, 1.0);
    Vec out = vec_random(t, FO_FP32, (2 * n + 1) * (size_t)C, 1.0);
    int* dev_dst = ints_upload(t, dst, n);
    fo_add_rows((float*)out.dev, (const float*)rows.dev, dev_dst, n, C, t->s);
    fo_add_rows((float*)out.dev, NULL, NULL, 0, C, t->s);
    ref_add_rows(out.ref, rows.ref, dst, n, C);
    for (size_t i = 0; i < out.nelem; i++) {
        out.ref[i] = (double)(float)out.ref[i];
    }
    VEC_EQUAL(t, &out);
    test_clear(t);
}

// only n of 2n rows of out are written
static void test_encoder(Test* t, size_t n, int C) {
    const int maxT = 9;
    int* tok = (int*)test_host(t, n * sizeof(int));
    int* pos = (int*)test_host(t, 2 * n * sizeof(int));
    for (size_t i = 0; i < n; i++) {
        tok[i] = (int)(2 * (n - 1 - i));
        pos[2 * i] = (int)(i % (size_t)maxT);
        pos[2 * i + 1] = -1;
    }
    Vec rows = vec_random(t, FO_FLOATX, n * (size_t)C, 1.0);
    Vec wpe = vec_random(t, FO_FLOATX, (size_t)maxT * (size_t)C, 1.0);
    Vec out = vec_random(t, FO_FLOATX, 2 * n * (size_t)C, 1.0);
    ref_encoder_forward(out.ref, rows.ref, wpe.ref, tok, pos, n, C);
    for (size_t i = 0; i < out.nelem; i++) {
        out.ref[i] =
            (double)round_to((float)out.ref[i], FO_FLOATX); // the sum of two bf16 is often exact in fp32
    }
    fo_encoder_forward((floatX*)out.dev, (const floatX*)rows.dev, (const floatX*)wpe.dev,
                       ints_upload(t, tok, n), ints_upload(t, pos, 2 * n), n, C, t->s);
    VEC_EQUAL(t, &out);
    test_clear(t);
}

// ---- layer norm -------------------------------------------------------------------------------------------
// every third row is so small that eps counts, every other third has a mean
static Vec layernorm_input(Test* t, size_t n, int C) {
    Vec inp = vec_random(t, FO_FLOATX, n * (size_t)C, 2.0);
    for (size_t i = 0; i < inp.nelem; i++) {
        size_t row = i / (size_t)C;
        inp.ref[i] = inp.ref[i] * (row % 3 == 0 ? 0.002 : 1.0) + (row % 3 == 1 ? 3.0 : 0.0);
    }
    vec_upload(t, &inp);
    return inp;
}

static void test_layernorm(Test* t, size_t n, int C) {
    size_t nelem = n * (size_t)C;
    Vec inp = layernorm_input(t, n, C), weight = vec_random(t, FO_FLOATX, (size_t)C, 1.0);
    Vec bias = vec_random(t, FO_FLOATX, (size_t)C, 1.0), out = vec_poison(t, FO_FLOATX, nelem);
    Vec mean = vec_poison(t, FO_FP32, n), rstd = vec_poison(t, FO_FP32, n);
    fo_layernorm_forward((floatX*)out.dev, (float*)mean.dev, (float*)rstd.dev, (const floatX*)inp.dev,
                         (const floatX*)weight.dev, (const floatX*)bias.dev, n, C, t->s);
    ref_layernorm_forward(out.ref, mean.ref, rstd.ref, inp.ref, weight.ref, bias.ref, n, C);
    // Each sum is C / 64 + 8 additions deep. Where the mean is 3, that is under 3 standard deviations: its
    // error counts three times in what it is taken from.
    double depth = C / 64.0 + 8.0;
    VEC_CLOSE(t, &mean, 3.0 * depth * U);
    VEC_CLOSE(t, &rstd, (depth + 4.0) * U);
    VEC_CLOSE(t, &out, (3.0 * depth + 8.0) * U);

    vec_upload(t, &mean); // the oracle's, rounded
    vec_upload(t, &rstd);
    Vec dout = vec_random(t, FO_FLOATX, nelem, 1.0), dinp = vec_random(t, FO_FLOATX, nelem, 1.0);
    Vec dweight = vec_random(t, FO_FP32, (size_t)C, 1.0), dbias = vec_random(t, FO_FP32, (size_t)C, 1.0);
    fo_layernorm_backward((floatX*)dinp.dev, (float*)dweight.dev, (float*)dbias.dev, (const floatX*)dout.dev,
                          (const floatX*)inp.dev, (const floatX*)weight.dev, (const float*)mean.dev,
                          (const float*)rstd.dev, n, C, t->s);
    ref_layernorm_backward(dinp.ref, dweight.ref, dbias.ref, dout.ref, inp.ref, weight.ref, mean.ref,
                           rstd.ref, n, C);
    // dinp: the two sums, and 8 operations. norm is (inp - mean) * rstd with inp below 5 = 5 standard
    // deviations
    VEC_CLOSE(t, &dinp, (depth + 8.0 + 5.0) * U);
    VEC_CLOSE(t, &dweight, chain((double)n + 4.0));
    VEC_CLOSE(t, &dbias, chain((double)n));
    test_clear(t);
}

static void test_bias(Test* t, size_t n, int C) {
    Vec dout = vec_random(t, FO_FLOATX, n * (size_t)C, 1.0), dbias = vec_random(t, FO_FP32, (size_t)C, 1.0);
    fo_bias_backward((float*)dbias.dev, (const floatX*)dout.dev, n, C, t->s);
    ref_bias_backward(dbias.ref, dout.ref, n, C);
    VEC_CLOSE(t, &dbias, chain((double)n));
    // sums of small whole numbers are exact in any order
    for (size_t i = 0; i < dout.nelem; i++) {
        dout.ref[i] = (double)((int)(i % 17) - 8);
    }
    vec_upload(t, &dout);
    for (int c = 0; c < C; c++) {
        dbias.ref[c] = c;
    }
    vec_upload(t, &dbias);
    fo_bias_backward((float*)dbias.dev, (const floatX*)dout.dev, n, C, t->s);
    ref_bias_backward(dbias.ref, dout.ref, n, C);
    VEC_EQUAL(t, &dbias);
    test_clear(t);
}

// ---- elementwise ------------------------------------------------------------------------------------------
// largest error of an element relative to it, those below 1e-30 left out
static double worst(const Vec* v) {
    double max = 0.0;
    for (size_t i = 0; i < v->nelem; i++) {
        double e = fabs((double)v->got[i] - v->ref[i]) / fabs(v->ref[i]);
        if (fabs(v->ref[i]) > 1e-30 && !(e <= max)) { max = e; }
    }
    return max;
}

static void test_gelu(Test* t, size_t nelem) {
    Vec inp = vec_random(t, FO_FLOATX, nelem, 5.0), dout = vec_random(t, FO_FLOATX, nelem, 1.0);
    Vec out = vec_poison(t, FO_FLOATX, nelem), dinp = vec_poison(t, FO_FLOATX, nelem);
    fo_gelu_forward((floatX*)out.dev, (const floatX*)inp.dev, nelem, t->s);
    ref_gelu_forward(out.ref, inp.ref, nelem);
    // where e counts its argument is below 2 with 3 roundings, then exp errs by 2 units = 4 U, then 3
    // operations
    VEC_CLOSE(t, &out, 13.0 * U);
    // at x = -5 the argument is 17, and 3 roundings of it err by 51 U relative in the result
    CHECK(worst(&out) <= (FO_FLOATX == FO_BF16 ? 0x1p-8 : 0.0) + 58.0 * U);
    fo_gelu_backward((floatX*)dinp.dev, (const floatX*)dout.dev, (const floatX*)inp.dev, nelem, t->s);
    ref_gelu_backward(dinp.ref, dout.ref, inp.ref, nelem);
    VEC_CLOSE(t, &dinp, 24.0 * U); // twice the operations
    Vec inplace = vec_copy(t, dout);
    fo_gelu_backward((floatX*)inplace.dev, (const floatX*)inplace.dev, (const floatX*)inp.dev, nelem, t->s);
    vec_read(t, &inplace);
    CHECK_BITS(inplace.got, dinp.got, nelem * sizeof(float));
    test_clear(t);
}

// far out gelu is x or 0, its slope 1 or 0; a NaN stays one
static void test_gelu_limits(Test* t) {
    static const double x[] = {0.0, 16.0, 100.0, 16384.0, 1e6, -16.0, -100.0, -16384.0, -1e6};
    const size_t n = sizeof x / sizeof x[0];
    Vec inp = vec_of(t, FO_FLOATX, n), one = vec_of(t, FO_FLOATX, n), out = vec_poison(t, FO_FLOATX, n);
    for (size_t i = 0; i < n; i++) {
        inp.ref[i] = x[i];
        one.ref[i] = 1.0;
    }
    vec_upload(t, &inp);
    vec_upload(t, &one);
    fo_gelu_forward((floatX*)out.dev, (const floatX*)inp.dev, n, t->s);
    fo_gelu_backward((floatX*)one.dev, (const floatX*)one.dev, (const floatX*)inp.dev, n, t->s);
    vec_read(t, &out);
    vec_read(t, &one);
    for (size_t i = 0; i < n; i++) {
        CHECK_AT("gelu of %g", x[i]);
        CHECK(fabs((double)out.got[i] - (x[i] > 0.0 ? inp.ref[i] : 0.0)) < 1e-20);
        CHECK(fabs((double)one.got[i] - (x[i] > 0.0 ? 1.0 : x[i] < 0.0 ? 0.0 : 0.5)) < 1e-20);
    }
    Vec nan = vec_poison(t, FO_FLOATX, 3), zero = vec_of(t, FO_FLOATX, 3);
    memset(zero.ref, 0, 3 * sizeof(double));
    vec_upload(t, &zero);
    fo_gelu_forward((floatX*)zero.dev, (const floatX*)nan.dev, 3, t->s);
    vec_read(t, &zero);
    CHECK(isnan(zero.got[0]) && isnan(zero.got[1]) && isnan(zero.got[2]));
    test_clear(t);
}

// the order of additions is promised, so the result is known to the bit
static void test_accumulate(Test* t, size_t n, int C, int P, FoDtype type, int residual, int bias,
                            int inplace) {
    size_t nelem = n * (size_t)C;
    Vec parts[FO_MAX_RANKS];
    const void* devs[FO_MAX_RANKS];
    const double* refs[FO_MAX_RANKS];
    for (int p = 0; p < P; p++) {
        parts[p] = vec_random(t, type, nelem, 1.0);
        devs[p] = parts[p].dev;
        refs[p] = parts[p].ref;
    }
    Vec res = vec_random(t, FO_FLOATX, nelem, 1.0), b = vec_random(t, FO_FLOATX, (size_t)C, 1.0);
    Vec out = inplace ? res : vec_poison(t, FO_FLOATX, nelem);
    Vec oracle = vec_poison(t, FO_FLOATX, nelem);
    ref_accumulate(oracle.ref, refs, residual ? res.ref : NULL, bias ? b.ref : NULL, n, C, P);
    float* want = (float*)test_host(t, nelem * sizeof(float));
    for (size_t i = 0; i < nelem; i++) {
        float sum = residual ? (float)res.ref[i] : 0.0f;
        if (bias) { sum += (float)b.ref[i % (size_t)C]; }
        for (int p = 0; p < P; p++) {
            sum += (float)parts[p].ref[i];
        }
        want[i] = round_to(sum, FO_FLOATX);
    }
    fo_accumulate((floatX*)out.dev, devs, residual ? (const floatX*)res.dev : NULL,
                  bias ? (const floatX*)b.dev : NULL, n, C, P, type, t->s);
    memset(devs, 0, sizeof devs); // the call has copied it
    vec_read(t, &out);
    CHECK_BITS(out.got, want, nelem * sizeof(float));
    oracle.dev = out.dev;
    VEC_CLOSE(t, &oracle, chain(P + 2.0));
    test_clear(t);
}

static void test_accumulates(Test* t) {
    static const int ranks[] = {1, 2, 3, 16};
    for (int i = 0; i < 4 * 8; i++) {
        int P = ranks[i / 8], residual = i & 1, bias = i >> 1 & 1;
        FoDtype type = i & 4 ? FO_FP32 : FO_BF16;
        CHECK_AT("accumulate P=%d residual=%d bias=%d %s", P, residual, bias,
                 type == FO_FP32 ? "fp32" : "bf16");
        test_accumulate(t, 7, 25, P, type, residual, bias, 0);
        if (residual) { test_accumulate(t, 3, 1500, P, type, residual, bias, 1); }
    }
}

static void test_add(Test* t, size_t nelem, FoDtype type) {
    Vec acc = vec_random(t, type, nelem, 1.0), part = vec_random(t, type, nelem, 1.0);
    acc.ref[0] = INFINITY; // neither overflow nor rounding may make these something else
    part.ref[nelem - 1] = NAN;
    vec_upload(t, &acc);
    vec_upload(t, &part);
    fo_add(acc.dev, part.dev, nelem, type, t->s);
    ref_add(acc.ref, part.ref, nelem);
    vec_read(t, &acc);
    CHECK(nelem == 1 ? isnan(acc.got[0]) : isinf(acc.got[0]) && isnan(acc.got[nelem - 1]));
    float* want = (float*)test_host(t, nelem * sizeof(float));
    for (size_t i = 0; i < nelem; i++) {
        want[i] =
            round_to((float)acc.ref[i], type); // exact in double, so one rounding after another is the same
    }
    if (nelem > 1) { CHECK_BITS(acc.got, want, (nelem - 1) * sizeof(float)); }
    test_clear(t);
}

static void test_sum(Test* t, size_t nelem, int P, int inplace) {
    Vec parts[FO_MAX_RANKS];
    const float* devs[FO_MAX_RANKS];
    const double* refs[FO_MAX_RANKS];
    float* want = (float*)test_host(t, nelem * sizeof(float));
    for (int p = 0; p < P; p++) {
        parts[p] = vec_random(t, FO_FP32, nelem, 1.0);
        devs[p] = (const float*)parts[p].dev;
        refs[p] = parts[p].ref;
    }
    for (size_t i = 0; i < nelem; i++) {
        want[i] = 0.0f;
        for (int p = 0; p < P; p++) {
            want[i] += (float)parts[p].ref[i];
        }
    }
    Vec out = vec_poison(t, FO_FP32, nelem);
    if (inplace) { out.dev = parts[P - 1].dev; }
    ref_sum(out.ref, refs, nelem, P);
    fo_sum((float*)out.dev, devs, nelem, P, t->s);
    VEC_CLOSE(t, &out, chain(P));
    CHECK_BITS(out.got, want, nelem * sizeof(float));
    test_clear(t);
}

// ---- loss -------------------------------------------------------------------------------------------------
/* V columns of which `valid` are vocabulary, cut into P equal parts as tp cuts them: each part's stats, then
 * each part's loss and gradient, against the oracle's of all columns at once. z: of the z-loss.
 */
static void test_softmax(Test* t, size_t n, int V, int valid, int P, double scale, float z) {
    const int Vl = V / P;
    Vec all = vec_random(t, FO_FLOATX, n * (size_t)V, scale), dall = vec_poison(t, FO_FP32, n * (size_t)V);
    Vec losses = vec_poison(t, FO_FP32, n), part[FO_MAX_RANKS];
    Vec stats = vec_poison(t, FO_FP32, 3 * n * (size_t)P);
    const float dscale = 1.0f / (float)n;
    int* targets = (int*)test_host(t, n * sizeof(int));
    double* ref[3];
    for (int k = 0; k < 3; k++) {
        ref[k] = (double*)test_host(t, n * sizeof(double));
    }
    for (size_t i = 0; i < n; i++) {
        // the last column, those on both sides of the first cut, any
        targets[i] = i == 0 ? valid - 1 : i <= 2 ? (Vl + 1 - (int)i) % valid : (int)(i * 7919) % valid;
    }
    int* dtargets = ints_upload(t, targets, n);
    for (int p = 0; p < P; p++) {
        int mine = valid - p * Vl < 0 ? 0 : valid - p * Vl < Vl ? valid - p * Vl : Vl;
        part[p] = vec_of(t, FO_FLOATX, n * (size_t)Vl);
        for (size_t i = 0; i < part[p].nelem; i++) {
            part[p].ref[i] = all.ref[i / (size_t)Vl * (size_t)V + (size_t)(p * Vl) + i % (size_t)Vl];
        }
        vec_upload(t, &part[p]);
        fo_softmax_stats((FoSoftmaxStat*)stats.dev + (size_t)p * n, (const floatX*)part[p].dev, dtargets, n,
                         Vl, mine, p * Vl, t->s);
        ref_softmax_stats(ref[0], ref[1], ref[2], part[p].ref, targets, n, Vl, mine, p * Vl);
        for (size_t i = 0; i < 3 * n; i++) {
            stats.ref[(size_t)p * 3 * n + i] = ref[i % 3][i / 3];
        }
    }
    vec_read(t, &stats);
    double depth =
        Vl / 64.0 + 8.0; // of positive terms; exp errs by 4 U, its argument of at most 2 scale by U of that
    int exact = 1, close = 1;
    for (size_t i = 0; i < 3 * n * (size_t)P; i++) {
        double got = (double)stats.got[i], want = stats.ref[i];
        exact &= i % 3 == 1 || got == want;
        close &= i % 3 != 1 || fabs(got - want) <= (depth + 4.0 + 2.0 * scale) * U * want;
    }
    CHECK(exact); // the maxima and the targets' logits
    CHECK(close); // the sums

    ref_softmax_loss(losses.ref, dall.ref, all.ref, targets, (double)dscale, (double)z, n, V, valid);
    for (int p = 0; p < P; p++) {
        int mine = valid - p * Vl < 0 ? 0 : valid - p * Vl < Vl ? valid - p * Vl : Vl;
        Vec again = vec_poison(t, FO_FP32, n);
        memcpy(again.ref, losses.ref, n * sizeof(double));
        fo_softmax_loss((float*)again.dev, (floatX*)part[p].dev, (const FoSoftmaxStat*)stats.dev, dtargets,
                        0.0f, z, n, Vl, mine, p * Vl, P, t->s);
        VEC_CLOSE(t, &again, (depth + P + 8.0) * U);
        VEC_EQUAL(t, &part[p]); // dscale 0 leaves the logits alone
        fo_softmax_loss((float*)losses.dev, (floatX*)part[p].dev, (const FoSoftmaxStat*)stats.dev, dtargets,
                        dscale, z, n, Vl, mine, p * Vl, P, t->s);
        VEC_CLOSE(t, &losses, (depth + P + 8.0) * U);
        for (size_t i = 0; i < part[p].nelem; i++) {
            part[p].ref[i] = dall.ref[i / (size_t)Vl * (size_t)V + (size_t)(p * Vl) + i % (size_t)Vl];
        }
        VEC_CLOSE(t, &part[p], (depth + P + 10.0 + 2.0 * scale) * U);
        int padding_is_0 = 1;
        for (size_t i = 0; i < part[p].nelem; i++) {
            padding_is_0 &= (int)(i % (size_t)Vl) < mine || part[p].got[i] == 0.0f;
        }
        CHECK(padding_is_0);
    }
    test_clear(t);
}

// ---- optimizer --------------------------------------------------------------------------------------------
// half of the gradients are 0 in the first step; with `same`, param and master are one array
static void test_adamw(Test* t, size_t nelem, int same) {
    FoAdamw a = {0.1f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 1};
    Vec master = vec_random(t, FO_FP32, nelem, 1.0), param = vec_poison(t, FO_FLOATX, nelem);
    Vec m = vec_of(t, FO_FP32, nelem), v = vec_of(t, FO_FP32, nelem), grad = vec_of(t, FO_FP32, nelem);
    memset(m.ref, 0, nelem * sizeof(double));
    memset(v.ref, 0, nelem * sizeof(double));
    vec_upload(t, &m);
    vec_upload(t, &v);
    if (same) { param.dev = master.dev; }
    for (a.t = 1; a.t <= 3; a.t++) {
        for (size_t i = 0; i < nelem; i++) {
            grad.ref[i] = a.t == 1 && i % 2 ? 0.0 : 2.0 * ref_random(&t->seed);
        }
        vec_upload(t, &grad);
        fo_adamw_update((floatX*)param.dev, (float*)master.dev, (float*)m.dev, (float*)v.dev,
                        (const float*)grad.dev, nelem, a, t->s);
        ref_adamw_update(master.ref, m.ref, v.ref, grad.ref, nelem, a);
        // m and v: 4 operations a step, of which 3 count again, smaller, in the next. An update is a tenth of
        // a weight, with 10 operations after those of m and v, so that its error is below that of the
        // subtraction
        VEC_CLOSE(t, &m, 4.0 * a.t * U);
        VEC_CLOSE(t, &v, 5.0 * a.t * U);
        VEC_CLOSE(t, &master, 4.0 * a.t * U);
        vec_read(t, &param);
        for (size_t i = 0; i < nelem; i++) {
            master.got[i] = round_to(master.got[i], FO_FLOATX);
        }
        CHECK_BITS(param.got, master.got, nelem * sizeof(float));
    }
    test_clear(t);
}

// squares of fp32 are exact in double; the sum has at most nelem + 1 roundings of 2^-53, all terms being
// positive
static void test_square_sum(Test* t, size_t nelem) {
    Vec x = vec_random(t, FO_FP32, nelem, 1.0);
    double want = 3.0, got = 3.0;
    double* out = (double*)test_dev(t, sizeof(double), sizeof(double));
    fo_upload(out, &got, sizeof got, t->s);
    fo_square_sum(out, (const float*)x.dev, nelem, t->s);
    fo_download(&got, out, sizeof got, t->s);
    fo_stream_sync(t->s);
    ref_square_sum(&want, x.ref, nelem);
    CHECK(fabs(got - want) <= (double)(nelem + 1) * 0x1p-53 * want);
    record(t, &got, sizeof got);
    test_clear(t);
}

// ---- cuts -------------------------------------------------------------------------------------------------
// what belongs to a row has the same bits when the rows come in two calls; the first has `cut` of n rows
static void test_cuts(Test* t, size_t n, size_t cut, int C) {
    size_t nelem = n * (size_t)C, at = cut * (size_t)C;
    Vec inp = layernorm_input(t, n, C), dout = vec_random(t, FO_FLOATX, nelem, 1.0);
    Vec weight = vec_random(t, FO_FLOATX, (size_t)C, 1.0);
    Vec dweight = vec_random(t, FO_FP32, (size_t)C, 1.0), dbias = vec_random(t, FO_FP32, (size_t)C, 1.0);
    int* targets = (int*)test_host(t, n * sizeof(int));
    for (size_t i = 0; i < n; i++) {
        targets[i] = (int)i % C;
    }
    int* dtargets = ints_upload(t, targets, n);
    Vec out[2][7];
    for (int k = 0; k < 2; k++) {
        Vec *o = out[k], dinp = vec_copy(t, dout), logits = vec_copy(t, inp),
            gelu = vec_poison(t, FO_FLOATX, nelem);
        Vec norm = vec_poison(t, FO_FLOATX, nelem), mean = vec_poison(t, FO_FP32, n);
        Vec rstd = vec_poison(t, FO_FP32, n), stats = vec_poison(t, FO_FP32, 3 * n);
        for (int half = 0; half < (k == 0 ? 1 : 2); half++) {
            size_t row = half ? cut : 0, rows = k == 0 ? n : half ? n - cut : cut, first = half ? at : 0;
            const floatX* x = (const floatX*)inp.dev + first;
            floatX* dlogits = (floatX*)logits.dev + first;
            float *mu = (float*)mean.dev + row, *rs = (float*)rstd.dev + row;
            FoSoftmaxStat* st = (FoSoftmaxStat*)stats.dev + row;
            fo_layernorm_forward((floatX*)norm.dev + first, mu, rs, x, (floatX*)weight.dev,
                                 (floatX*)weight.dev, rows, C, t->s);
            fo_layernorm_backward((floatX*)dinp.dev + first, (float*)dweight.dev, (float*)dbias.dev,
                                  (floatX*)dout.dev + first, x, (floatX*)weight.dev, mu, rs, rows, C, t->s);
            fo_gelu_forward((floatX*)gelu.dev + first, x, rows * (size_t)C, t->s);
            fo_softmax_stats(st, x, dtargets + row, rows, C, C, 0, t->s);
            fo_softmax_loss(mu, dlogits, st, dtargets + row, 1.0f, 0.01f, rows, C, C, 0, 1, t->s);
        }
        o[0] = norm, o[1] = mean, o[2] = rstd, o[3] = dinp, o[4] = gelu, o[5] = stats, o[6] = logits;
        for (int j = 0; j < 7; j++) {
            vec_read(t, &o[j]);
        }
    }
    for (int j = 0; j < 7; j++) {
        CHECK_AT("output %d, %zu of %zu rows first, C=%d", j, cut, n, C);
        CHECK_BITS(out[1][j].got, out[0][j].got, out[0][j].nelem * sizeof(float));
    }
    test_clear(t);
}

// ---- nothing ----------------------------------------------------------------------------------------------
// no rows, no elements: nothing is read or written
static void test_nothing(Test* t) {
    const void* parts[1] = {NULL};
    const float* vectors[1] = {NULL};
    const FoAdamw a = {0.1f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 1};
    FoStream* s = t->s;
    Vec sums = vec_random(t, FO_FP32, 50, 1.0);
    Vec stats = vec_poison(t, FO_FP32, 6);
    const int targets[] = {0, 25};
    double norm = 3.0, got = 0.0;
    double* out = (double*)test_dev(t, sizeof(double), sizeof(double));
    fo_upload(out, &norm, sizeof norm, s);
    fo_gather_rows(NULL, NULL, NULL, 0, 25, s);
    fo_scatter_add_rows(NULL, NULL, NULL, NULL, NULL, 0, 25, s);
    fo_encoder_forward(NULL, NULL, NULL, NULL, NULL, 0, 25, s);
    fo_layernorm_forward(NULL, NULL, NULL, NULL, NULL, NULL, 0, 25, s);
    fo_layernorm_backward(NULL, (float*)sums.dev, (float*)sums.dev + 25, NULL, NULL, NULL, NULL, NULL, 0, 25,
                          s);
    fo_gelu_forward(NULL, NULL, 0, s);
    fo_gelu_backward(NULL, NULL, NULL, 0, s);
    fo_accumulate(NULL, parts, NULL, NULL, 0, 25, 1, FO_BF16, s);
    fo_add(NULL, NULL, 0, FO_BF16, s);
    fo_sum(NULL, vectors, 0, 1, s);
    fo_softmax_stats(NULL, NULL, NULL, 0, 25, 25, 0, s);
    fo_softmax_stats((FoSoftmaxStat*)stats.dev, NULL, ints_upload(t, targets, 2), 2, 0, 0, 25,
                     s); // no columns
    fo_softmax_loss(NULL, NULL, NULL, NULL, 1.0f, 0.0f, 0, 25, 25, 0, 1, s);
    fo_softmax_loss(NULL, NULL, NULL, NULL, 0.0f, 0.0f, 0, 25, 25, 0, 1, s);
    fo_adamw_update(NULL, NULL, NULL, NULL, NULL, 0, a, s);
    fo_square_sum(out, NULL, 0, s);
    fo_download(&got, out, sizeof got, s);
    VEC_EQUAL(t, &sums);
    CHECK(got == norm);
    for (size_t i = 0; i < stats.nelem; i++) {
        stats.ref[i] = i % 3 == 0 ? -INFINITY : 0.0;
    }
    VEC_EQUAL(t, &stats);
    test_clear(t);
}

// ---- the oracle itself ------------------------------------------------------------------------------------
/* Central differences with step h err by h^2 of the third derivative and 2^-53 / h of the value: with h =
 * 1e-5 and sums of some tens, below 1e-8.
 */
static void check_gradient(double (*value)(void* ctx), void* ctx, double* x, const double* dx, size_t nelem,
                           const char* what) {
    double worst_error = 0.0;
    for (size_t i = 0; i < nelem; i++) {
        double old = x[i], h = 1e-5;
        x[i] = old + h;
        double up = value(ctx);
        x[i] = old - h;
        double down = value(ctx);
        x[i] = old;
        double error = fabs((up - down) / (2.0 * h) - dx[i]);
        if (!(error <= worst_error)) { worst_error = error; }
    }
    CHECK_AT("%s: off by %.2e", what, worst_error);
    CHECK(worst_error < 1e-8);
}

enum { ON = 3, OC = 5 };

typedef struct {
    double inp[ON * OC], weight[OC * OC], bias[OC], dout[ON * OC], out[ON * OC], mean[ON], rstd[ON];
    double qkv[8 * 12], datt[8 * 4], att[8 * 4], lse[8 * 2]; // 1 sequence of 8, 2 heads of 2
    int targets[ON];
    double z; // of the z-loss
    FoLayout layout;
} Oracle;

static double dot(const double* a, const double* b, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

static double layernorm_value(void* ctx) {
    Oracle* o = (Oracle*)ctx;
    ref_layernorm_forward(o->out, o->mean, o->rstd, o->inp, o->weight, o->bias, ON, OC);
    return dot(o->out, o->dout, ON * OC);
}

static double matmul_value(void* ctx) {
    Oracle* o = (Oracle*)ctx;
    ref_matmul_forward(o->out, o->inp, o->weight, o->bias, ON, OC, OC);
    return dot(o->out, o->dout, ON * OC);
}

static double gelu_value(void* ctx) {
    Oracle* o = (Oracle*)ctx;
    ref_gelu_forward(o->out, o->inp, ON * OC);
    return dot(o->out, o->dout, ON * OC);
}

static double loss_value(void* ctx) {
    Oracle* o = (Oracle*)ctx;
    double sum = 0.0;
    ref_softmax_loss(o->out, NULL, o->inp, o->targets, 0.0, 0.0, ON, OC, OC - 1);
    for (int i = 0; i < ON; i++) {
        const double log_z = o->out[i] + o->inp[i * OC + o->targets[i]];
        sum += o->out[i] + o->z * log_z * log_z;
    }
    return 0.7 * sum;
}

static double attention_value(void* ctx) {
    Oracle* o = (Oracle*)ctx;
    ref_attention_forward(o->att, o->lse, o->qkv, 0, 8, o->layout, 2, 2);
    return dot(o->att, o->datt, 8 * 4);
}

static void test_oracle(void) {
    Oracle o = {.targets = {1, 0, 3}, .layout = {1, 8, 2, 1}};
    double dinp[8 * 12] = {0}, dweight[OC * OC] = {0}, dbias[OC] = {0};
    double* all[] = {o.inp, o.weight, o.bias, o.dout, o.qkv, o.datt};
    size_t n[] = {ON * OC, OC * OC, OC, ON * OC, 8 * 12, 8 * 4};
    uint64_t seed = 5;
    for (int k = 0; k < 6; k++) {
        for (size_t i = 0; i < n[k]; i++) {
            all[k][i] = ref_random(&seed);
        }
    }
    layernorm_value(&o);
    ref_layernorm_backward(dinp, dweight, dbias, o.dout, o.inp, o.weight, o.mean, o.rstd, ON, OC);
    check_gradient(layernorm_value, &o, o.inp, dinp, ON * OC, "layernorm dinp");
    check_gradient(layernorm_value, &o, o.weight, dweight, OC, "layernorm dweight");
    check_gradient(layernorm_value, &o, o.bias, dbias, OC, "layernorm dbias");
    memset(dweight, 0, sizeof dweight);
    memset(dbias, 0, sizeof dbias);
    ref_matmul_dgrad(dinp, o.dout, o.weight, ON, OC, OC);
    ref_matmul_wgrad(dweight, dbias, o.dout, o.inp, ON, OC, OC);
    check_gradient(matmul_value, &o, o.inp, dinp, ON * OC, "matmul dinp");
    check_gradient(matmul_value, &o, o.weight, dweight, OC * OC, "matmul dweight");
    check_gradient(matmul_value, &o, o.bias, dbias, OC, "matmul dbias");
    ref_gelu_backward(dinp, o.dout, o.inp, ON * OC);
    check_gradient(gelu_value, &o, o.inp, dinp, ON * OC, "gelu dinp");
    for (o.z = 0.0; o.z < 1.0; o.z += 0.6) {
        ref_softmax_loss(o.out, dinp, o.inp, o.targets, 0.7, o.z, ON, OC, OC - 1);
        check_gradient(loss_value, &o, o.inp, dinp, ON * OC, o.z > 0.0 ? "z-loss dlogits" : "loss dlogits");
    }
    for (int zigzag = 0; zigzag < 2; zigzag++) {
        o.layout.zigzag = zigzag;
        ref_attention_backward(dinp, o.datt, o.qkv, 0, 8, o.layout, 2, 2);
        check_gradient(attention_value, &o, o.qkv, dinp, 8 * 12, zigzag ? "attention, zigzag" : "attention");
    }
}

// ---- all of it --------------------------------------------------------------------------------------------
static void test_softmaxes(Test* t) {
    for (int P = 1; P <= 5; P++) {
        CHECK_AT("softmax P=%d", P);
        // of 5 the last has padding alone
        test_softmax(t, 9, P == 3 ? 258 : P == 5 ? 320 : 256, 250, P, 8.0, 0.0f);
        test_softmax(t, 9, P == 3 ? 258 : P == 5 ? 320 : 256, 250, P, 8.0, 0.02f);
    }
    CHECK_AT("softmax of one row");
    test_softmax(t, 1, 128, 97, 1, 0.5, 0.0f);
    CHECK_AT("softmax with one column of padding beside seven others");
    test_softmax(t, 4, 32, 23, 1, 2.0, 0.5f);
    CHECK_AT("softmax of GPT-2's vocabulary");
    test_softmax(t, 3, 50304, 50257, 2, 8.0, 1e-4f);
    CHECK_AT("softmax with logits where exp alone would overflow");
    test_softmax(t, 9, 256, 250, 2, 300.0, 0.01f);
    CHECK_AT("softmax of wide parts that are cut unevenly");
    test_softmax(t, 3, 3 * 9001, 26993, 3, 8.0, 0.0f);
    test_softmax(t, 5, 512, 500, 16, 4.0, 0.1f);
}

static void test_all(Test* t) {
    static const struct {
        size_t n;
        int C;
    } shapes[] = {{1, 1},     {1, 25},     {37, 25},  {9, 200},  {9, 328},   {3, 768},
                  {1000, 64}, {130, 1600}, {2, 2500}, {5, 2504}, {19, 4104}, {11, 4099}};
    static const size_t nelems[] = {1, 25, 1000, 20011};
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
        size_t n = shapes[k].n;
        int C = shapes[k].C;
        CHECK_AT("n=%zu C=%d", n, C);
        test_gather(t, n, C);
        test_scatter_add(t, 4 * n + 3, n, C);
        test_add_rows(t, n, C);
        test_encoder(t, n, C);
        if (C > 1) { test_layernorm(t, n, C); } // of one channel the variance is 0
        test_bias(t, n, C);
    }
    for (size_t k = 0; k < sizeof nelems / sizeof nelems[0]; k++) {
        CHECK_AT("nelem=%zu", nelems[k]);
        test_gelu(t, nelems[k]);
        test_add(t, nelems[k], FO_BF16);
        test_add(t, nelems[k], FO_FP32);
        test_sum(t, nelems[k], 1 + (int)k * 5, k % 2 == 1);
        test_adamw(t, nelems[k], 0);
        if (FO_FLOATX == FO_FP32) { test_adamw(t, nelems[k], 1); }
        test_square_sum(t, nelems[k]);
    }
    CHECK_AT("square sum of several blocks");
    test_square_sum(t, 200003);
    test_gelu_limits(t);
    test_accumulates(t);
    test_softmaxes(t);
    test_cuts(t, 37, 3, 25);
    test_cuts(t, 19, 1, 768);
    test_cuts(t, 5, 2, 2500);
    test_cuts(t, 19, 9, 4104);
    test_nothing(t);
}

int main(void) {
    CHECK_DIES(fo_accumulate(NULL, NULL, NULL, NULL, 1, 1, 17, FO_FP32, NULL), "P=17, want 1 to 16");
    CHECK_DIES(fo_sum(NULL, NULL, 1, 0, NULL), "P=0, want 1 to 16");
    CHECK_DIES(fo_softmax_stats(NULL, NULL, NULL, 1, 4, 5, 0, NULL), "valid=5, want 0 to V=4");
    test_oracle();
    Test first = {0};
    for (int run = 1; run <= RUNS; run++) {
        Test t = {0};
        t.seed = 1;
        t.margin = run == 1 ? 0 : MARGIN;
        t.shift = run == 2;
        memset(t.mark, MARK, sizeof t.mark);
        t.device = fo_device_open(0, 1);
#if FO_DEVICE_CPU && FO_OPENMP
        t.device->nthreads = run;
#endif
        t.s = fo_stream_create(t.device, "ops");
        test_all(&t);
        fo_stream_destroy(t.s);
        fo_device_close(t.device);
        if (run == 1) {
            first = t;
            continue;
        }
        CHECK_AT("run %d against the first", run);
        CHECK(t.nrecord == first.nrecord && t.nrecord > 0);
        CHECK_BITS(t.record, first.record, first.nrecord);
        free(t.record);
    }
    free(first.record);
    return check_report();
}
