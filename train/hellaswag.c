// hellaswag.c -- see hellaswag.h.
#include "train/hellaswag.h"
#include "data/dataloader.h" // what a file is
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADER_NBYTES = 1024,
    MAGIC = 20240522,
    VERSION = 1,
    START = 65535,           // the first word of an example
    MOST_NBYTES = 256 << 20, // of a file; llm.c's has 3.6 MB
    START_AT = 0,            // words of an example:
    NBYTES_AT,               // all of it
    INDEX_AT,                // its number
    LABEL_AT,                // the completion that is right
    WAYS_AT,                 // completions
    NCONTEXT_AT,             // tokens of the context, which follow; then of each completion its own
    CONTEXT_AT,
    FEWEST = CONTEXT_AT + 1 + 2 * HELLASWAG_WAYS // words of the shortest example
};

// ---- checks -----------------------------------------------------------------------------------------------
// n tokens that are none of a model's vocabulary?
static int check_tokens(const char* path, int i, const uint16_t* tokens, size_t n, int V, char* err) {
    for (size_t k = 0; k < n; k++) {
        if (tokens[k] >= V) {
            return train_error(err, "%s: example %d: token %u is not below the vocabulary, V=%d", path, i,
                               tokens[k], V);
        }
    }
    return 0;
}

// what the first words of example i say, in `left` words of the file
static int check_head(const char* path, int i, const uint16_t* x, size_t left, char* err) {
    if (left < FEWEST) { return train_error(err, "%s: ends within example %d: truncated?", path, i); }
    if (x[START_AT] != START) {
        return train_error(err, "%s: example %d begins with %u, want %d", path, i, x[START_AT], START);
    }
    if (x[NBYTES_AT] % 2 || x[NBYTES_AT] / 2 < FEWEST || x[NBYTES_AT] / 2u > left) {
        return train_error(err, "%s: example %d says that it has %u bytes; want an even number of %d to %zu",
                           path, i, x[NBYTES_AT], 2 * FEWEST, 2 * left);
    }
    if (x[INDEX_AT] != i % 65536) {
        return train_error(err, "%s: example %d says that it is number %u", path, i, x[INDEX_AT]);
    }
    if (x[WAYS_AT] != HELLASWAG_WAYS) {
        return train_error(err, "%s: example %d has %u completions, want %d", path, i, x[WAYS_AT],
                           HELLASWAG_WAYS);
    }
    if (x[LABEL_AT] >= HELLASWAG_WAYS) {
        return train_error(err, "%s: example %d: completion %u is said to be right, want 0 to %d", path, i,
                           x[LABEL_AT], HELLASWAG_WAYS - 1);
    }
    return 0;
}

// example i, which begins at x; *longest: as in HellaSwag
static int check_example(const char* path, int i, const uint16_t* x, size_t left, int V, int* longest,
                         char* err) {
    if (check_head(path, i, x, left, err) != 0) { return -1; }
    const size_t nwords = x[NBYTES_AT] / 2u, ncontext = x[NCONTEXT_AT];
    size_t at = NCONTEXT_AT;
    for (int way = -1; way < HELLASWAG_WAYS; way++) { // the context, then the completions
        const size_t n = at < nwords ? x[at] : 0;
        if (n == 0 || n >= nwords - at) {
            return train_error(
                err, "%s: example %d: its %s has %zu tokens, %zu bytes before the example ends", path, i,
                way < 0 ? "context" : "completion", n, at < nwords ? 2 * (nwords - at - 1) : (size_t)0);
        }
        if (check_tokens(path, i, x + at + 1, n, V, err) != 0) { return -1; }
        const int row = (int)(ncontext + n) - 1;
        if (way >= 0 && row > *longest) { *longest = row; }
        at += 1 + n;
    }
    if (at != nwords) {
        return train_error(err, "%s: example %d has %zu bytes, but its tokens end after %zu", path, i,
                           2 * nwords, 2 * at);
    }
    return 0;
}

// ---- opening ----------------------------------------------------------------------------------------------
// the first bytes of a file that is none of llm.c's HellaSwag sets
static int fail_header(const char* path, const int32_t* head, size_t nbytes, char* err) {
    const char* kind = data_file_kind(head, nbytes);
    if (nbytes < HEADER_NBYTES && head[0] == MAGIC) {
        return train_error(err, "%s has %zu bytes, its header alone has %d: truncated?", path, nbytes,
                           HEADER_NBYTES);
    }
    if (head[0] == MAGIC) {
        return train_error(err, "%s has version %d; only version %d is known", path, head[1], VERSION);
    }
    if (kind) { return train_error(err, "%s is %s, not a HellaSwag set", path, kind); }
    return train_error(err, "%s has %zu bytes and starts with %d, a HellaSwag set with %d", path, nbytes,
                       head[0], MAGIC);
}

