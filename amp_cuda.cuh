/* amp_cuda.cuh - amp.h on NVIDIA GPUs, from one more header.               MIT licence, as amp.h.

   In ONE .cu file of your program:               Everywhere else, C files too (twice does no harm):
       #define AMP_IMPLEMENTATION                     #include "amp_cuda.cuh"
       #include "amp_cuda.cuh"
   That file holds amp.h's implementation too, so no other file defines AMP_IMPLEMENTATION.
   Build: nvcc -O2 -arch=native ... -lcublas (without cuBLAS: -DAMP_NO_CUBLAS). CUDA 11.8 or newer,
   compute capability 7.5 or newer. For H100 and H200: -gencode arch=compute_90a,code=sm_90a instead
   of -arch (CUDA 12 or newer); their fastest matrix product exists in that code alone.

   [TOC]   jump: search for ">>name"
     guide        what there is
     base         the context, errors
     half         conversions
     ops          operators on raw device pointers
     scaler       the loss scale on the device
     optim        optimizers on the device
     backend      the same model on a GPU
     impl         the implementation: impl-base, impl-device, impl-half, impl-gemm, impl-hopper,
                  impl-launch, impl-linear, impl-conv, impl-pool, impl-elementwise, impl-rows,
                  impl-attention, impl-loss, impl-scaler, impl-optim, impl-backend */

/* >>guide    Read amp.h's guide first; this says what differs. */
/*
   Two ways in.
   1. A model of amp.h: set desc.backend = amp_cuda_backend() and train as on the CPU. Nothing else
   changes.
   2. A CUDA program with its own training loop: single calls on its own device memory and stream.

   Names.     amp_cuda_<thing>_<verb> does on device pointers what amp_<thing>_<verb> does on host
   pointers; operators are entries of amp_cuda_backend(), see >>ops.
   Streams.   All work goes to exec->stream and is asynchronous; exec == NULL is the default stream.
   Nothing waits for the GPU unless it says so. From compute capability 9.0 on kernels take their
   places while the one before them ends, and wait there until it is done, yours too: programmatic
   dependent launch. A kernel of yours that is launched so must wait too
   (cudaGridDependencySynchronize): amp's wait for it, not for those before it.
   Numbers.   As in amp.h: operands in 16 bits, FP32 products and sums, one rounding. Conversions,
   activations, dropout and the optimizers give the CPU's bits, but that a NaN which arithmetic
   makes is 0x7fffffff here; sums run in another order than on the CPU, but in one fixed order: the
   same call gives the same bits on every run. No kernel uses floating-point atomics.
   Errors.    As in amp.h; a failure of the GPU is AMP_ERR_DEVICE, or AMP_ERR_MEMORY when it has no
   memory left, or AMP_ERR_UNSUPPORTED without a fitting device. What a kernel does wrong shows at a
   later call. Where the GPU refuses one of several launches of a call, those before it stay done.
   Pointers are asked what memory they are: host memory, or that of another device without peer
   access, is AMP_ERR_ARGUMENT before anything is launched, as exec->workspace too. They are aligned
   as their element type is.
   Flags.     Do not compile with --use_fast_math: it keeps conversions and checks right, but not
   the bits. */

#ifndef AMP_BACKEND_API
  #define AMP_BACKEND_API
#endif
#include "amp.h"      /* with its implementation, where AMP_IMPLEMENTATION is defined */

#ifndef AMP_CUDA_CUH_INCLUDED
#define AMP_CUDA_CUH_INCLUDED

#ifdef __cplusplus
extern "C" {
#endif

/* >>base     The context. */

/* Who multiplies matrices. */
typedef AMPI_ENUM(amp_cuda_gemm_engine) {
    AMP_CUDA_GEMM_AUTO   = 0,   /* own kernels where they are known to be as fast, else cuBLAS if it
                                   is there */
    AMP_CUDA_GEMM_OWN    = 1,   /* own Tensor Core kernels */
    AMP_CUDA_GEMM_CUBLAS = 2    /* cuBLAS where it offers the types and strides, else own kernels */
} amp_cuda_gemm_engine;

typedef struct amp_cuda_desc {
    void* stream;                  /* cudaStream_t to work on; NULL = one of its own */
    amp_cuda_gemm_engine gemm;     /* 0 = automatic */
    int   graph;                   /* 1 = a model's training step is captured once and replayed as a
                                      CUDA graph */
    const amp_logger* logger;      /* NULL = silent */
} amp_cuda_desc;

/* What calls on one stream share: the stream, the choice of GEMM, cuBLAS's handle, pinned buffers.
   A model makes its own; raw calls work without one (own kernels, stream of the exec). Bound to the
   device that is current when it is made, which must be current in its calls too. */
typedef struct amp_cuda amp_cuda;
/* AMP_ERR_UNSUPPORTED: no device, or one below compute capability 7.5. AMP_ERR_MEMORY,
   AMP_ERR_DEVICE. */
AMP_DEF amp_result amp_cuda_create(amp_cuda** out, const amp_cuda_desc* desc);
/* Waits for the stream's work, then frees everything. NULL is fine. */
AMP_DEF void amp_cuda_destroy(amp_cuda* c);
/* An exec for raw calls on the context's stream, with its logger; a workspace (device memory) is
   yours to set. With another stream in it, own kernels multiply. */
AMP_DEF amp_exec amp_cuda_exec(amp_cuda* c);
/* Waits for all work of the exec's stream; reports what kernels did wrong meanwhile. */
AMP_DEF amp_result amp_cuda_synchronize(const amp_exec* exec);

/* >>half     Conversions. */

/* F32, F16 and BF16 in every direction; AMP_ERR_DTYPE for F64. Bit for bit what amp_convert gives.
   dst == src is allowed where both types have one size. */
AMP_DEF amp_result amp_cuda_convert(amp_ref dst, amp_ref src, size_t n, const amp_exec* exec);
/* desc->saturated lies in device memory, desc->logger is not used (exec's is). desc == NULL is
   amp_cuda_convert. */
AMP_DEF amp_result amp_cuda_convert_with(amp_ref dst, amp_ref src, size_t n,
    const amp_convert_desc* desc, const amp_exec* exec);

/* >>ops      Operators on raw device pointers: the entries of the backend's table. */

/* Each is called as the function of its name in amp.h:

       const amp_backend* gpu = amp_cuda_backend();
       amp_exec exec = amp_cuda_exec(context);     // or NULL, or an exec of your own
       gpu->linear_forward(amp_bf16(x), amp_bf16(w), amp_f32(b), amp_bf16(y), n, in, out, &exec);

   gpu->dropout_forward alone has two arguments more, NULL and 0. A sentence of the logger begins
   with amp_cuda_ and the entry's name.

   Products (gemm, linear_*, conv2d_*). Two F16 or two BF16 operands are multiplied on the Tensor
   Cores (BF16 from compute capability 8.0 on), with FP32 sums in one fixed order; any other mix of
   types, in the order of amp_gemm and with its bits, by plain FP32 kernels. Fastest where pointers
   and leading dimensions are multiples of 16 bytes. A long k over a small C is cut into pieces that
   are added in ascending order, if the workspace holds them; the kernel for H100 and H200 needs
   none. The bits depend on sizes, types, alignment, workspace, the device and the code compiled for
   it, on nothing else. With cuBLAS (amp_cuda_desc.gemm) the order is its own, and a NaN may have
   other bits than 0x7fc00000. AMP_ERR_UNSUPPORTED where a side of a product is 2^31 or more.
   Convolution: im2col matrices are formed on their way into shared memory; dx takes a launch for
   each phase of its pixels, up to stride_h * stride_w. Few channels of two F16 or two BF16
   operands are summed directly, on the FP32 cores: one group, a kernel of more than one pixel,
   up to 16 outputs and 512 weights each; dx with a stride of 1, dw with the workspace. That
   order depends on the shape alone. AMP_ERR_UNSUPPORTED: a padded side of 2^30 or a plane of 2^31
   pixels.
   Workspace: device memory, exec->workspace. gpu->gemm_workspace(m, n, k) bytes are those with
   which a product of this size runs at full speed on the current device: 0 if it needs none, if the
   size overflows, or without a device. A dense layer wants the largest of (n, out, in), (n, in,
   out) and (out, in, n), a convolution gpu->conv2d_workspace(&shape). Many rows of a layer norm's
   dgamma and dbeta are formed much faster with gpu->layer_norm_workspace(rows, d) bytes; a mean
   loss over much data by the whole GPU with AMP_CUDA_LOSS_WORKSPACE, else by a single block. Or
   exec->grows with backend = amp_cuda_backend(); enlarging it waits for the GPU.
   Order of sums. Maxima, activations, dropout, add and concat have the CPU's bits; averages,
   softmax and the sums of norms have one fixed order of their own.
   Attention. Tensor Cores take heads of up to 128 elements, a multiple of 8, from compute
   capability 8.0 on. There q, k, v and dy have one type of 16 bits; each begins at a multiple of 16
   bytes and has a leading dimension that is a multiple of 8. Gradients need
   gpu->attention_workspace(&shape) bytes, too. All else goes to plain kernels, which take a hundred
   times as long; heads of at most 256 elements, else AMP_ERR_UNSUPPORTED. Either has one fixed
   order. lengths lie in device memory and are not looked at: one beyond the keys counts as all.
   Embeddings and rope have the CPU's bits; a token outside of the vocabulary makes its row NaN, and
   has no gradient.
   Losses. labels, loss and loss_scale lie in device memory. A label outside 0..K-1 cannot be
   reported without waiting for the GPU: it makes the loss and its row of the gradient NaN, so that
   a scaler skips the step. */
#define AMP_CUDA_LOSS_WORKSPACE 8192

/* What happens to a sum on its way into C. */
typedef AMPI_ENUM(amp_cuda_epilogue) {
    AMP_CUDA_EPILOGUE_NONE      = 0,
    AMP_CUDA_EPILOGUE_RELU      = 1,
    AMP_CUDA_EPILOGUE_GELU      = 2,
    AMP_CUDA_EPILOGUE_GELU_TANH = 3
} amp_cuda_epilogue;

/* The whole of a product: C = f(alpha * op(A) * op(B) + beta * C + bias), rounded once. */
typedef struct amp_cuda_gemm_desc {
    const void* bias; amp_dtype bias_dtype;        /* NULL = none; n numbers, one per column of
                                                      C, */
    int    bias_per_row;                           /* 1 = m numbers, one per row */
    size_t bias_stride;                            /* elements from one of a batch to the next */
    amp_cuda_epilogue epilogue;                    /* f; the activations as in
                                                      amp_activation_forward */
} amp_cuda_gemm_desc;
/* gpu->gemm with this. desc == NULL is gpu->gemm. */
AMP_DEF amp_result amp_cuda_gemm_with(const amp_gemm_shape* s, float alpha, amp_ref a, amp_ref b,
    float beta, amp_ref c, const amp_cuda_gemm_desc* desc, const amp_exec* exec);

/* >>scaler   The loss scale on the device: no step waits for the host. */

/* A loop of your own, with the kernels of your own, gets a loss scaler by these lines (once:
   create, and the list of the gradients):

       const float* scale = amp_cuda_scaler_loss_scale(s);  // device memory, always the same
       loss_backward<<<...>>>(..., scale);                         // dlogits *= *scale
       ... backward ...
       amp_cuda_scaler_check_loss(s, loss, 1, &exec);              // if you like: see there
       amp_cuda_scaler_check(s, grads, &exec);
       adamw<<<...>>>(..., amp_cuda_scaler_device_state(s));       // if (state->found_inf) return;
                                                                   // g = grad[i] * state->inverse;
       amp_cuda_scaler_update(s, &exec);

   None of these calls waits, and all may be captured in a CUDA graph, whole windows at a time: what
   moves lies on the device, and the launches are the same in each step. The order of calls is
   checked on the host, so a replay is what its capture was. */

/* A list of any number of tensors of any types, cut into chunks; the table lies on the device, so
   that each pass over all tensors is one launch. Used on one stream at a time. Must outlive graphs
   that use it. */
typedef struct amp_cuda_tensors amp_cuda_tensors;
/* Names are copied; the tensors' memory stays the caller's. Waits. AMP_ERR_ARGUMENT, AMP_ERR_DTYPE
   as amp_scaler_check; AMP_ERR_MEMORY; AMP_ERR_DEVICE. */
AMP_DEF amp_result amp_cuda_tensors_create(amp_cuda_tensors** out, const amp_tensor* tensors,
    int count, const amp_exec* exec);
/* Waits for the device. NULL is fine. */
AMP_DEF void amp_cuda_tensors_destroy(amp_cuda_tensors* list);

/* amp_scaler with its state on the device. */
typedef struct amp_cuda_scaler amp_cuda_scaler;
/* desc as for amp_scaler_init; on_limit is called by amp_cuda_scaler_read. Waits. */
AMP_DEF amp_result amp_cuda_scaler_create(amp_cuda_scaler** out, const amp_scaler_desc* desc,
    const amp_exec* exec);
/* Waits for the device. NULL is fine. */
AMP_DEF void amp_cuda_scaler_destroy(amp_cuda_scaler* s);

/* The factor of the loss, in device memory. To be asked for at least once before anything is
   checked, and again where gradients checked in this window get new values (micro-batches): as
   amp_scaler_scale_loss. */
AMP_DEF const float* amp_cuda_scaler_loss_scale(amp_cuda_scaler* s);
/* Device memory. found_inf (1 = skip the step) holds what the checks so far have seen, until
   update. */
AMP_DEF const amp_scaler_state* amp_cuda_scaler_device_state(const amp_cuda_scaler* s);

/* These do what amp_scaler_<verb> does, with the same errors of order at once; what they find stays
   on the device (amp_cuda_scaler_read). A norm may differ from the CPU's in its last digits: sums
   run in another order, the same one on every GPU. Unscaled gradients have the CPU's bits. */
AMP_DEF amp_result amp_cuda_scaler_check(amp_cuda_scaler* s, const amp_cuda_tensors* grads,
    const amp_exec* exec);
/* Reads and writes each gradient once, where the scale is a power of two and no quotient
   underflows; reads it twice otherwise. After AMP_ERR_DEVICE a part of the gradients may be
   unscaled. */
AMP_DEF amp_result amp_cuda_scaler_unscale(amp_cuda_scaler* s, const amp_cuda_tensors* grads,
    const amp_exec* exec);
AMP_DEF amp_result amp_cuda_scaler_unscale_into(amp_cuda_scaler* s, const amp_cuda_tensors* dst,
    const amp_cuda_tensors* src, int accumulate, const amp_exec* exec);
AMP_DEF amp_result amp_cuda_scaler_report_overflow(amp_cuda_scaler* s, const amp_exec* exec);
/* What amp_scaler_scale_loss does with a loss that is inf or NaN: no step, and the scale stays.
   losses: `count` of them, unscaled, in device memory; AMP_ERR_ARGUMENT if they are not, or count
   is negative. A window needs another check or report besides. */
AMP_DEF amp_result amp_cuda_scaler_check_loss(amp_cuda_scaler* s, const float* losses, int count,
    const amp_exec* exec);
/* Limits that are reached are remembered for the next read. */
AMP_DEF amp_result amp_cuda_scaler_update(amp_cuda_scaler* s, const amp_exec* exec);

/* Waits, and fills in all of *host: settings, state (after update, scale_in_use is the next
   window's already), and what the window found (the last one, after update). AMP_ERR_OVERFLOW if
   since the last read amp_scaler_update would have returned it; *host is valid then too. From there
   amp_scaler_save can write it. */
AMP_DEF amp_result amp_cuda_scaler_read(amp_cuda_scaler* s, amp_scaler* host, const amp_exec* exec);
/* The state of *host to the device, between windows: after amp_scaler_load or amp_scaler_set_scale.
   AMP_ERR_STATE inside a window; AMP_ERR_ARGUMENT if host follows another rule. */
AMP_DEF amp_result amp_cuda_scaler_write(amp_cuda_scaler* s, const amp_scaler* host,
    const amp_exec* exec);

/* >>optim    Fused optimizers. */

/* amp_optimizer on the device: clip, unscale, update and the 16-bit copy in one pass over all
   parameters, which skips itself after an overflow. Learning rate and step counter live on the
   device too. Where the clip coefficient is the CPU's, so are all bits but those of NaNs; LAMB, if
   its norms round to the same ratio. */
typedef struct amp_cuda_optimizer amp_cuda_optimizer;
/* desc and params as for amp_optimizer_init, with device pointers; params must outlive the
   optimizer, and its pointers must stay. Waits. */
AMP_DEF amp_result amp_cuda_optimizer_create(amp_cuda_optimizer** out,
    const amp_optimizer_desc* desc, amp_param* params, int count, const amp_exec* exec);
/* Waits for the device. NULL is fine. */
AMP_DEF void amp_cuda_optimizer_destroy(amp_cuda_optimizer* o);

/* All gradients as a list, for the calls above: checking or unscaling it is known to the step that
   follows. */
AMP_DEF const amp_cuda_tensors* amp_cuda_optimizer_grads(const amp_cuda_optimizer* o);
/* As amp_optimizer_step. s may be NULL. Three launches (LAMB five), one less if the gradients were
   checked. */
AMP_DEF amp_result amp_cuda_optimizer_step(amp_cuda_optimizer* o, amp_cuda_scaler* s,
    const amp_exec* exec);
/* Sets every gradient to zero, in one launch. */
AMP_DEF amp_result amp_cuda_optimizer_zero_grad(amp_cuda_optimizer* o, const amp_exec* exec);

/* Waits. host, if not NULL, becomes what amp_optimizer_init would have made, with the state of now;
   info, if not NULL, tells what the last step did. */
AMP_DEF amp_result amp_cuda_optimizer_read(amp_cuda_optimizer* o, amp_optimizer* host,
    amp_optimizer_info* info, const amp_exec* exec);
/* The state to the device. AMP_ERR_ARGUMENT for a step or a rate that is negative or not finite, or
   a group that was frozen in more steps than there were. */
AMP_DEF amp_result amp_cuda_optimizer_write(amp_cuda_optimizer* o, const amp_optimizer_state* state,
    const amp_exec* exec);
AMP_DEF amp_result amp_cuda_optimizer_set_lr(amp_cuda_optimizer* o, float lr, const amp_exec* exec);

/* >>backend  The same model on a GPU. */

/* For amp_model_desc.backend; backend_desc is an amp_cuda_desc or NULL. The model works on the
   device that is current when it is created, which must be current in its calls too, and on one
   stream. Scaler, step counter, learning rate and random-number position live on the device:
   amp_train_step without info waits for nothing, with info once, at its end. Host batches are
   copied to pinned memory first, so that the caller's memory is free when the call returns; with
   amp_batch.on_device they must be ready in the order of the stream. With desc.graph the second
   step of each batch size is captured, the later ones are replayed: rate, loss scale and
   checkpoints may change between steps; desc.stream may not be the legacy default stream; an
   amp_comm hook must be fit for capture (NCCL's all-reduce is). In that second step no other thread
   may use the legacy default stream, unless desc.stream was created as non-blocking. A step before
   which another set of parameters was frozen (see amp_group) waits, and allocates; capturing begins
   anew. A step that ends with AMP_ERR_DEVICE may have been applied; amp_train_read tells. */
AMP_DEF const amp_backend* amp_cuda_backend(void);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* AMP_CUDA_CUH_INCLUDED */

/* >>impl     Stop here if you only want the interface. */
#if defined(AMP_IMPLEMENTATION) && !defined(AMPI_CUDA_IMPLEMENTATION_ONCE)
#define AMPI_CUDA_IMPLEMENTATION_ONCE

/* >>impl-base   What all rooms use on the host: errors, the context, memory and copies, launches,
   checks of pointers.
   Words. place: the beginning of a sentence, the call that failed. exec: whose stream and logger a
   call uses. reach: a kernel can read and write there. This room calls no other.
   Macros that use the variable `exec` of the function around them: AMPI_CUDA_CHECK,
   AMPI_CUDA_REFUSE_NULL. */
#include <cuda_runtime.h>
#if CUDART_VERSION >= 12000
  #include <cuda.h>     /* types alone: what they describe is asked of the driver at run time */
  #define AMPI_TENSOR_MAPS 1
#endif
#if !defined(AMP_NO_CUBLAS)
  #include <cublas_v2.h>
#endif

/* Defined in a compiler pass for sm_90a, the only one with the instructions of the Hopper
   kernel. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && defined(AMPI_TENSOR_MAPS)
  #define AMPI_HOPPER 1
#endif

/* tests/emu runs the kernels on the CPU: it brings its own cuda_runtime.h and the ampi_ptx_
   functions. */
#if defined(AMP_CUDA_EMU)
  #define AMPI_D static inline
  #define AMPI_ROLLED
  #define AMPI_D_RENEW(x) (void)0
  #define AMPI_D_UNROLL
  #define AMPI_D_UNROLL4
#elif defined(__CUDACC__)
  #define AMPI_D static __device__ __forceinline__
  #define AMPI_SHARED(type, name)                                     \
      extern __shared__ __align__(128) unsigned char ampi_shared[];   \
      type* name = reinterpret_cast<type*>(ampi_shared)
  #define AMPI_ROLLED _Pragma("unroll 1")      /* before a loop: its body stays once in the code */
  /* what follows from x is formed anew, no register kept */
  #define AMPI_D_RENEW(x) asm volatile("" : "+r"(x))
  #define AMPI_D_UNROLL _Pragma("unroll")        /* its arrays stay in registers */
  /* loads of four iterations are under way together */
  #define AMPI_D_UNROLL4 _Pragma("unroll 4")
#else
  #error "amp_cuda.cuh: AMP_IMPLEMENTATION belongs into a .cu file, compiled by nvcc"
#endif

/* --- errors --- */

/* The amp_result that stands for a CUDA error. */
AMPI_FN amp_result ampi_cuda_result(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return AMP_OK;
        case cudaErrorMemoryAllocation: return AMP_ERR_MEMORY;
        case cudaErrorNoDevice:
        case cudaErrorInsufficientDriver:
        case cudaErrorNoKernelImageForDevice:
            return AMP_ERR_UNSUPPORTED;
        default: return AMP_ERR_DEVICE;
    }
}

/* Turns a CUDA error into a result and a sentence: "amp_cuda_gemm: CUDA error 700, an illegal
   ...". */
AMPI_FN amp_result ampi_cuda_check(const amp_exec* exec, const char* place, cudaError_t e) {
    if (e == cudaSuccess) return AMP_OK;
    cudaGetLastError();      /* an error that does not stick is not reported twice */
    return ampi_fail(ampi_exec_logger(exec), ampi_cuda_result(e), "%s: CUDA error %d, %s", place,
        (int)e, cudaGetErrorString(e));
}

AMPI_FN cudaStream_t ampi_cuda_stream(const amp_exec* exec) {
    return exec ? (cudaStream_t)exec->stream : (cudaStream_t)0;
}

AMPI_FN amp_cuda* ampi_cuda_context(const amp_exec* exec) {
    return exec ? (amp_cuda*)exec->context : NULL;
}

/* Refuses an object or a result that a call cannot do without. */
#define AMPI_CUDA_REFUSE_NULL(condition, what) \
    do { if (condition) return ampi_cuda_missing(exec, place, what); } while (0)

AMPI_FN amp_result ampi_cuda_missing(const amp_exec* exec, const char* place, const char* what) {
    return ampi_fail(ampi_exec_logger(exec), AMP_ERR_ARGUMENT, "%s: %s is NULL", place, what);
}

/* A call by which the host waits for the stream, and hears of what kernels did wrong. */
AMPI_FN amp_result ampi_cuda_wait(const amp_exec* exec, const char* place) {
    return ampi_cuda_check(exec, place, cudaStreamSynchronize(ampi_cuda_stream(exec)));
}

AMP_DEF amp_result amp_cuda_synchronize(const amp_exec* exec) {
    return ampi_cuda_wait(exec, "amp_cuda_synchronize");
}

/* --- the context --- */

/* Pinned memory through which data travels; the host may use it again once `done` has passed. */
typedef struct ampi_cuda_buffer {
    void*       data;
    size_t      bytes;
    cudaEvent_t done;
} ampi_cuda_buffer;

/* A recorded step. graph is NULL while the key was only seen: a first run loads the kernels, which
   must not happen while a graph is captured. */
typedef struct ampi_cuda_record {
    uint64_t        key;
    cudaGraphExec_t graph;
} ampi_cuda_record;

enum { AMPI_CUDA_BUFFERS = 8, AMPI_CUDA_RECORDS = 16, AMPI_CUDA_BLAS_BYTES = 32 << 20 };

struct amp_cuda {
    amp_cuda_desc    desc;
    amp_logger       logger;
    amp_allocator    allocator;
    amp_exec         exec;
    int              owns_stream;
    int              trusted;        /* a model's own: nobody else passes pointers */
    ampi_cuda_buffer   buffers[AMPI_CUDA_BUFFERS];
    int              next_buffer;
    ampi_cuda_record records[AMPI_CUDA_RECORDS];
    int              record_count;
    ampi_cuda_record* recording;
#if !defined(AMP_NO_CUBLAS)
    cublasHandle_t   blas;
    void*            blas_workspace;
#endif
};

/* An error unless the current device can be used and has compute capability 7.5 or newer. */
AMPI_FN amp_result ampi_cuda_check_device(const amp_logger* logger) {
    int count = 0, device = 0, major = 0, minor = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess && count == 0) e = cudaErrorNoDevice;
    if (e == cudaSuccess) e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (e != cudaSuccess) {
        cudaGetLastError();
        return ampi_fail(logger, ampi_cuda_result(e), "amp_cuda: no usable GPU: CUDA error %d, %s",
            (int)e, cudaGetErrorString(e));
    }
    AMPI_REFUSE_CALL(10 * major + minor < 75, AMP_ERR_UNSUPPORTED,
        "amp_cuda: device %d has compute capability %d.%d, 7.5 or newer is needed", device, major,
        minor);
    return AMP_OK;
}

#if !defined(AMP_NO_CUBLAS)
/* A workspace of our own makes cuBLAS's results the same on every run, and its calls fit for
   capture. */
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
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasSetWorkspace(c->blas, c->blas_workspace, AMPI_CUDA_BLAS_BYTES);
    if (e == CUBLAS_STATUS_SUCCESS) return AMP_OK;
    return ampi_fail(c->exec.logger, e == CUBLAS_STATUS_ALLOC_FAILED ? AMP_ERR_MEMORY
        : AMP_ERR_DEVICE, "amp_cuda: cuBLAS does not start: status %d", (int)e);
}

/* The cuBLAS handle and its workspace are freed, if there are any. */
AMPI_FN void ampi_cuda_close_blas(amp_cuda* c) {
    if (c->blas) cublasDestroy(c->blas);
    if (c->blas_workspace) cudaFree(c->blas_workspace);
}
#else
/* Without cuBLAS, a context that asks for it by name is refused. */
AMPI_FN amp_result ampi_cuda_open_blas(amp_cuda* c) {
    if (c->desc.gemm != AMP_CUDA_GEMM_CUBLAS) return AMP_OK;
    return ampi_fail(c->exec.logger, AMP_ERR_UNSUPPORTED,
        "amp_cuda: built without cuBLAS (AMP_NO_CUBLAS)");
}

AMPI_FN void ampi_cuda_close_blas(amp_cuda*) {}
#endif

/* Stream, events, cuBLAS. A stream of our own and the default stream wait for each other, so that
   plain cudaMemcpy calls stay in order with it. */
AMPI_FN amp_result ampi_cuda_open(amp_cuda* c) {
    cudaError_t e = cudaSuccess;
    cudaStream_t own;
    int i;
    if (!c->desc.stream) {
        e = cudaStreamCreate(&own);
        if (e == cudaSuccess) c->exec.stream = own;
        c->owns_stream = e == cudaSuccess;
    }
    for (i = 0; i < AMPI_CUDA_BUFFERS && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&c->buffers[i].done, cudaEventDisableTiming);
    if (e != cudaSuccess) return ampi_cuda_check(&c->exec, "amp_cuda_create", e);
    return ampi_cuda_open_blas(c);
}

/* All recorded steps of the context are freed. */
AMPI_FN void ampi_cuda_drop_records(amp_cuda* c) {
    int i;
    for (i = 0; i < c->record_count; i++)
        if (c->records[i].graph) cudaGraphExecDestroy(c->records[i].graph);
    memset(c->records, 0, sizeof c->records);
    c->record_count = 0;
}

/* The stream's work is awaited, then all that the context owns is freed; NULL is allowed. */
AMP_DEF void amp_cuda_destroy(amp_cuda* c) {
    amp_allocator allocator;
    int i;
    if (!c) return;
    cudaStreamSynchronize(ampi_cuda_stream(&c->exec));
    ampi_cuda_drop_records(c);
    for (i = 0; i < AMPI_CUDA_BUFFERS; i++) {
        if (c->buffers[i].data) cudaFreeHost(c->buffers[i].data);
        if (c->buffers[i].done) cudaEventDestroy(c->buffers[i].done);
    }
    ampi_cuda_close_blas(c);
    if (c->owns_stream) cudaStreamDestroy(ampi_cuda_stream(&c->exec));
    cudaGetLastError();
    allocator = c->allocator;
    ampi_free(c, &allocator);
}

/* A new context in *out, in memory of allocator `a`. A bad desc and an unusable device are
   refused, and *out is NULL then. */
AMPI_FN amp_result ampi_cuda_make(amp_cuda** out, const amp_cuda_desc* desc,
        const amp_logger* logger, const amp_allocator* a) {
    amp_cuda* c;
    amp_result r;
    *out = NULL;
    AMPI_REFUSE_CALL(desc && ((unsigned)desc->gemm > AMP_CUDA_GEMM_CUBLAS
        || (desc->graph != 0 && desc->graph != 1)), AMP_ERR_DESC,
        "amp_cuda_create: gemm is %d, graph is %d; they must be 0..2, and 0 or 1", (int)desc->gemm,
        desc->graph);
    AMPI_TRY(ampi_cuda_check_device(logger));

    /* a context of its own logger and allocator, whose exec names it */
    c = (amp_cuda*)ampi_alloc(sizeof *c, a);
    AMPI_REFUSE_CALL(!c, AMP_ERR_MEMORY, "amp_cuda_create: out of memory");
    memset(c, 0, sizeof *c);
    if (desc) c->desc = *desc;
    if (a) c->allocator = *a;
    if (logger) c->logger = *logger;
    c->desc.logger = c->exec.logger = &c->logger;
    c->exec.stream = c->desc.stream;
    c->exec.context = c;

    /* stream, buffers and handle; what has been opened goes with the context */
    r = ampi_cuda_open(c);
    if (r != AMP_OK) {
        amp_cuda_destroy(c);
        return r;
    }
    *out = c;
    return AMP_OK;
}

/* A new context in *out, allocated by the default allocator; *out is NULL after an error. */
AMP_DEF amp_result amp_cuda_create(amp_cuda** out, const amp_cuda_desc* desc) {
    const amp_logger* logger = desc ? desc->logger : NULL;
    AMPI_REFUSE_CALL(!out, AMP_ERR_ARGUMENT, "amp_cuda_create: out is NULL");
    return ampi_cuda_make(out, desc, logger, NULL);
}

/* Who multiplies for this context; none means own kernels. */
AMPI_FN amp_cuda_gemm_engine ampi_cuda_engine(const amp_cuda* c) {
    return c ? c->desc.gemm : AMP_CUDA_GEMM_OWN;
}

#if !defined(AMP_NO_CUBLAS)
AMPI_FN cublasHandle_t ampi_cuda_blas(amp_cuda* c) { return c ? c->blas : NULL; }
#endif

/* The exec that names this context, its stream and its logger; all zeros for NULL. */
AMP_DEF amp_exec amp_cuda_exec(amp_cuda* c) {
    amp_exec none;
    AMPI_CLEAR(none);
    return c ? c->exec : none;
}

/* --- memory --- */

/* Device memory of `bytes` bytes, or NULL; the allocator is ignored. */
AMPI_FN void* ampi_cuda_alloc(size_t bytes, const amp_allocator*) {
    void* p = NULL;
    if (cudaMalloc(&p, bytes) == cudaSuccess) return p;
    cudaGetLastError();
    return NULL;
}

/* Device memory is freed; the allocator is ignored, and errors are forgotten. */
AMPI_FN void ampi_cuda_free(void* p, const amp_allocator*) {
    if (cudaFree(p) != cudaSuccess) cudaGetLastError();
}

/* Functions as the table of the backend wants them. */
#define AMPI_CUDA(name, ...) \
    AMPI_FN amp_result ampi_cuda_##name(__VA_ARGS__, const amp_exec* exec)

/* `bytes` zero bytes at p, written in the stream's order. */
AMPI_CUDA(zero, void* p, size_t bytes) {
    return ampi_cuda_check(exec, "amp_cuda: zero",
        cudaMemsetAsync(p, 0, bytes, ampi_cuda_stream(exec)));
}

/* A batch "on the device" may lie in pinned memory: the kind of copy follows from the addresses. */
AMPI_CUDA(copy, void* dst, const void* src, size_t bytes) {
    if (bytes == 0) return AMP_OK;
    return ampi_cuda_check(exec, "amp_cuda: copy", cudaMemcpyAsync(dst, src, bytes,
        cudaMemcpyDefault, ampi_cuda_stream(exec)));
}

/* The next pinned buffer, at least `bytes` large, when the copy that used it last is done. With
   eight buffers the host runs some steps ahead before it has to wait here. (To ask first whether it
   is done would leave cudaErrorNotReady as the program's last error.) */
AMPI_FN amp_result ampi_cuda_take_buffer(const amp_exec* exec, size_t bytes,
        ampi_cuda_buffer** out) {
    amp_cuda* c = ampi_cuda_context(exec);
    ampi_cuda_buffer* buffer = &c->buffers[c->next_buffer];
    cudaError_t e = cudaEventSynchronize(buffer->done);
    c->next_buffer = (c->next_buffer + 1) % AMPI_CUDA_BUFFERS;
    *out = buffer;
    if (e == cudaSuccess && buffer->bytes < bytes) {
        if (buffer->data) cudaFreeHost(buffer->data);
        buffer->data = NULL;
        buffer->bytes = 0;
        e = cudaMallocHost(&buffer->data, bytes);
        if (e == cudaSuccess) buffer->bytes = bytes;
    }
    return ampi_cuda_check(exec, "amp_cuda: pinned memory", e);
}

/* The first `bytes` bytes of a pinned buffer are copied to dst on the stream; buffer->done
   passes after that copy. */
AMPI_FN amp_result ampi_cuda_send_buffer(const amp_exec* exec, const ampi_cuda_buffer* buffer,
        void* dst, size_t bytes) {
    cudaStream_t stream = ampi_cuda_stream(exec);
    cudaError_t e = cudaMemcpyAsync(dst, buffer->data, bytes, cudaMemcpyHostToDevice, stream);
    if (e == cudaSuccess) e = cudaEventRecord(buffer->done, stream);
    return ampi_cuda_check(exec, "amp_cuda: copy to the device", e);
}

/* Types are converted on the host, on the way into pinned memory: the same bits, and the bus
   carries the narrower one. */
AMPI_CUDA(upload, amp_ref dst, amp_ref host, size_t n) {
    size_t bytes = n * amp_dtype_size(dst.dtype);
    ampi_cuda_buffer* buffer;
    if (n == 0) return AMP_OK;
    AMPI_TRY(ampi_cuda_take_buffer(exec, bytes, &buffer));
    AMPI_TRY(ampi_cpu_convert(amp_ref_of(buffer->data, dst.dtype), host, n, exec));
    return ampi_cuda_send_buffer(exec, buffer, dst.data, bytes);
}

/* A copy of `bytes` bytes from host to device by way of a pinned buffer: the host may change
   its memory at once. */
AMPI_CUDA(copy_in, void* dst, const void* host, size_t bytes) {
    ampi_cuda_buffer* buffer;
    if (bytes == 0) return AMP_OK;
    AMPI_TRY(ampi_cuda_take_buffer(exec, bytes, &buffer));
    memcpy(buffer->data, host, bytes);
    return ampi_cuda_send_buffer(exec, buffer, dst, bytes);
}

/* These two wait. */
AMPI_CUDA(copy_out, void* host, const void* src, size_t bytes) {
    if (bytes == 0) return AMP_OK;
    AMPI_TRY(ampi_cuda_check(exec, "amp_cuda: copy to the host", cudaMemcpyAsync(host, src, bytes,
        cudaMemcpyDeviceToHost, ampi_cuda_stream(exec))));
    return ampi_cuda_wait(exec, "amp_cuda: copy to the host");
}

/* n elements from the device, of type host_dtype; the conversion is done on the host.
   The call waits for the stream. */
AMPI_CUDA(download, amp_ref host, amp_ref src, size_t n) {
    size_t bytes = n * amp_dtype_size(src.dtype);
    ampi_cuda_buffer* buffer;
    if (ampi_dtype_or_f32(host.dtype) == ampi_dtype_or_f32(src.dtype))
        return ampi_cuda_copy_out(host.data, src.data, bytes, exec);
    AMPI_TRY(ampi_cuda_take_buffer(exec, bytes, &buffer));
    AMPI_TRY(ampi_cuda_copy_out(buffer->data, src.data, bytes, exec));
    return ampi_cpu_convert(host, amp_ref_of(buffer->data, src.dtype), n, exec);
}

/* --- launches --- */

/* May kernels start while the one before them ends ("programmatic dependent launch")? All of them
   wait where they begin, if they are compiled for 9.0: older code, translated, does not. */
static __global__ void ampi_k_scaler_flag(const struct ampi_cuda_scaler_block* b, float* flag);

/* *early becomes 1 where driver and code know programmatic dependent launch, else 0. The answer
   is asked once per device. */
AMPI_FN cudaError_t ampi_cuda_starts_early(int* early) {
    enum { KNOWN = 64 };
    static signed char known[KNOWN];      /* per device: 0 = not asked yet, 1 = yes, -1 = no */
    cudaFuncAttributes compiled;
    int device = 0, driver = 0;
    cudaError_t e = cudaGetDevice(&device);
    *early = 0;
    if (e != cudaSuccess || device >= KNOWN) return e;
    if (!known[device]) {
        e = cudaDriverGetVersion(&driver);
        if (e == cudaSuccess) e = cudaFuncGetAttributes(&compiled, ampi_k_scaler_flag);
        if (e != cudaSuccess) return e;
        known[device] = CUDART_VERSION >= 12030 && driver >= 12030 && compiled.ptxVersion >= 90 ? 1
            : -1;
    }
    *early = known[device] > 0;
    return e;
}

/* The one way by which every kernel starts: grid and block count blocks and threads; `shared` bytes
   of dynamic shared memory a block; `cluster` neighbouring blocks reach that of each other. Where
   the driver can, a kernel starts before the one ahead of it in the stream is done, see
   ampi_ptx_grid_wait. */
template <typename... P, typename... A>
static cudaError_t ampi_cuda_launch_clusters(const amp_exec* exec, void (*kernel)(P...), dim3 grid,
        dim3 block, size_t shared, unsigned cluster, A... args) {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    int early;
    cudaError_t e = ampi_cuda_starts_early(&early);

    /* attributes[0, count) */
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = cluster;
        attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
        count++;
    }
    if (early) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        count++;
    }

    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = ampi_cuda_stream(exec);
    config.attrs = attributes;
    config.numAttrs = count;

    /* each argument as the kernel declares it */
    if (e == cudaSuccess) e = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
    return e;
}

/* A launch without clusters: each block has its shared memory to itself. */
template <typename... P, typename... A>
static amp_result ampi_cuda_launch(const amp_exec* exec, const char* place, void (*kernel)(P...),
        dim3 grid, dim3 block, size_t shared, A... args) {
    return ampi_cuda_check(exec, place, ampi_cuda_launch_clusters(exec, kernel, grid, block,
        shared, 1, args...));
}

/* --- host, what every operator needs --- */

/* Threads in a block, unless a kernel says otherwise, and elements that one thread holds at a
   time. */
enum { AMPI_CUDA_BLOCK = 256, AMPI_CUDA_EIGHT = 8, AMPI_CUDA_MAX_BLOCKS = 4096 };

/* Blocks for `work` items of which a block takes `per_block` at a time; kernels loop over what is
   left. */
AMPI_FN dim3 ampi_cuda_grid(size_t work, size_t per_block) {
    size_t blocks = work / per_block + (work % per_block != 0);
    return dim3((unsigned)(blocks < AMPI_CUDA_MAX_BLOCKS ? blocks : (size_t)AMPI_CUDA_MAX_BLOCKS));
}

/* May a kernel of the current device read and write at p? Pinned host memory is mapped; where it
   was registered, or allocated as write-combined, perhaps at another address. Another device's has
   no address without peer access. */
AMPI_FN cudaError_t ampi_cuda_ask(const void* p, cudaPointerAttributes* a, int* reached) {
    cudaError_t e = cudaPointerGetAttributes(a, p);
    *reached = e == cudaSuccess && a->type != cudaMemoryTypeUnregistered && a->devicePointer == p;
    return e;
}

/* 1 if kernels can read and write at p, else 0; errors are forgotten. */
AMPI_FN int ampi_cuda_reaches(const void* p) {
    cudaPointerAttributes a;
    int reached;
    if (ampi_cuda_ask(p, &a, &reached) != cudaSuccess) cudaGetLastError();
    return reached;
}

/* Memory at p that kernels cannot reach is refused; `name` is the argument in the sentence. */
AMPI_FN amp_result ampi_cuda_check_memory(const amp_exec* exec, const char* op, const char* name,
        const void* p) {
    cudaPointerAttributes a;
    int reached;
    AMPI_TRY(ampi_cuda_check(exec, op, ampi_cuda_ask(p, &a, &reached)));
    if (reached) return AMP_OK;
    AMPI_REFUSE_OP(a.type == cudaMemoryTypeDevice, AMP_ERR_ARGUMENT,
        "%s: %s is memory of device %d, which the current device cannot reach", op, name, a.device);
    return ampi_fail(ampi_exec_logger(exec), AMP_ERR_ARGUMENT, "%s: %s is host memory", op, name);
}

/* Memory that a kernel cannot reach is refused, the workspace too; in a model the pointers are the
   model's own. */
AMPI_FN amp_result ampi_cuda_check_pointer(const amp_exec* exec, const char* op, const char* name,
        const void* p) {
    const amp_cuda* c = ampi_cuda_context(exec);
    if (c && c->trusted) return AMP_OK;
    if (p) AMPI_TRY(ampi_cuda_check_memory(exec, op, name, p));
    if (!exec || !exec->workspace) return AMP_OK;
    return ampi_cuda_check_memory(exec, op, "the workspace", exec->workspace);
}

/* Refuses an exec that has products round operands of FP32. */
AMPI_FN amp_result ampi_cuda_check_rounding(const amp_exec* exec, const char* op) {
    AMPI_REFUSE_OP(exec && exec->operands, AMP_ERR_UNSUPPORTED,
        "%s: operands of the exec must be 0 on a GPU", op);
    return AMP_OK;
}

/* ampi_check_operands, and that all is memory of the device. */
AMPI_FN amp_result ampi_cuda_check_operands(const amp_exec* exec, const char* op, size_t n,
        const ampi_argument* list, size_t count) {
    AMPI_TRY(ampi_check_operands(exec, op, n, list, count));
    for (size_t i = 0; n > 0 && i < count; i++)
        AMPI_TRY(ampi_cuda_check_pointer(exec, op, list[i].name, list[i].data));
    return AMP_OK;
}

/* An operand as kernels take it, where a type of 0 has become AMP_F32. */
AMPI_FN amp_ref ampi_cuda_ref(amp_ref x) {
    return amp_ref_of(x.data, ampi_dtype_or_f32(x.dtype));
}

#define AMPI_CUDA_CHECK(op, n, list) \
    AMPI_TRY(ampi_cuda_check_operands(exec, op, n, list, AMPI_LENGTH(list)))

/* The workspace if it holds that many bytes from the next multiple of 16 on, else NULL. One that
   grows is enlarged; a kernel that uses it must be launched before the next call of this. */
AMPI_FN void* ampi_cuda_scratch(const amp_exec* exec, size_t bytes) {
    AMPI_GROW_WORKSPACE(bytes + 15)
    uintptr_t start = exec ? (uintptr_t)exec->workspace : 0;
    size_t skip = (size_t)(0u - start) & 15u;
    if (!start || exec->workspace_size < skip || exec->workspace_size - skip < bytes) return NULL;
    return (void*)(start + skip);
}

/* >>impl-device What all kernels use: instructions that C++ has no words for, elements of any type
   one or eight at a time, sums in a fixed order.
   Words. eight: eight neighbouring elements, which a thread holds. group: T threads that take a
   row, a warp or a whole block. ptx: one instruction of the GPU; tests/emu brings these functions
   for the CPU. This room calls impl-half of amp.h. */

/* --- instructions --- */

#if !defined(AMP_CUDA_EMU)

/* Four 8x8 matrices of 16-bit elements from shared memory; lane 8i+r gives the address of row r of
   matrix i (16 bytes, aligned). Lane l receives elements 2*(l%4), 2*(l%4)+1 of row l/4. */
AMPI_D void ampi_ptx_ldmatrix_x4(uint32_t (&r)[4], const void* p) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

/* The same, but lane l receives two elements of column l/4. */
AMPI_D void ampi_ptx_ldmatrix_x4_trans(uint32_t (&r)[4], const void* p) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
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

/* ampi_ptx_mma_f16 for bfloat16 operands. */
AMPI_D void ampi_ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/* The product of depth 8, which compute capability 7.5 has. */
AMPI_D void ampi_ptx_mma_f16_k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}

/* Asynchronous copies to shared memory; only the first `bytes` are read, the rest becomes zero. */
AMPI_D void ampi_ptx_cp_async16(void* shared, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 : : "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global),
                 "r"(bytes) : "memory");
#endif
}

/* The asynchronous copies that this thread has started form one group. */
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

/* From 9.0 on the next kernel's blocks may take their places while this one ends (see
   ampi_cuda_launch_clusters). Each kernel begins with this: it waits until all that went before is
   done and seen, then lets the next one come. */
AMPI_D void ampi_ptx_grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" : : : "memory");
#endif
}

/* Adds 1 to a counter and returns what it was. What this thread, and those that it met at a
   barrier, have written is seen by those that count later, and theirs by this one: less to wait for
   than with a fence on either side. */
AMPI_D uint32_t ampi_ptx_count(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/* The value of the half-precision bits h. */
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

/* Two numbers rounded to half precision in one word, `lo` in its low half; a NaN gives 0x7fff. */
AMPI_D uint32_t ampi_ptx_f16x2_from_f32(float lo, float hi) {
    uint32_t pair = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
#endif
    return pair;
}

/* The same in bfloat16. */
AMPI_D uint32_t ampi_ptx_bf16x2_from_f32(float lo, float hi) {
    uint32_t pair = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
#endif
    return pair;
}

/* 2^x, off by 2^-22 of itself at most; subnormal numbers are 0. */
AMPI_D float ampi_ptx_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Compute capability 9.0, compiled for sm_90a alone. Section names are those of the PTX ISA,
   version 8.0 and later. */
#if defined(AMPI_HOPPER)

/* Where p lies in the shared memory of this block: the form of address that descriptors and
   barriers want. */
AMPI_D uint32_t ampi_ptx_shared(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* "Parallel Synchronization and Communication Instructions: mbarrier". A barrier's phase ends when
   `count` arrivals and all announced bytes are in; phases have the parity 0, 1, 0, ... */
AMPI_D void ampi_ptx_mbarrier_init(uint64_t* barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(ampi_ptx_shared(barrier)),
        "r"(count) : "memory");
}

/* Before the copy engine may use the barriers that this thread made. */
AMPI_D void ampi_ptx_mbarrier_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

/* Arrives, and announces bytes that the copy engine will bring. */
AMPI_D void ampi_ptx_mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 : : "r"(ampi_ptx_shared(barrier)), "r"(bytes) : "memory");
}

/* One arrival at the barrier, without bytes. */
AMPI_D void ampi_ptx_mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(ampi_ptx_shared(barrier))
        : "memory");
}

/* Waits until the latest phase of this parity has ended; a new barrier's phase of parity 1 counts
   as ended. */
AMPI_D void ampi_ptx_mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(ampi_ptx_shared(barrier)), "r"(parity) : "memory");
    } while (!done);
}

/* "cp.async.bulk.tensor": the copy engine brings a box of the tensor that `map` describes, first
   element (x, y, z); what lies outside of the tensor becomes zero. Its bytes count at the
   barrier. */
AMPI_D void ampi_ptx_tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
        int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];"
                 : : "r"(ampi_ptx_shared(to)), "l"(map), "r"(ampi_ptx_shared(barrier)), "r"(x),
                 "r"(y), "r"(z) : "memory");
}

/* Fetches the description itself, ahead of its first use. */
AMPI_D void ampi_ptx_tma_prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

/* The way back; parts of the box outside of the tensor are left out. Stores count in groups, as
   cp.async does. */
AMPI_D void ampi_ptx_tma_store(const CUtensorMap* map, const void* from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 : : "l"(map), "r"(ampi_ptx_shared(from)), "r"(x), "r"(y), "r"(z) : "memory");
}

AMPI_D void ampi_ptx_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }

/* Until at most N of this thread's groups have still to be read from shared memory. */
template <int N>
AMPI_D void ampi_ptx_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(N) : "memory");
}

/* What this thread wrote to shared memory by ordinary stores is seen by the copy engine and the
   Tensor Cores. */
AMPI_D void ampi_ptx_fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

/* ldmatrix.x4 backwards: lane 8i+r gives the address of row r of matrix i. */
AMPI_D void ampi_ptx_stmatrix_x4(void* p, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 : : "r"(ampi_ptx_shared(p)), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3]) : "memory");
}

/* Two halves at once; NaN where one of the two is, or infinities cancel. */
AMPI_D uint32_t ampi_ptx_add_f16x2(uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

/* The sums of two pairs of bfloat16, each rounded to nearest even. */
AMPI_D uint32_t ampi_ptx_add_bf16x2(uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

/* One lane of a warp, all of whose lanes call. */
AMPI_D int ampi_ptx_elect() {
    int mine;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}"
        : "=r"(mine));
    return mine;
}

/* All threads of the cluster meet. */
AMPI_D void ampi_ptx_cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :
        : : "memory");
}

/* `threads` of this block meet at barrier `group`: 1 and 2 are those of a warpgroup, 3 of both. */
AMPI_D void ampi_ptx_group_sync(uint32_t group, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(group), "r"(threads) : "memory");
}

/* 16 bytes from the same place in the shared memory of the cluster's block `rank`. */
AMPI_D float4 ampi_ptx_load_there(const void* p, uint32_t rank) {
    float4 v;
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(ampi_ptx_shared(p)),
                 "r"(rank) : "memory");
    return v;
}

/* "setmaxnreg": a warpgroup's registers per thread from here on. */
template <int N>
AMPI_D void ampi_ptx_give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N));
}

template <int N>
AMPI_D void ampi_ptx_take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N));
}

/* "Asynchronous Warpgroup Level Matrix Instructions". wgmma: d = a * b, or += with `add`, 64 x N in
   FP32 with 16 of k, by the 128 threads of a warpgroup; a and b are descriptors of matrices in
   shared memory. TRANS: the matrix lies in rows across k. d may not be touched before
   ampi_ptx_wgmma_wait_all. */
#define AMPI_REGS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define AMPI_REGS_64 AMPI_REGS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define AMPI_REGS_96 AMPI_REGS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define AMPI_REGS_128 AMPI_REGS_96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, " \
    "%104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define AMPI_TIE_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), \
                      "+f"(d[i + 6]), "+f"(d[i + 7])
#define AMPI_TIE_32(i) AMPI_TIE_8(i), AMPI_TIE_8(i + 8), AMPI_TIE_8(i + 16), AMPI_TIE_8(i + 24)
#define AMPI_TIE_64(i) AMPI_TIE_32(i), AMPI_TIE_32(i + 32)
#define AMPI_TIE_96(i) AMPI_TIE_64(i), AMPI_TIE_32(i + 64)
#define AMPI_TIE_128(i) AMPI_TIE_64(i), AMPI_TIE_64(i + 64)
/* The operands behind the registers of d: a, b, add, and two immediates. */
#define AMPI_WGMMA(n, type, regs, tie, a_, b_, add_, ta_, tb_) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #add_ ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, %" \
                 #a_ ", %" #b_ \
                 ", p, 1, 1, %" #ta_ ", %" #tb_ ";\n}" \
                 : tie : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B) : "memory")
template <int TRANS_A, int TRANS_B, int BF16>
AMPI_D void ampi_ptx_wgmma(float (&d)[32], uint64_t a, uint64_t b, int add) {
    if (BF16) AMPI_WGMMA(64, "bf16", AMPI_REGS_32, AMPI_TIE_32(0), 32, 33, 34, 35, 36);
    else AMPI_WGMMA(64, "f16", AMPI_REGS_32, AMPI_TIE_32(0), 32, 33, 34, 35, 36);
}

template <int TRANS_A, int TRANS_B, int BF16>
AMPI_D void ampi_ptx_wgmma(float (&d)[64], uint64_t a, uint64_t b, int add) {
    if (BF16) AMPI_WGMMA(128, "bf16", AMPI_REGS_64, AMPI_TIE_64(0), 64, 65, 66, 67, 68);
    else AMPI_WGMMA(128, "f16", AMPI_REGS_64, AMPI_TIE_64(0), 64, 65, 66, 67, 68);
}

template <int TRANS_A, int TRANS_B, int BF16>
AMPI_D void ampi_ptx_wgmma(float (&d)[96], uint64_t a, uint64_t b, int add) {
    if (BF16) AMPI_WGMMA(192, "bf16", AMPI_REGS_96, AMPI_TIE_96(0), 96, 97, 98, 99, 100);
    else AMPI_WGMMA(192, "f16", AMPI_REGS_96, AMPI_TIE_96(0), 96, 97, 98, 99, 100);
}

template <int TRANS_A, int TRANS_B, int BF16>
AMPI_D void ampi_ptx_wgmma(float (&d)[128], uint64_t a, uint64_t b, int add) {
    if (BF16) AMPI_WGMMA(256, "bf16", AMPI_REGS_128, AMPI_TIE_128(0), 128, 129, 130, 131, 132);
    else AMPI_WGMMA(256, "f16", AMPI_REGS_128, AMPI_TIE_128(0), 128, 129, 130, 131, 132);
}

/* Before the first wgmma after registers of d were touched. */
AMPI_D void ampi_ptx_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
AMPI_D void ampi_ptx_wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

/* Until at most N groups of wgmma are under way: the shared memory of the others may be used
   again. */
template <int N>
AMPI_D void ampi_ptx_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

/* Until none is: d is valid. The second line keeps the compiler from reading it earlier. */
template <int M>
AMPI_D void ampi_ptx_wgmma_wait_all(float (&d)[M]) {
    ampi_ptx_wgmma_wait<0>();
    AMPI_D_UNROLL
    for (int i = 0; i < M; i++) asm volatile("" : "+f"(d[i]) : : "memory");
}

#endif

#endif

/* --- device, one element of any type --- */

/* Bit for bit what the CPU does: a NaN keeps the upper bits of its payload and is made quiet. */
AMPI_D float ampi_d_widen_half(uint16_t h) {
    return (h & 0x7fffu) > 0x7c00u ? ampi_float(ampi_half_widen(h)) : ampi_ptx_f32_from_f16(h);
}

/* The bits of f rounded to half precision; NaNs get the bits that the CPU gives them. */
AMPI_D uint16_t ampi_d_round_half(float f) {
    uint32_t u = ampi_bits(f);
    return (u & 0x7fffffffu) > 0x7f800000u ? ampi_half_bits(u) : ampi_ptx_f16_from_f32(f);
}

/* Element i of x, widened. The branches are the same for all threads of a kernel. */
AMPI_D float ampi_d_load(amp_ref x, size_t i) {
    const uint16_t* halves = (const uint16_t*)x.data;
    if (x.dtype == AMP_F16) return ampi_d_widen_half(halves[i]);
    if (x.dtype == AMP_BF16) return ampi_float(ampi_bf16_widen(halves[i]));
    return ((const float*)x.data)[i];
}

/* Rounds v to the type of y and writes element i. */
AMPI_D void ampi_d_store(amp_ref y, size_t i, float v) {
    uint16_t* halves = (uint16_t*)y.data;
    if (y.dtype == AMP_F16) halves[i] = ampi_d_round_half(v);
    else if (y.dtype == AMP_BF16) halves[i] = ampi_bf16_bits(ampi_bits(v));
    else ((float*)y.data)[i] = v;
}

/* a / b, with the division of 32 bits where it is enough: that of 64 takes about eighty
   instructions. */
AMPI_D size_t ampi_d_quotient(size_t a, size_t b) {
    return ((uint64_t)(a | b) >> 32) == 0 ? (uint32_t)a / (uint32_t)b : a / b;
}

/* --- device, eight elements of any type --- */

/* Eight elements as they lie in memory; 16-bit types leave the upper half unused. */
typedef struct ampi_eight { uint32_t w[8]; } ampi_eight;

AMPI_D void ampi_d_set4(uint32_t* w, uint4 q) { w[0] = q.x; w[1] = q.y; w[2] = q.z; w[3] = q.w; }

/* Elements [i, i+8) of x, as far as they are below n; the others are 0. A load of 16 bytes at a
   time where the address allows: neighbouring threads read neighbouring eights, so all of a warp go
   the same way. Nothing is converted yet, so that several loads can be under way. */
AMPI_D void ampi_d_fetch8(ampi_eight& r, amp_ref x, size_t i, size_t n) {
    const bool wide = x.dtype == AMP_F32;
    const unsigned char* p = (const unsigned char*)x.data + i * (wide ? 4u : 2u);
    for (int j = 0; j < 8; j++) r.w[j] = 0;
    if (i + 8 <= n && ((uintptr_t)p & 15u) == 0) {
        ampi_d_set4(r.w, *(const uint4*)p);
        if (wide) ampi_d_set4(r.w + 4, *(const uint4*)(p + 16));
    } else if (wide) {
        for (int j = 0; j < 8; j++)
            if (i + (size_t)j < n) r.w[j] = ((const uint32_t*)p)[j];
    } else {
        for (int j = 0; j < 8; j++)
            if (i + (size_t)j < n)
                r.w[j / 2] |= (uint32_t)((const uint16_t*)p)[j] << (16 * (j & 1));
    }
}

/* The inverse: writes those of the eight that lie below n. */
AMPI_D void ampi_d_put8(amp_ref y, size_t i, size_t n, const ampi_eight& r) {
    const bool wide = y.dtype == AMP_F32;
    unsigned char* p = (unsigned char*)y.data + i * (wide ? 4u : 2u);
    if (i + 8 <= n && ((uintptr_t)p & 15u) == 0) {
        *(uint4*)p = make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]);
        if (wide) *(uint4*)(p + 16) = make_uint4(r.w[4], r.w[5], r.w[6], r.w[7]);
    } else if (wide) {
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
        for (int j = 0; j < 8; j++)
            v[j] = ampi_d_widen_half((uint16_t)(r.w[j / 2] >> (16 * (j & 1))));
    else
        for (int j = 0; j < 8; j++)
            v[j] = ampi_float(ampi_bf16_widen((uint16_t)(r.w[j / 2] >> (16 * (j & 1)))));
}

/* The eight numbers v, rounded to type t and packed as ampi_d_fetch8 packs them. */
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
AMPI_D void ampi_d_load8(float (&v)[8], amp_ref x, size_t i, size_t n) {
    ampi_eight r;
    ampi_d_fetch8(r, x, i, n);
    ampi_d_widen8(v, r, x.dtype);
}

/* Up to eight values are rounded to y's type and stored at y[i], y[i + 1], ...; none at n or
   above. */
AMPI_D void ampi_d_store8(amp_ref y, size_t i, size_t n, const float (&v)[8]) {
    ampi_eight r;
    ampi_d_round8(r, v, y.dtype);
    ampi_d_put8(y, i, n, r);
}

/* --- device, sums and maxima in a fixed order --- */

/* Eight floats by a tree. Longer sums go on in double, one addition for eight elements. */
AMPI_D float ampi_d_sum8(const float (&v)[8]) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* Over the 32 lanes of a warp, all of which take part and receive the result. In each step both
   partners add the same two numbers, so all lanes hold the same bits. */
template <int N>
AMPI_D void ampi_d_warp_sum(double (&v)[N]) {
    for (int step = 16; step > 0; step /= 2)
        for (int k = 0; k < N; k++) v[k] += __shfl_xor_sync(0xffffffffu, v[k], step);
}

/* The larger; NaNs are passed over. */
AMPI_D float ampi_d_larger(float a, float b) { return b > a ? b : a; }

/* The maximum over the warp's 32 lanes, in every lane. */
AMPI_D float ampi_d_warp_max(float v) {
    for (int step = 16; step > 0; step /= 2)
        v = ampi_d_larger(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

/* Over a group of T threads: a warp, or a whole block of T threads, all of which take part and
   receive the result. `shared` holds N doubles for each warp of the block; it may be used again at
   once. */
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

/* Each of a group's T threads receives the largest v of the group; no v is a NaN. */
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

/* The sum of parts that all of a block can see, by its first 256 threads; the others get 0, and may
   not wait for these again. */
AMPI_D double ampi_d_parts_sum(const double* parts, size_t count, double* shared) {
    double sum[1] = { 0.0 };
    if (threadIdx.x >= AMPI_CUDA_BLOCK) return 0.0;
    AMPI_D_UNROLL4
    for (size_t i = threadIdx.x; i < count; i += AMPI_CUDA_BLOCK) sum[0] += parts[i];
    ampi_d_group_sum<AMPI_CUDA_BLOCK>(sum, shared);
    return sum[0];
}

/* --- eights and values that may be missing --- */

/* One value of a result that may not be wanted. */
AMPI_D void ampi_d_store_one(amp_ref y, size_t i, float v, int accumulate) {
    if (!y.data) return;
    ampi_d_store(y, i, accumulate ? ampi_d_load(y, i) + v : v);
}

AMPI_D float ampi_d_load_or(amp_ref x, size_t i, float missing) {
    return x.data ? ampi_d_load(x, i) : missing;
}

/* Eight elements of x as floats; `missing` in all of them if x is NULL. */
AMPI_D void ampi_d_load8_or(float (&v)[8], amp_ref x, size_t i, size_t n, float missing) {
    if (x.data) ampi_d_load8(v, x, i, n);
    else for (int j = 0; j < 8; j++) v[j] = missing;
}

/* Stores v, or adds it to what is there. */
AMPI_D void ampi_d_give8(amp_ref y, size_t i, size_t n, float (&v)[8], int add) {
    float old[8];
    if (add) ampi_d_load8(old, y, i, n);
    for (int j = 0; add && j < 8; j++) v[j] = __fadd_rn(old[j], v[j]);
    ampi_d_store8(y, i, n, v);
}

/* Zeros where an eight reaches beyond the end. */
AMPI_D void ampi_d_trim8(float (&v)[8], size_t left) {
    if (left >= 8) return;
    for (int j = 0; j < 8; j++) v[j] = (size_t)j < left ? v[j] : 0.0f;
}

/* The sum of eight products, each rounded, in the order of ampi_d_sum8. */
AMPI_D float ampi_d_dot8(const float (&a)[8], const float (&b)[8]) {
    float v[8];
    for (int j = 0; j < 8; j++) v[j] = __fmul_rn(a[j], b[j]);
    return ampi_d_sum8(v);
}

/* >>impl-half   Conversions, and the kernel over all elements of one or two operands.
   Words. tile: what a block takes at a time, two eights a thread. map: operands and result of such
   a kernel. This room calls impl-device. */

/* --- kernels over all elements of one or two operands --- */

/* y[i] = f(a[i], b[i]) for n elements; b may be NULL. A thread takes two eights at a time, all
   loads first. */
typedef struct ampi_cuda_map {
    amp_ref a, b, y;
    size_t n;
} ampi_cuda_map;

enum { AMPI_CUDA_TILE = 2 * (int)AMPI_CUDA_EIGHT * (int)AMPI_CUDA_BLOCK };

/* The operands a, b and y of n elements each, as kernels take them. */
AMPI_FN ampi_cuda_map ampi_cuda_map_of(amp_ref a, amp_ref b, amp_ref y, size_t n) {
    ampi_cuda_map m = { ampi_cuda_ref(a), ampi_cuda_ref(b), ampi_cuda_ref(y), n };
    return m;
}

/* This thread's first element, and the step from one iteration to the next. */
AMPI_D size_t ampi_d_tile_start() {
    return (size_t)blockIdx.x * AMPI_CUDA_TILE + threadIdx.x * (unsigned)AMPI_CUDA_EIGHT;
}

AMPI_D size_t ampi_d_tile_step() { return (size_t)gridDim.x * AMPI_CUDA_TILE; }
enum { AMPI_CUDA_SECOND = AMPI_CUDA_TILE / 2 };      /* from a thread's first eight of a tile to its
                                                        second */

/* --- conversion --- */

/* Eight elements of type `from` become elements of type `to`, in place. */
AMPI_D void ampi_d_convert8(ampi_eight& r, amp_dtype from, amp_dtype to) {
    float v[8];
    if (from == to) return;      /* a copy keeps all bits */
    ampi_d_widen8(v, r, from);
    ampi_d_round8(r, v, to);
}

/* y = a in another type; a thread converts two times eight elements of each of its block's
   tiles. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_convert(ampi_cuda_map m) {
    ampi_ptx_grid_wait();
    for (size_t i = ampi_d_tile_start(); i < m.n; i += ampi_d_tile_step()) {
        ampi_eight r[2];
        AMPI_D_UNROLL
        for (int u = 0; u < 2; u++)
            ampi_d_fetch8(r[u], m.a, i + (size_t)(u * AMPI_CUDA_SECOND), m.n);
        AMPI_D_UNROLL
        for (int u = 0; u < 2; u++) {
            ampi_d_convert8(r[u], m.a.dtype, m.y.dtype);
            ampi_d_put8(m.y, i + (size_t)(u * AMPI_CUDA_SECOND), m.n, r[u]);
        }
    }
}

/* r[j] = amp_random_bits(seed, index + j): two blocks of four words, or parts of three. Behind the
   last block, 2^62 - 1, comes block 0. */
AMPI_D void ampi_d_random8(uint32_t (&r)[8], uint64_t seed, uint64_t index) {
    uint64_t block = index >> 2, last = ((uint64_t)1 << 62) - 1u;
    unsigned skip = (unsigned)index & 3u;
    uint32_t w[12];
    ampi_philox(seed, block, w);
    ampi_philox(seed, (block + 1) & last, w + 4);
    w[8] = w[9] = w[10] = w[11] = 0;
    if (skip) ampi_philox(seed, (block + 2) & last, w + 8);
    for (int j = 0; j < 8; j++)
        r[j] = skip == 0 ? w[j] : skip == 1 ? w[j + 1] : skip == 2 ? w[j + 2] : w[j + 3];
}

/* The options of amp_convert_desc that a kernel looks at. */
typedef struct ampi_cuda_rounding {
    int saturate, random;    /* random: stochastic rounding */
    uint64_t seed, offset;   /* of its random numbers */
    size_t* saturated;       /* a count to add to, or NULL */
} ampi_cuda_rounding;

/* Floats to 16 bits with one random word each, by way of double as on the CPU. */
AMPI_D void ampi_d_round8_random(ampi_eight& r, const float (&v)[8], amp_dtype t, uint64_t seed,
        uint64_t index) {
    uint32_t random[8], h[8];
    ampi_d_random8(random, seed, index);
    for (int j = 0; j < 8; j++) {
        uint64_t wide = ampi_f32_widen(ampi_bits(v[j]));
        h[j] = t == AMP_F16 ? ampi_narrow(wide, &random[j], AMPI_F16_FORM)
                            : ampi_narrow(wide, &random[j], AMPI_BF16_FORM);
    }
    for (int j = 0; j < 4; j++) r.w[j] = (h[2 * j] & 0xffffu) | h[2 * j + 1] << 16;
}

/* Infinity becomes the largest finite value: its bits minus one. Returns how many were infinite;
   what lies behind the end of the data is 0. */
AMPI_D unsigned ampi_d_saturate8(ampi_eight& r, amp_dtype t) {
    const uint32_t inf = t == AMP_F16 ? 0x7c00u : 0x7f80u;
    unsigned hits = 0;
    if (t == AMP_F32)
        for (unsigned j = 0; j < 8; j++) {
            unsigned hit = (r.w[j] & 0x7fffffffu) == 0x7f800000u;
            r.w[j] -= hit;
            hits += hit;
        }
    else
        for (unsigned j = 0; j < 8; j++) {
            unsigned hit = (r.w[j / 2] >> (16 * (j & 1)) & 0x7fffu) == inf;
            r.w[j / 2] -= hit << (16 * (j & 1));
            hits += hit;
        }
    return hits;
}

/* A conversion with desc: saturation, stochastic rounding, a count of saturated elements. A thread
   takes two groups of eight elements a turn, AMPI_CUDA_SECOND apart. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_convert_with(ampi_cuda_map m,
        ampi_cuda_rounding d) {
    ampi_ptx_grid_wait();
    unsigned long long hits = 0;
    for (size_t i = ampi_d_tile_start(); i < m.n; i += ampi_d_tile_step())
        for (size_t at = i; at < m.n && at <= i + AMPI_CUDA_SECOND; at += AMPI_CUDA_SECOND) {
            ampi_eight r;
            ampi_d_fetch8(r, m.a, at, m.n);

            /* only a change of type rounds */
            if (d.random && m.a.dtype != m.y.dtype) {
                float v[8];
                ampi_d_widen8(v, r, m.a.dtype);
                ampi_d_round8_random(r, v, m.y.dtype, d.seed, d.offset + at);
            } else {
                ampi_d_convert8(r, m.a.dtype, m.y.dtype);
            }

            /* infinities become the largest finite number */
            if (d.saturate) hits += ampi_d_saturate8(r, m.y.dtype);
            ampi_d_put8(m.y, at, m.n, r);
        }
    if (d.saturated && hits) atomicAdd((unsigned long long*)d.saturated, hits);
}

/* amp_convert's own checks, and what differs on a device. */
AMPI_FN amp_result ampi_cuda_convert_check(amp_ref dst, amp_ref src, size_t n,
        const amp_convert_desc* d, const amp_exec* exec) {
    const char* op = "amp_cuda_convert";
    const ampi_argument list[] = { AMPI_ARG(dst, AMPI_NULL, n), AMPI_ARG(src, AMPI_NULL, n),
        { "desc.saturated", d->saturated, AMP_F32, AMPI_NULL, AMPI_FLAT(2) } };
    const ampi_convert_job job = ampi_convert_job_of(dst, src, d);
    AMPI_TRY(ampi_convert_check(&job, n, n, 1, n));
    AMPI_CUDA_CHECK(op, n, list);
    AMPI_REFUSE_WITH(d->logger, dst.data == src.data && job.to != job.from && n > 0,
        AMP_ERR_ARGUMENT, "%s: in place from %s to %s: the sizes differ", op,
        amp_dtype_name(src.dtype), amp_dtype_name(dst.dtype));
    return AMP_OK;
}

/* n elements of src become elements of dst, under desc; NULL is no desc. */
AMP_DEF amp_result amp_cuda_convert_with(amp_ref dst, amp_ref src, size_t n,
        const amp_convert_desc* desc, const amp_exec* exec) {
    ampi_cuda_map m = ampi_cuda_map_of(src, AMP_NONE, dst, n);
    amp_convert_desc d = {};
    if (desc) d = *desc;
    d.logger = ampi_exec_logger(exec);
    AMPI_TRY(ampi_cuda_convert_check(dst, src, n, &d, exec));
    if (n == 0) return AMP_OK;
    dim3 grid = ampi_cuda_grid(n, AMPI_CUDA_TILE);
    if (!d.saturate && !d.rounding)
        return ampi_cuda_launch(exec, "amp_cuda_convert", ampi_k_convert, grid,
            AMPI_CUDA_BLOCK, 0, m);
    ampi_cuda_rounding how = { d.saturate, d.rounding == AMP_ROUND_STOCHASTIC, d.seed, d.offset,
        d.saturated };
    return ampi_cuda_launch(exec, "amp_cuda_convert", ampi_k_convert_with, grid, AMPI_CUDA_BLOCK, 0,
        m, how);
}

/* A conversion to nearest even, without desc. */
AMP_DEF amp_result amp_cuda_convert(amp_ref dst, amp_ref src, size_t n, const amp_exec* exec) {
    return amp_cuda_convert_with(dst, src, n, NULL, exec);
}

/* --- data of a batch --- */

/* y[i] = label i of x as int32; a thread takes one element of each pass of the grid. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_labels(int32_t* y, const void* x,
        amp_dtype t, size_t n) {
    ampi_ptx_grid_wait();
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
        i += (size_t)gridDim.x * blockDim.x)
        y[i] = ampi_label_fit(ampi_label_at(x, t, i));
}

/* The arithmetic of the CPU's. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_inputs(ampi_cuda_map m,
        amp_reading how) {
    ampi_ptx_grid_wait();
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < m.n;
        i += (size_t)gridDim.x * blockDim.x) {
        float v = m.a.dtype == AMP_U8    ? (float)((const uint8_t*)m.a.data)[i]
                  : m.a.dtype == AMP_F64 ? (float)((const double*)m.a.data)[i]
                                    : ampi_d_load(m.a, i);
        if (how.scale != 0.0f) v = __fmul_rn(v, how.scale);
        else if (m.a.dtype == AMP_U8) v = __fdiv_rn(v, 255.0f);
        if (how.constants) {
            const float* mean = how.constants + ampi_d_quotient(i, how.pixels) % how.channels;
            v = __fdiv_rn(__fsub_rn(v, mean[0]), mean[how.channels]);
        }
        ampi_d_store(m.y, i, v);
    }
}

/* Data of the host is read there, into a pinned buffer. */
AMPI_CUDA(load, amp_ref dst, amp_ref src, size_t n, int from_host, const amp_reading* how) {
    const ampi_cuda_map m = ampi_cuda_map_of(src, AMP_NONE, dst, n);
    const size_t bytes = n * amp_dtype_size(dst.dtype);
    const dim3 grid = ampi_cuda_grid(n, AMPI_CUDA_BLOCK), block(AMPI_CUDA_BLOCK);
    ampi_cuda_buffer* buffer;
    if (!from_host && dst.dtype == AMP_I32)
        return ampi_cuda_launch(exec, "amp_cuda: labels", ampi_k_labels, grid, block, 0,
            (int32_t*)dst.data, src.data, m.a.dtype, n);
    if (!from_host)
        return ampi_cuda_launch(exec, "amp_cuda: inputs", ampi_k_inputs, grid, block, 0, m, *how);
    AMPI_TRY(ampi_cuda_take_buffer(exec, bytes, &buffer));
    AMPI_TRY(ampi_cpu_load(amp_ref_of(buffer->data, dst.dtype), src, n, 1, how, exec));
    return ampi_cuda_send_buffer(exec, buffer, dst.data, bytes);
}

/* >>impl-gemm   The kernels of the matrix product, but Hopper's: plain, narrow, on the Tensor
   Cores.
   Words. place: where an element of an operand or of C lies. walk: a thread's way through an
   operand by places. feed: one operand on its way into shared memory. stage: the tiles of one step
   of k. piece: a part of k whose sums wait in the workspace. This room calls impl-device. */

/* Every product - gemm, batches of it, dense layers, convolutions - is an ampi_product of amp.h. It
   becomes an ampi_cuda_product here, which a kernel takes as its parameter. A kernel reads an
   operand in one of two ways:
   - in chunks: 16 aligned bytes of a stored row at a time;
   - by places: element by element, wherever the element lies, two neighbouring positions for a
     thread at a time. Images are read so, and matrices whose address or leading dimension is no
     multiple of 16 bytes; these are images of one row. */

/* --- places --- */

/* x / d for x < 2^31 by one multiplication: x * factor >> shift, factor = ceil(2^shift / d), with
   shift = 31 + ceil(log2 d). Then factor * d - 2^shift < d <= 2^(shift - 31), so x times it is
   below 2^shift. */
typedef struct ampi_cuda_divisor { uint32_t d, factor, shift; } ampi_cuda_divisor;

/* The divisor d with its factor and shift, for quotients without a division. */
AMPI_FN ampi_cuda_divisor ampi_cuda_divisor_of(uint32_t d) {
    ampi_cuda_divisor v = { d, 0, 31 };
    while ((uint64_t)1 << (v.shift - 31) < d) v.shift++;
    v.factor = (uint32_t)((((uint64_t)1 << v.shift) + d - 1) / d);
    return v;
}

AMPI_D uint32_t ampi_d_divide(uint32_t x, const ampi_cuda_divisor& by) {
    return (uint32_t)((uint64_t)x * by.factor >> by.shift);
}

/* A number in three digits: a stored row is (channel, kernel row, kernel column), a position
   (image, row, column). So a walk in equal steps needs additions only. */
typedef struct ampi_cuda_digits { uint32_t high, middle, low; } ampi_cuda_digits;

/* The host's form of ampi_d_digits_of. */
AMPI_FN ampi_cuda_digits ampi_cuda_digits_of(size_t i, uint32_t middle, uint32_t low) {
    ampi_cuda_digits d = { (uint32_t)(i / low / middle), (uint32_t)(i / low % middle),
        (uint32_t)(i % low) };
    return d;
}

/* Index i as three digits of the radices `middle` and `low`. */
AMPI_D ampi_cuda_digits ampi_d_digits_of(size_t i, uint32_t middle, uint32_t low) {
    size_t above = ampi_d_quotient(i, low), high = ampi_d_quotient(above, middle);
    ampi_cuda_digits d = { (uint32_t)high, (uint32_t)(above - high * middle),
        (uint32_t)(i - above * low) };
    return d;
}

/* The position `step` further on, digit by digit, with carries. */
AMPI_D void ampi_d_step(ampi_cuda_digits& d, const ampi_cuda_digits& step, uint32_t middle,
        uint32_t low) {
    uint32_t carry;
    d.low += step.low;
    carry = d.low >= low;
    if (carry) d.low -= low;
    d.middle += step.middle + carry;
    carry = d.middle >= middle;
    if (carry) d.middle -= middle;
    d.high += step.high + carry;
}

/* An operand; see ampi_operand and ampi_im2col. data is its first element. */
typedef struct ampi_cuda_operand {
    void*       data;
    size_t      stride;                           /* elements from one product of a batch to the
                                                     next */
    amp_dtype   dtype;
    int         along_k;                          /* k runs along stored rows, not across them */
    int         boxes;                            /* rows of halves, each from an aligned 16 bytes
                                                     on */
    int         chunks;                           /* such rows, all of whole chunks */
    size_t      chunk_below, chunk_step;          /* elements to a thread's other chunk, and to its
                                                     next tile */
    size_t      image_stride, channel_stride;     /* of a matrix: 0 and the leading dimension */
    uint32_t    images, channels, kernel_h, kernel_w;
    uint32_t    rows, cols, height, width;        /* positions of an image; its pixels */
    int         mul_h, mul_w, base_h, base_w;     /* position i sees pixels from i*mul + base on */
    int         step_h, step_w;                   /* pixels from kernel position to position */
    ampi_cuda_digits row_step, position_step;     /* of a thread: to its next stored row, and to its
                                                     next tile */
} ampi_cuda_operand;

/* What a position sees of its image: in stored row (c, a, b) the element at row y + a*step_h and
   column x + b*step_w. It is element `at` + c*channel_stride + a*step_h*width + b*step_w. */
typedef struct ampi_cuda_view {
    size_t at;
    int y, x;
} ampi_cuda_view;

enum { AMPI_CUDA_OUTSIDE = -(1 << 30) };          /* as y: no image there; sides are below 2^30 */

/* The window of an operand at a position: its top left pixel (y, x) and the element there.
   Positions behind the last image lie outside. */
AMPI_D ampi_cuda_view ampi_d_view(const ampi_cuda_operand& o, const ampi_cuda_digits& position) {
    ampi_cuda_view w;
    w.y = (int)position.middle * o.mul_h + o.base_h;
    w.x = (int)position.low * o.mul_w + o.base_w;
    w.at = position.high * o.image_stride + (size_t)((int64_t)w.y * o.width + w.x);
    if (position.high >= o.images) w.y = AMPI_CUDA_OUTSIDE;
    return w;
}

/* Is there an element in this stored row? Negative numbers are large unsigned ones. */
AMPI_D int ampi_d_inside(const ampi_cuda_operand& o, const ampi_cuda_digits& row,
        const ampi_cuda_view& w) {
    uint32_t y = (uint32_t)(w.y + (int)row.middle * o.step_h),
        x = (uint32_t)(w.x + (int)row.low * o.step_w);
    return row.high < o.channels && y < o.height && x < o.width;
}

/* The elements of two neighbouring positions, as they lie in memory, or widened; or zeros. */
AMPI_D void ampi_d_take(uint2& pair, amp_ref x, int first, size_t at, int second, size_t at2) {
    const uint16_t* halves = (const uint16_t*)x.data;
    pair.x = first ? halves[at] : 0u;
    pair.y = second ? halves[at2] : 0u;
}

/* Two elements of an operand as floats; zero for one that lies outside. */
AMPI_D void ampi_d_take(float2& pair, amp_ref x, int first, size_t at, int second, size_t at2) {
    pair.x = first ? ampi_d_load(x, at) : 0.0f;
    pair.y = second ? ampi_d_load(x, at2) : 0.0f;
}

/* A thread's way through an operand: N pairs of each tile, one below the other. Along k, its stored
   rows are the same in each tile and the positions go on; across k it is the other way round. */
typedef struct ampi_cuda_walk {
    void* data;
    ampi_cuda_digits row, position;               /* of the first pair of the next tile */
    ampi_cuda_view view[2];                       /* of that position and the next */
} ampi_cuda_walk;

/* The windows at a walk's position and at the next one. */
AMPI_D void ampi_d_walk_views(ampi_cuda_walk& w, const ampi_cuda_operand& o) {
    const ampi_cuda_digits one = { 0, 0, 1 };
    ampi_cuda_digits next = w.position;
    ampi_d_step(next, one, o.rows, o.cols);
    w.view[0] = ampi_d_view(o, w.position);
    w.view[1] = ampi_d_view(o, next);
}

/* A walk over operand o of batch z starts at this row and this position. */
AMPI_D void ampi_d_walk_begin(ampi_cuda_walk& w, const ampi_cuda_operand& o, size_t z, size_t row,
        size_t position) {
    w.data = (unsigned char*)o.data + z * o.stride * (o.dtype == AMP_F32 ? 4u : 2u);
    w.row = ampi_d_digits_of(row, o.kernel_h, o.kernel_w);
    w.position = ampi_d_digits_of(position, o.rows, o.cols);
    ampi_d_walk_views(w, o);
}

/* This thread's N pairs of a tile, read from the operand; the walk moves on by one step of k. */
template <int N, typename V>
AMPI_D void ampi_d_walk_tile(V (&v)[N], ampi_cuda_walk& w, const ampi_cuda_operand& o) {
    ampi_cuda_digits row = w.row;
    for (int u = 0; u < N; u++) {
        size_t offset = (size_t)((int64_t)((int)row.middle * o.step_h) * o.width
            + (int)row.low * o.step_w);
        size_t at = row.high * o.channel_stride + offset;
        ampi_d_take(v[u], { w.data, o.dtype }, ampi_d_inside(o, row, w.view[0]), at + w.view[0].at,
            ampi_d_inside(o, row, w.view[1]), at + w.view[1].at);
        ampi_d_step(row, o.row_step, o.kernel_h, o.kernel_w);
    }
    if (o.along_k) {
        ampi_d_step(w.position, o.position_step, o.rows, o.cols);
        ampi_d_walk_views(w, o);
    } else {
        w.row = row;
    }
}

/* --- the product --- */

/* See ampi_product. C is cut into tiles, k into steps of a tile's depth; with pieces > 1 a block
   forms one piece of the sum over k: sums[piece][product of the batch][i][j]. */
typedef struct ampi_cuda_product {
    size_t m, n, k, batch;                        /* C is m x n, batch products of them */
    ampi_cuda_operand a, b;
    float alpha, beta;
    amp_ref c;
    size_t ldc, c_stride;                         /* elements from row to row, product to product */
    size_t part, part_stride;                     /* `part` columns to an image: n of a matrix;
                                                     elements from image to image */
    size_t cols, next_row, column;                /* see ampi_columns */
    int apart;                                    /* columns of an image are no neighbours */
    amp_ref bias;                                 /* one a column, or if bias_per_row one a row */
    size_t bias_stride;                           /* elements from product to product */
    int bias_per_row, epilogue, bf16;             /* an amp_cuda_epilogue; A and B are bf16 */
    uint32_t tiles_m, tiles_n;                    /* down and across C */
    uint32_t steps, pieces;                       /* of k: steps of one piece, pieces */
    float* sums;                                  /* of pieces, in the workspace */
} ampi_cuda_product;

/* A block's tile, (row, column) in tiles, and its part of k: step `from` and the next ones. In a
   grid of a block for each tile, blockIdx.y is the number in the batch, blockIdx.z the piece. */
typedef struct ampi_cuda_tile { uint32_t row, column, from, steps; } ampi_cuda_tile;

/* Blocks run roughly in the order of their number: eight tiles below each other, then the next
   column. So those under way together share rows of A and columns of B in the L2 cache. */
enum { AMPI_CUDA_TILE_ROWS = 8 };

/* The tile of C that `block` computes, and the steps of k of this piece. Blocks go down bands of
   rows, so that neighbours share columns of C. */
AMPI_D ampi_cuda_tile ampi_d_tile_at(const ampi_cuda_product& p, uint32_t depth, uint32_t block,
        uint32_t piece) {
    uint32_t band = AMPI_CUDA_TILE_ROWS * p.tiles_n, first = block / band * AMPI_CUDA_TILE_ROWS;
    uint32_t rows = p.tiles_m - first < AMPI_CUDA_TILE_ROWS ? p.tiles_m - first
        : (uint32_t)AMPI_CUDA_TILE_ROWS;
    uint32_t inside = block % band, all = (uint32_t)((p.k + depth - 1) / depth);
    ampi_cuda_tile t;
    t.row = first + inside % rows;
    t.column = inside / rows;
    t.from = piece * p.steps;
    t.steps = t.from >= all ? 0 : all - t.from < p.steps ? all - t.from : p.steps;
    return t;
}

/* This block's tile; the piece is blockIdx.z. */
AMPI_D ampi_cuda_tile ampi_d_tile(const ampi_cuda_product& p, uint32_t depth) {
    uint32_t block = blockIdx.x;
    AMPI_D_RENEW(block);
    return ampi_d_tile_at(p, depth, block, blockIdx.z);
}

/* --- from sums to C --- */

/* Eight neighbours of row i of C, as far as there are: `whole` if they are neighbours in memory
   too. */
typedef struct ampi_cuda_place {
    size_t row, j, at, count;
    int whole;
} ampi_cuda_place;

/* Element of C in a row that begins at `row` and in column j; columns may be pixels of images. */
AMPI_D size_t ampi_d_c_at(const ampi_cuda_product& p, size_t row, size_t j) {
    /* a matrix is spared the division */
    const size_t image = p.part == p.n ? 0 : ampi_d_quotient(j, p.part);
    size_t pixel = j - image * p.part;
    if (p.apart) {
        const size_t y = ampi_d_quotient(pixel, p.cols);
        pixel = y * p.next_row + (pixel - y * p.cols) * p.column;
    }
    return row + image * p.part_stride + pixel;
}

/* Where eight elements of C lie, row i and columns j up to j+7 of batch z. whole: they are
   neighbours in memory. */
AMPI_D ampi_cuda_place ampi_d_place(const ampi_cuda_product& p, size_t z, size_t i, size_t j) {
    ampi_cuda_place c;
    c.row = z * p.c_stride + i * p.ldc;
    c.j = j;
    c.at = ampi_d_c_at(p, c.row, j);
    c.count = p.n - j < 8 ? p.n - j : 8;
    c.whole = (p.part == p.n && !p.apart) || ampi_d_c_at(p, c.row, j + c.count - 1) == c.at
        + c.count - 1;
    return c;
}

/* Those eight elements of C as floats; zero behind the last column. */
AMPI_D void ampi_d_c_load8(float (&v)[8], const ampi_cuda_product& p, const ampi_cuda_place& c) {
    if (c.whole) { ampi_d_load8(v, p.c, c.at, c.at + c.count); return; }
    for (int l = 0; l < 8; l++)
        v[l] = (size_t)l < c.count ? ampi_d_load(p.c,
            ampi_d_c_at(p, c.row, c.j + (size_t)l)) : 0.0f;
}

/* Those eight elements of C, rounded to its type. */
AMPI_D void ampi_d_c_store8(const float (&v)[8], const ampi_cuda_product& p,
        const ampi_cuda_place& c) {
    if (c.whole) { ampi_d_store8(p.c, c.at, c.at + c.count, v); return; }
    for (int l = 0; l < 8; l++)
        if ((size_t)l < c.count)
            ampi_d_store(p.c, ampi_d_c_at(p, c.row, c.j + (size_t)l), v[l]);
}

/* The biases of eight elements of C, in row i from column j on. */
AMPI_D void ampi_d_bias8(float (&v)[8], const ampi_cuda_product& p, size_t z, size_t i, size_t j) {
    size_t at = z * p.bias_stride;
    if (!p.bias_per_row) { ampi_d_load8(v, p.bias, at + j, at + p.n); return; }
    v[0] = ampi_d_load(p.bias, at + i);
    for (int l = 1; l < 8; l++) v[l] = v[0];
}

/* Activation f of the epilogue at x. */
AMPI_D float ampi_d_activation(int f, float x) {
    switch ((amp_cuda_epilogue)f) {
        case AMP_CUDA_EPILOGUE_NONE: break;
        case AMP_CUDA_EPILOGUE_RELU: return ampi_act_relu(1, x);
        case AMP_CUDA_EPILOGUE_GELU: return ampi_act_gelu(1, x);
        case AMP_CUDA_EPILOGUE_GELU_TANH: return ampi_act_gelu_tanh(1, x);
    }
    return x;
}

/* The eight values rotate, so that the function's code is there once. */
AMPI_D void ampi_d_activation8(float (&v)[8], int f) {
    AMPI_ROLLED
    for (int i = 0; i < 8; i++) {
        float first = ampi_d_activation(f, v[0]);
        for (int l = 0; l < 7; l++) v[l] = v[l + 1];
        v[7] = first;
    }
}

/* v = alpha * sum + beta * C (or + bias, or both), rounded as on the CPU: one product, then
   fused. */
AMPI_D void ampi_d_epilogue8_at(const ampi_cuda_product& p, const ampi_cuda_place& c, size_t z,
        size_t i, float (&v)[8]) {
    float add[8];
    for (int l = 0; l < 8; l++)
        v[l] = p.k == 0 ? (p.beta != 0.0f ? -0.0f : 0.0f)
            : __fmul_rn(p.alpha, ampi_clean_nan(v[l]));
    if (p.beta != 0.0f) {
        ampi_d_c_load8(add, p, c);
        for (int l = 0; l < 8; l++) v[l] = ampi_fma(1, p.beta, add[l], v[l]);
    }
    if (p.bias.data) {
        ampi_d_bias8(add, p, z, i, c.j);
        for (int l = 0; l < 8; l++) v[l] = __fadd_rn(v[l], add[l]);
    }
    if (p.epilogue != AMP_CUDA_EPILOGUE_NONE) ampi_d_activation8(v, p.epilogue);
    for (int l = 0; l < 8; l++) v[l] = ampi_clean_nan(v[l]);
    ampi_d_c_store8(v, p, c);
}

/* ampi_d_epilogue8_at for row i and columns j up to j+7 of batch z. */
AMPI_D void ampi_d_epilogue8(const ampi_cuda_product& p, size_t z, size_t i, size_t j,
        float (&v)[8]) {
    ampi_d_epilogue8_at(p, ampi_d_place(p, z, i, j), z, i, v);
}

/* Eight sums of product z: into C, or as part of a piece. */
AMPI_D void ampi_d_deliver8(const ampi_cuda_product& p, uint32_t z, uint32_t piece, size_t i,
        size_t j, float (&v)[8]) {
    if (i >= p.m || j >= p.n) return;
    if (p.pieces == 1) {
        ampi_d_epilogue8(p, z, i, j, v);
    } else {
        size_t row = ((piece * p.batch + z) * p.m + i) * p.n;
        ampi_d_store8({ p.sums, AMP_F32 }, row + j, row + p.n, v);
    }
}

/* The pieces of one sum, in ascending order, 16 loads at a time under way together: -0 adds
   nothing. */
enum { AMPI_CUDA_PIECES_AHEAD = 16 };

/* The sum of `pieces` numbers that lie `apart` floats from each other, in ascending order. */
AMPI_D float ampi_d_add_pieces(const float* first, size_t apart, uint32_t pieces) {
    float sum = -0.0f;
    for (uint32_t s = 0; s < pieces; s += AMPI_CUDA_PIECES_AHEAD) {
        float next[AMPI_CUDA_PIECES_AHEAD];
        AMPI_D_UNROLL
        for (uint32_t u = 0; u < AMPI_CUDA_PIECES_AHEAD; u++)
            next[u] = s + u < pieces ? first[(s + u) * apart] : -0.0f;
        AMPI_D_UNROLL
        for (uint32_t u = 0; u < AMPI_CUDA_PIECES_AHEAD; u++) sum = __fadd_rn(sum, next[u]);
    }
    return sum;
}

/* A thread for each sum, as C is small: it has fewer tiles than the GPU has multiprocessors. Then
   the first warp applies the epilogue to the block's 32 eights. */
enum { AMPI_CUDA_PIECES_EIGHTS = (int)AMPI_CUDA_BLOCK / 8 };

/* C from the sums of pieces of k: eight threads add eight columns, then one thread finishes
   them. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_gemm_pieces(ampi_cuda_product p) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(float, shared);
    const size_t eights = (p.n + 7) / 8, all = p.batch * p.m * eights, apart = p.batch * p.m * p.n;
    const size_t first = (size_t)blockIdx.x * AMPI_CUDA_PIECES_EIGHTS;
    size_t q = first + threadIdx.x / 8, row = ampi_d_quotient(q, eights),
        j = (q - row * eights) * 8 + threadIdx.x % 8;
    float v[8];
    shared[threadIdx.x] = q < all && j < p.n ? ampi_d_add_pieces(p.sums + row * p.n + j, apart,
        p.pieces) : 0.0f;
    __syncthreads();
    q = first + threadIdx.x;
    if (threadIdx.x >= AMPI_CUDA_PIECES_EIGHTS || q >= all) return;
    row = ampi_d_quotient(q, eights);
    for (int l = 0; l < 8; l++) v[l] = shared[threadIdx.x * 8 + (unsigned)l];
    const size_t z = ampi_d_quotient(row, p.m);
    ampi_d_epilogue8(p, z, row - z * p.m, (q - row * eights) * 8, v);
}

/* --- plain kernel --- */

/* Any types, FP32 arithmetic: 256 threads form 64 x 64 of C, 4 x 4 each, 16 of k at a time. Element
   k of row i of A lies at a[k][i] in shared memory, and of column j of B at b[k][j]. Each sum runs
   over k in the CPU's order: ascending. */
enum { AMPI_CUDA_PLAIN = 64, AMPI_CUDA_PLAIN_DEPTH = 16, AMPI_CUDA_PLAIN_LD = 68,
       AMPI_CUDA_PLAIN_PAIRS = 2, AMPI_CUDA_PLAIN_TILE =
           (int)AMPI_CUDA_PLAIN_LD * (int)AMPI_CUDA_PLAIN_DEPTH };

/* A thread's first pair of a tile of x by depth: its stored row and its position in the tile. */
AMPI_D void ampi_d_first_pair(const ampi_cuda_operand& o, uint32_t x, uint32_t depth, uint32_t* row,
        uint32_t* position) {
    uint32_t pairs = (o.along_k ? depth : x) / 2;
    *row = threadIdx.x / pairs;
    *position = threadIdx.x % pairs * 2;
}

/* The walk of this thread for a tile: `width` rows or columns from x on, `depth` steps of k from
   k on. */
AMPI_D void ampi_d_walk_tile_begin(ampi_cuda_walk& w, const ampi_cuda_operand& o, size_t z,
        size_t x, size_t k, uint32_t width, uint32_t depth) {
    uint32_t row, position;
    ampi_d_first_pair(o, width, depth, &row, &position);
    ampi_d_walk_begin(w, o, z, (o.along_k ? x : k) + row, (o.along_k ? k : x) + position);
}

/* This thread's pairs go to the tile in shared memory, element (k, x) at k * AMPI_CUDA_PLAIN_LD
   + x. */
AMPI_D void ampi_d_plain_put(float* tile, const ampi_cuda_operand& o,
        const float2 (&v)[AMPI_CUDA_PLAIN_PAIRS]) {
    uint32_t row, position;
    ampi_d_first_pair(o, AMPI_CUDA_PLAIN, AMPI_CUDA_PLAIN_DEPTH, &row, &position);
    for (int u = 0; u < AMPI_CUDA_PLAIN_PAIRS; u++) {
        if (o.along_k) {
            tile[position * AMPI_CUDA_PLAIN_LD + row] = v[u].x;
            tile[(position + 1) * AMPI_CUDA_PLAIN_LD + row] = v[u].y;
            row += AMPI_CUDA_BLOCK / (AMPI_CUDA_PLAIN_DEPTH / 2);
        } else {
            *(float2*)(tile + row * AMPI_CUDA_PLAIN_LD + position) = v[u];
            row += AMPI_CUDA_BLOCK / (AMPI_CUDA_PLAIN / 2);
        }
    }
}

/* A thread's 4x4 sums, over `depth` steps of k in ascending order; a and b point to its first
   row and column. */
AMPI_D void ampi_d_plain_multiply(float (&sum)[4][4], const float* a, const float* b,
        uint32_t depth) {
    for (uint32_t k = 0; k < depth; k++) {
        const float4 x = *(const float4*)(a + k * AMPI_CUDA_PLAIN_LD);
        const float4 y = *(const float4*)(b + k * AMPI_CUDA_PLAIN_LD);
        const float left[4] = { x.x, x.y, x.z, x.w }, right[4] = { y.x, y.y, y.z, y.w };
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sum[i][j] = ampi_fma(1, left[i], right[j], sum[i][j]);
    }
}

/* Four rows of four columns each: the neighbour thread has the other half of an eight. Of two rows
   each thread gets one; then the next two move up. */
AMPI_D void ampi_d_plain_deliver(const ampi_cuda_product& p, float (&sum)[4][4], size_t i,
        size_t j) {
    const uint32_t odd = threadIdx.x & 1u;
    AMPI_ROLLED
    for (uint32_t r = 0; r < 4; r += 2) {
        float v[8];
        for (int l = 0; l < 4; l++) {
            float mine = odd ? sum[1][l] : sum[0][l], given = odd ? sum[0][l] : sum[1][l];
            float got = __shfl_xor_sync(0xffffffffu, given, 1);
            v[l] = odd ? got : mine;
            v[l + 4] = odd ? mine : got;
            sum[0][l] = sum[2][l];
            sum[1][l] = sum[3][l];
        }
        ampi_d_deliver8(p, blockIdx.y, blockIdx.z, i + r + odd, j, v);
    }
}

/* C by FP32 cores, for any types: a block sums a tile of AMPI_CUDA_PLAIN rows and columns of C, a
   thread 4 x 4 elements of it, k ascending as amp_gemm does. A step is AMPI_CUDA_PLAIN_DEPTH of k.
   Two stages in shared memory take turns, so that one barrier a step is enough: a thread writes to
   one while others may still read the other. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_gemm_plain(ampi_cuda_product p) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(float, shared);

    /* the tile begins at row i and column j of C, the thread's part x rows and y columns further */
    const ampi_cuda_tile t = ampi_d_tile(p, AMPI_CUDA_PLAIN_DEPTH);
    const size_t i = (size_t)t.row * AMPI_CUDA_PLAIN, j = (size_t)t.column * AMPI_CUDA_PLAIN;
    const uint32_t x = threadIdx.x / 16 * 4, y = threadIdx.x % 16 * 4;
    float sum[4][4] = {};

    /* the thread's share of a step's elements of A and B, on their way to a stage */
    float2 a[AMPI_CUDA_PLAIN_PAIRS], b[AMPI_CUDA_PLAIN_PAIRS];
    ampi_cuda_walk wa, wb;
    ampi_d_walk_tile_begin(wa, p.a, blockIdx.y, i, 0, AMPI_CUDA_PLAIN, AMPI_CUDA_PLAIN_DEPTH);
    ampi_d_walk_tile_begin(wb, p.b, blockIdx.y, j, 0, AMPI_CUDA_PLAIN, AMPI_CUDA_PLAIN_DEPTH);
    if (t.steps) { ampi_d_walk_tile(a, wa, p.a); ampi_d_walk_tile(b, wb, p.b); }

    for (uint32_t s = 0; s < t.steps; s++) {
        float* tile = shared + (s & 1u) * 2 * AMPI_CUDA_PLAIN_TILE;  /* of A, then of B */
        size_t left = p.k - (size_t)s * AMPI_CUDA_PLAIN_DEPTH;       /* of k, from this step on */
        ampi_d_plain_put(tile, p.a, a);
        ampi_d_plain_put(tile + AMPI_CUDA_PLAIN_TILE, p.b, b);
        __syncthreads();

        /* the next step's loads are under way while this one is multiplied */
        if (s + 1 < t.steps) { ampi_d_walk_tile(a, wa, p.a); ampi_d_walk_tile(b, wb, p.b); }
        ampi_d_plain_multiply(sum, tile + x, tile + AMPI_CUDA_PLAIN_TILE + y,
            left < AMPI_CUDA_PLAIN_DEPTH ? (uint32_t)left : (uint32_t)AMPI_CUDA_PLAIN_DEPTH);
    }

    /* two neighbour threads deliver eights of columns together */
    ampi_d_plain_deliver(p, sum, i + x, j + (y & ~7u));
}

/* --- narrow products --- */

/* The last layer of a classifier and its gradient fill no tile of the Tensor Cores. Here p.steps
   threads, neighbours in a warp, form an element of C: each takes every so many places of k,
   ascending; then they are added by halves. */
enum { AMPI_CUDA_NARROW = 16 };

/* Every p.steps-th product of row i and column j from k = lane on, summed. */
template <int BF16>
AMPI_D float ampi_d_narrow_sum(const ampi_cuda_product& p, size_t i, size_t j, uint32_t lane) {
    const size_t a_step = p.a.along_k ? 1 : p.a.channel_stride, b_step = p.b.along_k ? 1
        : p.b.channel_stride;
    const size_t row = i * (p.a.along_k ? p.a.channel_stride : 1),
        column = j * (p.b.along_k ? p.b.channel_stride : 1);
    const uint16_t* a = (const uint16_t*)p.a.data + blockIdx.y * p.a.stride + row;
    const uint16_t* b = (const uint16_t*)p.b.data + blockIdx.y * p.b.stride + column;
    float sum = 0.0f;
    AMPI_D_UNROLL4
    for (size_t q = lane; q < p.k; q += p.steps)
        sum = ampi_fma(1, BF16 ? ampi_float((uint32_t)a[q * a_step] << 16)
            : ampi_ptx_f32_from_f16(a[q * a_step]), BF16 ? ampi_float((uint32_t)b[q * b_step] << 16)
            : ampi_ptx_f32_from_f16(b[q * b_step]), sum);
    return sum;
}

/* What ampi_d_epilogue8 does, for one element. */
AMPI_D void ampi_d_narrow_epilogue(const ampi_cuda_product& p, size_t i, size_t j, float sum) {
    const size_t z = blockIdx.y, at = ampi_d_c_at(p, z * p.c_stride + i * p.ldc, j);
    float v = __fmul_rn(p.alpha, ampi_clean_nan(sum));
    if (p.beta != 0.0f) v = ampi_fma(1, p.beta, ampi_d_load(p.c, at), v);
    if (p.bias.data)
        v = __fadd_rn(v, ampi_d_load(p.bias, z * p.bias_stride + (p.bias_per_row ? i : j)));
    ampi_d_store(p.c, at, ampi_clean_nan(ampi_d_activation(p.epilogue, v)));
}

/* C with few rows or columns: p.steps threads sum one element, then add their parts in a tree. */
template <int BF16>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_gemm_narrow(ampi_cuda_product p) {
    ampi_ptx_grid_wait();
    const size_t e = ((size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x) / p.steps,
        i = ampi_d_quotient(e, p.n);
    const uint32_t lane = threadIdx.x % p.steps;
    float sum = i < p.m ? ampi_d_narrow_sum<BF16>(p, i, e - i * p.n, lane) : 0.0f;
    for (uint32_t step = p.steps / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, (int)step);
    if (i < p.m && lane == 0) ampi_d_narrow_epilogue(p, i, e - i * p.n, sum);
}

/* --- tensor Core kernel, shared memory --- */

/* A block of 2*X threads forms X x X of C, X = 64 or 128; each of its X/16 warps an X/2 x 32 part,
   in 16 x 8 of the mma instruction. k goes in steps of 32. A circular buffer of three stages holds
   the tiles of A and of B that are multiplied and those under way; each is X x 32 halves, in the
   order in which the operand lies in memory:
     along k    X rows of 32 halves: chunk c (eight, 16 bytes) of row r lies at chunk c ^ (r/2 % 4);
     across k   32 rows of X halves: chunk c of row r lies at chunk c ^ (r % 8).
   ldmatrix reads chunk c of eight rows at a time. Two rows of the first form fill the 32 banks, and
   r/2 % 4 takes all four values twice, once in either half; a row of the second form fills the
   banks once or twice, and r % 8 takes all eight values: so the eight chunks lie in different
   banks, in both forms. Writes take whole rows and meet no conflict either. */
enum { AMPI_CUDA_DEPTH = 32, AMPI_CUDA_STAGES = 3, AMPI_CUDA_SLICE = 32, AMPI_CUDA_SLICE_LD = 40 };

/* Halves from the start of a tile to chunk `chunk` of row `row`; `width` is X. */
AMPI_D uint32_t ampi_d_chunk_at(int along_k, uint32_t width, uint32_t row, uint32_t chunk) {
    return along_k ? row * 32 + (chunk ^ (row / 2 & 3u)) * 8
        : row * width + (chunk ^ (row & 7u)) * 8;
}

/* A fragment is 16 x 16 of a tile as four 8 x 8 matrices: matrix q is the x half q % 2 and the k
   half q / 2 of A; for B the other way round. For lane l that means elements 2*(l%4) and the next
   along k of row or column l/4: what mma wants. Across k the rows in memory go along x, and
   ldmatrix transposes. This is where a lane's row of the fragment at (x, k = 0) lies in the tile, x
   a multiple of 32. */
AMPI_D uint32_t ampi_d_lane_at(int along_k, uint32_t width, uint32_t x, int is_b) {
    const uint32_t lane = threadIdx.x % 32, in = lane % 8, q = lane / 8;
    const uint32_t xh = is_b ? q / 2 : q & 1u, kh = is_b ? q & 1u : q / 2;
    return along_k ? ampi_d_chunk_at(1, width, x + xh * 8 + in, kh)
                   : ampi_d_chunk_at(0, width, kh * 8 + in, x / 8 + xh);
}

/* The fragment 16*i further along x and 16*h along k: whole rows further one way, two chunks the
   other way, which the swizzle turns into an exclusive or: the chunk so far has neither bit of 2*i,
   nor of 2*h. */
template <int X, int ALONG_K>
AMPI_D void ampi_d_fragment(uint32_t (&r)[4], const uint16_t* tile, uint32_t lane_at, uint32_t i,
        uint32_t h) {
    if (ALONG_K) ampi_ptx_ldmatrix_x4(r, tile + (lane_at ^ 16 * h) + i * 16 * AMPI_CUDA_DEPTH);
    else ampi_ptx_ldmatrix_x4_trans(r, tile + (lane_at ^ 16 * i) + h * 16 * X);
}

/* --- tensor Core kernel, feeding --- */

/* What one thread brings of each tile of one operand: two chunks, or eight pairs. `held` is on its
   way through registers: pairs always, chunks where there is no cp.async. */
typedef struct ampi_cuda_feed {
    ampi_cuda_walk walk;
    const uint16_t* from;                         /* the first chunk of the next tile; its stored
                                                     row and position */
    uint32_t row, position, at;                   /* at: where the first one goes in a stage, in
                                                     halves */
    uint2 held[8];
} ampi_cuda_feed;

/* The feed of this thread for one operand: rows or columns from x on, from k on, of batch z. */
template <int X, bool PLACES>
AMPI_D void ampi_d_feed_begin(ampi_cuda_feed& f, const ampi_cuda_operand& o, size_t z, size_t x,
        size_t k) {
    uint32_t row, column;
    if (PLACES && !o.chunks) {
        ampi_d_first_pair(o, X, AMPI_CUDA_DEPTH, &row, &column);
        ampi_d_walk_begin(f.walk, o, z, (o.along_k ? x : k) + row, (o.along_k ? k : x) + column);
        f.at = ampi_d_chunk_at(o.along_k, X, row, column / 8) + column % 8;
        return;
    }
    row = o.along_k ? threadIdx.x / 4 : threadIdx.x / (X / 8);
    column = o.along_k ? threadIdx.x % 4 : threadIdx.x % (X / 8);
    f.row = (uint32_t)(o.along_k ? x : k) + row;
    f.position = (uint32_t)(o.along_k ? k : x) + column * 8;
    f.from = (const uint16_t*)o.data + z * o.stride + (size_t)f.row * o.channel_stride + f.position;
    f.at = ampi_d_chunk_at(o.along_k, X, row, column);
}

/* A chunk, or zeros. */
AMPI_D void ampi_d_chunk(uint2* held, uint16_t* stage, const uint16_t* from, int there) {
#if __CUDA_ARCH__ >= 800
    (void)held;
    if (there) ampi_ptx_cp_async16(stage, from, 16);
    else *(uint4*)stage = make_uint4(0, 0, 0, 0);
#else
    (void)stage;
    const uint4 q = there ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
    held[0] = make_uint2(q.x, q.y);
    held[1] = make_uint2(q.z, q.w);
#endif
}

/* The second chunk lies half a tile below the first, where the swizzle is the same. */
template <int X>
AMPI_D void ampi_d_feed_chunks(ampi_cuda_feed& f, const ampi_cuda_operand& o, uint16_t* stage) {
    const uint32_t below = o.along_k ? X / 2 : AMPI_CUDA_DEPTH / 2;
    for (uint32_t u = 0; u < 2; u++)
        ampi_d_chunk(f.held + 2 * u, stage + f.at + u * 16 * X, f.from + u * o.chunk_below,
            f.position < o.cols && f.row + u * below < o.channels);
    f.from += o.chunk_step;
    if (o.along_k) f.position += AMPI_CUDA_DEPTH;
    else f.row += AMPI_CUDA_DEPTH;
}

/* Sends the next tile on its way to a stage. */
template <int X, bool PLACES>
AMPI_D void ampi_d_feed_start(ampi_cuda_feed& f, const ampi_cuda_operand& o, uint16_t* stage) {
    if (PLACES && !o.chunks) ampi_d_walk_tile(f.held, f.walk, o);
    else ampi_d_feed_chunks<X>(f, o, stage);
}

/* Puts down what is held. From pair to pair a thread's row grows by X/8 along k; across k by 4,
   which inverts the third bit of the swizzle. */
template <int X, bool PLACES>
AMPI_D void ampi_d_feed_store(const ampi_cuda_feed& f, const ampi_cuda_operand& o,
        uint16_t* stage) {
    if (PLACES && !o.chunks) {
        for (uint32_t u = 0; u < 8; u++)
            *(uint32_t*)(stage + (f.at ^ (o.along_k ? 0u : (u & 1u) * 32)) + u * 4 * X)
                = f.held[u].x | f.held[u].y << 16;
        return;
    }
#if __CUDA_ARCH__ < 800
    for (uint32_t u = 0; u < 2; u++)
        *(uint4*)(stage + f.at + u * 16 * X) = make_uint4(f.held[2 * u].x, f.held[2 * u].y,
                                                          f.held[2 * u + 1].x, f.held[2 * u + 1].y);
#endif
}

/* --- tensor Core kernel, multiplying --- */

/* d += a * b, 16 x 8, with 16 of k. */
template <int BF16>
AMPI_D void ampi_d_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    if (BF16) ampi_ptx_mma_bf16(d, a, b);
    else ampi_ptx_mma_f16(d, a, b);
#else
    const uint32_t low[2] = { a[0], a[1] }, high[2] = { a[2], a[3] };
    ampi_ptx_mma_f16_k8(d, low, b[0]);
    ampi_ptx_mma_f16_k8(d, high, b[1]);
#endif
}

/* One stage: 32 of k for this warp's part of the tile. */
template <int X, int A_ALONG_K, int B_ALONG_K, int BF16>
AMPI_D void ampi_d_multiply_as(float (&sum)[X / 32][4][4], const uint16_t* stage, uint32_t a_at,
        uint32_t b_at) {
    for (uint32_t h = 0; h < AMPI_CUDA_DEPTH / 16; h++) {
        uint32_t left[X / 32][4], r[4], right[4][2];
        for (uint32_t i = 0; i < X / 32; i++)
            ampi_d_fragment<X, A_ALONG_K>(left[i], stage, a_at, i, h);
        for (uint32_t j = 0; j < 4; j += 2) {
            ampi_d_fragment<X, B_ALONG_K>(r, stage, b_at, j / 2, h);
            right[j][0] = r[0]; right[j][1] = r[1];
            right[j + 1][0] = r[2]; right[j + 1][1] = r[3];
        }
        for (uint32_t i = 0; i < X / 32; i++)
            for (uint32_t j = 0; j < 4; j++) ampi_d_mma<BF16>(sum[i][j], left[i], right[j]);
    }
}

/* The forms of the operands are chosen once for 32 of k, here and not as kernels of their own: the
   choice costs a few instructions beside a hundred, and there are eight of them. */
template <int X, int BF16>
AMPI_D void ampi_d_multiply_type(float (&sum)[X / 32][4][4], const ampi_cuda_product& p,
        const uint16_t* stage, uint32_t a_at, uint32_t b_at) {
    if (p.a.along_k) {
        if (p.b.along_k) ampi_d_multiply_as<X, 1, 1, BF16>(sum, stage, a_at, b_at);
        else ampi_d_multiply_as<X, 1, 0, BF16>(sum, stage, a_at, b_at);
    } else {
        if (p.b.along_k) ampi_d_multiply_as<X, 0, 1, BF16>(sum, stage, a_at, b_at);
        else ampi_d_multiply_as<X, 0, 0, BF16>(sum, stage, a_at, b_at);
    }
}

/* ampi_d_multiply_type for the type of p's operands. */
template <int X>
AMPI_D void ampi_d_multiply(float (&sum)[X / 32][4][4], const ampi_cuda_product& p,
        const uint16_t* stage, uint32_t a_at, uint32_t b_at) {
#if __CUDA_ARCH__ >= 800
    if (p.bf16) { ampi_d_multiply_type<X, 1>(sum, p, stage, a_at, b_at); return; }
#endif
    ampi_d_multiply_type<X, 0>(sum, p, stage, a_at, b_at);
}

/* A warp's X/2 rows and 32 columns of sums go to C, from row i and column j on: through its slice
   of shared memory, AMPI_CUDA_SLICE = 32 rows at a time, so that each lane gets eights of a row.
   sum[r][c][e] of a lane is element e of the mma at rows 16r, columns 8c: row lane/4 + 8*(e/2),
   column 2*(lane%4) + e%2 of it. Lane 5, for one, holds columns 8c + 2 and 8c + 3: of row 16r + 1
   in e = 0, 1, of row 16r + 9 in e = 2, 3. From the slice it takes columns 8 to 15 of rows 1, 9,
   17 and 25. */
template <int X>
AMPI_D void ampi_d_mma_deliver(const ampi_cuda_product& p, float (&sum)[X / 32][4][4], float* slice,
        size_t i, size_t j) {
    const uint32_t lane = threadIdx.x % 32, column = lane % 4 * 8;
    float* corner = slice + lane / 4 * AMPI_CUDA_SLICE_LD + lane % 4 * 2;
    AMPI_ROLLED
    for (uint32_t down = 0; down < X / 2; down += AMPI_CUDA_SLICE) {
        /* The slice is 4 x 4 blocks of 8 x 8: block q, at block row q/4 and block column q%4, gets
           two neighbouring columns from each lane. */
        for (uint32_t q = 0; q < 16; q++)
            *(float2*)(corner + q / 4 * 8 * AMPI_CUDA_SLICE_LD + q % 4 * 8)
                = make_float2(sum[q / 8][q % 4][q / 4 % 2 * 2],
                    sum[q / 8][q % 4][q / 4 % 2 * 2 + 1]);

        /* The next 32 rows move to where the first ones were: registers have no index at run
           time. */
        for (uint32_t next = 2; next < X / 32; next++)
            for (uint32_t q = 0; q < 16; q++) sum[next - 2][q / 4][q % 4] = sum[next][q / 4][q % 4];
        __syncwarp();

        /* columns [column, column + 8) of every eighth row */
        AMPI_ROLLED
        for (uint32_t row = lane / 4; row < AMPI_CUDA_SLICE; row += 8) {
            const float4* from = (const float4*)(slice + row * AMPI_CUDA_SLICE_LD + column);
            const float4 low = from[0], high = from[1];
            float v[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
            ampi_d_deliver8(p, blockIdx.y, blockIdx.z, i + down + row, j + column, v);
        }
        __syncwarp();
    }
}

/* C by Tensor Cores: a block of 2X threads sums a tile of X x X elements, a warp X/2 rows and 32
   columns of it. A step is AMPI_CUDA_DEPTH of k; its stage in shared memory holds `half` elements
   of A, then of B. Stages form a ring of AMPI_CUDA_STAGES: the copies of `ahead` steps are under
   way while one is multiplied. The barrier of a step says two things: its stage has arrived for
   all, and the stage of the step before is free. PLACES: operands may be images. */
template <int X, bool PLACES>
static __global__ void __launch_bounds__(2 * X, PLACES ? 1 : 256 / X)
        ampi_k_gemm_mma(ampi_cuda_product p) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(uint16_t, shared);
    const uint32_t half = X * AMPI_CUDA_DEPTH, ahead = AMPI_CUDA_STAGES - 1,
        warp = threadIdx.x / 32;

    /* the warp's part begins at row x and column y of the tile; in a stage this lane's first
       fragments lie at a_at and b_at */
    const uint32_t x = warp % 2 * (X / 2), y = warp / 2 * 32;
    const uint32_t a_at = ampi_d_lane_at(p.a.along_k, X, x, 0),
        b_at = ampi_d_lane_at(p.b.along_k, X, y, 1) + half;
    float sum[X / 32][4][4] = {};

    ampi_cuda_tile t = ampi_d_tile(p, AMPI_CUDA_DEPTH);
    ampi_cuda_feed fa, fb;
    ampi_d_feed_begin<X, PLACES>(fa, p.a, blockIdx.y, (size_t)t.row * X,
        (size_t)t.from * AMPI_CUDA_DEPTH);
    ampi_d_feed_begin<X, PLACES>(fb, p.b, blockIdx.y, (size_t)t.column * X,
        (size_t)t.from * AMPI_CUDA_DEPTH);

    /* turn s fetches step s, if there is one, and multiplies step s - ahead */
    for (uint32_t s = 0, fill = 0; s < t.steps + ahead; s++) {
        uint16_t* stage = shared + fill * 2 * half;              /* of step s */
        fill = fill + 1 == AMPI_CUDA_STAGES ? 0 : fill + 1;      /* of step s - ahead */
        if (s >= ahead) {
            ampi_ptx_cp_async_wait<AMPI_CUDA_STAGES - 2>();
            __syncthreads();
        }

        /* loads that the copy unit cannot do wait in registers while the product runs */
        if (s < t.steps) {
            ampi_d_feed_start<X, PLACES>(fa, p.a, stage);
            ampi_d_feed_start<X, PLACES>(fb, p.b, stage + half);
        }
        ampi_ptx_cp_async_commit();
        if (s >= ahead) ampi_d_multiply<X>(sum, p, shared + fill * 2 * half, a_at, b_at);
        if (s < t.steps) {
            ampi_d_feed_store<X, PLACES>(fa, p.a, stage);
            ampi_d_feed_store<X, PLACES>(fb, p.b, stage + half);
        }
    }

    __syncthreads();      /* the last stage has been read: slices lie there now */
    t = ampi_d_tile(p, AMPI_CUDA_DEPTH);  /* again, which costs no registers in the loop */
    ampi_d_mma_deliver<X>(p, sum, (float*)shared + warp * AMPI_CUDA_SLICE * AMPI_CUDA_SLICE_LD,
                          (size_t)t.row * X + x, (size_t)t.column * X + y);
}

/* >>impl-hopper The kernel of the matrix product for compute capability 9.0, in code for sm_90a
   alone.
   Words. box: 64 x 64 halves that the copy engine brings at once. warpgroup: four warps that
   multiply together. pipeline: stages in shared memory, with a barrier full and a barrier empty
   each. unit: a tile of C of one of the batch. This room calls impl-device and impl-gemm. */

/* --- hopper kernel, the ladder --- */

/* On compute capability 9.0 mma.sync, which the kernel above is made of, reaches some 60 % of the
   Tensor Cores' rate. Seven steps lead from it to this kernel:
   1. wgmma. Four warps multiply 64 x N at once, with both operands read from shared memory where
   they lie: no ldmatrix,
      no fragments in registers. N = 256 reads B once for 64 rows: shared memory is no longer the
      limit.
   2. The copy engine (TMA). One thread asks for a box of 64 x 64 halves by its coordinates; the
   engine finds the
      addresses, swizzles and fills with zeros what lies outside: no address arithmetic, no bounds,
      no registers.
   3. A circular buffer with barriers. Each stage has one that says "full" (its bytes have come) and
   one that says
      "empty" (its readers are done). A warp of its own fills them as far ahead as there are stages;
      nobody waits for all.
   4. Registers move. 64 x 256 sums are 128 registers of each thread: the feeding warpgroup gives up
   its own.
   5. Persistent blocks. There is one for each multiprocessor, and it goes from tile to tile: stages
   are being
      filled for the next one while the last one is written.
   6. The copy engine writes. A tile of C goes through a little shared memory of its own, and the
   block goes on while
      it is under way.
   7. Clusters. Where C has few tiles, up to eight blocks share one: each takes a piece of k, and
   then they add their
      pieces up out of each other's shared memory, a part of the tile each: no second pass, no
      workspace. (Blocks that fetch B for each other, which a cluster also offers, were no faster on
      an H100.)

   A block forms 128 x N of C, N = 256, 192, 128 or 64: two warpgroups 64 x N each, a third one
   feeds. A step is 64 of k; a stage holds 128 x 64 of A and N x 64 of B, in boxes of 64 rows of 128
   bytes, 8 KB each. A box is 64 of k for 64 rows or columns: along k the rows in memory go along k,
   and a tile's boxes, one behind the other, are fetched as one. Across k they go the other way.
   Both look the same to all but wgmma, which is told by two flags. The 128-byte swizzle moves chunk
   c (16 bytes) of a box's row r to chunk c ^ (r % 8). So eight rows of one chunk lie in different
   banks. */
enum { AMPI_HOPPER_M = 128, AMPI_HOPPER_DEPTH = 64, AMPI_HOPPER_BOX = 64 * 128,
       AMPI_HOPPER_THREADS = 384,
       AMPI_HOPPER_GROUP = 256 * 16,    /* bytes of 8 columns: four sums of each of 256 threads */
       AMPI_HOPPER_STAGES_BYTES = 192 << 10, AMPI_HOPPER_OUT = 4 * AMPI_HOPPER_BOX,
       AMPI_HOPPER_BARRIERS = 16, AMPI_HOPPER_PIECES = 8,
       AMPI_HOPPER_SHARED = 1024 + AMPI_HOPPER_STAGES_BYTES + AMPI_HOPPER_OUT
           + AMPI_HOPPER_BARRIERS * 8,
       AMPI_HOPPER_FEEDS = 24, AMPI_HOPPER_MULTIPLIES = 240 };      /* registers of a thread */

#if defined(AMPI_TENSOR_MAPS)

/* What the kernel gets: tensor maps of A, B and C, seen as (place in a row, row, number in the
   batch). p.pieces blocks are a cluster. */
typedef struct ampi_cuda_hopper {
    CUtensorMap a, b, c;
    ampi_cuda_product p;
    uint32_t units;               /* tiles of all products */
    int by_engine;                /* the copy engine writes C: see ampi_cuda_hopper_by_engine */
} ampi_cuda_hopper;

#if defined(AMPI_HOPPER)

/* N columns: bytes of a stage, and the number of stages; 4, 4, 6 or 8. */
template <int N> struct ampi_hopper {
    enum { STAGE_BYTES = AMPI_HOPPER_BOX * (2 + N / 64),
        STAGES = AMPI_HOPPER_STAGES_BYTES / STAGE_BYTES };
};

/* The stages as one warpgroup sees them: the one it comes to next, and the parity of that stage's
   next phase. */
typedef struct ampi_hopper_pipeline {
    unsigned char* stages;   /* one behind the other, in shared memory */
    uint64_t *full, *empty;  /* barriers, one a stage */
    uint32_t stage, parity;
} ampi_hopper_pipeline;

/* The same for all lanes of a warp, in a form by which the compiler sees it: descriptors lie in
   uniform registers. */
AMPI_D uint32_t ampi_d_warpgroup() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }

/* The pipeline's next stage; its parity flips when the stages begin again. */
template <int N>
AMPI_D void ampi_d_pipeline_next(ampi_hopper_pipeline& pipe) {
    pipe.stage++;
    if (pipe.stage == ampi_hopper<N>::STAGES) { pipe.stage = 0; pipe.parity ^= 1u; }
}

/* A block's next piece of work: product z of the batch, steps [from, from + steps) of k, for the
   tile at (i, j). */
typedef struct ampi_hopper_tile { uint32_t i, j, z, from, steps; } ampi_hopper_tile;

/* Clusters take units in the order of their number, in bands as ampi_d_tile has them. */
template <int N>
AMPI_D ampi_hopper_tile ampi_d_hopper_tile(const ampi_cuda_hopper& h, uint32_t unit) {
    const uint32_t tiles = h.p.tiles_m * h.p.tiles_n;
    const ampi_cuda_tile c = ampi_d_tile_at(h.p, AMPI_HOPPER_DEPTH, unit % tiles,
        blockIdx.x % h.p.pieces);
    ampi_hopper_tile t;
    t.i = c.row * AMPI_HOPPER_M;
    t.j = c.column * N;
    t.z = unit / tiles;
    t.from = c.from;
    t.steps = c.steps;
    return t;
}

/* --- hopper kernel, feeding --- */

/* An operand's tile at row or column x, for one stage: `boxes` times 64 rows or columns. */
AMPI_D void ampi_d_hopper_fetch(const CUtensorMap* map, const ampi_cuda_operand& o,
        unsigned char* to, uint64_t* full, uint32_t x, uint32_t k, uint32_t z, uint32_t boxes) {
    const int product = o.stride ? (int)z : 0;
    if (o.along_k) { ampi_ptx_tma_load(to, map, full, (int)k, (int)x, product); return; }
    for (uint32_t box = 0; box < boxes; box++)
        ampi_ptx_tma_load(to + box * AMPI_HOPPER_BOX, map, full, (int)(x + 64 * box), (int)k,
            product);
}

/* The copy engine fetches one stage: boxes of A and B, AMPI_HOPPER_DEPTH of k. */
template <int N>
AMPI_D void ampi_d_hopper_fill(const ampi_cuda_hopper& h, const ampi_hopper_pipeline& pipe,
        const ampi_hopper_tile& t, uint32_t step) {
    unsigned char* stage = pipe.stages + pipe.stage * ampi_hopper<N>::STAGE_BYTES;
    uint64_t* full = pipe.full + pipe.stage;
    const uint32_t k = (t.from + step) * AMPI_HOPPER_DEPTH;
    ampi_ptx_mbarrier_expect(full, ampi_hopper<N>::STAGE_BYTES);
    ampi_d_hopper_fetch(&h.a, h.p.a, stage, full, t.i, k, t.z, 2);
    ampi_d_hopper_fetch(&h.b, h.p.b, stage + 2 * AMPI_HOPPER_BOX, full, t.j, k, t.z, N / 64);
}

/* The feeding warp. A stage is empty when its readers have left it. */
template <int N>
AMPI_D void ampi_d_hopper_feed(const ampi_cuda_hopper& h, ampi_hopper_pipeline pipe) {
    for (uint32_t unit = blockIdx.x / h.p.pieces; unit < h.units; unit += gridDim.x / h.p.pieces) {
        const ampi_hopper_tile t = ampi_d_hopper_tile<N>(h, unit);
        for (uint32_t step = 0; step < t.steps; step++) {
            ampi_ptx_mbarrier_wait(pipe.empty + pipe.stage, pipe.parity ^ 1u);
            if (ampi_ptx_elect()) ampi_d_hopper_fill<N>(h, pipe, t, step);
            __syncwarp();
            ampi_d_pipeline_next<N>(pipe);
        }
    }
}

/* --- hopper kernel, multiplying --- */

/* "Matrix Descriptor Format" and "Shared Memory Matrix Layout" of the PTX ISA's wgmma chapter: in
   units of 16 bytes, the address in bits 0-13, the leading offset in bits 16-29, the stride in bits
   32-45; in bits 62-63 the swizzle, 1 for 128 bytes. The address counts from the start of the
   block's own memory: what lies above 18 bits is the block's number in its cluster, and would fall
   into the leading offset. The stride leads from eight rows of 128 bytes to the next eight. The
   leading offset leads across k from 64 rows or columns to the next 64, a box; along k it has no
   meaning and is 1. */
AMPI_D uint64_t ampi_d_descriptor(const void* p, int trans) {
    return (uint64_t)((ampi_ptx_shared(p) & 0x3ffffu) >> 4) | (uint64_t)(trans
           ? AMPI_HOPPER_BOX >> 4 : 1) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* This warp has left a stage. */
AMPI_D void ampi_d_hopper_release(const ampi_hopper_pipeline& pipe, uint32_t stage) {
    if (threadIdx.x % 32 == 0) ampi_ptx_mbarrier_arrive(pipe.empty + stage);
}

/* sum: the warpgroup's 64 rows and N columns of a tile, over `steps` stages of the pipeline. A
   wgmma takes 16 of k: 32 bytes of each row if k runs along rows, else (TRANS) 16 rows of 128
   bytes; descriptors count 16 bytes. The Tensor Cores get a step's work while they still do the
   last one's; only when that is done its stage is given back. */
template <int N, int TRANS_A, int TRANS_B, int BF16>
AMPI_D void ampi_d_hopper_sum(float (&sum)[N / 2], ampi_hopper_pipeline& pipe, uint32_t steps) {
    const uint32_t a_step = (TRANS_A ? 16 * 128 : 32) >> 4, b_step = (TRANS_B ? 16 * 128 : 32) >> 4;
    const uint64_t first_a = ampi_d_descriptor(pipe.stages
        + (ampi_d_warpgroup() - 1) * AMPI_HOPPER_BOX, TRANS_A);
    const uint64_t first_b = ampi_d_descriptor(pipe.stages + 2 * AMPI_HOPPER_BOX, TRANS_B);
    uint32_t last = pipe.stage;  /* the stage of the step before */
    for (uint32_t step = 0; step < steps; step++) {
        /* wait for the copy engine */
        const uint64_t a = first_a + pipe.stage * (ampi_hopper<N>::STAGE_BYTES >> 4);
        const uint64_t b = first_b + pipe.stage * (ampi_hopper<N>::STAGE_BYTES >> 4);
        ampi_ptx_mbarrier_wait(pipe.full + pipe.stage, pipe.parity);

        /* the first wgmma of all sets the sums, the others add to them */
        ampi_ptx_wgmma_fence();
        AMPI_D_UNROLL
        for (uint32_t q = 0; q < AMPI_HOPPER_DEPTH / 16; q++)
            ampi_ptx_wgmma<TRANS_A, TRANS_B, BF16>(sum, a + q * a_step, b + q * b_step, step > 0
                || q > 0);
        ampi_ptx_wgmma_commit();

        /* waits for all steps but this one: only now the stage before has no reader */
        ampi_ptx_wgmma_wait<1>();
        if (step > 0) ampi_d_hopper_release(pipe, last);
        last = pipe.stage;
        ampi_d_pipeline_next<N>(pipe);
    }
    ampi_ptx_wgmma_wait_all(sum);
    ampi_d_hopper_release(pipe, last);
}

/* The flags of wgmma are part of the instruction: eight loops, one of which runs. */
template <int N, int BF16>
AMPI_D void ampi_d_hopper_sum_type(float (&sum)[N / 2], const ampi_cuda_hopper& h,
        ampi_hopper_pipeline& pipe, uint32_t steps) {
    if (h.p.a.along_k) {
        if (h.p.b.along_k) ampi_d_hopper_sum<N, 0, 0, BF16>(sum, pipe, steps);
        else ampi_d_hopper_sum<N, 0, 1, BF16>(sum, pipe, steps);
    } else {
        if (h.p.b.along_k) ampi_d_hopper_sum<N, 1, 0, BF16>(sum, pipe, steps);
        else ampi_d_hopper_sum<N, 1, 1, BF16>(sum, pipe, steps);
    }
}

/* --- hopper kernel, from sums to C --- */

/* Warp w of a warpgroup holds rows 16w to 16w + 15. Of each 8 columns a lane has four sums: element
   e is row lane/4 + 8*(e/2), column 2*(lane%4) + e%2. */

/* Eight sums of a warp's slice of 32 columns, which begin at column `first` of the tile. */
AMPI_D void ampi_d_hopper_eight(const ampi_cuda_product& p, const ampi_hopper_tile& t,
        const float* slice, uint32_t row, uint32_t column, uint32_t first) {
    const float4* from = (const float4*)(slice + row * AMPI_CUDA_SLICE_LD + column);
    const float4 low = from[0], high = from[1];
    const size_t i = (size_t)t.i + row, j = (size_t)t.j + first + column;
    float v[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
    ampi_cuda_place c;                                 /* of a matrix: this kernel has no images */
    if (i >= p.m || j >= p.n) return;
    c.row = t.z * p.c_stride + i * p.ldc;
    c.j = j;
    c.at = c.row + j;
    c.count = p.n - j < 8 ? p.n - j : 8;
    c.whole = 1;
    ampi_d_epilogue8_at(p, c, t.z, i, v);
}

/* A warp's 16 rows and N columns of sums go to C, whatever its type and epilogue: through its slice
   of shared memory, 32 columns at a time, so that each lane gets eights of a row. sum[4q + e] of a
   lane is at row lane/4 + 8*(e/2), column 8q + 2*(lane%4) + e%2. */
template <int N>
AMPI_D void ampi_d_hopper_deliver(const ampi_cuda_product& p, const float (&sum)[N / 2],
        const ampi_hopper_tile& t, float* slice) {
    const uint32_t lane = threadIdx.x % 32, column = lane % 4 * 8;
    float* corner = slice + lane / 4 * AMPI_CUDA_SLICE_LD + lane % 4 * 2;
    AMPI_ROLLED
    for (uint32_t across = 0; across < N / 32; across++) {
        AMPI_D_UNROLL
        for (uint32_t q = 0; q < N / 8; q++) {
            if (q / 4 != across) continue;      /* registers have no index at run time */
            *(float2*)(corner + q % 4 * 8) = make_float2(sum[4 * q], sum[4 * q + 1]);
            *(float2*)(corner + 8 * AMPI_CUDA_SLICE_LD + q % 4 * 8) = make_float2(sum[4 * q + 2],
                sum[4 * q + 3]);
        }
        __syncwarp();

        /* a lane's two rows of eight columns */
        AMPI_ROLLED
        for (uint32_t row = lane / 4; row < 16; row += 8)
            ampi_d_hopper_eight(p, t, slice, row, column, across * 32);
        __syncwarp();
    }
}

/* Four sums of a thread's place in the tile, each of all pieces, added in ascending order. */
AMPI_D float4 ampi_d_hopper_add(const unsigned char* four, uint32_t pieces) {
    float4 v[AMPI_HOPPER_PIECES];
    AMPI_D_UNROLL
    for (uint32_t p = 0; p < AMPI_HOPPER_PIECES; p++)
        if (p < pieces) v[p] = ampi_ptx_load_there(four, p);
    AMPI_D_UNROLL
    for (uint32_t p = 1; p < AMPI_HOPPER_PIECES; p++)
        if (p < pieces)
            v[0] = make_float4(v[0].x + v[p].x, v[0].y + v[p].y, v[0].z + v[p].z, v[0].w + v[p].w);
    return v[0];
}

/* Groups `first` to `end` - 1 of eight columns of a warp's 16 rows: the pieces of the cluster's
   blocks are added, and go to C through the epilogue, four groups a turn. fours: this thread's
   place in each group, see ampi_d_hopper_share. */
AMPI_D void ampi_d_hopper_deliver_groups(const ampi_cuda_product& p, const ampi_hopper_tile& t,
        const unsigned char* fours, float* slice, uint32_t first, uint32_t end) {
    const uint32_t lane = threadIdx.x % 32, column = lane % 4 * 8;
    float* corner = slice + lane / 4 * AMPI_CUDA_SLICE_LD + lane % 4 * 2;
    AMPI_ROLLED
    for (uint32_t group = first; group < end; group += 4) {
        /* to the slice: rows lane/4 and 8 more, two columns each */
        AMPI_ROLLED
        for (uint32_t q = 0; q < 4 && group + q < end; q++) {
            const float4 v = ampi_d_hopper_add(fours + (group + q) * AMPI_HOPPER_GROUP, p.pieces);
            *(float2*)(corner + q * 8) = make_float2(v.x, v.y);
            *(float2*)(corner + 8 * AMPI_CUDA_SLICE_LD + q * 8) = make_float2(v.z, v.w);
        }
        __syncwarp();

        /* from there as eights of a row, but for columns behind the last group */
        AMPI_ROLLED
        for (uint32_t row = lane / 4; row < 16 && group * 8 + column < end * 8; row += 8)
            ampi_d_hopper_eight(p, t, slice, row, column, group * 8);
        __syncwarp();
    }
}

/* A tile of which each block of the cluster has a piece. Each lays its sums into the stages, which
   nobody needs any more, four of a thread side by side: rows lane/4 and 8 more, two columns. Then
   each takes its share of the groups of 8 columns, adds the pieces, and delivers. */
template <int N>
AMPI_D void ampi_d_hopper_share(const ampi_cuda_product& p, const float (&sum)[N / 2],
        const ampi_hopper_tile& t, unsigned char* exchange, float* slice) {
    const uint32_t rank = blockIdx.x % p.pieces;
    unsigned char* fours = exchange + (threadIdx.x - 128) * 16;
    ampi_ptx_group_sync(3, 256);                    /* both warpgroups have left the stages */
    AMPI_D_UNROLL
    for (uint32_t g = 0; g < N / 8; g++)
        *(float4*)(fours + g * AMPI_HOPPER_GROUP)
            = make_float4(sum[4 * g], sum[4 * g + 1], sum[4 * g + 2], sum[4 * g + 3]);
    ampi_ptx_cluster_sync();
    ampi_d_hopper_deliver_groups(p, t, fours, slice, N / 8 * rank / p.pieces,
        N / 8 * (rank + 1) / p.pieces);
}

/* What ampi_d_epilogue8 does where beta is 0 and the activation ReLU or none; without the last step
   for NaNs. */
AMPI_D float ampi_d_hopper_epilogue(const ampi_cuda_product& p, float sum, float bias) {
    float v = __fmul_rn(p.alpha, sum);
    if (p.bias.data) v = __fadd_rn(v, bias);
    return p.epilogue ? ampi_act_relu(1, v) : v;
}

/* Bias number `at` of batch z, or zero behind the last. */
AMPI_D float ampi_d_hopper_bias(const ampi_cuda_product& p, uint32_t z, uint32_t at) {
    return at < (p.bias_per_row ? p.m : p.n) ? ampi_d_load(p.bias, z * p.bias_stride + at) : 0.0f;
}

/* What a lane has of the bias: that of its two rows, or of two of the 64 columns from j on, 2*lane
   and the next. */
AMPI_D float2 ampi_d_hopper_bias2(const ampi_cuda_product& p, uint32_t z, uint32_t i, uint32_t j) {
    const uint32_t lane = threadIdx.x % 32, at = p.bias_per_row ? i + lane / 4 : j + 2 * lane;
    if (!p.bias.data) return make_float2(0.0f, 0.0f);
    return make_float2(ampi_d_hopper_bias(p, z, at),
        ampi_d_hopper_bias(p, z, at + (p.bias_per_row ? 8 : 1)));
}

/* The two sums of row e%2 and columns 8*block + 2*(lane%4), after the epilogue; `block` counts from
   the bias' first column. */
AMPI_D float2 ampi_d_hopper_pair(const ampi_cuda_product& p, const float* sum, uint32_t e,
        uint32_t block, const float2& bias) {
    float x = e % 2 ? bias.y : bias.x, y = x;
    if (p.bias.data && !p.bias_per_row) {
        x = __shfl_sync(0xffffffffu, bias.x, 4 * block + threadIdx.x % 4);
        y = __shfl_sync(0xffffffffu, bias.y, 4 * block + threadIdx.x % 4);
    }
    return make_float2(ampi_d_hopper_epilogue(p, sum[0], x), ampi_d_hopper_epilogue(p, sum[1], y));
}

/* Pair i of a lane's numbers. RAW: they are the sums. */
template <int RAW>
AMPI_D float2 ampi_d_hopper_numbers(const ampi_cuda_product& p, const float* sum, uint32_t i,
        uint32_t block, const float2& bias) {
    return RAW ? make_float2(sum[0], sum[1]) : ampi_d_hopper_pair(p, sum, i, block, bias);
}

/* Any NaN of a pair becomes the one that ampi_clean_nan is rounded to. */
template <int BF16>
AMPI_D uint32_t ampi_d_hopper_clean(uint32_t pair) {
    const uint32_t inf = BF16 ? 0x7f80u : 0x7c00u, quiet = BF16 ? 0x7fc0u : 0x7e00u;
    if ((pair & 0x7fffu) > inf) pair = (pair & 0xffff0000u) | quiet;
    if ((pair >> 16 & 0x7fffu) > inf) pair = (pair & 0xffffu) | quiet << 16;
    return pair;
}

/* A lane's 32 numbers of 64 columns: pair i is rows 8*(i%2), columns 8*(i/2). NaNs are few, and
   looking for them is dear: so all numbers are added up. A NaN among them makes the sum NaN; so do
   infinities that cancel, and then nothing is found. */
template <int BF16, int RAW>
AMPI_D void ampi_d_hopper_halves(uint32_t (&r)[16], const ampi_cuda_product& p, const float* sum,
        const float2& bias) {
    uint32_t all = 0;
    AMPI_D_UNROLL
    for (uint32_t i = 0; i < 16; i++) {
        const float2 v = ampi_d_hopper_numbers<RAW>(p, sum + 2 * i, i, i / 2, bias);
        r[i] = BF16 ? ampi_ptx_bf16x2_from_f32(v.x, v.y) : ampi_ptx_f16x2_from_f32(v.x, v.y);
        all = BF16 ? ampi_ptx_add_bf16x2(all, r[i]) : ampi_ptx_add_f16x2(all, r[i]);
    }
    if (ampi_d_hopper_clean<BF16>(all) == all) return;
    AMPI_D_UNROLL
    for (uint32_t i = 0; i < 16; i++) r[i] = ampi_d_hopper_clean<BF16>(r[i]);
}

/* A warp's 16 rows of 64 halves into a box, whose chunks are swizzled: four times 16 columns, as
   four 8 x 8 matrices each. */
template <int BF16, int RAW>
AMPI_D void ampi_d_hopper_put_halves(unsigned char* rows, const ampi_cuda_product& p,
        const float* sum, const float2& bias) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t r[16];
    ampi_d_hopper_halves<BF16, RAW>(r, p, sum, bias);
    AMPI_D_UNROLL
    for (uint32_t b = 0; b < 4; b++) {
        const uint32_t four[4] = { r[4 * b], r[4 * b + 1], r[4 * b + 2], r[4 * b + 3] };
        ampi_ptx_stmatrix_x4(rows + lane % 16 * 128 + ((2 * b + lane / 16) ^ (lane & 7u)) * 16,
            four);
    }
}

/* A warp's 16 rows of 32 floats into a box, whose chunks of 16 bytes are swizzled: chunk c of row r
   lies at c ^ r%8. A lane has two neighbours in each 8 columns, of rows lane/4 and 8 more; pair i
   is rows 8*(i%2), columns 8*(i/2). first: number of the first 8 columns among the bias' 64. */
template <int RAW>
AMPI_D void ampi_d_hopper_put_floats(unsigned char* rows, const ampi_cuda_product& p,
        const float* sum, const float2& bias, uint32_t first) {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4, chunk = lane % 4 / 2,
        inside = lane % 2 * 8;
    float2 v[8];

    /* a NaN among the numbers makes the sum of all a NaN */
    float all = 0.0f;
    AMPI_D_UNROLL
    for (uint32_t i = 0; i < 8; i++) {
        v[i] = ampi_d_hopper_numbers<RAW>(p, sum + 2 * i, i, first + i / 2, bias);
        all += v[i].x;
        all += v[i].y;
    }
    AMPI_D_UNROLL
    for (uint32_t i = 0; i < 8 && all != all; i++)
        v[i] = make_float2(ampi_clean_nan(v[i].x), ampi_clean_nan(v[i].y));

    AMPI_D_UNROLL
    for (uint32_t i = 0; i < 8; i++)
        *(float2*)(rows + (row + i % 2 * 8) * 128 + ((i / 2 * 2 + chunk) ^ row) * 16 + inside) =
            v[i];
}

/* A warpgroup's 64 rows and N columns of sums go to C by the copy engine: a box of 64 rows of 128
   bytes (`width` columns) at a time, through two boxes in `out` that alternate; next_box is the one
   to use. RAW: C is the sums. */
template <int N, amp_dtype TYPE, int RAW>
AMPI_D void ampi_d_hopper_store(const ampi_cuda_hopper& h, const float (&sum)[N / 2],
        const ampi_hopper_tile& t, unsigned char* out, uint32_t& next_box) {
    /* the warp's rows of a box begin at `top`; `group` is the warpgroup's barrier */
    const uint32_t top = threadIdx.x % 128 / 32 * 16, group = ampi_d_warpgroup(),
        width = TYPE == AMP_F32 ? 32 : 64;
    float2 bias = {};
    AMPI_D_UNROLL
    for (uint32_t q = 0; q < N / width; q++, next_box ^= 1u) {
        unsigned char* box = out + next_box * AMPI_HOPPER_BOX;

        /* a lane holds the bias of 64 columns at a time */
        if (!RAW && q * width % 64 == 0)
            bias = ampi_d_hopper_bias2(h.p, t.z, t.i + top, t.j + width * q);

        /* until the copy engine has read the box, two stores ago */
        if (threadIdx.x % 128 == 0) ampi_ptx_bulk_wait_read<1>();
        ampi_ptx_group_sync(group, 128);
        if (TYPE == AMP_F32)
            ampi_d_hopper_put_floats<RAW>(box + top * 128, h.p, sum + 16 * q, bias, q % 2 * 4);
        else
            ampi_d_hopper_put_halves<TYPE == AMP_BF16,
                RAW>(box + top * 128, h.p, sum + 32 * q, bias);

        /* when all warps have written to the box, one thread sends it */
        ampi_ptx_fence_async();
        ampi_ptx_group_sync(group, 128);
        if (threadIdx.x % 128 == 0) {
            ampi_ptx_tma_store(&h.c, box, (int)(t.j + width * q), (int)t.i, (int)t.z);
            ampi_ptx_bulk_commit();
        }
    }
}

/* ampi_d_hopper_store for C's type. */
template <int N, int RAW>
AMPI_D void ampi_d_hopper_store_type(const ampi_cuda_hopper& h, const float (&sum)[N / 2],
        const ampi_hopper_tile& t, unsigned char* out, uint32_t& next_box) {
    if (h.p.c.dtype == AMP_BF16) ampi_d_hopper_store<N, AMP_BF16, RAW>(h, sum, t, out, next_box);
    else if (h.p.c.dtype == AMP_F16) ampi_d_hopper_store<N, AMP_F16, RAW>(h, sum, t, out, next_box);
    else ampi_d_hopper_store<N, AMP_F32, RAW>(h, sum, t, out, next_box);
}

/* A multiplying warpgroup: its 64 rows of each unit that the cluster takes, summed, then delivered.
   out: shared memory for what goes to C, two boxes a warpgroup. */
template <int N>
AMPI_D void ampi_d_hopper_consume(const ampi_cuda_hopper& h, ampi_hopper_pipeline pipe,
        unsigned char* out) {
    /* half: 0 or 1, which 64 of a tile's 128 rows; warp: of the warpgroup */
    const uint32_t half = ampi_d_warpgroup() - 1, warp = threadIdx.x % 128 / 32;
    float sum[N / 2] = {};
    uint32_t next_box = 0;
    out += half * 2 * AMPI_HOPPER_BOX;
    for (uint32_t unit = blockIdx.x / h.p.pieces; unit < h.units; unit += gridDim.x / h.p.pieces) {
        ampi_hopper_tile t = ampi_d_hopper_tile<N>(h, unit);
        if (h.p.bf16) ampi_d_hopper_sum_type<N, 1>(sum, h, pipe, t.steps);
        else ampi_d_hopper_sum_type<N, 0>(sum, h, pipe, t.steps);

        /* t.i: the first row of the warpgroup, or where lanes write themselves, of the warp */
        t.i += half * 64;
        if (!h.by_engine) {
            t.i += warp * 16;
            float* slice = (float*)(out + warp * 4096);
            if (h.p.pieces > 1) ampi_d_hopper_share<N>(h.p, sum, t, pipe.stages, slice);
            else ampi_d_hopper_deliver<N>(h.p, sum, t, slice);

        /* C is the sums themselves, or their epilogue */
        } else if (h.p.alpha == 1.0f && !h.p.bias.data && !h.p.epilogue) {
            ampi_d_hopper_store_type<N, 1>(h, sum, t, out, next_box);
        } else {
            ampi_d_hopper_store_type<N, 0>(h, sum, t, out, next_box);
        }
    }
    /* Shared memory stays until the copy engine has read the last boxes. That C is written is part
       of the grid's end, for which the next kernel waits. */
    if (threadIdx.x % 128 == 0) ampi_ptx_bulk_wait_read<0>();
}

/* Makes the barriers: "full" waits for one announcement, "empty" for every multiplying warp. */
template <int N>
AMPI_D ampi_hopper_pipeline ampi_d_hopper_pipeline(const ampi_cuda_hopper& h,
        unsigned char* shared) {
    ampi_hopper_pipeline pipe;
    pipe.stages = shared;
    pipe.full = (uint64_t*)(shared + AMPI_HOPPER_STAGES_BYTES + AMPI_HOPPER_OUT);
    pipe.empty = pipe.full + ampi_hopper<N>::STAGES;
    pipe.stage = pipe.parity = 0;
    if (threadIdx.x == 0) {
        ampi_ptx_tma_prefetch(&h.a);
        ampi_ptx_tma_prefetch(&h.b);
        for (uint32_t i = 0; i < ampi_hopper<N>::STAGES; i++) {
            ampi_ptx_mbarrier_init(pipe.full + i, 1);
            ampi_ptx_mbarrier_init(pipe.empty + i, 8);
        }
        ampi_ptx_mbarrier_publish();
    }
    return pipe;
}

#endif

/* One warp of the first warpgroup feeds, the two other warpgroups multiply. Where blocks of a
   cluster share a tile, each has one tile alone, and none may leave while others still read its
   sums: all their threads meet twice, first in ampi_d_hopper_share. In a pass for any other
   architecture the kernel is empty. */
template <int N>
static __global__ void __launch_bounds__(AMPI_HOPPER_THREADS, 1)
ampi_k_gemm_hopper(const __grid_constant__ ampi_cuda_hopper h) {
#if defined(AMPI_HOPPER)
    AMPI_SHARED(unsigned char, memory);

    /* stages begin where the swizzle's period of 1024 bytes does */
    unsigned char* shared = memory + ((0u - ampi_ptx_shared(memory)) & 1023u);
    const ampi_hopper_pipeline pipe = ampi_d_hopper_pipeline<N>(h, shared);
    ampi_ptx_grid_wait();
    __syncthreads();

    if (threadIdx.x < 128) {
        ampi_ptx_give_registers<AMPI_HOPPER_FEEDS>();
        if (threadIdx.x < 32) ampi_d_hopper_feed<N>(h, pipe);
        __syncwarp();
        if (h.p.pieces > 1) ampi_ptx_cluster_sync();
    } else {
        ampi_ptx_take_registers<AMPI_HOPPER_MULTIPLIES>();
        ampi_d_hopper_consume<N>(h, pipe, shared + AMPI_HOPPER_STAGES_BYTES);
        __syncwarp();
    }
    if (h.p.pieces > 1) ampi_ptx_cluster_sync();
#else
    (void)h;
#endif
}

#endif

/* From a product of amp.h to a kernel */

/* Elements from one product of a batch to the next. */
typedef struct ampi_cuda_batch { size_t count, a, b, c, bias; } ampi_cuda_batch;

/* Is it a matrix of halves whose rows begin at multiples of 16 bytes? */
AMPI_FN int ampi_cuda_in_boxes(const ampi_operand* v, size_t stride) {
    return !v->is_image && v->area == 0 && v->dtype != AMP_F32 && (uintptr_t)v->data % 16 == 0
           && v->ld % 8 == 0 && stride % 8 == 0;
}

/* An image's places; channels and images are still to be set. */
AMPI_FN void ampi_cuda_set_places(ampi_cuda_operand* o, const ampi_im2col* g) {
    o->image_stride = g->image;
    o->channel_stride = g->plane;
    o->kernel_h = (uint32_t)g->h.kernel; o->kernel_w = (uint32_t)g->w.kernel;
    o->rows = (uint32_t)g->h.count; o->cols = (uint32_t)g->w.count;
    o->height = (uint32_t)g->h.size; o->width = (uint32_t)g->w.size;
    o->mul_h = g->h.step; o->mul_w = g->w.step;
    o->base_h = g->h.first; o->base_w = g->w.first;
    o->step_h = g->h.next; o->step_w = g->w.next;
}

/* Other operands: a channel for each stored row. A matrix is one image of one row. The weights of
   an input gradient are an image for each output, of those kernel positions that are in use. */
AMPI_FN void ampi_cuda_set_rows(ampi_cuda_operand* o, const ampi_operand* v, size_t length) {
    o->image_stride = v->output;
    o->channel_stride = v->ld;
    o->kernel_h = o->kernel_w = 1;
    o->mul_h = 1;
    o->mul_w = v->area ? (int)v->next_w : 1;
    o->rows = o->height = v->area ? (uint32_t)(v->area / v->kernel_w) : 1;
    o->cols = v->area ? (uint32_t)v->kernel_w : (uint32_t)ampi_max_size(length, 1);
    o->width = v->area ? (uint32_t)v->next_h : o->cols;
}

/* An operand as kernels take it; `side` is m of A and n of B. One of side and k is the number of
   stored rows, the other their length. */
AMPI_FN ampi_cuda_operand ampi_cuda_operand_of(const ampi_operand* v, size_t side, size_t k,
        size_t stride) {
    const size_t rows = v->along_k ? side : k, length = v->along_k ? k : side;
    ampi_cuda_operand o;
    AMPI_CLEAR(o);
    o.data = ampi_mutable(v->data);
    o.stride = stride;
    o.dtype = v->dtype;
    o.along_k = v->along_k;
    if (v->is_image) ampi_cuda_set_places(&o, &v->image);
    else ampi_cuda_set_rows(&o, v, length);
    o.channels = (uint32_t)(rows / ((size_t)o.kernel_h * o.kernel_w));
    o.images = (uint32_t)(length / ((size_t)o.rows * o.cols));
    o.boxes = ampi_cuda_in_boxes(v, stride);
    o.chunks = o.boxes && length % 8 == 0;
    return o;
}

/* The kernels' form of product s, C = epilogue(A * B). batch: how many there are, and how far their
   operands lie apart. */
AMPI_FN ampi_cuda_product ampi_cuda_product_of(const ampi_product* s,
        const ampi_cuda_batch* batch) {
    const ampi_epilogue* c = &s->c;
    ampi_cuda_product p;
    AMPI_CLEAR(p);

    /* sizes and operands */
    p.m = s->m; p.n = s->n; p.k = s->k;
    p.batch = batch->count;
    p.a = ampi_cuda_operand_of(&s->a, s->m, s->k, batch->a);
    p.b = ampi_cuda_operand_of(&s->b, s->n, s->k, batch->b);

    /* C, whose columns are one part, or an image's pixels in parts with gaps between */
    p.alpha = c->alpha; p.beta = c->beta;
    p.c = amp_ref_of(c->data, c->dtype);
    p.ldc = c->ld; p.c_stride = batch->c;
    p.part = c->columns.size ? c->columns.size : s->n; p.part_stride = c->columns.next_block;
    p.cols = c->columns.width; p.next_row = c->columns.next_row; p.column = c->columns.next;
    p.apart = c->columns.size != 0 && (c->columns.next != 1 || c->columns.width != c->columns.size);

    p.bias = amp_ref_of(c->bias, c->bias_dtype); p.bias_stride = batch->bias;
    p.bias_per_row = c->bias_per_row;
    p.pieces = 1;  /* of k; a cut may set more */
    return p;
}

/* >>impl-launch Products on the host: which kernel, in which tiles and pieces, with how much
   workspace; cuBLAS; amp_cuda_gemm_with.
   Words. cut: tiles of C and pieces of k. batch: products of one shape, a fixed step apart. This
   room calls impl-gemm and impl-hopper; behind cuBLAS, ReLU is a call to the table of
   impl-backend. */

/* --- which kernel --- */

/* An attribute of the current device; 0 if the driver does not tell. */
AMPI_FN int ampi_cuda_attribute(cudaDeviceAttr what) {
    int device = 0, value = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&value, what,
        device) == cudaSuccess)
        return value;
    cudaGetLastError();
    return 0;
}

/* How a product is cut: a tile's side, and into how many pieces of how many steps the sum over k.
   On Hopper `side` is the columns of a tile. */
typedef struct ampi_cuda_cut {
    uint32_t side, steps, pieces;
    size_t tiles_m, tiles_n;
} ampi_cuda_cut;

AMPI_FN size_t ampi_cuda_parts(size_t n, size_t part) { return n / part + (n % part != 0); }

/* C in tiles of side x side, and k in steps of `depth`, all in one piece. */
AMPI_FN ampi_cuda_cut ampi_cuda_cut_of(uint32_t side, uint32_t depth, size_t m, size_t n,
        size_t k) {
    ampi_cuda_cut cut;
    cut.side = side;
    cut.tiles_m = ampi_cuda_parts(m, side);
    cut.tiles_n = ampi_cuda_parts(n, side);
    cut.steps = (uint32_t)ampi_cuda_parts(k, depth);
    cut.pieces = 1;
    return cut;
}

/* Tiles of 128 read each element of A and B half as often as tiles of 64, which keep more
   multiprocessors busy: the large ones are taken where they are at least as many as the
   multiprocessors. If even the small ones are few and k is long, k is cut until there are two
   blocks for each multiprocessor; a piece has at least 8 steps. So what it writes and the second
   pass reads (8 bytes a sum) stays small beside what it multiplies. */
enum { AMPI_CUDA_PIECE_STEPS = 8, AMPI_CUDA_MAX_PIECES = 64 };

/* The cut for ampi_k_gemm_mma: large tiles if they fill the device, else small ones, and pieces
   of k if those do not either. */
AMPI_FN ampi_cuda_cut ampi_cuda_cut_mma(size_t m, size_t n, size_t k, size_t batch) {
    size_t processors = (size_t)ampi_cuda_attribute(cudaDevAttrMultiProcessorCount), tiles, pieces;
    ampi_cuda_cut cut = ampi_cuda_cut_of(128, AMPI_CUDA_DEPTH, m, n, k);
    if (cut.tiles_m * cut.tiles_n * batch >= processors) return cut;
    cut = ampi_cuda_cut_of(64, AMPI_CUDA_DEPTH, m, n, k);
    tiles = cut.tiles_m * cut.tiles_n * batch;
    if (tiles == 0 || tiles >= processors) return cut;
    pieces = ampi_min_size(ampi_cuda_parts(2 * processors, tiles),
        cut.steps / AMPI_CUDA_PIECE_STEPS);
    pieces = ampi_min_size(pieces, AMPI_CUDA_MAX_PIECES);
    if (pieces < 2) return cut;
    cut.steps = (uint32_t)ampi_cuda_parts(cut.steps, pieces);
    cut.pieces = (uint32_t)ampi_cuda_parts(ampi_cuda_parts(k, AMPI_CUDA_DEPTH), cut.steps);
    return cut;
}

/* Bytes for the sums of all pieces; the scratch memory begins at a multiple of 16. */
AMPI_FN size_t ampi_cuda_pieces_bytes(const ampi_cuda_cut* cut, size_t m, size_t n, size_t batch) {
    return cut->pieces < 2 ? 0 : (size_t)cut->pieces * m * n * batch * sizeof(float);
}

/* --- which kernel, Hopper --- */

#if defined(AMPI_TENSOR_MAPS)

/* Is this a device of compute capability 9.0, and was the kernel compiled for sm_90a? Otherwise it
   is empty, and needs next to no registers. Three warpgroups must begin with as many as they have
   in the end: who takes what is not there waits for ever. */
AMPI_FN int ampi_cuda_hopper_here(void) {
    cudaFuncAttributes compiled;
    if (ampi_cuda_attribute(cudaDevAttrComputeCapabilityMajor) != 9
        || ampi_cuda_attribute(cudaDevAttrComputeCapabilityMinor) != 0) return 0;
    if (cudaFuncGetAttributes(&compiled, ampi_k_gemm_hopper<64>) == cudaSuccess)
        return 3 * compiled.numRegs >= AMPI_HOPPER_FEEDS + 2 * AMPI_HOPPER_MULTIPLIES;
    cudaGetLastError();
    return 0;
}

/* The cut for ampi_k_gemm_hopper in tiles `side` columns wide, with at most `pieces` pieces of
   k. */
AMPI_FN ampi_cuda_cut ampi_cuda_cut_hopper_at(uint32_t side, size_t pieces, size_t m, size_t n,
        size_t k) {
    ampi_cuda_cut cut;
    size_t steps = ampi_max_size(ampi_cuda_parts(k, AMPI_HOPPER_DEPTH), 1);
    cut.side = side;
    cut.tiles_m = ampi_cuda_parts(m, AMPI_HOPPER_M);
    cut.tiles_n = ampi_cuda_parts(n, side);
    cut.steps = (uint32_t)ampi_cuda_parts(steps, pieces);
    cut.pieces = (uint32_t)ampi_cuda_parts(steps, cut.steps);
    return cut;
}

/* What a cut costs, in microseconds as an H100 was seen to take: as many rounds as the
   multiprocessors need, of steps and what a tile needs besides. Shared memory feeds the Tensor
   Cores, so narrow tiles, which read A for fewer columns, cost more than their share. Blocks that
   share a tile meet twice and read each other's sums. */
AMPI_FN double ampi_cuda_hopper_cost(const ampi_cuda_cut* cut, size_t processors, size_t batch) {
    static const double step[4] = { 0.24, 0.39, 0.49, 0.63 }, end[4] = { 0.1, 0.8, 1.6, 2.1 };
    const size_t blocks = cut->tiles_m * cut->tiles_n * batch * cut->pieces, i = cut->side / 64 - 1;
    const double cost = (double)ampi_cuda_parts(blocks,
        processors) * (cut->steps * step[i] + end[i]);
    return cut->pieces > 1 ? cost + 3.6 + 0.25 * cut->pieces : cost;
}

/* Blocks of a cluster lie in one part of the GPU, of 16 multiprocessors or a few more: so many
   clusters at once. */
AMPI_FN size_t ampi_cuda_clusters(size_t processors, size_t pieces) {
    return processors < 16 ? processors / pieces : processors / 16 * (16 / pieces);
}

/* The cheapest of the four widths and of 1, 2, 4 or 8 pieces, which all have to run at once. */
AMPI_FN ampi_cuda_cut ampi_cuda_cut_hopper(size_t m, size_t n, size_t k, size_t batch) {
    size_t processors = ampi_max_size((size_t)ampi_cuda_attribute(cudaDevAttrMultiProcessorCount),
        1);
    ampi_cuda_cut best = ampi_cuda_cut_hopper_at(256, 1, m, n, k);
    double least = ampi_cuda_hopper_cost(&best, processors, batch);
    for (uint32_t side = 256; side >= 64; side -= 64)
        for (size_t pieces = 1; pieces <= AMPI_HOPPER_PIECES; pieces *= 2) {
            const ampi_cuda_cut cut = ampi_cuda_cut_hopper_at(side, pieces, m, n, k);
            const double cost = ampi_cuda_hopper_cost(&cut, processors, batch);
            const size_t tiles = cut.tiles_m * cut.tiles_n * batch;
            if (cut.pieces > 1 && tiles > ampi_cuda_clusters(processors, cut.pieces)) continue;
            if (cost < least) { best = cut; least = cost; }
        }
    return best;
}

#else

AMPI_FN int ampi_cuda_hopper_here(void) { return 0; }
#endif

/* --- workspace --- */

/* Bytes of workspace for the pieces of a product; 0 without pieces, or if sizes overflow. */
AMPI_FN size_t ampi_cuda_product_workspace(size_t m, size_t n, size_t k, size_t batch) {
    size_t all;
    if (!ampi_mul_size(m, n, &all) || !ampi_mul_size(all, batch, &all)
        || all > SIZE_MAX / (AMPI_CUDA_MAX_PIECES * sizeof(float))
        || k / AMPI_CUDA_DEPTH >= UINT32_MAX) return 0;
    ampi_cuda_cut cut = ampi_cuda_cut_mma(m, n, k, batch);
    all = ampi_cuda_pieces_bytes(&cut, m, n, batch);
    return all ? all + 16 : 0;
}

AMPI_FN size_t ampi_cuda_gemm_workspace(size_t m, size_t n, size_t k) {
    return ampi_cuda_product_workspace(m, n, k, 1);
}

/* The Tensor Cores take two operands of one 16-bit type. BF16 needs code compiled for 8.0 or newer,
   whatever the device is: older code is translated for a newer device, but has no such
   instruction. */
AMPI_FN int ampi_cuda_on_tensor_cores(amp_dtype a, amp_dtype b) {
    cudaFuncAttributes compiled;
    if (a != b || a == AMP_F32) return 0;
    if (a == AMP_F16) return 1;
    if (cudaFuncGetAttributes(&compiled, ampi_k_gemm_mma<64, true>) == cudaSuccess)
        return compiled.ptxVersion >= 80;
    cudaGetLastError();
    return 0;
}

/* --- launches --- */

/* A thread's steps from pair to pair or chunk to chunk and from tile to tile; see ampi_d_walk_tile
   and ampi_d_feed_chunks. */
AMPI_FN void ampi_cuda_set_steps(ampi_cuda_operand* o, uint32_t side, uint32_t depth,
        uint32_t threads) {
    uint32_t pairs = (o->along_k ? depth : side) / 2;
    o->row_step = ampi_cuda_digits_of(threads / pairs, o->kernel_h, o->kernel_w);
    o->position_step = ampi_cuda_digits_of(depth, o->rows, o->cols);
    o->chunk_below = (o->along_k ? side / 2 : depth / 2) * o->channel_stride;
    o->chunk_step = depth * (o->along_k ? 1 : o->channel_stride);
}

/* A grid's second side ends at 65535: larger batches go in parts. */
enum { AMPI_CUDA_MAX_BATCH = 32768 };

/* A product's kernel is launched with one block per tile, batch and piece. Too many tiles are
   refused. */
AMPI_FN amp_result ampi_cuda_launch_cut(const amp_exec* exec, const char* op,
        void (*kernel)(ampi_cuda_product), ampi_cuda_product* p, const ampi_cuda_cut* cut,
        uint32_t depth, uint32_t threads, size_t shared) {
    AMPI_REFUSE_OP(cut->tiles_m * cut->tiles_n >= (size_t)1 << 28, AMP_ERR_UNSUPPORTED,
        "%s: %llu x %llu tiles are too many", op, (ampi_ull)cut->tiles_m, (ampi_ull)cut->tiles_n);
    p->tiles_m = (uint32_t)cut->tiles_m;
    p->tiles_n = (uint32_t)cut->tiles_n;
    p->steps = cut->steps;
    p->pieces = cut->pieces;
    ampi_cuda_set_steps(&p->a, cut->side, depth, threads);
    ampi_cuda_set_steps(&p->b, cut->side, depth, threads);
    return ampi_cuda_launch(exec, op, kernel, dim3(p->tiles_m * p->tiles_n, (unsigned)p->batch,
        p->pieces), threads, shared, *p);
}

/* C by ampi_k_gemm_plain. */
AMPI_FN amp_result ampi_cuda_run_plain(const amp_exec* exec, const char* op, ampi_cuda_product* p) {
    ampi_cuda_cut cut = ampi_cuda_cut_of(AMPI_CUDA_PLAIN, AMPI_CUDA_PLAIN_DEPTH, p->m, p->n, p->k);
    return ampi_cuda_launch_cut(exec, op, ampi_k_gemm_plain, p, &cut, AMPI_CUDA_PLAIN_DEPTH,
        AMPI_CUDA_BLOCK, 4 * AMPI_CUDA_PLAIN_TILE * sizeof(float));
}

/* The second pass over a sum that was cut. */
AMPI_FN amp_result ampi_cuda_add_pieces(const amp_exec* exec, const char* op,
        const ampi_cuda_product* p) {
    if (p->pieces == 1) return AMP_OK;
    size_t blocks = ampi_cuda_parts(p->batch * p->m * ((p->n + 7) / 8), AMPI_CUDA_PIECES_EIGHTS);
    return ampi_cuda_launch(exec, op, ampi_k_gemm_pieces, (unsigned)blocks, AMPI_CUDA_BLOCK,
        AMPI_CUDA_BLOCK * sizeof(float), *p);
}

/* A stage holds a tile of A and one of B. */
AMPI_FN size_t ampi_cuda_mma_shared(uint32_t side) {
    return (size_t)AMPI_CUDA_STAGES * 2 * side * AMPI_CUDA_DEPTH * sizeof(uint16_t);
}

/* C by ampi_k_gemm_mma, in pieces of k if the workspace holds them. */
AMPI_FN amp_result ampi_cuda_run_mma(const amp_exec* exec, const char* op, ampi_cuda_product* p) {
    ampi_cuda_cut cut = ampi_cuda_cut_mma(p->m, p->n, p->k, p->batch);
    int chunks = p->a.chunks && p->b.chunks;
    void (*kernel)(ampi_cuda_product) =
        cut.side == 128 ? (chunks ? ampi_k_gemm_mma<128, false> : ampi_k_gemm_mma<128, true>)
                        : (chunks ? ampi_k_gemm_mma<64, false> : ampi_k_gemm_mma<64, true>);
    p->bf16 = p->a.dtype == AMP_BF16;
    p->sums = (float*)ampi_cuda_scratch(exec, ampi_cuda_pieces_bytes(&cut, p->m, p->n, p->batch));
    if (!p->sums) cut = ampi_cuda_cut_of(cut.side, AMPI_CUDA_DEPTH, p->m, p->n, p->k);
    AMPI_TRY(ampi_cuda_launch_cut(exec, op, kernel, p, &cut, AMPI_CUDA_DEPTH, 2 * cut.side,
        ampi_cuda_mma_shared(cut.side)));
    return ampi_cuda_add_pieces(exec, op, p);
}

/* --- launches, Hopper --- */

#if defined(AMPI_TENSOR_MAPS)

/* cuTensorMapEncodeTiled is the driver's; asked for at run time, so that nothing new is linked. */
typedef decltype(&cuTensorMapEncodeTiled) ampi_cuda_encoder;

/* The driver's function that describes a tensor to the copy engine, or NULL. */
AMPI_FN ampi_cuda_encoder ampi_cuda_find_encoder(void) {
    static ampi_cuda_encoder known = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void* f = NULL;
    cudaError_t e;
    if (known) return known;
#if CUDART_VERSION >= 12050
    e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
        &found);
#else
    e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found);
#endif
    if (e == cudaSuccess && found == cudaDriverEntryPointSuccess) known = (ampi_cuda_encoder)f;
    if (e != cudaSuccess) cudaGetLastError();
    return known;
}

/* `count` matrices of x, of `height` rows of `length`, in boxes of `rows` rows of 128 bytes. */
AMPI_FN int ampi_cuda_tensor_map(CUtensorMap* map, amp_ref x, size_t length, size_t height,
        size_t ld, size_t count, size_t stride, uint32_t rows) {
    const cuuint64_t size = amp_dtype_size(x.dtype),
        sides[3] = { length, height, stride ? count : 1 };
    const cuuint64_t bytes[2] = { size * ld, size * (stride && count > 1 ? stride : ld) };
    const cuuint32_t box[3] = { (cuuint32_t)(128 / size), rows, 1 }, every[3] = { 1, 1, 1 };
    const CUtensorMapDataType type = x.dtype == AMP_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        : x.dtype == AMP_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    const ampi_cuda_encoder encode = ampi_cuda_find_encoder();
    return encode && encode(map, type, 3, x.data, sides, bytes, box, every,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
                            == CUDA_SUCCESS;
}

/* `tile` rows or columns at a time. */
AMPI_FN int ampi_cuda_operand_map(CUtensorMap* map, const ampi_cuda_operand* o, size_t batch,
        uint32_t tile) {
    return ampi_cuda_tensor_map(map, { o->data, o->dtype }, o->cols, o->channels,
        o->channel_stride, batch, o->stride, o->along_k ? tile : (uint32_t)AMPI_HOPPER_DEPTH);
}

/* The copy engine takes C where it is only written, in aligned rows, with ReLU for an activation or
   none. It clips what it writes to whole 16 bytes (an H100 does; no document says so): a row that
   ends within some has a gap behind it, which is not ours. */
AMPI_FN int ampi_cuda_hopper_by_engine(const ampi_cuda_product* p) {
    const size_t unit = 16 / amp_dtype_size(p->c.dtype);
    return p->pieces == 1 && p->beta == 0.0f && p->part == p->n
        && p->epilogue <= AMP_CUDA_EPILOGUE_RELU && (uintptr_t)p->c.data % 16 == 0
        && p->n % unit == 0 && p->ldc % unit == 0 && (p->batch == 1 || p->c_stride % unit == 0);
}

/* A product large enough to fill a tile's better part, of matrices that the copy engine can
   fetch. */
AMPI_FN int ampi_cuda_hopper_takes(const ampi_cuda_product* p) {
    return p->a.boxes && p->b.boxes && p->m >= 64 && p->n >= 64 && p->k >= 64
        && ampi_cuda_hopper_here();
}

/* The kernel's parameter; 0 where it cannot be had. */
AMPI_FN int ampi_cuda_hopper_of(ampi_cuda_hopper* h, const ampi_cuda_product* p,
        const ampi_cuda_cut* cut) {
    const size_t units = cut->tiles_m * cut->tiles_n * p->batch, limit = (size_t)1 << 30;
    if (cut->tiles_m * cut->tiles_n >= limit / p->batch) return 0;
    memset(h, 0, sizeof *h);
    h->p = *p;
    h->p.bf16 = p->a.dtype == AMP_BF16;
    h->p.tiles_m = (uint32_t)cut->tiles_m;
    h->p.tiles_n = (uint32_t)cut->tiles_n;
    h->p.steps = cut->steps;
    h->p.pieces = cut->pieces;
    h->units = (uint32_t)units;
    h->by_engine = ampi_cuda_hopper_by_engine(&h->p);
    return ampi_cuda_operand_map(&h->a, &p->a, p->batch, AMPI_HOPPER_M)
           && ampi_cuda_operand_map(&h->b, &p->b, p->batch, cut->side)
           && (!h->by_engine || ampi_cuda_tensor_map(&h->c, p->c, p->n, p->m, p->ldc,
                                                     p->batch, p->c_stride, 64));
}

/* A block for each multiprocessor, or fewer; where several share a tile, a cluster for each
   tile. */
AMPI_FN cudaError_t ampi_cuda_launch_hopper(const amp_exec* exec, const ampi_cuda_hopper* h,
        uint32_t side) {
    void (*kernel)(ampi_cuda_hopper) = side == 256   ? ampi_k_gemm_hopper<256>
                                       : side == 192 ? ampi_k_gemm_hopper<192>
                                       : side == 128 ? ampi_k_gemm_hopper<128>
                                                     : ampi_k_gemm_hopper<64>;
    uint32_t processors = (uint32_t)ampi_cuda_attribute(cudaDevAttrMultiProcessorCount);
    uint32_t clusters = h->p.pieces > 1 || h->units < processors ? h->units : processors;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
        AMPI_HOPPER_SHARED);
    if (e != cudaSuccess) return e;
    return ampi_cuda_launch_clusters(exec, kernel, clusters * h->p.pieces,
        AMPI_HOPPER_THREADS, AMPI_HOPPER_SHARED, h->p.pieces, *h);
}

/* Returns 0 where the product is left to another kernel. A part of a GPU (MIG, MPS) may have no
   room for a cluster: then k is not cut. */
AMPI_FN int ampi_cuda_try_hopper(const amp_exec* exec, const char* op, const ampi_cuda_product* p,
        amp_result* r) {
    ampi_cuda_hopper h;
    cudaError_t e;
    if (!ampi_cuda_hopper_takes(p)) return 0;
    ampi_cuda_cut cut = ampi_cuda_cut_hopper(p->m, p->n, p->k, p->batch);
    if (!ampi_cuda_hopper_of(&h, p, &cut)) return 0;
    e = ampi_cuda_launch_hopper(exec, &h, cut.side);
    if (e != cudaSuccess && cut.pieces > 1) {
        cudaGetLastError();
        cut = ampi_cuda_cut_hopper_at(cut.side, 1, p->m, p->n, p->k);
        if (!ampi_cuda_hopper_of(&h, p, &cut)) return 0;
        e = ampi_cuda_launch_hopper(exec, &h, cut.side);
    }
    *r = ampi_cuda_check(exec, op, e);
    return 1;
}

#else

AMPI_FN int ampi_cuda_hopper_takes(const ampi_cuda_product*) { return 0; }
AMPI_FN int ampi_cuda_try_hopper(const amp_exec*, const char*, const ampi_cuda_product*,
        amp_result*) {
    return 0;
}

#endif

/* Few places of k, or few rows or columns and all along k, which threads beside each other then
   read together. */
AMPI_FN int ampi_cuda_is_narrow(const ampi_cuda_product* p, const ampi_product* s) {
    if (s->a.is_image || s->b.is_image || p->k == 0 || p->m * p->n > (size_t)1 << 24) return 0;
    if (p->k <= AMPI_CUDA_NARROW) return 1;
    return ampi_min_size(p->m, p->n) <= AMPI_CUDA_NARROW && p->a.along_k && p->b.along_k
           && (double)p->m * (double)p->n * (double)p->k <= 8388608.0;
}

/* C by ampi_k_gemm_narrow: at most 32 threads an element, fewer for a short k. */
AMPI_FN amp_result ampi_cuda_run_narrow(const amp_exec* exec, const char* op,
        ampi_cuda_product* p) {
    size_t blocks;
    p->steps = 1;
    while (p->steps < 32 && p->k > AMPI_CUDA_NARROW * (size_t)p->steps) p->steps *= 2;
    blocks = ampi_cuda_parts(p->m * p->n * p->steps, AMPI_CUDA_BLOCK);
    return ampi_cuda_launch(exec, op, p->a.dtype == AMP_BF16 ? ampi_k_gemm_narrow<1>
        : ampi_k_gemm_narrow<0>, dim3((unsigned)blocks, (unsigned)p->batch), AMPI_CUDA_BLOCK,
        0, *p);
}

/* Here a kernel is chosen. */
AMPI_FN amp_result ampi_cuda_product_launch(const amp_exec* exec, const char* op,
        const ampi_product* s, ampi_cuda_product p) {
    amp_result r;
    if (!ampi_cuda_on_tensor_cores(p.a.dtype, p.b.dtype)) return ampi_cuda_run_plain(exec, op, &p);
    if (ampi_cuda_is_narrow(&p, s)) return ampi_cuda_run_narrow(exec, op, &p);
    return ampi_cuda_try_hopper(exec, op, &p, &r) ? r : ampi_cuda_run_mma(exec, op, &p);
}

/* Kernels count stored rows and places in 31 bits, steps of k in 32. A convolution's planes have
   been looked at. */
AMPI_FN int ampi_cuda_countable(const ampi_operand* v, size_t side, size_t k) {
    const size_t limit = 0x7fffffff, places = v->is_image ? v->image.pixels
        : ampi_max_size(v->area, 1);
    return (v->along_k ? side : k) <= limit && (v->along_k ? k : side) / places <= limit;
}

/* All products of a batch, by own kernels. */
AMPI_FN amp_result ampi_cuda_product_own(const amp_exec* exec, const char* op,
        const ampi_product* s, const ampi_cuda_batch* batch, amp_cuda_epilogue epilogue) {
    for (size_t z = 0; z < batch->count; z += AMPI_CUDA_MAX_BATCH) {
        ampi_cuda_batch part = *batch;
        ampi_product first = *s;
        part.count = ampi_min_size(batch->count - z, AMPI_CUDA_MAX_BATCH);
        first.a.data = ampi_at(s->a.data, s->a.dtype, z * batch->a);
        first.b.data = ampi_at(s->b.data, s->b.dtype, z * batch->b);
        first.c.data = ampi_mutable(ampi_at(s->c.data, s->c.dtype, z * batch->c));
        first.c.bias = ampi_at(s->c.bias, s->c.bias_dtype, z * batch->bias);
        ampi_cuda_product p = ampi_cuda_product_of(&first, &part);
        p.epilogue = (int)epilogue;
        AMPI_TRY(ampi_cuda_product_launch(exec, op, &first, p));
    }
    return AMP_OK;
}

/* --- cuBLAS --- */

#if !defined(AMP_NO_CUBLAS)

/* Matrices of one type, BF16 from compute capability 8.0 on, and C of that type or FP32. A bias per
   column is written to C first and added by beta = 1: one rounding, as C's type holds it
   exactly. */
AMPI_FN int ampi_cuda_blas_offers(const ampi_product* s, const ampi_cuda_batch* batch) {
    const ampi_epilogue* c = &s->c;
    const size_t limit = 0x7fffffff;
    if (s->a.is_image || s->b.is_image || s->a.dtype != s->b.dtype) return 0;
    if (c->dtype != s->a.dtype && c->dtype != AMP_F32) return 0;
    if (s->a.dtype == AMP_BF16 && ampi_cuda_attribute(cudaDevAttrComputeCapabilityMajor) < 8)
        return 0;
    if (c->bias && (c->bias_per_row || c->beta != 0.0f
        || (c->bias_dtype != c->dtype && c->dtype != AMP_F32))) return 0;
    return s->k > 0 && s->m <= limit && s->n <= limit && s->k <= limit && s->a.ld <= limit
           && s->b.ld <= limit && c->ld <= limit && batch->count <= limit;
}

/* A product with a bias or an activation that the Hopper kernel takes along; cuBLAS needs a launch
   for each. */
AMPI_FN int ampi_cuda_hopper_has_epilogue(const ampi_product* s, const ampi_cuda_batch* batch,
        amp_cuda_epilogue epilogue) {
    const ampi_cuda_product p = ampi_cuda_product_of(s, batch);
    return (s->c.bias || epilogue) && ampi_cuda_on_tensor_cores(s->a.dtype, s->b.dtype)
        && ampi_cuda_hopper_takes(&p);
}

/* Without being asked for, cuBLAS gets what takes longer than a launch: some 5 microseconds, in
   which a large GPU does 2^30 multiply-adds on its Tensor Cores or 2^26 in FP32. From there on its
   kernels, written for each GPU, count; below, own kernels keep one order of summation everywhere
   and take bias and rounding along. It never gets the work of an exec with a stream of its own: its
   handle, with the workspace, is bound to the context's. */
AMPI_FN int ampi_cuda_blas_wanted(const amp_exec* exec, const ampi_product* s,
        const ampi_cuda_batch* batch, amp_cuda_epilogue epilogue) {
    amp_cuda* c = ampi_cuda_context(exec);
    amp_cuda_gemm_engine engine = ampi_cuda_engine(c);
    double work = (double)s->m * (double)s->n * (double)s->k * (double)batch->count;
    if (engine == AMP_CUDA_GEMM_OWN || !ampi_cuda_blas(c) || exec->stream != c->exec.stream)
        return 0;
    if (engine == AMP_CUDA_GEMM_CUBLAS) return 1;
    return work >= (s->a.dtype == AMP_F32 ? 67108864.0 : 1073741824.0)
           && !ampi_cuda_hopper_has_epilogue(s, batch, epilogue);
}

AMPI_FN cudaDataType ampi_cuda_blas_type(amp_dtype t) {
    return t == AMP_F16 ? CUDA_R_16F : t == AMP_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* cuBLAS's matrices are transposed ones to us: C^T = B^T * A^T. Sums of pieces stay in FP32. */
AMPI_FN cublasStatus_t ampi_cuda_blas_call(cublasHandle_t blas, const ampi_product* s,
        const ampi_cuda_batch* batch, float beta) {
    const ampi_operand *a = &s->a, *b = &s->b;
    const ampi_epilogue* c = &s->c;
    cudaDataType in = ampi_cuda_blas_type(a->dtype), out = ampi_cuda_blas_type(c->dtype);
    cublasOperation_t tb = b->along_k ? CUBLAS_OP_T : CUBLAS_OP_N, ta = a->along_k ? CUBLAS_OP_N
        : CUBLAS_OP_T;
    cublasStatus_t e = cublasSetMathMode(blas, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    if (e != CUBLAS_STATUS_SUCCESS) return e;
    return cublasGemmStridedBatchedEx(blas, tb, ta, (int)s->n, (int)s->m, (int)s->k, &c->alpha,
        b->data, in, (int)b->ld, (long long)batch->b, a->data, in, (int)a->ld, (long long)batch->a,
        &beta, c->data, out, (int)c->ld, (long long)batch->c, (int)batch->count, CUBLAS_COMPUTE_32F,
        CUBLAS_GEMM_DEFAULT);
}

/* C by cuBLAS; biases are written first, by a kernel of our own, and cuBLAS adds to them. */
AMPI_FN amp_result ampi_cuda_product_blas(const amp_exec* exec, const char* op,
        const ampi_product* s, const ampi_cuda_batch* batch) {
    const float beta = s->c.bias ? 1.0f : s->c.beta;
    ampi_product bias = *s;
    bias.k = 0;
    if (s->c.bias)
        AMPI_TRY(ampi_cuda_product_own(exec, op, &bias, batch, AMP_CUDA_EPILOGUE_NONE));
    cublasStatus_t e = ampi_cuda_blas_call(ampi_cuda_blas(ampi_cuda_context(exec)), s, batch, beta);
    if (e == CUBLAS_STATUS_SUCCESS) return AMP_OK;
    return ampi_fail(ampi_exec_logger(exec), AMP_ERR_DEVICE, "%s: cuBLAS: status %d", op, (int)e);
}

AMPI_FN int ampi_cuda_by_blas(const amp_exec* exec, const ampi_product* s,
        const ampi_cuda_batch* batch, amp_cuda_epilogue epilogue) {
    return ampi_cuda_blas_wanted(exec, s, batch, epilogue) && ampi_cuda_blas_offers(s, batch);
}

#else

AMPI_FN int ampi_cuda_by_blas(const amp_exec*, const ampi_product*, const ampi_cuda_batch*,
        amp_cuda_epilogue) {
    return 0;
}

#endif

/* Computes a checked product, or as many as the batch counts. */
AMPI_FN amp_result ampi_cuda_product_run(const amp_exec* exec, const char* op,
        const ampi_product* s, const ampi_cuda_batch* batch, amp_cuda_epilogue epilogue) {
    if (s->m == 0 || s->n == 0 || batch->count == 0) return AMP_OK;
    AMPI_REFUSE_OP(!ampi_cuda_countable(&s->a, s->m, s->k) || !ampi_cuda_countable(&s->b, s->n,
        s->k) || s->k >= (size_t)1 << 35, AMP_ERR_UNSUPPORTED, "%s: a side of 2^31 or more", op);
#if !defined(AMP_NO_CUBLAS)
    if (epilogue == AMP_CUDA_EPILOGUE_NONE && ampi_cuda_by_blas(exec, s, batch, epilogue))
        return ampi_cuda_product_blas(exec, op, s, batch);
#endif
    return ampi_cuda_product_own(exec, op, s, batch, epilogue);
}

/* relu: and a ReLU, which behind cuBLAS is a pass of its own; all of C is one piece of memory
   then. */
AMPI_FN amp_result ampi_cuda_product_relu(const amp_exec* exec, const char* op,
        const ampi_product* s, const ampi_cuda_batch* batch, int relu) {
    const amp_cuda_epilogue epilogue = relu ? AMP_CUDA_EPILOGUE_RELU : AMP_CUDA_EPILOGUE_NONE;
    if (!relu || !ampi_cuda_by_blas(exec, s, batch, epilogue))
        return ampi_cuda_product_run(exec, op, s, batch, epilogue);
    AMPI_TRY(ampi_cuda_product_run(exec, op, s, batch, AMP_CUDA_EPILOGUE_NONE));
    const amp_ref c = amp_ref_of(s->c.data, s->c.dtype);
    return amp_cuda_backend()->activation_forward(AMP_RELU, c, c, s->m * s->n * batch->count, exec);
}

/* A product without batch and activation. */
AMPI_FN amp_result ampi_cuda_product_one(const amp_exec* exec, const char* op,
        const ampi_product* s) {
    ampi_cuda_batch one = { 1, 0, 0, 0, 0 };
    return ampi_cuda_product_run(exec, op, s, &one, AMP_CUDA_EPILOGUE_NONE);
}

/* --- raw products --- */

/* What amp_gemm has no need to check. */
AMPI_FN amp_result ampi_cuda_check_desc(const amp_cuda_gemm_desc* d, const amp_gemm_shape* s,
        const amp_logger* logger, const char* op) {
    const ampi_argument bias = { "bias", d->bias, d->bias_dtype, AMPI_IN,
        AMPI_FLAT(d->bias_per_row ? s->m : s->n) };
    AMPI_REFUSE_CALL((unsigned)d->epilogue > AMP_CUDA_EPILOGUE_GELU_TANH
        || (d->bias_per_row != 0 && d->bias_per_row != 1), AMP_ERR_DESC,
        "%s: epilogue is %d, bias_per_row is %d; they must be 0..3, and 0 or 1", op,
        (int)d->epilogue, d->bias_per_row);
    if (!d->bias) return AMP_OK;
    AMPI_TRY(ampi_check_matrix(logger, op, &bias));
    return ampi_check_stride(logger, op, "bias", s->batch, d->bias_stride);
}

/* The product with desc, checked; NULL is no desc. */
AMP_DEF amp_result amp_cuda_gemm_with(const amp_gemm_shape* shape, float alpha, amp_ref a,
        amp_ref b, float beta, amp_ref c, const amp_cuda_gemm_desc* desc, const amp_exec* exec) {
    const char* op = desc ? "amp_cuda_gemm_with" : "amp_cuda_gemm";
    const amp_cuda_gemm_desc d = desc ? *desc : amp_cuda_gemm_desc();
    amp_gemm_shape s;
    ampi_product p;
    AMPI_TRY(ampi_gemm_product(&p, &s, ampi_exec_logger(exec), op, shape, alpha, a, b,
        beta, c));
    AMPI_TRY(ampi_cuda_check_desc(&d, &s, ampi_exec_logger(exec), op));
    AMPI_TRY(ampi_cuda_check_rounding(exec, op));
    if (s.m == 0 || s.n == 0) return AMP_OK;
    AMPI_TRY(ampi_cuda_check_pointer(exec, op, "c", c.data));
    if (s.k > 0) AMPI_TRY(ampi_cuda_check_pointer(exec, op, "a", a.data));
    if (s.k > 0) AMPI_TRY(ampi_cuda_check_pointer(exec, op, "b", b.data));
    AMPI_TRY(ampi_cuda_check_pointer(exec, op, "bias", d.bias));
    const ampi_cuda_batch batch = { s.batch, s.a_stride, s.b_stride, s.c_stride, d.bias_stride };
    p.c.bias = d.bias; p.c.bias_dtype = ampi_dtype_or_f32(d.bias_dtype);
    p.c.bias_per_row = d.bias_per_row;
    return ampi_cuda_product_run(exec, op, &p, &batch, d.epilogue);
}

/* The table's gemm. */
AMPI_CUDA(gemm, const amp_gemm_shape* s, float alpha, amp_ref a, amp_ref b, float beta, amp_ref c) {
    return amp_cuda_gemm_with(s, alpha, a, b, beta, c, NULL, exec);
}

/* >>impl-linear The dense layer, and the gradients of biases, which a convolution uses too.
   Words. part: what one warp sums of an element. This room calls impl-launch. */

/* --- gradients of biases --- */

/* db[o] = sum of dy over images n and pixels p of a plane, element (n*outputs + o)*pixels + p; a
   dense layer has planes of one pixel. Sums are formed in double in an order that depends on sizes
   alone. */
typedef struct ampi_cuda_bias_sum {
    amp_ref dy, db;
    size_t n, outputs, pixels;
    int accumulate;
    size_t count;       /* parts of a channel */
    double* parts;      /* the workspace, or NULL */
} ampi_cuda_bias_sum;

/* Loads of a thread that are under way together. */
enum { AMPI_CUDA_BIAS_AHEAD = 4 };

/* Element o of db becomes the sum, or is raised by it. */
AMPI_D void ampi_d_bias_store(const ampi_cuda_bias_sum& s, size_t o, double sum) {
    float v = (float)sum;
    if (s.accumulate) v = __fadd_rn(ampi_d_load(s.db, o), v);
    ampi_d_store(s.db, o, ampi_clean_nan(v));
}

/* The eights of a channel's planes are cut into parts, a warp's work: part p has chunks p, p +
   count, ... of 128 eights. One block adds a channel's parts. They meet in the workspace, or, where
   they are few or it is missing, in the shared memory of a block that computes them all. */
enum { AMPI_CUDA_BIAS_WARPS = 32,       /* at most */
       AMPI_CUDA_BIAS_CHUNK = 32 * (int)AMPI_CUDA_BIAS_AHEAD, AMPI_CUDA_BIAS_PARTS = 1024,
       AMPI_CUDA_BIAS_ALL_PARTS = 16384,       /* of all channels, unless these are more */
       AMPI_CUDA_BIAS_SHARED = (32 + (int)AMPI_CUDA_BIAS_PARTS) * 8 };

/* This thread's share of channel o in the chunk in which its first eight is q. */
AMPI_D double ampi_d_bias_chunk(const ampi_cuda_bias_sum& s, size_t o, size_t q) {
    const size_t eights = (s.pixels + 7) / 8;
    ampi_eight r[AMPI_CUDA_BIAS_AHEAD];
    double sum = 0.0;
    AMPI_D_UNROLL
    for (unsigned u = 0; u < AMPI_CUDA_BIAS_AHEAD; u++) {
        size_t at = q + 32u * u, image = ampi_d_quotient(at, eights),
            plane = (image * s.outputs + o) * s.pixels;
        ampi_d_fetch8(r[u], s.dy, plane + (at - image * eights) * 8,
            image < s.n ? plane + s.pixels : 0);
    }
    AMPI_D_UNROLL
    for (unsigned u = 0; u < AMPI_CUDA_BIAS_AHEAD; u++) {
        float v[8];
        ampi_d_widen8(v, r[u], s.dy.dtype);
        sum += (double)ampi_d_sum8(v);
    }
    return sum;
}

/* Element blockIdx.x of db becomes the sum of s.count parts. */
AMPI_D void ampi_d_bias_end(const ampi_cuda_bias_sum& s, const double* parts, double* shared) {
    double sum = ampi_d_parts_sum(parts, s.count, shared);
    if (threadIdx.x == 0) ampi_d_bias_store(s, blockIdx.x, sum);
}

/* Parts of db[blockIdx.x] over images and pixels, one part a warp at a time; without memory for
   parts db itself. */
static __global__ void __launch_bounds__(32 * AMPI_CUDA_BIAS_WARPS)
        ampi_k_bias_planes(ampi_cuda_bias_sum s) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    const size_t all = s.n * ((s.pixels + 7) / 8), warps = blockDim.x / 32;
    double* parts = s.parts ? s.parts + blockIdx.x * s.count : shared + 32;
    for (size_t part = blockIdx.y * warps + threadIdx.x / 32; part < s.count;
        part += gridDim.y * warps) {
        double sum[1] = { 0.0 };
        for (size_t q = part * AMPI_CUDA_BIAS_CHUNK + threadIdx.x % 32; q < all;
            q += s.count * AMPI_CUDA_BIAS_CHUNK)
            sum[0] += ampi_d_bias_chunk(s, blockIdx.x, q);
        ampi_d_warp_sum(sum);
        if (threadIdx.x % 32 == 0) parts[part] = sum[0];
    }
    if (s.parts) return;
    __syncthreads();
    ampi_d_bias_end(s, parts, shared);
}

/* db from the parts of ampi_k_bias_planes, one block an output. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_bias_parts(ampi_cuda_bias_sum s) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    ampi_d_bias_end(s, s.parts + blockIdx.x * s.count, shared);
}

/* A block of 16 warps sums 16 neighbouring columns: two lanes read eight each, of every 256th row;
   then the lanes of a warp and the warps are added. */
enum { AMPI_CUDA_BIAS_BLOCK = 512, AMPI_CUDA_BIAS_COLUMNS = 16, AMPI_CUDA_BIAS_ROWS = 256 };

/* The next rows of eight columns, added up to a float each. */
AMPI_D void ampi_d_bias_rows(const ampi_cuda_bias_sum& s, size_t row, size_t column,
        double (&v)[8]) {
    ampi_eight r[AMPI_CUDA_BIAS_AHEAD];
    float sum[8] = {};
    AMPI_D_UNROLL
    for (unsigned u = 0; u < AMPI_CUDA_BIAS_AHEAD; u++) {
        size_t at = row + u * (unsigned)AMPI_CUDA_BIAS_ROWS;
        ampi_d_fetch8(r[u], s.dy, at * s.outputs + column,
            at < s.n ? (at + 1) * s.outputs : 0);
    }
    AMPI_D_UNROLL
    for (unsigned u = 0; u < AMPI_CUDA_BIAS_AHEAD; u++) {
        float w[8];
        ampi_d_widen8(w, r[u], s.dy.dtype);
        for (int j = 0; j < 8; j++) sum[j] += w[j];
    }
    for (int j = 0; j < 8; j++) v[j] += (double)sum[j];
}

/* Adds eight sums over the lanes l, l ^ 2, ..., l ^ 30 of a warp: of two partners each keeps half
   of the sums, so that lane l ends with number l / 4. */
AMPI_D double ampi_d_reduce8(double (&v)[8]) {
    AMPI_D_UNROLL
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = (threadIdx.x & 4u * (unsigned)half) != 0;
        for (int j = 0; j < half; j++) {
            double keep = upper ? v[j + half] : v[j], give = upper ? v[j] : v[j + half];
            v[j] = keep + __shfl_xor_sync(0xffffffffu, give, 4 * half);
        }
    }
    return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 2);
}

/* db from rows without pixels: a block sums AMPI_CUDA_BIAS_COLUMNS columns of dy[n, outputs]. */
static __global__ void __launch_bounds__(AMPI_CUDA_BIAS_BLOCK)
        ampi_k_bias_columns(ampi_cuda_bias_sum s) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    const size_t first = (size_t)blockIdx.x * AMPI_CUDA_BIAS_COLUMNS, o = first + threadIdx.x;
    const size_t column = first + threadIdx.x % 2 * 8u;
    /* the lane whose sum is of column threadIdx.x */
    const unsigned lane = threadIdx.x % 8 * 4 + threadIdx.x / 8;
    double v[8] = {}, sum = 0.0;
    for (size_t row = threadIdx.x / 2; column < s.outputs && row < s.n;
         row += AMPI_CUDA_BIAS_AHEAD * AMPI_CUDA_BIAS_ROWS)
        ampi_d_bias_rows(s, row, column, v);
    shared[threadIdx.x] = ampi_d_reduce8(v);
    __syncthreads();
    if (threadIdx.x >= AMPI_CUDA_BIAS_COLUMNS || o >= s.outputs) return;
    for (unsigned warp = 0; warp < AMPI_CUDA_BIAS_BLOCK / 32; warp++)
        sum += shared[32 * warp + lane];
    ampi_d_bias_store(s, o, sum);
}

/* Parts of which an element of db is made: fewer for many outputs. */
AMPI_FN size_t ampi_cuda_bias_parts(size_t n, size_t outputs, size_t pixels) {
    size_t limit = ampi_min_size(AMPI_CUDA_BIAS_ALL_PARTS / outputs, AMPI_CUDA_BIAS_PARTS);
    return ampi_min_size(ampi_cuda_parts(n * ((pixels + 7) / 8), AMPI_CUDA_BIAS_CHUNK),
        ampi_max_size(limit, 1));
}

/* Two parts for each warp of one block take less time than a second launch. */
AMPI_FN size_t ampi_cuda_bias_bytes(size_t n, size_t outputs, size_t pixels) {
    size_t count = ampi_cuda_bias_parts(n, outputs, pixels);
    return count > 2 * AMPI_CUDA_BIAS_WARPS ? count * outputs * sizeof(double) : 0;
}

/* db of a convolution; parts by many blocks where the workspace holds them. */
AMPI_FN amp_result ampi_cuda_bias_planes(const amp_exec* exec, const char* op,
        ampi_cuda_bias_sum s) {
    const size_t bytes = ampi_cuda_bias_bytes(s.n, s.outputs, s.pixels);
    s.count = ampi_cuda_bias_parts(s.n, s.outputs, s.pixels);
    if (bytes) s.parts = (double*)ampi_cuda_scratch(exec, bytes);
    const unsigned blocks = s.parts ? (unsigned)ampi_cuda_parts(s.count, AMPI_CUDA_BIAS_WARPS) : 1u;
    const unsigned threads = s.count <= AMPI_CUDA_BLOCK / 32 ? AMPI_CUDA_BLOCK
        : 32 * AMPI_CUDA_BIAS_WARPS;
    AMPI_TRY(ampi_cuda_launch(exec, op, ampi_k_bias_planes, dim3((unsigned)s.outputs, blocks),
        threads, AMPI_CUDA_BIAS_SHARED, s));
    if (!s.parts) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_bias_parts, (unsigned)s.outputs, AMPI_CUDA_BLOCK,
        AMPI_CUDA_BLOCK / 32 * sizeof(double), s);
}

/* db[outputs] = sums of dy[n, outputs, pixels], or += if accumulate. */
AMPI_FN amp_result ampi_cuda_bias_grad(const amp_exec* exec, const char* op, amp_ref dy,
        amp_ref db, int accumulate, size_t n, size_t outputs, size_t pixels) {
    ampi_cuda_bias_sum s = { ampi_cuda_ref(dy), ampi_cuda_ref(db), n, outputs, pixels, accumulate,
        0, NULL };
    if (outputs == 0) return AMP_OK;
    if (pixels > 1) return ampi_cuda_bias_planes(exec, op, s);
    const unsigned blocks = (unsigned)ampi_cuda_parts(outputs, AMPI_CUDA_BIAS_COLUMNS);
    return ampi_cuda_launch(exec, op, ampi_k_bias_columns, blocks, AMPI_CUDA_BIAS_BLOCK,
        AMPI_CUDA_BIAS_BLOCK * sizeof(double), s);
}

/* --- dense layer --- */

/* Refuses memory of a layer's operands that kernels cannot reach. A backward call reads x for dw
   alone, and w for dx alone. */
AMPI_FN amp_result ampi_cuda_check_layer(const amp_exec* exec, const char* op,
        const ampi_layer_refs* t, int backward) {
    const char* const names[] = { "x", "w", "b", backward ? "dy" : "y", "dx", "dw", "db" };
    const void* const pointers[] = { backward && !t->dw.data ? NULL : t->x.data,
        backward && !t->dx.data ? NULL : t->w.data, t->b.data, t->y.data, t->dx.data, t->dw.data,
        t->db.data };
    AMPI_TRY(ampi_cuda_check_rounding(exec, op));
    for (size_t i = 0; i < AMPI_LENGTH(names); i++)
        AMPI_TRY(ampi_cuda_check_pointer(exec, op, names[i], pointers[i]));
    return AMP_OK;
}

/* The table's linear_forward; RELU: its linear_relu_forward. */
template <int RELU>
static amp_result ampi_cuda_linear_forward(amp_ref x, amp_ref w, amp_ref b, amp_ref y, size_t n,
        size_t in, size_t out, const amp_exec* exec) {
    const char* op = "amp_cuda_linear_forward";
    const ampi_layer_refs t = { x, w, b, y, AMP_NONE, AMP_NONE, AMP_NONE, 0 };
    const ampi_cuda_batch one = { 1, 0, 0, 0, 0 };
    ampi_product s;
    AMPI_TRY(ampi_check_linear(ampi_exec_logger(exec), &t, n, in, out, 0));
    AMPI_TRY(ampi_cuda_check_layer(exec, op, &t, 0));
    ampi_linear_y(&s, &t, n, in, out);
    return ampi_cuda_product_relu(exec, op, &s, &one, RELU);
}

/* The table's linear_backward: dx and dw are products, db is a sum of columns. */
AMPI_CUDA(linear_backward, amp_ref dy, amp_ref x, amp_ref w, amp_ref dx, amp_ref dw, amp_ref db,
        int accumulate, size_t n, size_t in, size_t out) {
    const char* op = "amp_cuda_linear_backward";
    const ampi_layer_refs t = { x, w, AMP_NONE, dy, dx, dw, db, accumulate };
    ampi_product s;
    AMPI_TRY(ampi_check_linear(ampi_exec_logger(exec), &t, n, in, out, 1));
    AMPI_TRY(ampi_cuda_check_layer(exec, op, &t, 1));
    if (dx.data) {
        ampi_linear_dx(&s, &t, n, in, out);
        AMPI_TRY(ampi_cuda_product_one(exec, op, &s));
    }
    if (dw.data) {
        ampi_linear_dw(&s, &t, n, in, out);
        AMPI_TRY(ampi_cuda_product_one(exec, op, &s));
    }
    if (!db.data) return AMP_OK;
    return ampi_cuda_bias_grad(exec, op, dy, db, accumulate & AMP_ACCUMULATE_PARAMS, n, out, 1);
}

/* >>impl-conv   Convolution: three products whose B is read from images by places; few channels are
   summed directly.
   Words. direct: by FP32 cores, from pixels and weights in shared memory. band: rows of an output's
   tile. part: y, dx or dw. phase: pixels of dx that meet the same kernel positions. This room calls
   impl-gemm, impl-launch and impl-linear. */

/* The three products of a convolution, the groups as a batch. Kernels count in 31 bits inside a
   plane. */
AMPI_FN amp_result ampi_cuda_conv2d_fits(const ampi_conv2d_sizes* c, const amp_exec* exec,
        const char* op) {
    const int64_t side = (int64_t)1 << 30;
    const size_t plane = (size_t)1 << 31;
    if ((int64_t)c->s.height + c->s.pad_h + c->s.pad_end_h < side
        && (int64_t)c->s.width + c->s.pad_w + c->s.pad_end_w < side && c->in_pixels < plane
        && c->out_pixels < plane && c->area < plane) return AMP_OK;
    return ampi_fail(ampi_exec_logger(exec), AMP_ERR_UNSUPPORTED,
        "%s: a %dx%d input padded by %dx%d, or its output, is too large", op, c->s.height,
        c->s.width, c->s.pad_h, c->s.pad_w);
}

typedef enum ampi_cuda_conv2d_part { AMPI_CONV2D_Y, AMPI_CONV2D_DX,
        AMPI_CONV2D_DW } ampi_cuda_conv2d_part;

/* --- few channels, direct sums --- */

/* Few channels of halves fill no tile of the Tensor Cores. Forming their im2col matrix costs more
   than to multiply them on the FP32 cores, where their products are exact. One form serves for two
   of the three products:
     y[n,o,i,j] = sum over c, a, b of w[o,c,a,b] * x[n, c, i*stride_h - pad_h + a*dilation_h, the
     same of j and b];
   and dx with a stride of 1 is the y of dy: channels and outputs change places, the kernel is
   mirrored, the padding is (kernel_h - 1)*dilation_h - pad_h. Zeros beside an image are multiplied
   too, as those of an im2col matrix are. A block works on a tile, which is some images or a band of
   rows of one, and on eight outputs. Shared memory holds what the tile sees of x in FP32: element
   (channel, image, row, column) of `tile_height` rows of `tile_width` each. */
/* Indices have 32 bits: no tensor has 2^31 elements. */
enum { AMPI_CUDA_DIRECT_OUTPUTS = 8, AMPI_CUDA_DIRECT_LOADS = 8 };

/* Row i of y meets row t / by - lift of x at kernel row a, t = i*mul + base + a*step, if `by`
   divides t; columns likewise. */
typedef struct ampi_cuda_direct_side {
    uint32_t mul, base, step, lift;
    ampi_cuda_divisor by;
} ampi_cuda_direct_side;

typedef struct ampi_cuda_direct {
    const void *x, *w;                            /* for dw, w is dy */
    void *bias, *y;
    amp_dtype dtype, bias_dtype, y_dtype;         /* dtype: of x and w */
    uint32_t n, channels, outputs;                /* images; channels of x, of y */
    uint32_t height, width, rows, cols;           /* pixels of an image of x, of y */
    uint32_t kernel_h, kernel_w;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, mirrored;
    uint32_t out_step, channel_step;              /* elements of w from one output or channel to the
                                                     next */
    uint32_t images, band;                        /* of a tile: images, rows of y */
    uint32_t bands, tiles;                        /* of an image: tiles; of all images */
    uint32_t tile_height, tile_width;             /* of what a tile sees of an image of x */
    uint32_t channels_at_once;                    /* in shared memory */
    uint32_t lanes, down;                         /* threads beside each other in a row of x, and
                                                     how many rows */
    ampi_cuda_digits step;                        /* of a thread: so many rows further */
    /* pixels of a band, kernel_h / KH */
    ampi_cuda_divisor by_images, by_pixels, by_kernel_w, by_kernel_h;
    uint32_t jobs, splits, shares;                /* of dw */
    int relu, add;                                /* add: to what y holds */
    float* sums;

    /* of groups; channels and outputs are those of one */
    uint32_t groups;
    ampi_cuda_direct_side side_h, side_w;
} ampi_cuda_direct;

/* Its first image and row, and how many there are. */
typedef struct ampi_cuda_direct_tile { uint32_t image, row, images, rows; } ampi_cuda_direct_tile;

/* Tile `number`: a band of output rows of one image or several. */
AMPI_D ampi_cuda_direct_tile ampi_d_direct_tile(const ampi_cuda_direct& d, uint32_t number) {
    ampi_cuda_direct_tile t;
    t.image = number / d.bands * d.images;
    t.row = number % d.bands * d.band;
    t.images = d.n - t.image < d.images ? d.n - t.image : d.images;
    t.rows = d.rows - t.row < d.band ? d.rows - t.row : d.band;
    return t;
}

/* Any NaN will do: it is a sum's in the end. */
AMPI_D float ampi_d_direct_widen(uint16_t v, amp_dtype t) {
    return t == AMP_F16 ? ampi_ptx_f32_from_f16(v) : ampi_float((uint32_t)v << 16);
}

AMPI_D float ampi_d_direct_widen(float v, amp_dtype) { return v; }

/* Channels [c, c + count) of what tile t sees of x, in FP32, to shared memory: rows of d.tile_width
   elements, d.tile_height to an image, d.images to a channel; zeros stand for padding, images
   behind the last and channels behind the last. A thread goes down a column through all these rows,
   d.down at a time; eight of its loads are under way together. */
AMPI_D void ampi_d_direct_load(float* to, const ampi_cuda_direct& d, const ampi_cuda_direct_tile& t,
        uint32_t c, uint32_t count) {
    const uint32_t rows = count * d.images * d.tile_height, start = threadIdx.x / d.lanes;
    const uint32_t top = t.row * (uint32_t)d.stride_h - (uint32_t)d.pad_h;
    const uint32_t below = d.down * d.tile_width;
    const uint16_t* from = (const uint16_t*)d.x + (t.image * d.channels + c) * d.height * d.width;
    if (start >= d.down) return;  /* a surplus thread */
    for (uint32_t column = threadIdx.x % d.lanes; column < d.tile_width; column += d.lanes) {
        const uint32_t x = column - (uint32_t)d.pad_w;  /* left of the image it wraps to a large
                                                           one */

        /* row = at.high * d.tile_height + at.middle: row at.middle of plane at.high */
        ampi_cuda_digits at = ampi_d_digits_of(start, d.tile_height, 1);
        float* put = to + start * d.tile_width + column;
        for (uint32_t row = start; row < rows;) {
            uint16_t v[AMPI_CUDA_DIRECT_LOADS];

            /* y above the image wraps as x does */
            AMPI_D_UNROLL
            for (uint32_t u = 0; u < AMPI_CUDA_DIRECT_LOADS; u++) {
                uint32_t channel = ampi_d_divide(at.high, d.by_images),
                    image = at.high - channel * d.images;
                uint32_t y = top + at.middle, place = ((image * d.channels + channel) * d.height
                    + y) * d.width + x;
                int inside = channel < count && image < t.images && y < d.height && x < d.width;
                v[u] = inside ? from[place] : (uint16_t)0;
                ampi_d_step(at, d.step, d.tile_height, 1);
            }

            AMPI_D_UNROLL
            for (uint32_t u = 0; u < AMPI_CUDA_DIRECT_LOADS; u++, row += d.down, put += below)
                if (row < rows) *put = ampi_d_direct_widen(v[u], d.dtype);
        }
    }
}

/* The kernel's rows go KH at a time; a position is (channel, rows / KH, column, row % KH), all but
   the last as one number in this order. The element of w that it stands for, of output 0. */
template <int KH>
AMPI_D uint32_t ampi_d_direct_place(const ampi_cuda_direct& d, uint32_t position, uint32_t a) {
    const uint32_t above = ampi_d_divide(position, d.by_kernel_w),
        c = ampi_d_divide(above, d.by_kernel_h);
    const uint32_t row = (above - c * d.by_kernel_h.d) * KH + a;
    const uint32_t place = row * d.kernel_w + (position - above * d.kernel_w);
    return c * d.channel_step + (d.mirrored ? d.kernel_h * d.kernel_w - 1 - place : place);
}

/* The weights of eight outputs, those of a position beside each other. A thread brings those of one
   output. */
template <int KH>
AMPI_D void ampi_d_direct_weights(float* to, const ampi_cuda_direct& d, uint32_t out) {
    const uint32_t all = d.channels * d.kernel_h * d.kernel_w,
        below = blockDim.x / AMPI_CUDA_DIRECT_OUTPUTS;
    const uint32_t o = threadIdx.x % AMPI_CUDA_DIRECT_OUTPUTS;
    const uint16_t* from = (const uint16_t*)d.w + (out + o) * d.out_step;
    AMPI_D_UNROLL4
    for (uint32_t position = threadIdx.x / AMPI_CUDA_DIRECT_OUTPUTS; position < all;
        position += below) {
        uint16_t v = out + o < d.outputs ? from[ampi_d_direct_place<KH>(d, position / KH,
            position % KH)] : (uint16_t)0;
        to[position * AMPI_CUDA_DIRECT_OUTPUTS + o] = ampi_d_direct_widen(v, d.dtype);
    }
}

/* Eight neighbours in shared memory. */
AMPI_D void ampi_d_direct_load8(float (&v)[8], const float* p) {
    const float4 low = *(const float4*)p, high = *(const float4*)(p + 4);
    v[0] = low.x; v[1] = low.y; v[2] = low.z; v[3] = low.w;
    v[4] = high.x; v[5] = high.y; v[6] = high.z; v[7] = high.w;
}

/* sum[l] += v * by[l], fused. */
AMPI_D void ampi_d_direct_add8(float (&sum)[8], float v, const float (&by)[8]) {
    AMPI_D_UNROLL
    for (int l = 0; l < 8; l++) sum[l] = ampi_fma(1, v, by[l], sum[l]);
}

/* P pixels below each other share what they see of x: of a column of KH rows, P + KH - 1 elements.
   (P > 1: stride and dilation along a column are 1.) x: what the first pixel sees of `count`
   channels, w: their weights. */
template <int P, int KH>
AMPI_D void ampi_d_direct_multiply(float (&sum)[P][8], const float* x, const float* w,
        const ampi_cuda_direct& d, uint32_t count) {
    const uint32_t plane = d.images * d.tile_height * d.tile_width;
    const uint32_t down = (uint32_t)d.dilation_h * d.tile_width;
    for (uint32_t c = 0; c < count; c++, x += plane)
        for (uint32_t r = 0; r < d.kernel_h; r += KH)
            for (uint32_t b = 0; b < d.kernel_w; b++, w += KH * 8) {
                const float* column = x + r * down + b * (uint32_t)d.dilation_w;
                float v[P + KH - 1], by[8];
                AMPI_D_UNROLL
                for (uint32_t q = 0; q < P + KH - 1; q++) v[q] = column[q * down];
                AMPI_D_UNROLL
                for (int a = 0; a < KH; a++) {
                    ampi_d_direct_load8(by, w + a * 8);
                    AMPI_D_UNROLL
                    for (int p = 0; p < P; p++) ampi_d_direct_add8(sum[p], v[p + a], by);
                }
            }
}

/* Eight outputs of a pixel, with their bias and a ReLU, or added to what is there. */
AMPI_D void ampi_d_direct_store(const ampi_cuda_direct& d, uint32_t image, uint32_t out,
        uint32_t pixel, float (&sum)[8]) {
    const uint32_t plane = d.rows * d.cols, at = (image * d.outputs + out) * plane + pixel;
    ampi_eight r;
    AMPI_D_UNROLL
    for (uint32_t o = 0; o < 8; o++) {
        if (d.bias && out + o < d.outputs)
            sum[o] = __fadd_rn(sum[o], ampi_d_load({ d.bias, d.bias_dtype }, out + o));
        if (d.add && out + o < d.outputs)
            sum[o] = __fadd_rn(ampi_d_load({ d.y, d.y_dtype }, at + o * plane), sum[o]);
        sum[o] = ampi_clean_nan(d.relu ? ampi_act_relu(1, sum[o]) : sum[o]);
    }
    ampi_d_round8(r, sum, d.y_dtype);
    AMPI_D_UNROLL
    for (uint32_t o = 0; o < 8; o++) {
        if (out + o >= d.outputs) continue;
        if (d.y_dtype == AMP_F32) ((uint32_t*)d.y)[at + o * plane] = r.w[o];
        else ((uint16_t*)d.y)[at + o * plane] = (uint16_t)(r.w[o / 2] >> (16 * (o & 1)));
    }
}

/* y by direct sums: a block has a tile of pixels and eight outputs, a thread eight outputs of P
   pixels below each other. Each sum runs over (channel, rows / KH, column, row % KH) ascending,
   whatever P and the tiles are. Shared memory holds the weights, then x of some channels. */
template <int P, int KH>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK, 3) ampi_k_direct(ampi_cuda_direct d) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(float, shared);
    const uint32_t area = d.kernel_h * d.kernel_w, out = blockIdx.y * AMPI_CUDA_DIRECT_OUTPUTS;

    /* the thread's first pixel: image at.high, row `row` and column at.low of the tile; x sees
       element `first` + column of a channel */
    const ampi_cuda_direct_tile t = ampi_d_direct_tile(d, blockIdx.x);
    const ampi_cuda_digits at = ampi_d_digits_of(threadIdx.x, d.band / P, d.cols);
    const uint32_t row = at.middle * P,
        first = (at.high * d.tile_height + row * (uint32_t)d.stride_h) * d.tile_width;
    float* x = shared + d.channels * area * AMPI_CUDA_DIRECT_OUTPUTS;
    float sum[P][8] = {};
    ampi_d_direct_weights<KH>(shared, d, out);

    for (uint32_t c = 0; c < d.channels; c += d.channels_at_once) {
        uint32_t count = d.channels - c < d.channels_at_once ? d.channels - c : d.channels_at_once;
        __syncthreads();      /* the channels before have been read */
        ampi_d_direct_load(x, d, t, c, count);
        __syncthreads();
        if (at.high < t.images)
            ampi_d_direct_multiply<P, KH>(sum, x + first + at.low * (uint32_t)d.stride_w,
                                          shared + c * area * AMPI_CUDA_DIRECT_OUTPUTS, d, count);
    }

    /* pixels that the tile has; edges of images leave surplus threads */
    AMPI_D_UNROLL
    for (uint32_t p = 0; p < P; p++)
        if (at.high < t.images && row + p < t.rows)
            ampi_d_direct_store(d, t.image + at.high, out, (t.row + row + p) * d.cols + at.low,
                sum[p]);
}

/* --- few channels, direct sums of dw --- */

/* dw[o,c,a,b] = sum over images and pixels (i, j) of dy[n,o,i,j] * x[n, c, i*stride_h - pad_h +
   a*dilation_h, ...]. A job is KH weights below each other, of eight outputs. A block has its share
   of the tiles, and a thread one job and every `splits`-th column of them. The columns' sums are
   added in ascending order, and then the shares' as those of a bias are (ampi_k_bias_columns). KH >
   1: stride and dilation along a column are 1. */

/* dy of eight outputs: element (image, row, column, output). A thread brings those of one pixel. */
AMPI_D void ampi_d_direct_load_dy(float* to, const ampi_cuda_direct& d,
        const ampi_cuda_direct_tile& t, uint32_t out) {
    const uint32_t pixels = d.by_pixels.d, plane = d.rows * d.cols;
    const uint16_t* from = (const uint16_t*)d.w + (t.image * d.outputs + out) * plane
        + t.row * d.cols;
    for (uint32_t q = threadIdx.x; q < t.images * pixels; q += blockDim.x) {
        uint32_t image = ampi_d_divide(q, d.by_pixels), pixel = q - image * pixels;
        uint32_t at = image * d.outputs * plane + pixel, outputs = pixel < t.rows * d.cols
            ? d.outputs - out : 0;
        uint16_t v[8];
        float f[8];
        AMPI_D_UNROLL
        for (uint32_t o = 0; o < 8; o++, at += plane) v[o] = o < outputs ? from[at] : (uint16_t)0;
        AMPI_D_UNROLL
        for (int o = 0; o < 8; o++) f[o] = ampi_d_direct_widen(v[o], d.dtype);
        ((float4*)to)[2 * q] = make_float4(f[0], f[1], f[2], f[3]);
        ((float4*)to)[2 * q + 1] = make_float4(f[4], f[5], f[6], f[7]);
    }
}

/* A column of dy and what its first pixel sees of x; the next one sees one new element of it. */
template <int KH>
AMPI_D void ampi_d_direct_column(float (&sum)[KH][8], const float* x, const float* dy,
        const ampi_cuda_direct& d, uint32_t rows) {
    const uint32_t down = (uint32_t)d.stride_h * d.tile_width;
    float v[KH], by[8];
    AMPI_D_UNROLL
    for (int a = 0; a + 1 < KH; a++, x += down) v[a] = *x;
    AMPI_D_UNROLL4
    for (uint32_t i = 0; i < rows; i++, x += down, dy += d.cols * AMPI_CUDA_DIRECT_OUTPUTS) {
        v[KH - 1] = *x;
        ampi_d_direct_load8(by, dy);
        AMPI_D_UNROLL
        for (int a = 0; a < KH; a++) ampi_d_direct_add8(sum[a], v[a], by);
        AMPI_D_UNROLL
        for (int a = 0; a + 1 < KH; a++) v[a] = v[a + 1];
    }
}

/* A thread's columns of a tile. */
template <int KH>
AMPI_D void ampi_d_direct_columns(float (&sum)[KH][8], const float* x, const float* dy,
        const ampi_cuda_direct& d, const ampi_cuda_direct_tile& t, uint32_t job, uint32_t split) {
    const uint32_t above = job / d.kernel_w, b = job % d.kernel_w, c = above / d.by_kernel_h.d;
    const uint32_t row = above % d.by_kernel_h.d * KH * (uint32_t)d.dilation_h;
    for (uint32_t q = split; q < t.images * d.cols; q += d.splits) {
        uint32_t image = q / d.cols, j = q - image * d.cols;
        const float* sees = x + ((c * d.images + image) * d.tile_height + row) * d.tile_width;
        ampi_d_direct_column<KH>(sum, sees + j * (uint32_t)d.stride_w + b * (uint32_t)d.dilation_w,
                                 dy + (image * d.by_pixels.d + j) * AMPI_CUDA_DIRECT_OUTPUTS, d,
                                 t.rows);
    }
}

/* The block's sums: thread t's number k lies at k*threads + t. */
template <int KH>
AMPI_D void ampi_d_direct_share(float* shared, const ampi_cuda_direct& d,
        const float (&sum)[KH][8], uint32_t out) {
    const uint32_t weights = d.outputs * d.out_step;
    __syncthreads();          /* the last tile has been read */
    AMPI_D_UNROLL
    for (uint32_t k = 0; k < KH * 8; k++) shared[k * blockDim.x + threadIdx.x] = sum[k / 8][k % 8];
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < d.jobs * KH * 8; e += blockDim.x) {
        uint32_t k = e / d.jobs, job = e % d.jobs, o = out + k % 8;
        const float* part = shared + k * blockDim.x + job;
        float v = *part;
        AMPI_D_UNROLL4
        for (uint32_t s = 1; s < d.splits; s++) v = __fadd_rn(v, part[s * d.jobs]);
        if (o < d.outputs)
            d.sums[(size_t)blockIdx.x * weights + o * d.out_step + ampi_d_direct_place<KH>(d, job,
                k / 8)] = v;
    }
}

/* Shares of dw by direct sums: a block takes neighbouring tiles; a thread holds KH weights of
   eight outputs. */
template <int KH>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_direct_dw(ampi_cuda_direct d) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(float, shared);
    const uint32_t out = blockIdx.y * AMPI_CUDA_DIRECT_OUTPUTS;
    const uint32_t job = threadIdx.x % d.jobs, split = threadIdx.x / d.jobs;
    const uint32_t first = (uint32_t)((uint64_t)d.tiles * blockIdx.x / d.shares);
    const uint32_t end = (uint32_t)((uint64_t)d.tiles * (blockIdx.x + 1) / d.shares);
    float *dy = shared, *x = shared + d.images * d.by_pixels.d * AMPI_CUDA_DIRECT_OUTPUTS;
    float sum[KH][8] = {};
    for (uint32_t number = first; number < end; number++) {
        const ampi_cuda_direct_tile t = ampi_d_direct_tile(d, number);
        __syncthreads();      /* the tile before has been read */
        ampi_d_direct_load_dy(dy, d, t, out);
        ampi_d_direct_load(x, d, t, 0, d.channels);
        __syncthreads();
        if (split < d.splits) ampi_d_direct_columns<KH>(sum, x, dy, d, t, job, split);
    }
    ampi_d_direct_share<KH>(shared, d, sum, out);
}

/* --- few channels, which, and how --- */

/* Bounds: outputs; weights of each (which take 16 KB); floats of x in the forward kernel (24 KB);
   of all in that for dw (40 KB, as the sums of its 256 threads take at KH = 5); blocks that dw is
   shared out to. */
enum { AMPI_CUDA_DIRECT_MAX_OUTPUTS = 16, AMPI_CUDA_DIRECT_MAX_WEIGHTS = 512,
       AMPI_CUDA_DIRECT_X = 6144, AMPI_CUDA_DIRECT_DW = 10240, AMPI_CUDA_DIRECT_BLOCKS = 256 };

/* The direct sums of a convolution's product `part`, but for the tiles; s tells its operands. For
   dx (transposed) x is dy and y is dx: see the formula above. */
AMPI_FN ampi_cuda_direct ampi_cuda_direct_of(const ampi_conv2d_sizes* c, const ampi_product* s,
        ampi_cuda_conv2d_part part) {
    const amp_conv2d_shape* z = &c->s;
    const int transposed = part == AMPI_CONV2D_DX;
    const uint32_t area = (uint32_t)c->area, along = (uint32_t)c->cg * area;
    ampi_cuda_direct d;
    AMPI_CLEAR(d);

    d.x = s->b.data; d.w = s->a.data; d.bias = ampi_mutable(s->c.bias); d.y = s->c.data;
    d.dtype = s->a.dtype; d.bias_dtype = s->c.bias_dtype; d.y_dtype = s->c.dtype;
    d.add = s->c.beta != 0.0f;

    d.n = (uint32_t)z->n;
    d.channels = (uint32_t)(transposed ? c->og : c->cg);
    d.outputs = (uint32_t)(transposed ? c->cg : c->og);
    d.height = (uint32_t)(transposed ? c->out_h : z->height);
    d.width = (uint32_t)(transposed ? c->out_w : z->width);
    d.rows = (uint32_t)(transposed ? z->height : c->out_h);
    d.cols = (uint32_t)(transposed ? z->width : c->out_w);

    d.kernel_h = (uint32_t)z->kernel_h; d.kernel_w = (uint32_t)z->kernel_w;
    d.stride_h = z->stride_h; d.stride_w = z->stride_w;
    d.dilation_h = z->dilation_h; d.dilation_w = z->dilation_w;
    d.pad_h = transposed ? (z->kernel_h - 1) * z->dilation_h - z->pad_h : z->pad_h;
    d.pad_w = transposed ? (z->kernel_w - 1) * z->dilation_w - z->pad_w : z->pad_w;

    /* w[o,c,area]: outputs of dx are the channels there */
    d.mirrored = transposed;
    d.out_step = transposed ? area : along;
    d.channel_step = transposed ? along : area;
    return d;
}

/* Is the shape one for direct sums? A kernel of one pixel needs no im2col. */
AMPI_FN int ampi_cuda_direct_fits(const ampi_conv2d_sizes* c, ampi_cuda_conv2d_part part) {
    const amp_conv2d_shape* z = &c->s;
    const int transposed = part == AMPI_CONV2D_DX;
    const size_t outputs = transposed ? c->cg : c->og, channels = transposed ? c->og : c->cg;
    if (z->groups != 1 || c->area == 1 || (transposed && (z->stride_h != 1 || z->stride_w != 1)))
        return 0;
    if (c->x_count > INT32_MAX || c->y_count > INT32_MAX) return 0;
    return outputs <= AMPI_CUDA_DIRECT_MAX_OUTPUTS
        && c->area <= AMPI_CUDA_DIRECT_MAX_WEIGHTS / channels;
}

AMPI_FN int ampi_cuda_direct_steep(const ampi_cuda_direct* d) {
    return d->stride_h != 1 || d->dilation_h != 1;
}

/* KH: how many rows of the kernel go together. */
AMPI_FN uint32_t ampi_cuda_direct_kh(const ampi_cuda_direct* d) {
    return d->kernel_h % 5 == 0 ? 5 : d->kernel_h % 3 == 0 ? 3 : 1;
}

/* Floats of one channel that a band of so many rows sees; padded sides are below 2^30. */
AMPI_FN size_t ampi_cuda_direct_area(const ampi_cuda_direct* d, size_t band) {
    size_t tile_height = (band - 1) * (size_t)d->stride_h
        + (size_t)(d->kernel_h - 1) * (size_t)d->dilation_h + 1;
    size_t tile_width = (size_t)(d->cols - 1) * (size_t)d->stride_w
        + (size_t)(d->kernel_w - 1) * (size_t)d->dilation_w + 1;
    return tile_height * tile_width;
}

/* Tiles of `images` images or of bands of `band` rows, for blocks of so many threads and kernel
   rows by kh. 0 means too many tiles. */
AMPI_FN int ampi_cuda_direct_set_tiles(ampi_cuda_direct* d, size_t band, size_t images, uint32_t kh,
        uint32_t threads) {
    size_t bands = ampi_cuda_parts(d->rows, band), tiles = ampi_cuda_parts(d->n, images) * bands;
    d->band = (uint32_t)band;
    d->bands = (uint32_t)bands;
    d->images = (uint32_t)images;
    d->tiles = (uint32_t)tiles;
    d->tile_width = (d->cols - 1) * (uint32_t)d->stride_w
        + (d->kernel_w - 1) * (uint32_t)d->dilation_w + 1;
    d->tile_height = (uint32_t)(ampi_cuda_direct_area(d, band) / d->tile_width);
    d->by_images = ampi_cuda_divisor_of(d->images);
    d->by_pixels = ampi_cuda_divisor_of(d->band * d->cols);
    d->by_kernel_w = ampi_cuda_divisor_of(d->kernel_w);
    d->by_kernel_h = ampi_cuda_divisor_of(d->kernel_h / kh);
    d->lanes = d->tile_width < threads ? d->tile_width : threads;
    d->down = threads / d->lanes;
    d->step = ampi_cuda_digits_of(d->down, d->tile_height, 1);
    return tiles < (size_t)1 << 30;
}

/* The tiles of up to so many threads, each with `per` pixels below each other; returns how many
   threads that are. 0: a tile is too large. */
AMPI_FN uint32_t ampi_cuda_direct_cut(ampi_cuda_direct* d, uint32_t per, uint32_t threads) {
    size_t all = ampi_cuda_parts(d->rows, per),
        count = ampi_min_size(all, ampi_max_size(threads / d->cols, 1));
    size_t area, images = 1;
    if (d->cols > AMPI_CUDA_BLOCK) return 0;
    while (count > 0 && ampi_cuda_direct_area(d, count * per) > AMPI_CUDA_DIRECT_X) count--;
    if (count == 0) return 0;
    count = ampi_cuda_parts(all, ampi_cuda_parts(all, count));
    area = ampi_cuda_direct_area(d, count * per);
    if (count == all)
        images = ampi_max_size(ampi_min_size(ampi_min_size(d->n, threads / (count * d->cols)),
            AMPI_CUDA_DIRECT_X / area), 1);
    d->channels_at_once = (uint32_t)ampi_min_size(d->channels,
        AMPI_CUDA_DIRECT_X / (images * area));
    threads = (uint32_t)ampi_cuda_parts(images * count * d->cols, 32) * 32;
    return ampi_cuda_direct_set_tiles(d, count * per, images, ampi_cuda_direct_kh(d), threads)
        ? threads : 0;
}

/* Starts ampi_k_direct for d, and gives its result in *r; returns 0, and starts nothing, if no tile
   fits. A thread has four pixels where that leaves a warp for each of a multiprocessor's four
   schedulers; blocks are large where they fill all of it twice. */
AMPI_FN int ampi_cuda_direct_launch(const amp_exec* exec, const char* op, ampi_cuda_direct* d,
        amp_result* r) {
    const uint32_t groups = (uint32_t)ampi_cuda_parts(d->outputs, AMPI_CUDA_DIRECT_OUTPUTS);
    const uint32_t kh = ampi_cuda_direct_kh(d);
    const size_t enough =  /* threads, one warp a scheduler */
        128 * ampi_max_size((size_t)ampi_cuda_attribute(cudaDevAttrMultiProcessorCount), 1);
    const size_t columns = (size_t)d->n * d->cols * groups,
        fours = columns * ampi_cuda_parts(d->rows, 4);

    /* `per` pixels of a thread, `work` threads in all, at enough `threads` in a block */
    const uint32_t per = !ampi_cuda_direct_steep(d) && fours >= enough ? 4 : 1;
    const size_t work = per == 4 ? fours : columns * d->rows;
    const uint32_t threads = ampi_cuda_direct_cut(d, per, work >= 4 * enough ? AMPI_CUDA_BLOCK
        : AMPI_CUDA_BLOCK / 2);
    if (threads == 0) return 0;

    void (*kernel)(ampi_cuda_direct) =
        per == 4 ? (kh == 5 ? ampi_k_direct<4, 5> : kh == 3 ? ampi_k_direct<4,
                 3> : ampi_k_direct<4, 1>) : (kh == 5 ? ampi_k_direct<1,
                 5> : kh == 3 ? ampi_k_direct<1, 3> : ampi_k_direct<1, 1>);

    /* shared memory: the weights of a block's outputs, and x */
    size_t floats = (size_t)d->channels * d->kernel_h * d->kernel_w * AMPI_CUDA_DIRECT_OUTPUTS;
    floats += (size_t)d->channels_at_once * d->images * d->tile_height * d->tile_width;
    *r = ampi_cuda_launch(exec, op, kernel, dim3(d->tiles, groups), threads,
        floats * sizeof(float), *d);
    return 1;
}

/* The tiles of dw: such that all blocks have some, with about four rows or more, and as large as
   shared memory allows; of a share's images, each tile has as many as the others. They depend on
   the shape alone. 0: a tile is too large. */
AMPI_FN int ampi_cuda_direct_cut_dw(ampi_cuda_direct* d) {
    const size_t room = AMPI_CUDA_DIRECT_DW, groups = ampi_cuda_parts(d->outputs,
        AMPI_CUDA_DIRECT_OUTPUTS);
    const size_t blocks = AMPI_CUDA_DIRECT_BLOCKS / groups, pixel = AMPI_CUDA_DIRECT_OUTPUTS,
        n = d->n;
    const uint32_t kh = ampi_cuda_direct_steep(d) ? 1 : ampi_cuda_direct_kh(d);

    /* bands of an image: enough for all blocks, at most rows / 4, rounded up; each fits in `room`
       floats */
    size_t bands = ampi_min_size(ampi_cuda_parts(blocks, n), ampi_cuda_parts(d->rows, 4)),
        images = 1, each, columns;
    size_t band = ampi_min_size(ampi_cuda_parts(d->rows, bands), room / (pixel * d->cols));
    while (band > 0 && d->channels * ampi_cuda_direct_area(d, band) + band * d->cols * pixel > room)
        band--;

    /* a job is a thread's */
    d->jobs = d->channels * (d->kernel_h / kh) * d->kernel_w;
    if (band == 0 || d->jobs > AMPI_CUDA_BLOCK) return 0;

    /* bands of equal height; whole images, of each block's share as many as fit, equally, too */
    band = ampi_cuda_parts(d->rows, ampi_cuda_parts(d->rows, band));
    if (band == d->rows) {
        each = ampi_cuda_parts(n, blocks);
        images = room / (d->channels * ampi_cuda_direct_area(d, band) + band * d->cols * pixel);
        images = ampi_cuda_parts(each, ampi_cuda_parts(each, images));
    }

    /* threads of one job share the columns of a tile */
    columns = images * d->cols;
    d->splits = (uint32_t)ampi_cuda_parts(columns,
        ampi_cuda_parts(columns, AMPI_CUDA_BLOCK / d->jobs));
    if (!ampi_cuda_direct_set_tiles(d, band, images, kh, AMPI_CUDA_BLOCK)) return 0;
    d->shares = (uint32_t)ampi_min_size(d->tiles, blocks);
    return 1;
}

AMPI_FN size_t ampi_cuda_direct_sums(const ampi_cuda_direct* d) {
    return (size_t)d->shares * d->outputs * d->out_step * sizeof(float);
}

/* Bytes of workspace with which dw is summed directly; 0 if it is not. */
AMPI_FN size_t ampi_cuda_direct_workspace(const ampi_conv2d_sizes* c) {
    ampi_product none;
    AMPI_CLEAR(none);
    ampi_cuda_direct d = ampi_cuda_direct_of(c, &none, AMPI_CONV2D_DW);
    if (!ampi_cuda_direct_fits(c, AMPI_CONV2D_DW) || !ampi_cuda_direct_cut_dw(&d)) return 0;
    return ampi_cuda_direct_sums(&d) + 16;
}

/* Without the workspace another kernel has to do it. */
AMPI_FN int ampi_cuda_direct_launch_dw(const amp_exec* exec, const char* op, ampi_cuda_direct* d,
        int accumulate, amp_result* r) {
    const uint32_t kh = ampi_cuda_direct_steep(d) ? 1 : ampi_cuda_direct_kh(d);
    void (*kernel)(ampi_cuda_direct) =
        kh == 5 ? ampi_k_direct_dw<5> : kh == 3 ? ampi_k_direct_dw<3> : ampi_k_direct_dw<1>;
    if (!ampi_cuda_direct_cut_dw(d)) return 0;
    d->sums = (float*)ampi_cuda_scratch(exec, ampi_cuda_direct_sums(d));
    if (!d->sums) return 0;
    const unsigned groups = (unsigned)ampi_cuda_parts(d->outputs, AMPI_CUDA_DIRECT_OUTPUTS);
    *r = ampi_cuda_launch(exec, op, kernel, dim3(d->shares, groups), AMPI_CUDA_BLOCK,
        AMPI_CUDA_DIRECT_DW * sizeof(float), *d);
    if (*r == AMP_OK)
        *r = ampi_cuda_bias_grad(exec, op, amp_f32(d->sums), amp_ref_of(d->y, d->y_dtype),
            accumulate, d->shares, (size_t)d->outputs * d->out_step, 1);
    return 1;
}

/* Returns 0 where the product is left to other kernels. */
AMPI_FN int ampi_cuda_try_direct(const amp_exec* exec, const char* op, const ampi_conv2d_sizes* c,
        const ampi_product* s, ampi_cuda_conv2d_part part, int relu, amp_result* r) {
    if (!ampi_cuda_direct_fits(c, part) || !ampi_cuda_on_tensor_cores(s->a.dtype, s->b.dtype))
        return 0;
    ampi_cuda_direct d = ampi_cuda_direct_of(c, s, part);
    d.relu = relu;
    return part == AMPI_CONV2D_DW ? ampi_cuda_direct_launch_dw(exec, op, &d, s->c.beta != 0.0f, r)
                                  : ampi_cuda_direct_launch(exec, op, &d, r);
}

/* --- groups of few channels, direct sums --- */

/* A group of few channels, as of a depthwise convolution, fills no tile of a product. A thread sums
   four pixels below each other, over (c, a, b) ascending as a product does. dx is the y of dy here
   too, for any stride: where a pixel meets none of dy at some (a, b), nothing is added. */
enum { AMPI_CUDA_GROUPED_ROWS = 4, AMPI_CUDA_GROUPED_CHANNELS = 4,
       AMPI_CUDA_GROUPED_BLOCKS = 2048, AMPI_CUDA_GROUPED_PIXELS = 2048 };

/* The row (column) of x that row i of y meets at row a of the kernel; if there is none in the image
   a number beyond the last. *met: is there a product? */
AMPI_D uint32_t ampi_d_grouped_meet(const ampi_cuda_direct_side& s, uint32_t i, uint32_t a,
        int* met) {
    const uint32_t t = i * s.mul + s.base + a * s.step, q = ampi_d_divide(t, s.by);
    *met = q * s.by.d == t;
    return q - s.lift;
}

/* sum[p] += what pixel (row + p, j) of y sees of one channel. K: the kernel's side, 0 = any. */
template <typename T, int K>
AMPI_D void ampi_d_grouped_add(float (&sum)[AMPI_CUDA_GROUPED_ROWS], const ampi_cuda_direct& d,
        const T* x, const T* w, uint32_t row, uint32_t j) {
    const uint32_t kernel_h = K ? K : d.kernel_h, kernel_w = K ? K : d.kernel_w;
    for (uint32_t a = 0; a < kernel_h; a++) {
        uint32_t y[AMPI_CUDA_GROUPED_ROWS];
        int met[AMPI_CUDA_GROUPED_ROWS], column;
        AMPI_D_UNROLL
        for (uint32_t p = 0; p < AMPI_CUDA_GROUPED_ROWS; p++)
            y[p] = ampi_d_grouped_meet(d.side_h, row + p, a, &met[p]);
        for (uint32_t b = 0; b < kernel_w; b++) {
            const uint32_t at = ampi_d_grouped_meet(d.side_w, j, b, &column);
            const float by = ampi_d_direct_widen(w[a * kernel_w + b], d.dtype);
            T v[AMPI_CUDA_GROUPED_ROWS];
            AMPI_D_UNROLL
            for (uint32_t p = 0; p < AMPI_CUDA_GROUPED_ROWS; p++)
                v[p] = y[p] < d.height && at < d.width ? x[y[p] * d.width + at] : (T)0;
            AMPI_D_UNROLL
            for (uint32_t p = 0; p < AMPI_CUDA_GROUPED_ROWS; p++)
                if (met[p] && column)
                    sum[p] = ampi_fma(1, ampi_d_direct_widen(v[p], d.dtype), by, sum[p]);
        }
    }
}

/* y, or dx, of groups of few channels. */
template <typename T, int K>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_grouped(ampi_cuda_direct d) {
    ampi_ptx_grid_wait();

    /* plane, four rows and column of y; the plane's image, group and output of it */
    const ampi_cuda_digits at = ampi_d_digits_of(blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x,
        (d.rows - 1) / AMPI_CUDA_GROUPED_ROWS + 1, d.cols);
    const ampi_cuda_digits plane = ampi_d_digits_of(at.high, d.groups, d.outputs);
    const uint32_t row = at.middle * AMPI_CUDA_GROUPED_ROWS, pixels = d.height * d.width;
    const T* x = (const T*)d.x
        + (size_t)(plane.high * d.groups + plane.middle) * d.channels * pixels;
    const T* w = (const T*)d.w + plane.low * d.out_step
        + plane.middle * d.channels * d.outputs * d.kernel_h * d.kernel_w;
    float sum[AMPI_CUDA_GROUPED_ROWS] = {};
    if (plane.high >= d.n) return;
    for (uint32_t c = 0; c < d.channels; c++, x += pixels, w += d.channel_step)
        ampi_d_grouped_add<T, K>(sum, d, x, w, row, at.low);

    const amp_ref y = { d.y, d.y_dtype }, bias = { d.bias, d.bias_dtype };
    AMPI_D_UNROLL
    for (uint32_t p = 0; p < AMPI_CUDA_GROUPED_ROWS && row + p < d.rows; p++) {
        const size_t i = ((size_t)at.high * d.rows + row + p) * d.cols + at.low;
        if (d.bias)
            sum[p] = __fadd_rn(sum[p], ampi_d_load(bias, plane.middle * d.outputs + plane.low));
        if (d.add) sum[p] = __fadd_rn(ampi_d_load(y, i), sum[p]);
        ampi_d_store(y, i, ampi_clean_nan(d.relu ? ampi_act_relu(1, sum[p]) : sum[p]));
    }
}

/* dw[o,c,a,b] = sum over images and pixels of dy * x. A block has all weights of a K x K kernel, or
   one of another kernel (K = 1), and a share of the pixels. Its threads' sums are added in a fixed
   order, and then the shares' as those of a bias are (ampi_k_bias_columns). */
template <int K>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_grouped_dw(ampi_cuda_direct d) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    const uint32_t tiles = K == 1 ? d.kernel_h * d.kernel_w : 1, first = blockIdx.x % tiles;
    const uint32_t o = blockIdx.x / tiles / d.channels,
        c = o / d.outputs * d.channels + blockIdx.x / tiles % d.channels;
    const uint64_t pixels = (uint64_t)d.n * d.rows * d.cols;
    const uint32_t end = (uint32_t)(pixels * (blockIdx.y + 1) / gridDim.y);
    uint32_t q = (uint32_t)(pixels * blockIdx.y / gridDim.y) + threadIdx.x;
    const ampi_cuda_digits step = ampi_d_digits_of(AMPI_CUDA_BLOCK, d.rows, d.cols);
    ampi_cuda_digits at = ampi_d_digits_of(q, d.rows, d.cols);  /* image, row, column */
    float sum[K * K] = {};
    for (; q < end; q += AMPI_CUDA_BLOCK) {
        const uint16_t* x = (const uint16_t*)d.x
            + (size_t)(at.high * d.groups * d.channels + c) * d.height * d.width;
        const uint16_t dy = ((const uint16_t*)d.w)[((size_t)(at.high * d.groups * d.outputs + o)
            * d.rows + at.middle) * d.cols + at.low];
        uint16_t v[K * K];
        AMPI_D_UNROLL
        for (uint32_t k = 0; k < K * K; k++) {
            const uint32_t width = K == 1 ? d.kernel_w : (uint32_t)K;
            int met;
            const uint32_t row = ampi_d_grouped_meet(d.side_h, at.middle, (first + k) / width,
                &met), column = ampi_d_grouped_meet(d.side_w, at.low, (first + k) % width, &met);
            v[k] = row < d.height && column < d.width ? x[row * d.width + column] : (uint16_t)0;
        }
        AMPI_D_UNROLL
        for (int k = 0; k < K * K; k++)
            sum[k] = ampi_fma(1, ampi_d_direct_widen(v[k], d.dtype),
                ampi_d_direct_widen(dy, d.dtype), sum[k]);
        ampi_d_step(at, step, d.rows, d.cols);
    }

    float* sums = d.sums + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * (K * K);
    AMPI_D_UNROLL
    for (int k = 0; k < K * K; k++) {
        double v[1] = { (double)sum[k] };
        ampi_d_group_sum<AMPI_CUDA_BLOCK>(v, shared);
        if (threadIdx.x == 0) sums[k] = (float)v[0];
    }
}

/* --- groups of few channels, which, and how --- */

/* Four rows of a group are a sixteenth of a tile, and Tensor Cores about as many times as fast. */
AMPI_FN int ampi_cuda_grouped_fits(const ampi_conv2d_sizes* c) {
    return c->s.groups > 1 && ampi_max_size(c->cg, c->og) <= AMPI_CUDA_GROUPED_CHANNELS
        && c->x_count <= INT32_MAX && c->y_count <= INT32_MAX;
}

/* A side of a part; for dx of dy's pixels `stride` apart. base keeps numbers positive. */
AMPI_FN ampi_cuda_direct_side ampi_cuda_direct_side_of(uint32_t kernel, int stride, int pad,
        int dilation, int transposed) {
    const uint32_t by = (uint32_t)stride, step = (uint32_t)dilation,
        lift = (kernel - 1) * step / by + 1;
    const ampi_cuda_direct_side x = { by, 0, step, (uint32_t)pad, ampi_cuda_divisor_of(1) },
        dy = { 1, (uint32_t)pad + lift * by, 0u - step, lift, ampi_cuda_divisor_of(by) };
    return transposed ? dy : x;
}

/* The grid of dw: blocks beside each other for all weights, and below for shares of the pixels, as
   the shape alone tells. *k: a kernel's side. */
AMPI_FN dim3 ampi_cuda_grouped_grid(const ampi_conv2d_sizes* c, int* k) {
    *k = c->s.kernel_h == 3 && c->s.kernel_w == 3 ? 3 : 1;
    const size_t tiles = c->w_count / (size_t)(*k * *k);
    const size_t pixels = (size_t)c->s.n * c->out_pixels;
    return dim3((unsigned)tiles, (unsigned)ampi_max_size(ampi_min_size(AMPI_CUDA_GROUPED_BLOCKS
        / tiles, pixels / AMPI_CUDA_GROUPED_PIXELS), 1));
}

/* Bytes of workspace with which dw is summed directly; 0 if it is not. */
AMPI_FN size_t ampi_cuda_grouped_workspace(const ampi_conv2d_sizes* c) {
    int k;
    return ampi_cuda_grouped_fits(c)
        ? ampi_cuda_grouped_grid(c, &k).y * c->w_count * sizeof(float) + 16 : 0;
}

/* dw in two launches; 0 without the workspace. */
AMPI_FN int ampi_cuda_grouped_launch_dw(const amp_exec* exec, const char* op,
        const ampi_conv2d_sizes* c, ampi_cuda_direct* d, amp_result* r) {
    int k;
    const dim3 grid = ampi_cuda_grouped_grid(c, &k);
    d->sums = (float*)ampi_cuda_scratch(exec, grid.y * c->w_count * sizeof(float));
    if (!d->sums) return 0;
    *r = ampi_cuda_launch(exec, op, k == 3 ? ampi_k_grouped_dw<3> : ampi_k_grouped_dw<1>, grid,
        AMPI_CUDA_BLOCK, AMPI_CUDA_BLOCK / 32 * sizeof(double), *d);
    if (*r == AMP_OK)
        *r = ampi_cuda_bias_grad(exec, op, amp_f32(d->sums), amp_ref_of(d->y, d->y_dtype), d->add,
            grid.y, c->w_count, 1);
    return 1;
}

/* Returns 0 where the part is left to products: where types are mixed; dw of what Tensor Cores do
   not take, whose sums are in the CPU's order. */
AMPI_FN int ampi_cuda_try_grouped(const amp_exec* exec, const char* op, const ampi_conv2d_sizes* c,
        const ampi_product* s, ampi_cuda_conv2d_part part, int relu, amp_result* r) {
    if (!ampi_cuda_grouped_fits(c) || s->a.dtype != s->b.dtype) return 0;
    ampi_cuda_direct d = ampi_cuda_direct_of(c, s, part);
    d.relu = relu;
    d.groups = (uint32_t)c->s.groups;
    d.side_h = ampi_cuda_direct_side_of(d.kernel_h, d.stride_h, c->s.pad_h, d.dilation_h,
        d.mirrored);
    d.side_w = ampi_cuda_direct_side_of(d.kernel_w, d.stride_w, c->s.pad_w, d.dilation_w,
        d.mirrored);
    if (part == AMPI_CONV2D_DW)
        return ampi_cuda_on_tensor_cores(d.dtype, d.dtype)
            && ampi_cuda_grouped_launch_dw(exec, op, c, &d, r);
    const int wide = d.dtype == AMP_F32, three = d.kernel_h == 3 && d.kernel_w == 3;
    const size_t threads = (size_t)d.n * d.groups * d.outputs * d.cols
        * ampi_cuda_parts(d.rows, AMPI_CUDA_GROUPED_ROWS);
    *r = ampi_cuda_launch(exec, op, wide
        ? (three ? ampi_k_grouped<float, 3> : ampi_k_grouped<float, 0>)
        : (three ? ampi_k_grouped<uint16_t, 3> : ampi_k_grouped<uint16_t, 0>),
        (unsigned)ampi_cuda_parts(threads, AMPI_CUDA_BLOCK), AMPI_CUDA_BLOCK, 0, d);
    return 1;
}

/* --- the three products --- */

/* One part of a convolution, summed directly where that fits, else by products of its groups. */
AMPI_FN amp_result ampi_cuda_conv2d_run(const amp_exec* exec, const char* op,
        const ampi_conv2d_sizes* c, const ampi_convolution* v, ampi_cuda_conv2d_part part,
        int relu) {
    const ampi_cuda_batch groups = { v->groups, v->a_group, v->b_group, v->c_group, v->bias_group };
    amp_result r;
    if (ampi_cuda_try_direct(exec, op, c, &v->s, part, relu, &r)) return r;
    if (part != AMPI_CONV2D_DX && ampi_cuda_try_grouped(exec, op, c, &v->s, part, relu, &r))
        return r;
    return ampi_cuda_product_relu(exec, op, &v->s, &groups, relu);
}

/* The next phase of dx that has pixels, from number *i on; see ampi_conv2d_dx. 0: there is none. */
AMPI_FN int ampi_cuda_conv2d_phase(ampi_convolution* v, const ampi_conv2d_sizes* c,
        const ampi_layer_refs* t, size_t* i) {
    const size_t down = ampi_min_size((size_t)c->s.stride_h, (size_t)c->s.height);
    const size_t across = ampi_min_size((size_t)c->s.stride_w, (size_t)c->s.width);
    if (*i == down * across) return 0;
    ampi_conv2d_dx(v, c, t, (int)(*i / across), (int)(*i % across));
    *i += 1;
    return 1;
}

/* All phases at once where groups have few channels. Where a phase meets no kernel position nothing
   is added to dx, but for a bias. */
AMPI_FN amp_result ampi_cuda_conv2d_dx(const amp_exec* exec, const char* op,
                                       const ampi_conv2d_sizes* c, const ampi_layer_refs* t) {
    ampi_convolution v;
    size_t i = 0;
    int zero = 0;
    amp_result r;
    while (ampi_cuda_conv2d_phase(&v, c, t, &i)) zero |= v.s.k == 0;
    ampi_conv2d_dx(&v, c, t, 0, 0);
    v.s.a.data = t->w.data;                       /* of all kernel positions */
    if (!zero && ampi_cuda_try_grouped(exec, op, c, &v.s, AMPI_CONV2D_DX, 0, &r)) return r;
    if (zero && !(t->accumulate & AMP_ACCUMULATE_INPUT))
        AMPI_TRY(ampi_cuda_zero(ampi_mutable(t->dx.data), c->x_count * amp_dtype_size(t->dx.dtype),
            exec));
    i = 0;
    while (ampi_cuda_conv2d_phase(&v, c, t, &i))
        if (v.s.k > 0 || t->b.data)
            AMPI_TRY(ampi_cuda_conv2d_run(exec, op, c, &v, AMPI_CONV2D_DX, 0));
    return AMP_OK;
}

AMPI_FN size_t ampi_cuda_convolution_workspace(const ampi_convolution* v) {
    return ampi_cuda_product_workspace(v->s.m, v->s.n, v->s.k, v->groups);
}

/* The largest workspace that one of a convolution's parts can use, in bytes. */
AMPI_FN size_t ampi_cuda_conv2d_workspace(const amp_conv2d_shape* s) {
    ampi_layer_refs none;
    ampi_convolution v;
    ampi_conv2d_sizes c;
    size_t bytes, i = 0;
    if (ampi_conv2d_init(&c, s, NULL) != AMP_OK) return 0;
    AMPI_CLEAR(none);
    ampi_conv2d_y(&v, &c, &none);
    bytes = ampi_max_size(ampi_cuda_convolution_workspace(&v),
        ampi_max_size(ampi_cuda_direct_workspace(&c), ampi_cuda_grouped_workspace(&c)));
    while (ampi_cuda_conv2d_phase(&v, &c, &none, &i))
        bytes = ampi_max_size(bytes, ampi_cuda_convolution_workspace(&v));
    ampi_conv2d_dw(&v, &c, &none);
    size_t db = ampi_cuda_bias_bytes((size_t)c.s.n, (size_t)c.s.out_channels, c.out_pixels);
    return ampi_max_size(ampi_max_size(bytes, ampi_cuda_convolution_workspace(&v)),
        db ? db + 16 : 0);
}

/* The table's conv2d_forward; RELU: its conv2d_relu_forward. */
template <int RELU>
static amp_result ampi_cuda_conv2d_forward(const amp_conv2d_shape* shape, amp_ref x, amp_ref w,
        amp_ref b, amp_ref y, const amp_exec* exec) {
    const char* op = "amp_cuda_conv2d_forward";
    const ampi_layer_refs t = { x, w, b, y, AMP_NONE, AMP_NONE, AMP_NONE, 0 };
    ampi_conv2d_sizes c;
    ampi_convolution v;
    AMPI_TRY(ampi_check_conv2d(&c, shape, ampi_exec_logger(exec), &t, 0));
    AMPI_TRY(ampi_cuda_conv2d_fits(&c, exec, op));
    AMPI_TRY(ampi_cuda_check_layer(exec, op, &t, 0));
    ampi_conv2d_y(&v, &c, &t);
    return ampi_cuda_conv2d_run(exec, op, &c, &v, AMPI_CONV2D_Y, RELU);
}

/* The table's conv2d_backward: dx in phases of its pixels, dw as a product, db as a sum over
   pixels. */
AMPI_CUDA(conv2d_backward, const amp_conv2d_shape* shape, amp_ref dy, amp_ref x, amp_ref w,
        amp_ref dx, amp_ref dw, amp_ref db, int accumulate) {
    const char* op = "amp_cuda_conv2d_backward";
    const ampi_layer_refs t = { x, w, AMP_NONE, dy, dx, dw, db, accumulate };
    ampi_conv2d_sizes c;
    ampi_convolution v;
    AMPI_TRY(ampi_check_conv2d(&c, shape, ampi_exec_logger(exec), &t, 1));
    AMPI_TRY(ampi_cuda_conv2d_fits(&c, exec, op));
    AMPI_TRY(ampi_cuda_check_layer(exec, op, &t, 1));
    if (dx.data) AMPI_TRY(ampi_cuda_conv2d_dx(exec, op, &c, &t));
    if (dw.data) {
        ampi_conv2d_dw(&v, &c, &t);
        AMPI_TRY(ampi_cuda_conv2d_run(exec, op, &c, &v, AMPI_CONV2D_DW, 0));
    }
    if (!db.data) return AMP_OK;
    return ampi_cuda_bias_grad(exec, op, dy, db, accumulate & AMP_ACCUMULATE_PARAMS, (size_t)c.s.n,
        (size_t)c.s.out_channels, c.out_pixels);
}

/* The table's conv_transpose2d_forward: dx of a convolution, with a bias. */
AMPI_CUDA(conv_transpose2d_forward, const amp_conv2d_shape* shape, amp_ref x, amp_ref w, amp_ref b,
        amp_ref y) {
    const char* op = "amp_cuda_conv_transpose2d_forward";
    const ampi_layer_refs t = { x, w, b, y, AMP_NONE, AMP_NONE, AMP_NONE, 0 };
    const ampi_layer_refs conv = { AMP_NONE, w, b, x, y, AMP_NONE, AMP_NONE, 0 };
    ampi_conv2d_sizes c;
    AMPI_TRY(ampi_check_transposed(&c, shape, ampi_exec_logger(exec), &t, 0));
    AMPI_TRY(ampi_cuda_conv2d_fits(&c, exec, op));
    AMPI_TRY(ampi_cuda_check_layer(exec, op, &t, 0));
    return ampi_cuda_conv2d_dx(exec, op, &c, &conv);
}

/* The table's conv_transpose2d_backward: dx is the convolution, dw its dw. */
AMPI_CUDA(conv_transpose2d_backward, const amp_conv2d_shape* shape, amp_ref dy, amp_ref x,
        amp_ref w, amp_ref dx, amp_ref dw, amp_ref db, int accumulate) {
    const char* op = "amp_cuda_conv_transpose2d_backward";
    const ampi_layer_refs t = { x, w, AMP_NONE, dy, dx, dw, db, accumulate };
    ampi_layer_refs conv = { dy, w, AMP_NONE, dx, AMP_NONE, dw, db, accumulate };
    ampi_conv2d_sizes c;
    ampi_convolution v;
    AMPI_TRY(ampi_check_transposed(&c, shape, ampi_exec_logger(exec), &t, 1));
    AMPI_TRY(ampi_cuda_conv2d_fits(&c, exec, op));
    AMPI_TRY(ampi_cuda_check_layer(exec, op, &t, 1));
    if (dx.data) {
        ampi_conv2d_y(&v, &c, &conv);
        AMPI_TRY(ampi_cuda_conv2d_run(exec, op, &c, &v, AMPI_CONV2D_Y, 0));
    }
    if (dw.data) {
        conv.y = x;
        ampi_conv2d_dw(&v, &c, &conv);
        AMPI_TRY(ampi_cuda_conv2d_run(exec, op, &c, &v, AMPI_CONV2D_DW, 0));
    }
    if (!db.data) return AMP_OK;
    return ampi_cuda_bias_grad(exec, op, dy, db, accumulate & AMP_ACCUMULATE_PARAMS, (size_t)c.s.n,
        (size_t)c.s.channels, c.in_pixels);
}

/* >>impl-pool   Pooling: a thread, or T of them, for a pixel of y; windows of 2x2 and 3x3 side by
   side by vectors.
   Words. window: the pixels of one output. key: an integer in the order of floats. This room calls
   impl-device, impl-gemm for divisions, impl-launch and impl-conv. */

/* A call of pooling. */
typedef struct ampi_cuda_pool {
    ampi_pool_plan p;
    amp_ref x, dy;           /* backward: x is NULL for an average */
    amp_ref y;               /* backward: dx */
    int add;                 /* backward: to what dx holds */
    uint32_t tiles;          /* of all planes, see ampi_d_pool_tile */
    ampi_cuda_divisor by_tiles;  /* the tiles of a row of windows */
} ampi_cuda_pool;

/* The window of output pixel (oh, ow) without its padding. */
typedef struct ampi_cuda_window { int top, bottom, left, right; } ampi_cuda_window;

/* The pixels of x that output pixel (oh, ow) sees, clipped to the image. */
AMPI_D ampi_cuda_window ampi_d_window(const ampi_pool_plan& p, int oh, int ow) {
    ampi_span rows = ampi_window(p.h, oh), columns = ampi_window(p.w, ow);
    ampi_cuda_window w = { rows.first, rows.last, columns.first, columns.last };
    return w;
}

/* What a sum is divided by: the pixels of an average, or 1. */
AMPI_D float ampi_d_pool_count(const ampi_pool_plan& p, const ampi_cuda_window& w) {
    if (p.sum) return 1.0f;
    if (!p.exclude_pad) return (float)p.h.kernel * (float)p.w.kernel;
    return (float)(w.bottom - w.top) * (float)(w.right - w.left);
}

/* Pixel i of n planes of h x w: its plane, row and column. */
AMPI_D size_t ampi_d_pixel(size_t i, int h, int w, int* row, int* column) {
    size_t above = ampi_d_quotient(i, (size_t)w), plane = ampi_d_quotient(above, (size_t)h);
    *column = (int)(i - above * (size_t)w);
    *row = (int)(above - plane * (size_t)h);
    return plane;
}

/* A NaN is larger than anything, and the first NaN stays. */
AMPI_D float ampi_d_pool_max(float a, float x) {
    return ampi_select(ampi_mask(x > a) | (ampi_nan_mask(x) & ~ampi_nan_mask(a)), x, a);
}

/* One thread looks at a whole window, row by row. */
AMPI_D float ampi_d_pool_thread(const ampi_cuda_pool& q, const ampi_cuda_window& w, size_t plane) {
    float acc = q.p.max ? ampi_float(0xff800000u) : 0.0f;
    for (int i = w.top; i < w.bottom; i++)
        for (int j = w.left; j < w.right; j++) {
            float v = ampi_d_load(q.x, plane + (size_t)i * (size_t)q.p.w.size + (size_t)j);
            acc = q.p.max ? ampi_d_pool_max(acc, v) : acc + v;
        }
    return acc;
}

/* A warp shares a large window w of the plane that begins at element `plane`: lane l takes pixels
   l, l + 32, ... of it, in the order of rows. Eight make a float sum, these a double one. All lanes
   return the sum, or the maximum. */
AMPI_D float ampi_d_pool_warp(const ampi_cuda_pool& q, const ampi_cuda_window& w, size_t plane) {
    const size_t width = (size_t)(w.right - w.left), area = width * (size_t)(w.bottom - w.top);
    float max = ampi_float(0xff800000u);
    double sum[1] = { 0.0 };
    for (size_t i = threadIdx.x % 32; i < area; i += 256) {
        /* pixel k of the window; zeros behind the last */
        float v[8];
        for (int j = 0; j < 8; j++) {
            size_t k = i + (size_t)(32 * j), row = ampi_d_quotient(k, width);
            size_t at = plane + ((size_t)w.top + row) * (size_t)q.p.w.size + (size_t)w.left
                + (k - row * width);
            v[j] = k < area ? ampi_d_load(q.x, at) : 0.0f;
            if (k < area) max = ampi_d_pool_max(max, v[j]);
        }
        sum[0] += (double)ampi_d_sum8(v);
    }

    if (!q.p.max) {
        ampi_d_warp_sum(sum);
        return (float)sum[0];
    }

    for (int step = 16; step > 0; step /= 2)
        max = ampi_d_pool_max(max, __shfl_xor_sync(0xffffffffu, max, step));
    return max;
}

/* y, or one of its pixels to T threads, 1 or 32. */
template <int T>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_pool(ampi_cuda_pool q) {
    ampi_ptx_grid_wait();
    const ampi_pool_plan& p = q.p;
    const size_t step = (size_t)gridDim.x * (AMPI_CUDA_BLOCK / T);
    size_t i = (size_t)blockIdx.x * (AMPI_CUDA_BLOCK / T) + threadIdx.x / T;
    for (; i < p.y_n; i += step) {
        int oh, ow;
        size_t plane = ampi_d_pixel(i, p.h.out, p.w.out, &oh,
            &ow) * (size_t)p.h.size * (size_t)p.w.size;
        ampi_cuda_window w = ampi_d_window(p, oh, ow);
        float v = T == 1 ? ampi_d_pool_thread(q, w, plane) : ampi_d_pool_warp(q, w, plane);
        if (!p.max) v /= ampi_d_pool_count(p, w);
        if (threadIdx.x % T == 0) ampi_d_store(q.y, i, v);
    }
}

/* Windows of K x K pixels that lie side by side and fill the image are taken in tiles: G neighbours
   of one row of windows to a thread, which reads each of their pixels once. No row of windows is
   left out between two planes, so the tiles of all planes are one row after another: with S tiles
   to a row of windows, tile i lies in row i / S. Its pixels of image row r begin at (i/S * K + r) *
   w + i%S * K*G; w being S * K*G, that is i * K*G + (i/S * (K-1) + r) * w. */
AMPI_D uint32_t ampi_d_pool_tile(const ampi_cuda_pool& q, uint32_t i, uint32_t k, uint32_t g,
        uint32_t r) {
    return i * k * g + (ampi_d_divide(i, q.by_tiles) * (k - 1) + r) * (uint32_t)q.p.w.size;
}

/* N neighbouring elements: aligned, where N is even, so that one access takes them all. */
template <typename T, int N>
struct alignas(N % 2 ? sizeof(T) : N * sizeof(T)) ampi_cuda_vector { T e[N]; };

/* N neighbouring elements as floats, read at once; aligned to N elements. */
template <int N>
AMPI_D void ampi_d_load_vector(float (&v)[N], amp_ref x, size_t i) {
    if (x.dtype == AMP_F32) {
        ampi_cuda_vector<float, N> r = *(const ampi_cuda_vector<float,
            N>*)((const float*)x.data + i);
        for (int j = 0; j < N; j++) v[j] = r.e[j];
    } else {
        ampi_cuda_vector<uint16_t, N> r = *(const ampi_cuda_vector<uint16_t,
            N>*)((const uint16_t*)x.data + i);
        for (int j = 0; j < N; j++)
            v[j] = x.dtype == AMP_F16 ? ampi_d_widen_half(r.e[j])
                : ampi_float(ampi_bf16_widen(r.e[j]));
    }
}

/* N neighbouring elements, rounded and written at once; aligned to N elements. */
template <int N>
AMPI_D void ampi_d_store_vector(amp_ref y, size_t i, const float (&v)[N]) {
    if (y.dtype == AMP_F32) {
        ampi_cuda_vector<float, N> r;
        for (int j = 0; j < N; j++) r.e[j] = v[j];
        *(ampi_cuda_vector<float, N>*)((float*)y.data + i) = r;
    } else {
        ampi_cuda_vector<uint16_t, N> r;
        for (int j = 0; j < N; j++)
            r.e[j] = y.dtype == AMP_F16 ? ampi_d_round_half(v[j]) : ampi_bf16_bits(ampi_bits(v[j]));
        *(ampi_cuda_vector<uint16_t, N>*)((uint16_t*)y.data + i) = r;
    }
}

/* Pooling by windows of K x K side by side: a thread computes G neighbouring pixels of y, tile i,
   from K rows of K*G pixels of x. */
template <int K, int G>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_pool_tiles(ampi_cuda_pool q) {
    ampi_ptx_grid_wait();
    for (uint32_t i = blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x; i < q.tiles;
        i += gridDim.x * AMPI_CUDA_BLOCK) {
        float x[K][K * G], y[G];
        AMPI_D_UNROLL
        for (int r = 0; r < K; r++)
            ampi_d_load_vector(x[r], q.x, ampi_d_pool_tile(q, i, K, G, (uint32_t)r));

        /* window g, its pixels k row by row */
        AMPI_D_UNROLL
        for (int g = 0; g < G; g++) {
            y[g] = q.p.max ? ampi_float(0xff800000u) : 0.0f;
            AMPI_D_UNROLL
            for (int k = 0; k < K * K; k++) {
                const float v = x[k / K][g * K + k % K];
                y[g] = q.p.max ? ampi_d_pool_max(y[g], v) : y[g] + v;
            }
            if (!q.p.max && !q.p.sum) y[g] /= (float)(K * K);
        }
        ampi_d_store_vector(q.y, (size_t)i * G, y);
    }
}

/* Are vectors of n elements of x aligned? */
AMPI_FN int ampi_cuda_vectors_at(amp_ref x, int n) {
    return n % 2 != 0 || (uintptr_t)x.data % ((size_t)n * amp_dtype_size(x.dtype)) == 0;
}

/* How many windows to a tile: as many as the alignment of all arrays allows; 0 = none, or the
   windows are others. `image` is x or dx, `out` y or dy. An index has 31 bits. */
AMPI_FN int ampi_cuda_pool_tiles(ampi_cuda_pool* q, amp_ref image, amp_ref out) {
    const ampi_pool_plan* p = &q->p;
    const int k = p->h.kernel;
    if ((k != 2 && k != 3) || p->w.kernel != k || p->h.stride != k || p->w.stride != k || p->h.pad
        || p->w.pad) return 0;
    if (p->h.size != p->h.out * k || p->w.size != p->w.out * k) return 0;
    if (p->planes > (size_t)INT32_MAX / ((size_t)p->h.size * (size_t)p->w.size)) return 0;
    for (int g = k == 2 && p->w.out % 2 == 0 ? 2 : 1; g > 0; g--) {
        if (!ampi_cuda_vectors_at(q->x, k * g) || !ampi_cuda_vectors_at(image, k * g)
            || !ampi_cuda_vectors_at(out, g)) continue;
        q->by_tiles = ampi_cuda_divisor_of((uint32_t)(p->w.out / g));
        q->tiles = (uint32_t)(p->planes * (size_t)p->h.out) * q->by_tiles.d;
        return g;
    }
    return 0;
}

/* The table's pool2d_forward. */
AMPI_CUDA(pool2d_forward, const amp_pool2d_shape* s, amp_ref x, amp_ref y) {
    const char* op = "amp_cuda_pool2d_forward";
    ampi_cuda_pool q = {};
    AMPI_TRY(ampi_pool_plan_make(s, &q.p, ampi_exec_logger(exec)));
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN, q.p.x_n), AMPI_ARG(y, AMPI_OUT, q.p.y_n) };
    AMPI_CUDA_CHECK(op, q.p.x_n, list);
    q.x = ampi_cuda_ref(x);
    q.y = ampi_cuda_ref(y);

    /* tiles of `group` windows, if there are some; else a thread for a pixel of y, or for a window
       of more than 64 pixels a warp */
    const int group = ampi_cuda_pool_tiles(&q, q.x, q.y);
    const int lanes = ampi_min_int(q.p.h.kernel, q.p.h.size) > 64 / ampi_min_int(q.p.w.kernel,
        q.p.w.size) ? 32 : 1;
    void (*kernel)(ampi_cuda_pool) = lanes == 1 ? ampi_k_pool<1> : ampi_k_pool<32>;
    dim3 grid = ampi_cuda_grid(q.p.y_n, AMPI_CUDA_BLOCK / (size_t)lanes);
    if (group > 0) {
        grid = ampi_cuda_grid(q.tiles, AMPI_CUDA_BLOCK);
        kernel = q.p.h.kernel == 3 ? ampi_k_pool_tiles<3, 1>
            : group == 1 ? ampi_k_pool_tiles<2, 1> : ampi_k_pool_tiles<2, 2>;
    }
    return ampi_cuda_launch(exec, op, kernel, grid, AMPI_CUDA_BLOCK, 0, q);
}

/* The windows [first, last) that cover row (or column) r. */
AMPI_D ampi_span ampi_d_windows_over(ampi_pool_side side, int r) {
    const unsigned at = (unsigned)r + (unsigned)side.pad, stride = (unsigned)side.stride,
        kernel = (unsigned)side.kernel, end = at / stride + 1u;
    ampi_span s;
    s.first = at < kernel ? 0 : (int)((at - kernel) / stride) + 1;
    s.last = end < (unsigned)side.out ? (int)end : side.out;
    return s;
}

/* Whether pixel (r, c) is the first maximum of a window. Most pixels are not, and meet a better one
   soon. */
AMPI_D int ampi_d_pool_wins(const ampi_cuda_pool& q, const ampi_cuda_window& w, size_t plane, int r,
        int c, int32_t key) {
    for (int i = w.top; i < w.bottom; i++)
        for (int j = w.left; j < w.right; j++) {
            int32_t other = ampi_pool_key(ampi_d_load(q.x,
                plane + (size_t)i * (size_t)q.p.w.size + (size_t)j));
            int before = i < r || (i == r && j < c);
            if (other > key || (before && other == key)) return 0;
        }
    return 1;
}

/* dx: each pixel i of x gathers from the windows that cover it, so no two threads write to one
   place. start: the first element of its plane; key: of a maximum, its own. For more than four
   blocks at a time registers would be spilled. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK,
        4) ampi_k_pool_backward(ampi_cuda_pool q) {
    ampi_ptx_grid_wait();
    const ampi_pool_plan& p = q.p;
    const size_t step = (size_t)gridDim.x * AMPI_CUDA_BLOCK;
    for (size_t i = (size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x; i < p.x_n; i += step) {
        int r, c;
        size_t plane = ampi_d_pixel(i, p.h.size, p.w.size, &r, &c),
            start = plane * (size_t)p.h.size * (size_t)p.w.size;
        ampi_span down = ampi_d_windows_over(p.h, r);
        ampi_span across = ampi_d_windows_over(p.w, c);
        int32_t key = p.max ? ampi_pool_key(ampi_d_load(q.x, i)) : 0;

        /* windows in their order; of maxima those whose first maximum this pixel is */
        float sum = 0.0f;
        for (int oh = down.first; oh < down.last; oh++)
            for (int ow = across.first; ow < across.last; ow++) {
                ampi_cuda_window w = ampi_d_window(p, oh, ow);
                if (p.max && !ampi_d_pool_wins(q, w, start, r, c, key)) continue;
                size_t at = (plane * (size_t)p.h.out + (size_t)oh) * (size_t)p.w.out + (size_t)ow;
                float g = ampi_d_load(q.dy, at);
                sum += p.max ? g : g / ampi_d_pool_count(p, w);
            }
        ampi_d_store_one(q.y, i, sum, q.add);
    }
}

/* The pixel of its plane where a window has its first maximum; V: an element of x. Four loads of a
   row are under way together; behind its end they repeat the first, which is not greater. */
template <typename V>
AMPI_D uint32_t ampi_d_pool_place(const V* x, const ampi_cuda_pool& q, const ampi_cuda_window& w) {
    int32_t greatest = INT32_MIN;
    uint32_t place = 0;
    for (int i = w.top; i < w.bottom; i++)
        for (int j = w.left; j < w.right; j += 4) {
            const uint32_t at = (uint32_t)i * (uint32_t)q.p.w.size + (uint32_t)j;
            V v[4];
            AMPI_D_UNROLL
            for (int u = 0; u < 4; u++) v[u] = x[j + u < w.right ? at + (uint32_t)u : at];
            AMPI_D_UNROLL
            for (int u = 0; u < 4; u++) {
                const int32_t key = ampi_pool_key(ampi_d_direct_widen(v[u], q.x.dtype));
                if (key > greatest) place = at + (uint32_t)u;
                greatest = key > greatest ? key : greatest;
            }
        }
    return place;
}

/* dx of maxima of small windows: a block takes some rows of a plane. It looks first where the
   windows there have their maxima; each pixel gathers from those windows that have it here. */
enum { AMPI_CUDA_POOL_ROWS = 16, AMPI_CUDA_POOL_WINDOWS = 12288 };

template <typename V>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK,
        4) ampi_k_pool_max_backward(ampi_cuda_pool q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(uint32_t, places);
    const ampi_pool_plan& p = q.p;
    const int bands = (p.h.size - 1) / AMPI_CUDA_POOL_ROWS + 1;
    for (size_t i = blockIdx.x; i < p.planes * (size_t)bands; i += gridDim.x) {
        const size_t plane = ampi_d_quotient(i, (size_t)bands),
            start = plane * (size_t)p.h.size * (size_t)p.w.size;
        const int top = (int)(i - plane * (size_t)bands) * AMPI_CUDA_POOL_ROWS;
        const int end = p.h.size - top < AMPI_CUDA_POOL_ROWS ? p.h.size : top + AMPI_CUDA_POOL_ROWS;
        const int first = ampi_d_windows_over(p.h, top).first,
            last = ampi_d_windows_over(p.h, end - 1).last;
        __syncthreads();      /* the last rows' have been read */
        for (int k = (int)threadIdx.x; k < (last - first) * p.w.out; k += AMPI_CUDA_BLOCK)
            places[k] = ampi_d_pool_place((const V*)q.x.data + start, q,
                ampi_d_window(p, first + k / p.w.out, k % p.w.out));
        __syncthreads();

        /* pixel (r, c) of the plane, its windows in their order */
        for (int k = top * p.w.size + (int)threadIdx.x; k < end * p.w.size; k += AMPI_CUDA_BLOCK) {
            const int r = k / p.w.size, c = k - r * p.w.size;
            const ampi_span down = ampi_d_windows_over(p.h, r),
                across = ampi_d_windows_over(p.w, c);
            float sum = 0.0f;
            for (int oh = down.first; oh < down.last; oh++)
                for (int ow = across.first; ow < across.last; ow++)
                    if (places[(oh - first) * p.w.out + ow] == (uint32_t)k)
                        sum += ampi_d_load(q.dy, (plane * (size_t)p.h.out + (size_t)oh)
                            * (size_t)p.w.out + (size_t)ow);
            ampi_d_store_one(q.y, start + (size_t)k, sum, q.add);
        }
    }
}

/* The place of the first maximum of the K x K window that begins in column c of x: pixel (k / K, k
   % K). */
template <int K, int N>
AMPI_D int ampi_d_pool_first(const float (&x)[K][N], int c) {
    int32_t greatest = ampi_pool_key(x[0][c]);
    int first = 0;
    AMPI_D_UNROLL
    for (int k = 1; k < K * K; k++) {
        const int32_t key = ampi_pool_key(x[k / K][c + k % K]);
        if (key > greatest) first = k;
        greatest = key > greatest ? key : greatest;
    }
    return first;
}

/* dx in tiles, see ampi_k_pool_tiles: a thread turns its pixels x into their gradients. A gradient
   is added to 0, as above, where -0 becomes 0. */
template <int K, int G>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
        ampi_k_pool_tiles_backward(ampi_cuda_pool q) {
    ampi_ptx_grid_wait();
    for (uint32_t i = blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x; i < q.tiles;
        i += gridDim.x * AMPI_CUDA_BLOCK) {
        float x[K][K * G] = {}, dy[G];
        AMPI_D_UNROLL
        for (int r = 0; r < K && q.p.max; r++)
            ampi_d_load_vector(x[r], q.x, ampi_d_pool_tile(q, i, K, G, (uint32_t)r));
        ampi_d_load_vector(dy, q.dy, (size_t)i * G);

        /* the first maximum of window g gets all, or each pixel an equal part */
        AMPI_D_UNROLL
        for (int g = 0; g < G; g++) {
            const float slope = 0.0f + (q.p.max || q.p.sum ? dy[g]
                : dy[g] / (float)(K * K));
            const int first = ampi_d_pool_first(x, g * K);
            AMPI_D_UNROLL
            for (int k = 0; k < K * K; k++)
                x[k / K][g * K + k % K] = !q.p.max || k == first ? slope : 0.0f;
        }

        AMPI_D_UNROLL
        for (int r = 0; r < K; r++)
            ampi_d_store_vector(q.y, ampi_d_pool_tile(q, i, K, G, (uint32_t)r), x[r]);
    }
}

/* The table's pool2d_backward. Tiles write to dx without reading it, so they cannot add. */
AMPI_CUDA(pool2d_backward, const amp_pool2d_shape* s, amp_ref dy, amp_ref x, amp_ref dx,
        int accumulate) {
    const char* op = "amp_cuda_pool2d_backward";
    ampi_cuda_pool q = {};
    AMPI_TRY(ampi_pool_plan_make(s, &q.p, ampi_exec_logger(exec)));
    size_t n = q.p.x_n;
    const ampi_argument list[] = {
        AMPI_ARG(dy, AMPI_IN, q.p.y_n), AMPI_ARG(dx, AMPI_OUT | AMPI_NULL, n),
        AMPI_ARG(x, q.p.max ? AMPI_IN : AMPI_NULL, n) };
    AMPI_CUDA_CHECK(op, n, list);
    if (!dx.data) return AMP_OK;
    q.x = ampi_cuda_ref(x);
    q.dy = ampi_cuda_ref(dy);
    q.y = ampi_cuda_ref(dx);
    q.add = accumulate & AMP_ACCUMULATE_INPUT;

    /* n: threads of work, one for a tile of `group` windows or for a pixel of x */
    const int group = q.add ? 0 : ampi_cuda_pool_tiles(&q, q.y, q.dy);
    void (*kernel)(ampi_cuda_pool) = ampi_k_pool_backward;
    if (group > 0) {
        n = q.tiles;
        kernel = q.p.h.kernel == 3 ? ampi_k_pool_tiles_backward<3, 1>
            : group == 1 ? ampi_k_pool_tiles_backward<2, 1> : ampi_k_pool_tiles_backward<2, 2>;
    }

    /* maxima of at most 64 pixels, where the windows of a block's rows are few enough */
    const int rows = (AMPI_CUDA_POOL_ROWS - 1 + q.p.h.kernel) / q.p.h.stride + 1;
    size_t shared = 0;
    if (group == 0 && q.p.max && q.p.h.kernel <= 64 / q.p.w.kernel && rows
        <= AMPI_CUDA_POOL_WINDOWS / q.p.w.out && n / q.p.planes <= INT32_MAX) {
        n = q.p.planes * ampi_cuda_parts((size_t)q.p.h.size, AMPI_CUDA_POOL_ROWS)
            * AMPI_CUDA_BLOCK;
        shared = (size_t)rows * (size_t)q.p.w.out * sizeof(uint32_t);
        kernel = q.x.dtype == AMP_F32 ? ampi_k_pool_max_backward<float>
            : ampi_k_pool_max_backward<uint16_t>;
    }
    return ampi_cuda_launch(exec, op, kernel, ampi_cuda_grid(n, AMPI_CUDA_BLOCK), AMPI_CUDA_BLOCK,
        shared, q);
}

/* >>impl-elementwise Operators element by element: activations, dropout, sum, product; columns of a
   matrix, for concat.
   Words. functor: what ampi_k_map does with an eight. This room calls impl-half. */

/* A kernel over all elements, for any of the functors below. Each defines ampi_d_apply, which turns
   the eights v (of a) and w (of b) that begin at element i into a result in v; and ampi_d_begin, if
   a thread computes anything beforehand. y may be a or b: a thread has read an eight when it writes
   it. */
template <typename F>
AMPI_D void ampi_d_begin(F&) {}

/* Whether the result is added to what y holds. */
template <typename F>
AMPI_D int ampi_d_adds(const F&) { return 0; }

/* Functor f of each element: y = f(a) or y = f(a, b). A thread takes two eights a turn,
   AMPI_CUDA_SECOND elements apart. */
template <typename F>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_map(ampi_cuda_map m, F f) {
    ampi_ptx_grid_wait();
    ampi_d_begin(f);
    for (size_t i = ampi_d_tile_start(); i < m.n; i += ampi_d_tile_step()) {
        /* the loads of both are under way together */
        ampi_eight a[2], b[2];
        AMPI_D_UNROLL
        for (int u = 0; u < 2; u++) {
            ampi_d_fetch8(a[u], m.a, i + (size_t)(u * AMPI_CUDA_SECOND), m.n);
            if (m.b.data) ampi_d_fetch8(b[u], m.b, i + (size_t)(u * AMPI_CUDA_SECOND), m.n);
        }

        AMPI_ROLLED
        for (size_t at = i; at < m.n && at <= i + AMPI_CUDA_SECOND; at += AMPI_CUDA_SECOND) {
            float v[8], w[8];
            ampi_d_widen8(v, a[0], m.a.dtype);
            if (m.b.data) ampi_d_widen8(w, b[0], m.b.dtype);
            ampi_d_apply(f, v, w, at);
            ampi_d_give8(m.y, at, m.n, v, ampi_d_adds(f));

            /* the second eight takes the place of the first, so that the code of f is there once */
            a[0] = a[1];
            b[0] = b[1];
        }
    }
}

/* One launch of ampi_k_map over m.n elements; none for 0. */
template <typename F>
static amp_result ampi_cuda_map_run(const amp_exec* exec, const char* op, const ampi_cuda_map& m,
        const F& f) {
    if (m.n == 0) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_map<F>, ampi_cuda_grid(m.n, AMPI_CUDA_TILE),
        AMPI_CUDA_BLOCK, 0, m, f);
}

struct ampi_op_activation { amp_activation f; };
struct ampi_op_activation_slope { amp_activation f; int add; };
AMPI_D int ampi_d_adds(const ampi_op_activation_slope& op) { return op.add; }
struct ampi_op_leaky { float slope; int add; };
AMPI_D int ampi_d_adds(const ampi_op_leaky& op) { return op.add; }
struct ampi_op_add { int unused; };
struct ampi_op_mul { amp_ref b; size_t n, repeat; int add; };
AMPI_D int ampi_d_adds(const ampi_op_mul& op) { return op.add; }
struct ampi_op_dropout {
    float p, scale;
    uint64_t seed, offset, stride;
    const uint64_t* position;      /* NULL = 0 */
};

/* The function is chosen outside of the loop. */
AMPI_D void ampi_d_apply(const ampi_op_activation& op, float (&v)[8], float (&)[8], size_t) {
#define AMPI_X(NAME, name, ...) \
        case AMP_##NAME: for (int j = 0; j < 8; j++) v[j] = ampi_act_##name(1, v[j]); break;
    switch (op.f) { AMP_ACTIVATION_LIST(AMPI_X) }
#undef AMPI_X
}

AMPI_D void ampi_d_apply(const ampi_op_activation_slope& op, float (&dy)[8], float (&s)[8],
        size_t) {
#define AMPI_X(NAME, name, ...) \
        case AMP_##NAME: for (int j = 0; j < 8; j++) dy[j] = ampi_slope_##name(1, dy[j], s[j]); \
            break;
    switch (op.f) { AMP_ACTIVATION_LIST(AMPI_X) }
#undef AMPI_X
}

AMPI_D void ampi_d_apply(const ampi_op_leaky& op, float (&v)[8], float (&s)[8], size_t) {
    for (int j = 0; j < 8; j++) v[j] = ampi_leaky(v[j], s[j], op.slope);
}

AMPI_D void ampi_d_apply(const ampi_op_add&, float (&v)[8], float (&w)[8], size_t) {
    for (int j = 0; j < 8; j++) v[j] += w[j];
}

/* Runs of `repeat` elements share an element of op.b; of runs of one it is in w. */
AMPI_D void ampi_d_apply(const ampi_op_mul& op, float (&v)[8], float (&w)[8], size_t i) {
    for (size_t j = 0; j < 8; j++) {
        const size_t at = i + j < op.n ? i + j : op.n - 1;
        v[j] *= op.repeat == 1 ? w[j] : ampi_d_load(op.b, ampi_d_quotient(at, op.repeat));
    }
}

AMPI_D void ampi_d_begin(ampi_op_dropout& op) {
    if (op.position) op.offset += *op.position * op.stride;
}

AMPI_D void ampi_d_apply(const ampi_op_dropout& op, float (&v)[8], float (&)[8], size_t i) {
    uint32_t random[8];
    ampi_d_random8(random, op.seed, op.offset + i);
    for (int j = 0; j < 8; j++) {
        float u = (float)(random[j] >> 8) * (1.0f / 16777216.0f);
        v[j] = u < op.p ? 0.0f : v[j] * op.scale;
    }
}

/* The table's activation_forward. */
AMPI_CUDA(activation_forward, amp_activation f, amp_ref x, amp_ref y, size_t n) {
    const char* op = "amp_cuda_activation_forward";
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_SAME, n), AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n) };
    const ampi_op_activation functor = { f };
    AMPI_TRY(ampi_check_activation(exec, f));
    AMPI_CUDA_CHECK(op, n, list);
    return ampi_cuda_map_run(exec, op, ampi_cuda_map_of(x, AMP_NONE, y, n),
        functor);
}

/* The table's activation_backward. */
AMPI_CUDA(activation_backward, amp_activation f, amp_ref dy, amp_ref saved, amp_ref dx,
        int accumulate, size_t n) {
    const char* op = "amp_cuda_activation_backward";
    const int add = accumulate & AMP_ACCUMULATE_INPUT, same = add ? AMPI_IN : AMPI_SAME;
    const ampi_argument list[] = { AMPI_ARG(dy, same, n), AMPI_ARG(saved, AMPI_IN, n),
        AMPI_ARG(dx, AMPI_OUT | AMPI_NULL | same, n) };
    const ampi_op_activation_slope functor = { f, add };
    AMPI_TRY(ampi_check_activation(exec, f));
    AMPI_CUDA_CHECK(op, n, list);
    if (!dx.data) return AMP_OK;
    return ampi_cuda_map_run(exec, op, ampi_cuda_map_of(dy, saved, dx, n), functor);
}

/* The table's leaky_relu_forward: the backward kernel, where dy and `saved` are x. */
AMPI_CUDA(leaky_relu_forward, amp_ref x, amp_ref y, size_t n, float slope) {
    const char* op = "amp_cuda_leaky_relu_forward";
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_SAME, n), AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n) };
    const ampi_op_leaky functor = { slope, 0 };
    AMPI_TRY(ampi_check_leaky(exec, slope));
    AMPI_CUDA_CHECK(op, n, list);
    return ampi_cuda_map_run(exec, op, ampi_cuda_map_of(x, x, y, n), functor);
}

/* The table's leaky_relu_backward. */
AMPI_CUDA(leaky_relu_backward, amp_ref dy, amp_ref saved, amp_ref dx, int accumulate, size_t n,
        float slope) {
    const char* op = "amp_cuda_leaky_relu_backward";
    const int add = accumulate & AMP_ACCUMULATE_INPUT, same = add ? AMPI_IN : AMPI_SAME;
    const ampi_argument list[] = { AMPI_ARG(dy, same, n), AMPI_ARG(saved, AMPI_IN, n),
        AMPI_ARG(dx, AMPI_OUT | AMPI_NULL | same, n) };
    const ampi_op_leaky functor = { slope, add };
    AMPI_TRY(ampi_check_leaky(exec, slope));
    AMPI_CUDA_CHECK(op, n, list);
    if (!dx.data) return AMP_OK;
    return ampi_cuda_map_run(exec, op, ampi_cuda_map_of(dy, saved, dx, n), functor);
}

/* amp_dropout_forward with a second part of the offset in device memory, offset + *position *
   stride, which a captured graph can move on. */
AMPI_CUDA(dropout_forward, amp_ref x, amp_ref y, size_t n, float p, uint64_t seed, uint64_t offset,
        const uint64_t* position, uint64_t stride) {
    const char* op = "amp_cuda_dropout_forward";
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_SAME, n), AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n) };
    AMPI_CUDA_CHECK(op, n, list);
    AMPI_REFUSE_OP(!ampi_in_range(&p, 0.0f, AMPI_BELOW_ONE), AMP_ERR_DESC,
        "%s: probability %g is outside [0,1)", op, (double)p);
    const ampi_op_dropout functor = { p, 1.0f / (1.0f - p), seed, offset, stride, position };
    return ampi_cuda_map_run(exec, op, ampi_cuda_map_of(x, AMP_NONE, y, n), functor);
}

/* The table's add_forward. */
AMPI_CUDA(add_forward, amp_ref a, amp_ref b, amp_ref y, size_t n) {
    const char* op = "amp_cuda_add_forward";
    const ampi_argument list[] = { AMPI_ARG(a, AMPI_SAME, n), AMPI_ARG(b, AMPI_SAME, n),
        AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n) };
    const ampi_op_add functor = { 0 };
    AMPI_CUDA_CHECK(op, n, list);
    return ampi_cuda_map_run(exec, op, ampi_cuda_map_of(a, b, y, n),
        functor);
}

/* y = x * b, or y += x * b if add; n elements, b one for each `repeat` of them. */
AMPI_FN amp_result ampi_cuda_mul_run(const amp_exec* exec, const char* op, amp_ref x, amp_ref b,
        amp_ref y, size_t n, size_t repeat, int add) {
    const ampi_op_mul functor = { ampi_cuda_ref(b), n, repeat, add };
    if (!y.data) return AMP_OK;
    return ampi_cuda_map_run(exec, op, ampi_cuda_map_of(x, repeat == 1 ? b : AMP_NONE, y, n),
        functor);
}

/* The table's mul_forward. */
AMPI_CUDA(mul_forward, amp_ref a, amp_ref b, amp_ref y, size_t n, size_t repeat) {
    const char* op = "amp_cuda_mul_forward";
    AMPI_TRY(ampi_check_repeat(exec, op, n, repeat));
    const ampi_argument list[] = { AMPI_ARG(a, AMPI_SAME, n),
        AMPI_ARG(b, repeat == 1 ? AMPI_SAME : AMPI_IN, n / repeat),
        AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n) };
    AMPI_CUDA_CHECK(op, n, list);
    return ampi_cuda_mul_run(exec, op, a, b, y, n, repeat, 0);
}

/* --- columns of a matrix --- */

/* d columns of matrix x go to d columns of matrix y. */
typedef struct ampi_cuda_columns {
    amp_ref x, y;
    size_t x_start, x_row;  /* of x: the first element, elements from a row to the next */
    size_t y_start, y_row;  /* of y */
    size_t rows, d;
    int accumulate;         /* 1: they are added to what y holds */
} ampi_cuda_columns;

/* Columns of a matrix copied, converted or added to those of another, eight elements a thread. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_columns(ampi_cuda_columns q) {
    ampi_ptx_grid_wait();
    const size_t eights = (q.d + 7) / 8, n = q.rows * eights,
        step = (size_t)gridDim.x * AMPI_CUDA_BLOCK;

    /* eight number k of all rows: columns i to i + 7 of a row, fewer at its end */
    for (size_t k = (size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x; k < n; k += step) {
        size_t row = ampi_d_quotient(k, eights), i = (k - row * eights) * 8;
        size_t from = q.x_start + row * q.x_row, to = q.y_start + row * q.y_row;
        ampi_eight r;
        ampi_d_fetch8(r, q.x, from + i, from + q.d);
        if (q.accumulate) {
            float v[8], old[8];
            ampi_d_widen8(v, r, q.x.dtype);
            ampi_d_load8(old, q.y, to + i, to + q.d);
            for (int j = 0; j < 8; j++) v[j] = old[j] + v[j];
            ampi_d_round8(r, v, q.y.dtype);
        } else {
            ampi_d_convert8(r, q.x.dtype, q.y.dtype);
        }
        ampi_d_put8(q.y, to + i, to + q.d, r);
    }
}

/* One launch of ampi_k_columns; none without elements. */
AMPI_FN amp_result ampi_cuda_columns_run(const amp_exec* exec, const char* op,
        const ampi_cuda_columns& q) {
    size_t n = q.rows * ((q.d + 7) / 8);
    if (n == 0) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_columns, ampi_cuda_grid(n, AMPI_CUDA_BLOCK),
        AMPI_CUDA_BLOCK, 0, q);
}

/* The table's concat_forward. */
AMPI_CUDA(concat_forward, amp_ref x, size_t d, amp_ref y, size_t d_total, size_t column,
        size_t rows) {
    const char* op = "amp_cuda_concat_forward";
    const int none = d == 0 ? AMPI_NULL : 0;
    const size_t n = ampi_area(rows, d ? d_total : 0);
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN | none, rows * d), AMPI_ARG(y, AMPI_OUT | none, n) };
    const ampi_cuda_columns q = { ampi_cuda_ref(x), ampi_cuda_ref(y), 0, d, column, d_total, rows,
        d, 0 };
    AMPI_CUDA_CHECK(op, n, list);
    AMPI_TRY(ampi_check_columns(exec, op, d, d_total, column));
    return ampi_cuda_columns_run(exec, op, q);
}

/* The table's concat_backward. */
AMPI_CUDA(concat_backward, amp_ref y, size_t d_total, size_t column, amp_ref x, size_t d,
        size_t rows, int accumulate) {
    const char* op = "amp_cuda_concat_backward";
    const int none = d == 0 ? AMPI_NULL : 0;
    const size_t n = ampi_area(rows, d ? d_total : 0);
    const ampi_argument list[] = {
        AMPI_ARG(y, AMPI_IN | none, n), AMPI_ARG(x, AMPI_OUT | none, rows * d) };
    const ampi_cuda_columns q = { ampi_cuda_ref(y), ampi_cuda_ref(x), column, d_total, 0, d, rows,
        d, accumulate & AMP_ACCUMULATE_INPUT };
    AMPI_CUDA_CHECK(op, n, list);
    AMPI_TRY(ampi_check_columns(exec, op, d, d_total, column));
    return ampi_cuda_columns_run(exec, op, q);
}

/* >>impl-rows   Operators over rows: norms, softmax, sums of products, transpose, embedding.
   Words. row: the D features of a layer norm or softmax, or a channel of a batch norm. kept: the
   eights of a short row stay in registers, KEEP of them a thread. This room calls impl-device
   and impl-elementwise. */

/* --- batch norm --- */

/* One block to a channel, whose N planes it walks over in eights that end with each plane. */
enum { AMPI_CUDA_BN_BLOCK = 512 };

/* A call of batch norm. */
typedef struct ampi_cuda_bn {
    amp_ref x, dy, gamma, beta;
    amp_ref y, dgamma, dbeta;      /* backward: y is dx */
    float *running_mean, *running_var, *save_mean, *save_invstd;  /* one a channel; forward */
    const float *mean, *invstd;    /* backward: what the forward pass saved */
    size_t n, channels, spatial;   /* images, channels of one, pixels of a plane */
    float eps, momentum;
    unsigned char* held;           /* of amp_batch_norm_shape */
    int training;                  /* statistics are those of x, not the running ones */
    int accumulate, add;           /* gradients are added to what dgamma and dbeta, what dx hold */
} ampi_cuda_bn;

/* Eight q of a channel lies at [i, end) of the tensor, or is empty behind the last one. */
AMPI_D void ampi_d_bn_place(const ampi_cuda_bn& s, size_t c, size_t q, size_t* i, size_t* end) {
    const size_t eights = (s.spatial + 7) / 8, image = ampi_d_quotient(q, eights);
    *end = image < s.n ? (image * s.channels + c + 1) * s.spatial : 0;
    *i = image < s.n ? *end - s.spatial + (q - image * eights) * 8 : 0;
}

/* Calls f(v, g, i, end) for this thread's eights of channel c: floats v of x, and g of dy if DY,
   elements i to i + 7 of the tensors, those before `end` being of the plane. Eight q belongs to
   thread q % AMPI_CUDA_BN_BLOCK; U loads of each tensor are under way at a time. */
template <int U, int DY, typename F>
AMPI_D void ampi_d_bn_walk(const ampi_cuda_bn& s, size_t c, F f) {
    const size_t eights = s.n * ((s.spatial + 7) / 8);
    for (size_t q = threadIdx.x; q < eights; q += U * (size_t)AMPI_CUDA_BN_BLOCK) {
        ampi_eight x[U], dy[U];
        size_t i[U], end[U];
        AMPI_D_UNROLL
        for (int u = 0; u < U; u++) {
            ampi_d_bn_place(s, c, q + (size_t)(u * AMPI_CUDA_BN_BLOCK), &i[u], &end[u]);
            ampi_d_fetch8(x[u], s.x, i[u], end[u]);
            if (DY) ampi_d_fetch8(dy[u], s.dy, i[u], end[u]);
        }

        AMPI_D_UNROLL
        for (int u = 0; u < U; u++)
            if (i[u] < end[u]) {
                float v[8], g[8];
                ampi_d_widen8(v, x[u], s.x.dtype);
                if (DY) ampi_d_widen8(g, dy[u], s.dy.dtype);
                f(v, g, i[u], end[u]);
            }
    }
}

/* The mean of a part of the channel, at most one eight of each thread: a number near the channel's
   mean, or 0 where there is no such number, so that the sums tell an infinite mean from a NaN. */
AMPI_D float ampi_d_bn_pivot(const ampi_cuda_bn& s, size_t c, double* shared) {
    double v[2] = { 0.0, 0.0 };
    size_t i, end;
    float x[8];
    ampi_d_bn_place(s, c, threadIdx.x, &i, &end);
    if (i < end) {
        ampi_d_load8(x, s.x, i, end);
        v[0] = (double)ampi_d_sum8(x);
        v[1] = (double)(end - i < 8 ? end - i : 8);
    }
    ampi_d_group_sum<AMPI_CUDA_BN_BLOCK>(v, shared);
    const float pivot = (float)(v[0] / v[1]);
    return (ampi_bits(pivot) & 0x7fffffffu) < 0x7f800000u ? pivot : 0.0f;
}

/* stats[0, 1] become the mean and 1/sqrt(variance + eps) of channel c, which are saved, and the
   running statistics move. One pass sums d = x - pivot and d^2 to v. The sum of squares about the
   mean is then v[1] - v[0]^2 / M for M values. What cancels there is small: the pivot is the mean
   of m of the values, so (mean - pivot)^2 is at most M/m times the variance. */
AMPI_D void ampi_d_bn_train(const ampi_cuda_bn& s, size_t c, float* stats, double* shared) {
    const float pivot = ampi_d_bn_pivot(s, c, shared);
    double v[2] = { 0.0, 0.0 };
    ampi_d_bn_walk<4, 0>(s, c, [&](float(&x)[8], float(&)[8], size_t i, size_t end) {
        for (int j = 0; j < 8; j++) x[j] -= pivot;
        ampi_d_trim8(x, end - i);  /* zeros behind the plane */
        v[0] += (double)ampi_d_sum8(x);
        v[1] += (double)ampi_d_dot8(x, x);
    });
    ampi_d_group_sum<AMPI_CUDA_BN_BLOCK>(v, shared);
    if (threadIdx.x != 0) return;

    /* mean: of d */
    double count = (double)s.n * (double)s.spatial, mean = v[0] / count;
    double squares = fma(-v[0], mean, v[1]);
    if (squares < 0.0) squares = 0.0;
    stats[0] = (float)((double)pivot + mean);
    stats[1] = (float)(1.0 / sqrt(squares / count + (double)s.eps));
    s.save_mean[c] = stats[0];
    s.save_invstd[c] = stats[1];

    if (s.momentum == 0.0f) return;
    ampi_bn_run(s.running_mean, s.running_var, s.held, c, s.momentum, stats[0],
        (float)(squares / (count - 1.0)));
}

/* Thread 0 writes the running mean and 1/sqrt(variance + eps) of channel c to stats[0] and
   stats[1], and saves them. */
AMPI_D void ampi_d_bn_evaluate(const ampi_cuda_bn& s, size_t c, float* stats) {
    if (threadIdx.x != 0) return;
    stats[0] = s.running_mean[c];
    stats[1] = (float)(1.0 / sqrt((double)s.running_var[c] + (double)s.eps));
    if (s.save_mean) s.save_mean[c] = stats[0];
    if (s.save_invstd) s.save_invstd[c] = stats[1];
}

/* Batch norm, a block a channel at a time: statistics, then y. */
static __global__ void __launch_bounds__(AMPI_CUDA_BN_BLOCK) ampi_k_batch_norm(ampi_cuda_bn s) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    float* stats = (float*)(shared + AMPI_CUDA_BN_BLOCK / 32 * 2);
    for (size_t c = blockIdx.x; c < s.channels; c += gridDim.x) {
        __syncthreads();      /* the last channel's statistics have been read */
        if (s.training) ampi_d_bn_train(s, c, stats, shared);
        else ampi_d_bn_evaluate(s, c, stats);
        __syncthreads();
        float mean = stats[0], invstd = stats[1];
        float g = ampi_d_load_or(s.gamma, c, 1.0f), b = ampi_d_load_or(s.beta, c, 0.0f);
        ampi_d_bn_walk<4, 0>(s, c, [&](float(&x)[8], float(&)[8], size_t i, size_t end) {
            for (int j = 0; j < 8; j++) x[j] = ampi_fma(1, (x[j] - mean) * invstd, g, b);
            ampi_d_store8(s.y, i, end, x);
        });
    }
}

enum { AMPI_CUDA_BN_SHARED = (AMPI_CUDA_BN_BLOCK / 32 * 2 + 2) * 8 };

/* The kernels' form of plan p, and their grid. */
AMPI_FN dim3 ampi_cuda_bn_grid(const ampi_bn_plan* p, ampi_cuda_bn* s) {
    s->n = p->n; s->channels = p->channels; s->spatial = p->spatial;
    s->eps = p->eps; s->momentum = p->momentum; s->held = p->held;
    return ampi_cuda_grid(p->channels, 1);
}

/* The table's batch_norm_forward. */
AMPI_CUDA(batch_norm_forward, const amp_batch_norm_shape* s, int training, amp_ref x, amp_ref gamma,
        amp_ref beta, float* running_mean, float* running_var, float* save_mean, float* save_invstd,
        amp_ref y) {
    const char* op = "amp_cuda_batch_norm_forward";
    ampi_bn_plan p;
    ampi_cuda_bn q = {};
    AMPI_TRY(ampi_bn_plan_make(s, training, &p, ampi_exec_logger(exec)));
    const size_t n = ampi_area(ampi_area(p.n, p.channels), p.spatial);

    /* training updates the running statistics and saves the batch's; else the former are read */
    training = ampi_bn_trains(s, training);
    const int running = training ? AMPI_OUT | AMPI_NULL : AMPI_IN;
    const int saved = training ? AMPI_OUT : AMPI_OUT | AMPI_NULL;
    const ampi_argument list[] = { AMPI_ARG(x, AMPI_IN, n), AMPI_ARG(y, AMPI_OUT, n),
        AMPI_ARG(gamma, AMPI_NULL, p.channels), AMPI_ARG(beta, AMPI_NULL, p.channels),
        AMPI_ARG_F32(running_mean, running, p.channels),
        AMPI_ARG_F32(running_var, running, p.channels), AMPI_ARG_F32(save_mean, saved, p.channels),
        AMPI_ARG_F32(save_invstd, saved, p.channels) };
    AMPI_CUDA_CHECK(op, n, list);

    q.x = ampi_cuda_ref(x);
    q.gamma = ampi_cuda_ref(gamma);
    q.beta = ampi_cuda_ref(beta);
    q.y = ampi_cuda_ref(y);
    q.running_mean = running_mean; q.running_var = running_var;
    q.save_mean = save_mean; q.save_invstd = save_invstd;
    q.training = training;
    return ampi_cuda_launch(exec, op, ampi_k_batch_norm, ampi_cuda_bn_grid(&p, &q),
        AMPI_CUDA_BN_BLOCK, AMPI_CUDA_BN_SHARED, q);
}

/* v = the sums of dy and of dy * (x - mean), for all threads; one of them writes dgamma and
   dbeta. */
AMPI_D void ampi_d_bn_sums(const ampi_cuda_bn& s, size_t c, double (&v)[2], double* shared) {
    const float mean = s.mean[c];
    v[0] = v[1] = 0.0;
    ampi_d_bn_walk<2, 1>(s, c, [&](float(&x)[8], float(&g)[8], size_t, size_t) {
        for (int j = 0; j < 8; j++) x[j] -= mean;
        v[0] += (double)ampi_d_sum8(g);
        v[1] += (double)ampi_d_dot8(g, x);      /* beyond the end g is 0, and x - mean finite */
    });
    ampi_d_group_sum<AMPI_CUDA_BN_BLOCK>(v, shared);
    if (threadIdx.x != 0) return;
    ampi_d_store_one(s.dgamma, c, (float)(v[1] * (double)s.invstd[c]), s.accumulate);
    ampi_d_store_one(s.dbeta, c, (float)v[0], s.accumulate);
}

/* With constant statistics: dx = dy * k, and the sums if anybody wants them. */
static __global__ void __launch_bounds__(AMPI_CUDA_BN_BLOCK)
        ampi_k_batch_norm_frozen(ampi_cuda_bn s) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    ampi_cuda_bn only = s;
    only.x = s.dy;
    for (size_t c = blockIdx.x; c < s.channels; c += gridDim.x) {
        const float k = s.invstd[c] * ampi_d_load_or(s.gamma, c, 1.0f);
        double v[2];
        if (s.dgamma.data || s.dbeta.data) ampi_d_bn_sums(s, c, v, shared);
        if (s.y.data)
            ampi_d_bn_walk<4, 0>(only, c, [&](float(&g)[8], float(&)[8], size_t i, size_t end) {
            for (int j = 0; j < 8; j++) g[j] *= k;
            ampi_d_give8(s.y, i, end, g, s.add);
        });
    }
}

/* Gradients of batch norm, a block a channel at a time: dgamma and dbeta, then dx = (dy - a - (x -
   mean) * b) * k, see ampi_bn_backward_group. Thread 0 forms a, b and k = invstd * gamma for all.
   dx may be dy: a thread reads an eight before it writes it. */
static __global__ void __launch_bounds__(AMPI_CUDA_BN_BLOCK,
        1) ampi_k_batch_norm_backward(ampi_cuda_bn s) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    float* slope = (float*)(shared + AMPI_CUDA_BN_BLOCK / 32 * 2);
    for (size_t c = blockIdx.x; c < s.channels; c += gridDim.x) {
        const float mean = s.mean[c], invstd = s.invstd[c];
        double v[2];
        ampi_d_bn_sums(s, c, v, shared);

        if (threadIdx.x == 0) {
            double count = (double)s.n * (double)s.spatial, dot = v[1] * (double)invstd;
            slope[0] = (float)(v[0] / count);
            slope[1] = (float)(dot * (double)invstd / count);
            slope[2] = invstd * ampi_d_load_or(s.gamma, c, 1.0f);
        }
        __syncthreads();

        const float a = slope[0], b = slope[1], k = slope[2];
        if (s.y.data)
            ampi_d_bn_walk<2, 1>(s, c, [&](float(&x)[8], float(&g)[8], size_t i, size_t end) {
            for (int j = 0; j < 8; j++) x[j] = ampi_fma(1, mean - x[j], b, g[j] - a) * k;
            ampi_d_give8(s.y, i, end, x, s.add);
        });
    }
}

/* The table's batch_norm_backward. */
AMPI_CUDA(batch_norm_backward, const amp_batch_norm_shape* s, amp_ref dy, amp_ref x, amp_ref gamma,
        const float* save_mean, const float* save_invstd, amp_ref dx, amp_ref dgamma, amp_ref dbeta,
        int accumulate) {
    const char* op = "amp_cuda_batch_norm_backward";
    ampi_bn_plan p;
    ampi_cuda_bn q = {};
    AMPI_TRY(ampi_bn_plan_make(s, 1, &p, ampi_exec_logger(exec)));
    const size_t n = ampi_area(ampi_area(p.n, p.channels), p.spatial);
    const ampi_argument list[] = { AMPI_ARG(dy, AMPI_SAME, n), AMPI_ARG(x, AMPI_IN, n),
        AMPI_ARG(gamma, AMPI_NULL, p.channels), AMPI_ARG(dx, AMPI_OUT | AMPI_SAME | AMPI_NULL, n),
        AMPI_ARG_F32(save_mean, AMPI_IN, p.channels),
        AMPI_ARG_F32(save_invstd, AMPI_IN, p.channels),
        AMPI_ARG(dgamma, AMPI_OUT | AMPI_NULL, p.channels),
        AMPI_ARG(dbeta, AMPI_OUT | AMPI_NULL, p.channels) };
    AMPI_CUDA_CHECK(op, n, list);

    q.x = ampi_cuda_ref(x);
    q.dy = ampi_cuda_ref(dy);
    q.gamma = ampi_cuda_ref(gamma);
    q.y = ampi_cuda_ref(dx);
    q.dgamma = ampi_cuda_ref(dgamma);
    q.dbeta = ampi_cuda_ref(dbeta);
    q.mean = save_mean; q.invstd = save_invstd;
    q.accumulate = accumulate & AMP_ACCUMULATE_PARAMS;
    q.add = accumulate & AMP_ACCUMULATE_INPUT;

    /* frozen statistics are constants */
    return ampi_cuda_launch(exec, op, s->frozen ? ampi_k_batch_norm_frozen
        : ampi_k_batch_norm_backward, ampi_cuda_bn_grid(&p, &q), AMPI_CUDA_BN_BLOCK,
        AMPI_CUDA_BN_SHARED, q);
}

/* --- rows --- */

/* A row belongs to a group of T threads: a warp (eight rows to a block), or a block of T threads.
   Eight number k of a thread begins at column (k*T + thread) * 8. Rows of up to KEEP eights to a
   thread are read once and kept in registers; with KEEP = 0 each pass over a longer row reads it
   again, from the cache. */
#define AMPI_CUDA_THREADS(T) ((T) == 32 ? (int)AMPI_CUDA_BLOCK : (T))

/* Starts kernel<T, KEEP> as the length of the rows demands. */
#define AMPI_CUDA_LAUNCH_ROWS(exec, op, kernel, rows, d, shared, q) \
    ((d) <= 32 * 4 * 8 \
        ? ampi_cuda_launch(exec, op, kernel<32, 4>, \
            ampi_cuda_grid(rows, AMPI_CUDA_BLOCK / 32), AMPI_CUDA_THREADS(32), shared, q) \
    : (d) <= 256 * 4 * 8 \
        ? ampi_cuda_launch(exec, op, kernel<256, 4>, ampi_cuda_grid(rows, 1), 256, shared, q) \
        : ampi_cuda_launch(exec, op, kernel<512, 0>, ampi_cuda_grid(rows, 1), 512, shared, q))

/* Rows that such a block takes at a time. */
AMPI_FN size_t ampi_cuda_rows_at_once(size_t d) {
    return d <= 32 * 4 * 8 ? AMPI_CUDA_BLOCK / 32 : 1;
}

/* Shared memory that the sums and maxima of a row need at most: two doubles for each of 32
   warps. */
enum { AMPI_CUDA_ROW_SHARED = 2 * 32 * 8 };

/* The number of this thread's group among all, and how many groups there are. */
template <int T>
AMPI_D size_t ampi_d_group() {
    return T == 32 ? (size_t)blockIdx.x * (AMPI_CUDA_BLOCK / 32) + threadIdx.x / 32 : blockIdx.x;
}

template <int T>
AMPI_D size_t ampi_d_groups() {
    return T == 32 ? (size_t)gridDim.x * (AMPI_CUDA_BLOCK / 32) : gridDim.x;
}

/* The rows, or parts, that this group of T threads takes. */
#define AMPI_D_EACH(i, n) for (size_t i = ampi_d_group<T>(); i < n; i += ampi_d_groups<T>())

/* Calls f(k, i) for the eights of this thread that begin at a column i < d. With KEEP = 0, k is
   always 0. */
template <int T, int KEEP, typename F>
AMPI_D void ampi_d_eights(size_t d, F f) {
    size_t i = (size_t)(threadIdx.x % T) * 8;
    if (KEEP == 0) for (; i < d; i += (size_t)T * 8) f(0, i);
    AMPI_D_UNROLL
    for (int k = 0; k < KEEP; k++)
        if (i + (size_t)(k * T * 8) < d) f(k, i + (size_t)(k * T * 8));
}

/* One operand's row: elements [start, start + d) of x; rows begin ld elements apart. */
template <int KEEP>
struct ampi_row {
    amp_ref x;
    size_t start, end;                    /* elements of x */
    ampi_eight raw[KEEP > 0 ? KEEP : 1];  /* this thread's eights as they are stored */
    float v[KEEP > 0 ? KEEP : 1][8];      /* as floats, zeros behind the row's end */
};
/* Lets the loads of a whole row start; ampi_d_row_open turns eight k into floats, later passes find
   them. */
template <int T, int KEEP>
AMPI_D void ampi_d_row_start(ampi_row<KEEP>& r, amp_ref x, size_t row, size_t d, size_t ld) {
    r.x = x;
    r.start = row * ld;
    r.end = r.start + d;
    if (KEEP > 0)
        ampi_d_eights<T,
            KEEP>(d, [&](int k, size_t i) { ampi_d_fetch8(r.raw[k], x, r.start + i, r.end); });
}

/* Eight elements of the row as floats in r.v[k]. */
template <int KEEP>
AMPI_D void ampi_d_row_open(ampi_row<KEEP>& r, int k, size_t i) {
    if (KEEP == 0) ampi_d_fetch8(r.raw[k], r.x, r.start + i, r.end);
    ampi_d_widen8(r.v[k], r.raw[k], r.x.dtype);
}

/* The floats of eight k once more, in a pass after the first. */
template <int KEEP>
AMPI_D void ampi_d_row_again(ampi_row<KEEP>& r, int k, size_t i) {
    if (KEEP == 0) ampi_d_row_open(r, k, i);
}

/* --- layer norm --- */

/* Mean and 1/sqrt(variance + eps) of each row, in whole vectors. */
AMPI_FN size_t ampi_cuda_ln_statistics_bytes(size_t rows) {
    return ampi_round_up(rows * 2 * sizeof(float), 16);
}

/* A call of layer norm, of RMS norm, or of group norm, whose rows are groups of channels. */
typedef struct ampi_cuda_ln {
    amp_ref x, dy, gamma, beta;
    amp_ref y, dgamma, dbeta;          /* backward: y is dx */
    float *save_mean, *save_invstd;    /* forward: one a row, or NULL */
    const float *mean, *invstd;        /* backward: those saved; without a mean it is 0 */
    float* partial;                    /* backward: for each part of the rows its sums of d columns
                                          for dgamma, then for dbeta; or NULL */
    size_t rows, d, parts;             /* parts: of the rows, for dgamma and dbeta */
    size_t groups, spatial;            /* of group norm: rows of an image, pixels of a channel */
    double inverse_d;                  /* 1 / d */
    float eps;
    int rms;                           /* 1: RMS norm, whose mean is 0 */
    int accumulate, add;               /* gradients are added to what dgamma and dbeta, what dx
                                          hold */
} ampi_cuda_ln;

/* gamma or beta, or `missing`, beside columns i to i + 7 of a row: one a column, or of group norm
   one a channel. */
AMPI_D void ampi_d_ln_params8(float (&v)[8], const ampi_cuda_ln& q, amp_ref params, size_t row,
        size_t i, float missing) {
    if (!q.spatial || !params.data) {
        ampi_d_load8_or(v, params, i, q.d, missing);
        return;
    }
    const size_t first = row % q.groups * (q.d / q.spatial);
    for (size_t j = 0; j < 8; j++)
        v[j] = i + j < q.d ? ampi_d_load(params, first + (i + j) / q.spatial) : 0.0f;
}

/* Layer norm: of each row the mean, the mean square distance from it, and unless q.y is NULL y =
   (x - mean) * invstd * gamma + beta. The mean in double is mean + rest; of RMS norm it is 0. */
template <int T, int KEEP>
static __global__ void __launch_bounds__(AMPI_CUDA_THREADS(T)) ampi_k_layer_norm(ampi_cuda_ln q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    AMPI_D_EACH(row, q.rows) {
        ampi_row<KEEP> x;
        double sum[1] = { 0.0 }, squares[1] = { 0.0 };
        ampi_d_row_start<T>(x, q.x, row, q.d, q.d);

        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            ampi_d_row_open(x, k, i);
            sum[0] += (double)ampi_d_sum8(x.v[k]);
        });
        ampi_d_group_sum<T>(sum, shared);
        const double exact = q.rms ? 0.0 : sum[0] * q.inverse_d;
        const float mean = (float)exact, rest = (float)(exact - (double)mean);

        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            float v[8];
            ampi_d_row_again(x, k, i);
            for (int j = 0; j < 8; j++) v[j] = (x.v[k][j] - mean) - rest;
            ampi_d_trim8(v, q.d - i);  /* zeros behind the row */
            squares[0] += (double)ampi_d_dot8(v, v);
        });
        ampi_d_group_sum<T>(squares, shared);
        const float invstd = __frsqrt_rn((float)fma(squares[0], q.inverse_d, (double)q.eps));

        if (q.y.data) ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            float g[8], b[8];
            ampi_d_row_again(x, k, i);
            ampi_d_ln_params8(g, q, q.gamma, row, i, 1.0f);
            ampi_d_ln_params8(b, q, q.beta, row, i, 0.0f);
            for (int j = 0; j < 8; j++) g[j] = ampi_fma(1, (x.v[k][j] - mean) * invstd, g[j], b[j]);
            ampi_d_store8(q.y, x.start + i, x.end, g);
        });

        if (threadIdx.x % T != 0) continue;
        if (q.save_mean) q.save_mean[row] = mean;
        if (q.save_invstd) q.save_invstd[row] = invstd;
    }
}

/* The statistics of rows whose forward pass saved none, in the front of the workspace; the rest of
   it is left in *rest. */
AMPI_FN amp_result ampi_cuda_ln_statistics(ampi_cuda_ln* q, const char* op, const amp_exec* exec,
        amp_exec* rest) {
    const size_t bytes = ampi_cuda_ln_statistics_bytes(q->rows);
    float* own = (float*)ampi_cuda_scratch(exec, bytes);
    ampi_cuda_ln forward = *q;
    AMPI_REFUSE_OP(!own, AMP_ERR_ARGUMENT,
        "%s: %s is NULL: without it the call needs the workspace that layer_norm_workspace "
        "tells", op, q->mean || q->rms ? "save_invstd" : "save_mean");
    q->mean = forward.save_mean = own;
    q->invstd = forward.save_invstd = own + q->rows;
    forward.y = AMP_NONE;
    rest->workspace_size -= (size_t)((char*)own - (char*)rest->workspace) + bytes;
    rest->workspace = (char*)own + bytes;
    return AMPI_CUDA_LAUNCH_ROWS(exec, op, ampi_k_layer_norm, q->rows, q->d, AMPI_CUDA_ROW_SHARED,
        forward);
}

/* A call's numbers, from its rows. */
AMPI_FN ampi_cuda_ln ampi_cuda_ln_of(const ampi_rows& f) {
    ampi_cuda_ln q = {};
    q.rows = f.rows;
    q.d = f.d;
    q.rms = f.rms;
    q.groups = f.groups;
    q.spatial = f.spatial;
    q.inverse_d = 1.0 / (double)f.d;
    q.eps = (float)f.eps;
    return q;
}

/* A norm of f's rows, with `params` elements of gamma and beta. */
AMPI_FN amp_result ampi_cuda_ln_forward(const char* op, ampi_rows f, size_t params, amp_ref x,
        amp_ref gamma, amp_ref beta, float eps, float* save_mean, float* save_invstd, amp_ref y,
        const amp_exec* exec) {
    const size_t all = ampi_area(f.rows, f.d);
    const ampi_argument list[] = { AMPI_ARG(x, AMPI_IN, all), AMPI_ARG(y, AMPI_OUT, all),
        AMPI_ARG(gamma, AMPI_NULL, params), AMPI_ARG(beta, AMPI_NULL, params),
        AMPI_ARG_F32(save_mean, AMPI_OUT | AMPI_NULL, f.rows),
        AMPI_ARG_F32(save_invstd, AMPI_OUT | AMPI_NULL, f.rows) };
    AMPI_CUDA_CHECK(op, all, list);
    AMPI_TRY(ampi_ln_check(exec, op, &f, eps));
    if (f.rows == 0) return AMP_OK;

    ampi_cuda_ln q = ampi_cuda_ln_of(f);
    q.x = ampi_cuda_ref(x);
    q.gamma = ampi_cuda_ref(gamma);
    q.beta = ampi_cuda_ref(beta);
    q.y = ampi_cuda_ref(y);
    q.save_mean = save_mean;
    q.save_invstd = save_invstd;
    return AMPI_CUDA_LAUNCH_ROWS(exec, op, ampi_k_layer_norm, q.rows, q.d, AMPI_CUDA_ROW_SHARED, q);
}

/* The table's layer_norm_forward. */
AMPI_CUDA(layer_norm_forward, amp_ref x, amp_ref gamma, amp_ref beta, float eps, float* save_mean,
        float* save_invstd, amp_ref y, size_t rows, size_t d) {
    return ampi_cuda_ln_forward("amp_cuda_layer_norm_forward", ampi_rows_of(NULL, rows, d), d, x,
        gamma, beta, eps, save_mean, save_invstd, y, exec);
}

/* The table's rms_norm_forward. */
AMPI_CUDA(rms_norm_forward, amp_ref x, amp_ref gamma, float eps, float* save_invstd, amp_ref y,
        size_t rows, size_t d) {
    ampi_rows f = ampi_rows_of(NULL, rows, d);
    f.rms = 1;
    return ampi_cuda_ln_forward("amp_cuda_rms_norm_forward", f, d, x, gamma, AMP_NONE, eps, NULL,
        save_invstd, y, exec);
}

/* The table's group_norm_forward. */
AMPI_CUDA(group_norm_forward, const amp_group_norm_shape* s, amp_ref x, amp_ref gamma, amp_ref beta,
        float* save_mean, float* save_invstd, amp_ref y) {
    const char* op = "amp_cuda_group_norm_forward";
    ampi_rows f;
    AMPI_TRY(ampi_gn_rows(s, &f, op, exec));
    return ampi_cuda_ln_forward(op, f, (size_t)s->channels, x, gamma, beta, s->eps, save_mean,
        save_invstd, y, exec);
}

/* dx = (dy * gamma - a - (x - mean) * b) * invstd: a is the row's mean of dy * gamma (0 of RMS
   norm), b that of dy * gamma * (x - mean) * invstd^2. */
template <int T, int KEEP>
static __global__ void __launch_bounds__(AMPI_CUDA_THREADS(T))
        ampi_k_layer_norm_backward(ampi_cuda_ln q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    AMPI_D_EACH(row, q.rows) {
        ampi_row<KEEP> x, dy;
        double v[2] = { 0.0, 0.0 };
        const float mean = q.mean ? q.mean[row] : 0.0f, invstd = q.invstd[row];
        ampi_d_row_start<T>(x, q.x, row, q.d, q.d);
        ampi_d_row_start<T>(dy, q.dy, row, q.d, q.d);

        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            float g[8], h[8];
            ampi_d_row_open(x, k, i);
            ampi_d_row_open(dy, k, i);
            ampi_d_ln_params8(g, q, q.gamma, row, i, 1.0f);
            for (int j = 0; j < 8; j++) g[j] = dy.v[k][j] * g[j];
            for (int j = 0; j < 8; j++) h[j] = x.v[k][j] - mean;
            v[0] += (double)ampi_d_sum8(g);
            v[1] += (double)ampi_d_dot8(g, h);      /* beyond the end g is 0 */
        });
        ampi_d_group_sum<T>(v, shared);
        const float a = q.rms ? 0.0f : (float)(v[0] * q.inverse_d);
        const float b = (float)(v[1] * ((double)invstd * (double)invstd) * q.inverse_d);

        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            float g[8];
            ampi_d_row_again(x, k, i);
            ampi_d_row_again(dy, k, i);
            ampi_d_ln_params8(g, q, q.gamma, row, i, 1.0f);
            for (int j = 0; j < 8; j++)
                g[j] = ampi_fma(1, mean - x.v[k][j], b, ampi_fma(1, dy.v[k][j], g[j], -a)) * invstd;
            ampi_d_give8(q.y, x.start + i, x.end, g, q.add);
        });
    }
}

/* dgamma and dbeta: sums down the columns. The rows are cut into parts, a number that depends on
   the rows alone; a part's sums are rounded to float and then added in the order of the parts. One
   block adds them, or they meet in the workspace. A block takes 256 columns, a warp of it every
   eighth row. */
enum { AMPI_CUDA_LN_COLUMNS = 256, AMPI_CUDA_LN_WARPS = AMPI_CUDA_BLOCK / 32 };

AMPI_FN size_t ampi_cuda_ln_parts(size_t rows) {
    return rows < 64 ? 1 : rows < 64 * 64 ? rows / 64 : 64;
}

/* Bytes of workspace for the partial sums of dgamma and dbeta. */
AMPI_FN size_t ampi_cuda_ln_partial_bytes(size_t rows, size_t d) {
    return ampi_cuda_ln_parts(rows) > 1 ? ampi_area(ampi_cuda_ln_parts(rows) * 2 * sizeof(float),
        d) : 0;
}

/* The same with space for alignment; 0 if none is used. */
AMPI_FN size_t ampi_cuda_layer_norm_workspace(size_t rows, size_t d) {
    const size_t bytes = ampi_cuda_ln_partial_bytes(rows, d);
    const size_t all = bytes + ampi_cuda_ln_statistics_bytes(rows) + 16;
    return rows > SIZE_MAX / 64 || all < bytes ? 0 : all;
}

/* Adds what every AMPI_CUDA_LN_WARPS-th row from `row` to before `last` has in columns i to i + 7:
   dy * xhat to dg, dy to db. Four rows make float sums g and b, these the double ones; the loads of
   two rows are under way together. */
AMPI_D void ampi_d_ln_down(const ampi_cuda_ln& q, size_t row, size_t last, size_t i,
        double (&dg)[8], double (&db)[8]) {
    for (; row < last; row += 4 * (size_t)AMPI_CUDA_LN_WARPS) {
        float g[8] = {}, b[8] = {};
        AMPI_ROLLED
        for (int half = 0; half < 2; half++) {
            /* a row behind the last is read as zeros */
            ampi_eight x[2], dy[2];
            AMPI_D_UNROLL
            for (int u = 0; u < 2; u++) {
                size_t r = row + (size_t)((2 * half + u) * AMPI_CUDA_LN_WARPS),
                    end = r < last ? (r + 1) * q.d : 0;
                ampi_d_fetch8(x[u], q.x, r * q.d + i, end);
                ampi_d_fetch8(dy[u], q.dy, r * q.d + i, end);
            }

            AMPI_D_UNROLL
            for (int u = 0; u < 2; u++) {
                size_t r = row + (size_t)((2 * half + u) * AMPI_CUDA_LN_WARPS);
                float v[8], w[8], mean, invstd;
                if (r >= last) continue;
                mean = q.mean ? q.mean[r] : 0.0f;
                invstd = q.invstd[r];
                ampi_d_widen8(v, x[u], q.x.dtype);
                ampi_d_widen8(w, dy[u], q.dy.dtype);
                for (int j = 0; j < 8; j++) b[j] += w[j];
                for (int j = 0; j < 8; j++) g[j] = ampi_fma(1, w[j], (v[j] - mean) * invstd, g[j]);
            }
        }

        for (int j = 0; j < 8; j++) dg[j] += (double)g[j];
        for (int j = 0; j < 8; j++) db[j] += (double)b[j];
    }
}

/* The warps' sums of eight columns each become one sum for each thread's column. */
AMPI_D float ampi_d_ln_across(const double (&v)[8], double* shared) {
    double sum = 0.0;
    __syncthreads();
    for (int j = 0; j < 8; j++)
        shared[threadIdx.x / 32 * AMPI_CUDA_LN_COLUMNS + threadIdx.x % 32 * 8 + j] = v[j];
    __syncthreads();
    for (int warp = 0; warp < AMPI_CUDA_LN_WARPS; warp++)
        sum += shared[warp * AMPI_CUDA_LN_COLUMNS + (int)threadIdx.x];
    return (float)sum;
}

/* Sums of dgamma and dbeta over parts of the rows, a block for AMPI_CUDA_LN_COLUMNS columns. With
   q.partial a block of the grid's y takes a part, and leaves its sums there; else it takes all, and
   adds them in order. A thread sums columns i to i + 7 of its warp's rows, then has one column. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
        ampi_k_layer_norm_columns(ampi_cuda_ln q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    const size_t first = (size_t)blockIdx.x * AMPI_CUDA_LN_COLUMNS, column = first + threadIdx.x;
    const size_t i = first + threadIdx.x % 32 * 8u;
    double dgamma = 0.0, dbeta = 0.0;
    for (size_t part = blockIdx.y; part < q.parts; part += gridDim.y) {
        double dg[8] = {}, db[8] = {};

        /* rows [row, last): the first rows % parts parts have one more */
        size_t row = part * (q.rows / q.parts) + (part < q.rows % q.parts ? part
            : q.rows % q.parts);
        size_t last = row + q.rows / q.parts + (part < q.rows % q.parts);
        if (i < q.d) ampi_d_ln_down(q, row + threadIdx.x / 32, last, i, dg, db);

        float g = ampi_d_ln_across(dg, shared), b = ampi_d_ln_across(db, shared);
        dgamma += (double)g;
        dbeta += (double)b;
        if (!q.partial || column >= q.d) continue;
        q.partial[2 * part * q.d + column] = g;
        q.partial[(2 * part + 1) * q.d + column] = b;
    }
    if (q.partial || column >= q.d) return;
    ampi_d_store_one(q.dgamma, column, (float)dgamma, q.accumulate);
    ampi_d_store_one(q.dbeta, column, (float)dbeta, q.accumulate);
}

/* dgamma and dbeta from their parts, in ascending order, a thread for each column. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_layer_norm_parts(ampi_cuda_ln q) {
    ampi_ptx_grid_wait();
    const size_t column = (size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x;
    double dgamma = 0.0, dbeta = 0.0;
    if (column >= q.d) return;
    for (size_t part = 0; part < q.parts; part++) {
        dgamma += (double)q.partial[2 * part * q.d + column];
        dbeta += (double)q.partial[(2 * part + 1) * q.d + column];
    }
    ampi_d_store_one(q.dgamma, column, (float)dgamma, q.accumulate);
    ampi_d_store_one(q.dbeta, column, (float)dbeta, q.accumulate);
}

/* dgamma and dbeta, by one launch, or by two with partial sums in the workspace. */
AMPI_FN amp_result ampi_cuda_ln_columns(ampi_cuda_ln q, const char* op, const amp_exec* exec) {
    const size_t shared = (size_t)AMPI_CUDA_LN_WARPS * AMPI_CUDA_LN_COLUMNS * sizeof(double);
    const unsigned blocks = (unsigned)((q.d + AMPI_CUDA_LN_COLUMNS - 1) / AMPI_CUDA_LN_COLUMNS);
    q.parts = ampi_cuda_ln_parts(q.rows);
    if (q.parts > 1)
        q.partial = (float*)ampi_cuda_scratch(exec, ampi_cuda_ln_partial_bytes(q.rows, q.d));
    AMPI_TRY(ampi_cuda_launch(exec, op, ampi_k_layer_norm_columns,
        dim3(blocks, q.partial ? (unsigned)q.parts : 1u), AMPI_CUDA_BLOCK, shared, q));
    if (!q.partial) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_layer_norm_parts, blocks, AMPI_CUDA_BLOCK,
        0, q);
}

/* dgamma and dbeta of group norm, a block for each channel: its threads take the pixels of all
   images in turn. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_group_norm_params(ampi_cuda_ln q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    const size_t per_group = q.d / q.spatial, pixels = q.rows / q.groups * q.spatial;
    for (size_t c = blockIdx.x; c < q.groups * per_group; c += gridDim.x) {
        double v[2] = { 0.0, 0.0 };
        for (size_t i = threadIdx.x; i < pixels; i += AMPI_CUDA_BLOCK) {
            const size_t row = i / q.spatial * q.groups + c / per_group;
            const size_t at = row * q.d + c % per_group * q.spatial + i % q.spatial;
            const float dy = ampi_d_load(q.dy, at);
            v[0] += (double)(dy * ((ampi_d_load(q.x, at) - q.mean[row]) * q.invstd[row]));
            v[1] += (double)dy;
        }
        ampi_d_group_sum<AMPI_CUDA_BLOCK>(v, shared);
        if (threadIdx.x != 0) continue;
        ampi_d_store_one(q.dgamma, c, (float)v[0], q.accumulate);
        ampi_d_store_one(q.dbeta, c, (float)v[1], q.accumulate);
    }
}

/* The gradients of ampi_cuda_ln_forward. */
AMPI_FN amp_result ampi_cuda_ln_backward(const char* op, ampi_rows f, size_t params, amp_ref dy,
        amp_ref x, amp_ref gamma, float eps, const float* save_mean, const float* save_invstd,
        amp_ref dx, amp_ref dgamma, amp_ref dbeta, int accumulate, const amp_exec* exec) {
    const size_t rows = f.rows, all = ampi_area(rows, f.d);
    const int saved = f.spatial ? AMPI_IN : AMPI_NULL;
    const ampi_argument list[] = { AMPI_ARG(dy, AMPI_IN, all), AMPI_ARG(x, AMPI_IN, all),
        AMPI_ARG(gamma, AMPI_NULL, params), AMPI_ARG(dx, AMPI_OUT | AMPI_NULL, all),
        AMPI_ARG_F32(save_mean, saved, rows), AMPI_ARG_F32(save_invstd, saved, rows),
        AMPI_ARG(dgamma, AMPI_OUT | AMPI_NULL, params),
        AMPI_ARG(dbeta, AMPI_OUT | AMPI_NULL, params) };
    AMPI_CUDA_CHECK(op, all, list);
    AMPI_TRY(ampi_ln_check(exec, op, &f, eps));
    if (rows == 0 && accumulate & AMP_ACCUMULATE_PARAMS) return AMP_OK;
    AMPI_GROW_WORKSPACE(f.spatial ? 0 : ampi_cuda_layer_norm_workspace(rows, f.d))
    amp_exec rest = exec ? *exec : amp_exec();  /* with what the statistics leave of the
                                                   workspace */

    /* no rows: dgamma and dbeta become 0; operands of no elements have not been checked */
    if (rows == 0) AMPI_TRY(ampi_cuda_check_pointer(exec, op, "dgamma", dgamma.data));
    if (rows == 0) AMPI_TRY(ampi_cuda_check_pointer(exec, op, "dbeta", dbeta.data));

    ampi_cuda_ln q = ampi_cuda_ln_of(f);
    q.x = ampi_cuda_ref(x);
    q.dy = ampi_cuda_ref(dy);
    q.gamma = ampi_cuda_ref(gamma);
    q.y = ampi_cuda_ref(dx);
    q.dgamma = ampi_cuda_ref(dgamma);
    q.dbeta = ampi_cuda_ref(dbeta);
    q.mean = save_mean; q.invstd = save_invstd;
    q.accumulate = accumulate & AMP_ACCUMULATE_PARAMS;
    q.add = accumulate & AMP_ACCUMULATE_INPUT;

    if (rows > 0 && ((!save_mean && !f.rms) || !save_invstd))
        AMPI_TRY(ampi_cuda_ln_statistics(&q, op, exec, &rest));
    if ((dgamma.data || dbeta.data) && f.spatial)
        AMPI_TRY(ampi_cuda_launch(exec, op, ampi_k_group_norm_params, ampi_cuda_grid(params, 1),
            AMPI_CUDA_BLOCK, AMPI_CUDA_ROW_SHARED, q));
    else if (dgamma.data || dbeta.data) AMPI_TRY(ampi_cuda_ln_columns(q, op, &rest));
    if (!dx.data || rows == 0) return AMP_OK;
    return AMPI_CUDA_LAUNCH_ROWS(exec, op, ampi_k_layer_norm_backward, rows, q.d,
        AMPI_CUDA_ROW_SHARED, q);
}

/* The table's layer_norm_backward. */
AMPI_CUDA(layer_norm_backward, amp_ref dy, amp_ref x, amp_ref gamma, float eps,
        const float* save_mean, const float* save_invstd, amp_ref dx, amp_ref dgamma, amp_ref dbeta,
        int accumulate, size_t rows, size_t d) {
    return ampi_cuda_ln_backward("amp_cuda_layer_norm_backward", ampi_rows_of(NULL, rows, d), d, dy,
        x, gamma, eps, save_mean, save_invstd, dx, dgamma, dbeta, accumulate, exec);
}

/* The table's rms_norm_backward. */
AMPI_CUDA(rms_norm_backward, amp_ref dy, amp_ref x, amp_ref gamma, float eps,
        const float* save_invstd, amp_ref dx, amp_ref dgamma, int accumulate, size_t rows,
        size_t d) {
    ampi_rows f = ampi_rows_of(NULL, rows, d);
    f.rms = 1;
    return ampi_cuda_ln_backward("amp_cuda_rms_norm_backward", f, d, dy, x, gamma, eps, NULL,
        save_invstd, dx, dgamma, AMP_NONE, accumulate, exec);
}

/* The table's group_norm_backward. */
AMPI_CUDA(group_norm_backward, const amp_group_norm_shape* s, amp_ref dy, amp_ref x, amp_ref gamma,
        const float* save_mean, const float* save_invstd, amp_ref dx, amp_ref dgamma, amp_ref dbeta,
        int accumulate) {
    const char* op = "amp_cuda_group_norm_backward";
    ampi_rows f;
    AMPI_TRY(ampi_gn_rows(s, &f, op, exec));
    return ampi_cuda_ln_backward(op, f, (size_t)s->channels, dy, x, gamma, s->eps, save_mean,
        save_invstd, dx, dgamma, dbeta, accumulate, exec);
}

/* --- softmax --- */

/* A call of softmax, or of sums of products, over rows of d elements. */
typedef struct ampi_cuda_softmax {
    amp_ref x, dy;           /* backward: x is the forward pass's y */
    amp_ref y;               /* backward: dx */
    size_t rows, d;
    int add;                 /* backward: to what dx holds */
} ampi_cuda_softmax;

/* Turns the floats of a row into e = exp(x - max), which ampi_d_row_exp_again finds again; returns
   the sum of them. *total is this thread's part of the sum of x. */
template <int T, int KEEP>
AMPI_D float ampi_d_row_exp(ampi_row<KEEP>& x, size_t d, float* max, double* total,
        double* shared) {
    float greatest = ampi_float(0xff800000u);
    double sum[1] = { 0.0 };
    *total = 0.0;

    /* the maximum; columns behind the row are zeros, and not looked at */
    ampi_d_eights<T, KEEP>(d, [&](int k, size_t i) {
        ampi_d_row_open(x, k, i);
        *total += (double)ampi_d_sum8(x.v[k]);
        for (int j = 0; j < 8; j++)
            greatest = i + (size_t)j < d ? ampi_d_larger(greatest, x.v[k][j]) : greatest;
    });
    greatest = ampi_d_group_max<T>(greatest, shared);

    /* the exponentials, zeros behind the row */
    ampi_d_eights<T, KEEP>(d, [&](int k, size_t i) {
        ampi_d_row_again(x, k, i);
        for (int j = 0; j < 8; j++) x.v[k][j] = ampi_exp(1, x.v[k][j] - greatest);
        ampi_d_trim8(x.v[k], d - i);
        sum[0] += (double)ampi_d_sum8(x.v[k]);
    });
    ampi_d_group_sum<T>(sum, shared);
    *max = greatest;
    return (float)sum[0];
}

/* The exponentials of eight elements, formed anew where the row is not kept. */
template <int KEEP>
AMPI_D void ampi_d_row_exp_again(ampi_row<KEEP>& x, int k, size_t i, float max) {
    if (KEEP > 0) return;
    ampi_d_row_open(x, k, i);
    for (int j = 0; j < 8; j++) x.v[k][j] = ampi_exp(1, x.v[k][j] - max);
}

/* Softmax of rows, T threads each. */
template <int T, int KEEP>
static __global__ void __launch_bounds__(AMPI_CUDA_THREADS(T)) ampi_k_softmax(ampi_cuda_softmax q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    AMPI_D_EACH(row, q.rows) {
        ampi_row<KEEP> x;
        float max;
        double unused;
        ampi_d_row_start<T>(x, q.x, row, q.d, q.d);
        const float inverse = 1.0f / ampi_d_row_exp<T>(x, q.d, &max, &unused, shared);
        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            ampi_d_row_exp_again(x, k, i, max);
            for (int j = 0; j < 8; j++) x.v[k][j] *= inverse;
            ampi_d_store8(q.y, x.start + i, x.end, x.v[k]);
        });
    }
}

/* dx = y * (dy - sum(dy * y)) of rows, T threads each. */
template <int T, int KEEP>
static __global__ void __launch_bounds__(AMPI_CUDA_THREADS(T))
        ampi_k_softmax_backward(ampi_cuda_softmax q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    AMPI_D_EACH(row, q.rows) {
        ampi_row<KEEP> y, dy;
        double dot[1] = { 0.0 };
        ampi_d_row_start<T>(y, q.x, row, q.d, q.d);
        ampi_d_row_start<T>(dy, q.dy, row, q.d, q.d);

        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            ampi_d_row_open(y, k, i);
            ampi_d_row_open(dy, k, i);
            dot[0] += (double)ampi_d_dot8(y.v[k], dy.v[k]);
        });
        ampi_d_group_sum<T>(dot, shared);
        const float sum = (float)dot[0];

        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            ampi_d_row_again(y, k, i);
            ampi_d_row_again(dy, k, i);
            for (int j = 0; j < 8; j++) y.v[k][j] *= dy.v[k][j] - sum;
            ampi_d_give8(q.y, y.start + i, y.end, y.v[k], q.add);
        });
    }
}

/* The table's softmax_forward. */
AMPI_CUDA(softmax_forward, amp_ref x, amp_ref y, size_t rows, size_t d) {
    const char* op = "amp_cuda_softmax_forward";
    const size_t all = ampi_area(rows, d);
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_SAME, all), AMPI_ARG(y, AMPI_OUT | AMPI_SAME, all) };
    const ampi_cuda_softmax q = { ampi_cuda_ref(x), AMP_NONE, ampi_cuda_ref(y), rows, d, 0 };
    AMPI_CUDA_CHECK(op, all, list);
    if (rows == 0 || d == 0) return AMP_OK;
    return AMPI_CUDA_LAUNCH_ROWS(exec, op, ampi_k_softmax, rows, d, AMPI_CUDA_ROW_SHARED, q);
}

/* The table's softmax_backward. */
AMPI_CUDA(softmax_backward, amp_ref dy, amp_ref y, amp_ref dx, int accumulate, size_t rows,
        size_t d) {
    const char* op = "amp_cuda_softmax_backward";
    const size_t all = ampi_area(rows, d);
    const ampi_argument list[] = { AMPI_ARG(dy, AMPI_IN, all), AMPI_ARG(y, AMPI_IN, all),
        AMPI_ARG(dx, AMPI_OUT | AMPI_NULL, all) };
    const ampi_cuda_softmax q = { ampi_cuda_ref(y), ampi_cuda_ref(dy), ampi_cuda_ref(dx), rows, d,
        accumulate & AMP_ACCUMULATE_INPUT };
    AMPI_CUDA_CHECK(op, all, list);
    if (!dx.data || rows == 0 || d == 0) return AMP_OK;
    return AMPI_CUDA_LAUNCH_ROWS(exec, op, ampi_k_softmax_backward, rows, d, AMPI_CUDA_ROW_SHARED,
        q);
}

/* --- sums of products --- */

/* y[row] = the sum of x * dy in a row, T threads each. */
template <int T, int KEEP>
static __global__ void __launch_bounds__(AMPI_CUDA_THREADS(T))
        ampi_k_row_products(ampi_cuda_softmax q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    AMPI_D_EACH(row, q.rows) {
        ampi_row<KEEP> x, dy;
        double dot[1] = { 0.0 };
        ampi_d_row_start<T>(x, q.x, row, q.d, q.d);
        ampi_d_row_start<T>(dy, q.dy, row, q.d, q.d);
        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            ampi_d_row_open(x, k, i);
            ampi_d_row_open(dy, k, i);
            dot[0] += (double)ampi_d_dot8(x.v[k], dy.v[k]);
        });
        ampi_d_group_sum<T>(dot, shared);
        if (threadIdx.x % T == 0) ampi_d_store_one(q.y, row, (float)dot[0], q.add);
    }
}

/* The table's mul_backward: da is a product, and db, if runs are longer than one, a sum of each. */
AMPI_CUDA(mul_backward, amp_ref dy, amp_ref a, amp_ref b, amp_ref da, amp_ref db, int accumulate,
        size_t n, size_t repeat) {
    const char* op = "amp_cuda_mul_backward";
    const int add = accumulate & AMP_ACCUMULATE_INPUT;
    AMPI_TRY(ampi_check_repeat(exec, op, n, repeat));
    const size_t runs = n / repeat;
    const ampi_argument list[] = { AMPI_ARG(dy, AMPI_IN, n), AMPI_ARG(a, AMPI_IN, n),
        AMPI_ARG(b, AMPI_IN, runs), AMPI_ARG(da, AMPI_OUT | AMPI_NULL, n),
        AMPI_ARG(db, AMPI_OUT | AMPI_NULL, runs) };
    const ampi_cuda_softmax q = { ampi_cuda_ref(a), ampi_cuda_ref(dy), ampi_cuda_ref(db), runs,
        repeat, add };
    AMPI_CUDA_CHECK(op, n, list);
    AMPI_TRY(ampi_cuda_mul_run(exec, op, dy, b, da, n, repeat, add));
    if (repeat == 1) return ampi_cuda_mul_run(exec, op, dy, a, db, n, repeat, add);
    if (!db.data || runs == 0) return AMP_OK;
    return AMPI_CUDA_LAUNCH_ROWS(exec, op, ampi_k_row_products, runs, repeat, AMPI_CUDA_ROW_SHARED,
        q);
}

/* --- transpose --- */

/* A thread for each element of y, n matrices of `rows` elements in a row. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_transpose(amp_ref x, amp_ref y,
        size_t n, size_t rows, size_t columns) {
    ampi_ptx_grid_wait();
    const size_t each = rows * columns;
    size_t i = (size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x;
    for (; i < n * each; i += (size_t)gridDim.x * AMPI_CUDA_BLOCK)
        ampi_d_store(y, i, ampi_d_load(x, i / each * each + i % rows * columns + i % each / rows));
}

/* The table's transpose_forward. */
AMPI_CUDA(transpose_forward, amp_ref x, amp_ref y, size_t n, size_t rows, size_t columns) {
    const char* op = "amp_cuda_transpose_forward";
    const size_t all = ampi_area(n, ampi_area(rows, columns));
    const ampi_argument list[] = { AMPI_ARG(x, AMPI_IN, all), AMPI_ARG(y, AMPI_OUT, all) };
    AMPI_CUDA_CHECK(op, all, list);
    if (all == 0) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_transpose, ampi_cuda_grid(all, AMPI_CUDA_BLOCK),
        AMPI_CUDA_BLOCK, 0, ampi_cuda_ref(x), ampi_cuda_ref(y), n, rows, columns);
}

/* --- embedding --- */

/* A call of an embedding: rows of d elements, of w or dw one for each of `vocabulary` tokens, of y
   or dy one for each of n. */
typedef struct ampi_cuda_embedding {
    const int32_t* tokens;
    amp_ref w, y;
    size_t n, vocabulary, d;
    int add;  /* dw is added to */
} ampi_cuda_embedding;

/* Checks a call; backward: w is dw, and results change sides. */
AMPI_FN amp_result ampi_cuda_embedding_open(ampi_cuda_embedding* q, const char* op, int backward,
        const amp_exec* exec) {
    const size_t count = ampi_area(q->n, q->d), all = ampi_area(q->vocabulary, q->d);
    const ampi_argument list[] = {
        { backward ? "dw" : "w", q->w.data, q->w.dtype, backward ? AMPI_OUT | AMPI_NULL : AMPI_IN,
            AMPI_FLAT(all) },
        { backward ? "dy" : "y", q->y.data, q->y.dtype, backward ? AMPI_IN : AMPI_OUT,
            AMPI_FLAT(count) } };
    AMPI_CUDA_CHECK(op, count, list);
    AMPI_REFUSE_OP(count > 0 && !q->tokens, AMP_ERR_ARGUMENT, "%s: tokens is NULL", op);
    q->w = ampi_cuda_ref(q->w);
    q->y = ampi_cuda_ref(q->y);
    return ampi_cuda_check_pointer(exec, op, "tokens", q->tokens);
}

/* Copies rows; that of a token outside of the vocabulary is NaN. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_embedding(ampi_cuda_embedding q) {
    ampi_ptx_grid_wait();
    size_t i = (size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x;
    for (; i < q.n * q.d; i += (size_t)gridDim.x * AMPI_CUDA_BLOCK) {
        const int32_t token = q.tokens[i / q.d];
        const int known = token >= 0 && (size_t)token < q.vocabulary;
        ampi_d_store(q.y, i, known ? ampi_d_load(q.w, (size_t)token * q.d + i % q.d)
            : ampi_float(0x7fc00000u));
    }
}

/* The table's embedding_forward. */
AMPI_CUDA(embedding_forward, const int32_t* tokens, amp_ref w, amp_ref y, size_t n,
        size_t vocabulary, size_t d) {
    const char* op = "amp_cuda_embedding_forward";
    ampi_cuda_embedding q = { tokens, w, y, n, vocabulary, d, 0 };
    AMPI_TRY(ampi_cuda_embedding_open(&q, op, 0, exec));
    if (n == 0 || d == 0) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_embedding, ampi_cuda_grid(n * d, AMPI_CUDA_BLOCK),
        AMPI_CUDA_BLOCK, 0, q);
}

/* A block for each position: where it is the first of its token, rows of dy of that token add up,
   as positions ascend. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
        ampi_k_embedding_backward(ampi_cuda_embedding q) {
    ampi_ptx_grid_wait();
    for (size_t first = blockIdx.x; first < q.n; first += gridDim.x) {
        const int32_t token = q.tokens[first];
        int earlier = token < 0 || (size_t)token >= q.vocabulary;
        for (size_t i = threadIdx.x; i < first; i += AMPI_CUDA_BLOCK)
            earlier |= q.tokens[i] == token;
        if (__syncthreads_or(earlier)) continue;
        for (size_t c = threadIdx.x; c < q.d; c += AMPI_CUDA_BLOCK) {
            float sum = ampi_d_load(q.y, first * q.d + c);
            for (size_t i = first + 1; i < q.n; i++)
                if (q.tokens[i] == token) sum += ampi_d_load(q.y, i * q.d + c);
            ampi_d_store_one(q.w, (size_t)token * q.d + c, sum, q.add);
        }
    }
}

/* The table's embedding_backward. */
AMPI_CUDA(embedding_backward, amp_ref dy, const int32_t* tokens, amp_ref dw, int accumulate,
        size_t n, size_t vocabulary, size_t d) {
    const char* op = "amp_cuda_embedding_backward";
    const int add = accumulate & AMP_ACCUMULATE_PARAMS;
    ampi_cuda_embedding q = { tokens, dw, dy, n, vocabulary, d, add };
    AMPI_TRY(ampi_cuda_embedding_open(&q, op, 1, exec));
    if (!dw.data || d == 0) return AMP_OK;
    if (!add)
        AMPI_TRY(ampi_cuda_zero(dw.data, vocabulary * d * ampi_type_size(q.w.dtype), exec));
    if (n == 0) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_embedding_backward, ampi_cuda_grid(n, 1),
        AMPI_CUDA_BLOCK, 0, q);
}

/* >>impl-attention Attention, whose formulas are at the head of the same room of amp.h, and the
   rotary embedding of positions.
   Letters. b: a sequence. h: a head of q. g: one of k and v. i: a query. j: a key. This room calls
   impl-device, impl-gemm and impl-launch. */

/* --- attention by FP32 cores --- */

/* A block takes a query, or a key of a head of k and v. What that sees follows in ascending order,
   AMPI_CUDA_BLOCK at a time: a thread makes one score, then sums a column of the result. */
enum { AMPI_CUDA_MAX_HEAD = AMPI_CUDA_BLOCK,
       AMPI_CUDA_ATTENTION_SUMS = 64 };  /* doubles of sums over a block */
/* Shared memory of such a block: sums, and two numbers for each thread. */
enum { AMPI_CUDA_ATTENTION_SHARED = AMPI_CUDA_ATTENTION_SUMS * 8 + 2 * AMPI_CUDA_BLOCK * 4 };

/* The first element of a query in q (or y, by its ld), and of a key in k (or v). */
AMPI_D size_t ampi_d_query(const ampi_attention& a, size_t ld, size_t b, size_t i, size_t h) {
    return (b * a.s.queries + i) * ld + h * a.s.head_size;
}

AMPI_D size_t ampi_d_key(const ampi_attention& a, size_t ld, size_t b, size_t j, size_t g) {
    return (b * a.s.key_stride + j) * ld + g * a.s.head_size;
}

/* The keys that query i sees; BY_KEY: the queries that key i is seen by. */
template <int BY_KEY>
AMPI_D ampi_interval ampi_d_sees(const amp_attention_shape& s, size_t b, size_t i) {
    if (!BY_KEY) return ampi_overlap(ampi_keys_of(&s, b, i), 0, s.keys);
    ampi_interval seen = ampi_overlap(ampi_queries_of(&s, b, i), 0, s.queries);
    if (s.lengths && i >= (size_t)s.lengths[b]) seen.to = seen.from;
    return seen;
}

/* Query number `task` of all heads and sequences, and the keys that it sees. */
typedef struct ampi_cuda_query { size_t b, h, g, i; ampi_interval seen; } ampi_cuda_query;
AMPI_D ampi_cuda_query ampi_d_query_of(const ampi_attention& a, size_t task) {
    const size_t i = task % a.s.queries, head = task / a.s.queries, h = head % a.s.heads;
    const size_t b = head / a.s.heads;
    return { b, h, h / a.group, i, ampi_d_sees<0>(a.s, b, i) };
}

/* The product of two rows. */
AMPI_D float ampi_d_row_dot(amp_ref x, size_t i, amp_ref y, size_t j, size_t n) {
    float sum = 0.0f;
    for (size_t c = 0; c < n; c++)
        sum = ampi_fma(1, ampi_d_load(x, i + c), ampi_d_load(y, j + c), sum);
    return sum;
}

/* v as an element of type t. */
AMPI_D float ampi_d_rounded(float v, amp_dtype t) {
    if (t == AMP_F16) return ampi_d_widen_half(ampi_d_round_half(v));
    return t == AMP_BF16 ? ampi_float(ampi_bf16_widen(ampi_bf16_bits(ampi_bits(v)))) : v;
}

/* sum * keep and, in the thread's column, the rows of x from element `at` on, each times its
   weight. They are ld elements apart. */
AMPI_D float ampi_d_weighted(float sum, float keep, const float* weights, size_t rows, amp_ref x,
        size_t at, size_t ld, size_t n) {
    float added = 0.0f;
    for (size_t r = 0; threadIdx.x < n && r < rows; r++)
        added = ampi_fma(1, weights[r], ampi_d_load(x, at + r * ld + threadIdx.x), added);
    return ampi_fma(1, sum, keep, added);
}

/* The thread's sum becomes an element of y, whose row begins at `at`, times `factor`. */
AMPI_D void ampi_d_column_out(float sum, float factor, amp_ref y, size_t at, size_t n, int add) {
    if (threadIdx.x < n) ampi_d_store_one(y, at + threadIdx.x, sum * factor, add);
}

/* y and lse of each query, with the maximum and the sum of its keys so far. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_attention(ampi_attention a) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    float* weights = (float*)(shared + AMPI_CUDA_ATTENTION_SUMS);
    const amp_attention_shape& s = a.s;
    for (size_t task = blockIdx.x; task < s.batch * s.heads * s.queries; task += gridDim.x) {
        const ampi_cuda_query t = ampi_d_query_of(a, task);
        const size_t q = ampi_d_query(a, s.ldq, t.b, t.i, t.h);
        float max = -AMPI_FLT_MAX, sum = 0.0f;
        float column = 0.0f;
        for (size_t j = t.seen.from; j < t.seen.to; j += AMPI_CUDA_BLOCK) {
            const size_t keys = ampi_min_size(AMPI_CUDA_BLOCK, t.seen.to - j);
            float score = ampi_float(0xff800000u);
            if (threadIdx.x < keys)
                score = s.scale * ampi_d_row_dot(a.q, q, a.k,
                    ampi_d_key(a, s.ldk, t.b, j + threadIdx.x, t.g), s.head_size);

            /* a NaN is passed over here, and comes back through exp */
            const float old = max;
            max = ampi_d_larger(max, ampi_d_group_max<AMPI_CUDA_BLOCK>(score == score ? score : old,
                shared));
            const float e = threadIdx.x < keys ? ampi_exp(1, score - max) : 0.0f;
            const float keep = ampi_exp(1, old - max);
            double total[1] = { (double)e };
            ampi_d_group_sum<AMPI_CUDA_BLOCK>(total, shared);
            sum = ampi_fma(1, sum, keep, (float)total[0]);
            weights[threadIdx.x] = ampi_d_rounded(e, a.weight);
            __syncthreads();
            column = ampi_d_weighted(column, keep, weights, keys, a.v,
                ampi_d_key(a, s.ldv, t.b, j, t.g), s.ldv, s.head_size);
            __syncthreads();
        }
        const int none = t.seen.from == t.seen.to;
        ampi_d_column_out(column, none ? 0.0f : 1.0f / sum, a.y,
            ampi_d_query(a, s.ldy, t.b, t.i, t.h), s.head_size, 0);
        if (threadIdx.x == 0 && a.lse)
            a.lse[task] = none ? ampi_float(0xff800000u) : max + ampi_log(1, sum);
    }
}

/* What a score's weight and slope are, see impl-attention of amp.h: of query i and key j. */
AMPI_D float ampi_d_attention_slope(const ampi_attention& a, size_t b, size_t h, size_t i, size_t j,
        float dot_y, float* weight) {
    const amp_attention_shape& s = a.s;
    const size_t g = h / a.group;
    const float score = s.scale * ampi_d_row_dot(a.q, ampi_d_query(a, s.ldq, b, i, h), a.k,
        ampi_d_key(a, s.ldk, b, j, g), s.head_size);
    const float slope = ampi_d_row_dot(a.dy, ampi_d_query(a, s.ldy, b, i, h), a.v,
        ampi_d_key(a, s.ldv, b, j, g), s.head_size);
    *weight = ampi_exp(1, score - a.lse[(b * s.heads + h) * s.queries + i]);
    return *weight * (slope - dot_y);
}

/* dq of each query. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_attention_dq(ampi_attention a) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    float* slopes = (float*)(shared + AMPI_CUDA_ATTENTION_SUMS);
    const amp_attention_shape& s = a.s;
    for (size_t task = blockIdx.x; task < s.batch * s.heads * s.queries; task += gridDim.x) {
        const ampi_cuda_query t = ampi_d_query_of(a, task);
        const size_t y = ampi_d_query(a, s.ldy, t.b, t.i, t.h);
        const float dot_y = ampi_d_row_dot(a.dy, y, a.y, y, s.head_size);
        float column = 0.0f;
        for (size_t j = t.seen.from; j < t.seen.to; j += AMPI_CUDA_BLOCK) {
            const size_t keys = ampi_min_size(AMPI_CUDA_BLOCK, t.seen.to - j);
            float weight;
            if (threadIdx.x < keys)
                slopes[threadIdx.x] = ampi_d_rounded(ampi_d_attention_slope(a, t.b, t.h,
                    t.i, j + threadIdx.x, dot_y, &weight), a.slope);
            __syncthreads();
            column = ampi_d_weighted(column, 1.0f, slopes, keys, a.k,
                ampi_d_key(a, s.ldk, t.b, j, t.g), s.ldk, s.head_size);
            __syncthreads();
        }
        ampi_d_column_out(column, s.scale, a.dq, ampi_d_query(a, s.ldq, t.b, t.i, t.h), s.head_size,
            a.accumulate & AMP_ACCUMULATE_INPUT);
    }
}

/* dk and dv of each key: over the heads of its group, then over the queries that see it. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_attention_dkv(ampi_attention a) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    float *slopes = (float*)(shared + AMPI_CUDA_ATTENTION_SUMS), *weights = slopes
        + AMPI_CUDA_BLOCK;
    const amp_attention_shape& s = a.s;
    const int add = a.accumulate & AMP_ACCUMULATE_INPUT;
    for (size_t task = blockIdx.x; task < s.batch * s.kv_heads * s.keys; task += gridDim.x) {
        const size_t j = task % s.keys, g = task / s.keys % s.kv_heads;
        const size_t b = task / s.keys / s.kv_heads;
        const ampi_interval seen = ampi_d_sees<1>(s, b, j);
        float dk = 0.0f, dv = 0.0f;
        for (size_t h = g * a.group; h < (g + 1) * a.group; h++)
            for (size_t i = seen.from; i < seen.to; i += AMPI_CUDA_BLOCK) {
                const size_t rows = ampi_min_size(AMPI_CUDA_BLOCK, seen.to - i);
                if (threadIdx.x < rows) {
                    const size_t y = ampi_d_query(a, s.ldy, b, i + threadIdx.x, h);
                    float weight;
                    slopes[threadIdx.x] = ampi_d_rounded(ampi_d_attention_slope(a, b, h,
                        i + threadIdx.x, j, ampi_d_row_dot(a.dy, y, a.y, y, s.head_size), &weight),
                        a.slope);
                    weights[threadIdx.x] = ampi_d_rounded(weight, a.weight);
                }
                __syncthreads();
                dk = ampi_d_weighted(dk, 1.0f, slopes, rows, a.q, ampi_d_query(a, s.ldq, b, i, h),
                    s.ldq, s.head_size);
                dv = ampi_d_weighted(dv, 1.0f, weights, rows, a.dy, ampi_d_query(a, s.ldy, b, i, h),
                    s.ldy, s.head_size);
                __syncthreads();
            }
        ampi_d_column_out(dk, s.scale, a.dk, ampi_d_key(a, s.ldk, b, j, g), s.head_size, add);
        ampi_d_column_out(dv, 1.0f, a.dv, ampi_d_key(a, s.ldv, b, j, g), s.head_size, add);
    }
}

/* --- attention by Tensor Cores --- */

/* Heads of D = 64 or 128 elements of 16 bits; columns behind a shorter head are zeros. A block of 4
   warps takes 64 * M rows, of q, or of k and v: a warp 16 * M. What these see goes by in tiles of
   8 * N rows, two at a time: k and v, or q and dy. A circular buffer of two stages holds the pair
   that is multiplied and the one under way. A row of a tile is D halves, chunk c of row r at chunk
   c ^ (r % 8), see ampi_d_chunk_at. Scores leave mma as its next operand wants them, in pairs of a
   row: nothing but rows of q, k, v and dy goes through shared memory.
   Scores are taken times log2 e, so that weights are powers of two. */
#define AMPI_LOG2_E 1.44269504f
#define AMPI_LN_2 0.693147181f
enum { AMPI_CUDA_FUSED_WARPS = 4, AMPI_CUDA_FUSED_THREADS = 32 * AMPI_CUDA_FUSED_WARPS,
       AMPI_CUDA_FUSED_MAX_HEAD = 128,
       AMPI_CUDA_FUSED_STAGES = 2 * (16384 + 512) };  /* bytes: pairs of tiles, their numbers */

/* Rows of one head of a sequence. */
typedef struct ampi_cuda_rows { const uint16_t* data; size_t ld, rows, columns; } ampi_cuda_rows;
AMPI_D ampi_cuda_rows ampi_d_query_rows(const ampi_attention& a, amp_ref x, size_t ld, size_t b,
        size_t h) {
    return { (const uint16_t*)x.data + ampi_d_query(a, ld, b, 0, h), ld, a.s.queries,
        a.s.head_size };
}

/* Of k or v: as many as the sequence has. */
AMPI_D ampi_cuda_rows ampi_d_key_rows(const ampi_attention& a, amp_ref x, size_t ld, size_t b,
        size_t g) {
    const size_t keys = a.s.lengths ? ampi_min_size((size_t)a.s.lengths[b], a.s.keys) : a.s.keys;
    return { (const uint16_t*)x.data + ampi_d_key(a, ld, b, 0, g), ld, keys, a.s.head_size };
}

/* What goes by: two operands, and the lse and dot of each query, see ampi_k_attention_numbers. */
typedef struct ampi_cuda_pair {
    ampi_cuda_rows x, y;
    const float2* numbers;
    uint16_t* stages;
} ampi_cuda_pair;

/* Sends rows [first, first + ROWS) on their way to a tile. */
template <int D, int ROWS>
AMPI_D void ampi_d_fetch_rows(uint16_t* tile, const ampi_cuda_rows& x, size_t first) {
    AMPI_D_UNROLL
    for (uint32_t u = 0; u < ROWS * D / 8 / AMPI_CUDA_FUSED_THREADS; u++) {
        const uint32_t at = u * AMPI_CUDA_FUSED_THREADS + threadIdx.x;
        const uint32_t row = at / (D / 8), c = at % (D / 8);
        ampi_d_chunk(NULL, tile + ampi_d_chunk_at(0, D, row, c),
            x.data + (first + row) * x.ld + c * 8, first + row < x.rows && c * 8 < x.columns);
    }
}

/* Sends rows from j on of both operands to a stage. */
template <int D, int N>
AMPI_D void ampi_d_fetch_pair(const ampi_cuda_pair& p, uint16_t* stage, size_t j) {
    ampi_d_fetch_rows<D, 8 * N>(stage, p.x, j);
    ampi_d_fetch_rows<D, 8 * N>(stage + 8 * N * D, p.y, j);
    if (p.numbers && threadIdx.x < 4 * N)
        ampi_ptx_cp_async16(stage + 16 * N * D + 8 * threadIdx.x, p.numbers + j + 2 * threadIdx.x,
            16);
}

/* What any of the rows [i, i + n) sees. */
template <int BY_KEY>
AMPI_D ampi_interval ampi_d_seen_by(const amp_attention_shape& s, size_t b, size_t i, size_t n) {
    const size_t rows = !BY_KEY ? s.queries : s.lengths ? (size_t)s.lengths[b] : s.keys;
    ampi_interval seen = { 0, 0 };
    if (i >= rows) return seen;
    seen = ampi_d_sees<BY_KEY>(s, b, ampi_min_size(i + n, rows) - 1);
    seen.from = ampi_min_size(ampi_d_sees<BY_KEY>(s, b, i).from, seen.to);
    return seen;
}

/* use(stage, j, whole) for each pair of tiles of which the block's rows, from `first` on, see
   something. The warps call it whose M * 16 rows do; whole: all of these see all of it. */
template <int D, int M, int N, int BY_KEY, class F>
AMPI_D void ampi_d_each_pair(const amp_attention_shape& s, size_t b, size_t first,
        const ampi_cuda_pair& p, const F& use) {
    const size_t i = first + threadIdx.x / 32 * 16 * M;
    const ampi_interval all = ampi_d_seen_by<BY_KEY>(s, b, first, 64 * M);
    const ampi_interval seen = ampi_d_seen_by<BY_KEY>(s, b, i, 16 * M);
    const ampi_interval last = ampi_d_sees<BY_KEY>(s, b, i + 16 * M - 1);
    const size_t to = ampi_min_size(last.to, ampi_d_sees<BY_KEY>(s, b, i).to);
    uint16_t *stage = p.stages, *next = stage + 16 * N * D + 32 * N;
    size_t j = all.from / (8 * N) * (8 * N);
    if (j < all.to) ampi_d_fetch_pair<D, N>(p, stage, j);
    ampi_ptx_cp_async_commit();
    for (; j < all.to; j += 8 * N) {
        ampi_ptx_cp_async_wait<0>();
        __syncthreads();      /* the pair has come for all, the other stage has been read */
        if (j + 8 * N < all.to) ampi_d_fetch_pair<D, N>(p, next, j + 8 * N);
        ampi_ptx_cp_async_commit();
        if (j < seen.to && j + 8 * N > seen.from)
            use(stage, j, last.from <= j && to >= j + 8 * N);
        uint16_t* other = stage;
        stage = next;
        next = other;
    }
    ampi_ptx_cp_async_wait<0>();
    __syncthreads();
}

/* sum = factor * own * tile^T: a warp's 16 * M rows by 8 * N rows of a tile. */
template <int D, int BF16, int M, int N>
AMPI_D void ampi_d_rows_product(float (&sum)[M][N][4], const uint16_t* own, const uint16_t* tile,
        float factor) {
    const uint32_t own_at = ampi_d_lane_at(0, D, 0, 1), at = ampi_d_lane_at(0, D, 0, 0);
    for (uint32_t q = 0; q < 4 * M * N; q++) sum[q / 4 / N][q / 4 % N][q % 4] = 0.0f;
    for (uint32_t h = 0; h < D / 16; h++) {
        uint32_t left[M][4], r[4];
        for (uint32_t m = 0; m < M; m++)
            ampi_ptx_ldmatrix_x4(left[m], own + (own_at ^ 16 * h) + m * 16 * D);
        for (uint32_t n = 0; n < N; n += 2) {
            ampi_ptx_ldmatrix_x4(r, tile + (at ^ 16 * h) + n * 8 * D);
            const uint32_t even[2] = { r[0], r[1] }, odd[2] = { r[2], r[3] };
            for (uint32_t m = 0; m < M; m++) {
                ampi_d_mma<BF16>(sum[m][n], left[m], even);
                ampi_d_mma<BF16>(sum[m][n + 1], left[m], odd);
            }
        }
    }
    for (uint32_t q = 0; q < 4 * M * N; q++) sum[q / 4 / N][q / 4 % N][q % 4] *= factor;
}

/* sum += weights * tile, the weights rounded. */
template <int D, int BF16, int M, int N>
AMPI_D void ampi_d_add_rows(float (&sum)[M][D / 8][4], const float (&weights)[M][N][4],
        const uint16_t* tile) {
    const uint32_t at = ampi_d_lane_at(0, D, 0, 1);
    for (uint32_t h = 0; h < N / 2; h++) {
        uint32_t left[M][4], r[4];
        for (uint32_t q = 0; q < 4 * M; q++) {
            const float* w = weights[q / 4][2 * h + q % 4 / 2] + q % 2 * 2;
            left[q / 4][q % 4] = BF16 ? ampi_ptx_bf16x2_from_f32(w[0], w[1])
                : ampi_ptx_f16x2_from_f32(w[0], w[1]);
        }
        for (uint32_t i = 0; i < D / 16; i++) {
            ampi_d_fragment<D, 0>(r, tile, at, i, h);
            const uint32_t even[2] = { r[0], r[1] }, odd[2] = { r[2], r[3] };
            for (uint32_t m = 0; m < M; m++) {
                ampi_d_mma<BF16>(sum[m][2 * i], left[m], even);
                ampi_d_mma<BF16>(sum[m][2 * i + 1], left[m], odd);
            }
        }
    }
}

/* The lane's row number q of a warp's 16 * M: those of q / 2 times 16, and 8 further. */
AMPI_D uint32_t ampi_d_lane_row(uint32_t q) { return q * 8 + threadIdx.x % 32 / 4; }

/* Sets what rows from i on do not see, of columns from j on, to `value`. */
template <int BY_KEY, int M, int N>
AMPI_D void ampi_d_mask(float (&tile)[M][N][4], const amp_attention_shape& s, size_t b, size_t i,
        size_t j, float value) {
    for (uint32_t q = 0; q < 2 * M; q++) {
        const ampi_interval seen = ampi_overlap(ampi_d_sees<BY_KEY>(s, b, i + ampi_d_lane_row(q)),
            j, j + 8 * N);
        const uint32_t from = (uint32_t)(seen.from - j), to = (uint32_t)(seen.to - j);
        for (uint32_t c = 0; c < 2 * N; c++) {
            const uint32_t column = c / 2 * 8 + threadIdx.x % 4 * 2 + c % 2;
            if (column < from || column >= to) tile[q / 2][c / 2][q % 2 * 2 + c % 2] = value;
        }
    }
}

/* A warp's rows of sums times `factor`, one a row, go to y from its row i on; what sees nothing is
   0. They go through the warp's slice of shared memory, so that a lane has eights of a row. */
template <int D, int M, int BY_KEY>
AMPI_D void ampi_d_rows_out(const float (&sum)[M][D / 8][4], const float (&factor)[2 * M],
        const amp_attention_shape& s, size_t b, amp_ref y, size_t at, size_t ld, size_t i,
        int add) {
    AMPI_SHARED(float, shared);
    float* slice = shared + threadIdx.x / 32 * 16 * M * (D + 8);
    const size_t rows = BY_KEY ? s.keys : s.queries;
    if (!y.data) return;
    for (uint32_t q = 0; q < 2 * M; q++) {
        const ampi_interval seen = ampi_d_sees<BY_KEY>(s, b, i + ampi_d_lane_row(q));
        float* to = slice + ampi_d_lane_row(q) * (D + 8) + threadIdx.x % 4 * 2;
        for (uint32_t c = 0; c < D / 4; c++)
            to[c / 2 * 8 + c % 2] = seen.from == seen.to ? 0.0f
                : sum[q / 2][c / 2][q % 2 * 2 + c % 2] * factor[q];
    }
    __syncwarp();
    AMPI_ROLLED
    for (uint32_t u = threadIdx.x % 32; u < 2 * M * D; u += 32) {
        const uint32_t row = u / (D / 8), column = u % (D / 8) * 8;
        const size_t to = at + (i + row) * ld;
        float v[8];
        for (int k = 0; k < 8; k++) v[k] = slice[row * (D + 8) + column + (uint32_t)k];
        if (i + row < rows && column < s.head_size)
            ampi_d_give8(y, to + column, to + s.head_size, v, add);
    }
    __syncwarp();
}

/* Scores become weights; what the lane's columns add to the sum of its rows, and what that and y
   were before, times `keep`. */
template <int M, int N, int C>
AMPI_D void ampi_d_softmax_tile(float (&tile)[M][N][4], float (&max)[2 * M], float (&sum)[2 * M],
        float (&y)[M][C][4]) {
    for (uint32_t q = 0; q < 2 * M; q++) {
        const uint32_t m = q / 2, e = q % 2 * 2;
        float largest = max[q], added = 0.0f;
        for (uint32_t c = 0; c < 2 * N; c++)      /* a NaN is passed over, and comes back below */
            largest = fmaxf(largest, tile[m][c / 2][e + c % 2]);
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float keep = ampi_ptx_exp2(max[q] - largest);
        max[q] = largest;
        for (uint32_t c = 0; c < 2 * N; c++) {
            float& w = tile[m][c / 2][e + c % 2];
            w = ampi_ptx_exp2(w - largest);
            added += w;
        }
        sum[q] = ampi_fma(1, sum[q], keep, added);
        for (uint32_t c = 0; c < 2 * C; c++) y[m][c / 2][e + c % 2] *= keep;
    }
}

/* y and lse of 64 * M queries; those that see most come first. */
template <int D, int BF16>
static __global__ void __launch_bounds__(AMPI_CUDA_FUSED_THREADS)
        ampi_k_attention_fused(ampi_attention a, const float2*) {
    ampi_ptx_grid_wait();
#if __CUDA_ARCH__ >= 800
    AMPI_SHARED(uint16_t, shared);
    enum { M = 128 / D, N = 512 / D };
    const amp_attention_shape& s = a.s;
    const size_t heads = s.batch * s.heads, head = blockIdx.x % heads;
    const size_t b = head / s.heads, h = head % s.heads, g = h / a.group;
    const size_t first = (gridDim.x / heads - 1 - blockIdx.x / heads) * (64 * M);
    const uint32_t warp = threadIdx.x / 32 * 16 * M;
    const ampi_cuda_pair pair = { ampi_d_key_rows(a, a.k, s.ldk, b, g),
        ampi_d_key_rows(a, a.v, s.ldv, b, g), NULL, shared + 64 * M * D };
    float y[M][D / 8][4] = {}, max[2 * M], sum[2 * M] = {};
    for (uint32_t q = 0; q < 2 * M; q++) max[q] = -AMPI_FLT_MAX;
    ampi_d_fetch_rows<D, 64 * M>(shared, ampi_d_query_rows(a, a.q, s.ldq, b, h), first);
    ampi_d_each_pair<D, M, N, 0>(s, b, first, pair, [&](const uint16_t* stage, size_t j,
            bool whole) {
        float tile[M][N][4];
        ampi_d_rows_product<D, BF16>(tile, shared + warp * D, stage, s.scale * AMPI_LOG2_E);
        if (!whole) ampi_d_mask<0>(tile, s, b, first + warp, j, ampi_float(0xff800000u));
        ampi_d_softmax_tile(tile, max, sum, y);
        ampi_d_add_rows<D, BF16>(y, tile, stage + 8 * N * D);
    });

    for (uint32_t q = 0; q < 2 * M; q++) {
        const size_t i = first + warp + ampi_d_lane_row(q);
        const ampi_interval seen = ampi_d_sees<0>(s, b, i);
        sum[q] += __shfl_xor_sync(0xffffffffu, sum[q], 1);
        sum[q] += __shfl_xor_sync(0xffffffffu, sum[q], 2);
        if (threadIdx.x % 4 == 0 && a.lse && i < s.queries)
            a.lse[head * s.queries + i] = seen.from == seen.to ? ampi_float(0xff800000u)
                : ampi_fma(1, max[q], AMPI_LN_2, ampi_log(1, sum[q]));
        sum[q] = 1.0f / sum[q];
    }
    ampi_d_rows_out<D, M, 0>(y, sum, s, b, a.y, ampi_d_query(a, s.ldy, b, 0, h), s.ldy,
        first + warp, 0);
#else
    (void)a;
#endif
}

/* Queries of a head, with room up to whole tiles. */
AMPI_HD AMPI_FN size_t ampi_cuda_padded_queries(const amp_attention_shape* s) {
    return (s->queries + 63) / 64 * 64;
}

/* Of each query of all heads: its lse times log2 e, and the product of its rows of y and dy; zeros
   behind the last. Eight lanes take a query. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
        ampi_k_attention_numbers(ampi_attention a, float2* numbers) {
    ampi_ptx_grid_wait();
    const amp_attention_shape& s = a.s;
    const size_t padded = ampi_cuda_padded_queries(&s), all = s.batch * s.heads * padded;
    size_t query = (size_t)blockIdx.x * (AMPI_CUDA_BLOCK / 8) + threadIdx.x / 8;
    for (; query < all; query += (size_t)gridDim.x * (AMPI_CUDA_BLOCK / 8)) {
        const size_t head = query / padded, i = query % padded;
        const size_t at = ampi_d_query(a, s.ldy, head / s.heads, i, head % s.heads);
        const bool there = i < s.queries;
        float lse = there ? a.lse[head * s.queries + i] : 0.0f, dot = 0.0f, y[8], dy[8];
        for (size_t c = threadIdx.x % 8 * 8; there && c < s.head_size; c += 64) {
            ampi_d_load8(y, a.y, at + c, at + s.head_size);
            ampi_d_load8(dy, a.dy, at + c, at + s.head_size);
            dot += ampi_d_dot8(y, dy);
        }
        for (int step = 4; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
        if (ampi_bits(lse) == 0xff800000u) lse = 0.0f;      /* one that sees nothing */
        if (threadIdx.x % 8 == 0) numbers[query] = make_float2(lse * AMPI_LOG2_E, dot);
    }
}

/* dq of 64 queries; those that see most come first. */
template <int D, int BF16>
static __global__ void __launch_bounds__(AMPI_CUDA_FUSED_THREADS)
        ampi_k_attention_fused_dq(ampi_attention a, const float2* numbers) {
    ampi_ptx_grid_wait();
#if __CUDA_ARCH__ >= 800
    AMPI_SHARED(uint16_t, shared);
    enum { N = 512 / D };
    const amp_attention_shape& s = a.s;
    const size_t heads = s.batch * s.heads, head = blockIdx.x % heads;
    const size_t b = head / s.heads, h = head % s.heads, g = h / a.group;
    const size_t first = (gridDim.x / heads - 1 - blockIdx.x / heads) * 64;
    const uint32_t warp = threadIdx.x / 32 * 16;
    const ampi_cuda_pair pair = { ampi_d_key_rows(a, a.k, s.ldk, b, g),
        ampi_d_key_rows(a, a.v, s.ldv, b, g), NULL, shared + 128 * D };
    const float factor[2] = { s.scale, s.scale };
    float dq[1][D / 8][4] = {};
    float2 own[2];
    for (uint32_t q = 0; q < 2; q++)
        own[q] = numbers[head * ampi_cuda_padded_queries(&s) + first + warp + ampi_d_lane_row(q)];
    ampi_d_fetch_rows<D, 64>(shared, ampi_d_query_rows(a, a.q, s.ldq, b, h), first);
    ampi_d_fetch_rows<D, 64>(shared + 64 * D, ampi_d_query_rows(a, a.dy, s.ldy, b, h), first);
    ampi_d_each_pair<D, 1, N, 0>(s, b, first, pair, [&](const uint16_t* stage, size_t j,
            bool whole) {
        float tile[1][N][4], slopes[1][N][4];
        ampi_d_rows_product<D, BF16>(tile, shared + warp * D, stage, s.scale * AMPI_LOG2_E);
        ampi_d_rows_product<D, BF16>(slopes, shared + (64 + warp) * D, stage + 8 * N * D, 1.0f);
        for (uint32_t c = 0; c < 4 * N; c++) {
            float& slope = slopes[0][c / 4][c % 4];
            slope = ampi_ptx_exp2(tile[0][c / 4][c % 4] - own[c % 4 / 2].x)
                * (slope - own[c % 4 / 2].y);
        }
        if (!whole) ampi_d_mask<0>(slopes, s, b, first + warp, j, 0.0f);
        ampi_d_add_rows<D, BF16>(dq, slopes, stage);
    });
    ampi_d_rows_out<D, 1, 0>(dq, factor, s, b, a.dq, ampi_d_query(a, s.ldq, b, 0, h), s.ldq,
        first + warp, a.accumulate & AMP_ACCUMULATE_INPUT);
#else
    (void)a;
    (void)numbers;
#endif
}

/* dk and dv of 64 keys: over the heads of their group, then over the queries that see them. */
template <int D, int BF16>
static __global__ void __launch_bounds__(AMPI_CUDA_FUSED_THREADS)
        ampi_k_attention_fused_dkv(ampi_attention a, const float2* numbers) {
    ampi_ptx_grid_wait();
#if __CUDA_ARCH__ >= 800
    AMPI_SHARED(uint16_t, shared);
    enum { N = 512 / D };
    const amp_attention_shape& s = a.s;
    const size_t heads = s.batch * s.kv_heads, b = blockIdx.x % heads / s.kv_heads;
    const size_t g = blockIdx.x % s.kv_heads, first = blockIdx.x / heads * 64;
    const uint32_t warp = threadIdx.x / 32 * 16;
    const float factor[2] = { s.scale, s.scale }, one[2] = { 1.0f, 1.0f };
    const int add = a.accumulate & AMP_ACCUMULATE_INPUT;
    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    ampi_d_fetch_rows<D, 64>(shared, ampi_d_key_rows(a, a.k, s.ldk, b, g), first);
    ampi_d_fetch_rows<D, 64>(shared + 64 * D, ampi_d_key_rows(a, a.v, s.ldv, b, g), first);
    for (size_t h = g * a.group; h < (g + 1) * a.group; h++) {
        const ampi_cuda_pair pair = { ampi_d_query_rows(a, a.q, s.ldq, b, h),
            ampi_d_query_rows(a, a.dy, s.ldy, b, h),
            numbers + (b * s.heads + h) * ampi_cuda_padded_queries(&s), shared + 128 * D };
        ampi_d_each_pair<D, 1, N, 1>(s, b, first, pair, [&](const uint16_t* stage, size_t j,
                bool whole) {
            float tile[1][N][4], slopes[1][N][4];
            const float4* of_two = (const float4*)(stage + 16 * N * D) + threadIdx.x % 4;
            ampi_d_rows_product<D, BF16>(tile, shared + warp * D, stage, s.scale * AMPI_LOG2_E);
            ampi_d_rows_product<D, BF16>(slopes, shared + (64 + warp) * D, stage + 8 * N * D,
                1.0f);
            for (uint32_t c = 0; c < 4 * N; c++) {
                const float4 two = of_two[c / 4 * 4];      /* lse and dot of its two queries */
                float& weight = tile[0][c / 4][c % 4];
                weight = ampi_ptx_exp2(weight - (c % 2 ? two.z : two.x));
                slopes[0][c / 4][c % 4] = weight
                    * (slopes[0][c / 4][c % 4] - (c % 2 ? two.w : two.y));
            }
            if (!whole) ampi_d_mask<1>(tile, s, b, first + warp, j, 0.0f);
            if (!whole) ampi_d_mask<1>(slopes, s, b, first + warp, j, 0.0f);
            ampi_d_add_rows<D, BF16>(dv, tile, stage + 8 * N * D);
            ampi_d_add_rows<D, BF16>(dk, slopes, stage);
        });
    }
    ampi_d_rows_out<D, 1, 1>(dk, factor, s, b, a.dk, ampi_d_key(a, s.ldk, b, 0, g), s.ldk,
        first + warp, add);
    ampi_d_rows_out<D, 1, 1>(dv, one, s, b, a.dv, ampi_d_key(a, s.ldv, b, 0, g), s.ldv,
        first + warp, add);
#else
    (void)a;
    (void)numbers;
#endif
}

/* Can the kernels above take a call? Operands are of one type of 16 bits, and lie in chunks. */
AMPI_FN int ampi_cuda_attention_fuses(const ampi_attention* a) {
    const amp_attention_shape* s = &a->s;
    const struct { amp_ref x; size_t ld; } list[] = { { a->q, s->ldq }, { a->k, s->ldk },
        { a->v, s->ldv }, { a->dy.data ? a->dy : a->q, s->ldy } };
    const size_t heads = ampi_area(s->batch, s->heads);
    for (size_t i = 0; i < AMPI_LENGTH(list); i++)
        if (list[i].x.dtype != a->q.dtype || list[i].ld % 8 || (uintptr_t)list[i].x.data % 16)
            return 0;
    return a->q.dtype != AMP_F32 && s->head_size % 8 == 0
        && s->head_size <= AMPI_CUDA_FUSED_MAX_HEAD && ampi_abs(s->scale) < 1e38f
        && ampi_area(heads, ampi_max_size(s->queries, s->keys)) < (size_t)1 << 31
        && ampi_cuda_attribute(cudaDevAttrComputeCapabilityMajor) >= 8;
}

typedef void (*ampi_cuda_fused)(ampi_attention, const float2*);
/* A block for `rows` of `all` rows of a head. kernels: of D = 64, of D = 128; F16, bfloat16. */
AMPI_FN amp_result ampi_cuda_launch_fused(const amp_exec* exec, const char* op,
        const ampi_cuda_fused (&kernels)[4], const ampi_attention* a, const float2* numbers,
        size_t heads, size_t all, size_t rows) {
    const int large = a->s.head_size > 64;
    const ampi_cuda_fused kernel = kernels[2 * large + (a->q.dtype == AMP_BF16)];
    const size_t shared = AMPI_CUDA_FUSED_STAGES + (large ? 32768 : 16384);
    AMPI_TRY(ampi_cuda_check(exec, op, cudaFuncSetAttribute(kernel,
        cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared)));
    return ampi_cuda_launch(exec, op, kernel,
        (unsigned)(a->s.batch * heads * ampi_cuda_parts(all, rows)), AMPI_CUDA_FUSED_THREADS,
        shared, *a, numbers);
}

#define AMPI_CUDA_FUSED_KERNELS(k) { k<64, 0>, k<64, 1>, k<128, 0>, k<128, 1> }
/* All gradients, with two numbers for each query in `numbers`. */
AMPI_FN amp_result ampi_cuda_attention_fused_backward(const amp_exec* exec, const char* op,
        const ampi_attention* a, float2* numbers) {
    static const ampi_cuda_fused dkv[4] = AMPI_CUDA_FUSED_KERNELS(ampi_k_attention_fused_dkv);
    static const ampi_cuda_fused dq[4] = AMPI_CUDA_FUSED_KERNELS(ampi_k_attention_fused_dq);
    const size_t all = a->s.batch * a->s.heads * ampi_cuda_padded_queries(&a->s);
    AMPI_TRY(ampi_cuda_launch(exec, op, ampi_k_attention_numbers,
        ampi_cuda_grid(all, AMPI_CUDA_BLOCK / 8), AMPI_CUDA_BLOCK, 0, *a, numbers));
    if (a->dk.data || a->dv.data)
        AMPI_TRY(ampi_cuda_launch_fused(exec, op, dkv, a, numbers, a->s.kv_heads, a->s.keys, 64));
    if (!a->dq.data) return AMP_OK;
    return ampi_cuda_launch_fused(exec, op, dq, a, numbers, a->s.heads, a->s.queries, 64);
}

/* Checks a call whose operands are in *a, and gives them the types that kernels take. use: of
   gradients, 0 in forward. */
AMPI_FN amp_result ampi_cuda_attention_open(ampi_attention* a, const char* op, int use,
        const amp_exec* exec) {
    ampi_argument list[AMPI_ATTENTION_OPERANDS];
    const size_t count = ampi_attention_operands(a, use, list);
    AMPI_REFUSE_OP(a->s.head_size > AMPI_CUDA_MAX_HEAD, AMP_ERR_UNSUPPORTED,
        "%s: heads of %llu elements; at most %d can be", op, (ampi_ull)a->s.head_size,
        (int)AMPI_CUDA_MAX_HEAD);
    AMPI_TRY(ampi_cuda_check_operands(exec, op, a->s.batch, list, count));
    AMPI_TRY(ampi_cuda_check_rounding(exec, op));
    for (amp_ref* r : { &a->q, &a->k, &a->v, &a->y, &a->dy, &a->dq, &a->dk, &a->dv })
        *r = ampi_cuda_ref(*r);
    a->weight = a->v.dtype;
    a->slope = a->q.dtype;
    return AMP_OK;
}

/* Two numbers for each query, without which gradients are formed by the plain kernels. */
AMPI_FN size_t ampi_cuda_attention_workspace(const amp_attention_shape* s) {
    return ampi_area(ampi_area(s->batch, s->heads), ampi_cuda_padded_queries(s)) * sizeof(float2);
}

/* The table's attention_forward. */
AMPI_CUDA(attention_forward, const amp_attention_shape* shape, amp_ref q, amp_ref k, amp_ref v,
        amp_ref y, float* lse) {
    const char* op = "amp_cuda_attention_forward";
    ampi_attention a;
    AMPI_TRY(ampi_attention_check(&a, op, shape, exec));
    a.q = q; a.k = k; a.v = v; a.y = y;
    a.lse = lse;
    AMPI_TRY(ampi_cuda_attention_open(&a, op, 0, exec));
    if (a.s.batch == 0) return AMP_OK;
    if (ampi_cuda_attention_fuses(&a)) {
        static const ampi_cuda_fused fused[4] = AMPI_CUDA_FUSED_KERNELS(ampi_k_attention_fused);
        return ampi_cuda_launch_fused(exec, op, fused, &a, NULL, a.s.heads, a.s.queries,
            a.s.head_size > 64 ? 64 : 128);
    }
    return ampi_cuda_launch(exec, op, ampi_k_attention,
        ampi_cuda_grid(a.s.batch * a.s.heads * a.s.queries, 1), AMPI_CUDA_BLOCK,
        AMPI_CUDA_ATTENTION_SHARED, a);
}

/* The table's attention_backward. */
AMPI_CUDA(attention_backward, const amp_attention_shape* shape, amp_ref dy, amp_ref q, amp_ref k,
        amp_ref v, amp_ref y, const float* lse, amp_ref dq, amp_ref dk, amp_ref dv,
        int accumulate) {
    const char* op = "amp_cuda_attention_backward";
    ampi_attention a;
    AMPI_TRY(ampi_attention_check(&a, op, shape, exec));
    a.q = q; a.k = k; a.v = v; a.y = y; a.dy = dy; a.dq = dq; a.dk = dk; a.dv = dv;
    a.lse = (float*)ampi_mutable(lse);
    a.accumulate = accumulate;
    AMPI_TRY(ampi_cuda_attention_open(&a, op, AMPI_OUT | AMPI_NULL, exec));
    if (a.s.batch == 0) return AMP_OK;
    float2* numbers = ampi_cuda_attention_fuses(&a)
        ? (float2*)ampi_cuda_scratch(exec, ampi_cuda_attention_workspace(&a.s)) : NULL;
    if (numbers) return ampi_cuda_attention_fused_backward(exec, op, &a, numbers);
    if (dk.data || dv.data)
        AMPI_TRY(ampi_cuda_launch(exec, op, ampi_k_attention_dkv,
            ampi_cuda_grid(a.s.batch * a.s.kv_heads * a.s.keys, 1), AMPI_CUDA_BLOCK,
            AMPI_CUDA_ATTENTION_SHARED, a));
    if (!dq.data) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_attention_dq,
        ampi_cuda_grid(a.s.batch * a.s.heads * a.s.queries, 1), AMPI_CUDA_BLOCK,
        AMPI_CUDA_ATTENTION_SHARED, a);
}

/* --- rope --- */

/* A call of the rotary embedding. */
typedef struct ampi_cuda_rope {
    amp_rope_shape s;
    amp_ref x, y;
    double root;      /* see ampi_rope_root */
    float direction;  /* -1 turns back */
    int add;          /* y is added to */
} ampi_cuda_rope;

/* A thread for each element: that of a pair's first turns the pair; the bits are the CPU's. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_rope(ampi_cuda_rope q) {
    ampi_ptx_grid_wait();
    const size_t width = q.s.width, d = q.s.head_size, all = q.s.batch * q.s.positions * width;
    size_t i = (size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x;
    for (; i < all; i += (size_t)gridDim.x * AMPI_CUDA_BLOCK) {
        const size_t column = i % width, place = column % d;
        if (column >= q.s.heads * d) {
            ampi_d_store_one(q.y, i, ampi_d_load(q.x, i), q.add);
            continue;
        }
        if (q.s.interleaved ? place % 2 : place >= d / 2) continue;

        const size_t pair = q.s.interleaved ? place / 2 : place;
        const size_t second = i + (q.s.interleaved ? 1 : d / 2);
        const float a = ampi_d_load(q.x, i), b = ampi_d_load(q.x, second);
        float c, s;
        ampi_rope_angle(ampi_rope_turn(q.root, (int64_t)pair),
            (uint64_t)(q.s.offset + i / width % q.s.positions), &c, &s);
        s *= q.direction;
        ampi_d_store_one(q.y, i, ampi_fma(1, a, c, -__fmul_rn(b, s)), q.add);
        ampi_d_store_one(q.y, second, ampi_fma(1, b, c, __fmul_rn(a, s)), q.add);
    }
}

/* Turns x into y, whose use is `use`. */
AMPI_FN amp_result ampi_cuda_rope_run(const char* op, const amp_rope_shape* shape,
        const char* const names[2], amp_ref x, amp_ref y, float direction, int use,
        const amp_exec* exec) {
    ampi_cuda_rope q = {};
    AMPI_TRY(ampi_rope_check(&q.s, op, shape, exec));
    const size_t n = ampi_area(ampi_area(q.s.batch, q.s.positions), q.s.width);
    const ampi_argument list[] = { { names[0], x.data, x.dtype, AMPI_SAME, AMPI_FLAT(n) },
        { names[1], y.data, y.dtype, use, AMPI_FLAT(n) } };
    AMPI_CUDA_CHECK(op, n, list);
    if (n == 0 || !y.data) return AMP_OK;
    q.x = ampi_cuda_ref(x);
    q.y = ampi_cuda_ref(y);
    q.root = ampi_rope_root(&q.s);
    q.direction = direction;
    q.add = use & AMPI_ADDS;
    return ampi_cuda_launch(exec, op, ampi_k_rope, ampi_cuda_grid(n, AMPI_CUDA_BLOCK),
        AMPI_CUDA_BLOCK, 0, q);
}

/* The table's rope_forward. */
AMPI_CUDA(rope_forward, const amp_rope_shape* s, amp_ref x, amp_ref y) {
    static const char* const names[] = { "x", "y" };
    return ampi_cuda_rope_run("amp_cuda_rope_forward", s, names, x, y, 1.0f, AMPI_OUT | AMPI_SAME,
        exec);
}

/* The table's rope_backward. */
AMPI_CUDA(rope_backward, const amp_rope_shape* s, amp_ref dy, amp_ref dx, int accumulate) {
    static const char* const names[] = { "dy", "dx" };
    const int use = ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT);
    return ampi_cuda_rope_run("amp_cuda_rope_backward", s, names, dy, dx, -1.0f,
        use & AMPI_ADDS ? use : use | AMPI_SAME, exec);
}

/* >>impl-loss   Losses: softmax cross-entropy by rows; mean squared error and binary cross-entropy
   by elements.
   Words. part: a sum of its own, over terms that a fixed rule chooses; parts are added in ascending
   order. few: classes of which a thread takes a row alone. This room calls impl-rows,
   impl-elementwise and impl-half. */

/* The mean of a loss: its terms are summed in at most 1024 parts, a number that depends on sizes
   alone.
   One block adds the parts in a fixed order. They meet in the workspace, or, without one, in the
   shared memory of a single block that computes them all. */
enum { AMPI_CUDA_LOSS_PARTS = 1024 };

/* A call of a loss. A term is that of an element, or of the cross-entropy of a row. */
typedef struct ampi_cuda_loss {
    amp_ref x, target;           /* target: of MSE and BCE */
    const int32_t* labels;       /* of the cross-entropy, one a row */
    float* loss;                 /* the mean */
    double* parts;               /* [count], in the workspace; NULL: in shared memory */
    size_t n;                    /* terms */
    size_t d, ld;                /* of the cross-entropy: classes, elements from row to row */
    size_t count, tile;          /* parts; terms of a tile, which a block sums at a time */
    size_t pixels;               /* of an image, if rows are pixels of maps, else 1 */
    const float* weights;        /* of the classes; NULL: 1 */
    int32_t ignored;             /* a label without loss, if `ignores` */
    int ignores;
    float smoothing;
    ampi_loss kind;              /* MSE or BCE */
} ampi_cuda_loss;

AMPI_D bool ampi_d_is_ignored(const ampi_cuda_loss& q, int32_t label) {
    return q.ignores && label == q.ignored;
}

/* The terms of a mean, at least 1: rows whose label is ignored do not count. All threads of the
   block count them together. */
AMPI_D size_t ampi_d_loss_terms(const ampi_cuda_loss& q) {
    size_t n = 0;
    if (!q.ignores) return q.n;
    for (size_t i = 0; i < q.n; i += blockDim.x) {
        const size_t row = i + threadIdx.x;
        n += (size_t)__syncthreads_count(row < q.n && q.labels[row] != q.ignored);
    }
    return n > 0 ? n : 1;
}

/* *q.loss = the sum of q.count parts, divided by q.n. */
AMPI_D void ampi_d_loss_mean(const ampi_cuda_loss& q, const double* parts, double* shared) {
    const size_t n = ampi_d_loss_terms(q);  /* first: not all threads of a block add parts */
    const double sum = ampi_d_parts_sum(parts, q.count, shared);
    if (threadIdx.x == 0) *q.loss = (float)(sum / (double)n);
}

/* The mean loss from parts in memory, by one block. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_loss_mean(ampi_cuda_loss q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    ampi_d_loss_mean(q, q.parts, shared);
}

/* A block's part p: tiles p, p + count, ...; share(i) is this thread's of the tile that begins at
   term i. */
template <int T, typename F>
AMPI_D void ampi_d_loss_parts(const ampi_cuda_loss& q, double* shared, F share) {
    double* parts = q.parts ? q.parts : shared + 32;
    for (size_t part = blockIdx.x; part < q.count; part += gridDim.x) {
        double sum[1] = { 0.0 };
        for (size_t i = part * q.tile; i < q.n; i += q.count * q.tile) sum[0] += share(i);
        ampi_d_group_sum<T>(sum, shared);
        if (threadIdx.x == 0) parts[part] = sum[0];
    }
    if (q.parts) return;
    __syncthreads();
    ampi_d_loss_mean(q, parts, shared);
}

/* The sum of this thread's terms of a tile: two eights of elements, i and AMPI_CUDA_SECOND more. */
AMPI_D double ampi_d_loss_tile(const ampi_cuda_loss& q, size_t i) {
    double sum = 0.0;
    ampi_eight x[2], target[2];
    AMPI_D_UNROLL
    for (int u = 0; u < 2; u++) {
        ampi_d_fetch8(x[u], q.x, i + (size_t)(u * AMPI_CUDA_SECOND), q.n);
        ampi_d_fetch8(target[u], q.target, i + (size_t)(u * AMPI_CUDA_SECOND), q.n);
    }

    AMPI_D_UNROLL
    for (int u = 0; u < 2; u++) {
        size_t at = i + (size_t)(u * AMPI_CUDA_SECOND);
        float v[8], w[8];
        if (at >= q.n) break;
        ampi_d_widen8(v, x[u], q.x.dtype);
        ampi_d_widen8(w, target[u], q.target.dtype);

        /* behind the last element x and target are 0: so are terms but those of BCE */
        if (q.kind == AMPI_MSE) {
            for (int j = 0; j < 8; j++) v[j] -= w[j];
            sum += (double)ampi_d_dot8(v, v);
        } else if (q.kind == AMPI_MEAN) sum += (double)ampi_d_sum8(v);
        else {
            for (int j = 0; j < 8; j++) v[j] = ampi_bce_term(1, v[j], w[j]);
            ampi_d_trim8(v, q.n - at);
            sum += (double)ampi_d_sum8(v);
        }
    }
    return sum;
}

/* Parts of a loss by elements. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_loss(ampi_cuda_loss q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    ampi_d_loss_parts<AMPI_CUDA_BLOCK>(q, shared,
        [&](size_t i) { return ampi_d_loss_tile(q, i + threadIdx.x * 8u); });
}

AMPI_D bool ampi_d_is_label(const ampi_cuda_loss& q, int32_t label) {
    return label >= 0 && (size_t)label < q.d;
}

/* One row: log(sum(exp(z))) - (1-smoothing) * z[label] - smoothing * mean(z), z = x - max. Without
   smoothing the total of x is not looked at. */
AMPI_D double ampi_d_row_loss(const ampi_cuda_loss& q, float labelled, float max, float sum,
        double total) {
    float loss = ampi_fma(1, q.smoothing - 1.0f, labelled - max, ampi_log(1, sum));
    if (q.smoothing > 0.0f)
        loss = ampi_fma(1, -q.smoothing, (float)(total / (double)q.d - (double)max), loss);
    return (double)loss;
}

/* The loss of one row, NaN if its label is no class. */
template <int T, int KEEP>
AMPI_D double ampi_d_cross_entropy_row(const ampi_cuda_loss& q, size_t row, double* shared) {
    ampi_row<KEEP> x;
    float max, sum;
    double total[1];
    const int32_t label = q.labels[row];
    if (ampi_d_is_ignored(q, label)) return 0.0;
    ampi_d_row_start<T>(x, q.x, row, q.d, q.ld);
    sum = ampi_d_row_exp<T>(x, q.d, &max, total, shared);
    if (!ampi_d_is_label(q, label)) return (double)ampi_float(0x7fc00000u);
    if (q.smoothing > 0.0f) ampi_d_group_sum<T>(total, shared);
    return ampi_d_row_loss(q, ampi_d_load(q.x, x.start + (size_t)label), max, sum, total[0]);
}

/* A group's part p: rows p, p + count, ... */
template <int T, int KEEP>
static __global__ void __launch_bounds__(AMPI_CUDA_THREADS(T), 1)
        ampi_k_cross_entropy(ampi_cuda_loss q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    double* parts = q.parts ? q.parts : shared + 32;
    AMPI_D_EACH(part, q.count) {
        double sum = 0.0;
        for (size_t row = part; row < q.n; row += q.count)
            sum += ampi_d_cross_entropy_row<T, KEEP>(q, row, shared);
        if (threadIdx.x % T == 0) parts[part] = sum;
    }
    if (q.parts) return;
    __syncthreads();
    ampi_d_loss_mean(q, parts, shared);
}

/* Up to 32 classes: a thread has a row, a block a tile of up to 1024. The tile comes into shared
   memory by eights, two to a thread; a gap behind each 32 floats keeps threads that read d apart
   from meeting in a bank. */
enum { AMPI_CUDA_FEW = 32, AMPI_CUDA_FEW_BLOCK = 1024, AMPI_CUDA_FEW_PARTS = 512,
       AMPI_CUDA_FEW_TILE = 10752, AMPI_CUDA_FEW_SHARED = (32 + (int)AMPI_CUDA_FEW_PARTS) * 8
           + (int)AMPI_CUDA_FEW_TILE / 32 * 33 * 4 };

/* Rows whose elements a tile holds; a multiple of 8, so that each tile begins at a multiple of 16
   bytes. */
AMPI_FN size_t ampi_cuda_few_rows(size_t d) {
    return ampi_min_size(AMPI_CUDA_FEW_TILE / d / 8 * 8, AMPI_CUDA_FEW_BLOCK);
}

AMPI_D unsigned ampi_d_gapped(unsigned i) { return i + i / 32; }

/* Elements [start, end) into the tile. */
AMPI_D void ampi_d_few_fetch(const ampi_cuda_loss& q, size_t start, size_t end, float* tile) {
    ampi_eight r[2];
    AMPI_D_UNROLL
    for (unsigned u = 0; u < 2; u++)
        ampi_d_fetch8(r[u], q.x, start + (threadIdx.x + u * AMPI_CUDA_FEW_BLOCK) * 8, end);
    AMPI_D_UNROLL
    for (unsigned u = 0; u < 2; u++) {
        const unsigned i = (threadIdx.x + u * AMPI_CUDA_FEW_BLOCK) * 8;
        float v[8];
        if (start + i >= end) break;
        ampi_d_widen8(v, r[u], q.x.dtype);
        for (int j = 0; j < 8; j++) tile[ampi_d_gapped(i) + (unsigned)j] = v[j];
    }
}

/* The row that begins at element i of the tile. */
AMPI_D double ampi_d_few_row(const ampi_cuda_loss& q, const float* tile, unsigned i,
        int32_t label) {
    const unsigned d = (unsigned)q.d;
    float max = ampi_float(0xff800000u);
    double sum = 0.0, total = 0.0;
    if (ampi_d_is_ignored(q, label)) return 0.0;
    if (!ampi_d_is_label(q, label)) return (double)ampi_float(0x7fc00000u);
    AMPI_D_UNROLL4
    for (unsigned j = 0; j < d; j++) max = ampi_d_larger(max, tile[ampi_d_gapped(i + j)]);
    AMPI_D_UNROLL4
    for (unsigned j = 0; j < d; j++) sum += (double)ampi_exp(1, tile[ampi_d_gapped(i + j)] - max);
    for (unsigned j = 0; q.smoothing > 0.0f && j < d; j++)
        total += (double)tile[ampi_d_gapped(i + j)];
    return ampi_d_row_loss(q, tile[ampi_d_gapped(i + (unsigned)label)], max, (float)sum, total);
}

/* Parts of the cross-entropy of few classes: a thread takes a row from a tile in shared memory. */
static __global__ void __launch_bounds__(AMPI_CUDA_FEW_BLOCK)
        ampi_k_cross_entropy_few(ampi_cuda_loss q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    float* tile = (float*)(shared + 32 + AMPI_CUDA_FEW_PARTS);
    ampi_d_loss_parts<AMPI_CUDA_FEW_BLOCK>(q, shared, [&](size_t first) {
        const size_t last = q.n - first < q.tile ? q.n : first + q.tile, row = first + threadIdx.x;
        const int32_t label = row < last ? q.labels[row] : 0;
        __syncthreads();      /* the last tile has been read */
        ampi_d_few_fetch(q, first * q.d, last * q.d, tile);
        __syncthreads();
        return row < last ? ampi_d_few_row(q, tile, threadIdx.x * (unsigned)q.d, label) : 0.0;
    });
}

/* Decides who computes the parts: calls without a workspace, and means of no more parts than a
   block computes in less time than a second launch takes, get one block. */
AMPI_FN size_t ampi_cuda_loss_plan(ampi_cuda_loss* q, size_t parts, size_t alone,
        const amp_exec* exec) {
    q->count = parts;
    if (parts > alone)
        q->parts = (double*)ampi_cuda_scratch(exec, AMPI_CUDA_LOSS_PARTS * sizeof(double));
    return q->parts ? q->count : 1;      /* parts at a time */
}

/* The second launch, where the first has left parts. */
AMPI_FN amp_result ampi_cuda_loss_end(const ampi_cuda_loss& q, const char* op,
        const amp_exec* exec) {
    if (!q.parts) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_loss_mean, 1, AMPI_CUDA_BLOCK,
        AMPI_CUDA_BLOCK / 32 * sizeof(double), q);
}

enum { AMPI_CUDA_LOSS_SHARED = (32 + AMPI_CUDA_LOSS_PARTS) * 8 };

/* *q, all zeros before, takes the rows, labels and desc of a cross-entropy. Sizes, a desc or a
   pointer out of range are refused; the labels' values, on the device, are not looked at. */
AMPI_FN amp_result ampi_cuda_cross_entropy_init(ampi_cuda_loss* q, const amp_exec* exec,
        const char* op, amp_ref logits, const int32_t* labels, const amp_cross_entropy_desc* desc,
        size_t ld, size_t n, size_t classes) {
    const amp_logger* log = ampi_exec_logger(exec);
    const float* weights = desc ? desc->class_weights : NULL;
    AMPI_REFUSE_WITH(log, n < 1 || classes < 1 || classes > INT32_MAX, AMP_ERR_SHAPE,
        "%s: %lld rows of %lld classes need sizes of 1 to 2^31-1", op, ampi_shown(n),
        ampi_shown(classes));
    if (desc) q->smoothing = desc->smoothing;
    AMPI_REFUSE_WITH(log, !ampi_in_range(&q->smoothing, 0.0f, AMPI_BELOW_ONE), AMP_ERR_DESC,
        "%s: smoothing %g is outside [0,1)", op, (double)q->smoothing);
    AMPI_TRY(ampi_cross_entropy_maps(exec, op, desc, n, ld, classes, &q->pixels));
    AMPI_REFUSE_WITH(log, !labels, AMP_ERR_ARGUMENT, "%s: labels is NULL", op);

    q->x = ampi_cuda_ref(logits);
    q->labels = labels;
    q->n = n; q->d = classes; q->ld = ld;
    q->ignores = desc && desc->ignored;
    if (q->ignores) q->ignored = *desc->ignored;
    q->weights = weights;
    if (weights) AMPI_TRY(ampi_cuda_check_pointer(exec, op, "class_weights", weights));
    return ampi_cuda_check_pointer(exec, op, "labels", labels);
}

/* The first launch for few classes. */
AMPI_FN amp_result ampi_cuda_few_run(ampi_cuda_loss* q, const char* op, const amp_exec* exec) {
    q->tile = ampi_cuda_few_rows(q->d);
    size_t parts = ampi_min_size(ampi_cuda_parts(q->n, q->tile), AMPI_CUDA_FEW_PARTS);
    parts = ampi_cuda_loss_plan(q, parts, 1, exec);
    return ampi_cuda_launch(exec, op, ampi_k_cross_entropy_few, (unsigned)parts,
        AMPI_CUDA_FEW_BLOCK, AMPI_CUDA_FEW_SHARED, *q);
}

/* The first launch for many classes. */
AMPI_FN amp_result ampi_cuda_many_run(ampi_cuda_loss* q, const char* op, const amp_exec* exec) {
    size_t parts = ampi_min_size(q->n, AMPI_CUDA_LOSS_PARTS);
    parts = ampi_cuda_loss_plan(q, parts, 2 * ampi_cuda_rows_at_once(q->d), exec);
    return AMPI_CUDA_LAUNCH_ROWS(exec, op, ampi_k_cross_entropy, parts, q->d,
        AMPI_CUDA_LOSS_SHARED, *q);
}

/* --- cross-entropy of maps, or with weights of the classes: a thread takes a row --- */

/* Has a cross-entropy a form that the kernels above do not take? */
AMPI_FN bool ampi_cuda_takes_maps(const ampi_cuda_loss& q) { return q.pixels > 1 || q.weights; }

AMPI_D float ampi_d_class_weight(const ampi_cuda_loss& q, size_t c) {
    return q.weights ? q.weights[c] : 1.0f;
}

/* What a row's label counts in the mean: 0 if it is ignored, or no class. */
AMPI_D float ampi_d_label_weight(const ampi_cuda_loss& q, size_t row) {
    const int32_t label = q.labels[row];
    return ampi_d_is_label(q, label) && !ampi_d_is_ignored(q, label)
        ? ampi_d_class_weight(q, (size_t)label) : 0.0f;
}

/* A row, with z = x - max: class c is element start + c * step of x. */
typedef struct ampi_map_row {
    size_t start, step;
    float max, sum;    /* sum of exp(z) */
    float label, all;  /* weight of the label; weighted sum of the target */
    float shared;      /* smoothing * the mean of weight * z */
} ampi_map_row;

/* The numbers of a row whose label is not ignored. */
AMPI_D ampi_map_row ampi_d_map_row(const ampi_cuda_loss& q, size_t row) {
    const size_t pixel = row % q.pixels;
    double sum = 0.0, weights = 0.0, shared = 0.0;
    ampi_map_row r;
    r.start = (row - pixel) * q.ld + pixel;
    r.step = q.pixels;
    r.max = ampi_float(0xff800000u);
    for (size_t c = 0; c < q.d; c++)
        r.max = ampi_d_larger(r.max, ampi_d_load(q.x, r.start + c * r.step));
    for (size_t c = 0; c < q.d; c++) {
        const float z = ampi_d_load(q.x, r.start + c * r.step) - r.max;
        sum += (double)ampi_exp(1, z);
        if (!(q.smoothing > 0.0f)) continue;
        weights += (double)ampi_d_class_weight(q, c);
        shared += (double)ampi_d_class_weight(q, c) * (double)z;
    }

    const double part = (double)q.smoothing / (double)q.d;
    r.sum = (float)sum;
    r.shared = (float)(part * shared);
    r.label = ampi_d_is_label(q, q.labels[row]) ? ampi_d_label_weight(q, row)
        : ampi_float(0x7fc00000u);
    r.all = ampi_fma(1, 1.0f - q.smoothing, r.label, (float)(part * weights));
    return r;
}

/* all * log(sum(exp(z))) - (1-smoothing) * label * z[label] - shared; NaN if the label is no
   class. */
AMPI_D float ampi_d_map_loss(const ampi_cuda_loss& q, size_t row) {
    const ampi_map_row r = ampi_d_map_row(q, row);
    if (!ampi_d_is_label(q, q.labels[row])) return ampi_float(0x7fc00000u);
    const float z = ampi_d_load(q.x, r.start + (size_t)q.labels[row] * r.step) - r.max;
    return ampi_fma(1, r.all, ampi_log(1, r.sum),
        ampi_fma(1, (q.smoothing - 1.0f) * r.label, z, -r.shared));
}

/* What the mean divides by, from the parts; infinity if that is 0, as a mean of nothing is 0. */
AMPI_D double ampi_d_map_terms(const ampi_cuda_loss& q, const double* parts, double* shared) {
    const double sum = ampi_d_parts_sum(parts + q.count, q.count, shared);
    return sum == 0.0 ? (double)ampi_float(0x7f800000u) : sum;
}

/* Parts part, part + step, ...: of the losses, unless q.loss is NULL, then of the labels'
   weights. */
AMPI_D void ampi_d_map_parts(const ampi_cuda_loss& q, double* parts, size_t part, size_t step,
        double* shared) {
    for (; part < q.count; part += step) {
        double sum[2] = { 0.0, 0.0 };
        size_t row = part * AMPI_CUDA_BLOCK + threadIdx.x;
        for (; row < q.n; row += q.count * AMPI_CUDA_BLOCK) {
            sum[1] += (double)ampi_d_label_weight(q, row);
            if (q.loss && !ampi_d_is_ignored(q, q.labels[row]))
                sum[0] += (double)ampi_d_map_loss(q, row);
        }
        ampi_d_group_sum<AMPI_CUDA_BLOCK>(sum, shared);
        if (threadIdx.x != 0) continue;
        parts[part] = sum[0];
        parts[q.count + part] = sum[1];
    }
}

/* The mean loss from all parts, by one block. */
AMPI_D void ampi_d_map_mean(const ampi_cuda_loss& q, const double* parts, double* shared) {
    const double terms = ampi_d_map_terms(q, parts, shared);
    const double loss = ampi_d_parts_sum(parts, q.count, shared);
    if (threadIdx.x == 0) *q.loss = (float)(loss / terms);
}

/* Parts in memory; or one block computes all of them, and the mean. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_map_parts(ampi_cuda_loss q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    double* parts = q.parts ? q.parts : shared + 32;
    ampi_d_map_parts(q, parts, blockIdx.x, gridDim.x, shared);
    if (q.parts) return;
    __syncthreads();
    ampi_d_map_mean(q, parts, shared);
}

static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_map_mean(ampi_cuda_loss q) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    ampi_d_map_mean(q, q.parts, shared);
}

/* Launches the parts, of which q is told, where a workspace holds them, or `always`. */
AMPI_FN amp_result ampi_cuda_map_parts(ampi_cuda_loss* q, const char* op, const amp_exec* exec,
        int always) {
    size_t parts = ampi_min_size(ampi_cuda_parts(q->n, AMPI_CUDA_BLOCK), AMPI_CUDA_LOSS_PARTS / 2);
    parts = ampi_cuda_loss_plan(q, parts, 1, exec);
    return !q->parts && !always ? AMP_OK : ampi_cuda_launch(exec, op, ampi_k_map_parts,
        (unsigned)parts, AMPI_CUDA_BLOCK, AMPI_CUDA_LOSS_SHARED, *q);
}

/* The mean loss. */
AMPI_FN amp_result ampi_cuda_map_run(ampi_cuda_loss* q, const char* op, const amp_exec* exec) {
    AMPI_TRY(ampi_cuda_map_parts(q, op, exec, 1));
    if (!q->parts) return AMP_OK;
    return ampi_cuda_launch(exec, op, ampi_k_map_mean, 1, AMPI_CUDA_BLOCK,
        AMPI_CUDA_BLOCK / 32 * sizeof(double), *q);
}

/* The table's softmax_cross_entropy_forward. */
AMPI_CUDA(softmax_cross_entropy_forward, amp_ref logits, const int32_t* labels,
        const amp_cross_entropy_desc* desc, float* loss, size_t n, size_t classes) {
    const char* op = "amp_cuda_softmax_cross_entropy_forward";
    size_t ld;
    const size_t all = ampi_cross_entropy_span(desc, n, classes, &ld);
    const ampi_argument list[] = {
        AMPI_ARG(logits, AMPI_IN, all), AMPI_ARG_F32(loss, AMPI_OUT, 1) };
    ampi_cuda_loss q = {};
    AMPI_CUDA_CHECK(op, all, list);
    AMPI_TRY(ampi_cuda_cross_entropy_init(&q, exec, op, logits, labels, desc, ld, n, classes));
    q.loss = loss;
    if (ampi_cuda_takes_maps(q)) return ampi_cuda_map_run(&q, op, exec);
    if (classes <= AMPI_CUDA_FEW && ld == classes) AMPI_TRY(ampi_cuda_few_run(&q, op, exec));
    else AMPI_TRY(ampi_cuda_many_run(&q, op, exec));
    return ampi_cuda_loss_end(q, op, exec);
}

/* What a loss's gradient needs beyond the loss. */
typedef struct ampi_cuda_loss_slope {
    ampi_cuda_loss q;
    amp_ref dx;
    const float* loss_scale;
    float weight;
} ampi_cuda_loss_slope;

/* dlogits = (softmax - target) * factor of rows, T threads each: target is `base`, of the label 1 -
   smoothing more. A row whose label is ignored gets zeros; one whose label is no class, which the
   host cannot see, NaNs. */
template <int T, int KEEP>
static __global__ void __launch_bounds__(AMPI_CUDA_THREADS(T), 1)
    ampi_k_cross_entropy_backward(ampi_cuda_loss_slope s) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    const ampi_cuda_loss& q = s.q;
    const float base = q.smoothing / (float)q.d, factor = ampi_loss_factor(s.loss_scale, s.weight,
        (double)ampi_d_loss_terms(q));
    AMPI_D_EACH(row, q.n) {
        ampi_row<KEEP> x;
        float max;
        double unused;
        const int32_t label = q.labels[row];
        const float f = ampi_d_is_label(q, label) ? factor : ampi_float(0x7fc00000u);

        ampi_d_row_start<T>(x, q.x, row, q.d, q.ld);
        const float inverse = 1.0f / ampi_d_row_exp<T>(x, q.d, &max, &unused, shared);

        ampi_d_eights<T, KEEP>(q.d, [&](int k, size_t i) {
            ampi_d_row_exp_again(x, k, i, max);
            for (int j = 0; j < 8; j++) {
                float target = i + (size_t)j == (size_t)label ? (1.0f - q.smoothing) + base : base;
                x.v[k][j] = ampi_d_is_ignored(q, label) ? 0.0f
                    : ampi_fma(1, x.v[k][j], inverse, -target) * f;
            }
            ampi_d_store8(s.dx, x.start + i, x.end, x.v[k]);
        });
    }
}

/* dlogits = (all * softmax - weight * target) * factor, a thread for each row; zeros if its label
   is ignored, NaNs if that is no class. Without parts in memory each block sums all labels'
   weights. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
        ampi_k_map_backward(ampi_cuda_loss_slope s) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    const ampi_cuda_loss& q = s.q;
    double* parts = q.parts ? q.parts : shared + 32;
    if (!q.parts) ampi_d_map_parts(q, parts, 0, 1, shared);
    __syncthreads();
    const double terms = ampi_d_map_terms(q, parts, shared);
    const float factor = ampi_loss_factor(s.loss_scale, s.weight, terms);
    size_t row = (size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x;
    for (; row < q.n; row += (size_t)gridDim.x * AMPI_CUDA_BLOCK) {
        const int ignored = ampi_d_is_ignored(q, q.labels[row]);
        const ampi_map_row r = ampi_d_map_row(q, row);
        const float inverse = 1.0f / r.sum, base = q.smoothing / (float)q.d;
        for (size_t c = 0; c < q.d; c++) {
            const size_t at = r.start + c * r.step;
            const float own = (size_t)q.labels[row] == c ? (1.0f - q.smoothing) * r.label : 0.0f;
            const float target = ampi_fma(1, base, ampi_d_class_weight(q, c), own);
            const float e = ampi_exp(1, ampi_d_load(q.x, at) - r.max) * inverse;
            ampi_d_store(s.dx, at, ignored ? 0.0f : ampi_fma(1, e, r.all, -target) * factor);
        }
    }
}

/* The labels' weights, then the gradient. */
AMPI_FN amp_result ampi_cuda_map_backward(ampi_cuda_loss_slope* s, const char* op,
        const amp_exec* exec) {
    AMPI_TRY(ampi_cuda_map_parts(&s->q, op, exec, 0));
    return ampi_cuda_launch(exec, op, ampi_k_map_backward,
        ampi_cuda_grid(s->q.n, AMPI_CUDA_BLOCK), AMPI_CUDA_BLOCK, AMPI_CUDA_LOSS_SHARED, *s);
}

/* The table's softmax_cross_entropy_backward. */
AMPI_CUDA(softmax_cross_entropy_backward, amp_ref logits, const int32_t* labels,
        const amp_cross_entropy_desc* desc, const float* loss_scale, float weight, amp_ref dlogits,
        size_t n, size_t classes) {
    const char* op = "amp_cuda_softmax_cross_entropy_backward";
    size_t ld;
    const size_t all = ampi_cross_entropy_span(desc, n, classes, &ld);
    const ampi_argument list[] = {
        AMPI_ARG(logits, AMPI_IN, all), AMPI_ARG(dlogits, AMPI_OUT | AMPI_NULL, all),
        AMPI_ARG_F32(loss_scale, AMPI_NULL, 1) };
    ampi_cuda_loss_slope s = {};
    AMPI_CUDA_CHECK(op, all, list);
    AMPI_TRY(ampi_cuda_cross_entropy_init(&s.q, exec, op, logits, labels, desc, ld, n, classes));
    AMPI_TRY(ampi_check_mean(exec, op, n, weight));
    if (!dlogits.data) return AMP_OK;
    s.dx = ampi_cuda_ref(dlogits);
    s.loss_scale = loss_scale; s.weight = weight;
    if (ampi_cuda_takes_maps(s.q)) return ampi_cuda_map_backward(&s, op, exec);
    return AMPI_CUDA_LAUNCH_ROWS(exec, op, ampi_k_cross_entropy_backward, n, classes,
        AMPI_CUDA_ROW_SHARED, s);
}

/* MSE, BCE and MEAN: (x - target) * factor, (sigmoid(x) - target) * factor, factor. */
struct ampi_op_loss_slope {
    ampi_loss kind;
    const float* loss_scale;
    float weight, factor;
    size_t n;
};
AMPI_D void ampi_d_begin(ampi_op_loss_slope& op) {
    op.factor = ampi_loss_factor(op.loss_scale, op.weight, (double)op.n);
    if (op.kind == AMPI_MSE) op.factor *= 2.0f;
}

AMPI_D void ampi_d_apply(const ampi_op_loss_slope& op, float (&x)[8], float (&target)[8], size_t) {
    if (op.kind == AMPI_MSE) for (int j = 0; j < 8; j++) x[j] = (x[j] - target[j]) * op.factor;
    else if (op.kind == AMPI_MEAN) for (int j = 0; j < 8; j++) x[j] = op.factor;
    else for (int j = 0; j < 8; j++) x[j] = (ampi_act_sigmoid(1, x[j]) - target[j]) * op.factor;
}

/* The table's mse_forward, bce_with_logits_forward or mean_forward. */
template <ampi_loss KIND>
static amp_result ampi_cuda_loss_forward(amp_ref x,
        amp_ref target, float* loss, size_t n, const amp_exec* exec) {
    const char* op = KIND == AMPI_MSE ? "amp_cuda_mse_forward" : KIND == AMPI_MEAN
        ? "amp_cuda_mean_forward" : "amp_cuda_bce_with_logits_forward";
    const ampi_argument list[] = { AMPI_ARG(x, AMPI_IN, n), AMPI_ARG(target, AMPI_IN, n),
        AMPI_ARG_F32(loss, AMPI_OUT, 1) };
    ampi_cuda_loss q = {};
    AMPI_CUDA_CHECK(op, n, list);
    AMPI_TRY(ampi_check_mean(exec, op, n, 1.0f));
    q.x = ampi_cuda_ref(x);
    q.target = ampi_cuda_ref(target);
    q.loss = loss; q.n = n;
    q.kind = KIND;
    q.tile = AMPI_CUDA_TILE;

    /* up to two parts one block sums, and finishes; more are finished by a second launch */
    size_t parts = ampi_min_size(ampi_cuda_parts(n, AMPI_CUDA_TILE), AMPI_CUDA_LOSS_PARTS);
    parts = ampi_cuda_loss_plan(&q, parts, 2, exec);
    AMPI_TRY(ampi_cuda_launch(exec, op, ampi_k_loss, (unsigned)parts, AMPI_CUDA_BLOCK,
        AMPI_CUDA_LOSS_SHARED, q));
    return ampi_cuda_loss_end(q, op, exec);
}

/* The table's mse_backward, bce_with_logits_backward or mean_backward. */
template <ampi_loss KIND>
static amp_result ampi_cuda_loss_backward(amp_ref x,
        amp_ref target, const float* loss_scale, float weight, amp_ref dx, size_t n,
        const amp_exec* exec) {
    const char* op = KIND == AMPI_MSE ? "amp_cuda_mse_backward" : KIND == AMPI_MEAN
        ? "amp_cuda_mean_backward" : "amp_cuda_bce_with_logits_backward";
    const ampi_argument list[] = { AMPI_ARG(x, AMPI_IN, n), AMPI_ARG(target, AMPI_IN, n),
        AMPI_ARG(dx, AMPI_OUT | AMPI_NULL, n), AMPI_ARG_F32(loss_scale, AMPI_NULL, 1) };
    const ampi_op_loss_slope functor = { KIND, loss_scale, weight, 0.0f, n };
    AMPI_CUDA_CHECK(op, n, list);
    AMPI_TRY(ampi_check_mean(exec, op, n, weight));
    if (!dx.data) return AMP_OK;
    return ampi_cuda_map_run(exec, op, ampi_cuda_map_of(x, target, dx, n), functor);
}

/* >>impl-scaler Lists of tensors on the device, and the loss scale: found_inf, norms, unscaling,
   the rule.
   Words. list: chunks of tensors, in a table on the device. look: a pass that finds inf and NaN and
   sums squares. settle: to set right what was unscaled on trust. block: the scaler's state in
   device memory. This room calls impl-device and impl-half. */

/* --- lists of tensors on the device --- */

/* A list is cut into chunks of one tensor each. Of B blocks, block b takes the chunks b, b+B, b+2B,
   ...; B depends on the list alone, so that sums have the same order on every GPU. Each warp of a
   block has its part of a chunk: 256 elements, and those 2048 behind them. */
enum { AMPI_CUDA_CHUNK = 4096, AMPI_CUDA_PARTS = AMPI_CUDA_BLOCK / 32, AMPI_CUDA_LIST_BLOCKS = 4096,
       AMPI_CUDA_NAME = 48 };

/* All that a pass needs to begin its loads. */
typedef struct ampi_cuda_chunk {
    void*     data;                 /* its first element */
    uint64_t  offset;               /* the place of that in the tensor */
    uint32_t  n;
    int32_t   tensor;
    amp_dtype dtype;
} ampi_cuda_chunk;

/* The chunks of a tensor. */
typedef struct ampi_cuda_array { uint64_t first_chunk, chunks; } ampi_cuda_array;

/* What is not finite. first, last: chunk * AMPI_CUDA_CHUNK + element, so that the least of them is
   the first of the list; last is 0 before there is one. */
typedef struct ampi_cuda_bad { unsigned long long inf, nan, first, last; } ampi_cuda_bad;

/* What a pass over a list has found. */
typedef struct ampi_cuda_found {
    amp_overflow_info info;
    int32_t  refused;               /* 1 = the gradients are to be left as they are */
    uint32_t finished;              /* blocks of a pass under way */
    ampi_cuda_bad bad;              /* what they have seen; between two passes as
                                       ampi_cuda_nothing_bad has it */
} ampi_cuda_found;

/* A list as kernels see it: all in device memory. */
typedef struct ampi_cuda_list {
    const ampi_cuda_chunk* chunks;
    const ampi_cuda_array* arrays;
    const char* names;              /* AMPI_CUDA_NAME bytes each */
    double*  sums;                  /* [AMPI_CUDA_LIST_BLOCKS]: of squares, what each block has
                                       seen */
    uint8_t* moved;                 /* [AMPI_CUDA_PARTS] of each chunk: 1 = unscaled by the look */
    ampi_cuda_found* found;
    uint64_t chunk_count;
} ampi_cuda_list;

struct amp_cuda_tensors {
    amp_tensor*    tensors;         /* without names */
    int            count;
    int            apart;           /* 1 = no two share memory */
    void*          memory;
    ampi_cuda_list list;
};

/* Room for count * size bytes in a block that is planned; sizes that no memory holds stay
   SIZE_MAX. */
AMPI_FN size_t ampi_cuda_reserve(size_t* total, size_t count, size_t size) {
    size_t at = *total, bytes;
    if (!ampi_mul_size(count, size, &bytes) || !ampi_add_size(at, bytes, total)
        || *total > SIZE_MAX - 127)
        *total = SIZE_MAX - 127;
    *total = (*total + 127) & ~(size_t)127;
    return at;
}

AMPI_FN size_t ampi_cuda_chunks_of(size_t n) {
    return n / AMPI_CUDA_CHUNK + (n % AMPI_CUDA_CHUNK != 0);
}

/* The counts of a scan that has found neither inf nor NaN. */
AMPI_HD AMPI_FN ampi_cuda_bad ampi_cuda_nothing_bad(void) {
    const ampi_cuda_bad none = { 0, 0, ~0ull, 0 };
    return none;
}

/* The tables, in host memory. */
AMPI_FN void ampi_cuda_fill_tables(const ampi_tensors* t, ampi_cuda_chunk* chunks,
        ampi_cuda_array* arrays, char* names) {
    uint64_t next = 0, offset;
    int i;
    for (i = 0; i < t->count; i++) {
        amp_tensor x = t->at(t->list, i);
        arrays[i].first_chunk = next;
        if (x.name) strncpy(names + (size_t)i * AMPI_CUDA_NAME, x.name, AMPI_CUDA_NAME - 1);
        for (offset = 0; offset < x.count; offset += AMPI_CUDA_CHUNK, next++) {
            uint64_t left = x.count - offset;
            chunks[next].data = (unsigned char*)x.data + offset * ampi_type_size(x.dtype);
            chunks[next].dtype = ampi_dtype_or_f32(x.dtype);
            chunks[next].offset = offset;
            chunks[next].n = (uint32_t)ampi_min_size(left, AMPI_CUDA_CHUNK);
            chunks[next].tensor = i;
        }
        arrays[i].chunks = next - arrays[i].first_chunk;
    }
}

/* Device memory with the contents of a host block, which the caller may free at once. */
AMPI_FN amp_result ampi_cuda_clone(void** out, const void* host, size_t bytes, const amp_exec* exec,
        const char* place) {
    amp_result r = ampi_cuda_check(exec, place, cudaMalloc(out, bytes));
    if (r != AMP_OK) { *out = NULL; return r; }
    r = ampi_cuda_check(exec, place, cudaMemcpyAsync(*out, host, bytes, cudaMemcpyHostToDevice,
        ampi_cuda_stream(exec)));
    if (r == AMP_OK) r = ampi_cuda_wait(exec, place);
    if (r == AMP_OK) return r;
    ampi_cuda_free(*out, NULL);
    *out = NULL;
    return r;
}

/* The table of list t, l->list, in one block of device memory, l->memory: chunks, arrays, names,
   what passes find. SIZE_MAX chunks or bytes stand for more than there can be, which no calloc
   grants. */
AMPI_FN amp_result ampi_cuda_fill_list(amp_cuda_tensors* l, const ampi_tensors* t,
        const amp_exec* exec, const char* place) {
    size_t total = 0, chunk_count = 0, found, sums, moved, chunks, arrays, names;
    unsigned char *host, *base;
    amp_result r;
    int i;
    for (i = 0; i < t->count; i++) {
        size_t more = ampi_cuda_chunks_of(t->at(t->list, i).count);
        if (!ampi_add_size(chunk_count, more, &chunk_count)) chunk_count = SIZE_MAX;
    }

    /* where each array lies in the block, in bytes */
    found = ampi_cuda_reserve(&total, 1, sizeof(ampi_cuda_found));
    sums = ampi_cuda_reserve(&total, AMPI_CUDA_LIST_BLOCKS, sizeof(double));
    moved = ampi_cuda_reserve(&total, chunk_count, AMPI_CUDA_PARTS);
    chunks = ampi_cuda_reserve(&total, chunk_count, sizeof(ampi_cuda_chunk));
    arrays = ampi_cuda_reserve(&total, (size_t)t->count, sizeof(ampi_cuda_array));
    names = ampi_cuda_reserve(&total, (size_t)t->count, AMPI_CUDA_NAME);
    host = (unsigned char*)calloc(total, 1);
    AMPI_REFUSE_OP(!host, AMP_ERR_MEMORY, "%s: no %llu bytes for the table", place,
        (ampi_ull)total);

    /* filled here, then cloned; sums and moved are zeros */
    ((ampi_cuda_found*)(void*)(host + found))->bad = ampi_cuda_nothing_bad();
    ampi_cuda_fill_tables(t, (ampi_cuda_chunk*)(void*)(host + chunks),
        (ampi_cuda_array*)(void*)(host + arrays), (char*)(host + names));
    r = ampi_cuda_clone(&l->memory, host, total, exec, place);
    free(host);
    if (r != AMP_OK) return r;

    base = (unsigned char*)l->memory;
    l->list.found = (ampi_cuda_found*)(void*)(base + found);
    l->list.sums = (double*)(void*)(base + sums);
    l->list.moved = base + moved;
    l->list.chunks = (const ampi_cuda_chunk*)(const void*)(base + chunks);
    l->list.arrays = (const ampi_cuda_array*)(const void*)(base + arrays);
    l->list.names = (const char*)(base + names);
    l->list.chunk_count = chunk_count;
    return AMP_OK;
}

/* The list and its device memory are freed; NULL is allowed. */
AMP_DEF void amp_cuda_tensors_destroy(amp_cuda_tensors* list) {
    if (!list) return;
    if (list->memory) ampi_cuda_free(list->memory, NULL);
    free(list->tensors);
    free(list);
}

/* A list of tensors on the device in *out, NULL after an error: a copy of t without its names, and
   the device's table. t has been checked. */
AMPI_FN amp_result ampi_cuda_make_list(amp_cuda_tensors** out, const ampi_tensors* t,
        const amp_exec* exec, const char* place) {
    amp_cuda_tensors* l = (amp_cuda_tensors*)calloc(1, sizeof *l);
    ampi_two_lists lists;
    amp_result r;
    size_t first, second;
    int i;
    *out = NULL;
    if (l) l->tensors = (amp_tensor*)calloc((size_t)t->count + 1, sizeof(amp_tensor));
    if (!l || !l->tensors) {
        amp_cuda_tensors_destroy(l);
        return ampi_fail(ampi_exec_logger(exec), AMP_ERR_MEMORY, "%s: out of memory", place);
    }

    /* arrays of the one list that meet */
    l->count = t->count;
    lists.dst = lists.src = t;
    l->apart = !ampi_arrays_meet(&lists, ampi_tensor_array, (size_t)t->count, &first, &second);
    for (i = 0; i < t->count; i++) {
        l->tensors[i] = t->at(t->list, i);
        l->tensors[i].name = NULL;
    }

    r = ampi_cuda_fill_list(l, t, exec, place);
    if (r == AMP_OK) *out = l;
    else amp_cuda_tensors_destroy(l);
    return r;
}

/* A list of tensors on the device in *out, NULL after an error. */
AMP_DEF amp_result amp_cuda_tensors_create(amp_cuda_tensors** out, const amp_tensor* tensors,
        int count, const amp_exec* exec) {
    static const char place[] = "amp_cuda_tensors_create";
    ampi_tensors t = ampi_tensors_of(tensors, count, place);
    int i;
    AMPI_CUDA_REFUSE_NULL(!out, "out");
    *out = NULL;
    AMPI_TRY(ampi_tensors_validate(&t, ampi_exec_logger(exec)));
    for (i = 0; i < count; i++)
        if (tensors[i].count)
            AMPI_TRY(ampi_cuda_check_pointer(exec, place, tensors[i].name ? tensors[i].name
                : "a tensor", tensors[i].data));
    return ampi_cuda_make_list(out, &t, exec, place);
}

/* Of a pass that sums: a block for each eight chunks, so that it begins and ends seldom; but at
   least 512 blocks, which large GPUs hold at once, and no more than there is room for in the table
   of sums. */
AMPI_FN dim3 ampi_cuda_list_grid(const ampi_cuda_list* l) {
    const uint64_t limit = AMPI_CUDA_LIST_BLOCKS, least = l->chunk_count < 512 ? l->chunk_count
        : 512;
    const uint64_t eighth = l->chunk_count / 8;
    return dim3((unsigned)(eighth < least ? least : eighth < limit ? eighth : limit));
}

/* A block for each chunk, where no sums depend on it: so the last ones end together. */
AMPI_FN dim3 ampi_cuda_chunk_grid(const ampi_cuda_list* l) {
    const uint64_t limit = (uint64_t)1 << 30;
    return dim3((unsigned)(l->chunk_count < limit ? l->chunk_count : limit));
}

/* --- the scaler's block on the device --- */

typedef struct ampi_cuda_scaler_block {
    amp_scaler_state  state;
    amp_scaler_rule   rule;
    amp_overflow_info info;
    double   norms[AMP_SCALER_MAX_LISTS];   /* of the lists of this window, by the host's numbers */
    uint32_t last[3][3];                    /* ampi_last_finite from F32, F16, BF16 to those, for
                                               state.inverse */
    uint32_t exact[3];                      /* ampi_cuda_first_exact of those, for
                                               state.scale_in_use */
    int32_t  closed;                        /* 1 = info is of the last window */
    int32_t  last_skipped;                  /* how that window ended */
    float    last_scale;                    /* its loss scale */
    int32_t  limits;                        /* what amp_scaler_advance returned since the last
                                               read */
} ampi_cuda_scaler_block;

struct amp_cuda_scaler {
    amp_scaler window;                      /* the settings, and the lists of this window; its state
                                               is not kept */
    ampi_cuda_scaler_block* device;
};

/* The least magnitude, as bits of type t, that is a normal number and stays one when divided by the
   scale: the way back is exact then. 0 where there is none, and where there is nothing to do: the
   scale must be 2^k with a normal inverse. The least normal number has the exponent bits 1, its
   2^k-fold those of k + 1. */
AMPI_HD AMPI_FN uint32_t ampi_cuda_first_exact(amp_dtype t, float scale) {
    /* of the significand, as stored */
    const int width = t == AMP_F32 ? 23 : t == AMP_F16 ? 10 : 7;
    const uint32_t u = ampi_bits(scale);
    const int k = (int)(u >> 23) - 127;
    if ((u & 0x7fffffu) != 0 || k < -126 || k > 126 || k == 0) return 0;
    return (uint32_t)(k > 0 ? k + 1 : 1) << width;
}

/* A cleared info in eights of bytes, so that the lanes of a warp write one together: all 0, but for
   the norm and for the numbers of the tensors, which are -1 and lie in the lower halves. */
enum { AMPI_CUDA_INFO_WORDS = sizeof(amp_overflow_info) / 8 };
static_assert(sizeof(amp_overflow_info) % 8 == 0 && AMPI_CUDA_INFO_WORDS <= 32,
    "a lane of a warp for each word");

/* Word i of an overflow info that has seen nothing, with this norm. */
AMPI_D uint64_t ampi_d_clear_word(unsigned i, double norm) {
    if (i == offsetof(amp_overflow_info, norm) / 8) return ampi_bits64(norm);
    return i == offsetof(amp_overflow_info, first_tensor) / 8 || i == offsetof(amp_overflow_info,
        last_tensor) / 8 ? 0xffffffffu : 0u;
}

AMPI_D void ampi_d_clear_info(amp_overflow_info* info, unsigned lane, double norm) {
    if (lane < AMPI_CUDA_INFO_WORDS) ((uint64_t*)(void*)info)[lane] = ampi_d_clear_word(lane, norm);
}

/* What the rule works on, as the block begins with it: in 16 bytes at a time all of it is under way
   at once. */
typedef struct ampi_cuda_scaler_core {
    amp_scaler_state state;
    amp_scaler_rule  rule;
} ampi_cuda_scaler_core;

/* The state and rule of the scaler, read in units of 16 bytes. */
AMPI_D void ampi_d_scaler_fetch(ampi_cuda_scaler_core& c, const ampi_cuda_scaler_block* b) {
    uint4 w[(sizeof c + 15) / 16];          /* the last may hold a part of the info, too */
    AMPI_D_UNROLL
    for (unsigned k = 0; k < sizeof w / 16; k++) w[k] = ((const uint4*)(const void*)b)[k];
    memcpy(&c, w, sizeof c);
}

/* The state of the scaler, written in units of 16 bytes. */
AMPI_D void ampi_d_scaler_store(ampi_cuda_scaler_block* b, const amp_scaler_state& state) {
    static_assert(sizeof state % 16 == 0, "whole units are stored");
    uint4 w[sizeof state / 16];
    memcpy(w, &state, sizeof state);
    AMPI_D_UNROLL
    for (unsigned k = 0; k < sizeof state / 16; k++) ((uint4*)(void*)b)[k] = w[k];
}

/* What follows from a new scale. All lanes of a warp call it, each with the state. */
AMPI_D void ampi_d_scaler_settle(ampi_cuda_scaler_block* b, amp_scaler_state& state,
        unsigned lane) {
    const int from = (int)lane / 3, to = (int)lane % 3;
    ampi_scaler_use_scale(&state);
    if (lane < 9)
        b->last[from][to] = ampi_last_finite((amp_dtype)(from + 1), (amp_dtype)(to + 1),
            state.inverse);
    if (lane < 3) b->exact[lane] = ampi_cuda_first_exact((amp_dtype)(lane + 1), state.scale_in_use);
}

/* Ends the window. All lanes of a warp call it, each with what fetch has brought, and once all of
   them have that. */
AMPI_D void ampi_d_scaler_end(ampi_cuda_scaler_block* b, ampi_cuda_scaler_core& c, unsigned lane) {
    const int32_t skipped = c.state.found_inf;
    const float used = c.state.scale_in_use;
    const int hit = amp_scaler_advance(&c.rule, &c.state);
    if (ampi_bits(c.state.scale) != ampi_bits(used)) ampi_d_scaler_settle(b, c.state, lane);
    if (lane != 0) return;
    ampi_d_scaler_store(b, c.state);
    b->last_skipped = skipped;
    b->last_scale = used;
    b->closed = 1;
    if (hit) b->limits |= hit;
}

/* The overflow report is cleared if the step that it belongs to is closed, and open from here
   on. */
AMPI_D void ampi_d_scaler_open(ampi_cuda_scaler_block* b) {
    if (b->closed) ampi_overflow_clear(&b->info);
    b->closed = 0;
}

/* The scale's update and the end of the step; one warp. */
static __global__ void ampi_k_scaler_update(ampi_cuda_scaler_block* b) {
    ampi_ptx_grid_wait();
    ampi_cuda_scaler_core c;
    ampi_d_scaler_fetch(c, b);
    __syncthreads();
    ampi_d_scaler_end(b, c, threadIdx.x);
}

/* A state given by the host takes the place of the scaler's; one warp. */
static __global__ void ampi_k_scaler_write(ampi_cuda_scaler_block* b,
        const amp_scaler_state state) {
    ampi_ptx_grid_wait();
    amp_scaler_state now = state;
    ampi_d_scaler_settle(b, now, threadIdx.x);
    if (threadIdx.x == 0) ampi_d_scaler_store(b, now);
}

/* What was found since the last update is forgotten; one thread. */
static __global__ void ampi_k_scaler_abandon(ampi_cuda_scaler_block* b) {
    ampi_ptx_grid_wait();
    b->state.found_inf = b->state.unsound = 0;
    b->closed = 1;
}

/* An overflow is reported, and with `unsound` that the step cannot be trusted. A rule that
   ignores overflows leaves found_inf alone. */
AMPI_D void ampi_d_scaler_raise(ampi_cuda_scaler_block* b, int unsound) {
    ampi_d_scaler_open(b);
    b->info.found_inf = 1;
    if (unsound) b->info.unsound = b->state.unsound = 1;
    if (!b->rule.ignore_overflow) b->state.found_inf = 1;
}

/* flags: raise only those that are not 0; NULL = found_inf. */
static __global__ void ampi_k_scaler_raise(ampi_cuda_scaler_block* b, const float* flags) {
    ampi_ptx_grid_wait();
    if (!flags || flags[0] != 0.0f || flags[1] != 0.0f)
        ampi_d_scaler_raise(b, flags && flags[1] != 0.0f);
}

/* Each of `count` FP32 losses that is inf or NaN is reported as unsound; one thread. */
static __global__ void ampi_k_scaler_losses(ampi_cuda_scaler_block* b, const float* losses,
        int count) {
    ampi_ptx_grid_wait();
    for (int i = 0; i < count; i++)
        if ((ampi_bits(losses[i]) & 0x7f800000u) == 0x7f800000u) ampi_d_scaler_raise(b, 1);
}

/* flags[0] is 1 if an overflow was found, flags[1] is 1 if the state is unsound, else 0. */
static __global__ void ampi_k_scaler_flag(const ampi_cuda_scaler_block* b, float* flags) {
    ampi_ptx_grid_wait();
    flags[0] = b->state.found_inf ? 1.0f : 0.0f;
    flags[1] = b->state.unsound ? 1.0f : 0.0f;
}

/* 16 bytes at a time as far as `wide` units go. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
ampi_k_copy_if_skipped(const ampi_cuda_scaler_block* b, unsigned char* dst,
    const unsigned char* src, size_t wide, size_t bytes) {
    ampi_ptx_grid_wait();
    size_t at = (size_t)blockIdx.x * AMPI_CUDA_BLOCK + threadIdx.x,
        step = (size_t)gridDim.x * AMPI_CUDA_BLOCK, i;
    if (!b->last_skipped) return;
    for (i = at; i < wide; i += step) ((uint4*)(void*)dst)[i] = ((const uint4*)(const void*)src)[i];
    for (i = 16 * wide + at; i < bytes; i += step) dst[i] = src[i];
}

/* --- look, what check does, and each unscale at first --- */

enum { AMPI_LOOK,                       /* reads only */
       AMPI_LOOK_SUMS,                  /* reads what accumulating would give */
       AMPI_LOOK_UNSCALE };             /* unscales in place as far as that can be taken back */

typedef struct ampi_cuda_look {
    ampi_cuda_list src;
    const ampi_cuda_chunk*  dst;        /* where the results go; NULL = they are FP32, or stay in
                                           their place */
    ampi_cuda_scaler_block* scaler;     /* NULL = the gradients are not scaled */
    int unscaled;                       /* 1 = they are unscaled already */
    int list;                           /* number under which the window keeps the norm; -1 =
                                           none */
} ampi_cuda_look;

/* Blocks of a kind that a multiprocessor is to hold at once, so that enough loads are under way: at
   40, 64 and 48 registers a thread. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
  #define AMPI_LOOK_RESIDENT(kind) 4      /* all it has room for */
#else
  #define AMPI_LOOK_RESIDENT(kind) ((kind) == AMPI_LOOK ? 6 : (kind) == AMPI_LOOK_SUMS ? 4 : 5)
#endif

/* What a thread's scan has found: squares of all its chunks; of the last one the bits that look8
   sets, and the least magnitude, less 1, so that 0 is the greatest. */
typedef struct ampi_cuda_scan {
    double   sum;       /* of squares */
    uint32_t over;      /* bit 31: an element is not finite */
    uint32_t least;     /* magnitude as bits, less 1 */
} ampi_cuda_scan;

/* What is not finite in the chunks of a block. first, last: as in ampi_cuda_bad, but only the
   block's own chunks are counted: 32 bits are enough for those, and atomics on 64 are slow in
   shared memory. */
typedef struct ampi_cuda_block_bad { uint32_t inf, nan, first, last; } ampi_cuda_block_bad;

/* What a block shares. */
typedef struct ampi_cuda_look_shared {
    double sums[AMPI_CUDA_BLOCK / 32];  /* of squares, one a warp */
    ampi_cuda_block_bad bad;
    int is_last;                        /* 1 = all other blocks have finished */
} ampi_cuda_look_shared;

/* Adds the squares of an eight to the sum, each of them exact in double, so that fused or not is
   the same. A magnitude above `last` makes the difference negative, and its sign bit stays in
   s.over. */
AMPI_D void ampi_d_look8(ampi_cuda_scan& s, const ampi_eight& r, amp_dtype t, uint32_t last) {
    double part[4] = { 0.0, 0.0, 0.0, 0.0 };
    AMPI_D_UNROLL
    for (int j = 0; j < 8; j++) {
        uint32_t half = r.w[j / 2] >> (16 * (j & 1)) & 0xffffu;
        uint32_t magnitude = t == AMP_F32 ? r.w[j] & 0x7fffffffu : half & 0x7fffu;
        float x = t == AMP_F32   ? ampi_float(r.w[j])
                  : t == AMP_F16 ? ampi_ptx_f32_from_f16((uint16_t)half)
                                 : ampi_float(half << 16);
        s.over |= last - magnitude;
        if (magnitude - 1 < s.least) s.least = magnitude - 1;
        part[j % 4] += (double)x * (double)x;
    }
    s.sum += (part[0] + part[1]) + (part[2] + part[3]);
}

/* dst + src * inverse as it would be stored. */
AMPI_D void ampi_d_sum8_stored(ampi_eight& r, amp_dtype to, const ampi_eight& x, amp_dtype from,
        float inverse) {
    float a[8], b[8];
    ampi_d_widen8(a, x, from);
    ampi_d_widen8(b, r, to);
    for (int j = 0; j < 8; j++) b[j] = ampi_fma(1, a[j], inverse, b[j]);
    ampi_d_round8(r, b, to);
}

/* x * factor; a NaN stays the one it is. */
AMPI_D float ampi_d_scale(float x, float factor) {
    uint32_t u = ampi_bits(x);
    return (u & 0x7fffffffu) > 0x7f800000u ? ampi_float(u | 0x400000u) : __fmul_rn(x, factor);
}

/* An eight times factor, rounded to its own type. */
AMPI_D void ampi_d_scale8(ampi_eight& r, amp_dtype t, float factor) {
    float v[8];
    ampi_d_widen8(v, r, t);
    for (int j = 0; j < 8; j++) v[j] = ampi_d_scale(v[j], factor);
    ampi_d_round8(r, v, t);
}

/* What a thread has to know of a chunk. */
typedef struct ampi_cuda_range {
    amp_ref  x, y;      /* its elements, and those of the target, of which only SUMS reads any */
    uint32_t n;         /* elements */
    uint32_t last;      /* the greatest magnitude, as bits, that is finite once it is unscaled */
    float    inverse;   /* of the loss scale */
} ampi_cuda_range;

/* Chunk c as a pass of this kind reads it: its arrays and types, and the largest magnitude that
   counts as finite. */
template <int KIND>
AMPI_D ampi_cuda_range ampi_d_range_of(const ampi_cuda_look& a, const ampi_cuda_chunk& x,
        uint64_t c) {
    const bool sums = KIND == AMPI_LOOK_SUMS;
    ampi_cuda_range v;
    v.x = { x.data, x.dtype };
    v.y.data = sums ? a.dst[c].data : NULL;
    v.y.dtype = KIND == AMPI_LOOK_UNSCALE ? x.dtype : a.dst ? a.dst[c].dtype : AMP_F32;
    v.n = x.n;
    v.inverse = KIND == AMPI_LOOK ? 1.0f : a.scaler->state.inverse;
    v.last = ampi_inf_bits(sums ? v.y.dtype : v.x.dtype) - 1;
    if (!sums && a.scaler && !a.unscaled) v.last = a.scaler->last[v.x.dtype - 1][v.y.dtype - 1];
    return v;
}

/* Element i once more, as bits without the sign. */
template <int KIND>
AMPI_D uint32_t ampi_d_magnitude(const ampi_cuda_range& v, unsigned i) {
    float sum;
    if (KIND != AMPI_LOOK_SUMS)
        return v.x.dtype == AMP_F32 ? ((const uint32_t*)v.x.data)[i] & 0x7fffffffu
            : ((const uint16_t*)v.x.data)[i] & 0x7fffu;
    sum = ampi_fma(1, ampi_d_load(v.x, i), v.inverse, ampi_d_load(v.y, i));
    return v.y.dtype == AMP_F32   ? ampi_bits(sum) & 0x7fffffffu
           : v.y.dtype == AMP_F16 ? ampi_d_round_half(sum) & 0x7fffu
                                  : ampi_bf16_bits(ampi_bits(sum)) & 0x7fffu;
}

/* The slow path, for eights that are known to be bad. `start` is the number of the chunk's first
   element. */
template <int KIND>
AMPI_D void ampi_d_count_bad(ampi_cuda_block_bad* all, const ampi_cuda_range& v, unsigned at,
        uint32_t start) {
    ampi_cuda_block_bad bad = { 0, 0, ~0u, 0 };
    AMPI_ROLLED
    for (unsigned j = at; j < at + 8 && j < v.n; j++) {
        uint32_t u = ampi_d_magnitude<KIND>(v, j);
        if (u <= v.last) continue;
        if (bad.first == ~0u) bad.first = start + j;
        bad.last = start + j;
        if (u > ampi_inf_bits(KIND == AMPI_LOOK_SUMS ? v.y.dtype : v.x.dtype)) bad.nan++;
        else bad.inf++;
    }
    atomicAdd(&all->inf, bad.inf);
    atomicAdd(&all->nan, bad.nan);
    atomicMin(&all->first, bad.first);
    atomicMax(&all->last, bad.last);
}

/* Unscales a warp's part, of which r is this thread's share, if all of it comes out right and can
   be taken back: every element is 0, or at least a.scaler->exact and not above v.last. Nobody knows
   yet what the other parts hold. */
AMPI_D void ampi_d_look_unscale(const ampi_cuda_look& a, const ampi_cuda_chunk& x,
        const ampi_cuda_range& v, const ampi_cuda_scan& s, ampi_eight (&r)[2], uint64_t c) {
    const uint32_t exact = a.scaler->exact[x.dtype - 1];
    const int moves = __all_sync(0xffffffffu, exact != 0 && !(s.over >> 31)
        && s.least >= exact - 1);
    if (threadIdx.x % 32 == 0) a.src.moved[c * AMPI_CUDA_PARTS + threadIdx.x / 32] = (uint8_t)moves;
    if (!moves) return;
    AMPI_D_UNROLL
    for (unsigned k = 0; k < 2; k++) {
        ampi_d_scale8(r[k], x.dtype, v.inverse);
        ampi_d_put8({ x.data, x.dtype }, 8 * (threadIdx.x + k * AMPI_CUDA_BLOCK), x.n, r[k]);
    }
}

/* Chunk c of the list, x: each thread of the block looks at two eights, adds their squares to
   s.sum, and if one is not finite counts what is bad. SUMS looks at y + x * inverse; UNSCALE also
   unscales on trust. */
template <int KIND>
AMPI_D void ampi_d_look_chunk(ampi_cuda_scan& s, const ampi_cuda_look& a, const ampi_cuda_chunk& x,
        uint64_t c, ampi_cuda_block_bad* bad) {
    const ampi_cuda_range v = ampi_d_range_of<KIND>(a, x, c);
    const unsigned at = 8 * threadIdx.x, apart = 8 * AMPI_CUDA_BLOCK;
    const bool sums = KIND == AMPI_LOOK_SUMS;
    ampi_eight r[2], sum[2];
    s.over = 0;
    s.least = ~0u;

    AMPI_D_UNROLL
    for (unsigned k = 0; k < 2; k++) ampi_d_fetch8(r[k], v.x, at + k * apart, v.n);
    AMPI_D_UNROLL
    for (unsigned k = 0; sums && k < 2; k++)
        ampi_d_fetch8(sum[k], v.y, at + k * apart, v.n);

    AMPI_D_UNROLL
    for (unsigned k = 0; k < 2; k++) {
        if (sums) ampi_d_sum8_stored(sum[k], v.y.dtype, r[k], v.x.dtype, v.inverse);
        ampi_d_look8(s, sums ? sum[k] : r[k], sums ? v.y.dtype : v.x.dtype, v.last);
    }
    if (KIND == AMPI_LOOK_UNSCALE) ampi_d_look_unscale(a, x, v, s, r, c);
    if (!(s.over >> 31)) return;

    /* places count the block's own chunks, of which this one is number c / gridDim.x */
    AMPI_ROLLED
    for (unsigned k = 0; k < 2; k++)
        ampi_d_count_bad<KIND>(bad, v, at + k * apart, (uint32_t)(c / gridDim.x) * AMPI_CUDA_CHUNK);
}

/* Element `number` of the block's own chunks, as the list counts it. */
AMPI_D unsigned long long ampi_d_place(uint32_t number) {
    const unsigned long long chunk = blockIdx.x
        + (unsigned long long)(number / AMPI_CUDA_CHUNK) * gridDim.x;
    return chunk * AMPI_CUDA_CHUNK + number % AMPI_CUDA_CHUNK;
}

/* Only integers are combined by atomics. */
AMPI_D void ampi_d_add_bad(ampi_cuda_bad* all, const ampi_cuda_block_bad& here) {
    atomicAdd(&all->inf, (unsigned long long)here.inf);
    atomicAdd(&all->nan, (unsigned long long)here.nan);
    atomicMin(&all->first, ampi_d_place(here.first));
    atomicMax(&all->last, ampi_d_place(here.last));
}

/* What a block has found goes to the list; shared->is_last: it was the last one. */
AMPI_D void ampi_d_look_end(const ampi_cuda_list& l, double squares,
        ampi_cuda_look_shared* shared) {
    double sum[1] = { squares };
    ampi_d_warp_sum(sum);
    if (threadIdx.x % 32 == 0) shared->sums[threadIdx.x / 32] = sum[0];
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < AMPI_CUDA_BLOCK / 32; warp++) sum[0] += shared->sums[warp];
        l.sums[blockIdx.x] = sum[0];
        if (shared->bad.inf + shared->bad.nan > 0) ampi_d_add_bad(&l.found->bad, shared->bad);
        shared->is_last = ampi_ptx_count(&l.found->finished) == gridDim.x - 1;
    }
    __syncthreads();
}

/* The sum of all blocks, four loads at a time under way. */
AMPI_D double ampi_d_look_total(const volatile double* all, double* shared) {
    double sum[1] = { 0.0 };
    AMPI_ROLLED
    for (unsigned b = threadIdx.x; b < gridDim.x; b += 4 * AMPI_CUDA_BLOCK) {
        double part[4] = { 0.0, 0.0, 0.0, 0.0 };
        AMPI_D_UNROLL
        for (unsigned k = 0; k < 4; k++)
            if (b + k * AMPI_CUDA_BLOCK < gridDim.x) part[k] = all[b + k * AMPI_CUDA_BLOCK];
        AMPI_D_UNROLL
        for (unsigned k = 0; k < 4; k++) sum[0] += part[k];
    }
    ampi_d_group_sum<AMPI_CUDA_BLOCK>(sum, shared);
    return sum[0];
}

/* What was not finite, as the caller is told it. */
AMPI_D void ampi_d_tell_bad(amp_overflow_info* found, const ampi_cuda_list& l,
        const ampi_cuda_bad& bad) {
    const ampi_cuda_chunk chunk = l.chunks[bad.first / AMPI_CUDA_CHUNK];
    const int last = l.chunks[bad.last / AMPI_CUDA_CHUNK].tensor;
    const char* name = l.names + (size_t)chunk.tensor * AMPI_CUDA_NAME;
    const char* last_name = l.names + (size_t)last * AMPI_CUDA_NAME;
    found->found_inf = 1;
    found->inf_count = bad.inf;
    found->nan_count = bad.nan;
    found->first_tensor = chunk.tensor;
    found->first_index = chunk.offset + bad.first % AMPI_CUDA_CHUNK;
    found->last_tensor = last;
    AMPI_ROLLED
    for (int i = 0; i < AMPI_CUDA_NAME; i++) {
        found->first_name[i] = name[i];
        found->last_name[i] = last_name[i];
    }
}

/* What the conclusion needs, all of it on its way at once. */
typedef struct ampi_cuda_known {
    ampi_cuda_bad bad;
    uint32_t inverse, scale;        /* as bits; those of 1 without a scaler */
    int32_t  closed, ignore;        /* of the scaler; 0, 0 without one */
} ampi_cuda_known;

/* What is known of the list before this pass, and the scale's inverse. */
AMPI_D void ampi_d_look_ask(ampi_cuda_known& k, const ampi_cuda_look& a) {
    const volatile ampi_cuda_bad* bad = &a.src.found->bad;
    const ampi_cuda_scaler_block* b = a.scaler;
    k.bad.inf = bad->inf;
    k.bad.nan = bad->nan;
    k.bad.first = bad->first;
    k.bad.last = bad->last;
    k.inverse = ampi_bits(b ? b->state.inverse : 1.0f);
    k.scale = ampi_bits(b ? b->state.scale_in_use : 1.0f);
    k.closed = b ? b->closed : 0;
    k.ignore = b ? b->rule.ignore_overflow : 0;
}

/* ampi_scaler_record on the device, where the window's info is cleared already if this is its first
   list. Clean findings change nothing but the norm. */
AMPI_D void ampi_d_scaler_record(ampi_cuda_scaler_block* b, const amp_overflow_info* found,
        bool stops, int list, double norm) {
    b->closed = 0;
    b->info.norm = norm;
    if (list >= 0) b->norms[list] = norm;
    if (stops) ampi_overflow_add(&b->info, found);
}

/* One warp writes down what the whole list has shown: sum of squares `sum`, findings k. The list's
   info gets norm and places; a scaler gets them, too, and found_inf. `stops`: the step must not be
   made, as gradients are not finite or the scale has no use. */
AMPI_D void ampi_d_look_conclude(const ampi_cuda_look& a, double sum, ampi_cuda_known& k,
        bool sums) {
    /* nothing that follows from these is formed, and waited for, before the sum is */
    AMPI_D_RENEW(k.inverse);
    AMPI_D_RENEW(k.scale);
    const float inverse = ampi_float(k.inverse), scale = ampi_float(k.scale);
    const bool bad = k.bad.inf + k.bad.nan > 0, useless = !ampi_scale_usable(&scale), stops = bad
        || useless;

    /* of the unscaled gradients; infinite if they are not finite */
    ampi_cuda_found* result = a.src.found;
    double norm = sqrt(sum);
    if (!a.unscaled && !sums) norm = __dmul_rn(norm, (double)inverse);
    if (stops) norm = ampi_double(AMPI_INF64);

    /* all lanes clear; a scaler's info is cleared by the first list of a window */
    ampi_d_clear_info(&result->info, threadIdx.x, norm);
    if (k.closed) ampi_d_clear_info(&a.scaler->info, threadIdx.x, norm);
    __syncwarp();
    if (threadIdx.x != 0) return;

    if (bad) ampi_d_tell_bad(&result->info, a.src, k.bad);
    if (useless) result->info.found_inf = 1;
    if (a.scaler) ampi_d_scaler_record(a.scaler, &result->info, stops, a.list, norm);
    if (a.scaler && stops && !k.ignore) a.scaler->state.found_inf = 1;
    result->refused = stops && !k.ignore;

    /* ready for the next pass */
    if (bad) result->bad = ampi_cuda_nothing_bad();
    result->finished = 0;
}

/* One pass over a list, KIND says for what; a grid has no more blocks than chunks. Block b takes
   chunks b, b + gridDim.x, ...; each one's entry in the list is fetched before work on the chunk
   ahead of it. The block that finishes last puts all blocks' findings together. */
template <int KIND>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK, AMPI_LOOK_RESIDENT(KIND))
        ampi_k_look(const ampi_cuda_look a) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(ampi_cuda_look_shared, shared);
    const ampi_cuda_block_bad none = { 0, 0, ~0u, 0 };
    ampi_cuda_scan s = { 0.0, 0, 0 };
    ampi_cuda_chunk next = a.src.chunks[blockIdx.x];
    ampi_cuda_known known;
    double sum;
    if (threadIdx.x == 0) shared->bad = none;
    __syncthreads();

    for (uint64_t c = blockIdx.x; c < a.src.chunk_count; c += gridDim.x) {
        const ampi_cuda_chunk x = next;
        if (c + gridDim.x < a.src.chunk_count) next = a.src.chunks[c + gridDim.x];
        ampi_d_look_chunk<KIND>(s, a, x, c, &shared->bad);
    }

    ampi_d_look_end(a.src, s.sum, shared);
    if (!shared->is_last) return;

    /* the loads that a conclusion needs are under way while squares are summed */
    ampi_d_look_ask(known, a);
    sum = ampi_d_look_total(a.src.sums, shared->sums);
    if (threadIdx.x < 32) ampi_d_look_conclude(a, sum, known, KIND == AMPI_LOOK_SUMS);
}

/* One launch of ampi_k_look of this kind. */
AMPI_FN amp_result ampi_cuda_look_at(const ampi_cuda_look* a, int kind, const amp_exec* exec,
        const char* place) {
    return ampi_cuda_launch(exec, place, kind == AMPI_LOOK        ? ampi_k_look<AMPI_LOOK>
                                         : kind == AMPI_LOOK_SUMS ? ampi_k_look<AMPI_LOOK_SUMS>
                                                                  : ampi_k_look<AMPI_LOOK_UNSCALE>,
                            ampi_cuda_list_grid(&a->src), AMPI_CUDA_BLOCK,
                            sizeof(ampi_cuda_look_shared), *a);
}

/* --- unscale --- */

/* The second half of unscaling in place. Parts that the look has not moved get the factor now; if
   it has refused the list, those that it has moved get back what they were. Each block takes eight
   chunks, so that in the usual case few blocks read the table, and that is all. */
enum { AMPI_CUDA_SETTLE_CHUNKS = 8 };

/* After an unscaling on trust: a refused list is scaled back where it was unscaled, any other is
   unscaled where it was not. moved[chunk][warp] tells of each warp's part. Lane l of a warp reads
   that of the block's chunk l; the warp then settles its parts of the chunks that need it. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK, AMPI_LOOK_RESIDENT(AMPI_LOOK))
ampi_k_settle(const ampi_cuda_list l, const ampi_cuda_scaler_block* scaler) {
    ampi_ptx_grid_wait();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint64_t first = (uint64_t)blockIdx.x * AMPI_CUDA_SETTLE_CHUNKS, mine = first + lane;
    const int refused = l.found->refused;
    const float factor = refused ? scaler->state.scale_in_use : scaler->state.inverse;

    bool left = false;  /* this part of chunk `mine` is still to be settled */
    if (lane < AMPI_CUDA_SETTLE_CHUNKS && mine < l.chunk_count)
        left = l.moved[mine * AMPI_CUDA_PARTS + warp] == refused && factor != 1.0f;

    /* the lowest bit of todo is the next chunk */
    AMPI_ROLLED
    for (unsigned todo = __ballot_sync(0xffffffffu, left); todo != 0; todo &= todo - 1) {
        const ampi_cuda_chunk x = l.chunks[first + (unsigned)__ffs((int)todo) - 1];
        ampi_eight r[2];
        AMPI_D_UNROLL
        for (unsigned k = 0; k < 2; k++)
            ampi_d_fetch8(r[k], { x.data, x.dtype }, 8 * (threadIdx.x + k * AMPI_CUDA_BLOCK), x.n);
        AMPI_D_UNROLL
        for (unsigned k = 0; k < 2; k++) {
            ampi_d_scale8(r[k], x.dtype, factor);
            ampi_d_put8({ x.data, x.dtype }, 8 * (threadIdx.x + k * AMPI_CUDA_BLOCK), x.n, r[k]);
        }
    }
}

/* One launch of ampi_k_settle. */
AMPI_FN amp_result ampi_cuda_settle(const amp_cuda_tensors* list,
        const ampi_cuda_scaler_block* scaler, const amp_exec* exec, const char* place) {
    const uint64_t blocks = (list->list.chunk_count + AMPI_CUDA_SETTLE_CHUNKS
        - 1) / AMPI_CUDA_SETTLE_CHUNKS;
    return ampi_cuda_launch(exec, place, ampi_k_settle, (unsigned)blocks, AMPI_CUDA_BLOCK, 0,
        list->list, scaler);
}

typedef struct ampi_cuda_move {
    ampi_cuda_list src;
    const ampi_cuda_chunk* dst;             /* of another list */
    const ampi_cuda_scaler_block* scaler;   /* NULL = plain copies, converted, and saturated */
    int accumulate;
} ampi_cuda_move;

/* Eight elements of dst = those of src times factor, or += if a.accumulate. */
AMPI_D void ampi_d_move8(const ampi_cuda_move& a, const ampi_cuda_chunk& x,
        const ampi_cuda_chunk& y, unsigned i, float factor) {
    float v[8], sum[8];
    ampi_eight r;
    ampi_d_load8(v, { x.data, x.dtype }, i, x.n);
    if (a.accumulate) {
        ampi_d_load8(sum, { y.data, y.dtype }, i, x.n);
        for (int j = 0; j < 8; j++) v[j] = ampi_fma(1, v[j], factor, sum[j]);
    } else {
        for (int j = 0; j < 8; j++) v[j] = ampi_d_scale(v[j], factor);
    }
    ampi_d_round8(r, v, y.dtype);
    if (!a.scaler) ampi_d_saturate8(r, y.dtype);
    ampi_d_put8({ y.data, y.dtype }, i, x.n, r);
}

/* dst = src * inverse, or dst += that, unless the look before has refused it. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK) ampi_k_move(const ampi_cuda_move a) {
    ampi_ptx_grid_wait();
    float factor = a.scaler ? a.scaler->state.inverse : 1.0f;
    if (a.scaler && a.src.found->refused) return;
    for (uint64_t c = blockIdx.x; c < a.src.chunk_count; c += gridDim.x) {
        const ampi_cuda_chunk x = a.src.chunks[c], y = a.dst[c];
        for (unsigned at = 8 * threadIdx.x; at < x.n; at += 8 * AMPI_CUDA_BLOCK)
            ampi_d_move8(a, x, y, at, factor);
    }
}

/* dst = src times the scaler's inverse (1 without scaler), tensor by tensor, or += if
   accumulate. */
AMPI_FN amp_result ampi_cuda_move_list(const amp_cuda_tensors* dst, const amp_cuda_tensors* src,
        const ampi_cuda_scaler_block* scaler, int accumulate, const amp_exec* exec,
        const char* place) {
    ampi_cuda_move a;
    a.src = src->list;
    a.dst = dst->list.chunks;
    a.scaler = scaler;
    a.accumulate = accumulate;
    return ampi_cuda_launch(exec, place, ampi_k_move, ampi_cuda_chunk_grid(&src->list),
        AMPI_CUDA_BLOCK, 0, a);
}

/* --- the scaler's calls --- */

/* A scaler on the device, in *out, that goes on from where `from` is. */
AMPI_FN amp_result ampi_cuda_scaler_clone(amp_cuda_scaler** out, const amp_scaler* from,
        const amp_exec* exec, const char* place) {
    ampi_cuda_scaler_block block;
    amp_cuda_scaler* s = (amp_cuda_scaler*)calloc(1, sizeof *s);
    amp_result r;
    int i;
    AMPI_REFUSE_WITH(&from->logger, !s, AMP_ERR_MEMORY, "%s: out of memory", place);
    s->window = *from;

    AMPI_CLEAR(block);
    block.state = from->state;
    block.rule = from->rule;
    block.info = from->info;

    /* of the types F32, F16 and BF16, numbers 1 to 3 */
    for (i = 0; i < 9; i++)
        block.last[i / 3][i % 3] =
            ampi_last_finite((amp_dtype)(i / 3 + 1), (amp_dtype)(i % 3 + 1), block.state.inverse);
    for (i = 0; i < 3; i++)
        block.exact[i] = ampi_cuda_first_exact((amp_dtype)(i + 1), block.state.scale_in_use);

    r = ampi_cuda_clone((void**)&s->device, &block, sizeof block, exec, place);
    if (r != AMP_OK) {
        free(s);
        return r;
    }
    *out = s;
    return AMP_OK;
}

/* A scaler on the device in *out, NULL after an error. */
AMP_DEF amp_result amp_cuda_scaler_create(amp_cuda_scaler** out, const amp_scaler_desc* desc,
        const amp_exec* exec) {
    static const char place[] = "amp_cuda_scaler_create";
    const amp_logger* logger = desc && desc->logger ? desc->logger : ampi_exec_logger(exec);
    amp_scaler_desc d;
    amp_scaler host;
    AMPI_REFUSE_CALL(!out, AMP_ERR_ARGUMENT, "%s: out is NULL", place);
    *out = NULL;
    AMPI_CLEAR(d);
    if (desc) d = *desc;
    d.logger = logger;
    AMPI_TRY(amp_scaler_init(&host, &d));
    return ampi_cuda_scaler_clone(out, &host, exec, place);
}

/* The scaler and its device memory are freed; NULL is allowed. */
AMP_DEF void amp_cuda_scaler_destroy(amp_cuda_scaler* s) {
    if (!s) return;
    ampi_cuda_free(s->device, NULL);
    free(s);
}

/* The device address of the FP32 loss scale, or NULL. Lists that were checked may be checked
   again. */
AMP_DEF const float* amp_cuda_scaler_loss_scale(amp_cuda_scaler* s) {
    int i;
    if (!s) return NULL;
    s->window.scaled = 1;
    for (i = 0; i < s->window.list_count; i++)          /* new gradients will come */
        s->window.lists[i].done &= ~(uint32_t)AMPI_CHECKED;
    return &s->device->state.scale_in_use;
}

AMP_DEF const amp_scaler_state* amp_cuda_scaler_device_state(const amp_cuda_scaler* s) {
    return s ? &s->device->state : NULL;
}

/* A list as amp.h's functions know it. */
AMPI_FN amp_result ampi_cuda_scaler_list(const amp_cuda_scaler* s, const amp_cuda_tensors* list,
        ampi_tensors* t, const amp_exec* exec, const char* place) {
    AMPI_CUDA_REFUSE_NULL(!s, "the scaler");
    AMPI_REFUSE_WITH(&s->window.logger, !list, AMP_ERR_ARGUMENT, "%s: the list is NULL", place);
    *t = ampi_tensors_of(list->tensors, list->count, place);
    t->apart = list->apart;
    return AMP_OK;
}

/* The number that ampi_scaler_note gives to a list, or has given; -1 if the table is full. */
AMPI_FN int ampi_cuda_list_number(amp_scaler* window, const ampi_tensors* t) {
    const amp_scaler_list* entry = ampi_scaler_entry(window, ampi_tensors_key(t));
    if (entry) return (int)(entry - window->lists);
    return window->list_count < AMP_SCALER_MAX_LISTS ? window->list_count : -1;
}

/* The list's entry on the host says that `done` was done to it. */
AMPI_FN void ampi_cuda_note(amp_cuda_scaler* s, const ampi_tensors* t, uint32_t done) {
    s->window.recorded = 1;
    ampi_scaler_note(&s->window, t, done, 0.0);
}

/* A look at scaled gradients. `named` is the list whose number the norm is kept under. */
AMPI_FN ampi_cuda_look ampi_cuda_look_of(amp_cuda_scaler* s, const amp_cuda_tensors* list,
        const ampi_tensors* named) {
    ampi_cuda_look a;
    AMPI_CLEAR(a);
    a.src = list->list;
    a.scaler = s->device;
    a.list = ampi_cuda_list_number(&s->window, named);
    return a;
}

/* A scan of the gradients for inf and NaN on the stream, without a wait; an empty list
   launches nothing. */
AMP_DEF amp_result amp_cuda_scaler_check(amp_cuda_scaler* s, const amp_cuda_tensors* grads,
        const amp_exec* exec) {
    static const char place[] = "amp_cuda_scaler_check";
    ampi_cuda_look a;
    ampi_tensors t;
    int unscaled;
    AMPI_TRY(ampi_cuda_scaler_list(s, grads, &t, exec, place));
    AMPI_TRY(ampi_scaler_enter(&s->window, &t, AMPI_CHECKED, &unscaled));
    if (!ampi_tensors_any(&t)) return AMP_OK;
    a = ampi_cuda_look_of(s, grads, &t);
    a.unscaled = unscaled;
    AMPI_TRY(ampi_cuda_look_at(&a, AMPI_LOOK, exec, place));
    ampi_cuda_note(s, &t, AMPI_CHECKED);
    return AMP_OK;
}

/* The gradients are scanned and unscaled in place on the stream, without a wait. */
AMP_DEF amp_result amp_cuda_scaler_unscale(amp_cuda_scaler* s, const amp_cuda_tensors* grads,
        const amp_exec* exec) {
    static const char place[] = "amp_cuda_scaler_unscale";
    ampi_cuda_look a;
    ampi_tensors t;
    int unscaled;
    AMPI_TRY(ampi_cuda_scaler_list(s, grads, &t, exec, place));
    AMPI_TRY(ampi_scaler_enter(&s->window, &t, AMPI_UNSCALED, &unscaled));
    if (!ampi_tensors_any(&t)) return AMP_OK;
    a = ampi_cuda_look_of(s, grads, &t);
    AMPI_TRY(ampi_cuda_look_at(&a, AMPI_LOOK_UNSCALE, exec, place));
    AMPI_TRY(ampi_cuda_settle(grads, s->device, exec, place));
    ampi_cuda_note(s, &t, AMPI_UNSCALED);
    return AMP_OK;
}

/* dst = unscaled src, or dst += it with `accumulate`; lists of different lengths are refused. */
AMP_DEF amp_result amp_cuda_scaler_unscale_into(amp_cuda_scaler* s, const amp_cuda_tensors* dst,
        const amp_cuda_tensors* src, int accumulate, const amp_exec* exec) {
    static const char place[] = "amp_cuda_scaler_unscale_into";
    ampi_tensors to, from;
    ampi_cuda_look a;
    AMPI_TRY(ampi_cuda_scaler_list(s, src, &from, exec, place));
    AMPI_TRY(ampi_cuda_scaler_list(s, dst, &to, exec, place));
    AMPI_REFUSE_WITH(&s->window.logger, to.count != from.count, AMP_ERR_ARGUMENT,
        "%s: dst has %d tensors, src has %d", place, to.count, from.count);
    AMPI_TRY(ampi_scaler_enter_into(&s->window, &to, &from));
    if (!ampi_tensors_any(&to)) return AMP_OK;
    a = ampi_cuda_look_of(s, src, &to);
    a.dst = dst->list.chunks;
    AMPI_TRY(ampi_cuda_look_at(&a, accumulate ? AMPI_LOOK_SUMS : AMPI_LOOK, exec, place));
    AMPI_TRY(ampi_cuda_move_list(dst, src, s->device, accumulate, exec, place));
    ampi_cuda_note(s, &to, AMPI_UNSCALED);
    return AMP_OK;
}

/* flags: in device memory, as ampi_k_scaler_raise takes them. */
AMPI_FN amp_result ampi_cuda_scaler_raise(amp_cuda_scaler* s, const float* flags,
        const amp_exec* exec, const char* place) {
    AMPI_CUDA_REFUSE_NULL(!s, "the scaler");
    AMPI_TRY(ampi_cuda_launch(exec, place, ampi_k_scaler_raise, 1, 1, 0, s->device,
        flags));
    s->window.recorded = 1;
    return AMP_OK;
}

AMP_DEF amp_result amp_cuda_scaler_report_overflow(amp_cuda_scaler* s, const amp_exec* exec) {
    return ampi_cuda_scaler_raise(s, NULL, exec, "amp_cuda_scaler_report_overflow");
}

/* A scan of `count` FP32 losses in device memory for inf and NaN, without a wait. */
AMP_DEF amp_result amp_cuda_scaler_check_loss(amp_cuda_scaler* s, const float* losses, int count,
        const amp_exec* exec) {
    static const char place[] = "amp_cuda_scaler_check_loss";
    AMPI_CUDA_REFUSE_NULL(!s || !losses, s ? "losses" : "the scaler");
    AMPI_REFUSE_WITH(&s->window.logger, count < 0, AMP_ERR_ARGUMENT, "%s: count %d is negative",
        place, count);
    AMPI_TRY(ampi_cuda_check_pointer(exec, place, "losses", losses));
    return ampi_cuda_launch(exec, place, ampi_k_scaler_losses, 1, 1, 0, s->device,
        losses, count);
}

/* The scale's update on the stream, without a wait; refused if nothing was recorded since the
   last one. */
AMP_DEF amp_result amp_cuda_scaler_update(amp_cuda_scaler* s, const amp_exec* exec) {
    static const char place[] = "amp_cuda_scaler_update";
    AMPI_CUDA_REFUSE_NULL(!s, "the scaler");
    AMPI_REFUSE_WITH(&s->window.logger, !s->window.recorded, AMP_ERR_STATE,
        "%s: nothing was checked, unscaled or stepped since the last update", place);
    AMPI_TRY(ampi_cuda_launch(exec, place, ampi_k_scaler_update, 1, 32, 0, s->device));
    s->window.recorded = s->window.list_count = 0;
    return AMP_OK;
}

/* Ends a window as if it had not been. */
AMPI_FN amp_result ampi_cuda_scaler_abandon(amp_cuda_scaler* s, const amp_exec* exec) {
    s->window.recorded = s->window.list_count = 0;
    return ampi_cuda_launch(exec, "amp_cuda: abandon", ampi_k_scaler_abandon, 1, 1, 0,
        s->device);
}

/* dst = src if the last window ended without a step. */
AMPI_FN amp_result ampi_cuda_copy_if_skipped(void* dst, const void* src, size_t bytes,
        const amp_cuda_scaler* s, const amp_exec* exec) {
    size_t wide = (((uintptr_t)dst | (uintptr_t)src) & 15u) == 0 ? bytes / 16 : 0;
    if (bytes == 0) return AMP_OK;
    return ampi_cuda_launch(exec, "amp_cuda: copy after a skip", ampi_k_copy_if_skipped,
        ampi_cuda_grid(wide ? wide : bytes, AMPI_CUDA_BLOCK), AMPI_CUDA_BLOCK, 0, s->device,
        (unsigned char*)dst, (const unsigned char*)src, wide, bytes);
}

/* last_scale: of the last window that was closed. hit: the limits that were reached. */
AMPI_FN amp_result ampi_cuda_scaler_fetch(amp_cuda_scaler* s, amp_scaler* host, float* last_scale,
        int* hit, const amp_exec* exec) {
    ampi_cuda_scaler_block block;
    int i;
    AMPI_TRY(ampi_cuda_copy_out(&block, s->device, sizeof block, exec));
    if (block.limits) AMPI_TRY(ampi_cuda_zero(&s->device->limits, sizeof(int32_t), exec));
    *host = s->window;
    host->scaled = host->recorded;
    host->state = block.state;
    host->info = block.info;
    for (i = 0; i < host->list_count; i++) host->lists[i].norm = block.norms[i];
    *last_scale = block.last_scale;
    *hit = block.limits;
    return AMP_OK;
}

/* The scaler as the host knows it in *host; waits. */
AMP_DEF amp_result amp_cuda_scaler_read(amp_cuda_scaler* s, amp_scaler* host,
        const amp_exec* exec) {
    float last_scale;
    int hit;
    if (!s || !host)
        return ampi_cuda_missing(exec, "amp_cuda_scaler_read", s ? "host" : "the scaler");
    AMPI_TRY(ampi_cuda_scaler_fetch(s, host, &last_scale, &hit, exec));
    return ampi_scaler_limits(host, hit);
}

/* The state of *host goes to the device, between windows. */
AMP_DEF amp_result amp_cuda_scaler_write(amp_cuda_scaler* s, const amp_scaler* host,
        const amp_exec* exec) {
    static const char place[] = "amp_cuda_scaler_write";
    AMPI_CUDA_REFUSE_NULL(!s || !host, s ? "host" : "the scaler");
    AMPI_REFUSE_WITH(&s->window.logger, s->window.recorded || host->recorded, AMP_ERR_STATE,
        "%s: not between a check and update", place);
    AMPI_REFUSE_WITH(&s->window.logger, memcmp(&s->window.rule, &host->rule,
        sizeof host->rule) != 0, AMP_ERR_ARGUMENT, "%s: host follows another rule", place);
    return ampi_cuda_launch(exec, place, ampi_k_scaler_write, 1, 32, 0, s->device,
        host->state);
}

/* >>impl-optim  Optimizers on the device: one pass over all chunks updates weights, moments and low
   copies.
   Words. four: four neighbouring elements of a parameter. prepare: the kernel of one block that
   decides on the step and forms its constants. This room calls impl-scaler. */

/* --- parameters on the device --- */

typedef struct ampi_cuda_param {
    float*      master;
    void*       low;
    uint16_t*   rest;
    const void* grad;
    void*       m;
    void*       v;
    amp_dtype   low_dtype, grad_dtype, moment_dtype;
    int32_t     group;
    int32_t     aligned;                /* 1 = each array starts where four of its elements may be
                                           read at once */
} ampi_cuda_param;

/* What moves, what the step of now needs, and what it did. Pointers in `o` are the host's. */
typedef struct ampi_cuda_optimizer_block {
    amp_optimizer      o;
    ampi_update        updates[AMP_MAX_GROUPS];
    amp_optimizer_info info;
    unsigned long long first;           /* of what info.update_* count: tensor <<
                                           AMPI_CUDA_PLACE_BITS | element */
} ampi_cuda_optimizer_block;
enum { AMPI_CUDA_PLACE_BITS = 40 };

struct amp_cuda_optimizer {
    amp_optimizer     host;             /* its state is not kept up to date */
    amp_cuda_tensors* grads;
    void*             memory;
    ampi_cuda_optimizer_block* device;
    const ampi_cuda_param*     params;
    double*           norms;            /* LAMB: sums of squares of weights and direction, for each
                                           chunk */
    float*            trust;            /* LAMB: -lr * ratio, for each tensor */
};

/* --- the constants of a step --- */

typedef struct ampi_cuda_prepare {
    ampi_cuda_optimizer_block* block;
    ampi_cuda_scaler_block*    scaler;      /* NULL = the gradients are not scaled */
    const ampi_cuda_found*     found;       /* without a scaler; NULL = nobody looked */
    int list;                               /* number of the norm in the scaler's window */
    int unscaled;
} ampi_cuda_prepare;

/* What a lane of the first warp knows before anything is written: a part of the info, and what all
   need. */
typedef struct ampi_cuda_findings {
    uint64_t word;
    double   norm;
    float    inverse;
    int32_t  found_inf;
} ampi_cuda_findings;

/* The optimizer in units of 16 bytes; what follows it in its block may be read
   along. */
enum { AMPI_CUDA_OPTIMIZER_UNITS = (sizeof(amp_optimizer) + 15) / 16,
       AMPI_CUDA_OPTIMIZER_TURNS = (AMPI_CUDA_OPTIMIZER_UNITS + 31) / 32 };  /* of a warp */

/* All loads are under way at once; the optimizer comes into shared memory. */
AMPI_D void ampi_d_prepare_fetch(ampi_cuda_findings& f, const ampi_cuda_prepare& a,
        amp_optimizer* o, unsigned lane) {
    const amp_overflow_info* info = a.scaler ? &a.scaler->info : a.found ? &a.found->info : NULL;
    uint4 unit[AMPI_CUDA_OPTIMIZER_TURNS];
    f.word = ampi_d_clear_word(lane, 0.0);
    f.norm = 0.0;
    f.inverse = 1.0f;
    f.found_inf = 0;
    AMPI_D_UNROLL
    for (unsigned j = 0, i = lane; j < AMPI_CUDA_OPTIMIZER_TURNS; j++, i += 32)
        if (i < AMPI_CUDA_OPTIMIZER_UNITS) unit[j] = ((const uint4*)(const void*)&a.block->o)[i];
    if (info && lane < AMPI_CUDA_INFO_WORDS) f.word = ((const uint64_t*)(const void*)info)[lane];
    if (info) f.norm = a.scaler ? a.scaler->norms[a.list] : info->norm;
    if (info) f.found_inf = a.scaler ? a.scaler->state.found_inf : info->found_inf;
    if (a.scaler && !a.unscaled) f.inverse = a.scaler->state.inverse;
    AMPI_D_UNROLL
    for (unsigned j = 0, i = lane; j < AMPI_CUDA_OPTIMIZER_TURNS; j++, i += 32)
        if (i < AMPI_CUDA_OPTIMIZER_UNITS) ((uint4*)(void*)o)[i] = unit[j];
}

/* What amp_optimizer_step finds out before it moves anything. */
AMPI_D void ampi_d_prepare_info(amp_optimizer_info* info, const ampi_cuda_findings& f, float lr,
        double clip, unsigned lane) {
    if (lane < AMPI_CUDA_INFO_WORDS) ((uint64_t*)(void*)&info->overflow)[lane] = f.word;
    if (lane != 0) return;
    info->applied = !f.found_inf;
    info->lr = lr;
    info->grad_norm = f.found_inf ? ampi_double(AMPI_INF64) : f.norm;
    info->clip_coefficient = (float)clip;
    info->update_overflows = info->saturated = 0;
}

/* Counts an applied step, a lane for each group. */
AMPI_D void ampi_d_prepare_advance(amp_optimizer_state* state, const amp_optimizer* o,
        unsigned lane) {
    if (lane < AMP_MAX_GROUPS && o->groups[lane].frozen)
        state->frozen_steps[lane] = o->state.frozen_steps[lane] + 1;
    if (lane == 0) state->step = o->state.step + 1;
}

/* Skip or not, the constants of each group, and the step counter. All lanes of a warp call it; o:
   in shared memory. */
AMPI_D void ampi_d_prepare(ampi_cuda_optimizer_block* block, const ampi_cuda_findings& f,
        const amp_optimizer* o, unsigned lane) {
    const double factor = ampi_schedule_factor(&o->desc.schedule, o->state.step);
    const double clip = f.found_inf ? 1.0 : ampi_clip_coefficient(o, f.norm);
    const float mult = (float)__dmul_rn((double)f.inverse, clip);
    ampi_update u;
    ampi_d_prepare_info(&block->info, f, (float)__dmul_rn((double)o->state.lr, factor), clip, lane);
    if (lane == 0) block->first = ~0ull;
    if (f.found_inf) return;
    if (lane < (unsigned)ampi_group_count(o)) {
        ampi_update_of_group(&u, o, (int)lane, mult, factor);
        block->updates[lane] = u;
    }
    ampi_d_prepare_advance(&block->o.state, o, lane);
}

/* The first warp prepares the step. A second one, if there is one, ends the scaler's window: it
   writes nothing before the first has read what it needs, and what comes after reads the
   optimizer's block alone. */
static __global__ void ampi_k_prepare(const ampi_cuda_prepare a) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(amp_optimizer, o);
    const unsigned lane = threadIdx.x % 32;
    ampi_cuda_scaler_core core;
    ampi_cuda_findings found;
    if (threadIdx.x >= 32) ampi_d_scaler_fetch(core, a.scaler);
    else ampi_d_prepare_fetch(found, a, o, lane);
    __syncthreads();
    if (threadIdx.x >= 32) ampi_d_scaler_end(a.scaler, core, lane);
    else ampi_d_prepare(a.block, found, o, lane);
}

/* The optimizer's state, or its learning rate alone, is replaced; one thread. */
static __global__ void ampi_k_optimizer_write(ampi_cuda_optimizer_block* block,
        const amp_optimizer_state state, int lr_only) {
    ampi_ptx_grid_wait();
    if (lr_only) block->o.state.lr = state.lr;
    else block->o.state = state;
}

/* --- the update --- */

/* Four elements of any type, so that neighbouring threads read and write neighbouring 16 bytes of
   the FP32 arrays, which are most of the traffic. */
typedef struct ampi_four { uint32_t w[4]; } ampi_four;

/* WHOLE: all four lie below n, in one piece. Otherwise those that do; the others are 0. */
template <bool WHOLE>
AMPI_D void ampi_d_fetch4(ampi_four& r, const void* x, amp_dtype t, size_t i, size_t n) {
    if (WHOLE && t == AMP_F32) {
        ampi_d_set4(r.w, *(const uint4*)(const void*)((const float*)x + i));
    } else if (WHOLE) {
        uint2 q = *(const uint2*)(const void*)((const uint16_t*)x + i);
        r.w[0] = q.x & 0xffffu; r.w[1] = q.x >> 16; r.w[2] = q.y & 0xffffu; r.w[3] = q.y >> 16;
    } else {
        for (int j = 0; j < 4; j++)
            r.w[j] = i + (size_t)j >= n ? 0u : t == AMP_F32 ? ((const uint32_t*)x)[i + (size_t)j]
                : ((const uint16_t*)x)[i + (size_t)j];
    }
}

/* Four split masters as the bits of FP32. */
template <bool WHOLE>
AMPI_D void ampi_d_fetch_split4(ampi_four& r, const void* low, const uint16_t* rest, size_t i,
        size_t n) {
    ampi_four lower;
    ampi_d_fetch4<WHOLE>(r, low, AMP_BF16, i, n);
    ampi_d_fetch4<WHOLE>(lower, rest, AMP_BF16, i, n);
    for (int j = 0; j < 4; j++) r.w[j] = ampi_bits(ampi_joined(r.w[j], lower.w[j]));
}

/* Those four as floats. */
AMPI_D void ampi_d_widen4(float (&v)[4], const ampi_four& r, amp_dtype t) {
    for (int j = 0; j < 4; j++)
        v[j] = t == AMP_F32   ? ampi_float(r.w[j])
               : t == AMP_F16 ? ampi_d_widen_half((uint16_t)r.w[j])
                              : ampi_float(ampi_bf16_widen((uint16_t)r.w[j]));
}

/* Four numbers rounded to type t; none is written behind n unless WHOLE. */
template <bool WHOLE>
AMPI_D void ampi_d_store4(void* y, amp_dtype t, size_t i, size_t n, const float (&v)[4]) {
    uint32_t h[4];
    if (WHOLE && t == AMP_F32) {
        *(float4*)(void*)((float*)y + i) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (WHOLE) {
        for (int j = 0; j < 4; j++)
            h[j] = t == AMP_F16 ? ampi_d_round_half(v[j]) : ampi_bf16_bits(ampi_bits(v[j]));
        *(uint2*)(void*)((uint16_t*)y + i) = make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
    } else {
        for (int j = 0; j < 4; j++)
            if (i + (size_t)j < n) ampi_d_store({ y, t }, i + (size_t)j, v[j]);
    }
}

/* Four 16-bit numbers, the lower halves of h; none is written behind n unless WHOLE. */
template <bool WHOLE>
AMPI_D void ampi_d_put4(uint16_t* y, size_t i, size_t n, const uint32_t (&h)[4]) {
    if (WHOLE) {
        *(uint2*)(void*)(y + i) = make_uint2((h[0] & 0xffffu) | h[1] << 16,
            (h[2] & 0xffffu) | h[3] << 16);
    } else {
        for (int j = 0; j < 4; j++)
            if (i + (size_t)j < n) y[i + (size_t)j] = (uint16_t)h[j];
    }
}

/* Four masters, split. */
template <bool WHOLE>
AMPI_D void ampi_d_store_split4(void* low, uint16_t* rest, size_t i, size_t n,
        const float (&w)[4]) {
    uint32_t bits[4], upper[4];
    for (int j = 0; j < 4; j++) {
        bits[j] = ampi_bits_to_split(w[j]);
        upper[j] = ampi_upper_half(bits[j]);
    }
    ampi_d_put4<WHOLE>((uint16_t*)low, i, n, upper);
    ampi_d_put4<WHOLE>(rest, i, n, bits);
}

/* Four moments; those of 16 bits stay finite. */
template <bool WHOLE>
AMPI_D void ampi_d_store_moments4(void* y, amp_dtype t, size_t i, size_t n, float (&v)[4]) {
    if (t != AMP_F32)
        for (int j = 0; j < 4; j++) v[j] = ampi_within(v[j], ampi_last_rounded(t));
    ampi_d_store4<WHOLE>(y, t, i, n, v);
}

/* What a pass of updates needs, all on the device. */
typedef struct ampi_cuda_update {
    ampi_cuda_list list;                 /* of gradients: a tensor for each parameter */
    const ampi_cuda_param* params;
    ampi_cuda_optimizer_block* block;
    double* norms;                       /* of LAMB, as in amp_cuda_optimizer */
    float*  trust;
} ampi_cuda_update;

/* A chunk in the hands of its block. */
typedef struct ampi_cuda_work {
    ampi_cuda_param p;
    ampi_update u;                       /* numbers of its group */
    ampi_update_overflow over;           /* what this thread has met */
    double sums[2];                      /* LAMB_DIRECTION: squares of weights, of direction */
} ampi_cuda_work;

/* Arrays of four elements from i on, on their way. */
typedef struct ampi_four_set { ampi_four w, g, m, v; } ampi_four_set;

/* Weight, gradient and moments of four elements. */
template <int KIND, bool WHOLE>
AMPI_D void ampi_d_update_fetch(ampi_four_set& s, const ampi_cuda_param& p, size_t i, size_t n) {
    if (p.master) ampi_d_fetch4<WHOLE>(s.w, p.master, AMP_F32, i, n);
    else if (p.rest) ampi_d_fetch_split4<WHOLE>(s.w, p.low, p.rest, i, n);
    else ampi_d_fetch4<WHOLE>(s.w, p.low, p.low_dtype, i, n);
    ampi_d_fetch4<WHOLE>(s.g, p.grad, p.grad_dtype, i, n);
    if (ampi_uses_m(KIND)) ampi_d_fetch4<WHOLE>(s.m, p.m, p.moment_dtype, i, n);
    if (ampi_uses_v(KIND)) ampi_d_fetch4<WHOLE>(s.v, p.v, p.moment_dtype, i, n);
}

/* The CPU's own formulas, on four elements, each by itself so that all stay in registers.
   LAMB_DIRECTION leaves the direction in g. */
template <int KIND>
AMPI_D void ampi_d_update_apply(float (&w)[4], float (&g)[4], float (&m)[4], float (&v)[4],
        ampi_cuda_work& k) {
    AMPI_D_UNROLL
    for (size_t j = 0; j < 4; j++) {
        ampi_update_element(KIND, w, g, m, v, j, &k.u, &k.over);
        if (KIND == AMPI_LAMB_DIRECTION) {
            k.sums[0] += (double)w[j] * (double)w[j];      /* squares are exact in double */
            k.sums[1] += (double)g[j] * (double)g[j];
        }
    }
}

/* Weights as a 16-bit copy can hold them. */
AMPI_D void ampi_d_saturate4(float (&w)[4], amp_dtype t, uint32_t last) {
    for (int j = 0; j < 4; j++) {
        const uint32_t u = ampi_bits(w[j]), size = u & 0x7fffffffu;
        if (size > last && size <= 0x7f800000u)
            w[j] = ampi_float((u & 0x80000000u) | (t == AMP_F16 ? 0x477fe000u : 0x7f7f0000u));
    }
}

/* Four elements are widened, updated and stored. */
template <int KIND, bool WHOLE>
AMPI_D void ampi_d_update_four(const ampi_four_set& s, ampi_cuda_work& k, size_t i, size_t n) {
    float w[4], g[4], m[4], v[4];
    ampi_d_widen4(w, s.w, k.p.master || k.p.rest ? AMP_F32 : k.p.low_dtype);
    ampi_d_widen4(g, s.g, k.p.grad_dtype);
    if (ampi_uses_m(KIND)) ampi_d_widen4(m, s.m, k.p.moment_dtype);
    if (ampi_uses_v(KIND)) ampi_d_widen4(v, s.v, k.p.moment_dtype);
    k.over.base = i;
    ampi_d_update_apply<KIND>(w, g, m, v, k);
    if (KIND == AMPI_LAMB_DIRECTION) return;
    if (ampi_uses_m(KIND)) ampi_d_store_moments4<WHOLE>(k.p.m, k.p.moment_dtype, i, n, m);
    if (ampi_uses_v(KIND)) ampi_d_store_moments4<WHOLE>(k.p.v, k.p.moment_dtype, i, n, v);
    if (k.p.rest) { ampi_d_store_split4<WHOLE>(k.p.low, k.p.rest, i, n, w); return; }
    if (k.p.master) ampi_d_store4<WHOLE>(k.p.master, AMP_F32, i, n, w);
    if (!k.p.low) return;
    if (k.p.master && (k.over.held | k.over.saturated))
        ampi_d_saturate4(w, k.p.low_dtype, k.over.low);
    ampi_d_store4<WHOLE>(k.p.low, k.p.low_dtype, i, n, w);
}

/* Two fours, all of whose loads are under way before the first is used. */
template <int KIND>
AMPI_D void ampi_d_update_pair(ampi_cuda_work& k, size_t i, size_t n) {
    const size_t apart = 4 * AMPI_CUDA_BLOCK;
    ampi_four_set s[2];
    AMPI_D_UNROLL
    for (int j = 0; j < 2; j++)
        ampi_d_update_fetch<KIND, true>(s[j], k.p, i + (size_t)j * apart, n);
    AMPI_D_UNROLL
    for (int j = 0; j < 2; j++) ampi_d_update_four<KIND, true>(s[j], k, i + (size_t)j * apart, n);
}

/* One four of a thread. */
template <int KIND, bool WHOLE>
AMPI_D void ampi_d_update_one(ampi_cuda_work& k, size_t i, size_t n) {
    ampi_four_set s;
    ampi_d_update_fetch<KIND, WHOLE>(s, k.p, i, n);
    ampi_d_update_four<KIND, WHOLE>(s, k, i, n);
}

/* Pairs as long as both lie in the chunk, then what is left. */
template <int KIND>
AMPI_D void ampi_d_update_chunk(ampi_cuda_work& k, const ampi_cuda_chunk& chunk) {
    size_t end = chunk.offset + chunk.n;
    unsigned at = 4 * threadIdx.x;
    for (; k.p.aligned && at + 4 * AMPI_CUDA_BLOCK + 4 <= chunk.n; at += 8 * AMPI_CUDA_BLOCK)
        ampi_d_update_pair<KIND>(k, chunk.offset + at, end);
    for (; at < chunk.n; at += 4 * AMPI_CUDA_BLOCK) {
        if (k.p.aligned && at + 4 <= chunk.n)
            ampi_d_update_one<KIND, true>(k, chunk.offset + at, end);
        else ampi_d_update_one<KIND, false>(k, chunk.offset + at, end);
    }
}

/* Overflows of the update, which are rare. */
AMPI_D void ampi_d_update_tell(ampi_cuda_optimizer_block* block, const ampi_update_overflow& over,
        int tensor) {
    if (!(over.held | over.saturated)) return;
    atomicAdd((unsigned long long*)&block->info.update_overflows, (unsigned long long)over.held);
    atomicAdd((unsigned long long*)&block->info.saturated, (unsigned long long)over.saturated);
    atomicMin(&block->first, (unsigned long long)tensor << AMPI_CUDA_PLACE_BITS | over.first);
}

/* An update, KIND, of all parameters, a block a chunk at a time: reads and writes each once, and
   nothing if the step is skipped. LAMB_DIRECTION writes no weights: it leaves each chunk's sums in
   a.norms. */
template <int KIND>
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
        ampi_k_optimizer(const ampi_cuda_update a) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    if (!a.block->info.applied) return;
    for (uint64_t c = blockIdx.x; c < a.list.chunk_count; c += gridDim.x) {
        const ampi_cuda_chunk chunk = a.list.chunks[c];
        ampi_cuda_work k;
        k.p = a.params[chunk.tensor];
        k.u = a.block->updates[k.p.group];
        if (k.u.frozen
                || k.u.kind != (KIND == AMPI_LAMB_DIRECTION ? AMPI_UPDATE_LAMB : KIND)) continue;

        if (KIND == AMPI_UPDATE_LAMB) k.u.step = a.trust[chunk.tensor];
        ampi_update_limits(&k.over, k.p.master != NULL, k.p.low != NULL, k.p.low_dtype);
        k.sums[0] = k.sums[1] = 0.0;
        ampi_d_update_chunk<KIND>(k, chunk);
        if (KIND != AMPI_LAMB_DIRECTION) {
            ampi_d_update_tell(a.block, k.over, chunk.tensor);
            continue;
        }

        ampi_d_group_sum<AMPI_CUDA_BLOCK>(k.sums, shared);
        if (threadIdx.x == 0) { a.norms[2 * c] = k.sums[0]; a.norms[2 * c + 1] = k.sums[1]; }
    }
}

/* LAMB: the norms of each tensor from those of its chunks, and the ratio. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
        ampi_k_lamb_trust(const ampi_cuda_update a, int tensors) {
    ampi_ptx_grid_wait();
    AMPI_SHARED(double, shared);
    if (!a.block->info.applied) return;
    for (int t = (int)blockIdx.x; t < tensors; t += (int)gridDim.x) {
        const ampi_cuda_array x = a.list.arrays[t];
        double sums[2] = { 0.0, 0.0 }, ratio = 1.0;
        for (uint64_t c = threadIdx.x; c < x.chunks; c += AMPI_CUDA_BLOCK) {
            sums[0] += a.norms[2 * (x.first_chunk + c)];
            sums[1] += a.norms[2 * (x.first_chunk + c) + 1];
        }
        ampi_d_group_sum<AMPI_CUDA_BLOCK>(sums, shared);
        if (sums[0] > 0.0 && sums[1] > 0.0) ratio = sqrt(sums[0]) / sqrt(sums[1]);
        if (threadIdx.x == 0)
            a.trust[t] = (float)ampi_mul64((double)a.block->updates[a.params[t].group].step, ratio);
    }
}

/* All elements of a list become zero. */
static __global__ void __launch_bounds__(AMPI_CUDA_BLOCK)
        ampi_k_zero_list(const ampi_cuda_list list) {
    ampi_ptx_grid_wait();
    const float zero[8] = { 0 };
    for (uint64_t c = blockIdx.x; c < list.chunk_count; c += gridDim.x) {
        const ampi_cuda_chunk x = list.chunks[c];
        for (unsigned at = 8 * threadIdx.x; at < x.n; at += 8 * AMPI_CUDA_BLOCK)
            ampi_d_store8({ x.data, x.dtype }, at, x.n, zero);
    }
}

/* --- create and destroy --- */

/* Refuses memory of a parameter that kernels cannot reach. */
AMPI_FN amp_result ampi_cuda_check_param(const amp_param* p, const amp_exec* exec,
        const char* place) {
    const void* const pointers[] = { p->master, p->low, p->grad, p->m, p->v, p->rest };
    static const char* const names[] = { "master", "low", "grad", "m", "v", "rest" };
    for (int i = 0; i < 6 && p->count; i++)
        AMPI_TRY(ampi_cuda_check_pointer(exec, place, names[i], pointers[i]));
    return AMP_OK;
}

/* The kernels' form of a parameter. aligned: its arrays can be read in fours. */
AMPI_FN ampi_cuda_param ampi_cuda_param_of(const amp_param* p) {
    ampi_cuda_param d;
    uintptr_t wide = (uintptr_t)p->master, narrow = (uintptr_t)p->low | (uintptr_t)p->rest;
    AMPI_CLEAR(d);
    d.master = p->master;
    d.low = p->low;
    d.rest = p->rest;
    d.grad = p->grad;
    d.m = p->m;
    d.v = p->v;
    d.low_dtype = p->low_dtype;
    d.moment_dtype = ampi_dtype_or_f32(p->moment_dtype);
    d.grad_dtype = ampi_dtype_or_f32(p->grad_dtype);
    d.group = p->group;
    *(d.grad_dtype == AMP_F32 ? &wide : &narrow) |= (uintptr_t)p->grad;
    *(d.moment_dtype == AMP_F32 ? &wide : &narrow) |= (uintptr_t)p->m | (uintptr_t)p->v;
    d.aligned = (wide & 15u) == 0 && (narrow & 7u) == 0;
    return d;
}

/* The optimizer's block and table of parameters go to the device, with room for what LAMB needs:
   one block of memory, o->memory, in which block, params, norms and trust are places in bytes. */
AMPI_FN amp_result ampi_cuda_optimizer_upload(amp_cuda_optimizer* o, const amp_exec* exec,
        const char* place) {
    int i, count = o->host.count, lamb = ampi_kinds(&o->host) >> AMPI_UPDATE_LAMB;
    size_t total = 0, block = ampi_cuda_reserve(&total, 1, sizeof(ampi_cuda_optimizer_block));
    size_t params = ampi_cuda_reserve(&total, (size_t)count, sizeof(ampi_cuda_param));
    size_t norms = ampi_cuda_reserve(&total, lamb ? (size_t)o->grads->list.chunk_count : 0,
        2 * sizeof(double));
    size_t trust = ampi_cuda_reserve(&total, lamb ? (size_t)count : 0, sizeof(float));
    unsigned char *host = (unsigned char*)calloc(total, 1), *base;
    amp_result r;
    AMPI_REFUSE_OP(!host, AMP_ERR_MEMORY, "%s: no %llu bytes for the table", place,
        (ampi_ull)total);

    ((ampi_cuda_optimizer_block*)(void*)(host + block))->o = o->host;
    for (i = 0; i < count; i++)
        ((ampi_cuda_param*)(void*)(host + params))[i] = ampi_cuda_param_of(&o->host.params[i]);
    r = ampi_cuda_clone(&o->memory, host, total, exec, place);
    free(host);
    if (r != AMP_OK) return r;

    base = (unsigned char*)o->memory;
    o->device = (ampi_cuda_optimizer_block*)(void*)(base + block);
    o->params = (const ampi_cuda_param*)(const void*)(base + params);
    o->norms = (double*)(void*)(base + norms);
    o->trust = (float*)(void*)(base + trust);
    return AMP_OK;
}

/* Masters that have a low copy, and those copies. */
AMPI_FN amp_tensor ampi_cuda_master_at(const void* list, int i) {
    const amp_param* p = (const amp_param*)list + i;
    amp_tensor t;
    t.data = p->master; t.dtype = AMP_F32; t.count = p->master && p->low ? p->count : 0;
    t.name = p->name;
    return t;
}

/* The low copy of parameter i as a tensor. */
AMPI_FN amp_tensor ampi_cuda_low_at(const void* list, int i) {
    const amp_param* p = (const amp_param*)list + i;
    amp_tensor t = ampi_cuda_master_at(list, i);
    t.data = p->low; t.dtype = p->low_dtype;
    return t;
}

/* low = master, rounded, for all parameters. */
AMPI_FN amp_result ampi_cuda_write_low(const amp_optimizer* o, const amp_exec* exec,
        const char* place) {
    ampi_tensors masters = ampi_grads_of(o->params, o->count), lows = masters;
    amp_cuda_tensors *from = NULL, *to = NULL;
    amp_result r;
    masters.at = ampi_cuda_master_at;
    lows.at = ampi_cuda_low_at;
    if (!ampi_tensors_any(&masters)) return AMP_OK;
    r = ampi_cuda_make_list(&from, &masters, exec, place);
    if (r == AMP_OK) r = ampi_cuda_make_list(&to, &lows, exec, place);
    if (r == AMP_OK) r = ampi_cuda_move_list(to, from, NULL, 0, exec, place);
    if (r == AMP_OK) r = ampi_cuda_wait(exec, place);
    amp_cuda_tensors_destroy(from);
    amp_cuda_tensors_destroy(to);
    return r;
}

/* The optimizer and its list of gradients are freed; NULL is allowed. */
AMP_DEF void amp_cuda_optimizer_destroy(amp_cuda_optimizer* o) {
    if (!o) return;
    amp_cuda_tensors_destroy(o->grads);
    if (o->memory) ampi_cuda_free(o->memory, NULL);
    free(o);
}

/* All parts of a zeroed optimizer. After an error its owner frees those that were made. */
AMPI_FN amp_result ampi_cuda_optimizer_make(amp_cuda_optimizer* o, const amp_optimizer_desc* desc,
        amp_param* params, int count, const amp_exec* exec, const char* place) {
    const ampi_tensors grads = ampi_grads_of(params, count);

    AMPI_TRY(ampi_optimizer_make(&o->host, desc, params, count, place));
    for (int i = 0; i < count; i++) AMPI_TRY(ampi_cuda_check_param(&params[i], exec, place));
    AMPI_TRY(ampi_cuda_make_list(&o->grads, &grads, exec, place));
    AMPI_TRY(ampi_cuda_optimizer_upload(o, exec, place));
    return ampi_cuda_write_low(&o->host, exec, place);
}

/* An optimizer on the device in *out, NULL after an error. */
AMP_DEF amp_result amp_cuda_optimizer_create(amp_cuda_optimizer** out,
        const amp_optimizer_desc* desc, amp_param* params, int count, const amp_exec* exec) {
    static const char place[] = "amp_cuda_optimizer_create";
    amp_optimizer_desc d;
    amp_cuda_optimizer* o;
    amp_result r;
    AMPI_CUDA_REFUSE_NULL(!out, "out");
    *out = NULL;
    AMPI_CLEAR(d);
    if (desc) d = *desc;
    if (!d.logger) d.logger = ampi_exec_logger(exec);
    o = (amp_cuda_optimizer*)calloc(1, sizeof *o);
    AMPI_REFUSE_WITH(d.logger, !o, AMP_ERR_MEMORY, "%s: out of memory", place);
    r = ampi_cuda_optimizer_make(o, &d, params, count, exec, place);
    if (r == AMP_OK) *out = o;
    else amp_cuda_optimizer_destroy(o);
    return r;
}

/* --- the step --- */

AMP_DEF const amp_cuda_tensors* amp_cuda_optimizer_grads(const amp_cuda_optimizer* o) {
    return o ? o->grads : NULL;
}

/* One launch over all chunks; kernel NULL is LAMB's pass over parameters. */
AMPI_FN amp_result ampi_cuda_optimizer_run(const amp_cuda_optimizer* o,
        void (*kernel)(ampi_cuda_update), const amp_exec* exec, const char* place) {
    ampi_cuda_update a;
    a.list = o->grads->list;
    a.params = o->params;
    a.block = o->device;
    a.norms = o->norms;
    a.trust = o->trust;
    if (!kernel)
        return ampi_cuda_launch(exec, place, ampi_k_lamb_trust,
            ampi_cuda_grid((size_t)o->host.count, 1), AMPI_CUDA_BLOCK,
            2 * sizeof(double) * AMPI_CUDA_BLOCK / 32, a, o->host.count);
    return ampi_cuda_launch(exec, place, kernel, ampi_cuda_chunk_grid(&a.list), AMPI_CUDA_BLOCK,
        2 * sizeof(double) * AMPI_CUDA_BLOCK / 32, a);
}

/* The kernels of updates, by ampi_update_kind. */
static void (*const ampi_cuda_updates[])(ampi_cuda_update) = {
    ampi_k_optimizer<AMPI_UPDATE_SGD>, ampi_k_optimizer<AMPI_UPDATE_MOMENTUM>,
    ampi_k_optimizer<AMPI_UPDATE_RMSPROP>, ampi_k_optimizer<AMPI_UPDATE_BUFFERED>,
    ampi_k_optimizer<AMPI_UPDATE_ADAM>
};

/* The launches of the update: one for each kind of the groups, or three for LAMB. */
AMPI_FN amp_result ampi_cuda_optimizer_apply(const amp_cuda_optimizer* o, const amp_exec* exec,
        const char* place) {
    const unsigned kinds = ampi_kinds(&o->host);
    for (int kind = 0; kind < AMPI_UPDATE_LAMB; kind++)
        if (kinds >> kind & 1)
            AMPI_TRY(ampi_cuda_optimizer_run(o, ampi_cuda_updates[kind], exec, place));
    if (!(kinds >> AMPI_UPDATE_LAMB)) return AMP_OK;
    AMPI_TRY(ampi_cuda_optimizer_run(o, ampi_k_optimizer<AMPI_LAMB_DIRECTION>, exec, place));
    AMPI_TRY(ampi_cuda_optimizer_run(o, NULL, exec, place));
    return ampi_cuda_optimizer_run(o, ampi_k_optimizer<AMPI_UPDATE_LAMB>, exec, place);
}

/* Looks at the gradients, unless a check has seen them. */
AMPI_FN amp_result ampi_cuda_optimizer_look(const amp_cuda_optimizer* o, amp_cuda_scaler* s,
        const ampi_tensors* t, int unscaled, const amp_exec* exec, const char* place) {
    ampi_cuda_look a;
    AMPI_CLEAR(a);
    a.list = -1;
    a.src = o->grads->list;
    if (ampi_optimizer_blind(&o->host, s ? &s->window : NULL)) return AMP_OK;
    if (s && ampi_optimizer_checked(&s->window, t)) return AMP_OK;
    if (s) a = ampi_cuda_look_of(s, o->grads, t);
    a.unscaled = unscaled;
    return ampi_cuda_look_at(&a, AMPI_LOOK, exec, place);
}

/* A step of o, whose gradients are scaled by s or not (NULL): checks on the host, then launches
   that look for inf and NaN, prepare the update and apply it. ends: 1 = the scaler's window ends
   with it, as by amp_cuda_scaler_update. */
AMPI_FN amp_result ampi_cuda_optimizer_launch(amp_cuda_optimizer* o, amp_cuda_scaler* s, int ends,
        const amp_exec* exec, const char* place) {
    ampi_cuda_prepare a;
    ampi_tensors t;
    int unscaled = 1;
    AMPI_CUDA_REFUSE_NULL(!o, "the optimizer");
    AMPI_TRY(ampi_optimizer_enter(&o->host, s ? &s->window : NULL, &t, place));

    /* a scaler without a logger speaks through the optimizer's */
    if (s) {
        const amp_logger own = s->window.logger;
        if (!own.log) s->window.logger = o->host.logger;
        const amp_result r = ampi_scaler_enter(&s->window, &t, AMPI_STEPPED, &unscaled);
        s->window.logger = own;
        AMPI_TRY(r);
    }

    /* without a scaler, `found` tells whether gradients are finite */
    AMPI_CLEAR(a);
    a.block = o->device;
    a.unscaled = unscaled;
    if (s) {
        a.scaler = s->device;
        a.list = ampi_cuda_list_number(&s->window, &t);
    } else if (!ampi_optimizer_blind(&o->host, NULL)) {
        a.found = o->grads->list.found;
    }

    /* a second warp of the preparation ends the window */
    AMPI_TRY(ampi_cuda_optimizer_look(o, s, &t, unscaled, exec, place));
    AMPI_TRY(ampi_cuda_launch(exec, place, ampi_k_prepare, 1, ends ? 64 : 32,
        16 * AMPI_CUDA_OPTIMIZER_UNITS, a));
    AMPI_TRY(ampi_cuda_optimizer_apply(o, exec, place));

    /* the host's list of what the window has */
    if (!s) return AMP_OK;
    if (ends) s->window.recorded = s->window.list_count = 0;
    else ampi_cuda_note(s, &t, AMPI_STEPPED);
    return AMP_OK;
}

/* One step; see the interface. */
AMP_DEF amp_result amp_cuda_optimizer_step(amp_cuda_optimizer* o, amp_cuda_scaler* s,
        const amp_exec* exec) {
    return ampi_cuda_optimizer_launch(o, s, 0, exec, "amp_cuda_optimizer_step");
}

/* All gradients become zero. */
AMP_DEF amp_result amp_cuda_optimizer_zero_grad(amp_cuda_optimizer* o, const amp_exec* exec) {
    static const char place[] = "amp_cuda_optimizer_zero_grad";
    AMPI_CUDA_REFUSE_NULL(!o, "the optimizer");
    if (o->grads->list.chunk_count == 0) return AMP_OK;
    return ampi_cuda_launch(exec, place, ampi_k_zero_list, ampi_cuda_chunk_grid(&o->grads->list),
        AMPI_CUDA_BLOCK, 0, o->grads->list);
}

/* What the device has found, with the name that the host knows. */
AMPI_FN amp_optimizer_info ampi_cuda_optimizer_told(const amp_cuda_optimizer* o,
        const ampi_cuda_optimizer_block* block) {
    amp_optimizer_info info = block->info;
    const char* name = NULL;
    info.update_tensor = -1;
    if (info.update_overflows + info.saturated > 0) {
        info.update_tensor = (int)(block->first >> AMPI_CUDA_PLACE_BITS);
        info.update_index = block->first & (((uint64_t)1 << AMPI_CUDA_PLACE_BITS) - 1);
        name = o->host.params[info.update_tensor].name;
    }
    if (name) strncpy(info.update_name, name, sizeof info.update_name - 1);
    return info;
}

/* The optimizer as the host knows it in *host, and the last step in *info; waits. */
AMP_DEF amp_result amp_cuda_optimizer_read(amp_cuda_optimizer* o, amp_optimizer* host,
        amp_optimizer_info* info, const amp_exec* exec) {
    ampi_cuda_optimizer_block block;
    if (!o) return ampi_cuda_missing(exec, "amp_cuda_optimizer_read", "the optimizer");
    AMPI_TRY(ampi_cuda_copy_out(&block, o->device, sizeof block, exec));
    if (host) {
        *host = o->host;
        host->state = block.o.state;
    }
    if (info) *info = ampi_cuda_optimizer_told(o, &block);
    return AMP_OK;
}

/* The state, or its learning rate alone, goes to the device after a check. */
AMPI_FN amp_result ampi_cuda_optimizer_put(amp_cuda_optimizer* o, const amp_optimizer_state* state,
        int lr_only, const amp_exec* exec, const char* place) {
    AMPI_TRY(ampi_optimizer_check_state(state, &o->host.logger, place));
    return ampi_cuda_launch(exec, place, ampi_k_optimizer_write, 1, 1, 0, o->device,
        *state, lr_only);
}

/* The whole state goes to the device. */
AMP_DEF amp_result amp_cuda_optimizer_write(amp_cuda_optimizer* o, const amp_optimizer_state* state,
        const amp_exec* exec) {
    static const char place[] = "amp_cuda_optimizer_write";
    AMPI_CUDA_REFUSE_NULL(!o || !state, o ? "state" : "the optimizer");
    return ampi_cuda_optimizer_put(o, state, 0, exec, place);
}

/* The learning rate goes to the device. */
AMP_DEF amp_result amp_cuda_optimizer_set_lr(amp_cuda_optimizer* o, float lr,
        const amp_exec* exec) {
    static const char place[] = "amp_cuda_optimizer_set_lr";
    amp_optimizer_state state;
    AMPI_CUDA_REFUSE_NULL(!o, "the optimizer");
    AMPI_CLEAR(state);
    state.lr = lr;
    return ampi_cuda_optimizer_put(o, &state, 1, exec, place);
}

/* >>impl-backend The table by which a model runs, its training state on the device, and steps
   recorded as graphs.
   Words. resident: the training state. record: a graph and its key. This room calls all others. */

/* --- a model opens and closes the context --- */

/* A context of the model's own, in its exec. */
AMPI_FN amp_result ampi_cuda_backend_open(amp_exec* exec, const void* desc,
        const amp_allocator* a) {
    const amp_logger* logger = exec->logger;
    amp_cuda* c;
    AMPI_TRY(ampi_cuda_make(&c, (const amp_cuda_desc*)desc, logger, a));
    c->trusted = 1;
    *exec = c->exec;
    exec->logger = logger;
    return AMP_OK;
}

/* The context that the exec names is destroyed. */
AMPI_FN void ampi_cuda_backend_close(amp_exec* exec, const amp_allocator*) {
    amp_cuda_destroy(ampi_cuda_context(exec));
    exec->context = exec->stream = NULL;
}

/* --- training --- */

/* What a model's training keeps beside its scaler and optimizer; the host's copies are those of the
   last read or write, so that a change made by the host is noticed. */
typedef struct ampi_cuda_training {
    amp_cuda_scaler*    scaler;
    amp_cuda_optimizer* optimizer;
    uint64_t*           position;        /* on the device: the pass that runs, counted from 0 */
    uint64_t            next_position;   /* what the next pass will find there, as things stand */
    amp_scaler_state    scaler_state;
    amp_optimizer_state optimizer_state;
} ampi_cuda_training;

AMPI_FN ampi_cuda_training* ampi_cuda_training_of(const amp_training* t) {
    return (ampi_cuda_training*)t->resident;
}

/* The training's state on the device is freed. */
AMPI_FN void ampi_cuda_training_close(amp_training* t, const amp_exec* exec) {
    ampi_cuda_training* own = ampi_cuda_training_of(t);
    if (!own) return;
    amp_cuda_optimizer_destroy(own->optimizer);
    amp_cuda_scaler_destroy(own->scaler);
    if (own->position) cudaFree(own->position);
    ampi_free(own, &ampi_cuda_context(exec)->allocator);
    t->resident = NULL;
}

/* Remembers what the host knows, to notice what it changes. */
AMPI_FN void ampi_cuda_training_note(const amp_training* t) {
    ampi_cuda_training* own = ampi_cuda_training_of(t);
    own->scaler_state = t->scaler.state;
    own->optimizer_state = t->optimizer.state;
}

/* Scaler, optimizer and counter of passes on the device. After an error the owner closes what was
   made. */
AMPI_FN amp_result ampi_cuda_training_make(amp_training* t, const amp_optimizer_desc* desc,
        amp_param* params, int count, const amp_exec* exec) {
    static const char place[] = "amp_cuda: training state";
    ampi_cuda_training* own = ampi_cuda_training_of(t);

    AMPI_TRY(ampi_cuda_check(exec, place, cudaMalloc((void**)&own->position, sizeof(uint64_t))));
    AMPI_TRY(ampi_cuda_zero(own->position, sizeof(uint64_t), exec));
    AMPI_TRY(ampi_cuda_scaler_clone(&own->scaler, &t->scaler, exec, place));
    AMPI_TRY(amp_cuda_optimizer_create(&own->optimizer, desc, params, count, exec));
    return amp_cuda_optimizer_read(own->optimizer, &t->optimizer, NULL, exec);
}

/* Scaler, optimizer and counter of passes are made on the device. */
AMPI_CUDA(training_open, amp_training* t, const amp_optimizer_desc* desc, amp_param* params,
        int count) {
    const amp_allocator* a = &ampi_cuda_context(exec)->allocator;
    ampi_cuda_training* own = (ampi_cuda_training*)ampi_alloc(sizeof *own, a);
    amp_result r;
    AMPI_REFUSE_WITH(exec->logger, !own, AMP_ERR_MEMORY,
        "amp_cuda: out of memory for the training state");
    memset(own, 0, sizeof *own);
    t->resident = own;
    r = ampi_cuda_training_make(t, desc, params, count, exec);
    if (r != AMP_OK) { ampi_cuda_training_close(t, exec); return r; }
    own->next_position = 1;
    ampi_cuda_training_note(t);
    return AMP_OK;
}

/* The groups of `from`, where they are not o's own. */
AMPI_FN amp_result ampi_cuda_optimizer_take_groups(amp_cuda_optimizer* o, const amp_optimizer* from,
        const amp_exec* exec) {
    if (memcmp(o->host.groups, from->groups, sizeof from->groups) == 0) return AMP_OK;
    AMPI_TRY(ampi_optimizer_check_rates(from, "amp_cuda: training step"));
    AMPI_TRY(ampi_cuda_copy_in(o->device->o.groups, from->groups, sizeof from->groups, exec));
    memcpy(o->host.groups, from->groups, sizeof from->groups);
    return AMP_OK;
}

/* The gradients of now: a model takes those of frozen parameters away, and gives them back. The
   kernels that a graph holds know the old list, and the layers' old gradients, so all graphs go
   with it. */
AMPI_FN amp_result ampi_cuda_optimizer_take_grads(amp_cuda_optimizer* o, const amp_exec* exec) {
    static const char place[] = "amp_cuda: training step";
    const ampi_tensors grads = ampi_grads_of(o->host.params, o->host.count);
    amp_cuda_tensors* made;
    amp_result r;
    int i = 0;
    while (i < grads.count && o->grads->tensors[i].data == o->host.params[i].grad) i++;
    if (i == grads.count) return AMP_OK;
    r = ampi_cuda_make_list(&made, &grads, exec, place);
    if (r == AMP_OK && (r = ampi_cuda_wait(exec, place)) != AMP_OK) amp_cuda_tensors_destroy(made);
    if (r != AMP_OK) return r;
    ampi_cuda_drop_records(ampi_cuda_context(exec));
    amp_cuda_tensors_destroy(o->grads);
    o->grads = made;
    return AMP_OK;
}

/* Hands over what the host has changed since the last read: a loaded checkpoint, a scale or rate
   set by hand. */
AMPI_FN amp_result ampi_cuda_training_write(amp_training* t, const amp_exec* exec) {
    ampi_cuda_training* own = ampi_cuda_training_of(t);
    if (memcmp(&own->scaler_state, &t->scaler.state, sizeof own->scaler_state) != 0)
        AMPI_TRY(amp_cuda_scaler_write(own->scaler, &t->scaler, exec));
    if (memcmp(&own->optimizer_state, &t->optimizer.state,
        sizeof own->optimizer_state) != 0)
        AMPI_TRY(amp_cuda_optimizer_write(own->optimizer, &t->optimizer.state, exec));
    AMPI_TRY(ampi_cuda_optimizer_take_groups(own->optimizer, &t->optimizer, exec));
    AMPI_TRY(ampi_cuda_optimizer_take_grads(own->optimizer, exec));
    ampi_cuda_training_note(t);
    return AMP_OK;
}

/* The device counts passes by itself, because a replayed graph has fixed arguments. */
AMPI_CUDA(training_begin, amp_training* t, int window) {
    ampi_cuda_training* own = ampi_cuda_training_of(t);
    uint64_t before = t->passes - 1;
    AMPI_TRY(ampi_cuda_training_write(t, exec));
    t->loss_scale = amp_cuda_scaler_loss_scale(own->scaler);
    t->position = NULL;
    if (!window || !ampi_cuda_context(exec)->desc.graph) return AMP_OK;
    t->position = own->position;
    if (own->next_position != t->passes)
        AMPI_TRY(ampi_cuda_copy_in(own->position, &before, sizeof before, exec));
    own->next_position = t->passes + 1;
    return AMP_OK;
}

/* The counter of passes on the device is raised by one; one thread. */
static __global__ void ampi_k_next_pass(uint64_t* position) {
    ampi_ptx_grid_wait();
    ++*position;
}

/* The device counts a recorded pass. */
AMPI_CUDA(training_pass, amp_training* t) {
    if (!t->position) return AMP_OK;
    return ampi_cuda_launch(exec, "amp_cuda: pass", ampi_k_next_pass, 1, 1, 0,
        ampi_cuda_training_of(t)->position);
}

/* A loss that is not finite makes the window unsound. */
AMPI_CUDA(training_losses, amp_training* t, const float* losses, int count) {
    return amp_cuda_scaler_check_loss(ampi_cuda_training_of(t)->scaler, losses, count, exec);
}

/* All gradients are checked; flags[2] on the device tell found_inf and unsound. */
AMPI_CUDA(training_check, amp_training* t, const amp_tensor*, int, float* flags) {
    ampi_cuda_training* own = ampi_cuda_training_of(t);
    AMPI_TRY(amp_cuda_scaler_check(own->scaler, own->optimizer->grads, exec));
    return ampi_cuda_launch(exec, "amp_cuda: export of found_inf", ampi_k_scaler_flag, 1, 1, 0,
        own->scaler->device, flags);
}

/* Flags of all ranks go to the scaler. */
AMPI_CUDA(training_agree, amp_training* t, const float* flags) {
    return ampi_cuda_scaler_raise(ampi_cuda_training_of(t)->scaler, flags, exec,
        "amp_cuda: import of found_inf");
}

/* The optimizer's step ends the window; after a skip `saved` goes back to `now`. */
AMPI_CUDA(training_step, amp_training* t, void* now, const void* saved, size_t bytes) {
    ampi_cuda_training* own = ampi_cuda_training_of(t);
    AMPI_TRY(ampi_cuda_optimizer_launch(own->optimizer, own->scaler, 1, exec,
        "amp_cuda_optimizer_step"));
    return bytes ? ampi_cuda_copy_if_skipped(now, saved, bytes, own->scaler, exec) : AMP_OK;
}

/* The host's copies of scaler, optimizer and last step; waits. */
AMPI_CUDA(training_read, amp_training* t) {
    ampi_cuda_training* own = ampi_cuda_training_of(t);
    int hit;
    AMPI_TRY(amp_cuda_optimizer_read(own->optimizer, &t->optimizer, &t->last, exec));
    AMPI_TRY(ampi_cuda_scaler_fetch(own->scaler, &t->scaler, &t->scale_used, &hit, exec));
    t->last.overflow = t->scaler.info;
    ampi_cuda_training_note(t);
    t->limit = ampi_scaler_limits(&t->scaler, hit);      /* on_limit may set the scale */
    return AMP_OK;
}

AMPI_FN void ampi_cuda_training_abandon(amp_training* t, const amp_exec* exec) {
    ampi_cuda_scaler_abandon(ampi_cuda_training_of(t)->scaler, exec);
}

/* --- recording a step --- */

/* The recorded step with this key, or NULL. */
AMPI_FN ampi_cuda_record* ampi_cuda_find_record(amp_cuda* c, uint64_t key) {
    int i;
    for (i = 0; i < c->record_count; i++) if (c->records[i].key == key) return &c->records[i];
    return NULL;
}

/* First call with a key: run. Second: record. From then on: replay. More keys than places: run. */
AMPI_CUDA(record_begin, amp_training*, uint64_t key, amp_record* mode) {
    amp_cuda* c = ampi_cuda_context(exec);
    ampi_cuda_record* found = ampi_cuda_find_record(c, key);
    cudaStream_t stream = ampi_cuda_stream(exec);
    *mode = AMP_RECORD_OFF;
    if (!c->desc.graph) return AMP_OK;
    if (!found) {
        if (c->record_count < AMPI_CUDA_RECORDS) c->records[c->record_count++].key = key;
        return AMP_OK;
    }
    if (found->graph) {
        *mode = AMP_RECORD_REPLAYED;
        return ampi_cuda_check(exec, "amp_cuda: graph", cudaGraphLaunch(found->graph, stream));
    }
    *mode = AMP_RECORD_ON;
    c->recording = found;
    return ampi_cuda_check(exec, "amp_cuda: capture",
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

/* What was captured has not run yet: the new graph is launched at once. */
AMPI_CUDA(record_end, amp_training*, amp_result body) {
    amp_cuda* c = ampi_cuda_context(exec);
    cudaStream_t stream = ampi_cuda_stream(exec);
    cudaGraphExec_t ready = NULL;
    cudaGraph_t graph = NULL;
    cudaError_t e = cudaStreamEndCapture(stream, &graph);
    if (e == cudaSuccess && body == AMP_OK) e = cudaGraphInstantiateWithFlags(&ready, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (body != AMP_OK) { cudaGetLastError(); return body; }
    if (e != cudaSuccess) return ampi_cuda_check(exec, "amp_cuda: graph", e);
    c->recording->graph = ready;
    return ampi_cuda_check(exec, "amp_cuda: graph", cudaGraphLaunch(ready, stream));
}

#define AMPI_CUDA_BOTH(op) ampi_cuda_##op##_forward, ampi_cuda_##op##_backward
/* The GPU's table, in the order of amp_backend: most entries have their own names. <1>: with
   ReLU. */
AMP_DEF const amp_backend* amp_cuda_backend(void) {
    static const amp_backend cuda = {
        "cuda", 1 /* asynchronous */, ampi_cuda_backend_open, ampi_cuda_backend_close,

        /* memory and inputs */
        ampi_cuda_alloc, ampi_cuda_free, ampi_cuda_reaches, ampi_cuda_zero, ampi_cuda_copy,
        ampi_cuda_copy_in, ampi_cuda_copy_out, ampi_cuda_upload, ampi_cuda_download,
        amp_cuda_convert, ampi_cuda_load,

        /* operators */
        ampi_cuda_gemm_workspace, ampi_cuda_conv2d_workspace, ampi_cuda_layer_norm_workspace,
        ampi_cuda_attention_workspace,
        ampi_cuda_gemm, ampi_cuda_linear_forward<0>, ampi_cuda_linear_backward,
        ampi_cuda_conv2d_forward<0>, ampi_cuda_conv2d_backward,
        AMPI_CUDA_BOTH(conv_transpose2d), AMPI_CUDA_BOTH(pool2d),
        AMPI_CUDA_BOTH(batch_norm), AMPI_CUDA_BOTH(group_norm), AMPI_CUDA_BOTH(layer_norm),
        AMPI_CUDA_BOTH(rms_norm),
        AMPI_CUDA_BOTH(activation), AMPI_CUDA_BOTH(leaky_relu), AMPI_CUDA_BOTH(softmax),
        ampi_cuda_dropout_forward,
        ampi_cuda_add_forward, AMPI_CUDA_BOTH(mul), AMPI_CUDA_BOTH(concat),
        ampi_cuda_transpose_forward,
        AMPI_CUDA_BOTH(embedding), AMPI_CUDA_BOTH(attention), AMPI_CUDA_BOTH(rope),
        AMPI_CUDA_BOTH(softmax_cross_entropy),
        ampi_cuda_loss_forward<AMPI_MSE>, ampi_cuda_loss_backward<AMPI_MSE>,
        ampi_cuda_loss_forward<AMPI_BCE>, ampi_cuda_loss_backward<AMPI_BCE>,
        ampi_cuda_loss_forward<AMPI_MEAN>, ampi_cuda_loss_backward<AMPI_MEAN>,

        ampi_cuda_training_open, ampi_cuda_training_close, ampi_cuda_training_begin,
        ampi_cuda_training_pass, ampi_cuda_training_losses, ampi_cuda_training_check,
        ampi_cuda_training_agree, ampi_cuda_training_step, ampi_cuda_training_read,
        ampi_cuda_training_abandon, ampi_cuda_record_begin, ampi_cuda_record_end,
        ampi_cuda_linear_forward<1>, ampi_cuda_conv2d_forward<1>
    };
    return &cuda;
}

#endif /* AMP_IMPLEMENTATION */
