/* bench_ops.c -- how fast the GEMMs and attention of a GPT-2 124M layer are, beside the device's own peak.
 *
 * One rank, all cores, B=4 T=1024 (the logits: 1024 rows). Times are medians; the shapes take turns, so that
 * a machine that slows down for a while slows all of them. bench_ops [ROUNDS], 7 by default.
 */
#include "flashoverlap/fo_ops.h"
#include <stdio.h>
#include <stdlib.h>

enum { FORWARD, DGRAD, WGRAD, ATTENTION_FORWARD, ATTENTION_BACKWARD };
enum { B = 4, T = 1024, NH = 12, HS = 64, MAX_ROUNDS = 101 };

typedef struct {
    const char* name;
    int kind;
    size_t n;
    int K, OC;
    int per_layer; // how often a training step does it in each layer; the head is counted apart
} Shape;

static const Shape shapes[] = {
    {"qkv forward", FORWARD, 4096, 768, 2304, 1},
    {"projection forward", FORWARD, 4096, 768, 768, 1},
    {"fc1 forward", FORWARD, 4096, 768, 3072, 1},
    {"fc2 forward", FORWARD, 4096, 3072, 768, 1},
    {"head forward", FORWARD, 1024, 768, 50304, 0},
    {"qkv dgrad", DGRAD, 4096, 768, 2304, 1},
    {"projection dgrad", DGRAD, 4096, 768, 768, 1},
    {"fc1 dgrad", DGRAD, 4096, 768, 3072, 1},
    {"fc2 dgrad", DGRAD, 4096, 3072, 768, 1},
    {"head dgrad", DGRAD, 1024, 768, 50304, 0},
    {"qkv wgrad", WGRAD, 4096, 768, 2304, 1},
    {"projection wgrad", WGRAD, 4096, 768, 768, 1},
    {"fc1 wgrad", WGRAD, 4096, 768, 3072, 1},
    {"fc2 wgrad", WGRAD, 4096, 3072, 768, 1},
    {"head wgrad", WGRAD, 1024, 768, 50304, 0},
    {"attention forward", ATTENTION_FORWARD, 4096, 0, 0, 1},
    {"attention backward", ATTENTION_BACKWARD, 4096, 0, 0, 1},
};
enum { NSHAPES = sizeof shapes / sizeof *shapes };

// memory that all shapes share: the largest operand of each role
typedef struct {
    floatX *x, *y, *weight, *qkv, *dqkv;
    float *dweight, *lse;
} Buffers;

static double flops_of(const Shape* p) {
    double pairs = 0.5 * T * (T + 1.0) * B * NH;
    switch (p->kind) {
    case ATTENTION_FORWARD: return 4.0 * HS * pairs;
    case ATTENTION_BACKWARD: return 10.0 * HS * pairs;
    default: return 2.0 * (double)p->n * p->K * p->OC;
    }
}

static void call(const Shape* p, const Buffers* m, FoStream* s) {
    FoLayout l = {B, T, 1, 0};
    switch (p->kind) {
    case FORWARD: fo_matmul_forward(m->y, m->x, m->weight, m->weight, p->n, p->K, p->OC, FO_FLOATX, s); break;
    case DGRAD: fo_matmul_dgrad(m->y, m->x, m->weight, p->n, p->K, p->OC, FO_FLOATX, s); break;
    case WGRAD: fo_matmul_wgrad(m->dweight, m->dweight, m->x, m->y, p->n, p->K, p->OC, s); break;
    case ATTENTION_FORWARD: fo_attention_forward(m->y, m->lse, m->qkv, 0, p->n, l, NH, HS, s); break;
    default: fo_attention_backward(m->dqkv, m->x, m->qkv, m->y, m->lse, 0, p->n, l, NH, HS, s);
    }
}

static floatX* random_floatx(FoDevice* d, size_t nelem, uint32_t seed) {
    floatX* p = fo_malloc(d, nelem * sizeof *p);
    for (size_t i = 0; i < nelem; i++) {
        seed = seed * 1664525u + 1013904223u;
        p[i] = fo_floatx((float)(seed >> 8) / (float)(1 << 23) - 1.0f);
    }
    return p;
}

static int ascending(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

int main(int argc, char** argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 7;
    static double seconds[NSHAPES][MAX_ROUNDS];
    if (argc > 2 || rounds < 1 || rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: bench_ops [ROUNDS], 1 to %d rounds\n", MAX_ROUNDS);
        return 1;
    }
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "bench");
    size_t most = (size_t)1024 * 50304, rows = (size_t)B * T;
    Buffers m = {random_floatx(d, most, 1),
                 random_floatx(d, most, 2),
                 random_floatx(d, most, 3),
                 random_floatx(d, rows * 2304, 4),
                 fo_malloc(d, rows * 2304 * sizeof(floatX)),
                 fo_malloc(d, most * sizeof(float)),
                 fo_malloc(d, rows * NH * sizeof(float))};
    double peak = fo_device_peak_tflops(d);
    for (int round = -1; round < rounds; round++) { // the first makes primitives and is not counted
        for (int i = 0; i < NSHAPES; i++) {
            double start = fo_now();
            call(&shapes[i], &m, s);
            fo_stream_sync(s);
            if (round >= 0) { seconds[i][round] = fo_now() - start; }
        }
    }
    printf("# %s, %s, GPT-2 124M, B=%d T=%d, %d rounds\n", fo_device_name(d),
           FO_FLOATX == FO_BF16 ? "bf16" : "fp32", B, T, rounds);
    printf("# peak     %.3f TFLOP/s, a GEMM of 2048 x 1024 x 2048 on this device, measured at start\n", peak);
    printf("# n, K, OC rows, width summed over (dgrad: OC), output channels; forward with bias, wgrad with "
           "dbias\n");
    printf("# ms       median;  TFLOP/s of it;  %% of peak (above 100: the machine was slower at start)\n");
    printf("# share    of the sum over a layer's operations here, forward and backward (head: not in it)\n");
    printf("%-20s %5s %5s %6s %9s %8s %7s %7s\n", "operation", "n", "K", "OC", "ms", "TFLOP/s", "% peak",
           "share");
    double layer = 0.0;
    for (int i = 0; i < NSHAPES; i++) {
        qsort(seconds[i], (size_t)rounds, sizeof(double), ascending);
        layer += shapes[i].per_layer * seconds[i][rounds / 2];
    }
    for (int i = 0; i < NSHAPES; i++) {
        const Shape* p = &shapes[i];
        double t = seconds[i][rounds / 2], tflops = flops_of(p) / t * 1e-12;
        printf("%-20s %5zu %5d %6d %9.2f %8.3f %6.0f%% %6.1f%%\n", p->name, p->n, p->K, p->OC, 1e3 * t,
               tflops, 100.0 * tflops / peak, 100.0 * p->per_layer * t / layer);
    }
    printf("# a layer's GEMMs and attention: %.1f ms\n", 1e3 * layer);
    fo_stream_destroy(s);
    fo_free(d, m.x), fo_free(d, m.y), fo_free(d, m.weight), fo_free(d, m.qkv), fo_free(d, m.dqkv);
    fo_free(d, m.dweight), fo_free(d, m.lse);
    fo_device_close(d);
    return 0;
}
