/* train_gpt.cu -- trains a GPT-2 class model over P ranks; each collective of a step is a flash primitive.
 *
 * Read gpt_forward, gpt_head and gpt_backward: flat lists of calls, the rows of the table in doc/overlap.md
 * (F1 ... H3) in the margin. Then gpt_update, and train, the loop. No kernel, no device call: plain C that is
 * also C++. What a training program needs beside the model is in train/ and data/.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "data/dataloader.h"
#include "data/tokenizer.h"
#include "flashoverlap/fo_overlap.h"
#include "train/checkpoint.h"
#include "train/logger.h"
#include "train/options.h"
#include "train/outlier.h"
#include "train/report.h"
#include "train/rng.h"
#include "train/sampler.h"
#include "train/schedule.h"
#include "train/tensors.h"
#include "train/weights.h"

// ---- the overlapped operations of a step ------------------------------------------------------------------
enum { E1, F1, F2, F3, F4, H1, H2, H2_NEXT, H3, B1, B2, B3, B4, B5, B6, B7, B7_BACK, E2, NSITES };

// rows of doc/overlap.md's table. whole: not cut into the mode's m chunks, and to each peer directly
static const struct {
    const char* name;
    FoKind kind;
    int whole;
} SITES[NSITES] = {
    {"E1", FO_ALLGATHER, 1},     {"F1", FO_ALLGATHER, 0},     {"F2", FO_REDUCESCATTER, 0},
    {"F3", FO_ALLGATHER, 0},     {"F4", FO_REDUCESCATTER, 0}, {"H1", FO_ALLGATHER, 0},
    {"H2", FO_ALLGATHER, 1},     {"H2", FO_ALLGATHER, 1},     {"H3", FO_REDUCESCATTER, 0},
    {"B1", FO_ALLGATHER, 0},     {"B2", FO_ALLGATHER, 0},     {"B3", FO_REDUCESCATTER, 0},
    {"B4", FO_ALLGATHER, 0},     {"B5", FO_ALLGATHER, 0},     {"B6", FO_REDUCESCATTER, 0},
    {"B7", FO_REDUCESCATTER, 1}, {"B7", FO_ALLGATHER, 1},     {"E2", FO_ALLGATHER, 1},
};

// ---- model ------------------------------------------------------------------------------------------------
// Ca, F: this rank's attention and FFN widths; n = N/P rows of the own shard
typedef struct {
    // kept from forward to backward
    floatX* resid; // [L+1, n, C] the residual stream before each layer, and after the last
    floatX* mid;   // [L, n, C] the residual stream between attention and FFN
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd; // [L, n]
    float *lnf_mean, *lnf_rstd;                       // [n]
    floatX* qkv;                                      // [L, N, 3*Ca]
    floatX* att;                                      // [L, N, Ca]
    float* lse;                                       // [L, N, NHl]
    floatX* fch;                                      // [L, N, F] before the GELU
    floatX *ln1_all, *ln2_all; // [N, C] every rank's layer norm outputs; --sp 0: [L, N, C], kept
    // used by one operation after another
    floatX* gelu;                         // [N, F]
    floatX* dfch;                         // [N, F]
    floatX *dqkv, *datt;                  // [N, 3*Ca], [N, Ca]
    floatX* dall;                         // [N, C] gradient of the residual stream; the own rows are its home
    floatX* dln;                          // [n, C]
    floatX* logits;                       // [2, slice, Vl]
    FoSoftmaxStat* stats;                 // [2, P, slice]
    floatX* logits_row;                   // [P, Vl of rank 0] for sampling
    float* losses;                        // [N]
    void* scalars;                        // [P + 1] Scalars: what ranks tell each other, and room for a sum
    void *partial, *received;             // FoStaging
    int *targets, *pos;                   // [N] in the order of the head's slices, [n]
    int *pos_dst, *pos_start, *pos_order; // dwpe's sums: as fo_scatter_add_rows wants them
} GPTActs;

// what a rank tells the others once a step
typedef struct {
    double square_sum, exposed_ms, comm_ms, stop;
} Scalars;

// one row an array: where its pointer is kept, and its bytes
typedef struct {
    void** ptr;
    size_t nbytes;
} Carve;

typedef struct {
    GPTConfig config;
    Tensors ts;
    int P, r, sp, Ca, F, NHl, Vl, v0, valid; // valid: columns of Vl that are vocabulary, not padding
    size_t first_row[FO_MAX_RANKS + 1];      // of wte, by rank
    // this rank's arenas, [ts.nelem] and some zeros
    floatX* params;
    float *grads, *m, *v, *master; // master is params in an FP32 build
    GPTActs acts;
    Carve arrays[64]; // of acts and grad_staging
    int narrays;
    size_t acts_nbytes;
    FoDevice* device;
    FoStream *compute, *comm;
    FoGroup* tp;
    FoOverlap* o[NSITES];
    FoStaging staging, grad_staging;
    FoFetch* fetch;
    int B_max, T_max; // the largest batch
    int chunks;       // for each owner in the mode chosen
    int head_chunks;  // what of it divides the head's slices, too
    // the batch at hand
    int nslices;
    size_t N, n, npos; // npos: different positions among the own rows
    FoLayout layout;
    int* host_ints;     // on their way to the device
    float* host_losses; // [N]
} GPT;

static const floatX* weight_of(const GPT* g, int tensor, int l) {
    return g->params + g->ts.t[tensor].offset + (size_t)l * tensor_local(&g->ts.t[tensor]);
}

static float* grad_of(const GPT* g, int tensor, int l) {
    return g->grads + g->ts.t[tensor].offset + (size_t)l * tensor_local(&g->ts.t[tensor]);
}

// replicated tensors stand behind the cut ones; their number, rounded up so that P ranks share them evenly
static size_t replicated(const GPT* g) {
    size_t P = (size_t)g->P;
    return (g->ts.nelem - g->ts.ncut + P - 1) / P * P;
}

// The head goes slice by slice, so that logits of a slice exist, never [N, V]: about 1,024 rows, and two
// slices at least where there are peers, so that one's statistics travel while the next is computed. m:
// GPT.head_chunks, or 1 to find it. Each slice adds to the gradient of wte, so their number must not depend
// on the mode: every mode, the same bits.
static int head_slices(size_t N, int P, int m) {
    size_t want = (N + 1023) / 1024, n = N / (size_t)P;
    if (want < 2 && P > 1) { want = 2; }
    while (want > 1 && n % (want * (size_t)m) != 0) {
        want--;
    }
    return (int)want;
}

#define CARVE(p, count, type) carve_add(g, (void**)(p), (size_t)(count) * sizeof(type))

static void carve_add(GPT* g, void** ptr, size_t nbytes) {
    Carve* c = &g->arrays[g->narrays++];
    c->ptr = ptr;
    c->nbytes = (nbytes + 63) / 64 * 64;
    g->acts_nbytes += c->nbytes;
}

// lists the arrays of all activations, and adds up their sizes, which --dry-run reports
static void gpt_carve(GPT* g, FoDtype wire) {
    GPTActs* a = &g->acts;
    int P = g->P;
    g->narrays = 0;
    g->acts_nbytes = 0;
    size_t L = (size_t)g->config.L, C = (size_t)g->config.C, N = (size_t)g->B_max * (size_t)g->T_max,
           n = N / (size_t)P;
    size_t F = (size_t)g->F, Ca = (size_t)g->Ca, slice = N / (size_t)head_slices(N, P, g->head_chunks),
           kept = g->sp ? 1 : L;
    size_t w = fo_dtype_nbytes(wire), rank0_V = fo_cut((size_t)g->config.Vp, P, 1);
    CARVE(&a->resid, (L + 1) * n * C, floatX), CARVE(&a->mid, L * n * C, floatX);
    CARVE(&a->ln1_mean, L * n, float), CARVE(&a->ln1_rstd, L * n, float);
    CARVE(&a->ln2_mean, L * n, float), CARVE(&a->ln2_rstd, L * n, float);
    CARVE(&a->lnf_mean, n, float), CARVE(&a->lnf_rstd, n, float);
    CARVE(&a->qkv, L * N * 3 * Ca, floatX), CARVE(&a->att, L * N * Ca, floatX);
    CARVE(&a->lse, L * N * (size_t)g->NHl, float), CARVE(&a->fch, L * N * F, floatX);
    CARVE(&a->ln1_all, kept * N * C, floatX);
    if (!g->sp) { CARVE(&a->ln2_all, kept * N * C, floatX); }
    CARVE(&a->gelu, N * F, floatX), CARVE(&a->dfch, N * F, floatX);
    CARVE(&a->dqkv, N * 3 * Ca, floatX), CARVE(&a->datt, N * Ca, floatX);
    CARVE(&a->dall, N * C, floatX), CARVE(&a->dln, n * C, floatX);
    CARVE(&a->logits, 2 * slice * (size_t)g->Vl, floatX),
        CARVE(&a->stats, 2 * (size_t)P * slice, FoSoftmaxStat);
    CARVE(&a->logits_row, (size_t)P * rank0_V, floatX), CARVE(&a->losses, N, float);
    CARVE(&a->scalars, P + 1, Scalars);
    CARVE(&a->partial, N * C * w, char), CARVE(&a->received, (P > 1 ? N - n : 0) * C * w, char);
    CARVE(&a->targets, N, int), CARVE(&a->pos, n, int);
    CARVE(&a->pos_dst, n, int), CARVE(&a->pos_start, n + 1, int), CARVE(&a->pos_order, n, int);
    CARVE(&g->grad_staging.received, replicated(g), float);
}

/* gpt_sizes -- everything about the model that is arithmetic: this rank's share of widths, heads and
 * vocabulary.
 */
