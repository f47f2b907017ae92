/* amp_cuda.cuh - amp.h on NVIDIA GPUs, from one more header.               MIT licence, as amp.h.

   In ONE .cu file of your program:               Everywhere else, C files too (twice does no harm):
       #define AMP_IMPLEMENTATION                     #include "amp_cuda.cuh"
       #include "amp_cuda.cuh"
   That file holds amp.h's implementation too, so no other file defines AMP_IMPLEMENTATION.
   Build: nvcc -O2 -arch=native ... -lcublas (without cuBLAS: -DAMP_NO_CUBLAS). CUDA 11.8 or newer, compute
   capability 7.5 or newer.

   [TOC]   jump: search for ">>name"
     guide        what there is
     base         the context, errors
     half         conversions
     ops          operators on raw device pointers
     scaler       the loss scale on the device
     optim        optimizers on the device
     backend      the same model on a GPU
     impl         the implementation, in the same order: impl-base, impl-half, impl-gemm, impl-conv, impl-nn,
                  impl-scaler, impl-optim, impl-backend */

/* ======================================================================================== */
/* >>guide    Read amp.h's guide first; this says what differs.                              */
/* ======================================================================================== */
/*
   Two ways in.
   1. A model of amp.h: set desc.backend = amp_cuda_backend() and train as on the CPU. Nothing else changes.
   2. A CUDA program with its own training loop: single calls on its own device memory and stream.

   Names.     amp_cuda_<thing>_<verb> does on device pointers what amp_<thing>_<verb> does on host pointers.
   Streams.   All work goes to exec->stream and is asynchronous; exec == NULL is the default stream. Nothing
   waits for the GPU unless it says so.
   Numbers.   As in amp.h: operands in 16 bits, FP32 products and sums, one rounding. Conversions, activations,
   dropout and the optimizers give the CPU's bits; sums run in another order than on the CPU, but in one fixed
   order: the same call gives the same bits on every run. No kernel uses floating-point atomics.
   Errors.    As in amp.h; a failure of the GPU is AMP_ERR_DEVICE, or AMP_ERR_MEMORY when it has no memory left,
   or AMP_ERR_UNSUPPORTED without a fitting device. What a kernel does wrong shows at a later call. Pointers are
   asked what memory they are: host memory is AMP_ERR_ARGUMENT before anything is launched.
   Flags.     Do not compile with --use_fast_math: it keeps conversions and checks right, but not the bits. */

#ifndef AMP_CUDA_CUH_INCLUDED
#define AMP_CUDA_CUH_INCLUDED

#include "amp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ======================================================================================== */
/* >>base     The context.                                                                   */
/* ======================================================================================== */

/* Who multiplies matrices. */
typedef enum amp_cuda_gemm_engine {
    AMP_CUDA_GEMM_AUTO   = 0,   /* own kernels where they are known to be as fast, else cuBLAS if it is there */
    AMP_CUDA_GEMM_OWN    = 1,   /* own Tensor Core kernels */
    AMP_CUDA_GEMM_CUBLAS = 2,   /* cuBLAS where it offers the types and strides, else own kernels */
    AMPI_CUDA_GEMM_MAX   = 0x7fffffff
} amp_cuda_gemm_engine;

typedef struct amp_cuda_desc {
    void* stream;                  /* cudaStream_t to work on; NULL = one of its own */
    amp_cuda_gemm_engine gemm;     /* 0 = automatic */
    int   graph;                   /* 1 = a model's training step is captured once and replayed as a CUDA graph */
    const amp_logger* logger;      /* NULL = silent */
} amp_cuda_desc;

/* What calls on one stream share: the stream, the choice of GEMM, cuBLAS's handle, pinned staging memory. A
   model makes its own; raw calls work without one (own kernels, stream of the exec). Bound to the device that
   is current when it is made. */
typedef struct amp_cuda amp_cuda;
/* AMP_ERR_UNSUPPORTED: no device, or one below compute capability 7.5. AMP_ERR_MEMORY, AMP_ERR_DEVICE. */
AMP_DEF amp_result amp_cuda_create(amp_cuda** out, const amp_cuda_desc* desc);
/* Waits for the stream's work, then frees everything. NULL is fine. */
AMP_DEF void amp_cuda_destroy(amp_cuda* c);
/* An exec for raw calls on the context's stream. */
AMP_DEF amp_exec amp_cuda_exec(amp_cuda* c);
/* Waits for all work of the exec's stream; reports what kernels did wrong meanwhile. */
AMP_DEF amp_result amp_cuda_synchronize(const amp_exec* exec);

