/* ops.c -- what the operations of fo_ops.h cost: a GEMM by its shape, attention by its flops, all else by the
 * bytes that it reads and writes once. See sim.h.
 */
#include "flashoverlap/fo_ops.h"
#include "flashoverlap/sim/sim.h"

enum { X = sizeof(floatX), F4 = sizeof(float) };

static double cells(size_t n, int C) {
    return (double)n * (double)C;
}

static void queue_bytes(FoStream* s, const char* name, double nbytes) {
    sim_queue(s, name, sim_bytes_s(&s->device->h, nbytes), 0.0, 1);
}

// a GEMM, and bytes that a kernel of its own goes over
static void queue_gemm(FoStream* s, const char* name, size_t rows, int K, int cols, double nbytes) {
    const SimHardware* h = &s->device->h;
    const double flops = 2.0 * cells(rows, K) * (double)cols;
    sim_queue(s, name, sim_gemm_s(h, rows, K, cols) + sim_bytes_s(h, nbytes), flops, 1);
}

// ---- rows, norms, elementwise -----------------------------------------------------------------------------
void fo_gather_rows(floatX* out, const floatX* inp, const int* idx, size_t n, int C, FoStream* s) {
    (void)out, (void)inp, (void)idx;
    queue_bytes(s, "gather_rows", 2 * X * cells(n, C));
}

void fo_scatter_add_rows(float* out, const floatX* rows, const int* dst, const int* start, const int* order,
                         size_t nuniq, int C, FoStream* s) {
    (void)out, (void)rows, (void)dst, (void)start, (void)order;
    queue_bytes(s, "scatter_add_rows", (X + 2 * F4) * cells(nuniq, C));
}

void fo_add_rows(float* out, const float* rows, const int* dst, size_t n, int C, FoStream* s) {
    (void)out, (void)rows, (void)dst;
    queue_bytes(s, "add_rows", 3 * F4 * cells(n, C));
}

void fo_encoder_forward(floatX* out, const floatX* rows, const floatX* wpe, const int* tok, const int* pos,
                        size_t n, int C, FoStream* s) {
    (void)out, (void)rows, (void)wpe, (void)tok, (void)pos;
    queue_bytes(s, "encoder_forward", 3 * X * cells(n, C));
}

void fo_layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                          const floatX* bias, size_t n, int C, FoStream* s) {
    (void)out, (void)mean, (void)rstd, (void)inp, (void)weight, (void)bias;
    queue_bytes(s, "layernorm_forward", 2 * X * cells(n, C));
}

void fo_layernorm_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                           const floatX* weight, const float* mean, const float* rstd, size_t n, int C,
                           FoStream* s) {
    (void)dinp, (void)dweight, (void)dbias, (void)dout, (void)inp, (void)weight, (void)mean, (void)rstd;
    queue_bytes(s, "layernorm_backward", 4 * X * cells(n, C));
}

void fo_bias_backward(float* dbias, const floatX* dout, size_t n, int C, FoStream* s) {
    (void)dbias, (void)dout;
    queue_bytes(s, "bias_backward", X * cells(n, C));
}

void fo_gelu_forward(floatX* out, const floatX* inp, size_t nelem, FoStream* s) {
    (void)out, (void)inp;
    queue_bytes(s, "gelu_forward", 2 * X * (double)nelem);
}

void fo_gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t nelem, FoStream* s) {
    (void)dinp, (void)dout, (void)inp;
    queue_bytes(s, "gelu_backward", 3 * X * (double)nelem);
}

void fo_accumulate(floatX* out, const void* const parts[], const floatX* residual, const floatX* bias,
                   size_t n, int C, int P, FoDtype part_type, FoStream* s) {
    (void)out, (void)parts, (void)bias;
    const double each = (double)P * (double)fo_dtype_nbytes(part_type) + (residual ? 2 * X : X);
    queue_bytes(s, "accumulate", each * cells(n, C));
}

void fo_add(void* acc, const void* part, size_t nelem, FoDtype type, FoStream* s) {
    (void)acc, (void)part;
    queue_bytes(s, "add", 3.0 * (double)fo_dtype_nbytes(type) * (double)nelem);
}

void fo_sum(float* out, const float* const parts[], size_t nelem, int P, FoStream* s) {
    (void)out, (void)parts;
    queue_bytes(s, "sum", ((double)P + 1.0) * F4 * (double)nelem);
}

// ---- matmul -----------------------------------------------------------------------------------------------
void fo_matmul_forward(void* out, const floatX* inp, const floatX* weight, const floatX* bias, size_t n,
                       int K, int OC, FoDtype out_type, FoStream* s) {
    (void)out, (void)inp, (void)weight, (void)bias, (void)out_type;
    queue_gemm(s, "matmul_forward", n, K, OC, 0.0);
}

void fo_matmul_gelu_forward(floatX* out, floatX* gelu, const floatX* inp, const floatX* weight,
                            const floatX* bias, size_t n, int K, int OC, FoStream* s) {
    (void)out, (void)gelu, (void)inp, (void)weight, (void)bias;
    queue_gemm(s, "matmul_gelu_forward", n, K, OC, 2 * X * cells(n, OC));
}

void fo_matmul_forward_add(float* out, const floatX* inp, const floatX* weight, size_t n, int K, int OC,
                           FoStream* s) {
    (void)out, (void)inp, (void)weight;
    queue_gemm(s, "matmul_forward_add", n, K, OC, 0.0);
}

