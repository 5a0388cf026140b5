/* layer.h -- one tensor-parallel half of a transformer layer, forward or backward, on the primitives of
 * fo_overlap.h that train: what bench_overlap measures. Layer norms, biases and the residual stream, which
 * hide nothing, are left out.
 *
 *   mlp                 gather -> fc1, GELU (F3); fc2 -> reduce-scatter (F4)
 *   attention           gather -> QKV (F1); attention, projection -> reduce-scatter (F2)
 *   mlp-backward        B1 gather -> fc2 dgrad, GELU's; B2 gather of fc1's input under the fc2 wgrad;
 *                       B3 fc1 dgrad -> reduce-scatter, the rest of it under the fc1 wgrad
 *   attention-backward  B4 gather -> projection dgrad, attention's; B5 gather of QKV's input under the
 *                       projection's wgrad; B6 QKV dgrad -> reduce-scatter, the rest under the QKV wgrad
 */
#ifndef LAYER_H
#define LAYER_H
#include "dev/bench/bench.h"
#include "flashoverlap/fo_overlap.h"

enum { LAYER_HEAD = 64 }; // size of a head

typedef enum { MLP, ATTENTION, MLP_BACKWARD, ATTENTION_BACKWARD, NLAYER_OPS } LayerOp;

typedef struct {
    LayerOp op;
    int P, C; // ranks, channels
    int B;    // sequences, a multiple of P; 0: P
    size_t N; // rows of the group
} LayerShape;

// parts of a layer, each of which can be queued alone
typedef enum {
    GATHER_SIDE,      // the matmul that the first gather hides under, with its GELU
    ATTENTION_ITSELF, // no part of an MLP
    WGRAD_UNDER,      // backward: the weight gradient that the second gather hides under
    SCATTER_SIDE,     // the matmul that the reduce-scatter hides under
    WGRAD_AFTER,      // backward: the weight gradient behind it
    OWNERS_SUM,       // of partial sums, behind the reduce-scatter
    NPARTS
} LayerPart;

// a mode's plans
typedef struct {
    FoOverlap *gather, *again, *scatter; // again: backward
    int row;
} LayerPlan;

// one rank's layer; floatX unless said
typedef struct {
    LayerShape shape;
    FoGroup* group;
    FoDevice* device;
    FoStream *compute, *comm;
    floatX *x, *host;         // [N/P, C] input and output, in host memory
    floatX* all;              // [N, C] input, or gradient of the output
    floatX *w1, *w2;          // [width1, C], [C, width2]
    floatX *pre, *act;        // [N, width1], [N, width2]: fc1 and its GELU; QKV and attention
    float* lse;               // [N, heads]
    floatX *ln, *dpre, *datt; // backward: [N, C] input of the first matmul, [N, width1], [N, width2]
    float *dw1, *dw2, *dhost; // backward: gradients of weights; in host memory
    FoStaging st;
} Layer;

const char* layer_name(LayerOp op);
int layer_is_attention(LayerOp op);
int layer_is_backward(LayerOp op);
int layer_collectives(LayerOp op);             // 2; backward 3
size_t layer_shard_nelem(const LayerShape* s); // of a rank's rows
// flops of the second matmul (fc2, the projection) on one rank: what --gemm-ms is about
double layer_flops(const LayerShape* s);

// device memory, random weights and what a backward pass finds of the forward pass
void layer_open(Layer* y, LayerShape shape, FoGroup* g, FoDevice* d);
void layer_close(Layer* y);
void layer_plan_open(Layer* y, LayerPlan* p, const BenchMode* mode);
void layer_plan_close(LayerPlan* p);
double layer_exposed_ms(const LayerPlan* p); // since layer_start

// input in place, sums and figures at 0; waits for it
void layer_start(Layer* y, LayerPlan* p);
// queues the layer; its output is its input then
void layer_queue(Layer* y, const LayerPlan* p);
// queues one part alone, in the chunks of mode none
void layer_queue_part(Layer* y, LayerPart part);
// of the own rows and, backward, gradients; waits for both streams
uint64_t layer_hash(Layer* y);

// ---- what it should take ----------------------------------------------------------------------------------
typedef struct {
    double part_ms[NPARTS];
    double gbytes_s, us; // of the link
} LayerCost;

double layer_compute_ms(const LayerCost* c);                           // W: without communication
double layer_collectives_ms(const LayerShape* s, const LayerCost* c);  // T: all collectives alone
double layer_shard_ms(const LayerShape* s, const LayerCost* c, int m); // a shard's m messages
/* layer_predicted_ms -- exposed time by the closed forms of fo_model.h.
 *
 * The backward pass has one stream of messages: B2 (B5) travels behind B1 (B4), B3 (B6) behind both. What is
 * still under way when the matmuls beside it have ended goes on under the weight gradient that follows.
 */
double layer_predicted_ms(const LayerShape* s, const LayerCost* c, const BenchMode* mode);
#endif
