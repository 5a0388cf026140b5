// test_comm_mpi.c -- fo_comm.h among ranks that are processes: run by mpirun with 1, 2, 3 and 4 of them. With
// one, ranks are threads, and what remains to be tested is how long they wait for each other.
#include "dev/test/split_cases.h"
#if FO_DEVICE_CPU
#include "flashoverlap/cpu/comm.h"
#endif
#include <mpi.h>
#include <signal.h>
#include <stdatomic.h>

enum { LONG = 300000, SHORT = 100 }; // bytes

// ---- one thread at a time ---------------------------------------------------------------------------------
// MPI is started for threads that call it one at a time, and rarely breaks when they don't; so calls that
// meet are counted. These stand before the library's, which have a second name.
static atomic_int callers, nmet;
// what an exchange asks of MPI, in order: S and R a payload of LONG bytes, T whether something is done
static char asked[64];
static atomic_int nasked = sizeof asked; // full: nobody wants to know

static void note(char what) {
    if (atomic_load(&nasked) < (int)sizeof asked) { asked[atomic_fetch_add(&nasked, 1)] = what; }
}

static void enter(void) {
    if (atomic_fetch_add(&callers, 1) > 0) { atomic_fetch_add(&nmet, 1); }
}

static int leave(int err) {
    atomic_fetch_sub(&callers, 1);
    return err;
}

int MPI_Testsome(int n, MPI_Request requests[], int* ndone, int done[], MPI_Status statuses[]) {
    enter();
    note('T');
    return leave(PMPI_Testsome(n, requests, ndone, done, statuses));
}

int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
    enter();
    return leave(PMPI_Test(request, done, status));
}

int MPI_Isend(const void* p, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
    enter();
    return leave(PMPI_Isend(p, n, type, to, tag, comm, request));
}

int MPI_Issend(const void* p, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm,
               MPI_Request* request) {
    enter();
    if (n == LONG) { note('S'); }
    return leave(PMPI_Issend(p, n, type, to, tag, comm, request));
}

int MPI_Irecv(void* p, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request* request) {
    enter();
    if (n == LONG) { note('R'); }
    return leave(PMPI_Irecv(p, n, type, from, tag, comm, request));
}

int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
    enter();
    return leave(PMPI_Ibarrier(comm, request));
}

int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* part) {
    enter();
    return leave(PMPI_Comm_split(comm, color, key, part));
}

int MPI_Comm_free(MPI_Comm* comm) {
    enter();
    usleep(1000); // it is rare and short: time for others to come
    return leave(PMPI_Comm_free(comm));
}

#if FO_DEVICE_CPU
// A peer's payload is asked for behind the own one's beginning, and before anything can have come: later,
// that would wait in the socket behind the own payload (comm_mpi.c)
static void order_of_calls(FoGroup* g) {
    const int r = fo_group_rank(g), P = fo_group_size(g);
    FoDevice* d = fo_device_open(r, P);
    FoStream* s = fo_stream_create(d, "comm");
    char *out = fo_malloc(d, LONG), *in = fo_malloc(d, LONG);
    fo_comm_begin(g, s);
    fo_send(g, out, LONG, (r + 1) % P);
    fo_recv(g, in, LONG, (r + P - 1) % P);
    atomic_store(&nasked, 0);
    fo_comm_end(g);
    fo_stream_sync(s);
    CHECK_AT("%.6s", asked);
    CHECK(memcmp(asked, "SRT", 3) == 0);
    atomic_store(&nasked, sizeof asked);
    fo_free(d, in);
    fo_free(d, out);
    fo_stream_destroy(s);
    fo_device_close(d);
}

