/* test_model.c -- the closed forms of fo_model.h against a simulation of the plans themselves.
 *
 * The simulation knows nothing of modes: it walks both lists of all ranks' plans, an exchange starts when the
 * rank's previous one is done and its computes are, a message when both of its ends have started, and a
 * compute when what it waits for is done. What the compute lists stood waiting must be what the model says.
 */
#include "flashoverlap/fo_model.h"
#include "dev/test/check.h"
#include <stdlib.h>

enum { MAX_P = 8, MAX_E = MAX_P * FO_MAX_M };

typedef struct {
    FoPlan plan;
    int nstarted, nexchanged, ncomputed; // exchanges started and done, computes done
    double exchange_start[MAX_E];        // seconds
    double exchange_end[MAX_E + 1];      // of the first e exchanges, at e; [0] is 0
    double compute_end[2 * MAX_E + 1];   // of the first k computes, at k; [0] is 0
    double exposed;
} Rank;

static double later(double a, double b) {
    return a > b ? a : b;
}

// the start of the exchange of rank `from` that sends to `to` as its n-th, or that of `to` that receives it;
// -1: none yet
static double posted(const Rank* k, int peer, int n, int sends) {
    for (int e = 0; e < k->nstarted; e++) {
        const FoExchange* x = &k->plan.exchanges[e];
        if ((sends ? x->send_to : x->recv_from) == peer && n-- == 0) { return k->exchange_start[e]; }
    }
    return -1.0;
}

// how many exchanges before e send to (receive from) the same peer
static int before(const FoPlan* plan, int e, int sends) {
    int n = 0;
    for (int i = 0; i < e; i++) {
        n += sends ? plan->exchanges[i].send_to == plan->exchanges[e].send_to
                   : plan->exchanges[i].recv_from == plan->exchanges[e].recv_from;
    }
    return n;
}

// starts or finishes one exchange of k; 0 if it can't yet
static int advance_exchange(Rank* ranks, Rank* k, double message_s) {
    const FoPlan* plan = &k->plan;
    int e = k->nexchanged;
    if (e == plan->nexchanges) { return 0; }
    const FoExchange* x = &plan->exchanges[e];
    if (k->nstarted == e) {
        if (k->ncomputed < x->after_computes) { return 0; }
        k->exchange_start[e] = later(k->exchange_end[e], k->compute_end[x->after_computes]);
        k->nstarted++;
        return 1;
    }
    double there = posted(&ranks[x->send_to], plan->r, before(plan, e, 1), 0);
    double here = posted(&ranks[x->recv_from], plan->r, before(plan, e, 0), 1);
    if (there < 0.0 || here < 0.0) { return 0; }
    k->exchange_end[e + 1] = later(k->exchange_start[e], later(there, here)) + message_s;
    k->nexchanged++;
    return 1;
}

static int advance_compute(Rank* k, double chunk_s) {
    const FoPlan* plan = &k->plan;
    if (k->ncomputed == plan->ncomputes) { return 0; }
    const FoCompute* c = &plan->computes[k->ncomputed];
    if (k->nexchanged < c->after_exchanges) { return 0; }
    double free_at = k->compute_end[k->ncomputed];
    double start = later(free_at, c->after_exchanges ? k->exchange_end[c->after_exchanges] : 0.0);
    k->exposed += start - free_at;
    k->compute_end[++k->ncomputed] = start + (c->add ? 0.0 : chunk_s); // the model leaves adds out
    return 1;
}

