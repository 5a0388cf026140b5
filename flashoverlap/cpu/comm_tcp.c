/* comm_tcp.c -- the transport between ranks that are processes without MPI: each message over the connection
 * of its pair and direction (fo_sockets.h).
 *
 * A message is a frame (its size, its start on an emulated link) and a payload; when the receiver has all of
 * it, it answers with the start that it decided on, for it alone knows both ends. Until then the sender sends
 * nothing else in this exchange: were several in flight they would share the link, and the first, which a
 * schedule needs first, would arrive about as late as the last. Answers come on the connection on which the
 * message went, so that they never wait behind one that nobody receives yet.
 *
 * An exchange waits in poll for all its connections at once; sends and receives of both directions move by
 * turns, so messages of any size cross.
 */
#include "flashoverlap/cpu/comm.h"
#include "flashoverlap/fo_sockets.h"
#include <poll.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    double egress_free, ingress_free; // emulated link: virtual times from which this rank's ports are free
} State;

// a receive under way
typedef struct {
    FoFrame frame;
    size_t nread; // of frame and payload
    double start; // what the sender is told
} Incoming;

// an exchange under way
typedef struct {
    FoGroup* g;
    FoBatch* b;
    State* state;
    Incoming in[FO_MAX_RANKS];
    int nreceived;
    int nsent; // messages sent and answered
    // of sends[nsent]
    FoFrame frame;
    size_t nwritten; // of frame and payload
    double start;    // its receiver's answer
    size_t nanswered;
    int under_way;
} Progress;

// ---- receiving --------------------------------------------------------------------------------------------
static int received(const Progress* x, int i) {
    return x->in[i].nread == sizeof(FoFrame) + x->b->recvs[i].nbytes;
}

static void frame_received(Progress* x, int i) {
    const FoRecv* r = &x->b->recvs[i];
    Incoming* in = &x->in[i];
    const int from = x->g->world_ranks[r->from], to = x->g->world_ranks[x->g->rank];
    fo_require(in->frame.kind == FO_FRAME_MESSAGE, "rank %d is at a barrier, where rank %d expects %zu bytes",
               from, to, r->nbytes);
    fo_require(in->frame.nbytes == r->nbytes, "rank %d sends %zu bytes to rank %d, which expects %zu", from,
               (size_t)in->frame.nbytes, to, r->nbytes);
    if (!x->g->emulated) { return; }
    in->start = fo__later(fo__later(in->frame.start, x->b->posted), x->state->ingress_free);
    x->state->ingress_free = in->start + fo__wire_s(x->g, r->nbytes);
    x->b->due = fo__later(x->b->due, x->state->ingress_free + x->g->latency_s);
}

// bytes taken in
static size_t receive(Progress* x, int i) {
    FoRecv* r = &x->b->recvs[i];
    Incoming* in = &x->in[i];
    const int fd = x->g->sockets->in[r->from];
    size_t k = 0, n = 0;
    if (in->nread < sizeof in->frame) {
        k = fo__sockets_recv(x->g, fd, r->from, (char*)&in->frame + in->nread, sizeof in->frame - in->nread);
        in->nread += k;
        if (in->nread < sizeof in->frame) { return k; }
        frame_received(x, i);
    }
    const size_t offset = in->nread - sizeof in->frame;
    n = fo__sockets_recv(x->g, fd, r->from, (char*)r->dst + offset, r->nbytes - offset);
    in->nread += n;
    if (received(x, i)) {
        // there is room for it: its reader has had all answers before
        n += fo__sockets_send(x->g, fd, r->from, &in->start, sizeof in->start);
        x->nreceived++;
    }
    return k + n;
}

// those of a peer come in the order of its sends; is there an earlier one under way?
static int follows(const Progress* x, int i) {
    for (int j = 0; j < i; j++) {
        if (x->b->recvs[j].from == x->b->recvs[i].from && !received(x, j)) { return 1; }
    }
    return 0;
}

// ---- sending ----------------------------------------------------------------------------------------------
static void send_begin(Progress* x) {
    const FoSend* m = &x->b->sends[x->nsent];
    x->frame = (FoFrame){FO_FRAME_MESSAGE, 0, m->nbytes, fo__later(x->b->posted, x->state->egress_free)};
    x->nwritten = x->nanswered = 0;
    x->under_way = 1;
}

static void send_done(Progress* x) {
    if (x->g->emulated) {
        x->state->egress_free = x->start + fo__wire_s(x->g, x->b->sends[x->nsent].nbytes);
        x->b->due = fo__later(x->b->due, x->state->egress_free + x->g->latency_s);
    }
    x->under_way = 0;
    x->nsent++;
}

