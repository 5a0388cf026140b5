/* check.cpp -- the emulator's checker: what a compiler's -fsanitize=thread calls at each access to memory,
 * defined here with CUDA's rules instead of a library's. It finds, whatever schedule happened to run,
 *
 *   missing stream waits, on device memory and on pinned host memory, among the streams of all devices and
 *   all host threads; memory that is out of bounds, freed or never written; device memory used by the host,
 *   and the host's by a kernel; races between the threads of a kernel, in shared and in global memory.
 *
 * Each context (a stream, a host thread) has a vector clock; check.h says what orders them. Every two bytes
 * of the arena have a Cell that says which run of an operation wrote and read them last, and where in its
 * kernel. An access is right if those come before it. So a race is found whichever of its two sides ran
 * first. Host threads order each other by check_host.cpp and by atomics; a stream never is by those.
 *
 * A report is one line on stderr, "emu: KIND: ...", and the process ends with status 66. FO_EMU_KEEP_GOING=1:
 * after at most 20 reports, when the program ends. Addresses that the emulator does not hand out are the
 * host's own and nobody's business. Pairs of bytes share a cell: two threads may not write the two of one.
 */
#include "dev/emu/check.h"
#include "dev/emu/exec.h"
#include <dlfcn.h>
#include <link.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#define FAST inline __attribute__((always_inline)) // on the way of every access

