/* fo_overlap.h -- THE FLASH PRIMITIVES: a plan (fo_plan.h) bound to two streams. What this library is for.
 *
 * A primitive takes the place of a collective and of the computation beside it. It is called the same way in
 * every mode: what differs is the plan. All calls queue and return at once, and all ranks of the group make
 * the same calls in the same order.
 *
 * Rows of a group's [N, C] activation: shard p is [p*N/P, (p+1)*N/P), and a plan with m sub-chunks cuts each
 * shard as fo_cut cuts: evenly, where m divides N/P. A large operation (the head) goes slice by slice: a call
 * for each slice of its rows.
 */
#ifndef FO_OVERLAP_H
#define FO_OVERLAP_H
#include "flashoverlap/fo_comm.h"
#include "flashoverlap/fo_ops.h"
#include "flashoverlap/fo_plan.h"
#ifdef __cplusplus
extern "C" {
#endif

// what reduce-scatters send from and receive into; one at a time is in flight, so one is enough for a rank
typedef struct {
    void* partial;  // [N, C] of wire: this rank's partial sums of all rows
    void* received; // [P-1, N/P, C] of wire: the others' partial sums of the own rows
    FoDtype wire;   // floatX or fp32
} FoStaging;

typedef struct {
    const char* name; // row of the table in doc/overlap.md: "F1"; not copied
    FoPlan plan;
    FoGroup* group;
    FoStream *compute, *comm;
    FoEvent* ready;                // what the first exchange needs is written
    FoEvent** arrived;             // by exchange
    FoEvent** computed;            // by compute
    int marked;                    // ready was recorded early, by fo_overlap_mark
    double exposed_ms;             // compute stood waiting, in total; read after the compute stream is synced
    double comm_ms;                // what the plain collective would take on this link, in total
    size_t nbytes_sent, nmessages; // by this rank, in total
} FoOverlap;

// queues the computation of rows [row0, row0 + n) on s
typedef void (*FoChunkFn)(void* ctx, size_t row0, size_t n, FoStream* s);

// Dies of what fo_plan_init refuses. One rank has nothing to hide: its plan has one chunk, whatever m is.
FoOverlap* fo_overlap_create(const char* name, FoKind kind, FoMode mode, int m, FoTopology topology,
                             FoGroup* g, FoStream* compute, FoStream* comm);
// waits for both streams first
void fo_overlap_destroy(FoOverlap* o);
// sets exposed_ms, comm_ms, nbytes_sent, nmessages to 0
void fo_overlap_reset(FoOverlap* o);

// o's next communication depends on nothing that is queued on the compute stream after this call. Without it,
// that communication waits for all that is queued when it is called, as in mode none it always does.
void fo_overlap_mark(FoOverlap* o);

/* fo_allgather_run -- every rank's rows arrive in `all`, and fn computes on them chunk by chunk: own first,
 * the others as they arrive.
 *
 * Order    the own rows of all are in place (written by what compute has queued). Afterwards `all` is
 *          complete, and its own rows may be written again, by whatever is queued on the compute stream.
 * Ranks    collective; same N and row_nbytes.
 * Errors   dies if o's plan is not an all-gather, or P does not divide N.
 * Source   arXiv 2604.24013 Alg. 1. Differs: direct plans send each shard to each peer; doc/overlap.md.
 */
void fo_allgather_run(FoOverlap* o, void* all, size_t row_nbytes, size_t N, FoChunkFn fn, void* ctx);

// the same in two halves, to hide the gather under independent work queued in between. Mode none waits in
// begin.
void fo_allgather_begin(FoOverlap* o, void* all, size_t row_nbytes, size_t N);
void fo_allgather_end(FoOverlap* o);

/* fo_reducescatter_run -- fn computes this rank's partial sums of all rows, chunk by chunk, into st->partial;
 * each chunk goes to its owner while the next is computed, the own one is computed last.
 *
 * Follow it with fo_reducescatter_end, which adds. Work queued in between covers what is still under way (B3,
 * B6). In mode none it waits for everything here. fn NULL: the partial sums are there already, nothing is
 * computed.
 *
 * Numbers  partials travel as st->wire and are added in fp32 in rank order with one rounding; along a ring,
 *          in the order of the ring, rounded to wire at each hop. The same bits in every mode.
 * Source   arXiv 2604.24013 Alg. 2, 3. Differs: direct plans push each partial to its owner.
 */
void fo_reducescatter_run(FoOverlap* o, FoStaging* st, int C, size_t N, FoChunkFn fn, void* ctx);

// out = residual + bias + sum over ranks, [N/P, C], the own rows. residual and bias may be NULL; in place:
// out may be residual
void fo_reducescatter_end(FoOverlap* o, FoStaging* st, floatX* out, const floatX* residual,
                          const floatX* bias, int C, size_t N);

// the same for fp32 rows (wire FO_FP32): out = sum over ranks; in place: out may be the own rows of
// st->partial
void fo_reducescatter_end_fp32(FoOverlap* o, FoStaging* st, float* out, int C, size_t N);

/* fo_allgather_matmul_forward -- out = (all ranks' rows) @ weight^T + bias, and gelu(out) unless gelu is
 * NULL: F3, H1.
 *
 * Column-parallel: every rank needs all N rows and computes OC of the columns. See fo_allgather_run for
 * order.
 */
void fo_allgather_matmul_forward(floatX* out,          // [N, OC]
                                 floatX* gelu,         // [N, OC], or NULL
                                 floatX* all,          // [N, C], the own rows in place
                                 const floatX* weight, // [OC, C]
                                 const floatX* bias,   // [OC], or NULL
                                 size_t N, int C, int OC, FoOverlap* o);

/* FoColumns -- a column-parallel matmul whose rows are still arriving: F1 in front of F2, whose attention
 * calls for them shard by shard. o NULL: out is complete, all else unused.
 */
typedef struct {
    floatX *out, *all;
    const floatX *weight, *bias;
    size_t N;
    int C, OC;
    FoOverlap* o;
    int ncomputed; // of the plan's computes, those that are queued
} FoColumns;

/* fo_allgather_matmul_begin -- F1: the first half of fo_allgather_matmul_forward. Queues the gather and the
 * plan's computes up to the own rows, which in mode flash are the first.
 *
 * Order    F2, which takes x, queues the others as it needs them. x must live until that call returns. `all`
 *          is complete, and its own rows and o are free again, for what is queued behind that call.
 */
void fo_allgather_matmul_begin(FoColumns* x,
                               floatX* out,          // [N, OC]
                               floatX* all,          // [N, C], the own rows in place
                               const floatX* weight, // [OC, C]
                               const floatX* bias,   // [OC], or NULL
                               size_t N, int C, int OC, FoOverlap* o);

// dinp = (all ranks' rows of dout) @ weight, times gelu'(pregelu) unless pregelu is NULL: B1
void fo_allgather_matmul_dgrad(floatX* dinp,          // [N, K]
                               floatX* all,           // [N, C], the own rows in place
                               const floatX* pregelu, // [N, K], or NULL
                               const floatX* weight,  // [C, K]
                               size_t N, int K, int C, FoOverlap* o);

/* fo_matmul_reducescatter_forward -- the partial sums inp @ weight^T on their way to the rows' owners: F4.
 *
 * Row-parallel: K is this rank's share of the width summed over. fo_reducescatter_end follows.
 */
void fo_matmul_reducescatter_forward(FoStaging* st,
                                     const floatX* inp,    // [N, K]
                                     const floatX* weight, // [C, K]
                                     size_t N, int K, int C, FoOverlap* o);

// the same of dout @ weight: B3, B6
void fo_matmul_reducescatter_dgrad(FoStaging* st,
                                   const floatX* dout,   // [N, OC]
                                   const floatX* weight, // [OC, C]
                                   size_t N, int C, int OC, FoOverlap* o);

/* fo_attention_matmul_reducescatter_forward -- query-split attention: F2.
 *
 * For each chunk of query rows: attention of this rank's heads, then its share of the projection, then off to
 * the owner: the reduce-scatter hides under both, not under the projection alone. query_split 0 computes all
 * attention first (the row-parallel schedule, for comparison). Bits do not depend on it.
 *
 * qkv->out is [N, 3*NH*hs], all of it computed in the end. In mode flash, where shards are whole sequences, a
 * shard's QKV matmul stands right before its attention: shards arrive in the order in which their results
 * leave, so F1's gather hides under attention, too. Everywhere else all of qkv is computed first.
 * Errors   dies if l is not of as many shards as o has ranks, or if whole sequences don't make a shard.
 * Source   arXiv 2604.24013 Alg. 4, Fig. 8b; there all of qkv is computed first.
 */
void fo_attention_matmul_reducescatter_forward(FoStaging* st,
                                               floatX* att, // [N, NH*hs]
                                               float* lse,  // [N, NH]
                                               FoColumns* qkv,
                                               const floatX* weight, // [C, NH*hs]
                                               FoLayout l, int NH, int hs, int C, int query_split,
                                               FoOverlap* o);

/* fo_allgather_matmul_attention_backward -- B4: the rows' gradient arrives; each chunk goes through the
 * projection's dgrad, and each shard whose sequences are complete through the attention's backward pass,
 * while the next arrives.
 *
 * With zigzag shards the attention's backward pass follows the last chunk, whole: keys of every shard are in
 * it.
 */
void fo_allgather_matmul_attention_backward(floatX* dqkv,         // [N, 3*NH*hs]
                                            floatX* datt,         // [N, NH*hs]
                                            floatX* all,          // [N, C], the own rows in place
                                            const floatX* weight, // [C, NH*hs]
                                            const floatX* qkv,    // [N, 3*NH*hs]
                                            const floatX* att,    // [N, NH*hs]
                                            const float* lse,     // [N, NH]
                                            FoLayout l, int NH, int hs, int C, FoOverlap* o);

/* FoFetch -- who needs which rows of a table that is cut by rows (wte), for one batch of tokens: E1, E2.
 *
 * Every rank knows all tokens, so nothing but rows travels: N/P of them to a rank, not N. All arrays are
 * device memory that fo_fetch_create allocates and fo_fetch_set fills; the counts are known to the host.
 */
typedef struct {
    size_t N;                      // most tokens of a batch
    size_t need[FO_MAX_RANKS + 1]; // the own tokens, grouped by owner p: entries [need[p], need[p+1]) of tok
    size_t give[FO_MAX_RANKS + 1]; // tokens whose row this rank owns, grouped by the rank p that has them
    int* tok;                      // [N/P] own row of each, in groups
    int* idx;                      // [N] local row of the table, in groups of give
    size_t nuniq;                  // different rows among idx
    int *dst, *start, *order;      // [nuniq], [nuniq + 1], [N]: as fo_scatter_add_rows wants them
    int* uniq;                     // [N] which of the different rows each of idx is
    int* host;                     // the same six arrays, one after the other, on their way
} FoFetch;

FoFetch* fo_fetch_create(FoDevice* d, size_t N);
void fo_fetch_destroy(FoDevice* d, FoFetch* f);
/* ids [N] in the order of rows; first[p]: first row of the table that rank p has, first[P] its end. Queued on
 * s; s must have passed the previous batch's calls.
 */
void fo_fetch_set(FoFetch* f, const int* ids, size_t N, const size_t* first, int P, int r, FoStream* s);

/* fo_fetch_encoder_forward -- E1: out = table[ids] + wpe[pos] for the own tokens. Each rank packs the rows
 * that others need and pushes them; tokens of the own rows first, the others as they arrive. Uses st as
 * buffers. compact: table has only the rows that this batch needs of this rank's, [f->nuniq, C], in order.
 */
void fo_fetch_encoder_forward(floatX* out,         // [N/P, C]
                              const floatX* table, // [rows of this rank, C], or compact
                              int compact,
                              const floatX* wpe, // [maxT, C]
                              const int* pos,    // [N/P]
                              FoFetch* f, FoStaging* st, int C, FoOverlap* o);

/* fo_fetch_encoder_backward -- E2: dtable += gradient rows of the tokens whose row this rank owns, in the
 * order of ranks and rows. _begin packs and sends; work queued in between hides it; _end adds.
 */
void fo_fetch_encoder_backward_begin(const floatX* dout, // [N/P, C]
                                     FoFetch* f, FoStaging* st, int C, FoOverlap* o);
void fo_fetch_encoder_backward_end(float* dtable, // [rows of this rank, C]
                                   FoFetch* f, FoStaging* st, int C, FoOverlap* o);

#ifdef __cplusplus
}
#endif
#endif
