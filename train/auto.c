/* auto.c -- measures what the operations compute, and chooses their chunks. See auto.h.
 *
 * A chunk is measured with the weights and into the activations with which the step will compute it, so
 * nothing is allocated. Gradients are not touched: a wgrad is taken to last as long as the dgrad of its
 * matmul, which has as many flops.
 */
#include "train/auto.h"
#include "flashoverlap/fo_model.h"
#include <stdio.h>
#include <stdlib.h>

// rows of a shard of operation i
static size_t shard_rows(const GPT* g, int i) {
    const size_t Nt = (size_t)g->B_max * (size_t)g->T_max / (size_t)g->mesh.up, n = Nt / (size_t)g->mesh.tp;
    if (gpt_sites[i].group == GROUP_UP) { return Nt; }
    return i == H1 || i == H3 ? n / (size_t)gpt_head_slices(Nt, g->mesh.tp, g->head_chunks) : n;
}

// bytes of a row that travels; of up's: to the rank with the most heads
static size_t row_nbytes(const GPT* g, int i) {
    const size_t C = (size_t)g->config.C, Cu = (size_t)g->Cu;
    if (gpt_sites[i].group == GROUP_UP) { return (i == U1 ? 3 * Cu : Cu) * sizeof(floatX); }
    return C * (gpt_sites[i].kind == FO_ALLGATHER ? sizeof(floatX) : fo_dtype_nbytes(g->staging.wire));
}

static FoLayout layout_of(const GPT* g) {
    const Mesh* m = &g->mesh;
    FoLayout l = {g->B_max, g->T_max, m->up * m->tp, m->up > 1 || g->B_max % m->tp != 0};
    return l;
}

// attention of the queries in rows of a shard of this rank, on the heads' side
static void queue_attention(const GPT* g, size_t row0, size_t n) {
    const GPTActs* a = &g->acts;
    fo_attention_forward(a->att, a->lse, a->qkv, row0, n, layout_of(g), g->NHu, g->heads.hs, g->compute);
}

// what operation i of the tp group computes for n rows of a shard, from row0 on
static void queue_tp(const GPT* g, int i, size_t row0, size_t n) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, F = g->F, Ca = g->Ca, up = g->mesh.up > 1;
    const FoDtype wire = g->staging.wire;
    floatX *qkv = up ? a->up_send : a->qkv, *partial = (floatX*)a->partial;
    const floatX *wte = gpt_weight(g, WTE, 0), *qkvw = gpt_weight(g, QKVW, 0);
    const floatX *projw = gpt_weight(g, ATTPROJW, 0), *fcw = gpt_weight(g, FCW, 0),
                 *fcprojw = gpt_weight(g, FCPROJW, 0);
    FoStream* s = g->compute;
    switch (i) {
    case F1:
        fo_matmul_forward(qkv, a->ln1_all, qkvw, gpt_weight(g, QKVB, 0), n, C, 3 * Ca, FO_FLOATX, s);
        break;
    case F2:
        queue_attention(g, row0, n);
        fo_matmul_forward(partial, up ? a->att_tokens : a->att, projw, NULL, n, Ca, C, wire, s);
        break;
    case F3:
        fo_matmul_gelu_forward(a->fch, a->gelu, a->ln2_all, fcw, gpt_weight(g, FCB, 0), n, C, F, s);
        break;
    case F4: fo_matmul_forward(partial, a->gelu, fcprojw, NULL, n, F, C, wire, s); break;
    case B1: fo_matmul_gelu_dgrad(a->dfch, a->dall, fcprojw, a->fch, n, F, C, s); break;
    case B3: fo_matmul_dgrad(partial, a->dfch, fcw, n, C, F, wire, s); break;
    case B4: fo_matmul_dgrad(up ? a->up_send : a->datt, a->dall, projw, n, Ca, C, FO_FLOATX, s); break;
    case B6: fo_matmul_dgrad(partial, up ? a->up_send : a->dqkv, qkvw, n, C, 3 * Ca, wire, s); break;
    case H1: fo_matmul_forward(a->logits, a->dall, wte, NULL, n, C, g->Vl, FO_FLOATX, s); break;
    case H3: fo_matmul_dgrad(partial, a->logits, wte, n, C, g->Vl, wire, s); break;
    default: break; // B2, B5: other operations' matmuls hide them
    }
}