static void gpt_sizes(GPT* g, GPTConfig c, const TrainOptions* opt, int P, int r) {
    int hs = c.C / c.NH;
    g->config = c;
    g->P = P, g->r = r, g->sp = opt->sp;
    g->B_max = opt->batch, g->T_max = opt->seq_len, g->chunks = P > 1 ? opt->overlap.m : 1;
    size_t N = (size_t)g->B_max * (size_t)g->T_max, own = N / (size_t)P / (size_t)head_slices(N, P, 1);
    for (g->head_chunks = g->chunks; g->chunks % g->head_chunks || own % (size_t)g->head_chunks;) {
        g->head_chunks--;
    }
    TensorCuts cuts = {P, r, 1, 1, 0};
    tensors_init(&g->ts, c, cuts);
    g->NHl = (int)(fo_cut((size_t)c.NH, P, r + 1) - fo_cut((size_t)c.NH, P, r));
    g->Ca = g->NHl * hs;
    g->F = (int)(fo_cut((size_t)c.C * 4, P, r + 1) - fo_cut((size_t)c.C * 4, P, r));
    for (int p = 0; p <= P; p++) {
        g->first_row[p] = fo_cut((size_t)c.Vp, P, p);
    }
    g->v0 = (int)g->first_row[r];
    g->Vl = (int)(g->first_row[r + 1] - g->first_row[r]);
    g->valid = c.V - g->v0 < 0 ? 0 : c.V - g->v0 < g->Vl ? c.V - g->v0 : g->Vl;
}

static int site_chunks(const GPT* g, int i) {
    return SITES[i].whole ? 1 : i == H1 || i == H3 ? g->head_chunks : g->chunks;
}

static FoTopology site_topology(const TrainOptions* opt, int i) {
    return SITES[i].whole ? FO_DIRECT : opt->topology;
}

// a plan for each operation; modes none and slice:M go through the same calls as flash
static void gpt_plans(GPT* g, const TrainOptions* opt) {
    for (int i = 0; i < NSITES; i++) {
        g->o[i] = fo_overlap_create(SITES[i].name, SITES[i].kind, opt->overlap.mode, site_chunks(g, i),
                                    site_topology(opt, i), g->tp, g->compute, g->comm);
    }
}

static void gpt_open(GPT* g, GPTConfig c, const TrainOptions* opt, FoGroup* tp, FoDevice* device) {
    memset(g, 0, sizeof *g);
    gpt_sizes(g, c, opt, fo_group_size(tp), fo_group_rank(tp));
    g->tp = tp, g->device = device;
    g->compute = fo_stream_create(device, "compute");
    g->comm = fo_stream_create(device, "comm");
    gpt_plans(g, opt);
    size_t nelem = g->ts.ncut + replicated(g), N = (size_t)g->B_max * (size_t)g->T_max;
    g->params = (floatX*)fo_malloc(device, nelem * sizeof(floatX));
    g->grads = (float*)fo_malloc(device, nelem * sizeof(float));
    g->m = (float*)fo_malloc(device, nelem * sizeof(float));
    g->v = (float*)fo_malloc(device, nelem * sizeof(float));
    // an FP32 build's parameters are their own masters
    g->master =
        FO_FLOATX == FO_FP32 ? (float*)(void*)g->params : (float*)fo_malloc(device, nelem * sizeof(float));
    gpt_carve(g, opt->wire);
    for (int i = 0; i < g->narrays; i++) {
        *g->arrays[i].ptr = fo_malloc(device, g->arrays[i].nbytes);
    }
    if (g->sp) { g->acts.ln2_all = g->acts.ln1_all; }
    g->staging.partial = g->acts.partial, g->staging.received = g->acts.received, g->staging.wire = opt->wire;
    g->grad_staging.partial = g->grads + g->ts.ncut, g->grad_staging.wire = FO_FP32;
    g->fetch = fo_fetch_create(device, N);
    g->host_ints = (int*)malloc((6 * N + 8) * sizeof(int));
    g->host_losses = (float*)malloc(N * sizeof(float));
    fo_require(g->host_ints && g->host_losses, "out of memory");
}

static void gpt_close(GPT* g) {
    for (int i = 0; i < NSITES; i++) {
        fo_overlap_destroy(g->o[i]);
    }
    fo_stream_destroy(g->comm);
    fo_stream_destroy(g->compute);
    for (int i = 0; i < g->narrays; i++) {
        fo_free(g->device, *g->arrays[i].ptr);
    }
    if (FO_FLOATX != FO_FP32) { fo_free(g->device, g->master); }
    fo_free(g->device, g->v);
    fo_free(g->device, g->m);
    fo_free(g->device, g->grads);
    fo_free(g->device, g->params);
    fo_fetch_destroy(g->device, g->fetch);
    free(g->host_ints);
    free(g->host_losses);
}

// ---- batch ------------------------------------------------------------------------------------------------
/* gpt_batch -- the tokens that the next forward pass is about: ids and targets [B, T] in natural order.
 *
 * Rows are in the order of the layout: whole sequences where P divides B, else zig-zag. targets may be NULL
 * (sampling).
 */
static void gpt_batch(GPT* g, const int* ids, const int* targets, int B, int T) {
    int P = g->P, r = g->r;
    size_t N = (size_t)B * (size_t)T, n = N / (size_t)P;
    g->N = N, g->n = n;
    FoLayout layout = {B, T, P, B % P != 0};
    g->layout = layout;
    g->nslices = head_slices(N, P, g->head_chunks);
    size_t S = (size_t)g->nslices, per_slice = n / S;
    int *row_ids = g->host_ints, *head_targets = row_ids + N, *pos = head_targets + N;
    int *dst = pos + n, *start = dst + n, *order = start + n + 1, nuniq = 0, nth = 0;
    start[0] = 0;
    for (int t = 0; t < T; t++) {
        int begin = nth;
        for (int b = 0; b < B; b++) {
            size_t row = fo_layout_row(layout, b, t), p = row / n, i = row % n;
            row_ids[row] = ids[(size_t)b * (size_t)T + (size_t)t];
            // the head's order: slice, then owner, then row of the owner's slice
            size_t at = (i / per_slice * (size_t)P + p) * per_slice + i % per_slice;
            head_targets[at] = targets ? targets[(size_t)b * (size_t)T + (size_t)t] : 0;
            if ((int)p == r) {
                pos[i] = t < g->config.maxT
                             ? t
                             : g->config.maxT - 1; // beyond: rows that only fill up, when sampling
                order[nth++] = (int)i;
            }
        }
        if (nth > begin) {
            dst[nuniq++] = t;
            start[nuniq] = nth;
        }
    }
    g->npos = (size_t)nuniq;
    fo_upload(g->acts.targets, head_targets, N * sizeof(int), g->compute);
    fo_upload(g->acts.pos, pos, n * sizeof(int), g->compute);
    fo_upload(g->acts.pos_dst, dst, n * sizeof(int), g->compute);
    fo_upload(g->acts.pos_start, start, (n + 1) * sizeof(int), g->compute);
    fo_upload(g->acts.pos_order, order, n * sizeof(int), g->compute);
    fo_fetch_set(g->fetch, row_ids, N, g->first_row, P, r, g->compute);
}

