/* gpt.h -- a GPT on one rank: the mesh, this rank's share of sizes, its memory, its overlapped operations.
 *
 * What is computed with it is train_gpt.cu: batch, forward, head, backward, update. Files, reports and the
 * start of a run: run.h. Text: generate.h.
 */
#ifndef GPT_H
#define GPT_H
#include "flashoverlap/fo_ulysses.h"
#include "flashoverlap/fo_zero.h"
#include "train/options.h"
#include "train/tensors.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Mesh -- world = dp x up x tp ranks, tp fastest: rank = (d * up + u) * tp + t. Weights are cut by tp, tokens
 * of a batch by up, batches by dp. Ranks of the same t hold the same weights: rp = dp * up replicas.
 */
typedef struct {
    int dp, up, tp, rp; // sizes
    int d, u, t, p;     // this rank's place; p = d * up + u
} Mesh;

// rank's place in opt's mesh
Mesh mesh_of(const TrainOptions* opt, int rank);

// the groups that gpt_open splits the world into, in this order: tp, up, replicas, dp, up and tp together
enum { SPLIT_TP, SPLIT_UP, SPLIT_REPLICAS, SPLIT_DP, SPLIT_SEQUENCE, NSPLITS };
// the color of the rank at this place, in split number `split`
int mesh_color(const Mesh* m, int split);

// ---- the overlapped operations of a step ------------------------------------------------------------------
// Rows of doc/overlap.md's table; D3 has a plan for each layer, beside them. H2 and D1 are several in turn,
// since the next begins before one has ended; B7 goes there and back.
// clang-format off
enum {
    E1, F1, F2, F3, F4, H1, H2, H2_NEXT, H3, B1, B2, B3, B4, B5, B6, E2, B7, B7_BACK, // of the tp group
    U1, U2, U3, U4_KV, U4_Q,                                                          // of the up group
    D1, D1_2, D1_3, D1_4, D2, D2_ROWS, D3_ROWS, B7_DP, B7_DP_BACK,                    // of the replicas
    NSITES
};
// clang-format on

typedef enum { GROUP_TP, GROUP_UP, GROUP_RP, NGROUPS } GroupName;

typedef struct {
    const char* name;
    FoKind kind;
    GroupName group;
    int whole; // not cut into the mode's m chunks, and to each peer directly
} Site;

extern const Site gpt_sites[NSITES];

// ---- memory -----------------------------------------------------------------------------------------------
// what a rank tells the others once a step
typedef struct {
    double square_sum, exposed_ms, comm_ms, loss, stop, failed;
} Scalars;

// N = B*T tokens of the dp rank's batch; Nt = N/up rows of the tp group; n = Nt/tp own rows; Ca, F: the tp
// rank's attention and FFN widths; Cu, NHu: of them, channels and heads of the own head group. Lk: layers
// whose activations are kept, L, or 1 where blocks are recomputed
typedef struct {
    // kept from forward to backward
    floatX* resid; // [L+1, n, C] the residual stream before each layer, and after the last
    floatX* mid;   // [Lk, n, C] the residual stream between attention and FFN
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd; // [Lk, n]
    float *lnf_mean, *lnf_rstd;                       // [n]
    floatX* qkv;                                      // [Lk, N, 3*Cu]
    floatX* att;                                      // [Lk, N, Cu]
    floatX* att_tokens;                               // up > 1: [Lk, Nt, Ca] in blocks
    float* lse;                                       // [Lk, N, NHu]
    floatX* fch;                                      // [Lk, Nt, F] before the GELU
    floatX* gelu;                                     // [Nt, F]; kept at -r 0: [L, Nt, F]
    floatX *ln1_all, *ln2_all;                        // [Nt, C], kept where keep_gathered: [L, Nt, C]
    floatX *ln1_own, *ln2_own;                        // [L, n, C] where keep_own
    // used by one operation after another
    floatX* dfch;             // [Nt, F]
    floatX *dqkv, *datt;      // up = 1: [N, 3*Cu]; [N, Cu]
    floatX* up_send;          // up > 1: [Nt, 3*Ca] in blocks
    float* sums;              // up > 1: [Nt, C]
    FoHeadGrads dheads;       // up > 1
    floatX* dall;             // [Nt, C] gradient of the residual stream; the own rows are its home
    floatX* dln;              // [n, C]
    floatX* logits;           // [2, slice, Vl]
    FoSoftmaxStat* stats;     // [2, tp, slice]
    float* losses;            // [Nt]
    Scalars* scalars;         // [FO_MAX_RANKS + 1]: of each rank of the world, and room for a sum
    void *partial, *received; // FoStaging
    float* vectors;           // gradients of vectors, as the replicas add them
    // of D1's slots, and of D2, and in ZeRO 2 what they send is computed
    float *grad_received[FO_GRAD_SLOTS + 1], *grad_temp[FO_GRAD_SLOTS + 1];
    int *targets, *pos;                   // [Nt] in the order of the head's slices, [n]
    int *pos_dst, *pos_start, *pos_order; // dwpe's sums: as fo_scatter_add_rows wants them
    int* ids;                             // [dp, N] tokens of all batches
} GPTActs;

