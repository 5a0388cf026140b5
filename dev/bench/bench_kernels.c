/* bench_kernels.c -- every operation of fo_ops.h at the shapes of GPT-2 124M and 1558M, on any device:
 * kernels beside the time that their bytes take at the copy rate of the device, GEMMs and attention beside a
 * large GEMM.
 *
 *   bench_kernels [--model 124M|1558M] [--only kernels|gemms|attention] [--rows N] [--scale S] [--rounds N]
 *                 [--json FILE]
 *
 * One rank. A time is the median over rounds. In a round an operation is queued again and again, on several
 * sets of its arrays in turn, so that they don't come from a cache; the host's clock is read before and after
 * all of it.
 */
#include "flashoverlap/fo_ops.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

// ---- shapes -----------------------------------------------------------------------------------------------
enum { HS = 64, HEAD_ROWS = 1024, PARTS = 8, MAX_ROUNDS = 101 }; // the head goes in slices of HEAD_ROWS rows

typedef struct {
    const char* name;
    size_t n, nparams, ncopied; // rows; parameters; floats of the copy whose rate is the device's
    int C, NH, V, T;
} Model;

static const Model MODELS[] = {{"124M", 65536, 124475904, 1 << 28, 768, 12, 50304, 1024},
                               {"1558M", 16384, 1557686400, 1 << 28, 1600, 25, 50304, 1024}};
enum { NMODELS = sizeof MODELS / sizeof *MODELS };

typedef struct {
    const char *model, *only, *json; // NULL: all, none
    size_t rows;                     // instead of the models', or 0
    int scale, rounds;
} Options;

static size_t at_least(size_t n, size_t least) {
    return n > least ? n : least;
}

// rows, heads, vocabulary, length of a sequence and parameters, all divided by `scale`
static Model scaled(const Model* m, const Options* o) {
    Model d = *m;
    size_t s = (size_t)o->scale;
    d.T = (int)at_least((size_t)m->T / s, 64);
    d.n = (o->rows ? o->rows : at_least(m->n / s, 256)) / (size_t)d.T * (size_t)d.T;
    d.NH = (int)at_least((size_t)m->NH / s, 1);
    d.C = HS * d.NH;
    d.V = (int)(at_least((size_t)m->V / s, 128) / 128 * 128);
    d.nparams = at_least(m->nparams / s, 1024);
    d.ncopied = at_least(m->ncopied / s, 1024);
    return d;
}

// ---- an operation's arrays --------------------------------------------------------------------------------
/* An operation is one function that asks for its arrays in order and then runs. It is called to add up their
 * sizes (PLAN: no array exists), to fill them, and to run.
 */
typedef enum { PLAN, FILL, RUN } Pass;
enum { READ = 1, WRITE = 1, BOTH = 2 }; // how often an array's bytes are moved

// of a GEMM: [n, K] and [n, OC] rows, [OC, K] weights
typedef struct {
    size_t n;
    int K, OC;
} Gemm;

enum { NRANDOM = 1 << 20 };
typedef struct {
    Pass pass;
    FoStream* s;
    char* base;   // of this set of arrays
    size_t used;  // bytes of it asked for so far
    double moved; // bytes read and written
    double flops;
    Gemm gemm;
    floatX* random_x; // [NRANDOM], host memory
    float* random_f;
} Call;

static void* carve(Call* c, int passes, size_t nbytes) {
    void* p = c->pass == PLAN ? NULL : c->base + c->used;
    c->used += (nbytes + 255) / 256 * 256;
    c->moved += (double)passes * (double)nbytes;
    return p;
}

// the block of host memory, again and again
static void fill(void* p, size_t nbytes, const void* block, size_t block_nbytes, FoStream* s) {
    size_t done = nbytes < block_nbytes ? nbytes : block_nbytes;
    fo_upload(p, block, done, s);
    while (done < nbytes) {
        size_t n = nbytes - done < done ? nbytes - done : done;
        fo_copy((char*)p + done, p, n, s);
        done += n;
    }
}

static floatX* xs(Call* c, int passes, size_t nelem) {
    floatX* p = (floatX*)carve(c, passes, nelem * sizeof *p);
    if (c->pass == FILL) { fill(p, nelem * sizeof *p, c->random_x, NRANDOM * sizeof *p, c->s); }
    return p;
}

static float* fs(Call* c, int passes, size_t nelem) {
    float* p = (float*)carve(c, passes, nelem * sizeof *p);
    if (c->pass == FILL) { fill(p, nelem * sizeof *p, c->random_f, NRANDOM * sizeof *p, c->s); }
    return p;
}