// ---- forward ----------------------------------------------------------------------------------------------
// one layer's slices of everything
typedef struct {
    floatX *x, *x_next, *mid, *ln1, *qkv, *att, *ln2, *fch;
    float *mean1, *rstd1, *mean2, *rstd2, *lse;
    const floatX *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw,
        *fcprojb;
    float *dln1w, *dln1b, *dqkvw, *dqkvb, *dattprojw, *dattprojb, *dln2w, *dln2b, *dfcw, *dfcb, *dfcprojw,
        *dfcprojb;
} Layer;

static Layer layer_of(const GPT* g, int l) {
    const GPTActs* a = &g->acts;
    const size_t i = (size_t)l, C = (size_t)g->config.C, n = g->n, N = g->N, Ca = (size_t)g->Ca;
    const size_t kept = g->sp ? 0 : i * N * C; // with sp the gathered layer norm outputs are not kept
    Layer y;
    y.x = a->resid + i * n * C, y.x_next = a->resid + (i + 1) * n * C, y.mid = a->mid + i * n * C;
    y.ln1 = a->ln1_all + kept, y.ln2 = a->ln2_all + kept;
    y.qkv = a->qkv + i * N * 3 * Ca, y.att = a->att + i * N * Ca, y.fch = a->fch + i * N * (size_t)g->F;
    y.mean1 = a->ln1_mean + i * n, y.rstd1 = a->ln1_rstd + i * n, y.mean2 = a->ln2_mean + i * n;
    y.rstd2 = a->ln2_rstd + i * n, y.lse = a->lse + i * N * (size_t)g->NHl;
    y.ln1w = weight_of(g, LN1W, l), y.ln1b = weight_of(g, LN1B, l);
    y.qkvw = weight_of(g, QKVW, l), y.qkvb = weight_of(g, QKVB, l);
    y.attprojw = weight_of(g, ATTPROJW, l), y.attprojb = weight_of(g, ATTPROJB, l);
    y.ln2w = weight_of(g, LN2W, l), y.ln2b = weight_of(g, LN2B, l);
    y.fcw = weight_of(g, FCW, l), y.fcb = weight_of(g, FCB, l);
    y.fcprojw = weight_of(g, FCPROJW, l), y.fcprojb = weight_of(g, FCPROJB, l);
    y.dln1w = grad_of(g, LN1W, l), y.dln1b = grad_of(g, LN1B, l);
    y.dqkvw = grad_of(g, QKVW, l), y.dqkvb = grad_of(g, QKVB, l);
    y.dattprojw = grad_of(g, ATTPROJW, l), y.dattprojb = grad_of(g, ATTPROJB, l);
    y.dln2w = grad_of(g, LN2W, l), y.dln2b = grad_of(g, LN2B, l);
    y.dfcw = grad_of(g, FCW, l), y.dfcb = grad_of(g, FCB, l);
    y.dfcprojw = grad_of(g, FCPROJW, l), y.dfcprojb = grad_of(g, FCPROJB, l);
    return y;
}

/* gpt_forward -- from tokens to the residual stream after the last layer, resid[L]; the head follows.
 *
 * Queued on the streams; returns at once. Activations stay for gpt_backward.
 */
static void gpt_forward(GPT* g) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, NHl = g->NHl, hs = C / g->config.NH, Ca = g->Ca, F = g->F;
    const size_t N = g->N, n = g->n, own = (size_t)g->r * n * (size_t)C;
    const floatX *wte = weight_of(g, WTE, 0), *wpe = weight_of(g, WPE, 0);
    FoOverlap** o = g->o;
    FoStaging* st = &g->staging;
    FoStream* s = g->compute;

    fo_fetch_encoder_forward(a->resid, wte, wpe, a->pos, g->fetch, st, C, o[E1]); // E1
    for (int l = 0; l < g->config.L; l++) {
        const Layer y = layer_of(g, l);
        fo_layernorm_forward(y.ln1 + own, y.mean1, y.rstd1, y.x, y.ln1w, y.ln1b, n, C, s);
        fo_allgather_matmul_forward(y.qkv, NULL, y.ln1, y.qkvw, y.qkvb, N, C, 3 * Ca, o[F1]); // F1
        fo_attention_matmul_reducescatter_forward(st, y.att, y.lse, y.qkv, y.attprojw, g->layout, NHl, hs, C,
                                                  1, o[F2]); // F2
        fo_reducescatter_end(o[F2], st, y.mid, y.x, y.attprojb, C, N);
        fo_layernorm_forward(y.ln2 + own, y.mean2, y.rstd2, y.mid, y.ln2w, y.ln2b, n, C, s);
        fo_allgather_matmul_forward(y.fch, a->gelu, y.ln2, y.fcw, y.fcb, N, C, F, o[F3]); // F3
        fo_matmul_reducescatter_forward(st, a->gelu, y.fcprojw, N, F, C, o[F4]);          // F4
        fo_reducescatter_end(o[F4], st, y.x_next, y.mid, y.fcprojb, C, N);
    }
}

// ---- head and loss ----------------------------------------------------------------------------------------
// where slice i of the head has its things: `rows` rows of all owners, their logits over this rank's
// vocabulary
typedef struct {
    size_t rows;
    floatX *lnf, *logits;
    FoSoftmaxStat* stats;
    const int* targets;
    float* losses;
    FoStaging staging;
} Slice;

static Slice slice_of(const GPT* g, int i) {
    const GPTActs* a = &g->acts;
    Slice x;
    size_t rows = g->N / (size_t)g->nslices, first = (size_t)i * rows, C = (size_t)g->config.C,
           P = (size_t)g->P;
    size_t row_nbytes = C * fo_dtype_nbytes(g->staging.wire);
    x.rows = rows;
    x.lnf = a->dall + first * C; // the residual stream's gradient comes to lie there when the head is done
    x.logits = a->logits + (size_t)(i % 2) * rows * (size_t)g->Vl;
    x.stats = a->stats + (size_t)(i % 2) * P * rows;
    x.targets = a->targets + first;
    x.losses = a->losses + first;
    x.staging = g->staging;
    x.staging.partial = (char*)g->staging.partial + first * row_nbytes;
    x.staging.received = (char*)g->staging.received + first / P * (P - 1) * row_nbytes;
    return x;
}

static void head_logits(GPT* g, int i) {
    const Slice x = slice_of(g, i);
    const size_t P = (size_t)g->P;
    FoSoftmaxStat* own = x.stats + (size_t)g->r * x.rows;
    fo_allgather_matmul_forward(x.logits, NULL, x.lnf, weight_of(g, WTE, 0), NULL, x.rows, g->config.C, g->Vl,
                                g->o[H1]); // H1
    fo_softmax_stats(own, x.logits, x.targets, x.rows, g->Vl, g->valid, g->v0, g->compute);
    fo_allgather_begin(g->o[i % 2 ? H2_NEXT : H2], x.stats, sizeof(FoSoftmaxStat), P * x.rows); // H2
}

/* gpt_head -- final layer norm, logits and loss, slice by slice; unless dscale is 0 also their backward pass,
 * down to dln, the gradient of the final layer norm's output.
 *
 * All ranks go through the same slice at the same time, since a row's softmax needs all of them; within a
 * slice the own rows come first in the gather and last in the reduce-scatter. The statistics of a slice
 * travel under the logits of the next, the last partial sums under the wgrad.
 */
