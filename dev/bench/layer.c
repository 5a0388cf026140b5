// layer.c -- see layer.h
#include "dev/bench/layer.h"
#include "flashoverlap/fo_model.h"
#include <math.h>
#include <stdlib.h>

const char* layer_name(LayerOp op) {
    static const char* const names[NLAYER_OPS] = {"mlp", "attention", "mlp-backward", "attention-backward"};
    return names[op];
}

int layer_is_attention(LayerOp op) {
    return op == ATTENTION || op == ATTENTION_BACKWARD;
}

int layer_is_backward(LayerOp op) {
    return op == MLP_BACKWARD || op == ATTENTION_BACKWARD;
}

int layer_collectives(LayerOp op) {
    return layer_is_backward(op) ? 3 : 2;
}

size_t layer_shard_nelem(const LayerShape* s) {
    return s->N / (size_t)s->P * (size_t)s->C;
}

// columns of the first matmul, and the width that the second sums over
static int width1(const LayerShape* s) {
    return (layer_is_attention(s->op) ? 3 : 4) * s->C / s->P;
}
static int width2(const LayerShape* s) {
    return (layer_is_attention(s->op) ? 1 : 4) * s->C / s->P;
}

double layer_flops(const LayerShape* s) {
    return 2.0 * (double)s->N * (double)s->C * width2(s);
}

static int heads(const LayerShape* s) {
    return s->C / LAYER_HEAD / s->P;
}

static FoLayout layout(const LayerShape* s) {
    const int B = s->B ? s->B : s->P;
    FoLayout l = {B, (int)(s->N / (size_t)B), s->P, 0}; // a shard is whole sequences
    return l;
}

static floatX* own_rows(const Layer* y, floatX* all) {
    return all + (size_t)fo_group_rank(y->group) * layer_shard_nelem(&y->shape);
}

// ---- the layer --------------------------------------------------------------------------------------------
static void fc1_chunk(void* ctx, size_t row0, size_t n, FoStream* s) {
    const Layer* y = (const Layer*)ctx;
    const int w = width1(&y->shape), C = y->shape.C;
    const size_t at = row0 * (size_t)w;
    const floatX* inp = (layer_is_backward(y->shape.op) ? y->ln : y->all) + row0 * (size_t)C;
    fo_matmul_forward(y->pre + at, inp, y->w1, NULL, n, C, w, FO_FLOATX, s);
    if (!layer_is_attention(y->shape.op)) { fo_gelu_forward(y->act + at, y->pre + at, n * (size_t)w, s); }
}

static void queue_forward(Layer* y, const LayerPlan* p) {
    const LayerShape* s = &y->shape;
    if (layer_is_attention(s->op)) {
        FoColumns qkv;
        fo_allgather_matmul_begin(&qkv, y->pre, y->all, y->w1, NULL, s->N, s->C, width1(s), p->gather);
        fo_attention_matmul_reducescatter_forward(&y->st, y->act, y->lse, &qkv, y->w2, layout(s), heads(s),
                                                  LAYER_HEAD, s->C, !p->row, p->scatter);
    } else {
        fo_allgather_run(p->gather, y->all, (size_t)s->C * sizeof(floatX), s->N, fc1_chunk, y);
        fo_matmul_reducescatter_forward(&y->st, y->act, y->w2, s->N, width2(s), s->C, p->scatter);
    }
    fo_reducescatter_end(p->scatter, &y->st, own_rows(y, y->all), NULL, NULL, s->C, s->N);
}

// in the order of train_gpt.cu's backward pass
static void queue_backward(Layer* y, const LayerPlan* p) {
    const LayerShape* s = &y->shape;
    const int C = s->C, w1 = width1(s), w2 = width2(s);
    fo_overlap_mark(p->again);
    if (layer_is_attention(s->op)) {
        fo_allgather_matmul_attention_backward(y->dpre, y->datt, y->all, y->w2, y->pre, y->act, y->lse,
                                               layout(s), heads(s), LAYER_HEAD, C, p->gather);
    } else {
        fo_allgather_matmul_dgrad(y->dpre, y->all, y->pre, y->w2, s->N, w2, C, p->gather);
    }
    fo_allgather_begin(p->again, y->ln, (size_t)C * sizeof(floatX), s->N);
    layer_queue_part(y, WGRAD_UNDER);
    fo_matmul_reducescatter_dgrad(&y->st, y->dpre, y->w1, s->N, C, w1, p->scatter);
    fo_allgather_end(p->again);
    layer_queue_part(y, WGRAD_AFTER);
    fo_reducescatter_end(p->scatter, &y->st, own_rows(y, y->all), NULL, NULL, C, s->N);
}

void layer_queue(Layer* y, const LayerPlan* p) {
    if (layer_is_backward(y->shape.op)) {
        queue_backward(y, p);
    } else {
        queue_forward(y, p);
    }
}

