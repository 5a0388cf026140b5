/* test_attention.c -- fo_attention_forward, backward and decode: right, and a row has the same bits however
 * rows are cut.
 *
 * The oracle computes each head of each sequence in double with the whole [T, T] matrix, below. Rows that a
 * forward call must not read (queries and keys of later positions) are NaN while it runs.
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

// one shape: device arrays, and their values as floats
typedef struct {
    FoLayout l;
    int NH, hs;
    size_t N, C;
    floatX *qkv, *out, *dout, *dqkv; // [N, 3C], [N, C], [N, C], [N, 3C]
    float* lse;                      // [N, NH]
    float *vqkv, *vdout;
    float *want_out, *want_lse, *want_dqkv;
} Case;

static Case case_make(FoDevice* d, FoLayout l, int NH, int hs, float size) {
    Case c = {.l = l, .NH = NH, .hs = hs, .N = (size_t)l.B * (size_t)l.T, .C = (size_t)NH * (size_t)hs};
    size_t n3 = c.N * 3 * c.C, n1 = c.N * c.C, nl = c.N * (size_t)NH;
    c.qkv = fo_malloc(d, n3 * sizeof(floatX)), c.dqkv = fo_malloc(d, n3 * sizeof(floatX));
    c.out = fo_malloc(d, n1 * sizeof(floatX)), c.dout = fo_malloc(d, n1 * sizeof(floatX));
    c.lse = fo_malloc(d, nl * sizeof(float));
    c.vqkv = host_alloc(n3, 4), c.vdout = host_alloc(n1, 4);
    c.want_out = host_alloc(n1, 4), c.want_lse = host_alloc(nl, 4), c.want_dqkv = host_alloc(n3, 4);
    for (size_t i = 0; i < n3; i++) {
        c.qkv[i] = fo_floatx(size * random_float());
        c.vqkv[i] = fo_float(c.qkv[i]);
    }
    for (size_t i = 0; i < n1; i++) {
        c.dout[i] = fo_floatx(random_float());
        c.vdout[i] = fo_float(c.dout[i]);
    }
    memset(c.out, 0xff, n1 * sizeof(floatX)); // NaN
    memset(c.lse, 0xff, nl * sizeof(float));
    memset(c.dqkv, 0xff, n3 * sizeof(floatX));
    return c;
}

static void case_free(FoDevice* d, Case* c) {
    fo_free(d, c->qkv), fo_free(d, c->dqkv), fo_free(d, c->out), fo_free(d, c->dout), fo_free(d, c->lse);
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
    float* dq = fo_malloc(d, n1 * sizeof *dq);
    floatX* dkv = fo_malloc(d, 2 * n1 * sizeof *dkv);
    floatX* expected = fo_malloc(d, 2 * n1 * sizeof *dkv);
    float* want_dq = host_alloc(n1, sizeof *want_dq);
    memset(dkv, 0xff, 2 * n1 * sizeof *dkv); // NaN
    memset(expected, 0xff, 2 * n1 * sizeof *dkv);
    CHECK_AT("B=%d T=%d P=%d zigzag=%d NH=%d hs=%d, %zu keys a call, descending=%d", c->l.B, c->l.T, c->l.P,
             c->l.zigzag, c->NH, c->hs, cut, descending);
    fo_attention_backward_kv(NULL, NULL, NULL, NULL, NULL, NULL, c->N, 0, c->l, c->NH, c->hs, s); // nothing
    for (size_t i = 0; i < ncalls; i++) {
        size_t row0 = (descending ? ncalls - 1 - i : i) * cut;
        fo_attention_backward_kv(dq, dkv, c->dout, c->qkv, c->out, c->lse, row0, cut, c->l, c->NH, c->hs, s);
        fo_stream_sync(s);
        for (size_t row = row0; row < row0 + cut; row++) {
            memcpy(expected + row * 2 * c->C, c->dqkv + row * 3 * c->C + c->C, row_nbytes);
        }
        CHECK_BITS(dkv, expected, c->N * row_nbytes);
    }
    for (size_t row = 0; row < c->N; row++) {
        memcpy(want_dq + row * c->C, c->want_dqkv + row * 3 * c->C, c->C * sizeof *dq);
    }
    CHECK_CLOSE(dq, want_dq, n1, tol);
    for (size_t row = 0; row < c->N && cut == c->N; row++) { // one call: the same sums, rounded
        for (size_t i = 0; i < c->C; i++) {
            dkv[row * c->C + i] = fo_floatx(dq[row * c->C + i]);
        }
        memcpy(expected + row * c->C, c->dqkv + row * 3 * c->C, row_nbytes / 2);
    }
    CHECK_BITS(dkv, expected, n1 * sizeof *dkv);
    fo_free(d, dq), fo_free(d, dkv), fo_free(d, expected);
    free(want_dq);
}

static void test_right(FoDevice* d, FoStream* s, FoLayout l, int NH, int hs, float size) {
    Case c = case_make(d, l, NH, hs, size);
    oracle(&c);
    CHECK_AT("B=%d T=%d P=%d zigzag=%d NH=%d hs=%d size=%g", l.B, l.T, l.P, l.zigzag, NH, hs, (double)size);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, l, NH, hs, s);
    fo_attention_backward(c.dqkv, c.dout, c.qkv, c.out, c.lse, 0, c.N, l, NH, hs, s);
    fo_stream_sync(s);
    float *out = values_of(c.out, c.N * c.C), *dqkv = values_of(c.dqkv, c.N * 3 * c.C);
    CHECK_CLOSE(out, c.want_out, c.N * c.C, tolerance(1.5, (double)size));
    CHECK_CLOSE(c.lse, c.want_lse, c.N * (size_t)NH, 2e-6);
    CHECK_CLOSE(dqkv, c.want_dqkv, c.N * 3 * c.C, tolerance(4.0, (double)size));
    // dq by itself: what cancels weighs more than beside dk and dv
    size_t shard = l.zigzag ? c.N / (size_t)l.P : (size_t)l.T;
    double tol = tolerance(6.0, (double)size);
    check_by_keys(d, s, &c, shard, 0, tol);
    check_by_keys(d, s, &c, shard, 1, tol);
    check_by_keys(d, s, &c, c.N, 0, tol);
    if (c.N % (2 * shard) == 0) { check_by_keys(d, s, &c, 2 * shard, 1, tol); }
    free(out), free(dqkv);
    case_free(d, &c);
}

/* One key with the score -88.5: to what fills up the keys, whose scores are 0, exp gives infinity, which must
 * not get anywhere. p is 1, so dq and dk are 0 and dv is dout.
 */