/* ======================================================================================== */
/* >>half     Conversions.                                                                   */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>ops      Operators on raw device pointers; see the function of that name in amp.h.       */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>scaler   The loss scale on the device: no step waits for the host.                       */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>optim    Fused optimizers.                                                              */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>backend  The same model on a GPU.                                                       */
/* ======================================================================================== */

/* For amp_model_desc.backend; backend_desc is an amp_cuda_desc or NULL. The model works on the device that is
   current when it is created, and on one stream. Scaler, step counter, learning rate and random-number
   position live on the device: amp_train_step without info waits for nothing, with info once, at its end.
   Host batches are copied to pinned memory first, so that the caller's memory is free when the call returns;
   with amp_batch.on_device they must be ready in the order of the stream. With desc.graph the second step of
   each batch size is captured, the later ones are replayed; an amp_comm hook must then be fit for capture
   (NCCL's all-reduce is). */
AMP_DEF const amp_backend* amp_cuda_backend(void);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* AMP_CUDA_CUH_INCLUDED */

/* ======================================================================================== */
/* >>impl     Stop here if you only want the interface.                                       */
/* ======================================================================================== */
#if defined(AMP_IMPLEMENTATION) && !defined(AMPI_CUDA_IMPLEMENTATION_ONCE)
#define AMPI_CUDA_IMPLEMENTATION_ONCE

/* ======================================================================================== */
/* >>impl-base                                                                                */
/* ======================================================================================== */
#include <cuda_runtime.h>
#if !defined(AMP_NO_CUBLAS)
  #include <cublas_v2.h>
#endif

/* tests/emu runs the kernels on the CPU: it brings its own cuda_runtime.h and the ampi_ptx_ functions. */
#if defined(AMP_CUDA_EMU)
  #define AMPI_D static inline
#elif defined(__CUDACC__)
  #define AMPI_D static __device__ __forceinline__
  #define AMPI_SHARED(type, name)                                     \
      extern __shared__ __align__(128) unsigned char ampi_shared[];   \
      type* name = reinterpret_cast<type*>(ampi_shared)
#else
  #error "amp_cuda.cuh: AMP_IMPLEMENTATION belongs into a .cu file, compiled by nvcc"
#endif

/* --- errors ------------------------------------------------------------------------------- */

AMPI_FN amp_result ampi_cuda_result(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return AMP_OK;
        case cudaErrorMemoryAllocation: return AMP_ERR_MEMORY;
        case cudaErrorNoDevice: case cudaErrorInsufficientDriver: case cudaErrorNoKernelImageForDevice:
            return AMP_ERR_UNSUPPORTED;
        default: return AMP_ERR_DEVICE;
    }
}

/* Turns a CUDA error into a result and a sentence: "amp_cuda_gemm: CUDA error 700, an illegal ...". */
AMPI_FN amp_result ampi_cuda_check(const amp_exec* exec, const char* place, cudaError_t e) {
    if (e == cudaSuccess) return AMP_OK;
    cudaGetLastError();      /* an error that does not stick is not reported twice */
    return ampi_fail(ampi_exec_logger(exec), ampi_cuda_result(e), "%s: CUDA error %d, %s", place, (int)e,
                     cudaGetErrorString(e));
}

AMPI_FN cudaStream_t ampi_cuda_stream(const amp_exec* exec) {
    return exec ? (cudaStream_t)exec->stream : (cudaStream_t)0;
}
AMPI_FN amp_cuda* ampi_cuda_context(const amp_exec* exec) { return exec ? (amp_cuda*)exec->context : NULL; }

/* A call by which the host waits for the stream, and hears of what kernels did wrong. */
AMPI_FN amp_result ampi_cuda_wait(const amp_exec* exec, const char* place) {
    return ampi_cuda_check(exec, place, cudaStreamSynchronize(ampi_cuda_stream(exec)));
}
AMP_DEF amp_result amp_cuda_synchronize(const amp_exec* exec) {
    return ampi_cuda_wait(exec, "amp_cuda_synchronize");
}

/* --- the context --------------------------------------------------------------------------- */

/* Pinned memory through which data travels; the host may use it again once `done` has passed. */
typedef struct ampi_cuda_slot {
    void*       data;
    size_t      bytes;
    cudaEvent_t done;
} ampi_cuda_slot;

/* A recorded step. graph is NULL while the key was only seen: a first run loads the kernels, which must not
   happen while a graph is captured. */
