/* train_gpt.cu -- trains a GPT-2 class model over dp x up x tp ranks; each collective of a step is a flash
 * primitive.
 *
 * Read gpt_micro and what it calls, forward_layers, gpt_head, backward_layers: flat lists of calls, the rows
 * of the table in doc/overlap.md (F1 ... D3) in the margin. Then gpt_reduce and gpt_update, and train_step,
 * the loop. No kernel, no device call: plain C that is also C++. The rank's sizes and memory are in
 * train/gpt.h; files and reports of a run in train/run.h; text in train/generate.h.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "train/generate.h"
#include "train/nonfinite.h"
#include "train/run.h"

// ---- batch ------------------------------------------------------------------------------------------------
/* gpt_batch -- the tokens that the next forward pass is about: ids and targets [B, T] in natural order.
 *
 * Rows are in the order of the layout: whole sequences where tp divides B, else, and always with up, zig-zag.
 * The up group cuts them into Nt rows each, the tp group those into n. targets may be NULL (generation).
 */
void gpt_batch(GPT* g, const int* ids, const int* targets, int B, int T) {
    const Mesh* m = &g->mesh;
    const size_t N = (size_t)B * (size_t)T, Nt = N / (size_t)m->up, n = Nt / (size_t)m->tp;
    FoLayout layout = {B, T, m->up * m->tp, m->up > 1 || B % m->tp != 0};
    g->N = N, g->Nt = Nt, g->n = n, g->layout = layout;
    g->nslices = gpt_head_slices(Nt, m->tp, g->head_chunks);
    int *row_ids = g->host_ints, *head_targets = row_ids + Nt, *pos = head_targets + Nt;
    int *dst = pos + n, *start = dst + n, *order = start + n + 1, nuniq = 0, nth = 0;
    start[0] = 0;
    for (int t = 0; t < T; t++) {
        int begin = nth;
        for (int b = 0; b < B; b++) {
            size_t row = fo_layout_row(layout, b, t), from = (size_t)b * (size_t)T + (size_t)t;
            if (row / Nt != (size_t)m->u) { continue; } // another up rank's
            row %= Nt;
            row_ids[row] = ids[from];
            head_targets[gpt_head_place(g, row)] = targets ? targets[from] : 0;
            if (row / n == (size_t)m->t) {
                size_t i = row % n;
                // beyond: rows that only fill up, when generating
                pos[i] = t < g->config.maxT ? t : g->config.maxT - 1;
                order[nth++] = (int)i;
            }
        }
        if (nth > begin) {
            dst[nuniq++] = t;
            start[nuniq] = nth;
        }
    }
    g->npos = (size_t)nuniq;
    g->rows_known = 0;
    FoStream* s = g->compute;
    fo_upload(g->acts.targets, head_targets, Nt * sizeof(int), s);
    fo_upload(g->acts.pos, pos, n * sizeof(int), s);
    fo_upload(g->acts.pos_dst, dst, n * sizeof(int), s);
    fo_upload(g->acts.pos_start, start, (n + 1) * sizeof(int), s);
    fo_upload(g->acts.pos_order, order, n * sizeof(int), s);
    fo_fetch_set(g->fetch, row_ids, Nt, g->first_row, m->tp, m->t, s);
}

// the embedding's part of wte's gradient, if it is under way, is added to the rows that this rank owns
static void end_rows(GPT* g) {
    if (!g->rows_travel) { return; }
    const size_t C = (size_t)g->config.C, first = fo_cut((size_t)g->Vl, g->mesh.rp, g->mesh.p);
    float* dwte = gpt_grad(g, WTE, 0);
    fo_sparse_reduce_end(g->sparse, g->zero == 2 ? dwte : dwte + first * C, (int)C, g->o[D2_ROWS]); // D2 rows
    g->rows_travel = 0;
}

/* gpt_batch_replicas -- the tokens of all replicas, for the rows of wte (D3) and of its gradient (D2) that
 * they will exchange. ids: this dp rank's, [B, T] as in gpt_batch, which goes before. Other dp ranks send
 * theirs.
 */
static void gpt_batch_replicas(GPT* g, const int* ids) {
    const Mesh* m = &g->mesh;
    const size_t N = g->N;
    int *all = g->host_ids, *by_replica = all + (size_t)m->dp * N;
    if (m->rp == 1) { return; }
    end_rows(g); // of ZeRO 2's micro-step before: its lists are written over
    memcpy(all + (size_t)m->d * N, ids, N * sizeof(int));
    if (m->dp > 1) {
        FoStream* s = g->comm[GROUP_RP];
        fo_stream_label(s, "ids");
        fo_upload(g->acts.ids + (size_t)m->d * N, ids, N * sizeof(int), s);
        fo_allgather(g->dp, g->acts.ids, N * sizeof(int), s);
        fo_download(all, g->acts.ids, (size_t)m->dp * N * sizeof(int), s);
        fo_stream_sync(s);
        fo_stream_label(s, NULL);
    }
    for (int b = 0; b < g->layout.B; b++) {
        for (int t = 0; t < g->layout.T; t++) {
            size_t row = fo_layout_row(g->layout, b, t), from = (size_t)b * (size_t)g->layout.T + (size_t)t;
            for (size_t d = 0; d < (size_t)m->dp; d++) {
                by_replica[d * N + row] = all[d * N + from]; // up ranks' rows follow each other
            }
        }
    }
    fo_sparse_set(g->sparse, by_replica, g->Nt, (size_t)g->v0, m->rp, m->p, g->compute);
    g->rows_known = 1;
}

// ---- forward ----------------------------------------------------------------------------------------------
// one layer's slices of everything
typedef struct {
    floatX *x, *x_next, *mid, *ln1, *qkv, *att, *att_tokens, *ln2, *fch, *gelu, *ln1_own, *ln2_own;
    float *mean1, *rstd1, *mean2, *rstd2, *lse;
    const floatX *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw,
        *fcprojb;
    float *dln1w, *dln1b, *dqkvb, *dattprojb, *dln2w, *dln2b, *dfcb, *dfcprojb;
} Layer;

