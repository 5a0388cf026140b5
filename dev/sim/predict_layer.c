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
#include <errno.h>

static const Mode MODES[] = {{"none", FO_NONE, 1, 0},     {"slice:2", FO_SLICE, 2, 0},
                             {"slice:4", FO_SLICE, 4, 0}, {"slice:8", FO_SLICE, 8, 0},
                             {"row:1", FO_FLASH, 1, 0},   {"flash:1", FO_FLASH, 1, 1},
                             {"flash:2", FO_FLASH, 2, 1}, {"flash:4", FO_FLASH, 4, 1}};

static int color_alone(const void* arg, int nth, int rank) {
    (void)arg, (void)nth, (void)rank;
    return 0;
}
static int alike_alone(const void* arg, int nth) {
    (void)arg, (void)nth;
    return 1;
}

// the host waits for what it has queued; ms since then
static double sync_ms(Rank* k, double start) {
    fo_stream_sync(k->compute);
    fo_stream_sync(k->comm);
    return 1e3 * (fo_now() - start);
}

static void run(Table* t, const SimHardware* h) {
    Rank k = {.t = t};
    k.device = sim_device_open(h);
    k.group = sim_world(k.device, t->P, (SimColors){color_alone, alike_alone, NULL});
    open_layer(&k);
    open_modes(&k);
    sync_ms(&k, 0.0);
    for (int part = 0; part < NPARTS; part++) {
        const double start = fo_now();
        queue_part(&k, part);
        t->part_ms[part] = sync_ms(&k, start);
    }
    t->us = 1e6 * fo_group_message_s(k.group, 0);
    t->gbytes_s = h->link_gbytes_s;
    for (int i = 0; i < t->nmodes; i++) {
        const double start = fo_now();
        queue_layer(&k, i);
        fo_stream_sync(k.compute);
        t->layer_ms[i][0] = 1e3 * (fo_now() - start);
        sync_ms(&k, start);
        t->exposed_ms[i][0] = exposed_of(&k, i);
    }
    close_layer(&k);
    sim_world_free(k.group);
    fo_device_close(k.device);
}

static void print_table(const Table* t, const SimHardware* h, int nseq) {
    const double none = t->layer_ms[0][0];
    printf("# predicted, not measured: %s, %d sequences of %zu tokens, %d channels, %d ranks, on %s\n",
           op_name(t->op), nseq, t->N / (size_t)nseq, t->C, t->P, h->name);
    printf("# computation alone (W) %.2f ms, communication alone (T) %.2f ms, T/W %.3f\n", compute_ms(t),
           collectives_ms(t), collectives_ms(t) / compute_ms(t));
    printf("%-9s %10s %9s %10s %9s %10s\n", "mode", "layer ms", "vs none", "exposed ms", "hidden",
           "closed form");
    for (int i = 0; i < t->nmodes; i++) {
        printf("%-9s %10.2f %+8.1f%% %10.2f %8.1f%% %11.2f\n", t->modes[i].name, t->layer_ms[i][0],
               100.0 * (t->layer_ms[i][0] / none - 1.0), t->exposed_ms[i][0],
               100.0 * (1.0 - t->exposed_ms[i][0] / t->exposed_ms[0][0]), predicted_ms(t, &t->modes[i]));
    }
}

// in bench_overlap's format, each mode with one round
static void write_json(const Table* t, const SimHardware* h, const char* path) {
    FILE* f = fopen(path, "w");
    if (!f) { fo_quit(1, "%s: %s", path, strerror(errno)); }
    fprintf(f,
            "[{\"op\": \"%s\", \"paced\": false, \"P\": %d, \"N\": %zu, \"C\": %d, \"B\": %d, \"device\": "
            "\"%s\",\n"
            " \"link_gbytes_s\": %.6f, \"link_us\": %g, \"W_ms\": %.4f, \"T_ms\": %.4f, \"modes\": [",
            op_name(t->op), t->P, t->N, t->C, t->B, h->name, t->gbytes_s, t->us, compute_ms(t),
            collectives_ms(t));
    for (int i = 0; i < t->nmodes; i++) {
        fprintf(
            f,
            "%s\n  {\"mode\": \"%s\", \"predicted_ms\": %.4f, \"layer_ms\": [%.4f], \"exposed_ms\": [%.4f]}",
            i ? "," : "", t->modes[i].name, predicted_ms(t, &t->modes[i]), t->layer_ms[i][0],
            t->exposed_ms[i][0]);
    }
    fprintf(f, "]}]\n");
    if (fclose(f) != 0) { fo_quit(1, "%s: %s", path, strerror(errno)); }
}

static int number(const char* name, const char* text, int most) {
    char* end;
    errno = 0;
    const long v = strtol(text, &end, 10);
    if (errno || end == text || *end || v < 1 || v > most) {
        fo_quit(1, "%s '%s': want a whole number from 1 to %d", name, text, most);
    }
    return (int)v;
}

int main(int argc, char** argv) {
    static Table t;
    SimHardware h;
    char why[SIM_ERR];
    if (argc < 7 || argc > 8) {
        fo_quit(2, "usage: predict_layer HARDWARE OP RANKS SEQUENCES TOKENS CHANNELS [JSON], as in: ascend "
                   "mlp 4 32 4096 "
                   "4096");
    }
    if (sim_hardware_read(&h, argv[1], why)) { fo_quit(1, "%s", why); }
    while (t.op < NOPS && strcmp(argv[2], op_name(t.op)) != 0) {
        t.op = (Op)(t.op + 1);
    }
    if (t.op == NOPS) {
        fo_quit(1, "'%s': want mlp, attention, mlp-backward or attention-backward", argv[2]);
    }
    t.P = number("RANKS", argv[3], FO_PLAN_MAX_RANKS);
    t.B = number("SEQUENCES", argv[4], 1 << 20);
    t.N = (size_t)t.B * (size_t)number("TOKENS", argv[5], 1 << 20);
    t.C = number("CHANNELS", argv[6], 1 << 16);
    t.L = t.rounds = 1;
    for (size_t i = 0; i < sizeof MODES / sizeof *MODES; i++) {
        if (t.op != ATTENTION && strcmp(MODES[i].name, "row:1") == 0) { continue; }
        t.modes[t.nmodes++] = MODES[i];
    }
    if (t.P < 2 || t.B % t.P != 0 || t.N % ((size_t)t.P * 8) != 0) {
        fo_quit(1,
                "RANKS %d of SEQUENCES %d: want 2 or more, which divide SEQUENCES, and a multiple of %d "
                "tokens in all",
                t.P, t.B, t.P * 8);
    }
    const int unit = is_mlp(t.op) ? t.P : HEAD_SIZE * t.P;
    if (t.C % unit != 0) {
        fo_quit(1, "CHANNELS %d: %s on %d ranks wants a multiple of %d", t.C, op_name(t.op), t.P, unit);
    }
    run(&t, &h);
    print_table(&t, &h, t.B);
    if (argc == 8) { write_json(&t, &h, argv[7]); }
    return 0;
}
