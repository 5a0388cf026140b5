/* profile.h -- where the time of some steps goes, by operation: --profile. */
#ifndef PROFILE_H
#define PROFILE_H
#include "train/gpt.h"
#ifdef __cplusplus
extern "C" {
#endif

// all zeros: nothing yet
typedef struct {
    int nsteps; // so far
    double seconds, start_s;
} Profile;

/* profile_begin, profile_end -- around each of the steps, which may have others between them. Both wait for
 * the streams of g.
 *
 * Operations are timed in between; from the first begin to the last end a profiler that waits for it looks
 * (nsys -c cudaProfilerApi). last: prints, if speak, this rank's time a step by operation: computation, and
 * what stood waiting for which exchange; then the exchanges of each group.
 */
void profile_begin(Profile* p, GPT* g);
void profile_end(Profile* p, GPT* g, int last, int speak);

#ifdef __cplusplus
}
#endif
#endif
