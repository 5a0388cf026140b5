/* comm.h -- what the transports of the cuda device share. Nothing outside comm*.cu sees it, but for the two
 * functions on NCCL's memory.
 *
 * An exchange is queued by the host's thread, there and then: its transport puts copies, waits and signals
 * (comm_local.cu) or a group of NCCL's sends and receives (comm_nccl.cu) onto the exchange's stream.
 */
#ifndef FO_CUDA_COMM_H
#define FO_CUDA_COMM_H
#include "flashoverlap/cuda/cuda_common.cuh"
#include "flashoverlap/fo_transport.h"

/* Memory that NCCL can register, so that links read and write it without a copy in between: of the running
 * process's NCCL, cleared by nobody. NULL, and 0, where ranks are threads: fo_malloc then has cudaMalloc.
 */
void* fo__nccl_malloc(size_t nbytes);
int fo__nccl_free(void* p);

#endif
