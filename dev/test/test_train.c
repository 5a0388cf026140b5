/* test_train.c -- train/: the cut of the parameters, schedules, sampling, main.log. Checkpoints are in
 * test_checkpoint.c, options in test_options.c. Random numbers: none.
 */
#include "dev/test/files.h"
#include "dev/test/whole.h"
#include "train/logger.h"
#include "train/outlier.h"
#include "train/progress.h"
#include "train/sampler.h"
#include "train/schedule.h"
#include "train/tensors.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

// ---- tensors ----------------------------------------------------------------------------------------------
// how many of n things rank r of P has, and the first of them: the first ones have one more
static int dealt(int n, int P, int r) {
    return n / P + (r < n % P);
}

static int dealt_before(int n, int P, int r) {
    int sum = 0;
    for (int i = 0; i < r; i++) {
        sum += dealt(n, P, i);
    }
    return sum;
}

// Elements of one layer of a whole tensor that tp rank ts->cuts.t holds, as they lie in memory, by plain
// loops: what tensors.h says in words. Returns their number.
static size_t plain_layout(const Tensors* ts, int tensor, uint32_t* index) {
    const GPTConfig c = ts->config;
    const int tp = ts->cuts.tp, t = ts->cuts.t, up = ts->cuts.up, hs = c.C / c.NH;
    const int heads = dealt(c.NH, tp, t), head0 = dealt_before(c.NH, tp, t);
    const int rows = (int)ts->t[tensor].rows, cols = (int)ts->t[tensor].cols;
    size_t n = 0;
    if (tensor == QKVW || tensor == QKVB) {
        for (int j = 0; j < up; j++) {
            for (int which = 0; which < 3; which++) { // q, k, v
                const int first = which * c.C + (head0 + dealt_before(heads, up, j)) * hs;
                for (int i = first * cols; i < (first + dealt(heads, up, j) * hs) * cols; i++) {
                    index[n++] = (uint32_t)i;
                }
            }
        }
        return n;
    }
    if (tensor == ATTPROJW) {
        for (int j = 0; j < up; j++) {
            const int first = (head0 + dealt_before(heads, up, j)) * hs;
            for (int row = 0; row < rows; row++) {
                for (int i = first; i < first + dealt(heads, up, j) * hs; i++) {
                    index[n++] = (uint32_t)(row * cols + i);
                }
            }
        }
        return n;
    }
    const int by_rows = tensor == WTE || tensor == FCW || tensor == FCB, by_cols = tensor == FCPROJW;
    const int row0 = by_rows ? dealt_before(rows, tp, t) : 0, nrows = by_rows ? dealt(rows, tp, t) : rows;
    const int col0 = by_cols ? dealt_before(cols, tp, t) : 0, ncols = by_cols ? dealt(cols, tp, t) : cols;
    for (int row = row0; row < row0 + nrows; row++) {
        for (int col = col0; col < col0 + ncols; col++) {
            index[n++] = (uint32_t)(row * cols + col);
        }
    }
    return n;
}

