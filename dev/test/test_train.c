/* test_train.c -- train/: the cut of the parameters, checkpoints, schedules, sampling, main.log.
 * Options are in test_options.c.
 *
 * Files are made in a folder of its own under TMPDIR and removed. Ranks are threads. random numbers: none;
 * elements are numbered, so that each can only have come from its own place.
 */
#include "dev/test/check.h"
#include "dev/test/whole.h"
#include "train/checkpoint.h"
#include "train/logger.h"
#include "train/outlier.h"
#include "train/sampler.h"
#include "train/schedule.h"
#include "train/tensors.h"
#include "train/weights.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>

static char folder[256]; // of this run's files

#define CHECK_HAS(text, part)                                                                \
    do {                                                                                     \
        if (!strstr(text, part)) { fprintf(stderr, "wanted '%s', got '%s'\n", part, text); } \
        CHECK(strstr(text, part) != NULL);                                                   \
    } while (0)

static GPTConfig config(int L, int C, int NH, int V, int maxT) {
    GPTConfig c = {.maxT = maxT, .V = V, .Vp = config_padded(V), .L = L, .NH = NH, .C = C};
    return c;
}

// the smallest with everything uneven: 25 heads, 384 vocabulary rows, 400 FFN rows
static GPTConfig uneven(void) {
    return config(2, 100, 25, 300, 16);
}

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

// ---- files ------------------------------------------------------------------------------------------------
static const char* in_folder(const char* name) {
    static char path[8][512]; // the last eight stay
    static int turn;
    char* p = path[turn++ % 8];
    (void)snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

// the whole file, malloc'ed; NULL if there is none
static char* slurp(const char* path, size_t* nbytes) {
    FILE* f = fopen(path, "rb");
    if (!f) { return NULL; }
    fseek(f, 0, SEEK_END);
    *nbytes = (size_t)ftell(f);
    rewind(f);
    char* all = malloc(*nbytes + 1);
    *nbytes = fread(all, 1, *nbytes, f);
    all[*nbytes] = 0;
    fclose(f);
    return all;
}

static void spill(const char* path, const void* from, size_t nbytes) {
    FILE* f = fopen(path, "wb");
    CHECK(f && fwrite(from, 1, nbytes, f) == nbytes && fclose(f) == 0);
}

static int exists(const char* path) {
    return access(path, F_OK) == 0;
}

static void test_logger(void) {
    Logger l;
    char err[TRAIN_ERR] = "";
    size_t nbytes;
    CHECK_AT("main.log");
    spill(in_folder("main.log"), "old\n", 4);
    CHECK(logger_init(&l, folder, 0, 0, err) == 0); // a fresh start wipes it
    CHECK(logger_val(&l, 0, 11.009876f, err) == 0);
    CHECK(logger_train(&l, 0, 10.98768f, 6e-4f, 15.268f, err) == 0);
    Logger other;
    CHECK(logger_init(&other, folder, 1, 0, err) == 0); // another rank: neither wiped nor written
    CHECK(logger_val(&other, 1, 1.0f, err) == 0);
    CHECK(logger_init(&other, "", 0, 0, err) == 0 && logger_val(&other, 1, 1.0f, err) == 0);
    CHECK(logger_init(&l, folder, 0, 1, err) == 0); // a resume appends
    CHECK(logger_train(&l, 12, NAN, 0.0f, 1e6f, err) == 0);
    char* text = slurp(in_folder("main.log"), &nbytes);
    CHECK(strcmp(text, "s:0 tel:11.0099\ns:0 trl:10.9877 lr:0.000600 norm:15.27\ns:12 trl:nan lr:0.000000 "
                       "norm:1000000.00\n") == 0);
    free(text);
    CHECK(logger_init(&l, in_folder("nowhere"), 0, 0, err) == -1);
    CHECK_HAS(err, "nowhere/main.log: cannot be opened: No such file");
    (void)snprintf(l.path, sizeof l.path, "/dev/full");
    CHECK(logger_val(&l, 0, 1.0f, err) == -1);
    CHECK_HAS(err, "/dev/full: cannot be written: No space left");
}

// ---- checkpoints ------------------------------------------------------------------------------------------
// a world of dp * up replicas of tp ranks; ZeRO: replicas share the optimizer's arrays
typedef struct {
    int tp, up, dp, zero;
} Mesh;

static const Mesh MESHES[] = {{1, 1, 1, 0}, {2, 1, 1, 0}, {3, 1, 1, 0}, {4, 1, 1, 0}, {1, 1, 2, 1},
                              {1, 1, 4, 1}, {2, 1, 2, 0}, {2, 1, 3, 1}, {1, 2, 1, 1}, {1, 3, 1, 1},
                              {2, 2, 2, 1}, {3, 2, 1, 1}, {2, 3, 1, 0}, {4, 2, 1, 1}};
enum { NMESHES = sizeof MESHES / sizeof MESHES[0] };

static int mesh_size(Mesh m) {
    return m.tp * m.up * m.dp;
}

// the tables of world rank w: of its whole parts, and of the optimizer's
static void mesh_tables(Mesh m, GPTConfig c, int w, Tensors* ts, Tensors* os) {
    const int t = w % m.tp, nshards = m.zero ? m.up * m.dp : 1;
    tensors_init(ts, c, (TensorCuts){m.tp, t, m.up, 1, 0});
    tensors_init(os, c, (TensorCuts){m.tp, t, m.up, nshards, nshards > 1 ? w / m.tp : 0});
}

static void check_at_mesh(const char* what, Mesh m) {
    CHECK_AT("%s tp=%d up=%d dp=%d zero=%d", what, m.tp, m.up, m.dp, m.zero);
}

// what the ranks of a test share. full: the arrays of a whole model, in the order of the file
typedef struct {
    GPTConfig c;
    Mesh mesh;
    const char* path;
    const floatX* params;
    const float* moments[3]; // m, v, master
    CheckpointState st;
    int want; // what writing is to return
    char err[8][TRAIN_ERR];
} Shared;

// a rank's arena, in device memory; gaps are poisoned: none of them may reach a file
static void* arena_of(const Tensors* ts, const void* full, size_t nbytes, FoStream* s) {
    char* host = malloc(ts->nelem * nbytes);
    void* arena = fo_malloc(fo_stream_device(s), ts->nelem * nbytes);
    memset(host, 0xff, ts->nelem * nbytes); // NaN in either type
    const char* from = full;
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor* t = &ts->t[i];
        for (int l = 0; l < t->layers; l++) {
            tensor_extract(host + (t->offset + (size_t)l * tensor_local(t)) * nbytes, from, ts, i, ts->cuts.t,
                           ts->cuts.shard, nbytes);
            from += t->rows * t->cols * nbytes;
        }
    }
    fo_upload(arena, host, ts->nelem * nbytes, s);
    fo_stream_sync(s);
    free(host);
    return arena;
}

