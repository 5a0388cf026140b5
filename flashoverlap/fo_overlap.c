/* fo_overlap.c -- the flash primitives of tensor parallelism. Beside it: arXiv 2604.24013, doc/overlap.md.
 *
 * fo_exec.c executes the plans, in every mode and topology; the primitives say what a chunk's computation is.
 */
#include "flashoverlap/fo_exec.h"
#include <stdlib.h>

FoOverlap* fo_overlap_create(const char* name, FoKind kind, FoMode mode, int m, FoTopology topology,
                             FoGroup* g, FoStream* compute, FoStream* comm) {
    char err[256];
    FoOverlap* o = (FoOverlap*)calloc(1, sizeof *o);
    fo_require(o != NULL, "out of memory");
    int P = fo_group_size(g);
    o->name = name, o->group = g, o->compute = compute, o->comm = comm;
    // one rank has nothing to hide: one chunk
    fo_require(fo_plan_init(&o->plan, kind, mode, P == 1 ? 1 : m, topology, P, fo_group_rank(g), err) == 0,
               "%s: %s", name, err);
    o->arrived = (FoEvent**)calloc((size_t)o->plan.nexchanges + 1, sizeof *o->arrived);
    o->computed = (FoEvent**)calloc((size_t)o->plan.ncomputes + 1, sizeof *o->computed);
    fo_require(o->arrived && o->computed, "out of memory");
    o->ready = fo_event_create();
    for (int e = 0; e < o->plan.nexchanges; e++) {
        o->arrived[e] = fo_event_create();
    }
    for (int k = 0; k < o->plan.ncomputes; k++) {
        o->computed[k] = fo_event_create();
    }
    return o;
}

void fo_overlap_destroy(FoOverlap* o) {
    if (!o) { return; }
    fo_stream_sync(o->comm); // at P = 1 nothing else waits for it
    fo_stream_sync(o->compute);
    fo_event_destroy(o->ready);
    for (int e = 0; e < o->plan.nexchanges; e++) {
        fo_event_destroy(o->arrived[e]);
    }
    for (int k = 0; k < o->plan.ncomputes; k++) {
        fo_event_destroy(o->computed[k]);
    }
    free(o->arrived);
    free(o->computed);
    fo_plan_free(&o->plan);
    free(o);
}

void fo_overlap_reset(FoOverlap* o) {
    o->exposed_ms = o->comm_ms = 0.0;
    o->nbytes_sent = o->nmessages = 0;
}

void fo_overlap_mark(FoOverlap* o) {
    if (o->plan.mode == FO_NONE) { return; } // the plain collective starts when it is called
    fo_event_record(o->ready, o->compute);
    o->marked = 1;
}

// rows of a shard
static size_t shard_rows(const FoOverlap* o, FoKind kind, size_t N) {
    const size_t P = (size_t)o->plan.P;
    fo__require_kind(o, kind);
    fo_require(N % P == 0, "%s: N=%zu rows are not a multiple of P=%zu", o->name, N, P);
    return N / P;
}

// callers of fo_allgather_run and fo_reducescatter_run know a chunk by its rows
typedef struct {
    FoChunkFn fn;
    void* ctx;
} Rows;

static void rows_chunk(void* ctx, int owner, size_t row0, size_t n, FoStream* s) {
    const Rows* x = (const Rows*)ctx;
    (void)owner;
    x->fn(x->ctx, row0, n, s);
}

// ---- all-gather -------------------------------------------------------------------------------------------
static void gather_pieces(FoPieces* io, const FoOverlap* o, void* all, size_t row_nbytes, size_t N) {
    size_t n = shard_rows(o, FO_ALLGATHER, N);
    fo__equal_pieces(io->send, all, o->plan.P, n, row_nbytes);
    fo__equal_pieces(io->recv, all, o->plan.P, n, row_nbytes);
}

