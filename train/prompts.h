// prompts.h -- what sequences go on from: --prompt, the lines of --prompt-file, or nothing.
#ifndef PROMPTS_H
#define PROMPTS_H
#include "data/tokenizer.h"
#include "train/options.h"
#ifdef __cplusplus
extern "C" {
#endif

// all zero: none
typedef struct {
    int n;
    int given;   // 0: a single sequence that starts from the token that ends a document
    int longest; // tokens
    int* first;  // [n + 1], of each in ids
    int* ids;
} Prompts;

/* prompts_init -- reads and encodes opt's prompts; V, maxT: the model's.
 *
 * A file has one a line; a carriage return before the line's end and empty lines are passed over. Each goes
 * on by one token at least, within -g and maxT. Returns 0, or -1 with one line in err: no such file, no
 * prompt in it, a byte that is no token, too long. Then, too, prompts_free.
 */
int prompts_init(Prompts* p, const TrainOptions* opt, const Tokenizer* tk, int V, int maxT,
                 char err[TRAIN_ERR]);
void prompts_free(Prompts* p);

static inline int prompts_tokens(const Prompts* p, int i) {
    return p->first[i + 1] - p->first[i];
}

#ifdef __cplusplus
}
#endif
#endif
