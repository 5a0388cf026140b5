// fo_zero.c -- data parallelism by flash overlap: D1, D2, D3. See fo_zero.h and the table in doc/overlap.md.
#include "flashoverlap/fo_zero.h"
#include "flashoverlap/fo_exec.h"
#include <stdlib.h>

// ---- D1 ---------------------------------------------------------------------------------------------------
typedef struct {
    float* dweight;
    const floatX *dout, *inp;
    size_t n;
    int K, OC;
} Wgrad;

static void wgrad_piece(void* ctx, int owner, size_t row0, size_t nrows, FoStream* s) {
    const Wgrad* x = (const Wgrad*)ctx;
    (void)owner;
    fo_matmul_wgrad_rows(x->dweight, x->dout, x->inp, row0, nrows, x->n, x->K, x->OC, s);
}

static void slot_end(FoGradSlot* slot) {
    const float* parts[FO_MAX_RANKS];
    if (!slot->pending) { return; }
    slot->pending = 0;
    FoOverlap* o = slot->o;
    int P = o->plan.P, r = o->plan.r;
    size_t nelem = fo_cut_n(slot->rows, P, r) * slot->K;
    for (int p = 0; p < P; p++) {
        parts[p] = p == r ? slot->own : slot->received + (size_t)(p < r ? p : p - 1) * nelem;
    }
    fo__wait(o, o->plan.nexchanges);
    const char* before = fo_stream_label(o->compute, o->name);
    fo_sum(slot->own, parts, nelem, P, o->compute);
    if (slot->shard) { fo_add(slot->shard, slot->own, nelem, FO_FP32, o->compute); }
    fo_stream_label(o->compute, before);
    if (slot->back) { fo_allgather_rows_begin(slot->back, slot->all, slot->K * sizeof(float), slot->rows); }
}

void fo_reducer_wgrad(FoReducer* r, FoGradSlot* slot, float* dweight, float* shard, FoOverlap* back,
                      const floatX* dout, const floatX* inp, size_t n, int K, int OC) {
    const int apart = slot != NULL;
    if (!apart) { slot = &r->slot[r->next]; }
    FoOverlap* o = slot->o;
    if (o->plan.P == 1) {
        fo_matmul_wgrad(dweight, NULL, dout, inp, n, K, OC, o->compute);
        return;
    }
    fo__require_direct(o, FO_REDUCESCATTER, 0);
    if (apart) {
        r->apart = slot;
    } else {
        r->next = (r->next + 1) % FO_GRAD_SLOTS;
    }
    slot_end(slot); // its last gradient has had the computation of those after it to arrive in
    if (slot->temp) {
        dweight = slot->temp;
        fo_zero(dweight, (size_t)OC * (size_t)K * sizeof(float), o->compute);
    }
    Wgrad x = {dweight, dout, inp, n, K, OC};
    const int P = o->plan.P, own = o->plan.r;
    const size_t row_nbytes = (size_t)K * sizeof(float), nown = fo_cut_n((size_t)OC, P, own);
    FoPieces io;
    fo__cut_pieces(io.send, dweight, P, (size_t)OC, row_nbytes);
    for (int p = 0; p < P; p++) {
        int at = p < own ? p : p == own ? 0 : p - 1; // a slot for each of the others, in their order
        FoPiece recv = {(char*)(slot->received + (size_t)at * nown * (size_t)K), row_nbytes, nown, 0};
        io.recv[p] = recv;
    }
    slot->all = dweight, slot->own = dweight + fo_cut((size_t)OC, P, own) * (size_t)K, slot->shard = shard;
    slot->rows = (size_t)OC, slot->K = (size_t)K, slot->back = back;
    fo__run(o, &io, wgrad_piece, &x);
    slot->pending = 1;
}

void fo_reducer_flush(FoReducer* r) {
    if (r->apart) { slot_end(r->apart); }
    r->apart = NULL;
    for (int i = 0; i < FO_GRAD_SLOTS; i++) {
        slot_end(&r->slot[(r->next + i) % FO_GRAD_SLOTS]);
    }
}

// ---- D3 ---------------------------------------------------------------------------------------------------
void fo_allgather_rows_begin(FoOverlap* o, void* all, size_t row_nbytes, size_t N) {
    FoPieces io;
    fo__require_kind(o, FO_ALLGATHER);
    fo__cut_pieces(io.send, all, o->plan.P, N, row_nbytes);
    fo__cut_pieces(io.recv, all, o->plan.P, N, row_nbytes);
    fo__begin(o, &io);
}

// ---- D2 ---------------------------------------------------------------------------------------------------
static size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

// entries that all ranks together can have of the own rows
static size_t entries(size_t most, size_t rows, int P, int r) {
    return (size_t)P * min_size(most, fo_cut_n(rows, P, r));
}

