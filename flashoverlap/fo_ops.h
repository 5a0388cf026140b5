/* fo_ops.h -- what a GPT's layers compute, forward and backward: part two of the cut.
 *
 * Every function queues on stream s and returns at once. Inputs must stay as they are until s has passed the
 * call; outputs are complete for whatever is queued on s afterwards. Shapes are row-major. Counts are
 * elements unless they are called nbytes. floatX, FoDtype: fo.h. Sums are taken in fp32 (norms in double) in
 * an order that does not depend on the number of threads: same input, same bits. What belongs to a row does
 * not depend on how rows are cut into calls, either; sums over rows (gradients of weights and biases) do, so
 * callers cut them in the same way in every mode.
 *
 * n, N rows; C channels; K the width summed over, OC output channels, NH heads of this rank, hs head size.
 */
#ifndef FO_OPS_H
#define FO_OPS_H
#include "flashoverlap/fo.h"
#ifdef __cplusplus
extern "C" {
#endif

// first of `n` things that rank r of P has. The first n % P ranks have one more than the others
static inline size_t fo_cut(size_t n, int P, int r) {
    size_t q = n / (size_t)P, rest = n % (size_t)P, k = (size_t)r;
    return k * q + (k < rest ? k : rest);
}
// how many it has
static inline size_t fo_cut_n(size_t n, int P, int r) {
    return fo_cut(n, P, r + 1) - fo_cut(n, P, r);
}

// ---- order of rows ----------------------------------------------------------------------------------------
/* FoLayout -- which (b, t) a row of a group's [B*T, C] activation is.
 *
 * Shard p of P is rows [p*N/P, (p+1)*N/P), N = B*T. zigzag 0: whole sequences, row = b*T + t (B % P == 0).
 * zigzag 1: each sequence is cut into 2P blocks of T/(2P); shard p holds, for each b, block p and then block
 * 2P-1-p.
 */
typedef struct {
    int B, T, P, zigzag;
} FoLayout;

// the row of (b, t)
static inline size_t fo_layout_row(FoLayout l, int b, int t) {
    if (!l.zigzag) { return (size_t)b * (size_t)l.T + (size_t)t; }
    int block = l.T / (2 * l.P), k = t / block;
    int p = k < l.P ? k : 2 * l.P - 1 - k;
    size_t per_shard = (size_t)l.B * (size_t)(2 * block);
    return (size_t)p * per_shard + (size_t)b * (size_t)(2 * block) + (size_t)(k < l.P ? 0 : block) +
           (size_t)(t % block);
}

// positions that follow each other in rows: T, or a block
static inline int fo_layout_run(FoLayout l) {
    return l.zigzag ? l.T / (2 * l.P) : l.T;
}

// ---- rows -------------------------------------------------------------------------------------------------
// out[i] = inp[idx[i]], i < n
void fo_gather_rows(floatX* out,       // [n, C]
                    const floatX* inp, // [*, C]
                    const int* idx,    // [n], device memory
                    size_t n, int C, FoStream* s);

// out[dst[u]] += sum of rows[order[k]], k = start[u] ... start[u+1]-1, in that order; each dst[u] occurs once
void fo_scatter_add_rows(float* out,         // [*, C]
                         const floatX* rows, // [*, C]
                         const int* dst,     // [nuniq]
                         const int* start,   // [nuniq + 1]
                         const int* order,   // [start[nuniq]]
                         size_t nuniq, int C, FoStream* s);

// out[dst[i]] += rows[i], i < n; each dst[i] occurs once
void fo_add_rows(float* out,        // [*, C]
                 const float* rows, // [n, C]
                 const int* dst,    // [n], device memory
                 size_t n, int C, FoStream* s);

// token plus position: out[tok[i]] = rows[i] + wpe[pos[tok[i]]], i < n. rows are wte's, fetched from their
// owners
void fo_encoder_forward(floatX* out,        // [*, C]
                        const floatX* rows, // [n, C]
                        const floatX* wpe,  // [maxT, C]
                        const int* tok,     // [n]
                        const int* pos,     // [*], position of each row of out
                        size_t n, int C, FoStream* s);

// ---- layer norm -------------------------------------------------------------------------------------------
// out = (inp - mean) * rstd * weight + bias over C, eps 1e-5
void fo_layernorm_forward(floatX* out,                              // [n, C]
                          float* mean, float* rstd,                 // [n]
                          const floatX* inp,                        // [n, C]
                          const floatX* weight, const floatX* bias, // [C]
                          size_t n, int C, FoStream* s);

// dinp += ...; dweight += ..., dbias += ... (the caller's accumulators, fp32)
void fo_layernorm_backward(floatX* dinp,                         // [n, C], read and written
                           float* dweight, float* dbias,         // [C]
                           const floatX* dout,                   // [n, C]
                           const floatX* inp,                    // [n, C]
                           const floatX* weight,                 // [C]
                           const float* mean, const float* rstd, // [n]
                           size_t n, int C, FoStream* s);

// ---- matmul -----------------------------------------------------------------------------------------------
// Weights are [OC, K], as llm.c stores them. A row of the result has the same bits however rows are cut into
// calls.

// out = inp @ weight^T + bias
void fo_matmul_forward(void* out,            // [n, OC] of out_type (floatX or fp32)
                       const floatX* inp,    // [n, K]
                       const floatX* weight, // [OC, K]
                       const floatX* bias,   // [OC], or NULL
                       size_t n, int K, int OC, FoDtype out_type, FoStream* s);

// out = inp @ weight^T + bias, gelu = GELU(out). One kernel or two: fo_device_fuse_gelu
void fo_matmul_gelu_forward(floatX* out,          // [n, OC]
                            floatX* gelu,         // [n, OC]
                            const floatX* inp,    // [n, K]
                            const floatX* weight, // [OC, K]
                            const floatX* bias,   // [OC], or NULL
                            size_t n, int K, int OC, FoStream* s);

// out += inp @ weight^T
void fo_matmul_forward_add(float* out,           // [n, OC]
                           const floatX* inp,    // [n, K]
                           const floatX* weight, // [OC, K]
                           size_t n, int K, int OC, FoStream* s);

// dinp = dout @ weight
void fo_matmul_dgrad(void* dinp,           // [n, K] of out_type
                     const floatX* dout,   // [n, OC]
                     const floatX* weight, // [OC, K]
                     size_t n, int K, int OC, FoDtype out_type, FoStream* s);

// dinp = (dout @ weight) * GELU'(pregelu). One kernel or two: fo_device_fuse_gelu
void fo_matmul_gelu_dgrad(floatX* dinp,          // [n, K]
                          const floatX* dout,    // [n, OC]
                          const floatX* weight,  // [OC, K]
                          const floatX* pregelu, // [n, K]
                          size_t n, int K, int OC, FoStream* s);

// dinp += dout @ weight
void fo_matmul_dgrad_add(float* dinp,          // [n, K]
                         const floatX* dout,   // [n, OC]
                         const floatX* weight, // [OC, K]
                         size_t n, int K, int OC, FoStream* s);

// dweight += dout^T @ inp; dbias += column sums of dout
void fo_matmul_wgrad(float* dweight,     // [OC, K]
                     float* dbias,       // [OC], or NULL
                     const floatX* dout, // [n, OC]
                     const floatX* inp,  // [n, K]
                     size_t n, int K, int OC, FoStream* s);

// rows [row0, row0 + nrows) of dweight += dout[:, row0 ... row0+nrows)^T @ inp: a weight gradient cut by its
// owners. dweight points at row 0 of the whole. nrows may be 0
void fo_matmul_wgrad_rows(float* dweight,     // [OC, K]
                          const floatX* dout, // [n, OC]
                          const floatX* inp,  // [n, K]
                          size_t row0, size_t nrows, size_t n, int K, int OC, FoStream* s);

// dbias += column sums of dout (bias gradients whose matmul is elsewhere)
void fo_bias_backward(float* dbias,       // [C]
                      const floatX* dout, // [n, C]
                      size_t n, int C, FoStream* s);

// ---- elementwise ------------------------------------------------------------------------------------------
// tanh form, as GPT-2
void fo_gelu_forward(floatX* out, const floatX* inp, size_t nelem, FoStream* s);
// dinp = dout * gelu'(inp); in place: dinp may be dout
void fo_gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t nelem, FoStream* s);