// (first + i * step) % mod, i < n
static int* ints(Call* c, size_t n, size_t first, size_t step, size_t mod) {
    int* p = (int*)carve(c, READ, n * sizeof *p);
    if (c->pass == FILL) {
        int* host = (int*)malloc(n * sizeof *host);
        fo_require(host != NULL, "out of memory");
        for (size_t i = 0; i < n; i++) {
            host[i] = (int)((first + i * step) % mod);
        }
        fo_upload(p, host, n * sizeof *p, c->s);
        fo_stream_sync(c->s);
        free(host);
    }
    return p;
}

enum { STRIDE = 7919 }; // prime: rows in no order that a cache likes

// ---- kernels ----------------------------------------------------------------------------------------------
static void copy(Call* c, const Model* d) {
    float *out = fs(c, WRITE, d->ncopied), *inp = fs(c, READ, d->ncopied);
    if (c->pass == RUN) { fo_copy(out, inp, d->ncopied * sizeof *out, c->s); }
}

static void zero(Call* c, const Model* d) {
    float* out = fs(c, WRITE, d->nparams);
    if (c->pass == RUN) { fo_zero(out, d->nparams * sizeof *out, c->s); }
}

static void gather_rows(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C;
    floatX *out = xs(c, WRITE, nelem), *inp = xs(c, READ, nelem);
    int* idx = ints(c, d->n, 0, STRIDE, d->n);
    if (c->pass == RUN) { fo_gather_rows(out, inp, idx, d->n, d->C, c->s); }
}

// each row of the table gets four
static void scatter_add_rows(Call* c, const Model* d) {
    size_t nuniq = d->n / 4, n = 4 * nuniq;
    float* out = fs(c, BOTH, nuniq * (size_t)d->C);
    floatX* rows = xs(c, READ, n * (size_t)d->C);
    int *dst = ints(c, nuniq, 0, 1, nuniq), *start = ints(c, nuniq + 1, 0, 4, n + 1);
    int* order = ints(c, n, 0, STRIDE, n);
    if (c->pass == RUN) { fo_scatter_add_rows(out, rows, dst, start, order, nuniq, d->C, c->s); }
}

static void add_rows(Call* c, const Model* d) {
    size_t n = d->n / 4;
    float *out = fs(c, BOTH, n * (size_t)d->C), *rows = fs(c, READ, n * (size_t)d->C);
    int* dst = ints(c, n, 0, STRIDE, n);
    if (c->pass == RUN) { fo_add_rows(out, rows, dst, n, d->C, c->s); }
}

static void encoder_forward(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C;
    floatX *out = xs(c, WRITE, nelem), *rows = xs(c, READ, nelem);
    floatX* wpe = xs(c, READ, (size_t)d->T * (size_t)d->C);
    int *tok = ints(c, d->n, 0, 1, d->n), *pos = ints(c, d->n, 0, 1, (size_t)d->T);
    if (c->pass == RUN) { fo_encoder_forward(out, rows, wpe, tok, pos, d->n, d->C, c->s); }
}

static void layernorm_forward(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C, C = (size_t)d->C;
    floatX *out = xs(c, WRITE, nelem), *inp = xs(c, READ, nelem);
    float *mean = fs(c, WRITE, d->n), *rstd = fs(c, WRITE, d->n);
    floatX *weight = xs(c, READ, C), *bias = xs(c, READ, C);
    if (c->pass == RUN) { fo_layernorm_forward(out, mean, rstd, inp, weight, bias, d->n, d->C, c->s); }
}

static void layernorm_backward(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C, C = (size_t)d->C;
    floatX *dinp = xs(c, BOTH, nelem), *dout = xs(c, READ, nelem), *inp = xs(c, READ, nelem);
    float *dweight = fs(c, BOTH, C), *dbias = fs(c, BOTH, C);
    float *mean = fs(c, READ, d->n), *rstd = fs(c, READ, d->n);
    floatX* weight = xs(c, READ, C);
    if (c->pass == RUN) {
        fo_layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd, d->n, d->C, c->s);
    }
}

static void bias_backward(Call* c, const Model* d) {
    float* dbias = fs(c, BOTH, 4 * (size_t)d->C);
    floatX* dout = xs(c, READ, d->n * 4 * (size_t)d->C);
    if (c->pass == RUN) { fo_bias_backward(dbias, dout, d->n, 4 * d->C, c->s); }
}

static void gelu_forward(Call* c, const Model* d) {
    size_t nelem = d->n * 4 * (size_t)d->C;
    floatX *out = xs(c, WRITE, nelem), *inp = xs(c, READ, nelem);
    if (c->pass == RUN) { fo_gelu_forward(out, inp, nelem, c->s); }
}

static void gelu_backward(Call* c, const Model* d) {
    size_t nelem = d->n * 4 * (size_t)d->C;
    floatX *dinp = xs(c, WRITE, nelem), *dout = xs(c, READ, nelem), *inp = xs(c, READ, nelem);
    if (c->pass == RUN) { fo_gelu_backward(dinp, dout, inp, nelem, c->s); }
}