static Layer layer_of(const GPT* g, int l) {
    const GPTActs* a = &g->acts;
    const size_t L = (size_t)l, C = (size_t)g->config.C, n = g->n, N = g->N, Nt = g->Nt, Cu = (size_t)g->Cu;
    const size_t i = g->recompute == 3 ? 0 : L;            // where the layer's activations are kept
    const size_t kept = g->keep_gathered ? L * Nt * C : 0; // and the gathered layer norm outputs
    Layer y;
    y.x = a->resid + L * n * C, y.x_next = a->resid + (L + 1) * n * C, y.mid = a->mid + i * n * C;
    y.ln1 = a->ln1_all + kept, y.ln2 = a->ln2_all + kept;
    y.ln1_own = g->keep_own ? a->ln1_own + L * n * C : NULL;
    y.ln2_own = g->keep_own ? a->ln2_own + L * n * C : NULL;
    y.qkv = a->qkv + i * N * 3 * Cu, y.att = a->att + i * N * Cu, y.lse = a->lse + i * N * (size_t)g->NHu;
    y.att_tokens = a->att_tokens ? a->att_tokens + i * Nt * (size_t)g->Ca : NULL;
    y.fch = a->fch + i * Nt * (size_t)g->F;
    y.gelu = a->gelu + (g->recompute == 0 ? L * Nt * (size_t)g->F : 0);
    y.mean1 = a->ln1_mean + i * n, y.rstd1 = a->ln1_rstd + i * n, y.mean2 = a->ln2_mean + i * n;
    y.rstd2 = a->ln2_rstd + i * n;
    y.ln1w = gpt_weight(g, LN1W, l), y.ln1b = gpt_weight(g, LN1B, l);
    y.qkvw = gpt_weight(g, QKVW, l), y.qkvb = gpt_weight(g, QKVB, l);
    y.attprojw = gpt_weight(g, ATTPROJW, l), y.attprojb = gpt_weight(g, ATTPROJB, l);
    y.ln2w = gpt_weight(g, LN2W, l), y.ln2b = gpt_weight(g, LN2B, l);
    y.fcw = gpt_weight(g, FCW, l), y.fcb = gpt_weight(g, FCB, l);
    y.fcprojw = gpt_weight(g, FCPROJW, l), y.fcprojb = gpt_weight(g, FCPROJB, l);
    y.dln1w = gpt_grad(g, LN1W, l), y.dln1b = gpt_grad(g, LN1B, l), y.dqkvb = gpt_grad(g, QKVB, l);
    y.dattprojb = gpt_grad(g, ATTPROJB, l);
    y.dln2w = gpt_grad(g, LN2W, l), y.dln2b = gpt_grad(g, LN2B, l), y.dfcb = gpt_grad(g, FCB, l);
    y.dfcprojb = gpt_grad(g, FCPROJB, l);
    return y;
}

// the layer up to fc2; the backward pass of -r 3 does it again
static void forward_to_gelu(GPT* g, const Layer y) {
    const GPTActs* a = &g->acts;
    const FoHeads* h = &g->heads;
    const int C = g->config.C;
    const size_t N = g->Nt, n = g->n, own = (size_t)g->mesh.t * n * (size_t)C;
    FoOverlap** o = g->o;
    FoStaging* st = &g->staging;
    FoStream* s = g->compute;
    FoColumns qkv;

    fo_layernorm_forward(y.ln1 + own, y.mean1, y.rstd1, y.x, y.ln1w, y.ln1b, n, C, s);
    if (y.ln1_own) { fo_copy(y.ln1_own, y.ln1 + own, n * (size_t)C * sizeof(floatX), s); }
    if (g->mesh.up == 1) {
        fo_allgather_matmul_begin(&qkv, y.qkv, y.ln1, y.qkvw, y.qkvb, N, C, 3 * g->Ca, o[F1]); // F1
        fo_attention_matmul_reducescatter_forward(st, y.att, y.lse, &qkv, y.attprojw, g->layout, g->NHu,
                                                  h->hs, C, 1, o[F2]); // F2
    } else {
        fo_allgather_matmul_alltoall_forward(y.qkv, a->up_send, y.ln1, y.qkvw, y.qkvb, h, N, C, o[F1],
                                             o[U1]); // F1, U1
        fo_attention_alltoall_matmul_reducescatter_forward(st, y.att, y.att_tokens, a->sums, y.lse, y.qkv,
                                                           y.attprojw, g->layout, h, C, o[U2],
                                                           o[F2]); // U2, F2
    }
    fo_reducescatter_end(o[F2], st, y.mid, y.x, y.attprojb, C, N);
    fo_layernorm_forward(y.ln2 + own, y.mean2, y.rstd2, y.mid, y.ln2w, y.ln2b, n, C, s);
    if (y.ln2_own) { fo_copy(y.ln2_own, y.ln2 + own, n * (size_t)C * sizeof(floatX), s); }
    fo_allgather_matmul_forward(y.fch, y.gelu, y.ln2, y.fcw, y.fcb, N, C, g->F, o[F3]); // F3
}

// from tokens to resid[0]
static void forward_embedding(GPT* g) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, rows_first = g->weights_wait && g->rows_known;
    const floatX* wte = gpt_weight(g, WTE, 0);
    FoOverlap** o = g->o;

    if (rows_first) { wte = fo_sparse_fetch_begin(g->sparse, wte, C, o[D3_ROWS]); } // D3 rows
    if (!(rows_first && g->use_graphs)) { gpt_send_weights(g); }                    // D3
    fo_allgather_end(rows_first ? o[D3_ROWS] : g->d3[0]);
    fo_fetch_encoder_forward(a->resid, wte, rows_first, gpt_weight(g, WPE, 0), a->pos, g->fetch, &g->staging,
                             C, o[E1]); // E1
}

static void forward_layers(GPT* g) {
    const int C = g->config.C;
    FoOverlap** o = g->o;
    FoStaging* st = &g->staging;

    gpt_send_weights(g); // D3: in a graph they leave with its first layer
    for (int l = 0; l < g->config.L; l++) {
        const Layer y = layer_of(g, l);
        fo_allgather_end(g->d3[l + 1]); // D3
        forward_to_gelu(g, y);
        if (g->cache) {
            const size_t nelem = 2 * (size_t)g->layout.B * (size_t)g->room * (size_t)g->Cu;
            fo_attention_cache(g->cache + (size_t)l * nelem, y.qkv, g->layout, g->room, g->NHu, g->heads.hs,
                               g->compute);
        }
        fo_matmul_reducescatter_forward(st, y.gelu, y.fcprojw, g->Nt, g->F, C, o[F4]); // F4
        fo_reducescatter_end(o[F4], st, y.x_next, y.mid, y.fcprojb, C, g->Nt);
    }
    fo_allgather_end(g->d3[0]); // D3: all of wte, for the head
}

/* gpt_forward -- from tokens to the residual stream after the last layer, resid[L]; the head follows.
 *
 * Queued on the streams; returns at once. Activations stay for the backward pass. Weights that the last
 * update left with other ranks (D3) travel under it and are waited for where they are first used: of wte the
 * rows of these tokens ahead of everything, if all ranks know them (gpt_batch_replicas), the whole of it
 * last.
 */
