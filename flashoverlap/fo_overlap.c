/* fo_overlap.c -- the flash primitives: plans bound to streams. Read beside arXiv 2604.24013 and
 * doc/overlap.md.
 *
 * run_plan is the executor of every mode and topology; the primitives say what a chunk's computation is.
 * Events live in FoOverlap, nothing is allocated in a call. Each wait names the two things that it orders:
 * // earlier | later.
 */
#include "flashoverlap/fo_overlap.h"
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
    free(o);
}

void fo_overlap_reset(FoOverlap* o) {
    o->exposed_ms = o->comm_ms = 0.0;
    o->nbytes_sent = o->nmessages = 0;
}

void fo_overlap_mark(FoOverlap* o) {
    fo_event_record(o->ready, o->compute);
    o->marked = 1;
}

// ---- the executor -----------------------------------------------------------------------------------------
// where the bytes of a plan's chunks lie
typedef struct {
    char* send; // chunk c's bytes at c * chunk_nbytes
    char* recv; // gather: the same array; reduce-scatter: the partial sums received
    size_t chunk_nbytes;
    size_t chunk_rows;
} Buffers;

// partial sums of the own rows have a slot for each that sends them, [P-1][m]; a ring's for each hop
static size_t received_slot(const FoPlan* plan, int chunk, int from) {
    int P = plan->P, r = plan->r, sub = chunk % plan->m;
    int slot =
        plan->topology == FO_DIRECT ? (from < r ? from : from - 1) : (2 * P + r - 2 - chunk / plan->m) % P;
    return (size_t)(slot * plan->m + sub);
}

// first half of every primitive: what the communication reads is written, what it overwrites has been read
static void start(FoOverlap* o) {
    if (!o->marked) { fo_event_record(o->ready, o->compute); }
    o->marked = 0;
    fo_stream_wait(o->comm, o->ready, NULL); // own rows written, buffers read to their end | first exchange
}

static void queue_exchange(FoOverlap* o, int e, const Buffers* b, int is_computed) {
    const FoPlan* plan = &o->plan;
    const FoExchange* x = &plan->exchanges[e];
    int k = x->after_computes - 1; // without fn (is_computed 0) only a ring's adds have something to wait for
    if (k >= 0 && (is_computed || plan->computes[k].add)) {
        fo_stream_wait(o->comm, o->computed[k], NULL); // the chunk is computed | it leaves
    }
    size_t slot = plan->kind == FO_ALLGATHER ? (size_t)x->recv : received_slot(plan, x->recv, x->recv_from);
    fo_comm_begin(o->group, o->comm);
    fo_send(o->group, b->send + (size_t)x->send * b->chunk_nbytes, b->chunk_nbytes, x->send_to);
    fo_recv(o->group, b->recv + slot * b->chunk_nbytes, b->chunk_nbytes, x->recv_from);
    fo_comm_end(o->group);
    fo_event_record(o->arrived[e], o->comm);
    o->comm_ms += 1e3 * fo_group_message_s(o->group, b->chunk_nbytes);
    o->nbytes_sent += b->chunk_nbytes;
    o->nmessages++;
}

// compute waits until the first n exchanges are done; what it stands still counts as exposed
static void wait_exchanges(FoOverlap* o, int n) {
    // the chunk is here, or all sends have left their buffers | it is computed on, or they are written again
    if (n > 0) { fo_stream_wait(o->compute, o->arrived[n - 1], &o->exposed_ms); }
}

// queues both lists of the plan, each part as soon as what it waits for is queued. wire: of a ring's adds
static void run_plan(FoOverlap* o, const Buffers* b, FoDtype wire, size_t row_nelem, FoChunkFn fn,
                     void* ctx) {
    const FoPlan* plan = &o->plan;
    int e = 0;
    for (int k = 0; k <= plan->ncomputes; k++) {
        for (; e < plan->nexchanges && plan->exchanges[e].after_computes <= k; e++) {
            queue_exchange(o, e, b, fn != NULL);
        }
        if (k == plan->ncomputes) { break; }
        const FoCompute* c = &plan->computes[k];
        wait_exchanges(o, c->after_exchanges);
        if (c->add) {
            char* part = b->recv + received_slot(plan, c->chunk, -1) * b->chunk_nbytes;
            fo_add(b->send + (size_t)c->chunk * b->chunk_nbytes, part, b->chunk_rows * row_nelem, wire,
                   o->compute);
        } else if (fn) {
            fn(ctx, (size_t)c->chunk * b->chunk_rows, b->chunk_rows, o->compute);
        }
        if (plan->kind == FO_REDUCESCATTER) { fo_event_record(o->computed[k], o->compute); }
    }
}

static size_t chunk_rows(const FoOverlap* o, FoKind kind, size_t N) {
    size_t nchunks = (size_t)(o->plan.P * o->plan.m);
    fo_require(o->plan.kind == kind, "%s: a plan of the wrong kind", o->name);
    fo_require(N % nchunks == 0, "%s: N=%zu rows are not a multiple of P*m=%zu", o->name, N, nchunks);
    return N / nchunks;
}

// ---- all-gather -------------------------------------------------------------------------------------------
void fo_allgather_run(FoOverlap* o, void* all, size_t row_nbytes, size_t N, FoChunkFn fn, void* ctx) {
    size_t rows = chunk_rows(o, FO_ALLGATHER, N);
    Buffers b = {(char*)all, (char*)all, rows * row_nbytes, rows};
    start(o);
    run_plan(o, &b, FO_FLOATX, 0, fn, ctx);
    // no wait for the sends: the last compute waits for the last exchange, and that one's send is part of it
}