typedef struct ampi_cuda_record {
    uint64_t        key;
    cudaGraphExec_t graph;
} ampi_cuda_record;

enum { AMPI_CUDA_SLOTS = 8, AMPI_CUDA_RECORDS = 16, AMPI_CUDA_BLAS_BYTES = 32 << 20 };

struct amp_cuda {
    amp_cuda_desc    desc;
    amp_logger       logger;
    amp_allocator    allocator;
    amp_exec         exec;
    int              owns_stream;
    ampi_cuda_slot   slots[AMPI_CUDA_SLOTS];
    int              next_slot;
    ampi_cuda_record records[AMPI_CUDA_RECORDS];
    int              record_count;
#if !defined(AMP_NO_CUBLAS)
    cublasHandle_t   blas;
    void*            blas_workspace;
#endif
};

AMPI_FN amp_result ampi_cuda_check_device(const amp_logger* logger) {
    int count = 0, device = 0, major = 0, minor = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess && count == 0) e = cudaErrorNoDevice;
    if (e == cudaSuccess) e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (e != cudaSuccess) {
        cudaGetLastError();
        return ampi_fail(logger, ampi_cuda_result(e), "amp_cuda: no usable GPU: CUDA error %d, %s", (int)e,
                         cudaGetErrorString(e));
    }
    if (10 * major + minor < 75)
        return ampi_fail(logger, AMP_ERR_UNSUPPORTED,
                         "amp_cuda: device %d has compute capability %d.%d, 7.5 or newer is needed", device,
                         major, minor);
    return AMP_OK;
}

#if !defined(AMP_NO_CUBLAS)
/* A workspace of our own makes cuBLAS's results the same on every run, and its calls fit for capture. */
AMPI_FN amp_result ampi_cuda_open_blas(amp_cuda* c) {
    cublasStatus_t e;
    if (c->desc.gemm == AMP_CUDA_GEMM_OWN) return AMP_OK;
    if (cudaMalloc(&c->blas_workspace, AMPI_CUDA_BLAS_BYTES) != cudaSuccess) {
        cudaGetLastError();
        c->blas_workspace = NULL;
        return ampi_fail(c->exec.logger, AMP_ERR_MEMORY, "amp_cuda: no %d bytes for cuBLAS",
                         (int)AMPI_CUDA_BLAS_BYTES);
    }
    e = cublasCreate(&c->blas);
    if (e != CUBLAS_STATUS_SUCCESS) c->blas = NULL;
    if (e == CUBLAS_STATUS_SUCCESS) e = cublasSetStream(c->blas, ampi_cuda_stream(&c->exec));
    if (e == CUBLAS_STATUS_SUCCESS) e = cublasSetWorkspace(c->blas, c->blas_workspace, AMPI_CUDA_BLAS_BYTES);
    if (e == CUBLAS_STATUS_SUCCESS) return AMP_OK;
    return ampi_fail(c->exec.logger, AMP_ERR_DEVICE, "amp_cuda: cuBLAS does not start: status %d", (int)e);
}
AMPI_FN void ampi_cuda_close_blas(amp_cuda* c) {
    if (c->blas) cublasDestroy(c->blas);
    if (c->blas_workspace) cudaFree(c->blas_workspace);
}
#else
AMPI_FN amp_result ampi_cuda_open_blas(amp_cuda* c) {
    if (c->desc.gemm != AMP_CUDA_GEMM_CUBLAS) return AMP_OK;
    return ampi_fail(c->exec.logger, AMP_ERR_UNSUPPORTED, "amp_cuda: built without cuBLAS (AMP_NO_CUBLAS)");
}
AMPI_FN void ampi_cuda_close_blas(amp_cuda* c) { (void)c; }
#endif

/* Stream, events, cuBLAS. A stream of our own waits for the default stream and the other way round, so that
   plain cudaMemcpy calls of the program stay in order with it. */
AMPI_FN amp_result ampi_cuda_open(amp_cuda* c) {
    cudaError_t e = cudaSuccess;
    cudaStream_t own;
    int i;
    if (!c->desc.stream) {
        e = cudaStreamCreate(&own);
        if (e == cudaSuccess) c->exec.stream = own;
        c->owns_stream = e == cudaSuccess;
    }
    for (i = 0; i < AMPI_CUDA_SLOTS && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&c->slots[i].done, cudaEventDisableTiming);
    if (e != cudaSuccess) return ampi_cuda_check(&c->exec, "amp_cuda_create", e);
    return ampi_cuda_open_blas(c);
}