// the same of the up group: for one of its ranks
static void queue_up(const GPT* g, int i, size_t row0, size_t n) {
    const GPTActs* a = &g->acts;
    const int C = g->config.C, Cu = g->Cu;
    if (i == U2) {
        queue_attention(g, row0, n);
    } else if (i == U1) {
        fo_matmul_forward(a->up_send, a->ln1_all, gpt_weight(g, QKVW, 0), gpt_weight(g, QKVB, 0), n, C,
                          3 * Cu, FO_FLOATX, g->compute);
    } else {
        fo_matmul_dgrad(a->up_send, a->dall, gpt_weight(g, ATTPROJW, 0), n, Cu, C, FO_FLOATX, g->compute);
    }
}

// does operation i gather under what others compute?
static int is_covered(int i) {
    return i == B2 || i == B5;
}

// B4: attention's backward pass of a shard follows its dgrad, where sequences are whole
static int has_attention_behind(const GPT* g, int i) {
    return i == B4 && !layout_of(g).zigzag;
}

static void queue_rows(const GPT* g, int i, size_t row0, size_t n) {
    if (gpt_sites[i].group == GROUP_TP) {
        queue_tp(g, i, row0, n);
    } else {
        queue_up(g, i, row0, n);
    }
}

static void queue_attention_backward(const GPT* g, size_t n) {
    const GPTActs* a = &g->acts;
    fo_attention_backward(a->dqkv, a->datt, a->qkv, a->att, a->lse, 0, n, layout_of(g), g->NHu, g->heads.hs,
                          g->compute);
}

/* seconds of a shard's computation in m sub-chunks, the least of some tries. Rows of a matmul cost alike, so
 * one sub-chunk tells for all; those of attention do not. m 0: of what follows the sub-chunks.
 */
static double measure(const GPT* g, int i, int m) {
    enum { TRIES = 3, SHORT = 4 }; // of short ones some follow each other: a wake-up is not what is measured
    const double short_s = 1e-3, enough_s = 30e-3;
    const size_t rows = shard_rows(g, i), n = m ? rows / (size_t)m : rows;
    const int calls = m && (i == F2 || i == U2) ? m : 1;
    double least = 0.0, sum = 0.0, start = 0.0;
    int repeats = 1;
    for (int nth = -2; nth < TRIES && (nth < 0 || sum < enough_s); nth++) { // -2: the library makes ready
        start = fo_now();
        for (int k = 0; k < repeats * calls && (nth > -2 || k < 1); k++) {
            if (m) {
                queue_rows(g, i, (size_t)(k % calls) * n, n);
            } else {
                queue_attention_backward(g, n);
            }
        }
        fo_stream_sync(g->compute);
        const double seconds = (fo_now() - start) / repeats;
        if (nth == -1 && seconds < short_s) {
            repeats = SHORT;
        } else if (nth >= -1) {
            least = least == 0.0 || seconds < least ? seconds : least;
            sum += seconds * repeats;
        }
    }
    return least * (m ? (double)m / calls : 1.0);
}

// what one rank tells the others of an operation
typedef struct {
    FoMeasured x; // its W is of the whole group
    double behind_s;
} Told;

// the largest of 1, 2, 4 that cuts the operation's shards evenly
static int most_chunks(const GPT* g, int i) {
    const size_t n = shard_rows(g, i);
    return n % 4 == 0 ? 4 : n % 2 == 0 ? 2 : 1;
}

// has this mesh the operation, and is there something to choose?
static int is_chosen(const GPT* g, int i) {
    const int again = !g->keep_gathered && g->recompute != 3;
    return gpt_site_ranks(g, i) > 1 && gpt_is_cut(g, i) && (again || !is_covered(i));
}

// seconds that hide operation i beside its own sub-chunks
static double cover_s(const GPT* g, const Told told[NSITES], int i) {
    const double P = (double)gpt_site_ranks(g, i);
    switch (i) {
    case B2: return told[B1].x.compute_s[0];          // fc2's wgrad
    case B5: return told[B4].x.compute_s[0];          // the projection's
    case B4: return told[i].behind_s * (P - 1.0) / P; // all but the last shard's
    case B3:                                          // fc1's wgrad
    case B6:                                          // QKV's
    case H3:                                          // the head's
    case U3: return told[i].x.compute_s[0];           // the projection's
    default: return 0.0;
    }
}

