// fo_sockets.c -- see fo_sockets.h.
#include "flashoverlap/fo_sockets.h"
#include "flashoverlap/fo_rendezvous.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

// of a process; its groups point to it
typedef struct FoSocketWorld {
    FoLaunch launch;
    FoRoll roll;
    FoLobby lobby; // connections for groups that this rank has not come to, and strangers
    FoGroup* group;
    struct FoSockets* words; // connections on which only the last word of a rank goes
    pthread_t watcher;
    int stop[2]; // a pipe: closed at one end, the watcher ends
} World;

// ---- the end of another process ---------------------------------------------------------------------------
// Ends this process because that rank has, and tells the others so: else they might blame this one.
static _Noreturn void die_of_loss(const World* w, int world_rank) {
    const int32_t word = world_rank;
    for (int r = 0; w->words && r < w->launch.n; r++) {
        if (w->words->out[r] >= 0) { (void)fo__write_all(w->words->out[r], &word, sizeof word, 0.0); }
    }
    fo_quit(1,
            "[rank %d] rank %d on %s has ended, and so does this rank: what it said tells why; if it said "
            "nothing, it was killed",
            w->launch.rank, world_rank, w->roll.ranks[world_rank].host);
}

static void* watch(void* arg) {
    World* w = arg;
    struct pollfd polls[FO_MAX_RANKS + 1];
    int ranks[FO_MAX_RANKS + 1];
    int32_t word;
    nfds_t n = 0;
    polls[n++] = (struct pollfd){w->stop[0], POLLIN, 0};
    for (int r = 0; r < w->launch.n; r++) {
        if (w->words->in[r] < 0) { continue; }
        ranks[n] = r;
        polls[n++] = (struct pollfd){w->words->in[r], POLLIN, 0};
    }
    fo_die_rank(w->launch.rank);
    for (;;) {
        if (poll(polls, n, -1) <= 0) { continue; }
        if (polls[0].revents) { return NULL; }
        for (nfds_t i = 1; i < n; i++) {
            if (!polls[i].revents) { continue; }
            int said = recv(polls[i].fd, &word, sizeof word, MSG_DONTWAIT) == (ssize_t)sizeof word;
            die_of_loss(w, said && word >= 0 && word < w->launch.n ? word : ranks[i]);
        }
    }
}

static size_t moved(const FoGroup* g, int peer, ssize_t k) {
    if (k > 0) { return (size_t)k; }
    if (k < 0 && (errno == EAGAIN || errno == EINTR)) { return 0; }
    usleep(500000); // the watcher knows better which rank was the first to end
    die_of_loss(g->sockets->world, g->world_ranks[peer]);
}

size_t fo__sockets_send(const FoGroup* g, int fd, int peer, const void* p, size_t nbytes) {
    return moved(g, peer, send(fd, p, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL));
}

size_t fo__sockets_recv(const FoGroup* g, int fd, int peer, void* p, size_t nbytes) {
    return moved(g, peer, recv(fd, p, nbytes, MSG_DONTWAIT));
}

// ---- barriers ---------------------------------------------------------------------------------------------
enum { MOST_BYTES = 256 }; // that ranks tell each other at a barrier

// of one peer
typedef struct {
    size_t nsent, ngot;
    struct {
        FoFrame frame;
        char bytes[MOST_BYTES];
    } in;
} Meeting;

static _Noreturn void die_of_absence(const FoGroup* g, const Meeting* m, size_t all) {
    char missing[8 * FO_MAX_RANKS] = "";
    for (int r = 0, n = 0; r < g->size; r++) {
        if (r != g->rank && m[r].ngot < all) {
            n += snprintf(missing + n, sizeof missing - (size_t)n, " %d", g->world_ranks[r]);
        }
    }
    fo_die(__FILE__, __LINE__, "fo_group_barrier", "waited %.1f s at a barrier for rank%s",
           g->world->patience_s, missing);
}

// moves what can be moved now; fills in what to wait for, and returns how much that is
static nfds_t meet_step(FoGroup* g, Meeting* m, const void* own, size_t all, struct pollfd* polls,
                        size_t* nmoved) {
    struct FoSockets* s = g->sockets;
    nfds_t n = 0;
    for (int r = 0; r < g->size; r++) {
        if (r == g->rank) { continue; }
        if (m[r].nsent < all) {
            size_t k = fo__sockets_send(g, s->out[r], r, (const char*)own + m[r].nsent, all - m[r].nsent);
            m[r].nsent += k, *nmoved += k;
        }
        if (m[r].ngot < all) {
            size_t k = fo__sockets_recv(g, s->in[r], r, (char*)&m[r].in + m[r].ngot, all - m[r].ngot);
            m[r].ngot += k, *nmoved += k;
        }
        if (m[r].nsent < all) { polls[n++] = (struct pollfd){s->out[r], POLLOUT, 0}; }
        if (m[r].ngot < all) { polls[n++] = (struct pollfd){s->in[r], POLLIN, 0}; }
    }
    return n;
}

