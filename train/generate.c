// generate.c -- prefill, decode, and the loop around them. See generate.h.
#include "train/generate.h"
#include <stdlib.h>
#include "train/rng.h"
#include "train/sampler.h"

// ---- open and close ---------------------------------------------------------------------------------------
int generator_shape(const GPT* g, int n, int longest, int* B, int* T) {
    const int most = g->B_max * g->T_max;
    for (*B = n; *B > 0; --*B) {
        for (*T = longest; *T <= most / *B; ++*T) {
            if (gpt_can_cut(g, *B, *T)) { return *B; }
        }
        if (*B <= g->B_max && longest <= g->T_max) { // training's own shape: some sequences are none
            *B = g->B_max, *T = g->T_max;
            return *B;
        }
    }
    return 0;
}

// a group's link, as the model of an all-reduce wants it
static double latency_us(const FoGroup* g) {
    return 1e6 * fo_group_message_s(g, 0);
}

static double gbytes_s(const FoGroup* g) { // infinite where nothing is emulated or measured
    return 1.0 / (fo_group_message_s(g, 1000000000) - fo_group_message_s(g, 0));
}

static FoAllreduce plan_of(const FoGroup* g, size_t nbytes) {
    return fo_model_allreduce(fo_group_size(g), nbytes, gbytes_s(g), latency_us(g));
}

void generator_open(Generator* x, GPT* g, int B, int T, int most) {
    const GPTConfig c = g->config;
    const size_t b = (size_t)B, C = (size_t)c.C, tp = (size_t)g->mesh.tp, P = (size_t)g->mesh.up * tp;
    const size_t fx = sizeof(floatX);
    FoDevice* d = g->device;
    memset(x, 0, sizeof *x);
    x->g = g, x->B = B, x->T = T, x->room = most > T ? most : T;
    x->seq_plan = plan_of(g->seq, b * C * sizeof(float));
    x->tp_plan = plan_of(g->group[GROUP_TP], b * C * sizeof(float));
    x->widest = fo_cut((size_t)c.Vp, g->mesh.tp, 1);
    x->cache = (floatX*)fo_malloc(d, (size_t)c.L * 2 * b * (size_t)x->room * (size_t)g->Cu * fx);
    x->x = (floatX*)fo_malloc(d, b * C * fx);
    x->ln = (floatX*)fo_malloc(d, b * C * fx);
    x->att = (floatX*)fo_malloc(d, b * (size_t)g->Cu * fx);
    x->qkv = (floatX*)fo_malloc(d, b * 3 * (size_t)g->Cu * fx);
    x->fch = (floatX*)fo_malloc(d, b * (size_t)g->F * fx);
    x->gelu = (floatX*)fo_malloc(d, b * (size_t)g->F * fx);
    x->rows = (floatX*)fo_malloc(d, P * b * C * fx);
    x->mean = (float*)fo_malloc(d, b * sizeof(float));
    x->rstd = (float*)fo_malloc(d, b * sizeof(float));
    x->parts = (float*)fo_malloc(d, P * b * C * sizeof(float));
    x->sum = (float*)fo_malloc(d, b * C * sizeof(float));
    x->logits = (float*)fo_malloc(d, tp * b * x->widest * sizeof(float));
    x->pos = (int*)fo_malloc(d, 5 * b * sizeof(int));
    x->wpe_pos = x->pos + b, x->mine = x->pos + 2 * b, x->from = x->pos + 3 * b, x->all = x->pos + 4 * b;
    x->host_ints = (int*)malloc(5 * b * sizeof(int));
    x->host_logits = (float*)malloc(tp * b * x->widest * sizeof(float));
    fo_require(x->host_ints && x->host_logits, "out of memory");
}

void generator_close(Generator* x) {
    void* const arrays[] = {x->cache, x->x,    x->ln,   x->att,   x->qkv, x->fch,    x->gelu,
                            x->rows,  x->mean, x->rstd, x->parts, x->sum, x->logits, x->pos};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        fo_free(x->g->device, arrays[i]);
    }
    free(x->host_ints);
    free(x->host_logits);
    memset(x, 0, sizeof *x);
}

// ---- rows and logits --------------------------------------------------------------------------------------
/* collect_rows -- out[b] = row mine[b] of the `from`th rank's table, for each sequence: its last token's, or
 * the embedding of its next. Each rank sends a row for each sequence, its own or any.
 */
