/* weights.h -- initial weights of a GPT, as llm.c draws them, and parameters from fp32 masters.
 *
 * Both go a few MB at a time through the host: beside a rank's arrays there is no room for another copy of
 * its part. Read next: tensors.h, which says what a rank's part is.
 */
#ifndef WEIGHTS_H
#define WEIGHTS_H
#include "flashoverlap/fo.h"
#include "train/tensors.h"
#ifdef __cplusplus
extern "C" {
#endif

/* weights_random -- this rank's part of new weights.
 *
 * master   [ts->nelem], device memory, zeros: what is not drawn (biases, padding rows of wte) stays as it is
 * s        has passed all of it on return
 *
 * Normal values of deviation 0.02, of 0.02 / sqrt(2L) in the two projections back to the residual stream;
 * layer norms begin as 1. Every rank draws the whole model's numbers, in llm.c's order: they do not depend on
 * P.
 */
void weights_random(const Tensors* ts, int seed, float* master, FoStream* s);

// params [nelem] become masters, rounded; device memory, which s has passed on return. Nothing in an FP32
// build, where the two are the same array.
void weights_round(floatX* params, const float* master, size_t nelem, FoStream* s);

#ifdef __cplusplus
}
#endif
#endif
