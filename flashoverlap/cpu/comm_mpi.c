/* comm_mpi.c -- the transport between ranks that are processes: MPI point-to-point, polled. Built only with
 * MPI=1.
 *
 * A message is a header (its size, its start on an emulated link) and a payload. Sends go out one at a time
 * and synchronously: were several in flight they would share the link, and the first, which a schedule needs
 * first, would arrive about as late as the last (measured: slicing's gain fell from 35 to 12 %).
 *
 * The first send begins, then all receives are posted at once, of headers and of payloads (where one has
 * several pieces: a payload's behind its header). MPI asks for a large message's bulk when its receive is
 * posted. Were that asked later than a peer asks for ours, it would wait in the socket behind our bulk, and
 * two hosts that send to each other would take turns (measured, 1 MiB each way on a link of 0.4 Gbit/s: 31
 * ms, now 22).
 *
 * Exchanges of different groups, each on its stream's thread, and the host's barriers run at the same time.
 * One thread at a time calls MPI (MPI_THREAD_SERIALIZED): under a lock that all groups of the process share.
 * Whoever holds it neither sleeps nor waits for a peer that has yet to come. Nobody spins for long: cores are
 * there to compute.
 */
#include "flashoverlap/cpu/comm.h"
#include "flashoverlap/fo_mpi.h"
#include <stdlib.h>

enum { TAG_HEADER, TAG_PAYLOAD, TAG_START };
enum { HEADER, PAYLOAD, START, EACH }; // the requests of a message, on both sides
enum { REQUESTS = EACH * (FO_MAX_RANKS + 1) };

size_t fo__mpi_piece = 1 << 30; // MPI counts are int

typedef struct {
    uint64_t nbytes;
    double start; // emulated link: no sooner than this, as far as the sender knows
} Header;

typedef struct {
    double egress_free, ingress_free; // emulated link: virtual times from which this rank's ports are free
} State;

// a receive under way
typedef struct {
    Header header;
    double start; // what the sender is told
    size_t offset;
} Incoming;

// an exchange under way
typedef struct {
    FoGroup* g;
    FoBatch* b;
    State* state;
    struct FoMpi* mpi;
    Incoming in[FO_MAX_RANKS];
    int nsent;    // messages sent
    int nawaited; // of header, payload, start: what sends[nsent] still waits for; 0: it is not yet on its way
    Header header;
    double start; // of the message on its way, told by its receiver
    size_t offset;
    int ended;                      // all is sent and received
    MPI_Request requests[REQUESTS]; // EACH of every receive; then the send's
} Progress;

static MPI_Request* requests_of_receive(Progress* x, int i) {
    return x->requests + (size_t)EACH * i;
}

static MPI_Request* requests_of_send(Progress* x) {
    return x->requests + (size_t)EACH * x->b->nrecvs;
}

static int piece_of(size_t nbytes, size_t offset) {
    return (int)(nbytes - offset < fo__mpi_piece ? nbytes - offset : fo__mpi_piece);
}

// ---- receiving --------------------------------------------------------------------------------------------
static void receive_header(Progress* x, int i) {
    mpi_check(MPI_Irecv(&x->in[i].header, sizeof(Header), MPI_BYTE, x->b->recvs[i].from, TAG_HEADER,
                        x->mpi->comm, &requests_of_receive(x, i)[HEADER]));
}

static void receive_piece(Progress* x, int i) {
    FoRecv* r = &x->b->recvs[i];
    Incoming* in = &x->in[i];
    mpi_check(MPI_Irecv((char*)r->dst + in->offset, piece_of(r->nbytes, in->offset), MPI_BYTE, r->from,
                        TAG_PAYLOAD, x->mpi->comm, &requests_of_receive(x, i)[PAYLOAD]));
}