static void collect_rows(Generator* x, floatX* out, const floatX* table, FoGroup* group) {
    const size_t B = (size_t)x->B, C = (size_t)x->g->config.C;
    FoStream* s = x->g->compute;
    fo_gather_rows(x->rows + (size_t)fo_group_rank(group) * B * C, table, x->mine, B, (int)C, s);
    fo_allgather(group, x->rows, B * C * sizeof(floatX), s);
    fo_gather_rows(out, x->rows, x->from, B, (int)C, s);
}

// the final layer norm and this rank's part of the vocabulary, then everyone's; waits. An idle sequence's
// logits are not written
static void head(Generator* x, float* logits, const int* idle) {
    const GPT* g = x->g;
    const size_t B = (size_t)x->B, block = B * x->widest, V = (size_t)g->config.V;
    const int C = g->config.C;
    FoStream* s = g->compute;
    fo_layernorm_forward(x->ln, x->mean, x->rstd, x->x, gpt_weight(g, LNFW, 0), gpt_weight(g, LNFB, 0), B, C,
                         s);
    fo_matmul_forward(x->logits + (size_t)g->mesh.t * block, x->ln, gpt_weight(g, WTE, 0), NULL, B, C, g->Vl,
                      FO_FP32, s);
    fo_allgather(g->group[GROUP_TP], x->logits, block * sizeof(float), s);
    fo_download(x->host_logits, x->logits, (size_t)g->mesh.tp * block * sizeof(float), s);
    fo_stream_sync(s);
    for (size_t b = 0; b < B; b++) {
        for (int p = 0; p < g->mesh.tp && !idle[b]; p++) {
            const size_t v0 = g->first_row[p], end = g->first_row[p + 1] < V ? g->first_row[p + 1] : V;
            const float* from = x->host_logits + (size_t)p * block + b * (g->first_row[p + 1] - v0);
            if (end > v0) { memcpy(logits + b * V + v0, from, (end - v0) * sizeof(float)); }
        }
    }
}

// ---- prefill ----------------------------------------------------------------------------------------------
void generator_prefill(Generator* x, float* logits, const int* ids, const int* len) {
    GPT* g = x->g;
    const size_t B = (size_t)x->B;
    const int own = fo_group_rank(g->seq);
    int *mine = x->host_ints, *from = mine + B, *idle = from + B;
    gpt_batch(g, ids, NULL, x->B, x->T);
    g->cache = x->cache, g->room = x->room;
    gpt_forward(g);
    g->cache = NULL;
    for (int b = 0; b < x->B; b++) {
        size_t row = len[b] > 0 ? fo_layout_row(g->layout, b, len[b] - 1) : 0;
        int owner = (int)(row / g->n);
        idle[b] = len[b] == 0;
        mine[b] = owner == own ? (int)(row % g->n) : 0;
        from[b] = owner * x->B + b;
    }
    fo_upload(x->mine, mine, B * sizeof(int), g->compute);
    fo_upload(x->from, from, B * sizeof(int), g->compute);
    collect_rows(x, x->x, g->acts.resid + (size_t)g->config.L * g->n * (size_t)g->config.C, g->seq);
    head(x, logits, idle);
}

// ---- decode -----------------------------------------------------------------------------------------------
// x = token embedding, from the rank that has it, plus position
static void embed(Generator* x, const int* token, const int* pos, int* idle) {
    GPT* g = x->g;
    const size_t B = (size_t)x->B;
    int *h_pos = x->host_ints, *wpe_pos = h_pos + B, *mine = wpe_pos + B, *from = mine + B, *all = from + B;
    for (int b = 0; b < x->B; b++) {
        int id = pos[b] < 0 ? 0 : token[b], owner = 0;
        while ((size_t)id >= g->first_row[owner + 1]) {
            owner++;
        }
        idle[b] = pos[b] < 0;
        h_pos[b] = pos[b], wpe_pos[b] = pos[b] < 0 ? 0 : pos[b];
        mine[b] = owner == g->mesh.t ? id - g->v0 : 0;
        from[b] = owner * x->B + b;
        all[b] = b;
    }
    fo_upload(x->pos, h_pos, 5 * B * sizeof(int), g->compute);
    collect_rows(x, x->ln, gpt_weight(g, WTE, 0), g->group[GROUP_TP]);
    fo_encoder_forward(x->x, x->ln, gpt_weight(g, WPE, 0), x->all, x->wpe_pos, B, g->config.C, g->compute);
}

