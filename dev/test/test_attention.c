/* test_attention.c -- fo_attention_forward, backward and decode: right, and a row has the same bits however
 * rows are cut.
 *
 * The oracle computes each head of each sequence in double with the whole [T, T] matrix, below. Rows that a
 * forward call must not read (queries and keys of later positions) are NaN while it runs. A name that begins
 * with h is of host memory, where its namesake is the device's.
 */
#include "dev/test/check.h"
#include "flashoverlap/fo_ops.h"
#if FO_OPENMP
#include "flashoverlap/cpu/cpu.h" // to choose the number of threads
#endif
#include <stdlib.h>

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

static void upload(void* dst, const void* host, size_t nbytes, FoStream* s) {
    fo_upload(dst, host, nbytes, s);
    fo_stream_sync(s);
}
static void download(void* host, const void* src, size_t nbytes, FoStream* s) {
    fo_download(host, src, nbytes, s);
    fo_stream_sync(s);
}

static void* host_nan(size_t nbytes) {
    return memset(host_alloc(nbytes, 1), 0xff, nbytes);
}
// nelem elements that are NaN
static void upload_nan(void* dst, size_t nbytes, FoStream* s) {
    void* host = host_nan(nbytes);
    upload(dst, host, nbytes, s);
    free(host);
}

// one shape: arrays of the device and of the host, and their values as floats
typedef struct {
    FoLayout l;
    int NH, hs;
    size_t N, C;
    floatX *qkv, *out, *dout, *dqkv;     // [N, 3C], [N, C], [N, C], [N, 3C]
    float* lse;                          // [N, NH]
    floatX *hqkv, *hout, *hdout, *hdqkv; // results: as case_results last had them
    float* hlse;
    float *vqkv, *vdout;
    float *want_out, *want_lse, *want_dqkv;
} Case;

static Case case_make(FoDevice* d, FoStream* s, FoLayout l, int NH, int hs, float size) {
    random_state = 1; // what is tested before makes no difference
    Case c = {.l = l, .NH = NH, .hs = hs, .N = (size_t)l.B * (size_t)l.T, .C = (size_t)NH * (size_t)hs};
    size_t n3 = c.N * 3 * c.C, n1 = c.N * c.C, nl = c.N * (size_t)NH;
    c.qkv = fo_malloc(d, n3 * sizeof(floatX)), c.dqkv = fo_malloc(d, n3 * sizeof(floatX));
    c.out = fo_malloc(d, n1 * sizeof(floatX)), c.dout = fo_malloc(d, n1 * sizeof(floatX));
    c.lse = fo_malloc(d, nl * sizeof(float));
    c.hqkv = host_alloc(n3, sizeof(floatX)), c.hdqkv = host_alloc(n3, sizeof(floatX));
    c.hout = host_alloc(n1, sizeof(floatX)), c.hdout = host_alloc(n1, sizeof(floatX));
    c.hlse = host_alloc(nl, sizeof(float));
    c.vqkv = host_alloc(n3, 4), c.vdout = host_alloc(n1, 4);
    c.want_out = host_alloc(n1, 4), c.want_lse = host_alloc(nl, 4), c.want_dqkv = host_alloc(n3, 4);
    for (size_t i = 0; i < n3; i++) {
        c.hqkv[i] = fo_floatx(size * random_float());
        c.vqkv[i] = fo_float(c.hqkv[i]);
    }
    for (size_t i = 0; i < n1; i++) {
        c.hdout[i] = fo_floatx(random_float());
        c.vdout[i] = fo_float(c.hdout[i]);
    }
    upload(c.qkv, c.hqkv, n3 * sizeof(floatX), s), upload(c.dout, c.hdout, n1 * sizeof(floatX), s);
    upload_nan(c.out, n1 * sizeof(floatX), s), upload_nan(c.dqkv, n3 * sizeof(floatX), s);
    upload_nan(c.lse, nl * sizeof(float), s);
    return c;
}

static void case_results(Case* c, FoStream* s) {
    download(c->hout, c->out, c->N * c->C * sizeof(floatX), s);
    download(c->hdqkv, c->dqkv, c->N * 3 * c->C * sizeof(floatX), s);
    download(c->hlse, c->lse, c->N * (size_t)c->NH * sizeof(float), s);
}

static void case_free(FoDevice* d, Case* c) {
    fo_free(d, c->qkv), fo_free(d, c->dqkv), fo_free(d, c->out), fo_free(d, c->dout), fo_free(d, c->lse);
    free(c->hqkv), free(c->hdqkv), free(c->hout), free(c->hdout), free(c->hlse);
    free(c->vqkv), free(c->vdout), free(c->want_out), free(c->want_lse), free(c->want_dqkv);
}

// q, k or v (part 0, 1, 2) of a head at position t, in an array of rows of 3C
static float* at(const Case* c, float* rows, int b, int t, int part, int h) {
    return rows + fo_layout_row(c->l, b, t) * 3 * c->C + (size_t)part * c->C + (size_t)h * (size_t)c->hs;
}
static float* at_out(const Case* c, float* rows, int b, int t, int h) {
    return rows + fo_layout_row(c->l, b, t) * c->C + (size_t)h * (size_t)c->hs;
}

