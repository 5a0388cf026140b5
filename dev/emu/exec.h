/* exec.h -- runs one kernel on the calling thread, which is the device thread.
 *
 * A CUDA thread is a plain call of the kernel until it has to wait; then its stack is kept as a fiber, and
 * another stack carries on. Blocks run one after the other, so a block must not wait for another.
 */
#ifndef EMU_EXEC_H
#define EMU_EXEC_H
#include <cuda_runtime.h>

namespace emu {
enum { MAX_THREADS = 1024, MAX_SHARED_NBYTES = 232448 }; // of a block

struct Launch {
    dim3 grid, block;
    size_t shared_nbytes; // dynamic
    void (*call)(void*);  // calls the kernel with the arguments in pack
    void* pack;
    const char* name;
};

void run_kernel(const Launch& launch);

// where the device thread is inside a kernel; one writer and one reader, the device thread
struct Position {
    bool inside;
    unsigned long launch;       // counted from 1
    unsigned long block;        // blockIdx, x fastest
    unsigned thread;            // threadIdx, x fastest
    unsigned block_epoch;       // barriers that the block has passed
    unsigned warp_epoch;        // barriers and shuffles that the thread's warp has passed
    const void* pack;           // the launch's arguments
    const char* dynamic;        // the launch's dynamic shared memory
    size_t dynamic_nbytes;      // as large as the launch says
    size_t dynamic_area_nbytes; // what is there; behind dynamic_nbytes it must not be touched
};
extern Position position;
} // namespace emu
#endif
