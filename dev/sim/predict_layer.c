/* predict_layer.c -- what a layer would take on another machine: the layers of dev/bench/layer.h, as
 * bench_overlap.c measures them, queued on a simulated device (flashoverlap/sim/sim.h).
 *
 *   predict_layer HARDWARE OP RANKS SEQUENCES TOKENS CHANNELS [JSON]
 *   predict_layer ascend mlp 4 32 4096 4096        # the row of arXiv 2604.24013's Table 1
 *
 * SEQUENCES of TOKENS each go through a layer of CHANNELS channels; OP as bench_overlap's --op. One rank is
 * simulated for all, whole plans and their order: nothing here says how a schedule works.
 */
#include "dev/bench/layer.h"
#include "flashoverlap/sim/sim.h"

static const char MODES[] = "none,slice:2,slice:4,slice:6,slice:8,flash:1,flash:2,flash:4";

typedef struct {
    BenchMode modes[BENCH_MAX_MODES];
    int nmodes;
    LayerShape shape;
    LayerCost cost;
    double layer_ms[BENCH_MAX_MODES], exposed_ms[BENCH_MAX_MODES];
} Table;

// the host waits for what it has queued; ms since then
static double sync_ms(Layer* y, double start) {
    fo_stream_sync(y->compute);
    fo_stream_sync(y->comm);
    return 1e3 * (fo_now() - start);
}

static void run(Table* t, const SimHardware* h) {
    Layer y;
    FoDevice* device = sim_device_open(h);
    FoGroup* group = sim_world(device, t->shape.P, (SimColors){NULL, NULL, NULL});
    layer_open(&y, t->shape, group, device);
    for (int part = 0; part < NPARTS; part++) {
        const double start = fo_now() + 1e-3 * sync_ms(&y, fo_now());
        layer_queue_part(&y, (LayerPart)part);
        t->cost.part_ms[part] = sync_ms(&y, start);
    }
    t->cost.us = 1e6 * fo_group_message_s(group, 0);
    t->cost.gbytes_s = h->link_gbytes_s;
    for (int i = 0; i < t->nmodes; i++) {
        LayerPlan plan;
        layer_plan_open(&y, &plan, &t->modes[i]);
        layer_start(&y, &plan);
        sync_ms(&y, 0.0);
        const double start = fo_now();
        layer_queue(&y, &plan);
        fo_stream_sync(y.compute);
        t->layer_ms[i] = 1e3 * (fo_now() - start);
        sync_ms(&y, start);
        t->exposed_ms[i] = layer_exposed_ms(&plan);
        layer_plan_close(&plan);
    }
    layer_close(&y);
    sim_world_free(group);
    fo_device_close(device);
}

static double hidden(const Table* t, int i) {
    return 100.0 * (1.0 - t->exposed_ms[i] / t->exposed_ms[0]);
}
static double against_none(const Table* t, int i) {
    return 100.0 * (t->layer_ms[i] / t->layer_ms[0] - 1.0);
}

static void print_table(const Table* t, const SimHardware* h) {
    const LayerShape* s = &t->shape;
    const double W = layer_compute_ms(&t->cost), T = layer_collectives_ms(s, &t->cost);
    printf("# predicted, not measured: %s, %d sequences of %zu tokens, %d channels, %d ranks, on %s\n",
           layer_name(s->op), s->B, s->N / (size_t)s->B, s->C, s->P, h->name);
    printf("# computation alone (W) %.2f ms, communication alone (T) %.2f ms, T/W %.3f\n", W, T, T / W);
    printf("%-9s %10s %9s %10s %9s %12s\n", "mode", "layer ms", "vs none", "exposed ms", "hidden",
           "closed form");
    for (int i = 0; i < t->nmodes; i++) {
        printf("%-9s %10.2f %+8.1f%% %10.2f %8.1f%% %12.2f\n", t->modes[i].name, t->layer_ms[i],
               against_none(t, i), t->exposed_ms[i], hidden(t, i),
               layer_predicted_ms(s, &t->cost, &t->modes[i]));
    }
}