static double dot(const float* a, const float* b, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        sum += (double)a[i] * (double)b[i];
    }
    return sum;
}

// p [T, T] of a head, and lse
static void oracle_probabilities(Case* c, int b, int h, double* p) {
    int T = c->l.T;
    for (int t = 0; t < T; t++) {
        double max = -INFINITY, sum = 0.0;
        for (int k = 0; k <= t; k++) {
            p[t * T + k] =
                dot(at(c, c->vqkv, b, t, 0, h), at(c, c->vqkv, b, k, 1, h), c->hs) / sqrt((double)c->hs);
            max = fmax(max, p[t * T + k]);
        }
        for (int k = 0; k <= t; k++) {
            sum += exp(p[t * T + k] - max);
        }
        double lse = max + log(sum);
        c->want_lse[fo_layout_row(c->l, b, t) * (size_t)c->NH + (size_t)h] = (float)lse;
        for (int k = 0; k <= t; k++) {
            p[t * T + k] = exp(p[t * T + k] - lse);
        }
    }
}

static void oracle_head(Case* c, int b, int h, double* p, double* acc) {
    int T = c->l.T, hs = c->hs;
    double *dq = acc, *dk = dq + (size_t)T * hs, *dv = dk + (size_t)T * hs, *out = dv + (size_t)T * hs;
    oracle_probabilities(c, b, h, p);
    memset(acc, 0, (size_t)4 * T * hs * sizeof *acc);
    for (int t = 0; t < T; t++) {
        const float* dout = at_out(c, c->vdout, b, t, h);
        const float* q = at(c, c->vqkv, b, t, 0, h);
        double delta = 0.0;
        for (int k = 0; k <= t; k++) {
            delta += p[t * T + k] * dot(dout, at(c, c->vqkv, b, k, 2, h), hs);
        }
        for (int k = 0; k <= t; k++) {
            const float *key = at(c, c->vqkv, b, k, 1, h), *value = at(c, c->vqkv, b, k, 2, h);
            double ds = p[t * T + k] * (dot(dout, value, hs) - delta) / sqrt((double)hs);
            for (int i = 0; i < hs; i++) {
                out[t * hs + i] += p[t * T + k] * (double)value[i];
                dq[t * hs + i] += ds * (double)key[i];
                dk[k * hs + i] += ds * (double)q[i];
                dv[k * hs + i] += p[t * T + k] * (double)dout[i];
            }
        }
    }
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < hs; i++) {
            at_out(c, c->want_out, b, t, h)[i] = (float)out[t * hs + i];
            for (int part = 0; part < 3; part++) {
                at(c, c->want_dqkv, b, t, part, h)[i] = (float)acc[((size_t)part * T + t) * hs + i];
            }
        }
    }
}

static void oracle(Case* c) {
    double* p = host_alloc((size_t)c->l.T * (size_t)c->l.T, sizeof *p);
    double* acc = host_alloc((size_t)4 * c->l.T * (size_t)c->hs, sizeof *acc);
    for (int b = 0; b < c->l.B; b++) {
        for (int h = 0; h < c->NH; h++) {
            oracle_head(c, b, h, p, acc);
        }
    }
    free(p), free(acc);
}

static float* values_of(const floatX* x, size_t nelem) {
    float* v = host_alloc(nelem, sizeof *v);
    for (size_t i = 0; i < nelem; i++) {
        v[i] = fo_float(x[i]);
    }
    return v;
}

/* bf16: p, ds and the results are rounded once each, by at most 2^-9 of themselves, and out, a result, is an
 * input of backward; errors of ds partly survive where terms cancel, hence 4. fp32: a few roundings, and exp
 * within 2 units; inputs up to `size` have scores of the order of its square, whose roundings exp makes
 * relative errors.
 */
static double tolerance(double bf16_roundings, double size) {
    return FO_FLOATX == FO_BF16 ? bf16_roundings * 0x1p-9 : 4e-6 + 1e-7 * size * size;
}

/* The gradients by keys, `cut` rows a call, in ascending or descending order: after each call its dk and dv
 * are those of fo_attention_backward, the rows of others untouched; after the last dq is right. tol: of dq.
 */
