/* What torch calls of NVIDIA's libraries: each product is one launch; each collective is over at once. */
#include "null_gpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------------------------------------- cuBLAS */

struct Blas {
    cudaStream_t stream;
    int math, pointers;
};
static __thread struct Blas *blas_in_use;

int cublasCreate_v2(void **handle) {
    *handle = calloc(1, sizeof(struct Blas));
    return 0;
}
int cublasDestroy_v2(void *handle) { return 0; }
int cublasSetStream_v2(struct Blas *handle, cudaStream_t stream) {
    handle->stream = stream, blas_in_use = handle;
    return 0;
}
int cublasSetWorkspace_v2(void *handle, void *at, size_t size) { return 0; }
int cublasSetSmCountTarget(void *handle, int number) { return 0; }
int cublasSetMathMode(struct Blas *handle, int mode) { return handle->math = mode, 0; }
int cublasGetMathMode(struct Blas *handle, int *mode) { return *mode = handle->math, 0; }
int cublasSetPointerMode_v2(struct Blas *handle, int mode) { return handle->pointers = mode, 0; }
int cublasGetPointerMode_v2(struct Blas *handle, int *mode) { return *mode = handle->pointers, 0; }

/* Of every other function of cuBLAS (made by build.py): torch has set the stream just before. */
int null_gpu_blas(const char *name) { return launch_named(name, blas_in_use ? blas_in_use->stream : NULL) ? 13 : 0; }

size_t cublasLtGetVersion(void) { return 130101; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return *made = calloc(1, 256), 0; }
int cublasLtMatmulDescDestroy(void *it) { return free(it), 0; }
int cublasLtMatmulDescSetAttribute(void *it, int which, const void *value, size_t size) { return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return *made = calloc(1, 256), 0;
}
int cublasLtMatrixLayoutDestroy(void *it) { return free(it), 0; }
int cublasLtMatrixLayoutSetAttribute(void *it, int which, const void *value, size_t size) { return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { return *made = calloc(1, 256), 0; }
int cublasLtMatmulPreferenceDestroy(void *it) { return free(it), 0; }
int cublasLtMatmulPreferenceSetAttribute(void *it, int which, const void *value, size_t size) { return 0; }
struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, struct Heuristic *found, int *number) {
    memset(found, 0, sizeof *found);
    found->waves = 1, *number = 1;
    return 0;
}
int cublasLtMatmul(void *handle, void *product, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                   const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const void *algorithm,
                   void *workspace, size_t size, cudaStream_t stream) {
    return launch_named("cublasLtMatmul", stream) ? 13 : 0;
}

/* ------------------------------------------------------------------- cuDNN, as its front end speaks to it */

int cudnnCreate(void **handle) { return *handle = calloc(1, sizeof(cudaStream_t)), 0; }
int cudnnSetStream(cudaStream_t *handle, cudaStream_t stream) { return *handle = stream, 0; }
int cudnnGetStream(cudaStream_t *handle, cudaStream_t *stream) { return *stream = *handle, 0; }
size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? 9 : which == 1 ? 20 : 0, 0; }
const char *cudnnGetErrorString(int error) { return error ? "an error of cuDNN" : "success"; }
void cudnnGetLastErrorString(char *text, size_t size) { snprintf(text, size, "none"); }
int cudnnBackendCreateDescriptor(int type, void **made) {
    return *made = malloc(1), 0;
}
int cudnnBackendDestroyDescriptor(void *it) { return free(it), 0; }
int cudnnBackendFinalize(void *it) { return 0; }
int cudnnBackendSetAttribute(void *it, int which, int type, int64_t number, const void *value) { return 0; }
/* One engine is found for every graph; it needs no workspace, and there is nothing to note about it. */
int cudnnBackendGetAttribute(void *it, int which, int type, int64_t asked, int64_t *number, void *value) {
    enum { ENGINES_FOUND = 202, INT64 = 3, INT32 = 23 };
    if (number) *number = which == ENGINES_FOUND || asked == 1;
    if (value && asked == 1 && type == INT64) *(int64_t *)value = 0;
    if (value && asked == 1 && type == INT32) *(int32_t *)value = 0;
    return 0;
}
int cudnnBackendExecute(cudaStream_t *handle, void *plan, void *values) {
    return launch_named("cudnnBackendExecute", *handle) ? 5000 : 0;
}

/* ------------------------------------------------------------------------------------------------ NCCL */

struct Comm {
    int rank, ranks, device;
};
static __thread int grouped;

