/* comm.h -- what the transports of the cuda device and device.cu tell each other.
 *
 * An exchange is queued by the host's thread, there and then: its transport puts copies, waits and signals
 * (comm_local.cu) or a group of NCCL's sends and receives (comm_nccl.cu) onto the exchange's stream.
 */
#ifndef FO_CUDA_COMM_H
#define FO_CUDA_COMM_H
#include <cuda.h> // types of the driver's functions, which are looked up when first needed
#include "flashoverlap/cuda/cuda_common.cuh"
#include "flashoverlap/fo_transport.h"

/* Memory that NCCL can register, so that links read and write it without a copy in between. NULL where ranks
 * are threads, or there is no more: fo_malloc then asks cudaMalloc.
 * fo__nccl_free waits for what is queued on the device's streams; 0 if p is no such memory.
 */
void* fo__nccl_malloc(size_t nbytes);
int fo__nccl_free(FoDevice* d, void* p);

/* A stretch of a stream in which exchanges are under way that are not watched one by one, since they are part
 * of a graph: it may last for the patience of the rank's world. Where ranks are threads there is nothing to
 * watch.
 */
void* fo__watch_begin(FoStream* s);
void fo__watch_end(void* watched);

// device.cu: operations of a stream on words in memory, queued together
void fo__mem_ops(FoStream* s, unsigned n, CUstreamBatchMemOpParams ops[]);
// the GPU of a rank; dies, as fo_device_open does, where there is none (device.cu)
int fo__ordinal(int rank, int nlocal);

#endif
