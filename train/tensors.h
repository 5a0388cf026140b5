/* tensors.h -- everything known about a GPT's parameter tensors, in one table of one row a tensor.
 *
 * Allocation, initialisation, checkpoints, AdamW, the cut across tp and the tests' names are all driven by
 * it. The order is llm.c's (formats: doc/formats.md). Weights are [out, in] row-major.
 */
#ifndef TENSORS_H
#define TENSORS_H
#include "flashoverlap/fo_ops.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int maxT, V, Vp, L, NH, C; // Vp: V rounded up to a multiple of 128
} GPTConfig;

// how a tensor is cut across the P ranks of a tp group
typedef enum {
    CUT_NONE, // whole on every rank
    CUT_ROWS, // rows, in equal parts as far as they go (fo_cut)
    CUT_QKV,  // rows of q, k and v each, by head
    CUT_COLS, // columns: FFN columns in equal parts
    CUT_HEADS // columns, by head
} TensorCut;

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
    int layers;        // copies of it, one after the other in files and in memory: L or 1
    size_t rows, cols; // of one layer's; vectors are [rows, 1]
    int decays;        // weight decay applies (2-D tensors)
    TensorCut cut;
    size_t local_rows, local_cols; // of one layer's on this rank
    size_t offset;                 // of layer 0 in this rank's arena, in elements; layers follow each other
} Tensor;

typedef struct {
    GPTConfig config;
    int P, r;
    Tensor t[NTENSORS];
    size_t nelem;  // of this rank's arena
    size_t ncut;   // the first ncut of them are cut; the rest, replicated on every rank, follow
    size_t ntotal; // parameters of the whole model, padding included
} Tensors;

void tensors_init(Tensors* ts, GPTConfig c, int P, int r);

/* TensorPart -- what a rank holds of one layer's [rows, cols]: `nruns` runs (q, k, v; or one) of `nrows`
 * rows, `stride` rows apart from row0 on, and of each row the columns [col0, col0 + ncols). In memory without
 * gaps, in this order.
 */
typedef struct {
    size_t nruns, stride, row0, nrows, col0, ncols;
} TensorPart;

// of any rank r of ts->P
TensorPart tensor_part(const Tensors* ts, int tensor, int r);

// elements of one layer of t on this rank
static inline size_t tensor_local(const Tensor* t) {
    return t->local_rows * t->local_cols;
}

#ifdef __cplusplus
}
#endif
#endif
