/* test_ulysses.c -- U1 to U4 with what tensor parallelism has around them (F1, F2, B4, B6), executed on
 * meshes of up x tp ranks.
 *
 * As test_overlap.c: NaN wherever nothing is to be read, inputs produced just before a call and overwritten
 * right after it. All primitives of a layer follow each other as a model calls them, layer after layer
 * through the same buffers, nothing synced in between. What U1 and U3 give are whole numbers, known exactly.
 * Attention and the sums behind it are compared with the same operations called whole, in the order of sums
 * that fo_ulysses.h promises, which is the same in every mode: each mode must give these bits. Heads are cut
 * unevenly, by tp and by up.
 */
#include "dev/test/ranks.h"
#include "flashoverlap/fo_ulysses.h"
#if FO_DEVICE_CPU
#include "flashoverlap/cpu/cpu.h" // times of operations
#endif

enum { HS = 4, CALLS = 2 };

// matrices; each tp rank has its own weights, each head group of it its own attention
enum { INP = 1, QKVW, QKVB, QKV, ATTW, DOUT, DATT, DATT_IN, RESIDUAL };

static int of_group(int matrix, int call, int t, int j) {
    return 10000 * (call + 1) + 1000 * (j + 1) + of_rank(matrix, t);
}

static FoHeads heads_of(const Rank* k, int t) {
    return fo_heads(k->U + 1 + t, HS, k->U, k->u);
}

static FoLayout layout_of(const Rank* k) {
    int shards = k->U * k->P;
    FoLayout l = {2, ROWS / 2 * shards, shards, k->U > 1};
    return l;
}

// ---- what is wanted ---------------------------------------------------------------------------------------
static int dot(int a, size_t arow, int w, size_t wrow, int cols) {
    int sum = 0;
    for (int c = 0; c < cols; c++) {
        sum += value(a, arow, c) * value(w, wrow, c);
    }
    return sum;
}

// what head group j of tp rank t computes with all rows
typedef struct {
    floatX *qkv, *att, *datt, *dq, *dkv;
    float *lse, *dq32;
    floatX* attw;
} Group;

typedef struct {
    int *qkv, *datt;            // U1, U3: [U*N, 3*own], [U*N, own]
    floatX *out, *dln;          // F2, B6: [ROWS, C]
    Group groups[4], *own;      // of this tp rank, by up rank
    floatX *qkvw, *qkvb, *attw; // of this tp rank
    floatX *inp, *dout, *residual;
} Want;

static Group plain_attention(Rank* k, int call, int t, int j) {
    FoHeads h = heads_of(k, t);
    FoLayout l = layout_of(k);
    int width = (int)fo_heads_width(&h, j), nheads = width / HS;
    size_t rows = k->N * (size_t)k->U;
    Group x;
    x.qkv = numbers(k, of_group(QKV, call, t, j), 0, rows, 3 * width);
    x.datt = numbers(k, of_group(DATT_IN, call, t, j), 0, rows, width);
    x.attw = numbers(k, of_group(ATTW, call, t, j), 0, C, width);
    x.att = poisoned_rows(k, rows, width);
    x.dq = poisoned_rows(k, rows, width);
    x.dkv = poisoned_rows(k, rows, 2 * width);
    x.lse = (float*)poisoned(k, rows * (size_t)nheads * sizeof(float));
    x.dq32 = (float*)poisoned(k, rows * (size_t)width * sizeof(float));
    fo_attention_forward(x.att, x.lse, x.qkv, 0, rows, l, nheads, HS, k->compute);
    fo_zero(x.dq32, rows * (size_t)width * sizeof(float), k->compute);
    for (int i = 1; i <= k->U; i++) { // the own shard of keys last
        size_t first = (size_t)((j + i) % k->U) * k->N;
        fo_attention_backward_kv(x.dq32, x.dkv, x.datt, x.qkv, x.att, x.lse, first, k->N, l, nheads, HS,
                                 k->compute);
    }
    const void* parts[1] = {x.dq32};
    fo_accumulate(x.dq, parts, NULL, NULL, rows, width, 1, FO_FP32, k->compute);
    return x;
}

// fp32 -> the wire's type
static char* rounded(Rank* k, float* sums) {
    const void* parts[1] = {sums};
    if (k->c.wire == FO_FP32) { return (char*)sums; }
    floatX* out = poisoned_rows(k, k->N, C);
    fo_accumulate(out, parts, NULL, NULL, k->N, C, 1, FO_FP32, k->compute);
    return (char*)out;
}

