/* Kernels: none runs. Those of torch are known by name; what is asked of a kernel is what Hopper's could answer. */
#include "null_gpu.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS (1u << 20)
#define SHARED 232448 /* bytes that a block may ask for */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    const void *function;
    const char *name;
} kernels[SLOTS];

static size_t slot_of(const void *function) {
    size_t slot = ((size_t)function >> 4) * 2654435761u % SLOTS;
    while (kernels[slot].function && kernels[slot].function != function) slot = (slot + 1) % SLOTS;
    return slot;
}

static const char *name_of(const void *function) {
    const char *name = kernels[slot_of(function)].name;
    return name ? name : "a kernel";
}

cudaError_t launch_named(const char *name, cudaStream_t given) {
    struct CUstream_st *stream = stream_of(given);
    open_context(current_device());
    if (stream->device != current_device()) return failed(cudaErrorInvalidResourceHandle);
    if (stream->capture) stream->capture->launches++;
    else count(LAUNCHES, name);
    return cudaSuccess;
}

static int fits(dim3 grid, dim3 block, size_t shared) {
    return grid.x && grid.y && grid.z && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535 && block.x &&
           block.y && block.z && block.z <= 64 && (size_t)block.x * block.y * block.z <= 1024 && shared <= SHARED;
}

cudaError_t launch(const void *function, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    if (!fits(grid, block, shared)) return failed(cudaErrorInvalidConfiguration);
    return launch_named(name_of(function), stream);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(function, grid, block, shared, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(function, grid, block, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) {
    return launch(function, how->gridDim, how->blockDim, how->dynamicSmemBytes, how->stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(kernel, grid, block, shared, stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

/* ---------------------------------------------------------------------- what nvcc has compiled into torch */

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *image) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **module) {}
void __cudaUnregisterFatBinary(void **module) {}
char __cudaInitModule(void **module) { return 1; }
void __cudaRegisterFunction(void **module, const char *function, char *device_function, const char *name, int threads,
                            void *thread, void *block, void *block_size, void *grid_size, int *warp) {
    pthread_mutex_lock(&lock);
    size_t slot = slot_of(function);
    kernels[slot].name = name, kernels[slot].function = function;
    pthread_mutex_unlock(&lock);
}
void __cudaRegisterVar(void **module, char *variable, char *address, const char *name, int external, size_t size, int constant, int global) {}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = calloc(1, 65536); /* one for all: no kernel reads it */
    return cudaSuccess;
}

/* -------------------------------------------------------------------------------- what a kernel is like */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90,
                                         .maxDynamicSharedSizeBytes = 49152};
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value) {
    return which == cudaFuncAttributeMaxDynamicSharedMemorySize && value > SHARED ? failed(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute which, int value, int device) {
    return cudaFuncSetAttribute(kernel, which, value);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *number, const void *function, int threads, size_t shared, unsigned flags) {
    int by_threads = 2048 / (threads > 0 ? threads : 1), by_shared = shared ? 233472 / (int)(shared + 1024) : 32;
    *number = by_threads < by_shared ? by_threads : by_shared;
    if (*number > 32) *number = 32;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *number, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(number, function, threads, shared, 0);
}

/* ----------------------------------------------------- kernels that are loaded while it runs: Triton, NVRTC */

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    open_context(current_device());
    *module = malloc(1);
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned number, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name); /* its name is all that it is */
    return CUDA_SUCCESS;
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned jits, enum cudaLibraryOption *options, void **values, unsigned number) {
    *library = malloc(1);
    return cudaSuccess;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t library) { return cudaSuccess; }
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = (cudaKernel_t)strdup(name);
    return cudaSuccess;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    switch (which) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 64; break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    return which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value > SHARED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **arguments, void **more) {
    if (!fits((dim3){gx, gy, gz}, (dim3){bx, by, bz}, shared)) return CUDA_ERROR_INVALID_VALUE;
    return (CUresult)launch_named((const char *)function, stream);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void **arguments) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, NULL);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **more) {
    return cuLaunchKernel(function, how->gridDimX, how->gridDimY, how->gridDimZ, how->blockDimX, how->blockDimY,
                          how->blockDimZ, how->sharedMemBytes, how->hStream, arguments, more);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *number, CUfunction function, int threads, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(number, function, threads, shared);
}
CUresult cuOccupancyMaxActiveClusters(int *number, CUfunction function, const CUlaunchConfig *how) {
    *number = 132;
    return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *at, const cuuint64_t *sizes,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}
