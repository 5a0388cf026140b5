/* checkpoint.c -- model, state and debug files. See checkpoint.h; formats in doc/formats.md.
 *
 * A whole tensor never exists in memory: files are read and written in blocks of whole rows. Of a block a
 * rank holds rows that lie side by side in its arena, since its rows are in the order of the file
 * (TensorPart).
 */
#include "train/checkpoint.h"
#include "data/dataloader.h"     // data_file_kind
#include "flashoverlap/fo_ops.h" // FO_MAX_RANKS
#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define MODEL_MAGIC   20240326
#define STATE_MAGIC   20261129
#define STATE_VERSION 1
#define DEBUG_MAGIC   20240327
#define DEBUG_VERSION 2
#define HEADER_WORDS  256
#define HEADER_NBYTES (HEADER_WORDS * sizeof(int32_t))
#define BLOCK_NBYTES  ((size_t)4 << 20) // of rows in flight; one row if it is longer

static size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

static void* allocate(size_t nbytes) {
    void* p = malloc(nbytes ? nbytes : 1);
    fo_require(p, "no memory for %zu bytes of a checkpoint", nbytes);
    return p;
}

// ---- sizes ------------------------------------------------------------------------------------------------
int config_check(const GPTConfig* c, char err[TRAIN_ERR]) {
    const struct {
        const char* name;
        int value, most;
    } sizes[] = {{"maxT", c->maxT, 1 << 20},
                 {"V", c->V, 1 << 24},
                 {"L", c->L, 1024},
                 {"NH", c->NH, 1024},
                 {"C", c->C, 1 << 16}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value < 1 || sizes[i].value > sizes[i].most) {
            return train_error(err, "%s=%d, want 1 to %d", sizes[i].name, sizes[i].value, sizes[i].most);
        }
    }
    if (c->C % c->NH != 0) {
        return train_error(err, "C=%d is not a multiple of NH=%d (a head has C/NH channels)", c->C, c->NH);
    }
    if (c->Vp != config_padded(c->V)) {
        return train_error(err, "Vp=%d, want %d: V=%d rounded up to a multiple of 128", c->Vp,
                           config_padded(c->V), c->V);
    }
    return 0;
}

static size_t ntotal_of(const GPTConfig* c) {
    Tensors ts;
    tensors_init(&ts, *c, 1, 0);
    return ts.ntotal;
}

// words [w, w+6) of a header
static GPTConfig config_of(const int32_t* w) {
    GPTConfig c = {.maxT = w[0], .V = w[1], .L = w[2], .NH = w[3], .C = w[4], .Vp = w[5]};
    return c;
}

static void config_put(int32_t* w, const GPTConfig* c) {
    const int32_t words[6] = {c->maxT, c->V, c->L, c->NH, c->C, c->Vp};
    memcpy(w, words, sizeof words);
}

// ---- reading ----------------------------------------------------------------------------------------------
typedef struct {
    FILE* f;
    const char* path;
    uint64_t nbytes;
    int32_t header[HEADER_WORDS];
} In;

static int in_fail(In* in, char err[TRAIN_ERR], const char* fmt, ...) __attribute__((format(printf, 3, 4)));

// closes the file; err becomes "PATH: ..."
static int in_fail(In* in, char err[TRAIN_ERR], const char* fmt, ...) {
    char what[TRAIN_ERR];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    if (in->f) { fclose(in->f); }
    in->f = NULL;
    return train_error(err, "%s: %s", in->path, what);
}

static int in_read(In* in, uint64_t at, void* to, size_t nbytes, char err[TRAIN_ERR]) {
    errno = 0;
    if (fseeko(in->f, (off_t)at, SEEK_SET) == 0 && fread(to, 1, nbytes, in->f) == nbytes) { return 0; }
    return in_fail(in, err, "cannot be read at byte %llu: %s", (unsigned long long)at,
                   errno ? strerror(errno) : "the file has become shorter");
}