/* fo_accumulate -- out = residual + bias + parts[0] + ... + parts[P-1], in fp32 in this order, one rounding.
 *
 * The owner's side of a reduce-scatter. parts is a host array, copied by the call; its pointers are of
 * part_type. In place: out may be residual. residual and bias may be NULL.
 */
void fo_accumulate(floatX* out,               // [n, C]
                   const void* const parts[], // P pointers to [n, C]
                   const floatX* residual,    // [n, C], or NULL
                   const floatX* bias,        // [C], or NULL
                   size_t n, int C, int P, FoDtype part_type, FoStream* s);
#ifndef FO_MAX_RANKS // simulated ones may be more
#define FO_MAX_RANKS 16
#endif

// acc += part, both of `type`, one rounding: a hop of a ring reduce-scatter
void fo_add(void* acc, const void* part, size_t nelem, FoDtype type, FoStream* s);

// out = sum of P fp32 vectors parts[0] ... parts[P-1] in this order; in place: out may be one of them
void fo_sum(float* out, const float* const parts[], size_t nelem, int P, FoStream* s);

// ---- attention --------------------------------------------------------------------------------------------
/* fo_attention_forward -- causal self-attention of the queries in rows [row0, row0 + n), scale 1/sqrt(hs).
 *
 * Keys and values of earlier positions of the same sequences must be complete in qkv; queries outside the
 * rows are not read, their rows of out and lse not written. No [T, T] matrix is ever stored for more than a
 * block of queries. A row has the same bits however rows are cut into calls.
 */
