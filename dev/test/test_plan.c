/* test_plan.c -- the schedules of fo_plan.h, all of them for P = 1..16 and m = 1..4, larger m for some P.
 *
 * Three kinds of claims: what the lists of one rank say (each chunk once, own first or last, what waits for
 * what); what happens when P ranks execute them, two streams each, under random and adversarial interleavings
 * with real data flow (nothing hangs, nothing is read before it is there, every sum is complete); and how
 * long that takes on links of a given speed, against closed formulas. No thread, no clock. The executor's own
 * tests: test_overlap.c.
 */
#include "dev/test/check.h"
#include "flashoverlap/fo_plan.h"
#include <stdint.h>
#include <stdlib.h>

enum { MAX_P = 16, MAX_E = MAX_P * FO_MAX_M, MAX_K = 2 * MAX_E };

// the plans of all ranks of a group
typedef struct {
    FoKind kind;
    FoMode mode;
    FoTopology topology;
    int m, P;
    FoPlan plan[MAX_P];
} Case;

static uint64_t random_state = 1;

static int random_below(int n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

// ---- the lists --------------------------------------------------------------------------------------------
static void check_numbers_in_range(const Case* c) {
    int P = c->P, m = c->m, bad = 0;
    for (int r = 0; r < P; r++) {
        const FoPlan* p = &c->plan[r];
        bad += p->kind != c->kind || p->mode != c->mode || p->topology != c->topology;
        bad += p->m != m || p->P != P || p->r != r || p->nexchanges != (P - 1) * m;
        int after = 0;
        for (int e = 0; e < p->nexchanges; e++) {
            const FoExchange* x = &p->exchanges[e];
            bad += x->send < 0 || x->send >= P * m || x->recv < 0 || x->recv >= P * m;
            bad += x->send_to < 0 || x->send_to >= P || x->recv_from < 0 || x->recv_from >= P;
            bad += x->send_to == r || x->recv_from == r;
            bad += x->after_computes < after || x->after_computes > p->ncomputes;
            after = x->after_computes;
        }
        for (int k = 0; k < p->ncomputes; k++) {
            bad += p->computes[k].chunk < 0 || p->computes[k].chunk >= P * m;
            bad += p->computes[k].after_exchanges < 0 || p->computes[k].after_exchanges > p->nexchanges;
        }
    }
    CHECK(bad == 0);
}

static void check_computed_once(const Case* c) {
    int bad = 0, nadds = 0;
    for (int r = 0; r < c->P; r++) {
        int times[MAX_E] = {0};
        for (int k = 0; k < c->plan[r].ncomputes; k++) {
            if (c->plan[r].computes[k].add) {
                nadds++;
            } else {
                times[c->plan[r].computes[k].chunk]++;
            }
        }
        for (int chunk = 0; chunk < c->P * c->m; chunk++) {
            bad += times[chunk] != 1;
        }
    }
    CHECK(bad == 0);
    // only a ring's hops between the first and the last add on the way
    int ring_adds = c->kind == FO_REDUCESCATTER && c->topology == FO_RING && c->P > 2;
    CHECK(nadds == (ring_adds ? c->P * (c->P - 2) * c->m : 0));
}

// exchange e of a rank meets exchange e of both its peers, and each is a permutation of the ranks
static void check_sends_meet_receives(const Case* c) {
    int bad = 0;
    for (int e = 0; e < (c->P - 1) * c->m; e++) {
        unsigned hit = 0;
        for (int r = 0; r < c->P; r++) {
            const FoExchange* x = &c->plan[r].exchanges[e];
            const FoExchange* peer = &c->plan[x->send_to].exchanges[e];
            bad += peer->recv_from != r || peer->recv != x->send;
            bad += c->topology == FO_RING &&
                   (x->send_to != (r + 1) % c->P || x->recv_from != (r + c->P - 1) % c->P);
            hit |= 1u << x->send_to;
        }
        bad += hit != (1u << c->P) - 1;
    }
    CHECK(bad == 0);
}

static void check_own_first_or_last(const Case* c) {
    int bad = 0, m = c->m;
    for (int r = 0; r < c->P; r++) {
        const FoPlan* p = &c->plan[r];
        for (int s = 0; s < m; s++) {
            int k = c->kind == FO_ALLGATHER ? s : p->ncomputes - m + s;
            bad += p->computes[k].chunk != r * m + s;
            bad += c->kind == FO_ALLGATHER && p->computes[k].after_exchanges != 0;
        }
    }
    CHECK(bad == 0);
}

// the number of exchanges after which chunk is at rank r
static int arrives_after(const FoPlan* p, int chunk) {
    for (int e = 0; e < p->nexchanges; e++) {
        if (p->exchanges[e].recv == chunk) { return e + 1; }
    }
    return 0;
}

// a gather: what each compute waits for is what the mode says, no more and no less
static void check_gather_waits(const Case* c) {
    int bad = 0;
    for (int r = 0; r < c->P; r++) {
        const FoPlan* p = &c->plan[r];
        for (int k = 0; k < p->ncomputes; k++) {
            int chunk = p->computes[k].chunk, want = arrives_after(p, chunk);
            if (c->mode == FO_NONE) { want = p->nexchanges; }
            if (c->mode == FO_SLICE) { want = (chunk % c->m + 1) * (c->P - 1); }
            bad += p->computes[k].after_exchanges != want;
        }
        for (int e = 0; e < p->nexchanges; e++) {
            bad += p->exchanges[e].after_computes != 0;
        }
    }
    CHECK(bad == 0);
}

// a reduce-scatter: what each exchange waits for, in the same way
static void check_scatter_waits(const Case* c) {
    int bad = 0, P = c->P, m = c->m;
    for (int r = 0; r < P; r++) {
        const FoPlan* p = &c->plan[r];
        int last_use[MAX_E] = {0}, ncomputed[FO_MAX_M] = {0}, slice_end[FO_MAX_M] = {0};
        for (int k = 0; k < p->ncomputes; k++) {
            int chunk = p->computes[k].chunk;
            last_use[chunk] = k + 1;
            if (!p->computes[k].add && ++ncomputed[chunk % m] == P) { slice_end[chunk % m] = k + 1; }
            // only an add waits, for what it adds and nothing later
            bad += p->computes[k].after_exchanges != (p->computes[k].add ? arrives_after(p, chunk) : 0);
        }
        for (int e = 0; e < p->nexchanges; e++) {
            int chunk = p->exchanges[e].send, after = p->exchanges[e].after_computes;
            bad += after < last_use[chunk];
            // flash: as soon as the chunk's own sum is there. Others: not before the whole slice is computed
            bad += c->mode == FO_FLASH && after != last_use[chunk];
            bad += c->mode != FO_FLASH && after < slice_end[chunk % m];
            bad += c->mode != FO_FLASH && c->topology == FO_DIRECT && after != slice_end[chunk % m];
            bad += c->mode == FO_NONE && after < P;
        }
    }
    CHECK(bad == 0);
}

// ---- execution under any interleaving ---------------------------------------------------------------------
// contributions are sets of ranks; a chunk of a gather is there (1) or not (0)
typedef struct {
    int computed, exchanged;           // done so far
    int posted, sent, received;        // of the exchange under way
    unsigned part[MAX_E];              // gather: the chunk; reduce-scatter: who is in the partial sum
    unsigned arrived[MAX_P][FO_MAX_M]; // reduce-scatter: partial sums received
} Rank;

typedef struct {
    const Case* c;
    Rank rank[MAX_P];
    int bad;
} Run;

// where a partial sum is received: a slot for each sender, or for each hop of a ring, as in FoStaging
static unsigned* slot_of(Run* run, int r, int chunk, int from) {
    const Case* c = run->c;
    int hop = (2 * c->P + r - 2 - chunk / c->m) % c->P;
    return &run->rank[r].arrived[c->topology == FO_DIRECT ? from : hop][chunk % c->m];
}

// one action of one rank, if it can be done now: 0 its compute stream, 1 its comm stream posts, 2 its send
// goes through
static int can_act(const Run* run, int r, int what) {
    const Rank* x = &run->rank[r];
    const FoPlan* p = &run->c->plan[r];
    if (what == 0) {
        return x->computed < p->ncomputes && p->computes[x->computed].after_exchanges <= x->exchanged;
    }
    if (x->exchanged == p->nexchanges) { return 0; }
    const FoExchange* e = &p->exchanges[x->exchanged];
    if (what == 1) { return !x->posted && e->after_computes <= x->computed; }
    if (!x->posted || x->sent) { return 0; }
    const Rank* y = &run->rank[e->send_to];
    const FoPlan* q = &run->c->plan[e->send_to];
    return y->posted && !y->received && q->exchanges[y->exchanged].recv_from == r;
}

static void act_compute(Run* run, int r) {
    const Case* c = run->c;
    Rank* x = &run->rank[r];
    const FoCompute* k = &c->plan[r].computes[x->computed++];
    if (c->kind == FO_ALLGATHER) {
        run->bad += x->part[k->chunk] != 1; // computed on what isn't there
        return;
    }
    // written while the comm stream may be reading it
    run->bad += x->posted && c->plan[r].exchanges[x->exchanged].send == k->chunk;
    if (k->add) {
        unsigned part = *slot_of(run, r, k->chunk, -1);
        run->bad += part == 0 || (part & x->part[k->chunk]) != 0; // nothing there, or twice
        x->part[k->chunk] |= part;
    } else {
        run->bad += x->part[k->chunk] != 0; // an add before its compute would be lost
        x->part[k->chunk] = 1u << r;
    }
}

static void act_send(Run* run, int r) {
    const Case* c = run->c;
    Rank* x = &run->rank[r];
    const FoExchange* e = &c->plan[r].exchanges[x->exchanged];
    Rank* y = &run->rank[e->send_to];
    unsigned part = x->part[e->send];
    run->bad += part == 0;                                                   // sends what it hasn't
    run->bad += c->plan[e->send_to].exchanges[y->exchanged].recv != e->send; // sent one, expected another
    if (c->kind == FO_ALLGATHER) {
        run->bad += y->part[e->send] != 0; // twice
        y->part[e->send] = part;
    } else {
        unsigned* slot = slot_of(run, e->send_to, e->send, r);
        run->bad += *slot != 0; // a slot is written once: nothing says when it could be written again
        *slot = part;
    }
    x->sent = 1;
    y->received = 1;
}

static void act(Run* run, int r, int what) {
    if (what == 0) { act_compute(run, r); }
    if (what == 1) { run->rank[r].posted = 1; }
    if (what == 2) { act_send(run, r); }
    for (int q = 0; q < run->c->P; q++) {
        Rank* x = &run->rank[q];
        if (x->sent && x->received) {
            x->exchanged++;
            x->posted = x->sent = x->received = 0;
        }
    }
}

// the sum of the own chunks takes each rank's contribution once; a gather has everything
static int complete(const Run* run) {
    const Case* c = run->c;
    int bad = 0;
    for (int r = 0; r < c->P; r++) {
        const Rank* x = &run->rank[r];
        bad += x->computed != c->plan[r].ncomputes || x->exchanged != c->plan[r].nexchanges;
        for (int chunk = 0; chunk < c->P * c->m && c->kind == FO_ALLGATHER; chunk++) {
            bad += x->part[chunk] != 1;
        }
        for (int s = 0; s < c->m && c->kind == FO_REDUCESCATTER; s++) {
            unsigned sum = x->part[r * c->m + s];
            for (int slot = 0; slot < c->P; slot++) {
                // along a ring only the last hop is for the own rows
                if (c->topology == FO_RING && slot != c->P - 2) { continue; }
                bad += (sum & x->arrived[slot][s]) != 0;
                sum |= x->arrived[slot][s];
            }
            bad += sum != (1u << c->P) - 1;
        }
    }
    return bad == 0;
}

enum { RANDOM, COMPUTE_FIRST, COMM_FIRST, LAST_RANK_FIRST, ONE_RANK_STARVED, SENDS_LAST, NPOLICIES };

// the smaller, the sooner it is chosen among what can be done
static int priority(int policy, int r, int what, int starved) {
    int noise = random_below(8);
    switch (policy) {
    case COMPUTE_FIRST: return what * 100 + noise;
    case COMM_FIRST: return (2 - what) * 100 + noise;
    case LAST_RANK_FIRST: return -r * 100 + noise;
    case ONE_RANK_STARVED: return (r == starved) * 100 + noise;
    case SENDS_LAST: return (what == 2) * 100 + noise;
    default: return random_below(1000);
    }
}

static void check_execution(const Case* c, int policy) {
    static Run run;
    memset(&run, 0, sizeof run);
    run.c = c;
    int starved = random_below(c->P);
    for (int r = 0; r < c->P && c->kind == FO_ALLGATHER; r++) {
        for (int s = 0; s < c->m; s++) {
            run.rank[r].part[r * c->m + s] = 1;
        }
    }
    for (;;) {
        int best = -1, best_priority = 0;
        for (int i = 0; i < 3 * c->P; i++) {
            if (!can_act(&run, i / 3, i % 3)) { continue; }
            int p = priority(policy, i / 3, i % 3, starved);
            if (best < 0 || p < best_priority) { best = i, best_priority = p; }
        }
        if (best < 0) { break; } // all is done, or it hangs: complete() knows
        act(&run, best / 3, best % 3);
    }
    CHECK(run.bad == 0);
    CHECK(complete(&run));
}

// ---- time -------------------------------------------------------------------------------------------------
/* What the slowest rank's compute and communication take beyond its compute alone. A shard's message takes
 * t_m and occupies one egress and one ingress port, its compute takes t_c, an add nothing; a chunk is the
 * m-th part. An exchange starts when this rank and both its peers have reached it.
 */
static double exposed(const Case* c, double t_c, double t_m) {
    static double computed[MAX_P][MAX_K + 1]; // end of the k-th compute, from 1
    static double exchanged[MAX_P][MAX_E + 1], reached[MAX_P][MAX_E];
    int k[MAX_P] = {0}, e[MAX_P] = {0}, nreached[MAX_P] = {0}, progress = 1;
    double end = 0.0;
    while (progress) {
        progress = 0;
        for (int r = 0; r < c->P; r++) {
            const FoPlan* p = &c->plan[r];
            for (; k[r] < p->ncomputes && p->computes[k[r]].after_exchanges <= e[r]; k[r]++, progress = 1) {
                const FoCompute* x = &p->computes[k[r]];
                double start = fmax(computed[r][k[r]], exchanged[r][x->after_exchanges]);
                computed[r][k[r] + 1] = start + (x->add ? 0.0 : t_c / c->m);
            }
            if (e[r] == p->nexchanges) { continue; }
            const FoExchange* x = &p->exchanges[e[r]];
            if (nreached[r] == e[r] && x->after_computes <= k[r]) {
                reached[r][e[r]] = fmax(exchanged[r][e[r]], computed[r][x->after_computes]);
                nreached[r]++, progress = 1;
            }
            if (nreached[r] > e[r] && nreached[x->send_to] > e[r] && nreached[x->recv_from] > e[r]) {
                double peers = fmax(reached[x->send_to][e[r]], reached[x->recv_from][e[r]]);
                exchanged[r][e[r] + 1] = fmax(reached[r][e[r]], peers) + t_m / c->m;
                e[r]++, progress = 1;
            }
        }
    }
    for (int r = 0; r < c->P; r++) {
        end = fmax(end, fmax(computed[r][k[r]], exchanged[r][e[r]]));
    }
    return end - c->P * t_c;
}

static int near(double a, double b) {
    return fabs(a - b) < 1e-9;
}

// shown beside paper and code in doc/overlap.md; T and W are the whole communication and the whole compute
static double formula(const Case* c, double t_c, double t_m) {
    int P = c->P;
    double m = c->m, T = (P - 1) * t_m, W = P * t_c;
    if (c->mode == FO_NONE) { return T; }
    if (c->mode == FO_FLASH) { return fmax(0.0, T - (P - 1 / m) * t_c); }
    if (c->kind == FO_REDUCESCATTER && c->topology == FO_RING && P > 1) {
        // A slice's adds stand between the computes of the next, one a hop, so hops and computes go in step:
        // each of the P-2 hops that add takes max(t_m, t_c) instead of what the slice's sums give. Up to t_m
        // = 2 t_c the last hop, under the two last computes, adds nothing to that.
        return T / m + (m - 1) / m * (P - 2) * fmax(0.0, t_m - t_c);
    }
    return T / m + (m - 1) / m * fmax(0.0, T - W);
}

/* The formulas are exact for these plans: all ranks do the same at the same time, so no port is ever
 * contended, and what bounds a schedule is either its last chunk (the formula) or nothing. No tolerance but
 * that of doubles.
 */
static void check_exposed(const Case* c) {
    int bad = 0;
    for (int i = 2; i <= 16; i++) {
        double t_c = 8.0, t_m = i;
        bad += !near(exposed(c, t_c, t_m), formula(c, t_c, t_m));
        if (c->mode == FO_FLASH && c->m == 1) { // the same, as it is mostly quoted
            bad += !near(exposed(c, t_c, t_m), (c->P - 1) * fmax(0.0, t_m - t_c));
        }
    }
    CHECK(bad == 0);
}

// ---- all of it --------------------------------------------------------------------------------------------
static const char* kind_name(FoKind kind) {
    return kind == FO_ALLGATHER ? "all-gather" : "reduce-scatter";
}

static void check_case(FoKind kind, FoMode mode, FoTopology topology, int m, int P) {
    static Case c;
    char err[256] = "";
    c.kind = kind, c.mode = mode, c.topology = topology, c.m = m, c.P = P;
    CHECK_AT("%s %s %s m=%d P=%d", kind_name(kind), fo_mode_name(mode),
             topology == FO_RING ? "ring" : "direct", m, P);
    int failed = 0;
    for (int r = 0; r < P; r++) {
        failed += fo_plan_init(&c.plan[r], kind, mode, m, topology, P, r, err) != 0;
    }
    CHECK(failed == 0);
    if (failed) { return; }
    CHECK(fo_plan_check(kind, mode, m, topology, P, err) == 0);
    check_numbers_in_range(&c);
    check_computed_once(&c);
    check_sends_meet_receives(&c);
    if (mode == FO_FLASH) { check_own_first_or_last(&c); }
    if (kind == FO_ALLGATHER) {
        check_gather_waits(&c);
    } else {
        check_scatter_waits(&c);
    }
    for (int policy = 0; policy < NPOLICIES; policy++) {
        check_execution(&c, policy);
    }
    check_exposed(&c);
    for (int r = 0; r < P; r++) {
        fo_plan_free(&c.plan[r]);
    }
}

static void check_m(int m, int P) {
    for (int kind = FO_ALLGATHER; kind <= FO_REDUCESCATTER; kind++) {
        for (int topology = FO_DIRECT; topology <= FO_RING; topology++) {
            if (m == 1) { check_case((FoKind)kind, FO_NONE, (FoTopology)topology, 1, P); }
            check_case((FoKind)kind, FO_SLICE, (FoTopology)topology, m, P);
            check_case((FoKind)kind, FO_FLASH, (FoTopology)topology, m, P);
        }
    }
}

static void check_refused(FoMode mode, int m, int P, int r, const char* why) {
    static FoPlan plan;
    char err[256] = "";
    CHECK_AT("%s m=%d P=%d r=%d", fo_mode_name(mode), m, P, r);
    CHECK(fo_plan_init(&plan, FO_ALLGATHER, mode, m, FO_DIRECT, P, r, err) == -1);
    CHECK(strstr(err, why) != NULL);
    CHECK(strchr(err, '\n') == NULL);
}

static void check_bad_arguments(void) {
    check_refused(FO_FLASH, 1, 0, 0, "rank 0 of 0");
    check_refused(FO_FLASH, 1, -1, 0, "rank 0 of -1");
    check_refused(FO_FLASH, 1, FO_PLAN_MAX_RANKS + 1, 0, "want 1 to 1024 ranks");
    check_refused(FO_FLASH, 1, 4, 4, "rank 4 of 4");
    check_refused(FO_FLASH, 1, 4, -1, "rank -1 of 4");
    check_refused(FO_FLASH, 0, 4, 0, "m=0");
    check_refused(FO_SLICE, FO_MAX_M + 1, 4, 0, "m=17: want 1 to 16");
    check_refused(FO_NONE, 2, 4, 0, "m=2");
}

static void check_print(void) {
    static FoPlan plan;
    char err[256], buf[512], tiny[24];
    CHECK_AT("print");
    CHECK(fo_plan_init(&plan, FO_REDUCESCATTER, FO_FLASH, 1, FO_DIRECT, 4, 0, err) == 0);
    CHECK(fo_plan_print(&plan, buf, sizeof buf) == buf);
    CHECK(strcmp(buf, "rs flash direct m=1 P=4 r=0: 1 [1>1 0<3] 2 [2>2 0<2] 3 [3>3 0<1] 0") == 0);
    fo_plan_free(&plan);
    CHECK(fo_plan_init(&plan, FO_REDUCESCATTER, FO_FLASH, 1, FO_RING, 3, 0, err) == 0);
    fo_plan_print(&plan, buf, sizeof buf);
    CHECK(strcmp(buf, "rs flash ring m=1 P=3 r=0: 2 [2>1 1<2] 1 +1 [1>1 0<2] 0") == 0);
    fo_plan_free(&plan);
    CHECK(fo_plan_init(&plan, FO_ALLGATHER, FO_FLASH, 1, FO_RING, 3, 0, err) == 0);
    fo_plan_print(&plan, buf, sizeof buf);
    CHECK(strcmp(buf, "ag flash ring m=1 P=3 r=0: 0 [0>1 2<2] 2 [2>1 1<2] 1") == 0);
    memset(tiny, '#', sizeof tiny);
    fo_plan_print(&plan, tiny, sizeof tiny - 1);
    CHECK(strlen(tiny) == sizeof tiny - 2 && tiny[sizeof tiny - 1] == '#'); // cut, and not a byte further
    fo_plan_free(&plan);
    CHECK(strcmp(fo_mode_name(FO_NONE), "none") == 0 && strcmp(fo_mode_name(FO_SLICE), "slice") == 0 &&
          strcmp(fo_mode_name(FO_FLASH), "flash") == 0);
}

// plans that only a dry run makes
static void check_large(void) {
    char err[256] = "";
    CHECK_AT("1,024 ranks");
    for (int topology = FO_DIRECT; topology <= FO_RING; topology++) {
        CHECK(fo_plan_check(FO_ALLGATHER, FO_FLASH, 1, (FoTopology)topology, 1024, err) == 0);
        CHECK(fo_plan_check(FO_REDUCESCATTER, FO_FLASH, 2, (FoTopology)topology, 129, err) == 0);
        CHECK(fo_plan_check(FO_REDUCESCATTER, FO_NONE, 1, (FoTopology)topology, 1024, err) == 0);
    }
    CHECK(fo_plan_check(FO_REDUCESCATTER, FO_FLASH, 0, FO_DIRECT, 4, err) == -1 && strstr(err, "m=0"));
}

int main(void) {
    check_bad_arguments();
    for (int P = 1; P <= MAX_P; P++) {
        for (int m = 1; m <= 4; m++) {
            check_m(m, P);
        }
    }
    for (int m = 5; m <= 8; m++) {
        check_m(m, 2);
        check_m(m, 3);
        check_m(m, 8);
    }
    check_m(FO_MAX_M, 4);
    check_m(FO_MAX_M, MAX_P); // the largest plan that runs
    check_large();
    check_print();
    return check_report();
}
