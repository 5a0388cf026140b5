/* nonfinite.c -- looks for what is not finite, and tells. See nonfinite.h. */
#include "train/nonfinite.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    PIECE_NBYTES = 1 << 22,
    MOST_SHOWN = 2, // micro-steps of a rank on stderr
    PER_LAYER = LNFW - LN1W
};

// of the weights of a rank, or of its gradients
typedef struct {
    int ntensors, nbad; // a layer's tensors count each
    int tensor, layer;  // the first that is bad
    size_t count, nelem;
} Found;

// what a rank tells of a micro-step
typedef struct {
    double loss;
    size_t first;   // token of the shard
    char shard[80]; // the end of its name
} ToldMicro;

typedef struct {
    Found weights, grads;
    ToldMicro micro[]; // [grad_accum]
} Told;

// tensor number i in the order of the forward pass, and its layer
static int in_order(GPTConfig c, int i, int* layer) {
    const int nlayers = PER_LAYER * c.L, k = i - LN1W;
    *layer = 0;
    if (k < 0) { return i; }
    if (k >= nlayers) { return LNFW + k - nlayers; }
    *layer = k / PER_LAYER;
    return LN1W + k % PER_LAYER;
}

// how many of these numbers are not finite
static size_t count_bad(const GPT* g, const void* x, FoDtype dtype, size_t nelem, char* piece) {
    const size_t most = PIECE_NBYTES / fo_dtype_nbytes(dtype);
    size_t nbad = 0;
    for (size_t at = 0; at < nelem; at += most) {
        const size_t n = nelem - at < most ? nelem - at : most;
        fo_download(piece, (const char*)x + at * fo_dtype_nbytes(dtype), n * fo_dtype_nbytes(dtype),
                    g->compute);
        fo_stream_sync(g->compute);
        for (size_t i = 0; i < n; i++) {
            const float f = dtype == FO_FP32 ? ((const float*)(const void*)piece)[i]
                                             : fo_bf16_to_float(((const FoBf16*)(const void*)piece)[i]);
            nbad += !isfinite(f);
        }
    }
    return nbad;
}

static Found look(const GPT* g, int gradients, char* piece) {
    const int n = NTENSORS - PER_LAYER + PER_LAYER * g->config.L;
    Found f = {n, 0, 0, 0, 0, 0};
    for (int i = 0; i < n; i++) {
        int layer;
        const int t = in_order(g->config, gradients ? n - 1 - i : i, &layer);
        const int shared = gradients && g->zero == 2 && g->ts.t[t].sharded;
        const size_t nelem = tensor_local(shared ? &g->os.t[t] : &g->ts.t[t]);
        const size_t bad = gradients ? count_bad(g, gpt_grad(g, t, layer), FO_FP32, nelem, piece)
                                     : count_bad(g, gpt_weight(g, t, layer), FO_FLOATX, nelem, piece);
        if (bad > 0 && f.nbad++ == 0) { f.tensor = t, f.layer = layer, f.count = bad, f.nelem = nelem; }
    }
    return f;
}

// ---- as text ----------------------------------------------------------------------------------------------
static void print_found(FILE* out, const GPT* g, const char* what, const char* pass, const Found* f) {
    const Tensor* t = &g->ts.t[f->tensor];
    char layer[32] = "";
    if (f->nbad == 0) {
        fprintf(out, "%s are finite", what);
        return;
    }
    if (t->layers > 1) { (void)snprintf(layer, sizeof layer, " layer %d", f->layer); }
    fprintf(out, "%s are not finite in %d of %d tensors, first on the %s pass in %s%s (%zu of %zu numbers)",
            what, f->nbad, f->ntensors, pass, t->name, layer, f->count, f->nelem);
}

