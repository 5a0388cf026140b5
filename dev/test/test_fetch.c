/* test_fetch.c -- E1 and E2, the fetching of a table's rows and the way back of their gradients: P = 1, 2, 3,
 * 4 ranks.
 *
 * As test_overlap.c, and with the same data: whole numbers, NaN wherever nothing is to be read, inputs
 * produced just before a call and overwritten right after it. Batches in which every rank needs rows of every
 * other, one rank's row alone, and only own rows; tables of which a rank has nothing.
 */
#include "dev/test/ranks.h"

enum { V = 11 }; // rows of the table

// ---- fetching rows ----------------------------------------------------------------------------------------
// the table's rows by rank; with three and four ranks one of them has none
static const size_t FIRST[5][5] = {{0}, {0, V}, {0, 5, V}, {0, 4, 4, V}, {0, 3, 7, 7, V}};

// all over the table; one and the same; only own rows, where there are any; rows in blocks
static int token(int batch, int P, size_t row) {
    int p = (int)(row / ROWS);
    if (batch == 0) { return (value(80, row, 0) + 2) * 2 + (int)(row % 3); }
    if (batch == 1) { return 1; }
    if (batch == 2) { return (int)(FIRST[P][p + 1] > FIRST[P][p] ? FIRST[P][p] : 0); }
    return (int)(row / 2 % V);
}

typedef struct {
    size_t nown; // rows of the table here
    int batch, want_out[ROWS * C], want_table[V * C];
    floatX *table, *wpe, *dout, *dout_src, *out[2], *seen[2];
    float* dtable;
    int* pos;
} Fetched;

// a mark that was made before a fetch is spent: the gather that follows waits for its own rows again
static void gather_after_mark(Rank* k, floatX* seen, const floatX* inp, FoOverlap* o) {
    size_t row = C * sizeof(floatX);
    floatX* all = poisoned_rows(k, k->N, C);
    queue_sleep(k->compute, 600);
    fo_copy(all + (size_t)k->r * ROWS * C, inp, ROWS * row, k->compute);
    fo_allgather_begin(o, all, row, k->N);
    fo_allgather_end(o);
    fo_copy(seen, all, k->N * row, k->compute);
}

// E1 and E2, twice in a row through the same staging; E2's first half is hidden under other work
static void fetch_twice(Rank* k, Fetched* x, FoFetch* f, FoOverlap* o) {
    FoStaging st = staging(k);
    floatX *table = poisoned_rows(k, V, C), *compact = poisoned_rows(k, V, C);
    size_t nbytes = k->N * C * sizeof(floatX), row = C * sizeof(floatX);
    for (int i = 0; i < 2; i++) {
        produce(k, table, x->table, x->nown * row);
        if (i == 1) { fo_overlap_mark(o); } // the rows are packed after it: it can't speak for them
        rest(k);
        // the second time from the rows alone that the tokens need
        if (i == 1) { fo_gather_rows(compact, table, f->dst, f->nuniq, C, k->compute); }
        fo_fetch_encoder_forward(x->out[i], i == 1 ? compact : table, i, x->wpe, x->pos, f, &st, C, o);
        queue_poison(k, table, x->nown * row);
        queue_poison(k, st.partial, nbytes);
        queue_poison(k, st.received, nbytes);
        if (i == 1) { gather_after_mark(k, x->seen[0], x->dout_src, o); }
        produce(k, x->dout, x->dout_src, ROWS * row);
        if (i == 1) { fo_overlap_mark(o); }
        rest(k);
        fo_fetch_encoder_backward_begin(x->dout, f, &st, C, o);
        queue_poison(k, x->dout, ROWS * row);
        queue_sleep(k->compute, random_below(k, 600));
        rest(k);
        fo_fetch_encoder_backward_end(x->dtable, f, &st, C, o);
        queue_poison(k, st.partial, nbytes);
        queue_poison(k, st.received, nbytes);
        if (i == 1) { gather_after_mark(k, x->seen[1], x->dout_src, o); }
    }
}

