/* fo.c -- how a rank ends that can't go on, and the time: the part of fo.h that every device shares. */
#include "flashoverlap/fo.h"
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

// ---- errors -----------------------------------------------------------------------------------------------
static _Thread_local int die_rank = -1;
static atomic_int die_taken; // who sets it may print; it serves messages alone, as the rank does
static void (*_Atomic die_abort)(int status);

void fo_die_rank(int rank) {
    die_rank = rank;
}

void fo_die_abort(void (*abort_all)(int status)) {
    atomic_store(&die_abort, abort_all);
}

static void die_first(void) {
    if (atomic_exchange(&die_taken, 1)) {
        for (;;) {
            pause();
        }
    }
}

static _Noreturn void die_end(int status) {
    fflush(NULL);
    void (*abort_all)(int) = atomic_load(&die_abort);
    if (abort_all) { abort_all(status); }
    _exit(status);
}

void fo_die(const char* file, int line, const char* func, const char* fmt, ...) {
    char msg[1024];
    va_list ap;
    die_first();
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    if (die_rank >= 0) {
        fprintf(stderr, "[rank %d] %s:%d %s: %s\n", die_rank, file, line, func, msg);
    } else {
        fprintf(stderr, "%s:%d %s: %s\n", file, line, func, msg);
    }
    die_end(1);
}

void fo_quit(int status, const char* fmt, ...) {
    char msg[1024];
    va_list ap;
    die_first();
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    fprintf(stderr, "%s\n", msg);
    die_end(status);
}

double fo_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
