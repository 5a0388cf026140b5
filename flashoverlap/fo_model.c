/* fo_model.c -- the closed forms of fo_model.h. Where they come from: doc/overlap.md. */
#include "flashoverlap/fo_model.h"

double fo_model_shard_s(double gbytes_s, double latency_us, size_t shard_nbytes, int m) {
    return 1e-6 * latency_us * (double)m + (double)shard_nbytes / (1e9 * gbytes_s);
}

double fo_model_collective_s(int P, double shard_s) {
    return P > 1 ? (double)(P - 1) * shard_s : 0.0;
}

static double positive(double x) {
    return x > 0.0 ? x : 0.0;
}

double fo_model_exposed_s(FoMode mode, int m, int P, double shard_s, double compute_s) {
    double T = fo_model_collective_s(P, shard_s), W = compute_s;
    if (mode == FO_NONE || P < 2) { return T; }
    if (m < 1) { m = 1; }
    if (mode == FO_SLICE) { return T / m + (double)(m - 1) / m * positive(T - W); }
    // the first send of a reduce-scatter leaves after its own sub-chunk; a gather's last one is computed
    // after its
    return positive(T - ((double)P - 1.0 / m) * W / P);
}

double fo_model_between_s(int m, int P, double shard_s, double compute_s, double between_s) {
    if (P < 2) { return 0.0; }
    const double all = fo_model_exposed_s(FO_FLASH, m, P, shard_s, compute_s) - (P - 2) * between_s / P;
    const double first = fo_model_exposed_s(FO_FLASH, m, 2, shard_s, 2.0 * compute_s / P);
    return all > first ? all : first;
}

int fo_model_chunks(const FoMeasured* x, int P, int most, double* exposed_s) {
    const double least_gain = 0.01;
    double best_s = 0.0, best_exposed_s = 0.0, W = 0.0;
    int best = 1;
    for (int i = 0, m = 1; i < FO_MODEL_MOST && m <= (most > 1 ? most : 1); i++, m *= 2) {
        W = x->compute_s[i] > W ? x->compute_s[i] : W;
        const double shard_s = x->shard_s + (m - 1) * x->latency_s;
        const double exposed = positive(fo_model_between_s(m, P, shard_s, W, x->between_s) - x->cover_s);
        if (m > 1 && W + exposed >= (1.0 - least_gain) * best_s) { continue; }
        best = m, best_s = W + exposed, best_exposed_s = exposed;
    }
    if (exposed_s) { *exposed_s = best_exposed_s; }
    return best;
}

double fo_model_allreduce_s(FoAllreduce plan, int P, size_t nbytes, double gbytes_s, double latency_us) {
    if (P < 2) { return 0.0; }
    const size_t share = (nbytes / 4 + (size_t)P - 1) / (size_t)P * 4;
    const double latencies = plan == FO_PUSH ? 1.0 : 2.0;
    const double sent = (double)(P - 1) * (plan == FO_PUSH ? (double)nbytes : 2.0 * (double)share);
    return 1e-6 * latency_us * latencies + sent / (1e9 * gbytes_s);
}

FoAllreduce fo_model_allreduce(int P, size_t nbytes, double gbytes_s, double latency_us) {
    return fo_model_allreduce_s(FO_SCATTER, P, nbytes, gbytes_s, latency_us) <
                   fo_model_allreduce_s(FO_PUSH, P, nbytes, gbytes_s, latency_us)
               ? FO_SCATTER
               : FO_PUSH;
}

const char* fo_allreduce_name(FoAllreduce plan) {
    return plan == FO_PUSH ? "push" : "scatter";
}