static void test_low_score(FoDevice* d, FoStream* s) {
    Case c = case_make(d, (FoLayout){1, 1, 1, 0}, 1, 1, 1.0f);
    c.qkv[0] = fo_floatx(-8.0f), c.qkv[1] = fo_floatx(11.0625f), c.qkv[2] = fo_floatx(0.5f);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, 1, c.l, 1, 1, s);
    fo_attention_backward(c.dqkv, c.dout, c.qkv, c.out, c.lse, 0, 1, c.l, 1, 1, s);
    fo_stream_sync(s);
    CHECK_AT("a low score");
    CHECK(c.lse[0] == -88.5f && fo_float(c.out[0]) == 0.5f);
    CHECK(fo_float(c.dqkv[0]) == 0.0f && fo_float(c.dqkv[1]) == 0.0f);
    CHECK(fo_float(c.dqkv[2]) == fo_float(c.dout[0]));
    case_free(d, &c);
}

static void test_shapes(FoDevice* d, FoStream* s) {
    static const int sizes[] = {1, 8, 16, 25, 64, 80, 128, 7};
    static const int lengths[] = {1, 2, 15, 48, 49, 100, 200};
    FoLayout l = {2, 0, 1, 0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) {
            l.T = lengths[j];
            test_right(d, s, l, 2, sizes[i], 1.0f);
        }
    }
    test_right(d, s, (FoLayout){1, 530, 1, 0}, 1, 64, 1.0f); // several tasks of a head
    test_right(d, s, (FoLayout){2, 96, 2, 1}, 3, 16, 1.0f);
    test_right(d, s, (FoLayout){1, 240, 3, 1}, 2, 64, 1.0f);
    test_right(d, s, (FoLayout){3, 24, 4, 1}, 1, 25, 1.0f);
    test_right(d, s, (FoLayout){1, 100, 1, 0}, 1, 64, 12.0f); // scores up to hundreds: one key takes it all
    test_right(d, s, (FoLayout){2, 70, 1, 1}, 3, 7, 1.0f);
    test_right(d, s, (FoLayout){1, 392, 4, 1}, 2, 80, 1.0f);
    test_right(d, s, (FoLayout){4, 33, 4, 0}, 1, 16, 1.0f);
}

/* Calls for rows [row, row + cut), in ascending or descending order; before each, all that it must not read
 * is NaN: queries outside, keys and values of positions after its last one of a sequence.
 */
