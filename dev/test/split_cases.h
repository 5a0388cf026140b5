/* split_cases.h -- what fo_comm.h promises of groups that are part of a world, on any transport. Run by
 * test_comm.c and test_comm_mpi.c.
 *
 * A part knows its ranks as the world numbers them; so do the bytes that travel. Traffic is queued on streams
 * of several groups at once, among operations that sleep, and checked as a whole: what is between messages
 * must still be poison.
 */
#ifndef SPLIT_CASES_H
#define SPLIT_CASES_H
#include "dev/test/comm_cases.h"
#include "flashoverlap/fo_transport.h" // world_ranks
#if FO_DEVICE_CPU
#include "flashoverlap/cpu/cpu.h" // fo__clock
#endif
#include <limits.h>

typedef struct {
    FoGroup* g;
    FoStream* s;
    int n, r;
    int world[FO_MAX_RANKS];  // of its ranks
    size_t nbytes, nmessages; // that this rank has sent
} Part;

static Part world_part(Rank* k) {
    Part p = {.g = k->g, .n = k->P, .r = k->r};
    p.s = fo_stream_create(k->d, "world");
    for (int r = 0; r < k->P; r++) {
        p.world[r] = r;
    }
    fo_group_sent(p.g, &p.nbytes, &p.nmessages);
    return p;
}

// colors of the ranks of `of`
static Part part_open(Rank* k, const Part* of, const int colors[]) {
    Part p = {0};
    for (int r = 0; r < of->n; r++) {
        if (colors[r] != colors[of->r]) { continue; }
        if (r == of->r) { p.r = p.n; }
        p.world[p.n++] = of->world[r];
    }
    p.g = fo_group_split(of->g, colors[of->r]);
    p.s = fo_stream_create(k->d, "part");
    CHECK(fo_group_rank(p.g) == p.r);
    CHECK(fo_group_size(p.g) == p.n);
    CHECK(fo_group_nlocal(p.g) == p.n);
    CHECK_BITS(p.g->world_ranks, p.world, (size_t)p.n * sizeof *p.world); // for messages to people
    CHECK(strcmp(fo_group_transport(p.g), fo_group_transport(of->g)) == 0);
    return p;
}

static void part_check_sent(const Part* p) {
    size_t nbytes = 1, nmessages = 1;
    fo_group_sent(p->g, &nbytes, &nmessages);
    CHECK(nbytes == p->nbytes);
    CHECK(nmessages == p->nmessages);
}

static void part_free(Part* p) {
    fo_stream_destroy(p->s);
    fo_group_free(p->g);
}

// the part as a world of its own, for the cases of comm_cases.h
static Rank rank_of(Rank* k, const Part* p) {
    Rank sub = {.g = p->g, .d = k->d, .s = p->s, .P = p->n, .r = p->r};
    return sub;
}

// ---- traffic ----------------------------------------------------------------------------------------------
enum { EXCHANGES = 12, MOST_NBYTES = 12000 }; // beyond what MPI sends eagerly

typedef struct {
    Part* p;
    int tag; // of the group, so that another group's message is another
    unsigned char *src, *dst, *want;
    size_t nbytes; // of each of them
} Traffic;

// exchange x has a message between each two ranks of the part, some of no bytes
static size_t message_nbytes(int tag, int x, int from, int to) {
    uint64_t h = mix((uint64_t)tag << 40 | (uint64_t)x << 20 | (uint64_t)from << 8 | (uint64_t)to);
    return h % 5 == 0 ? 0 : h % 5 == 1 ? (h >> 8) % 9 : (h >> 8) % MOST_NBYTES;
}

static size_t message_at(const Part* p, int x, int hop) {
    return (size_t)(x * (p->n - 1) + hop - 1) * MOST_NBYTES;
}

static int to_of(const Part* p, int hop) {
    return (p->r + hop) % p->n;
}

static int from_of(const Part* p, int hop) {
    return (p->r + p->n - hop) % p->n;
}

static Traffic traffic_open(Rank* k, Part* p, int tag) {
    Traffic t = {.p = p, .tag = tag, .nbytes = message_at(p, EXCHANGES, 1) + 1};
    int own = p->world[p->r];
    unsigned char* host = host_bytes(t.nbytes);
    t.src = fo_malloc(k->d, t.nbytes), t.dst = fo_malloc(k->d, t.nbytes), t.want = host_bytes(t.nbytes);
    memset(t.want, 0xff, t.nbytes);
    memset(host, 0xff, t.nbytes);
    fo_upload(t.dst, host, t.nbytes, p->s);
    fo_stream_sync(p->s);
    for (int x = 0; x < EXCHANGES; x++) {
        for (int hop = 1; hop < p->n; hop++) {
            int to = p->world[to_of(p, hop)], from = p->world[from_of(p, hop)], number = 100 * tag + x;
            pattern(host + message_at(p, x, hop), message_nbytes(tag, x, own, to), own, to, number);
            pattern(t.want + message_at(p, x, hop), message_nbytes(tag, x, from, own), from, own, number);
        }
    }
    fo_upload(t.src, host, t.nbytes, p->s);
    fo_stream_sync(p->s);
    free(host);
    return t;
}

