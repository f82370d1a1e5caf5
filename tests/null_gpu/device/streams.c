/* Streams and events, whose work is done as it is asked for, but for copies to the host; and captures, which forbid what CUDA's forbid. */
#include "null_gpu.h"
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static struct CUstream_st defaults[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int captures; /* in progress */
static __thread enum cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal;
static __thread int own_captures;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

struct CUstream_st *stream_of(cudaStream_t stream) {
    struct CUstream_st *found = stream;
    if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
        found = defaults + current_device();
        found->device = current_device();
    }
    if (found->capture && !found->capture->is_open) found->capture = NULL; /* it had joined one that has ended */
    return found;
}

static struct Capture *capture_of(cudaEvent_t event) {
    return event->capture && event->capture->is_open ? event->capture : NULL;
}

int refuses_unsafe(void) {
    if (!captures || own_mode == cudaStreamCaptureModeRelaxed) return 0;
    return own_mode == cudaStreamCaptureModeGlobal || own_captures;
}

static cudaError_t waited(const char *name) {
    open_context(current_device());
    if (refuses_unsafe()) return failed(cudaErrorStreamCaptureUnsupported);
    count(WAITS, name);
    return cudaSuccess;
}

/* ------------------------------------------------------------------------------------------- streams */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    open_context(current_device());
    *made = calloc(1, sizeof **made);
    (*made)->device = current_device(), (*made)->flags = flags, (*made)->priority = priority;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return cudaStreamCreateWithPriority(made, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *made) { return cudaStreamCreateWithPriority(made, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; } /* kept: a late user is told apart */
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream_of(stream)->capture) return failed(cudaErrorStreamCaptureUnsupported);
    catch_up(stream_of(stream));
    return waited("cudaStreamSynchronize");
}
cudaError_t cudaDeviceSynchronize(void) {
    catch_up(NULL);
    return waited("cudaDeviceSynchronize");
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    catch_up(stream_of(stream));
    return stream_of(stream)->capture ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    catch_up(stream_of(stream));
    if (!stream_of(stream)->capture) function(data);
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    struct CUstream_st *waiting = stream_of(stream);
    if (capture_of(event) && waiting->capture && waiting->capture != capture_of(event)) return failed(cudaErrorStreamCaptureMerge);
    if (waiting->capture && !capture_of(event) && event->at) return failed(cudaErrorStreamCaptureIsolation);
    if (capture_of(event)) waiting->capture = capture_of(event);
    if (event->stream) catch_up(event->stream); /* before whatever the waiting stream does next */
    return cudaSuccess;
}
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
    *(cuuint32_t *)at = value;
    return CUDA_SUCCESS;
}

/* -------------------------------------------------------------------------------------------- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
    open_context(current_device());
    *made = calloc(1, sizeof **made);
    (*made)->device = current_device(), (*made)->flags = flags;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    if (event->device != stream_of(stream)->device) return failed(cudaErrorInvalidResourceHandle);
    event->at = now(), event->stream = stream_of(stream), event->capture = stream_of(stream)->capture;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->stream) catch_up(event->stream);
    return refuses_unsafe() || capture_of(event) ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->stream) catch_up(event->stream);
    return capture_of(event) ? failed(cudaErrorStreamCaptureUnsupported) : waited("cudaEventSynchronize");
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!start->at || !end->at || (start->flags | end->flags) & cudaEventDisableTiming) return failed(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)(1e3 * (end->at - start->at));
    return cudaSuccess;
}

/* ---------------------------------------------------------------------------------- captures, graphs */

struct CUgraph_st {
    long launches, nodes;
};
struct CUgraphExec_st {
    struct CUgraph_st graph;
};

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    static unsigned long long ids;
    if (!stream || stream == cudaStreamLegacy) return failed(cudaErrorStreamCaptureUnsupported);
    if (stream->capture) return failed(cudaErrorIllegalState);
    pthread_mutex_lock(&lock);
    stream->capture = calloc(1, sizeof *stream->capture); /* kept: other streams and events may name it */
    *stream->capture = (struct Capture){.id = ++ids, .mode = mode, .is_valid = 1, .is_open = 1};
    if (mode == cudaStreamCaptureModeGlobal) captures++;
    own_captures++;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    struct Capture *capture = stream_of(stream)->capture;
    *graph = NULL;
    if (!capture) return failed(cudaErrorIllegalState);
    pthread_mutex_lock(&lock);
    stream->capture = NULL, capture->is_open = 0;
    if (capture->mode == cudaStreamCaptureModeGlobal) captures--;
    own_captures--;
    pthread_mutex_unlock(&lock);
    if (!capture->is_valid) return failed(cudaErrorStreamCaptureInvalidated);
    *graph = calloc(1, sizeof **graph);
    (*graph)->launches = capture->launches, (*graph)->nodes = capture->nodes;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    struct Capture *capture = stream_of(stream)->capture;
    *status = !capture ? cudaStreamCaptureStatusNone
              : capture->is_valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **before, const cudaGraphEdgeData **edges,
                                     size_t *number) {
    static struct CUgraph_st any;
    cudaStreamIsCapturing(stream, status);
    if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
    if (id) *id = stream_of(stream)->capture->id;
    if (graph) *graph = &any;
    if (before) *before = NULL;
    if (edges) *edges = NULL;
    if (number) *number = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = own_mode;
    own_mode = *mode, *mode = before;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
    if (nodes) return failed(cudaErrorNotSupported);
    *number = graph->launches + graph->nodes;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    *made = calloc(1, sizeof **made);
    (*made)->graph = *graph;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return launch_named("a graph", stream); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    free(graph);
    return cudaSuccess;
}
