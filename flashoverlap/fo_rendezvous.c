// fo_rendezvous.c -- see fo_rendezvous.h.
#include "flashoverlap/fo_rendezvous.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

// seconds for a stranger to say what it wants, for an address to answer, and between two tries
static const double GUEST_S = 5.0, ANSWER_S = 2.0;
enum { RETRY_US = 50000, MOST_ADDRESSES = 8 };
static const char HELLO[8] = "fohello", GREETING[8] = "fogreet", REPLY[8] = "foreply";
enum { REPLY_ROLL = 1, REPLY_REFUSED = 2 };

typedef struct {
    char magic[8];
    uint64_t nonce;
} Greeting;

typedef struct {
    char magic[8];
    uint32_t kind, nbytes; // of what follows: a FoRoll or a line of text
} Reply;

// where rank 0 may be
typedef struct {
    FoAddress at[MOST_ADDRESSES + 1];
    int n;
    int has_nonce; // fs: only who greets with it is meant
    uint64_t nonce;
} Candidates;

// ---- sockets ----------------------------------------------------------------------------------------------
static int wait_for(int fd, short events, double until) {
    struct pollfd p = {fd, events, 0};
    double left = until - fo_now();
    if (left <= 0.0) { return 0; }
    return poll(&p, 1, left < 0.1 ? (int)(1e3 * left) + 1 : 100) > 0;
}

int fo__read_all(int fd, void* p, size_t nbytes, double until) {
    char* at = p;
    while (nbytes > 0) {
        ssize_t k = recv(fd, at, nbytes, MSG_DONTWAIT);
        if (k == 0 || (k < 0 && errno != EAGAIN && errno != EINTR)) { return 0; }
        if (k > 0) {
            at += k;
            nbytes -= (size_t)k;
        } else if (!wait_for(fd, POLLIN, until) && fo_now() >= until) {
            return -1;
        }
    }
    return 1;
}

int fo__write_all(int fd, const void* p, size_t nbytes, double until) {
    const char* at = p;
    while (nbytes > 0) {
        ssize_t k = send(fd, at, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (k < 0 && errno != EAGAIN && errno != EINTR) { return 0; }
        if (k > 0) {
            at += k;
            nbytes -= (size_t)k;
        } else if (!wait_for(fd, POLLOUT, until) && fo_now() >= until) {
            return -1;
        }
    }
    return 1;
}

static int is_ipv4(const FoAddress* a) {
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return memcmp(a->ip, mapped, sizeof mapped) == 0;
}

static int is_loopback(const FoAddress* a) {
    static const uint8_t one[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    return is_ipv4(a) ? a->ip[12] == 127 : memcmp(a->ip, one, sizeof one) == 0;
}

// 0: it is neither IPv4 nor IPv6
static int address_of(FoAddress* a, const struct sockaddr* from) {
    memset(a, 0, sizeof *a);
    if (from->sa_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, from, sizeof in);
        a->ip[10] = a->ip[11] = 0xff;
        memcpy(a->ip + 12, &in.sin_addr, 4);
        a->port = ntohs(in.sin_port);
    } else if (from->sa_family == AF_INET6) {
        struct sockaddr_in6 in6;
        memcpy(&in6, from, sizeof in6);
        memcpy(a->ip, &in6.sin6_addr, 16);
        a->port = ntohs(in6.sin6_port);
    } else {
        return 0;
    }
    return 1;
}

static socklen_t sockaddr_of(struct sockaddr_storage* to, const FoAddress* a) {
    memset(to, 0, sizeof *to);
    if (is_ipv4(a)) {
        struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(a->port)};
        memcpy(&in.sin_addr, a->ip + 12, 4);
        memcpy(to, &in, sizeof in);
        return sizeof in;
    }
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(a->port)};
    memcpy(&in6.sin6_addr, a->ip, 16);
    memcpy(to, &in6, sizeof in6);
    return sizeof in6;
}

