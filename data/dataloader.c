/* dataloader.c -- token shards: opening and checking them, the order of llm.c, and the position for a resume.
 *
 * A shard is cut into samples of B*T*num_processes tokens; process r reads tokens [r*B*T, (r+1)*B*T] of a
 * sample, the last one as a target only. Formats: doc/formats.md.
 */
#include "data/dataloader.h"
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    HEADER_NBYTES = 1024,
    MAGIC_U16 = 20240520, // GPT-2 tokens, uint16
    VERSION_U16 = 1,
    MAGIC_U32 = 20240801, // Llama-3 tokens, uint32
    VERSION_U32 = 7,
    STATE_VERSION = 3,
    STATE_NFIELDS = DATA_STATE_NBYTES / 8
};

int data_error(char err[DATA_ERR_NBYTES], const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(err, DATA_ERR_NBYTES, fmt, args);
    va_end(args);
    data_one_line(err);
    return -1;
}

void data_one_line(char* text) {
    for (unsigned char* c = (unsigned char*)text; *c; c++) {
        if (*c < 32 || *c == 127) { *c = '?'; }
    }
}

FILE* data_open(const char* path, uint64_t* nbytes, const char** why) {
    struct stat st;
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    const int known = fd >= 0 && fstat(fd, &st) == 0, regular = known && S_ISREG(st.st_mode);
    FILE* f = regular ? fdopen(fd, "rb") : NULL;
    *why = known && !regular ? "it is not a regular file" : strerror(errno);
    *nbytes = regular ? (uint64_t)st.st_size : 0;
    if (!f && fd >= 0) { close(fd); }
    return f;
}

// ---- what a file is ---------------------------------------------------------------------------------------
const char* data_path_tail(const char* path) {
    size_t n = strlen(path), most = 100;
    return n > most ? path + n - most : path;
}

const char* data_file_kind(const void* head, size_t nbytes) {
    static const struct {
        uint32_t magic;
        const char* kind;
    } magics[] = {
        {MAGIC_U16, "a token shard"},     {MAGIC_U32, "a token shard"},
        {20240326, "a model checkpoint"}, {20240803, "a Llama model checkpoint"},
        {20240327, "a debug state"},      {20240328, "a tokenizer"},
        {20240522, "a HellaSwag set"},    {20240527, "an optimizer state of llm.c"},
        {20261129, "an optimizer state"},
    };
    static const struct {
        const char* start;
        const char* kind;
    } starts[] = {
        {"<!", "an HTML page (a download that failed?)"},
        {"<h", "an HTML page (a download that failed?)"},
        {"<H", "an HTML page (a download that failed?)"},
        {"<?", "an HTML or XML page (a download that failed?)"},
        {"version https://git-lfs", "a Git LFS pointer (git lfs pull fetches the file itself)"},
        {"\x1f\x8b", "compressed by gzip"},
        {"\x93NUMPY", "a NumPy array"},
    };
    const char* c = (const char*)head;
    uint32_t magic;
    if (nbytes >= sizeof magic) {
        memcpy(&magic, c, sizeof magic);
        for (size_t i = 0; i < sizeof magics / sizeof *magics; i++) {
            if (magic == magics[i].magic) { return magics[i].kind; }
        }
    }
    size_t space = 0;
    while (space < nbytes && strchr(" \t\r\n", c[space]) && c[space]) {
        space++;
    }
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        size_t n = strlen(starts[i].start);
        if (nbytes - space >= n && memcmp(c + space, starts[i].start, n) == 0) { return starts[i].kind; }
    }
    return NULL;
}

