/* comm.h -- what comm.c and the transports of the cpu device share. Nothing outside these files sees it.
 *
 * An exchange goes through the stream's queue to the stream's thread, which calls the transport
 * (comm_local.c, comm_mpi.c, comm_tcp.c). The emulated link is arithmetic on virtual times (seconds, as
 * fo_now): transports reserve ports, comm.c sleeps once an exchange, until all of it is due.
 */
#ifndef FO_CPU_COMM_H
#define FO_CPU_COMM_H
#include "flashoverlap/cpu/cpu.h"
#include "flashoverlap/fo_transport.h"

// seconds for which a message occupies the ports of an emulated link
static inline double fo__wire_s(const FoGroup* g, size_t nbytes) {
    return (double)nbytes * g->s_per_byte;
}

// only in a build with MPI
void fo__mpi_transport_open(FoGroup* g);
extern size_t
    fo__mpi_piece; // bytes that a message has at most; longer ones go in pieces. Tests make it small
void fo__tcp_transport_open(FoGroup* g, const FoLaunch* l);

#endif