// the closing of a reduce-scatter over PARTS ranks, onto the residual
static void accumulate(Call* c, const Model* d) {
    size_t n = d->n / PARTS, nelem = n * (size_t)d->C;
    floatX* out = xs(c, BOTH, nelem);
    floatX* bias = xs(c, READ, (size_t)d->C);
    const void* parts[PARTS];
    for (int i = 0; i < PARTS; i++) {
        parts[i] = xs(c, READ, nelem);
    }
    if (c->pass == RUN) { fo_accumulate(out, parts, out, bias, n, d->C, PARTS, FO_FLOATX, c->s); }
}

static void add(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C;
    floatX *acc = xs(c, BOTH, nelem), *part = xs(c, READ, nelem);
    if (c->pass == RUN) { fo_add(acc, part, nelem, FO_FLOATX, c->s); }
}

// a layer's gradient of fc1, of PARTS replicas
static void sum(Call* c, const Model* d) {
    size_t nelem = 4 * (size_t)d->C * (size_t)d->C;
    float* out = fs(c, WRITE, nelem);
    const float* parts[PARTS];
    for (int i = 0; i < PARTS; i++) {
        parts[i] = fs(c, READ, nelem);
    }
    if (c->pass == RUN) { fo_sum(out, parts, nelem, PARTS, c->s); }
}

static void softmax_stats(Call* c, const Model* d) {
    size_t V = (size_t)d->V;
    FoSoftmaxStat* stats = (FoSoftmaxStat*)fs(c, WRITE, 3 * HEAD_ROWS);
    floatX* logits = xs(c, READ, HEAD_ROWS * V);
    int* targets = ints(c, HEAD_ROWS, 0, STRIDE, V);
    if (c->pass == RUN) { fo_softmax_stats(stats, logits, targets, HEAD_ROWS, d->V, d->V, 0, c->s); }
}

static void softmax_loss(Call* c, const Model* d) {
    size_t V = (size_t)d->V;
    float* losses = fs(c, WRITE, HEAD_ROWS);
    floatX* logits = xs(c, BOTH, HEAD_ROWS * V);
    FoSoftmaxStat* stats = (FoSoftmaxStat*)fs(c, READ, 3 * HEAD_ROWS);
    int* targets = ints(c, HEAD_ROWS, 0, STRIDE, V);
    if (c->pass == RUN) {
        fo_softmax_loss(losses, logits, stats, targets, 1e-3f, 0.0f, HEAD_ROWS, d->V, d->V, 0, 1, c->s);
    }
}

static void adamw(Call* c, const Model* d) {
    FoAdamw a = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 1};
    float *master = fs(c, BOTH, d->nparams), *m = fs(c, BOTH, d->nparams), *v = fs(c, BOTH, d->nparams);
    float* grad = fs(c, READ, d->nparams);
    void* param = FO_FLOATX == FO_FP32 ? (void*)master : (void*)xs(c, WRITE, d->nparams);
    if (c->pass == RUN) { fo_adamw_update((floatX*)param, master, m, v, grad, d->nparams, a, c->s); }
}

static void square_sum(Call* c, const Model* d) {
    double* out = (double*)fs(c, BOTH, 2);
    float* x = fs(c, READ, d->nparams);
    if (c->pass == RUN) { fo_square_sum(out, x, d->nparams, c->s); }
}

static FoLayout layout_of(const Model* d) {
    FoLayout l = {(int)(d->n / (size_t)d->T), d->T, 1, 0};
    return l;
}

static void attention_cache(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C;
    floatX* cache = xs(c, WRITE, 2 * nelem);
    floatX* qkv = xs(c, READ, 3 * nelem);
    c->moved -= (double)(nelem * sizeof *qkv); // the queries are not read
    if (c->pass == RUN) { fo_attention_cache(cache, qkv, layout_of(d), d->T, d->NH, HS, c->s); }
}

// the last token of sequences of T
static void attention_decode(Call* c, const Model* d) {
    size_t B = d->n / (size_t)d->T, C = (size_t)d->C;
    floatX *out = xs(c, WRITE, B * C), *cache = xs(c, READ, 2 * d->n * C), *qkv = xs(c, READ, 3 * B * C);
    int* pos = ints(c, B, (size_t)d->T - 1, 0, (size_t)d->T);
    if (c->pass == RUN) { fo_attention_decode(out, cache, qkv, pos, (int)B, d->T, d->NH, HS, c->s); }
}

// ---- attention --------------------------------------------------------------------------------------------
// pairs of a query and a key that it sees, of all heads
static double pairs_of(const Model* d) {
    return 0.5 * (double)d->n * ((double)d->T + 1.0) * d->NH;
}

