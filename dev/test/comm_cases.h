/* comm_cases.h -- what fo_comm.h promises, checked on a world of any transport. test_comm.c runs it for ranks
 * that are threads, test_comm_mpi.c for processes. Message bytes depend on sender, receiver, number and
 * position; what receives is poisoned.
 */
#ifndef COMM_CASES_H
#define COMM_CASES_H
#include "dev/test/check.h"
#include "flashoverlap/fo_comm.h"
#include "flashoverlap/fo_ops.h"
#include <stdint.h>
#include <stdlib.h>

enum { COMM_LARGE = FO_DEVICE_CPU ? 1 << 20 : 1 << 16 }; // emulation is slow

typedef struct {
    FoGroup* g;
    FoDevice* d;
    FoStream* s;
    int P, r;
} Rank;

static uint64_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 29;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 32;
}

static uint64_t random_next(uint64_t* state) {
    return mix(*state += 0x9e3779b97f4a7c15ull);
}

// the bytes of message `number` from one rank to another
static void pattern(unsigned char* p, size_t nbytes, int from, int to, int number) {
    uint64_t key = mix((uint64_t)from << 48 | (uint64_t)to << 32 | (uint64_t)(unsigned)number);
    for (size_t i = 0; i < nbytes; i++) {
        p[i] = (unsigned char)(key >> (i % 8 * 8)) ^ (unsigned char)(i * 31) ^ (unsigned char)(i >> 8) ^
               (unsigned char)(i >> 16);
    }
}

static void* host_bytes(size_t nbytes) {
    void* p = malloc(nbytes);
    if (!p) { abort(); }
    return p;
}

// device memory with the bytes of a message to send, or poisoned (from < 0)
static unsigned char* device_bytes(Rank* k, size_t nbytes, int from, int to, int number) {
    unsigned char *p = fo_malloc(k->d, nbytes), *host = host_bytes(nbytes);
    memset(host, 0xff, nbytes);
    if (from >= 0) { pattern(host, nbytes, from, to, number); }
    fo_upload(p, host, nbytes, k->s);
    fo_stream_sync(k->s);
    free(host);
    return p;
}

static int received_right(Rank* k, const void* p, size_t nbytes, int from, int to, int number) {
    unsigned char *got = host_bytes(2 * nbytes), *want = got + nbytes;
    fo_download(got, p, nbytes, k->s);
    fo_stream_sync(k->s);
    pattern(want, nbytes, from, to, number);
    int same = memcmp(got, want, nbytes) == 0;
    free(got);
    return same;
}

// each rank's own number
static void gather(Rank* k, double numbers[FO_MAX_RANKS], double own) {
    double* all = fo_malloc(k->d, FO_MAX_RANKS * sizeof *all);
    fo_upload(all + k->r, &own, sizeof own, k->s);
    fo_allgather(k->g, all, sizeof own, k->s);
    fo_download(numbers, all, FO_MAX_RANKS * sizeof *all, k->s);
    fo_stream_sync(k->s);
    fo_free(k->d, all);
}

// nobody leaves a barrier before all have come; ranks share a clock
static void case_barrier(Rank* k) {
    int right = 1;
    for (int late = 0; late < k->P; late++) {
        double came, left, all[FO_MAX_RANKS];
        if (k->r == late) { usleep(20000); }
        came = fo_now();
        fo_group_barrier(k->g);
        left = fo_now();
        gather(k, all, came);
        for (int p = 0; p < k->P; p++) {
            right &= left >= all[p];
        }
    }
    CHECK(right);
}

// every rank sends to the one `hop` further on
static void case_ring(Rank* k, size_t nbytes, int hop) {
    if (hop % k->P == 0) { return; }
    int to = (k->r + hop) % k->P, from = (k->r + k->P - hop) % k->P;
    unsigned char* src = device_bytes(k, nbytes, k->r, to, 1);
    unsigned char* dst = device_bytes(k, nbytes + 16, -1, 0, 0);
    fo_comm_begin(k->g, k->s);
    fo_recv(k->g, dst, nbytes, from);
    fo_send(k->g, src, nbytes, to);
    fo_comm_end(k->g);
    CHECK(received_right(k, dst, nbytes, from, k->r, 1));
    unsigned char after[16], poison[16];
    memset(poison, 0xff, sizeof poison);
    fo_download(after, dst + nbytes, sizeof after, k->s);
    fo_stream_sync(k->s);
    CHECK_BITS(after, poison, sizeof after);
    fo_free(k->d, src);
    fo_free(k->d, dst);
}

