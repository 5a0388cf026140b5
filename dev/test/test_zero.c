/* test_zero.c -- D1, D2 and D3, the gradients of replicas on their way to their owners and what comes back:
 * P = 1, 2, 3, 4 replicas, and 2 x 2 with a vocabulary that tp has cut.
 *
 * As test_overlap.c: whole numbers, NaN wherever nothing is to be read, inputs produced just before a call
 * and overwritten right after it, steps one after the other through the same buffers with nothing synced in
 * between. Rows that P doesn't divide, and fewer rows than ranks. Numbers of very different size show that
 * sums are in rank order.
 */
#include "dev/test/ranks.h"
#include "flashoverlap/fo_zero.h"

// the owner's part of `rows` rows
static size_t rows_of(const Rank* k, size_t rows, int p) {
    return fo_cut_n(rows, k->U, p);
}

// messages of n rows in m sub-chunks: those of no rows aren't sent
static size_t nchunks(size_t n, int m) {
    return n < (size_t)m ? n : (size_t)m;
}

// ---- D1 ---------------------------------------------------------------------------------------------------
enum { NGRADS = 7, TOKENS = 10, STEPS = 2, MICRO = 2, MOST_ROWS = 12, MOST_COLS = 6 };

// [rows, cols] of each: a multiple of 4 ranks, and of none; fewer rows than ranks; one
static const int SHAPES[NGRADS][2] = {{12, 4}, {7, 5}, {2, 6}, {1, 3}, {9, 6}, {5, 4}, {8, 3}};

enum { BEFORE = 3 }; // what is in ZeRO 2's shard before a step

static int grad_matrix(int matrix, int step, int micro, int grad) {
    return 10000 * (step + 1) + 1000 * (micro + 1) + 10 * grad + matrix;
}

// the sum over replicas and micro-steps
static void want_grad(const Rank* k, int* want, int step, int grad) {
    size_t rows = (size_t)SHAPES[grad][0], cols = (size_t)SHAPES[grad][1];
    memset(want, 0, rows * cols * sizeof *want);
    for (int p = 0; p < k->U; p++) {
        for (int micro = 0; micro < MICRO; micro++) {
            int dout = of_rank(grad_matrix(1, step, micro, grad), p),
                inp = of_rank(grad_matrix(2, step, micro, grad), p);
            for (size_t i = 0; i < rows * cols; i++) {
                for (size_t n = 0; n < TOKENS; n++) {
                    want[i] += value(dout, n, (int)(i / cols)) * value(inp, n, (int)(i % cols));
                }
            }
        }
    }
}

// gradients as a model has them: the first in a slot of its own, as the head's part of wte
typedef struct {
    Rank* k;
    int zero;
    FoReducer r;
    FoGradSlot head;
    FoOverlap *o[1 + FO_GRAD_SLOTS], *back[2]; // back: of the gradients 0 ... 2, and of the others
    float *grad[NGRADS], *before[NGRADS];      // [rows, cols], ZeRO 2: [own rows, cols]
    float* head_grad;                          // ZeRO 2: where the first is computed, in two slices of tokens
    floatX *dout, *inp;                        // of one after the other
    floatX* src[STEPS][MICRO][NGRADS][2];
    float* got[STEPS][NGRADS];
} Grads;

static size_t grad_nelem(const Grads* x, int grad) {
    size_t rows = (size_t)SHAPES[grad][0];
    return (x->zero == 2 ? rows_of(x->k, rows, x->k->u) : rows) * (size_t)SHAPES[grad][1];
}