// ---- opening ----------------------------------------------------------------------------------------------
// the first bytes of a file that carries neither of the two magics -> why it is no shard
static int fail_magic(const char* path, const void* head, size_t nbytes, char* err) {
    const char* kind = data_file_kind(head, nbytes);
    if (kind) { return data_error(err, "%s is %s, not a token shard", path, kind); }
    if (nbytes < 4) { return data_error(err, "%s has %zu bytes, a shard's header has 1024", path, nbytes); }
    uint32_t magic;
    memcpy(&magic, head, sizeof magic);
    uint32_t swapped = __builtin_bswap32(magic);
    if (swapped == MAGIC_U16 || swapped == MAGIC_U32) {
        return data_error(err, "%s is big endian (its magic is %u byte-swapped); shards are little endian",
                          path, swapped);
    }
    int text = 1;
    for (size_t i = 0; i < nbytes; i++) {
        unsigned char c = ((const unsigned char*)head)[i];
        text &= c >= 32 || c == '\n' || c == '\r' || c == '\t';
    }
    if (text) {
        return data_error(err, "%s looks like text: data/prepare.py makes token shards of it", path);
    }
    return data_error(err, "%s starts with %u, a token shard with %d (uint16) or %d (uint32)", path, magic,
                      MAGIC_U16, MAGIC_U32);
}

// fills s->ntok and s->width from the header and the size of the file
static int check_header(DataShard* s, FILE* f, uint64_t nbytes, char* err) {
    const char* path = data_path_tail(s->path);
    unsigned char head[HEADER_NBYTES];
    if (nbytes == 0) { return data_error(err, "%s is empty (0 bytes)", path); }
    size_t n = fread(head, 1, sizeof head, f);
    if (ferror(f)) { return data_error(err, "%s: %s", path, strerror(errno)); }
    int32_t word[3] = {0};
    if (n >= sizeof word) { memcpy(word, head, sizeof word); }
    if (word[0] != MAGIC_U16 && word[0] != MAGIC_U32) { return fail_magic(path, head, n, err); }
    if (n < sizeof head) {
        return data_error(err, "%s has %zu bytes, a shard's header alone has 1024: truncated?", path, n);
    }
    int version = word[0] == MAGIC_U16 ? VERSION_U16 : VERSION_U32;
    if (word[1] != version) {
        return data_error(err, "%s has version %d; with magic %d only version %d is known", path, word[1],
                          word[0], version);
    }
    if (word[2] <= 0) {
        return data_error(err, "%s says in its header that it has %d tokens", path, word[2]);
    }
    s->ntok = (size_t)word[2];
    s->width = word[0] == MAGIC_U16 ? 2 : 4;
    size_t want = HEADER_NBYTES + (size_t)s->width * s->ntok;
    if (nbytes != want) {
        return data_error(err,
                          "%s has %zu bytes, but the %zu tokens of its header make 1024 + %d*%zu = %zu bytes",
                          path, (size_t)nbytes, s->ntok, s->width, s->ntok, want);
    }
    return 0;
}

// enough tokens for one sample of all processes, and the target of its last token?
static int check_length(const DataLoader* dl, const DataShard* s, char* err) {
    size_t P = (size_t)dl->num_processes, T = (size_t)dl->T, need = (size_t)dl->B * T * P + 1;
    if (s->ntok >= need) { return 0; }
    const char* path = data_path_tail(s->path);
    char works[64];
    if (s->ntok > T * P) {
        snprintf(works, sizeof works, "B=%zu works", (s->ntok - 1) / (T * P));
    } else if (s->ntok > P) {
        snprintf(works, sizeof works, "B=1 T=%zu works", (s->ntok - 1) / P);
    } else {
        snprintf(works, sizeof works, "join it with another shard");
    }
    return data_error(err, "%s has %zu tokens, but B=%d * T=%d * %d processes + 1 = %zu are needed: %s", path,
                      s->ntok, dl->B, dl->T, dl->num_processes, need, works);
}

static FILE* open_shard(const char* path, uint64_t* nbytes, char* err) {
    const char* why;
    FILE* f = data_open(path, nbytes, &why);
    if (!f) { (void)data_error(err, "can't open %s: %s", data_path_tail(path), why); }
    return f;
}

static int check_shard(const DataLoader* dl, DataShard* s, char* err) {
    uint64_t nbytes;
    FILE* f = open_shard(s->path, &nbytes, err);
    if (!f) { return -1; }
    int bad = check_header(s, f, nbytes, err);
    fclose(f);
    return bad ? -1 : check_length(dl, s, err);
}

