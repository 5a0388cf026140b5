/* attention.c -- causal self-attention of fo_ops.h on the cpu: forward, backward, one token at a time.
 *
 * One thread takes a head of a sequence (backward), or some of its queries (forward), and goes through blocks
 * of queries. The scores of a block, against all keys up to its last query, stay in the second-level cache;
 * no more of the [T, T] matrix ever exists, and the softmax of a row needs no second thoughts. All products
 * are made of one small kernel, `tile`, of bf16 with fp32 sums where the processor has that instruction, else
 * in fp32. Read tile, then forward_block, then backward_block.
 *
 * Equal bits however rows are cut: a row's sums run over positions from 0, in an order that its own position
 * alone decides. What lies beyond the diagonal is multiplied by an exact 0, and never read where it may be
 * incomplete.
 */
#include "flashoverlap/cpu/cpu.h"
#include "flashoverlap/fo_ops.h"
#include <math.h>

// -std=c11 keeps gcc from fusing a * b + c by itself; here every result is made of such sums
#pragma GCC optimize("fp-contract=fast")

#if FO_OPENMP
#define PRAGMA(text) _Pragma(#text)
#define PARALLEL_FOR  PRAGMA(omp parallel for schedule(dynamic))
#define PARALLEL_ROWS PRAGMA(omp parallel for schedule(static))
#else
#define PARALLEL_FOR
#define PARALLEL_ROWS
#endif

typedef int32_t IntLane __attribute__((vector_size(LANE_NBYTES))); // comparisons give -1 or 0
typedef uint32_t BitLane __attribute__((vector_size(LANE_NBYTES)));

// ---- the kernel -------------------------------------------------------------------------------------------
/* Num is what products are made of. PAIR of them lie side by side along the width summed over: two bf16 for
 * the instruction that multiplies pairs, else one float.
 *
 *   rows    [rows][width]                        the left factor: as it is
 *   panels  [cols / NR][width / PAIR][NR][PAIR]  the right factor: NR columns together, in order of use
 */
#if defined(__AVX512BF16__) && !defined(FO_PRECISION_FP32)
#include <immintrin.h>
typedef uint16_t Num;
enum { PAIR = 2 };
#else
typedef float Num;
enum { PAIR = 1 };
#endif
enum { MR = 12, NR = LANE_NBYTES / 4 }; // a tile: as many sums as 16 registers can hold
enum { UNIT = 48 };                     // what positions are padded to, a multiple of MR and NR
enum { FORWARD_ROWS = 48, TASK_ROWS = 240, BACKWARD_ROWS = 64 };

#if defined(__AVX512BF16__) && !defined(FO_PRECISION_FP32)
static inline Num num_of_floatx(floatX x) {
    return x.bits;
}
static inline float float_of_num(Num x) {
    return fo_bf16_to_float((FoBf16){x});
}
static inline void num_store(Num* dst, Lane v) {
    __m256bh b = _mm512_cvtneps_pbh((__m512)v);
    memcpy(dst, &b, sizeof b);
}
// rows k (even) and k + 1 of a panel, from panel_index(k, 0) on
static inline void panel_store(Num* panel, Lane even, Lane odd) {
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
    _mm512_storeu_si512(panel, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
static inline Lane mul_add(Lane sum, const Num* a, const Num* b) {
    int32_t pair;
    memcpy(&pair, a, sizeof pair);
    return (Lane)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair),
                                  (__m512bh)_mm512_loadu_si512(b));
}
#else
static inline Num num_of_floatx(floatX x) {
    return fo_float(x);
}
static inline float float_of_num(Num x) {
    return x;
}
static inline void num_store(Num* dst, Lane v) {
    memcpy(dst, &v, sizeof v);
}
static inline void panel_store(Num* panel, Lane even, Lane odd) {
    num_store(panel, even);
    num_store(panel + NR, odd);
}
static inline Lane mul_add(Lane sum, const Num* a, const Num* b) {
    Lane v;
    memcpy(&v, b, sizeof v);
    return sum + v * *a;
}
#endif

// sum[r] += (row r of a) . (each column of a panel) over `width` numbers, a multiple of PAIR; rows are lda
// apart
static inline void tile(Lane sum[MR], const Num* a, size_t lda, const Num* panel, size_t width) {
    Lane acc[MR];
    memcpy(acc, sum, sizeof acc);
    for (size_t k = 0; k < width; k += PAIR) {
        #pragma GCC unroll 12
        for (int r = 0; r < MR; r++) {
            acc[r] = mul_add(acc[r], a + (size_t)r * lda + k, panel + k * NR);
        }
    }
    memcpy(sum, acc, sizeof acc);
}

static inline size_t panel_index(size_t k, size_t col) {
    return (k / PAIR * NR + col) * PAIR + k % PAIR;
}