void gpt_forward(GPT* g) {
    forward_embedding(g);
    forward_layers(g);
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
    const size_t rows = g->Nt / (size_t)g->nslices, first = (size_t)i * rows, tp = (size_t)g->mesh.tp;
    const size_t C = (size_t)g->config.C, row_nbytes = C * fo_dtype_nbytes(g->staging.wire);
    x.rows = rows;
    x.lnf = a->dall + first * C; // the residual stream's gradient comes to lie there when the head is done
    x.logits = a->logits + (size_t)(i % 2) * rows * (size_t)g->Vl;
    x.stats = a->stats + (size_t)(i % 2) * tp * rows;
    x.targets = a->targets + first;
    x.losses = a->losses + first;
    x.staging = g->staging;
    x.staging.partial = (char*)g->staging.partial + first * row_nbytes;
    x.staging.received = (char*)g->staging.received + first / tp * (tp - 1) * row_nbytes;
    return x;
}

static void head_logits(GPT* g, int i) {
    const Slice x = slice_of(g, i);
    const size_t tp = (size_t)g->mesh.tp;
    const int C = g->config.C;
    FoSoftmaxStat* own = x.stats + (size_t)g->mesh.t * x.rows;
    fo_allgather_matmul_forward(x.logits, NULL, x.lnf, gpt_weight(g, WTE, 0), NULL, x.rows, C, g->Vl,
                                g->o[H1]); // H1
    fo_softmax_stats(own, x.logits, x.targets, x.rows, g->Vl, g->valid, g->v0, g->compute);
    fo_allgather_begin(g->o[i % 2 ? H2_NEXT : H2], x.stats, sizeof(FoSoftmaxStat), tp * x.rows); // H2
}

/* gpt_head -- final layer norm, logits and loss, slice by slice; unless dscale is 0 also their backward pass,
 * down to dln, the gradient of the final layer norm's output.
 *
 * All ranks go through the same slice at the same time, since a row's softmax needs all of them; within a
 * slice the own rows come first in the gather and last in the reduce-scatter. The statistics of a slice
 * travel under the logits of the next, the last partial sums under the wgrad. push: gradients go to the
 * replicas that own them (gpt_micro).
 */
static void gpt_head(GPT* g, float dscale, int push) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, S = g->nslices;
    const size_t own = g->n / (size_t)S, own_nelem = own * (size_t)C;
    const floatX* x_last = a->resid + (size_t)g->config.L * g->n * (size_t)C;
    // in ZeRO 2 a rank keeps its share alone: the sum to be is made elsewhere
    float* dwte = g->zero == 2 ? a->grad_temp[FO_GRAD_SLOTS] : gpt_grad(g, WTE, 0);
    if (g->zero == 2 && dscale != 0.0f) {
        fo_zero(dwte, (size_t)g->Vl * (size_t)C * sizeof(float), g->compute);
    }
    for (int i = 0; i < S; i++) {
        size_t first = (size_t)i * own;
        fo_layernorm_forward(slice_of(g, i).lnf + (size_t)g->mesh.t * own_nelem, a->lnf_mean + first,
                             a->lnf_rstd + first, x_last + first * (size_t)C, gpt_weight(g, LNFW, 0),
                             gpt_weight(g, LNFB, 0), own, C, g->compute);
    }
    head_logits(g, 0);
    for (int i = 0; i < S; i++) {
        Slice x = slice_of(g, i);
        if (i + 1 < S) { head_logits(g, i + 1); }
        fo_allgather_end(g->o[i % 2 ? H2_NEXT : H2]);
        fo_softmax_loss(x.losses, x.logits, x.stats, x.targets, dscale, g->z_loss, x.rows, g->Vl, g->valid,
                        g->v0, g->mesh.tp, g->compute);
        if (dscale == 0.0f) { continue; }
        fo_matmul_reducescatter_dgrad(&x.staging, x.logits, gpt_weight(g, WTE, 0), x.rows, C, g->Vl,
                                      g->o[H3]); // H3
        if (push && i + 1 == S) {
            fo_reducer_wgrad(&g->reducer, &g->wte_slot, dwte, g->zero == 2 ? gpt_grad(g, WTE, 0) : NULL, NULL,
                             x.logits, x.lnf, x.rows, C, g->Vl); // D2: the sum of all slices leaves
        } else {
            fo_matmul_wgrad(dwte, NULL, x.logits, x.lnf, x.rows, C, g->Vl, g->compute);
        }
        fo_reducescatter_end(g->o[H3], &x.staging, a->dln + (size_t)i * own_nelem, NULL, NULL, C, x.rows);
    }
}

// sum of the losses of this rank's Nt tokens; waits for it. All tp ranks have the same
static double gpt_loss(GPT* g) {
    double sum = 0.0;
    fo_download(g->host_losses, g->acts.losses, g->Nt * sizeof(float), g->compute);
    fo_stream_sync(g->compute);
    for (size_t i = 0; i < g->Nt; i++) {
        sum += (double)g->host_losses[i];
    }
    return sum;
}

// ---- backward ---------------------------------------------------------------------------------------------
/* wgrad -- the gradient of unit j of a matrix of layer l, += dout^T @ inp. push: it leaves for the replicas
 * that own its rows, among them the up group's; in ZeRO 0 the sums come back (D3) as soon as they are made.
 * Otherwise it stays, for a later micro-step to send.
 */
static void wgrad(GPT* g, int push, int tensor, int l, int j, const floatX* dout, const floatX* inp) {
    const TensorUnit whole = tensor_unit(&g->ts, tensor, j);
    const int zero2 = g->zero == 2, K = (int)whole.cols, OC = (int)whole.rows;
    float* grad = gpt_grad(g, tensor, l) + (zero2 ? tensor_unit(&g->os, tensor, j).offset : whole.offset);
    if (push) {
        float* shard = zero2 ? grad : NULL;
        FoOverlap* back = g->zero ? NULL : g->d3[l + 1];                                 // D3
        fo_reducer_wgrad(&g->reducer, NULL, grad, shard, back, dout, inp, g->Nt, K, OC); // D1, U5
    } else {
        fo_matmul_wgrad(grad, NULL, dout, inp, g->Nt, K, OC, g->compute);
    }
}

// layer norm outputs of the own rows, which the backward pass gathers once more: kept, or made again
static void own_rows_again(const GPT* g, floatX* rows, const floatX* kept, float* mean, float* rstd,
                           const floatX* x, const floatX* weight, const floatX* bias) {
    if (kept) {
        fo_copy(rows, kept, g->n * (size_t)g->config.C * sizeof(floatX), g->compute);
    } else {
        fo_layernorm_forward(rows, mean, rstd, x, weight, bias, g->n, g->config.C, g->compute);
    }
}

