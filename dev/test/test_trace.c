/* test_trace.c -- the timeline: what a stream keeps of its operations and waits, and the file that fo_trace
 * makes of it. That whole runs are told truly: trace_test.py.
 */
#include "dev/test/check.h"
#include "flashoverlap/fo_ops.h"
#include "flashoverlap/fo_trace.h"
#include <stdlib.h>
#include <sys/stat.h>

enum { LARGE = 16 << 20, SMALL = 256, MANY = 100, TRIES = 50 };

// ---- spans ------------------------------------------------------------------------------------------------
typedef struct {
    FoDevice* d;
    FoStream *a, *b;
    FoEvent* e;
    char *src, *dst, *other;
} Streams;

static Streams streams_open(int rank, int nlocal) {
    Streams x;
    x.d = fo_device_open(rank, nlocal);
    x.a = fo_stream_create(x.d, "a"), x.b = fo_stream_create(x.d, "b");
    x.e = fo_event_create();
    x.src = fo_malloc(x.d, LARGE), x.dst = fo_malloc(x.d, LARGE), x.other = fo_malloc(x.d, LARGE);
    return x;
}

static void streams_close(Streams* x) {
    fo_stream_destroy(x->a);
    fo_stream_destroy(x->b);
    fo_event_destroy(x->e);
    fo_free(x->d, x->src);
    fo_free(x->d, x->dst);
    fo_free(x->d, x->other);
    fo_device_close(x->d);
}

// in order, one after the other, between these times
static void check_order(const FoSpan* spans, int n, double start, double end) {
    // clocks of host and device; in emulation those of one busy thread
    const double blur = FO_DEVICE_CPU ? 20e-6 : 2e-3;
    for (int i = 0; i < n; i++) {
        CHECK(spans[i].start_s >= start - blur && spans[i].seconds >= 0.0);
        start = spans[i].start_s + spans[i].seconds - blur;
    }
    CHECK(start <= end + blur);
}

static void test_operations(Streams* x) {
    FoSpan spans[MANY + 8];
    const char *f1 = "F1", *f2 = "F2";
    CHECK_AT("operations");
    fo_copy(x->dst, x->src, SMALL, x->a);
    fo_stream_sync(x->a);
    CHECK(fo_stream_spans(x->a, spans, MANY) == 0); // off
    fo_stream_sync(x->b);
    fo_device_trace(x->d, 1);
    double start = fo_now();
    CHECK(fo_stream_label(x->a, f1) == NULL);
    fo_copy(x->dst, x->src, SMALL, x->a);
    CHECK(fo_stream_label(x->a, f2) == f1);
    fo_zero(x->dst, SMALL, x->a);
    fo_event_record(x->e, x->a); // no span
    CHECK(fo_stream_label(x->a, NULL) == f2);
    fo_copy(x->dst, x->src, LARGE, x->a);
    fo_zero(x->other, SMALL, x->b);
    fo_stream_sync(x->a);
    fo_stream_sync(x->b);
    double end = fo_now();
    memset(spans, 0xff, sizeof spans);
    int n = fo_stream_spans(x->a, spans, 2);
    CHECK(n == 2); // no more than asked for, the rest later
    CHECK(fo_stream_spans(x->a, spans + 2, MANY) == 1 && fo_stream_spans(x->a, spans + 3, MANY) == 0);
    CHECK(strstr(spans[0].name, "copy") && strstr(spans[1].name, "zero") && strstr(spans[2].name, "copy"));
    CHECK(spans[0].label == f1 && spans[1].label == f2 && spans[2].label == NULL);
    for (int i = 0; i < 3; i++) {
        const FoMessages* m = &spans[i].messages;
        CHECK(spans[i].kind == FO_SPAN_OPERATION && !m->to && !m->from && !m->nsent && !m->nreceived);
    }
    check_order(spans, 3, start, end);
    CHECK(spans[2].seconds > 0.0 && spans[2].seconds < end - start);
    CHECK(fo_stream_spans(x->b, spans, MANY) == 1 && spans[0].label == NULL); // labels are a stream's own
    for (int i = 0; i < MANY; i++) {
        fo_zero(x->dst, SMALL, x->a);
    }
    fo_stream_sync(x->a);
    n = 0;
    for (int k; (k = fo_stream_spans(x->a, spans + n, 7)) > 0;) {
        n += k;
    }
    CHECK(n == MANY);
    check_order(spans, n, end, fo_now());
    fo_device_trace(x->d, 0);
    fo_zero(x->dst, SMALL, x->a);
    fo_stream_sync(x->a);
    CHECK(fo_stream_spans(x->a, spans, MANY) == 0);
}