static int list_shards(DataLoader* dl, const char* pattern, char* err) {
    glob_t found;
    int rc = glob(pattern, 0, NULL, &found);
    if (rc != 0) {
        globfree(&found);
        return rc == GLOB_NOMATCH
                   ? data_error(err, "no file matches '%s' (data/shakespeare.sh makes shards to try)",
                                data_path_tail(pattern))
                   : data_error(err, "can't search for '%s': %s", data_path_tail(pattern),
                                rc == GLOB_NOSPACE ? "out of memory" : strerror(errno));
    }
    dl->shard = (DataShard*)calloc(found.gl_pathc, sizeof *dl->shard);
    while (dl->shard && dl->nshards < found.gl_pathc) {
        dl->shard[dl->nshards].path = strdup(found.gl_pathv[dl->nshards]);
        if (!dl->shard[dl->nshards].path) { break; }
        dl->nshards++;
    }
    int all = dl->nshards == found.gl_pathc;
    globfree(&found);
    return all ? 0 : data_error(err, "out of memory for the list of shards");
}

static int open_all(DataLoader* dl, const char* pattern, char* err) {
    if (dl->B < 1 || dl->T < 1 || dl->V < 1 || dl->num_processes < 1 || dl->process_rank < 0 ||
        dl->process_rank >= dl->num_processes) {
        return data_error(err, "can't read batches of B=%d T=%d for process %d of %d with a vocabulary of %d",
                          dl->B, dl->T, dl->process_rank, dl->num_processes, dl->V);
    }
    if (list_shards(dl, pattern, err) != 0) { return -1; }
    for (size_t i = 0; i < dl->nshards; i++) {
        if (check_shard(dl, &dl->shard[i], err) != 0) { return -1; }
        dl->ntok += dl->shard[i].ntok;
    }
    size_t n = (size_t)dl->B * (size_t)dl->T;
    dl->inputs = (int*)malloc(n * sizeof(int));
    dl->targets = (int*)malloc(n * sizeof(int));
    dl->buffer = malloc((n + 1) * sizeof(uint32_t));
    dl->shard_indices = (int*)malloc(dl->nshards * sizeof(int));
    if (!dl->inputs || !dl->targets || !dl->buffer || !dl->shard_indices) {
        return data_error(err, "out of memory for a batch of %zu tokens", n);
    }
    return dataloader_reset(dl, err);
}

int dataloader_init(DataLoader* dl, const char* pattern, int B, int T, int process_rank, int num_processes,
                    int should_shuffle, int seed, int V, char err[DATA_ERR_NBYTES]) {
    memset(dl, 0, sizeof *dl);
    dl->B = B;
    dl->T = T;
    dl->process_rank = process_rank;
    dl->num_processes = num_processes;
    dl->should_shuffle = should_shuffle != 0;
    dl->seed = seed;
    dl->V = V;
    if (open_all(dl, pattern, err) == 0) { return 0; }
    dataloader_free(dl);
    return -1;
}

void dataloader_free(DataLoader* dl) {
    for (size_t i = 0; i < dl->nshards; i++) {
        free(dl->shard[i].path);
    }
    free(dl->shard);
    free(dl->shard_indices);
    free(dl->intra_shard_indices);
    free(dl->inputs);
    free(dl->targets);
    free(dl->buffer);
    if (dl->file) { fclose(dl->file); }
    memset(dl, 0, sizeof *dl);
}

// ---- order ------------------------------------------------------------------------------------------------
static size_t tokens_per_sample(const DataLoader* dl) {
    return (size_t)dl->B * (size_t)dl->T * (size_t)dl->num_processes;
}

static size_t samples_in(const DataLoader* dl, size_t shard) {
    return (dl->shard[shard].ntok - 1) / tokens_per_sample(dl);
}

size_t dataloader_samples(const DataLoader* dl) {
    size_t n = 0;
    for (size_t i = 0; i < dl->nshards; i++) {
        n += samples_in(dl, i);
    }
    return n;
}

/* Walk -- the order in which a process reads: what it draws, and nothing of files.
 *
 * Its arrays and generator may be a loader's, or those of another process that is followed.
 */
