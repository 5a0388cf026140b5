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
    enum { NBYTES = 1 << 20 };
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

// ---- the emulated link ------------------------------------------------------------------------------------
static double smallest(double a, double b) {
    return a < b ? a : b;
}

// Least seconds of a few attempts that this rank's stream takes for `times` exchanges queued at once, each
// with a send to all of `to` and a receive from all of `from` (lists end with -1).
static double link_s(Rank* k, void* src, void* dst, size_t nbytes, const int* to, const int* from,
                     int times) {
    double best = 1e9;
    for (int attempt = 0; attempt < 5; attempt++) {
        fo_stream_sync(k->s);
        fo_group_barrier(k->g);
        double start = fo_now();
        for (int t = 0; t < times; t++) {
            fo_comm_begin(k->g, k->s);
            for (int i = 0; to[i] >= 0; i++) {
                fo_send(k->g, src, nbytes, to[i]);
            }
            for (int i = 0; from[i] >= 0; i++) {
                fo_recv(k->g, (char*)dst + (size_t)i * nbytes, nbytes, from[i]);
            }
            fo_comm_end(k->g);
        }
        fo_stream_sync(k->s);
        best = smallest(best, fo_now() - start);
    }
    return best;
}

// no sooner than `s`, and in the best of a few attempts not later than the machine's noise allows
static void check_time(double got, double s, double margin) {
    if (!(got >= s && got <= s + margin)) {
        fprintf(stderr, "took %.3f ms, wanted %.3f ms\n", 1e3 * got, 1e3 * s);
    }
    CHECK(got >= s);
    CHECK(got <= s + margin);
}

static void case_link(Rank* k) {
    enum { NBYTES = 1 << 20 };
    const double GBYTES_S = 0.1, US = 3000.0, WIRE = NBYTES / (GBYTES_S * 1e9), LATENCY = US * 1e-6;
    const double MARGIN = 4e-3; // a wire time is 10.5 ms: less than half of that
    const int nobody[] = {-1}, even = k->r % 2 == 0;
    unsigned char* src = device_bytes(k, NBYTES, k->r, 0, 5);
    unsigned char* dst = device_bytes(k, 2 * NBYTES, -1, 0, 0);
    fo_group_link(k->g, GBYTES_S, US);
    CHECK(fabs(fo_group_message_s(k->g, NBYTES) - (LATENCY + WIRE)) < 1e-9);
    fo_group_measure(k->g, k->s);
    CHECK(fabs(fo_group_message_s(k->g, NBYTES) - (LATENCY + WIRE)) < 1e-9); // the link's figures stay
    if (k->P > 1) {
        // both directions at once, one message in each: they don't share a port
        int next[] = {(k->r + 1) % k->P, -1}, previous[] = {(k->r + k->P - 1) % k->P, -1};
        check_time(link_s(k, src, dst, NBYTES, next, previous, 1), LATENCY + WIRE, MARGIN);
        // a chain: each starts when the one before has arrived, and late wake-ups, of 50 us or more each, do
        // not add up
        fo_group_barrier(k->g);
        fo_group_link(k->g, GBYTES_S, US / 6);
        double chain = link_s(k, src, dst, NBYTES / 16, next, previous, 100);
        check_time(chain, 100 * (LATENCY / 6 + WIRE / 16), MARGIN);
        fo_group_barrier(k->g);
        fo_group_link(k->g, GBYTES_S, US);
    }
    if (k->P > 2) {
        // two into one receiver queue up at its port; the later sender waits as long as the receiver
        int zero[] = {0, -1}, both[] = {1, 2, -1};
        double in =
            link_s(k, src, dst, NBYTES, k->r == 1 || k->r == 2 ? zero : nobody, k->r == 0 ? both : nobody, 1);
        if (k->r == 0) { check_time(in, LATENCY + 2 * WIRE, MARGIN); }
        // two out of one sender queue up at its port
        double out =
            link_s(k, src, dst, NBYTES, k->r == 0 ? both : nobody, k->r == 1 || k->r == 2 ? zero : nobody, 1);
        if (k->r == 0) { check_time(out, LATENCY + 2 * WIRE, MARGIN); }
        // rank 2 may begin long after the first message did: no least time for it
        if (k->r == 2) { CHECK(out <= LATENCY + 2 * WIRE + MARGIN); }
        if (k->r == 1) { check_time(out, LATENCY + WIRE, MARGIN); }
    }
    if (k->P == 4) {
        // two pairs at once don't disturb each other
        int peer[] = {k->r ^ 1, -1};
        double one = link_s(k, src, dst, NBYTES, even ? peer : nobody, even ? nobody : peer, 1);
        check_time(one, LATENCY + WIRE, MARGIN);
        // rank 0 sends to 1 and then to 2, to which 3 sends at once: what starts first is not held up
        int zero_three[] = {0, 3, -1}, one_two[] = {1, 2, -1}, zero[] = {0, -1}, two[] = {2, -1};
        const int* to[] = {one_two, nobody, nobody, two};
        const int* from[] = {nobody, zero, zero_three, nobody};
        double mixed = link_s(k, src, dst, NBYTES, to[k->r], from[k->r], 1);
        check_time(mixed, LATENCY + (k->r == 0 || k->r == 2 ? 2 : 1) * WIRE, MARGIN);
    }
    case_ring(k, 1000, 1);
    case_all_pairs(k);
    if (k->P > 1) { case_random(k, 50); }
    fo_group_link(k->g, 0.0, 0.0);
    CHECK(fo_group_message_s(k->g, NBYTES) == 0.0);
    fo_free(k->d, src);
    fo_free(k->d, dst);
}

// ---- all of it --------------------------------------------------------------------------------------------
// figures are the same everywhere, and in proportion
static void case_measure(Rank* k) {
    double figures[FO_MAX_RANKS][2];
    fo_group_measure(k->g, k->s);
    double *all = fo_malloc(k->d, sizeof figures), *own = figures[k->r];
    own[0] = fo_group_message_s(k->g, 0);
    own[1] = fo_group_message_s(k->g, 1000000);
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
    const size_t sizes[] = {1, 7, 4096, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int hop = 1; hop < k.P; hop++) {
            case_ring(&k, sizes[i], hop);
        }
        case_allgather(&k, sizes[i]);
    }
    case_all_pairs(&k);
    case_order(&k, 1, 1);
    case_order(&k, 4, 4);
    case_order(&k, 12, 1);
    case_order(&k, 2, 6);
    case_stream_order(&k);
    if (k.P > 1) { case_random(&k, nexchanges); }
    case_ring(&k, large_nbytes, 1);
    case_measure(&k);
    case_link(&k);
    fo_group_barrier(g);
    fo_stream_destroy(k.s);
    CHECK(fo_device_nbytes(k.d) == 0);
    fo_device_close(k.d);
}
#endif
