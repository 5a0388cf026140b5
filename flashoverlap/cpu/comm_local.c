/* comm_local.c -- the transport between ranks that are threads of one process: mailboxes and memcpy.
 *
 * There is a mailbox for each pair (from, to). The receiver posts where it wants a message; the sender waits
 * for that, copies, and marks it done. Both run on the threads of their comm streams. The mailboxes' locks
 * are left visible to ThreadSanitizer, unlike those of streams: what they order is the message itself.
 */
#include "flashoverlap/cpu/comm.h"
#include <stdlib.h>

// receives that the receiver posted and the sender has not yet taken, in order
typedef struct {
    pthread_mutex_t mutex; // of the list, and of the receives that are or were in it
    pthread_cond_t changed;
    FoRecv *first, *last;
} Mailbox;

typedef struct {
    pthread_mutex_t ports_mutex; // emulated link: virtual times from which a rank's ports are free
    double egress_free[FO_MAX_RANKS], ingress_free[FO_MAX_RANKS];
    Mailbox boxes[FO_MAX_RANKS][FO_MAX_RANKS]; // [from][to]
} World;

static void post_receive(FoBatch* b, FoRecv* r) {
    FoGroup* g = b->group;
    Mailbox* box = &((World*)g->state)->boxes[r->from][g->rank];
    pthread_mutex_lock(&box->mutex);
    r->posted = b->posted;
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

static FoRecv* take_receive(const FoBatch* b, const FoSend* m) {
    FoGroup* g = b->group;
    Mailbox* box = &((World*)g->state)->boxes[g->rank][m->to];
    double patience = fo__patience_s(b), left = patience;
    pthread_mutex_lock(&box->mutex);
    while (!box->first) {
        int in_time = fo__cond_wait(&box->changed, &box->mutex, &left);
        if (!in_time && !box->first) { fo__die_waiting(b, patience, 1u << (m - b->sends), 0); }
    }
    FoRecv* r = box->first;
    box->first = r->next;
    pthread_mutex_unlock(&box->mutex);
    fo_require(r->nbytes == m->nbytes, "rank %d sends %zu bytes to rank %d, which expects %zu",
               g->world_ranks[g->rank], m->nbytes, g->world_ranks[m->to], r->nbytes);
    return r;
}

// the virtual time at which a message leaves the ports, which are taken until then
static double reserve_ports(const FoBatch* b, const FoSend* m, double receiver_posted) {
    FoGroup* g = b->group;
    World* w = g->state;
    pthread_mutex_lock(&w->ports_mutex);
    double start = fo__later(b->posted, receiver_posted);
    start = fo__later(start, fo__later(w->egress_free[g->rank], w->ingress_free[m->to]));
    double gone = start + fo__wire_s(g, m->nbytes);
    w->egress_free[g->rank] = w->ingress_free[m->to] = gone;
    pthread_mutex_unlock(&w->ports_mutex);
    return gone;
}

// returns the virtual time from which the next message may leave, 0 without an emulated link
static double send_message(FoBatch* b, const FoSend* m) {
    FoGroup* g = b->group;
    FoRecv* r = take_receive(b, m);
    double gone = 0.0, due = 0.0;
    if (g->emulated) {
        gone = reserve_ports(b, m, r->posted);
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

static void await_receive(FoBatch* b, FoRecv* r) {
    FoGroup* g = b->group;
    Mailbox* box = &((World*)g->state)->boxes[r->from][g->rank];
    double patience = fo__patience_s(b), left = patience;
    pthread_mutex_lock(&box->mutex);
    while (!r->done) {
        int in_time = fo__cond_wait(&box->changed, &box->mutex, &left);
        if (!in_time && !r->done) { fo__die_waiting(b, patience, 0, 1u << (r - b->recvs)); }
    }
    pthread_mutex_unlock(&box->mutex);
    b->due = fo__later(b->due, r->due);
}

static void local_exchange(FoBatch* b) {
    for (int i = 0; i < b->nrecvs; i++) {
        post_receive(b, &b->recvs[i]);
    }
    for (int i = 0; i < b->nsends; i++) {
        double gone = send_message(b, &b->sends[i]);
        // real order follows virtual order: without this, a rank with many sends would take all its peers'
        // ports at once, ahead of messages that start earlier than its second
        if (b->group->emulated && i + 1 < b->nsends) { fo__sleep_until(gone); }
    }
    for (int i = 0; i < b->nrecvs; i++) {
        await_receive(b, &b->recvs[i]);
    }
}

static void local_close(FoGroup* g) {
    World* w = g->state;
    int P = g->size;
    if (!fo__threads_close(g)) { return; }
    for (int i = 0; i < P * P; i++) {
        Mailbox* box = &w->boxes[i / P][i % P];
        pthread_mutex_destroy(&box->mutex);
        pthread_cond_destroy(&box->changed);
    }
    pthread_mutex_destroy(&w->ports_mutex);
    free(w);
}

static const FoTransport LOCAL = {"local", local_exchange, fo__threads_barrier, fo__threads_split,
                                  local_close};

void fo__local_open(FoGroup* groups[], int P) {
    World* w = calloc(1, sizeof *w);
    fo_require(w != NULL, "out of memory");
    pthread_mutex_init(&w->ports_mutex, NULL);
    for (int i = 0; i < P * P; i++) {
        Mailbox* box = &w->boxes[i / P][i % P];
        pthread_mutex_init(&box->mutex, NULL);
        fo__cond_init(&box->changed);
    }
    fo__threads_open(groups, P);
    for (int r = 0; r < P; r++) {
        groups[r]->transport = &LOCAL;
        groups[r]->state = w;
    }
}