AMP_DEF void amp_cuda_destroy(amp_cuda* c) {
    amp_allocator allocator;
    int i;
    if (!c) return;
    cudaStreamSynchronize(ampi_cuda_stream(&c->exec));
    for (i = 0; i < c->record_count; i++) if (c->records[i].graph) cudaGraphExecDestroy(c->records[i].graph);
    for (i = 0; i < AMPI_CUDA_SLOTS; i++) {
        if (c->slots[i].data) cudaFreeHost(c->slots[i].data);
        if (c->slots[i].done) cudaEventDestroy(c->slots[i].done);
    }
    ampi_cuda_close_blas(c);
    if (c->owns_stream) cudaStreamDestroy(ampi_cuda_stream(&c->exec));
    cudaGetLastError();
    allocator = c->allocator;
    ampi_free(&allocator, c);
}

AMPI_FN amp_result ampi_cuda_create(amp_cuda** out, const amp_cuda_desc* desc, const amp_logger* logger,
                                    const amp_allocator* a) {
    amp_cuda* c;
    amp_result r;
    *out = NULL;
    if (desc && ((unsigned)desc->gemm > AMP_CUDA_GEMM_CUBLAS || (desc->graph != 0 && desc->graph != 1)))
        return ampi_fail(logger, AMP_ERR_DESC, "amp_cuda_create: gemm %d must be 0..2 and graph %d 0 or 1",
                         (int)desc->gemm, desc->graph);
    if ((r = ampi_cuda_check_device(logger)) != AMP_OK) return r;
    c = (amp_cuda*)ampi_alloc(a, sizeof *c);
    if (!c) return ampi_fail(logger, AMP_ERR_MEMORY, "amp_cuda_create: out of memory");
    memset(c, 0, sizeof *c);
    if (desc) c->desc = *desc;
    if (a) c->allocator = *a;
    if (logger) c->logger = *logger;
    c->desc.logger = c->exec.logger = &c->logger;
    c->exec.stream = c->desc.stream;
    c->exec.context = c;
    if ((r = ampi_cuda_open(c)) != AMP_OK) { amp_cuda_destroy(c); return r; }
    *out = c;
    return AMP_OK;
}

AMP_DEF amp_result amp_cuda_create(amp_cuda** out, const amp_cuda_desc* desc) {
    const amp_logger* logger = desc ? desc->logger : NULL;
    if (!out) return ampi_fail(logger, AMP_ERR_ARGUMENT, "amp_cuda_create: out is NULL");
    return ampi_cuda_create(out, desc, logger, NULL);
}

/* Who multiplies for this context; none means own kernels. */
AMPI_FN amp_cuda_gemm_engine ampi_cuda_engine(const amp_cuda* c) { return c ? c->desc.gemm : AMP_CUDA_GEMM_OWN; }
#if !defined(AMP_NO_CUBLAS)
AMPI_FN cublasHandle_t ampi_cuda_blas(amp_cuda* c) { return c ? c->blas : NULL; }
#endif

AMP_DEF amp_exec amp_cuda_exec(amp_cuda* c) {
    amp_exec none;
    memset(&none, 0, sizeof none);
    return c ? c->exec : none;
}

