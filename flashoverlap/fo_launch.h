/* fo_launch.h -- the processes of a run: how many there are, which of them this is, how they find each other.
 *
 * mpirun, torchrun and srun tell it in the environment; where plain shells start the processes, the program's
 * options do. What MPI does for processes of mpirun, sockets do for all others (fo_sockets.h): `tcp` finds
 * rank 0 at an address and a port, `fs` by a file that rank 0 writes into a folder which all see.
 */
#ifndef FO_LAUNCH_H
#define FO_LAUNCH_H
#include "flashoverlap/fo.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef enum { FO_INIT_AUTO, FO_INIT_MPI, FO_INIT_TCP, FO_INIT_FS } FoInit;
#define FO_INIT_NAMES "auto|mpi|tcp|fs"
#define FO_LAUNCH_ERR 512   // bytes of a message; longer ones are cut
#define FO_PORT       12345 // of rank 0, where nothing else is said

typedef struct {
    FoInit init;      // AUTO: mpi if mpirun started this, else fs with a folder, else tcp
    int n;            // processes; 0: as the launcher says
    int rank;         // -1: likewise
    int per_node;     // rank r is number r % per_node of its machine; 0: machines are counted
    int port;         // at which rank 0 listens (tcp); 0: the launcher's, or FO_PORT
    char server[128]; // name or address of rank 0's machine (tcp); "": the launcher's, or this machine
    char folder[256]; // fs
    double timeout_s; // how long processes wait for each other at the start
    // What all processes must have been told alike, words apart by blanks; longer texts are cut. Who was told
    // otherwise is refused.
    char options[1024];
} FoLaunch;

// all left to the environment
FoLaunch fo_launch_default(void);

/* fo_launch_find -- puts what the environment says in the place of what l leaves open.
 *
 * Afterwards l->n is 1 (and ranks are threads), or init is MPI, TCP or FS and rank is in 0..n-1. With MPI
 * mpirun's own rank holds, and a number of processes must be mpirun's. Errors: -1 with one line in err.
 */
int fo_launch_find(FoLaunch* l, char err[FO_LAUNCH_ERR]);

// Does this process speak for all that a launcher started, where each would say the same: it is their rank 0,
// or no launcher has started it?
int fo_launch_speaks(void);

// processes that a launcher started (1 without one), as the environment says
int fo_ranks_launched(void);

#ifdef __cplusplus
}
#endif
#endif
