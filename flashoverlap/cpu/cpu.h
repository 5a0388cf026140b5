/* cpu.h -- what the files of the cpu device share: queueing, threads, scratch, pacing. Nothing above the cut
 * sees it.
 */
#ifndef FO_CPU_H
#define FO_CPU_H
#include "flashoverlap/fo.h"

#if FO_OPENMP
#include <omp.h>
#endif

// a register of floats, of the processor that is compiled for
#if defined(__AVX512F__)
enum { LANE_NBYTES = 64 };
#elif defined(__AVX__)
enum { LANE_NBYTES = 32 };
#else
enum { LANE_NBYTES = 16 };
#endif
typedef float Lane __attribute__((vector_size(LANE_NBYTES)));

struct FoDevice {
    int rank, nthreads;
    int nlocal;         // ranks on this machine
    int tracing;        // streams keep their spans
    double pace_tflops; // 0: unpaced
    double peak_tflops; // 0: not yet measured
    size_t nbytes, peak_nbytes;
    char name[128];
    struct FoMatmul* matmul; // cached primitives, matmul.c; made at first use, by the stream's thread
};

#define FO_MAX_ARGS 320 // bytes of arguments an operation may have

typedef void (*FoOp)(FoStream* s, void* args);

/* fo__enqueue -- queues op(s, copy of args) on s. nbytes at most FO_MAX_ARGS.
 *
 * Public functions pack their arguments into a struct, call this, and return; op runs on the thread of s.
 * There OpenMP regions use the device's threads: num_threads is set for the thread, so a plain `#pragma omp
 * parallel for` is right.
 */
#define fo__enqueue(s, op, args, nbytes) fo__enqueue_named(s, op, #op, args, nbytes)
void fo__enqueue_named(FoStream* s, FoOp op, const char* name, const void* args, size_t nbytes);

// time that the operations of one name took on a stream so far; read it after fo_stream_sync
typedef struct {
    const char* name; // of the function that ran
    double seconds;
    long ncalls;
} FoOpTime;
#define FO_MAX_OP_NAMES 64
// the times of s, at most FO_MAX_OP_NAMES; returns their number
int fo__op_times(const FoStream* s, FoOpTime times[FO_MAX_OP_NAMES]);

// memory for the operation that runs on s now; kept and grown, contents undefined, aligned to 64 bytes
void* fo__scratch(FoStream* s, size_t nbytes);

// an operation that is paced says, before it returns, how much it did; the stream sleeps what pacing asks for
void fo__pace(FoStream* s, double flops);

/* The virtual clock of a stream (seconds, as fo_now): when its last operation ended, free of the lateness of
 * wake-ups. An event carries it from one stream to another; an exchange over an emulated link advances it to
 * the time due.
 */
double fo__clock(const FoStream* s);
void fo__clock_set(FoStream* s, double t);

void fo__sleep_until(double t); // t as fo_now

void fo__matmul_free(struct FoMatmul* m); // by fo_device_close

#endif