static void write_body(FoGroup* g, Shared* sh, int state) {
    const int w = fo_group_rank(g);
    FoDevice* d = fo_device_open(w, fo_group_nlocal(g));
    FoStream* s = fo_stream_create(d, "comm");
    Tensors ts, os;
    void* a[3] = {NULL};
    mesh_tables(sh->mesh, sh->c, w, &ts, &os);
    if (state) {
        for (int i = 0; i < 3; i++) {
            a[i] = arena_of(&os, sh->moments[i], sizeof(float), s);
        }
        CHECK(checkpoint_write_state(sh->path, &os, &sh->st, a[0], a[1], a[2], g, s, sh->err[w]) == sh->want);
    } else {
        a[0] = arena_of(&ts, sh->params, sizeof(floatX), s);
        CHECK(checkpoint_write_model(sh->path, &ts, a[0], g, s, sh->err[w]) == sh->want);
    }
    for (int i = 0; i < 3; i++) {
        fo_free(d, a[i]);
    }
    CHECK(fo_device_nbytes(d) == 0);
    fo_stream_destroy(s);
    fo_device_close(d);
}

static void write_model_body(FoGroup* g, void* arg) {
    write_body(g, arg, 0);
}

static void write_state_body(FoGroup* g, void* arg) {
    write_body(g, arg, 1);
}

// a rank's part, fp32, against `full`; gaps must be 0
static void check_local(const Tensors* ts, const float* local, const float* full) {
    int right = 1;
    size_t at = 0, filled = 0, nonzero = 0;
    float* part = malloc(ts->nelem * sizeof *part);
    for (int i = 0; i < NTENSORS; i++) {
        const Tensor* t = &ts->t[i];
        const size_t n = tensor_local(t);
        for (int l = 0; l < t->layers; l++) {
            tensor_extract(part, full + at, ts, i, ts->cuts.t, ts->cuts.shard, sizeof *part);
            right &= n == 0 || memcmp(part, local + t->offset + (size_t)l * n, n * sizeof *part) == 0;
            at += t->rows * t->cols;
            filled += n;
        }
    }
    CHECK(right);
    for (size_t k = 0; k < ts->nelem; k++) {
        nonzero += local[k] != 0.0f;
    }
    CHECK(nonzero == filled); // no element of `full` is 0
    free(part);
}

static size_t ntotal_of(GPTConfig c) {
    Tensors ts;
    tensors_init(&ts, c, cuts_tp(1, 0));
    return ts.ntotal;
}

// numbered values that bf16 holds exactly, none of them 0
static float value_of(size_t k, int salt) {
    return (float)((k * 37 + (size_t)salt * 11) % 251 + 1) / 4.0f;
}