static void backward_ffn(GPT* g, const Layer y, int l, int push, int again) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, F = g->F;
    const size_t N = g->Nt, n = g->n, own = (size_t)g->mesh.t * n * (size_t)C,
                 row = (size_t)C * sizeof(floatX);
    floatX* dres = a->dall + own;
    FoOverlap** o = g->o;
    FoStaging* st = &g->staging;
    FoStream* s = g->compute;

    // gathered layer norm outputs that were not kept come again, under the fc2 wgrad
    if (again) { own_rows_again(g, y.ln2 + own, y.ln2_own, y.mean2, y.rstd2, y.mid, y.ln2w, y.ln2b); }
    fo_overlap_mark(o[B2]);
    fo_allgather_matmul_dgrad(a->dfch, a->dall, y.fch, y.fcprojw, N, F, C, o[B1]); // B1
    if (again) { fo_allgather_begin(o[B2], y.ln2, row, N); }                       // B2
    if (g->recompute == 1 || g->recompute == 2) { fo_gelu_forward(y.gelu, y.fch, N * (size_t)F, s); }
    wgrad(g, push, FCPROJW, l, 0, a->dall, y.gelu); // D1, U5
    fo_bias_backward(y.dfcprojb, dres, n, C, s);
    fo_matmul_reducescatter_dgrad(st, a->dfch, y.fcw, N, C, F, o[B3]); // B3
    if (again) { fo_allgather_end(o[B2]); }
    wgrad(g, push, FCW, l, 0, a->dfch, y.ln2); // D1, U5
    fo_bias_backward(y.dfcb, a->dfch, N, F, s);
    fo_reducescatter_end(o[B3], st, a->dln, NULL, NULL, C, N);
    fo_layernorm_backward(dres, y.dln2w, y.dln2b, a->dln, y.mid, y.ln2w, y.mean2, y.rstd2, n, C, s);
}

// the attention half up to d(qkv): the tp group's heads on this rank
static void backward_attention_tp(GPT* g, const Layer y, int l, int push, int again) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, hs = g->heads.hs;
    const size_t N = g->Nt;
    FoOverlap** o = g->o;

    fo_overlap_mark(o[B5]);
    fo_allgather_matmul_attention_backward(a->dqkv, a->datt, a->dall, y.attprojw, y.qkv, y.att, y.lse,
                                           g->layout, g->NHu, hs, C, o[B4]);             // B4
    if (again) { fo_allgather_begin(o[B5], y.ln1, (size_t)C * sizeof(floatX), N); }      // B5
    wgrad(g, push, ATTPROJW, l, 0, a->dall, y.att);                                      // D1
    fo_matmul_reducescatter_dgrad(&g->staging, a->dqkv, y.qkvw, N, C, 3 * g->Ca, o[B6]); // B6
    if (again) { fo_allgather_end(o[B5]); }
    wgrad(g, push, QKVW, l, 0, a->dqkv, y.ln1); // D1
    fo_bias_backward(y.dqkvb, a->dqkv, N, 3 * g->Ca, g->compute);
}

// the same with the heads of an up group
static void backward_attention_up(GPT* g, const Layer y, int l, int push, int again) {
    const GPTActs* a = &g->acts;
    const FoHeadGrads* d = &a->dheads;
    const FoHeads* h = &g->heads;
    const int C = g->config.C;
    const size_t N = g->Nt;
    FoOverlap** o = g->o;

    fo_overlap_mark(o[B5]);
    fo_allgather_matmul_alltoall_dgrad(a->datt, a->up_send, a->dall, y.attprojw, h, N, C, o[B4],
                                       o[U3]);                                      // B4, U3
    if (again) { fo_allgather_begin(o[B5], y.ln1, (size_t)C * sizeof(floatX), N); } // B5
    for (int j = 0; j < h->U; j++) {
        wgrad(g, push, ATTPROJW, l, j, a->dall, fo_heads_rows(y.att, y.att_tokens, h, j, 1, N)); // D1, U5
    }
    fo_alltoall_end(o[U3]);
    fo_attention_backward_alltoall(d, a->datt, y.qkv, y.att, y.lse, g->layout, h, o[U4_KV], o[U4_Q]); // U4
    fo_matmul_reducescatter_dgrad_heads(&g->staging, a->sums, d, y.qkvw, h, N, C, o[U4_KV], o[U4_Q],
                                        o[B6]); // B6
    if (again) { fo_allgather_end(o[B5]); }
    for (int j = 0; j < h->U; j++) {
        const floatX* dq = fo_heads_rows(d->dq, d->dq_tokens, h, j, 1, N);
        const floatX* dkv = fo_heads_rows(d->dkv, d->dkv_tokens, h, j, 2, N);
        const size_t width = fo_heads_width(h, j);
        float* dbias = y.dqkvb + 3 * fo_heads_before(h, j);
        wgrad(g, push, QKVW, l, 2 * j, dq, y.ln1);      // D1, U5
        wgrad(g, push, QKVW, l, 2 * j + 1, dkv, y.ln1); // D1, U5
        fo_bias_backward(dbias, dq, N, (int)width, g->compute);
        fo_bias_backward(dbias + width, dkv, N, (int)(2 * width), g->compute);
    }
}

static void backward_layers(GPT* g, int push) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, L = g->config.L;
    const size_t n = g->n, own = (size_t)g->mesh.t * n * (size_t)C;
    // kept or just made again by -r 3: there is nothing to gather
    const int again = !g->keep_gathered && g->recompute != 3;
    floatX* dres = a->dall + own;
    FoOverlap** o = g->o;
    FoStaging* st = &g->staging;
    FoStream* s = g->compute;

    fo_zero(dres, n * (size_t)C * sizeof(floatX), s);
    fo_layernorm_backward(dres, gpt_grad(g, LNFW, 0), gpt_grad(g, LNFB, 0), a->dln,
                          a->resid + (size_t)L * n * (size_t)C, gpt_weight(g, LNFW, 0), a->lnf_mean,
                          a->lnf_rstd, n, C, s);
    for (int l = L - 1; l >= 0; l--) {
        const Layer y = layer_of(g, l);
        if (g->recompute == 3 && l < L - 1) { forward_to_gelu(g, y); } // the last layer's is still there
        backward_ffn(g, y, l, push, again);
        if (again) { own_rows_again(g, y.ln1 + own, y.ln1_own, y.mean1, y.rstd1, y.x, y.ln1w, y.ln1b); }
        if (g->mesh.up == 1) {
            backward_attention_tp(g, y, l, push, again);
        } else {
            backward_attention_up(g, y, l, push, again);
        }
        fo_bias_backward(y.dattprojb, dres, n, C, s);
        fo_reducescatter_end(o[B6], st, a->dln, NULL, NULL, C, g->Nt);
        fo_layernorm_backward(dres, y.dln1w, y.dln1b, a->dln, y.x, y.ln1w, y.mean1, y.rstd1, n, C, s);
    }
    if (g->use_graphs) { fo_reducer_flush(&g->reducer); } // nothing is left open behind a graph
}