// all pairs in one exchange, each message of another size, some of no bytes; three times without a pause
static size_t pair_nbytes(int from, int to) {
    return (from + 2 * to) % 5 == 0 ? 0 : 1000u * (unsigned)(from + 1) + 77u * (unsigned)to;
}

static void case_all_pairs(Rank* k) {
    enum { TIMES = 3 };
    unsigned char *src[FO_MAX_RANKS], *dst[TIMES][FO_MAX_RANKS];
    for (int p = 0; p < k->P; p++) {
        src[p] = device_bytes(k, pair_nbytes(k->r, p) + 1, k->r, p, 2);
        for (int t = 0; t < TIMES; t++) {
            dst[t][p] = device_bytes(k, pair_nbytes(p, k->r) + 1, -1, 0, 0);
        }
    }
    for (int t = 0; t < TIMES; t++) {
        fo_comm_begin(k->g, k->s);
        for (int i = 1; i < k->P; i++) {
            int to = (k->r + i) % k->P, from = (k->r + k->P - i) % k->P;
            fo_send(k->g, src[to], pair_nbytes(k->r, to), to);
            fo_recv(k->g, dst[t][from], pair_nbytes(from, k->r), from);
        }
        fo_comm_end(k->g);
    }
    int right = 1;
    for (int p = 0; p < k->P; p++) {
        for (int t = 0; t < TIMES; t++) {
            right &= p == k->r || received_right(k, dst[t][p], pair_nbytes(p, k->r), p, k->r, 2);
            fo_free(k->d, dst[t][p]);
        }
        fo_free(k->d, src[p]);
    }
    CHECK(right);
}

// several messages between a pair, of one size, arrive in the order of sending: in one exchange, and cut
// differently into exchanges on the two sides
static void case_order(Rank* k, int n_an_exchange_send, int n_an_exchange_recv) {
    enum { N = 12, NBYTES = 512 };
    if (k->P % 2 != 0) { return; }
    int peer = k->r ^ 1, sends = k->r % 2 == 0, each = sends ? n_an_exchange_send : n_an_exchange_recv;
    unsigned char* p[N];
    for (int i = 0; i < N; i++) {
        p[i] = sends ? device_bytes(k, NBYTES, k->r, peer, i) : device_bytes(k, NBYTES, -1, 0, 0);
    }
    for (int i = 0; i < N; i++) {
        if (i % each == 0) { fo_comm_begin(k->g, k->s); }
        if (sends) {
            fo_send(k->g, p[i], NBYTES, peer);
        } else {
            fo_recv(k->g, p[i], NBYTES, peer);
        }
        if (i % each == each - 1) { fo_comm_end(k->g); }
    }
    fo_stream_sync(k->s);
    int right = 1;
    for (int i = 0; i < N; i++) {
        right &= received_right(k, p[i], NBYTES, sends ? k->r : peer, sends ? peer : k->r, i);
        fo_free(k->d, p[i]);
    }
    CHECK(right);
}

// Exchanges that all ranks draw from the same seed: any pairs, any sizes, several messages between a pair.
// Ranks pause at moments of their own.
static void case_random(Rank* k, int nexchanges) {
    enum { MAX_NBYTES = 3000, BATCH = 50 };
    uint64_t shared = 12345u + (unsigned)k->P, own = 777u * (unsigned)(k->r + 1);
    unsigned char* src[BATCH * FO_MAX_RANKS];
    struct {
        unsigned char* dst;
        size_t nbytes;
        int from, number;
    } in[BATCH * FO_MAX_RANKS];
    unsigned char *arena = fo_malloc(k->d, sizeof in / sizeof *in * 2 * MAX_NBYTES), *at;
    int right = 1, nmessages = 0;
    for (int done = 0; done < nexchanges; done += BATCH) {
        int nsrc = 0, nin = 0;
        at = arena;
        for (int x = 0; x < BATCH; x++) {
            int n = (int)(random_next(&shared) % (unsigned)(FO_MAX_RANKS + 1));
            fo_comm_begin(k->g, k->s);
            for (int i = 0; i < n; i++) {
                int from = (int)(random_next(&shared) % (unsigned)k->P);
                int to = (from + 1 + (int)(random_next(&shared) % (unsigned)(k->P - 1))) % k->P;
                size_t nbytes = random_next(&shared) % 4 == 0 ? random_next(&shared) % 8
                                                              : random_next(&shared) % MAX_NBYTES;
                int number = nmessages++;
                if (from == k->r) {
                    unsigned char host[MAX_NBYTES];
                    pattern(host, nbytes, from, to, number);
                    src[nsrc] = at;
                    fo_upload(at, host, nbytes, k->s);
                    fo_stream_sync(k->s);
                    fo_send(k->g, src[nsrc++], nbytes, to);
                    at += MAX_NBYTES;
                } else if (to == k->r) {
                    in[nin].dst = at, in[nin].nbytes = nbytes, in[nin].from = from, in[nin].number = number;
                    fo_recv(k->g, in[nin++].dst, nbytes, from);
                    at += MAX_NBYTES;
                }
            }
            fo_comm_end(k->g);
            if (random_next(&own) % 16 == 0) { usleep((useconds_t)(random_next(&own) % 500)); }
        }
        for (int i = 0; i < nin; i++) {
            right &= received_right(k, in[i].dst, in[i].nbytes, in[i].from, k->r, in[i].number);
        }
        fo_zero(arena, (size_t)(at - arena), k->s);
    }
    fo_stream_sync(k->s);
    CHECK(right);
    fo_free(k->d, arena);
}