static void test_cut(FoDevice* d, FoStream* s, Case* c, size_t cut, int descending) {
    size_t n1 = c->N * c->C, nl = c->N * (size_t)c->NH, width = 3 * c->C;
    floatX* out = fo_malloc(d, n1 * sizeof *out);
    float* lse = fo_malloc(d, nl * sizeof *lse);
    floatX* qkv = fo_malloc(d, c->N * width * sizeof *qkv);
    memset(out, 0xff, n1 * sizeof *out);
    memset(lse, 0xff, nl * sizeof *lse);
    size_t ncalls = (c->N + cut - 1) / cut;
    for (size_t i = 0; i < ncalls; i++) {
        size_t row0 = (descending ? ncalls - 1 - i : i) * cut, n = c->N - row0 < cut ? c->N - row0 : cut;
        memset(qkv, 0xff, c->N * width * sizeof *qkv);
        for (int b = 0; b < c->l.B; b++) {
            int needed = 0; // positions of this sequence
            for (int t = 0; t < c->l.T; t++) {
                size_t row = fo_layout_row(c->l, b, t);
                if (row >= row0 && row < row0 + n) {
                    memcpy(qkv + row * width, c->qkv + row * width, c->C * sizeof *qkv);
                    needed = t + 1;
                }
            }
            for (int t = 0; t < needed; t++) {
                size_t k = fo_layout_row(c->l, b, t) * width + c->C;
                memcpy(qkv + k, c->qkv + k, 2 * c->C * sizeof *qkv);
            }
        }
        fo_attention_forward(out, lse, qkv, row0, n, c->l, c->NH, c->hs, s);
        fo_stream_sync(s);
    }
    CHECK_AT("B=%d T=%d P=%d zigzag=%d hs=%d in calls of %zu rows", c->l.B, c->l.T, c->l.P, c->l.zigzag,
             c->hs, cut);
    CHECK_BITS(out, c->out, n1 * sizeof *out);
    CHECK_BITS(lse, c->lse, nl * sizeof *lse);
    fo_free(d, out), fo_free(d, lse), fo_free(d, qkv);
}

static void test_cuts(FoDevice* d, FoStream* s) {
    static const FoLayout layouts[] = {{2, 512, 2, 0}, {1, 512, 2, 1}, {2, 256, 4, 1}, {1, 300, 3, 1}};
    static const size_t cuts[] = {1024, 512, 256, 128, 100, 64, 50, 37, 16};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        for (int hs = 25; hs <= 64; hs += 39) {
            Case c = case_make(d, layouts[i], 2, hs, 1.0f);
            fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, c.NH, hs, s);
            fo_stream_sync(s);
            for (size_t j = 0; j < sizeof cuts / sizeof *cuts; j++) {
                test_cut(d, s, &c, cuts[j], (int)j % 2);
            }
            case_free(d, &c);
        }
    }
}

// sequences one at a time, run after run, and other numbers of threads: the same bits
static void test_backward_repeats(FoDevice* d, FoStream* s) {
    Case c = case_make(d, (FoLayout){3, 130, 1, 0}, 2, 40, 1.0f);
    size_t nbytes = c.N * 3 * c.C * sizeof(floatX), T = (size_t)c.l.T;
    floatX* again = fo_malloc(d, nbytes);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, c.NH, c.hs, s);
    fo_attention_backward(c.dqkv, c.dout, c.qkv, c.out, c.lse, 0, c.N, c.l, c.NH, c.hs, s);
    fo_stream_sync(s);
    memset(again, 0xff, nbytes);
    for (size_t b = 0; b < (size_t)c.l.B; b++) {
        fo_attention_backward(again, c.dout, c.qkv, c.out, c.lse, b * T, T, c.l, c.NH, c.hs, s);
    }
    fo_stream_sync(s);
    CHECK_AT("backward, a sequence a call");
    CHECK_BITS(again, c.dqkv, nbytes);
#if FO_OPENMP
    FoDevice* other = fo_device_open(0, 1);
    other->nthreads = 3;
    FoStream* os = fo_stream_create(other, "other");
    memset(again, 0xff, nbytes);
    fo_attention_backward(again, c.dout, c.qkv, c.out, c.lse, 0, c.N, c.l, c.NH, c.hs, os);
    floatX* out = fo_malloc(other, c.N * c.C * sizeof *out);
    float* lse = fo_malloc(other, c.N * (size_t)c.NH * sizeof *lse);
    fo_attention_forward(out, lse, c.qkv, 0, c.N, c.l, c.NH, c.hs, os);
    fo_stream_sync(os);
    CHECK_AT("3 threads");
    CHECK_BITS(again, c.dqkv, nbytes);
    CHECK_BITS(out, c.out, c.N * c.C * sizeof *out);
    CHECK_BITS(lse, c.lse, c.N * (size_t)c.NH * sizeof *lse);
    fo_stream_destroy(os);
    fo_free(other, out), fo_free(other, lse);
    fo_device_close(other);
