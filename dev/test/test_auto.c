/* test_auto.c -- --overlap auto: what it chooses on paced ranks and emulated links, where it can be told
 * beforehand; that all ranks choose alike, and that measuring leaves no trace. Bits: test_gpt.cu.
 */
#include "train/auto.h"
#include "dev/test/check.h"
#include "train/weights.h"
#include <math.h>
#include <stdlib.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SLOWER = 8 }; // than which a matmul of a sanitizer's build is not
#else
enum { SLOWER = 1 };
#endif

// sizes are such that F3's matmul takes 8.4 ms of a rank, all of a shard 8.2 ms of the link
#define PACE (0.002 / SLOWER)                        // TFLOP/s
#define LINK (0.004 * sizeof(floatX) / 2.0 / SLOWER) // GB/s

typedef struct {
    const char* name;
    int up, tp, T;
    double link, us, slow; // GB/s, microseconds; how much slower than PACE the last rank is
    // told by the ranks
    int m[FO_MAX_RANKS][NSITES];
    AutoChoice choice[FO_MAX_RANKS];
} Case;

static void body(FoGroup* world, void* arg) {
    static const GPTConfig config = {128, 512, 512, 1, 4, 128};
    Case* c = (Case*)arg;
    char err[TRAIN_ERR];
    char* argv[] = {(char*)"test_auto"};
    const int rank = fo_group_rank(world), P = fo_group_size(world);
    TrainOptions opt;
    GPT* g = (GPT*)calloc(1, sizeof *g);
    fo_require(g && options_parse(&opt, 1, argv, err) == 0, "%s", err);
    opt.up = c->up, opt.tp = c->tp, opt.dp = 1, opt.batch = 2, opt.seq_len = c->T, opt.wire = FO_FLOATX;
    FoDevice* device = fo_device_open(rank, P);
    if (fo_device_emulates()) { fo_group_link(world, c->link, c->us); }
    gpt_open(g, config, &opt, world, device);
    weights_random(&g->ts, g->params, &g->os, g->master, 1, g->compute);
    if (fo_device_emulates()) { fo_device_pace(device, PACE / (rank == P - 1 ? c->slow : 1.0)); }
    const size_t nbytes = fo_device_nbytes(device), nparams = g->ts.nelem * sizeof(floatX);
    void* before = malloc(nparams);
    fo_require(before != NULL, "out of memory");
    fo_download(before, g->params, nparams, g->compute);
    fo_stream_sync(g->compute);

    c->choice[rank] = auto_choose(g, &opt);

    memcpy(c->m[rank], g->site_m, sizeof g->site_m);
    CHECK_AT("%s: rank %d", c->name, rank);
    CHECK(fo_device_nbytes(device) == nbytes);
    CHECK_BITS(before, g->params, nparams);
    const size_t ngrads = g->ts.nelem;
    float sum = 0.0f;
    for (size_t i = 0; i < ngrads; i++) {
        sum += fabsf(g->grads[i]);
    }
    CHECK(sum == 0.0f);
    for (int i = 0; i < NSITES; i++) {
        const int peers = gpt_site_ranks(g, i);
        CHECK(g->o[i]->plan.P == peers && g->o[i]->plan.mode == FO_FLASH);
        CHECK(g->o[i]->plan.m == (peers > 1 ? g->site_m[i] : 1) && gpt_site_chunks(g, i) == g->site_m[i]);
        CHECK(gpt_is_cut(g, i) || g->site_m[i] == 1);
        CHECK(c->choice[rank].m[i] == (c->choice[rank].P[i] ? g->site_m[i] : 0));
    }
    free(before);
    gpt_close(g);
    fo_device_close(device);
    free(g);
}

static void choose(Case* c) {
    const int P = c->up * c->tp;
    fo_ranks_run(P, body, c);
    for (int r = 1; r < P; r++) {
        CHECK_AT("%s: rank %d chooses as rank 0", c->name, r);
        CHECK_BITS(c->m[r], c->m[0], sizeof c->m[0]);
        CHECK_BITS(&c->choice[r], &c->choice[0], sizeof c->choice[0]);
    }
    CHECK_AT("%s", c->name);
}

// operations with more than one chunk
static int ncut(const Case* c) {
    int n = 0;
    for (int i = 0; i < NSITES; i++) {
        n += c->m[0][i] > 1;
    }
    return n;
}

