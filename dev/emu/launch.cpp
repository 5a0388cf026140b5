/* launch.cpp -- launches of kernels: their limits, attributes and names. Kernels run in exec.cpp. */
#include "dev/emu/exec.h"
#include "dev/emu/runtime.h"
#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace emu {
namespace {
enum { DEFAULT_SHARED_NBYTES = 48 << 10, SM_THREADS = 2048, SM_SHARED_NBYTES = 228 << 10, SM_BLOCKS = 32 };

// what is known about a kernel
struct Kernel {
    const char* name = nullptr;
    int shared_limit = DEFAULT_SHARED_NBYTES; // of dynamic shared memory
};

Lock& kernels_lock() {
    static Lock* lock = new Lock();
    return *lock;
}

Kernel& kernel(const void* function) { // under kernels_lock
    static std::map<const void*, Kernel>* kernels = new std::map<const void*, Kernel>();
    return (*kernels)[function];
}

// the program's functions by address, static ones too, from the symbol table of its file
typedef std::map<uintptr_t, std::string> Symbols;

int load_address(dl_phdr_info* info, size_t, void* out) {
    *(uintptr_t*)out = info->dlpi_addr;
    return 1; // the first is the program
}

Symbols* read_symbols() {
    Symbols* symbols = new Symbols();
    uintptr_t base = 0;
    struct stat st;
    dl_iterate_phdr(load_address, &base);
    int fd = open("/proc/self/exe", O_RDONLY);
    if (fd < 0 || fstat(fd, &st)) { return symbols; }
    const char* file = (const char*)mmap(nullptr, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == MAP_FAILED) { return symbols; }
    const ElfW(Ehdr)* header = (const ElfW(Ehdr)*)file;
    const ElfW(Shdr)* sections = (const ElfW(Shdr)*)(file + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) { continue; }
        const ElfW(Sym)* symbol = (const ElfW(Sym)*)(file + sections[i].sh_offset);
        const char* names = file + sections[sections[i].sh_link].sh_offset;
        for (size_t n = sections[i].sh_size / sizeof *symbol; n > 0; n--, symbol++) {
            if (ELF64_ST_TYPE(symbol->st_info) == STT_FUNC) {
                (*symbols)[base + symbol->st_value] = names + symbol->st_name;
            }
        }
    }
    munmap((void*)file, (size_t)st.st_size);
    return symbols;
}

// "void layernorm_kernel<float>(float*, ...)" -> "layernorm_kernel<float>"
std::string short_name(const std::string& mangled) {
    int status;
    char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    std::string name = text ? text : mangled;
    free(text);
    int depth = 0;
    for (size_t i = 0; i < name.size(); i++) {
        depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
        if (name[i] == '(' && depth == 0 && name.compare(i, 10, "(anonymous")) {
            name.resize(i);
            break;
        }
    }
    return name.compare(0, 5, "void ") ? name : name.substr(5);
}

struct KernelOp : Op {
    Launch launch;
    void (*drop)(void*);
    bool poll() override {
        run_kernel(launch);
        return true;
    }
    ~KernelOp() override { drop(launch.pack); }
};

cudaError_t check_launch(const cudaLaunchConfig_t* c, const void* function) {
    const dim3 &g = c->gridDim, &b = c->blockDim;
    size_t nthreads = (size_t)b.x * b.y * b.z;
    if (c->stream->device != current_device()) { return cudaErrorInvalidResourceHandle; }
    if (nthreads == 0 || nthreads > MAX_THREADS || b.z > 64 || g.x == 0 || g.y == 0 || g.z == 0 ||
        g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
        return cudaErrorInvalidConfiguration;
    }
    Guard guard(kernels_lock());
    if (c->dynamicSmemBytes > (size_t)kernel(function).shared_limit) { return cudaErrorInvalidValue; }
    return c->numAttrs ? cudaErrorNotSupported : cudaSuccess; // clusters and the like
}
} // namespace

const char* kernel_name(const void* function) {
    static Symbols* symbols = nullptr;
    Guard guard(kernels_lock());
    Kernel& k = kernel(function);
    if (!k.name) {
        if (!symbols) { symbols = read_symbols(); }
        auto it = symbols->find((uintptr_t)function);
        k.name = it == symbols->end() ? "kernel" : intern(short_name(it->second).c_str());
    }
    return k.name;
}
} // namespace emu

using namespace emu;

extern "C" {
cudaError_t emu_launch(const cudaLaunchConfig_t* config, const void* function, void (*call)(void*),
                       void* pack, void (*drop)(void*)) {
    const char* name = kernel_name(function);
    require_stream(name, config->stream);
    cudaError_t e = check_launch(config, function);
    if (e != cudaSuccess) {
        drop(pack);
        return fail(e);
    }
    count(COUNT_LAUNCH);
    KernelOp* op = new KernelOp();
    op->what = name;
    op->launch = Launch{config->gridDim, config->blockDim, config->dynamicSmemBytes, call, pack, name};
    op->drop = drop;
    return enqueue("cudaLaunchKernelEx", config->stream, op);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || value > MAX_SHARED_NBYTES) { return fail(cudaErrorInvalidValue); }
        Guard guard(kernels_lock());
        kernel(function).shared_limit = value;
    }
    return cudaSuccess;
}

// registers and static shared memory are not known here: 0
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    Guard guard(kernels_lock());
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = MAX_THREADS;
    attributes->maxDynamicSharedSizeBytes = kernel(function).shared_limit;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* nblocks, const void*, int nthreads,
                                                          size_t shared_nbytes) {
    if (nthreads <= 0) { return fail(cudaErrorInvalidValue); }
    size_t by_shared = SM_SHARED_NBYTES / (shared_nbytes + 1024), by_threads = SM_THREADS / (size_t)nthreads;
    size_t n = by_shared < by_threads ? by_shared : by_threads;
    *nblocks = nthreads > MAX_THREADS ? 0 : n < SM_BLOCKS ? (int)n : SM_BLOCKS;
    return cudaSuccess;
}
}
