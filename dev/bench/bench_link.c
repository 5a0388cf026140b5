/* bench_link.c -- what a message takes between ranks, and an operation beside its work: the figures of a
 * machine's text file (dev/sim/hardware) that bench_kernels has not. dev/sim/measure.py reads its last line.
 *
 *   bench_link [RANKS]                     ranks are threads; default 2
 *   mpirun -np P ... bench_link P          or processes, on the network that joins them
 *
 * The link's figures are those of the slowest neighbours while every rank sends to the next.
 */
#include "dev/bench/bench.h"
#include "flashoverlap/fo_ops.h" // FO_MAX_RANKS

enum { NOPS = 200, NROUNDS = 15, TINY = 64 };

static void body(FoGroup* world, void* arg) {
    (void)arg;
    FoDevice* device = fo_device_open(fo_group_rank(world), fo_group_nlocal(world));
    FoStream *compute = fo_stream_create(device, "compute"), *comm = fo_stream_create(device, "comm");
    double queued[NROUNDS], done[NROUNDS];
    void* tiny = fo_malloc(device, TINY);
    fo_group_barrier(world);
    for (int round = 0; round < NROUNDS; round++) {
        const double start = fo_now();
        for (int i = 0; i < NOPS; i++) {
            fo_zero(tiny, TINY, compute);
        }
        queued[round] = (fo_now() - start) / NOPS;
        fo_stream_sync(compute);
        done[round] = (fo_now() - start) / NOPS;
    }
    fo_group_barrier(world);
    fo_group_measure(world, comm);
    const double latency = fo_group_message_s(world, 0);
    const double byte = (fo_group_message_s(world, 1 << 30) - latency) / (1 << 30);
    if (fo_group_rank(world) == 0) {
        printf("# %d ranks, %d of them on this machine, by %s; %s\n", fo_group_size(world),
               fo_group_nlocal(world), fo_group_transport(world), fo_device_name(device));
        printf("link_gbytes_s %.4g link_us %.4g kernel_us %.4g launch_us %.4g\n", 1e-9 / byte, 1e6 * latency,
               1e6 * bench_quantile(done, NROUNDS, 0.5), 1e6 * bench_quantile(queued, NROUNDS, 0.5));
    }
    fo_free(device, tiny);
    fo_stream_destroy(comm);
    fo_stream_destroy(compute);
    fo_device_close(device);
}

int main(int argc, char** argv) {
    if (argc > 2) { bench_refuse("usage: bench_link [RANKS]: 2 to %d of them", FO_MAX_RANKS); }
    const int P = argc == 1 ? 2 : (int)bench_long("RANKS", argv[1], 2, FO_MAX_RANKS);
    fo_ranks_run(P, body, NULL);
    return 0;
}