/* The one way by which every kernel starts. */
template <typename... P, typename... A>
static amp_result ampi_cuda_launch(const amp_exec* exec, const char* place, void (*kernel)(P...), dim3 grid,
                                   dim3 block, size_t shared, A... args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = ampi_cuda_stream(exec);
    return ampi_cuda_check(exec, place, cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

/* --- host: what every operator needs -------------------------------------------------------- */

/* Threads in a block, unless a kernel says otherwise, and elements that one thread holds at a time. */
enum { AMPI_CUDA_BLOCK = 256, AMPI_CUDA_EIGHT = 8, AMPI_CUDA_MAX_BLOCKS = 4096 };

/* Blocks for `work` items of which a block takes `per_block` at a time; kernels loop over what is left. */
AMPI_FN dim3 ampi_cuda_grid(size_t work, size_t per_block) {
    size_t blocks = work / per_block + (work % per_block != 0);
    return dim3((unsigned)(blocks < AMPI_CUDA_MAX_BLOCKS ? blocks : (size_t)AMPI_CUDA_MAX_BLOCKS));
}

/* Memory that a kernel cannot reach is refused; in a model the pointers are the model's own. */
AMPI_FN amp_result ampi_cuda_check_pointer(const amp_exec* exec, const char* op, const char* name,
                                           const void* p) {
    cudaPointerAttributes a;
    amp_result r;
    if (!p || ampi_cuda_context(exec)) return AMP_OK;
    r = ampi_cuda_check(exec, op, cudaPointerGetAttributes(&a, p));
    if (r != AMP_OK) return r;
    if (a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged) return AMP_OK;
    if (a.type == cudaMemoryTypeHost && a.devicePointer) return AMP_OK;      /* pinned and mapped */
    return ampi_fail(ampi_exec_logger(exec), AMP_ERR_ARGUMENT, "%s: %s is host memory", op, name);
}

/* ampi_check_operands, and that all is memory of the device. */
AMPI_FN amp_result ampi_cuda_check_operands(const amp_exec* exec, const char* op, size_t n,
                                            const ampi_argument* list, size_t count) {
    amp_result r = ampi_check_operands(exec, op, n, list, count);
    for (size_t i = 0; r == AMP_OK && n > 0 && i < count; i++)
        r = ampi_cuda_check_pointer(exec, op, list[i].name, list[i].data);
    return r;
}
#define AMPI_CUDA_CHECK(exec, op, n, list) \
    ampi_cuda_check_operands(exec, op, n, list, sizeof(list) / sizeof((list)[0]))

/* The workspace if it holds that many bytes from the next multiple of 16 on, else NULL. */
AMPI_FN void* ampi_cuda_scratch(const amp_exec* exec, size_t bytes) {
    uintptr_t start = exec ? (uintptr_t)exec->workspace : 0;
    size_t skip = (size_t)(0u - start) & 15u;
    if (!start || exec->workspace_size < skip || exec->workspace_size - skip < bytes) return NULL;
    return (void*)(start + skip);
}

/* --- device: instructions ------------------------------------------------------------------ */

#if !defined(AMP_CUDA_EMU)

/* Four 8x8 matrices of 16-bit elements from shared memory; lane 8i+r gives the address of row r of matrix i (16
   bytes, aligned). Lane l receives elements 2*(l%4), 2*(l%4)+1 of row l/4; `trans`: of column l/4. */
AMPI_D void ampi_ptx_ldmatrix_x4(uint32_t (&r)[4], const void* p) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
AMPI_D void ampi_ptx_ldmatrix_x2(uint32_t (&r)[2], const void* p) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
AMPI_D void ampi_ptx_ldmatrix_x4_trans(uint32_t (&r)[4], const void* p) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
AMPI_D void ampi_ptx_ldmatrix_x2_trans(uint32_t (&r)[2], const void* p) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}

/* d += a * b on the Tensor Cores: a 16x16, b 16x8, d 16x8 in FP32. k8: a 16x8, b 8x8. */
AMPI_D void ampi_ptx_mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
AMPI_D void ampi_ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
AMPI_D void ampi_ptx_mma_f16_k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}

/* Asynchronous copies to shared memory; only the first `bytes` are read, the rest becomes zero. */
AMPI_D void ampi_ptx_cp_async16(void* shared, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 : : "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes) : "memory");
#endif
}
AMPI_D void ampi_ptx_cp_async8(void* shared, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 : : "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes) : "memory");
#endif
}
AMPI_D void ampi_ptx_cp_async4(void* shared, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 : : "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes) : "memory");
#endif
}
AMPI_D void ampi_ptx_cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}
/* Waits until at most N of the newest groups are still under way. */
template <int N>
AMPI_D void ampi_ptx_cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
#endif
}

