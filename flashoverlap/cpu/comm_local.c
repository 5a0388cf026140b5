/* comm_local.c -- the transport between ranks that are threads of one process: mailboxes and memcpy.
 *
 * There is a mailbox for each pair (from, to). The receiver posts where it wants a message; the sender waits
 * for that, copies, and marks it done. Both run on the threads of their comm streams. The mailboxes' locks
 * are left visible to ThreadSanitizer, unlike those of streams: what they order is the message itself.
 */
#include "flashoverlap/cpu/comm.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

// receives that the receiver posted and the sender has not yet taken, in order
typedef struct {
    pthread_mutex_t mutex; // of the list, and of the receives that are or were in it
    pthread_cond_t changed;
    FoRecv *first, *last;
} Mailbox;

typedef struct {
    int P;
    atomic_int nopen; // groups not yet closed; the last frees this
    pthread_mutex_t barrier_mutex;
    pthread_cond_t barrier_cond;
    unsigned barrier_here; // bit r: rank r waits
    uint64_t barrier_round;
    struct {
        int color;
        FoGroup* part;
    } split[FO_MAX_RANKS];       // a split under way, written and read by turns between barriers
    pthread_mutex_t ports_mutex; // emulated link: virtual times from which a rank's ports are free
    double egress_free[FO_MAX_RANKS], ingress_free[FO_MAX_RANKS];
    Mailbox boxes[FO_MAX_RANKS][FO_MAX_RANKS]; // [from][to]
} World;

