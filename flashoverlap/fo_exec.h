/* fo_exec.h -- the executor of plans, for the files that make primitives of it (fo_overlap.c, fo_ulysses.c,
 * fo_zero.c, fo_fetch.c). Nothing else includes it: fo_overlap.h is what programs call.
 */
#ifndef FO_EXEC_H
#define FO_EXEC_H
#include "flashoverlap/fo_overlap.h"
#ifdef __cplusplus
extern "C" {
#endif

// what one owner (or peer) has of an operation: n rows of row_nbytes from base on, which are its rows first,
// first+1, ... Its sub-chunk s of m is rows fo_cut(n, m, s) and on.
typedef struct {
    char* base;
    size_t row_nbytes, n, first;
} FoPiece;

// where the bytes of a plan's chunks lie
typedef struct {
    FoPiece send[FO_MAX_RANKS]; // by the owner of the chunk
    // gather: by the owner of the chunk; reduce-scatter: by the rank it comes from, along a ring by the hop
    FoPiece recv[FO_MAX_RANKS];
    FoDtype wire;     // of a ring's adds; of no other plan
    size_t row_nelem; // the same
} FoPieces;

// queues the computation of rows [row0, row0 + n) of `owner` on s
typedef void (*FoPieceFn)(void* ctx, int owner, size_t row0, size_t n, FoStream* s);

// pieces of an array of P * n rows
void fo__equal_pieces(FoPiece pieces[FO_MAX_RANKS], void* base, int P, size_t n, size_t row_nbytes);
// pieces of an array of N rows, of which rank p has those from fo_cut(N, P, p) on
void fo__cut_pieces(FoPiece pieces[FO_MAX_RANKS], void* base, int P, size_t N, size_t row_nbytes);

// compute waits until the first n exchanges are done; what it stands still counts as exposed
void fo__wait(FoOverlap* o, int n);
/* queues both lists of the plan, each part as soon as what it waits for is queued. fn NULL: what would be
 * computed is there. Mode none of a reduce-scatter waits for everything.
 */
void fo__run(FoOverlap* o, const FoPieces* io, FoPieceFn fn, void* ctx);
// one of its steps: queues compute k, behind the exchanges that it waits for
void fo__compute(FoOverlap* o, const FoPieces* io, int k, FoPieceFn fn, void* ctx);
// queues all exchanges of a gather whose computation is elsewhere. Mode none waits for them
void fo__begin(FoOverlap* o, const FoPieces* io);
// the same with rows that are not as many for each peer: group p of send, its rows from send_first[p] to
// send_first[p+1], goes to rank p, and group p of recv comes from it. fo_overlap_mark has no effect on it
void fo__begin_groups(FoOverlap* o, const void* send, const size_t send_first[], void* recv,
                      const size_t recv_first[], size_t row_nbytes);
void fo__require_kind(const FoOverlap* o, FoKind kind);
// also direct, and, if whole, with m = 1
void fo__require_direct(const FoOverlap* o, FoKind kind, int whole);

#ifdef __cplusplus
}
#endif
#endif