// opens a file of a kind (in words) and reads its header, of which magic and version are checked
static int in_open(In* in, const char* path, const char* kind, int magic, char err[TRAIN_ERR]) {
    struct stat info;
    in->path = path;
    in->f = NULL;
    if (stat(path, &info) != 0) { return in_fail(in, err, "%s; want %s", strerror(errno), kind); }
    if (!S_ISREG(info.st_mode)) { return in_fail(in, err, "is not a regular file; want %s", kind); }
    in->f = fopen(path, "rb");
    if (!in->f) { return in_fail(in, err, "cannot be opened: %s", strerror(errno)); }
    in->nbytes = (uint64_t)info.st_size;
    if (in->nbytes == 0) { return in_fail(in, err, "is empty; want %s", kind); }
    memset(in->header, 0, sizeof in->header);
    if (in_read(in, 0, in->header, (size_t)min_size((size_t)in->nbytes, HEADER_NBYTES), err) != 0) {
        return -1;
    }
    if (in->header[0] != magic) {
        const char* is = data_file_kind(in->header, min_size((size_t)in->nbytes, HEADER_NBYTES));
        if (is) { return in_fail(in, err, "is %s; want %s", is, kind); }
        if ((int32_t)__builtin_bswap32((uint32_t)in->header[0]) == magic) {
            return in_fail(in, err, "is %s of a big-endian machine; want little-endian numbers", kind);
        }
        return in_fail(in, err, "begins with the number %d; %s begins with %d", in->header[0], kind, magic);
    }
    if (in->nbytes < HEADER_NBYTES) {
        return in_fail(in, err, "is truncated: %llu bytes, the header alone has %zu",
                       (unsigned long long)in->nbytes, HEADER_NBYTES);
    }
    return 0;
}

static int in_check_nbytes(In* in, uint64_t want, const char* why, char err[TRAIN_ERR]) {
    if (in->nbytes == want) { return 0; }
    return in_fail(in, err, "has %llu bytes, but %s need %llu: it is %s", (unsigned long long)in->nbytes, why,
                   (unsigned long long)want, in->nbytes < want ? "truncated" : "too long");
}

// a: the file's
static int config_same(In* in, const GPTConfig* a, const GPTConfig* b, char err[TRAIN_ERR]) {
    if (a->maxT == b->maxT && a->V == b->V && a->L == b->L && a->NH == b->NH && a->C == b->C) { return 0; }
    return in_fail(in, err,
                   "is of L=%d,C=%d,NH=%d,V=%d,maxT=%d, but the model is L=%d,C=%d,NH=%d,V=%d,maxT=%d", a->L,
                   a->C, a->NH, a->V, a->maxT, b->L, b->C, b->NH, b->V, b->maxT);
}

static int model_open(In* in, const char* path, GPTConfig* c, int* version, char err[TRAIN_ERR]) {
    char why[TRAIN_ERR];
    if (in_open(in, path, "a model checkpoint", MODEL_MAGIC, err) != 0) { return -1; }
    *version = in->header[1];
    *c = config_of(in->header + 2);
    if (*version == 1 || *version == 2 || *version == 4) {
        return in_fail(in, err,
                       "is of the old version %d, without padded vocabulary; want 3 (fp32) or 5 (bf16)",
                       *version);
    }
    if (*version != 3 && *version != 5) {
        return in_fail(in, err, "is of version %d; want 3 (fp32) or 5 (bf16)", *version);
    }
    if (config_check(c, why) != 0) { return in_fail(in, err, "header is damaged: %s", why); }
    const uint64_t nparams = ntotal_of(c);
    (void)snprintf(why, sizeof why, "%llu parameters in %s", (unsigned long long)nparams,
                   *version == 3 ? "fp32" : "bf16");
    return in_check_nbytes(in, HEADER_NBYTES + nparams * (*version == 3 ? 4 : 2), why, err);
}

int checkpoint_read_header(const char* path, GPTConfig* c, int* version, char err[TRAIN_ERR]) {
    In in;
    if (model_open(&in, path, c, version, err) != 0) { return -1; }
    fclose(in.f);
    return 0;
}

