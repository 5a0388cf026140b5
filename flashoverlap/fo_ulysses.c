/* fo_ulysses.c -- Ulysses by flash overlap: the all-to-alls as pushes of head groups and of chunks of tokens.
 *
 * An all-to-all is the plan of a direct reduce-scatter whose partial sums are final: compute what another
 * rank is to have, push it, own last. See fo_ulysses.h; the table of U1 ... U4 is in doc/overlap.md.
 */
#include "flashoverlap/fo_ulysses.h"
#include "flashoverlap/fo_exec.h"

FoHeads fo_heads(int NH, int hs, int U, int u) {
    FoHeads h = {U, u, hs, {0}};
    for (int j = 0; j <= U; j++) {
        h.head[j] = (int)fo_cut((size_t)NH, U, j);
    }
    return h;
}

void fo_alltoall_end(FoOverlap* scatter) {
    fo__wait(scatter, scatter->plan.nexchanges);
}

// ---- a GEMM whose result goes to the heads' ranks: U1, U3 -------------------------------------------------
typedef struct {
    floatX *out, *send;
    const floatX *inp, *weight, *bias;
    const FoHeads* h;
    size_t N, C, per; // per: 3 for q, k and v; 1 for the gradient of attention's output
    FoOverlap* scatter;
} ToHeads;

// where rows of group j are computed: at home, or where they are sent from
static floatX* to_heads_rows(const ToHeads* x, int j, size_t row0) {
    size_t width = x->per * fo_heads_width(x->h, j);
    return j == x->h->u ? x->out + ((size_t)j * x->N + row0) * width
                        : x->send + x->N * x->per * fo_heads_before(x->h, j) + row0 * width;
}

static void to_heads_group(void* ctx, int j, size_t row0, size_t n, FoStream* s) {
    const ToHeads* x = (const ToHeads*)ctx;
    size_t before = x->per * fo_heads_before(x->h, j), width = x->per * fo_heads_width(x->h, j);
    const floatX *inp = x->inp + row0 * x->C, *weight = x->weight + before * x->C;
    floatX* out = to_heads_rows(x, j, row0);
    if (x->bias) {
        fo_matmul_forward(out, inp, weight, x->bias + before, n, (int)x->C, (int)width, FO_FLOATX, s);
    } else {
        fo_matmul_dgrad(out, inp, weight, n, (int)width, (int)x->C, FO_FLOATX, s);
    }
}

// rows of the gather that are here: an all-to-all of their own
static void to_heads_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    const ToHeads* x = (const ToHeads*)ctx;
    const FoHeads* h = x->h;
    size_t own = x->per * fo_heads_width(h, h->u);
    FoPieces io;
    (void)s;
    for (int j = 0; j < h->U; j++) {
        size_t row_nbytes = x->per * fo_heads_width(h, j) * sizeof(floatX);
        FoPiece send = {(char*)to_heads_rows(x, j, row0), row_nbytes, n, row0};
        FoPiece recv = {(char*)(x->out + ((size_t)j * x->N + row0) * own), own * sizeof(floatX), n, row0};
        io.send[j] = send, io.recv[j] = recv;
    }
    fo__run(x->scatter, &io, to_heads_group, ctx);
}

void fo_allgather_matmul_alltoall_forward(floatX* qkv, floatX* send, floatX* all, const floatX* weight,
                                          const floatX* bias, const FoHeads* h, size_t N, int C,
                                          FoOverlap* gather, FoOverlap* scatter) {
    ToHeads x = {qkv, send, all, weight, bias, h, N, (size_t)C, 3, scatter};
    fo__require_direct(scatter, FO_REDUCESCATTER, 0);
    fo_allgather_run(gather, all, (size_t)C * sizeof(floatX), N, to_heads_chunk, &x);
    fo_alltoall_end(scatter);
}

void fo_allgather_matmul_alltoall_dgrad(floatX* datt, floatX* send, floatX* all, const floatX* weight,
                                        const FoHeads* h, size_t N, int C, FoOverlap* gather,
                                        FoOverlap* scatter) {
    ToHeads x = {datt, send, all, weight, NULL, h, N, (size_t)C, 1, scatter};
    fo__require_direct(scatter, FO_REDUCESCATTER, 0);
    fo_allgather_run(gather, all, (size_t)C * sizeof(floatX), N, to_heads_chunk, &x);
}

// ---- a GEMM for each head group, summed: U2's consumer, B6 ------------------------------------------------
// compute waits for what rank p sends in an all-to-all
static void wait_for_rank(FoOverlap* scatter, int p) {
    int n = 0;
    for (int e = 0; e < scatter->plan.nexchanges; e++) {
        if (scatter->plan.exchanges[e].recv_from == p) { n = e + 1; }
    }
    fo__wait(scatter, n);
}

