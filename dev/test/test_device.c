/* test_device.c -- fo.h on this device: numbers, errors, memory, streams, events, graphs, pacing.
 *
 * What can be decided by data is; what needs a clock has bounds that a busy machine keeps, or several tries
 * of which one must do. What only the cpu device has (pacing, times of operations, its threads) is behind
 * FO_DEVICE_CPU, what only cuda has (graphs) asks for it.
 */
#include "dev/test/check.h"
#include "flashoverlap/fo_ops.h"
#if FO_DEVICE_CPU
#include "flashoverlap/cpu/cpu.h"
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

// ---- operations -------------------------------------------------------------------------------------------
// Relaxed everywhere: a gate orders when things happen, and must not order memory for ThreadSanitizer.
typedef struct {
    atomic_int open, late;
} Gate;

static void pass_gate(void* args) {
    Gate* g = *(Gate**)args;
    for (int i = 0; !atomic_load_explicit(&g->open, memory_order_relaxed); i++) {
        if (i == 20000) { // 10 s: the host, which should have opened it, waits for this stream
            atomic_store_explicit(&g->late, 1, memory_order_relaxed);
            return;
        }
        usleep(500);
    }
}

static void queue_gate(FoStream* s, Gate* g) {
    fo_stream_call(s, pass_gate, &g, sizeof g);
}

static void open_gate(Gate* g) {
    atomic_store_explicit(&g->open, 1, memory_order_relaxed);
}

static void sleep_us(void* args) {
    usleep((useconds_t) * (int*)args);
}

static void queue_sleep(FoStream* s, int us) {
    fo_stream_call(s, sleep_us, &us, sizeof us);
}

#if FO_DEVICE_CPU
static void paced_op(FoStream* s, void* args) {
    fo__pace(s, *(double*)args);
}
#endif

// the int at x, once s has come here
static int int_at(const int* x, FoStream* s) {
    int value = -1;
    fo_download(&value, x, sizeof value, s);
    fo_stream_sync(s);
    return value;
}

// ---- numbers ----------------------------------------------------------------------------------------------
static void test_numbers(void) {
    int bad = 0;
    for (uint32_t u = 0; u < 65536; u++) { // every bf16 comes back, a NaN as a NaN
        FoBf16 b = {(uint16_t)u};
        float f = fo_bf16_to_float(b);
        FoBf16 back = fo_bf16_from_float(f);
        bad += isnan(f) ? !isnan(fo_bf16_to_float(back)) : back.bits != b.bits;
    }
    CHECK(bad == 0);
    // 8 bits of mantissa: halves between two neighbours go to the even one
    CHECK(fo_bf16_to_float(fo_bf16_from_float(1.0f + 1.0f / 256)) == 1.0f);
    CHECK(fo_bf16_to_float(fo_bf16_from_float(1.0f + 3.0f / 256)) == 1.0f + 4.0f / 256);
    CHECK(fo_bf16_to_float(fo_bf16_from_float(1.0f + 1.01f / 256)) == 1.0f + 2.0f / 256);
    CHECK(fo_bf16_to_float(fo_bf16_from_float(-257.0f)) == -256.0f);
    CHECK(isinf(fo_bf16_to_float(fo_bf16_from_float(3.4e38f))));
    uint32_t payload = 0x7f800001u; // a NaN whose upper half alone would be infinity
    float nan;
    memcpy(&nan, &payload, sizeof nan);
    CHECK(isnan(fo_bf16_to_float(fo_bf16_from_float(nan))));
    CHECK(fo_float(fo_floatx(-3.0f)) == -3.0f);
    CHECK(sizeof(floatX) == fo_dtype_nbytes(FO_FLOATX));
    CHECK(fo_dtype_nbytes(FO_BF16) == 2 && fo_dtype_nbytes(FO_FP32) == 4);
}

