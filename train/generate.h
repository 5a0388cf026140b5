/* generate.h -- text from the model, on the ranks it is trained on.
 *
 * Prompts are shared out among the dp ranks. A dp rank's go through the model together, once, by the
 * schedules of training (prefill); from then on each layer's keys and values of all positions so far are
 * kept, each rank's of its own heads, and every new token costs a pass of one row a sequence (decode). Its
 * sums are too short to hide: they go by fo_allreduce, in the way that fo_model_allreduce finds fastest.
 */
#ifndef GENERATE_H
#define GENERATE_H
#include "flashoverlap/fo_allreduce.h"
#include "train/run.h"
#ifdef __cplusplus
extern "C" {
#endif

// ---- a batch of sequences ---------------------------------------------------------------------------------
typedef struct {
    GPT* g;
    int B, T, room;                // sequences; positions of the prefill, padded; of the cache
    FoAllreduce seq_plan, tp_plan; // of sums over g->seq and over the tp group
    size_t widest;                 // columns of the logits of the rank that has most
    // device memory
    floatX* cache;                           // [L, 2, B, room, Cu]
    floatX *x, *ln, *att, *qkv, *fch, *gelu; // [B, C], [B, C], [B, Cu], [B, 3*Cu], [B, F], [B, F]
    floatX* rows;                            // [up*tp, B, C] what each rank has of rows that all need
    float *mean, *rstd;                      // [B]
    float *parts, *sum;                      // [up*tp, B, C], [B, C]
    float* logits;                           // [tp, B*widest]
    int *pos, *wpe_pos, *mine, *from, *all;  // [B]
    int* host_ints;                          // [5, B], the same
    float* host_logits;                      // [tp, B*widest]
} Generator;

/* generator_shape -- how many of n sequences, the longest of which has `longest` tokens, the batch of g's
 * activations can take at once, and to how many tokens they are padded, so that the mesh can cut them. 0 if
 * not even one: its tokens are too many.
 */
int generator_shape(const GPT* g, int n, int longest, int* B, int* T);

/* generator_open -- cache and buffers for B sequences of at most `most` tokens, prefilled with T at most:
 * what generator_shape says. Beside what g has; generator_close ends it.
 */
void generator_open(Generator* x, GPT* g, int B, int T, int most);
void generator_close(Generator* x);

/* generator_prefill -- logits of the tokens that follow the prompts; fills the cache. All up and tp ranks of
 * a dp rank call it, with the same; waits. All have the same bits of the result.
 */
void generator_prefill(Generator* x, float* logits, // [B, V], host
                       const int* ids,              // [B, T], host; what follows len tokens is padding
                       const int* len);             // [B], tokens; 0: no sequence, no logits

// generator_decode -- the same for one token more of each sequence
void generator_decode(Generator* x, float* logits, // [B, V], host
                      const int* token,            // [B]
                      const int* pos);             // [B], its position; -1: none, no logits

// bytes that this rank sends in a generator_decode
size_t generator_decode_nbytes(const Generator* x);

// ---- a run ------------------------------------------------------------------------------------------------
/* generate -- goes on from tr's prompts, to -g tokens or the model's maxT, and prints on rank 0. Collective
 * over the world. stopping: asked before each token, the signal that some rank has got, or 0; it is returned.
 */
int generate(Trainer* tr, int (*stopping)(GPT* g));

#ifdef __cplusplus
}
#endif
#endif