void fo_attention_forward(floatX* out,       // [N, NH*hs]
                          float* lse,        // [N, NH], log of the sum of exp(score)
                          const floatX* qkv, // [N, 3*NH*hs]: q of all heads, then k, then v
                          size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s);

// d(qkv) of the whole sequences whose rows are [row0, row0 + n); with zigzag: of all, row0 0 and n N
void fo_attention_backward(floatX* dqkv,       // [N, 3*NH*hs]
                           const floatX* dout, // [N, NH*hs]
                           const floatX* qkv,  // [N, 3*NH*hs]
                           const floatX* out,  // [N, NH*hs]
                           const float* lse,   // [N, NH]
                           size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s);

/* fo_attention_backward_kv -- dk and dv of the keys in rows [row0, row0 + n), and what these keys add to dq.
 *
 * The rows are whole shards (with whole sequences: whole sequences). dk and dv are final, so they can leave
 * while the next shard is computed; dq is complete after calls for all rows: zero it before the first. dk and
 * dv have the bits of fo_attention_backward; those of dq depend on the calls and their order.
 */
void fo_attention_backward_kv(float* dq,   // [N, NH*hs], read and written
                              floatX* dkv, // [N, 2*NH*hs]: k of all heads, then v; the rows are written
                              const floatX* dout, // [N, NH*hs]
                              const floatX* qkv,  // [N, 3*NH*hs]
                              const floatX* out,  // [N, NH*hs]
                              const float* lse,   // [N, NH]
                              size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s);

// keys and values of a prefill into the cache of a decode: those of position t of sequence b to
// cache[0][b][t] and cache[1][b][t], t < T of the layout, T <= room
void fo_attention_cache(floatX* cache,     // [2, B, room, NH*hs]
                        const floatX* qkv, // [N, 3*NH*hs]
                        FoLayout l, int room, int NH, int hs, FoStream* s);

/* fo_attention_decode -- attention of one new token of each of B sequences.
 *
 * The token's key and value go to position pos[b] of the cache, pos[b] < room; then its query sees positions
 * 0 ... pos[b]. Where pos[b] < 0 the row is idle: its out is 0, its cache stays. Rounds where
 * fo_attention_forward does; the order of its sums is another.
 */
void fo_attention_decode(floatX* out,       // [B, NH*hs]
                         floatX* cache,     // [2, B, room, NH*hs], read and written
                         const floatX* qkv, // [B, 3*NH*hs]
                         const int* pos,    // [B], device memory
                         int B, int room, int NH, int hs, FoStream* s);

// ---- loss, vocabulary cut by rank -------------------------------------------------------------------------
// a rank's share of a row's softmax: over its columns, the largest logit, sum of exp(logit - max), and the
// logit of the target (0 where another rank has it): 12 bytes a token
typedef struct {
    float max, sum, target;
} FoSoftmaxStat;

// the columns of logits are vocabulary entries v0 ... v0+V-1; those at and beyond `valid` columns are
// padding: ignored
void fo_softmax_stats(FoSoftmaxStat* stats, // [n]
                      const floatX* logits, // [n, V]
                      const int* targets,   // [n], in the whole vocabulary
                      size_t n, int V, int valid, int v0, FoStream* s);

/* fo_softmax_loss -- losses[i] = -log softmax(row i)[target], from all ranks' stats in rank order; unless
 * dscale is 0, logits become the gradient of dscale * (losses[i] + z * log(Z)^2), Z the sum of exp over the
 * vocabulary: dscale * ((1 + 2 z log Z) * softmax - onehot), padding columns 0.
 */
void fo_softmax_loss(float* losses,              // [n]
                     floatX* logits,             // [n, V], read; written unless dscale is 0
                     const FoSoftmaxStat* stats, // [P, n]
                     const int* targets,         // [n]
                     float dscale, float z, size_t n, int V, int valid, int v0, int P, FoStream* s);

// ---- optimizer --------------------------------------------------------------------------------------------
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float grad_scale; // the gradient is multiplied by it first
    int t;            // step, from 1
} FoAdamw;

// m = b1*m + (1-b1)*g, v = b2*v + (1-b2)*g*g; master -= lr*(m^/(sqrt(v^)+eps) + wd*master); param = master
// rounded. FP32 builds: param and master may be the same memory.
void fo_adamw_update(floatX* param, float* master, float* m, float* v, const float* grad, size_t nelem,
                     FoAdamw a, FoStream* s);

// *out += sum of squares, in double, in blocks of fixed size
void fo_square_sum(double* out, const float* x, size_t nelem, FoStream* s);

#ifdef __cplusplus
}
#endif
#endif