static void quick(int fd) {
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// a port where a connection is or was may be listened at
static void allow_again(int fd) {
    int on = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

static int is_own(int fd) {
    struct sockaddr_storage here, there;
    socklen_t k = sizeof here, l = sizeof there;
    memset(&here, 0, sizeof here);
    memset(&there, 0, sizeof there);
    return getsockname(fd, (struct sockaddr*)&here, &k) == 0 &&
           getpeername(fd, (struct sockaddr*)&there, &l) == 0 && memcmp(&here, &there, sizeof here) == 0;
}

int fo__connect(const FoAddress* to, double until) {
    struct sockaddr_storage at;
    socklen_t nbytes = sockaddr_of(&at, to), k = sizeof(int);
    int fd = socket(at.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), err = 0;
    if (fd < 0) { return -1; }
    quick(fd);
    allow_again(fd);
    err = connect(fd, (struct sockaddr*)&at, nbytes) == 0 ? 0 : errno;
    if (err == EINPROGRESS) {
        int here = 0;
        while (!here && fo_now() < until) {
            here = wait_for(fd, POLLOUT, until);
        }
        err = ETIMEDOUT;
        if (here && getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &k) < 0) { err = errno; }
    }
    // where nobody listens yet a connection can be given the same port at both ends, and reach itself
    if (err == 0 && is_own(fd)) { err = ECONNREFUSED; }
    if (err == 0) { return fd; }
    close(fd);
    errno = err;
    return -1;
}

// at *port of all addresses of this machine, or, 0, at any, which *port then is; -1 with errno
static int listen_at(int* port) {
    const int families[] = {AF_INET6, AF_INET};
    int fd = -1, off = 0;
    for (int i = 0; i < 2; i++) {
        FoAddress any = {.port = (uint16_t)*port};
        struct sockaddr_storage at;
        if (families[i] == AF_INET) { any.ip[10] = any.ip[11] = 0xff; }
        socklen_t nbytes = sockaddr_of(&at, &any), k = sizeof at;
        fd = socket(families[i], SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0) { continue; } // no IPv6 here
        allow_again(fd);
        if (families[i] == AF_INET6) { (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); }
        if (bind(fd, (struct sockaddr*)&at, nbytes) == 0 && listen(fd, 128) == 0 &&
            getsockname(fd, (struct sockaddr*)&at, &k) == 0 && address_of(&any, (struct sockaddr*)&at)) {
            *port = any.port;
            return fd;
        }
        int err = errno;
        close(fd);
        errno = err;
        if (err == EADDRINUSE || err == EACCES) { return -1; }
    }
    return -1;
}

uint64_t fo__hash(uint64_t seed, const void* p, size_t nbytes) {
    const unsigned char* at = p;
    uint64_t h = seed ^ 0xcbf29ce484222325u;
    for (size_t i = 0; i < nbytes; i++) {
        h = (h ^ at[i]) * 0x100000001b3u;
    }
    h ^= h >> 32;
    return h * 0x9e3779b97f4a7c15u;
}

static uint64_t draw(void) {
    uint64_t x = 0;
    if (getrandom(&x, sizeof x, 0) == (ssize_t)sizeof x) { return x; }
    double now = fo_now();
    return fo__hash((uint64_t)getpid(), &now, sizeof now);
}

// The kernel that runs, the machine's name and its network: containers of one machine count as several.
static uint64_t machine_number(void) {
    char text[256] = "";
    struct stat net;
    uint64_t h = 0;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t k = fd >= 0 ? read(fd, text, sizeof text) : 0;
    if (fd >= 0) { close(fd); }
    h = fo__hash(h, text, k > 0 ? (size_t)k : 0);
    memset(text, 0, sizeof text);
    (void)gethostname(text, sizeof text - 1);
    h = fo__hash(h, text, strlen(text));
    return stat("/proc/self/ns/net", &net) == 0 ? fo__hash(h, &net.st_ino, sizeof net.st_ino) : h;
}

// ---- guests -----------------------------------------------------------------------------------------------
// programs that differ in this compute or say other things
static uint32_t build_number(void) {
    char text[96];
    (void)snprintf(text, sizeof text, "1 %d %d %d %zu", (int)FO_FLOATX, fo_device_emulates(),
                   fo_device_graphs(), sizeof(FoHello) + sizeof(FoRoll));
    return (uint32_t)fo__hash(0, text, strlen(text));
}

void fo__hello_init(FoHello* h, int kind, const FoLaunch* l) {
    memset(h, 0, sizeof *h);
    memcpy(h->magic, HELLO, sizeof HELLO);
    h->kind = (uint32_t)kind;
    h->n = l->n;
    h->rank = l->rank;
    h->build = build_number();
    h->machine = machine_number();
    (void)gethostname(h->host, sizeof h->host - 1);
    memcpy(h->options, l->options, sizeof h->options);
}

static size_t hello_nbytes(const FoGuest* guest) {
    if (guest->nread < offsetof(FoHello, n)) { return offsetof(FoHello, n); } // magic and kind
    return guest->hello.kind == FO_HELLO_LINK ? offsetof(FoHello, host) : sizeof(FoHello);
}

int fo__guest_ready(const FoGuest* guest) {
    return guest->nread >= offsetof(FoHello, n) && guest->nread == hello_nbytes(guest);
}

void fo__lobby_remove(FoLobby* y, FoGuest* guest) {
    *guest = y->guests[--y->n];
}

static void guest_in(FoLobby* y, void (*greet)(int fd, void* arg), void* arg) {
    int fd = accept4(y->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) { return; }
    if (y->n == FO_GUESTS) { // the one that has been silent for longest
        int oldest = 0;
        for (int i = 1; i < y->n; i++) {
            const int ready = fo__guest_ready(&y->guests[i]), other = fo__guest_ready(&y->guests[oldest]);
            const int older = y->guests[i].since < y->guests[oldest].since;
            oldest = ready < other || (ready == other && older) ? i : oldest;
        }
        close(y->guests[oldest].fd);
        fo__lobby_remove(y, &y->guests[oldest]);
    }
    quick(fd);
    FoGuest* guest = &y->guests[y->n++];
    memset(guest, 0, sizeof *guest);
    guest->fd = fd;
    guest->since = fo_now();
    if (greet) { greet(fd, arg); }
}

// what others sent is text for a terminal
static void make_plain(char* text, size_t nbytes) {
    text[nbytes - 1] = 0;
    for (; *text; text++) {
        if ((*text < ' ' && *text != '\n') || *text > '~') { *text = '?'; }
    }
}

// 0: send it away
static int guest_read(FoGuest* guest) {
    while (!fo__guest_ready(guest)) {
        ssize_t k = recv(guest->fd, (char*)&guest->hello + guest->nread, hello_nbytes(guest) - guest->nread,
                         MSG_DONTWAIT);
        if (k < 0 && (errno == EAGAIN || errno == EINTR)) { return fo_now() - guest->since < GUEST_S; }
        if (k <= 0) { return 0; }
        guest->nread += (size_t)k;
        if (guest->nread >= offsetof(FoHello, n) &&
            (memcmp(guest->hello.magic, HELLO, sizeof HELLO) != 0 ||
             (guest->hello.kind != FO_HELLO_JOIN && guest->hello.kind != FO_HELLO_LINK))) {
            return 0;
        }
    }
    make_plain(guest->hello.host, sizeof guest->hello.host);
    make_plain(guest->hello.options, sizeof guest->hello.options);
    return 1;
}

void fo__lobby_look(FoLobby* y, int ms, void (*greet)(int fd, void* arg), void* arg) {
    struct pollfd polls[FO_GUESTS + 1];
    nfds_t n = 0;
    polls[n++] = (struct pollfd){y->listener, POLLIN, 0};
    for (int i = 0; i < y->n; i++) {
        if (!fo__guest_ready(&y->guests[i])) { polls[n++] = (struct pollfd){y->guests[i].fd, POLLIN, 0}; }
    }
    if (poll(polls, n, ms) > 0 && (polls[0].revents & POLLIN)) { guest_in(y, greet, arg); }
    for (int i = y->n - 1; i >= 0; i--) {
        if (!fo__guest_ready(&y->guests[i]) && !guest_read(&y->guests[i])) {
            close(y->guests[i].fd);
            fo__lobby_remove(y, &y->guests[i]);
        }
    }
}

// ---- the file of fs ---------------------------------------------------------------------------------------
static void file_path(char path[320], const FoLaunch* l) {
    (void)snprintf(path, 320, "%s/rank0.address", l->folder);
}

// addresses at which other machines may reach this one
static int own_addresses(FoAddress at[MOST_ADDRESSES]) {
    struct ifaddrs *all, *i;
    int n = 0;
    if (getifaddrs(&all) != 0) { return 0; }
    for (i = all; i && n < MOST_ADDRESSES; i = i->ifa_next) {
        if (i->ifa_addr && (i->ifa_flags & IFF_UP) && address_of(&at[n], i->ifa_addr) &&
            !is_loopback(&at[n]) &&
            (is_ipv4(&at[n]) || at[n].ip[0] != 0xfe)) { // one of a link alone would need its name
            n++;
        }
    }
    freeifaddrs(all);
    return n;
}

// all of it or nothing: under another name first. Returns 0 or errno
static int file_write(const FoLaunch* l, const char* path, uint64_t nonce, int port) {
    char text[1024], temporary[384], ip[INET6_ADDRSTRLEN];
    FoAddress at[MOST_ADDRESSES];
    int n = own_addresses(at), k;
    k = snprintf(text, sizeof text, "fo1 %016llx %016llx %d\n", (unsigned long long)nonce,
                 (unsigned long long)machine_number(), port);
    for (int i = 0; i < n; i++) {
        inet_ntop(AF_INET6, at[i].ip, ip, sizeof ip);
        k += snprintf(text + k, sizeof text - (size_t)k, "%s\n", ip);
    }
    (void)snprintf(temporary, sizeof temporary, "%s/.rank0.%016llx", l->folder, (unsigned long long)nonce);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644), err = 0;
    if (fd < 0) { return errno; }
    if (write(fd, text, (size_t)k) != k || fsync(fd) != 0) { err = errno ? errno : EIO; }
    if (close(fd) != 0 && !err) { err = errno; }
    if (!err && rename(temporary, path) != 0) { err = errno; }
    if (err) { unlink(temporary); }
    return err;
}