size_t fo_sparse_nbytes(size_t N, size_t rows, int P, int r, int C) {
    size_t most = min_size(N, rows), room = entries(most, rows, P, r);
    return (most + room) * (sizeof(int) + (size_t)C * sizeof(float));
}

FoSparse* fo_sparse_create(FoDevice* d, size_t N, size_t rows, int P, int r, int C) {
    FoSparse* f = (FoSparse*)calloc(1, sizeof *f);
    fo_require(f != NULL, "out of memory");
    f->rows = rows, f->most = min_size(N, rows), f->room = entries(f->most, rows, P, r);
    f->identity = (int*)fo_malloc(d, (f->most + f->room) * sizeof(int));
    f->dst = f->identity + f->most;
    f->compact = (float*)fo_malloc(d, (f->most + f->room) * (size_t)C * sizeof(float));
    f->received = f->compact + f->most * (size_t)C;
    f->host = (int*)malloc((f->most + f->room + 1) * sizeof(int));
    f->mark = (unsigned char*)malloc(rows + 1);
    fo_require(f->host && f->mark, "out of memory");
    for (size_t i = 0; i < f->most; i++) {
        f->host[i] = (int)i;
    }
    return f;
}

void fo_sparse_destroy(FoDevice* d, FoSparse* f) {
    if (!f) { return; }
    fo_free(d, f->identity);
    fo_free(d, f->compact);
    free(f->host);
    free(f->mark);
    free(f);
}

void fo_sparse_set(FoSparse* f, const int* ids, size_t n, size_t v0, int P, int r, FoStream* s) {
    size_t first = fo_cut(f->rows, P, r), end = fo_cut(f->rows, P, r + 1), ntaken = 0;
    int* dst = f->host + f->most;
    for (int p = 0; p < P; p++) {
        memset(f->mark, 0, f->rows);
        for (size_t i = 0; i < n; i++) {
            size_t row = (size_t)ids[(size_t)p * n + i] - v0; // wraps below v0: above rows, too
            if (row < f->rows) { f->mark[row] = 1; }
        }
        f->take[p] = ntaken;
        for (size_t row = first; row < end; row++) {
            if (f->mark[row]) { dst[ntaken++] = (int)(row - first); }
        }
        for (int q = 0; q < P && p == r; q++) { // the own compact rows are in the order of rows
            f->give[q + 1] = f->give[q];
            for (size_t row = fo_cut(f->rows, P, q); row < fo_cut(f->rows, P, q + 1); row++) {
                f->give[q + 1] += f->mark[row];
            }
        }
    }
    f->take[P] = ntaken;
    fo_upload(f->identity, f->host, (f->most + f->room) * sizeof(int), s);
}

const floatX* fo_sparse_fetch_begin(FoSparse* f, const floatX* table, int C, FoOverlap* o) {
    const int P = o->plan.P, r = o->plan.r;
    const size_t nown = f->take[r + 1] - f->take[r];
    floatX *rows = (floatX*)f->compact, *pack = (floatX*)f->received; // what D2 needs only later
    fo__require_direct(o, FO_ALLGATHER, 1);
    fo_gather_rows(pack, table + fo_cut(f->rows, P, r) * (size_t)C, f->dst, f->take[P], C, o->compute);
    fo_copy(rows + f->give[r] * (size_t)C, pack + f->take[r] * (size_t)C, nown * (size_t)C * sizeof(floatX),
            o->compute);
    fo__begin_groups(o, pack, f->take, rows, f->give, (size_t)C * sizeof(floatX));
    return rows;
}

void fo_sparse_reduce_begin(FoSparse* f, FoFetch* fetch, FoStaging* st, int C, FoOverlap* fetched,
                            FoOverlap* o) {
    size_t row = (size_t)C * sizeof(float), want = f->give[o->plan.P];
    fo__require_direct(o, FO_ALLGATHER, 1);
    fo_require(fetch->nuniq == want, "%s: %zu different rows, %zu were expected", o->name, fetch->nuniq,
               want);
    fo_allgather_end(fetched); // all gradient rows are here | they are added
    fo_zero(f->compact, fetch->nuniq * row, o->compute);
    fo_scatter_add_rows(f->compact, (const floatX*)st->partial, f->identity, fetch->start, fetch->order,
                        fetch->nuniq, C, o->compute);
    fo__begin_groups(o, f->compact, f->give, f->received, f->take, row);
}

void fo_sparse_reduce_end(FoSparse* f, float* shard, int C, FoOverlap* o) {
    int P = o->plan.P, r = o->plan.r;
    fo_allgather_end(o); // all ranks' rows are here | they are added
    for (int p = 0; p < P; p++) {
        const float* rows =
            p == r ? f->compact + f->give[r] * (size_t)C : f->received + f->take[p] * (size_t)C;
        fo_add_rows(shard, rows, f->dst + f->take[p], f->take[p + 1] - f->take[p], C, o->compute);
    }
}
