/* comm.c -- exchanges of the cpu device: an operation in the queue of their stream, with the clock of an
 * emulated link.
 */
#include "flashoverlap/cpu/comm.h"
#include <stdlib.h>

static void exchange_op(FoStream* s, void* args) {
    FoBatch* b = *(FoBatch**)args;
    FoGroup* g = b->group;
    // relaxed, so that it orders nothing: streams that aren't ordered by an event stay a race for
    // ThreadSanitizer
    int busy = __atomic_exchange_n(&g->busy, 1, __ATOMIC_RELAXED);
    fo_require(
        !busy,
        "two exchanges of a group at once: queue them on one stream, or let an event order the streams");
    b->posted = b->due = fo__clock(s);
    g->transport->exchange(b);
    if (g->emulated) {
        fo__sleep_until(b->due);
        fo__clock_set(s, b->due);
    }
    __atomic_store_n(&g->busy, 0, __ATOMIC_RELAXED);
    free(b);
}

void fo__exchange(FoBatch* b) {
    fo__enqueue(b->stream, exchange_op, &b, sizeof b);
}

void fo__process_open(FoGroup* g, const FoLaunch* l) {
#if FO_MPI
    if (l->init == FO_INIT_MPI) {
        fo__mpi_transport_open(g);
        return;
    }
#endif
    fo__tcp_transport_open(g, l);
}