#endif
    fo_free(d, again);
    case_free(d, &c);
}

static void backward_by_keys(float* dq, floatX* dkv, const Case* c, FoStream* s) {
    size_t cut = c->N / (size_t)c->l.P;
    for (size_t row = 0; row < c->N; row += cut) {
        fo_attention_backward_kv(dq, dkv, c->dout, c->qkv, c->out, c->lse, row, cut, c->l, c->NH, c->hs, s);
    }
    fo_stream_sync(s);
}

// by keys, with another number of threads: the same bits
static void test_by_keys_repeats(FoDevice* d, FoStream* s) {
    Case c = case_make(d, (FoLayout){2, 192, 3, 1}, 3, 40, 1.0f);
    size_t n1 = c.N * c.C;
    float *dq = fo_malloc(d, n1 * sizeof *dq), *dq2 = fo_malloc(d, n1 * sizeof *dq);
    floatX *dkv = fo_malloc(d, 2 * n1 * sizeof *dkv), *dkv2 = fo_malloc(d, 2 * n1 * sizeof *dkv);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, c.NH, c.hs, s);
    backward_by_keys(dq, dkv, &c, s);
    FoDevice* other = fo_device_open(0, 1);
#if FO_OPENMP
    other->nthreads = 3;
#endif
    FoStream* os = fo_stream_create(other, "other");
    backward_by_keys(dq2, dkv2, &c, os);
    CHECK_AT("by keys, again");
    CHECK_BITS(dq2, dq, n1 * sizeof *dq);
    CHECK_BITS(dkv2, dkv, 2 * n1 * sizeof *dkv);
    fo_stream_destroy(os);
    fo_device_close(other);
    fo_free(d, dq), fo_free(d, dq2), fo_free(d, dkv), fo_free(d, dkv2);
    case_free(d, &c);
}

static void die_of_rows(void) {
    FoLayout l = {2, 8, 1, 0};
    fo_attention_backward(NULL, NULL, NULL, NULL, NULL, 4, 8, l, 1, 8, NULL);
}

// ---- decode -----------------------------------------------------------------------------------------------
// a sequence in some steps: prefilled to T0, then a token a step, but idle in every third
typedef struct {
    floatX *cache, *expected, *qkv, *out; // [2, B, room, C] twice, [B, 3C], [B, C]
    int* pos;
    float* got; // [N, C] in the order of the case's layout
    int room;
} Decode;

static floatX* cache_row(const Case* c, const Decode* e, floatX* cache, int part, int b, int t) {
    return cache + (((size_t)part * (size_t)c->l.B + (size_t)b) * (size_t)e->room + (size_t)t) * c->C;
}

static void expect_cached(const Case* c, const Decode* e, int b, int t) {
    const floatX* k = c->qkv + fo_layout_row(c->l, b, t) * 3 * c->C + c->C;
    memcpy(cache_row(c, e, e->expected, 0, b, t), k, c->C * sizeof *k);
    memcpy(cache_row(c, e, e->expected, 1, b, t), k + c->C, c->C * sizeof *k);
}

// the first T0 positions of the case, in rows by `l`, into the cache
static void prefill(FoDevice* d, FoStream* s, const Case* c, const Decode* e, FoLayout l) {
    size_t width = 3 * c->C;
    floatX* qkv = fo_malloc(d, (size_t)l.B * (size_t)l.T * width * sizeof *qkv + 1);
    for (int b = 0; b < l.B; b++) {
        for (int t = 0; t < l.T; t++) {
            memcpy(qkv + fo_layout_row(l, b, t) * width, c->qkv + fo_layout_row(c->l, b, t) * width,
                   width * sizeof *qkv);
            expect_cached(c, e, b, t);
        }
    }
    fo_attention_cache(e->cache, qkv, l, e->room, c->NH, c->hs, s);
    fo_stream_sync(s);
    fo_free(d, qkv);
}