// tp rank t's partial sums of the projection, for the own tokens: own group first, then as they arrive
static char* plain_projection(Rank* k, int t, const Group groups[]) {
    FoHeads h = heads_of(k, t);
    float* sums = (float*)poisoned(k, k->N * C * sizeof(float));
    for (int i = 0; i < k->U; i++) {
        int j = (k->u - i + k->U) % k->U, width = (int)fo_heads_width(&h, j);
        const floatX* att = groups[j].att + (size_t)k->u * k->N * (size_t)width;
        if (i == 0) {
            fo_matmul_forward(sums, att, groups[j].attw, NULL, k->N, width, C, FO_FP32, k->compute);
        } else {
            fo_matmul_forward_add(sums, att, groups[j].attw, k->N, width, C, k->compute);
        }
    }
    return rounded(k, sums);
}

// the same of d(qkv) @ weight: keys and values of all groups, then queries
static char* plain_dgrad(Rank* k, int t, const Group groups[], const floatX* qkvw) {
    FoHeads h = heads_of(k, t);
    float* sums = (float*)poisoned(k, k->N * C * sizeof(float));
    for (int is_q = 0; is_q < 2; is_q++) {
        for (int i = 0; i < k->U; i++) {
            int j = (k->u - i + k->U) % k->U;
            size_t width = fo_heads_width(&h, j), rows = (size_t)k->u * k->N;
            const floatX* dout = is_q ? groups[j].dq + rows * width : groups[j].dkv + rows * 2 * width;
            const floatX* w = qkvw + (3 * fo_heads_before(&h, j) + (is_q ? 0 : width)) * C;
            int OC_ = (int)(is_q ? width : 2 * width);
            if (i == 0 && !is_q) {
                fo_matmul_dgrad(sums, dout, w, k->N, C, OC_, FO_FP32, k->compute);
            } else {
                fo_matmul_dgrad_add(sums, dout, w, k->N, C, OC_, k->compute);
            }
        }
    }
    return rounded(k, sums);
}

static void want_whole_numbers(Rank* k, Want* w, int call) {
    FoHeads h = heads_of(k, k->r);
    size_t rows = k->N * (size_t)k->U, own = fo_heads_width(&h, k->u), before = fo_heads_before(&h, k->u);
    int qkvw = of_rank(QKVW, k->r), qkvb = of_rank(QKVB, k->r), attw = of_group(ATTW, call, k->r, k->u);
    w->qkv = (int*)malloc(rows * 3 * own * sizeof(int)); // the host's; freed by test_layers
    w->datt = (int*)malloc(rows * own * sizeof(int));
    fo_require(w->qkv && w->datt, "out of memory");
    for (size_t i = 0; i < rows; i++) {
        for (size_t o = 0; o < 3 * own; o++) {
            w->qkv[i * 3 * own + o] =
                dot(INP + 10 * call, i, qkvw, 3 * before + o, C) + value(qkvb, 0, (int)(3 * before + o));
        }
        for (size_t o = 0; o < own; o++) {
            int sum = 0;
            for (int c = 0; c < C; c++) {
                sum += value(DOUT + 10 * call, i, c) * value(attw, (size_t)c, (int)o);
            }
            w->datt[i * own + o] = sum;
        }
    }
}

static Want want_of(Rank* k, int call) {
    Want w;
    FoHeads h = heads_of(k, k->r);
    size_t Ca = fo_heads_before(&h, k->U), own = ((size_t)k->u * (size_t)k->P + (size_t)k->r) * ROWS;
    char *forward[4], *backward[4];
    w.inp = numbers(k, INP + 10 * call, own, ROWS, C);
    w.dout = numbers(k, DOUT + 10 * call, own, ROWS, C);
    w.residual = numbers(k, RESIDUAL + 10 * call, own, ROWS, C);
    w.qkvb = numbers(k, of_rank(QKVB, k->r), 0, 1, (int)(3 * Ca));
    w.attw = (floatX*)allocate(k, Ca * C * sizeof(floatX));
    want_whole_numbers(k, &w, call);
    for (int t = 0; t < k->P; t++) {
        Group groups[4];
        FoHeads ht = heads_of(k, t);
        floatX* qkvw = numbers(k, of_rank(QKVW, t), 0, 3 * fo_heads_before(&ht, k->U), C);
        for (int j = 0; j < k->U; j++) {
            groups[j] = plain_attention(k, call, t, j);
        }
        forward[t] = plain_projection(k, t, groups);
        backward[t] = plain_dgrad(k, t, groups, qkvw);
        if (t != k->r) { continue; }
        memcpy(w.groups, groups, sizeof groups);
        w.qkvw = qkvw;
        for (int j = 0; j < k->U; j++) {
            fo_copy(w.attw + fo_heads_before(&h, j) * C, groups[j].attw,
                    fo_heads_width(&h, j) * C * sizeof(floatX), k->compute);
        }
    }
    w.out = poisoned_rows(k, ROWS, C);
    w.dln = poisoned_rows(k, ROWS, C);
    plain_reducescatter(k, w.out, forward, w.residual);
    plain_reducescatter(k, w.dln, backward, NULL);
    return w;
}