// x += inp @ weight^T, summed over the group, + bias
static void project(Generator* x, const floatX* inp, const floatX* weight, const floatX* bias, int K,
                    FoAllreduce plan, FoGroup* group) {
    const size_t B = (size_t)x->B;
    const int C = x->g->config.C;
    const void* const sum[1] = {x->sum};
    FoStream* s = x->g->compute;
    fo_matmul_forward(x->parts + (size_t)fo_group_rank(group) * B * (size_t)C, inp, weight, NULL, B, K, C,
                      FO_FP32, s);
    fo_allreduce(plan, x->sum, x->parts, B * (size_t)C, group, s);
    fo_accumulate(x->x, sum, x->x, bias, B, C, 1, FO_FP32, s);
}

static void decode_layer(Generator* x, int l) {
    GPT* g = x->g;
    const size_t B = (size_t)x->B, before = fo_heads_before(&g->heads, g->mesh.u);
    const int C = g->config.C, Cu = g->Cu;
    floatX* cache = x->cache + (size_t)l * 2 * B * (size_t)x->room * (size_t)Cu;
    FoStream* s = g->compute;
    fo_layernorm_forward(x->ln, x->mean, x->rstd, x->x, gpt_weight(g, LN1W, l), gpt_weight(g, LN1B, l), B, C,
                         s);
    fo_matmul_forward(x->qkv, x->ln, gpt_weight(g, QKVW, l) + 3 * before * (size_t)C,
                      gpt_weight(g, QKVB, l) + 3 * before, B, C, 3 * Cu, FO_FLOATX, s);
    fo_attention_decode(x->att, cache, x->qkv, x->pos, x->B, x->room, g->NHu, g->heads.hs, s);
    project(x, x->att, gpt_weight(g, ATTPROJW, l) + before * (size_t)C, gpt_weight(g, ATTPROJB, l), Cu,
            x->seq_plan, g->seq);
    fo_layernorm_forward(x->ln, x->mean, x->rstd, x->x, gpt_weight(g, LN2W, l), gpt_weight(g, LN2B, l), B, C,
                         s);
    fo_matmul_forward(x->fch, x->ln, gpt_weight(g, FCW, l), gpt_weight(g, FCB, l), B, C, g->F, FO_FLOATX, s);
    fo_gelu_forward(x->gelu, x->fch, B * (size_t)g->F, s);
    // each up rank does it for itself: its tp group has all columns
    project(x, x->gelu, gpt_weight(g, FCPROJW, l), gpt_weight(g, FCPROJB, l), g->F, x->tp_plan,
            g->group[GROUP_TP]);
}

void generator_decode(Generator* x, float* logits, const int* token, const int* pos) {
    int* idle = (int*)malloc((size_t)x->B * sizeof(int));
    fo_require(idle != NULL, "out of memory");
    embed(x, token, pos, idle);
    for (int l = 0; l < x->g->config.L; l++) {
        decode_layer(x, l);
    }
    head(x, logits, idle);
    free(idle);
}

size_t generator_decode_nbytes(const Generator* x) {
    const GPT* g = x->g;
    const Mesh* m = &g->mesh;
    const size_t B = (size_t)x->B, nelem = B * (size_t)g->config.C, peers = (size_t)m->tp - 1;
    size_t layer = fo_allreduce_nbytes(x->seq_plan, nelem, m->up * m->tp, fo_group_rank(g->seq)) +
                   fo_allreduce_nbytes(x->tp_plan, nelem, m->tp, m->t);
    return peers * nelem * sizeof(floatX) + (size_t)g->config.L * layer +
           peers * B * x->widest * sizeof(float);
}

// ---- the loop ---------------------------------------------------------------------------------------------
// sequences that go on at the same time on this rank
typedef struct {
    Generator* x;
    int first, most;           // of the prompts: sequence b is prompt first + b*dp + d; tokens at the end
    int nown;                  // sequences that are one
    int *ids, *len;            // [B, most], [B]
    int *token, *pos, *padded; // [B], [B], [B, T]
    uint64_t* rng;             // [B]
    float* logits;             // [B, V]
} Round;

// what --generate tells at the end, of all ranks together
typedef struct {
    double prefill_s, decode_s;
    size_t prefilled, decoded; // tokens
} Speed;

