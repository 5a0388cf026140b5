/* tokenizer.c -- reads a tokenizer file of version 1 or 2. Format: doc/formats.md. */
#include "data/tokenizer.h"
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

// no vocabulary in use has a hundredth of FILE_MOST bytes
enum { HEADER_NBYTES = 1024, MAGIC = 20240328, V_MOST = 1 << 24, EOT_GPT2 = 50256, FILE_MOST = 256 << 20 };

static int check_header(Tokenizer* tk, const char* path, const unsigned char* file, size_t nbytes,
                        char* err) {
    uint32_t head[4] = {0};
    memcpy(head, file, nbytes < sizeof head ? nbytes : sizeof head);
    if (head[0] != MAGIC) {
        const char* kind = data_file_kind(file, nbytes);
        if (kind) { return data_error(err, "%s is %s, not a tokenizer", path, kind); }
        if (nbytes >= 4 && __builtin_bswap32(head[0]) == MAGIC) {
            return data_error(err, "%s is big endian; tokenizer files are little endian", path);
        }
    }
    if (nbytes < HEADER_NBYTES) {
        return data_error(err, "%s has %zu bytes, a tokenizer's header alone has 1024: truncated?", path,
                          nbytes);
    }
    if (head[0] != MAGIC) {
        return data_error(err, "%s starts with %u, a tokenizer with %d", path, head[0], MAGIC);
    }
    if (head[1] != 1 && head[1] != 2) {
        return data_error(err, "%s has version %u; versions 1 and 2 are known", path, head[1]);
    }
    uint32_t eot = head[1] == 2 ? head[3] : EOT_GPT2;
    if (head[2] < 1 || head[2] > V_MOST || eot >= head[2]) {
        return data_error(err, "%s says that it has %u tokens, of which %u ends a document", path, head[2],
                          eot);
    }
    tk->V = (int)head[2];
    tk->eot = (int)eot;
    return 0;
}

// cuts the file, whose header is checked, into tokens
static int cut(Tokenizer* tk, const char* path, const unsigned char* file, size_t nbytes, char* err) {
    tk->bytes = (char*)malloc(nbytes);
    tk->offset = (uint32_t*)malloc(((size_t)tk->V + 1) * sizeof(uint32_t));
    if (!tk->bytes || !tk->offset) { return data_error(err, "out of memory for %s", path); }
    size_t at = HEADER_NBYTES;
    uint32_t n = 0;
    for (int id = 0; id < tk->V; id++) {
        size_t len = at < nbytes ? file[at] : 0;
        if (at < nbytes && len == 0) {
            return data_error(err, "%s: token %d of %d has no bytes", path, id, tk->V);
        }
        if (at >= nbytes || len > nbytes - at - 1) {
            return data_error(err, "%s ends in token %d of %d: truncated?", path, id, tk->V);
        }
        tk->offset[id] = n;
        memcpy(tk->bytes + n, file + at + 1, len);
        n += (uint32_t)len;
        at += 1 + len;
    }
    tk->offset[tk->V] = n;
    if (at != nbytes) {
        return data_error(err, "%s goes on for %zu bytes after its %d tokens", path, nbytes - at, tk->V);
    }
    return 0;
}

// the whole file, or NULL with err
static unsigned char* read_file(const char* path, size_t* nbytes, char* err) {
    uint64_t size;
    const char* why;
    FILE* f = data_open(path, &size, &why);
    if (!f) {
        data_error(err, "can't open %s: %s", data_path_tail(path), why);
        return NULL;
    }
    unsigned char* bytes = NULL;
    if (size == 0 || size > FILE_MOST) {
        data_error(err, "%s is not a tokenizer: %s", data_path_tail(path),
                   size == 0 ? "it is empty (0 bytes)" : "too large");
    } else if (!(bytes = (unsigned char*)malloc((size_t)size))) {
        data_error(err, "out of memory for %s", data_path_tail(path));
    } else if ((*nbytes = fread(bytes, 1, (size_t)size, f)) != (size_t)size) {
        data_error(err, "can't read %s: %s", data_path_tail(path),
                   ferror(f) ? strerror(errno) : "it has become shorter");
        free(bytes);
        bytes = NULL;
    }
    fclose(f);
    return bytes;
}