AMPI_D float ampi_ptx_f32_from_f16(uint16_t h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
/* NaN gives 0x7fff. */
AMPI_D uint16_t ampi_ptx_f16_from_f32(float f) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

#endif

/* --- device: one element of any type ------------------------------------------------------- */

/* Bit for bit what the CPU does: a NaN keeps the upper bits of its payload and is made quiet. */
AMPI_D float ampi_d_widen_half(uint16_t h) {
    return (h & 0x7fffu) > 0x7c00u ? ampi_float(ampi_half_widen(h)) : ampi_ptx_f32_from_f16(h);
}
AMPI_D uint16_t ampi_d_round_half(float f) {
    uint32_t u = ampi_bits(f);
    return (u & 0x7fffffffu) > 0x7f800000u ? ampi_half_bits(u) : ampi_ptx_f16_from_f32(f);
}

/* Element i of x, widened. The branches are the same for all threads of a kernel. */
AMPI_D float ampi_d_load(const void* x, amp_dtype t, size_t i) {
    if (t == AMP_F16) return ampi_d_widen_half(((const uint16_t*)x)[i]);
    if (t == AMP_BF16) return ampi_float(ampi_bf16_widen(((const uint16_t*)x)[i]));
    return ((const float*)x)[i];
}
/* Rounds v to the type of y and writes element i. */
AMPI_D void ampi_d_store(void* y, amp_dtype t, size_t i, float v) {
    if (t == AMP_F16) ((uint16_t*)y)[i] = ampi_d_round_half(v);
    else if (t == AMP_BF16) ((uint16_t*)y)[i] = ampi_bf16_bits(ampi_bits(v));
    else ((float*)y)[i] = v;
}

/* --- device: eight elements of any type ------------------------------------------------------ */

/* Eight elements as they lie in memory; 16-bit types leave the upper half unused. */
typedef struct ampi_eight { uint32_t w[8]; } ampi_eight;

AMPI_D void ampi_d_set4(uint32_t* w, uint4 q) { w[0] = q.x; w[1] = q.y; w[2] = q.z; w[3] = q.w; }

/* Elements [i, i+8) of x, as far as they are below n; the others are 0. A load of 16 bytes at a time where the
   address allows: neighbouring threads read neighbouring eights, so all of a warp go the same way. Nothing is
   converted yet, so that several loads can be under way. */
AMPI_D void ampi_d_fetch8(ampi_eight& r, const void* x, amp_dtype t, size_t i, size_t n) {
    const unsigned char* p = (const unsigned char*)x + i * (t == AMP_F32 ? 4u : 2u);
    for (int j = 0; j < 8; j++) r.w[j] = 0;
    if (i + 8 <= n && ((uintptr_t)p & 15u) == 0) {
        ampi_d_set4(r.w, *(const uint4*)p);
        if (t == AMP_F32) ampi_d_set4(r.w + 4, *(const uint4*)(p + 16));
    } else if (t == AMP_F32) {
        for (int j = 0; j < 8; j++)
            if (i + (size_t)j < n) r.w[j] = ((const uint32_t*)p)[j];
    } else {
        for (int j = 0; j < 8; j++)
            if (i + (size_t)j < n) r.w[j / 2] |= (uint32_t)((const uint16_t*)p)[j] << (16 * (j & 1));
    }
}
/* The inverse: writes those of the eight that lie below n. */
AMPI_D void ampi_d_put8(void* y, amp_dtype t, size_t i, size_t n, const ampi_eight& r) {
    unsigned char* p = (unsigned char*)y + i * (t == AMP_F32 ? 4u : 2u);
    if (i + 8 <= n && ((uintptr_t)p & 15u) == 0) {
        *(uint4*)p = make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]);
        if (t == AMP_F32) *(uint4*)(p + 16) = make_uint4(r.w[4], r.w[5], r.w[6], r.w[7]);
    } else if (t == AMP_F32) {
        for (int j = 0; j < 8; j++)
            if (i + (size_t)j < n) ((uint32_t*)p)[j] = r.w[j];
    } else {
        for (int j = 0; j < 8; j++)
            if (i + (size_t)j < n) ((uint16_t*)p)[j] = (uint16_t)(r.w[j / 2] >> (16 * (j & 1)));
    }
}

/* To floats, and rounded back to a type. */
AMPI_D void ampi_d_widen8(float (&v)[8], const ampi_eight& r, amp_dtype t) {
    if (t == AMP_F32)
        for (int j = 0; j < 8; j++) v[j] = ampi_float(r.w[j]);
    else if (t == AMP_F16)
        for (int j = 0; j < 8; j++) v[j] = ampi_d_widen_half((uint16_t)(r.w[j / 2] >> (16 * (j & 1))));
    else
        for (int j = 0; j < 8; j++)
            v[j] = ampi_float(ampi_bf16_widen((uint16_t)(r.w[j / 2] >> (16 * (j & 1)))));
}
AMPI_D void ampi_d_round8(ampi_eight& r, const float (&v)[8], amp_dtype t) {
    if (t == AMP_F32)
        for (int j = 0; j < 8; j++) r.w[j] = ampi_bits(v[j]);
    else if (t == AMP_F16)
        for (int j = 0; j < 4; j++)
            r.w[j] = ampi_d_round_half(v[2 * j]) | (uint32_t)ampi_d_round_half(v[2 * j + 1]) << 16;
    else
        for (int j = 0; j < 4; j++)
            r.w[j] = ampi_bf16_bits(ampi_bits(v[2 * j]))
                     | (uint32_t)ampi_bf16_bits(ampi_bits(v[2 * j + 1])) << 16;
}

