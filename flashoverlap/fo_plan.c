/* fo_plan.c -- builds the schedules of fo_plan.h. Pure functions; each order is a line. */
#include "flashoverlap/fo_plan.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int mod(int a, int P) {
    return ((a % P) + P) % P;
}

const char* fo_mode_name(FoMode mode) {
    return mode == FO_NONE ? "none" : mode == FO_SLICE ? "slice" : "flash";
}

static void add_exchange(FoPlan* p, int send, int to, int recv, int from, int after_computes) {
    FoExchange e = {send, to, recv, from, after_computes};
    p->exchanges[p->nexchanges++] = e;
}

static void add_compute(FoPlan* p, int chunk, int add, int after_exchanges) {
    FoCompute c = {chunk, add, after_exchanges};
    p->computes[p->ncomputes++] = c;
}

// whose shard the consumer computes at step i: the own first, the others in the order in which they arrive
static int gather_owner(const FoPlan* p, int i) {
    return mod(p->topology == FO_DIRECT ? p->r + i : p->r - i, p->P);
}

// step i = 1 ... P-1 of a gather, sub-chunk s
static void gather_exchange(FoPlan* p, int i, int s) {
    int P = p->P, r = p->r, m = p->m;
    if (p->topology == FO_DIRECT) { // the own shard to r-i, that of r+i from its owner
        add_exchange(p, r * m + s, mod(r - i, P), mod(r + i, P) * m + s, mod(r + i, P), 0);
    } else { // what came last goes on to the right, the next comes from the left
        add_exchange(p, mod(r - i + 1, P) * m + s, mod(r + 1, P), mod(r - i, P) * m + s, mod(r - 1, P), 0);
    }
}

static void plan_allgather(FoPlan* p) {
    int P = p->P, m = p->m;
    if (p->mode == FO_FLASH) {
        for (int s = 0; s < m; s++) {
            add_compute(p, p->r * m + s, 0, 0);
        }
        for (int i = 1; i < P; i++) {
            for (int s = 0; s < m; s++) {
                gather_exchange(p, i, s);
                add_compute(p, gather_owner(p, i) * m + s, 0, p->nexchanges);
            }
        }
        return;
    }
    for (int s = 0; s < m; s++) { // a slice: sub-chunk s of every owner, computed when all of it is here
        for (int i = 1; i < P; i++) {
            gather_exchange(p, i, s);
        }
        for (int i = 0; i < P; i++) {
            add_compute(p, gather_owner(p, i) * m + s, 0, p->nexchanges);
        }
    }
}

// whose chunk the producer computes at step i = 0 ... P-1: the own is last
static int scatter_owner(const FoPlan* p, int i) {
    return mod(p->topology == FO_DIRECT ? p->r + 1 + i : p->r - 1 - i, p->P);
}

// the exchange that follows step i = 0 ... P-2: the chunk of that step leaves
static void scatter_exchange(FoPlan* p, int i, int s, int after_computes) {
    int P = p->P, r = p->r, m = p->m, c = scatter_owner(p, i);
    if (p->topology ==
        FO_DIRECT) { // to its owner; a partial sum of the own chunk from whoever has just made it
        add_exchange(p, c * m + s, c, r * m + s, mod(r - 1 - i, P), after_computes);
    } else { // to the right; the next step's chunk comes from the left, to be added to
        add_exchange(p, c * m + s, mod(r + 1, P), scatter_owner(p, i + 1) * m + s, mod(r - 1, P),
                     after_computes);
    }
}

static void plan_reducescatter_flash(FoPlan* p) {
    int P = p->P, m = p->m, ring = p->topology == FO_RING;
    for (int i = 0; i < P; i++) {
        for (int s = 0; s < m; s++) {
            int chunk = scatter_owner(p, i) * m + s;
            add_compute(p, chunk, 0, 0);
            // the hop before has brought this chunk's sum so far; what arrives for the own chunk is added at
            // the end
            if (ring && i > 0 && i < P - 1) { add_compute(p, chunk, 1, (i - 1) * m + s + 1); }
            if (i < P - 1) { scatter_exchange(p, i, s, p->ncomputes); }
        }
    }
}

// slice s leaves while slice s+1 is computed; along a ring its adds stand between the computes of that slice
static void plan_reducescatter_slice(FoPlan* p) {
    int P = p->P, m = p->m, ring = p->topology == FO_RING;
    for (int s = 0; s <= m; s++) {
        int sliced = p->ncomputes; // slice s-1 is computed
        for (int i = 0; i < P; i++) {
            if (ring && s > 0 && i > 0 && i < P - 1) {
                add_compute(p, scatter_owner(p, i) * m + s - 1, 1, (s - 1) * (P - 1) + i);
            }
            if (s > 0 && i < P - 1) { scatter_exchange(p, i, s - 1, ring ? p->ncomputes : sliced); }
            if (s < m) { add_compute(p, scatter_owner(p, i) * m + s, 0, 0); }
        }
    }
}