// the group that is summed i-th: the own first, then in the order in which they arrive. The last wait is thus
// for the last exchange, with which the own rows have left, too
static int group_at(const FoHeads* h, int i) {
    return (h->u + h->U - i) % h->U;
}

// where the fp32 sums of rows from row0 on are taken: if the wire is fp32, they are the partial sums already
static float* sums_of(const FoStaging* st, float* sums, size_t row0, int C) {
    return (st->wire == FO_FP32 ? (float*)st->partial : sums) + row0 * (size_t)C;
}

// the sums of rows [row0, row0 + n) become partial sums of the wire's type
static void sums_to_wire(const FoStaging* st, float* sums, size_t row0, size_t n, int C, FoStream* s) {
    const void* parts[1] = {sums + row0 * (size_t)C};
    if (st->wire == FO_FP32) { return; }
    fo_accumulate((floatX*)st->partial + row0 * (size_t)C, parts, NULL, NULL, n, C, 1, FO_FP32, s);
}

typedef struct {
    FoStaging* st;
    floatX *att, *att_tokens;
    float *sums, *lse;
    const floatX *qkv, *weight;
    FoLayout l;
    const FoHeads* h;
    size_t N;
    int C, attends; // attends: attention of the own queries goes chunk by chunk with the projection
    FoOverlap* scatter;
} FromHeads;

static int own_heads(const FoHeads* h) {
    return h->head[h->u + 1] - h->head[h->u];
}

static void attention_rows(const FromHeads* x, size_t row0, size_t n, FoStream* s) {
    fo_attention_forward(x->att, x->lse, x->qkv, row0, n, x->l, own_heads(x->h), x->h->hs, s);
}

// heads side [U*N, per*own width] -> token side, in blocks
static void to_tokens_pieces(FoPieces* io, floatX* heads_side, floatX* tokens, const FoHeads* h, size_t per,
                             size_t N) {
    fo__equal_pieces(io->send, heads_side, h->U, N, per * fo_heads_width(h, h->u) * sizeof(floatX));
    for (int p = 0; p < h->U; p++) {
        FoPiece recv = {(char*)(tokens + N * per * fo_heads_before(h, p)),
                        per * fo_heads_width(h, p) * sizeof(floatX), N, 0};
        io->recv[p] = recv;
    }
}

// U2, producer: queries of one owner
static void attention_piece(void* ctx, int owner, size_t row0, size_t n, FoStream* s) {
    const FromHeads* x = (const FromHeads*)ctx;
    if (owner != x->h->u || !x->attends) { attention_rows(x, row0, n, s); }
}

// U2, consumer, and F2, producer: rows of the own tokens
static void projection_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    const FromHeads* x = (const FromHeads*)ctx;
    const FoHeads* h = x->h;
    size_t C = (size_t)x->C, own = (size_t)h->u * x->N;
    if (x->attends) { attention_rows(x, own + row0, n, s); }
    float* sums = sums_of(x->st, x->sums, row0, x->C);
    for (int i = 0; i < h->U; i++) {
        int j = group_at(h, i);
        size_t width = fo_heads_width(h, j);
        const floatX* inp = fo_heads_rows(x->att, x->att_tokens, h, j, 1, x->N) + row0 * width;
        const floatX* weight = x->weight + C * fo_heads_before(h, j);
        if (i == 0) {
            fo_matmul_forward(sums, inp, weight, NULL, n, (int)width, x->C, FO_FP32, s);
        } else {
            wait_for_rank(x->scatter, j);
            fo_matmul_forward_add(sums, inp, weight, n, (int)width, x->C, s);
        }
    }
    sums_to_wire(x->st, x->sums, row0, n, x->C, s);
}

void fo_attention_alltoall_matmul_reducescatter_forward(FoStaging* st, floatX* att, floatX* att_tokens,
                                                        float* sums, float* lse, const floatX* qkv,
                                                        const floatX* weight, FoLayout l, const FoHeads* h,
                                                        int C, FoOverlap* scatter, FoOverlap* reduce) {
    size_t N = (size_t)l.B * (size_t)l.T / (size_t)h->U;
    int attends = scatter->plan.mode == FO_FLASH;
    FromHeads x = {st, att, att_tokens, sums, lse, qkv, weight, l, h, N, C, attends, scatter};
    FoPieces io;
    if (h->U == 1) {
        FoColumns complete = {(floatX*)qkv, NULL, NULL, NULL, 0, 0, 0, NULL, 0};
        fo_attention_matmul_reducescatter_forward(st, att, lse, &complete, weight, l, own_heads(h), h->hs, C,
                                                  1, reduce);
        return;
    }
    fo__require_direct(scatter, FO_REDUCESCATTER, 0);
    to_tokens_pieces(&io, att, att_tokens, h, 1, N);
    fo__run(scatter, &io, attention_piece, &x);
    fo_reducescatter_run(reduce, st, C, N, projection_chunk, &x);
}