// ---- what is called ---------------------------------------------------------------------------------------
enum { F1, B4, F2, B6, NTP, U1 = NTP, U2, U3, U4_KV, U4_Q, NSITES };

// what the layers share
typedef struct {
    Rank* k;
    FoHeads h;
    size_t N, rows, Ca, own, nown_heads;
    FoOverlap* o[NSITES];
    FoStaging st;
    floatX *all, *send, *qkv, *att, *att_tokens, *datt, *weight, *bias;
    float *sums, *lse;
    FoHeadGrads d;
} Layer;

// what a layer has given
typedef struct {
    floatX *qkv, *att, *att_tokens, *out, *datt, *dq, *dkv, *dq_tokens, *dkv_tokens, *dln;
    float* lse;
} Given;

static Layer layer_open(Rank* k, int m_up) {
    static const char* const names[NSITES] = {"F1", "B4", "F2", "B6", "U1", "U2", "U3", "U4 kv", "U4 q"};
    Layer x = {.k = k, .h = heads_of(k, k->r), .N = k->N, .rows = k->N * (size_t)k->U, .st = staging(k)};
    x.Ca = fo_heads_before(&x.h, k->U), x.own = fo_heads_width(&x.h, k->u), x.nown_heads = x.own / HS;
    for (int i = 0; i < NSITES; i++) {
        int m = i == U4_KV ? 1 : i == U1 || i == U3 ? m_up : k->c.m; // shards of keys are whole
        x.o[i] = i < NTP ? overlap(k, names[i], i < F2 ? FO_ALLGATHER : FO_REDUCESCATTER)
                         : overlap_up(k, names[i], FO_REDUCESCATTER, m);
    }
    x.all = poisoned_rows(k, x.N, C), x.send = poisoned_rows(k, x.N, (int)(3 * x.Ca));
    x.qkv = poisoned_rows(k, x.rows, (int)(3 * x.own)), x.att = poisoned_rows(k, x.rows, (int)x.own);
    x.att_tokens = poisoned_rows(k, x.N, (int)x.Ca), x.datt = poisoned_rows(k, x.rows, (int)x.own);
    x.weight = poisoned_rows(k, 3 * x.Ca, C), x.bias = poisoned_rows(k, 1, (int)(3 * x.Ca));
    x.sums = (float*)poisoned(k, x.N * C * sizeof(float));
    x.lse = (float*)poisoned(k, x.rows * x.nown_heads * sizeof(float));
    x.d.dq32 = (float*)poisoned(k, x.rows * x.own * sizeof(float));
    x.d.dq = poisoned_rows(k, x.rows, (int)x.own), x.d.dkv = poisoned_rows(k, x.rows, (int)(2 * x.own));
    x.d.dq_tokens = poisoned_rows(k, x.N, (int)x.Ca);
    x.d.dkv_tokens = poisoned_rows(k, x.N, (int)(2 * x.Ca));
    return x;
}

static floatX* take_rows(Layer* x, floatX* from, size_t rows, size_t cols) {
    return (floatX*)taken(x->k, from, rows * cols * sizeof(floatX));
}

static void poison_rows(Layer* x, void* rows, size_t n, size_t cols) {
    queue_poison(x->k, rows, n * cols * sizeof(floatX));
}

static void poison_staging(Layer* x) {
    size_t nbytes = x->N * C * fo_dtype_nbytes(x->st.wire);
    queue_poison(x->k, x->st.partial, nbytes);
    queue_poison(x->k, x->st.received, nbytes);
}

static void produce_rows(Layer* x, void* dst, const void* src, size_t n, size_t cols) {
    produce(x->k, dst, src, n * cols * sizeof(floatX));
}