static void check_by_keys(FoDevice* d, FoStream* s, const Case* c, size_t cut, int descending, double tol) {
    size_t n1 = c->N * c->C, row_nbytes = 2 * c->C * sizeof(floatX), ncalls = c->N / cut;
    float *dq = fo_malloc(d, n1 * sizeof *dq), *hdq = host_alloc(n1, sizeof *dq);
    floatX *dkv = fo_malloc(d, 2 * n1 * sizeof *dkv), *hdkv = host_alloc(2 * n1, sizeof *dkv);
    floatX* expected = host_nan(2 * n1 * sizeof *dkv);
    float* want_dq = host_alloc(n1, sizeof *want_dq);
    upload_nan(dkv, 2 * n1 * sizeof *dkv, s);
    CHECK_AT("B=%d T=%d P=%d zigzag=%d NH=%d hs=%d, %zu keys a call, descending=%d", c->l.B, c->l.T, c->l.P,
             c->l.zigzag, c->NH, c->hs, cut, descending);
    fo_attention_backward_kv(NULL, NULL, NULL, NULL, NULL, NULL, c->N, 0, c->l, c->NH, c->hs, s); // nothing
    for (size_t i = 0; i < ncalls; i++) {
        size_t row0 = (descending ? ncalls - 1 - i : i) * cut;
        fo_attention_backward_kv(dq, dkv, c->dout, c->qkv, c->out, c->lse, row0, cut, c->l, c->NH, c->hs, s);
        download(hdkv, dkv, 2 * n1 * sizeof *dkv, s);
        for (size_t row = row0; row < row0 + cut; row++) {
            memcpy(expected + row * 2 * c->C, c->hdqkv + row * 3 * c->C + c->C, row_nbytes);
        }
        CHECK_BITS(hdkv, expected, c->N * row_nbytes);
    }
    for (size_t row = 0; row < c->N; row++) {
        memcpy(want_dq + row * c->C, c->want_dqkv + row * 3 * c->C, c->C * sizeof *dq);
    }
    download(hdq, dq, n1 * sizeof *dq, s);
    CHECK_CLOSE(hdq, want_dq, n1, tol);
    for (size_t row = 0; row < c->N && cut == c->N; row++) { // one call: the same sums, rounded
        for (size_t i = 0; i < c->C; i++) {
            hdkv[row * c->C + i] = fo_floatx(hdq[row * c->C + i]);
        }
        memcpy(expected + row * c->C, c->hdqkv + row * 3 * c->C, row_nbytes / 2);
    }
    CHECK_BITS(hdkv, expected, n1 * sizeof *dkv);
    fo_free(d, dq), fo_free(d, dkv);
    free(hdq), free(hdkv), free(expected), free(want_dq);
}

static void test_right(FoDevice* d, FoStream* s, FoLayout l, int NH, int hs, float size) {
    Case c = case_make(d, s, l, NH, hs, size);
    oracle(&c);
    CHECK_AT("B=%d T=%d P=%d zigzag=%d NH=%d hs=%d size=%g", l.B, l.T, l.P, l.zigzag, NH, hs, (double)size);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, l, NH, hs, s);
    fo_attention_backward(c.dqkv, c.dout, c.qkv, c.out, c.lse, 0, c.N, l, NH, hs, s);
    case_results(&c, s);
    float *out = values_of(c.hout, c.N * c.C), *dqkv = values_of(c.hdqkv, c.N * 3 * c.C);
    CHECK_CLOSE(out, c.want_out, c.N * c.C, tolerance(1.5, (double)size));
    CHECK_CLOSE(c.hlse, c.want_lse, c.N * (size_t)NH, 2e-6);
    CHECK_CLOSE(dqkv, c.want_dqkv, c.N * 3 * c.C, tolerance(4.0, (double)size));
    // dq by itself: what cancels weighs more than beside dk and dv
    size_t shard = l.zigzag ? c.N / (size_t)l.P : (size_t)l.T;
    double tol = tolerance(6.0, (double)size);
    check_by_keys(d, s, &c, shard, 0, tol);
    if (FO_DEVICE_CPU || l.zigzag) { check_by_keys(d, s, &c, shard, 1, tol); }
    check_by_keys(d, s, &c, c.N, 0, tol);
    if (c.N > 2 * shard && c.N % (2 * shard) == 0) { check_by_keys(d, s, &c, 2 * shard, 1, tol); }
    free(out), free(dqkv);
    case_free(d, &c);
}

/* One key with a score q*k/sqrt(hs) of -88.5 or less: to what fills up keys and queries, whose scores are 0,
 * exp gives infinity, which must not get anywhere. p is 1, so dq and dk are 0 and dv is dout.
 */
static void test_low_score(FoDevice* d, FoStream* s, int hs, float q, float k) {
    Case c = case_make(d, s, (FoLayout){1, 1, 1, 0}, 1, hs, 1.0f);
    float score = q * k / sqrtf((float)hs);
    int wrong = 0;
    memset(c.hqkv, 0, 3 * c.C * sizeof *c.hqkv);
    c.hqkv[0] = fo_floatx(q), c.hqkv[c.C] = fo_floatx(k), c.hqkv[2 * c.C] = fo_floatx(0.5f);
    upload(c.qkv, c.hqkv, 3 * c.C * sizeof *c.hqkv, s);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, 1, c.l, 1, hs, s);
    fo_attention_backward(c.dqkv, c.dout, c.qkv, c.out, c.lse, 0, 1, c.l, 1, hs, s);
    case_results(&c, s);
    CHECK_AT("a low score, hs=%d", hs);
    CHECK(fabsf(c.hlse[0] - score) <= (hs == 1 ? 0.0f : 4e-5f) && fo_float(c.hout[0]) == 0.5f);
    for (size_t i = 0; i < c.C; i++) {
        wrong += !(fo_float(c.hdqkv[i]) == 0.0f && fo_float(c.hdqkv[c.C + i]) == 0.0f);
        wrong += !(fo_float(c.hdqkv[2 * c.C + i]) == fo_float(c.hdout[i]));
    }
    CHECK(wrong == 0);
    case_free(d, &c);
}

