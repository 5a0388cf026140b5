/* fo_comm.c -- the part of fo_comm.h that all devices and transports share: ranks, groups, collecting of
 * exchanges, figures of the link, measuring. How bytes move: cpu/comm*.c, cuda/comm*.cu.
 */
#include "flashoverlap/fo_transport.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

// ---- ranks ------------------------------------------------------------------------------------------------
static FoGroup* group_new(void) {
    FoGroup* g = calloc(1, sizeof *g);
    fo_require(g != NULL, "out of memory");
    g->world = g;
    for (int r = 0; r < FO_MAX_RANKS; r++) {
        g->world_ranks[r] = r;
    }
    g->patience_s = FO_PATIENCE_S;
    g->step = -1;
    return g;
}

static void group_close(FoGroup* g) {
    fo_require(!g->collecting, "rank %d ended between fo_comm_begin and fo_comm_end",
               g->world_ranks[g->rank]);
    fo_require(g->nparts == 0, "rank %d ended with %d group%s that fo_group_free should have closed", g->rank,
               g->nparts, g->nparts == 1 ? "" : "s");
    g->transport->close(g);
    free(g);
}

typedef struct {
    FoGroup* group;
    FoRankBody body;
    void* arg;
} RankThread;

static void* rank_main(void* p) {
    RankThread* t = p;
    char name[16];
    snprintf(name, sizeof name, "rank %d", t->group->rank);
    pthread_setname_np(pthread_self(), name);
    fo_die_rank(t->group->rank);
    t->body(t->group, t->arg);
    group_close(t->group);
    return NULL;
}

static void run_threads(int P, FoRankBody body, void* arg) {
    FoGroup* groups[FO_MAX_RANKS];
    RankThread ranks[FO_MAX_RANKS];
    pthread_t threads[FO_MAX_RANKS];
    for (int r = 0; r < P; r++) {
        groups[r] = group_new();
    }
    fo__local_open(groups, P);
    for (int r = 0; r < P; r++) {
        ranks[r] = (RankThread){groups[r], body, arg};
        int err = pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
        fo_require(err == 0, "no thread for rank %d: %s", r, strerror(err));
    }
    for (int r = 0; r < P; r++) {
        pthread_join(threads[r], NULL);
    }
}

void fo__quit_first(int rank, const char* message) {
    if (rank == 0) { fo_quit(1, "%s", message); }
    sleep(10); // a launcher ends them long before
    _exit(1);
}

// Polls without a pause for the time that a small message takes, then sleeps: 50 us, and 100 us once it takes
// long. Of 50, 100, 200 and 500 us the longer made messages late, the shortest cost half as much time again.
void fo__rest(double quiet_s) {
    struct timespec t = {0, quiet_s < 1e-3 ? 50000 : 100000};
    if (quiet_s > 20e-6) { nanosleep(&t, NULL); }
}

void fo__hosts_barrier(FoGroup* g) {
    g->hosts->barrier(g);
}

static void run_process(const FoLaunch* l, int P, FoRankBody body, void* arg) {
    const int n = l->n;
    char message[256];
    if (l->init == FO_INIT_MPI && !FO_MPI) {
        snprintf(
            message, sizeof message,
            "%d processes were started, but this program was built without MPI: build it with MPI=1, let "
            "them meet by -pi tcp, or start one process, whose threads are then the %d rank%s",
            n, P, P == 1 ? "" : "s");
        fo__quit_first(l->rank, message);
    }
    if (P != n) {
        snprintf(
            message, sizeof message,
            "asked for %d rank%s, but %d processes were started: ask for %d ranks, or start %d process%s", P,
            P == 1 ? "" : "s", n, n, P, P == 1 ? "" : "es");
        fo__quit_first(l->rank, message);
    }
    FoGroup* g = group_new();
    g->rank = l->rank; // so that the first can say what is wrong
    fo__process_open(g, l);
    if (g->size != n) {
        snprintf(
            message, sizeof message,
            "%d processes were started, but MPI counts %d: start them by the mpirun of the MPI that this was "
            "built with, or let them meet by -pi tcp",
            n, g->size);
        fo__quit_first(l->rank, message);
    }
    fo_die_rank(g->rank);
    body(g, arg);
    group_close(g);
}