// ---- blocks of rows ---------------------------------------------------------------------------------------
// rows [row, row + n) of one layer of a tensor; `before` elements of the file's arrays stand before them
typedef struct {
    int tensor;
    size_t layer, row, n;
    uint64_t before;
} Block;

// what a rank holds of a block: rows [k0, k1) of its part, side by side in its arena from element `offset` on
typedef struct {
    TensorPart part;
    size_t k0, k1, nelem, offset;
} Piece;

// the next block in the order of files, after {0}; 0 when there is none
static int block_next(Block* b, const Tensors* ts, size_t nbytes) {
    b->before += (uint64_t)b->n * ts->t[b->tensor].cols;
    b->row += b->n;
    if (b->row == ts->t[b->tensor].rows) {
        b->row = 0;
        b->layer++;
    }
    if (b->layer == (size_t)ts->t[b->tensor].layers) {
        b->layer = 0;
        b->tensor++;
    }
    if (b->tensor == NTENSORS) { return 0; }
    const Tensor* t = &ts->t[b->tensor];
    const size_t most = BLOCK_NBYTES / (t->cols * nbytes);
    b->n = min_size(most ? most : 1, t->rows - b->row);
    return 1;
}

static size_t block_nelem(const Tensors* ts, const Block* b) {
    return b->n * ts->t[b->tensor].cols;
}

// elements of the largest block of any tensor
static size_t block_most(const Tensors* ts, size_t nbytes) {
    size_t most = 0;
    for (Block b = {0}; block_next(&b, ts, nbytes);) {
        most = block_nelem(ts, &b) > most ? block_nelem(ts, &b) : most;
    }
    return most;
}

// rows of a part before row `row` of the whole tensor
static size_t rows_before(TensorPart p, size_t row) {
    size_t n = 0;
    for (size_t run = 0; run < p.nruns; run++) {
        const size_t first = run * p.stride + p.row0;
        n += row <= first ? 0 : min_size(row - first, p.nrows);
    }
    return n;
}

static Piece piece_of(const Tensors* ts, const Block* b, int r) {
    Piece p = {.part = tensor_part(ts, b->tensor, r)};
    p.k0 = rows_before(p.part, b->row);
    p.k1 = rows_before(p.part, b->row + b->n);
    p.nelem = (p.k1 - p.k0) * p.part.ncols;
    if (r == ts->r) {
        const Tensor* t = &ts->t[b->tensor];
        p.offset = t->offset + b->layer * tensor_local(t) + p.k0 * p.part.ncols;
    }
    return p;
}

// copies a piece's rows out of the block of whole rows, or back into it
static void piece_copy(char* block, char* rows, const Tensors* ts, const Block* b, const Piece* p,
                       size_t nbytes, int out) {
    const size_t cols = ts->t[b->tensor].cols, row_nbytes = p->part.ncols * nbytes;
    if (p->nelem == 0) { return; }
    for (size_t k = p->k0; k < p->k1; k++) {
        const size_t row = k / p->part.nrows * p->part.stride + p->part.row0 + k % p->part.nrows;
        char* at = block + ((row - b->row) * cols + p->part.col0) * nbytes;
        memcpy(out ? rows : at, out ? at : rows, row_nbytes);
        rows += row_nbytes;
    }
}

/* read_arena -- this rank's part of the whole tensors that begin at byte `at`, elements of `type` -> fp32.
 *
 * s NULL: local is host memory. Otherwise it is the device's, and the values have arrived when this returns.
 */
