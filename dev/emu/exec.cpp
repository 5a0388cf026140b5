/* exec.cpp -- kernels as fibers: threads of a block are plain calls until they wait. See exec.h.
 *
 * A worker stack calls the kernel for thread 0, 1, 2, ...; when one has to wait, its stack is kept with it
 * and another worker goes on. Warp operations: each lane deposits its value, and the last to arrive works out
 * what every lane gets and makes the others ready. FO_EMU_ORDER=forward, reverse or random:SEED is the order
 * of blocks and threads.
 */
#include "dev/emu/exec.h"
#include "dev/emu/check.h"
#include "dev/emu/stream.h"
#include <algorithm>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <vector>

// the stack pointer is all that is saved, behind the six registers that a function must preserve
asm(R"(
.text
.globl emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch_stack,.-emu_switch_stack
)");
extern "C" {
void __asan_init(void) EMU_WEAK;
void emu_switch_stack(void** save, void* to);
void __asan_poison_memory_region(const volatile void*, size_t) EMU_WEAK;
void __asan_unpoison_memory_region(const volatile void*, size_t) EMU_WEAK;
void __sanitizer_start_switch_fiber(void**, const void*, size_t) EMU_WEAK;
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) EMU_WEAK;
}

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
Position position;

namespace {
enum { STACK_NBYTES = 256 << 10, PAGE_NBYTES = 4096, LANES = 32 };
alignas(128) char dynamic_shared[MAX_SHARED_NBYTES];

struct Stack {
    void* sp;
    char* base;
    size_t nbytes;
    void* fake; // AddressSanitizer's
};
enum State { RUNS, IN_BARRIER, IN_WARP_OP, EXITED };
struct Warp;
struct Thread {
    uint3 index;
    unsigned lane;
    Warp* warp;
    Stack* stack;
    State state;
    int line, op; // of the barrier or warp operation that it waits in
};
struct Warp {
    Thread* first;
    unsigned exist, arrived, epoch; // sets of lanes; warp operations so far
    unsigned mask[LANES];
    int op[LANES], arg[LANES], width[LANES];
    uint64_t in[LANES], out[LANES];
};
enum Order { FORWARD, REVERSE, RANDOM };

// of the block that runs. One writer and reader, the device thread
struct Exec {
    const Launch* launch;
    unsigned nthreads, next, nexited; // next: of order[], the first that has not begun
    Thread* current;
    Stack* stack; // the one that runs
    Stack main;   // run_kernel's
    Thread threads[MAX_THREADS];
    Warp warps[MAX_THREADS / LANES];
    unsigned order[MAX_THREADS];
    Thread* ready[MAX_THREADS]; // a ring
    unsigned ready_first, nready;
    Thread* waiting[MAX_THREADS]; // in the barrier
    unsigned nwaiting;
    int barrier_line, barrier_op, barrier_sum, barrier_result;
    std::vector<Stack*> idle;
    unsigned nstacks;
    dim3 laid_out = dim3(0, 0, 0); // the block's shape that threads[] is set for
    Order policy;
    uint64_t random;
    pthread_t thread; // the device thread
};
Exec* exec;

unsigned random_number(Exec& e) {
    e.random ^= e.random << 13;
    e.random ^= e.random >> 7;
    e.random ^= e.random << 17;
    return (unsigned)(e.random >> 32);
}

// ---- stacks -----------------------------------------------------------------------------------------------
void worker();

[[gnu::noinline]] void switch_stack(Stack* from, Stack* to) {
    if (__sanitizer_start_switch_fiber) { __sanitizer_start_switch_fiber(&from->fake, to->base, to->nbytes); }
    emu_switch_stack(&from->sp, to->sp);
    if (__sanitizer_finish_switch_fiber) { __sanitizer_finish_switch_fiber(from->fake, nullptr, nullptr); }
}

void worker_entry() {
    if (__sanitizer_finish_switch_fiber) { __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr); }
    worker();
}

