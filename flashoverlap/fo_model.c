/* fo_model.c -- the closed forms of fo_model.h. Where they come from: doc/overlap.md. */
#include "flashoverlap/fo_model.h"
#include <math.h>

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

// of the one of two that take turns whose computation is compute_s, where the other one's is other_s
static double one_in_turn_s(int m, int P, double shard_s, double compute_s, double other_s) {
    const double all = fo_model_exposed_s(FO_FLASH, m, P, shard_s, compute_s) - (P - 2) * other_s / P;
    const double first = fo_model_exposed_s(FO_FLASH, m, 2, shard_s, 2.0 * compute_s / P);
    return all > first ? all : first;
}

void fo_model_in_turn(int P, const int m[2], const double shard_s[2], const double compute_s[2],
                      double exposed_s[2]) {
    double T = 0.0, W = 0.0;
    for (int i = 0; i < 2; i++) {
        exposed_s[i] = P < 2 ? 0.0 : one_in_turn_s(m[i], P, shard_s[i], compute_s[i], compute_s[1 - i]);
        T += fo_model_collective_s(P, shard_s[i]), W += compute_s[i];
    }
    if (exposed_s[1] < T - W - exposed_s[0]) { exposed_s[1] = T - W - exposed_s[0]; }
}

static const double LEAST_GAIN = 0.01; // what is less is none

// what it takes in 2^k sub-chunks; that smaller chunks are computed faster is noise
static void in_chunks(const FoMeasured* x, int k, double* shard_s, double* compute_s) {
    *shard_s = x->shard_s + ((1 << k) - 1) * x->latency_s;
    *compute_s = x->compute_s[0];
    for (int i = 1; i <= k; i++) {
        *compute_s = x->compute_s[i] > *compute_s ? x->compute_s[i] : *compute_s;
    }
}

int fo_model_chunks(const FoMeasured* x, int P, int most, double* exposed_s) {
    double best_s = 0.0, best_exposed_s = 0.0, shard_s, W;
    int best = 1;
    for (int k = 0; k < FO_MODEL_MOST && (k == 0 || 1 << k <= most); k++) {
        in_chunks(x, k, &shard_s, &W);
        const double exposed = positive(fo_model_exposed_s(FO_FLASH, 1 << k, P, shard_s, W) - x->cover_s);
        if (k > 0 && W + exposed >= (1.0 - LEAST_GAIN) * best_s) { continue; }
        best = 1 << k, best_s = W + exposed, best_exposed_s = exposed;
    }
    if (exposed_s) { *exposed_s = best_exposed_s; }
    return best;
}

void fo_model_chunks_in_turn(const FoMeasured x[2], int P, const int most[2], int m[2], double exposed_s[2]) {
    double best_s = HUGE_VAL;
    for (int both = 0; both < FO_MODEL_MOST * FO_MODEL_MOST; both++) {
        const int k[2] = {both / FO_MODEL_MOST, both % FO_MODEL_MOST}, now[2] = {1 << k[0], 1 << k[1]};
        double shard_s[2], compute_s[2], exposed[2];
        if ((k[0] > 0 && now[0] > most[0]) || (k[1] > 0 && now[1] > most[1])) { continue; }
        in_chunks(&x[0], k[0], &shard_s[0], &compute_s[0]);
        in_chunks(&x[1], k[1], &shard_s[1], &compute_s[1]);
        fo_model_in_turn(P, now, shard_s, compute_s, exposed);
        const double s = compute_s[0] + compute_s[1] + exposed[0] + exposed[1];
        if (s >= (1.0 - LEAST_GAIN) * best_s) { continue; }
        best_s = s;
        for (int i = 0; i < 2; i++) {
            m[i] = now[i], exposed_s[i] = exposed[i];
        }
    }
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
