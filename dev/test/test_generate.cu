/* test_generate.cu -- prefill and decode on meshes of dp, up and tp in 1 ... 4, of 8 rank threads at most.
 *
 * Logits after each prefix of the fixture's sequences are PyTorch's, from a prefill as from a decode; greedy
 * text of a model that has learnt something is on every mesh what one rank finds without a cache, whatever
 * other sequences are there; a decode sends the bytes that its plans say. Files of prompts; the program:
 * dev/test/program_test.py.
 */
#define TESTING
#include "train_gpt.cu"
#include "dev/test/check.h"
#include "train/sampler.h"
#include "train/weights.h"

enum { NPROMPTS = 5, MOST = 20 };
enum { SLOW = !FO_DEVICE_CPU }; // emulation: fewer meshes, and each in one way

typedef struct {
    GPTConfig config;
    DebugState ref;
    TrainOptions opt;
    const char *model, *name; // file; fixture and mesh
    // greedy text, of all sequences: how many tokens each starts with; what follows
    int n, len[NPROMPTS], most;
    int ids[NPROMPTS][64];
    int B; // sequences at once on a dp rank; 0: as many as there are
    FoAllreduce plan;
    int set_plan; // decode goes by `plan`, whatever the model finds
    double gap;   // of the likeliest token's logit to the next, the smallest that decided
} Case;

// error of logits, dev/fixture/README.md
static const double TOLERANCE = FO_FLOATX == FO_BF16 ? 3e-2 : 1.5e-6;

static void open_model(Case* c, GPT* g, FoGroup* world) {
    char err[TRAIN_ERR];
    FoDevice* device = fo_device_open(fo_group_rank(world), fo_group_size(world));
    gpt_open(g, c->config, &c->opt, world, device);
    fo_require(checkpoint_read_model(c->model, &g->ts, g->params, &g->os, g->master, g->compute, err) == 0,
               "%s", err);
}

static void close_model(GPT* g) {
    FoDevice* device = g->device;
    CHECK(fo_device_nbytes(device) > 0);
    gpt_close(g);
    CHECK(fo_device_nbytes(device) == 0);
    fo_device_close(device);
}

static void set_mesh(Case* c, int dp, int up, int tp) {
    c->opt.dp = dp, c->opt.up = up, c->opt.tp = tp;
}

static size_t bytes_sent(const GPT* g) {
    size_t seq, tp, nmessages;
    fo_group_sent(g->seq, &seq, &nmessages);
    fo_group_sent(g->group[GROUP_TP], &tp, &nmessages);
    return seq + tp;
}

// ---- logits -----------------------------------------------------------------------------------------------
/* Sequence b is prefilled with first + b tokens, one of them not at all, and then decoded to the end of the
 * fixture's: all logits on the way are PyTorch's, on every rank.
 */
static void logits_body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    const DebugState* ref = &c->ref;
    const int V = c->config.V, nseq = ref->B, idle = 1;
    GPT g;
    Generator x;
    int B, T, len[8], ids[8][32], token[8], pos[8];
    float* logits = (float*)malloc(8 * (size_t)V * sizeof(float));
    fo_require(logits && nseq <= 8 && ref->T <= 32, "a fixture of %d * %d", nseq, ref->T);
    open_model(c, &g, world);
    for (int first = 1; first < ref->T; first += 7) {
        const int longest = first + nseq - 1 < ref->T ? first + nseq - 1 : ref->T;
        CHECK_AT("%s rank %d logits from %d on, %s", c->name, fo_group_rank(world), first,
                 c->set_plan ? fo_allreduce_name(c->plan) : "plans as found");
        CHECK(generator_shape(&g, nseq, longest, &B, &T) == nseq && T >= longest);
        int* padded = (int*)malloc((size_t)(B * T) * sizeof(int));
        fo_require(padded != NULL, "out of memory");
        generator_open(&x, &g, B, T, ref->T);
        if (c->set_plan) { x.seq_plan = x.tp_plan = c->plan; }
        for (int b = 0; b < B; b++) {
            len[b] = b == idle ? 0 : first + b < ref->T ? first + b : ref->T;
            memcpy(ids[b], ref->x + b * ref->T, (size_t)ref->T * sizeof(int));
            for (int t = 0; t < T; t++) {
                padded[b * T + t] = t < len[b] ? ids[b][t] : V - 1; // padding must not matter
            }
        }
        for (int step = 0; first + step <= ref->T; step++) {
            for (int i = 0; i < B * V; i++) {
                logits[i] = NAN;
            }
            for (int b = 0; b < B && step > 0; b++) {
                pos[b] = b == idle || len[b] == ref->T ? -1 : len[b]++;
                token[b] = ids[b][pos[b] < 0 ? 0 : pos[b]];
            }
            size_t sent = bytes_sent(&g);
            if (step == 0) {
                generator_prefill(&x, logits, padded, len);
            } else {
                generator_decode(&x, logits, token, pos);
                CHECK(bytes_sent(&g) - sent == generator_decode_nbytes(&x));
            }
            for (int b = 0; b < B; b++) {
                if (b == idle || (step > 0 && pos[b] < 0)) {
                    CHECK(isnan(logits[b * V]));
                } else {
                    const float* want = ref->logits + ((size_t)(b * ref->T) + (size_t)len[b] - 1) * (size_t)V;
                    CHECK_CLOSE(logits + b * V, want, (size_t)V, TOLERANCE);
                }
            }
        }
        generator_close(&x);
        free(padded);
    }
    free(logits);
    fo_group_barrier(world);
    close_model(&g);
}