static void attention_forward(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C;
    floatX *out = xs(c, WRITE, nelem), *qkv = xs(c, READ, 3 * nelem);
    float* lse = fs(c, WRITE, d->n * (size_t)d->NH);
    c->flops = 4.0 * HS * pairs_of(d);
    if (c->pass == RUN) { fo_attention_forward(out, lse, qkv, 0, d->n, layout_of(d), d->NH, HS, c->s); }
}

static void attention_backward(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C;
    floatX *dqkv = xs(c, WRITE, 3 * nelem), *dout = xs(c, READ, nelem);
    floatX *qkv = xs(c, READ, 3 * nelem), *out = xs(c, READ, nelem);
    float* lse = fs(c, READ, d->n * (size_t)d->NH);
    c->flops = 10.0 * HS * pairs_of(d);
    if (c->pass == RUN) {
        fo_attention_backward(dqkv, dout, qkv, out, lse, 0, d->n, layout_of(d), d->NH, HS, c->s);
    }
}

static void attention_backward_kv(Call* c, const Model* d) {
    size_t nelem = d->n * (size_t)d->C;
    float* dq = fs(c, BOTH, nelem);
    floatX *dkv = xs(c, WRITE, 2 * nelem), *dout = xs(c, READ, nelem);
    floatX *qkv = xs(c, READ, 3 * nelem), *out = xs(c, READ, nelem);
    float* lse = fs(c, READ, d->n * (size_t)d->NH);
    c->flops = 10.0 * HS * pairs_of(d);
    if (c->pass == RUN) {
        fo_attention_backward_kv(dq, dkv, dout, qkv, out, lse, 0, d->n, layout_of(d), d->NH, HS, c->s);
    }
}

// ---- GEMMs ------------------------------------------------------------------------------------------------
typedef enum { NO_LAYER, QKV, PROJ, FC1, FC2, HEAD, SQUARE } Layer;

static Gemm gemm_of(const Model* d, Layer layer) {
    int C = d->C, side = d->n < 8192 ? (int)d->n : 8192;
    const Gemm g[] = {
        [NO_LAYER] = {0, 0, 0},        [QKV] = {d->n, C, 3 * C}, [PROJ] = {d->n, C, C},
        [FC1] = {d->n, C, 4 * C},      [FC2] = {d->n, 4 * C, C}, [HEAD] = {HEAD_ROWS, C, d->V},
        [SQUARE] = {d->n, side, side},
    };
    return g[layer];
}

static floatX* rows_k(Call* c, int passes) {
    return xs(c, passes, c->gemm.n * (size_t)c->gemm.K);
}
static floatX* rows_oc(Call* c, int passes) {
    return xs(c, passes, c->gemm.n * (size_t)c->gemm.OC);
}
static floatX* weights(Call* c) {
    c->flops = 2.0 * (double)c->gemm.n * c->gemm.K * c->gemm.OC;
    return xs(c, READ, (size_t)c->gemm.OC * (size_t)c->gemm.K);
}

static void forward(Call* c, const Model* d) {
    (void)d;
    Gemm g = c->gemm;
    floatX *out = rows_oc(c, WRITE), *inp = rows_k(c, READ), *weight = weights(c);
    floatX* bias = xs(c, READ, (size_t)g.OC);
    if (c->pass == RUN) { fo_matmul_forward(out, inp, weight, bias, g.n, g.K, g.OC, FO_FLOATX, c->s); }
}

static void forward_gelu(Call* c, const Model* d) {
    (void)d;
    Gemm g = c->gemm;
    floatX *out = rows_oc(c, WRITE), *gelu = rows_oc(c, WRITE), *inp = rows_k(c, READ), *weight = weights(c);
    floatX* bias = xs(c, READ, (size_t)g.OC);
    if (c->pass == RUN) { fo_matmul_gelu_forward(out, gelu, inp, weight, bias, g.n, g.K, g.OC, c->s); }
}

// by one kernel each, if the device has one that does both
static void fused(Call* c, const Model* d, void (*call)(Call*, const Model*)) {
    fo_device_fuse_gelu(fo_stream_device(c->s), 2);
    call(c, d);
    fo_device_fuse_gelu(fo_stream_device(c->s), 0);
}

static void forward_gelu_fused(Call* c, const Model* d) {
    fused(c, d, forward_gelu);
}

static void forward_add(Call* c, const Model* d) {
    (void)d;
    Gemm g = c->gemm;
    float* out = fs(c, BOTH, g.n * (size_t)g.OC);
    floatX *inp = rows_k(c, READ), *weight = weights(c);
    if (c->pass == RUN) { fo_matmul_forward_add(out, inp, weight, g.n, g.K, g.OC, c->s); }
}

