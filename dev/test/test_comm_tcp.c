// test_comm_tcp.c -- fo_comm.h among ranks that are processes without MPI: this program starts 1 to 4 of
// itself for each way of meeting; then what they say and do when one waits in vain or ends.
#include "dev/test/split_cases.h"
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>

// a port that is free now, below those that outgoing connections are given
static int free_port(void) {
    for (int i = 0; i < 1000; i++) {
        const int port = 12000 + (int)(mix((uint64_t)getpid() << 20 | (uint64_t)i) % 18000);
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        int fd = socket(AF_INET, SOCK_STREAM, 0), is_free = bind(fd, (struct sockaddr*)&at, sizeof at) == 0;
        close(fd);
        if (is_free) { return port; }
    }
    fo_quit(1, "no port is free");
}

static FoLaunch launch_of(FoInit init, int n, const char* folder) {
    FoLaunch l = fo_launch_default();
    l.init = init;
    l.n = n;
    l.port = init == FO_INIT_TCP ? free_port() : 0;
    l.timeout_s = 20.0;
    (void)snprintf(l.folder, sizeof l.folder, "%s", folder);
    return l;
}

// ---- what launchers say -----------------------------------------------------------------------------------
// variables that are set for a case, apart by blanks; what is found: init, n, rank, server, port
static const struct {
    const char* environment;
    FoInit init;
    int n, rank;
    const char* server;
    int port;
} found[] = {
    {"", FO_INIT_TCP, 1, 0, "127.0.0.1", FO_PORT},
    {"OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3", FO_INIT_MPI, 4, 3, "", 0},
    {"PMI_SIZE=2 PMI_RANK=1", FO_INIT_MPI, 2, 1, "", 0},
    {"OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1", FO_INIT_MPI, 4, 3,
     "", 0},
    {"WORLD_SIZE=4 RANK=2 MASTER_ADDR=node1 MASTER_PORT=29500", FO_INIT_TCP, 4, 2, "node1", 29500},
    {"WORLD_SIZE=4 RANK=2 MASTER_ADDR=node1 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True", FO_INIT_TCP,
     4, 2, "node1", 29501},
    {"WORLD_SIZE=4 RANK=2 MASTER_ADDR=node1 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=False",
     FO_INIT_TCP, 4, 2, "node1", 29500},
    {"WORLD_SIZE=1 RANK=0 MASTER_ADDR=node1 MASTER_PORT=29500", FO_INIT_TCP, 1, 0, "127.0.0.1", FO_PORT},
    {"WORLD_SIZE=4 RANK=2 MASTER_ADDR=node1 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1", FO_INIT_TCP, 4, 2,
     "node1", FO_PORT},
    {"SLURM_STEP_NUM_TASKS=16 SLURM_PROCID=9 SLURM_STEP_NODELIST=gpu[03-05,9],x", FO_INIT_TCP, 16, 9, "gpu03",
     FO_PORT},
    {"SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_STEP_NODELIST=a-1,b-2", FO_INIT_TCP, 2, 1, "a-1", FO_PORT},
    {"SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_JOB_NODELIST=n[7,9]", FO_INIT_TCP, 2, 1, "n7", FO_PORT},
    {"SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LAUNCH_NODE_IPADDR=10.0.0.7", FO_INIT_TCP, 2, 1, "10.0.0.7",
     FO_PORT},
    {"SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 PMIX_RANK=1", FO_INIT_MPI, 2, 1, "", 0},
    {"SLURM_NTASKS=2 SLURM_PROCID=0", FO_INIT_TCP, 1, 0, "127.0.0.1", FO_PORT}, // a batch script, no step
};

// sets the variables, or takes them away
static void environment(const char* text, int set) {
    char all[256], *rest = NULL;
    (void)snprintf(all, sizeof all, "%s", text);
    for (char* name = strtok_r(all, " ", &rest); name; name = strtok_r(NULL, " ", &rest)) {
        char* value = strchr(name, '=');
        *value++ = 0;
        (void)(set ? setenv(name, value, 1) : unsetenv(name));
    }
}

