/* fo_comm.h -- ranks, and bytes between them: part three of the cut.
 *
 * A rank is a thread of this process (transport "local") or a process ("mpi" or "tcp"; on cuda "nccl").
 * fo_launch.h says how processes are started. Above this header they are the same. Sends and receives are
 * queued on a stream and done in its order; the sends and receives between begin and end are one exchange,
 * which progresses as a whole and is done when all of them are.
 */
#ifndef FO_COMM_H
#define FO_COMM_H
#include "flashoverlap/fo.h"
#include "flashoverlap/fo_launch.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct FoGroup FoGroup;

typedef void (*FoRankBody)(FoGroup* world, void* arg);

/* fo_ranks_run -- runs body once for each of P ranks and waits for all of them.
 *
 * Where a launcher has started more than one process, each is one rank and P must be their number,
 * FO_MAX_RANKS at most (else one line and exit status 1). Otherwise ranks are P threads of this process. arg
 * is handed to every rank of this process as it is.
 * Errors: dies if P is not in 1..FO_MAX_RANKS.
 */
void fo_ranks_run(int P, FoRankBody body, void* arg);

// the same where the program's options have a say, too: l as fo_launch_find has left it
void fo_launch_run(const FoLaunch* l, int P, FoRankBody body, void* arg);

int fo_group_rank(const FoGroup* g);
int fo_group_size(const FoGroup* g);
int fo_group_nlocal(const FoGroup* g);            // ranks of it on this machine
const char* fo_group_transport(const FoGroup* g); // "local", "mpi", "tcp" or "nccl"

// The calling threads of all ranks meet. Nothing of the group may be queued; other groups' exchanges may run.
void fo_group_barrier(FoGroup* g);

/* fo_group_split -- the ranks of g that give the same color become a group of their own, numbered in g's
 * order.
 *
 * Collective over g, with nothing of g queued. Exchanges of different groups may run at the same time. An
 * emulated link is inherited, but each group has its own ports, so that one group's messages don't hold up
 * another's (a tp group's link is not a dp group's); measured figures are not. Close it with fo_group_free.
 * Errors: dies if color is negative.
 */
FoGroup* fo_group_split(FoGroup* g, int color);
/* fo_group_free -- ends a group that fo_group_split made. Collective over it, with nothing of it queued.
 *
 * Groups split from it live on. All are freed before the rank's body returns, else that dies. The world
 * itself is not: fo_ranks_run ends it.
 */
void fo_group_free(FoGroup* g);

// Bytes and messages that this rank has given to fo_send on g so far, those of fo_allgather and
// fo_group_measure included; messages of no bytes don't count, for they are not sent.
void fo_group_sent(const FoGroup* g, size_t* nbytes, size_t* nmessages);
// adds what a graph sends each time that it is launched, for which nobody calls fo_send
void fo_group_sent_by_graph(FoGroup* g, size_t nbytes, size_t nmessages);

/* fo_group_link -- from now on the transport behaves like a link of `gbytes_s` GB/s (10^9 bytes) and `us`
 * microseconds.
 *
 * A message is delivered no sooner than latency + nbytes/bandwidth after its start; start = max(posted by
 * both sides, sender's port free, receiver's port free): one message at a time in each direction. The clock
 * is virtual, so that lateness of a wake-up does not add up. 0 GB/s: no link, as fast as it goes. Collective;
 * nothing may be queued.
 * Errors: dies when ranks are on several machines (their clocks differ), and on a device that emulates none
 * (fo_device_emulates).
 */
void fo_group_link(FoGroup* g, double gbytes_s, double us);

// seconds that a message of nbytes takes on the group's link: the emulated one, or as measured by
// fo_group_measure
double fo_group_message_s(const FoGroup* g, size_t nbytes);
// measures bandwidth and latency between neighbours, if no link is emulated; collective; s idle
void fo_group_measure(FoGroup* g, FoStream* s);

/* fo_group_patience -- how long ranks of g's world wait for each other, in all its groups: for the exchanges
 * begun from now on, and at barriers. Who hears nothing of a peer for so long dies and says for whom it
 * waited.
 *
 * Exchanges count from when they are under way, not while they queue. At the start it is FO_PATIENCE_S: peers
 * may be slow for good reason (rank 0 writes a checkpoint of many GB to a network file system), which takes
 * minutes. Who wants less says so for the time in which no rank works alone, and lets all meet at a barrier
 * before that time begins, so that no exchange has to wait for what came before.
 */
void fo_group_patience(FoGroup* g, double seconds);
#define FO_PATIENCE_S 300.0
// what step of the program the exchanges begun from now on are part of, for messages
void fo_group_step(FoGroup* g, int step);

/* fo_comm_begin ... fo_comm_end -- one exchange, queued on s at end.
 *
 * Every send needs its receive of the same nbytes in an exchange of the peer, and ranks must queue exchanges
 * in orders that match, over all groups: on cuda the host's threads of two peers wait for each other here.
 * Between a pair messages arrive in the order of sending. src must stay as it is, and
 * dst untouched, until s has passed the exchange. At most FO_MAX_RANKS sends and as many receives an
 * exchange; sends go out one at a time, in the order given. Zero bytes are not sent. A peer equal to this
 * rank is an error: dies.
 * In a graph: ranks of a group end up with the same exchanges in it, and have exchanged messages between the
 * same pairs before.
 */
void fo_comm_begin(FoGroup* g, FoStream* s);
void fo_send(FoGroup* g, const void* src, size_t nbytes, int to);
void fo_recv(FoGroup* g, void* dst, size_t nbytes, int from);
void fo_comm_end(FoGroup* g);
// between begin and end: the operation that the exchange belongs to, for messages; not copied
void fo_comm_name(FoGroup* g, const char* name);

/* fo_allgather -- plain, for scalars, token ids and what is too short to hide: block p of all comes from rank
 * p. In place: the own block is there before. Queued on s.
 */
void fo_allgather(FoGroup* g, void* all, size_t nbytes_each, FoStream* s);

#ifdef __cplusplus
}
#endif
#endif