static inline Lane lane_load(const float* p) {
    Lane v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline Lane lane_all(float x) {
    return x - (Lane){0};
}

// a where the mask is -1, 0 where it is 0
static inline Lane lane_mask(IntLane mask, Lane a) {
    return (Lane)((IntLane)a & mask);
}

static inline Lane lane_max(Lane a, Lane b) {
    IntLane greater = a > b;
    return (Lane)(((IntLane)a & greater) | ((IntLane)b & ~greater));
}

/* exp(x) for x <= 88 within 2 units in the last place; 0 below -87.7.
 *
 * x = k ln 2 + r. Adding 1.5 * 2^23 rounds to a whole k and leaves it in the low bits, from where a shift
 * makes the exponent of 2^k (0 for k = -127). exp(r), |r| <= ln 2 / 2, is its Taylor series up to r^7.
 */
static inline Lane lane_exp(Lane x) {
    const float magic = 12582912.0f;
    x = lane_max(x, lane_all(-88.0f));
    Lane shifted = x * 1.44269504f + magic;
    Lane k = shifted - magic;
    Lane r = k * -0.693359375f + x;
    r = k * 2.12194440e-4f + r;
    Lane p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = (p * r) * r + r + 1.0f;
    return p * (Lane)(((BitLane)shifted << 23) + 0x3f800000u);
}

// sum and maximum of a vector's lanes, halves first
static float lanes_sum(Lane v) {
    for (int half = NR / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            v[i] += v[i + half];
        }
    }
    return v[0];
}

static float lanes_max(Lane v) {
    float max = v[0];
    for (int i = 1; i < NR; i++) {
        max = v[i] > max ? v[i] : max;
    }
    return max;
}

static inline size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}
static inline size_t round_up(size_t a, size_t unit) {
    return (a + unit - 1) / unit * unit;
}

// ---- one head of one sequence -----------------------------------------------------------------------------
typedef struct {
    floatX *out, *dqkv;
    float* lse;
    float* dq;     // what dq is added to; NULL: it goes to dqkv
    floatX* dk;    // dv lies NH*hs further
    size_t dk_row; // elements from a row of dk to the next
    const floatX *qkv, *dout;
    size_t row0, n;
    FoLayout l;
    int NH, hs;
} Args;

typedef struct {
    const Args* a;
    int b, h;
    size_t T, Tp, hs, hsp; // positions, head size; padded to UNIT and NR
    size_t width, C;       // of a row of qkv, of out
} Head;

static Head head_of(const Args* a, int b, int h) {
    size_t T = (size_t)a->l.T, hs = (size_t)a->hs, C = (size_t)a->NH * hs;
    Head head = {a, b, h, T, round_up(T, UNIT), hs, round_up(hs, NR), 3 * C, C};
    return head;
}

static size_t row_of(const Head* h, size_t t) {
    return fo_layout_row(h->a->l, h->b, (int)t);
}

enum { DOUT = 3 }; // beside q, k and v, the parts 0, 1 and 2 of qkv

// rows [padded][hsp] of positions t0 ... t0+nt-1; zeros fill them up
static void load_rows(Num* rows, const Head* h, size_t part, size_t t0, size_t nt, size_t padded) {
    const floatX* base = (part == DOUT ? h->a->dout : h->a->qkv + part * h->C) + (size_t)h->h * h->hs;
    size_t width = part == DOUT ? h->C : h->width, run = (size_t)fo_layout_run(h->a->l);
    for (size_t i = 0, row = 0; i < nt; i++, row++) {
        if (i == 0 || (t0 + i) % run == 0) { row = row_of(h, t0 + i); }
        const floatX* x = base + row * width;
        Num* nums = rows + i * h->hsp;
        for (size_t d = 0; d < h->hs; d++) {
            nums[d] = num_of_floatx(x[d]);
        }
        for (size_t d = h->hs; d < h->hsp; d++) {
            nums[d] = 0;
        }
    }
    memset(rows + nt * h->hsp, 0, (padded - nt) * h->hsp * sizeof *rows);
}

// panels whose columns are rows of `rows`, to be summed over their width: the right factor of rows @ rows^T
static void panels_of_columns(Num* panels, const Num* rows, size_t nrows, size_t width) {
    for (size_t j = 0; j < nrows; j += NR) {
        Num* panel = panels + j * width;
        for (size_t k = 0; k < width; k += PAIR) {
            for (size_t c = 0; c < NR; c++) {
                memcpy(panel + panel_index(k, c), rows + (j + c) * width + k, PAIR * sizeof *panel);
            }
        }
    }
}

// panels of `rows` itself, to be summed over nrows; room for `capacity` rows in each panel
static void panels_of_rows(Num* panels, const Num* rows, size_t nrows, size_t width, size_t capacity) {
    for (size_t j = 0; j < width; j += NR) {
        Num* panel = panels + j * capacity;
        for (size_t k = 0; k < nrows; k += PAIR) {
            for (size_t c = 0; c < NR; c++) {
                for (size_t i = 0; i < PAIR; i++) {
                    panel[(k / PAIR * NR + c) * PAIR + i] = rows[(k + i) * width + j + c];
                }
            }
        }
    }
}

// ---- forward ----------------------------------------------------------------------------------------------
// some queries of a head: positions t0 ... t0+nt-1, which are rows that follow each other
typedef struct {
    int b, h;
    size_t t0, nt;
} Task;

