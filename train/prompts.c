// prompts.c -- see prompts.h.
#include "train/prompts.h"
#include <errno.h>
#include <stdlib.h>

#define FILE_MOST ((uint64_t)16 << 20) // bytes of a prompt file; each of them is looked up

// room for one prompt more, of so many tokens
static int* grow(Prompts* p, size_t ntokens) {
    p->first = (int*)realloc(p->first, ((size_t)p->n + 2) * sizeof(int));
    fo_require(p->first != NULL, "out of memory");
    if (p->n == 0) { p->first[0] = 0; }
    p->ids = (int*)realloc(p->ids, ((size_t)p->first[p->n] + ntokens) * sizeof(int));
    fo_require(p->ids != NULL, "out of memory");
    return p->ids + p->first[p->n];
}

static void added(Prompts* p, int ntokens) {
    p->first[p->n + 1] = p->first[p->n] + ntokens;
    p->longest = ntokens > p->longest ? ntokens : p->longest;
    p->n++;
}

static size_t longest_token(const Tokenizer* tk) {
    size_t longest = 1, nbytes;
    for (int id = 0; id < tk->V; id++) {
        (void)tokenizer_decode(tk, id, &nbytes);
        longest = nbytes > longest ? nbytes : longest;
    }
    return longest;
}

// where: what the text is, as an error names it. longest: bytes of a token; most: tokens
static int add(Prompts* p, const char* text, const Tokenizer* tk, size_t longest, int most, const char* where,
               char err[TRAIN_ERR]) {
    const size_t nbytes = strlen(text);
    size_t n = (nbytes + longest - 1) / longest; // at least; more are never encoded, which takes long
    int encoded = n <= (size_t)most;
    if (encoded) {
        int k = tokenizer_encode(tk, text, grow(p, nbytes), (int)nbytes);
        if (k < 0) { return train_error(err, "%s has a byte for which the tokenizer has no token", where); }
        n = (size_t)k;
    }
    if (n > (size_t)most) {
        return train_error(err,
                           "%s has %s%zu tokens, but -g and the model leave room for %d: a shorter one, or a "
                           "longer -g",
                           where, encoded ? "" : "at least ", n, most > 0 ? most : 0);
    }
    added(p, (int)n);
    return 0;
}

static int read_lines(Prompts* p, const char* path, const Tokenizer* tk, int most, char err[TRAIN_ERR]) {
    char *text = NULL, where[300];
    size_t room = 0;
    ssize_t nbytes;
    uint64_t all;
    const char* why;
    const size_t longest = longest_token(tk);
    int rc = 0;
    // every rank reads it: of a pipe each would get a part
    FILE* f = data_open(path, &all, &why);
    if (!f) { return train_error(err, "--prompt-file: can't read %s: %s", data_path_tail(path), why); }
    if (all > FILE_MOST) {
        rc = train_error(err, "--prompt-file: %s has %llu bytes; want %llu at most", data_path_tail(path),
                         (unsigned long long)all, (unsigned long long)FILE_MOST);
    }
    for (int line = 1; rc == 0 && (nbytes = getline(&text, &room, f)) >= 0; line++) {
        size_t n = (size_t)nbytes;
        n -= n > 0 && text[n - 1] == '\n';
        n -= n > 0 && text[n - 1] == '\r';
        text[n] = 0;
        if (n == 0) { continue; }
        (void)snprintf(where, sizeof where, "%s line %d: the prompt", data_path_tail(path), line);
        if (strlen(text) != n) {
            rc = train_error(err, "%s has a zero byte: want text", where);
        } else {
            rc = add(p, text, tk, longest, most, where, err);
        }
    }
    if (rc == 0 && ferror(f)) {
        rc = train_error(err, "--prompt-file: can't read %s: %s", data_path_tail(path), strerror(errno));
    }
    if (rc == 0 && p->n == 0) {
        rc = train_error(err, "--prompt-file: %s has no prompt: want one a line", data_path_tail(path));
    }
    free(text);
    fclose(f);
    return rc;
}

int prompts_init(Prompts* p, const TrainOptions* opt, const Tokenizer* tk, int V, int maxT,
                 char err[TRAIN_ERR]) {
    const int most = (opt->sample_length < maxT ? opt->sample_length : maxT) - 1;
    memset(p, 0, sizeof *p);
    p->given = 1;
    if (opt->prompt_file[0]) { return read_lines(p, opt->prompt_file, tk, most, err); }
    if (opt->prompt[0]) { return add(p, opt->prompt, tk, longest_token(tk), most, "the prompt", err); }
    p->given = 0;
    grow(p, 1);
    p->ids[0] = tk->V > 0 ? tk->eot : V - 1;
    added(p, 1);
    return 0;
}

void prompts_free(Prompts* p) {
    free(p->first);
    free(p->ids);
    memset(p, 0, sizeof *p);
}
