/* cudnn_plans.cpp -- has cuDNN a plan for every attention call that training makes, on every chip? No GPU is
 * needed: cuDNN compiles its kernels for a chip that a descriptor describes. cudnn_plans.sh starts this.
 *
 *     cudnn_plans CHIP some|all          CHIP: 80, 90 or 100
 *
 * The calls are those that attention_calls.cu makes of the rows of the schedules, the plans are made by
 * cudnn_graph.cu. That a plan exists is all that can be seen so: nothing runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include "dev/test/check.h"
#include "flashoverlap/cuda/cudnn_graph.h"

static void must(int ok, const char* what) {
    if (ok) { return; }
    fprintf(stderr, "cudnn_plans: %s\n", what);
    exit(1);
}

// ---- chips ------------------------------------------------------------------------------------------------
static const struct {
    int sm, nsm, shared_nbytes;
    const char* name;
} CHIPS[] = {{80, 108, 166912, "A100"}, {90, 132, 232448, "H100"}, {100, 148, 232448, "B200"}};

static cudnnBackendDescriptor_t describe(int sm) {
    cudnnBackendDescriptor_t d = NULL;
    char text[1024];
    size_t i = 0;
    while (i < sizeof CHIPS / sizeof *CHIPS && CHIPS[i].sm != sm) {
        i++;
    }
    must(i < sizeof CHIPS / sizeof *CHIPS, "want chip 80, 90 or 100");
    int n = snprintf(
        text, sizeof text,
        "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,"
        "\"multiProcessorCount\":%d,\"warpSize\":32,\"maxSharedMemoryPerBlock\":49152,"
        "\"maxSharedMemoryPerBlockOptin\":%d,\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":"
        "65536,"
        "\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,\"pciDeviceId\":0,"
        "\"isTccDriver\":0,\"supportCoopLaunch\":1,\"totalGlobalMem\":85899345920,\"smClockRateKHz\":1400000,"
        "\"memClockRateKHz\":1500000,\"l2CacheSize\":41943040,\"cudaDeviceId\":0,\"deviceVer\":%d,"
        "\"driverVer\":13000,\"deviceName\":\"%s\"}",
        CHIPS[i].nsm, CHIPS[i].shared_nbytes, 10 * sm, CHIPS[i].name);
    must(cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &d) == CUDNN_STATUS_SUCCESS &&
             cudnnBackendSetAttribute(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, n,
                                      text) == CUDNN_STATUS_SUCCESS &&
             cudnnBackendFinalize(d) == CUDNN_STATUS_SUCCESS,
         "cuDNN doesn't know the description of a device");
    return d;
}

// ---- calls ------------------------------------------------------------------------------------------------
typedef struct {
    FoSdpa sdpa;
    int deterministic;
    char what[64];
} Wanted;

typedef struct {
    Wanted* calls; // each once
    int n, room, all;
} List;

static void want(List* list, const FoSdpa* c, int deterministic, const char* what) {
    for (int i = 0; i < list->n; i++) {
        if (memcmp(&list->calls[i].sdpa, c, sizeof *c) == 0 &&
            list->calls[i].deterministic == deterministic) {
            return;
        }
    }
    if (list->n == list->room) {
        list->room = 2 * list->room + 64;
        list->calls = (Wanted*)realloc(list->calls, (size_t)list->room * sizeof *list->calls);
        must(list->calls != NULL, "out of memory");
    }
    Wanted* w = &list->calls[list->n++];
    w->sdpa = *c;
    w->deterministic = deterministic;
    snprintf(w->what, sizeof w->what, "%s", what);
}

static void want_rows(List* list, FoSdpaKind kind, size_t row0, size_t n, FoLayout l, int NH, int hs,
                      int deterministic, const char* what) {
    FoSdpaCall calls[FO_SDPA_CALLS];
    FoSdpaGather gather;
    int ncalls = fo__sdpa_calls(calls, &gather, kind, row0, n, l, NH, hs);
    for (int i = 0; i < ncalls; i++) {
        want(list, &calls[i].sdpa, deterministic, what);
    }
}

// a rank's attention: all rows, those of each shard in m chunks, and backward by whole shards
static void want_layout(List* list, FoLayout l, int NH, int hs, int m, const char* what) {
    size_t N = (size_t)l.B * (size_t)l.T, shard = N / (size_t)l.P, chunk = shard / (size_t)m;
    int whole = !l.zigzag && l.B % l.P == 0, P = l.zigzag ? l.P : 1; // whole: shards are alike
    want_rows(list, FO_SDPA_FORWARD, 0, N, l, NH, hs, 0, what);
    want_rows(list, FO_SDPA_BACKWARD, 0, l.zigzag ? N : shard, l, NH, hs, 0, what);
    for (size_t row = 0; row + chunk <= (whole ? shard : N); row += chunk) {
        want_rows(list, FO_SDPA_FORWARD, row, chunk, l, NH, hs, 0, what);
    }
    for (int p = 0; p < P; p++) {
        want_rows(list, FO_SDPA_BACKWARD_KV, (size_t)p * shard, shard, l, NH, hs, 0, what);
    }
}

static const struct {
    const char* name;
    int NH, hs, T;
} MODELS[] = {{"GPT-2 124M", 12, 64, 1024},  {"GPT-2 350M", 16, 64, 1024},  {"GPT-2 774M", 20, 64, 1024},
              {"GPT-2 1558M", 25, 64, 1024}, {"GPT-3 125M", 12, 64, 2048},  {"GPT-3 350M", 16, 64, 2048},
              {"GPT-3 760M", 16, 96, 2048},  {"GPT-3 1.3B", 16, 128, 2048}, {"GPT-3 2.7B", 32, 80, 2048},
              {"GPT-3 6.7B", 32, 128, 2048}};

static void want_models(List* list) {
    char what[64];
    for (size_t i = 0; i < sizeof MODELS / sizeof *MODELS; i++) {
        for (int tp = 1; tp <= 4; tp *= 2) {
            for (int r = 0; r < tp; r++) { // heads are cut unevenly
                for (int m = 1; m <= 4; m *= 2) {
                    FoLayout l = {4, MODELS[i].T, tp, 0};
                    snprintf(what, sizeof what, "%s, tp %d", MODELS[i].name, tp);
                    want_layout(list, l, (int)fo_cut_n((size_t)MODELS[i].NH, tp, r), MODELS[i].hs, m, what);
                }
            }
        }
    }
}

static void want_all(List* list) {
    char what[64];
    want_models(list);
    for (int T = 1024; T <= 16384; T *= 16) {
        for (int P = 2; P <= 4; P *= 2) {
            snprintf(what, sizeof what, "124M, up %d, T=%d", P, T);
            want_layout(list, FoLayout{T == 1024 ? 2 : 1, T, P, 1}, 12 / P, 64, 1, what);
            snprintf(what, sizeof what, "1558M, tp %d, zig-zag, T=%d", P, T);
            want_layout(list, FoLayout{1, T, P, 1}, (25 + P - 1) / P, 64, 2, what);
        }
    }
    for (int P = 1; P <= 4; P++) { // test_gpt's
        want_layout(list, FoLayout{4, 24, P, 1}, (4 + P - 1) / P, 8, 1, "test_gpt, zig-zag");
        if (P != 3) { want_layout(list, FoLayout{4, 24, P, 0}, 4 / P, 8, 1, "test_gpt"); }
    }
    for (int NH = 12; NH <= 25; NH += 13) {
        FoLayout l = {16, 1024, 4, 0};
        want_rows(list, FO_SDPA_BACKWARD, 0, 4 * 1024, l, NH, 64, 1, "deterministic");
        want_rows(list, FO_SDPA_BACKWARD_KV, 0, 4 * 1024, l, NH, 64, 1, "deterministic");
        FoLayout zigzag = {1, 1024, 2, 1};
        want_rows(list, FO_SDPA_BACKWARD_KV, 512, 512, zigzag, NH, 64, 1, "deterministic, zig-zag");
    }
}

// what tells most, in a minute
static void want_some(List* list) {
    FoLayout tp4 = {4, 1024, 4, 0}, tp2 = {4, 2048, 2, 0}, zigzag = {1, 1024, 2, 1},
             longer = {1, 16384, 4, 1};
    want_rows(list, FO_SDPA_FORWARD, 0, 4096, tp4, 12, 64, 0, "124M");
    want_rows(list, FO_SDPA_BACKWARD, 0, 4096, tp4, 12, 64, 0, "124M");
    want_rows(list, FO_SDPA_FORWARD, 0, 1024, tp4, 7, 64, 0, "1558M, tp 4");
    want_rows(list, FO_SDPA_BACKWARD, 0, 1024, tp4, 7, 64, 0, "1558M, tp 4");
    want_rows(list, FO_SDPA_FORWARD, 768, 256, tp4, 7, 64, 0, "1558M, tp 4, m = 4");
    want_rows(list, FO_SDPA_BACKWARD, 0, 4096, tp2, 16, 80, 0, "2.7B, tp 2");
    want_rows(list, FO_SDPA_BACKWARD, 0, 4096, tp2, 8, 128, 0, "1.3B, tp 2");
    want_rows(list, FO_SDPA_FORWARD, 512, 512, zigzag, 6, 64, 0, "124M, up 2");
    want_rows(list, FO_SDPA_BACKWARD_KV, 0, 512, zigzag, 6, 64, 0, "124M, up 2");
    want_rows(list, FO_SDPA_FORWARD, 0, 4096, longer, 3, 64, 0, "124M, up 4, T=16384");
    want_rows(list, FO_SDPA_BACKWARD_KV, 8192, 4096, longer, 3, 64, 0, "124M, up 4, T=16384");
    want_rows(list, FO_SDPA_BACKWARD, 0, 4096, tp4, 12, 64, 1, "124M, deterministic");
    want_layout(list, FoLayout{4, 24, 2, 0}, 2, 8, 1, "test_gpt");
}

// ---- plans ------------------------------------------------------------------------------------------------
static void make_plan(const Wanted* w, int sm, cudnnBackendDescriptor_t chip) {
    static const char* const masks[] = {"causal", "causal, bottom right"};
    const FoSdpa* c = &w->sdpa;
    FoCudnnPlan p;
    int made = fo__cudnn_plan(&p, c, w->deterministic, NULL, chip);
    CHECK_AT("sm_%d: %.40s: %.70s", sm, w->what, p.error);
    CHECK(made && p.plan && p.engine >= 0);
    CHECK(p.workspace_nbytes >= 0 && p.workspace_nbytes <= (int64_t)2 << 30);
    printf("sm_%-3d  %-8s  %2lld x %2lld heads of %3lld  %5lld queries  %5lld keys  %-20s  engine %lld  "
           "%9lld bytes  "
           "%s\n",
           sm, c->backward ? "backward" : "forward", (long long)c->nseq, (long long)c->heads,
           (long long)c->hs, (long long)c->queries, (long long)c->keys, masks[c->bottom_right],
           (long long)p.engine, (long long)p.workspace_nbytes, w->what);
    fflush(stdout);
    fo__cudnn_plan_free(&p);
}

// what cuDNN has no kernel for: else none of the above would mean much
static void check_refusal(cudnnBackendDescriptor_t chip) {
    FoSdpaCall call;
    FoSdpaGather gather;
    FoLayout l = {4, 24, 1, 0};
    for (int backward = 0; backward < 2; backward++) {
        FoCudnnPlan p;
        fo__sdpa_calls(&call, &gather, backward ? FO_SDPA_BACKWARD : FO_SDPA_FORWARD, 0, 96, l, 5, 6);
        CHECK_AT("heads of 6");
        CHECK(fo__cudnn_plan(&p, &call.sdpa, 0, NULL, chip) == 0);
        CHECK(p.plan == NULL && p.error[0] != 0);
        fo__cudnn_plan_free(&p);
    }
}

int main(int argc, char** argv) {
    must(argc == 3, "want: cudnn_plans CHIP some|all");
    int sm = atoi(argv[1]);
    List list = {NULL, 0, 0, strcmp(argv[2], "all") == 0};
    cudnnBackendDescriptor_t chip = describe(sm);
    if (list.all) {
        want_all(&list);
    } else {
        want_some(&list);
    }
    for (int i = 0; i < list.n; i++) {
        make_plan(&list.calls[i], sm, chip);
    }
    check_refusal(chip);
    cudnnBackendDestroyDescriptor(chip);
    free(list.calls);
    return check_report();
}
