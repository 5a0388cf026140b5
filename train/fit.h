/* fit.h -- does a model fit its ranks: can the mesh cut it, does a rank's memory hold its part, and if not,
 * which options would make it fit?
 */
#ifndef FIT_H
#define FIT_H
#include "train/gpt.h"
#ifdef __cplusplus
extern "C" {
#endif

// is there a head for each rank of up * tp? 0, or -1 with the reason
int check_heads(const TrainOptions* opt, GPTConfig c, char err[TRAIN_ERR]);
// Can this model, batch and mode be cut across the mesh? 0, or -1 with the reason and what would work
int check_cuts(const TrainOptions* opt, GPTConfig c, char err[TRAIN_ERR]);

static inline size_t total_nbytes(GPTBytes b) {
    return b.params + b.grads + b.optimizer + b.acts;
}

// what the rank that needs most of opt's mesh allocates, and which it is, the first of equals
GPTBytes fit_most(const TrainOptions* opt, GPTConfig c, int* rank);

/* fit_check -- 0 if what rank `rank` of opt's mesh allocates is nfree bytes at most; else -1, and err says
 * what each part takes and what would fit, where every device has nfree bytes, for the rank that then needs
 * most: of -r, -b, -z, --up and --tp, each alone, the value that changes least; if none is enough, two of
 * them; if that is not, as many as it takes, or how far from enough they are. --up and --tp keep the number
 * of ranks where --dp can give way, and else say how many devices they want. opt is one that check_cuts
 * takes.
 */
int fit_check(const TrainOptions* opt, GPTConfig c, int rank, size_t nfree, char err[TRAIN_ERR]);

#ifdef __cplusplus
}
#endif
#endif
