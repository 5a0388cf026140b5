// fo_allreduce.c -- see fo_allreduce.h.
#include "flashoverlap/fo_allreduce.h"
#include "flashoverlap/fo_ops.h"

// sum = parts of all ranks, n elements of them from `first` on
static void add_parts(float* sum, const float* parts, size_t nelem, size_t first, size_t n, int P,
                      FoStream* s) {
    const float* at[FO_MAX_RANKS];
    for (int p = 0; p < P; p++) {
        at[p] = parts + (size_t)p * nelem + first;
    }
    fo_sum(sum + first, at, n, P, s);
}

void fo_allreduce(FoAllreduce plan, float* sum, float* parts, size_t nelem, FoGroup* g, FoStream* s) {
    const int P = fo_group_size(g), r = fo_group_rank(g);
    const size_t first = fo_cut(nelem, P, r), share = fo_cut_n(nelem, P, r); // what r sums for all
    if (plan == FO_PUSH) {
        fo_allgather(g, parts, nelem * sizeof(float), s);
        add_parts(sum, parts, nelem, 0, nelem, P, s);
        return;
    }
    fo_comm_begin(g, s);
    for (int i = 1; i < P; i++) {
        int to = (r + P - i) % P, from = (r + i) % P;
        fo_send(g, parts + (size_t)r * nelem + fo_cut(nelem, P, to), fo_cut_n(nelem, P, to) * sizeof(float),
                to);
        fo_recv(g, parts + (size_t)from * nelem + first, share * sizeof(float), from);
    }
    fo_comm_end(g);
    add_parts(sum, parts, nelem, first, share, P, s);
    fo_comm_begin(g, s);
    for (int i = 1; i < P; i++) {
        int to = (r + P - i) % P, from = (r + i) % P;
        fo_send(g, sum + first, share * sizeof(float), to);
        fo_recv(g, sum + fo_cut(nelem, P, from), fo_cut_n(nelem, P, from) * sizeof(float), from);
    }
    fo_comm_end(g);
}

size_t fo_allreduce_nbytes(FoAllreduce plan, size_t nelem, int P, int r) {
    const size_t share = fo_cut_n(nelem, P, r), peers = (size_t)(P - 1);
    return (plan == FO_PUSH ? peers * nelem : nelem - share + peers * share) * sizeof(float);
}