typedef struct {
    Num *rows, *k_panels, *v_panels, *q, *p;
    float* scores;
    size_t ldp; // of p and scores; not a power of two, or rows would share cache sets
} ForwardScratch;

static size_t forward_scratch(ForwardScratch* f, const Head* h, char* base) {
    size_t at = 0, nums = h->Tp * h->hsp;
    f->ldp = h->Tp + 32;
    size_t sizes[6] = {nums * sizeof(Num),
                       nums * sizeof(Num),
                       nums * sizeof(Num),
                       FORWARD_ROWS * h->hsp * sizeof(Num),
                       FORWARD_ROWS * f->ldp * sizeof(Num),
                       FORWARD_ROWS * f->ldp * sizeof(float)};
    void* parts[6];
    for (int i = 0; i < 6; i++) {
        parts[i] = base + at;
        at += round_up(sizes[i], 64);
    }
    f->rows = parts[0], f->k_panels = parts[1], f->v_panels = parts[2];
    f->q = parts[3], f->p = parts[4], f->scores = parts[5];
    return at;
}

/* p = exp(scale (scores - max)) over the keys 0 ... t, 0 beyond, up to `padded` keys. Returns the sum of the
 * exponentials before they are rounded; *max comes scaled.
 */
static float softmax_row(Num* p, float* scores, size_t t, size_t padded, float scale, float* max) {
    size_t end = round_up(t + 1, NR);
    for (size_t k = t + 1; k < end; k++) {
        scores[k] = -INFINITY;
    }
    Lane most = lane_load(scores), sum = {0}, zero = {0};
    for (size_t k = NR; k < end; k += NR) {
        most = lane_max(lane_load(scores + k), most);
    }
    *max = lanes_max(most) * scale;
    for (size_t k = 0; k < end; k += NR) {
        Lane e = lane_exp(lane_load(scores + k) * scale - *max);
        sum += e;
        num_store(p + k, e);
    }
    for (size_t k = end; k < padded; k += NR) {
        num_store(p + k, zero);
    }
    return lanes_sum(sum);
}

static void store_rows(floatX* out, size_t ldo, const Lane* sum, const float* factor, size_t rows,
                       size_t cols) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) {
            out[r * ldo + c] = fo_floatx(sum[r][c] * factor[r]);
        }
    }
}

// queries t0 ... t0+nt-1, at most FORWARD_ROWS; keys and values up to t0+nt-1 are in the panels, then zeros
static void forward_block(const Head* h, const ForwardScratch* f, size_t t0, size_t nt) {
    size_t keys = round_up(t0 + nt, NR), first_row = row_of(h, t0);
    float scale = 1.0f / sqrtf((float)h->hs), inverse[FORWARD_ROWS];
    load_rows(f->q, h, 0, t0, nt, FORWARD_ROWS);
    for (size_t j = 0; j < keys; j += NR) {
        for (size_t i = 0; i < nt; i += MR) {
            Lane sum[MR] = {0};
            tile(sum, f->q + i * h->hsp, h->hsp, f->k_panels + j * h->hsp, h->hsp);
            for (size_t r = 0; r < MR; r++) {
                memcpy(f->scores + (i + r) * f->ldp + j, &sum[r], sizeof sum[r]);
            }
        }
    }
    for (size_t i = 0; i < nt; i++) {
        float max, sum = softmax_row(f->p + i * f->ldp, f->scores + i * f->ldp, t0 + i, keys, scale, &max);
        inverse[i] = 1.0f / sum;
        h->a->lse[(first_row + i) * (size_t)h->a->NH + (size_t)h->h] = max + logf(sum);
    }
    for (size_t i = 0; i < nt; i += MR) {
        for (size_t j = 0; j < h->hs; j += NR) {
            Lane sum[MR] = {0};
            tile(sum, f->p + i * f->ldp, f->ldp, f->v_panels + j * h->Tp, keys);
            floatX* out = h->a->out + (first_row + i) * h->C + (size_t)h->h * h->hs + j;
            store_rows(out, h->C, sum, inverse + i, min_size(MR, nt - i), min_size(NR, h->hs - j));
        }
    }
}

static void forward_task(const Args* a, const Task* task, char* scratch) {
    Head h = head_of(a, task->b, task->h);
    ForwardScratch f;
    forward_scratch(&f, &h, scratch);
    size_t end = task->t0 + task->nt, padded = round_up(end, UNIT);
    load_rows(f.rows, &h, 1, 0, end, padded);
    panels_of_columns(f.k_panels, f.rows, padded, h.hsp);
    load_rows(f.rows, &h, 2, 0, end, padded);
    panels_of_rows(f.v_panels, f.rows, padded, h.hsp, h.Tp);
    memset(f.p, 0, FORWARD_ROWS * f.ldp * sizeof *f.p); // rows beyond the last query are multiplied too
    for (size_t i = 0; i < task->nt; i += FORWARD_ROWS) {
        forward_block(&h, &f, task->t0 + i, min_size(FORWARD_ROWS, task->nt - i));
    }
}