// all ranks of g come and tell each other nbytes: blocks of all, the own one is there before
static void meet(FoGroup* g, void* blocks, size_t nbytes) {
    Meeting m[FO_MAX_RANKS], own;
    struct pollfd polls[2 * FO_MAX_RANKS];
    const size_t all = sizeof(FoFrame) + nbytes;
    double quiet_s = 0.0, before = fo_now(), patience = g->world->patience_s;
    fo_require(nbytes <= MOST_BYTES, "%zu bytes at a barrier", nbytes);
    memset(m, 0, sizeof m);
    memset(&own, 0, sizeof own);
    own.in.frame.kind = FO_FRAME_BARRIER;
    own.in.frame.nbytes = nbytes;
    if (nbytes > 0) { memcpy(own.in.bytes, (char*)blocks + (size_t)g->rank * nbytes, nbytes); }
    for (;;) {
        size_t nmoved = 0;
        nfds_t n = meet_step(g, m, &own.in, all, polls, &nmoved);
        if (n == 0) { break; }
        double now = fo_now();
        quiet_s = nmoved > 0 ? 0.0 : quiet_s + fo__waited_s(now - before);
        before = now;
        if (quiet_s > patience) { die_of_absence(g, m, all); }
        (void)poll(polls, n, 50);
    }
    for (int r = 0; r < g->size; r++) {
        if (r == g->rank) { continue; }
        fo_require(m[r].in.frame.kind == FO_FRAME_BARRIER && m[r].in.frame.nbytes == nbytes,
                   "rank %d is at a barrier, rank %d at an exchange or at another one",
                   g->world_ranks[g->rank], g->world_ranks[r]);
        if (nbytes > 0) { memcpy((char*)blocks + (size_t)r * nbytes, m[r].in.bytes, nbytes); }
    }
}

static void sockets_barrier(FoGroup* g) {
    meet(g, NULL, 0);
}

static void sockets_bcast(FoGroup* g, void* p, size_t nbytes) {
    char blocks[FO_MAX_RANKS * MOST_BYTES];
    fo_require(nbytes <= MOST_BYTES, "%zu bytes to tell all", nbytes);
    memset(blocks, 0, (size_t)g->size * nbytes);
    memcpy(blocks + (size_t)g->rank * nbytes, p, nbytes);
    meet(g, blocks, nbytes);
    memcpy(p, blocks, nbytes);
}

// ---- groups -----------------------------------------------------------------------------------------------
static int rank_in(const FoGroup* g, int world_rank) {
    for (int r = 0; r < g->size; r++) {
        if (g->world_ranks[r] == world_rank) { return r; }
    }
    return -1;
}

// takes the connections of group g that others have opened so far; returns how many are still to come
static int take_links(const FoGroup* g, struct FoSockets* s) {
    World* w = s->world;
    int missing = 0;
    for (int i = w->lobby.n - 1; i >= 0; i--) {
        FoGuest* guest = &w->lobby.guests[i];
        const FoHello* hello = &guest->hello;
        if (!fo__guest_ready(guest)) { continue; }
        const int r = hello->group == s->id ? rank_in(g, hello->rank) : -1;
        const int known = hello->kind == FO_HELLO_LINK && hello->key == w->roll.key;
        if (known && hello->group != s->id) { continue; } // its rank is ahead, or of another group
        if (known && r >= 0 && s->in[r] < 0 && hello->to == w->launch.rank) {
            s->in[r] = guest->fd;
        } else {
            close(guest->fd);
        }
        fo__lobby_remove(&w->lobby, guest);
    }
    for (int r = 0; r < g->size; r++) {
        missing += r != g->rank && s->in[r] < 0;
    }
    return missing;
}

static int link_to(const World* w, int world_rank, uint64_t id, double until) {
    const FoAddress* at = &w->roll.ranks[world_rank].at;
    FoHello hello;
    int fd = fo__connect(at, until);
    if (fd < 0) {
        fo_quit(1, "rank %d can't connect to rank %d on %s, port %d: %s; does a firewall close it?",
                w->launch.rank, world_rank, w->roll.ranks[world_rank].host, at->port, strerror(errno));
    }
    fo__hello_init(&hello, FO_HELLO_LINK, &w->launch);
    hello.to = world_rank;
    hello.key = w->roll.key;
    hello.group = id;
    if (fo__write_all(fd, &hello, offsetof(FoHello, host), until) != 1) { die_of_loss(w, world_rank); }
    return fd;
}

