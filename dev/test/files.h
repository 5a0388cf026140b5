/* files.h -- what the tests share that read and write files: a folder of their own under TMPDIR, whole files,
 * and small models.
 */
#ifndef FILES_H
#define FILES_H
#include "dev/test/check.h"
#include "train/checkpoint.h"
#include <stdlib.h>

static char folder[256]; // of this run's files

#define CHECK_HAS(text, part)                                                                \
    do {                                                                                     \
        if (!strstr(text, part)) { fprintf(stderr, "wanted '%s', got '%s'\n", part, text); } \
        CHECK(strstr(text, part) != NULL);                                                   \
    } while (0)

static inline const char* in_folder(const char* name) {
    static char path[8][512]; // the last eight stay
    static int turn;
    char* p = path[turn++ % 8];
    (void)snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

// the whole file, malloc'ed; NULL if there is none
static inline char* slurp(const char* path, size_t* nbytes) {
    FILE* f = fopen(path, "rb");
    if (!f) { return NULL; }
    fseek(f, 0, SEEK_END);
    *nbytes = (size_t)ftell(f);
    rewind(f);
    char* all = malloc(*nbytes + 1);
    *nbytes = fread(all, 1, *nbytes, f);
    all[*nbytes] = 0;
    fclose(f);
    return all;
}

static inline void spill(const char* path, const void* from, size_t nbytes) {
    FILE* f = fopen(path, "wb");
    CHECK(f && fwrite(from, 1, nbytes, f) == nbytes && fclose(f) == 0);
}

static inline int exists(const char* path) {
    return access(path, F_OK) == 0;
}

static inline GPTConfig config(int L, int C, int NH, int V, int maxT) {
    GPTConfig c = {.maxT = maxT, .V = V, .Vp = config_padded(V), .L = L, .NH = NH, .C = C};
    return c;
}

// the smallest with everything uneven: 25 heads, 384 vocabulary rows, 400 FFN rows
static inline GPTConfig uneven(void) {
    return config(2, 100, 25, 300, 16);
}

// makes the folder, and removes it with all that is in it
static inline int folder_open(const char* program) {
    const char* tmp = getenv("TMPDIR");
    (void)snprintf(folder, sizeof folder, "%s/%s.XXXXXX", tmp && *tmp ? tmp : "/tmp", program);
    if (mkdtemp(folder)) { return 1; }
    perror(folder);
    return 0;
}

static inline void folder_close(void) {
    char rm[300];
    (void)snprintf(rm, sizeof rm, "rm -rf '%s'", folder);
    CHECK(system(rm) == 0);
}
#endif