void fo_allgather_begin(FoOverlap* o, void* all, size_t row_nbytes, size_t N) {
    size_t rows = chunk_rows(o, FO_ALLGATHER, N);
    Buffers b = {(char*)all, (char*)all, rows * row_nbytes, rows};
    start(o);
    for (int e = 0; e < o->plan.nexchanges; e++) {
        queue_exchange(o, e, &b, 0);
    }
    if (o->plan.mode == FO_NONE) { fo_allgather_end(o); }
}

void fo_allgather_end(FoOverlap* o) {
    wait_exchanges(o, o->plan.nexchanges);
}

// ---- reduce-scatter ---------------------------------------------------------------------------------------
void fo_reducescatter_run(FoOverlap* o, FoStaging* st, int C, size_t N, FoChunkFn fn, void* ctx) {
    size_t rows = chunk_rows(o, FO_REDUCESCATTER, N);
    size_t nbytes = rows * (size_t)C * fo_dtype_nbytes(st->wire);
    Buffers b = {(char*)st->partial, (char*)st->received, nbytes, rows};
    start(o);
    run_plan(o, &b, st->wire, (size_t)C, fn, ctx);
    if (o->plan.mode == FO_NONE) { wait_exchanges(o, o->plan.nexchanges); }
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
    wait_exchanges(o, o->plan.nexchanges);
    fo_accumulate(out, parts, residual, bias, N / (size_t)o->plan.P, C, nparts, st->wire, o->compute);
}

void fo_reducescatter_end_fp32(FoOverlap* o, FoStaging* st, float* out, int C, size_t N) {
    const void* parts[FO_MAX_RANKS];
    const float* fp32[FO_MAX_RANKS];
    fo_require(st->wire == FO_FP32, "%s: partial sums are not fp32", o->name);
    int nparts = own_parts(o, st, C, N, parts);
    for (int p = 0; p < nparts; p++) {
        fp32[p] = (const float*)parts[p];
    }
    wait_exchanges(o, o->plan.nexchanges);
    fo_sum(out, fp32, N / (size_t)o->plan.P * (size_t)C, nparts, o->compute);
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
    fo_matmul_forward(out, x->inp + row0 * (size_t)x->K, x->weight, x->bias, n, x->K, x->OC, x->type, s);
    if (x->gelu) {
        fo_gelu_forward(x->gelu + row0 * (size_t)x->OC, (const floatX*)out, n * (size_t)x->OC, s);
    }
}

static void matmul_dgrad_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    const Matmul* x = (const Matmul*)ctx;
    char* out = (char*)x->out + row0 * (size_t)x->K * fo_dtype_nbytes(x->type);
    fo_matmul_dgrad(out, x->inp + row0 * (size_t)x->OC, x->weight, n, x->K, x->OC, x->type, s);
    if (x->pregelu) {
        fo_gelu_backward((floatX*)out, (const floatX*)out, x->pregelu + row0 * (size_t)x->K, n * (size_t)x->K,
                         s);
    }
}

void fo_allgather_matmul_forward(floatX* out, floatX* gelu, floatX* all, const floatX* weight,
                                 const floatX* bias, size_t N, int C, int OC, FoOverlap* o) {
    Matmul x = {out, all, weight, bias, C, OC, FO_FLOATX, gelu, NULL};
    fo_allgather_run(o, all, (size_t)C * sizeof(floatX), N, matmul_forward_chunk, &x);
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
    floatX *att, *dqkv, *datt;
    float* lse;
    const floatX* qkv;
    FoLayout l;
    int NH, hs, query_split;
    size_t rows_done[FO_MAX_RANKS]; // of each shard
} Attention;

static void attention_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    Attention* x = (Attention*)ctx;
    if (x->query_split) { fo_attention_forward(x->att, x->lse, x->qkv, row0, n, x->l, x->NH, x->hs, s); }
    matmul_forward_chunk(&x->projection, row0, n, s);
}

void fo_attention_matmul_reducescatter_forward(FoStaging* st, floatX* att, float* lse, const floatX* qkv,
                                               const floatX* weight, FoLayout l, int NH, int hs, int C,
                                               int query_split, FoOverlap* o) {
    size_t N = (size_t)l.B * (size_t)l.T;
    Attention x = {{st->partial, att, weight, NULL, NH * hs, C, st->wire, NULL, NULL},
                   att,
                   NULL,
                   NULL,
                   lse,
                   qkv,
                   l,
                   NH,
                   hs,
                   query_split,
                   {0}};
    if (!query_split) { fo_attention_forward(att, lse, qkv, 0, N, l, NH, hs, o->compute); }
    fo_reducescatter_run(o, st, C, N, attention_chunk, &x);
}

static void attention_backward_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    Attention* x = (Attention*)ctx;
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
    Attention x = {{datt, all, weight, NULL, NH * hs, C, FO_FLOATX, NULL, NULL},
                   (floatX*)att,
                   dqkv,
                   datt,
                   (float*)lse,
                   qkv,
                   l,
                   NH,
                   hs,
                   1,
                   {0}};
    fo_allgather_run(o, all, (size_t)C * sizeof(floatX), N, attention_backward_chunk, &x);
    if (l.zigzag) { fo_attention_backward(dqkv, datt, qkv, att, lse, 0, N, l, NH, hs, o->compute); }
}