static void dgrad(Call* c, const Model* d) {
    (void)d;
    Gemm g = c->gemm;
    floatX *dinp = rows_k(c, WRITE), *dout = rows_oc(c, READ), *weight = weights(c);
    if (c->pass == RUN) { fo_matmul_dgrad(dinp, dout, weight, g.n, g.K, g.OC, FO_FLOATX, c->s); }
}

static void dgrad_gelu(Call* c, const Model* d) {
    (void)d;
    Gemm g = c->gemm;
    floatX *dinp = rows_k(c, WRITE), *dout = rows_oc(c, READ), *weight = weights(c), *pre = rows_k(c, READ);
    if (c->pass == RUN) { fo_matmul_gelu_dgrad(dinp, dout, weight, pre, g.n, g.K, g.OC, c->s); }
}

static void dgrad_gelu_fused(Call* c, const Model* d) {
    fused(c, d, dgrad_gelu);
}

static void dgrad_add(Call* c, const Model* d) {
    (void)d;
    Gemm g = c->gemm;
    float* dinp = fs(c, BOTH, g.n * (size_t)g.K);
    floatX *dout = rows_oc(c, READ), *weight = weights(c);
    if (c->pass == RUN) { fo_matmul_dgrad_add(dinp, dout, weight, g.n, g.K, g.OC, c->s); }
}

static void wgrad(Call* c, const Model* d) {
    (void)d;
    Gemm g = c->gemm;
    float* dweight = fs(c, BOTH, (size_t)g.OC * (size_t)g.K);
    floatX *dout = rows_oc(c, READ), *inp = rows_k(c, READ);
    c->flops = 2.0 * (double)g.n * g.K * g.OC;
    if (c->pass == RUN) { fo_matmul_wgrad(dweight, NULL, dout, inp, g.n, g.K, g.OC, c->s); }
}

// the half of the rows that the second of two owners has
static void wgrad_rows(Call* c, const Model* d) {
    (void)d;
    Gemm g = c->gemm;
    size_t half = (size_t)g.OC / 2;
    float* dweight = fs(c, BOTH, (size_t)g.OC * (size_t)g.K);
    floatX *dout = rows_oc(c, READ), *inp = rows_k(c, READ);
    c->flops = 2.0 * (double)g.n * g.K * (double)half;
    if (c->pass == RUN) {
        fo_matmul_wgrad_rows(dweight, dout, inp, (size_t)g.OC - half, half, g.n, g.K, g.OC, c->s);
    }
}

// ---- what is measured -------------------------------------------------------------------------------------
typedef enum { KERNEL, GEMM, ATTENTION } Kind;
static const char* const KINDS[] = {"kernels", "gemms", "attention"};

typedef struct {
    const char* name;
    Kind kind;
    void (*call)(Call* c, const Model* d);
    double limit; // of a kernel: demanded of its time / that of its bytes; 0: nothing
    Layer layer;
} Row;

static const Row ROWS[] = {
    {"zero", KERNEL, zero, 0.0, NO_LAYER},
    {"gather_rows", KERNEL, gather_rows, 1.25, NO_LAYER},
    {"scatter_add_rows", KERNEL, scatter_add_rows, 1.25, NO_LAYER},
    {"add_rows", KERNEL, add_rows, 1.25, NO_LAYER},
    {"encoder_forward", KERNEL, encoder_forward, 1.25, NO_LAYER},
    {"layernorm_forward", KERNEL, layernorm_forward, 1.25, NO_LAYER},
    {"layernorm_backward", KERNEL, layernorm_backward, 1.25, NO_LAYER},
    {"bias_backward", KERNEL, bias_backward, 1.25, NO_LAYER},
    {"gelu_forward", KERNEL, gelu_forward, 1.25, NO_LAYER},
    {"gelu_backward", KERNEL, gelu_backward, 1.25, NO_LAYER},
    {"accumulate, 8 parts", KERNEL, accumulate, 1.25, NO_LAYER},
    {"add", KERNEL, add, 1.25, NO_LAYER},
    {"sum, 8 parts", KERNEL, sum, 1.25, NO_LAYER},
    {"softmax_stats", KERNEL, softmax_stats, 1.15, NO_LAYER},
    {"softmax_loss", KERNEL, softmax_loss, 1.15, NO_LAYER},
    {"adamw_update", KERNEL, adamw, 1.15, NO_LAYER},
    {"square_sum", KERNEL, square_sum, 1.25, NO_LAYER},
    {"attention_cache", KERNEL, attention_cache, 1.25, NO_LAYER},
    {"attention_decode", KERNEL, attention_decode, 1.25, NO_LAYER},
    {"attention_forward", ATTENTION, attention_forward, 0.0, NO_LAYER},
    {"attention_backward", ATTENTION, attention_backward, 0.0, NO_LAYER},
    {"attention_backward_kv", ATTENTION, attention_backward_kv, 0.0, NO_LAYER},
    {"qkv forward", GEMM, forward, 0.0, QKV},
    {"qkv dgrad", GEMM, dgrad, 0.0, QKV},
    {"qkv dgrad, added", GEMM, dgrad_add, 0.0, QKV},
    {"qkv wgrad", GEMM, wgrad, 0.0, QKV},
    {"qkv wgrad, half", GEMM, wgrad_rows, 0.0, QKV},
    {"projection forward", GEMM, forward, 0.0, PROJ},
    {"projection forward, added", GEMM, forward_add, 0.0, PROJ},
    {"projection dgrad", GEMM, dgrad, 0.0, PROJ},
    {"projection wgrad", GEMM, wgrad, 0.0, PROJ},
    {"fc1 forward", GEMM, forward, 0.0, FC1},
    {"fc1 forward, gelu", GEMM, forward_gelu, 0.0, FC1},
    {"fc1 forward, gelu fused", GEMM, forward_gelu_fused, 0.0, FC1},
    {"fc1 dgrad", GEMM, dgrad, 0.0, FC1},
    {"fc1 wgrad", GEMM, wgrad, 0.0, FC1},
    {"fc2 forward", GEMM, forward, 0.0, FC2},
    {"fc2 dgrad", GEMM, dgrad, 0.0, FC2},
    {"fc2 dgrad, gelu", GEMM, dgrad_gelu, 0.0, FC2},
    {"fc2 dgrad, gelu fused", GEMM, dgrad_gelu_fused, 0.0, FC2},
    {"fc2 wgrad", GEMM, wgrad, 0.0, FC2},
    {"head forward", GEMM, forward, 0.0, HEAD},
    {"head dgrad", GEMM, dgrad, 0.0, HEAD},
    {"head wgrad", GEMM, wgrad, 0.0, HEAD},
};
enum { NROWS = sizeof ROWS / sizeof *ROWS };
static const Row COPY = {"copy", KERNEL, copy, 0.0, NO_LAYER};
static const Row LARGE = {"large GEMM", GEMM, forward, 0.0, SQUARE};