namespace {
enum : uint32_t {
    NSLOTS = 256,            // contexts alive at once, and one that stands for before everything
    NRUNS = 1u << 28,        // runs of operations that a process can tell apart
    NSETS = 1u << 24,        // sets of readers, likewise
    UNDEFINED = 1u << 31,    // in Cell::written: the bytes' values are undefined
    SET = 1u << 31,          // in Cell::read: the rest numbers a set
    ATOMIC = 1u << 31,       // in Cell::writer: by an atomic operation
    ALL_BLOCKS = ATOMIC - 1, // a place: threads of several blocks
    BEFORE_ALL = 1,          // a run that comes before every other
    NO_RUN = SET - 1,        // the number of none
    LINE = 256,              // bytes of the arena that are of one kind; every allocation begins with a line
    NMEMO = 64,
    NFINE = 4,
    STACK_NBYTES = 256 << 10, // of a fiber
    MAX_REPORTS = 20,
    NDEVICES = 64
};
enum : uint8_t { FREE, PINNED, DEVICE }; // kinds of a line; DEVICE + its ordinal

// of two bytes; 0 nobody. Kernels also say where in the launch: a place, see Here
struct Cell {
    uint32_t written, writer; // a run; its place
    uint32_t read, reader; // a run, or the set of those that aren't before each other; the last one's place
};

struct Clock {
    uint32_t t[NSLOTS];
};

// one run of an operation on a stream, or what a host thread does from one release to the next
struct Run {
    const char *what, *who;
    uint32_t time;
    uint16_t slot;
};

// a list of runs, each once; equal lists have equal numbers
struct Set {
    uint32_t run, rest;
};

// what a context's run makes of an earlier Cell::read or written; so it is thought about once a run
struct Memo {
    uint32_t key, run;
    uint32_t merged;  // those of key that aren't before this run, and this run
    uint32_t culprit; // one of key that isn't before this run; 0: none
};

struct Context {
    Clock clock;
    int slot, device; // device -1: a host thread
    const char *who, *what;
    uint32_t run; // what it does now; 0: not yet numbered
    // seen in Cell::written and Cell::read in this run, and found to come before it: by their last bits
    uint32_t fine[NFINE], fine_read[NFINE];
    Memo memo[NMEMO];
};

struct Block { // of memory
    size_t nbytes;
    int device; // -1 pinned
};

struct Written { // by a stream's memory operation
    uint32_t value;
    Clock clock;
};

// what is changed under the lock
struct Global {
    std::recursive_mutex lock;
    std::deque<int> slots;         // free ones; the one that rested longest is taken first
    Context* context[NSLOTS] = {}; // of streams and host threads
    int used = 1;                  // slots below this one have been used
    int nhosts = 0;
    std::unordered_map<const void*, Clock> syncs;
    std::unordered_map<const void*, std::deque<Written>> flags;
    std::map<uintptr_t, Block> blocks, freed;
    std::unordered_map<uint64_t, uint32_t> set_of; // (run, rest) -> its number
    std::set<std::string> names, reported;
    uint32_t nruns = BEFORE_ALL + 1, nsets = 0;
    bool peer[NDEVICES][NDEVICES] = {};
    unsigned long changes = 0; // of blocks
    bool keep_going = false;
    int nreports = 0;
    Global();
};

// made at the first use, which is before main; it lives for ever, as threads may outlive main
Global& global() {
    static Global* g = new Global();
    return *g;
}
typedef std::lock_guard<std::recursive_mutex> Guard;

// fixed once the arena is there
uintptr_t arena;
size_t arena_nbytes;
Cell* cells;    // of the arena
uint8_t* kinds; // of its lines
Run* runs;
Set* sets;

// the device thread's alone
uintptr_t image; // the program's own code and data
size_t image_nbytes;
uintptr_t local; // its thread-local memory: static __shared__, among other things
size_t local_nbytes;
Cell *local_cells, *dynamic_cells;

// the calling thread
struct Self {
    Context *now, *own; // whom it acts for; itself as a host thread
    int quiet;
    bool device; // it is the device thread
};
thread_local Self self;

struct Access {
    uintptr_t a;
    size_t nbytes;
    bool write, atomic;
    bool kernel; // inside of one
    bool copies; // reads what may be undefined
    void* pc;    // where the program does it; NULL: the emulator does it for an operation
};

// ---- where in a kernel ------------------------------------------------------------------------------------
// what of a kernel runs without a switch of threads and without a barrier
struct Place {
    uint32_t thread; // below WARPS; or WARPS + w: threads of warp w; or BLOCK: threads of several warps
    uint32_t warp_epoch;
};
enum : uint32_t { WARPS = emu::MAX_THREADS, BLOCK = 2 * WARPS };

/* Here -- the device thread's place. Places are counted from 1 in each launch. Those below `first` belong to
 * earlier blocks, of which nothing more needs to be known than that they aren't this one; those below
 * `barrier` come before all that the block does now. The threads of the others are in `places`.
 */
struct Here {
    struct {
        unsigned long launch, block;
        unsigned thread, block_epoch, warp_epoch;
    } seen;
    uint32_t place, first, barrier, next;
    uint32_t warp_many, block_many; // places that stand for several threads of this warp, block; 0: not made
    std::vector<Place> places;      // from `barrier`
    std::vector<std::pair<uint32_t, unsigned long>> firsts; // (first, block) of the launch's blocks
    uintptr_t pack;                                         // the launch's arguments
    size_t pack_nbytes;
};
Here here;
enum { SEEN_NBYTES = 2 * sizeof(unsigned long) + 3 * sizeof(unsigned) };
static_assert(offsetof(emu::Position, warp_epoch) + sizeof(unsigned) - offsetof(emu::Position, launch) ==
                  SEEN_NBYTES,
              "the two are compared as bytes");

void number_run(Context& c);

uint32_t new_place(uint32_t thread, unsigned warp_epoch) {
    here.places.push_back(Place{thread, warp_epoch});
    return here.next++;
}

void enter_launch() {
    here.next = 1;
    here.firsts.clear();
    here.pack = (uintptr_t)emu::position.pack;
    here.pack_nbytes = malloc_usable_size((void*)here.pack);
    if (!self.now->run) { number_run(*self.now); }
}

[[gnu::noinline]] void move_here() {
    const emu::Position& p = emu::position;
    if (p.launch != here.seen.launch) { enter_launch(); }
    if (p.launch != here.seen.launch || p.block != here.seen.block) {
        here.first = here.next;
        here.firsts.emplace_back(here.first, p.block);
        here.seen.block_epoch = p.block_epoch + 1;
    }
    if (p.block_epoch != here.seen.block_epoch) {
        here.barrier = here.next;
        here.places.clear();
        here.warp_many = here.block_many = 0;
    }
    if (p.warp_epoch != here.seen.warp_epoch || p.thread / 32 != here.seen.thread / 32) {
        here.warp_many = 0;
    }
    memcpy(&here.seen, &p.launch, SEEN_NBYTES);
    here.place = new_place(p.thread, p.warp_epoch);
}

inline void find_here() {
    if (memcmp(&here.seen, &emu::position.launch, SEEN_NBYTES) != 0) { move_here(); }
}

uint32_t warp_of(const Place& p) {
    return p.thread < WARPS ? p.thread / 32 : p.thread - WARPS;
}

[[gnu::noinline]] bool place_before_slowly(uint32_t place) {
    if (place < here.first || place == ALL_BLOCKS) { return false; }
    const Place& p = here.places[place - here.barrier];
    return p.thread == here.seen.thread ||
           (p.thread != BLOCK && warp_of(p) == here.seen.thread / 32 && p.warp_epoch < here.seen.warp_epoch);
}
// of an access at that place, in this launch: is the present one ordered after it?
inline bool place_before(uint32_t place) {
    return place == here.place || place - here.first < here.barrier - here.first ||
           place_before_slowly(place);
}

// is a reader of this launch the present one, or several of which it is one?
inline bool stands_for_here(uint32_t place) {
    return place == here.place || place == here.warp_many || place == here.block_many;
}

// the place that stands for the reader at `place` and the present one, which aren't ordered
uint32_t merge_places(uint32_t place) {
    if (place < here.first || place == ALL_BLOCKS) { return ALL_BLOCKS; }
    const Place p = here.places[place - here.barrier];
    uint32_t warp = here.seen.thread / 32;
    if (p.thread != BLOCK && warp_of(p) == warp) {
        if (!here.warp_many) { here.warp_many = new_place(WARPS + warp, here.seen.warp_epoch); }
        return here.warp_many;
    }
    if (!here.block_many) { here.block_many = new_place(BLOCK, 0); }
    return here.block_many;
}

// ---- contexts and clocks ----------------------------------------------------------------------------------
void* reserve(size_t nbytes) {
    void* p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "emu: the checker can't reserve %zu bytes of addresses\n", nbytes);
        _exit(66);
    }
    return p;
}

Global::Global() {
    for (int i = 1; i < (int)NSLOTS; i++) {
        slots.push_back(i);
    }
    runs = (Run*)reserve(NRUNS * sizeof(Run));
    sets = (Set*)reserve(NSETS * sizeof(Set));
    const char* s = getenv("FO_EMU_KEEP_GOING");
    keep_going = s && strcmp(s, "1") == 0;
    atexit([] {
        Global& g = global();
        if (g.nreports > 0) {
            fflush(NULL);
            _exit(66);
        }
    });
}

[[noreturn]] void give_up(const char* why) {
    fprintf(stderr, "emu: the checker gives up: %s\n", why);
    fflush(NULL);
    _exit(66);
}

