/* Memory: pages of this process that are there once they are written, so that 80 GB cost nothing. */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ul
#define GRANULARITY (2ul << 20)
#define BLOCK (1ul << 20)
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct Range *ranges; /* by address */
static size_t known, room;
static size_t used[DEVICES];
static unsigned long long next_id = 1;
static int numbers = -1; /* what the host reads: 0 what was copied there, 1 zeros, 2 zeros, and 1 for a single byte or int */

void null_gpu_numbers(int wanted) { numbers = wanted; }

/* Called with each copy to the host: writes what is read and returns 1, or returns 0. */
static int (*reader)(void *to, size_t size);
void null_gpu_on_read(int (*function)(void *to, size_t size)) { reader = function; }

static void start(void) {
    const char *told = getenv("NULL_GPU_NUMBERS");
    if (numbers < 0) numbers = told ? atoi(told) : 0;
}

size_t capacity(void) {
    const char *told = getenv("NULL_GPU_MEMORY"); /* bytes */
    return told ? strtoull(told, NULL, 10) : 85045477376ul; /* an H100's: 79.2 GiB */
}

static size_t after(const void *at) { /* how many ranges begin at or before it */
    size_t low = 0, high = known;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= (const char *)at) low = middle + 1;
        else high = middle;
    }
    return low;
}

int find_range(const void *at, struct Range *found) {
    pthread_mutex_lock(&lock);
    size_t index = after(at);
    int is_in = index && (const char *)at < ranges[index - 1].start + ranges[index - 1].size;
    if (is_in) *found = ranges[index - 1];
    pthread_mutex_unlock(&lock);
    return is_in;
}

static void add(void *start, size_t size, int device) {
    pthread_mutex_lock(&lock);
    if (known == room) ranges = realloc(ranges, (room = room ? 2 * room : 256) * sizeof *ranges);
    size_t index = after(start);
    memmove(ranges + index + 1, ranges + index, (known++ - index) * sizeof *ranges);
    ranges[index] = (struct Range){start, size, device, next_id++};
    pthread_mutex_unlock(&lock);
}

static int remove_range(const void *start, struct Range *removed) {
    pthread_mutex_lock(&lock);
    size_t index = after(start);
    int is_there = index && ranges[index - 1].start == start;
    if (is_there) {
        *removed = ranges[index - 1];
        memmove(ranges + index - 1, ranges + index, (known-- - index) * sizeof *ranges);
    }
    pthread_mutex_unlock(&lock);
    return is_there;
}

static int reserve(int device, size_t size) {
    pthread_mutex_lock(&lock);
    int fits = used[device] + size <= capacity();
    if (fits) used[device] += size;
    pthread_mutex_unlock(&lock);
    return fits;
}

static void give_back(int device, size_t size) {
    pthread_mutex_lock(&lock);
    used[device] -= size;
    pthread_mutex_unlock(&lock);
}

static void *pages(size_t size) {
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    madvise(start, size, MADV_NOHUGEPAGE); /* one that is read only stays the page of zeros */
    return start;
}

static size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

/* ---------------------------------------------------------------------------------- copies and fills */

static void clear(char *at, size_t size) {
    char *first = (char *)rounded((size_t)at, PAGE), *end = (char *)((size_t)(at + size) / PAGE * PAGE);
    if (first >= end || madvise(first, end - first, MADV_DONTNEED)) {
        memset(at, 0, size);
        return;
    }
    memset(at, 0, first - at);
    memset(end, 0, at + size - end);
}

static int is_zero(const char *from, size_t size) {
    return !*from && !memcmp(from, from + 1, size - 1);
}

void copy_bytes(void *to, const void *from, size_t size) {
    if (!size) return;
    struct Range found;
    if (size < BLOCK || !find_range(to, &found) || found.device < 0) {
        memmove(to, from, size);
        return;
    }
    for (size_t done = 0; done < size; done += BLOCK) { /* zeros need no memory */
        size_t part = size - done < BLOCK ? size - done : BLOCK;
        if (is_zero((const char *)from + done, part)) clear((char *)to + done, part);
        else memmove((char *)to + done, (const char *)from + done, part);
    }
}

