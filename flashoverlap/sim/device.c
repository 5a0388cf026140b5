// device.c -- clocks in place of streams, address space in place of memory. See sim.h.
#include "flashoverlap/sim/sim.h"
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

// the clock of the host's thread that simulates: fo_now() has no other way to it
static _Thread_local FoDevice* current;

double fo_now(void) {
    return current ? current->host_s : 0.0;
}

double sim_host_s(const FoDevice* d) {
    return d->host_s;
}

// ---- device -----------------------------------------------------------------------------------------------
FoDevice* sim_device_open(const SimHardware* h) {
    FoDevice* d = calloc(1, sizeof *d);
    fo_require(d != NULL, "out of memory");
    d->h = *h;
    current = d;
    return d;
}

FoDevice* fo_device_open(int rank, int nlocal) {
    fo_die(__FILE__, __LINE__, __func__, "rank %d of %d: a simulated device is opened by sim_device_open",
           rank, nlocal);
}

void fo_device_close(FoDevice* d) {
    if (current == d) { current = NULL; }
    free(d);
}

const char* fo_device_name(const FoDevice* d) {
    return d->h.name;
}
const char* fo_device_hint(const FoDevice* d) {
    (void)d;
    return NULL;
}
double fo_device_peak_tflops(FoDevice* d) {
    return d->h.peak_tflops;
}
void fo_device_deterministic(FoDevice* d, int on) {
    (void)d, (void)on;
}
void fo_device_fuse_gelu(FoDevice* d, int level) {
    (void)d, (void)level;
}
void fo_device_tf32(FoDevice* d, int on) {
    (void)d, (void)on;
}
void fo_device_profiler(FoDevice* d, int on) {
    (void)d, (void)on;
}
void fo_device_state(const FoDevice* d, char* text, size_t nbytes) {
    (void)d;
    if (nbytes > 0) { text[0] = 0; }
}
int fo_device_emulates(void) {
    return 0;
}
void fo_device_pace(FoDevice* d, double tflops) {
    (void)d;
    fo_require(tflops == 0.0, "a simulated device has the pace of its hardware");
}

// ---- memory -----------------------------------------------------------------------------------------------
// the bytes that fo_free gives back stand before the pointer's page
typedef struct {
    size_t nbytes;
} Header;

enum { PAGE = 4096 };

