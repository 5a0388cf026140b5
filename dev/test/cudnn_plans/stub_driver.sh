#!/bin/bash
# Makes FOLDER/libcuda.so.1, a driver that loads nothing and runs nothing, so that cuDNN compiles its kernels and
# makes plans where there is no GPU: stub_driver.sh LIBCUDA_STUB FOLDER. The names of a driver's functions come
# from the toolkit's stub. What cuDNN calls while it plans succeeds and hands out made-up handles; all else fails
# as without a device, so CUDA's own run-time still finds none. Programs see it by LD_LIBRARY_PATH=FOLDER alone;
# never install it.
set -euo pipefail
stub=$1 folder=$2
mkdir -p "$folder"
cat >"$folder/driver.c" <<'C'
#include <stddef.h>
// handles are never looked into
// which 4: registers of a thread
#define MAKES(name, params, out)  int name params { *out = (void*)0x1000; return 0; }
#define NOTHING(name, params)     int name params { return 0; }
#define ATTRIBUTE(name, params)   int name params { *value = which == 4 ? 64 : 1024; return 0; }
#define GLOBAL(name, params)      int name params { *p = (void*)0x1000; if (n) { *n = 4096; } return 0; }
#define TEXT(name)                int name(int err, const char** text) { *text = "stub"; return 0; }
MAKES(cuLibraryLoadData,
      (void** lib, const void* code, void* a, void* b, unsigned n, void* c, void* d, unsigned m), lib)
MAKES(cuLibraryGetKernel, (void** kernel, void* lib, const char* name), kernel)
MAKES(cuKernelGetFunction, (void** f, void* kernel), f)
MAKES(cuModuleLoadData, (void** module, const void* code), module)
MAKES(cuModuleLoadDataEx, (void** module, const void* code, unsigned n, void* a, void* b), module)
MAKES(cuModuleGetFunction, (void** f, void* module, const char* name), f)
NOTHING(cuLibraryUnload, (void* lib))
NOTHING(cuModuleUnload, (void* module))
NOTHING(cuKernelSetAttribute, (int which, int value, void* kernel, int device))
NOTHING(cuFuncSetAttribute, (void* f, int which, int value))
ATTRIBUTE(cuKernelGetAttribute, (int* value, int which, void* kernel, int device))
ATTRIBUTE(cuFuncGetAttribute, (int* value, int which, void* f))
GLOBAL(cuLibraryGetGlobal, (void** p, size_t* n, void* lib, const char* name))
GLOBAL(cuModuleGetGlobal_v2, (void** p, size_t* n, void* module, const char* name))
TEXT(cuGetErrorString)
TEXT(cuGetErrorName)
C
made=$(grep -oE '^[A-Z]+\(cu[A-Za-z0-9_]+' "$folder/driver.c" | sed 's/.*(//')
nm -D --defined-only "$stub" | awk '$2 == "T" || $2 == "W" {print $3}' | grep '^cu' | sort -u |
    grep -vxF "$made" | sed 's/.*/int &(void) { return 100; } \/\/ no device/' >>"$folder/driver.c"
"${CC:-cc}" -shared -fPIC -o "$folder/libcuda.so.1" "$folder/driver.c"