static void case_allgather(Rank* k, size_t nbytes) {
    unsigned char* all = device_bytes(k, nbytes * (size_t)k->P, -1, 0, 0);
    unsigned char* own = device_bytes(k, nbytes, k->r, 0, 3);
    fo_copy(all + (size_t)k->r * nbytes, own, nbytes, k->s);
    fo_allgather(k->g, all, nbytes, k->s);
    int right = 1;
    for (int p = 0; p < k->P; p++) {
        right &= received_right(k, all + (size_t)p * nbytes, nbytes, p, 0, 3);
    }
    CHECK(right);
    fo_free(k->d, all);
    fo_free(k->d, own);
}

// an exchange follows what its stream does before, and what is queued after follows it
static void case_stream_order(Rank* k) {
    enum { NBYTES = COMM_LARGE };
    if (k->P == 1) { return; }
    int to = (k->r + 1) % k->P, from = (k->r + k->P - 1) % k->P;
    unsigned char* first = device_bytes(k, NBYTES, k->r, to, 4);
    unsigned char *src = device_bytes(k, NBYTES, -1, 0, 0), *dst = device_bytes(k, NBYTES, -1, 0, 0);
    unsigned char* last = device_bytes(k, NBYTES, -1, 0, 0);
    FoStream* other = fo_stream_create(k->d, "other");
    FoEvent* e = fo_event_create();
    fo_copy(src, first, NBYTES, k->s);
    fo_comm_begin(k->g, k->s);
    fo_send(k->g, src, NBYTES, to);
    fo_recv(k->g, dst, NBYTES, from);
    fo_comm_end(k->g);
    fo_event_record(e, k->s);
    fo_zero(src, NBYTES, k->s);
    fo_stream_wait(other, e, NULL);
    fo_copy(last, dst, NBYTES, other);
    fo_stream_sync(other);
    CHECK(received_right(k, last, NBYTES, from, k->r, 4));
    fo_stream_destroy(other);
    fo_event_destroy(e);
    unsigned char* p[] = {first, src, dst, last};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++) {
        fo_free(k->d, p[i]);
    }
}

// ---- in a graph -------------------------------------------------------------------------------------------
enum { GRAPH_EACH = 2, GRAPH_NBYTES = 5000 }; // messages of a pair in an exchange

// GRAPH_EACH messages to each peer in one exchange, from and to rows that are a peer's
static void queue_rows(Rank* k, unsigned char* dst, const unsigned char* src) {
    fo_comm_begin(k->g, k->s);
    for (int i = 0; i < GRAPH_EACH * (k->P - 1); i++) {
        int hop = 1 + i % (k->P - 1), to = (k->r + hop) % k->P, from = (k->r + k->P - hop) % k->P;
        size_t at = (size_t)(i / (k->P - 1)) * GRAPH_NBYTES, row = (size_t)GRAPH_EACH * GRAPH_NBYTES;
        fo_send(k->g, src + (size_t)to * row + at, GRAPH_NBYTES, to);
        fo_recv(k->g, dst + (size_t)from * row + at, GRAPH_NBYTES, from);
    }
    fo_comm_end(k->g);
}

/* What each rank sends to a peer comes back from it, and the next launch sends something else: two
 * exchanges in a graph, again and again, with one of their kind outside in between. Ranks are late at times.
 */
