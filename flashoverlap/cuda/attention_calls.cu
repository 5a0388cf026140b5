// attention_calls.cu -- which calls of an engine compute some rows: see attention_calls.h. No CUDA here.
#include "flashoverlap/cuda/attention_calls.h"

// rows from a sequence to the next
static size_t rows_a_sequence(FoLayout l) {
    return (size_t)(l.zigzag ? 2 * fo_layout_run(l) : l.T);
}

// positions from t on, which begins a run, that follow each other in rows: the last shard's blocks adjoin
static int run_from(FoLayout l, int t) {
    int run = fo_layout_run(l);
    return l.zigzag && t == (l.P - 1) * run ? 2 * run : run;
}

// rows [row0, row0 + n) as stretches of positions t0 ... t0+len-1 of sequences seq0 ... seq0+nseq-1
typedef struct {
    int seq0, nseq, t0, len;
    size_t row; // of the first
} Stretch;

static int find_stretches(Stretch found[FO_SDPA_CALLS], size_t row0, size_t n, FoLayout l) {
    int nfound = 0;
    for (int t = 0, run; t < l.T; t += run) {
        run = run_from(l, t);
        for (int b = 0; b < l.B; b++) {
            size_t row = fo_layout_row(l, b, t), end = row + (size_t)run;
            size_t first = row > row0 ? row : row0;
            if (end > row0 + n) { end = row0 + n; }
            if (first >= end) { continue; }
            Stretch s = {b, 1, t + (int)(first - row), (int)(end - first), first};
            Stretch* last = nfound > 0 ? &found[nfound - 1] : NULL;
            if (last && last->t0 == s.t0 && last->len == s.len && last->seq0 + last->nseq == b) {
                last->nseq++;
            } else {
                found[nfound++] = s;
            }
        }
    }
    return nfound;
}

static FoSdpa sdpa(int nseq, int NH, int hs, int64_t queries, int64_t keys) {
    FoSdpa c;
    memset(&c, 0, sizeof c);
    c.nseq = nseq, c.heads = NH, c.hs = hs;
    c.queries = queries, c.keys = keys;
    return c;
}

static FoSdpaCall forward_call(const Stretch* x, FoLayout l, int NH, int hs) {
    int64_t C = (int64_t)NH * hs, step = (int64_t)rows_a_sequence(l);
    FoSdpa c = sdpa(x->nseq, NH, hs, x->len, x->t0 + x->len);
    c.q_row = 3 * C, c.q_seq = step * c.q_row;
    c.kv_row = l.zigzag ? 2 * C : 3 * C, c.kv_seq = l.T * c.kv_row;
    c.out_row = C, c.out_seq = step * C;
    c.bottom_right = x->t0 > 0;
    FoSdpaCall call = {c, x->seq0, x->t0, x->row, (size_t)x->seq0 * (size_t)l.T};
    return call;
}

// whole sequences, in the order of positions
static FoSdpaCall backward_call(FoSdpaKind kind, int seq0, int nseq, FoLayout l, int NH, int hs) {
    int64_t C = (int64_t)NH * hs, T = l.T;
    FoSdpa c = sdpa(nseq, NH, hs, T, T);
    c.q_row = c.kv_row = 3 * C, c.q_seq = c.kv_seq = T * 3 * C;
    c.out_row = C, c.out_seq = T * C;
    c.dq_row = kind == FO_SDPA_BACKWARD ? 3 * C : C, c.dq_seq = T * c.dq_row;
    c.dkv_row = kind == FO_SDPA_BACKWARD ? 3 * C : 2 * C, c.dkv_seq = T * c.dkv_row;
    c.backward = 1;
    size_t row = (size_t)seq0 * (size_t)T;
    FoSdpaCall call = {c, seq0, 0, row, row};
    return call;
}

// keys at their rows, with the queries of their and all later positions, which are gathered
static FoSdpaCall keys_call(const Stretch* x, FoLayout l, int NH, int hs) {
    int64_t C = (int64_t)NH * hs, T = l.T, step = (int64_t)rows_a_sequence(l);
    FoSdpa c = sdpa(x->nseq, NH, hs, T - x->t0, x->len);
    c.q_row = c.out_row = c.dq_row = C, c.q_seq = c.out_seq = T * C;
    c.dq_seq = c.queries * C;
    c.kv_row = 3 * C, c.kv_seq = step * 3 * C;
    c.dkv_row = 2 * C, c.dkv_seq = step * 2 * C;
    c.backward = 1;
    FoSdpaCall call = {c, x->seq0, x->t0, (size_t)x->seq0 * (size_t)T + (size_t)x->t0, x->row};
    return call;
}

int fo__sdpa_calls(FoSdpaCall calls[FO_SDPA_CALLS], FoSdpaGather* gather, FoSdpaKind kind, size_t row0,
                   size_t n, FoLayout l, int NH, int hs) {
    Stretch found[FO_SDPA_CALLS];
    size_t T = (size_t)l.T, N = (size_t)l.B * T;
    if (l.P == 1) { l.zigzag = 0; } // the same rows
    *gather = FO_SDPA_NONE;
    if (l.zigzag && kind == FO_SDPA_FORWARD) { *gather = FO_SDPA_KEYS; }
    if (l.zigzag && kind != FO_SDPA_FORWARD) {
        *gather = kind == FO_SDPA_BACKWARD || n == N ? FO_SDPA_ALL : FO_SDPA_QUERIES;
    }
    if (kind != FO_SDPA_FORWARD && *gather != FO_SDPA_QUERIES) {
        calls[0] = backward_call(kind, (int)(row0 / T), (int)(n / T), l, NH, hs);
        return 1;
    }
    int nfound = find_stretches(found, row0, n, l);
    for (int i = 0; i < nfound; i++) {
        calls[i] =
            kind == FO_SDPA_FORWARD ? forward_call(&found[i], l, NH, hs) : keys_call(&found[i], l, NH, hs);
    }
    return nfound;
}