// longest time that a rank's computes stood waiting; -1 if there is no plan, or if it hangs
static double simulate(FoKind kind, FoMode mode, int m, FoTopology topology, int P, double shard_s,
                       double W) {
    Rank* ranks = calloc((size_t)P, sizeof *ranks);
    char err[256];
    double exposed = 0.0;
    for (int r = 0; r < P; r++) {
        if (fo_plan_init(&ranks[r].plan, kind, mode, m, topology, P, r, err) != 0) {
            free(ranks);
            return -1.0;
        }
    }
    for (int moved = 1; moved;) {
        moved = 0;
        for (int r = 0; r < P; r++) {
            moved |= advance_exchange(ranks, &ranks[r], shard_s / m);
            moved |= advance_compute(&ranks[r], W / (P * m));
        }
    }
    for (int r = 0; r < P; r++) {
        Rank* k = &ranks[r];
        int done = k->nexchanged == k->plan.nexchanges && k->ncomputed == k->plan.ncomputes;
        // the owner's sum follows the last exchange
        double end = k->compute_end[k->ncomputed];
        exposed = done ? later(exposed, k->exposed + later(0.0, k->exchange_end[k->nexchanged] - end)) : -1.0;
        if (!done) { break; }
    }
    for (int r = 0; r < P; r++) {
        fo_plan_free(&ranks[r].plan);
    }
    free(ranks);
    return exposed;
}

static void compare(FoKind kind, FoMode mode, int m, FoTopology topology, int P) {
    // message over compute time of a chunk: far below, near and above what each mode can hide
    static const double ratios[] = {0.1, 0.25, 0.6, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0};
    const double W = 40.0;
    for (size_t i = 0; i < sizeof ratios / sizeof *ratios; i++) {
        double shard_s = ratios[i] * W / P;
        double got = fo_model_exposed_s(mode, m, P, shard_s, W);
        double want = simulate(kind, mode, m, topology, P, shard_s, W);
        CHECK_AT("%s %s m=%d %s P=%d t_m/t_c=%g: model %.6f simulated %.6f",
                 kind == FO_ALLGATHER ? "ag" : "rs", fo_mode_name(mode), m,
                 topology == FO_DIRECT ? "direct" : "ring", P, ratios[i], got, want);
        // a ring's adds stand between the next slice's computes: where messages outlast chunks they hold
        // those up, and the model is a lower bound
        int held_up = kind == FO_REDUCESCATTER && mode == FO_SLICE && topology == FO_RING && ratios[i] > 1.0;
        CHECK(held_up ? want >= got - 1e-9 * W && want <= got + W / 6.0 : fabs(got - want) <= 1e-9 * W);
    }
}

// figures that can be done by hand
static void test_values(void) {
    CHECK_AT("values");
    CHECK(fabs(fo_model_shard_s(2.0, 20.0, 4000000, 1) - 2.02e-3) < 1e-12);
    CHECK(fabs(fo_model_shard_s(2.0, 20.0, 4000000, 4) - 2.08e-3) < 1e-12);
    CHECK(fo_model_collective_s(4, 2.0) == 6.0 && fo_model_collective_s(1, 2.0) == 0.0);
    // P = 4, a message of 3 beside a chunk of 10: T 9, W 40
    CHECK(fo_model_exposed_s(FO_NONE, 1, 4, 3.0, 40.0) == 9.0);
    CHECK(fabs(fo_model_exposed_s(FO_SLICE, 4, 4, 3.0, 40.0) - 2.25) < 1e-12);
    CHECK(fo_model_exposed_s(FO_FLASH, 1, 4, 3.0, 40.0) == 0.0);
    // messages of 12 beside chunks of 10: T 36, W 40
    CHECK(fabs(fo_model_exposed_s(FO_FLASH, 1, 4, 12.0, 40.0) - 6.0) < 1e-12);
    CHECK(fabs(fo_model_exposed_s(FO_FLASH, 2, 4, 12.0, 40.0) - 1.0) < 1e-12);
    // T 60 beyond W 40: flash 2 is slice 8
    CHECK(fabs(fo_model_exposed_s(FO_FLASH, 2, 4, 20.0, 40.0) - 25.0) < 1e-12);
    CHECK(fabs(fo_model_exposed_s(FO_SLICE, 8, 4, 20.0, 40.0) - 25.0) < 1e-12);
    CHECK(fo_model_exposed_s(FO_FLASH, 2, 1, 20.0, 40.0) == 0.0 &&
          fo_model_exposed_s(FO_NONE, 1, 1, 20.0, 40.0) == 0.0);
}