typedef struct {
    Rng rng;
    size_t epoch, shard_idx;
    int* shards;  // [nshards], the order in this epoch
    int* samples; // the order of the shard's samples, room for those of any; NULL: not shuffled
} Walk;

static void walk_free(Walk* w) {
    free(w->shards);
    free(w->samples);
}

// an array for the samples of any shard
static int walk_init(Walk* w, const DataLoader* dl, char* err) {
    size_t most = 0;
    for (size_t i = 0; i < dl->nshards; i++) {
        most = samples_in(dl, i) > most ? samples_in(dl, i) : most;
    }
    memset(w, 0, sizeof *w);
    w->shards = (int*)malloc(dl->nshards * sizeof(int));
    w->samples = dl->should_shuffle ? (int*)malloc(most * sizeof(int)) : NULL;
    if (w->shards && (w->samples || !dl->should_shuffle)) { return 0; }
    walk_free(w);
    return data_error(err, "out of memory for the order of %zu shards", dl->nshards);
}

static size_t walk_nsamples(const Walk* w, const DataLoader* dl) {
    return samples_in(dl, (size_t)w->shards[w->shard_idx]);
}

static void walk_shard(Walk* w, const DataLoader* dl, size_t idx) {
    w->shard_idx = idx;
    if (w->samples) {
        rng_identity(w->samples, walk_nsamples(w, dl));
        rng_permute(&w->rng, w->samples, walk_nsamples(w, dl));
    }
}

static void walk_epoch(Walk* w, const DataLoader* dl, size_t epoch) {
    w->epoch = epoch;
    if (w->samples) { rng_permute(&w->rng, w->shards, dl->nshards); }
    walk_shard(w, dl, 0);
}

// to the beginning of an epoch, as process `rank` got there
static void walk_start(Walk* w, const DataLoader* dl, int rank, size_t epoch) {
    rng_seed(&w->rng, (uint32_t)dl->seed + (uint32_t)rank);
    rng_identity(w->shards, dl->nshards);
    walk_epoch(w, dl, 0);
    while (w->samples && w->epoch < epoch) {
        while (w->shard_idx + 1 < dl->nshards) {
            walk_shard(w, dl, w->shard_idx + 1);
        }
        walk_epoch(w, dl, w->epoch + 1);
    }
    w->epoch = epoch;
}

// the loader takes over a walk of its own process; if the shard cannot be opened, nothing has changed
static int follow(DataLoader* dl, Walk* w, size_t sample_idx, char* err) {
    uint64_t nbytes;
    FILE* f = open_shard(dl->shard[w->shards[w->shard_idx]].path, &nbytes, err);
    if (!f) {
        walk_free(w);
        return -1;
    }
    if (dl->file) { fclose(dl->file); }
    free(dl->shard_indices);
    free(dl->intra_shard_indices);
    dl->file = f;
    dl->rng = w->rng;
    dl->epoch = w->epoch;
    dl->current_shard_idx = w->shard_idx;
    dl->current_sample_idx = sample_idx;
    dl->shard_num_samples = walk_nsamples(w, dl);
    dl->shard_indices = w->shards;
    dl->intra_shard_indices = w->samples;
    return 0;
}

int dataloader_reset(DataLoader* dl, char err[DATA_ERR_NBYTES]) {
    Walk w;
    if (walk_init(&w, dl, err) != 0) { return -1; }
    walk_start(&w, dl, dl->process_rank, 0);
    return follow(dl, &w, 0, err);
}

int dataloader_seek(DataLoader* dl, int rank, size_t epoch, size_t shard_idx, size_t sample_idx,
                    char err[DATA_ERR_NBYTES]) {
    Walk w;
    if (shard_idx >= dl->nshards) {
        return data_error(err, "no shard %zu in the order of %zu", shard_idx, dl->nshards);
    }
    if (walk_init(&w, dl, err) != 0) { return -1; }
    walk_start(&w, dl, rank, epoch);
    size_t batches = 0; // of the epoch that were read before this shard
    while (w.shard_idx < shard_idx) {
        batches += walk_nsamples(&w, dl);
        walk_shard(&w, dl, w.shard_idx + 1);
    }
    if (sample_idx > walk_nsamples(&w, dl)) { sample_idx = walk_nsamples(&w, dl); }
    if (rank != dl->process_rank) { // that was another's order: as many batches in the own one
        batches += sample_idx;
        walk_start(&w, dl, dl->process_rank, epoch);
        while (batches > walk_nsamples(&w, dl)) {
            batches -= walk_nsamples(&w, dl);
            walk_shard(&w, dl, w.shard_idx + 1);
        }
        sample_idx = batches;
    }
    return follow(dl, &w, sample_idx, err);
}