static void part_forward(Layer* y, LayerPart part, size_t row0, size_t rows) {
    const LayerShape* s = &y->shape;
    const int w2 = width2(s);
    if (part == GATHER_SIDE) { fc1_chunk(y, row0, rows, y->compute); }
    if (part == SCATTER_SIDE) {
        floatX* out = (floatX*)y->st.partial + row0 * (size_t)s->C;
        fo_matmul_forward(out, y->act + row0 * (size_t)w2, y->w2, NULL, rows, w2, s->C, FO_FLOATX,
                          y->compute);
    }
    if (part == ATTENTION_ITSELF && layer_is_attention(s->op)) {
        fo_attention_forward(y->act, y->lse, y->pre, row0, rows, layout(s), heads(s), LAYER_HEAD, y->compute);
    }
}

static void part_backward(Layer* y, LayerPart part, size_t row0, size_t rows) {
    const LayerShape* s = &y->shape;
    const int C = s->C, w1 = width1(s), w2 = width2(s);
    const size_t at1 = row0 * (size_t)w1, at2 = row0 * (size_t)w2, at = row0 * (size_t)C;
    const int attention = layer_is_attention(s->op);
    if (part == GATHER_SIDE && attention) {
        fo_matmul_dgrad(y->datt + at2, y->all + at, y->w2, rows, w2, C, FO_FLOATX, y->compute);
    }
    if (part == GATHER_SIDE && !attention) {
        fo_matmul_gelu_dgrad(y->dpre + at1, y->all + at, y->w2, y->pre + at1, rows, w2, C, y->compute);
    }
    if (part == ATTENTION_ITSELF && attention) {
        fo_attention_backward(y->dpre, y->datt, y->pre, y->act, y->lse, row0, rows, layout(s), heads(s),
                              LAYER_HEAD, y->compute);
    }
    if (part == SCATTER_SIDE) {
        floatX* out = (floatX*)y->st.partial + at;
        fo_matmul_dgrad(out, y->dpre + at1, y->w1, rows, C, w1, FO_FLOATX, y->compute);
    }
}

void layer_queue_part(Layer* y, LayerPart part) {
    const LayerShape* s = &y->shape;
    const size_t rows = s->N / (size_t)s->P;
    const int backward = layer_is_backward(s->op);
    if (part == WGRAD_UNDER || part == WGRAD_AFTER) {
        if (!backward) { return; }
        if (part == WGRAD_UNDER) {
            fo_matmul_wgrad(y->dw2, NULL, y->all, y->act, s->N, width2(s), s->C, y->compute);
        } else {
            fo_matmul_wgrad(y->dw1, NULL, y->dpre, y->ln, s->N, s->C, width1(s), y->compute);
        }
    } else if (part == OWNERS_SUM) {
        const void* parts[FO_MAX_RANKS];
        for (int p = 0; p < s->P; p++) {
            parts[p] = (const floatX*)y->st.partial + (size_t)p * layer_shard_nelem(s);
        }
        fo_accumulate(own_rows(y, y->all), parts, NULL, NULL, rows, s->C, s->P, FO_FLOATX, y->compute);
    } else {
        for (int p = 0; p < s->P; p++) {
            (backward ? part_backward : part_forward)(y, part, (size_t)p * rows, rows);
        }
    }
}

// ---- memory -----------------------------------------------------------------------------------------------
static void fill(floatX* p, size_t nelem, uint64_t seed, double scale) {
    for (size_t i = 0; i < nelem; i++) { // uniform in [-scale, scale)
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        p[i] = fo_floatx((float)(scale * ((double)(seed >> 40) / (double)(1 << 23) - 1.0)));
    }
}

// device memory with random weights; scale keeps the size of activations about as it is
static floatX* weights(Layer* y, int OC, int K, uint64_t seed) {
    size_t nelem = (size_t)OC * (size_t)K;
    floatX* host = malloc(nelem * sizeof *host);
    fo_require(host != NULL, "out of memory");
    floatX* w = fo_malloc(y->device, nelem * sizeof *w);
    fill(host, nelem, seed, 1.7 / sqrt((double)K * (OC == y->shape.C ? y->shape.P : 1)));
    fo_upload(w, host, nelem * sizeof *w, y->compute);
    fo_stream_sync(y->compute);
    free(host);
    return w;
}