static void gpt_head(GPT* g, float dscale) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, S = g->nslices;
    const size_t own = g->n / (size_t)S, own_nelem = own * (size_t)C;
    const floatX* x_last = a->resid + (size_t)g->config.L * g->n * (size_t)C;
    for (int i = 0; i < S; i++) {
        size_t first = (size_t)i * own;
        fo_layernorm_forward(slice_of(g, i).lnf + (size_t)g->r * own_nelem, a->lnf_mean + first,
                             a->lnf_rstd + first, x_last + first * (size_t)C, weight_of(g, LNFW, 0),
                             weight_of(g, LNFB, 0), own, C, g->compute);
    }
    head_logits(g, 0);
    for (int i = 0; i < S; i++) {
        Slice x = slice_of(g, i);
        if (i + 1 < S) { head_logits(g, i + 1); }
        fo_allgather_end(g->o[i % 2 ? H2_NEXT : H2]);
        fo_softmax_loss(x.losses, x.logits, x.stats, x.targets, dscale, x.rows, g->Vl, g->valid, g->v0, g->P,
                        g->compute);
        if (dscale == 0.0f) { continue; }
        fo_matmul_reducescatter_dgrad(&x.staging, x.logits, weight_of(g, WTE, 0), x.rows, C, g->Vl,
                                      g->o[H3]); // H3
        fo_matmul_wgrad(grad_of(g, WTE, 0), NULL, x.logits, x.lnf, x.rows, C, g->Vl, g->compute);
        fo_reducescatter_end(g->o[H3], &x.staging, a->dln + (size_t)i * own_nelem, NULL, NULL, C, x.rows);
    }
}

// mean loss of the batch, which every rank knows; waits for it
static float gpt_loss(GPT* g) {
    double sum = 0.0;
    fo_download(g->host_losses, g->acts.losses, g->N * sizeof(float), g->compute);
    fo_stream_sync(g->compute);
    for (size_t i = 0; i < g->N; i++) {
        sum += (double)g->host_losses[i];
    }
    return (float)(sum / (double)g->N);
}

// ---- backward ---------------------------------------------------------------------------------------------
/* gpt_backward -- all gradients, added to grads, from what gpt_forward and gpt_head have left. */
static void gpt_backward(GPT* g) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, NHl = g->NHl, hs = C / g->config.NH, Ca = g->Ca, F = g->F, sp = g->sp;
    const size_t N = g->N, n = g->n, own = (size_t)g->r * n * (size_t)C, row = (size_t)C * sizeof(floatX);
    const floatX* x_last = a->resid + (size_t)g->config.L * n * (size_t)C;
    floatX* dres = a->dall + own;
    FoOverlap** o = g->o;
    FoStaging* st = &g->staging;
    FoStream* s = g->compute;

    fo_zero(dres, n * row, s);
    fo_layernorm_backward(dres, grad_of(g, LNFW, 0), grad_of(g, LNFB, 0), a->dln, x_last,
                          weight_of(g, LNFW, 0), a->lnf_mean, a->lnf_rstd, n, C, s);
    for (int l = g->config.L - 1; l >= 0; l--) {
        const Layer y = layer_of(g, l);
        // FFN. With sp the gathered layer norm outputs were not kept: they come again, under the fc2 wgrad
        if (sp) { fo_layernorm_forward(y.ln2 + own, y.mean2, y.rstd2, y.mid, y.ln2w, y.ln2b, n, C, s); }
        fo_overlap_mark(o[B2]);
        fo_allgather_matmul_dgrad(a->dfch, a->dall, y.fch, y.fcprojw, N, F, C, o[B1]); // B1
        if (sp) { fo_allgather_begin(o[B2], y.ln2, row, N); }                          // B2
        fo_gelu_forward(a->gelu, y.fch, N * (size_t)F, s);
        fo_matmul_wgrad(y.dfcprojw, NULL, a->dall, a->gelu, N, F, C, s);
        fo_bias_backward(y.dfcprojb, dres, n, C, s);
        fo_matmul_reducescatter_dgrad(st, a->dfch, y.fcw, N, C, F, o[B3]); // B3
        if (sp) { fo_allgather_end(o[B2]); }
        fo_matmul_wgrad(y.dfcw, y.dfcb, a->dfch, y.ln2, N, C, F, s);
        fo_reducescatter_end(o[B3], st, a->dln, NULL, NULL, C, N);
        fo_layernorm_backward(dres, y.dln2w, y.dln2b, a->dln, y.mid, y.ln2w, y.mean2, y.rstd2, n, C, s);

        // attention, in the same way
        if (sp) { fo_layernorm_forward(y.ln1 + own, y.mean1, y.rstd1, y.x, y.ln1w, y.ln1b, n, C, s); }
        fo_overlap_mark(o[B5]);
        fo_allgather_matmul_attention_backward(a->dqkv, a->datt, a->dall, y.attprojw, y.qkv, y.att, y.lse,
                                               g->layout, NHl, hs, C, o[B4]); // B4
        if (sp) { fo_allgather_begin(o[B5], y.ln1, row, N); }                 // B5
        fo_matmul_wgrad(y.dattprojw, NULL, a->dall, y.att, N, Ca, C, s);
        fo_bias_backward(y.dattprojb, dres, n, C, s);
        fo_matmul_reducescatter_dgrad(st, a->dqkv, y.qkvw, N, C, 3 * Ca, o[B6]); // B6
        if (sp) { fo_allgather_end(o[B5]); }
        fo_matmul_wgrad(y.dqkvw, y.dqkvb, a->dqkv, y.ln1, N, C, 3 * Ca, s);
        fo_reducescatter_end(o[B6], st, a->dln, NULL, NULL, C, N);
        fo_layernorm_backward(dres, y.dln1w, y.dln1b, a->dln, y.x, y.ln1w, y.mean1, y.rstd1, n, C, s);
    }
    fo_fetch_encoder_backward_begin(dres, g->fetch, st, C, o[E2]); // E2
    fo_scatter_add_rows(grad_of(g, WPE, 0), dres, a->pos_dst, a->pos_start, a->pos_order, g->npos, C, s);
    fo_fetch_encoder_backward_end(grad_of(g, WTE, 0), g->fetch, st, C, o[E2]);
}

// ---- update -----------------------------------------------------------------------------------------------
// sums over ranks in rank order; stop: the largest. The only plain collective of a step.
static Scalars share_scalars(GPT* g, Scalars own) {
    Scalars all[FO_MAX_RANKS], sum = {0.0, 0.0, 0.0, 0.0};
    char* slots = (char*)g->acts.scalars;
    fo_upload(slots + (size_t)g->r * sizeof own, &own, sizeof own, g->comm);
    fo_allgather(g->tp, slots, sizeof own, g->comm);
    fo_download(all, slots, (size_t)g->P * sizeof own, g->comm);
    fo_stream_sync(g->comm);
    for (int p = 0; p < g->P; p++) {
        sum.square_sum += all[p].square_sum;
        sum.exposed_ms += all[p].exposed_ms;
        sum.comm_ms += all[p].comm_ms;
        sum.stop = all[p].stop > sum.stop ? all[p].stop : sum.stop;
    }
    return sum;
}

// milliseconds since the last call, of all operations: stood waiting, and what plain collectives would have
// taken
static void take_times(GPT* g, double* exposed_ms, double* comm_ms) {
    *exposed_ms = *comm_ms = 0.0;
    for (int i = 0; i < NSITES; i++) {
        *exposed_ms += g->o[i]->exposed_ms;
        *comm_ms += g->o[i]->comm_ms;
        fo_overlap_reset(g->o[i]);
    }
}

/* gpt_reduce -- sums the gradients of what every rank has whole (layer norms, positions, biases after a
 * reduction), B7, and tells the norm of all gradients; waits. A rank then has the sums of its share of them;
 * gpt_update spreads them.
 */
