/* fo_mpi.h -- the host's side of ranks that are processes of mpirun, on every device: MPI started, a
 * communicator for each group, barriers and splits. Only in a build with MPI.
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

// starts MPI; fills in hosts, mpi, rank, size and nlocal of a world
void fo__mpi_open(FoGroup* g);

#ifdef __cplusplus
}
#endif
#endif