/* The runs of positions within the call's rows, cut into tasks of at most task_rows, for all heads. Returns
 * how many; tasks may be NULL. *pairs: the (query, key) pairs that one head of them sees.
 */
static size_t make_tasks(const Args* a, size_t task_rows, Task* tasks, double* pairs) {
    size_t ntasks = 0, run = (size_t)fo_layout_run(a->l);
    *pairs = 0.0;
    for (int b = 0; b < a->l.B; b++) {
        for (size_t t = 0; t < (size_t)a->l.T; t += run) {
            size_t row = fo_layout_row(a->l, b, (int)t);
            size_t begin = row > a->row0 ? row : a->row0, end = min_size(row + run, a->row0 + a->n);
            for (size_t r = begin; r < end; r += task_rows) {
                size_t t0 = t + r - row, nt = min_size(task_rows, end - r);
                *pairs += (double)nt * ((double)t0 + 0.5 * (double)(nt + 1));
                for (int h = 0; h < a->NH; h++, ntasks++) {
                    if (tasks) { tasks[ntasks] = (Task){b, h, t0, nt}; }
                }
            }
        }
    }
    return ntasks;
}

static size_t this_thread(void) {
#if FO_OPENMP
    return (size_t)omp_get_thread_num();
#else
    return 0;
#endif
}

static void attention_forward_op(FoStream* s, void* args) {
    const Args* a = args;
    double pairs;
    ForwardScratch f;
    Head h = head_of(a, 0, 0);
    size_t own = forward_scratch(&f, &h, NULL), nthreads = (size_t)fo_stream_device(s)->nthreads;
    // each task prepares its keys anew, so whole runs are best where there are enough of them
    size_t task_rows = h.T, ntasks = make_tasks(a, task_rows, NULL, &pairs);
    if (ntasks < 4 * nthreads) {
        task_rows = TASK_ROWS;
        ntasks = make_tasks(a, task_rows, NULL, &pairs);
    }
    size_t tasks_nbytes = round_up(ntasks * sizeof(Task), 64);
    char* scratch = fo__scratch(s, tasks_nbytes + nthreads * own);
    Task* tasks = (Task*)scratch;
    make_tasks(a, task_rows, tasks, &pairs);
    PARALLEL_FOR
    for (size_t i = 0; i < ntasks; i++) { // later positions cost more: first
        forward_task(a, &tasks[ntasks - 1 - i], scratch + tasks_nbytes + this_thread() * own);
    }
    fo__pace(s, 4.0 * a->hs * pairs * a->NH);
}

// ---- backward ---------------------------------------------------------------------------------------------
/* A head's keys are a list of positions, ascending: all, or those of some shards. Queries come in blocks that
 * begin at multiples of BACKWARD_ROWS, so dk and dv have the same bits whatever else is in the list. What the
 * list ends with, to fill it up, no query sees.
 *
 * Scores are computed transposed, [keys][queries]: so p and ds are the left factors of dv and dk as they
 * stand, and the statistics of queries lie along vectors. dq is computed transposed too, with ds as the right
 * factor, of which a second copy, in panels, is kept. q_columns, do_columns: panels whose columns are
 * queries; q_panels, do_panels: whose columns are channels.
 */
typedef struct {
    Num *k, *v, *k_transposed;          // [Tp][hsp], [Tp][hsp], [hsp][ldt]
    Num *p, *ds, *ds_panels;            // [Tp][ldq], [Tp][ldq], panels over Tp
    Num *rows, *q_columns, *do_columns; // of the block's queries
    Num *q_panels, *do_panels;          // of the block's queries
    float *dk, *dv;                     // [Tp][hsp]
    int32_t* pos;                       // [Tp], of the keys
    size_t ldt, ldq;
} BackwardScratch;

static size_t backward_scratch(BackwardScratch* w, const Head* h, char* base) {
    w->ldt = h->Tp + 32;
    w->ldq = BACKWARD_ROWS + 16;
    size_t head = h->Tp * h->hsp, block = BACKWARD_ROWS * h->hsp, at = 0;
    struct {
        Num** place;
        size_t nelem;
    } nums[] = {{&w->k, head},
                {&w->v, head},
                {&w->k_transposed, round_up(h->hsp, MR) * w->ldt},
                {&w->p, h->Tp * w->ldq},
                {&w->ds, h->Tp * w->ldq},
                {&w->ds_panels, h->Tp * BACKWARD_ROWS},
                {&w->rows, block},
                {&w->q_columns, block},
                {&w->do_columns, block},
                {&w->q_panels, block},
                {&w->do_panels, block}};
    for (size_t i = 0; i < sizeof nums / sizeof *nums; i++) {
        *nums[i].place = (Num*)(base + at);
        at += round_up(nums[i].nelem * sizeof(Num), 64);
    }
    w->dk = (float*)(base + at);
    w->dv = w->dk + head;
    w->pos = (int32_t*)(w->dv + head);
    return at + 2 * head * sizeof(float) + h->Tp * sizeof(int32_t);
}

// what backward needs of NR queries: lse, and delta = dout . out; queries beyond the last get p = 0
typedef struct {
    Lane lse, delta;
} Stats;

