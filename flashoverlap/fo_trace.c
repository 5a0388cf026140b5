// fo_trace.c -- collects spans of all ranks and writes them as Chrome trace JSON. See fo_trace.h.
#include "flashoverlap/fo_trace.h"
#include "flashoverlap/fo_ops.h" // FO_MAX_RANKS
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_ROWS = 16, PINGS = 16, BLOCK_NBYTES = 1 << 20, SPANS_AT_ONCE = 256, PATH_NBYTES = 4096 };

typedef struct {
    char name[32];
    double start_s, seconds;
} Mark;

typedef struct {
    char* at;
    size_t nbytes, room;
} Text;

struct FoTrace {
    FoGroup*
        group; // of all ranks, apart from the world: what is told for the timeline is not part of the run
    FoDevice* device;
    FoTraceRow rows[MAX_ROWS];
    int nrows;
    Mark* marks;
    int nmarks, mark_room;
    double start_s;              // when all ranks had begun, on this rank's clock
    double offset_s, accuracy_s; // this clock less rank 0's, and how well that is known
    char* block;                 // [BLOCK_NBYTES] device memory, for what ranks tell each other
};

// ---- what ranks tell each other ---------------------------------------------------------------------------
static void sync_rows(const FoTrace* t) {
    for (int i = 0; i < t->nrows; i++) {
        fo_stream_sync(t->rows[i].stream);
    }
}

static void tell(FoTrace* t, int to, const void* host, size_t nbytes) {
    FoStream* s = t->rows[0].stream;
    fo_upload(t->block, host, nbytes, s);
    fo_comm_begin(t->group, s);
    fo_send(t->group, t->block, nbytes, to);
    fo_comm_end(t->group);
    fo_stream_sync(s);
}

static void hear(FoTrace* t, int from, void* host, size_t nbytes) {
    FoStream* s = t->rows[0].stream;
    fo_comm_begin(t->group, s);
    fo_recv(t->group, t->block, nbytes, from);
    fo_comm_end(t->group);
    fo_download(host, t->block, nbytes, s);
    fo_stream_sync(s);
}

// every rank's numbers, n each
static void gather(FoTrace* t, const double* own, double* all, size_t n) {
    const size_t nbytes = n * sizeof *own, P = (size_t)fo_group_size(t->group);
    FoStream* s = t->rows[0].stream;
    fo_upload(t->block + (size_t)fo_group_rank(t->group) * nbytes, own, nbytes, s);
    fo_allgather(t->group, t->block, nbytes, s);
    fo_download(all, t->block, P * nbytes, s);
    fo_stream_sync(s);
}

// Rank 0 asks rank p for its time again and again: of the quickest answer the time is taken to be that of its
// middle.
static void compare_clocks(FoTrace* t, int p) {
    const int r = fo_group_rank(t->group);
    double best[2] = {0.0, 1e30}, ask = 0.0, theirs; // offset, accuracy
    for (int i = 0; i < PINGS && (r == 0 || r == p); i++) {
        if (r == p) {
            hear(t, 0, &ask, sizeof ask);
            theirs = fo_now();
            tell(t, 0, &theirs, sizeof theirs);
            continue;
        }
        double start = fo_now();
        tell(t, p, &ask, sizeof ask);
        hear(t, p, &theirs, sizeof theirs);
        double end = fo_now();
        if (0.5 * (end - start) < best[1]) {
            best[0] = theirs - 0.5 * (start + end);
            best[1] = 0.5 * (end - start);
        }
    }
    if (r == 0) { tell(t, p, best, sizeof best); }
    if (r == p) {
        hear(t, 0, best, sizeof best);
        t->offset_s = best[0], t->accuracy_s = best[1];
    }
}

FoTrace* fo_trace_start(FoGroup* world, const FoTraceRow rows[], int nrows) {
    FoTrace* t = (FoTrace*)calloc(1, sizeof *t);
    fo_require(t != NULL, "out of memory");
    fo_require(nrows >= 1 && nrows <= MAX_ROWS, "a timeline of %d streams, can be 1 to %d", nrows, MAX_ROWS);
    memcpy(t->rows, rows, (size_t)nrows * sizeof *rows);
    t->nrows = nrows, t->device = fo_stream_device(rows[0].stream);
    t->block = (char*)fo_malloc(t->device, BLOCK_NBYTES);
    sync_rows(t);
    t->group = fo_group_split(world, 0);
    fo_group_link(t->group, 0.0, 0.0);
    for (int p = 1; p < fo_group_size(world) && fo_group_nlocal(world) < fo_group_size(world); p++) {
        compare_clocks(t, p);
    }
    fo_group_barrier(world);
    t->start_s = fo_now();
    fo_device_trace(t->device, 1);
    return t;
}

void fo_trace_mark(FoTrace* t, const char* name, double start_s) {
    if (t->nmarks == t->mark_room) {
        t->mark_room = t->mark_room ? 2 * t->mark_room : 16;
        t->marks = (Mark*)realloc(t->marks, (size_t)t->mark_room * sizeof *t->marks);
        fo_require(t->marks != NULL, "out of memory");
    }
    Mark* m = &t->marks[t->nmarks++];
    (void)snprintf(m->name, sizeof m->name, "%s", name);
    m->start_s = start_s, m->seconds = fo_now() - start_s;
}