static void grads_open(Grads* x, Rank* k, int zero) {
    memset(x, 0, sizeof *x);
    x->k = k, x->zero = zero;
    for (int i = 0; i <= FO_GRAD_SLOTS; i++) {
        FoGradSlot* slot = i == 0 ? &x->head : &x->r.slot[i - 1];
        size_t most = 0;
        for (int grad = i == 0 ? 0 : 1; grad < (i == 0 ? 1 : NGRADS); grad++) {
            size_t own = rows_of(k, (size_t)SHAPES[grad][0], k->u) * (size_t)SHAPES[grad][1];
            most = own > most ? own : most;
        }
        x->o[i] = overlap_up(k, "D1", FO_REDUCESCATTER, k->c.m);
        slot->o = x->o[i];
        slot->received = (float*)poisoned(k, (size_t)(k->U - 1) * most * sizeof(float));
        float* temp = (float*)poisoned(k, MOST_ROWS * MOST_COLS * sizeof(float));
        if (i == 0) {
            x->head_grad = temp;
        } else if (zero == 2) {
            slot->temp = temp;
        }
    }
    for (int i = 0; i < 2; i++) {
        x->back[i] = overlap_up(k, "D3", FO_ALLGATHER, 1);
    }
    x->dout = poisoned_rows(k, TOKENS, MOST_ROWS), x->inp = poisoned_rows(k, TOKENS, MOST_COLS);
    for (int grad = 0; grad < NGRADS; grad++) {
        x->grad[grad] = (float*)poisoned(k, grad_nelem(x, grad) * sizeof(float));
        x->before[grad] =
            (float*)numbers_of_type(k, of_rank(BEFORE, k->u), 0, 1, (int)grad_nelem(x, grad), FO_FP32);
        for (int i = 0; i < STEPS * MICRO; i++) {
            for (int j = 0; j < 2; j++) {
                x->src[i / MICRO][i % MICRO][grad][j] =
                    numbers(k, of_rank(grad_matrix(1 + j, i / MICRO, i % MICRO, grad), k->u), 0, TOKENS,
                            SHAPES[grad][j]);
            }
        }
    }
}

static void grads_close(Grads* x) {
    for (int i = 0; i <= FO_GRAD_SLOTS; i++) {
        fo_overlap_destroy(x->o[i]);
    }
    fo_overlap_destroy(x->back[0]);
    fo_overlap_destroy(x->back[1]);
    release(x->k);
}

// a gradient is complete on its owner: where it doesn't come back it is taken and spoilt at once
static void take_own(Grads* x, int step, int grad) {
    Rank* k = x->k;
    size_t cols = (size_t)SHAPES[grad][1], first = fo_cut((size_t)SHAPES[grad][0], k->U, k->u) * cols;
    size_t own = rows_of(k, (size_t)SHAPES[grad][0], k->u) * cols;
    if (x->zero == 0 && k->U > 1) { return; }
    x->got[step][grad] = (float*)allocate(k, own * sizeof(float));
    fo_copy(x->got[step][grad], x->grad[grad] + (x->zero == 2 ? 0 : first), own * sizeof(float), k->compute);
    queue_poison(k, x->grad[grad], grad_nelem(x, grad) * sizeof(float));
}

static void one_micro(Grads* x, int step, int micro) {
    Rank* k = x->k;
    int push = x->zero == 2 || micro == MICRO - 1;
    for (int grad = 0; grad < NGRADS; grad++) {
        int OC_ = SHAPES[grad][0], K_ = SHAPES[grad][1];
        size_t nbytes = TOKENS * sizeof(floatX);
        produce(k, x->dout, x->src[step][micro][grad][0], nbytes * (size_t)OC_);
        produce(k, x->inp, x->src[step][micro][grad][1], nbytes * (size_t)K_);
        rest(k);
        if (grad == 0 && x->zero == 2) {
            size_t half = TOKENS / 2;
            if (micro > 0) { queue_poison(k, x->head_grad, sizeof(float) * MOST_ROWS * MOST_COLS); }
            fo_zero(x->head_grad, (size_t)(OC_ * K_) * sizeof(float), k->compute);
            fo_matmul_wgrad(x->head_grad, NULL, x->dout, x->inp, half, K_, OC_, k->compute);
            fo_reducer_wgrad(&x->r, &x->head, x->head_grad, x->grad[0], NULL, x->dout + half * (size_t)OC_,
                             x->inp + half * (size_t)K_, half, K_, OC_);
        } else if (push) {
            fo_reducer_wgrad(&x->r, grad == 0 ? &x->head : NULL, x->grad[grad],
                             x->zero == 2 ? x->grad[grad] : NULL, x->zero == 0 ? x->back[grad >= 3] : NULL,
                             x->dout, x->inp, TOKENS, K_, OC_);
            // its slot has been taken again
            if (grad > FO_GRAD_SLOTS && micro == MICRO - 1) { take_own(x, step, grad - FO_GRAD_SLOTS); }
        } else {
            fo_matmul_wgrad(x->grad[grad], NULL, x->dout, x->inp, TOKENS, K_, OC_, k->compute);
        }
        queue_poison(k, x->dout, nbytes * (size_t)OC_);
        queue_poison(k, x->inp, nbytes * (size_t)K_);
    }
    fo_reducer_flush(&x->r);
    for (int grad = 0; grad < NGRADS && micro == MICRO - 1; grad++) {
        if (grad == 0 || grad >= NGRADS - FO_GRAD_SLOTS) { take_own(x, step, grad); }
    }
    fo_reducer_flush(&x->r); // nothing pends
}

