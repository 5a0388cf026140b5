// test_comm.c -- fo_comm.h among ranks that are threads, and how it ends a program that breaks its rules.
#include "dev/test/split_cases.h"
#include <stdatomic.h>

typedef struct {
    int nexchanges;
    size_t large_nbytes;
    atomic_int nran;
} Cases;

static void run_cases(FoGroup* g, void* arg) {
    Cases* c = arg;
    atomic_fetch_add(&c->nran, 1);
    CHECK(strcmp(fo_group_transport(g), "local") == 0);
    all_cases(g, c->nexchanges, c->large_nbytes);
}

static void run_split_cases(FoGroup* g, void* arg) {
    (void)arg;
    split_cases(g, 300);
}

// ---- the barrier ------------------------------------------------------------------------------------------
// what the others wrote before the barrier is here after it, again and again
static void run_barrier(FoGroup* g, void* arg) {
    enum { ROUNDS = 300 };
    int *written = arg, P = fo_group_size(g), r = fo_group_rank(g), right = 1;
    uint64_t own = (unsigned)r;
    for (int i = 1; i <= ROUNDS; i++) {
        written[r] = i;
        if (random_next(&own) % 32 == 0) { usleep((useconds_t)(random_next(&own) % 1000)); }
        fo_group_barrier(g);
        for (int p = 0; p < P; p++) {
            right &= written[p] == i;
        }
        fo_group_barrier(g);
    }
    CHECK(right);
}

// ---- broken rules -----------------------------------------------------------------------------------------
static void nothing(FoGroup* g, void* arg) {
    (void)g;
    (void)arg;
}

typedef enum {
    TO_ITSELF,
    FROM_NOBODY,
    OUTSIDE,
    BEGUN_TWICE,
    NOT_BEGUN,
    NOT_ENDED,
    SIZES_DIFFER,
    TOO_MANY,
    ONE_RANK_DIES,
    LINK_BACKWARDS,
    LINK_OF_A_GPU,
    COLOR_NEGATIVE,
    WORLD_FREED,
    PART_NOT_FREED,
    PART_FREED_TOO_SOON
} Rule;

static void break_rule(FoGroup* g, void* arg) {
    Rule rule = *(Rule*)arg;
    int r = fo_group_rank(g), P = fo_group_size(g);
    FoDevice* d = fo_device_open(r, P);
    FoStream* s = fo_stream_create(d, "comm");
    char* p = fo_malloc(d, 4096);
    if (rule == LINK_BACKWARDS) { fo_group_link(g, -1.0, 0.0); }
    if (rule == LINK_OF_A_GPU) { fo_group_link(g, 1.0, 0.0); }
    if (rule == COLOR_NEGATIVE) { fo_group_split(g, -1); }
    if (rule == WORLD_FREED) { fo_group_free(g); }
    if (rule == PART_NOT_FREED) {
        fo_group_split(g, 0);
        return;
    }
    if (rule == PART_FREED_TOO_SOON) {
        FoGroup* part = fo_group_split(g, r);
        fo_comm_begin(part, s);
        fo_group_free(part);
    }
    if (rule == OUTSIDE) { fo_send(g, p, 8, (r + 1) % P); }
    if (rule == ONE_RANK_DIES) {
        fo_require(r != 1, "rank 1 has had enough");
        fo_group_barrier(g); // for ever, but for rank 1
    }
    if (rule != NOT_BEGUN) { fo_comm_begin(g, s); }
    if (rule == BEGUN_TWICE) { fo_comm_begin(g, s); }
    if (rule == TO_ITSELF) { fo_send(g, p, 8, r); }
    if (rule == FROM_NOBODY) { fo_recv(g, p, 8, P); }
    if (rule == NOT_ENDED) { return; }
    for (int i = 0; rule == TOO_MANY && i <= FO_MAX_RANKS; i++) {
        fo_recv(g, p, 8, (r + 1) % P);
    }
    if (rule == SIZES_DIFFER && r == 0) { fo_send(g, p, 4096, 1); }
    if (rule == SIZES_DIFFER && r == 1) { fo_recv(g, p, 100, 0); }
    fo_comm_end(g);
    fo_stream_sync(s);
}

static void breaks(Rule rule) {
    fo_ranks_run(2, break_rule, &rule);
}

int main(void) {
    CHECK_DIES(fo_ranks_run(0, nothing, NULL), "0 ranks, must be 1 to 16");
    CHECK_DIES(fo_ranks_run(17, nothing, NULL), "17 ranks, must be 1 to 16");
    setenv("OMPI_COMM_WORLD_SIZE", "17", 1); // as mpirun -np 17 does
    CHECK_DIES(fo_ranks_run(17, nothing, NULL), "17 processes were started; 16 at most can be ranks");
    unsetenv("OMPI_COMM_WORLD_SIZE");
    CHECK_DIES(breaks(TO_ITSELF), "which is this rank");
    CHECK_DIES(breaks(FROM_NOBODY), "from rank 2, ranks are 0 to 1");
    CHECK_DIES(breaks(OUTSIDE), "outside fo_comm_begin");
    CHECK_DIES(breaks(BEGUN_TWICE), "the exchange begun before has not ended");
    CHECK_DIES(breaks(NOT_BEGUN), "no exchange was begun");
    CHECK_DIES(breaks(NOT_ENDED), "ended between fo_comm_begin and fo_comm_end");
    CHECK_DIES(breaks(SIZES_DIFFER), "rank 0 sends 4096 bytes to rank 1, which expects 100");
    CHECK_DIES(breaks(TOO_MANY), "more than 16 receives");
    CHECK_DIES(breaks(ONE_RANK_DIES), "[rank 1]");
    CHECK_DIES(breaks(LINK_BACKWARDS), "a link of -1 GB/s");
    if (!fo_device_emulates()) { CHECK_DIES(breaks(LINK_OF_A_GPU), "only the cpu device emulates links"); }
    CHECK_DIES(breaks(COLOR_NEGATIVE), "a group of color -1, must be 0 or more");
    CHECK_DIES(breaks(WORLD_FREED), "not by fo_group_free");
    CHECK_DIES(breaks(PART_NOT_FREED), "ended with 1 group that fo_group_free should have closed");
    CHECK_DIES(breaks(PART_FREED_TOO_SOON), "ended between fo_comm_begin and fo_comm_end");
    CHECK(fo_ranks_launched() == 1);
    const int ranks[] = {1, 2, 3, 4, 6, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        int P = ranks[i], written[FO_MAX_RANKS] = {0};
        fo_ranks_run(P, run_split_cases, NULL);
        if (P == 6) { continue; } // groups of 1, 2 and 3 ranks; the others have all cases
        Cases c = {.nexchanges = P < 8 ? 1000 : 300, .large_nbytes = P == 2 ? 64u << 20 : 8u << 20};
        if (!FO_DEVICE_CPU) { c.nexchanges = 100, c.large_nbytes = 1u << 16; } // emulation is slow
        atomic_init(&c.nran, 0);
        fo_ranks_run(P, run_cases, &c);
        CHECK(atomic_load(&c.nran) == P);
        fo_ranks_run(P, run_barrier, written);
    }
    return check_report();
}
