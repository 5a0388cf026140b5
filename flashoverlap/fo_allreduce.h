/* fo_allreduce.h -- sums of few bytes, which every rank needs at once: those of a decoded token.
 *
 * There is nothing to hide such a sum under: the next operation needs all of it. What counts is how often it
 * waits for the link's latency, so these are no plans of fo_plan.h, whose exchanges follow each other, but
 * one exchange or two in which all messages leave at once. Which is faster: fo_model_allreduce.
 */
#ifndef FO_ALLREDUCE_H
#define FO_ALLREDUCE_H
#include "flashoverlap/fo_comm.h"
#include "flashoverlap/fo_model.h"
#ifdef __cplusplus
extern "C" {
#endif

/* fo_allreduce -- sum = parts of all ranks, on every rank.
 *
 * Numbers  fp32, added in rank order: every rank and either plan has the same bits.
 * Order    queued on s, exchanges included; nothing of the group may be under way on another stream.
 * Ranks    collective over g; same plan and nelem. A rank sends fo_allreduce_nbytes.
 */
void fo_allreduce(FoAllreduce plan, float* sum, // [nelem]
                  float* parts, // [P, nelem], the own part in place; the others are overwritten
                  size_t nelem, FoGroup* g, FoStream* s);

// what rank r of P sends
size_t fo_allreduce_nbytes(FoAllreduce plan, size_t nelem, int P, int r);

#ifdef __cplusplus
}
#endif
#endif