// one tensor of the tables ts [tp * nshards], by t and shard. all: of whole parts, [tp]
static void check_cover(const Tensors* ts, const Tensors* all, int tensor) {
    const Tensor* x = &ts->t[tensor];
    const int tp = ts->cuts.tp, nshards = ts->cuts.nshards;
    const size_t nelem = x->rows * x->cols;
    uint32_t* full = malloc(nelem * sizeof *full);
    uint32_t* back = malloc(nelem * sizeof *back);
    uint32_t* whole = malloc(nelem * sizeof *whole);
    uint32_t* local = malloc(nelem * sizeof *local);
    uint32_t* plain = malloc(nelem * sizeof *plain);
    unsigned char* times = calloc(nelem, 1);
    int right = 1;
    for (size_t k = 0; k < nelem; k++) {
        full[k] = (uint32_t)k;
    }
    memset(back, 0xff, nelem * sizeof *back);
    for (int t = 0; t < tp; t++) {
        const size_t nwhole = plain_layout(&all[t], tensor, plain);
        right &= nwhole == tensor_local(&all[t].t[tensor]);
        tensor_extract(whole, full, &all[t], tensor, t, 0, sizeof *full);
        right &= memcmp(whole, plain, nwhole * sizeof *whole) == 0;
        for (int p = 0; p < nshards; p++) {
            const Tensors* own = &ts[t * nshards + p];
            const size_t n = tensor_local(&own->t[tensor]);
            memset(local, 0xff, nelem * sizeof *local);
            tensor_extract(local, full, ts, tensor, t, p, sizeof *full);
            for (size_t k = 0; k < nelem; k++) { // all of the part, and not one more
                right &= k < n ? local[k] < nelem : local[k] == 0xffffffffu;
                if (k < n) { times[local[k] % nelem]++; }
            }
            tensor_place(back, local, ts, tensor, t, p, sizeof *full);
            // units follow each other in both memories; a shard has its rows of each
            size_t at = 0, at_whole = 0;
            for (int j = 0; j < tensor_nunits(own, tensor); j++) {
                const TensorUnit u = tensor_unit(own, tensor, j), w = tensor_unit(&all[t], tensor, j);
                right &= u.offset == at && w.offset == at_whole && u.rows == w.rows && u.cols == w.cols;
                right &= w.row0 == 0 && w.nrows == w.rows;
                right &= (int)u.row0 == (x->sharded ? dealt_before((int)u.rows, nshards, p) : 0);
                right &= (int)u.nrows == (x->sharded ? dealt((int)u.rows, nshards, p) : (int)u.rows);
                right &= memcmp(local + at, whole + at_whole + u.row0 * u.cols,
                                u.nrows * u.cols * sizeof *local) == 0;
                at += u.nrows * u.cols;
                at_whole += w.rows * w.cols;
            }
            right &= at == n && at_whole == nwhole;
        }
    }
    const int copies = (x->cut == CUT_NONE ? tp : 1) * (x->sharded ? 1 : nshards);
    for (size_t k = 0; k < nelem; k++) {
        right &= times[k] == copies;
    }
    CHECK(right);
    CHECK_BITS(back, full, nelem * sizeof *full);
    free(full);
    free(back);
    free(whole);
    free(local);
    free(plain);
    free(times);
}

// offsets are aligned, tensors don't overlap: matrices, cut vectors, what every rank has
static void check_arena(const Tensors* ts) {
    size_t ends[3] = {0};
    int right = 1;
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor* t = &ts->t[i];
        const size_t end = t->offset + (size_t)t->layers * tensor_local(t);
        const int part = t->sharded ? 0 : t->cut != CUT_NONE ? 1 : 2;
        const size_t first[3] = {0, ts->nmatrix, ts->ncut}, last[3] = {ts->nmatrix, ts->ncut, ts->nelem};
        right &= t->offset % 64 == 0 && t->offset >= first[part] && end <= last[part];
        for (int j = 0; j < i; j++) {
            const Tensor* u = &ts->t[j];
            right &= end <= u->offset || u->offset + (size_t)u->layers * tensor_local(u) <= t->offset;
        }
        ends[part] += (end - t->offset + 63) / 64 * 64;
    }
    CHECK(right); // and there is no gap larger than the alignment:
    CHECK(ts->nmatrix == ends[0] && ts->ncut == ends[0] + ends[1]);
    CHECK(ts->nelem == ends[0] + ends[1] + ends[2]);
}

static void check_mesh(GPTConfig c, int tp, int up, int nshards) {
    Tensors ts[16], all[4];
    for (int t = 0; t < tp; t++) {
        tensors_init(&all[t], c, (TensorCuts){tp, t, up, 1, 0});
        for (int p = 0; p < nshards; p++) {
            CHECK_AT("C=%d NH=%d tp=%d t=%d up=%d shard %d of %d", c.C, c.NH, tp, t, up, p, nshards);
            tensors_init(&ts[t * nshards + p], c, (TensorCuts){tp, t, up, nshards, p});
            check_arena(&ts[t * nshards + p]);
            for (int i = 0; i < NTENSORS && nshards == 1; i++) { // one replica: both tables are the same
                CHECK(ts[t].t[i].offset == all[t].t[i].offset);
            }
        }
    }
    for (int i = 0; i < NTENSORS; i++) {
        CHECK_AT("C=%d NH=%d tp=%d up=%d nshards=%d %s", c.C, c.NH, tp, up, nshards, ts[0].t[i].name);
        check_cover(ts, all, i);
    }
}

