/* tensors.c -- the parameter table of a GPT, and which part of each tensor a rank holds. See tensors.h.
 *
 * Everything follows from unit_boxes, which lists the rows of a unit as a tp rank holds them whole; a shard
 * is a range of these rows.
 */
#include "train/tensors.h"

#define ALIGN 64 // elements: the offset of each tensor in the arena is a multiple

// one of the ranges of heads into which tp rank t's are cut, in channels
typedef struct {
    size_t c0, width;
} HeadGroup;

static HeadGroup head_group(const Tensors* ts, int t, int j) {
    const size_t NH = (size_t)ts->config.NH, hs = (size_t)ts->config.C / NH;
    const size_t first = fo_cut(NH, ts->cuts.tp, t), nheads = fo_cut_n(NH, ts->cuts.tp, t);
    HeadGroup g = {(first + fo_cut(nheads, ts->cuts.up, j)) * hs, fo_cut_n(nheads, ts->cuts.up, j) * hs};
    return g;
}

// boxes of q, k, v number `from` to `to` - 1 of a head group
static int qkv_boxes(const Tensors* ts, HeadGroup g, int from, int to, size_t cols, TensorBox* boxes) {
    for (int i = from; i < to; i++) {
        TensorBox box = {(size_t)i * (size_t)ts->config.C + g.c0, g.width, 0, cols, 0};
        boxes[i - from] = box;
    }
    return to - from;
}

// unit j of one layer as tp rank t holds it, before replicas share it; boxes may be empty
static int unit_boxes(const Tensors* ts, int tensor, int t, int j, TensorBox boxes[TENSOR_MAX_BOXES]) {
    const Tensor* x = &ts->t[tensor];
    const int tp = ts->cuts.tp, up = ts->cuts.up;
    TensorBox box = {0, x->rows, 0, x->cols, 0};
    int n = 0;
    switch (x->cut) {
    case CUT_NONE: break;
    case CUT_ROWS:
        box.row0 = fo_cut(x->rows, tp, t);
        box.nrows = fo_cut_n(x->rows, tp, t);
        break;
    case CUT_COLS:
        box.col0 = fo_cut(x->cols, tp, t);
        box.ncols = fo_cut_n(x->cols, tp, t);
        break;
    case CUT_HEADS:
        box.col0 = head_group(ts, t, j).c0;
        box.ncols = head_group(ts, t, j).width;
        break;
    case CUT_QKV:
        if (x->sharded && up > 1) { // q, or k and v
            return qkv_boxes(ts, head_group(ts, t, j / 2), j % 2, 1 + j % 2 * 2, x->cols, boxes);
        }
        for (int i = 0; i < up; i++) {
            n += qkv_boxes(ts, head_group(ts, t, i), 0, 3, x->cols, boxes + n);
        }
        return n;
    }
    boxes[0] = box;
    return 1;
}

int tensor_nunits(const Tensors* ts, int tensor) {
    const Tensor* x = &ts->t[tensor];
    const int up = ts->cuts.up;
    return !x->sharded || up == 1 ? 1 : x->cut == CUT_QKV ? 2 * up : x->cut == CUT_HEADS ? up : 1;
}

// unit j as (t, shard) holds it, of which the boxes are given; offset is not filled in
static TensorUnit unit_of(const Tensors* ts, int tensor, int shard, const TensorBox* boxes, int nboxes) {
    TensorUnit u = {0, 0, 0, 0, boxes[0].ncols};
    for (int i = 0; i < nboxes; i++) {
        u.rows += boxes[i].nrows;
    }
    const int nshards = ts->t[tensor].sharded ? ts->cuts.nshards : 1;
    u.row0 = nshards > 1 ? fo_cut(u.rows, nshards, shard) : 0;
    u.nrows = (nshards > 1 ? fo_cut(u.rows, nshards, shard + 1) : u.rows) - u.row0;
    return u;
}

TensorUnit tensor_unit(const Tensors* ts, int tensor, int j) {
    TensorBox boxes[TENSOR_MAX_BOXES];
    TensorUnit u = {0, 0, 0, 0, 0};
    for (int i = 0; i <= j; i++) {
        const size_t offset = u.offset + u.nrows * u.cols;
        const int n = unit_boxes(ts, tensor, ts->cuts.t, i, boxes);
        u = unit_of(ts, tensor, ts->cuts.shard, boxes, n);
        u.offset = offset;
    }
    return u;
}

// what of a box lies in rows [first, end), counted as the box counts
static TensorBox box_rows(TensorBox box, size_t first, size_t end) {
    const size_t a = first > box.row0 ? first : box.row0;
    const size_t b = end < box.row0 + box.nrows ? end : box.row0 + box.nrows;
    TensorBox part = {a, b > a ? b - a : 0, box.col0, box.ncols, box.offset + (a - box.row0) * box.ncols};
    return part;
}

