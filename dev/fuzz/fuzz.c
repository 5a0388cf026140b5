/* fuzz.c -- every reader of files, fed with what a fuzzer makes up, under AddressSanitizer and UBSan.
 * dev/fuzz/fuzz.sh runs it: `make fuzz`.
 *
 * One program; the variable FUZZ names the target. With SEEDS=DIR it writes that target's first inputs, sound
 * files of the smallest size, into the folder and ends. What a target is given as bytes it writes into files
 * of a folder of its own under TMPDIR. Beside the sanitizers each target checks that an
 * error is one line, and what else it says. A target more: a function, its seeds in write_seeds, and a row of
 * `targets`.
 */
#include "train/options.h"
#include "data/tokenizer.h"
#include "train/checkpoint.h"
#include "train/hellaswag.h"
#include "train/prompts.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes);
int LLVMFuzzerInitialize(int* argc, char*** argv);

static char folder[64]; // of this process
static FILE* sink;      // /dev/null

// false is what the fuzzer looks for
static void want(int ok, const char* what, const char* text) {
    if (ok) { return; }
    fprintf(stderr, "fuzz: not so: %s: '%s'\n", what, text);
    abort();
}

static void want_line(int rc, const char* err) {
    want(rc == 0 || rc == 1 || (err[0] && !strchr(err, '\n') && strlen(err) < TRAIN_ERR),
         "an error is one line", err);
}

static char* in_folder(const char* name) {
    static char path[4][128];
    static int turn;
    char* p = path[turn++ % 4];
    (void)snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

static char* spill(const char* name, const void* from, size_t nbytes) {
    char* path = in_folder(name);
    FILE* f = fopen(path, "wb");
    want(f && fwrite(from, 1, nbytes, f) == nbytes && fclose(f) == 0, "a file is written", path);
    return path;
}

// ---- small sound files ------------------------------------------------------------------------------------
static GPTConfig smallest(void) {
    GPTConfig c = {.maxT = 2, .V = 3, .Vp = 128, .L = 1, .NH = 1, .C = 2};
    return c;
}

static Tensors whole(GPTConfig c) {
    const TensorCuts cuts = {1, 0, 1, 1, 0};
    Tensors ts;
    tensors_init(&ts, c, cuts);
    return ts;
}

// header of 256 words, then nbytes of zeros; malloc'ed
static char* file_of(const int32_t* head, size_t nwords, size_t nbytes) {
    char* file = (char*)calloc(1, 1024 + nbytes);
    want(file != NULL, "memory", "");
    memcpy(file, head, nwords * sizeof *head);
    return file;
}

static size_t shard_file(char** file, int width, int ntok) {
    const int32_t head[3] = {width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7, ntok};
    *file = file_of(head, 3, (size_t)(width * ntok));
    return 1024 + (size_t)(width * ntok);
}

static size_t model_file(char** file, int version) {
    const GPTConfig c = smallest();
    const int32_t head[8] = {20240326, version, c.maxT, c.V, c.L, c.NH, c.C, c.Vp};
    const size_t nbytes = whole(c).ntotal * (version == 3 ? 4 : 2);
    *file = file_of(head, 8, nbytes);
    return 1024 + nbytes;
}

static size_t state_file(char** file) {
    const GPTConfig c = smallest();
    const int32_t head[18] = {20261129, 2, 7, c.maxT, c.V, c.L, c.NH, c.C, c.Vp, [14] = 80, [16] = 16};
    const size_t nbytes = 80 + 16 + 12 * whole(c).ntotal;
    *file = file_of(head, 18, nbytes);
    return 1024 + nbytes;
}

static size_t llmc_file(char** file, int rank, int nproc, int shuffle) {
    const int32_t head[32] = {20240527, 1, nproc, rank, 1, shuffle, [10] = 7, [30] = 1};
    const size_t nbytes = 12 * whole(smallest()).ntotal / (size_t)nproc + (shuffle ? 16 + 2520 : 0);
    *file = file_of(head, 32, nbytes);
    return 1024 + nbytes;
}

static size_t tokenizer_file(char** file) {
    const int32_t head[4] = {20240328, 2, 256, 10};
    *file = file_of(head, 4, 512);
    for (int i = 0; i < 256; i++) {
        (*file)[1024 + 2 * i] = 1, (*file)[1025 + 2 * i] = (char)i;
    }
    return 1024 + 512;
}

static void debug_file(char** file, size_t* nbytes) {
    const int32_t head[4] = {20240327, 2, 1, 2};
    *nbytes = 1024 + 4 * (2 + 2 + 2 * 3 + 1 + whole(smallest()).ntotal);
    *file = file_of(head, 4, *nbytes - 1024);
}

// ---- targets ----------------------------------------------------------------------------------------------
static void read_batches(DataLoader* dl) {
    char err[DATA_ERR_NBYTES] = "";
    for (int i = 0; i < 5; i++) {
        const int rc = dataloader_next_batch(dl, err);
        want_line(rc, err);
        for (int k = 0; rc == 0 && k < dl->B * dl->T; k++) {
            want(dl->inputs[k] >= 0 && dl->inputs[k] < dl->V && dl->targets[k] < dl->V, "tokens below V", "");
        }
    }
}

static void fuzz_shard(const uint8_t* data, size_t nbytes) {
    char err[DATA_ERR_NBYTES] = "";
    DataLoader dl;
    const char* path = spill("shard.bin", data, nbytes);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        const int rc = dataloader_init(&dl, path, 1, 3, 1, 2, shuffle, 42, 1000, err);
        want_line(rc, err);
        if (rc == 0) { read_batches(&dl); }
        dataloader_free(&dl);
    }
}

