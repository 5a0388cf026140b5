/* whole.h -- whole tensors and ranks' parts of them, for tests: the plain counterpart of what
 * train/checkpoint.c does block by block. C11 that is also C++, so that test_gpt.cu can use it.
 */
#ifndef WHOLE_H
#define WHOLE_H
#include "train/tensors.h"

// tp ranks and nothing else: rank t of them
static inline TensorCuts cuts_tp(int tp, int t) {
    TensorCuts cuts = {tp, t, 1, 1, 0};
    return cuts;
}

// elements of one layer of a tensor on rank t of the tp group and replica `shard`
static inline size_t tensor_local_of(const Tensors* ts, int tensor, int t, int shard) {
    TensorBox boxes[TENSOR_MAX_BOXES];
    size_t nelem = 0;
    for (int i = 0, n = tensor_boxes(ts, tensor, t, shard, boxes); i < n; i++) {
        nelem += boxes[i].nrows * boxes[i].ncols;
    }
    return nelem;
}

// one layer's whole tensor `full` <-> a rank's part `local`; nbytes of an element; host memory
static inline void tensor_move(char* local, char* full, int out, const Tensors* ts, int tensor, int t,
                               int shard, size_t nbytes) {
    TensorBox boxes[TENSOR_MAX_BOXES];
    size_t at = 0; // in local: boxes follow each other
    for (int i = 0, n = tensor_boxes(ts, tensor, t, shard, boxes); i < n; i++) {
        const size_t row_nbytes = boxes[i].ncols * nbytes;
        for (size_t k = 0; k < boxes[i].nrows; k++, at += row_nbytes) {
            char* there = full + ((boxes[i].row0 + k) * ts->t[tensor].cols + boxes[i].col0) * nbytes;
            memcpy(out ? local + at : there, out ? there : local + at, row_nbytes);
        }
    }
}

// whole -> part
static inline void tensor_extract(void* local, const void* full, const Tensors* ts, int tensor, int t,
                                  int shard, size_t nbytes) {
    tensor_move((char*)local, (char*)(size_t)full, 1, ts, tensor, t, shard, nbytes);
}

// and back: the rest of `full` stays as it is
static inline void tensor_place(void* full, const void* local, const Tensors* ts, int tensor, int t,
                                int shard, size_t nbytes) {
    tensor_move((char*)(size_t)local, (char*)full, 0, ts, tensor, t, shard, nbytes);
}
#endif