static void one_step(Grads* x, int step) {
    Rank* k = x->k;
    for (int grad = 0; grad < NGRADS; grad++) {
        fo_zero(x->grad[grad], grad_nelem(x, grad) * sizeof(float), k->compute);
        if (x->zero == 2 && k->U > 1) { // sums are added to what is there
            fo_copy(x->grad[grad], x->before[grad], grad_nelem(x, grad) * sizeof(float), k->compute);
        }
    }
    for (int micro = 0; micro < MICRO; micro++) {
        one_micro(x, step, micro);
    }
    if (x->zero > 0 || k->U == 1) { return; }
    for (int grad = 0; grad < NGRADS; grad++) {
        if (grad == 0 || grad == 3) { fo_allgather_end(x->back[grad == 3]); }
        x->got[step][grad] = (float*)taken(k, x->grad[grad], grad_nelem(x, grad) * sizeof(float));
    }
}

static void check_grads(const Grads* x) {
    Rank* k = x->k;
    int want[MOST_ROWS * MOST_COLS];
    size_t nbytes = 0, nmessages = 0, nbytes_back = 0, nmessages_back = 0, others = (size_t)k->U - 1;
    for (int step = 0; step < STEPS; step++) {
        for (int grad = 0; grad < NGRADS; grad++) {
            size_t rows = (size_t)SHAPES[grad][0], cols = (size_t)SHAPES[grad][1], nelem = rows * cols;
            size_t own = rows_of(k, rows, k->u) * cols, first = fo_cut(rows, k->U, k->u) * cols;
            int *mine = want + first, whole = x->zero == 0 && k->U > 1;
            want_grad(k, want, step, grad);
            for (size_t i = 0; i < own && x->zero == 2 && k->U > 1; i++) {
                mine[i] += value(of_rank(BEFORE, k->u), 0, (int)i);
            }
            CHECK(wrong_values_fp32(k, x->got[step][grad], whole ? want : mine, whole ? nelem : own) == 0);
            size_t calls = x->zero == 2 ? MICRO : 1;
            nbytes += calls * (nelem - own) * sizeof(float);
            for (int p = 0; p < k->U; p++) {
                nmessages += p == k->u ? 0 : calls * nchunks(rows_of(k, rows, p), x->o[0]->plan.m);
            }
            if (x->zero == 0) {
                nbytes_back += others * own * sizeof(float), nmessages_back += own > 0 ? others : 0;
            }
        }
    }
    FoOverlap* const* back = x->back;
    size_t sent = 0, messages = 0;
    for (int i = 0; i <= FO_GRAD_SLOTS; i++) {
        sent += x->o[i]->nbytes_sent, messages += x->o[i]->nmessages;
    }
    CHECK(sent == nbytes && messages == nmessages);
    CHECK(back[0]->nbytes_sent + back[1]->nbytes_sent == nbytes_back);
    CHECK(back[0]->nmessages + back[1]->nmessages == nmessages_back);
}

static void test_grads(Rank* k, int zero) {
    Grads x;
    grads_open(&x, k, zero);
    for (int step = 0; step < STEPS; step++) {
        one_step(&x, step);
    }
    check_grads(&x);
    grads_close(&x);
}

