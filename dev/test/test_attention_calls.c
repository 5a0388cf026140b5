/* test_attention_calls.c -- attention by calls of an engine, flashoverlap/cuda/attention_calls.h, as cuDNN is
 * one: calls cover the rows, arrays are where they say, rows are put into order and back.
 *
 * The engine here computes each call in double on the host, from what it downloads row by row, and nothing
 * else: what must not be read is NaN. Its scratch is NaN before it reads, so areas that overlap are found.
 * The oracle computes each head of each sequence with the whole [T, T] matrix.
 */
#include "dev/test/check.h"
#include "flashoverlap/cuda/attention_calls.h"
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

static void upload(void* dst, const void* src, size_t nbytes, FoStream* s) {
    fo_upload(dst, src, nbytes, s);
    fo_stream_sync(s);
}
static void download(void* dst, const void* src, size_t nbytes, FoStream* s) {
    fo_download(dst, src, nbytes, s);
    fo_stream_sync(s);
}
static void fill_nan(void* dst, size_t nbytes, FoStream* s) {
    void* nan = host_alloc(nbytes, 1);
    memset(nan, 0xff, nbytes);
    upload(dst, nan, nbytes, s);
    free(nan);
}

// ---- attention in double ----------------------------------------------------------------------------------
// of one head: `queries` rows against `keys` rows; query i sees keys 0 ... i + offset. Rows of hs
typedef struct {
    int queries, keys, hs, offset;
    const double *q, *k, *v, *dout, *out; // backward: the last two; out and lse given
    double *lse, *result;                 // result: out
    double *dq, *dk, *dv;
} Head;

