/* whole.h -- whole tensors and ranks' parts of them, for tests: the plain counterpart of what
 * train/checkpoint.c does block by block. C11 that is also C++, so that test_gpt.cu can use it.
 */
#ifndef WHOLE_H
#define WHOLE_H
#include "train/tensors.h"

// elements of one layer of a tensor on any rank r of ts->P
static inline size_t tensor_local_of(const Tensors* ts, int tensor, int r) {
    TensorPart p = tensor_part(ts, tensor, r);
    return p.nruns * p.nrows * p.ncols;
}

// element of the whole tensor [rows, cols] that comes k-th in rank r's part
static inline size_t whole_index(const Tensors* ts, int tensor, int r, size_t k) {
    TensorPart p = tensor_part(ts, tensor, r);
    size_t row = k / p.ncols, run = row / p.nrows;
    return (run * p.stride + p.row0 + row % p.nrows) * ts->t[tensor].cols + p.col0 + k % p.ncols;
}

// one layer's whole tensor `full` -> rank r's part `local`; nbytes of an element; host memory
static inline void tensor_extract(void* local, const void* full, const Tensors* ts, int tensor, int r,
                                  size_t nbytes) {
    for (size_t k = 0, n = tensor_local_of(ts, tensor, r); k < n; k++) {
        memcpy((char*)local + k * nbytes, (const char*)full + whole_index(ts, tensor, r, k) * nbytes, nbytes);
    }
}

// and back: the rest of `full` stays as it is
static inline void tensor_place(void* full, const void* local, const Tensors* ts, int tensor, int r,
                                size_t nbytes) {
    for (size_t k = 0, n = tensor_local_of(ts, tensor, r); k < n; k++) {
        memcpy((char*)full + whole_index(ts, tensor, r, k) * nbytes, (const char*)local + k * nbytes, nbytes);
    }
}
#endif
