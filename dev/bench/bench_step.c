/* bench_step.c -- one training step of GPT-2 on one rank: tok/s, MFU, and the share of each kind of work.
 *
 *   bench_step [MODEL [B [T [STEPS]]]]     default d12 4 1024 3, random tokens; the first step (warm-up) is
 *   left out
 *
 * The step is train_gpt.cu's own; dev/bench/peers times it beside other programs'.
 */
#define TESTING
#include "train_gpt.cu"
#include "flashoverlap/cpu/cpu.h"
#include "train/rng.h"
#include "train/weights.h"

typedef struct {
    TrainOptions opt;
    GPTConfig config;
    int nsteps;
} Bench;

static int by_seconds(const void* a, const void* b) {
    const FoOpTime *x = (const FoOpTime*)a, *y = (const FoOpTime*)b;
    return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

static void print_shares(const FoOpTime* before, int nbefore, FoOpTime* after, int nafter) {
    double sum = 0.0;
    for (int i = 0; i < nafter; i++) {
        for (int k = 0; k < nbefore; k++) {
            if (after[i].name == before[k].name) {
                after[i].seconds -= before[k].seconds;
                after[i].ncalls -= before[k].ncalls;
            }
        }
        sum += after[i].seconds;
    }
    qsort(after, (size_t)nafter, sizeof *after, by_seconds);
    printf("# %-28s %8s %10s %8s\n", "operation", "share", "ms", "calls");
    for (int i = 0; i < nafter && after[i].seconds > 0.0005 * sum; i++) {
        printf("  %-28s %7.1f%% %10.1f %8ld\n", after[i].name, 100.0 * after[i].seconds / sum,
               1e3 * after[i].seconds, after[i].ncalls);
    }
}

static int by_value(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static void body(FoGroup* world, void* arg) {
    Bench* x = (Bench*)arg;
    static GPT g;
    FoOpTime before[FO_MAX_OP_NAMES], after[FO_MAX_OP_NAMES];
    int B = x->opt.batch, T = x->opt.seq_len, nbefore = 0;
    double seconds[64];
    FoDevice* device = fo_device_open(0, 1);
    double peak = fo_device_peak_tflops(device);
    gpt_open(&g, x->config, &x->opt, world, device);
    int* ids = (int*)malloc((size_t)(B * T) * sizeof(int));
    fo_require(ids != NULL, "out of memory");
    weights_random(&g.ts, g.params, &g.os, g.master, 42, g.compute);
    uint64_t rng = 1337;
    for (int i = 0; i < B * T; i++) {
        ids[i] = (int)(random_u32(&rng) % (uint32_t)x->config.V);
    }
    FoAdamw a = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.0f, 1.0f, 1};
    for (int i = 0; i <= x->nsteps; i++) {
        double start = fo_now();
        gpt_batch(&g, ids, ids, B, T);
        gpt_micro(&g, 1.0f / (float)g.N, 0);
        gpt_loss(&g);
        gpt_reduce(&g, 0.0, 0.0, 0.0);
        a.t = i + 1;
        gpt_update(&g, a, 0.1f, 1);
        if (i > 0) {
            seconds[i - 1] = fo_now() - start;
            printf("step %d: %.1f ms, %.1f tok/s\n", i, 1e3 * seconds[i - 1], B * T / seconds[i - 1]);
        } else {
            nbefore = fo__op_times(g.compute, before);
        }
    }
    print_shares(before, nbefore, after, fo__op_times(g.compute, after));
    qsort(seconds, (size_t)x->nsteps, sizeof *seconds, by_value);
    double median = seconds[x->nsteps / 2], rate = B * T / median;
    double flops = 6.0 * (double)g.ts.ntotal + 6.0 * x->config.L * (double)x->config.C * T;
    printf("peak %.3f TFLOP/s (a large GEMM, measured at start), memory %.0f MiB\n", peak,
           (double)fo_device_peak_nbytes(device) / 1048576.0);
    printf("median %.1f tok/s, %.1f %% MFU, spread %.1f to %.1f tok/s over %d steps\n", rate,
           100.0 * rate * flops / (peak * 1e12), B * T / seconds[x->nsteps - 1], B * T / seconds[0],
           x->nsteps);
    free(ids);
    gpt_close(&g);
    fo_device_close(device);
}

int main(int argc, char** argv) {
    static Bench x;
    char err[TRAIN_ERR];
    char* none[] = {argv[0]};
    if (options_parse(&x.opt, 1, none, err)) { fo_quit(1, "%s", err); }
    x.opt.batch = argc > 2 ? atoi(argv[2]) : 4;
    x.opt.seq_len = argc > 3 ? atoi(argv[3]) : 1024;
    x.nsteps = argc > 4 ? atoi(argv[4]) : 3;
    int bad = model_parse(argc > 1 ? argv[1] : "d12", &x.config, err) != 0;
    if (bad || argc > 5 || x.opt.batch < 1 || x.opt.seq_len < 1 || x.opt.seq_len > x.config.maxT ||
        x.nsteps < 1 || x.nsteps > 64) {
        fo_quit(1, "usage: bench_step [MODEL [B [T [STEPS]]]]: a descriptor, B >= 1, T up to the model's, 1 "
                   "to 64 steps");
    }
    fo_ranks_run(1, body, &x);
    return 0;
}