Context* open_context(const char* who, int device) { // under the lock
    Global& g = global();
    if (g.slots.empty()) { give_up("more than 255 streams and host threads at once"); }
    int slot = g.slots.front();
    g.slots.pop_front();
    if (slot >= g.used) { g.used = slot + 1; }
    Context*& c = g.context[slot];
    if (!c) { c = (Context*)calloc(1, sizeof(Context)); }
    uint32_t time = c->clock.t[slot]; // goes on, so that nothing of the last owner's seems to come after it
    memset((void*)c, 0, sizeof *c);
    c->slot = slot;
    c->device = device;
    c->clock.t[slot] = time + 1;
    c->who = g.names.insert(who).first->c_str();
    c->what = "";
    return c;
}

void close_context(Context* c) { // under the lock
    global().slots.push_back(c->slot);
}

// a host thread's slot is given back when it ends
struct Leaver {
    bool made = false;
    ~Leaver() {
        if (made) {
            Guard guard(global().lock);
            close_context(self.own);
        }
    }
};
thread_local Leaver leaver;

Context& me() {
    if (!self.now) {
        if (!self.own) {
            Guard guard(global().lock);
            char who[32];
            (void)snprintf(who, sizeof who, "host thread %d", ++global().nhosts);
            self.own = open_context(who, -1);
            leaver.made = true;
        }
        self.now = self.own;
    }
    return *self.now;
}

inline void join(Clock& a, const Clock& b) {
    for (int i = 0; i < global().used; i++) {
        a.t[i] = a.t[i] > b.t[i] ? a.t[i] : b.t[i];
    }
}

inline bool run_before(const Context& c, uint32_t run) {
    return c.clock.t[runs[run].slot] >= runs[run].time;
}

// a run's number is made when it first touches memory: most polls, and most of what host threads do, don't
void number_run(Context& c) {
    Global& g = global();
    Guard guard(g.lock);
    if (g.nruns == NRUNS) { give_up("too many operations"); }
    c.run = g.nruns++;
    runs[c.run] = Run{c.what, c.who, c.clock.t[c.slot], (uint16_t)c.slot};
    for (int i = 0; i < (int)NFINE; i++) {
        c.fine[i] = c.fine_read[i] = NO_RUN;
    }
}

uint32_t set_number(uint32_t run, uint32_t rest) { // under the lock
    Global& g = global();
    auto at = g.set_of.emplace((uint64_t)run << 32 | rest, g.nsets | SET);
    if (at.second) {
        if (g.nsets == NSETS) { give_up("too many sets of readers"); }
        sets[g.nsets++] = Set{run, rest};
    }
    return at.first->second;
}

// of a Cell::read or the number of a run: which of them come before the present run of c
const Memo& look_up(Context& c, uint32_t key) {
    Memo& m = c.memo[(key * 0x9E3779B1u) >> 26];
    if (m.key == key && m.run == c.run) { return m; }
    m = Memo{key, c.run, 0, 0};
    uint32_t kept[NSLOTS], n = 0;
    for (uint32_t at = key; at;) {
        uint32_t run = at & SET ? sets[at & ~SET].run : at;
        if (!run_before(c, run)) { m.culprit = kept[n++] = run; }
        at = at & SET ? sets[at & ~SET].rest : 0;
    }
    m.merged = c.run;
    if (n) {
        Guard guard(global().lock);
        uint32_t rest = 0;
        while (n) {
            rest = rest ? set_number(kept[--n], rest) : kept[--n];
        }
        m.merged = set_number(c.run, rest);
    }
    return m;
}

inline uint32_t last_reader(const Cell& c) {
    return c.read & SET ? sets[c.read & ~SET].run : c.read;
}

// ---- reports ----------------------------------------------------------------------------------------------
std::string format(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return text;
}

std::string describe(const char* what, const char* who) {
    return *what ? format("%s on %s", what, who) : std::string(who);
}
std::string describe(uint32_t run) {
    return describe(runs[run].what, runs[run].who);
}

std::string describe_block(uintptr_t a, const std::map<uintptr_t, Block>::value_type& b) {
    std::string where = b.second.device < 0 ? "pinned memory" : format("device %d", b.second.device);
    return format("byte %zu of %zu allocated on %s", (size_t)(a - b.first), b.second.nbytes, where.c_str());
}

// where address a is, for people
std::string describe_address(uintptr_t a) {
    Global& g = global();
    auto at = g.blocks.upper_bound(a);
    if (at == g.blocks.begin()) { return ""; }
    at--;
    return a - at->first < at->second.nbytes + LINE ? ", " + describe_block(a, *at) : "";
}

// "file.cu:12", or nothing
std::string source_line(void* pc) {
    if (!pc) { return ""; }
    uintptr_t base = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
            *(uintptr_t*)out = info->dlpi_addr; // the first is the program itself
            return 1;
        },
        &base);
    char path[4096], line[512] = "";
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    std::string command = format("addr2line -se '%s' %#zx 2>/dev/null", path, (size_t)pc - base - 1);
    FILE* f = popen(command.c_str(), "r");
    if (f) {
        if (!fgets(line, sizeof line, f)) { line[0] = 0; }
        pclose(f);
    }
    line[strcspn(line, " \n")] = 0;
    return *line && *line != '?' ? format(" at %s", line) : "";
}

unsigned long block_of(uint32_t place) {
    size_t i = 0;
    while (i + 1 < here.firsts.size() && here.firsts[i + 1].first <= place) {
        i++;
    }
    return here.firsts[i].second;
}