// T near W: in the most chunks, but for what other work covers; what F3 exposes
static int cuts_near(const Case* c, double most_s) {
    const int* m = c->m[0];
    return m[F3] == 4 && m[F1] == 4 && m[B1] == 4 && m[B3] == 1 && m[B2] == 1 &&
           c->choice[0].exposed_s[F3] <= most_s;
}

static void test_choices(void) {
    enum { TRIES = 20 };
    static Case near = {"T near W", 1, 2, 128, LINK, 0.0, 1.0, {{0}}, {{{0}, {0}, {0}, {0}}}};
    static Case fast = {"a fast link", 1, 2, 128, 1e3, 0.0, 1.0, {{0}}, {{{0}, {0}, {0}, {0}}}};
    static Case late = {"a late link", 1, 2, 128, LINK, 1e4 * SLOWER, 1.0, {{0}}, {{{0}, {0}, {0}, {0}}}};
    static Case odd = {"shards of 63 rows", 1, 2, 63, LINK, 0.0, 1.0, {{0}}, {{{0}, {0}, {0}, {0}}}};
    static Case slow = {"a slow rank", 1, 2, 128, LINK, 0.0, 4.0, {{0}}, {{{0}, {0}, {0}, {0}}}};
    static Case up = {"up", 2, 1, 128, LINK, 0.0, 1.0, {{0}}, {{{0}, {0}, {0}, {0}}}};
    const double W = 2.0 * 256 * 128 * 256 / (PACE * 1e12), T = 128 * 128 * sizeof(floatX) / (LINK * 1e9);
    for (int tries = 0; tries < TRIES && !cuts_near(&near, T - 0.8 * W); tries++) {
        choose(&near); // where others keep the cores busy, all seems to be hidden
    }
    CHECK_AT("T near W: F1 %d, F3 %d, F4 %d, B1 %d, B3 %d, B2 %d", near.m[0][F1], near.m[0][F3],
             near.m[0][F4], near.m[0][B1], near.m[0][B3], near.m[0][B2]);
    CHECK(cuts_near(&near, T - 0.8 * W) && near.m[0][E1] == 1 && near.m[0][U1] == 1);
    CHECK_AT("T near W: plain %g s, want %g; exposed %g s", near.choice[0].plain_s[F3], T,
             near.choice[0].exposed_s[F3]);
    CHECK(fabs(near.choice[0].plain_s[F3] - T) < 1e-9 && near.choice[0].P[F3] == 2 &&
          near.choice[0].P[U1] == 0);
    CHECK(near.choice[0].exposed_s[B3] == 0.0);
    choose(&fast);
    CHECK(ncut(&fast) == 0 && fast.choice[0].exposed_s[F3] == 0.0 && fast.choice[0].plain_s[F3] > 0.0);
    choose(&late);
    CHECK(ncut(&late) == 0 && late.choice[0].exposed_s[F3] > 0.0);
    choose(&odd);
    CHECK(ncut(&odd) == 0);
    choose(&slow); // its matmul hides all, and it is the one to wait for
    CHECK(slow.m[0][F3] == 1 && slow.choice[0].exposed_s[F3] == 0.0);
    for (int tries = 0; tries < TRIES && up.m[0][U1] < 4; tries++) {
        choose(&up);
    }
    CHECK(up.m[0][U1] == 4 && up.m[0][F1] == 1 && up.choice[0].P[U1] == 2 && up.choice[0].P[F1] == 0);
}

// a device with a speed of its own: whatever it chooses
static void test_agreement(void) {
    static Case meshes[] = {{"tp 4", 1, 4, 64, 1.0, 0.0, 1.0, {{0}}, {{{0}, {0}, {0}, {0}}}},
                            {"up 2 tp 2", 2, 2, 64, 1.0, 0.0, 1.0, {{0}}, {{{0}, {0}, {0}, {0}}}}};
    choose(&meshes[0]);
    CHECK(meshes[0].choice[0].P[F3] == 4 && meshes[0].choice[0].P[U2] == 0);
    choose(&meshes[1]);
    CHECK(meshes[1].choice[0].P[F3] == 2 && meshes[1].choice[0].P[U2] == 2 && meshes[1].choice[0].P[U1] == 0);
}

int main(void) {
    test_agreement();
    if (fo_device_emulates()) { test_choices(); }
    return check_report();
}
