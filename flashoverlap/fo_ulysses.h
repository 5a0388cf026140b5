/* fo_ulysses.h -- the flash primitives of Ulysses parallelism (U1 ... U4), with those of tensor parallelism
 * (F1, F2, B4, B6) around them.
 *
 * Tokens are cut by the U ranks of an up group, heads inside attention. Two sides, then: on the *token side*
 * a rank has N rows of its own and all heads, on the *heads side* the U*N rows of the group and its own
 * heads. Rows p*N ... of the heads side are the token side's rows of rank p. Where the token side's rows are
 * cut once more, by the tp group, they are the [N, C] of fo_overlap.h, and chunks of the one run inside
 * chunks of the other.
 *
 * Heads of the tp rank are in U groups; group j goes to up rank j. Weights are stored by group, so that each
 * GEMM makes a message and no pack kernel is needed: qkvw is for each j the rows of q, k and v of group j,
 * attprojw for each j a dense [C, width of j]. Token-side activations of all heads are blocks in the same
 * order: that of group j begins at N * (channels before j), times 2 or 3 for k and v, or q, k and v.
 *
 * Order    as in fo_overlap.h: all calls queue and return. gather and reduce are plans of the tp group,
 *          scatter ones of the up group, direct reduce-scatters, each with its group's communication stream.
 * Ranks    collective over both groups, with the same N and C; heads may be uneven.
 * Errors   dies of a plan of the wrong kind, and if the ranks of gather or reduce do not divide N.
 *
 * With U = 1 each function is the primitive of tensor parallelism alone (F1 complete when F2 is called), and
 * none of the up group's buffers is used.
 * Source   DeepSpeed-Ulysses (arXiv 2309.14509) for the cut; its all-to-alls become pushes of chunks, own
 *          chunk last, as in arXiv 2604.24013.
 */
#ifndef FO_ULYSSES_H
#define FO_ULYSSES_H
#include "flashoverlap/fo_overlap.h"
#ifdef __cplusplus
extern "C" {
#endif

// the tp rank's heads, in groups
typedef struct {
    int U, u, hs;
    int head[FO_MAX_RANKS + 1]; // first head of each group; head[U]: all of them
} FoHeads;

// NH heads in U groups, as fo_cut cuts them
FoHeads fo_heads(int NH, int hs, int U, int u);

// channels of group j, and those before it
static inline size_t fo_heads_width(const FoHeads* h, int j) {
    return (size_t)((h->head[j + 1] - h->head[j]) * h->hs);
}
static inline size_t fo_heads_before(const FoHeads* h, int j) {
    return (size_t)(h->head[j] * h->hs);
}

/* fo_heads_rows -- group j on the token side, [N, per * width of j]: what came from rank j, or, of the own
 * group, the own rows of the heads side. per: 1, or 2 of k and v, or 3 of q, k and v.
 */
static inline const floatX* fo_heads_rows(const floatX* heads_side, const floatX* token_side,
                                          const FoHeads* h, int j, int per, size_t N) {
    return j == h->u ? heads_side + (size_t)h->u * N * (size_t)per * fo_heads_width(h, j)
                     : token_side + N * (size_t)per * fo_heads_before(h, j);
}

/* fo_allgather_matmul_alltoall_forward -- F1 and U1: qkv = (all tp ranks' rows) @ weight^T + bias, each head
 * group at its rank.
 *
 * Chunks of rows as they arrive, the own first; of each chunk the head groups one after the other, each
 * pushed to its rank while the next is computed, the own last. On return compute waits for all of qkv.
 */
void fo_allgather_matmul_alltoall_forward(floatX* qkv,          // [U*N, 3*own width]
                                          floatX* send,         // [N, 3*Ca] in blocks
                                          floatX* all,          // [N, C], the own rows in place
                                          const floatX* weight, // [3*Ca, C] by group
                                          const floatX* bias,   // [3*Ca] by group
                                          const FoHeads* h, size_t N, int C, FoOverlap* gather,
                                          FoOverlap* scatter);

/* fo_allgather_matmul_alltoall_dgrad -- B4 and U3: datt = (all tp ranks' rows) @ weight, in the same way.
 * fo_alltoall_end follows; work queued in between covers what is still under way.
 */
void fo_allgather_matmul_alltoall_dgrad(floatX* datt,         // [U*N, own width]
                                        floatX* send,         // [N, Ca] in blocks
                                        floatX* all,          // [N, C], the own rows in place
                                        const floatX* weight, // for each group [C, width]
                                        const FoHeads* h, size_t N, int C, FoOverlap* gather,
                                        FoOverlap* scatter);

// compute waits until everything has arrived and left
void fo_alltoall_end(FoOverlap* scatter);

/* fo_attention_alltoall_matmul_reducescatter_forward -- U2 and F2: attention of the own heads, and the
 * partial sums of the projection on their way to the rows' owners; fo_reducescatter_end of `reduce` follows.
 *
 * Attention goes by the owner of the queries, the own last, each chunk pushed to its owner. The own queries
 * are cut by the tp group: attention, then the projection, one head group after the other, the own first,
 * then as they arrived, added in fp32 in this order in every mode. Modes none and slice compute all attention
 * first.
 */
void fo_attention_alltoall_matmul_reducescatter_forward(FoStaging* st,
                                                        floatX* att,        // [U*N, own width]
                                                        floatX* att_tokens, // [N, Ca] in blocks; own: unused
                                                        float* sums,        // [N, C], for U > 1
                                                        float* lse,         // [U*N, own heads]
                                                        const floatX* qkv,  // [U*N, 3*own width]
                                                        const floatX* weight, // for each group [C, width]
                                                        FoLayout l, const FoHeads* h, int C,
                                                        FoOverlap* scatter, FoOverlap* reduce);

// what U4 works on
typedef struct {
    float* dq32;                    // [U*N, own width], sums over keys
    floatX *dq, *dkv;               // [U*N, own width], [U*N, 2*own width]
    floatX *dq_tokens, *dkv_tokens; // [N, Ca], [N, 2*Ca] in blocks; the own block is unused
} FoHeadGrads;

/* fo_attention_backward_alltoall -- U4: dk and dv of one shard of keys after the other, the own last, each
 * pushed to its owner while the next is computed; then dq, which is complete only now, under whatever is
 * queued next. For U > 1; scatter_kv has m = 1, for shards of keys are whole.
 * fo_matmul_reducescatter_dgrad_heads consumes both as they arrive.
 */
void fo_attention_backward_alltoall(const FoHeadGrads* d,
                                    const floatX* datt, // [U*N, own width]
                                    const floatX* qkv,  // [U*N, 3*own width]
                                    const floatX* att,  // [U*N, own width]
                                    const float* lse,   // [U*N, own heads]
                                    FoLayout l, const FoHeads* h, FoOverlap* scatter_kv,
                                    FoOverlap* scatter_q);

/* fo_matmul_reducescatter_dgrad_heads -- B6 behind U4: the partial sums of dqkv @ weight on their way to the
 * rows' owners, dk and dv of all groups first, own first, dq after them. fo_reducescatter_end of `reduce`
 * follows.
 */
void fo_matmul_reducescatter_dgrad_heads(FoStaging* st,
                                         float* sums, // [N, C]
                                         const FoHeadGrads* d,
                                         const floatX* weight, // [3*Ca, C] by group
                                         const FoHeads* h, size_t N, int C, FoOverlap* scatter_kv,
                                         FoOverlap* scatter_q, FoOverlap* reduce);

#ifdef __cplusplus
}
#endif
#endif
