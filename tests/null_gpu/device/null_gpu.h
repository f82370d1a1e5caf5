/* A CUDA device whose kernels do nothing. One library has the symbols of all of NVIDIA's that torch is linked
 * with; memory, copies, streams, events, captures and contexts are kept as CUDA keeps them. */
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define DEVICES 8

struct Capture {
    unsigned long long id;
    long launches, nodes;
    enum cudaStreamCaptureMode mode;
    int is_valid, is_open;
};
struct CUstream_st {
    int device, priority;
    unsigned flags;
    struct Capture *capture;
};
struct CUevent_st {
    int device;
    unsigned flags;
    double at;               /* seconds; 0: never recorded */
    struct CUstream_st *stream; /* of the last record */
    struct Capture *capture; /* in which it was recorded */
};
struct Range {
    char *start;
    size_t size;
    int device; /* -1: memory of the host that copies need not stage */
    unsigned long long id;
};

/* device.c */
int device_count(void);
int current_device(void);
void open_context(int device);       /* every call that needs a context opens it, as CUDA's runtime does */
cudaError_t failed(cudaError_t error); /* returns it, and cudaGetLastError will */

/* memory.c */
size_t capacity(void); /* bytes of a device */
int find_range(const void *at, struct Range *found);
void catch_up(struct CUstream_st *stream); /* makes the copies that it has put off; NULL: those of all */
void copy_bytes(void *to, const void *from, size_t size);
void fill_bytes(void *at, int value, size_t size);

/* streams.c */
struct CUstream_st *stream_of(cudaStream_t stream);
int refuses_unsafe(void); /* whether a capture forbids what this thread asks for */

/* counts.c */
enum Count { LAUNCHES, NODES, WAITS, COPIES, FILLS, COLLECTIVES, ALLOCATIONS, COUNTS };
void count(enum Count kind, const char *name);

/* kernels.c */
cudaError_t launch(const void *function, dim3 grid, dim3 block, size_t shared, cudaStream_t stream);
cudaError_t launch_named(const char *name, cudaStream_t stream);