// from the gradient of resid[0] to those of the embeddings
static void backward_embedding(GPT* g, int push) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C;
    const floatX* dres = a->dall + (size_t)g->mesh.t * g->n * (size_t)C;
    FoOverlap** o = g->o;
    FoStaging* st = &g->staging;
    FoStream* s = g->compute;

    fo_fetch_encoder_backward_begin(dres, g->fetch, st, C, o[E2]); // E2
    fo_reducer_flush(&g->reducer);
    fo_scatter_add_rows(gpt_grad(g, WPE, 0), dres, a->pos_dst, a->pos_start, a->pos_order, g->npos, C, s);
    if (push) {
        fo_sparse_reduce_begin(g->sparse, g->fetch, st, C, o[E2], o[D2_ROWS]); // D2 rows
        g->rows_travel = 1;
    } else {
        fo_fetch_encoder_backward_end(gpt_grad(g, WTE, 0), g->fetch, st, C, o[E2]);
    }
}

/* gpt_micro -- a micro-step: forward, head and backward of the batch at hand; all gradients are added to
 * grads.
 *
 * push: the last micro-step of a step, or in ZeRO 2 each: gradients of matrices go to the replicas that own
 * their rows (D1, D2); gpt_reduce waits for the last of them. With --graph 1 all but the embeddings, whose
 * messages are as long as the tokens want them, is one graph.
 */
static void gpt_micro(GPT* g, float dscale, int push) {
    forward_embedding(g);
    if (gpt_graph_begin(g, push)) {
        forward_layers(g);
        gpt_head(g, dscale, push);
        backward_layers(g, push);
        gpt_graph_end(g);
    }
    backward_embedding(g, push);
}

// ---- update -----------------------------------------------------------------------------------------------
// sums over all ranks in rank order; stop, failed: the largest. Beside the token ids that dp ranks tell each
// other (gpt_batch_replicas) the only plain collective of a step
static Scalars share_scalars(GPT* g, Scalars own) {
    Scalars all[FO_MAX_RANKS], sum = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
    Scalars* slots = g->acts.scalars;
    const int P = fo_group_size(g->world), r = fo_group_rank(g->world);
    FoStream* s = g->comm[GROUP_TP];
    fo_stream_label(s, "scalars");
    fo_upload(slots + r, &own, sizeof own, s);
    fo_allgather(g->world, slots, sizeof own, s);
    fo_download(all, slots, (size_t)P * sizeof own, s);
    fo_stream_sync(s);
    fo_stream_label(s, NULL);
    for (int p = 0; p < P; p++) {
        sum.square_sum += all[p].square_sum;
        sum.exposed_ms += all[p].exposed_ms;
        sum.comm_ms += all[p].comm_ms;
        sum.loss += all[p].loss;
        sum.stop = all[p].stop > sum.stop ? all[p].stop : sum.stop;
        sum.failed = all[p].failed > sum.failed ? all[p].failed : sum.failed;
    }
    return sum;
}

// *sum += squares of the gradients of the rows that this rank owns, of layer l's matrices; l -1: of wte
static void square_sum_own(GPT* g, double* sum, int l) {
    const Mesh* m = &g->mesh;
    for (int i = WTE; i < NTENSORS; i++) {
        for (int j = 0; gpt_in_bucket(g, i, l) && j < tensor_nunits(&g->ts, i); j++) {
            const TensorUnit u = tensor_unit(g->zero == 2 ? &g->os : &g->ts, i, j);
            const size_t first = fo_cut(u.rows, m->rp, m->p) - u.row0, n = fo_cut_n(u.rows, m->rp, m->p);
            const float* grad = gpt_grad(g, i, l < 0 ? 0 : l) + u.offset + first * u.cols;
            fo_square_sum(sum, grad, n * u.cols, g->compute);
        }
    }
}

/* gpt_reduce -- the last of the gradients' sums: rows of the embedding (D2), and what is no matrix (B7):
 * layer norms, positions, biases, over the tp group, then with the cut vectors over the replicas; both under
 * the norm of the other gradients. Tells the norm of all; waits. A rank then has the sums of its share of
 * them; gpt_update spreads them.
 */
static Scalars gpt_reduce(GPT* g, double loss, double stop, double failed) {
    Scalars own = {0.0, 0.0, 0.0, loss, stop, failed};
    const Mesh* m = &g->mesh;
    const size_t nelem = gpt_replicated(g), share = nelem / (size_t)m->tp, ncut = g->ts.ncut - g->ts.nmatrix;
    float *replicated = (float*)g->grad_staging.partial, *vectors = g->acts.vectors;
    const size_t nvectors = gpt_vectors(g), mine = nvectors / (size_t)m->rp;
    double* sum = &g->acts.scalars[FO_MAX_RANKS].square_sum; // behind what ranks tell each other
    FoStream* s = g->compute;
    fo_reducescatter_run(g->o[B7], &g->grad_staging, 1, nelem, NULL, NULL); // B7
    fo_zero(sum, sizeof *sum, s);
    for (int l = 0; l < g->config.L; l++) {
        square_sum_own(g, sum, l);
    }
    fo_copy(vectors, replicated - ncut, ncut * sizeof(float), s);
    fo_zero(vectors + ncut + share, (nvectors - ncut - share) * sizeof(float), s);
    fo_reducescatter_end_fp32(g->o[B7], &g->grad_staging, vectors + ncut, 1, nelem);
    fo_reducescatter_run(g->o[B7_DP], &g->vector_staging, 1, nvectors, NULL, NULL); // B7 dp
    end_rows(g);
    if (m->rp > 1 && g->zero == 0) {
        fo_allgather_rows_begin(g->d3[0], gpt_grad(g, WTE, 0), (size_t)g->config.C * sizeof(float),
                                (size_t)g->Vl); // D3
    }
    square_sum_own(g, sum, -1);
    fo_reducescatter_end_fp32(g->o[B7_DP], &g->vector_staging, vectors + (size_t)m->p * mine, 1, nvectors);
    fo_square_sum(sum, vectors + (size_t)m->p * mine, mine, s);
    fo_download(&own.square_sum, sum, sizeof *sum, s);
    fo_stream_sync(s);
    gpt_take_times(g, &own.exposed_ms, &own.comm_ms);
    return share_scalars(g, own);
}

// AdamW on the matrices of layer l, or on wte (l -1): the rows whose state this rank has, in ZeRO 0 all
static void update_matrices(GPT* g, FoAdamw a, float weight_decay, int l) {
    const size_t layer = l < 0 ? 0 : (size_t)l;
    a.weight_decay = weight_decay;
    for (int i = WTE; i < NTENSORS; i++) {
        const Tensor *t = &g->ts.t[i], *held = &g->os.t[i];
        for (int j = 0; gpt_in_bucket(g, i, l) && j < tensor_nunits(&g->ts, i); j++) {
            const TensorUnit whole = tensor_unit(&g->ts, i, j), u = tensor_unit(&g->os, i, j);
            size_t param = t->offset + layer * tensor_local(t) + whole.offset + u.row0 * u.cols;
            size_t state = held->offset + layer * tensor_local(held) + u.offset;
            fo_adamw_update(g->params + param, g->master + state, g->m + state, g->v + state,
                            g->grads + (g->zero == 2 ? state : param), u.nrows * u.cols, a, g->compute);
        }
    }
}