static int read_arena(In* in, uint64_t at, FoDtype type, const Tensors* ts, float* local, FoStream* s,
                      char err[TRAIN_ERR]) {
    const size_t nbytes = fo_dtype_nbytes(type), most = block_most(ts, nbytes);
    char* block = (char*)allocate(most * nbytes);
    float* values = (float*)allocate(most * sizeof(float));
    int rc = 0;
    for (Block b = {0}; rc == 0 && block_next(&b, ts, nbytes);) {
        const Piece p = piece_of(ts, &b, ts->r);
        if (p.nelem == 0) { continue; } // another rank's
        rc = in_read(in, at + b.before * nbytes, block, block_nelem(ts, &b) * nbytes, err);
        if (rc != 0) { break; }
        piece_copy(block, (char*)values, ts, &b, &p, nbytes, 1);
        // widened from the end, where nothing is overwritten that is still to be read
        for (size_t j = p.nelem; type == FO_BF16 && j-- > 0;) {
            FoBf16 x;
            memcpy(&x, (char*)values + j * sizeof x, sizeof x);
            values[j] = fo_bf16_to_float(x);
        }
        if (s) {
            fo_upload(local + p.offset, values, p.nelem * sizeof(float), s);
            fo_stream_sync(s); // values has been read | the next block
        } else {
            memcpy(local + p.offset, values, p.nelem * sizeof(float));
        }
    }
    free(values);
    free(block);
    return rc;
}

int checkpoint_read_model(const char* path, const Tensors* ts, float* local, FoStream* s,
                          char err[TRAIN_ERR]) {
    In in;
    GPTConfig c;
    int version;
    if (model_open(&in, path, &c, &version, err) != 0) { return -1; }
    if (s) {
        fo_zero(local, ts->nelem * sizeof(float), s);
    } else {
        memset(local, 0, ts->nelem * sizeof(float));
    }
    if (config_same(&in, &c, &ts->config, err) != 0) { return -1; }
    if (read_arena(&in, HEADER_NBYTES, version == 3 ? FO_FP32 : FO_BF16, ts, local, s, err) != 0) {
        return -1;
    }
    fclose(in.f);
    return 0;
}

// ---- writing ----------------------------------------------------------------------------------------------
// A file under way, on rank 0 alone. After the first failure nothing more is written, and err says why.
typedef struct {
    FILE* f; // NULL: failed, or another rank
    const char* path;
    char tmp[CHECKPOINT_PATH + 4];
    char err[TRAIN_ERR];
    int failed;
} Out;

static void out_fail(Out* out, const char* what) {
    (void)train_error(out->err, "%s: %s: %s", out->path, what, strerror(errno));
    out->failed = 1;
    if (out->f) {
        fclose(out->f);
        (void)unlink(out->tmp);
    }
    out->f = NULL;
}

static void out_open(Out* out, const char* path) {
    memset(out, 0, sizeof *out);
    out->path = path;
    if (snprintf(out->tmp, sizeof out->tmp, "%s.tmp", path) >= (int)sizeof out->tmp) {
        errno = ENAMETOOLONG;
        out_fail(out, "cannot be written");
        return;
    }
    out->f = fopen(out->tmp, "wb");
    if (!out->f) { out_fail(out, "cannot be created"); }
}

static void out_write(Out* out, const void* from, size_t nbytes) {
    if (out->f && nbytes > 0 && fwrite(from, 1, nbytes, out->f) != nbytes) {
        out_fail(out, "cannot be written");
    }
}

// every byte on disk, then the file gets its name
static void out_close(Out* out) {
    if (!out->f) { return; }
    if (fflush(out->f) != 0 || fsync(fileno(out->f)) != 0) {
        out_fail(out, "cannot be written");
        return;
    }
    FILE* f = out->f;
    out->f = NULL;
    if (fclose(f) != 0 || rename(out->tmp, out->path) != 0) {
        out_fail(out, "cannot be written");
        (void)unlink(out->tmp);
    }
}

// all ranks learn how rank 0 fared; returns 0, or -1 with its err
static int out_agree(const Out* out, FoGroup* g, FoStream* s, char err[TRAIN_ERR]) {
    struct {
        int failed;
        char err[TRAIN_ERR];
    } mine = {0}, first;
    const int P = fo_group_size(g), r = fo_group_rank(g);
    if (r == 0) {
        mine.failed = out->failed;
        memcpy(mine.err, out->err, sizeof mine.err);
    }
    char* all = (char*)fo_malloc(fo_stream_device(s), (size_t)P * sizeof mine);
    fo_upload(all + (size_t)r * sizeof mine, &mine, sizeof mine, s);
    fo_allgather(g, all, sizeof mine, s);
    fo_download(&first, all, sizeof first, s);
    fo_stream_sync(s);
    fo_free(fo_stream_device(s), all);
    return first.failed ? train_error(err, "%s", first.err) : 0;
}