void fo_launch_run(const FoLaunch* l, int P, FoRankBody body, void* arg) {
    if (l->n > FO_MAX_RANKS) {
        char message[80];
        snprintf(message, sizeof message, "%d processes were started; %d at most can be ranks", l->n,
                 FO_MAX_RANKS);
        fo__quit_first(l->rank, message);
    }
    fo_require(P >= 1 && P <= FO_MAX_RANKS, "%d ranks, must be 1 to %d", P, FO_MAX_RANKS);
    if (l->n > 1) {
        run_process(l, P, body, arg);
    } else {
        run_threads(P, body, arg);
    }
}

void fo_ranks_run(int P, FoRankBody body, void* arg) {
    FoLaunch l = fo_launch_default();
    char err[FO_LAUNCH_ERR];
    if (fo_launch_find(&l, err)) { fo__quit_first(l.rank, err); }
    fo_launch_run(&l, P, body, arg);
}

// ---- groups -----------------------------------------------------------------------------------------------
int fo_group_rank(const FoGroup* g) {
    return g->rank;
}
int fo_group_size(const FoGroup* g) {
    return g->size;
}
int fo_group_nlocal(const FoGroup* g) {
    return g->nlocal;
}
const char* fo_group_transport(const FoGroup* g) {
    return g->transport->name;
}

void fo_group_barrier(FoGroup* g) {
    g->transport->barrier(g);
}

FoGroup* fo_group_split(FoGroup* g, int color) {
    fo_require(color >= 0, "a group of color %d, must be 0 or more", color);
    FoGroup* part = group_new();
    part->world = g->world;
    g->transport->split(g, color, part);
    part->emulated = g->emulated;
    if (g->emulated) {
        part->latency_s = g->latency_s;
        part->s_per_byte = g->s_per_byte;
    }
    g->world->nparts++;
    return part;
}

void fo_group_free(FoGroup* g) {
    fo_require(g->world != g, "a world ends with fo_ranks_run, not by fo_group_free");
    g->world->nparts--;
    group_close(g);
}

void fo_group_sent(const FoGroup* g, size_t* nbytes, size_t* nmessages) {
    *nbytes = g->nbytes_sent;
    *nmessages = g->nsent;
}

void fo_group_sent_by_graph(FoGroup* g, size_t nbytes, size_t nmessages) {
    g->nbytes_sent += nbytes;
    g->nsent += nmessages;
}

void fo_group_link(FoGroup* g, double gbytes_s, double us) {
    fo_require(gbytes_s >= 0.0 && us >= 0.0, "a link of %g GB/s and %g us", gbytes_s, us);
    fo_require(gbytes_s == 0.0 || g->nlocal == g->size,
               "a link is emulated among ranks of one machine: here are %d of %d", g->nlocal, g->size);
    fo_require(gbytes_s == 0.0 || fo_device_emulates(),
               "a link of %g GB/s: only the cpu device emulates links, this one's are as they are", gbytes_s);
    g->emulated = gbytes_s > 0.0;
    g->s_per_byte = g->emulated ? 1.0 / (gbytes_s * 1e9) : 0.0;
    g->latency_s = g->emulated ? us * 1e-6 : 0.0;
}

double fo_group_message_s(const FoGroup* g, size_t nbytes) {
    return g->latency_s + (double)nbytes * g->s_per_byte;
}

void fo_group_patience(FoGroup* g, double seconds) {
    fo_require(seconds > 0.0, "a patience of %g s", seconds);
    g->world->patience_s = seconds;
}

void fo_group_step(FoGroup* g, int step) {
    g->world->step = step;
}