static void sleep_us(void* args) {
    usleep(*(useconds_t*)args);
}

// queues exchange x, perhaps behind an operation that takes time
static void traffic_queue(Traffic* t, int x, uint64_t* random) {
    Part* p = t->p;
    useconds_t us = (useconds_t)(random_next(random) % 400);
    if (random_next(random) % 2) { fo_stream_call(p->s, sleep_us, &us, sizeof us); }
    fo_comm_begin(p->g, p->s);
    for (int hop = 1; hop < p->n; hop++) {
        int own = p->world[p->r], to = p->world[to_of(p, hop)], from = p->world[from_of(p, hop)];
        size_t nsent = message_nbytes(t->tag, x, own, to);
        fo_send(p->g, t->src + message_at(p, x, hop), nsent, to_of(p, hop));
        fo_recv(p->g, t->dst + message_at(p, x, hop), message_nbytes(t->tag, x, from, own), from_of(p, hop));
        p->nbytes += nsent;
        p->nmessages += nsent > 0;
    }
    fo_comm_end(p->g);
}

static void traffic_close(Rank* k, Traffic* t) {
    unsigned char* got = host_bytes(t->nbytes);
    fo_download(got, t->dst, t->nbytes, t->p->s);
    fo_stream_sync(t->p->s);
    CHECK_BITS(got, t->want, t->nbytes);
    part_check_sent(t->p);
    fo_free(k->d, t->src);
    fo_free(k->d, t->dst);
    free(t->want);
    free(got);
}

// traffic in n groups at once; the ranks of `world`, unless NULL, meet and split meanwhile: nothing of it is
// queued
static void run_traffic(Rank* k, Part* parts[], int n, FoGroup* world) {
    Traffic t[3];
    uint64_t random = 99u * (unsigned)(k->r + 1);
    for (int i = 0; i < n; i++) {
        t[i] = traffic_open(k, parts[i], i + 1);
    }
    for (int x = 0; x < EXCHANGES; x++) {
        for (int i = 0; i < n; i++) {
            traffic_queue(&t[(x + i) % n], x, &random); // each stream is first at times
        }
        if (world && x % 4 == 1) { fo_group_barrier(world); }
        if (world && x == EXCHANGES / 2) {
            FoGroup* brief = fo_group_split(world, k->r % 2);
            fo_group_barrier(brief);
            fo_group_free(brief);
        }
        if (random_next(&random) % 4 == 0) { usleep((useconds_t)(random_next(&random) % 500)); }
    }
    for (int i = 0; i < n; i++) {
        traffic_close(k, &t[i]);
    }
}

// ---- the cases --------------------------------------------------------------------------------------------
// tp groups of t neighbours (the last may be smaller), dp groups across them
static void case_mesh(Rank* k, int t) {
    CHECK_AT("P=%d r=%d %s t=%d", k->P, k->r, fo_group_transport(k->g), t);
    int tp_colors[FO_MAX_RANKS], dp_colors[FO_MAX_RANKS];
    for (int r = 0; r < k->P; r++) {
        tp_colors[r] = r / t;
        dp_colors[r] = r % t;
    }
    Part world = world_part(k), tp = part_open(k, &world, tp_colors), dp = part_open(k, &world, dp_colors);
    Part* parts[] = {&tp, &dp};
    run_traffic(k, parts, 2, k->g);
    part_check_sent(&world);
    part_free(&tp);
    part_free(&dp);
    fo_stream_destroy(world.s);
}

// groups of 1, 2 and 3 ranks, whose ranks are not neighbours, under colors that don't follow each other
static void case_uneven(Rank* k) {
    CHECK_AT("P=%d r=%d %s uneven", k->P, k->r, fo_group_transport(k->g));
    const int colors[8] = {INT_MAX, 7, INT_MAX, 0, 7, INT_MAX, 0, 7};
    Part world = world_part(k), part = part_open(k, &world, colors);
    Part* parts[] = {&part, &world};
    Rank sub = rank_of(k, &part);
    for (int i = 0; i < part.n * part.n; i++) { // a group's barriers are its own
        fo_group_barrier(part.g);
    }
    case_barrier(&sub);
    fo_group_sent(part.g, &part.nbytes, &part.nmessages);
    fo_stream_sync(part.s);
    run_traffic(k, parts, 2, NULL);
    case_nothing(&sub);
    case_allgather(&sub, 1000);
    part.nbytes += (size_t)(part.n - 1) * 1000; // of the collective
    part.nmessages += (size_t)(part.n - 1);
    part_check_sent(&part);
    part_check_sent(&world);
    if (FO_DEVICE_CPU) { case_measure(&sub); }
    part_free(&part);
    fo_stream_destroy(world.s);
}

