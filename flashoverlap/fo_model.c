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