static float* numbered(size_t n, int salt) {
    float* x = malloc(n * sizeof *x);
    for (size_t k = 0; k < n; k++) {
        x[k] = value_of(k, salt);
    }
    return x;
}

// a model file made by hand, as doc/formats.md says; malloc'ed
static char* model_file(GPTConfig c, int version, const float* full, size_t* nbytes) {
    const size_t n = ntotal_of(c), each = version == 3 ? 4 : 2;
    const int32_t words[8] = {20240326, version, c.maxT, c.V, c.L, c.NH, c.C, c.Vp};
    char* file = calloc(1, 1024 + n * each);
    memcpy(file, words, sizeof words);
    for (size_t k = 0; k < n; k++) {
        FoBf16 b = fo_bf16_from_float(full[k]);
        memcpy(file + 1024 + k * each, each == 4 ? (const void*)&full[k] : (const void*)&b, each);
    }
    *nbytes = 1024 + n * each;
    return file;
}

// floatX -> fp32, to be compared
static void widen(float* to, const floatX* from, size_t n) {
    for (size_t k = 0; k < n; k++) {
        to[k] = fo_float(from[k]);
    }
}

static void read_model_everywhere(const char* path, GPTConfig c, const float* full) {
    for (int i = 0; i < NMESHES; i++) {
        for (int w = 0; w < mesh_size(MESHES[i]); w++) {
            Tensors ts, os;
            char err[TRAIN_ERR] = "";
            check_at_mesh("model read", MESHES[i]);
            mesh_tables(MESHES[i], c, w, &ts, &os);
            float* master = malloc(os.nelem * sizeof *master);
            floatX* params = malloc(ts.nelem * sizeof *params);
            float* wide = malloc(ts.nelem * sizeof *wide);
            memset(master, 0xff, os.nelem * sizeof *master);
            memset(params, 0xff, ts.nelem * sizeof *params);
            CHECK(checkpoint_read_model(path, &ts, params, &os, master, NULL, err) == 0);
            check_local(&os, master, full);
            widen(wide, params, ts.nelem);
            check_local(&ts, wide, full);
            memset(master, 0xff, os.nelem * sizeof *master);
            CHECK(checkpoint_read_model(path, NULL, NULL, &os, master, NULL, err) == 0); // one alone
            check_local(&os, master, full);
            free(master);
            free(params);
            free(wide);
        }
    }
}

static void test_model_files(void) {
    // the last one has blocks of many rows and more than one a tensor: 5,376 rows of 2,048 bytes
    const GPTConfig configs[] = {uneven(), config(1, 6, 3, 5, 3), config(1, 512, 4, 5300, 4)};
    for (int k = 0; k < 3; k++) {
        const GPTConfig c = configs[k];
        const size_t n = ntotal_of(c);
        float* full = numbered(n, 1);
        floatX* params = malloc(n * sizeof *params);
        for (size_t i = 0; i < n; i++) {
            params[i] = fo_floatx(full[i]);
        }
        for (int version = 3; version <= 5; version += 2) { // both are read by either build
            size_t nbytes;
            char* file = model_file(c, version, full, &nbytes);
            const char* path = in_folder("model.bin");
            spill(path, file, nbytes);
            read_model_everywhere(path, c, full);
            if (version == (FO_FLOATX == FO_BF16 ? 5 : 3)) {
                for (int i = 0; i < NMESHES; i++) {
                    Shared sh = {
                        .c = c, .mesh = MESHES[i], .path = in_folder("written.bin"), .params = params};
                    size_t got_nbytes = 0;
                    check_at_mesh("model written", MESHES[i]);
                    fo_ranks_run(mesh_size(MESHES[i]), write_model_body, &sh);
                    char* got = slurp(sh.path, &got_nbytes);
                    CHECK(got && got_nbytes == nbytes);
                    if (got && got_nbytes == nbytes) { CHECK_BITS(got, file, nbytes); }
                    CHECK(!exists(in_folder("written.bin.tmp")));
                    free(got);
                }
            }
            free(file);
        }
        free(full);
        free(params);
    }
}

