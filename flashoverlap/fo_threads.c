/* fo_threads.c -- the host's side of ranks that are threads of one process, on every device: a barrier, the
 * splitting of groups, waiting with patience. How bytes move between them, the devices' comm_local files say.
 */
#include "flashoverlap/fo_transport.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

// one for each group, of all its ranks
typedef struct FoThreads {
    atomic_int nopen; // ranks that have not closed it; the last frees this
    pthread_mutex_t barrier_mutex;
    pthread_cond_t barrier_cond;
    unsigned barrier_here; // bit r: rank r waits
    uint64_t barrier_round;
    struct {
        int color;
        FoGroup* part;
    } split[FO_MAX_RANKS]; // a split under way, written and read by turns between barriers
} FoThreads;

void fo__cond_init(pthread_cond_t* cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

int fo__cond_wait(pthread_cond_t* cond, pthread_mutex_t* mutex, double* patience) {
    double start = fo_now(), until = start + fo__waited_s(*patience);
    struct timespec t = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    pthread_cond_timedwait(cond, mutex, &t);
    *patience -= fo__waited_s(fo_now() - start);
    return *patience > 0.0;
}

static _Noreturn void die_of_absence(const FoGroup* g, unsigned here) {
    char missing[8 * FO_MAX_RANKS] = "";
    for (int r = 0, n = 0; r < g->size; r++) {
        if (!(here >> r & 1u)) {
            n += snprintf(missing + n, sizeof missing - (size_t)n, " %d", g->world_ranks[r]);
        }
    }
    fo_die(__FILE__, __LINE__, "fo_group_barrier", "waited %.1f s at a barrier for rank%s",
           g->world->patience_s, missing);
}

void fo__threads_barrier(FoGroup* g) {
    FoThreads* t = g->threads;
    double left = g->world->patience_s;
    pthread_mutex_lock(&t->barrier_mutex);
    uint64_t round = t->barrier_round;
    t->barrier_here |= 1u << g->rank;
    if (t->barrier_here == (1u << g->size) - 1u) {
        t->barrier_here = 0;
        t->barrier_round++;
        pthread_cond_broadcast(&t->barrier_cond);
    }
    while (t->barrier_round == round) {
        int in_time = fo__cond_wait(&t->barrier_cond, &t->barrier_mutex, &left);
        if (!in_time && t->barrier_round == round) { die_of_absence(g, t->barrier_here); }
    }
    pthread_mutex_unlock(&t->barrier_mutex);
}

// the first of each color opens its world
void fo__threads_split(FoGroup* g, int color, FoGroup* part) {
    FoThreads* t = g->threads;
    FoGroup* parts[FO_MAX_RANKS];
    int n = 0;
    t->split[g->rank].color = color;
    t->split[g->rank].part = part;
    fo__threads_barrier(g);
    for (int r = 0; r < g->size; r++) {
        if (t->split[r].color == color) {
            part->world_ranks[n] = g->world_ranks[r];
            parts[n++] = t->split[r].part;
        }
    }
    if (parts[0] == part) { fo__local_open(parts, n); }
    fo__threads_barrier(g);
}

int fo__threads_close(FoGroup* g) {
    FoThreads* t = g->threads;
    if (atomic_fetch_sub(&t->nopen, 1) > 1) { return 0; }
    pthread_mutex_destroy(&t->barrier_mutex);
    pthread_cond_destroy(&t->barrier_cond);
    free(t);
    return 1;
}

void fo__threads_open(FoGroup* groups[], int P) {
    FoThreads* t = calloc(1, sizeof *t);
    fo_require(t != NULL, "out of memory");
    atomic_init(&t->nopen, P);
    pthread_mutex_init(&t->barrier_mutex, NULL);
    fo__cond_init(&t->barrier_cond);
    for (int r = 0; r < P; r++) {
        groups[r]->rank = r;
        groups[r]->size = groups[r]->nlocal = P;
        groups[r]->threads = t;
    }
}