// the place of the other access, in the same launch
std::string describe_place(uint32_t place) {
    if (place == ALL_BLOCKS) { return "threads of several blocks"; }
    if (place < here.first) { return format("block %lu", block_of(place)); }
    if (place < here.barrier) { return "a thread of the same block"; }
    uint32_t thread = here.places[place - here.barrier].thread;
    if (thread < WARPS) { return format("thread %u of the same block", thread); }
    return thread == BLOCK ? "several warps of the same block" : "several lanes of the same warp";
}

/* report -- one line: "emu: KIND: who reads or writes, where; what about it". Ends the process, or counts.
 * An operation's mistake of one kind is said once.
 */
[[gnu::noinline]] void report(const char* kind, const Context& c, const Access& x, uintptr_t a,
                              const std::string& rest) {
    Global& g = global();
    Guard guard(g.lock);
    if (self.quiet > 0 || g.nreports >= (int)MAX_REPORTS) { return; }
    if (!g.reported.insert(format("%s %s %s", kind, c.who, c.what)).second) { return; }
    g.nreports++;
    self.quiet++;
    std::string at =
        x.kernel ? format(", block %lu, thread %u,", emu::position.block, emu::position.thread) : "";
    fprintf(stderr, "emu: %s: %s%s %s %zu bytes%s%s%s%s\n", kind, describe(c.what, c.who).c_str(), at.c_str(),
            x.write ? "writes" : "reads", x.nbytes, source_line(x.pc).c_str(), describe_address(a).c_str(),
            rest.empty() ? "" : "; ", rest.c_str());
    self.quiet--;
    if (!g.keep_going) {
        fflush(NULL);
        _exit(66);
    }
}

// an address of the arena that isn't allocated
void report_unallocated(const Context& c, const Access& x, uintptr_t a) {
    Global& g = global();
    Guard guard(g.lock);
    auto at = g.freed.upper_bound(a);
    if (at != g.freed.begin() && a - (--at)->first < at->second.nbytes) {
        report("freed memory", c, x, a, "was " + describe_block(a, *at));
        return;
    }
    std::string where = describe_address(a);
    report(where.empty() ? "memory that was never allocated" : "out of bounds", c, x, a, "");
}

// ---- cells of global memory -------------------------------------------------------------------------------
// the block that holds address a. The thread's last one is tried first
const Block* block_at(uintptr_t a) {
    static thread_local struct {
        uintptr_t begin;
        const Block* block;
        unsigned long changes;
    } last;
    Global& g = global();
    Guard guard(g.lock);
    if (last.block && last.changes == g.changes && a - last.begin < last.block->nbytes) { return last.block; }
    auto at = g.blocks.upper_bound(a);
    if (at == g.blocks.begin() || a - (--at)->first >= at->second.nbytes) { return NULL; }
    last = {at->first, &at->second, g.changes};
    return last.block;
}

inline uintptr_t address_of(const Cell& cell, const Access& x) {
    uintptr_t a = arena + (uintptr_t)(&cell - cells) * 2;
    return a < x.a ? x.a : a;
}

// is the present access ordered after the last write of the cell, and is there anything to read?
[[gnu::noinline]] bool write_before(Context& c, Cell& cell, const Access& x) {
    uintptr_t a = address_of(cell, x);
    if (cell.written == 0) {
        const Block* b = block_at(a);
        if (!b) {
            report_unallocated(c, x, a);
            return false;
        }
        cell.written = b->device < 0 ? BEFORE_ALL : BEFORE_ALL | UNDEFINED;
    }
    if (!x.write && !x.copies && (cell.written & UNDEFINED)) {
        uint32_t by = cell.written &= ~UNDEFINED;
        report("uninitialised memory", c, x, a,
               by == BEFORE_ALL ? "never written"
                                : "copied by " + describe(by) + " from what was never written");
        return false;
    }
    uint32_t run = cell.written & ~UNDEFINED;
    if (run == c.run) {
        uint32_t place = cell.writer & ~ATOMIC;
        if (!x.kernel || place_before(place) || (x.atomic && (cell.writer & ATOMIC))) { return true; }
        cell.writer = here.place;
        report("race in a kernel", c, x, a, "written by " + describe_place(place));
        return false;
    }
    if (!run_before(c, run)) {
        cell.written = BEFORE_ALL;
        report("missing wait", c, x, a, "not ordered after " + describe(run) + ", which writes it");
        return false;
    }
    c.fine[cell.written % NFINE] = cell.written;
    return true;
}

// is the present write ordered after all reads of the cell?
[[gnu::noinline]] bool reads_before(Context& c, Cell& cell, const Access& x) {
    uint32_t culprit = look_up(c, cell.read).culprit;
    if (culprit) {
        cell.read = 0;
        report("missing wait", c, x, address_of(cell, x),
               "not ordered after " + describe(culprit) + ", which reads it");
        return false;
    }
    if (last_reader(cell) != c.run) {
        c.fine_read[cell.read % NFINE] = cell.read;
        return true;
    }
    if (!x.kernel || place_before(cell.reader)) { return true; }
    uint32_t place = cell.reader;
    cell.read = 0;
    report("race in a kernel", c, x, address_of(cell, x), "read by " + describe_place(place));
    return false;
}