static int read_file(HellaSwag* h, const char* path, FILE* f, uint64_t nbytes, size_t* nwords, char* err) {
    int32_t head[HEADER_NBYTES / sizeof(int32_t)] = {0};
    const size_t n = fread(head, 1, sizeof head, f);
    if (n < sizeof head || head[0] != MAGIC || head[1] != VERSION) { return fail_header(path, head, n, err); }
    const size_t body = nbytes < sizeof head ? 0 : nbytes - sizeof head;
    if (body > MOST_NBYTES || body % 2) {
        return train_error(err, "%s has %zu bytes behind its header; want an even number of at most %d", path,
                           body, MOST_NBYTES);
    }
    if (head[2] < 1 || (size_t)head[2] > body / 2 / FEWEST) {
        return train_error(err, "%s says that it has %d examples; its %zu bytes have room for 1 to %zu", path,
                           head[2], body, body / 2 / FEWEST);
    }
    h->n = head[2];
    h->words = (uint16_t*)malloc(body);
    h->first = (size_t*)malloc((size_t)h->n * sizeof *h->first);
    if (!h->words || !h->first) { return train_error(err, "%s: out of memory for %zu bytes", path, body); }
    if (fread(h->words, 1, body, f) != body) {
        return train_error(err, "%s: can't read its %zu bytes: %s", path, body,
                           ferror(f) ? strerror(errno) : "the file has become shorter");
    }
    *nwords = body / 2;
    return 0;
}

static int open_all(HellaSwag* h, const char* path, FILE* f, uint64_t nbytes, int V, int T, char* err) {
    size_t nwords, at = 0;
    int worst = 0; // the example with the longest row
    if (read_file(h, path, f, nbytes, &nwords, err) != 0) { return -1; }
    for (int i = 0; i < h->n; i++) {
        const int before = h->longest;
        if (check_example(path, i, h->words + at, nwords - at, V, &h->longest, err) != 0) { return -1; }
        worst = h->longest > before ? i : worst;
        h->first[i] = at;
        at += h->words[at + NBYTES_AT] / 2u;
    }
    if (at != nwords) {
        return train_error(err, "%s: %zu bytes follow the last of its %d examples", path, 2 * (nwords - at),
                           h->n);
    }
    if (h->longest > T) {
        return train_error(err,
                           "%s: example %d has %d tokens with its longest completion, -t %d: -t %d at least",
                           path, worst, h->longest + 1, T, h->longest);
    }
    return 0;
}

int hellaswag_open(HellaSwag* h, const char* path, int V, int T, char err[TRAIN_ERR]) {
    const char* tail = data_path_tail(path);
    memset(h, 0, sizeof *h);
    uint64_t nbytes;
    const char* why;
    FILE* f = data_open(path, &nbytes, &why);
    if (!f) { return train_error(err, "--hellaswag-data: can't open %s: %s", tail, why); }
    const int rc = open_all(h, tail, f, nbytes, V, T, err);
    fclose(f);
    if (rc != 0) { hellaswag_close(h); }
    return rc;
}

void hellaswag_close(HellaSwag* h) {
    free(h->words);
    free(h->first);
    memset(h, 0, sizeof *h);
}

// ---- rows and scores --------------------------------------------------------------------------------------
// the number of tokens of row i's completion, which they follow
static const uint16_t* completion_of(const HellaSwag* h, size_t i) {
    const uint16_t* x = h->words + h->first[i / HELLASWAG_WAYS];
    const uint16_t* at = x + CONTEXT_AT + x[NCONTEXT_AT];
    for (size_t way = 0; way < i % HELLASWAG_WAYS; way++) {
        at += 1 + *at;
    }
    return at;
}

HellaSpan hellaswag_span(const HellaSwag* h, size_t i) {
    HellaSpan span = {0, 0};
    if (i < (size_t)h->n * HELLASWAG_WAYS) {
        span.begin = h->words[h->first[i / HELLASWAG_WAYS] + NCONTEXT_AT] - 1;
        span.end = span.begin + *completion_of(h, i);
    }
    return span;
}

HellaSpan hellaswag_row(const HellaSwag* h, size_t i, int T, int* ids, int* targets) {
    const HellaSpan span = hellaswag_span(h, i);
    memset(ids, 0, (size_t)T * sizeof *ids);
    memset(targets, 0, (size_t)T * sizeof *targets);
    if (span.end == 0) { return span; }
    const uint16_t *context = h->words + h->first[i / HELLASWAG_WAYS] + CONTEXT_AT,
                   *completion = completion_of(h, i) + 1;
    for (int t = 0; t <= span.end; t++) {
        const int token = t <= span.begin ? context[t] : completion[t - span.begin - 1];
        if (t < span.end) { ids[t] = token; }
        if (t > 0) { targets[t - 1] = token; }
    }
    return span;
}

int hellaswag_choice(const HellaSwag* h, int example, const double sums[HELLASWAG_WAYS]) {
    int choice = 0;
    double smallest = 0.0;
    for (int way = 0; way < HELLASWAG_WAYS; way++) {
        const HellaSpan span = hellaswag_span(h, (size_t)example * HELLASWAG_WAYS + (size_t)way);
        const double mean = sums[way] / (span.end - span.begin);
        if (way == 0 || mean < smallest) { choice = way, smallest = mean; }
    }
    return choice;
}

int hellaswag_label(const HellaSwag* h, int example) {
    return h->words[h->first[example] + LABEL_AT];
}