// ---- memory -----------------------------------------------------------------------------------------------
static int all_bytes_are(const unsigned char* p, size_t nbytes, int value, FoStream* s) {
    unsigned char* host = malloc(nbytes + 1);
    size_t i = 0;
    fo_require(host != NULL, "out of memory");
    fo_download(host, p, nbytes, s);
    fo_stream_sync(s);
    while (i < nbytes && host[i] == value) {
        i++;
    }
    free(host);
    return i == nbytes;
}

static void fill(unsigned char* p, size_t nbytes, int value, FoStream* s) {
    unsigned char* host = malloc(nbytes + 1);
    fo_require(host != NULL, "out of memory");
    memset(host, value, nbytes);
    fo_upload(p, host, nbytes, s);
    fo_stream_sync(s);
    free(host);
}

static void test_memory(void) {
    static const size_t sizes[] = {0, 1, 63, 64, 65, 4096, (2 << 20) - 1, 2 << 20, (4 << 20) + 3};
    enum { N = sizeof sizes / sizeof *sizes };
    FoDevice* d = fo_device_open(0, 1);
    FoStream* s = fo_stream_create(d, "memory test");
    unsigned char* p[N];
    size_t sum = 0;
    CHECK(fo_device_nbytes(d) == 0 && fo_device_peak_nbytes(d) == 0);
    for (int round = 0; round < 2; round++) { // the second round gets memory that the first made dirty
        sum = 0;
        for (int i = 0; i < N; i++) {
            CHECK_AT("%zu bytes, round %d", sizes[i], round);
            p[i] = fo_malloc(d, sizes[i]);
            sum += sizes[i];
            CHECK(fo_device_nbytes(d) == sum);
            CHECK((uintptr_t)p[i] % (FO_DEVICE_CPU && sizes[i] >= 2 << 20 ? 2 << 20 : 64) == 0);
            CHECK(all_bytes_are(p[i], sizes[i], 0, s));
            fill(p[i], sizes[i], 0xff, s);
        }
        for (int i = 0; i < N; i++) { // no two overlap: each would have been zeroed by the later one
            CHECK(all_bytes_are(p[i], sizes[i], 0xff, s));
        }
        for (int i = 0; i < N; i++) {
            fo_free(d, p[i]);
            sum -= sizes[i];
            CHECK(fo_device_nbytes(d) == sum);
        }
    }
    CHECK_AT("memory");
    for (int i = 0; i < N; i++) {
        sum += sizes[i];
    }
    fo_free(d, fo_malloc(d, 64)); // a small one later doesn't move the peak
    CHECK(fo_device_peak_nbytes(d) == sum);
    fo_free(d, NULL);
    CHECK(fo_device_nbytes(d) == 0);
    fo_stream_destroy(s);
    fo_device_close(d);
}

static void test_device(void) {
    FoDevice* d = fo_device_open(0, 1);
    CHECK_AT("device");
    CHECK(strncmp(fo_device_name(d), FO_DEVICE_CPU ? "cpu, " : "cuda, ", FO_DEVICE_CPU ? 5 : 6) == 0);
    CHECK(strchr(fo_device_name(d), '\n') == NULL);
    CHECK(fo_device_hint(d) == NULL || strlen(fo_device_hint(d)) > 0);
    CHECK(fo_device_emulates() == FO_DEVICE_CPU && fo_device_graphs() == !FO_DEVICE_CPU);
    fo_device_pace(d, 0.0);
    char state[256] = "";
    fo_device_state(d, state, sizeof state);
    CHECK(strlen(state) > 20 && strlen(state) < sizeof state - 1 && !strchr(state, '\n'));
    fo_device_state(d, state, 8); // cut, not overrun
    CHECK(strlen(state) == 7);
    fo_device_profiler(d, 1); // there may be none that listens
    fo_device_profiler(d, 0);
#if FO_DEVICE_CPU
    FoDevice* crowded = fo_device_open(3, 1000);
    CHECK(strstr(fo_device_name(d), "a rank") != NULL);
    CHECK(d->nthreads >= 1 && crowded->nthreads == 1);
    fo_device_close(crowded);
#endif
    fo_device_close(d);
}