// all that the backward pass finds of the forward pass, and room for gradients
static void open_backward(Layer* y) {
    const LayerShape* s = &y->shape;
    const size_t N = s->N, w1 = (size_t)width1(s), w2 = (size_t)width2(s), C = (size_t)s->C;
    const size_t shard = layer_shard_nelem(s);
    y->ln = fo_malloc(y->device, N * C * sizeof(floatX));
    y->dpre = fo_malloc(y->device, N * w1 * sizeof(floatX));
    y->datt = fo_malloc(y->device, N * w2 * sizeof(floatX));
    y->dw1 = fo_malloc(y->device, w1 * C * sizeof(float));
    y->dw2 = fo_malloc(y->device, C * w2 * sizeof(float));
    y->dhost = malloc((w1 > w2 ? w1 : w2) * C * sizeof(float));
    fo_require(y->dhost != NULL, "out of memory");
    for (int p = 0; p < s->P; p++) {
        fill(y->host, shard, 1000 + (uint64_t)p, 1.7); // the input of rank p
        fo_upload(y->ln + (size_t)p * shard, y->host, shard * sizeof(floatX), y->compute);
        fo_stream_sync(y->compute);
    }
    fc1_chunk(y, 0, N, y->compute);
    if (layer_is_attention(s->op)) {
        fo_attention_forward(y->act, y->lse, y->pre, 0, N, layout(s), heads(s), LAYER_HEAD, y->compute);
    }
    fo_stream_sync(y->compute);
}

void layer_open(Layer* y, LayerShape shape, FoGroup* g, FoDevice* d) {
    memset(y, 0, sizeof *y);
    y->shape = shape, y->group = g, y->device = d;
    const LayerShape* s = &y->shape;
    const size_t N = s->N, C = (size_t)s->C, shard = layer_shard_nelem(s);
    const uint64_t r = (uint64_t)fo_group_rank(g);
    y->compute = fo_stream_create(d, "compute");
    y->comm = fo_stream_create(d, "comm");
    y->x = malloc(shard * sizeof *y->x);
    y->host = malloc(shard * sizeof *y->host);
    fo_require(y->x && y->host, "out of memory");
    fill(y->x, shard, 1000 + r, 1.7);
    y->w1 = weights(y, width1(s), s->C, 77 + r);
    y->w2 = weights(y, s->C, width2(s), 99 + r);
    y->all = fo_malloc(d, N * C * sizeof(floatX));
    y->pre = fo_malloc(d, N * (size_t)width1(s) * sizeof(floatX));
    y->act = fo_malloc(d, N * (size_t)width2(s) * sizeof(floatX));
    y->lse = fo_malloc(d, N * (C / LAYER_HEAD + 1) * sizeof(float));
    y->st.wire = FO_FLOATX;
    y->st.partial = fo_malloc(d, N * C * sizeof(floatX));
    y->st.received = fo_malloc(d, N * C * sizeof(floatX));
    if (layer_is_backward(s->op)) { open_backward(y); }
}

void layer_close(Layer* y) {
    void* memory[] = {y->w1,          y->w2, y->all,  y->pre,  y->act, y->lse, y->st.partial,
                      y->st.received, y->ln, y->dpre, y->datt, y->dw1, y->dw2};
    fo_stream_destroy(y->compute);
    fo_stream_destroy(y->comm);
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
        if (memory[i]) { fo_free(y->device, memory[i]); }
    }
    free(y->x);
    free(y->host);
    free(y->dhost);
}

void layer_plan_open(Layer* y, LayerPlan* p, const BenchMode* m) {
    memset(p, 0, sizeof *p);
    p->gather =
        fo_overlap_create("gather", FO_ALLGATHER, m->mode, m->m, m->topology, y->group, y->compute, y->comm);
    if (layer_is_backward(y->shape.op)) {
        p->again = fo_overlap_create("again", FO_ALLGATHER, m->mode, m->m, m->topology, y->group, y->compute,
                                     y->comm);
    }
    p->scatter = fo_overlap_create("scatter", FO_REDUCESCATTER, m->mode, m->m, m->topology, y->group,
                                   y->compute, y->comm);
    p->row = m->row || m->mode != FO_FLASH; // slices are of rows, as Megatron's
}

void layer_plan_close(LayerPlan* p) {
    fo_overlap_destroy(p->gather);
    fo_overlap_destroy(p->again);
    fo_overlap_destroy(p->scatter);
}

double layer_exposed_ms(const LayerPlan* p) {
    return p->gather->exposed_ms + p->scatter->exposed_ms + (p->again ? p->again->exposed_ms : 0.0);
}

void layer_start(Layer* y, LayerPlan* p) {
    const LayerShape* s = &y->shape;
    const size_t nbytes = layer_shard_nelem(s) * sizeof(floatX), C = (size_t)s->C;
    fo_zero(y->all, s->N * C * sizeof(floatX), y->compute);
    fo_upload(own_rows(y, y->all), y->x, nbytes, y->compute);
    if (layer_is_backward(s->op)) {
        fo_zero(y->ln, s->N * C * sizeof(floatX), y->compute); // but for the own rows it has to be gathered
        fo_upload(own_rows(y, y->ln), y->x, nbytes, y->compute);
        fo_zero(y->dw1, (size_t)width1(s) * C * sizeof(float), y->compute);
        fo_zero(y->dw2, (size_t)width2(s) * C * sizeof(float), y->compute);
    }
    fo_stream_sync(y->compute);
    fo_overlap_reset(p->gather);
    fo_overlap_reset(p->scatter);
    if (p->again) { fo_overlap_reset(p->again); }
}