static void test_shapes(FoDevice* d, FoStream* s) {
    static const int sizes[] = {1, 8, 16, 25, 64, 80, 128, 7, 96, 200};
    static const int lengths[] = {1, 2, 15, 48, 49, 64, 100, 129, 200};
    FoLayout l = {2, 0, 1, 0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) {
            l.T = lengths[j];
            int large = sizes[i] > 16 && l.T > 100;
            if (!FO_DEVICE_CPU && ((i + j) % 3 != 0 || large)) { continue; } // emulation is slow
            test_right(d, s, l, 2, sizes[i], 1.0f);
        }
    }
    test_right(d, s, (FoLayout){1, FO_DEVICE_CPU ? 530 : 150, 1, 0}, 1, 64, 1.0f); // several tasks of a head
    test_right(d, s, (FoLayout){2, 96, 2, 1}, 3, 16, 1.0f);
    test_right(d, s, (FoLayout){1, FO_DEVICE_CPU ? 240 : 120, 3, 1}, 2, 64, 1.0f);
    test_right(d, s, (FoLayout){3, 24, 4, 1}, 1, 25, 1.0f);
    test_right(d, s, (FoLayout){1, 100, 1, 0}, 1, 64, 12.0f); // scores up to hundreds: one key takes it all
    test_right(d, s, (FoLayout){2, 70, 1, 1}, 3, 7, 1.0f);
    test_right(d, s, (FoLayout){1, FO_DEVICE_CPU ? 264 : 72, 4, 1}, 2, 80, 1.0f);
    test_right(d, s, (FoLayout){4, 33, 4, 0}, 1, 16, 1.0f);
}

/* Calls for rows [row, row + cut), in ascending or descending order; before each, all that it must not read
 * is NaN: queries outside, keys and values of positions after its last one of a sequence. After each, rows of
 * others are as they were: NaN, or computed.
 */
static void test_cut(FoDevice* d, FoStream* s, Case* c, size_t cut, int descending) {
    size_t n1 = c->N * c->C, nl = c->N * (size_t)c->NH, width = 3 * c->C;
    floatX *out = fo_malloc(d, n1 * sizeof *out), *hout = host_alloc(n1, sizeof *out);
    float *lse = fo_malloc(d, nl * sizeof *lse), *hlse = host_alloc(nl, sizeof *lse);
    floatX *qkv = fo_malloc(d, c->N * width * sizeof *qkv), *hqkv = host_alloc(c->N * width, sizeof *qkv);
    floatX* want_out = host_nan(n1 * sizeof *out);
    float* want_lse = host_nan(nl * sizeof *lse);
    upload(out, want_out, n1 * sizeof *out, s), upload(lse, want_lse, nl * sizeof *lse, s);
    CHECK_AT("B=%d T=%d P=%d zigzag=%d hs=%d in calls of %zu rows, descending=%d", c->l.B, c->l.T, c->l.P,
             c->l.zigzag, c->hs, cut, descending);
    size_t ncalls = (c->N + cut - 1) / cut;
    for (size_t i = 0; i < ncalls; i++) {
        size_t row0 = (descending ? ncalls - 1 - i : i) * cut, n = c->N - row0 < cut ? c->N - row0 : cut;
        memset(hqkv, 0xff, c->N * width * sizeof *qkv);
        for (int b = 0; b < c->l.B; b++) {
            int needed = 0; // positions of this sequence
            for (int t = 0; t < c->l.T; t++) {
                size_t row = fo_layout_row(c->l, b, t);
                if (row >= row0 && row < row0 + n) {
                    memcpy(hqkv + row * width, c->hqkv + row * width, c->C * sizeof *qkv);
                    needed = t + 1;
                }
            }
            for (int t = 0; t < needed; t++) {
                size_t k = fo_layout_row(c->l, b, t) * width + c->C;
                memcpy(hqkv + k, c->hqkv + k, 2 * c->C * sizeof *qkv);
            }
        }
        upload(qkv, hqkv, c->N * width * sizeof *qkv, s);
        fo_attention_forward(out, lse, qkv, row0, n, c->l, c->NH, c->hs, s);
        size_t NH = (size_t)c->NH;
        memcpy(want_out + row0 * c->C, c->hout + row0 * c->C, n * c->C * sizeof *out);
        memcpy(want_lse + row0 * NH, c->hlse + row0 * NH, n * NH * sizeof *lse);
        download(hout, out, n1 * sizeof *out, s), download(hlse, lse, nl * sizeof *lse, s);
        CHECK_BITS(hout, want_out, n1 * sizeof *out);
        CHECK_BITS(hlse, want_lse, nl * sizeof *lse);
    }
    fo_free(d, out), fo_free(d, lse), fo_free(d, qkv);
    free(hout), free(hlse), free(hqkv), free(want_out), free(want_lse);
}

