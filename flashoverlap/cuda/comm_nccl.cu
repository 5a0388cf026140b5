/* comm_nccl.cu -- the transport between ranks that are processes: NCCL's sends and receives. MPI (fo_mpi.c)
 * or sockets (fo_sockets.c) bring the processes together and carry no data.
 *
 * Each group has a communicator of its own, so that exchanges of different groups run at the same time. An
 * exchange is one group of calls on its stream. NCCL never gives up on a peer, so a thread of the process,
 * the watchdog, looks after what is under way: an exchange counts from its start on the device (an event
 * before it), until its end (one behind it). A graph is watched as a whole.
 */
#include "flashoverlap/cuda/comm.h"
#if FO_NCCL && (FO_MPI || !FO_EMU) // emulated, NCCL itself is MPI
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#if FO_MPI
#include "flashoverlap/fo_mpi.h"
#endif
#include "flashoverlap/fo_sockets.h"

namespace {
enum { MAX_COMMS = 32, OLDEST_VERSION = NCCL_VERSION(2, 26, 0) };

// NCCL's functions, looked up when a process first needs them, so that the program starts without NCCL
struct Nccl {
// clang-format off
#define NCCL_FUNCTIONS(X)                                                                    \
    X(GetVersion) X(GetUniqueId) X(GetErrorString) X(GetLastError)                           \
    X(CommInitRankConfig) X(CommGetAsyncError) X(CommFinalize) X(CommDestroy) X(CommAbort)   \
    X(GroupStart) X(GroupEnd) X(Send) X(Recv)                                                \
    X(MemAlloc) X(MemFree) X(CommRegister) X(CommDeregister)
// clang-format on
#define X(name) decltype(&nccl##name) name;
    NCCL_FUNCTIONS(X)
#undef X
};

struct Comm;

// an exchange that is under way, or a graph: then b has no messages
struct Watched {
    FoBatch* b;
    Comm* comm;
    cudaEvent_t begun, done;
    Watched* next;
};

// of a group
struct Comm {
    FoGroup* group;
    ncclComm_t comm;       // NULL in a group of one
    int slot;              // of process->comms
    pthread_mutex_t mutex; // of the rest, which the watchdog looks at
    Watched *first, *last; // in the order of their queueing
    Watched* unused;
    double quiet_s; // how long the first has been under way
};

// memory of fo__nccl_malloc
struct Buffer {
    char* base;
    size_t nbytes;
    unsigned registered; // bit i: with comms[i]
    void* handles[MAX_COMMS];
    Buffer* next;
};

struct Process {
    const FoHosts* hosts;
    Nccl nccl;
    int ordinal, ctas;
    Buffer* buffers;
    pthread_t watchdog;
    pthread_mutex_t mutex; // of comms and stop
    pthread_cond_t stopped;
    int stop;
    Comm* comms[MAX_COMMS];
    int aborted; // atomic
};

// Here a rank is the process. It stands here, not in a rank's struct, for fo_die's abort and for fo_malloc,
// which have no group at hand.
Process* process;

// ---- NCCL -------------------------------------------------------------------------------------------------
void nccl_check(Comm* c, ncclResult_t err, int line, const char* call) {
    const Nccl* nccl = &process->nccl;
    if (err == ncclSuccess || err == ncclInProgress) { return; }
    const char* detail = c && c->comm ? nccl->GetLastError(c->comm) : nccl->GetLastError(NULL);
    fo_die(__FILE__, line, call, "NCCL: %s%s%s", nccl->GetErrorString(err), detail && detail[0] ? ": " : "",
           detail ? detail : "");
}
#define NCCL(c, call) nccl_check(c, process->nccl.call, __LINE__, #call)

// A communicator returns from its calls at once; until they have settled nothing else may be asked of it.
void settle(Comm* c, const char* what) {
    ncclResult_t state = ncclInProgress;
    double patience = c->group->world->patience_s, quiet_s = 0.0, before = fo_now();
    for (;;) {
        NCCL(c, CommGetAsyncError(c->comm, &state));
        nccl_check(c, state, __LINE__, what);
        if (state == ncclSuccess) { return; }
        double now = fo_now();
        quiet_s += fo__waited_s(now - before);
        before = now;
        fo_require(quiet_s < patience, "waited %.1f s for NCCL to %s among %d ranks", patience, what,
                   c->group->size);
        fo__rest(quiet_s);
    }
}

#if FO_EMU
void find_functions(Nccl* nccl, int) {
#define X(name) nccl->name = nccl##name;
    NCCL_FUNCTIONS(X)
#undef X
}
#else
void find_functions(Nccl* nccl, int rank) {
    char message[256];
    void* lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        snprintf(
            message, sizeof message,
            "ranks that are processes need NCCL 2.26 or newer (%.120s): install it, or start one process, "
            "whose threads are then the ranks",
            dlerror());
        fo__quit_first(rank, message);
    }
#define X(name)                                                                                        \
    nccl->name = (decltype(nccl->name))dlsym(lib, "nccl" #name);                                       \
    if (!nccl->name) {                                                                                 \
        snprintf(message, sizeof message, "NCCL 2.26 or newer is needed: this one has no nccl" #name); \
        fo__quit_first(rank, message);                                                                 \
    }
    NCCL_FUNCTIONS(X)
#undef X
}
#endif

void check_version(const Nccl* nccl, int rank) {
    char message[128];
    int v = 0;
    nccl->GetVersion(&v);
    if (v < OLDEST_VERSION) {
        snprintf(message, sizeof message, "NCCL %d.%d.%d is too old, 2.26 or newer is needed", v / 10000,
                 v / 100 % 100, v % 100);
        fo__quit_first(rank, message);
    }
}

// ---- the watchdog -----------------------------------------------------------------------------------------
int event_passed(cudaEvent_t event) {
    cudaError_t err = cudaEventQuery(event);
    fo_require(err == cudaSuccess || err == cudaErrorNotReady, "an exchange: %s", cudaGetErrorString(err));
    return err == cudaSuccess;
}

// takes off the exchanges that are done; with the mutex
void reap(Comm* c) {
    while (c->first && event_passed(c->first->done)) {
        Watched* x = c->first;
        c->first = x->next;
        c->quiet_s = 0.0;
        free(x->b);
        x->b = NULL;
        x->next = c->unused;
        c->unused = x;
    }
}

// what the watchdog does every tenth of a second
void look_after(Comm* c, double passed_s) {
    ncclResult_t state = ncclSuccess;
    if (!c->comm) { return; }
    NCCL(c, CommGetAsyncError(c->comm, &state));
    nccl_check(c, state, __LINE__, "exchange");
    pthread_mutex_lock(&c->mutex);
    reap(c);
    const Watched* x = c->first;
    if (x && event_passed(x->begun)) { c->quiet_s += passed_s; }
    if (x && c->quiet_s > x->b->patience_s) { // NCCL does not say which of the messages are missing
        fo__die_waiting(x->b, x->b->patience_s, (1u << x->b->nsends) - 1u, (1u << x->b->nrecvs) - 1u);
    }
    pthread_mutex_unlock(&c->mutex);
}

void* watch(void* arg) {
    const Comm* c = (const Comm*)arg;
    Process* p = process;
    double left = 1e9, before = fo_now();
    fo_die_rank(c->group->rank);
    CUDA(cudaSetDevice(p->ordinal)); // or asking for an event would set up GPU 0 for this process
    pthread_mutex_lock(&p->mutex);
    while (!p->stop) {
        fo__cond_wait(&p->stopped, &p->mutex, &left); // a tenth of a second
        double now = fo_now();
        for (int i = 0; i < MAX_COMMS && !p->stop; i++) {
            if (p->comms[i]) { look_after(p->comms[i], fo__waited_s(now - before)); }
        }
        before = now;
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}

void* abort_comms(void* arg) {
    Process* p = (Process*)arg;
    for (int i = 0; i < MAX_COMMS; i++) {
        if (p->comms[i] && p->comms[i]->comm) { p->nccl.CommAbort(p->comms[i]->comm); }
    }
    __atomic_store_n(&p->aborted, 1, __ATOMIC_RELAXED);
    return NULL;
}

// NCCL's kernels spin until they are told to stop; it may itself wait for a peer, so it gets 2 seconds
void abort_all(int status) {
    const FoHosts* hosts = process ? process->hosts : NULL;
    pthread_t thread;
    if (process && pthread_create(&thread, NULL, abort_comms, process) == 0) {
        for (int i = 0; i < 200 && !__atomic_load_n(&process->aborted, __ATOMIC_RELAXED); i++) {
            usleep(10000);
        }
    }
    if (hosts) { hosts->abort(status); }
}

// ---- memory -----------------------------------------------------------------------------------------------
// Both ends of a message must have registered their buffers, or neither: so all of fo_malloc is, with each
// communicator at its first use there.
void require_registered(Comm* c, const void* p) {
    Buffer* x = process->buffers;
    while (x && !((const char*)p >= x->base && (const char*)p < x->base + x->nbytes)) {
        x = x->next;
    }
    if (x && !(x->registered >> c->slot & 1u)) {
        NCCL(c, CommRegister(c->comm, x->base, x->nbytes, &x->handles[c->slot]));
        settle(c, "register memory");
        x->registered |= 1u << c->slot;
    }
}

void deregister(Comm* c, Buffer* x) {
    if (!(x->registered >> c->slot & 1u)) { return; }
    NCCL(c, CommDeregister(c->comm, x->handles[c->slot]));
    x->registered &= ~(1u << c->slot);
}
} // namespace

void* fo__nccl_malloc(size_t nbytes) {
    void* p = NULL;
    if (!process || process->nccl.MemAlloc(&p, nbytes) != ncclSuccess) { return NULL; }
    Buffer* x = (Buffer*)calloc(1, sizeof *x);
    fo_require(x != NULL, "out of memory");
    x->base = (char*)p, x->nbytes = nbytes, x->next = process->buffers;
    process->buffers = x;
    return p;
}

int fo__nccl_free(FoDevice* d, void* p) {
    Buffer** at = process ? &process->buffers : NULL;
    while (at && *at && (*at)->base != p) {
        at = &(*at)->next;
    }
    if (!at || !*at) { return 0; }
    Buffer* x = *at;
    for (FoStream* s = d->streams; s; s = s->next) { // cudaFree waits, NCCL does not
        CUDA(cudaStreamSynchronize(s->stream));
    }
    for (int i = 0; i < MAX_COMMS; i++) {
        if (process->comms[i]) { deregister(process->comms[i], x); }
    }
    *at = x->next;
    NCCL(NULL, MemFree(p));
    free(x);
    return 1;
}

namespace {
// ---- exchanges --------------------------------------------------------------------------------------------
// the event in front of the exchange
Watched* watch_begin(Comm* c, FoBatch* b) {
    pthread_mutex_lock(&c->mutex);
    reap(c);
    Watched* x = c->unused;
    if (x) { c->unused = x->next; }
    pthread_mutex_unlock(&c->mutex);
    if (!x) {
        x = (Watched*)calloc(1, sizeof *x);
        fo_require(x != NULL, "out of memory");
        CUDA(cudaEventCreateWithFlags(&x->begun, cudaEventDisableTiming));
        CUDA(cudaEventCreateWithFlags(&x->done, cudaEventDisableTiming));
    }
    x->b = b;
    x->comm = c;
    x->next = NULL;
    CUDA(cudaEventRecord(x->begun, b->stream->stream));
    return x;
}

void watch_end(Watched* x) {
    Comm* c = x->comm;
    CUDA(cudaEventRecord(x->done, x->b->stream->stream));
    pthread_mutex_lock(&c->mutex);
    if (c->first) {
        c->last->next = x;
    } else {
        c->first = x;
    }
    c->last = x;
    pthread_mutex_unlock(&c->mutex);
}

void queue_messages(Comm* c, const FoBatch* b) {
    cudaStream_t s = b->stream->stream;
    NCCL(c, GroupStart());
    for (int i = 0; i < b->nrecvs; i++) {
        const FoRecv* r = &b->recvs[i];
        NCCL(c, Recv(r->dst, r->nbytes, ncclUint8, r->from, c->comm, s));
    }
    for (int i = 0; i < b->nsends; i++) {
        const FoSend* m = &b->sends[i];
        NCCL(c, Send(m->src, m->nbytes, ncclUint8, m->to, c->comm, s));
    }
    NCCL(c, GroupEnd());
    settle(c, "begin an exchange");
}

void nccl_exchange(FoBatch* b) {
    Comm* c = (Comm*)b->group->state;
    FoDevice* d = b->stream->device;
    d->reserved_sms = process->ctas;
    for (int i = 0; i < b->nrecvs; i++) {
        require_registered(c, b->recvs[i].dst);
    }
    for (int i = 0; i < b->nsends; i++) {
        require_registered(c, b->sends[i].src);
    }
    Watched* x = d->capturing ? NULL : watch_begin(c, b);
    queue_messages(c, b);
    if (x) {
        watch_end(x);
    } else {
        free(b);
    }
}

// ---- groups -----------------------------------------------------------------------------------------------
// A pair's first message sets up the connection, for which both hosts are needed: all pairs now, both ways.
void warm_up(Comm* c) {
    enum { NBYTES = 16 };
    int P = c->group->size, r = c->group->rank;
    cudaStream_t s;
    char* p;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CUDA(cudaMalloc(&p, 2 * (size_t)P * NBYTES));
    CUDA(cudaMemsetAsync(p, 0, 2 * (size_t)P * NBYTES, s));
    NCCL(c, GroupStart());
    for (int i = 1; i < P; i++) {
        int to = (r + i) % P, from = (r + P - i) % P;
        NCCL(c, Send(p + to * NBYTES, NBYTES, ncclUint8, to, c->comm, s));
        NCCL(c, Recv(p + (P + from) * NBYTES, NBYTES, ncclUint8, from, c->comm, s));
    }
    NCCL(c, GroupEnd());
    settle(c, "connect");
    double patience = c->group->world->patience_s, quiet_s = 0.0, before = fo_now();
    for (cudaError_t err; (err = cudaStreamQuery(s)) != cudaSuccess;) {
        fo_require(err == cudaErrorNotReady, "first messages: %s", cudaGetErrorString(err));
        double now = fo_now();
        quiet_s += fo__waited_s(now - before);
        before = now;
        fo_require(quiet_s < patience, "waited %.1f s for the first messages among %d ranks", patience, P);
        fo__rest(quiet_s);
    }
    CUDA(cudaFree(p));
    CUDA(cudaStreamDestroy(s));
}

// collective over g, whose hosts have met
void connect(FoGroup* g) {
    Comm* c = (Comm*)calloc(1, sizeof *c);
    fo_require(c != NULL, "out of memory");
    c->group = g;
    pthread_mutex_init(&c->mutex, NULL);
    g->state = c;
    if (g->size == 1) { return; }
    ncclUniqueId id = {};
    if (g->rank == 0) { NCCL(c, GetUniqueId(&id)); }
    g->hosts->bcast(g, &id, sizeof id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.minCTAs = 1;
    config.maxCTAs = process->ctas;
    config.splitShare = 0;
    NCCL(c, CommInitRankConfig(&c->comm, g->size, id, g->rank, &config));
    settle(c, "open a communicator");
    warm_up(c);
    pthread_mutex_lock(&process->mutex);
    while (c->slot < MAX_COMMS && process->comms[c->slot]) {
        c->slot++;
    }
    fo_require(c->slot < MAX_COMMS, "more than %d groups of a rank at once", MAX_COMMS);
    process->comms[c->slot] = c;
    pthread_mutex_unlock(&process->mutex);
}

void disconnect(Comm* c) {
    c->group->hosts->barrier(c->group); // nobody sends any more
    pthread_mutex_lock(&process->mutex);
    process->comms[c->slot] = NULL;
    pthread_mutex_unlock(&process->mutex);
    for (Buffer* x = process->buffers; x; x = x->next) {
        deregister(c, x);
    }
    reap(c);
    fo_require(!c->first, "a group ends with an exchange under way");
    for (Watched* x = c->unused; x;) {
        Watched* next = x->next;
        CUDA(cudaEventDestroy(x->begun));
        CUDA(cudaEventDestroy(x->done));
        free(x);
        x = next;
    }
    NCCL(c, CommFinalize(c->comm));
    settle(c, "close a communicator");
    NCCL(c, CommDestroy(c->comm));
}

void nccl_split(FoGroup* g, int color, FoGroup* part) {
    g->hosts->split(g, color, part);
    part->transport = g->transport;
    connect(part);
}

void process_close(void) {
    Process* p = process;
    pthread_mutex_lock(&p->mutex);
    p->stop = 1;
    pthread_cond_broadcast(&p->stopped);
    pthread_mutex_unlock(&p->mutex);
    pthread_join(p->watchdog, NULL);
    pthread_mutex_destroy(&p->mutex);
    pthread_cond_destroy(&p->stopped);
    process = NULL;
    free(p);
}

void nccl_close(FoGroup* g) {
    Comm* c = (Comm*)g->state;
    if (c->comm) { disconnect(c); }
    pthread_mutex_destroy(&c->mutex);
    if (g->world == g) { process_close(); }
    free(c);
    g->hosts->close(g);
}

const FoTransport NCCL_TRANSPORT = {"nccl", nccl_exchange, fo__hosts_barrier, nccl_split, nccl_close};

// blocks that a communicator's kernels may have at once: FO_NCCL_CTAS, or 8
int ctas_of_environment(int rank) {
    char message[128];
    const char* text = getenv("FO_NCCL_CTAS");
    if (!text) { return 8; }
    int n = atoi(text);
    if (n < 1 || n > 32) {
        snprintf(message, sizeof message, "FO_NCCL_CTAS=%.40s: want 1 to 32", text);
        fo__quit_first(rank, message);
    }
    return n;
}
} // namespace

namespace {
void open_hosts(FoGroup* g, const FoLaunch* l) {
#if FO_MPI
    if (l->init == FO_INIT_MPI) {
        // MPI only brings processes together: its plain parts do, and leave the network cards to NCCL
        setenv("OMPI_MCA_pml", "ob1", 0);
        setenv("OMPI_MCA_btl", "self,vader,tcp", 0);
        fo__mpi_open(g);
        return;
    }
#endif
#if FO_EMU
    fo__quit_first(l->rank, "the emulated NCCL needs MPI: want mpirun, and -pi mpi");
#else
    fo__sockets_open(g, l);
#endif
}
} // namespace

void fo__process_open(FoGroup* g, const FoLaunch* l) {
    // communicators of a rank are launched in the program's order, which is the same on all ranks
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    open_hosts(g, l);
    Process* p = (Process*)calloc(1, sizeof *p);
    fo_require(p != NULL, "out of memory");
    p->hosts = g->hosts;
    find_functions(&p->nccl, g->rank);
    check_version(&p->nccl, g->rank);
    p->ctas = ctas_of_environment(g->rank);
    // the first of a machine finds what is wrong with it, and says it once
    int first = fo__local_rank(g->rank) == 0;
    if (first) { p->ordinal = fo__ordinal(g->rank, g->nlocal); }
    g->hosts->barrier(g);
    if (!first) { p->ordinal = fo__ordinal(g->rank, g->nlocal); }
    CUDA(cudaSetDevice(p->ordinal));
    pthread_mutex_init(&p->mutex, NULL);
    fo__cond_init(&p->stopped);
    process = p;
    fo_die_rank(g->rank);
    fo_die_abort(abort_all);
    g->transport = &NCCL_TRANSPORT;
    connect(g);
    int err = pthread_create(&p->watchdog, NULL, watch, g->state);
    fo_require(err == 0, "no thread for the watchdog: %s", strerror(err));
}

void* fo__watch_begin(FoStream* s) {
    Comm* c = process ? process->comms[0] : NULL; // the world's
    if (!c) { return NULL; }
    FoBatch* b = (FoBatch*)calloc(1, sizeof *b);
    fo_require(b != NULL, "out of memory");
    b->group = c->group;
    b->stream = s;
    b->what = "graph";
    b->step = c->group->world->step;
    b->patience_s = c->group->world->patience_s;
    return watch_begin(c, b);
}

void fo__watch_end(void* watched) {
    if (watched) { watch_end((Watched*)watched); }
}

#else // ranks are threads
void* fo__watch_begin(FoStream*) {
    return NULL;
}

void fo__watch_end(void*) {}

void* fo__nccl_malloc(size_t) {
    return NULL;
}

int fo__nccl_free(FoDevice*, void*) {
    return 0;
}

void fo__process_open(FoGroup*, const FoLaunch* l) {
    fo__quit_first(l->rank,
                   "several processes were started, but this program was built without NCCL: install NCCL's "
                   "headers and build again, or start one process, whose threads are then the ranks");
}
#endif