/* Both steps at once, for data of which one load at a time is enough. */
AMPI_D void ampi_d_load8(float (&v)[8], const void* x, amp_dtype t, size_t i, size_t n) {
    ampi_eight r;
    ampi_d_fetch8(r, x, t, i, n);
    ampi_d_widen8(v, r, t);
}
AMPI_D void ampi_d_store8(void* y, amp_dtype t, size_t i, size_t n, const float (&v)[8]) {
    ampi_eight r;
    ampi_d_round8(r, v, t);
    ampi_d_put8(y, t, i, n, r);
}

/* --- device: sums and maxima in a fixed order ------------------------------------------------ */

/* Eight floats by a tree. Longer sums go on in double, one addition for eight elements. */
AMPI_D float ampi_d_sum8(const float (&v)[8]) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* Over the 32 lanes of a warp, all of which take part and receive the result. In each step both partners add
   the same two numbers, so all lanes hold the same bits. */
template <int N>
AMPI_D void ampi_d_warp_sum(double (&v)[N]) {
    for (int step = 16; step > 0; step /= 2)
        for (int k = 0; k < N; k++) v[k] += __shfl_xor_sync(0xffffffffu, v[k], step);
}
/* The larger; NaNs are passed over. */
AMPI_D float ampi_d_larger(float a, float b) { return b > a ? b : a; }
AMPI_D float ampi_d_warp_max(float v) {
    for (int step = 16; step > 0; step /= 2) v = ampi_d_larger(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

/* Over a group of T threads: a warp, or a whole block of T threads, all of which take part and receive the
   result. `shared` holds N doubles for each warp of the block; it may be used again at once. */
template <int T, int N>
AMPI_D void ampi_d_group_sum(double (&v)[N], double* shared) {
    ampi_d_warp_sum(v);
    if (T == 32) return;
    __syncthreads();      /* the last sum has been read by all */
    if (threadIdx.x % 32 == 0)
        for (int k = 0; k < N; k++) shared[threadIdx.x / 32 * N + (unsigned)k] = v[k];
    __syncthreads();
    for (int k = 0; k < N; k++) {
        v[k] = shared[k];
        for (int warp = 1; warp < T / 32; warp++) v[k] += shared[warp * N + k];
    }
}
template <int T>
AMPI_D float ampi_d_group_max(float v, double* shared) {
    v = ampi_d_warp_max(v);
    if (T == 32) return v;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = (double)v;
    __syncthreads();
    for (int warp = 0; warp < T / 32; warp++) v = ampi_d_larger(v, (float)shared[warp]);
    return v;
}

/* ======================================================================================== */
/* >>impl-half                                                                                */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>impl-gemm                                                                                */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>impl-conv                                                                                */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>impl-nn                                                                                  */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>impl-scaler                                                                              */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>impl-optim                                                                               */
/* ======================================================================================== */

/* ======================================================================================== */
/* >>impl-backend                                                                             */
/* ======================================================================================== */

/* --- memory --------------------------------------------------------------------------------- */

AMPI_FN void* ampi_cuda_alloc(size_t bytes, const amp_allocator* a) {
    void* p = NULL;
    (void)a;
    if (cudaMalloc(&p, bytes) == cudaSuccess) return p;
    cudaGetLastError();
    return NULL;
}
AMPI_FN void ampi_cuda_free(void* p, const amp_allocator* a) {
    (void)a;
    cudaFree(p);
}
AMPI_FN amp_result ampi_cuda_zero(void* p, size_t bytes, const amp_exec* exec) {
    return ampi_cuda_check(exec, "amp_cuda: zero", cudaMemsetAsync(p, 0, bytes, ampi_cuda_stream(exec)));
}
AMPI_FN amp_result ampi_cuda_copy(void* dst, const void* src, size_t bytes, const amp_exec* exec) {
    if (bytes == 0) return AMP_OK;
    return ampi_cuda_check(exec, "amp_cuda: copy", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice,
                                                                   ampi_cuda_stream(exec)));
}

/* The next slot of pinned memory, at least `bytes` large, when the copy that used it last is done. With eight
   slots the host runs some steps ahead before it has to wait here. */
AMPI_FN amp_result ampi_cuda_take_slot(const amp_exec* exec, size_t bytes, ampi_cuda_slot** out) {
    amp_cuda* c = ampi_cuda_context(exec);
    ampi_cuda_slot* slot = &c->slots[c->next_slot];
    cudaError_t e = cudaEventQuery(slot->done);
    if (e == cudaErrorNotReady) e = cudaEventSynchronize(slot->done);
    c->next_slot = (c->next_slot + 1) % AMPI_CUDA_SLOTS;
    *out = slot;
    if (e == cudaSuccess && slot->bytes < bytes) {
        if (slot->data) cudaFreeHost(slot->data);
        slot->data = NULL;
        slot->bytes = 0;
        e = cudaMallocHost(&slot->data, bytes);
        if (e == cudaSuccess) slot->bytes = bytes;
    }
    return ampi_cuda_check(exec, "amp_cuda: staging memory", e);
}
AMPI_FN amp_result ampi_cuda_send_slot(const amp_exec* exec, const ampi_cuda_slot* slot, void* dst, size_t bytes) {
    cudaStream_t stream = ampi_cuda_stream(exec);
    cudaError_t e = cudaMemcpyAsync(dst, slot->data, bytes, cudaMemcpyHostToDevice, stream);
    if (e == cudaSuccess) e = cudaEventRecord(slot->done, stream);
    return ampi_cuda_check(exec, "amp_cuda: copy to the device", e);
}

/* Types are converted on the host, on the way into pinned memory: the same bits, and the bus carries the
   narrower one. */
AMPI_FN amp_result ampi_cuda_upload(void* dst, amp_dtype dst_dtype, const void* host, amp_dtype host_dtype,
                                    size_t n, const amp_exec* exec) {
    size_t bytes = n * amp_dtype_size(dst_dtype);
    ampi_cuda_slot* slot;
    amp_result r;
    if (n == 0) return AMP_OK;
    r = ampi_cuda_take_slot(exec, bytes, &slot);
    if (r == AMP_OK) r = ampi_cpu_convert(slot->data, dst_dtype, host, host_dtype, n, exec);
    return r == AMP_OK ? ampi_cuda_send_slot(exec, slot, dst, bytes) : r;
}
AMPI_FN amp_result ampi_cuda_copy_in(void* dst, const void* host, size_t bytes, const amp_exec* exec) {
    ampi_cuda_slot* slot;
    amp_result r;
    if (bytes == 0) return AMP_OK;
    r = ampi_cuda_take_slot(exec, bytes, &slot);
    if (r != AMP_OK) return r;
    memcpy(slot->data, host, bytes);
    return ampi_cuda_send_slot(exec, slot, dst, bytes);
}

/* These two wait. */
AMPI_FN amp_result ampi_cuda_copy_out(void* host, const void* src, size_t bytes, const amp_exec* exec) {
    amp_result r;
    if (bytes == 0) return AMP_OK;
    r = ampi_cuda_check(exec, "amp_cuda: copy to the host",
                        cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, ampi_cuda_stream(exec)));
    return r == AMP_OK ? ampi_cuda_wait(exec, "amp_cuda: copy to the host") : r;
}
AMPI_FN amp_result ampi_cuda_download(void* host, amp_dtype host_dtype, const void* src, amp_dtype src_dtype,
                                      size_t n, const amp_exec* exec) {
    size_t bytes = n * amp_dtype_size(src_dtype);
    ampi_cuda_slot* slot;
    amp_result r;
    if (ampi_dtype(host_dtype) == ampi_dtype(src_dtype)) return ampi_cuda_copy_out(host, src, bytes, exec);
    r = ampi_cuda_take_slot(exec, bytes, &slot);
    if (r == AMP_OK) r = ampi_cuda_copy_out(slot->data, src, bytes, exec);
    return r == AMP_OK ? ampi_cpu_convert(host, host_dtype, slot->data, src_dtype, n, exec) : r;
}

/* --- a model opens and closes the context ------------------------------------------------- */

AMPI_FN amp_result ampi_cuda_backend_open(amp_exec* exec, const void* desc, const amp_allocator* a) {
    const amp_logger* logger = exec->logger;
    amp_cuda* c;
    amp_result r = ampi_cuda_create(&c, (const amp_cuda_desc*)desc, logger, a);
    if (r != AMP_OK) return r;
    *exec = c->exec;
    exec->logger = logger;
    return AMP_OK;
}
AMPI_FN void ampi_cuda_backend_close(amp_exec* exec, const amp_allocator* a) {
    (void)a;
    amp_cuda_destroy(ampi_cuda_context(exec));
    exec->context = exec->stream = NULL;
}

#endif /* AMP_IMPLEMENTATION */