static void forward(Layer* x, const Want* w, Given* y) {
    Rank* k = x->k;
    produce_rows(x, x->all + (size_t)k->r * ROWS * C, w->inp, ROWS, C);
    produce_rows(x, x->weight, w->qkvw, 3 * x->Ca, C);
    produce_rows(x, x->bias, w->qkvb, 1, 3 * x->Ca);
    rest(k);
    fo_allgather_matmul_alltoall_forward(x->qkv, x->send, x->all, x->weight, x->bias, &x->h, x->N, C,
                                         x->o[F1], x->o[U1]);
    poison_rows(x, x->send, x->N, 3 * x->Ca);
    y->qkv = take_rows(x, x->qkv, x->rows, 3 * x->own);
    poison_rows(x, x->all, x->N, C);
    poison_rows(x, x->weight, 3 * x->Ca, C);
    poison_rows(x, x->bias, 1, 3 * x->Ca);

    produce_rows(x, x->weight, w->attw, x->Ca, C);
    produce_rows(x, x->qkv, w->own->qkv, x->rows, 3 * x->own);
    rest(k);
    fo_attention_alltoall_matmul_reducescatter_forward(&x->st, x->att, x->att_tokens, x->sums, x->lse, x->qkv,
                                                       x->weight, layout_of(k), &x->h, C, x->o[U2], x->o[F2]);
    y->att = take_rows(x, x->att, x->rows, x->own);
    y->att_tokens = take_rows(x, x->att_tokens, x->N, x->Ca);
    y->lse = (float*)taken(k, x->lse, x->rows * x->nown_heads * sizeof(float));
    poison_rows(x, x->qkv, x->rows, 3 * x->own);
    poison_rows(x, x->weight, x->Ca, C);
    queue_poison(k, x->sums, x->N * C * sizeof(float));
    rest(k);
    y->out = poisoned_rows(k, ROWS, C);
    fo_reducescatter_end(x->o[F2], &x->st, y->out, w->residual, NULL, C, x->N);
    poison_staging(x);
}

static void backward(Layer* x, const Want* w, Given* y) {
    Rank* k = x->k;
    const Group* own = w->own;
    produce_rows(x, x->all + (size_t)k->r * ROWS * C, w->dout, ROWS, C);
    produce_rows(x, x->weight, w->attw, x->Ca, C);
    rest(k);
    fo_allgather_matmul_alltoall_dgrad(x->datt, x->send, x->all, x->weight, &x->h, x->N, C, x->o[B4],
                                       x->o[U3]);
    poison_rows(x, x->all, x->N, C);
    poison_rows(x, x->weight, x->Ca, C);
    stagger(k);
    rest(k);
    fo_alltoall_end(x->o[U3]);
    poison_rows(x, x->send, x->N, x->Ca);
    y->datt = take_rows(x, x->datt, x->rows, x->own);

    produce_rows(x, x->qkv, own->qkv, x->rows, 3 * x->own);
    produce_rows(x, x->att, own->att, x->rows, x->own);
    produce(k, x->lse, own->lse, x->rows * x->nown_heads * sizeof(float));
    produce_rows(x, x->datt, own->datt, x->rows, x->own);
    rest(k);
    fo_attention_backward_alltoall(&x->d, x->datt, x->qkv, x->att, x->lse, layout_of(k), &x->h, x->o[U4_KV],
                                   x->o[U4_Q]);
    poison_rows(x, x->qkv, x->rows, 3 * x->own);
    poison_rows(x, x->att, x->rows, x->own);
    poison_rows(x, x->datt, x->rows, x->own);
    queue_poison(k, x->lse, x->rows * x->nown_heads * sizeof(float));

    produce_rows(x, x->weight, w->qkvw, 3 * x->Ca, C);
    rest(k);
    fo_matmul_reducescatter_dgrad_heads(&x->st, x->sums, &x->d, x->weight, &x->h, x->N, C, x->o[U4_KV],
                                        x->o[U4_Q], x->o[B6]);
    y->dq = take_rows(x, x->d.dq, x->rows, x->own);
    y->dkv = take_rows(x, x->d.dkv, x->rows, 2 * x->own);
    y->dq_tokens = take_rows(x, x->d.dq_tokens, x->N, x->Ca);
    y->dkv_tokens = take_rows(x, x->d.dkv_tokens, x->N, 2 * x->Ca);
    queue_poison(k, x->d.dq32, x->rows * x->own * sizeof(float));
    queue_poison(k, x->sums, x->N * C * sizeof(float));
    poison_rows(x, x->weight, 3 * x->Ca, C);
    rest(k);
    y->dln = poisoned_rows(k, ROWS, C);
    fo_reducescatter_end(x->o[B6], &x->st, y->dln, NULL, NULL, C, x->N);
    poison_staging(x);
}

