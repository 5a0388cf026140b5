/* cudnn_graph.h -- attention as a graph of operations of cuDNN's backend, and the plan it makes of that.
 *
 * cuDNN's unified attention operation knows no causal mask before 9.21 and no backward pass, so both are
 * written out in small operations, among which cuDNN finds its fused kernels. Works without a GPU, from a
 * description of one: dev/test/cudnn_plans. Used by attention_cudnn.cu.
 */
#ifndef FO_CUDA_CUDNN_GRAPH_H
#define FO_CUDA_CUDNN_GRAPH_H
#include <cudnn.h>
#include "flashoverlap/cuda/attention_calls.h"

// from 9.6 on, plans clear the fp32 sums of dq themselves, and a bottom-right mask takes any lengths
enum { FO_CUDNN_OLDEST = 90600 };

// can plans be made from a description of a device?
#define FO_CUDNN_DESCRIBES (CUDNN_VERSION >= 91100)

typedef struct {
    FoSdpa sdpa;
    int deterministic;
    cudnnBackendDescriptor_t plan;
    int64_t workspace_nbytes, engine;
    cudnnStatus_t status; // of the first call that failed
    char error[256];
    cudnnBackendDescriptor_t made[256]; // all descriptors
    int nmade, nops;
    cudnnBackendDescriptor_t ops[32];
    int64_t next_uid;
} FoCudnnPlan;

/* fo__cudnn_plan -- a plan for bf16; 0: cuDNN has none, p->error says why. Free it either way.
 *
 * handle         NULL: for the device that properties, a DEVICEPROP descriptor, describes
 * deterministic  backward: the same bits each time, without sums of dq in fp32, with a workspace of
 *                nseq * heads * queries * keys * 2 bytes
 * Takes half a second: cuDNN compiles the kernel.
 */
int fo__cudnn_plan(FoCudnnPlan* p, const FoSdpa* call, int deterministic, cudnnHandle_t handle,
                   cudnnBackendDescriptor_t properties);
// on the handle's stream
cudnnStatus_t fo__cudnn_plan_run(const FoCudnnPlan* p, const FoSdpaArrays* a, cudnnHandle_t handle);
void fo__cudnn_plan_free(FoCudnnPlan* p);
#endif
