/* check.h -- the whole test framework. One CHECK a claim, not one an element.
 *
 * A failure prints its place and goes on; check_report() prints the closing line and gives main's exit
 * status. Rank threads may check at the same time. C11 that is also C++, so that test_gpt.cu can use it.
 */
#ifndef CHECK_H
#define CHECK_H
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int check_passed, check_failed; // counted by all rank threads: atomic adds only
static __thread char check_where[128]; // what this thread is testing, printed with a failure

#define CHECK(cond)                        check_(!!(cond), __FILE__, __LINE__, #cond)
#define CHECK_BITS(got, want, nbytes)      check_bits_(got, want, nbytes, __FILE__, __LINE__, #got)
#define CHECK_CLOSE(got, want, nelem, tol) check_close_(got, want, nelem, tol, __FILE__, __LINE__, #got)
// for what follows on this thread: CHECK_AT("P=%d r=%d %s", P, r, mode)
#define CHECK_AT(...) (void)snprintf(check_where, sizeof check_where, __VA_ARGS__)

static inline void check_(int ok, const char* file, int line, const char* what) {
    __atomic_fetch_add(ok ? &check_passed : &check_failed, 1, __ATOMIC_RELAXED);
    if (!ok) { fprintf(stderr, "%s:%d: failed: %s [%s]\n", file, line, what, check_where); }
}

// the same bits in both
static inline void check_bits_(const void* got, const void* want, size_t nbytes, const char* file, int line,
                               const char* what) {
    const unsigned char* g = (const unsigned char*)got;
    const unsigned char* w = (const unsigned char*)want;
    size_t i = 0;
    while (i < nbytes && g[i] == w[i]) {
        i++;
    }
    if (i < nbytes) { fprintf(stderr, "%s: first difference at byte %zu of %zu\n", what, i, nbytes); }
    check_(i == nbytes, file, line, what);
}

// ||got - want|| / ||want|| <= tol, summed in double; a NaN in either fails
static inline void check_close_(const float* got, const float* want, size_t nelem, double tol,
                                const char* file, int line, const char* what) {
    double diff = 0.0, norm = 0.0;
    for (size_t i = 0; i < nelem; i++) {
        double d = (double)got[i] - (double)want[i];
        diff += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    double rel = sqrt(diff) / (norm > 0.0 ? sqrt(norm) : 1.0);
    if (!(rel <= tol)) { fprintf(stderr, "%s: relative error %.3e, allowed %.3e\n", what, rel, tol); }
    check_(rel <= tol, file, line, what);
}

// expr ends the process with a status other than 0 and prints text on stderr. Before any thread has started.
#define CHECK_DIES(expr, text)                                               \
    do {                                                                     \
        int check_fd_[2];                                                    \
        pid_t check_pid_ = pipe(check_fd_) == 0 ? fork() : -1;               \
        if (check_pid_ == 0) {                                               \
            dup2(check_fd_[1], 2);                                           \
            expr;                                                            \
            _exit(0);                                                        \
        }                                                                    \
        check_dies_(check_fd_, check_pid_, text, __FILE__, __LINE__, #expr); \
    } while (0)

static inline void check_dies_(const int fd[2], pid_t pid, const char* text, const char* file, int line,
                               const char* what) {
    char said[4096];
    size_t n = 0;
    ssize_t k;
    int status = 0;
    close(fd[1]);
    while (n < sizeof said - 1 && (k = read(fd[0], said + n, sizeof said - 1 - n)) > 0) {
        n += (size_t)k;
    }
    said[n] = 0;
    close(fd[0]);
    int died = pid > 0 && waitpid(pid, &status, 0) == pid && !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (!died || !strstr(said, text)) { fprintf(stderr, "%s: wanted '%s', got '%s'\n", what, text, said); }
    check_(died && strstr(said, text) != NULL, file, line, what);
}

static inline int check_report(void) {
    printf("%d passed, %d failed\n", check_passed, check_failed);
    return check_failed != 0 || check_passed == 0;
}
#endif
