/* fo_plan.h -- schedules as data: which chunk a rank computes, sends and receives, and what waits for what.
 *
 * Pure functions of (kind, mode, m, topology, P, r): no stream, no memory, no clock. fo_exec.c binds a
 * plan to streams; dev/test/test_plan.c checks all of them for P = 1..16, m = 1..4, fo_plan_check those that
 * a dry run asks for.
 *
 * Words. A rank's *shard* is its N/P rows; it is cut into m *chunks*; chunk c = owner * m + sub. A plan has
 * two lists: exchanges, done in order on the communication stream, and computes, done in order on the compute
 * stream. Each says how far the other list must have got before it starts. That one number is all that tells
 * the modes apart:
 *
 *   all-gather, P = 4, rank 0     exchanges: own shard to r-i, shard r+i from its owner, i = 1, 2, 3
 *     none      0:3  1:3  2:3  3:3           chunk:exchanges done before; all wait for the whole collective
 *     flash     0:0  1:1  2:2  3:3           own first; each as soon as it is here
 *   reduce-scatter, P = 4, rank 0 computes: chunks of r+1, r+2, r+3, and the own one last
 *     none      e0:4 e1:4 e2:4               exchange:computes done before; nothing leaves until the end
 *     flash     e0:1 e1:2 e2:3               each leaves while the next is computed: no tail
 */
#ifndef FO_PLAN_H
#define FO_PLAN_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

#define FO_MAX_M          16
#define FO_PLAN_MAX_RANKS 1024 // of a plan; what runs has FO_MAX_RANKS at most

typedef enum { FO_ALLGATHER, FO_REDUCESCATTER } FoKind;
typedef enum { FO_NONE, FO_SLICE, FO_FLASH } FoMode; // vanilla; m slices as Megatron's; this project
typedef enum { FO_DIRECT, FO_RING } FoTopology;      // to the peer itself; neighbours only

typedef struct {
    int send, send_to;   // chunk that leaves, and the peer
    int recv, recv_from; // chunk that arrives, and the peer
    int after_computes;  // computes that must be done before this exchange starts
} FoExchange;

typedef struct {
    int chunk; // chunk to compute, or, if add, into whose partial sum the received one is added (ring)
    int add;   // 0: compute; 1: add
    int after_exchanges; // exchanges that must be done before this starts
} FoCompute;

typedef struct {
    FoKind kind;
    FoMode mode;
    FoTopology topology;
    int m, P, r;
    int nexchanges, ncomputes;
    FoExchange* exchanges;
    FoCompute* computes;
} FoPlan;

/* fo_plan_init -- the plan of rank r of P. fo_plan_free frees its lists.
 *
 * m        slices (FO_SLICE), sub-chunks for each owner (FO_FLASH); 1 for FO_NONE.
 * Returns 0, or -1 with the reason in err: P not in 1..FO_PLAN_MAX_RANKS, r not in 0..P-1, m not in
 * 1..FO_MAX_M. The plan is then empty.
 * Source   arXiv 2604.24013, Alg. 1 and 2 (ring), Fig. 8b (direct).
 */
int fo_plan_init(FoPlan* p, FoKind kind, FoMode mode, int m, FoTopology topology, int P, int r,
                 char err[256]);
void fo_plan_free(FoPlan* p);

/* fo_plan_check -- do the plans of all P ranks fit each other? In each exchange every message has its
 * receive in the same exchange of the peer, and every rank computes each chunk once. 0, or -1 with err.
 */
int fo_plan_check(FoKind kind, FoMode mode, int m, FoTopology topology, int P, char err[256]);

// one line, e.g. "rs flash direct m=1 P=4 r=0: 1 [1>1 0<3] 2 [2>2 0<2] 3 [3>3 0<1] 0": chunks as they are
// computed (+: a ring's add), between them exchanges [chunk>to chunk<from]. Cut at nbytes; returns buf
const char* fo_plan_print(const FoPlan* p, char* buf, size_t nbytes);

const char* fo_mode_name(FoMode mode);

#ifdef __cplusplus
}
#endif
#endif