// a saved position; the last byte says of which loader
static void fuzz_position(const uint8_t* data, size_t nbytes) {
    char err[DATA_ERR_NBYTES] = "", *file;
    DataLoader dl;
    if (access(in_folder("pos_1.bin"), F_OK) != 0) {
        for (int i = 0; i < 2; i++) {
            const size_t n = shard_file(&file, 2, 13 + 18 * i);
            (void)spill(i ? "pos_1.bin" : "pos_0.bin", file, n);
            free(file);
        }
    }
    const int shuffle = nbytes ? data[nbytes - 1] & 1 : 0;
    want(dataloader_init(&dl, in_folder("pos_*.bin"), 1, 3, 0, 1, shuffle, 42, 1000, err) == 0, "it opens",
         err);
    const size_t epochs = DATA_STATE_NBYTES / 8 > 7 ? 7 : 0;
    uint8_t copy[DATA_STATE_NBYTES];
    if (nbytes > 0 && nbytes - 1 <= sizeof copy) {
        uint64_t epoch;
        memset(copy, 0, sizeof copy);
        memcpy(copy, data, nbytes - 1);
        memcpy(&epoch, copy + 8 * epochs, sizeof epoch);
        // many epochs are walked through, which takes time and shows nothing new
        if (nbytes > 8 * (epochs + 1) && epoch < 1u << 31) {
            copy[8 * epochs + 2] = copy[8 * epochs + 3] = 0;
        }
        const int rc = dataloader_restore(&dl, copy, nbytes - 1, err);
        want_line(rc, err);
        read_batches(&dl);
    }
    dataloader_free(&dl);
}

// the parts of tp ranks 0 and 1 of 2, or of one that has all, if the model is small enough to be read
static void fuzz_model(const uint8_t* data, size_t nbytes) {
    char err[TRAIN_ERR] = "";
    GPTConfig c;
    int version;
    const char* path = spill("model.bin", data, nbytes);
    const int rc = checkpoint_read_header(path, &c, &version, err);
    want_line(rc, err);
    for (int tp = 1; rc == 0 && tp <= 2 && tp <= c.NH; tp++) {
        const TensorCuts cuts = {tp, tp - 1, 1, 1, 0};
        Tensors ts;
        tensors_init(&ts, c, cuts);
        floatX* params = (floatX*)malloc(ts.nelem * sizeof(floatX));
        float* master = (float*)malloc(ts.nelem * sizeof(float));
        want(params && master && ts.nelem < 64 * nbytes, "memory in proportion to the file", "");
        want_line(checkpoint_read_model(path, &ts, params, &ts, master, NULL, err), err);
        free(params);
        free(master);
    }
}

static void fuzz_state(const uint8_t* data, size_t nbytes) {
    char err[TRAIN_ERR] = "";
    const char* path = spill("state.bin", data, nbytes);
    const Tensors ts = whole(smallest());
    float* arrays = (float*)malloc(4 * ts.nelem * sizeof(float));
    CheckpointState st;
    floatX* params = (floatX*)(arrays + 3 * ts.nelem);
    want_line(checkpoint_read_state(path, &st, &ts, params, &ts, arrays, arrays + ts.nelem,
                                    arrays + 2 * ts.nelem, NULL, err),
              err);
    checkpoint_state_free(&st);
    free(arrays);
}