[[gnu::noinline]] void note_read(Context& c, Cell& cell, bool kernel) {
    if (cell.read && last_reader(cell) == c.run) {
        if (kernel) { cell.reader = place_before(cell.reader) ? here.place : merge_places(cell.reader); }
        return;
    }
    if (cell.read) {
        uint32_t merged = look_up(c, cell.read).merged;
        if (merged == c.run) { c.fine_read[cell.read % NFINE] = cell.read; }
        cell.read = merged;
    } else {
        cell.read = c.run;
    }
    cell.reader = kernel ? here.place : 0;
}

// these functions return false after a report
FAST bool read_cells(Context& c, Cell* cell, const Cell* end, const Access& x) {
    const uint32_t run = c.run, place = x.kernel ? here.place : 0;
    for (; cell < end; cell++) {
        uint32_t w = cell->written;
        bool fine = w == run ? cell->writer == place : w == c.fine[w % NFINE] && !(w & UNDEFINED);
        if (!fine && !write_before(c, *cell, x)) { return false; }
        if (x.atomic) { continue; } // an atomic one races with plain writes alone
        uint32_t r = cell->read;
        if (r == 0 || r == c.fine_read[r % NFINE]) {
            cell->read = run;
            cell->reader = place;
        } else if (r != run || (cell->reader != ALL_BLOCKS && !stands_for_here(cell->reader))) {
            note_read(c, *cell, x.kernel);
        }
    }
    return true;
}

FAST bool write_cells(Context& c, Cell* cell, const Cell* end, const Access& x) {
    const uint32_t run = c.run, place = x.kernel ? here.place : 0;
    const uint32_t writer = x.atomic ? place | ATOMIC : place;
    for (; cell < end; cell++) {
        uint32_t w = cell->written, r = cell->read;
        bool fine = w == run ? cell->writer == writer : w == c.fine[w % NFINE];
        if (!fine && !write_before(c, *cell, x)) { return false; }
        if (r) {
            fine = r == run ? cell->reader == place : r == c.fine_read[r % NFINE];
            if (!fine && !reads_before(c, *cell, x)) { return false; }
            if (!x.atomic) { cell->read = 0; }
        }
        cell->written = run;
        cell->writer = writer;
    }
    return true;
}

FAST bool touch_cells(Context& c, const Access& x) {
    Cell* first = cells + (x.a - arena) / 2;
    const Cell* end = cells + (x.a - arena + x.nbytes + 1) / 2;
    return x.write ? write_cells(c, first, end, x) : read_cells(c, first, end, x);
}

// instrumented code touches the arena
[[gnu::noinline]] void touch_by_host(const Access& x) {
    if (self.quiet > 0) { return; }
    Guard guard(global().lock);
    Context& c = me();
    uint8_t kind = kinds[(x.a - arena) / LINE];
    if (kind >= DEVICE) {
        report("host access to device memory", c, x, x.a, "");
        return;
    }
    if (!c.run) { number_run(c); }
    if (kind == FREE) {
        report_unallocated(c, x, x.a);
        return;
    }
    if (!x.atomic) { touch_cells(c, x); }
}

[[gnu::noinline]] void touch_odd_line(Context& c, const Access& x, uint8_t kind) {
    if (kind == FREE) {
        report_unallocated(c, x, x.a);
        return;
    }
    Guard guard(global().lock); // of pinned memory, whose cells host threads change too
    if (kind != PINNED && !global().peer[c.device][kind - DEVICE]) {
        report("no peer access", c, x, x.a,
               format("cudaDeviceEnablePeerAccess lets device %d use it", c.device));
        return;
    }
    touch_cells(c, x);
}

FAST void touch_by_kernel(const Access& x) {
    Context& c = *self.now;
    find_here();
    uint8_t kind = kinds[(x.a - arena) / LINE];
    if (kind != DEVICE + c.device) {
        touch_odd_line(c, x, kind);
        return;
    }
    touch_cells(c, x);
}

// ---- shared memory ----------------------------------------------------------------------------------------
// cells of a kernel's shared memory: what earlier launches and blocks left in them doesn't count
FAST void touch_shared(Cell* cell, const Cell* end, const Access& x) {
    Context& c = *self.now;
    find_here();
    const uint32_t run = c.run, place = here.place, writer = x.atomic ? place | ATOMIC : place;
    for (; cell < end; cell++) {
        bool written = cell->written == run && (cell->writer & ~ATOMIC) >= here.first;
        bool read = cell->read == run && cell->reader >= here.first;
        uint32_t other = 0;
        if (!written && !x.write) {
            cell->written = run;
            cell->writer = writer;
            report("uninitialised shared memory", c, x, x.a, "");
            return;
        }
        if (written && cell->writer != writer && !place_before(cell->writer & ~ATOMIC) &&
            !(x.atomic && (cell->writer & ATOMIC))) {
            other = cell->writer & ~ATOMIC;
            cell->writer = writer;
            report("race in shared memory", c, x, x.a, "written by " + describe_place(other));
            return;
        }
        if (x.write) {
            if (read && cell->reader != place && !place_before(cell->reader)) {
                other = cell->reader;
                cell->reader = place;
                report("race in shared memory", c, x, x.a, "read by " + describe_place(other));
                return;
            }
            cell->written = run;
            cell->writer = writer;
            if (!x.atomic) { cell->read = 0; }
        } else if (!x.atomic && !read) {
            cell->read = run;
            cell->reader = place;
        } else if (!x.atomic && !stands_for_here(cell->reader)) {
            cell->reader = place_before(cell->reader) ? place : merge_places(cell->reader);
        }
    }
}