// ---- streams ----------------------------------------------------------------------------------------------
// more operations than the queue has places for, each of which changes what the next copies
static void test_order(FoDevice* d) {
    enum { N = 2500 };
    FoStream* s = fo_stream_create(d, "order");
    int *x = fo_malloc(d, sizeof *x), *seen = fo_malloc(d, N * sizeof *seen), bad = 0;
    int host[N], back[N];
    for (int i = 0; i < N; i++) {
        host[i] = i + 1;
    }
    CHECK_AT("order");
    CHECK(fo_stream_device(s) == d);
    fo_stream_sync(s); // of an empty one returns
    for (int i = 0; i < N; i++) {
        fo_upload(x, &host[i], sizeof *x, s);
        fo_copy(&seen[i], x, sizeof *x, s);
    }
    fo_download(back, seen, sizeof back, s);
    fo_stream_sync(s);
    for (int i = 0; i < N; i++) {
        bad += back[i] != i + 1;
    }
    CHECK(bad == 0);
    fo_free(d, x);
    fo_free(d, seen);
    fo_stream_destroy(s);
}

static void test_copies(FoDevice* d) {
    enum { N = 1000 };
    FoStream* s = fo_stream_create(d, "copies");
    unsigned char *a = fo_malloc(d, N), *b = fo_malloc(d, N), host[N], back[N], want[N];
    CHECK_AT("copies");
    for (int i = 0; i < N; i++) {
        host[i] = want[i] = (unsigned char)(i * 7 + 1);
    }
    memset(back, 0xee, N);
    fo_upload(a, host, N, s);
    fo_copy(b, a, N, s);
    fo_zero(b + 100, 50, s);
    fo_copy(b, b + 500, 0, s); // nothing
    fo_zero(b, 0, s);
    fo_upload(b, host, 0, s);
    fo_download(back, b, N - 1, s);
    fo_stream_sync(s);
    memset(want + 100, 0, 50);
    want[N - 1] = 0xee; // not a byte more than asked for
    CHECK_BITS(back, want, N);
    fo_free(d, a);
    fo_free(d, b);
    fo_stream_destroy(s);
}

#if FO_DEVICE_CPU
// the time of each operation is kept by its name
static void test_op_times(FoDevice* d) {
    FoStream* s = fo_stream_create(d, "times");
    FoOpTime times[FO_MAX_OP_NAMES];
    int* x = fo_malloc(d, 2 * sizeof *x);
    double flops = 1.0;
    CHECK_AT("times of operations");
    CHECK(fo__op_times(s, times) == 0);
    for (int i = 0; i < 3; i++) {
        queue_sleep(s, 4000);
        fo__enqueue(s, paced_op, &flops, sizeof flops);
        fo_copy(x, x + 1, sizeof *x, s);
    }
    fo_stream_sync(s);
    CHECK(fo__op_times(s, times) == 3);
    CHECK(strcmp(times[0].name, "call_op") == 0 && times[0].ncalls == 3 && times[0].seconds >= 0.012);
    CHECK(strcmp(times[1].name, "paced_op") == 0 && times[1].ncalls == 3 && times[1].seconds >= 0.0);
    CHECK(times[2].ncalls == 3);
    fo_free(d, x);
    fo_stream_destroy(s);
}
#endif

// work queued when the stream is destroyed is done all the same
static void test_destroy(FoDevice* d) {
    FoStream *s = fo_stream_create(d, "destroy"), *other = fo_stream_create(d, "other");
    int host[100], back[100], *x = fo_malloc(d, sizeof host);
    CHECK_AT("destroy");
    for (int i = 0; i < 100; i++) {
        host[i] = i;
    }
    queue_sleep(s, 20000);
    for (int i = 0; i < 100; i++) {
        fo_upload(&x[i], &host[i], sizeof *x, s);
    }
    fo_stream_destroy(s);
    fo_download(back, x, sizeof back, other);
    fo_stream_sync(other);
    CHECK_BITS(back, host, sizeof host);
    fo_free(d, x);
    fo_stream_destroy(other);
    fo_stream_destroy(fo_stream_create(d, "idle"));
}