typedef struct {
    double ms, moved, flops; // ms 0: not measured
    Gemm gemm;
    size_t nbytes; // of one set of arrays
} Result;

typedef struct {
    Options o;
    FoDevice* device;
    FoStream* s;
    floatX* random_x;
    float* random_f;
    double copy_rate, gemm_rate; // bytes and flops a second
    Result result[NMODELS][NROWS];
} Bench;

// ---- time -------------------------------------------------------------------------------------------------
static int ascending(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

enum { MAX_SETS = 16, MAX_LAUNCHES = 400 };

// seconds of nlaunches launches on the sets of arrays in turn
static double run(Call* c, const Row* row, const Model* d, char* arena, int nsets, int nlaunches) {
    size_t nbytes = c->used;
    double start = fo_now();
    c->pass = RUN;
    for (int i = 0; i < nlaunches; i++) {
        c->base = arena + (size_t)(i % nsets) * nbytes, c->used = 0;
        row->call(c, d);
    }
    fo_stream_sync(c->s);
    return fo_now() - start;
}

static Result measure(Bench* b, const Row* row, const Model* d) {
    Call c = {.pass = PLAN,
              .s = b->s,
              .gemm = gemm_of(d, row->layer),
              .random_x = b->random_x,
              .random_f = b->random_f};
    row->call(&c, d);
    Result r = {0.0, c.moved, c.flops, c.gemm, c.used};
    // more than a cache holds, in as many sets as that needs
    size_t wanted = ((size_t)512 << 20) / (size_t)b->o.scale, available = fo_device_free_nbytes(b->device);
    int nsets = (int)(wanted / c.used) + 1, nlaunches;
    if (nsets > MAX_SETS) { nsets = MAX_SETS; }
    if (available / 8 * 7 < (size_t)nsets * c.used) { nsets = 1; }
    if (available / 8 * 7 < c.used) { return r; }
    size_t nbytes = c.used;
    char* arena = (char*)fo_malloc(b->device, (size_t)nsets * nbytes);
    for (int i = 0; i < nsets; i++) {
        c.pass = FILL, c.base = arena + (size_t)i * nbytes, c.used = 0;
        row->call(&c, d);
    }
    run(&c, row, d, arena, nsets, 1); // whatever a first call makes
    double seconds[MAX_ROUNDS], once = run(&c, row, d, arena, nsets, nsets) / nsets;
    nlaunches = once > 0.01 ? 1 : (int)(0.01 / (once + 1e-9)) + 1;
    if (nlaunches > MAX_LAUNCHES) { nlaunches = MAX_LAUNCHES; }
    for (int i = 0; i < b->o.rounds; i++) {
        seconds[i] = run(&c, row, d, arena, nsets, nlaunches) / nlaunches;
    }
    qsort(seconds, (size_t)b->o.rounds, sizeof *seconds, ascending);
    r.ms = 1e3 * seconds[b->o.rounds / 2];
    fo_free(b->device, arena);
    return r;
}

// ---- table ------------------------------------------------------------------------------------------------
static double floor_ms(const Bench* b, const Result* r) {
    return 1e3 * r->moved / b->copy_rate;
}

static const char* verdict(const Bench* b, const Row* row, const Result* r) {
    if (row->limit == 0.0) { return ""; }
    return r->ms <= row->limit * floor_ms(b, r) ? "met" : "NOT MET";
}

static void print_result(const Bench* b, const Row* row, const Result* r) {
    if (r->ms == 0.0) {
        printf("%-26s not measured: needs %.1f GiB\n", row->name, (double)r->nbytes / (double)(1 << 30));
    } else if (row->kind == KERNEL) {
        printf("%-26s %10.4f ms %10.2f MB %9.1f GB/s %8.2fx floor", row->name, r->ms, 1e-6 * r->moved,
               1e-6 * r->moved / r->ms, r->ms / floor_ms(b, r));
        if (row->limit > 0.0) { printf("  limit %.2f %s", row->limit, verdict(b, row, r)); }
        printf("\n");
    } else {
        double tflops = 1e-9 * r->flops / r->ms;
        printf("%-26s %10.4f ms %10.2f TFLOP/s %5.1f%% of the large GEMM", row->name, r->ms, tflops,
               100e12 * tflops / b->gemm_rate);
        if (row->kind == GEMM) { printf("  n %zu K %d OC %d", r->gemm.n, r->gemm.K, r->gemm.OC); }
        printf("\n");
    }
    fflush(stdout);
}

static void write_result(FILE* f, const Bench* b, const char* model, const Row* row, const Result* r) {
    fprintf(f, "\n{\"model\": \"%s\", \"kind\": \"%s\", \"name\": \"%s\", \"ms\": %.6f, \"bytes\": %.0f",
            model, KINDS[row->kind], row->name, r->ms, r->moved);
    if (row->kind == KERNEL) {
        fprintf(f, ", \"gb_s\": %.3f, \"x_floor\": %.4f", 1e-6 * r->moved / r->ms, r->ms / floor_ms(b, r));
        if (row->limit > 0.0) {
            fprintf(f, ", \"limit\": %.2f, \"met\": %s", row->limit,
                    strcmp(verdict(b, row, r), "met") == 0 ? "true" : "false");
        }
    } else {
        fprintf(f, ", \"flops\": %.0f, \"tflops\": %.4f, \"share_of_large_gemm\": %.4f", r->flops,
                1e-9 * r->flops / r->ms, 1e3 * r->flops / r->ms / b->gemm_rate);
    }
    if (row->kind == GEMM) {
        fprintf(f, ", \"n\": %zu, \"K\": %d, \"OC\": %d", r->gemm.n, r->gemm.K, r->gemm.OC);
    }
    fprintf(f, "}");
}

static void write_json(FILE* f, const Bench* b) {
    int first = 1;
    fprintf(f, "{\"device\": \"%s\", \"precision\": \"%s\", \"scale\": %d, \"rows\": %zu, \"rounds\": %d, ",
            fo_device_name(b->device), FO_FLOATX == FO_BF16 ? "bf16" : "fp32", b->o.scale, b->o.rows,
            b->o.rounds);
    fprintf(f, "\"copy_gb_s\": %.3f, \"large_gemm_tflops\": %.4f,\n\"results\": [", 1e-9 * b->copy_rate,
            1e-12 * b->gemm_rate);
    for (int m = 0; m < NMODELS; m++) {
        for (int i = 0; i < NROWS; i++) {
            if (b->result[m][i].ms == 0.0) { continue; }
            fprintf(f, "%s", first ? "" : ",");
            write_result(f, b, MODELS[m].name, &ROWS[i], &b->result[m][i]);
            first = 0;
        }
    }
    fprintf(f, "\n]}\n");
}

// ---- main -------------------------------------------------------------------------------------------------
static int one_of(const char* text, const char* a, const char* b, const char* c) {
    return strcmp(text, a) == 0 || strcmp(text, b) == 0 || (c && strcmp(text, c) == 0);
}

static int count_of(const char* name, const char* text, int most) {
    char* end;
    long n = strtol(text, &end, 10);
    if (end == text || *end || n < 1 || n > most) {
        fo_quit(1, "%s %s: want a whole number from 1 to %d", name, text, most);
    }
    return (int)n;
}

static void parse(Options* o, int argc, char** argv) {
    o->scale = 1, o->rounds = 5;
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!value) {
            fo_quit(1, "%s: want --model, --only, --rows, --scale, --rounds or --json and a value", name);
        }
        if (strcmp(name, "--model") == 0) {
            if (!one_of(value, MODELS[0].name, MODELS[1].name, NULL)) {
                fo_quit(1, "--model %s: want %s or %s", value, MODELS[0].name, MODELS[1].name);
            }
            o->model = value;
        } else if (strcmp(name, "--only") == 0) {
            if (!one_of(value, KINDS[0], KINDS[1], KINDS[2])) {
                fo_quit(1, "--only %s: want %s, %s or %s", value, KINDS[0], KINDS[1], KINDS[2]);
            }
            o->only = value;
        } else if (strcmp(name, "--rows") == 0) {
            o->rows = (size_t)count_of(name, value, 1 << 24);
            if (o->rows < 1024) { fo_quit(1, "--rows %s: want at least the 1024 of a sequence", value); }
        } else if (strcmp(name, "--scale") == 0) {
            o->scale = count_of(name, value, 1 << 16);
        } else if (strcmp(name, "--rounds") == 0) {
            o->rounds = count_of(name, value, MAX_ROUNDS);
        } else if (strcmp(name, "--json") == 0) {
            o->json = value;
        } else {
            fo_quit(1, "%s: unknown; want --model, --only, --rows, --scale, --rounds or --json", name);
        }
    }
}