static void test_tensors(void) {
    const GPTConfig configs[] = {uneven(), config(1, 48, 12, 256, 8), config(2, 18, 6 + 3, 1000, 5)};
    for (int k = 0; k < 3; k++) {
        for (int tp = 1; tp <= 4; tp++) {
            for (int up = 1; up <= 3; up++) {
                for (int nshards = 1; nshards <= 4; nshards++) {
                    check_mesh(configs[k], tp, up, nshards);
                }
            }
        }
    }
    // 25 heads of 4 channels over 4 ranks: 7, 6, 6, 6 heads; rank 1 has heads 7 to 12 of q, of k, of v
    Tensors ts;
    TensorBox q[TENSOR_MAX_BOXES], a[TENSOR_MAX_BOXES], f[TENSOR_MAX_BOXES];
    CHECK_AT("25 heads over 4");
    tensors_init(&ts, uneven(), cuts_tp(4, 1));
    CHECK(tensor_boxes(&ts, QKVW, 1, 0, q) == 3 && tensor_boxes(&ts, ATTPROJW, 1, 0, a) == 1);
    CHECK(tensor_boxes(&ts, FCPROJW, 1, 0, f) == 1);
    CHECK(q[1].row0 == 128 && q[1].nrows == 24 && q[1].col0 == 0 && q[1].ncols == 100 && q[1].offset == 2400);
    CHECK(a[0].row0 == 0 && a[0].nrows == 100 && a[0].col0 == 28 && a[0].ncols == 24);
    CHECK(f[0].nrows == 100 && f[0].col0 == 100 && f[0].ncols == 100);
    CHECK(tensor_local_of(&ts, QKVB, 0, 0) == 84 && tensor_local_of(&ts, QKVB, 3, 0) == 72);
    CHECK(tensor_local_of(&ts, WTE, 0, 0) == 96 * 100 && ts.t[WTE].local_rows == 96);
    // rows 110 to 139 of the whole: of k, heads 7 and 8 and the half of 9
    CHECK(tensor_boxes_of_rows(&ts, QKVW, 1, 0, 110, 30, q) == 1 && q[0].row0 == 128 && q[0].nrows == 12);
    CHECK(q[0].offset == 2400);
    // its 6 heads over two ranks of up and two replicas: the second has the second half of q, and v, of each
    tensors_init(&ts, uneven(), (TensorCuts){4, 1, 2, 2, 1});
    CHECK(tensor_boxes(&ts, QKVW, 1, 1, q) == 4 && q[0].row0 == 34 && q[0].nrows == 6);
    CHECK(q[1].row0 == 228 && q[1].nrows == 12 && q[2].row0 == 46 && q[3].row0 == 240);
    // biases that are added once, after the sum over ranks, are whole; weight decay is for matrices
    int ncut = 0, ndecay = 0, nsharded = 0;
    for (int i = 0; i < NTENSORS; i++) {
        ncut += ts.t[i].cut != CUT_NONE;
        ndecay += ts.t[i].decays;
        nsharded += ts.t[i].sharded;
    }
    CHECK(ncut == 7 && ndecay == 6 && nsharded == 5 && !ts.t[WPE].sharded && !ts.t[QKVB].sharded);
    CHECK(ts.t[WPE].decays && ts.t[WTE].decays && ts.t[FCPROJW].decays && !ts.t[QKVB].decays);
}