void* fo_malloc(FoDevice* d, size_t nbytes) {
    char* p = mmap(NULL, nbytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    fo_require(p != MAP_FAILED, "no address space for %zu bytes", nbytes);
    fo_require(mprotect(p, PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect failed");
    ((Header*)(void*)p)->nbytes = nbytes;
    d->nbytes += nbytes;
    d->peak_nbytes = d->nbytes > d->peak_nbytes ? d->nbytes : d->peak_nbytes;
    return p + PAGE;
}

void fo_free(FoDevice* d, void* p) {
    if (!p) { return; }
    char* start = (char*)p - PAGE;
    size_t nbytes = ((Header*)(void*)start)->nbytes;
    d->nbytes -= nbytes;
    munmap(start, nbytes + PAGE);
}

size_t fo_device_nbytes(const FoDevice* d) {
    return d->nbytes;
}
size_t fo_device_peak_nbytes(const FoDevice* d) {
    return d->peak_nbytes;
}
size_t fo_device_free_nbytes(const FoDevice* d) {
    const double nbytes = d->h.memory_gib * 1073741824.0 - (double)d->nbytes;
    return nbytes > 0.0 ? (size_t)nbytes : 0;
}

// ---- operations -------------------------------------------------------------------------------------------
static void keep_span(FoStream* s, FoSpan span) {
    if (!s->device->traced) { return; }
    if (s->nspans == s->room) {
        s->room = s->room ? 2 * s->room : 1024;
        s->spans = realloc(s->spans, (size_t)s->room * sizeof *s->spans);
        fo_require(s->spans != NULL, "out of memory");
    }
    s->spans[s->nspans++] = span;
}

/* Work of `seconds` from start on takes longer by what of it falls into exchanges: each stretch of those goes
 * at 1 / (1 + contention). Exchanges are kept in the order in which they were queued; the latest are enough,
 * since what is computed beside an exchange is queued soon after it.
 */
static double stretched_s(const FoDevice* d, double start, double seconds) {
    const int room = (int)(sizeof d->comm_busy / sizeof *d->comm_busy);
    const int n = d->ncomm < room ? d->ncomm : room;
    double at = start, left = seconds;
    if (d->h.contention == 0.0) { return seconds; }
    for (;;) { // to the next edge of an exchange
        double edge = INFINITY, slow = 1.0;
        for (int i = 0; i < n; i++) {
            const double from = d->comm_busy[i][0], to = d->comm_busy[i][1];
            if (from <= at && at < to) { slow = 1.0 + d->h.contention; }
            if (from > at && from < edge) { edge = from; }
            if (to > at && to < edge) { edge = to; }
        }
        if (at + left * slow <= edge) { return at + left * slow - start; }
        left -= (edge - at) / slow;
        at = edge;
    }
}

void sim_queue(FoStream* s, const char* name, double seconds, double flops, int computes) {
    FoDevice* d = s->device;
    d->host_s += 1e-6 * d->h.launch_us;
    const double start = fmax(s->clock_s, d->host_s);
    const double takes = computes ? stretched_s(d, start, seconds) : seconds;
    FoSpan span = {FO_SPAN_OPERATION, name, s->label, start, takes, flops, s->messages};
    keep_span(s, span);
    memset(&s->messages, 0, sizeof s->messages);
    s->clock_s = start + takes;
}

/* Tiles of the result are computed `units` at a time. Where they do not fill the units, libraries cut K, in
 * pieces of 512 at least, and add up.
 */
double sim_gemm_s(const SimHardware* h, size_t rows, int K, int cols) {
    const double tile = fmax(h->gemm_tile, 1.0), units = h->gemm_units;
    double tiles = ceil((double)rows / tile) * ceil((double)cols / tile);
    if (rows == 0 || cols == 0) { return 0.0; }
    if (units > 0.0) {
        const double pieces = fmax(1.0, fmin(floor(units / tiles), floor((double)K / 512.0)));
        tiles = ceil(tiles * pieces / units) * units / pieces;
    }
    return 1e-6 * h->kernel_us + tiles * tile * tile * 2.0 * (double)K / (1e12 * h->gemm_tflops);
}

double sim_bytes_s(const SimHardware* h, double nbytes) {
    return nbytes > 0.0 ? 1e-6 * h->kernel_us + nbytes / (1e9 * h->memory_gbytes_s) : 0.0;
}

static void queue_copy(FoStream* s, const char* name, size_t nbytes, int passes) {
    sim_queue(s, name, sim_bytes_s(&s->device->h, (double)passes * (double)nbytes), 0.0, 1);
}

// host memory stays as it is, for nobody has computed anything: who reads it afterwards has filled it before
void fo_upload(void* dst, const void* host_src, size_t nbytes, FoStream* s) {
    (void)dst, (void)host_src;
    queue_copy(s, "upload", nbytes, 1);
}
void fo_download(void* host_dst, const void* src, size_t nbytes, FoStream* s) {
    (void)host_dst, (void)src;
    queue_copy(s, "download", nbytes, 1);
}
void fo_copy(void* dst, const void* src, size_t nbytes, FoStream* s) {
    (void)dst, (void)src;
    queue_copy(s, "copy", nbytes, 2);
}
void fo_zero(void* dst, size_t nbytes, FoStream* s) {
    (void)dst;
    queue_copy(s, "zero", nbytes, 1);
}

// ---- streams and events -----------------------------------------------------------------------------------
struct FoEvent {
    double at_s; // 0: never recorded
};

FoStream* fo_stream_create(FoDevice* d, const char* name) {
    FoStream* s = calloc(1, sizeof *s);
    fo_require(s != NULL, "%s: out of memory", name);
    s->device = d;
    return s;
}
void fo_stream_destroy(FoStream* s) {
    free(s->spans);
    free(s);
}
void fo_stream_sync(FoStream* s) {
    s->device->host_s = fmax(s->device->host_s, s->clock_s);
}
FoDevice* fo_stream_device(const FoStream* s) {
    return s->device;
}
FoEvent* fo_event_create(void) {
    FoEvent* e = calloc(1, sizeof *e);
    fo_require(e != NULL, "out of memory");
    return e;
}
void fo_event_destroy(FoEvent* e) {
    free(e);
}
void fo_event_record(FoEvent* e, FoStream* s) {
    e->at_s = s->clock_s;
}
void fo_stream_wait(FoStream* s, FoEvent* e, double* waited_ms) {
    const double begins = fmax(s->clock_s, s->device->host_s);
    if (e->at_s <= begins) { return; }
    if (waited_ms) {
        FoSpan span = {FO_SPAN_WAIT, "wait", s->label, begins, e->at_s - begins, 0.0, {0, 0, 0, 0}};
        keep_span(s, span);
        *waited_ms += 1e3 * (e->at_s - begins);
    }
    s->clock_s = e->at_s;
}
void fo_stream_call(FoStream* s, void (*fn)(void* args), const void* args, size_t nbytes) {
    char copy[FO_MAX_CALL_ARGS];
    fo_require(nbytes <= sizeof copy, "%zu bytes of arguments, at most %zu", nbytes, sizeof copy);
    memcpy(copy, args, nbytes);
    sim_queue(s, "call", 0.0, 0.0, 0);
    fn(copy);
}

// ---- graphs -----------------------------------------------------------------------------------------------
int fo_device_graphs(void) {
    return 0;
}
FoGraph* fo_graph_begin(FoStream* s) {
    (void)s;
    fo_die(__FILE__, __LINE__, __func__, "a simulated device has no graphs");
}
void fo_graph_end(FoGraph* g) {
    (void)g;
}
void fo_graph_launch(FoGraph* g) {
    (void)g;
}
void fo_graph_free(FoGraph* g) {
    (void)g;
}

// ---- what ran when ----------------------------------------------------------------------------------------
void fo_device_trace(FoDevice* d, int on) {
    d->traced = on;
}
int fo_stream_spans(FoStream* s, FoSpan spans[], int max) {
    const int left = s->nspans - s->first_span, n = left < max ? left : max;
    memcpy(spans, s->spans + s->first_span, (size_t)n * sizeof *spans);
    s->first_span += n;
    if (s->first_span == s->nspans) { s->first_span = s->nspans = 0; }
    return n;
}
const char* fo_stream_label(FoStream* s, const char* label) {
    const char* before = s->label;
    s->label = label;
    return before;
}
void fo_stream_messages(FoStream* s, FoMessages m) {
    s->messages = m;
}