// as world rank w: the moments and masters by one table, masters rounded by the other
static void read_state_as(Mesh mesh, GPTConfig c, int w, float* const full[3], FoDevice* d, FoStream* s) {
    Tensors ts, os;
    CheckpointState st;
    char err[TRAIN_ERR] = "";
    float* a[3];
    mesh_tables(mesh, c, w, &ts, &os);
    float* host = malloc(ts.nelem * sizeof *host); // os is no larger
    floatX* params = fo_malloc(d, ts.nelem * sizeof(floatX));
    memset(host, 0xff, ts.nelem * sizeof *host);
    fo_upload(params, host, ts.nelem * sizeof(floatX), s);
    for (int i = 0; i < 3; i++) {
        a[i] = fo_malloc(d, os.nelem * sizeof(float));
        fo_upload(a[i], host, os.nelem * sizeof(float), s);
    }
    CHECK(checkpoint_read_state(in_folder("state.bin"), &st, &ts, params, &os, a[0], a[1], a[2], s, err) ==
          0);
    CHECK(st.step == 123);
    CHECK(st.loader_nbytes == 37 && memcmp(st.loader, "xxxxx", 5) == 0);
    CHECK(st.trainer_nbytes == 6 && memcmp(st.trainer, "scalar", 6) == 0);
    for (int i = 0; i < 3; i++) {
        fo_download(host, a[i], os.nelem * sizeof(float), s);
        fo_stream_sync(s);
        check_local(&os, host, full[i]);
        fo_free(d, a[i]);
    }
    floatX* rounded = malloc(ts.nelem * sizeof *rounded);
    fo_download(rounded, params, ts.nelem * sizeof *rounded, s);
    fo_stream_sync(s);
    widen(host, rounded, ts.nelem);
    check_local(&ts, host, full[2]);
    fo_free(d, params);
    checkpoint_state_free(&st);
    CHECK(st.loader == NULL);
    free(rounded);
    free(host);
}

static void test_state_files(void) {
    const GPTConfig c = uneven();
    const size_t n = ntotal_of(c);
    float* arrays[3] = {numbered(n, 2), numbered(n, 3), numbered(n, 4)};
    char loader[37], *first = NULL;
    size_t first_nbytes = 0;
    memset(loader, 'x', sizeof loader);
    for (int k = 0; k < NMESHES; k++) {
        Shared sh = {.c = c,
                     .mesh = MESHES[k],
                     .path = in_folder("state.bin"),
                     .moments = {arrays[0], arrays[1], arrays[2]}};
        sh.st = (CheckpointState){.step = 123,
                                  .loader = loader,
                                  .loader_nbytes = sizeof loader,
                                  .trainer = "scalar",
                                  .trainer_nbytes = 6};
        check_at_mesh("state written", MESHES[k]);
        fo_ranks_run(mesh_size(MESHES[k]), write_state_body, &sh);
        size_t nbytes = 0;
        char* file = slurp(sh.path, &nbytes);
        CHECK(nbytes == 1024 + 37 + 6 + 12 * n);
        if (k == 0) {
            first = file;
            first_nbytes = nbytes;
            for (int i = 0; i < 3; i++) { // the arrays lie in it as they are
                CHECK_BITS(file + 1024 + 43 + (size_t)i * 4 * n, arrays[i], 4 * n);
            }
        } else {
            CHECK(nbytes == first_nbytes && memcmp(file, first, nbytes) == 0);
            free(file);
        }
    }
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "main");
    for (int k = 0; k < NMESHES; k++) {
        for (int w = 0; w < mesh_size(MESHES[k]); w++) {
            check_at_mesh("state read", MESHES[k]);
            read_state_as(MESHES[k], c, w, arrays, d, s);
        }
    }
    fo_stream_destroy(s);
    fo_device_close(d);
    free(first);
    for (int i = 0; i < 3; i++) {
        free(arrays[i]);
    }
}

// ---- new weights ------------------------------------------------------------------------------------------
// any rank of any mesh draws its part of what one rank draws; what is not drawn stays as it was
static void test_weights(void) {
    const GPTConfig configs[] = {uneven(), config(1, 512, 4, 5300, 4)};
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "main");
    for (int k = 0; k < 2; k++) {
        const GPTConfig c = configs[k];
        Tensors all, ts, os;
        tensors_init(&all, c, cuts_tp(1, 0));
        float* full = fo_malloc(d, all.nelem * sizeof *full);
        weights_random(NULL, NULL, &all, full, 42, s);
        CHECK_AT("new weights: what is drawn");
        CHECK(fabsf(full[all.t[WTE].offset] - 0x1.3bb4acp-5f) < 1e-8f); // as in test_data.c
        CHECK(full[all.t[LN2W].offset + 5] == 1.0f && full[all.t[QKVB].offset] == 0.0f);
        CHECK(full[all.t[WTE].offset + (size_t)c.V * all.t[WTE].cols] == 0.0f);
        for (int i = 0; i < NMESHES; i++) {
            for (int w = k ? mesh_size(MESHES[i]) - 1 : 0; w < mesh_size(MESHES[i]);
                 w++) { // the large one: last
                int right = 1;
                mesh_tables(MESHES[i], c, w, &ts, &os);
                floatX* params = fo_malloc(d, ts.nelem * sizeof *params);
                float* master = fo_malloc(d, os.nelem * sizeof *master);
                weights_random(&ts, params, &os, master, 42, s);
                float* part = malloc(ts.nelem * sizeof *part);
                for (int j = 0; j < NTENSORS; j++) {
                    const Tensor *x = &all.t[j], *tx = &ts.t[j], *ox = &os.t[j];
                    for (size_t l = 0; l < (size_t)x->layers; l++) {
                        const float* whole = full + x->offset + l * tensor_local(x);
                        const size_t n = tensor_local(tx), no = tensor_local(ox);
                        const floatX* p = params + tx->offset + l * n;
                        tensor_extract(part, whole, &os, j, os.cuts.t, os.cuts.shard, sizeof *part);
                        right &= memcmp(part, master + ox->offset + l * no, no * sizeof *part) == 0;
                        tensor_extract(part, whole, &ts, j, ts.cuts.t, 0, sizeof *part);
                        for (size_t e = 0; e < n; e++) {
                            right &= fo_float(p[e]) == fo_float(fo_floatx(part[e]));
                        }
                    }
                }
                check_at_mesh("new weights", MESHES[i]);
                CHECK(right);
                free(part);
                fo_free(d, params);
                fo_free(d, master);
            }
        }
        fo_free(d, full);
    }
    fo_stream_destroy(s);
    fo_device_close(d);
}

