// test_allreduce.c -- fo_allreduce: the same bits on every rank, by either plan; its bytes; its time on a
// link.
#include "dev/test/check.h"
#include "flashoverlap/fo_allreduce.h"
#include <stdlib.h>

enum { MOST = 1000 };

// numbers whose sum depends on the order of adding
static float value(int rank, size_t i) {
    uint32_t h = (uint32_t)rank * 2654435761u ^ (uint32_t)i * 2246822519u;
    h = (h ^ (h >> 15)) * 0x2c1b3c6du;
    return ((float)(h >> 8) / (float)(1 << 24) - 0.5f) * (float)(1 << rank % 7);
}

static void sum_once(FoGroup* g, FoDevice* d, FoStream* s, FoAllreduce plan, size_t n) {
    const int P = fo_group_size(g), r = fo_group_rank(g);
    float host[16 * MOST], want[MOST], got[MOST];
    float *parts = fo_malloc(d, (size_t)P * n * sizeof(float)), *sum = fo_malloc(d, n * sizeof(float));
    size_t before, after, messages_before, messages;
    for (size_t i = 0; i < (size_t)P * n; i++) {
        host[i] = i / n == (size_t)r ? value(r, i % n) : NAN;
    }
    for (size_t i = 0; i < n; i++) {
        want[i] = value(0, i);
        got[i] = NAN;
        for (int p = 1; p < P; p++) {
            want[i] += value(p, i);
        }
    }
    fo_upload(parts, host, (size_t)P * n * sizeof(float), s);
    fo_upload(sum, got, n * sizeof(float), s);
    fo_group_sent(g, &before, &messages_before);
    for (int again = 0; again < 2; again++) { // the own part stays
        fo_allreduce(plan, sum, parts, n, g, s);
    }
    fo_group_sent(g, &after, &messages);
    fo_download(got, sum, n * sizeof(float), s);
    fo_stream_sync(s);
    CHECK_BITS(got, want, n * sizeof(float));
    CHECK(after - before == 2 * fo_allreduce_nbytes(plan, n, P, r));
    // by hand where P divides
    if (plan == FO_PUSH) { CHECK(after - before == 2 * (size_t)(P - 1) * n * sizeof(float)); }
    if (plan == FO_SCATTER && n % (size_t)P == 0) {
        CHECK(after - before == 4 * (size_t)(P - 1) * (n / (size_t)P) * sizeof(float));
    }
    fo_free(d, parts);
    fo_free(d, sum);
}

static void sums(FoGroup* g, void* arg) {
    static const size_t sizes[] = {1, 3, 5, 64, 840, 999};
    FoDevice* d = fo_device_open(fo_group_rank(g), fo_group_size(g));
    FoStream* s = fo_stream_create(d, "compute");
    (void)arg;
    for (int plan = FO_PUSH; plan <= FO_SCATTER; plan++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            CHECK_AT("P=%d r=%d %s n=%zu", fo_group_size(g), fo_group_rank(g),
                     fo_allreduce_name((FoAllreduce)plan), sizes[i]);
            sum_once(g, d, s, (FoAllreduce)plan, sizes[i]);
        }
    }
    fo_stream_destroy(s);
    fo_device_close(d);
}

// on a slow link it takes what the model says: never less, from when the first rank begins; and not much more
// at least once, because a busy machine wakes threads late
static void timed(FoGroup* g, void* arg) {
    double* starts = (double*)arg; // of each rank
    const double gbytes_s = 4e-4, us = 3000.0;
    const size_t n = 500;
    const int P = fo_group_size(g);
    FoDevice* d = fo_device_open(fo_group_rank(g), P);
    FoStream* s = fo_stream_create(d, "compute");
    fo_group_link(g, gbytes_s, us);
    float *parts = fo_malloc(d, (size_t)P * n * sizeof(float)), *sum = fo_malloc(d, n * sizeof(float));
    for (int plan = FO_PUSH; plan <= FO_SCATTER; plan++) {
        const double want = fo_model_allreduce_s((FoAllreduce)plan, P, n * sizeof(float), gbytes_s, us);
        double best = INFINITY;
        for (int again = 0; again < 12; again++) {
            fo_group_barrier(g);
            starts[fo_group_rank(g)] = fo_now();
            fo_allreduce((FoAllreduce)plan, sum, parts, n, g, s);
            fo_stream_sync(s);
            double end = fo_now(), start = end;
            fo_group_barrier(g);
            for (int p = 0; p < P; p++) {
                start = starts[p] < start ? starts[p] : start;
            }
            best = end - start < best ? end - start : best;
        }
        CHECK_AT("P=%d r=%d %s: %.2f ms, the model says %.2f", P, fo_group_rank(g),
                 fo_allreduce_name((FoAllreduce)plan), 1e3 * best, 1e3 * want);
        CHECK(best >= 0.999 * want && best < 1.5 * want);
    }
    fo_free(d, parts);
    fo_free(d, sum);
    fo_stream_destroy(s);
    fo_device_close(d);
}

int main(void) {
    for (int P = 1; P <= 8; P++) {
        fo_ranks_run(P, sums, NULL);
    }
    double starts[4] = {0}; // of as many ranks
    if (fo_device_emulates()) { fo_ranks_run(4, timed, starts); }
    return check_report();
}