// AdamW on what every replica has whole: is_cut 1: vectors that tp cuts, 0: what no rank cuts
static void update_vectors(GPT* g, FoAdamw a, float weight_decay, int is_cut) {
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor *t = &g->ts.t[i], *shared = &g->os.t[i];
        if (t->sharded || (t->cut != CUT_NONE) != is_cut) { continue; }
        a.weight_decay = t->decays ? weight_decay : 0.0f;
        fo_adamw_update(g->params + t->offset, g->master + shared->offset, g->m + shared->offset,
                        g->v + shared->offset, gpt_grad(g, i, 0), (size_t)t->layers * tensor_local(t), a,
                        g->compute);
    }
}

/* gpt_spread -- the sums of B7 and, in ZeRO 0, of matrices come to all ranks; apply: AdamW on every tensor,
 * from gradients times grad_scale. B7's return under the update of the matrices; in ZeRO 1 and 2 layer 0's
 * updated rows leave under that of the others, which go in the next forward pass (D3).
 */
static void gpt_spread(GPT* g, FoAdamw a, float weight_decay, int apply) {
    const Mesh* m = &g->mesh;
    const size_t nelem = gpt_replicated(g), share = nelem / (size_t)m->tp, ncut = g->ts.ncut - g->ts.nmatrix;
    float *replicated = (float*)g->grad_staging.partial, *vectors = g->acts.vectors;
    FoStream* s = g->compute;
    fo_allgather_begin(g->o[B7_DP_BACK], vectors, sizeof(float), gpt_vectors(g)); // B7 dp
    if (!g->zero) { fo_allgather_end(g->d3[0]); } // sums of gradients, here and below: D3
    if (apply) { update_matrices(g, a, weight_decay, -1); }
    fo_allgather_end(g->o[B7_DP_BACK]);
    fo_copy(replicated - ncut, vectors, ncut * sizeof(float), s);
    fo_copy(replicated + (size_t)m->t * share, vectors + ncut, share * sizeof(float), s);
    fo_allgather_begin(g->o[B7_BACK], replicated, sizeof(float), nelem); // B7
    for (int l = 0; l < g->config.L; l++) {
        if (!g->zero) { fo_allgather_end(g->d3[l + 1]); }
        if (apply) { update_matrices(g, a, weight_decay, l); }
        if (apply && g->zero && l == 0) { gpt_send_layer(g, 0); } // D3
    }
    g->weights_wait = apply && g->zero;
    if (apply) { update_vectors(g, a, weight_decay, 1); }
    fo_allgather_end(g->o[B7_BACK]);
    if (apply) { update_vectors(g, a, weight_decay, 0); }
}

// one update, or, apply 0, a skipped one; clears the gradients, waits
static void gpt_update(GPT* g, FoAdamw a, float weight_decay, int apply) {
    gpt_spread(g, a, weight_decay, apply);
    fo_zero(g->grads, gpt_nbytes(g).grads, g->compute);
    fo_stream_sync(g->compute);
}

// ---- the loop ---------------------------------------------------------------------------------------------
// set by the handler; which signal it was
static volatile sig_atomic_t stop_signal;

static void on_signal(int sig) {
    stop_signal = sig;
}

// the signal that some rank has got, or 0. All ranks ask at the same place, and hear the same
static int stopping(GPT* g) {
    Scalars own = {0.0, 0.0, 0.0, 0.0, (double)stop_signal, 0.0};
    return (int)share_scalars(g, own).stop;
}

/* read_batch -- the next batch of data. A rank that can't read it goes on with zeros, for others wait for it:
 * once all know (failed_anywhere), they end together. again: the first batch once more.
 */
static void read_batch(Trainer* tr, DataLoader* data, int again, char err[TRAIN_ERR]) {
    const double start = fo_now();
    if (!tr->failed && ((again && dataloader_reset(data, err)) || dataloader_next_batch(data, err))) {
        tr->failed = fo_group_size(tr->world) - tr->rank;
    }
    if (tr->failed) {
        const size_t nbytes = (size_t)data->B * (size_t)data->T * sizeof(int);
        memset(data->inputs, 0, nbytes);
        memset(data->targets, 0, nbytes);
    }
    if (data == &tr->train && tr->step > tr->first_step) { tr->data_s += fo_now() - start; }
}

// did some rank's data fail? Of several the first one tells why
static int failed_anywhere(Trainer* tr, Scalars sum) {
    tr->teller = sum.failed > 0.0 ? fo_group_size(tr->world) - (int)sum.failed : 0;
    return sum.failed > 0.0;
}

// rank 0 says how far an evaluation is: on a terminal (mpirun makes one of a file, too) on one line, which it
// takes away at the end, elsewhere twice a minute. last: when it was said
static void print_progress(const Trainer* tr, const char* what, size_t done, size_t n, double* last) {
    const int terminal = isatty(STDOUT_FILENO) && fo_ranks_launched() == 1, ended = terminal && done >= n;
    if (tr->rank != 0 || (!ended && fo_now() - *last < (terminal ? 0.2 : 30.0))) { return; }
    *last = fo_now();
    if (ended) {
        printf("\r\033[K");
    } else {
        printf("%s: %zu/%zu%c", what, done, n, terminal ? '\r' : '\n');
    }
    fflush(stdout);
}

// mean loss of the first batches of the validation data, the same each time; printed and logged by rank 0
static int validate(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    const TrainOptions* opt = tr->opt;
    const int dp = g->mesh.dp;
    const size_t all = dataloader_samples(&tr->val), most = (size_t)opt->val_batches;
    const size_t nbatches = opt->val_batches < 0 || most > all ? all : most;
    Scalars own = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
    double last = fo_now();
    for (size_t i = 0; i < nbatches; i++) {
        if (stopping(g)) { return 0; } // after the next step
        read_batch(tr, &tr->val, i == 0, err);
        gpt_batch(g, tr->val.inputs, tr->val.targets, opt->batch, opt->seq_len);
        gpt_forward(g);
        gpt_head(g, 0.0f, 0);
        double loss = gpt_loss(g);
        own.loss += g->mesh.t == 0 ? loss : 0.0;
        print_progress(tr, "validating", i + 1, nbatches, &last);
    }
    double exposed, comm; // of validation: not a step's
    gpt_take_times(g, &exposed, &comm);
    own.failed = (double)tr->failed;
    Scalars sum = share_scalars(g, own);
    if (failed_anywhere(tr, sum)) { return -1; }
    double loss = sum.loss / ((double)nbatches * (double)g->N * dp);
    if (tr->rank != 0) { return 0; }
    printf("val loss %f perplexity %.3f\n", loss, exp(loss));
    fflush(stdout);
    return logger_val(&tr->logger, tr->step, (float)loss, err);
}

