/* test_step.cu -- what a steady training step does not do: after some steps have made all that is needed, one
 * allocates nothing, makes no event, asks cuBLASLt for no plan, and the host waits where it must know a
 * number, nowhere else. The emulated device counts such calls, so this test is of DEVICE=emu alone.
 */
#define TESTING
#include "train_gpt.cu"
#include "dev/emu/emu.h"
#include "dev/test/check.h"
#include "train/weights.h"

enum { WARM_STEPS = 5, STEPS = 2, MICRO_STEPS = 2, NCOUNTS = 6 };
static const char* const COUNTS[NCOUNTS] = {"malloc",      "event_create", "heuristic",
                                            "device_sync", "stream_sync",  "launch"};
enum { STREAM_SYNC = 4, LAUNCH = 5 };

typedef struct {
    GPTConfig config;
    TrainOptions opt;
    long made[NCOUNTS]; // in the STEPS steps, by all ranks
    long warm[NCOUNTS]; // before
    double loss[STEPS];
} Case;

// tokens of a batch, others in each
static void fill(int* ids, int* targets, int n, int V, unsigned seed) {
    unsigned x = seed * 2654435761u + 1u;
    for (int i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        ids[i] = (int)(x >> 8) % V;
        targets[i] = (ids[i] + 1) % V;
    }
}

// as train_step; returns the mean loss
static double one_step(const Case* c, GPT* g, int step) {
    const int B = c->opt.batch, T = c->opt.seq_len;
    const double ntokens = (double)(B * T * g->mesh.dp * MICRO_STEPS);
    int ids[64], targets[64];
    double loss = 0.0;
    for (int micro = 0; micro < MICRO_STEPS; micro++) {
        const int push = g->mesh.rp > 1 && (g->zero == 2 || micro + 1 == MICRO_STEPS);
        fill(ids, targets, B * T, c->config.V, (unsigned)((step * MICRO_STEPS + micro) * 16 + g->mesh.d));
        gpt_batch(g, ids, targets, B, T);
        if (push || g->weights_wait) { gpt_batch_replicas(g, ids); }
        gpt_micro(g, (float)(1.0 / ntokens), push);
        loss += gpt_loss(g);
    }
    Scalars sum = gpt_reduce(g, g->mesh.t == 0 ? loss : 0.0, 0.0, 0.0);
    FoAdamw a = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.0f, 1.0f, step + 1};
    gpt_update(g, a, 0.1f, 1);
    return sum.loss / ntokens;
}

// what has been counted so far; no rank is in a step
static void look(FoGroup* world, long counts[NCOUNTS]) {
    fo_group_barrier(world);
    for (int i = 0; i < NCOUNTS && fo_group_rank(world) == 0; i++) {
        counts[i] = fo_emu_count(COUNTS[i]);
    }
    fo_group_barrier(world);
}

static void body(FoGroup* world, void* arg) {
    Case* c = (Case*)arg;
    long start[NCOUNTS], end[NCOUNTS];
    GPT g;
    FoDevice* device = fo_device_open(fo_group_rank(world), fo_group_nlocal(world));
    look(world, c->warm);
    gpt_open(&g, c->config, &c->opt, world, device);
    weights_random(&g.ts, g.params, &g.os, g.master, 1, g.compute);
    for (int i = 0; i < WARM_STEPS; i++) {
        one_step(c, &g, i);
    }
    look(world, start);
    for (int i = 0; i < STEPS; i++) {
        double loss = one_step(c, &g, WARM_STEPS + i);
        if (fo_group_rank(world) == 0) { c->loss[i] = loss; }
    }
    look(world, end);
    for (int i = 0; i < NCOUNTS && fo_group_rank(world) == 0; i++) {
        c->made[i] = end[i] - start[i];
        c->warm[i] = start[i] - c->warm[i];
    }
    gpt_close(&g);
    fo_device_close(device);
}

/* Waits of the host in a step, of each rank: for the losses of each micro-step, for the gradients' norm, for
 * the scalars of all ranks, and at the end of the update; and for the tokens of other dp ranks, when they are
 * first known to be needed: before the micro-step that fetches weights, and before the one that sends
 * gradients.
 */
static long waits(const TrainOptions* opt) {
    const int ids = opt->dp == 1 ? 0 : opt->zero == 2 || opt->zero == 1 ? 2 : 1;
    return MICRO_STEPS + 3 + ids;
}

// returns the calls of a step that launch something, of all ranks
static long test_counts(Case* c) {
    const int P = c->opt.dp * c->opt.up * c->opt.tp;
    fo_ranks_run(P, body, c);
    for (int i = 0; i < NCOUNTS; i++) {
        CHECK_AT("dp %d up %d tp %d zero %d recompute %d graph %d: %s: %ld, before %ld", c->opt.dp, c->opt.up,
                 c->opt.tp, c->opt.zero, c->opt.recompute, c->opt.graph, COUNTS[i], c->made[i], c->warm[i]);
        if (i < STREAM_SYNC) { CHECK(c->made[i] == 0); }
        if (i == STREAM_SYNC) { CHECK(c->made[i] == STEPS * P * waits(&c->opt)); }
        if (i == LAUNCH) { CHECK(c->made[i] > 0); }
        // it is counted at all; nothing of the project waits for a whole device
        CHECK((c->warm[i] > 0) == (strcmp(COUNTS[i], "device_sync") != 0));
    }
    CHECK(c->loss[0] > 0.0 && c->loss[1] > 0.0);
    return c->made[LAUNCH] / STEPS;
}

int main(void) {
    static const struct {
        int dp, up, tp, zero, recompute;
    } MESHES[] = {{1, 1, 1, 0, 1}, {1, 1, 2, 0, 1}, {1, 1, 2, 0, 3}, {1, 2, 1, 1, 2},
                  {2, 1, 1, 0, 1}, {2, 1, 1, 1, 0}, {2, 1, 1, 2, 1}, {2, 1, 2, 1, 1}};
    for (size_t i = 0; i < sizeof MESHES / sizeof *MESHES; i++) {
        Case c;
        char err[TRAIN_ERR];
        char* argv[] = {(char*)"test_step"};
        long launches[2];
        double loss[2][STEPS];
        for (int graph = 0; graph < 2; graph++) {
            memset(&c, 0, sizeof c);
            fo_require(options_parse(&c.opt, 1, argv, err) == 0, "%s", err);
            fo_require(model_parse("L=2,C=16,NH=4,V=64,maxT=16", &c.config, err) == 0, "%s", err);
            c.opt.dp = MESHES[i].dp, c.opt.up = MESHES[i].up, c.opt.tp = MESHES[i].tp;
            c.opt.zero = MESHES[i].zero, c.opt.recompute = MESHES[i].recompute, c.opt.graph = graph;
            c.opt.batch = 2, c.opt.seq_len = 8;
            launches[graph] = test_counts(&c);
            memcpy(loss[graph], c.loss, sizeof c.loss);
        }
        CHECK_AT("dp %d up %d tp %d zero %d: launches %ld, with graphs %ld", c.opt.dp, c.opt.up, c.opt.tp,
                 c.opt.zero, launches[0], launches[1]);
        CHECK(2 * launches[1] < launches[0]); // what is left is embeddings and the update
        CHECK_BITS(loss[1], loss[0], sizeof loss[0]);
    }
    return check_report();
}
