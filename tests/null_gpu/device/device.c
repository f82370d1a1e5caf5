/* The devices: H100s by name, size and attributes; contexts, opened by the first call that needs one. */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER 13010
static int is_open[DEVICES];
static char contexts[DEVICES];
static __thread int current;
static __thread cudaError_t last = cudaSuccess;

int device_count(void) {
    const char *told = getenv("NULL_GPU_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    int number = told ? atoi(told) : 2;
    if (visible && !*visible) return 0;
    if (visible) { /* numbers alone, as torchrun and titan write them */
        int asked = 1;
        for (const char *at = visible; *at; at++) asked += *at == ',';
        number = asked < number ? asked : number;
    }
    return number < DEVICES ? number : DEVICES;
}
int current_device(void) { return current; }
void open_context(int device) {
    if (is_open[device]) return;
    is_open[device] = 1;
    const char *log = getenv("NULL_GPU_CONTEXTS"), *rank = getenv("LOCAL_RANK"); /* a file of lines: rank, device */
    FILE *file = log ? fopen(log, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s %d\n", rank ? rank : "none", device);
    fclose(file);
}
cudaError_t failed(cudaError_t error) { return last = error; }

long null_gpu_contexts(void) { /* a bit for each device whose context is open */
    long found = 0;
    for (int device = 0; device < DEVICES; device++) found |= (long)is_open[device] << device;
    return found;
}

static int exists(int device) { return device >= 0 && device < device_count(); }

/* ------------------------------------------------------------------------------------------ properties */

static int attribute(int which) {
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 52428800;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
        case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
        default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    if (!exists(device)) return failed(cudaErrorInvalidDevice);
    *value = attribute(which);
    return cudaSuccess;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)which, device);
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    if (!exists(device)) return failed(cudaErrorInvalidDevice);
    *found = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3", .totalGlobalMem = capacity(), .sharedMemPerBlock = 49152, .regsPerBlock = 65536,
        .warpSize = 32, .memPitch = 2147483647, .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .totalConstMem = 65536, .major = 9, .textureAlignment = 512,
        .multiProcessorCount = 132, .canMapHostMemory = 1, .concurrentKernels = 1, .pciBusID = 16 + device,
        .asyncEngineCount = 3, .unifiedAddressing = 1, .memoryBusWidth = 5120, .l2CacheSize = 52428800,
        .maxThreadsPerMultiProcessor = 2048, .streamPrioritiesSupported = 1, .sharedMemPerMultiprocessor = 233472,
        .regsPerMultiprocessor = 65536, .cooperativeLaunch = 1, .sharedMemPerBlockOptin = 232448,
        .maxBlocksPerMultiProcessor = 32, .reservedSharedMemPerBlock = 1024, .hostRegisterSupported = 1,
        .memoryPoolsSupported = 1, .clusterLaunch = 1};
    found->uuid.bytes[15] = (char)(1 + device);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02X:00.0", 16 + device);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

/* ------------------------------------------------------------------------------- devices and contexts */

cudaError_t cudaGetDeviceCount(int *number) {
    *number = device_count();
    return *number ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (!exists(device)) return failed(cudaErrorInvalidDevice);
    open_context(current = device);
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = DRIVER;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

CUresult cuInit(unsigned flags) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *version) { return (CUresult)cudaDriverGetVersion(version); }
CUresult cuDeviceGetCount(int *number) {
    *number = device_count();
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return exists(number) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    snprintf(name, size, "NVIDIA H100 80GB HBM3");
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)(1 + device);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0, *active = is_open[device];
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    open_context(device);
    *context = (CUcontext)(contexts + device);
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = is_open[current] ? (CUcontext)(contexts + current) : NULL;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) current = (int)((char *)context - contexts);
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit which) {
    *value = 1048576;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit which, size_t value) { return CUDA_SUCCESS; }

/* ---------------------------------------------------------------------------------------------- errors */

cudaError_t cudaGetLastError(void) {
    cudaError_t was = last;
    last = cudaSuccess;
    return was;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
        default: return "an error of CUDA";
    }
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        default: return cudaGetErrorName(error);
    }
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------ functions of the driver by name */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    char newest[128];
    for (int number = 4; number >= 1; number--) {
        snprintf(newest, sizeof newest, number > 1 ? "%s_v%d" : "%s", name, number);
        Dl_info where, own;
        if ((*function = dlsym(RTLD_DEFAULT, newest)) && dladdr(*function, &where) && dladdr(contexts, &own) &&
            where.dli_fbase == own.dli_fbase)
            break;
        *function = NULL;
    }
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*function && getenv("NULL_GPU_VERBOSE")) fprintf(stderr, "null_gpu: no %s\n", name);
    return cudaSuccess;
}