Stack* take_stack(Exec& e) {
    if (!e.idle.empty()) {
        Stack* s = e.idle.back();
        e.idle.pop_back();
        return s;
    }
    Stack* s = new Stack();
    void* base = mmap(nullptr, STACK_NBYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) { die("no memory for the stack of thread %u of a block", e.nstacks); }
    mprotect(base, PAGE_NBYTES, PROT_NONE); // an overflow faults
    s->base = (char*)base;
    s->nbytes = STACK_NBYTES;
    // the tops are spread over the cache's sets: barriers of blocks of 1,024 take 12 ns a thread, not 18
    char* top = s->base + STACK_NBYTES - 128 - (e.nstacks++ % 31) * 128;
    void** p = (void**)((uintptr_t)top & ~(uintptr_t)15);
    *--p = nullptr;
    *--p = (void*)worker_entry;
    for (int i = 0; i < 6; i++) {
        *--p = nullptr;
    }
    s->sp = p;
    return s;
}

// ---- errors -----------------------------------------------------------------------------------------------
[[noreturn]] void die_in_kernel(Exec& e, const char* what) {
    static const char* const OPS[] = {
        "__syncwarp",      "__shfl_sync",      "__shfl_up_sync", "__shfl_down_sync",
        "__shfl_xor_sync", "__match_any_sync", "a vote"};
    std::string where;
    int shown = 0;
    for (unsigned i = 0; i < e.nthreads && shown < 8; i++) {
        const Thread& t = e.threads[i];
        const Thread& last = e.threads[i ? i - 1 : 0];
        if (t.state == RUNS || (i && last.state == t.state && last.line == t.line && last.op == t.op)) {
            continue;
        }
        shown++;
        where += "; from thread " + std::to_string(i);
        if (t.state == EXITED) {
            where += " on: exited";
            continue;
        }
        const char* op = t.state == IN_BARRIER ? "__syncthreads"
                         : t.op > EMU_BALLOT   ? "a reduction"
                                               : OPS[t.op];
        where += std::string(" on: in ") + op + " of line " + std::to_string(t.line);
    }
    die("%s, in kernel %s, block (%u, %u, %u)%s", what, e.launch->name, blockIdx.x, blockIdx.y, blockIdx.z,
        where.c_str());
}

// ---- scheduling of a block's threads ----------------------------------------------------------------------
inline void enter(Exec& e, Thread* t) {
    e.current = t;
    threadIdx = t->index;
    position.thread = (unsigned)(t - e.threads);
    position.warp_epoch = t->warp->epoch;
}

inline void make_ready(Exec& e, Thread* t) {
    unsigned at = e.ready_first + e.nready++;
    t->state = RUNS;
    e.ready[at >= MAX_THREADS ? at - MAX_THREADS : at] = t;
}

// the next stack to run on: that of a thread which is ready, else of a fresh worker, else run_kernel's
inline Stack* pick(Exec& e) {
    if (e.nready) {
        if (e.policy == RANDOM) {
            unsigned other = (e.ready_first + random_number(e) % e.nready) % MAX_THREADS;
            std::swap(e.ready[e.ready_first], e.ready[other]);
        }
        Thread* t = e.ready[e.ready_first];
        e.ready_first = e.ready_first + 1 == MAX_THREADS ? 0 : e.ready_first + 1;
        e.nready--;
        enter(e, t);
        return t->stack;
    }
    if (e.next < e.nthreads) { return take_stack(e); }
    if (e.nexited == e.nthreads) { return &e.main; }
    die_in_kernel(e, "deadlock: threads wait for others that will not come");
}

inline void leave(Exec& e, Stack* from) {
    Stack* to = pick(e);
    if (to == from) { return; }
    e.stack = to;
    switch_stack(from, to);
}

void open_barrier(Exec& e) {
    unsigned n = e.nwaiting;
    position.block_epoch++;
    e.barrier_result = e.barrier_sum;
    e.nwaiting = 0;
    for (unsigned i = 0; i < n; i++) {
        make_ready(e, e.waiting[e.policy == REVERSE ? n - 1 - i : i]);
    }
}

