/* comm_local.cu -- the transport between ranks that are threads of one process: pushes by the copy engines,
 * which take no SM.
 *
 * The sender copies into the receiver's buffer, whose address the receiver posts in a mailbox of the pair;
 * the hosts of the two meet there, on every exchange. On the device two things are ordered: `ready`, the
 * receiver's stream has come to the exchange, so all that used the buffer before is done, and `done`, the
 * message has landed. They are events, recorded anew by each exchange; a host's wait for the peer's word that
 * it has recorded (ready), or queued its wait (done), is what lets them be used again.
 *
 * In a graph two ranks' captures can't wait for each other's events. There the same two things are 32-bit
 * words in device memory, set to 1 by one stream and awaited and cleared by the other: constants, so a graph
 * can be launched again and again.
 */
#include <sched.h>
#include <stdlib.h>
#include "flashoverlap/cuda/comm.h"

namespace {
// a message's address, from its receiver
struct Post {
    void* dst;
    size_t nbytes;
    cudaEvent_t ready; // NULL in a graph
    int ordinal;       // dst's device
    int done;          // the sender has queued it
};

const int NOT_YET = 0; // Post.done

// of a pair (from, to): what one exchange of the receiver posts, in order
struct Mailbox {
    pthread_mutex_t mutex; // of posts, nposted, ntaken (the last two are looked at without it as well)
    pthread_cond_t changed;
    int nposted, ntaken;
    Post posts[FO_MAX_RANKS];
    cudaEvent_t done[FO_MAX_RANKS]; // of the sender, recorded for the post of that number
    int sender_ordinal;
    int reaches_to, reaches_from; // Reach of the sender's device and of the receiver's, each of its own host
};

// words of a rank that peers write: [peer][number of the message in the receiver's exchange]
struct Flags {
    uint32_t ready[FO_MAX_RANKS][FO_MAX_RANKS]; // peer may be sent to
    uint32_t data[FO_MAX_RANKS][FO_MAX_RANKS];  // peer's message is here
};

// of a rank; made at its first exchange, when its device is known
struct Seat {
    int ordinal;
    cudaEvent_t ready;
    Flags* flags; // device memory
};

struct World {
    int P;
    Seat seats[FO_MAX_RANKS];
    Mailbox boxes[FO_MAX_RANKS][FO_MAX_RANKS]; // [from][to]
};

World* world_of(const FoBatch* b) {
    return (World*)b->group->state;
}

// ---- a rank's part ----------------------------------------------------------------------------------------
// The flags are cleared on the exchange's stream: a peer that has exchanged with this rank comes after that.
Seat* seat_of(const FoBatch* b) {
    FoDevice* d = b->stream->device;
    Seat* seat = &world_of(b)->seats[b->group->rank];
    if (!seat->flags) {
        fo_require(!d->capturing, "a rank's first exchange of a group can't be part of a graph");
        seat->ordinal = d->ordinal;
        CUDA(cudaEventCreateWithFlags(&seat->ready, cudaEventDisableTiming));
        seat->flags = (Flags*)fo__alloc(d, sizeof(Flags), "flags of a group of ranks");
        CUDA(cudaMemsetAsync(seat->flags, 0, sizeof(Flags), b->stream->stream));
    }
    fo_require(seat->ordinal == d->ordinal, "exchanges of a group on GPU %d and on GPU %d", seat->ordinal,
               d->ordinal);
    return seat;
}

// can this rank's device use the peer's memory? Where not, copies go through the host: slowly, but right
enum Reach { NOT_TRIED, REACHES, REACHES_NOT };

int reach(int ordinal, int peer) {
    int can = 0;
    if (ordinal == peer) { return REACHES; }
    CUDA(cudaDeviceCanAccessPeer(&can, ordinal, peer));
    if (!can) { return REACHES_NOT; }
    cudaError_t err = cudaDeviceEnablePeerAccess(peer, 0);
    if (err != cudaSuccess) { cudaGetLastError(); } // takes it back
    fo_require(err == cudaSuccess || err == cudaErrorPeerAccessAlreadyEnabled || err == cudaErrorTooManyPeers,
               "GPU %d to GPU %d: %s", ordinal, peer, cudaGetErrorString(err));
    return err == cudaErrorTooManyPeers ? REACHES_NOT : REACHES;
}

// a graph has this rank write a word in the peer's memory; one line for the user where it can't
void require_reach(const FoBatch* b, int peer, int reaches) {
    fo_require(reaches != NOT_TRIED, "rank %d's first message with rank %d can't be part of a graph",
               b->group->world_ranks[b->group->rank], b->group->world_ranks[peer]);
    if (reaches != REACHES) {
        fo_quit(1,
                "the GPUs of ranks %d and %d have no peer access, which a graph of ranks that are threads "
                "needs: --graph 0",
                b->group->world_ranks[b->group->rank], b->group->world_ranks[peer]);
    }
}

// ---- words in device memory -------------------------------------------------------------------------------
struct MemOps {
    unsigned n;
    CUstreamBatchMemOpParams ops[2 * FO_MAX_RANKS];
};

CUdeviceptr address(const uint32_t* p) {
    return (CUdeviceptr)(uintptr_t)p;
}

void add_write(MemOps* m, uint32_t* flag, uint32_t value) {
    CUstreamBatchMemOpParams* op = &m->ops[m->n++];
    memset(op, 0, sizeof *op);
    op->writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op->writeValue.address = address(flag);
    op->writeValue.value = value;
}

void add_take(MemOps* m, uint32_t* flag) { // waits for 1 and clears it
    CUstreamBatchMemOpParams* op = &m->ops[m->n++];
    memset(op, 0, sizeof *op);
    op->waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    op->waitValue.address = address(flag);
    op->waitValue.value = 1;
    op->waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    add_write(m, flag, 0);
}

void queue_mem_ops(const FoBatch* b, MemOps* m) {
    if (m->n > 0) { fo__mem_ops(b->stream, m->n, m->ops); }
    m->n = 0;
}

// ---- meeting ----------------------------------------------------------------------------------------------
int is_more(const int* n, const int* than) {
    return __atomic_load_n(n, __ATOMIC_RELAXED) > __atomic_load_n(than, __ATOMIC_RELAXED);
}

/* Waits until *n > *than, and returns with the mailbox's mutex; 0: in vain. Hosts run the same program and
 * come within microseconds of each other, so it looks for a while before it sleeps.
 */
int await(Mailbox* box, const int* n, const int* than, double patience) {
    for (double until = fo_now() + 20e-6; !is_more(n, than) && fo_now() < until;) {
        sched_yield();
    }
    pthread_mutex_lock(&box->mutex);
    while (!is_more(n, than)) {
        int in_time = fo__cond_wait(&box->changed, &box->mutex, &patience);
        if (!in_time && !is_more(n, than)) { return 0; }
    }
    return 1;
}

// which of the exchange's messages from the same rank receive i is
int number_of(const FoBatch* b, int i) {
    int n = 0;
    for (int j = 0; j < i; j++) {
        n += b->recvs[j].from == b->recvs[i].from;
    }
    return n;
}

void post_receives(const FoBatch* b, const Seat* seat) {
    World* w = world_of(b);
    FoDevice* d = b->stream->device;
    int me = b->group->rank;
    MemOps ready;
    ready.n = 0;
    if (b->nrecvs > 0 && !d->capturing) { CUDA(cudaEventRecord(seat->ready, b->stream->stream)); }
    for (int i = 0; i < b->nrecvs; i++) {
        const FoRecv* r = &b->recvs[i];
        Mailbox* box = &w->boxes[r->from][me];
        int n = number_of(b, i);
        if (d->capturing) {
            require_reach(b, r->from, box->reaches_from);
            add_write(&ready, &w->seats[r->from].flags->ready[me][n], 1);
        }
        pthread_mutex_lock(&box->mutex);
        box->posts[n].dst = r->dst;
        box->posts[n].nbytes = r->nbytes;
        box->posts[n].ready = d->capturing ? NULL : seat->ready;
        box->posts[n].ordinal = seat->ordinal;
        __atomic_store_n(&box->posts[n].done, NOT_YET, __ATOMIC_RELAXED);
        __atomic_store_n(&box->nposted, n + 1, __ATOMIC_RELAXED);
        pthread_cond_broadcast(&box->changed);
        pthread_mutex_unlock(&box->mutex);
    }
    queue_mem_ops(b, &ready);
}

// the post that the message goes to; *n: its number
Post take_post(const FoBatch* b, const FoSend* m, int* n) {
    Mailbox* box = &world_of(b)->boxes[b->group->rank][m->to];
    const int* world_ranks = b->group->world_ranks;
    if (!await(box, &box->nposted, &box->ntaken, b->patience_s)) {
        fo__die_waiting(b, b->patience_s, 1u << (m - b->sends), 0);
    }
    *n = box->ntaken;
    __atomic_store_n(&box->ntaken, *n + 1, __ATOMIC_RELAXED);
    Post post = box->posts[*n];
    pthread_mutex_unlock(&box->mutex);
    fo_require(post.nbytes == m->nbytes, "rank %d sends %zu bytes to rank %d, which expects %zu",
               world_ranks[b->group->rank], m->nbytes, world_ranks[m->to], post.nbytes);
    fo_require(!post.ready == !!b->stream->device->capturing,
               "of rank %d and rank %d one puts a message of %zu bytes into a graph, the other not",
               world_ranks[b->group->rank], world_ranks[m->to], m->nbytes);
    return post;
}

void copy(const FoBatch* b, const FoSend* m, const Post* post, const Seat* seat) {
    CUDA(cudaMemcpyPeerAsync(post->dst, post->ordinal, m->src, seat->ordinal, m->nbytes, b->stream->stream));
}

void send_message(const FoBatch* b, const FoSend* m, const Seat* seat) {
    World* w = world_of(b);
    int n, me = b->group->rank;
    Mailbox* box = &w->boxes[me][m->to];
    cudaStream_t stream = b->stream->stream;
    Post post = take_post(b, m, &n);
    if (!post.ready) {
        MemOps ops;
        ops.n = 0;
        require_reach(b, m->to, box->reaches_to);
        add_take(&ops, &seat->flags->ready[m->to][n]); // receiver's buffer is free | copy
        queue_mem_ops(b, &ops);
        copy(b, m, &post, seat);
        add_write(&ops, &w->seats[m->to].flags->data[me][n], 1);
        queue_mem_ops(b, &ops);
    } else {
        if (box->reaches_to == NOT_TRIED) { box->reaches_to = reach(seat->ordinal, post.ordinal); }
        if (!box->done[n]) { CUDA(cudaEventCreateWithFlags(&box->done[n], cudaEventDisableTiming)); }
        CUDA(cudaStreamWaitEvent(stream, post.ready, 0)); // receiver's buffer is free | copy
        copy(b, m, &post, seat);
        CUDA(cudaEventRecord(box->done[n], stream));
    }
    pthread_mutex_lock(&box->mutex);
    box->sender_ordinal = seat->ordinal;
    __atomic_store_n(&box->posts[n].done, 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&box->changed);
    pthread_mutex_unlock(&box->mutex);
}

void await_receives(const FoBatch* b, const Seat* seat) {
    World* w = world_of(b);
    int me = b->group->rank;
    MemOps landed;
    landed.n = 0;
    for (int i = 0; i < b->nrecvs; i++) {
        const FoRecv* r = &b->recvs[i];
        Mailbox* box = &w->boxes[r->from][me];
        int n = number_of(b, i);
        if (!await(box, &box->posts[n].done, &NOT_YET, b->patience_s)) {
            fo__die_waiting(b, b->patience_s, 0, 1u << i);
        }
        pthread_mutex_unlock(&box->mutex);
        if (b->stream->device->capturing) {
            add_take(&landed, &seat->flags->data[r->from][n]); // the message is here | what reads it
        } else {
            if (box->reaches_from == NOT_TRIED) {
                box->reaches_from = reach(seat->ordinal, box->sender_ordinal);
            }
            CUDA(cudaStreamWaitEvent(b->stream->stream, box->done[n], 0)); // likewise
        }
    }
    queue_mem_ops(b, &landed);
    // all posts are taken, and the waits for `done` queued: the next exchange begins with empty boxes
    for (int i = 0; i < b->nrecvs; i++) {
        Mailbox* box = &w->boxes[b->recvs[i].from][me];
        pthread_mutex_lock(&box->mutex);
        __atomic_store_n(&box->nposted, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&box->ntaken, 0, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&box->mutex);
    }
}

void local_exchange(FoBatch* b) {
    const Seat* seat = seat_of(b);
    post_receives(b, seat);
    for (int i = 0; i < b->nsends; i++) {
        send_message(b, &b->sends[i], seat);
    }
    await_receives(b, seat);
    free(b);
}

// ---- groups -----------------------------------------------------------------------------------------------
void local_close(FoGroup* g) {
    World* w = (World*)g->state;
    int P = g->size;
    if (!fo__threads_close(g)) { return; }
    for (int r = 0; r < P; r++) {
        if (w->seats[r].flags) {
            CUDA(cudaFree(w->seats[r].flags));
            CUDA(cudaEventDestroy(w->seats[r].ready));
        }
    }
    for (int i = 0; i < P * P; i++) {
        Mailbox* box = &w->boxes[i / P][i % P];
        for (int n = 0; n < FO_MAX_RANKS; n++) {
            if (box->done[n]) { CUDA(cudaEventDestroy(box->done[n])); }
        }
        pthread_mutex_destroy(&box->mutex);
        pthread_cond_destroy(&box->changed);
    }
    free(w);
}

const FoTransport LOCAL = {"local", local_exchange, fo__threads_barrier, fo__threads_split, local_close};
} // namespace

void fo__local_open(FoGroup* groups[], int P) {
    World* w = (World*)calloc(1, sizeof *w);
    fo_require(w != NULL, "out of memory");
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

void fo__exchange(FoBatch* b) {
    OpScope scope(b->stream, "fo_exchange");
    b->group->transport->exchange(b);
}