static void case_graph(Rank* k) {
    size_t nbytes = (size_t)k->P * GRAPH_EACH * GRAPH_NBYTES;
    unsigned char *there = device_bytes(k, nbytes, -1, 0, 0), *back = device_bytes(k, nbytes, -1, 0, 0);
    unsigned char *src = device_bytes(k, nbytes, -1, 0, 0), *host = host_bytes(2 * nbytes);
    unsigned char* got = host + nbytes;
    uint64_t own = 31u * (unsigned)(k->r + 1);
    queue_rows(k, there, src); // the first exchange of a group can't be part of a graph
    FoGraph* graph = fo_graph_begin(k->s);
    queue_rows(k, there, src);
    queue_rows(k, back, there);
    fo_graph_end(graph);
    int right = 1;
    for (int round = 0; round < 6; round++) {
        pattern(host, nbytes, k->r, k->r, round);
        fo_upload(src, host, nbytes, k->s);
        fo_zero(back, nbytes, k->s);
        if (random_next(&own) % 2) { usleep((useconds_t)(random_next(&own) % 3000)); }
        fo_graph_launch(graph);
        fo_download(got, back, nbytes, k->s);
        fo_stream_sync(k->s);
        for (int p = 0; p < k->P; p++) {
            size_t row = (size_t)GRAPH_EACH * GRAPH_NBYTES;
            right &= p == k->r || memcmp(got + (size_t)p * row, host + (size_t)p * row, row) == 0;
        }
        if (round % 2) { queue_rows(k, there, src); }
    }
    CHECK(right);
    fo_stream_sync(k->s);
    fo_graph_free(graph);
    fo_free(k->d, there);
    fo_free(k->d, back);
    fo_free(k->d, src);
    free(host);
}

// ---- the emulated link ------------------------------------------------------------------------------------
typedef struct {
    unsigned char *src, *dst;
    size_t nbytes;
    int to[3], from[3]; // peers, closed by -1
    int times;          // so many exchanges are queued at once
    useconds_t pause;   // of this rank, before that
    double s, late_s;   // what they should take, and how much longer they may
    double begun;       // when the last run began, as fo_now
} Load;

static Load load_of(unsigned char* src, unsigned char* dst, size_t nbytes) {
    Load l = {.src = src, .dst = dst, .nbytes = nbytes, .to = {-1}, .from = {-1}, .times = 1, .late_s = 1e9};
    return l;
}

static double load_run(Rank* k, Load* l) {
    fo_stream_sync(k->s);
    fo_group_barrier(k->g);
    usleep(l->pause);
    l->begun = fo_now();
    for (int t = 0; t < l->times; t++) {
        fo_comm_begin(k->g, k->s);
        for (int i = 0; l->to[i] >= 0; i++) {
            fo_send(k->g, l->src, l->nbytes, l->to[i]);
        }
        for (int i = 0; l->from[i] >= 0; i++) {
            fo_recv(k->g, l->dst + (size_t)i * l->nbytes, l->nbytes, l->from[i]);
        }
        fo_comm_end(k->g);
    }
    fo_stream_sync(k->s);
    return fo_now() - l->begun;
}

// Never sooner than l->s; and at least once not later than allowed, on all ranks: a busy machine delays
// threads by many ms, so attempts go on until that is seen.
static void load_check(Rank* k, Load* l) {
    enum { ATTEMPTS = 150 };
    double best = 1e9;
    int early = 0, ngood = 0;
    for (int attempt = 0; attempt < ATTEMPTS && ngood < k->P; attempt++) {
        double took = load_run(k, l), good[FO_MAX_RANKS];
        early |= took < l->s;
        best = took < best ? took : best;
        gather(k, good, best <= l->s + l->late_s);
        ngood = 0;
        for (int p = 0; p < k->P; p++) {
            ngood += good[p] != 0.0;
        }
    }
    if (early || best > l->s + l->late_s) {
        fprintf(stderr, "took %.3f ms, wanted %.3f ms\n", 1e3 * best, 1e3 * l->s);
    }
    CHECK(!early);
    CHECK(best <= l->s + l->late_s);
}

static const double GBYTES_S = 0.1, LATENCY_US = 3000.0;
enum { LINK_NBYTES = 1 << 20 };      // 10.5 ms on that link
static const double MARGIN_S = 4e-3; // less than half of that
static const double LATENCY_S = 3e-3, WIRE_S = LINK_NBYTES / 0.1e9;