// the host goes on while a stream works, and sync returns only when it is done
static void test_asynchronous(FoDevice* d) {
    FoStream* s = fo_stream_create(d, "async");
    Gate gate = {0};
    int one = 1, *x = fo_malloc(d, sizeof *x);
    CHECK_AT("asynchronous");
    queue_gate(s, &gate);
    fo_upload(x, &one, sizeof one, s);
    CHECK(!atomic_load(&gate.late)); // we are here while the stream stands at the gate
    open_gate(&gate);
    CHECK(int_at(x, s) == 1 && !atomic_load(&gate.late));
    fo_free(d, x);
    fo_stream_destroy(s);
}

// ---- events -----------------------------------------------------------------------------------------------
typedef struct {
    FoStream *a, *b;
    FoEvent* event;
    int *x, *y;
} Pair;

// b copies what a writes late. idle: the host rests between the calls, so that the event is done before the
// wait
static void test_event_orders(Pair* p, int idle, int value) {
    double waited = 0.0, start = fo_now();
    CHECK_AT("event, host %s", idle ? "idle in between" : "going on");
    queue_sleep(p->a, 15000);
    fo_upload(p->x, &value, sizeof value, p->a);
    fo_event_record(p->event, p->a);
    if (idle) {
        fo_stream_sync(p->a);
        usleep(5000);
    }
    fo_stream_wait(p->b, p->event, &waited);
    fo_copy(p->y, p->x, sizeof value, p->b);
    fo_stream_sync(p->b);
    double ms = 1e3 * (fo_now() - start);
    CHECK(int_at(p->y, p->b) == value);
    CHECK(waited >= 0.0 && waited <= ms);
    // cuda: what is between two events that follow each other
    if (idle) { CHECK(FO_DEVICE_CPU ? waited == 0.0 : waited < 5.0); }
    fo_stream_sync(p->a);
}

// what b stood still is added up: about what a took, less what b was late, twice in 20 tries
static void test_exposed(FoDevice* d, Pair* p, int paced) {
    double total = 0.0;
    int ngood = 0;
    CHECK_AT("exposed, %s", paced ? "paced" : "unpaced");
    fo_device_pace(d, paced ? 1e-3 : 0.0);
    for (int try = 0; try < 20 && ngood < 2; try++) {
        double before = total, start = fo_now();
        if (!paced) { queue_sleep(p->a, 25000); }
#if FO_DEVICE_CPU
        double flops = 25e-3 * 1e-3 * 1e12;
        if (paced) { fo__enqueue(p->a, paced_op, &flops, sizeof flops); }
#endif
        fo_event_record(p->event, p->a);
        fo_stream_wait(p->b, p->event, &total);
        fo_stream_sync(p->b);
        double ms = total - before;
        CHECK(ms >= 0.0 && ms <= 1e3 * (fo_now() - start));
        ngood += ms >= 24.0;
    }
    CHECK(ngood == 2);
    fo_device_pace(d, 0.0);
}

static void test_never_recorded(Pair* p) {
    FoEvent* e = fo_event_create();
    double waited = 0.0;
    int value = 77;
    CHECK_AT("never recorded");
    fo_stream_wait(p->b, e, &waited);
    fo_upload(p->y, &value, sizeof value, p->b);
    CHECK(int_at(p->y, p->b) == 77 && waited == 0.0);
    fo_event_destroy(e);
}