// ---- bad files --------------------------------------------------------------------------------------------
// a damaged copy of a model file: word `word` of its header set, `cut` bytes dropped at the end
static void check_bad_model(const char* file, size_t nbytes, int word, int32_t value, size_t cut,
                            const char* want) {
    char* copy = malloc(nbytes + 4);
    char err[TRAIN_ERR] = "";
    GPTConfig c;
    int version;
    memset(copy, 0, nbytes + 4);
    memcpy(copy, file, nbytes);
    if (word >= 0) { memcpy(copy + 4 * word, &value, 4); }
    CHECK_AT("word %d = %d, cut %zu", word, value, cut);
    spill(in_folder("bad.bin"), copy, nbytes - cut);
    CHECK(checkpoint_read_header(in_folder("bad.bin"), &c, &version, err) == -1);
    CHECK_HAS(err, "/bad.bin: ");
    CHECK_HAS(err, want);
    CHECK(strchr(err, '\n') == NULL);
    free(copy);
}

static void test_bad_models(void) {
    const GPTConfig c = uneven();
    float* full = numbered(ntotal_of(c), 1);
    size_t nbytes;
    char* file = model_file(c, 5, full, &nbytes);
    char want[128], err[TRAIN_ERR] = "";
    int version;
    GPTConfig got;
    Tensors ts;
    (void)snprintf(want, sizeof want, "has %zu bytes, but %zu parameters in bf16 need %zu: it is truncated",
                   nbytes - 1, ntotal_of(c), nbytes);
    check_bad_model(file, nbytes, -1, 0, 1, want);
    check_bad_model(file, nbytes, -1, 0, (size_t)-2, "it is too long");
    check_bad_model(file, nbytes, -1, 0, nbytes, "is empty");
    check_bad_model(file, nbytes, -1, 0, nbytes - 3, "begins with the number");
    check_bad_model(file, nbytes, -1, 0, nbytes - 1023, "truncated: 1023 bytes, the header alone has 1024");
    check_bad_model(file, nbytes, 0, 4711, 0,
                    "begins with the number 4711; a model checkpoint begins with 20240326");
    check_bad_model(file, nbytes, 0, (int32_t)__builtin_bswap32(20240326), 0, "big-endian");
    check_bad_model(file, nbytes, 0, 20240520, 0, "is a token shard");
    check_bad_model(file, nbytes, 0, 0x4f44213c, 0, "HTML"); // <!DO
    check_bad_model(file, nbytes, 1, 2, 0,
                    "old version 2, without padded vocabulary; want 3 (fp32) or 5 (bf16)");
    check_bad_model(file, nbytes, 1, 6, 0, "version 6; want 3 (fp32) or 5 (bf16)");
    check_bad_model(file, nbytes, 1, 3, 0, "in fp32 need");
    check_bad_model(file, nbytes, 2, 0, 0, "damaged: maxT=0, want 1 to");
    check_bad_model(file, nbytes, 3, -1, 0, "damaged: V=-1");
    check_bad_model(file, nbytes, 3, 2147483647, 0, "damaged: V=2147483647");
    check_bad_model(file, nbytes, 4, 2147483647, 0, "damaged: L=2147483647");
    check_bad_model(file, nbytes, 5, 0, 0, "damaged: NH=0");
    check_bad_model(file, nbytes, 5, 24, 0, "damaged: C=100 is not a multiple of NH=24");
    check_bad_model(file, nbytes, 6, 1 << 20, 0, "damaged: C=1048576");
    check_bad_model(file, nbytes, 7, 300, 0, "damaged: Vp=300, want 384");
    CHECK_AT("not files");
    CHECK(checkpoint_read_header(in_folder("none.bin"), &got, &version, err) == -1);
    CHECK_HAS(err, "none.bin: No such file or directory; want a model checkpoint");
    CHECK(checkpoint_read_header(folder, &got, &version, err) == -1);
    CHECK_HAS(err, "is not a regular file");
    CHECK_AT("of another model");
    spill(in_folder("bad.bin"), file, nbytes);
    CHECK(checkpoint_read_header(in_folder("bad.bin"), &got, &version, err) == 0 && version == 5);
    CHECK(got.C == 100 && got.NH == 25 && got.L == 2 && got.V == 300 && got.Vp == 384 && got.maxT == 16);
    tensors_init(&ts, config(2, 100, 20, 300, 16), cuts_tp(1, 0));
    float* local = malloc(ts.nelem * sizeof *local);
    CHECK(checkpoint_read_model(in_folder("bad.bin"), NULL, NULL, &ts, local, NULL, err) == -1);
    CHECK_HAS(err, "NH=25");
    CHECK_HAS(err, "NH=20");
    free(local);
    free(file);
    free(full);
}

