/* gpt.c -- the mesh, sizes, memory and plans of a GPT on one rank. See gpt.h. */
#include "train/gpt.h"
#include <stdlib.h>

const Site gpt_sites[NSITES] = {
    // clang-format off
    [E1] = {"E1", FO_ALLGATHER, GROUP_TP, 1},      [F1] = {"F1", FO_ALLGATHER, GROUP_TP, 0},
    [F2] = {"F2", FO_REDUCESCATTER, GROUP_TP, 0},  [F3] = {"F3", FO_ALLGATHER, GROUP_TP, 0},
    [F4] = {"F4", FO_REDUCESCATTER, GROUP_TP, 0},  [H1] = {"H1", FO_ALLGATHER, GROUP_TP, 0},
    [H2] = {"H2", FO_ALLGATHER, GROUP_TP, 1},      [H2_NEXT] = {"H2", FO_ALLGATHER, GROUP_TP, 1},
    [H3] = {"H3", FO_REDUCESCATTER, GROUP_TP, 0},  [B1] = {"B1", FO_ALLGATHER, GROUP_TP, 0},
    [B2] = {"B2", FO_ALLGATHER, GROUP_TP, 0},      [B3] = {"B3", FO_REDUCESCATTER, GROUP_TP, 0},
    [B4] = {"B4", FO_ALLGATHER, GROUP_TP, 0},      [B5] = {"B5", FO_ALLGATHER, GROUP_TP, 0},
    [B6] = {"B6", FO_REDUCESCATTER, GROUP_TP, 0},  [E2] = {"E2", FO_ALLGATHER, GROUP_TP, 1},
    [B7] = {"B7", FO_REDUCESCATTER, GROUP_TP, 1},  [B7_BACK] = {"B7", FO_ALLGATHER, GROUP_TP, 1},
    [U1] = {"U1", FO_REDUCESCATTER, GROUP_UP, 0},  [U2] = {"U2", FO_REDUCESCATTER, GROUP_UP, 0},
    [U3] = {"U3", FO_REDUCESCATTER, GROUP_UP, 0},  [U4_KV] = {"U4 dk dv", FO_REDUCESCATTER, GROUP_UP, 1},
    [U4_Q] = {"U4 dq", FO_REDUCESCATTER, GROUP_UP, 1},
    [D1] = {"D1", FO_REDUCESCATTER, GROUP_RP, 1},  [D1_2] = {"D1", FO_REDUCESCATTER, GROUP_RP, 1},
    [D1_3] = {"D1", FO_REDUCESCATTER, GROUP_RP, 1}, [D1_4] = {"D1", FO_REDUCESCATTER, GROUP_RP, 1},
    [D2] = {"D2", FO_REDUCESCATTER, GROUP_RP, 1},  [D2_ROWS] = {"D2 rows", FO_ALLGATHER, GROUP_RP, 1},
    [D3_ROWS] = {"D3 rows", FO_ALLGATHER, GROUP_RP, 1},
    [B7_DP] = {"B7 dp", FO_REDUCESCATTER, GROUP_RP, 1},
    [B7_DP_BACK] = {"B7 dp", FO_ALLGATHER, GROUP_RP, 1},
    // clang-format on
};

Mesh mesh_of(const TrainOptions* opt, int rank) {
    Mesh m = {opt->dp, opt->up, opt->tp, opt->dp * opt->up, 0, 0, 0, 0};
    m.t = rank % m.tp;
    m.p = rank / m.tp;
    m.u = m.p % m.up;
    m.d = m.p / m.up;
    return m;
}

int mesh_color(const Mesh* m, int split) {
    const int colors[NSPLITS] = {m->p, m->d * m->tp + m->t, m->t, m->u * m->tp + m->t, m->d};
    return colors[split];
}

// ---- where things are -------------------------------------------------------------------------------------
const floatX* gpt_weight(const GPT* g, int tensor, int l) {
    return g->params + g->ts.t[tensor].offset + (size_t)l * tensor_local(&g->ts.t[tensor]);
}

// gradients of matrices, which come first, have so many elements
static size_t grad_matrices(const GPT* g) {
    return g->zero == 2 ? g->os.nmatrix : g->ts.nmatrix;
}