// a wait is for the last recording before it: not for an earlier one, not for a later one
static void test_recorded_again(Pair* p) {
    Gate first = {0};
    CHECK_AT("recorded again");
    int one = 1, two = 2;
    fo_upload(p->x, &one, sizeof one, p->a);
    fo_event_record(p->event, p->a);
    fo_stream_wait(p->b, p->event, NULL);
    fo_copy(p->y, p->x, sizeof one, p->b);
    CHECK(int_at(p->y, p->b) == 1);

    queue_gate(p->a, &first); // b must not wait for what comes after
    fo_stream_wait(p->b, p->event, NULL);
    fo_upload(p->x, &two, sizeof two, p->a);
    fo_event_record(p->event, p->a);
    fo_stream_sync(p->b);
    CHECK(!atomic_load(&first.late));

    fo_stream_wait(p->b, p->event, NULL); // this one is for the second recording, and the first is long done
    fo_copy(p->y, p->x, sizeof two, p->b);
    usleep(20000);
    open_gate(&first);
    CHECK(int_at(p->y, p->b) == 2);
    CHECK(!atomic_load(&first.late));

    // a thousand recordings of one event, each with its wait: b sees every value in turn
    int host[1000], seen[1000], bad = 0;
    FoEvent* back = fo_event_create();
    for (int i = 0; i < 1000; i++) {
        host[i] = i;
        fo_stream_wait(p->a, back, NULL); // b has read the last value | it is written again
        fo_upload(p->x, &host[i], sizeof *host, p->a);
        fo_event_record(p->event, p->a);
        fo_stream_wait(p->b, p->event, NULL);
        fo_download(&seen[i], p->x, sizeof *seen, p->b);
        fo_event_record(back, p->b);
    }
    fo_stream_sync(p->b);
    for (int i = 0; i < 1000; i++) {
        bad += seen[i] != i;
    }
    CHECK(bad == 0);
    fo_event_destroy(back);
}

// ---- graphs -----------------------------------------------------------------------------------------------
/* A graph over two streams: a adds up, b copies what a has, a waits for b. Launched again and again it does
 * so again; what was queued before comes before, what is queued later after; waits within are timed each
 * time.
 */
static void test_graph(FoDevice* d, Pair* p) {
    enum { LAUNCHES = 5 };
    float host[2] = {1.0f, 0.0f}, back[2] = {0.0f, 0.0f}, *sum = fo_malloc(d, sizeof host), *copy = sum + 1;
    float *one = fo_malloc(d, sizeof *one), *seen = fo_malloc(d, LAUNCHES * sizeof *seen), got[LAUNCHES];
    FoEvent *there = fo_event_create(), *before = fo_event_create();
    double waited = 0.0;
    CHECK_AT("graph");
    fo_upload(one, host, sizeof *one, p->a);
    fo_zero(sum, sizeof host, p->a);
    fo_event_record(before, p->b);
    FoGraph* g = fo_graph_begin(p->a);
    fo_stream_wait(p->b, before, &waited); // recorded before the graph: holds nothing back
    fo_add(sum, one, 1, FO_FP32, p->a);
    fo_event_record(p->event, p->a);
    fo_stream_wait(p->b, p->event, NULL);
    fo_copy(copy, sum, sizeof *copy, p->b);
    fo_event_record(there, p->b);
    fo_stream_wait(p->a, there, &waited);
    fo_add(sum, one, 1, FO_FP32, p->a);
    fo_graph_end(g);
    fo_download(back, sum, sizeof back, p->a);
    fo_stream_sync(p->a);
    CHECK(back[0] == 0.0f && back[1] == 0.0f && waited == 0.0); // nothing has run
    for (int i = 0; i < LAUNCHES; i++) {
        double last = waited;
        queue_sleep(p->b, 3000); // late: the graph waits for it
        fo_zero(copy, sizeof *copy, p->b);
        fo_graph_launch(g);
        fo_stream_wait(p->b, there, NULL); // recorded in the graph: done when that is
        fo_copy(&seen[i], copy, sizeof *copy, p->b);
        fo_stream_sync(p->b);
        fo_stream_sync(p->a);
        CHECK(waited > last);
    }
    fo_download(back, sum, sizeof back, p->a);
    fo_download(got, seen, sizeof got, p->a);
    fo_stream_sync(p->a);
    CHECK(back[0] == 2.0f * LAUNCHES && back[1] == 2.0f * LAUNCHES - 1.0f);
    for (int i = 0; i < LAUNCHES; i++) {
        CHECK(got[i] == 2.0f * (float)i + 1.0f);
    }
    fo_graph_free(g);
    fo_event_destroy(there);
    fo_event_destroy(before);
    fo_free(d, sum);
    fo_free(d, one);
    fo_free(d, seen);
}