// the loss of token t of sequence b, after gpt_loss; 0 where another up rank has it
static double loss_at(const GPT* g, int b, int t) {
    const size_t row = fo_layout_row(g->layout, b, t);
    return (int)(row / g->Nt) == g->mesh.u ? (double)g->host_losses[gpt_head_place(g, row % g->Nt)] : 0.0;
}

/* score_rows -- sums[i] = losses of the completion in the dp rank's row i, as far as this up rank has them.
 * `each` examples are each dp rank's, in the order of the file; what is beyond its end counts nothing. Stops
 * early if a rank has got a signal.
 */
static int score_rows(Trainer* tr, double* sums, int each) {
    GPT* g = &tr->gpt;
    const HellaSwag* h = &tr->hellaswag;
    const int B = tr->opt->batch, T = gpt_short_T(g, h->longest), n = each * HELLASWAG_WAYS;
    const size_t first = (size_t)g->mesh.d * (size_t)n, N = (size_t)B * (size_t)T;
    int *ids = (int*)malloc(2 * N * sizeof(int)), *targets = ids + N, stop = 0;
    double last = fo_now();
    fo_require(ids != NULL, "out of memory");
    for (int i = 0; i < n && !(stop = stopping(g)); i += B) { // as many batches on each dp rank
        for (int b = 0; b < B; b++) {
            const size_t at = (size_t)b * (size_t)T;
            hellaswag_row(h, first + (size_t)(i + b), T, ids + at, targets + at);
        }
        gpt_batch(g, ids, targets, B, T);
        gpt_forward(g);
        gpt_head(g, 0.0f, 0);
        gpt_loss(g);
        for (int b = 0; b < B && i + b < n; b++) {
            const HellaSpan span = hellaswag_span(h, first + (size_t)(i + b));
            for (int t = span.begin; t < span.end; t++) {
                sums[i + b] += loss_at(g, b, t);
            }
        }
        const size_t done = (size_t)(i + B) / HELLASWAG_WAYS * (size_t)g->mesh.dp;
        print_progress(tr, "evaluating HellaSwag", i + B < n ? done : (size_t)h->n, (size_t)h->n, &last);
    }
    free(ids);
    return stop;
}

// HellaSwag's accuracy, as llm.c scores it; printed and logged by rank 0
static int evaluate(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    const HellaSwag* h = &tr->hellaswag;
    const Mesh* m = &g->mesh;
    const int P = fo_group_size(tr->world), each = (h->n + m->dp - 1) / m->dp;
    const size_t n = (size_t)each * HELLASWAG_WAYS; // of a dp rank
    double* all = (double*)calloc((size_t)P * n, sizeof(double));
    int nright = 0;
    fo_require(all != NULL, "out of memory");
    if (score_rows(tr, all + (size_t)tr->rank * n, each)) {
        free(all);
        return 0;
    }
    gpt_gather_host(g, all, n * sizeof(double));
    for (int i = 0; i < h->n; i++) {
        double sums[HELLASWAG_WAYS] = {0.0};
        for (int k = 0; k < m->up * HELLASWAG_WAYS; k++) { // tp ranks have the same
            const int rank = (i / each * m->up + k / HELLASWAG_WAYS) * m->tp, way = k % HELLASWAG_WAYS;
            sums[way] += all[(size_t)rank * n + (size_t)(i % each * HELLASWAG_WAYS + way)];
        }
        nright += hellaswag_choice(h, i, sums) == hellaswag_label(h, i);
    }
    free(all);
    double exposed, comm; // not a step's
    gpt_take_times(g, &exposed, &comm);
    if (tr->rank != 0) { return 0; }
    const float accuracy = (float)nright / (float)h->n;
    printf("HellaSwag: %d/%d = %f\n", nright, h->n, (double)accuracy);
    fflush(stdout);
    return logger_eval(&tr->logger, tr->step, accuracy, err);
}

/* train_step -- one update from total_batch tokens. Returns the signal that some rank has got, 0, or -1 with
 * err.
 */
static int train_step(Trainer* tr, char err[TRAIN_ERR]) {
    GPT* g = &tr->gpt;
    const TrainOptions* opt = tr->opt;
    const double ntokens = (double)opt->total_batch;
    double start = fo_now(), own_loss = 0.0;
    for (int micro = 0; micro < tr->grad_accum; micro++) {
        const int push = g->mesh.rp > 1 && (g->zero == 2 || micro + 1 == tr->grad_accum);
        read_batch(tr, &tr->train, opt->overfit, err);
        gpt_batch(g, tr->train.inputs, tr->train.targets, opt->batch, opt->seq_len);
        if (push || g->weights_wait) { gpt_batch_replicas(g, tr->train.inputs); }
        gpt_micro(g, (float)(1.0 / ntokens), push);
        MicroStep m = {gpt_loss(g), tr->train.batch_path, tr->train.batch_first};
        own_loss += m.loss;
        tr->micros[micro] = m;
    }
    Scalars sum = gpt_reduce(g, g->mesh.t == 0 ? own_loss : 0.0, (double)stop_signal, (double)tr->failed);
    if (failed_anywhere(tr, sum)) { return -1; }
    double loss = sum.loss / ntokens;
    float norm = (float)sqrt(sum.square_sum), lr = schedule_lr(&tr->schedule, tr->step);
    // an update by gradients that are not finite would leave no weight that is
    if (!(isfinite(loss) && isfinite(norm)) && !opt->ignore_nan) {
        progress_clear(&tr->progress);
        return nonfinite_stop(tr, loss, (double)norm, (double)lr, err);
    }
    double loss_z = outlier_update(&tr->state.loss, loss),
           norm_z = outlier_update(&tr->state.norm, (double)norm);
    int skip_loss = opt->skip_loss_z > 0.0f && loss_z > (double)opt->skip_loss_z;
    int skip_norm = opt->skip_grad_z > 0.0f && norm_z > (double)opt->skip_grad_z;
    if (skip_loss || skip_norm) { progress_clear(&tr->progress); }
    if (tr->rank == 0 && skip_loss) { printf("skipping update due to loss z-score of %f\n", loss_z); }
    if (tr->rank == 0 && !skip_loss && skip_norm) {
        printf("skipping update due to grad z-score of %f\n", norm_z);
    }
    float scale = opt->clip > 0.0f && norm > opt->clip ? opt->clip / norm : 1.0f;
    FoAdamw a = {lr, opt->beta1, opt->beta2, opt->eps, 0.0f, scale, tr->step + 1};
    gpt_update(g, a, opt->weight_decay, !skip_loss && !skip_norm);
    if (run_print_step(tr, (float)loss, loss_z, norm, norm_z, lr, fo_now() - start, sum, err)) { return -1; }
    return (int)sum.stop;
}

