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

/* fo_model_in_turn -- a gather, [0], and a reduce-scatter, [1], in FO_FLASH whose computations take turns,
 * shard by shard: F1 and F2 where shards are whole sequences. With W of the one and V of the other:
 *
 *   max(0, t_m - (2 - 1/m) W/P, (P-1) t_m - (P - 1/m) W/P - (P-2) V/P)
 *
 * The first arrival has nothing but the own chunk to hide under, the last one all that stands before it; for
 * the reduce-scatter the same from behind. Both use one link, so together they expose at least
 * T[0] + T[1] - W - V: what that is more counts as the reduce-scatter's.
 */
void fo_model_in_turn(int P, const int m[2], const double shard_s[2], const double compute_s[2],
                      double exposed_s[2]);

/* FoMeasured -- one call of an operation on a rank, as it was measured: what fo_model_chunks decides by. */
enum { FO_MODEL_MOST = 3 }; // it tries m = 1, 2, 4
typedef struct {
    double latency_s, shard_s;       // of a message without bytes; of one that is a shard
    double compute_s[FO_MODEL_MOST]; // W, cut into 1, 2, 4 sub-chunks a shard
    // of what is computed before the last of the data is needed, but in no sub-chunk: the wgrad behind a
    // reduce-scatter; what a gather is queued ahead of
    double cover_s;
} FoMeasured;

/* fo_model_chunks -- m of FO_FLASH for which W + exposed time is least, of 1, 2 and 4, at most `most`.
 *
 * A gain of less than 1 % is none: the smaller m. That smaller chunks are computed faster is taken for noise.
 * No other mode is tried: plain and sliced plans of the same m compute the same chunks as flash, send the
 * same messages, and never expose less (test_model.c).
 * exposed_s  unless NULL, what that m leaves exposed.
 * Errors     none: one rank has nothing to hide, m 1.
 */
int fo_model_chunks(const FoMeasured* x, int P, int most, double* exposed_s);

/* fo_model_chunks_in_turn -- the same of two operations that take turns (fo_model_in_turn): m[2] for which
 * both computations and what both expose are least together. Their cover_s is not looked at.
 */
void fo_model_chunks_in_turn(const FoMeasured x[2], int P, const int most[2], int m[2], double exposed_s[2]);

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
