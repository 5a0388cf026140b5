/* nonfinite.h -- what was being done when a loss or a gradient's norm was not finite: the end of a run. */
#ifndef NONFINITE_H
#define NONFINITE_H
#include "train/run.h"
#ifdef __cplusplus
extern "C" {
#endif

/* nonfinite_stop -- tells of the step at hand, between gpt_reduce and the update: loss, norm, rate; of
 * each rank how many tensors hold what is not finite, weights in the order of the forward pass, gradients in
 * that of the backward pass, and the first of them; the losses of its micro-steps, and where their tokens
 * stand.
 *
 * A few lines on stderr, all of them in nan_STEP.txt in the folder of -o. Waits; looks through all of the
 * parameters. Collective. Returns -1 with the user's error in err, the same on all ranks.
 */
int nonfinite_stop(Trainer* tr, double loss, double norm, double lr, char err[TRAIN_ERR]);

#ifdef __cplusplus
}
#endif
#endif