static Scalars gpt_reduce(GPT* g, double stop) {
    Scalars own = {0.0, 0.0, 0.0, stop};
    size_t nelem = replicated(g), share = nelem / (size_t)g->P;
    float* mine = g->grads + g->ts.ncut + (size_t)g->r * share;
    double* sum = (double*)(void*)((Scalars*)g->acts.scalars + g->P);
    fo_reducescatter_run(g->o[B7], &g->grad_staging, 1, nelem, NULL,
                         NULL); // B7, under the norm of the others
    fo_zero(sum, sizeof *sum, g->compute);
    fo_square_sum(sum, g->grads, g->ts.ncut, g->compute);
    fo_reducescatter_end_fp32(g->o[B7], &g->grad_staging, mine, 1, nelem);
    fo_square_sum(sum, mine, share, g->compute);
    fo_download(&own.square_sum, sum, sizeof *sum, g->compute);
    fo_stream_sync(g->compute);
    take_times(g, &own.exposed_ms, &own.comm_ms);
    return share_scalars(g, own);
}

// AdamW on every tensor, from gradients times grad_scale; the sums of B7 return under the update of the cut
// tensors. apply 0: only spreads (a skipped update).  Clears the gradients.
static void gpt_update(GPT* g, FoAdamw a, float weight_decay, int apply) {
    fo_allgather_begin(g->o[B7_BACK], g->grads + g->ts.ncut, sizeof(float), replicated(g));
    for (int cut = 1; cut >= 0; cut--) {
        if (!cut) { fo_allgather_end(g->o[B7_BACK]); }
        for (int i = 0; i < NTENSORS && apply; i++) {
            const Tensor* t = &g->ts.t[i];
            if ((t->cut != CUT_NONE) != cut) { continue; }
            a.weight_decay = t->decays ? weight_decay : 0.0f;
            fo_adamw_update(g->params + t->offset, g->master + t->offset, g->m + t->offset, g->v + t->offset,
                            g->grads + t->offset, (size_t)t->layers * tensor_local(t), a, g->compute);
        }
    }
    fo_zero(g->grads, (g->ts.ncut + replicated(g)) * sizeof(float), g->compute);
    fo_stream_sync(g->compute);
}

// ---- sampling ---------------------------------------------------------------------------------------------
// positions that a sampling batch of one sequence can have: whole chunks for every rank
static int sample_round(const GPT* g, int t) {
    int unit = g->P > 1 ? 2 * g->P * g->chunks : 1, block = (64 + unit - 1) / unit * unit;
    int most = (int)((size_t)g->B_max * (size_t)g->T_max / (size_t)unit) * unit;
    int rounded = (t + block - 1) / block * block;
    return rounded < most ? rounded : most;
}

/* gpt_next_logits -- logits [V] of the token that follows ids[0 ... t-1], the same on every rank; waits. */
static void gpt_next_logits(GPT* g, const int* ids, int t, float* logits, int* padded) {
    const int C = g->config.C, P = g->P, T = sample_round(g, t), r = g->r;
    const size_t widest = fo_cut((size_t)g->config.Vp, P, 1);
    memcpy(padded, ids, (size_t)t * sizeof(int));
    memset(padded + t, 0, (size_t)(T - t) * sizeof(int));
    gpt_batch(g, padded, NULL, 1, T);
    gpt_forward(g);
    const floatX* x = g->acts.resid + (size_t)g->config.L * g->n * (size_t)C;
    floatX* lnf = g->acts.dall;
    floatX* row = lnf + fo_layout_row(g->layout, 0, t - 1) * (size_t)C;
    fo_layernorm_forward(lnf + (size_t)r * g->n * (size_t)C, g->acts.lnf_mean, g->acts.lnf_rstd, x,
                         weight_of(g, LNFW, 0), weight_of(g, LNFB, 0), g->n, C, g->compute);
    fo_allgather_begin(g->o[H1], lnf, (size_t)C * sizeof(floatX), g->N);
    fo_allgather_end(g->o[H1]);
    fo_matmul_forward(g->acts.logits_row + (size_t)r * widest, row, weight_of(g, WTE, 0), NULL, 1, C, g->Vl,
                      FO_FLOATX, g->compute);
    fo_allgather_begin(g->o[H2], g->acts.logits_row, widest * sizeof(floatX), (size_t)P);
    fo_allgather_end(g->o[H2]);
    floatX* host = (floatX*)malloc((size_t)P * widest * sizeof(floatX));
    fo_require(host != NULL, "out of memory");
    fo_download(host, g->acts.logits_row, (size_t)P * widest * sizeof(floatX), g->compute);
    fo_stream_sync(g->compute);
    for (int p = 0; p < P; p++) {
        for (size_t v = g->first_row[p]; v < g->first_row[p + 1] && v < (size_t)g->config.V; v++) {
            logits[v] = fo_float(host[(size_t)p * widest + v - g->first_row[p]]);
        }
    }
    free(host);
}

// ---- a training run ---------------------------------------------------------------------------------------
// what a resumed run wants to find again beside weights and optimizer state. No times: a state file has the
// same bytes in every run
typedef struct {
    OutlierDetector loss, norm;
} TrainerState;

typedef struct {
    const TrainOptions* opt;
    FoGroup* world;
    int rank, step, first_step, nsteps, grad_accum;
    GPT gpt;
    DataLoader train, val;
    Tokenizer tokenizer;
    Logger logger;
    Schedule schedule;
    TrainerState state;
    double peak_tflops;  // of all ranks
    double tokens_per_s; // running mean, not bias corrected
    int nmeasured;
    double sum_ms;
} Trainer;

typedef struct {
    TrainOptions opt;
    const char* program;
    char err[TRAIN_ERR]; // what is wrong with the options
    int status;          // of the process
} Run;

// set by the handler; which signal it was
static volatile sig_atomic_t stop_signal;

static void on_signal(int sig) {
    stop_signal = sig;
}

/* Ends all ranks with the user's error. One that every rank has found is rank 0's to tell: the others give it
 * time, on a busy machine a launcher takes seconds to end processes. It does so by a signal, which our
 * handler takes.
 */
static void user_error(int rank, const char* err) {
    if (rank != 0 && sleep(8) != 0) { _exit(1); }
    fo_quit(1, "%s", err);
}

static int nearest_below(int x, int unit) {
    return x / unit * unit > 0 ? x / unit * unit : unit;
}

/* check_run -- can this model, batch and mode be cut across P ranks? 0, or -1 with the reason and what would
 * work.
 */
static int check_run(const TrainOptions* opt, GPTConfig c, char err[TRAIN_ERR]) {
    int P = opt->tp, B = opt->batch, T = opt->seq_len, m = P > 1 ? opt->overlap.m : 1;
    if (T > c.maxT) {
        return train_error(err, "-t %d: the model has positions for %d tokens: -t %d at most", T, c.maxT,
                           c.maxT);
    }
    if (P > c.NH) {
        return train_error(err,
                           "--tp %d: the model has %d heads, one for each rank at least: --tp %d at most", P,
                           c.NH, c.NH);
    }
    if (B % P != 0 && T % (2 * P) != 0) {
        return train_error(
            err, "--tp %d: cuts neither B=%d sequences nor T=%d tokens into 2*tp blocks: try -b %d or -t %d",
            P, B, T, (B + P - 1) / P * P, nearest_below(T, 2 * P));
    }
    if (B * T / P % m != 0) {
        return train_error(err, "--overlap %s:%d: a rank's %d tokens (B*T/tp) are not a multiple of %d",
                           fo_mode_name(opt->overlap.mode), m, B * T / P, m);
    }
    return 0;
}