// decides when the message starts, for it alone knows both ends, and tells the sender
static void start_message(Progress* x, int i) {
    FoRecv* r = &x->b->recvs[i];
    Incoming* in = &x->in[i];
    in->start = fo__later(fo__later(in->header.start, x->b->posted), x->state->ingress_free);
    x->state->ingress_free = in->start + fo__wire_s(x->g, r->nbytes);
    x->b->due = fo__later(x->b->due, x->state->ingress_free + x->g->latency_s);
    mpi_check(MPI_Isend(&in->start, sizeof in->start, MPI_BYTE, r->from, TAG_START, x->mpi->comm,
                        &requests_of_receive(x, i)[START]));
}

static void require_size(const Progress* x, int i) {
    const FoRecv* r = &x->b->recvs[i];
    const int* world_ranks = x->g->world_ranks;
    const size_t nbytes = x->in[i].header.nbytes;
    fo_require(nbytes == r->nbytes, "rank %d sends %zu bytes to rank %d, which expects %zu",
               world_ranks[r->from], nbytes, world_ranks[x->g->rank], r->nbytes);
}

// A message of several pieces, and another of the same peer: a piece must not be received as what follows it.
// One such message makes all payloads of the exchange wait for their headers, which costs but speed.
static int is_posted_early(const FoBatch* b) {
    for (int i = 0; i < b->nrecvs; i++) {
        if (b->recvs[i].nbytes > fo__mpi_piece) { return 0; }
    }
    return 1;
}

static void receive_done(Progress* x, int i, int which) {
    FoRecv* r = &x->b->recvs[i];
    Incoming* in = &x->in[i];
    if (which == HEADER) {
        require_size(x, i);
        if (x->g->emulated) { start_message(x, i); }
        if (!is_posted_early(x->b)) { receive_piece(x, i); }
    } else if (which == PAYLOAD) {
        in->offset += (size_t)piece_of(r->nbytes, in->offset);
        if (in->offset < r->nbytes) { receive_piece(x, i); }
    }
}

// ---- sending ----------------------------------------------------------------------------------------------
static void send_piece(Progress* x) {
    const FoSend* m = &x->b->sends[x->nsent];
    mpi_check(MPI_Issend((const char*)m->src + x->offset, piece_of(m->nbytes, x->offset), MPI_BYTE, m->to,
                         TAG_PAYLOAD, x->mpi->comm, &requests_of_send(x)[PAYLOAD]));
}

static void send_begin(Progress* x) {
    const FoSend* m = &x->b->sends[x->nsent];
    MPI_Request* req = requests_of_send(x);
    x->nawaited = x->g->emulated ? 3 : 2;
    x->offset = 0;
    x->header = (Header){m->nbytes, fo__later(x->b->posted, x->state->egress_free)};
    mpi_check(
        MPI_Isend(&x->header, sizeof x->header, MPI_BYTE, m->to, TAG_HEADER, x->mpi->comm, &req[HEADER]));
    send_piece(x);
    if (x->g->emulated) {
        mpi_check(
            MPI_Irecv(&x->start, sizeof x->start, MPI_BYTE, m->to, TAG_START, x->mpi->comm, &req[START]));
    }
}

// Request `which` of the send is done. Several may be at once: what is left is counted, not read off them.
static void send_done(Progress* x, int which) {
    const FoSend* m = &x->b->sends[x->nsent];
    if (which == PAYLOAD) {
        x->offset += (size_t)piece_of(m->nbytes, x->offset);
        if (x->offset < m->nbytes) {
            send_piece(x);
            return;
        }
    }
    if (--x->nawaited > 0) { return; }
    if (x->g->emulated) {
        x->state->egress_free = x->start + fo__wire_s(x->g, m->nbytes);
        x->b->due = fo__later(x->b->due, x->state->egress_free + x->g->latency_s);
    }
    x->nsent++;
}