// halves, and each half's even and odd ranks, which outlive it
static void case_nested(Rank* k) {
    CHECK_AT("P=%d r=%d %s nested", k->P, k->r, fo_group_transport(k->g));
    int halves[FO_MAX_RANKS];
    const int parities[FO_MAX_RANKS] = {0, 1, 0, 1, 0, 1, 0, 1};
    for (int r = 0; r < k->P; r++) {
        halves[r] = r < (k->P + 1) / 2;
    }
    Part world = world_part(k), half = part_open(k, &world, halves), part = part_open(k, &half, parities);
    Part *all[] = {&part, &world, &half}, *last[] = {&part};
    run_traffic(k, all, 3, NULL);
    part_free(&half);
    run_traffic(k, last, 1, k->g);
    part_free(&part);
    fo_stream_destroy(world.s);
}

// Small exchanges of two groups without a pause, while others come and go, so that threads meet in the
// transport at every moment of an exchange. A number that arrives says from whom, in which group, when.
static void case_storm(Rank* k, int nexchanges) {
    CHECK_AT("P=%d r=%d %s storm", k->P, k->r, fo_group_transport(k->g));
    const int colors[FO_MAX_RANKS] = {0};
    Part world = world_part(k), parts[2];
    size_t n = (size_t)nexchanges, nbytes = n * sizeof(uint64_t);
    uint64_t *host = host_bytes(nbytes), *src[2], *dst[2];
    for (size_t j = 0; j < 2; j++) {
        parts[j] = part_open(k, &world, colors);
        src[j] = fo_malloc(k->d, nbytes), dst[j] = fo_malloc(k->d, nbytes);
        for (size_t i = 0; i < n; i++) {
            host[i] = (i * 2 + j) * FO_MAX_RANKS + (size_t)k->r;
        }
        fo_upload(src[j], host, nbytes, parts[j].s);
        fo_stream_sync(parts[j].s);
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < 2; j++) {
            fo_comm_begin(parts[j].g, parts[j].s);
            fo_recv(parts[j].g, dst[j] + i, sizeof(uint64_t), from_of(&parts[j], 1));
            fo_send(parts[j].g, src[j] + i, sizeof(uint64_t), to_of(&parts[j], 1));
            fo_comm_end(parts[j].g);
        }
        if (i % (n / 10) == 0) { fo_group_free(fo_group_split(k->g, 0)); }
    }
    for (size_t j = 0; j < 2; j++) {
        size_t nwrong = 0;
        fo_download(host, dst[j], nbytes, parts[j].s);
        fo_stream_sync(parts[j].s);
        for (size_t i = 0; i < n; i++) {
            nwrong += host[i] != (i * 2 + j) * FO_MAX_RANKS + (size_t)from_of(&parts[j], 1);
        }
        CHECK(nwrong == 0);
        fo_free(k->d, src[j]);
        fo_free(k->d, dst[j]);
        part_free(&parts[j]);
    }
    free(host);
    fo_stream_destroy(world.s);
}

// Rank 0 splits the world while an exchange of another group waits for rank 1, which splits only after that.
static void case_split_meanwhile(Rank* k) {
    CHECK_AT("P=%d r=%d %s split meanwhile", k->P, k->r, fo_group_transport(k->g));
    enum { NBYTES = 100000 };
    const int colors[FO_MAX_RANKS] = {0};
    Part world = world_part(k), part = part_open(k, &world, colors);
    unsigned char* p = device_bytes(k, NBYTES, k->r == 1 ? 1 : -1, 0, 8);
    if (k->r == 1) { usleep(20000); }
    fo_comm_begin(part.g, part.s);
    if (k->r == 0) { fo_recv(part.g, p, NBYTES, 1); }
    if (k->r == 1) { fo_send(part.g, p, NBYTES, 0); }
    fo_comm_end(part.g);
    if (k->r == 1) { fo_stream_sync(part.s); }
    fo_group_free(fo_group_split(k->g, 0));
    fo_stream_sync(part.s);
    if (k->r == 0) { CHECK(received_right(k, p, NBYTES, 1, 0, 8)); }
    fo_free(k->d, p);
    part_free(&part);
    fo_stream_destroy(world.s);
}