// plain and sliced plans never expose less than flash: so fo_model_chunks leaves them out
static void test_flash_is_best(void) {
    for (int P = 2; P <= MAX_P; P++) {
        for (double shard_s = 0.01; shard_s < 100.0; shard_s *= 1.3) {
            for (int m = 1; m <= FO_MAX_M; m++) {
                const double flash = fo_model_exposed_s(FO_FLASH, m, P, shard_s, 10.0);
                CHECK_AT("P=%d m=%d shard %g", P, m, shard_s);
                CHECK(flash <= fo_model_exposed_s(FO_SLICE, m, P, shard_s, 10.0) + 1e-9);
                CHECK(flash <= fo_model_exposed_s(FO_NONE, 1, P, shard_s, 10.0) + 1e-9);
            }
        }
    }
}

/* what a gather, [0], and a reduce-scatter expose whose computations take turns: own gather chunk; of each
 * other shard its gather chunks, then its scatter chunks, each of which leaves; own scatter chunk. One link,
 * which brings all shards first.
 */
static double in_turn(int P, const int m[2], const double shard_s[2], const double W[2]) {
    double now = W[0] / P, link = (P - 1) * shard_s[0];
    for (int i = 1; i < P; i++) {
        for (int k = 1; k <= m[0]; k++) {
            now = later(now, ((i - 1) * m[0] + k) * shard_s[0] / m[0]) + W[0] / (P * m[0]);
        }
        for (int k = 0; k < m[1]; k++) {
            now += W[1] / (P * m[1]);
            link = later(link, now) + shard_s[1] / m[1];
        }
    }
    return later(now + W[1] / P, link) - W[0] - W[1];
}

static void compare_in_turn(int P, const int m[2], const double shard_s[2], const double W[2]) {
    double got[2], want = in_turn(P, m, shard_s, W);
    fo_model_in_turn(P, m, shard_s, W, got);
    CHECK_AT("in turn, P=%d m=%d,%d shards %.1f %.1f W %.1f: %.2f + %.2f not %.2f", P, m[0], m[1], shard_s[0],
             shard_s[1], W[0], got[0], got[1], want);
    CHECK(fabs(got[0] + got[1] - want) < 1e-9);
    CHECK(got[0] >= 0.0 && got[0] <= fo_model_exposed_s(FO_FLASH, m[0], P, shard_s[0], W[0]));
}

static void test_in_turn(void) {
    double got[2];
    for (int P = 2; P <= MAX_P; P++) {
        for (int both = 0; both < 16; both++) {
            for (double share = 0.1; share < 1.0; share += 0.2) {
                for (double shard_s = 0.5; shard_s < 20.0; shard_s += 1.5) {
                    for (int wide = 1; wide <= 2; wide++) { // --wire fp32
                        compare_in_turn(P, (int[2]){1 + both / 4, 1 + both % 4},
                                        (double[2]){shard_s, wide * shard_s},
                                        (double[2]){40.0 * share, 40.0 - 40.0 * share});
                    }
                }
            }
        }
    }
    fo_model_in_turn(1, (int[2]){1, 1}, (double[2]){3.0, 3.0}, (double[2]){1.0, 1.0}, got);
    CHECK(got[0] == 0.0 && got[1] == 0.0);
}

// P = 4; both of this latency, shard, W at m = 1, 2, 4
static void choose_in_turn(const char* what, FoMeasured x, int most, int want_m, double want_s) {
    int m[2];
    double s[2];
    fo_model_chunks_in_turn((FoMeasured[2]){x, x}, 4, (int[2]){most, most}, m, s);
    CHECK_AT("chunks in turn, %s: m %d, %d, %g + %g s exposed", what, m[0], m[1], s[0], s[1]);
    CHECK(m[0] == want_m && m[1] == want_m && fabs(s[0] + s[1] - want_s) < 1e-9);
}

