// emu.h -- what a test may ask the emulator. C that is also C++
#ifndef EMU_H
#define EMU_H
#ifdef __cplusplus
extern "C" {
#endif
/* fo_emu_count -- calls so far, of all threads, of
 *
 * "malloc" (cudaMalloc, cudaMallocHost), "event_create", "stream_sync" (and cudaEventSynchronize),
 * "device_sync", "heuristic" (of cuBLASLt), "launch" (of kernels and graphs). Dies on another word.
 */
long fo_emu_count(const char* what);
#ifdef __cplusplus
}
#endif
#endif
