/* tensors.c -- the parameter table of a GPT, and which part of each tensor a rank holds. See tensors.h.
 *
 * A part is at most three runs of rows (q, k and v) of one range of columns. Everything follows from
 * tensor_part.
 */
#include "train/tensors.h"

#define ALIGN 64 // elements: the offset of each tensor in the arena is a multiple

TensorPart tensor_part(const Tensors* ts, int tensor, int r) {
    const Tensor* t = &ts->t[tensor];
    const size_t NH = (size_t)ts->config.NH, C = (size_t)ts->config.C, hs = C / NH;
    const size_t head0 = fo_cut(NH, ts->P, r), nheads = fo_cut(NH, ts->P, r + 1) - head0;
    TensorPart p = {1, 0, 0, t->rows, 0, t->cols};
    switch (t->cut) {
    case CUT_NONE: break;
    case CUT_ROWS:
        p.row0 = fo_cut(t->rows, ts->P, r);
        p.nrows = fo_cut(t->rows, ts->P, r + 1) - p.row0;
        break;
    case CUT_QKV:
        p.nruns = 3;
        p.stride = C;
        p.row0 = head0 * hs;
        p.nrows = nheads * hs;
        break;
    case CUT_COLS:
        p.col0 = fo_cut(t->cols, ts->P, r);
        p.ncols = fo_cut(t->cols, ts->P, r + 1) - p.col0;
        break;
    case CUT_HEADS:
        p.col0 = head0 * hs;
        p.ncols = nheads * hs;
        break;
    }
    return p;
}

static size_t align_up(size_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

// places the tensors that are cut (or those that are not) one after the other from `at` on; returns where
// they end
static size_t arena_place(Tensors* ts, int is_cut, size_t at) {
    for (int i = 0; i < NTENSORS; i++) {
        Tensor* t = &ts->t[i];
        if ((t->cut != CUT_NONE) == is_cut) {
            t->offset = at;
            at = align_up(at + (size_t)t->layers * tensor_local(t));
        }
    }
    return at;
}

void tensors_init(Tensors* ts, GPTConfig c, int P, int r) {
    const int L = c.L;
    const size_t C = (size_t)c.C, Vp = (size_t)c.Vp, maxT = (size_t)c.maxT;
    // clang-format off
    const Tensor table[NTENSORS] = {
        // name     layers  rows  cols  decays  cut          the rest is computed below
        {"wte",        1,   Vp,    C,     1, CUT_ROWS,  0, 0, 0},
        {"wpe",        1,   maxT,  C,     1, CUT_NONE,  0, 0, 0},
        {"ln1w",       L,   C,     1,     0, CUT_NONE,  0, 0, 0},
        {"ln1b",       L,   C,     1,     0, CUT_NONE,  0, 0, 0},
        {"qkvw",       L,   3 * C, C,     1, CUT_QKV,   0, 0, 0},
        {"qkvb",       L,   3 * C, 1,     0, CUT_QKV,   0, 0, 0},
        {"attprojw",   L,   C,     C,     1, CUT_HEADS, 0, 0, 0},
        {"attprojb",   L,   C,     1,     0, CUT_NONE,  0, 0, 0},
        {"ln2w",       L,   C,     1,     0, CUT_NONE,  0, 0, 0},
        {"ln2b",       L,   C,     1,     0, CUT_NONE,  0, 0, 0},
        {"fcw",        L,   4 * C, C,     1, CUT_ROWS,  0, 0, 0},
        {"fcb",        L,   4 * C, 1,     0, CUT_ROWS,  0, 0, 0},
        {"fcprojw",    L,   C,     4 * C, 1, CUT_COLS,  0, 0, 0},
        {"fcprojb",    L,   C,     1,     0, CUT_NONE,  0, 0, 0},
        {"lnfw",       1,   C,     1,     0, CUT_NONE,  0, 0, 0},
        {"lnfb",       1,   C,     1,     0, CUT_NONE,  0, 0, 0},
    };
    // clang-format on
    ts->config = c;
    ts->P = P;
    ts->r = r;
    ts->ntotal = 0;
    for (int i = 0; i < NTENSORS; i++) {
        Tensor* t = &ts->t[i];
        *t = table[i];
        TensorPart p = tensor_part(ts, i, r);
        t->local_rows = p.nruns * p.nrows;
        t->local_cols = p.ncols;
        ts->ntotal += (size_t)t->layers * t->rows * t->cols;
    }
    ts->ncut = arena_place(ts, 1, 0);
    ts->nelem = arena_place(ts, 0, ts->ncut);
}
