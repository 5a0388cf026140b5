/* fo_mpi.h -- the host's side of ranks that are processes, on every device: MPI started, a communicator for
 * each group, barriers and splits. Only in a build with MPI.
 *
 * One thread at a time calls MPI (MPI_THREAD_SERIALIZED), under a lock that all groups of the process share.
 * Whoever holds it neither sleeps nor waits for a peer that has yet to come.
 */
#ifndef FO_MPI_H
#define FO_MPI_H
#include "flashoverlap/fo_transport.h"
#define OMPI_SKIP_MPICXX  1 // in C++ it would want another library
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#ifdef __cplusplus
extern "C" {
#endif

struct FoMpi {
    MPI_Comm comm;
    pthread_mutex_t* lock; // held around calls of MPI: the world's, in all groups of the process
    pthread_mutex_t lock_of_world;
};

void fo__mpi_check(int err, const char* file, int line, const char* func, const char* what);
#define mpi_check(call) fo__mpi_check(call, __FILE__, __LINE__, __func__, #call)

// starts MPI; fills in mpi, rank, size and nlocal of a world
void fo__mpi_open(FoGroup* g);
// the same, and world_ranks, of a group split off g
void fo__mpi_split(FoGroup* g, int color, FoGroup* part);
void fo__mpi_barrier(FoGroup* g);
// ends MPI with a world
void fo__mpi_close(FoGroup* g);
// between two looks at what is under way, after quiet_s seconds in which nothing happened
void fo__mpi_rest(double quiet_s);

#ifdef __cplusplus
}
#endif
#endif