// ---- what is checked --------------------------------------------------------------------------------------
// blocks of the token side that are not what the ranks of the heads side have computed
static int wrong_blocks(const Layer* x, const floatX* heads_side, const floatX* tokens, const Want* w,
                        int per, int is_att) {
    int wrong = 0;
    for (int j = 0; j < x->h.U; j++) {
        const Group* g = &w->groups[j];
        const floatX* whole = is_att ? g->att : per == 1 ? g->dq : g->dkv;
        size_t nelem = x->N * (size_t)per * fo_heads_width(&x->h, j);
        const floatX* got = fo_heads_rows(heads_side, tokens, &x->h, j, per, x->N);
        wrong += !same_bits(x->k, got, whole + (size_t)x->h.u * nelem, nelem * sizeof(floatX));
    }
    return wrong;
}

// dq against attention's backward pass as a whole, whose dk and dv have the very same bits
static void check_against_whole(const Layer* x, const Want* w, const Given* y) {
    Rank* k = x->k;
    const Group* own = w->own;
    size_t nelem = x->rows * 3 * x->own;
    floatX* dqkv = poisoned_rows(k, x->rows, (int)(3 * x->own));
    floatX *whole = (floatX*)malloc(nelem * sizeof(floatX)), *dq = (floatX*)malloc(nelem * sizeof(floatX)),
           *dkv = (floatX*)malloc(nelem * sizeof(floatX));
    float *got = (float*)malloc(nelem * sizeof(float)), *want = (float*)malloc(nelem * sizeof(float));
    fo_require(whole && dq && dkv && got && want, "out of memory");
    fo_attention_backward(dqkv, own->datt, own->qkv, own->att, own->lse, 0, x->rows, layout_of(k),
                          (int)x->nown_heads, HS, k->compute);
    fo_download(whole, dqkv, nelem * sizeof(floatX), k->compute);
    fo_download(dq, y->dq, nelem / 3 * sizeof(floatX), k->compute);
    fo_download(dkv, y->dkv, nelem / 3 * 2 * sizeof(floatX), k->compute);
    fo_stream_sync(k->compute);
    int wrong_kv = 0;
    for (size_t i = 0; i < x->rows; i++) {
        const floatX* row = whole + i * 3 * x->own;
        wrong_kv += memcmp(row + x->own, dkv + i * 2 * x->own, 2 * x->own * sizeof(floatX)) != 0;
        for (size_t c = 0; c < x->own; c++) {
            got[i * x->own + c] = fo_float(dq[i * x->own + c]), want[i * x->own + c] = fo_float(row[c]);
        }
    }
    CHECK(wrong_kv == 0);
    // another order of fp32 sums, then one rounding
    CHECK_CLOSE(got, want, x->rows * x->own, FO_FLOATX == FO_BF16 ? 4e-3 : 1e-5);
    free(whole), free(dq), free(dkv), free(got), free(want);
}

static void check_layer(const Layer* x, const Want* w, const Given* y) {
    Rank* k = x->k;
    size_t shard = ROWS * C * sizeof(floatX), nelem = x->rows * x->own;
    CHECK(wrong_values(k, y->qkv, w->qkv, 3 * nelem) == 0);
    CHECK(same_bits(k, y->att, w->own->att, nelem * sizeof(floatX)));
    CHECK(same_bits(k, y->lse, w->own->lse, x->rows * x->nown_heads * sizeof(float)));
    CHECK(wrong_blocks(x, y->att, y->att_tokens, w, 1, 1) == 0);
    CHECK(same_bits(k, y->out, w->out, shard));
    CHECK(wrong_values(k, y->datt, w->datt, nelem) == 0);
    CHECK(wrong_blocks(x, y->dq, y->dq_tokens, w, 1, 0) == 0);
    CHECK(wrong_blocks(x, y->dkv, y->dkv_tokens, w, 2, 0) == 0);
    CHECK(same_bits(k, y->dq, w->own->dq, nelem * sizeof(floatX)));
    CHECK(same_bits(k, y->dkv, w->own->dkv, 2 * nelem * sizeof(floatX)));
    CHECK(same_bits(k, y->dln, w->dln, shard));
    check_against_whole(x, w, y);
}

// what all layers together have sent, by the formulas
static void check_sent(const Layer* x) {
    const Rank* k = x->k;
    size_t U = (size_t)k->U, P = (size_t)k->P, row = sizeof(floatX);
    size_t to_others = (x->Ca - x->own) * x->N * row, from_own = (U - 1) * x->N * x->own * row;
    size_t chunks = P == 1 ? 1 : P * (size_t)x->o[F1]->plan.m; // of rows in F1 and B4, an all-to-all each
    size_t tp = (P - 1) * ROWS * C, wire = fo_dtype_nbytes(k->c.wire);
    const size_t nbytes[NSITES] = {
        [F1] = tp * row, [B4] = tp * row,  [F2] = tp * wire,       [B6] = tp * wire, [U1] = 3 * to_others,
        [U2] = from_own, [U3] = to_others, [U4_KV] = 2 * from_own, [U4_Q] = from_own};
    for (int i = 0; i < NSITES; i++) {
        size_t ranks = i < NTP ? P : U, calls = CALLS * (i == U1 || i == U3 ? chunks : 1);
        CHECK(x->o[i]->nbytes_sent == CALLS * nbytes[i]);
        CHECK(x->o[i]->nmessages == calls * (ranks - 1) * (size_t)x->o[i]->plan.m);
    }
}

