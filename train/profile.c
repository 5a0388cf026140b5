/* profile.c -- times by operation, from the spans that streams keep. See profile.h. */
#include "train/profile.h"
#include <stdio.h>
#include <stdlib.h>

enum { MOST_ROWS = 512, SPANS_AT_ONCE = 256, NAME_NBYTES = 64 };

// what has the same name on a stream
typedef struct {
    char name[NAME_NBYTES];
    double seconds, flops;
    size_t nbytes; // sent and received
    long ncalls;
} Row;

static void sync_all(GPT* g) {
    fo_stream_sync(g->compute);
    for (int i = 0; i < NGROUPS; i++) {
        fo_stream_sync(g->comm[i]);
    }
}

void profile_begin(Profile* p, GPT* g) {
    if (p->nsteps == 0) {
        gpt_graphs_free(g); // they tell no times
        fo_device_profiler(g->device, 1);
    }
    sync_all(g);
    fo_device_trace(g->device, 1);
    p->start_s = fo_now();
}

// "F1 matmul_forward", "F1" of an exchange, "waiting for F1"; a device's own name is fo_matmul_forward or
// matmul_forward_op
static void name_span(char name[NAME_NBYTES], const FoSpan* s) {
    const char *label = s->label ? s->label : "",
               *op = strncmp(s->name, "fo_", 3) == 0 ? s->name + 3 : s->name;
    size_t n = strlen(op);
    if (n > 3 && strcmp(op + n - 3, "_op") == 0) { n -= 3; }
    if (s->kind == FO_SPAN_WAIT) {
        (void)snprintf(name, NAME_NBYTES, "waiting for %s", label[0] ? label : "an exchange");
    } else if (s->messages.to | s->messages.from) {
        (void)snprintf(name, NAME_NBYTES, "%s", label[0] ? label : "exchange");
    } else {
        (void)snprintf(name, NAME_NBYTES, "%s%s%.*s", label, label[0] ? " " : "", (int)n, op);
    }
}

static int by_seconds(const void* a, const void* b) {
    const double x = ((const Row*)a)->seconds, y = ((const Row*)b)->seconds;
    return x < y ? 1 : x > y ? -1 : 0;
}

// takes what the stream has kept; exchanges: of those alone. Returns the number of rows, the longest first
static int collect(FoStream* s, int exchanges, Row rows[MOST_ROWS]) {
    FoSpan spans[SPANS_AT_ONCE];
    int nrows = 0;
    for (int n; (n = fo_stream_spans(s, spans, SPANS_AT_ONCE)) > 0;) {
        for (int i = 0; i < n; i++) {
            char name[NAME_NBYTES];
            int k = 0;
            if (exchanges && !(spans[i].messages.to | spans[i].messages.from)) { continue; }
            name_span(name, &spans[i]);
            while (k < nrows && strcmp(rows[k].name, name) != 0) {
                k++;
            }
            fo_require(k < MOST_ROWS, "operations of over %d names", MOST_ROWS);
            if (k == nrows) {
                memset(&rows[nrows], 0, sizeof rows[nrows]);
                memcpy(rows[nrows++].name, name, sizeof name);
            }
            rows[k].seconds += spans[i].seconds, rows[k].flops += spans[i].flops, rows[k].ncalls++;
            rows[k].nbytes += spans[i].messages.nsent + spans[i].messages.nreceived;
        }
    }
    qsort(rows, (size_t)nrows, sizeof *rows, by_seconds);
    return nrows;
}

static void print_rows(const char* what, const Row* rows, int nrows, double step_s, int nsteps) {
    double sum = 0.0;
    printf("%-36s %9s %10s %7s %9s %9s\n", what, "calls", "ms", "share", "TFLOP/s", "GB/s");
    for (int i = 0; i < nrows; i++) {
        const Row* r = &rows[i];
        printf("  %-34s %9.1f %10.3f %6.1f%%", r->name, (double)r->ncalls / nsteps, 1e3 * r->seconds / nsteps,
               100.0 * r->seconds / nsteps / step_s);
        if (r->flops > 0.0) { printf(" %9.3f", 1e-12 * r->flops / r->seconds); }
        if (r->nbytes > 0) { printf(" %9s %9.3f", "", 1e-9 * (double)r->nbytes / r->seconds); }
        printf("\n");
        sum += r->seconds;
    }
    printf("  %-34s %9s %10.3f %6.1f%%\n", "all", "", 1e3 * sum / nsteps, 100.0 * sum / nsteps / step_s);
}

static void report(GPT* g, double step_s, int nsteps, int speak) {
    static const char* const names[NGROUPS] = {"exchanges of tp", "exchanges of up", "exchanges of dp"};
    Row* rows = (Row*)malloc(MOST_ROWS * sizeof *rows);
    fo_require(rows != NULL, "out of memory");
    int n = collect(g->compute, 0, rows);
    if (speak) {
        printf("profile of rank 0, a step of %d: %.3f ms\n", nsteps, 1e3 * step_s);
        print_rows("compute stream", rows, n, step_s, nsteps);
    }
    for (int i = 0; i < NGROUPS; i++) {
        n = collect(g->comm[i], 1, rows);
        if (speak && n > 0) { print_rows(names[i], rows, n, step_s, nsteps); }
    }
    fflush(stdout);
    free(rows);
}

void profile_end(Profile* p, GPT* g, int last, int speak) {
    sync_all(g);
    p->seconds += fo_now() - p->start_s;
    p->nsteps++;
    fo_device_trace(g->device, 0);
    if (!last) { return; }
    fo_device_profiler(g->device, 0);
    gpt_graphs_free(g); // the next ones tell no times
    report(g, p->seconds / p->nsteps, p->nsteps, speak);
}