static void test_chunks_in_turn(void) {
    choose_in_turn("hidden", (FoMeasured){0.0, 10.0, {40, 40, 40}, 0.0}, 4, 1, 0.0);
    // messages of 12 beside chunks of 10: the first has 2 too much, or in halves nothing
    choose_in_turn("halves", (FoMeasured){0.0, 12.0, {40, 40, 40}, 0.0}, 4, 2, 0.0);
    choose_in_turn("no halves", (FoMeasured){0.0, 12.0, {40, 40, 40}, 0.0}, 1, 1, 4.0);
    // T 120 and W 80: no cut makes the link any faster
    choose_in_turn("a full link", (FoMeasured){0.0, 20.0, {40, 42, 44}, 0.0}, 4, 1, 40.0);
    choose_in_turn("a full link, latencies", (FoMeasured){0.5, 20.0, {40, 40, 40}, 0.0}, 4, 1, 40.0);
}

static void choose(const char* what, FoMeasured x, int P, int most, int want_m, double want_s) {
    double exposed = -1.0;
    const int m = fo_model_chunks(&x, P, most, &exposed);
    CHECK_AT("chunks, %s: m %d, %g s exposed, want %d, %g", what, m, exposed, want_m, want_s);
    CHECK(m == want_m && fabs(exposed - want_s) < 1e-9);
    CHECK(fo_model_chunks(&x, P, most, NULL) == want_m);
}

// latency, shard, W at m = 1, 2, 4, cover; P = 4 unless said otherwise
static void test_chunks(void) {
    choose("all is hidden", (FoMeasured){0.0, 3.0, {40, 40, 40}, 0.0}, 4, 4, 1, 0.0);
    // messages of 12 beside chunks of 10: 6, 1, 0 exposed (as above)
    choose("as many as hide it", (FoMeasured){0.0, 12.0, {40, 40, 40}, 0.0}, 4, 4, 4, 0.0);
    choose("at most 2", (FoMeasured){0.0, 12.0, {40, 40, 40}, 0.0}, 4, 2, 2, 1.0);
    choose("at most 3 is 2", (FoMeasured){0.0, 12.0, {40, 40, 40}, 0.0}, 4, 3, 2, 1.0);
    choose("at most 1", (FoMeasured){0.0, 12.0, {40, 40, 40}, 0.0}, 4, 1, 1, 6.0);
    choose("none is 1", (FoMeasured){0.0, 12.0, {40, 40, 40}, 0.0}, 4, 0, 1, 6.0);
    // W and exposed in all: 46; 40.8 + 0.3 = 41.1; 46 + 0
    choose("small chunks cost", (FoMeasured){0.0, 12.0, {40, 40.8, 46}, 0.0}, 4, 4, 2, 0.3);
    choose("small chunks cost too much", (FoMeasured){0.0, 12.0, {40, 46, 47}, 0.0}, 4, 4, 1, 6.0);
    // the crossover: 43.6 + 0 against 46 * 0.99 = 45.54
    choose("just enough", (FoMeasured){0.0, 12.0, {40, 45.5, 46}, 0.0}, 4, 4, 2, 0.0);
    choose("faster small chunks are noise", (FoMeasured){0.0, 3.0, {40, 36, 30}, 0.0}, 4, 4, 1, 0.0);
    // T = 60 beyond W = 40: 30, 25, 22.5 exposed
    choose("more than can be hidden", (FoMeasured){0.0, 20.0, {40, 40, 40}, 0.0}, 4, 4, 4, 22.5);
    // latencies of 3: T = 36, 45, 63
    choose("latency, again and again", (FoMeasured){3.0, 12.0, {40, 40, 40}, 0.0}, 4, 4, 1, 6.0);
    choose("nothing but latency", (FoMeasured){3.0, 3.0, {1, 1, 1}, 0.0}, 4, 4, 1, 8.25);
    choose("nothing to hide under", (FoMeasured){0.0, 3.0, {0, 0, 0}, 0.0}, 4, 4, 1, 9.0);
    // 0.3 of 1000 would be saved
    choose("hardly any gain", (FoMeasured){0.0, 250.4, {1000, 1000, 1000}, 0.0}, 4, 4, 1, 1.2);
    choose("covered", (FoMeasured){0.0, 12.0, {40, 40, 40}, 6.0}, 4, 4, 1, 0.0);
    choose("half covered", (FoMeasured){0.0, 12.0, {40, 40, 40}, 5.0}, 4, 4, 2, 0.0);
    choose("nothing of its own, covered", (FoMeasured){0.0, 3.0, {0, 0, 0}, 9.0}, 4, 4, 1, 0.0);
    choose("one rank", (FoMeasured){3.0, 12.0, {40, 40, 40}, 0.0}, 1, 4, 1, 0.0);
}

