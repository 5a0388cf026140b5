/* memory.cpp -- device memory and pinned host memory, copies and fills. All of it is the host's own memory:
 * one range of addresses that blocks are cut from, so that the checker has a cell for each byte. Under
 * AddressSanitizer it comes from malloc instead. What is new is filled with NaN.
 */
#include "dev/emu/runtime.h"
#include <sys/mman.h>

extern "C" void __asan_init(void) EMU_WEAK;

namespace emu {
namespace {
const size_t ARENA_NBYTES = (size_t)32 << 30; // addresses, not memory
enum { ALIGN = 256, GAP = 256 };              // nothing lies in the gap behind each block
const size_t RETURN_NBYTES = 1 << 20;         // from here on a freed block's pages go back to the system

struct Block {
    size_t nbytes;
    int device; // or PINNED
};

struct Memory {
    Lock lock;
    std::map<uintptr_t, Block> blocks;
    std::map<uintptr_t, size_t> free; // what can be cut from; neighbours are joined
    size_t used[MAX_DEVICES] = {};
};

Memory* create_memory() {
    Memory* m = new Memory();
    if (__asan_init) { return m; }
    void* arena = emu_check_arena ? emu_check_arena(ARENA_NBYTES)
                                  : mmap(nullptr, ARENA_NBYTES, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED || !arena) { die("can't reserve %zu bytes of addresses", ARENA_NBYTES); }
    m->free[(uintptr_t)arena] = ARENA_NBYTES;
    return m;
}

Memory& memory() {
    static Memory* m = create_memory();
    return *m;
}

size_t whole(size_t nbytes) {
    return ((nbytes ? nbytes : 1) + ALIGN - 1) / ALIGN * ALIGN + GAP;
}

// under lock; NULL: no room
void* cut(Memory& m, size_t nbytes) {
    void* p = nullptr;
    if (__asan_init) { return posix_memalign(&p, ALIGN, nbytes ? nbytes : 1) ? nullptr : p; }
    for (auto it = m.free.begin(); it != m.free.end(); it++) {
        auto [at, room] = *it;
        if (room < whole(nbytes)) { continue; }
        m.free.erase(it);
        if (room > whole(nbytes)) { m.free[at + whole(nbytes)] = room - whole(nbytes); }
        return (void*)at;
    }
    return nullptr;
}

// under lock
void give_back(Memory& m, uintptr_t at, size_t nbytes) {
    if (__asan_init) {
        free((void*)at);
        return;
    }
    if (nbytes >= RETURN_NBYTES) {
        uintptr_t first = (at + 4095) & ~(uintptr_t)4095, end = (at + nbytes) & ~(uintptr_t)4095;
        madvise((void*)first, end - first, MADV_DONTNEED);
    }
    size_t room = whole(nbytes);
    auto after = m.free.lower_bound(at);
    if (after != m.free.end() && after->first == at + room) {
        room += after->second;
        after = m.free.erase(after);
    }
    if (after != m.free.begin()) {
        auto before = std::prev(after);
        if (before->first + before->second == at) {
            before->second += room;
            return;
        }
    }
    m.free[at] = room;
}

cudaError_t allocate(void** p, size_t nbytes, int device) {
    Runtime& rt = runtime();
    Memory& m = memory();
    cudaError_t e = refuse_in_capture();
    if (e != cudaSuccess) { return fail(e); }
    {
        Guard guard(m.lock);
        if (device >= 0 && nbytes > rt.memory_nbytes - m.used[device]) {
            return fail(cudaErrorMemoryAllocation);
        }
        *p = cut(m, nbytes);
        if (!*p) { return fail(cudaErrorMemoryAllocation); }
        m.blocks[(uintptr_t)*p] = Block{nbytes, device};
        if (device >= 0) { m.used[device] += nbytes; }
    }
    if (emu_check_quiet) { emu_check_quiet(1); }
    memset(*p, 0xff, nbytes);
    if (emu_check_quiet) { emu_check_quiet(-1); }
    if (emu_check_alloc) { emu_check_alloc(*p, nbytes, device); }
    return cudaSuccess;
}

// waits as CUDA does for all that is queued on the device, which orders nothing that a program may rely on
cudaError_t deallocate(void* p, bool pinned) {
    Memory& m = memory();
    Block block;
    if (!p) { return cudaSuccess; }
    cudaError_t e = refuse_in_capture();
    if (e != cudaSuccess) { return fail(e); }
    {
        Guard guard(m.lock);
        auto it = m.blocks.find((uintptr_t)p);
        if (it == m.blocks.end() || (it->second.device == PINNED) != pinned) {
            return fail(cudaErrorInvalidValue);
        }
        block = it->second;
    }
    wait_for_device(pinned ? current_device() : block.device, true);
    if (emu_check_free) { emu_check_free(p, block.nbytes); }
    Guard guard(m.lock);
    m.blocks.erase((uintptr_t)p);
    if (!pinned) { m.used[block.device] -= block.nbytes; }
    give_back(m, (uintptr_t)p, block.nbytes);
    return cudaSuccess;
}

// rows of bytes, one row for a plain copy or fill
struct CopyOp : Op {
    char* dst;
    const char* src; // NULL: a fill
    size_t dst_pitch, src_pitch, width, height;
    int value;
    bool poll() override {
        for (size_t i = 0; i < height; i++) {
            char* to = dst + i * dst_pitch;
            const char* from = src ? src + i * src_pitch : nullptr;
            if (!from) {
                touch_write(to, width);
            } else if (emu_check_copy) {
                emu_check_copy(to, from, width);
            }
            if (emu_check_quiet) { emu_check_quiet(1); }
            from ? memmove(to, from, width) : memset(to, value, width);
            if (emu_check_quiet) { emu_check_quiet(-1); }
        }
        return true;
    }
};

size_t extent(size_t pitch, size_t width, size_t height) {
    return height == 0 || width == 0 ? 0 : (height - 1) * pitch + width;
}

// may memory found there stand on that side of a copy? side: 1 device, 0 host, -1 either
bool fits(int found, int side) {
    return found != OVERRUN && (side < 0 || (found >= 0) == (side == 1));
}

cudaError_t copy(const char* call, void* dst, size_t dst_pitch, const void* src, size_t src_pitch,
                 size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t s) {
    static const int SIDES[][2] = {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {-1, -1}}; // of src and dst, by kind
    if ((unsigned)kind > cudaMemcpyDefault || width > dst_pitch || width > src_pitch) {
        return fail(cudaErrorInvalidValue);
    }
    if (!fits(find_memory(src, extent(src_pitch, width, height)), SIDES[kind][0]) ||
        !fits(find_memory(dst, extent(dst_pitch, width, height)), SIDES[kind][1])) {
        return fail(cudaErrorInvalidValue);
    }
    static const char* const NAMES[] = {"copy host to host", "upload", "download", "copy", "copy"};
    CopyOp* op = new CopyOp();
    op->what = NAMES[kind];
    op->dst = (char*)dst;
    op->src = (const char*)src;
    op->dst_pitch = dst_pitch;
    op->src_pitch = src_pitch;
    op->width = width;
    op->height = height;
    return enqueue(call, s, op);
}

cudaError_t fill(const char* call, void* dst, size_t pitch, int value, size_t width, size_t height,
                 cudaStream_t s) {
    int found = find_memory(dst, extent(pitch, width, height));
    if (width > pitch || found == OVERRUN || found == PAGEABLE) { return fail(cudaErrorInvalidValue); }
    CopyOp* op = new CopyOp();
    op->what = "memset";
    op->dst = (char*)dst;
    op->src = nullptr;
    op->dst_pitch = pitch;
    op->width = width;
    op->height = height;
    op->value = value;
    return enqueue(call, s, op);
}
} // namespace

int find_memory(const void* p, size_t nbytes) {
    Memory& m = memory();
    Guard guard(m.lock);
    auto it = m.blocks.upper_bound((uintptr_t)p);
    if (it == m.blocks.begin()) { return PAGEABLE; }
    auto [at, block] = *--it;
    if ((uintptr_t)p >= at + (block.nbytes ? block.nbytes : 1)) { return PAGEABLE; }
    return (uintptr_t)p + nbytes > at + block.nbytes ? OVERRUN : block.device;
}
} // namespace emu

