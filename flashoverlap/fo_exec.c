/* fo_exec.c -- the executor of every mode and topology: a plan's two lists, queued on two streams.
 *
 * Events live in FoOverlap, nothing is allocated in a call. Each wait names the two things that it orders:
 * // earlier | later. What a chunk's computation is, the primitives say: fo_overlap.c and its neighbours.
 */
#include "flashoverlap/fo_exec.h"

void fo__require_kind(const FoOverlap* o, FoKind kind) {
    fo_require(o->plan.kind == kind, "%s: a plan of the wrong kind", o->name);
}

void fo__require_direct(const FoOverlap* o, FoKind kind, int whole) {
    fo__require_kind(o, kind);
    fo_require(o->plan.topology == FO_DIRECT && (!whole || o->plan.m == 1), "%s: wants a direct plan%s",
               o->name, whole ? " with m=1" : "");
}

void fo__equal_pieces(FoPiece pieces[FO_MAX_RANKS], void* base, int P, size_t n, size_t row_nbytes) {
    for (int p = 0; p < P; p++) {
        size_t first = (size_t)p * n;
        FoPiece piece = {(char*)base + first * row_nbytes, row_nbytes, n, first};
        pieces[p] = piece;
    }
}

void fo__cut_pieces(FoPiece pieces[FO_MAX_RANKS], void* base, int P, size_t N, size_t row_nbytes) {
    for (int p = 0; p < P; p++) {
        size_t first = fo_cut(N, P, p);
        FoPiece piece = {(char*)base + first * row_nbytes, row_nbytes, fo_cut_n(N, P, p), first};
        pieces[p] = piece;
    }
}

// sub-chunk s of a piece
typedef struct {
    char* at;
    size_t row0, n, nbytes;
} Chunk;

static Chunk chunk_of(const FoPiece* p, int m, int s) {
    size_t row = fo_cut(p->n, m, s), n = fo_cut_n(p->n, m, s);
    Chunk c = {p->base + row * p->row_nbytes, p->first + row, n, n * p->row_nbytes};
    return c;
}

// partial sums of the own rows have a slot for each that sends them; a ring's for each hop
static int received_slot(const FoPlan* plan, int chunk, int from) {
    return plan->topology == FO_DIRECT ? from : (2 * plan->P + plan->r - 2 - chunk / plan->m) % plan->P;
}

// first half of every primitive: what the communication reads is written, what it overwrites has been read
static void start(FoOverlap* o) {
    if (!o->marked) { fo_event_record(o->ready, o->compute); }
    o->marked = 0;
    fo_stream_wait(o->comm, o->ready, NULL); // own rows written, buffers read to their end | first exchange
}

// exchange e of the plan, with these bytes
static void queue_message(FoOverlap* o, int e, const void* send, size_t nsend, void* recv, size_t nrecv) {
    const FoExchange* x = &o->plan.exchanges[e];
    const char* before = fo_stream_label(o->comm, o->name);
    fo_comm_begin(o->group, o->comm);
    fo_comm_name(o->group, o->name);
    fo_send(o->group, send, nsend, x->send_to);
    fo_recv(o->group, recv, nrecv, x->recv_from);
    fo_comm_end(o->group);
    fo_stream_label(o->comm, before);
    fo_event_record(o->arrived[e], o->comm);
    // a rank's time in this step is that of its longer direction
    o->comm_ms += 1e3 * fo_group_message_s(o->group, nsend > nrecv ? nsend : nrecv);
    o->nbytes_sent += nsend;
    o->nmessages += nsend > 0;
}

