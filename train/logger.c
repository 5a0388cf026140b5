// logger.c -- main.log and messages. See logger.h; the lines are described in doc/formats.md.
#include "train/logger.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int train_error(char err[TRAIN_ERR], const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(err, TRAIN_ERR, fmt, args);
    va_end(args);
    return -1;
}

// a full disk shows only when the line leaves the buffer: fclose counts
static int put(const Logger* l, const char* mode, const char* line, char err[TRAIN_ERR]) {
    if (l->path[0] == 0) { return 0; }
    FILE* f = fopen(l->path, mode);
    if (!f) { return train_error(err, "%s: cannot be opened: %s", l->path, strerror(errno)); }
    int bad = fputs(line, f) < 0;
    bad |= fclose(f) != 0;
    if (bad) { return train_error(err, "%s: cannot be written: %s", l->path, strerror(errno)); }
    return 0;
}

int logger_init(Logger* l, const char* dir, int rank, int resume, char err[TRAIN_ERR]) {
    l->path[0] = 0;
    if (!dir || dir[0] == 0 || rank != 0) { return 0; }
    if (snprintf(l->path, sizeof l->path, "%s/main.log", dir) >= (int)sizeof l->path) {
        l->path[0] = 0;
        return train_error(err, "output folder's name has %zu characters; at most %zu are possible",
                           strlen(dir), sizeof l->path - sizeof "/main.log");
    }
    return put(l, resume ? "a" : "w", "", err);
}

int logger_train(const Logger* l, int step, float loss, float lr, float norm, char err[TRAIN_ERR]) {
    char line[256];
    (void)snprintf(line, sizeof line, "s:%d trl:%.4f lr:%.6f norm:%.2f\n", step, (double)loss, (double)lr,
                   (double)norm);
    return put(l, "a", line, err);
}

int logger_val(const Logger* l, int step, float loss, char err[TRAIN_ERR]) {
    char line[128];
    (void)snprintf(line, sizeof line, "s:%d tel:%.4f\n", step, (double)loss);
    return put(l, "a", line, err);
}