void fo_allgather_run(FoOverlap* o, void* all, size_t row_nbytes, size_t N, FoChunkFn fn, void* ctx) {
    FoPieces io;
    Rows x = {fn, ctx};
    gather_pieces(&io, o, all, row_nbytes, N);
    fo__run(o, &io, rows_chunk, &x);
}

void fo_allgather_begin(FoOverlap* o, void* all, size_t row_nbytes, size_t N) {
    FoPieces io;
    gather_pieces(&io, o, all, row_nbytes, N);
    fo__begin(o, &io);
}

void fo_allgather_end(FoOverlap* o) {
    fo__wait(o, o->plan.nexchanges);
}

// ---- reduce-scatter ---------------------------------------------------------------------------------------
void fo_reducescatter_run(FoOverlap* o, FoStaging* st, int C, size_t N, FoChunkFn fn, void* ctx) {
    size_t n = shard_rows(o, FO_REDUCESCATTER, N), row_nbytes = (size_t)C * fo_dtype_nbytes(st->wire);
    Rows x = {fn, ctx};
    FoPieces io;
    int P = o->plan.P, r = o->plan.r;
    fo__equal_pieces(io.send, st->partial, P, n, row_nbytes);
    fo__equal_pieces(io.recv, st->received, P, n, row_nbytes);
    // direct: a slot for each of the others, in their order; ring: for each hop
    for (int p = P - 1; p > r && o->plan.topology == FO_DIRECT; p--) {
        io.recv[p] = io.recv[p - 1];
    }
    io.wire = st->wire, io.row_nelem = (size_t)C;
    fo__run(o, &io, fn ? rows_chunk : NULL, &x);
}

// the partial sums of the own rows, in rank order; a ring brings the sum of the others in its last hop
static int own_parts(const FoOverlap* o, const FoStaging* st, int C, size_t N,
                     const void* parts[FO_MAX_RANKS]) {
    const FoPlan* plan = &o->plan;
    int P = plan->P, r = plan->r, nparts = 0;
    size_t nbytes = N / (size_t)P * (size_t)C * fo_dtype_nbytes(st->wire);
    const char* received = (const char*)st->received;
    for (int p = 0; p < P; p++) {
        if (p == r) {
            parts[nparts++] = (const char*)st->partial + (size_t)r * nbytes;
        } else if (plan->topology == FO_DIRECT) {
            parts[nparts++] = received + (size_t)(p < r ? p : p - 1) * nbytes;
        } else if (p == (r + P - 1) % P) {
            parts[nparts++] = received + (size_t)(P - 2) * nbytes;
        }
    }
    return nparts;
}

void fo_reducescatter_end(FoOverlap* o, FoStaging* st, floatX* out, const floatX* residual,
                          const floatX* bias, int C, size_t N) {
    const void* parts[FO_MAX_RANKS];
    int nparts = own_parts(o, st, C, N, parts);
    fo__wait(o, o->plan.nexchanges);
    const char* before = fo_stream_label(o->compute, o->name);
    fo_accumulate(out, parts, residual, bias, N / (size_t)o->plan.P, C, nparts, st->wire, o->compute);
    fo_stream_label(o->compute, before);
}

void fo_reducescatter_end_fp32(FoOverlap* o, FoStaging* st, float* out, int C, size_t N) {
    const void* parts[FO_MAX_RANKS];
    const float* fp32[FO_MAX_RANKS];
    fo_require(st->wire == FO_FP32, "%s: partial sums are not fp32", o->name);
    int nparts = own_parts(o, st, C, N, parts);
    for (int p = 0; p < nparts; p++) {
        fp32[p] = (const float*)parts[p];
    }
    fo__wait(o, o->plan.nexchanges);
    const char* before = fo_stream_label(o->compute, o->name);
    fo_sum(out, fp32, N / (size_t)o->plan.P * (size_t)C, nparts, o->compute);
    fo_stream_label(o->compute, before);
}

// ---- a matmul beside a collective -------------------------------------------------------------------------
typedef struct {
    void* out;
    const floatX* inp;
    const floatX *weight, *bias;
    int K, OC; // as in fo_ops.h
    FoDtype type;
    floatX* gelu;          // forward: gelu(out), or NULL
    const floatX* pregelu; // dgrad: what the GELU was of, or NULL
} Matmul;