// to the shard after the current one, in the next epoch after the last
static int next_shard(DataLoader* dl, char* err) {
    Walk w;
    if (walk_init(&w, dl, err) != 0) { return -1; }
    w.rng = dl->rng;
    memcpy(w.shards, dl->shard_indices, dl->nshards * sizeof(int));
    w.epoch = dl->epoch;
    if (dl->current_shard_idx + 1 < dl->nshards) {
        walk_shard(&w, dl, dl->current_shard_idx + 1);
    } else {
        walk_epoch(&w, dl, dl->epoch + 1);
    }
    return follow(dl, &w, 0, err);
}

// where this process' part of a sample of the current shard begins, in tokens
static size_t sample_at(const DataLoader* dl, size_t sample_idx) {
    const size_t sample = dl->should_shuffle ? (size_t)dl->intra_shard_indices[sample_idx] : sample_idx;
    return sample * tokens_per_sample(dl) + (size_t)dl->process_rank * (size_t)dl->B * (size_t)dl->T;
}

// the sample after the current one comes into the page cache while this one is computed: a disk may take
// longer to get there than a small step lasts
static void prefetch(const DataLoader* dl, size_t width) {
    if (dl->current_sample_idx + 1 >= dl->shard_num_samples) { return; }
    const size_t first = sample_at(dl, dl->current_sample_idx + 1), n = (size_t)dl->B * (size_t)dl->T + 1;
    (void)posix_fadvise(fileno(dl->file), (off_t)(HEADER_NBYTES + first * width), (off_t)(n * width),
                        POSIX_FADV_WILLNEED);
}

static int read_sample(DataLoader* dl, char* err) {
    size_t n = (size_t)dl->B * (size_t)dl->T, first = sample_at(dl, dl->current_sample_idx);
    const DataShard* s = &dl->shard[dl->shard_indices[dl->current_shard_idx]];
    const char* path = data_path_tail(s->path);
    dl->batch_path = s->path, dl->batch_first = first;
    off_t at = (off_t)(HEADER_NBYTES + first * (size_t)s->width);
    if (fseeko(dl->file, at, SEEK_SET) != 0 ||
        fread(dl->buffer, (size_t)s->width, n + 1, dl->file) != n + 1) {
        return data_error(err, "can't read %zu tokens at position %zu of %s: %s", n + 1, first, path,
                          ferror(dl->file) ? strerror(errno) : "the file has become shorter");
    }
    prefetch(dl, (size_t)s->width);
    const uint16_t* u16 = (const uint16_t*)dl->buffer;
    const uint32_t* u32 = (const uint32_t*)dl->buffer;
    for (size_t i = 0; i <= n; i++) {
        uint32_t token = s->width == 2 ? u16[i] : u32[i];
        if (token >= (uint32_t)dl->V) {
            return data_error(err, "token %u at position %zu of %s is not below the vocabulary, V=%d", token,
                              first + i, path, dl->V);
        }
        if (i < n) { dl->inputs[i] = (int)token; }
        if (i > 0) { dl->targets[i - 1] = (int)token; }
    }
    return 0;
}

int dataloader_next_batch(DataLoader* dl, char err[DATA_ERR_NBYTES]) {
    if (dl->current_sample_idx >= dl->shard_num_samples && next_shard(dl, err) != 0) { return -1; }
    if (read_sample(dl, err) != 0) { return -1; }
    dl->current_sample_idx++;
    return 0;
}

