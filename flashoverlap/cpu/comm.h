/* comm.h -- what comm.c and the transports of the cpu device share. Nothing outside these files sees it.
 *
 * An exchange is collected by the host's thread into a FoBatch, handed to a stream's thread through the
 * stream's queue, carried out there by the transport (comm_local.c, comm_mpi.c), and freed. The emulated link
 * is arithmetic on virtual times (seconds, as fo_now): transports reserve ports, comm.c sleeps once an
 * exchange, until all of it is due.
 */
#ifndef FO_CPU_COMM_H
#define FO_CPU_COMM_H
#include "flashoverlap/cpu/cpu.h"
#include "flashoverlap/fo_comm.h"
#include "flashoverlap/fo_ops.h" // FO_MAX_RANKS
#include <stdatomic.h>

/* An exchange that hears nothing from its peers for so long ends the program: one of them hangs, or ranks
 * queued exchanges that don't match. Peers may be slow for good reason (rank 0 writes a checkpoint of many GB
 * to a network file system, or evaluates alone), which takes minutes, so less would kill healthy runs; and a
 * hang that nobody notices costs hours, so more would help nobody.
 */
#define FO_PATIENCE_S 300.0

typedef struct {
    const void* src;
    size_t nbytes;
    int to;
} FoSend;

typedef struct FoRecv {
    void* dst;
    size_t nbytes;
    int from;
    // local transport: in the mailbox, under its mutex; written by the sender, read by the receiver
    struct FoRecv* next;
    double posted; // the receiver's virtual time
    double due;    // emulated link: virtual time of delivery
    int done;
} FoRecv;

// one exchange
typedef struct {
    FoGroup* group;
    FoStream* stream;
    double posted; // virtual time at which it started: the stream's clock, not the time of a late wake-up
    double due;    // emulated link: virtual time at which all of it is delivered, kept by the transport
    int nsends, nrecvs;
    FoSend sends[FO_MAX_RANKS];
    FoRecv recvs[FO_MAX_RANKS];
} FoBatch;

struct FoGroup {
    int rank, size, nlocal;
    int world_ranks[FO_MAX_RANKS]; // of its ranks, for messages to people
    FoGroup* world;                // that it was split from, perhaps in several steps; itself if it is one
    int nparts;                    // of a world: groups split off and not yet freed
    const FoTransport* transport;
    void* state;               // the transport's own
    FoBatch* collecting;       // between begin and end, else NULL; of the host's thread
    FoBatch* running;          // of the stream's thread that does an exchange
    atomic_int busy;           // an exchange runs
    size_t nbytes_sent, nsent; // of the host's thread
    int emulated;              // the link is; else its figures are measured, or 0
    double latency_s, s_per_byte;
    double patience_s; // FO_PATIENCE_S
};

// P groups of one world, one for each thread that is a rank; each is closed by its transport
void fo__local_open(FoGroup* groups[], int P);
#if FO_MPI
// starts MPI and fills in the group of this process
void fo__mpi_open(FoGroup* g);
#endif

// how long g may wait for a peer in b: its patience, and what an emulated link may take for all that peers
// have to do
double fo__patience_s(const FoGroup* g, const FoBatch* b);

// What of a time without news counts as waiting: a process that was stopped (Ctrl-Z) for an hour, and its
// peers with it, has waited for the tenth of a second in which it found out.
static inline double fo__waited_s(double quiet_s) {
    return quiet_s < 0.1 ? quiet_s : 0.1;
}

// seconds for which a message occupies the ports of an emulated link
static inline double fo__wire_s(const FoGroup* g, size_t nbytes) {
    return (double)nbytes * g->s_per_byte;
}

static inline double fo__later(double a, double b) {
    return a > b ? a : b;
}

#endif