/* write_arena -- all ranks' arenas, device memory, elements of nbytes -> whole tensors, written by rank 0.
 *
 * Ranks go through the blocks together; each sends what it holds of a block to rank 0. If writing fails they
 * go on to the end all the same: that is the one place where all of them can learn it (out_agree).
 */
static void write_arena(Out* out, const Tensors* ts, const void* arena, size_t nbytes, FoGroup* g,
                        FoStream* s) {
    const int P = ts->P, r = ts->r;
    const size_t most = r == 0 ? block_most(ts, nbytes) : 0;
    FoDevice* d = fo_stream_device(s);
    char* block = (char*)allocate(most * nbytes);
    char* rows = (char*)allocate(most * nbytes);
    char* received = r == 0 ? (char*)fo_malloc(d, most * nbytes) : NULL;
    for (Block b = {0}; block_next(&b, ts, nbytes);) {
        const int nranks = ts->t[b.tensor].cut == CUT_NONE ? 1 : P; // replicated: rank 0's will do
        const Piece own = piece_of(ts, &b, r);
        const char* mine = (const char*)arena + own.offset * nbytes;
        if (r != 0) {
            if (nranks > 1 && own.nelem > 0) {
                fo_comm_begin(g, s);
                fo_send(g, mine, own.nelem * nbytes, 0);
                fo_comm_end(g);
                fo_stream_sync(s); // so that no more than one is queued
            }
            continue;
        }
        Piece pieces[FO_MAX_RANKS];
        size_t at = 0; // of the piece in rows and received
        for (int k = 0; k < nranks; k++) {
            pieces[k] = piece_of(ts, &b, k);
        }
        fo_download(rows, mine, own.nelem * nbytes, s);
        if (nranks > 1) {
            fo_comm_begin(g, s);
            at = own.nelem * nbytes;
            for (int k = 1; k < nranks; k++) {
                if (pieces[k].nelem > 0) { fo_recv(g, received + at, pieces[k].nelem * nbytes, k); }
                at += pieces[k].nelem * nbytes;
            }
            fo_comm_end(g);
            fo_download(rows + own.nelem * nbytes, received + own.nelem * nbytes, at - own.nelem * nbytes, s);
        }
        fo_stream_sync(s);
        at = 0;
        for (int k = 0; k < nranks; k++) {
            piece_copy(block, rows + at, ts, &b, &pieces[k], nbytes, 0);
            at += pieces[k].nelem * nbytes;
        }
        out_write(out, block, block_nelem(ts, &b) * nbytes);
    }
    free(block);
    free(rows);
    if (received) { fo_free(d, received); }
}

int checkpoint_write_model(const char* path, const Tensors* ts, const floatX* params, FoGroup* g,
                           FoStream* comm, char err[TRAIN_ERR]) {
    Out out = {0};
    int32_t header[HEADER_WORDS] = {MODEL_MAGIC, FO_FLOATX == FO_BF16 ? 5 : 3};
    config_put(header + 2, &ts->config);
    if (ts->r == 0) { out_open(&out, path); }
    out_write(&out, header, sizeof header);
    write_arena(&out, ts, params, sizeof(floatX), g, comm);
    out_close(&out);
    return out_agree(&out, g, comm, err);
}

// ---- optimizer state --------------------------------------------------------------------------------------
// words of the header; two-word ones are uint64
enum { W_STEP = 2, W_CONFIG = 3, W_LOADER = 14, W_TRAINER = 16 };

static void put_u64(int32_t* w, uint64_t x) {
    memcpy(w, &x, sizeof x);
}

static uint64_t get_u64(const int32_t* w) {
    uint64_t x;
    memcpy(&x, w, sizeof x);
    return x;
}

