// comm.c -- groups of which one rank is there, and the time that its exchanges take. See sim.h.
#include "flashoverlap/fo_ops.h" // FO_MAX_RANKS
#include "flashoverlap/sim/sim.h"
#include <math.h>
#include <stdlib.h>

struct FoGroup {
    FoDevice* device;
    FoGroup* world;
    int rank, size, nsplits, alike;
    int world_ranks[FO_MAX_RANKS];
    SimColors colors;
    double port_s; // when its own link is free, where groups do not share one
    size_t nbytes_sent, nsent;
    // the exchange that is being collected
    FoStream* stream;
    double sends_s, recvs_s, latency_s;
    FoMessages messages;
    int levels; // bit 0: within the machine, 1: between machines
};

static FoGroup* group_new(FoDevice* d) {
    FoGroup* g = calloc(1, sizeof *g);
    fo_require(g != NULL, "out of memory");
    g->device = d;
    g->world = g;
    g->alike = 1;
    return g;
}

static int alike_of(const SimColors* c, int nth) {
    return c->alike ? c->alike(c->arg, nth) : 1;
}

FoGroup* sim_world(FoDevice* d, int size, SimColors colors) {
    FoGroup* g = group_new(d);
    fo_require(size >= 1 && size <= FO_MAX_RANKS, "a world of %d ranks", size);
    g->size = size;
    g->colors = colors;
    g->alike = alike_of(&colors, -1);
    for (int r = 0; r < size; r++) {
        g->world_ranks[r] = r;
    }
    return g;
}

void sim_world_free(FoGroup* g) {
    free(g);
}

void fo_ranks_run(int P, FoRankBody body, void* arg) {
    (void)body, (void)arg;
    fo_die(__FILE__, __LINE__, __func__, "%d simulated ranks: sim_world makes them", P);
}

int fo_group_rank(const FoGroup* g) {
    return g->rank;
}
int fo_group_size(const FoGroup* g) {
    return g->size;
}
int fo_group_nlocal(const FoGroup* g) {
    return g->size;
}
const char* fo_group_transport(const FoGroup* g) {
    (void)g;
    return "sim";
}
void fo_group_barrier(FoGroup* g) {
    (void)g; // the others are here already: they are as this one
}

FoGroup* fo_group_split(FoGroup* g, int color) {
    FoGroup* part = group_new(g->device);
    const SimColors* c = &g->colors;
    const int nth = g->nsplits++;
    part->world = g->world;
    part->alike = alike_of(c, nth);
    for (int r = 0; r < g->size; r++) {
        if (c->of && c->of(c->arg, nth, r) != color) { continue; }
        if (r == g->rank) { part->rank = part->size; }
        part->world_ranks[part->size++] = g->world_ranks[r];
    }
    return part;
}
void fo_group_free(FoGroup* g) {
    free(g);
}

void fo_group_sent(const FoGroup* g, size_t* nbytes, size_t* nmessages) {
    *nbytes = g->nbytes_sent;
    *nmessages = g->nsent;
}
void fo_group_sent_by_graph(FoGroup* g, size_t nbytes, size_t nmessages) {
    g->nbytes_sent += nbytes;
    g->nsent += nmessages;
}
void fo_group_link(FoGroup* g, double gbytes_s, double us) {
    (void)g, (void)us;
    fo_require(gbytes_s == 0.0, "a simulated link is as its hardware says");
}
void fo_group_measure(FoGroup* g, FoStream* s) {
    (void)g, (void)s;
}
void fo_group_patience(FoGroup* g, double seconds) {
    (void)g, (void)seconds;
}
void fo_group_step(FoGroup* g, int step) {
    (void)g, (void)step;
}

// ---- exchanges --------------------------------------------------------------------------------------------
static int other_machine(const FoGroup* g, int peer) {
    const int each = (int)g->device->h.node_ranks;
    return g->alike > 1 || g->world_ranks[g->rank] / each != g->world_ranks[peer] / each;
}