void worker() {
    Exec& e = *exec;
    for (;;) {
        while (e.next < e.nthreads && !e.nready) {
            Thread* t = &e.threads[e.order[e.next++]];
            t->state = RUNS;
            enter(e, t);
            e.launch->call(e.launch->pack);
            t = e.current; // the one that came back here is another if this one waited
            t->state = EXITED;
            e.nexited++;
            if (e.nwaiting && e.nwaiting == e.nthreads - e.nexited) { open_barrier(e); }
        }
        Stack* own = e.stack;
        e.idle.push_back(own);
        leave(e, own);
    }
}

// ---- warp operations --------------------------------------------------------------------------------------
uint64_t combine(int op, const Warp& w, unsigned lanes) {
    uint64_t sum = 0;
    bool first = true;
    for (unsigned m = lanes; m; m &= m - 1) {
        unsigned i = (unsigned)__builtin_ctz(m);
        unsigned x = (unsigned)w.in[i], a = (unsigned)sum;
        if (op == EMU_BALLOT) {
            sum |= (uint64_t)(w.in[i] != 0) << i;
            continue;
        }
        if (first) {
            sum = x;
            first = false;
            continue;
        }
        switch (op) {
        case EMU_ADD: sum = a + x; break;
        case EMU_MIN_UNSIGNED: sum = std::min(a, x); break;
        case EMU_MAX_UNSIGNED: sum = std::max(a, x); break;
        case EMU_MIN_SIGNED: sum = (unsigned)std::min((int)a, (int)x); break;
        case EMU_MAX_SIGNED: sum = (unsigned)std::max((int)a, (int)x); break;
        case EMU_AND: sum = a & x; break;
        case EMU_OR: sum = a | x; break;
        }
    }
    return sum;
}

unsigned match(const Warp& w, unsigned lanes, unsigned lane) {
    unsigned equal = 0;
    for (unsigned m = lanes; m; m &= m - 1) {
        unsigned i = (unsigned)__builtin_ctz(m);
        equal |= (unsigned)(w.in[i] == w.in[lane]) << i;
    }
    return equal;
}

// all lanes are here: what each of them gets
void exchange(Exec& e, Warp& w, int op, unsigned mask, unsigned lanes) {
    uint64_t all = op >= EMU_BALLOT ? combine(op, w, lanes) : 0;
    for (unsigned m = lanes; m; m &= m - 1) {
        int i = __builtin_ctz(m), arg = w.arg[i], base = i & ~(w.width[i] - 1), from = i;
        if (w.op[i] != op || w.mask[i] != mask) {
            die_in_kernel(e, "divergence: lanes of one warp meet in different warp operations");
        }
        switch (op) {
        case EMU_SYNC: continue;
        case EMU_INDEX: from = base + (arg & (w.width[i] - 1)); break;
        case EMU_UP: from = i - arg >= base ? i - arg : i; break;
        case EMU_DOWN: from = i + arg < base + w.width[i] ? i + arg : i; break;
        case EMU_XOR: from = (i ^ arg) < base + w.width[i] ? i ^ arg : i; break;
        case EMU_MATCH: w.out[i] = match(w, lanes, (unsigned)i); continue;
        default: w.out[i] = all; continue;
        }
        if (!(lanes >> from & 1)) {
            die_in_kernel(e, "divergence: a shuffle reads a lane that takes no part");
        }
        w.out[i] = w.in[from];
    }
}