int fo_plan_init(FoPlan* p, FoKind kind, FoMode mode, int m, FoTopology topology, int P, int r,
                 char err[256]) {
    memset(p, 0, sizeof *p);
    if (P < 1 || P > FO_PLAN_MAX_RANKS || r < 0 || r >= P) {
        snprintf(err, 256, "rank %d of %d: want 1 to %d ranks, and a rank among them", r, P,
                 FO_PLAN_MAX_RANKS);
        return -1;
    }
    if (m < 1 || m > FO_MAX_M || (mode == FO_NONE && m != 1)) {
        snprintf(err, 256, "m=%d: want 1 to %d (1 for mode none)", m, FO_MAX_M);
        return -1;
    }
    p->kind = kind, p->mode = mode, p->topology = topology;
    p->m = m, p->P = P, p->r = r;
    size_t nchunks = (size_t)P * (size_t)m; // along a ring a chunk may be computed and added to
    p->exchanges = (FoExchange*)malloc(nchunks * sizeof *p->exchanges);
    p->computes = (FoCompute*)malloc(2 * nchunks * sizeof *p->computes);
    if (!p->exchanges || !p->computes) {
        fo_plan_free(p);
        snprintf(err, 256, "no memory for a plan of %zu chunks", nchunks);
        return -1;
    }
    if (kind == FO_ALLGATHER) {
        plan_allgather(p);
    } else if (mode == FO_FLASH) {
        plan_reducescatter_flash(p);
    } else {
        plan_reducescatter_slice(p);
    }
    return 0;
}

void fo_plan_free(FoPlan* p) {
    free(p->exchanges);
    free(p->computes);
    memset(p, 0, sizeof *p);
}

// rank r of plans [P]: its sends against their receives, its computes against the chunks there are
static int rank_fits(const FoPlan* plans, int r, char err[256]) {
    const FoPlan* p = &plans[r];
    long long sum = 0, nchunks = (long long)p->P * p->m, n = 0;
    for (int e = 0; e < p->nexchanges; e++) {
        const FoExchange *x = &p->exchanges[e], *y = &plans[x->send_to].exchanges[e];
        if (e >= plans[x->send_to].nexchanges || y->recv_from != r || y->recv != x->send) {
            snprintf(err, 256, "exchange %d: rank %d sends chunk %d to rank %d, which expects %d from %d", e,
                     r, x->send, x->send_to, y->recv, y->recv_from);
            return -1;
        }
    }
    for (int k = 0; k < p->ncomputes; k++) {
        sum += p->computes[k].add ? 0 : p->computes[k].chunk;
        n += !p->computes[k].add;
    }
    if (n != nchunks || sum != nchunks * (nchunks - 1) / 2) {
        snprintf(err, 256, "rank %d computes %lld chunks, there are %lld", r, n, nchunks);
        return -1;
    }
    return 0;
}

int fo_plan_check(FoKind kind, FoMode mode, int m, FoTopology topology, int P, char err[256]) {
    FoPlan* plans = (FoPlan*)calloc(P > 0 ? (size_t)P : 1, sizeof *plans);
    int bad = plans == NULL;
    if (bad) { snprintf(err, 256, "no memory for %d plans", P); }
    for (int r = 0; r < P && !bad; r++) {
        bad = fo_plan_init(&plans[r], kind, mode, m, topology, P, r, err);
    }
    for (int r = 0; r < P && !bad; r++) {
        bad = rank_fits(plans, r, err);
    }
    for (int r = 0; r < P && plans; r++) {
        fo_plan_free(&plans[r]);
    }
    free(plans);
    return bad ? -1 : 0;
}

const char* fo_plan_print(const FoPlan* p, char* buf, size_t nbytes) {
    int n = snprintf(buf, nbytes, "%s %s %s m=%d P=%d r=%d:", p->kind == FO_ALLGATHER ? "ag" : "rs",
                     fo_mode_name(p->mode), p->topology == FO_DIRECT ? "direct" : "ring", p->m, p->P, p->r);
    int e = 0;
    for (int k = 0; k <= p->ncomputes; k++) {
        for (; e < p->nexchanges && p->exchanges[e].after_computes <= k &&
               (k == p->ncomputes || e < p->computes[k].after_exchanges || p->kind == FO_REDUCESCATTER);
             e++) {
            const FoExchange* x = &p->exchanges[e];
            if (n >= 0 && (size_t)n < nbytes) {
                n += snprintf(buf + n, nbytes - (size_t)n, " [%d>%d %d<%d]", x->send, x->send_to, x->recv,
                              x->recv_from);
            }
        }
        if (k < p->ncomputes && n >= 0 && (size_t)n < nbytes) {
            n += snprintf(buf + n, nbytes - (size_t)n, " %s%d", p->computes[k].add ? "+" : "",
                          p->computes[k].chunk);
        }
    }
    return buf;
}