// rows that occur are in order, and so are the places of each: the order of the sum is that of ranks and rows
static int wrong_order(Rank* k, const FoFetch* f) {
    int dst[4 * ROWS + 1], start[4 * ROWS + 2], order[4 * ROWS + 1], wrong = 0;
    size_t n = f->give[k->P];
    fo_download(dst, f->dst, f->nuniq * sizeof(int), k->compute);
    fo_download(start, f->start, (f->nuniq + 1) * sizeof(int), k->compute);
    fo_download(order, f->order, n * sizeof(int), k->compute);
    fo_stream_sync(k->compute);
    for (size_t u = 0; u < f->nuniq; u++) {
        wrong += u > 0 && dst[u] <= dst[u - 1];
        for (int i = start[u] + 1; i < start[u + 1]; i++) {
            wrong += order[i] <= order[i - 1];
        }
    }
    return wrong + (start[0] != 0) + (start[f->nuniq] != (int)n);
}

static void test_fetch_batch(Rank* k, FoFetch* f, FoOverlap* o, Fetched* x) {
    int ids[4 * ROWS];
    const size_t* first = FIRST[k->P];
    memset(x->want_out, 0, sizeof x->want_out);
    memset(x->want_table, 0, sizeof x->want_table);
    for (size_t n = 0; n < k->N; n++) {
        ids[n] = token(x->batch, k->P, n);
        for (int c = 0; c < C; c++) {
            size_t i = n - (size_t)k->r * ROWS, id = (size_t)ids[n];
            if (n / ROWS == (size_t)k->r) {
                x->want_out[i * C + (size_t)c] = value(81, id, c) + value(82, i * 5 % 7, c);
            }
            if (id >= first[k->r] && id < first[k->r + 1]) { // both calls add
                x->want_table[(id - first[k->r]) * C + (size_t)c] += 2 * value(83, n, c);
            }
        }
    }
    fo_zero(x->dtable, V * C * sizeof(float), k->compute);
    fo_fetch_set(f, ids, k->N, first, k->P, k->r, k->compute);
    fetch_twice(k, x, f, o);
    fo_stream_sync(k->compute); // as fo_fetch_set of the next batch wants it
    CHECK(wrong_order(k, f) == 0);
    CHECK(wrong_rows(k, x->seen[0], 83, 0, k->N, C) == 0);
    CHECK(wrong_rows(k, x->seen[1], 83, 0, k->N, C) == 0);
    CHECK(wrong_values(k, x->out[0], x->want_out, ROWS * C) == 0);
    CHECK(wrong_values(k, x->out[1], x->want_out, ROWS * C) == 0);
    CHECK(wrong_values_fp32(k, x->dtable, x->want_table, x->nown * C) == 0);
}

static void test_fetch(Rank* k) {
    FoOverlap* o = overlap(k, "E1", FO_ALLGATHER);
    FoFetch* f = fo_fetch_create(k->d, k->N);
    const size_t* first = FIRST[k->P];
    Fetched x;
    int pos[ROWS];
    x.nown = first[k->r + 1] - first[k->r];
    for (x.batch = 0; x.batch < 4; x.batch++) {
        x.table = numbers(k, 81, first[k->r], x.nown, C);
        x.wpe = numbers(k, 82, 0, 7, C);
        x.dout_src = numbers(k, 83, (size_t)k->r * ROWS, ROWS, C);
        x.dout = poisoned_rows(k, ROWS, C);
        x.out[0] = poisoned_rows(k, ROWS, C);
        x.out[1] = poisoned_rows(k, ROWS, C);
        x.seen[0] = poisoned_rows(k, k->N, C);
        x.seen[1] = poisoned_rows(k, k->N, C);
        x.dtable = (float*)poisoned(k, V * C * sizeof(float));
        x.pos = (int*)allocate(k, sizeof pos);
        for (int i = 0; i < ROWS; i++) {
            pos[i] = i * 5 % 7;
        }
        fo_upload(x.pos, pos, sizeof pos, k->compute);
        test_fetch_batch(k, f, o, &x);
        release(k);
    }
    fo_fetch_destroy(k->d, f);
    fo_overlap_destroy(o);
}