// exchange e with its chunks; computed: the computes are queued too, and it waits for those it depends on
static void queue_exchange(FoOverlap* o, int e, const FoPieces* io, int computed) {
    const FoPlan* plan = &o->plan;
    const FoExchange* x = &plan->exchanges[e];
    int m = plan->m, k = x->after_computes - 1;
    // without computes only a ring's adds have something to wait for
    if (k >= 0 && (computed || plan->computes[k].add)) {
        fo_stream_wait(o->comm, o->computed[k], NULL); // the chunk is computed | it leaves
    }
    int slot = plan->kind == FO_ALLGATHER ? x->recv / m : received_slot(plan, x->recv, x->recv_from);
    Chunk send = chunk_of(&io->send[x->send / m], m, x->send % m);
    Chunk recv = chunk_of(&io->recv[slot], m, x->recv % m);
    queue_message(o, e, send.at, send.nbytes, recv.at, recv.nbytes);
}

void fo__wait(FoOverlap* o, int n) {
    const char* before = fo_stream_label(o->compute, o->name);
    // the chunk is here, or all sends have left their buffers | it is computed on, or they are written again
    if (n > 0) { fo_stream_wait(o->compute, o->arrived[n - 1], &o->exposed_ms); }
    fo_stream_label(o->compute, before);
}

void fo__compute(FoOverlap* o, const FoPieces* io, int k, FoPieceFn fn, void* ctx) {
    const FoPlan* plan = &o->plan;
    const FoCompute* c = &plan->computes[k];
    int m = plan->m;
    Chunk own = chunk_of(&io->send[c->chunk / m], m, c->chunk % m);
    fo__wait(o, c->after_exchanges);
    // computing may be an operation of another name; one without peers leaves its work to the one around it
    const char* before = fo_stream_label(o->compute, o->name);
    if (before && plan->P == 1) { fo_stream_label(o->compute, before); }
    if (c->add) {
        Chunk part = chunk_of(&io->recv[received_slot(plan, c->chunk, -1)], m, c->chunk % m);
        fo_add(own.at, part.at, own.n * io->row_nelem, io->wire, o->compute);
    } else if (fn && own.n > 0) {
        fn(ctx, c->chunk / m, own.row0, own.n, o->compute);
    }
    fo_stream_label(o->compute, before);
    if (plan->kind == FO_REDUCESCATTER) { fo_event_record(o->computed[k], o->compute); }
}

void fo__run(FoOverlap* o, const FoPieces* io, FoPieceFn fn, void* ctx) {
    const FoPlan* plan = &o->plan;
    int e = 0;
    start(o);
    for (int k = 0; k <= plan->ncomputes; k++) {
        for (; e < plan->nexchanges && plan->exchanges[e].after_computes <= k; e++) {
            queue_exchange(o, e, io, fn != NULL);
        }
        if (k < plan->ncomputes) { fo__compute(o, io, k, fn, ctx); }
    }
    if (plan->kind == FO_REDUCESCATTER && plan->mode == FO_NONE) { fo__wait(o, plan->nexchanges); }
    // a gather needs no wait for its sends: the last compute waits for the last exchange, and that one's send
    // is part of it
}

void fo__begin(FoOverlap* o, const FoPieces* io) {
    start(o);
    for (int e = 0; e < o->plan.nexchanges; e++) {
        queue_exchange(o, e, io, 0);
    }
    if (o->plan.mode == FO_NONE) { fo__wait(o, o->plan.nexchanges); }
}

void fo__begin_groups(FoOverlap* o, const void* send, const size_t send_first[], void* recv,
                      const size_t recv_first[], size_t row_nbytes) {
    const FoPlan* plan = &o->plan;
    o->marked = 0; // a mark made before this call can't speak for the rows packed just now
    start(o);
    for (int e = 0; e < plan->nexchanges; e++) {
        const size_t *to = &send_first[plan->exchanges[e].send_to],
                     *from = &recv_first[plan->exchanges[e].recv_from];
        queue_message(o, e, (const char*)send + to[0] * row_nbytes, (to[1] - to[0]) * row_nbytes,
                      (char*)recv + from[0] * row_nbytes, (from[1] - from[0]) * row_nbytes);
    }
    if (plan->mode == FO_NONE) { fo__wait(o, plan->nexchanges); }
}