static void measure_all(const GPT* g, Told told[NSITES]) {
    for (int i = 0; i < NSITES; i++) {
        const FoGroup* group = g->group[gpt_sites[i].group];
        const int P = gpt_site_ranks(g, i);
        FoMeasured* x = &told[i].x;
        if (!is_chosen(g, i)) { continue; }
        x->latency_s = fo_group_message_s(group, 0);
        x->shard_s = fo_group_message_s(group, shard_rows(g, i) * row_nbytes(g, i));
        if (is_covered(i)) { continue; }
        if (has_attention_behind(g, i)) { told[i].behind_s = P * measure(g, i, 0); }
        x->compute_s[0] = P * measure(g, i, 1);
        x->cover_s = cover_s(g, told, i);
        // could more chunks win if they cost nothing? Where all is hidden anyway, they can't
        const int most = fo_model_chunks(x, P, most_chunks(g, i), NULL) > 1 ? most_chunks(g, i) : 1;
        for (int k = 1; k < FO_MODEL_MOST && 1 << k <= most; k++) {
            x->compute_s[k] = P * measure(g, i, 1 << k);
        }
    }
}

// the slowest rank sets the pace of all
static void agree(GPT* g, Told told[NSITES]) {
    const size_t n = sizeof(Told) / sizeof(double) * NSITES, P = (size_t)fo_group_size(g->world);
    double *all = (double*)calloc(P * n, sizeof(double)), *most = (double*)(void*)told;
    fo_require(all != NULL, "out of memory");
    memcpy(all + (size_t)fo_group_rank(g->world) * n, told, n * sizeof(double));
    gpt_gather_host(g, all, n * sizeof(double));
    for (size_t k = 0; k < P * n; k++) {
        most[k % n] = all[k] > most[k % n] ? all[k] : most[k % n];
    }
    free(all);
}

static void choose_all(const GPT* g, Told told[NSITES], AutoChoice* c) {
    for (int i = 0; i < NSITES; i++) {
        if (!is_chosen(g, i)) { continue; }
        c->P[i] = gpt_site_ranks(g, i);
        c->plain_s[i] = fo_model_collective_s(c->P[i], told[i].x.shard_s);
        told[i].x.cover_s = cover_s(g, told, i);
        c->m[i] = fo_model_chunks(&told[i].x, c->P[i], most_chunks(g, i), &c->exposed_s[i]);
    }
    if (is_chosen(g, F1) && !layout_of(g).zigzag) { // F1 and F2 take turns, where sequences are whole
        const FoMeasured x[2] = {told[F1].x, told[F2].x};
        const int most[2] = {most_chunks(g, F1), most_chunks(g, F2)};
        int m[2];
        double exposed_s[2];
        fo_model_chunks_in_turn(x, c->P[F1], most, m, exposed_s);
        c->m[F1] = m[0], c->m[F2] = m[1];
        c->exposed_s[F1] = exposed_s[0], c->exposed_s[F2] = exposed_s[1];
    }
}

AutoChoice auto_choose(GPT* g, const TrainOptions* opt) {
    Told told[NSITES];
    AutoChoice c;
    memset(&c, 0, sizeof c);
    memset(told, 0, sizeof told);
    fo_require(!g->inference && opt->overlap.m == 0, "nothing is to be chosen");
    fo_group_barrier(g->world); // all at once, as they will compute
    measure_all(g, told);
    agree(g, told);
    choose_all(g, told, &c);
    for (int i = 0; i < NSITES; i++) {
        if (c.P[i] && c.m[i] != g->site_m[i]) { gpt_set_chunks(g, opt, i, c.m[i]); }
    }
    fo_group_barrier(g->world);
    return c;
}

void auto_print(const AutoChoice* c, double seconds, const char* begin) {
    printf("%soverlap auto, chosen in %.2f s: ms that a call will leave exposed / that its plain collective "
           "takes\n",
           begin, seconds);
    for (int m = 1; m <= 1 << (FO_MODEL_MOST - 1); m *= 2) {
        int n = 0;
        for (int i = 0; i < NSITES; i++) {
            if (c->P[i] == 0 || c->m[i] != m) { continue; }
            if (n++ == 0) { printf("%s  flash:%d", begin, m); }
            printf("  %s %.3f/%.3f", gpt_sites[i].name, 1e3 * c->exposed_s[i], 1e3 * c->plain_s[i]);
        }
        if (n) { printf("\n"); }
    }
    printf("%s  flash:1 all others: their messages are cut no further\n", begin);
}