/* A vocabulary of which the last tp rank has fewer rows than the others, and they are no padding: logits of
 * new weights are those of one rank.
 */
static void uneven_body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    enum { NSEQ = 3, T = 4, ROUNDS = 3 };
    static float first[ROUNDS][NSEQ * 512];
    float logits[NSEQ * 512];
    int ids[NSEQ * T * 4] = {0}, len[NSEQ], token[NSEQ], B, padded;
    GPT g;
    Generator x;
    FoDevice* device = fo_device_open(fo_group_rank(world), fo_group_size(world));
    gpt_open(&g, c->config, &c->opt, world, device);
    weights_random(&g.ts, g.params, &g.os, g.master, 7, g.compute);
    fo_require(generator_shape(&g, NSEQ, T, &B, &padded) == NSEQ && padded <= 4 * T, "T=%d", padded);
    generator_open(&x, &g, B, padded, T + ROUNDS);
    for (int b = 0; b < NSEQ; b++) {
        len[b] = T - b;
        for (int t = 0; t < len[b]; t++) {
            ids[b * padded + t] = 17 * b + 61 * t;
        }
    }
    for (int round = 0; round < ROUNDS; round++) {
        int pos[NSEQ];
        for (int b = 0; b < NSEQ; b++) {
            token[b] = c->config.V - 1 - round - 30 * b;
            pos[b] = len[b] + round - 1;
        }
        if (round == 0) {
            generator_prefill(&x, logits, ids, len);
        } else {
            generator_decode(&x, logits, token, pos);
        }
        size_t nelem = NSEQ * (size_t)c->config.V;
        if (c->opt.tp == 1) { memcpy(first[round], logits, nelem * sizeof(float)); }
        CHECK_AT("uneven vocabulary, tp %d rank %d round %d", c->opt.tp, fo_group_rank(world), round);
        CHECK_CLOSE(logits, first[round], nelem, FO_FLOATX == FO_BF16 ? 3e-2 : 1e-5);
    }
    generator_close(&x);
    fo_group_barrier(world);
    close_model(&g);
}

static void test_uneven(Case* c) {
    GPTConfig config = {16, 200, 256, 1, 4, 32};
    c->config = config;
    c->opt.batch = 4, c->opt.seq_len = 8;
    for (int tp = 1; tp <= 4; tp++) { // 3: 86, 85 and 85 rows
        set_mesh(c, 1, 1, tp);
        if (tp == 3) { c->opt.seq_len = 12; }
        fo_ranks_run(tp, uneven_body, c);
    }
}