// ---- as text ----------------------------------------------------------------------------------------------
static void add(Text* x, const char* fmt, ...) __attribute__((format(printf, 2, 3)));
static void add(Text* x, const char* fmt, ...) {
    for (;;) {
        const size_t left = x->room - x->nbytes;
        va_list ap;
        va_start(ap, fmt);
        const int n = vsnprintf(x->at ? x->at + x->nbytes : NULL, left, fmt, ap);
        va_end(ap);
        fo_require(n >= 0, "no text of '%s'", fmt);
        if ((size_t)n < left) {
            x->nbytes += (size_t)n;
            return;
        }
        x->room = 2 * x->room + (size_t)n + BLOCK_NBYTES;
        x->at = (char*)realloc(x->at, x->room);
        fo_require(x->at != NULL, "out of memory for the timeline");
    }
}

// events stand one a line, and follow each other
static void begin_event(Text* x, const FoTrace* t, const char* ph, int row) {
    const int r = fo_group_rank(t->group);
    add(x, "%s{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d", r == 0 && x->nbytes == 0 ? "" : ",\n", ph, r, row);
}

static void add_row_name(Text* x, const FoTrace* t, int row, const char* name) {
    begin_event(x, t, "M", row);
    add(x, ",\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}", name);
    begin_event(x, t, "M", row);
    add(x, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}}", row);
}

static void add_times(Text* x, const FoTrace* t, double start_s, double seconds, double zero_s) {
    add(x, ",\"ts\":%.3f,\"dur\":%.3f", 1e6 * (start_s - t->offset_s - zero_s), 1e6 * seconds);
}

static void add_ranks(Text* x, const char* key, uint32_t ranks) {
    add(x, "\"%s\":[", key);
    for (int r = 0, n = 0; r < 32; r++) { // bits of a mask
        if (ranks >> r & 1u) { add(x, "%s%d", n++ ? "," : "", r); }
    }
    add(x, "]");
}

// " to 3", " from 1", " to 3 ranks"; nothing if there are none
static void add_peers(Text* x, const char* word, uint32_t ranks) {
    const int n = __builtin_popcount(ranks);
    if (n == 1) { add(x, " %s %d", word, __builtin_ctz(ranks)); }
    if (n > 1) { add(x, " %s %d ranks", word, n); }
}

// A device names an operation by a function of its own, matmul_forward_op or fo_matmul_forward: to the reader
// both are matmul_forward.
static void add_operation_name(Text* x, const FoSpan* s) {
    const char* name = strncmp(s->name, "fo_", 3) == 0 ? s->name + 3 : s->name;
    size_t n = strlen(name);
    if (n > 3 && strcmp(name + n - 3, "_op") == 0) { n -= 3; }
    add(x, "%s%s%.*s", s->label ? s->label : "", s->label ? " " : "", (int)n, name);
}

static void add_span(Text* x, const FoTrace* t, int row, const FoSpan* s, double zero_s) {
    const FoMessages* m = &s->messages;
    const int exchange = (m->to | m->from) != 0, wait = s->kind == FO_SPAN_WAIT;
    begin_event(x, t, "X", row);
    add(x, ",\"cat\":\"%s\",\"name\":\"", wait ? "exposed" : exchange ? "comm" : "compute");
    if (wait) {
        add(x, "exposed%s%s", s->label ? " " : "", s->label ? s->label : "");
    } else if (exchange) {
        add(x, "%s", s->label ? s->label : "exchange");
        add_peers(x, "to", m->to);
        add_peers(x, "from", m->from);
    } else {
        add_operation_name(x, s);
    }
    add(x, "\"");
    add_times(x, t, s->start_s, s->seconds, zero_s);
    if (exchange) {
        add(x, ",\"args\":{\"sent_bytes\":%zu,\"received_bytes\":%zu,", m->nsent, m->nreceived);
        add_ranks(x, "to", m->to);
        add(x, ",");
        add_ranks(x, "from", m->from);
        add(x, "}");
    } else if (s->flops > 0.0) {
        add(x, ",\"args\":{\"flops\":%.0f}", s->flops);
    }
    add(x, "}");
}