float* gpt_grad(const GPT* g, int tensor, int l) {
    if (!g->grads) { return NULL; }
    const Tensor *t = &g->ts.t[tensor], *shared = &g->os.t[tensor];
    if (t->sharded && g->zero == 2) { return g->grads + shared->offset + (size_t)l * tensor_local(shared); }
    size_t at = t->sharded ? t->offset : grad_matrices(g) + t->offset - g->ts.nmatrix;
    return g->grads + at + (size_t)l * tensor_local(t);
}

size_t gpt_replicated(const GPT* g) {
    size_t tp = (size_t)g->mesh.tp;
    return (g->ts.nelem - g->ts.ncut + tp - 1) / tp * tp;
}

size_t gpt_vectors(const GPT* g) {
    size_t rp = (size_t)g->mesh.rp,
           nelem = g->ts.ncut - g->ts.nmatrix + gpt_replicated(g) / (size_t)g->mesh.tp;
    return (nelem + rp - 1) / rp * rp;
}

static size_t grads_nelem(const GPT* g) {
    return grad_matrices(g) + g->ts.ncut - g->ts.nmatrix + gpt_replicated(g);
}

/* The head goes slice by slice, so that logits of a slice exist, never [Nt, V]: about 1,024 rows, and two
 * slices at least where there are peers, so that one's statistics travel while the next is computed. m:
 * GPT.head_chunks, or 1 to find it. Each slice adds to the gradient of wte, so their number must not depend
 * on the mode: every mode, the same bits.
 */
int gpt_head_slices(size_t Nt, int tp, int m) {
    size_t want = (Nt + 1023) / 1024, n = Nt / (size_t)tp;
    if (want < 2 && tp > 1) { want = 2; }
    while (want > 1 && n % (want * (size_t)m) != 0) {
        want--;
    }
    return (int)want;
}

size_t gpt_head_place(const GPT* g, size_t row) {
    const size_t per_slice = g->n / (size_t)g->nslices, owner = row / g->n, i = row % g->n;
    return (i / per_slice * (size_t)g->mesh.tp + owner) * per_slice + i % per_slice;
}

int gpt_can_cut(const GPT* g, int B, int T) {
    const Mesh* m = &g->mesh;
    const int P = m->up * m->tp, zigzag = m->up > 1 || B % m->tp != 0;
    return (!zigzag || T % (2 * P) == 0) && (m->tp == 1 || B * T / P % g->chunks == 0);
}

// rows of a slice of the head, if sequences have T tokens
static size_t slice_rows(const GPT* g, int T) {
    const size_t Nt = (size_t)g->B_max * (size_t)T / (size_t)g->mesh.up;
    return Nt / (size_t)gpt_head_slices(Nt, g->mesh.tp, g->head_chunks);
}

int gpt_short_T(const GPT* g, int longest) {
    const int unit = 32; // lengths that are no multiple of it are slow on some devices
    int T = (longest + unit - 1) / unit * unit;
    while (T < g->T_max && (!gpt_can_cut(g, g->B_max, T) || slice_rows(g, T) > slice_rows(g, g->T_max))) {
        T += unit;
    }
    return T < g->T_max ? T : g->T_max;
}

int gpt_is_cut(const GPT* g, int i) {
    // behind a gather an all-to-all goes chunk by chunk already
    return !gpt_sites[i].whole && !((i == U1 || i == U3) && g->mesh.tp > 1);
}

// ---- sizes ------------------------------------------------------------------------------------------------
#define CARVE(p, count, type) carve_add(g, (void**)(p), (size_t)(count) * sizeof(type))

static void carve_add(GPT* g, void** ptr, size_t nbytes) {
    fo_require((size_t)g->narrays < sizeof g->arrays / sizeof *g->arrays,
               "more arrays than there is room for");
    Carve* c = &g->arrays[g->narrays++];
    c->ptr = ptr;
    c->nbytes = (nbytes + 63) / 64 * 64;
    g->acts_nbytes += c->nbytes;
}

