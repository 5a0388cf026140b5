/* tensors.h -- everything known about a GPT's parameter tensors, in one table of one row a tensor.
 *
 * Allocation, initialisation, checkpoints, AdamW, the cut across the mesh and the tests' names are all driven
 * by it. The order is llm.c's (formats: doc/formats.md). Weights are [out, in] row-major.
 *
 * A tensor is cut twice. The ranks of a tp group hold its heads, FFN columns or vocabulary rows. Replicas,
 * the ranks that have the same such part, may then share the rows of the five matrices (ZeRO): a table of
 * shards is made beside the one of whole parts. Both say what lies where in memory; nothing else knows.
 */
#ifndef TENSORS_H
#define TENSORS_H
#include "flashoverlap/fo_ops.h" // fo_cut
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int maxT, V, Vp, L, NH, C; // Vp: V rounded up to a multiple of 128
} GPTConfig;

// how a tensor is cut across the ranks of a tp group
typedef enum {
    CUT_NONE, // whole on every rank
    CUT_ROWS, // rows, in equal parts as far as they go (fo_cut)
    CUT_QKV,  // rows of q, k and v each, by head
    CUT_COLS, // columns: FFN columns in equal parts
    CUT_HEADS // columns, by head
} TensorCut;

// how the model lies over the mesh, and the rank that a table is of
typedef struct {
    int tp, t; // ranks of the tp group, and this one
    int up;    // groups into which the heads of a tp rank are cut once more: up attends with one group a rank
    int nshards, shard; // replicas that share the rows of matrices, and which of them; 1, 0: none does
} TensorCuts;

enum {
    WTE,
    WPE,
    LN1W,
    LN1B,
    QKVW,
    QKVB,
    ATTPROJW,
    ATTPROJB,
    LN2W,
    LN2B,
    FCW,
    FCB,
    FCPROJW,
    FCPROJB,
    LNFW,
    LNFB,
    NTENSORS
};

typedef struct {
    const char* name;
    int layers;                    // copies of it, one after the other in files and in memory: L or 1
    size_t rows, cols;             // of one layer's; vectors are [rows, 1]
    int decays;                    // weight decay applies (2-D tensors)
    int sharded;                   // replicas may share its rows: the matrices but wpe
    TensorCut cut;                 // across tp
    size_t local_rows, local_cols; // of one layer's in this table
    size_t offset;                 // of layer 0 in this table's arena, in elements; layers follow each other
} Tensor;

// An arena holds the sharded matrices first, then the vectors that tp cuts, then what every rank has whole.
typedef struct {
    GPTConfig config;
    TensorCuts cuts;
    Tensor t[NTENSORS];
    size_t nmatrix; // elements up to where the matrices end
    size_t ncut;    // up to where the vectors that are cut end
    size_t nelem;   // of the arena
    size_t ntotal;  // parameters of the whole model, padding included
} Tensors;

void tensors_init(Tensors* ts, GPTConfig c, TensorCuts cuts);

// elements of one layer of t in its table
static inline size_t tensor_local(const Tensor* t) {
    return t->local_rows * t->local_cols;
}

/* TensorUnit -- a dense [rows, cols] piece of one layer, whose rows replicas share evenly (fo_cut).
 *
 * wte, fcw, fcprojw, all vectors: one unit. With up 1 also qkvw (q, k, v of all heads) and attprojw. Else,
 * for head groups j = 0 ... up-1: attprojw's columns of group j; qkvw's rows of q of group j, then (a unit of
 * its own) those of its k and v. qkvb is one unit in qkvw's order.
 */
typedef struct {
    size_t offset;            // in the layer's memory in this table, elements
    size_t rows, row0, nrows; // of the whole unit; held by this table: nrows from row0 on
    size_t cols;
} TensorUnit;

int tensor_nunits(const Tensors* ts, int tensor);
TensorUnit tensor_unit(const Tensors* ts, int tensor, int j);

/* TensorBox -- a dense [nrows, ncols] piece of what a rank holds of one layer: where it is in the whole
 * [rows, cols], as files have it. Boxes follow each other in memory, in the order of units.
 */
typedef struct {
    size_t row0, nrows, col0, ncols;
    size_t offset; // in the layer's memory of the rank that holds it, elements
} TensorBox;

enum { TENSOR_MAX_BOXES = 3 * FO_MAX_RANKS };

// What tp rank t and replica `shard` hold under the cuts of ts; no box is empty. Returns their number.
int tensor_boxes(const Tensors* ts, int tensor, int t, int shard, TensorBox boxes[TENSOR_MAX_BOXES]);
// the same of rows [row, row + nrows) of the whole tensor
int tensor_boxes_of_rows(const Tensors* ts, int tensor, int t, int shard, size_t row, size_t nrows,
                         TensorBox boxes[TENSOR_MAX_BOXES]);

#ifdef __cplusplus
}
#endif
#endif