// all that this rank has; streams that did nothing have no row
static void add_rank(Text* x, const FoTrace* t, const char* process, double zero_s) {
    FoSpan spans[SPANS_AT_ONCE];
    begin_event(x, t, "M", 0);
    add(x, ",\"name\":\"process_name\",\"args\":{\"name\":\"%s\"}}", process);
    begin_event(x, t, "M", 0);
    add(x, ",\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}", fo_group_rank(t->group));
    if (t->nmarks > 0) { add_row_name(x, t, 0, "steps"); }
    for (int i = 0; i < t->nmarks; i++) {
        begin_event(x, t, "X", 0);
        add(x, ",\"cat\":\"step\",\"name\":\"%s\"", t->marks[i].name);
        add_times(x, t, t->marks[i].start_s, t->marks[i].seconds, zero_s);
        add(x, "}");
    }
    for (int row = 0; row < t->nrows; row++) {
        FoStream* s = t->rows[row].stream;
        for (int first = 1, n; (n = fo_stream_spans(s, spans, SPANS_AT_ONCE)) > 0; first = 0) {
            if (first) { add_row_name(x, t, row + 1, t->rows[row].name); }
            for (int i = 0; i < n; i++) {
                add_span(x, t, row + 1, &spans[i], zero_s);
            }
        }
    }
}

// ---- the file ---------------------------------------------------------------------------------------------
static int refuse(char err[FO_TRACE_ERR], const char* fmt, ...) __attribute__((format(printf, 2, 3)));
static int refuse(char err[FO_TRACE_ERR], const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(err, FO_TRACE_ERR, fmt, ap);
    va_end(ap);
    return -1;
}

static int temporary_name(char tmp[PATH_NBYTES], const char* path, char err[FO_TRACE_ERR]) {
    if (snprintf(tmp, PATH_NBYTES, "%s.tmp", path) < PATH_NBYTES) { return 0; }
    return refuse(err, "a path of over %d characters", PATH_NBYTES - 5);
}

int fo_trace_check(const char* path, char err[FO_TRACE_ERR]) {
    char tmp[PATH_NBYTES];
    struct stat st;
    if (temporary_name(tmp, path, err)) { return -1; }
    if (lstat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        return refuse(err, "%s is there and is not a file; want the name of one", path);
    }
    FILE* f = fopen(tmp, "wb");
    if (!f) { return refuse(err, "%s can't be written: %s", tmp, strerror(errno)); }
    fclose(f);
    remove(tmp);
    return 0;
}

// rank 0: everything, its own text first. What can't be written is still received
static int write_all(FoTrace* t, const Text* own, const double* nbytes, double accuracy_s, const char* path,
                     char err[FO_TRACE_ERR]) {
    char tmp[PATH_NBYTES], *block = (char*)malloc(BLOCK_NBYTES);
    FILE* f = temporary_name(tmp, path, err) ? NULL : fopen(tmp, "wb");
    fo_require(block != NULL, "out of memory");
    int failed = f ? 0 : errno; // of the first that did: what follows changes errno
    const char* head =
        "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"clocks_apart_us\":%.3f},\"traceEvents\":[\n";
    if (!failed && fprintf(f, head, 1e6 * accuracy_s) < 0) { failed = errno; }
    if (!failed && fwrite(own->at, 1, own->nbytes, f) != own->nbytes) { failed = errno; }
    for (int p = 1; p < fo_group_size(t->group); p++) {
        for (size_t left = (size_t)nbytes[p]; left > 0;) {
            const size_t n = left < BLOCK_NBYTES ? left : BLOCK_NBYTES;
            hear(t, p, block, n);
            if (!failed && fwrite(block, 1, n, f) != n) { failed = errno; }
            left -= n;
        }
    }
    if (!failed && fprintf(f, "\n]}\n") < 0) { failed = errno; }
    if (f && fclose(f) != 0 && !failed) { failed = errno; }
    if (!failed && rename(tmp, path) != 0) { failed = errno; }
    if (failed && f) { remove(tmp); }
    free(block);
    return failed ? refuse(err, "%s can't be written: %s", path, strerror(failed)) : 0;
}

int fo_trace_end(FoTrace* t, const char* process, const char* path, double* accuracy_s,
                 char err[FO_TRACE_ERR]) {
    const int P = fo_group_size(t->group), r = fo_group_rank(t->group);
    double all[2 * FO_MAX_RANKS], nbytes[FO_MAX_RANKS], zero_s = 1e30, apart = 0.0;
    Text text = {NULL, 0, 0};
    int rc = 0;
    sync_rows(t);
    fo_device_trace(t->device, 0);
    double own[2] = {t->start_s - t->offset_s, t->accuracy_s};
    gather(t, own, all, 2);
    for (int p = 0; p < P; p++) {
        zero_s = all[2 * p] < zero_s ? all[2 * p] : zero_s;
        apart = all[2 * p + 1] > apart ? all[2 * p + 1] : apart;
    }
    add_rank(&text, t, process, zero_s);
    double length = (double)text.nbytes;
    gather(t, &length, nbytes, 1);
    if (r == 0) {
        rc = write_all(t, &text, nbytes, apart, path, err);
    } else {
        for (size_t at = 0; at < text.nbytes; at += BLOCK_NBYTES) {
            const size_t left = text.nbytes - at;
            tell(t, 0, text.at + at, left < BLOCK_NBYTES ? left : BLOCK_NBYTES);
        }
    }
    if (accuracy_s) { *accuracy_s = apart; }
    fo_group_free(t->group);
    fo_free(t->device, t->block);
    free(text.at);
    free(t->marks);
    free(t);
    return rc;
}
