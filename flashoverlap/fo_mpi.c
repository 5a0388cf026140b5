// fo_mpi.c -- see fo_mpi.h. Nobody spins for long: cores are there to compute.
#include "flashoverlap/fo_mpi.h"
#include <stdlib.h>

void fo__mpi_check(int err, const char* file, int line, const char* func, const char* what) {
    char text[MPI_MAX_ERROR_STRING];
    int n;
    if (err == MPI_SUCCESS) { return; }
    MPI_Error_string(err, text, &n);
    fo_die(file, line, func, "%s: %s", what, text);
}

static int barrier_ended(struct FoMpi* mpi, MPI_Request* req) {
    int ended;
    pthread_mutex_lock(mpi->lock);
    mpi_check(MPI_Test(req, &ended, MPI_STATUS_IGNORE));
    pthread_mutex_unlock(mpi->lock);
    return ended;
}

static void mpi_barrier(FoGroup* g) {
    MPI_Request req;
    double quiet_s = 0.0, before = fo_now(), patience = g->world->patience_s;
    pthread_mutex_lock(g->mpi->lock);
    mpi_check(MPI_Ibarrier(g->mpi->comm, &req));
    pthread_mutex_unlock(g->mpi->lock);
    while (!barrier_ended(g->mpi, &req)) {
        double now = fo_now();
        quiet_s += fo__waited_s(now - before);
        before = now;
        fo_require(quiet_s < patience, "waited %.1f s at a barrier", patience);
        fo__rest(quiet_s);
    }
}

// fills in what the communicator of g knows
static void open_group(FoGroup* g, struct FoMpi* mpi) {
    MPI_Comm node;
    mpi_check(MPI_Comm_set_errhandler(mpi->comm, MPI_ERRORS_RETURN));
    mpi_check(MPI_Comm_rank(mpi->comm, &g->rank));
    mpi_check(MPI_Comm_size(mpi->comm, &g->size));
    mpi_check(MPI_Comm_split_type(mpi->comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node));
    mpi_check(MPI_Comm_size(node, &g->nlocal));
    mpi_check(MPI_Comm_free(&node));
    g->mpi = mpi;
}

static struct FoMpi* mpi_new(void) {
    struct FoMpi* mpi = (struct FoMpi*)calloc(1, sizeof *mpi);
    fo_require(mpi != NULL, "out of memory");
    return mpi;
}

static void mpi_split(FoGroup* g, int color, FoGroup* part) {
    struct FoMpi* mpi = mpi_new();
    mpi->lock = g->mpi->lock;
    mpi_barrier(g); // so that what follows, which waits with the lock, waits for nobody who needs it
    pthread_mutex_lock(mpi->lock);
    mpi_check(MPI_Comm_split(g->mpi->comm, color, g->rank, &mpi->comm));
    open_group(part, mpi);
    part->hosts = g->hosts;
    mpi_check(MPI_Allgather(&g->world_ranks[g->rank], 1, MPI_INT, part->world_ranks, 1, MPI_INT, mpi->comm));
    pthread_mutex_unlock(mpi->lock);
}

static void mpi_close(FoGroup* g) {
    struct FoMpi* mpi = g->mpi;
    mpi_barrier(g); // so that MPI_Comm_free, and MPI_Finalize, which spins, have nobody to wait for
    pthread_mutex_lock(mpi->lock);
    mpi_check(MPI_Comm_free(&mpi->comm));
    pthread_mutex_unlock(mpi->lock);
    if (g->world == g) {
        fo_die_abort(NULL);
        mpi_check(MPI_Finalize());
        pthread_mutex_destroy(mpi->lock);
    }
    free(mpi);
}

static void mpi_bcast(FoGroup* g, void* p, size_t nbytes) {
    mpi_barrier(g); // so that the next call, which waits with the lock, waits for nobody
    pthread_mutex_lock(g->mpi->lock);
    mpi_check(MPI_Bcast(p, (int)nbytes, MPI_BYTE, 0, g->mpi->comm));
    pthread_mutex_unlock(g->mpi->lock);
}

static void mpi_abort(int status) {
    MPI_Abort(MPI_COMM_WORLD, status);
}

static const FoHosts MPI = {mpi_barrier, mpi_split, mpi_bcast, mpi_close, mpi_abort};

void fo__mpi_open(FoGroup* g) {
    struct FoMpi* mpi = mpi_new();
    int provided, before;
    MPI_Initialized(&before);
    fo_require(!before, "fo_ranks_run a second time: ranks that are processes can run once");
    mpi_check(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided));
    fo_require(provided >= MPI_THREAD_SERIALIZED,
               "this MPI gives thread level %d, needed is MPI_THREAD_SERIALIZED (%d)", provided,
               MPI_THREAD_SERIALIZED);
    fo_die_abort(mpi_abort);
    mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &mpi->comm));
    pthread_mutex_init(&mpi->lock_of_world, NULL);
    mpi->lock = &mpi->lock_of_world;
    open_group(g, mpi);
    g->hosts = &MPI;
}