double fo__patience_s(const FoBatch* b) {
    const FoGroup* g = b->group;
    double link_s = 0.0;
    for (int i = 0; i < b->nsends; i++) {
        link_s += fo_group_message_s(g, b->sends[i].nbytes);
    }
    for (int i = 0; i < b->nrecvs; i++) {
        link_s += fo_group_message_s(g, b->recvs[i].nbytes);
    }
    // a peer may have to wait for its peer, and so on along all ranks
    return b->patience_s + (g->emulated ? g->size * link_s : 0.0);
}

// adds to text what is still awaited of one message; *n: how many have been
static void add_awaited(char text[256], int* n, const char* what, int rank, size_t nbytes) {
    size_t at = strlen(text);
    if ((*n)++ < 4) {
        snprintf(text + at, 256 - at, "%srank %d to %s %zu bytes", *n > 1 ? ", " : "", rank, what, nbytes);
    }
}

void fo__die_waiting(const FoBatch* b, double waited_s, unsigned sends, unsigned recvs) {
    char step[32] = "", awaited[256] = "", more[32] = "";
    int n = 0;
    if (b->step >= 0) { snprintf(step, sizeof step, " (step %d)", b->step); }
    for (int i = 0; i < b->nrecvs; i++) {
        const FoRecv* r = &b->recvs[i];
        if (recvs >> i & 1u) { add_awaited(awaited, &n, "send", b->group->world_ranks[r->from], r->nbytes); }
    }
    for (int i = 0; i < b->nsends; i++) {
        const FoSend* m = &b->sends[i];
        if (sends >> i & 1u) { add_awaited(awaited, &n, "receive", b->group->world_ranks[m->to], m->nbytes); }
    }
    if (n == 0) { snprintf(awaited, sizeof awaited, "the other ranks"); } // a graph of exchanges
    if (n > 4) { snprintf(more, sizeof more, " and %d more", n - 4); }
    fo_die(__FILE__, __LINE__, __func__, "%s%swaited %.1f s for %s%s%s", b->what ? b->what : "",
           b->what ? ": " : "", waited_s, awaited, more, step);
}

// ---- exchanges --------------------------------------------------------------------------------------------
void fo_comm_begin(FoGroup* g, FoStream* s) {
    fo_require(!g->collecting, "the exchange begun before has not ended");
    FoBatch* b = malloc(sizeof *b);
    fo_require(b != NULL, "out of memory");
    b->group = g;
    b->stream = s;
    b->what = NULL;
    b->step = g->world->step;
    b->patience_s = g->world->patience_s;
    b->nsends = b->nrecvs = 0;
    g->collecting = b;
}

void fo_comm_name(FoGroup* g, const char* name) {
    fo_require(g->collecting != NULL, "%s: no exchange was begun", name);
    g->collecting->what = name;
}

// the exchange that is open, for a message to or from `peer`; another word for the direction serves the
// message
static FoBatch* collecting(FoGroup* g, const char* direction, int peer) {
    fo_require(g->collecting != NULL, "%s rank %d outside fo_comm_begin ... fo_comm_end", direction, peer);
    fo_require(peer >= 0 && peer < g->size, "%s rank %d, ranks are 0 to %d", direction, peer, g->size - 1);
    fo_require(peer != g->rank, "%s rank %d, which is this rank", direction, peer);
    return g->collecting;
}

void fo_send(FoGroup* g, const void* src, size_t nbytes, int to) {
    FoBatch* b = collecting(g, "to", to);
    if (nbytes == 0) { return; }
    fo_require(b->nsends < FO_MAX_RANKS, "more than %d sends in an exchange", FO_MAX_RANKS);
    b->sends[b->nsends++] = (FoSend){src, nbytes, to};
    g->nbytes_sent += nbytes;
    g->nsent++;
}

void fo_recv(FoGroup* g, void* dst, size_t nbytes, int from) {
    FoBatch* b = collecting(g, "from", from);
    if (nbytes == 0) { return; }
    fo_require(b->nrecvs < FO_MAX_RANKS, "more than %d receives in an exchange", FO_MAX_RANKS);
    b->recvs[b->nrecvs++] = (FoRecv){.dst = dst, .nbytes = nbytes, .from = from};
}