// the same for the gradient rows of a fetch, of which every rank has some for each other
static void test_fetch_waits(Rank* k) {
    FoOverlap* o = overlap(k, "E2", FO_ALLGATHER);
    FoFetch* f = fo_fetch_create(k->d, k->N);
    FoStaging st = staging(k);
    floatX* dout = numbers(k, 83, (size_t)k->r * ROWS, ROWS, C);
    float* dtable = (float*)allocate(k, V * C * sizeof *dtable);
    Gate held = {0}, behind = {1, 0, 0};
    int ids[4 * ROWS];
    const size_t first[5] = {0, 1, 2, 3, 4};
    for (size_t n = 0; n < k->N; n++) {
        ids[n] = (int)(n % (size_t)k->P);
    }
    fo_fetch_set(f, ids, k->N, first, k->P, k->r, k->compute);
    queue_gate(k->comm, &held);
    fo_fetch_encoder_backward_begin(dout, f, &st, C, o);
    queue_gate(k->compute, &behind);
    fo_fetch_encoder_backward_end(dtable, f, &st, C, o);
    open_later(&held, &behind, k->c.mode != FO_NONE || k->P == 1);
    fo_stream_sync(k->compute);
    size_t sent = (size_t)(k->P - 1) * (ROWS / (size_t)k->P) * C * sizeof(floatX);
    CHECK(!is_set(&held.late));
    CHECK(o->nbytes_sent == sent && o->nmessages == (size_t)(k->P - 1));
    fo_fetch_destroy(k->d, f);
    fo_overlap_destroy(o);
    release(k);
}

static void body(FoGroup* g, void* arg) {
    Rank k;
    (void)arg;
    rank_open(&k, g);
    for (int mode = FO_NONE; mode <= FO_FLASH; mode++) {
        for (int idle = 0; idle < 2; idle++) {
            k.c = (Config){(FoMode)mode, 1, FO_DIRECT, FO_FLOATX, idle};
            check_at_config(&k, "");
            test_fetch(&k);
            test_fetch_waits(&k);
        }
    }
    rank_close(&k);
}

// what a caller must not do; arg says which
static void wrong_call(FoGroup* g, void* arg) {
    Rank k;
    int which = *(int*)arg, ids[12] = {0};
    const size_t first[3] = {0, 1, 2};
    rank_open(&k, g);
    k.c = (Config){FO_FLASH, which == 1 ? 2 : 1, which == 0 ? FO_RING : FO_DIRECT, FO_FLOATX, 0};
    FoOverlap* o = overlap(&k, "G1", which == 2 ? FO_REDUCESCATTER : FO_ALLGATHER);
    FoStaging st = {k.d, k.d, FO_FLOATX}; // never touched
    FoFetch* f = fo_fetch_create(k.d, 10);
    if (which < 2) { fo_fetch_encoder_forward(NULL, NULL, 0, NULL, NULL, f, &st, C, o); }
    if (which == 2) { fo_fetch_encoder_backward_begin(NULL, f, &st, C, o); }
    fo_fetch_set(f, ids, which == 3 ? 12 : 9, first, k.P, k.r, k.compute);
}

static void test_refusals(void) {
    static const char* says[] = {
        "G1: fetching rows wants a direct all-gather plan with m=1",
        "G1: fetching rows wants a direct all-gather plan with m=1",
        "G1: fetching rows wants a direct all-gather plan with m=1",
        "N=12 tokens, want at most 10 and a multiple of 2",
        "N=9 tokens, want at most 10 and a multiple of 2",
    };
    for (int which = 0; which < 5; which++) {
        CHECK_AT("refusal %d", which);
        CHECK_DIES(fo_ranks_run(2, wrong_call, &which), says[which]);
    }
}

int main(void) {
    test_refusals(); // before any thread has started
    for (int P = 1; P <= 4; P++) {
        fo_ranks_run(P, body, NULL);
    }
    return check_report();
}