static void layer_close(Layer* x) {
    for (int i = 0; i < NSITES; i++) {
        fo_overlap_destroy(x->o[i]);
    }
    release(x->k);
}

static void test_layers(Rank* k, int m_up) {
    Layer x = layer_open(k, m_up);
    Want want[CALLS];
    Given given[CALLS];
    for (int i = 0; i < CALLS; i++) {
        want[i] = want_of(k, i);
        want[i].own = &want[i].groups[k->u];
    }
    for (int i = 0; i < CALLS; i++) {
        forward(&x, &want[i], &given[i]);
        backward(&x, &want[i], &given[i]);
    }
    for (int i = 0; i < CALLS; i++) {
        check_layer(&x, &want[i], &given[i]);
        free(want[i].qkv), free(want[i].datt);
    }
    check_sent(&x);
    layer_close(&x);
}

// ---- the order of sums ------------------------------------------------------------------------------------
// zeros, and at every stride-th place n numbers of which another order would give another sum
static void set_weight(Rank* k, floatX* weight, size_t nelem, size_t stride, int n, int which) {
    floatX* host = (floatX*)calloc(nelem, sizeof *host);
    fo_require(host != NULL, "out of memory");
    for (int i = 0; i < n; i++) {
        host[(size_t)i * stride] = fo_floatx(order_value(which, (size_t)i));
    }
    fo_upload(weight, host, nelem * sizeof *host, k->compute);
    fo_stream_sync(k->compute);
    free(host);
}

static void upload_ones(Rank* k, floatX* x, size_t n, size_t cols, size_t from) {
    floatX* host = (floatX*)malloc(n * cols * sizeof *host + 1);
    fo_require(host != NULL, "out of memory");
    for (size_t i = 0; i < n * cols; i++) {
        host[i] = fo_floatx(i % cols < from ? 0.0f : 1.0f);
    }
    fo_upload(x, host, n * cols * sizeof *host, k->compute);
    fo_stream_sync(k->compute);
    free(host);
}

static int wrong_sums(const Layer* x, const floatX* out, const float want[C]) {
    floatX got[ROWS * C];
    int wrong = 0;
    fo_download(got, out, sizeof got, x->k->compute);
    fo_stream_sync(x->k->compute);
    for (int i = 0; i < ROWS * C; i++) {
        wrong += !(fo_float(got[i]) == fo_float(fo_floatx(want[i % C])));
    }
    return wrong;
}

/* Every activation is 1, and each head group's weight one row of numbers of very different size: the sums
 * show the order in which groups were added. One tp rank.
 */
static void test_order_of_sums(Rank* k) {
    Layer x = layer_open(k, 1);
    floatX* out = poisoned_rows(k, ROWS, C);
    float forward_sum[C] = {0.0f}, backward_sum[C] = {0.0f};
    for (int i = 0; i < 2 * k->U; i++) {
        int j = (k->u - i % k->U + k->U) % k->U, is_q = i >= k->U; // queries follow keys and values
        size_t before = fo_heads_before(&x.h, j), width = fo_heads_width(&x.h, j);
        for (int c = 0; c < C; c++) {
            if (!is_q) { forward_sum[c] += order_value(j, (size_t)c); }
            backward_sum[c] += order_value(j + is_q, (size_t)c);
        }
        if (!is_q) { set_weight(k, x.send + before * C, width * C, width, C, j); }
        set_weight(k, x.weight + (3 * before + (is_q ? 0 : width)) * C, (is_q ? 1 : 2) * width * C, 1, C,
                   j + is_q);
    }
    upload_ones(k, x.qkv, x.rows, 3 * x.own, 2 * x.own); // no scores: attention is the mean of values
    fo_attention_alltoall_matmul_reducescatter_forward(&x.st, x.att, x.att_tokens, x.sums, x.lse, x.qkv,
                                                       x.send, layout_of(k), &x.h, C, x.o[U2], x.o[F2]);
    fo_reducescatter_end(x.o[F2], &x.st, out, NULL, NULL, C, x.N);
    CHECK(wrong_sums(&x, out, forward_sum) == 0);

    fo_zero(x.datt, x.rows * x.own * sizeof(floatX), k->compute);
    fo_attention_backward_alltoall(&x.d, x.datt, x.qkv, x.att, x.lse, layout_of(k), &x.h, x.o[U4_KV],
                                   x.o[U4_Q]);
    fo_alltoall_end(x.o[U4_KV]);
    fo_alltoall_end(x.o[U4_Q]);
    upload_ones(k, x.d.dq, x.rows, x.own, 0), upload_ones(k, x.d.dkv, x.rows, 2 * x.own, 0);
    upload_ones(k, x.d.dq_tokens, x.N, x.Ca, 0), upload_ones(k, x.d.dkv_tokens, x.N, 2 * x.Ca, 0);
    fo_matmul_reducescatter_dgrad_heads(&x.st, x.sums, &x.d, x.weight, &x.h, x.N, C, x.o[U4_KV], x.o[U4_Q],
                                        x.o[B6]);
    fo_reducescatter_end(x.o[B6], &x.st, out, NULL, NULL, C, x.N);
    CHECK(wrong_sums(&x, out, backward_sum) == 0);
    layer_close(&x);
}