// ---- progress ---------------------------------------------------------------------------------------------
static _Noreturn void die_of_silence(const Progress* x, double patience) {
    unsigned recvs = 0;
    for (int i = 0; i < x->b->nrecvs; i++) {
        int received = x->in[i].offset == x->b->recvs[i].nbytes;
        recvs |= (unsigned)!received << i;
    }
    fo__die_waiting(x->b, patience, x->nsent < x->b->nsends ? 1u << x->nsent : 0, recvs);
}

// starts what can start and takes in what is done; returns how many things that was
static int progress(Progress* x, double now) {
    int done[REQUESTS], ndone = 0, nbegun = 0;
    pthread_mutex_lock(x->mpi->lock);
    // the next leaves when the port is free, in real time too: see local_exchange
    if (x->nawaited == 0 && x->nsent < x->b->nsends && (!x->g->emulated || now >= x->state->egress_free)) {
        send_begin(x);
        nbegun = 1;
    }
    const int err = MPI_Testsome(EACH * (x->b->nrecvs + 1), x->requests, &ndone, done, MPI_STATUSES_IGNORE);
    // a payload too long: its header, which came before, says it better
    for (int i = 0; err != MPI_SUCCESS && i < ndone; i++) {
        if (done[i] % EACH == HEADER && done[i] / EACH < x->b->nrecvs) { require_size(x, done[i] / EACH); }
    }
    fo__mpi_check(err, __FILE__, __LINE__, __func__, "MPI_Testsome");
    if (ndone == MPI_UNDEFINED) { // nothing is under way: all is done, or the port is taken
        x->ended = x->nsent == x->b->nsends;
        ndone = 0;
    }
    for (int i = 0; i < ndone; i++) {
        if (done[i] / EACH == x->b->nrecvs) {
            send_done(x, done[i] % EACH);
        } else {
            receive_done(x, done[i] / EACH, done[i] % EACH);
        }
    }
    pthread_mutex_unlock(x->mpi->lock);
    return nbegun + ndone;
}

static void mpi_exchange(FoBatch* b) {
    Progress x = {.g = b->group, .b = b, .state = b->group->state, .mpi = b->group->mpi};
    for (int i = 0; i < REQUESTS; i++) {
        x.requests[i] = MPI_REQUEST_NULL;
    }
    const int early = is_posted_early(b);
    pthread_mutex_lock(x.mpi->lock);
    if (b->nsends > 0) { send_begin(&x); }
    for (int i = 0; i < b->nrecvs; i++) {
        receive_header(&x, i);
        if (early) { receive_piece(&x, i); }
    }
    pthread_mutex_unlock(x.mpi->lock);
    double patience = fo__patience_s(b), quiet_s = 0.0, before = fo_now();
    for (;;) {
        double now = fo_now();
        quiet_s += fo__waited_s(now - before);
        before = now;
        if (progress(&x, now) > 0) { quiet_s = 0.0; }
        if (x.ended) { break; }
        if (quiet_s > patience) { die_of_silence(&x, patience); }
        fo__rest(quiet_s);
    }
}

// ---- groups -----------------------------------------------------------------------------------------------
static void* state_new(void) {
    State* state = calloc(1, sizeof *state);
    fo_require(state != NULL, "out of memory");
    return state;
}

static void mpi_split(FoGroup* g, int color, FoGroup* part) {
    g->hosts->split(g, color, part);
    part->transport = g->transport;
    part->state = state_new();
}

static void mpi_close(FoGroup* g) {
    free(g->state);
    g->hosts->close(g);
}

static const FoTransport MPI = {"mpi", mpi_exchange, fo__hosts_barrier, mpi_split, mpi_close};

void fo__mpi_transport_open(FoGroup* g) {
    // Over TCP Open MPI asks for large messages by another, which waits on the socket behind what this rank
    // sends: two hosts that send to each other took turns, 0.50 Gbit/s each way of a link of 1. Plain
    // sends: 0.95
    setenv("OMPI_MCA_btl_tcp_flags", "send", 0);
    fo__mpi_open(g);
    g->state = state_new();
    g->transport = &MPI;
}