static double dot(const double* a, const double* b, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

static void head_forward(const Head* h) {
    double* p = (double*)host_alloc((size_t)h->keys, sizeof *p);
    for (int i = 0; i < h->queries; i++) {
        int seen = i + h->offset + 1 < h->keys ? i + h->offset + 1 : h->keys;
        double max = -INFINITY, sum = 0.0, *out = h->result + i * h->hs;
        for (int j = 0; j < seen; j++) {
            p[j] = dot(h->q + i * h->hs, h->k + j * h->hs, h->hs) / sqrt((double)h->hs);
            max = fmax(max, p[j]);
        }
        for (int j = 0; j < seen; j++) {
            sum += exp(p[j] - max);
        }
        h->lse[i] = max + log(sum);
        for (int j = 0; j < seen; j++) {
            for (int d = 0; d < h->hs; d++) {
                out[d] += exp(p[j] - h->lse[i]) * h->v[j * h->hs + d];
            }
        }
    }
    free(p);
}

static void head_backward(const Head* h) {
    for (int i = 0; i < h->queries; i++) {
        const double *q = h->q + i * h->hs, *dout = h->dout + i * h->hs;
        double delta = dot(dout, h->out + i * h->hs, h->hs);
        for (int j = 0; j <= i + h->offset && j < h->keys; j++) {
            const double *k = h->k + j * h->hs, *v = h->v + j * h->hs;
            double p = exp(dot(q, k, h->hs) / sqrt((double)h->hs) - h->lse[i]);
            double ds = p * (dot(dout, v, h->hs) - delta) / sqrt((double)h->hs);
            for (int d = 0; d < h->hs; d++) {
                h->dq[i * h->hs + d] += ds * k[d];
                h->dk[j * h->hs + d] += ds * q[d];
                h->dv[j * h->hs + d] += p * dout[d];
            }
        }
    }
}

// ---- the engine -------------------------------------------------------------------------------------------
enum { WORKSPACE = 1000 };

typedef struct {
    int nplans, nruns, refuse_at, wants_dq_sum; // refuse_at: which plan is refused, from 0; -1: none
    FoSdpa planned[FO_SDPA_CALLS];
} Engine;

static int engine_plan(void* ctx, const FoSdpa* c, FoSdpaNeeds* needs) {
    Engine* e = (Engine*)ctx;
    if (e->nplans == e->refuse_at) { return 0; }
    CHECK(e->nplans < FO_SDPA_CALLS);
    e->planned[e->nplans++] = *c;
    needs->workspace_nbytes = WORKSPACE;
    needs->wants_dq_sum = c->backward && e->wants_dq_sum;
    return 1;
}

// heads of a call's rows as [nseq][heads][n][hs] in double, and back
static double* heads_read(const FoSdpa* c, const floatX* from, int64_t seq, int64_t row, int64_t n,
                          FoStream* s) {
    size_t width = (size_t)(c->heads * c->hs);
    double* x = (double*)host_alloc((size_t)(c->nseq * n) * width, sizeof *x);
    floatX* buf = (floatX*)host_alloc(width, sizeof *buf);
    for (int64_t b = 0; b < c->nseq; b++) {
        for (int64_t i = 0; i < n; i++) {
            download(buf, from + b * seq + i * row, width * sizeof *buf, s);
            for (size_t k = 0; k < width; k++) {
                int64_t h = (int64_t)k / c->hs, d = (int64_t)k % c->hs;
                x[((b * c->heads + h) * n + i) * c->hs + d] = fo_float(buf[k]);
            }
        }
    }
    free(buf);
    return x;
}

static void heads_write(const FoSdpa* c, floatX* to, int64_t seq, int64_t row, int64_t n, const double* x,
                        FoStream* s) {
    size_t width = (size_t)(c->heads * c->hs);
    floatX* buf = (floatX*)host_alloc(width, sizeof *buf);
    for (int64_t b = 0; b < c->nseq; b++) {
        for (int64_t i = 0; i < n; i++) {
            for (size_t k = 0; k < width; k++) {
                int64_t h = (int64_t)k / c->hs, d = (int64_t)k % c->hs;
                buf[k] = fo_floatx((float)x[((b * c->heads + h) * n + i) * c->hs + d]);
            }
            upload(to + b * seq + i * row, buf, width * sizeof *buf, s);
        }
    }
    free(buf);
}

static float* to_floats(const double* x, size_t n) {
    float* f = (float*)host_alloc(n, sizeof *f);
    for (size_t i = 0; i < n; i++) {
        f[i] = (float)x[i];
    }
    return f;
}

static void run_forward(const FoSdpa* c, const FoSdpaArrays* a, double* q, double* k, double* v,
                        FoStream* s) {
    size_t nlse = (size_t)(c->nseq * c->heads * c->queries), nq = nlse * (size_t)c->hs;
    double *out = (double*)host_alloc(nq, sizeof *out), *lse = (double*)host_alloc(nlse, sizeof *lse);
    for (int64_t x = 0; x < c->nseq * c->heads; x++) {
        int64_t iq = x * c->queries * c->hs, ik = x * c->keys * c->hs;
        Head h = {(int)c->queries,
                  (int)c->keys,
                  (int)c->hs,
                  c->bottom_right ? (int)(c->keys - c->queries) : 0,
                  q + iq,
                  k + ik,
                  v + ik,
                  NULL,
                  NULL,
                  lse + x * c->queries,
                  out + iq,
                  NULL,
                  NULL,
                  NULL};
        head_forward(&h);
    }
    heads_write(c, a->out, c->out_seq, c->out_row, c->queries, out, s);
    float* f = to_floats(lse, nlse);
    upload(a->lse, f, nlse * sizeof *f, s);
    free(out), free(lse), free(f);
}

static void run_backward(const FoSdpa* c, const FoSdpaArrays* a, double* q, double* k, double* v,
                         FoStream* s) {
    size_t nlse = (size_t)(c->nseq * c->heads * c->queries), nq = nlse * (size_t)c->hs;
    size_t nk = (size_t)(c->nseq * c->heads * c->keys * c->hs);
    double* out = heads_read(c, a->out, c->out_seq, c->out_row, c->queries, s);
    double* dout = heads_read(c, a->dout, c->out_seq, c->out_row, c->queries, s);
    double *dq = (double*)host_alloc(nq, sizeof *dq), *dk = (double*)host_alloc(nk, sizeof *dk);
    double *dv = (double*)host_alloc(nk, sizeof *dv), *lse = (double*)host_alloc(nlse, sizeof *lse);
    float* f = (float*)host_alloc(nlse, sizeof *f);
    download(f, a->lse, nlse * sizeof *f, s);
    for (size_t i = 0; i < nlse; i++) {
        lse[i] = f[i];
    }
    for (int64_t x = 0; x < c->nseq * c->heads; x++) {
        int64_t iq = x * c->queries * c->hs, ik = x * c->keys * c->hs;
        Head h = {(int)c->queries,
                  (int)c->keys,
                  (int)c->hs,
                  c->bottom_right ? (int)(c->keys - c->queries) : 0,
                  q + iq,
                  k + ik,
                  v + ik,
                  dout + iq,
                  out + iq,
                  lse + x * c->queries,
                  NULL,
                  dq + iq,
                  dk + ik,
                  dv + ik};
        head_backward(&h);
    }
    heads_write(c, a->dq, c->dq_seq, c->dq_row, c->queries, dq, s);
    heads_write(c, a->dk, c->dkv_seq, c->dkv_row, c->keys, dk, s);
    heads_write(c, a->dv, c->dkv_seq, c->dkv_row, c->keys, dv, s);
    free(out), free(dout), free(dq), free(dk), free(dv), free(lse), free(f);
}

static void engine_run(void* ctx, const FoSdpa* c, const FoSdpaArrays* a, FoStream* s) {
    Engine* e = (Engine*)ctx;
    size_t nlse = (size_t)(c->nseq * c->heads * c->queries);
    CHECK(memcmp(c, &e->planned[e->nruns], sizeof *c) == 0);
    e->nruns++;
    CHECK((((uintptr_t)a->q | (uintptr_t)a->k | (uintptr_t)a->v | (uintptr_t)a->out | (uintptr_t)a->dout |
            (uintptr_t)a->dq | (uintptr_t)a->dk | (uintptr_t)a->dv) &
           15) == 0);
    CHECK((((uintptr_t)a->lse | (uintptr_t)a->delta | (uintptr_t)a->dq_sum | (uintptr_t)a->workspace) &
           255) == 0);
    CHECK(c->queries > 0 && c->keys > 0 && (!c->bottom_right || c->queries < c->keys));
    fill_nan(a->workspace, WORKSPACE, s);
    if (c->backward) { fill_nan(a->delta, nlse * sizeof(float), s); }
    if (c->backward && e->wants_dq_sum) { fill_nan(a->dq_sum, nlse * (size_t)c->hs * sizeof(float), s); }
    double* q = heads_read(c, a->q, c->q_seq, c->q_row, c->queries, s);
    double* k = heads_read(c, a->k, c->kv_seq, c->kv_row, c->keys, s);
    double* v = heads_read(c, a->v, c->kv_seq, c->kv_row, c->keys, s);
    if (c->backward) {
        run_backward(c, a, q, k, v, s);
    } else {
        run_forward(c, a, q, k, v, s);
    }
    free(q), free(k), free(v);
}

static FoSdpaEngine engine_start(Engine* e, int wants_dq_sum) {
    memset(e, 0, sizeof *e);
    e->refuse_at = -1;
    e->wants_dq_sum = wants_dq_sum;
    FoSdpaEngine engine = {e, engine_plan, engine_run};
    return engine;
}

// ---- shapes -----------------------------------------------------------------------------------------------
typedef struct {
    FoDevice* d;
    FoStream* s;
    FoLayout l;
    int NH, hs;
    size_t N, C;
    floatX *qkv, *out, *dout, *grads; // of the device; grads [N, 3C]
    float *lse, *dq;
    floatX *hqkv, *hout, *hdout; // of the host: inputs, and out as forward should give it
    float *hlse, *want_out, *want_dqkv;
} Case;

static float* floats(const floatX* x, size_t n) {
    float* f = (float*)host_alloc(n, sizeof *f);
    for (size_t i = 0; i < n; i++) {
        f[i] = fo_float(x[i]);
    }
    return f;
}

// one part of a head (q, k, v of rows of 3C; or rows of C) in order of positions, and back
static void head_rows(const Case* c, int b, int part, int h, int width, const floatX* from, double* rows) {
    for (int t = 0; t < c->l.T; t++) {
        for (int d = 0; d < c->hs; d++) {
            size_t at = fo_layout_row(c->l, b, t) * (size_t)width * c->C + (size_t)part * c->C;
            rows[t * c->hs + d] = fo_float(from[at + (size_t)(h * c->hs + d)]);
        }
    }
}
static void rows_of_head(const Case* c, int b, int part, int h, int width, float* to, const double* rows) {
    for (int t = 0; t < c->l.T; t++) {
        for (int d = 0; d < c->hs; d++) {
            size_t at = fo_layout_row(c->l, b, t) * (size_t)width * c->C + (size_t)part * c->C;
            to[at + (size_t)(h * c->hs + d)] = (float)rows[t * c->hs + d];
        }
    }
}

static void oracle(Case* c) {
    int T = c->l.T, n = T * c->hs;
    double *x[5], *g[4], *lse = (double*)host_alloc((size_t)T, sizeof *lse);
    for (int b = 0; b < c->l.B; b++) {
        for (int h = 0; h < c->NH; h++) {
            for (int i = 0; i < 5; i++) {
                x[i] = (double*)host_alloc((size_t)n, sizeof *x[i]);
            }
            for (int i = 0; i < 4; i++) {
                g[i] = (double*)host_alloc((size_t)n, sizeof *g[i]);
            }
            for (int i = 0; i < 3; i++) {
                head_rows(c, b, i, h, 3, c->hqkv, x[i]);
            }
            head_rows(c, b, 0, h, 1, c->hdout, x[3]);
            Head head = {T, T, c->hs, 0, x[0], x[1], x[2], x[3], x[4], lse, g[3], g[0], g[1], g[2]};
            head_forward(&head);
            rows_of_head(c, b, 0, h, 1, c->want_out, g[3]);
            for (int t = 0; t < T; t++) {
                c->hlse[fo_layout_row(c->l, b, t) * (size_t)c->NH + (size_t)h] = (float)lse[t];
            }
            memcpy(x[4], g[3], (size_t)n * sizeof(double));
            head_backward(&head);
            for (int i = 0; i < 3; i++) {
                rows_of_head(c, b, i, h, 3, c->want_dqkv, g[i]);
            }
            for (int i = 0; i < 5; i++) {
                free(x[i]);
            }
            for (int i = 0; i < 4; i++) {
                free(g[i]);
            }
        }
    }
    free(lse);
}

static Case case_make(FoDevice* d, FoStream* s, FoLayout l, int NH, int hs) {
    Case c = {d,
              s,
              l,
              NH,
              hs,
              (size_t)l.B * (size_t)l.T,
              (size_t)NH * (size_t)hs,
              NULL,
              NULL,
              NULL,
              NULL,
              NULL,
              NULL,
              NULL,
              NULL,
              NULL,
              NULL,
              NULL,
              NULL};
    size_t n1 = c.N * c.C, nl = c.N * (size_t)NH;
    c.qkv = (floatX*)fo_malloc(d, 3 * n1 * sizeof(floatX)),
    c.grads = (floatX*)fo_malloc(d, 3 * n1 * sizeof(floatX));
    c.out = (floatX*)fo_malloc(d, n1 * sizeof(floatX)), c.dout = (floatX*)fo_malloc(d, n1 * sizeof(floatX));
    c.lse = (float*)fo_malloc(d, nl * sizeof(float)), c.dq = (float*)fo_malloc(d, n1 * sizeof(float));
    c.hqkv = (floatX*)host_alloc(3 * n1, sizeof(floatX)), c.hdout = (floatX*)host_alloc(n1, sizeof(floatX));
    c.hout = (floatX*)host_alloc(n1, sizeof(floatX)), c.hlse = (float*)host_alloc(nl, 4);
    c.want_out = (float*)host_alloc(n1, 4), c.want_dqkv = (float*)host_alloc(3 * n1, 4);
    for (size_t i = 0; i < 3 * n1; i++) {
        c.hqkv[i] = fo_floatx(random_float());
    }
    for (size_t i = 0; i < n1; i++) {
        c.hdout[i] = fo_floatx(random_float());
    }
    oracle(&c);
    for (size_t i = 0; i < n1; i++) {
        c.hout[i] = fo_floatx(c.want_out[i]);
    }
    return c;
}

static void case_free(Case* c) {
    fo_free(c->d, c->qkv), fo_free(c->d, c->out), fo_free(c->d, c->dout), fo_free(c->d, c->grads);
    fo_free(c->d, c->lse), fo_free(c->d, c->dq);
    free(c->hqkv), free(c->hout), free(c->hdout), free(c->hlse), free(c->want_out), free(c->want_dqkv);
}

// ---- tests ------------------------------------------------------------------------------------------------
static const double TOL = FO_FLOATX == FO_BF16 ? 6 * 0x1p-9 : 1e-5;

/* qkv of the device, for a call for rows [row0, row0 + n): what it must not read is NaN. Its keys and values
 * are made so on another stream, while the call runs: reading them is a race.
 */
static void upload_visible(const Case* c, const floatX* nan, size_t row0, size_t n, FoStream* other) {
    size_t width = 3 * c->C, nkv = 2 * c->C * sizeof(floatX);
    fill_nan(c->qkv, c->N * width * sizeof(floatX), c->s);
    for (int b = 0; b < c->l.B; b++) {
        int needed = 0;
        for (int t = 0; t < c->l.T; t++) {
            size_t row = fo_layout_row(c->l, b, t);
            if (row < row0 || row >= row0 + n) { continue; }
            fo_upload(c->qkv + row * width, c->hqkv + row * width, c->C * sizeof(floatX), c->s);
            needed = t + 1;
        }
        for (int t = 0; t < c->l.T; t++) {
            size_t k = fo_layout_row(c->l, b, t) * width + c->C;
            if (t < needed) {
                fo_upload(c->qkv + k, c->hqkv + k, nkv, c->s);
            } else {
                fo_upload(c->qkv + k, nan, nkv, other);
            }
        }
    }
}

// in calls of `cut` rows, the last first; ncalls: that the first of them makes, 0: any number
static void test_forward(const Case* c, size_t cut, int ncalls) {
    size_t n1 = c->N * c->C, nl = c->N * (size_t)c->NH, ncuts = (c->N + cut - 1) / cut;
    CHECK_AT("forward B=%d T=%d P=%d zigzag=%d NH=%d hs=%d, %zu rows a call", c->l.B, c->l.T, c->l.P,
             c->l.zigzag, c->NH, c->hs, cut);
    FoStream* other = fo_stream_create(c->d, "other");
    floatX* nan = (floatX*)host_alloc(2 * c->C, sizeof *nan);
    memset(nan, 0xff, 2 * c->C * sizeof *nan);
    fill_nan(c->out, n1 * sizeof(floatX), c->s), fill_nan(c->lse, nl * sizeof(float), c->s);
    for (size_t i = ncuts; i-- > 0;) {
        size_t row0 = i * cut, n = c->N - row0 < cut ? c->N - row0 : cut;
        Engine e;
        FoSdpaEngine engine = engine_start(&e, 0);
        upload_visible(c, nan, row0, n, other);
        CHECK(fo__sdpa_forward(&engine, c->out, c->lse, c->qkv, row0, n, c->l, c->NH, c->hs, c->s) == 1);
        CHECK(e.nruns == e.nplans);
        if (i == 0 && ncalls > 0) { CHECK(e.nruns == ncalls); }
        fo_stream_sync(other);
    }
    fo_stream_destroy(other);
    free(nan);
    floatX* out = (floatX*)host_alloc(n1, sizeof *out);
    float* lse = (float*)host_alloc(nl, sizeof *lse);
    download(out, c->out, n1 * sizeof *out, c->s), download(lse, c->lse, nl * sizeof *lse, c->s);
    float* f = floats(out, n1);
    CHECK_CLOSE(f, c->want_out, n1, TOL);
    CHECK_CLOSE(lse, c->hlse, nl, 1e-6);
    free(out), free(lse), free(f);
}

static void upload_inputs(const Case* c) {
    size_t n1 = c->N * c->C;
    upload(c->qkv, c->hqkv, 3 * n1 * sizeof(floatX), c->s),
        upload(c->dout, c->hdout, n1 * sizeof(floatX), c->s);
    upload(c->out, c->hout, n1 * sizeof(floatX), c->s);
    upload(c->lse, c->hlse, c->N * (size_t)c->NH * sizeof(float), c->s);
}

static void test_backward(const Case* c, size_t cut, int wants_dq_sum) {
    size_t n3 = c->N * 3 * c->C;
    CHECK_AT("backward B=%d T=%d P=%d zigzag=%d NH=%d hs=%d, %zu rows a call, wants_dq_sum=%d", c->l.B,
             c->l.T, c->l.P, c->l.zigzag, c->NH, c->hs, cut, wants_dq_sum);
    upload_inputs(c);
    fill_nan(c->grads, n3 * sizeof(floatX), c->s);
    for (size_t row0 = 0; row0 < c->N; row0 += cut) {
        Engine e;
        FoSdpaEngine engine = engine_start(&e, wants_dq_sum);
        CHECK(fo__sdpa_backward(&engine, c->grads, c->dout, c->qkv, c->out, c->lse, row0, cut, c->l, c->NH,
                                c->hs, c->s) == 1);
        CHECK(e.nruns == 1 && e.nplans == 1);
    }
    floatX* got = (floatX*)host_alloc(n3, sizeof *got);
    download(got, c->grads, n3 * sizeof *got, c->s);
    float* f = floats(got, n3);
    CHECK_CLOSE(f, c->want_dqkv, n3, TOL);
    free(got), free(f);
}

// after each call its dk and dv are right and others' rows as they were; dq after the last
static void test_backward_kv(const Case* c, size_t cut, int wants_dq_sum, int ncalls) {
    size_t n1 = c->N * c->C, width = 2 * c->C;
    CHECK_AT("by keys B=%d T=%d P=%d zigzag=%d NH=%d hs=%d, %zu rows a call, wants_dq_sum=%d", c->l.B, c->l.T,
             c->l.P, c->l.zigzag, c->NH, c->hs, cut, wants_dq_sum);
    upload_inputs(c);
    fill_nan(c->grads, 2 * n1 * sizeof(floatX), c->s);
    fo_zero(c->dq, n1 * sizeof(float), c->s);
    floatX* got = (floatX*)host_alloc(2 * n1, sizeof *got);
    float *want = (float*)host_alloc(2 * n1, 4), *want_dq = (float*)host_alloc(n1, 4),
          *dq = (float*)host_alloc(n1, 4);
    for (size_t row = 0; row < c->N; row++) {
        memcpy(want_dq + row * c->C, c->want_dqkv + row * 3 * c->C, c->C * sizeof *want);
        memcpy(want + row * width, c->want_dqkv + row * 3 * c->C + c->C, width * sizeof *want);
    }
    for (size_t row0 = c->N; row0 > 0;) {
        Engine e;
        FoSdpaEngine engine = engine_start(&e, wants_dq_sum);
        row0 -= cut;
        CHECK(fo__sdpa_backward_kv(&engine, c->dq, c->grads, c->dout, c->qkv, c->out, c->lse, row0, cut, c->l,
                                   c->NH, c->hs, c->s) == 1);
        CHECK(e.nruns == e.nplans);
        if (row0 == 0) { CHECK(e.nruns == ncalls); }
        download(got, c->grads, 2 * n1 * sizeof *got, c->s);
        float* f = floats(got, 2 * n1);
        CHECK_CLOSE(f + row0 * width, want + row0 * width, (c->N - row0) * width, TOL);
        size_t left = 0;
        while (left < row0 * width && f[left] != f[left]) {
            left++;
        }
        CHECK(left == row0 * width);
        free(f);
    }
    download(dq, c->dq, n1 * sizeof *dq, c->s);
    CHECK_CLOSE(dq, want_dq, n1, 2 * TOL);
    free(got), free(want), free(want_dq), free(dq);
}

// a call that the engine refuses, the first or a later one, leaves all as it was; some are never asked of it
static void test_refusals(Case* c) {
    size_t n1 = c->N * c->C;
    floatX* got = (floatX*)host_alloc(n1, sizeof *got);
    CHECK_AT("refusals");
    upload_inputs(c);
    fill_nan(c->out, n1 * sizeof(floatX), c->s);
    for (int at = 0; at < 2; at++) {
        Engine e;
        FoSdpaEngine engine = engine_start(&e, 1);
        e.refuse_at = at;
        CHECK(fo__sdpa_forward(&engine, c->out, c->lse, c->qkv, 0, c->N, c->l, c->NH, c->hs, c->s) == 0);
        CHECK(e.nplans == at && e.nruns == 0);
    }
    download(got, c->out, n1 * sizeof *got, c->s);
    size_t left = 0;
    while (left < n1 && fo_float(got[left]) != fo_float(got[left])) {
        left++;
    }
    CHECK(left == n1);
    Engine e;
    FoSdpaEngine engine = engine_start(&e, 1);
    CHECK(fo__sdpa_forward(&engine, c->out, c->lse, c->qkv, 0, c->N, c->l, 1, 12, c->s) == 0); // hs
    CHECK(fo__sdpa_forward(&engine, c->out, c->lse, c->qkv + 1, 0, 1, c->l, c->NH, c->hs, c->s) == 0);
    CHECK(fo__sdpa_backward(&engine, c->grads, c->dout, c->qkv, c->out + 1, c->lse, 0, c->N, c->l, c->NH,
                            c->hs, c->s) == 0);
    CHECK(fo__sdpa_backward_kv(&engine, c->dq, c->grads, c->dout + 1, c->qkv, c->out, c->lse, 0, c->N, c->l,
                               c->NH, c->hs, c->s) == 0);
    CHECK(e.nplans == 0);
    free(got);
}

static void test_layout(FoDevice* d, FoStream* s, FoLayout l, int NH, int hs) {
    static const size_t odd[] = {100, 37, 16, 7};
    Case c = case_make(d, s, l, NH, hs);
    size_t shard = c.N / (size_t)l.P;
    int zigzag = l.zigzag && l.P > 1;
    test_forward(&c, c.N, zigzag ? 2 * l.P - 1 : 1);
    test_forward(&c, shard, zigzag ? 2 : l.B % l.P == 0 ? 1 : 0);
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        test_forward(&c, odd[i], 0);
    }
    for (int wants_dq_sum = 0; wants_dq_sum < 2; wants_dq_sum++) {
        test_backward(&c, c.N, wants_dq_sum);
        if (!l.zigzag) { test_backward(&c, (size_t)l.T, wants_dq_sum); }
        test_backward_kv(&c, c.N, wants_dq_sum, 1);
        if (l.zigzag || l.B % l.P == 0) { test_backward_kv(&c, shard, wants_dq_sum, zigzag ? 2 : 1); }
        if (l.P == 4) { test_backward_kv(&c, 2 * shard, wants_dq_sum, zigzag ? 4 : 1); }
    }
    if (zigzag) { test_refusals(&c); }
    case_free(&c);
}

int main(void) {
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "test");
    test_layout(d, s, (FoLayout){3, 20, 1, 0}, 2, 8);
    test_layout(d, s, (FoLayout){4, 25, 2, 0}, 3, 16);
    test_layout(d, s, (FoLayout){2, 32, 1, 1}, 3, 8);
    test_layout(d, s, (FoLayout){2, 48, 2, 1}, 3, 8);
    test_layout(d, s, (FoLayout){3, 36, 3, 1}, 1, 24);
    test_layout(d, s, (FoLayout){1, 64, 4, 1}, 5, 8);
    test_layout(d, s, (FoLayout){4, 24, 4, 1}, 2, 8);
    test_layout(d, s, (FoLayout){4, 16, 4, 0}, 2, 8);
    fo_stream_destroy(s);
    CHECK(fo_device_nbytes(d) == 0);
    fo_device_close(d);
    return check_report();
}
