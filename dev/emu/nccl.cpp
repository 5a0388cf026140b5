/* nccl.cpp -- NCCL among processes, over MPI: the calls of a group become one operation on the stream, which
 * the device thread carries out with MPI's messages.
 *
 * Stricter than NCCL: sizes and types of a message must be the same at both ends, both must have registered
 * their buffers or neither, a communicator that is not settled may not be used, and registered memory not be
 * freed. Calls of MPI have their second names, so that a test can stand before the program's own.
 */
#if FO_MPI
#include <deque>
#include <limits.h>
#define OMPI_SKIP_MPICXX 1 // its C++ part would want another library
#include <mpi.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>
#include "dev/emu/runtime.h"

struct ncclComm {
    MPI_Comm mpi;
    int rank, size;
    int nonblocking;
    int unsettled; // atomic: so many calls of ncclCommGetAsyncError say that the last call is still under way
    int aborted;   // atomic
    unsigned long nqueued;                // groups of calls; of the host's thread
    std::atomic<unsigned long> nfinished; // of them
    struct Range {
        char* base;
        size_t nbytes;
    };
    std::vector<Range*> registered;
};

namespace {
struct Allocation {
    char* base;
    int nregistered;
};
std::vector<Allocation> allocations; // of ncclMemAlloc; a process has one thread that calls NCCL

size_t width(ncclDataType_t t) {
    switch (t) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 4;
    }
}

int is_registered(const ncclComm* c, const void* p) {
    for (const ncclComm::Range* r : c->registered) {
        if ((const char*)p >= r->base && (const char*)p < r->base + r->nbytes) { return 1; }
    }
    return 0;
}

// ---- a group of calls -------------------------------------------------------------------------------------
struct Part {
    int send;
    void* buffer;
    size_t nbytes;
    int type, peer, registered;
    MPI_Request request;
    enum { WAITS, UNDER_WAY, DONE } state;
};

// type and registration, so that the receiver can compare them
int tag_of(const Part& p) {
    return 2 * p.type + p.registered;
}

struct Group : emu::Op {
    ncclComm* comm;
    std::vector<Part> parts;
    emu::Lock lock;
    // of the runs that are queued and not finished: the communicator's order. Under lock
    std::deque<unsigned long> turns;
    bool told = false;

    void queued() override {
        emu::Guard guard(lock);
        turns.push_back(comm->nqueued++);
    }

    void start() override {
        for (Part& p : parts) {
            p.state = Part::WAITS;
        }
        told = false;
    }

    void begin_sends() {
        for (Part& p : parts) {
            if (p.send && p.state == Part::WAITS) {
                emu::touch_read(p.buffer, p.nbytes);
                PMPI_Issend(p.buffer, (int)p.nbytes, MPI_BYTE, p.peer, tag_of(p), comm->mpi, &p.request);
                p.state = Part::UNDER_WAY;
            }
        }
    }

    // a communicator does one group after the other
    bool is_its_turn() {
        emu::Guard guard(lock);
        return turns.front() == comm->nfinished;
    }

    void finish() {
        emu::Guard guard(lock);
        turns.pop_front();
        comm->nfinished++;
    }

    // messages of one peer are taken in the order of the calls
    int is_next(size_t i) const {
        for (size_t j = 0; j < i; j++) {
            if (!parts[j].send && parts[j].peer == parts[i].peer && parts[j].state == Part::WAITS) {
                return 0;
            }
        }
        return 1;
    }

    void begin_receive(Part& p) {
        MPI_Message message;
        MPI_Status status;
        int here = 0, nbytes = 0;
        PMPI_Improbe(p.peer, MPI_ANY_TAG, comm->mpi, &here, &message, &status);
        if (!here) { return; }
        PMPI_Get_count(&status, MPI_BYTE, &nbytes);
        if ((size_t)nbytes != p.nbytes || status.MPI_TAG / 2 != p.type) {
            emu::die("ncclRecv of rank %d from rank %d expects %zu bytes of type %d, sent were %d of type %d",
                     comm->rank, p.peer, p.nbytes, p.type, nbytes, status.MPI_TAG / 2);
        }
        if (status.MPI_TAG % 2 != p.registered) {
            emu::die("ncclRecv of rank %d from rank %d: %zu bytes, registered by the %s alone", comm->rank,
                     p.peer, p.nbytes, p.registered ? "receiver" : "sender");
        }
        emu::touch_write(p.buffer, p.nbytes);
        PMPI_Imrecv(p.buffer, nbytes, MPI_BYTE, &message, &p.request);
        p.state = Part::UNDER_WAY;
    }