static void message(const FoGroup* g, size_t nbytes, int peer, double* latency_s, double* bytes_s) {
    const SimHardware* h = &g->device->h;
    const int far = other_machine(g, peer);
    // of the P * alike - 1 messages in place of P - 1, each has 1/alike of the bytes
    const double P = g->size, alike = g->alike,
                 bytes = (double)nbytes * (P * alike - 1.0) / (alike * (P - 1.0));
    *latency_s = 1e-6 * alike * (far ? h->node_link_us : h->link_us);
    *bytes_s = bytes / (1e9 * (far ? h->node_link_gbytes_s : h->link_gbytes_s));
}

// of the plain collective: the slowest link that the group has sets its pace
double fo_group_message_s(const FoGroup* g, size_t nbytes) {
    double latency = 0.0, seconds = 0.0, most = 0.0;
    for (int p = 0; p < g->size; p++) {
        if (p == g->rank) { continue; }
        message(g, nbytes, p, &latency, &seconds);
        most = fmax(most, latency + seconds);
    }
    return most;
}

void fo_comm_begin(FoGroup* g, FoStream* s) {
    g->stream = s;
    g->sends_s = g->recvs_s = g->latency_s = 0.0;
    g->levels = 0;
    memset(&g->messages, 0, sizeof g->messages);
}
void fo_comm_name(FoGroup* g, const char* name) {
    (void)g, (void)name;
}

static void add_message(FoGroup* g, size_t nbytes, int peer, double* direction_s) {
    double latency, seconds;
    message(g, nbytes, peer, &latency, &seconds);
    g->latency_s = fmax(g->latency_s, latency);
    g->levels |= other_machine(g, peer) ? 2 : 1;
    *direction_s += seconds;
}

void fo_send(FoGroup* g, const void* src, size_t nbytes, int to) {
    (void)src;
    if (nbytes == 0) { return; }
    add_message(g, nbytes, to, &g->sends_s);
    g->messages.nsent += nbytes;
    g->messages.to |= 1u << (g->world_ranks[to] & 31);
    g->nbytes_sent += nbytes;
    g->nsent++;
}
void fo_recv(FoGroup* g, void* dst, size_t nbytes, int from) {
    (void)dst;
    if (nbytes == 0) { return; }
    add_message(g, nbytes, from, &g->recvs_s);
    g->messages.nreceived += nbytes;
    g->messages.from |= 1u << (g->world_ranks[from] & 31);
}

/* Messages of an exchange follow each other in either direction, their latencies pass at once; it starts when
 * the ports that it needs are free: those of the machine's links, or the group's own.
 */
void fo_comm_end(FoGroup* g) {
    FoDevice* d = g->device;
    FoStream* s = g->stream;
    const double seconds = fmax(g->sends_s, g->recvs_s) + g->latency_s;
    const int room = (int)(sizeof d->comm_busy / sizeof *d->comm_busy);
    if (!g->levels) { return; }
    double free_s = g->port_s;
    for (int i = 0; i < 2 && d->h.link_shared != 0.0; i++) {
        if (g->levels >> i & 1) { free_s = fmax(free_s, d->ports_s[i]); }
    }
    s->clock_s = fmax(s->clock_s, free_s);
    s->messages = g->messages;
    sim_queue(s, "exchange", seconds, 0.0, 0);
    g->port_s = s->clock_s;
    for (int i = 0; i < 2; i++) {
        if (g->levels >> i & 1) { d->ports_s[i] = s->clock_s; }
    }
    d->comm_busy[d->ncomm % room][0] = s->clock_s - seconds;
    d->comm_busy[d->ncomm % room][1] = s->clock_s;
    d->ncomm++;
}

void fo_allgather(FoGroup* g, void* all, size_t nbytes_each, FoStream* s) {
    const int P = g->size, r = g->rank;
    fo_comm_begin(g, s);
    for (int i = 1; i < P; i++) {
        fo_send(g, all, nbytes_each, (r + P - i) % P);
        fo_recv(g, all, nbytes_each, (r + i) % P);
    }
    fo_comm_end(g);
}