// shown: micro-steps that are told of each rank, those alone whose loss is not finite; -1: all
static void print_rank(FILE* out, const Trainer* tr, int rank, const Told* told, int shown) {
    const GPT* g = &tr->gpt;
    const Mesh m = mesh_of(tr->opt, rank);
    const size_t ntok = (size_t)tr->opt->batch * (size_t)tr->opt->seq_len;
    int nshown = 0;
    fprintf(out, "rank %d (dp %d, up %d, tp %d): ", rank, m.d, m.u, m.t);
    print_found(out, g, "weights", "forward", &told->weights);
    fprintf(out, "; ");
    print_found(out, g, "gradients", "backward", &told->grads);
    fprintf(out, "\n");
    for (int i = 0; i < tr->grad_accum && m.t == 0; i++) { // the ranks of a tp group have the same losses
        const ToldMicro* micro = &told->micro[i];
        if (shown >= 0 && (isfinite(micro->loss) || nshown++ >= shown)) { continue; }
        fprintf(out, "rank %d: micro-step %d of %d: loss %f, from tokens %zu to %zu of %s\n", rank, i + 1,
                tr->grad_accum, micro->loss / (double)g->Nt, micro->first, micro->first + ntok - 1,
                micro->shard);
    }
}

static void print_all(FILE* out, const Trainer* tr, const char* head, const char* told, size_t each,
                      int shown) {
    fputs(head, out);
    for (int r = 0; r < fo_group_size(tr->world); r++) {
        print_rank(out, tr, r, (const Told*)(const void*)(told + (size_t)r * each), shown);
    }
}

// the report as a file, complete or not at all. It is no reason to hide the error that it tells of
static void write_file(const Trainer* tr, const char* head, const char* told, size_t each) {
    char path[CHECKPOINT_PATH + 32], tmp[CHECKPOINT_PATH + 40];
    (void)snprintf(path, sizeof path, "%s/nan_%d.txt", tr->opt->out, tr->step + 1);
    (void)snprintf(tmp, sizeof tmp, "%s.tmp", path);
    FILE* f = fopen(tmp, "w");
    if (f) { print_all(f, tr, head, told, each, -1); }
    if (!f || fclose(f) != 0 || rename(tmp, path) != 0) {
        fprintf(stderr, "%s: cannot be written: %s\n", path, strerror(errno));
        unlink(tmp);
        return;
    }
    fprintf(stderr, "all micro-steps: %s\n", path);
}

int nonfinite_stop(Trainer* tr, double loss, double norm, double lr, char err[TRAIN_ERR]) {
    const size_t each = sizeof(Told) + (size_t)tr->grad_accum * sizeof(ToldMicro);
    char* all = (char*)calloc((size_t)fo_group_size(tr->world), each);
    char* piece = (char*)malloc(PIECE_NBYTES);
    char head[256];
    fo_require(all != NULL && piece != NULL, "out of memory");
    Told* own = (Told*)(void*)(all + (size_t)tr->rank * each);
    own->weights = look(&tr->gpt, 0, piece);
    own->grads = look(&tr->gpt, 1, piece);
    for (int i = 0; i < tr->grad_accum; i++) {
        ToldMicro* micro = &own->micro[i];
        const char* shard = tr->micros[i].shard ? tr->micros[i].shard : "";
        const size_t n = strlen(shard), most = sizeof micro->shard - 1;
        micro->loss = tr->micros[i].loss, micro->first = tr->micros[i].first;
        memcpy(micro->shard, n > most ? shard + n - most : shard, n > most ? most : n);
    }
    gpt_gather_host(&tr->gpt, all, each);
    if (tr->rank == 0) {
        (void)snprintf(
            head, sizeof head,
            "step %d of %d: loss %f, norm of the gradient %f, learning rate %.2e, before any clipping\n",
            tr->step + 1, tr->nsteps, loss, norm, lr);
        print_all(stderr, tr, head, all, each, MOST_SHOWN);
        if (tr->opt->out[0]) { write_file(tr, head, all, each); }
    }
    free(piece);
    free(all);
    return train_error(err,
                       "step %d: the loss is %f, the gradient's norm %f: a smaller -l, a longer -u, or "
                       "--ignore-nan 1 to go on",
                       tr->step + 1, loss, norm);
}