static void check_bad_state(const char* file, size_t nbytes, int word, int32_t value, size_t cut, int NH,
                            const char* want) {
    char* copy = malloc(nbytes);
    char err[TRAIN_ERR] = "";
    Tensors ts;
    CheckpointState st;
    memcpy(copy, file, nbytes);
    if (word >= 0) { memcpy(copy + 4 * word, &value, 4); }
    CHECK_AT("state: word %d = %d, cut %zu", word, value, cut);
    spill(in_folder("bad.bin"), copy, nbytes - cut);
    tensors_init(&ts, config(2, 100, NH, 300, 16), cuts_tp(1, 0));
    CHECK(checkpoint_read_state(in_folder("bad.bin"), &st, NULL, NULL, &ts, NULL, NULL, NULL, NULL, err) ==
          -1);
    CHECK_HAS(err, want);
    checkpoint_state_free(&st);
    free(copy);
}

static void test_bad_states(void) {
    size_t nbytes = 0;
    char* file = slurp(in_folder("state.bin"), &nbytes);
    check_bad_state(file, nbytes, -1, 0, 1, 25, "m, v and master of");
    check_bad_state(file, nbytes, -1, 0, nbytes, 25, "is empty");
    check_bad_state(file, nbytes, 0, 20240527, 0, 25, "is an optimizer state of llm.c");
    check_bad_state(file, nbytes, 0, 20240326, 0, 25, "is a model checkpoint; want a state file");
    check_bad_state(file, nbytes, 0, (int32_t)__builtin_bswap32(20261129), 0, 25, "big-endian");
    check_bad_state(file, nbytes, 1, 3, 0, 25, "is of version 3; want 2");
    check_bad_state(file, nbytes, 1, 1, 0, 25, "is of version 1, without the data's epoch; want 2");
    check_bad_state(file, nbytes, 2, -5, 0, 25, "damaged: step -5");
    check_bad_state(file, nbytes, 6, 0, 0, 25, "damaged: NH=0");
    check_bad_state(file, nbytes, 14, 38, 0, 25, "need"); // of the loader's bytes
    check_bad_state(file, nbytes, 15, 1 << 30, 0, 25, "damaged");
    check_bad_state(file, nbytes, 17, -1, 0, 25, "damaged");
    check_bad_state(file, nbytes, -1, 0, 0, 20, "NH=25");
    free(file);
}

// no more room while a file is written: the old one stays, nothing else does, and every rank knows
static void test_disk_full(void) {
    const GPTConfig c = uneven();
    const size_t n = ntotal_of(c);
    float* full = numbered(n, 1);
    floatX* params = malloc(n * sizeof *params);
    struct rlimit old, low;
    CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0);
    signal(SIGXFSZ, SIG_IGN);
    for (int P = 1; P <= 3; P++) {
        for (int state = 0; state < 2; state++) {
            FoRankBody body = state ? write_state_body : write_model_body;
            Shared sh = {.c = c,
                         .mesh = {P > 1 ? 2 : 1, 1, P > 1 ? P - 1 : 1, 1},
                         .path = in_folder("kept.bin"),
                         .params = params,
                         .moments = {full, full, full}};
            const int nranks = mesh_size(sh.mesh);
            size_t before_nbytes = 0, after_nbytes = 0;
            CHECK_AT("disk full, %d ranks, %s", P, state ? "state" : "model");
            for (size_t i = 0; i < n; i++) {
                params[i] = fo_floatx(full[i]);
            }
            fo_ranks_run(nranks, body, &sh);
            char* before = slurp(sh.path, &before_nbytes);
            for (size_t i = 0; i < n; i++) {
                params[i] = fo_floatx(1.0f);
            }
            sh.want = -1;
            sh.st.step = 77;
            low = old;
            low.rlim_cur = 200000;
            CHECK(setrlimit(RLIMIT_FSIZE, &low) == 0);
            fo_ranks_run(nranks, body, &sh);
            CHECK(setrlimit(RLIMIT_FSIZE, &old) == 0);
            char* after = slurp(sh.path, &after_nbytes);
            CHECK(before && after && before_nbytes > 300000 && after_nbytes == before_nbytes);
            CHECK(before && after && memcmp(before, after, before_nbytes) == 0);
            CHECK(!exists(in_folder("kept.bin.tmp")));
            for (int r = 0; r < nranks; r++) {
                CHECK_HAS(sh.err[r], "/kept.bin: cannot be written: File too large");
            }
            free(before);
            free(after);
            sh.path = in_folder("nowhere/x.bin"); // cannot even be created
            fo_ranks_run(nranks, body, &sh);
            for (int r = 0; r < nranks; r++) {
                CHECK_HAS(sh.err[r], "nowhere/x.bin: cannot be created: No such file");
            }
        }
    }
    signal(SIGXFSZ, SIG_DFL);
    free(full);
    free(params);
}