// ---- launches ---------------------------------------------------------------------------------------------
// the threads of a block of this shape; kept while the shape stays
void lay_out(Exec& e, const dim3& block) {
    unsigned i = 0;
    e.nthreads = block.x * block.y * block.z;
    if (e.laid_out.x == block.x && e.laid_out.y == block.y && e.laid_out.z == block.z) { return; }
    e.laid_out = block;
    for (unsigned z = 0; z < block.z; z++) {
        for (unsigned y = 0; y < block.y; y++) {
            for (unsigned x = 0; x < block.x; x++, i++) {
                Thread& t = e.threads[i];
                t.index = uint3{x, y, z};
                t.lane = i % LANES;
                t.warp = &e.warps[i / LANES];
                if (t.lane == 0) {
                    t.warp->first = &t;
                    t.warp->exist = 0;
                }
                t.warp->exist |= 1u << t.lane;
                e.order[i] = e.policy == REVERSE ? e.nthreads - 1 - i : i;
            }
        }
    }
}

// a fault inside a kernel: says where. One elsewhere is dealt with as if this were not here
void on_fault(int signal, siginfo_t* info, void*) {
    if (position.inside && pthread_equal(exec->thread, pthread_self())) {
        const char* base = exec->stack ? exec->stack->base : nullptr;
        bool overflow =
            base && (const char*)info->si_addr >= base && (const char*)info->si_addr < base + PAGE_NBYTES;
        die("fault: kernel %s, block (%u, %u, %u), thread %u %s %p", exec->launch->name, blockIdx.x,
            blockIdx.y, blockIdx.z, position.thread, overflow ? "has used up its stack, at" : "uses address",
            info->si_addr);
    }
    struct sigaction otherwise = {};
    otherwise.sa_handler = SIG_DFL;
    sigaction(signal, &otherwise, nullptr);
}

void catch_faults() {
    static char room[64 << 10]; // the handler's stack: the kernel's may be what has run out
    stack_t stack = {};
    struct sigaction action = {};
    stack.ss_sp = room;
    stack.ss_size = sizeof room;
    sigaltstack(&stack, nullptr);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

Exec* create_exec() {
    Exec* e = new Exec();
    const char* order = getenv("FO_EMU_ORDER");
    order = order ? order : "forward";
    const char* seed = strchr(order, ':');
    e->policy = !strncmp(order, "random", 6) ? RANDOM : !strcmp(order, "reverse") ? REVERSE : FORWARD;
    if (e->policy == FORWARD && strcmp(order, "forward")) {
        die("FO_EMU_ORDER=%s: want forward, reverse or random:SEED", order);
    }
    e->thread = pthread_self();
    e->random = 0x9e3779b97f4a7c15ull + (seed ? strtoull(seed + 1, nullptr, 10) * 0x2545f4914f6cdd1dull : 0);
    if (__sanitizer_start_switch_fiber) { // it must know where the device thread's own stack lies
        pthread_attr_t attributes;
        void* base;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstack(&attributes, &base, &e->main.nbytes);
        pthread_attr_destroy(&attributes);
        e->main.base = (char*)base;
    }
    return e;
}

void run_block(Exec& e, unsigned long block) {
    const dim3& grid = e.launch->grid;
    blockIdx = uint3{(unsigned)(block % grid.x), (unsigned)(block / grid.x % grid.y),
                     (unsigned)(block / grid.x / grid.y)};
    position.block = block;
    position.block_epoch = 0;
    e.next = e.nexited = e.nwaiting = e.nready = 0;
    for (unsigned i = 0; i * LANES < e.nthreads; i++) {
        e.warps[i].arrived = e.warps[i].epoch = 0;
    }
    for (unsigned i = e.nthreads - 1; e.policy == RANDOM && i; i--) {
        std::swap(e.order[i], e.order[random_number(e) % (i + 1)]);
    }
    leave(e, &e.main);
}
} // namespace