// the owner adds in rank order: numbers of which another order would give another sum
static void test_order_of_grads(Rank* k) {
    enum { ROWS_ = 6, COLS_ = 3, NELEM = ROWS_ * COLS_ };
    float host[NELEM], got[NELEM], want[NELEM];
    size_t first = fo_cut(ROWS_, k->U, k->u) * COLS_, own = rows_of(k, ROWS_, k->u) * COLS_;
    FoReducer r = {0};
    floatX* zeros = (floatX*)allocate(k, TOKENS * ROWS_ * sizeof(floatX));
    float* grad = (float*)allocate(k, sizeof host);
    r.slot[0].o = overlap_up(k, "D1", FO_REDUCESCATTER, k->c.m);
    r.slot[0].received = (float*)poisoned(k, (size_t)k->U * NELEM * sizeof(float));
    for (size_t i = 0; i < NELEM; i++) {
        host[i] = order_value(k->u, i), want[i] = 0.0f;
        for (int p = 0; p < k->U; p++) {
            want[i] += order_value(p, i);
        }
    }
    fo_upload(grad, host, sizeof host, k->compute);
    fo_reducer_wgrad(&r, NULL, grad, NULL, NULL, zeros, zeros, TOKENS, COLS_, ROWS_);
    fo_reducer_flush(&r);
    fo_download(got, grad, sizeof got, k->compute);
    fo_stream_sync(k->compute);
    CHECK_BITS(got + first, want + first, own * sizeof(float));
    fo_overlap_destroy(r.slot[0].o);
    release(k);
}

/* The replicas' communication stands at a gate. But in mode none the next gradient is computed all the same,
 * before anything waits for the one before it. What follows a flush stands.
 */
static void test_grads_wait(Rank* k) {
    Grads x;
    Gate held = {0}, computed = {0}, behind = {1, 0, 0};
    FoStream* probe = fo_stream_create(k->d, "probe");
    grads_open(&x, k, 1);
    computed.open = 1;
    for (int grad = 0; grad < 2; grad++) {
        fo_zero(x.grad[grad], grad_nelem(&x, grad) * sizeof(float), k->compute);
    }
    queue_gate(k->up_comm, &held);
    for (int grad = 0; grad < 2; grad++) {
        fo_reducer_wgrad(&x.r, NULL, x.grad[grad], NULL, NULL, x.src[0][0][grad][0], x.src[0][0][grad][1],
                         TOKENS, SHAPES[grad][1], SHAPES[grad][0]);
    }
    fo_stream_wait(probe, x.r.slot[1].o->computed[0], NULL);
    queue_gate(probe, &computed);
    fo_reducer_flush(&x.r);
    queue_gate(k->compute, &behind);
    if (k->U > 1) {
        usleep(20000);
        CHECK(!is_set(&behind.passed));
    }
    open_later(&held, &computed, k->U == 1 || k->c.mode != FO_NONE);
    fo_stream_sync(k->compute);
    CHECK(!is_set(&held.late));
    fo_stream_destroy(probe);
    grads_close(&x);
}

// ---- D3 ---------------------------------------------------------------------------------------------------
/* Rows of several arrays come back through one gather, one begun behind the other before any has ended; then
 * again, with nothing synced. Odd sizes of rows; rows that P doesn't divide, and fewer than ranks.
 */
static void test_rows_back(Rank* k) {
    enum { ARRAYS = 4 };
    static const size_t N[ARRAYS] = {12, 7, 2, 1};
    static const int COLS_[ARRAYS] = {3, 5, 1, 6};
    FoOverlap* o = overlap_up(k, "D3", FO_ALLGATHER, k->c.m);
    floatX *all[ARRAYS], *src[2][ARRAYS], *got[2][ARRAYS];
    size_t nbytes = 0, nmessages = 0, others = (size_t)k->U - 1;
    for (int i = 0; i < ARRAYS; i++) {
        all[i] = poisoned_rows(k, N[i], COLS_[i]);
        for (int j = 0; j < 2; j++) {
            src[j][i] = numbers(k, 10 * j + i, 0, N[i], COLS_[i]);
        }
    }
    for (int j = 0; j < 2; j++) {
        for (int i = 0; i < ARRAYS; i++) {
            size_t row = (size_t)COLS_[i] * sizeof(floatX), first = fo_cut(N[i], k->U, k->u);
            size_t own = rows_of(k, N[i], k->u), at = first * (size_t)COLS_[i];
            produce(k, all[i] + at, src[j][i] + at, own * row);
            rest(k);
            fo_allgather_rows_begin(o, all[i], row, N[i]);
            nbytes += others * own * row;
            nmessages += others * nchunks(own, o->plan.m);
        }
        stagger(k);
        fo_allgather_end(o);
        for (int i = 0; i < ARRAYS; i++) {
            got[j][i] = (floatX*)taken(k, all[i], N[i] * (size_t)COLS_[i] * sizeof(floatX));
        }
    }
    for (int i = 0; i < 2 * ARRAYS; i++) {
        CHECK(wrong_rows(k, got[i / ARRAYS][i % ARRAYS], 10 * (i / ARRAYS) + i % ARRAYS, 0, N[i % ARRAYS],
                         COLS_[i % ARRAYS]) == 0);
    }
    CHECK(o->nbytes_sent == nbytes && o->nmessages == nmessages);
    fo_overlap_destroy(o);
    release(k);
}