static void test_cuts(FoDevice* d, FoStream* s) {
    static const FoLayout layouts[] = {{2, 512, 2, 0}, {1, 512, 2, 1}, {2, 256, 4, 1}, {1, 300, 3, 1}};
    static const size_t cuts[] = {1024, 512, 256, 128, 100, 64, 50, 37, 16};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        for (int hs = 25; hs <= 64; hs += 39) {
            FoLayout l = layouts[i];
            if (!FO_DEVICE_CPU) { l.T = l.T / 3 / (2 * l.P) * 2 * l.P; }
            Case c = case_make(d, s, l, 2, hs, 1.0f);
            fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, c.NH, hs, s);
            case_results(&c, s);
            for (size_t j = 0; j < sizeof cuts / sizeof *cuts; j++) {
                size_t cut = FO_DEVICE_CPU ? cuts[j] : cuts[j] / 3;
                if (FO_DEVICE_CPU || (i + j) % 3 == 0) { test_cut(d, s, &c, cut, (int)j % 2); }
            }
            case_free(d, &c);
        }
    }
}

// sequences one at a time, run after run, and other numbers of threads: the same bits
static void test_backward_repeats(FoDevice* d, FoStream* s) {
    Case c = case_make(d, s, (FoLayout){3, 130, 1, 0}, 2, 40, 1.0f);
    size_t nbytes = c.N * 3 * c.C * sizeof(floatX), T = (size_t)c.l.T;
    floatX *again = fo_malloc(d, nbytes), *hagain = host_alloc(nbytes, 1);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, c.NH, c.hs, s);
    fo_attention_backward(c.dqkv, c.dout, c.qkv, c.out, c.lse, 0, c.N, c.l, c.NH, c.hs, s);
    case_results(&c, s);
    upload_nan(again, nbytes, s);
    for (size_t b = 0; b < (size_t)c.l.B; b++) {
        fo_attention_backward(again, c.dout, c.qkv, c.out, c.lse, b * T, T, c.l, c.NH, c.hs, s);
    }
    download(hagain, again, nbytes, s);
    CHECK_AT("backward, a sequence a call");
    CHECK_BITS(hagain, c.hdqkv, nbytes);
#if FO_OPENMP
    FoDevice* other = fo_device_open(0, 1);
    other->nthreads = 3;
    FoStream* os = fo_stream_create(other, "other");
    upload_nan(again, nbytes, os);
    fo_attention_backward(again, c.dout, c.qkv, c.out, c.lse, 0, c.N, c.l, c.NH, c.hs, os);
    download(hagain, again, nbytes, os);
    CHECK_AT("3 threads");
    CHECK_BITS(hagain, c.hdqkv, nbytes);
    floatX* out = host_alloc(c.N * c.C, sizeof *out);
    float* lse = host_alloc(c.N * (size_t)c.NH, sizeof *lse);
    memcpy(out, c.hout, c.N * c.C * sizeof *out), memcpy(lse, c.hlse, c.N * (size_t)c.NH * sizeof *lse);
    upload_nan(c.out, c.N * c.C * sizeof *out, os);
    upload_nan(c.lse, c.N * (size_t)c.NH * sizeof *lse, os);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, c.NH, c.hs, os);
    case_results(&c, os);
    CHECK_BITS(c.hout, out, c.N * c.C * sizeof *out);
    CHECK_BITS(c.hlse, lse, c.N * (size_t)c.NH * sizeof *lse);
    free(out), free(lse);
    fo_stream_destroy(os);
    fo_device_close(other);
#endif
    fo_free(d, again), free(hagain);
    case_free(d, &c);
}

/* Sequence b of many, all others NaN, inputs and results: they stay so, and b has the bits of a batch of its
 * own. The stream is new: its scratch has room for this batch and, where that is 2^18 heads of rows, whose
 * sums of dout * out fill whole MiB, for no more.
 */