int tokenizer_init(Tokenizer* tk, const char* path, char err[DATA_ERR_NBYTES]) {
    memset(tk, 0, sizeof *tk);
    size_t nbytes = 0;
    unsigned char* file = read_file(path, &nbytes, err);
    if (!file) { return -1; }
    const char* name = data_path_tail(path);
    int bad = check_header(tk, name, file, nbytes, err) != 0 || cut(tk, name, file, nbytes, err) != 0;
    free(file);
    if (bad) { tokenizer_free(tk); }
    return bad ? -1 : 0;
}

void tokenizer_free(Tokenizer* tk) {
    free(tk->bytes);
    free(tk->offset);
    memset(tk, 0, sizeof *tk);
}

const char* tokenizer_decode(const Tokenizer* tk, int id, size_t* nbytes) {
    if (id < 0 || id >= tk->V) {
        *nbytes = 0;
        return NULL;
    }
    *nbytes = tk->offset[id + 1] - tk->offset[id];
    return tk->bytes + tk->offset[id];
}

// the token of bytes a followed by bytes b, or -1
static int find_token(const Tokenizer* tk, const char* a, size_t na, const char* b, size_t nb) {
    for (int id = 0; id < tk->V; id++) {
        size_t n;
        const char* bytes = tokenizer_decode(tk, id, &n);
        if (n == na + nb && memcmp(bytes, a, na) == 0 && memcmp(bytes + na, b, nb) == 0) { return id; }
    }
    return -1;
}

static int find_union(const Tokenizer* tk, int a, int b) {
    size_t na, nb;
    const char* bytes_a = tokenizer_decode(tk, a, &na);
    const char* bytes_b = tokenizer_decode(tk, b, &nb);
    return find_token(tk, bytes_a, na, bytes_b, nb);
}

int tokenizer_encode(const Tokenizer* tk, const char* text, int* ids, int most) {
    int n = (int)strlen(text);
    int* id = (int*)malloc(2 * ((size_t)n + 1) * sizeof(int));
    if (!id) { return -1; }
    int* joined = id + n + 1; // of id[i] and id[i + 1]
    int ok = 1;
    for (int i = 0; i < n && ok; i++) {
        id[i] = find_token(tk, text + i, 1, text, 0);
        ok = id[i] >= 0;
    }
    for (int i = 0; i + 1 < n && ok; i++) {
        joined[i] = find_union(tk, id[i], id[i + 1]);
    }
    while (ok) {
        int best = -1;
        for (int i = 0; i + 1 < n; i++) {
            if (joined[i] >= 0 && (best < 0 || joined[i] < joined[best])) { best = i; }
        }
        if (best < 0) { break; }
        id[best] = joined[best];
        n--;
        memmove(id + best + 1, id + best + 2, (size_t)(n - best - 1) * sizeof(int));
        memmove(joined + best + 1, joined + best + 2, (size_t)(n - best - 1) * sizeof(int));
        if (best > 0) { joined[best - 1] = find_union(tk, id[best - 1], id[best]); }
        if (best + 1 < n) { joined[best] = find_union(tk, id[best], id[best + 1]); }
    }
    n = !ok ? -1 : n < most ? n : most;
    memcpy(ids, id, (size_t)(n > 0 ? n : 0) * sizeof(int));
    free(id);
    return n;
}

void tokenizer_print(const Tokenizer* tk, int id, FILE* out) {
    size_t n;
    const char* bytes = tokenizer_decode(tk, id, &n);
    if (!bytes) {
        fprintf(out, "%d ", id);
        return;
    }
    unsigned char c = (unsigned char)bytes[0];
    if (n == 1 && c < 0x80 && !isprint(c) && !isspace(c)) { return; } // from 0x80 on: a part of UTF-8
    fwrite(bytes, 1, n, out);
}