// ---- D2 ---------------------------------------------------------------------------------------------------
enum { V = 23, BATCHES = 5, DOUT = 50, SHARD = 51 };

// of replica p: all over the vocabulary; one and the same; each replica's own owner's rows, so that nobody
// has any of another's; all of replica 0's batch in one row of the last owner's; few, in blocks
static int token(const Rank* k, int batch, int p, size_t row) {
    if (batch == 0) { return (value(80 + p, row, 0) + 2) * 4 + (int)(row % 6); }
    if (batch == 1) { return V - 1; }
    if (batch == 2) { return (int)fo_cut(V, k->U * k->P, p * k->P); }
    if (batch == 3) { return p == 0 ? V - 1 : (int)(row % 3); }
    return (int)((row / 4 + (size_t)p) % V);
}

// this tp rank's rows of the table, cut by owners
typedef struct {
    size_t v0, rows, first, own;
} Table;

static Table table_of(const Rank* k) {
    Table t;
    t.v0 = fo_cut(V, k->P, k->r), t.rows = fo_cut_n(V, k->P, k->r);
    t.first = fo_cut(t.rows, k->U, k->u), t.own = rows_of(k, t.rows, k->u);
    return t;
}

static size_t owner_of(const Rank* k, const Table* t, size_t row) {
    size_t p = 0;
    while (row >= fo_cut(t->rows, k->U, (int)p + 1)) {
        p++;
    }
    return p;
}

// the dense sum of a batch's gradient rows, of owned rows
static void want_shard(const Rank* k, const Table* t, int* want, int batch) {
    for (size_t i = 0; i < t->own * C; i++) {
        want[i] = value(of_rank(SHARD, k->u), i / C, (int)(i % C));
    }
    for (int p = 0; p < k->U; p++) {
        for (size_t n = 0; n < k->N; n++) {
            size_t row = (size_t)token(k, batch, p, n) - t->v0 - t->first; // of others: above
            for (int c = 0; c < C && row < t->own; c++) {
                want[row * C + (size_t)c] += value(of_rank(DOUT + batch, p), n, c);
            }
        }
    }
}

// different rows of the own batch that others own: what this rank sends, and to how many
static size_t want_sent(const Rank* k, const Table* t, int batch, size_t* nmessages) {
    unsigned char has[V] = {0}, to[FO_MAX_RANKS] = {0};
    size_t n = 0;
    for (size_t i = 0; i < k->N; i++) {
        size_t row = (size_t)token(k, batch, k->u, i) - t->v0;
        if (row >= t->rows || has[row]) { continue; }
        size_t p = owner_of(k, t, row);
        has[row] = 1;
        n += p != (size_t)k->u;
        *nmessages += p != (size_t)k->u && !to[p];
        to[p] = 1;
    }
    return n;
}

typedef struct {
    FoFetch* fetch;
    FoSparse* sparse;
    FoOverlap *fetched, *o;
    FoStaging st;
    Table t;
} Sparse;

static Sparse sparse_open(Rank* k) {
    Sparse x;
    x.t = table_of(k);
    size_t before = fo_device_nbytes(k->d);
    x.sparse = fo_sparse_create(k->d, k->N, x.t.rows, k->U, k->u, C);
    CHECK(fo_device_nbytes(k->d) - before == fo_sparse_nbytes(k->N, x.t.rows, k->U, k->u, C));
    x.fetch = fo_fetch_create(k->d, k->N);
    x.fetched = fo_overlap_create("E2", FO_ALLGATHER, k->c.mode, 1, FO_DIRECT, k->g, k->compute, k->comm);
    x.o = overlap_up(k, "D2 rows", FO_ALLGATHER, 1);
    x.st = staging(k);
    return x;
}