static void matmul_forward_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    const Matmul* x = (const Matmul*)ctx;
    char* out = (char*)x->out + row0 * (size_t)x->OC * fo_dtype_nbytes(x->type);
    const floatX* inp = x->inp + row0 * (size_t)x->K;
    if (x->gelu) {
        floatX* gelu = x->gelu + row0 * (size_t)x->OC;
        fo_matmul_gelu_forward((floatX*)out, gelu, inp, x->weight, x->bias, n, x->K, x->OC, s);
    } else {
        fo_matmul_forward(out, inp, x->weight, x->bias, n, x->K, x->OC, x->type, s);
    }
}

static void matmul_dgrad_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    const Matmul* x = (const Matmul*)ctx;
    char* out = (char*)x->out + row0 * (size_t)x->K * fo_dtype_nbytes(x->type);
    const floatX* dout = x->inp + row0 * (size_t)x->OC;
    if (x->pregelu) {
        const floatX* pregelu = x->pregelu + row0 * (size_t)x->K;
        fo_matmul_gelu_dgrad((floatX*)out, dout, x->weight, pregelu, n, x->K, x->OC, s);
    } else {
        fo_matmul_dgrad(out, dout, x->weight, n, x->K, x->OC, x->type, s);
    }
}

void fo_allgather_matmul_forward(floatX* out, floatX* gelu, floatX* all, const floatX* weight,
                                 const floatX* bias, size_t N, int C, int OC, FoOverlap* o) {
    Matmul x = {out, all, weight, bias, C, OC, FO_FLOATX, gelu, NULL};
    fo_allgather_run(o, all, (size_t)C * sizeof(floatX), N, matmul_forward_chunk, &x);
}

// the computes of a gather are queued until those of `owner` are among them; owner -1: all of them
static void columns_until(FoColumns* x, int owner) {
    if (!x->o) { return; }
    const FoPlan* plan = &x->o->plan;
    Matmul matmul = {x->out, x->all, x->weight, x->bias, x->C, x->OC, FO_FLOATX, NULL, NULL};
    Rows rows = {matmul_forward_chunk, &matmul};
    FoPieces io;
    int n = plan->ncomputes;
    while (owner >= 0 && n > 0 && plan->computes[n - 1].chunk / plan->m != owner) {
        n--;
    }
    if (x->ncomputed >= n) { return; }
    gather_pieces(&io, x->o, x->all, (size_t)x->C * sizeof(floatX), x->N);
    for (; x->ncomputed < n; x->ncomputed++) {
        fo__compute(x->o, &io, x->ncomputed, rows_chunk, &rows);
    }
}

void fo_allgather_matmul_begin(FoColumns* x, floatX* out, floatX* all, const floatX* weight,
                               const floatX* bias, size_t N, int C, int OC, FoOverlap* o) {
    FoColumns columns = {out, all, weight, bias, N, C, OC, o, 0};
    *x = columns;
    fo_allgather_begin(o, all, (size_t)C * sizeof(floatX), N);
    columns_until(x, o->plan.r);
}

void fo_allgather_matmul_dgrad(floatX* dinp, floatX* all, const floatX* pregelu, const floatX* weight,
                               size_t N, int K, int C, FoOverlap* o) {
    Matmul x = {dinp, all, weight, NULL, K, C, FO_FLOATX, NULL, pregelu};
    fo_allgather_run(o, all, (size_t)C * sizeof(floatX), N, matmul_dgrad_chunk, &x);
}

void fo_matmul_reducescatter_forward(FoStaging* st, const floatX* inp, const floatX* weight, size_t N, int K,
                                     int C, FoOverlap* o) {
    Matmul x = {st->partial, inp, weight, NULL, K, C, st->wire, NULL, NULL};
    fo_reducescatter_run(o, st, C, N, matmul_forward_chunk, &x);
}