static uint64_t hash_bytes(uint64_t h, const void* p, size_t nbytes) {
    const unsigned char* b = (const unsigned char*)p;
    for (size_t i = 0; i < nbytes; i += 4) {
        uint32_t word = 0;
        memcpy(&word, b + i, nbytes - i < 4 ? nbytes - i : 4);
        h = (h ^ word) * 1099511628211u;
    }
    return h;
}

// through host, which is of that size
static uint64_t hash_device(Layer* y, uint64_t h, void* host, const void* device, size_t nbytes) {
    memset(host, 0xff, nbytes); // NaN
    fo_download(host, device, nbytes, y->compute);
    fo_stream_sync(y->compute);
    return hash_bytes(h, host, nbytes);
}

uint64_t layer_hash(Layer* y) {
    const LayerShape* s = &y->shape;
    const size_t C = (size_t)s->C;
    uint64_t h = 1469598103934665603u;
    fo_stream_sync(y->comm);
    h = hash_device(y, h, y->host, own_rows(y, y->all), layer_shard_nelem(s) * sizeof(floatX));
    if (layer_is_backward(s->op)) {
        h = hash_device(y, h, y->dhost, y->dw1, (size_t)width1(s) * C * sizeof(float));
        h = hash_device(y, h, y->dhost, y->dw2, (size_t)width2(s) * C * sizeof(float));
    }
    return h;
}

// ---- what it should take ----------------------------------------------------------------------------------
double layer_compute_ms(const LayerCost* c) {
    double ms = 0.0;
    for (int part = 0; part < OWNERS_SUM; part++) {
        ms += c->part_ms[part];
    }
    return ms;
}

double layer_shard_ms(const LayerShape* s, const LayerCost* c, int m) {
    return 1e3 * fo_model_shard_s(c->gbytes_s, c->us, layer_shard_nelem(s) * sizeof(floatX), m);
}

double layer_collectives_ms(const LayerShape* s, const LayerCost* c) {
    return layer_collectives(s->op) * fo_model_collective_s(s->P, layer_shard_ms(s, c, 1));
}

static double predicted_backward_ms(const LayerShape* s, const LayerCost* c, const BenchMode* mode) {
    const double shard = layer_shard_ms(s, c, mode->m), T = fo_model_collective_s(s->P, shard);
    const double* part = c->part_ms;
    const double first = part[GATHER_SIDE] + part[ATTENTION_ITSELF];
    if (mode->mode == FO_NONE) { return 3.0 * T; }
    // attention goes by whole shards: slices of all of them leave it to the end
    const double covers = mode->mode == FO_SLICE ? part[GATHER_SIDE] : first;
    const double b1 = fo_model_exposed_s(mode->mode, mode->m, s->P, shard, covers);
    const double under = first + b1 + part[WGRAD_UNDER]; // when the last matmul but one begins
    const double tail = fo_model_exposed_s(mode->mode, mode->m, s->P, shard, part[SCATTER_SIDE]);
    const double arrived = fmax(under + part[SCATTER_SIDE] + tail, 3.0 * T);
    const double b2 = fmax(2.0 * T - (under + part[SCATTER_SIDE]), 0.0);
    const double b3 = fmax(arrived - (under + part[SCATTER_SIDE] + b2 + part[WGRAD_AFTER]), 0.0);
    return b1 + b2 + b3;
}

double layer_predicted_ms(const LayerShape* s, const LayerCost* c, const BenchMode* mode) {
    const double shard = layer_shard_ms(s, c, mode->m);
    if (layer_is_backward(s->op)) { return predicted_backward_ms(s, c, mode); }
    if (s->op == ATTENTION && mode->mode == FO_FLASH && !mode->row) {
        const int m[2] = {mode->m, mode->m};
        const double shards[2] = {shard, shard};
        const double compute[2] = {c->part_ms[GATHER_SIDE],
                                   c->part_ms[ATTENTION_ITSELF] + c->part_ms[SCATTER_SIDE]};
        double exposed[2];
        fo_model_in_turn(s->P, m, shards, compute, exposed);
        return exposed[0] + exposed[1];
    }
    return fo_model_exposed_s(mode->mode, mode->m, s->P, shard, c->part_ms[GATHER_SIDE]) +
           fo_model_exposed_s(mode->mode, mode->m, s->P, shard, c->part_ms[SCATTER_SIDE]);
}