// ---- U4 ---------------------------------------------------------------------------------------------------
typedef struct {
    const FoHeadGrads* d;
    const floatX *datt, *qkv, *att;
    const float* lse;
    FoLayout l;
    const FoHeads* h;
} KeysBackward;

static void keys_piece(void* ctx, int owner, size_t row0, size_t n, FoStream* s) {
    const KeysBackward* x = (const KeysBackward*)ctx;
    (void)owner;
    fo_attention_backward_kv(x->d->dq32, x->d->dkv, x->datt, x->qkv, x->att, x->lse, row0, n, x->l,
                             own_heads(x->h), x->h->hs, s);
}

void fo_attention_backward_alltoall(const FoHeadGrads* d, const floatX* datt, const floatX* qkv,
                                    const floatX* att, const float* lse, FoLayout l, const FoHeads* h,
                                    FoOverlap* scatter_kv, FoOverlap* scatter_q) {
    size_t rows = (size_t)l.B * (size_t)l.T, N = rows / (size_t)h->U, own = fo_heads_width(h, h->u);
    KeysBackward x = {d, datt, qkv, att, lse, l, h};
    const void* parts[1] = {d->dq32};
    FoPieces io;
    fo__require_direct(scatter_kv, FO_REDUCESCATTER, 1);
    fo__require_direct(scatter_q, FO_REDUCESCATTER, 0);
    fo_zero(d->dq32, rows * own * sizeof(float), scatter_kv->compute);
    to_tokens_pieces(&io, d->dkv, d->dkv_tokens, h, 2, N);
    fo__run(scatter_kv, &io, keys_piece, &x);
    fo_accumulate(d->dq, parts, NULL, NULL, rows, (int)own, 1, FO_FP32, scatter_q->compute);
    to_tokens_pieces(&io, d->dq, d->dq_tokens, h, 1, N);
    fo__run(scatter_q, &io, NULL, NULL);
}

typedef struct {
    FoStaging* st;
    float* sums;
    const FoHeadGrads* d;
    const floatX* weight;
    const FoHeads* h;
    size_t N;
    int C;
    FoOverlap *scatter_kv, *scatter_q;
} HeadsDgrad;

static void heads_dgrad_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    const HeadsDgrad* x = (const HeadsDgrad*)ctx;
    const FoHeads* h = x->h;
    const FoHeadGrads* d = x->d;
    size_t C = (size_t)x->C;
    float* sums = sums_of(x->st, x->sums, row0, x->C);
    for (int i = 0; i < 2 * h->U; i++) { // keys and values of all groups, then queries
        int j = group_at(h, i % h->U), is_q = i >= h->U, per = is_q ? 1 : 2;
        size_t width = fo_heads_width(h, j);
        const floatX* dout = is_q ? fo_heads_rows(d->dq, d->dq_tokens, h, j, per, x->N)
                                  : fo_heads_rows(d->dkv, d->dkv_tokens, h, j, per, x->N);
        const floatX* weight = x->weight + (3 * fo_heads_before(h, j) + (is_q ? 0 : width)) * C;
        size_t OC = (size_t)per * width;
        if (i == 0) {
            fo_matmul_dgrad(sums, dout + row0 * OC, weight, n, x->C, (int)OC, FO_FP32, s);
            continue;
        }
        if (j != h->u) { wait_for_rank(is_q ? x->scatter_q : x->scatter_kv, j); }
        fo_matmul_dgrad_add(sums, dout + row0 * OC, weight, n, x->C, (int)OC, s);
    }
    sums_to_wire(x->st, x->sums, row0, n, x->C, s);
}

void fo_matmul_reducescatter_dgrad_heads(FoStaging* st, float* sums, const FoHeadGrads* d,
                                         const floatX* weight, const FoHeads* h, size_t N, int C,
                                         FoOverlap* scatter_kv, FoOverlap* scatter_q, FoOverlap* reduce) {
    HeadsDgrad x = {st, sums, d, weight, h, N, C, scatter_kv, scatter_q};
    fo_reducescatter_run(reduce, st, C, N, heads_dgrad_chunk, &x);
}
