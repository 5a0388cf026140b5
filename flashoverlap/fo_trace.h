/* fo_trace.h -- the timeline of a run: what each stream of each rank did when, in one file.
 *
 * The file is Chrome trace JSON, for https://ui.perfetto.dev or chrome://tracing: a process a rank, a thread
 * a stream. Categories: `compute`, `comm` (exchanges; sent, received, to, from), `exposed` (the stream stood
 * waiting for an exchange), `step` (the host's own row). Devices keep the spans (fo.h, "what ran when"), this
 * collects, merges and writes them. How to read one: doc/overlap.md.
 */
#ifndef FO_TRACE_H
#define FO_TRACE_H
#include "flashoverlap/fo_comm.h"
#ifdef __cplusplus
extern "C" {
#endif

#define FO_TRACE_ERR 512 // bytes of a message

typedef struct {
    FoStream* stream;
    const char* name; // of its row; it lives until the end
} FoTraceRow;

typedef struct FoTrace FoTrace;

/* fo_trace_check -- could a timeline be written to path? It goes to path.tmp first, which is then renamed: a
 * file of that name is replaced, anything else is refused. Leaves nothing behind. -1: err says why not.
 */
int fo_trace_check(const char* path, char err[FO_TRACE_ERR]);

/* fo_trace_start -- from now on the operations of these streams, all of one device, are kept.
 *
 * Collective over world; waits until the streams have done what is queued, and for all ranks. Streams that
 * are not named keep their spans in vain: name all that are used. If ranks are on several machines, their
 * clocks are compared with that of rank 0 by messages there and back: right to half the time that the fastest
 * of them took, which fo_trace_end tells.
 * Errors: dies of more rows than a timeline has.
 */
FoTrace* fo_trace_start(FoGroup* world, const FoTraceRow rows[], int nrows);

// a stretch of the host's time, from start_s (as fo_now) to now, for the row above the streams'; name is
// copied
void fo_trace_mark(FoTrace* t, const char* name, double start_s);

/* fo_trace_end -- keeps no more, and writes what was kept; rank 0 writes, the others send it theirs.
 *
 * Collective; waits for the streams. Frees t.
 * process  what this rank is called, "rank 2 (dp 0, up 0, tp 2)"; neither it nor other names have anything
 *          that JSON would escape.
 * Returns 0, or on rank 0 -1 with err, if the file could not be written: then there is none. *accuracy_s:
 * unless NULL, how far the ranks' clocks may be apart; 0: they share one.
 */
int fo_trace_end(FoTrace* t, const char* process, const char* path, double* accuracy_s,
                 char err[FO_TRACE_ERR]);

#ifdef __cplusplus
}
#endif
#endif