// ---- greedy text ------------------------------------------------------------------------------------------
// the next token of each sequence by a whole forward pass of all tokens so far, on one rank
static void uncached_body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    const int V = c->config.V, C = c->config.C;
    GPT g;
    float* logits = (float*)malloc((size_t)V * sizeof(float));
    floatX* device;
    open_model(c, &g, world);
    device = (floatX*)fo_malloc(g.device, (size_t)(C + V) * sizeof(float));
    fo_require(logits != NULL, "out of memory");
    c->gap = INFINITY;
    for (int i = 0; i < c->n; i++) {
        for (int n = c->len[i]; n < c->most; n++) {
            gpt_batch(&g, c->ids[i], NULL, 1, n);
            gpt_forward(&g);
            const floatX* last = g.acts.resid + ((size_t)c->config.L * g.n + (size_t)n - 1) * (size_t)C;
            fo_layernorm_forward(device, g.acts.lnf_mean, g.acts.lnf_rstd, last, gpt_weight(&g, LNFW, 0),
                                 gpt_weight(&g, LNFB, 0), 1, C, g.compute);
            fo_matmul_forward((float*)(void*)device + C, device, gpt_weight(&g, WTE, 0), NULL, 1, C, V,
                              FO_FP32, g.compute);
            fo_download(logits, (float*)(void*)device + C, (size_t)V * sizeof(float), g.compute);
            fo_stream_sync(g.compute);
            int best = sampler_draw(logits, V, 0.0f, 0, 0.0f);
            for (int v = 0; v < V; v++) {
                if (v != best && (double)(logits[best] - logits[v]) < c->gap) {
                    c->gap = (double)(logits[best] - logits[v]);
                }
            }
            c->ids[i][n] = best;
        }
    }
    fo_free(g.device, device);
    free(logits);
    close_model(&g);
}

// what generate prints: token ids, with no tokenizer. world: rank 0's text lands in `said`
static char said[1 << 16];

typedef struct {
    Case* c;
    Prompts prompts;
    int status;
} Text;

static void generate_body(FoGroup* world, void* arg) {
    Text* t = (Text*)arg;
    Trainer* tr = (Trainer*)calloc(1, sizeof *tr);
    fo_require(tr != NULL, "out of memory");
    tr->opt = &t->c->opt, tr->world = world, tr->rank = fo_group_rank(world), tr->prompts = t->prompts;
    tr->nsamples = 1; // the plans are not told
    open_model(t->c, &tr->gpt, world);
    int status = generate(tr, stopping);
    if (tr->rank == 0) { t->status = status; }
    fo_group_barrier(world);
    close_model(&tr->gpt);
    free(tr);
}

// generate's standard output, of prompts [first, first + n)
static void capture(Case* c, int first, int n) {
    static int ids[NPROMPTS * 64], begin[NPROMPTS + 1];
    Text t = {c, {n, 1, 0, begin, ids}, 0};
    FILE* to = tmpfile();
    int out = dup(1);
    fo_require(to && out >= 0, "no temporary file");
    for (int i = 0, at = 0; i < n; i++) {
        int len = c->len[first + i];
        memcpy(ids + at, c->ids[first + i], (size_t)len * sizeof(int));
        at += len;
        begin[i + 1] = at;
        t.prompts.longest = len > t.prompts.longest ? len : t.prompts.longest;
    }
    fflush(stdout);
    dup2(fileno(to), 1);
    fo_ranks_run(c->opt.dp * c->opt.up * c->opt.tp, generate_body, &t);
    fflush(stdout);
    dup2(out, 1);
    close(out);
    rewind(to);
    said[fread(said, 1, sizeof said - 1, to)] = 0;
    fclose(to);
    char* speed = strstr(said, "# prefill: "); // the last line of --generate
    CHECK(t.status == 0 && (speed != NULL) == c->opt.generate);
    if (speed) { *speed = 0; }
}

// what it should be
static const char* expected(const Case* c, int first, int n) {
    static char text[sizeof said];
    size_t at = (size_t)sprintf(text, "generating:\n---\n");
    for (int i = first; i < first + n; i++) {
        if (n > 1) { at += (size_t)sprintf(text + at, "prompt %d:\n", i - first + 1); }
        for (int t = 0; t < c->most; t++) {
            at += (size_t)sprintf(text + at, "%d ", c->ids[i][t]);
        }
        at += (size_t)sprintf(text + at, "\n---\n");
    }
    return text;
}

static void check_text(Case* c, int first, int n) {
    capture(c, first, n);
    const char* want = expected(c, first, n);
    if (strcmp(said, want)) { fprintf(stderr, "said:\n%swanted:\n%s", said, want); }
    CHECK(!strcmp(said, want));
}