int checkpoint_write_state(const char* path, const Tensors* ts, const CheckpointState* st, const float* m,
                           const float* v, const float* master, FoGroup* g, FoStream* comm,
                           char err[TRAIN_ERR]) {
    Out out = {0};
    int32_t header[HEADER_WORDS] = {STATE_MAGIC, STATE_VERSION, st->step};
    config_put(header + W_CONFIG, &ts->config);
    put_u64(header + W_LOADER, st->loader_nbytes);
    put_u64(header + W_TRAINER, st->trainer_nbytes);
    if (ts->r == 0) { out_open(&out, path); }
    out_write(&out, header, sizeof header);
    out_write(&out, st->loader, st->loader_nbytes);
    out_write(&out, st->trainer, st->trainer_nbytes);
    write_arena(&out, ts, m, sizeof(float), g, comm);
    write_arena(&out, ts, v, sizeof(float), g, comm);
    write_arena(&out, ts, master, sizeof(float), g, comm);
    out_close(&out);
    return out_agree(&out, g, comm, err);
}

// opens a state file and checks all but the arrays; st has no blobs yet
static int state_open(In* in, const char* path, GPTConfig* c, CheckpointState* st, char err[TRAIN_ERR]) {
    char why[TRAIN_ERR];
    if (in_open(in, path, "a state file of this program", STATE_MAGIC, err) != 0) { return -1; }
    const int32_t* w = in->header;
    if (w[1] != STATE_VERSION) { return in_fail(in, err, "is of version %d; want %d", w[1], STATE_VERSION); }
    *c = config_of(w + W_CONFIG);
    if (config_check(c, why) != 0) { return in_fail(in, err, "header is damaged: %s", why); }
    const uint64_t loader = get_u64(w + W_LOADER), trainer = get_u64(w + W_TRAINER);
    if (w[W_STEP] < 0 || loader > in->nbytes || trainer > in->nbytes) {
        return in_fail(in, err, "header is damaged: step %d, %llu and %llu bytes of loader and trainer state",
                       w[W_STEP], (unsigned long long)loader, (unsigned long long)trainer);
    }
    st->step = w[W_STEP];
    st->loader_nbytes = (size_t)loader;
    st->trainer_nbytes = (size_t)trainer;
    const uint64_t nparams = ntotal_of(c);
    (void)snprintf(why, sizeof why, "m, v and master of %llu parameters", (unsigned long long)nparams);
    return in_check_nbytes(in, HEADER_NBYTES + loader + trainer + 3 * sizeof(float) * nparams, why, err);
}

int checkpoint_read_state(const char* path, const Tensors* ts, CheckpointState* st, float* m, float* v,
                          float* master, FoStream* s, char err[TRAIN_ERR]) {
    In in;
    GPTConfig c;
    float* const arenas[3] = {m, v, master};
    memset(st, 0, sizeof *st);
    if (state_open(&in, path, &c, st, err) != 0 || config_same(&in, &c, &ts->config, err) != 0) { return -1; }
    st->loader = allocate(st->loader_nbytes);
    st->trainer = allocate(st->trainer_nbytes);
    uint64_t at = HEADER_NBYTES;
    if (in_read(&in, at, st->loader, st->loader_nbytes, err) != 0) { return -1; }
    at += st->loader_nbytes;
    if (in_read(&in, at, st->trainer, st->trainer_nbytes, err) != 0) { return -1; }
    at += st->trainer_nbytes;
    for (int i = 0; i < 3; i++) {
        fo_zero(arenas[i], ts->nelem * sizeof(float), s);
        if (read_arena(&in, at, FO_FP32, ts, arenas[i], s, err) != 0) { return -1; }
        at += (uint64_t)ts->ntotal * sizeof(float);
    }
    fo_stream_sync(s);
    fclose(in.f);
    return 0;
}

void checkpoint_state_free(CheckpointState* st) {
    free(st->loader);
    free(st->trainer);
    memset(st, 0, sizeof *st);
}