int ncclGetVersion(int *version) { return *version = 22907, 0; }
const char *ncclGetErrorString(int error) { return error ? "an error of NCCL" : "no error"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclGetUniqueId(void *id) { return memset(id, 7, 128), 0; }
static int joined(struct Comm **made, int ranks, int rank) {
    *made = malloc(sizeof **made);
    **made = (struct Comm){rank, ranks, current_device()};
    open_context(current_device());
    return 0;
}
struct Id {
    char bytes[128];
};
int ncclCommInitRank(struct Comm **made, int ranks, struct Id id, int rank) { return joined(made, ranks, rank); }
int ncclCommInitRankConfig(struct Comm **made, int ranks, struct Id id, int rank, void *config) { return joined(made, ranks, rank); }
int ncclCommInitRankScalable(struct Comm **made, int ranks, int rank, int number, struct Id *ids, void *config) {
    return joined(made, ranks, rank);
}
int ncclCommSplit(struct Comm *comm, int color, int key, struct Comm **made, void *config) {
    if (color < 0) return *made = NULL, 0;
    return joined(made, comm->ranks, comm->rank);
}
int ncclCommFinalize(void *comm) { return 0; }
int ncclCommDestroy(void *comm) { return 0; }
int ncclCommAbort(void *comm) { return 0; }
int ncclCommCount(struct Comm *comm, int *number) { return *number = comm->ranks, 0; }
int ncclCommUserRank(struct Comm *comm, int *rank) { return *rank = comm->rank, 0; }
int ncclCommGetAsyncError(void *comm, int *error) { return *error = 0, 0; }
int ncclCommRegister(void *comm, void *at, size_t size, void **handle) { return *handle = NULL, 0; }
int ncclCommDeregister(void *comm, void *handle) { return 0; }
int ncclRedOpCreatePreMulSum(int *made, void *factor, int type, int where, void *comm) { return *made = 5, 0; }
int ncclRedOpDestroy(int operation, void *comm) { return 0; }
int ncclGroupStart(void) { return grouped++, 0; }
int ncclGroupEnd(void) { return grouped--, 0; }

static int collective(const char *name, struct Comm *comm, cudaStream_t stream) {
    if (comm->device != current_device()) return 4; /* ncclInvalidArgument */
    count(COLLECTIVES, name);
    return launch_named(name, stream) ? 1 : 0;
}
int ncclAllReduce(const void *from, void *to, size_t number, int type, int operation, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclAllReduce", comm, stream);
}
int ncclReduce(const void *from, void *to, size_t number, int type, int operation, int root, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclReduce", comm, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t number, int type, int operation, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclReduceScatter", comm, stream);
}
int ncclAllGather(const void *from, void *to, size_t number, int type, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclAllGather", comm, stream);
}
int ncclBroadcast(const void *from, void *to, size_t number, int type, int root, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclBroadcast", comm, stream);
}
int ncclBcast(void *at, size_t number, int type, int root, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclBroadcast", comm, stream);
}
int ncclAlltoAll(const void *from, void *to, size_t number, int type, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclAlltoAll", comm, stream);
}
int ncclSend(const void *from, size_t number, int type, int peer, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclSend", comm, stream);
}
int ncclRecv(void *to, size_t number, int type, int peer, struct Comm *comm, cudaStream_t stream) {
    return collective("ncclRecv", comm, stream);
}

/* ------------------------------------------------------------------------------------- NVRTC and CUPTI */

int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
const char *nvrtcGetErrorString(int error) { return error ? "an error of NVRTC" : "success"; }
int nvrtcCreateProgram(void **made, const char *text, const char *name, int number, void *headers, void *names) {
    return *made = malloc(1), 0;
}
int nvrtcDestroyProgram(void **it) { return 0; }
int nvrtcAddNameExpression(void *it, const char *name) { return 0; }
int nvrtcCompileProgram(void *it, int number, void *options) { return 0; }
int nvrtcGetLoweredName(void *it, const char *expression, const char **name) { return *name = "an NVRTC kernel", 0; }
int nvrtcGetCUBINSize(void *it, size_t *size) { return *size = 8, 0; }
int nvrtcGetCUBIN(void *it, char *text) { return memset(text, 0, 8), 0; }
int nvrtcGetPTXSize(void *it, size_t *size) { return *size = 8, 0; }
int nvrtcGetPTX(void *it, char *text) { return memset(text, 0, 8), 0; }
int nvrtcGetProgramLogSize(void *it, size_t *size) { return *size = 1, 0; }
int nvrtcGetProgramLog(void *it, char *text) { return *text = 0, 0; }

int cuptiGetVersion(uint32_t *version) { return *version = 130000, 0; }
int cuptiGetResultString(int result, const char **text) { return *text = "not supported", 0; }
int cuptiActivityGetNextRecord(void *buffer, size_t size, void **record) { return 12; } /* there is none */
int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *number) { return *number = 0, 0; }
int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) { return 0; }
int cuptiSubscribe(void **subscriber, void *function, void *data) { return *subscriber = malloc(1), 0; }