void fo_matmul_dgrad(void* dinp, const floatX* dout, const floatX* weight, size_t n, int K, int OC,
                     FoDtype out_type, FoStream* s) {
    (void)dinp, (void)dout, (void)weight, (void)out_type;
    queue_gemm(s, "matmul_dgrad", n, OC, K, 0.0);
}

void fo_matmul_gelu_dgrad(floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pregelu,
                          size_t n, int K, int OC, FoStream* s) {
    (void)dinp, (void)dout, (void)weight, (void)pregelu;
    queue_gemm(s, "matmul_gelu_dgrad", n, OC, K, 3 * X * cells(n, K));
}

void fo_matmul_dgrad_add(float* dinp, const floatX* dout, const floatX* weight, size_t n, int K, int OC,
                         FoStream* s) {
    (void)dinp, (void)dout, (void)weight;
    queue_gemm(s, "matmul_dgrad_add", n, OC, K, 0.0);
}

void fo_matmul_wgrad(float* dweight, float* dbias, const floatX* dout, const floatX* inp, size_t n, int K,
                     int OC, FoStream* s) {
    (void)dweight, (void)dout, (void)inp;
    queue_gemm(s, "matmul_wgrad", (size_t)OC, (int)n, K, dbias ? X * cells(n, OC) : 0.0);
}

void fo_matmul_wgrad_rows(float* dweight, const floatX* dout, const floatX* inp, size_t row0, size_t nrows,
                          size_t n, int K, int OC, FoStream* s) {
    (void)dweight, (void)dout, (void)inp, (void)row0, (void)OC;
    if (nrows > 0) { queue_gemm(s, "matmul_wgrad_rows", nrows, (int)n, K, 0.0); }
}

// ---- attention --------------------------------------------------------------------------------------------
/* flops of the rows [row0, row0 + n): a query sees the positions up to its own. Shards of either layout cost
 * alike, so that of n rows is their share of all B * T * (T + 1) / 2 pairs; products: of head size, for each
 * pair, 2 of forward, 5 of backward.
 */
static void queue_attention(FoStream* s, const char* name, size_t n, FoLayout l, int NH, int hs,
                            int products) {
    const SimHardware* h = &s->device->h;
    const double N = (double)l.B * (double)l.T, pairs = 0.5 * N * ((double)l.T + 1.0) * ((double)n / N);
    const double flops = 2.0 * products * pairs * (double)NH * (double)hs;
    sim_queue(s, name, 1e-6 * h->kernel_us + flops / (1e12 * h->attention_tflops), flops, 1);
}

void fo_attention_forward(floatX* out, float* lse, const floatX* qkv, size_t row0, size_t n, FoLayout l,
                          int NH, int hs, FoStream* s) {
    (void)out, (void)lse, (void)qkv, (void)row0;
    queue_attention(s, "attention_forward", n, l, NH, hs, 2);
}

void fo_attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                           const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s) {
    (void)dqkv, (void)dout, (void)qkv, (void)out, (void)lse, (void)row0;
    queue_attention(s, "attention_backward", n, l, NH, hs, 5);
}

void fo_attention_backward_kv(float* dq, floatX* dkv, const floatX* dout, const floatX* qkv,
                              const floatX* out, const float* lse, size_t row0, size_t n, FoLayout l, int NH,
                              int hs, FoStream* s) {
    (void)dq, (void)dkv, (void)dout, (void)qkv, (void)out, (void)lse, (void)row0;
    queue_attention(s, "attention_backward_kv", n, l, NH, hs, 5);
}

void fo_attention_cache(floatX* cache, const floatX* qkv, FoLayout l, int room, int NH, int hs, FoStream* s) {
    (void)cache, (void)qkv, (void)room;
    queue_bytes(s, "attention_cache", 4 * X * cells((size_t)l.B * (size_t)l.T, NH * hs));
}

void fo_attention_decode(floatX* out, floatX* cache, const floatX* qkv, const int* pos, int B, int room,
                         int NH, int hs, FoStream* s) {
    (void)out, (void)cache, (void)qkv, (void)pos;
    queue_bytes(s, "attention_decode", 2 * X * cells((size_t)B * (size_t)room, NH * hs));
}

// ---- loss and optimizer -----------------------------------------------------------------------------------
void fo_softmax_stats(FoSoftmaxStat* stats, const floatX* logits, const int* targets, size_t n, int V,
                      int valid, int v0, FoStream* s) {
    (void)stats, (void)logits, (void)targets, (void)valid, (void)v0;
    queue_bytes(s, "softmax_stats", X * cells(n, V));
}

void fo_softmax_loss(float* losses, floatX* logits, const FoSoftmaxStat* stats, const int* targets,
                     float dscale, float z, size_t n, int V, int valid, int v0, int P, FoStream* s) {
    (void)losses, (void)logits, (void)stats, (void)targets, (void)z, (void)valid, (void)v0, (void)P;
    queue_bytes(s, "softmax_loss", dscale != 0.0f ? 2 * X * cells(n, V) : F4 * (double)n);
}

void fo_adamw_update(floatX* param, float* master, float* m, float* v, const float* grad, size_t nelem,
                     FoAdamw a, FoStream* s) {
    (void)param, (void)master, (void)m, (void)v, (void)grad, (void)a;
    queue_bytes(s, "adamw_update", (7 * F4 + X) * (double)nelem);
}

void fo_square_sum(double* out, const float* x, size_t nelem, FoStream* s) {
    (void)out, (void)x;
    queue_bytes(s, "square_sum", F4 * (double)nelem);
}
