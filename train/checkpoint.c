/* checkpoint.c -- model, state and debug files. See checkpoint.h; formats in doc/formats.md.
 *
 * A whole tensor never exists in memory: files are read and written in blocks of whole rows. Of a block a
 * rank holds some boxes (tensors.h), each of which lies in its arena without gaps.
 */
#include "train/checkpoint.h"
#include "data/dataloader.h" // data_open, data_file_kind
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define MODEL_MAGIC   20240326
#define STATE_MAGIC   20261129
#define STATE_VERSION 2
#define LLMC_MAGIC    20240527
#define LLMC_VERSION  1
#define DEBUG_MAGIC   20240327
#define DEBUG_VERSION 2
#define HEADER_WORDS  256
#define HEADER_NBYTES (HEADER_WORDS * sizeof(int32_t))
#define BLOB_MOST     ((uint64_t)1 << 20) // bytes of the loader's or the trainer's place in a state file
#define BLOCK_NBYTES  ((size_t)4 << 20)   // of rows in flight; one row if it is longer

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

// the table of a rank that holds the whole model
static Tensors whole_tensors(const GPTConfig* c) {
    const TensorCuts whole = {1, 0, 1, 1, 0};
    Tensors ts;
    tensors_init(&ts, *c, whole);
    return ts;
}