static void sparse_close(Rank* k, Sparse* x) {
    fo_overlap_destroy(x->fetched);
    fo_overlap_destroy(x->o);
    fo_fetch_destroy(k->d, x->fetch);
    fo_sparse_destroy(k->d, x->sparse);
    release(k);
}

static void sparse_set(Rank* k, Sparse* x, int batch) {
    int ids[4 * 2 * ROWS];
    size_t first[FO_MAX_RANKS + 1];
    for (int p = 0; p < k->U; p++) {
        for (size_t n = 0; n < k->N; n++) {
            ids[(size_t)p * k->N + n] = token(k, batch, p, n);
        }
    }
    for (int p = 0; p <= k->P; p++) {
        first[p] = fo_cut(V, k->P, p);
    }
    fo_fetch_set(x->fetch, ids + (size_t)k->u * k->N, k->N, first, k->P, k->r, k->compute);
    fo_sparse_set(x->sparse, ids, k->N, x->t.v0, k->U, k->u, k->compute);
}

static void sparse_reduce(Rank* k, Sparse* x, float* shard, floatX* dout) {
    size_t staged = k->N * C * fo_dtype_nbytes(k->c.wire);
    fo_fetch_encoder_backward_begin(dout, x->fetch, &x->st, C, x->fetched);
    queue_poison(k, dout, ROWS * C * sizeof(floatX));
    stagger(k);
    rest(k);
    fo_sparse_reduce_begin(x->sparse, x->fetch, &x->st, C, x->fetched, x->o);
    queue_poison(k, x->st.partial, staged); // the next primitive has them
    queue_poison(k, x->st.received, staged);
    stagger(k);
    rest(k);
    fo_sparse_reduce_end(x->sparse, shard, C, x->o);
    queue_poison(k, x->sparse->compact, x->sparse->most * C * sizeof(float));
    queue_poison(k, x->sparse->received, x->sparse->room * C * sizeof(float));
}

static void test_sparse(Rank* k) {
    Sparse x = sparse_open(k);
    size_t nrows = 0, nmessages = 0, shard_nbytes = x.t.own * C * sizeof(float);
    float *shard = (float*)poisoned(k, shard_nbytes), *got[BATCHES];
    floatX *dout = poisoned_rows(k, ROWS, C), *src[BATCHES];
    void* before = numbers_of_type(k, of_rank(SHARD, k->u), 0, x.t.own, C, FO_FP32);
    for (int batch = 0; batch < BATCHES; batch++) {
        src[batch] = numbers(k, of_rank(DOUT + batch, k->u), (size_t)k->r * ROWS, ROWS, C);
    }
    for (int batch = 0; batch < BATCHES; batch++) {
        fo_stream_sync(k->compute); // as fo_fetch_set and fo_sparse_set want it
        sparse_set(k, &x, batch);
        produce(k, shard, before, shard_nbytes);
        produce(k, dout, src[batch], ROWS * C * sizeof(floatX));
        rest(k);
        if (batch == 3) { fo_overlap_mark(x.o); } // the rows are added after it: it can't speak for them
        sparse_reduce(k, &x, shard, dout);
        got[batch] = (float*)taken(k, shard, shard_nbytes);
        nrows += want_sent(k, &x.t, batch, &nmessages);
    }
    for (int batch = 0; batch < BATCHES; batch++) {
        int want[V * C];
        want_shard(k, &x.t, want, batch);
        CHECK(wrong_values_fp32(k, got[batch], want, x.t.own * C) == 0);
    }
    CHECK(x.o->nbytes_sent == nrows * C * sizeof(float) && x.o->nmessages == nmessages);
    sparse_close(k, &x);
}