static void test_one_of_many(FoDevice* d, int B, int b, int T, int NH, int hs) {
    FoStream* s = fo_stream_create(d, "new");
    FoLayout l = {B, T, 1, 0};
    Case c = case_make(d, s, (FoLayout){1, T, 1, 0}, NH, hs, 1.0f);
    size_t n = c.N, row0 = (size_t)b * n, N = (size_t)B * n, C = c.C, H = (size_t)NH, e = sizeof(floatX);
    struct {
        void *array, *host, *own;
        size_t row_nbytes;
    } x[] = {
        {NULL, NULL, c.hqkv, 3 * C * e},  {NULL, NULL, c.hdout, C * e},
        {NULL, NULL, c.hout, C * e},      {NULL, NULL, c.hlse, H * sizeof(float)},
        {NULL, NULL, c.hdqkv, 3 * C * e},
    };
    enum { INPUTS = 2, ARRAYS = 5 };
    fo_attention_forward(c.out, c.lse, c.qkv, 0, n, c.l, NH, hs, s);
    fo_attention_backward(c.dqkv, c.dout, c.qkv, c.out, c.lse, 0, n, c.l, NH, hs, s);
    case_results(&c, s);
    for (int i = 0; i < ARRAYS; i++) {
        x[i].array = fo_malloc(d, N * x[i].row_nbytes), x[i].host = host_nan(N * x[i].row_nbytes);
        upload(x[i].array, x[i].host, N * x[i].row_nbytes, s);
        memcpy((char*)x[i].host + row0 * x[i].row_nbytes, x[i].own, n * x[i].row_nbytes);
        if (i < INPUTS) { upload(x[i].array, x[i].host, N * x[i].row_nbytes, s); }
    }
    fo_attention_forward(x[2].array, x[3].array, x[0].array, row0, n, l, NH, hs, s);
    fo_attention_backward(x[4].array, x[1].array, x[0].array, x[2].array, x[3].array, row0, n, l, NH, hs, s);
    CHECK_AT("sequence %d of %d, T=%d NH=%d hs=%d", b, B, T, NH, hs);
    for (int i = 0; i < ARRAYS; i++) {
        void* got = host_alloc(N, x[i].row_nbytes);
        download(got, x[i].array, N * x[i].row_nbytes, s);
        CHECK_BITS(got, x[i].host, N * x[i].row_nbytes);
        fo_free(d, x[i].array), free(x[i].host), free(got);
    }
    fo_stream_destroy(s);
    case_free(d, &c);
}

// by the keys of a shard at a time: dq and dkv, on the host
static void backward_by_keys(FoDevice* d, float* hdq, floatX* hdkv, const Case* c, FoStream* s) {
    size_t cut = c->N / (size_t)c->l.P, n1 = c->N * c->C;
    float* dq = fo_malloc(d, n1 * sizeof *dq);
    floatX* dkv = fo_malloc(d, 2 * n1 * sizeof *dkv);
    for (size_t row = 0; row < c->N; row += cut) {
        fo_attention_backward_kv(dq, dkv, c->dout, c->qkv, c->out, c->lse, row, cut, c->l, c->NH, c->hs, s);
    }
    download(hdq, dq, n1 * sizeof *dq, s), download(hdkv, dkv, 2 * n1 * sizeof *dkv, s);
    fo_free(d, dq), fo_free(d, dkv);
}

// by keys, on another stream, with another number of threads: the same bits
static void test_by_keys_repeats(FoDevice* d, FoStream* s) {
    Case c = case_make(d, s, (FoLayout){2, 192, 3, 1}, 3, 40, 1.0f);
    size_t n1 = c.N * c.C;
    float *dq = host_alloc(n1, sizeof *dq), *dq2 = host_alloc(n1, sizeof *dq);
    floatX *dkv = host_alloc(2 * n1, sizeof *dkv), *dkv2 = host_alloc(2 * n1, sizeof *dkv);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, c.NH, c.hs, s);
    backward_by_keys(d, dq, dkv, &c, s);
    FoDevice* other = fo_device_open(0, 1);
#if FO_OPENMP
    other->nthreads = 3;
#endif
    FoStream* os = fo_stream_create(other, "other");
    backward_by_keys(other, dq2, dkv2, &c, os);
    CHECK_AT("by keys, again");
    CHECK_BITS(dq2, dq, n1 * sizeof *dq);
    CHECK_BITS(dkv2, dkv, 2 * n1 * sizeof *dkv);
    fo_stream_destroy(os);
    fo_device_close(other);
    free(dq), free(dq2), free(dkv), free(dkv2);
    case_free(d, &c);
}

static void die_of_rows(void) {
    FoLayout l = {2, 8, 1, 0};
    fo_attention_backward(NULL, NULL, NULL, NULL, NULL, 4, 8, l, 1, 8, NULL);
}

// ---- decode -----------------------------------------------------------------------------------------------
// a sequence in some steps: prefilled to T0, then a token a step, but idle in every third
typedef struct {
    floatX *cache, *qkv, *out; // [2, B, room, C], [B, 3C], [B, C]
    int* pos;
    floatX *hcache, *expected, *hqkv, *hout;
    int* hpos;
    size_t ncache;
    float* got; // [N, C] in the order of the case's layout
    int room;
} Decode;

static floatX* expected_row(const Case* c, const Decode* e, int part, int b, int t) {
    return e->expected + (((size_t)part * (size_t)c->l.B + (size_t)b) * (size_t)e->room + (size_t)t) * c->C;
}

static void expect_cached(const Case* c, const Decode* e, int b, int t) {
    const floatX* k = c->hqkv + fo_layout_row(c->l, b, t) * 3 * c->C + c->C;
    memcpy(expected_row(c, e, 0, b, t), k, c->C * sizeof *k);
    memcpy(expected_row(c, e, 1, b, t), k + c->C, c->C * sizeof *k);
}

