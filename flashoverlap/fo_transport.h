/* fo_transport.h -- what fo_comm.c, the transports and the devices' comm files share. Nothing outside these
 * files sees it.
 *
 * fo_comm.c holds what all devices have in common: ranks, groups, the collecting of an exchange into a
 * FoBatch. A device says how a batch is carried out (fo__exchange) and opens its transports: one between
 * ranks that are threads (fo_threads.c has the host's side of that), one between processes (fo_mpi.c,
 * fo_sockets.c).
 */
#ifndef FO_TRANSPORT_H
#define FO_TRANSPORT_H
#include "flashoverlap/fo_comm.h"
#include "flashoverlap/fo_launch.h"
#include "flashoverlap/fo_ops.h" // FO_MAX_RANKS
#include <pthread.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct FoBatch FoBatch;

// How bytes get from one rank to another: several are alive in one program. All fields are set.
typedef struct {
    const char* name;
    // carries out b; cpu: called by a stream's thread, at its turn; cuda: by the host's thread, which queues
    // it, and hands b over
    void (*exchange)(FoBatch* b);
    void (*barrier)(FoGroup* g);
    // fills in rank, size, nlocal, world_ranks, transport and what is the transport's own of a group split
    // off g
    void (*split)(FoGroup* g, int color, FoGroup* part);
    void (*close)(FoGroup* g);
} FoTransport;

// How the hosts of ranks that are processes meet, on every device: by MPI (fo_mpi.c) or by sockets
// (fo_sockets.c). All fields are set.
typedef struct {
    void (*barrier)(FoGroup* g);
    // fills in hosts, rank, size, nlocal, world_ranks and what is its own of a group split off g
    void (*split)(FoGroup* g, int color, FoGroup* part);
    void (*bcast)(FoGroup* g, void* p, size_t nbytes); // of rank 0 to all; at most 256
    void (*close)(FoGroup* g);
    void (*abort)(int status); // before this process ends: the others are to end, too
} FoHosts;

typedef struct {
    const void* src;
    size_t nbytes;
    int to;
} FoSend;

typedef struct FoRecv {
    void* dst;
    size_t nbytes;
    int from;
    // the cpu's local transport: in the mailbox, under its mutex; written by the sender, read by the receiver
    struct FoRecv* next;
    double posted; // the receiver's virtual time
    double due;    // emulated link: virtual time of delivery
    int done;
} FoRecv;

// one exchange
struct FoBatch {
    FoGroup* group;
    FoStream* stream;
    // for messages and deadlines, as they were when it was begun
    const char* what; // the operation that it belongs to, or NULL
    int step;         // of the program, or -1
    double patience_s;
    double posted; // virtual time at which it started: the stream's clock, not the time of a late wake-up
    double due;    // emulated link: virtual time at which all of it is delivered, kept by the transport
    int nsends, nrecvs;
    FoSend sends[FO_MAX_RANKS];
    FoRecv recvs[FO_MAX_RANKS];
};

struct FoGroup {
    int rank, size, nlocal;
    int world_ranks[FO_MAX_RANKS]; // of its ranks, for messages to people
    FoGroup* world;                // that it was split from, perhaps in several steps; itself if it is one
    int nparts;                    // of a world: groups split off and not yet freed
    const FoTransport* transport;
    void* state;               // the transport's own
    struct FoThreads* threads; // of ranks that are threads: what their hosts share
    const FoHosts* hosts;      // of ranks that are processes: how their hosts meet, and one of these
    struct FoMpi* mpi;
    struct FoSockets* sockets;
    FoBatch* collecting;       // between begin and end, else NULL; of the host's thread
    int busy;                  // cpu: an exchange runs; accessed atomically
    size_t nbytes_sent, nsent; // of the host's thread
    int emulated;              // the link is; else its figures are measured, or 0
    double latency_s, s_per_byte;
    // of a world, for all its groups; of the host's thread
    double patience_s;
    int step; // -1: the program has said none
};

// ---- of a device ------------------------------------------------------------------------------------------
// queues b, which it owns from here on (malloc)
void fo__exchange(FoBatch* b);
// P groups of one world, one for each thread that is a rank; each is closed by its transport
void fo__local_open(FoGroup* groups[], int P);
// starts what joins the processes and fills in the group of this one, whose rank l tells
void fo__process_open(FoGroup* g, const FoLaunch* l);

// ---- of fo_comm.c -----------------------------------------------------------------------------------------
// how long b's group may wait for a peer: its patience, and what an emulated link may take for all that peers
// have to do
double fo__patience_s(const FoBatch* b);
// dies: for so long the peers of these messages have not done their part; bits of b->sends and b->recvs
void fo__die_waiting(const FoBatch* b, double waited_s, unsigned sends, unsigned recvs)
    __attribute__((noreturn));
// which of the ranks on this machine a rank of the world is (fo_launch.c)
int fo__local_rank(int rank);
// a user's error that all processes find: the first prints and ends them, the others wait for that
void fo__quit_first(int rank, const char* message) __attribute__((noreturn));
// between two looks at what is under way, after quiet_s seconds in which nothing happened
void fo__rest(double quiet_s);
// a transport's barrier where ranks are processes
void fo__hosts_barrier(FoGroup* g);

// ---- of fo_threads.c: the host's side of ranks that are threads -------------------------------------------
// fills in what threads share, and rank, size and nlocal
void fo__threads_open(FoGroup* groups[], int P);
void fo__threads_barrier(FoGroup* g);
void fo__threads_split(FoGroup* g, int color, FoGroup* part); // opens the parts by fo__local_open
int fo__threads_close(FoGroup* g);                            // is this the last rank of the group?
void fo__cond_init(pthread_cond_t* cond);
// waits for a signal, not for long, and takes the time from *patience; 0 if nothing is left of it
int fo__cond_wait(pthread_cond_t* cond, pthread_mutex_t* mutex, double* patience);

// ---- small ------------------------------------------------------------------------------------------------
// What of a time without news counts as waiting: a process that was stopped (Ctrl-Z) for an hour, and its
// peers with it, has waited for the tenth of a second in which it found out.
static inline double fo__waited_s(double quiet_s) {
    return quiet_s < 0.1 ? quiet_s : 0.1;
}

static inline double fo__later(double a, double b) {
    return a > b ? a : b;
}

#ifdef __cplusplus
}
#endif
#endif