// case_random's messages have up to 3 pieces, and there are several of a pair in an exchange. What times a
// link does not run here: a piece takes a round trip
static void messages_in_pieces(FoGroup* g) {
    Rank k = {.g = g, .P = fo_group_size(g), .r = fo_group_rank(g)};
    CHECK_AT("in pieces: P=%d r=%d", k.P, k.r);
    k.d = fo_device_open(k.r, k.P);
    k.s = fo_stream_create(k.d, "comm");
    fo_group_barrier(g);
    fo__mpi_piece = 1000;
    for (int emulated = 0; emulated < 2; emulated++) {
        if (emulated) { fo_group_link(g, 1.0, 10.0); }
        case_ring(&k, 999, 1);
        case_ring(&k, 1000, 1);
        case_ring(&k, 100001, 1);
        case_all_pairs(&k);
        case_order(&k, 4, 4);
        case_order(&k, 12, 1);
        case_random(&k, emulated ? 50 : 500);
    }
    fo_group_link(g, 0.0, 0.0);
    fo_group_barrier(g);
    fo__mpi_piece = 1 << 30;
    fo_stream_destroy(k.s);
    fo_device_close(k.d);
}
#endif

static void run_cases(FoGroup* g, void* arg) {
    const int* launched = arg;
    CHECK(fo_group_size(g) == *launched);
    const char* among_processes = fo_device_emulates() ? "mpi" : "nccl";
    CHECK(strcmp(fo_group_transport(g), *launched > 1 ? among_processes : "local") == 0);
    all_cases(g, 1000, 64u << 20);
    split_cases(g, 3000);
#if FO_DEVICE_CPU
    if (*launched > 1) {
        order_of_calls(g);
        messages_in_pieces(g);
    }
#endif
    CHECK(atomic_load(&nmet) == 0);
}

// ---- patience ---------------------------------------------------------------------------------------------
typedef enum { RECEIVES, SENDS, AT_BARRIER, SENDS_MORE, SENDS_LESS } Wait;
typedef struct {
    Wait wait;
    int split; // ranks 1 and 2 are a group
} Waits;

static void run_wait(FoGroup* g, void* arg) {
    Waits* w = arg;
    int r = fo_group_rank(g), P = fo_group_size(g), last;
    FoDevice* d = fo_device_open(r, P);
    FoStream* s = fo_stream_create(d, "comm");
    char* p = fo_malloc(d, LONG);
    fo_group_patience(g, 0.5);
    if (w->split) { g = fo_group_split(g, r > 0); }
    r = fo_group_rank(g), last = fo_group_size(g) - 1;
    if (w->wait == AT_BARRIER && r > 0) { fo_group_barrier(g); }
    fo_group_step(g, 12);
    fo_comm_begin(g, s);
    fo_comm_name(g, "F1");
    if (w->wait == RECEIVES && r == 0 && last > 0) { fo_recv(g, p, 4096, last); }
    if (w->wait == SENDS && r == 0 && last > 0) { fo_send(g, p, 4096, 1); }
    const size_t sent = w->wait == SENDS_MORE ? LONG : SHORT;
    if (w->wait >= SENDS_MORE && r == 0) { fo_send(g, p, sent, 1); }
    if (w->wait >= SENDS_MORE && r == 1) { fo_recv(g, p, LONG + SHORT - sent, 0); }
    fo_comm_end(g);
    fo_stream_sync(s);
    usleep(5000000);
}

static void waits(Wait wait, int split) {
    Waits w = {wait, split};
    fo_ranks_run(3, run_wait, &w);
}

// rank 0's second message leaves 0.75 s after its first
static void late_link(Rank* k) {
    char* p = fo_malloc(k->d, 1500);
    fo_group_link(k->g, 2e-6, 0.0);
    fo_comm_begin(k->g, k->s);
    for (int to = 1; k->r == 0 && to < 3; to++) {
        fo_send(k->g, p, 1500, to);
    }
    if (k->r > 0) { fo_recv(k->g, p, 1500, 0); }
    fo_comm_end(k->g);
    fo_stream_sync(k->s);
    fo_free(k->d, p);
}