// what stays from forward to backward
static void carve_kept(GPT* g, size_t N, size_t Nt, size_t n) {
    GPTActs* a = &g->acts;
    size_t L = (size_t)g->config.L, C = (size_t)g->config.C, F = (size_t)g->F, Lk = g->recompute == 3 ? 1 : L;
    size_t Lg = g->keep_gathered ? L : 1, Cu = (size_t)g->Cu;
    CARVE(&a->resid, (L + 1) * n * C, floatX), CARVE(&a->mid, Lk * n * C, floatX);
    CARVE(&a->ln1_mean, Lk * n, float), CARVE(&a->ln1_rstd, Lk * n, float);
    CARVE(&a->ln2_mean, Lk * n, float), CARVE(&a->ln2_rstd, Lk * n, float);
    CARVE(&a->lnf_mean, n, float), CARVE(&a->lnf_rstd, n, float);
    CARVE(&a->qkv, Lk * N * 3 * Cu, floatX), CARVE(&a->att, Lk * N * Cu, floatX);
    if (g->mesh.up > 1) { CARVE(&a->att_tokens, Lk * Nt * (size_t)g->Ca, floatX); }
    CARVE(&a->lse, Lk * N * (size_t)g->NHu, float), CARVE(&a->fch, Lk * Nt * F, floatX);
    CARVE(&a->gelu, (g->recompute == 0 ? L : 1) * Nt * F, floatX);
    CARVE(&a->ln1_all, Lg * Nt * C, floatX);
    if (g->keep_gathered || g->recompute == 3) { CARVE(&a->ln2_all, Lg * Nt * C, floatX); }
    if (g->keep_own) { CARVE(&a->ln1_own, L * n * C, floatX), CARVE(&a->ln2_own, L * n * C, floatX); }
}

// what one operation after another uses
static void carve_used(GPT* g, size_t N, size_t Nt, size_t n, FoDtype wire) {
    GPTActs* a = &g->acts;
    size_t C = (size_t)g->config.C, F = (size_t)g->F, Ca = (size_t)g->Ca, Cu = (size_t)g->Cu;
    size_t w = fo_dtype_nbytes(wire);
    if (g->mesh.up > 1) { CARVE(&a->up_send, Nt * 3 * Ca, floatX), CARVE(&a->sums, Nt * C, float); }
    CARVE(&a->scalars, FO_MAX_RANKS + 1, Scalars);
    CARVE(&a->partial, Nt * C * w, char), CARVE(&a->received, (Nt - n) * C * w, char);
    CARVE(&a->targets, Nt, int), CARVE(&a->pos, n, int);
    CARVE(&a->pos_dst, n, int), CARVE(&a->pos_start, n + 1, int), CARVE(&a->pos_order, n, int);
    if (g->inference) { return; }
    CARVE(&a->dfch, Nt * F, floatX), CARVE(&a->datt, N * Cu, floatX);
    if (g->mesh.up == 1) {
        CARVE(&a->dqkv, N * 3 * Cu, floatX);
    } else {
        CARVE(&a->dheads.dq32, N * Cu, float), CARVE(&a->dheads.dq, N * Cu, floatX);
        CARVE(&a->dheads.dkv, N * 2 * Cu, floatX), CARVE(&a->dheads.dq_tokens, Nt * Ca, floatX);
        CARVE(&a->dheads.dkv_tokens, Nt * 2 * Ca, floatX);
    }
    CARVE(&a->dln, n * C, floatX);
    if (g->mesh.dp > 1) { CARVE(&a->ids, (size_t)g->mesh.dp * N, int); }
}

// what the head needs; generating has a head of its own
static void carve_head(GPT* g, size_t Nt) {
    GPTActs* a = &g->acts;
    size_t slice = slice_rows(g, g->T_max);
    CARVE(&a->dall, Nt * (size_t)g->config.C, floatX);
    CARVE(&a->logits, 2 * slice * (size_t)g->Vl, floatX);
    CARVE(&a->stats, 2 * (size_t)g->mesh.tp * slice, FoSoftmaxStat);
    CARVE(&a->losses, Nt, float);
}

// what gradients need on their way through the replicas
static void carve_grads(GPT* g) {
    GPTActs* a = &g->acts;
    size_t rp = (size_t)g->mesh.rp, C = (size_t)g->config.C, most = 0, most_own = 0;
    size_t tp = (size_t)g->mesh.tp;
    CARVE(&g->grad_staging.received, gpt_replicated(g) / tp * (tp - 1), float);
    CARVE(&a->vectors, gpt_vectors(g), float);
    if (rp == 1) { return; }
    CARVE(&g->vector_staging.received, gpt_vectors(g) / rp * (rp - 1), float);
    for (int i = WTE + 1; i < NTENSORS; i++) {
        for (int j = 0; g->ts.t[i].sharded && j < tensor_nunits(&g->ts, i); j++) {
            TensorUnit u = tensor_unit(&g->ts, i, j);
            size_t own = fo_cut_n(u.rows, g->mesh.rp, g->mesh.p) * u.cols;
            most = u.rows * u.cols > most ? u.rows * u.cols : most;
            most_own = own > most_own ? own : most_own;
        }
    }
    size_t V = (size_t)g->Vl, own_V = fo_cut_n(V, g->mesh.rp, g->mesh.p);
    for (int i = 0; i <= FO_GRAD_SLOTS; i++) {
        const int wte = i == FO_GRAD_SLOTS;
        CARVE(&a->grad_received[i], (rp - 1) * (wte ? own_V * C : most_own), float);
        if (g->zero == 2) { CARVE(&a->grad_temp[i], wte ? V * C : most, float); }
    }
}