static void make_random(Bench* b) {
    uint32_t seed = 1;
    b->random_x = (floatX*)malloc(NRANDOM * sizeof *b->random_x);
    b->random_f = (float*)malloc(NRANDOM * sizeof *b->random_f);
    fo_require(b->random_x && b->random_f, "out of memory");
    for (int i = 0; i < NRANDOM; i++) {
        seed = seed * 1664525u + 1013904223u;
        b->random_f[i] = (float)(seed >> 8) / (float)(1 << 24); // what has to be positive is fp32
        b->random_x[i] = fo_floatx(2.0f * b->random_f[i] - 1.0f);
    }
}

static void run_model(Bench* b, int m, int* njudged, int* nmet) {
    Model d = scaled(&MODELS[m], &b->o);
    printf("# %s: N %zu, C %d, %d heads, T %d, V %d, %zu parameters\n", d.name, d.n, d.C, d.NH, d.T, d.V,
           d.nparams);
    for (int i = 0; i < NROWS; i++) {
        const Row* row = &ROWS[i];
        Result* r = &b->result[m][i];
        if (b->o.only && strcmp(b->o.only, KINDS[row->kind]) != 0) { continue; }
        *r = measure(b, row, &d);
        print_result(b, row, r);
        if (row->limit > 0.0 && r->ms > 0.0) {
            ++*njudged;
            *nmet += strcmp(verdict(b, row, r), "met") == 0;
        }
    }
}

