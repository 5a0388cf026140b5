/* attention_calls.h -- attention as calls of an engine that knows sequences and strides, but not our rows.
 *
 * cuDNN is such an engine (attention_cudnn.cu, cudnn_graph.cu); dev/test/test_attention_calls.c has another,
 * by which the cutting into calls, the order of rows and the buffers are tested where there is no cuDNN.
 * A call is several equal heads of several equal stretches of sequences: queries and keys that follow each
 * other, at strides of their own. What rows a call of fo_ops.h has, and so which stretches, is decided here.
 * Also C.
 */
#ifndef FO_CUDA_ATTENTION_CALLS_H
#define FO_CUDA_ATTENTION_CALLS_H
#include "flashoverlap/fo_ops.h"
#ifdef __cplusplus
extern "C" {
#endif

/* FoSdpa -- one call, without its addresses: what an engine makes a plan for. Compared byte by byte.
 *
 * The heads of a row lie side by side, hs elements each. *_seq, *_row: elements from a sequence, from a row,
 * to the next. k and v have the same strides, and so have dk and dv, out and dout.
 * Query i sees the keys 0 ... i (bottom_right 0), or 0 ... i + keys - queries (1). The scale is 1/sqrt(hs).
 */
typedef struct {
    int64_t nseq, heads, queries, keys, hs;
    int64_t q_seq, q_row, kv_seq, kv_row, out_seq, out_row;
    int64_t dq_seq, dq_row, dkv_seq, dkv_row; // backward; else 0
    int64_t bottom_right, backward;
} FoSdpa;

/* The arrays of a call. lse, delta and dq_sum are packed: [nseq, heads, queries], and [.., hs]; lse is the
 * natural logarithm of the sum of the exponentials of scaled scores.
 */
typedef struct {
    floatX* out;             // forward: written; backward: read
    float* lse;              // likewise
    const floatX *q, *k, *v; // read
    const floatX* dout;      // backward: read
    floatX *dq, *dk, *dv;    // backward: written
    float *delta, *dq_sum;   // backward: scratch; dq_sum where wants_dq_sum
    void* workspace;         // scratch
} FoSdpaArrays;

typedef struct {
    size_t workspace_nbytes;
    int wants_dq_sum;
} FoSdpaNeeds;

typedef struct {
    void* ctx;
    // makes the engine ready for such a call; 0: it refuses
    int (*plan)(void* ctx, const FoSdpa* call, FoSdpaNeeds* needs);
    // queues it on s
    void (*run)(void* ctx, const FoSdpa* call, const FoSdpaArrays* arrays, FoStream* s);
} FoSdpaEngine;

// ---- which calls ------------------------------------------------------------------------------------------
typedef enum { FO_SDPA_FORWARD, FO_SDPA_BACKWARD, FO_SDPA_BACKWARD_KV } FoSdpaKind;

/* What has to be put into the order of positions, [B, T, ...], before the calls; the rest is taken at its
 * rows. FO_SDPA_KEYS: k and v, beside each other. FO_SDPA_QUERIES: q, out and dout. FO_SDPA_ALL: qkv, out
 * and dout; and the gradients have to be put back.
 */
typedef enum { FO_SDPA_NONE, FO_SDPA_KEYS, FO_SDPA_QUERIES, FO_SDPA_ALL } FoSdpaGather;

/* A call, and where its first rows are: q_first is the position of its first query, q_at the row of that in
 * the array that q, out and dout are taken from, gathered or not; kv_at likewise that of the first key.
 */
typedef struct {
    FoSdpa sdpa;
    int seq0, q_first;
    size_t q_at, kv_at;
} FoSdpaCall;

enum { FO_SDPA_CALLS = 6 * FO_MAX_RANKS }; // at most: each run of positions, cut in three

/* fo__sdpa_calls -- the calls for rows [row0, row0 + n), as fo_ops.h has them; returns how many.
 *
 * dq of FO_SDPA_BACKWARD_KV is packed, [nseq, queries, NH*hs]; all other arrays are as in fo_ops.h.
 */
int fo__sdpa_calls(FoSdpaCall calls[FO_SDPA_CALLS], FoSdpaGather* gather, FoSdpaKind kind, size_t row0,
                   size_t n, FoLayout l, int NH, int hs);

// ---- attention by an engine -------------------------------------------------------------------------------
/* The attention functions of fo_ops.h, by the engine: 1, or 0 with nothing queued where it refuses.
 *
 * Order    queued on s. Device memory beside the arguments is s's scratch.
 * Refused  head sizes that are no multiple of 8, arrays that are not 16-byte aligned, what the engine
 *          refuses.
 */
int fo__sdpa_forward(const FoSdpaEngine* e, floatX* out, float* lse, const floatX* qkv, size_t row0, size_t n,
                     FoLayout l, int NH, int hs, FoStream* s);
int fo__sdpa_backward(const FoSdpaEngine* e, floatX* dqkv, const floatX* dout, const floatX* qkv,
                      const floatX* out, const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs,
                      FoStream* s);
int fo__sdpa_backward_kv(const FoSdpaEngine* e, float* dq, floatX* dkv, const floatX* dout, const floatX* qkv,
                         const floatX* out, const float* lse, size_t row0, size_t n, FoLayout l, int NH,
                         int hs, FoStream* s);

#ifdef __cplusplus
}
#endif
#endif