// both directions at once, one message in each: they don't share a port
static void link_neighbours(Rank* k, Load l) {
    l.to[0] = (k->r + 1) % k->P, l.to[1] = -1;
    l.from[0] = (k->r + k->P - 1) % k->P, l.from[1] = -1;
    l.s = LATENCY_S + WIRE_S, l.late_s = MARGIN_S;
    load_check(k, &l);
    // a chain: each starts when the one before has arrived, and late wake-ups, 50 us or more each, don't add
    // up
    fo_group_barrier(k->g);
    fo_group_link(k->g, GBYTES_S, LATENCY_US / 6);
    l.nbytes = LINK_NBYTES / 16, l.times = 100;
    l.s = 100 * (LATENCY_S / 6 + WIRE_S / 16);
    load_check(k, &l);
    fo_group_barrier(k->g);
    fo_group_link(k->g, GBYTES_S, LATENCY_US);
}

// rank 1 is late to receive: what rank 0 sends after that starts when it has left
static void link_late_receiver(Rank* k, Load l) {
    double begun[FO_MAX_RANKS];
    const int to[3][3] = {{1, 2, -1}, {-1}, {-1}}, from[3][3] = {{-1}, {0, -1}, {0, -1}};
    if (k->r < 3) {
        memcpy(l.to, to[k->r], sizeof l.to);
        memcpy(l.from, from[k->r], sizeof l.from);
    }
    l.pause = k->r == 1 ? 8000 : 0;
    double ended = load_run(k, &l) + l.begun;
    gather(k, begun, l.begun);
    if (k->r == 0 || k->r == 2) { CHECK(ended - begun[1] >= LATENCY_S + 2 * WIRE_S); }
}

static void link_three(Rank* k, Load none) {
    Load in = none, out = none;
    // two into one receiver queue up at its port
    if (k->r == 0) {
        in.from[0] = 1, in.from[1] = 2, in.from[2] = -1;
        in.s = LATENCY_S + 2 * WIRE_S, in.late_s = MARGIN_S;
    } else if (k->r < 3) {
        in.to[0] = 0, in.to[1] = -1;
    }
    load_check(k, &in);
    // two out of one sender queue up at its port; rank 2 may begin long after the first, so it has no least
    // time
    if (k->r == 0) {
        out.to[0] = 1, out.to[1] = 2, out.to[2] = -1;
        out.s = LATENCY_S + 2 * WIRE_S, out.late_s = MARGIN_S;
    } else if (k->r < 3) {
        out.from[0] = 0, out.from[1] = -1;
        out.s = k->r == 1 ? LATENCY_S + WIRE_S : 0.0;
        out.late_s = MARGIN_S + (k->r == 1 ? 0.0 : LATENCY_S + 2 * WIRE_S);
    }
    load_check(k, &out);
}

static void link_four(Rank* k, Load none) {
    Load pairs = none, mixed = none;
    // two pairs at once don't disturb each other
    int* peer = k->r % 2 == 0 ? pairs.to : pairs.from;
    peer[0] = k->r ^ 1, peer[1] = -1;
    pairs.s = LATENCY_S + WIRE_S, pairs.late_s = MARGIN_S;
    load_check(k, &pairs);
    // rank 0 sends to 1, then to 2; meanwhile 3 sends to 2, whose port is still free: it isn't held up
    const int to[4][3] = {{1, 2, -1}, {-1}, {-1}, {2, -1}}, from[4][3] = {{-1}, {0, -1}, {0, 3, -1}, {-1}};
    memcpy(mixed.to, to[k->r], sizeof mixed.to);
    memcpy(mixed.from, from[k->r], sizeof mixed.from);
    mixed.pause = k->r == 3 ? 6000 : 0;
    mixed.s = LATENCY_S + (k->r == 0 || k->r == 2 ? 2 : 1) * WIRE_S;
    mixed.late_s = MARGIN_S + (k->r == 0 || k->r == 2 ? 6e-3 : 0.0);
    load_check(k, &mixed);
}