// D3 rows: what a batch needs of the table comes from the rows' owners, who alone have them; batch after
// batch
static void test_rows_fetched(Rank* k) {
    enum { TABLE = 5 };
    Sparse x = sparse_open(k);
    size_t row = C * sizeof(floatX), nrows = 0;
    floatX *table = poisoned_rows(k, V, C), *got[BATCHES];
    floatX* src = numbers(k, TABLE, x.t.v0 + x.t.first, x.t.own, C);
    for (int batch = 0; batch < BATCHES; batch++) {
        fo_stream_sync(k->compute);
        sparse_set(k, &x, batch);
        produce(k, table + x.t.first * C, src, x.t.own * row);
        rest(k);
        if (batch == 3) { fo_overlap_mark(x.o); } // the rows are packed after it: it can't speak for them
        const floatX* rows = fo_sparse_fetch_begin(x.sparse, table, C, x.o);
        queue_poison(k, table, V * row);
        stagger(k);
        fo_allgather_end(x.o);
        got[batch] = (floatX*)taken(k, (void*)(size_t)rows, x.fetch->nuniq * row);
        queue_poison(k, x.sparse->compact, x.sparse->most * C * sizeof(float));
        queue_poison(k, x.sparse->received, x.sparse->room * C * sizeof(float));
    }
    for (int batch = 0; batch < BATCHES; batch++) {
        unsigned char needs[V] = {0};
        size_t u = 0, wrong = 0;
        for (int p = 0; p < k->U; p++) {
            unsigned char asked[V] = {0};
            for (size_t n = 0; n < k->N; n++) {
                size_t at = (size_t)token(k, batch, p, n) - x.t.v0;
                if (at >= x.t.rows) { continue; }
                if (p == k->u) { needs[at] = 1; }
                nrows +=
                    p != k->u && !asked[at] && owner_of(k, &x.t, at) == (size_t)k->u; // what this rank sends
                asked[at] = 1;
            }
        }
        for (size_t at = 0; at < x.t.rows; at++) {
            if (needs[at]) { wrong += (size_t)wrong_rows(k, got[batch] + u++ * C, TABLE, x.t.v0 + at, 1, C); }
        }
        CHECK(wrong == 0);
    }
    CHECK(x.o->nbytes_sent == nrows * row);
    sparse_close(k, &x);
}

// all tokens are one: its owner adds what it has, then the replicas' sums in rank order
static void test_order_of_rows(Rank* k) {
    Sparse x = sparse_open(k);
    floatX host[ROWS * C], *dout = (floatX*)allocate(k, sizeof host);
    float *shard = (float*)allocate(k, x.t.own * C * sizeof(float)), got[V * C], want[V * C] = {0};
    for (size_t i = 0; i < ROWS * C; i++) {
        host[i] = fo_floatx(order_value(k->u, i));
    }
    sparse_set(k, &x, 1);
    fo_upload(dout, host, sizeof host, k->compute);
    sparse_reduce(k, &x, shard, dout);
    fo_download(got, shard, x.t.own * C * sizeof(float), k->compute);
    fo_stream_sync(k->compute);
    size_t row = V - 1 - x.t.v0 - x.t.first; // of others: above
    for (int p = 0; p < k->U; p++) {
        for (size_t c = 0; c < C && row < x.t.own; c++) {
            float sum = 0.0f;
            for (size_t n = 0; n < k->N; n++) {
                sum += order_value(p, n * C + c);
            }
            want[row * C + c] += sum;
        }
    }
    CHECK_BITS(got, want, x.t.own * C * sizeof(float));
    sparse_close(k, &x);
}

// D2 and D3: work queued between the halves goes on while communication stands, but in mode none
static void test_halves_wait(Rank* k) {
    Sparse x = sparse_open(k);
    FoOverlap* back = overlap_up(k, "D3", FO_ALLGATHER, 1);
    float* shard = (float*)allocate(k, x.t.own * C * sizeof(float));
    floatX *dout = numbers(k, DOUT, 0, ROWS, C), *all = poisoned_rows(k, ROWS, C);
    sparse_set(k, &x, 0);
    for (int half = 0; half < 2; half++) {
        Gate held = {0}, behind = {1, 0, 0};
        queue_gate(k->up_comm, &held);
        if (half == 0) {
            fo_fetch_encoder_backward_begin(dout, x.fetch, &x.st, C, x.fetched);
            fo_sparse_reduce_begin(x.sparse, x.fetch, &x.st, C, x.fetched, x.o);
        } else {
            fo_allgather_rows_begin(back, all, C * sizeof(floatX), ROWS);
        }
        queue_gate(k->compute, &behind);
        if (half == 0) {
            fo_sparse_reduce_end(x.sparse, shard, C, x.o);
        } else {
            fo_allgather_end(back);
        }
        open_later(&held, &behind, k->U == 1 || k->c.mode != FO_NONE);
        fo_stream_sync(k->compute);
        fo_stream_sync(k->up_comm);
        CHECK(!is_set(&held.late));
    }
    fo_overlap_destroy(back);
    sparse_close(k, &x);
}

