/* dataloader.c -- token shards: opening and checking them, the order of llm.c, and the position for a resume.
 *
 * A shard is cut into samples of B*T*num_processes tokens; process r reads tokens [r*B*T, (r+1)*B*T] of a
 * sample, the last one as a target only. Formats: doc/formats.md.
 */
#include "data/dataloader.h"
#include <errno.h>
#include <glob.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    HEADER_NBYTES = 1024,
    MAGIC_U16 = 20240520, // GPT-2 tokens, uint16
    VERSION_U16 = 1,
    MAGIC_U32 = 20240801, // Llama-3 tokens, uint32
    VERSION_U32 = 7,
    SEED = 42,
    STATE_VERSION = 1,
    STATE_NFIELDS = 10
};

int data_error(char err[DATA_ERR_NBYTES], const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(err, DATA_ERR_NBYTES, fmt, args);
    va_end(args);
    return -1;
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
        return data_error(err, "%s looks like text: data/prepare_text.py makes token shards of it", path);
    }
    return data_error(err, "%s starts with %u, a token shard with %d (uint16) or %d (uint32)", path, magic,
                      MAGIC_U16, MAGIC_U32);
}

// fills s->ntok and s->width from the header and the size of the file
static int check_header(DataShard* s, FILE* f, char* err) {
    const char* path = data_path_tail(s->path);
    unsigned char head[HEADER_NBYTES];
    struct stat st;
    if (fstat(fileno(f), &st) != 0) { return data_error(err, "%s: %s", path, strerror(errno)); }
    if (!S_ISREG(st.st_mode)) { return data_error(err, "%s is not a regular file", path); }
    if (st.st_size == 0) { return data_error(err, "%s is empty (0 bytes)", path); }
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
    if ((size_t)st.st_size != want) {
        return data_error(err,
                          "%s has %zu bytes, but the %zu tokens of its header make 1024 + %d*%zu = %zu bytes",
                          path, (size_t)st.st_size, s->ntok, s->width, s->ntok, want);
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

static int check_shard(const DataLoader* dl, DataShard* s, char* err) {
    FILE* f = fopen(s->path, "rb");
    if (!f) { return data_error(err, "can't open %s: %s", data_path_tail(s->path), strerror(errno)); }
    int bad = check_header(s, f, err);
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
    rng_identity(dl->shard_indices, dl->nshards);
    rng_seed(&dl->rng, (uint32_t)(SEED + dl->process_rank));
    return dataloader_reset(dl, err);
}

int dataloader_init(DataLoader* dl, const char* pattern, int B, int T, int process_rank, int num_processes,
                    int should_shuffle, int V, char err[DATA_ERR_NBYTES]) {
    memset(dl, 0, sizeof *dl);
    dl->B = B;
    dl->T = T;
    dl->process_rank = process_rank;
    dl->num_processes = num_processes;
    dl->should_shuffle = should_shuffle != 0;
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

// Opens the shard at position `idx` of an order. Changes nothing when it fails.
static int open_shard(DataLoader* dl, size_t idx, const int* order, char* err) {
    size_t shard = (size_t)order[idx];
    FILE* f = fopen(dl->shard[shard].path, "rb");
    if (!f) {
        return data_error(err, "can't open %s: %s", data_path_tail(dl->shard[shard].path), strerror(errno));
    }
    if (dl->file) { fclose(dl->file); }
    dl->file = f;
    dl->current_shard_idx = idx;
    dl->shard_num_samples = samples_in(dl, shard);
    return 0;
}

// goes to the start of the shard at position idx
static int start_shard(DataLoader* dl, size_t idx, char* err) {
    if (open_shard(dl, idx, dl->shard_indices, err) != 0) { return -1; }
    dl->current_sample_idx = 0;
    if (dl->should_shuffle) {
        free(dl->intra_shard_indices);
        dl->intra_shard_indices = (int*)malloc(dl->shard_num_samples * sizeof(int));
        if (!dl->intra_shard_indices) {
            dl->shard_num_samples = 0;
            return data_error(err, "out of memory for the order of a shard's samples");
        }
        rng_identity(dl->intra_shard_indices, dl->shard_num_samples);
        rng_permute(&dl->rng, dl->intra_shard_indices, dl->shard_num_samples);
    }
    return 0;
}

int dataloader_reset(DataLoader* dl, char err[DATA_ERR_NBYTES]) {
    if (dl->should_shuffle) { rng_permute(&dl->rng, dl->shard_indices, dl->nshards); }
    return start_shard(dl, 0, err);
}

static int read_sample(DataLoader* dl, char* err) {
    size_t n = (size_t)dl->B * (size_t)dl->T;
    size_t sample =
        dl->should_shuffle ? (size_t)dl->intra_shard_indices[dl->current_sample_idx] : dl->current_sample_idx;
    size_t first = sample * tokens_per_sample(dl) + (size_t)dl->process_rank * n;
    const DataShard* s = &dl->shard[dl->shard_indices[dl->current_shard_idx]];
    const char* path = data_path_tail(s->path);
    off_t at = (off_t)(HEADER_NBYTES + first * (size_t)s->width);
    if (fseeko(dl->file, at, SEEK_SET) != 0 ||
        fread(dl->buffer, (size_t)s->width, n + 1, dl->file) != n + 1) {
        return data_error(err, "can't read %zu tokens at position %zu of %s: %s", n + 1, first, path,
                          ferror(dl->file) ? strerror(errno) : "the file has become shorter");
    }
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
    if (dl->current_sample_idx >= dl->shard_num_samples) {
        int last = dl->current_shard_idx + 1 >= dl->nshards;
        if ((last ? dataloader_reset(dl, err) : start_shard(dl, dl->current_shard_idx + 1, err)) != 0) {
            return -1;
        }
    }
    if (read_sample(dl, err) != 0) { return -1; }
    dl->current_sample_idx++;
    return 0;
}

// ---- position ---------------------------------------------------------------------------------------------
// The fields that open a state. All but the last three must be what the loader has: it would read other
// tokens.
static void state_fields(const DataLoader* dl, uint64_t f[STATE_NFIELDS]) {
    f[0] = STATE_VERSION;
    f[1] = (uint64_t)dl->B * (uint64_t)dl->T;
    f[2] = (uint64_t)dl->process_rank;
    f[3] = (uint64_t)dl->num_processes;
    f[4] = (uint64_t)dl->should_shuffle;
    f[5] = dl->nshards;
    f[6] = dl->ntok;
    f[7] = dl->current_shard_idx;
    f[8] = dl->current_sample_idx;
    f[9] = dl->shard_num_samples;
}

static size_t state_nbytes(const uint64_t f[STATE_NFIELDS]) {
    size_t fields = STATE_NFIELDS * sizeof(uint64_t);
    return f[4] ? fields + (size_t)(f[5] + f[9]) * sizeof(int32_t) + (RNG_N + 1) * sizeof(uint32_t) : fields;
}

size_t dataloader_state_nbytes(const DataLoader* dl) {
    uint64_t f[STATE_NFIELDS];
    state_fields(dl, f);
    return state_nbytes(f);
}

static char* put(char* to, const void* from, size_t nbytes) {
    memcpy(to, from, nbytes);
    return to + nbytes;
}

static const char* take(void* to, const char* from, size_t nbytes) {
    memcpy(to, from, nbytes);
    return from + nbytes;
}

void dataloader_save(const DataLoader* dl, void* bytes) {
    uint64_t f[STATE_NFIELDS];
    state_fields(dl, f);
    char* p = put((char*)bytes, f, sizeof f);
    if (dl->should_shuffle) {
        p = put(p, dl->shard_indices, dl->nshards * sizeof(int));
        p = put(p, dl->intra_shard_indices, dl->shard_num_samples * sizeof(int));
        p = put(p, dl->rng.state, sizeof dl->rng.state);
        put(p, &dl->rng.next, sizeof dl->rng.next);
    }
}

static int below(const int* a, size_t n, size_t limit) {
    for (size_t i = 0; i < n; i++) {
        if (a[i] < 0 || (size_t)a[i] >= limit) { return 0; }
    }
    return 1;
}

// does the state belong to this loader's data and shape?
static int check_fields(const DataLoader* dl, const uint64_t f[STATE_NFIELDS], size_t nbytes, char* err) {
    static const char* const what[STATE_NFIELDS] = {
        "version", "B*T", "process rank", "number of processes", "shuffle", "shards", "tokens"};
    uint64_t want[STATE_NFIELDS];
    state_fields(dl, want);
    for (int i = 0; i < 7; i++) {
        if (f[i] != want[i]) {
            return data_error(err, "the saved position in the data is for another %s: %llu, not %llu",
                              what[i], (unsigned long long)f[i], (unsigned long long)want[i]);
        }
    }
    // the fields are bounded before they are added up
    if (f[7] >= dl->nshards || f[9] > dl->ntok || f[8] > f[9] || state_nbytes(f) != nbytes) {
        return data_error(
            err,
            "the saved position in the data is damaged: %zu bytes, shard %llu of %zu, sample %llu of %llu",
            nbytes, (unsigned long long)f[7], dl->nshards, (unsigned long long)f[8],
            (unsigned long long)f[9]);
    }
    return 0;
}

// Reads order, intra and rng, which follow the fields when shuffled, and goes there; nothing changes when it
// fails.
static int restore_at(DataLoader* dl, const uint64_t f[STATE_NFIELDS], const char* p, int* order, int* intra,
                      char* err) {
    Rng rng = dl->rng;
    if (dl->should_shuffle) {
        p = take(order, p, dl->nshards * sizeof(int));
        p = take(intra, p, (size_t)f[9] * sizeof(int));
        p = take(rng.state, p, sizeof rng.state);
        take(&rng.next, p, sizeof rng.next);
    } else {
        rng_identity(order, dl->nshards);
    }
    if (!below(order, dl->nshards, dl->nshards) || rng.next > RNG_N ||
        (dl->should_shuffle && !below(intra, (size_t)f[9], (size_t)f[9]))) {
        return data_error(
            err, "the saved position in the data is damaged: its order of shards or samples is none");
    }
    size_t nsamples = samples_in(dl, (size_t)order[f[7]]);
    if (f[9] != nsamples) {
        return data_error(err,
                          "the saved position in the data is for a shard of %llu samples, but %s has %zu",
                          (unsigned long long)f[9], data_path_tail(dl->shard[order[f[7]]].path), nsamples);
    }
    if (open_shard(dl, (size_t)f[7], order, err) != 0) { return -1; }
    dl->current_sample_idx = (size_t)f[8];
    dl->rng = rng;
    return 0;
}

int dataloader_restore(DataLoader* dl, const void* bytes, size_t nbytes, char err[DATA_ERR_NBYTES]) {
    uint64_t f[STATE_NFIELDS];
    if (nbytes < sizeof f) {
        return data_error(
            err, "the saved position in the data is damaged: it has %zu bytes, at least %zu are needed",
            nbytes, sizeof f);
    }
    const char* p = take(f, (const char*)bytes, sizeof f);
    if (check_fields(dl, f, nbytes, err) != 0) { return -1; }
    int* order = (int*)malloc(dl->nshards * sizeof(int));
    int* intra = (int*)malloc(((size_t)f[9] + 1) * sizeof(int));
    int bad = order && intra ? restore_at(dl, f, p, order, intra, err)
                             : data_error(err, "out of memory for the order of data");
    if (!bad && dl->should_shuffle) {
        free(dl->shard_indices);
        free(dl->intra_shard_indices);
        dl->shard_indices = order;
        dl->intra_shard_indices = intra;
        return 0;
    }
    free(order);
    free(intra);
    return bad;
}
