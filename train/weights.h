/* weights.h -- initial weights of a GPT, as llm.c draws them.
 *
 * They go a few MB at a time through the host: beside a rank's arrays there is no room for another copy of
 * its part. Read next: tensors.h, which says what a rank's part is.
 */
#ifndef WEIGHTS_H
#define WEIGHTS_H
#include "flashoverlap/fo.h"
#include "train/tensors.h"
#ifdef __cplusplus
extern "C" {
#endif

/* weights_random -- this rank's parts of new weights.
 *
 * params   rounded, [ts->nelem]; NULL: none. master: fp32, [os->nelem]; NULL: none. Device memory, zeros:
 *          what is not drawn (biases, padding rows of wte) stays as it is. In an FP32 build the two may be
 *          the same memory if ts and os are of the same cuts
 * s        has passed all of it on return
 *
 * Normal values of deviation 0.02, of 0.02 / sqrt(2L) in the two projections back to the residual stream;
 * layer norms begin as 1. Every rank draws the whole model's numbers, in llm.c's order: they do not depend on
 * the mesh.
 */
void weights_random(const Tensors* ts, floatX* params, const Tensors* os, float* master, int seed,
                    FoStream* s);

#ifdef __cplusplus
}
#endif
#endif
