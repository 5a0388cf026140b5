/* sim.h -- a device that computes nothing and tells when it would be done: the schedules of training, run on
 * the clock of a machine that may not be here.
 *
 * It defines the names of the cut as cpu and cuda do, so what is simulated is the very code that trains.
 * Streams are clocks. An operation begins when its stream is free and the host has queued it, and takes what
 * its shape costs on the hardware (fo__sim_seconds_*); an event is a point in time; a wait moves its stream's
 * clock forward. Everything is queued in an order in which what it waits for is known, so no queue of events
 * is needed.
 *
 * One rank is simulated, for all: each rank is taken to be as far as this one when it exchanges with it.
 * Plans are alike on all ranks, so that holds where shards are (a tp group whose heads are cut unevenly is as
 * slow as its first rank, which has the most). Memory is address space that nobody touches: any model fits.
 */
#ifndef SIM_H
#define SIM_H
#include "flashoverlap/fo_comm.h"
#ifdef __cplusplus
extern "C" {
#endif

#define SIM_ERR 256

/* SimHardware -- a machine, as a text file describes it (dev/sim/hardware): lines `key value`, # begins a
 * comment. Rates are those of one rank's device.
 */
typedef struct {
    char name[64];
    double peak_tflops;      // what MFU is measured by
    double gemm_tflops;      // of a large GEMM
    double attention_tflops; // of causal attention, masked half not counted
    double gemm_tile;        // rows and columns of a GEMM's result are computed in multiples of it; 1: any
    double gemm_units;       // so many tiles at a time, fewer take as long (SMs of a GPU); 0: no such steps
    double memory_gbytes_s;  // read and written by what is no GEMM
    double memory_gib;       // that a rank can have
    double kernel_us;        // of an operation, beside its work
    double launch_us;        // of the host's time, to queue an operation or an exchange
    double node_ranks;       // ranks of a machine: those joined by the inner link
    double link_gbytes_s, link_us;           // a rank's, to ranks of its machine; each direction
    double node_link_gbytes_s, node_link_us; // to ranks of other machines
    double link_shared;                      // 1: groups of ranks share it, 0: each has one of its own
    double contention; // computing takes 1 + contention times as long while an exchange is under way
} SimHardware;

/* sim_hardware_read -- path, or the name of a preset (h100), as it lies in the folder dev/sim/hardware.
 *
 * Errors: -1 with one line in err: no such file, an unknown key, a value that is none or out of range, a key
 * that is missing or there twice.
 */
int sim_hardware_read(SimHardware* h, const char* path, char err[SIM_ERR]);

FoDevice* sim_device_open(const SimHardware* h);
// seconds that the host has spent queueing and waiting
double sim_host_s(const FoDevice* d);

/* SimColors -- what the ranks that are not simulated would say when a world is split.
 *
 * of      color of rank `rank` in the nth fo_group_split of this world
 * alike   each rank of the nth group stands for so many, so that a world of 1,024 need not be simulated rank
 *         by rank: an exchange is then that many, of as much less, and all of them between machines. nth -1:
 *         the world itself
 */
typedef struct {
    int (*of)(const void* arg, int nth, int rank);
    int (*alike)(const void* arg, int nth);
    const void* arg;
} SimColors;

// rank 0 of `size` ranks; sim_world_free ends it. Colors of NULL: parts are the whole, and each rank
// is itself
FoGroup* sim_world(FoDevice* d, int size, SimColors colors);
void sim_world_free(FoGroup* g);

// ---- of the device's files --------------------------------------------------------------------------------
struct FoDevice {
    SimHardware h;
    double host_s;           // the host's clock
    double ports_s[2];       // when the shared links, within and between machines, are free
    double comm_busy[64][2]; // the latest exchanges: from, to
    int ncomm;
    size_t nbytes, peak_nbytes;
    int traced;
};

struct FoStream {
    FoDevice* device;
    double clock_s;
    const char* label;
    FoMessages messages;
    FoSpan* spans;
    int nspans, first_span, room;
};

// queues an operation of so many seconds; computes: exchanges that are under way make it longer
void sim_queue(FoStream* s, const char* name, double seconds, double flops, int computes);
// seconds of a GEMM [rows, K] x [K, cols]; of so many bytes read and written
double sim_gemm_s(const SimHardware* h, size_t rows, int K, int cols);
double sim_bytes_s(const SimHardware* h, double nbytes);

#ifdef __cplusplus
}
#endif
#endif
