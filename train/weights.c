/* weights.c -- see weights.h. The numbers come from rng.h; tests: dev/test/test_train.c, program_test.py. */
#include "train/weights.h"
#include "train/rng.h"
#include <math.h>
#include <stdlib.h>

enum { BLOCK_NELEM = 1 << 20 };

// what is filled: each array, if it is there, with this rank's part by its own table
typedef struct {
    const Tensors *ts, *os;
    floatX* params;
    float* master;
    FoStream* s;
} Weights;

static void* allocate(size_t nbytes) {
    void* p = malloc(nbytes);
    fo_require(p != NULL, "no memory for %zu bytes of new weights", nbytes);
    return p;
}

// rows [row, row + n) of one layer, whole, -> what a table's rank holds of them, in `data` of `type`; `part`
// has room for as many values
static void put_rows(const Tensors* ts, void* data, FoDtype type, int tensor, int l, size_t row, size_t n,
                     const float* rows, void* part, FoStream* s) {
    const Tensor* t = &ts->t[tensor];
    TensorBox boxes[TENSOR_MAX_BOXES];
    const int nboxes = tensor_boxes_of_rows(ts, tensor, ts->cuts.t, ts->cuts.shard, row, n, boxes);
    for (int i = 0; i < nboxes; i++) {
        const TensorBox* b = &boxes[i];
        const size_t nelem = b->nrows * b->ncols, each = fo_dtype_nbytes(type);
        for (size_t k = 0; k < nelem; k++) {
            const float x = rows[(b->row0 + k / b->ncols - row) * t->cols + b->col0 + k % b->ncols];
            if (type == FO_FP32) {
                ((float*)part)[k] = x;
            } else {
                ((FoBf16*)part)[k] = fo_bf16_from_float(x);
            }
        }
        fo_upload((char*)data + (t->offset + (size_t)l * tensor_local(t) + b->offset) * each, part,
                  nelem * each, s);
        fo_stream_sync(s); // part has been read | the next box
    }
}

static void put(const Weights* w, int tensor, int l, size_t row, size_t n, const float* rows, void* part) {
    if (w->params) { put_rows(w->ts, w->params, FO_FLOATX, tensor, l, row, n, rows, part, w->s); }
    if (w->master) { put_rows(w->os, w->master, FO_FP32, tensor, l, row, n, rows, part, w->s); }
}

static void draw_tensor(const Weights* w, Rng* rng, int tensor, int l, float std) {
    const Tensors* ts = w->params ? w->ts : w->os;
    const size_t cols = ts->t[tensor].cols;
    const size_t rows = tensor == WTE ? (size_t)ts->config.V : ts->t[tensor].rows; // padding rows stay zero
    // numbers are drawn 16 at a time, and the last 16 of a tensor anew: so the last block takes what is left
    const size_t block = (BLOCK_NELEM / cols + 15) / 16 * 16;
    float* full = allocate(2 * block * cols * sizeof(float));
    float* part = allocate(2 * block * cols * sizeof(float));
    for (size_t row = 0, n; row < rows; row += n) {
        n = rows - row < 2 * block ? rows - row : block;
        rng_normal(rng, full, n * cols, 0.0f, std);
        put(w, tensor, l, row, n, full, part);
    }
    free(full);
    free(part);
}

static void fill_ones(const Weights* w, int tensor) {
    const Tensor* t = &(w->params ? w->ts : w->os)->t[tensor];
    float* ones = allocate(t->rows * sizeof(float));
    float* part = allocate(t->rows * sizeof(float));
    for (size_t k = 0; k < t->rows; k++) {
        ones[k] = 1.0f;
    }
    for (int l = 0; l < t->layers; l++) {
        put(w, tensor, l, 0, t->rows, ones, part);
    }
    free(ones);
    free(part);
}

void weights_random(const Tensors* ts, floatX* params, const Tensors* os, float* master, int seed,
                    FoStream* s) {
    const Weights w = {ts, os, params, master, s};
    const int L = params ? ts->config.L : os->config.L;
    const float std = 0.02f, residual_std = 0.02f / sqrtf(2.0f * (float)L);
    Rng rng;
    rng_seed(&rng, (uint32_t)seed);
    draw_tensor(&w, &rng, WTE, 0, std);
    draw_tensor(&w, &rng, WPE, 0, std);
    for (int l = 0; l < L; l++) {
        draw_tensor(&w, &rng, QKVW, l, std);
        draw_tensor(&w, &rng, ATTPROJW, l, residual_std);
        draw_tensor(&w, &rng, FCW, l, std);
        draw_tensor(&w, &rng, FCPROJW, l, residual_std);
    }
    fill_ones(&w, LN1W);
    fill_ones(&w, LN2W);
    fill_ones(&w, LNFW);
}