// chunks of an operation in the mode chosen
static int first_chunks(const GPT* g, int i) {
    return gpt_is_cut(g, i) ? i == H1 || i == H3 ? g->head_chunks : g->chunks : 1;
}

void gpt_sizes(GPT* g, GPTConfig c, const TrainOptions* opt, int rank) {
    const int hs = c.C / c.NH;
    const Mesh m = mesh_of(opt, rank);
    memset(g, 0, sizeof *g);
    g->config = c, g->mesh = m;
    g->zero = m.rp > 1 ? opt->zero : 0, g->recompute = opt->recompute;
    g->inference = opt->generate || opt->eval, g->z_loss = opt->z_loss;
    // one rank's rows are all rows: kept or not, there is nothing to gather
    int keeps = opt->recompute < 2;
    g->keep_gathered = opt->recompute < 3 && (!opt->sp || opt->keep_gathered || (keeps && m.tp == 1));
    g->keep_own = keeps && !g->keep_gathered;
    g->B_max = opt->batch, g->T_max = opt->seq_len, g->chunks = overlap_cut(opt->overlap);
    size_t N = (size_t)g->B_max * (size_t)g->T_max, Nt = N / (size_t)m.up, n = Nt / (size_t)m.tp;
    size_t own = n / (size_t)gpt_head_slices(Nt, m.tp, 1);
    int head_m = m.tp > 1 ? g->chunks : 1;
    g->head_chunks = head_m;
    while (head_m % g->head_chunks || own % (size_t)g->head_chunks) {
        g->head_chunks--;
    }
    for (int i = 0; i < NSITES; i++) {
        g->site_m[i] = first_chunks(g, i);
    }
    TensorCuts whole = {m.tp, m.t, m.up, 1, 0}, shared = {m.tp, m.t, m.up, m.rp, m.p};
    tensors_init(&g->ts, c, whole);
    tensors_init(&g->os, c, g->zero ? shared : whole);
    int NHl = (int)fo_cut_n((size_t)c.NH, m.tp, m.t);
    g->heads = fo_heads(NHl, hs, m.up, m.u);
    g->NHu = g->heads.head[m.u + 1] - g->heads.head[m.u];
    g->Ca = NHl * hs, g->Cu = g->NHu * hs;
    g->F = (int)fo_cut_n((size_t)c.C * 4, m.tp, m.t);
    for (int p = 0; p <= m.tp; p++) {
        g->first_row[p] = fo_cut((size_t)c.Vp, m.tp, p);
    }
    g->v0 = (int)g->first_row[m.t];
    g->Vl = (int)(g->first_row[m.t + 1] - g->first_row[m.t]);
    g->valid = c.V - g->v0 < 0 ? 0 : c.V - g->v0 < g->Vl ? c.V - g->v0 : g->Vl;
    carve_kept(g, N, Nt, n);
    carve_used(g, N, Nt, n, opt->wire);
    if (!opt->generate) { carve_head(g, Nt); }
    if (g->inference) { return; }
    carve_grads(g);
    if (m.rp > 1) { g->acts_nbytes += fo_sparse_nbytes(Nt, (size_t)g->Vl, m.rp, m.p, c.C); }
}

double gpt_flops_a_token(const GPT* g, int T) {
    return 6.0 * (double)g->ts.ntotal + 6.0 * g->config.L * (double)g->config.C * T;
}

