// fo_launch.c -- see fo_launch.h: what launchers leave in the environment.
#include "flashoverlap/fo_launch.h"
#include "flashoverlap/fo_transport.h" // fo__local_rank
#include <stdio.h>
#include <stdlib.h>

/* What launchers tell each process. Open MPI 4 and 5 set the first two; MVAPICH the next; MPICH's and Intel's
 * (hydra), and srun with PMI-1 or PMI-2, PMI_*; torchrun the plain names, srun its own. Of several the inner
 * one holds: mpirun and torchrun come within a step of Slurm.
 */
typedef struct {
    const char *size, *rank, *local_rank;
    int mpi; // it starts MPI programs
} Launcher;

static const Launcher LAUNCHERS[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", 1},
    {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", 1},
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", 1},
    {"WORLD_SIZE", "RANK", "LOCAL_RANK", 0},
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", 0}}; // not of a batch script, without srun

static int number_of(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text && text[0] ? atoi(text) : otherwise;
}

// NULL: none, or it has started one process
static const Launcher* launcher_of_environment(void) {
    for (size_t i = 0; i < sizeof LAUNCHERS / sizeof *LAUNCHERS; i++) {
        if (number_of(LAUNCHERS[i].size, 0) > 1) { return &LAUNCHERS[i]; }
    }
    return NULL;
}

// srun of a Slurm that speaks MPI's language starts MPI programs, too
static int starts_mpi(const Launcher* from) {
    return from->mpi || (strncmp(from->size, "SLURM", 5) == 0 && getenv("PMIX_RANK"));
}

int fo_ranks_launched(void) {
    const Launcher* from = launcher_of_environment();
    return from ? number_of(from->size, 1) : 1;
}

int fo__local_rank(int rank) {
    const Launcher* from = launcher_of_environment();
    return number_of("FO_LOCAL_RANK",
                     from ? number_of(from->local_rank, rank) : rank); // fo_sockets.c sets it
}

int fo_launch_speaks(void) {
    const Launcher* from = launcher_of_environment();
    return !from || number_of(from->rank, 0) == 0;
}

// the first of node[03-05,9],other: node03
static void first_node(char* node, size_t nbytes, const char* list) {
    size_t k = strcspn(list, "[,"), digits = list[k] == '[' ? strcspn(list + k + 1, "-,]") : 0;
    (void)snprintf(node, nbytes, "%.*s%.*s", (int)k, list, (int)digits, list + k + (digits > 0));
}

// where rank 0 is, and its port, as far as l does not say
static void find_server(FoLaunch* l, const Launcher* from) {
    const int torchrun = from && strcmp(from->size, "WORLD_SIZE") == 0;
    const int slurm = from && strncmp(from->size, "SLURM", 5) == 0;
    const char *address = torchrun ? getenv("MASTER_ADDR") : NULL, *nodes = NULL;
    if (slurm) {
        nodes = getenv("SLURM_STEP_NODELIST");
        nodes = nodes ? nodes : getenv("SLURM_JOB_NODELIST");
        address = nodes ? NULL : getenv("SLURM_LAUNCH_NODE_IPADDR");
    }
    if (!l->server[0] && nodes) {
        first_node(l->server, sizeof l->server, nodes);
    } else if (!l->server[0]) {
        (void)snprintf(l->server, sizeof l->server, "%s", address ? address : "127.0.0.1");
    }
    if (!l->port) {
        const char* store = getenv("TORCHELASTIC_USE_AGENT_STORE"); // torchrun itself listens at that port
        l->port = torchrun ? number_of("MASTER_PORT", FO_PORT) : FO_PORT;
        if (torchrun && store && strcmp(store, "True") == 0) { l->port++; }
    }
}

FoLaunch fo_launch_default(void) {
    FoLaunch l;
    memset(&l, 0, sizeof l);
    l.rank = -1;
    l.timeout_s = 60.0;
    return l;
}

#define refuse(...) ((void)snprintf(err, FO_LAUNCH_ERR, __VA_ARGS__), -1)

int fo_launch_find(FoLaunch* l, char err[FO_LAUNCH_ERR]) {
    const Launcher* from = launcher_of_environment();
    const int launched = from ? number_of(from->size, 1) : 1, asked = l->n;
    if (l->init == FO_INIT_AUTO && from && starts_mpi(from)) { l->init = FO_INIT_MPI; }
    if (l->init == FO_INIT_MPI) {
        if (asked && asked != launched) {
            return refuse("-pn %d: mpirun has started %d process%s; want mpirun -np %d, or leave out -pn",
                          asked, launched, launched == 1 ? "" : "es", asked);
        }
        l->n = launched;
        l->rank = from ? number_of(from->rank, 0) : 0;
        return 0;
    }
    if (!asked && !from && l->init != FO_INIT_AUTO) {
        return refuse("-pi %s: how many processes? Want -pn N -pr RANK, or torchrun's or srun's variables",
                      l->init == FO_INIT_FS ? "fs" : "tcp");
    }
    const char* rank = from ? getenv(from->rank) : NULL;
    if (l->rank < 0 && rank && rank[strspn(rank, "0123456789")]) {
        return refuse("%s is '%.40s'; want the number of this process, 0 to %d", from->rank, rank,
                      (asked ? asked : launched) - 1);
    }
    if (!asked) { l->n = launched; }
    if (l->rank < 0) { l->rank = from ? number_of(from->rank, 0) : l->n > 1 ? -1 : 0; }
    if (l->rank < 0) {
        return refuse("-pn %d needs the number of this process: -pr 0 to %d", l->n, l->n - 1);
    }
    if (l->rank >= l->n) {
        return refuse("-pr %d: there are %d processes (-pn); want 0 to %d", l->rank, l->n, l->n - 1);
    }
    if (l->init == FO_INIT_AUTO) { l->init = l->folder[0] ? FO_INIT_FS : FO_INIT_TCP; }
    if (l->init == FO_INIT_FS && l->n > 1 && !l->folder[0]) {
        return refuse("-pi fs needs a folder that all processes see: -pf DIR");
    }
    if (l->init == FO_INIT_TCP) { find_server(l, from); }
    // a port that is no number is 0
    if (l->port < (l->init == FO_INIT_TCP) || l->port > 65535) {
        return refuse("port %d: want 1 to 65535 (MASTER_PORT, --port)", l->port);
    }
    return 0;
}