static void test_found(void) {
    for (size_t i = 0; i < sizeof found / sizeof *found; i++) {
        FoLaunch l = fo_launch_default();
        char err[FO_LAUNCH_ERR] = "";
        CHECK_AT("%.100s", found[i].environment);
        environment(found[i].environment, 1);
        CHECK(fo_launch_find(&l, err) == 0 && err[0] == 0);
        CHECK(l.init == found[i].init && l.n == found[i].n && l.rank == found[i].rank);
        CHECK(strcmp(l.server, found[i].server) == 0 && l.port == found[i].port);
        CHECK(fo_ranks_launched() == found[i].n);
        CHECK(fo_launch_speaks() == (found[i].rank == 0));
        environment(found[i].environment, 0);
    }
    // what options say holds; a folder means fs
    FoLaunch l = fo_launch_default();
    char err[FO_LAUNCH_ERR] = "";
    environment(found[4].environment, 1);
    l.n = 3, l.rank = 1, l.port = 777;
    strcpy(l.server, "other");
    CHECK(fo_launch_find(&l, err) == 0 && l.n == 3 && l.rank == 1 && l.port == 777);
    CHECK(l.init == FO_INIT_TCP && strcmp(l.server, "other") == 0);
    l.init = FO_INIT_AUTO;
    strcpy(l.folder, "meet");
    CHECK(fo_launch_find(&l, err) == 0 && l.init == FO_INIT_FS);
    l.init = FO_INIT_MPI;
    CHECK(fo_launch_find(&l, err) == -1 &&
          strstr(err, "-pn 3: mpirun has started 4 processes; want mpirun -np 3"));
    environment(found[4].environment, 0);
}

// ---- what fo_comm.h promises ------------------------------------------------------------------------------
static void run_cases(FoGroup* g, void* arg) {
    const int n = *(int*)arg;
    CHECK(fo_group_size(g) == n);
    CHECK(strcmp(fo_group_transport(g), n > 1 ? "tcp" : "local") == 0);
    all_cases(g, 150, 16u << 20);
    split_cases(g, 300);
}

static void test_cases(FoInit init, int n, const char* folder) {
    FoLaunch l = launch_of(init, n, folder);
    pid_t pids[FO_MAX_RANKS];
    char err[FO_LAUNCH_ERR];
    fflush(NULL);
    for (int r = 0; r < n; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            check_passed = check_failed = 0;
            l.rank = r;
            CHECK(fo_launch_find(&l, err) == 0);
            fo_launch_run(&l, n, run_cases, &n);
            int status = check_report();
            fflush(NULL);
            _exit(status);
        }
    }
    for (int r = 0; r < n; r++) {
        int status = -1;
        CHECK_AT("init %d, rank %d of %d", (int)init, r, n);
        CHECK(waitpid(pids[r], &status, 0) == pids[r] && status == 0);
    }
}

// ---- patience ---------------------------------------------------------------------------------------------
typedef enum { RECEIVES, SENDS, AT_BARRIER, AT_SPLIT, DIES, SIZES_DIFFER, MEETS_BARRIER } Wait;
typedef struct {
    Wait wait;
    int split; // ranks 1 and 2 are a group
} Waits;

// rank 0 of g waits in vain for the last one, or finds out otherwise
static void run_wait(FoGroup* g, void* arg) {
    Waits* w = arg;
    int r = fo_group_rank(g), P = fo_group_size(g), last;
    FoDevice* d = fo_device_open(r, P);
    FoStream* s = fo_stream_create(d, "comm");
    char* p = fo_malloc(d, 4096);
    fo_group_patience(g, 0.5);
    if (w->split) { g = fo_group_split(g, r > 0); }
    r = fo_group_rank(g), last = fo_group_size(g) - 1;
    if (last == 0) { usleep(20000000); }
    if (w->wait == AT_BARRIER ? r == 0 : w->wait == MEETS_BARRIER && r == last) { fo_group_barrier(g); }
    if (w->wait == AT_SPLIT && r == 0) { fo_group_split(g, 0); }
    if (w->wait == DIES && r == last) { raise(SIGKILL); }
    if (w->wait == DIES) { fo_group_patience(g, 30.0); }
    fo_group_step(g, 12);
    fo_comm_begin(g, s);
    fo_comm_name(g, "F1");
    if (r == 0 && w->wait != SENDS && w->wait != AT_BARRIER) { fo_recv(g, p, 4096, last); }
    if (r == 0 && w->wait == SENDS) { fo_send(g, p, 4096, last); }
    if (r == last && w->wait == SIZES_DIFFER) { fo_send(g, p, 100, 0); }
    fo_comm_end(g);
    fo_stream_sync(s);
    usleep(20000000);
}