// the first T0 positions of the case, in rows by `l`, into the cache
static void prefill(FoDevice* d, FoStream* s, const Case* c, const Decode* e, FoLayout l) {
    size_t width = 3 * c->C, nbytes = (size_t)l.B * (size_t)l.T * width * sizeof(floatX);
    floatX *qkv = fo_malloc(d, nbytes), *hqkv = host_alloc(nbytes, 1);
    for (int b = 0; b < l.B; b++) {
        for (int t = 0; t < l.T; t++) {
            memcpy(hqkv + fo_layout_row(l, b, t) * width, c->hqkv + fo_layout_row(c->l, b, t) * width,
                   width * sizeof *qkv);
            expect_cached(c, e, b, t);
        }
    }
    upload(qkv, hqkv, nbytes, s);
    fo_attention_cache(e->cache, qkv, l, e->room, c->NH, c->hs, s);
    fo_stream_sync(s);
    fo_free(d, qkv), free(hqkv);
}

// one token of each sequence that has one left in this step; returns how many
static int decode_step(FoStream* s, const Case* c, const Decode* e, int* next, int step) {
    int n = 0;
    size_t B = (size_t)c->l.B, width = 3 * c->C;
    for (int b = 0; b < c->l.B; b++) {
        int idle = next[b] == c->l.T || (step + b) % 3 == 2;
        e->hpos[b] = idle ? -1 - b : next[b];
        memset(e->hqkv + (size_t)b * width, 0xff, width * sizeof *e->hqkv);
        if (idle) { continue; }
        memcpy(e->hqkv + (size_t)b * width, c->hqkv + fo_layout_row(c->l, b, next[b]) * width,
               width * sizeof *e->qkv);
        expect_cached(c, e, b, next[b]);
    }
    upload_nan(e->out, B * c->C * sizeof *e->out, s);
    upload(e->qkv, e->hqkv, B * width * sizeof *e->qkv, s), upload(e->pos, e->hpos, B * sizeof *e->pos, s);
    fo_attention_decode(e->out, e->cache, e->qkv, e->pos, c->l.B, e->room, c->NH, c->hs, s);
    download(e->hout, e->out, B * c->C * sizeof *e->out, s);
    for (int b = 0; b < c->l.B; b++) {
        int zeros = 1, t = e->hpos[b];
        for (size_t i = 0; i < c->C; i++) {
            float v = fo_float(e->hout[(size_t)b * c->C + i]);
            zeros = zeros && v == 0.0f;
            if (t >= 0) { e->got[fo_layout_row(c->l, b, t) * c->C + i] = v; }
        }
        if (t < 0) { CHECK(zeros); }
        next[b] += t >= 0;
        n += next[b] < c->l.T;
    }
    return n;
}

static Decode decode_make(FoDevice* d, FoStream* s, const Case* c) {
    size_t B = (size_t)c->l.B;
    Decode e = {.room = c->l.T + 3};
    e.ncache = 2 * B * (size_t)e.room * c->C;
    e.cache = fo_malloc(d, e.ncache * sizeof(floatX)), e.hcache = host_alloc(e.ncache, sizeof(floatX));
    e.qkv = fo_malloc(d, B * 3 * c->C * sizeof(floatX)), e.hqkv = host_alloc(B * 3 * c->C, sizeof(floatX));
    e.out = fo_malloc(d, B * c->C * sizeof(floatX)), e.hout = host_alloc(B * c->C, sizeof(floatX));
    e.pos = fo_malloc(d, B * sizeof(int)), e.hpos = host_alloc(B, sizeof(int));
    e.expected = host_nan(e.ncache * sizeof(floatX)), e.got = host_alloc(c->N * c->C, sizeof(float));
    upload_nan(e.cache, e.ncache * sizeof(floatX), s);
    return e;
}

static void decode_free(FoDevice* d, Decode* e) {
    fo_free(d, e->cache), fo_free(d, e->qkv), fo_free(d, e->out), fo_free(d, e->pos);
    free(e->hcache), free(e->hqkv), free(e->hout), free(e->hpos), free(e->expected), free(e->got);
}

static void check_cache(const Decode* e, FoStream* s) {
    download(e->hcache, e->cache, e->ncache * sizeof(floatX), s);
    CHECK_BITS(e->hcache, e->expected, e->ncache * sizeof(floatX));
}

/* Positions from T0 on, one at a time after a prefill, against the oracle, and closer against the forward
 * pass over all, which rounds the same (cuda's by the largest score so far, not of all). The outputs are
 * few, and values cancel in them: hence 4 roundings.
 * What the cache should not have got stays NaN.
 */
