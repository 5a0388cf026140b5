/* check.h -- what the emulator tells the checker. The functions are weak: a build without check.cpp has none
 * of them, and the emulator calls only those that are there.
 *
 * The checker keeps a vector clock for each context, that is for whoever acts: every host thread is one, and
 * every stream. CUDA's order is told as pairs of release and acquire on the address of something; nothing
 * else orders two contexts, so the emulator's own locks, which are futexes, don't. Any thread may call; the
 * checker locks for itself. Where in a kernel the device thread is says `position` in exec.h.
 */
#ifndef EMU_CHECK_H
#define EMU_CHECK_H
#include <stddef.h>

#define EMU_WEAK __attribute__((weak))
extern "C" {
// ---- contexts ---------------------------------------------------------------------------------------------
// a context for a new stream of a device: a number from 1. `name` is copied. Numbers of closed ones may be
// used again, once no clock can tell the two apart
int emu_check_stream_open(const char* name, int device) EMU_WEAK;
void emu_check_stream_close(int context) EMU_WEAK;
// the calling thread acts for this stream from now on. 0: for itself, as a host thread, which is how every
// thread begins. The checker makes a host thread's clock when it first hears of the thread
void emu_check_context(int context) EMU_WEAK;
// what the context now begins to run, for messages; the text stays where it is for ever. One call a run of an
// operation, or a poll of one that had to wait
void emu_check_name(const char* what) EMU_WEAK;
// the device thread has started: the caller. Its thread-local memory is the kernels' __shared__
void emu_check_device_thread(void) EMU_WEAK;

// ---- order ------------------------------------------------------------------------------------------------
// all that the context has done and seen | happens before what follows an acquire of the same address. A
// release overwrites the last one: addresses are used again for other things
void emu_check_release(const void* sync) EMU_WEAK;
void emu_check_acquire(const void* sync) EMU_WEAK; // of an address never released: nothing
// adds to the last release instead: for what several contexts release before one acquires
void emu_check_release_too(const void* sync) EMU_WEAK;
void emu_check_forget(const void* sync) EMU_WEAK; // no acquire will follow
// memory operations of streams, and atomics of host threads on pinned memory. A wait comes after the earliest
// of the last writes in a row that satisfy it, not after the one that it happened to see. A flag counts as
// written; but nothing has to come after its writes, nor they after anything
void emu_check_flag_write(const void* flag, unsigned value) EMU_WEAK;
void emu_check_flag_wait(const void* flag, unsigned value, int at_least) EMU_WEAK; // 0: equal

// ---- memory -----------------------------------------------------------------------------------------------
// reserves the addresses that all device memory and pinned host memory comes from; once, before the rest
void* emu_check_arena(size_t nbytes) EMU_WEAK;
// device: the ordinal, or -1 for pinned host memory, which host threads may use too. Contents undefined
void emu_check_alloc(void* p, size_t nbytes, int device) EMU_WEAK;
void emu_check_free(void* p, size_t nbytes) EMU_WEAK;
// the context reads (write 0) or writes these bytes in code that is not instrumented: copies, GEMMs, messages
void emu_check_range(const void* p, size_t nbytes, int write) EMU_WEAK;
// the context copies them, defined or not. What a copy to untracked host memory reads must be defined
void emu_check_copy(void* to, const void* from, size_t nbytes) EMU_WEAK;
// change is +1 or -1: while the calling thread's sum is positive its own accesses are not looked at
void emu_check_quiet(int change) EMU_WEAK;
// kernels of `device` may use memory of device `peer` from now on
void emu_check_peer(int device, int peer) EMU_WEAK;
}

namespace emu {
inline void release(const void* sync) {
    if (emu_check_release) { emu_check_release(sync); }
}
inline void acquire(const void* sync) {
    if (emu_check_acquire) { emu_check_acquire(sync); }
}
inline void forget(const void* sync) {
    if (emu_check_forget) { emu_check_forget(sync); }
}
} // namespace emu
#endif