// what a rank has sent, as counted when it was queued
typedef struct {
    size_t nbytes, nmessages;
} Sent;

// one row an array: where its pointer is kept, and its bytes
typedef struct {
    void** ptr;
    size_t nbytes;
} Carve;

// layers and head of a micro-step, kept as a graph (--graph 1), and what its calls count on the host
typedef struct {
    FoGraph* graph;
    int ncalls;      // without a graph so far
    Sent* sent;      // by operation, then of each of d3
    double* comm_ms; // the same
} MicroGraph;

typedef struct {
    GPTConfig config;
    Mesh mesh;
    Tensors ts, os; // of parameters; of m, v and masters, which ZeRO shares among the replicas
    FoHeads heads;
    int zero, recompute;
    int inference; // weights and what the forward pass needs, nothing else
    float z_loss;
    // layer norm outputs that stay for the backward pass: all ranks', or the own rows
    int keep_gathered, keep_own;
    int Ca, F, Cu, NHu, Vl, v0, valid;  // valid: columns of Vl that are vocabulary, not padding
    size_t first_row[FO_MAX_RANKS + 1]; // of wte, by tp rank
    // this rank's arenas, [ts.nelem], [os.nelem] and some zeros
    floatX* params;
    float *grads, *m, *v, *master; // master is params in an FP32 build that shares nothing
    GPTActs acts;
    Carve arrays[80]; // of acts and staging
    int narrays;
    size_t acts_nbytes;
    FoDevice* device;
    FoStream *compute, *comm[NGROUPS];
    FoGroup *world, *group[NGROUPS], *dp, *seq; // dp: the same u and t; seq: the same d
    FoOverlap* o[NSITES];
    // by operation, D3 last, since the start: up to the last gpt_take_times
    Sent sent[NSITES + 1];
    double exposed_ms[NSITES + 1], comm_ms[NSITES + 1];
    double last_exposed_ms[NSITES + 1]; // what the last gpt_take_times took
    FoOverlap** d3;                     // [L+1]: wte, and the matrices of each layer, on their way back
    FoStaging staging, grad_staging, vector_staging;
    FoReducer reducer;
    FoGradSlot wte_slot;
    FoFetch* fetch;
    FoSparse* sparse;
    int rows_travel;  // gradient rows of the embedding are on their way (D2)
    int rows_known;   // fo_sparse_set has seen the batch at hand
    int weights_wait; // updated weights, but for layer 0's, have not yet left (D3)
    int use_graphs;
    MicroGraph graphs[4], *capturing; // by push and weights_wait
    int B_max, T_max;                 // the largest batch
    int chunks;                       // for each owner in the mode chosen; auto: 1
    int head_chunks;                  // what of it divides the head's slices, too
    int site_m[NSITES];               // sub-chunks or slices of each plan; auto_choose changes them
    // the batch at hand
    int nslices;
    size_t N, Nt, n, npos; // npos: different positions among the own rows
    FoLayout layout;
    floatX* cache; // generating: keys and values of all layers go there, [L, 2, B, room, Cu]; else NULL
    int room;
    // on their way to the device, and from it
    int* host_ints;     // [2*Nt + 4*n + 1], of gpt_batch
    int* host_ids;      // [2, dp, N] tokens of all batches: by dp rank, by replica
    float* host_losses; // [Nt]
} GPT;