// the first two bytes: how many of the others are rank 0's file; the rest is rank 1's
static void fuzz_llmc(const uint8_t* data, size_t nbytes) {
    char err[TRAIN_ERR] = "", *model;
    const size_t n = model_file(&model, 5);
    const Tensors ts = whole(smallest());
    float* arrays = (float*)malloc(4 * ts.nelem * sizeof(float));
    floatX* params = (floatX*)(arrays + 3 * ts.nelem);
    LlmcPosition at;
    if (nbytes >= 2) {
        const size_t most = nbytes - 2, first = (size_t)data[0] | (size_t)data[1] << 8;
        const size_t k = first < most ? first : most;
        (void)spill("model_00000007.bin", model, n);
        (void)spill("DONE_00000007", "", 0);
        (void)spill("state_00000007_00000.bin", data + 2, k);
        (void)spill("state_00000007_00001.bin", data + 2 + k, most - k);
        const int found = checkpoint_find(folder, err), is = checkpoint_is_llmc(folder, 7);
        want(is && (found == 7 || found == -1), "it is found or passed over", err);
        const int rc = checkpoint_import_llmc(folder, 7, &at, &ts, params, &ts, arrays, arrays + ts.nelem,
                                              arrays + 2 * ts.nelem, NULL, err);
        want_line(rc, err);
        want((rc == 0) == (found == 7), "what is found can be read", err);
    }
    free(arrays);
    free(model);
}

static void fuzz_tokenizer(const uint8_t* data, size_t nbytes) {
    char err[DATA_ERR_NBYTES] = "";
    int ids[16];
    Tokenizer tk;
    const int rc = tokenizer_init(&tk, spill("tokenizer.bin", data, nbytes), err);
    want_line(rc, err);
    for (int id = -1; rc == 0 && id <= tk.V && id < 300; id++) {
        tokenizer_print(&tk, id, sink);
    }
    const int n = tokenizer_encode(&tk, "abc \xff\xfe abcabc", ids, 16);
    for (int i = 0; i < n; i++) {
        want(ids[i] >= 0 && ids[i] < tk.V, "an id of the tokenizer", "");
    }
    tokenizer_free(&tk);
}

static void fuzz_prompts(const uint8_t* data, size_t nbytes) {
    char err[TRAIN_ERR] = "", *file;
    TrainOptions opt;
    Tokenizer tk;
    Prompts p;
    const size_t n = tokenizer_file(&file);
    memset(&opt, 0, sizeof opt);
    opt.prompt = "", opt.sample_length = 16;
    opt.prompt_file = spill("prompts.txt", data, nbytes);
    want(tokenizer_init(&tk, spill("tokenizer.bin", file, n), err) == 0, "it opens", err);
    const int rc = prompts_init(&p, &opt, &tk, 256, 12, err);
    want_line(rc, err);
    want(rc || (p.n > 0 && p.longest < 12 && p.first[p.n] <= (int)nbytes), "prompts that fit", err);
    prompts_free(&p);
    tokenizer_free(&tk);
    free(file);
}

// a line of options, ended by zero bytes; what can be a model is cut as it would be for 2 ranks
static void fuzz_options(const uint8_t* data, size_t nbytes) {
    char err[TRAIN_ERR] = "", *text = (char*)malloc(nbytes + 1), *argv[64] = {(char*)"train_gpt"};
    int argc = 1;
    TrainOptions opt;
    GPTConfig c;
    memcpy(text, data, nbytes);
    text[nbytes] = 0;
    for (char* at = text; at < text + nbytes && argc < 63; at += strlen(at) + 1) {
        argv[argc++] = at;
    }
    const int rc = options_parse(&opt, argc, argv, err);
    want_line(rc, err);
    if (rc == 0 && opt.help) { options_help(sink, "train_gpt"); }
    const int kind = rc == 0 && !opt.help ? model_parse(opt.model, &c, err) : 1;
    want_line(kind, err);
    if (kind == 0) {
        const TensorCuts cuts = {2, 1, 1, 1, 0};
        Tensors ts;
        want(config_check(&c, err) == 0, "its sizes are a model's", err);
        if (c.NH >= 2) { tensors_init(&ts, c, cuts); }
    }
    free(text);
}

static void fuzz_debugstate(const uint8_t* data, size_t nbytes) {
    char err[TRAIN_ERR] = "";
    const GPTConfig c = smallest();
    DebugState d;
    want_line(debugstate_read(spill("debug.bin", data, nbytes), &c, &d, err), err);
    debugstate_free(&d);
}

// an example: 0xffff, bytes, number, label, 4, tokens of the context, completions, each behind its length
static size_t hellaswag_file(char** file) {
    const int32_t head[3] = {20240522, 1, 1};
    const uint16_t words[] = {65535, 34, 0, 2, 4, 2, 7, 8, 1, 3, 2, 4, 5, 1, 6, 1, 9};
    *file = file_of(head, 3, sizeof words);
    memcpy(*file + 1024, words, sizeof words);
    return 1024 + sizeof words;
}