using namespace emu;

extern "C" {
cudaError_t cudaMalloc(void** p, size_t nbytes) {
    Runtime& rt = enter("cudaMalloc");
    count(COUNT_MALLOC);
    if (!rt.driver) { return fail(cudaErrorInsufficientDriver); }
    if (!rt.ndevices) { return fail(cudaErrorNoDevice); }
    return allocate(p, nbytes, current_device());
}

cudaError_t cudaFree(void* p) {
    enter("cudaFree");
    return deallocate(p, false);
}

cudaError_t cudaHostAlloc(void** p, size_t nbytes, unsigned) {
    enter("cudaHostAlloc");
    count(COUNT_MALLOC);
    return allocate(p, nbytes, PINNED);
}

cudaError_t cudaMallocHost(void** p, size_t nbytes) {
    return cudaHostAlloc(p, nbytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* p) {
    enter("cudaFreeHost");
    return deallocate(p, true);
}

cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
    Runtime& rt = enter("cudaMemGetInfo");
    Memory& m = memory();
    Guard guard(m.lock);
    *total = rt.memory_nbytes;
    *unused = rt.memory_nbytes - m.used[current_device()];
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, cudaMemcpyKind kind, cudaStream_t s) {
    return copy("cudaMemcpyAsync", dst, nbytes, src, nbytes, nbytes, 1, kind, s);
}

cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t s) {
    return copy("cudaMemcpy2DAsync", dst, dst_pitch, src, src_pitch, width, height, kind, s);
}

cudaError_t cudaMemcpyPeerAsync(void* dst, int dst_device, const void* src, int src_device, size_t nbytes,
                                cudaStream_t s) {
    int ndevices = runtime().ndevices;
    if (dst_device < 0 || dst_device >= ndevices || src_device < 0 || src_device >= ndevices) {
        return fail(cudaErrorInvalidDevice);
    }
    if (nbytes && (find_memory(dst, nbytes) != dst_device || find_memory(src, nbytes) != src_device)) {
        return fail(cudaErrorInvalidValue);
    }
    return copy("cudaMemcpyPeerAsync", dst, nbytes, src, nbytes, nbytes, 1, cudaMemcpyDeviceToDevice, s);
}

cudaError_t cudaMemsetAsync(void* dst, int value, size_t nbytes, cudaStream_t s) {
    return fill("cudaMemsetAsync", dst, nbytes, value, nbytes, 1, s);
}

cudaError_t cudaMemset2DAsync(void* dst, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t s) {
    return fill("cudaMemset2DAsync", dst, pitch, value, width, height, s);
}
}