// a kernel uses what is neither the arena nor static shared memory
[[gnu::noinline]] void touch_by_kernel_elsewhere(const Access& x) {
    const emu::Position& p = emu::position;
    size_t at = x.a - (uintptr_t)p.dynamic;
    find_here();
    if (at >= p.dynamic_area_nbytes) {
        uintptr_t stack = (uintptr_t)__builtin_frame_address(0);
        bool fine = x.a - (stack - STACK_NBYTES) < 2 * STACK_NBYTES || x.a - here.pack < here.pack_nbytes;
        if (!fine) { report("host memory in a kernel", *self.now, x, x.a, ""); }
        return;
    }
    if (at + x.nbytes > p.dynamic_nbytes) {
        report("beyond dynamic shared memory", *self.now, x, x.a,
               format("byte %zu of the launch's %zu", at, p.dynamic_nbytes));
        return;
    }
    touch_shared(dynamic_cells + at / 2, dynamic_cells + (at + x.nbytes + 1) / 2, x);
}

// every access of instrumented code comes here
FAST void touch(uintptr_t a, size_t nbytes, bool write, bool atomic, void* pc) {
    bool in_arena = a - arena < arena_nbytes;
    if (!self.device) {
        if (in_arena) { touch_by_host(Access{a, nbytes, write, atomic, false, false, pc}); }
        return;
    }
    if (!emu::position.inside) { return; }
    const Access x = {a, nbytes, write, atomic, true, false, pc};
    if (in_arena) {
        touch_by_kernel(x);
    } else if (a - local < local_nbytes) {
        touch_shared(local_cells + (a - local) / 2, local_cells + (a - local + nbytes + 1) / 2, x);
    } else if (a - image >= image_nbytes ||
               a - (uintptr_t)emu::position.dynamic < emu::position.dynamic_area_nbytes) {
        touch_by_kernel_elsewhere(x);
    }
}
[[gnu::noinline]] void touch_slowly(uintptr_t a, size_t nbytes, bool write, bool atomic, void* pc) {
    touch(a, nbytes, write, atomic, pc);
}

void touch_range(const void* p, size_t nbytes, bool write, void* pc) {
    for (size_t i = 0; i < nbytes; i += 16) { // that a report may name the byte
        touch_slowly((uintptr_t)p + i, nbytes - i < 16 ? nbytes - i : 16, write, false, pc);
    }
}

inline bool in_arena(const void* p) {
    return (uintptr_t)p - arena < arena_nbytes;
}

/* One byte of a cell, at an end of a range: the other byte may be another stream's, as between messages of
 * odd sizes. So it says nothing of order; a write defines it. Returns false if there is no such memory.
 */
bool touch_byte(uintptr_t a, bool write) {
    Cell& cell = cells[(a - arena) / 2];
    if (cell.written == 0 && !block_at(a)) {
        const Access x = {a, 1, write, false, false, false, NULL};
        report_unallocated(me(), x, a);
        return false;
    }
    if (write && (cell.written == 0 || cell.written == (BEFORE_ALL | UNDEFINED))) {
        cell.written = BEFORE_ALL;
    }
    return true;
}

// a range that an operation, or a call of a host thread, touches in code that isn't instrumented
bool touch_by_runtime(const void* p, size_t nbytes, bool write, bool copies) {
    uintptr_t a = (uintptr_t)p;
    if (a % 2) {
        if (!touch_byte(a++, write)) { return false; }
        nbytes--;
    }
    if (nbytes % 2 && !touch_byte(a + --nbytes, write)) { return false; }
    if (nbytes == 0) { return true; }
    const Access x = {a, nbytes, write, false, false, copies, NULL};
    std::unique_lock<std::recursive_mutex> guard(global().lock, std::defer_lock);
    if (!self.device || kinds[(x.a - arena) / LINE] == PINNED) { guard.lock(); }
    Context& c = me();
    if (!c.run) { number_run(c); }
    return touch_cells(c, x);
}

// the program's image, and the device thread's part of its thread-local memory
int find_memory(dl_phdr_info* info, size_t, void*) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)& part = info->dlpi_phdr[i];
        if (part.p_type == PT_TLS && info->dlpi_tls_data) {
            local = (uintptr_t)info->dlpi_tls_data;
            local_nbytes = part.p_memsz;
        }
        if (part.p_type == PT_LOAD) { // in rising order
            image = image_nbytes ? image : info->dlpi_addr + part.p_vaddr;
            image_nbytes = info->dlpi_addr + part.p_vaddr + part.p_memsz - image;
        }
    }
    return 1; // the first is the program
}
} // namespace