// ---- position ---------------------------------------------------------------------------------------------
// what a saved position consists of; the first four, and the seed, must be what the loader has
enum {
    S_VERSION,
    S_SHUFFLE,
    S_NSHARDS,
    S_NTOK,
    S_BT,
    S_NPROCESSES,
    S_RANK,
    S_EPOCH,
    S_SHARD,
    S_SAMPLE,
    S_SEED
};

void dataloader_save(const DataLoader* dl, void* bytes) {
    const uint64_t f[STATE_NFIELDS] = {STATE_VERSION,
                                       (uint64_t)dl->should_shuffle,
                                       dl->nshards,
                                       dl->ntok,
                                       (uint64_t)dl->B * (uint64_t)dl->T,
                                       (uint64_t)dl->num_processes,
                                       (uint64_t)dl->process_rank,
                                       dl->epoch,
                                       dl->current_shard_idx,
                                       dl->current_sample_idx,
                                       dl->should_shuffle ? (uint64_t)dl->seed : 0};
    memcpy(bytes, f, sizeof f);
}

int dataloader_restore(DataLoader* dl, const void* bytes, size_t nbytes, char err[DATA_ERR_NBYTES]) {
    static const char* const what[] = {"version", "shuffle", "number of shards", "number of tokens"};
    uint64_t f[STATE_NFIELDS], want[STATE_NFIELDS];
    if (nbytes != sizeof f && nbytes != S_SEED * sizeof *f) {
        return data_error(err, "the saved position in the data is damaged: %zu bytes, want %zu", nbytes,
                          sizeof f);
    }
    memset(f, 0, sizeof f);
    memcpy(f, bytes, nbytes);
    if (f[S_VERSION] == 2 && nbytes < sizeof f) { // it had no seed, which was 42
        f[S_VERSION] = STATE_VERSION;
        f[S_SEED] = f[S_SHUFFLE] ? 42 : 0;
    }
    dataloader_save(dl, want);
    for (int i = 0; i <= S_NTOK; i++) {
        if (f[i] != want[i]) {
            return data_error(err, "the saved position in the data is for another %s: %llu, not %llu",
                              what[i], (unsigned long long)f[i], (unsigned long long)want[i]);
        }
    }
    if (f[S_SEED] != want[S_SEED]) {
        return data_error(err, "the saved position in the data is for another seed: %llu, not %llu",
                          (unsigned long long)f[S_SEED], (unsigned long long)want[S_SEED]);
    }
    // all are bounded before they are multiplied; and so are samples of earlier epochs, whose order is drawn
    // again
    const uint64_t most = 1u << 31, most_epochs = dl->should_shuffle ? most / dataloader_samples(dl) : most;
    if (f[S_BT] < 1 || f[S_BT] > most || f[S_NPROCESSES] < 1 || f[S_NPROCESSES] > most || f[S_RANK] >= most ||
        f[S_EPOCH] > most_epochs || f[S_SHARD] >= dl->nshards || f[S_SAMPLE] > most ||
        f[S_SAMPLE] * f[S_NPROCESSES] > dl->ntok || f[S_SAMPLE] * f[S_NPROCESSES] * f[S_BT] > dl->ntok) {
        return data_error(err,
                          "the saved position in the data is damaged: epoch %llu, shard %llu of %zu, sample "
                          "%llu of %llu tokens",
                          (unsigned long long)f[S_EPOCH], (unsigned long long)f[S_SHARD], dl->nshards,
                          (unsigned long long)f[S_SAMPLE], (unsigned long long)(f[S_BT] * f[S_NPROCESSES]));
    }
    const size_t before = (size_t)(f[S_BT] * f[S_NPROCESSES]), now = tokens_per_sample(dl);
    const size_t ntok = (size_t)f[S_SAMPLE] * before; // of the shard
    if (dataloader_seek(dl, (int)f[S_RANK], (size_t)f[S_EPOCH], (size_t)f[S_SHARD], ntok / now, err) != 0) {
        return -1;
    }
    err[0] = 0;
    if (before != now) {
        (void)data_error(err,
                         "a step's batch was %zu tokens and is %zu: the data go on at token %zu of the shard",
                         before, now, ntok / now * now);
    }
    return 0;
}