static void case_link(Rank* k) {
    unsigned char* src = device_bytes(k, LINK_NBYTES, k->r, 0, 5);
    unsigned char* dst = device_bytes(k, 2 * LINK_NBYTES, -1, 0, 0);
    Load none = load_of(src, dst, LINK_NBYTES);
    fo_group_link(k->g, GBYTES_S, LATENCY_US);
    CHECK(fabs(fo_group_message_s(k->g, LINK_NBYTES) - (LATENCY_S + WIRE_S)) < 1e-9);
    fo_group_measure(k->g, k->s);
    CHECK(fabs(fo_group_message_s(k->g, LINK_NBYTES) - (LATENCY_S + WIRE_S)) <
          1e-9); // the link's figures stay
    if (k->P > 1) { link_neighbours(k, none); }
    if (k->P > 2) {
        link_three(k, none);
        link_late_receiver(k, none);
    }
    if (k->P == 4) { link_four(k, none); }
    case_ring(k, 1000, 1);
    case_all_pairs(k);
    if (k->P > 1) { case_random(k, 50); }
    fo_group_link(k->g, 0.0, 0.0);
    CHECK(fo_group_message_s(k->g, LINK_NBYTES) == 0.0);
    fo_free(k->d, src);
    fo_free(k->d, dst);
}

// ---- all of it --------------------------------------------------------------------------------------------
// figures are the same everywhere, and in proportion
static void case_measure(Rank* k) {
    double figures[FO_MAX_RANKS][2];
    double *all = fo_malloc(k->d, sizeof figures), *own = figures[k->r];
    for (int tries = 1, done = 0; !done; tries++) { // a busy machine can make 64 bytes last longer than 8 MiB
        fo_group_measure(k->g, k->s);
        own[0] = fo_group_message_s(k->g, 0);
        own[1] = fo_group_message_s(k->g, 1000000);
        done = tries == 5 || (own[1] > own[0] && own[1] < 1.0);
    }
    fo_upload(all + 2 * k->r, own, sizeof figures[0], k->s);
    fo_allgather(k->g, all, sizeof figures[0], k->s);
    fo_download(figures, all, sizeof figures, k->s);
    fo_stream_sync(k->s);
    fo_free(k->d, all);
    if (k->P == 1) {
        CHECK(own[0] == 0.0 && own[1] == 0.0);
        return;
    }
    CHECK(own[0] > 0.0 && own[0] < 0.1);
    CHECK(own[1] > own[0] && own[1] < 1.0);
    for (int p = 0; p < k->P; p++) {
        CHECK(figures[p][0] == own[0] && figures[p][1] == own[1]);
    }
}

// nothing to exchange is allowed, at P = 1 too
static void case_nothing(Rank* k) {
    unsigned char* p = device_bytes(k, 64, k->r, 0, 6);
    fo_comm_begin(k->g, k->s);
    fo_comm_end(k->g);
    fo_allgather(k->g, p, 0, k->s);
    if (k->P == 1) { fo_allgather(k->g, p, 64, k->s); }
    CHECK(received_right(k, p, 64, k->r, 0, 6));
    fo_free(k->d, p);
}

static void all_cases(FoGroup* g, int nexchanges, size_t large_nbytes) {
    Rank k = {.g = g, .P = fo_group_size(g), .r = fo_group_rank(g)};
    CHECK_AT("P=%d r=%d %s", k.P, k.r, fo_group_transport(g));
    CHECK(k.r >= 0 && k.r < k.P);
    CHECK(fo_group_nlocal(g) == k.P);
    k.d = fo_device_open(k.r, fo_group_nlocal(g));
    k.s = fo_stream_create(k.d, "comm");
    case_nothing(&k);
    case_barrier(&k);
    const size_t sizes[] = {1, 7, 4096, COMM_LARGE};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int hop = 1; hop < k.P; hop++) {
            case_ring(&k, sizes[i], hop);
        }
        case_allgather(&k, 2 * sizes[i]); // even: the checker of dev/emu takes pairs of bytes as one
    }
    case_all_pairs(&k);
    case_order(&k, 1, 1);
    case_order(&k, 4, 4);
    case_order(&k, 12, 1);
    case_order(&k, 2, 6);
    case_stream_order(&k);
    if (k.P > 1) { case_random(&k, nexchanges); }
    case_ring(&k, large_nbytes, 1);
    if (FO_DEVICE_CPU || k.P == 2) { case_measure(&k); }
    if (fo_device_emulates()) { case_link(&k); }
    // without access to a peer's memory, which the emulator can be told to refuse, exchanges make no graph
    int peers = getenv("FO_EMU_PEER") == NULL || strcmp(getenv("FO_EMU_PEER"), "0") != 0;
    if (fo_device_graphs() && k.P > 1 && peers) { case_graph(&k); }
    fo_group_barrier(g);
    fo_stream_destroy(k.s);
    CHECK(fo_device_nbytes(k.d) == 0);
    fo_device_close(k.d);
}
#endif