int tensor_boxes(const Tensors* ts, int tensor, int t, int shard, TensorBox boxes[TENSOR_MAX_BOXES]) {
    TensorBox whole[TENSOR_MAX_BOXES];
    size_t offset = 0;
    int n = 0;
    for (int j = 0; j < tensor_nunits(ts, tensor); j++) {
        const int nwhole = unit_boxes(ts, tensor, t, j, whole);
        const TensorUnit u = unit_of(ts, tensor, shard, whole, nwhole);
        size_t before = 0; // rows of the unit in earlier boxes
        for (int i = 0; i < nwhole; i++) {
            // rows of the unit -> rows of the file
            const size_t first = u.row0 > before ? u.row0 - before : 0;
            const size_t end = u.row0 + u.nrows > before ? u.row0 + u.nrows - before : 0;
            TensorBox part = box_rows(whole[i], whole[i].row0 + first, whole[i].row0 + end);
            before += whole[i].nrows;
            if (part.nrows == 0 || part.ncols == 0) { continue; }
            part.offset = offset;
            offset += part.nrows * part.ncols;
            boxes[n++] = part;
        }
    }
    return n;
}

int tensor_boxes_of_rows(const Tensors* ts, int tensor, int t, int shard, size_t row, size_t nrows,
                         TensorBox boxes[TENSOR_MAX_BOXES]) {
    int n = 0;
    for (int i = 0, all = tensor_boxes(ts, tensor, t, shard, boxes); i < all; i++) {
        const TensorBox part = box_rows(boxes[i], row, row + nrows);
        if (part.nrows > 0) { boxes[n++] = part; }
    }
    return n;
}

static size_t align_up(size_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

// places the sharded tensors (part 0), the others that are cut (1) or the rest (2) one after the other from
// `at` on; returns where they end
static size_t arena_place(Tensors* ts, int part, size_t at) {
    for (int i = 0; i < NTENSORS; i++) {
        Tensor* t = &ts->t[i];
        if ((t->sharded ? 0 : t->cut != CUT_NONE ? 1 : 2) == part) {
            t->offset = at;
            at = align_up(at + (size_t)t->layers * tensor_local(t));
        }
    }
    return at;
}

// of one layer in this table: units lie below each other, attprojw's side by side
static void local_size(Tensors* ts, int tensor) {
    Tensor* t = &ts->t[tensor];
    t->local_rows = t->local_cols = 0;
    for (int j = 0; j < tensor_nunits(ts, tensor); j++) {
        const TensorUnit u = tensor_unit(ts, tensor, j);
        t->local_rows = t->cut == CUT_HEADS ? u.nrows : t->local_rows + u.nrows;
        t->local_cols = t->cut == CUT_HEADS ? t->local_cols + u.cols : u.cols;
    }
}

void tensors_init(Tensors* ts, GPTConfig c, TensorCuts cuts) {
    const int L = c.L;
    const size_t C = (size_t)c.C, Vp = (size_t)c.Vp, maxT = (size_t)c.maxT;
    // clang-format off
    const Tensor table[NTENSORS] = {
        // name     layers  rows  cols  decays sharded cut          the rest is computed below
        {"wte",        1,   Vp,    C,     1,     1,    CUT_ROWS,  0, 0, 0},
        {"wpe",        1,   maxT,  C,     1,     0,    CUT_NONE,  0, 0, 0},
        {"ln1w",       L,   C,     1,     0,     0,    CUT_NONE,  0, 0, 0},
        {"ln1b",       L,   C,     1,     0,     0,    CUT_NONE,  0, 0, 0},
        {"qkvw",       L,   3 * C, C,     1,     1,    CUT_QKV,   0, 0, 0},
        {"qkvb",       L,   3 * C, 1,     0,     0,    CUT_QKV,   0, 0, 0},
        {"attprojw",   L,   C,     C,     1,     1,    CUT_HEADS, 0, 0, 0},
        {"attprojb",   L,   C,     1,     0,     0,    CUT_NONE,  0, 0, 0},
        {"ln2w",       L,   C,     1,     0,     0,    CUT_NONE,  0, 0, 0},
        {"ln2b",       L,   C,     1,     0,     0,    CUT_NONE,  0, 0, 0},
        {"fcw",        L,   4 * C, C,     1,     1,    CUT_ROWS,  0, 0, 0},
        {"fcb",        L,   4 * C, 1,     0,     0,    CUT_ROWS,  0, 0, 0},
        {"fcprojw",    L,   C,     4 * C, 1,     1,    CUT_COLS,  0, 0, 0},
        {"fcprojb",    L,   C,     1,     0,     0,    CUT_NONE,  0, 0, 0},
        {"lnfw",       1,   C,     1,     0,     0,    CUT_NONE,  0, 0, 0},
        {"lnfb",       1,   C,     1,     0,     0,    CUT_NONE,  0, 0, 0},
    };
    // clang-format on
    ts->config = c;
    ts->cuts = cuts;
    ts->ntotal = 0;
    memcpy(ts->t, table, sizeof table);
    for (int i = 0; i < NTENSORS; i++) {
        local_size(ts, i);
        ts->ntotal += (size_t)ts->t[i].layers * ts->t[i].rows * ts->t[i].cols;
    }
    ts->nmatrix = arena_place(ts, 0, 0);
    ts->ncut = arena_place(ts, 1, ts->nmatrix);
    ts->nelem = arena_place(ts, 2, ts->ncut);
}