static void fuzz_hellaswag(const uint8_t* data, size_t nbytes) {
    enum { T = 64 };
    char err[TRAIN_ERR] = "";
    int ids[T], targets[T];
    HellaSwag h;
    const int rc = hellaswag_open(&h, spill("hellaswag.bin", data, nbytes), 1000, T, err);
    want_line(rc, err);
    for (size_t i = 0; rc == 0 && i < 4 * (size_t)h.n + 1 && i < 100; i++) {
        const HellaSpan span = hellaswag_row(&h, i, T, ids, targets);
        want(span.begin >= 0 && span.end <= T, "a row that fits", "");
        for (int t = 0; t < T; t++) {
            want(ids[t] >= 0 && ids[t] < 1000 && targets[t] >= 0 && targets[t] < 1000, "tokens below V", "");
        }
    }
    hellaswag_close(&h);
}

// ---- folders ----------------------------------------------------------------------------------------------
static void make_entry(const char* dir, const char* name, int kind, const char* outside) {
    char path[400];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    if (!name[0] || strchr(name, '/') || strlen(name) > 100) { return; }
    if (kind == 0) {
        (void)!symlink(outside, path);
    } else if (kind == 1) {
        (void)mkfifo(path, 0600);
    } else if (kind == 2) {
        (void)mkdir(path, 0700);
    } else {
        const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
        if (fd >= 0) { close(fd); }
    }
}

// An output folder of what the lines say: the first byte which kind of file, the rest its name. Whatever is
// done in it, what a link in it leads to stays as it is.
static void fuzz_folder(const uint8_t* data, size_t nbytes) {
    char err[TRAIN_ERR] = "", text[512], dir[80], outside[80], rm[128], path[CHECKPOINT_PATH];
    FolderLock lock;
    Logger log;
    struct stat st;
    (void)snprintf(dir, sizeof dir, "%s/out", folder);
    (void)snprintf(outside, sizeof outside, "%s", spill("outside", "kept", 4));
    (void)mkdir(dir, 0700);
    nbytes = nbytes < sizeof text - 1 ? nbytes : sizeof text - 1;
    memcpy(text, data, nbytes);
    text[nbytes] = 0;
    for (char *at = text, *next; at; at = next) {
        next = strchr(at, '\n');
        if (next) { *next++ = 0; }
        if (at[0]) { make_entry(dir, at + 1, at[0] % 4, outside); }
    }
    int rc = checkpoint_prepare_folder(dir, &lock, err);
    want_line(rc, err);
    if (rc == 0) {
        want(checkpoint_find(dir, err) == -1, "no complete checkpoint", err);
        rc = logger_init(&log, dir, NULL, 0, 1, err) ? -1 : logger_val(&log, 1, 2.0f, err);
        want_line(rc, err);
        rc = checkpoint_write_done(dir, 8, err);
        want_line(rc, err);
        checkpoint_done_path(path, dir, 8);
        want(rc != 0 || (lstat(path, &st) == 0 && S_ISREG(st.st_mode)), "DONE is a file", err);
        want_line(checkpoint_prune(dir, 9, 1, 0, err), err);
        want_line(checkpoint_remove(dir, 8, err), err);
        lock_release(&lock);
    }
    want(stat(outside, &st) == 0 && st.st_size == 4, "nothing outside is written", outside);
    (void)snprintf(rm, sizeof rm, "rm -rf '%s'", dir);
    want(system(rm) == 0, "it is removed", dir);
}

// ---- which ------------------------------------------------------------------------------------------------
static const struct {
    const char* name;
    void (*run)(const uint8_t* data, size_t nbytes);
} targets[] = {{"shard", fuzz_shard},         {"position", fuzz_position}, {"model", fuzz_model},
               {"state", fuzz_state},         {"llmc", fuzz_llmc},         {"tokenizer", fuzz_tokenizer},
               {"prompts", fuzz_prompts},     {"options", fuzz_options},   {"debugstate", fuzz_debugstate},
               {"hellaswag", fuzz_hellaswag}, {"folder", fuzz_folder}};
static size_t target;

static void seed(const char* to, int number, const void* bytes, size_t nbytes) {
    char path[400];
    (void)snprintf(path, sizeof path, "%s/%s%d", to, targets[target].name, number);
    FILE* f = fopen(path, "wb");
    want(f && fwrite(bytes, 1, nbytes, f) == nbytes && fclose(f) == 0, "a seed is written", path);
}