// connections among all ranks of g, whose rank, size and world_ranks are known; collective
static struct FoSockets* link_all(const FoGroup* g, World* w, uint64_t id, double patience) {
    struct FoSockets* s = calloc(1, sizeof *s);
    double until = fo_now() + patience;
    fo_require(s != NULL, "out of memory");
    s->id = id;
    s->world = w;
    s->out[g->rank] = s->in[g->rank] = -1;
    for (int i = 1; i < g->size; i++) { // not all at the same one
        const int r = (g->rank + i) % g->size;
        s->in[r] = -1;
        s->out[r] = link_to(w, g->world_ranks[r], id, until);
    }
    while (take_links(g, s) > 0) {
        fo__lobby_look(&w->lobby, 50, NULL, NULL);
        if (fo_now() < until) { continue; }
        for (int r = 0; r < g->size; r++) {
            const int world_rank = g->world_ranks[r];
            if (r == g->rank || s->in[r] >= 0) { continue; }
            fo_quit(1, "rank %d waited %.0f s for rank %d on %s to connect to port %d here", w->launch.rank,
                    patience, world_rank, w->roll.ranks[world_rank].host,
                    w->roll.ranks[w->launch.rank].at.port);
        }
    }
    return s;
}

static void unlink_all(const FoGroup* g, struct FoSockets* s) {
    for (int r = 0; r < g->size; r++) {
        if (r == g->rank) { continue; }
        close(s->out[r]);
        close(s->in[r]);
    }
    free(s);
}

static int count_local(const FoGroup* g, const World* w) {
    int n = 0;
    for (int r = 0; r < g->size; r++) {
        n += w->roll.ranks[g->world_ranks[r]].machine == w->roll.ranks[w->launch.rank].machine;
    }
    return n;
}

static void sockets_split(FoGroup* g, int color, FoGroup* part) {
    struct FoSockets* s = g->sockets;
    int colors[FO_MAX_RANKS];
    colors[g->rank] = color;
    meet(g, colors, sizeof *colors);
    part->size = 0;
    for (int r = 0; r < g->size; r++) {
        if (colors[r] != color) { continue; }
        if (r == g->rank) { part->rank = part->size; }
        part->world_ranks[part->size++] = g->world_ranks[r];
    }
    const uint64_t split[2] = {s->nsplits++, (uint64_t)color};
    part->hosts = g->hosts;
    part->nlocal = count_local(part, s->world);
    part->sockets = link_all(part, s->world, fo__hash(s->id, split, sizeof split), g->world->patience_s);
}

static void sockets_close(FoGroup* g) {
    struct FoSockets* s = g->sockets;
    World* w = s->world;
    if (g->world == g) { // from here on the end of another is no surprise
        close(w->stop[1]);
        pthread_join(w->watcher, NULL);
        close(w->stop[0]);
    }
    meet(g, NULL, 0);
    if (g->world == g) {
        unlink_all(g, w->words);
        close(w->lobby.listener);
        for (int i = 0; i < w->lobby.n; i++) {
            close(w->lobby.guests[i].fd);
        }
        free(w);
    }
    unlink_all(g, s);
}

// the others see that this process has ended
static void sockets_abort(int status) {
    (void)status;
}

static const FoHosts SOCKETS = {sockets_barrier, sockets_split, sockets_bcast, sockets_close, sockets_abort};

// which of the ranks on its machine this is; for the choice of a GPU, which knows no group
static void tell_local_rank(const World* w) {
    char text[16];
    int local = 0;
    for (int r = 0; r < w->launch.rank; r++) {
        local += w->roll.ranks[r].machine == w->roll.ranks[w->launch.rank].machine;
    }
    if (w->launch.per_node) { local = w->launch.rank % w->launch.per_node; }
    (void)snprintf(text, sizeof text, "%d", local);
    setenv("FO_LOCAL_RANK", text, 1);
}

void fo__sockets_open(FoGroup* g, const FoLaunch* l) {
    World* w = calloc(1, sizeof *w);
    fo_require(w != NULL, "out of memory");
    w->launch = *l;
    w->group = g;
    g->hosts = &SOCKETS;
    g->rank = l->rank;
    g->size = l->n;
    fo__rendezvous(l, &w->roll, &w->lobby.listener);
    tell_local_rank(w);
    g->nlocal = count_local(g, w);
    g->sockets = link_all(g, w, w->roll.key, l->timeout_s);
    w->words = link_all(g, w, fo__hash(w->roll.key, "words", 5), l->timeout_s);
    fo_require(pipe(w->stop) == 0, "no pipe for the watcher: %s", strerror(errno));
    meet(g, NULL, 0);
    int err = pthread_create(&w->watcher, NULL, watch, w);
    fo_require(err == 0, "no thread for the watcher: %s", strerror(err));
}
