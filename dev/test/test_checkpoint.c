/* test_checkpoint.c -- models, optimizer states and new weights, written by any mesh and read by any other;
 * llm.c's states; the output folder; what is wrong with a file.
 *
 * Ranks are threads. Elements are numbered, so that each can only have come from its own place.
 */
#include "dev/test/files.h"
#include "dev/test/whole.h"
#include "train/checkpoint.h"
#include "train/tensors.h"
#include "train/weights.h"
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

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

// some: by a few ranks of a few meshes
static void read_model_everywhere(const char* path, GPTConfig c, const float* full, int some) {
    for (int i = 0; i < NMESHES; i += some ? 5 : 1) {
        for (int w = 0; w < mesh_size(MESHES[i]); w += some ? 3 : 1) {
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
            read_model_everywhere(path, c, full, k == 2);
            if (version == (FO_FLOATX == FO_BF16 ? 5 : 3)) {
                for (int i = 0; i < NMESHES; i += k == 2 ? 5 : 1) {
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
        for (int i = 0; i < NMESHES; i += k ? 6 : 1) { // the large one: a few
            for (int w = k ? mesh_size(MESHES[i]) - 1 : 0; w < mesh_size(MESHES[i]); w++) {
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
    CHECK(mkfifo(in_folder("pipe.bin"), 0600) == 0); // nobody writes into it: not waited for
    CHECK(checkpoint_read_header(in_folder("pipe.bin"), &got, &version, err) == -1);
    CHECK_HAS(err, "is not a regular file; want a model checkpoint");
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
    check_bad_state(file, nbytes, 16, 1 << 21, 0, 25, "damaged"); // as much memory would be taken
    check_bad_state(file, nbytes, 2, 2147483647, 0, 25, "damaged: step 2147483647"); // none could follow it
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

// what stands in the place of a file that is about to be written leads nowhere
static void test_links(void) {
    char err[TRAIN_ERR] = "", dir[512], path[CHECKPOINT_PATH], *kept;
    size_t nbytes;
    Logger log;
    struct stat st;
    FolderLock lock;
    CHECK_AT("links and pipes");
    (void)snprintf(dir, sizeof dir, "%s", in_folder("links"));
    CHECK(mkdir(dir, 0700) == 0);
    spill(in_folder("outside"), "kept", 4);
    checkpoint_done_path(path, dir, 3);
    CHECK(symlink(in_folder("outside"), path) == 0);
    CHECK(symlink(in_folder("outside"), in_folder("links/main.log")) == 0);
    CHECK(symlink(in_folder("outside"), in_folder("links/model_00000003.bin.tmp")) == 0);
    CHECK(checkpoint_prepare_folder(dir, &lock, err) == 0);
    CHECK(!exists(in_folder("links/model_00000003.bin.tmp")));
    CHECK(checkpoint_write_done(dir, 3, err) == 0 && lstat(path, &st) == 0 && S_ISREG(st.st_mode));
    CHECK(logger_init(&log, dir, NULL, 0, 0, err) == -1);
    CHECK_HAS(err, "links/main.log: cannot be opened: ");
    CHECK(unlink(in_folder("links/main.log")) == 0 && mkfifo(in_folder("links/main.log"), 0600) == 0);
    CHECK(logger_init(&log, dir, NULL, 0, 0, err) == -1); // nobody reads it: not waited for
    CHECK_HAS(err, "links/main.log: cannot be opened: ");
    lock_release(&lock);
    CHECK(symlink(in_folder("outside"), in_folder("links/train_gpt.lock")) == 0);
    CHECK(checkpoint_prepare_folder(dir, &lock, err) == -1);
    CHECK_HAS(err, "links/train_gpt.lock: cannot be opened: ");
    kept = slurp(in_folder("outside"), &nbytes);
    CHECK(nbytes == 4 && memcmp(kept, "kept", 4) == 0);
    free(kept);
    spill(in_folder("links/DONE_2147483647"), "", 0); // no step follows it
    spill(in_folder("links/DONE_99999999999"), "", 0);
    CHECK(checkpoint_find(dir, err) == -1);
    CHECK_HAS(err, "step 3 passed over: ");
}

// another process holds the folder; before the first thread. The last thing it does is to be killed
static void test_lock(void) {
    char err[TRAIN_ERR] = "", dir[512], want[64], *left;
    size_t nbytes;
    int ready[2];
    FolderLock lock;
    CHECK_AT("lock");
    (void)snprintf(dir, sizeof dir, "%s", in_folder("locked"));
    CHECK(pipe(ready) == 0);
    const pid_t pid = fork();
    if (pid == 0) {
        const char rc = (char)checkpoint_prepare_folder(dir, &lock, err);
        (void)!write(ready[1], &rc, 1);
        pause();
        _exit(1);
    }
    char rc = -1;
    CHECK(pid > 0 && read(ready[0], &rc, 1) == 1 && rc == 0);
    spill(in_folder("locked/model_00000001.bin.tmp"), "under way", 9);
    spill(in_folder("locked/.writable-aB3xyz"), "", 0);
    spill(in_folder("locked/.writable-notes"), "", 0); // nobody's but the user's
    (void)snprintf(want, sizeof want, "locked: process %d on ", (int)pid);
    CHECK(checkpoint_prepare_folder(dir, &lock, err) == -1 && !lock.held);
    CHECK_HAS(err, want);
    CHECK(exists(in_folder("locked/model_00000001.bin.tmp"))); // it is the other's
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
    left = slurp(in_folder("locked/train_gpt.lock"), &nbytes);
    CHECK(left && nbytes > 0); // and locks nothing
    free(left);
    CHECK(checkpoint_prepare_folder(dir, &lock, err) == 0 && lock.held && err[0] == 0);
    CHECK(!exists(in_folder("locked/model_00000001.bin.tmp")));
    CHECK(!exists(in_folder("locked/.writable-aB3xyz")) && exists(in_folder("locked/.writable-notes")));
    left = slurp(in_folder("locked/train_gpt.lock"), &nbytes);
    CHECK(left && atoi(left) == (int)getpid());
    free(left);
    lock_release(&lock);
    CHECK(!exists(in_folder("locked/train_gpt.lock")));
    close(ready[0]);
    close(ready[1]);
}

static void test_folder(void) {
    char err[TRAIN_ERR] = "", path[CHECKPOINT_PATH], dir[512], long_name[2000];
    struct stat info;
    FolderLock lock;
    size_t model_nbytes, state_nbytes;
    const GPTConfig c = uneven();
    float* full = numbered(ntotal_of(c), 1);
    char* model = model_file(c, 3, full, &model_nbytes);
    char* state = slurp(in_folder("state.bin"), &state_nbytes);
    CHECK_AT("prepare");
    (void)snprintf(dir, sizeof dir, "%s", in_folder("out"));
    CHECK(checkpoint_prepare_folder(dir, &lock, err) == 0 && stat(dir, &info) == 0 &&
          (info.st_mode & 0777) == 0755);
    lock_release(&lock);
    CHECK(checkpoint_prepare_folder(dir, &lock, err) == 0); // it is there
    lock_release(&lock);
    CHECK(checkpoint_prepare_folder(in_folder("a/b"), &lock, err) == -1);
    CHECK_HAS(err, "a/b: cannot be made: No such file or directory (the folder around it is missing");
    CHECK(checkpoint_prepare_folder(in_folder("state.bin"), &lock, err) == -1);
    CHECK_HAS(err, "state.bin: is not a folder");
    CHECK(checkpoint_prepare_folder("/proc", &lock, err) == -1); // nobody may write there, not even root
    CHECK_HAS(err, "output folder /proc: no file can be made in it");
    memset(long_name, 'a', sizeof long_name);
    long_name[1999] = 0;
    CHECK(checkpoint_prepare_folder(long_name, &lock, err) == -1);
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

// ---- llm.c's optimizer state ------------------------------------------------------------------------------
// What llm.c's rank writes, by its own rules: all of an array, or (zero) of each layer of each tensor the
// rank's slice, one after the other. full: m, v, master; without master NULL. Returns the file's bytes.
static size_t put_llmc_rank(const char* dir, GPTConfig c, int step, int nproc, int rank, int zero,
                            int shuffle, float* const full[3]) {
    const uint64_t place[2] = {1, 7}, nshards = 3, nsamples = 5 + (uint64_t)rank; // of the shard it is in
    const char generator[2520] = {0};
    const int narrays = full[2] ? 3 : 2;
    const int32_t orders[16] = {2, 0, 1};
    int32_t words[256] = {20240527, 1, nproc, rank, narrays == 3, shuffle, [10] = step};
    char path[CHECKPOINT_PATH];
    Tensors all;
    tensors_init(&all, c, cuts_tp(1, 0));
    memcpy(words + 30, place, sizeof place);
    (void)snprintf(path, sizeof path, "%s/state_%08d_%05d.bin", dir, step, rank);
    FILE* f = fopen(path, "wb");
    CHECK(f && fwrite(words, sizeof words, 1, f) == 1);
    for (int i = 0; i < narrays; i++) {
        const float* from = full[i];
        for (int j = 0; j < NTENSORS; j++) {
            for (int l = 0; l < all.t[j].layers; l++) {
                const size_t n = all.t[j].rows * all.t[j].cols, slice = zero ? n / (size_t)nproc : n;
                fwrite(from + (zero ? (size_t)rank * slice : 0), sizeof(float), slice, f);
                from += n;
            }
        }
    }
    if (shuffle) {
        fwrite(&nshards, 8, 1, f);
        fwrite(orders, 4, (size_t)nshards, f);
        fwrite(&nsamples, 8, 1, f);
        fwrite(orders, 4, (size_t)nsamples, f);
        fwrite(generator, 1, sizeof generator, f);
    }
    const size_t nbytes = (size_t)ftell(f);
    CHECK(fclose(f) == 0);
    return nbytes;
}

static void put_llmc(const char* dir, GPTConfig c, int step, int nproc, int zero, int shuffle,
                     float* const full[3], const float* weights) {
    char path[CHECKPOINT_PATH], err[TRAIN_ERR];
    size_t nbytes;
    CHECK(checkpoint_remove(dir, step, err) == 0);
    char* model = model_file(c, 5, weights, &nbytes);
    checkpoint_path(path, dir, "model", step);
    spill(path, model, nbytes);
    free(model);
    for (int rank = 0; rank < nproc; rank++) {
        put_llmc_rank(dir, c, step, nproc, rank, zero, shuffle, full);
    }
    CHECK(checkpoint_write_done(dir, step, err) == 0);
}

// as world rank w of a mesh; masters: those of the state, or of the model file
static void import_as(const char* dir, GPTConfig c, Mesh mesh, int w, float* const full[3],
                      const float* masters, FoDevice* d, FoStream* s) {
    Tensors ts, os;
    LlmcPosition at;
    char err[TRAIN_ERR] = "";
    float* a[3];
    mesh_tables(mesh, c, w, &ts, &os);
    floatX* params = fo_malloc(d, ts.nelem * sizeof(floatX));
    float* wide = malloc(ts.nelem * sizeof *wide);
    for (int i = 0; i < 3; i++) {
        a[i] = fo_malloc(d, os.nelem * sizeof(float));
        memset(a[i], 0xff, os.nelem * sizeof(float));
    }
    memset(&at, 0xff, sizeof at);
    const int rc = checkpoint_import_llmc(dir, 30, &at, &ts, params, &os, a[0], a[1], a[2], s, err);
    if (rc != 0) { fprintf(stderr, "%s\n", err); }
    CHECK(rc == 0 && at.shard_idx == 1 && at.sample_idx == 7);
    CHECK(at.should_shuffle ? strstr(err, "does not store the epoch") != NULL : err[0] == 0);
    check_local(&os, a[0], full[0]);
    check_local(&os, a[1], full[1]);
    check_local(&os, a[2], masters);
    widen(wide, params, ts.nelem);
    check_local(&ts, wide, masters);
    for (int i = 0; i < 3; i++) {
        fo_free(d, a[i]);
    }
    fo_free(d, params);
    free(wide);
}

static void check_bad_llmc(const char* dir, GPTConfig c, const char* want) {
    Tensors ts;
    LlmcPosition at;
    char err[TRAIN_ERR] = "";
    tensors_init(&ts, c, cuts_tp(1, 0));
    CHECK_AT("llm.c: %.80s", want);
    CHECK(checkpoint_import_llmc(dir, 30, &at, NULL, NULL, &ts, NULL, NULL, NULL, NULL, err) == -1);
    CHECK_HAS(err, want);
    CHECK(strchr(err, '\n') == NULL);
    CHECK(checkpoint_find(dir, err) == -1);
    CHECK_HAS(err, "step 30 passed over: ");
}

// one rank's file, otherwise right, with a word of its header changed, or cut
static void check_bad_llmc_file(const char* dir, GPTConfig c, int rank, int word, int32_t value, size_t cut,
                                const char* want) {
    char path[CHECKPOINT_PATH];
    size_t nbytes = 0;
    (void)snprintf(path, sizeof path, "%s/state_%08d_%05d.bin", dir, 30, rank);
    char* good = slurp(path, &nbytes);
    char* bad = malloc(nbytes);
    memcpy(bad, good, nbytes);
    memcpy(bad + 4 * word, &value, 4);
    spill(path, bad, nbytes - cut);
    check_bad_llmc(dir, c, want);
    spill(path, good, nbytes);
    free(good);
    free(bad);
}

static void test_bad_llmc(const char* dir, GPTConfig c, float* const full[3]) {
    char path[CHECKPOINT_PATH], err[TRAIN_ERR];
    put_llmc(dir, c, 30, 3, 1, 1, full, full[2]);
    check_bad_llmc_file(dir, c, 1, 0, 4711, 0, "30_00001.bin: begins with the number 4711");
    check_bad_llmc_file(dir, c, 1, 1, 2, 0, "30_00001.bin: is of version 2; want 1");
    check_bad_llmc_file(dir, c, 2, 2, 4, 0, "30_00002.bin: is of 4 processes, but rank 0's of 3");
    check_bad_llmc_file(dir, c, 0, 2, 4, 0, "30_00001.bin: is of 3 processes, but rank 0's of 4");
    check_bad_llmc_file(dir, c, 0, 2, -1, 0, "30_00000.bin: header is damaged: -1 processes");
    check_bad_llmc_file(dir, c, 2, 3, 1, 0, "30_00002.bin: is of rank 1");
    check_bad_llmc_file(dir, c, 1, 4, 0, 0, "30_00001.bin: is of a run with other options");
    check_bad_llmc_file(dir, c, 1, 10, 20, 0, "30_00001.bin: is of step 20");
    check_bad_llmc_file(dir, c, 1, 1, 1, 1, "30_00001.bin: has ");
    check_bad_llmc_file(dir, c, 0, 1, 1, 4, "30_00000.bin: has ");
    check_bad_llmc_file(dir, c, 2, 1, 1, 600, "it is truncated, or its optimizer's arrays are not of this");
    check_bad_llmc_file(dir, c, 2, 1, 1, 5000, "30_00002.bin: has ");
    Tensors other;
    LlmcPosition at;
    GPTConfig c2 = c;
    c2.NH = 3;
    CHECK_AT("llm.c: another model");
    tensors_init(&other, c2, cuts_tp(1, 0));
    CHECK(checkpoint_import_llmc(dir, 30, &at, NULL, NULL, &other, NULL, NULL, NULL, NULL, err) == -1);
    CHECK_HAS(err, "model_00000030.bin: is of L=2,C=24,NH=4");
    for (int zero = 0; zero < 2; zero++) { // the model file is as it should be, the state is not
        GPTConfig longer = c;
        longer.maxT = 24;
        put_llmc(dir, c, 30, 0, zero, 0, full, full[2]);
        for (int rank = 0; rank < 3; rank++) {
            put_llmc_rank(dir, longer, 30, 3, rank, zero, 0, full);
        }
        check_bad_llmc(dir, c, "30_00000.bin: has ");
    }
    put_llmc(dir, uneven(), 30, 3, 1, 0, full, full[2]); // slices that llm.c refuses to make
    check_bad_llmc(dir, uneven(), "30_00000.bin: has ");
    for (int rank = 0; rank < 3; rank++) {
        char want[64];
        put_llmc(dir, c, 30, 3, 1, 1, full, full[2]);
        (void)snprintf(path, sizeof path, "%s/state_%08d_%05d.bin", dir, 30, rank);
        (void)snprintf(want, sizeof want, "state_00000030_%05d.bin: No such file", rank);
        CHECK(unlink(path) == 0);
        check_bad_llmc(dir, c, want);
    }
    put_llmc(dir, c, 30, 0, 0, 0, full, full[2]);
    CHECK(checkpoint_find(dir, err) == -1);
    CHECK_HAS(err, "state_00000030.bin: No such file");
}

static void test_llmc(void) {
    // every tensor's layers divide by 2, 3 and 6; and one that 3 does not divide, which llm.c does not cut
    const GPTConfig c = config(2, 24, 4, 300, 18), odd = uneven();
    const size_t n = ntotal_of(c), nodd = ntotal_of(odd), most = n > nodd ? n : nodd;
    float* full[3] = {numbered(most, 2), numbered(most, 3), numbered(most, 4)};
    float* weights = numbered(most, 5);
    char dir[512], err[TRAIN_ERR] = "", path[CHECKPOINT_PATH];
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "main");
    (void)snprintf(dir, sizeof dir, "%s", in_folder("llmc"));
    CHECK(mkdir(dir, 0755) == 0);
    for (int nproc = 1; nproc <= 6; nproc++) {
        for (int kind = 0; kind < 8; kind++) {
            const int zero = kind & 1, shuffle = kind >> 1 & 1, masters = !(kind >> 2);
            float* const arrays[3] = {full[0], full[1], masters ? full[2] : NULL};
            const GPTConfig model = nproc == 4 || nproc == 5 ? odd : c;
            if (zero && (nproc == 4 || nproc == 5)) { continue; }
            put_llmc(dir, model, 30, nproc, zero, shuffle, arrays, weights);
            CHECK(checkpoint_is_llmc(dir, 30) && checkpoint_find(dir, err) == 30 && err[0] == 0);
            for (int i = (nproc + kind) % 3; i < NMESHES; i += 3) {
                check_at_mesh("import", MESHES[i]);
                import_as(dir, model, MESHES[i], mesh_size(MESHES[i]) - 1, arrays,
                          masters ? full[2] : weights, d, s);
                import_as(dir, model, MESHES[i], 0, arrays, masters ? full[2] : weights, d, s);
            }
        }
    }
    CHECK_AT("llm.c's and ours");
    CHECK(!checkpoint_is_llmc(dir, 3) && !checkpoint_is_llmc(dir, 300));
    checkpoint_path(path, dir, "state", 30);
    spill(path, "", 0);
    CHECK(!checkpoint_is_llmc(dir, 30)); // ours goes first
    CHECK(checkpoint_remove(dir, 30, err) == 0);
    (void)snprintf(path, sizeof path, "%s/state_00000030_00005.bin", dir);
    CHECK(!exists(path) && !checkpoint_is_llmc(dir, 30) && checkpoint_find(dir, err) == -1 && !err[0]);
    test_bad_llmc(dir, c, full);
    fo_stream_destroy(s);
    fo_device_close(d);
    for (int i = 0; i < 3; i++) {
        free(full[i]);
    }
    free(weights);
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
    if (!folder_open("test_checkpoint")) { return 1; }
    test_lock();
    test_model_files();
    test_state_files();
    test_weights();
    test_bad_models();
    test_bad_states();
    test_disk_full();
    test_folder();
    test_links();
    test_llmc();
    test_debugstate();
    folder_close();
    return check_report();
}