#if FO_DEVICE_CPU
// ---- pacing -----------------------------------------------------------------------------------------------
static const double NOMINAL_S = 1e-3;

// seconds that n paced operations take, each the device's nominal, on one stream or from one stream to the
// other
static double paced_s(FoDevice* d, Pair* p, int n, int alternate) {
    double flops = NOMINAL_S * 1e-3 * 1e12;
    usleep(10000); // longer than lateness: clocks start afresh
    fo_device_pace(d, 1e-3);
    double start = fo_now();
    for (int i = 0; i < n; i++) {
        FoStream *s = alternate && i % 2 ? p->b : p->a, *next = alternate && i % 2 ? p->a : p->b;
        fo__enqueue(s, paced_op, &flops, sizeof flops);
        if (alternate) {
            fo_event_record(p->event, s);
            fo_stream_wait(next, p->event, NULL);
        }
    }
    fo_stream_sync(p->a);
    fo_stream_sync(p->b);
    double seconds = fo_now() - start;
    fo_device_pace(d, 0.0);
    return seconds;
}

/* Never less than nominal. Not more than 4 % over, since lateness of one operation is made up by the next: of
 * 20 tries one must succeed, because a machine that gives a thread no time for long does delay it for good.
 */
static void test_pace(FoDevice* d, Pair* p) {
    CHECK_AT("pace");
    for (int i = 0; i < 5; i++) {
        CHECK(paced_s(d, p, 1, 0) >= NOMINAL_S);
    }
    for (int alternate = 0; alternate < 2; alternate++) {
        double least = 1e9, nominal = 100 * NOMINAL_S;
        CHECK_AT("pace, %s", alternate ? "two streams in turn" : "one stream");
        for (int try = 0; try < 60 && least > 1.04 * nominal; try++) {
            double seconds = paced_s(d, p, 100, alternate);
            CHECK(seconds >= nominal * (1.0 - 1e-9));
            least = seconds < least ? seconds : least;
        }
        CHECK(least <= 1.04 * nominal);
    }
    CHECK_AT("unpaced");
    double start = fo_now(), flops = 1e18;
    fo__enqueue(p->a, paced_op, &flops, sizeof flops);
    fo_stream_sync(p->a);
    CHECK(fo_now() - start < 10.0);
}

#endif

// ---- errors -----------------------------------------------------------------------------------------------
static void say_abort(int status) {
    fprintf(stderr, "abort with %d\n", status);
}

static void* die_thread(void* arg) {
    fo_die_rank(*(int*)arg);
    fo_require(0, "one of many");
    return NULL;
}

// four rank threads die at once: one line
static void die_together(void) {
    pthread_t thread[4];
    int rank[4];
    for (int i = 0; i < 4; i++) {
        rank[i] = i;
        pthread_create(&thread[i], NULL, die_thread, &rank[i]);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
    }
}

static void die_with_abort(int rank) {
    fo_die_abort(say_abort);
    fo_die_rank(rank);
    fo_require(1 + 1 == 3, "a=%d is not b=%d", 2, 3);
}

static void quit_with_abort(void) {
    fo_die_abort(say_abort);
    fo_quit(7, "no file '%s'", "x.bin");
}

// exit status of a child that runs f, and what it said
static int status_of(void (*f)(void), char* said, size_t nbytes) {
    int fd[2], status = 0;
    size_t n = 0;
    ssize_t k;
    if (pipe(fd) != 0) { return -1; }
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fd[1], 2);
        f();
        _exit(0);
    }
    close(fd[1]);
    while (n < nbytes - 1 && (k = read(fd[0], said + n, nbytes - 1 - n)) > 0) {
        n += (size_t)k;
    }
    said[n] = 0;
    close(fd[0]);
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void call_with_too_much(void) {
    static char args[FO_MAX_CALL_ARGS + 1];
    FoStream* s = fo_stream_create(fo_device_open(0, 1), "s");
    fo_stream_call(s, sleep_us, args, sizeof args);
}