// ---- learning rate ----------------------------------------------------------------------------------------
static void check_lr(ScheduleKind kind, float final_fraction, int warmup, int nsteps, int step, double want) {
    Schedule s = {kind, 1e-3f, final_fraction, warmup, nsteps};
    const double got = (double)schedule_lr(&s, step);
    CHECK_AT("schedule %d final %g warmup %d of %d, step %d: %.9g, want %.9g", (int)kind,
             (double)final_fraction, warmup, nsteps, step, got, want);
    CHECK(fabs(got - want) <= 1e-9); // fp32 of 1e-3 is good to 6e-11
}

static void test_schedule(void) {
    for (int k = 0; k < 4; k++) { // warmup: (step + 1) / warmup, but for constant
        const ScheduleKind kind = (ScheduleKind)k;
        const double first = kind == SCHEDULE_CONSTANT ? 1e-3 : 1e-4;
        check_lr(kind, 0.1f, 10, 110, 0, first);
        check_lr(kind, 0.1f, 10, 110, 4, kind == SCHEDULE_CONSTANT ? 1e-3 : 5e-4);
        check_lr(kind, 0.1f, 10, 110, 9, 1e-3);
        check_lr(kind, 0.1f, 10, 110, 10, 1e-3); // decay begins at its highest
        check_lr(kind, 1.0f, 0, 100, 99, 1e-3);  // a fraction of 1 never decays
        check_lr(kind, 0.1f, 10, 110, 110, kind == SCHEDULE_CONSTANT ? 1e-3 : 1e-4);
        check_lr(kind, 0.1f, 10, 110, 500, kind == SCHEDULE_CONSTANT ? 1e-3 : 1e-4); // beyond the end
        check_lr(kind, 0.0f, 0, 1, 0, 1e-3);
    }
    check_lr(SCHEDULE_COSINE, 0.1f, 10, 110, 60, 5.5e-4); // half way
    check_lr(SCHEDULE_COSINE, 0.0f, 0, 3, 1, 7.5e-4);     // cos 60 degrees
    check_lr(SCHEDULE_LINEAR, 0.1f, 10, 110, 60, 5.5e-4);
    check_lr(SCHEDULE_LINEAR, 0.0f, 0, 4, 3, 2.5e-4);
    check_lr(SCHEDULE_WSD, 0.0f, 10, 100, 80, 1e-3); // 80 % of the steps
    check_lr(SCHEDULE_WSD, 0.0f, 10, 100, 85, 5e-4); // 1 - sqrt(1/4)
    check_lr(SCHEDULE_WSD, 0.2f, 10, 100, 85, 6e-4);
    check_lr(SCHEDULE_WSD, 0.0f, 90, 100, 85, 86.0 / 90 * 1e-3); // the warmup goes first
    check_lr(SCHEDULE_COSINE, 0.1f, 20, 20, 20, 1e-4);           // nothing but warmup: no division by 0
    check_lr(SCHEDULE_COSINE, 0.1f, 30, 20, 19, 20.0 / 30 * 1e-3);
}

// ---- outliers ---------------------------------------------------------------------------------------------
static void test_outlier(void) {
    static OutlierDetector d;
    double x[300], worst = 0.0;
    int nan_first = 1;
    CHECK_AT("a window of 128");
    for (int i = 0; i < 300; i++) {
        x[i] = 3.0 + sin(0.7 * i) + (i == 250 ? 10.0 : 0.0);
        const double z = outlier_update(&d, x[i]);
        if (i < 128) {
            nan_first &= isnan(z);
            continue;
        }
        double mean = 0.0, square = 0.0; // of the last 128, this one among them
        for (int k = i - 127; k <= i; k++) {
            mean += x[k] / 128;
        }
        for (int k = i - 127; k <= i; k++) {
            square += (x[k] - mean) * (x[k] - mean) / 128;
        }
        worst = fmax(worst, fabs(z - (x[i] - mean) / sqrt(square)));
        if (i == 250) { CHECK(z > 7.0); }
    }
    CHECK(nan_first);
    CHECK(worst < 1e-9);
    // what is not a number is not taken in
    OutlierDetector before = d;
    CHECK(isnan(outlier_update(&d, (double)NAN)) && isnan(outlier_update(&d, (double)INFINITY)));
    CHECK_BITS(&d, &before, sizeof d);
    // of a file: indices that lie in the window
    OutlierDetector bad[] = {d, d, d, d};
    bad[0].next = OUTLIER_WINDOW, bad[1].next = -1, bad[2].nvalues = OUTLIER_WINDOW + 1, bad[3].nvalues = -1;
    CHECK(outlier_is_sound(&d));
    for (int i = 0; i < 4; i++) {
        CHECK(!outlier_is_sound(&bad[i]));
    }
    // all equal
    memset(&d, 0, sizeof d);
    for (int i = 0; i < 400; i++) {
        const double z = outlier_update(&d, 0.1);
        if (i >= 128) { CHECK(z == 0.0); }
    }
}

