/* emu_test.h -- what the tests of the emulator share: launches, and tests in a child process of their own,
 * since the emulator reads its environment once.
 *
 * The tests say what CUDA promises: but for messages and the emulator's own variables they hold on a GPU.
 */
#ifndef EMU_TEST_H
#define EMU_TEST_H
#include "dev/emu/check.h"
#include "dev/emu/emu.h"
#include "dev/test/check.h"
#include <cuda_runtime.h>
#include <stdlib.h>

// is it an AddressSanitizer build, is the checker there? They report some of what is done here on purpose
#ifdef __SANITIZE_ADDRESS__
enum { ASAN = 1 };
#else
enum { ASAN = 0 };
#endif
static inline bool checked(void) {
    return emu_check_context != nullptr;
}

#define OK(call) CHECK((call) == cudaSuccess)

template <class... P, class... A>
static inline void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_nbytes, cudaStream_t s,
                          A... args) {
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared_nbytes;
    c.stream = s;
    OK(cudaLaunchKernelEx(&c, kernel, static_cast<P>(args)...));
}

static inline cudaStream_t new_stream(int priority = 0) {
    cudaStream_t s = nullptr;
    OK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, priority));
    return s;
}

static inline cudaEvent_t new_event(void) {
    cudaEvent_t e = nullptr;
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return e;
}

template <class T> static inline T* new_array(size_t nelem) {
    T* p = nullptr;
    OK(cudaMalloc(&p, nelem * sizeof(T)));
    return p;
}

template <class T> static inline T* new_pinned(size_t nelem) {
    T* p = nullptr;
    OK(cudaMallocHost(&p, nelem * sizeof(T)));
    return p;
}

// sets variables, up to a NULL: name, value, name, value, ...
static inline void set_environment(const char* const* variables) {
    for (; variables && *variables; variables += 2) {
        setenv(variables[0], variables[1], 1);
    }
}

// runs the test with these variables in a child; its checks count as one here
static inline void in_child(void (*test)(void), const char* name, const char* const* variables) {
    fflush(stdout);
    pid_t pid = fork();
    int status = 1;
    if (pid == 0) {
        check_passed = check_failed = 0;
        set_environment(variables);
        CHECK_AT("%s %s", name, variables && *variables ? variables[1] : "");
        test();
        _exit(check_failed != 0 || check_passed == 0);
    }
    CHECK_AT("%s %s", name, variables && *variables ? variables[1] : "");
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// in each schedule
static inline void in_schedules(void (*test)(void), const char* name) {
    static const char* const SCHEDULES[] = {"eager", "lazy", "random:1", "random:2", "random:3"};
    for (const char* schedule : SCHEDULES) {
        const char* const variables[] = {"FO_EMU_SCHED", schedule, nullptr};
        in_child(test, name, variables);
    }
}
#define IN_CHILD(test, ...)                                      \
    do {                                                         \
        const char* const variables_[] = {__VA_ARGS__, nullptr}; \
        in_child(test, #test, variables_);                       \
    } while (0)
#define IN_SCHEDULES(test) in_schedules(test, #test)
#endif
