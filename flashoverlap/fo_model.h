/* fo_model.h -- the time model: how long a collective takes, and how much of it each schedule leaves exposed;
 * which plan is fastest for the few bytes of a decoded token.
 *
 * Pure functions of seconds, nothing measured here. dev/test/test_model.c checks them against a simulation of
 * the plans of fo_plan.h; dev/bench/bench_overlap.c prints them beside what it measures.
 *
 * Words    one collective beside the computation that is to hide it, on one of P ranks.
 *          shard_s: seconds in which a link moves a rank's shard (S/P bytes);
 *          T = (P-1) * shard_s: the collective alone;
 *          W, compute_s: the computation alone, all P shards of it.
 */
#ifndef FO_MODEL_H
#define FO_MODEL_H
#include "flashoverlap/fo_plan.h"
#ifdef __cplusplus
extern "C" {
#endif

// seconds of one shard as m messages, each of which costs the latency again
double fo_model_shard_s(double gbytes_s, double latency_us, size_t shard_nbytes, int m);

// T: what the plain collective takes
double fo_model_collective_s(int P, double shard_s);

/* fo_model_exposed_s -- seconds that the computation stands waiting, beyond W.
 *
 *   none      T
 *   slice m   T/m + (m-1)/m * max(0, T - W)              the first or last slice has nothing to hide under
 *   flash m   max(0, T - (P - 1/m) * W/P)                all but one sub-chunk's computation hides it
 *
 * The same for all-gather and reduce-scatter, direct and ring. It is what the plans do with equal chunks and
 * no contention, but for one: a ring's sliced reduce-scatter with shard_s > W/P takes up to W/6 longer. The
 * final sum of a reduce-scatter, a ring's adds and the loss of speed of small chunks are not in it.
 * Errors   none: one rank (P < 2) has nothing to send, 0; m below 1 counts as 1.
 */
double fo_model_exposed_s(FoMode mode, int m, int P, double shard_s, double compute_s);

/* FoAllreduce -- how the sum of P ranks' vectors comes to all of them, if it is short (fo_allreduce.h). A
 * ring is none of them: it takes 2(P-1) latencies for the bytes of FO_SCATTER, so it is never faster where
 * each rank can send to each.
 */
typedef enum {
    FO_PUSH,   // everything to everyone
    FO_SCATTER // each rank's share to it, and its sum back to all
} FoAllreduce;

/* fo_model_allreduce_s -- seconds of an all-reduce of nbytes, on a link that sends one message at a time,
 * while the latencies of several pass at once.
 *
 *   push      1 latency     (P-1) * nbytes
 *   scatter   2 latencies   2 (P-1) * nbytes/P, shares rounded up to a float
 */
double fo_model_allreduce_s(FoAllreduce plan, int P, size_t nbytes, double gbytes_s, double latency_us);

// the faster one; push if they are equal
FoAllreduce fo_model_allreduce(int P, size_t nbytes, double gbytes_s, double latency_us);
const char* fo_allreduce_name(FoAllreduce plan);

#ifdef __cplusplus
}
#endif
#endif