// ---- output folder ----------------------------------------------------------------------------------------
static void put_checkpoint(const char* dir, int step, const char* model, size_t model_nbytes,
                           const char* state, size_t state_nbytes) {
    char path[CHECKPOINT_PATH], err[TRAIN_ERR];
    char* copy = malloc(state_nbytes);
    memcpy(copy, state, state_nbytes);
    memcpy(copy + 8, &step, 4);
    checkpoint_path(path, dir, "model", step);
    spill(path, model, model_nbytes);
    checkpoint_path(path, dir, "state", step);
    spill(path, copy, state_nbytes);
    CHECK(checkpoint_write_done(dir, step, err) == 0);
    free(copy);
}

// which of steps 10, 20, ... 80 have all three files, as bits; -1 if one has only some
static int steps_there(const char* dir) {
    int bits = 0;
    for (int i = 0; i < 8; i++) {
        char model[CHECKPOINT_PATH], state[CHECKPOINT_PATH], done[CHECKPOINT_PATH];
        checkpoint_path(model, dir, "model", 10 * (i + 1));
        checkpoint_path(state, dir, "state", 10 * (i + 1));
        checkpoint_done_path(done, dir, 10 * (i + 1));
        const int n = exists(model) + exists(state) + exists(done);
        if (n != 0 && n != 3) { return -1; }
        bits |= (n == 3) << i;
    }
    return bits;
}

static void test_folder(void) {
    char err[TRAIN_ERR] = "", path[CHECKPOINT_PATH], dir[512], long_name[2000];
    struct stat info;
    size_t model_nbytes, state_nbytes;
    const GPTConfig c = uneven();
    float* full = numbered(ntotal_of(c), 1);
    char* model = model_file(c, 3, full, &model_nbytes);
    char* state = slurp(in_folder("state.bin"), &state_nbytes);
    CHECK_AT("prepare");
    (void)snprintf(dir, sizeof dir, "%s", in_folder("out"));
    CHECK(checkpoint_prepare_folder(dir, err) == 0 && stat(dir, &info) == 0 && (info.st_mode & 0777) == 0755);
    CHECK(checkpoint_prepare_folder(dir, err) == 0); // it is there
    CHECK(checkpoint_prepare_folder(in_folder("a/b"), err) == -1);
    CHECK_HAS(err, "a/b: cannot be made: No such file or directory (the folder around it is missing");
    CHECK(checkpoint_prepare_folder(in_folder("state.bin"), err) == -1);
    CHECK_HAS(err, "state.bin: is not a folder");
    CHECK(checkpoint_prepare_folder("/proc", err) == -1); // nobody may write there, not even root
    CHECK_HAS(err, "output folder /proc: no file can be made in it");
    memset(long_name, 'a', sizeof long_name);
    long_name[1999] = 0;
    CHECK(checkpoint_prepare_folder(long_name, err) == -1);
    CHECK_HAS(err, "1999 characters; at most 992");

    CHECK_AT("find");
    CHECK(checkpoint_find(dir, err) == -1 && err[0] == 0);
    put_checkpoint(dir, 10, model, model_nbytes, state, state_nbytes);
    put_checkpoint(dir, 9, model, model_nbytes, state, state_nbytes);
    put_checkpoint(dir, 20, model, model_nbytes, state, state_nbytes);
    put_checkpoint(dir, 100000000, model, model_nbytes, state, state_nbytes); // nine digits
    CHECK(checkpoint_find(dir, err) == 100000000 && err[0] == 0);
    checkpoint_done_path(path, dir, 100000000);
    unlink(path);
    CHECK(checkpoint_find(dir, err) == 20 && err[0] == 0); // without DONE: not complete
    spill(in_folder("out/DONE_99"), "", 0);                // not a name of ours
    CHECK(checkpoint_find(dir, err) == 20 && err[0] == 0);
    checkpoint_path(path, dir, "model", 20);
    spill(path, model, model_nbytes - 1);
    CHECK(checkpoint_find(dir, err) == 10);
    CHECK_HAS(err, "step 20 passed over: ");
    CHECK_HAS(err, "model_00000020.bin: has");
    spill(path, model, model_nbytes);
    checkpoint_path(path, dir, "state", 20);
    unlink(path);
    CHECK(checkpoint_find(dir, err) == 10);
    CHECK_HAS(err, "state_00000020.bin: No such file");
    spill(path, state, state_nbytes); // it says step 123
    CHECK(checkpoint_find(dir, err) == 10);
    CHECK_HAS(err, "state_00000020.bin: is of step 123");
    CHECK(checkpoint_find(in_folder("gone"), err) == -1);
    CHECK_HAS(err, "gone: cannot be read");

    CHECK_AT("prune");
    for (int i = 1; i <= 8; i++) {
        put_checkpoint(dir, 10 * i, model, model_nbytes, state, state_nbytes);
    }
    CHECK(checkpoint_prune(dir, 80, 0, 0, err) == 0 && steps_there(dir) == 0xff); // 0 keeps all
    CHECK(checkpoint_prune(dir, 70, 3, 40, err) == 0);
    CHECK(steps_there(dir) == 0xf8); // of 70: 70 60 50 and the major 40; 80 is a later one
    CHECK(checkpoint_prune(dir, 80, 2, 0, err) == 0 && steps_there(dir) == 0xc0);
    checkpoint_path(path, dir, "model", 9);
    CHECK(!exists(path));
    checkpoint_path(path, dir, "model", 70);
    unlink(path);
    CHECK(checkpoint_prune(dir, 80, 1, 0, err) == 0 && steps_there(dir) == 0x80); // half gone already
    CHECK(checkpoint_prune(in_folder("gone"), 80, 1, 0, err) == -1);
    free(full);
    free(model);
    free(state);
}