// ---- sampling ---------------------------------------------------------------------------------------------
// among coins (k + 1/2) / n: how often each token is drawn
static void draw_all(const float* logits, int V, float temperature, int top_k, int n, int* times) {
    memset(times, 0, (size_t)V * sizeof *times);
    for (int k = 0; k < n; k++) {
        const int token = sampler_draw(logits, V, temperature, top_k, ((float)k + 0.5f) / (float)n);
        CHECK(token >= 0 && token < V);
        if (token >= 0 && token < V) { times[token]++; }
    }
}

static void test_sampler(void) {
    enum { V = 5, N = 160 };
    // softmax 1/16, 8/16, 2/16, 4/16, 1/16, and far from 0, so that exp without the maximum would overflow
    const float logits[V] = {500.0f, 500.0f + logf(8), 500.0f + logf(2), 500.0f + logf(4), 500.0f};
    int times[V];
    CHECK_AT("plain");
    draw_all(logits, V, 1.0f, 0, N, times);
    CHECK(times[0] == 10 && times[1] == 80 && times[2] == 20 && times[3] == 40 && times[4] == 10);
    CHECK(sampler_draw(logits, V, 1.0f, 0, 0.0f) == 0);
    CHECK(sampler_draw(logits, V, 1.0f, 0, 0.99999994f) == 4); // the largest below 1
    CHECK(sampler_draw(logits, V, 1.0f, 2, 1.0f) == 3); // 1 is no coin; if it comes: the last with a chance
    const float equal[4] = {2.0f, 2.0f, 2.0f, 2.0f};
    CHECK(sampler_draw(equal, 4, 1.0f, 0, 0.25f) == 1 && sampler_draw(equal, 4, 1.0f, 0, 0.24999f) == 0);
    CHECK_AT("top 3: 1/7, 2/7, 4/7");
    draw_all(logits, V, 1.0f, 3, 140, times);
    CHECK(times[0] == 0 && times[1] == 80 && times[2] == 20 && times[3] == 40 && times[4] == 0);
    CHECK_AT("top 4: of two equal ones the first");
    draw_all(logits, V, 1.0f, 4, 150, times);
    CHECK(times[0] == 10 && times[1] == 80 && times[2] == 20 && times[3] == 40 && times[4] == 0);
    CHECK_AT("top 1, and more than all");
    draw_all(logits, V, 1.0f, 1, N, times);
    CHECK(times[1] == N);
    draw_all(logits, V, 1.0f, 99, N, times);
    CHECK(times[0] == 10 && times[1] == 80 && times[4] == 10);
    CHECK_AT("temperature 1/2 squares: 1, 64, 4, 16, 1 of 86");
    draw_all(logits, V, 0.5f, 0, 860, times);
    CHECK(times[0] == 10 && times[1] == 640 && times[2] == 40 && times[3] == 160 && times[4] == 10);
    CHECK_AT("greedy");
    const float tied[4] = {-3.0f, 7.0f, 7.0f, -0.0f};
    CHECK(sampler_draw(logits, V, 0.0f, 0, 0.99f) == 1 && sampler_draw(tied, 4, 0.0f, 2, 0.99f) == 1);
    CHECK_AT("ties, signs, infinities");
    draw_all(tied, 4, 1e6f, 2, 10, times);
    CHECK(times[0] == 0 && times[1] == 5 && times[2] == 5 && times[3] == 0);
    const float zeros[3] = {-0.0f, 0.0f, -1.0f}; // equal ones, whatever their sign: the first
    CHECK(sampler_draw(zeros, 3, 1.0f, 1, 0.9f) == 0);
    const float never[3] = {-INFINITY, 1.0f, -INFINITY};
    CHECK(sampler_draw(never, 3, 1.0f, 0, 0.0f) == 1 && sampler_draw(never, 3, 1.0f, 0, 0.99999994f) == 1);
    const float nans[3] = {NAN, -2.0f, NAN};
    draw_all(nans, 3, 1.0f, 2, 10, times);
    CHECK(times[1] == 10 && sampler_draw(nans, 3, 0.0f, 0, 0.5f) == 1);
    CHECK(sampler_draw(nans, 1, 1.0f, 0, 0.5f) == 0);
}