static void print_model(const Trainer* tr, const GPT* g) {
    const TrainOptions* opt = tr->opt;
    GPTConfig c = g->config;
    report_row("device", "%s", fo_device_name(g->device));
    report_row("peak TFlops", "%.3f", tr->peak_tflops);
    report_row("precision", "%s", FO_FLOATX == FO_BF16 ? "BF16" : "FP32");
    report_rule();
    report_row("weight init method", "%s", opt->model);
    report_row("max_sequence_length T", "%d", c.maxT);
    report_row("vocab_size V", "%d", c.V);
    report_row("padded_vocab_size Vp", "%d", c.Vp);
    report_row("num_layers L", "%d", c.L);
    report_row("num_heads NH", "%d", c.NH);
    report_row("channels C", "%d", c.C);
    report_row("num_parameters", "%zu", g->ts.ntotal);
    report_rule();
    report_row("tensor parallel ranks", "%d, as %s", g->P,
               strcmp(fo_group_transport(tr->world), "mpi") ? "threads" : "processes");
    report_row("sequence parallel", "%d, %s", opt->sp,
               opt->batch % g->P ? "zig-zag shards" : "whole-sequence shards");
    report_row("overlap", "%s:%d %s, %s on the wire", fo_mode_name(opt->overlap.mode), g->chunks,
               opt->topology == FO_RING ? "ring" : "direct", opt->wire == FO_BF16 ? "bf16" : "fp32");
    if (opt->link.gbytes_s > 0.0) {
        report_row("link (emulated)", "%g GB/s, %g us", opt->link.gbytes_s, opt->link.us);
    }
    if (opt->pace > 0.0) { report_row("pace (emulated)", "%g TFLOP/s a rank", opt->pace); }
    report_rule();
}

// bytes of this rank's arrays, also returned; what it needs beside them: beside_nbytes
static size_t print_memory(const GPT* g) {
    size_t nelem = g->ts.ncut + replicated(g), nx = nelem * sizeof(floatX), nf = nelem * sizeof(float);
    size_t masters = FO_FLOATX == FO_FP32 ? 0 : nf, total = nx + nf + masters + 2 * nf + g->acts_nbytes;
    printf("memory of rank %d: %zu MiB for model parameters, %zu MiB for gradients, %zu MiB for AdamW's m, v "
           "and masters, %zu MiB for activations, in all %.1f MiB\n",
           g->r, nx >> 20, nf >> 20, (2 * nf + masters) >> 20, g->acts_nbytes >> 20,
           (double)total / 1048576.0);
    return total;
}

/* What P threads of a process need beside their arrays, as measured (cpu, models of 0.3 to 1 GB, P = 1, 2, 4,
 * either precision): the program and its libraries 14 MiB; a rank 8 MiB of stacks and scratch, and the
 * largest of what it takes for a while, the 8 Mi numbers with which its peak is measured.
 */
static size_t beside_nbytes(int P) {
    return ((size_t)14 << 20) + (size_t)P * (((size_t)8 << 20) + ((size_t)8 << 20) * sizeof(floatX));
}

// ---- files ------------------------------------------------------------------------------------------------
// opt's model as sizes and, if it is a file or a checkpoint to resume from, which; speak: name damaged
// checkpoints
static int find_model(const TrainOptions* opt, GPTConfig* c, char path[CHECKPOINT_PATH], int* step, int speak,
                      char err[TRAIN_ERR]) {
    int version;
    path[0] = 0;
    *step = 0;
    if (opt->resume && access(opt->out, F_OK) == 0) {
        char why[TRAIN_ERR];
        int found = checkpoint_find(opt->out, why);
        if (found < 0 && why[0]) { // starting anew would overwrite what is there
            return train_error(err, "--resume 1: %s; to start anew, leave it out", why);
        }
        if (found >= 0) {
            if (why[0] && speak) { printf("note: %s\n", why); }
            *step = found;
            checkpoint_path(path, opt->out, "model", found);
            return checkpoint_read_header(path, c, &version, err);
        }
    }
    int kind = model_parse(opt->model, c, err);
    if (kind == 1) {
        if (strlen(opt->model) >= CHECKPOINT_PATH) {
            return train_error(err, "-e: a path of over %d characters", CHECKPOINT_PATH);
        }
        strcpy(path, opt->model);
        return checkpoint_read_header(path, c, &version, err);
    }
    return kind;
}

static int load_weights(Trainer* tr, const char* path, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    CheckpointState st;
    char state_path[CHECKPOINT_PATH], why[TRAIN_ERR];
    int rc = 0;
    memset(&st, 0, sizeof st);
    if (tr->first_step > 0) { // the masters have every bit; the model file is them rounded
        checkpoint_path(state_path, tr->opt->out, "state", tr->first_step);
        rc = checkpoint_read_state(state_path, &st, &g->ts, g->params, &g->ts, g->m, g->v, g->master,
                                   g->compute, err);
        if (rc == 0 && st.trainer_nbytes != sizeof tr->state) {
            rc = train_error(err, "%s: was written by another version of this program", state_path);
        }
        if (rc == 0 && dataloader_restore(&tr->train, st.loader, st.loader_nbytes, why)) {
            rc = train_error(err, "%s: %s; -i and -a must be as they were", state_path, why);
        } else if (rc == 0 && why[0] && tr->rank == 0) {
            printf("note: %s\n", why);
        }
        if (rc == 0) { memcpy(&tr->state, st.trainer, sizeof tr->state); }
        checkpoint_state_free(&st);
    } else if (path[0]) {
        rc = checkpoint_read_model(path, &g->ts, g->params, &g->ts, g->master, g->compute, err);
    } else {
        weights_random(&g->ts, g->params, &g->ts, g->master, tr->opt->seed, g->compute);
    }
    return rc;
}

static int write_checkpoint(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    char path[CHECKPOINT_PATH];
    CheckpointState st;
    memset(&st, 0, sizeof st);
    st.step = tr->step;
    st.loader_nbytes = DATA_STATE_NBYTES;
    st.loader = malloc(st.loader_nbytes);
    fo_require(st.loader != NULL, "out of memory");
    dataloader_save(&tr->train, st.loader);
    st.trainer = &tr->state;
    st.trainer_nbytes = sizeof tr->state;
    if (tr->rank == 0) { printf("Writing checkpoint at step %d\n", tr->step); }
    if (tr->rank == 0 && checkpoint_remove(tr->opt->out, tr->step, err)) { return -1; }
    checkpoint_path(path, tr->opt->out, "model", tr->step);
    int rc = checkpoint_write_model(path, &g->ts, g->params, g->tp, g->comm, err);
    checkpoint_path(path, tr->opt->out, "state", tr->step);
    if (rc == 0) {
        rc = checkpoint_write_state(path, &g->ts, &st, g->m, g->v, g->master, g->tp, g->comm, err);
    }
    free(st.loader);
    if (rc == 0 && tr->rank == 0) { rc = checkpoint_write_done(tr->opt->out, tr->step, err); }
    if (rc != 0 && tr->rank == 0) {
        char why[TRAIN_ERR];
        checkpoint_remove(tr->opt->out, tr->step, why); // a model without its state
    }
    if (rc == 0 && tr->rank == 0) {
        rc = checkpoint_prune(tr->opt->out, tr->step, tr->opt->keep_checkpoints,
                              tr->opt->major_checkpoint_every, err);
    }
    return rc;
}

// has a rank got a signal? All ranks ask at the same place, and hear the same
static int stopping(GPT* g) {
    Scalars own = {0.0, 0.0, 0.0, (double)stop_signal};
    return share_scalars(g, own).stop != 0.0;
}

// ---- the loop ---------------------------------------------------------------------------------------------
static int validate(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    const TrainOptions* opt = tr->opt;
    int all = (int)(tr->val.ntok / ((size_t)opt->batch * (size_t)opt->seq_len));
    int nbatches = opt->val_batches < 0 || opt->val_batches > all ? all : opt->val_batches;
    double sum = 0.0;
    if (dataloader_reset(&tr->val, err)) { return -1; }
    for (int i = 0; i < nbatches; i++) {
        if (stopping(g)) { return 0; } // after the next step
        if (dataloader_next_batch(&tr->val, err)) { return -1; }
        gpt_batch(g, tr->val.inputs, tr->val.targets, opt->batch, opt->seq_len);
        gpt_forward(g);
        gpt_head(g, 0.0f);
        sum += (double)gpt_loss(g);
    }
    double exposed, comm; // of validation: not a step's
    take_times(g, &exposed, &comm);
    if (tr->rank != 0) { return 0; }
    printf("val loss %f\n", sum / nbatches);
    return logger_val(&tr->logger, tr->step, (float)(sum / nbatches), err);
}