// 0: there is no such file, or it is none of ours
static int file_read(const char* path, const char* folder, Candidates* c) {
    char text[1024], *line, *rest = NULL;
    unsigned long long nonce, machine;
    int port, taken = 0;
    int dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC); // NFS looks anew at what is in it
    if (dir >= 0) { close(dir); }
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) { return 0; }
    ssize_t k = read(fd, text, sizeof text - 1);
    close(fd);
    if (k <= 0) { return 0; }
    text[k] = 0;
    if (sscanf(text, "fo1 %16llx %16llx %5d\n%n", &nonce, &machine, &port, &taken) != 3 || !taken ||
        port < 1 || port > 65535) {
        return 0;
    }
    memset(c, 0, sizeof *c);
    c->has_nonce = 1;
    c->nonce = nonce;
    if (machine == machine_number()) {
        c->at[0].ip[10] = c->at[0].ip[11] = 0xff;
        c->at[0].ip[12] = 127, c->at[0].ip[15] = 1;
        c->n = 1;
    }
    for (line = strtok_r(text + taken, "\n", &rest); line && c->n <= MOST_ADDRESSES;
         line = strtok_r(NULL, "\n", &rest)) {
        if (inet_pton(AF_INET6, line, c->at[c->n].ip) == 1) { c->n++; }
    }
    for (int i = 0; i < c->n; i++) {
        c->at[i].port = (uint16_t)port;
    }
    return 1;
}