// all-reduces of few bytes: figures that can be done by hand, and where one plan overtakes the other
static void test_allreduce(void) {
    CHECK_AT("all-reduce");
    // 4 ranks, 4000 bytes at 1 GB/s: 3 * 4 us pushed, 2 * 3 * 1 us as shares
    CHECK(fabs(fo_model_allreduce_s(FO_PUSH, 4, 4000, 1.0, 10.0) - 22e-6) < 1e-15);
    CHECK(fabs(fo_model_allreduce_s(FO_SCATTER, 4, 4000, 1.0, 10.0) - 26e-6) < 1e-15);
    // 12 bytes are 3 floats: a share is one
    CHECK(fabs(fo_model_allreduce_s(FO_SCATTER, 4, 12, 1e-6, 0.0) - 24e-3) < 1e-15);
    // equal at a latency of 6 us: the push has one exchange less
    CHECK(fo_model_allreduce(4, 4000, 1.0, 10.0) == FO_PUSH);
    CHECK(fo_model_allreduce(4, 4000, 1.0, 6.1) == FO_PUSH);
    CHECK(fo_model_allreduce(4, 4000, 1.0, 5.9) == FO_SCATTER);
    CHECK(fo_model_allreduce(4, 8000, 1.0, 10.0) == FO_SCATTER);
    CHECK(fo_model_allreduce(2, 1 << 20, 1.0, 0.0) == FO_PUSH); // two ranks send the same bytes either way
    CHECK(fo_model_allreduce(1, 4000, 1.0, 10.0) == FO_PUSH &&
          fo_model_allreduce_s(FO_PUSH, 1, 4, 1, 9) == 0.0);
    CHECK(fo_model_allreduce(4, 4000, HUGE_VAL, 0.0) == FO_PUSH); // no link
    CHECK(strcmp(fo_allreduce_name(FO_PUSH), fo_allreduce_name(FO_SCATTER)) != 0);
}

int main(void) {
    test_allreduce();
    test_values();
    test_flash_is_best();
    test_chunks();
    test_in_turn();
    test_chunks_in_turn();
    for (int P = 2; P <= MAX_P; P++) {
        for (int kind = FO_ALLGATHER; kind <= FO_REDUCESCATTER; kind++) {
            for (int topology = FO_DIRECT; topology <= FO_RING; topology++) {
                compare((FoKind)kind, FO_NONE, 1, (FoTopology)topology, P);
                for (int m = 1; m <= 4; m++) {
                    compare((FoKind)kind, FO_FLASH, m, (FoTopology)topology, P);
                    compare((FoKind)kind, FO_SLICE, m, (FoTopology)topology, P);
                }
            }
        }
    }
    return check_report();
}