// ---- debug state ------------------------------------------------------------------------------------------
static void test_debugstate(void) {
    enum { B = 2, T = 3 };
    const GPTConfig c = config(1, 8, 2, 11, 4);
    const size_t n = ntotal_of(c), nlogits = B * T * 11;
    const int32_t header[256] = {20240327, 2, B, T};
    float* values = numbered(nlogits + 1 + n, 5);
    int ids[2 * B * T];
    char err[TRAIN_ERR] = "";
    DebugState d;
    for (int i = 0; i < 2 * B * T; i++) {
        ids[i] = i;
    }
    const size_t nbytes = sizeof header + sizeof ids + (nlogits + 1 + n) * sizeof(float);
    char* file = malloc(nbytes);
    memcpy(file, header, sizeof header);
    memcpy(file + sizeof header, ids, sizeof ids);
    memcpy(file + sizeof header + sizeof ids, values, (nlogits + 1 + n) * sizeof(float));
    CHECK_AT("debug state");
    spill(in_folder("debug.bin"), file, nbytes);
    CHECK(debugstate_read(in_folder("debug.bin"), &c, &d, err) == 0 && d.B == B && d.T == T);
    CHECK_BITS(d.x, ids, B * T * sizeof(int));
    CHECK_BITS(d.y, ids + B * T, B * T * sizeof(int));
    CHECK_BITS(d.logits, values, nlogits * sizeof(float));
    CHECK(d.loss == values[nlogits]);
    CHECK_BITS(d.grads, values + nlogits + 1, n * sizeof(float));
    debugstate_free(&d);
    spill(in_folder("debug.bin"), file, nbytes - 4);
    CHECK(debugstate_read(in_folder("debug.bin"), &c, &d, err) == -1);
    CHECK_HAS(err, "a batch of B=2 T=3, logits and");
    debugstate_free(&d);
    memset(file + 4, 1, 1);
    spill(in_folder("debug.bin"), file, nbytes);
    CHECK(debugstate_read(in_folder("debug.bin"), &c, &d, err) == -1);
    CHECK_HAS(err, "version 1; want 2");
    debugstate_free(&d);
    free(file);
    free(values);
}

int main(void) {
    char rm[300];
    const char* tmp = getenv("TMPDIR");
    (void)snprintf(folder, sizeof folder, "%s/test_train.XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(folder)) {
        perror(folder);
        return 1;
    }
    test_tensors();
    test_schedule();
    test_outlier();
    test_sampler();
    test_logger();
    test_model_files();
    test_state_files();
    test_weights();
    test_bad_models();
    test_bad_states();
    test_disk_full();
    test_folder();
    test_debugstate();
    (void)snprintf(rm, sizeof rm, "rm -rf '%s'", folder);
    CHECK(system(rm) == 0);
    return check_report();
}