// stream b waits for what stream a has recorded: the span of it, and what the wait was counted as
static int wait_once(Streams* x, FoSpan* spans, double* counted_ms) {
    *counted_ms = 0.0;
    fo_stream_wait(x->b, x->e, counted_ms);
    fo_stream_sync(x->b);
    return fo_stream_spans(x->b, spans, 8);
}

/* Waits are kept if they are counted, and had to wait: for as long as was counted. A busy machine stretches a
 * span now and then, or lets a stream come so late that there is nothing left to wait for: hence the tries.
 */
static void test_waits(Streams* x) {
    FoSpan spans[8];
    double ms;
    int nagree = 0, nshort = 0;
    CHECK_AT("waits");
    fo_device_trace(x->d, 1);
    for (int try = 0; try < TRIES && !nagree; try++) {
        for (int i = 0; i < 8; i++) {
            fo_copy(x->dst, x->src, LARGE, x->a);
        }
        fo_event_record(x->e, x->a);
        fo_stream_label(x->b, "F3");
        int n = wait_once(x, spans, &ms);
        fo_stream_label(x->b, NULL);
        CHECK(n == 0 || (n == 1 && spans[0].kind == FO_SPAN_WAIT && strcmp(spans[0].label, "F3") == 0));
        nagree += n == 1 && ms > (FO_DEVICE_CPU ? 0.1 : 0.0) &&
                  fabs(1e3 * spans[0].seconds - ms) < 0.05 + 0.01 * ms;
        fo_stream_sync(x->a);
        CHECK(fo_stream_spans(x->a, spans, 8) == 8);
    }
    CHECK(nagree > 0);
    for (int try = 0; try < TRIES && !nshort; try++) {
        int n = wait_once(x, spans, &ms); // long done
        CHECK(n == 0 ? ms == 0.0 : n == 1 && ms > 0.0);
        nshort += n == 0 || 1e3 * spans[0].seconds < 0.1;
    }
    CHECK(nshort > 0);
    fo_copy(x->dst, x->src, LARGE, x->a);
    fo_event_record(x->e, x->a);
    fo_stream_wait(x->b, x->e, NULL); // nobody counts it
    fo_stream_sync(x->b);
    CHECK(fo_stream_spans(x->b, spans, 8) == 0);
    fo_stream_sync(x->a);
    fo_device_trace(x->d, 0);
    CHECK(fo_stream_spans(x->a, spans, 8) == 1);
}

static void test_spans(FoGroup* g, void* arg) {
    Streams x = streams_open(fo_group_rank(g), fo_group_nlocal(g));
    (void)arg;
    test_operations(&x);
    test_waits(&x);
    streams_close(&x);
}

// ---- files ------------------------------------------------------------------------------------------------
static char folder[] = "/tmp/fo_trace_XXXXXX", path[64], nowhere[64], as_folder[64];

static char* contents(const char* name) {
    FILE* f = fopen(name, "rb");
    char* text = calloc(1, 8 << 20);
    fo_require(text != NULL, "out of memory");
    if (f) {
        size_t n = fread(text, 1, (8 << 20) - 1, f);
        text[n] = 0;
        fclose(f);
    }
    return text;
}

static int occurrences(const char* text, const char* part) {
    int n = 0;
    for (; (text = strstr(text, part)) != NULL; text++) {
        n++;
    }
    return n;
}

static void test_checks(void) {
    char err[FO_TRACE_ERR], long_path[5000];
    struct stat st;
    CHECK_AT("checks");
    CHECK(fo_trace_check(path, err) == 0 && stat(path, &st) != 0); // leaves nothing
    CHECK(rmdir(folder) == 0 && mkdir(folder, 0700) == 0);
    CHECK(fo_trace_check(nowhere, err) == -1 && strstr(err, nowhere) && strstr(err, "No such file"));
    CHECK(fo_trace_check(folder, err) == -1 && strstr(err, "not a file"));
    CHECK(fo_trace_check("/dev/null", err) == -1 && strstr(err, "not a file"));
    memset(long_path, 'a', sizeof long_path - 1);
    long_path[sizeof long_path - 1] = 0;
    CHECK(fo_trace_check(long_path, err) == -1 && strstr(err, "4091 characters"));
}

// each rank sends its right neighbour some bytes, and waits for what comes
static void exchange(Streams* x, FoGroup* g, const char* label, double* waited_ms) {
    const int P = fo_group_size(g), r = fo_group_rank(g);
    fo_stream_label(x->b, label);
    fo_stream_label(x->a, label);
    fo_comm_begin(g, x->b);
    if (P > 1) {
        fo_send(g, x->src, 1000 + (size_t)r, (r + 1) % P);
        fo_recv(g, x->other, 1000 + (size_t)((r + P - 1) % P), (r + P - 1) % P);
    }
    fo_comm_end(g);
    fo_event_record(x->e, x->b);
    fo_stream_wait(x->a, x->e, waited_ms);
    fo_stream_label(x->a, NULL);
    fo_stream_label(x->b, NULL);
}