    // what a stalled stream waits for
    void tell() {
        std::string text = "NCCL group of rank " + std::to_string(comm->rank) + ":";
        for (const Part& p : parts) {
            if (p.state != Part::DONE) {
                text += p.send ? " send to " : " receive from ";
                text += std::to_string(p.peer) + " (" + std::to_string(p.nbytes) + " bytes)";
            }
        }
        what = emu::intern(text.c_str());
        told = true;
    }

    bool poll() override {
        if (__atomic_load_n(&comm->aborted, __ATOMIC_RELAXED)) { return true; }
        if (!is_its_turn()) { return false; }
        begin_sends();
        int ndone = 0;
        for (size_t i = 0; i < parts.size(); i++) {
            Part& p = parts[i];
            if (p.state == Part::WAITS && is_next(i)) { begin_receive(p); }
            if (p.state == Part::UNDER_WAY) {
                int done = 0;
                PMPI_Test(&p.request, &done, MPI_STATUS_IGNORE);
                if (done) { p.state = Part::DONE; }
            }
            ndone += p.state == Part::DONE;
        }
        if (ndone < (int)parts.size()) {
            if (!told) { tell(); }
            return false;
        }
        finish();
        return true;
    }
};

// what this thread has called since ncclGroupStart
struct Open {
    cudaStream_t stream;
    Group* group;
};
thread_local int depth = 0;
thread_local std::vector<Open> open_groups;

ncclResult_t under_way(ncclComm* c) {
    if (!c->nonblocking) { return ncclSuccess; }
    __atomic_store_n(&c->unsettled, 2, __ATOMIC_RELAXED);
    return ncclInProgress;
}

void require_settled(const ncclComm* c, const char* call) {
    if (__atomic_load_n(&c->unsettled, __ATOMIC_RELAXED) > 0) {
        emu::die("%s: the communicator's last call has not settled (ncclCommGetAsyncError)", call);
    }
}

ncclResult_t add(const char* call, int send, const void* p, size_t n, ncclDataType_t type, int peer,
                 ncclComm_t c, cudaStream_t s) {
    Group* group = nullptr;
    size_t nbytes = n * width(type);
    require_settled(c, call);
    if (peer < 0 || peer >= c->size || (n && !p) || nbytes > INT_MAX) { return ncclInvalidArgument; }
    ncclGroupStart();
    for (const Open& o : open_groups) {
        if (o.group->comm == c && o.stream == s) { group = o.group; }
    }
    if (!group) {
        group = new Group();
        group->comm = c;
        group->what = "NCCL group";
        open_groups.push_back(Open{s, group});
    }
    group->parts.push_back(
        Part{send, (void*)p, nbytes, (int)type, peer, is_registered(c, p), MPI_REQUEST_NULL, Part::WAITS});
    return ncclGroupEnd();
}

// ---- who is who -------------------------------------------------------------------------------------------
enum { TAG_WHO = 1000, TAG_TABLE = 2000, TAG_CREATE = 3000, NTAGS = 1000 };
struct Maker { // in a unique id
    int world_rank, serial;
};
int nids = 0;

// the ranks of the world in the order of the new communicator's: the id's maker collects and spreads them
std::vector<int> meet(const Maker& maker, int size, int rank) {
    std::vector<int> table((size_t)size, -1);
    int me, own[2] = {rank, 0}, tag = maker.serial % NTAGS;
    PMPI_Comm_rank(MPI_COMM_WORLD, &me);
    own[1] = me;
    if (me != maker.world_rank) {
        PMPI_Send(own, 2, MPI_INT, maker.world_rank, TAG_WHO + tag, MPI_COMM_WORLD);
        PMPI_Recv(table.data(), size, MPI_INT, maker.world_rank, TAG_TABLE + tag, MPI_COMM_WORLD,
                  MPI_STATUS_IGNORE);
        return table;
    }
    table[(size_t)rank] = me;
    for (int i = 1; i < size; i++) {
        int who[2];
        PMPI_Recv(who, 2, MPI_INT, MPI_ANY_SOURCE, TAG_WHO + tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (who[0] < 0 || who[0] >= size || table[(size_t)who[0]] != -1) {
            emu::die("ncclCommInitRankConfig: two ranks %d of %d", who[0], size);
        }
        table[(size_t)who[0]] = who[1];
    }
    for (int r = 0; r < size; r++) {
        if (r != rank) {
            PMPI_Send(table.data(), size, MPI_INT, table[(size_t)r], TAG_TABLE + tag, MPI_COMM_WORLD);
        }
    }
    return table;
}
} // namespace

extern "C" {
// the host's thread and the device thread both call MPI
int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
    int err = PMPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, provided);
    if (*provided < MPI_THREAD_MULTIPLE) { emu::die("this MPI has no MPI_THREAD_MULTIPLE"); }
    *provided = required;
    return err;
}