// two lines, the first of which tells the time, too
static void check_json_lines(const char* text) {
    double seconds = 0.0;
    CHECK(sscanf(text, "{\"step\":0,\"time\":%lf,", &seconds) == 1 && seconds > 1.7e9);
    CHECK_HAS(text, ",\"val_loss\":11.0098763}\n{\"step\":0,");
    CHECK_HAS(text,
              ",\"loss\":10.5,\"loss_z\":null,\"norm\":15.25,\"norm_z\":2,\"lr\":0.000600000028,\"ms\":20,"
              "\"mfu\":0.5,\"tok_s\":1000000,\"comm_ms\":3,\"exposed_ms\":1.25,\"tokens\":1000000000000,"
              "\"exposed_by_op\":{\"F1\":0.25,\"U4 dk dv\":1},\"chunks_by_op\":{\"F1\":2,\"U4 dk "
              "dv\":1}}\n{\"step\":12,");
    CHECK_HAS(text, ",\"loss\":null,\"loss_z\":null,\"norm\":1000000,");
    CHECK_HAS(text, "\"exposed_by_op\":{}}\n");
}

static void test_logger(void) {
    Logger l;
    char err[TRAIN_ERR] = "";
    size_t nbytes;
    CHECK_AT("main.log");
    spill(in_folder("main.log"), "old\n", 4);
    spill(in_folder("log.json"), "old\n", 4);
    static const char* const ops[] = {"F1", "U4 dk dv"};
    const double op_ms[] = {0.25, 1.0};
    LogStep step = {
        .step = 0, .loss = 10.5f, .norm = 15.25f, .lr = 6e-4f, .loss_z = NAN, .norm_z = 2.0, .ms = 20.0};
    step.mfu = 0.5, step.tok_s = 1e6, step.comm_ms = 3.0, step.exposed_ms = 1.25, step.tokens = 1e12;
    step.op = ops, step.op_ms = op_ms, step.nops = 2;
    const int chosen_m[] = {2, 1};
    step.chosen = ops, step.chosen_m = chosen_m, step.nchosen = 2;
    CHECK(logger_init(&l, folder, in_folder("log.json"), 0, 0, err) == 0); // a fresh start wipes them
    CHECK(logger_val(&l, 0, 11.009876f, err) == 0);
    CHECK(logger_train(&l, &step, err) == 0);
    Logger other;
    CHECK(logger_init(&other, folder, in_folder("log.json"), 1, 0, err) ==
          0); // another rank: neither wiped nor written
    CHECK(logger_val(&other, 1, 1.0f, err) == 0);
    CHECK(logger_init(&other, "", "", 0, 0, err) == 0 && logger_val(&other, 1, 1.0f, err) == 0);
    CHECK(logger_init(&l, folder, in_folder("log.json"), 0, 1, err) == 0); // a resume appends
    step.step = 12, step.loss = NAN, step.lr = 0.0f, step.norm = 1e6f, step.nops = 0, step.nchosen = 0;
    CHECK(logger_train(&l, &step, err) == 0);
    char* text = slurp(in_folder("main.log"), &nbytes);
    CHECK(strcmp(text, "s:0 tel:11.0099\ns:0 trl:10.5000 lr:0.000600 norm:15.25\ns:12 trl:nan lr:0.000000 "
                       "norm:1000000.00\n") == 0);
    free(text);
    text = slurp(in_folder("log.json"), &nbytes);
    check_json_lines(text);
    free(text);
    CHECK(logger_init(&l, in_folder("nowhere"), "", 0, 0, err) == -1);
    CHECK_HAS(err, "nowhere/main.log: cannot be opened: No such file");
    (void)snprintf(l.path, sizeof l.path, "/dev/full");
    CHECK(logger_val(&l, 0, 1.0f, err) == -1);
    CHECK_HAS(err, "/dev/full: cannot be written: No space left");
    CHECK(logger_init(&l, "", in_folder("nowhere/log.json"), 0, 0, err) == -1);
    CHECK_HAS(err, "nowhere/log.json: cannot be opened: No such file");
    (void)snprintf(l.json, sizeof l.json, "/dev/full");
    CHECK(logger_train(&l, &step, err) == -1);
    CHECK_HAS(err, "/dev/full: cannot be written: No space left");
    CHECK(mkfifo(in_folder("fifo"), 0600) == 0);
    CHECK(logger_init(&l, "", in_folder("fifo"), 0, 0, err) == -1); // not waited for
    CHECK_HAS(err, "fifo: cannot be opened: a FIFO that nobody reads");
}