void run_kernel(const Launch& launch) {
    if (!exec) {
        exec = create_exec();
        if (!__asan_init) { catch_faults(); } // AddressSanitizer says more
    }
    Exec& e = *exec;
    e.launch = &launch;
    lay_out(e, launch.block);
    blockDim = uint3{launch.block.x, launch.block.y, launch.block.z};
    gridDim = uint3{launch.grid.x, launch.grid.y, launch.grid.z};
    if (__asan_poison_memory_region) {
        size_t end = (launch.shared_nbytes + 7) & ~(size_t)7;
        __asan_unpoison_memory_region(dynamic_shared, sizeof dynamic_shared);
        __asan_poison_memory_region(dynamic_shared + end, sizeof dynamic_shared - end);
    }
    memset(dynamic_shared, 0xff, launch.shared_nbytes); // NaN
    position.launch++;
    position.pack = launch.pack;
    position.dynamic = dynamic_shared;
    position.dynamic_nbytes = launch.shared_nbytes;
    position.dynamic_area_nbytes = sizeof dynamic_shared;
    position.inside = true;
    // random: from a random block on in strides that have no factor in common with the number of blocks
    unsigned long nblocks = (unsigned long)launch.grid.x * launch.grid.y * launch.grid.z, stride = 1, at = 0;
    if (e.policy == RANDOM) {
        stride = random_number(e) | 1u;
        at = random_number(e) % nblocks;
        while (std::__gcd(stride, nblocks) != 1) {
            stride += 2;
        }
    }
    for (unsigned long i = 0; i < nblocks; i++) {
        run_block(e, e.policy == REVERSE ? nblocks - 1 - at : at);
        at = (at + stride) % nblocks;
    }
    position.inside = false;
}
} // namespace emu

using namespace emu;

extern "C" void* fo_emu_dynamic_shared(void) {
    return dynamic_shared;
}

extern "C" int emu_block(EmuBlockOp op, int predicate, int line) {
    Exec& e = *exec;
    Thread* t = e.current;
    t->line = line;
    t->op = op;
    if (e.nwaiting && (e.barrier_line != line || e.barrier_op != op)) {
        t->state = IN_BARRIER;
        die_in_kernel(e, "divergence: threads of one block meet in different __syncthreads");
    }
    if (!e.nwaiting) {
        e.barrier_line = line;
        e.barrier_op = op;
        e.barrier_sum = op == EMU_BARRIER_AND;
    }
    switch (op) {
    case EMU_BARRIER: break;
    case EMU_BARRIER_AND: e.barrier_sum &= predicate != 0; break;
    case EMU_BARRIER_OR: e.barrier_sum |= predicate != 0; break;
    case EMU_BARRIER_COUNT: e.barrier_sum += predicate != 0; break;
    }
    e.waiting[e.nwaiting++] = t;
    t->state = IN_BARRIER;
    t->stack = e.stack;
    if (e.nwaiting == e.nthreads - e.nexited) { open_barrier(e); }
    leave(e, e.stack);
    return e.barrier_result;
}

extern "C" uint64_t emu_warp(EmuWarpOp op, unsigned mask, uint64_t value, int arg, int width, int line) {
    Exec& e = *exec;
    Thread* t = e.current;
    Warp& w = *t->warp;
    const unsigned lane = t->lane, need = mask & w.exist;
    t->line = line;
    t->op = op;
    t->stack = e.stack;
    t->state = IN_WARP_OP;
    if (!(mask >> lane & 1)) {
        die_in_kernel(e, "divergence: the mask of a warp operation lacks the caller's lane");
    }
    w.in[lane] = value;
    w.arg[lane] = arg;
    w.width[lane] = width;
    w.mask[lane] = mask;
    w.op[lane] = op;
    w.arrived |= 1u << lane;
    if ((w.arrived & need) != need) {
        leave(e, e.stack);
        return w.out[lane];
    }
    exchange(e, w, op, mask, need);
    w.arrived &= ~need;
    position.warp_epoch = ++w.epoch;
    t->state = RUNS;
    unsigned others = need & ~(1u << lane);
    while (others) {
        int i = e.policy == REVERSE ? 31 - __builtin_clz(others) : __builtin_ctz(others);
        others &= ~(1u << i);
        make_ready(e, w.first + i);
    }
    if (e.policy == RANDOM) { // let the others overtake
        make_ready(e, t);
        leave(e, e.stack);
    }
    return w.out[lane];
}