static Stats query_stats(const Head* h, const size_t* rows, size_t nt) {
    Stats st = {lane_all(INFINITY), {0}};
    for (size_t i = 0; i < nt && i < NR; i++) {
        size_t row = rows[i], at = row * h->C + (size_t)h->h * h->hs;
        const floatX *out = h->a->out + at, *dout = h->a->dout + at;
        Lane sum = {0};
        for (size_t d = 0; d < h->hs; d += NR) {
            for (size_t c = 0; c < min_size(NR, h->hs - d); c++) {
                sum[c] += fo_float(out[d + c]) * fo_float(dout[d + c]);
            }
        }
        st.lse[i] = h->a->lse[row * (size_t)h->a->NH + (size_t)h->h];
        st.delta[i] = lanes_sum(sum);
    }
    return st;
}

// p and ds of NR queries, from t0 on, against the first `keys` keys; j is the queries' place in the block
static void backward_scores(const Head* h, const BackwardScratch* w, const Stats* st, size_t t0, size_t j,
                            size_t keys) {
    float scale = 1.0f / sqrtf((float)h->hs);
    IntLane query;
    for (int i = 0; i < NR; i++) {
        query[i] = (int)t0 + i;
    }
    Num* panel = w->ds_panels + j * h->Tp;
    for (size_t k = 0; k < keys; k += MR) {
        Lane score[MR] = {0}, dp[MR] = {0};
        tile(score, w->k + k * h->hsp, h->hsp, w->q_columns + j * h->hsp, h->hsp);
        tile(dp, w->v + k * h->hsp, h->hsp, w->do_columns + j * h->hsp, h->hsp);
        for (size_t r = 0; r < MR; r += 2) {
            Lane ds[2];
            for (size_t i = 0; i < 2; i++) {
                IntLane seen = query >= w->pos[k + r + i];
                Lane p = lane_mask(seen, lane_exp(score[r + i] * scale - st->lse));
                ds[i] = p * (dp[r + i] - st->delta) * scale;
                num_store(w->p + (k + r + i) * w->ldq + j, p);
                num_store(w->ds + (k + r + i) * w->ldq + j, ds[i]);
            }
            panel_store(panel + (k + r) * NR, ds[0], ds[1]);
        }
    }
}

// d [keys][hsp] += left [keys][queries of the block] @ the block's panels
static void add_product(float* d, const Num* left, const Num* panels, const Head* h, size_t ldq,
                        size_t keys) {
    for (size_t k = 0; k < keys; k += MR) {
        for (size_t j = 0; j < h->hs; j += NR) {
            Lane sum[MR];
            for (size_t r = 0; r < MR; r++) {
                sum[r] = lane_load(d + (k + r) * h->hsp + j);
            }
            tile(sum, left + k * ldq, ldq, panels + j * BACKWARD_ROWS, BACKWARD_ROWS);
            for (size_t r = 0; r < MR; r++) {
                memcpy(d + (k + r) * h->hsp + j, &sum[r], sizeof sum[r]);
            }
        }
    }
}

// dq of some channels, from d on, of the queries in `rows`, which are lanes
static void store_dq(const Head* h, const Lane sum[MR], const size_t* rows, size_t d, size_t nt) {
    size_t channels = min_size(MR, h->hs - d);
    for (size_t i = 0; i < nt; i++) {
        size_t at = (size_t)h->h * h->hs + d;
        if (h->a->dq) {
            float* dq = h->a->dq + rows[i] * h->C + at;
            for (size_t r = 0; r < channels; r++) {
                dq[r] += sum[r][i];
            }
        } else {
            floatX* dq = h->a->dqkv + rows[i] * h->width + at;
            for (size_t r = 0; r < channels; r++) {
                dq[r] = fo_floatx(sum[r][i]);
            }
        }
    }
}

// queries t0 ... t0+nt-1, at most BACKWARD_ROWS, and the first nkeys keys: dq, and what they add to dk and dv
static void backward_block(const Head* h, const BackwardScratch* w, size_t t0, size_t nt, size_t nkeys) {
    size_t keys = round_up(nkeys, UNIT), rows[BACKWARD_ROWS] = {0};
    for (size_t i = 0; i < nt; i++) {
        rows[i] = row_of(h, t0 + i);
    }
    load_rows(w->rows, h, 0, t0, nt, BACKWARD_ROWS);
    panels_of_columns(w->q_columns, w->rows, BACKWARD_ROWS, h->hsp);
    panels_of_rows(w->q_panels, w->rows, BACKWARD_ROWS, h->hsp, BACKWARD_ROWS);
    load_rows(w->rows, h, DOUT, t0, nt, BACKWARD_ROWS);
    panels_of_columns(w->do_columns, w->rows, BACKWARD_ROWS, h->hsp);
    panels_of_rows(w->do_panels, w->rows, BACKWARD_ROWS, h->hsp, BACKWARD_ROWS);
    for (size_t j = 0; j < BACKWARD_ROWS; j += NR) {
        Stats st = query_stats(h, rows + j, j < nt ? nt - j : 0);
        backward_scores(h, w, &st, t0 + j, j, keys);
    }
    add_product(w->dv, w->p, w->do_panels, h, w->ldq, keys);
    add_product(w->dk, w->ds, w->q_panels, h, w->ldq, keys);
    for (size_t j = 0; j < nt; j += NR) {
        for (size_t d = 0; d < h->hs; d += MR) {
            Lane sum[MR] = {0};
            tile(sum, w->k_transposed + d * w->ldt, w->ldt, w->ds_panels + j * h->Tp, keys);
            store_dq(h, sum, rows + j, d, min_size(NR, nt - j));
        }
    }
}