void fill_bytes(void *at, int value, size_t size) {
    struct Range found;
    if (!value && size >= BLOCK && find_range(at, &found) && found.device >= 0) clear(at, size);
    else memset(at, value, size);
}

/* A copy into pinned memory is over when somebody has waited for it, and no sooner: who reads before has a race. */
struct Late {
    struct CUstream_st *stream;
    void *to;
    const void *from;
    size_t size;
};
static struct Late *late;
static size_t lates, room_for_lates;

static void read_by_host(void *to, const void *from, size_t size) {
    int (*asked)(void *, size_t) = reader;
    if (asked && asked(to, size)) return;
    if (!numbers) copy_bytes(to, from, size);
    else {
        memset(to, 0, size); /* else what lay there before would be read */
        if (numbers == 2 && (size == 1 || size == sizeof(int))) *(char *)to = 1;
    }
}

static void put_off(struct CUstream_st *stream, void *to, const void *from, size_t size) {
    pthread_mutex_lock(&lock);
    if (lates == room_for_lates) late = realloc(late, (room_for_lates = room_for_lates ? 2 * room_for_lates : 64) * sizeof *late);
    late[lates++] = (struct Late){stream, to, from, size};
    pthread_mutex_unlock(&lock);
}

void catch_up(struct CUstream_st *stream) {
    for (;;) {
        struct Late one;
        size_t index = 0;
        pthread_mutex_lock(&lock);
        while (index < lates && stream && late[index].stream != stream) index++;
        int is_found = index < lates;
        if (is_found) {
            one = late[index];
            memmove(late + index, late + index + 1, (--lates - index) * sizeof *late);
        }
        pthread_mutex_unlock(&lock);
        if (!is_found) return;
        read_by_host(one.to, one.from, one.size);
    }
}

/* Tells a copy that CUDA makes only after it has waited: one from the device into pageable memory. */
static cudaError_t copy(void *to, const void *from, size_t size, cudaStream_t stream) {
    struct Range found;
    int to_known = find_range(to, &found), to_device = to_known && found.device >= 0;
    int from_known = find_range(from, &found), from_device = from_known && found.device >= 0;
    struct Capture *capture = stream_of(stream)->capture;
    open_context(current_device());
    start();
    if (capture) {
        count(NODES, "copy");
        capture->nodes++;
        if (!to_known || !from_known) {
            capture->is_valid = 0;
            return failed(cudaErrorStreamCaptureUnsupported);
        }
        return cudaSuccess;
    }
    count(COPIES, from_device ? to_device ? "device to device" : to_known ? "device to pinned" : "device to pageable"
                  : to_device ? from_known ? "pinned to device" : "pageable to device" : "host to host");
    if (from_device && !to_device && to_known) {
        put_off(stream_of(stream), to, from, size);
        return cudaSuccess;
    }
    catch_up(stream_of(stream));
    if (from_device && !to_device) read_by_host(to, from, size);
    else if (!numbers || !to_device) copy_bytes(to, from, size);
    if (from_device && !to_known) count(WAITS, "copy to pageable memory");
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, size, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    if (refuses_unsafe()) return failed(cudaErrorStreamCaptureUnsupported);
    count(WAITS, "cudaMemcpy");
    cudaError_t error = copy(to, from, size, NULL);
    catch_up(stream_of(NULL));
    return error;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream) {
    return copy(to, from, size, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t error = copy(to, from, height ? width : 0, stream);
    if (!error && !stream_of(stream)->capture)
        for (size_t row = 1; row < height && !numbers; row++)
            memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return error;
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) {
    count(WAITS, "cudaMemcpyToSymbol");
    return cudaSuccess; /* what no kernel reads */
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
    struct Capture *capture = stream_of(stream)->capture;
    open_context(current_device());
    if (capture) {
        count(NODES, "fill");
        capture->nodes++;
        return cudaSuccess;
    }
    count(FILLS, "fill");
    catch_up(stream_of(stream));
    fill_bytes(at, value, size);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size, NULL); }
CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t number, CUstream stream) {
    count(FILLS, "fill");
    if (!value) fill_bytes((void *)at, 0, 4 * number);
    else
        for (size_t index = 0; index < number; index++) ((unsigned *)at)[index] = value;
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------- blocks */

cudaError_t cudaMalloc(void **start, size_t size) {
    int device = current_device();
    *start = NULL;
    open_context(device);
    if (refuses_unsafe()) return failed(cudaErrorStreamCaptureUnsupported);
    if (!size) return cudaSuccess;
    if (!reserve(device, rounded(size, GRANULARITY))) return failed(cudaErrorMemoryAllocation);
    if (!(*start = pages(rounded(size, GRANULARITY)))) {
        give_back(device, rounded(size, GRANULARITY));
        return failed(cudaErrorMemoryAllocation);
    }
    count(ALLOCATIONS, "cudaMalloc");
    add(*start, rounded(size, GRANULARITY), device);
    return cudaSuccess;
}
cudaError_t cudaFree(void *start) {
    struct Range was;
    open_context(current_device());
    if (!start) return cudaSuccess;
    if (refuses_unsafe()) return failed(cudaErrorStreamCaptureUnsupported);
    if (!remove_range(start, &was) || was.device < 0) return failed(cudaErrorInvalidValue);
    count(WAITS, "cudaFree"); /* it waits for the whole device */
    catch_up(NULL);
    munmap(was.start, was.size);
    give_back(was.device, was.size);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t stream) { return cudaMalloc(start, size); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
    open_context(current_device());
    if (refuses_unsafe()) return failed(cudaErrorStreamCaptureUnsupported);
    if (!(*start = pages(rounded(size ? size : 1, PAGE)))) return failed(cudaErrorMemoryAllocation);
    count(ALLOCATIONS, "cudaHostAlloc");
    add(*start, rounded(size ? size : 1, PAGE), -1);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *start) {
    struct Range was;
    if (!start) return cudaSuccess;
    catch_up(NULL);
    if (!remove_range(start, &was) || was.device >= 0) return failed(cudaErrorInvalidValue);
    munmap(was.start, was.size);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
    struct Range found;
    open_context(current_device());
    if (find_range(start, &found)) return failed(cudaErrorHostMemoryAlreadyRegistered);
    add(start, size, -1);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *start) {
    struct Range was;
    return remove_range(start, &was) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    open_context(current_device());
    *total = capacity(), *free = *total - used[current_device()];
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    struct Range range;
    *found = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -1};
    if (!find_range(at, &range)) {
        found->hostPointer = (void *)at;
        return cudaSuccess;
    }
    found->type = range.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    found->device = range.device < 0 ? 0 : range.device;
    found->devicePointer = (void *)at;
    found->hostPointer = range.device < 0 ? (void *)at : NULL;
    return cudaSuccess;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr at) {
    struct Range range;
    if (!find_range((void *)at, &range)) return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = at; break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            if (range.device >= 0) return CUDA_ERROR_INVALID_VALUE;
            *(void **)value = (void *)at;
            break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned *)value = range.device < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = range.id; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = range.device < 0 ? 0 : range.device; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = (CUdeviceptr)range.start; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = range.size; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *size, CUdeviceptr at) {
    struct Range range;
    if (!find_range((void *)at, &range)) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = (CUdeviceptr)range.start;
    if (size) *size = range.size;
    return CUDA_SUCCESS;
}

/* --------------------------------------------------------------- addresses apart from what lies there */

struct Piece {
    size_t size;
    int device;
};
CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags flags) {
    *size = GRANULARITY;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    char *all = pages(size + GRANULARITY);
    *start = rounded((size_t)all, GRANULARITY);
    return all ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    munmap((void *)start, size);
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *of, unsigned long long flags) {
    if (!reserve(of->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct Piece *piece = malloc(sizeof *piece);
    *piece = (struct Piece){size, of->location.id};
    *handle = (CUmemGenericAllocationHandle)piece;
    count(ALLOCATIONS, "cuMemCreate");
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct Piece *piece = (struct Piece *)handle;
    give_back(piece->device, piece->size);
    free(piece);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    add((void *)at, size, ((struct Piece *)handle)->device);
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    struct Range was;
    for (size_t done = 0; done < size; done += was.size)
        if (!remove_range((char *)at + done, &was)) return CUDA_ERROR_INVALID_VALUE;
    clear((char *)at, size);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *who, size_t number) { return CUDA_SUCCESS; }
