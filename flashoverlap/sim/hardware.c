// hardware.c -- reads a machine's text file. See sim.h; dev/sim/hardware has some.
#include "flashoverlap/sim/sim.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    const char* key;
    size_t offset;
    double low, high;
    int has_default; // the value is then `fallback`
    double fallback;
} Key;

#define AT(field) offsetof(SimHardware, field)
static const Key KEYS[] = {
    {"peak_tflops", AT(peak_tflops), 1e-6, 1e6, 0, 0.0},
    {"gemm_tflops", AT(gemm_tflops), 1e-6, 1e6, 0, 0.0},
    {"attention_tflops", AT(attention_tflops), 1e-6, 1e6, 0, 0.0},
    {"gemm_tile", AT(gemm_tile), 1.0, 4096.0, 1, 1.0},
    {"gemm_units", AT(gemm_units), 0.0, 1e6, 1, 0.0},
    {"memory_gbytes_s", AT(memory_gbytes_s), 1e-3, 1e6, 0, 0.0},
    {"memory_gib", AT(memory_gib), 1e-3, 1e6, 0, 0.0},
    {"kernel_us", AT(kernel_us), 0.0, 1e6, 1, 0.0},
    {"launch_us", AT(launch_us), 0.0, 1e6, 1, 0.0},
    {"node_ranks", AT(node_ranks), 1.0, 1024.0, 0, 0.0},
    {"link_gbytes_s", AT(link_gbytes_s), 1e-6, 1e6, 0, 0.0},
    {"link_us", AT(link_us), 0.0, 1e6, 0, 0.0},
    {"node_link_gbytes_s", AT(node_link_gbytes_s), 1e-6, 1e6, 0, 0.0},
    {"node_link_us", AT(node_link_us), 0.0, 1e6, 0, 0.0},
    {"link_shared", AT(link_shared), 0.0, 1.0, 1, 1.0},
    {"contention", AT(contention), 0.0, 10.0, 1, 0.0},
};
#define NKEYS (sizeof KEYS / sizeof KEYS[0])

static int error(char err[SIM_ERR], const char* fmt, ...) __attribute__((format(printf, 2, 3)));

static int error(char err[SIM_ERR], const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(err, SIM_ERR, fmt, args);
    va_end(args);
    return -1;
}

static const Key* key_of(const char* word) {
    for (size_t i = 0; i < NKEYS; i++) {
        if (strcmp(KEYS[i].key, word) == 0) { return &KEYS[i]; }
    }
    return NULL;
}

// line `number` of the file; seen: bit i: KEYS[i] was there
static int read_line(SimHardware* h, char* line, int number, const char* path, unsigned* seen,
                     char err[SIM_ERR]) {
    char *rest, *end;
    line[strcspn(line, "#\n")] = 0;
    const char* word = strtok_r(line, " \t\r", &rest);
    if (!word) { return 0; }
    const char* value = rest + strspn(rest, " \t");
    if (strcmp(word, "name") == 0) {
        (void)snprintf(h->name, sizeof h->name, "%s", value);
        for (size_t n = strlen(h->name); n > 0 && strchr(" \t\r", h->name[n - 1]); n--) {
            h->name[n - 1] = 0;
        }
        return 0;
    }
    const Key* key = key_of(word);
    if (!key) { return error(err, "%.150s:%d: '%.40s' is no key of a machine", path, number, word); }
    if (*seen >> (key - KEYS) & 1u) { return error(err, "%.150s:%d: %s is there twice", path, number, word); }
    *seen |= 1u << (key - KEYS);
    const double x = strtod(value, &end);
    if (end == value || end[strspn(end, " \t\r")] != 0 || !(x >= key->low && x <= key->high)) {
        return error(err, "%.150s:%d: %s '%.40s': want a number of %g to %g", path, number, word, value,
                     key->low, key->high);
    }
    *(double*)(void*)((char*)h + key->offset) = x;
    return 0;
}

// the file itself, or a preset's, in the folder that programs are started from
static FILE* open_file(const char* path, char found[SIM_ERR], char err[SIM_ERR]) {
    (void)snprintf(found, SIM_ERR, "%s", path);
    FILE* f = fopen(path, "r");
    if (!f && errno == ENOENT && !strchr(path, '/')) {
        (void)snprintf(found, SIM_ERR, "dev/sim/hardware/%s.txt", path);
        f = fopen(found, "r");
    }
    if (!f) {
        (void)error(err, "%.120s: cannot be opened: %s; presets are the files of dev/sim/hardware", path,
                    strerror(errno));
    }
    return f;
}

int sim_hardware_read(SimHardware* h, const char* path, char err[SIM_ERR]) {
    char found[SIM_ERR], line[512];
    unsigned seen = 0;
    int number = 0, bad = 0;
    memset(h, 0, sizeof *h);
    FILE* f = open_file(path, found, err);
    if (!f) { return -1; }
    while (!bad && fgets(line, sizeof line, f)) {
        number++;
        if (!strchr(line, '\n') && !feof(f)) {
            bad = error(err, "%.150s:%d: a line has %zu characters at most", found, number, sizeof line - 2);
        } else {
            bad = read_line(h, line, number, found, &seen, err);
        }
    }
    if (!bad && ferror(f)) { bad = error(err, "%.150s: cannot be read: %s", found, strerror(errno)); }
    fclose(f);
    for (size_t i = 0; i < NKEYS && !bad; i++) {
        if (seen >> i & 1u) { continue; }
        if (!KEYS[i].has_default) { bad = error(err, "%.150s: %s is missing", found, KEYS[i].key); }
        *(double*)(void*)((char*)h + KEYS[i].offset) = KEYS[i].fallback;
    }
    if (!bad && h->name[0] == 0) { (void)snprintf(h->name, sizeof h->name, "%.60s", path); }
    return bad ? -1 : 0;
}