// the keys of h in the call's rows, which are whole runs, filled up with some at no position; their number
static size_t load_keys(const Head* h, const BackwardScratch* w) {
    size_t n = 0, run = (size_t)fo_layout_run(h->a->l);
    for (size_t t = 0; t < h->T; t += run) {
        if (row_of(h, t) < h->a->row0 || row_of(h, t) >= h->a->row0 + h->a->n) { continue; }
        load_rows(w->k + n * h->hsp, h, 1, t, run, run);
        load_rows(w->v + n * h->hsp, h, 2, t, run, run);
        for (size_t i = 0; i < run; i++) {
            w->pos[n++] = (int32_t)(t + i);
        }
    }
    size_t padded = round_up(n, UNIT);
    memset(w->k + n * h->hsp, 0, (padded - n) * h->hsp * sizeof *w->k);
    memset(w->v + n * h->hsp, 0, (padded - n) * h->hsp * sizeof *w->v);
    for (size_t i = n; i < padded; i++) {
        w->pos[i] = INT32_MAX;
    }
    for (size_t d = 0; d < round_up(h->hsp, MR); d++) {
        for (size_t i = 0; i < padded; i++) {
            w->k_transposed[d * w->ldt + i] = d < h->hsp ? w->k[i * h->hsp + d] : 0;
        }
    }
    memset(w->dk, 0, padded * h->hsp * sizeof *w->dk);
    memset(w->dv, 0, padded * h->hsp * sizeof *w->dv);
    return n;
}

static void backward_head(const Head* h, char* scratch) {
    BackwardScratch w;
    backward_scratch(&w, h, scratch);
    size_t nkeys = load_keys(h, &w), seen = 0;
    for (size_t t = (size_t)w.pos[0] / BACKWARD_ROWS * BACKWARD_ROWS; t < h->T; t += BACKWARD_ROWS) {
        size_t nt = min_size(BACKWARD_ROWS, h->T - t);
        while (seen < nkeys && (size_t)w.pos[seen] < t + nt) {
            seen++;
        }
        backward_block(h, &w, t, nt, seen);
    }
    for (size_t i = 0; i < nkeys; i++) {
        floatX* dk = h->a->dk + row_of(h, (size_t)w.pos[i]) * h->a->dk_row + (size_t)h->h * h->hs;
        floatX* dv = dk + h->C;
        for (size_t d = 0; d < h->hs; d++) {
            dk[d] = fo_floatx(w.dk[i * h->hsp + d]);
            dv[d] = fo_floatx(w.dv[i * h->hsp + d]);
        }
    }
}

// the (query, key) pairs that one head has with the keys in the call's rows
static double pairs_of_keys(const Args* a) {
    double pairs = 0.0;
    int run = fo_layout_run(a->l), T = a->l.T;
    for (int b = 0; b < a->l.B; b++) {
        for (int t = 0; t < T; t += run) {
            size_t row = fo_layout_row(a->l, b, t);
            if (row < a->row0 || row >= a->row0 + a->n) { continue; }
            pairs += (double)run * ((double)(T - t) - 0.5 * (double)(run - 1));
        }
    }
    return pairs;
}

// of the keys in the call's rows, for all their queries
static void attention_backward_op(FoStream* s, void* args) {
    const Args* a = args;
    BackwardScratch w;
    Head any = head_of(a, 0, 0);
    size_t T = (size_t)a->l.T, NH = (size_t)a->NH;
    size_t b0 = a->l.zigzag ? 0 : a->row0 / T, nheads = (a->l.zigzag ? (size_t)a->l.B : a->n / T) * NH;
    size_t own = round_up(backward_scratch(&w, &any, NULL), 64);
    char* scratch = fo__scratch(s, (size_t)fo_stream_device(s)->nthreads * own);
    PARALLEL_FOR
    for (size_t i = 0; i < nheads; i++) {
        Head h = head_of(a, (int)(b0 + i / NH), (int)(i % NH));
        backward_head(&h, scratch + this_thread() * own);
    }
    fo__pace(s, 2.5 * 4.0 * a->hs * pairs_of_keys(a) * a->NH);
}

// ---- decode -----------------------------------------------------------------------------------------------
typedef struct {
    floatX *out, *cache;
    const floatX* qkv;
    const int* pos;
    FoLayout l; // of what is cached at once
    int B, room, NH, hs;
} CacheArgs;