// as bench_overlap's, of one round
static void write_json(const Table* t, const SimHardware* h, int argc, char** argv, const char* path) {
    BenchJson j;
    bench_json_open(&j, path);
    bench_json_head(&j, "predict_layer", argc, argv, h->name);
    bench_json_begin(&j, NULL, '{');
    bench_json_text(&j, "op", layer_name(t->shape.op));
    bench_json_number(&j, "ranks", t->shape.P);
    bench_json_number(&j, "rows", (double)t->shape.N);
    bench_json_number(&j, "width", t->shape.C);
    bench_json_number(&j, "sequences", t->shape.B);
    bench_json_number(&j, "link_gbytes_s", t->cost.gbytes_s);
    bench_json_number(&j, "link_us", t->cost.us);
    bench_json_number(&j, "comm_ms", layer_collectives_ms(&t->shape, &t->cost));
    bench_json_number(&j, "compute_ms", layer_compute_ms(&t->cost));
    bench_json_number(&j, "rounds", 1);
    bench_json_begin(&j, "modes", '[');
    for (int i = 0; i < t->nmodes; i++) {
        const BenchSpread total = {t->layer_ms[i], t->layer_ms[i], t->layer_ms[i]};
        const BenchSpread exposed = {t->exposed_ms[i], t->exposed_ms[i], t->exposed_ms[i]};
        bench_json_mode(&j, t->modes[i].name, &total, exposed, against_none(t, i), hidden(t, i),
                        layer_predicted_ms(&t->shape, &t->cost, &t->modes[i]));
        bench_json_end(&j, '}');
    }
    bench_json_end(&j, ']');
    bench_json_end(&j, '}');
    bench_json_close(&j);
}

int main(int argc, char** argv) {
    static Table t;
    LayerShape* s = &t.shape;
    SimHardware h;
    char why[SIM_ERR];
    if (argc < 7 || argc > 8) {
        fo_quit(
            2,
            "usage: predict_layer HARDWARE OP RANKS SEQUENCES TOKENS CHANNELS [JSON], as in: ascend mlp 4 32 "
            "4096 4096");
    }
    if (sim_hardware_read(&h, argv[1], why)) { fo_quit(1, "%s", why); }
    while (s->op < NLAYER_OPS && strcmp(argv[2], layer_name(s->op)) != 0) {
        s->op = (LayerOp)(s->op + 1);
    }
    if (s->op == NLAYER_OPS) {
        fo_quit(1, "'%s': want mlp, attention, mlp-backward or attention-backward", argv[2]);
    }
    s->P = (int)bench_long("RANKS", argv[3], 2, FO_PLAN_MAX_RANKS);
    s->B = (int)bench_long("SEQUENCES", argv[4], 1, 1 << 20);
    s->N = (size_t)s->B * (size_t)bench_long("TOKENS", argv[5], 1, 1 << 20);
    s->C = (int)bench_long("CHANNELS", argv[6], 1, 1 << 16);
    if (s->B % s->P != 0 || s->N % ((size_t)s->P * 8) != 0) {
        fo_quit(1, "SEQUENCES %d on RANKS %d: want a multiple of RANKS, and a multiple of %d tokens in all",
                s->B, s->P, s->P * 8);
    }
    const int unit = layer_is_attention(s->op) ? LAYER_HEAD * s->P : s->P;
    if (s->C % unit != 0) {
        fo_quit(1, "CHANNELS %d: %s on %d ranks wants a multiple of %d", s->C, layer_name(s->op), s->P, unit);
    }
    t.nmodes = bench_modes(t.modes,
                           s->op == ATTENTION ? "none,slice:2,slice:4,slice:8,row:1,flash:1,flash:2" : MODES,
                           s->op == ATTENTION ? BENCH_ATTENTION : BENCH_LAYER);
    run(&t, &h);
    print_table(&t, &h);
    if (argc == 8) { write_json(&t, &h, argc, argv, argv[7]); }
    return 0;
}