static void cond_init(pthread_cond_t* cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

// waits for a signal, not for long, and takes the time from *patience; 0 if nothing is left of it
static int cond_wait(pthread_cond_t* cond, pthread_mutex_t* mutex, double* patience) {
    double start = fo_now(), until = start + fo__waited_s(*patience);
    struct timespec t = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    pthread_cond_timedwait(cond, mutex, &t);
    *patience -= fo__waited_s(fo_now() - start);
    return *patience > 0.0;
}

static void post_receive(FoGroup* g, FoRecv* r) {
    Mailbox* box = &((World*)g->state)->boxes[r->from][g->rank];
    pthread_mutex_lock(&box->mutex);
    r->posted = g->running->posted;
    r->next = NULL;
    r->done = 0;
    if (box->first) {
        box->last->next = r;
    } else {
        box->first = r;
    }
    box->last = r;
    pthread_cond_broadcast(&box->changed);
    pthread_mutex_unlock(&box->mutex);
}

static FoRecv* take_receive(FoGroup* g, const FoSend* m) {
    Mailbox* box = &((World*)g->state)->boxes[g->rank][m->to];
    double patience = fo__patience_s(g, g->running), left = patience;
    pthread_mutex_lock(&box->mutex);
    while (!box->first) {
        int in_time = cond_wait(&box->changed, &box->mutex, &left);
        fo_require(in_time || box->first, "waited %.1f s for rank %d to receive %zu bytes", patience,
                   g->world_ranks[m->to], m->nbytes);
    }
    FoRecv* r = box->first;
    box->first = r->next;
    pthread_mutex_unlock(&box->mutex);
    fo_require(r->nbytes == m->nbytes, "rank %d sends %zu bytes to rank %d, which expects %zu",
               g->world_ranks[g->rank], m->nbytes, g->world_ranks[m->to], r->nbytes);
    return r;
}

// the virtual time at which a message leaves the ports, which are taken until then
static double reserve_ports(FoGroup* g, const FoSend* m, double receiver_posted) {
    World* w = g->state;
    pthread_mutex_lock(&w->ports_mutex);
    double start = fo__later(g->running->posted, receiver_posted);
    start = fo__later(start, fo__later(w->egress_free[g->rank], w->ingress_free[m->to]));
    double gone = start + fo__wire_s(g, m->nbytes);
    w->egress_free[g->rank] = w->ingress_free[m->to] = gone;
    pthread_mutex_unlock(&w->ports_mutex);
    return gone;
}

// returns the virtual time from which the next message may leave, 0 without an emulated link
static double send_message(FoGroup* g, const FoSend* m) {
    FoBatch* b = g->running;
    FoRecv* r = take_receive(g, m);
    double gone = 0.0, due = 0.0;
    if (g->emulated) {
        gone = reserve_ports(g, m, r->posted);
        due = gone + g->latency_s;
        b->due = fo__later(b->due, due);
    }
    memcpy(r->dst, m->src, m->nbytes);
    Mailbox* box = &((World*)g->state)->boxes[g->rank][m->to];
    pthread_mutex_lock(&box->mutex);
    r->due = due;
    r->done = 1;
    pthread_cond_broadcast(&box->changed);
    pthread_mutex_unlock(&box->mutex);
    return gone;
}

static void await_receive(FoGroup* g, FoRecv* r) {
    Mailbox* box = &((World*)g->state)->boxes[r->from][g->rank];
    double patience = fo__patience_s(g, g->running), left = patience;
    pthread_mutex_lock(&box->mutex);
    while (!r->done) {
        int in_time = cond_wait(&box->changed, &box->mutex, &left);
        fo_require(in_time || r->done, "waited %.1f s for %zu bytes from rank %d", patience, r->nbytes,
                   g->world_ranks[r->from]);
    }
    pthread_mutex_unlock(&box->mutex);
    g->running->due = fo__later(g->running->due, r->due);
}

static void local_exchange(FoGroup* g) {
    FoBatch* b = g->running;
    for (int i = 0; i < b->nrecvs; i++) {
        post_receive(g, &b->recvs[i]);
    }
    for (int i = 0; i < b->nsends; i++) {
        double gone = send_message(g, &b->sends[i]);
        // real order follows virtual order: without this, a rank with many sends would take all its peers'
        // ports at once, ahead of messages that start earlier than its second
        if (g->emulated && i + 1 < b->nsends) { fo__sleep_until(gone); }
    }
    for (int i = 0; i < b->nrecvs; i++) {
        await_receive(g, &b->recvs[i]);
    }
}

static _Noreturn void die_of_absence(const FoGroup* g, unsigned here) {
    char missing[8 * FO_MAX_RANKS] = "";
    for (int r = 0, n = 0; r < g->size; r++) {
        if (!(here >> r & 1u)) {
            n += snprintf(missing + n, sizeof missing - (size_t)n, " %d", g->world_ranks[r]);
        }
    }
    fo_die(__FILE__, __LINE__, "fo_group_barrier", "waited %.1f s at a barrier for rank%s", g->patience_s,
           missing);
}

static void local_barrier(FoGroup* g) {
    World* w = g->state;
    double left = g->patience_s;
    pthread_mutex_lock(&w->barrier_mutex);
    uint64_t round = w->barrier_round;
    w->barrier_here |= 1u << g->rank;
    if (w->barrier_here == (1u << w->P) - 1u) {
        w->barrier_here = 0;
        w->barrier_round++;
        pthread_cond_broadcast(&w->barrier_cond);
    }
    while (w->barrier_round == round) {
        int in_time = cond_wait(&w->barrier_cond, &w->barrier_mutex, &left);
        if (!in_time && w->barrier_round == round) { die_of_absence(g, w->barrier_here); }
    }
    pthread_mutex_unlock(&w->barrier_mutex);
}

// the first of each color opens its world
static void local_split(FoGroup* g, int color, FoGroup* part) {
    World* w = g->state;
    FoGroup* parts[FO_MAX_RANKS];
    int n = 0;
    w->split[g->rank].color = color;
    w->split[g->rank].part = part;
    local_barrier(g);
    for (int r = 0; r < g->size; r++) {
        if (w->split[r].color == color) {
            part->world_ranks[n] = g->world_ranks[r];
            parts[n++] = w->split[r].part;
        }
    }
    if (parts[0] == part) { fo__local_open(parts, n); }
    local_barrier(g);
}

static void local_close(FoGroup* g) {
    World* w = g->state;
    if (atomic_fetch_sub(&w->nopen, 1) > 1) { return; }
    for (int i = 0; i < w->P * w->P; i++) {
        Mailbox* box = &w->boxes[i / w->P][i % w->P];
        pthread_mutex_destroy(&box->mutex);
        pthread_cond_destroy(&box->changed);
    }
    pthread_mutex_destroy(&w->barrier_mutex);
    pthread_cond_destroy(&w->barrier_cond);
    pthread_mutex_destroy(&w->ports_mutex);
    free(w);
}

static const FoTransport LOCAL = {"local", local_exchange, local_barrier, local_split, local_close};

void fo__local_open(FoGroup* groups[], int P) {
    World* w = calloc(1, sizeof *w);
    fo_require(w != NULL, "out of memory");
    w->P = P;
    atomic_init(&w->nopen, P);
    pthread_mutex_init(&w->barrier_mutex, NULL);
    cond_init(&w->barrier_cond);
    pthread_mutex_init(&w->ports_mutex, NULL);
    for (int i = 0; i < P * P; i++) {
        Mailbox* box = &w->boxes[i / P][i % P];
        pthread_mutex_init(&box->mutex, NULL);
        cond_init(&box->changed);
    }
    for (int r = 0; r < P; r++) {
        groups[r]->rank = r;
        groups[r]->size = groups[r]->nlocal = P;
        groups[r]->transport = &LOCAL;
        groups[r]->state = w;
    }
}