// ---- what the emulator tells ------------------------------------------------------------------------------
extern "C" {
int emu_check_stream_open(const char* name, int device) {
    Guard guard(global().lock);
    return open_context(format("%s of device %d", name, device).c_str(), device)->slot;
}
void emu_check_stream_close(int context) {
    Guard guard(global().lock);
    close_context(global().context[context]);
}
void emu_check_context(int context) {
    Guard guard(global().lock);
    self.now = context ? global().context[context] : self.own;
}
void emu_check_name(const char* what) {
    Guard guard(global().lock);
    Context& c = me();
    c.what = what;
    c.clock.t[c.slot]++;
    c.run = 0;
}
void emu_check_device_thread(void) {
    self.device = true;
    dl_iterate_phdr(find_memory, NULL);
    local_cells = (Cell*)reserve((local_nbytes / 2 + 8) * sizeof(Cell));
    dynamic_cells = (Cell*)reserve((emu::MAX_SHARED_NBYTES / 2 + 8) * sizeof(Cell));
}

void emu_check_release(const void* sync) {
    Guard guard(global().lock);
    Context& c = me();
    global().syncs[sync] = c.clock;
    c.clock.t[c.slot]++;
    c.run = 0;
}
void emu_check_release_too(const void* sync) {
    Guard guard(global().lock);
    Context& c = me();
    join(global().syncs[sync], c.clock);
    c.clock.t[c.slot]++;
    c.run = 0;
}
void emu_check_acquire(const void* sync) {
    Guard guard(global().lock);
    Context& c = me();
    auto at = global().syncs.find(sync);
    if (at == global().syncs.end()) { return; }
    join(c.clock, at->second);
    c.run = 0; // what was found to be unordered may be ordered now
}
void emu_check_forget(const void* sync) {
    Guard guard(global().lock);
    global().syncs.erase(sync);
}

void emu_check_flag_write(const void* flag, unsigned value) {
    enum { NKEPT = 32 };
    Guard guard(global().lock);
    Context& c = me();
    std::deque<Written>& all = global().flags[flag];
    all.push_back(Written{value, c.clock});
    for (uintptr_t a = (uintptr_t)flag; in_arena(flag) && a < (uintptr_t)flag + 4; a += 2) {
        Cell& cell = cells[(a - arena) / 2];
        cell.written = (cell.written & ~UNDEFINED) ? cell.written & ~UNDEFINED : BEFORE_ALL;
    }
    if (all.size() > NKEPT) { all.pop_front(); }
    c.clock.t[c.slot]++;
    c.run = 0;
}
void emu_check_flag_wait(const void* flag, unsigned value, int at_least) {
    Guard guard(global().lock);
    Context& c = me();
    const Written* enough = NULL;
    std::deque<Written>& all = global().flags[flag];
    for (size_t i = all.size(); i-- > 0;) {
        bool is = at_least ? (int)(all[i].value - value) >= 0 : all[i].value == value;
        if (!is && (at_least || enough)) { break; }
        enough = is ? &all[i] : enough;
    }
    if (enough) { join(c.clock, enough->clock); }
    c.run = 0;
}

void* emu_check_arena(size_t nbytes) {
    Global& g = global();
    Guard guard(g.lock);
    cells = (Cell*)reserve(nbytes / 2 * sizeof(Cell));
    kinds = (uint8_t*)reserve(nbytes / LINE);
    arena = (uintptr_t)reserve(nbytes);
    arena_nbytes = nbytes;
    return (void*)arena;
}
void emu_check_alloc(void* p, size_t nbytes, int device) {
    Global& g = global();
    Guard guard(g.lock);
    uintptr_t a = (uintptr_t)p;
    g.blocks[a] = Block{nbytes, device};
    g.changes++;
    auto at = g.freed.lower_bound(a);
    if (at != g.freed.begin() && std::prev(at)->first + std::prev(at)->second.nbytes > a) { at--; }
    while (at != g.freed.end() && at->first < a + nbytes) {
        at = g.freed.erase(at);
    }
    memset(kinds + (a - arena) / LINE, device < 0 ? PINNED : DEVICE + device, (nbytes + LINE - 1) / LINE);
}
void emu_check_free(void* p, size_t nbytes) {
    Global& g = global();
    Guard guard(g.lock);
    uintptr_t a = (uintptr_t)p;
    Cell *first = cells + (a - arena) / 2, *end = cells + (a - arena + nbytes + 1) / 2;
    Context& c = me();
    const Access x = {a, nbytes, true, false, false, false, NULL};
    if (!c.run) { number_run(c); }
    for (Cell* cell = first; cell < end; cell++) {
        if (cell->written && (!write_before(c, *cell, x) || (cell->read && !reads_before(c, *cell, x)))) {
            break;
        }
    }
    g.freed[a] = Block{nbytes, g.blocks[a].device};
    g.blocks.erase(a);
    g.changes++;
    memset(kinds + (a - arena) / LINE, FREE, (nbytes + LINE - 1) / LINE);
    const uintptr_t page = 4096;
    uintptr_t whole = ((uintptr_t)first + page - 1) & ~(page - 1), whole_end = (uintptr_t)end & ~(page - 1);
    if (whole < whole_end) {
        madvise((void*)whole, whole_end - whole, MADV_DONTNEED); // they read as 0 again
        memset((void*)first, 0, whole - (uintptr_t)first);
        memset((void*)whole_end, 0, (uintptr_t)end - whole_end);
    } else {
        memset((void*)first, 0, (size_t)(end - first) * sizeof(Cell));
    }
}
void emu_check_range(const void* p, size_t nbytes, int write) {
    if (in_arena(p) && nbytes) { touch_by_runtime(p, nbytes, write != 0, false); }
}
void emu_check_copy(void* to, const void* from, size_t nbytes) {
    bool tracked = in_arena(to) && in_arena(from);
    if (in_arena(from) && !touch_by_runtime(from, nbytes, false, tracked)) { return; }
    if (in_arena(to) && !touch_by_runtime(to, nbytes, true, false)) { return; }
    Cell *source = cells + ((uintptr_t)from - arena) / 2, *target = cells + ((uintptr_t)to - arena) / 2;
    for (size_t i = 0; tracked && i < (nbytes + 1) / 2; i++) {
        target[i].written |= source[i].written & UNDEFINED;
    }
}
void emu_check_quiet(int change) {
    self.quiet += change;
}
void emu_check_peer(int device, int peer) {
    Guard guard(global().lock);
    global().peer[device][peer] = true;
}

// ---- what the compiler calls ------------------------------------------------------------------------------
#define PC __builtin_return_address(0)
#define ACCESS(n)                                 \
    void __tsan_read##n(void* p) {                \
        touch((uintptr_t)p, n, false, false, PC); \
    }                                             \
    void __tsan_write##n(void* p) {               \
        touch((uintptr_t)p, n, true, false, PC);  \
    }                                             \
    void __tsan_unaligned_read##n(void* p) {      \
        touch((uintptr_t)p, n, false, false, PC); \
    }                                             \
    void __tsan_unaligned_write##n(void* p) {     \
        touch((uintptr_t)p, n, true, false, PC);  \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_init(void) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// copies of structures are calls of these; the build renames those of instrumented code (check.syms)