// a disk that is full in the middle of a line keeps the lines before it
static void test_logger_full(void) {
    Logger l;
    char err[TRAIN_ERR] = "";
    size_t nbytes = 0;
    struct rlimit limit, small;
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    small = limit, small.rlim_cur = 20;
    CHECK(logger_init(&l, folder, "", 0, 0, err) == 0 && logger_val(&l, 1, 1.0f, err) == 0);
    signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK(logger_val(&l, 2, 1.0f, err) == -1);
    CHECK_HAS(err, "main.log: cannot be written: File too large");
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    CHECK(logger_val(&l, 3, 1.0f, err) == 0);
    char* text = slurp(in_folder("main.log"), &nbytes);
    CHECK(strcmp(text, "s:1 tel:1.0000\ns:3 tel:1.0000\n") == 0);
    free(text);
}

// ---- the progress bar -------------------------------------------------------------------------------------
static void test_progress(void) {
    char text[512];
    const struct {
        int width, done, nsteps;
        double left_s;
        const char* want;
    } lines[] = {
        {40, 0, 10, -1.0, "[....................] 0/10   0% ? left"},
        {40, 5, 10, 4.4, "[#########..........] 5/10  50% 4s left"},
        {40, 10, 10, 0.0, "[##################] 10/10 100% 0s left"},
        {30, 5, 10, 60.0, "5/10  50% 1m00s left"},
        {12, 5, 10, 60.0, "5/10  50% 1"},
        {44, 1, 10, 3599.6, "[##..................] 1/10  10% 1h00m left"},
        {44, 1, 10, 90061.0, "[##..................] 1/10  10% 1d01h left"},
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        CHECK_AT("%s", lines[i].want);
        progress_line(text, sizeof text, lines[i].width, lines[i].done, lines[i].nsteps, lines[i].left_s);
        CHECK((int)strlen(text) < lines[i].width);
        if (strcmp(text, lines[i].want) != 0) { fprintf(stderr, "got '%s'\n", text); }
        CHECK(strcmp(text, lines[i].want) == 0);
    }
    for (int width = 1; width < 600; width++) { // never as wide as the terminal, nor as the memory
        CHECK_AT("width %d", width);
        progress_line(text, sizeof text, width, 1999999999, 2000000000, 1e9);
        CHECK((int)strlen(text) < width);
    }
}

int main(void) {
    if (!folder_open("test_train")) { return 1; }
    test_tensors();
    test_schedule();
    test_outlier();
    test_sampler();
    test_logger();
    test_logger_full();
    test_progress();
    folder_close();
    return check_report();
}