// ---- the emulated link ------------------------------------------------------------------------------------
#if FO_DEVICE_CPU
static void set_clock_op(FoStream* s, void* args) {
    fo__clock_set(s, *(double*)args);
}

static void read_clock_op(FoStream* s, void* args) {
    **(double**)args = fo__clock(s);
}

// Queues n messages to the next rank, and as many from the one before, on a stream whose virtual clock then
// is at `begin`; *end will be where it is after them.
static void queue_at(Part* p, unsigned char* src, unsigned char* dst, int n, double begin, double* end) {
    fo__enqueue(p->s, set_clock_op, &begin, sizeof begin);
    fo_comm_begin(p->g, p->s);
    for (int i = 0; i < n; i++) {
        fo_send(p->g, src, LINK_NBYTES, to_of(p, 1));
        fo_recv(p->g, dst + (size_t)i * LINK_NBYTES, LINK_NBYTES, from_of(p, 1));
    }
    fo_comm_end(p->g);
    fo__enqueue(p->s, read_clock_op, &end, sizeof end);
}

// each group has its own ports: messages of two groups, at once between the same ranks, pass each other
static void case_ports(Rank* k) {
    CHECK_AT("P=%d r=%d %s ports", k->P, k->r, fo_group_transport(k->g));
    const int colors[FO_MAX_RANKS] = {0};
    double begins[FO_MAX_RANKS], begin = 0.0, one = 0.0, two = 0.0;
    unsigned char* src = device_bytes(k, LINK_NBYTES, k->r, 0, 7);
    unsigned char* dst = device_bytes(k, 3 * LINK_NBYTES, -1, 0, 0);
    fo_group_link(k->g, GBYTES_S, LATENCY_US);
    Part world = world_part(k), a = part_open(k, &world, colors), b = part_open(k, &a, colors);
    CHECK(fabs(fo_group_message_s(a.g, LINK_NBYTES) - (LATENCY_S + WIRE_S)) < 1e-9);
    CHECK(fabs(fo_group_message_s(b.g, LINK_NBYTES) - (LATENCY_S + WIRE_S)) < 1e-9);
    // by when all have queued what follows, if the machine lets them
    for (double lead = 0.25, late = k->P > 1; late != 0.0 && lead <= 4.0; lead *= 2.0) {
        gather(k, begins, fo_now() + lead);
        for (int r = 0; r < k->P; r++) {
            begin = begins[r] > begin ? begins[r] : begin;
        }
        queue_at(&a, src, dst, 1, begin, &one);
        queue_at(&b, src, dst + LINK_NBYTES, 2, begin, &two);
        gather(k, begins, fo_now() >= begin);
        late = 0.0;
        for (int r = 0; r < k->P; r++) {
            late += begins[r];
        }
        fo_stream_sync(a.s);
        fo_stream_sync(b.s);
    }
    if (k->P > 1) {
        CHECK(fabs(one - (begin + WIRE_S + LATENCY_S)) < 1e-9);
        CHECK(fabs(two - (begin + 2 * WIRE_S + LATENCY_S)) < 1e-9);
    }
    // a group's link can be changed alone
    fo_group_link(a.g, 0.0, 0.0);
    fo_group_link(b.g, 2 * GBYTES_S, 0.0);
    CHECK(fo_group_message_s(a.g, LINK_NBYTES) == 0.0);
    CHECK(fabs(fo_group_message_s(b.g, LINK_NBYTES) - WIRE_S / 2) < 1e-9);
    CHECK(fabs(fo_group_message_s(k->g, LINK_NBYTES) - (LATENCY_S + WIRE_S)) < 1e-9);
    fo_group_link(k->g, 0.0, 0.0);
    part_free(&a);
    part_free(&b);
    fo_stream_destroy(world.s);
    fo_free(k->d, src);
    fo_free(k->d, dst);
}

#endif

static void split_cases(FoGroup* g, int nexchanges) {
    Rank k = {.g = g, .P = fo_group_size(g), .r = fo_group_rank(g)};
    k.d = fo_device_open(k.r, fo_group_nlocal(g));
    k.s = fo_stream_create(k.d, "comm");
    for (int t = 1; t <= k.P; t++) {
        if (t <= 4 || t == k.P) { case_mesh(&k, t); }
    }
    case_uneven(&k);
    case_nested(&k);
    if (k.P > 1) {
        case_storm(&k, nexchanges);
        case_split_meanwhile(&k);
    }
#if FO_DEVICE_CPU
    case_ports(&k);
#endif
    fo_group_barrier(g);
    fo_stream_destroy(k.s);
    CHECK(fo_device_nbytes(k.d) == 0);
    fo_device_close(k.d);
}
#endif