ncclResult_t ncclGetVersion(int* version) {
    const char* old = getenv("FO_EMU_NCCL_VERSION");
    *version = old ? atoi(old) : NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    Maker maker = {0, nids++};
    PMPI_Comm_rank(MPI_COMM_WORLD, &maker.world_rank);
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &maker, sizeof maker);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    Maker maker;
    MPI_Group world, part;
    memcpy(&maker, id.internal, sizeof maker);
    if (rank < 0 || rank >= size) { return ncclInvalidArgument; }
    std::vector<int> table = meet(maker, size, rank);
    ncclComm* c = new ncclComm();
    c->rank = rank;
    c->size = size;
    c->nonblocking = config && config->blocking == 0;
    PMPI_Comm_group(MPI_COMM_WORLD, &world);
    PMPI_Group_incl(world, size, table.data(), &part);
    PMPI_Comm_create_group(MPI_COMM_WORLD, part, TAG_CREATE + maker.serial % NTAGS, &c->mpi);
    PMPI_Group_free(&world);
    PMPI_Group_free(&part);
    *out = c;
    return under_way(c);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* state) {
    *state = ncclSuccess;
    if (__atomic_load_n(&c->unsettled, __ATOMIC_RELAXED) > 0) {
        __atomic_fetch_sub(&c->unsettled, 1, __ATOMIC_RELAXED);
        *state = ncclInProgress;
    }
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t c) {
    require_settled(c, "ncclCommFinalize");
    if (c->nfinished != c->nqueued) {
        emu::die("ncclCommFinalize of rank %d: %lu of %lu groups are done", c->rank, c->nfinished.load(),
                 c->nqueued);
    }
    return under_way(c);
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
    require_settled(c, "ncclCommDestroy");
    if (!c->registered.empty()) { emu::die("ncclCommDestroy: memory is still registered"); }
    PMPI_Comm_free(&c->mpi);
    delete c;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c) {
    __atomic_store_n(&c->aborted, 1, __ATOMIC_RELAXED);
    return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** p, size_t nbytes) {
    if (cudaMalloc(p, nbytes) != cudaSuccess) { return ncclUnhandledCudaError; }
    allocations.push_back(Allocation{(char*)*p, 0});
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void* p) {
    for (size_t i = 0; i < allocations.size(); i++) {
        if (allocations[i].base == p) {
            if (allocations[i].nregistered) { emu::die("ncclMemFree: the memory is still registered"); }
            allocations.erase(allocations.begin() + (long)i);
            return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
        }
    }
    return ncclInvalidArgument;
}

ncclResult_t ncclCommRegister(const ncclComm_t c, void* p, size_t nbytes, void** handle) {
    require_settled(c, "ncclCommRegister");
    for (Allocation& a : allocations) {
        a.nregistered += a.base == p;
    }
    ncclComm::Range* r = new ncclComm::Range{(char*)p, nbytes};
    c->registered.push_back(r);
    *handle = r;
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t c, void* handle) {
    for (size_t i = 0; i < c->registered.size(); i++) {
        ncclComm::Range* r = c->registered[i];
        if (r == handle) {
            for (Allocation& a : allocations) {
                a.nregistered -= a.base == r->base;
            }
            delete r;
            c->registered.erase(c->registered.begin() + (long)i);
            return ncclSuccess;
        }
    }
    return ncclInvalidArgument;
}

ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    ncclResult_t result = ncclSuccess;
    if (depth == 0) { return ncclInvalidUsage; }
    if (--depth > 0) { return ncclSuccess; }
    for (const Open& o : open_groups) {
        ncclComm* c = o.group->comm;
        if (emu::enqueue("ncclGroupEnd", o.stream, o.group) != cudaSuccess) {
            result = ncclUnhandledCudaError;
        } else if (result == ncclSuccess) {
            result = under_way(c);
        }
    }
    open_groups.clear();
    return result;
}

ncclResult_t ncclSend(const void* p, size_t n, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s) {
    return add("ncclSend", 1, p, n, type, peer, c, s);
}

ncclResult_t ncclRecv(void* p, size_t n, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s) {
    return add("ncclRecv", 0, p, n, type, peer, c, s);
}

const char* ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess              ? "no error"
           : result == ncclInvalidArgument    ? "invalid argument"
           : result == ncclInvalidUsage       ? "invalid usage"
           : result == ncclUnhandledCudaError ? "unhandled cuda error"
                                              : "an error";
}

const char* ncclGetLastError(ncclComm_t) {
    return "";
}
}
#endif