#if FO_DEVICE_CPU
static void enqueue_too_much(void) {
    static char args[FO_MAX_ARGS + 1];
    FoStream* s = fo_stream_create(fo_device_open(5, 1), "s");
    fo__enqueue(s, paced_op, args, sizeof args);
}
#endif

static void test_errors(void) {
    char said[1024];
    CHECK_AT("errors");
    CHECK_DIES(fo_require(1 == 2, "one=%d is not two=%d", 1, 2), "test_errors: one=1 is not two=2\n");
    CHECK_DIES(fo_require(1 == 2, "x"), "dev/test/test_device.c:");
    CHECK_DIES(die_with_abort(2), "[rank 2] ");
    CHECK_DIES(die_with_abort(2), "die_with_abort: a=2 is not b=3\nabort with 1\n");
    CHECK_DIES(fo_quit(3, "wrong %s %d", "option", 4), "wrong option 4\n");
    CHECK_DIES(call_with_too_much(), "a call with 65 bytes of arguments, at most 64");
#if FO_DEVICE_CPU
    CHECK_DIES(enqueue_too_much(), "an operation with 321 bytes of arguments, at most 320");
    CHECK_DIES((void)fo_malloc(fo_device_open(0, 1), SIZE_MAX / 2),
               "no memory for 9223372036854775807 bytes");
    CHECK_DIES((void)fo_graph_begin(fo_stream_create(fo_device_open(0, 1), "g")),
               "the cpu device has no graphs");
#else
    CHECK_DIES((void)fo_malloc(fo_device_open(0, 1), SIZE_MAX / 2), "rank 0: no 8796093022207 MiB on GPU 0");
    CHECK_DIES(fo_device_pace(fo_device_open(0, 1), 1.0), "a GPU is not paced (1 TFLOP/s");
    const char* share = getenv("FO_SHARE_GPUS"); // as where one GPU is all there is
    unsetenv("FO_SHARE_GPUS");
    CHECK_DIES((void)fo_device_open(0, 1000), "1000 ranks on this machine, ");
    if (share) { setenv("FO_SHARE_GPUS", share, 1); }
#endif
    CHECK(status_of(quit_with_abort, said, sizeof said) == 7);
    CHECK(strcmp(said, "no file 'x.bin'\nabort with 7\n") == 0);
    CHECK(status_of(die_together, said, sizeof said) == 1);
    CHECK(strchr(said, '\n') == strrchr(said, '\n') && strstr(said, "die_thread: one of many\n") != NULL);
}

int main(void) {
    test_errors(); // before any thread has started
    test_numbers();
    test_device();
    test_memory();
    FoDevice* d = fo_device_open(0, 1);
    test_order(d);
    test_copies(d);
#if FO_DEVICE_CPU
    test_op_times(d);
#endif
    test_destroy(d);
    test_asynchronous(d);
    Pair p = {fo_stream_create(d, "a"), fo_stream_create(d, "b"), fo_event_create(),
              fo_malloc(d, sizeof(int)), fo_malloc(d, sizeof(int))};
    for (int i = 0; i < 5; i++) {
        test_event_orders(&p, 0, 10 + i);
        test_event_orders(&p, 1, 20 + i);
    }
    test_exposed(d, &p, 0);
    if (fo_device_emulates()) { test_exposed(d, &p, 1); }
    if (fo_device_graphs()) { test_graph(d, &p); }
    test_never_recorded(&p);
    test_recorded_again(&p);
#if FO_DEVICE_CPU
    test_pace(d, &p);
#endif
    fo_stream_destroy(p.a);
    fo_stream_destroy(p.b);
    fo_event_destroy(p.event);
    fo_free(d, p.x);
    fo_free(d, p.y);
    CHECK_AT("end");
    CHECK(fo_device_nbytes(d) == 0);
    fo_device_close(d);
    return check_report();
}
