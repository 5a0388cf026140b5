/* fo_fetch.c -- E1 and E2: rows of a table that is cut across ranks, fetched by those who need them, and
 * their gradients back to their owners. Only rows travel, N/P to a rank instead of the [N, C] of a
 * reduce-scatter.
 */
#include "flashoverlap/fo_exec.h"
#include <stdlib.h>

FoFetch* fo_fetch_create(FoDevice* d, size_t N) {
    FoFetch* f = (FoFetch*)calloc(1, sizeof *f);
    fo_require(f != NULL, "out of memory");
    size_t n = N + 1;
    f->N = N;
    f->tok = (int*)fo_malloc(d, 6 * n * sizeof(int));
    f->idx = f->tok + n, f->dst = f->idx + n, f->start = f->dst + n, f->order = f->start + n,
    f->uniq = f->order + n;
    f->host = (int*)calloc(6 * n, sizeof(int));
    fo_require(f->host != NULL, "out of memory");
    return f;
}

void fo_fetch_destroy(FoDevice* d, FoFetch* f) {
    if (!f) { return; }
    fo_free(d, f->tok);
    free(f->host);
    free(f);
}

static int owner_of(const size_t* first, int P, int id) {
    int p = 0;
    while (p < P - 1 && (size_t)id >= first[p + 1]) {
        p++;
    }
    return p;
}

typedef struct {
    int row, at;
} Entry;

static int by_row_then_place(const void* a, const void* b) {
    const Entry *x = (const Entry*)a, *y = (const Entry*)b;
    return x->row != y->row ? (x->row > y->row) - (x->row < y->row) : (x->at > y->at) - (x->at < y->at);
}

// idx[0 ... n-1] -> different rows, and for each the places where it occurs, in order
static void sort_rows(FoFetch* f, const int* idx, size_t n, int* dst, int* first, int* order) {
    Entry* entries = (Entry*)malloc((n + 1) * sizeof *entries);
    fo_require(entries != NULL, "out of memory");
    for (size_t i = 0; i < n; i++) {
        entries[i].row = idx[i];
        entries[i].at = (int)i;
    }
    qsort(entries, n, sizeof *entries, by_row_then_place);
    f->nuniq = 0;
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || entries[i].row != entries[i - 1].row) {
            dst[f->nuniq] = entries[i].row;
            first[f->nuniq++] = (int)i;
        }
        order[i] = entries[i].at;
    }
    first[f->nuniq] = (int)n;
    free(entries);
}

void fo_fetch_set(FoFetch* f, const int* ids, size_t N, const size_t* first, int P, int r, FoStream* s) {
    fo_require(N <= f->N && N % (size_t)P == 0, "N=%zu tokens, want at most %zu and a multiple of %d", N,
               f->N, P);
    size_t stride = f->N + 1, shard = N / (size_t)P;
    int *tok = f->host, *idx = tok + stride, *dst = idx + stride, *start = dst + stride,
        *order = start + stride, *uniq = order + stride;
    size_t nneed = 0, ngive = 0;
    for (int p = 0; p < P; p++) {
        f->need[p] = nneed;
        f->give[p] = ngive;
        for (size_t i = 0; i < shard; i++) {
            if (owner_of(first, P, ids[(size_t)r * shard + i]) == p) { tok[nneed++] = (int)i; }
            int id = ids[(size_t)p * shard + i];
            if (owner_of(first, P, id) == r) { idx[ngive++] = id - (int)first[r]; }
        }
    }
    f->need[P] = nneed;
    f->give[P] = ngive;
    sort_rows(f, idx, ngive, dst, start, order);
    for (size_t u = 0; u < f->nuniq; u++) {
        for (int k = start[u]; k < start[u + 1]; k++) {
            uniq[order[k]] = (int)u;
        }
    }
    fo_upload(f->tok, f->host, 6 * stride * sizeof(int), s);
}

static size_t ngroup(const size_t* group, int p) {
    return group[p + 1] - group[p];
}

static void require_direct(const FoOverlap* o) {
    fo_require(o->plan.kind == FO_ALLGATHER && o->plan.topology == FO_DIRECT && o->plan.m == 1,
               "%s: fetching rows wants a direct all-gather plan with m=1", o->name);
}

void fo_fetch_encoder_forward(floatX* out, const floatX* table, int compact, const floatX* wpe,
                              const int* pos, FoFetch* f, FoStaging* st, int C, FoOverlap* o) {
    require_direct(o);
    const FoPlan* plan = &o->plan;
    floatX* pack = (floatX*)st->partial;     // [give, C]
    floatX* fetched = (floatX*)st->received; // [need, C]
    fo_gather_rows(pack, table, compact ? f->uniq : f->idx, f->give[plan->P], C, o->compute);
    fo__begin_groups(o, pack, f->give, fetched, f->need, (size_t)C * sizeof(floatX));
    for (int k = 0; k < plan->ncomputes; k++) {
        const FoCompute* c = &plan->computes[k];
        int p = c->chunk;
        const floatX* rows = p == plan->r ? pack + f->give[p] * (size_t)C : fetched + f->need[p] * (size_t)C;
        fo__wait(o, c->after_exchanges); // the owner's rows are here | they become activations
        fo_encoder_forward(out, rows, wpe, f->tok + f->need[p], pos, ngroup(f->need, p), C, o->compute);
    }
}

void fo_fetch_encoder_backward_begin(const floatX* dout, FoFetch* f, FoStaging* st, int C, FoOverlap* o) {
    require_direct(o);
    const FoPlan* plan = &o->plan;
    floatX* pack = (floatX*)st->received; // [need, C]; the own group goes straight to its place among `rows`
    floatX* rows = (floatX*)st->partial;  // [give, C]
    for (int p = 0; p < plan->P; p++) {
        floatX* dst = p == plan->r ? rows + f->give[p] * (size_t)C : pack + f->need[p] * (size_t)C;
        fo_gather_rows(dst, dout, f->tok + f->need[p], ngroup(f->need, p), C, o->compute);
    }
    fo__begin_groups(o, pack, f->need, rows, f->give, (size_t)C * sizeof(floatX));
}

void fo_fetch_encoder_backward_end(float* dtable, FoFetch* f, FoStaging* st, int C, FoOverlap* o) {
    fo_allgather_end(o); // all gradient rows are here | they are added
    fo_scatter_add_rows(dtable, (const floatX*)st->partial, f->dst, f->start, f->order, f->nuniq, C,
                        o->compute);
}