static void seed_llmc(const char* to) {
    for (int i = 0; i < 4; i++) { // with ZeRO or one file that has all; shuffled or not
        char *a, *b, all[16384];
        const int nproc = 1 + i % 2;
        const size_t na = llmc_file(&a, 0, nproc, i / 2), nb = llmc_file(&b, 1, 2, i / 2);
        all[0] = (char)(na & 255), all[1] = (char)(na >> 8);
        memcpy(all + 2, a, na);
        memcpy(all + 2 + na, b, nb);
        seed(to, i, all, 2 + na + nb);
        free(a);
        free(b);
    }
}

static void write_seeds(const char* to) {
    static const char options[] = "-e\0d12\0-b\0004\0-t\00064\0-l\0003e-4\0--overlap\0slice:2\0--link\00050,"
                                  "5\0--trace\0x\0--trace-steps\0"
                                  "1-3\0-k\0cosine\0--max-steps=-1\0--dp\0002\0-z\0001";
    static const char sizes[] = "--model\0L=4,C=128,NH=4,V=256,maxT=64\0--tp=2\0--dry-run\0--world\0004";
    static const char names[] =
        "CDONE_00000007\nCmodel_00000007.bin\nCstate_00000007.bin\nDmodel_00000008.bin.tmp\nDDONE_00000008\n"
        "Dmain.log\nDtrain_gpt.lock\nCDONE_2147483647\nCDONE_99999999999\nCstate_00000007_00000.bin\n"
        "Ostate_00000008.bin\nEstate_00000009.bin.tmp\nNDONE_00000009";
    uint64_t position[DATA_STATE_NBYTES / 8] = {3, 0, 2, 44, 3, 1, 0, 1, 1, 2, 42};
    char *file = NULL, at[DATA_STATE_NBYTES + 1];
    size_t n = 0;
    const char* name = targets[target].name;
    for (int i = 0; i < 2; i++) {
        if (strcmp(name, "shard") == 0) {
            n = shard_file(&file, 2 + 2 * i, 40);
        } else if (strcmp(name, "model") == 0) {
            n = model_file(&file, 3 + 2 * i);
        } else if (strcmp(name, "state") == 0) {
            n = state_file(&file);
        } else if (strcmp(name, "tokenizer") == 0) {
            n = tokenizer_file(&file);
        } else if (strcmp(name, "hellaswag") == 0) {
            n = hellaswag_file(&file);
        } else if (strcmp(name, "debugstate") == 0) {
            debug_file(&file, &n);
        } else if (strcmp(name, "position") == 0) {
            position[1] = (uint64_t)i, position[6] = i ? INT32_MAX : 0;
            memcpy(at, position, sizeof position);
            at[sizeof position] = (char)i;
            seed(to, i, at, sizeof at);
        } else if (strcmp(name, "options") == 0) {
            seed(to, i, i ? sizes : options, i ? sizeof sizes : sizeof options);
        } else if (strcmp(name, "prompts") == 0) {
            seed(to, i, "The king\r\n\nA\n", 13);
        } else if (strcmp(name, "folder") == 0) {
            seed(to, i, names, sizeof names - 1);
        }
        if (file) { seed(to, i, file, n); }
        free(file);
        file = NULL;
    }
    if (strcmp(name, "llmc") == 0) { seed_llmc(to); }
}

static void remove_folder(void) {
    char rm[128];
    (void)snprintf(rm, sizeof rm, "rm -rf '%s'", folder);
    (void)!system(rm);
}

int LLVMFuzzerInitialize(int* argc, char*** argv) {
    (void)argc, (void)argv;
    const char *name = getenv("FUZZ"), *seeds = getenv("SEEDS");
    const size_t n = sizeof targets / sizeof *targets;
    while (name && target < n && strcmp(targets[target].name, name) != 0) {
        target++;
    }
    if (!name || target == n) { // what there is
        for (size_t i = 0; i < n; i++) {
            puts(targets[i].name);
        }
        exit(name != NULL);
    }
    const char* tmp = getenv("TMPDIR");
    const int length = snprintf(folder, sizeof folder, "%s/fuzz.XXXXXX", tmp ? tmp : "/tmp");
    want(length < (int)sizeof folder, "TMPDIR is short", tmp ? tmp : "");
    sink = fopen("/dev/null", "w");
    want(mkdtemp(folder) && sink, "a folder is made", folder);
    (void)atexit(remove_folder);
    if (seeds) {
        write_seeds(seeds);
        exit(0);
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
    targets[target].run(data, nbytes);
    return 0;
}