static void print_plan(const char* what, const FoGroup* g, size_t nbytes) {
    const int P = fo_group_size(g);
    const FoAllreduce plan = plan_of(g, nbytes), other = plan == FO_PUSH ? FO_SCATTER : FO_PUSH;
    if (P == 1) { return; }
    printf("decode: %s: all-reduce of %zu bytes over %d ranks: %s, %.1f us predicted (%s: %.1f us)\n", what,
           nbytes, P, fo_allreduce_name(plan),
           1e6 * fo_model_allreduce_s(plan, P, nbytes, gbytes_s(g), latency_us(g)), fo_allreduce_name(other),
           1e6 * fo_model_allreduce_s(other, P, nbytes, gbytes_s(g), latency_us(g)));
}

static void round_begin(Round* r, const Prompts* p, int first, int seed) {
    const Mesh* m = &r->x->g->mesh;
    r->first = first, r->nown = 0;
    for (int b = 0; b < r->x->B; b++) {
        const int i = first + b * m->dp + m->d;
        r->len[b] = i < p->n ? prompts_tokens(p, i) : 0;
        if (i >= p->n) { continue; }
        memcpy(r->ids + (size_t)b * (size_t)r->most, p->ids + p->first[i], (size_t)r->len[b] * sizeof(int));
        r->rng[b] =
            (uint64_t)seed + (uint64_t)i * 0x9e3779b97f4a7c15u; // whatever the mesh and the others are
        r->nown++;
    }
}

// logits of what follows: from all tokens so far, or from the last and the cache
static void next_logits(Round* r, int prefill) {
    Generator* x = r->x;
    for (int b = 0; b < x->B; b++) {
        const int* ids = r->ids + (size_t)b * (size_t)r->most;
        const int n = r->len[b];
        int* padded = r->padded + (size_t)b * (size_t)x->T;
        r->token[b] = n > 0 ? ids[n - 1] : 0;
        r->pos[b] = n - 1; // of one that has ended, once more
        for (int t = 0; t < x->T && prefill; t++) {
            padded[t] = t < n ? ids[t] : 0;
        }
    }
    if (prefill) {
        generator_prefill(x, r->logits, r->padded, r->len);
    } else {
        generator_decode(x, r->logits, r->token, r->pos);
    }
}

// one token more of each sequence. tk: print it, if it is the only one
static void draw(Round* r, const TrainOptions* opt, const Tokenizer* tk) {
    const int V = r->x->g->config.V;
    for (int b = 0; b < r->x->B; b++) {
        int* ids = r->ids + (size_t)b * (size_t)r->most;
        if (r->len[b] == 0 || r->len[b] >= r->most) { continue; }
        int token = sampler_draw(r->logits + (size_t)b * (size_t)V, V, opt->temperature, opt->top_k,
                                 random_f32(&r->rng[b]));
        ids[r->len[b]++] = token;
        if (tk) {
            tokenizer_print(tk, token, stdout);
            fflush(stdout);
        }
    }
}

// rank 0 prints all sequences of the round, each whole. Collective over the world
static void print_round(Trainer* tr, const Round* r) {
    GPT* g = &tr->gpt;
    const Mesh* m = &g->mesh;
    const size_t B = (size_t)r->x->B, block = B * ((size_t)r->most + 1), P = (size_t)fo_group_size(tr->world);
    int* all = (int*)malloc(P * block * sizeof(int));
    fo_require(all != NULL, "out of memory");
    int* own = all + (size_t)tr->rank * block;
    memcpy(own, r->len, B * sizeof(int));
    memcpy(own + B, r->ids, B * (size_t)r->most * sizeof(int));
    gpt_gather_host(g, all, block * sizeof(int));
    for (int k = 0; k < r->x->B * m->dp && r->first + k < tr->prompts.n && tr->rank == 0; k++) {
        const int* from = all + (size_t)(k % m->dp * m->up * m->tp) * block;
        const int b = k / m->dp;
        printf("prompt %d:\n", r->first + k + 1);
        for (int t = 0; t < from[b]; t++) {
            tokenizer_print(&tr->tokenizer, from[B + (size_t)b * (size_t)r->most + (size_t)t], stdout);
        }
        printf("\n---\n");
    }
    free(all);
}

