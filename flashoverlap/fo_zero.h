/* fo_zero.h -- the flash primitives of data parallelism and ZeRO (D1, D2, D3), over ranks that hold the same
 * weights ("replicas").
 *
 * The rows of each weight have an owner: rank p of P has those from fo_cut(rows, P, p) on. A weight's
 * gradient is computed by owner, own rows last, each part pushed to its owner while the next is computed
 * (D1); the owner adds them in rank order, in fp32. Updated rows come back the same way, under what is
 * computed next (D3). Rows of the token embedding are few: they travel alone (D2).
 */
#ifndef FO_ZERO_H
#define FO_ZERO_H
#include "flashoverlap/fo_overlap.h"
#ifdef __cplusplus
extern "C" {
#endif

// ---- D1: gradients of weights -----------------------------------------------------------------------------
// one gradient on its way to the owners: zeros, and what the caller sets
typedef struct {
    FoOverlap* o;    // a direct reduce-scatter
    float* received; // [P-1, most elements of an owner's rows]
    float* temp; // NULL; or [most elements]: the gradient is computed here, from 0, not in dweight (ZeRO 2)
    // fo_reducer_wgrad's own: what the end has to do
    int pending;
    float *all, *own; // [rows, K] as computed; the own rows of them
    float* shard;
    FoOverlap* back;
    size_t rows, K;
} FoGradSlot;

#define FO_GRAD_SLOTS 4

/* FoReducer -- some gradients at a time are under way: one is computed and pushed, while what remains of
 * those before it arrives. As many as a layer has weights, so that a large one may arrive under a layer's
 * computation.
 */
typedef struct {
    FoGradSlot slot[FO_GRAD_SLOTS]; // set by the caller; the rest are zeros at first
    int next;
    FoGradSlot* apart; // of the caller's own, was run and has not ended
} FoReducer;

/* fo_reducer_wgrad -- D1: dweight += dout^T @ inp, summed over ranks at the rows' owners.
 *
 * dweight  [OC, K]: what earlier micro-steps have added is in it, and travels. The own rows become the sum
 *          once the reducer has ended it, the others are spent. It must stay untouched until then. Not used
 *          with a slot that has its own room (temp).
 * slot     NULL: the next of the reducer's; or one of the caller's, which ends at fo_reducer_flush.
 * shard    NULL; or [own rows, K]: the sum is added to it (ZeRO 2).
 * back     NULL; or a gather over the same ranks: the sums come back to all ranks, into dweight (ZeRO 0);
 *          fo_allgather_end(back) waits.
 * Order    the FO_GRAD_SLOTS-th after it or fo_reducer_flush ends it. One rank: the plain GEMM, nothing
 *          pends.
 */
void fo_reducer_wgrad(FoReducer* r, FoGradSlot* slot, float* dweight, float* shard, FoOverlap* back,
                      const floatX* dout, // [n, OC]
                      const floatX* inp,  // [n, K]
                      size_t n, int K, int OC);
// ends what pends, in the order in which it was run: own rows are complete for what is queued on the compute
// stream from now on
void fo_reducer_flush(FoReducer* r);

// ---- D3: rows come back -----------------------------------------------------------------------------------
/* fo_allgather_rows_begin -- D3: of all [N, row_nbytes] the own rows (fo_cut) are in place, the others
 * arrive. o: a gather. fo_allgather_end(o) waits for all that were begun with it.
 */
void fo_allgather_rows_begin(FoOverlap* o, void* all, size_t row_nbytes, size_t N);

// ---- D2: the embedding's part of wte ----------------------------------------------------------------------
/* FoSparse -- which rows of the table have a gradient from which rank, for one batch. Every rank knows the
 * tokens of all, so nothing but rows travels. Arrays: device memory, filled by fo_sparse_set.
 */
typedef struct {
    size_t rows;                   // of the table, on this rank
    size_t most;                   // different rows that a rank's batch can have
    size_t give[FO_MAX_RANKS + 1]; // the own compact rows [give[p], give[p+1]) belong to p
    size_t take[FO_MAX_RANKS + 1]; // rank p's gradient rows of own rows are entries [take[p], take[p+1])
    int *identity, *dst;           // [most], [P*most]: own row of each entry, counted from the first own row
    float *compact, *received;     // [most, C], [P*most or fewer, C]
    size_t room;                   // entries of dst and received
    int* host;
    unsigned char* mark; // [rows]
} FoSparse;

// N: most tokens of a rank; P ranks, this one r; rows: of the table on this rank, C wide. _nbytes: of its
// device memory
FoSparse* fo_sparse_create(FoDevice* d, size_t N, size_t rows, int P, int r, int C);
void fo_sparse_destroy(FoDevice* d, FoSparse* f);
size_t fo_sparse_nbytes(size_t N, size_t rows, int P, int r, int C);

/* fo_sparse_set -- ids [P, n]: tokens of each rank, of the whole vocabulary; v0: the first that this rank's
 * table has. Queued on s; s must have passed the previous batch's calls.
 */
void fo_sparse_set(FoSparse* f, const int* ids, size_t n, size_t v0, int P, int r, FoStream* s);

/* fo_sparse_fetch_begin -- D3 rows: rows of the table that the batch needs, from the ranks that have updated
 * them, ahead of the table. fo_allgather_end(o) waits; then the first fetch->nuniq rows of the result are
 * there, [nuniq, C] in order, as fo_fetch_encoder_forward wants them (compact), until the next call with f.
 */
const floatX* fo_sparse_fetch_begin(FoSparse* f,
                                    const floatX* table, // [rows, C]: the own rows are in place
                                    int C, FoOverlap* o);

/* fo_sparse_reduce_begin -- D2: own gradient rows, as fo_fetch_encoder_backward_begin has gathered them (st),
 * are summed by row and pushed to the rows' owners. Follows it in place of fo_fetch_encoder_backward_end.
 * _end adds them, in rank order, to shard [own rows, C], which other sums have reached before.
 */
void fo_sparse_reduce_begin(FoSparse* f, FoFetch* fetch, FoStaging* st, int C, FoOverlap* fetched,
                            FoOverlap* o);
void fo_sparse_reduce_end(FoSparse* f, float* shard, int C, FoOverlap* o);

#ifdef __cplusplus
}
#endif
#endif
