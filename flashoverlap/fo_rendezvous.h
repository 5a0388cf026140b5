/* fo_rendezvous.h -- processes without MPI find each other: each tells rank 0 where it listens, and rank 0
 * tells all. Also the small calls of sockets that this and fo_sockets.c share.
 *
 * Whoever connects to a port of ours may be a stranger: of what it sends a fixed number of bytes is read, it
 * has a few seconds, and the others go on meanwhile. Nothing here is secret or encrypted: it keeps accidents
 * out, not enemies. All sockets are non-blocking and close in children.
 */
#ifndef FO_RENDEZVOUS_H
#define FO_RENDEZVOUS_H
#include "flashoverlap/fo_launch.h"
#include "flashoverlap/fo_transport.h"
#ifdef __cplusplus
extern "C" {
#endif

// an IPv6 address, of IPv4 the mapped one, and a port
typedef struct {
    uint8_t ip[16];
    uint16_t port;
    uint16_t local; // seen by rank 0 on its own machine: others take the address at which they reach rank 0
} FoAddress;

// what all processes know after they have met; rank 0 sends it as it is
typedef struct {
    uint64_t key; // of this run, drawn by rank 0
    struct {
        FoAddress at;
        uint64_t machine; // the same number for ranks of one machine
        char host[48];    // its name, for messages
    } ranks[FO_MAX_RANKS];
} FoRoll;

// what a process says first when it connects to another
typedef struct {
    char magic[8];
    uint32_t kind;
    int32_t n, rank, to; // processes, who speaks, to whom
    uint32_t build;      // of the program: all must have the same
    uint32_t port;       // JOIN: at which it listens
    uint64_t machine;
    uint64_t key;       // JOIN: the number that rank 0 greeted with; LINK: of the run
    uint64_t group;     // LINK: of which this is a connection
    char host[48];      // JOIN
    char options[1024]; // JOIN
} FoHello;
enum { FO_HELLO_JOIN = 1, FO_HELLO_LINK = 2 };
void fo__hello_init(FoHello* h, int kind, const FoLaunch* l);

// who has connected and has not yet been taken care of
enum { FO_GUESTS = 64 };
typedef struct {
    int fd;
    double since;
    size_t nread; // of hello; a link's has no options
    FoHello hello;
} FoGuest;
typedef struct {
    int listener, n;
    FoGuest guests[FO_GUESTS];
} FoLobby;
// lets in who waits at the door, reads what they say, sends away who says nothing or nonsense; for ms at most
void fo__lobby_look(FoLobby* y, int ms, void (*greet)(int fd, void* arg), void* arg);
// has that guest said all?
int fo__guest_ready(const FoGuest* guest);
// takes the guest's place away, and leaves its socket alone
void fo__lobby_remove(FoLobby* y, FoGuest* guest);

/* fo__rendezvous -- all l->n processes meet. Fills in what they know of each other, and the listening socket
 * of this one. Ends with one line where someone does not come within l->timeout_s, or is not of this run.
 */
void fo__rendezvous(const FoLaunch* l, FoRoll* roll, int* listener);

// -1 with errno; by `until` on fo_now's clock
int fo__connect(const FoAddress* to, double until);
// 1: all is read (written); 0: the other has closed, or an error; -1: it was not, by then
int fo__read_all(int fd, void* p, size_t nbytes, double until);
int fo__write_all(int fd, const void* p, size_t nbytes, double until);
// a number for the same bytes
uint64_t fo__hash(uint64_t seed, const void* p, size_t nbytes);

#ifdef __cplusplus
}
#endif
#endif