GPTBytes gpt_nbytes(const GPT* g) {
    size_t masters = FO_FLOATX == FO_FP32 && g->os.cuts.nshards == 1 ? 2 : 3;
    GPTBytes b = {g->ts.nelem * sizeof(floatX), grads_nelem(g) * sizeof(float),
                  masters * g->os.nelem * sizeof(float), g->acts_nbytes};
    if (g->inference) { b.grads = b.optimizer = 0; }
    return b;
}

// ---- plans ------------------------------------------------------------------------------------------------
const char* gpt_op_name(int i) {
    return i < NSITES ? gpt_sites[i].name : "D3";
}

int gpt_site_ranks(const GPT* g, int i) {
    GroupName group = gpt_sites[i].group;
    return group == GROUP_TP ? g->mesh.tp : group == GROUP_UP ? g->mesh.up : g->mesh.rp;
}

int gpt_site_chunks(const GPT* g, int i) {
    return g->site_m[i];
}

FoTopology gpt_site_topology(const TrainOptions* opt, int i) {
    return gpt_sites[i].whole || gpt_sites[i].group != GROUP_TP ? FO_DIRECT : opt->topology;
}

static FoOverlap* open_plan(const GPT* g, const TrainOptions* opt, int i) {
    const Site* x = &gpt_sites[i];
    return fo_overlap_create(x->name, x->kind, opt->overlap.mode, g->site_m[i], gpt_site_topology(opt, i),
                             g->group[x->group], g->compute, g->comm[x->group]);
}

void gpt_set_chunks(GPT* g, const TrainOptions* opt, int i, int m) {
    fo_require(gpt_is_cut(g, i), "%s is not cut into chunks", gpt_sites[i].name);
    g->site_m[i] = m;
    fo_overlap_destroy(g->o[i]);
    g->o[i] = open_plan(g, opt, i);
}

// a plan for each operation; modes none and slice:M go through the same calls as flash
static void open_plans(GPT* g, const TrainOptions* opt) {
    for (int i = 0; i < NSITES; i++) {
        g->o[i] = open_plan(g, opt, i);
    }
    g->d3 = (FoOverlap**)calloc((size_t)g->config.L + 1, sizeof(FoOverlap*));
    fo_require(g->d3 != NULL, "out of memory");
    for (int b = 0; b <= g->config.L; b++) {
        g->d3[b] = fo_overlap_create(gpt_op_name(NSITES), FO_ALLGATHER, opt->overlap.mode, 1, FO_DIRECT,
                                     g->group[GROUP_RP], g->compute, g->comm[GROUP_RP]);
    }
}

void gpt_take_times(GPT* g, double* exposed_ms, double* comm_ms) {
    *exposed_ms = *comm_ms = 0.0;
    memset(g->last_exposed_ms, 0, sizeof g->last_exposed_ms);
    for (int k = 0; k < NSITES + g->config.L + 1; k++) {
        const int i = k < NSITES ? k : NSITES;
        FoOverlap* o = k < NSITES ? g->o[k] : g->d3[k - NSITES];
        *exposed_ms += o->exposed_ms, *comm_ms += o->comm_ms;
        g->last_exposed_ms[i] += o->exposed_ms;
        g->exposed_ms[i] += o->exposed_ms, g->comm_ms[i] += o->comm_ms;
        g->sent[i].nbytes += o->nbytes_sent, g->sent[i].nmessages += o->nmessages;
        fo_overlap_reset(o);
    }
}

Sent gpt_sent(const GPT* g, int site) {
    Sent sent = g->sent[site];
    for (int i = 0; i < (site < NSITES ? 1 : g->config.L + 1); i++) {
        const FoOverlap* o = site < NSITES ? g->o[site] : g->d3[i];
        sent.nbytes += o->nbytes_sent, sent.nmessages += o->nmessages;
    }
    return sent;
}

void gpt_gather_host(GPT* g, void* all, size_t nbytes_each) {
    const size_t nbytes = (size_t)fo_group_size(g->world) * nbytes_each;
    const size_t own = (size_t)fo_group_rank(g->world) * nbytes_each;
    FoStream* s = g->comm[GROUP_TP];
    char* device = (char*)fo_malloc(g->device, nbytes);
    fo_upload(device + own, (const char*)all + own, nbytes_each, s);
    fo_allgather(g->world, device, nbytes_each, s);
    fo_download(all, device, nbytes, s);
    fo_stream_sync(s);
    fo_free(g->device, device);
}

