/* fo_sockets.h -- the host's side of ranks that are processes without MPI, on every device: connections for
 * each group, barriers, splits. How processes find each other: fo_rendezvous.h.
 *
 * Each group has connections of its own, two for each pair of ranks: on one a rank sends and is answered, on
 * the other its peer. One thread at a time uses a group's: that of a stream with an exchange, or the host's
 * with a barrier. So groups never wait for each other, and there is nothing to lock. A thread of the process,
 * the watcher, sees at once when another process ends, and ends this one.
 */
#ifndef FO_SOCKETS_H
#define FO_SOCKETS_H
#include "flashoverlap/fo_launch.h"
#include "flashoverlap/fo_transport.h"
#ifdef __cplusplus
extern "C" {
#endif

// what a rank sends begins with this
typedef struct {
    uint32_t kind, unused;
    uint64_t nbytes; // that follow
    double start;    // emulated link: no sooner than this, as far as the sender knows
} FoFrame;
enum { FO_FRAME_BARRIER = 0x464f4201, FO_FRAME_MESSAGE = 0x464f4d02 };

struct FoSockets {
    int out[FO_MAX_RANKS], in[FO_MAX_RANKS]; // by rank of the group; -1: this rank itself
    uint64_t id;                             // of the group, the same on all its ranks
    uint64_t nsplits;                        // of it so far
    struct FoSocketWorld* world;
};

// meets the other processes, connects; fills in hosts, sockets, rank, size and nlocal of a world
void fo__sockets_open(FoGroup* g, const FoLaunch* l);
// one send or receive that does not wait: bytes moved, 0 if none could be; dies if that rank has ended
size_t fo__sockets_send(const FoGroup* g, int fd, int peer, const void* p, size_t nbytes);
size_t fo__sockets_recv(const FoGroup* g, int fd, int peer, void* p, size_t nbytes);

#ifdef __cplusplus
}
#endif
#endif