// three processes; the first one that ends tells the check what it has said
static void waits(Wait wait, int split, int teller) {
    FoLaunch l = launch_of(FO_INIT_TCP, 3, "");
    Waits w = {wait, split};
    pid_t pids[3];
    char err[FO_LAUNCH_ERR];
    double start = fo_now();
    for (int r = 0; r < 3; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            if (r != teller) { freopen("/dev/null", "w", stderr) ? (void)0 : abort(); }
            l.rank = r;
            fo_launch_find(&l, err);
            fo_launch_run(&l, 3, run_wait, &w);
            _exit(0);
        }
    }
    for (int r = 0; r < 3; r++) {
        int status;
        waitpid(pids[r], &status, 0);
        if (status == 0) { _exit(0); } // the check wants all to fail
    }
    if (fo_now() - start > 15.0) { fprintf(stderr, "they took %.1f s to end", fo_now() - start); }
    _exit(fo_now() - start < 15.0 ? 1 : 0);
}

// a process that was stopped for longer than patience (Ctrl-Z), and its peer with it, goes on
static void run_stopped(FoGroup* g, void* arg) {
    (void)arg;
    FoDevice* d = fo_device_open(fo_group_rank(g), 2);
    FoStream* s = fo_stream_create(d, "comm");
    char* p = fo_malloc(d, 64);
    fo_group_patience(g, 1.0);
    for (int i = 0; fo_group_rank(g) == 0 && i < 50;
         i++) {        // half a second, of which no stop takes more than a
        usleep(10000); // hundredth
    }
    fo_comm_begin(g, s);
    if (fo_group_rank(g) == 0) { fo_send(g, p, 64, 1); }
    if (fo_group_rank(g) == 1) { fo_recv(g, p, 64, 0); }
    fo_comm_end(g);
    fo_stream_sync(s);
    fo_group_barrier(g);
    fo_free(d, p);
    fo_stream_destroy(s);
    fo_device_close(d);
}

static void test_stopped(void) {
    FoLaunch l = launch_of(FO_INIT_TCP, 2, "");
    pid_t pids[2];
    char err[FO_LAUNCH_ERR];
    for (int r = 0; r < 2; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            l.rank = r;
            fo_launch_find(&l, err);
            fo_launch_run(&l, 2, run_stopped, NULL);
            _exit(0);
        }
    }
    usleep(200000);
    CHECK(kill(pids[0], SIGSTOP) == 0 && kill(pids[1], SIGSTOP) == 0);
    usleep(1300000);
    for (int r = 0; r < 2; r++) {
        CHECK(kill(pids[r], SIGCONT) == 0);
    }
    for (int r = 0; r < 2; r++) {
        int status = -1;
        CHECK_AT("stopped, rank %d", r);
        CHECK(waitpid(pids[r], &status, 0) == pids[r] && status == 0);
    }
}

int main(void) {
    char folder[] = "/tmp/test_comm_tcp.XXXXXX";
    test_found();
    CHECK(mkdtemp(folder) != NULL);
    for (int n = 1; n <= 4; n++) {
        test_cases(FO_INIT_TCP, n, "");
    }
    test_cases(FO_INIT_FS, 3, folder);
    CHECK(rmdir(folder) == 0); // nothing is left in it
    CHECK_DIES(waits(RECEIVES, 0, 0), "F1: waited 0.5 s for rank 2 to send 4096 bytes (step 12)");
    CHECK_DIES(waits(SENDS, 0, 0), "F1: waited 0.5 s for rank 2 to receive 4096 bytes (step 12)");
    CHECK_DIES(waits(AT_BARRIER, 0, 0), "waited 0.5 s at a barrier for rank 1 2");
    CHECK_DIES(waits(AT_SPLIT, 0, 0), "waited 0.5 s at a barrier for rank 1 2");
    // messages name ranks of the world, which in the group of ranks 1 and 2 are 0 and 1
    CHECK_DIES(waits(RECEIVES, 1, 1), "[rank 1]");
    CHECK_DIES(waits(RECEIVES, 1, 1), "F1: waited 0.5 s for rank 2 to send 4096 bytes (step 12)");
    CHECK_DIES(waits(AT_BARRIER, 1, 1), "waited 0.5 s at a barrier for rank 2");
    CHECK_DIES(waits(SIZES_DIFFER, 0, 0), "rank 2 sends 100 bytes to rank 0, which expects 4096");
    CHECK_DIES(waits(MEETS_BARRIER, 0, 0), "rank 2 is at a barrier, where rank 0 expects 4096 bytes");
    CHECK_DIES(waits(DIES, 0, 0), "[rank 0] rank 2 on ");
    CHECK_DIES(waits(DIES, 0, 1), "[rank 1] rank 2 on ");
    test_stopped();
    return check_report();
}