/* train_loop -- llm.c's order: at step s = 0 ... N, after s updates: validate, HellaSwag, sample, checkpoint,
 * then the next update. Returns the signal that ended it, 0, or -1 with err.
 */
static int train_loop(Trainer* tr, char err[TRAIN_ERR]) {
    const TrainOptions* opt = tr->opt;
    int stop = 0;
    for (tr->step = tr->first_step;; tr->step++) {
        int s = tr->step, last = s >= tr->nsteps || stop;
        fo_group_step(tr->world, s + 1);
        if (opt->val_every > 0 && !stop && (s % opt->val_every == 0 || last) && validate(tr, err)) {
            return -1;
        }
        const int scores = last || (s > 0 && opt->val_every > 0 && s % opt->val_every == 0);
        if (opt->hellaswag && !stop && scores && evaluate(tr, err)) { return -1; }
        if (opt->sample_every > 0 && !stop && ((s > 0 && s % opt->sample_every == 0) || last)) {
            generate(tr, stopping);
        }
        if (opt->out[0] && s > tr->first_step &&
            (last || (opt->checkpoint_every > 0 && s % opt->checkpoint_every == 0))) {
            if (run_write_checkpoint(tr, err)) { return -1; }
        }
        // a signal may have cut the last validation or text short
        if (last) { return stop ? stop : stopping(&tr->gpt); }
        // the second step, if there is one: the first has no weights of an update before it to wait for
        const int reports = opt->comm_report && s == tr->first_step + (tr->first_step + 1 < tr->nsteps);
        if (reports) { run_comm_start(tr); }
        run_trace_start(tr);
        run_profile_start(tr);
        progress_draw(&tr->progress, s);
        stop = train_step(tr, err);
        progress_clear(&tr->progress); // of a step that has failed
        if (stop < 0 || run_trace_end(tr, stop, err)) { return -1; }
        run_profile_end(tr, stop);
        if (reports) { run_comm_report(tr); }
    }
}

// ---- start ------------------------------------------------------------------------------------------------
typedef struct {
    TrainOptions opt;
    const char* program;
    char err[TRAIN_ERR]; // what is wrong with the options
    int status;          // of the process
} Run;

// the loop, and what is said before and after it. Returns the signal that ended it, or 0
static int train(Trainer* tr) {
    char err[TRAIN_ERR] = "";
    Scalars peak = {tr->peak_tflops, 0.0, 0.0, 0.0, 0.0, 0.0}; // in the place of another sum
    tr->peak_tflops = share_scalars(&tr->gpt, peak).square_sum;
    if (tr->rank == 0) { run_print_start(tr); }
    progress_init(&tr->progress, tr->rank == 0 && fo_ranks_launched() == 1, tr->first_step, tr->nsteps);
    int stop = train_loop(tr, err);
    if (stop < 0) {
        lock_release(&tr->lock);
        user_error(tr->rank == tr->teller, err);
    }
    const int n = tr->step - tr->first_step - 1;
    if (tr->rank == 0 && n > 0) {
        printf("total average iteration time: %f ms\n", tr->sum_ms / n);
        printf("waited for data: %.3f ms a step\n", 1e3 * tr->data_s / n);
    }
    if (tr->rank == 0 && stop) { printf("stopped by signal %d after step %d\n", stop, tr->step); }
    return stop;
}

// --eval: the model as it is. Returns the signal that ended it, or 0
static int score(Trainer* tr) {
    char err[TRAIN_ERR] = "";
    if (tr->rank == 0) { run_print_evaluation(tr); }
    if ((tr->opt->val_every > 0 && validate(tr, err)) || (tr->opt->hellaswag && evaluate(tr, err))) {
        user_error(tr->rank == tr->teller, err);
    }
    return stopping(&tr->gpt);
}

static void rank_main(FoGroup* world, void* arg) {
    Run* run = (Run*)arg;
    Trainer* tr = (Trainer*)calloc(1, sizeof *tr);
    fo_require(tr != NULL, "out of memory");
    tr->opt = &run->opt, tr->world = world, tr->rank = fo_group_rank(world);
    signal(SIGINT, on_signal); // not before: while processes wait for each other at the start these end them
    signal(SIGTERM, on_signal);
    signal(SIGUSR1, on_signal); // mpirun hands it on, and kills soon after the other two
    run_open(tr);
    fo_group_patience(world, run->opt.timeout); // all have come from a barrier
    int stop = run->opt.generate ? generate(tr, stopping) : run->opt.eval ? score(tr) : train(tr);
    // threads share it; a process has its own, which tells its launcher
    if (tr->rank == 0 || strcmp(fo_group_transport(world), "local")) { run->status = stop ? 128 + stop : 0; }
    fo_group_barrier(world);
    run_close(tr);
    free(tr);
}

#ifndef TESTING
// All that main can say without training; of the processes that a launcher started one says it. The others
// give it time to, if it is an error, and no transport is opened: it might not start on this machine.
static void speak(Run* run) {
    const int speaks = fo_launch_speaks();
    int bad = run->err[0] != 0;
    if (!bad && run->opt.help && speaks) {
        options_help(stdout, run->program);
    } else if (!bad && !run->opt.help && speaks) {
        bad = run->opt.plan[0] ? run_plan(&run->opt, run->err) : run_dry(&run->opt, run->err);
    }
    if (bad) { user_error(speaks, run->err); }
}

// A file or a socket must not get the number of a standard stream that was closed: text would go there.
static void open_closed_streams(void) {
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
    } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) { close(fd); }
}

// Where the text is what was asked for: has a full disk taken of it? Returns the status of the process.
static int text_lost(void) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) { return 0; }
    fprintf(stderr, "standard output cannot be written: %s\n",
            errno ? strerror(errno) : "a part of it is lost");
    return 1;
}

int main(int argc, char** argv) {
    static Run run;
    open_closed_streams();
    run.program = argv[0];
    const int bad = options_parse(&run.opt, argc, argv, run.err);
    if (argc == 1 && !bad) { run.opt.help = 1; }
    if (bad || run.opt.help || run.opt.dry_run || run.opt.plan[0]) {
        speak(&run);
        return text_lost();
    }
    signal(SIGXFSZ, SIG_IGN); // a full quota is an error of write, told in one line
    fo_launch_run(&run.opt.launch, run.opt.dp * run.opt.up * run.opt.tp, rank_main, &run);
    return run.status || !(run.opt.generate || run.opt.eval) ? run.status : text_lost();
}
#endif