// keys (part 0) or values (1) of position t of sequence b: NH*hs
static floatX* cache_at(const CacheArgs* a, size_t part, size_t b, size_t t) {
    size_t B = (size_t)a->B, room = (size_t)a->room, C = (size_t)a->NH * (size_t)a->hs;
    return a->cache + ((part * B + b) * room + t) * C;
}

static void attention_cache_op(FoStream* s, void* args) {
    const CacheArgs* a = args;
    size_t T = (size_t)a->l.T, N = (size_t)a->l.B * T, C = (size_t)a->NH * (size_t)a->hs;
    (void)s;
    PARALLEL_ROWS
    for (size_t i = 0; i < N; i++) {
        const floatX* k = a->qkv + fo_layout_row(a->l, (int)(i / T), (int)(i % T)) * 3 * C + C;
        memcpy(cache_at(a, 0, i / T, i % T), k, C * sizeof *k);
        memcpy(cache_at(a, 1, i / T, i % T), k + C, C * sizeof *k);
    }
}

// the first n, at most NR, of x; then zeros
static inline Lane lane_of_floatx(const floatX* x, size_t n) {
    floatX part[NR];
    if (n < NR) { // else a copy of known size, which is a load
        memset(part, 0, sizeof part);
        memcpy(part, x, n * sizeof *part);
        x = part;
    }
#ifdef FO_PRECISION_FP32
    return lane_load(x);
#else
    typedef uint16_t HalfLane __attribute__((vector_size(LANE_NBYTES / 2)));
    HalfLane bits;
    memcpy(&bits, x, sizeof bits);
    return (Lane)(__builtin_convertvector(bits, BitLane) << 16);
#endif
}

enum { AHEAD = 16 }; // rows of a head are too far apart for the processor to fetch ahead by itself

// scores of the keys 0 ... t, unscaled; q is filled up with zeros
static void decode_scores(const CacheArgs* a, size_t b, size_t h, const float* q, float* scores, size_t t) {
    size_t hs = (size_t)a->hs, C = (size_t)a->NH * hs;
    for (size_t k = 0; k <= t; k++) {
        const floatX* key = cache_at(a, 0, b, k) + h * hs;
        Lane sum = {0};
        for (size_t d = 0; d < hs; d += NR) {
            __builtin_prefetch(key + AHEAD * C + d);
            sum += lane_load(q + d) * lane_of_floatx(key + d, hs - d);
        }
        scores[k] = lanes_sum(sum);
    }
}

// out, of round_up(hs, NR), += p @ values
static void decode_values(const CacheArgs* a, size_t b, size_t h, const Num* p, float* out, size_t t) {
    size_t hs = (size_t)a->hs, C = (size_t)a->NH * hs;
    for (size_t k = 0; k <= t; k++) {
        const floatX* value = cache_at(a, 1, b, k) + h * hs;
        float weight = float_of_num(p[k]);
        for (size_t d = 0; d < hs; d += NR) {
            __builtin_prefetch(value + AHEAD * C + d);
            Lane sum = lane_load(out + d) + lane_of_floatx(value + d, hs - d) * weight;
            memcpy(out + d, &sum, sizeof sum);
        }
    }
}

static size_t decode_scratch(const CacheArgs* a) { // scores and p, then q and out
    size_t keys = round_up((size_t)a->room, NR), hs = round_up((size_t)a->hs, NR);
    return (2 * keys + 2 * hs) * sizeof(float);
}

// one head of one sequence, whose new key and value are in the cache. p is rounded as in the forward pass
static void decode_head(const CacheArgs* a, size_t b, size_t h, char* scratch) {
    size_t keys = round_up((size_t)a->room, NR), hs = (size_t)a->hs, hsp = round_up(hs, NR);
    size_t C = (size_t)a->NH * hs, t = (size_t)a->pos[b];
    float *scores = (float*)scratch, *q = scores + 2 * keys, *sums = q + hsp, max;
    Num* p = (Num*)(scores + keys);
    memset(q, 0, 2 * hsp * sizeof *q); // sums too
    for (size_t d = 0; d < hs; d++) {
        q[d] = fo_float(a->qkv[b * 3 * C + h * hs + d]);
    }
    decode_scores(a, b, h, q, scores, t);
    float inverse = 1.0f / softmax_row(p, scores, t, 0, 1.0f / sqrtf((float)hs), &max);
    decode_values(a, b, h, p, sums, t);
    for (size_t d = 0; d < hs; d++) {
        a->out[b * C + h * hs + d] = fo_floatx(sums[d] * inverse);
    }
}