// sizes alone, as --dry-run wants them: what rank `rank` of opt's mesh would have
void gpt_sizes(GPT* g, GPTConfig c, const TrainOptions* opt, int rank);
/* gpt_open -- groups, streams, plans and memory of this rank. Collective over world. Parameters are zeros. */
void gpt_open(GPT* g, GPTConfig c, const TrainOptions* opt, FoGroup* world, FoDevice* device);
void gpt_close(GPT* g); // collective, too; the device stays open
// bytes of this rank's arrays: parameters, gradients, optimizer, activations
typedef struct {
    size_t params, grads, optimizer, acts;
} GPTBytes;
GPTBytes gpt_nbytes(const GPT* g);
// floating point operations of a training step, for each of its tokens; llm.c's formula
double gpt_flops_a_token(const GPT* g, int T);
// makes the plan of an operation anew with m chunks; not of those that are whole, nothing is under way
void gpt_set_chunks(GPT* g, const TrainOptions* opt, int site, int m);

// name of an operation: of a site, or, i NSITES, of D3, which has a plan for each layer
const char* gpt_op_name(int i);
// of the plan of an operation: sub-chunks or slices, m; topology; ranks
int gpt_site_chunks(const GPT* g, int site);
int gpt_is_cut(const GPT* g, int site); // does it have the mode's m chunks, on this mesh?
FoTopology gpt_site_topology(const TrainOptions* opt, int site);
int gpt_site_ranks(const GPT* g, int site);

// ---- where things are -------------------------------------------------------------------------------------
// the head's slices for Nt rows; m: GPT.head_chunks
int gpt_head_slices(size_t Nt, int tp, int m);
// where the head has row `row` of the Nt: slice by slice, in each the rows of one owner after the other's
size_t gpt_head_place(const GPT* g, size_t row);
// can the mesh and the overlap's chunks cut a batch of these sizes?
int gpt_can_cut(const GPT* g, int B, int T);
// T of a batch of sequences of at most `longest` tokens, as few as B_max of them can be cut and scored by
int gpt_short_T(const GPT* g, int longest);
// this rank's part of layer l of a tensor, or of its gradient
const floatX* gpt_weight(const GPT* g, int tensor, int l);
// of a tensor that all replicas hold whole; in ZeRO 2, of a matrix, this rank's share. NULL in inference
float* gpt_grad(const GPT* g, int tensor, int l);
// is it one of the matrices that go together? Of layer l they do; wte goes alone, as l -1
static inline int gpt_in_bucket(const GPT* g, int tensor, int l) {
    return g->ts.t[tensor].sharded && (tensor == WTE) == (l < 0);
}
// elements of the replicated tensors, rounded up so that tp ranks share them evenly; they stand last
size_t gpt_replicated(const GPT* g);
// elements of GPTActs.vectors: cut vectors and this rank's share of the replicated ones, a multiple of rp
size_t gpt_vectors(const GPT* g);

// milliseconds since the last call, of all operations: stood waiting, and what plain collectives would have
// taken
void gpt_take_times(GPT* g, double* exposed_ms, double* comm_ms);
// sent so far by an operation; NSITES: by D3
Sent gpt_sent(const GPT* g, int site);
// every rank's block of nbytes_each, in host memory: the own one of all [world] is in place, the others
// arrive; collective, waits. Not for what each step needs: it takes device memory for a while
void gpt_gather_host(GPT* g, void* all, size_t nbytes_each);
// D3: updated rows go to the replicas: of layer l's matrices (-1: wte); of all but layer 0's, if they wait
void gpt_send_layer(GPT* g, int l);
void gpt_send_weights(GPT* g);
// all of params is there: what the last update has sent back (D3) has arrived; waits
void gpt_await_weights(GPT* g);

/* gpt_graph_begin -- 0: what the caller is about to queue was queued as a graph, which is done. 1: it must
 * queue it, between this and gpt_graph_end; without --graph always, else the first time, which makes ready
 * what operations need, and the second time, which the graph is made of. push as in gpt_micro.
 */
int gpt_graph_begin(GPT* g, int push);
void gpt_graph_end(GPT* g);
// waits; later micro-steps make new graphs: operations in a graph are timed if they were when it was made
void gpt_graphs_free(GPT* g);

// ---- what train_gpt.cu computes: described there ----------------------------------------------------------
void gpt_batch(GPT* g, const int* ids, const int* targets, int B, int T);
void gpt_forward(GPT* g);

#ifdef __cplusplus
}
#endif
#endif