void* emu_check_memcpy(void* to, const void* from, size_t nbytes) {
    touch_range(from, nbytes, false, PC);
    touch_range(to, nbytes, true, PC);
    return memcpy(to, from, nbytes);
}
void* emu_check_memmove(void* to, const void* from, size_t nbytes) {
    touch_range(from, nbytes, false, PC);
    touch_range(to, nbytes, true, PC);
    return memmove(to, from, nbytes);
}
void* emu_check_memset(void* to, int value, size_t nbytes) {
    touch_range(to, nbytes, true, PC);
    return memset(to, value, nbytes);
}
}

// ---- atomics ----------------------------------------------------------------------------------------------
namespace {
/* Those of kernels count as accesses. One by which a host thread sees another's value orders it after what
 * the other has done. In pinned memory a word may come from a stream's memory operation too, or go to one.
 */
inline bool acquires(int order) {
    return !self.device && order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE;
}
inline bool releases(int order) {
    return !self.device && order != __ATOMIC_RELAXED && order != __ATOMIC_CONSUME &&
           order != __ATOMIC_ACQUIRE;
}

template <class T> void acquire_value(const volatile T* p, T x) {
    if (in_arena((const void*)p)) {
        emu_check_flag_wait((const void*)p, (unsigned)x, 0);
    } else {
        emu_check_acquire((const void*)p);
    }
}

template <class T> T atomic_load(const volatile T* p, int order, void* pc) {
    touch_slowly((uintptr_t)p, sizeof(T), false, true, pc);
    T x = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    if (acquires(order)) { acquire_value(p, x); }
    return x;
}
template <class T> void atomic_store(volatile T* p, T x, int order, void* pc) {
    touch_slowly((uintptr_t)p, sizeof(T), true, true, pc);
    if (releases(order)) { // before anyone can see x
        in_arena((const void*)p) ? emu_check_flag_write((const void*)p, (unsigned)x)
                                 : emu_check_release((const void*)p);
    }
    __atomic_store_n(p, x, __ATOMIC_SEQ_CST);
}
// reads, changes and writes: `change` does it
template <class T, class Change> T atomic_change(volatile T* p, int order, void* pc, Change change) {
    touch_slowly((uintptr_t)p, sizeof(T), true, true, pc);
    if (releases(order)) { emu_check_release_too((const void*)p); }
    T old = change(p);
    if (acquires(order)) { acquire_value(p, old); }
    return old;
}
} // namespace

#define CHANGE(bits, T, name, builtin)                                                                      \
    T __tsan_atomic##bits##_##name(volatile T* p, T x, int order) {                                         \
        return atomic_change(p, order, PC, [=](volatile T* q) { return builtin(q, x, __ATOMIC_SEQ_CST); }); \
    }
#define EXCHANGE(bits, T, name)                                                                          \
    int __tsan_atomic##bits##_compare_exchange_##name(volatile T* p, T* expected, T x, int order, int) { \
        T want = *expected;                                                                              \
        T old = atomic_change(p, order, PC, [=](volatile T* q) {                                         \
            T seen = want;                                                                               \
            __atomic_compare_exchange_n(q, &seen, x, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);             \
            return seen;                                                                                 \
        });                                                                                              \
        *expected = old;                                                                                 \
        return old == want;                                                                              \
    }
#define ATOMICS(bits, T)                                                                                  \
    T __tsan_atomic##bits##_load(const volatile T* p, int order) {                                        \
        return atomic_load(p, order, PC);                                                                 \
    }                                                                                                     \
    void __tsan_atomic##bits##_store(volatile T* p, T x, int order) {                                     \
        atomic_store(p, x, order, PC);                                                                    \
    }                                                                                                     \
    CHANGE(bits, T, exchange, __atomic_exchange_n)                                                        \
    CHANGE(bits, T, fetch_add, __atomic_fetch_add)                                                        \
    CHANGE(bits, T, fetch_sub, __atomic_fetch_sub)                                                        \
    CHANGE(bits, T, fetch_and, __atomic_fetch_and)                                                        \
    CHANGE(bits, T, fetch_or, __atomic_fetch_or)                                                          \
    CHANGE(bits, T, fetch_xor, __atomic_fetch_xor)                                                        \
    EXCHANGE(bits, T, strong)                                                                             \
    EXCHANGE(bits, T, weak)                                                                               \
    T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T expected, T x, int order, int failed) { \
        (void)__tsan_atomic##bits##_compare_exchange_strong(p, &expected, x, order, failed);              \
        return expected;                                                                                  \
    }
extern "C" {
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int order) {
    __atomic_thread_fence(order);
}
void __tsan_atomic_signal_fence(int) {}
}