int main(int argc, char** argv) {
    static Bench b;
    int njudged = 0, nmet = 0;
    parse(&b.o, argc, argv);
    FILE* json = b.o.json ? fopen(b.o.json, "w") : NULL; // now, not after a minute of measuring
    if (b.o.json && !json) { fo_quit(1, "--json %s: %s", b.o.json, strerror(errno)); }
    b.device = fo_device_open(0, 1);
    b.s = fo_stream_create(b.device, "bench");
    make_random(&b);
    Model first = scaled(&MODELS[0], &b.o);
    Result rate = measure(&b, &COPY, &first);
    fo_require(rate.ms > 0.0, "no memory for a copy of %zu bytes", rate.nbytes);
    b.copy_rate = 1e3 * rate.moved / rate.ms;
    rate = measure(&b, &LARGE, &first);
    fo_require(rate.ms > 0.0, "no memory for a GEMM of %zu bytes", rate.nbytes);
    b.gemm_rate = 1e3 * rate.flops / rate.ms;
    printf("# %s, %s, medians of %d rounds\n", fo_device_name(b.device),
           FO_FLOATX == FO_BF16 ? "bf16" : "fp32", b.o.rounds);
    printf("# copy %.1f GB/s (read and write); large GEMM (n %zu, K %d, OC %d) %.2f TFLOP/s\n",
           1e-9 * b.copy_rate, rate.gemm.n, rate.gemm.K, rate.gemm.OC, 1e-12 * b.gemm_rate);
    printf("# floor: the bytes of an operation at the rate of the copy\n");
    for (int m = 0; m < NMODELS; m++) {
        if (!b.o.model || strcmp(b.o.model, MODELS[m].name) == 0) { run_model(&b, m, &njudged, &nmet); }
    }
    if (njudged > 0) {
        printf("# demands: %d of %d kernels within their limit of the floor\n", nmet, njudged);
    }
    if (json) {
        write_json(json, &b);
        if (fclose(json) != 0) { fo_quit(1, "--json %s: %s", b.o.json, strerror(errno)); }
    }
    free(b.random_x), free(b.random_f);
    fo_stream_destroy(b.s);
    fo_device_close(b.device);
    return 0;
}