void fo_matmul_reducescatter_dgrad(FoStaging* st, const floatX* dout, const floatX* weight, size_t N, int C,
                                   int OC, FoOverlap* o) {
    Matmul x = {st->partial, dout, weight, NULL, C, OC, st->wire, NULL, NULL};
    fo_reducescatter_run(o, st, C, N, matmul_dgrad_chunk, &x);
}

// ---- attention --------------------------------------------------------------------------------------------
typedef struct {
    Matmul projection;
    floatX* att;
    float* lse;
    FoColumns* qkv;
    FoLayout l;
    int NH, hs, query_split;
} Attention;

static void attention_rows(const Attention* x, size_t row0, size_t n, FoStream* s) {
    fo_attention_forward(x->att, x->lse, x->qkv->out, row0, n, x->l, x->NH, x->hs, s);
}

static void attention_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    Attention* x = (Attention*)ctx;
    const size_t shard = (size_t)x->l.B * (size_t)x->l.T / (size_t)x->l.P;
    columns_until(x->qkv, (int)(row0 / shard));
    if (x->query_split) { attention_rows(x, row0, n, s); }
    matmul_forward_chunk(&x->projection, row0, n, s);
}

void fo_attention_matmul_reducescatter_forward(FoStaging* st, floatX* att, float* lse, FoColumns* qkv,
                                               const floatX* weight, FoLayout l, int NH, int hs, int C,
                                               int query_split, FoOverlap* o) {
    const size_t N = (size_t)l.B * (size_t)l.T;
    // attention wants all keys of its sequences. To the other modes turns bring nothing: theirs is the usual
    // order
    const int by_shard = query_split && !l.zigzag && o->plan.mode == FO_FLASH;
    fo_require(l.P == o->plan.P && (l.zigzag || l.B % l.P == 0), "%s: %d sequences as %d shards, of %d ranks",
               o->name, l.B, l.P, o->plan.P);
    Matmul projection = {st->partial, att, weight, NULL, NH * hs, C, st->wire, NULL, NULL};
    Attention x = {projection, att, lse, qkv, l, NH, hs, query_split};
    if (!by_shard) { columns_until(qkv, -1); }
    if (!query_split) { attention_rows(&x, 0, N, o->compute); }
    fo_reducescatter_run(o, st, C, N, attention_chunk, &x);
}

typedef struct {
    Matmul projection;
    floatX *dqkv, *datt;
    const floatX *qkv, *att;
    const float* lse;
    FoLayout l;
    int NH, hs;
    size_t rows_done[FO_MAX_RANKS]; // of each shard
} AttentionBackward;

static void attention_backward_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    AttentionBackward* x = (AttentionBackward*)ctx;
    size_t N = (size_t)x->l.B * (size_t)x->l.T, shard = N / (size_t)x->l.P, p = row0 / shard;
    matmul_dgrad_chunk(&x->projection, row0, n, s);
    x->rows_done[p] += n;
    if (x->l.zigzag || x->rows_done[p] < shard) { return; }
    fo_attention_backward(x->dqkv, x->datt, x->qkv, x->att, x->lse, p * shard, shard, x->l, x->NH, x->hs, s);
}

void fo_allgather_matmul_attention_backward(floatX* dqkv, floatX* datt, floatX* all, const floatX* weight,
                                            const floatX* qkv, const floatX* att, const float* lse,
                                            FoLayout l, int NH, int hs, int C, FoOverlap* o) {
    size_t N = (size_t)l.B * (size_t)l.T;
    Matmul projection = {datt, all, weight, NULL, NH * hs, C, FO_FLOATX, NULL, NULL};
    AttentionBackward x = {projection, dqkv, datt, qkv, att, lse, l, NH, hs, {0}};
    fo_allgather_run(o, all, (size_t)C * sizeof(floatX), N, attention_backward_chunk, &x);
    if (l.zigzag) { fo_attention_backward(dqkv, datt, qkv, att, lse, 0, N, l, NH, hs, o->compute); }
}