// ---- a model that is sure of what it says -----------------------------------------------------------------
// learns the fixture's batch by heart, so that no rounding decides what is likeliest
static void learn_body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    char err[TRAIN_ERR];
    const float scale = 1.0f / (float)(c->ref.B * c->ref.T);
    GPT g;
    open_model(c, &g, world);
    for (int i = 1; i <= 60; i++) {
        gpt_batch(&g, c->ref.x, c->ref.y, c->ref.B, c->ref.T);
        gpt_micro(&g, scale, 0);
        double loss = gpt_loss(&g);
        Scalars sum = gpt_reduce(&g, 0.0, 0.0, 0.0);
        float norm = (float)sqrt(sum.square_sum);
        FoAdamw a = {5e-3f, 0.9f, 0.95f, 1e-8f, 0.0f, norm > 1.0f ? 1.0f / norm : 1.0f, i};
        gpt_update(&g, a, 0.0f, 1);
        if (i == 60) { CHECK(loss * (double)scale < 0.05); }
    }
    fo_require(
        checkpoint_write_model("build/test_generate.bin", &g.ts, g.params, world, g.comm[GROUP_TP], err) == 0,
        "%s", err);
    close_model(&g);
}

static void test_greedy(Case* c, const char* name) {
    const char* model = c->model;
    set_mesh(c, 1, 1, 1);
    fo_ranks_run(1, learn_body, c);
    c->model = "build/test_generate.bin";
    c->opt.generate = 1; // no gradients
    c->opt.temperature = 0.0f;
    // starts of what it has learnt, in lengths that differ
    static const int lens[NPROMPTS] = {3, 1, 7, 4, 12};
    c->n = NPROMPTS, c->most = MOST;
    for (int i = 0; i < c->n; i++) {
        c->len[i] = lens[i];
        memcpy(c->ids[i], c->ref.x + i % c->ref.B * c->ref.T, (size_t)c->ref.T * sizeof(int));
    }
    c->opt.sample_length = c->most;
    CHECK_AT("%s without a cache", name);
    fo_ranks_run(1, uncached_body, c);
    CHECK(c->gap > 3.0); // else rounding may decide
    for (int mesh = 0; mesh < 64; mesh++) {
        int tp = mesh % 4 + 1, up = mesh / 4 % 4 + 1, dp = mesh / 16 + 1;
        if (dp * up * tp > 8 || up * tp > c->config.NH) { continue; }
        if (SLOW && (dp * up * tp > 4 || mesh % 3 == 2)) { continue; }
        set_mesh(c, dp, up, tp);
        CHECK_AT("%s %d*%d*%d greedy", name, dp, up, tp);
        c->opt.batch = c->n, c->opt.seq_len = 24;
        check_text(c, 0, c->n);                        // at once
        c->opt.batch = 2, c->opt.recompute = mesh % 4; // in rounds
        check_text(c, 0, c->n);
        c->opt.batch = 1, c->opt.recompute = 3;
        for (int i = 0; i < c->n && mesh % 5 == 0; i++) {
            check_text(c, i, 1); // alone
        }
    }
    c->opt.generate = 0, c->model = model;
    remove("build/test_generate.bin");
}

// sequences end where the model's positions do, and a sample is drawn from the same numbers on every mesh
static void test_sampled(Case* c, const char* name) {
    static char first[sizeof said];
    c->n = 3, c->most = c->config.maxT;
    c->opt.generate = 1;
    c->opt.sample_length = 1000, c->opt.temperature = 1.0f, c->opt.batch = 2, c->opt.seq_len = 24;
    for (int i = 0; i < c->n; i++) {
        c->len[i] = 1 + 5 * i;
    }
    for (int i = 0; i < 4; i++) {
        static const int meshes[4][3] = {{1, 1, 1}, {3, 1, 1}, {2, 2, 1}, {1, 2, 2}};
        set_mesh(c, meshes[i][0], meshes[i][1], meshes[i][2]);
        CHECK_AT("%s %d*%d*%d sampled", name, c->opt.dp, c->opt.up, c->opt.tp);
        capture(c, 0, c->n);
        int words = 0;
        for (const char* s = strstr(said, "prompt 1:"); s && *s; s++) {
            words += *s == ' ';
        }
        CHECK(words == c->n * (c->most + 1)); // and one in each "prompt 1:"
        if (i == 0) { memcpy(first, said, sizeof said); }
        // dp changes no bit; cuts of sums do, and some time a coin falls between
        if (i == 1) { CHECK(!strcmp(said, first)); }
    }
    c->opt.generate = 0;
}