// positions that a sample looks back on: what was trained, as far as activations reach
static int sample_window(const GPT* g) {
    int room = sample_round(g, g->T_max);
    return room < g->T_max ? room : g->T_max;
}

// prints a sample: every rank draws the same tokens from the same logits
static void sample(Trainer* tr) {
    GPT* g = &tr->gpt;
    const TrainOptions* opt = tr->opt;
    int most = opt->sample_length, window = sample_window(g), n = 0;
    if (window < 1) {
        if (tr->rank == 0) {
            printf("no sample: the batch's %d tokens have no room for a sequence cut into 2*tp*M=%d chunks\n",
                   g->B_max * g->T_max, 2 * g->P * g->chunks);
        }
        return;
    }
    int* ids = (int*)malloc((size_t)(most + sample_round(g, window) + 1) * sizeof(int));
    float* logits = (float*)malloc((size_t)g->config.V * sizeof(float));
    fo_require(ids && logits, "out of memory");
    n = opt->prompt[0] ? tokenizer_encode(&tr->tokenizer, opt->prompt, ids, most - 1) : 0;
    int prompted = n > 0;
    if (!prompted) { ids[n++] = tr->tokenizer.V > 0 ? tr->tokenizer.eot : g->config.V - 1; }
    if (tr->rank == 0) { printf("generating:\n---\n"); }
    for (int i = 0; i < n && prompted && tr->rank == 0; i++) {
        tokenizer_print(&tr->tokenizer, ids[i], stdout);
    }
    uint64_t rng = 1337;
    while (n < most && !stopping(g)) {
        int first = n > window ? n - window : 0; // a longer text: its last tokens
        gpt_next_logits(g, ids + first, n - first, logits, ids + most);
        ids[n] = sampler_draw(logits, g->config.V, opt->temperature, opt->top_k, random_f32(&rng));
        if (tr->rank == 0) {
            tokenizer_print(&tr->tokenizer, ids[n], stdout);
            fflush(stdout);
        }
        n++;
    }
    if (tr->rank == 0) { printf("\n---\n"); }
    double exposed, comm;
    take_times(g, &exposed, &comm);
    free(ids);
    free(logits);
}

// one line a step, as llm.c's, ended by what this project is about
static int print_step(Trainer* tr, float loss, double loss_z, float norm, double norm_z, float lr,
                      double seconds, Scalars sum, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    GPTConfig c = tr->gpt.config;
    double tokens = (double)opt->total_batch, rate = tokens / seconds, P = (double)tr->gpt.P;
    double flops =
        6.0 * (double)tr->gpt.ts.ntotal + 6.0 * c.L * (double)c.C * opt->seq_len; // a token; llm.c's formula
    if (tr->step > tr->first_step) { // the first step of a run makes primitives and warms up
        tr->tokens_per_s = 0.95 * tr->tokens_per_s + 0.05 * rate;
        tr->nmeasured++;
        tr->sum_ms += 1e3 * seconds;
        rate = tr->tokens_per_s / (1.0 - pow(0.95, tr->nmeasured));
    }
    if (tr->rank != 0) { return 0; }
    printf("step %4d/%d | loss %7.6f (%+.2fz)| norm %6.4f (%+.2fz)| lr %.2e | %.2f ms | %.1f%% %s MFU | %.0f "
           "tok/s | comm %.2f ms exposed %.2f ms\n",
           tr->step + 1, tr->nsteps, (double)loss, loss_z, (double)norm, norm_z, (double)lr, 1e3 * seconds,
           100.0 * flops * tokens / seconds / (tr->peak_tflops * 1e12),
           FO_FLOATX == FO_BF16 ? "bf16" : "fp32", rate, sum.comm_ms / P, sum.exposed_ms / P);
    fflush(stdout);
    return logger_train(&tr->logger, tr->step, loss, lr, norm, err);
}

/* train_step -- one update from total_batch tokens. Returns the signal that some rank has got, 0, or -1 with
 * err.
 */
static int train_step(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    const TrainOptions* opt = tr->opt;
    double start = fo_now(), loss = 0.0;
    for (int micro = 0; micro < tr->grad_accum; micro++) {
        if (opt->overfit && dataloader_reset(&tr->train, err)) { return -1; }
        if (dataloader_next_batch(&tr->train, err)) { return -1; }
        gpt_batch(g, tr->train.inputs, tr->train.targets, opt->batch, opt->seq_len);
        gpt_forward(g);
        gpt_head(g, 1.0f / ((float)g->N * (float)tr->grad_accum));
        gpt_backward(g);
        loss += (double)gpt_loss(g) / tr->grad_accum;
    }
    Scalars sum = gpt_reduce(g, (double)stop_signal);
    float norm = (float)sqrt(sum.square_sum), lr = schedule_lr(&tr->schedule, tr->step);
    // an update by gradients that are not finite would leave no weight that is
    if (!(isfinite(loss) && isfinite(norm)) && !opt->ignore_nan) {
        return train_error(err,
                           "step %d: the loss is %f, the gradient's norm %f: a smaller -l, a longer -u, or "
                           "--ignore-nan 1 to go on",
                           tr->step + 1, loss, (double)norm);
    }
    double loss_z = outlier_update(&tr->state.loss, loss),
           norm_z = outlier_update(&tr->state.norm, (double)norm);
    int skip_loss = opt->skip_loss_z > 0.0f && loss_z > (double)opt->skip_loss_z;
    int skip_norm = opt->skip_grad_z > 0.0f && norm_z > (double)opt->skip_grad_z;
    if (tr->rank == 0 && skip_loss) { printf("skipping update due to loss z-score of %f\n", loss_z); }
    if (tr->rank == 0 && !skip_loss && skip_norm) {
        printf("skipping update due to grad z-score of %f\n", norm_z);
    }
    FoAdamw a = {lr, 0.9f, 0.95f, 1e-8f, 0.0f, norm > 1.0f ? 1.0f / norm : 1.0f, tr->step + 1};
    gpt_update(g, a, opt->weight_decay, !skip_loss && !skip_norm);
    if (print_step(tr, (float)loss, loss_z, norm, norm_z, lr, fo_now() - start, sum, err)) { return -1; }
    return (int)sum.stop;
}

/* train_loop -- llm.c's order: at step s = 0 ... N, after s updates: validate, sample, checkpoint, then the
 * next update. Returns the signal that ended it, 0, or -1 with err.
 */
static int train_loop(Trainer* tr, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    int stop = 0;
    for (tr->step = tr->first_step;; tr->step++) {
        int s = tr->step, last = s >= tr->nsteps || stop;
        if (opt->val_every > 0 && !stop && (s % opt->val_every == 0 || last) && validate(tr, err)) {
            return -1;
        }
        if (opt->sample_every > 0 && !stop && ((s > 0 && s % opt->sample_every == 0) || last)) { sample(tr); }
        if (opt->out[0] && s > tr->first_step &&
            (last || (opt->checkpoint_every > 0 && s % opt->checkpoint_every == 0))) {
            if (write_checkpoint(tr, err)) { return -1; }
        }
        if (last) { return stop; }
        stop = train_step(tr, err);
        if (stop < 0) { return -1; }
    }
}