// ---- who waits --------------------------------------------------------------------------------------------
// calls of attention so far, where the device counts them
static long nattention(Rank* k) {
    long ncalls = 0;
    fo_stream_sync(k->compute);
#if FO_DEVICE_CPU
    FoOpTime times[FO_MAX_OP_NAMES];
    int n = fo__op_times(k->compute, times);
    for (int i = 0; i < n; i++) {
        ncalls += strcmp(times[i].name, "attention_forward_op") == 0 ? times[i].ncalls : 0;
    }
#endif
    return ncalls;
}

// Attention of other ranks' queries goes by chunks of its pushes; that of the own, in mode flash, by those of
// F2.
static long want_attention(const Layer* x) {
    const FoPlan *up = &x->o[U2]->plan, *tp = &x->o[F2]->plan;
    if (up->mode == FO_FLASH || up->P == 1) { return (up->P - 1) * up->m + tp->P * tp->m; }
    return up->P * up->m;
}

/* The up group's communication of each rank stands at a gate. What follows U1 and U2 on the compute stream
 * stands with it. What follows U3 and U4 goes on, but in mode none. B6 then stands for keys and values, not
 * for the queries that come later; returns whether it did, which a busy machine may not show each time.
 */
static int test_who_waits(Rank* k) {
    Layer x = layer_open(k, k->c.m);
    for (int i = 0; i < 4; i++) {
        Gate held = {0}, behind = {1, 0, 0};
        long before = nattention(k);
        fo_group_barrier(k->up);
        queue_gate(k->up_comm, &held);
        if (i == 0) {
            fo_allgather_matmul_alltoall_forward(x.qkv, x.send, x.all, x.weight, x.bias, &x.h, x.N, C,
                                                 x.o[F1], x.o[U1]);
        } else if (i == 1) {
            fo_attention_alltoall_matmul_reducescatter_forward(&x.st, x.att, x.att_tokens, x.sums, x.lse,
                                                               x.qkv, x.weight, layout_of(k), &x.h, C,
                                                               x.o[U2], x.o[F2]);
        } else if (i == 2) {
            fo_allgather_matmul_alltoall_dgrad(x.datt, x.send, x.all, x.weight, &x.h, x.N, C, x.o[B4],
                                               x.o[U3]);
        } else {
            fo_attention_backward_alltoall(&x.d, x.datt, x.qkv, x.att, x.lse, layout_of(k), &x.h, x.o[U4_KV],
                                           x.o[U4_Q]);
        }
        queue_gate(k->compute, &behind);
        if (i == 1) {
            fo_reducescatter_end(x.o[F2], &x.st, poisoned_rows(k, ROWS, C), NULL, NULL, C, x.N);
        } else if (i == 2) {
            fo_alltoall_end(x.o[U3]);
        } else if (i == 3) {
            fo_matmul_reducescatter_dgrad_heads(&x.st, x.sums, &x.d, x.weight, &x.h, x.N, C, x.o[U4_KV],
                                                x.o[U4_Q], x.o[B6]);
            usleep(20000);
        }
        open_later(&held, &behind, k->U == 1 || (i >= 2 && k->c.mode != FO_NONE));
        fo_stream_sync(k->compute);
        fo_stream_sync(k->up_comm);
        fo_stream_sync(k->comm);
        CHECK(!is_set(&held.late));
        CHECK(nattention(k) - before == (i == 1 && FO_DEVICE_CPU ? want_attention(&x) : 0));
    }
    int stood_for_kv = k->c.mode != FO_NONE && x.o[U4_KV]->exposed_ms > x.o[U4_Q]->exposed_ms;
    layer_close(&x);
    return stood_for_kv;
}