// what one prefill can take
static void test_shape(void) {
    TrainOptions opt;
    GPT g;
    GPTConfig c = {64, 256, 256, 1, 8, 32};
    char err[TRAIN_ERR];
    char* argv[] = {(char*)"test_generate"};
    int B, T;
    CHECK_AT("shape");
    fo_require(options_parse(&opt, 1, argv, err) == 0, "%s", err);
    opt.batch = 4, opt.seq_len = 16, opt.dp = 1;
    gpt_sizes(&g, c, &opt, 0); // one rank: no cut
    CHECK(generator_shape(&g, 3, 5, &B, &T) == 3 && B == 3 && T == 5);
    CHECK(generator_shape(&g, 3, 22, &B, &T) == 2 && T == 22);
    CHECK(generator_shape(&g, 9, 64, &B, &T) == 1 && T == 64);
    CHECK(generator_shape(&g, 1, 65, &B, &T) == 0);
    opt.tp = 2, opt.up = 2;
    gpt_sizes(&g, c, &opt, 0); // blocks of 2*4
    CHECK(generator_shape(&g, 3, 5, &B, &T) == 3 && T == 8);
    opt.up = 1, opt.overlap.m = 3, opt.batch = 3;
    gpt_sizes(&g, c, &opt, 0); // chunks of 3; whole sequences where tp divides them
    CHECK(generator_shape(&g, 2, 5, &B, &T) == 2 && T == 6);
    CHECK(generator_shape(&g, 1, 5, &B, &T) == 1 && T == 12);
    opt.overlap.m = 5, opt.batch = 2, opt.seq_len = 5;
    gpt_sizes(&g, c, &opt, 0); // one sequence alone can't be cut: training's shape
    CHECK(generator_shape(&g, 1, 3, &B, &T) == 2 && T == 5);
    CHECK(generator_shape(&g, 1, 6, &B, &T) == 0);
}

int main(void) {
    static const char* names[] = {"even", "odd"};
    test_shape();
    for (int i = 0; i < 2; i++) {
        static Case c;
        char path[256], model[256], err[TRAIN_ERR];
        int version;
        char* argv[] = {(char*)"test_generate"};
        memset(&c, 0, sizeof c);
        snprintf(model, sizeof model, "dev/fixture/%s.bin", names[i]);
        c.model = model;
        fo_require(checkpoint_read_header(model, &c.config, &version, err) == 0, "%s", err);
        snprintf(path, sizeof path, "dev/fixture/%s_debug_state.bin", names[i]);
        fo_require(debugstate_read(path, &c.config, &c.ref, err) == 0, "%s", err);
        fo_require(options_parse(&c.opt, 1, argv, err) == 0, "%s", err);
        c.opt.batch = c.ref.B, c.opt.seq_len = c.ref.T;
        for (int mesh = 0; mesh < 16; mesh++) {
            int tp = mesh % 4 + 1, up = mesh / 4 + 1;
            if (up * tp > c.config.NH || (up > 1 && c.ref.T % (2 * up * tp))) { continue; }
            if (SLOW && up * tp > 4) { continue; }
            set_mesh(&c, 1, up, tp);
            for (int way = 0; way < 3; way++) { // as the model finds, push, scatter
                if (SLOW && way != mesh % 3) { continue; }
                c.set_plan = way > 0, c.plan = way == 2 ? FO_SCATTER : FO_PUSH;
                c.opt.recompute = way == 1 ? 3 : 1, c.opt.generate = way == 2;
                char mesh_name[64];
                snprintf(mesh_name, sizeof mesh_name, "%s 1*%d*%d", names[i], up, tp);
                c.name = mesh_name;
                fo_ranks_run(up * tp, logits_body, &c);
            }
        }
        c.set_plan = 0, c.opt.generate = 0, c.opt.recompute = 1;
        test_greedy(&c, names[i]);
        test_sampled(&c, names[i]);
        debugstate_free(&c.ref);
        if (i == 0) { test_uneven(&c); } // c is made anew
    }
    return check_report();
}
