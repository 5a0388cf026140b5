// logger.c -- main.log, JSON lines and messages. See logger.h.
#include "train/logger.h"
#include "data/dataloader.h" // data_one_line
#include "flashoverlap/fo.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

int train_error(char err[TRAIN_ERR], const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(err, TRAIN_ERR, fmt, args);
    va_end(args);
    data_one_line(err);
    return -1;
}

/* Adds a line, or, mode w, makes the file anew. main.log must lie in the output folder, so a link, which
 * could lead out of it, is not followed. A FIFO that nobody reads is not waited for. Of a line that did not
 * fit on the disk nothing is left, or a resumed run's first would stand behind it.
 */
static int put(const Logger* l, const char* path, const char* mode, const char* line, char err[TRAIN_ERR]) {
    const int how = (mode[0] == 'w' ? O_TRUNC : O_APPEND) | (path == l->path ? O_NOFOLLOW : 0);
    struct stat before;
    const char* at = line;
    if (path[0] == 0) { return 0; }
    const int fd = open(path, O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC | how, 0666);
    if (fd < 0) {
        return train_error(err, "%s: cannot be opened: %s", path,
                           errno == ENXIO ? "a FIFO that nobody reads" : strerror(errno));
    }
    int bad = fstat(fd, &before) != 0 || fcntl(fd, F_SETFL, how & O_APPEND) != 0; // writes do wait
    while (!bad && *at) {
        const ssize_t k = write(fd, at, strlen(at));
        bad = k < 0 && errno != EINTR;
        at += k > 0 ? k : 0;
    }
    int why = errno;
    if (bad && at > line && S_ISREG(before.st_mode) && ftruncate(fd, before.st_size) != 0) { why = errno; }
    if (close(fd) != 0 && !bad) { bad = 1, why = errno; }
    return bad ? train_error(err, "%s: cannot be written: %s", path, strerror(why)) : 0;
}

int logger_init(Logger* l, const char* dir, const char* json, int rank, int resume, char err[TRAIN_ERR]) {
    memset(l, 0, sizeof *l);
    if (rank != 0) { return 0; }
    if (dir && dir[0] && snprintf(l->path, sizeof l->path, "%s/main.log", dir) >= (int)sizeof l->path) {
        l->path[0] = 0;
        return train_error(err, "output folder's name has %zu characters; at most %zu are possible",
                           strlen(dir), sizeof l->path - sizeof "/main.log");
    }
    if (json && snprintf(l->json, sizeof l->json, "%s", json) >= (int)sizeof l->json) {
        return train_error(err, "--log-json: a name of %zu characters; at most %zu are possible",
                           strlen(json), sizeof l->json - 1);
    }
    return put(l, l->path, resume ? "a" : "w", "", err) || put(l, l->json, resume ? "a" : "w", "", err) ? -1
                                                                                                        : 0;
}

// ---- JSON -------------------------------------------------------------------------------------------------
enum { LINE_NBYTES = 4096 };

// twice all operations and a dozen fields fit; more is the caller's error
typedef struct {
    char text[LINE_NBYTES];
    size_t n;
} Line;

static void add(Line* x, const char* fmt, ...) __attribute__((format(printf, 2, 3)));
static void add(Line* x, const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    x->n += (size_t)vsnprintf(x->text + x->n, LINE_NBYTES - x->n, fmt, args);
    va_end(args);
    fo_require(x->n < LINE_NBYTES, "a line of over %d characters", LINE_NBYTES);
}

// "name":value; JSON has no word for what is not finite
static void add_number(Line* x, const char* before, const char* name, double value) {
    if (isfinite(value)) {
        add(x, "%s\"%s\":%.9g", before, name, value);
    } else {
        add(x, "%s\"%s\":null", before, name);
    }
}

static void begin_line(Line* x, int step) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    x->n = 0;
    add(x, "{\"step\":%d,\"time\":%lld.%03ld", step, (long long)now.tv_sec, now.tv_nsec / 1000000);
}

static int put_step(const Logger* l, const LogStep* s, char err[TRAIN_ERR]) {
    const struct {
        const char* name;
        double value;
    } fields[] = {{"loss", (double)s->loss}, {"loss_z", s->loss_z},
                  {"norm", (double)s->norm}, {"norm_z", s->norm_z},
                  {"lr", (double)s->lr},     {"ms", s->ms},
                  {"mfu", s->mfu},           {"tok_s", s->tok_s},
                  {"comm_ms", s->comm_ms},   {"exposed_ms", s->exposed_ms}};
    Line x;
    begin_line(&x, s->step);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        add_number(&x, ",", fields[i].name, fields[i].value);
    }
    add(&x, ",\"tokens\":%.0f,\"exposed_by_op\":{", s->tokens);
    for (int i = 0; i < s->nops; i++) {
        add_number(&x, i ? "," : "", s->op[i], s->op_ms[i]);
    }
    add(&x, "}");
    for (int i = 0; i < s->nchosen; i++) {
        add_number(&x, i ? "," : ",\"chunks_by_op\":{", s->chosen[i], s->chosen_m[i]);
    }
    add(&x, s->nchosen > 0 ? "}}\n" : "}\n");
    return put(l, l->json, "a", x.text, err);
}

// a line of one value beside the step
static int put_value(const Logger* l, int step, const char* name, double value, char err[TRAIN_ERR]) {
    Line x;
    begin_line(&x, step);
    add_number(&x, ",", name, value);
    add(&x, "}\n");
    return put(l, l->json, "a", x.text, err);
}

// ---- both -------------------------------------------------------------------------------------------------
int logger_train(const Logger* l, const LogStep* s, char err[TRAIN_ERR]) {
    char line[256];
    (void)snprintf(line, sizeof line, "s:%d trl:%.4f lr:%.6f norm:%.2f\n", s->step, (double)s->loss,
                   (double)s->lr, (double)s->norm);
    if (put(l, l->path, "a", line, err)) { return -1; }
    return l->json[0] ? put_step(l, s, err) : 0;
}

int logger_val(const Logger* l, int step, float loss, char err[TRAIN_ERR]) {
    char line[128];
    (void)snprintf(line, sizeof line, "s:%d tel:%.4f\n", step, (double)loss);
    if (put(l, l->path, "a", line, err)) { return -1; }
    return l->json[0] ? put_value(l, step, "val_loss", (double)loss, err) : 0;
}

int logger_eval(const Logger* l, int step, float accuracy, char err[TRAIN_ERR]) {
    char line[128];
    (void)snprintf(line, sizeof line, "s:%d eval:%.4f\n", step, (double)accuracy);
    if (put(l, l->path, "a", line, err)) { return -1; }
    return l->json[0] ? put_value(l, step, "eval", (double)accuracy, err) : 0;
}