// bytes written and answered
static size_t send_on(Progress* x) {
    const FoSend* m = &x->b->sends[x->nsent];
    const int fd = x->g->sockets->out[m->to];
    size_t n = 0, k;
    if (x->nwritten < sizeof x->frame) {
        n = fo__sockets_send(x->g, fd, m->to, (char*)&x->frame + x->nwritten, sizeof x->frame - x->nwritten);
        x->nwritten += n;
        if (x->nwritten < sizeof x->frame) { return n; }
    }
    const size_t offset = x->nwritten - sizeof x->frame;
    if (offset < m->nbytes) {
        k = fo__sockets_send(x->g, fd, m->to, (const char*)m->src + offset, m->nbytes - offset);
        x->nwritten += k;
        return n + k;
    }
    k = fo__sockets_recv(x->g, fd, m->to, (char*)&x->start + x->nanswered, sizeof x->start - x->nanswered);
    x->nanswered += k;
    if (x->nanswered == sizeof x->start) { send_done(x); }
    return n + k;
}

// ---- progress ---------------------------------------------------------------------------------------------
static _Noreturn void die_of_silence(const Progress* x, double patience) {
    unsigned recvs = 0;
    for (int i = 0; i < x->b->nrecvs; i++) {
        recvs |= (unsigned)!received(x, i) << i;
    }
    fo__die_waiting(x->b, patience, x->nsent < x->b->nsends ? 1u << x->nsent : 0, recvs);
}

// what to wait for; *s_most: seconds, at most
static nfds_t awaited(const Progress* x, struct pollfd* polls, double* s_most) {
    const struct FoSockets* s = x->g->sockets;
    nfds_t n = 0;
    *s_most = 0.05;
    for (int i = 0; i < x->b->nrecvs; i++) {
        if (!received(x, i) && !follows(x, i)) {
            polls[n++] = (struct pollfd){s->in[x->b->recvs[i].from], POLLIN, 0};
        }
    }
    if (x->under_way) {
        const FoSend* m = &x->b->sends[x->nsent];
        const short events = x->nwritten < sizeof x->frame + m->nbytes ? POLLOUT : POLLIN;
        polls[n++] = (struct pollfd){s->out[m->to], events, 0};
    } else if (x->nsent < x->b->nsends) { // the port is taken
        const double left = x->state->egress_free - fo_now();
        *s_most = left < 0.0 ? 0.0 : left < 0.05 ? left : 0.05;
    }
    return n;
}

// moves what can be moved now; returns how many bytes that was
static size_t progress(Progress* x) {
    size_t n = 0;
    // the next leaves when the port is free, in real time too: see local_exchange
    if (!x->under_way && x->nsent < x->b->nsends &&
        (x->nsent == 0 || !x->g->emulated || fo_now() >= x->state->egress_free)) {
        send_begin(x);
    }
    if (x->under_way) { n += send_on(x); }
    for (int i = 0; i < x->b->nrecvs; i++) {
        if (!received(x, i) && !follows(x, i)) { n += receive(x, i); }
    }
    return n;
}

static void tcp_exchange(FoBatch* b) {
    Progress x = {.g = b->group, .b = b, .state = b->group->state};
    struct pollfd polls[FO_MAX_RANKS + 1];
    double patience = fo__patience_s(b), quiet_s = 0.0, before = fo_now();
    while (x.nsent < b->nsends || x.nreceived < b->nrecvs) {
        if (progress(&x) > 0) {
            quiet_s = 0.0;
            before = fo_now();
            continue;
        }
        double now = fo_now();
        quiet_s += fo__waited_s(now - before);
        before = now;
        if (quiet_s > patience) { die_of_silence(&x, patience); }
        double s_most;
        nfds_t n = awaited(&x, polls, &s_most);
        struct timespec t = {0, (long)(1e9 * s_most)};
        (void)ppoll(polls, n, &t, NULL);
    }
}

// ---- groups -----------------------------------------------------------------------------------------------
static void* state_new(void) {
    State* state = calloc(1, sizeof *state);
    fo_require(state != NULL, "out of memory");
    return state;
}

static void tcp_split(FoGroup* g, int color, FoGroup* part) {
    g->hosts->split(g, color, part);
    part->transport = g->transport;
    part->state = state_new();
}

static void tcp_close(FoGroup* g) {
    free(g->state);
    g->hosts->close(g);
}

static const FoTransport TCP = {"tcp", tcp_exchange, fo__hosts_barrier, tcp_split, tcp_close};

void fo__tcp_transport_open(FoGroup* g, const FoLaunch* l) {
    fo__sockets_open(g, l);
    g->state = state_new();
    g->transport = &TCP;
}