void gpt_send_layer(GPT* g, int l) {
    for (int i = WTE; i < NTENSORS; i++) {
        const Tensor* t = &g->ts.t[i];
        for (int j = 0; gpt_in_bucket(g, i, l) && j < tensor_nunits(&g->ts, i); j++) {
            const TensorUnit u = tensor_unit(&g->ts, i, j);
            size_t at = t->offset + (l < 0 ? 0 : (size_t)l * tensor_local(t)) + u.offset;
            fo_allgather_rows_begin(g->d3[l + 1], g->params + at, u.cols * sizeof(floatX), u.rows);
        }
    }
}

void gpt_send_weights(GPT* g) {
    if (!g->weights_wait) { return; }
    g->weights_wait = 0;
    for (int l = 1; l < g->config.L; l++) {
        gpt_send_layer(g, l);
    }
    gpt_send_layer(g, -1); // the head needs it, after all layers; the embedding needs some rows of it
}

void gpt_await_weights(GPT* g) {
    gpt_send_weights(g);
    for (int b = 0; b <= g->config.L; b++) {
        fo_allgather_end(g->d3[b]);
    }
    fo_stream_sync(g->compute);
}

// ---- graphs -----------------------------------------------------------------------------------------------
// sign 1: adds to x what the operations have counted on the host, -1: takes it off
static void count(const GPT* g, MicroGraph* x, int sign) {
    for (int k = 0; k < NSITES + g->config.L + 1; k++) {
        const FoOverlap* o = k < NSITES ? g->o[k] : g->d3[k - NSITES];
        x->comm_ms[k] += sign * o->comm_ms;
        x->sent[k].nbytes += (size_t)sign * o->nbytes_sent;
        x->sent[k].nmessages += (size_t)sign * o->nmessages;
    }
}

static void launch_graph(GPT* g, const MicroGraph* x) {
    fo_graph_launch(x->graph);
    g->weights_wait = 0;
    for (int k = 0; k < NSITES + g->config.L + 1; k++) {
        FoOverlap* o = k < NSITES ? g->o[k] : g->d3[k - NSITES];
        o->comm_ms += x->comm_ms[k];
        o->nbytes_sent += x->sent[k].nbytes, o->nmessages += x->sent[k].nmessages;
        fo_group_sent_by_graph(o->group, x->sent[k].nbytes, x->sent[k].nmessages);
    }
}

int gpt_graph_begin(GPT* g, int push) {
    if (!g->use_graphs) { return 1; }
    MicroGraph* x = &g->graphs[2 * g->weights_wait + push];
    if (x->graph) {
        launch_graph(g, x);
        return 0;
    }
    if (x->ncalls++ == 0) { return 1; }
    const size_t n = NSITES + (size_t)g->config.L + 1;
    x->sent = (Sent*)calloc(n, sizeof *x->sent);
    x->comm_ms = (double*)calloc(n, sizeof *x->comm_ms);
    fo_require(x->sent && x->comm_ms, "out of memory");
    count(g, x, -1);
    x->graph = fo_graph_begin(g->compute);
    g->capturing = x;
    return 1;
}

void gpt_graph_end(GPT* g) {
    MicroGraph* x = g->capturing;
    if (!x) { return; }
    g->capturing = NULL;
    fo_graph_end(x->graph);
    count(g, x, 1);
    fo_graph_launch(x->graph); // its calls have been counted as they were queued
}

void gpt_graphs_free(GPT* g) {
    for (int i = 0; i < 4; i++) {
        MicroGraph* x = &g->graphs[i];
        if (x->graph) { fo_graph_free(x->graph); }
        free(x->sent);
        free(x->comm_ms);
        x->graph = NULL, x->sent = NULL, x->comm_ms = NULL;
    }
}

// ---- open and close ---------------------------------------------------------------------------------------
static void open_groups(GPT* g, FoGroup* world) {
    static const char* const names[NGROUPS] = {"comm tp", "comm up", "comm dp"};
    FoGroup** const groups[NSPLITS] = {&g->group[GROUP_TP], &g->group[GROUP_UP], &g->group[GROUP_RP], &g->dp,
                                       &g->seq};
    g->world = world;
    for (int i = 0; i < NSPLITS; i++) {
        *groups[i] = fo_group_split(world, mesh_color(&g->mesh, i));
    }
    g->compute = fo_stream_create(g->device, "compute");
    for (int i = 0; i < NGROUPS; i++) {
        g->comm[i] = fo_stream_create(g->device, names[i]);
    }
}