// a peer that comes late, but within patience, is waited for; the time of an emulated link doesn't count
static void run_late(FoGroup* g, void* arg) {
    (void)arg;
    Rank k = {.g = g, .P = fo_group_size(g), .r = fo_group_rank(g)};
    k.d = fo_device_open(k.r, k.P);
    k.s = fo_stream_create(k.d, "comm");
    fo_group_patience(g, 0.5);
    if (k.r == 0) { usleep(250000); }
    case_ring(&k, 1000, 1);
    if (fo_device_emulates()) { late_link(&k); }
    fo_stream_destroy(k.s);
    fo_device_close(k.d);
}

// a process that was stopped for longer than patience (Ctrl-Z) goes on
static void run_stopped(FoGroup* g, void* arg) {
    Wait wait = *(Wait*)arg;
    int r = fo_group_rank(g);
    FoDevice* d = fo_device_open(r, 2);
    FoStream* s = fo_stream_create(d, "comm");
    char* p = fo_malloc(d, 64);
    fo_group_patience(g, 2.0);
    for (int i = 0; r == 0 && i < 100; i++) { // a second, of which no stop takes more than a hundredth
        usleep(10000);
    }
    fo_comm_begin(g, s);
    if (wait == RECEIVES && r == 0) { fo_send(g, p, 64, 1); }
    if (wait == RECEIVES && r == 1) { fo_recv(g, p, 64, 0); }
    if (wait == SENDS && r == 0) { fo_recv(g, p, 64, 1); }
    if (wait == SENDS && r == 1) { fo_send(g, p, 64, 0); }
    fo_comm_end(g);
    fo_stream_sync(s);
    if (wait == AT_BARRIER) { fo_group_barrier(g); }
    fo_free(d, p);
    fo_stream_destroy(s);
    fo_device_close(d);
}

static void test_stopped(void) {
    pid_t pids[3];
    for (int wait = RECEIVES; wait <= AT_BARRIER; wait++) {
        pids[wait] = fork();
        if (pids[wait] == 0) {
            fo_ranks_run(2, run_stopped, &wait);
            _exit(0);
        }
    }
    usleep(300000);
    for (int wait = RECEIVES; wait <= AT_BARRIER; wait++) {
        CHECK(kill(pids[wait], SIGSTOP) == 0);
    }
    usleep(2500000);
    for (int wait = RECEIVES; wait <= AT_BARRIER; wait++) {
        int status = -1;
        CHECK_AT("wait %d", wait);
        CHECK(kill(pids[wait], SIGCONT) == 0);
        CHECK(waitpid(pids[wait], &status, 0) == pids[wait] && status == 0);
    }
}

int main(int argc, char** argv) {
    int launched = fo_ranks_launched();
    if (argc > 1) { // started so by wait_test.py: none of these ends
        Waits w = {.wait = (Wait)atoi(argv[1]), .split = argc > 2};
        fo_ranks_run(launched, run_wait, &w);
        return 1;
    }
    if (launched == 1) {
        CHECK_DIES(waits(RECEIVES, 0), "[rank 0]");
        CHECK_DIES(waits(RECEIVES, 0), "F1: waited 0.5 s for rank 2 to send 4096 bytes (step 12)");
        CHECK_DIES(waits(SENDS, 0), "waited 0.5 s for rank 1 to receive 4096 bytes");
        CHECK_DIES(waits(AT_BARRIER, 0), "waited 0.5 s at a barrier for rank 0");
        // messages name ranks of the world, which in the group of ranks 1 and 2 are 0 and 1
        CHECK_DIES(waits(RECEIVES, 1), "[rank 1]");
        CHECK_DIES(waits(RECEIVES, 1), "F1: waited 0.5 s for rank 2 to send 4096 bytes (step 12)");
        CHECK_DIES(waits(SENDS, 1), "waited 0.5 s for rank 2 to receive 4096 bytes");
        CHECK_DIES(waits(AT_BARRIER, 1), "waited 0.5 s at a barrier for rank 1");
        test_stopped();
        fo_ranks_run(3, run_late, NULL);
    }
    fo_ranks_run(launched, run_cases, &launched);
    return check_report();
}