// ---- all of it --------------------------------------------------------------------------------------------
static const Config CONFIGS[] = {
    {FO_NONE, 1, FO_DIRECT, FO_FLOATX, 0},  {FO_SLICE, 1, FO_DIRECT, FO_FLOATX, 0},
    {FO_SLICE, 2, FO_DIRECT, FO_FLOATX, 0}, {FO_FLASH, 1, FO_DIRECT, FO_FP32, 0},
    {FO_FLASH, 1, FO_DIRECT, FO_FLOATX, 1}, {FO_FLASH, 2, FO_DIRECT, FO_FLOATX, 0},
};

static void body(FoGroup* world, void* arg) {
    Rank k;
    mesh_open(&k, world, *(int*)arg);
    for (size_t i = 0; i < sizeof CONFIGS / sizeof *CONFIGS; i++) {
        k.c = CONFIGS[i];
        check_at_config(&k, "");
        for (int zero = 0; zero < (k.U == 1 || k.c.idle ? 2 : 3); zero++) {
            test_grads(&k, zero);
        }
        test_order_of_grads(&k);
        test_rows_back(&k);
        test_sparse(&k);
        test_rows_fetched(&k);
        test_order_of_rows(&k);
        if (k.c.m == 1) {
            test_grads_wait(&k);
            test_halves_wait(&k);
        }
    }
    rank_close(&k);
}

// ---- refusals ---------------------------------------------------------------------------------------------
// what a caller must not do; arg says which
static void wrong_call(FoGroup* world, void* arg) {
    Rank k;
    int which = *(int*)arg;
    mesh_open(&k, world, 1);
    k.c = (Config){FO_FLASH, 1, FO_DIRECT, FO_FLOATX, 0};
    Sparse x = sparse_open(&k);
    FoOverlap *ring = fo_overlap_create("ring", FO_REDUCESCATTER, FO_FLASH, 1, FO_RING, k.up, k.compute,
                                        k.up_comm),
              *cut = overlap_up(&k, "cut", FO_ALLGATHER, 2);
    floatX *dout = poisoned_rows(&k, ROWS, C), *inp = poisoned_rows(&k, ROWS, C);
    float* grad = (float*)poisoned(&k, C * C * sizeof(float));
    FoReducer r = {0};
    r.slot[0].o = which == 0 ? ring : cut, r.slot[0].received = grad;
    if (which < 2) { fo_reducer_wgrad(&r, NULL, grad, NULL, NULL, dout, inp, ROWS, C, C); }
    if (which == 2) { fo_allgather_rows_begin(ring, dout, sizeof(floatX), ROWS); }
    sparse_set(&k, &x, 0);
    fo_stream_sync(k.compute); // lists are uploaded | and written anew
    if (which == 4) { sparse_set(&k, &x, 2), x.sparse->give[2]++; }
    fo_fetch_encoder_backward_begin(dout, x.fetch, &x.st, C, x.fetched);
    fo_sparse_reduce_begin(x.sparse, x.fetch, &x.st, C, x.fetched, which == 3 ? cut : x.o);
}

static void test_refusals(void) {
    static const char* says[] = {"ring: wants a direct plan", "cut: a plan of the wrong kind",
                                 "ring: a plan of the wrong kind", "cut: wants a direct plan with m=1",
                                 "D2 rows: 1 different rows, 2 were expected"};
    for (int which = 0; which < 5; which++) {
        CHECK_AT("refusal %d", which);
        CHECK_DIES(fo_ranks_run(2, wrong_call, &which), says[which]);
    }
}

int main(void) {
    test_refusals();                                                         // before any thread has started
    static const int MESHES[][2] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {2, 2}}; // replicas, tp
    for (size_t i = 0; i < sizeof MESHES / sizeof *MESHES; i++) {
        int tp = MESHES[i][1];
        fo_ranks_run(MESHES[i][0] * tp, body, &tp);
    }
    return check_report();
}