// ---- output folder ----------------------------------------------------------------------------------------
int checkpoint_prepare_folder(const char* dir, char err[TRAIN_ERR]) {
    char probe[CHECKPOINT_PATH];
    const size_t most = CHECKPOINT_PATH - 32; // the longest of our names and ".tmp" must fit behind it
    struct stat info;
    if (strlen(dir) > most) {
        return train_error(err, "output folder's name has %zu characters; at most %zu are possible",
                           strlen(dir), most);
    }
    if (mkdir(dir, 0755) != 0 && errno != EEXIST) {
        return train_error(err, "output folder %s: cannot be made: %s%s", dir, strerror(errno),
                           errno == ENOENT ? " (the folder around it is missing: mkdir -p makes both)" : "");
    }
    if (stat(dir, &info) == 0 && !S_ISDIR(info.st_mode)) {
        return train_error(err, "output folder %s: is not a folder", dir);
    }
    (void)snprintf(probe, sizeof probe, "%s/.writable-XXXXXX", dir);
    int fd = mkstemp(probe);
    if (fd < 0) {
        return train_error(err, "output folder %s: no file can be made in it: %s", dir, strerror(errno));
    }
    close(fd);
    (void)unlink(probe);
    return 0;
}

void checkpoint_path(char path[CHECKPOINT_PATH], const char* dir, const char* kind, int step) {
    (void)snprintf(path, CHECKPOINT_PATH, "%s/%s_%08d.bin", dir, kind, step);
}

void checkpoint_done_path(char path[CHECKPOINT_PATH], const char* dir, int step) {
    (void)snprintf(path, CHECKPOINT_PATH, "%s/DONE_%08d", dir, step);
}

int checkpoint_write_done(const char* dir, int step, char err[TRAIN_ERR]) {
    char path[CHECKPOINT_PATH];
    checkpoint_done_path(path, dir, step);
    FILE* f = fopen(path, "wb");
    if (!f || fclose(f) != 0) { return train_error(err, "%s: cannot be made: %s", path, strerror(errno)); }
    return 0;
}

static int newest_first(const void* a, const void* b) {
    const int x = *(const int*)a, y = *(const int*)b;
    return (x < y) - (x > y);
}

// steps that have a DONE file, the newest first; returns their number, or -1; the caller frees *steps
static int done_steps(const char* dir, int** steps, char err[TRAIN_ERR]) {
    size_t n = 0, room = 0;
    *steps = NULL;
    DIR* d = opendir(dir);
    if (!d) { return train_error(err, "output folder %s: cannot be read: %s", dir, strerror(errno)); }
    for (struct dirent* e; (e = readdir(d)) != NULL;) {
        char again[32];
        int step;
        if (sscanf(e->d_name, "DONE_%d", &step) != 1 || step < 0) { continue; }
        (void)snprintf(again, sizeof again, "DONE_%08d", step);
        if (strcmp(again, e->d_name) != 0) { continue; } // somebody else's
        if (n == room) {
            room = room ? 2 * room : 16;
            *steps = (int*)realloc(*steps, room * sizeof(int));
            fo_require(*steps, "no memory for %zu steps", room);
        }
        (*steps)[n++] = step;
    }
    closedir(d);
    if (n > 0) { qsort(*steps, n, sizeof(int), newest_first); }
    return (int)n;
}

// are both files of a step there, sound, of the same model?
static int step_is_sound(const char* dir, int step, char err[TRAIN_ERR]) {
    char path[CHECKPOINT_PATH];
    In in;
    GPTConfig model, state;
    CheckpointState st;
    int version;
    checkpoint_path(path, dir, "model", step);
    if (checkpoint_read_header(path, &model, &version, err) != 0) { return 0; }
    checkpoint_path(path, dir, "state", step);
    if (state_open(&in, path, &state, &st, err) != 0 || config_same(&in, &state, &model, err) != 0) {
        return 0;
    }
    if (st.step != step) { return in_fail(&in, err, "is of step %d", st.step) == 0; }
    fclose(in.f);
    return 1;
}