// ---- start ------------------------------------------------------------------------------------------------
static int open_data(Trainer* tr, GPTConfig c, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    int B = opt->batch, T = opt->seq_len, V = c.V;
    const char* train = opt->overfit ? opt->val_data : opt->train_data;
    if (dataloader_init(&tr->train, train, B, T, 0, 1, !opt->overfit, V, err)) { return -1; }
    if (opt->val_every > 0 && dataloader_init(&tr->val, opt->val_data, B, T, 0, 1, 0, V, err)) { return -1; }
    tr->nsteps = opt->max_steps >= 0 ? opt->max_steps : (int)(tr->train.ntok / (size_t)opt->total_batch);
    tr->grad_accum = opt->total_batch / (B * T);
    Schedule schedule = {opt->schedule, opt->lr, opt->final_lr_fraction, opt->warmup, tr->nsteps};
    tr->schedule = schedule;
    if (tr->nsteps == 0 && opt->max_steps < 0) {
        return train_error(err, "%s: its %zu tokens do not make one step of -d %d: a smaller -d, or -x STEPS",
                           train, tr->train.ntok, opt->total_batch);
    }
    char warning[TRAIN_ERR];
    int bad = tokenizer_init(&tr->tokenizer, opt->tokenizer, warning);
    if (!bad && tr->tokenizer.V > V) { // its tokens are no tokens of the model
        bad = train_error(warning, "--tokenizer %s has %d tokens, the model V=%d", opt->tokenizer,
                          tr->tokenizer.V, V);
        tokenizer_free(&tr->tokenizer);
    }
    if (bad && opt->prompt[0]) { return train_error(err, "--prompt needs a tokenizer: %s", warning); }
    if (bad && tr->rank == 0 && opt->sample_every > 0) { printf("%s: samples are token ids\n", warning); }
    return 0;
}

// rank r of opt->tp: everything but the training
static void rank_open(Trainer* tr, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    GPTConfig c;
    char path[CHECKPOINT_PATH];
    memset(&c, 0, sizeof c);
    // all that can be wrong, before a folder is made and memory taken
    if (find_model(opt, &c, path, &tr->first_step, tr->rank == 0, err) || check_run(opt, c, err) ||
        open_data(tr, c, err)) {
        user_error(tr->rank, err);
    }
    if (opt->out[0] && tr->rank == 0 && checkpoint_prepare_folder(opt->out, err)) { user_error(0, err); }
    FoDevice* device = fo_device_open(tr->rank, fo_group_nlocal(tr->world));
    if (opt->link.gbytes_s > 0.0) { fo_group_link(tr->world, opt->link.gbytes_s, opt->link.us); }
    gpt_open(&tr->gpt, c, opt, tr->world, device);
    // a sample goes on from the prompt by one token at least
    if (tokenizer_check(&tr->tokenizer, opt->prompt, opt->sample_length - 1, err) ||
        load_weights(tr, path, err)) {
        user_error(tr->rank, err);
    }
    if (logger_init(&tr->logger, opt->out, tr->rank, tr->first_step > 0, err)) { user_error(tr->rank, err); }
    // all at once, as they will compute; then what a link does while nothing else runs
    fo_group_barrier(tr->world);
    Scalars peak = {opt->pace > 0.0 ? opt->pace : fo_device_peak_tflops(device), 0.0, 0.0, 0.0};
    tr->peak_tflops = share_scalars(&tr->gpt, peak).square_sum;
    if (opt->link.gbytes_s <= 0.0) { fo_group_measure(tr->world, tr->gpt.comm); }
    fo_device_pace(device, opt->pace);
}

static void print_start(const Trainer* tr) {
    const GPT* g = &tr->gpt;
    const TrainOptions* opt = tr->opt;
    report_options(opt);
    print_model(tr, g);
    report_row("train_num_batches", "%d", tr->nsteps);
    report_rule();
    if (fo_device_hint(g->device)) { printf("note: %s\n", fo_device_hint(g->device)); }
    if (g->config.NH % g->P) {
        printf("note: %d heads over %d ranks: some have one more\n", g->config.NH, g->P);
    }
    printf("num_parameters: %zu => bytes: %zu\n", g->ts.ntotal, g->ts.ntotal * sizeof(floatX));
    print_memory(g);
    printf("batch_size B=%d * seq_len T=%d and total_batch_size=%d\n=> setting grad_accum_steps=%d\n",
           opt->batch, opt->seq_len, opt->total_batch, tr->grad_accum);
    if (tr->first_step) { printf("resuming at step %d\n", tr->first_step); }
    fflush(stdout);
}

static void rank_main(FoGroup* world, void* arg) {
    Run* run = (Run*)arg;
    char err[TRAIN_ERR] = "";
    Trainer* tr = (Trainer*)calloc(1, sizeof *tr);
    fo_require(tr != NULL, "out of memory");
    tr->opt = &run->opt, tr->world = world, tr->rank = fo_group_rank(world);
    rank_open(tr, err);
    if (tr->rank == 0) { print_start(tr); }
    int stop = train_loop(tr, err);
    if (stop < 0) { user_error(tr->rank, err); }
    if (tr->rank == 0) {
        int n = tr->step - tr->first_step - 1;
        if (n > 0) { printf("total average iteration time: %f ms\n", tr->sum_ms / n); }
        if (stop) { printf("stopped by signal %d after step %d\n", stop, tr->step); }
        run->status = stop ? 128 + stop : 0;
    }
    fo_group_barrier(world);
    FoDevice* device = tr->gpt.device;
    gpt_close(&tr->gpt);
    fo_device_close(device);
    dataloader_free(&tr->train);
    dataloader_free(&tr->val);
    tokenizer_free(&tr->tokenizer);
    free(tr);
}

/* dry_run -- what would be done, without doing it: parameters, memory of each rank, the plan of each
 * operation.
 */
static int dry_run(const TrainOptions* opt, char err[TRAIN_ERR]) {
    GPTConfig c;
    char path[CHECKPOINT_PATH], text[8192]; // a plan of 16 ranks and 16 sub-chunks has over 5,000 characters
    int step, P = opt->tp;
    GPT g;
    memset(&c, 0, sizeof c);
    memset(&g, 0, sizeof g);
    if (find_model(opt, &c, path, &step, 1, err) || check_run(opt, c, err)) { return -1; }
    report_options(opt);
    printf("%-10s %6s %20s %20s %20s\n", "tensor", "layers", "shape", "on rank 0", "parameters");
    gpt_sizes(&g, c, opt, P, 0);
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor* t = &g.ts.t[i];
        char shape[40], local[40];
        snprintf(shape, sizeof shape, "%zu x %zu", t->rows, t->cols);
        snprintf(local, sizeof local, "%zu x %zu", t->local_rows, t->local_cols);
        printf("%-10s %6d %20s %20s %20zu\n", t->name, t->layers, shape, local,
               (size_t)t->layers * t->rows * t->cols);
    }
    printf("%-10s %69zu\n", "all", g.ts.ntotal);
    size_t total = beside_nbytes(P);
    for (int r = 0; r < P; r++) {
        gpt_sizes(&g, c, opt, P, r);
        gpt_carve(&g, opt->wire);
        total += print_memory(&g);
    }
    printf("memory of the process, ranks as threads: about %zu MiB, of them %zu for libraries, threads and "
           "buffers\n",
           total >> 20, beside_nbytes(P) >> 20);
    for (int i = 0; i < NSITES; i++) {
        FoPlan plan;
        if (fo_plan_init(&plan, SITES[i].kind, opt->overlap.mode, site_chunks(&g, i), site_topology(opt, i),
                         P, 0, err)) {
            return -1;
        }
        printf("%s %s\n", SITES[i].name, fo_plan_print(&plan, text, sizeof text));
        fo_plan_free(&plan);
    }
    return 0;
}

#ifndef TESTING
// all that main can say without training; one of the processes that were started says it
static void speak_main(FoGroup* world, void* arg) {
    Run* run = (Run*)arg;
    if (fo_group_rank(world) != 0) { return; }
    int bad = run->err[0] != 0;
    if (!bad && run->opt.help) {
        options_help(stdout, run->program);
    } else if (!bad) {
        bad = dry_run(&run->opt, run->err);
    }
    if (bad) { fo_quit(1, "%s", run->err); }
}

int main(int argc, char** argv) {
    static Run run;
    run.program = argv[0];
    if (options_parse(&run.opt, argc, argv, run.err) || run.opt.help || run.opt.dry_run) {
        fo_ranks_run(fo_ranks_launched(), speak_main, &run);
        return 0;
    }
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    signal(SIGUSR1, on_signal); // mpirun hands it on, and kills soon after the other two
    signal(SIGXFSZ, SIG_IGN);   // a full quota is an error of write, told in one line
    fo_ranks_run(run.opt.tp, rank_main, &run);
    return run.status;
}
#endif