static size_t ntotal_of(const GPTConfig* c) {
    return whole_tensors(c).ntotal;
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
    char path[CHECKPOINT_PATH];
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
    const char* why;
    (void)snprintf(in->path, sizeof in->path, "%s", path);
    in->f = data_open(path, &in->nbytes, &why);
    if (!in->f) { return in_fail(in, err, "%s; want %s", why, kind); }
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

// the boxes of a block that a rank holds; returns their number.
// Of ts' own rank, offsets are those in its arena
static int block_boxes(const Tensors* ts, const Block* b, int t, int shard,
                       TensorBox boxes[TENSOR_MAX_BOXES]) {
    const Tensor* x = &ts->t[b->tensor];
    const int n = tensor_boxes_of_rows(ts, b->tensor, t, shard, b->row, b->n, boxes);
    for (int i = 0; i < n; i++) {
        boxes[i].offset += x->offset + b->layer * tensor_local(x);
    }
    return n;
}

static size_t boxes_nelem(const TensorBox* boxes, int n) {
    size_t sum = 0;
    for (int i = 0; i < n; i++) {
        sum += boxes[i].nrows * boxes[i].ncols;
    }
    return sum;
}

// where row k of a box begins in a block of whole rows, in elements
static size_t box_row_at(const Tensors* ts, const Block* b, const TensorBox* box, size_t k) {
    return (box->row0 + k - b->row) * ts->t[b->tensor].cols + box->col0;
}

static void convert(char* to, FoDtype to_type, const char* from, FoDtype from_type, size_t nelem) {
    if (to_type == from_type) {
        memcpy(to, from, nelem * fo_dtype_nbytes(from_type));
        return;
    }
    for (size_t i = 0; i < nelem; i++) {
        FoBf16 narrow;
        float wide;
        if (from_type == FO_BF16) {
            memcpy(&narrow, from + i * sizeof narrow, sizeof narrow);
            wide = fo_bf16_to_float(narrow);
            memcpy(to + i * sizeof wide, &wide, sizeof wide);
        } else {
            memcpy(&wide, from + i * sizeof wide, sizeof wide);
            narrow = fo_bf16_from_float(wide);
            memcpy(to + i * sizeof narrow, &narrow, sizeof narrow);
        }
    }
}

// ---- reading arrays ---------------------------------------------------------------------------------------
// An array of all parameters in nfiles files, from byte `at` of each on: file k has of each layer of each
// tensor the k-th of nfiles equal parts, as llm.c's ZeRO cuts them. One file has all.
typedef struct {
    In* in; // [nfiles]
    int nfiles;
    uint64_t at;
    FoDtype type;
} Source;

// an arena that is filled from it; data NULL: none
typedef struct {
    const Tensors* ts;
    void* data;
    FoDtype type;
} Target;

static int read_block(const Source* from, const Tensors* ts, const Block* b, char* block,
                      char err[TRAIN_ERR]) {
    const size_t nbytes = fo_dtype_nbytes(from->type), nfiles = (size_t)from->nfiles;
    const Tensor* x = &ts->t[b->tensor];
    const size_t part = x->rows * x->cols / nfiles, first = b->row * x->cols;
    const size_t end = first + block_nelem(ts, b);
    const uint64_t before = (b->before - first) / nfiles; // a file's elements of earlier layers
    for (size_t k = first, next; k < end; k = next) {
        const size_t file = k / part;
        next = min_size(end, (file + 1) * part);
        const uint64_t at = from->at + (before + k - file * part) * nbytes;
        if (in_read(&from->in[file], at, block + (k - first) * nbytes, (next - k) * nbytes, err) != 0) {
            return -1;
        }
    }
    return 0;
}

// a block's boxes into a target's arena, through `values` [block_nelem] floats
static void fill_target(const Target* to, const Block* b, const char* block, FoDtype type, char* values,
                        const TensorBox* boxes, int nboxes, FoStream* s) {
    const size_t nbytes = fo_dtype_nbytes(to->type);
    for (int i = 0; i < nboxes; i++) {
        const TensorBox* box = &boxes[i];
        const size_t nelem = box->nrows * box->ncols;
        char* dst = (char*)to->data + box->offset * nbytes;
        for (size_t k = 0; k < box->nrows; k++) {
            convert(values + k * box->ncols * nbytes, to->type,
                    block + box_row_at(to->ts, b, box, k) * fo_dtype_nbytes(type), type, box->ncols);
        }
        if (s) {
            fo_upload(dst, values, nelem * nbytes, s);
        } else {
            memcpy(dst, values, nelem * nbytes);
        }
        values += nelem * nbytes;
    }
    if (s) { fo_stream_sync(s); } // values has been read | the next block
}

/* read_arrays -- this rank's parts of an array of whole tensors into up to two arenas, gaps 0.
 *
 * s NULL: they are host memory. Otherwise device memory, and the values have arrived when this returns.
 */
static int read_arrays(const Source* from, const Target to[2], FoStream* s, char err[TRAIN_ERR]) {
    const Tensors* ts = to[0].data ? to[0].ts : to[1].ts;
    const size_t nbytes = fo_dtype_nbytes(from->type), most = block_most(ts, nbytes);
    char* block = (char*)allocate(most * nbytes);
    char* values = (char*)allocate(most * sizeof(float));
    int rc = 0;
    for (int k = 0; k < 2; k++) {
        const size_t all = to[k].data ? to[k].ts->nelem * fo_dtype_nbytes(to[k].type) : 0;
        if (all > 0 && s) { fo_zero(to[k].data, all, s); }
        if (all > 0 && !s) { memset(to[k].data, 0, all); }
    }
    for (Block b = {0}; rc == 0 && block_next(&b, ts, nbytes);) {
        int there = 0; // in block
        for (int k = 0; k < 2 && rc == 0; k++) {
            TensorBox boxes[TENSOR_MAX_BOXES];
            const TensorCuts cuts = to[k].data ? to[k].ts->cuts : ts->cuts;
            const int n = to[k].data ? block_boxes(to[k].ts, &b, cuts.t, cuts.shard, boxes) : 0;
            if (n > 0 && !there) { rc = read_block(from, ts, &b, block, err); }
            there |= n > 0;
            if (rc == 0) { fill_target(&to[k], &b, block, from->type, values, boxes, n, s); }
        }
    }
    free(values);
    free(block);
    return rc;
}

int checkpoint_read_model(const char* path, const Tensors* ts, floatX* params, const Tensors* os,
                          float* master, FoStream* s, char err[TRAIN_ERR]) {
    const Target to[2] = {{ts, params, FO_FLOATX}, {os, master, FO_FP32}};
    const GPTConfig* want = params ? &ts->config : &os->config;
    In in;
    GPTConfig c;
    int version;
    if (model_open(&in, path, &c, &version, err) != 0 || config_same(&in, &c, want, err) != 0) { return -1; }
    const Source from = {&in, 1, HEADER_NBYTES, version == 3 ? FO_FP32 : FO_BF16};
    if (read_arrays(&from, to, s, err) != 0) { return -1; }
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

// A new file, in the place of what there was: a link, which could lead out of the folder, is not followed
static FILE* create_file(const char* path) {
    (void)unlink(path);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    FILE* f = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (!f && fd >= 0) { close(fd); }
    return f;
}

static void out_open(Out* out, const char* path) {
    memset(out, 0, sizeof *out);
    out->path = path;
    if (snprintf(out->tmp, sizeof out->tmp, "%s.tmp", path) >= (int)sizeof out->tmp) {
        errno = ENAMETOOLONG;
        out_fail(out, "cannot be written");
        return;
    }
    out->f = create_file(out->tmp);
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

// `rows`: the boxes of ranks 0 ... nsources - 1 -> a block of whole rows, into the file
static void write_block(Out* out, const Tensors* ts, const Block* b, int nsources, char* block,
                        const char* rows, size_t nbytes) {
    TensorBox boxes[TENSOR_MAX_BOXES];
    for (int w = 0; w < nsources; w++) {
        const int n = block_boxes(ts, b, w % ts->cuts.tp, w / ts->cuts.tp, boxes);
        for (int i = 0; i < n; i++) {
            const size_t row_nbytes = boxes[i].ncols * nbytes;
            for (size_t k = 0; k < boxes[i].nrows; k++, rows += row_nbytes) {
                memcpy(block + box_row_at(ts, b, &boxes[i], k) * nbytes, rows, row_nbytes);
            }
        }
    }
    out_write(out, block, block_nelem(ts, b) * nbytes);
}

/* write_arena -- all ranks' arenas, device memory, elements of nbytes -> whole tensors, written by rank 0.
 *
 * World rank w is tp rank w % tp of replica w / tp. Ranks go through the blocks together; of each the first
 * ones send what they hold to rank 0: of a tensor that replicas share all of them, else the first replica;
 * of one that tp does not cut, rank 0 has it. If writing fails they go on to the end all the same: that is
 * the one place where all of them can learn it (out_agree).
 */
static void write_arena(Out* out, const Tensors* ts, const void* arena, size_t nbytes, FoGroup* g,
                        FoStream* s) {
    const int r = fo_group_rank(g), tp = ts->cuts.tp;
    const size_t most = block_most(ts, nbytes);
    FoDevice* d = fo_stream_device(s);
    char* block = (char*)allocate(r == 0 ? most * nbytes : 0);
    char* rows = (char*)allocate(r == 0 ? most * nbytes : 0);
    char* packed =
        (char*)fo_malloc(d, most * nbytes); // a rank's boxes one after the other; rank 0: all ranks'
    TensorBox boxes[TENSOR_MAX_BOXES];
    for (Block b = {0}; block_next(&b, ts, nbytes);) {
        const Tensor* x = &ts->t[b.tensor];
        const int nsources = x->cut == CUT_NONE ? 1 : x->sharded ? tp * ts->cuts.nshards : tp;
        if (r >= nsources) { continue; }
        size_t own = 0;
        const int n = block_boxes(ts, &b, r % tp, r / tp, boxes);
        for (int i = 0; i < n; i++) {
            const size_t box_nbytes = boxes[i].nrows * boxes[i].ncols * nbytes;
            fo_copy(packed + own, (const char*)arena + boxes[i].offset * nbytes, box_nbytes, s);
            own += box_nbytes;
        }
        if (nsources > 1) {
            fo_comm_begin(g, s);
            if (r > 0) { fo_send(g, packed, own, 0); }
            for (int k = 1; r == 0 && k < nsources; k++) {
                const size_t nelem = boxes_nelem(boxes, block_boxes(ts, &b, k % tp, k / tp, boxes));
                fo_recv(g, packed + own, nelem * nbytes, k);
                own += nelem * nbytes;
            }
            fo_comm_end(g);
        }
        if (r == 0) { fo_download(rows, packed, own, s); }
        fo_stream_sync(s); // rows are here, no more than one exchange is queued | the next block
        if (r == 0) { write_block(out, ts, &b, nsources, block, rows, nbytes); }
    }
    free(block);
    free(rows);
    fo_free(d, packed);
}

int checkpoint_write_model(const char* path, const Tensors* ts, const floatX* params, FoGroup* g,
                           FoStream* comm, char err[TRAIN_ERR]) {
    Out out = {0};
    int32_t header[HEADER_WORDS] = {MODEL_MAGIC, FO_FLOATX == FO_BF16 ? 5 : 3};
    config_put(header + 2, &ts->config);
    if (fo_group_rank(g) == 0) { out_open(&out, path); }
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

int checkpoint_write_state(const char* path, const Tensors* os, const CheckpointState* st, const float* m,
                           const float* v, const float* master, FoGroup* g, FoStream* comm,
                           char err[TRAIN_ERR]) {
    Out out = {0};
    int32_t header[HEADER_WORDS] = {STATE_MAGIC, STATE_VERSION, st->step};
    config_put(header + W_CONFIG, &os->config);
    put_u64(header + W_LOADER, st->loader_nbytes);
    put_u64(header + W_TRAINER, st->trainer_nbytes);
    if (fo_group_rank(g) == 0) { out_open(&out, path); }
    out_write(&out, header, sizeof header);
    out_write(&out, st->loader, st->loader_nbytes);
    out_write(&out, st->trainer, st->trainer_nbytes);
    write_arena(&out, os, m, sizeof(float), g, comm);
    write_arena(&out, os, v, sizeof(float), g, comm);
    write_arena(&out, os, master, sizeof(float), g, comm);
    out_close(&out);
    return out_agree(&out, g, comm, err);
}

// opens a state file and checks all but the arrays; st has no blobs yet
static int state_open(In* in, const char* path, GPTConfig* c, CheckpointState* st, char err[TRAIN_ERR]) {
    char why[TRAIN_ERR];
    if (in_open(in, path, "a state file of this program", STATE_MAGIC, err) != 0) { return -1; }
    const int32_t* w = in->header;
    if (w[1] == 1) {
        return in_fail(in, err, "is of version 1, without the data's epoch; want %d", STATE_VERSION);
    }
    if (w[1] != STATE_VERSION) { return in_fail(in, err, "is of version %d; want %d", w[1], STATE_VERSION); }
    *c = config_of(w + W_CONFIG);
    if (config_check(c, why) != 0) { return in_fail(in, err, "header is damaged: %s", why); }
    const uint64_t loader = get_u64(w + W_LOADER), trainer = get_u64(w + W_TRAINER);
    if (w[W_STEP] < 0 || w[W_STEP] == INT_MAX || loader > BLOB_MOST || trainer > BLOB_MOST) {
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

int checkpoint_read_state(const char* path, CheckpointState* st, const Tensors* ts, floatX* params,
                          const Tensors* os, float* m, float* v, float* master, FoStream* s,
                          char err[TRAIN_ERR]) {
    In in;
    GPTConfig c;
    const Target to[3][2] = {
        {{os, m, FO_FP32}}, {{os, v, FO_FP32}}, {{os, master, FO_FP32}, {ts, params, FO_FLOATX}}};
    memset(st, 0, sizeof *st);
    if (state_open(&in, path, &c, st, err) != 0 || config_same(&in, &c, &os->config, err) != 0) { return -1; }
    st->loader = allocate(st->loader_nbytes);
    st->trainer = allocate(st->trainer_nbytes);
    uint64_t at = HEADER_NBYTES;
    if (in_read(&in, at, st->loader, st->loader_nbytes, err) != 0) { return -1; }
    at += st->loader_nbytes;
    if (in_read(&in, at, st->trainer, st->trainer_nbytes, err) != 0) { return -1; }
    at += st->trainer_nbytes;
    for (int i = 0; i < 3; i++) {
        const Source from = {&in, 1, at, FO_FP32};
        if (read_arrays(&from, to[i], s, err) != 0) { return -1; }
        at += (uint64_t)os->ntotal * sizeof(float);
    }
    fclose(in.f);
    return 0;
}

void checkpoint_state_free(CheckpointState* st) {
    free(st->loader);
    free(st->trainer);
    memset(st, 0, sizeof *st);
}

// ---- llm.c's optimizer state ------------------------------------------------------------------------------
// words of the header of one rank's file; two-word ones are uint64
enum { X_NPROC = 2, X_RANK, X_MASTER, X_SHUFFLE, X_STEP = 10, X_SHARD = 30, X_SAMPLE = 32 };
enum { LLMC_RNG_NBYTES = 2520, LLMC_MAX_NPROC = 4096 };

typedef struct {
    In* in; // [nproc], open
    int nproc;
    int nfiles;     // in which an array is: nproc with ZeRO (-z 1), 1 without
    uint64_t nelem; // of an array in a file
} LlmcState;

static void llmc_path(char path[CHECKPOINT_PATH], const char* dir, int step, int rank) {
    (void)snprintf(path, CHECKPOINT_PATH, "%s/state_%08d_%05d.bin", dir, step, rank);
}

static void llmc_close(LlmcState* x) {
    for (int k = 0; k < x->nproc; k++) {
        if (x->in[k].f) { fclose(x->in[k].f); }
    }
    free(x->in);
    memset(x, 0, sizeof *x);
}

static uint64_t llmc_arrays_nbytes(const In* in, uint64_t nelem) {
    return (in->header[X_MASTER] ? 3 : 2) * sizeof(float) * nelem;
}

// 1: the file is as long as it must be with nelem elements in an array; -1: err. If it was shuffled, then the
// orders of shards and of samples follow, their numbers before them, and a generator
static int llmc_fits(In* in, uint64_t nelem, char err[TRAIN_ERR]) {
    uint64_t at = HEADER_NBYTES + llmc_arrays_nbytes(in, nelem), n;
    for (int i = 0; i < 2 && in->header[X_SHUFFLE]; i++) {
        if (at + sizeof n > in->nbytes) { return 0; }
        if (in_read(in, at, &n, sizeof n, err) != 0) { return -1; }
        if (n > in->nbytes) { return 0; }
        at += sizeof n + n * sizeof(int32_t);
    }
    return in->nbytes == at + (in->header[X_SHUFFLE] ? LLMC_RNG_NBYTES : 0);
}

// can llm.c's ZeRO cut this model over nproc ranks?
static int llmc_divides(const Tensors* ts, int nproc) {
    for (int i = 0; i < NTENSORS; i++) {
        if (ts->t[i].rows * ts->t[i].cols % (size_t)nproc != 0) { return 0; }
    }
    return 1;
}

// one rank's file, and what must be in its header: what is in rank 0's (NULL: this is rank 0's)
static int llmc_open_rank(In* in, const char* dir, int step, int rank, const In* first, char err[TRAIN_ERR]) {
    char path[CHECKPOINT_PATH];
    llmc_path(path, dir, step, rank);
    if (in_open(in, path, "a rank's optimizer state of llm.c", LLMC_MAGIC, err) != 0) { return -1; }
    const int32_t* w = in->header;
    if (w[1] != LLMC_VERSION) { return in_fail(in, err, "is of version %d; want %d", w[1], LLMC_VERSION); }
    if (w[X_NPROC] < 1 || w[X_NPROC] > LLMC_MAX_NPROC) {
        return in_fail(in, err, "header is damaged: %d processes, want 1 to %d", w[X_NPROC], LLMC_MAX_NPROC);
    }
    if (w[X_STEP] != step) { return in_fail(in, err, "is of step %d", w[X_STEP]); }
    if (w[X_RANK] != rank) { return in_fail(in, err, "is of rank %d", w[X_RANK]); }
    if (first && w[X_NPROC] != first->header[X_NPROC]) {
        return in_fail(in, err, "is of %d processes, but rank 0's of %d", w[X_NPROC], first->header[X_NPROC]);
    }
    if (first && (w[X_MASTER] != first->header[X_MASTER] || w[X_SHUFFLE] != first->header[X_SHUFFLE])) {
        return in_fail(in, err, "is of a run with other options than rank 0's: -w %d, shuffle %d",
                       w[X_MASTER], w[X_SHUFFLE]);
    }
    return 0;
}

// opens the files of all ranks and checks that they are a state of model c, complete
static int llmc_open(LlmcState* x, const char* dir, int step, const GPTConfig* c, char err[TRAIN_ERR]) {
    const Tensors ts = whole_tensors(c);
    In first;
    memset(x, 0, sizeof *x);
    if (llmc_open_rank(&first, dir, step, 0, NULL, err) != 0) { return -1; }
    const int nproc = first.header[X_NPROC];
    x->in = (In*)allocate((size_t)nproc * sizeof(In));
    x->in[0] = first;
    for (x->nproc = 1; x->nproc < nproc; x->nproc++) {
        if (llmc_open_rank(&x->in[x->nproc], dir, step, x->nproc, &first, err) != 0) {
            llmc_close(x);
            return -1;
        }
    }
    x->nfiles = 1;
    x->nelem = ts.ntotal;
    int fits = llmc_fits(&x->in[0], x->nelem, err);
    if (fits == 0 && llmc_divides(&ts, nproc)) {
        x->nfiles = nproc;
        x->nelem = ts.ntotal / (uint64_t)nproc;
    }
    for (int k = 0; k < nproc && fits >= 0; k++) {
        fits = llmc_fits(&x->in[k], x->nelem, err);
        if (fits == 0) {
            (void)in_fail(
                &x->in[k], err,
                "has %llu bytes: it is truncated, or its optimizer's arrays are not of this model's "
                "%zu parameters, nor (-z 1) of 1/%d of them",
                (unsigned long long)x->in[k].nbytes, ts.ntotal, nproc);
            fits = -1;
        }
    }
    if (fits < 0) { llmc_close(x); }
    return fits < 0 ? -1 : 0;
}

int checkpoint_import_llmc(const char* dir, int step, LlmcPosition* position, const Tensors* ts,
                           floatX* params, const Tensors* os, float* m, float* v, float* master, FoStream* s,
                           char err[TRAIN_ERR]) {
    const Target to[3][2] = {
        {{os, m, FO_FP32}}, {{os, v, FO_FP32}}, {{os, master, FO_FP32}, {ts, params, FO_FLOATX}}};
    char path[CHECKPOINT_PATH];
    LlmcState x;
    In model;
    GPTConfig c;
    int version, rc = 0;
    checkpoint_path(path, dir, "model", step);
    if (model_open(&model, path, &c, &version, err) != 0 || config_same(&model, &c, &os->config, err) != 0) {
        return -1;
    }
    fclose(model.f);
    if (llmc_open(&x, dir, step, &c, err) != 0) { return -1; }
    const int32_t* w = x.in[0].header;
    const int has_master = w[X_MASTER] != 0;
    position->nproc = x.nproc;
    position->should_shuffle = w[X_SHUFFLE] != 0;
    position->shard_idx = (size_t)get_u64(w + X_SHARD);
    position->sample_idx = (size_t)get_u64(w + X_SAMPLE);
    for (int i = 0; i < 2 + has_master && rc == 0; i++) {
        const Source from = {x.in, x.nfiles, HEADER_NBYTES + (uint64_t)i * sizeof(float) * x.nelem, FO_FP32};
        rc = read_arrays(&from, to[i], s, err);
    }
    llmc_close(&x);
    if (rc == 0 && !has_master) { rc = checkpoint_read_model(path, ts, params, os, master, s, err); }
    if (rc == 0) { err[0] = 0; }
    if (rc == 0 && position->should_shuffle) {
        (void)train_error(
            err, "llm.c does not store the epoch: shuffled data go on in the order of the first one");
    }
    return rc;
}

// ---- output folder ----------------------------------------------------------------------------------------
static int remove_file(const char* path, char err[TRAIN_ERR]) {
    if (unlink(path) == 0 || errno == ENOENT) { return 0; }
    return train_error(err, "%s: cannot be deleted: %s", path, strerror(errno));
}

static const char PROBE[] = ".writable-XXXXXX"; // as mkstemp wants it

// is it a name that only a run that was killed leaves behind?
static int is_unfinished(const char* name) {
    char names[2][32];
    int step;
    if (strncmp(name, PROBE, sizeof PROBE - 7) == 0) { return strlen(name) == sizeof PROBE - 1; }
    if (sscanf(name, "model_%d.bin.tmp", &step) != 1 && sscanf(name, "state_%d.bin.tmp", &step) != 1) {
        return 0;
    }
    (void)snprintf(names[0], sizeof names[0], "model_%08d.bin.tmp", step);
    (void)snprintf(names[1], sizeof names[1], "state_%08d.bin.tmp", step);
    return strcmp(name, names[0]) == 0 || strcmp(name, names[1]) == 0;
}

// files under way of a run that was killed
static int remove_unfinished(const char* dir, char err[TRAIN_ERR]) {
    int rc = 0;
    DIR* d = opendir(dir);
    if (!d) { return train_error(err, "output folder %s: cannot be read: %s", dir, strerror(errno)); }
    for (struct dirent* e; rc == 0 && (e = readdir(d)) != NULL;) {
        char path[CHECKPOINT_PATH];
        if (!is_unfinished(e->d_name)) { continue; }
        (void)snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        rc = remove_file(path, err);
    }
    closedir(d);
    return rc;
}

int checkpoint_prepare_folder(const char* dir, FolderLock* lock, char err[TRAIN_ERR]) {
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
    (void)snprintf(probe, sizeof probe, "%s/%s", dir, PROBE);
    int fd = mkstemp(probe);
    if (fd < 0) {
        return train_error(err, "output folder %s: no file can be made in it: %s", dir, strerror(errno));
    }
    close(fd);
    (void)unlink(probe);
    return lock_take(lock, dir, err) ? -1 : remove_unfinished(dir, err);
}

void checkpoint_path(char path[CHECKPOINT_PATH], const char* dir, const char* kind, int step) {
    (void)snprintf(path, CHECKPOINT_PATH, "%s/%s_%08d.bin", dir, kind, step);
}

void checkpoint_done_path(char path[CHECKPOINT_PATH], const char* dir, int step) {
    (void)snprintf(path, CHECKPOINT_PATH, "%s/DONE_%08d", dir, step);
}

// The names in a folder are on disk, too. Not every file system can: then it orders them by itself
static void sync_folder(const char* dir) {
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) { return; }
    (void)fsync(fd);
    close(fd);
}

int checkpoint_write_done(const char* dir, int step, char err[TRAIN_ERR]) {
    char path[CHECKPOINT_PATH];
    checkpoint_done_path(path, dir, step);
    sync_folder(dir); // the names of model and state | DONE
    FILE* f = create_file(path);
    if (!f || fclose(f) != 0) { return train_error(err, "%s: cannot be made: %s", path, strerror(errno)); }
    sync_folder(dir); // DONE | older checkpoints are deleted
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
        if (sscanf(e->d_name, "DONE_%d", &step) != 1 || step < 0 || step == INT_MAX) { continue; }
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

// how many files a folder has that are named as llm.c's ranks name their states of a step; drop: they are
// deleted. -1: err
static int llmc_files(const char* dir, int step, int drop, char err[TRAIN_ERR]) {
    char path[CHECKPOINT_PATH], again[CHECKPOINT_PATH];
    int n = 0;
    DIR* d = opendir(dir);
    if (!d) { return train_error(err, "output folder %s: cannot be read: %s", dir, strerror(errno)); }
    for (struct dirent* e; n >= 0 && (e = readdir(d)) != NULL;) {
        int its_step, rank;
        if (sscanf(e->d_name, "state_%d_%d.bin", &its_step, &rank) != 2 || its_step != step) { continue; }
        (void)snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        llmc_path(again, dir, step, rank);
        if (strcmp(again, path) != 0) { continue; } // somebody else's
        n = drop && remove_file(path, err) != 0 ? -1 : n + 1;
    }
    closedir(d);
    return n;
}

int checkpoint_is_llmc(const char* dir, int step) {
    char path[CHECKPOINT_PATH], err[TRAIN_ERR];
    checkpoint_path(path, dir, "state", step);
    return access(path, F_OK) != 0 && llmc_files(dir, step, 0, err) > 0;
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
    if (checkpoint_is_llmc(dir, step)) {
        LlmcState x;
        if (llmc_open(&x, dir, step, &model, err) != 0) { return 0; }
        llmc_close(&x);
        return 1;
    }
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

static int remove_done(const char* dir, int step, char err[TRAIN_ERR]) {
    char path[CHECKPOINT_PATH];
    checkpoint_done_path(path, dir, step);
    return remove_file(path, err);
}

static int remove_model_and_state(const char* dir, int step, char err[TRAIN_ERR]) {
    char path[CHECKPOINT_PATH];
    checkpoint_path(path, dir, "model", step);
    int rc = remove_file(path, err);
    checkpoint_path(path, dir, "state", step);
    rc = rc ? rc : remove_file(path, err);
    return rc ? rc : llmc_files(dir, step, 1, err) < 0 ? -1 : 0;
}

int checkpoint_remove(const char* dir, int step, char err[TRAIN_ERR]) {
    return remove_done(dir, step, err) ? -1 : remove_model_and_state(dir, step, err);
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
        // DONE last: a run that is killed here is seen to have left something, and the next one deletes it
        rc = remove_model_and_state(dir, steps[i], err) ? -1 : remove_done(dir, steps[i], err);
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
