/* fit.h -- does a rank's memory fit its device, and if not, which options would make it fit? */
#ifndef FIT_H
#define FIT_H
#include "train/gpt.h"
#ifdef __cplusplus
extern "C" {
#endif

/* fit_check -- 0 if what rank `rank` of opt's mesh allocates is nfree bytes at most; else -1, and err says
 * what each part takes and which values of -r, -b, --tp and -z, one at a time, would fit.
 */
int fit_check(const TrainOptions* opt, GPTConfig c, int rank, size_t nfree, char err[TRAIN_ERR]);

#ifdef __cplusplus
}
#endif
#endif
