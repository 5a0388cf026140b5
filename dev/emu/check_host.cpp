/* check_host.cpp -- how host threads order each other, for check.cpp: mutexes, conditions, barriers, the
 * start and the end of threads. (Atomics are in check.cpp.)
 *
 * The build renames these calls in instrumented code (check.syms), so the locks of the emulator, of MPI and
 * of the C library go past this file and order nothing. Only the clocks of host threads are touched; streams
 * are ordered by what CUDA says alone.
 */
#include "dev/emu/check.h"
#include <pthread.h>
#include <map>
#include <mutex>

namespace {
struct Start {
    void* (*body)(void*);
    void* arg;
};

// what a thread's end is released on, for the one that joins it: one byte a thread, kept until then
std::map<pthread_t, char>& ends() {
    static std::map<pthread_t, char>* all = new std::map<pthread_t, char>();
    return *all;
}
const void* end_of(pthread_t thread) {
    static std::mutex* lock = new std::mutex();
    std::lock_guard<std::mutex> guard(*lock);
    return &ends()[thread];
}

void release_end(void*) {
    emu_check_release(end_of(pthread_self()));
}

void* run_thread(void* p) {
    Start start = *(Start*)p;
    void* result = NULL;
    emu_check_acquire(p);
    emu_check_forget(p);
    delete (Start*)p;
    pthread_cleanup_push(release_end, NULL); // at pthread_exit too
    result = start.body(start.arg);
    pthread_cleanup_pop(1);
    return result;
}
} // namespace

extern "C" {
int emu_check_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                             void* arg) {
    Start* start = new Start{body, arg};
    emu_check_release(start);
    return pthread_create(thread, attributes, run_thread, start);
}
int emu_check_pthread_join(pthread_t thread, void** result) {
    int error = pthread_join(thread, result);
    if (!error) { emu_check_acquire(end_of(thread)); }
    return error;
}

int emu_check_pthread_mutex_lock(pthread_mutex_t* m) {
    int error = pthread_mutex_lock(m);
    if (!error) { emu_check_acquire(m); }
    return error;
}
int emu_check_pthread_mutex_trylock(pthread_mutex_t* m) {
    int error = pthread_mutex_trylock(m);
    if (!error) { emu_check_acquire(m); }
    return error;
}
int emu_check_pthread_mutex_unlock(pthread_mutex_t* m) {
    emu_check_release(m);
    return pthread_mutex_unlock(m);
}
int emu_check_pthread_mutex_destroy(pthread_mutex_t* m) {
    emu_check_forget(m);
    return pthread_mutex_destroy(m);
}
// a condition orders nothing but by its mutex
int emu_check_pthread_cond_wait(pthread_cond_t* c, pthread_mutex_t* m) {
    emu_check_release(m);
    int error = pthread_cond_wait(c, m);
    emu_check_acquire(m);
    return error;
}
int emu_check_pthread_cond_timedwait(pthread_cond_t* c, pthread_mutex_t* m, const timespec* until) {
    emu_check_release(m);
    int error = pthread_cond_timedwait(c, m, until);
    emu_check_acquire(m);
    return error;
}
int emu_check_pthread_barrier_wait(pthread_barrier_t* b) {
    emu_check_release_too(b);
    int result = pthread_barrier_wait(b);
    emu_check_acquire(b);
    return result;
}
int emu_check_pthread_barrier_destroy(pthread_barrier_t* b) {
    emu_check_forget(b);
    return pthread_barrier_destroy(b);
}
}