static void attention_decode_op(FoStream* s, void* args) {
    const CacheArgs* a = args;
    size_t B = (size_t)a->B, NH = (size_t)a->NH, C = NH * (size_t)a->hs, own = decode_scratch(a);
    char* scratch = fo__scratch(s, (size_t)fo_stream_device(s)->nthreads * own);
    double pairs = 0.0;
    for (size_t b = 0; b < B; b++) {
        fo_require(a->pos[b] < a->room, "position %d of sequence %zu, the cache has room for %d", a->pos[b],
                   b, a->room);
        if (a->pos[b] < 0) {
            memset(a->out + b * C, 0, C * sizeof *a->out);
            continue;
        }
        memcpy(cache_at(a, 0, b, (size_t)a->pos[b]), a->qkv + b * 3 * C + C, C * sizeof *a->qkv);
        memcpy(cache_at(a, 1, b, (size_t)a->pos[b]), a->qkv + b * 3 * C + 2 * C, C * sizeof *a->qkv);
        pairs += (double)(a->pos[b] + 1) * (double)NH;
    }
    PARALLEL_FOR
    for (size_t i = 0; i < B * NH; i++) {
        if (a->pos[i / NH] >= 0) { decode_head(a, i / NH, i % NH, scratch + this_thread() * own); }
    }
    fo__pace(s, 4.0 * a->hs * pairs);
}

// ---- fo_ops.h ---------------------------------------------------------------------------------------------
static void check_shape(size_t row0, size_t n, FoLayout l, int NH, int hs) {
    fo_require(NH > 0 && hs > 0 && l.B > 0 && l.T > 0, "B=%d T=%d NH=%d hs=%d, want all above 0", l.B, l.T,
               NH, hs);
    fo_require(!l.zigzag || (l.P > 0 && l.T % (2 * l.P) == 0), "T=%d is not a multiple of 2P, P=%d", l.T,
               l.P);
    fo_require(row0 + n <= (size_t)l.B * (size_t)l.T, "rows %zu to %zu of %zu", row0, row0 + n,
               (size_t)l.B * (size_t)l.T);
}

void fo_attention_forward(floatX* out, float* lse, const floatX* qkv, size_t row0, size_t n, FoLayout l,
                          int NH, int hs, FoStream* s) {
    check_shape(row0, n, l, NH, hs);
    Args a = {.out = out, .lse = lse, .qkv = qkv, .row0 = row0, .n = n, .l = l, .NH = NH, .hs = hs};
    if (n > 0) { fo__enqueue(s, attention_forward_op, &a, sizeof a); }
}

void fo_attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                           const float* lse, size_t row0, size_t n, FoLayout l, int NH, int hs, FoStream* s) {
    check_shape(row0, n, l, NH, hs);
    size_t T = (size_t)l.T;
    fo_require(l.zigzag ? row0 == 0 && n == (size_t)l.B * T : row0 % T == 0 && n % T == 0,
               "rows %zu to %zu are not whole sequences of %zu", row0, row0 + n, T);
    Args a = {.dqkv = dqkv, .dout = dout, .qkv = qkv, .row0 = row0, .n = n, .l = l, .NH = NH, .hs = hs};
    a.out = (floatX*)out; // read only
    a.lse = (float*)lse;
    a.dk_row = 3 * (size_t)NH * (size_t)hs;
    a.dk = dqkv + a.dk_row / 3;
    if (n > 0) { fo__enqueue(s, attention_backward_op, &a, sizeof a); }
}

void fo_attention_backward_kv(float* dq, floatX* dkv, const floatX* dout, const floatX* qkv,
                              const floatX* out, const float* lse, size_t row0, size_t n, FoLayout l, int NH,
                              int hs, FoStream* s) {
    check_shape(row0, n, l, NH, hs);
    size_t shard = l.zigzag ? (size_t)l.B * (size_t)(l.T / l.P) : (size_t)l.T;
    fo_require(row0 % shard == 0 && n % shard == 0, "rows %zu to %zu are not whole %s of %zu", row0, row0 + n,
               l.zigzag ? "shards" : "sequences", shard);
    Args a = {.dq = dq, .dk = dkv, .dout = dout, .qkv = qkv, .row0 = row0, .n = n, .l = l, .NH = NH};
    a.hs = hs;
    a.out = (floatX*)out; // read only
    a.lse = (float*)lse;
    a.dk_row = 2 * (size_t)NH * (size_t)hs;
    if (n > 0) { fo__enqueue(s, attention_backward_op, &a, sizeof a); }
}

static void check_cache(int B, int room, int NH, int hs) {
    fo_require(B > 0 && room > 0 && NH > 0 && hs > 0, "B=%d room=%d NH=%d hs=%d, want all above 0", B, room,
               NH, hs);
}

void fo_attention_cache(floatX* cache, const floatX* qkv, FoLayout l, int room, int NH, int hs, FoStream* s) {
    check_shape(0, 0, l, NH, hs);
    check_cache(l.B, room, NH, hs);
    fo_require(l.T <= room, "T=%d, the cache has room for %d", l.T, room);
    CacheArgs a = {.cache = cache, .qkv = qkv, .l = l, .B = l.B, .room = room, .NH = NH, .hs = hs};
    fo__enqueue(s, attention_cache_op, &a, sizeof a);
}

void fo_attention_decode(floatX* out, floatX* cache, const floatX* qkv, const int* pos, int B, int room,
                         int NH, int hs, FoStream* s) {
    check_cache(B, room, NH, hs);
    CacheArgs a = {.out = out, .cache = cache, .qkv = qkv, .pos = pos, .B = B, .room = room, .NH = NH};
    a.hs = hs;
    fo__enqueue(s, attention_decode_op, &a, sizeof a);
}
