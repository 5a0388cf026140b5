/* weights.c -- see weights.h. The numbers come from rng.h; test: dev/test/program_test.py. */
#include "train/weights.h"
#include "train/rng.h"
#include <math.h>
#include <stdlib.h>

enum { BLOCK_NELEM = 1 << 20 };

static void* allocate(size_t nbytes) {
    void* p = malloc(nbytes);
    fo_require(p != NULL, "no memory for %zu bytes of new weights", nbytes);
    return p;
}

static void draw_tensor(const Tensors* ts, Rng* rng, int tensor, int l, float std, float* master,
                        FoStream* s) {
    const Tensor* t = &ts->t[tensor];
    const TensorPart p = tensor_part(ts, tensor, ts->r);
    const size_t rows = tensor == WTE ? (size_t)ts->config.V : t->rows; // padding rows stay zero
    // numbers are drawn 16 at a time, and the last 16 of a tensor anew: so the last block takes what is left
    const size_t block = (BLOCK_NELEM / t->cols + 15) / 16 * 16;
    float* full = allocate(2 * block * t->cols * sizeof(float));
    float* dst = master + t->offset + (size_t)l * tensor_local(t);
    for (size_t row = 0, n; row < rows; row += n) {
        size_t k = 0; // rows of the own part, moved to the front
        n = rows - row < 2 * block ? rows - row : block;
        rng_normal(rng, full, n * t->cols, 0.0f, std);
        for (size_t i = 0; i < n; i++) {
            size_t in_run = p.nruns > 1 ? (row + i) % p.stride : row + i;
            if (in_run < p.row0 || in_run >= p.row0 + p.nrows) { continue; }
            memmove(full + k++ * p.ncols, full + i * t->cols + p.col0, p.ncols * sizeof(float));
        }
        fo_upload(dst, full, k * p.ncols * sizeof(float), s);
        fo_stream_sync(s); // full has been read | the next block
        dst += k * p.ncols;
    }
    free(full);
}

static void fill_ones(const Tensors* ts, int tensor, float* master, FoStream* s) {
    const Tensor* t = &ts->t[tensor];
    const size_t nelem = (size_t)t->layers * tensor_local(t);
    float* ones = allocate(nelem * sizeof(float));
    for (size_t k = 0; k < nelem; k++) {
        ones[k] = 1.0f;
    }
    fo_upload(master + t->offset, ones, nelem * sizeof(float), s);
    fo_stream_sync(s);
    free(ones);
}

void weights_random(const Tensors* ts, int seed, float* master, FoStream* s) {
    Rng rng;
    rng_seed(&rng, (uint32_t)seed);
    const float std = 0.02f, residual_std = 0.02f / sqrtf(2.0f * (float)ts->config.L);
    draw_tensor(ts, &rng, WTE, 0, std, master, s);
    draw_tensor(ts, &rng, WPE, 0, std, master, s);
    for (int l = 0; l < ts->config.L; l++) {
        draw_tensor(ts, &rng, QKVW, l, std, master, s);
        draw_tensor(ts, &rng, ATTPROJW, l, residual_std, master, s);
        draw_tensor(ts, &rng, FCW, l, std, master, s);
        draw_tensor(ts, &rng, FCPROJW, l, residual_std, master, s);
    }
    fill_ones(ts, LN1W, master, s);
    fill_ones(ts, LN2W, master, s);
    fill_ones(ts, LNFW, master, s);
}

void weights_round(floatX* params, const float* master, size_t nelem, FoStream* s) {
    if (FO_FLOATX == FO_FP32) { return; }
    float* from = allocate(BLOCK_NELEM * sizeof(float));
    floatX* to = allocate(BLOCK_NELEM * sizeof(floatX));
    for (size_t k = 0, n; k < nelem; k += n) {
        n = nelem - k < BLOCK_NELEM ? nelem - k : BLOCK_NELEM;
        fo_download(from, master + k, n * sizeof(float), s);
        fo_stream_sync(s);
        for (size_t i = 0; i < n; i++) {
            to[i] = fo_floatx(from[i]);
        }
        fo_upload(params + k, to, n * sizeof(floatX), s);
        fo_stream_sync(s); // to has been read | the next block
    }
    free(to);
    free(from);
}