// for the timeline
static FoMessages messages_of(const FoGroup* g, const FoBatch* b) {
    FoMessages m = {0, 0, 0, 0};
    for (int i = 0; i < b->nsends; i++) {
        m.nsent += b->sends[i].nbytes;
        m.to |= 1u << g->world_ranks[b->sends[i].to];
    }
    for (int i = 0; i < b->nrecvs; i++) {
        m.nreceived += b->recvs[i].nbytes;
        m.from |= 1u << g->world_ranks[b->recvs[i].from];
    }
    return m;
}

void fo_comm_end(FoGroup* g) {
    FoBatch* b = g->collecting;
    fo_require(b != NULL, "no exchange was begun");
    g->collecting = NULL;
    if (b->nsends + b->nrecvs == 0) {
        free(b);
        return;
    }
    fo_stream_messages(b->stream, messages_of(g, b));
    fo__exchange(b);
}

void fo_allgather(FoGroup* g, void* all, size_t nbytes_each, FoStream* s) {
    char* blocks = all;
    int P = g->size, r = g->rank;
    fo_comm_begin(g, s);
    for (int i = 1; i < P; i++) {
        int to = (r + P - i) % P, from = (r + i) % P;
        fo_send(g, blocks + (size_t)r * nbytes_each, nbytes_each, to);
        fo_recv(g, blocks + (size_t)from * nbytes_each, nbytes_each, from);
    }
    fo_comm_end(g);
}

// ---- measuring --------------------------------------------------------------------------------------------
static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// median over rounds of the seconds that a message takes while every rank sends to the next
static double ring_s(FoGroup* g, FoStream* s, void* dst, const void* src, size_t nbytes, int nmessages) {
    enum { ROUNDS = 5 };
    double seconds[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) { // the first only warms up
        fo_group_barrier(g);
        double start = fo_now();
        for (int i = 0; i < nmessages; i++) {
            fo_comm_begin(g, s);
            fo_send(g, src, nbytes, (g->rank + 1) % g->size);
            fo_recv(g, dst, nbytes, (g->rank + g->size - 1) % g->size);
            fo_comm_end(g);
        }
        fo_stream_sync(s);
        if (round >= 0) { seconds[round] = (fo_now() - start) / nmessages; }
    }
    qsort(seconds, ROUNDS, sizeof *seconds, compare_doubles);
    return seconds[ROUNDS / 2];
}

void fo_group_measure(FoGroup* g, FoStream* s) {
    enum { SMALL = 64, NSMALL = 64, LARGE = 8 << 20, NLARGE = 4 };
    if (g->emulated) { return; }
    g->latency_s = g->s_per_byte = 0.0;
    if (g->size == 1) { return; }
    FoDevice* d = fo_stream_device(s);
    char *dst = fo_malloc(d, LARGE), *src = fo_malloc(d, LARGE);
    double small = ring_s(g, s, dst, src, SMALL, NSMALL), large = ring_s(g, s, dst, src, LARGE, NLARGE);
    double figures[FO_MAX_RANKS][2], own[2] = {small, fo__later(large - small, 0.0) / (LARGE - SMALL)};
    fo_upload(dst + (size_t)g->rank * sizeof own, own, sizeof own, s);
    fo_allgather(g, dst, sizeof own, s);
    fo_download(figures, dst, (size_t)g->size * sizeof own, s);
    fo_stream_sync(s);
    // the slowest neighbours set the pace of a collective; so all ranks hold the same figures
    for (int r = 0; r < g->size; r++) {
        g->latency_s = fo__later(g->latency_s, figures[r][0]);
        g->s_per_byte = fo__later(g->s_per_byte, figures[r][1]);
    }
    fo_free(d, dst);
    fo_free(d, src);
}