int checkpoint_find(const char* dir, char err[TRAIN_ERR]) {
    char why[TRAIN_ERR];
    int* steps;
    int found = -1;
    err[0] = 0;
    const int n = done_steps(dir, &steps, err);
    for (int i = 0; i < n && found < 0; i++) {
        if (step_is_sound(dir, steps[i], why)) {
            found = steps[i];
        } else if (err[0] == 0) {
            (void)train_error(err, "checkpoint of step %d passed over: %s", steps[i], why);
        }
    }
    free(steps);
    return found;
}

static int remove_file(const char* path, char err[TRAIN_ERR]) {
    if (unlink(path) == 0 || errno == ENOENT) { return 0; }
    return train_error(err, "%s: cannot be deleted: %s", path, strerror(errno));
}

int checkpoint_remove(const char* dir, int step, char err[TRAIN_ERR]) {
    char path[CHECKPOINT_PATH];
    checkpoint_done_path(path, dir, step); // first, so that no half checkpoint ever looks complete
    int rc = remove_file(path, err);
    checkpoint_path(path, dir, "model", step);
    rc = rc ? rc : remove_file(path, err);
    checkpoint_path(path, dir, "state", step);
    return rc ? rc : remove_file(path, err);
}

int checkpoint_prune(const char* dir, int step, int keep, int major, char err[TRAIN_ERR]) {
    int* steps;
    int rc = 0, nkept = 0;
    if (keep <= 0) { return 0; }
    const int n = done_steps(dir, &steps, err);
    for (int i = 0; i < n && rc == 0; i++) {
        if (steps[i] > step) { continue; } // of an earlier run that came further
        if (nkept < keep || (major > 0 && steps[i] % major == 0)) {
            nkept++;
            continue;
        }
        rc = checkpoint_remove(dir, steps[i], err);
    }
    free(steps);
    return n < 0 ? -1 : rc;
}

// ---- debug state ------------------------------------------------------------------------------------------
int debugstate_read(const char* path, const GPTConfig* c, DebugState* d, char err[TRAIN_ERR]) {
    In in;
    char why[TRAIN_ERR];
    memset(d, 0, sizeof *d);
    if (in_open(&in, path, "a debug state", DEBUG_MAGIC, err) != 0) { return -1; }
    const int32_t* w = in.header;
    if (w[1] != DEBUG_VERSION) { return in_fail(&in, err, "is of version %d; want %d", w[1], DEBUG_VERSION); }
    if (w[2] < 1 || w[3] < 1 || w[2] > 1 << 16 || w[3] > c->maxT) {
        return in_fail(&in, err, "header is damaged: B=%d T=%d; want T of 1 to %d", w[2], w[3], c->maxT);
    }
    d->B = w[2];
    d->T = w[3];
    const size_t BT = (size_t)d->B * (size_t)d->T, nlogits = BT * (size_t)c->V, nparams = ntotal_of(c);
    (void)snprintf(why, sizeof why, "a batch of B=%d T=%d, logits and %zu gradients", d->B, d->T, nparams);
    if (in_check_nbytes(&in, HEADER_NBYTES + 4 * (uint64_t)(2 * BT + nlogits + 1 + nparams), why, err) != 0) {
        return -1;
    }
    d->x = (int*)allocate(BT * sizeof(int));
    d->y = (int*)allocate(BT * sizeof(int));
    d->logits = (float*)allocate(nlogits * sizeof(float));
    d->grads = (float*)allocate(nparams * sizeof(float));
    void* const to[] = {d->x, d->y, d->logits, &d->loss, d->grads};
    const size_t nwords[] = {BT, BT, nlogits, 1, nparams};
    uint64_t at = HEADER_NBYTES;
    for (int i = 0; i < 5; i++) {
        if (in_read(&in, at, to[i], 4 * nwords[i], err) != 0) { return -1; }
        at += 4 * nwords[i];
    }
    fclose(in.f);
    return 0;
}

void debugstate_free(DebugState* d) {
    free(d->x);
    free(d->y);
    free(d->logits);
    free(d->grads);
    memset(d, 0, sizeof *d);
}