// the prompts from `first` on that the generator takes at once, over all dp ranks. Returns the signal that
// ended it
static int run_round(Trainer* tr, Round* r, int first, Speed* speed, int (*stopping)(GPT* g)) {
    const Prompts* p = &tr->prompts;
    const int end = first + r->x->B * tr->gpt.mesh.dp, single = p->n == 1 && tr->rank == 0;
    int shortest = r->most, step = 0, stop = 0;
    round_begin(r, p, first, tr->opt->sample_seed);
    for (int i = first; i < end && i < p->n; i++) {
        shortest = prompts_tokens(p, i) < shortest ? prompts_tokens(p, i) : shortest;
        speed->prefilled += (size_t)prompts_tokens(p, i);
    }
    for (int t = 0; t < r->len[0] && single && p->given; t++) {
        tokenizer_print(&tr->tokenizer, r->ids[t], stdout);
    }
    // as many steps on every rank, whatever it has to do: all ask whether to stop
    for (; step < r->most - shortest && !(stop = stopping(&tr->gpt)); step++) {
        double start = fo_now();
        if (r->nown > 0) {
            next_logits(r, step == 0);
            draw(r, tr->opt, single ? &tr->tokenizer : NULL);
        }
        *(step == 0 ? &speed->prefill_s : &speed->decode_s) += fo_now() - start;
    }
    for (int i = first; i < end && i < p->n; i++) {
        int left = r->most - prompts_tokens(p, i), n = step < left ? step : left;
        speed->decoded += (size_t)(n > 0 ? n - 1 : 0); // the first came with the prefill
    }
    if (p->n > 1) { print_round(tr, r); }
    return stop;
}

static void round_open(Round* r, Generator* x, int most) {
    const size_t B = (size_t)x->B;
    memset(r, 0, sizeof *r);
    r->x = x, r->most = most;
    r->ids = (int*)calloc(B * (size_t)most, sizeof(int));
    r->len = (int*)calloc(3 * B, sizeof(int));
    r->token = r->len + B, r->pos = r->token + B;
    r->padded = (int*)calloc(B * (size_t)x->T, sizeof(int));
    r->rng = (uint64_t*)calloc(B, sizeof(uint64_t));
    r->logits = (float*)malloc(B * (size_t)x->g->config.V * sizeof(float));
    fo_require(r->ids && r->len && r->padded && r->rng && r->logits, "out of memory");
}

static void round_close(Round* r) {
    free(r->ids);
    free(r->len);
    free(r->padded);
    free(r->rng);
    free(r->logits);
}

static double rate(size_t ntokens, double seconds) {
    return seconds > 0.0 ? (double)ntokens / seconds : 0.0;
}

int generate(Trainer* tr, int (*stopping)(GPT* g)) {
    GPT* g = &tr->gpt;
    const Prompts* p = &tr->prompts;
    const int dp = g->mesh.dp, each = (p->n + dp - 1) / dp, talks = tr->rank == 0;
    const int most = tr->opt->sample_length < g->config.maxT ? tr->opt->sample_length : g->config.maxT;
    int B, T, stop = 0;
    Generator x;
    Round r;
    Speed speed = {0.0, 0.0, 0, 0};
    double exposed, comm; // of the prefill: not a step's
    fo_require(generator_shape(g, each, p->longest, &B, &T) > 0, "a prompt of %d tokens", p->longest);
    // updated weights that have not left yet (D3) would wait for dp ranks without a prompt, which wait here
    gpt_await_weights(g);
    generator_open(&x, g, B, T, most);
    round_open(&r, &x, most);
    if (talks && tr->nsamples++ == 0) {
        const size_t nbytes = (size_t)B * (size_t)g->config.C * sizeof(float);
        print_plan("attention", g->seq, nbytes);
        print_plan("MLP", g->group[GROUP_TP], nbytes);
    }
    if (talks) { printf("generating:\n---\n"); }
    for (int first = 0; first < p->n && !stop; first += B * dp) {
        stop = run_round(tr, &r, first, &speed, stopping);
    }
    if (talks && p->n == 1) { printf("\n---\n"); }
    if (talks && tr->opt->generate) {
        printf("# prefill: %zu tokens in %.1f ms, %.1f tok/s | decode: %zu tokens in %.1f ms, %.1f tok/s\n",
               speed.prefilled, 1e3 * speed.prefill_s, rate(speed.prefilled, speed.prefill_s), speed.decoded,
               1e3 * speed.decode_s, rate(speed.decoded, speed.decode_s));
    }
    round_close(&r);
    generator_close(&x);
    gpt_take_times(g, &exposed, &comm);
    return stop;
}