// ---- rank 0 -----------------------------------------------------------------------------------------------
typedef struct {
    const FoLaunch* l;
    FoLobby lobby;
    FoRoll* roll;
    uint64_t nonce;
    int here[FO_MAX_RANKS]; // sockets; -1: it has not come
    char path[320];         // fs
} Host;

static void greet(int fd, void* arg) {
    Greeting g = {"fogreet", ((Host*)arg)->nonce};
    (void)send(fd, &g, sizeof g, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void refuse(int fd, const char* text) {
    Reply r = {"foreply", REPLY_REFUSED, (uint32_t)strlen(text)};
    if (fo__write_all(fd, &r, sizeof r, fo_now() + 1.0) == 1) {
        (void)fo__write_all(fd, text, strlen(text), fo_now() + 1.0);
    }
    shutdown(fd, SHUT_WR);
}

// ends all that have come, and who is `late`, with the same line
static _Noreturn void give_up(Host* h, int late, const char* fmt, ...) __attribute__((format(printf, 3, 4)));
static _Noreturn void give_up(Host* h, int late, const char* fmt, ...) {
    char text[FO_LAUNCH_ERR];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (h->path[0]) { unlink(h->path); }
    if (late >= 0) { refuse(late, text); }
    for (int r = 1; r < h->l->n; r++) {
        if (h->here[r] >= 0) { refuse(h->here[r], text); }
    }
    fo_quit(1, "%s", text);
}

// the line of text that begins with those nbytes, or NULL
static const char* line_of(const char* text, const char* begin, size_t nbytes) {
    while (*text) {
        if (strncmp(text, begin, nbytes) == 0) { return text; }
        text += strcspn(text, "\n");
        text += *text == '\n';
    }
    return NULL;
}

// The first line of a that b has not, and what b says of the same option. 0: there is none
static int find_difference(const char* a, const char* b, char line_a[80], char line_b[80]) {
    for (; *a; a += strcspn(a, "\n"), a += *a == '\n') {
        const size_t k = strcspn(a, "\n"), name = strcspn(a, " \n");
        if (line_of(b, a, k + (a[k] == '\n'))) { continue; }
        const char* other = line_of(b, a, name + (name < k));
        (void)snprintf(line_a, 80, "%.*s", (int)k, a);
        (void)snprintf(line_b, 80, "%.*s", other ? (int)strcspn(other, "\n") : 7, other ? other : "nothing");
        return 1;
    }
    return 0;
}

// one who speaks our language: is it of this run?
static void take_in(Host* h, FoGuest* guest) {
    const FoHello* hello = &guest->hello;
    const FoLaunch* l = h->l;
    struct sockaddr_storage from;
    socklen_t nbytes = sizeof from;
    FoAddress at;
    char theirs[80], ours[80];
    const int fd = guest->fd, r = hello->rank;
    if (hello->kind != FO_HELLO_JOIN || hello->key != h->nonce ||
        getpeername(fd, (struct sockaddr*)&from, &nbytes) != 0 || !address_of(&at, (struct sockaddr*)&from)) {
        close(fd);
        return;
    }
    if (hello->n != l->n) {
        give_up(h, fd, "rank %d on %s was started as one of %d processes, rank 0 as one of %d", r,
                hello->host, hello->n, l->n);
    }
    if (r < 1 || r >= l->n) {
        give_up(h, fd, "a process on %s was started as rank %d; want 1 to %d beside rank 0", hello->host, r,
                l->n - 1);
    }
    if (hello->build != build_number()) {
        give_up(h, fd,
                "rank %d on %s is another program than rank 0: want the same version, PRECISION and "
                "DEVICE on all machines",
                r, hello->host);
    }
    if (h->here[r] >= 0) {
        give_up(h, fd,
                "two processes were started as rank %d, on %s and on %s: each has a number of its own, 0 to "
                "%d",
                r, h->roll->ranks[r].host, hello->host, l->n - 1);
    }
    if (strncmp(hello->options, l->options, sizeof hello->options) != 0) {
        if (!find_difference(hello->options, l->options, theirs, ours)) {
            (void)find_difference(l->options, hello->options, ours, theirs);
        }
        give_up(h, fd, "rank %d on %s was started with other options than rank 0: there %s, here %s", r,
                hello->host, theirs, ours);
    }
    at.port = (uint16_t)hello->port;
    at.local = (uint16_t)is_loopback(&at);
    h->roll->ranks[r].at = at;
    h->roll->ranks[r].machine = hello->machine;
    memcpy(h->roll->ranks[r].host, hello->host, sizeof hello->host);
    h->here[r] = fd;
}

static int count_here(const Host* h, char missing[128]) {
    int n = 1;
    size_t k = 0;
    missing[0] = 0;
    for (int r = 1; r < h->l->n; r++) {
        n += h->here[r] >= 0;
        if (h->here[r] < 0 && k < 120) {
            k += (size_t)snprintf(missing + k, 128 - k, "%s%d", k ? ", " : "", r);
        }
    }
    return n;
}

// one that has come may have ended since: then the others need not wait
static void look_after(Host* h) {
    for (int r = 1; r < h->l->n; r++) {
        char byte;
        if (h->here[r] >= 0 && recv(h->here[r], &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
            close(h->here[r]);
            h->here[r] = -1;
            give_up(h, -1, "rank %d on %s has ended before all had come", r, h->roll->ranks[r].host);
        }
    }
}

static void publish(Host* h, int port) {
    const FoLaunch* l = h->l;
    Candidates before;
    file_path(h->path, l);
    // a file may be left of a killed run, whose rank 0 does not answer any more
    for (int i = 0; file_read(h->path, l->folder, &before) && i < before.n; i++) {
        Greeting g;
        int fd = fo__connect(&before.at[i], fo_now() + 0.5);
        int answers = fd >= 0 && fo__read_all(fd, &g, sizeof g, fo_now() + 0.5) == 1 &&
                      memcmp(g.magic, GREETING, sizeof GREETING) == 0 && g.nonce == before.nonce;
        if (fd >= 0) { close(fd); }
        if (answers) {
            h->path[0] = 0;
            give_up(h, -1,
                    "-pf %.200s: another rank 0 is waiting there for its processes: one run at a time in a "
                    "folder, and one rank 0",
                    l->folder);
        }
    }
    int err = file_write(l, h->path, h->nonce, port);
    if (err) {
        char path[320];
        memcpy(path, h->path, sizeof path);
        h->path[0] = 0;
        give_up(h, -1, "-pf: %.300s: %s", path, strerror(err));
    }
}

static void check_machines(Host* h) {
    const FoLaunch* l = h->l;
    for (int r = 0; r < l->n && l->per_node; r++) {
        int n = 0;
        for (int p = 0; p < l->n; p++) {
            n += h->roll->ranks[p].machine == h->roll->ranks[r].machine;
        }
        if (n > l->per_node) {
            give_up(h, -1, "-pg %d: %d processes are on %s; want -pg %d, or other machines", l->per_node, n,
                    h->roll->ranks[r].host, n);
        }
    }
}

static void tell_all(Host* h) {
    Reply reply = {"foreply", REPLY_ROLL, sizeof *h->roll};
    for (int r = 1; r < h->l->n; r++) {
        if (fo__write_all(h->here[r], &reply, sizeof reply, fo_now() + ANSWER_S) != 1 ||
            fo__write_all(h->here[r], h->roll, sizeof *h->roll, fo_now() + ANSWER_S) != 1) {
            int fd = h->here[r];
            h->here[r] = -1;
            close(fd);
            give_up(h, -1, "rank %d on %s has ended before all had come", r, h->roll->ranks[r].host);
        }
    }
    for (int r = 1; r < h->l->n; r++) {
        close(h->here[r]);
    }
}

static void gather(const FoLaunch* l, FoRoll* roll, int* listener) {
    static const double LOOK_S = 0.1;
    Host* h = calloc(1, sizeof *h);
    int port = l->init == FO_INIT_TCP ? l->port : 0;
    char missing[128], where[400];
    double until = fo_now() + l->timeout_s, looked = fo_now();
    fo_require(h != NULL, "out of memory");
    h->l = l, h->roll = roll, h->nonce = draw();
    for (int r = 0; r < FO_MAX_RANKS; r++) {
        h->here[r] = -1;
    }
    h->lobby.listener = listen_at(&port);
    while (h->lobby.listener < 0 && fo_now() < until &&
           fo_now() < looked + ANSWER_S) { // a run before may just end
        usleep(RETRY_US);
        h->lobby.listener = listen_at(&port);
    }
    if (h->lobby.listener < 0) {
        give_up(h, -1,
                "rank 0 can't listen at port %d: %s; another program or another rank 0 may do so, another "
                "port is --port PORT, on all ranks",
                port, strerror(errno));
    }
    roll->key = draw();
    roll->ranks[0].at.port = (uint16_t)port, roll->ranks[0].at.local = 1;
    roll->ranks[0].machine = machine_number();
    (void)gethostname(roll->ranks[0].host, sizeof roll->ranks[0].host - 1);
    if (l->init == FO_INIT_FS) { publish(h, port); }
    (void)snprintf(where, sizeof where, "%s%s%sport %d of %s", h->path, h->path[0] ? " says " : "",
                   h->path[0] ? "" : "at ", port, roll->ranks[0].host);
    while (count_here(h, missing) < l->n) {
        fo__lobby_look(&h->lobby, 50, greet, h);
        for (int i = h->lobby.n - 1; i >= 0; i--) {
            if (fo__guest_ready(&h->lobby.guests[i])) {
                FoGuest guest = h->lobby.guests[i];
                fo__lobby_remove(&h->lobby, &h->lobby.guests[i]);
                take_in(h, &guest);
            }
        }
        double now = fo_now();
        if (now - looked > LOOK_S) {
            look_after(h);
            looked = now;
        }
        if (now > until && count_here(h, missing) < l->n) {
            give_up(h, -1, "rank 0 waited %.0f s for rank%s %s of %d (%s)", l->timeout_s,
                    strchr(missing, ',') ? "s" : "", missing, l->n, where);
        }
    }
    check_machines(h);
    if (h->path[0]) { unlink(h->path); }
    tell_all(h);
    for (int i = 0; i < h->lobby.n; i++) {
        close(h->lobby.guests[i].fd);
    }
    *listener = h->lobby.listener;
    free(h);
}

// ---- the others -------------------------------------------------------------------------------------------
// why rank 0 was not reached, the last time
typedef struct {
    char where[384], why[160];
} Trouble;

static int resolve(const FoLaunch* l, Candidates* c, Trouble* t) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *all, *i;
    memset(c, 0, sizeof *c);
    (void)snprintf(t->where, sizeof t->where, "at %s port %d", l->server, l->port);
    int err = getaddrinfo(l->server, NULL, &want, &all);
    if (err) {
        (void)snprintf(t->why, sizeof t->why, "%s", gai_strerror(err));
        return 0;
    }
    for (i = all; i && c->n < MOST_ADDRESSES; i = i->ai_next) {
        if (address_of(&c->at[c->n], i->ai_addr)) { c->at[c->n++].port = (uint16_t)l->port; }
    }
    freeaddrinfo(all);
    return 1;
}

static int candidates(const FoLaunch* l, Candidates* c, Trouble* t) {
    char path[320];
    if (l->init == FO_INIT_TCP) { return resolve(l, c, t); }
    file_path(path, l);
    if (!file_read(path, l->folder, c)) {
        (void)snprintf(t->where, sizeof t->where, "by %s", path);
        (void)snprintf(t->why, sizeof t->why, "rank 0 has not written it");
        return 0;
    }
    (void)snprintf(t->where, sizeof t->where, "by %s, port %d", path, c->n ? c->at[0].port : 0);
    return 1;
}

// a connection to rank 0, which has greeted; or -1
static int knock(const Candidates* c, int i, uint64_t* nonce, double until, Trouble* t) {
    double soon = fo_now() + ANSWER_S;
    Greeting g;
    if (soon > until) { soon = until; }
    int fd = fo__connect(&c->at[i], soon);
    if (fd < 0) {
        const int in_time = fo_now() < until || !t->why[0]; // else what was found out before says more
        if (in_time) { (void)snprintf(t->why, sizeof t->why, "%s", strerror(errno)); }
        return -1;
    }
    if (fo__read_all(fd, &g, sizeof g, soon) != 1 || memcmp(g.magic, GREETING, sizeof GREETING) != 0) {
        (void)snprintf(t->why, sizeof t->why, "another program answers there, or nothing does");
    } else if (c->has_nonce && g.nonce != c->nonce) {
        (void)snprintf(t->why, sizeof t->why, "the file is of an earlier run");
    } else {
        *nonce = g.nonce;
        return fd;
    }
    close(fd);
    return -1;
}

// rank 0's answer, which comes when all are there. It has the same deadline: its own line comes first
static void receive_roll(const FoLaunch* l, int fd, FoRoll* roll, double until, const Trouble* t) {
    Reply reply;
    char text[FO_LAUNCH_ERR];
    int got = fo__read_all(fd, &reply, sizeof reply, until + 2.0 * ANSWER_S);
    if (got == 1 && memcmp(reply.magic, REPLY, sizeof REPLY) == 0) {
        if (reply.kind == REPLY_ROLL && reply.nbytes == sizeof *roll) {
            got = fo__read_all(fd, roll, sizeof *roll, fo_now() + 2.0 * ANSWER_S);
            if (got == 1) { return; }
        } else if (reply.kind == REPLY_REFUSED && reply.nbytes < sizeof text) {
            memset(text, 0, sizeof text);
            got = fo__read_all(fd, text, reply.nbytes, fo_now() + ANSWER_S);
            make_plain(text, sizeof text);
            if (got == 1) { fo_quit(1, "rank %d ends, for rank 0 says: %s", l->rank, text); }
        }
    }
    if (got < 0) {
        fo_quit(1, "rank %d waited %.0f s for rank 0 %s to say that all have come", l->rank, l->timeout_s,
                t->where);
    }
    fo_quit(1, "rank %d has lost rank 0 %s before all had come: rank 0 has ended", l->rank, t->where);
}

static void join(const FoLaunch* l, FoRoll* roll, int* listener) {
    Trouble t = {"", ""};
    Candidates c;
    double until = fo_now() + l->timeout_s;
    FoHello hello;
    int port = 0, fd = -1, i = 0;
    *listener = listen_at(&port);
    if (*listener < 0) { fo_quit(1, "rank %d can't listen at any port: %s", l->rank, strerror(errno)); }
    fo__hello_init(&hello, FO_HELLO_JOIN, l);
    hello.port = (uint32_t)port;
    while (fd < 0) {
        int known = candidates(l, &c, &t);
        for (i = 0; known && i < c.n && fd < 0; i++) {
            fd = knock(&c, i, &hello.key, until, &t);
        }
        if (fd < 0 && fo_now() > until) {
            fo_quit(1, "rank %d waited %.0f s for rank 0 %s: %s", l->rank, l->timeout_s, t.where, t.why);
        }
        if (fd < 0) { usleep(RETRY_US); }
    }
    (void)fo__write_all(fd, &hello, sizeof hello, until); // if it fails, so does what follows
    receive_roll(l, fd, roll, until, &t);
    close(fd);
    for (int r = 0; r < l->n; r++) {
        FoAddress* at = &roll->ranks[r].at;
        if (at->local) { memcpy(at->ip, c.at[i - 1].ip, sizeof at->ip); }
        make_plain(roll->ranks[r].host, sizeof roll->ranks[r].host);
    }
}

void fo__rendezvous(const FoLaunch* l, FoRoll* roll, int* listener) {
    struct stat folder;
    memset(roll, 0, sizeof *roll);
    if (l->init == FO_INIT_FS && (stat(l->folder, &folder) != 0 || !S_ISDIR(folder.st_mode))) {
        fo_quit(1, "-pf %s: rank %d finds no such folder", l->folder, l->rank);
    }
    if (l->rank == 0) {
        gather(l, roll, listener);
    } else {
        join(l, roll, listener);
    }
}