static void check_file(int P) {
    char* text = contents(path);
    char part[160];
    CHECK(strncmp(text, "{\"displayTimeUnit\":\"ms\",", 24) == 0);
    CHECK(strlen(text) > 4 && strcmp(text + strlen(text) - 4, "\n]}\n") == 0);
    CHECK(occurrences(text, "\"name\":\"process_name\"") == P);
    CHECK(occurrences(text, "\"cat\":\"step\",\"name\":\"the step\"") == P);
    CHECK(occurrences(text, "\"name\":\"main\"") == P && occurrences(text, "\"name\":\"idle\"") == 0);
    CHECK(occurrences(text, "\"cat\":\"compute\",\"name\":\"F4 copy\"") == P);
    CHECK(occurrences(text, "\"cat\":\"compute\",\"name\":\"zero\"") == P * 9000);
    CHECK(occurrences(text, "\"cat\":\"comm\"") == (P > 1 ? P : 0)); // not what ranks told each other for it
    for (int r = 0; r < P && P > 1; r++) {
        const int to = (r + 1) % P, from = (r + P - 1) % P;
        snprintf(part, sizeof part, "\"pid\":%d,\"tid\":2,\"cat\":\"comm\",\"name\":\"B6 to %d from %d\"", r,
                 to, from);
        CHECK(occurrences(text, part) == 1);
        snprintf(part, sizeof part, "\"sent_bytes\":%d,\"received_bytes\":%d,\"to\":[%d],\"from\":[%d]}",
                 1000 + r, 1000 + from, to, from);
        CHECK(occurrences(text, part) == 1);
    }
    free(text);
}

static void test_files(FoGroup* g, void* arg) {
    const int P = fo_group_size(g), r = fo_group_rank(g);
    Streams x = streams_open(r, fo_group_nlocal(g));
    FoStream* idle = fo_stream_create(x.d, "idle");
    const FoTraceRow rows[] = {{x.a, "main"}, {x.b, "link"}, {idle, "idle"}};
    char err[FO_TRACE_ERR] = "", process[32];
    double waited_ms = 0.0, apart = -1.0;
    (void)arg;
    CHECK_AT("P=%d r=%d", P, r);
    snprintf(process, sizeof process, "rank %d of %d", r, P);
    for (int round = 0; round < 2; round++) { // the second replaces the first's file
        exchange(&x, g, "before", &waited_ms);
        fo_zero(x.dst, SMALL, x.a); // before: not kept
        FoTrace* t = fo_trace_start(g, rows, 3);
        double start = fo_now();
        exchange(&x, g, "B6", &waited_ms);
        fo_stream_label(x.a, "F4");
        fo_copy(x.dst, x.src, SMALL, x.a);
        fo_stream_label(x.a, NULL);
        for (int i = 0; i < 9000; i++) { // over one block of text
            fo_zero(x.dst, SMALL, x.a);
        }
        fo_trace_mark(t, "the step", start);
        // into a folder that is not there: rank 0 hears of it, nobody hangs, the other file stays
        const int bad = round == 1;
        int rc = fo_trace_end(t, process, bad ? nowhere : path, &apart, err);
        CHECK(rc == (bad && r == 0 ? -1 : 0) && apart == 0.0);
        if (r == 0 && bad) { CHECK(strstr(err, nowhere) && strstr(err, "No such file")); }
        if (r == 0) { check_file(P); }
        fo_group_barrier(g);
    }
    FoTrace* t = fo_trace_start(g, rows, 3); // a folder is in the way: found when all is written
    int rc = fo_trace_end(t, process, as_folder, NULL, err);
    CHECK(rc == (r == 0 ? -1 : 0));
    if (r == 0) {
        char* text = contents(path);
        CHECK(strstr(err, as_folder) && text[0] == '{');
        free(text);
        struct stat st;
        char tmp[80];
        snprintf(tmp, sizeof tmp, "%s.tmp", as_folder);
        CHECK(stat(tmp, &st) != 0);
    }
    fo_stream_destroy(idle);
    streams_close(&x);
}

int main(void) {
    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/t.json", folder);
    snprintf(nowhere, sizeof nowhere, "%s/nowhere/t.json", folder);
    snprintf(as_folder, sizeof as_folder, "%s/f", folder);
    test_checks();
    CHECK(mkdir(as_folder, 0700) == 0);
    fo_ranks_run(1, test_spans, NULL);
    fo_ranks_run(3, test_spans, NULL);
    for (int P = 1; P <= 4; P++) {
        fo_ranks_run(P, test_files, NULL);
    }
    CHECK(remove(path) == 0 && rmdir(as_folder) == 0 && rmdir(folder) == 0);
    return check_report();
}