static void open_staging(GPT* g, const TrainOptions* opt) {
    GPTActs* a = &g->acts;
    g->staging.partial = a->partial, g->staging.received = a->received, g->staging.wire = opt->wire;
    if (g->inference) { return; }
    g->grad_staging.partial = g->grads + grad_matrices(g) + g->ts.ncut - g->ts.nmatrix;
    g->grad_staging.wire = FO_FP32;
    g->vector_staging.partial = a->vectors, g->vector_staging.wire = FO_FP32;
    for (int i = 0; i <= FO_GRAD_SLOTS; i++) {
        const int wte = i == FO_GRAD_SLOTS;
        FoGradSlot* slot = wte ? &g->wte_slot : &g->reducer.slot[i];
        slot->o = g->o[wte ? D2 : D1 + i];
        slot->received = a->grad_received[i];
        slot->temp = wte ? NULL : a->grad_temp[i]; // wte's is filled slice by slice
    }
}

void gpt_open(GPT* g, GPTConfig c, const TrainOptions* opt, FoGroup* world, FoDevice* device) {
    gpt_sizes(g, c, opt, fo_group_rank(world));
    g->device = device;
    g->use_graphs = opt->graph;
    open_groups(g, world);
    open_plans(g, opt);
    size_t N = (size_t)g->B_max * (size_t)g->T_max, Nt = N / (size_t)g->mesh.up;
    g->params = (floatX*)fo_malloc(device, g->ts.nelem * sizeof(floatX));
    if (!g->inference) {
        g->grads = (float*)fo_malloc(device, grads_nelem(g) * sizeof(float));
        g->m = (float*)fo_malloc(device, g->os.nelem * sizeof(float));
        g->v = (float*)fo_malloc(device, g->os.nelem * sizeof(float));
        // an FP32 build's parameters are their own masters, as long as a rank has all of both
        g->master = FO_FLOATX == FO_FP32 && g->os.cuts.nshards == 1
                        ? (float*)(void*)g->params
                        : (float*)fo_malloc(device, g->os.nelem * sizeof(float));
    }
    for (int i = 0; i < g->narrays; i++) {
        *g->arrays[i].ptr = fo_malloc(device, g->arrays[i].nbytes);
    }
    // gathered again in the backward pass, one after the other's last use: one buffer for both
    if (!g->acts.ln2_all) { g->acts.ln2_all = g->acts.ln1_all; }
    open_staging(g, opt);
    g->fetch = fo_fetch_create(device, Nt);
    if (g->mesh.rp > 1 && !g->inference) {
        g->sparse = fo_sparse_create(device, Nt, (size_t)g->Vl, g->mesh.rp, g->mesh.p, c.C);
    }
    g->host_ints = (int*)malloc((2 * Nt + 4 * (Nt / (size_t)g->mesh.tp) + 1) * sizeof(int));
    g->host_ids = (int*)malloc(2 * (size_t)g->mesh.dp * N * sizeof(int));
    g->host_losses = (float*)malloc(Nt * sizeof(float));
    fo_require(g->host_ints && g->host_ids && g->host_losses, "out of memory");
}

void gpt_close(GPT* g) {
    gpt_graphs_free(g);
    for (int i = 0; i < NSITES; i++) {
        fo_overlap_destroy(g->o[i]);
    }
    for (int b = 0; b <= g->config.L; b++) {
        fo_overlap_destroy(g->d3[b]);
    }
    free(g->d3);
    for (int i = 0; i < NGROUPS; i++) {
        fo_stream_destroy(g->comm[i]);
    }
    fo_stream_destroy(g->compute);
    for (int i = 0; i < g->narrays; i++) {
        fo_free(g->device, *g->arrays[i].ptr);
    }
    if ((void*)g->master != (void*)g->params) { fo_free(g->device, g->master); }
    fo_free(g->device, g->v);
    fo_free(g->device, g->m);
    fo_free(g->device, g->grads);
    fo_free(g->device, g->params);
    fo_fetch_destroy(g->device, g->fetch);
    fo_sparse_destroy(g->device, g->sparse);
    free(g->host_ints);
    free(g->host_ids);
    free(g->host_losses);
    fo_group_free(g->seq);
    fo_group_free(g->dp);
    for (int i = 0; i < NGROUPS; i++) {
        fo_group_free(g->group[i]);
    }
}