// one token of each sequence that has one left in this step; returns how many
static int decode_step(FoStream* s, const Case* c, const Decode* e, int* next, int step) {
    int n = 0;
    size_t B = (size_t)c->l.B, width = 3 * c->C;
    for (int b = 0; b < c->l.B; b++) {
        int idle = next[b] == c->l.T || (step + b) % 3 == 2;
        e->pos[b] = idle ? -1 - b : next[b];
        memset(e->qkv + (size_t)b * width, 0xff, width * sizeof *e->qkv);
        if (idle) { continue; }
        memcpy(e->qkv + (size_t)b * width, c->qkv + fo_layout_row(c->l, b, next[b]) * width,
               width * sizeof *e->qkv);
        expect_cached(c, e, b, next[b]);
    }
    memset(e->out, 0xff, B * c->C * sizeof *e->out);
    fo_attention_decode(e->out, e->cache, e->qkv, e->pos, c->l.B, e->room, c->NH, c->hs, s);
    fo_stream_sync(s);
    for (int b = 0; b < c->l.B; b++) {
        int zeros = 1, t = e->pos[b];
        for (size_t i = 0; i < c->C; i++) {
            float v = fo_float(e->out[(size_t)b * c->C + i]);
            zeros = zeros && v == 0.0f;
            if (t >= 0) { e->got[fo_layout_row(c->l, b, t) * c->C + i] = v; }
        }
        if (t < 0) { CHECK(zeros); }
        next[b] += t >= 0;
        n += next[b] < c->l.T;
    }
    return n;
}

/* Positions from T0 on, one at a time after a prefill, against the oracle, and closer against the forward
 * pass over all, which rounds the same. The outputs are few, and values cancel in them: hence 4 roundings.
 * What the cache should not have got stays NaN.
 */
static void test_decode(FoDevice* d, FoStream* s, FoLayout prefilled, int T, int NH, int hs, float size) {
    Case c = case_make(d, (FoLayout){prefilled.B, T, 1, 0}, NH, hs, size);
    size_t B = (size_t)prefilled.B, n1 = c.N * c.C, T0 = (size_t)prefilled.T;
    Decode e = {.room = T + 3};
    size_t ncache = 2 * B * (size_t)e.room * c.C;
    e.cache = fo_malloc(d, ncache * sizeof(floatX)), e.expected = fo_malloc(d, ncache * sizeof(floatX));
    e.qkv = fo_malloc(d, B * 3 * c.C * sizeof(floatX)), e.out = fo_malloc(d, B * c.C * sizeof(floatX));
    e.pos = fo_malloc(d, B * sizeof(int)), e.got = host_alloc(n1, sizeof *e.got);
    int* next = host_alloc(B, sizeof *next);
    memset(e.cache, 0xff, ncache * sizeof(floatX)), memset(e.expected, 0xff, ncache * sizeof(floatX));
    oracle(&c);
    fo_attention_forward(c.out, c.lse, c.qkv, 0, c.N, c.l, NH, hs, s);
    fo_stream_sync(s);
    CHECK_AT("decode B=%zu T0=%zu T=%d P=%d zigzag=%d NH=%d hs=%d", B, T0, T, prefilled.P, prefilled.zigzag,
             NH, hs);
    if (T0 > 0) { prefill(d, s, &c, &e, prefilled); }
    CHECK_BITS(e.cache, e.expected, ncache * sizeof(floatX));
    for (size_t b = 0; b < B; b++) {
        next[b] = (int)T0;
    }
    for (int step = 0; decode_step(s, &c, &e, next, step) > 0; step++) {}
    CHECK_BITS(e.cache, e.expected, ncache * sizeof(floatX));
    float* forward = values_of(c.out, n1);
    for (size_t b = 0; b < B; b++) {
        size_t at = (b * (size_t)T + T0) * c.C, n = ((size_t)T - T0) * c.C;
        CHECK_CLOSE(e.got + at, c.want_out + at, n, tolerance(4.0, (double)size));
        CHECK_CLOSE(e.got + at, forward + at, n, tolerance(1.0, (double)size));
    }
    fo_free(d, e.cache), fo_free(d, e.expected), fo_free(d, e.qkv), fo_free(d, e.out), fo_free(d, e.pos);
    free(e.got), free(next), free(forward);
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
    floatX out[8], cache[2 * 2 * 8 * 4], qkv[24];
    memset(out, 0, sizeof out), memset(cache, 0, sizeof cache), memset(qkv, 0, sizeof qkv);
    fo_attention_decode(out, cache, qkv, pos, 2, 8, 1, 4, s);
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
    CHECK_DIES(die_of_position(), "position 8 of sequence 1, the cache has room for 8");
    CHECK_DIES(die_of_blocks(), "T=10 is not a multiple of 2P, P=2");
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "test");
    test_shapes(d, s);
    test_low_score(d, s);
    test_cuts(d, s);
    test_backward_repeats(d, s);
    test_by_keys_repeats(d, s);
    test_decodes(d, s);
    fo_stream_destroy(s);
    CHECK(fo_device_nbytes(d) == 0);
    fo_device_close(d);
    return check_report();
}