// ---- all of it --------------------------------------------------------------------------------------------
static const Config CONFIGS[] = {
    {FO_NONE, 1, FO_DIRECT, FO_FLOATX, 0},  {FO_SLICE, 2, FO_DIRECT, FO_FLOATX, 0},
    {FO_FLASH, 1, FO_DIRECT, FO_FLOATX, 0}, {FO_FLASH, 2, FO_DIRECT, FO_FLOATX, 0},
    {FO_FLASH, 2, FO_DIRECT, FO_FP32, 0},   {FO_SLICE, 2, FO_DIRECT, FO_FP32, 1},
    {FO_FLASH, 1, FO_RING, FO_FLOATX, 1},   {FO_NONE, 1, FO_DIRECT, FO_FLOATX, 1}};

// Emulation is slow, and needs no luck to see a missing wait: it leaves some configurations and meshes out.
static int is_tested(const Config* c) {
    return FO_DEVICE_CPU || !(c->idle || (c->mode == FO_FLASH && c->m == 1));
}

static void body(FoGroup* world, void* arg) {
    Rank k;
    int nstood = 0;
    mesh_open(&k, world, *(int*)arg);
    for (size_t i = 0; i < sizeof CONFIGS / sizeof *CONFIGS; i++) {
        if (!is_tested(&CONFIGS[i])) { continue; }
        k.c = CONFIGS[i];
        check_at_config(&k, "");
        test_layers(&k, k.c.m);
        if (k.P > 1 && k.c.m > 1) { test_layers(&k, 1); } // as a model has it behind a gather
        if (k.P == 1) { test_order_of_sums(&k); }
        if (!k.c.idle) { nstood += test_who_waits(&k); }
    }
    CHECK(k.U == 1 || nstood > 0);
    rank_close(&k);
}

// ---- refusals ---------------------------------------------------------------------------------------------
// plans that would move the wrong bytes; arg says which
static void wrong_call(FoGroup* world, void* arg) {
    Rank k;
    int which = *(int*)arg;
    mesh_open(&k, world, 1);
    k.c = (Config){FO_FLASH, 2, FO_DIRECT, FO_FLOATX, 0};
    Layer x = layer_open(&k, 1);
    FoOverlap *ring = fo_overlap_create("ring", FO_REDUCESCATTER, FO_FLASH, 1, FO_RING, k.up, k.compute,
                                        k.up_comm),
              *gather = overlap_up(&k, "gather", FO_ALLGATHER, 1),
              *cut = overlap_up(&k, "cut", FO_REDUCESCATTER, 2);
    if (which == 0) {
        fo_allgather_matmul_alltoall_forward(x.qkv, x.send, x.all, x.weight, x.bias, &x.h, x.N, C, x.o[F1],
                                             ring);
    } else if (which == 1) {
        fo_allgather_matmul_alltoall_dgrad(x.datt, x.send, x.all, x.weight, &x.h, x.N, C, x.o[B4], gather);
    } else if (which == 2) {
        fo_attention_alltoall_matmul_reducescatter_forward(&x.st, x.att, x.att_tokens, x.sums, x.lse, x.qkv,
                                                           x.weight, layout_of(&k), &x.h, C, ring, x.o[F2]);
    } else {
        fo_attention_backward_alltoall(&x.d, x.datt, x.qkv, x.att, x.lse, layout_of(&k), &x.h,
                                       which == 3 ? cut : x.o[U4_KV], which == 4 ? ring : x.o[U4_Q]);
    }
}

static void test_refusals(void) {
    static const char* says[] = {"ring: wants a direct plan", "gather: a plan of the wrong kind",
                                 "ring: wants a direct plan", "cut: wants a direct plan with m=1",
                                 "ring: wants a direct plan"};
    for (int which = 0; which < 5; which++) {
        CHECK_AT("refusal %d", which);
        CHECK_DIES(fo_ranks_run(2, wrong_call, &which), says[which]);
    }
}

int main(void) {
    test_refusals(); // before any thread has started
    static const int MESHES[][2] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {1, 2}, {2, 2}}; // up, tp
    for (size_t i = 0; i < sizeof MESHES / sizeof *MESHES; i++) {
        int tp = MESHES[i][1];
        if (!FO_DEVICE_CPU && (i == 3 || i == 4)) { continue; } // 4 x 1, 1 x 2
        fo_ranks_run(MESHES[i][0] * tp, body, &tp);
    }
    return check_report();
}