static void test_decode(FoDevice* d, FoStream* s, FoLayout prefilled, int T, int NH, int hs, float size) {
    Case c = case_make(d, s, (FoLayout){prefilled.B, T, 1, 0}, NH, hs, size);
    size_t B = (size_t)prefilled.B, T0 = (size_t)prefilled.T;
    Decode e = decode_make(d, s, &c);
    int* next = host_alloc(B, sizeof *next);
    oracle(&c);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, NH, hs, s);
    case_results(&c, s);
    CHECK_AT("decode B=%zu T0=%zu T=%d P=%d zigzag=%d NH=%d hs=%d", B, T0, T, prefilled.P, prefilled.zigzag,
             NH, hs);
    if (T0 > 0) { prefill(d, s, &c, &e, prefilled); }
    check_cache(&e, s);
    for (size_t b = 0; b < B; b++) {
        next[b] = (int)T0;
    }
    for (int step = 0; decode_step(s, &c, &e, next, step) > 0; step++) {}
    check_cache(&e, s);
    float* forward = values_of(c.hout, c.N * c.C);
    for (size_t b = 0; b < B; b++) {
        size_t at = (b * (size_t)T + T0) * c.C, n = ((size_t)T - T0) * c.C;
        CHECK_CLOSE(e.got + at, c.want_out + at, n, tolerance(4.0, (double)size));
        CHECK_CLOSE(e.got + at, forward + at, n, tolerance(FO_DEVICE_CPU ? 1.0 : 4.0, (double)size));
    }
    free(next), free(forward);
    decode_free(d, &e);
    case_free(d, &c);
}

static void test_decodes(FoDevice* d, FoStream* s) {
    static const int sizes[] = {1, 8, 16, 25, 64, 80, 128, 7};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        test_decode(d, s, (FoLayout){2, 37, 1, 0}, 51, 2, sizes[i], 1.0f);
    }
    test_decode(d, s, (FoLayout){1, 0, 1, 0}, 20, 3, 16, 1.0f); // no prefill
    test_decode(d, s, (FoLayout){3, 1, 1, 0}, 66, 1, 25, 1.0f);
    test_decode(d, s, (FoLayout){2, 48, 3, 1}, 53, 3, 40, 1.0f);
    test_decode(d, s, (FoLayout){4, 64, 4, 1}, 70, 2, 16, 1.0f);
    test_decode(d, s, (FoLayout){4, 30, 2, 0}, 33, 1, 32, 1.0f);
    test_decode(d, s, (FoLayout){2, 90, 1, 0}, 100, 1, 64, 12.0f);
    test_decode(d, s, (FoLayout){1, 250, 1, 0}, 300, 6, 8, 4.0f); // cuda takes 256 keys at a time
#if FO_OPENMP
    FoDevice* other = fo_device_open(0, 1);
    other->nthreads = 3;
    FoStream* os = fo_stream_create(other, "other");
    test_decode(d, os, (FoLayout){5, 20, 1, 0}, 40, 5, 24, 1.0f);
    fo_stream_destroy(os);
    fo_device_close(other);
#endif
}

// ---- errors and main --------------------------------------------------------------------------------------
static void die_of_room(void) {
    fo_attention_cache(NULL, NULL, (FoLayout){1, 9, 1, 0}, 8, 1, 8, NULL);
}

static void die_of_position(void) {
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "test");
    static const int pos[2] = {-1, 8};
    int* dpos = fo_malloc(d, sizeof pos);
    floatX* memory = fo_malloc(d, (8 + 2 * 2 * 8 * 4 + 24) * sizeof *memory);
    upload(dpos, pos, sizeof pos, s);
    fo_attention_decode(memory, memory + 8, memory + 8 + 2 * 2 * 8 * 4, dpos, 2, 8, 1, 4, s);
    fo_stream_sync(s);
}

static void die_of_shards(void) {
    FoLayout l = {2, 16, 4, 1};
    fo_attention_backward_kv(NULL, NULL, NULL, NULL, NULL, NULL, 8, 12, l, 1, 8, NULL);
}

static void die_of_blocks(void) {
    FoLayout l = {2, 10, 2, 1};
    fo_attention_forward(NULL, NULL, NULL, 0, 20, l, 1, 8, NULL);
}

int main(void) {
    CHECK_DIES(die_of_rows(), "rows 4 to 12 are not whole sequences of 8");
    CHECK_DIES(die_of_shards(), "rows 8 to 20 are not whole shards of 8");
    CHECK_DIES(die_of_room(), "T=9, the cache has room for 8");
    // on another device a kernel finds out, and stops
    CHECK_DIES(die_of_position(), FO_DEVICE_CPU ? "position 8 of sequence 1, the cache has room for 8" : "");
    CHECK_DIES(die_of_blocks(), "T=10 is not a multiple of 2P, P=2");
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "test");
    test_shapes(d, s);
    test_low_score(d, s, 1, -8.0f, 11.0625f);
    test_low_score(d, s, 8, -16.0f, 16.0f);
    test_cuts(d, s);
    test_backward_repeats(d, s);
    test_by_keys_repeats(d, s);
    test_one_of_many(d, 3, 1, 33, 3, 25);
    test_one_of_many(d, 3, 1, 50, 2, 16);
    test_one_of_many(d, 1 << 14, (1 << 14) - 1, 16, 1, 8);
    test_decodes(d, s);
    fo_stream_destroy(s);
    CHECK(fo_device_nbytes(d) == 0);
    fo_device_close(d);
    return check_report();
}
