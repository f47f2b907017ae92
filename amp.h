/* amp.h - train neural networks in mixed precision, from one C header.    MIT licence, text at the end.

   In ONE C or C++ file of your program:          Everywhere else (and twice does no harm):
       #define AMP_IMPLEMENTATION                     #include "amp.h"
       #include "amp.h"
   Build it with any C99 or C++11 compiler, no flag is needed and no library but -lm.

   [TOC]   jump: search for ">>name"
     guide        what there is, in the order you may want to read it
     config       version, option macros
     base         result codes, data types, logger, allocator, random numbers
     cpu          the instruction set in use
     half         IEEE half and bfloat16, conversions
     ops          operators on raw pointers: gemm, dense, convolution, pooling, norms, activations, losses
     policy       autocast: which operator runs in which type, O0 to O3
     scaler       the loss scale
     optim        optimizers on FP32 master weights
     model        a network as a graph
     train        the training step, evaluation
     checkpoint   save and load (safetensors)
     report       what a person wants to see
     impl         the implementation, in the same order: impl-base, impl-cpu, impl-half, impl-gemm, impl-math,
                  impl-nn, impl-policy, impl-scaler, impl-optim, impl-backend, impl-model, impl-train,
                  impl-checkpoint, impl-report
     license      MIT */

/* ======================================================================================== */
/* >>guide    Read this once.                                                                 */
/* ======================================================================================== */
/*
   Three ways in.
   1. You have a training loop with your own memory. Take single parts: amp_convert and amp_gemm for half
      operands, amp_scaler_* for the loss scale, amp_optimizer_* for master weights. They own nothing and
      keep no global state.
          once:      amp_scaler_init(&scaler, NULL);  amp_optimizer_init(&optimizer, &desc, params, count);
          per step:  loss gradient = amp_scaler_scale_loss(&scaler, 1.0f) * d;   your backward pass;
                     amp_optimizer_step(&optimizer, &scaler, &info);   amp_scaler_update(&scaler);
   2. You want to train a network: amp_model_create, build it with amp_conv2d, amp_relu, ..., then
      amp_model_finalize, then amp_train_step for each batch.
   3. You want to look: amp_model_print, amp_stats_collect, amp_model_stats.

   Words.     half: IEEE binary16. low: the 16-bit type in use, half or bfloat16. master weights: the FP32
   weights that an optimizer updates; a low copy is written in the same pass. loss scale: the factor that
   keeps small gradients out of half's underflow. unscale: dividing it out again, in FP32. found_inf: a
   gradient is inf or NaN, so the step is skipped.
   Letters.   N images or rows, C channels, H x W pixels, I inputs, O outputs, K classes, R rows, D their
   length.
   Numbers.   Operands are stored in 16 bits; products and sums are carried in FP32; each result is
   rounded once, to nearest even. That is what a Tensor Core does. Losses, norm statistics, softmax and
   optimizers are FP32 inside. Checks for inf and NaN look at the bits in memory, so they hold under
   -ffast-math and -Ofast too.
   The same bits everywhere. A run on the CPU gives the same bits on each instruction set, compiler,
   optimisation level and number of threads: every multiply-add is an explicit fma (emulated exactly where
   there is none), every sum has a fixed order, exp and its kin are the header's own. What breaks it:
   -Ofast or -ffast-math, a changed floating-point environment (rounding mode, flush to zero), a GPU, and
   the wish for speed: AMP_SUMS_FAST, in a model's desc or an exec, hands 16-bit products to the matrix unit
   of the processor, whose order of sums is its own.
   Errors.    A function that can fail on bad input returns an amp_result (0 = AMP_OK) and changes nothing
   when it fails. The logger of its desc or exec gets one sentence that names the place. Nothing prints,
   exits or aborts. An overflow in training is not an error: amp_step_info tells about it. Without a
   logger in reach (a NULL object, amp_convert) the code is all there is.
   Descs.     A zeroed struct is all defaults, 0 in a field is that field's default, AMP_ZERO (-1) is a
   real zero where 0 means something else. NULL is all defaults. In C++, {} works where a desc is
   expected.
   Threads.   Objects are independent of each other; one object is not to be used by two threads at once.
   With -fopenmp large operators use threads, with the same bits.
   GPUs.      amp_cuda.cuh, a file of its own, has a backend on which the same model trains.
   Memory.    Parts on raw pointers allocate nothing. A model allocates in create, build and finalize,
   never in a step. Adam costs 16 bytes per parameter in FP32 and 18 in mixed precision, 16 with 16-bit
   weight gradients; the halving is in the activations.
   Hosts that unmask floating-point exceptions: training steps, evaluation, predictions, statistics, the
   checks of gradients and saturating casts mask them while they run, because inf and NaN are data there, and
   leave no flag. They do so for the calling thread; OpenMP's threads keep the state they began with. Other
   operators and casts raise what IEEE 754 says: cast with amp_convert_desc.saturate.
   <amp.h> with angle brackets is another header on Windows (C++ AMP): include this one with quotes. */

#ifndef AMP_H_INCLUDED
#define AMP_H_INCLUDED

/* ======================================================================================== */
/* >>config   Version, and the option macros (define them before the include).               */
/* ======================================================================================== */
#include <stddef.h>
#include <stdint.h>
#if !defined(AMP_NO_STDIO)
  #include <stdio.h>
#endif

#define AMP_VERSION_MAJOR 0
#define AMP_VERSION_MINOR 1
#define AMP_VERSION_PATCH 0
#define AMP_VERSION (AMP_VERSION_MAJOR * 10000 + AMP_VERSION_MINOR * 100 + AMP_VERSION_PATCH)

/* Option macros. None of them changes the layout of a struct, so files may differ in them.
     AMP_IMPLEMENTATION  emit the implementation here; define it in exactly one file
     AMP_STATIC          every function static: a private copy, in files that define AMP_IMPLEMENTATION
     AMP_DEF             your own linkage for public functions, e.g. __declspec(dllexport)
     AMP_NO_SIMD         portable C only: no intrinsics, no cpuid; the same bits, slower
     AMP_NO_OPENMP       no threads although the compiler has OpenMP switched on
     AMP_NO_STDIO        no FILE, no files: removes checkpoint, print and the stderr logger   */
#ifndef AMP_DEF
  #if defined(AMP_STATIC) && (defined(__GNUC__) || defined(__clang__))
    #define AMP_DEF static __attribute__((unused))
  #elif defined(AMP_STATIC)
    #define AMP_DEF static
  #else
    #define AMP_DEF extern
  #endif
#endif

/* Functions that a host and a CUDA device both run. */
#if defined(__CUDACC__)
  #define AMPI_HD __host__ __device__
#else
  #define AMPI_HD
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ======================================================================================== */
/* >>base     Result codes, data types, logger, allocator, execution context, random numbers. */
/* ======================================================================================== */

/* One table makes the enum and the texts. 0 is success; a call that fails has changed nothing. */
#define AMP_RESULT_LIST(X)                                                        \
    X(OK,                0, "success")                                            \
    X(ERR_ARGUMENT,     -1, "a pointer or a size is not valid")                   \
    X(ERR_DESC,         -2, "a desc field is out of its range")                   \
    X(ERR_SHAPE,        -3, "shapes do not fit together")                         \
    X(ERR_DTYPE,        -4, "this data type is not supported here")               \
    X(ERR_MEMORY,       -5, "the allocator returned NULL")                        \
    X(ERR_STATE,        -6, "the call comes at the wrong time")                   \
    X(ERR_POLICY,       -7, "an illegal combination of precision settings")       \
    X(ERR_OVERFLOW,     -8, "overflow persists: the limit set in the desc is reached") \
    X(ERR_IO,           -9, "a file could not be opened, read or written")        \
    X(ERR_FORMAT,      -10, "the data is truncated, foreign or malformed")        \
    X(ERR_UNSUPPORTED, -11, "not available in this build or on this machine")     \
    X(ERR_COMM,        -12, "the communication hook reported a failure")          \
    X(ERR_DEVICE,      -13, "the GPU or its driver reported an error")
#define AMPI_X(name, code, text) AMP_##name = code,
typedef enum amp_result { AMP_RESULT_LIST(AMPI_X) AMPI_RESULT_MAX = 0x7fffffff } amp_result;
#undef AMPI_X

/* Text of a result code; never NULL. */
AMP_DEF const char* amp_result_string(amp_result r);

/* In a desc: "really zero", where plain 0 means "the default". */
#define AMP_ZERO (-1)

/* Element types. 0 means "default", which is AMP_F32 unless a field says otherwise. */
typedef enum amp_dtype {
    AMP_DTYPE_DEFAULT = 0,
    AMP_F32  = 1,   /* float                                   */
    AMP_F16  = 2,   /* amp_half: IEEE binary16, max 65504       */
    AMP_BF16 = 3,   /* amp_bfloat16: upper half of a float      */
    AMP_F64  = 4,   /* double; conversions and statistics only  */
    AMPI_DTYPE_MAX = 0x7fffffff
} amp_dtype;

/* Bytes of one element; 0 for a value that is not an amp_dtype. AMP_DTYPE_DEFAULT counts as AMP_F32. */
AMP_DEF size_t amp_dtype_size(amp_dtype t);
/* "f32", "f16", "bf16", "f64"; "?" for a value that is not an amp_dtype. */
AMP_DEF const char* amp_dtype_name(amp_dtype t);

/* Receives one sentence (no newline) for each refused call: what is wrong, and where. */
typedef struct amp_logger {
    void (*log)(amp_result code, const char* sentence, void* user_data);
    void* user_data;
} amp_logger;

#if !defined(AMP_NO_STDIO)
/* Ready-made log function: writes "amp: <sentence>" and a newline to stderr. */
AMP_DEF void amp_log_stderr(amp_result code, const char* sentence, void* user_data);
#endif

/* Memory source. Both functions or neither; zeroed = malloc and free. alloc returns NULL on failure and
   memory aligned as malloc's. */
typedef struct amp_allocator {
    void* (*alloc)(size_t size, void* user_data);
    void  (*free)(void* ptr, void* user_data);
    void* user_data;
} amp_allocator;

/* In which order a product of two 16-bit operands adds up.
   FIXED: one order for all processors (amp_gemm tells which), so a run has the same bits everywhere.
   FAST: the order of the processor's matrix unit, where it has one and the product is large enough: BF16 is
   several times as fast, F16, which takes four products for one, up to twice, and not on every machine faster.
   The bits then depend on the processor (and, in a convolution, on whether there is a workspace of the size that
   amp_conv2d_workspace tells), but still not on threads or on the run.
   Today this is Intel's AMX on Linux; elsewhere FAST is FIXED. In that unit BF16 subnormals and sums below
   2^-126 count as zero; an infinite FP16 operand may give NaN where FIXED gives infinity, and so may an infinite
   pixel at the edge of an image in a convolution's weight gradient. A GPU has one order of its own. */
typedef enum amp_sums { AMP_SUMS_FIXED = 0, AMP_SUMS_FAST = 1, AMPI_SUMS_MAX = 0x7fffffff } amp_sums;

/* How an operator runs. NULL or zeroed = no scratch memory, silent. Every operator gives the same bits
   with and without a workspace; with one, large matrix products are much faster. (For AMP_SUMS_FAST see there.) */
typedef struct amp_exec {
    void*  workspace;            /* scratch memory (a GPU's own on a GPU), any alignment; NULL = small blocks on
                                    the stack */
    size_t workspace_size;       /* bytes */
    const amp_logger* logger;    /* NULL = silent */
    void*  stream;               /* cudaStream_t on a GPU; ignored by the CPU */
    void*  context;              /* the backend's own, set by a model or amp_cuda_exec; else NULL */
    amp_sums sums;               /* 0 = AMP_SUMS_FIXED */
} amp_exec;

/* A list of tensors is an array of these. Nothing is owned. */
typedef struct amp_tensor {
    void*       data;            /* count elements; may be NULL if count is 0 */
    amp_dtype   dtype;           /* 0 = AMP_F32 */
    size_t      count;
    const char* name;            /* for messages; may be NULL */
} amp_tensor;

/* Counter-based random numbers (Philox4x32-10; Salmon et al., SC 2011): a pure function of seed and
   position, the same on every machine. 32 uniform bits; floats in [0,1) with 24 random bits; a standard
   normal deviate (Box-Muller on positions 2*index, 2*index+1 of the stream). */
AMPI_HD AMP_DEF uint32_t amp_random_bits(uint64_t seed, uint64_t index);
AMPI_HD AMP_DEF float    amp_random_uniform(uint64_t seed, uint64_t index);
AMP_DEF float    amp_random_normal(uint64_t seed, uint64_t index);

/* ======================================================================================== */
/* >>cpu      Which instructions the kernels use. The results are the same bits on each.      */
/* ======================================================================================== */

typedef enum amp_isa {
    AMP_ISA_AUTO   = 0,   /* the best that this processor has */
    AMP_ISA_SCALAR = 1,   /* portable C */
    AMP_ISA_NEON   = 2,   /* aarch64 */
    AMP_ISA_AVX2   = 3,   /* AVX2 + FMA + F16C */
    AMP_ISA_AVX512 = 4,   /* AVX-512 F, BW, DQ, VL */
    AMP_ISA_AVX512_BF16 = 5,   /* and vdpbf16ps for products of bfloat16: the best on AMD, where it is twice as
                                  fast as fma; on Intel it is slower and taken only if asked for */
    AMPI_ISA_MAX   = 0x7fffffff
} amp_isa;

/* The instruction set in use. Chosen at the first call by cpuid, or by the environment variable
   AMP_ISA = scalar | neon | avx2 | avx512 | avx512_bf16; any other word, or one that is not available, is ignored: the
   answer tells. */
AMP_DEF amp_isa amp_cpu_isa(void);
/* For tests: changes the choice for the whole process; AMP_ISA_AUTO goes back to the best. Not to be called
   while another thread is inside the library. AMP_ERR_UNSUPPORTED, and no change, if it is not available. */
AMP_DEF amp_result amp_cpu_force_isa(amp_isa isa);
/* 1 if AMP_SUMS_FAST has a matrix unit to use in this process with the instruction set in use, else 0. On Linux
   this asks the system for its use. */
AMP_DEF int amp_cpu_has_fast_sums(void);
/* "scalar", "neon", "avx2", "avx512", "avx512_bf16"; "?" for any other value. */
AMP_DEF const char* amp_isa_name(amp_isa isa);

/* ======================================================================================== */
/* >>half     IEEE half and bfloat16, conversions one by one and in bulk.                     */
/* ======================================================================================== */

/* Structs, never a bare uint16_t: adding two halves must not compile. */
typedef struct amp_half     { uint16_t bits; } amp_half;       /* 1 sign, 5 exponent, 10 fraction bits */
typedef struct amp_bfloat16 { uint16_t bits; } amp_bfloat16;   /* 1 sign, 8 exponent,  7 fraction bits */

#define AMP_HALF_MAX      65504.0f          /* largest finite half             */
#define AMP_HALF_MIN      6.103515625e-5f   /* smallest normal half, 2^-14     */
#define AMP_HALF_TRUE_MIN 5.9604644775390625e-8f /* smallest subnormal, 2^-24  */

/* To 16 bits: round to nearest, ties to even; too large becomes infinity, too small becomes a subnormal or
   a signed zero; a NaN stays a NaN, made quiet, with the upper bits of its payload. Integer arithmetic only,
   so correct under any compiler flag. From double directly: going through float would round twice. */
AMP_DEF amp_half     amp_half_from_float(float f);
AMP_DEF amp_half     amp_half_from_double(double d);
AMP_DEF amp_bfloat16 amp_bfloat16_from_float(float f);
AMP_DEF amp_bfloat16 amp_bfloat16_from_double(double d);
/* From 16 bits: exact; a signalling NaN is made quiet. */
AMP_DEF float  amp_half_to_float(amp_half h);
AMP_DEF double amp_half_to_double(amp_half h);
AMP_DEF float  amp_bfloat16_to_float(amp_bfloat16 h);
AMP_DEF double amp_bfloat16_to_double(amp_bfloat16 h);
/* Tests on the bits of *p as they lie in memory: right under -ffast-math too. Return 0 or 1. */
AMP_DEF int amp_half_is_nan(amp_half h);
AMP_DEF int amp_half_is_inf(amp_half h);
AMP_DEF int amp_half_is_finite(amp_half h);
AMP_DEF int amp_bfloat16_is_nan(amp_bfloat16 h);
AMP_DEF int amp_bfloat16_is_inf(amp_bfloat16 h);
AMP_DEF int amp_bfloat16_is_finite(amp_bfloat16 h);
AMP_DEF int amp_float_is_nan(const float* p);
AMP_DEF int amp_float_is_inf(const float* p);
AMP_DEF int amp_float_is_finite(const float* p);

/* Converts n elements; equal types are copied bit by bit. dst == src is allowed in every direction, any other
   overlap is not. Pointers are aligned as their element type is.
   Errors: AMP_ERR_ARGUMENT (NULL with n > 0, n too large, overlap), AMP_ERR_DTYPE. */
AMP_DEF amp_result amp_convert(void* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype,
                               size_t n);

/* Stochastic rounding goes away from zero if the element's 32 random bits are below the first 32 bits of the
   fraction cut off. Exact values stay. Between the largest finite value and the next power of two the
   choice is between the two ends, of which the upper one is infinity. */
typedef enum amp_rounding {
    AMP_ROUND_NEAREST    = 0,   /* nearest, ties to even */
    AMP_ROUND_STOCHASTIC = 1,   /* up in magnitude with a probability equal to the fraction cut off */
    AMPI_ROUNDING_MAX    = 0x7fffffff
} amp_rounding;

typedef struct amp_convert_desc {
    int          saturate;      /* 1 = what would become or is +-infinity becomes the largest finite value of
                                   dst_dtype, for hosts that trap floating-point exceptions; NaN stays NaN.
                                   No conversion with this flag raises an exception */
    amp_rounding rounding;      /* 0 = nearest; stochastic needs a 16-bit dst_dtype */
    uint64_t     seed;          /* of the stochastic stream */
    uint64_t     offset;        /* stream position of element 0: element i uses offset + i */
    size_t*      saturated;     /* NULL, or a counter that is increased by the number of clamped elements */
    const amp_logger* logger;   /* NULL = silent */
} amp_convert_desc;

/* amp_convert with options; desc == NULL is amp_convert. Also AMP_ERR_DESC: a rounding that is not known, or
   stochastic rounding to a wider type. */
AMP_DEF amp_result amp_convert_with(void* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype,
                                    size_t n, const amp_convert_desc* desc);

/* ======================================================================================== */
/* >>ops      Operators on raw pointers, usable alone. Forward beside backward.               */
/* ======================================================================================== */

/* Rules that hold for all of them.
   - Row-major, densely packed tensors (only amp_gemm has leading dimensions). Images are N,C,H,W.
   - Letters: N images or rows of a batch, C channels, H x W pixels, I inputs, O outputs, K classes,
     R rows, D length of a row.
   - Each operand has a data type of its own (F32, F16, BF16): values are widened, arithmetic and sums are
     FP32, each result element is rounded once, to nearest even, to its type.
   - Each output element is summed in one fixed order, so the bits depend on nothing but the inputs (and, with
     AMP_SUMS_FAST, on the processor).
   - A gradient output pointer may be NULL: that gradient is not wanted.
   - `accumulate` != 0 adds to what the gradient buffer holds instead of overwriting it.
   - The last parameter may be NULL. Errors: AMP_ERR_ARGUMENT, AMP_ERR_DESC, AMP_ERR_SHAPE, AMP_ERR_DTYPE,
     found before anything is written.
   - Inputs and outputs do not overlap, except where "may be the same" is said. */

/* --- matrix product -------------------------------------------------------------------- */

typedef enum amp_transpose { AMP_NO_TRANS = 0, AMP_TRANS = 1, AMPI_TRANSPOSE_MAX = 0x7fffffff } amp_transpose;

/* C = alpha * op(A) * op(B) + beta * C.   op(A): m x k, op(B): k x n, C: m x n, row-major.
   lda, ldb, ldc: elements from one row *as stored* to the next; A is stored m x k, or k x m if transposed.
   beta == 0 overwrites C without reading it (it may hold NaN). k == 0 or alpha == 0: C = beta * C.
   Order: acc = fma(a, b, acc) for k ascending, from +0; for two BF16 operands in the order 1,0,3,2,5,4,...
   (an odd k is padded by one zero), which is the order of the vdpbf16ps instruction. With AMP_SUMS_FAST, two
   operands of one 16-bit type, m and n at least 16 (F16: 32), k at least 32, on a processor with AMX: blocks of
   32 k (F16: 8), each of two chains of fma from +0 that are added and then added to acc, see impl-gemm.
   Then: alpha*acc is rounded once if alpha != 1, beta*C is added by one fma if beta != 0.
   A NaN in the result is the quiet NaN 0x7fc00000 rounded to C's type, whatever NaN went in (not so with
   AMP_SUMS_FAST). */
AMP_DEF amp_result amp_gemm(amp_transpose trans_a, amp_transpose trans_b, size_t m, size_t n, size_t k,
                            float alpha, const void* a, amp_dtype a_dtype, size_t lda,
                            const void* b, amp_dtype b_dtype, size_t ldb,
                            float beta, void* c, amp_dtype c_dtype, size_t ldc, const amp_exec* exec);
/* Bytes of workspace with which amp_gemm of this size runs at full speed: at most about 4.2 MB for each
   thread, less for small products. 0 if the size overflows. A dense layer's forward call is a product of
   (n, out, in), its backward call one of (n, in, out) and one of (out, in, n). */
AMP_DEF size_t amp_gemm_workspace(size_t m, size_t n, size_t k);

/* --- dense layer ----------------------------------------------------------------------- */

/* y[N,O] = x[N,I] * w[O,I]^T + b[O].   b may be NULL. */
AMP_DEF amp_result amp_linear_forward(const void* x, amp_dtype x_dtype, const void* w, amp_dtype w_dtype,
                                      const void* b, amp_dtype b_dtype, void* y, amp_dtype y_dtype,
                                      size_t n, size_t in, size_t out, const amp_exec* exec);
/* dx[N,I] = dy * w,  dw[O,I] = dy^T * x,  db[O] = column sums of dy. accumulate applies to dw and db;
   dx is always overwritten. */
AMP_DEF amp_result amp_linear_backward(const void* dy, amp_dtype dy_dtype, const void* x, amp_dtype x_dtype,
                                       const void* w, amp_dtype w_dtype, void* dx, amp_dtype dx_dtype,
                                       void* dw, amp_dtype dw_dtype, void* db, amp_dtype db_dtype,
                                       int accumulate, size_t n, size_t in, size_t out, const amp_exec* exec);

/* --- convolution ----------------------------------------------------------------------- */

/* Shapes of a 2-D convolution: x[N,C,H,W], w[O,C/groups,KH,KW], b[O], y[N,O,OH,OW] with
   OH = (H + 2*pad_h - dilation_h*(KH-1) - 1) / stride_h + 1, and OW likewise. */
typedef struct amp_conv2d_shape {
    int n, channels, height, width;    /* of x; each >= 1 */
    int out_channels;                  /* >= 1, a multiple of groups */
    int kernel_h, kernel_w;            /* >= 1 */
    int stride_h, stride_w;            /* 0 = 1 */
    int pad_h, pad_w;                  /* zeros on each side; 0 = none */
    int dilation_h, dilation_w;        /* 0 = 1 */
    int groups;                        /* 0 = 1; divides channels; groups == channels is depthwise */
} amp_conv2d_shape;

/* OH and OW of a shape. AMP_ERR_DESC / AMP_ERR_SHAPE as the operators would report. */
AMP_DEF amp_result amp_conv2d_output(const amp_conv2d_shape* s, int* out_h, int* out_w, const amp_exec* exec);
/* Bytes of workspace with which the three calls below run at full speed. 0 if the shape is not valid. */
AMP_DEF size_t amp_conv2d_workspace(const amp_conv2d_shape* s);
AMP_DEF amp_result amp_conv2d_forward(const amp_conv2d_shape* s, const void* x, amp_dtype x_dtype,
                                      const void* w, amp_dtype w_dtype, const void* b, amp_dtype b_dtype,
                                      void* y, amp_dtype y_dtype, const amp_exec* exec);
/* dx, dw, db from dy[N,O,OH,OW]. accumulate applies to dw and db, dx is always overwritten. Orders of the
   sums, each as in amp_gemm: y over (c, kh, kw); dw over (n, oh, ow), the whole batch as one sum; dx over
   (o, kh, kw), with zeros where no output pixel met that kernel position; db: 16 partial sums (pixel p of
   each plane to sum p % 16), then a tree.
   With AMP_SUMS_FAST, two operands of one 16-bit type, at least 16 channels and outputs of a group, strides of 1 or 2
   and at most 64 kernel positions (F16: more than one, and at most 1,048,576 weights in a group), a sum is made of the
   same blocks of 32 (F16: 8) as in amp_gemm: y over blocks of c, in each over (kh, kw), a block each; dx likewise over
   o and those (kh, kw) that the strides let meet the pixel; dw image by image over the places of the rows of dy, each
   row followed by zeros up to max(OW, (W + pad_w) / stride_w, rounded up) places. (dw: if one image takes no more than
   4 MB as the unit's tiles, 8 bytes for each F16 place; F16: strides of 1.) */
AMP_DEF amp_result amp_conv2d_backward(const amp_conv2d_shape* s, const void* dy, amp_dtype dy_dtype,
                                       const void* x, amp_dtype x_dtype, const void* w, amp_dtype w_dtype,
                                       void* dx, amp_dtype dx_dtype, void* dw, amp_dtype dw_dtype,
                                       void* db, amp_dtype db_dtype, int accumulate, const amp_exec* exec);

/* --- pooling --------------------------------------------------------------------------- */

typedef enum amp_pool { AMP_POOL_MAX = 0, AMP_POOL_AVERAGE = 1, AMPI_POOL_MAX_ENUM = 0x7fffffff } amp_pool;

/* x[N,C,H,W] -> y[N,C,OH,OW], OH = (H + 2*pad_h - kernel_h) / stride_h + 1. Padding never wins a maximum; an
   average counts padding as zeros unless exclude_pad. A global pool has kernel = height, width. */
typedef struct amp_pool2d_shape {
    amp_pool kind;
    int n, channels, height, width;    /* of x; each >= 1 */
    int kernel_h, kernel_w;            /* >= 1 */
    int stride_h, stride_w;            /* 0 = the kernel's size */
    int pad_h, pad_w;                  /* at most half of the kernel */
    int exclude_pad;                   /* average only: divide by the pixels that exist */
} amp_pool2d_shape;

/* OH and OW of a shape, with the errors that the operators would report. */
AMP_DEF amp_result amp_pool2d_output(const amp_pool2d_shape* s, int* out_h, int* out_w, const amp_exec* exec);
/* A NaN in a window makes its maximum NaN. */
AMP_DEF amp_result amp_pool2d_forward(const amp_pool2d_shape* s, const void* x, amp_dtype x_dtype,
                                      void* y, amp_dtype y_dtype, const amp_exec* exec);
/* dx from dy; the gradient of a maximum goes to the first position that holds it (x is needed for that;
   x may be NULL for an average). */
AMP_DEF amp_result amp_pool2d_backward(const amp_pool2d_shape* s, const void* dy, amp_dtype dy_dtype,
                                       const void* x, amp_dtype x_dtype, void* dx, amp_dtype dx_dtype,
                                       const amp_exec* exec);

/* --- normalisation --------------------------------------------------------------------- */

/* Batch norm over x[N,C,S] (S = H*W, or 1): y = (x - mean_c) / sqrt(var_c + eps) * gamma_c + beta_c.
   Parameters, statistics and their gradients may have any type; the arithmetic is FP32.
   training: mean and (biased) variance of this batch, written to save_mean[C] and save_invstd[C], and
     running = (1-momentum)*running + momentum*batch (running variance: unbiased), as PyTorch does.
   evaluation (training == 0): the running statistics; save_* may be NULL. */
typedef struct amp_batch_norm_shape {
    int   n, channels, spatial;        /* each >= 1; n*spatial >= 2 in training */
    float eps;                         /* 0 = 1e-5 */
    float momentum;                    /* 0 = 0.1; in (0,1], AMP_ZERO = leave the running statistics alone */
} amp_batch_norm_shape;

/* gamma[C], beta[C], running_mean[C], running_var[C]; y may not be x. */
AMP_DEF amp_result amp_batch_norm_forward(const amp_batch_norm_shape* s, int training, const void* x,
                                          amp_dtype x_dtype, const void* gamma, const void* beta,
                                          amp_dtype param_dtype, float* running_mean, float* running_var,
                                          float* save_mean, float* save_invstd, void* y, amp_dtype y_dtype,
                                          const amp_exec* exec);
/* Gradients of the training form. accumulate applies to dgamma and dbeta. dx and dy may be the same if their
   types are. */
AMP_DEF amp_result amp_batch_norm_backward(const amp_batch_norm_shape* s, const void* dy,
                                           amp_dtype dy_dtype, const void* x, amp_dtype x_dtype,
                                           const void* gamma, amp_dtype param_dtype, const float* save_mean,
                                           const float* save_invstd, void* dx, amp_dtype dx_dtype,
                                           void* dgamma, void* dbeta, amp_dtype dparam_dtype,
                                           int accumulate, const amp_exec* exec);

/* Layer norm over the rows of x[R,D]; gamma[D], beta[D] may be NULL (1 and 0). save_mean[R], save_invstd[R]
   are written for the backward pass, or NULL. eps: 0 = 1e-5. */
AMP_DEF amp_result amp_layer_norm_forward(const void* x, amp_dtype x_dtype, const void* gamma,
                                          const void* beta, amp_dtype param_dtype, float eps,
                                          float* save_mean, float* save_invstd, void* y, amp_dtype y_dtype,
                                          size_t rows, size_t d, const amp_exec* exec);
AMP_DEF amp_result amp_layer_norm_backward(const void* dy, amp_dtype dy_dtype, const void* x,
                                           amp_dtype x_dtype, const void* gamma, amp_dtype param_dtype,
                                           const float* save_mean, const float* save_invstd, void* dx,
                                           amp_dtype dx_dtype, void* dgamma, void* dbeta,
                                           amp_dtype dparam_dtype, int accumulate, size_t rows, size_t d,
                                           const amp_exec* exec);

/* --- element by element ---------------------------------------------------------------- */

typedef enum amp_activation {
    AMP_RELU    = 0,   /* max(x, 0); NaN stays NaN                                   */
    AMP_GELU    = 1,   /* x * Phi(x), the exact form (erf)                           */
    AMP_GELU_TANH = 2, /* 0.5*x*(1 + tanh(sqrt(2/pi)*(x + 0.044715*x^3)))            */
    AMP_TANH    = 3,
    AMP_SIGMOID = 4,   /* 1 / (1 + exp(-x))                                          */
    AMPI_ACTIVATION_MAX = 0x7fffffff
} amp_activation;

/* Bytes of workspace with which the two calls below run at full speed on many elements of 16 bits. */
enum { AMP_ACTIVATION_WORKSPACE = 65536 * 4 + 128 };
/* y = f(x), n elements; x and y may be the same if their types are. */
AMP_DEF amp_result amp_activation_forward(amp_activation f, const void* x, amp_dtype x_dtype,
                                          void* y, amp_dtype y_dtype, size_t n, const amp_exec* exec);
/* dx = dy * f'. RELU, TANH and SIGMOID take it from `saved` = y (the output), the GELUs from `saved` = x (the
   input). dx and dy may be the same if their types are. */
AMP_DEF amp_result amp_activation_backward(amp_activation f, const void* dy, amp_dtype dy_dtype,
                                           const void* saved, amp_dtype saved_dtype, void* dx,
                                           amp_dtype dx_dtype, size_t n, const amp_exec* exec);

/* Softmax of the rows of x[R,D]; a row of -inf only gives NaN, as in PyTorch. x and y may be the same. */
AMP_DEF amp_result amp_softmax_forward(const void* x, amp_dtype x_dtype, void* y, amp_dtype y_dtype,
                                       size_t rows, size_t d, const amp_exec* exec);
/* dx = y * (dy - sum(dy*y)). */
AMP_DEF amp_result amp_softmax_backward(const void* dy, amp_dtype dy_dtype, const void* y,
                                        amp_dtype y_dtype, void* dx, amp_dtype dx_dtype, size_t rows,
                                        size_t d, const amp_exec* exec);

/* Dropout with probability p in [0,1): y = x/(1-p) or 0. Element i is dropped if
   amp_random_uniform(seed, offset + i) < p, so no mask is stored; the backward pass is the same call on the
   gradient with the same seed and offset. x and y may be the same. */
AMP_DEF amp_result amp_dropout_forward(const void* x, amp_dtype x_dtype, void* y, amp_dtype y_dtype, size_t n,
                               float p, uint64_t seed, uint64_t offset, const amp_exec* exec);

/* y = a + b, n elements; y may be a or b if the types are the same. */
AMP_DEF amp_result amp_add_forward(const void* a, amp_dtype a_dtype, const void* b, amp_dtype b_dtype,
                           void* y, amp_dtype y_dtype, size_t n, const amp_exec* exec);

/* Copies x[R,D] into columns [column, column+D) of y[R,D_total], converting: one call per part makes a
   concat. amp_concat_backward takes the columns out again, adding to x's buffer if accumulate. */
AMP_DEF amp_result amp_concat_forward(const void* x, amp_dtype x_dtype, size_t d, void* y, amp_dtype y_dtype,
                              size_t d_total, size_t column, size_t rows, const amp_exec* exec);
AMP_DEF amp_result amp_concat_backward(const void* y, amp_dtype y_dtype, size_t d_total, size_t column,
                                       void* x, amp_dtype x_dtype, size_t d, size_t rows, int accumulate,
                                       const amp_exec* exec);

/* --- losses: FP32 arithmetic; the loss is the mean over the batch ----------------------- */

/* Each forward writes the mean loss to *loss. Each backward writes the gradient of (*loss_scale) *
   weight * loss; the scale is read through a pointer because on a GPU it lives on the device (NULL = 1),
   and is multiplied in FP32 before the gradient is rounded to its type. With a scaler of your own:
   `float s = amp_scaler_scale_loss(&scaler, 1.0f);` and pass &s. */

/* Softmax cross-entropy of logits[N,K] with labels[N] in 0..K-1. smoothing in [0,1): the target is
   (1-smoothing) on the label plus smoothing/K everywhere. A label outside 0..K-1 is AMP_ERR_ARGUMENT. */
AMP_DEF amp_result amp_softmax_cross_entropy_forward(const void* logits, amp_dtype logits_dtype,
                                                     const int32_t* labels, float smoothing, float* loss,
                                                     size_t n, size_t classes, const amp_exec* exec);
AMP_DEF amp_result amp_softmax_cross_entropy_backward(const void* logits, amp_dtype logits_dtype,
                                                      const int32_t* labels, float smoothing,
                                                      const float* loss_scale, float weight, void* dlogits,
                                                      amp_dtype dlogits_dtype, size_t n, size_t classes,
                                                      const amp_exec* exec);
/* Mean squared error over n elements: mean((x - target)^2). */
AMP_DEF amp_result amp_mse_forward(const void* x, amp_dtype x_dtype, const void* target,
                                   amp_dtype target_dtype, float* loss, size_t n, const amp_exec* exec);
AMP_DEF amp_result amp_mse_backward(const void* x, amp_dtype x_dtype, const void* target,
                                    amp_dtype target_dtype, const float* loss_scale, float weight, void* dx,
                                    amp_dtype dx_dtype, size_t n, const amp_exec* exec);
/* Binary cross-entropy of logits with targets in [0,1]: mean(max(x,0) - x*t + log(1 + exp(-|x|))). The
   form on probabilities is not offered: its logarithm underflows in half. */
AMP_DEF amp_result amp_bce_with_logits_forward(const void* x, amp_dtype x_dtype, const void* target,
                                               amp_dtype target_dtype, float* loss, size_t n,
                                               const amp_exec* exec);
AMP_DEF amp_result amp_bce_with_logits_backward(const void* x, amp_dtype x_dtype, const void* target,
                                                amp_dtype target_dtype, const float* loss_scale, float weight,
                                                void* dx, amp_dtype dx_dtype, size_t n, const amp_exec* exec);

/* ======================================================================================== */
/* >>policy   Autocast: which operator runs in which type. Rules are data.                    */
/* ======================================================================================== */

/* The operators of a model and their class under O1 and under O2: X(NAME, "name", O1, O2). O1 follows
   the lists on which PyTorch, Apex, MindSpore and OneFlow agree; O2 is MindSpore's and Apex's: everything
   in half but the norms and the losses. At O0 all are FP32, at O3 all but the losses are LOW. */
#define AMP_OP_LIST(X)                                                        \
    X(INPUT,                 "input",                 FOLLOW,  FOLLOW)        \
    X(CONV2D,                "conv2d",                LOW,     LOW)           \
    X(LINEAR,                "linear",                LOW,     LOW)           \
    X(MAX_POOL2D,            "max_pool2d",            FOLLOW,  LOW)           \
    X(AVG_POOL2D,            "avg_pool2d",            FOLLOW,  LOW)           \
    X(BATCH_NORM,            "batch_norm",            FOLLOW,  FP32)          \
    X(LAYER_NORM,            "layer_norm",            FP32,    FP32)          \
    X(RELU,                  "relu",                  FOLLOW,  LOW)           \
    X(GELU,                  "gelu",                  FOLLOW,  LOW)           \
    X(TANH,                  "tanh",                  FOLLOW,  LOW)           \
    X(SIGMOID,               "sigmoid",               FOLLOW,  LOW)           \
    X(SOFTMAX,               "softmax",               FP32,    LOW)           \
    X(DROPOUT,               "dropout",               FOLLOW,  LOW)           \
    X(ADD,                   "add",                   PROMOTE, LOW)           \
    X(CONCAT,                "concat",                PROMOTE, LOW)           \
    X(FLATTEN,               "flatten",               FOLLOW,  FOLLOW)        \
    X(SOFTMAX_CROSS_ENTROPY, "softmax_cross_entropy", FP32,    FP32)          \
    X(MSE,                   "mse",                   FP32,    FP32)          \
    X(BCE_WITH_LOGITS,       "bce_with_logits",       FP32,    FP32)
#define AMPI_X(name, text, o1, o2) AMP_OP_##name,
typedef enum amp_op { AMP_OP_LIST(AMPI_X) AMP_OP_COUNT, AMPI_OP_MAX = 0x7fffffff } amp_op;
#undef AMPI_X

typedef enum amp_rule {
    AMP_RULE_LOW = 0,       /* operands in the 16-bit type */
    AMP_RULE_FP32 = 1,      /* operands and result in FP32 */
    AMP_RULE_PROMOTE = 2,   /* the widest type among the inputs */
    AMP_RULE_FOLLOW = 3,    /* the type of the first input */
    AMPI_RULE_MAX = 0x7fffffff
} amp_rule;

typedef enum amp_level {
    AMP_O0 = 0,
    AMP_O1 = 1,
    AMP_O2 = 2,
    AMP_O3 = 3,
    AMPI_LEVEL_MAX = 0x7fffffff
} amp_level;

/* The two kinds of O1. */
typedef enum amp_style {
    AMP_STYLE_PYTORCH = 0,    /* the result of a LOW op stays in half (PyTorch, Apex, OneFlow) */
    AMP_STYLE_MINDSPORE = 1,  /* it is cast back to FP32 (MindSpore) */
    AMPI_STYLE_MAX = 0x7fffffff
} amp_style;

/* AMP_ZERO in the int fields means "no" where the level would say "yes". */
typedef struct amp_policy_desc {
    amp_level level;          /* 0 = O0, plain FP32 */
    amp_dtype low_dtype;      /* 0 = AMP_F16; or AMP_BF16 */
    amp_style style;          /* O1 only */
    const amp_op* white;      /* operators to run LOW besides the level's; copied */
    int white_count;
    const amp_op* black;      /* operators to run in FP32; give one list or the other */
    int black_count;
    int keep_batchnorm_fp32;  /* 0 = the level's (O2 yes, O3 no); 1, AMP_ZERO: O2 and O3 only, as in Apex */
    int master_weights;       /* 0 = the level's (O1, O2 yes, O3 no); 1, AMP_ZERO: O2 and O3 only, as in
                                 Apex */
    int cast_model;           /* 0 = the level's; 1 is refused at O0 and O1 (cast_model_type in Apex) */
    const amp_logger* logger; /* NULL = silent */
} amp_policy_desc;

/* Who decided the type of an operator or a node. */
typedef enum amp_reason {
    AMP_REASON_LEVEL = 0,     /* the level's own list */
    AMP_REASON_WHITE = 1,     /* the user's white list */
    AMP_REASON_BLACK = 2,     /* the user's black list */
    AMP_REASON_RULE = 3,      /* amp_policy_set_rule */
    AMP_REASON_KEEP_BN = 4,   /* keep_batchnorm_fp32 */
    AMP_REASON_REGION = 5,    /* amp_autocast_push */
    AMP_REASON_PIN = 6,       /* amp_pin */
    AMPI_REASON_MAX = 0x7fffffff
} amp_reason;

/* A filled-in policy: plain data, to be copied and edited. */
typedef struct amp_policy {
    amp_level  level;
    amp_dtype  low_dtype;
    int        cast_back;              /* results of LOW ops are seen as FP32 by what follows */
    int        master_weights;         /* 0: parameters of LOW ops exist in half only */
    amp_rule   rules[AMP_OP_COUNT];
    amp_reason reasons[AMP_OP_COUNT];
} amp_policy;

/* desc == NULL: O0. AMP_ERR_POLICY with the reason for an illegal combination (unknown level or
   operator, both lists at once, an override that the level does not have). A loss can't be put on
   the white list: AMP_ERR_POLICY. */
AMP_DEF amp_result amp_policy_init(amp_policy* p, const amp_policy_desc* desc);
/* Replaces one rule. AMP_ERR_POLICY for an unknown operator or rule, or a loss that is not FP32. */
AMP_DEF amp_result amp_policy_set_rule(amp_policy* p, amp_op op, amp_rule rule);
/* Copies the operators whose rule is LOW (white) or FP32 (black) to out[0..capacity) and returns how
   many there are. */
AMP_DEF int amp_policy_white_list(const amp_policy* p, amp_op* out, int capacity);
AMP_DEF int amp_policy_black_list(const amp_policy* p, amp_op* out, int capacity);
/* "conv2d" and so on; "?" if out of range. From a name: 1 and *op, or 0. */
AMP_DEF const char* amp_op_name(amp_op op);
AMP_DEF int amp_op_from_name(const char* name, amp_op* op);
/* "LOW", "FP32", ...; "O1"; "level list", "white list", "pinned", ... */
AMP_DEF const char* amp_rule_name(amp_rule rule);
AMP_DEF const char* amp_level_name(amp_level level);
AMP_DEF const char* amp_reason_name(amp_reason reason);

/* ======================================================================================== */
/* >>scaler   The loss-scale machine.                                                         */
/* ======================================================================================== */

/* One state machine reproduces the scalers of the systems below, step by step. State: scale s, tracker c
   (clean steps in a row), hysteresis left h. Parameters: the fields of amp_scaler_desc.
     overflow step: c = start; h -= 1; if h <= 0: s = max(s * backoff, min), and if the hysteresis refills
                    after every H overflows, h = H.
     clean step:    if the hysteresis refills on clean steps, h = H; c += 1; if c >= interval: s = s * growth
                    under the guard, c = 0, and if the hysteresis refills on growth, h = H.
   "interval" is in each system's own counting: Flax and NNabla grow one step later than they say. */

/* How growth is kept from leaving the range. A max_scale, where there is one, holds under each of them. */
typedef enum amp_scaler_guard {
    AMP_GUARD_DEFAULT = 0,   /* the preset's */
    AMP_GUARD_KEEP    = 1,   /* keep s if s*growth is not finite */
    AMP_GUARD_CLAMP   = 2,   /* clamp to max_scale, or to the largest float if there is none */
    AMP_GUARD_NONE    = 3,   /* s may become infinite: then no step is applied any more */
    AMPI_GUARD_MAX    = 0x7fffffff
} amp_scaler_guard;

/* When the hysteresis counter goes back to its start. */
typedef enum amp_scaler_refill {
    AMP_REFILL_DEFAULT = 0,  /* the preset's */
    AMP_REFILL_GROWTH  = 1,  /* when the scale grows (Megatron-LM, DeepSpeed) */
    AMP_REFILL_CLEAN   = 2,  /* on every clean step (DeepSpeed consecutive_hysteresis) */
    AMP_REFILL_EVERY_H = 3,  /* on every clean step and after each reduction (Paddle decr_every_n) */
    AMPI_REFILL_MAX    = 0x7fffffff
} amp_scaler_refill;

/* What happens when an overflow finds the scale at its floor, or too many overflows come in a row. */
typedef enum amp_scaler_limit {
    AMP_LIMIT_DEFAULT  = 0,  /* the preset's */
    AMP_LIMIT_CLAMP    = 1,  /* go on: the step is skipped, the scale stays at its floor */
    AMP_LIMIT_ERROR    = 2,  /* amp_scaler_update returns AMP_ERR_OVERFLOW */
    AMP_LIMIT_CALLBACK = 3,  /* ask on_limit */
    AMPI_LIMIT_MAX     = 0x7fffffff
} amp_scaler_limit;

/* Presets, with the values that each system ships. Sources: torch.amp.GradScaler; mindspore.amp
   DynamicLossScaler, DynamicLossScaleManager, FixedLossScaleManager; apex.amp; oneflow.amp.GradScaler; keras
   LossScaleOptimizer; flax DynamicScale; nnabla DynamicLossScalingUpdater; Megatron-LM; DeepSpeed;
   paddle.amp.GradScaler; jmp and the TensorFlow 1 loss scale follow the same rule as MindSpore's.
   init 0: must be given. interval 0: static, the scale never moves. late: clean steps added to the interval.
   start: the tracker at the beginning and after an overflow. backoff 0: 1/growth. min, max 0: none.
   at_min: what an overflow at the floor does. skips: overflows in a row that are allowed, 0 = any number.
   X(NAME, text, init, interval, late, start, growth, backoff, min, max, guard, hysteresis, refill, at_min, skips) */
#define AMPI_FLT_MIN 1.17549435e-38f
#define AMPI_FLT_MAX 3.402823466e38f
#define AMP_SCALER_PRESET_LIST(X)                                                                       \
    X(PYTORCH, "pytorch",          65536, 2000, 0, 0, 2, 0.5f, 0, 0, KEEP, 1, GROWTH, CLAMP, 0)         \
    X(MINDSPORE, "mindspore",      0, 2000, 0, 0, 2, 0, 1, 0, KEEP, 1, GROWTH, CLAMP, 0)                \
    X(MINDSPORE_MANAGER, "mindspore_manager",                                                           \
                                   16777216, 2000, 0, 0, 2, 0, 1, 0, NONE, 1, GROWTH, CLAMP, 1000)      \
    X(MINDSPORE_FIXED, "mindspore_fixed", 128, 0, 0, 0, 2, 0, 0, 0, KEEP, 1, GROWTH, CLAMP, 0)          \
    X(APEX, "apex",                65536, 2000, 0, 0, 2, 0, 0, 16777216, CLAMP, 1, GROWTH, CLAMP, 0)    \
    X(ONEFLOW, "oneflow", 65536, 2000, 0, 0, 2, 0, 1, AMPI_FLT_MAX, CLAMP, 1, GROWTH, CLAMP, 0)         \
    X(KERAS, "keras",              32768, 2000, 0, 0, 2, 0, 0, 0, NONE, 1, GROWTH, CLAMP, 0)            \
    X(FLAX, "flax", 65536, 2000, 1, 0, 2, 0.5f, AMPI_FLT_MIN, AMPI_FLT_MAX, CLAMP, 1, GROWTH, CLAMP, 0) \
    X(NNABLA, "nnabla",            8, 2000, 1, -1, 2, 0, 0, 0, NONE, 1, GROWTH, CLAMP, 100)             \
    X(MEGATRON, "megatron", 4294967296.0f, 1000, 0, 0, 2, 0.5f, 1, 0, NONE, 2, GROWTH, CLAMP, 0)        \
    X(DEEPSPEED, "deepspeed",      65536, 1000, 0, 0, 2, 0, 1, 0, NONE, 2, GROWTH, ERROR, 0)            \
    X(DEEPSPEED_CONSECUTIVE, "deepspeed_consecutive",                                                   \
                                   65536, 1000, 0, 0, 2, 0, 1, 0, NONE, 2, CLEAN, ERROR, 0)             \
    X(PADDLE, "paddle",            65536, 1000, 0, 0, 2, 0.5f, 1, 0, KEEP, 1, EVERY_H, CLAMP, 0)        \
    X(JMP, "jmp",                  0, 2000, 0, 0, 2, 0, 1, 0, KEEP, 1, GROWTH, CLAMP, 0)                \
    X(TF_LEGACY, "tf_legacy",      0, 2000, 0, 0, 2, 0, 1, 0, KEEP, 1, GROWTH, CLAMP, 0)                \
    X(STATIC, "static",            0, 0, 0, 0, 2, 0, 0, 0, KEEP, 1, GROWTH, CLAMP, 0)
#define AMPI_X(name, text, init, interval, late, start, growth, backoff, min, max, guard, h, refill, at, n) \
    AMP_SCALER_##name,
typedef enum amp_scaler_preset {
    AMP_SCALER_PRESET_LIST(AMPI_X) AMP_SCALER_PRESET_COUNT, AMPI_PRESET_MAX = 0x7fffffff
} amp_scaler_preset;
#undef AMPI_X

/* "pytorch", "mindspore_manager", ...; "?" for a value that is not a preset. */
AMP_DEF const char* amp_scaler_preset_name(amp_scaler_preset p);

typedef struct amp_scaler amp_scaler;

/* A zeroed desc is PyTorch's GradScaler. Every other field, if not 0, replaces the preset's value. */
typedef struct amp_scaler_desc {
    amp_scaler_preset preset;   /* 0 = AMP_SCALER_PYTORCH */
    float init_scale;           /* finite, > 2^-128 (below that 1/scale is not finite) */
    int   growth_interval;      /* clean steps before the scale grows; >= 1; AMP_ZERO = never grow (for
                                   Flax and NNabla, which add one: grow on every step). Not for static
                                   presets */
    float growth_factor;        /* finite, > 1. Not for static presets */
    float backoff_factor;       /* in (0,1). 0 = 0.5 (PyTorch, Flax, Megatron-LM, Paddle), else
                                   1/growth_factor, which is the only value that OneFlow accepts. Not for
                                   static presets */
    float min_scale;            /* floor, <= init_scale; AMP_ZERO = none */
    float max_scale;            /* ceiling of growth, >= init_scale; AMP_ZERO = none. Apex's own 2^24 may
                                   lie below init_scale: the first growth then comes down to it */
    amp_scaler_guard  guard;
    int   hysteresis;           /* overflows before the scale is reduced; >= 1 */
    amp_scaler_refill refill;
    amp_scaler_limit  at_min;   /* an overflow with the scale at its floor */
    int   max_skips;            /* overflows in a row that are allowed; AMP_ZERO = any number */
    amp_scaler_limit  at_max_skips; /* one more than that; 0 = error */
    int   ignore_overflow;      /* 1 = overflows are counted but never stop a step: MindSpore's
                                   drop_overflow_update=false; static presets only */
    /* For AMP_LIMIT_CALLBACK: return 0 to go on, anything else to make update return AMP_ERR_OVERFLOW.
       The window has ended when it is called: it may set the scale. */
    int (*on_limit)(const amp_scaler* s, void* user_data);
    void* user_data;
    const amp_logger* logger;   /* NULL = silent */
} amp_scaler_desc;

/* What the checks of the current window have seen. A window goes from one update to the next. */
typedef struct amp_overflow_info {
    int      found_inf;         /* 1 if any gradient was inf or NaN, or would become so when unscaled */
    uint64_t inf_count;         /* elements that are +-inf, or whose unscaled value would be */
    uint64_t nan_count;
    int      first_tensor;      /* index in the list of the first check that found one; -1 if none */
    uint64_t first_index;       /* element in that tensor */
    char     first_name[48];    /* its name, cut to fit; "" if it has none */
    double   norm;              /* L2 norm of the unscaled gradients of the last list checked; inf if
                                   that list had an inf or NaN */
} amp_overflow_info;

/* The state that moves: a plain struct, the same on the host and on a GPU. */
typedef struct amp_scaler_state {
    float    scale;             /* the current loss scale */
    float    inverse;           /* (float)(1 / (double)scale_in_use) */
    float    scale_in_use;      /* the scale with which the loss of this window was multiplied */
    int32_t  tracker;           /* clean steps in a row */
    int32_t  hysteresis_left;
    int32_t  found_inf;         /* sticky until update */
    int32_t  consecutive_skips;
    int32_t  reserved;          /* 0 */
    int64_t  applied, skipped;  /* windows ended by update, by their outcome */
} amp_scaler_state;

/* Parameters as the machine uses them, after preset and desc were merged. */
typedef struct amp_scaler_rule {
    float growth, backoff, min, max;    /* min, max: 0 if there is none */
    int32_t interval, start, hysteresis; /* interval 0 = never grow */
    int32_t guard, refill, at_min, max_skips, at_max_skips, ignore_overflow, is_static;
} amp_scaler_rule;

/* A list of gradients seen in this window, known by the address of its first element. `done` is a sum of
   1 checked, 2 unscaled, 4 stepped. */
#define AMP_SCALER_MAX_LISTS 64
typedef struct amp_scaler_list {
    const void* data;
    uint64_t    elements;       /* of the whole list */
    double      norm;           /* as found by the last check */
    uint32_t    done, reserved;
} amp_scaler_list;

/* A loss scaler is a plain struct: have as many as you like (one per loss, per group, per layer).
   Nothing is owned, copying it is allowed between windows. */
struct amp_scaler {
    amp_scaler_desc   desc;     /* what was asked for, defaults filled in (read it to see them) */
    amp_scaler_rule   rule;
    amp_scaler_state  state;
    amp_overflow_info info;     /* of the current window; of the last one after update */
    int               scaled;   /* 1 once the loss of this window was scaled */
    int               recorded; /* 1 once this window has a check, an unscale or a report */
    int               list_count;
    amp_scaler_list   lists[AMP_SCALER_MAX_LISTS];
};

/* Starts a scaler. desc == NULL: PyTorch's. AMP_ERR_DESC names the field that is out of range. */
AMP_DEF amp_result amp_scaler_init(amp_scaler* s, const amp_scaler_desc* desc);

/* loss * scale in FP32, and remembers the scale in use for this window. Pass 1.0f to get the factor
   itself, for seeding a backward pass by hand. NaN if s is NULL or zeroed, not initialised: the other calls
   are AMP_ERR_STATE then. May be called any number of times in a window (several losses, several
   micro-batches): the scale cannot change before update. */
AMP_DEF float amp_scaler_scale_loss(amp_scaler* s, float loss);

/* The next three look at `count` tensors (F32, F16, BF16) on the bits as they lie in memory: every
   element whose value is inf or NaN, or whose unscaled value would not be finite in the type it is
   stored in, raises found_inf, is counted, and the first is named in s->info. They also form the L2 norm
   of the unscaled gradients (in double, fixed order). `info`, if not NULL, receives what this call alone
   has found; s->info is of the whole window. found_inf stays up until update, also over other lists: to
   let one overflow stop several optimizers, check all lists before the first step. An empty list changes
   nothing. Where 1/scale is not a finite float, or the scale is not, found_inf is raised whatever the
   gradients are, and the logger is told. Errors: AMP_ERR_STATE before any scale_loss; AMP_ERR_ARGUMENT;
   AMP_ERR_DTYPE. */
/* Reads only. May be repeated; elements are counted each time. */
AMP_DEF amp_result amp_scaler_check(amp_scaler* s, const amp_tensor* grads, int count,
                                    amp_overflow_info* info);
/* g *= 1/scale in place, rounded to each tensor's own type. A list may be unscaled once per window, and
   not after its step (AMP_ERR_STATE, also with more than AMP_SCALER_MAX_LISTS lists in a window). If
   anything is not finite the gradients are left as they are: there will be no step. */
AMP_DEF amp_result amp_scaler_unscale(amp_scaler* s, const amp_tensor* grads, int count,
                                      amp_overflow_info* info);
/* dst = src / scale, or dst += src / scale if accumulate (one fma in FP32, one rounding to dst's type);
   dst[i] and src[i] have equal counts and do not overlap; types may differ (F32 dst is the usual one).
   May be repeated with new micro-batches in src; a src that amp_scaler_unscale has seen, or a dst that
   was stepped, is AMP_ERR_STATE. If anything in this list, or any sum, is not finite dst is left as it
   is. The norm is that of src / scale, or of the sums. This is the one to use when the buffer of the
   gradients also holds momentum. */
AMP_DEF amp_result amp_scaler_unscale_into(amp_scaler* s, const amp_tensor* dst, const amp_tensor* src,
                                           int count, int accumulate, amp_overflow_info* info);
/* "I saw an overflow myself": raises found_inf for this window (unless ignore_overflow is set), e.g. after
   an all-reduce of flags, or when the forward pass itself overflowed (allowed before scale_loss). */
AMP_DEF amp_result amp_scaler_report_overflow(amp_scaler* s);

/* "May I step?"  1 = every check of this window was clean; 0 = skip this step; negative (an amp_result) =
   AMP_ERR_STATE, nothing was checked yet. */
AMP_DEF int amp_scaler_may_step(const amp_scaler* s);

/* Ends the window: moves the scale by the rule, counts, and clears found_inf. AMP_ERR_STATE if nothing
   was recorded. AMP_ERR_OVERFLOW if a limit is reached and its action is an error: the window has ended,
   was counted as skipped, and the scale has moved as the rule says (its floor holds). */
AMP_DEF amp_result amp_scaler_update(amp_scaler* s);

/* Sets the scale by hand between windows; the counters stay. AMP_ERR_STATE inside one; AMP_ERR_ARGUMENT
   if not finite, or 2^-128 or less. */
AMP_DEF amp_result amp_scaler_set_scale(amp_scaler* s, float scale);

/* The rule alone, as a pure function on plain structs, for the host and the device alike: reads and
   clears state->found_inf. Returns a sum of 1, the floor was hit by an overflow, and 2, there were more
   overflows in a row than allowed. */
AMPI_HD AMP_DEF int amp_scaler_advance(const amp_scaler_rule* rule, amp_scaler_state* state);

/* State to and from AMP_SCALER_STATE_BYTES bytes (little-endian, with magic, version and CRC-32). Saving
   or loading inside a window is AMP_ERR_STATE; loading anything that save did not write, or not exactly
   that many bytes, is AMP_ERR_FORMAT and changes nothing. The rule is saved too and must be the same on
   loading (AMP_ERR_FORMAT). */
#define AMP_SCALER_STATE_BYTES 128
AMP_DEF amp_result amp_scaler_save(const amp_scaler* s, void* bytes, size_t size);
AMP_DEF amp_result amp_scaler_load(amp_scaler* s, const void* bytes, size_t size);

/* ======================================================================================== */
/* >>optim    Optimizers on FP32 master weights; clip, unscale and half copy in the same pass. */
/* ======================================================================================== */

/* g is the gradient / loss scale * clip coefficient (+ weight_decay * w where "L2" is said), in FP32:
     SGD    g += wd*w (L2); buf = momentum*buf + (1-dampening)*g (first step: buf = g);
            w -= lr * (nesterov ? g + momentum*buf : momentum ? buf : g)
     ADAM   g += wd*w (L2); m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2;
            w -= lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)
     ADAMW  w -= lr*wd*w, then as ADAM without L2
     LAMB   u = mhat/(sqrt(vhat)+eps) + wd*w; w -= lr * |w|/|u| * u per tensor (ratio 1 if a norm is 0)
   (Kingma & Ba 2015; Loshchilov & Hutter 2019; You et al. 2020; the first three are torch.optim's.)
   In detail, each fma(a,b,c) = a*b + c rounded once and each other operation rounded to FP32, with the
   constants c1 = 1-b1, c2 = 1-b2, r = 1/sqrt(1-b2^t), step = lr/(1-b1^t) formed in double and rounded once:
     m = fma(b1, m, c1*g); v = fma(c2*g, g, b2*v); w = fma(-step, m / fma(sqrt(v), r, eps), w*(1 - lr*wd))
   A moment smaller than the smallest normal float becomes zero, so that idle moments never become slow. */
typedef enum amp_optimizer_kind {
    AMP_SGD = 0, AMP_ADAM = 1, AMP_ADAMW = 2, AMP_LAMB = 3, AMPI_OPTIMIZER_MAX = 0x7fffffff
} amp_optimizer_kind;

/* Learning rate over applied steps t = 0, 1, 2, ...
     warm-up: for t < warmup_steps the factor rises linearly, (t+1)/(warmup_steps+1); afterwards, with t'
     counted from there and T = total_steps - warmup_steps:
     CONSTANT 1;  STEP gamma^(t' / step_size);  LINEAR from 1 to floor over T;
     COSINE floor + (1-floor)*(1+cos(pi*t'/T))/2 */
typedef enum amp_schedule_kind {
    AMP_SCHEDULE_CONSTANT = 0, AMP_SCHEDULE_STEP = 1, AMP_SCHEDULE_LINEAR = 2, AMP_SCHEDULE_COSINE = 3,
    AMPI_SCHEDULE_MAX = 0x7fffffff
} amp_schedule_kind;
typedef struct amp_schedule {
    amp_schedule_kind kind;     /* 0 = constant */
    int64_t warmup_steps;       /* 0 = none */
    int64_t total_steps;        /* LINEAR, COSINE: > warmup_steps; the floor holds afterwards */
    int64_t step_size;          /* STEP: >= 1 */
    float   gamma;              /* STEP: 0 = 0.1; in (0,1] */
    float   floor;              /* LINEAR, COSINE: the last factor; 0 = 0; in [0,1] */
} amp_schedule;
/* base_lr times the factor at step t (below 0 counts as 0). A NULL schedule is constant. The same bits
   everywhere. */
AMPI_HD AMP_DEF float amp_schedule_lr(const amp_schedule* s, float base_lr, int64_t t);

/* Settings of one parameter group. */
typedef struct amp_param_group {
    float lr;                   /* 0 = the desc's; AMP_ZERO = frozen: weights and moments stay as they
                                   are. Gradients of frozen parameters may be NULL; where given they are
                                   checked and count in the norm */
    float weight_decay;         /* 0 = the desc's; AMP_ZERO = none */
} amp_param_group;

typedef struct amp_optimizer_desc {
    amp_optimizer_kind kind;    /* 0 = SGD */
    float lr;                   /* 0 = 0.01 for SGD, 0.001 for the others; AMP_ZERO = 0 */
    float momentum;             /* SGD: 0 = none; [0,1) */
    float dampening;            /* SGD: 0 = none; [0,1] */
    int   nesterov;             /* SGD: 1 needs momentum > 0 and no dampening */
    float beta1, beta2;         /* 0 = 0.9, 0.999; [0,1), AMP_ZERO = 0 */
    float eps;                  /* 0 = 1e-8 (LAMB 1e-6); > 0 */
    float weight_decay;         /* 0 = none, but ADAMW 0.01; >= 0; AMP_ZERO = none */
    float clip_norm;            /* 0 = off; > 0: g *= min(1, clip_norm / (norm + 1e-6)), norm over all
                                   parameters */
    int   maximize;             /* 1 = ascend: for gradients kept with inverted sign */
    int   unchecked;            /* 1 = without a scaler, do not look for inf and NaN (saves one read of
                                   the gradients) */
    amp_schedule schedule;
    const amp_param_group* groups; /* NULL = one group with the desc's settings; copied: at most
                                      AMP_MAX_GROUPS */
    int   group_count;
    const amp_logger* logger;   /* NULL = silent */
} amp_optimizer_desc;
#define AMP_MAX_GROUPS 16

/* One parameter tensor. All memory is the caller's. */
typedef struct amp_param {
    float*      master;         /* [count] FP32 weights; NULL = there are none and `low` itself is
                                   trained (O3) */
    void*       low;            /* [count] 16-bit copy, written in the same pass; NULL = none */
    amp_dtype   low_dtype;      /* AMP_F16 or AMP_BF16 if low is given */
    void*       grad;           /* [count] */
    amp_dtype   grad_dtype;     /* 0 = AMP_F32 */
    float*      m;              /* [count] momentum buffer or first moment; start it with zeros. NULL if
                                   not needed */
    float*      v;              /* [count] second moment; start it with zeros. NULL if not needed */
    size_t      count;
    int         group;          /* index into desc.groups */
    const char* name;           /* for messages; may be NULL */
} amp_param;

/* How many of m and v an optimizer needs: 0, 1 or 2. -1 if the desc is not valid. */
AMP_DEF int amp_optimizer_moments(const amp_optimizer_desc* desc);

/* The part that moves; a plain struct, the same on the host and on a GPU. */
typedef struct amp_optimizer_state {
    int64_t step;               /* applied steps; a skipped step advances nothing */
    float   lr;                 /* base rate; the schedule is applied on top of it */
    float   reserved;
} amp_optimizer_state;

typedef struct amp_optimizer {
    amp_optimizer_desc  desc;   /* defaults filled in, AMP_ZERO replaced by 0; desc.groups is NULL, see
                                   below */
    amp_param_group     groups[AMP_MAX_GROUPS];
    amp_optimizer_state state;
    amp_param*          params; /* the caller's array; must outlive the optimizer */
    int                 count;
} amp_optimizer;

/* params is kept, not copied. AMP_ERR_DESC, AMP_ERR_DTYPE, AMP_ERR_ARGUMENT (a missing buffer, no
   parameter at all). If a low copy is given beside a master it is written here. */
AMP_DEF amp_result amp_optimizer_init(amp_optimizer* o, const amp_optimizer_desc* desc, amp_param* params,
                                      int count);

/* What a step did. */
typedef struct amp_optimizer_info {
    int    applied;             /* 1 = weights were updated; 0 = skipped because of an overflow */
    float  lr;                  /* the learning rate of this step, schedule included */
    double grad_norm;           /* of the unscaled gradients, before clipping; inf if not finite; 0 if
                                   nobody looked (no scaler, no clip_norm, and unchecked) */
    float  clip_coefficient;    /* 1 = not clipped */
    amp_overflow_info overflow; /* of the window; without a scaler, of this step */
} amp_optimizer_info;

/* Unscales the gradients in place now (so that the caller can look at them or clip by hand);
   amp_optimizer_step will know, and look at them once more for what the caller may have done.
   AMP_ERR_STATE if done already in this window, or after the step. */
AMP_DEF amp_result amp_optimizer_unscale(amp_optimizer* o, amp_scaler* s);

/* One step: check (unless amp_scaler_check has seen just this list since the last scale_loss), then
   skip, or update with unscale and clip folded in; no unscale if amp_scaler_unscale,
   amp_scaler_unscale_into or amp_optimizer_unscale did it in this window: to all of these gradients, in
   one list or several (anything else is AMP_ERR_STATE). s == NULL: gradients are not scaled. Does not
   call amp_scaler_update: with several optimizers on one scaler all step first, and an overflow that one
   of them or a check has seen skips those that follow. info may be NULL. AMP_ERR_STATE: before any
   scale_loss, twice in a window, no parameter with a gradient. AMP_ERR_ARGUMENT: a gradient is missing. */
AMP_DEF amp_result amp_optimizer_step(amp_optimizer* o, amp_scaler* s, amp_optimizer_info* info);

/* Sets the base learning rate, really zero included. AMP_ERR_ARGUMENT if not finite or negative. */
AMP_DEF amp_result amp_optimizer_set_lr(amp_optimizer* o, float lr);
/* Sets every gradient to zero (memset: also over inf and NaN). */
AMP_DEF amp_result amp_optimizer_zero_grad(amp_optimizer* o);

/* ======================================================================================== */
/* >>model    A static graph: build it with calls that read like the maths, then finalize.    */
/* ======================================================================================== */

typedef struct amp_model amp_model;

/* A handle of something computed: images [N,C,H,W], or rows [N,C*H*W] when C,H,W are not needed. */
typedef struct amp_value { int id; } amp_value;

/* Data-parallel training: sums over ranks, in place, on the memory of the model's backend. */
typedef struct amp_comm {
    amp_result (*all_reduce_sum)(void* data, amp_dtype dtype, size_t count, void* stream, void* user_data);
    int   rank, size;
    void* user_data;
} amp_comm;

/* What training moves, and what its last step did. A backend that is `asynchronous` keeps the true state in
   its own memory; this is then what was last read. */
typedef struct amp_training {
    amp_scaler         scaler;
    amp_optimizer      optimizer;
    amp_optimizer_info last;
    amp_result         limit;          /* what amp_scaler_update returned */
    float              scale_used;     /* the loss scale of the last step */
    uint64_t           passes;         /* training passes so far: the position in the stream of random numbers */
    const float*       loss_scale;     /* of this pass, in the backend's memory */
    const uint64_t*    position;       /* of this pass, in the backend's memory; NULL = `passes` is it */
    void*              resident;       /* the backend's own */
} amp_training;

/* Whether a step is to be run, is being recorded while it runs, or has been replayed. */
typedef enum amp_record {
    AMP_RECORD_OFF = 0, AMP_RECORD_ON = 1, AMP_RECORD_REPLAYED = 2, AMPI_RECORD_MAX = 0x7fffffff
} amp_record;

/* The processor a model runs on: memory, and one entry per operator with the signature of the public
   one. NULL in a desc = amp_cpu_backend(). Layers, training and optimizers know nothing else about it. */
typedef struct amp_backend {
    const char* name;
    int asynchronous;                  /* 1 = operators return before they are done; a step waits only for who asks */
    /* A model begins and ends with these; open may set exec->stream and exec->context. May be NULL. */
    amp_result (*open)(amp_exec* exec, const void* desc, const amp_allocator* a);
    void (*close)(amp_exec* exec, const amp_allocator* a);
    /* Memory of the processor: alloc returns NULL on failure; zero, copy_in (from the host) and copy_out
       (to the host) count bytes; upload and download convert n elements on the way. */
    void* (*alloc)(size_t bytes, const amp_allocator* a);
    void  (*free)(void* p, const amp_allocator* a);
    int   (*reaches)(const void* p);   /* may data lie at p? NULL = anywhere */
    amp_result (*zero)(void* p, size_t bytes, const amp_exec* exec);
    amp_result (*copy)(void* dst, const void* src, size_t bytes, const amp_exec* exec);
    amp_result (*copy_in)(void* dst, const void* host, size_t bytes, const amp_exec* exec);
    amp_result (*copy_out)(void* host, const void* src, size_t bytes, const amp_exec* exec);
    amp_result (*upload)(void* dst, amp_dtype dst_dtype, const void* host, amp_dtype host_dtype, size_t n,
                         const amp_exec* exec);
    amp_result (*download)(void* host, amp_dtype host_dtype, const void* src, amp_dtype src_dtype, size_t n,
                           const amp_exec* exec);
    amp_result (*convert)(void* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype, size_t n,
                          const amp_exec* exec);
    size_t (*gemm_workspace)(size_t m, size_t n, size_t k);
    size_t (*conv2d_workspace)(const amp_conv2d_shape* s);
    /* The operators; each has the type of the public function of that name. */
    amp_result (*linear_forward)(const void*, amp_dtype, const void*, amp_dtype, const void*, amp_dtype,
                                 void*, amp_dtype, size_t, size_t, size_t, const amp_exec*);
    amp_result (*linear_backward)(const void*, amp_dtype, const void*, amp_dtype, const void*, amp_dtype,
                                  void*, amp_dtype, void*, amp_dtype, void*, amp_dtype, int, size_t, size_t,
                                  size_t, const amp_exec*);
    amp_result (*conv2d_forward)(const amp_conv2d_shape*, const void*, amp_dtype, const void*, amp_dtype,
                                 const void*, amp_dtype, void*, amp_dtype, const amp_exec*);
    amp_result (*conv2d_backward)(const amp_conv2d_shape*, const void*, amp_dtype, const void*, amp_dtype,
                                  const void*, amp_dtype, void*, amp_dtype, void*, amp_dtype, void*,
                                  amp_dtype, int, const amp_exec*);
    amp_result (*pool2d_forward)(const amp_pool2d_shape*, const void*, amp_dtype, void*, amp_dtype,
                                 const amp_exec*);
    amp_result (*pool2d_backward)(const amp_pool2d_shape*, const void*, amp_dtype, const void*, amp_dtype,
                                  void*, amp_dtype, const amp_exec*);
    amp_result (*batch_norm_forward)(const amp_batch_norm_shape*, int, const void*, amp_dtype, const void*,
                                     const void*, amp_dtype, float*, float*, float*, float*, void*,
                                     amp_dtype, const amp_exec*);
    amp_result (*batch_norm_backward)(const amp_batch_norm_shape*, const void*, amp_dtype, const void*,
                                      amp_dtype, const void*, amp_dtype, const float*, const float*, void*,
                                      amp_dtype, void*, void*, amp_dtype, int, const amp_exec*);
    amp_result (*layer_norm_forward)(const void*, amp_dtype, const void*, const void*, amp_dtype, float,
                                     float*, float*, void*, amp_dtype, size_t, size_t, const amp_exec*);
    amp_result (*layer_norm_backward)(const void*, amp_dtype, const void*, amp_dtype, const void*,
                                      amp_dtype, const float*, const float*, void*, amp_dtype, void*, void*,
                                      amp_dtype, int, size_t, size_t, const amp_exec*);
    amp_result (*activation_forward)(amp_activation, const void*, amp_dtype, void*, amp_dtype, size_t,
                                     const amp_exec*);
    amp_result (*activation_backward)(amp_activation, const void*, amp_dtype, const void*, amp_dtype, void*,
                                      amp_dtype, size_t, const amp_exec*);
    amp_result (*softmax_forward)(const void*, amp_dtype, void*, amp_dtype, size_t, size_t, const amp_exec*);
    amp_result (*softmax_backward)(const void*, amp_dtype, const void*, amp_dtype, void*, amp_dtype, size_t,
                                   size_t, const amp_exec*);
    /* Dropout at offset + *position * stride; no position is 0. */
    amp_result (*dropout_forward)(const void*, amp_dtype, void*, amp_dtype, size_t, float p, uint64_t seed,
                                  uint64_t offset, const uint64_t* position, uint64_t stride,
                                  const amp_exec*);
    amp_result (*add_forward)(const void*, amp_dtype, const void*, amp_dtype, void*, amp_dtype, size_t,
                              const amp_exec*);
    amp_result (*concat_forward)(const void*, amp_dtype, size_t, void*, amp_dtype, size_t, size_t, size_t,
                                 const amp_exec*);
    amp_result (*concat_backward)(const void*, amp_dtype, size_t, size_t, void*, amp_dtype, size_t, size_t,
                                  int, const amp_exec*);
    amp_result (*softmax_cross_entropy_forward)(const void*, amp_dtype, const int32_t*, float, float*,
                                                size_t, size_t, const amp_exec*);
    amp_result (*softmax_cross_entropy_backward)(const void*, amp_dtype, const int32_t*, float,
                                                 const float*, float, void*, amp_dtype, size_t, size_t,
                                                 const amp_exec*);
    amp_result (*mse_forward)(const void*, amp_dtype, const void*, amp_dtype, float*, size_t,
                              const amp_exec*);
    amp_result (*mse_backward)(const void*, amp_dtype, const void*, amp_dtype, const float*, float, void*,
                               amp_dtype, size_t, const amp_exec*);
    amp_result (*bce_with_logits_forward)(const void*, amp_dtype, const void*, amp_dtype, float*, size_t,
                                          const amp_exec*);
    amp_result (*bce_with_logits_backward)(const void*, amp_dtype, const void*, amp_dtype, const float*,
                                           float, void*, amp_dtype, size_t, const amp_exec*);
    /* Training, on gradients and weights in the processor's memory. open: t->scaler is initialised. begin: sets
       t->loss_scale and t->position for a pass; window 0 = only looking. pass: the first work of each pass (may
       be NULL). check: *flag (in the backend's memory) = 1 if a gradient is not finite, else 0. agree: raises
       found_inf if *flag is not 0. step: skips or updates, moves the loss scale, and after a skip copies `bytes`
       bytes back from saved to now. read: brings t up to date, and waits for it. abandon: after an error. */
    amp_result (*training_open)(amp_training* t, const amp_optimizer_desc* desc, amp_param* params, int count,
                                const amp_exec* exec);
    void (*training_close)(amp_training* t, const amp_exec* exec);
    amp_result (*training_begin)(amp_training* t, int window, const amp_exec* exec);
    amp_result (*training_pass)(amp_training* t, const amp_exec* exec);
    amp_result (*training_check)(amp_training* t, const amp_tensor* grads, int count, float* flag,
                                 const amp_exec* exec);
    amp_result (*training_agree)(amp_training* t, const float* flag, const amp_exec* exec);
    amp_result (*training_step)(amp_training* t, void* now, const void* saved, size_t bytes,
                                const amp_exec* exec);
    amp_result (*training_read)(amp_training* t, const amp_exec* exec);
    void (*training_abandon)(amp_training* t, const amp_exec* exec);
    /* The work of a step that is the same for each batch may be recorded once under a key and replayed. Both may
       be NULL. record_end gets the result of the recorded calls and returns it, or its own failure. */
    amp_result (*record)(amp_training* t, uint64_t key, amp_record* mode, const amp_exec* exec);
    amp_result (*record_end)(amp_training* t, amp_result body, const amp_exec* exec);
} amp_backend;
AMP_DEF const amp_backend* amp_cpu_backend(void);

/* Everything the desc points at is copied (backend, and user_data of hooks, aside). */
typedef struct amp_model_desc {
    int batch;                         /* largest N of a step; >= 1 */
    amp_policy_desc precision;         /* level, type, lists; zeroed = O0 */
    const amp_policy* policy;          /* an edited policy; `precision` is not looked at then */
    const amp_scaler_desc* scaler;     /* NULL = the level's: dynamic (AMP_SCALER_PYTORCH) for O1 and O2
                                          in F16, else static 1 */
    amp_optimizer_desc optimizer;      /* zeroed = SGD with lr 0.01 */
    amp_dtype grad_dtype;              /* of weight gradients: 0 = AMP_F32, in which nothing is lost;
                                          F16, BF16 */
    int accumulate;                    /* micro-batches per optimizer step; 0 = 1 */
    int max_replays;                   /* after an overflow, how often to repeat the same batch at the
                                          lower scale; 0 = none */
    amp_sums sums;                     /* 0 = AMP_SUMS_FIXED; AMP_SUMS_FAST is for speed on a CPU */
    uint64_t seed;                     /* of weights and dropout; any value */
    const amp_backend* backend;        /* NULL = CPU */
    const void* backend_desc;          /* its options, e.g. an amp_cuda_desc; NULL = defaults. Read by create */
    const amp_comm* comm;              /* NULL = alone */
    amp_allocator allocator;           /* zeroed = malloc, free */
    amp_logger logger;                 /* zeroed = silent; amp_model_error has the last sentence in any
                                          case. It serves the parts too: the loggers of their descs are
                                          not used */
} amp_model_desc;

/* Creates an empty graph in *out (NULL on failure). AMP_ERR_DESC, AMP_ERR_POLICY, AMP_ERR_MEMORY. */
AMP_DEF amp_result amp_model_create(amp_model** out, const amp_model_desc* desc);
/* Frees everything. NULL is fine. */
AMP_DEF void amp_model_destroy(amp_model* m);
/* The last error sentence of this model; "" if none. */
AMP_DEF const char* amp_model_error(const amp_model* m);

/* --- building: an error is remembered, later calls do nothing, and finalize reports it ----- */

/* How weights start. He: normal, sd sqrt(2/fan_in). Xavier: uniform within +-sqrt(6/(fan_in+fan_out)).
   Biases are 0, except for AMP_INIT_TORCH: weights and biases uniform within +-1/sqrt(fan_in). */
typedef enum amp_init {
    AMP_INIT_HE = 0, AMP_INIT_XAVIER = 1, AMP_INIT_TORCH = 2, AMP_INIT_ZERO = 3, AMPI_INIT_MAX = 0x7fffffff
} amp_init;

typedef struct amp_conv2d_desc {
    int out_channels;                  /* >= 1 */
    int kernel;                        /* square; kernel_h and kernel_w, where not 0, replace it (and likewise
                                          stride, padding, dilation) */
    int kernel_h, kernel_w;
    int stride;                        /* 0 = 1; or stride_h, stride_w */
    int stride_h, stride_w;
    int padding;                       /* 0 = none; or padding_h, padding_w */
    int padding_h, padding_w;
    int dilation;                      /* 0 = 1; or dilation_h, dilation_w */
    int dilation_h, dilation_w;
    int groups;                        /* 0 = 1 */
    int no_bias;
    amp_init init;
} amp_conv2d_desc;
typedef struct amp_linear_desc {
    int out;                           /* >= 1 */
    int no_bias;
    amp_init init;
} amp_linear_desc;
typedef struct amp_pool2d_desc {
    amp_pool kind;
    int kernel, kernel_h, kernel_w;    /* as in amp_conv2d_desc */
    int stride, stride_h, stride_w;    /* 0 = the kernel's size */
    int padding, padding_h, padding_w;
    int exclude_pad;
} amp_pool2d_desc;
typedef struct amp_norm_desc {
    float eps;                         /* 0 = 1e-5 */
    float momentum;                    /* batch norm: 0 = 0.1 */
} amp_norm_desc;
typedef struct amp_loss_desc {
    float weight;                      /* of this loss in the sum; 0 = 1 */
    float smoothing;                   /* softmax cross-entropy: label smoothing in [0,1) */
} amp_loss_desc;

/* x[N,C,H,W]; rows of D features are (D,1,1). */
AMP_DEF amp_value amp_input(amp_model* m, int channels, int height, int width);
AMP_DEF amp_value amp_conv2d(amp_model* m, amp_value x, const amp_conv2d_desc* desc);
AMP_DEF amp_value amp_linear(amp_model* m, amp_value x, int out);      /* flattens x to rows first */
AMP_DEF amp_value amp_linear_with(amp_model* m, amp_value x, const amp_linear_desc* desc);
AMP_DEF amp_value amp_maxpool2d(amp_model* m, amp_value x, int kernel);  /* stride = kernel */
AMP_DEF amp_value amp_avgpool2d(amp_model* m, amp_value x, int kernel);
AMP_DEF amp_value amp_pool2d(amp_model* m, amp_value x, const amp_pool2d_desc* desc);
AMP_DEF amp_value amp_global_avgpool2d(amp_model* m, amp_value x);       /* [N,C,1,1] */
AMP_DEF amp_value amp_batch_norm(amp_model* m, amp_value x, const amp_norm_desc* desc);
AMP_DEF amp_value amp_layer_norm(amp_model* m, amp_value x, const amp_norm_desc* desc); /* over C*H*W */
AMP_DEF amp_value amp_relu(amp_model* m, amp_value x);
AMP_DEF amp_value amp_gelu(amp_model* m, amp_value x);                   /* exact (erf) */
AMP_DEF amp_value amp_tanh(amp_model* m, amp_value x);
AMP_DEF amp_value amp_sigmoid(amp_model* m, amp_value x);
AMP_DEF amp_value amp_softmax(amp_model* m, amp_value x);                /* over C*H*W */
AMP_DEF amp_value amp_dropout(amp_model* m, amp_value x, float p);       /* p in [0,1); nothing in evaluation */
AMP_DEF amp_value amp_add(amp_model* m, amp_value a, amp_value b);       /* residual; equal shapes */
AMP_DEF amp_value amp_concat(amp_model* m, amp_value a, amp_value b);    /* along channels; equal H, W */
AMP_DEF amp_value amp_flatten(amp_model* m, amp_value x);                /* [N,C*H*W,1,1]; costs nothing */
/* Losses. The model's loss is the weighted sum of all of them; desc may be NULL. Each takes the targets
   of its own number, counted from 0 in the order of these calls. */
AMP_DEF amp_value amp_softmax_cross_entropy(amp_model* m, amp_value logits, const amp_loss_desc* desc);
AMP_DEF amp_value amp_mse(amp_model* m, amp_value x, const amp_loss_desc* desc);
AMP_DEF amp_value amp_bce_with_logits(amp_model* m, amp_value x, const amp_loss_desc* desc);

/* Regions, nested as deep as AMP_MAX_REGIONS: layers built inside run in this type. AMP_F32 is
   autocast(enabled=False), AMP_F16 or AMP_BF16 forces that type, AMP_DTYPE_DEFAULT goes back to the level's
   rules. */
#define AMP_MAX_REGIONS 32
AMP_DEF void amp_autocast_push(amp_model* m, amp_dtype dtype);
AMP_DEF void amp_autocast_pop(amp_model* m);
/* Pins the layer that made v. Beats every region and rule. Of several pins F32 wins over F16 over BF16,
   in any order. A loss is FP32 always. */
AMP_DEF void amp_pin(amp_model* m, amp_value v, amp_dtype dtype);
/* Names the layer that made v (copied; 1 to 31 characters); otherwise "conv2d1", "linear2", ... */
AMP_DEF void amp_name(amp_model* m, amp_value v, const char* name);
/* Puts the parameters of the layer that made v into a group of the optimizer. */
AMP_DEF void amp_group(amp_model* m, amp_value v, int group);

/* Checks the graph, infers types, places casts, plans memory, allocates and initialises. Every mistake
   of the graph is reported here; afterwards no step allocates. */
AMP_DEF amp_result amp_model_finalize(amp_model* m);

/* --- looking inside -------------------------------------------------------------------- */

/* One layer, as it will run. */
typedef struct amp_layer {
    amp_op     op;
    char       name[32];
    int        channels, height, width;   /* of the output, per sample */
    amp_dtype  compute_dtype;             /* the type its operands are rounded to */
    amp_dtype  storage_dtype;             /* the type its output is kept in (F32 only if somebody needs
                                             FP32) */
    amp_dtype  param_dtype;               /* of the weights it reads; 0 if it has none */
    amp_rule   rule;
    amp_reason reason;                    /* who chose the rule */
    int        in_place;                  /* 1 = shares its input's memory */
    int        casts;                     /* conversions of its inputs placed just before it */
    size_t     parameters;                /* count */
    size_t     activation_bytes;          /* of the output for the whole batch; 0 if in place */
} amp_layer;
/* Number of layers, and layer i in the order of building. NULL if out of range or not finalized. */
AMP_DEF int amp_model_layer_count(const amp_model* m);
AMP_DEF const amp_layer* amp_model_layer(const amp_model* m, int i);
/* The layer that made v; -1 if none. */
AMP_DEF int amp_model_layer_of(const amp_model* m, amp_value v);

typedef struct amp_memory {
    size_t activation_bytes;      /* the arena: activations and their gradients, after reuse */
    size_t parameter_bytes;       /* FP32 weights */
    size_t low_parameter_bytes;   /* 16-bit weights */
    size_t gradient_bytes;        /* weight gradients */
    size_t optimizer_bytes;       /* moments */
    size_t workspace_bytes;       /* scratch of the operators */
    size_t total_bytes;           /* everything above and the rest (statistics, inputs' staging, graph) */
} amp_memory;
AMP_DEF amp_result amp_model_memory(const amp_model* m, amp_memory* out);

/* The parameters, in the order of building; weight before bias. Names are "<layer>.weight",
   "<layer>.bias". */
AMP_DEF amp_param* amp_model_params(amp_model* m, int* count);
AMP_DEF amp_param* amp_model_find_param(amp_model* m, const char* name);
/* The weights of p = one of amp_model_params, out[count], to the host from wherever they are; and from there to
   masters and 16-bit copies. AMP_ERR_ARGUMENT: NULL, or not a parameter of this model. */
AMP_DEF amp_result amp_model_read_param(amp_model* m, const amp_param* p, float* out);
AMP_DEF amp_result amp_model_write_param(amp_model* m, const amp_param* p, const float* values);
/* To be called after masters were changed by hand: writes the 16-bit copies. */
AMP_DEF amp_result amp_model_sync_params(amp_model* m);
/* The parts; they live as long as the model. NULL before finalize. Where the backend is asynchronous each
   call waits for the steps under way and brings the part up to date; what is changed in it counts from the
   next step on. */
AMP_DEF amp_scaler* amp_model_scaler(amp_model* m);
AMP_DEF amp_optimizer* amp_model_optimizer(amp_model* m);
AMP_DEF const amp_policy* amp_model_policy(const amp_model* m);

/* ======================================================================================== */
/* >>train    The step: forward, FP32 loss, scaled backward, check, skip or update, adjust.   */
/* ======================================================================================== */

#define AMP_MAX_INPUTS 8
#define AMP_MAX_LOSSES 8

/* Data of one step. Nothing is kept. */
typedef struct amp_batch {
    int n;                                  /* samples; 1 .. desc.batch */
    const void* inputs[AMP_MAX_INPUTS];     /* [n,C,H,W] each, in the order of the amp_input calls */
    amp_dtype   input_dtype;                /* 0 = AMP_F32 */
    const void* targets[AMP_MAX_LOSSES];    /* per loss: int32_t[n] labels for cross-entropy, else
                                               float[n,C,H,W] */
    int on_device;                          /* 0 = host memory; 1 = the memory of the model's backend, in which
                                               labels are not checked: one outside its classes makes the
                                               loss NaN, so that the step is skipped */
} amp_batch;

typedef enum amp_outcome {
    AMP_STEP_APPLIED = 0, /* weights were updated */
    AMP_STEP_ACCUMULATED = 1, /* a micro-batch; the update comes with a later one */
    AMP_STEP_SKIPPED_OVERFLOW =
        2, /* a gradient overflowed at this loss scale: nothing changed but the scale */
    AMP_STEP_SKIPPED_MODEL =
        3, /* the forward pass itself gave inf or NaN, which a skipped step looks for by running it
                                      once more: a lower scale will not help */
    AMPI_OUTCOME_MAX = 0x7fffffff
} amp_outcome;
/* "applied", "accumulated", "skipped: overflow", "skipped: model". */
AMP_DEF const char* amp_outcome_name(amp_outcome o);

typedef struct amp_step_info {
    float    loss;                 /* unscaled weighted sum of the losses of this call */
    amp_outcome outcome;
    int      attempts;             /* 1, or more if the batch was replayed */
    int64_t  step;                 /* applied steps so far */
    int64_t  skipped;              /* skipped steps so far */
    float    scale_before, scale_after;
    float    lr;                   /* of this step */
    double   grad_norm;            /* of the unscaled gradients; inf if skipped; 0 for a micro-batch */
    amp_overflow_info overflow;    /* counts, first tensor and index among the weight gradients */
    char     message[224];         /* a sentence if the step was skipped; "" otherwise */
} amp_step_info;

/* One training step on a batch (or one micro-batch of desc.accumulate). info may be NULL. An overflow is
   not an error. Errors: AMP_ERR_ARGUMENT (NULL data, n out of range, a label outside its classes),
   AMP_ERR_STATE (not finalized), AMP_ERR_OVERFLOW (a limit of the scaler), AMP_ERR_COMM. After a skipped
   step everything but the scaler and the counters is as before: weights, moments, running statistics.
   On an asynchronous backend a call without info (and without max_replays) waits for nothing; what went wrong
   shows at the next call that waits. All ranks wait, or none. */
AMP_DEF amp_result amp_train_step(amp_model* m, const amp_batch* batch, amp_step_info* info);
/* What the last amp_train_step did, for steps without info: waits for it. A skipped step's message names the
   gradient; only amp_train_step with info can also look for its cause in the model. AMP_ERR_STATE before the
   first step, AMP_ERR_OVERFLOW as amp_train_step. */
AMP_DEF amp_result amp_train_read(amp_model* m, amp_step_info* info);

typedef struct amp_eval_info {
    float loss;                    /* as in training, without dropout and with the running statistics */
    int   correct;                 /* rows whose largest logit is the label, summed over the cross-
                                      entropy losses */
} amp_eval_info;
/* Forward pass in evaluation mode with losses. Changes nothing. */
AMP_DEF amp_result amp_evaluate(amp_model* m, const amp_batch* batch, amp_eval_info* info);
/* Forward pass in evaluation mode; writes v as float out[n,C,H,W]. Targets are not needed. */
AMP_DEF amp_result amp_predict(amp_model* m, const amp_batch* batch, amp_value v, float* out);

/* ======================================================================================== */
/* >>checkpoint  Everything that training needs to go on, in the safetensors format.          */
/* ======================================================================================== */
#if !defined(AMP_NO_STDIO)

/* A named tensor of a file. shape has `rank` entries whose product is tensor.count. */
typedef struct amp_file_tensor {
    amp_tensor tensor;             /* name is needed; dtype F32, F16, BF16 or F64 */
    int        rank;               /* 0..4 */
    size_t     shape[4];
} amp_file_tensor;
/* Text of the file's __metadata__. */
typedef struct amp_file_text { const char* key; const char* value; } amp_file_text;

/* Options of the file functions; NULL = zeroed. */
typedef struct amp_file_desc {
    amp_allocator allocator;       /* for the header and a copy buffer */
    const amp_logger* logger;      /* NULL = silent */
} amp_file_desc;

/* Writes a safetensors file: to "<path>.tmp", flushed, then renamed, so that `path` is either the old
   file or the whole new one. Names, keys and values are UTF-8. Tensors with larger elements come first in
   the file, so that each is aligned. The CRC-32 of each is a text of the file, "amp.crc32.<name>".
   AMP_ERR_IO, AMP_ERR_ARGUMENT (no name, a name twice, rank, count), AMP_ERR_DTYPE, AMP_ERR_MEMORY. */
AMP_DEF amp_result amp_file_save(const char* path, const amp_file_tensor* tensors, int count,
                                 const amp_file_text* texts, int text_count, const amp_file_desc* desc);
/* Reads tensors by name into the given memory. Type, rank and shape must be those of the file. The whole
   header is checked (sizes, offsets, overlaps, names) before anything is written to the tensors, and data
   is read before it is copied, so an error changes nothing: AMP_ERR_FORMAT (also data that has not the
   CRC-32 of the file, where that has one: who changes a tensor in a file drops this text), AMP_ERR_IO,
   AMP_ERR_MEMORY, AMP_ERR_ARGUMENT (also a name asked for twice), AMP_ERR_DTYPE. Tensors of the file that
   are not asked for may have any type and are stepped over. A hostile file costs at most an error and, for a
   moment, memory of six times its header (100 MB at most). */
AMP_DEF amp_result amp_file_load(const char* path, const amp_file_tensor* tensors, int count,
                                 const amp_file_desc* desc);
/* Copies one metadata text (with its final 0) to out. AMP_ERR_FORMAT if the file is not sound, there is
   no such key, or the text does not fit; out is as before then. */
AMP_DEF amp_result amp_file_text_of(const char* path, const char* key, char* out, size_t size,
                                    const amp_file_desc* desc);

/* Masters (or the 16-bit weights where there are no masters), moments, running statistics, scaler, step
   and skip counts, random-number position. Resuming gives the same bits as never having stopped.
   AMP_ERR_STATE between the micro-batches of a step. Loading needs a model built and finalized the same
   way; names, shapes, level, seed, optimizer settings (but the base learning rate, which is loaded) and
   scaler rule must agree, otherwise AMP_ERR_FORMAT with the first difference, and nothing changes; so too
   if a tensor, the scaler, the step, the rate or the position is damaged (CRC-32). Saving needs memory for
   a copy of the largest tensor, loading of all. */
AMP_DEF amp_result amp_checkpoint_save(amp_model* m, const char* path);
AMP_DEF amp_result amp_checkpoint_load(amp_model* m, const char* path);

#endif

/* ======================================================================================== */
/* >>report   What a person wants to see.                                                     */
/* ======================================================================================== */

/* Exponent histogram: bin b counts values with floor(log2|x|) == b + AMP_STATS_MIN_EXPONENT, subnormals
   included. */
#define AMP_STATS_MIN_EXPONENT (-149)
#define AMP_STATS_BINS 277          /* 2^-149 .. 2^127 */

typedef struct amp_stats {
    uint64_t count, zeros, infs, nans;
    uint64_t subnormals;            /* in the buffer's own type */
    uint64_t would_underflow;       /* not zero, but zero when cast to the target type */
    uint64_t would_be_subnormal;    /* not zero, and a subnormal of the target type */
    uint64_t would_overflow;        /* finite, but infinite in the target type */
    float    smallest, largest;     /* of |x|, finite and not zero; 0 if there is none */
    float    suggested_scale;       /* the largest power of two with largest * scale <= max(target) / 2;
                                       0 if unknown */
    uint64_t histogram[AMP_STATS_BINS];
} amp_stats;

/* Statistics of n elements of any type, F64 too (what lies beyond the histogram counts in its end bins);
   target is the type they would be cast to (0 = AMP_F16; not F64). Adds to *out if `add`, otherwise starts
   anew. */
AMP_DEF amp_result amp_stats_collect(amp_stats* out, const void* x, amp_dtype dtype, size_t n,
                                     amp_dtype target, int add);

/* Statistics of one layer, from one forward and backward pass. */
typedef struct amp_layer_stats {
    amp_stats output;               /* activations */
    amp_stats output_gradient;      /* scaled by the current loss scale; count 0 if it has none */
    amp_stats weight_gradient;      /* likewise; of all parameters of the layer */
} amp_layer_stats;
/* Runs a training pass without an optimizer step and fills stats[i] for layer i; capacity >=
   amp_model_layer_count. Weights, moments, running statistics, scaler and counters stay as they are.
   AMP_ERR_STATE between micro-batches. */
AMP_DEF amp_result amp_model_stats(amp_model* m, const amp_batch* batch, amp_layer_stats* stats,
                                   int capacity);

#if !defined(AMP_NO_STDIO)
/* One line per layer: name, output shape, types, the rule and who chose it, parameters, bytes; then the
   sums. */
AMP_DEF amp_result amp_model_print(const amp_model* m, FILE* out);
/* The counts and a bar chart of the histogram in plain text. */
AMP_DEF amp_result amp_stats_print(const amp_stats* s, FILE* out);
#endif

#ifdef __cplusplus
} /* extern "C" */

/* In C++ a desc may be written in place: amp_scaler_init(&s, {}) and, since C++20, amp_scaler_init(&s,
   {.init_scale = 1024}). */
static inline amp_result amp_convert_with(void* dst, amp_dtype dst_dtype, const void* src,
                                          amp_dtype src_dtype, size_t n, const amp_convert_desc& desc) {
    return amp_convert_with(dst, dst_dtype, src, src_dtype, n, &desc);
}
static inline amp_result amp_policy_init(amp_policy* p, const amp_policy_desc& desc) {
    return amp_policy_init(p, &desc);
}
static inline amp_result amp_scaler_init(amp_scaler* s, const amp_scaler_desc& desc) {
    return amp_scaler_init(s, &desc);
}
static inline amp_result amp_optimizer_init(amp_optimizer* o, const amp_optimizer_desc& desc,
                                            amp_param* params, int count) {
    return amp_optimizer_init(o, &desc, params, count);
}
static inline amp_result amp_model_create(amp_model** out, const amp_model_desc& desc) {
    return amp_model_create(out, &desc);
}
static inline amp_value amp_conv2d(amp_model* m, amp_value x, const amp_conv2d_desc& desc) {
    return amp_conv2d(m, x, &desc);
}
static inline amp_value amp_linear_with(amp_model* m, amp_value x, const amp_linear_desc& desc) {
    return amp_linear_with(m, x, &desc);
}
static inline amp_value amp_pool2d(amp_model* m, amp_value x, const amp_pool2d_desc& desc) {
    return amp_pool2d(m, x, &desc);
}
static inline amp_value amp_batch_norm(amp_model* m, amp_value x, const amp_norm_desc& desc) {
    return amp_batch_norm(m, x, &desc);
}
static inline amp_value amp_layer_norm(amp_model* m, amp_value x, const amp_norm_desc& desc) {
    return amp_layer_norm(m, x, &desc);
}
static inline amp_value amp_softmax_cross_entropy(amp_model* m, amp_value logits, const amp_loss_desc& desc) {
    return amp_softmax_cross_entropy(m, logits, &desc);
}
static inline amp_value amp_mse(amp_model* m, amp_value x, const amp_loss_desc& desc) {
    return amp_mse(m, x, &desc);
}
static inline amp_value amp_bce_with_logits(amp_model* m, amp_value x, const amp_loss_desc& desc) {
    return amp_bce_with_logits(m, x, &desc);
}
#endif
#endif /* AMP_H_INCLUDED */

/* ======================================================================================== */
/* >>impl     Stop here if you only want the interface.                                       */
/* ======================================================================================== */
#if defined(AMP_IMPLEMENTATION) && !defined(AMPI_IMPLEMENTATION_ONCE)
#define AMPI_IMPLEMENTATION_ONCE

/* ======================================================================================== */
/* >>impl-base                                                                                */
/* ======================================================================================== */
#include <fenv.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>    /* vsnprintf */
#include <stdlib.h>
#include <string.h>
#if defined(_OPENMP) && !defined(AMP_NO_OPENMP)
  #include <omp.h>
#endif

/* Private functions are not always all used (AMP_NO_STDIO, AMP_STATIC, other processors). */
#if defined(__GNUC__) || defined(__clang__)
  #define AMPI_FN static __attribute__((unused))
#else
  #define AMPI_FN static
#endif

/* Inlined into every ISA's copy of a kernel; hosts may have defined `inline` away, so the attribute
   decides. FETCH asks for the cache line `byte` bytes on, which may lie outside of all that is there. OPAQUE makes
   the compiler forget where a pointer comes from. */
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
  #define AMPI_INLINE static __inline__ __attribute__((always_inline, unused))
  #define AMPI_RESTRICT __restrict__
  #define AMPI_FETCH(p, byte) __builtin_prefetch((const void*)((uintptr_t)(p) + (byte)))
  #define AMPI_OPAQUE(pointer) __asm__("" : "+r"(pointer))
#elif defined(_MSC_VER)
  #define AMPI_INLINE static __forceinline
  #define AMPI_RESTRICT __restrict
#else
  #define AMPI_INLINE static
  #define AMPI_RESTRICT
#endif
#ifndef AMPI_FETCH
  #define AMPI_FETCH(p, byte) ((void)(p), (void)(byte))
  #define AMPI_OPAQUE(pointer) ((void)0)
#endif

/* OpenMP if the user compiles with it. Loops run over chunks whose size is fixed, so that the bits do not
   depend on the number of threads. AMPI_PARALLEL_FOR goes before a `for` over an int64_t. */
#if defined(_OPENMP) && !defined(AMP_NO_OPENMP)
  #define AMPI_PRAGMA(x) _Pragma(#x)
  #define AMPI_PARALLEL_FOR(condition) AMPI_PRAGMA(omp parallel for schedule(static) if (condition))
#else
  #define AMPI_PARALLEL_FOR(condition)
#endif

#ifdef __cplusplus
extern "C" {
#endif

AMP_DEF const char* amp_result_string(amp_result r) {
    switch (r) {
#define AMPI_X(name, code, text) case AMP_##name: return text;
        AMP_RESULT_LIST(AMPI_X)
#undef AMPI_X
        case AMPI_RESULT_MAX: break;
    }
    return "unknown result code";
}

AMP_DEF size_t amp_dtype_size(amp_dtype t) {
    switch (t) {
        case AMP_DTYPE_DEFAULT: case AMP_F32: return 4;
        case AMP_F16: case AMP_BF16: return 2;
        case AMP_F64: return 8;
        case AMPI_DTYPE_MAX: break;
    }
    return 0;
}

AMP_DEF const char* amp_dtype_name(amp_dtype t) {
    switch (t) {
        case AMP_DTYPE_DEFAULT: case AMP_F32: return "f32";
        case AMP_F16: return "f16";
        case AMP_BF16: return "bf16";
        case AMP_F64: return "f64";
        case AMPI_DTYPE_MAX: break;
    }
    return "?";
}

#if !defined(AMP_NO_STDIO)
AMP_DEF void amp_log_stderr(amp_result code, const char* sentence, void* user_data) {
    (void)code; (void)user_data;
    fprintf(stderr, "amp: %s\n", sentence);
}
#endif

/* Formats a sentence for the logger and hands the code back: `return ampi_fail(log, code, "...", ...)`. */
#if defined(__GNUC__) || defined(__clang__)
__attribute__((format(printf, 3, 4), unused))
#endif
static amp_result ampi_fail(const amp_logger* logger, amp_result code, const char* format, ...) {
    char sentence[512], *p;
    va_list args;
    if (!logger || !logger->log) return code;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    for (p = sentence; *p; p++) if ((unsigned char)*p < 0x20) *p = ' ';      /* a name may hold anything */
    logger->log(code, sentence, logger->user_data);
    return code;
}

AMPI_FN const amp_logger* ampi_exec_logger(const amp_exec* exec) { return exec ? exec->logger : NULL; }

/* The type that a field means: 0 is F32. */
AMPI_HD AMPI_INLINE amp_dtype ampi_dtype(amp_dtype t) { return t == AMP_DTYPE_DEFAULT ? AMP_F32 : t; }
/* A type that operators compute on. */
AMPI_FN int ampi_is_compute_dtype(amp_dtype t) {
    t = ampi_dtype(t);
    return t == AMP_F32 || t == AMP_F16 || t == AMP_BF16;
}

/* Bits of a float and back; memcpy is the only punning that every compiler honours. */
AMPI_HD AMPI_INLINE uint32_t ampi_bits(float f) { uint32_t u; memcpy(&u, &f, sizeof u); return u; }
AMPI_HD AMPI_INLINE float ampi_float(uint32_t u) { float f; memcpy(&f, &u, sizeof f); return f; }
AMPI_HD AMPI_INLINE uint64_t ampi_bits64(double d) { uint64_t u; memcpy(&u, &d, sizeof u); return u; }
AMPI_HD AMPI_INLINE double ampi_double(uint64_t u) { double d; memcpy(&d, &u, sizeof d); return d; }

/* *out = a * b; returns 0 when the product does not fit a size_t. */
AMPI_FN int ampi_mul_size(size_t a, size_t b, size_t* out) {
    if (b != 0 && a > SIZE_MAX / b) return 0;
    *out = a * b;
    return 1;
}
AMPI_FN int ampi_add_size(size_t a, size_t b, size_t* out) {
    if (a > SIZE_MAX - b) return 0;
    *out = a + b;
    return 1;
}

AMPI_FN void* ampi_alloc(const amp_allocator* a, size_t size) {
    if (size == 0) size = 1;
    return a && a->alloc ? a->alloc(size, a->user_data) : malloc(size);
}
AMPI_FN void ampi_free(const amp_allocator* a, void* p) {
    if (!p) return;
    if (a && a->free) a->free(p, a->user_data);
    else free(p);
}

/* Desc fields: 0 = default, AMP_ZERO = really zero. */
AMPI_FN float ampi_default_float(float v, float def) {
    return v == 0.0f ? def : (v == (float)AMP_ZERO ? 0.0f : v);
}
AMPI_FN int ampi_default_int(int v, int def) { return v == 0 ? def : (v == AMP_ZERO ? 0 : v); }

/* a*b + c rounded once. `hw` is a compile-time constant: 1 inside kernels built for a processor with the
   instruction. Without it the sum is formed in double (the product of two floats is exact there) and rounded
   to odd before it is rounded to float, which gives the correctly rounded result (Boldo & Melquiond 2008). */
AMPI_HD AMPI_FN float ampi_fma_soft(float a, float b, float c) {
    volatile double p = (double)a * (double)b, s = p + (double)c;
    double t = s - p, sum = s;
    volatile double err = (p - (s - t)) + ((double)c - t);
    uint64_t u = ampi_bits64(sum);
    if (err != 0.0 && !(u & 1u) && (u & 0x7ff0000000000000u) != 0x7ff0000000000000u)
        u = ((err > 0.0) == (sum > 0.0)) ? u + 1u : u - 1u;
    return (float)ampi_double(u);
}
#if defined(__FP_FAST_FMAF) || defined(__aarch64__) || (defined(__FMA__) && defined(__GNUC__))
  #define AMPI_FMA_NATIVE 1     /* the whole file is compiled for a processor with fma */
#else
  #define AMPI_FMA_NATIVE 0
#endif
/* Rounding the double sum to float errs only if it lies exactly between two floats, or below the normal
   floats. */
AMPI_HD AMPI_INLINE float ampi_fma_plain(float a, float b, float c) {
    double sum = (double)a * (double)b + (double)c;
    uint64_t u = ampi_bits64(sum), magnitude = u & 0x7fffffffffffffffu;
    if ((u & 0x1fffffffu) != 0x10000000u && (magnitude >= 0x3810000000000000u || magnitude == 0))
        return (float)sum;
    return ampi_fma_soft(a, b, c);
}
AMPI_HD AMPI_INLINE float ampi_fma(int hw, float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    (void)hw;
    return __fmaf_rn(a, b, c);
#elif (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
    return hw || AMPI_FMA_NATIVE ? __builtin_fmaf(a, b, c) : ampi_fma_plain(a, b, c);
#else
    (void)hw;
    return ampi_fma_plain(a, b, c);
#endif
}

/* Philox4x32-10: ten rounds of two 32x32->64 multiplications on a 128-bit counter under a 64-bit key. */
AMPI_HD AMPI_FN void ampi_philox(uint64_t seed, uint64_t counter, uint32_t out[4]) {
    uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32), x2 = 0, x3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    int round;
    for (round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)x0 * 0xD2511F53u, b = (uint64_t)x2 * 0xCD9E8D57u;
        x0 = (uint32_t)(b >> 32) ^ x1 ^ k0;
        x1 = (uint32_t)b;
        x2 = (uint32_t)(a >> 32) ^ x3 ^ k1;
        x3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = x0; out[1] = x1; out[2] = x2; out[3] = x3;
}

AMPI_HD AMP_DEF uint32_t amp_random_bits(uint64_t seed, uint64_t index) {
    uint32_t r[4];
    ampi_philox(seed, index >> 2, r);
    return r[index & 3u];
}

AMPI_HD AMP_DEF float amp_random_uniform(uint64_t seed, uint64_t index) {
    return (float)(amp_random_bits(seed, index) >> 8) * (1.0f / 16777216.0f);
}

/* ======================================================================================== */
/* >>impl-cpu                                                                                 */
/* ======================================================================================== */

/* Which instruction sets this compiler can emit for single functions. */
#if !defined(AMP_NO_SIMD) && (defined(__x86_64__) || defined(__i386__)) && !defined(__TINYC__) \
    && (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 9))
  #define AMPI_X86 1
  #include <immintrin.h>
  #include <cpuid.h>
  #define AMPI_TARGET_AVX2   __attribute__((target("avx2,fma,f16c")))
  #define AMPI_TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#else
  #define AMPI_X86 0
#endif
#if AMPI_X86 && (defined(__clang__) || __GNUC__ >= 10)
  #define AMPI_PAIRS 1
  #define AMPI_TARGET_PAIRS \
      __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#else
  #define AMPI_PAIRS 0
#endif
#if AMPI_X86 && defined(__x86_64__) && defined(__linux__) \
    && ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
  #define AMPI_AMX 1
  #define AMPI_TARGET_AMX \
      __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#else
  #define AMPI_AMX 0
#endif
/* gcc clears the upper halves of the vector registers behind code with AVX (vzeroupper) only from -O2 on. Left in use,
   they make what mixes SSE with AVX later on, as a loop over libm's fmaf does, up to 40 times slower (measured on
   Sapphire Rapids with glibc). So each kernel with AVX, or the call of it, ends with this. */
#if AMPI_X86 && !defined(__clang__)
AMPI_TARGET_AVX2 AMPI_FN void ampi_clear_upper(void) {
  #if defined(__x86_64__)
    __asm__ volatile("vzeroupper" : : : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                     "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
  #else
    __asm__ volatile("vzeroupper" : : : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
  #endif
}
#else
AMPI_FN void ampi_clear_upper(void) {}
#endif
#if !defined(AMP_NO_SIMD) && defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__)) \
    && defined(__ARM_NEON) && !defined(__TINYC__)
  #define AMPI_NEON 1
  #include <arm_neon.h>
#else
  #define AMPI_NEON 0
#endif

/* One body, one copy per instruction set, one dispatcher. Write
       AMPI_INLINE void ampi_foo_body(int hw, float* y, size_t n) { ... ampi_fma(hw, a, b, c) ... }
       AMPI_KERNEL(ampi_foo, (float* y, size_t n), y, n)
   and call ampi_foo(y, n). The body is plain C, in loops over a constant number of lanes that every compiler
   vectorises; `hw` is 1 where the copy may use hardware fma. Because each operation in it is an IEEE
   operation (no a*b+c left for the compiler to contract: write ampi_fma), the copies give the same bits. */
#if AMPI_X86
  #define AMPI_KERNEL(name, params, ...)                                                                   \
    static void name##_scalar params { name##_body(0, __VA_ARGS__); }                                      \
    AMPI_TARGET_AVX2 static void name##_avx2 params { name##_body(1, __VA_ARGS__); ampi_clear_upper(); }   \
    AMPI_TARGET_AVX512 static void name##_avx512 params { name##_body(1, __VA_ARGS__); ampi_clear_upper(); }\
    AMPI_FN void name params {                                                                             \
        switch (ampi_simd()) {                                                                             \
            case AMP_ISA_AVX512: name##_avx512(__VA_ARGS__); break;                                        \
            case AMP_ISA_AVX2:   name##_avx2(__VA_ARGS__); break;                                          \
            default:             name##_scalar(__VA_ARGS__); break;                                        \
        }                                                                                                  \
    }
  /* The same for kernels that are written by hand for AVX-512. */
  #define AMPI_KERNEL_AVX2(name, params, ...)                                                              \
    static void name##_scalar params { name##_body(0, __VA_ARGS__); }                                      \
    AMPI_TARGET_AVX2 static void name##_avx2 params { name##_body(1, __VA_ARGS__); ampi_clear_upper(); }   \
    AMPI_FN void name params {                                                                             \
        if (amp_cpu_isa() == AMP_ISA_SCALAR) name##_scalar(__VA_ARGS__);                                   \
        else name##_avx2(__VA_ARGS__);                                                                     \
    }
#else
  #define AMPI_KERNEL AMPI_KERNEL_PLAIN
  #define AMPI_KERNEL_AVX2 AMPI_KERNEL_PLAIN
#endif
/* One copy for all others, of kernels that are written by hand for AVX2 too. */
#define AMPI_KERNEL_PLAIN(name, params, ...) \
    AMPI_FN void name params { name##_body(AMPI_FMA_NATIVE, __VA_ARGS__); }

#if AMPI_X86
/* AVX state must be enabled by the operating system too: XCR0 bits 1,2 (AVX) and 5,6,7 (AVX-512). */
AMPI_FN amp_isa ampi_widest_isa(void) {
    unsigned a, b, c, d, xcr0_low, c1;
    if (!__get_cpuid(1, &a, &b, &c1, &d)) return AMP_ISA_SCALAR;
    if (!(c1 & (1u << 27)) || !(c1 & (1u << 28)) || !(c1 & (1u << 12)) || !(c1 & (1u << 29)))
        return AMP_ISA_SCALAR;                                   /* OSXSAVE, AVX, FMA, F16C */
    __asm__ volatile("xgetbv" : "=a"(xcr0_low) : "c"(0) : "edx");
    if ((xcr0_low & 0x6u) != 0x6u || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & (1u << 5)))
        return AMP_ISA_SCALAR;                                   /* AVX2 */
    if ((xcr0_low & 0xe6u) == 0xe6u && (b & (1u << 16)) && (b & (1u << 17)) && (b & (1u << 30))
        && (b & (1u << 31)))
        return AMP_ISA_AVX512;                                   /* F, DQ, BW, VL */
    return AMP_ISA_AVX2;
}
AMPI_FN int ampi_has_pairs(void) {
    unsigned a, b, c, d;
    return AMPI_PAIRS && ampi_widest_isa() == AMP_ISA_AVX512 && __get_cpuid_count(7, 1, &a, &b, &c, &d)
           && (a & (1u << 5)) != 0;                              /* AVX512_BF16 */
}
AMPI_FN amp_isa ampi_best_isa(void) {
    unsigned a, b, c, d;
    int amd = __get_cpuid(0, &a, &b, &c, &d) && b == 0x68747541u && d == 0x69746e65u && c == 0x444d4163u;
    return amd && ampi_has_pairs() ? AMP_ISA_AVX512_BF16 : ampi_widest_isa();
}
#else
AMPI_FN int ampi_has_pairs(void) { return 0; }
AMPI_FN amp_isa ampi_best_isa(void) { return AMPI_NEON ? AMP_ISA_NEON : AMP_ISA_SCALAR; }
#endif

AMP_DEF const char* amp_isa_name(amp_isa isa) {
    switch (isa) {
        case AMP_ISA_AUTO: return "auto";
        case AMP_ISA_SCALAR: return "scalar";
        case AMP_ISA_NEON: return "neon";
        case AMP_ISA_AVX2: return "avx2";
        case AMP_ISA_AVX512: return "avx512";
        case AMP_ISA_AVX512_BF16: return "avx512_bf16";
        case AMPI_ISA_MAX: break;
    }
    return "?";
}

/* Scalar code runs anywhere, AVX2 wherever AVX-512 does, AVX-512 wherever more of it does. */
AMPI_FN int ampi_isa_available(amp_isa isa) {
    amp_isa best = ampi_best_isa();
    if (isa == AMP_ISA_AVX512_BF16) return ampi_has_pairs();
    return isa == AMP_ISA_SCALAR || isa == best || (isa == AMP_ISA_AVX2 && best >= AMP_ISA_AVX512)
           || (isa == AMP_ISA_AVX512 && best == AMP_ISA_AVX512_BF16);
}

AMPI_FN amp_isa ampi_initial_isa(void) {
    const char* wanted = getenv("AMP_ISA");
    int i;
    for (i = AMP_ISA_SCALAR; wanted && i <= AMP_ISA_AVX512_BF16; i++)
        if (strcmp(wanted, amp_isa_name((amp_isa)i)) == 0 && ampi_isa_available((amp_isa)i))
            return (amp_isa)i;
    return ampi_best_isa();
}

/* This and ampi_amx_cache are the only variables of the library: caches of what cpuid and the system say (0 = not
   asked yet). Threads that race here write the same value. */
static int ampi_isa_cache;
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
  #define AMPI_LOAD_RELAXED(p) __atomic_load_n(p, __ATOMIC_RELAXED)
  #define AMPI_STORE_RELAXED(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#else
  #define AMPI_LOAD_RELAXED(p) (*(volatile int*)(p))
  #define AMPI_STORE_RELAXED(p, v) (*(volatile int*)(p) = (v))
#endif

AMP_DEF amp_isa amp_cpu_isa(void) {
    int isa = AMPI_LOAD_RELAXED(&ampi_isa_cache);
    if (isa == 0) {
        isa = (int)ampi_initial_isa();
        AMPI_STORE_RELAXED(&ampi_isa_cache, isa);
    }
    return (amp_isa)isa;
}

/* The instruction set for all that is not a product of bfloat16. */
AMPI_FN amp_isa ampi_simd(void) {
    amp_isa isa = amp_cpu_isa();
    return isa == AMP_ISA_AVX512_BF16 ? AMP_ISA_AVX512 : isa;
}

AMP_DEF amp_result amp_cpu_force_isa(amp_isa isa) {
    if (isa == AMP_ISA_AUTO) isa = ampi_best_isa();
    if (!ampi_isa_available(isa)) return AMP_ERR_UNSUPPORTED;
    AMPI_STORE_RELAXED(&ampi_isa_cache, (int)isa);
    return AMP_OK;
}

#if AMPI_AMX
static int ampi_amx_cache;
/* Is there a matrix unit (AMX-TILE, AMX-BF16; and AVX512-BF16), its state enabled in XCR0 bits 17 and 18? */
AMPI_FN int ampi_amx_found(void) {
    unsigned a, b, c, d, xcr0_low;
    if (ampi_widest_isa() != AMP_ISA_AVX512 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)
        || !(d & (1u << 24)) || !(d & (1u << 22)) || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & (1u << 5)))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0_low) : "c"(0) : "edx");
    return (xcr0_low & 0x60000u) == 0x60000u;
}
/* May this process use it? Linux grants that once, to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, 18),
   see its Documentation/arch/x86/xstate.rst. */
AMPI_FN int ampi_amx_granted(void) {
    long result = 158;                                           /* SYS_arch_prctl */
    __asm__ volatile("syscall" : "+a"(result) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return result == 0;
}
/* Is there one, or with `ask` may it be used? Cached: 1 no, 2 found, 3 granted. */
AMPI_FN int ampi_amx(int ask) {
    int known = AMPI_LOAD_RELAXED(&ampi_amx_cache), before = known;
    if (ampi_simd() != AMP_ISA_AVX512) return 0;
    if (known == 0) known = ampi_amx_found() ? 2 : 1;
    if (known == 2 && ask) known = ampi_amx_granted() ? 3 : 1;
    if (known != before) AMPI_STORE_RELAXED(&ampi_amx_cache, known);
    return known > 1;
}
#else
AMPI_FN int ampi_amx(int ask) { (void)ask; return 0; }
#endif
AMP_DEF int amp_cpu_has_fast_sums(void) { return ampi_amx(1); }

/* ======================================================================================== */
/* >>impl-half                                                                                */
/* ======================================================================================== */

/* --- one value: formulas on bits -------------------------------------------------------- */

/* float -> half. Read the magnitude as sig * 2^(e-150) with a 24-bit sig, cut the k lowest bits of sig (13,
   and one more for each step below the smallest normal exponent, 113), and put the exponent above what is
   left; the leading 1 of sig adds one to it, and a carry out of the fraction moves it up as it should.
   k = 25 cuts everything, so smaller values and float's own subnormals need no care. */
AMPI_HD AMPI_INLINE uint16_t ampi_half_bits(uint32_t u) {
    uint32_t mag = u & 0x7fffffffu, e = mag >> 23, sig = (mag & 0x7fffffu) | 0x800000u;
    uint32_t below = e < 113u ? 113u - e : 0u, k = 13u + (below < 12u ? below : 12u);
    uint32_t nearest = (1u << (k - 1u)) - 1u + ((sig >> k) & 1u);
    uint32_t h = ((e + below - 113u) << 10) + ((sig + nearest) >> k);
    h = h > 0x7c00u ? 0x7c00u : h;
    h = mag > 0x7f800000u ? 0x7e00u | (mag >> 13 & 0x3ffu) : h;
    return (uint16_t)((u >> 16 & 0x8000u) | h);
}

/* float -> bfloat16: the upper half, rounded; a carry out of the fraction may reach infinity, rightly. */
AMPI_HD AMPI_INLINE uint16_t ampi_bf16_bits(uint32_t u) {
    uint32_t rounded = u + 0x7fffu + (u >> 16 & 1u), quiet = u | 0x400000u;
    return (uint16_t)(((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded) >> 16);
}

/* half -> float. A subnormal is an integer times 2^-24, and an integer below 2^24 becomes a float exactly. */
AMPI_HD AMPI_INLINE uint32_t ampi_half_widen(uint16_t h) {
    uint32_t mag = h & 0x7fffu, u = (mag << 13) + (112u << 23), small = ampi_bits((float)(int32_t)mag);
    u = mag < 0x400u ? small - (24u << 23) : u;
    u = mag == 0u ? 0u : u;
    u = mag >= 0x7c00u ? u + (112u << 23) : u;
    u = mag > 0x7c00u ? u | 0x400000u : u;
    return (uint32_t)(h & 0x8000u) << 16 | u;
}

/* bfloat16 -> float: the upper half of the result, quietened if it is a NaN. */
AMPI_HD AMPI_INLINE uint32_t ampi_bf16_widen(uint16_t h) {
    return (uint32_t)h << 16 | ((h & 0x7fffu) > 0x7f80u ? 0x400000u : 0u);
}

/* float -> double, by integers because a processor told to treat subnormals as zero would lose them. */
AMPI_HD AMPI_INLINE uint64_t ampi_f32_widen(uint32_t f) {
    uint32_t mag = f & 0x7fffffffu;
    uint64_t u = ((uint64_t)mag << 29) + ((uint64_t)896u << 52), small = ampi_bits64((double)(int32_t)mag);
    u = mag < 0x800000u ? small - ((uint64_t)149u << 52) : u;
    u = mag == 0u ? 0u : u;
    u = mag >= 0x7f800000u ? u + ((uint64_t)896u << 52) : u;
    u = mag > 0x7f800000u ? u | (uint64_t)1u << 51 : u;
    return (uint64_t)(f >> 31) << 63 | u;
}

/* double -> a smaller format, given by its fraction bits and the bias of its exponent. The same steps as in
   ampi_half_bits, in three pieces because rounding to nearest and stochastic rounding share the outer two. */
#define AMPI_F16_FORM  10u, 15u
#define AMPI_BF16_FORM 7u, 127u
#define AMPI_F32_FORM  23u, 127u

/* The magnitude is (kept + rest / 2^cut) units of the format's last place; cut can be large, rest < 2^53. */
typedef struct ampi_split { uint64_t kept, rest, cut; } ampi_split;

AMPI_HD AMPI_INLINE ampi_split ampi_split_double(uint64_t u, uint32_t fraction_bits, uint32_t bias) {
    uint64_t mag = u & 0x7fffffffffffffffu, e = mag >> 52;
    uint64_t sig = (mag & 0xfffffffffffffu) | (uint64_t)1u << 52, lowest = 1024u - bias;
    uint64_t below = e < lowest ? lowest - e : 0u, shift;
    ampi_split s;
    s.cut = 52u - fraction_bits + below;
    shift = s.cut < 63u ? s.cut : 63u;
    s.kept = ((e + below - lowest) << fraction_bits) + (sig >> shift);
    s.rest = sig & (((uint64_t)1u << shift) - 1u);
    return s;
}

/* Puts the sign on; infinity for what is too large, a quiet NaN for a NaN. */
AMPI_HD AMPI_INLINE uint32_t ampi_finish_narrow(uint64_t u, uint64_t rounded, uint32_t fraction_bits,
                                                uint32_t bias) {
    uint64_t mag = u & 0x7fffffffffffffffu, inf = (uint64_t)(2u * bias + 1u) << fraction_bits;
    uint64_t payload = (mag & 0xfffffffffffffu) >> (52u - fraction_bits), quiet = 1u << (fraction_bits - 1u);
    uint64_t r = rounded > inf ? inf : rounded;
    r = mag > (uint64_t)0x7ffu << 52 ? inf | quiet | payload : r;
    return (uint32_t)(r | (u >> 63) << (fraction_bits == 23u ? 31 : 15));
}

/* Nearest, ties to even. cut >= 54 leaves nothing to round up: rest < 2^53 is below the half. */
AMPI_INLINE uint32_t ampi_narrow(uint64_t u, uint32_t fraction_bits, uint32_t bias) {
    ampi_split s = ampi_split_double(u, fraction_bits, bias);
    uint64_t middle = (uint64_t)1u << ((s.cut < 54u ? s.cut : 54u) - 1u);
    uint64_t up = s.rest + (s.kept & 1u) > middle ? 1u : 0u;
    return ampi_finish_narrow(u, s.kept + up, fraction_bits, bias);
}

/* Away from zero with the probability rest / 2^cut, of which 32 bits are looked at (cut > 32 here). */
AMPI_HD AMPI_INLINE uint32_t ampi_narrow_random(uint64_t u, uint32_t random, uint32_t fraction_bits,
                                                uint32_t bias) {
    ampi_split s = ampi_split_double(u, fraction_bits, bias);
    uint64_t shift = s.cut - 32u, up = random < s.rest >> (shift < 63u ? shift : 63u) ? 1u : 0u;
    return ampi_finish_narrow(u, s.kept + up, fraction_bits, bias);
}

/* The public functions for one value. */
AMP_DEF amp_half amp_half_from_float(float f) {
    amp_half h;
    h.bits = ampi_half_bits(ampi_bits(f));
    return h;
}
AMP_DEF amp_half amp_half_from_double(double d) {
    amp_half h;
    h.bits = (uint16_t)ampi_narrow(ampi_bits64(d), AMPI_F16_FORM);
    return h;
}
AMP_DEF amp_bfloat16 amp_bfloat16_from_float(float f) {
    amp_bfloat16 h;
    h.bits = ampi_bf16_bits(ampi_bits(f));
    return h;
}
AMP_DEF amp_bfloat16 amp_bfloat16_from_double(double d) {
    amp_bfloat16 h;
    h.bits = (uint16_t)ampi_narrow(ampi_bits64(d), AMPI_BF16_FORM);
    return h;
}

AMP_DEF float amp_half_to_float(amp_half h) { return ampi_float(ampi_half_widen(h.bits)); }
AMP_DEF double amp_half_to_double(amp_half h) { return ampi_double(ampi_f32_widen(ampi_half_widen(h.bits))); }
AMP_DEF float amp_bfloat16_to_float(amp_bfloat16 h) { return ampi_float(ampi_bf16_widen(h.bits)); }
AMP_DEF double amp_bfloat16_to_double(amp_bfloat16 h) {
    return ampi_double(ampi_f32_widen(ampi_bf16_widen(h.bits)));
}

/* Loaded as an integer: a float that passes through a float register may be changed or assumed finite. */
AMPI_INLINE uint32_t ampi_load_magnitude(const float* p) {
    uint32_t u;
    memcpy(&u, p, sizeof u);
    return u & 0x7fffffffu;
}
AMP_DEF int amp_half_is_nan(amp_half h) { return (h.bits & 0x7fffu) > 0x7c00u; }
AMP_DEF int amp_half_is_inf(amp_half h) { return (h.bits & 0x7fffu) == 0x7c00u; }
AMP_DEF int amp_half_is_finite(amp_half h) { return (h.bits & 0x7fffu) < 0x7c00u; }
AMP_DEF int amp_bfloat16_is_nan(amp_bfloat16 h) { return (h.bits & 0x7fffu) > 0x7f80u; }
AMP_DEF int amp_bfloat16_is_inf(amp_bfloat16 h) { return (h.bits & 0x7fffu) == 0x7f80u; }
AMP_DEF int amp_bfloat16_is_finite(amp_bfloat16 h) { return (h.bits & 0x7fffu) < 0x7f80u; }
AMP_DEF int amp_float_is_nan(const float* p) { return ampi_load_magnitude(p) > 0x7f800000u; }
AMP_DEF int amp_float_is_inf(const float* p) { return ampi_load_magnitude(p) == 0x7f800000u; }
AMP_DEF int amp_float_is_finite(const float* p) { return ampi_load_magnitude(p) < 0x7f800000u; }

/* --- bulk kernels in plain C -------------------------------------------------------------- */

/* Kernels work on sixteen elements a turn, a number that compilers vectorise; what is left over goes through
   a padded copy. `lanes(dst, src)` converts sixteen. */
#define AMPI_LANES_LOOP(linkage, name, dst_type, src_type, lanes)                                          \
    linkage void name(int hw, dst_type* AMPI_RESTRICT dst, const src_type* AMPI_RESTRICT src, size_t n) {  \
        dst_type out[16];                                                                                  \
        src_type in[16];                                                                                   \
        size_t i = 0, left = n & 15u;                                                                      \
        (void)hw;                                                                                          \
        for (; i + 16 <= n; i += 16) lanes(dst + i, src + i);                                              \
        if (left == 0) return;                                                                             \
        memset(in, 0, sizeof in);                                                                          \
        memcpy(in, src + i, left * sizeof *src);                                                           \
        lanes(out, in);                                                                                    \
        memcpy(dst + i, out, left * sizeof *dst);                                                          \
    }
#define AMPI_LANES_KERNEL(name, dst_type, src_type, lanes)                       \
    AMPI_LANES_LOOP(AMPI_INLINE, name##_body, dst_type, src_type, lanes)         \
    AMPI_KERNEL(name, (dst_type* dst, const src_type* src, size_t n), dst, src, n)

/* Most values are zero, or normal in both formats: then a conversion is a shift, and sixteen such values take
   the easy way. The top bit of "hard" is set for a magnitude that is below `low` and not 0, or above `high`:
   no comparison, because not every vector instruction set can compare unsigned numbers. */
AMPI_INLINE uint32_t ampi_hard32(uint32_t mag, uint32_t low, uint32_t high) {
    return ((mag - low) & (0u - mag)) | (high - mag);
}
AMPI_INLINE uint64_t ampi_hard64(uint64_t mag, uint64_t low, uint64_t high) {
    return ((mag - low) & (0u - mag)) | (high - mag);
}
/* All ones if mag is not 0, else 0. */
AMPI_INLINE uint32_t ampi_mask32(uint32_t mag) { return 0u - ((0u - mag) >> 31); }
AMPI_INLINE uint64_t ampi_mask64(uint64_t mag) { return 0u - ((0u - mag) >> 63); }

/* Easy: zero, or from 2^-14 to below 2^16. A carry may reach infinity, as rounding demands. */
AMPI_INLINE void ampi_lanes_f32_to_half(uint16_t* AMPI_RESTRICT dst, const float* AMPI_RESTRICT src) {
    uint32_t hard = 0;
    int l;
    for (l = 0; l < 16; l++)
        hard |= ampi_hard32(ampi_bits(src[l]) & 0x7fffffffu, 113u << 23, (143u << 23) - 1u);
    for (l = 0; (hard >> 31) != 0u && l < 16; l++) dst[l] = ampi_half_bits(ampi_bits(src[l]));
    if (hard >> 31) return;
    for (l = 0; l < 16; l++) {
        uint32_t u = ampi_bits(src[l]), mag = u & 0x7fffffffu;
        uint32_t h = (mag - (112u << 23) + 0xfffu + (mag >> 13 & 1u)) >> 13;
        dst[l] = (uint16_t)((h & ampi_mask32(mag)) | (u >> 16 & 0x8000u));
    }
}

/* Easy: zero and the normal halves; the exponent moves up by 127 - 15, but not that of zero. */
AMPI_INLINE void ampi_lanes_half_to_f32(float* AMPI_RESTRICT dst, const uint16_t* AMPI_RESTRICT src) {
    uint32_t hard = 0;
    int l;
    for (l = 0; l < 16; l++) hard |= ampi_hard32(src[l] & 0x7fffu, 0x400u, 0x7bffu);
    for (l = 0; (hard >> 31) != 0u && l < 16; l++) dst[l] = ampi_float(ampi_half_widen(src[l]));
    if (hard >> 31) return;
    for (l = 0; l < 16; l++) {
        uint32_t mag = src[l] & 0x7fffu, sign = (uint32_t)(src[l] & 0x8000u) << 16;
        dst[l] = ampi_float(((mag << 13) + ((112u << 23) & ampi_mask32(mag))) | sign);
    }
}

/* bfloat16 has float's exponents: no value is hard. */
AMPI_INLINE void ampi_lanes_f32_to_bf16(uint16_t* AMPI_RESTRICT dst, const float* AMPI_RESTRICT src) {
    int l;
    for (l = 0; l < 16; l++) dst[l] = ampi_bf16_bits(ampi_bits(src[l]));
}
AMPI_INLINE void ampi_lanes_bf16_to_f32(float* AMPI_RESTRICT dst, const uint16_t* AMPI_RESTRICT src) {
    int l;
    for (l = 0; l < 16; l++) dst[l] = ampi_float(ampi_bf16_widen(src[l]));
}

/* Easy: zero and the normal floats, which the processor widens exactly in every mode. */
AMPI_INLINE void ampi_lanes_f32_to_f64(double* AMPI_RESTRICT dst, const float* AMPI_RESTRICT src) {
    uint32_t hard = 0;
    int l;
    for (l = 0; l < 16; l++)
        hard |= ampi_hard32(ampi_bits(src[l]) & 0x7fffffffu, 1u << 23, (255u << 23) - 1u);
    if (hard >> 31) for (l = 0; l < 16; l++) dst[l] = ampi_double(ampi_f32_widen(ampi_bits(src[l])));
    else for (l = 0; l < 16; l++) dst[l] = (double)src[l];
}

/* Sixteen doubles to the bits of a smaller format; random == NULL is to nearest. The random word r rounds up
   what has r below the first 32 of its cut bits: adding the complement of r there then carries. */
AMPI_INLINE void ampi_lanes_narrow(uint32_t* AMPI_RESTRICT dst, const double* AMPI_RESTRICT src,
                                   const uint32_t* random, uint32_t fraction_bits, uint32_t bias) {
    uint64_t low = (uint64_t)(1024u - bias) << 52, high = ((uint64_t)(1024u + bias) << 52) - 1u, hard = 0;
    uint64_t rebias = (uint64_t)(1023u - bias) << 52;
    uint32_t cut = 52u - fraction_bits, sign_shift = fraction_bits == 23u ? 32u : 48u;
    int l;
    for (l = 0; l < 16; l++) hard |= ampi_hard64(ampi_bits64(src[l]) & 0x7fffffffffffffffu, low, high);
    for (l = 0; (hard >> 63) != 0u && l < 16; l++) {
        uint64_t u = ampi_bits64(src[l]);
        dst[l] = random ? ampi_narrow_random(u, random[l], fraction_bits, bias)
                        : ampi_narrow(u, fraction_bits, bias);
    }
    if (hard >> 63) return;
    for (l = 0; l < 16; l++) {
        uint64_t u = ampi_bits64(src[l]), mag = u & 0x7fffffffffffffffu, sign = u ^ mag;
        uint64_t nearest = ((uint64_t)1u << (cut - 1u)) - 1u + (mag >> cut & 1u);
        uint64_t r = (mag - rebias + (random ? (uint64_t)~random[l] << (cut - 32u) : nearest)) >> cut;
        dst[l] = (uint32_t)((r & ampi_mask64(mag)) | sign >> sign_shift);
    }
}
AMPI_INLINE void ampi_lanes_f64_to_half(uint16_t* AMPI_RESTRICT dst, const double* AMPI_RESTRICT src) {
    uint32_t bits[16];
    int l;
    ampi_lanes_narrow(bits, src, NULL, AMPI_F16_FORM);
    for (l = 0; l < 16; l++) dst[l] = (uint16_t)bits[l];
}
AMPI_INLINE void ampi_lanes_f64_to_bf16(uint16_t* AMPI_RESTRICT dst, const double* AMPI_RESTRICT src) {
    uint32_t bits[16];
    int l;
    ampi_lanes_narrow(bits, src, NULL, AMPI_BF16_FORM);
    for (l = 0; l < 16; l++) dst[l] = (uint16_t)bits[l];
}
AMPI_INLINE void ampi_lanes_f64_to_f32(float* AMPI_RESTRICT dst, const double* AMPI_RESTRICT src) {
    uint32_t bits[16];
    ampi_lanes_narrow(bits, src, NULL, AMPI_F32_FORM);
    memcpy(dst, bits, sizeof bits);
}

/* The first four have faster hands below, so three of them exist in portable form only; the fourth, float to
   half, also serves where an instruction's exception flags are not wanted. */
AMPI_LANES_KERNEL(ampi_plain_f32_to_half, uint16_t, float, ampi_lanes_f32_to_half)
AMPI_LANES_LOOP(AMPI_FN, ampi_plain_half_to_f32_body, float, uint16_t, ampi_lanes_half_to_f32)
AMPI_LANES_LOOP(AMPI_FN, ampi_plain_f32_to_bf16_body, uint16_t, float, ampi_lanes_f32_to_bf16)
AMPI_LANES_LOOP(AMPI_FN, ampi_plain_bf16_to_f32_body, float, uint16_t, ampi_lanes_bf16_to_f32)
AMPI_LANES_KERNEL(ampi_f32_to_f64, double, float, ampi_lanes_f32_to_f64)
AMPI_LANES_KERNEL(ampi_f64_to_f32, float, double, ampi_lanes_f64_to_f32)
AMPI_LANES_KERNEL(ampi_f64_to_half, uint16_t, double, ampi_lanes_f64_to_half)
AMPI_LANES_KERNEL(ampi_f64_to_bf16, uint16_t, double, ampi_lanes_f64_to_bf16)

/* --- the hot four by hand ------------------------------------------------------------------- */

/* float <-> half by the processor's own instructions, float <-> bfloat16 by integers (vcvtne2ps2bf16 would
   flush subnormals). The half instructions keep subnormals whatever FTZ and DAZ say, quieten a NaN, keep the
   upper bits of its payload, and round as the instruction itself says: the bits of the formulas above. */
#if AMPI_X86
/* Sixteen elements in registers. Zero-masked forms with all lanes on are the plain instructions, but without
   the undefined value in gcc 12's headers that it then warns about. */
#define AMPI_ALL16 ((__mmask16)0xffffu)
AMPI_TARGET_AVX512 AMPI_INLINE __m256i ampi_f32_to_half_x16(__m512i u) {
    return _mm512_maskz_cvtps_ph(AMPI_ALL16, _mm512_castsi512_ps(u), _MM_FROUND_TO_NEAREST_INT);
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_half_to_f32_x16(__m256i h) {
    return _mm512_castps_si512(_mm512_maskz_cvtph_ps(AMPI_ALL16, h));
}
/* Lanes that hold a NaN, quiet or signalling. */
AMPI_TARGET_AVX512 AMPI_INLINE __mmask16 ampi_nan_x16(__m512i u) {
    return _mm512_fpclass_ps_mask(_mm512_castsi512_ps(u), 0x81);
}
/* The upper half of each lane: the odd ones of 32 words. */
AMPI_TARGET_AVX512 AMPI_INLINE __m256i ampi_upper_x16(__m512i u) {
    const __m512i odd = _mm512_set_epi64(0, 0, 0, 0, 0x001f001d001b0019, 0x0017001500130011, 0x000f000d000b0009,
                                         0x0007000500030001);
    return _mm512_maskz_extracti64x4_epi64(0xf, _mm512_maskz_permutexvar_epi16(0xffffffffu, odd, u), 0);
}
/* Rounded to bfloat16, in the upper half of each lane. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_round_bf16_x16(__m512i u) {
    const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    __m512i rounded = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
    rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
    return _mm512_mask_or_epi32(rounded, ampi_nan_x16(u), u, _mm512_set1_epi32(0x400000));
}
AMPI_TARGET_AVX512 AMPI_INLINE __m256i ampi_f32_to_bf16_x16(__m512i u) {
    return ampi_upper_x16(ampi_round_bf16_x16(u));
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_bf16_to_f32_x16(__m256i h) {
    __m512i u = _mm512_maskz_slli_epi32(AMPI_ALL16, _mm512_maskz_cvtepu16_epi32(AMPI_ALL16, h), 16);
    return _mm512_mask_or_epi32(u, ampi_nan_x16(u), u, _mm512_set1_epi32(0x400000));
}

/* Which of 32 numbers of 16 bits are NaNs, and all of them as they come back from floats: NaNs are quiet then. */
AMPI_TARGET_AVX512 AMPI_INLINE __mmask32 ampi_nan_x32(amp_dtype t, __m512i x) {
    const __m512i mag = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    return _mm512_cmpgt_epi16_mask(mag, _mm512_set1_epi16(t == AMP_F16 ? 0x7c00 : 0x7f80));
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_quiet_x32(amp_dtype t, __m512i x) {
    const __m512i quiet = _mm512_or_si512(x, _mm512_set1_epi16(t == AMP_F16 ? 0x200 : 0x40));
    return _mm512_mask_mov_epi16(x, ampi_nan_x32(t, x), quiet);
}

/* The loops: two whole vectors a turn, then masked ones. A masked store costs more than a plain one even where
   the mask is full. */
#define AMPI_PUT_F32_X16(p, x)   _mm512_storeu_si512((void*)(p), x)
#define AMPI_PUT_HALF_X16(p, x)  _mm256_storeu_si256((__m256i*)(void*)(p), x)
#define AMPI_LOAD_F32_X16(m, p)  _mm512_maskz_loadu_epi32(m, (const void*)(p))
#define AMPI_LOAD_HALF_X16(m, p) _mm256_maskz_loadu_epi16(m, (const void*)(p))
#define AMPI_LOOP_AVX512(name, dst_type, src_type, load, put, store)                                       \
    AMPI_TARGET_AVX512 AMPI_FN void ampi_##name##_avx512(dst_type* dst, const src_type* src, size_t n) {   \
        size_t i = 0;                                                                                      \
        for (; i + 32 <= n; i += 32) {                                                                     \
            put(dst + i, ampi_##name##_x16(load(AMPI_ALL16, src + i)));                                    \
            put(dst + i + 16, ampi_##name##_x16(load(AMPI_ALL16, src + i + 16)));                          \
        }                                                                                                  \
        for (; i < n; i += 16) {                                                                           \
            __mmask16 m = (__mmask16)(n - i < 16 ? (1u << (n - i)) - 1u : 0xffffu);                        \
            store((void*)(dst + i), m, ampi_##name##_x16(load(m, src + i)));                               \
        }                                                                                                  \
        ampi_clear_upper();                                                                                \
    }
AMPI_LOOP_AVX512(f32_to_half, uint16_t, float, AMPI_LOAD_F32_X16, AMPI_PUT_HALF_X16, _mm256_mask_storeu_epi16)
AMPI_LOOP_AVX512(f32_to_bf16, uint16_t, float, AMPI_LOAD_F32_X16, AMPI_PUT_HALF_X16, _mm256_mask_storeu_epi16)
AMPI_LOOP_AVX512(half_to_f32, float, uint16_t, AMPI_LOAD_HALF_X16, AMPI_PUT_F32_X16, _mm512_mask_storeu_epi32)
AMPI_LOOP_AVX512(bf16_to_f32, float, uint16_t, AMPI_LOAD_HALF_X16, AMPI_PUT_F32_X16, _mm512_mask_storeu_epi32)

/* The processor prefetches up to the end of a page; this is one page ahead. */
#define AMPI_AHEAD(p, byte) _mm_prefetch((const char*)(p) + (byte) + 4096, _MM_HINT_T0)

/* Elements [i, i+16) of an operand as floats, and back; those outside of the mask are 0, and not written. The type
   and, but for the last group, the mask are constants where these are inlined. A signalling NaN stays one on its way
   in: for arithmetic, which makes it quiet. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_get_x16(amp_dtype t, const void* p, size_t i, __mmask16 m) {
    const __m256i bits = t == AMP_F32 ? _mm256_setzero_si256() : AMPI_LOAD_HALF_X16(m, (const uint16_t*)p + i);
    if (t == AMP_F32) return _mm512_maskz_loadu_ps(m, (const float*)p + i);
    if (t == AMP_F16) return _mm512_maskz_cvtph_ps(AMPI_ALL16, bits);
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(AMPI_ALL16, _mm512_maskz_cvtepu16_epi32(AMPI_ALL16, bits), 16));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_put_fetched_x16(amp_dtype t, void* p, size_t i, __mmask16 m, __m512 x) {
    const __m512i u = _mm512_castps_si512(x);
    __m256i bits;
    if (t == AMP_F32) {
        _mm512_mask_storeu_ps((float*)p + i, m, x);
        return;
    }
    bits = t == AMP_F16 ? ampi_f32_to_half_x16(u) : ampi_f32_to_bf16_x16(u);
    if (m == AMPI_ALL16) AMPI_PUT_HALF_X16((uint16_t*)p + i, bits);
    else _mm256_mask_storeu_epi16((uint16_t*)p + i, m, bits);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_put_x16(amp_dtype t, void* p, size_t i, __mmask16 m, __m512 x) {
    AMPI_AHEAD(p, i * amp_dtype_size(t));
    ampi_put_fetched_x16(t, p, i, m, x);
}
/* The first n of sixteen. */
AMPI_INLINE __mmask16 ampi_first_x16(size_t n) { return (__mmask16)(n < 16 ? (1u << n) - 1u : 0xffffu); }

/* step(type, i, mask, ...) for each group of sixteen of n elements, the last of which may have fewer. */
#define AMPI_EACH_X16(step, t, n, ...)                                                    \
    do {                                                                                  \
        size_t ampi_i = 0;                                                                \
        for (; ampi_i + 16 <= (n); ampi_i += 16) step(t, ampi_i, AMPI_ALL16, __VA_ARGS__); \
        if (ampi_i < (n)) step(t, ampi_i, ampi_first_x16((n) - ampi_i), __VA_ARGS__);     \
    } while (0)
/* fn(type, ...) with the type as a constant. */
#define AMPI_FOR_TYPE(fn, t, ...)                                       \
    do {                                                                \
        if (ampi_dtype(t) == AMP_F16) fn(AMP_F16, __VA_ARGS__);         \
        else if (ampi_dtype(t) == AMP_BF16) fn(AMP_BF16, __VA_ARGS__);  \
        else fn(AMP_F32, __VA_ARGS__);                                  \
    } while (0)

AMPI_TARGET_AVX2 AMPI_INLINE void ampi_lanes_f32_to_half_avx2(uint16_t* dst, const float* src) {
    __m128i a = _mm256_cvtps_ph(_mm256_loadu_ps(src), _MM_FROUND_TO_NEAREST_INT);
    __m128i b = _mm256_cvtps_ph(_mm256_loadu_ps(src + 8), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i*)(void*)dst, a);
    _mm_storeu_si128((__m128i*)(void*)(dst + 8), b);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_lanes_half_to_f32_avx2(float* dst, const uint16_t* src) {
    _mm256_storeu_ps(dst, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(const void*)src)));
    _mm256_storeu_ps(dst + 8, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(const void*)(src + 8))));
}
/* Eight floats to bfloat16, each in the upper half of its lane. NaNs are rare, and blending is slow. */
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_bf16_round_avx2(__m256 v) {
    __m256i u = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    __m256i mag = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    __m256i nan = _mm256_cmpgt_epi32(mag, _mm256_set1_epi32(0x7f800000));
    __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    return _mm256_movemask_epi8(nan) ? _mm256_blendv_epi8(rounded, quiet, nan) : rounded;
}
/* packus works within the 128-bit halves of a register, so the quarters are put in order after it. */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_lanes_f32_to_bf16_avx2(uint16_t* dst, const float* src) {
    __m256i low = ampi_bf16_round_avx2(_mm256_loadu_ps(src)), high = ampi_bf16_round_avx2(_mm256_loadu_ps(src + 8));
    __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
    _mm256_storeu_si256((__m256i*)(void*)dst, _mm256_permute4x64_epi64(both, 0xd8));
}
/* Eight bfloat16, each in the upper half of its lane: a signalling NaN stays one. */
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_bf16_spread_avx2(const uint16_t* src) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(const void*)src));
    return _mm256_shuffle_epi8(twice, _mm256_set_epi64x(0x0f0e80800d0c8080, 0x0b0a808009088080, 0x0706808005048080,
                                                        0x0302808001008080));
}
/* Eight bfloat16 to float. */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_bf16_widen_avx2(float* dst, const uint16_t* src) {
    __m256i u = ampi_bf16_spread_avx2(src), mag, nan;
    mag = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    nan = _mm256_cmpgt_epi32(mag, _mm256_set1_epi32(0x7f800000));
    u = _mm256_or_si256(u, _mm256_and_si256(nan, _mm256_set1_epi32(0x400000)));
    _mm256_storeu_si256((__m256i*)(void*)dst, u);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_lanes_bf16_to_f32_avx2(float* dst, const uint16_t* src) {
    ampi_bf16_widen_avx2(dst, src);
    ampi_bf16_widen_avx2(dst + 8, src + 8);
}
AMPI_LANES_LOOP(AMPI_TARGET_AVX2 AMPI_FN, ampi_f32_to_half_avx2, uint16_t, float, ampi_lanes_f32_to_half_avx2)
AMPI_LANES_LOOP(AMPI_TARGET_AVX2 AMPI_FN, ampi_half_to_f32_avx2, float, uint16_t, ampi_lanes_half_to_f32_avx2)
AMPI_LANES_LOOP(AMPI_TARGET_AVX2 AMPI_FN, ampi_f32_to_bf16_avx2, uint16_t, float, ampi_lanes_f32_to_bf16_avx2)
AMPI_LANES_LOOP(AMPI_TARGET_AVX2 AMPI_FN, ampi_bf16_to_f32_avx2, float, uint16_t, ampi_lanes_bf16_to_f32_avx2)

#define AMPI_HOT_KERNEL(name, dst_type, src_type)                                            \
    AMPI_FN void ampi_##name(dst_type* dst, const src_type* src, size_t n) {                 \
        switch (ampi_simd()) {                                                               \
            case AMP_ISA_AVX512: ampi_##name##_avx512(dst, src, n); break;                   \
            case AMP_ISA_AVX2:   ampi_##name##_avx2(1, dst, src, n); ampi_clear_upper(); break;\
            default:             ampi_plain_##name##_body(0, dst, src, n); break;            \
        }                                                                                    \
    }

#elif AMPI_NEON
/* The half instructions obey FPCR: default NaN (bit 25), the alternative half format (26) and the rounding
   mode (22, 23) must be off, else the formulas do the work. */
AMPI_FN int ampi_neon_half_usable(void) {
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return (fpcr & ((uint64_t)15u << 22 | (uint64_t)1u << 26)) == 0;
}
AMPI_INLINE void ampi_lanes_f32_to_half_neon(uint16_t* dst, const float* src) {
    int l;
    for (l = 0; l < 16; l += 4)
        vst1_u16(dst + l, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(src + l))));
}
AMPI_INLINE void ampi_lanes_half_to_f32_neon(float* dst, const uint16_t* src) {
    int l;
    for (l = 0; l < 16; l += 4)
        vst1q_f32(dst + l, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(src + l))));
}
AMPI_LANES_LOOP(AMPI_FN, ampi_f32_to_half_neon, uint16_t, float, ampi_lanes_f32_to_half_neon)
AMPI_LANES_LOOP(AMPI_FN, ampi_half_to_f32_neon, float, uint16_t, ampi_lanes_half_to_f32_neon)
/* Compilers turn the plain bfloat16 kernels into NEON code. */
#define ampi_f32_to_bf16_neon ampi_plain_f32_to_bf16_body
#define ampi_bf16_to_f32_neon ampi_plain_bf16_to_f32_body

#define AMPI_HOT_KERNEL(name, dst_type, src_type)                                            \
    AMPI_FN void ampi_##name(dst_type* dst, const src_type* src, size_t n) {                 \
        if (ampi_simd() == AMP_ISA_NEON && ampi_neon_half_usable())                        \
            ampi_##name##_neon(1, dst, src, n);                                              \
        else                                                                                 \
            ampi_plain_##name##_body(0, dst, src, n);                                        \
    }

#else
#define AMPI_HOT_KERNEL(name, dst_type, src_type)                                            \
    AMPI_FN void ampi_##name(dst_type* dst, const src_type* src, size_t n) {                 \
        ampi_plain_##name##_body(0, dst, src, n);                                            \
    }
#endif

AMPI_HOT_KERNEL(f32_to_half, uint16_t, float)
AMPI_HOT_KERNEL(half_to_f32, float, uint16_t)
AMPI_HOT_KERNEL(f32_to_bf16, uint16_t, float)
AMPI_HOT_KERNEL(bf16_to_f32, float, uint16_t)

/* dst[i] = src[offset + i] as float, and dst[offset + i] = src[i] rounded to t; no overlap. */
AMPI_FN void ampi_load_f32(float* dst, const void* src, amp_dtype t, size_t offset, size_t n) {
    switch (ampi_dtype(t)) {
        case AMP_F16:  ampi_half_to_f32(dst, (const uint16_t*)src + offset, n); break;
        case AMP_BF16: ampi_bf16_to_f32(dst, (const uint16_t*)src + offset, n); break;
        case AMP_F64:  ampi_f64_to_f32(dst, (const double*)src + offset, n); break;
        default:       if (n) memcpy(dst, (const float*)src + offset, n * sizeof(float));
    }
}
AMPI_FN void ampi_store_f32(void* dst, amp_dtype t, size_t offset, const float* src, size_t n) {
    switch (ampi_dtype(t)) {
        case AMP_F16:  ampi_f32_to_half((uint16_t*)dst + offset, src, n); break;
        case AMP_BF16: ampi_f32_to_bf16((uint16_t*)dst + offset, src, n); break;
        case AMP_F64:  ampi_f32_to_f64((double*)dst + offset, src, n); break;
        default:       if (n) memcpy((float*)dst + offset, src, n * sizeof(float));
    }
}

/* --- stochastic rounding -------------------------------------------------------------------- */

/* 64 consecutive words of a random stream; `first` is a multiple of 64. The lanes are ampi_philox, sixteen
   counters side by side. */
AMPI_INLINE void ampi_random64_body(int hw, uint32_t* AMPI_RESTRICT out, uint64_t seed, uint64_t first) {
    uint32_t x0[16], x1[16], x2[16], x3[16], k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    int round, l;
    (void)hw;
    for (l = 0; l < 16; l++) {
        x0[l] = (uint32_t)(first >> 2) + (uint32_t)l;      /* no carry: first >> 2 is a multiple of 16 */
        x1[l] = (uint32_t)(first >> 34);
        x2[l] = x3[l] = 0;
    }
    for (round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (l = 0; l < 16; l++) {
            uint64_t a = (uint64_t)x0[l] * 0xD2511F53u, b = (uint64_t)x2[l] * 0xCD9E8D57u;
            x0[l] = (uint32_t)(b >> 32) ^ x1[l] ^ k0;
            x1[l] = (uint32_t)b;
            x2[l] = (uint32_t)(a >> 32) ^ x3[l] ^ k1;
            x3[l] = (uint32_t)a;
        }
    for (l = 0; l < 16; l++) {
        out[4 * l] = x0[l];
        out[4 * l + 1] = x1[l];
        out[4 * l + 2] = x2[l];
        out[4 * l + 3] = x3[l];
    }
}
AMPI_KERNEL(ampi_random64, (uint32_t* out, uint64_t seed, uint64_t first), out, seed, first)

/* out[i] = amp_random_bits(seed, index + i), for n elements. */
AMPI_FN void ampi_random_block(uint32_t* out, uint64_t seed, uint64_t index, size_t n) {
    uint32_t words[64];
    while (n > 0) {
        size_t skip = (size_t)(index & 63u), take = n < 64 - skip ? n : 64 - skip;
        ampi_random64(words, seed, index - skip);
        memcpy(out, words + skip, take * sizeof *out);
        out += take;
        index += take;
        n -= take;
    }
}

/* A block of doubles to half or bfloat16, rounded with one random word each. */
#define AMPI_RANDOM_BLOCK 256
AMPI_INLINE void ampi_round_random_body(int hw, uint16_t* AMPI_RESTRICT dst, const double* AMPI_RESTRICT src,
                                        const uint32_t* AMPI_RESTRICT random, int is_half) {
    uint32_t bits[16];
    int i, l;
    (void)hw;
    for (i = 0; i < AMPI_RANDOM_BLOCK; i += 16) {
        if (is_half) ampi_lanes_narrow(bits, src + i, random + i, AMPI_F16_FORM);
        else ampi_lanes_narrow(bits, src + i, random + i, AMPI_BF16_FORM);
        for (l = 0; l < 16; l++) dst[i + l] = (uint16_t)bits[l];
    }
}
AMPI_KERNEL(ampi_round_random, (uint16_t* dst, const double* src, const uint32_t* random, int is_half),
            dst, src, random, is_half)

/* --- amp_convert ------------------------------------------------------------------------------ */

/* Everything a block of the conversion needs to know. */
typedef struct ampi_convert_job {
    unsigned char* dst;
    const unsigned char* src;
    amp_dtype dst_dtype, src_dtype;
    size_t n, block;             /* elements in all, and in one block */
    int stream;                  /* whole blocks go past the cache */
    amp_convert_desc desc;
} ampi_convert_job;

#define AMPI_CONVERT_TILE 1024     /* elements in a block that goes through the stack */
#define AMPI_CONVERT_CHUNK 65536   /* elements in a block that does not: one thread's unit of work */
#define AMPI_CONVERT_PIECE 16384   /* the same where there are few */

/* n elements to nearest even, by way of float where there is no direct kernel: that is exact for 16 bits. */
AMPI_FN void ampi_convert_nearest(void* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype,
                                  size_t n) {
    float tile[AMPI_CONVERT_TILE];
    size_t i, m;
    if (dst_dtype == src_dtype)
        memcpy(dst, src, n * amp_dtype_size(dst_dtype));
    else if (dst_dtype == AMP_F32)
        ampi_load_f32((float*)dst, src, src_dtype, 0, n);
    else if (src_dtype == AMP_F32)
        ampi_store_f32(dst, dst_dtype, 0, (const float*)src, n);
    else if (src_dtype == AMP_F64 && dst_dtype == AMP_F16)
        ampi_f64_to_half((uint16_t*)dst, (const double*)src, n);
    else if (src_dtype == AMP_F64)
        ampi_f64_to_bf16((uint16_t*)dst, (const double*)src, n);
    else
        for (i = 0; i < n; i += m) {
            m = n - i < AMPI_CONVERT_TILE ? n - i : AMPI_CONVERT_TILE;
            ampi_load_f32(tile, src, src_dtype, i, m);
            ampi_store_f32(dst, dst_dtype, i, tile, m);
        }
}

/* The same for at most a tile, by integers where half instructions could raise the overflow exception. */
AMPI_FN void ampi_convert_silent(void* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype,
                                 size_t n) {
    float tile[AMPI_CONVERT_TILE];
    if (dst_dtype != AMP_F16 || src_dtype == AMP_F16 || src_dtype == AMP_F64) {
        ampi_convert_nearest(dst, dst_dtype, src, src_dtype, n);
        return;
    }
    ampi_load_f32(tile, src, src_dtype, 0, n);
    ampi_plain_f32_to_half((uint16_t*)dst, tile, n);
}

/* n elements with stochastic rounding; element 0 has the given position in the random stream. */
AMPI_FN void ampi_convert_random(uint16_t* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype,
                                 size_t n, uint64_t seed, uint64_t position) {
    double wide[AMPI_RANDOM_BLOCK];
    uint32_t random[AMPI_RANDOM_BLOCK];
    uint16_t out[AMPI_RANDOM_BLOCK];
    size_t i, m, size = amp_dtype_size(src_dtype);
    memset(wide, 0, sizeof wide);
    memset(random, 0, sizeof random);
    for (i = 0; i < n; i += m) {
        m = n - i < AMPI_RANDOM_BLOCK ? n - i : AMPI_RANDOM_BLOCK;
        ampi_convert_nearest(wide, AMP_F64, (const unsigned char*)src + i * size, src_dtype, m);
        ampi_random_block(random, seed, position + i, m);
        ampi_round_random(out, wide, random, dst_dtype == AMP_F16);
        memcpy(dst + i, out, m * sizeof *out);
    }
}

/* Infinity becomes the largest finite value: its bits minus one, in every format. Adds to *count. n is at
   most a tile, so that sixteen counters of 16 bits are enough. */
AMPI_INLINE void ampi_saturate16_body(int hw, uint16_t* p, size_t n, uint16_t inf, size_t* count) {
    uint16_t hits[16] = { 0 };
    size_t i, l;
    (void)hw;
    for (i = 0; i + 16 <= n; i += 16)
        for (l = 0; l < 16; l++) {
            uint16_t hit = (p[i + l] & 0x7fff) == inf;
            p[i + l] = (uint16_t)(p[i + l] - hit);
            hits[l] = (uint16_t)(hits[l] + hit);
        }
    for (l = 0; i + l < n; l++) {
        uint16_t hit = (p[i + l] & 0x7fff) == inf;
        p[i + l] = (uint16_t)(p[i + l] - hit);
        hits[l] = (uint16_t)(hits[l] + hit);
    }
    for (l = 0; l < 16; l++) *count += hits[l];
}
AMPI_KERNEL(ampi_saturate16, (uint16_t* p, size_t n, uint16_t inf, size_t* count), p, n, inf, count)

/* The same for any type; returns how many elements it clamped. */
AMPI_FN size_t ampi_saturate(unsigned char* p, amp_dtype t, size_t n) {
    const uint64_t inf64 = (uint64_t)0x7ffu << 52;
    size_t i, count = 0;
    if (t == AMP_F16) ampi_saturate16((uint16_t*)(void*)p, n, 0x7c00, &count);
    if (t == AMP_BF16) ampi_saturate16((uint16_t*)(void*)p, n, 0x7f80, &count);
    for (i = 0; i < n && t == AMP_F32; i++) {
        uint32_t u;
        memcpy(&u, p + i * sizeof u, sizeof u);
        if ((u & 0x7fffffffu) != 0x7f800000u) continue;
        u--;
        count++;
        memcpy(p + i * sizeof u, &u, sizeof u);
    }
    for (i = 0; i < n && t == AMP_F64; i++) {
        uint64_t u;
        memcpy(&u, p + i * sizeof u, sizeof u);
        if ((u & 0x7fffffffffffffffu) != inf64) continue;
        u--;
        count++;
        memcpy(p + i * sizeof u, &u, sizeof u);
    }
    return count;
}

/* Beyond the cache, a plain store first reads the line that it overwrites. A streaming store does not, and taking
   from eight places in turn keeps more of the processor's prefetchers at work: together as fast as memcpy. Within
   the cache a streaming store would be several times slower than a plain one. */
#define AMPI_STREAMS 8
#define AMPI_STREAM_STEP 128       /* elements from one place before the next: whole cache lines of every type */
#define AMPI_STREAM_CACHE ((size_t)64 << 20)   /* more is not counted: others use it too */

#if AMPI_X86
/* Bytes of the largest cache, 0 if unknown: Intel's list of caches, then AMD's. */
AMPI_FN size_t ampi_cache_bytes(void) {
    static const unsigned lists[] = { 4u, 0x8000001du };
    unsigned i, k, a, b, c, d;
    size_t largest = 0;
    if (ampi_simd() < AMP_ISA_AVX2) return 0;
    for (i = 0; i < 2; i++)
        for (k = 0; __get_cpuid_count(lists[i], k, &a, &b, &c, &d) && (a & 31u) != 0; k++) {
            size_t line = (b & 0xfffu) + 1u, parts = (b >> 12 & 0x3ffu) + 1u, ways = (b >> 22) + 1u;
            size_t size = ((size_t)c + 1u) * line * parts * ways;
            if (size > largest) largest = size;
        }
    return largest < AMPI_STREAM_CACHE ? largest : AMPI_STREAM_CACHE;
}

/* All three are multiples of 32. The fence is for other threads that will read dst. */
AMPI_TARGET_AVX2 AMPI_FN void ampi_stream_copy(unsigned char* dst, const unsigned char* src, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; i += 32)
        _mm256_stream_si256((__m256i*)(void*)(dst + i), _mm256_load_si256((const __m256i*)(const void*)(src + i)));
    ampi_clear_upper();
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_stream_end(void) { _mm_sfence(); }
#else
AMPI_FN size_t ampi_cache_bytes(void) { return 0; }
AMPI_FN void ampi_stream_copy(unsigned char* dst, const unsigned char* src, size_t bytes) { memcpy(dst, src, bytes); }
AMPI_FN void ampi_stream_end(void) {}
#endif

/* A job that half of the cache does not hold is streamed, from where dst begins a line. */
AMPI_FN void ampi_stream_begin(ampi_convert_job* job) {
    size_t dst_size = amp_dtype_size(job->dst_dtype), src_size = amp_dtype_size(job->src_dtype), lead, cache;
    if (job->block != AMPI_CONVERT_CHUNK || job->n < 4 * AMPI_CONVERT_CHUNK) return;
    cache = ampi_cache_bytes();
    if (cache == 0 || job->n <= cache / 2 / (dst_size + src_size)) return;
    lead = (64 - (size_t)((uintptr_t)job->dst % 64)) % 64 / dst_size;
    ampi_convert_nearest(job->dst, job->dst_dtype, job->src, job->src_dtype, lead);
    job->dst += lead * dst_size;
    job->src += lead * src_size;
    job->n -= lead;
    job->stream = 1;
}

AMPI_FN void ampi_stream_block(const ampi_convert_job* job, unsigned char* dst, const unsigned char* src) {
    const size_t dst_size = amp_dtype_size(job->dst_dtype), src_size = amp_dtype_size(job->src_dtype);
    const size_t part = AMPI_CONVERT_CHUNK / AMPI_STREAMS;
    unsigned char room[AMPI_STREAM_STEP * sizeof(double) + 32], *tile = room + (32 - (uintptr_t)room % 32);
    size_t i, k;
    for (i = 0; i < part; i += AMPI_STREAM_STEP)
        for (k = i; k < AMPI_CONVERT_CHUNK; k += part) {
            ampi_convert_nearest(tile, job->dst_dtype, src + k * src_size, job->src_dtype, AMPI_STREAM_STEP);
            ampi_stream_copy(dst + k * dst_size, tile, AMPI_STREAM_STEP * dst_size);
        }
    ampi_stream_end();
}

/* One block; returns how many elements were clamped. In place, the source moves to the stack first. */
AMPI_FN size_t ampi_convert_block(const ampi_convert_job* job, size_t index) {
    double copy[AMPI_CONVERT_TILE];
    size_t first = index * job->block, n = job->n - first < job->block ? job->n - first : job->block;
    size_t src_size = amp_dtype_size(job->src_dtype);
    unsigned char* dst = job->dst + first * amp_dtype_size(job->dst_dtype);
    const void* src = job->src + first * src_size;
    if (job->dst == job->src) src = memcpy(copy, src, n * src_size);
    if (job->stream && n == AMPI_CONVERT_CHUNK)
        ampi_stream_block(job, dst, (const unsigned char*)src);
    else if (job->desc.rounding == AMP_ROUND_STOCHASTIC && job->dst_dtype != job->src_dtype)
        ampi_convert_random((uint16_t*)(void*)dst, job->dst_dtype, src, job->src_dtype, n, job->desc.seed,
                            job->desc.offset + first);
    else if (job->desc.saturate)
        ampi_convert_silent(dst, job->dst_dtype, src, job->src_dtype, n);
    else
        ampi_convert_nearest(dst, job->dst_dtype, src, job->src_dtype, n);
    return job->desc.saturate ? ampi_saturate(dst, job->dst_dtype, n) : 0;
}

/* All blocks. In place one after the other, from the end if elements grow: no block then overwrites source
   elements that another one still needs. */
AMPI_FN size_t ampi_convert_run(const ampi_convert_job* job) {
    int in_place = job->dst == job->src;
    int backwards = in_place && amp_dtype_size(job->dst_dtype) > amp_dtype_size(job->src_dtype);
    int64_t i, blocks = (int64_t)(job->n / job->block + (job->n % job->block != 0));
    size_t clamped = 0;
    AMPI_PARALLEL_FOR(!in_place && job->n >= AMPI_CONVERT_CHUNK)
    for (i = 0; i < blocks; i++) {
        size_t hits = ampi_convert_block(job, (size_t)(backwards ? blocks - 1 - i : i));
#ifdef AMPI_PRAGMA
        AMPI_PRAGMA(omp atomic)
#endif
        clamped += hits;
    }
    return clamped;
}

/* What can be refused without looking at the pointers, then the pointers; both before anything is written. */
AMPI_FN amp_result ampi_convert_check_types(amp_dtype dst_dtype, amp_dtype src_dtype,
                                            const amp_convert_desc* desc) {
    const amp_logger* log = desc->logger;
    if (amp_dtype_size(dst_dtype) == 0)
        return ampi_fail(log, AMP_ERR_DTYPE, "amp_convert: dst_dtype %d is not a data type", (int)dst_dtype);
    if (amp_dtype_size(src_dtype) == 0)
        return ampi_fail(log, AMP_ERR_DTYPE, "amp_convert: src_dtype %d is not a data type", (int)src_dtype);
    if (desc->rounding != AMP_ROUND_NEAREST && desc->rounding != AMP_ROUND_STOCHASTIC)
        return ampi_fail(log, AMP_ERR_DESC, "amp_convert: rounding %d is not 0 (nearest) or 1 (stochastic)",
                         (int)desc->rounding);
    if (desc->rounding == AMP_ROUND_STOCHASTIC && amp_dtype_size(dst_dtype) != 2)
        return ampi_fail(log, AMP_ERR_DESC, "amp_convert: stochastic rounding is to f16 or bf16, not to %s",
                         amp_dtype_name(dst_dtype));
    return AMP_OK;
}

AMPI_FN amp_result ampi_convert_check_memory(const void* dst, size_t dst_size, const void* src,
                                             size_t src_size, size_t n, const amp_logger* log) {
    size_t largest = dst_size > src_size ? dst_size : src_size;
    uintptr_t d = (uintptr_t)dst, s = (uintptr_t)src;
    if (!dst || !src)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "amp_convert: %s is NULL but there are %lu elements",
                         dst ? "src" : "dst", (unsigned long)n);
    if (n > (SIZE_MAX >> 1) / largest)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "amp_convert: no memory holds %lu elements of %lu bytes",
                         (unsigned long)n, (unsigned long)largest);
    if (d != s && d < s + n * src_size && s < d + n * dst_size)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "amp_convert: dst and src overlap, %lu bytes apart; only "
                         "dst == src is allowed", (unsigned long)(d < s ? s - d : d - s));
    return AMP_OK;
}

AMP_DEF amp_result amp_convert_with(void* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype,
                                    size_t n, const amp_convert_desc* desc) {
    ampi_convert_job job;
    fenv_t floats;
    amp_result r;
    size_t clamped;
    memset(&job, 0, sizeof job);
    if (desc) job.desc = *desc;
    r = ampi_convert_check_types(dst_dtype, src_dtype, &job.desc);
    if (r != AMP_OK || n == 0) return r;
    r = ampi_convert_check_memory(dst, amp_dtype_size(dst_dtype), src, amp_dtype_size(src_dtype), n,
                                  job.desc.logger);
    if (r != AMP_OK) return r;
    job.dst = (unsigned char*)dst;
    job.src = (const unsigned char*)src;
    job.dst_dtype = ampi_dtype(dst_dtype);
    job.src_dtype = ampi_dtype(src_dtype);
    job.n = n;
    job.block = n < 4 * AMPI_CONVERT_CHUNK ? AMPI_CONVERT_PIECE : AMPI_CONVERT_CHUNK;
    if (dst == src || job.desc.saturate || job.desc.rounding) job.block = AMPI_CONVERT_TILE;
    if (job.desc.saturate) feholdexcept(&floats);
    ampi_stream_begin(&job);
    clamped = ampi_convert_run(&job);
    if (job.desc.saturate) fesetenv(&floats);
    if (job.desc.saturated) *job.desc.saturated += clamped;
    return AMP_OK;
}

AMP_DEF amp_result amp_convert(void* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype,
                               size_t n) {
    return amp_convert_with(dst, dst_dtype, src, src_dtype, n, NULL);
}

/* ======================================================================================== */
/* >>impl-gemm  Matrix product, dense layer, convolution.                                     */
/* ======================================================================================== */

/* How a product is computed.
     C is cut into tiles of mc x nc elements; a tile is one thread's work. For a tile, k runs in blocks of kc:
     the block of op(B), and then one panel of mr rows of op(A) after the other, are *packed*, that is widened
     to FP32 and laid out in the order in which the micro-kernel reads them, and the micro-kernel adds the
     panel's product with the block to T, the tile's FP32 sums. The panel of A comes from the first-level
     cache, the block of B from the second. What is FP32 already may be read where it is.
     After the last block each row of T is finished (alpha, beta, bias) and rounded once into C.
   T keeps the exact FP32 partial sums between blocks, and each element of T belongs to one accumulator that
   sees k in ascending order. So neither mc, nc, kc nor the number of threads can change a bit.
   A convolution is the same product on other operands: an "image" operand computes its elements' places
   (im2col) while it is packed, so the unfolded image never lies in memory. Where words (see there) pay, it is packed as
   words; otherwise there are direct forms.
   Instructions that multiply pairs of 16-bit numbers take *words* instead of FP32 (see there): vdpbf16ps, whose
   sums are the same, and AMX, whose are not, so that it has to be asked for.

   Letters: mr rows x nr columns are what the micro-kernel holds in registers; nr = 2 vectors of `lanes`. */

/* --- the micro-kernels ------------------------------------------------------------------- */

/* t[i][j] = (first ? 0 : old[i][j]) + sum over k of a[i*rs + k*ks] * b[k*bs + j], i < rows, j < width,
   width = lanes, or 2*lanes if `two`; only the first `columns` are written, and `two` if columns > lanes.
   `exact`: the products are exact in FP32 (two halves). `last`: t is the result, so every NaN becomes the
   one positive quiet NaN: which payload and sign an fma hands on differs between processors. What lies `ahead`
   floats on from each b[k*bs] is fetched meanwhile. */
typedef struct ampi_micro {
    const float* a; size_t rs, ks;
    const float* b; size_t bs, ahead;
    const float* old; size_t ldo;
    float* t; size_t ldt;
    size_t k, columns;
    int first, last, two, exact;
} ampi_micro;

/* What becomes of a panel of sums t: with v = alpha*t, v = beta*add + v where there is an `add`, and v rounded
   to C's type. add: C's old values, or a row of F32 (ld 0), or 16 times one value for each row (`spread`). */
typedef struct ampi_finish {
    void* c; amp_dtype c_dtype; size_t ldc;
    const void* add; amp_dtype add_dtype; size_t ld_add;
    int spread;
    float alpha, beta;
} ampi_finish;

/* What an instruction set brings. load: widens a block of `rows` x `cols` elements to FP32 rows, each
   filled up with zeros to the next multiple of `lanes`. transpose: dst[(k ^ flip)*ldd + l] = src[l*lds + k]
   for l < lanes. */
typedef struct ampi_gemm_isa {
    size_t mr, lanes, a_width;         /* a_width: floats between two k of a k-major panel of A, >= mr */
    size_t words;                      /* how many words (see there) two k make; 0 = the kernel takes FP32 */
    int staged;                        /* words: B is packed as FP32 first, or may be */
    void (*micro)(size_t rows, const ampi_micro* u);
    void (*load)(float* dst, size_t ldd, const void* src, amp_dtype t, size_t lds, size_t rows, size_t cols);
    void (*transpose)(float* dst, size_t ldd, const float* src, size_t lds, size_t k, size_t flip);
    void (*finish)(const ampi_finish* f, size_t rows, size_t columns, const float* t, size_t ldt);
} ampi_gemm_isa;

/* A list of rows, for macros: X(row, pointer to the row's group of three, offset from there, V). Written out,
   because not every compiler keeps an array of accumulators in registers. */
#define AMPI_ROWS_1(X, V)  X(0, p0, 0, V)
#define AMPI_ROWS_2(X, V)  AMPI_ROWS_1(X, V)  X(1, p0, rs, V)
#define AMPI_ROWS_3(X, V)  AMPI_ROWS_2(X, V)  X(2, p0, 2 * rs, V)
#define AMPI_ROWS_4(X, V)  AMPI_ROWS_3(X, V)  X(3, p3, 0, V)
#define AMPI_ROWS_5(X, V)  AMPI_ROWS_4(X, V)  X(4, p3, rs, V)
#define AMPI_ROWS_6(X, V)  AMPI_ROWS_5(X, V)  X(5, p3, 2 * rs, V)
#define AMPI_ROWS_7(X, V)  AMPI_ROWS_6(X, V)  X(6, p6, 0, V)
#define AMPI_ROWS_8(X, V)  AMPI_ROWS_7(X, V)  X(7, p6, rs, V)
#define AMPI_ROWS_9(X, V)  AMPI_ROWS_8(X, V)  X(8, p6, 2 * rs, V)
#define AMPI_ROWS_10(X, V) AMPI_ROWS_9(X, V)  X(9, p9, 0, V)
#define AMPI_ROWS_11(X, V) AMPI_ROWS_10(X, V) X(10, p9, rs, V)
#define AMPI_ROWS_12(X, V) AMPI_ROWS_11(X, V) X(11, p9, 2 * rs, V)
#define AMPI_ROWS_13(X, V) AMPI_ROWS_12(X, V) X(12, p12, 0, V)
#define AMPI_ROWS_14(X, V) AMPI_ROWS_13(X, V) X(13, p12, rs, V)

/* The steps of a micro-kernel for row i: c<i>0 and c<i>1 are its two vectors of sums. */
#define AMPI_MICRO_ZERO(i, p, o, V) AMPI_##V##_T c##i##0 = AMPI_##V##_ZERO, c##i##1 = AMPI_##V##_ZERO;
#define AMPI_MICRO_READ(i, p, o, V) \
    c##i##0 = AMPI_##V##_LOAD(old + i * ldo);                                                       \
    if (two) c##i##1 = AMPI_##V##_LOAD(old + i * ldo + AMPI_##V##_LANES);
/* One row of three spreads its element of A inside the fma, for each vector anew, the others in a load of its own:
   so neither the load ports nor, where two threads share a core, the decoders are the limit. */
#define AMPI_MICRO_STEP(i, p, o, V) \
    if (i % 3 == 0) {                                                                               \
        AMPI_##V##_FMA_AT(c##i##0, b0, (p) + (o));                                                  \
        if (two) AMPI_##V##_FMA_AT(c##i##1, b1, (p) + (o));                                         \
    } else {                                                                                        \
        x = AMPI_##V##_SPREAD((p)[o]);                                                              \
        c##i##0 = AMPI_##V##_FMA(x, b0, c##i##0);                                                   \
        if (two) c##i##1 = AMPI_##V##_FMA(x, b1, c##i##1);                                          \
    }
/* c += *p * b where there is no such instruction */
#define AMPI_FMA_AT_SPREAD(V, c, b, p) c = AMPI_##V##_FMA(AMPI_##V##_SPREAD(*(p)), b, c)
#define AMPI_MICRO_CLEAN(i, p, o, V) \
    c##i##0 = AMPI_##V##_CLEAN(c##i##0);                                                            \
    if (two) c##i##1 = AMPI_##V##_CLEAN(c##i##1);
#define AMPI_MICRO_WRITE(i, p, o, V) \
    AMPI_##V##_STORE(t + i * ldt, c##i##0);                                                         \
    if (two) AMPI_##V##_STORE(t + i * ldt + AMPI_##V##_LANES, c##i##1);
#define AMPI_MICRO_WRITE_TAIL(i, p, o, V) \
    if (two) AMPI_##V##_STORE(t + i * ldt, c##i##0);                                                \
    AMPI_##V##_STORE_TAIL(t + i * ldt + (two ? AMPI_##V##_LANES : 0), two ? c##i##1 : c##i##0, rest);
/* One k, so far from the pointers. */
#define AMPI_MICRO_STEP_AT(i, p, o, V) AMPI_MICRO_STEP(i, (p) + at, o, V)
#define AMPI_MICRO_K(V, ROWS, ks_, bs_) \
    {                                                                                               \
        const size_t at = (ks_);                                                                    \
        b0 = AMPI_##V##_LOAD(b + (bs_));                                                            \
        if (two) b1 = AMPI_##V##_LOAD(b + (bs_) + AMPI_##V##_LANES);                                \
        ROWS(AMPI_MICRO_STEP_AT, V)                                                                 \
    }
#define AMPI_MICRO_ON(ks_, bs_) \
    p0 += (ks_); p3 += (ks_); p6 += (ks_); p9 += (ks_); p12 += (ks_);                               \
    b += (bs_);                                                                                     \
    AMPI_MICRO_APART
/* clang would make one chain of all these additions. */
#ifdef __clang__
  #define AMPI_MICRO_APART \
    AMPI_OPAQUE(p0); AMPI_OPAQUE(p3); AMPI_OPAQUE(p6); AMPI_OPAQUE(p9); AMPI_OPAQUE(p12); AMPI_OPAQUE(b);
#else
  #define AMPI_MICRO_APART
#endif
/* Four k a turn, of constant strides: fewer instructions, and so few turns that the processor foresees the last one
   and runs from the end of one panel into the start of the next. */
#define AMPI_MICRO_FOURS(V, ROWS, ks_, bs_) \
    for (; k >= 4; k -= 4) {                                                                        \
        AMPI_MICRO_K(V, ROWS, 0, 0) AMPI_MICRO_K(V, ROWS, ks_, bs_)                                 \
        AMPI_MICRO_K(V, ROWS, 2 * (ks_), 2 * (bs_)) AMPI_MICRO_K(V, ROWS, 3 * (ks_), 3 * (bs_))     \
        AMPI_MICRO_ON(4 * (ks_), 4 * (bs_))                                                         \
    }

/* One micro-kernel: V is the vector kind, `two_` a constant, ROWS one of the lists above. */
#define AMPI_MICRO(name, V, ROWS, two_)                                                             \
    AMPI_##V##_TARGET AMPI_FN void name(const ampi_micro* u) {                                      \
        const int two = two_;                                                                       \
        const size_t rs = u->rs, ks = u->ks, bs = u->bs, ahead = u->ahead * sizeof(float);          \
        const size_t width = two ? 2 * AMPI_##V##_LANES : AMPI_##V##_LANES;                         \
        const size_t rest = u->columns + AMPI_##V##_LANES - width;                                  \
        const float *p0 = u->a, *p3 = p0 + 3 * rs, *p6 = p3 + 3 * rs, *p9 = p6 + 3 * rs;            \
        const float *p12 = p9 + 3 * rs, *b = u->b;                                                  \
        size_t k;                                                                                   \
        AMPI_##V##_T x, b0, b1 = AMPI_##V##_ZERO;                                                   \
        ROWS(AMPI_MICRO_ZERO, V)                                                                    \
        if (!u->first) { const float* old = u->old; const size_t ldo = u->ldo; ROWS(AMPI_MICRO_READ, V) } \
        k = u->k;                                                                                   \
        if (AMPI_##V##_FOURS && bs == width) {                                                      \
            if (ks == 1) AMPI_MICRO_FOURS(V, ROWS, 1, width)                                        \
            if (ks == AMPI_##V##_LANES) AMPI_MICRO_FOURS(V, ROWS, AMPI_##V##_LANES, width)          \
        }                                                                                           \
        for (; k > 0; k--) {                                                                        \
            AMPI_FETCH(b, ahead);                                                                   \
            if (two && AMPI_##V##_LANES == 16) AMPI_FETCH(b, ahead + 64);                           \
            AMPI_MICRO_K(V, ROWS, 0, 0)                                                             \
            AMPI_MICRO_ON(ks, bs)                                                                   \
        }                                                                                           \
        if (u->last) { ROWS(AMPI_MICRO_CLEAN, V) }                                                  \
        float* t = u->t;                                                                            \
        const size_t ldt = u->ldt;                                                                  \
        if (rest == AMPI_##V##_LANES) { ROWS(AMPI_MICRO_WRITE, V) } else { ROWS(AMPI_MICRO_WRITE_TAIL, V) } \
        (void)p3; (void)p6; (void)p9; (void)p12;    /* few rows need few pointers */                \
        ampi_clear_upper();                                                                         \
    }
#define AMPI_MICRO_PAIR(V, R) \
    AMPI_MICRO(ampi_micro_##V##_##R##_1, V, AMPI_ROWS_##R, 0)                                       \
    AMPI_MICRO(ampi_micro_##V##_##R##_2, V, AMPI_ROWS_##R, 1)
#define AMPI_MICRO_CASE(V, R) \
    case R: if (u->two) ampi_micro_##V##_##R##_2(u); else ampi_micro_##V##_##R##_1(u); break;

/* Widening loads, one block at a time; what follows a row is likely to be asked for next, a panel on. LOADn and
   TAILn: n full lanes, or the first `rest` lanes and zeros. */
#define AMPI_LOAD_ROWS(V, KIND, type)                                                               \
    {                                                                                               \
        const type* s = (const type*)src;                                                           \
        size_t r, c;                                                                                \
        for (r = 0; r < rows; r++, s += lds, dst += ldd) {                                          \
            AMPI_FETCH(s + cols, 0);                                                                \
            if (AMPI_##V##_LANES * sizeof(type) == 64) AMPI_FETCH(s + cols, 64);                    \
            for (c = 0; c + AMPI_##V##_LANES <= cols; c += AMPI_##V##_LANES)                        \
                AMPI_##V##_STORE(dst + c, AMPI_##V##_##KIND(s + c));                                \
            if (c < cols) AMPI_##V##_STORE(dst + c, AMPI_##V##_##KIND##_TAIL(s + c, cols - c));     \
        }                                                                                           \
    }
#define AMPI_LOAD_BLOCK(name, V)                                                                    \
    AMPI_##V##_TARGET AMPI_FN void name(float* dst, size_t ldd, const void* src, amp_dtype t,       \
                                        size_t lds, size_t rows, size_t cols) {                     \
        if (t == AMP_F16) AMPI_LOAD_ROWS(V, F16, uint16_t)                                          \
        else if (t == AMP_BF16) AMPI_LOAD_ROWS(V, BF16, uint16_t)                                   \
        else AMPI_LOAD_ROWS(V, LOAD, float)                                                         \
        ampi_clear_upper();                                                                         \
    }

/* C from the sums t, which are read in full vectors. READ, WRITE: vectors of any type, or their first `rest`
   elements; FIRST: the first element in all lanes. */
#define AMPI_FINISH(name, V)                                                                        \
    AMPI_##V##_TARGET AMPI_FN void name(const ampi_finish* f, size_t rows, size_t columns,          \
                                        const float* t, size_t ldt) {                               \
        const AMPI_##V##_T alpha = AMPI_##V##_SPREAD(f->alpha), beta = AMPI_##V##_SPREAD(f->beta);  \
        size_t i, j;                                                                                \
        for (i = 0; i < rows; i++)                                                                  \
            for (j = 0; j < columns; j += AMPI_##V##_LANES) {                                       \
                const size_t rest = columns - j;                                                    \
                AMPI_##V##_T v = AMPI_##V##_MUL(alpha, AMPI_##V##_LOAD(t + i * ldt + j)), x;        \
                if (f->add) {                                                                       \
                    x = AMPI_##V##_READ(f->add, f->add_dtype, i * f->ld_add + (f->spread ? 0 : j),  \
                                        f->spread ? 1 : rest);                                      \
                    if (f->spread) x = AMPI_##V##_FIRST(x);                                         \
                    v = AMPI_##V##_FMA(beta, x, v);                                                 \
                }                                                                                   \
                AMPI_##V##_WRITE(f->c, f->c_dtype, i * f->ldc + j, rest, v);                        \
            }                                                                                       \
        ampi_clear_upper();                                                                         \
    }

/* Loads and stores of fewer than `lanes` elements where there are no masks: through a buffer. */
#define AMPI_TAIL_BUFFERED(V, KIND, type, attribute)                                                \
    AMPI_INLINE attribute AMPI_##V##_T AMPI_##V##_##KIND##_TAIL(const type* p, size_t rest) {       \
        type buffer[AMPI_##V##_LANES];                                                              \
        memset(buffer, 0, sizeof buffer);                                                           \
        memcpy(buffer, p, rest * sizeof *p);                                                        \
        return AMPI_##V##_##KIND(buffer);                                                           \
    }

#define AMPI_STORE_TAIL_BUFFERED(V, attribute)                                                      \
    AMPI_INLINE attribute void AMPI_##V##_STORE_TAIL(float* p, AMPI_##V##_T v, size_t rest) {       \
        float buffer[AMPI_##V##_LANES];                                                             \
        AMPI_##V##_STORE(buffer, v);                                                                \
        memcpy(p, buffer, rest * sizeof *p);                                                        \
    }

#if AMPI_X86
#define AMPI_V16_TARGET AMPI_TARGET_AVX512
#define AMPI_V16_T __m512
#define AMPI_V16_LANES 16
#define AMPI_V16_FOURS 0
#define AMPI_V16_ZERO _mm512_setzero_ps()
#define AMPI_V16_LOAD(p) _mm512_loadu_ps(p)
#define AMPI_V16_STORE(p, v) _mm512_storeu_ps(p, v)
#define AMPI_V16_SPREAD(x) _mm512_set1_ps(x)
#define AMPI_V16_ADD(a, b) _mm512_add_ps(a, b)
#define AMPI_V16_MUL(a, b) _mm512_mul_ps(a, b)
#define AMPI_V16_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
/* An intrinsic for it does not exist, and compilers would share the load. For both dialects of assembly. */
#define AMPI_V16_FMA_AT(c, b, p) \
    __asm__("vfmadd231ps {%2%{1to16%}, %1, %0|%0, %1, dword ptr %2%{1to16%}}" : "+v"(c) : "v"(b), "m"(*(p)))
#define AMPI_V16_IS_NAN(v) _mm512_cmpgt_epu32_mask(_mm512_and_si512(_mm512_castps_si512(v), \
    _mm512_set1_epi32(0x7fffffff)), _mm512_set1_epi32(0x7f800000))
#define AMPI_V16_CLEAN(v) \
    _mm512_castsi512_ps(_mm512_mask_set1_epi32(_mm512_castps_si512(v), AMPI_V16_IS_NAN(v), 0x7fc00000))
#define AMPI_V16_MASK(rest) ((__mmask16)((1u << (rest)) - 1u))
#define AMPI_V16_STORE_TAIL(p, v, rest) _mm512_mask_storeu_ps(p, AMPI_V16_MASK(rest), v)
/* The forms with a mask of ones are the plain instructions; g++ 12 warns inside its header about the plain
   forms. */
#define AMPI_V16_ALL ((__mmask16)0xffff)
#define AMPI_V16_WIDEN(h) \
    _mm512_castsi512_ps(_mm512_maskz_slli_epi32(AMPI_V16_ALL, \
        _mm512_maskz_cvtepu16_epi32(AMPI_V16_ALL, h), 16))
#define AMPI_V16_LOAD_TAIL(p, rest) _mm512_maskz_loadu_ps(AMPI_V16_MASK(rest), p)
#define AMPI_V16_HALVES(p) _mm256_loadu_si256((const __m256i*)(const void*)(p))
#define AMPI_V16_F16(p) _mm512_maskz_cvtph_ps(AMPI_V16_ALL, AMPI_V16_HALVES(p))
#define AMPI_V16_F16_TAIL(p, rest) \
    _mm512_maskz_cvtph_ps(AMPI_V16_ALL, _mm256_maskz_loadu_epi16(AMPI_V16_MASK(rest), p))
#define AMPI_V16_BF16(p) AMPI_V16_WIDEN(AMPI_V16_HALVES(p))
#define AMPI_V16_BF16_TAIL(p, rest) AMPI_V16_WIDEN(_mm256_maskz_loadu_epi16(AMPI_V16_MASK(rest), p))

AMPI_MICRO_PAIR(V16, 1) AMPI_MICRO_PAIR(V16, 2) AMPI_MICRO_PAIR(V16, 3) AMPI_MICRO_PAIR(V16, 4)
AMPI_MICRO_PAIR(V16, 5) AMPI_MICRO_PAIR(V16, 6) AMPI_MICRO_PAIR(V16, 7) AMPI_MICRO_PAIR(V16, 8)
AMPI_MICRO_PAIR(V16, 9) AMPI_MICRO_PAIR(V16, 10) AMPI_MICRO_PAIR(V16, 11) AMPI_MICRO_PAIR(V16, 12)
AMPI_MICRO_PAIR(V16, 13) AMPI_MICRO_PAIR(V16, 14)

AMPI_FN void ampi_micro_avx512(size_t rows, const ampi_micro* u) {
    switch (rows) {
        AMPI_MICRO_CASE(V16, 1) AMPI_MICRO_CASE(V16, 2) AMPI_MICRO_CASE(V16, 3) AMPI_MICRO_CASE(V16, 4)
        AMPI_MICRO_CASE(V16, 5) AMPI_MICRO_CASE(V16, 6) AMPI_MICRO_CASE(V16, 7) AMPI_MICRO_CASE(V16, 8)
        AMPI_MICRO_CASE(V16, 9) AMPI_MICRO_CASE(V16, 10) AMPI_MICRO_CASE(V16, 11) AMPI_MICRO_CASE(V16, 12)
        AMPI_MICRO_CASE(V16, 13) AMPI_MICRO_CASE(V16, 14)
        default: break;
    }
}
AMPI_LOAD_BLOCK(ampi_load_block_avx512, V16)

/* 16 elements as the bits of FP32, or the first `rest` and zeros; and back, rounded as conversions are. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_read16_avx512(const void* src, amp_dtype t, size_t i, size_t rest) {
    const __mmask16 mask = (__mmask16)(rest >= 16 ? AMPI_V16_ALL : AMPI_V16_MASK(rest));
    if (t == AMP_F32) return _mm512_maskz_loadu_epi32(mask, (const float*)src + i);
    const __m256i h = _mm256_maskz_loadu_epi16(mask, (const uint16_t*)src + i);
    return _mm512_castps_si512(t == AMP_F16 ? _mm512_maskz_cvtph_ps(AMPI_V16_ALL, h) : AMPI_V16_WIDEN(h));
}
#define AMPI_V16_READ(src, t, i, rest) _mm512_castsi512_ps(ampi_read16_avx512(src, t, i, rest))
#define AMPI_V16_WRITE ampi_write16_avx512
#define AMPI_V16_FIRST(v) _mm512_maskz_permutexvar_ps(AMPI_V16_ALL, _mm512_setzero_si512(), v)
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_write16_avx512(void* dst, amp_dtype t, size_t i, size_t rest, __m512 v) {
    const __mmask16 mask = (__mmask16)(rest >= 16 ? AMPI_V16_ALL : AMPI_V16_MASK(rest));
    const __m512i u = _mm512_castps_si512(AMPI_V16_CLEAN(v));
    const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(AMPI_V16_ALL, u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    if (t == AMP_F32) _mm512_mask_storeu_epi32((float*)dst + i, mask, u);
    else _mm256_mask_storeu_epi16((uint16_t*)dst + i, mask,
        t == AMP_F16 ? _mm512_maskz_cvtps_ph(AMPI_V16_ALL, _mm512_castsi512_ps(u), 0)
                     : _mm512_maskz_cvtepi32_epi16(AMPI_V16_ALL, _mm512_maskz_srli_epi32(AMPI_V16_ALL, up, 16)));
}

AMPI_FINISH(ampi_finish_avx512, V16)

/* Rows l, 4+l, 8+l, 12+l, four k each, in the four quarters of a vector. */
#define AMPI_V16_QUARTER(v, s, q) \
    _mm512_mask_broadcast_f32x4(v, (__mmask16)(0xfu << (4 * (q))), _mm_loadu_ps((s) + 4 * (q) * lds))
#define AMPI_V16_QUARTERS(s) AMPI_V16_QUARTER(AMPI_V16_QUARTER(AMPI_V16_QUARTER( \
    _mm512_castps128_ps512(_mm_loadu_ps(s)), s, 1), s, 2), s, 3)
#define AMPI_V16_LOW(a, b) _mm512_castps_pd(_mm512_maskz_unpacklo_ps(AMPI_V16_ALL, a, b))
#define AMPI_V16_HIGH(a, b) _mm512_castps_pd(_mm512_maskz_unpackhi_ps(AMPI_V16_ALL, a, b))
#define AMPI_V16_LOW_PAIR(a, b) _mm512_castpd_ps(_mm512_maskz_unpacklo_pd((__mmask8)0xff, a, b))
#define AMPI_V16_HIGH_PAIR(a, b) _mm512_castpd_ps(_mm512_maskz_unpackhi_pd((__mmask8)0xff, a, b))
/* 16 x 4 elements a turn: four vectors of quarters, then a 4 x 4 transposition inside each quarter. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_transpose_avx512(float* dst, size_t ldd, const float* src, size_t lds,
                                                      size_t k, size_t flip) {
    size_t i = 0, l;
    for (; i + 4 <= k; i += 4) {
        const float* s = src + i;
        __m512 a = AMPI_V16_QUARTERS(s), b = AMPI_V16_QUARTERS(s + lds);
        __m512 c = AMPI_V16_QUARTERS(s + 2 * lds), d = AMPI_V16_QUARTERS(s + 3 * lds);
        __m512d ab0 = AMPI_V16_LOW(a, b), ab1 = AMPI_V16_HIGH(a, b);
        __m512d cd0 = AMPI_V16_LOW(c, d), cd1 = AMPI_V16_HIGH(c, d);
        _mm512_storeu_ps(dst + (i ^ flip) * ldd, AMPI_V16_LOW_PAIR(ab0, cd0));
        _mm512_storeu_ps(dst + ((i + 1) ^ flip) * ldd, AMPI_V16_HIGH_PAIR(ab0, cd0));
        _mm512_storeu_ps(dst + ((i + 2) ^ flip) * ldd, AMPI_V16_LOW_PAIR(ab1, cd1));
        _mm512_storeu_ps(dst + ((i + 3) ^ flip) * ldd, AMPI_V16_HIGH_PAIR(ab1, cd1));
    }
    for (; i < k; i++)
        for (l = 0; l < 16; l++) dst[(i ^ flip) * ldd + l] = src[l * lds + i];
    ampi_clear_upper();
}

#define AMPI_V8_TARGET AMPI_TARGET_AVX2
#define AMPI_V8_T __m256
#define AMPI_V8_LANES 8
#define AMPI_V8_FOURS 1
#define AMPI_V8_ZERO _mm256_setzero_ps()
#define AMPI_V8_LOAD(p) _mm256_loadu_ps(p)
#define AMPI_V8_STORE(p, v) _mm256_storeu_ps(p, v)
#define AMPI_V8_SPREAD(x) _mm256_set1_ps(x)
#define AMPI_V8_ADD(a, b) _mm256_add_ps(a, b)
#define AMPI_V8_MUL(a, b) _mm256_mul_ps(a, b)
#define AMPI_V8_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define AMPI_V8_FMA_AT(c, b, p) AMPI_FMA_AT_SPREAD(V8, c, b, p)
#define AMPI_V8_IS_NAN(v) _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(v), \
    _mm256_set1_epi32(0x7fffffff)), _mm256_set1_epi32(0x7f800000))
#define AMPI_V8_CLEAN(v) _mm256_castsi256_ps(_mm256_blendv_epi8(_mm256_castps_si256(v), \
    _mm256_set1_epi32(0x7fc00000), AMPI_V8_IS_NAN(v)))
#define AMPI_V8_HALVES(p) _mm_loadu_si128((const __m128i*)(const void*)(p))
#define AMPI_V8_F16(p) _mm256_cvtph_ps(AMPI_V8_HALVES(p))
#define AMPI_V8_BF16(p) _mm256_castsi256_ps(ampi_bf16_spread_avx2(p))
#define AMPI_V8_MASK(rest) \
    _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(rest)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
#define AMPI_V8_LOAD_TAIL(p, rest) _mm256_maskload_ps(p, AMPI_V8_MASK(rest))
#define AMPI_V8_STORE_TAIL(p, v, rest) _mm256_maskstore_ps(p, AMPI_V8_MASK(rest), v)
/* n numbers of 16 bits, at most eight, and zeros; and back: in pairs, and the one that may be left over. */
#define AMPI_WORDS_MASK(compare, n) compare(_mm_set1_epi32((int)(n)), _mm_setr_epi32(0, 1, 2, 3))
AMPI_TARGET_AVX2 AMPI_INLINE __m128i ampi_load_words_avx2(const uint16_t* p, size_t n) {
    __m128i v;
    if (n >= 8) return _mm_loadu_si128((const __m128i*)(const void*)p);
    v = _mm_maskload_epi32((const int*)(const void*)p, AMPI_WORDS_MASK(_mm_cmpgt_epi32, n / 2));
    if (n % 2 == 0) return v;
    return _mm_or_si128(v, _mm_and_si128(_mm_set1_epi32(p[n - 1]), AMPI_WORDS_MASK(_mm_cmpeq_epi32, n / 2)));
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_store_words_avx2(uint16_t* p, size_t n, __m128i v) {
    if (n >= 8) { _mm_storeu_si128((__m128i*)(void*)p, v); return; }
    _mm_maskstore_epi32((int*)(void*)p, AMPI_WORDS_MASK(_mm_cmpgt_epi32, n / 2), v);
    v = _mm_castps_si128(_mm_permutevar_ps(_mm_castsi128_ps(v), _mm_set1_epi32((int)(n / 2))));
    if (n % 2 != 0) p[n - 1] = (uint16_t)_mm_cvtsi128_si32(v);
}
#define AMPI_V8_F16_TAIL(p, rest) _mm256_cvtph_ps(ampi_load_words_avx2(p, rest))
#define AMPI_V8_BF16_TAIL(p, rest) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(ampi_load_words_avx2(p, rest)), 16))

AMPI_MICRO_PAIR(V8, 1) AMPI_MICRO_PAIR(V8, 2) AMPI_MICRO_PAIR(V8, 3)
AMPI_MICRO_PAIR(V8, 4) AMPI_MICRO_PAIR(V8, 5) AMPI_MICRO_PAIR(V8, 6)

AMPI_FN void ampi_micro_avx2(size_t rows, const ampi_micro* u) {
    switch (rows) {
        AMPI_MICRO_CASE(V8, 1) AMPI_MICRO_CASE(V8, 2) AMPI_MICRO_CASE(V8, 3)
        AMPI_MICRO_CASE(V8, 4) AMPI_MICRO_CASE(V8, 5) AMPI_MICRO_CASE(V8, 6)
        default: break;
    }
}
AMPI_LOAD_BLOCK(ampi_load_block_avx2, V8)

/* Eight elements, or the first `rest` and zeros; and back, rounded as conversions are. The results of products have
   one kind of NaN. */
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_read8_avx2(const void* src, amp_dtype t, size_t i, size_t rest) {
    const uint16_t* h = (const uint16_t*)src + i;
    const float* f = (const float*)src + i;
    if (t == AMP_F32) return rest >= 8 ? AMPI_V8_LOAD(f) : AMPI_V8_LOAD_TAIL(f, rest);
    if (t == AMP_F16) return rest >= 8 ? AMPI_V8_F16(h) : AMPI_V8_F16_TAIL(h, rest);
    return rest >= 8 ? AMPI_V8_BF16(h) : AMPI_V8_BF16_TAIL(h, rest);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_put8_avx2(void* dst, amp_dtype t, size_t i, size_t rest, __m256 v) {
    __m128i h;
    if (t == AMP_F32) {
        if (rest >= 8) AMPI_V8_STORE((float*)dst + i, v); else AMPI_V8_STORE_TAIL((float*)dst + i, v, rest);
        return;
    }
    if (t == AMP_F16) h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    else {
        const __m256i upper = _mm256_broadcastsi128_si256(_mm_set_epi64x(-1, 0x0f0e0b0a07060302));
        const __m256i words = _mm256_shuffle_epi8(ampi_bf16_round_avx2(v), upper);
        h = _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08));
    }
    ampi_store_words_avx2((uint16_t*)dst + i, rest, h);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_write8_avx2(void* dst, amp_dtype t, size_t i, size_t rest, __m256 v) {
    ampi_put8_avx2(dst, t, i, rest, AMPI_V8_CLEAN(v));
}
#define AMPI_V8_READ ampi_read8_avx2
#define AMPI_V8_WRITE ampi_write8_avx2
#define AMPI_V8_FIRST(v) _mm256_broadcastss_ps(_mm256_castps256_ps128(v))
AMPI_FINISH(ampi_finish_avx2, V8)

/* Rows l and 4+l, four k each, in the halves of a vector; then as for AVX-512. */
#define AMPI_V8_TWO(s) \
    _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(s)), _mm_loadu_ps((s) + 4 * lds), 1)
#define AMPI_V8_LOW(a, b) _mm256_castps_pd(_mm256_unpacklo_ps(a, b))
#define AMPI_V8_HIGH(a, b) _mm256_castps_pd(_mm256_unpackhi_ps(a, b))
AMPI_TARGET_AVX2 AMPI_FN void ampi_transpose_avx2(float* dst, size_t ldd, const float* src, size_t lds,
                                                  size_t k, size_t flip) {
    size_t i = 0, l;
    for (; i + 4 <= k; i += 4) {
        const float* s = src + i;
        __m256 a = AMPI_V8_TWO(s), b = AMPI_V8_TWO(s + lds);
        __m256 c = AMPI_V8_TWO(s + 2 * lds), d = AMPI_V8_TWO(s + 3 * lds);
        __m256d ab0 = AMPI_V8_LOW(a, b), ab1 = AMPI_V8_HIGH(a, b);
        __m256d cd0 = AMPI_V8_LOW(c, d), cd1 = AMPI_V8_HIGH(c, d);
        _mm256_storeu_ps(dst + (i ^ flip) * ldd, _mm256_castpd_ps(_mm256_unpacklo_pd(ab0, cd0)));
        _mm256_storeu_ps(dst + ((i + 1) ^ flip) * ldd, _mm256_castpd_ps(_mm256_unpackhi_pd(ab0, cd0)));
        _mm256_storeu_ps(dst + ((i + 2) ^ flip) * ldd, _mm256_castpd_ps(_mm256_unpacklo_pd(ab1, cd1)));
        _mm256_storeu_ps(dst + ((i + 3) ^ flip) * ldd, _mm256_castpd_ps(_mm256_unpackhi_pd(ab1, cd1)));
    }
    for (; i < k; i++)
        for (l = 0; l < 8; l++) dst[(i ^ flip) * ldd + l] = src[l * lds + i];
    ampi_clear_upper();
}
#endif /* AMPI_X86 */

#if AMPI_NEON
#define AMPI_V4_TARGET
#define AMPI_V4_T float32x4_t
#define AMPI_V4_LANES 4
#define AMPI_V4_FOURS 0
#define AMPI_V4_ZERO vdupq_n_f32(0.0f)
#define AMPI_V4_LOAD(p) vld1q_f32(p)
#define AMPI_V4_STORE(p, v) vst1q_f32(p, v)
#define AMPI_V4_SPREAD(x) vdupq_n_f32(x)
#define AMPI_V4_FMA(a, b, c) vfmaq_f32(c, a, b)
#define AMPI_V4_FMA_AT(c, b, p) AMPI_FMA_AT_SPREAD(V4, c, b, p)
#define AMPI_V4_IS_NAN(v) \
    vcgtq_u32(vandq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0x7fffffffu)), vdupq_n_u32(0x7f800000u))
#define AMPI_V4_CLEAN(v) \
    vreinterpretq_f32_u32(vbslq_u32(AMPI_V4_IS_NAN(v), vdupq_n_u32(0x7fc00000u), vreinterpretq_u32_f32(v)))
#define AMPI_V4_F16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define AMPI_V4_BF16(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))
AMPI_TAIL_BUFFERED(V4, LOAD, float, )
AMPI_TAIL_BUFFERED(V4, F16, uint16_t, )
AMPI_TAIL_BUFFERED(V4, BF16, uint16_t, )
AMPI_STORE_TAIL_BUFFERED(V4, )

AMPI_MICRO_PAIR(V4, 1) AMPI_MICRO_PAIR(V4, 2) AMPI_MICRO_PAIR(V4, 3) AMPI_MICRO_PAIR(V4, 4)
AMPI_MICRO_PAIR(V4, 5) AMPI_MICRO_PAIR(V4, 6) AMPI_MICRO_PAIR(V4, 7) AMPI_MICRO_PAIR(V4, 8)
AMPI_MICRO_PAIR(V4, 9) AMPI_MICRO_PAIR(V4, 10) AMPI_MICRO_PAIR(V4, 11) AMPI_MICRO_PAIR(V4, 12)

AMPI_FN void ampi_micro_neon(size_t rows, const ampi_micro* u) {
    switch (rows) {
        AMPI_MICRO_CASE(V4, 1) AMPI_MICRO_CASE(V4, 2) AMPI_MICRO_CASE(V4, 3) AMPI_MICRO_CASE(V4, 4)
        AMPI_MICRO_CASE(V4, 5) AMPI_MICRO_CASE(V4, 6) AMPI_MICRO_CASE(V4, 7) AMPI_MICRO_CASE(V4, 8)
        AMPI_MICRO_CASE(V4, 9) AMPI_MICRO_CASE(V4, 10) AMPI_MICRO_CASE(V4, 11) AMPI_MICRO_CASE(V4, 12)
        default: break;
    }
}
AMPI_LOAD_BLOCK(ampi_load_block_neon, V4)

AMPI_FN void ampi_transpose_neon(float* dst, size_t ldd, const float* src, size_t lds, size_t k,
                                 size_t flip) {
    size_t i = 0, l;
    for (; i + 4 <= k; i += 4) {
        float32x4_t a = vld1q_f32(src + i), b = vld1q_f32(src + lds + i);
        float32x4_t c = vld1q_f32(src + 2 * lds + i), d = vld1q_f32(src + 3 * lds + i);
        float32x4x2_t ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
        vst1q_f32(dst + (i ^ flip) * ldd, vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0])));
        vst1q_f32(dst + ((i + 1) ^ flip) * ldd,
                  vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1])));
        vst1q_f32(dst + ((i + 2) ^ flip) * ldd,
                  vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0])));
        vst1q_f32(dst + ((i + 3) ^ flip) * ldd,
                  vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1])));
    }
    for (; i < k; i++)
        for (l = 0; l < 4; l++) dst[(i ^ flip) * ldd + l] = src[l * lds + i];
}
#endif /* AMPI_NEON */

/* The portable form: 8 rows x 16 columns, 8 "lanes". Where the product is exact, a separate multiplication
   and addition give the bits of the fused one and need no emulation. */
enum { AMPI_PLAIN_LANES = 8 };
AMPI_HD AMPI_INLINE float ampi_clean_nan(float v) {
    uint32_t u = ampi_bits(v);
    return ampi_float((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : u);
}
AMPI_FN void ampi_micro_plain(size_t rows, const ampi_micro* u) {
    size_t width = u->two ? 2 * AMPI_PLAIN_LANES : AMPI_PLAIN_LANES, i, j, k;
    for (i = 0; i < rows; i++) {
        float sum[2 * AMPI_PLAIN_LANES];
        float* t = u->t + i * u->ldt;
        for (j = 0; j < width; j++) sum[j] = u->first ? 0.0f : u->old[i * u->ldo + j];
        for (k = 0; k < u->k; k++) {
            float x = u->a[i * u->rs + k * u->ks];
            const float* b = u->b + k * u->bs;
            if (u->exact) for (j = 0; j < width; j++) sum[j] += x * b[j];
            else for (j = 0; j < width; j++) sum[j] = ampi_fma(0, x, b[j], sum[j]);
        }
        for (j = 0; u->last && j < width; j++) sum[j] = ampi_clean_nan(sum[j]);
        memcpy(t, sum, u->columns * sizeof *t);
    }
}
AMPI_FN void ampi_load_block_plain(float* dst, size_t ldd, const void* src, amp_dtype t, size_t lds,
                                   size_t rows, size_t cols) {
    size_t r, fill = (AMPI_PLAIN_LANES - cols % AMPI_PLAIN_LANES) % AMPI_PLAIN_LANES;
    for (r = 0; r < rows; r++, dst += ldd) {
        ampi_load_f32(dst, src, t, r * lds, cols);
        memset(dst + cols, 0, fill * sizeof *dst);
    }
}
AMPI_FN void ampi_transpose_plain(float* dst, size_t ldd, const float* src, size_t lds, size_t k,
                                  size_t flip) {
    size_t i, l;
    for (i = 0; i < k; i++)
        for (l = 0; l < AMPI_PLAIN_LANES; l++) dst[(i ^ flip) * ldd + l] = src[l * lds + i];
}

/* --- words: two BF16 numbers at once ----------------------------------------------------- */

/* A *word* is 32 bits with two BF16 numbers, the first in the low half. An instruction that multiplies words
   reads A as rows of words along k, B as panels like FP32's.
   Two BF16 operands: word w of a run along k is the elements 2w, 2w+1.
   Two F16 operands: an element x is, exactly, high + low, where high is x cut to BF16's 8 bits and low the
   other 3, and makes two words: (high, low) twice in A, (high, high) and (low, low) in B. So the sum of the
   four products of the parts is that of the elements, and four times a matrix unit's work is still less than
   the fma units would have.
   A run ends with zeros up to a multiple of 16 words. */
enum { AMPI_WORDS = 16, AMPI_WORDS_BF16 = 1, AMPI_WORDS_F16 = 4 };      /* what two k make */
AMPI_FN size_t ampi_round_up(size_t a, size_t b) { return (a + b - 1) / b * b; }
AMPI_FN size_t ampi_words(const ampi_gemm_isa* g, size_t k) {
    return ampi_round_up(g->words == AMPI_WORDS_F16 ? 2 * k : (k + 1) / 2, AMPI_WORDS);
}
#if AMPI_X86
/* The two BF16 numbers that make x, each in the high half of its 32 bits. */
#define AMPI_WORD_HIGH(x) _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u))
#define AMPI_WORD_LOW(x, high) \
    _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(high)))
/* Words with `first` in the low half, `second` in the high half; both in the high halves. */
#define AMPI_WORD(first, second) \
    _mm512_or_si512(_mm512_maskz_srli_epi32(AMPI_V16_ALL, first, 16), second)

/* n 16-bit elements as they are, and zeros up to so many words. */
AMPI_FN void ampi_words_copy(float* dst, const void* src, size_t n, size_t words) {
    memcpy(dst, src, n * sizeof(uint16_t));
    memset((char*)dst + n * sizeof(uint16_t), 0, words * sizeof *dst - n * sizeof(uint16_t));
}
/* A's words of n elements of a run along k, and zeros up to `words`. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_words_along(float* dst, const void* src, amp_dtype t, size_t n, size_t words) {
    const __m512i low_twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i high_twice = _mm512_add_epi32(low_twice, _mm512_set1_epi32(8));
    size_t i, w = 0;
    if (t == AMP_BF16) { ampi_words_copy(dst, src, n, words); return; }
    for (i = 0; w < words; i += 16, w += 32) {
        __m512i x = ampi_read16_avx512(src, t, i, i < n ? n - i : 0), high = AMPI_WORD_HIGH(x);
        x = AMPI_WORD(high, AMPI_WORD_LOW(x, high));
        _mm512_storeu_si512(dst + w, _mm512_maskz_permutexvar_epi32(AMPI_V16_ALL, low_twice, x));
        if (w + 16 < words)
            _mm512_storeu_si512(dst + w + 16, _mm512_maskz_permutexvar_epi32(AMPI_V16_ALL, high_twice, x));
    }
    ampi_clear_upper();
}
/* B's words of 16 columns from pairs of F16 neighbours along k: rows of pairs, 16 to a row. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_words_of_pairs(float* dst, size_t ldd, const float* pairs, size_t count) {
    size_t i, l;
    for (i = 0; i < count; i++, pairs += 16, dst += 4 * ldd) {
        __m512i both = _mm512_loadu_si512(pairs);
        for (l = 0; l < 2; l++, both = _mm512_maskz_srli_epi32(AMPI_V16_ALL, both, 16)) {
            __m512i x = _mm512_castps_si512(_mm512_maskz_cvtph_ps(AMPI_V16_ALL,
                                            _mm512_maskz_cvtepi32_epi16(AMPI_V16_ALL, both)));
            __m512i high = AMPI_WORD_HIGH(x), low = AMPI_WORD_LOW(x, high);
            _mm512_storeu_si512(dst + 2 * l * ldd, AMPI_WORD(high, high));
            _mm512_storeu_si512(dst + (2 * l + 1) * ldd, AMPI_WORD(low, low));
        }
    }
    ampi_clear_upper();
}

/* `words` rows of words of `width` columns, from k rows of n columns. t as above. From the last word to the
   first where rows become more, so that dst may be src. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_words_across(const ampi_gemm_isa* g, float* dst, size_t ldd, const void* src,
                                                 amp_dtype t, size_t lds, size_t k, size_t n, size_t words,
                                                 size_t width, int is_b) {
    const __m512i none = _mm512_setzero_si512(), next = _mm512_set1_epi16(16);
    const __m512i pairs = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                           39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    size_t w, j;
    for (w = 0; g->words == AMPI_WORDS_BF16 && w < words; w++)
        for (j = 0; j < width; j += 32) {
            const uint16_t* from = (const uint16_t*)src + 2 * w * lds + j;
            const __mmask32 mask = n >= j + 32 ? 0xffffffffu : (1u << (n > j ? n - j : 0)) - 1u;
            __m512i x = 2 * w < k ? _mm512_maskz_loadu_epi16(mask, from) : none;
            __m512i y = 2 * w + 1 < k ? _mm512_maskz_loadu_epi16(mask, from + lds) : none;
            _mm512_storeu_si512(dst + w * ldd + j, _mm512_permutex2var_epi16(x, pairs, y));
            if (j + 16 < width)
                _mm512_storeu_si512(dst + w * ldd + j + 16,
                                    _mm512_permutex2var_epi16(x, _mm512_add_epi16(pairs, next), y));
        }
    for (w = words; g->words == AMPI_WORDS_F16 && w > 0; w -= 2)
        for (j = 0; j < width; j += 16) {
            float* to = dst + (w - 2) * ldd + j;
            __m512i x = none;
            if (w - 2 < 2 * k) x = ampi_read16_avx512(src, t, (w / 2 - 1) * lds + j, j < n ? n - j : 0);
            __m512i high = AMPI_WORD_HIGH(x), low = AMPI_WORD_LOW(x, high);
            x = AMPI_WORD(high, is_b ? high : low);
            _mm512_storeu_si512(to, x);
            _mm512_storeu_si512(to + ldd, is_b ? AMPI_WORD(low, low) : x);
        }
    ampi_clear_upper();
}
#endif

#if AMPI_PAIRS
/* vdpbf16ps adds the products of the high halves, then those of the low halves, each by an fma that takes
   subnormals for zero: the order of FP32's kernels, and their bits where nothing is subnormal. That is so if no
   operand is and all products are multiples of 2^-126, because then every sum is 0 or at least that. */
#define AMPI_B16_TARGET AMPI_TARGET_PAIRS
#define AMPI_B16_T __m512
#define AMPI_B16_LANES AMPI_V16_LANES
#define AMPI_B16_FOURS 0
#define AMPI_B16_ZERO AMPI_V16_ZERO
#define AMPI_B16_LOAD(p) AMPI_V16_LOAD(p)
#define AMPI_B16_STORE(p, v) AMPI_V16_STORE(p, v)
#define AMPI_B16_SPREAD(x) AMPI_V16_SPREAD(x)
#define AMPI_B16_FMA(a, b, c) _mm512_dpbf16_ps(c, (__m512bh)(a), (__m512bh)(b))
#define AMPI_B16_FMA_AT(c, b, p) AMPI_FMA_AT_SPREAD(B16, c, b, p)
#define AMPI_B16_CLEAN(v) AMPI_V16_CLEAN(v)
#define AMPI_B16_STORE_TAIL(p, v, rest) AMPI_V16_STORE_TAIL(p, v, rest)
AMPI_MICRO_PAIR(B16, 1) AMPI_MICRO_PAIR(B16, 2) AMPI_MICRO_PAIR(B16, 3) AMPI_MICRO_PAIR(B16, 4)
AMPI_MICRO_PAIR(B16, 5) AMPI_MICRO_PAIR(B16, 6) AMPI_MICRO_PAIR(B16, 7) AMPI_MICRO_PAIR(B16, 8)
AMPI_MICRO_PAIR(B16, 9) AMPI_MICRO_PAIR(B16, 10) AMPI_MICRO_PAIR(B16, 11) AMPI_MICRO_PAIR(B16, 12)
AMPI_MICRO_PAIR(B16, 13) AMPI_MICRO_PAIR(B16, 14)
AMPI_FN void ampi_micro_pairs(size_t rows, const ampi_micro* u) {
    switch (rows) {
        AMPI_MICRO_CASE(B16, 1) AMPI_MICRO_CASE(B16, 2) AMPI_MICRO_CASE(B16, 3) AMPI_MICRO_CASE(B16, 4)
        AMPI_MICRO_CASE(B16, 5) AMPI_MICRO_CASE(B16, 6) AMPI_MICRO_CASE(B16, 7) AMPI_MICRO_CASE(B16, 8)
        AMPI_MICRO_CASE(B16, 9) AMPI_MICRO_CASE(B16, 10) AMPI_MICRO_CASE(B16, 11) AMPI_MICRO_CASE(B16, 12)
        AMPI_MICRO_CASE(B16, 13) AMPI_MICRO_CASE(B16, 14)
        default: break;
    }
}

/* The smallest exponent field of what is not zero in a block of BF16; 512 if all is. A zero less one wraps. */
AMPI_TARGET_AVX512 AMPI_FN unsigned ampi_least_exponent(const uint16_t* p, size_t ld, size_t rows, size_t cols) {
    const __m512i one = _mm512_set1_epi16(1), magnitude = _mm512_set1_epi16(0x7fff);
    __m512i least = _mm512_set1_epi16(-1);
    uint16_t lane[32];
    unsigned all = 0xffff;
    size_t i, j;
    for (i = 0; i < rows; i++, p += ld)
        for (j = 0; j < cols; j += 32) {
            const __mmask32 mask = cols - j >= 32 ? 0xffffffffu : (1u << (cols - j)) - 1u;
            __m512i x = _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, p + j), magnitude);
            least = _mm512_min_epu16(least, _mm512_sub_epi16(x, one));
        }
    _mm512_storeu_si512(lane, least);
    ampi_clear_upper();
    for (i = 0; i < 32; i++) if (lane[i] < all) all = lane[i];
    return (all + 1) >> 7;
}
#endif

#if AMPI_AMX
/* --- a matrix unit: AMX ------------------------------------------------------------------ */

/* tdpbf16ps adds to 16 x 16 sums the product of 16 rows of 16 words (A) with 16 words of 16 columns (B). Its
   order (Intel SDM, TDPBF16PS): the products of the low halves in one chain of fma from +0, those of the high
   halves in another; the two are added, and that is added to the old sum. */
enum { AMPI_AMX_ROWS = 16 };
/* What the unit adds up: for i < blocks, and in it for j < taps, the product of the next 16 rows of words of A, `step`
   bytes on, with B's from b + i*b_block + at[j]; between blocks A moves on by a_skip more. rs, bs: bytes between
   rows; a_next, b_next: to the second 16 rows or columns. Sums go to t (+ right, + down: those of the second
   columns and rows), from `old` on unless it is NULL. */
typedef struct ampi_amx_sum {
    const char* a; size_t rs, a_next, a_skip;
    const char* b; size_t bs, b_next, b_block;
    const uint32_t* at; size_t taps, step, blocks;
    const float* old; size_t ldo, old_right, old_down;
    float* t; size_t ldt, right, down;
    int passing;                                  /* 1: A, 2: B is not kept in the first-level cache */
} ampi_amx_sum;
#define AMPI_AMX_LOAD(tile, from, ld) _tile_loadd(tile, from, (ptrdiff_t)((ld) * sizeof(float)))
#define AMPI_AMX_STORE(tile, to, ld) _tile_stored(tile, to, (ptrdiff_t)((ld) * sizeof(float)))
/* gcc's tile loads do not tell it that they read memory. */
#define AMPI_AMX_FENCE __asm__ volatile("" ::: "memory")
/* Sums 0..3 are the quarters of up to 32 rows x 32 columns, tiles 4, 5 two of A, 6, 7 two of B. */
#define AMPI_AMX_EACH(DO, from, ld, right, down)                                                    \
    DO(0, from, ld);                                                                                \
    if (two) DO(1, (from) + (right), ld);                                                           \
    if (tall) DO(2, (from) + (down), ld);                                                           \
    if (tall && two) DO(3, (from) + (down) + (right), ld);
/* One block. Whatever is read between the unit's instructions delays its loads, so all else is in registers. */
#define AMPI_AMX_ADD(LOAD_A, LOAD_B)                                                                \
    for (j = taps; j > 0; j--, a += step) {                                                         \
        const char* b = block + *at++;                                                              \
        LOAD_A(4, a, rs);                                                                           \
        LOAD_B(6, b, bs);                                                                           \
        if (two) LOAD_B(7, b + b_next, bs);                                                         \
        if (tall) LOAD_A(5, a + a_next, rs);                                                        \
        _tile_dpbf16ps(0, 4, 6);                                                                    \
        if (two) _tile_dpbf16ps(1, 4, 7);                                                           \
        if (tall) _tile_dpbf16ps(2, 5, 6);                                                          \
        if (tall && two) _tile_dpbf16ps(3, 5, 7);                                                   \
    }
#define AMPI_AMX_SUMS(name, tall_, two_)                                                            \
    AMPI_TARGET_AMX AMPI_FN void name(const ampi_amx_sum* u) {                                      \
        const int tall = tall_, two = two_;                                                         \
        const ptrdiff_t rs = (ptrdiff_t)u->rs, bs = (ptrdiff_t)u->bs;                               \
        const size_t taps = u->taps, step = u->step, a_next = u->a_next, b_next = u->b_next;        \
        const char *a = u->a, *block = u->b;                                                        \
        size_t i, j;                                                                                \
        AMPI_AMX_FENCE;                                                                             \
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);                                 \
        if (u->old) { AMPI_AMX_EACH(AMPI_AMX_LOAD, u->old, u->ldo, u->old_right, u->old_down) }     \
        for (i = u->blocks; i > 0; i--, a += u->a_skip, block += u->b_block) {                      \
            const uint32_t* at = u->at;                                                             \
            if (u->passing == 1) { AMPI_AMX_ADD(_tile_stream_loadd, _tile_loadd) }                  \
            else if (u->passing == 2) { AMPI_AMX_ADD(_tile_loadd, _tile_stream_loadd) }             \
            else { AMPI_AMX_ADD(_tile_loadd, _tile_loadd) }                                         \
        }                                                                                           \
        AMPI_AMX_EACH(AMPI_AMX_STORE, u->t, u->ldt, u->right, u->down)                              \
    }
AMPI_AMX_SUMS(ampi_amx_16x16, 0, 0)
AMPI_AMX_SUMS(ampi_amx_16x32, 0, 1)
AMPI_AMX_SUMS(ampi_amx_32x16, 1, 0)
AMPI_AMX_SUMS(ampi_amx_32x32, 1, 1)
AMPI_FN void ampi_amx_run(const ampi_amx_sum* u, int tall, int two) {
    if (tall && two) ampi_amx_32x32(u);
    else if (tall) ampi_amx_32x16(u);
    else if (two) ampi_amx_16x32(u);
    else ampi_amx_16x16(u);
}

/* As ampi_finish_avx512, but NaNs stay as they are, and a BF16 result below 2^-126 becomes zero. 16 columns from j;
   `type` is C's, `add` tells whether there is something to add: constants where it is called. */
AMPI_TARGET_AMX AMPI_INLINE void ampi_amx_finish16(amp_dtype type, int add, const ampi_finish* f, size_t rows,
                                                   size_t columns, size_t j, const float* t, size_t ldt) {
    const __m512 alpha = _mm512_set1_ps(f->alpha), beta = _mm512_set1_ps(f->beta);
    const size_t rest = columns - j, size = type == AMP_F32 ? 4 : 2, ldc = f->ldc * size;
    const __mmask16 mask = (__mmask16)(rest >= 16 ? AMPI_V16_ALL : AMPI_V16_MASK(rest));
    char* c = (char*)f->c + j * size;
    size_t i;
    for (i = 0; i < rows; i++, c += ldc, t += ldt) {
        __m512 v = _mm512_mul_ps(alpha, _mm512_loadu_ps(t + j));
        if (add) {
            __m512 x = _mm512_castsi512_ps(ampi_read16_avx512(f->add, f->add_dtype, i * f->ld_add + (f->spread ? 0 : j),
                                                              f->spread ? 1 : rest));
            if (f->spread) x = _mm512_maskz_permutexvar_ps(AMPI_V16_ALL, _mm512_setzero_si512(), x);
            v = _mm512_fmadd_ps(beta, x, v);
        }
        if (type == AMP_F32) _mm512_mask_storeu_ps(c, mask, v);
        else _mm256_mask_storeu_epi16(c, mask, type == AMP_F16 ? _mm512_maskz_cvtps_ph(AMPI_V16_ALL, v, 0)
                                                               : (__m256i)_mm512_cvtneps_pbh(v));
    }
}
AMPI_TARGET_AMX AMPI_FN void ampi_amx_finish(const ampi_finish* f, size_t rows, size_t columns, const float* t,
                                             size_t ldt) {
    size_t j;
    for (j = 0; j < columns; j += 16)
        if (f->c_dtype == AMP_F32 && f->add) ampi_amx_finish16(AMP_F32, 1, f, rows, columns, j, t, ldt);
        else if (f->c_dtype == AMP_F32) ampi_amx_finish16(AMP_F32, 0, f, rows, columns, j, t, ldt);
        else if (f->c_dtype == AMP_F16 && f->add) ampi_amx_finish16(AMP_F16, 1, f, rows, columns, j, t, ldt);
        else if (f->c_dtype == AMP_F16) ampi_amx_finish16(AMP_F16, 0, f, rows, columns, j, t, ldt);
        else if (f->add) ampi_amx_finish16(AMP_BF16, 1, f, rows, columns, j, t, ldt);
        else ampi_amx_finish16(AMP_BF16, 0, f, rows, columns, j, t, ldt);
    ampi_clear_upper();
}

/* A thread opens its unit before its tiles, all of 16 rows x 64 bytes, and closes it behind them. */
AMPI_TARGET_AMX AMPI_FN void ampi_amx_open(void) {
    static const struct { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } c = {
        1, 0, { 0 }, { 64, 64, 64, 64, 64, 64, 64, 64 }, { 16, 16, 16, 16, 16, 16, 16, 16 } };
    _tile_loadconfig(&c);
}
AMPI_TARGET_AMX AMPI_FN void ampi_amx_close(void) { _tile_release(); }
#endif

/* The kernels for the instruction set in use. */
AMPI_FN ampi_gemm_isa ampi_gemm_isa_now(void) {
    ampi_gemm_isa g = { 8, AMPI_PLAIN_LANES, 8, 0, 0, ampi_micro_plain, ampi_load_block_plain,
                       ampi_transpose_plain, NULL };
#if AMPI_X86
    if (ampi_simd() == AMP_ISA_AVX512) {
        g.mr = 14; g.lanes = 16; g.a_width = 16;
        g.micro = ampi_micro_avx512; g.load = ampi_load_block_avx512; g.transpose = ampi_transpose_avx512;
        g.finish = ampi_finish_avx512;
    } else if (ampi_simd() == AMP_ISA_AVX2) {
        g.mr = 6; g.lanes = 8; g.a_width = 8;
        g.micro = ampi_micro_avx2; g.load = ampi_load_block_avx2; g.transpose = ampi_transpose_avx2;
        g.finish = ampi_finish_avx2;
    }
#endif
#if AMPI_NEON
    if (ampi_simd() == AMP_ISA_NEON) {
        g.mr = 12; g.lanes = 4; g.a_width = 12;
        g.micro = ampi_micro_neon; g.load = ampi_load_block_neon; g.transpose = ampi_transpose_neon;
    }
#endif
    return g;
}

/* The same for two operands of BF16, if words are faster: the bits stay, where they are not subnormal. */
AMPI_FN ampi_gemm_isa ampi_gemm_isa_pairs(void) {
    ampi_gemm_isa g = ampi_gemm_isa_now();
#if AMPI_PAIRS
    if (amp_cpu_isa() == AMP_ISA_AVX512_BF16) {
        g.words = AMPI_WORDS_BF16;
        g.staged = 1;
        g.micro = ampi_micro_pairs;
    }
#endif
    return g;
}

/* The same with a matrix unit for two operands of type t, if there is one for them. */
AMPI_FN ampi_gemm_isa ampi_gemm_isa_amx(amp_dtype t) {
    ampi_gemm_isa g = ampi_gemm_isa_now();
#if AMPI_AMX
    if (t != AMP_F32 && ampi_amx(0)) {
        g.mr = g.a_width = 2 * AMPI_AMX_ROWS;
        g.words = t == AMP_F16 ? AMPI_WORDS_F16 : AMPI_WORDS_BF16;
        g.finish = ampi_amx_finish;
    }
#endif
    (void)t;
    return g;
}

/* --- operands ---------------------------------------------------------------------------- */

/* Largest blocks, the k that is still one of them, and the k of one where C is a few panels high or one wide, so that
   both panels stay in the first-level cache; how many panels are few; floats of scratch memory on the stack, for a
   staged image, and between rows. */
enum { AMPI_GEMM_MC = 1024, AMPI_GEMM_NC = 512, AMPI_GEMM_KC = 512, AMPI_GEMM_KC_ONE = 800, AMPI_GEMM_KC_THIN = 192,
       AMPI_GEMM_FEW = 4, AMPI_GEMM_STACK = 12288, AMPI_GEMM_STAGE = 16384, AMPI_GEMM_GAP = 16 };

AMPI_FN size_t ampi_min_size(size_t a, size_t b) { return a < b ? a : b; }
AMPI_FN size_t ampi_max_size(size_t a, size_t b) { return a > b ? a : b; }
AMPI_FN size_t ampi_div_up(size_t a, size_t b) { return a <= b ? 1 : (a + b - 1) / b; }    /* at least 1 */

/* The places of an image operand. Run r = (c, a, b) of channel and kernel position, position p = (n, i, j)
   of image, row and column: the element at y = (i*mul_h + base_h + a*step_h) / div_h and x likewise, and 0
   where y or x is outside the image or not a whole number. With mul = stride, base = -pad, step = dilation,
   div = 1 this is im2col of an input; with mul = 1, base = pad, step = -dilation, div = stride it is the
   output seen from an input's pixel. */
typedef struct ampi_image {
    size_t image_stride, channel_stride;          /* elements */
    size_t kernel_h, kernel_w, rows, cols;        /* a < kernel_h, b < kernel_w, i < rows, j < cols */
    int64_t height, width;
    int64_t mul_h, mul_w, base_h, base_w, step_h, step_w, div_h, div_w;
} ampi_image;

/* An operand of the product: `runs` runs of `length` positions. Run r of a matrix is its stored row r. */
typedef struct ampi_operand {
    const void* data;
    amp_dtype dtype;
    size_t offset;                                /* of the first element */
    size_t runs, length, ld;
    int along_k;                                  /* a run goes along k; otherwise along m or n */
    const ampi_image* image;                      /* NULL: a matrix */
} ampi_operand;

/* dst[q] = source[(x0 + q*mul) / div] for q < n, zero where that is no place in the row at row_offset. */
AMPI_FN void ampi_image_row(const ampi_operand* v, size_t row_offset, int64_t x0, int64_t mul, size_t n,
                            float* dst) {
    const ampi_image* g = v->image;
    int64_t div = g->div_w;
    float line[256];
    memset(dst, 0, n * sizeof *dst);
    if (mul == 1 && div == 1) {                   /* neighbours stay neighbours */
        int64_t low = x0 < 0 ? -x0 : 0, high = g->width - x0 < (int64_t)n ? g->width - x0 : (int64_t)n;
        if (low < high)
            ampi_load_f32(dst + low, v->data, v->dtype, row_offset + (size_t)(x0 + low),
                          (size_t)(high - low));
        return;
    }
    while (n > 0) {                               /* in pieces whose source fits `line` */
        int64_t piece = div > 1 ? 256 : 255 / mul + 1, q = 0, first, last, at;
        if (piece > (int64_t)n) piece = (int64_t)n;
        while (q < piece && (x0 + q * mul < 0 || (x0 + q * mul) % div != 0)) q++;
        first = (x0 + q * mul) / div;
        last = (x0 + (piece - 1) * mul) / div;
        if (last >= g->width) last = g->width - 1;
        if (q < piece && first <= last) {
            const float* from = line;
            if (v->dtype == AMP_F32) from = (const float*)v->data + row_offset + first;
            else ampi_load_f32(line, v->data, v->dtype, row_offset + (size_t)first, (size_t)(last - first + 1));
            for (at = first; q < piece && at <= last; q += div, at += mul) dst[q] = from[at - first];
        }
        dst += piece; n -= (size_t)piece; x0 += piece * mul;
    }
}

/* The same for row y (before the division) of a channel of an image; a row outside is zero. */
AMPI_FN void ampi_image_line(const ampi_operand* v, size_t image, size_t channel, int64_t y, int64_t x0,
                             int64_t mul, size_t n, float* dst) {
    const ampi_image* g = v->image;
    if (y < 0 || y % g->div_h != 0 || y / g->div_h >= g->height) memset(dst, 0, n * sizeof *dst);
    else ampi_image_row(v, v->offset + image * g->image_stride + channel * g->channel_stride
                           + (size_t)(y / g->div_h * g->width), x0, mul, n, dst);
}

/* Positions [p, p+n) of run r of an image operand, straight from the source. */
AMPI_FN void ampi_image_run(const ampi_operand* v, size_t r, size_t p, size_t n, float* dst) {
    const ampi_image* g = v->image;
    size_t b = r % g->kernel_w, a = r / g->kernel_w % g->kernel_h, c = r / g->kernel_w / g->kernel_h;
    size_t j = p % g->cols, i = p / g->cols % g->rows, image = p / g->cols / g->rows;
    while (n > 0) {
        size_t part = g->cols - j < n ? g->cols - j : n;
        ampi_image_line(v, image, c, (int64_t)i * g->mul_h + g->base_h + (int64_t)a * g->step_h,
                        (int64_t)j * g->mul_w + g->base_w + (int64_t)b * g->step_w, g->mul_w, part, dst);
        dst += part; n -= part; j = 0;
        if (++i == g->rows) { i = 0; image++; }
    }
}

/* Whole planes as they lie in memory. */
AMPI_FN int ampi_is_planes(const ampi_image* g) {
    return g && g->kernel_h * g->kernel_w == 1 && g->mul_h == 1 && g->mul_w == 1 && g->div_h == 1 && g->div_w == 1
           && g->base_h == 0 && g->base_w == 0 && g->rows * g->cols == (size_t)(g->height * g->width);
}
/* dst[r][p] for whole planes, one piece of a plane at a time. Each fills up to whole lanes; where that would reach
   the next row, it goes row by row. Behind a single row there is room. */
AMPI_FN void ampi_planes_block(const ampi_gemm_isa* g, const ampi_operand* v, size_t r0, size_t rows, size_t p,
                               size_t cols, float* dst, size_t ldd) {
    const ampi_image* image = v->image;
    size_t plane = image->rows * image->cols, count, r, left = ldd;
    for (; cols > 0; p += count, dst += count, cols -= count, left -= count) {
        size_t at = v->offset + p / plane * image->image_stride + r0 * image->channel_stride + p % plane;
        count = ampi_min_size(plane - p % plane, cols);
        if (rows == 1 || ampi_round_up(count, g->lanes) <= left)
            g->load(dst, ldd, (const char*)v->data + at * amp_dtype_size(v->dtype), v->dtype, image->channel_stride,
                    rows, count);
        else for (r = 0; r < rows; r++)
            ampi_load_f32(dst + r * ldd, v->data, v->dtype, at + r * image->channel_stride, count);
    }
}

/* dst[r][p] = element (r0 + r, p0 + p), zero beyond the operand's end; rows are filled up as `load` does. */
AMPI_FN void ampi_operand_block(const ampi_gemm_isa* g, const ampi_operand* v, size_t r0, size_t rn,
                                size_t p0, size_t pn, float* dst, size_t ldd) {
    size_t rows = v->runs - r0 < rn ? v->runs - r0 : rn, cols = v->length - p0 < pn ? v->length - p0 : pn, r;
    size_t full = (pn + g->lanes - 1) / g->lanes * g->lanes;
    if (!v->image) {
        const char* src = (const char*)v->data + (v->offset + r0 * v->ld + p0) * amp_dtype_size(v->dtype);
        g->load(dst, ldd, src, v->dtype, v->ld, rows, cols);
    } else {
        int planes = ampi_is_planes(v->image);
        if (planes) ampi_planes_block(g, v, r0, rows, p0, cols, dst, ldd);
        for (r = 0; r < rows; r++) {
            if (!planes) ampi_image_run(v, r0 + r, p0, cols, dst + r * ldd);
            memset(dst + r * ldd + cols, 0, (full - cols) * sizeof *dst);
        }
    }
    for (r = rows; r < rn; r++) memset(dst + r * ldd, 0, full * sizeof *dst);
}

/* --- staging: one channel of an image operand, widened and padded ------------------------ */

/* The runs of one channel read the same few image rows again and again, kernel position by kernel position.
   So these rows are widened once into `data`, with the zeros around them, and a run becomes a list of
   straight copies: a *piece* is a stretch of positions inside one row. With a stride, a staged row holds
   every mul-th column together (all columns 0 mod `mul`, then 1 mod `mul`, ...), so that pieces stay
   straight. */
typedef struct ampi_piece { uint32_t from; uint16_t to, count; } ampi_piece;
typedef struct ampi_stage {
    float* data; size_t room;                     /* scratch memory, in floats */
    const ampi_operand* v;
    int open;
    size_t p, n, channel;                         /* positions covered; the channel that is staged now */
    size_t phase, pitch;                          /* floats of one column class, of one staged row */
    int64_t low_h, low_w, span_h;                 /* smallest kernel offset, and their number of rows */
    size_t held[2], rows, size;                   /* words: channels here, a class's rows, elements of a channel */
    uint32_t from[AMPI_GEMM_KC_ONE];              /* words: where the runs of two channels begin */
    size_t pieces;
    ampi_piece piece[AMPI_GEMM_NC];
} ampi_stage;

AMPI_FN int64_t ampi_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
AMPI_FN int64_t ampi_abs_i64(int64_t a) { return a < 0 ? -a : a; }

/* The part of positions [*p, end) that lies in one image: its rows [*i, *i + result), and the position
   after it. */
AMPI_FN size_t ampi_stage_slab(const ampi_stage* t, size_t p, size_t* image, size_t* i, size_t* next) {
    const ampi_image* g = t->v->image;
    size_t plane = g->rows * g->cols;
    *image = p / plane;
    *i = p % plane / g->cols;
    *next = ampi_min_size((*image + 1) * plane, t->p + t->n);
    return (*next - 1) % plane / g->cols - *i + 1;
}

/* Notes the pieces of image rows i.. in staged rows `at`..; `to` counts positions within a panel of `cut`.
   0: too many. */
AMPI_FN int ampi_stage_pieces(ampi_stage* t, size_t p, size_t next, size_t at, size_t cut) {
    const ampi_image* g = t->v->image;
    for (; p < next; at += (size_t)g->mul_h) {
        size_t j = p % g->cols, end = ampi_min_size(g->cols - j, next - p) + j;
        while (j < end) {
            size_t to = (p - t->p) % cut, count = ampi_min_size(cut - to, end - j);
            ampi_piece* piece = &t->piece[t->pieces];
            if (t->pieces++ == AMPI_GEMM_NC) return 0;
            piece->from = (uint32_t)(at * t->pitch + j);
            piece->to = (uint16_t)to;
            piece->count = (uint16_t)count;
            j += count; p += count;
        }
    }
    return 1;
}

/* Prepares positions [p, p+n), in panels of `cut`; leaves t->open at 0 if there is nothing to gain, or no
   room. */
AMPI_FN void ampi_stage_open(ampi_stage* t, const ampi_operand* v, size_t p, size_t n, size_t cut) {
    const ampi_image* g = v->image;
    size_t image, i, next, q, at = 0;
    t->open = 0;
    if (!g || g->kernel_h * g->kernel_w == 1 || g->mul_h > 64 || g->mul_w > 64) return;
    n = ampi_min_size(n, v->length - p);
    t->v = v; t->p = p; t->n = n; t->pieces = 0; t->channel = (size_t)-1;
    t->low_h = ampi_min_i64(0, ((int64_t)g->kernel_h - 1) * g->step_h);
    t->low_w = ampi_min_i64(0, ((int64_t)g->kernel_w - 1) * g->step_w);
    t->span_h = ((int64_t)g->kernel_h - 1) * ampi_abs_i64(g->step_h) + 1;
    t->phase = g->cols + (size_t)(((int64_t)g->kernel_w - 1) * ampi_abs_i64(g->step_w) / g->mul_w);
    if (t->phase > t->room || t->span_h > (int64_t)t->room) return;
    t->pitch = t->phase * (size_t)g->mul_w;
    if (t->pitch > t->room) return;
    for (q = p; q < p + n; q = next) {
        size_t rows = ampi_stage_slab(t, q, &image, &i, &next);
        rows = (rows - 1) * (size_t)g->mul_h + (size_t)t->span_h;
        if ((at + rows) * t->pitch > t->room || !ampi_stage_pieces(t, q, next, at, cut)) return;
        at += rows;
    }
    t->open = 1;
}

/* Brings channel c into `data`. */
AMPI_FN void ampi_stage_fill(ampi_stage* t, size_t c) {
    const ampi_image* g = t->v->image;
    size_t image, i, next, q, f;
    float* line = t->data;
    if (t->channel == c) return;
    t->channel = c;
    for (q = t->p; q < t->p + t->n; q = next) {
        size_t rows = ampi_stage_slab(t, q, &image, &i, &next);
        int64_t y = (int64_t)i * g->mul_h + g->base_h + t->low_h, x = g->base_w + t->low_w;
        int64_t last = y + ((int64_t)rows - 1) * g->mul_h + t->span_h;
        for (; y < last; y++, line += t->pitch)
            for (f = 0; f < (size_t)g->mul_w; f++)
                ampi_image_line(t->v, image, c, y, x + (int64_t)f, g->mul_w, t->phase, line + f * t->phase);
    }
}

/* d = s, n floats that do not overlap; copies of constant size become vector moves, and the last of them overlaps
   the one before, which costs less than smaller ones. The loop must not become one memcpy: gcc
   expands that to `rep movs`, which takes longer to start than most of these copies take. */
AMPI_INLINE void ampi_copy_floats(float* d, const float* s, size_t n) {
    size_t i = 0;
    if (n >= 16) {
        for (; i + 16 < n; i += 16) {
            AMPI_OPAQUE(s);
            memcpy(d + i, s + i, 16 * sizeof *d);
        }
        memcpy(d + n - 16, s + n - 16, 16 * sizeof *d);
    } else if (n >= 8) {
        memcpy(d, s, 8 * sizeof *d);
        memcpy(d + n - 8, s + n - 8, 8 * sizeof *d);
    } else if (n >= 4) {
        memcpy(d, s, 4 * sizeof *d);
        memcpy(d + n - 4, s + n - 4, 4 * sizeof *d);
    } else if (n >= 2) {
        memcpy(d, s, 2 * sizeof *d);
        d[n - 1] = s[n - 1];
    } else if (n > 0) {
        *d = *s;
    }
}
/* dst[(to0 + r) ^ flip] = the pieces, `from[r]` floats further on. */
AMPI_INLINE void ampi_stage_copy_plain_body(int hw, const ampi_piece* piece, size_t pieces, const float* src,
                                      const uint32_t* from, size_t rows, size_t to0, size_t flip, float* dst,
                                      size_t ldd) {
    size_t r, i;
    (void)hw;
    for (i = 0; i < pieces; i++) {
        const float* s = src + piece[i].from;
        float* d = dst + piece[i].to;
        size_t n = piece[i].count;
        for (r = 0; r < rows; r++) ampi_copy_floats(d + ((to0 + r) ^ flip) * ldd, s + from[r], n);
    }
}
#if AMPI_X86
AMPI_TARGET_AVX512 AMPI_FN void ampi_stage_copy_avx512(const ampi_piece* piece, size_t pieces, const float* src,
                                                       const uint32_t* from, size_t rows, size_t to0, size_t flip,
                                                       float* dst, size_t ldd) {
    size_t r, i, j;
    for (i = 0; i < pieces; i++)
        for (j = 0; j < piece[i].count; j += 16) {
            const float* s = src + piece[i].from + j;
            float* d = dst + piece[i].to + j;
            const __mmask16 m = ampi_first_x16(piece[i].count - j);
            for (r = 0; r < rows; r++)
                _mm512_mask_storeu_ps(d + ((to0 + r) ^ flip) * ldd, m, _mm512_maskz_loadu_ps(m, s + from[r]));
        }
    ampi_clear_upper();
}
#endif
AMPI_KERNEL_AVX2(ampi_stage_copy_plain,
                 (const ampi_piece* piece, size_t pieces, const float* src, const uint32_t* from, size_t rows,
                  size_t to0, size_t flip, float* dst, size_t ldd),
                 piece, pieces, src, from, rows, to0, flip, dst, ldd)

AMPI_FN void ampi_stage_copy(const ampi_piece* piece, size_t pieces, const float* src, const uint32_t* from,
                             size_t rows, size_t to0, size_t flip, float* dst, size_t ldd) {
#if AMPI_X86
    if (ampi_simd() == AMP_ISA_AVX512) ampi_stage_copy_avx512(piece, pieces, src, from, rows, to0, flip, dst, ldd);
    else
#endif
    ampi_stage_copy_plain(piece, pieces, src, from, rows, to0, flip, dst, ldd);
}

/* Runs [r0, r0+rn) into rows of the panels at dst (`stride` apart; rows `ldd` apart, in the last panel
   `last_ldd`). */
AMPI_FN void ampi_stage_rows(ampi_stage* t, size_t r0, size_t rn, size_t flip, float* dst, size_t ldd,
                             size_t last_ldd, size_t stride) {
    const ampi_image* g = t->v->image;
    size_t taps = g->kernel_h * g->kernel_w, end = ampi_min_size(r0 + rn, t->v->runs), r;
    uint32_t from[AMPI_GEMM_KC_ONE];
    size_t a = r0 % taps / g->kernel_w, b = r0 % g->kernel_w;
    for (r = r0; r < end; ) {
        size_t count = ampi_min_size(taps - r % taps, end - r), i, first, next;
        float* panel = dst;
        for (i = 0; i < count; i++) {
            size_t u = (size_t)((int64_t)b * g->step_w - t->low_w), w = (size_t)g->mul_w;
            if (w > 1) u = u % w * t->phase + u / w;
            from[i] = (uint32_t)((size_t)((int64_t)a * g->step_h - t->low_h) * t->pitch + u);
            if (++b == g->kernel_w) { b = 0; a = a + 1 == g->kernel_h ? 0 : a + 1; }
        }
        ampi_stage_fill(t, r / taps);
        for (first = 0; first < t->pieces; first = next, panel += stride) {
            for (next = first + 1; next < t->pieces && t->piece[next].to != 0; next++) { }
            ampi_stage_copy(t->piece + first, next - first, t->data, from, count, r - r0, flip, panel,
                            next < t->pieces ? ldd : last_ldd);
        }
        r += count;
    }
}

#if AMPI_X86
/* --- staging for words: an image operand of BF16 -------------------------------------------- */

/* As above, but in 16 bits, and two channels at a time, because a word may be of both; and once for each column
   of the kernel: so rows have no margins, and what a run takes from one image are neighbours. A piece is a stretch
   of positions inside one image. Of a channel there are, kernel column by kernel column, the rows y = 0 mod mul_h of
   all images, then those 1 mod mul_h, and so on. */
enum { AMPI_STAGE_TAPS = AMPI_GEMM_KC_ONE / 2 };

/* Classes of rows that the kernel meets; rows of a class beyond those of the first kernel row. */
AMPI_FN size_t ampi_words_classes(const ampi_stage* t) {
    return (size_t)ampi_min_i64(t->v->image->mul_h, t->span_h);
}
AMPI_FN size_t ampi_words_more(const ampi_stage* t) { return (size_t)((t->span_h - 1) / t->v->image->mul_h); }

/* Prepares positions [p, p+n), in panels of `cut`. */
AMPI_FN void ampi_words_stage(ampi_stage* t, const ampi_operand* v, size_t p, size_t n, size_t cut) {
    const ampi_image* g = v->image;
    size_t image, i, next, q, at, taps = g->kernel_h * g->kernel_w;
    t->v = v; t->p = p; t->n = ampi_min_size(n, v->length - p);
    t->pieces = t->rows = 0;
    t->held[0] = t->held[1] = (size_t)-1;
    t->low_h = ampi_min_i64(0, ((int64_t)g->kernel_h - 1) * g->step_h);
    t->span_h = ((int64_t)g->kernel_h - 1) * ampi_abs_i64(g->step_h) + 1;
    for (q = p; q < p + t->n; ) {
        at = t->rows * g->cols + q % g->cols;
        t->rows += ampi_stage_slab(t, q, &image, &i, &next) + ampi_words_more(t);
        while (q < next) {
            ampi_piece* piece = &t->piece[t->pieces++];
            size_t to = (q - p) % cut, count = ampi_min_size(cut - to, next - q);
            piece->from = (uint32_t)at; piece->to = (uint16_t)to; piece->count = (uint16_t)count;
            q += count; at += count;
        }
    }
    t->size = g->kernel_w * ampi_words_classes(t) * t->rows * g->cols;
    for (i = 0; i < 2 * taps; i++) {
        size_t a = (size_t)((int64_t)(i % taps / g->kernel_w) * g->step_h - t->low_h);
        size_t row = (i % g->kernel_w * ampi_words_classes(t) + a % (size_t)g->mul_h) * t->rows + a / (size_t)g->mul_h;
        t->from[i] = (uint32_t)(i / taps * t->size + row * g->cols);
    }
}
/* Whether n positions in panels of `cut` always have room in so many floats. */
AMPI_FN int ampi_words_stage_fits(const ampi_operand* v, size_t n, size_t cut, size_t room) {
    const ampi_image* g = v->image;
    size_t slabs = ampi_min_size(n, v->length) / (g->rows * g->cols) + 2, more, rows;
    ampi_stage t;
    t.v = v;
    t.span_h = ((int64_t)g->kernel_h - 1) * ampi_abs_i64(g->step_h) + 1;
    if (g->div_h != 1 || g->div_w != 1 || g->mul_h > 64 || g->mul_w > 64 || g->kernel_h * g->kernel_w > AMPI_STAGE_TAPS
        || t.span_h > (int64_t)room || g->cols > room || n / cut + slabs + 1 > AMPI_GEMM_NC) return 0;
    more = ampi_words_more(&t);
    rows = (n / g->cols + (2 + more) * slabs) * ampi_words_classes(&t);
    return rows <= room && rows * g->kernel_w <= room && rows * g->kernel_w * g->cols + 16 <= room;
}

/* Those of the 32 places from x on that lie in [0, width). */
AMPI_FN __mmask32 ampi_inside_x32(int64_t x, int64_t width) {
    const uint32_t low = x <= -32 ? 0 : x < 0 ? 0xffffffffu << -x : 0xffffffffu;
    const uint32_t high = x >= width ? 0 : width - x < 32 ? (1u << (width - x)) - 1u : 0xffffffffu;
    return low & high;
}
/* dst[r*n + j] = element x0 + j*mul of row r, j < n, or zero where it has none; rows lie lds apart. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_words_rows(uint16_t* dst, size_t n, const uint16_t* src, size_t lds, size_t rows,
                                               int64_t width, int64_t x0, int64_t mul) {
    const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32,
                                          30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    size_t j, r, l;
    for (j = 0; j < n; j += 32) {
        const int64_t x = x0 + (int64_t)j * mul;
        const __mmask32 here = ampi_inside_x32(x, width), there = ampi_inside_x32(x + 32, width);
        const __mmask32 m = ampi_inside_x32(0, (int64_t)(n - j));
        for (r = 0; r < rows && mul <= 2; r++) {
            const uint16_t* from = src + (int64_t)(r * lds) + x;
            __m512i v = _mm512_maskz_loadu_epi16(here, from);
            if (mul == 2) v = _mm512_permutex2var_epi16(v, even, _mm512_maskz_loadu_epi16(there, from + 32));
            _mm512_mask_storeu_epi16(dst + r * n + j, m, v);
        }
        for (r = 0; r < rows && mul > 2; r++)
            for (l = j; l < n && l < j + 32; l++) {
                int64_t at = x0 + (int64_t)l * mul;
                dst[r * n + l] = at < 0 || at >= width ? 0 : src[(int64_t)(r * lds) + at];
            }
    }
    ampi_clear_upper();
}

/* Rows of class f of one kernel column: `rows` of them, the first of which is row y of the plane at src. */
AMPI_FN void ampi_words_slab(const ampi_image* g, const uint16_t* src, int64_t y, size_t rows, int64_t x0,
                             uint16_t* dst) {
    int64_t mul = g->mul_h, count = (int64_t)rows;
    int64_t first = y >= 0 ? 0 : ampi_min_i64((mul - 1 - y) / mul, count);
    int64_t last = y >= g->height ? first : ampi_min_i64((g->height - 1 - y) / mul + 1, count);
    if (last < first) last = first;
    memset(dst, 0, (size_t)first * g->cols * sizeof *dst);
    memset(dst + (size_t)last * g->cols, 0, (size_t)(count - last) * g->cols * sizeof *dst);
    if (first < last)
        ampi_words_rows(dst + (size_t)first * g->cols, g->cols, src + (y + first * mul) * g->width,
                        (size_t)(mul * g->width), (size_t)(last - first), g->width, x0, g->mul_w);
}
/* Brings channel c into `data`, zeros if there is none. */
AMPI_FN void ampi_words_fill(ampi_stage* t, size_t c) {
    const ampi_image* g = t->v->image;
    const size_t classes = ampi_words_classes(t);
    size_t image, i, next, q, at, rows, f, b;
    uint16_t* dst = (uint16_t*)(void*)t->data + c % 2 * t->size;
    if (t->held[c % 2] == c) return;
    t->held[c % 2] = c;
    if (c * g->kernel_h * g->kernel_w >= t->v->runs) { memset(dst, 0, t->size * sizeof *dst); return; }
    for (q = t->p, at = 0; q < t->p + t->n; q = next, at += rows) {
        const uint16_t* src = (const uint16_t*)t->v->data + t->v->offset + c * g->channel_stride;
        int64_t y;
        rows = ampi_stage_slab(t, q, &image, &i, &next) + ampi_words_more(t);
        y = (int64_t)i * g->mul_h + g->base_h + t->low_h;
        src += image * g->image_stride;
        for (b = 0; b < g->kernel_w; b++)
            for (f = 0; f < classes; f++)
                ampi_words_slab(g, src, y + (int64_t)f, rows, g->base_w + (int64_t)b * g->step_w,
                                dst + ((b * classes + f) * t->rows + at) * g->cols);
    }
}

/* n columns of so many rows of words: row w from the elements from[2*w] and from[2*w + 1] on. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_words_piece(float* dst, size_t ldd, const uint16_t* src, const uint32_t* from,
                                                size_t words, size_t n) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                         39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __mmask32 m = ampi_inside_x32(0, (int64_t)n);
    const __mmask16 m0 = ampi_first_x16(n), m1 = ampi_first_x16(n > 16 ? n - 16 : 0);
    size_t w;
    for (w = 0; w < words; w++, dst += ldd) {
        const __m512i x = _mm512_maskz_loadu_epi16(m, src + from[2 * w]);
        const __m512i y = _mm512_maskz_loadu_epi16(m, src + from[2 * w + 1]);
        _mm512_mask_storeu_epi32(dst, m0, _mm512_permutex2var_epi16(x, low, y));
        if (m1) _mm512_mask_storeu_epi32(dst + 16, m1, _mm512_permutex2var_epi16(x, high, y));
    }
    ampi_clear_upper();
}
/* Run r as a row along k: all pieces. What follows a piece is overwritten, up to 31 elements behind the last. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_words_run(const ampi_stage* t, size_t r, uint16_t* dst) {
    const size_t taps = t->v->image->kernel_h * t->v->image->kernel_w;
    const uint16_t* src = (const uint16_t*)(const void*)t->data + t->from[r % (2 * taps)];
    size_t i, j;
    for (i = 0; i < t->pieces; i++)
        for (j = 0; j < t->piece[i].count; j += 32)
            _mm512_storeu_si512(dst + t->piece[i].to + j, _mm512_loadu_si512(src + t->piece[i].from + j));
    ampi_clear_upper();
}
#endif

/* --- packing and tiles ------------------------------------------------------------------- */

/* One product. swap: two BF16 operands, so k runs in the order 1,0,3,2,...; k is even then (padded with a
   zero). */
typedef struct ampi_product {
    size_t m, n, k;
    ampi_operand a, b;
    int swap, exact, normal;           /* normal: nothing can be subnormal, so that images may be words too */
    float alpha, beta;
    void* c; amp_dtype c_dtype;
    size_t c_offset, ldc;              /* element (i, j) of C lies at */
    size_t part, part_stride;          /* c_offset + i*ldc + j/part*part_stride + j%part */
    const void* bias; amp_dtype bias_dtype;       /* NULL: none */
    size_t bias_offset;
    int bias_per_row;
} ampi_product;

/* Sizes of the blocks, and where they lie in a slot of scratch memory (offsets in floats). */
typedef struct ampi_gemm_plan {
    size_t mc, nc, kc, tiles_m, tiles_n, slots;
    size_t at_b, at_t, at_line, at_stage, floats; /* A lies at 0; `line` holds rows on their way */
    size_t ldt;
    int few;                           /* few rows: the block of A is packed first, then B panel by panel */
} ampi_gemm_plan;

/* How deep a packed panel is. */
AMPI_FN size_t ampi_panel_depth(const ampi_gemm_isa* g, size_t kc) {
    return !g->words ? kc : g->staged ? ampi_max_size(kc, ampi_words(g, kc)) : ampi_words(g, kc);
}
/* Floats from one panel of B to the next, from one row of a panel of A to the next (an odd number of cache
   lines), from one panel of A to the next. */
AMPI_FN size_t ampi_panel_stride(const ampi_gemm_isa* g, size_t kc) {
    return ampi_panel_depth(g, kc) * 2 * g->lanes + AMPI_GEMM_GAP;
}
AMPI_FN size_t ampi_row_stride(const ampi_gemm_isa* g, size_t kc) {
    return ((ampi_panel_depth(g, kc) + 15) / 16 | 1u) * 16;
}
AMPI_FN size_t ampi_a_stride(const ampi_gemm_isa* g, size_t kc) {
    return g->a_width * ampi_row_stride(g, kc);
}

/* How many panels of A are packed together: all if the rows are few, otherwise, where blocks are deep, so many that
   they use whole cache lines of each k that is read. */
AMPI_FN size_t ampi_group(const ampi_gemm_isa* g, int few, size_t panels, size_t kc) {
    return few ? panels : kc > 256 ? ampi_min_size(panels, ampi_max_size(64 / g->a_width, 1)) : 1;
}

/* The gaps keep rows from falling on the same cache sets. */
AMPI_FN void ampi_gemm_layout(ampi_gemm_plan* p, const ampi_gemm_isa* g) {
    size_t panels = ampi_div_up(p->nc, 2 * g->lanes), a = ampi_a_stride(g, p->kc);
    size_t line = g->lanes * (p->kc + AMPI_GEMM_GAP);
    a *= ampi_group(g, p->few, ampi_div_up(p->mc, g->mr), p->kc);
    if (g->words) line = ampi_a_stride(g, p->kc);
    p->ldt = panels * 2 * g->lanes + AMPI_GEMM_GAP;
    p->at_b = ampi_round_up(a, 16) + 16;
    p->at_t = p->at_b + ampi_round_up(panels * ampi_panel_stride(g, p->kc), 16);
    p->at_line = p->at_t + ampi_round_up(p->mc * p->ldt, 16);
    p->at_stage = p->at_line + ampi_round_up(ampi_max_size(line, p->ldt), 16);
    p->floats = p->at_stage + AMPI_GEMM_STAGE;
}

#if defined(_OPENMP) && !defined(AMP_NO_OPENMP)    /* <omp.h> is included at the top */
AMPI_FN size_t ampi_threads(void) { int t = omp_get_max_threads(); return t > 0 ? (size_t)t : 1; }
#else
AMPI_FN size_t ampi_threads(void) { return 1; }
#endif

/* Threads that a product is worth: an element brought from memory counts as 4 multiplications, because products of
   one row are little else. */
AMPI_FN size_t ampi_gemm_threads(size_t m, size_t n, size_t k) {
    const double a = (double)m, b = (double)n, c = (double)k;
    return a * b * c + 4.0 * (a * b + b * c + a * c) < 1e6 ? 1 : ampi_threads();
}

/* Cuts C into tiles. */
AMPI_FN void ampi_gemm_cut(ampi_gemm_plan* p, const ampi_gemm_isa* g, size_t m, size_t n, size_t tiles_m,
                           size_t tiles_n) {
    p->mc = tiles_m == 1 ? m : ampi_div_up(m, tiles_m);
    p->nc = ampi_round_up(tiles_n == 1 ? n : ampi_div_up(n, tiles_n), g->lanes);
    p->tiles_m = ampi_div_up(m, p->mc);
    p->tiles_n = ampi_div_up(n, p->nc);
}

/* What the busiest thread has to do for one k, in multiplications: those of its tiles, where half a panel takes a
   little more than half the time, and packing a row of A is worth about 4 of them, packing a column of B 12. */
AMPI_FN double ampi_gemm_cost(const ampi_gemm_plan* p, const ampi_gemm_isa* g, size_t threads) {
    size_t turns = (p->tiles_m * p->tiles_n + threads - 1) / threads;
    size_t width = p->nc + (p->nc % (2 * g->lanes) ? g->lanes / 4 : 0);
    return (double)turns * ((double)p->mc * (double)width + 4.0 * (double)p->mc + 12.0 * (double)p->nc);
}

/* Tiles of at most mc x nc; more of them if that keeps all threads busy. */
AMPI_FN ampi_gemm_plan ampi_gemm_plan_of(const ampi_gemm_isa* g, size_t m, size_t n, size_t k, size_t mc,
                                         size_t nc, size_t kc) {
    ampi_gemm_plan p, q;
    size_t threads = ampi_gemm_threads(m, n, k), blocks, i, turns;
    memset(&p, 0, sizeof p);
    m = ampi_max_size(m, 1); n = ampi_max_size(n, 1); k = ampi_max_size(k, 1);
    ampi_gemm_cut(&p, g, m, n, ampi_div_up(m, mc), ampi_div_up(n, nc));
    for (turns = 1, q = p; threads > 1 && turns <= 4; turns++)
        for (i = ampi_div_up(n, nc); i <= turns * threads && (i - 1) * g->lanes < n; i++) {
            size_t tiles_m = ampi_max_size(ampi_div_up(turns * threads, i), ampi_div_up(m, mc));
            ampi_gemm_cut(&q, g, m, n, ampi_min_size(tiles_m, m), i);
            if (ampi_gemm_cost(&q, g, threads) < ampi_gemm_cost(&p, g, threads)) p = q;
        }
    p.few = p.mc <= AMPI_GEMM_FEW * g->mr;
    if (p.few || p.nc <= 2 * g->lanes) kc = ampi_min_size(kc, AMPI_GEMM_KC_THIN);
    blocks = ampi_div_up(k, kc);
    p.kc = ampi_round_up(blocks == 1 ? k : ampi_div_up(k, blocks), g->words ? 2 * AMPI_WORDS : 16);
    p.slots = ampi_min_size(threads, p.tiles_m * p.tiles_n);
    ampi_gemm_layout(&p, g);
    return p;
}

/* Swaps elements 2i and 2i+1, n a multiple of 16. */
AMPI_INLINE void ampi_swap_pairs_body(int hw, float* row, size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; i < n; i += 16, row += 16)
        for (l = 0; l < 16; l += 2) {
            float first = row[l];
            row[l] = row[l + 1];
            row[l + 1] = first;
        }
}
AMPI_KERNEL(ampi_swap_pairs, (float* row, size_t n), row, n)

/* dst[k] = positions [p0, p0+pn) of run k0 + k of a matrix, k < kc; with `swap` rows 2i and 2i+1 trade
   places: the even and the odd runs are two matrices with twice the distance between rows. */
AMPI_FN void ampi_pack_runs(const ampi_gemm_isa* g, const ampi_operand* v, int swap, size_t k0, size_t kc,
                            size_t p0, size_t pn, float* dst, size_t ldd) {
    ampi_operand part = *v;
    if (!swap) { ampi_operand_block(g, v, k0, kc, p0, pn, dst, ldd); return; }
    part.ld = 2 * v->ld;
    part.runs = (v->runs + 1) / 2;
    ampi_operand_block(g, &part, k0 / 2, kc / 2, p0, pn, dst + ldd, 2 * ldd);
    part.offset += v->ld;
    part.runs = v->runs / 2;
    ampi_operand_block(g, &part, k0 / 2, kc / 2, p0, pn, dst, 2 * ldd);
}

/* `width` columns from j, their runs along k: rows of FP32, then transposed, `lanes` columns and so many k at
   a time that the rows stay in the first-level cache. `stage` is open, or NULL. */
AMPI_FN void ampi_pack_b_along_k(const ampi_gemm_isa* g, const ampi_product* s, ampi_stage* stage, size_t j,
                                 size_t columns, size_t width, size_t k0, size_t kc, float* b, float* line) {
    size_t l, k, lds = kc + AMPI_GEMM_GAP, step = s->b.image ? kc : 128;
    for (l = 0; l < width; l += g->lanes) {
        size_t here = l < columns ? ampi_min_size(columns - l, g->lanes) : 0;
        if (!s->b.image && s->b.dtype == AMP_F32 && here == g->lanes) {
            g->transpose(b + l, width, (const float*)s->b.data + s->b.offset + (j + l) * s->b.ld + k0,
                         s->b.ld, kc, 0);
            continue;
        }
        if (here < g->lanes || (stage && stage->n < kc)) memset(line, 0, g->lanes * lds * sizeof *line);
        if (stage) ampi_stage_rows(stage, j + l, here, 0, line, lds, lds, 0);
        for (k = 0; k < kc; k += step) {
            size_t part = ampi_min_size(kc - k, step);
            if (!stage) ampi_operand_block(g, &s->b, j + l, here, k0 + k, part, line, lds);
            g->transpose(b + l + k * width, width, line, lds, part, s->swap ? 1 : 0);
        }
    }
}

/* All columns of an image operand whose runs go along n, when it cannot be staged: a run at a time, dealt
   out. */
AMPI_FN void ampi_pack_b_image(const ampi_gemm_isa* g, const ampi_product* s, size_t j0, size_t nc, size_t k0,
                               size_t kc, float* b, float* line) {
    size_t nr = 2 * g->lanes, stride = ampi_panel_stride(g, kc), k, j;
    for (k = 0; k < kc; k++) {
        size_t to = s->swap ? k ^ 1 : k;
        ampi_operand_block(g, &s->b, k0 + k, 1, j0, nc, line, 0);
        for (j = 0; j < nc; j += nr) {
            size_t width = nc - j > g->lanes ? nr : g->lanes;
            memcpy(b + j / nr * stride + to * width, line + j, width * sizeof *b);
        }
    }
}

/* Columns [j0, j0+nc) and k in [k0, k0+kc) of op(B) in panels of 2*lanes columns, k slow; the last panel
   has `lanes` columns if that is enough for it. Runs along n are taken a few rows at a time, across all
   panels: their rows may lie pages apart. */
AMPI_FN void ampi_pack_b(const ampi_gemm_isa* g, const ampi_product* s, ampi_stage* stage, size_t j0,
                         size_t nc, size_t k0, size_t kc, float* b, float* line) {
    size_t j, k, nr = 2 * g->lanes, stride = ampi_panel_stride(g, kc);
    int along_k = s->b.along_k;
    size_t step = along_k ? kc : 32;
    ampi_stage_open(stage, &s->b, along_k ? k0 : j0, along_k ? kc : nc, along_k ? kc : nr);
    if (stage->open && !along_k) {
        size_t rest = (nc - 1) % nr + 1, width = rest > g->lanes ? nr : g->lanes;
        if (rest < width || k0 + kc > s->b.runs) memset(b, 0, (nc + nr - 1) / nr * stride * sizeof *b);
        ampi_stage_rows(stage, k0, kc, s->swap ? 1 : 0, b, nr, width, stride);
        return;
    }
    if (s->b.image && !along_k) { ampi_pack_b_image(g, s, j0, nc, k0, kc, b, line); return; }
    for (k = 0; k < kc; k += step) {
        size_t part = ampi_min_size(kc - k, step);
        for (j = 0; j < nc; j += nr) {
            size_t columns = ampi_min_size(nc - j, nr), width = columns > g->lanes ? nr : g->lanes;
            float* to = b + j / nr * stride + k * width;
            if (along_k) ampi_pack_b_along_k(g, s, stage->open ? stage : NULL, j0 + j, columns, width, k0, kc,
                                             to, line);
            else ampi_pack_runs(g, &s->b, s->swap, k0 + k, part, j0 + j, columns, to, width);
        }
    }
}

#if AMPI_X86
/* The panel of B from column j of a matrix whose runs go along k, as words: pairs of neighbours, transposed 16
   columns at a time, whole blocks of 16 pairs from where they are, the rest copied and filled up. */
AMPI_FN void ampi_words_b_along_k(const ampi_gemm_isa* g, const ampi_product* s, size_t j, size_t columns,
                                  size_t width, size_t k0, size_t kc, float* b, float* line) {
    const uint16_t* src = (const uint16_t*)s->b.data + s->b.offset + j * s->b.ld + k0;
    size_t length = ampi_min_size(kc, s->b.length - k0);
    size_t words = ampi_words(g, kc), pairs = g->words == AMPI_WORDS_F16 ? words / 4 : words, l, i;
    size_t lds = pairs + AMPI_GEMM_GAP;
    size_t whole = s->b.ld % 2 == 0 && (uintptr_t)src % sizeof(float) == 0 ? length / 32 * 16 : 0;
    for (l = 0; l < width; l += g->lanes, src += g->lanes * s->b.ld) {
        size_t done = l + g->lanes <= columns ? whole : 0, ldt = g->words == AMPI_WORDS_F16 ? g->lanes : width;
        float* turned = g->words == AMPI_WORDS_F16 ? line + g->lanes * lds : b + l;
        if (columns < l + g->lanes) memset(line, 0, g->lanes * lds * sizeof *line);
        for (i = 0; done < pairs && i < g->lanes && l + i < columns; i++)
            ampi_words_copy(line + i * lds, src + i * s->b.ld + 2 * done, length - 2 * done, pairs - done);
        g->transpose(turned, ldt, (const float*)(const void*)src, s->b.ld / 2, done, 0);
        g->transpose(turned + done * ldt, ldt, line, lds, pairs - done, 0);
        if (g->words == AMPI_WORDS_F16) ampi_words_of_pairs(b + l, width, turned, pairs);
    }
}

/* The block of op(B), a matrix, as words, in panels as ampi_pack_b's. */
AMPI_FN void ampi_pack_b_words(const ampi_gemm_isa* g, const ampi_product* s, size_t j0, size_t nc, size_t k0,
                               size_t kc, float* b, float* line) {
    size_t j, k, nr = 2 * g->lanes, stride = ampi_panel_stride(g, kc), words = ampi_words(g, kc);
    size_t step = s->b.along_k ? kc : 32, bytes = amp_dtype_size(s->b.dtype);
    for (k = 0; k < kc; k += step)
        for (j = 0; j < nc; j += nr) {
            size_t columns = ampi_min_size(nc - j, nr), width = columns > g->lanes ? nr : g->lanes;
            size_t at = k0 + k, first = k == 0 ? 0 : ampi_words(g, k);
            size_t some = k + step < kc ? ampi_words(g, k + step) - first : words - first;
            float* to = b + j / nr * stride + first * width;
            if (s->b.along_k) ampi_words_b_along_k(g, s, j0 + j, columns, width, k0, kc, to, line);
            else ampi_words_across(g, to, width, (const char*)s->b.data
                                   + (s->b.offset + at * s->b.ld + j0 + j) * bytes, s->b.dtype, s->b.ld,
                                   ampi_min_size(s->b.runs - at, step), columns, some, width, 1);
        }
}

/* The same of an image operand. Across k: pairs of runs, interleaved; */
AMPI_FN void ampi_words_b_across(const ampi_gemm_isa* g, const ampi_product* s, ampi_stage* stage, size_t j0,
                                 size_t nc, size_t k0, size_t kc, float* b) {
    const size_t taps = s->b.image->kernel_h * s->b.image->kernel_w, nr = 2 * g->lanes;
    const size_t stride = ampi_panel_stride(g, kc), last = (nc - 1) / nr * nr, words = ampi_words(g, kc);
    size_t k, next, i, j;
    ampi_words_stage(stage, &s->b, j0, nc, nr);
    for (j = 0; j < nc; j += nr) {
        size_t width = nc - j > g->lanes ? nr : g->lanes, first = (nc - j) % g->lanes && j == last ? 0 : kc / 2;
        memset(b + j / nr * stride + first * width, 0, (words - first) * width * sizeof *b);
    }
    for (k = k0; k < k0 + kc; k = next) {
        size_t c = k / (2 * taps) * 2;
        float* panel = b;
        next = ampi_min_size(k0 + kc, (c + 2) * taps);
        ampi_words_fill(stage, c);
        if (next > (c + 1) * taps) ampi_words_fill(stage, c + 1);
        for (i = 0, j = 0; i < stage->pieces; i++) {
            size_t width = nc - j > g->lanes ? nr : g->lanes, count = stage->piece[i].count, to = stage->piece[i].to;
            ampi_words_piece(panel + (k - k0) / 2 * width + to, width,
                             (const uint16_t*)(const void*)stage->data + stage->piece[i].from,
                             stage->from + (k - c * taps), (next - k) / 2, count);
            if (to + count == nr) { j += nr; panel += stride; }
        }
    }
}
/* along k: rows of words, transposed. */
AMPI_FN void ampi_words_b_runs(const ampi_gemm_isa* g, const ampi_product* s, ampi_stage* stage, size_t j0, size_t nc,
                               size_t k0, size_t kc, float* b, float* line) {
    const size_t nr = 2 * g->lanes, stride = ampi_panel_stride(g, kc), words = ampi_words(g, kc);
    const size_t lds = words + AMPI_GEMM_GAP, taps = s->b.image->kernel_h * s->b.image->kernel_w;
    size_t j, i;
    ampi_words_stage(stage, &s->b, k0, kc, kc);
    for (j = 0; j < nc; j += g->lanes) {
        size_t width = nc - j / nr * nr > g->lanes ? nr : g->lanes, here = ampi_min_size(nc - j, g->lanes);
        if (here < g->lanes) memset(line, 0, g->lanes * lds * sizeof *line);
        for (i = 0; i < here; i++) {
            uint16_t* row = (uint16_t*)(void*)(line + i * lds);
            ampi_words_fill(stage, (j0 + j + i) / taps);
            ampi_words_run(stage, j0 + j + i, row);
            memset(row + stage->n, 0, (2 * words - stage->n) * sizeof *row);
        }
        g->transpose(b + j / nr * stride + j % nr, width, line, lds, words, 0);
    }
}
/* Row i of op(A), whole planes, as words. */
AMPI_FN void ampi_words_planes(const ampi_operand* v, size_t i, size_t k0, size_t n, size_t words, float* dst) {
    const ampi_image* g = v->image;
    const uint16_t* src = (const uint16_t*)v->data + v->offset + i * g->channel_stride;
    uint16_t* to = (uint16_t*)(void*)dst;
    size_t plane = g->rows * g->cols, k, count;
    for (k = k0; k < k0 + n; k += count, to += count) {
        count = ampi_min_size(plane - k % plane, k0 + n - k);
        memcpy(to, src + k / plane * g->image_stride + k % plane, count * sizeof *to);
    }
    memset(to, 0, (2 * words - n) * sizeof *to);
}

/* `rows` rows of op(A) as words, row after row. */
AMPI_FN void ampi_pack_a_words(const ampi_gemm_isa* g, const ampi_product* s, size_t row, size_t rows, size_t k0,
                               size_t kc, float* a, size_t rs, float* line) {
    size_t bytes = amp_dtype_size(s->a.dtype), words = ampi_words(g, kc), i, w;
    size_t length = ampi_min_size(kc, s->a.length - k0);           /* of a run along k */
    const char* src = (const char*)s->a.data + s->a.offset * bytes;
    for (i = 0; s->a.image && i < rows; i++) ampi_words_planes(&s->a, row + i, k0, length, words, a + i * rs);
    for (i = 0; !s->a.image && s->a.along_k && i < rows; i++)
        ampi_words_along(a + i * rs, src + ((row + i) * s->a.ld + k0) * bytes, s->a.dtype, length, words);
    if (s->a.along_k) return;
    ampi_words_across(g, line, g->a_width, src + (k0 * s->a.ld + row) * bytes, s->a.dtype, s->a.ld,
                      ampi_min_size(kc, s->a.runs - k0), rows, words, g->a_width, 0);
    for (w = 0; w < words; w += g->lanes) g->transpose(a + w, rs, line + w * g->a_width, g->a_width, rows, 0);
}
#endif

/* May the micro-kernel write the last sums straight to C? Where C is F32, a plain matrix, and the sums are
   the result. */
AMPI_FN int ampi_is_direct(const ampi_product* s) {
    return s->c_dtype == AMP_F32 && s->part >= s->n && !s->bias && s->alpha == 1.0f && s->beta == 0.0f
           && s->k > 0;
}

/* One block of a tile: where it lies in C and along k, its sizes, whether it is the first and the last along
   k, and whether its sums go to C directly, or finished panel by panel; panels of rows, the rows of each, and
   how many have one more; the first column of B that is packed (those before are read where they are), and
   whether all of B is packed before the rest; the tile's scratch memory. */
typedef struct ampi_block {
    size_t i0, mc, j0, nc, k0, kc;
    int first, last, direct, finish, few, whole;
    size_t panels, rows, more, packed;
    float *a, *b, *t, *line; size_t ldt;
    ampi_stage* stage;
} ampi_block;

/* May the micro-kernel read A where it is? Where A is F32 and its runs go along k, unless the distance
   between rows puts those of a panel on the same cache sets. */
AMPI_FN int ampi_a_in_place(const ampi_product* s) {
    return s->a.along_k && !s->a.image && s->a.dtype == AMP_F32 && s->a.ld % 1024 != 0;
}
/* The same for words: where pairs of BF16 neighbours are words already, and rows begin with a cache line; and only for
   a wide C. */
AMPI_FN int ampi_a_words_in_place(const ampi_product* s, const ampi_block* b) {
    uintptr_t first = (uintptr_t)((const uint16_t*)s->a.data + s->a.offset);
    return s->a.along_k && !s->a.image && first % 64 == 0 && s->a.ld % 32 == 0 && s->a.ld % 512 != 0
           && b->kc % (2 * AMPI_WORDS) == 0 && b->k0 + b->kc <= s->a.length && b->nc >= 256;
}
/* How many columns of B may it read where they are? Where B is F32 and its runs go along n, those of full
   panels. If many panels of A come by, theirs should be two cache lines wide and not far apart, and if very many, rows
   should begin with a cache line. */
AMPI_FN size_t ampi_b_in_place(const ampi_gemm_isa* g, const ampi_product* s, const ampi_block* b) {
    size_t nr = 2 * g->lanes, rest = b->nc % nr;
    if (s->b.along_k || s->b.image || s->b.dtype != AMP_F32) return 0;
    if (!b->few && (nr < 32 || s->b.ld > 512 || (b->mc >= 512 && s->b.ld % 16 != 0))) return 0;
    return rest == g->lanes ? b->nc : b->nc - rest;
}

/* Panel q of the block's rows: where it begins, and how many rows it has. All are about equally full. */
AMPI_FN size_t ampi_panel_low(const ampi_block* b, size_t q) {
    return q * b->rows + ampi_min_size(q, b->more);
}
AMPI_FN size_t ampi_panel_rows(const ampi_block* b, size_t q) {
    return ampi_min_size(b->rows + (q < b->more ? 1 : 0), b->mc - ampi_panel_low(b, q));
}

/* Panels [q, past) of A, whose runs go across k, a few k at a time: the lines that two panels share are read once. */
AMPI_FN void ampi_pack_a_runs(const ampi_gemm_isa* g, const ampi_product* s, const ampi_block* b, size_t q, size_t past,
                              float* a) {
    size_t step = past - q > 1 && !s->a.image ? 64 : b->kc, k, i;
    for (k = 0; k < b->kc; k += step)
        for (i = q; i < past; i++)
            ampi_pack_runs(g, &s->a, s->swap, b->k0 + k, ampi_min_size(b->kc - k, step), b->i0 + ampi_panel_low(b, i),
                           s->a.image ? ampi_panel_rows(b, i) : g->a_width,
                           a + (i - q) * ampi_a_stride(g, b->kc) + k * g->a_width, g->a_width);
}

/* Turns u to panel q of A: row after row if A's runs go along k, otherwise a_width floats for each k. Packs
   it, and the rest of its group, if that is asked for. */
AMPI_FN void ampi_turn_to_a(const ampi_gemm_isa* g, const ampi_product* s, const ampi_block* b, size_t q,
                            int pack, ampi_micro* u) {
    size_t i, rows = ampi_panel_rows(b, q), row = b->i0 + ampi_panel_low(b, q);
    size_t group = s->a.along_k && !b->few ? 1 : ampi_group(g, b->few, b->panels, b->kc);
    float* a = b->a + q % group * ampi_a_stride(g, b->kc);
    u->a = a;
    u->rs = s->a.along_k || g->words ? ampi_row_stride(g, b->kc) : 1;
    u->ks = s->a.along_k || g->words ? 1 : g->a_width;
#if AMPI_X86
    if (g->words) {
        if (ampi_a_words_in_place(s, b)) {
            u->rs = s->a.ld / 2;
            u->a = (const float*)(const void*)((const uint16_t*)s->a.data + s->a.offset + row * s->a.ld + b->k0);
        } else if (pack) ampi_pack_a_words(g, s, row, rows, b->k0, b->kc, a, u->rs, b->line);
        return;
    }
#endif
    if (ampi_a_in_place(s)) {
        u->rs = s->a.ld;
        u->a = (const float*)s->a.data + s->a.offset + row * u->rs + b->k0;
    } else if (pack && s->a.along_k) {
        ampi_operand_block(g, &s->a, row, rows, b->k0, b->kc, a, u->rs);
        for (i = 0; s->swap && i < rows; i++) ampi_swap_pairs(a + i * u->rs, ampi_round_up(b->kc, 16));
    } else if (pack && q % group == 0) {
        ampi_pack_a_runs(g, s, b, q, ampi_min_size(q + group, b->panels), a);
    }
}

/* Packs `columns` columns of B from column j. */
AMPI_FN void ampi_pack_b_any(const ampi_gemm_isa* g, const ampi_product* s, const ampi_block* b, size_t j,
                             size_t columns) {
#if AMPI_X86
    if (g->words) {
        if (!s->b.image) ampi_pack_b_words(g, s, j, columns, b->k0, b->kc, b->b, b->line);
        else if (s->b.along_k) ampi_words_b_runs(g, s, b->stage, j, columns, b->k0, b->kc, b->b, b->line);
        else ampi_words_b_across(g, s, b->stage, j, columns, b->k0, b->kc, b->b);
        return;
    }
#endif
    ampi_pack_b(g, s, b->stage, j, columns, b->k0, b->kc, b->b, b->line);
}

/* Turns u to the panel of B from column j of the block; packs it if its turn has come. */
AMPI_FN void ampi_turn_to_b(const ampi_gemm_isa* g, const ampi_product* s, const ampi_block* b, size_t j,
                            ampi_micro* u) {
    size_t nr = 2 * g->lanes, columns = ampi_min_size(b->nc - j, nr);
    u->two = columns > g->lanes;
    u->bs = u->two ? nr : g->lanes;
    u->columns = b->direct ? columns : u->bs;
    u->ahead = 8 * u->bs;
    if (j < b->packed) {
        u->ahead = b->few ? nr : 8 * s->b.ld;
        u->bs = s->b.ld;
        u->b = (const float*)s->b.data + s->b.offset + b->k0 * u->bs + b->j0 + j;
        return;
    }
    u->b = b->b + (b->whole ? (j - b->packed) / nr * ampi_panel_stride(g, b->kc) : 0);
    if (!b->whole) ampi_pack_b_any(g, s, b, b->j0 + j, columns);
}

/* The panel of sums t, from row i and column j of C, finished. */
AMPI_FN void ampi_gemm_finish_panel(const ampi_gemm_isa* g, const ampi_product* s, size_t i, size_t j, size_t rows,
                                    size_t columns, const float* t, size_t ldt) {
    size_t at = s->c_offset + i * s->ldc + j, from = s->bias_offset + (s->bias_per_row ? i : j);
    ampi_finish f;
    f.c = (char*)s->c + at * amp_dtype_size(s->c_dtype); f.c_dtype = s->c_dtype; f.ldc = s->ldc;
    f.alpha = s->alpha; f.beta = s->beta;
    f.add = s->beta != 0.0f ? f.c : NULL; f.add_dtype = s->c_dtype; f.ld_add = s->ldc;
    f.spread = s->bias && s->bias_per_row;
    if (s->bias) {
        f.add = (const char*)s->bias + from * amp_dtype_size(s->bias_dtype); f.add_dtype = s->bias_dtype;
        f.ld_add = s->bias_per_row ? 1 : 0;
        f.beta = 1.0f;
    }
    g->finish(&f, rows, columns, t, ldt);
}

/* Sums += panel q of A * the panel of B from column j. */
AMPI_FN void ampi_gemm_panels(const ampi_gemm_isa* g, const ampi_product* s, const ampi_block* b, size_t q,
                              size_t j, ampi_micro* u) {
    size_t low = ampi_panel_low(b, q), rows = ampi_panel_rows(b, q), columns = ampi_min_size(b->nc - j, 2 * g->lanes);
    size_t i;
    float out[32 * 32];
    u->old = u->t = b->t + low * b->ldt + j;
    u->ldt = b->ldt;
    if (b->direct) {
        u->t = (float*)s->c + s->c_offset + (b->i0 + low) * s->ldc + b->j0 + j;
        u->ldt = s->ldc;
    } else if (b->finish) {
        u->t = out;
        u->ldt = 32;
    }
    for (i = 0; !b->first && i < rows; i++) {                 /* the next panel's old sums */
        AMPI_FETCH(u->old + i * b->ldt + 2 * g->lanes, 0);
        if (g->lanes == 16) AMPI_FETCH(u->old + i * b->ldt + 32, 64);
    }
    g->micro(rows, u);
    if (b->finish) ampi_gemm_finish_panel(g, s, b->i0 + low, b->j0 + j, rows, columns, out, u->ldt);
}

/* Sums += A block * B block, which is packed if it is `whole`. With many rows one panel of A after the other; with few
   rows the block of A is packed first, then one panel of B after the other. */
AMPI_FN void ampi_gemm_block(const ampi_gemm_isa* g, const ampi_product* s, const ampi_block* b) {
    size_t nr = 2 * g->lanes, j, q;
    ampi_micro u;
    u.k = g->words ? ampi_words(g, b->kc) : b->kc; u.first = b->first; u.last = b->direct; u.exact = s->exact;
    u.ldo = b->ldt;
    for (q = 0; !b->few && q < b->panels; q++) {
        ampi_turn_to_a(g, s, b, q, 1, &u);
        for (j = 0; j < b->nc; j += nr) {
            ampi_turn_to_b(g, s, b, j, &u);
            ampi_gemm_panels(g, s, b, q, j, &u);
        }
    }
    for (j = 0; b->few && j < b->nc; j += nr) {
        ampi_turn_to_b(g, s, b, j, &u);
        for (q = 0; q < b->panels; q++) {
            ampi_turn_to_a(g, s, b, q, j == 0, &u);
            ampi_gemm_panels(g, s, b, q, j, &u);
        }
    }
}

/* dst[i] = beta*add[i*step] + alpha*t[i], dst == t is allowed; NaN as in the micro-kernel. With step 0,
   `add` is one value 16 times. */
AMPI_INLINE void ampi_finish16(int hw, float* dst, const float* t, const float* add, float alpha,
                               float beta) {
    float v[16];
    int l;
    if (add) for (l = 0; l < 16; l++) v[l] = ampi_fma(hw, beta, add[l], alpha * t[l]);
    else for (l = 0; l < 16; l++) v[l] = alpha * t[l];
    for (l = 0; l < 16; l++) dst[l] = ampi_clean_nan(v[l]);
}
AMPI_INLINE void ampi_gemm_finish_body(int hw, float* dst, const float* t, const float* add, size_t step,
                                       size_t n, float alpha, float beta) {
    float tail[16], tail_add[16];
    size_t i = 0, rest = n % 16;
    for (; i < n - rest; i += 16) ampi_finish16(hw, dst + i, t + i, add ? add + i * step : NULL, alpha, beta);
    if (rest == 0) return;
    memset(tail, 0, sizeof tail);
    memset(tail_add, 0, sizeof tail_add);
    memcpy(tail, t + i, rest * sizeof *t);
    if (add) memcpy(tail_add, add + i * step, rest * sizeof *add);
    ampi_finish16(hw, tail, tail, add ? tail_add : NULL, alpha, beta);
    memcpy(dst + i, tail, rest * sizeof *dst);
}
AMPI_KERNEL(ampi_gemm_finish,
            (float* dst, const float* t, const float* add, size_t step, size_t n, float alpha, float beta),
            dst, t, add, step, n, alpha, beta)

/* Where column j of row i of C lies, and how many columns from there are neighbours. */
AMPI_FN size_t ampi_c_at(const ampi_product* s, size_t i, size_t j, size_t n, size_t* count) {
    size_t inside = j % s->part;
    *count = ampi_min_size(s->part - inside, n);
    return s->c_offset + i * s->ldc + j / s->part * s->part_stride + inside;
}

/* Columns [j, j+n) of row i of C from the sums t; `add` is a bias, or room for C's old values, or NULL. */
AMPI_FN void ampi_gemm_store_row(const ampi_product* s, size_t i, size_t j, size_t n, float* t, float* add) {
    size_t count, at, step = s->bias_per_row ? 0 : 1;
    for (; n > 0; t += count, j += count, n -= count) {
        at = ampi_c_at(s, i, j, n, &count);
        if (add && !s->bias) ampi_load_f32(add, s->c, s->c_dtype, at, count);
        if (s->c_dtype == AMP_F32) {
            ampi_gemm_finish((float*)s->c + at, t, add, step, count, s->alpha, s->bias ? 1.0f : s->beta);
        } else {
            ampi_gemm_finish(t, t, add, step, count, s->alpha, s->bias ? 1.0f : s->beta);
            ampi_store_f32(s->c, s->c_dtype, at, t, count);
        }
        if (add) add += count * step;
    }
}

/* The tile's sums T become rows of C. */
AMPI_FN void ampi_gemm_store(const ampi_product* s, const ampi_block* block) {
    size_t i, l, j = block->j0, n = block->nc;
    float *line = block->line, *t = block->t;
    float* add = s->bias || s->beta != 0.0f ? line : NULL;
    if (s->bias && !s->bias_per_row) ampi_load_f32(line, s->bias, s->bias_dtype, s->bias_offset + j, n);
    for (i = 0; i < block->mc; i++, t += block->ldt) {
        if (s->bias && s->bias_per_row) {
            ampi_load_f32(line, s->bias, s->bias_dtype, s->bias_offset + block->i0 + i, 1);
            for (l = 1; l < 16; l++) line[l] = line[0];
        }
        ampi_gemm_store_row(s, block->i0 + i, j, n, t, add);
    }
}

#if AMPI_PAIRS
/* The smallest exponent field in runs [r0, r0 + rn) x k [k0, k0 + kc) of a matrix of BF16. */
AMPI_FN unsigned ampi_operand_exponent(const ampi_operand* v, size_t r0, size_t rn, size_t k0, size_t kc) {
    size_t run = v->along_k ? r0 : k0, at = v->along_k ? k0 : r0, runs = v->along_k ? rn : kc;
    runs = ampi_min_size(runs, v->runs - run);
    return ampi_least_exponent((const uint16_t*)v->data + v->offset + run * v->ld + at, v->ld, runs,
                               ampi_min_size(v->along_k ? kc : rn, v->length - at));
}
/* Can nothing in a block be subnormal, neither an operand nor a sum? Numbers with exponent field e are multiples
   of 2^(e - 134), so products are of 2^(e + f - 268). */
AMPI_FN int ampi_block_is_normal(const ampi_product* s, const ampi_block* b) {
    unsigned e = ampi_operand_exponent(&s->a, b->i0, b->mc, b->k0, b->kc);
    unsigned f = ampi_operand_exponent(&s->b, b->j0, b->nc, b->k0, b->kc);
    return e >= 1 && f >= 1 && e + f >= 142;
}
#else
AMPI_FN int ampi_block_is_normal(const ampi_product* s, const ampi_block* b) { (void)s; (void)b; return 1; }
#endif

/* A tile's block from k0 in a slot's scratch memory. */
AMPI_FN void ampi_block_open(ampi_block* b, const ampi_gemm_isa* g, const ampi_product* s, const ampi_gemm_plan* p,
                             size_t tile, size_t k0, float* scratch, ampi_stage* stage) {
    stage->data = scratch + p->at_stage;
    stage->room = p->floats - p->at_stage;
    b->a = scratch; b->b = scratch + p->at_b; b->t = scratch + p->at_t; b->line = scratch + p->at_line;
    b->ldt = p->ldt; b->few = p->few; b->stage = stage;
    b->i0 = tile % p->tiles_m * p->mc; b->mc = ampi_min_size(p->mc, s->m - b->i0);
    b->j0 = tile / p->tiles_m * p->nc; b->nc = ampi_min_size(p->nc, s->n - b->j0);
    b->k0 = k0; b->kc = ampi_min_size(p->kc, s->k - k0);
    b->first = k0 == 0;
    b->last = k0 + b->kc == s->k;
    b->panels = ampi_div_up(b->mc, g->mr);
    b->rows = b->mc / b->panels;
    b->more = b->mc % b->panels;
    b->direct = b->last && ampi_is_direct(s);
    b->finish = b->last && g->finish && s->part >= s->n && !b->direct && s->k > 0;
    b->packed = ampi_b_in_place(g, s, b);
    b->whole = !b->few || s->b.image;
}

/* One tile of C: pack, multiply, add up along k; then finish and store. */
AMPI_FN void ampi_gemm_tile(const ampi_gemm_isa* g, const ampi_product* s, const ampi_gemm_plan* p,
                            size_t tile, float* scratch) {
    const ampi_gemm_isa plain = ampi_gemm_isa_now();
    size_t i, k0;
    ampi_block b;
    ampi_stage stage;
    for (k0 = 0; k0 < s->k; k0 += p->kc) {
        ampi_block_open(&b, g, s, p, tile, k0, scratch, &stage);
        if (g->words && s->swap && !s->normal && !ampi_block_is_normal(s, &b)) g = &plain;       /* from here on */
        if (b.whole && b.packed < b.nc) ampi_pack_b_any(g, s, &b, b.j0 + b.packed, b.nc - b.packed);
        ampi_gemm_block(g, s, &b);
    }
    if (s->k == 0) {                                          /* C = beta*C: adding -0 changes no value */
        ampi_block_open(&b, g, s, p, tile, 0, scratch, &stage);
        for (i = 0; i < b.mc * p->ldt; i++) b.t[i] = s->beta != 0.0f ? -0.0f : 0.0f;
    }
    if (!b.direct && !b.finish) ampi_gemm_store(s, &b);
}

/* Do threads that work on the same columns of C pack their blocks of B together? A matrix comes from memory about as
   fast as from another thread's cache; an image takes longer to unfold, so that it gains from three threads on. */
AMPI_FN int ampi_gemm_shares(const ampi_product* s, const ampi_gemm_plan* p) {
    return s->b.image && !ampi_is_planes(s->b.image) && p->tiles_m > 2 && p->slots % p->tiles_m == 0;
}
/* One slot's part of the block of B from k0, into the memory of the first or the second slot on these columns in turn;
   and its tile's sums of the block before, which all have packed. */
AMPI_FN void ampi_gemm_share(const ampi_gemm_isa* g, const ampi_product* s, const ampi_gemm_plan* p, size_t tile,
                             size_t k0, size_t slot, float* memory) {
    size_t nr = 2 * g->lanes, part = slot % p->tiles_m, turn = k0 / p->kc, panels, low, end;
    float *own = memory + slot * p->floats, *shared = memory + (slot - part) * p->floats + p->at_b;
    ampi_block b;
    ampi_stage stage;
    if (k0 < s->k) {
        ampi_block_open(&b, g, s, p, tile, k0, own, &stage);
        panels = ampi_div_up(b.nc, nr);
        low = part * panels / p->tiles_m;
        end = (part + 1) * panels / p->tiles_m;
        b.b = shared + turn % 2 * p->floats + low * ampi_panel_stride(g, b.kc);
        if (low < end) ampi_pack_b_any(g, s, &b, b.j0 + low * nr, ampi_min_size(end * nr, b.nc) - low * nr);
    }
    if (turn == 0) return;
    ampi_block_open(&b, g, s, p, tile, k0 - p->kc, own, &stage);
    b.b = shared + (turn - 1) % 2 * p->floats;
    ampi_gemm_block(g, s, &b);
    if (b.last && !b.direct && !b.finish) ampi_gemm_store(s, &b);
}
/* All slots side by side, a block of B after the other. */
AMPI_FN void ampi_gemm_together(const ampi_gemm_isa* g, const ampi_product* s, const ampi_gemm_plan* p, float* memory) {
    size_t first, k0, tiles = p->tiles_m * p->tiles_n;
    for (first = 0; first < tiles; first += p->slots)
        for (k0 = 0; k0 < s->k + p->kc; k0 += p->kc) {
            int64_t slot, slots = (int64_t)ampi_min_size(p->slots, tiles - first);
            AMPI_PARALLEL_FOR(1)
            for (slot = 0; slot < slots; slot++)
                ampi_gemm_share(g, s, p, first + (size_t)slot, k0, (size_t)slot, memory);
        }
}

AMPI_FN float* ampi_align64(void* p) { return (float*)(void*)(((uintptr_t)p + 63u) & ~(uintptr_t)63u); }
/* Floats that an exec's workspace has room for, once it is aligned. */
AMPI_FN size_t ampi_room(const amp_exec* exec) {
    size_t bytes = exec && exec->workspace ? exec->workspace_size : 0;
    return bytes > 64 ? (bytes - 64) / sizeof(float) : 0;
}

/* One slot's share of the tiles. */
AMPI_FN void ampi_gemm_slot(const ampi_gemm_isa* g, const ampi_product* s, const ampi_gemm_plan* p, size_t slot,
                            float* memory) {
    size_t tile;
    for (tile = slot; tile < p->tiles_m * p->tiles_n; tile += p->slots) ampi_gemm_tile(g, s, p, tile, memory);
}
/* The same in small blocks on the stack. */
AMPI_FN void ampi_gemm_on_stack(const ampi_gemm_isa* g, const ampi_product* s, const ampi_gemm_plan* p,
                                size_t slot) {
    float memory[AMPI_GEMM_STACK + 16];
    ampi_gemm_slot(g, s, p, slot, ampi_align64(memory));
}

#if AMPI_AMX
/* --- products on a matrix unit ------------------------------------------------------------ */

/* C is cut into tiles of mc x nc elements, one thread's work each. k runs in blocks of kc: B's block is packed as
   words, for the second-level cache; then comes one panel of 32 rows of A after the other, `some` of k at a time,
   for the first-level cache, copied or where it lies. The sums wait in T, the last ones become C. */
typedef struct ampi_amx_plan {
    size_t mc, nc, kc, some, tiles_m, tiles_n, slots;
    size_t at_b, at_t, ldt, at_line, floats;      /* of a slot; A lies at 0, 32 x 32 sums at the end */
} ampi_amx_plan;

/* Words of a run of B, of A, of a block of B; rows whose sums wait; words of a run in small blocks. */
enum { AMPI_AMX_RUN = 1024, AMPI_AMX_SOME = 256, AMPI_AMX_BLOCK = 262144, AMPI_AMX_MC = 1024,
       AMPI_AMX_SMALL = 64 };

/* About the time of the busiest thread for one k: packing a column of B is worth 64 multiplications, copying a row of A
   24. */
AMPI_FN size_t ampi_amx_cost(size_t m, size_t n, size_t tiles_m, size_t tiles_n, size_t threads) {
    size_t mc = ampi_round_up(ampi_div_up(m, tiles_m), 32), nc = ampi_round_up(ampi_div_up(n, tiles_n), 32);
    return ampi_div_up(tiles_m * tiles_n, threads) * (mc * nc + 24 * mc + 64 * nc);
}
AMPI_FN ampi_amx_plan ampi_amx_plan_of(const ampi_gemm_isa* g, size_t m, size_t n, size_t k, int small) {
    ampi_amx_plan p;
    size_t threads = (double)m * (double)n * (double)k < 1e6 ? 1 : ampi_threads(), i, j;
    size_t run, wide, least_m, least_n, line;
    memset(&p, 0, sizeof p);
    run = 2 * (size_t)(small ? AMPI_AMX_SMALL : AMPI_AMX_RUN) / g->words;
    p.kc = ampi_round_up(ampi_div_up(k, ampi_div_up(k, run)), 32);
    p.some = ampi_round_up(ampi_div_up(p.kc, ampi_div_up(p.kc, small ? run : run * AMPI_AMX_SOME / AMPI_AMX_RUN)), 32);
    wide = small ? 32 : ampi_max_size(AMPI_AMX_BLOCK / ampi_words(g, p.kc) / 32 * 32, 64);
    least_m = small ? ampi_div_up(m, 32) : p.kc < k ? ampi_div_up(m, AMPI_AMX_MC) : 1;
    least_n = ampi_div_up(n, ampi_min_size(wide, 512));
    p.tiles_m = least_m; p.tiles_n = least_n;
    for (i = least_m; i <= ampi_min_size(least_m + threads - 1, ampi_div_up(m, 32)); i++)
        for (j = least_n; j <= ampi_min_size(least_n + threads - 1, ampi_div_up(n, 32)); j++)
            if (ampi_amx_cost(m, n, i, j, threads) < ampi_amx_cost(m, n, p.tiles_m, p.tiles_n, threads)) {
                p.tiles_m = i; p.tiles_n = j;
            }
    p.mc = ampi_round_up(ampi_div_up(m, p.tiles_m), 32);
    p.nc = ampi_round_up(ampi_div_up(n, p.tiles_n), 32);
    p.tiles_m = ampi_div_up(m, p.mc);
    p.tiles_n = ampi_div_up(n, p.nc);
    p.slots = ampi_min_size(threads, p.tiles_m * p.tiles_n);
    p.ldt = p.nc + AMPI_GEMM_GAP;
    p.at_b = 32 * ampi_row_stride(g, p.some);
    p.at_t = p.at_b + p.nc / 32 * ampi_panel_stride(g, p.kc);
    p.at_line = p.at_t + (p.kc < k ? p.mc : 32) * p.ldt;
    line = ampi_max_size(32 * ampi_words(g, p.some), 16 * (ampi_words(g, p.kc) + AMPI_GEMM_GAP));
    p.floats = p.at_line + line + 32 * 32;
    return p;
}

/* May the unit read `rows` rows of A where they are, kc of k? Where pairs of BF16 neighbours are words, rows and
   words fill whole tiles, and rows do not fall on the same cache sets. */
AMPI_FN int ampi_amx_in_place(const ampi_gemm_isa* g, const ampi_product* s, size_t rows, size_t kc) {
    uintptr_t first = (uintptr_t)((const uint16_t*)s->a.data + s->a.offset);
    return g->words == AMPI_WORDS_BF16 && s->a.along_k && rows % 16 == 0 && kc % 32 == 0 && first % 64 == 0
           && s->a.ld % 32 == 0 && s->a.ld % 1024 != 0;
}
/* Sums of 32 rows from row i (in the tile: `low`) and all columns of a tile, k [k0 + k, k0 + k + kc). */
AMPI_FN void ampi_amx_panel(const ampi_gemm_isa* g, const ampi_product* s, const ampi_amx_plan* p, size_t i, size_t low,
                            size_t rows, size_t j0, size_t nc, size_t k0, size_t k, size_t kc, float* memory) {
    const size_t depth = ampi_panel_stride(g, ampi_min_size(p->kc, s->k - k0)), size = amp_dtype_size(s->c_dtype);
    const int last = k0 + k + kc >= s->k, in_place = ampi_amx_in_place(g, s, rows, kc);
    float *out = memory + p->floats - 32 * 32, *t = memory + p->at_t + (p->kc < s->k ? low : 0) * p->ldt;
    uint32_t at[AMPI_AMX_SOME / (int)AMPI_WORDS];
    size_t j, l;
    ampi_amx_sum u;
    u.rs = ampi_row_stride(g, p->some) * sizeof(float);
    u.a = (const char*)memory;
    if (in_place) {
        u.rs = s->a.ld * 2;
        u.a = (const char*)s->a.data + (s->a.offset + i * s->a.ld + k0 + k) * 2;
    } else ampi_pack_a_words(g, s, i, rows, k0 + k, kc, memory, u.rs / sizeof(float), memory + p->at_line);
    u.a_next = AMPI_AMX_ROWS * u.rs; u.a_skip = 0; u.step = 64;
    u.b_next = 64; u.b_block = 0;
    u.passing = 2;
    u.at = at; u.taps = ampi_words(g, kc) / AMPI_WORDS; u.blocks = 1;
    u.ldo = p->ldt; u.old_right = u.right = 16; u.old_down = 16 * u.ldo;
    for (j = 0; j < nc; j += 32) {
        const size_t columns = ampi_min_size(nc - j, 32), width = columns > 16 ? 32 : 16;
        char* c = (char*)s->c + (s->c_offset + i * s->ldc + j0 + j) * size;
        const int direct = last && ampi_is_direct(s) && rows % 16 == 0 && columns % 16 == 0;
        u.bs = width * sizeof(float);
        for (l = 0; (j == 0 || width < 32) && l < u.taps; l++) at[l] = (uint32_t)(l * AMPI_WORDS * u.bs);
        u.b = (const char*)(memory + p->at_b + j / 32 * depth + ampi_words(g, k) * width);
        u.old = k0 + k > 0 ? t + j : NULL;
        u.t = direct ? (float*)(void*)c : last ? out : t + j;
        u.ldt = direct ? s->ldc : last ? 32 : p->ldt;
        u.down = 16 * u.ldt;
        for (l = 0; last && l < rows; l++) AMPI_FETCH(c + l * s->ldc * size, 0);
        ampi_amx_run(&u, rows > 16, columns > 16);
        if (last && !direct) ampi_gemm_finish_panel(g, s, i, j0 + j, rows, columns, out, 32);
    }
}
AMPI_FN void ampi_amx_tile(const ampi_gemm_isa* g, const ampi_product* s, const ampi_amx_plan* p, size_t tile,
                           float* memory) {
    const size_t i0 = tile % p->tiles_m * p->mc, mc = ampi_min_size(p->mc, s->m - i0);
    const size_t j0 = tile / p->tiles_m * p->nc, nc = ampi_min_size(p->nc, s->n - j0);
    size_t k0, k, i;
    for (k0 = 0; k0 < s->k; k0 += p->kc) {
        const size_t kc = ampi_min_size(p->kc, s->k - k0);
        ampi_pack_b_words(g, s, j0, nc, k0, kc, memory + p->at_b, memory + p->at_line);
        for (i = 0; i < mc; i += 32)
            for (k = 0; k < kc; k += p->some)
                ampi_amx_panel(g, s, p, i0 + i, i, ampi_min_size(mc - i, 32), j0, nc, k0, k,
                               ampi_min_size(p->some, kc - k), memory);
    }
}
/* One slot's share of the tiles. */
AMPI_FN void ampi_amx_slot(const ampi_gemm_isa* g, const ampi_product* s, const ampi_amx_plan* p, size_t slot,
                           float* memory) {
    size_t tile;
    ampi_amx_open();
    for (tile = slot; tile < p->tiles_m * p->tiles_n; tile += p->slots) ampi_amx_tile(g, s, p, tile, memory);
    ampi_amx_close();
}
/* The same in small blocks on the stack. */
AMPI_FN void ampi_amx_on_stack(const ampi_gemm_isa* g, const ampi_product* s, const ampi_amx_plan* p, size_t slot) {
    float memory[AMPI_GEMM_STACK + 16];
    ampi_amx_slot(g, s, p, slot, ampi_align64(memory));
}

/* Computes a checked product, if the unit is asked for and it gains. */
AMPI_FN int ampi_amx_product_run(const ampi_product* s, const amp_exec* exec) {
    const size_t room = ampi_room(exec), least = s->a.dtype == AMP_F16 ? 32 : 16;
    ampi_gemm_isa g;
    ampi_amx_plan p;
    int64_t slot;
    if (!exec || exec->sums != AMP_SUMS_FAST || s->a.dtype == AMP_F32 || s->a.dtype != s->b.dtype || s->a.image
        || s->b.image || s->m < least || s->n < least || s->k < 32 || !ampi_amx(1)) return 0;
    g = ampi_gemm_isa_amx(s->a.dtype);
    p = ampi_amx_plan_of(&g, s->m, s->n, s->k, 0);
    if (room >= p.floats) {
        float* memory = ampi_align64(exec->workspace);
        p.slots = ampi_min_size(p.slots, room / p.floats);
        AMPI_PARALLEL_FOR(p.slots > 1)
        for (slot = 0; slot < (int64_t)p.slots; slot++)
            ampi_amx_slot(&g, s, &p, (size_t)slot, memory + (size_t)slot * p.floats);
    } else {
        p = ampi_amx_plan_of(&g, s->m, s->n, s->k, 1);
        AMPI_PARALLEL_FOR(p.slots > 1)
        for (slot = 0; slot < (int64_t)p.slots; slot++) ampi_amx_on_stack(&g, s, &p, (size_t)slot);
    }
    return 1;
}
AMPI_FN size_t ampi_amx_workspace(size_t m, size_t n, size_t k) {
    size_t floats = 0;
    int t;
    for (t = AMP_F16; t <= AMP_BF16 && ampi_amx(0) && m > 0 && n > 0 && k > 0; t++) {
        const ampi_gemm_isa g = ampi_gemm_isa_amx((amp_dtype)t);
        const ampi_amx_plan p = ampi_amx_plan_of(&g, m, n, k, 0);
        floats = ampi_max_size(floats, p.slots * p.floats);
    }
    return floats * sizeof(float);
}
#else
AMPI_FN size_t ampi_amx_workspace(size_t m, size_t n, size_t k) { (void)m; (void)n; (void)k; return 0; }
AMPI_FN int ampi_amx_product_run(const ampi_product* s, const amp_exec* exec) { (void)s; (void)exec; return 0; }
#endif

/* The kernels for a product: those for pairs if they keep the bits. */
AMPI_FN ampi_gemm_isa ampi_gemm_isa_for(const ampi_product* s) {
    if (s->a.dtype == AMP_BF16 && s->b.dtype == AMP_BF16 && (s->normal || (!s->a.image && !s->b.image)))
        return ampi_gemm_isa_pairs();
    return ampi_gemm_isa_now();
}
/* Tiles of full size; k that is not much deeper than a block is one. Low ones of a deep block are half as wide: packing
   B is much of their work then, and faster where the whole block stays in the second-level cache; but not where rows of
   B are so long that short runs of them cost more (measured: n = 4096 gains, 6272 in 16 bits loses). */
AMPI_FN ampi_gemm_plan ampi_gemm_plan_full(const ampi_gemm_isa* g, size_t m, size_t n, size_t k) {
    const int narrow = m <= AMPI_GEMM_NC / 2 && n <= 8 * AMPI_GEMM_NC && k <= 2 * AMPI_GEMM_KC;
    const size_t nc = narrow ? AMPI_GEMM_NC / 2 : AMPI_GEMM_NC;
    const size_t kc = g->lanes == 16 && k <= AMPI_GEMM_KC_ONE ? AMPI_GEMM_KC_ONE : AMPI_GEMM_KC;
    return ampi_gemm_plan_of(g, m, n, k, AMPI_GEMM_MC, nc, kc);
}

/* Computes a checked product, in the workspace if it holds at least one slot. */
AMPI_FN void ampi_gemm_run(ampi_product* s, const amp_exec* exec) {
    ampi_gemm_isa g = ampi_gemm_isa_for(s);
    size_t room = ampi_room(exec);
    ampi_gemm_plan p;
    int64_t slot;
    if (s->m == 0 || s->n == 0 || ampi_amx_product_run(s, exec)) return;
    s->swap = s->a.dtype == AMP_BF16 && s->b.dtype == AMP_BF16;
    s->exact = s->a.dtype == AMP_F16 && s->b.dtype == AMP_F16;
    if (s->swap) s->k += s->k & 1u;
    p = ampi_gemm_plan_full(&g, s->m, s->n, s->k);
    if (room >= p.floats) {
        float* memory = ampi_align64(exec->workspace);
        p.slots = ampi_min_size(p.slots, room / p.floats);
        if (ampi_gemm_shares(s, &p)) { ampi_gemm_together(&g, s, &p, memory); return; }
        AMPI_PARALLEL_FOR(p.slots > 1)
        for (slot = 0; slot < (int64_t)p.slots; slot++)
            ampi_gemm_slot(&g, s, &p, (size_t)slot, memory + (size_t)slot * p.floats);
    } else {
        p = g.words ? ampi_gemm_plan_of(&g, s->m, s->n, s->k, 32, 32, 32)
                    : ampi_gemm_plan_of(&g, s->m, s->n, s->k, 28, 64, 64);
        p.floats = AMPI_GEMM_STACK;               /* what is left is the stage */
        AMPI_PARALLEL_FOR(p.slots > 1)
        for (slot = 0; slot < (int64_t)p.slots; slot++) ampi_gemm_on_stack(&g, s, &p, (size_t)slot);
    }
}

/* --- amp_gemm ---------------------------------------------------------------------------- */

/* A stored matrix: its type, its leading dimension, its pointer, and that its bytes can be counted. */
AMPI_FN amp_result ampi_check_matrix(const amp_logger* logger, const char* call, const char* name,
                                     const void* data, amp_dtype dtype, size_t rows, size_t cols, size_t ld) {
    size_t elements;
    if (!ampi_is_compute_dtype(dtype))
        return ampi_fail(logger, AMP_ERR_DTYPE, "%s: %s has type %s (%d); it must be f32, f16 or bf16", call,
                         name, amp_dtype_name(dtype), (int)dtype);
    if (rows == 0 || cols == 0) return AMP_OK;
    if (ld < cols)
        return ampi_fail(logger, AMP_ERR_ARGUMENT, "%s: ld%s is %lu, but a row of %s has %lu elements", call,
                         name, (unsigned long)ld, name, (unsigned long)cols);
    if (!ampi_mul_size(rows, ld, &elements) || elements > SIZE_MAX / 8)
        return ampi_fail(logger, AMP_ERR_ARGUMENT, "%s: %s is too large: %lu rows of %lu elements", call,
                         name, (unsigned long)rows, (unsigned long)ld);
    if (!data)
        return ampi_fail(logger, AMP_ERR_ARGUMENT, "%s: %s is NULL, but it has %lu x %lu elements", call,
                         name, (unsigned long)rows, (unsigned long)cols);
    return AMP_OK;
}

/* A stored matrix of `runs` rows of `length` elements as an operand. */
AMPI_FN ampi_operand ampi_matrix(const void* data, amp_dtype dtype, size_t runs, size_t length, size_t ld,
                                 int along_k) {
    ampi_operand v;
    memset(&v, 0, sizeof v);
    v.data = data; v.dtype = ampi_dtype(dtype);
    v.runs = runs; v.length = length; v.ld = ld;
    v.along_k = along_k;
    return v;
}

/* A product into a plain matrix C; the operands are still to be set. */
AMPI_FN void ampi_product_init(ampi_product* s, size_t m, size_t n, size_t k, void* c, amp_dtype c_dtype,
                               size_t ldc) {
    memset(s, 0, sizeof *s);
    s->m = m; s->n = n; s->k = k;
    s->alpha = 1.0f;
    s->c = c; s->c_dtype = ampi_dtype(c_dtype);
    s->ldc = ldc;
    s->part = n ? n : 1;
}

AMP_DEF size_t amp_gemm_workspace(size_t m, size_t n, size_t k) {
    ampi_gemm_isa g;
    ampi_gemm_plan p;
    size_t elements, floats;
    if (!ampi_mul_size(m, n, &elements) || !ampi_mul_size(m, k, &elements) || !ampi_mul_size(n, k, &elements)
        || m > SIZE_MAX / 8 || n > SIZE_MAX / 8 || k > SIZE_MAX / 8) return 0;
    g = ampi_gemm_isa_now();
    p = ampi_gemm_plan_full(&g, m, n, k + (k & 1u));
    floats = ampi_max_size(p.slots, 1) * p.floats;
    return ampi_max_size(floats * sizeof(float), ampi_amx_workspace(m, n, k)) + 128;
}

/* The arguments of a matrix product, checked, as a product. */
AMPI_FN amp_result ampi_gemm_product(ampi_product* s, const amp_logger* logger, const char* call,
                                     amp_transpose trans_a, amp_transpose trans_b, size_t m, size_t n,
                                     size_t k, float alpha, const void* a, amp_dtype a_dtype, size_t lda,
                                     const void* b, amp_dtype b_dtype, size_t ldb, float beta, void* c,
                                     amp_dtype c_dtype, size_t ldc) {
    int ta = trans_a == AMP_TRANS, tb = trans_b == AMP_TRANS;
    amp_result r;
    if ((!ta && trans_a != AMP_NO_TRANS) || (!tb && trans_b != AMP_NO_TRANS))
        return ampi_fail(logger, AMP_ERR_ARGUMENT, "%s: trans_a is %d, trans_b is %d; they must be 0 or 1", call,
                         (int)trans_a, (int)trans_b);
    r = ampi_check_matrix(logger, call, "a", a, a_dtype, ta ? k : m, ta ? m : k, lda);
    if (r == AMP_OK) r = ampi_check_matrix(logger, call, "b", b, b_dtype, tb ? n : k, tb ? k : n, ldb);
    if (r == AMP_OK) r = ampi_check_matrix(logger, call, "c", c, c_dtype, m, n, ldc);
    if (r != AMP_OK) return r;
    ampi_product_init(s, m, n, alpha == 0.0f ? 0 : k, c, c_dtype, ldc);
    s->alpha = s->k == 0 ? 1.0f : alpha;
    s->beta = beta;
    s->a = ampi_matrix(a, a_dtype, ta ? k : m, ta ? m : k, lda, !ta);
    s->b = ampi_matrix(b, b_dtype, tb ? n : k, tb ? k : n, ldb, tb);
    return AMP_OK;
}

AMP_DEF amp_result amp_gemm(amp_transpose trans_a, amp_transpose trans_b, size_t m, size_t n, size_t k,
                            float alpha, const void* a, amp_dtype a_dtype, size_t lda, const void* b,
                            amp_dtype b_dtype, size_t ldb, float beta, void* c, amp_dtype c_dtype, size_t ldc,
                            const amp_exec* exec) {
    ampi_product s;
    amp_result r = ampi_gemm_product(&s, ampi_exec_logger(exec), "amp_gemm", trans_a, trans_b, m, n, k, alpha, a,
                                     a_dtype, lda, b, b_dtype, ldb, beta, c, c_dtype, ldc);
    if (r == AMP_OK) ampi_gemm_run(&s, exec);
    return r;
}

/* --- sums over a batch (gradients of biases) --------------------------------------------- */

/* sum[i] += x[i], n a multiple of 16. */
AMPI_INLINE void ampi_add_to_body(int hw, float* AMPI_RESTRICT sum, const float* AMPI_RESTRICT x, size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; i < n; i += 16)
        for (l = 0; l < 16; l++) sum[i + l] += x[i + l];
}
AMPI_KERNEL(ampi_add_to, (float* sum, const float* x, size_t n), sum, x, n)

/* dst[offset..] = sum, or dst + sum, n <= 256. */
AMPI_FN void ampi_store_sum(void* dst, amp_dtype t, size_t offset, float* sum, size_t n, int accumulate) {
    float old[256];
    if (accumulate) ampi_load_f32(old, dst, t, offset, n);
    ampi_gemm_finish(sum, sum, accumulate ? old : NULL, 1, n, 1.0f, 1.0f);
    ampi_store_f32(dst, t, offset, sum, n);
}

/* db[o] = sum over n of dy[n][o], n ascending, 256 columns at a time. */
AMPI_FN void ampi_linear_bias_grad(const void* dy, amp_dtype dy_dtype, void* db, amp_dtype db_dtype,
                                   int accumulate, size_t n, size_t out) {
    int64_t chunk, chunks = (int64_t)((out + 255) / 256);
    AMPI_PARALLEL_FOR(chunks > 1 && n > 64)
    for (chunk = 0; chunk < chunks; chunk++) {
        float sum[256], row[256];
        size_t o = (size_t)chunk * 256, width = ampi_min_size(out - o, 256), i;
        memset(sum, 0, sizeof sum);
        memset(row, 0, sizeof row);
        for (i = 0; i < n; i++) {
            ampi_load_f32(row, dy, dy_dtype, i * out + o, width);
            ampi_add_to(sum, row, ampi_round_up(width, 16));
        }
        ampi_store_sum(db, db_dtype, o, sum, width, accumulate);
    }
}

/* --- dense layer ------------------------------------------------------------------------- */

/* A vector or packed tensor: its type, and its pointer unless it is empty. */
AMPI_FN amp_result ampi_check_tensor(const amp_logger* logger, const char* call, const char* name,
                                     const void* data, amp_dtype dtype, size_t count) {
    return ampi_check_matrix(logger, call, name, data, dtype, 1, count, count);
}

/* The products of a dense layer. y[n,o] = sum over i of x[n,i] * w[o,i], + b[o]; its operands are checked. */
AMPI_FN amp_result ampi_linear_y(ampi_product* s, const amp_logger* logger, const void* x, amp_dtype x_dtype,
                                 const void* w, amp_dtype w_dtype, const void* b, amp_dtype b_dtype, void* y,
                                 amp_dtype y_dtype, size_t n, size_t in, size_t out) {
    amp_result r = ampi_check_matrix(logger, "linear", "x", x, x_dtype, n, in, in);
    if (r == AMP_OK) r = ampi_check_matrix(logger, "linear", "w", w, w_dtype, out, in, in);
    if (r == AMP_OK && b) r = ampi_check_tensor(logger, "linear", "b", b, b_dtype, out);
    if (r == AMP_OK) r = ampi_check_matrix(logger, "linear", "y", y, y_dtype, n, out, out);
    if (r != AMP_OK) return r;
    ampi_product_init(s, n, out, in, y, y_dtype, out);
    s->bias = b; s->bias_dtype = ampi_dtype(b_dtype);
    s->a = ampi_matrix(x, x_dtype, n, in, in, 1);
    s->b = ampi_matrix(w, w_dtype, out, in, in, 1);
    return AMP_OK;
}
/* dx[n,i] = sum over o of dy[n,o] * w[o,i]. */
AMPI_FN void ampi_linear_dx(ampi_product* s, const void* dy, amp_dtype dy_dtype, const void* w,
                            amp_dtype w_dtype, void* dx, amp_dtype dx_dtype, size_t n, size_t in, size_t out) {
    ampi_product_init(s, n, in, out, dx, dx_dtype, in);
    s->a = ampi_matrix(dy, dy_dtype, n, out, out, 1);
    s->b = ampi_matrix(w, w_dtype, out, in, in, 0);
}
/* dw[o,i] = sum over n of dy[n,o] * x[n,i]. */
AMPI_FN void ampi_linear_dw(ampi_product* s, const void* dy, amp_dtype dy_dtype, const void* x,
                            amp_dtype x_dtype, void* dw, amp_dtype dw_dtype, int accumulate, size_t n,
                            size_t in, size_t out) {
    ampi_product_init(s, out, in, n, dw, dw_dtype, in);
    s->beta = accumulate ? 1.0f : 0.0f;
    s->a = ampi_matrix(dy, dy_dtype, n, out, out, 0);
    s->b = ampi_matrix(x, x_dtype, n, in, in, 0);
}
AMPI_FN amp_result ampi_check_linear_backward(const amp_logger* logger, const void* dy, amp_dtype dy_dtype,
                                              const void* x, amp_dtype x_dtype, const void* w,
                                              amp_dtype w_dtype, void* dx, amp_dtype dx_dtype, void* dw,
                                              amp_dtype dw_dtype, void* db, amp_dtype db_dtype, size_t n,
                                              size_t in, size_t out) {
    const char* call = "linear backward";
    amp_result r = ampi_check_matrix(logger, call, "dy", dy, dy_dtype, n, out, out);
    if (r == AMP_OK && dw) r = ampi_check_matrix(logger, call, "x", x, x_dtype, n, in, in);
    if (r == AMP_OK && dw) r = ampi_check_matrix(logger, call, "dw", dw, dw_dtype, out, in, in);
    if (r == AMP_OK && dx) r = ampi_check_matrix(logger, call, "w", w, w_dtype, out, in, in);
    if (r == AMP_OK && dx) r = ampi_check_matrix(logger, call, "dx", dx, dx_dtype, n, in, in);
    if (r == AMP_OK && db) r = ampi_check_tensor(logger, call, "db", db, db_dtype, out);
    return r;
}

AMP_DEF amp_result amp_linear_forward(const void* x, amp_dtype x_dtype, const void* w, amp_dtype w_dtype,
                                      const void* b, amp_dtype b_dtype, void* y, amp_dtype y_dtype, size_t n,
                                      size_t in, size_t out, const amp_exec* exec) {
    ampi_product s;
    amp_result r = ampi_linear_y(&s, ampi_exec_logger(exec), x, x_dtype, w, w_dtype, b, b_dtype, y, y_dtype, n,
                                 in, out);
    if (r == AMP_OK) ampi_gemm_run(&s, exec);
    return r;
}

AMP_DEF amp_result amp_linear_backward(const void* dy, amp_dtype dy_dtype, const void* x, amp_dtype x_dtype,
                                       const void* w, amp_dtype w_dtype, void* dx, amp_dtype dx_dtype,
                                       void* dw, amp_dtype dw_dtype, void* db, amp_dtype db_dtype,
                                       int accumulate, size_t n, size_t in, size_t out,
                                       const amp_exec* exec) {
    ampi_product s;
    amp_result r = ampi_check_linear_backward(ampi_exec_logger(exec), dy, dy_dtype, x, x_dtype, w, w_dtype, dx,
                                              dx_dtype, dw, dw_dtype, db, db_dtype, n, in, out);
    if (r != AMP_OK) return r;
    if (dx) {
        ampi_linear_dx(&s, dy, dy_dtype, w, w_dtype, dx, dx_dtype, n, in, out);
        ampi_gemm_run(&s, exec);
    }
    if (dw) {
        ampi_linear_dw(&s, dy, dy_dtype, x, x_dtype, dw, dw_dtype, accumulate, n, in, out);
        ampi_gemm_run(&s, exec);
    }
    if (db) ampi_linear_bias_grad(dy, dy_dtype, db, db_dtype, accumulate, n, out);
    return AMP_OK;
}

/* --- convolution ------------------------------------------------------------------------- */

/* A checked shape with its defaults filled in, and the sizes that follow from it. */
typedef struct ampi_conv2d {
    amp_conv2d_shape s;
    int out_h, out_w;
    size_t cg, og, taps;               /* channels and outputs of one group, kernel_h * kernel_w */
    size_t in_pixels, out_pixels;      /* of one plane */
    size_t x_count, w_count, y_count;
} ampi_conv2d;

/* Fields that must be at least `least`. */
AMPI_FN amp_result ampi_conv2d_fields(const amp_conv2d_shape* s, const amp_logger* logger) {
    const char* const names[] = { "n", "channels", "height", "width", "out_channels", "kernel_h", "kernel_w",
                                  "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w",
                                  "groups" };
    int values[14], i;
    values[0] = s->n; values[1] = s->channels; values[2] = s->height; values[3] = s->width;
    values[4] = s->out_channels; values[5] = s->kernel_h; values[6] = s->kernel_w;
    values[7] = s->stride_h; values[8] = s->stride_w; values[9] = s->pad_h; values[10] = s->pad_w;
    values[11] = s->dilation_h; values[12] = s->dilation_w; values[13] = s->groups;
    for (i = 0; i < 14; i++)
        if (values[i] < (i < 7 ? 1 : 0))
            return ampi_fail(logger, AMP_ERR_DESC, "conv2d: %s is %d, it must be at least %d", names[i],
                             values[i], i < 7 ? 1 : 0);
    return AMP_OK;
}

/* One side: out = (size + 2*pad - dilation*(kernel-1) - 1) / stride + 1; 0 if the kernel is too large, -1
   if the result is no int. */
AMPI_FN int ampi_conv2d_side(int size, int pad, int kernel, int dilation, int stride) {
    int64_t room = (int64_t)size + 2 * (int64_t)pad - (int64_t)dilation * (kernel - 1) - 1;
    if (room < 0) return 0;
    return room / stride >= 0x7fffffff ? -1 : (int)(room / stride) + 1;
}

/* a*b*c*d elements of at most 8 bytes, or 0 if that is too many. */
AMPI_FN size_t ampi_count4(int a, int b, int c, int d) {
    size_t n = (size_t)a;
    if (!ampi_mul_size(n, (size_t)b, &n) || !ampi_mul_size(n, (size_t)c, &n)
        || !ampi_mul_size(n, (size_t)d, &n)) return 0;
    return n > SIZE_MAX / 8 ? 0 : n;
}

AMPI_FN amp_result ampi_conv2d_init(ampi_conv2d* c, const amp_conv2d_shape* shape, const amp_logger* logger) {
    amp_conv2d_shape* s = &c->s;
    amp_result r;
    if (!shape) return ampi_fail(logger, AMP_ERR_ARGUMENT, "conv2d: the shape is NULL");
    r = ampi_conv2d_fields(shape, logger);
    if (r != AMP_OK) return r;
    *s = *shape;
    if (s->stride_h == 0) s->stride_h = 1;
    if (s->stride_w == 0) s->stride_w = 1;
    if (s->dilation_h == 0) s->dilation_h = 1;
    if (s->dilation_w == 0) s->dilation_w = 1;
    if (s->groups == 0) s->groups = 1;
    if (s->channels % s->groups != 0 || s->out_channels % s->groups != 0)
        return ampi_fail(logger, AMP_ERR_SHAPE,
                         "conv2d: %d groups do not divide %d channels and %d out_channels", s->groups,
                         s->channels, s->out_channels);
    c->out_h = ampi_conv2d_side(s->height, s->pad_h, s->kernel_h, s->dilation_h, s->stride_h);
    c->out_w = ampi_conv2d_side(s->width, s->pad_w, s->kernel_w, s->dilation_w, s->stride_w);
    if (c->out_h == 0 || c->out_w == 0)
        return ampi_fail(logger, AMP_ERR_SHAPE,
                         "conv2d: kernel %dx%d with dilation %dx%d is larger than its %dx%d input "
                         "padded by %dx%d", s->kernel_h, s->kernel_w, s->dilation_h, s->dilation_w,
                         s->height, s->width, s->pad_h, s->pad_w);
    c->cg = (size_t)(s->channels / s->groups);
    c->og = (size_t)(s->out_channels / s->groups);
    c->x_count = ampi_count4(s->n, s->channels, s->height, s->width);
    c->w_count = ampi_count4(s->out_channels, s->channels / s->groups, s->kernel_h, s->kernel_w);
    c->y_count = c->out_h < 0 || c->out_w < 0 ? 0 : ampi_count4(s->n, s->out_channels, c->out_h, c->out_w);
    if (c->x_count == 0 || c->w_count == 0 || c->y_count == 0)
        return ampi_fail(logger, AMP_ERR_SHAPE, "conv2d: %s has more elements than memory can hold",
                         c->x_count == 0 ? "x" : c->w_count == 0 ? "w" : "y");
    c->taps = (size_t)s->kernel_h * (size_t)s->kernel_w;
    c->in_pixels = (size_t)s->height * (size_t)s->width;
    c->out_pixels = (size_t)c->out_h * (size_t)c->out_w;
    return AMP_OK;
}

AMP_DEF amp_result amp_conv2d_output(const amp_conv2d_shape* s, int* out_h, int* out_w,
                                     const amp_exec* exec) {
    ampi_conv2d c;
    amp_result r = ampi_conv2d_init(&c, s, ampi_exec_logger(exec));
    if (r != AMP_OK) return r;
    if (out_h) *out_h = c.out_h;
    if (out_w) *out_w = c.out_w;
    return AMP_OK;
}

/* Threads that a convolution is worth. */
AMPI_FN size_t ampi_conv2d_threads(const ampi_conv2d* c) {
    return (double)c->y_count * (double)c->cg * (double)c->taps < 1e6 ? 1 : ampi_threads();
}

/* --- direct convolution: the kernel ------------------------------------------------------- */

/* With few rows of weights, unfolding an image costs more than the product with it. So here it is not
   unfolded: the image lies in FP32 with zeros around it (the *stage*), and row k of the unfolded image is the
   stage seen from term k's `at`. Each sum has the terms of the product in the product's order, so the bits are the
   same:  t[i][j] = (first ? 0 : t[i][j]) + sum over r < repeat, and in it over the terms, of
                    a[i*rs + r*a_step + from] * b[r*b_step + at + j], and then bias[i] more;
   i < rows, j < lanes. With `two`, t[i][lanes + j] as well, from b[... + b_next + j]; `last` as in ampi_micro. */
typedef struct ampi_term { uint32_t at, from; } ampi_term;
typedef struct ampi_taps {
    const float* a; size_t rs, a_step;
    const float* b; size_t b_step, b_next;
    const ampi_term* terms; size_t k, repeat;
    const float* bias;                            /* NULL: none */
    float* t; size_t ldt;
    int first, last, two;
} ampi_taps;

#if AMPI_X86 || AMPI_NEON
#define AMPI_TAPS_BIAS(i, p, o, V) \
    x = AMPI_##V##_SPREAD(bias[i]);                                                                 \
    c##i##0 = AMPI_##V##_FMA(one, x, c##i##0);                                                      \
    if (two) c##i##1 = AMPI_##V##_FMA(one, x, c##i##1);
#define AMPI_TAPS(name, V, ROWS, two_)                                                              \
    AMPI_##V##_TARGET AMPI_FN void name(const ampi_taps* u) {                                       \
        const int two = two_;                                                                       \
        const size_t rs = u->rs, ldt = u->ldt, ldo = ldt, b_next = u->b_next;                       \
        const float *a = u->a, *stage = u->b, *bias = u->bias;                                      \
        const ampi_term *term, *end = u->terms + u->k;                                              \
        float* t = u->t;                                                                            \
        size_t r;                                                                                   \
        AMPI_##V##_T x, b0, b1 = AMPI_##V##_ZERO, one = AMPI_##V##_SPREAD(1.0f);                    \
        ROWS(AMPI_MICRO_ZERO, V)                                                                    \
        if (!u->first) { const float* old = t; ROWS(AMPI_MICRO_READ, V) }                           \
        for (r = u->repeat; r > 0; r--, a += u->a_step, stage += u->b_step)                         \
            for (term = u->terms; term < end; term++) {                                             \
                const float *b = stage + term->at, *p0 = a + term->from, *p3 = p0 + 3 * rs;         \
                const float *p6 = p3 + 3 * rs, *p9 = p6 + 3 * rs, *p12 = p9 + 3 * rs;               \
                b0 = AMPI_##V##_LOAD(b);                                                            \
                if (two) b1 = AMPI_##V##_LOAD(b + b_next);                                          \
                ROWS(AMPI_MICRO_STEP, V)                                                            \
                (void)p3; (void)p6; (void)(p9 == p12);                                              \
            }                                                                                       \
        if (bias) { ROWS(AMPI_TAPS_BIAS, V) }                                                       \
        if (u->last) { ROWS(AMPI_MICRO_CLEAN, V) }                                                  \
        ROWS(AMPI_MICRO_WRITE, V)                                                                   \
        (void)ldo; (void)b_next;                                                                    \
        ampi_clear_upper();                                                                         \
    }
/* One row, as many neighbouring vectors as the list has: two would wait for each other's sums. */
#define AMPI_LINE_STEP(i, p, o, V) \
    c##i##0 = AMPI_##V##_FMA(x, AMPI_##V##_LOAD(b + i * AMPI_##V##_LANES), c##i##0);
#define AMPI_LINE_BIAS(i, p, o, V) c##i##0 = AMPI_##V##_FMA(one, x, c##i##0);
#define AMPI_LINE(name, V, LIST)                                                                    \
    AMPI_##V##_TARGET AMPI_FN void name(const ampi_taps* u) {                                       \
        const int two = 0;                                                                          \
        const size_t ldt = AMPI_##V##_LANES, ldo = ldt;                                             \
        const float *a = u->a, *stage = u->b, *old = u->t;                                          \
        const ampi_term *term, *end = u->terms + u->k;                                              \
        float* t = u->t;                                                                            \
        size_t r;                                                                                   \
        AMPI_##V##_T x, one = AMPI_##V##_SPREAD(1.0f);                                              \
        LIST(AMPI_MICRO_ZERO, V)                                                                    \
        if (!u->first) { LIST(AMPI_MICRO_READ, V) }                                                 \
        for (r = u->repeat; r > 0; r--, a += u->a_step, stage += u->b_step)                         \
            for (term = u->terms; term < end; term++) {                                             \
                const float* b = stage + term->at;                                                  \
                x = AMPI_##V##_SPREAD(a[term->from]);                                               \
                LIST(AMPI_LINE_STEP, V)                                                             \
            }                                                                                       \
        if (u->bias) { x = AMPI_##V##_SPREAD(u->bias[0]); LIST(AMPI_LINE_BIAS, V) }                 \
        if (u->last) { LIST(AMPI_MICRO_CLEAN, V) }                                                  \
        LIST(AMPI_MICRO_WRITE, V)                                                                   \
        ampi_clear_upper();                                                                         \
    }
#define AMPI_TAPS_PAIR(V, R) \
    AMPI_TAPS(ampi_taps_##V##_##R##_1, V, AMPI_ROWS_##R, 0)                                         \
    AMPI_TAPS(ampi_taps_##V##_##R##_2, V, AMPI_ROWS_##R, 1)
#define AMPI_TAPS_CASE(V, R) \
    case R: if (u->two) ampi_taps_##V##_##R##_2(u); else ampi_taps_##V##_##R##_1(u); break;
#endif

#if AMPI_X86
AMPI_TAPS_PAIR(V16, 1) AMPI_TAPS_PAIR(V16, 2) AMPI_TAPS_PAIR(V16, 3) AMPI_TAPS_PAIR(V16, 4)
AMPI_TAPS_PAIR(V16, 5) AMPI_TAPS_PAIR(V16, 6) AMPI_TAPS_PAIR(V16, 7) AMPI_TAPS_PAIR(V16, 8)
AMPI_TAPS_PAIR(V16, 9) AMPI_TAPS_PAIR(V16, 10) AMPI_TAPS_PAIR(V16, 11) AMPI_TAPS_PAIR(V16, 12)
AMPI_TAPS_PAIR(V16, 13) AMPI_TAPS_PAIR(V16, 14)
AMPI_TAPS_PAIR(V8, 1) AMPI_TAPS_PAIR(V8, 2) AMPI_TAPS_PAIR(V8, 3)
AMPI_TAPS_PAIR(V8, 4) AMPI_TAPS_PAIR(V8, 5) AMPI_TAPS_PAIR(V8, 6)

AMPI_LINE(ampi_line4_avx512, V16, AMPI_ROWS_4) AMPI_LINE(ampi_line8_avx512, V16, AMPI_ROWS_8)
AMPI_LINE(ampi_line4_avx2, V8, AMPI_ROWS_4) AMPI_LINE(ampi_line8_avx2, V8, AMPI_ROWS_8)

AMPI_FN void ampi_taps_avx512(size_t rows, const ampi_taps* u) {
    switch (rows) {
        AMPI_TAPS_CASE(V16, 1) AMPI_TAPS_CASE(V16, 2) AMPI_TAPS_CASE(V16, 3) AMPI_TAPS_CASE(V16, 4)
        AMPI_TAPS_CASE(V16, 5) AMPI_TAPS_CASE(V16, 6) AMPI_TAPS_CASE(V16, 7) AMPI_TAPS_CASE(V16, 8)
        AMPI_TAPS_CASE(V16, 9) AMPI_TAPS_CASE(V16, 10) AMPI_TAPS_CASE(V16, 11) AMPI_TAPS_CASE(V16, 12)
        AMPI_TAPS_CASE(V16, 13) AMPI_TAPS_CASE(V16, 14)
        default: break;
    }
}
AMPI_FN void ampi_taps_avx2(size_t rows, const ampi_taps* u) {
    switch (rows) {
        AMPI_TAPS_CASE(V8, 1) AMPI_TAPS_CASE(V8, 2) AMPI_TAPS_CASE(V8, 3)
        AMPI_TAPS_CASE(V8, 4) AMPI_TAPS_CASE(V8, 5) AMPI_TAPS_CASE(V8, 6)
        default: break;
    }
}
#elif AMPI_NEON
AMPI_TAPS_PAIR(V4, 1) AMPI_TAPS_PAIR(V4, 2) AMPI_TAPS_PAIR(V4, 3) AMPI_TAPS_PAIR(V4, 4)
AMPI_TAPS_PAIR(V4, 5) AMPI_TAPS_PAIR(V4, 6) AMPI_TAPS_PAIR(V4, 7) AMPI_TAPS_PAIR(V4, 8)
AMPI_TAPS_PAIR(V4, 9) AMPI_TAPS_PAIR(V4, 10) AMPI_TAPS_PAIR(V4, 11) AMPI_TAPS_PAIR(V4, 12)

AMPI_LINE(ampi_line4_neon, V4, AMPI_ROWS_4) AMPI_LINE(ampi_line8_neon, V4, AMPI_ROWS_8)

AMPI_FN void ampi_taps_neon(size_t rows, const ampi_taps* u) {
    switch (rows) {
        AMPI_TAPS_CASE(V4, 1) AMPI_TAPS_CASE(V4, 2) AMPI_TAPS_CASE(V4, 3) AMPI_TAPS_CASE(V4, 4)
        AMPI_TAPS_CASE(V4, 5) AMPI_TAPS_CASE(V4, 6) AMPI_TAPS_CASE(V4, 7) AMPI_TAPS_CASE(V4, 8)
        AMPI_TAPS_CASE(V4, 9) AMPI_TAPS_CASE(V4, 10) AMPI_TAPS_CASE(V4, 11) AMPI_TAPS_CASE(V4, 12)
        default: break;
    }
}
#endif

/* The kernel and its sizes; mr is 0 on a path that has none, which unfolds. line4 and line8: one row, 4 or 8
   vectors. */
typedef struct ampi_taps_isa {
    size_t mr, lanes;
    void (*run)(size_t rows, const ampi_taps* u);
    void (*line4)(const ampi_taps* u);
    void (*line8)(const ampi_taps* u);
} ampi_taps_isa;
AMPI_FN ampi_taps_isa ampi_taps_isa_now(void) {
    static const ampi_taps_isa none = { 0, 0, NULL, NULL, NULL };
#if AMPI_X86
    static const ampi_taps_isa avx2 = { 6, 8, ampi_taps_avx2, ampi_line4_avx2, ampi_line8_avx2 };
    static const ampi_taps_isa avx512 = { 14, 16, ampi_taps_avx512, ampi_line4_avx512, ampi_line8_avx512 };
    if (ampi_simd() == AMP_ISA_AVX512) return avx512;
    if (ampi_simd() == AMP_ISA_AVX2) return avx2;
#elif AMPI_NEON
    static const ampi_taps_isa neon = { 12, 4, ampi_taps_neon, ampi_line4_neon, ampi_line8_neon };
    if (ampi_simd() == AMP_ISA_NEON) return neon;
#endif
    return none;
}

/* All rows of one or two vectors of sums, in blocks as equal as can be. */
AMPI_FN void ampi_taps_rows(const ampi_taps_isa* g, ampi_taps* u, size_t rows) {
    const float *a = u->a, *bias = u->bias;
    size_t blocks = rows <= g->mr ? 1 : (rows + g->mr - 1) / g->mr, low, high, q;
    float* t = u->t;
    for (q = 0, low = 0; q < blocks; q++, low = high) {
        high = q + 1 == blocks ? rows : (q + 1) * rows / blocks;
        u->a = a + low * u->rs;
        u->bias = bias ? bias + low : NULL;
        u->t = t + low * u->ldt;
        g->run(high - low, u);
    }
    u->a = a; u->bias = bias; u->t = t;
}
/* All of t[rows][n], two neighbouring vectors at a time, or more of a single row. */
AMPI_FN void ampi_taps_run(const ampi_taps_isa* g, ampi_taps* u, size_t rows, size_t n) {
    const float* b = u->b;
    float* t = u->t;
    size_t j, vectors;
    u->b_next = g->lanes;
    for (j = 0; j < n; j += vectors * g->lanes) {
        vectors = rows > 1 || n - j <= 2 * g->lanes ? 2 : n - j <= 6 * g->lanes ? 4 : 8;
        u->two = n - j > g->lanes;
        u->b = b + j;
        u->t = t + j;
        if (vectors == 2) ampi_taps_rows(g, u, rows);
        else if (vectors == 4) g->line4(u);
        else g->line8(u);
    }
    u->b = b; u->t = t;
}

/* dst[i] = src[2*i], i < n. Whole vectors as long as more follows: so they stay inside the row. */
AMPI_INLINE void ampi_copy_even(float* dst, const float* src, size_t n) {
    size_t i = 0, l;
    for (; i + 8 < n; i += 8) {
        float all[16], v[8];
        memcpy(all, src + 2 * i, sizeof all);
        for (l = 0; l < 8; l++) v[l] = all[2 * l];
        memcpy(dst + i, v, sizeof v);
    }
    for (; i < n; i++) dst[i] = src[2 * i];
}
/* dst[r*ldd + i*dst_step] = src[r*lds + i*src_step], r < rows, i < n; one of the steps is 1. */
AMPI_INLINE void ampi_copy_rows_body(int hw, float* dst, size_t ldd, size_t dst_step, const float* src,
                                     size_t lds, size_t src_step, size_t rows, size_t n) {
    size_t r, i;
    (void)hw;
    if (dst_step == 1 && src_step == 1)
        for (r = 0; r < rows; r++) ampi_copy_floats(dst + r * ldd, src + r * lds, n);
    else if (src_step == 2)
        for (r = 0; r < rows; r++) ampi_copy_even(dst + r * ldd, src + r * lds, n);
    else
        for (r = 0; r < rows; r++)
            for (i = 0; i < n; i++) dst[r * ldd + i * dst_step] = src[r * lds + i * src_step];
}
AMPI_KERNEL(ampi_copy_rows,
            (float* dst, size_t ldd, size_t dst_step, const float* src, size_t lds, size_t src_step,
             size_t rows, size_t n),
            dst, ldd, dst_step, src, lds, src_step, rows, n)

/* Is one of n floats -0, n a multiple of 4? */
AMPI_INLINE void ampi_find_minus_zero_body(int hw, int* found, const float* x, size_t n) {
    uint32_t hit[16];
    size_t i, l;
    (void)hw;
    memset(hit, 0, sizeof hit);
    for (i = 0; i + 16 <= n; i += 16)
        for (l = 0; l < 16; l++) hit[l] |= ampi_bits(x[i + l]) == 0x80000000u ? 1u : 0u;
    for (; i < n; i += 4)
        for (l = 0; l < 4; l++) hit[l] |= ampi_bits(x[i + l]) == 0x80000000u ? 1u : 0u;
    for (l = 1; l < 16; l++) hit[0] |= hit[l];
    if (hit[0]) AMPI_STORE_RELAXED(found, 1);
}
AMPI_KERNEL(ampi_find_minus_zero, (int* found, const float* x, size_t n), found, x, n)

/* --- direct convolution: outputs and input gradients --------------------------------------- */

/* One side (height or width). The result's places are dealt out to `parts`: u of part r is place parts*u + r.
   The source's are dealt out to `classes` likewise. Then what part r takes at kernel place a is always one
   class, shifted: an output's u sees source place stride*u + a*dilation - pad; a pixel's gradient, place
   stride*u + r, comes from output place (stride*u + r + pad - a*dilation) / stride, if that is whole. */
typedef struct ampi_side {
    int back;                                     /* 1: the result is the input's gradient */
    int64_t source, result, kernel, stride, pad, dilation;
    int64_t parts, classes, low, high;            /* the shifts lie in [low, high] */
} ampi_side;

/* 0: part r takes nothing at kernel place a. */
AMPI_FN int ampi_side_tap(const ampi_side* s, int64_t r, int64_t a, int64_t* shift, int64_t* cls) {
    int64_t v = s->back ? r + s->pad - a * s->dilation : a * s->dilation - s->pad;
    *shift = v / s->stride - (v % s->stride < 0);
    *cls = v - *shift * s->stride;
    return !s->back || *cls == 0;
}
AMPI_FN ampi_side ampi_side_of(int back, int source, int result, int kernel, int stride, int pad,
                               int dilation) {
    ampi_side s;
    int64_t r, a, shift, cls;
    s.back = back;
    s.source = source; s.result = result; s.kernel = kernel;
    s.stride = stride; s.pad = pad; s.dilation = dilation;
    s.parts = back ? stride : 1;
    s.classes = back ? 1 : stride;
    s.low = 0; s.high = 0;
    for (r = 0; r < s.parts; r++)
        for (a = 0; a < kernel; a++) {
            if (!ampi_side_tap(&s, r, a, &shift, &cls)) continue;
            s.low = ampi_min_i64(s.low, shift);
            s.high = shift > s.high ? shift : s.high;
        }
    return s;
}
AMPI_FN void ampi_conv2d_sides(const ampi_conv2d* c, int back, ampi_side* h, ampi_side* w) {
    const amp_conv2d_shape* s = &c->s;
    *h = ampi_side_of(back, back ? c->out_h : s->height, back ? s->height : c->out_h, s->kernel_h, s->stride_h,
                      s->pad_h, s->dilation_h);
    *w = ampi_side_of(back, back ? c->out_w : s->width, back ? s->width : c->out_w, s->kernel_w, s->stride_w,
                      s->pad_w, s->dilation_w);
}
/* 1: some kernel place takes class `cls` of the source. */
AMPI_FN int ampi_side_uses(const ampi_side* s, int64_t cls) {
    int64_t r, a, shift, taken;
    for (r = 0; r < s->parts; r++)
        for (a = 0; a < s->kernel; a++)
            if (ampi_side_tap(s, r, a, &shift, &taken) && taken == cls) return 1;
    return 0;
}
/* How many places part (or class) r of `of` has among `size`. */
AMPI_FN int64_t ampi_side_count(int64_t size, int64_t of, int64_t r) { return (size - r + of - 1) / of; }
/* Zeros that the results need beside a row of a class: behind it, or before it. */
AMPI_FN size_t ampi_side_gap(const ampi_side* s) {
    int64_t right = ampi_side_count(s->result, s->parts, 0) + s->high - ampi_side_count(s->source, s->classes, 0);
    return (size_t)(right > -s->low ? right : -s->low);
}

/* Largest stride and kernel; floats of the stage, of a row of sums, of all sums, of all weights; rows that always
   pay. */
enum { AMPI_STENCIL_STRIDE = 4, AMPI_STENCIL_SIDE = 65536, AMPI_STENCIL_KERNEL = 64,
       AMPI_STENCIL_STAGE = 196608, AMPI_STENCIL_LINE = 4096, AMPI_STENCIL_SUMS = 131072,
       AMPI_STENCIL_WEIGHTS = 262144, AMPI_STENCIL_ROWS = 64 };

AMPI_FN int ampi_side_fits(int size, int out, int kernel, int stride, int pad, int dilation) {
    return size <= AMPI_STENCIL_SIDE && out <= AMPI_STENCIL_SIDE && kernel <= AMPI_STENCIL_KERNEL
           && stride <= AMPI_STENCIL_STRIDE && pad <= AMPI_STENCIL_SIDE && dilation <= AMPI_STENCIL_SIDE;
}

/* A direct convolution. The stage holds, channel by channel and class by class, rows of `pitch` floats:
   a row's `gap` zeros serve as the left margin of the next row too. Positions p = u_h * pitch + u_w run over
   the rows without a break; those inside the gap are computed and dropped. A task is one image, one group,
   and a band of `band` rows u_h. */
typedef struct ampi_stencil {
    const ampi_conv2d* c;
    ampi_taps_isa isa;
    ampi_side h, w;
    size_t rows, depth, k;                        /* of a group: results, source channels, depth * taps */
    size_t pitch, gap, class_rows, class_size, channel_size, band, bands, ldt;
    size_t at_bias, at_weights, at_packed, at_slots, at_sums, at_plane, floats, slots;   /* scratch memory, in floats */
    int swap, skips, packs;                       /* skips: terms 0 * w are left out; packs: see ampi_stencil_pack */
    char uses[AMPI_STENCIL_STRIDE * AMPI_STENCIL_STRIDE];                /* classes that are needed */
    size_t begin[AMPI_STENCIL_STRIDE * AMPI_STENCIL_STRIDE + 1];         /* first k of each part */
    const void* source; amp_dtype source_dtype;
    void* result; amp_dtype result_dtype;
    int found;                                    /* a result of -0, see ampi_stencil_run */
} ampi_stencil;

/* Sizes of the stage for bands of `band` rows. */
AMPI_FN size_t ampi_stencil_stage(ampi_stencil* d, size_t band) {
    d->gap = ampi_side_gap(&d->w);
    d->pitch = (size_t)ampi_side_count(d->w.source, d->w.classes, 0) + d->gap;
    d->band = band;
    d->class_rows = band + (size_t)(d->h.high - d->h.low);
    d->class_size = d->class_rows * d->pitch;
    d->channel_size = d->class_size * (size_t)(d->h.classes * d->w.classes);
    d->ldt = ampi_round_up(band * d->pitch, 2 * d->isa.lanes) + AMPI_GEMM_GAP;
    return d->gap + d->depth * d->channel_size + 4 * d->isa.lanes;
}

/* The largest band for which the stage and the sums have room, made smaller if threads would idle. */
AMPI_FN int ampi_stencil_bands(ampi_stencil* d) {
    size_t rows = (size_t)ampi_side_count(d->h.result, d->h.parts, 0), fixed, most;
    size_t tasks = (size_t)d->c->s.n * (size_t)d->c->s.groups, threads = ampi_conv2d_threads(d->c);
    ampi_stencil_stage(d, 1);
    fixed = d->channel_size * d->depth;
    if (fixed > AMPI_STENCIL_STAGE || d->pitch > AMPI_STENCIL_LINE) return 0;
    most = (AMPI_STENCIL_STAGE - fixed) / (d->depth * d->pitch * (size_t)(d->h.classes * d->w.classes)) + 1;
    most = ampi_min_size(ampi_min_size(most, AMPI_STENCIL_LINE / d->pitch), rows);
    most = ampi_min_size(most, ampi_max_size(AMPI_STENCIL_SUMS / d->pitch / d->rows, 1));
    d->bands = ampi_max_size((rows + most - 1) / most, ampi_min_size((threads + tasks - 1) / tasks, rows));
    most = (rows + d->bands - 1) / d->bands;
    d->bands = (rows + most - 1) / most;
    ampi_stencil_stage(d, most);
    return 1;
}

/* Scratch memory: terms, bias, weights; then for each slot a stage, sums, and plain planes on their way. */
AMPI_FN void ampi_stencil_layout(ampi_stencil* d) {
    size_t groups = (size_t)d->c->s.groups, stage = ampi_stencil_stage(d, d->band);
    size_t in = d->class_rows * (size_t)(d->h.classes * d->w.source);
    size_t out = d->rows * d->band * (size_t)(d->h.parts * d->w.result);
    d->at_bias = ampi_round_up(2 * d->k, 16);
    d->at_weights = d->at_bias + ampi_round_up((size_t)d->c->s.out_channels, 16);
    d->packs = d->h.parts * d->w.parts > 1;
    d->at_packed = d->at_weights + ampi_round_up(d->c->w_count, 16);
    d->at_slots = d->at_packed + (d->packs ? ampi_round_up(d->c->w_count, 16) : 0);
    d->at_sums = ampi_round_up(stage, 16);
    d->at_plane = d->at_sums + ampi_round_up(d->rows * d->ldt, 16);
    d->floats = d->at_plane + ampi_round_up(ampi_max_size(in, out), 16) + 16;
    d->slots = ampi_min_size(ampi_conv2d_threads(d->c), (size_t)d->c->s.n * groups * d->bands);
}

/* Is it faster than the product? That unfolds slowly where there are strides, and multiplies zeros in the gradient of
   the input; but it has no gaps between rows, and weights that do not fit the cache cost it less. */
AMPI_FN int ampi_stencil_pays(const ampi_stencil* d) {
    const ampi_conv2d* c = d->c;
    size_t sums = d->ldt - (size_t)AMPI_GEMM_GAP, used = d->band * (size_t)d->w.result / (size_t)d->w.parts;
    if (c->s.stride_h == 1 && c->s.stride_w == 1)
        return c->taps > 1 && c->w_count <= AMPI_STENCIL_WEIGHTS
               && (d->rows <= AMPI_STENCIL_ROWS || 16 * used >= 15 * sums);
    if (d->h.back) return 1;
    return c->w_count <= AMPI_STENCIL_WEIGHTS
           && ((c->taps > 1 && d->rows <= AMPI_STENCIL_ROWS) || 16 * used >= 13 * sums);
}

/* Whether shape c has a direct form (back: of its input's gradient), and its plan. */
AMPI_FN int ampi_stencil_plan(ampi_stencil* d, const ampi_conv2d* c, int back) {
    const amp_conv2d_shape* s = &c->s;
    memset(d, 0, sizeof *d);
    d->c = c;
    d->isa = ampi_taps_isa_now();
    d->rows = back ? c->cg : c->og;
    d->depth = back ? c->og : c->cg;
    d->k = d->depth * c->taps;
    if (d->isa.mr == 0 || c->w_count > 8 * (size_t)AMPI_STENCIL_WEIGHTS
        || !ampi_side_fits(s->height, c->out_h, s->kernel_h, s->stride_h, s->pad_h, s->dilation_h)
        || !ampi_side_fits(s->width, c->out_w, s->kernel_w, s->stride_w, s->pad_w, s->dilation_w)) return 0;
    ampi_conv2d_sides(c, back, &d->h, &d->w);
    if (!ampi_stencil_bands(d) || !ampi_stencil_pays(d)) return 0;
    ampi_stencil_layout(d);
    return 1;
}
AMPI_FN size_t ampi_stencil_workspace(const ampi_conv2d* c, int back) {
    ampi_stencil d;
    return ampi_stencil_plan(&d, c, back) ? (d.at_slots + d.slots * d.floats) * sizeof(float) + 64 : 0;
}

/* The terms of each part. A half pair whose other half does not exist is left out: it would add 0 * 0. */
AMPI_FN void ampi_stencil_terms(ampi_stencil* d, ampi_term* terms) {
    const size_t taps = d->c->taps, kw = (size_t)d->w.kernel;
    int64_t rh, rw, shift_h, shift_w, class_h, class_w;
    size_t n = 0, part = 0, i;
    for (class_h = 0; class_h < d->h.classes; class_h++)
        for (class_w = 0; class_w < d->w.classes; class_w++)
            d->uses[class_h * d->w.classes + class_w] = (char)(ampi_side_uses(&d->h, class_h)
                                                               && ampi_side_uses(&d->w, class_w));
    for (rh = 0; rh < d->h.parts; rh++)
        for (rw = 0; rw < d->w.parts; rw++, d->begin[part] = n)
            for (part++, i = 0; i < d->k + d->k % 2; i++) {
                size_t k = d->swap ? i ^ 1u : i, ch = k / taps, tap = k % taps, origin;
                if (k >= d->k || !ampi_side_tap(&d->h, rh, (int64_t)(tap / kw), &shift_h, &class_h)
                    || !ampi_side_tap(&d->w, rw, (int64_t)(tap % kw), &shift_w, &class_w)) continue;
                origin = d->gap + ch * d->channel_size
                         + (size_t)(class_h * d->w.classes + class_w) * d->class_size;
                terms[n].at = (uint32_t)((int64_t)origin + (shift_h - d->h.low) * (int64_t)d->pitch + shift_w);
                terms[n++].from = (uint32_t)(d->h.back ? ch * d->rows * taps + tap : k);
            }
}

/* All weights as FP32. 0: one of them is infinite or a NaN. */
AMPI_FN int ampi_finite_weights(const ampi_conv2d* c, const void* w, amp_dtype t, float* dst) {
    uint32_t bad = 0;
    size_t i;
    ampi_load_f32(dst, w, t, 0, c->w_count);
    for (i = 0; i < c->w_count; i++) bad |= (ampi_bits(dst[i]) & 0x7fffffffu) >= 0x7f800000u ? 1u : 0u;
    return !bad;
}

/* A part takes few of the weights of a channel, which lie side by side: so each term's weights do, part by part. */
AMPI_FN void ampi_stencil_pack(const ampi_stencil* d, ampi_term* terms, float* memory) {
    const size_t groups = (size_t)d->c->s.groups;
    int64_t i;
    AMPI_PARALLEL_FOR(d->slots > 1)
    for (i = 0; i < (int64_t)(groups * d->k); i++)
        ampi_copy_rows(memory + d->at_packed + (size_t)i * d->rows, 0, 1, memory + d->at_weights
                       + (size_t)i / d->k * d->rows * d->k + terms[(size_t)i % d->k].from, 0, d->c->taps, 1, d->rows);
    for (i = 0; i < (int64_t)d->k; i++) terms[i].from = (uint32_t)((size_t)i * d->rows);
}

/* The rows that a band starting at u0 needs of one channel, class by class. */
AMPI_FN void ampi_stencil_fill(const ampi_stencil* d, size_t plane, int64_t u0, float* dst, float* room) {
    const int64_t ch = d->h.classes, cw = d->w.classes, height = d->h.source, width = d->w.source;
    const int64_t top = u0 + d->h.low, rows = (int64_t)d->class_rows;
    int64_t y0 = ampi_min_i64(top > 0 ? top * ch : 0, height), y1 = ampi_min_i64((top + rows) * ch, height);
    size_t at = plane * (size_t)(height * width) + (size_t)(y0 * width);
    const float* src = (const float*)d->source + at;
    int64_t qh, qw;
    if (y1 < y0) y1 = y0;
    if (d->source_dtype != AMP_F32) {
        ampi_load_f32(room, d->source, d->source_dtype, at, (size_t)((y1 - y0) * width));
        src = room;
    }
    for (qh = 0; qh < ch; qh++) {
        int64_t first = top > 0 ? 0 : ampi_min_i64(-top, rows);                  /* rows inside the image */
        int64_t last = ampi_min_i64(ampi_side_count(height, ch, qh) - top, rows);
        if (last < first) last = first;
        for (qw = 0; qw < cw; qw++, dst += d->class_size) {
            if (!d->uses[qh * cw + qw]) continue;
            memset(dst, 0, (size_t)first * d->pitch * sizeof *dst);
            memset(dst + (size_t)last * d->pitch, 0, (size_t)(rows - last) * d->pitch * sizeof *dst);
            if (qw < width && first < last)
                ampi_copy_rows(dst + (size_t)first * d->pitch, d->pitch, 1,
                               src + ((top + first) * ch + qh - y0) * width + qw, (size_t)(ch * width),
                               (size_t)cw, (size_t)(last - first), (size_t)ampi_side_count(width, cw, qw));
        }
    }
}

/* One part of a band: the sums, and their way to `out`, rows of planes that begin with the band. */
AMPI_FN void ampi_stencil_part(ampi_stencil* d, ampi_taps* u, int64_t u0, int64_t rh, int64_t rw, float* out,
                              size_t plane) {
    int64_t rows = ampi_min_i64(ampi_side_count(d->h.result, d->h.parts, rh) - u0, (int64_t)d->band);
    int64_t columns = ampi_side_count(d->w.result, d->w.parts, rw);
    size_t n, i, width = (size_t)d->w.result;
    if (rows <= 0 || columns <= 0) return;
    n = (size_t)(rows - 1) * d->pitch + (size_t)columns;
    ampi_taps_run(&d->isa, u, d->rows, n);
    out += (size_t)rh * width + (size_t)rw;
    for (i = 0; i < d->rows; i++) {
        if (d->skips) ampi_find_minus_zero(&d->found, u->t + i * d->ldt, n / 4 * 4 + (n % 4 ? 4 : 0));
        ampi_copy_rows(out + i * plane, (size_t)d->h.parts * width, (size_t)d->w.parts, u->t + i * d->ldt,
                       d->pitch, 1, (size_t)rows, (size_t)columns);
    }
}

/* One task, in a slot of scratch memory. */
AMPI_FN void ampi_stencil_task(ampi_stencil* d, size_t task, const float* shared, const float* bias, float* slot) {
    size_t groups = (size_t)d->c->s.groups, g = task / d->bands % groups, image = task / d->bands / groups, i;
    size_t first = (image * groups + g) * d->rows, source = (image * groups + g) * d->depth;
    size_t plane = (size_t)(d->h.result * d->w.result), part = 0;
    int64_t u0 = (int64_t)(task % d->bands * d->band), rh, rw;
    int64_t y0 = u0 * d->h.parts, y1 = ampi_min_i64(y0 + (int64_t)d->band * d->h.parts, d->h.result);
    size_t at = first * plane + (size_t)(y0 * d->w.result), count = (size_t)((y1 - y0) * d->w.result);
    float* out = d->result_dtype == AMP_F32 ? (float*)d->result + at : slot + d->at_plane;
    ampi_taps u;
    for (i = 0; i < d->depth; i++)
        ampi_stencil_fill(d, source + i, u0, slot + d->gap + i * d->channel_size, slot + d->at_plane);
    memset(&u, 0, sizeof u);
    u.a = shared + (d->packs ? d->at_packed : d->at_weights) + g * d->rows * d->k;
    u.rs = d->packs ? 1 : d->h.back ? d->c->taps : d->k;
    u.b = slot; u.t = slot + d->at_sums; u.ldt = d->ldt;
    u.repeat = 1; u.first = u.last = 1;
    u.bias = bias ? bias + g * d->rows : NULL;
    for (rh = 0; rh < d->h.parts; rh++)
        for (rw = 0; rw < d->w.parts; rw++, part++) {
            u.k = d->begin[part + 1] - d->begin[part];
            u.terms = (const ampi_term*)(const void*)shared + d->begin[part];
            ampi_stencil_part(d, &u, u0, rh, rw, out, d->result_dtype == AMP_F32 ? plane : count);
        }
    for (i = 0; d->result_dtype != AMP_F32 && i < d->rows; i++)
        ampi_store_f32(d->result, d->result_dtype, at + i * plane, out + i * count, count);
}

/* The convolution, if it has a direct form for which the workspace has room. 0: it is still to be done.
   Terms that are left out are zeros, and a zero can only change the sign of a zero sum, from - to +. So where
   a result is -0, which takes an underflow, the product decides. */
AMPI_FN int ampi_stencil_run(const ampi_conv2d* c, int back, const void* source, amp_dtype source_dtype,
                            const void* w, amp_dtype w_dtype, const void* b, amp_dtype b_dtype, void* result,
                            amp_dtype result_dtype, const amp_exec* exec) {
    size_t room = ampi_room(exec), tasks;
    float *memory, *bias;
    ampi_stencil d;
    int64_t slot;
    if (!ampi_stencil_plan(&d, c, back) || room < d.at_slots + d.floats) return 0;
    d.source = source; d.source_dtype = ampi_dtype(source_dtype);
    d.result = result; d.result_dtype = ampi_dtype(result_dtype);
    d.swap = d.source_dtype == AMP_BF16 && ampi_dtype(w_dtype) == AMP_BF16;
    d.skips = d.h.parts * d.w.parts > 1 || (d.swap && d.k % 2 != 0);
    d.slots = ampi_min_size(d.slots, (room - d.at_slots) / d.floats);
    memory = ampi_align64(exec->workspace);
    bias = memory + d.at_bias;
    ampi_stencil_terms(&d, (ampi_term*)(void*)memory);
    if (!ampi_finite_weights(c, w, w_dtype, memory + d.at_weights) && d.skips) return 0;
    if (d.packs) ampi_stencil_pack(&d, (ampi_term*)(void*)memory, memory);
    if (b) ampi_load_f32(bias, b, b_dtype, 0, (size_t)c->s.out_channels);
    tasks = (size_t)c->s.n * (size_t)c->s.groups * d.bands;
    AMPI_PARALLEL_FOR(d.slots > 1)
    for (slot = 0; slot < (int64_t)d.slots; slot++) {
        float* own = memory + d.at_slots + (size_t)slot * d.floats;
        size_t task;
        memset(own, 0, d.at_sums * sizeof *own);
        for (task = (size_t)slot; task < tasks; task += d.slots)
            ampi_stencil_task(&d, task, memory, b ? bias : NULL, own);
    }
    return !d.found;
}

/* --- direct convolution: images abreast ------------------------------------------------------ */

/* In a large batch, lanes are images: the stage holds source[channel][pixel][image], a result pixel is a sum
   over just those terms that lie inside the image, whatever the stride, and no lane is spent on margins. Images
   are taken in blocks of two vectors. A task is a part of the rows of the results of a block, and has a stage of
   its own. Terms are listed for `unit` channels (two where pairs of BF16 straddle
   them) and repeated over the others; pixels whose terms lie alike share a list. */
typedef struct ampi_abreast {
    const ampi_conv2d* c;
    ampi_taps_isa isa;
    ampi_gemm_isa gemm;                           /* for its transposition */
    ampi_side h, w;
    size_t rows, depth, unit, width;              /* of a group: results, source channels; images of a block */
    size_t in, out, channel;                      /* pixels of a plane; floats of a channel of the stage */
    size_t blocks, parts, band, ldt;              /* band: rows whose sums there is room for */
    size_t at_weights, at_slots, at_sums, at_tile, at_stage, floats, slots;    /* scratch memory, in floats */
    int swap, skips;
    int64_t low[AMPI_STENCIL_STRIDE], high[AMPI_STENCIL_STRIDE];      /* of part r: columns that lack no term */
    const void* source; amp_dtype source_dtype;
    void* result; amp_dtype result_dtype;
    int found;                                    /* a result of -0, see ampi_stencil_run */
} ampi_abreast;

/* Floats of a stage, of a task's sums; pixels that are transposed at a time; terms of a sum, at least: sums
   of few cost less than to bring their images abreast and back. */
enum { AMPI_ABREAST_STAGE = 262144, AMPI_ABREAST_SUMS = 24576, AMPI_ABREAST_TILE = 256,
       AMPI_ABREAST_TERMS = 64 };

/* Where part r of a side finds kernel place a for its place u: the source's place, or -1. */
AMPI_FN int64_t ampi_side_source(const ampi_side* s, int64_t r, int64_t a, int64_t u) {
    int64_t shift, cls, place;
    if (!ampi_side_tap(s, r, a, &shift, &cls)) return -1;
    place = s->classes * (u + shift) + cls;
    return place >= 0 && place < s->source ? place : -1;
}
/* Places [low, high) of part r lack no term. 1: so it is for all places. */
AMPI_FN int ampi_side_inside(const ampi_side* s, int64_t r, int64_t* low, int64_t* high) {
    int64_t a, shift, cls;
    *low = 0;
    *high = ampi_side_count(s->result, s->parts, r);
    for (a = 0; a < s->kernel; a++) {
        if (!ampi_side_tap(s, r, a, &shift, &cls)) continue;
        if (-shift > *low) *low = -shift;
        *high = ampi_min_i64(*high, ampi_side_count(s->source, s->classes, cls) - shift);
    }
    return *low == 0 && *high == ampi_side_count(s->result, s->parts, r);
}

/* About how long the busiest thread works if the rows of each block are dealt out to `parts` tasks. Bringing a row
   of the source abreast takes about a sixth of a row of results. */
AMPI_FN size_t ampi_abreast_cost(const ampi_abreast* d, size_t parts, size_t threads) {
    size_t rows = ampi_div_up((size_t)d->h.result, parts);
    size_t source = rows * (size_t)d->h.classes / (size_t)d->h.parts + (size_t)d->h.kernel;
    return ampi_div_up(d->blocks * (size_t)d->c->s.groups * parts, threads)
           * (6 * rows + ampi_min_size(source, (size_t)d->h.source));
}
AMPI_FN void ampi_abreast_layout(ampi_abreast* d) {
    size_t threads = ampi_conv2d_threads(d->c), row = d->rows * (size_t)d->w.result * d->width;
    size_t rows = (size_t)d->h.result, pixels, p;
    d->blocks = ((size_t)d->c->s.n + d->width - 1) / d->width;
    d->parts = 1;
    for (p = 2; p <= ampi_min_size(rows, 2 * threads - 1); p++)
        if (ampi_abreast_cost(d, p, threads) < ampi_abreast_cost(d, d->parts, threads)) d->parts = p;
    d->band = ampi_div_up(rows, d->parts);
    d->band = ampi_div_up(d->band, ampi_div_up(d->band, AMPI_ABREAST_SUMS / row));
    pixels = ampi_round_up(d->band * (size_t)d->w.result, d->isa.lanes);
    d->ldt = pixels * d->width + AMPI_GEMM_GAP;
    d->at_weights = ampi_round_up((size_t)d->c->s.out_channels, 16);
    d->at_slots = d->at_weights + ampi_round_up(d->c->w_count, 16);
    d->at_sums = ampi_round_up(2 * (d->unit + 1) * d->c->taps, 16);
    d->at_tile = d->at_sums + d->rows * d->ldt;
    d->at_stage = d->at_tile + d->width * (ampi_max_size(pixels, AMPI_ABREAST_TILE) + AMPI_GEMM_GAP);
    d->floats = d->at_stage + d->depth * d->channel;
    d->slots = ampi_min_size(threads, d->blocks * (size_t)d->c->s.groups * d->parts);
}

/* Whether shape c has this form. */
AMPI_FN int ampi_abreast_plan(ampi_abreast* d, const ampi_conv2d* c, int back, int swap) {
    const amp_conv2d_shape* s = &c->s;
    size_t n = (size_t)s->n;
    int64_t r;
    memset(d, 0, sizeof *d);
    d->c = c;
    d->isa = ampi_taps_isa_now();
    d->gemm = ampi_gemm_isa_now();
    d->rows = back ? c->cg : c->og;
    d->depth = back ? c->og : c->cg;
    d->swap = swap;
    d->unit = swap && c->taps % 2 != 0 ? 2 : 1;
    if (d->isa.mr == 0 || c->taps == 1 || d->depth * c->taps < AMPI_ABREAST_TERMS || d->rows < 4
        || d->rows > 64 || c->w_count > AMPI_STENCIL_WEIGHTS
        || !ampi_side_fits(s->height, c->out_h, s->kernel_h, s->stride_h, s->pad_h, s->dilation_h)
        || !ampi_side_fits(s->width, c->out_w, s->kernel_w, s->stride_w, s->pad_w, s->dilation_w)) return 0;
    ampi_conv2d_sides(c, back, &d->h, &d->w);
    d->width = 2 * d->isa.lanes;
    d->in = back ? c->out_pixels : c->in_pixels;
    d->out = back ? c->in_pixels : c->out_pixels;
    d->channel = d->in * d->width;
    if (ampi_round_up(n, d->isa.lanes) > n + n / 3 || d->in > AMPI_ABREAST_STAGE / d->depth / d->width
        || (size_t)d->w.result > AMPI_ABREAST_SUMS / d->rows / d->width) return 0;
    d->skips = d->h.parts * d->w.parts > 1 || (swap && d->depth * c->taps % 2 != 0)
               || !ampi_side_inside(&d->h, 0, &d->low[0], &d->high[0]);
    for (r = 0; r < d->w.parts; r++) d->skips |= !ampi_side_inside(&d->w, r, &d->low[r], &d->high[r]);
    ampi_abreast_layout(d);
    return 1;
}
AMPI_FN size_t ampi_abreast_workspace(const ampi_conv2d* c, int back) {
    ampi_abreast d;
    return ampi_abreast_plan(&d, c, back, 1) ? (d.at_slots + d.slots * d.floats) * sizeof(float) + 64 : 0;
}

/* Pixels [p, end) of one channel of a block of images into its stage. */
AMPI_FN void ampi_abreast_fill(const ampi_abreast* d, size_t g, size_t block, size_t ch, size_t p, size_t end,
                               float* dst, float* tile) {
    const size_t lanes = d->isa.lanes, total = (size_t)d->c->s.groups * d->depth, image = total * d->in;
    const size_t n0 = block * d->width, images = ampi_min_size((size_t)d->c->s.n - n0, d->width);
    const size_t at = n0 * image + (g * d->depth + ch) * d->in;
    size_t count, i, l;
    for (dst += p * d->width; p < end; p += count, dst += count * d->width) {
        const float* src = (const float*)d->source + at + p;
        size_t lds = image;
        count = ampi_min_size(end - p, AMPI_ABREAST_TILE);
        if (d->source_dtype != AMP_F32 || images < d->width) {
            lds = (size_t)AMPI_ABREAST_TILE + (size_t)AMPI_GEMM_GAP;
            for (i = 0; i < images; i++)
                ampi_load_f32(tile + i * lds, d->source, d->source_dtype, at + i * image + p, count);
            for (; i < d->width; i++) memset(tile + i * lds, 0, count * sizeof *tile);
            src = tile;
        }
        for (l = 0; l < d->width; l += lanes) d->gemm.transpose(dst + l, d->width, src + l * lds, lds, count, 0);
    }
}

/* `count` result pixels from pixel p of plane `plane` of each image of a block: from sums[pixel][image]. */
AMPI_FN void ampi_abreast_store(const ampi_abreast* d, size_t block, size_t plane, size_t p, size_t count,
                                const float* sums, float* tile) {
    const size_t lanes = d->isa.lanes, image = (size_t)d->c->s.groups * d->rows * d->out;
    const size_t n0 = block * d->width, images = ampi_min_size((size_t)d->c->s.n - n0, d->width);
    const size_t at = n0 * image + plane * d->out + p, ldd = ampi_round_up(count, lanes) + AMPI_GEMM_GAP;
    size_t q, i, whole = d->result_dtype == AMP_F32 ? count / lanes * lanes : 0;
    for (q = 0; q < whole; q += lanes)
        d->gemm.transpose((float*)d->result + at + q, image, sums + q * d->width, d->width, images, 0);
    for (; q < count; q += lanes)
        d->gemm.transpose(tile + q - whole, ldd, sums + q * d->width, d->width, images, 0);
    if (d->result_dtype == AMP_F32)
        ampi_copy_rows((float*)d->result + at + whole, image, 1, tile, ldd, 1, images, count - whole);
    else for (i = 0; i < images; i++)
        ampi_store_f32(d->result, d->result_dtype, at + i * image, tile + i * ldd, count);
}

/* The list of terms over `channels` channels, where kernel place (a, b) finds source pixel rows[a] + columns[b],
   or none if one of them is negative. */
AMPI_FN size_t ampi_abreast_terms(const ampi_abreast* d, const int64_t* rows, const int64_t* columns,
                                  size_t channels, ampi_term* terms) {
    const size_t kh = (size_t)d->h.kernel, kw = (size_t)d->w.kernel;
    size_t n = 0, ch, a, b, last = 1;
    for (ch = 0; ch < channels; ch++)
        for (a = 0; a < kh; a++)
            for (b = 0; rows[a] >= 0 && b < kw; b++) {
                size_t tap = a * kw + b, k = ch * kh * kw + tap;
                ampi_term term;
                if (columns[b] < 0) continue;
                term.at = (uint32_t)(ch * d->channel + (size_t)(rows[a] + columns[b]) * d->width);
                term.from = (uint32_t)(d->h.back ? ch * d->rows * kh * kw + tap : k);
                if (d->swap && k % 2 != 0 && last + 1 == k) {
                    terms[n] = terms[n - 1];
                    terms[n - 1] = term;
                } else {
                    terms[n] = term;
                }
                last = k;
                n++;
            }
    return n;
}

/* The lists of terms of a pixel: of `unit` channels, and of those that are left after whole units. */
typedef struct ampi_lists { ampi_term *main, *rest; size_t k, k_rest; } ampi_lists;

/* One pixel. u knows the weights, the bias, the pixel's place in the stage and among the sums. */
AMPI_FN void ampi_abreast_pixel(const ampi_abreast* d, const ampi_lists* lists, ampi_taps* u, size_t images) {
    const size_t repeat = d->depth / d->unit;
    const float *a = u->a, *b = u->b, *bias = u->bias;
    int rest = d->depth % d->unit != 0;
    u->terms = lists->main; u->k = lists->k; u->repeat = repeat;
    u->first = 1; u->last = !rest;
    if (rest) u->bias = NULL;
    if (repeat > 0) ampi_taps_run(&d->isa, u, d->rows, images);
    if (!rest) return;
    u->a += repeat * u->a_step; u->b += repeat * u->b_step; u->bias = bias;
    u->terms = lists->rest; u->k = lists->k_rest; u->repeat = 1;
    u->first = repeat == 0; u->last = 1;
    ampi_taps_run(&d->isa, u, d->rows, images);
    u->a = a; u->b = b;
}

/* One row of results into t[row][pixel][image]. */
AMPI_FN void ampi_abreast_row(const ampi_abreast* d, ampi_taps* base, int64_t y, size_t images, float* t,
                              ampi_lists lists) {
    int64_t rows[AMPI_STENCIL_KERNEL], columns[AMPI_STENCIL_KERNEL], r, u, i, first;
    const float* stage = base->b;
    for (i = 0; i < d->h.kernel; i++)
        rows[i] = ampi_side_source(&d->h, y % d->h.parts, i, y / d->h.parts) * d->w.source;
    for (r = 0; r < d->w.parts; r++)
        for (u = 0, first = -1; u < ampi_side_count(d->w.result, d->w.parts, r); u++) {
            int inside = u >= d->low[r] && u < d->high[r];
            if (!inside || first < 0) {
                for (i = 0; i < d->w.kernel; i++) columns[i] = ampi_side_source(&d->w, r, i, u);
                lists.k = ampi_abreast_terms(d, rows, columns, d->unit, lists.main);
                lists.k_rest = ampi_abreast_terms(d, rows, columns, d->depth % d->unit, lists.rest);
                first = u;
            }
            base->t = t + (size_t)(d->w.parts * u + r) * d->width;
            base->b = stage + (size_t)((u - first) * d->w.classes) * d->width;
            ampi_abreast_pixel(d, &lists, base, images);
            if (!inside) first = -1;
        }
    base->b = stage;
}

/* Rows [y0, y1) of the results of a block of images. */
AMPI_FN void ampi_abreast_band(ampi_abreast* d, size_t g, size_t block, size_t y0, size_t y1, const float* shared,
                               const float* bias, float* slot) {
    const size_t taps = d->c->taps, width = (size_t)d->w.result, count = (y1 - y0) * width;
    const size_t images = ampi_min_size((size_t)d->c->s.n - block * d->width, d->width);
    float* t = slot + d->at_sums;
    ampi_lists lists;
    ampi_taps u;
    size_t y, i;
    memset(&lists, 0, sizeof lists);
    lists.main = (ampi_term*)(void*)slot;
    lists.rest = lists.main + d->unit * taps;
    memset(&u, 0, sizeof u);
    u.a = shared + d->at_weights + g * d->c->og * d->c->cg * taps;
    u.rs = d->h.back ? taps : d->depth * taps;
    u.a_step = d->unit * (d->h.back ? d->rows * taps : taps);
    u.b = slot + d->at_stage;
    u.b_step = d->unit * d->channel;
    u.bias = bias ? bias + g * d->rows : NULL;
    u.ldt = d->ldt;
    if (d->skips && images <= d->isa.lanes) memset(t, 0, d->rows * d->ldt * sizeof *t);  /* second vectors stay so */
    for (y = y0; y < y1; y++)
        ampi_abreast_row(d, &u, (int64_t)y, images, t + (y - y0) * width * d->width, lists);
    for (i = 0; i < d->rows; i++) {
        if (d->skips) ampi_find_minus_zero(&d->found, t + i * d->ldt, count * d->width);
        ampi_abreast_store(d, block, g * d->rows + i, y0 * width, count, t + i * d->ldt, slot + d->at_tile);
    }
}

/* One task: the source's rows that its results see, then the results band by band. */
AMPI_FN void ampi_abreast_task(ampi_abreast* d, size_t task, const float* shared, const float* bias, float* slot) {
    const size_t part = task % d->parts, block = task / d->parts % d->blocks, g = task / d->parts / d->blocks;
    const size_t rows = (size_t)d->h.result, y1 = (part + 1) * rows / d->parts;
    int64_t low = d->h.source, high = 0, place, a;
    size_t y0 = part * rows / d->parts, y, ch;
    for (y = y0; y < y1; y++)
        for (a = 0; a < d->h.kernel; a++) {
            place = ampi_side_source(&d->h, (int64_t)y % d->h.parts, a, (int64_t)y / d->h.parts);
            if (place >= 0 && place < low) low = place;
            if (place >= high) high = place + 1;
        }
    for (ch = 0; low < high && ch < d->depth; ch++)
        ampi_abreast_fill(d, g, block, ch, (size_t)(low * d->w.source), (size_t)(high * d->w.source),
                          slot + d->at_stage + ch * d->channel, slot + d->at_tile);
    for (; y0 < y1; y0 = y) {
        y = ampi_min_size(y0 + d->band, y1);
        ampi_abreast_band(d, g, block, y0, y, shared, bias, slot);
    }
}

/* As ampi_stencil_run. */
AMPI_FN int ampi_abreast_run(const ampi_conv2d* c, int back, const void* source, amp_dtype source_dtype,
                             const void* w, amp_dtype w_dtype, const void* b, amp_dtype b_dtype, void* result,
                             amp_dtype result_dtype, const amp_exec* exec) {
    size_t room = ampi_room(exec), tasks;
    int swap = ampi_dtype(source_dtype) == AMP_BF16 && ampi_dtype(w_dtype) == AMP_BF16;
    float *memory, *bias;
    ampi_abreast d;
    int64_t slot;
    if (!ampi_abreast_plan(&d, c, back, swap) || room < d.at_slots + d.floats) return 0;
    d.source = source; d.source_dtype = ampi_dtype(source_dtype);
    d.result = result; d.result_dtype = ampi_dtype(result_dtype);
    d.slots = ampi_min_size(d.slots, (room - d.at_slots) / d.floats);
    memory = ampi_align64(exec->workspace);
    bias = memory;
    if (!ampi_finite_weights(c, w, w_dtype, memory + d.at_weights) && d.skips) return 0;
    if (b) ampi_load_f32(bias, b, b_dtype, 0, (size_t)c->s.out_channels);
    tasks = d.blocks * d.parts * (size_t)c->s.groups;
    AMPI_PARALLEL_FOR(d.slots > 1)
    for (slot = 0; slot < (int64_t)d.slots; slot++) {
        size_t task;
        for (task = (size_t)slot; task < tasks; task += d.slots)
            ampi_abreast_task(&d, task, memory, b ? bias : NULL, memory + d.at_slots + (size_t)slot * d.floats);
    }
    return !d.found;
}

/* --- direct convolution: gradients of weights ----------------------------------------------- */

/* dw[o, (c,a,b)] sums over pixels, with the taps side by side in vectors. For that an image is stored once more:
   `folded`[i][x][e] holds, for line i and column x of the padded image, the values e = a*channels + c of `deep`
   kernel rows a, either all or one. Where it is all, line i holds what row i of outputs sees; where it is one,
   line i is row i of the image, and the kernel's rows are `segments` of the taps. Pixel (i, j) meets its taps
   (b, e) of a segment as kernel_w * edge neighbouring floats. In the padded image row y of channel c is row
   y*channels + c, so that folding is a transposition of `edge` neighbouring rows.
   A task is a tile of dw, some outputs by some channels, over all images. */
typedef struct ampi_fold {
    const ampi_conv2d* c;
    ampi_taps_isa isa;
    ampi_gemm_isa gemm;                           /* for its transposition */
    size_t out_tiles, channel_tiles, deep, lines, pitch, unit;   /* pitch: padded width; unit: images of a call */
    size_t line, ldt, image, padded;              /* floats: a row of dy, of sums; an image folded, padded */
    size_t at_sums, at_dy, at_folded, at_padded, floats, slots;  /* scratch memory of a slot, in floats */
    int swap;
    const void *dy, *x; amp_dtype dy_dtype, x_dtype;
} ampi_fold;

/* Floats of a folded image, of a tile's sums; tiles along a side, at most; pixels that make up for many sums. */
enum { AMPI_FOLD_IMAGE = 262144, AMPI_FOLD_SUMS = 65536, AMPI_FOLD_TILES = 16, AMPI_FOLD_PIXELS = 384 };

/* A tile: outputs o.. and channels ch.. of group g; edge, and vectors of a segment and of all of them. */
typedef struct ampi_fold_tile { size_t g, o, outs, ch, channels, edge, part, vectors; } ampi_fold_tile;

AMPI_FN ampi_fold_tile ampi_fold_tile_of(const ampi_fold* f, size_t task) {
    size_t o = task % f->out_tiles, ch = task / f->out_tiles % f->channel_tiles, kh = (size_t)f->c->s.kernel_h;
    ampi_fold_tile t;
    t.g = task / f->out_tiles / f->channel_tiles;
    t.o = o * f->c->og / f->out_tiles;
    t.outs = (o + 1) * f->c->og / f->out_tiles - t.o;
    t.ch = ch * f->c->cg / f->channel_tiles;
    t.channels = (ch + 1) * f->c->cg / f->channel_tiles - t.ch;
    t.edge = f->deep * t.channels;
    t.part = ampi_div_up(t.edge * (size_t)f->c->s.kernel_w, f->isa.lanes);
    t.vectors = t.part * (kh / f->deep);
    return t;
}

/* About how long the busiest of `threads` threads works on an image, in halves of a cycle: a row of sums waits
   for an fma a vector, a block of rows for some loads as well, and a folded float takes half a cycle. */
AMPI_FN double ampi_fold_cost(const ampi_fold* f, size_t threads) {
    size_t tiles = f->out_tiles * f->channel_tiles, turns = ampi_div_up(tiles * (size_t)f->c->s.groups, threads);
    ampi_fold_tile t = ampi_fold_tile_of(f, tiles - 1);      /* the last one is among the largest */
    return (double)turns * ((double)(f->c->out_pixels * t.vectors)
                            * (double)(t.outs + 2 * ampi_div_up(t.outs, f->isa.mr))
                            + (double)(f->lines * f->pitch * t.edge));
}
/* Sets how deep to fold, and what follows. */
AMPI_FN void ampi_fold_deep(ampi_fold* f, size_t deep) {
    size_t rows = (size_t)f->c->out_h, kh = (size_t)f->c->s.kernel_h;
    f->deep = deep;
    f->lines = deep == kh ? rows : (rows - 1) * (size_t)f->c->s.stride_h + kh;
}

/* Scratch memory: a term for each pixel of a unit, and for an odd last one; sums; widened dy; folded images; a
   padded image. */
AMPI_FN void ampi_fold_layout(ampi_fold* f, size_t threads) {
    ampi_fold_tile t = ampi_fold_tile_of(f, f->out_tiles * f->channel_tiles - 1);
    size_t pixels = f->unit * f->c->out_pixels;
    size_t rows = ((size_t)f->c->out_h - 1) * (size_t)f->c->s.stride_h + (size_t)f->c->s.kernel_h;
    f->line = ampi_round_up(pixels, 16);
    f->ldt = ampi_round_up(t.vectors * f->isa.lanes, 16) + AMPI_GEMM_GAP;
    f->image = ampi_round_up(f->lines * f->pitch * t.edge + 4 * t.edge + 4 * f->isa.lanes, 16);
    f->padded = ampi_round_up((rows * t.channels + f->isa.lanes) * f->pitch + f->c->in_pixels, 16) + 16;
    f->at_sums = ampi_round_up(2 * (pixels + 1), 16);
    f->at_dy = f->at_sums + ampi_round_up(t.outs * f->ldt, 16);
    f->at_folded = f->at_dy + t.outs * f->line;
    f->at_padded = f->at_folded + f->unit * f->image;
    f->floats = f->at_padded + f->padded;
    f->slots = ampi_min_size(threads, f->out_tiles * f->channel_tiles * (size_t)f->c->s.groups);
}

/* Whether shape c has this form. */
AMPI_FN int ampi_fold_fits(const ampi_fold* f) {
    const ampi_conv2d* c = f->c;
    const amp_conv2d_shape* s = &c->s;
    if (f->isa.mr == 0 || c->taps == 1 || s->dilation_h != 1 || s->dilation_w != 1
        || !ampi_side_fits(s->height, c->out_h, s->kernel_h, s->stride_h, s->pad_h, 1)
        || !ampi_side_fits(s->width, c->out_w, s->kernel_w, s->stride_w, s->pad_w, 1)
        || c->in_pixels > AMPI_FOLD_IMAGE) return 0;
    return c->out_pixels >= AMPI_FOLD_PIXELS || s->stride_w > 1
           || (c->og <= 64 && c->cg * c->taps <= AMPI_FOLD_SUMS / c->og);
}
/* Whether a tile's sums and its folded image stay in the second-level cache. */
AMPI_FN int ampi_fold_tile_fits(const ampi_fold* f) {
    ampi_fold_tile t = ampi_fold_tile_of(f, f->out_tiles * f->channel_tiles - 1);
    return t.vectors <= AMPI_FOLD_SUMS / f->isa.lanes / t.outs && f->lines * f->pitch <= AMPI_FOLD_IMAGE / t.edge;
}
/* The fastest tiles, for kernel rows folded like this; *best: the cost of *f, or 0 if it is no plan yet. */
AMPI_FN void ampi_fold_cut(ampi_fold* f, size_t deep, size_t threads, double* best) {
    size_t o, ch, outs = ampi_min_size(f->c->og, AMPI_FOLD_TILES), channels = ampi_min_size(f->c->cg, AMPI_FOLD_TILES);
    ampi_fold q = *f;
    ampi_fold_deep(&q, deep);
    for (o = 1; o <= outs; o++)
        for (ch = 1; ch <= channels && (*best <= 0.0 || o * ch <= 2 * threads); ch++) {
            double cost;
            q.out_tiles = o; q.channel_tiles = ch;
            cost = ampi_fold_cost(&q, threads);
            if (!ampi_fold_tile_fits(&q) || (*best > 0.0 && cost >= *best)) continue;
            *best = cost;
            *f = q;
        }
}

AMPI_FN int ampi_fold_plan(ampi_fold* f, const ampi_conv2d* c, int swap) {
    size_t threads = ampi_conv2d_threads(c), kh = (size_t)c->s.kernel_h;
    double best = 0.0;
    memset(f, 0, sizeof *f);
    f->c = c;
    f->isa = ampi_taps_isa_now();
    f->gemm = ampi_gemm_isa_now();
    f->swap = swap;
    if (!ampi_fold_fits(f)) return 0;
    f->pitch = (size_t)((c->out_w - 1) * c->s.stride_w + c->s.kernel_w);
    f->unit = swap && c->out_pixels % 2 != 0 ? 2 : 1;        /* pairs of BF16 pixels stay in one unit */
    ampi_fold_cut(f, kh, threads, &best);
    if (kh > 1) ampi_fold_cut(f, 1, threads, &best);
    if (best <= 0.0) return 0;
    ampi_fold_layout(f, threads);
    return 1;
}
AMPI_FN size_t ampi_fold_workspace(const ampi_conv2d* c) {
    ampi_fold f;
    return ampi_fold_plan(&f, c, 1) ? f.slots * f.floats * sizeof(float) + 64 : 0;
}

/* The terms of a unit's pixels, and after them that of an image's last. */
AMPI_FN void ampi_fold_terms(const ampi_fold* f, const ampi_fold_tile* t, ampi_term* terms) {
    const ampi_conv2d* c = f->c;
    size_t pixels = f->unit * c->out_pixels, i, step = f->deep < (size_t)c->s.kernel_h ? (size_t)c->s.stride_h : 1;
    for (i = 0; i <= pixels; i++) {
        size_t k = i == pixels ? c->out_pixels - 1 : f->swap && (i ^ 1u) < pixels ? i ^ 1u : i;
        size_t p = k % c->out_pixels, y = p / (size_t)c->out_w * step;
        size_t x = p % (size_t)c->out_w * (size_t)c->s.stride_w;
        terms[i].from = (uint32_t)k;
        terms[i].at = (uint32_t)(k / c->out_pixels * f->image + (y * f->pitch + x) * t->edge);
    }
}

/* Image n's rows into the padded image, whose margins are zero already, and that folded. Lanes beyond the last
   row spill into what is written next: into the next column, so the last rows go first. */
AMPI_FN void ampi_fold_image(const ampi_fold* f, const ampi_fold_tile* t, size_t n, float* padded,
                             float* folded) {
    const ampi_conv2d* c = f->c;
    const size_t width = (size_t)c->s.width, pad_h = (size_t)c->s.pad_h, pad_w = (size_t)c->s.pad_w;
    const size_t plane = n * (size_t)c->s.channels + t->g * c->cg + t->ch;
    size_t bottom = ((size_t)c->out_h - 1) * (size_t)c->s.stride_h + (size_t)c->s.kernel_h, ch, i, e;
    size_t rows = bottom > pad_h ? ampi_min_size(bottom - pad_h, (size_t)c->s.height) : 0;
    size_t columns = f->pitch > pad_w ? ampi_min_size(f->pitch - pad_w, width) : 0;
    size_t step = f->deep < (size_t)c->s.kernel_h ? 1 : (size_t)c->s.stride_h, lanes = f->gemm.lanes;
    float* wide = padded + f->padded - ampi_round_up(c->in_pixels, 16);
    void (*transpose)(float*, size_t, const float*, size_t, size_t, size_t) = f->gemm.transpose;
#if AMPI_X86
    if (lanes == 16 && t->edge <= 8) { lanes = 8; transpose = ampi_transpose_avx2; }
#endif
    for (ch = 0; ch < t->channels; ch++) {
        const float* src = (const float*)f->x + (plane + ch) * c->in_pixels;
        if (f->x_dtype != AMP_F32) {
            ampi_load_f32(wide, f->x, f->x_dtype, (plane + ch) * c->in_pixels, c->in_pixels);
            src = wide;
        }
        ampi_copy_rows(padded + (pad_h * t->channels + ch) * f->pitch + pad_w, t->channels * f->pitch, 1, src,
                       width, 1, rows, columns);
    }
    for (i = 0; i < f->lines; i++, folded += f->pitch * t->edge) {
        const float* src = padded + i * step * t->channels * f->pitch;
        for (e = ampi_round_up(t->edge, lanes); e > 0; e -= lanes)
            transpose(folded + e - lanes, t->edge, src + (e - lanes) * f->pitch, f->pitch,
                      ampi_round_up(f->pitch, 4), 0);
    }
}

/* The rows of dy of `images` images, as FP32. */
AMPI_FN void ampi_fold_dy(const ampi_fold* f, const ampi_fold_tile* t, size_t n0, size_t images, float* dst) {
    const ampi_conv2d* c = f->c;
    size_t o, n, p = c->out_pixels;
    for (o = 0; o < t->outs; o++, dst += f->line)
        for (n = 0; n < images; n++)
            ampi_load_f32(dst + n * p, f->dy, f->dy_dtype,
                          ((n0 + n) * (size_t)c->s.out_channels + t->g * c->og + t->o + o) * p, p);
}

/* Adds u's terms to all sums of the tile. */
AMPI_FN void ampi_fold_add(const ampi_fold* f, const ampi_fold_tile* tile, ampi_taps* u) {
    const size_t lanes = f->isa.lanes, line = f->pitch * tile->edge;
    const float* b = u->b;
    float* t = u->t;
    size_t v;
    for (v = 0; v < tile->vectors; v += 2) {
        size_t at = v / tile->part * line + v % tile->part * lanes, w = v + 1;
        u->two = w < tile->vectors;
        u->b = b + at;
        u->b_next = w / tile->part * line + w % tile->part * lanes - at;
        u->t = t + v * lanes;
        ampi_taps_rows(&f->isa, u, tile->outs);
    }
    u->b = b; u->t = t;
}

/* Adds images [n, n+images). The last pixel of an odd number of BF16 has a zero as its partner, which is added
   first and shows where a sum is -0. */
AMPI_FN void ampi_fold_unit(const ampi_fold* f, const ampi_fold_tile* t, size_t n, size_t images, ampi_taps* u,
                            float* slot) {
    const ampi_conv2d* c = f->c;
    const ampi_term* terms = (const ampi_term*)(const void*)slot;
    size_t i, k;
    for (k = 0; k < images; k++)
        ampi_fold_image(f, t, n + k, slot + f->at_padded, slot + f->at_folded + k * f->image);
    u->rs = f->line;
    u->a = slot + f->at_dy;
    if (f->dy_dtype == AMP_F32 && f->unit == 1) {
        u->rs = c->out_pixels;
        u->a = (const float*)f->dy + (n * (size_t)c->s.out_channels + t->g * c->og + t->o) * c->out_pixels;
    } else {
        ampi_fold_dy(f, t, n, images, slot + f->at_dy);
    }
    u->terms = terms;
    u->k = images * c->out_pixels;
    u->first = n == 0;
    if (!f->swap || u->k % 2 == 0) { ampi_fold_add(f, t, u); return; }
    u->k--;
    ampi_fold_add(f, t, u);
    for (i = 0; i < t->outs * f->ldt; i++) u->t[i] += 0.0f;
    u->terms = terms + f->unit * c->out_pixels;
    u->k = 1;
    u->first = 0;
    ampi_fold_add(f, t, u);
}

/* Sums [o][segment][(b,a,c)] to dw[o][(c,a,b)]. */
AMPI_FN void ampi_fold_store(const ampi_fold* f, const ampi_fold_tile* t, const float* sums, void* dw,
                             amp_dtype dtype, int accumulate) {
    const size_t taps = f->c->taps, kw = (size_t)f->c->s.kernel_w, columns = t->channels * taps;
    size_t o, k, n, a = 0, b = 0, ch = 0, count;
    for (o = t->g * f->c->og + t->o; o < t->g * f->c->og + t->o + t->outs; o++, sums += f->ldt, ch = 0)
        for (k = 0; k < columns; k += count) {
            float line[256];
            count = ampi_min_size(columns - k, 256);
            for (n = 0; n < count; n++) {
                const float* row = sums + (f->deep == 1 ? a * t->part * f->isa.lanes : a * t->channels);
                line[n] = row[b * t->edge + ch];
                if (++b < kw) continue;
                b = 0;
                if (++a < taps / kw) continue;
                a = 0; ch++;
            }
            ampi_store_sum(dw, dtype, (o * f->c->cg + t->ch) * taps + k, line, count, accumulate);
        }
}

/* dw, if it has a direct form for which the workspace has room. 0: it is still to be done. */
AMPI_FN int ampi_fold_run(const ampi_conv2d* c, const void* dy, amp_dtype dy_dtype, const void* x,
                          amp_dtype x_dtype, void* dw, amp_dtype dw_dtype, int accumulate,
                          const amp_exec* exec) {
    size_t room = ampi_room(exec);
    int swap = ampi_dtype(dy_dtype) == AMP_BF16 && ampi_dtype(x_dtype) == AMP_BF16;
    float* memory;
    int64_t slot;
    ampi_fold f;
    if (!ampi_fold_plan(&f, c, swap) || room < f.floats) return 0;
    f.slots = ampi_min_size(f.slots, room / f.floats);
    f.dy = dy; f.dy_dtype = ampi_dtype(dy_dtype);
    f.x = x; f.x_dtype = ampi_dtype(x_dtype);
    memory = ampi_align64(exec->workspace);
    AMPI_PARALLEL_FOR(f.slots > 1)
    for (slot = 0; slot < (int64_t)f.slots; slot++) {
        size_t task, n, images, tasks = f.out_tiles * f.channel_tiles * (size_t)c->s.groups;
        float* own = memory + (size_t)slot * f.floats;
        for (task = (size_t)slot; task < tasks; task += f.slots) {
            ampi_fold_tile t = ampi_fold_tile_of(&f, task);
            ampi_taps u;
            memset(&u, 0, sizeof u);
            memset(own + f.at_sums, 0, (f.floats - f.at_sums) * sizeof *own);
            ampi_fold_terms(&f, &t, (ampi_term*)(void*)own);
            u.b = own + f.at_folded;
            u.t = own + f.at_sums; u.ldt = f.ldt;
            u.repeat = 1;
            for (n = 0; n < (size_t)c->s.n; n += images) {
                images = ampi_min_size((size_t)c->s.n - n, f.unit);
                ampi_fold_unit(&f, &t, n, images, &u, own);
            }
            ampi_fold_store(&f, &t, own + f.at_sums, dw, dw_dtype, accumulate);
        }
    }
    return 1;
}

/* --- depthwise convolution: gradients of weights ---------------------------------------------- */

/* sum[t][l] += dy[i][l] * x[i*step + t*next + l], i < n, t < taps, l < 16: 16 channels abreast. */
AMPI_INLINE void ampi_depth_some(int hw, float* sum, const float* dy, const float* x, size_t n, size_t step,
                                 size_t next, size_t taps) {
    float s[5][16];
    size_t i, t, l;
    memcpy(s, sum, taps * sizeof *s);
    for (i = 0; i < n; i++, dy += 16, x += step)
        for (t = 0; t < taps; t++)
            for (l = 0; l < 16; l++) s[t][l] = ampi_fma(hw, dy[l], x[t * next + l], s[t][l]);
    memcpy(sum, s, taps * sizeof *s);
}
AMPI_INLINE void ampi_depth_row_body(int hw, float* sum, const float* dy, const float* x, size_t n, size_t step,
                                     size_t next, size_t taps) {
    for (; taps >= 5; taps -= 5, sum += 5 * 16, x += 5 * next) ampi_depth_some(hw, sum, dy, x, n, step, next, 5);
    for (; taps >= 3; taps -= 3, sum += 3 * 16, x += 3 * next) ampi_depth_some(hw, sum, dy, x, n, step, next, 3);
    for (; taps > 0; taps--, sum += 16, x += next) ampi_depth_some(hw, sum, dy, x, n, step, next, 1);
}
AMPI_KERNEL(ampi_depth_row,
            (float* sum, const float* dy, const float* x, size_t n, size_t step, size_t next, size_t taps),
            sum, dy, x, n, step, next, taps)

/* Where each channel has its own weights, lanes are channels: images lie as x[y][x][channel] with zeros around
   them, 16 channels at a time. Scratch memory of a thread: sums, dy, x, and planes on their way. */
typedef struct ampi_depth {
    size_t pitch, rows, line;                     /* padded image; floats of a plane on its way */
    size_t at_dy, at_x, at_tile, floats, slots;
} ampi_depth;
enum { AMPI_DEPTH_FLOATS = 262144 };

AMPI_FN int ampi_depth_plan(ampi_depth* d, const ampi_conv2d* c) {
    const amp_conv2d_shape* s = &c->s;
    memset(d, 0, sizeof *d);
    if (ampi_taps_isa_now().mr == 0 || c->taps == 1 || c->cg != 1 || c->og != 1 || s->groups < 8
        || !ampi_side_fits(s->height, c->out_h, s->kernel_h, 1, s->pad_h, s->dilation_h) || s->stride_h > 64
        || !ampi_side_fits(s->width, c->out_w, s->kernel_w, 1, s->pad_w, s->dilation_w) || s->stride_w > 64
        || s->dilation_h > 64 || s->dilation_w > 64) return 0;
    d->rows = (size_t)((c->out_h - 1) * s->stride_h + (s->kernel_h - 1) * s->dilation_h + 1);
    d->pitch = (size_t)((c->out_w - 1) * s->stride_w + (s->kernel_w - 1) * s->dilation_w + 1);
    if (d->rows > AMPI_DEPTH_FLOATS / 16 / d->pitch || c->in_pixels > AMPI_DEPTH_FLOATS / 16
        || c->out_pixels > AMPI_DEPTH_FLOATS / 16) return 0;
    d->line = ampi_round_up(ampi_max_size(c->in_pixels, c->out_pixels), 16) + AMPI_GEMM_GAP;
    d->at_dy = c->taps * 16;
    d->at_x = d->at_dy + c->out_pixels * 16;
    d->at_tile = d->at_x + d->rows * d->pitch * 16;
    d->floats = d->at_tile + 16 * d->line;
    d->slots = ampi_min_size(ampi_threads(), ((size_t)s->groups + 15) / 16);
    return 1;
}
AMPI_FN size_t ampi_depth_workspace(const ampi_conv2d* c) {
    ampi_depth d;
    return ampi_depth_plan(&d, c) ? d.slots * d.floats * sizeof(float) + 64 : 0;
}

/* Planes [first, first+planes) of `size` floats to read: `*ld` apart, 16 of them, the missing ones zero. */
AMPI_FN const float* ampi_depth_view(const ampi_depth* d, const void* data, amp_dtype t, size_t first,
                                     size_t planes, size_t size, float* tile, size_t* ld) {
    size_t i;
    *ld = size;
    if (ampi_dtype(t) == AMP_F32 && planes == 16) return (const float*)data + first * size;
    *ld = d->line;
    for (i = 0; i < 16; i++)
        if (i < planes) ampi_load_f32(tile + i * d->line, data, t, (first + i) * size, size);
        else memset(tile + i * d->line, 0, size * sizeof *tile);
    return tile;
}
/* dst[i][channel] from 16 rows of n floats. */
AMPI_FN void ampi_depth_abreast(const ampi_gemm_isa* g, float* dst, const float* src, size_t ld, size_t n) {
    size_t l;
    for (l = 0; l < 16; l += g->lanes) g->transpose(dst + l, 16, src + l * ld, ld, n, 0);
}

/* 16 channels of one image. */
AMPI_FN void ampi_depth_image(const ampi_depth* d, const ampi_conv2d* c, const ampi_gemm_isa* g, size_t first,
                              size_t planes, const void* dy, amp_dtype dy_dtype, const void* x, amp_dtype x_dtype,
                              float* slot) {
    const amp_conv2d_shape* s = &c->s;
    const size_t pad_h = (size_t)s->pad_h, pad_w = (size_t)s->pad_w, kw = (size_t)s->kernel_w;
    const size_t rows = d->rows > pad_h ? ampi_min_size(d->rows - pad_h, (size_t)s->height) : 0;
    const size_t columns = d->pitch > pad_w ? ampi_min_size(d->pitch - pad_w, (size_t)s->width) : 0;
    size_t ld, i, a;
    const float* src = ampi_depth_view(d, dy, dy_dtype, first, planes, c->out_pixels, slot + d->at_tile, &ld);
    ampi_depth_abreast(g, slot + d->at_dy, src, ld, c->out_pixels);
    src = ampi_depth_view(d, x, x_dtype, first, planes, c->in_pixels, slot + d->at_tile, &ld);
    for (i = 0; i < rows; i++)
        ampi_depth_abreast(g, slot + d->at_x + ((i + pad_h) * d->pitch + pad_w) * 16, src + i * (size_t)s->width, ld,
                           columns);
    for (i = 0; i < (size_t)c->out_h; i++)
        for (a = 0; a < (size_t)s->kernel_h; a++)
            ampi_depth_row(slot + a * kw * 16, slot + d->at_dy + i * (size_t)c->out_w * 16,
                           slot + d->at_x + (i * (size_t)s->stride_h + a * (size_t)s->dilation_h) * d->pitch * 16,
                           (size_t)c->out_w, (size_t)s->stride_w * 16, (size_t)s->dilation_w * 16, kw);
}

/* dw of a depthwise convolution, if the workspace has room. 0: it is still to be done. */
AMPI_FN int ampi_depth_run(const ampi_conv2d* c, const void* dy, amp_dtype dy_dtype, const void* x,
                           amp_dtype x_dtype, void* dw, amp_dtype dw_dtype, int accumulate, const amp_exec* exec) {
    size_t bytes = exec && exec->workspace ? exec->workspace_size : 0, groups = (size_t)c->s.groups;
    const ampi_gemm_isa isa = ampi_gemm_isa_now();
    int swap = ampi_dtype(dy_dtype) == AMP_BF16 && ampi_dtype(x_dtype) == AMP_BF16;
    float* memory;
    ampi_depth d;
    int64_t slot;
    if (swap || !ampi_depth_plan(&d, c) || bytes < d.floats * sizeof(float) + 64) return 0;
    memory = ampi_align64(exec->workspace);
    d.slots = ampi_min_size(d.slots, (bytes - 64) / sizeof(float) / d.floats);
    AMPI_PARALLEL_FOR(d.slots > 1)
    for (slot = 0; slot < (int64_t)d.slots; slot++) {
        float *own = memory + (size_t)slot * d.floats, one[256];
        size_t first, n, k, i, part;
        memset(own, 0, d.at_tile * sizeof *own);
        for (first = (size_t)slot * 16; first < groups; first += d.slots * 16) {
            size_t planes = ampi_min_size(groups - first, 16);
            memset(own, 0, c->taps * 16 * sizeof *own);
            for (n = 0; n < (size_t)c->s.n; n++)
                ampi_depth_image(&d, c, &isa, n * groups + first, planes, dy, dy_dtype, x, x_dtype, own);
            for (i = 0; i < planes; i++)
                for (k = 0; k < c->taps; k += part) {
                    size_t q;
                    part = ampi_min_size(c->taps - k, 256);
                    for (q = 0; q < part; q++) one[q] = own[(k + q) * 16 + i];
                    ampi_store_sum(dw, dw_dtype, (first + i) * c->taps + k, one, part, accumulate);
                }
        }
    }
    return 1;
}

#if AMPI_AMX
/* --- convolution on a matrix unit ---------------------------------------------------------- */

/* Outputs and input gradients: the image lies as words with zeros around it (the *stage*), plane upon plane, as in a
   direct convolution (see there): so 16 planes of 16 neighbouring words are a tile of B for any kernel place.
   A's tiles are the weights of 16 results, for one kernel place and 16 words of channels. The sum of a result runs
   over blocks of 16 words of channels (32 of BF16, 8 of FP16; the last filled up with zeros), and in a block over
   the kernel places (kh, kw), in the unit's order for each. Where there are strides, a plane is classes side by side,
   and each part of an input gradient has its own kernel places.
   A task is a band of rows of one image, or some whole images where the weights do not fit the cache: they are
   taken so many rows of tiles at a time that these do. */
typedef struct ampi_amx_conv {
    const ampi_conv2d* c;
    ampi_gemm_isa g;
    ampi_side h, w;
    size_t rows, depth, blocks;                   /* of a group: results, source channels, blocks of 16 words */
    size_t pitch, gap, class_size, plane, image;  /* floats of the stage */
    size_t band, bands, images, tall;             /* tall: results whose weights the cache holds */
    size_t weights, at_slots, floats, slots;      /* floats; weights: of a group */
    size_t at_line, at_sums;                      /* floats, in a slot */
    size_t begin[5];                              /* first kernel place of each part */
    uint32_t at[64];                              /* of a kernel place in the stage, in bytes; part by part */
    unsigned char order[64], uses[2][2];          /* where it comes among them; classes (of rows, columns) needed */
    const void* source; const void* w_data; const void* bias; void* result;
    amp_dtype dtype, bias_dtype, result_dtype;
} ampi_amx_conv;

/* Floats of a stage, of weights that the second-level cache keeps; most weights of a group of FP16, most kernel
   positions. */
enum { AMPI_AMX_STAGE = 163840, AMPI_AMX_WEIGHTS = 196608, AMPI_AMX_F16_WEIGHTS = 1048576,
       AMPI_AMX_TAPS = 64 };

/* An odd number of cache lines: rows of a tile that far apart fall on different cache sets. */
AMPI_FN size_t ampi_amx_gap(size_t floats) { return ((floats + 15) / 16 | 1u) * 16; }

AMPI_FN void ampi_amx_conv_stage(ampi_amx_conv* d, size_t band) {
    d->band = band;
    d->class_size = (band + (size_t)(d->h.high - d->h.low)) * d->pitch;
    d->plane = ampi_amx_gap((size_t)(d->h.classes * d->w.classes) * d->class_size + 16);
    d->image = d->blocks * AMPI_WORDS * d->plane;
}

/* Is the shape one for the unit, with operands of type t? FP16 takes four products for one: it gains where a pixel
   meets several kernel positions and the weights' words stay in a cache (weight gradients: and all strides are 1). */
AMPI_FN int ampi_amx_conv_gains(const ampi_conv2d* c, amp_dtype t) {
    const amp_conv2d_shape* s = &c->s;
    if (t == AMP_F16 && (c->taps == 1 || c->og * c->cg * c->taps > AMPI_AMX_F16_WEIGHTS)) return 0;
    return ampi_amx(0) && t != AMP_F32 && s->stride_h <= 2 && s->stride_w <= 2 && c->taps <= AMPI_AMX_TAPS
           && c->og >= 16 && c->cg >= 16
           && ampi_side_fits(s->height, c->out_h, s->kernel_h, 1, s->pad_h, s->dilation_h)
           && ampi_side_fits(s->width, c->out_w, s->kernel_w, 1, s->pad_w, s->dilation_w);
}
AMPI_FN int ampi_amx_conv_plan(ampi_amx_conv* d, const ampi_conv2d* c, int back, amp_dtype t) {
    const amp_conv2d_shape* s = &c->s;
    size_t threads = ampi_conv2d_threads(c), n = (size_t)s->n, height, row, most;
    memset(d, 0, sizeof *d);
    d->c = c;
    d->g = ampi_gemm_isa_amx(t);
    d->rows = back ? c->cg : c->og;
    d->depth = back ? c->og : c->cg;
    if (!ampi_amx_conv_gains(c, t)) return 0;
    ampi_conv2d_sides(c, back, &d->h, &d->w);
    d->blocks = ampi_words(&d->g, d->depth) / AMPI_WORDS;
    d->gap = ampi_side_gap(&d->w);
    d->pitch = (size_t)ampi_side_count(d->w.source, d->w.classes, 0) + d->gap;
    d->weights = ampi_round_up(d->rows, 16) * d->blocks * c->taps * AMPI_WORDS;
    height = (size_t)ampi_side_count(d->h.result, d->h.parts, 0);
    ampi_amx_conv_stage(d, 1);
    if (d->image > AMPI_AMX_STAGE) return 0;
    row = d->pitch * (size_t)(d->h.classes * d->w.classes);
    most = (AMPI_AMX_STAGE - d->image) / (d->blocks * AMPI_WORDS * row) + 1;
    d->bands = ampi_max_size(ampi_div_up(height, most), ampi_min_size(ampi_div_up(threads, n), height));
    ampi_amx_conv_stage(d, ampi_div_up(height, d->bands));
    d->bands = ampi_div_up(height, d->band);
    d->images = 1;
    d->tall = ampi_round_up(d->rows, 32);
    if (d->weights > AMPI_AMX_WEIGHTS) {
        d->tall = ampi_max_size(AMPI_AMX_WEIGHTS / (d->weights / d->tall) / 32, 1) * 32;
        if (d->bands == 1) d->images = ampi_min_size(AMPI_AMX_STAGE / d->image, ampi_div_up(n, threads));
    }
    d->at_slots = d->weights * (size_t)s->groups + 16;
    d->at_line = ampi_round_up(d->gap, 16) + d->images * d->image + 64;
    d->at_sums = d->at_line + (d->w.classes > 1 ? AMPI_WORDS * ampi_round_up((size_t)s->width, 16) : 0);
    d->floats = d->at_sums + (d->w.parts > 1 ? 4u : 1u) * 32 * 32;
    d->floats = ampi_max_size(d->floats, 2 * 16 * (16 * c->taps + AMPI_GEMM_GAP));      /* for weights on their way */
    d->slots = ampi_min_size(threads, ampi_div_up(n, d->images) * d->bands * (size_t)s->groups);
    return 1;
}
AMPI_FN size_t ampi_amx_conv_workspace(const ampi_conv2d* c, int back) {
    size_t floats = 0;
    int t;
    for (t = AMP_F16; t <= AMP_BF16; t++) {
        ampi_amx_conv d;
        if (!ampi_amx_conv_plan(&d, c, back, (amp_dtype)t)) continue;
        floats = ampi_max_size(floats, d.at_slots + d.slots * d.floats);
    }
    return floats * sizeof(float) + 64;
}

/* dst[tap][32] = src[32][tap], 16-bit elements, of which there are n. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_amx_deal(uint16_t* dst, const uint16_t* src, size_t taps, size_t n) {
    const __m512i ramp = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16,
                                          15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i each = _mm512_mullo_epi16(ramp, _mm512_set1_epi16((short)taps));
    size_t tap, v;
    for (tap = 0; tap < taps; tap++, dst += 32) {
        __m512i from = _mm512_add_epi16(each, _mm512_set1_epi16((short)tap)), all = _mm512_setzero_si512();
        for (v = 0; v < taps && 32 * v < n; v++, from = _mm512_sub_epi16(from, _mm512_set1_epi16(32))) {
            const __mmask32 here = _mm512_cmplt_epu16_mask(from, _mm512_set1_epi16(32));
            const __mmask32 whole = n - 32 * v >= 32 ? 0xffffffffu : (1u << (n - 32 * v)) - 1u;
            all = _mm512_mask_permutexvar_epi16(all, here, from, _mm512_maskz_loadu_epi16(whole, src + 32 * v));
        }
        _mm512_storeu_si512(dst, all);
    }
    ampi_clear_upper();
}
/* The weights of 16 results from row r and of 32 channels from k, raw[result][tap][channel];
   what is behind the last result never leaves the sums. */
AMPI_FN void ampi_amx_raw(const ampi_amx_conv* d, const uint16_t* w, size_t r, size_t k, float* raw, float* line) {
    const size_t taps = d->c->taps, rows = ampi_min_size(d->rows - r, 16), depth = ampi_min_size(d->depth - k, 32);
    size_t i;
    if (!d->h.back) {
        for (i = 0; i < rows; i++)
            ampi_amx_deal((uint16_t*)(void*)(raw + i * taps * 16), w + ((r + i) * d->depth + k) * taps, taps,
                          depth * taps);
    } else {
        size_t width = ampi_round_up(rows * taps, 16) + AMPI_GEMM_GAP;
        ampi_gemm_isa g = d->g;
        g.words = AMPI_WORDS_BF16;                /* whatever the bits mean */
        ampi_words_across(&g, line, width, w + (k * d->rows + r) * taps, AMP_BF16, d->rows * taps, depth,
                          rows * taps, 16, width - AMPI_GEMM_GAP, 1);
        g.transpose(raw, 16, line, width, rows * taps, 0);
    }
}
/* Weights as A's tiles: a[16 results][block][16][tap, part by part][16 words], for one 16 results of a group. */
AMPI_FN void ampi_amx_weights(const ampi_amx_conv* d, size_t group, size_t r, float* a, float* raw) {
    const size_t taps = d->c->taps, parts = d->g.words, block = 16 * taps * 16;
    const uint16_t* w = (const uint16_t*)d->w_data + group * d->c->og * d->c->cg * taps;
    float words[64], *line = raw + block;
    size_t k, i, q;
    for (k = 0; k < d->depth; k += 32, a += parts * block) {
        const int direct = parts == 1 && d->h.parts * d->w.parts == 1;
        ampi_amx_raw(d, w, r, k, direct ? a : raw, line);
        for (i = 0; !direct && i < 16 * taps; i++) {
            float* to = a + (i / taps * taps + d->order[i % taps]) * 16;
            ampi_words_along(words, raw + i * 16, d->dtype, 32, 16 * parts);
            for (q = 0; q < parts && k * parts / 32 + q < d->blocks; q++) memcpy(to + q * block, words + q * 16, 64);
        }
    }
}

/* A row of the stage; where columns fall into classes, 16 planes at a time by way of `line`. */
AMPI_FN void ampi_amx_conv_row(const ampi_amx_conv* d, float* dst, const uint16_t* src, float* line) {
    const size_t pixels = (size_t)(d->h.source * d->w.source), width = (size_t)d->w.source, some = 32 / d->g.words;
    const size_t wide = ampi_round_up(width, 16), classes = (size_t)d->w.classes, planes = d->blocks * AMPI_WORDS;
    size_t k, q;
    if (classes == 1) {
        ampi_words_across(&d->g, dst, d->plane, src, d->dtype, pixels, d->depth, width, planes, wide, 1);
        return;
    }
    for (k = 0; k < d->blocks; k++, dst += AMPI_WORDS * d->plane) {
        ampi_words_across(&d->g, line, wide, src + k * some * pixels, d->dtype, pixels, d->depth - k * some, width,
                          AMPI_WORDS, wide, 1);
        for (q = 0; q < classes; q++)
            if (d->uses[1][q])
                ampi_copy_rows(dst + q * d->class_size, d->plane, 1, line + q, wide, classes, AMPI_WORDS,
                               (size_t)ampi_side_count(d->w.source, d->w.classes, (int64_t)q));
    }
}
/* The stage of image n, rows of each class from u0 on. */
AMPI_FN void ampi_amx_conv_fill(const ampi_amx_conv* d, size_t group, size_t n, int64_t u0, float* stage, float* line) {
    const size_t pixels = (size_t)(d->h.source * d->w.source), channels = (size_t)d->c->s.groups * d->depth;
    const size_t wide = (size_t)d->w.classes;
    const uint16_t* src = (const uint16_t*)d->source + (n * channels + group * d->depth) * pixels;
    int64_t q, r, y;
    size_t k, i;
    for (q = 0; q < d->h.classes; q++, stage += wide * d->class_size)
        for (r = 0; d->uses[0][q] && r < (int64_t)d->band + d->h.high - d->h.low; r++) {
            float* to = stage + (size_t)r * d->pitch;
            y = d->h.classes * (u0 + d->h.low + r) + q;
            if (y >= 0 && y < d->h.source)
                ampi_amx_conv_row(d, to, src + (size_t)(y * d->w.source), line);
            else for (k = 0; k < d->blocks * AMPI_WORDS; k++)
                for (i = 0; i < wide; i++)
                    memset(to + k * d->plane + i * d->class_size, 0, d->pitch * sizeof *to);
        }
}

/* wide[rows][64] = the 32 columns of two parts, t[2][32][32], by turns. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_amx_zip(float* wide, const float* t, size_t rows) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    size_t i;
    for (i = 0; i < 2 * rows; i++, t += 16, wide += 32) {
        __m512 even = _mm512_loadu_ps(t), odd = _mm512_loadu_ps(t + 32 * 32);
        _mm512_storeu_ps(wide, _mm512_permutex2var_ps(even, low, odd));
        _mm512_storeu_ps(wide + 16, _mm512_permutex2var_ps(even, high, odd));
    }
    ampi_clear_upper();
}
/* Sums t[rows][32 of each part], of positions [p, end) of a stage, into the planes of the result from row y0 on. */
AMPI_FN void ampi_amx_conv_store(const ampi_amx_conv* d, size_t plane, size_t bias, size_t rows, size_t y0, size_t p,
                                 size_t end, const float* t) {
    const size_t width = (size_t)d->w.result, pixels = (size_t)d->h.result * width, parts = (size_t)d->w.parts;
    size_t count, from = p;
    ampi_finish f;
    memset(&f, 0, sizeof f);
    f.c_dtype = d->result_dtype; f.ldc = pixels;
    f.alpha = f.beta = 1.0f;
    f.add_dtype = d->bias_dtype; f.ld_add = 1; f.spread = 1;
    if (d->bias) f.add = (const char*)d->bias + bias * amp_dtype_size(d->bias_dtype);
    for (; p < end; p += count) {
        const size_t column = p % d->pitch * parts, y = y0 + p / d->pitch * (size_t)d->h.parts;
        count = ampi_min_size(d->pitch - p % d->pitch, end - p);
        if (column >= width) continue;
        f.c = (char*)d->result + (plane * pixels + y * width + column) * amp_dtype_size(f.c_dtype);
        d->g.finish(&f, rows, ampi_min_size(width - column, count * parts), t + (p - from) * parts, 32 * parts);
    }
}

/* The results of a task in rows of part rh, from its stage. */
AMPI_FN void ampi_amx_conv_multiply(const ampi_amx_conv* d, size_t group, size_t image, size_t images, size_t u0,
                                    size_t rh, const float* weights, const float* stage, float* t) {
    const size_t taps = d->c->taps, tile = taps * d->blocks * AMPI_WORDS;      /* of a row of weights */
    const size_t parts = (size_t)d->w.parts, y0 = u0 * (size_t)d->h.parts + rh;
    const size_t height = (size_t)ampi_side_count(d->h.result, d->h.parts, (int64_t)rh);
    const size_t n = (ampi_min_size(height - u0, d->band) - 1) * d->pitch
                     + (size_t)ampi_side_count(d->w.result, d->w.parts, 0);
    size_t chunk, i, p, r, rw;
    ampi_amx_sum u;
    u.rs = taps * 64; u.a_next = 16 * tile * sizeof(float); u.step = 64;
    u.bs = d->plane * sizeof(float); u.b_next = 64; u.b_block = 16 * u.bs;
    u.passing = 1;
    u.blocks = d->blocks;
    u.old = NULL; u.ldt = 32; u.right = 16; u.down = 16 * 32;
    for (chunk = 0; chunk < d->rows; chunk += d->tall)
        for (i = 0; i < images; i++)
            for (p = 0; p < n; p += 32)
                for (r = chunk; r < ampi_min_size(chunk + d->tall, d->rows); r += 32) {
                    size_t first = group * d->rows + r, count = ampi_min_size(d->rows - r, 32);
                    u.b = (const char*)(stage + i * d->image + p) - (size_t)-d->w.low * sizeof(float);
                    for (rw = 0; rw < parts; rw++) {
                        const size_t* begin = d->begin + rh * parts + rw;
                        u.at = d->at + begin[0]; u.taps = begin[1] - begin[0];
                        u.a = (const char*)(weights + r * tile + begin[0] * 16);
                        u.a_skip = (16 * taps - u.taps) * 64;
                        u.t = t + rw * 32 * 32;
                        ampi_amx_run(&u, count > 16, n - p > 16);
                    }
                    if (parts > 1) ampi_amx_zip(t + 2 * 32 * 32, t, count);
                    ampi_amx_conv_store(d, (image + i) * (size_t)d->c->s.groups * d->rows + first, first, count, y0, p,
                                        ampi_min_size(p + 32, n), parts > 1 ? t + 2 * 32 * 32 : t);
                }
}
AMPI_FN void ampi_amx_conv_slot(const ampi_amx_conv* d, size_t slot, const float* weights, float* memory) {
    const size_t groups = (size_t)d->c->s.groups, n = (size_t)d->c->s.n, tasks = ampi_div_up(n, d->images) * d->bands;
    float* stage = memory + ampi_round_up(d->gap, 16);
    size_t task, i, rh;
    memset(memory, 0, d->floats * sizeof *memory);
    ampi_amx_open();
    for (task = slot; task < tasks * groups; task += d->slots) {
        size_t group = task / tasks, image = task % tasks / d->bands * d->images, u0 = task % d->bands * d->band;
        size_t images = ampi_min_size(n - image, d->images);
        for (i = 0; i < images; i++)
            ampi_amx_conv_fill(d, group, image + i, (int64_t)u0, stage + i * d->image, memory + d->at_line);
        for (rh = 0; rh < (size_t)ampi_min_i64(d->h.parts, d->h.result - (int64_t)u0 * d->h.parts); rh++)
            ampi_amx_conv_multiply(d, group, image, images, u0, rh, weights + group * d->weights, stage,
                                   memory + d->at_sums);
    }
    ampi_amx_close();
}
/* Where the kernel places lie, part by part. */
AMPI_FN void ampi_amx_conv_taps(ampi_amx_conv* d) {
    const int64_t kw = d->w.kernel;
    int64_t rh, rw, i, shift_h, shift_w, class_h, class_w;
    size_t part = 0, n = 0;
    for (rh = 0; rh < d->h.parts; rh++)
        for (rw = 0; rw < d->w.parts; rw++, d->begin[++part] = n)
            for (i = 0; i < kw * d->h.kernel; i++) {
                if (!ampi_side_tap(&d->h, rh, i / kw, &shift_h, &class_h)
                    || !ampi_side_tap(&d->w, rw, i % kw, &shift_w, &class_w)) continue;
                d->uses[0][class_h] = d->uses[1][class_w] = 1;
                d->order[i] = (unsigned char)n;
                d->at[n++] = (uint32_t)(((class_h * d->w.classes + class_w) * (int64_t)d->class_size
                                         + (shift_h - d->h.low) * (int64_t)d->pitch + shift_w - d->w.low)
                                        * (int64_t)sizeof(float));
            }
}

/* The convolution, if the unit is asked for, the shape is one for it, and the workspace has room. */
AMPI_FN int ampi_amx_conv_run(const ampi_conv2d* c, int back, const void* source, amp_dtype source_dtype, const void* w,
                              amp_dtype w_dtype, const void* b, amp_dtype b_dtype, void* result, amp_dtype result_dtype,
                              const amp_exec* exec) {
    const size_t room = ampi_room(exec);
    size_t tiles;
    int64_t i;
    float* memory;
    ampi_amx_conv d;
    if (!exec || exec->sums != AMP_SUMS_FAST || source_dtype != w_dtype || !ampi_amx(1)
        || !ampi_amx_conv_plan(&d, c, back, source_dtype) || room < d.at_slots + d.floats) return 0;
    d.source = source; d.w_data = w; d.bias = b; d.result = result;
    d.dtype = source_dtype; d.bias_dtype = ampi_dtype(b_dtype); d.result_dtype = ampi_dtype(result_dtype);
    d.slots = ampi_min_size(d.slots, (room - d.at_slots) / d.floats);
    ampi_amx_conv_taps(&d);
    memory = ampi_align64(exec->workspace);
    tiles = ampi_div_up(d.rows, 16);
    AMPI_PARALLEL_FOR(d.slots > 1)
    for (i = 0; i < (int64_t)d.slots; i++) {
        size_t q;
        for (q = (size_t)i; q < tiles * (size_t)c->s.groups; q += d.slots)
            ampi_amx_weights(&d, q / tiles, q % tiles * 16, memory + q * (d.weights / tiles),
                             memory + d.at_slots + (size_t)i * d.floats);
    }
    AMPI_PARALLEL_FOR(d.slots > 1)
    for (i = 0; i < (int64_t)d.slots; i++)
        ampi_amx_conv_slot(&d, (size_t)i, memory, memory + d.at_slots + (size_t)i * d.floats);
    return 1;
}

/* Weight gradients: a tile of A is x's rows of 16 channels, from any pixel on, one of B dy's of 16 outputs, pairs of
   pixels side by side. The sum runs over the images, in each over the output's rows, a row `pitch` pixels long (with
   zeros behind those of dy), 32 of these places at a time (8 of FP16; the last of an image filled up with
   zeros), in the unit's order for each. All images lie in memory as such tiles, or as many as there is room for: then
   the sums wait in memory. Where there are strides, x with its margins falls into classes. A task is 32 channels and 32
   outputs. */
typedef struct ampi_amx_depth {
    const ampi_conv2d* c;
    ampi_gemm_isa g;
    size_t unit, pitch, class_size, plane;        /* bytes of a place of x; places of a row; bytes */
    size_t classes_h, classes_w;
    size_t steps, turn, some;                     /* tiles of an image; tiles and images of one turn */
    size_t channels, outputs;                     /* of a group, in sixteens */
    size_t images, passes;
    size_t at_dy, at_sums, at_slots, floats, slots;      /* floats */
    const void *x, *dy; void* dw; amp_dtype dtype, dw_dtype;
    int accumulate;
} ampi_amx_depth;

/* Floats of x and dy; tiles that the first-level cache holds twice. */
enum { AMPI_AMX_IMAGES = 1048576, AMPI_AMX_TURN = 10 };

AMPI_FN int ampi_amx_depth_plan(ampi_amx_depth* d, const ampi_conv2d* c, amp_dtype t) {
    const amp_conv2d_shape* s = &c->s;
    size_t n = (size_t)s->n, groups = (size_t)s->groups, stride_h = (size_t)s->stride_h, stride_w = (size_t)s->stride_w;
    size_t places, beside, image, line, sums, tasks;
    memset(d, 0, sizeof *d);
    d->c = c;
    d->g = ampi_gemm_isa_amx(t);
    if (!ampi_amx_conv_gains(c, t) || (t == AMP_F16 && stride_h * stride_w > 1)) return 0;
    d->unit = t == AMP_F16 ? 8 : 2;
    d->classes_h = s->kernel_h > 1 ? stride_h : 1;
    d->classes_w = s->kernel_w > 1 ? stride_w : 1;
    d->pitch = ampi_max_size((size_t)c->out_w, ampi_div_up((size_t)(s->width + s->pad_w), stride_w));
    places = ampi_round_up(((size_t)c->out_h - 1) * d->pitch + (size_t)c->out_w, 64 / d->unit);
    d->steps = places * d->unit / 64;
    beside = (size_t)((s->kernel_h - 1) * s->dilation_h) / stride_h * d->pitch
             + (size_t)((s->kernel_w - 1) * s->dilation_w) / stride_w;
    d->class_size = ampi_round_up((places + beside + d->pitch + 1) * d->unit + 64, 64);
    d->plane = ampi_amx_gap(d->classes_h * d->classes_w * d->class_size / 4) * 4;
    d->channels = ampi_div_up(c->cg, 16);
    d->outputs = ampi_div_up(c->og, 16);
    image = groups * (d->channels * 4 * d->plane + d->outputs * d->steps * 256);
    if (image > AMPI_AMX_IMAGES || d->steps > 65536) return 0;
    d->images = ampi_min_size(AMPI_AMX_IMAGES / image, n);
    d->passes = ampi_div_up(n, d->images);
    d->images = ampi_div_up(n, d->passes);
    d->some = ampi_max_size(ampi_min_size(AMPI_AMX_TURN / d->steps, d->images), 1);
    d->turn = ampi_div_up(d->steps, ampi_div_up(d->steps, AMPI_AMX_TURN));
    line = 16 * (ampi_max_size(16 * c->taps + 16, 16 * d->steps) + AMPI_GEMM_GAP);
    sums = (4 * c->taps + 16) * 256;
    tasks = groups * ampi_div_up(d->channels, 2) * ampi_div_up(d->outputs, 2);
    d->at_dy = groups * d->images * d->channels * 4 * d->plane;
    d->at_sums = d->at_dy + groups * d->images * d->outputs * d->steps * 256;
    d->at_slots = d->at_sums + (d->passes > 1 ? tasks * sums : 0);
    d->floats = ampi_round_up(line, 16) + sums;
    d->slots = ampi_min_size(ampi_conv2d_threads(c), tasks);
    return 1;
}
AMPI_FN size_t ampi_amx_depth_workspace(const ampi_conv2d* c) {
    size_t floats = 0;
    int t;
    for (t = AMP_F16; t <= AMP_BF16; t++) {
        ampi_amx_depth d;
        if (ampi_amx_depth_plan(&d, c, (amp_dtype)t)) floats = ampi_max_size(floats, d.at_slots + d.slots * d.floats);
    }
    return floats * sizeof(float) + 64;
}

/* Rows of n 16-bit elements, every one or every second of the source; distances in bytes. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_amx_rows_by(size_t step, char* dst, size_t ldd, const char* src, size_t lds,
                                                     size_t rows, size_t n) {
    size_t i;
    for (; rows > 0; rows--, dst += ldd, src += lds)
        for (i = 0; i < n; i += 32 / step) {
            const size_t rest = step * (n - i) + 1 - step;
            const __mmask32 mask = rest >= 32 ? 0xffffffffu : (1u << rest) - 1u;
            const __m512i x = _mm512_maskz_loadu_epi16(mask, src + 2 * step * i);
            if (step == 1) _mm512_mask_storeu_epi16(dst + 2 * i, mask, x);
            else _mm256_mask_storeu_epi16(dst + 2 * i, AMPI_V16_MASK(ampi_min_size(n - i, 16)),
                                          _mm512_maskz_cvtepi32_epi16(AMPI_V16_ALL, x));
        }
    ampi_clear_upper();
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_amx_rows(size_t step, char* dst, size_t ldd, const char* src, size_t lds,
                                              size_t rows, size_t n) {
    if (step == 1) ampi_amx_rows_by(1, dst, ldd, src, lds, rows, n);
    else ampi_amx_rows_by(2, dst, ldd, src, lds, rows, n);
}
/* x of an image, 16 channels from c: pixel (y, x) lies at ((y + pad_h) / stride_h, (x + pad_w) / stride_w) in the class
   that the remainders make. */
AMPI_FN void ampi_amx_depth_x(const ampi_amx_depth* d, size_t group, size_t n, size_t c, char* to) {
    const amp_conv2d_shape* s = &d->c->s;
    const size_t sh = (size_t)s->stride_h, sw = (size_t)s->stride_w, pad_h = (size_t)s->pad_h, pad_w = (size_t)s->pad_w;
    const size_t channels = ampi_min_size(d->c->cg - c, 16), lds = sh * (size_t)s->width * 2, ldd = d->pitch * d->unit;
    const char* src = (const char*)d->x + ((n * (size_t)s->groups + group) * d->c->cg + c) * d->c->in_pixels * 2;
    size_t i, q, r;
    memset(to, 0, 16 * d->plane);
    for (q = 0; q < d->classes_h * d->classes_w; q++, to += d->class_size) {
        const size_t y = (q / d->classes_w + sh - pad_h % sh) % sh, x = (q % d->classes_w + sw - pad_w % sw) % sw;
        const size_t rows = ((size_t)s->height + sh - 1 - y) / sh, columns = ((size_t)s->width + sw - 1 - x) / sw;
        const char* from = src + (y * (size_t)s->width + x) * 2;
        char* first = to + ((y + pad_h) / sh * d->pitch + (x + pad_w) / sw) * d->unit;
        for (i = 0; i < channels; i++, first += d->plane, from += d->c->in_pixels * 2) {
            if (d->unit == 2) ampi_amx_rows(sw, first, ldd, from, lds, rows, columns);
            else for (r = 0; r < rows; r++)
                ampi_words_along((float*)(void*)(first + r * ldd), from + r * lds, d->dtype, columns, 2 * columns);
        }
    }
}
/* dy of an image, 16 outputs from o. */
AMPI_FN void ampi_amx_depth_dy(const ampi_amx_depth* d, size_t group, size_t n, size_t o, float* to, float* line) {
    const size_t width = (size_t)d->c->out_w, pairs = d->steps * 32 / d->unit, ld = pairs + AMPI_GEMM_GAP;
    const size_t outputs = ampi_min_size(d->c->og - o, 16), size = d->c->out_pixels * 2;
    const char* src = (const char*)d->dy + ((n * (size_t)d->c->s.groups + group) * d->c->og + o) * size;
    float* turned = d->unit == 2 ? to : line + 16 * ld;
    size_t i;
    memset(line, 0, 16 * ld * sizeof *line);
    for (i = 0; i < outputs; i++)
        ampi_amx_rows(1, (char*)(line + i * ld), d->pitch * 2, src + i * size, width * 2, (size_t)d->c->out_h, width);
    d->g.transpose(turned, 16, line, ld, pairs, 0);
    if (d->unit != 2) ampi_words_of_pairs(to, 16, turned, pairs);
}
/* A slot's share of the images from `first` on, as tiles. */
AMPI_FN void ampi_amx_depth_fill(const ampi_amx_depth* d, size_t slot, size_t first, size_t images, float* memory) {
    const size_t groups = (size_t)d->c->s.groups;
    float* line = memory + d->at_slots + slot * d->floats;
    size_t q;
    for (q = slot; q < images * groups * d->channels; q += d->slots)
        ampi_amx_depth_x(d, q / d->channels % groups, first + q / d->channels / groups, q % d->channels * 16,
                         (char*)memory + q * 16 * d->plane);
    for (q = slot; q < images * groups * d->outputs; q += d->slots)
        ampi_amx_depth_dy(d, q / d->outputs % groups, first + q / d->outputs / groups, q % d->outputs * 16,
                          memory + d->at_dy + q * d->steps * 256, line);
}

/* Sums t[channels, 2][outputs, 2][tap][16][16] of the 32 channels from 16*c, the 32 outputs from 16*o. */
AMPI_FN void ampi_amx_depth_multiply(const ampi_amx_depth* d, size_t group, size_t c, size_t o, size_t images, int old,
                                     const float* memory, float* t) {
    const size_t taps = d->c->taps, groups = (size_t)d->c->s.groups, kw = (size_t)d->c->s.kernel_w;
    const size_t image = groups * d->channels * 16 * d->plane, dy_image = groups * d->outputs * d->steps * 1024;
    const char* first = (const char*)memory + (group * d->channels + c) * 16 * d->plane;
    const amp_conv2d_shape* s = &d->c->s;
    const char* dy = (const char*)(memory + d->at_dy) + (group * d->outputs + o) * d->steps * 1024;
    uint32_t at[AMPI_AMX_TURN];
    size_t i, j, tap;
    ampi_amx_sum u;
    for (j = 0; j < d->turn; j++) at[j] = (uint32_t)(j * 1024);
    u.rs = d->plane; u.a_next = 16 * u.rs; u.step = 64;
    u.bs = 64; u.b_next = d->steps * 1024; u.b_block = dy_image;
    u.passing = 0;
    u.at = at; u.ldo = u.ldt = 16; u.old_right = u.right = taps * 256; u.old_down = u.down = 2 * taps * 256;
    for (i = 0; i < images; i += d->some)
        for (j = 0; j < d->steps; j += d->turn)
            for (tap = 0; tap < taps; tap++) {
                const size_t y = tap / kw * (size_t)s->dilation_h, sh = (size_t)s->stride_h;
                const size_t x = tap % kw * (size_t)s->dilation_w, sw = (size_t)s->stride_w;
                u.taps = ampi_min_size(d->turn, d->steps - j);
                u.blocks = ampi_min_size(d->some, images - i);
                u.a_skip = image - u.taps * 64;
                u.a = first + i * image + (y % sh * d->classes_w + x % sw) * d->class_size
                      + (y / sh * d->pitch + x / sw) * d->unit + j * 64;
                u.b = dy + i * dy_image + j * 1024;
                u.t = t + tap * 256;
                u.old = old || i > 0 || j > 0 ? u.t : NULL;
                ampi_amx_run(&u, c + 1 < d->channels, o + 1 < d->outputs);
            }
}
/* The sums of 16 channels from c, 16 outputs from o, t[tap][channel][output], into dw. */
AMPI_FN void ampi_amx_depth_store(const ampi_amx_depth* d, size_t group, size_t c, size_t o, const float* t,
                                  float* line) {
    const size_t taps = d->c->taps, ld = 16 * taps + 16 + AMPI_GEMM_GAP, channels = ampi_min_size(d->c->cg - c, 16);
    ampi_finish f;
    size_t i, tap;
    for (i = 0; i < channels; i++)                /* what is behind the last tap is overwritten by the next channel */
        for (tap = 0; tap < taps; tap += 16)
            d->g.transpose(line + i * taps + tap, ld, t + tap * 256 + i * 16, 256, 16, 0);
    memset(&f, 0, sizeof f);
    f.c_dtype = f.add_dtype = d->dw_dtype; f.ldc = f.ld_add = d->c->cg * taps;
    f.c = (char*)d->dw + ((group * d->c->og + o) * d->c->cg + c) * taps * amp_dtype_size(d->dw_dtype);
    f.alpha = f.beta = 1.0f;
    f.add = d->accumulate ? f.c : NULL;
    d->g.finish(&f, ampi_min_size(d->c->og - o, 16), channels * taps, line, ld);
}
/* A slot's share of the tasks. */
AMPI_FN void ampi_amx_depth_slot(const ampi_amx_depth* d, size_t slot, size_t pass, size_t images, float* memory) {
    const size_t taps = d->c->taps, wide = ampi_div_up(d->outputs, 2), high = ampi_div_up(d->channels, 2);
    const size_t tasks = (size_t)d->c->s.groups * wide * high;
    float *line = memory + d->at_slots + slot * d->floats, *own = line + d->floats - (4 * taps + 16) * 256;
    size_t task, q;
    ampi_amx_open();
    for (task = slot * tasks / d->slots; task < (slot + 1) * tasks / d->slots; task++) {
        size_t group = task / wide / high, o = task / high % wide * 2, c = task % high * 2;
        float* t = d->passes > 1 ? memory + d->at_sums + task * 4 * taps * 256 : own;
        ampi_amx_depth_multiply(d, group, c, o, images, pass > 0, memory, t);
        for (q = 0; pass + 1 == d->passes && q < 4; q++)
            if (c + q / 2 < d->channels && o + q % 2 < d->outputs)
                ampi_amx_depth_store(d, group, (c + q / 2) * 16, (o + q % 2) * 16, t + q * taps * 256, line);
    }
    ampi_amx_close();
}

/* dw, on the same conditions. */
AMPI_FN int ampi_amx_depth_run(const ampi_conv2d* c, const void* dy, amp_dtype dy_dtype, const void* x,
                               amp_dtype x_dtype, void* dw, amp_dtype dw_dtype, int accumulate,
                               const amp_exec* exec) {
    const size_t room = ampi_room(exec);
    size_t pass;
    ampi_amx_depth d;
    if (!exec || exec->sums != AMP_SUMS_FAST || x_dtype != dy_dtype || !ampi_amx(1)
        || !ampi_amx_depth_plan(&d, c, x_dtype) || room < d.at_slots + d.floats) return 0;
    d.x = x; d.dy = dy; d.dw = dw;
    d.dtype = x_dtype; d.dw_dtype = ampi_dtype(dw_dtype); d.accumulate = accumulate;
    d.slots = ampi_min_size(d.slots, (room - d.at_slots) / d.floats);
    for (pass = 0; pass < d.passes; pass++) {
        size_t first = pass * d.images, images = ampi_min_size((size_t)c->s.n - first, d.images);
        float* memory = ampi_align64(exec->workspace);
        int64_t i;
        AMPI_PARALLEL_FOR(d.slots > 1)
        for (i = 0; i < (int64_t)d.slots; i++) ampi_amx_depth_fill(&d, (size_t)i, first, images, memory);
        AMPI_PARALLEL_FOR(d.slots > 1)
        for (i = 0; i < (int64_t)d.slots; i++) ampi_amx_depth_slot(&d, (size_t)i, pass, images, memory);
    }
    return 1;
}
#else
AMPI_FN size_t ampi_amx_conv_workspace(const ampi_conv2d* c, int back) { (void)c; (void)back; return 0; }
AMPI_FN int ampi_amx_conv_run(const ampi_conv2d* c, int back, const void* source, amp_dtype source_dtype, const void* w,
                              amp_dtype w_dtype, const void* b, amp_dtype b_dtype, void* result, amp_dtype result_dtype,
                              const amp_exec* exec) {
    (void)c; (void)back; (void)source; (void)source_dtype; (void)w; (void)w_dtype; (void)b; (void)b_dtype; (void)result;
    (void)result_dtype; (void)exec;
    return 0;
}
AMPI_FN size_t ampi_amx_depth_workspace(const ampi_conv2d* c) { (void)c; return 0; }
AMPI_FN int ampi_amx_depth_run(const ampi_conv2d* c, const void* dy, amp_dtype dy_dtype, const void* x,
                               amp_dtype x_dtype, void* dw, amp_dtype dw_dtype, int accumulate,
                               const amp_exec* exec) {
    (void)c; (void)dy; (void)dy_dtype; (void)x; (void)x_dtype; (void)dw; (void)dw_dtype; (void)accumulate; (void)exec;
    return 0;
}
#endif

enum { AMPI_CONV_WIDE = 64 };                     /* pixels of an image that make a product of their own */

/* Bytes for a product of words: its blocks of k may be a little deeper than FP32's. */
AMPI_FN size_t ampi_words_workspace(size_t m, size_t n, size_t k) {
    const ampi_gemm_isa g = ampi_gemm_isa_pairs();
    const ampi_gemm_plan p = ampi_gemm_plan_full(&g, m, n, k + k % 2);
    return p.slots * p.floats * sizeof(float) + 128;
}
/* Elements from one row of a group's turned weights (see ampi_conv2d_turn) to the next, not on the same cache sets,
   and floats of all of them. */
AMPI_FN size_t ampi_turned_ld(const ampi_conv2d* c) {
    const size_t ld = ampi_round_up(c->og * c->taps, 32);
    return ld % 512 == 0 ? ld + 32 : ld;
}
AMPI_FN size_t ampi_turned_floats(const ampi_conv2d* c) { return c->cg * ampi_turned_ld(c) / 2; }
AMP_DEF size_t amp_conv2d_workspace(const amp_conv2d_shape* s) {
    ampi_conv2d c;
    size_t y, dw, dx, n;
    if (ampi_conv2d_init(&c, s, NULL) != AMP_OK) return 0;
    n = (size_t)c.s.n;
    y = amp_gemm_workspace(c.og, n * c.out_pixels, c.cg * c.taps);
    dw = amp_gemm_workspace(c.og, c.cg * c.taps, n * c.out_pixels);
    dx = amp_gemm_workspace(c.cg, n * c.in_pixels, c.og * c.taps);
    y = ampi_max_size(y, ampi_words_workspace(c.og, n * c.out_pixels, c.cg * c.taps));
    dw = ampi_max_size(dw, ampi_words_workspace(c.og, c.cg * c.taps, n * c.out_pixels));
    dx = ampi_max_size(dx, ampi_words_workspace(c.cg, n * c.in_pixels, c.og * c.taps)
                           + ampi_turned_floats(&c) * sizeof(float));
    y = ampi_max_size(y, ampi_max_size(ampi_abreast_workspace(&c, 0), ampi_stencil_workspace(&c, 0)));
    y = ampi_max_size(y, ampi_max_size(ampi_amx_conv_workspace(&c, 0), ampi_amx_conv_workspace(&c, 1)));
    if (c.taps == 1) {                            /* image by image */
        y = ampi_max_size(y, amp_gemm_workspace(c.og, c.out_pixels, c.cg));
        dx = ampi_max_size(dx, amp_gemm_workspace(c.cg, c.in_pixels, c.og));
    }
    dw = ampi_max_size(dw, ampi_amx_depth_workspace(&c));
    dw = ampi_max_size(dw, ampi_max_size(ampi_fold_workspace(&c), ampi_depth_workspace(&c)));
    dx = ampi_max_size(dx, ampi_max_size(ampi_abreast_workspace(&c, 1), ampi_stencil_workspace(&c, 1)));
    return ampi_max_size(y, ampi_max_size(dw, dx));
}

/* planes[N, channels, size] of one group as an operand: run = channel, position = (image, place in the
   plane). */
AMPI_FN ampi_image ampi_planes(size_t channels, size_t size) {
    ampi_image g;
    memset(&g, 0, sizeof g);
    g.image_stride = channels * size;
    g.channel_stride = size;
    g.kernel_h = g.kernel_w = g.rows = 1;
    g.cols = size;
    g.height = 1;
    g.width = (int64_t)size;
    g.mul_h = g.mul_w = g.div_h = g.div_w = 1;
    return g;
}

/* x as the outputs see it (im2col): run = (channel, kernel row, kernel column), position = (image, output
   pixel). */
AMPI_FN ampi_image ampi_unfold_input(const ampi_conv2d* c) {
    ampi_image g = ampi_planes((size_t)c->s.channels, c->in_pixels);
    g.kernel_h = (size_t)c->s.kernel_h; g.kernel_w = (size_t)c->s.kernel_w;
    g.rows = (size_t)c->out_h; g.cols = (size_t)c->out_w;
    g.height = c->s.height; g.width = c->s.width;
    g.mul_h = c->s.stride_h; g.mul_w = c->s.stride_w;
    g.base_h = -c->s.pad_h; g.base_w = -c->s.pad_w;
    g.step_h = c->s.dilation_h; g.step_w = c->s.dilation_w;
    return g;
}

/* dy as the input's pixels see it: run = (output channel, kernel row, kernel column), position = (image,
   input pixel); input row i met output row (i + pad - a*dilation) / stride at kernel row a. */
AMPI_FN ampi_image ampi_unfold_output(const ampi_conv2d* c) {
    ampi_image g = ampi_planes((size_t)c->s.out_channels, c->out_pixels);
    g.kernel_h = (size_t)c->s.kernel_h; g.kernel_w = (size_t)c->s.kernel_w;
    g.rows = (size_t)c->s.height; g.cols = (size_t)c->s.width;
    g.height = c->out_h; g.width = c->out_w;
    g.base_h = c->s.pad_h; g.base_w = c->s.pad_w;
    g.step_h = -c->s.dilation_h; g.step_w = -c->s.dilation_w;
    g.div_h = c->s.stride_h; g.div_w = c->s.stride_w;
    return g;
}

AMPI_FN ampi_operand ampi_image_operand(const ampi_image* image, const void* data, amp_dtype dtype,
                                        size_t offset, size_t runs, size_t length, int along_k) {
    ampi_operand v = ampi_matrix(data, dtype, runs, length, 0, along_k);
    v.offset = offset;
    v.image = image;
    return v;
}

/* The products of one group g. An image operand points into `images`, so that must live as long as s.
   y[o, (n,p)] = sum over (c, a, b) ascending of w[o, (c,a,b)] * x unfolded. */
AMPI_FN void ampi_conv2d_y(ampi_product* s, ampi_image images[2], const ampi_conv2d* c, size_t g,
                           const void* x, amp_dtype x_dtype, const void* w, amp_dtype w_dtype, const void* b,
                           amp_dtype b_dtype, void* y, amp_dtype y_dtype) {
    size_t depth = c->cg * c->taps, pixels = (size_t)c->s.n * c->out_pixels;
    images[1] = ampi_unfold_input(c);
    ampi_product_init(s, c->og, pixels, depth, y, y_dtype, c->out_pixels);
    s->c_offset = g * c->og * c->out_pixels;
    s->part = c->out_pixels;
    s->part_stride = (size_t)c->s.out_channels * c->out_pixels;
    s->bias = b; s->bias_dtype = ampi_dtype(b_dtype);
    s->bias_offset = g * c->og;
    s->bias_per_row = 1;
    s->a = ampi_matrix(w, w_dtype, c->og, depth, depth, 1);
    s->a.offset = g * c->og * depth;
    s->b = ampi_image_operand(&images[1], x, x_dtype, g * c->cg * c->in_pixels, depth, pixels, 0);
}

/* dw[o, (c,a,b)] = sum over (n, p) ascending, the whole batch as one long sum, of dy[o, (n,p)] * x
   unfolded. */
AMPI_FN void ampi_conv2d_dw(ampi_product* s, ampi_image images[2], const ampi_conv2d* c, size_t g,
                            const void* dy, amp_dtype dy_dtype, const void* x, amp_dtype x_dtype, void* dw,
                            amp_dtype dw_dtype, int accumulate) {
    size_t depth = c->cg * c->taps, pixels = (size_t)c->s.n * c->out_pixels;
    images[0] = ampi_planes((size_t)c->s.out_channels, c->out_pixels);
    images[1] = ampi_unfold_input(c);
    ampi_product_init(s, c->og, depth, pixels, dw, dw_dtype, depth);
    s->c_offset = g * c->og * depth;
    s->beta = accumulate ? 1.0f : 0.0f;
    s->a = ampi_image_operand(&images[0], dy, dy_dtype, g * c->og * c->out_pixels, c->og, pixels, 1);
    s->b = ampi_image_operand(&images[1], x, x_dtype, g * c->cg * c->in_pixels, depth, pixels, 1);
}

/* dx[c, (n,q)] = sum over (o, a, b) ascending of w[o,c,a,b] * dy unfolded; each pixel gathers what it gave,
   so it has one FP32 sum and one rounding. Where no output pixel met (c, a, b), a zero stands for dy. */
AMPI_FN void ampi_conv2d_dx(ampi_product* s, ampi_image images[2], const ampi_conv2d* c, size_t g,
                            const void* dy, amp_dtype dy_dtype, const void* w, amp_dtype w_dtype, void* dx,
                            amp_dtype dx_dtype) {
    size_t depth = c->og * c->taps, pixels = (size_t)c->s.n * c->in_pixels;
    images[0] = ampi_planes(c->cg, c->taps);
    images[1] = ampi_unfold_output(c);
    ampi_product_init(s, c->cg, pixels, depth, dx, dx_dtype, c->in_pixels);
    s->c_offset = g * c->cg * c->in_pixels;
    s->part = c->in_pixels;
    s->part_stride = (size_t)c->s.channels * c->in_pixels;
    s->a = ampi_image_operand(&images[0], w, w_dtype, g * c->og * c->cg * c->taps, c->cg, depth, 1);
    s->b = ampi_image_operand(&images[1], dy, dy_dtype, g * c->og * c->out_pixels, depth, pixels, 0);
}

/* sum[r][i % 16] += x[r*ld + i], i < n, for up to 4 rows at once: each sum waits for its last addition. */
AMPI_INLINE void ampi_row_sums_some(float* sum, const float* x, size_t ld, size_t rows, size_t n) {
    float s[4][16], tail[16];
    size_t i, r, l, whole = n / 16 * 16;
    memcpy(s, sum, rows * sizeof *s);
    for (i = 0; i < whole; i += 16)
        for (r = 0; r < rows; r++)
            for (l = 0; l < 16; l++) s[r][l] += x[r * ld + i + l];
    for (r = 0; whole < n && r < rows; r++) {
        memset(tail, 0, sizeof tail);
        ampi_copy_floats(tail, x + r * ld + whole, n - whole);
        for (l = 0; l < 16; l++) s[r][l] += tail[l];
    }
    memcpy(sum, s, rows * sizeof *s);
}
AMPI_INLINE void ampi_row_sums_body(int hw, float* sum, const float* x, size_t ld, size_t rows, size_t n) {
    (void)hw;
    if (rows == 4) ampi_row_sums_some(sum, x, ld, 4, n);
    else for (; rows > 0; rows--, sum += 16, x += ld) ampi_row_sums_some(sum, x, ld, 1, n);
}
AMPI_KERNEL(ampi_row_sums, (float* sum, const float* x, size_t ld, size_t rows, size_t n), sum, x, ld, rows, n)

#if AMPI_X86
/* The same for up to four rows of 16 bits; sums of rows that do not exist are spoilt. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_row_sums_typed(amp_dtype t, float* sum, const void* x, size_t at, size_t ld,
                                                        size_t rows, size_t n) {
    const size_t r1 = rows > 1 ? ld : 0, r2 = rows > 2 ? 2 * ld : r1, r3 = rows > 3 ? 3 * ld : r2;
    __m512 s0 = _mm512_loadu_ps(sum), s1 = _mm512_loadu_ps(sum + 16);
    __m512 s2 = _mm512_loadu_ps(sum + 32), s3 = _mm512_loadu_ps(sum + 48);
    size_t i;
    for (i = at; i < at + n; i += 16) {
        const __mmask16 m = ampi_first_x16(at + n - i);
        s0 = _mm512_add_ps(s0, ampi_get_x16(t, x, i, m));
        s1 = _mm512_add_ps(s1, ampi_get_x16(t, x, i + r1, m));
        s2 = _mm512_add_ps(s2, ampi_get_x16(t, x, i + r2, m));
        s3 = _mm512_add_ps(s3, ampi_get_x16(t, x, i + r3, m));
    }
    _mm512_storeu_ps(sum, s0);
    _mm512_storeu_ps(sum + 16, s1);
    _mm512_storeu_ps(sum + 32, s2);
    _mm512_storeu_ps(sum + 48, s3);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_row_sums_low(float* sum, const void* x, amp_dtype t, size_t at, size_t ld,
                                                  size_t rows, size_t n) {
    if (t == AMP_F16) ampi_row_sums_typed(AMP_F16, sum, x, at, ld, rows, n);
    else ampi_row_sums_typed(AMP_BF16, sum, x, at, ld, rows, n);
    ampi_clear_upper();
}
#endif

/* A product of a convolution. Planes of one weight are a matrix too, the other way. */
AMPI_FN ampi_product ampi_conv2d_product(const ampi_product* s) {
    const ampi_image* a = s->a.image;
    ampi_product one = *s;
    if (!s->b.along_k && a && ampi_is_planes(a) && a->rows * a->cols == 1) {
        one.a = ampi_matrix(s->a.data, s->a.dtype, s->k, s->m, a->image_stride, 0);
        one.a.offset = s->a.offset;
    }
    return one;
}
/* Each of some images is a plain product. Slot i of `slots` computes every slots-th one, in its own share of the
   workspace. */
AMPI_FN void ampi_conv2d_images(const ampi_product* s, size_t images, size_t i, size_t slots, const amp_exec* exec) {
    const ampi_image* b = s->b.image;
    amp_exec own;
    size_t n;
    memset(&own, 0, sizeof own);
    if (exec) own = *exec;
    own.workspace_size /= slots;
    if (own.workspace) own.workspace = (char*)own.workspace + i * own.workspace_size;
    for (n = i; n < images; n += slots) {
        ampi_product one = *s;
        one.n = s->n / images;
        one.b = ampi_matrix(s->b.data, s->b.dtype, s->k, s->part, b->channel_stride, 0);
        one.b.offset = s->b.offset + n * b->image_stride;
        one.c_offset = s->c_offset + n * s->part_stride;
        ampi_gemm_run(&one, &own);
    }
}
/* Planes that are wide enough make a product each; several threads take them image by image. */
AMPI_FN void ampi_conv2d_run(const ampi_product* s, const amp_exec* exec) {
    const ampi_image* b = s->b.image;
    ampi_product one = ampi_conv2d_product(s);
    size_t images = !s->b.along_k && ampi_is_planes(b) && s->part >= AMPI_CONV_WIDE ? s->n / s->part : 1;
    size_t threads = (double)s->m * (double)s->n * (double)s->k < 1e6 ? 1 : ampi_threads();
    int64_t i, slots = images >= 2 * threads ? (int64_t)threads : 1;
    if (images <= 1) { ampi_gemm_run(&one, exec); return; }
    AMPI_PARALLEL_FOR(slots > 1)
    for (i = 0; i < slots; i++) ampi_conv2d_images(&one, images, (size_t)i, (size_t)slots, exec);
}

#if AMPI_PAIRS
/* The smallest exponent field of n BF16 numbers, as ampi_least_exponent. */
AMPI_FN unsigned ampi_all_exponents(const uint16_t* p, size_t n) {
    unsigned least[64], all = 512;
    size_t each = ampi_max_size(ampi_round_up(ampi_div_up(n, 64), 64), 32768), i;
    int64_t task, tasks = (int64_t)ampi_div_up(n, each);
    AMPI_PARALLEL_FOR(tasks > 1)
    for (task = 0; task < tasks; task++) {
        size_t at = (size_t)task * each;
        least[task] = ampi_least_exponent(p + at, 0, 1, ampi_min_size(n - at, each));
    }
    for (i = 0; i < (size_t)tasks; i++) if (least[i] < all) all = least[i];
    return all;
}
/* Is it faster unfolded, as a product of words, than in a direct form? Unfolding has to feed enough rows, along k more
   of them, and those of a large kernel too; and k should not be filled up to much more. */
AMPI_FN int ampi_conv2d_words_pay(const ampi_gemm_isa* g, const ampi_product* s) {
    size_t least = s->b.along_k ? 24 : s->b.image->kernel_h * s->b.image->kernel_w > 9 ? 32 : 16;
    return s->m >= least && 2 * ampi_words(g, s->k) <= s->k + s->k / 2;
}
/* Shall a convolution's product be one of words? s: that of the first group; x and y are all of what is unfolded, and
   the other operand; more: floats of the workspace that it does not get. */
AMPI_FN int ampi_conv2d_words(const ampi_product* s, const void* x, size_t nx, const void* y, size_t ny, size_t more,
                              const amp_exec* exec) {
    ampi_product one = *s;
    ampi_gemm_isa g;
    ampi_gemm_plan p;
    unsigned e, f;
    one.normal = 1;
    one.k += s->k % 2;
    g = ampi_gemm_isa_for(&one);
    if (!g.words || !ampi_conv2d_words_pay(&g, s) || (exec && exec->sums == AMP_SUMS_FAST && amp_cpu_has_fast_sums()))
        return 0;
    p = ampi_gemm_plan_full(&g, one.m, one.n, one.k);
    if (ampi_room(exec) < p.floats + more + 16) return 0;
    if (s->b.along_k ? !ampi_words_stage_fits(&s->b, p.kc, p.kc, AMPI_GEMM_STAGE)
                     : !ampi_words_stage_fits(&s->b, p.nc, 2 * g.lanes, AMPI_GEMM_STAGE)) return 0;
    e = ampi_all_exponents((const uint16_t*)x, nx);
    f = e >= 1 ? ampi_all_exponents((const uint16_t*)y, ny) : 0;
    return f >= 1 && e + f >= 142;
}

/* Rows [first, first + rows) of the turned weights: row r is w[o][r][taps] for one o after the other, and zeros. */
AMPI_TARGET_AVX512 AMPI_FN void ampi_turn_rows(const ampi_conv2d* c, const uint16_t* w, size_t first, size_t rows,
                                               uint16_t* dst) {
    const size_t taps = c->taps, ld = ampi_turned_ld(c);
    size_t o, r, i, o0;
    for (o0 = 0; o0 < c->og; o0 += 32)            /* so many that reads and writes stay in the first-level cache */
        for (r = first; r < first + rows; r++)
            for (o = o0; o < c->og && o < o0 + 32; o++)
                for (i = 0; i < taps; i += 32) {
                    const __mmask32 m = ampi_inside_x32(0, (int64_t)(taps - i));
                    _mm512_mask_storeu_epi16(dst + r * ld + o * taps + i, m,
                                             _mm512_maskz_loadu_epi16(m, w + (o * c->cg + r) * taps + i));
                }
    for (r = first; r < first + rows; r++) memset(dst + r * ld + c->og * taps, 0, (ld - c->og * taps) * sizeof *dst);
    ampi_clear_upper();
}
/* The input's gradient as products of words: A, which an image operand of planes would be, turned to a matrix first. */
AMPI_FN int ampi_conv2d_dx_words(const ampi_conv2d* c, const void* dy, amp_dtype dy_dtype, const void* w,
                                 amp_dtype w_dtype, void* dx, amp_dtype dx_dtype, const amp_exec* exec) {
    ampi_image images[2];
    ampi_product s;
    amp_exec own;
    uint16_t* turned;
    size_t g;
    int64_t block, blocks = (int64_t)ampi_div_up(c->cg, 32);
    ampi_conv2d_dx(&s, images, c, 0, dy, dy_dtype, w, w_dtype, dx, dx_dtype);
    if (c->taps == 1 || !ampi_conv2d_words(&s, dy, c->y_count, w, c->w_count, ampi_turned_floats(c), exec)) return 0;
    own = *exec;
    turned = (uint16_t*)(void*)ampi_align64(exec->workspace);
    own.workspace = turned + 2 * ampi_turned_floats(c);
    own.workspace_size -= (size_t)((char*)own.workspace - (char*)exec->workspace);
    for (g = 0; g < (size_t)c->s.groups; g++) {
        AMPI_PARALLEL_FOR(blocks > 1)
        for (block = 0; block < blocks; block++)
            ampi_turn_rows(c, (const uint16_t*)w + g * c->og * c->cg * c->taps, (size_t)block * 32,
                           ampi_min_size(c->cg - (size_t)block * 32, 32), turned);
        ampi_conv2d_dx(&s, images, c, g, dy, dy_dtype, w, w_dtype, dx, dx_dtype);
        s.a = ampi_matrix(turned, AMP_BF16, c->cg, s.k, ampi_turned_ld(c), 1);
        s.normal = 1;
        ampi_gemm_run(&s, &own);
    }
    return 1;
}
#else
AMPI_FN int ampi_conv2d_dx_words(const ampi_conv2d* c, const void* dy, amp_dtype dy_dtype, const void* w,
                                 amp_dtype w_dtype, void* dx, amp_dtype dx_dtype, const amp_exec* exec) {
    (void)c; (void)dy; (void)dy_dtype; (void)w; (void)w_dtype; (void)dx; (void)dx_dtype; (void)exec;
    return 0;
}
AMPI_FN int ampi_conv2d_words(const ampi_product* s, const void* x, size_t nx, const void* y, size_t ny, size_t more,
                              const amp_exec* exec) {
    (void)s; (void)x; (void)nx; (void)y; (void)ny; (void)more; (void)exec;
    return 0;
}
#endif

/* db[o] = sum of dy over images and pixels: pixel p of a plane is added to sum p % 16, image after image;
   then the 16 sums are added in a tree (0+8, 1+9, ...; 0+4, ...; 0+2, 1+3; 0+1). */
AMPI_FN void ampi_conv2d_db(const ampi_conv2d* c, const void* dy, amp_dtype dy_dtype, void* db,
                            amp_dtype db_dtype, int accumulate) {
    size_t outs = (size_t)c->s.out_channels, each = ampi_min_size(ampi_max_size(outs / ampi_threads(), 1), 4);
    int64_t task, tasks = (int64_t)ampi_div_up(outs, each);
    AMPI_PARALLEL_FOR(c->y_count > 65536)
    for (task = 0; task < tasks; task++) {
        float sum[4 * 16], part[4 * 1024];
        size_t o = (size_t)task * each, rows = ampi_min_size(outs - o, each), n, p, r, l;
        memset(sum, 0, sizeof sum);
        for (n = 0; n < (size_t)c->s.n; n++)
            for (p = 0; p < c->out_pixels; p += 1024) {
                size_t count = ampi_min_size(c->out_pixels - p, 1024), at = (n * outs + o) * c->out_pixels + p;
                if (ampi_dtype(dy_dtype) == AMP_F32) {
                    ampi_row_sums(sum, (const float*)dy + at, c->out_pixels, rows, count);
                    continue;
                }
#if AMPI_X86
                if (ampi_simd() == AMP_ISA_AVX512) {
                    ampi_row_sums_low(sum, dy, ampi_dtype(dy_dtype), at, c->out_pixels, rows, count);
                    continue;
                }
#endif
                for (r = 0; r < rows; r++)
                    ampi_load_f32(part + r * 1024, dy, dy_dtype, at + r * c->out_pixels, count);
                ampi_row_sums(sum, part, 1024, rows, count);
            }
        for (r = 0; r < rows; r++) {
            float* s = sum + r * 16;
            for (n = 8; n > 0; n /= 2)
                for (l = 0; l < n; l++) s[l] += s[l + n];
            ampi_store_sum(db, db_dtype, o + r, s, 1, accumulate);
        }
    }
}

AMPI_FN amp_result ampi_check_conv2d_forward(ampi_conv2d* c, const amp_conv2d_shape* shape,
                                             const amp_logger* logger, const void* x, amp_dtype x_dtype,
                                             const void* w, amp_dtype w_dtype, const void* b,
                                             amp_dtype b_dtype, void* y, amp_dtype y_dtype) {
    amp_result r = ampi_conv2d_init(c, shape, logger);
    if (r == AMP_OK) r = ampi_check_tensor(logger, "conv2d", "x", x, x_dtype, c->x_count);
    if (r == AMP_OK) r = ampi_check_tensor(logger, "conv2d", "w", w, w_dtype, c->w_count);
    if (r == AMP_OK && b) r = ampi_check_tensor(logger, "conv2d", "b", b, b_dtype, (size_t)c->s.out_channels);
    if (r == AMP_OK) r = ampi_check_tensor(logger, "conv2d", "y", y, y_dtype, c->y_count);
    return r;
}
AMPI_FN amp_result ampi_check_conv2d_backward(ampi_conv2d* c, const amp_conv2d_shape* shape,
                                              const amp_logger* logger, const void* dy, amp_dtype dy_dtype,
                                              const void* x, amp_dtype x_dtype, const void* w,
                                              amp_dtype w_dtype, void* dx, amp_dtype dx_dtype, void* dw,
                                              amp_dtype dw_dtype, void* db, amp_dtype db_dtype) {
    const char* call = "conv2d backward";
    amp_result r = ampi_conv2d_init(c, shape, logger);
    if (r == AMP_OK) r = ampi_check_tensor(logger, call, "dy", dy, dy_dtype, c->y_count);
    if (r == AMP_OK && dw) r = ampi_check_tensor(logger, call, "x", x, x_dtype, c->x_count);
    if (r == AMP_OK && dw) r = ampi_check_tensor(logger, call, "dw", dw, dw_dtype, c->w_count);
    if (r == AMP_OK && dx) r = ampi_check_tensor(logger, call, "w", w, w_dtype, c->w_count);
    if (r == AMP_OK && dx) r = ampi_check_tensor(logger, call, "dx", dx, dx_dtype, c->x_count);
    if (r == AMP_OK && db) r = ampi_check_tensor(logger, call, "db", db, db_dtype, (size_t)c->s.out_channels);
    return r;
}

AMP_DEF amp_result amp_conv2d_forward(const amp_conv2d_shape* shape, const void* x, amp_dtype x_dtype,
                                      const void* w, amp_dtype w_dtype, const void* b, amp_dtype b_dtype,
                                      void* y, amp_dtype y_dtype, const amp_exec* exec) {
    ampi_conv2d c;
    ampi_image images[2];
    ampi_product s;
    size_t g;
    int words = 0;
    amp_result r = ampi_check_conv2d_forward(&c, shape, ampi_exec_logger(exec), x, x_dtype, w, w_dtype, b,
                                             b_dtype, y, y_dtype);
    if (r == AMP_OK && x_dtype == AMP_BF16) {
        ampi_conv2d_y(&s, images, &c, 0, x, x_dtype, w, w_dtype, b, b_dtype, y, y_dtype);
        words = ampi_conv2d_words(&s, x, c.x_count, w, c.w_count, 0, exec);
    }
    if (r == AMP_OK && !words
        && (ampi_amx_conv_run(&c, 0, x, x_dtype, w, w_dtype, b, b_dtype, y, y_dtype, exec)
            || ampi_abreast_run(&c, 0, x, x_dtype, w, w_dtype, b, b_dtype, y, y_dtype, exec)
            || ampi_stencil_run(&c, 0, x, x_dtype, w, w_dtype, b, b_dtype, y, y_dtype, exec)))
        return AMP_OK;
    for (g = 0; r == AMP_OK && g < (size_t)c.s.groups; g++) {
        ampi_conv2d_y(&s, images, &c, g, x, x_dtype, w, w_dtype, b, b_dtype, y, y_dtype);
        s.normal = words;
        ampi_conv2d_run(&s, exec);
    }
    return r;
}

AMP_DEF amp_result amp_conv2d_backward(const amp_conv2d_shape* shape, const void* dy, amp_dtype dy_dtype,
                                       const void* x, amp_dtype x_dtype, const void* w, amp_dtype w_dtype,
                                       void* dx, amp_dtype dx_dtype, void* dw, amp_dtype dw_dtype, void* db,
                                       amp_dtype db_dtype, int accumulate, const amp_exec* exec) {
    ampi_conv2d c;
    ampi_image images[2];
    ampi_product s;
    size_t g;
    int words = 0;
    amp_result r = ampi_check_conv2d_backward(&c, shape, ampi_exec_logger(exec), dy, dy_dtype, x, x_dtype, w,
                                              w_dtype, dx, dx_dtype, dw, dw_dtype, db, db_dtype);
    if (r != AMP_OK) return r;
    if (dx && (ampi_conv2d_dx_words(&c, dy, dy_dtype, w, w_dtype, dx, dx_dtype, exec)
            || ampi_amx_conv_run(&c, 1, dy, dy_dtype, w, w_dtype, NULL, AMP_F32, dx, dx_dtype, exec)
            || ampi_abreast_run(&c, 1, dy, dy_dtype, w, w_dtype, NULL, AMP_F32, dx, dx_dtype, exec)
            || ampi_stencil_run(&c, 1, dy, dy_dtype, w, w_dtype, NULL, AMP_F32, dx, dx_dtype, exec))) dx = NULL;
    for (g = 0; dx && g < (size_t)c.s.groups; g++) {
        ampi_conv2d_dx(&s, images, &c, g, dy, dy_dtype, w, w_dtype, dx, dx_dtype);
        ampi_conv2d_run(&s, exec);
    }
    if (dw && x_dtype == AMP_BF16) {
        ampi_conv2d_dw(&s, images, &c, 0, dy, dy_dtype, x, x_dtype, dw, dw_dtype, accumulate);
        words = ampi_conv2d_words(&s, x, c.x_count, dy, c.y_count, 0, exec);
    }
    if (dw && !words && (ampi_amx_depth_run(&c, dy, dy_dtype, x, x_dtype, dw, dw_dtype, accumulate, exec)
            || ampi_depth_run(&c, dy, dy_dtype, x, x_dtype, dw, dw_dtype, accumulate, exec)
            || ampi_fold_run(&c, dy, dy_dtype, x, x_dtype, dw, dw_dtype, accumulate, exec))) dw = NULL;
    for (g = 0; dw && g < (size_t)c.s.groups; g++) {
        ampi_conv2d_dw(&s, images, &c, g, dy, dy_dtype, x, x_dtype, dw, dw_dtype, accumulate);
        s.normal = words;
        ampi_conv2d_run(&s, exec);
    }
    if (db) ampi_conv2d_db(&c, dy, dy_dtype, db, db_dtype, accumulate);
    return AMP_OK;
}

/* ======================================================================================== */
/* >>impl-math   exp, log, tanh and the like, the same bits everywhere.                       */
/* ======================================================================================== */

/* Polynomials over ampi_fma, without branches, for use inside AMPI_KERNEL bodies. Cases are chosen on bits.
   The coefficients are minimax fits (Remez exchange in 40-digit arithmetic on the relative error), rounded to
   float one after the other, the rest being fitted again after each. The errors stated are the largest seen
   over every third float of the range against the double functions of libm, in units of the result's last
   place. */

/* mask is all ones or all zeros: its ones take a, its zeros b. */
AMPI_HD AMPI_INLINE uint32_t ampi_mask(int condition) { return 0u - (uint32_t)condition; }
AMPI_HD AMPI_INLINE uint32_t ampi_select_bits(uint32_t mask, uint32_t a, uint32_t b) {
    return b ^ ((a ^ b) & mask);
}
AMPI_HD AMPI_INLINE float ampi_select(uint32_t mask, float a, float b) {
    return ampi_float(ampi_select_bits(mask, ampi_bits(a), ampi_bits(b)));
}
AMPI_HD AMPI_INLINE uint32_t ampi_nan_mask(float x) {
    return ampi_mask((ampi_bits(x) & 0x7fffffffu) > 0x7f800000u);
}
AMPI_HD AMPI_INLINE float ampi_abs(float x) { return ampi_float(ampi_bits(x) & 0x7fffffffu); }
AMPI_HD AMPI_INLINE float ampi_copysign(float x, float sign) {
    return ampi_float((ampi_bits(x) & 0x7fffffffu) | (ampi_bits(sign) & 0x80000000u));
}
/* |x| or high, whichever is smaller, with the sign of x. A NaN stays. */
AMPI_HD AMPI_INLINE float ampi_clamp(float x, float high) {
    return ampi_select(ampi_mask(ampi_abs(x) > high), ampi_copysign(high, x), x);
}

/* Reduces x = n*ln2 + r with |r| <= ln2/2: returns r, and *scale = 2^n if -127 < n < 128. Adding 1.5 * 2^23
   rounds to an integer, which then lies in the low bits of the sum. ln2 is taken in two parts; x - n*first is
   exact under fma. */
AMPI_HD AMPI_INLINE float ampi_exp_reduce(int hw, float x, float* scale) {
    float shifted = ampi_fma(hw, x, 1.44269502f, 12582912.0f), n;
    uint32_t i = ampi_bits(shifted) - 0x4b400000u;
    *scale = ampi_float((i + 127u) << 23);
    n = (float)(int32_t)i;
    return ampi_fma(hw, n, 1.90465432e-9f, ampi_fma(hw, n, -0.693147182f, x));
}
/* exp(r) - 1 for |r| <= ln2/2. */
AMPI_HD AMPI_INLINE float ampi_expm1(int hw, float r) {
    float p = ampi_fma(hw, 0.00138367142f, r, 0.00836914033f);
    p = ampi_fma(hw, p, r, 0.0416681059f);
    p = ampi_fma(hw, p, r, 0.166665167f);
    p = ampi_fma(hw, p, r, 0.49999994f);
    return ampi_fma(hw, r * r, p, r);
}
/* exp(x) for x <= 88. Results below 2^-126, the smallest normal float, are 0: subnormal numbers would cost
   some processors a hundred cycles each. The product by a power of two is exact, so it does not matter
   whether a compiler makes one fma of 1 + exp(x). Error: 1.02. */
AMPI_HD AMPI_INLINE float ampi_exp(int hw, float x) {
    float scale, y = 1.0f + ampi_expm1(hw, ampi_exp_reduce(hw, x, &scale));
    return ampi_float(ampi_bits(y * scale) & ~ampi_mask(x < -87.3365402f));
}

#if AMPI_X86
/* Both for sixteen numbers by hand, operation by operation; multiplying by 2^n is one instruction. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_expm1_x16(__m512 r) {
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.00138367142f), r, _mm512_set1_ps(0.00836914033f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0416681059f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.166665167f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.49999994f));
    return _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r);
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_exp_x16(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.0f), one = _mm512_set1_ps(1.0f);
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(1.44269502f), magic), magic);
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3365402f), _CMP_NLT_UQ);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693147182f), x);
    r = ampi_expm1_x16(_mm512_fmadd_ps(n, _mm512_set1_ps(1.90465432e-9f), r));
    return _mm512_maskz_scalef_ps(normal, _mm512_add_ps(one, r), n);
}
/* And for eight by AVX2; 2^n is built from bits, as in the plain forms. */
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_expm1_x8(__m256 r) {
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(0.00138367142f), r, _mm256_set1_ps(0.00836914033f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.0416681059f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.166665167f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.49999994f));
    return _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r);
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_exp_reduce_x8(__m256 x, __m256* scale) {
    const __m256 magic = _mm256_set1_ps(12582912.0f), shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(1.44269502f), magic);
    const __m256i i = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    const __m256 n = _mm256_sub_ps(shifted, magic), r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693147182f), x);
    *scale = _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
    return _mm256_fmadd_ps(n, _mm256_set1_ps(1.90465432e-9f), r);
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_exp_x8(__m256 x) {
    const __m256 small = _mm256_cmp_ps(x, _mm256_set1_ps(-87.3365402f), _CMP_LT_OQ);
    __m256 scale, y = ampi_expm1_x8(ampi_exp_reduce_x8(x, &scale));
    return _mm256_andnot_ps(small, _mm256_mul_ps(_mm256_add_ps(_mm256_set1_ps(1.0f), y), scale));
}
/* A NaN as the second operand of a minimum or maximum stays. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_clamp_x16(__m512 x, float high) {
    const __m512 y = _mm512_maskz_min_ps(AMPI_ALL16, _mm512_set1_ps(high), x);
    return _mm512_maskz_max_ps(AMPI_ALL16, _mm512_set1_ps(-high), y);
}
#endif

/* tanh(x): x + x^3 P(x^2) up to 5/8, then 1 - 2 / (exp(2|x|) + 1). Error: 1.34. */
AMPI_HD AMPI_INLINE float ampi_tanh(int hw, float x) {
    float a = ampi_abs(x), z = x * x, p, large = 1.0f + ampi_exp(hw, 2.0f * ampi_clamp(a, 20.0f));
    p = ampi_fma(hw, -0.00569229666f, z, 0.0206281673f);
    p = ampi_fma(hw, p, z, -0.0537365153f);
    p = ampi_fma(hw, p, z, 0.133314058f);
    p = ampi_fma(hw, p, z, -0.333332807f);
    p = ampi_fma(hw, p * z, a, a);
    return ampi_copysign(ampi_select(ampi_mask(ampi_bits(a) < 0x3f200000u), p, 1.0f - 2.0f / large), x);
}

/* 1 / (1 + exp(-x)) in the form that cannot overflow and is accurate in both tails: 1/(1+e) or e/(1+e) with
   e = exp(-|x|). Error: 2.41. */
AMPI_HD AMPI_INLINE float ampi_sigmoid(int hw, float x) {
    float e = ampi_exp(hw, -ampi_abs(x));
    return ampi_select(ampi_mask((int)(ampi_bits(x) >> 31)), e, 1.0f) / (1.0f + e);
}

/* log(1 + f) for f in [sqrt(1/2)-1, 1]: with s = f / (2 + f), log(1+f) = 2 atanh(s) = 2s + s^3 P(s^2), and
   2s = f - s*f, so that f enters exactly and only a correction is rounded. Error: 1.08. */
AMPI_HD AMPI_INLINE float ampi_log1p(int hw, float f) {
    float s = f / (2.0f + f), z = s * s, p;
    p = ampi_fma(hw, 0.280067801f, z, 0.280030251f);
    p = ampi_fma(hw, p, z, 0.400214374f);
    p = ampi_fma(hw, p, z, 0.666664183f);
    return ampi_fma(hw, -s, ampi_fma(hw, -z, p, f), f);
}

/* log(x), x = m * 2^e with m in [sqrt(1/2), sqrt(2)). A subnormal is multiplied by 2^25 first. Error:
   0.98. */
AMPI_HD AMPI_INLINE float ampi_log(int hw, float x) {
    uint32_t u = ampi_bits(x), small = ampi_mask(u < 0x00800000u), special;
    uint32_t v = ampi_select_bits(small, ampi_bits(x * 33554432.0f), u);
    int32_t e = (int32_t)((v + 0x00cafb0du) >> 23) - 128;    /* 0x00cafb0d = 2^30 - bits(sqrt(1/2)) */
    float k = (float)(e - (int32_t)(small & 25u));
    float y = ampi_log1p(hw, ampi_float(v - ((uint32_t)e << 23)) - 1.0f);
    y = ampi_fma(hw, k, 0.693147182f, ampi_fma(hw, k, -1.90465432e-9f, y));
    special = ampi_select_bits(ampi_mask((u << 1) == 0), 0xff800000u, 0x7fc00000u);
    special = ampi_select_bits(ampi_mask(u == 0x7f800000u), u, special);
    return ampi_float(ampi_select_bits(ampi_mask(u - 1u >= 0x7f7fffffu), special, ampi_bits(y)));
}

/* The normal distribution: returns Phi(x) = (1 + erf(x / sqrt(2))) / 2, and *density = exp(-x^2/2).
   The tail Phi(-a), a >= 0, is exp(-a^2/2) * t * P(u), t = 1/(a+4), u = (a-4)*t (the substitution of Shepherd
   and Laframboise 1981 for erfc); P is nearly linear and has no cancellation, so the tail has its relative
   accuracy everywhere. a^2 is formed in two parts, and t and u are corrected by what their rounding left.
   Beyond 12.9, where the tail leaves the normal floats, it is 0. Error: 3.6, and 1.2 for the density. */
AMPI_HD AMPI_INLINE float ampi_normal_cdf(int hw, float x, float* density) {
    float a = ampi_clamp(ampi_abs(x), 12.9f), t = 1.0f / (a + 4.0f), u = (a - 4.0f) * t;
    float square = a * a, rest = ampi_fma(hw, a, a, -square), scale, q, p;
    uint32_t inside = ampi_mask(ampi_bits(a) < 0x414e6666u);    /* a < 12.9 */
    u = ampi_fma(hw, t, ampi_fma(hw, -u, a, ampi_fma(hw, -4.0f, u + 1.0f, a)), u);
    t = ampi_fma(hw, t, ampi_fma(hw, -t, a, ampi_fma(hw, -4.0f, t, 1.0f)), t);
    q = ampi_expm1(hw, ampi_fma(hw, -0.5f, rest, ampi_exp_reduce(hw, -0.5f * square, &scale)));
    *density = ampi_float(ampi_bits((1.0f + q) * scale) & inside);
    p = ampi_fma(hw, -0.000109288165f, u, 0.000209836697f);
    p = ampi_fma(hw, p, u, 0.00155533943f);
    p = ampi_fma(hw, p, u, -0.00353910425f);
    p = ampi_fma(hw, p, u, -0.0075223404f);
    p = ampi_fma(hw, p, u, 0.0604111888f);
    p = ampi_fma(hw, p, u, -0.186523765f);
    p = ampi_fma(hw, p, u, 0.387136251f);
    p = ampi_fma(hw, p, u, -0.607896566f);
    p = ampi_fma(hw, p, u, 0.755285144f) * t;
    p = ampi_float(ampi_bits(ampi_fma(hw, p, q, p) * scale) & inside);
    return ampi_select(ampi_mask((int)(ampi_bits(x) >> 31)), p, 1.0f - p);
}

#if AMPI_X86
/* The same by hand, operation by operation; multiplying by 2^n is one instruction. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_sigmoid_x16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), e = ampi_exp_x16(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    return _mm512_div_ps(_mm512_mask_mov_ps(one, negative, e), _mm512_add_ps(one, e));
}
/* exp(2a) is formed in halves: r/2 from a, (exp(r) - 1) / 2 with coefficients times powers of two, exp(2a) / 2, and
   2 / (exp(2a) + 1) as the reciprocal of half the sum. A NaN takes the way of small numbers. (A range instruction would
   give min(|x|, 20), but on some processors waits for what its target held before.) */
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_tanh_x16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), one_half = _mm512_set1_ps(0.5f), magic = _mm512_set1_ps(12582912.0f);
    const __m512 sign = _mm512_set1_ps(-0.0f), z = _mm512_mul_ps(x, x);
    const __m512 a = _mm512_maskz_min_ps(AMPI_ALL16, _mm512_andnot_ps(sign, x), _mm512_set1_ps(20.0f));
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(a, _mm512_set1_ps(2.0f * 1.44269502f), magic), magic);
    const __mmask16 large = _mm512_cmp_ps_mask(z, _mm512_set1_ps(0.390625f), _CMP_GE_OQ);      /* |x| >= 5/8 */
    __m512 p, r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693147182f / 2.0f), a), e;
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(1.90465432e-9f / 2.0f), r);
    e = _mm512_fmadd_ps(_mm512_set1_ps(32.0f * 0.00138367142f), r, _mm512_set1_ps(16.0f * 0.00836914033f));
    e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(8.0f * 0.0416681059f));
    e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(4.0f * 0.166665167f));
    e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(2.0f * 0.49999994f));
    e = _mm512_add_ps(one_half, _mm512_fmadd_ps(_mm512_mul_ps(r, r), e, r));
    e = _mm512_div_ps(one, _mm512_add_ps(one_half, _mm512_maskz_scalef_ps(AMPI_ALL16, e, n)));
    p = _mm512_fmadd_ps(_mm512_set1_ps(-0.00569229666f), z, _mm512_set1_ps(0.0206281673f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-0.0537365153f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(0.133314058f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-0.333332807f));
    p = _mm512_mask_sub_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, z), x, x), large, one, e);
    return _mm512_or_ps(p, _mm512_and_ps(sign, x));
}
/* p = P(u), for both vector kinds. */
#define AMPI_NORMAL_TAIL(V)                                                                         \
    p = AMPI_##V##_FMA(AMPI_##V##_SPREAD(-0.000109288165f), u, AMPI_##V##_SPREAD(0.000209836697f)); \
    p = AMPI_##V##_FMA(p, u, AMPI_##V##_SPREAD(0.00155533943f));                                    \
    p = AMPI_##V##_FMA(p, u, AMPI_##V##_SPREAD(-0.00353910425f));                                   \
    p = AMPI_##V##_FMA(p, u, AMPI_##V##_SPREAD(-0.0075223404f));                                    \
    p = AMPI_##V##_FMA(p, u, AMPI_##V##_SPREAD(0.0604111888f));                                     \
    p = AMPI_##V##_FMA(p, u, AMPI_##V##_SPREAD(-0.186523765f));                                     \
    p = AMPI_##V##_FMA(p, u, AMPI_##V##_SPREAD(0.387136251f));                                      \
    p = AMPI_##V##_FMA(p, u, AMPI_##V##_SPREAD(-0.607896566f));                                     \
    p = AMPI_##V##_FMA(p, u, AMPI_##V##_SPREAD(0.755285144f));
/* There is no need to clamp: what is outside is masked. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_normal_cdf_x16(__m512 x, __m512* density) {
    const __m512 one = _mm512_set1_ps(1.0f), four = _mm512_set1_ps(4.0f), magic = _mm512_set1_ps(12582912.0f);
    const __m512 a = _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x), square = _mm512_mul_ps(a, a);
    const __mmask16 inside = _mm512_cmp_ps_mask(a, _mm512_set1_ps(12.9f), _CMP_LT_OQ);
    const __mmask16 positive = _mm512_testn_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000u));
    const __m512 rest = _mm512_fmsub_ps(a, a, square), exponent = _mm512_mul_ps(_mm512_set1_ps(-0.5f), square);
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(exponent, _mm512_set1_ps(1.44269502f), magic), magic);
    __m512 t = _mm512_div_ps(one, _mm512_add_ps(a, four)), u = _mm512_mul_ps(_mm512_sub_ps(a, four), t), r, q, p;
    u = _mm512_fmadd_ps(t, _mm512_fnmadd_ps(u, a, _mm512_fnmadd_ps(four, _mm512_add_ps(u, one), a)), u);
    t = _mm512_fmadd_ps(t, _mm512_fnmadd_ps(t, a, _mm512_fnmadd_ps(four, t, one)), t);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693147182f), exponent);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(1.90465432e-9f), r);
    q = ampi_expm1_x16(_mm512_fmadd_ps(_mm512_set1_ps(-0.5f), rest, r));
    *density = _mm512_maskz_scalef_ps(inside, _mm512_add_ps(one, q), n);
    AMPI_NORMAL_TAIL(V16)
    p = _mm512_mul_ps(p, t);
    p = _mm512_maskz_scalef_ps(inside, _mm512_fmadd_ps(p, q, p), n);
    return _mm512_mask_sub_ps(p, positive, one, p);
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_normal_cdf_x8(__m256 x, __m256* density) {
    const __m256 one = _mm256_set1_ps(1.0f), four = _mm256_set1_ps(4.0f);
    const __m256 a = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), square = _mm256_mul_ps(a, a);
    const __m256 inside = _mm256_cmp_ps(a, _mm256_set1_ps(12.9f), _CMP_LT_OQ), rest = _mm256_fmsub_ps(a, a, square);
    __m256 t = _mm256_div_ps(one, _mm256_add_ps(a, four)), u = _mm256_mul_ps(_mm256_sub_ps(a, four), t), q, p, scale;
    u = _mm256_fmadd_ps(t, _mm256_fnmadd_ps(u, a, _mm256_fnmadd_ps(four, _mm256_add_ps(u, one), a)), u);
    t = _mm256_fmadd_ps(t, _mm256_fnmadd_ps(t, a, _mm256_fnmadd_ps(four, t, one)), t);
    q = ampi_exp_reduce_x8(_mm256_mul_ps(_mm256_set1_ps(-0.5f), square), &scale);
    q = ampi_expm1_x8(_mm256_fmadd_ps(_mm256_set1_ps(-0.5f), rest, q));
    *density = _mm256_and_ps(_mm256_mul_ps(_mm256_add_ps(one, q), scale), inside);
    AMPI_NORMAL_TAIL(V8)
    p = _mm256_mul_ps(p, t);
    p = _mm256_and_ps(_mm256_mul_ps(_mm256_fmadd_ps(p, q, p), scale), inside);
    return _mm256_blendv_ps(_mm256_sub_ps(one, p), p, x);
}
#endif

/* cos(2 pi u) for u in [0,1]: the nearest quarter turn is taken off, which is exact, and the rest, at most an
   eighth of a turn, goes to the polynomial of the cosine or the sine. Error: 1.57. */
AMPI_HD AMPI_INLINE float ampi_cos_turns(int hw, float u) {
    int32_t q = (int32_t)ampi_fma(hw, 4.0f, u, 0.5f);
    float r = ampi_fma(hw, (float)q, -0.25f, u), z = r * r, c, s;
    c = ampi_fma(hw, 58.6210594f, z, -85.4245224f);
    c = ampi_fma(hw, c, z, 64.9391479f);
    c = ampi_fma(hw, c, z, -19.7392082f);
    c = ampi_fma(hw, c, z, 1.0f);
    s = ampi_fma(hw, -76.7749557f, z, 81.6256256f);
    s = ampi_fma(hw, s, z, -41.3418655f);
    s = ampi_fma(hw, s, z, 6.28318548f) * r;
    c = (q & 1) ? s : c;
    return ((q + 1) & 2) ? -c : c;
}

/* Box-Muller: sqrt(-2 log(u1)) * cos(2 pi u2), u1 in (0,1], so the largest deviate is sqrt(48 ln2) = 5.77. */
AMP_DEF float amp_random_normal(uint64_t seed, uint64_t index) {
    float u1 = 1.0f - amp_random_uniform(seed, 2 * index), u2 = amp_random_uniform(seed, 2 * index + 1);
    return sqrtf(-2.0f * ampi_log(AMPI_FMA_NATIVE, u1)) * ampi_cos_turns(AMPI_FMA_NATIVE, u2);
}

/* ======================================================================================== */
/* >>impl-nn  Pooling, normalisation, element by element, losses.                            */
/* ======================================================================================== */

/* Every operator walks over its data in tiles of at most AMPI_TILE elements: widen a tile into floats on
   the stack (or take the operand in place where it is F32), run a kernel over it, narrow it back. The
   kernels work on AMPI_LANES elements at a time; tiles are filled up with zeros to a multiple of that. Sums
   use AMPI_LANES double accumulators, element i of a tile going to accumulator i % AMPI_LANES, which are
   added up in one fixed tree; products of two floats are exact in double. */
enum { AMPI_LANES = 16, AMPI_TILE = 1024 };

/* Loops over fewer elements than this stay on one thread. */
#define AMPI_PARALLEL_MIN 65536u

/* --- operands ---------------------------------------------------------------------------- */

typedef struct ampi_argument {
    const char* name;
    const void* data;
    amp_dtype   dtype;
    int         optional;    /* 1 = may be NULL */
} ampi_argument;

/* Refuses NULL pointers, types that operators do not compute on, and sizes that no memory could hold. */
AMPI_FN amp_result ampi_check_operands(const amp_exec* exec, const char* op, size_t n,
                                       const ampi_argument* list, size_t count) {
    const amp_logger* log = ampi_exec_logger(exec);
    size_t i;
    if (n > SIZE_MAX / 16)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "%s: an operand has more elements than memory can hold", op);
    for (i = 0; i < count; i++) {
        const ampi_argument* p = &list[i];
        if (!p->data && !p->optional && n > 0)
            return ampi_fail(log, AMP_ERR_ARGUMENT, "%s: %s is NULL", op, p->name);
        if (p->data && !ampi_is_compute_dtype(p->dtype))
            return ampi_fail(log, AMP_ERR_DTYPE, "%s: %s has type %s (%d), which is none of f32, f16, bf16",
                             op, p->name, amp_dtype_name(p->dtype), (int)p->dtype);
    }
    return AMP_OK;
}
#define AMPI_CHECK(exec, op, n, list) ampi_check_operands(exec, op, n, list, sizeof(list) / sizeof((list)[0]))

/* Product of two sizes for a check; SIZE_MAX, which the check above refuses, if it overflows. */
AMPI_FN size_t ampi_area(size_t a, size_t b) {
    size_t n;
    return ampi_mul_size(a, b, &n) ? n : SIZE_MAX;
}

AMPI_INLINE int ampi_min_int(int a, int b) { return a < b ? a : b; }
AMPI_INLINE int ampi_max_int(int a, int b) { return a > b ? a : b; }

/* n rounded up to whole groups of lanes; number of tiles of n elements; elements in tile i. */
AMPI_INLINE size_t ampi_padded(size_t n) { return (n + AMPI_LANES - 1) / AMPI_LANES * AMPI_LANES; }
AMPI_FN int64_t ampi_tiles(size_t n) { return (int64_t)((n + AMPI_TILE - 1) / AMPI_TILE); }
AMPI_FN size_t ampi_tile_size(size_t n, size_t start) { return ampi_min_size(n - start, AMPI_TILE); }

/* Whether kernels may run on the operand itself: it holds floats, and whole groups of them. */
AMPI_FN int ampi_direct(amp_dtype t, size_t n) { return ampi_dtype(t) == AMP_F32 && n % AMPI_LANES == 0; }

/* Elements [i, i+n) of an operand as floats to read, in place or widened into `tile`. */
AMPI_FN const float* ampi_view(const void* data, amp_dtype t, size_t i, size_t n, float* tile) {
    if (ampi_direct(t, n)) return (const float*)data + i;
    ampi_load_f32(tile, data, t, i, n);
    memset(tile + n, 0, (ampi_padded(n) - n) * sizeof(float));
    return tile;
}
/* The same where the operand may be missing: every element is `missing` then. */
AMPI_FN const float* ampi_view_or(const void* data, amp_dtype t, size_t i, size_t n, float* tile,
                                  float missing) {
    size_t l;
    if (data) return ampi_view(data, t, i, n, tile);
    for (l = 0; l < ampi_padded(n); l++) tile[l] = missing;
    return tile;
}
/* Where to form elements [i, i+n) of a result: in place or in `tile`, from which ampi_close stores them. */
AMPI_FN float* ampi_open(void* data, amp_dtype t, size_t i, size_t n, float* tile) {
    return ampi_direct(t, n) ? (float*)data + i : tile;
}
AMPI_FN void ampi_close(void* data, amp_dtype t, size_t i, size_t n, const float* tile) {
    if (!ampi_direct(t, n)) ampi_store_f32(data, t, i, tile, n);
}
/* n elements of any type that a kernel reads or writes. By hand for AVX-512 kernels take operands of any type, if all
   are of one, and some for AVX2 too (by hand for both); others take floats. */
typedef struct ampi_part { const void* data; amp_dtype t; size_t n; } ampi_part;
AMPI_FN int ampi_typed(amp_dtype a, amp_dtype b) {
    return AMPI_X86 && ampi_simd() == AMP_ISA_AVX512 && ampi_dtype(a) == ampi_dtype(b);
}
AMPI_FN int ampi_typed_both(amp_dtype a, amp_dtype b) {
    return AMPI_X86 && ampi_simd() >= AMP_ISA_AVX2 && ampi_dtype(a) == ampi_dtype(b);
}
/* A kernel that is written by hand for both. EITHER is for one with a result, which clears the registers itself. */
#define AMPI_EITHER(name, ...) \
    (ampi_simd() == AMP_ISA_AVX512 ? name##_avx512(__VA_ARGS__) : name##_avx2(__VA_ARGS__))
#define AMPI_BY_HAND(name, ...) (AMPI_EITHER(name, __VA_ARGS__), ampi_clear_upper())
/* Elements [i, i+n) to read: where they lie, or as floats in `tile`. */
AMPI_FN ampi_part ampi_part_of(const void* data, amp_dtype t, size_t i, size_t n, int typed, float* tile) {
    ampi_part p;
    p.t = typed ? ampi_dtype(t) : AMP_F32;
    p.n = n;
    p.data = typed ? (const char*)data + i * amp_dtype_size(t) : (const void*)ampi_view(data, t, i, n, tile);
    return p;
}
/* One element of a result that may not be wanted. */
AMPI_FN void ampi_store_one(void* data, amp_dtype t, size_t i, float value, int accumulate) {
    float old = 0.0f;
    if (!data) return;
    if (accumulate) {
        ampi_load_f32(&old, data, t, i, 1);
        value = old + value;
    }
    ampi_store_f32(data, t, i, &value, 1);
}
AMPI_FN float ampi_load_one(const void* data, amp_dtype t, size_t i, float missing) {
    if (data) ampi_load_f32(&missing, data, t, i, 1);
    return missing;
}

/* --- sums -------------------------------------------------------------------------------- */

/* a * b + sum. The product of two floats is exact in double, so that a fused operation gives the same bits. */
AMPI_INLINE double ampi_add_product(int hw, float a, float b, double sum) {
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
    if (hw) return __builtin_fma((double)a, (double)b, sum);
#endif
    (void)hw;
    return sum + (double)a * (double)b;
}

/* acc[i % LANES] += x[i], also for a last group that is not full. */
AMPI_INLINE void ampi_lane_sum_plain_body(int hw, double* acc, const float* x, size_t n) {
    double a[AMPI_LANES];
    size_t i, l;
    (void)hw;
    memcpy(a, acc, sizeof a);
    for (i = 0; i + AMPI_LANES <= n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) a[l] += (double)x[i + l];
    for (l = 0; i + l < n; l++) a[l] += (double)x[i + l];
    memcpy(acc, a, sizeof a);
}
AMPI_KERNEL_PLAIN(ampi_lane_sum_plain, (double* acc, const float* x, size_t n), acc, x, n)

/* Is the mean of floats such that no difference from it, rounded to float, becomes infinite? */
AMPI_FN int ampi_mean_is_usual(double mean) { return fabs(mean) < 1e30; }

/* acc[i % LANES] += (x[i] - mean[i % LANES])^2. The difference is rounded to float, so its square is
   exact. */
AMPI_INLINE double ampi_add_square(int hw, float x, double mean, double sum) {
    float d = (float)((double)x - mean);
    return ampi_add_product(hw, d, d, sum);
}
AMPI_INLINE void ampi_lane_moment_plain_body(int hw, double* acc, const float* x, const double* mean, size_t n) {
    double a[AMPI_LANES], m[AMPI_LANES];
    size_t i, l;
    memcpy(a, acc, sizeof a);
    memcpy(m, mean, sizeof m);
    for (i = 0; i + AMPI_LANES <= n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) a[l] = ampi_add_square(hw, x[i + l], m[l], a[l]);
    for (l = 0; i + l < n; l++) a[l] = ampi_add_square(hw, x[i + l], m[l], a[l]);
    memcpy(acc, a, sizeof a);
}
AMPI_KERNEL_PLAIN(ampi_lane_moment_plain, (double* acc, const float* x, const double* mean, size_t n), acc, x, mean, n)

/* sum += g, dot += g * (x - mean) by lanes: the two sums of a norm's backward pass. */
AMPI_INLINE void ampi_lane_dot_plain_body(int hw, double* sum, double* dot, const float* g, const float* x,
                                    const float* mean, size_t n) {
    double a[AMPI_LANES], b[AMPI_LANES];
    float m[AMPI_LANES];
    size_t i, l;
    memcpy(a, sum, sizeof a);
    memcpy(b, dot, sizeof b);
    memcpy(m, mean, sizeof m);
    for (i = 0; i + AMPI_LANES <= n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) {
            a[l] += (double)g[i + l];
            b[l] = ampi_add_product(hw, g[i + l], x[i + l] - m[l], b[l]);
        }
    for (l = 0; i + l < n; l++) {
        a[l] += (double)g[i + l];
        b[l] = ampi_add_product(hw, g[i + l], x[i + l] - m[l], b[l]);
    }
    memcpy(sum, a, sizeof a);
    memcpy(dot, b, sizeof b);
}
AMPI_KERNEL_PLAIN(ampi_lane_dot_plain,
            (double* sum, double* dot, const float* g, const float* x, const float* mean, size_t n), sum,
            dot, g, x, mean, n)

/* The fixed tree: 16 -> 8 -> 4 -> 2 -> 1. */
AMPI_FN double ampi_lane_total(const double* acc) {
    double a[AMPI_LANES / 2];
    size_t l;
    for (l = 0; l < 8; l++) a[l] = acc[l] + acc[l + 8];
    for (l = 0; l < 4; l++) a[l] += a[l + 4];
    return (a[0] + a[2]) + (a[1] + a[3]);
}

#if AMPI_X86
/* The same sums by hand, of sixteen elements [i, i+16) of any type at a time, for the kernels below. */
typedef struct ampi_wide { __m512d low, high; } ampi_wide;

AMPI_TARGET_AVX512 AMPI_INLINE ampi_wide ampi_widen_x16(__m512 x) {
    ampi_wide w;
    w.low = _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x, 0));
    w.high = _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x, 1));
    return w;
}
/* Eight floats from memory. */
AMPI_TARGET_AVX512 AMPI_INLINE __m256 ampi_get_x8(amp_dtype t, const void* p, size_t i) {
    if (t == AMP_F32) return _mm256_loadu_ps((const float*)p + i);
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(const void*)((const uint16_t*)p + i)));
}
/* From memory, the halves of a vector need no extraction. */
AMPI_TARGET_AVX512 AMPI_INLINE ampi_wide ampi_get_wide_x16(amp_dtype t, const void* p, size_t i, __mmask16 m) {
    ampi_wide w;
    if (t == AMP_BF16 || m != AMPI_ALL16) return ampi_widen_x16(ampi_get_x16(t, p, i, m));
    w.low = _mm512_maskz_cvtps_pd(0xff, ampi_get_x8(t, p, i));
    w.high = _mm512_maskz_cvtps_pd(0xff, ampi_get_x8(t, p, i + 8));
    return w;
}
AMPI_TARGET_AVX512 AMPI_INLINE ampi_wide ampi_load_wide(const double* p) {
    ampi_wide w;
    w.low = _mm512_loadu_pd(p);
    w.high = _mm512_loadu_pd(p + 8);
    return w;
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_store_wide(double* p, ampi_wide w) {
    _mm512_storeu_pd(p, w.low);
    _mm512_storeu_pd(p + 8, w.high);
}
/* acc += x. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_wide_add(ampi_wide* acc, ampi_wide x) {
    acc->low = _mm512_add_pd(acc->low, x.low);
    acc->high = _mm512_add_pd(acc->high, x.high);
}
/* acc += a * b. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_wide_fma(ampi_wide* acc, ampi_wide a, ampi_wide b) {
    acc->low = _mm512_fmadd_pd(a.low, b.low, acc->low);
    acc->high = _mm512_fmadd_pd(a.high, b.high, acc->high);
}
/* d rounded to the 24 bits of a float: 2^29 times its power of two pushes the others out of a double. What a float
   could only hold as a subnormal number keeps more of them, but its square is lost beside any eps, and 0 as a float. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512d ampi_round_24(__m512d d) {
    const __m512d shift = _mm512_set1_pd(536870912.0);
    const __m512d power = _mm512_and_pd(d, _mm512_castsi512_pd(_mm512_set1_epi64(-0x10000000000000)));
    return _mm512_fnmadd_pd(power, shift, _mm512_fmadd_pd(power, shift, d));
}
/* acc += (x - mean)^2 in the lanes of the mask, the difference rounded to float; for usual means. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_wide_moment(ampi_wide* acc, ampi_wide x, ampi_wide mean, __mmask16 m) {
    ampi_wide d;
    d.low = ampi_round_24(_mm512_maskz_sub_pd((__mmask8)m, x.low, mean.low));
    d.high = ampi_round_24(_mm512_maskz_sub_pd((__mmask8)(m >> 8), x.high, mean.high));
    ampi_wide_fma(acc, d, d);
}
/* The tree of ampi_lane_total. */
AMPI_TARGET_AVX512 AMPI_INLINE double ampi_wide_total(ampi_wide acc) {
    __m512d a = _mm512_add_pd(acc.low, acc.high);
    __m256d b = _mm256_add_pd(_mm512_maskz_extractf64x4_pd(0xf, a, 0), _mm512_maskz_extractf64x4_pd(0xf, a, 1));
    __m128d c = _mm_add_pd(_mm256_castpd256_pd128(b), _mm256_extractf128_pd(b, 1));
    return _mm_cvtsd_f64(c) + _mm_cvtsd_f64(_mm_unpackhi_pd(c, c));
}

/* step(type, i, mask, state, ...): what AMPI_EACH_X16 calls. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_sum_x16(amp_dtype t, size_t i, __mmask16 m, ampi_wide* acc, const void* x) {
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    ampi_wide_add(acc, ampi_get_wide_x16(t, x, i, m));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_moment_x16(amp_dtype t, size_t i, __mmask16 m, ampi_wide* acc, const void* x,
                                                    ampi_wide mean) {
    ampi_wide_moment(acc, ampi_get_wide_x16(t, x, i, m), mean, m);
}
/* sum += g, dot += g * (x - mean). */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_dot_step(__mmask16 m, ampi_wide* sum, ampi_wide* dot, ampi_wide g, __m512 x,
                                                  __m512 mean) {
    ampi_wide_add(sum, g);
    ampi_wide_fma(dot, g, ampi_widen_x16(_mm512_maskz_sub_ps(m, x, mean)));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_dot_x16(amp_dtype t, size_t i, __mmask16 m, ampi_wide* sum, ampi_wide* dot,
                                                 const void* g, const void* x, __m512 mean) {
    AMPI_AHEAD(g, i * amp_dtype_size(t));
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    ampi_dot_step(m, sum, dot, ampi_get_wide_x16(t, g, i, m), ampi_get_x16(t, x, i, m), mean);
}

AMPI_TARGET_AVX512 AMPI_INLINE void ampi_lane_sum_x16(amp_dtype t, double* acc, const void* x, size_t n) {
    ampi_wide a = ampi_load_wide(acc);
    AMPI_EACH_X16(ampi_sum_x16, t, n, &a, x);
    ampi_store_wide(acc, a);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_lane_sum_avx512(double* acc, ampi_part x) {
    AMPI_FOR_TYPE(ampi_lane_sum_x16, x.t, acc, x.data, x.n);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_lane_moment_x16(amp_dtype t, double* acc, const void* x, const double* mean,
                                                         size_t n) {
    ampi_wide a = ampi_load_wide(acc);
    const ampi_wide m = ampi_load_wide(mean);
    AMPI_EACH_X16(ampi_moment_x16, t, n, &a, x, m);
    ampi_store_wide(acc, a);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_lane_moment_avx512(double* acc, ampi_part x, const double* mean) {
    AMPI_FOR_TYPE(ampi_lane_moment_x16, x.t, acc, x.data, mean, x.n);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_lane_dot_x16(amp_dtype t, double* sum, double* dot, const void* g,
                                                      const void* x, const float* mean, size_t n) {
    ampi_wide a = ampi_load_wide(sum), b = ampi_load_wide(dot);
    const __m512 m = _mm512_loadu_ps(mean);
    AMPI_EACH_X16(ampi_dot_x16, t, n, &a, &b, g, x, m);
    ampi_store_wide(sum, a);
    ampi_store_wide(dot, b);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_lane_dot_avx512(double* sum, double* dot, ampi_part g, ampi_part x,
                                                     const float* mean) {
    AMPI_FOR_TYPE(ampi_lane_dot_x16, x.t, sum, dot, g.data, x.data, mean, x.n);
}
#endif

#if AMPI_X86
/* The same for AVX2, whose vectors are half as wide: a step takes eight elements [i, i+8), or m of them where a row
   ends, and `upper` says which eight of the sixteen lanes they belong to. */
typedef struct ampi_wide8 { __m256d low, high; } ampi_wide8;

/* step(type, i, m, upper, ...) for all of n elements; and the same with the type as a constant. */
#define AMPI_EACH_X8(step, t, n, ...)                                                       \
    do {                                                                                    \
        size_t ampi_i = 0;                                                                  \
        for (; ampi_i + 16 <= (n); ampi_i += 16) {                                          \
            step(t, ampi_i, 8, 0, __VA_ARGS__);                                             \
            step(t, ampi_i + 8, 8, 1, __VA_ARGS__);                                         \
        }                                                                                   \
        if (ampi_i < (n)) step(t, ampi_i, ampi_min_size((n) - ampi_i, 8), 0, __VA_ARGS__);  \
        if (ampi_i + 8 < (n)) step(t, ampi_i + 8, (n) - ampi_i - 8, 1, __VA_ARGS__);        \
    } while (0)
#define AMPI_ALL_X8(step, t, n, ...)                                                        \
    do {                                                                                    \
        if (ampi_dtype(t) == AMP_F16) AMPI_EACH_X8(step, AMP_F16, n, __VA_ARGS__);          \
        else if (ampi_dtype(t) == AMP_BF16) AMPI_EACH_X8(step, AMP_BF16, n, __VA_ARGS__);   \
        else AMPI_EACH_X8(step, AMP_F32, n, __VA_ARGS__);                                   \
    } while (0)

AMPI_TARGET_AVX2 AMPI_INLINE ampi_wide8 ampi_widen_x8(__m256 x) {
    ampi_wide8 w;
    w.low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    w.high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return w;
}
/* From memory, the halves of a vector need no shuffle: it is put there where it does not come from there. */
AMPI_TARGET_AVX2 AMPI_INLINE ampi_wide8 ampi_get_wide_x8(amp_dtype t, const void* p, size_t i, size_t m) {
    float kept[8];
    const float* from = (const float*)p + i;
    ampi_wide8 w;
    if (t != AMP_F32 || m < 8) {
        _mm256_storeu_ps(kept, ampi_read8_avx2(p, t, i, m));
        from = kept;
        AMPI_OPAQUE(from);
    }
    w.low = _mm256_cvtps_pd(_mm_loadu_ps(from));
    w.high = _mm256_cvtps_pd(_mm_loadu_ps(from + 4));
    return w;
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_put_x8(amp_dtype t, void* p, size_t i, size_t m, int upper, __m256 x) {
    if (upper == 0) AMPI_AHEAD(p, i * amp_dtype_size(t));
    ampi_put8_avx2(p, t, i, m, x);
}
/* x in the first m lanes, 0 in the others. */
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_first_x8(__m256 x, size_t m) {
    return m < 8 ? _mm256_and_ps(x, _mm256_castsi256_ps(AMPI_V8_MASK(m))) : x;
}
AMPI_TARGET_AVX2 AMPI_INLINE ampi_wide8 ampi_load_wide8(const double* p) {
    ampi_wide8 w;
    w.low = _mm256_loadu_pd(p);
    w.high = _mm256_loadu_pd(p + 4);
    return w;
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_store_wide8(double* p, ampi_wide8 w) {
    _mm256_storeu_pd(p, w.low);
    _mm256_storeu_pd(p + 4, w.high);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_load_lanes8(ampi_wide8* acc, const double* p) {
    acc[0] = ampi_load_wide8(p);
    acc[1] = ampi_load_wide8(p + 8);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_store_lanes8(double* p, const ampi_wide8* acc) {
    ampi_store_wide8(p, acc[0]);
    ampi_store_wide8(p + 8, acc[1]);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_wide8_add(ampi_wide8* acc, ampi_wide8 x) {
    acc->low = _mm256_add_pd(acc->low, x.low);
    acc->high = _mm256_add_pd(acc->high, x.high);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_wide8_fma(ampi_wide8* acc, ampi_wide8 a, ampi_wide8 b) {
    acc->low = _mm256_fmadd_pd(a.low, b.low, acc->low);
    acc->high = _mm256_fmadd_pd(a.high, b.high, acc->high);
}
/* As ampi_round_24. */
AMPI_TARGET_AVX2 AMPI_INLINE __m256d ampi_round_24_x4(__m256d d) {
    const __m256d shift = _mm256_set1_pd(536870912.0);
    const __m256d power = _mm256_and_pd(d, _mm256_castsi256_pd(_mm256_set1_epi64x(-0x10000000000000)));
    return _mm256_fnmadd_pd(power, shift, _mm256_fmadd_pd(power, shift, d));
}
/* In the first m lanes; for usual means. */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_wide8_moment(ampi_wide8* acc, ampi_wide8 x, ampi_wide8 mean, size_t m) {
    ampi_wide8 d;
    if (m < 8) {                                  /* where x is the mean, nothing is added */
        const ampi_wide8 on = ampi_widen_x8(ampi_first_x8(_mm256_set1_ps(-1.0f), m));
        x.low = _mm256_blendv_pd(mean.low, x.low, on.low);
        x.high = _mm256_blendv_pd(mean.high, x.high, on.high);
    }
    d.low = ampi_round_24_x4(_mm256_sub_pd(x.low, mean.low));
    d.high = ampi_round_24_x4(_mm256_sub_pd(x.high, mean.high));
    ampi_wide8_fma(acc, d, d);
}
/* The tree of ampi_lane_total, of both halves. */
AMPI_TARGET_AVX2 AMPI_INLINE double ampi_wide8_total(const ampi_wide8* acc) {
    __m256d a = _mm256_add_pd(_mm256_add_pd(acc[0].low, acc[1].low), _mm256_add_pd(acc[0].high, acc[1].high));
    __m128d c = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(c) + _mm_cvtsd_f64(_mm_unpackhi_pd(c, c));
}

AMPI_TARGET_AVX2 AMPI_INLINE void ampi_sum_x8(amp_dtype t, size_t i, size_t m, int upper, ampi_wide8* acc,
                                              const void* x) {
    if (upper == 0) AMPI_AHEAD(x, i * amp_dtype_size(t));
    ampi_wide8_add(acc + upper, ampi_get_wide_x8(t, x, i, m));
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_moment_x8(amp_dtype t, size_t i, size_t m, int upper, ampi_wide8* acc,
                                                 const void* x, const ampi_wide8* mean) {
    ampi_wide8_moment(acc + upper, ampi_get_wide_x8(t, x, i, m), mean[upper], m);
}
/* sum += g, dot += g * (x - mean). */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_dot_step8(size_t m, ampi_wide8* sum, ampi_wide8* dot, ampi_wide8 g, __m256 x,
                                                 __m256 mean) {
    ampi_wide8_add(sum, g);
    ampi_wide8_fma(dot, g, ampi_widen_x8(ampi_first_x8(_mm256_sub_ps(x, mean), m)));
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_dot_x8(amp_dtype t, size_t i, size_t m, int upper, ampi_wide8* sum,
                                              ampi_wide8* dot, const void* g, const void* x, const float* mean) {
    if (upper == 0) AMPI_AHEAD(g, i * amp_dtype_size(t));
    if (upper == 0) AMPI_AHEAD(x, i * amp_dtype_size(t));
    ampi_dot_step8(m, sum + upper, dot + upper, ampi_get_wide_x8(t, g, i, m), ampi_read8_avx2(x, t, i, m),
                   _mm256_loadu_ps(mean + 8 * upper));
}

AMPI_TARGET_AVX2 AMPI_FN void ampi_lane_sum_avx2(double* acc, ampi_part x) {
    ampi_wide8 a[2];
    ampi_load_lanes8(a, acc);
    AMPI_ALL_X8(ampi_sum_x8, x.t, x.n, a, x.data);
    ampi_store_lanes8(acc, a);
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_lane_moment_avx2(double* acc, ampi_part x, const double* mean) {
    ampi_wide8 a[2], m[2];
    ampi_load_lanes8(a, acc);
    ampi_load_lanes8(m, mean);
    AMPI_ALL_X8(ampi_moment_x8, x.t, x.n, a, x.data, m);
    ampi_store_lanes8(acc, a);
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_lane_dot_avx2(double* sum, double* dot, ampi_part g, ampi_part x,
                                                 const float* mean) {
    ampi_wide8 a[2], b[2];
    ampi_load_lanes8(a, sum);
    ampi_load_lanes8(b, dot);
    AMPI_ALL_X8(ampi_dot_x8, x.t, x.n, a, b, g.data, x.data, mean);
    ampi_store_lanes8(sum, a);
    ampi_store_lanes8(dot, b);
}
#endif

/* The three for a part, whose type is F32 where there is no kernel by hand, as for means that are not usual. */
AMPI_FN void ampi_lane_sum(double* acc, ampi_part x) {
#if AMPI_X86
    if (ampi_simd() >= AMP_ISA_AVX2) { AMPI_BY_HAND(ampi_lane_sum, acc, x); return; }
#endif
    ampi_lane_sum_plain(acc, (const float*)x.data, x.n);
}
AMPI_FN void ampi_lane_moment(double* acc, ampi_part x, const double* mean, int usual) {
#if AMPI_X86
    if (ampi_simd() >= AMP_ISA_AVX2 && usual) { AMPI_BY_HAND(ampi_lane_moment, acc, x, mean); return; }
#endif
    (void)usual;
    ampi_lane_moment_plain(acc, (const float*)x.data, mean, x.n);
}
AMPI_FN void ampi_lane_dot(double* sum, double* dot, ampi_part g, ampi_part x, const float* mean) {
#if AMPI_X86
    if (ampi_simd() >= AMP_ISA_AVX2) { AMPI_BY_HAND(ampi_lane_dot, sum, dot, g, x, mean); return; }
#endif
    ampi_lane_dot_plain(sum, dot, (const float*)g.data, (const float*)x.data, mean, x.n);
}

/* A sum over many elements is split into this many parts of whole tiles (or rows), which threads share. */
enum { AMPI_PARTS = 64 };
AMPI_FN size_t ampi_part_start(size_t count, int64_t part) {
    return (count / AMPI_PARTS) * (size_t)part + ampi_min_size(count % AMPI_PARTS, (size_t)part);
}
AMPI_FN double ampi_parts_total(const double* parts) {
    double total = 0.0;
    int i;
    for (i = 0; i < AMPI_PARTS; i++) total += parts[i];
    return total;
}

/* --- pooling ----------------------------------------------------------------------------- */

/* A checked shape with the defaults filled in. */
typedef struct ampi_pool_plan {
    int max, h, w, oh, ow, kh, kw, sh, sw, ph, pw, exclude_pad;
    size_t planes;
} ampi_pool_plan;

AMPI_FN amp_result ampi_pool_plan_make(const amp_pool2d_shape* s, ampi_pool_plan* p, const amp_logger* log) {
    int64_t oh, ow;
    memset(p, 0, sizeof *p);
    if (!s) return ampi_fail(log, AMP_ERR_ARGUMENT, "pool2d: the shape is NULL");
    if (s->kind != AMP_POOL_MAX && s->kind != AMP_POOL_AVERAGE)
        return ampi_fail(log, AMP_ERR_DESC, "pool2d: kind %d is neither maximum nor average", (int)s->kind);
    if (s->n < 1 || s->channels < 1 || s->height < 1 || s->width < 1
        || (int64_t)s->height * s->width > INT32_MAX)
        return ampi_fail(log, AMP_ERR_SHAPE,
                         "pool2d: input %dx%dx%dx%d needs sizes >= 1 and planes below 2^31", s->n,
                         s->channels, s->height, s->width);
    if (s->kernel_h < 1 || s->kernel_w < 1 || s->stride_h < 0 || s->stride_w < 0)
        return ampi_fail(log, AMP_ERR_DESC,
                         "pool2d: kernel %dx%d, stride %dx%d: kernel needs >= 1, stride >= 0", s->kernel_h,
                         s->kernel_w, s->stride_h, s->stride_w);
    if (s->pad_h < 0 || s->pad_w < 0 || s->pad_h > s->kernel_h / 2 || s->pad_w > s->kernel_w / 2)
        return ampi_fail(log, AMP_ERR_DESC, "pool2d: padding %dx%d is outside 0..half of the %dx%d kernel",
                         s->pad_h, s->pad_w, s->kernel_h, s->kernel_w);
    p->max = s->kind == AMP_POOL_MAX;
    p->h = s->height; p->w = s->width;
    p->kh = s->kernel_h; p->kw = s->kernel_w;
    p->sh = ampi_default_int(s->stride_h, p->kh); p->sw = ampi_default_int(s->stride_w, p->kw);
    p->ph = s->pad_h; p->pw = s->pad_w;
    p->exclude_pad = s->exclude_pad != 0;
    p->planes = ampi_area((size_t)s->n, (size_t)s->channels);
    if (ampi_area(p->planes, (size_t)s->height * (size_t)s->width) > SIZE_MAX / 16)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "pool2d: input %dx%dx%dx%d is more than memory can hold", s->n,
                         s->channels, s->height, s->width);
    oh = (int64_t)p->h + 2 * (int64_t)p->ph - p->kh;
    ow = (int64_t)p->w + 2 * (int64_t)p->pw - p->kw;
    if (oh < 0 || ow < 0)
        return ampi_fail(log, AMP_ERR_SHAPE,
                         "pool2d: kernel %dx%d is larger than its %dx%d input with padding %dx%d", p->kh,
                         p->kw, p->h, p->w, p->ph, p->pw);
    if (oh / p->sh >= INT32_MAX || ow / p->sw >= INT32_MAX)
        return ampi_fail(log, AMP_ERR_SHAPE, "pool2d: an output side of an input of %dx%d is no int", p->h, p->w);
    p->oh = (int)(oh / p->sh) + 1;
    p->ow = (int)(ow / p->sw) + 1;
    return AMP_OK;
}

AMP_DEF amp_result amp_pool2d_output(const amp_pool2d_shape* s, int* out_h, int* out_w,
                                     const amp_exec* exec) {
    ampi_pool_plan p;
    amp_result r = ampi_pool_plan_make(s, &p, ampi_exec_logger(exec));
    if (r != AMP_OK) return r;
    if (out_h) *out_h = p.oh;
    if (out_w) *out_w = p.ow;
    return AMP_OK;
}

/* Pixels of one row (or column) of a plane that window `o` covers: [first, last), padding cut off. */
typedef struct ampi_span { int first, last; } ampi_span;
AMPI_HD AMPI_FN ampi_span ampi_window(int o, int stride, int pad, int kernel, int size) {
    int64_t start = (int64_t)o * stride - pad;
    ampi_span s;
    s.first = (int)(start > 0 ? start : 0);
    s.last = (int)(start + kernel < size ? start + kernel : size);
    return s;
}
/* The windows o in [o0, o1) whose pixel o*stride - pad + k lies in [first, last). */
AMPI_HD AMPI_FN ampi_span ampi_windows_at(int o0, int o1, int stride, int pad, int k, int first, int last) {
    int64_t low = (int64_t)first + pad - k, high = (int64_t)last - 1 + pad - k;
    ampi_span s;
    low = low > 0 ? (low + stride - 1) / stride : 0;
    s.first = (int)(low > o0 ? (low < o1 ? low : o1) : o0);
    s.last = high < 0 ? s.first : (int)(high / stride + 1 < o1 ? high / stride + 1 : o1);
    if (s.last < s.first) s.last = s.first;
    return s;
}
/* The places k in a kernel that lie on one of the pixels [first, last) in one of the windows [o0, o1): of a kernel
   much larger than the image all others fall on padding. */
AMPI_FN ampi_span ampi_kernel_range(int o0, int o1, int stride, int pad, int kernel, int first, int last) {
    int64_t low = (int64_t)first + pad - (int64_t)(o1 - 1) * stride;
    int64_t high = (int64_t)last + pad - (int64_t)o0 * stride;
    ampi_span s;
    s.first = (int)(low > 0 ? (low < kernel ? low : kernel) : 0);
    s.last = (int)(high > 0 ? (high < kernel ? high : kernel) : 0);
    return s;
}
/* The windows o in [0, out) that cover any of the pixels [first, last). */
AMPI_HD AMPI_FN ampi_span ampi_window_range(int out, int stride, int pad, int kernel, int first, int last) {
    ampi_span s;
    s.first = ampi_windows_at(0, out, stride, pad, kernel - 1, first, last).first;
    s.last = ampi_windows_at(0, out, stride, pad, 0, first, last).last;
    return s;
}
/* How many pixels of the plane an average divides by. */
AMPI_HD AMPI_FN float ampi_pool_count(const ampi_pool_plan* p, int oh, int ow) {
    ampi_span rows = ampi_window(oh, p->sh, p->ph, p->kh, p->h),
              columns = ampi_window(ow, p->sw, p->pw, p->kw, p->w);
    if (!p->exclude_pad) return (float)((double)p->kh * (double)p->kw);
    return (float)((double)(rows.last - rows.first) * (double)(columns.last - columns.first));
}

/* Is x larger? A NaN is larger than anything, and the first NaN stays. */
AMPI_HD AMPI_INLINE uint32_t ampi_pool_better(float x, float a) {
    return ampi_mask(x > a) | (ampi_nan_mask(x) & ~ampi_nan_mask(a));
}
AMPI_HD AMPI_INLINE float ampi_pool_max(float a, float x) { return ampi_select(ampi_pool_better(x, a), x, a); }
/* acc = max(acc, x) or acc + x, over padded rows. */
AMPI_INLINE void ampi_pool_rows_body(int hw, int max, float* AMPI_RESTRICT acc,
                                     const float* AMPI_RESTRICT x, size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; i < n; i += AMPI_LANES) {
        if (max) for (l = 0; l < AMPI_LANES; l++) acc[i + l] = ampi_pool_max(acc[i + l], x[i + l]);
        else     for (l = 0; l < AMPI_LANES; l++) acc[i + l] += x[i + l];
    }
}
AMPI_KERNEL(ampi_pool_rows, (int max, float* acc, const float* x, size_t n), max, acc, x, n)

/* acc[j] = max(acc[j], x[j*stride]) or the sum, j < n: one column of every window. With stride 1, acc and x
   are accessible up to a multiple of AMPI_LANES, and what lies there in acc stays as it is. */
AMPI_INLINE void ampi_pool_columns_loop(int max, float* AMPI_RESTRICT acc, const float* AMPI_RESTRICT x,
                                        uint32_t n) {
    uint32_t i, l;
    for (i = 0; i < n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) {
            float v = max ? ampi_pool_max(acc[i + l], x[i + l]) : acc[i + l] + x[i + l];
            acc[i + l] = ampi_select(ampi_mask(l < n - i), v, acc[i + l]);
        }
}
AMPI_INLINE void ampi_pool_columns_body(int hw, int max, float* acc, const float* x, size_t stride,
                                        uint32_t n) {
    uint32_t i;
    (void)hw;
    if (stride == 1 && max) ampi_pool_columns_loop(1, acc, x, n);
    else if (stride == 1)   ampi_pool_columns_loop(0, acc, x, n);
    else for (i = 0; i < n; i++) acc[i] = max ? ampi_pool_max(acc[i], x[i * stride]) : acc[i] + x[i * stride];
}
AMPI_KERNEL(ampi_pool_columns, (int max, float* acc, const float* x, size_t stride, uint32_t n), max, acc,
            x, stride, n)

enum { AMPI_POOL_BLOCK = 256, AMPI_POOL_BAND = 4096, AMPI_POOL_ROW = AMPI_TILE + 2 * AMPI_LANES };

/* A segment of a row, with room behind it. Windows two pixels apart read every other pixel, so for them the
   even and the odd pixels are kept side by side, and both strides look like 1. */
typedef struct ampi_pool_row {
    float x[AMPI_POOL_ROW], even[AMPI_POOL_ROW / 2], odd[AMPI_POOL_ROW / 2];
} ampi_pool_row;

AMPI_INLINE void ampi_pool_split_body(int hw, float* AMPI_RESTRICT even, float* AMPI_RESTRICT odd,
                                      const float* AMPI_RESTRICT x, size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; 2 * i < n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) {
            even[i + l] = x[2 * (i + l)];
            odd[i + l] = x[2 * (i + l) + 1];
        }
}
AMPI_KERNEL(ampi_pool_split, (float* even, float* odd, const float* x, size_t n), even, odd, x, n)

/* The n pixels of row->x are complete. */
AMPI_FN void ampi_pool_row_done(ampi_pool_row* row, int stride, size_t n) {
    memset(row->x + n, 0, 2 * AMPI_LANES * sizeof(float));
    if (stride == 2) ampi_pool_split(row->even, row->odd, row->x, n);
}
/* Pixel c and those that follow it at the stride. */
AMPI_FN const float* ampi_pool_row_at(const ampi_pool_row* row, int stride, int64_t c) {
    return stride == 2 ? ((c & 1) ? row->odd : row->even) + c / 2 : row->x + c;
}

/* Windows [o0, o1) of output row oh, at most AMPI_POOL_BLOCK: first down the columns, where the pixels lie
   side by side, then along the row. A row too long for a tile is taken in segments. */
AMPI_FN void ampi_pool_block(const ampi_pool_plan* p, const void* x, amp_dtype xt, size_t plane, int oh,
                             int o0, int o1, float* acc) {
    ampi_pool_row row;
    float tile[AMPI_TILE];
    ampi_span rows = ampi_window(oh, p->sh, p->ph, p->kh, p->h), places;
    int first = ampi_window(o0, p->sw, p->pw, p->kw, p->w).first, i, k, s0;
    int last = ampi_window(o1 - 1, p->sw, p->pw, p->kw, p->w).last;
    for (i = 0; i < o1 - o0; i++) acc[i] = p->max ? ampi_float(0xff800000u) : 0.0f;
    for (s0 = first; s0 < last; s0 += AMPI_TILE) {
        int s1 = ampi_min_int(last - s0, AMPI_TILE) + s0;
        size_t n = (size_t)(s1 - s0), start = plane + (size_t)s0;
        ampi_load_f32(row.x, x, xt, start + (size_t)rows.first * (size_t)p->w, n);
        memset(row.x + n, 0, AMPI_LANES * sizeof(float));
        for (i = rows.first + 1; i < rows.last; i++)
            ampi_pool_rows(p->max, row.x, ampi_view(x, xt, start + (size_t)i * (size_t)p->w, n, tile),
                           ampi_padded(n));
        ampi_pool_row_done(&row, p->sw, n);
        places = ampi_kernel_range(o0, o1, p->sw, p->pw, p->kw, s0, s1);
        for (k = places.first; k < places.last; k++) {
            ampi_span o = ampi_windows_at(o0, o1, p->sw, p->pw, k, s0, s1);
            int64_t c = (int64_t)o.first * p->sw - p->pw + k - s0;
            if (o.first < o.last)
                ampi_pool_columns(p->max, acc + (o.first - o0), ampi_pool_row_at(&row, p->sw, c),
                                  p->sw == 2 ? 1 : (size_t)p->sw, (uint32_t)(o.last - o.first));
        }
    }
}

/* Small planes, which fit on the stack, are searched pixel by pixel; that is faster where output rows are
   short. For the search, values become integers of the same order: -0 becomes 0, and every NaN the largest
   integer. */
AMPI_FN int ampi_pool_is_small(const ampi_pool_plan* p, int columns) {
    return p->ow <= columns && p->oh <= columns && p->h <= AMPI_POOL_BAND / p->w;
}
enum { AMPI_POOL_SMALL = 64 };

AMPI_HD AMPI_INLINE int32_t ampi_pool_key(float x) {
    uint32_t b = ampi_bits(x), magnitude = b & 0x7fffffffu;
    uint32_t k = ampi_select_bits(0u - (b >> 31), 0u - magnitude, magnitude);
    return (int32_t)ampi_select_bits(ampi_mask(magnitude > 0x7f800000u), 0x7fffffffu, k);
}
AMPI_INLINE void ampi_pool_keys_body(int hw, int32_t* AMPI_RESTRICT key, const float* AMPI_RESTRICT x,
                                     size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; i < n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) key[i + l] = ampi_pool_key(x[i + l]);
}
AMPI_KERNEL(ampi_pool_keys, (int32_t* key, const float* x, size_t n), key, x, n)

/* at[o] = position of the first maximum of each window of a plane. */
AMPI_FN void ampi_pool_small_argmax(const ampi_pool_plan* p, const float* x, int32_t* at) {
    int32_t key[AMPI_POOL_BAND];
    ampi_span columns[AMPI_POOL_SMALL], rows;
    int oh, ow, i, j;
    ampi_pool_keys(key, x, ampi_padded((size_t)(p->h * p->w)));
    for (ow = 0; ow < p->ow; ow++) columns[ow] = ampi_window(ow, p->sw, p->pw, p->kw, p->w);
    for (oh = 0; oh < p->oh; oh++) {
        rows = ampi_window(oh, p->sh, p->ph, p->kh, p->h);
        for (ow = 0; ow < p->ow; ow++) {
            const ampi_span c = columns[ow];
            int32_t best = INT32_MIN, place = 0;
            for (i = rows.first * p->w; i < rows.last * p->w; i += p->w)
                for (j = i + c.first; j < i + c.last; j++) {
                    place = key[j] > best ? j : place;
                    best = key[j] > best ? key[j] : best;
                }
            *at++ = place;
        }
    }
}

AMPI_FN void ampi_pool_small_sums(const ampi_pool_plan* p, const float* x, float* y) {
    int oh, ow, i, j;
    for (oh = 0; oh < p->oh; oh++) {
        ampi_span rows = ampi_window(oh, p->sh, p->ph, p->kh, p->h);
        for (ow = 0; ow < p->ow; ow++) {
            ampi_span c = ampi_window(ow, p->sw, p->pw, p->kw, p->w);
            float sum = 0.0f;
            for (i = rows.first * p->w; i < rows.last * p->w; i += p->w)
                for (j = i + c.first; j < i + c.last; j++) sum += x[j];
            *y++ = sum / ampi_pool_count(p, oh, ow);
        }
    }
}

AMPI_FN void ampi_pool_small_plane(const ampi_pool_plan* p, const void* x, amp_dtype xt, void* y,
                                   amp_dtype yt, size_t plane) {
    float x_tile[AMPI_POOL_BAND], y_tile[AMPI_POOL_SMALL * AMPI_POOL_SMALL];
    int32_t at[AMPI_POOL_SMALL * AMPI_POOL_SMALL];
    size_t n = (size_t)(p->h * p->w), out = (size_t)(p->oh * p->ow), i;
    const float* v = ampi_view(x, xt, plane * n, n, x_tile);
    if (p->max) {
        ampi_pool_small_argmax(p, v, at);
        for (i = 0; i < out; i++) y_tile[i] = v[at[i]];
    } else {
        ampi_pool_small_sums(p, v, y_tile);
    }
    ampi_store_f32(y, yt, plane * out, y_tile, out);
}

/* Maxima of 2 x 2 windows side by side, the usual ones: 16 at a time, from rows x0 and x1. */
typedef struct ampi_pool_quads {
    float max[AMPI_LANES];
    uint32_t b[AMPI_LANES], c[AMPI_LANES], d[AMPI_LANES];    /* is the second .. fourth value the first maximum? */
} ampi_pool_quads;
AMPI_INLINE void ampi_pool_quads_make(const float* x0, const float* x1, ampi_pool_quads* q) {
    float even0[AMPI_LANES], odd0[AMPI_LANES], even1[AMPI_LANES], odd1[AMPI_LANES];
    size_t l;
    for (l = 0; l < AMPI_LANES; l++) { even0[l] = x0[2 * l]; odd0[l] = x0[2 * l + 1]; }
    for (l = 0; l < AMPI_LANES; l++) { even1[l] = x1[2 * l]; odd1[l] = x1[2 * l + 1]; }
    for (l = 0; l < AMPI_LANES; l++) {
        uint32_t b = ampi_pool_better(odd0[l], even0[l]), c, d;
        float m = ampi_select(b, odd0[l], even0[l]);
        c = ampi_pool_better(even1[l], m);
        m = ampi_select(c, even1[l], m);
        d = ampi_pool_better(odd1[l], m);
        q->max[l] = ampi_select(d, odd1[l], m);
        q->b[l] = b & ~(c | d);
        q->c[l] = c & ~d;
        q->d[l] = d;
    }
}
/* y[rows][n] from x with rows of w; x and g below have room for whole groups of lanes behind the last row. */
AMPI_INLINE void ampi_pool_quads_max_body(int hw, float* y, const float* x, size_t w, size_t rows, size_t n) {
    ampi_pool_quads q;
    size_t r, i;
    (void)hw;
    for (r = 0; r < rows; r++, x += 2 * w, y += n)
        for (i = 0; i < n; i += AMPI_LANES) {
            ampi_pool_quads_make(x + 2 * i, x + w + 2 * i, &q);
            ampi_copy_floats(y + i, q.max, n - i < AMPI_LANES ? n - i : (size_t)AMPI_LANES);
        }
}
AMPI_KERNEL(ampi_pool_quads_max, (float* y, const float* x, size_t w, size_t rows, size_t n), y, x, w, rows, n)

/* dx from g[rows][n]: 0 + g at the first maximum, 0 elsewhere. */
AMPI_INLINE void ampi_pool_quads_spread_body(int hw, float* dx, const float* x, const float* g, size_t w,
                                             size_t rows, size_t n) {
    ampi_pool_quads q;
    size_t r, i, l;
    (void)hw;
    for (r = 0; r < rows; r++, x += 2 * w, dx += 2 * w, g += n)
        for (i = 0; i < n; i += AMPI_LANES) {
            float up[2 * AMPI_LANES], down[2 * AMPI_LANES];
            uint32_t k[AMPI_LANES];
            size_t count = 2 * (n - i < AMPI_LANES ? n - i : (size_t)AMPI_LANES);
            ampi_pool_quads_make(x + 2 * i, x + w + 2 * i, &q);
            for (l = 0; l < AMPI_LANES; l++) k[l] = ampi_bits(0.0f + g[i + l]);
            for (l = 0; l < AMPI_LANES; l++) {
                up[2 * l] = ampi_float(k[l] & ~(q.b[l] | q.c[l] | q.d[l]));
                up[2 * l + 1] = ampi_float(k[l] & q.b[l]);
            }
            for (l = 0; l < AMPI_LANES; l++) {
                down[2 * l] = ampi_float(k[l] & q.c[l]);
                down[2 * l + 1] = ampi_float(k[l] & q.d[l]);
            }
            ampi_copy_floats(dx + 2 * i, up, count);
            ampi_copy_floats(dx + w + 2 * i, down, count);
            if (i + AMPI_LANES >= n && w > 2 * n) dx[2 * n] = dx[w + 2 * n] = 0.0f;
        }
}
AMPI_KERNEL(ampi_pool_quads_spread,
            (float* dx, const float* x, const float* g, size_t w, size_t rows, size_t n), dx, x, g, w, rows, n)

/* Such windows, in rows of which two fit a band. */
AMPI_FN int ampi_pool_is_quads(const ampi_pool_plan* p) {
    return p->max && p->kh == 2 && p->kw == 2 && p->sh == 2 && p->sw == 2 && p->ph == 0 && p->pw == 0
           && p->w <= AMPI_POOL_BAND / 2;
}
/* Elements [i, i+n) of `total` with room for two groups of lanes behind them. */
AMPI_FN const float* ampi_pool_view(const void* x, amp_dtype t, size_t i, size_t n, size_t total, float* tile) {
    if (ampi_dtype(t) == AMP_F32 && total - i - n >= 2 * AMPI_LANES) return (const float*)x + i;
    ampi_load_f32(tile, x, t, i, n);
    memset(tile + n, 0, 2 * AMPI_LANES * sizeof *tile);
    return tile;
}

/* A plane, band of rows after band of rows. dy NULL: the maxima into out; otherwise the gradient into out. */
AMPI_FN void ampi_pool_quads_plane(const ampi_pool_plan* p, const void* x, amp_dtype xt, const void* dy,
                                   amp_dtype dyt, void* out, amp_dtype t, size_t plane) {
    float tile[(int)AMPI_POOL_BAND + 2 * (int)AMPI_LANES], g_tile[(int)AMPI_POOL_BAND / 4 + 2 * (int)AMPI_LANES];
    float out_tile[AMPI_POOL_BAND];
    const size_t w = (size_t)p->w, h = (size_t)p->h, n = (size_t)p->ow, oh = (size_t)p->oh;
    const size_t most = AMPI_POOL_BAND / 2 / w;
    size_t r, rows;
    for (r = 0; r < oh; r += rows) {
        size_t at = (plane * oh + r) * n, from = (plane * h + 2 * r) * w, to = dy ? from : at, count;
        const float* v;
        float* d = ampi_dtype(t) == AMP_F32 ? (float*)out + to : out_tile;
        rows = ampi_min_size(most, oh - r);
        count = dy ? 2 * rows * w : rows * n;
        v = ampi_pool_view(x, xt, from, 2 * rows * w, p->planes * h * w, tile);
        if (dy) ampi_pool_quads_spread(d, v, ampi_pool_view(dy, dyt, at, rows * n, p->planes * oh * n, g_tile), w,
                                       rows, n);
        else ampi_pool_quads_max(d, v, w, rows, n);
        if (d == out_tile) ampi_store_f32(out, t, to, out_tile, count);
    }
    if (!dy || h % 2 == 0) return;
    memset(out_tile, 0, w * sizeof *out_tile);                    /* the row that no window covers */
    ampi_store_f32(out, t, (plane * h + h - 1) * w, out_tile, w);
}

/* Of numbers of 16 bits, what such a window has in a row is a 32-bit word, and so is its gradient: sixteen windows
   by hand, without floats. Of rows shorter than that, several pairs of rows at a time, whose words are put in order
   by permutations: of 32 neighbouring words those in an upper row and those in a lower one, and back. */
typedef struct ampi_pool_words {
    size_t pairs, n;                   /* pairs of rows at a time, windows of a row; no pairs: not for this plane */
    int32_t up[16], down[16], first[16], second[16];
} ampi_pool_words;

AMPI_FN void ampi_pool_words_make(const ampi_pool_plan* p, amp_dtype a, amp_dtype b, amp_dtype c, ampi_pool_words* m) {
    int l, n = p->ow;
    memset(m, 0, sizeof *m);
    if (ampi_dtype(a) == AMP_F32 || !ampi_typed_both(a, b) || !ampi_typed_both(a, c) || !ampi_pool_is_quads(p)
        || p->w % 2 != 0) return;
    m->n = (size_t)n;
    m->pairs = n <= 8 ? (size_t)(16 / n) : 1;
    for (l = 0; n <= 8 && l < 16 / n * n; l++) {
        int32_t word = l / n * 2 * n + l % n;
        m->up[l] = word;
        m->down[l] = word + n;
        *(word < 16 ? &m->first[word] : &m->second[word - 16]) = l;
        *(word + n < 16 ? &m->first[word + n] : &m->second[word + n - 16]) = 16 + l;
    }
}

#if AMPI_X86
typedef struct ampi_pool_pair { __m512i up, down; } ampi_pool_pair;

/* Elements become integers of the same order, as ampi_pool_key's. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_pool_keys_x32(amp_dtype t, __m512i x) {
    const __m512i mag = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    const __m512i key = _mm512_mask_sub_epi16(mag, _mm512_movepi16_mask(x), _mm512_setzero_si512(), mag);
    return _mm512_mask_mov_epi16(key, ampi_nan_x32(t, x), _mm512_set1_epi16(0x7fff));
}
/* The first maximum of each window: is it the one on the right, is it the one below? */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_pool_words_search(amp_dtype t, ampi_pool_pair x, __mmask16* right,
                                                           __mmask16* below) {
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
    const __m512i k0 = ampi_pool_keys_x32(t, x.up), k1 = ampi_pool_keys_x32(t, x.down);
    const __m512i k00 = _mm512_maskz_slli_epi32(AMPI_ALL16, k0, 16), k01 = _mm512_and_si512(k0, odd);
    const __m512i k10 = _mm512_maskz_slli_epi32(AMPI_ALL16, k1, 16), k11 = _mm512_and_si512(k1, odd);
    const __mmask16 b = _mm512_cmpgt_epi32_mask(k01, k00), d = _mm512_cmpgt_epi32_mask(k11, k10);
    const __m512i up = _mm512_mask_mov_epi32(k00, b, k01), down = _mm512_mask_mov_epi32(k10, d, k11);
    *below = _mm512_cmpgt_epi32_mask(down, up);
    *right = (__mmask16)((b & ~*below) | (d & *below));
}
/* Their maxima, or their gradients as words. */
AMPI_TARGET_AVX512 AMPI_INLINE __m256i ampi_pool_words_max(amp_dtype t, ampi_pool_pair x) {
    __mmask16 right, below;
    __m512i word;
    ampi_pool_words_search(t, x, &right, &below);
    word = _mm512_mask_mov_epi32(x.up, below, x.down);
    word = ampi_quiet_x32(t, _mm512_mask_srli_epi32(word, right, word, 16));
    return _mm512_maskz_cvtepi32_epi16(AMPI_ALL16, word);
}
AMPI_TARGET_AVX512 AMPI_INLINE ampi_pool_pair ampi_pool_words_spread(amp_dtype t, ampi_pool_pair x, __m256i dy) {
    __m512i g = ampi_quiet_x32(t, _mm512_maskz_cvtepu16_epi32(AMPI_ALL16, dy));
    __mmask16 right, below;
    ampi_pool_words_search(t, x, &right, &below);
    g = _mm512_maskz_mov_epi32(_mm512_cmpneq_epi32_mask(g, _mm512_set1_epi32(0x8000)), g);     /* 0 + -0 = 0 */
    g = _mm512_mask_slli_epi32(g, right, g, 16);
    x.up = _mm512_maskz_mov_epi32((__mmask16)~below, g);
    x.down = _mm512_maskz_mov_epi32(below, g);
    return x;
}

/* 2 * words words, an upper row's and behind them a lower row's. */
AMPI_TARGET_AVX512 AMPI_INLINE ampi_pool_pair ampi_pool_words_get(const ampi_pool_words* m, const uint16_t* x,
                                                                  size_t words) {
    const __m512i a = _mm512_maskz_loadu_epi32(ampi_first_x16(2 * words), x);
    const __m512i b = _mm512_maskz_loadu_epi32(words > 8 ? ampi_first_x16(2 * words - 16) : 0, x + 32);
    ampi_pool_pair v;
    v.up = _mm512_maskz_permutex2var_epi32(AMPI_ALL16, a, _mm512_loadu_si512(m->up), b);
    v.down = _mm512_maskz_permutex2var_epi32(AMPI_ALL16, a, _mm512_loadu_si512(m->down), b);
    return v;
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_pool_words_put(const ampi_pool_words* m, uint16_t* dx, size_t words,
                                                        ampi_pool_pair v) {
    const __m512i first = _mm512_loadu_si512(m->first), second = _mm512_loadu_si512(m->second);
    _mm512_mask_storeu_epi32(dx, ampi_first_x16(2 * words),
                             _mm512_maskz_permutex2var_epi32(AMPI_ALL16, v.up, first, v.down));
    if (words > 8)
        _mm512_mask_storeu_epi32(dx + 32, ampi_first_x16(2 * words - 16),
                                 _mm512_maskz_permutex2var_epi32(AMPI_ALL16, v.up, second, v.down));
}

/* A plane of `rows` rows of windows: the maxima into out if dy is NULL, otherwise the gradient into out. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_pool_words_short(amp_dtype t, const ampi_pool_words* m, size_t rows,
                                                          const uint16_t* x, const uint16_t* dy, uint16_t* out) {
    size_t r, at, words;
    for (r = 0, at = 0; r < rows; r += m->pairs, at += words) {
        ampi_pool_pair v;
        words = ampi_min_size(m->pairs, rows - r) * m->n;
        v = ampi_pool_words_get(m, x + 4 * at, words);
        if (dy) {
            const __m256i g = AMPI_LOAD_HALF_X16(ampi_first_x16(words), dy + at);
            ampi_pool_words_put(m, out + 4 * at, words, ampi_pool_words_spread(t, v, g));
        } else {
            _mm256_mask_storeu_epi16(out + at, ampi_first_x16(words), ampi_pool_words_max(t, v));
        }
    }
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_pool_words_long(amp_dtype t, const ampi_pool_words* m, size_t rows,
                                                         const uint16_t* x, const uint16_t* dy, uint16_t* out) {
    const size_t n = m->n, w = 2 * n;
    size_t r, i;
    for (r = 0; r < rows; r++)
        for (i = 0; i < n; i += 16) {
            const __mmask16 k = ampi_first_x16(n - i);
            const size_t up = 2 * r * w + 2 * i, at = r * n + i;
            ampi_pool_pair v;
            v.up = _mm512_maskz_loadu_epi32(k, x + up);
            v.down = _mm512_maskz_loadu_epi32(k, x + up + w);
            if (dy) {
                v = ampi_pool_words_spread(t, v, AMPI_LOAD_HALF_X16(k, dy + at));
                _mm512_mask_storeu_epi32(out + up, k, v.up);
                _mm512_mask_storeu_epi32(out + up + w, k, v.down);
            } else {
                _mm256_mask_storeu_epi16(out + at, k, ampi_pool_words_max(t, v));
            }
        }
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_pool_words_avx512(amp_dtype t, const ampi_pool_words* m, size_t rows,
                                                       const uint16_t* x, const uint16_t* dy, uint16_t* out) {
    if (m->n <= 8 && t == AMP_F16) ampi_pool_words_short(AMP_F16, m, rows, x, dy, out);
    else if (m->n <= 8) ampi_pool_words_short(AMP_BF16, m, rows, x, dy, out);
    else if (t == AMP_F16) ampi_pool_words_long(AMP_F16, m, rows, x, dy, out);
    else ampi_pool_words_long(AMP_BF16, m, rows, x, dy, out);
}

/* The same for AVX2, eight windows of a row at a time. */
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_nan_y16(amp_dtype t, __m256i x) {
    const __m256i mag = _mm256_and_si256(x, _mm256_set1_epi16(0x7fff));
    return _mm256_cmpgt_epi16(mag, _mm256_set1_epi16(t == AMP_F16 ? 0x7c00 : 0x7f80));
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_quiet_y16(amp_dtype t, __m256i x) {
    const __m256i quiet = _mm256_set1_epi16(t == AMP_F16 ? 0x200 : 0x40);
    return _mm256_or_si256(x, _mm256_and_si256(ampi_nan_y16(t, x), quiet));
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_pool_keys_y16(amp_dtype t, __m256i x) {
    const __m256i key = _mm256_sign_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7fff)), x);
    return _mm256_blendv_epi8(key, _mm256_set1_epi16(0x7fff), ampi_nan_y16(t, x));
}
/* right: how far to shift the word. */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_pool_words_search_y8(amp_dtype t, __m256i up, __m256i down, __m256i* right,
                                                            __m256i* below) {
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000u);
    const __m256i k0 = ampi_pool_keys_y16(t, up), k1 = ampi_pool_keys_y16(t, down);
    const __m256i k00 = _mm256_slli_epi32(k0, 16), k01 = _mm256_and_si256(k0, odd);
    const __m256i k10 = _mm256_slli_epi32(k1, 16), k11 = _mm256_and_si256(k1, odd);
    const __m256i b = _mm256_cmpgt_epi32(k01, k00), d = _mm256_cmpgt_epi32(k11, k10);
    *below = _mm256_cmpgt_epi32(_mm256_max_epi32(k10, k11), _mm256_max_epi32(k00, k01));
    *right = _mm256_and_si256(_mm256_blendv_epi8(b, d, *below), _mm256_set1_epi32(16));
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_pool_get_words_y8(const uint16_t* x, size_t m) {
    if (m < 8) return _mm256_maskload_epi32((const int*)(const void*)x, AMPI_V8_MASK(m));
    return _mm256_loadu_si256((const __m256i*)(const void*)x);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_pool_put_words_y8(uint16_t* dx, size_t m, __m256i v) {
    if (m < 8) _mm256_maskstore_epi32((int*)(void*)dx, AMPI_V8_MASK(m), v);
    else _mm256_storeu_si256((__m256i*)(void*)dx, v);
}
/* m windows, whose rows are w apart. */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_pool_words_y8(amp_dtype t, size_t m, size_t w, const uint16_t* x,
                                                     const uint16_t* dy, uint16_t* out) {
    const __m256i up = ampi_pool_get_words_y8(x, m), down = ampi_pool_get_words_y8(x + w, m);
    __m256i right, below, v;
    ampi_pool_words_search_y8(t, up, down, &right, &below);
    if (dy) {
        v = ampi_quiet_y16(t, _mm256_cvtepu16_epi32(ampi_load_words_avx2(dy, m)));
        v = _mm256_andnot_si256(_mm256_cmpeq_epi32(v, _mm256_set1_epi32(0x8000)), v);              /* 0 + -0 = 0 */
        v = _mm256_sllv_epi32(v, right);
        ampi_pool_put_words_y8(out, m, _mm256_andnot_si256(below, v));
        ampi_pool_put_words_y8(out + w, m, _mm256_and_si256(below, v));
    } else {
        v = ampi_quiet_y16(t, _mm256_srlv_epi32(_mm256_blendv_epi8(up, down, below), right));
        v = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
        v = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08);
        ampi_store_words_avx2(out, m, _mm256_castsi256_si128(v));
    }
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_pool_words_rows_y8(amp_dtype t, size_t n, size_t rows, const uint16_t* x,
                                                          const uint16_t* dy, uint16_t* out) {
    size_t r, i;
    for (r = 0; r < rows; r++)
        for (i = 0; i < n; i += 8) {
            const size_t at = r * n + i, from = 4 * r * n + 2 * i, to = dy ? from : at;
            if (n - i >= 8) ampi_pool_words_y8(t, 8, 2 * n, x + from, dy ? dy + at : NULL, out + to);
            else ampi_pool_words_y8(t, n - i, 2 * n, x + from, dy ? dy + at : NULL, out + to);
        }
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_pool_words_avx2(amp_dtype t, const ampi_pool_words* m, size_t rows,
                                                   const uint16_t* x, const uint16_t* dy, uint16_t* out) {
    if (t == AMP_F16) ampi_pool_words_rows_y8(AMP_F16, m->n, rows, x, dy, out);
    else ampi_pool_words_rows_y8(AMP_BF16, m->n, rows, x, dy, out);
}
#endif
AMPI_FN void ampi_pool_words_plane(amp_dtype t, const ampi_pool_words* m, const ampi_pool_plan* p, size_t plane,
                                   const void* x, const void* dy, void* out) {
    const size_t h = (size_t)p->h, rows = (size_t)p->oh, w = 2 * m->n, image = plane * h * w, at = plane * rows * m->n;
    uint16_t* to = (uint16_t*)out + (dy ? image : at);
#if AMPI_X86
    AMPI_BY_HAND(ampi_pool_words, t, m, rows, (const uint16_t*)x + image, dy ? (const uint16_t*)dy + at : NULL, to);
#else
    (void)t; (void)x;
#endif
    if (dy && h % 2 != 0) memset(to + (h - 1) * w, 0, w * sizeof *to);      /* the row that no window covers */
}

AMPI_FN void ampi_pool_plane(const ampi_pool_plan* p, const void* x, amp_dtype xt, void* y, amp_dtype yt,
                             size_t plane) {
    float acc[(int)AMPI_POOL_BLOCK + (int)AMPI_LANES];
    size_t x_plane = plane * (size_t)p->h * (size_t)p->w, y_plane = plane * (size_t)p->oh * (size_t)p->ow;
    int oh, o0, i;
    for (oh = 0; oh < p->oh; oh++)
        for (o0 = 0; o0 < p->ow; o0 += AMPI_POOL_BLOCK) {
            int o1 = o0 + ampi_min_int(p->ow - o0, AMPI_POOL_BLOCK);
            ampi_pool_block(p, x, xt, x_plane, oh, o0, o1, acc);
            for (i = o0; !p->max && i < o1; i++) acc[i - o0] /= ampi_pool_count(p, oh, i);
            ampi_store_f32(y, yt, y_plane + (size_t)oh * (size_t)p->ow + (size_t)o0, acc, (size_t)(o1 - o0));
        }
}

AMP_DEF amp_result amp_pool2d_forward(const amp_pool2d_shape* s, const void* x, amp_dtype x_dtype, void* y,
                                      amp_dtype y_dtype, const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, x_dtype, 0 }, { "y", y, y_dtype, 0 } };
    ampi_pool_words words;
    ampi_pool_plan p;
    size_t n;
    int64_t i;
    amp_result r = ampi_pool_plan_make(s, &p, ampi_exec_logger(exec));
    if (r != AMP_OK) return r;
    n = ampi_area(p.planes, (size_t)p.h * (size_t)p.w);
    if ((r = AMPI_CHECK(exec, "pool2d", n, list)) != AMP_OK) return r;
    ampi_pool_words_make(&p, x_dtype, y_dtype, y_dtype, &words);
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < (int64_t)p.planes; i++) {
        int small = ampi_pool_is_small(&p, AMPI_LANES);
        if (words.pairs > 0) ampi_pool_words_plane(ampi_dtype(x_dtype), &words, &p, (size_t)i, x, NULL, y);
        else if (small && ampi_pool_is_quads(&p))
            ampi_pool_quads_plane(&p, x, x_dtype, NULL, AMP_F32, y, y_dtype, (size_t)i);
        else if (small) ampi_pool_small_plane(&p, x, x_dtype, y, y_dtype, (size_t)i);
        else ampi_pool_plane(&p, x, x_dtype, y, y_dtype, (size_t)i);
    }
    return AMP_OK;
}

/* Looks at pixel x[j*stride] of window j < n, whose position is position + j*step: if it is larger than
   best[j], or the first one (at[j] < 0), best[j] and at[j] become the pixel and its position. Room as in
   ampi_pool_columns. */
AMPI_INLINE void ampi_arg_lanes(float* AMPI_RESTRICT best, int32_t* AMPI_RESTRICT at,
                                const float* AMPI_RESTRICT x, size_t stride, uint32_t position,
                                uint32_t step, uint32_t lanes, uint32_t n) {
    uint32_t l;
    for (l = 0; l < lanes; l++) {
        float v = x[l * stride];
        uint32_t better = (ampi_pool_better(v, best[l]) | (0u - ((uint32_t)at[l] >> 31))) & ampi_mask(l < n);
        best[l] = ampi_select(better, v, best[l]);
        at[l] = (int32_t)ampi_select_bits(better, position + l * step, (uint32_t)at[l]);
    }
}
AMPI_INLINE void ampi_arg_columns_body(int hw, float* best, int32_t* at, const float* x, size_t stride,
                                       uint32_t position, uint32_t step, uint32_t n) {
    uint32_t i;
    (void)hw;
    if (stride != 1) ampi_arg_lanes(best, at, x, stride, position, step, n, n);
    else for (i = 0; i < n; i += AMPI_LANES)
        ampi_arg_lanes(best + i, at + i, x + i, 1, position + i * step, step, AMPI_LANES, n - i);
}
AMPI_KERNEL(ampi_arg_columns,
            (float* best, int32_t* at, const float* x, size_t stride, uint32_t position, uint32_t step,
             uint32_t n),
            best, at, x, stride, position, step, n)

/* Positions (row * w + column) of the first maximum in windows [o0, o1) of output row oh, searched row by
   row. */
AMPI_FN void ampi_pool_argmax(const ampi_pool_plan* p, const void* x, amp_dtype xt, size_t plane, int oh,
                              int o0, int o1, int32_t* at) {
    ampi_pool_row row;
    float best[(int)AMPI_POOL_BLOCK + (int)AMPI_LANES];
    ampi_span rows = ampi_window(oh, p->sh, p->ph, p->kh, p->h), places;
    int first = ampi_window(o0, p->sw, p->pw, p->kw, p->w).first, i, k, s0;
    int last = ampi_window(o1 - 1, p->sw, p->pw, p->kw, p->w).last;
    for (i = 0; i < o1 - o0; i++) { at[i] = -1; best[i] = 0.0f; }
    for (i = rows.first; i < rows.last; i++)
        for (s0 = first; s0 < last; s0 += AMPI_TILE) {
            int s1 = ampi_min_int(last - s0, AMPI_TILE) + s0;
            ampi_load_f32(row.x, x, xt, plane + (size_t)i * (size_t)p->w + (size_t)s0, (size_t)(s1 - s0));
            ampi_pool_row_done(&row, p->sw, (size_t)(s1 - s0));
            places = ampi_kernel_range(o0, o1, p->sw, p->pw, p->kw, s0, s1);
            for (k = places.first; k < places.last; k++) {
                ampi_span o = ampi_windows_at(o0, o1, p->sw, p->pw, k, s0, s1);
                int64_t c = (int64_t)o.first * p->sw - p->pw + k;
                if (o.first < o.last)
                    ampi_arg_columns(best + (o.first - o0), at + (o.first - o0),
                                     ampi_pool_row_at(&row, p->sw, c - s0), p->sw == 2 ? 1 : (size_t)p->sw,
                                     (uint32_t)(i * p->w + c), (uint32_t)p->sw,
                                     (uint32_t)(o.last - o.first));
            }
        }
}

/* A part of a plane whose gradient is summed on the stack: rows [r0, r1), columns [c0, c1). It is whole
   rows or a part of one row. */
typedef struct ampi_pool_band { int r0, r1, c0, c1; } ampi_pool_band;

/* Adds g[j] where at[j] lies in the band, whose pixels are consecutive in the plane. */
AMPI_FN void ampi_pool_spread_max(const ampi_pool_plan* p, const ampi_pool_band* b, const int32_t* at,
                                  const float* g, int n, float* acc) {
    int32_t first = b->r0 * p->w + b->c0;
    uint32_t size = (uint32_t)((b->r1 - b->r0) * (b->c1 - b->c0)), i;
    int j;
    for (j = 0; j < n; j++) {
        i = (uint32_t)(at[j] - first);
        if (i < size) acc[i] += g[j];
    }
}

/* Adds g / count to every pixel of its window: along one row first, then that row to all rows of the
   windows. */
AMPI_FN void ampi_pool_spread_average(const ampi_pool_plan* p, const ampi_pool_band* b, int oh, int o0,
                                      int o1, float* g, float* acc) {
    float line[AMPI_POOL_BAND];
    ampi_span rows = ampi_window(oh, p->sh, p->ph, p->kh, p->h);
    ampi_span places = ampi_kernel_range(o0, o1, p->sw, p->pw, p->kw, b->c0, b->c1);
    int width = b->c1 - b->c0, i, j, k;
    for (j = o0; j < o1; j++) g[j - o0] /= ampi_pool_count(p, oh, j);
    memset(line, 0, (size_t)width * sizeof(float));
    for (k = places.first; k < places.last; k++) {
        ampi_span o = ampi_windows_at(o0, o1, p->sw, p->pw, k, b->c0, b->c1);
        int64_t at = (int64_t)o.first * p->sw - p->pw + k - b->c0;
        for (j = o.first; j < o.last; j++, at += p->sw) line[at] += g[j - o0];
    }
    for (i = ampi_max_int(rows.first, b->r0); i < ampi_min_int(rows.last, b->r1); i++)
        for (j = 0; j < width; j++) acc[(i - b->r0) * width + j] += line[j];
}

AMPI_FN void ampi_pool_band_backward(const ampi_pool_plan* p, const ampi_pool_band* b, const void* dy,
                                     amp_dtype dyt, const void* x, amp_dtype xt, void* dx, amp_dtype dxt,
                                     size_t plane) {
    float acc[AMPI_POOL_BAND], g[AMPI_POOL_BLOCK];
    int32_t at[(int)AMPI_POOL_BLOCK + (int)AMPI_LANES];
    size_t x_plane = plane * (size_t)p->h * (size_t)p->w, y_plane = plane * (size_t)p->oh * (size_t)p->ow;
    int width = b->c1 - b->c0, oh, o0, i;
    ampi_span down = ampi_window_range(p->oh, p->sh, p->ph, p->kh, b->r0, b->r1);
    ampi_span across = ampi_window_range(p->ow, p->sw, p->pw, p->kw, b->c0, b->c1);
    memset(acc, 0, sizeof acc);
    for (oh = down.first; oh < down.last; oh++)
        for (o0 = across.first; o0 < across.last; o0 += AMPI_POOL_BLOCK) {
            int o1 = o0 + ampi_min_int(across.last - o0, AMPI_POOL_BLOCK);
            ampi_load_f32(g, dy, dyt, y_plane + (size_t)oh * (size_t)p->ow + (size_t)o0, (size_t)(o1 - o0));
            if (p->max) {
                ampi_pool_argmax(p, x, xt, x_plane, oh, o0, o1, at);
                ampi_pool_spread_max(p, b, at, g, o1 - o0, acc);
            } else {
                ampi_pool_spread_average(p, b, oh, o0, o1, g, acc);
            }
        }
    for (i = b->r0; i < b->r1; i++)
        ampi_store_f32(dx, dxt, x_plane + (size_t)i * (size_t)p->w + (size_t)b->c0, acc + (i - b->r0) * width,
                       (size_t)width);
}

/* A plane in bands of whole rows, or of parts of one row where a row is too long. */
AMPI_FN void ampi_pool_plane_backward(const ampi_pool_plan* p, const void* dy, amp_dtype dyt, const void* x,
                                      amp_dtype xt, void* dx, amp_dtype dxt, size_t plane) {
    int columns = ampi_min_int(p->w, AMPI_POOL_BAND), rows = AMPI_POOL_BAND / columns, r, c;
    for (r = 0; r < p->h; r += ampi_min_int(rows, p->h - r))
        for (c = 0; c < p->w; c += ampi_min_int(columns, p->w - c)) {
            ampi_pool_band b;
            b.r0 = r; b.r1 = r + ampi_min_int(rows, p->h - r);
            b.c0 = c; b.c1 = c + ampi_min_int(columns, p->w - c);
            ampi_pool_band_backward(p, &b, dy, dyt, x, xt, dx, dxt, plane);
        }
}

/* The gradient of the maximum by hand, a vector at a time, of windows that meet or overlap and are one pixel or
   two apart. The rows of the image that a row of windows sees lie in a ring, as keys (see ampi_pool_key), with
   their sums beside them. What the windows see at one place of the kernel lies side by side: pixel c is element
   (c + pw) / sw of line (c + pw) % sw. The smallest integer fills lines up, so no window chooses padding. */
enum { AMPI_POOL_RING = 4096, AMPI_POOL_WIDEST = 16 };
typedef struct ampi_pool_ring {
    size_t length, row;                /* elements of a line, of a row's lines; no row: not for this plane */
    size_t last;                       /* row r is in slot r & last */
    size_t pixel[2];                   /* where a row's first two pixels are */
    size_t at[AMPI_POOL_WIDEST];       /* where the first window's place k is */
    int ages[9];                       /* of 3 x 3 places, see ampi_ring_look: compilers take constants apart */
} ampi_pool_ring;

AMPI_FN void ampi_pool_ring_make(const ampi_pool_plan* p, amp_dtype a, amp_dtype b, amp_dtype c, ampi_pool_ring* s) {
    int k;
    memset(s, 0, sizeof *s);
    if (!ampi_typed_both(a, b) || !ampi_typed_both(a, c) || !p->max || p->kw > AMPI_POOL_WIDEST
        || p->kh > AMPI_POOL_WIDEST || p->sh > p->kh || p->sw > p->kw || p->sw > 2 || p->w > AMPI_POOL_RING) return;
    s->length = ampi_padded((size_t)((p->w + 2 * p->pw) / p->sw + 1)) + AMPI_LANES;
    for (s->last = 1; s->last < (size_t)p->kh; s->last *= 2) {}
    if (s->length * (size_t)p->sw * s->last-- > AMPI_POOL_RING) return;
    s->row = s->length * (size_t)p->sw;
    for (k = 0; k < 2; k++) s->pixel[k] = (size_t)((k + p->pw) % p->sw) * s->length + (size_t)((k + p->pw) / p->sw);
    for (k = 0; k < 9; k++) s->ages[k] = 8 - k;
    for (k = 0; k < p->kw; k++) s->at[k] = (size_t)(k % p->sw) * s->length + (size_t)(k / p->sw);
}

#if AMPI_X86
typedef struct ampi_pool_rows_open {
    const ampi_pool_plan* p;
    const ampi_pool_ring* s;
    int32_t key[AMPI_POOL_RING];
    float sum[AMPI_POOL_RING];
} ampi_pool_rows_open;

typedef __m512i ampi_keys_avx512;
#define ampi_set_keys_avx512 _mm512_set1_epi32
/* n elements from i, and back. */
#define ampi_ring_get_avx512(t, x, i, n) ampi_get_x16(t, x, i, ampi_first_x16(n))
#define ampi_ring_put_avx512(t, x, i, n, v) ampi_put_x16(t, x, i, ampi_first_x16(n), v)

/* Of a number of 16 bits the last byte of the key is 0: see ampi_ring_look. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_ring_keys_avx512(__m512 x) {
    const __m512i u = _mm512_castps_si512(x), mag = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
    const __m512i key = _mm512_mask_sub_epi32(mag, _mm512_movepi32_mask(u), _mm512_setzero_si512(), mag);
    return _mm512_mask_mov_epi32(key, ampi_nan_x16(u), _mm512_set1_epi32(0x7fffff00));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ring_put_keys_avx512(int32_t* key, __m512i v, size_t n) {
    _mm512_storeu_si512(key, _mm512_mask_mov_epi32(_mm512_set1_epi32(INT32_MIN), ampi_first_x16(n), v));
}
/* n elements from i, at most 32: keys of the even ones and of the odd ones. Those of 16 bits lie in words. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ring_get_pairs_avx512(amp_dtype t, const void* x, size_t i, size_t n,
                                                               int32_t* even, int32_t* odd) {
    const __m512i two = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i e, o;
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    if (t == AMP_F32) {
        AMPI_AHEAD(x, i * sizeof(float) + 64);
        const __m512 a = ampi_get_x16(t, x, i, ampi_first_x16(n));
        const __m512 b = ampi_get_x16(t, x, i + 16, n > 16 ? ampi_first_x16(n - 16) : 0);
        e = ampi_ring_keys_avx512(_mm512_maskz_permutex2var_ps(AMPI_ALL16, a, two, b));
        o = ampi_ring_keys_avx512(_mm512_maskz_permutex2var_ps(
            AMPI_ALL16, a, _mm512_or_si512(two, _mm512_set1_epi32(1)), b));
    } else {
        const __mmask32 m = n < 32 ? ((__mmask32)1 << n) - 1u : 0xffffffffu;
        o = ampi_pool_keys_x32(t, _mm512_maskz_loadu_epi16(m, (const uint16_t*)x + i));
        e = _mm512_maskz_slli_epi32(AMPI_ALL16, o, 16);
        o = _mm512_and_si512(o, _mm512_set1_epi32((int)0xffff0000u));
    }
    ampi_ring_put_keys_avx512(even, e, (n + 1) / 2);
    ampi_ring_put_keys_avx512(odd, o, n / 2);
}
/* The way back, of floats. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ring_put_pairs_avx512(amp_dtype t, void* x, size_t i, size_t n,
                                                               const float* from_even, const float* from_odd) {
    const __m512 even = _mm512_loadu_ps(from_even), odd = _mm512_loadu_ps(from_odd);
    const __m512i zip = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i e = _mm512_castps_si512(even), o = _mm512_castps_si512(odd);
    __m512i low, high;
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    if (t == AMP_F32) {
        const __m512i last = _mm512_or_si512(zip, _mm512_set1_epi32(8));
        AMPI_AHEAD(x, i * sizeof(float) + 64);
        ampi_put_x16(t, x, i, ampi_first_x16(n), _mm512_maskz_permutex2var_ps(AMPI_ALL16, even, zip, odd));
        if (n > 16)
            ampi_put_x16(t, x, i + 16, ampi_first_x16(n - 16),
                         _mm512_maskz_permutex2var_ps(AMPI_ALL16, even, last, odd));
        return;
    }
    if (t == AMP_BF16) {
        low = _mm512_maskz_srli_epi32(AMPI_ALL16, ampi_round_bf16_x16(e), 16);
        high = _mm512_and_si512(ampi_round_bf16_x16(o), _mm512_set1_epi32((int)0xffff0000u));
    } else {
        low = _mm512_maskz_cvtepu16_epi32(AMPI_ALL16, ampi_f32_to_half_x16(e));
        high = _mm512_maskz_cvtepu16_epi32(AMPI_ALL16, ampi_f32_to_half_x16(o));
        high = _mm512_maskz_slli_epi32(AMPI_ALL16, high, 16);
    }
    _mm512_mask_storeu_epi16((uint16_t*)x + i, n < 32 ? ((__mmask32)1 << n) - 1u : 0xffffffffu,
                             _mm512_or_si512(low, high));
}

/* The next place of sixteen windows: is it larger than the best so far, and if not, how many places ago was that? Keys
   of 16 bits have room for it, and take it into the comparison: of equal ones the earlier is larger. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ring_look_avx512(amp_dtype t, const int32_t* key, __m512i* best,
                                                          __m512i* age) {
    const __m512i v = _mm512_loadu_si512(key), one = _mm512_set1_epi32(1);
    if (t == AMP_F32) *age = _mm512_maskz_add_epi32(_mm512_cmple_epi32_mask(v, *best), *age, one);
    else *best = _mm512_add_epi32(*best, one);
    *best = _mm512_maskz_max_epi32(AMPI_ALL16, *best, v);
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_ring_age_avx512(amp_dtype t, __m512i best, __m512i age) {
    return t == AMP_F32 ? age : _mm512_and_si512(best, _mm512_set1_epi32(255));
}
/* g where the maximum is of this age, 0 elsewhere; and sum + g there. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_ring_chosen_avx512(int this_age, __m512i age, __m512 g) {
    return _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(age, _mm512_set1_epi32(this_age)), g);
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_ring_plus_avx512(__m512 sum, int this_age, __m512i age, __m512 g) {
    return _mm512_mask_add_ps(sum, _mm512_cmpeq_epi32_mask(age, _mm512_set1_epi32(this_age)), sum, g);
}
/* v an element on, behind the last one of `before`. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_ring_moved_avx512(__m512 before, __m512 v) {
    return _mm512_castsi512_ps(_mm512_maskz_alignr_epi32(AMPI_ALL16, _mm512_castps_si512(v),
                                                         _mm512_castps_si512(before), 15));
}

/* The same for AVX2. */
typedef __m256i ampi_keys_avx2;
#define ampi_set_keys_avx2 _mm256_set1_epi32
#define ampi_ring_get_avx2(t, x, i, n) ampi_read8_avx2(x, t, i, n)
#define ampi_ring_put_avx2(t, x, i, n, v) ampi_put8_avx2(x, t, i, n, v)
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_ring_keys_avx2(__m256 x) {
    const __m256i u = _mm256_castps_si256(x), mag = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    const __m256i nan = _mm256_cmpgt_epi32(mag, _mm256_set1_epi32(0x7f800000));
    return _mm256_blendv_epi8(_mm256_sign_epi32(mag, u), _mm256_set1_epi32(0x7fffff00), nan);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ring_put_keys_avx2(int32_t* key, __m256i v, size_t n) {
    if (n < 8) v = _mm256_blendv_epi8(_mm256_set1_epi32(INT32_MIN), v, AMPI_V8_MASK(n));
    _mm256_storeu_si256((__m256i*)(void*)key, v);
}
/* Unpacking works within the halves of a register, so the quarters are put in order. */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ring_get_pairs_avx2(amp_dtype t, const void* x, size_t i, size_t n,
                                                           int32_t* even, int32_t* odd) {
    __m256i e, o;
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    if (t == AMP_F32) {
        const __m256 a = ampi_read8_avx2(x, t, i, n), b = ampi_read8_avx2(x, t, i + 8, n > 8 ? n - 8 : 0);
        e = ampi_ring_keys_avx2(_mm256_shuffle_ps(a, b, 0x88));
        o = ampi_ring_keys_avx2(_mm256_shuffle_ps(a, b, 0xdd));
        e = _mm256_permute4x64_epi64(e, 0xd8);
        o = _mm256_permute4x64_epi64(o, 0xd8);
    } else {
        const uint16_t* h = (const uint16_t*)x + i;
        o = ampi_pool_keys_y16(t, _mm256_set_m128i(ampi_load_words_avx2(h + 8, n > 8 ? n - 8 : 0),
                                                   ampi_load_words_avx2(h, n)));
        e = _mm256_slli_epi32(o, 16);
        o = _mm256_and_si256(o, _mm256_set1_epi32((int)0xffff0000u));
    }
    ampi_ring_put_keys_avx2(even, e, (n + 1) / 2);
    ampi_ring_put_keys_avx2(odd, o, n / 2);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ring_put_pairs_avx2(amp_dtype t, void* x, size_t i, size_t n,
                                                           const float* from_even, const float* from_odd) {
    const __m256 even = _mm256_loadu_ps(from_even), odd = _mm256_loadu_ps(from_odd);
    uint16_t* h = (uint16_t*)x + i;
    __m256i low, high;
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    if (t == AMP_F32) {
        const __m256 a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
        ampi_put8_avx2(x, t, i, n, _mm256_permute2f128_ps(a, b, 0x20));
        if (n > 8) ampi_put8_avx2(x, t, i + 8, n - 8, _mm256_permute2f128_ps(a, b, 0x31));
        return;
    }
    if (t == AMP_BF16) {
        low = _mm256_srli_epi32(ampi_bf16_round_avx2(even), 16);
        high = _mm256_and_si256(ampi_bf16_round_avx2(odd), _mm256_set1_epi32((int)0xffff0000u));
    } else {
        low = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(even, _MM_FROUND_TO_NEAREST_INT));
        high = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(odd, _MM_FROUND_TO_NEAREST_INT));
        high = _mm256_slli_epi32(high, 16);
    }
    low = _mm256_or_si256(low, high);
    if (n >= 16) { _mm256_storeu_si256((__m256i*)(void*)h, low); return; }
    ampi_store_words_avx2(h, n, _mm256_castsi256_si128(low));
    if (n > 8) ampi_store_words_avx2(h + 8, n - 8, _mm256_extracti128_si256(low, 1));
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ring_look_avx2(amp_dtype t, const int32_t* key, __m256i* best, __m256i* age) {
    const __m256i v = _mm256_loadu_si256((const __m256i*)(const void*)key), one = _mm256_set1_epi32(1);
    if (t == AMP_F32) *age = _mm256_andnot_si256(_mm256_cmpgt_epi32(v, *best), _mm256_add_epi32(*age, one));
    else *best = _mm256_add_epi32(*best, one);
    *best = _mm256_max_epi32(*best, v);
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_ring_age_avx2(amp_dtype t, __m256i best, __m256i age) {
    return t == AMP_F32 ? age : _mm256_and_si256(best, _mm256_set1_epi32(255));
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_ring_chosen_avx2(int this_age, __m256i age, __m256 g) {
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(age, _mm256_set1_epi32(this_age))), g);
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_ring_plus_avx2(__m256 sum, int this_age, __m256i age, __m256 g) {
    return _mm256_add_ps(sum, ampi_ring_chosen_avx2(this_age, age, g));
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_ring_moved_avx2(__m256 before, __m256 v) {
    const __m256 middle = _mm256_permute2f128_ps(before, v, 0x21);
    return _mm256_castsi256_ps(_mm256_alignr_epi8(_mm256_castps_si256(v), _mm256_castps_si256(middle), 12));
}

/* A row in pairs, from or to its even and odd elements: the last group overlaps the one before it if it can. */
#define AMPI_RING_PAIRS(move, data)                                                       \
    for (i = 0; sw == 2 && i < w; i += 2 * L) {                                           \
        if (w - i < 2 * L) {                                                              \
            if (w < 2 * L || w % 2 != 0) {                                                \
                move(t, data, at + i, w - i, even + i / 2, odd + i / 2);                  \
                break;                                                                    \
            }                                                                             \
            i = w - 2 * L;                                                                \
        }                                                                                 \
        move(t, data, at + i, 2 * L, even + i / 2, odd + i / 2);                          \
    }
/* Made of these, the ring for either. Sums are never -0: they stay as they are where 0 is added. */
#define AMPI_POOL_RING(isa, V)                                                                                        \
    /* Brings row r, element `at` of x, into the ring; clear: its sums are 0 now. A last group that is not full       \
       overlaps the one before it where that is easy. */                                                              \
    AMPI_##V##_TARGET AMPI_INLINE void ampi_ring_open_##isa(amp_dtype t, ampi_pool_rows_open* d, int r, int clear,    \
                                                            const void* x, size_t at) {                               \
        enum { L = AMPI_##V##_LANES };                                                                                \
        const size_t w = (size_t)d->p->w, row = d->s->row, slot = ((size_t)r & d->s->last) * row;                     \
        int32_t *even = d->key + slot + d->s->pixel[0], *odd = d->key + slot + d->s->pixel[1];                        \
        const int sw = d->p->sw;                                                                                      \
        float* sum = d->sum + slot;                                                                                   \
        size_t i, l;                                                                                                  \
        for (i = 0; clear && i < row; i += 16, sum += 16) {                                                           \
            AMPI_OPAQUE(sum);                           /* a call of memset would take longer */                      \
            for (l = 0; l < 16; l += L) AMPI_##V##_STORE(sum + l, AMPI_##V##_ZERO);                                   \
        }                                                                                                             \
        AMPI_RING_PAIRS(ampi_ring_get_pairs_##isa, x)                                                                 \
        for (i = 0; sw == 1 && i < w; i += L) {                                                                       \
            const AMPI_##V##_T v = ampi_ring_get_##isa(t, x, at + i, w - i);                                          \
            AMPI_AHEAD(x, (at + i) * amp_dtype_size(t));                                                              \
            ampi_ring_put_keys_##isa(even + i, ampi_ring_keys_##isa(v), w - i);                                       \
        }                                                                                                             \
    }                                                                                                                 \
    /* The sums of row r are complete: element `at` of dx. */                                                         \
    AMPI_##V##_TARGET AMPI_INLINE void ampi_ring_close_##isa(amp_dtype t, const ampi_pool_rows_open* d, int r,        \
                                                             void* dx, size_t at) {                                   \
        enum { L = AMPI_##V##_LANES };                                                                                \
        const float* sum = d->sum + ((size_t)r & d->s->last) * d->s->row;                                             \
        const float *even = sum + d->s->pixel[0], *odd = sum + d->s->pixel[1];                                        \
        const size_t w = (size_t)d->p->w;                                                                             \
        const int sw = d->p->sw;                                                                                      \
        size_t i;                                                                                                     \
        AMPI_RING_PAIRS(ampi_ring_put_pairs_##isa, dx)                                                                \
        for (i = 0; sw == 1 && i < w; i += L)                                                                         \
            ampi_ring_put_##isa(t, dx, at + i, w - i, AMPI_##V##_LOAD(even + i));                                     \
    }                                                                                                                 \
    /* sum += g where the maximum is of this age; g is 0 behind the last window. */                                   \
    AMPI_##V##_TARGET AMPI_INLINE void ampi_ring_add_##isa(float* sum, int this_age, ampi_keys_##isa age,             \
                                                           AMPI_##V##_T g) {                                          \
        AMPI_##V##_STORE(sum, ampi_ring_plus_##isa(AMPI_##V##_LOAD(sum), this_age, age, g));                          \
    }                                                                                                                 \
    /* One row of windows, which sees rows [r0, r0 + rows) of the image: finds the maxima, then adds the elements     \
       of dy from `at` on. A pixel's windows come in their order: the last place of the kernel belongs to the first   \
       of them. */                                                                                                    \
    AMPI_##V##_TARGET AMPI_INLINE void ampi_ring_windows_##isa(amp_dtype t, ampi_pool_rows_open* d, int r0, int rows, \
                                                               const void* dy, size_t at) {                           \
        const size_t n = (size_t)d->p->ow, *column = d->s->at;                                                        \
        const int kw = d->p->kw, last = rows * kw - 1;                                                                \
        size_t slot[AMPI_POOL_WIDEST], o;                                                                             \
        int i, k;                                                                                                     \
        for (i = 0; i < rows; i++) slot[i] = ((size_t)(r0 + i) & d->s->last) * d->s->row;                             \
        for (o = 0; o < n; o += AMPI_##V##_LANES) {                                                                   \
            const AMPI_##V##_T g = ampi_ring_get_##isa(t, dy, at + o, n - o);                                         \
            ampi_keys_##isa best = ampi_set_keys_##isa(INT32_MIN), age = best;                                        \
            for (i = 0; i < rows; i++)                                                                                \
                for (k = 0; k < kw; k++)                                                                              \
                    ampi_ring_look_##isa(t, d->key + slot[i] + column[k] + o, &best, &age);                           \
            age = ampi_ring_age_##isa(t, best, age);                                                                  \
            for (k = kw - 1; k >= 0; k--)                                                                             \
                for (i = 0; i < rows; i++)                                                                            \
                    ampi_ring_add_##isa(d->sum + slot[i] + column[k] + o, last - (i * kw + k), age, g);               \
        }                                                                                                             \
    }                                                                                                                 \
    /* The sums of a row where windows of three places are two pixels apart: the first place and the last one fall    \
       on the same line, the last one an element on. Its g are moved there in registers, with that of the window      \
       before the group from `before`: what was stored a moment ago at another offset would have to reach the cache   \
       before it is loaded. ages: of the three. No g is -0. */                                                        \
    AMPI_##V##_TARGET AMPI_INLINE void ampi_ring_three_##isa(float* sum, size_t middle, int fresh, const int* ages,   \
                                                             ampi_keys_##isa age, AMPI_##V##_T g,                     \
                                                             AMPI_##V##_T* before) {                                  \
        const AMPI_##V##_T last = ampi_ring_chosen_##isa(ages[2], age, g);                                            \
        AMPI_##V##_T first = ampi_ring_moved_##isa(*before, last);                                                    \
        if (!fresh) first = AMPI_##V##_ADD(AMPI_##V##_LOAD(sum), first);                                              \
        AMPI_##V##_STORE(sum, ampi_ring_plus_##isa(first, ages[0], age, g));                                          \
        if (!fresh) ampi_ring_add_##isa(sum + middle, ages[1], age, g);                                               \
        else AMPI_##V##_STORE(sum + middle, ampi_ring_chosen_##isa(ages[1], age, g));                                 \
        *before = last;                                                                                               \
    }                                                                                                                 \
    /* The same for 3 x 3 places, two pixels apart, without loops over them; no other windows were in its second and  \
       third row before. The group behind the last window takes what was moved out of the last one. */                \
    AMPI_##V##_TARGET AMPI_INLINE void ampi_ring_nine_##isa(amp_dtype t, ampi_pool_rows_open* d, int r0,              \
                                                            const void* dy, size_t at) {                              \
        const size_t n = (size_t)d->p->ow, last = d->s->last, row = d->s->row, a = d->s->at[1], b = d->s->at[2];      \
        const size_t r = (size_t)r0, s0 = (r & last) * row, s1 = ((r + 1) & last) * row, s2 = ((r + 2) & last) * row; \
        AMPI_##V##_T before0 = AMPI_##V##_ZERO, before1 = before0, before2 = before0;                                 \
        size_t o;                                                                                                     \
        for (o = 0; o <= n; o += AMPI_##V##_LANES) {                                                                  \
            const int32_t *k0 = d->key + s0 + o, *k1 = d->key + s1 + o, *k2 = d->key + s2 + o;                        \
            const AMPI_##V##_T g = AMPI_##V##_ADD(ampi_ring_get_##isa(t, dy, at + o, n - o), AMPI_##V##_ZERO);        \
            ampi_keys_##isa best = ampi_set_keys_##isa(INT32_MIN), age = best;                                        \
            ampi_ring_look_##isa(t, k0, &best, &age);                                                                 \
            ampi_ring_look_##isa(t, k0 + a, &best, &age);                                                             \
            ampi_ring_look_##isa(t, k0 + b, &best, &age);                                                             \
            ampi_ring_look_##isa(t, k1, &best, &age);                                                                 \
            ampi_ring_look_##isa(t, k1 + a, &best, &age);                                                             \
            ampi_ring_look_##isa(t, k1 + b, &best, &age);                                                             \
            ampi_ring_look_##isa(t, k2, &best, &age);                                                                 \
            ampi_ring_look_##isa(t, k2 + a, &best, &age);                                                             \
            ampi_ring_look_##isa(t, k2 + b, &best, &age);                                                             \
            age = ampi_ring_age_##isa(t, best, age);                                                                  \
            ampi_ring_three_##isa(d->sum + s0 + o, a, 0, d->s->ages, age, g, &before0);                               \
            ampi_ring_three_##isa(d->sum + s1 + o, a, 1, d->s->ages + 3, age, g, &before1);                           \
            ampi_ring_three_##isa(d->sum + s2 + o, a, 1, d->s->ages + 6, age, g, &before2);                           \
        }                                                                                                             \
    }                                                                                                                 \
    AMPI_##V##_TARGET AMPI_INLINE void ampi_ring_image_##isa(amp_dtype t, const ampi_pool_ring* s,                    \
                                                             const ampi_pool_plan* p, size_t plane, const void* dy,   \
                                                             const void* x, void* dx) {                               \
        const size_t w = (size_t)p->w, image = plane * (size_t)p->h * w, out = plane * (size_t)p->oh * (size_t)p->ow; \
        int oh, opened = 0, closed = 0;                                                                               \
        ampi_pool_rows_open d;                                                                                        \
        size_t i;                                                                                                     \
        d.p = p; d.s = s;                                                                                             \
        for (i = 0; i < s->row * (s->last + 1); i += AMPI_##V##_LANES)                                                \
            ampi_ring_put_keys_##isa(d.key + i, ampi_set_keys_##isa(INT32_MIN), AMPI_##V##_LANES);                    \
        for (oh = 0; oh < p->oh; oh++) {                                                                              \
            const ampi_span rows = ampi_window(oh, p->sh, p->ph, p->kh, p->h);                                        \
            const size_t at = out + (size_t)oh * (size_t)p->ow;                                                       \
            const int nine = p->kw == 3 && p->sw == 2 && p->sh == 2 && rows.last - rows.first == 3;                   \
            for (; closed < rows.first; closed++)                                                                     \
                ampi_ring_close_##isa(t, &d, closed, dx, image + (size_t)closed * w);                                 \
            for (; opened < rows.last; opened++)                                                                      \
                ampi_ring_open_##isa(t, &d, opened, !nine || opened == rows.first, x, image + (size_t)opened * w);    \
            if (nine) ampi_ring_nine_##isa(t, &d, rows.first, dy, at);                                                \
            else ampi_ring_windows_##isa(t, &d, rows.first, rows.last - rows.first, dy, at);                          \
        }                                                                                                             \
        for (; closed < opened; closed++) ampi_ring_close_##isa(t, &d, closed, dx, image + (size_t)closed * w);       \
        i = (image + (size_t)closed * w) * amp_dtype_size(t);                   /* rows that no window covers */      \
        memset((char*)dx + i, 0, (size_t)(p->h - closed) * w * amp_dtype_size(t));                                    \
    }                                                                                                                 \
    AMPI_##V##_TARGET AMPI_FN void ampi_pool_ring_plane_##isa(const ampi_pool_ring* s, const ampi_pool_plan* p,       \
                                                              size_t plane, const void* dy, const void* x, void* dx,  \
                                                              amp_dtype t) {                                          \
        AMPI_FOR_TYPE(ampi_ring_image_##isa, t, s, p, plane, dy, x, dx);                                              \
    }
AMPI_POOL_RING(avx512, V16)
AMPI_POOL_RING(avx2, V8)
#endif
AMPI_FN void ampi_pool_ring_plane(const ampi_pool_ring* s, const ampi_pool_plan* p, size_t plane, const void* dy,
                                  const void* x, void* dx, amp_dtype t) {
#if AMPI_X86
    AMPI_BY_HAND(ampi_pool_ring_plane, s, p, plane, dy, x, dx, t);
#else
    (void)s; (void)p; (void)plane; (void)dy; (void)x; (void)dx; (void)t;
#endif
}

AMPI_FN void ampi_pool_small_spread(const ampi_pool_plan* p, const float* g, float* acc) {
    int oh, ow, i, j;
    for (oh = 0; oh < p->oh; oh++) {
        ampi_span rows = ampi_window(oh, p->sh, p->ph, p->kh, p->h);
        for (ow = 0; ow < p->ow; ow++, g++) {
            ampi_span c = ampi_window(ow, p->sw, p->pw, p->kw, p->w);
            float part = *g / ampi_pool_count(p, oh, ow);
            for (i = rows.first * p->w; i < rows.last * p->w; i += p->w)
                for (j = i + c.first; j < i + c.last; j++) acc[j] += part;
        }
    }
}

AMPI_FN void ampi_pool_small_plane_backward(const ampi_pool_plan* p, const void* dy, amp_dtype dyt,
                                            const void* x, amp_dtype xt, void* dx, amp_dtype dxt,
                                            size_t plane) {
    float x_tile[AMPI_POOL_BAND], g_tile[AMPI_POOL_SMALL * AMPI_POOL_SMALL], acc[AMPI_POOL_BAND];
    int32_t at[AMPI_POOL_SMALL * AMPI_POOL_SMALL];
    size_t n = (size_t)(p->h * p->w), out = (size_t)(p->oh * p->ow), i;
    const float* g = ampi_view(dy, dyt, plane * out, out, g_tile);
    memset(acc, 0, n * sizeof(float));
    if (p->max) {
        ampi_pool_small_argmax(p, ampi_view(x, xt, plane * n, n, x_tile), at);
        for (i = 0; i < out; i++) acc[at[i]] += g[i];
    } else {
        ampi_pool_small_spread(p, g, acc);
    }
    ampi_store_f32(dx, dxt, plane * n, acc, n);
}

AMP_DEF amp_result amp_pool2d_backward(const amp_pool2d_shape* s, const void* dy, amp_dtype dy_dtype,
                                       const void* x, amp_dtype x_dtype, void* dx, amp_dtype dx_dtype,
                                       const amp_exec* exec) {
    const ampi_argument list[] = { { "dy", dy, dy_dtype, 0 }, { "dx", dx, dx_dtype, 1 },
                                  { "x", x, x_dtype, !s || s->kind == AMP_POOL_AVERAGE } };
    ampi_pool_words words;
    ampi_pool_ring ring;
    ampi_pool_plan p;
    size_t n;
    int64_t i;
    amp_result r = ampi_pool_plan_make(s, &p, ampi_exec_logger(exec));
    if (r != AMP_OK) return r;
    n = ampi_area(p.planes, (size_t)p.h * (size_t)p.w);
    if ((r = AMPI_CHECK(exec, "pool2d backward", n, list)) != AMP_OK || !dx) return r;
    ampi_pool_words_make(&p, x_dtype, dy_dtype, dx_dtype, &words);
    ampi_pool_ring_make(&p, x_dtype, dy_dtype, dx_dtype, &ring);
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < (int64_t)p.planes; i++) {
        if (words.pairs > 0)
            ampi_pool_words_plane(ampi_dtype(x_dtype), &words, &p, (size_t)i, x, dy, dx);
        else if (ampi_pool_is_quads(&p))
            ampi_pool_quads_plane(&p, x, x_dtype, dy, dy_dtype, dx, dx_dtype, (size_t)i);
        else if (ring.row > 0) ampi_pool_ring_plane(&ring, &p, (size_t)i, dy, x, dx, x_dtype);
        else if (ampi_pool_is_small(&p, p.max ? (int)AMPI_POOL_SMALL : (int)AMPI_LANES))
            ampi_pool_small_plane_backward(&p, dy, dy_dtype, x, x_dtype, dx, dx_dtype, (size_t)i);
        else
            ampi_pool_plane_backward(&p, dy, dy_dtype, x, x_dtype, dx, dx_dtype, (size_t)i);
    }
    return AMP_OK;
}

/* --- batch norm -------------------------------------------------------------------------- */

/* Lanes carry pixels of one channel, or, where a channel has one pixel, 16 channels side by side: either
   way a group of lanes has its statistics in arrays of 16. A step fills a tile: 64 rows of 16 channels, or
   as many planes of the channel as fit, or a part of one plane. A plane of whole groups of lanes may be a step of its
   own: its pixels are on the same lanes then, and sums run over it where it lies. */
enum { AMPI_BN_ALONE = 8 * AMPI_LANES };      /* pixels that make that worth while */
typedef struct ampi_bn_plan {
    size_t n, channels, spatial;
    size_t groups, per_group;        /* groups of channels, channels in one */
    size_t planes, parts, steps;     /* planes in a tile, tiles in a plane, tiles in a group */
    float eps, momentum;
} ampi_bn_plan;

AMPI_FN amp_result ampi_bn_plan_make(const amp_batch_norm_shape* s, int training, ampi_bn_plan* p,
                                     const amp_logger* log) {
    memset(p, 0, sizeof *p);
    if (!s) return ampi_fail(log, AMP_ERR_ARGUMENT, "batch norm: the shape is NULL");
    if (s->n < 1 || s->channels < 1 || s->spatial < 1)
        return ampi_fail(log, AMP_ERR_SHAPE, "batch norm: input %dx%dx%d needs sizes >= 1", s->n,
                         s->channels, s->spatial);
    if (training && s->n == 1 && s->spatial == 1)
        return ampi_fail(log, AMP_ERR_SHAPE,
                         "batch norm: training needs more than one value per channel, not 1x%dx1",
                         s->channels);
    p->eps = s->eps == 0.0f ? 1e-5f : s->eps;
    p->momentum = ampi_default_float(s->momentum, 0.1f);
    if (!(p->eps > 0.0f) || !(p->momentum >= 0.0f && p->momentum <= 1.0f))
        return ampi_fail(log, AMP_ERR_DESC, "batch norm: eps %g needs > 0, momentum %g needs 0..1",
                         (double)s->eps, (double)s->momentum);
    p->n = (size_t)s->n; p->channels = (size_t)s->channels; p->spatial = (size_t)s->spatial;
    p->per_group = p->spatial == 1 ? (size_t)AMPI_LANES : 1;
    p->groups = (p->channels + p->per_group - 1) / p->per_group;
    p->planes = p->spatial < AMPI_TILE ? AMPI_TILE / p->spatial : 1;
    if (p->spatial >= AMPI_BN_ALONE && p->spatial % AMPI_LANES == 0) p->planes = 1;
    if (p->spatial == 1) p->planes = AMPI_TILE / AMPI_LANES;
    p->parts = (p->spatial + AMPI_TILE - 1) / AMPI_TILE;
    p->steps = (p->n + p->planes - 1) / p->planes * p->parts;
    return AMP_OK;
}

/* Piece i of a step: `length` elements at `offset` of the tensor belong at `at` of the tile. 0 = no such
   piece. */
AMPI_FN size_t ampi_bn_piece(const ampi_bn_plan* p, size_t group, size_t step, size_t i, size_t* offset,
                             size_t* at) {
    size_t image = step / p->parts * p->planes + i, start = step % p->parts * AMPI_TILE;
    if (i >= p->planes || image >= p->n) return 0;
    *offset = (image * p->channels + group * p->per_group) * p->spatial + start;
    *at = i * (p->spatial == 1 ? (size_t)AMPI_LANES : p->spatial);
    return p->spatial == 1 ? ampi_min_size(p->channels - group * AMPI_LANES, AMPI_LANES)
                           : ampi_min_size(p->spatial - start, AMPI_TILE);
}
/* Returns the number of elements in the tile. */
AMPI_FN size_t ampi_bn_load(const ampi_bn_plan* p, const void* x, amp_dtype t, size_t group, size_t step,
                            float* tile) {
    size_t i, offset, at, length, n = 0;
    for (i = 0; (length = ampi_bn_piece(p, group, step, i, &offset, &at)) != 0; i++) {
        if (length == AMPI_LANES && ampi_dtype(t) == AMP_F32)
            memcpy(tile + at, (const float*)x + offset, AMPI_LANES * sizeof(float));
        else
            ampi_load_f32(tile + at, x, t, offset, length);
        n = at + length;
        if (p->spatial > 1 || length == AMPI_LANES) continue;
        memset(tile + n, 0, (AMPI_LANES - length) * sizeof(float));
        n = at + AMPI_LANES;
    }
    memset(tile + n, 0, (ampi_padded(n) - n) * sizeof(float));
    return n;
}
AMPI_FN void ampi_bn_store(const ampi_bn_plan* p, void* y, amp_dtype t, size_t group, size_t step,
                           const float* tile) {
    size_t i, offset, at, length;
    for (i = 0; (length = ampi_bn_piece(p, group, step, i, &offset, &at)) != 0; i++)
        if (length == AMPI_LANES && ampi_dtype(t) == AMP_F32)
            memcpy((float*)y + offset, tile + at, AMPI_LANES * sizeof(float));
        else
            ampi_store_f32(y, t, offset, tile + at, length);
}

/* Whether kernels may run on a step of operands of these types where it lies: it is one piece. */
AMPI_FN int ampi_bn_typed(const ampi_bn_plan* p, amp_dtype a, amp_dtype b) {
    return p->planes == 1 && ampi_typed_both(a, b);
}
/* The elements of a step to read: in place, or in `tile`. */
AMPI_FN ampi_part ampi_bn_view(const ampi_bn_plan* p, const void* x, amp_dtype t, size_t group, size_t step, int typed,
                               float* tile) {
    ampi_part v;
    size_t offset = 0, at, n = p->planes == 1 ? ampi_bn_piece(p, group, step, 0, &offset, &at) : 0;
    if (typed || (n > 0 && ampi_direct(t, n))) return ampi_part_of(x, t, offset, n, 1, NULL);
    v.n = ampi_bn_load(p, x, t, group, step, tile);
    v.t = AMP_F32;
    v.data = tile;
    return v;
}

/* Sums by lanes become one sum per channel, held by every lane of the channel. */
AMPI_FN void ampi_bn_combine(const ampi_bn_plan* p, double* acc) {
    size_t l;
    double total = ampi_lane_total(acc);
    for (l = 0; p->spatial > 1 && l < AMPI_LANES; l++) acc[l] = total;
}
/* The lane that computes for lane l: itself, or the first one of a channel that all share. */
AMPI_FN size_t ampi_bn_own(const ampi_bn_plan* p, size_t l) { return l < p->per_group ? l : 0; }
/* What the lanes read of a per-channel array, or `missing` beyond the last channel. */
AMPI_FN void ampi_bn_lanes(const ampi_bn_plan* p, const void* data, amp_dtype t, size_t group, float missing,
                           float* lanes) {
    size_t l;
    for (l = 0; l < AMPI_LANES; l++) {
        size_t own = ampi_bn_own(p, l), c = group * p->per_group + l;
        lanes[l] = own < l ? lanes[own] : c < p->channels ? ampi_load_one(data, t, c, missing) : missing;
    }
}
/* How many lanes hold a channel's own value. */
AMPI_FN size_t ampi_bn_width(const ampi_bn_plan* p, size_t group) {
    return ampi_min_size(p->channels - group * p->per_group, p->per_group);
}

/* One group's statistics: mean and 1/sqrt(variance + eps) by lanes. */
typedef struct ampi_bn_stats { float mean[AMPI_LANES], invstd[AMPI_LANES]; } ampi_bn_stats;

/* Two passes: the mean, then the mean square distance from it, which cannot cancel. */
AMPI_FN void ampi_bn_measure(const ampi_bn_plan* p, const void* x, amp_dtype xt, size_t group, double* mean,
                             double* squares) {
    const int typed = ampi_bn_typed(p, xt, xt);
    float tile[AMPI_TILE];
    size_t step, l;
    int usual = 1;
    memset(mean, 0, AMPI_LANES * sizeof(double));
    memset(squares, 0, AMPI_LANES * sizeof(double));
    for (step = 0; step < p->steps; step++) ampi_lane_sum(mean, ampi_bn_view(p, x, xt, group, step, typed, tile));
    ampi_bn_combine(p, mean);
    for (l = 0; l < AMPI_LANES; l++) {
        mean[l] /= (double)p->n * (double)p->spatial;
        usual = usual && ampi_mean_is_usual(mean[l]);
    }
    for (step = 0; step < p->steps; step++)
        ampi_lane_moment(squares, ampi_bn_view(p, x, xt, group, step, typed && usual, tile), mean, usual);
    ampi_bn_combine(p, squares);
}

/* (1 - momentum) * old + momentum * value. */
AMPI_HD AMPI_FN void ampi_bn_run(float* running, size_t c, float momentum, float value) {
    if (running) running[c] = ampi_fma(AMPI_FMA_NATIVE, momentum, value, (1.0f - momentum) * running[c]);
}

AMPI_FN void ampi_bn_train(const ampi_bn_plan* p, const void* x, amp_dtype xt, size_t group,
                           float* running_mean, float* running_var, float* save_mean, float* save_invstd,
                           ampi_bn_stats* stats) {
    double mean[AMPI_LANES], squares[AMPI_LANES], count = (double)p->n * (double)p->spatial;
    size_t l, width = ampi_bn_width(p, group);
    ampi_bn_measure(p, x, xt, group, mean, squares);
    for (l = 0; l < AMPI_LANES; l++) {
        size_t own = ampi_bn_own(p, l);
        stats->mean[l] = (float)mean[l];
        stats->invstd[l] = own < l ? stats->invstd[own] : (float)(1.0 / sqrt(squares[l] / count + (double)p->eps));
    }
    for (l = 0; l < width; l++) {
        size_t c = group * p->per_group + l;
        save_mean[c] = stats->mean[l];
        save_invstd[c] = stats->invstd[l];
        if (p->momentum == 0.0f) continue;
        ampi_bn_run(running_mean, c, p->momentum, stats->mean[l]);
        ampi_bn_run(running_var, c, p->momentum, (float)(squares[l] / (count - 1.0)));
    }
}

AMPI_FN void ampi_bn_evaluate(const ampi_bn_plan* p, size_t group, const float* running_mean,
                              const float* running_var, float* save_mean, float* save_invstd,
                              ampi_bn_stats* stats) {
    size_t l, width = ampi_bn_width(p, group);
    ampi_bn_lanes(p, running_mean, AMP_F32, group, 0.0f, stats->mean);
    ampi_bn_lanes(p, running_var, AMP_F32, group, 1.0f, stats->invstd);
    for (l = 0; l < AMPI_LANES; l++)
        stats->invstd[l] = (float)(1.0 / sqrt((double)stats->invstd[l] + (double)p->eps));
    for (l = 0; l < width; l++) {
        ampi_store_one(save_mean, AMP_F32, group * p->per_group + l, stats->mean[l], 0);
        ampi_store_one(save_invstd, AMP_F32, group * p->per_group + l, stats->invstd[l], 0);
    }
}

/* t = (t - mean) * invstd * gamma + beta by lanes. */
AMPI_INLINE void ampi_bn_apply_plain_body(int hw, float* t, const ampi_bn_stats* stats, const float* gamma,
                                          const float* beta, size_t n) {
    float m[AMPI_LANES], s[AMPI_LANES], g[AMPI_LANES], b[AMPI_LANES];
    size_t i, l;
    memcpy(m, stats->mean, sizeof m);
    memcpy(s, stats->invstd, sizeof s);
    memcpy(g, gamma, sizeof g);
    memcpy(b, beta, sizeof b);
    for (i = 0; i < n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) t[i + l] = ampi_fma(hw, (t[i + l] - m[l]) * s[l], g[l], b[l]);
}
AMPI_KERNEL_AVX2(ampi_bn_apply_plain,
                 (float* t, const ampi_bn_stats* stats, const float* gamma, const float* beta, size_t n), t,
                 stats, gamma, beta, n)

#if AMPI_X86
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_bn_apply_x16(amp_dtype t, size_t i, __mmask16 m, void* y, const void* x,
                                                      __m512 mean, __m512 invstd, __m512 gamma, __m512 beta) {
    const __m512 v = _mm512_mul_ps(_mm512_sub_ps(ampi_get_x16(t, x, i, m), mean), invstd);
    ampi_put_x16(t, y, i, m, _mm512_fmadd_ps(v, gamma, beta));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_bn_apply_step(amp_dtype t, void* y, const void* x, const ampi_bn_stats* stats,
                                                       const float* gamma, const float* beta, size_t n) {
    const __m512 m = _mm512_loadu_ps(stats->mean), s = _mm512_loadu_ps(stats->invstd);
    const __m512 g = _mm512_loadu_ps(gamma), b = _mm512_loadu_ps(beta);
    AMPI_EACH_X16(ampi_bn_apply_x16, t, n, y, x, m, s, g, b);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_bn_apply_avx512(void* y, ampi_part x, const ampi_bn_stats* stats,
                                                     const float* gamma, const float* beta) {
    AMPI_FOR_TYPE(ampi_bn_apply_step, x.t, y, x.data, stats, gamma, beta, x.n);
}
/* k: means, invstd, gammas and betas, those of eight lanes and of the other eight. */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_bn_apply_x8(amp_dtype t, size_t i, size_t m, int upper, void* y, const void* x,
                                                   const __m256* k) {
    const __m256 v = _mm256_mul_ps(_mm256_sub_ps(ampi_read8_avx2(x, t, i, m), k[upper]), k[2 + upper]);
    ampi_put_x8(t, y, i, m, upper, _mm256_fmadd_ps(v, k[4 + upper], k[6 + upper]));
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_bn_apply_avx2(void* y, ampi_part x, const ampi_bn_stats* stats, const float* gamma,
                                                 const float* beta) {
    const float* from[4];
    __m256 k[8];
    int l;
    from[0] = stats->mean; from[1] = stats->invstd; from[2] = gamma; from[3] = beta;
    for (l = 0; l < 8; l++) k[l] = _mm256_loadu_ps(from[l / 2] + 8 * (l % 2));
    AMPI_ALL_X8(ampi_bn_apply_x8, x.t, x.n, y, x.data, k);
}
#endif

/* One step from x to y. */
AMPI_FN void ampi_bn_apply(const ampi_bn_plan* p, const void* x, amp_dtype xt, void* y, amp_dtype yt, size_t group,
                           size_t step, const ampi_bn_stats* stats, const float* gamma, const float* beta) {
    float tile[AMPI_TILE];
    size_t n;
#if AMPI_X86
    if (ampi_typed_both(xt, yt)) {
        size_t i, offset, at;
        for (i = 0; (n = ampi_bn_piece(p, group, step, i, &offset, &at)) != 0; i++)
            AMPI_BY_HAND(ampi_bn_apply, (char*)y + offset * amp_dtype_size(yt),
                         ampi_part_of(x, xt, offset, n, 1, NULL), stats, gamma, beta);
        return;
    }
#endif
    n = ampi_bn_load(p, x, xt, group, step, tile);
    ampi_bn_apply_plain(tile, stats, gamma, beta, ampi_padded(n));
    ampi_bn_store(p, y, yt, group, step, tile);
}

AMP_DEF amp_result amp_batch_norm_forward(const amp_batch_norm_shape* s, int training, const void* x,
                                          amp_dtype x_dtype, const void* gamma, const void* beta,
                                          amp_dtype param_dtype, float* running_mean, float* running_var,
                                          float* save_mean, float* save_invstd, void* y, amp_dtype y_dtype,
                                          const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, x_dtype, 0 },
                                   { "y", y, y_dtype, 0 },
                                   { "gamma", gamma, param_dtype, 1 },
                                   { "beta", beta, param_dtype, 1 },
                                   { "running_mean", running_mean, AMP_F32, training != 0 },
                                   { "running_var", running_var, AMP_F32, training != 0 },
                                   { "save_mean", save_mean, AMP_F32, !training },
                                   { "save_invstd", save_invstd, AMP_F32, !training } };
    ampi_bn_plan p;
    size_t n;
    int64_t i;
    amp_result r = ampi_bn_plan_make(s, training, &p, ampi_exec_logger(exec));
    if (r != AMP_OK) return r;
    n = ampi_area(ampi_area(p.n, p.channels), p.spatial);
    if ((r = AMPI_CHECK(exec, "batch norm", n, list)) != AMP_OK) return r;
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < (int64_t)p.groups; i++) {
        float g[AMPI_LANES], b[AMPI_LANES];
        ampi_bn_stats stats;
        size_t group = (size_t)i, step;
        if (training)
            ampi_bn_train(&p, x, x_dtype, group, running_mean, running_var, save_mean, save_invstd, &stats);
        else          ampi_bn_evaluate(&p, group, running_mean, running_var, save_mean, save_invstd, &stats);
        ampi_bn_lanes(&p, gamma, param_dtype, group, 1.0f, g);
        ampi_bn_lanes(&p, beta, param_dtype, group, 0.0f, b);
        for (step = 0; step < p.steps; step++)
            ampi_bn_apply(&p, x, x_dtype, y, y_dtype, group, step, &stats, g, b);
    }
    return AMP_OK;
}

/* The backward pass of a norm over M values, xhat = (x - mean) * invstd, g = dy * gamma:
     dx = invstd * (g - sum(g)/M - xhat * sum(g*xhat)/M),  dgamma = sum(dy*xhat),  dbeta = sum(dy).
   Here, by lanes: g = dy * scale, dx = (dy - a - (x - mean) * b) * k. */
typedef struct ampi_bn_slope {
    float mean[AMPI_LANES], a[AMPI_LANES], b[AMPI_LANES], k[AMPI_LANES];
} ampi_bn_slope;

AMPI_INLINE void ampi_bn_dx_plain_body(int hw, float* AMPI_RESTRICT t, const float* AMPI_RESTRICT x,
                                       const ampi_bn_slope* slope, size_t n) {
    ampi_bn_slope q = *slope;
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++)
            t[i + l] = ampi_fma(hw, q.mean[l] - x[i + l], q.b[l], t[i + l] - q.a[l]) * q.k[l];
}
AMPI_KERNEL_AVX2(ampi_bn_dx_plain, (float* t, const float* x, const ampi_bn_slope* slope, size_t n), t, x, slope, n)

#if AMPI_X86
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_bn_dx_x16(amp_dtype t, size_t i, __mmask16 m, void* dx, const void* dy,
                                                   const void* x, __m512 mean, __m512 a, __m512 b, __m512 k) {
    const __m512 g = _mm512_sub_ps(ampi_get_x16(t, dy, i, m), a), v = _mm512_sub_ps(mean, ampi_get_x16(t, x, i, m));
    ampi_put_x16(t, dx, i, m, _mm512_mul_ps(_mm512_fmadd_ps(v, b, g), k));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_bn_dx_step(amp_dtype t, void* dx, const void* dy, const void* x,
                                                    const ampi_bn_slope* q, size_t n) {
    const __m512 mean = _mm512_loadu_ps(q->mean), a = _mm512_loadu_ps(q->a);
    const __m512 b = _mm512_loadu_ps(q->b), k = _mm512_loadu_ps(q->k);
    AMPI_EACH_X16(ampi_bn_dx_x16, t, n, dx, dy, x, mean, a, b, k);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_bn_dx_avx512(void* dx, ampi_part dy, ampi_part x, const ampi_bn_slope* slope) {
    AMPI_FOR_TYPE(ampi_bn_dx_step, x.t, dx, dy.data, x.data, slope, x.n);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_bn_dx_x8(amp_dtype t, size_t i, size_t m, int upper, void* dx, const void* dy,
                                                const void* x, const ampi_bn_slope* q) {
    const int l = 8 * upper;
    const __m256 g = _mm256_sub_ps(ampi_read8_avx2(dy, t, i, m), _mm256_loadu_ps(q->a + l));
    const __m256 v = _mm256_sub_ps(_mm256_loadu_ps(q->mean + l), ampi_read8_avx2(x, t, i, m));
    const __m256 u = _mm256_fmadd_ps(v, _mm256_loadu_ps(q->b + l), g);
    ampi_put_x8(t, dx, i, m, upper, _mm256_mul_ps(u, _mm256_loadu_ps(q->k + l)));
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_bn_dx_avx2(void* dx, ampi_part dy, ampi_part x, const ampi_bn_slope* slope) {
    AMPI_ALL_X8(ampi_bn_dx_x8, x.t, x.n, dx, dy.data, x.data, slope);
}
#endif

/* The two sums of one group, and with them dgamma, dbeta and the slope. */
AMPI_FN void ampi_bn_slope_make(const ampi_bn_plan* p, size_t group, const void* dy, amp_dtype dyt,
                                const void* x, amp_dtype xt, const float* save_mean,
                                const float* save_invstd, const void* gamma, amp_dtype pt, ampi_bn_slope* q,
                                double* sum, double* dot) {
    const int typed = ampi_bn_typed(p, dyt, xt);
    float tile[AMPI_TILE], x_tile[AMPI_TILE], invstd[AMPI_LANES];
    double count = (double)p->n * (double)p->spatial;
    size_t step, l;
    memset(sum, 0, AMPI_LANES * sizeof(double));
    memset(dot, 0, AMPI_LANES * sizeof(double));
    ampi_bn_lanes(p, save_mean, AMP_F32, group, 0.0f, q->mean);
    for (step = 0; step < p->steps; step++) {
        ampi_part g = ampi_bn_view(p, dy, dyt, group, step, typed, tile);
        ampi_lane_dot(sum, dot, g, ampi_bn_view(p, x, xt, group, step, typed, x_tile), q->mean);
    }
    ampi_bn_combine(p, sum);
    ampi_bn_combine(p, dot);
    ampi_bn_lanes(p, save_invstd, AMP_F32, group, 1.0f, invstd);
    ampi_bn_lanes(p, gamma, pt, group, 1.0f, q->k);
    for (l = 0; l < AMPI_LANES; l++) {
        dot[l] *= (double)invstd[l];
        q->a[l] = (float)(sum[l] / count);
        q->b[l] = (float)(dot[l] * (double)invstd[l] / count);
        q->k[l] *= invstd[l];
    }
}

/* dx of one step. */
AMPI_FN void ampi_bn_dx(const ampi_bn_plan* p, const void* dy, amp_dtype dyt, const void* x, amp_dtype xt, void* dx,
                        amp_dtype dxt, size_t group, size_t step, const ampi_bn_slope* slope) {
    float tile[AMPI_TILE], x_tile[AMPI_TILE];
    size_t n;
    ampi_part v;
#if AMPI_X86
    if (ampi_typed_both(dyt, xt) && ampi_typed_both(dxt, xt)) {
        size_t i, offset, at;
        for (i = 0; (n = ampi_bn_piece(p, group, step, i, &offset, &at)) != 0; i++)
            AMPI_BY_HAND(ampi_bn_dx, (char*)dx + offset * amp_dtype_size(dxt),
                         ampi_part_of(dy, dyt, offset, n, 1, NULL), ampi_part_of(x, xt, offset, n, 1, NULL), slope);
        return;
    }
#endif
    n = ampi_bn_load(p, dy, dyt, group, step, tile);
    v = ampi_bn_view(p, x, xt, group, step, 0, x_tile);
    ampi_bn_dx_plain(tile, (const float*)v.data, slope, ampi_padded(n));
    ampi_bn_store(p, dx, dxt, group, step, tile);
}

AMP_DEF amp_result amp_batch_norm_backward(const amp_batch_norm_shape* s, const void* dy,
                                           amp_dtype dy_dtype, const void* x, amp_dtype x_dtype,
                                           const void* gamma, amp_dtype param_dtype, const float* save_mean,
                                           const float* save_invstd, void* dx, amp_dtype dx_dtype,
                                           void* dgamma, void* dbeta, amp_dtype dparam_dtype,
                                           int accumulate, const amp_exec* exec) {
    const ampi_argument list[] = { { "dy", dy, dy_dtype, 0 },
                                   { "x", x, x_dtype, 0 },
                                   { "gamma", gamma, param_dtype, 1 },
                                   { "dx", dx, dx_dtype, 1 },
                                   { "save_mean", save_mean, AMP_F32, 0 },
                                   { "save_invstd", save_invstd, AMP_F32, 0 },
                                   { "dgamma", dgamma, dparam_dtype, 1 },
                                   { "dbeta", dbeta, dparam_dtype, 1 } };
    ampi_bn_plan p;
    size_t n;
    int64_t i;
    amp_result r = ampi_bn_plan_make(s, 1, &p, ampi_exec_logger(exec));
    if (r != AMP_OK) return r;
    n = ampi_area(ampi_area(p.n, p.channels), p.spatial);
    if ((r = AMPI_CHECK(exec, "batch norm backward", n, list)) != AMP_OK) return r;
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < (int64_t)p.groups; i++) {
        double sum[AMPI_LANES], dot[AMPI_LANES];
        ampi_bn_slope slope;
        size_t group = (size_t)i, step, l, width = ampi_bn_width(&p, group);
        ampi_bn_slope_make(&p, group, dy, dy_dtype, x, x_dtype, save_mean, save_invstd, gamma, param_dtype,
                           &slope, sum, dot);
        for (step = 0; dx && step < p.steps; step++)
            ampi_bn_dx(&p, dy, dy_dtype, x, x_dtype, dx, dx_dtype, group, step, &slope);
        for (l = 0; l < width; l++) {
            ampi_store_one(dgamma, dparam_dtype, group * p.per_group + l, (float)dot[l], accumulate);
            ampi_store_one(dbeta, dparam_dtype, group * p.per_group + l, (float)sum[l], accumulate);
        }
    }
    return AMP_OK;
}

/* --- layer norm -------------------------------------------------------------------------- */

enum { AMPI_LN_ROWS = 2 };      /* are taken together */

#if AMPI_X86
/* The first elements of a row are kept as doubles for the second pass. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_sum_keep_x16(amp_dtype t, size_t i, __mmask16 m, ampi_wide* acc,
                                                      const void* x, double* kept) {
    const ampi_wide w = ampi_get_wide_x16(t, x, i, m);
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    ampi_store_wide(kept + i, w);
    ampi_wide_add(acc, w);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_moment_kept_x16(amp_dtype t, size_t i, __mmask16 m, ampi_wide* acc,
                                                         const double* kept, ampi_wide mean, const char* y) {
    _mm_prefetch(y + i * amp_dtype_size(t), _MM_HINT_T0);
    ampi_wide_moment(acc, ampi_load_wide(kept + i), mean, m);
}
/* Of a few rows: while the last steps of one wait for each other, the next one keeps the processor busy. The second
   pass does not need the memory: it fetches the rows of y, which are written next. *usual: are the means? */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_measure_x16(amp_dtype t, const void* x, const void* y, size_t rows,
                                                        size_t d, double eps, float* mean, float* invstd, int* usual) {
    const size_t size = amp_dtype_size(t), first = ampi_min_size(d, AMPI_TILE);
    double kept[AMPI_LN_ROWS][AMPI_TILE], value[AMPI_LN_ROWS];
    ampi_wide acc, m;
    size_t k;
    for (k = 0; k < rows; k++) {
        const char* row = (const char*)x + k * d * size;
        acc.low = acc.high = _mm512_setzero_pd();
        AMPI_EACH_X16(ampi_sum_keep_x16, t, first, &acc, row, kept[k]);
        AMPI_EACH_X16(ampi_sum_x16, t, d - first, &acc, row + first * size);
        value[k] = ampi_wide_total(acc) / (double)d;
        *usual = *usual && ampi_mean_is_usual(value[k]);
    }
    for (k = 0; k < rows; k++) {
        const char* row = (const char*)x + k * d * size;
        m.low = m.high = _mm512_set1_pd(value[k]);
        acc.low = acc.high = _mm512_setzero_pd();
        AMPI_EACH_X16(ampi_moment_kept_x16, t, first, &acc, kept[k], m, (const char*)y + k * d * size);
        AMPI_EACH_X16(ampi_moment_x16, t, d - first, &acc, row + first * size, m);
        mean[k] = (float)value[k];
        invstd[k] = (float)(1.0 / sqrt(ampi_wide_total(acc) / (double)d + eps));
    }
}
AMPI_TARGET_AVX512 AMPI_FN int ampi_ln_measure_avx512(const void* x, amp_dtype t, const void* y, size_t rows,
                                                      size_t d, double eps, float* mean, float* invstd) {
    int usual = 1;
    AMPI_FOR_TYPE(ampi_ln_measure_x16, t, x, y, rows, d, eps, mean, invstd, &usual);
    ampi_clear_upper();
    return usual;
}

AMPI_TARGET_AVX2 AMPI_INLINE void ampi_sum_keep_x8(amp_dtype t, size_t i, size_t m, int upper, ampi_wide8* acc,
                                                   const void* x, double* kept) {
    const ampi_wide8 w = t == AMP_F32 ? ampi_get_wide_x8(t, x, i, m) : ampi_widen_x8(ampi_read8_avx2(x, t, i, m));
    if (upper == 0) AMPI_AHEAD(x, i * amp_dtype_size(t));
    ampi_store_wide8(kept + i, w);
    ampi_wide8_add(acc + upper, w);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_moment_kept_x8(amp_dtype t, size_t i, size_t m, int upper, ampi_wide8* acc,
                                                      const double* kept, const ampi_wide8* mean, const char* y) {
    if (upper == 0) _mm_prefetch(y + i * amp_dtype_size(t), _MM_HINT_T0);
    ampi_wide8_moment(acc + upper, ampi_load_wide8(kept + i), mean[upper], m);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ln_measure_x8(amp_dtype t, const void* x, const void* y, size_t rows, size_t d,
                                                     double eps, float* mean, float* invstd, int* usual) {
    const size_t size = amp_dtype_size(t), first = ampi_min_size(d, AMPI_TILE);
    double kept[AMPI_LN_ROWS][AMPI_TILE], value[AMPI_LN_ROWS];
    ampi_wide8 acc[2], m[2];
    size_t k;
    for (k = 0; k < rows; k++) {
        const char* row = (const char*)x + k * d * size;
        acc[0].low = acc[0].high = acc[1].low = acc[1].high = _mm256_setzero_pd();
        AMPI_EACH_X8(ampi_sum_keep_x8, t, first, acc, row, kept[k]);
        AMPI_EACH_X8(ampi_sum_x8, t, d - first, acc, row + first * size);
        value[k] = ampi_wide8_total(acc) / (double)d;
        *usual = *usual && ampi_mean_is_usual(value[k]);
    }
    for (k = 0; k < rows; k++) {
        const char* row = (const char*)x + k * d * size;
        m[0].low = m[0].high = m[1].low = m[1].high = _mm256_set1_pd(value[k]);
        acc[0].low = acc[0].high = acc[1].low = acc[1].high = _mm256_setzero_pd();
        AMPI_EACH_X8(ampi_moment_kept_x8, t, first, acc, kept[k], m, (const char*)y + k * d * size);
        AMPI_EACH_X8(ampi_moment_x8, t, d - first, acc, row + first * size, m);
        mean[k] = (float)value[k];
        invstd[k] = (float)(1.0 / sqrt(ampi_wide8_total(acc) / (double)d + eps));
    }
}
AMPI_TARGET_AVX2 AMPI_FN int ampi_ln_measure_avx2(const void* x, amp_dtype t, const void* y, size_t rows, size_t d,
                                                  double eps, float* mean, float* invstd) {
    int usual = 1;
    AMPI_FOR_TYPE(ampi_ln_measure_x8, t, x, y, rows, d, eps, mean, invstd, &usual);
    ampi_clear_upper();
    return usual;
}
#endif

/* Mean and 1/sqrt(variance + eps) of one row, in two passes. */
AMPI_FN void ampi_ln_measure(const void* x, amp_dtype xt, size_t start, size_t d, double eps, float* mean,
                             float* invstd) {
    float tile[AMPI_TILE];
    double acc[AMPI_LANES], m[AMPI_LANES], value;
    const float* v = NULL;
    size_t i, l, n;
    memset(acc, 0, sizeof acc);
    for (i = 0; i < d; i += n) {
        n = ampi_tile_size(d, i);
        v = ampi_view(x, xt, start + i, n, tile);
        ampi_lane_sum_plain(acc, v, n);
    }
    value = ampi_lane_total(acc) / (double)d;
    for (l = 0; l < AMPI_LANES; l++) m[l] = value;
    memset(acc, 0, sizeof acc);
    for (i = 0; i < d; i += n) {
        n = ampi_tile_size(d, i);
        if (d > AMPI_TILE) v = ampi_view(x, xt, start + i, n, tile);
        ampi_lane_moment_plain(acc, v, m, n);
    }
    *mean = (float)value;
    *invstd = (float)(1.0 / sqrt(ampi_lane_total(acc) / (double)d + eps));
}
/* Of some rows that follow each other, from element `start` on; those of the result begin at y. */
AMPI_FN void ampi_ln_measure_rows(const void* x, amp_dtype xt, const void* y, size_t start, size_t rows, size_t d,
                                  double eps, float* mean, float* invstd) {
    size_t k;
#if AMPI_X86
    const char* first = (const char*)x + start * amp_dtype_size(xt);
    if (ampi_simd() >= AMP_ISA_AVX2 && AMPI_EITHER(ampi_ln_measure, first, xt, y, rows, d, eps, mean, invstd)) return;
#endif
    (void)y;
    for (k = 0; k < rows; k++) ampi_ln_measure(x, xt, start + k * d, d, eps, mean + k, invstd + k);
}

/* y = (x - mean) * invstd * gamma + beta along a row. */
AMPI_INLINE void ampi_ln_apply_body(int hw, float* y, const float* x, const float* gamma, const float* beta,
                                    float mean, float invstd, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++)
            v[l] = ampi_fma(hw, (x[i + l] - mean) * invstd, gamma[i + l], beta[i + l]);
        memcpy(y + i, v, sizeof v);
    }
}
AMPI_KERNEL(ampi_ln_apply,
            (float* y, const float* x, const float* gamma, const float* beta, float mean, float invstd,
             size_t n),
            y, x, gamma, beta, mean, invstd, n)

#if AMPI_X86
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_apply_x16(amp_dtype t, size_t i, __mmask16 m, void* y, const void* x,
                                                      const float* gamma, const float* beta, __m512 mean,
                                                      __m512 invstd) {
    const __m512 v = _mm512_mul_ps(_mm512_sub_ps(ampi_get_x16(t, x, i, m), mean), invstd);
    const __m512 g = ampi_get_x16(AMP_F32, gamma, i, m), b = ampi_get_x16(AMP_F32, beta, i, m);
    ampi_put_fetched_x16(t, y, i, m, _mm512_fmadd_ps(v, g, b));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_apply_row_x16(amp_dtype t, void* y, const void* x, const float* gamma,
                                                          const float* beta, float mean, float invstd, size_t n) {
    const __m512 m = _mm512_set1_ps(mean), s = _mm512_set1_ps(invstd);
    AMPI_EACH_X16(ampi_ln_apply_x16, t, n, y, x, gamma, beta, m, s);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_ln_apply_typed_avx512(amp_dtype t, void* y, const void* x, const float* gamma,
                                                           const float* beta, float mean, float invstd, size_t n) {
    AMPI_FOR_TYPE(ampi_ln_apply_row_x16, t, y, x, gamma, beta, mean, invstd, n);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ln_apply_x8(amp_dtype t, size_t i, size_t m, int upper, void* y, const void* x,
                                                   const float* gamma, const float* beta, __m256 mean, __m256 invstd) {
    const __m256 v = _mm256_mul_ps(_mm256_sub_ps(ampi_read8_avx2(x, t, i, m), mean), invstd);
    const __m256 g = ampi_read8_avx2(gamma, AMP_F32, i, m), b = ampi_read8_avx2(beta, AMP_F32, i, m);
    (void)upper;
    ampi_put8_avx2(y, t, i, m, _mm256_fmadd_ps(v, g, b));
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_ln_apply_typed_avx2(amp_dtype t, void* y, const void* x, const float* gamma,
                                                       const float* beta, float mean, float invstd, size_t n) {
    const __m256 m = _mm256_set1_ps(mean), s = _mm256_set1_ps(invstd);
    AMPI_ALL_X8(ampi_ln_apply_x8, t, n, y, x, gamma, beta, m, s);
}
#endif

/* The same where types are any: elements [at, at+n) of x and y; gamma and beta are those of these elements. */
AMPI_FN void ampi_ln_apply_part(const void* x, amp_dtype xt, void* y, amp_dtype yt, size_t at, const float* gamma,
                                const float* beta, float mean, float invstd, size_t n) {
    float x_tile[AMPI_TILE], y_tile[AMPI_TILE], *v;
#if AMPI_X86
    const size_t byte = at * amp_dtype_size(xt);
    if (ampi_typed_both(xt, yt)) {
        AMPI_BY_HAND(ampi_ln_apply_typed, xt, (char*)y + byte, (const char*)x + byte, gamma, beta, mean, invstd, n);
        return;
    }
#endif
    v = ampi_open(y, yt, at, n, y_tile);
    ampi_ln_apply(v, ampi_view(x, xt, at, n, x_tile), gamma, beta, mean, invstd, ampi_padded(n));
    ampi_close(y, yt, at, n, v);
}

AMP_DEF amp_result amp_layer_norm_forward(const void* x, amp_dtype x_dtype, const void* gamma,
                                          const void* beta, amp_dtype param_dtype, float eps,
                                          float* save_mean, float* save_invstd, void* y, amp_dtype y_dtype,
                                          size_t rows, size_t d, const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, x_dtype, 0 },
                                   { "y", y, y_dtype, 0 },
                                   { "gamma", gamma, param_dtype, 1 },
                                   { "beta", beta, param_dtype, 1 } };
    int64_t row;
    amp_result r = AMPI_CHECK(exec, "layer norm", ampi_area(rows, d), list);
    if (r != AMP_OK) return r;
    if (rows < 1 || d < 1)
        return ampi_fail(ampi_exec_logger(exec), AMP_ERR_SHAPE,
                         "layer norm: input %.0fx%.0f needs sizes >= 1", (double)rows, (double)d);
    eps = eps == 0.0f ? 1e-5f : eps;
    if (!(eps > 0.0f))
        return ampi_fail(ampi_exec_logger(exec), AMP_ERR_DESC, "layer norm: eps %g needs > 0", (double)eps);
    AMPI_PARALLEL_FOR(rows * d >= AMPI_PARALLEL_MIN)
    for (row = 0; row < (int64_t)rows; row += AMPI_LN_ROWS) {
        float g_tile[AMPI_TILE], b_tile[AMPI_TILE], mean[AMPI_LN_ROWS], invstd[AMPI_LN_ROWS];
        size_t start = (size_t)row * d, count = ampi_min_size(rows - (size_t)row, AMPI_LN_ROWS), i, k, n;
        ampi_ln_measure_rows(x, x_dtype, (char*)y + start * amp_dtype_size(y_dtype), start, count, d, (double)eps, mean,
                             invstd);
        for (i = 0; i < d; i += n) {
            const float *g, *b;
            n = ampi_tile_size(d, i);
            g = ampi_view_or(gamma, param_dtype, i, n, g_tile, 1.0f);
            b = ampi_view_or(beta, param_dtype, i, n, b_tile, 0.0f);
            for (k = 0; k < count; k++)
                ampi_ln_apply_part(x, x_dtype, y, y_dtype, start + k * d + i, g, b, mean[k], invstd[k], n);
        }
        for (k = 0; k < count; k++) {
            ampi_store_one(save_mean, AMP_F32, (size_t)row + k, mean[k], 0);
            ampi_store_one(save_invstd, AMP_F32, (size_t)row + k, invstd[k], 0);
        }
    }
    return AMP_OK;
}

/* t = t * gamma. */
AMPI_INLINE void ampi_multiply_plain_body(int hw, float* y, const float* x, const float* gamma, size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) v[l] = x[i + l] * gamma[i + l];
        memcpy(y + i, v, sizeof v);
    }
}
AMPI_KERNEL_AVX2(ampi_multiply_plain, (float* y, const float* x, const float* gamma, size_t n), y, x, gamma, n)

/* dx = (dy * gamma - a - (x - mean) * b) * invstd along a row. */
AMPI_INLINE void ampi_ln_dx_plain_body(int hw, float* dx, const float* dy, const float* x, const float* gamma,
                                       float mean, float a, float b, float invstd, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++)
            v[l] = ampi_fma(hw, mean - x[i + l], b, ampi_fma(hw, dy[i + l], gamma[i + l], -a)) * invstd;
        memcpy(dx + i, v, sizeof v);
    }
}
AMPI_KERNEL_AVX2(ampi_ln_dx_plain,
                 (float* dx, const float* dy, const float* x, const float* gamma, float mean, float a, float b,
                  float invstd, size_t n),
                 dx, dy, x, gamma, mean, a, b, invstd, n)

#if AMPI_X86
/* The sums of a row: sum += dy * gamma, dot += dy * gamma * (x - mean). */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_dot_x16(amp_dtype t, size_t i, __mmask16 m, ampi_wide* sum, ampi_wide* dot,
                                                    const void* dy, const void* x, const float* gamma, __m512 mean) {
    const __m512 g = _mm512_mul_ps(ampi_get_x16(t, dy, i, m), ampi_get_x16(AMP_F32, gamma, i, m));
    ampi_dot_step(m, sum, dot, ampi_widen_x16(g), ampi_get_x16(t, x, i, m), mean);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_dot_typed(amp_dtype t, double* sum, double* dot, const void* dy,
                                                      const void* x, const float* gamma, float mean, size_t n) {
    ampi_wide a = ampi_load_wide(sum), b = ampi_load_wide(dot);
    const __m512 m = _mm512_set1_ps(mean);
    AMPI_EACH_X16(ampi_ln_dot_x16, t, n, &a, &b, dy, x, gamma, m);
    ampi_store_wide(sum, a);
    ampi_store_wide(dot, b);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_ln_dot_avx512(double* sum, double* dot, ampi_part dy, ampi_part x,
                                                   const float* gamma, float mean) {
    AMPI_FOR_TYPE(ampi_ln_dot_typed, x.t, sum, dot, dy.data, x.data, gamma, mean, x.n);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_dx_x16(amp_dtype t, size_t i, __mmask16 m, void* dx, const void* dy,
                                                   const void* x, const float* gamma, __m512 mean, __m512 a, __m512 b,
                                                   __m512 invstd) {
    const __m512 g = _mm512_fmsub_ps(ampi_get_x16(t, dy, i, m), ampi_get_x16(AMP_F32, gamma, i, m), a);
    const __m512 v = _mm512_sub_ps(mean, ampi_get_x16(t, x, i, m));
    ampi_put_x16(t, dx, i, m, _mm512_mul_ps(_mm512_fmadd_ps(v, b, g), invstd));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_dx_typed(amp_dtype t, void* dx, const void* dy, const void* x,
                                                     const float* gamma, float mean, float a, float b, float invstd,
                                                     size_t n) {
    const __m512 m = _mm512_set1_ps(mean), va = _mm512_set1_ps(a), vb = _mm512_set1_ps(b), s = _mm512_set1_ps(invstd);
    AMPI_EACH_X16(ampi_ln_dx_x16, t, n, dx, dy, x, gamma, m, va, vb, s);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_ln_dx_avx512(void* dx, ampi_part dy, ampi_part x, const float* gamma, float mean,
                                                  float a, float b, float invstd) {
    AMPI_FOR_TYPE(ampi_ln_dx_typed, x.t, dx, dy.data, x.data, gamma, mean, a, b, invstd, x.n);
}

AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ln_dot_x8(amp_dtype t, size_t i, size_t m, int upper, ampi_wide8* sum,
                                                 ampi_wide8* dot, const void* dy, const void* x, const float* gamma,
                                                 __m256 mean) {
    const __m256 g = _mm256_mul_ps(ampi_read8_avx2(dy, t, i, m), ampi_read8_avx2(gamma, AMP_F32, i, m));
    ampi_dot_step8(m, sum + upper, dot + upper, ampi_widen_x8(g), ampi_read8_avx2(x, t, i, m), mean);
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_ln_dot_avx2(double* sum, double* dot, ampi_part dy, ampi_part x, const float* gamma,
                                               float mean) {
    const __m256 m = _mm256_set1_ps(mean);
    ampi_wide8 a[2], b[2];
    ampi_load_lanes8(a, sum);
    ampi_load_lanes8(b, dot);
    AMPI_ALL_X8(ampi_ln_dot_x8, x.t, x.n, a, b, dy.data, x.data, gamma, m);
    ampi_store_lanes8(sum, a);
    ampi_store_lanes8(dot, b);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ln_dx_x8(amp_dtype t, size_t i, size_t m, int upper, void* dx, const void* dy,
                                                const void* x, const float* gamma, __m256 mean, __m256 a, __m256 b,
                                                __m256 invstd) {
    const __m256 g = _mm256_fmsub_ps(ampi_read8_avx2(dy, t, i, m), ampi_read8_avx2(gamma, AMP_F32, i, m), a);
    const __m256 v = _mm256_sub_ps(mean, ampi_read8_avx2(x, t, i, m));
    ampi_put_x8(t, dx, i, m, upper, _mm256_mul_ps(_mm256_fmadd_ps(v, b, g), invstd));
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_ln_dx_avx2(void* dx, ampi_part dy, ampi_part x, const float* gamma, float mean,
                                              float a, float b, float invstd) {
    const __m256 m = _mm256_set1_ps(mean), va = _mm256_set1_ps(a), vb = _mm256_set1_ps(b), s = _mm256_set1_ps(invstd);
    AMPI_ALL_X8(ampi_ln_dx_x8, x.t, x.n, dx, dy.data, x.data, gamma, m, va, vb, s);
}
#endif

typedef struct ampi_ln_backward {
    const void *dy, *x, *gamma;
    const float *mean, *invstd;
    amp_dtype dyt, xt, pt;
    size_t rows, d;
} ampi_ln_backward;

/* The sums by lanes of elements [i, i+n) of a row. */
AMPI_FN void ampi_ln_dot(const ampi_ln_backward* q, size_t row, size_t i, size_t n, double* sum, double* dot) {
    const size_t at = row * q->d + i;
    float dy_tile[AMPI_TILE], x_tile[AMPI_TILE], g_tile[AMPI_TILE], mean[AMPI_LANES];
    const float* gamma = ampi_view_or(q->gamma, q->pt, i, n, g_tile, 1.0f);
    size_t l;
#if AMPI_X86
    if (ampi_typed_both(q->dyt, q->xt)) {
        AMPI_BY_HAND(ampi_ln_dot, sum, dot, ampi_part_of(q->dy, q->dyt, at, n, 1, NULL),
                     ampi_part_of(q->x, q->xt, at, n, 1, NULL), gamma, q->mean[row]);
        return;
    }
#endif
    for (l = 0; l < AMPI_LANES; l++) mean[l] = q->mean[row];
    ampi_multiply_plain(dy_tile, ampi_view(q->dy, q->dyt, at, n, dy_tile), gamma, ampi_padded(n));
    ampi_lane_dot(sum, dot, ampi_part_of(dy_tile, AMP_F32, 0, n, 1, NULL),
                  ampi_part_of(ampi_view(q->x, q->xt, at, n, x_tile), AMP_F32, 0, n, 1, NULL), mean);
}
/* Elements [i, i+n) of a row's dx. */
AMPI_FN void ampi_ln_dx(const ampi_ln_backward* q, size_t row, size_t i, size_t n, float a, float b, void* dx,
                        amp_dtype dxt) {
    const size_t at = row * q->d + i;
    float dy_tile[AMPI_TILE], x_tile[AMPI_TILE], g_tile[AMPI_TILE], *v;
    const float* gamma = ampi_view_or(q->gamma, q->pt, i, n, g_tile, 1.0f);
#if AMPI_X86
    if (ampi_typed_both(q->dyt, q->xt) && ampi_typed_both(dxt, q->xt)) {
        AMPI_BY_HAND(ampi_ln_dx, (char*)dx + at * amp_dtype_size(dxt), ampi_part_of(q->dy, q->dyt, at, n, 1, NULL),
                     ampi_part_of(q->x, q->xt, at, n, 1, NULL), gamma, q->mean[row], a, b, q->invstd[row]);
        return;
    }
#endif
    v = ampi_open(dx, dxt, at, n, dy_tile);
    ampi_ln_dx_plain(v, ampi_view(q->dy, q->dyt, at, n, dy_tile), ampi_view(q->x, q->xt, at, n, x_tile), gamma,
                     q->mean[row], a, b, q->invstd[row], ampi_padded(n));
    ampi_close(dx, dxt, at, n, v);
}

AMPI_FN void ampi_ln_row_backward(const ampi_ln_backward* q, size_t row, void* dx, amp_dtype dxt) {
    const double invstd = (double)q->invstd[row];
    double sum[AMPI_LANES], dot[AMPI_LANES];
    float a, b;
    size_t i;
    memset(sum, 0, sizeof sum);
    memset(dot, 0, sizeof dot);
    for (i = 0; i < q->d; i += ampi_tile_size(q->d, i))
        ampi_ln_dot(q, row, i, ampi_tile_size(q->d, i), sum, dot);
    a = (float)(ampi_lane_total(sum) / (double)q->d);
    b = (float)(ampi_lane_total(dot) * (invstd * invstd) / (double)q->d);
    for (i = 0; i < q->d; i += ampi_tile_size(q->d, i))
        ampi_ln_dx(q, row, i, ampi_tile_size(q->d, i), a, b, dx, dxt);
}

/* db += dy, dg += dy * xhat over the columns of one row. */
AMPI_INLINE void ampi_ln_columns_plain_body(int hw, double* AMPI_RESTRICT dg, double* AMPI_RESTRICT db,
                                            const float* AMPI_RESTRICT dy, const float* AMPI_RESTRICT x, float mean,
                                            float invstd, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) {
            float xhat = (x[i + l] - mean) * invstd;
            db[i + l] += (double)dy[i + l];
            dg[i + l] = ampi_add_product(hw, dy[i + l], xhat, dg[i + l]);
        }
}
AMPI_KERNEL_AVX2(ampi_ln_columns_plain,
                 (double* dg, double* db, const float* dy, const float* x, float mean, float invstd, size_t n),
                 dg, db, dy, x, mean, invstd, n)

#if AMPI_X86
/* `ahead` bytes on, rows below have the same columns: those beside them may be another thread's. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_columns_x16(amp_dtype t, size_t i, __mmask16 m, double* dg, double* db,
                                                        const void* dy, const void* x, size_t ahead, __m512 mean,
                                                        __m512 invstd) {
    const ampi_wide g = ampi_get_wide_x16(t, dy, i, m);
    ampi_wide sum = ampi_load_wide(db + i), dot = ampi_load_wide(dg + i);
    AMPI_FETCH(dy, ahead + i * amp_dtype_size(t));
    AMPI_FETCH(x, ahead + i * amp_dtype_size(t));
    ampi_wide_add(&sum, g);
    ampi_wide_fma(&dot, g, ampi_widen_x16(_mm512_mul_ps(_mm512_sub_ps(ampi_get_x16(t, x, i, m), mean), invstd)));
    ampi_store_wide(db + i, sum);
    ampi_store_wide(dg + i, dot);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_ln_columns_typed(amp_dtype t, double* dg, double* db, const void* dy,
                                                          const void* x, size_t ahead, float mean, float invstd,
                                                          size_t n) {
    const __m512 m = _mm512_set1_ps(mean), s = _mm512_set1_ps(invstd);
    AMPI_EACH_X16(ampi_ln_columns_x16, t, n, dg, db, dy, x, ahead, m, s);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_ln_columns_avx512(double* dg, double* db, ampi_part dy, ampi_part x, size_t ahead,
                                                       float mean, float invstd) {
    AMPI_FOR_TYPE(ampi_ln_columns_typed, x.t, dg, db, dy.data, x.data, ahead, mean, invstd, x.n);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_ln_columns_x8(amp_dtype t, size_t i, size_t m, int upper, double* dg, double* db,
                                                     const void* dy, const void* x, size_t ahead, __m256 mean,
                                                     __m256 invstd) {
    const __m256 d = _mm256_mul_ps(_mm256_sub_ps(ampi_read8_avx2(x, t, i, m), mean), invstd);
    const ampi_wide8 g = ampi_get_wide_x8(t, dy, i, m);
    ampi_wide8 sum = ampi_load_wide8(db + i), dot = ampi_load_wide8(dg + i);
    if (upper == 0) AMPI_FETCH(dy, ahead + i * amp_dtype_size(t));
    if (upper == 0) AMPI_FETCH(x, ahead + i * amp_dtype_size(t));
    ampi_wide8_add(&sum, g);
    ampi_wide8_fma(&dot, g, ampi_widen_x8(d));
    ampi_store_wide8(db + i, sum);
    ampi_store_wide8(dg + i, dot);
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_ln_columns_avx2(double* dg, double* db, ampi_part dy, ampi_part x, size_t ahead,
                                                   float mean, float invstd) {
    const __m256 m = _mm256_set1_ps(mean), s = _mm256_set1_ps(invstd);
    AMPI_ALL_X8(ampi_ln_columns_x8, x.t, x.n, dg, db, dy.data, x.data, ahead, m, s);
}
#endif

/* The same for columns [start, start+n) of one row; `next` rows below are about a page of these columns. */
AMPI_FN void ampi_ln_columns(const ampi_ln_backward* q, size_t row, size_t start, size_t n, size_t next, double* dg,
                             double* db) {
    const size_t at = row * q->d + start;
    float dy_tile[AMPI_TILE], x_tile[AMPI_TILE];
#if AMPI_X86
    if (ampi_typed_both(q->dyt, q->xt)) {
        AMPI_BY_HAND(ampi_ln_columns, dg, db, ampi_part_of(q->dy, q->dyt, at, n, 1, NULL),
                     ampi_part_of(q->x, q->xt, at, n, 1, NULL), next * q->d * amp_dtype_size(q->xt), q->mean[row],
                     q->invstd[row]);
        return;
    }
#endif
    (void)next;
    ampi_ln_columns_plain(dg, db, ampi_view(q->dy, q->dyt, at, n, dy_tile), ampi_view(q->x, q->xt, at, n, x_tile),
                          q->mean[row], q->invstd[row], ampi_padded(n));
}

/* Columns that one thread sums: as many as a tile holds, because memory is read fastest in long stretches, but
   fewer where other threads would have none. A column's sum does not depend on it. */
AMPI_FN size_t ampi_ln_columns_each(size_t d) {
    size_t share = ampi_padded((d + ampi_threads() - 1) / ampi_threads());
    return ampi_min_size(ampi_max_size(share, 128), AMPI_TILE);
}

/* dst[start...] = src, or += src. */
AMPI_FN void ampi_ln_store_sums(void* dst, amp_dtype t, size_t start, size_t n, const double* src, int accumulate) {
    float sums[AMPI_TILE], old[AMPI_TILE];
    size_t i;
    if (!dst) return;
    for (i = 0; i < n; i++) sums[i] = (float)src[i];
    if (accumulate) ampi_load_f32(old, dst, t, start, n);
    for (i = 0; accumulate && i < n; i++) sums[i] = old[i] + sums[i];
    ampi_store_f32(dst, t, start, sums, n);
}
/* dgamma and dbeta of columns [start, start + count): down the rows, in their order. With dx, rows are finished on the
   way, while they are in the cache. */
AMPI_FN void ampi_ln_params_backward(const ampi_ln_backward* q, size_t start, size_t count, void* dgamma,
                                     void* dbeta, amp_dtype dpt, int accumulate, void* dx, amp_dtype dxt) {
    double dg[AMPI_TILE], db[AMPI_TILE];
    size_t n = ampi_min_size(q->d - start, count), next = ampi_div_up(4096, n * amp_dtype_size(q->xt)), row;
    memset(dg, 0, sizeof dg);
    memset(db, 0, sizeof db);
    for (row = 0; row < q->rows; row++) {
        ampi_ln_columns(q, row, start, n, next, dg, db);
        if (dx) ampi_ln_row_backward(q, row, dx, dxt);
    }
    ampi_ln_store_sums(dgamma, dpt, start, n, dg, accumulate);
    ampi_ln_store_sums(dbeta, dpt, start, n, db, accumulate);
}

AMP_DEF amp_result amp_layer_norm_backward(const void* dy, amp_dtype dy_dtype, const void* x,
                                           amp_dtype x_dtype, const void* gamma, amp_dtype param_dtype,
                                           const float* save_mean, const float* save_invstd, void* dx,
                                           amp_dtype dx_dtype, void* dgamma, void* dbeta,
                                           amp_dtype dparam_dtype, int accumulate, size_t rows, size_t d,
                                           const amp_exec* exec) {
    const ampi_argument list[] = { { "dy", dy, dy_dtype, 0 },
                                   { "x", x, x_dtype, 0 },
                                   { "gamma", gamma, param_dtype, 1 },
                                   { "dx", dx, dx_dtype, 1 },
                                   { "save_mean", save_mean, AMP_F32, 0 },
                                   { "save_invstd", save_invstd, AMP_F32, 0 },
                                   { "dgamma", dgamma, dparam_dtype, 1 },
                                   { "dbeta", dbeta, dparam_dtype, 1 } };
    ampi_ln_backward q;
    size_t columns = ampi_ln_columns_each(d);
    int64_t i, blocks = (int64_t)((d + columns - 1) / columns);
    amp_result r = AMPI_CHECK(exec, "layer norm backward", ampi_area(rows, d), list);
    if (r != AMP_OK) return r;
    if (rows < 1 || d < 1)
        return ampi_fail(ampi_exec_logger(exec), AMP_ERR_SHAPE,
                         "layer norm backward: %.0fx%.0f needs sizes >= 1", (double)rows, (double)d);
    q.dy = dy; q.x = x; q.gamma = gamma; q.mean = save_mean; q.invstd = save_invstd;
    q.dyt = dy_dtype; q.xt = x_dtype; q.pt = param_dtype; q.rows = rows; q.d = d;
    if (dgamma || dbeta) {
        void* with = blocks == 1 && ampi_threads() == 1 ? dx : NULL;
        AMPI_PARALLEL_FOR(rows * d >= AMPI_PARALLEL_MIN)
        for (i = 0; i < blocks; i++)
            ampi_ln_params_backward(&q, (size_t)i * columns, columns, dgamma, dbeta, dparam_dtype, accumulate, with,
                                    dx_dtype);
        if (with) return AMP_OK;
    }
    if (!dx) return AMP_OK;
    AMPI_PARALLEL_FOR(rows * d >= AMPI_PARALLEL_MIN)
    for (i = 0; i < (int64_t)rows; i++) ampi_ln_row_backward(&q, (size_t)i, dx, dx_dtype);
    return AMP_OK;
}

/* --- activations ------------------------------------------------------------------------- */

/* sqrt(2/pi) * (x + 0.044715 x^3) * 2: GELU_TANH is x * sigmoid of this, as (1 + tanh(u)) / 2 =
   sigmoid(2u). */
#define AMPI_GELU_C0 1.59576912f     /* 2 * sqrt(2/pi) */
#define AMPI_GELU_C1 0.0713548163f   /* C0 * 0.044715  */

AMPI_HD AMPI_INLINE float ampi_relu(float x) {
    uint32_t u = ampi_bits(x), keep = ampi_mask(u < 0x80000000u) | ampi_nan_mask(x);
    return ampi_float(u & keep);
}
AMPI_HD AMPI_INLINE float ampi_activate(int hw, amp_activation f, float x) {
    float density;
    switch (f) {
        case AMP_GELU: return x * ampi_normal_cdf(hw, x, &density);
        case AMP_GELU_TANH: return x * ampi_sigmoid(hw, x * ampi_fma(hw, AMPI_GELU_C1, x * x, AMPI_GELU_C0));
        case AMP_TANH: return ampi_tanh(hw, x);
        case AMP_SIGMOID: return ampi_sigmoid(hw, x);
        default: return ampi_relu(x);
    }
}

/* Derivatives; s is the saved output (RELU, TANH, SIGMOID) or input (the GELUs). Beyond |x| = 16 a GELU's is
   0 or 1 in float, and clamping there keeps x^2 * 0 from becoming a NaN. */
AMPI_HD AMPI_INLINE float ampi_gelu_slope(int hw, float x) {
    float density, cdf = ampi_normal_cdf(hw, x, &density);
    return ampi_fma(hw, ampi_clamp(x, 16.0f) * 0.398942280f, density, cdf);
}
AMPI_HD AMPI_INLINE float ampi_gelu_tanh_slope(int hw, float x) {
    float c = ampi_clamp(x, 16.0f), square = c * c;
    float z = c * ampi_fma(hw, AMPI_GELU_C1, square, AMPI_GELU_C0), slope;
    float tail = ampi_sigmoid(hw, -ampi_abs(z)); /* the smaller of s and 1-s, so that s*(1-s) is accurate */
    slope = ampi_fma(hw, 3.0f * AMPI_GELU_C1, square, AMPI_GELU_C0);
    return ampi_fma(hw, c * (tail * (1.0f - tail)), slope,
                    ampi_select(ampi_mask((int)(ampi_bits(z) >> 31)), tail, 1.0f - tail));
}
AMPI_HD AMPI_INLINE float ampi_activate_slope(int hw, amp_activation f, float dy, float s) {
    uint32_t u = ampi_bits(s), pass;
    switch (f) {
        case AMP_GELU: return dy * ampi_gelu_slope(hw, s);
        case AMP_GELU_TANH: return dy * ampi_gelu_tanh_slope(hw, s);
        case AMP_TANH: return dy * ampi_fma(hw, -s, s, 1.0f);
        case AMP_SIGMOID: return dy * (s * (1.0f - s));
        default:
            pass = ampi_mask(u - 1u < 0x7fffffffu) | ampi_nan_mask(s);
            return ampi_float(ampi_bits(dy) & pass);
    }
}

/* y may be x. f is a constant in each copy of the loop. */
AMPI_INLINE void ampi_activation_loop(int hw, amp_activation f, float* y, const float* x, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) v[l] = ampi_activate(hw, f, x[i + l]);
        memcpy(y + i, v, sizeof v);
    }
}
AMPI_INLINE void ampi_activation_plain_body(int hw, amp_activation f, float* y, const float* x, size_t n) {
    switch (f) {
        case AMP_GELU: ampi_activation_loop(hw, AMP_GELU, y, x, n); break;
        case AMP_GELU_TANH: ampi_activation_loop(hw, AMP_GELU_TANH, y, x, n); break;
        case AMP_TANH: ampi_activation_loop(hw, AMP_TANH, y, x, n); break;
        case AMP_SIGMOID: ampi_activation_loop(hw, AMP_SIGMOID, y, x, n); break;
        default: ampi_activation_loop(hw, AMP_RELU, y, x, n); break;
    }
}
AMPI_KERNEL_AVX2(ampi_activation_plain, (amp_activation f, float* y, const float* x, size_t n), f, y, x, n)

AMPI_INLINE void ampi_activation_slope_loop(int hw, amp_activation f, float* dx, const float* dy,
                                            const float* s, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) v[l] = ampi_activate_slope(hw, f, dy[i + l], s[i + l]);
        memcpy(dx + i, v, sizeof v);
    }
}
AMPI_INLINE void ampi_activation_slope_plain_body(int hw, amp_activation f, float* dx, const float* dy,
                                                  const float* s, size_t n) {
    switch (f) {
        case AMP_GELU: ampi_activation_slope_loop(hw, AMP_GELU, dx, dy, s, n); break;
        case AMP_GELU_TANH: ampi_activation_slope_loop(hw, AMP_GELU_TANH, dx, dy, s, n); break;
        case AMP_TANH: ampi_activation_slope_loop(hw, AMP_TANH, dx, dy, s, n); break;
        case AMP_SIGMOID: ampi_activation_slope_loop(hw, AMP_SIGMOID, dx, dy, s, n); break;
        default: ampi_activation_slope_loop(hw, AMP_RELU, dx, dy, s, n); break;
    }
}
AMPI_KERNEL_AVX2(ampi_activation_slope_plain,
                 (amp_activation f, float* dx, const float* dy, const float* s, size_t n), f, dx, dy, s, n)

#if AMPI_X86
/* Both by hand, of operands of any type. */
AMPI_TARGET_AVX512 AMPI_INLINE __mmask16 ampi_relu_passes_x16(__m512 x) {
    const __m512i u = _mm512_castps_si512(x);
    return (__mmask16)(_mm512_cmpgt_epi32_mask(u, _mm512_setzero_si512()) | ampi_nan_x16(u));
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_activate_x16(amp_activation f, __m512 x) {
    const __m512 c0 = _mm512_set1_ps(AMPI_GELU_C0), c1 = _mm512_set1_ps(AMPI_GELU_C1);
    __m512 density;
    switch (f) {
        case AMP_GELU: return _mm512_mul_ps(x, ampi_normal_cdf_x16(x, &density));
        case AMP_GELU_TANH:
            density = _mm512_fmadd_ps(c1, _mm512_mul_ps(x, x), c0);
            return _mm512_mul_ps(x, ampi_sigmoid_x16(_mm512_mul_ps(x, density)));
        case AMP_TANH: return ampi_tanh_x16(x);
        case AMP_SIGMOID: return ampi_sigmoid_x16(x);
        default: return _mm512_maskz_mov_ps(ampi_relu_passes_x16(x), x);
    }
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_gelu_slope_x16(__m512 x) {
    const __m512 c = _mm512_mul_ps(ampi_clamp_x16(x, 16.0f), _mm512_set1_ps(0.398942280f));
    __m512 density, cdf = ampi_normal_cdf_x16(x, &density);
    return _mm512_fmadd_ps(c, density, cdf);
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_gelu_tanh_slope_x16(__m512 x) {
    const __m512 c0 = _mm512_set1_ps(AMPI_GELU_C0), c1 = _mm512_set1_ps(AMPI_GELU_C1), one = _mm512_set1_ps(1.0f);
    const __m512 c = ampi_clamp_x16(x, 16.0f), square = _mm512_mul_ps(c, c);
    const __m512 z = _mm512_mul_ps(c, _mm512_fmadd_ps(c1, square, c0));
    const __m512 tail = ampi_sigmoid_x16(_mm512_or_ps(z, _mm512_set1_ps(-0.0f))), other = _mm512_sub_ps(one, tail);
    const __m512 slope = _mm512_fmadd_ps(_mm512_set1_ps(3.0f * AMPI_GELU_C1), square, c0);
    const __m512 s = _mm512_mask_mov_ps(other, _mm512_movepi32_mask(_mm512_castps_si512(z)), tail);
    return _mm512_fmadd_ps(_mm512_mul_ps(c, _mm512_mul_ps(tail, other)), slope, s);
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_activate_slope_x16(amp_activation f, __m512 dy, __m512 s) {
    const __m512 one = _mm512_set1_ps(1.0f);
    switch (f) {
        case AMP_GELU: return _mm512_mul_ps(dy, ampi_gelu_slope_x16(s));
        case AMP_GELU_TANH: return _mm512_mul_ps(dy, ampi_gelu_tanh_slope_x16(s));
        case AMP_TANH: return _mm512_mul_ps(dy, _mm512_fnmadd_ps(s, s, one));
        case AMP_SIGMOID: return _mm512_mul_ps(dy, _mm512_mul_ps(s, _mm512_sub_ps(one, s)));
        default: return _mm512_maskz_mov_ps(ampi_relu_passes_x16(s), dy);
    }
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_activation_x16(amp_dtype t, size_t i, __mmask16 m, amp_activation f, void* y,
                                                        const void* x) {
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    ampi_put_x16(t, y, i, m, ampi_activate_x16(f, ampi_get_x16(t, x, i, m)));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_slope_x16(amp_dtype t, size_t i, __mmask16 m, amp_activation f, void* dx,
                                                   const void* dy, const void* s) {
    AMPI_AHEAD(dy, i * amp_dtype_size(t));
    AMPI_AHEAD(s, i * amp_dtype_size(t));
    ampi_put_x16(t, dx, i, m, ampi_activate_slope_x16(f, ampi_get_x16(t, dy, i, m), ampi_get_x16(t, s, i, m)));
}
/* ReLU of numbers of 16 bits, as integers: x where s passes. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_relu_x32(amp_dtype t, __m512i x, __m512i s) {
    const __mmask32 pass = _mm512_cmpgt_epi16_mask(s, _mm512_setzero_si512()) | ampi_nan_x32(t, s);
    return _mm512_maskz_mov_epi16(pass, ampi_quiet_x32(t, x));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_relu_low(amp_dtype t, void* y, const void* x, const void* s, size_t n) {
    uint16_t* to = (uint16_t*)y;
    const uint16_t *from = (const uint16_t*)x, *by = (const uint16_t*)s;
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        AMPI_AHEAD(x, 2 * i);
        AMPI_AHEAD(s, 2 * i);
        _mm512_storeu_si512(to + i, ampi_relu_x32(t, _mm512_loadu_si512(from + i), _mm512_loadu_si512(by + i)));
    }
    if (i < n) {
        const __mmask32 m = ((__mmask32)1 << (n - i)) - 1u;
        _mm512_mask_storeu_epi16(to + i, m, ampi_relu_x32(t, _mm512_maskz_loadu_epi16(m, from + i),
                                                          _mm512_maskz_loadu_epi16(m, by + i)));
    }
}
/* s NULL: y = f(x); otherwise y = x * f'(s). */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_activation_typed(amp_dtype t, amp_activation f, void* y, const void* x,
                                                          const void* s, size_t n) {
    if (f == AMP_RELU && t != AMP_F32) ampi_relu_low(t, y, x, s ? s : x, n);
    else if (s) AMPI_EACH_X16(ampi_slope_x16, t, n, f, y, x, s);
    else AMPI_EACH_X16(ampi_activation_x16, t, n, f, y, x);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_activation_avx512(amp_activation f, void* y, ampi_part x, const void* s) {
    switch (f) {
        case AMP_GELU: AMPI_FOR_TYPE(ampi_activation_typed, x.t, AMP_GELU, y, x.data, s, x.n); break;
        case AMP_GELU_TANH: AMPI_FOR_TYPE(ampi_activation_typed, x.t, AMP_GELU_TANH, y, x.data, s, x.n); break;
        case AMP_TANH: AMPI_FOR_TYPE(ampi_activation_typed, x.t, AMP_TANH, y, x.data, s, x.n); break;
        case AMP_SIGMOID: AMPI_FOR_TYPE(ampi_activation_typed, x.t, AMP_SIGMOID, y, x.data, s, x.n); break;
        default: AMPI_FOR_TYPE(ampi_activation_typed, x.t, AMP_RELU, y, x.data, s, x.n); break;
    }
    ampi_clear_upper();
}
/* GELU alone by AVX2: of it the plain form is slow. */
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_gelu_x8(amp_dtype t, size_t i, size_t m, int upper, void* y, const void* x) {
    __m256 v = ampi_read8_avx2(x, t, i, m), density;
    ampi_put_x8(t, y, i, m, upper, _mm256_mul_ps(v, ampi_normal_cdf_x8(v, &density)));
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_gelu_slope_x8(amp_dtype t, size_t i, size_t m, int upper, void* dx,
                                                     const void* dy, const void* s) {
    __m256 v = ampi_read8_avx2(s, t, i, m), density, cdf = ampi_normal_cdf_x8(v, &density);
    const __m256 far = _mm256_cmp_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), _mm256_set1_ps(16.0f), _CMP_GT_OQ);
    v = _mm256_mul_ps(_mm256_andnot_ps(far, v), _mm256_set1_ps(0.398942280f));    /* the density is 0 there */
    v = _mm256_fmadd_ps(v, density, cdf);
    ampi_put_x8(t, dx, i, m, upper, _mm256_mul_ps(ampi_read8_avx2(dy, t, i, m), v));
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_gelu_avx2(void* y, ampi_part x, const void* s) {
    if (s) AMPI_ALL_X8(ampi_gelu_slope_x8, x.t, x.n, y, x.data, s);
    else AMPI_ALL_X8(ampi_gelu_x8, x.t, x.n, y, x.data);
    ampi_clear_upper();
}
#endif

/* Elements [at, at+n) of an operand: y = f(x), or dx = dy * f'(s). Types may differ. */
AMPI_FN void ampi_activation(amp_activation f, const void* x, amp_dtype xt, void* y, amp_dtype yt, size_t at,
                             size_t n) {
    float x_tile[AMPI_TILE], y_tile[AMPI_TILE], *v;
#if AMPI_X86
    if (ampi_typed(xt, yt)) {
        ampi_activation_avx512(f, (char*)y + at * amp_dtype_size(yt), ampi_part_of(x, xt, at, n, 1, NULL), NULL);
        return;
    }
    if (f == AMP_GELU && ampi_typed_both(xt, yt)) {
        ampi_gelu_avx2((char*)y + at * amp_dtype_size(yt), ampi_part_of(x, xt, at, n, 1, NULL), NULL);
        return;
    }
#endif
    v = ampi_open(y, yt, at, n, y_tile);
    ampi_activation_plain(f, v, ampi_view(x, xt, at, n, x_tile), ampi_padded(n));
    ampi_close(y, yt, at, n, v);
}
AMPI_FN void ampi_activation_slope(amp_activation f, const void* dy, amp_dtype dyt, const void* s, amp_dtype st,
                                   void* dx, amp_dtype dxt, size_t at, size_t n) {
    float dy_tile[AMPI_TILE], s_tile[AMPI_TILE], *v;
#if AMPI_X86
    if (ampi_typed(dyt, st) && ampi_typed(dxt, st)) {
        ampi_activation_avx512(f, (char*)dx + at * amp_dtype_size(dxt), ampi_part_of(dy, dyt, at, n, 1, NULL),
                               (const char*)s + at * amp_dtype_size(st));
        return;
    }
    if (f == AMP_GELU && ampi_typed_both(dyt, st) && ampi_typed_both(dxt, st)) {
        ampi_gelu_avx2((char*)dx + at * amp_dtype_size(dxt), ampi_part_of(dy, dyt, at, n, 1, NULL),
                       (const char*)s + at * amp_dtype_size(st));
        return;
    }
#endif
    v = ampi_open(dx, dxt, at, n, dy_tile);
    ampi_activation_slope_plain(f, v, ampi_view(dy, dyt, at, n, dy_tile), ampi_view(s, st, at, n, s_tile),
                                ampi_padded(n));
    ampi_close(dx, dxt, at, n, v);
}

/* An element of 16 bits is one of 65,536. Where there are many of them, a table of f or f' of each, made by the code
   above in the workspace, is faster than to compute each anew; not for those that are a few operations only. */
enum { AMPI_VALUES = 65536 };

/* Room for a table with entries of `size` bytes for the values of type t, if n elements are worth one; or NULL. */
AMPI_FN void* ampi_value_table(amp_dtype t, size_t size, size_t n, const amp_exec* exec) {
    size_t bytes = exec && exec->workspace ? exec->workspace_size : 0;
    if (amp_dtype_size(t) != 2 || n < 4 * AMPI_VALUES || bytes < AMPI_VALUES * size + 128) return NULL;
    return ampi_align64(exec->workspace);
}
/* The values [first, first + AMPI_TILE). */
AMPI_FN void ampi_values(uint16_t* v, int64_t first) {
    int i;
    for (i = 0; i < AMPI_TILE; i++) v[i] = (uint16_t)(first + i);
}
AMPI_FN const uint16_t* ampi_activation_table(amp_activation f, amp_dtype xt, amp_dtype yt, size_t n,
                                              const amp_exec* exec) {
    const int wanted = f != AMP_RELU && amp_dtype_size(yt) == sizeof(uint16_t);
    uint16_t* table = wanted ? (uint16_t*)ampi_value_table(xt, sizeof(uint16_t), n, exec) : NULL;
    int64_t i;
    if (!table) return NULL;
    AMPI_PARALLEL_FOR(1)
    for (i = 0; i < AMPI_VALUES; i += AMPI_TILE) {
        uint16_t x[AMPI_TILE];
        ampi_values(x, i);
        ampi_activation(f, x, xt, table + i, yt, 0, AMPI_TILE);
    }
    return table;
}
AMPI_FN const float* ampi_slope_table(amp_activation f, amp_dtype st, size_t n, const amp_exec* exec) {
    const int wanted = f == AMP_GELU || f == AMP_GELU_TANH;
    float* table = wanted ? (float*)ampi_value_table(st, sizeof(float), n, exec) : NULL;
    int64_t i;
    if (!table) return NULL;
    AMPI_PARALLEL_FOR(1)
    for (i = 0; i < AMPI_VALUES; i += AMPI_TILE) {
        uint16_t bits[AMPI_TILE];
        float s[AMPI_TILE];
        int l;
        ampi_values(bits, i);
        ampi_load_f32(s, bits, st, 0, AMPI_TILE);
        for (l = 0; l < AMPI_TILE; l++) table[i + l] = 1.0f;
        ampi_activation_slope(f, table + i, AMP_F32, s, AMP_F32, table + i, AMP_F32, 0, AMPI_TILE);
    }
    return table;
}
#if AMPI_X86
/* 32 bits from each of 16 places, `size` bytes apart; in halves, as gcc -O0 warns of the other form's mask. */
#define AMPI_GATHER_HALF(base, at, size, which) \
    _mm256_i32gather_epi32((const int*)(const void*)(base), _mm512_maskz_extracti64x4_epi64(0xf, at, which), size)
#define AMPI_GATHER_X16(base, at, size) \
    _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(AMPI_GATHER_HALF(base, at, size, 0)), \
                             AMPI_GATHER_HALF(base, at, size, 1), 1)
/* Entries are read 32 bits at a time: of 16 bits, together with the next one. */
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_value_x16(const uint16_t* v, size_t i, __mmask16 m) {
    return _mm512_maskz_cvtepu16_epi32(AMPI_ALL16, AMPI_LOAD_HALF_X16(m, v + i));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_look_up_x16(amp_dtype t, size_t i, __mmask16 m, uint16_t* y,
                                                     const uint16_t* x, const uint16_t* table) {
    const __m512i both = AMPI_GATHER_X16(table, ampi_value_x16(x, i, m), 2);
    (void)t;
    AMPI_AHEAD(x, i * sizeof *x);
    AMPI_AHEAD(y, i * sizeof *y);
    _mm256_mask_storeu_epi16(y + i, m, _mm512_maskz_cvtepi32_epi16(AMPI_ALL16, both));
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_look_up_avx512(const uint16_t* table, const uint16_t* x, uint16_t* y, size_t n) {
    AMPI_EACH_X16(ampi_look_up_x16, AMP_F16, n, y, x, table);
    ampi_clear_upper();
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_slope_value_x16(amp_dtype t, size_t i, __mmask16 m, void* dx, const void* dy,
                                                         const uint16_t* s, const float* table) {
    const __m512 slope = _mm512_castsi512_ps(AMPI_GATHER_X16(table, ampi_value_x16(s, i, m), 4));
    AMPI_AHEAD(dy, i * amp_dtype_size(t));
    AMPI_AHEAD(s, i * sizeof *s);
    ampi_put_x16(t, dx, i, m, _mm512_mul_ps(ampi_get_x16(t, dy, i, m), slope));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_slope_values_x16(amp_dtype t, void* dx, const void* dy, const uint16_t* s,
                                                          const float* table, size_t n) {
    AMPI_EACH_X16(ampi_slope_value_x16, t, n, dx, dy, s, table);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_slope_look_up_avx512(const float* table, ampi_part dy, const uint16_t* s,
                                                          void* dx) {
    AMPI_FOR_TYPE(ampi_slope_values_x16, dy.t, dx, dy.data, s, table, dy.n);
    ampi_clear_upper();
}
#endif

AMPI_FN void ampi_look_up(const uint16_t* table, const uint16_t* x, uint16_t* y, size_t n) {
    size_t i;
#if AMPI_X86
    if (ampi_simd() == AMP_ISA_AVX512) { ampi_look_up_avx512(table, x, y, n); return; }
#endif
    for (i = 0; i < n; i++) y[i] = table[x[i]];
}
/* Elements [at, at+n) of dx = dy * table[s]. */
AMPI_FN void ampi_slope_look_up(const float* table, const void* dy, amp_dtype dyt, const uint16_t* s, void* dx,
                                amp_dtype dxt, size_t at, size_t n) {
    float tile[AMPI_TILE], slopes[AMPI_TILE], *v;
    size_t i;
#if AMPI_X86
    if (ampi_typed(dyt, dxt)) {
        ampi_slope_look_up_avx512(table, ampi_part_of(dy, dyt, at, n, 1, NULL), s + at,
                                  (char*)dx + at * amp_dtype_size(dxt));
        return;
    }
#endif
    v = ampi_open(dx, dxt, at, n, tile);
    memset(slopes, 0, sizeof slopes);
    for (i = 0; i < n; i++) slopes[i] = table[s[at + i]];
    ampi_multiply_plain(v, ampi_view(dy, dyt, at, n, tile), slopes, ampi_padded(n));
    ampi_close(dx, dxt, at, n, v);
}

AMPI_FN amp_result ampi_check_activation(const amp_exec* exec, amp_activation f) {
    if ((int)f >= (int)AMP_RELU && (int)f <= (int)AMP_SIGMOID) return AMP_OK;
    return ampi_fail(ampi_exec_logger(exec), AMP_ERR_DESC, "activation: %d is not an amp_activation", (int)f);
}

AMP_DEF amp_result amp_activation_forward(amp_activation f, const void* x, amp_dtype x_dtype, void* y,
                                          amp_dtype y_dtype, size_t n, const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, x_dtype, 0 }, { "y", y, y_dtype, 0 } };
    const uint16_t* table;
    int64_t i;
    amp_result r = ampi_check_activation(exec, f);
    if (r != AMP_OK || (r = AMPI_CHECK(exec, "activation", n, list)) != AMP_OK) return r;
    table = ampi_activation_table(f, x_dtype, y_dtype, n, exec);
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < ampi_tiles(n); i++) {
        size_t at = (size_t)i * AMPI_TILE, count = ampi_tile_size(n, at);
        if (table) ampi_look_up(table, (const uint16_t*)x + at, (uint16_t*)y + at, count);
        else       ampi_activation(f, x, x_dtype, y, y_dtype, at, count);
    }
    return AMP_OK;
}

AMP_DEF amp_result amp_activation_backward(amp_activation f, const void* dy, amp_dtype dy_dtype,
                                           const void* saved, amp_dtype saved_dtype, void* dx,
                                           amp_dtype dx_dtype, size_t n, const amp_exec* exec) {
    const ampi_argument list[] = { { "dy", dy, dy_dtype, 0 },
                                   { "saved", saved, saved_dtype, 0 },
                                   { "dx", dx, dx_dtype, 1 } };
    const float* table;
    int64_t i;
    amp_result r = ampi_check_activation(exec, f);
    if (r != AMP_OK || (r = AMPI_CHECK(exec, "activation backward", n, list)) != AMP_OK || !dx) return r;
    table = ampi_slope_table(f, saved_dtype, n, exec);
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < ampi_tiles(n); i++) {
        size_t at = (size_t)i * AMPI_TILE, count = ampi_tile_size(n, at);
        if (table) ampi_slope_look_up(table, dy, dy_dtype, (const uint16_t*)saved, dx, dx_dtype, at, count);
        else       ampi_activation_slope(f, dy, dy_dtype, saved, saved_dtype, dx, dx_dtype, at, count);
    }
    return AMP_OK;
}

/* --- softmax ----------------------------------------------------------------------------- */

/* The larger of `max` and the n elements of x, a padded tile; NaNs are passed over (they come back through
   exp). */
AMPI_INLINE void ampi_row_max_plain_body(int hw, float* max, const float* x, uint32_t n) {
    float m[AMPI_LANES];
    uint32_t i, l, step;
    (void)hw;
    for (l = 0; l < AMPI_LANES; l++) m[l] = *max;
    for (i = 0; i < n; i += AMPI_LANES) {
        const float* v = x + i;
        for (l = 0; l < AMPI_LANES; l++)
            m[l] = ampi_select(ampi_mask(v[l] > m[l]) & ampi_mask(l < n - i), v[l], m[l]);
    }
    for (step = AMPI_LANES / 2; step > 0; step /= 2)
        for (l = 0; l < step; l++) m[l] = ampi_select(ampi_mask(m[l + step] > m[l]), m[l + step], m[l]);
    *max = m[0];
}
AMPI_KERNEL_PLAIN(ampi_row_max_plain, (float* max, const float* x, uint32_t n), max, x, n)

/* y = exp(x - max); y may be x. */
AMPI_INLINE void ampi_row_exp_plain_body(int hw, float* y, const float* x, float max, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) v[l] = ampi_exp(hw, x[i + l] - max);
        memcpy(y + i, v, sizeof v);
    }
}
AMPI_KERNEL_PLAIN(ampi_row_exp_plain, (float* y, const float* x, float max, size_t n), y, x, max, n)

/* y = x * a - b with one rounding, times c. */
AMPI_INLINE void ampi_row_affine_plain_body(int hw, float* y, const float* x, float a, float b, float c, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) v[l] = ampi_fma(hw, x[i + l], a, -b) * c;
        memcpy(y + i, v, sizeof v);
    }
}
AMPI_KERNEL_PLAIN(ampi_row_affine_plain, (float* y, const float* x, float a, float b, float c, size_t n), y, x, a, b,
                 c, n)

#if AMPI_X86
/* The same by hand, of operands of any type. The maximum instruction returns its second operand where the first is a
   NaN, or both are equal. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_row_max_x16(amp_dtype t, size_t i, __mmask16 m, __m512* max, const void* x) {
    AMPI_AHEAD(x, i * amp_dtype_size(t));
    *max = _mm512_mask_max_ps(*max, m, ampi_get_x16(t, x, i, m), *max);
}
AMPI_TARGET_AVX512 AMPI_INLINE float ampi_row_max_fold(__m512 a) {
    __m256 b = _mm256_max_ps(_mm512_maskz_extractf32x8_ps(0xff, a, 1), _mm512_maskz_extractf32x8_ps(0xff, a, 0));
    __m128 c = _mm_max_ps(_mm256_extractf128_ps(b, 1), _mm256_castps256_ps128(b));
    c = _mm_max_ps(_mm_movehl_ps(c, c), c);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(c), c));
}

/* tile = exp(x - max), and acc += tile where acc is wanted. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_row_exp_x16(amp_dtype t, size_t i, __mmask16 m, float* tile, ampi_wide* acc,
                                                     const void* x, __m512 max) {
    const __m512 e = ampi_exp_x16(_mm512_sub_ps(ampi_get_x16(t, x, i, m), max));
    _mm512_storeu_ps(tile + i % AMPI_TILE, e);
    ampi_wide_add(acc, ampi_widen_x16(_mm512_maskz_mov_ps(m, e)));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_row_exp_typed(amp_dtype t, float* tile, double* acc, const void* x, float max,
                                                       size_t n) {
    const __m512 m = _mm512_set1_ps(max);
    ampi_wide a = ampi_load_wide(acc);
    AMPI_EACH_X16(ampi_row_exp_x16, t, n, tile, &a, x, m);
    ampi_store_wide(acc, a);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_row_exp_avx512(float* tile, double* acc, ampi_part x, float max) {
    AMPI_FOR_TYPE(ampi_row_exp_typed, x.t, tile, acc, x.data, max, x.n);
}

/* A whole row: its maximum, and the sum of exp(x - max). */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_row_measure_typed(amp_dtype t, const void* x, size_t d, float* max, float* sum,
                                                           float* tile) {
    __m512 m = _mm512_set1_ps(*max);
    ampi_wide acc;
    acc.low = acc.high = _mm512_setzero_pd();
    AMPI_EACH_X16(ampi_row_max_x16, t, d, &m, x);
    *max = ampi_row_max_fold(m);
    m = _mm512_set1_ps(*max);
    AMPI_EACH_X16(ampi_row_exp_x16, t, d, tile, &acc, x, m);
    *sum = (float)ampi_wide_total(acc);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_row_measure_avx512(amp_dtype t, const void* x, size_t d, float* max, float* sum,
                                                        float* tile) {
    AMPI_FOR_TYPE(ampi_row_measure_typed, t, x, d, max, sum, tile);
}

AMPI_TARGET_AVX512 AMPI_INLINE void ampi_row_affine_x16(amp_dtype t, size_t i, __mmask16 m, void* y, const float* x,
                                                        __m512 a, __m512 b, __m512 c) {
    ampi_put_x16(t, y, i, m, _mm512_mul_ps(_mm512_fmsub_ps(_mm512_loadu_ps(x + i), a, b), c));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_row_affine_typed(amp_dtype t, void* y, const float* x, float a, float b,
                                                          float c, size_t n) {
    const __m512 va = _mm512_set1_ps(a), vb = _mm512_set1_ps(b), vc = _mm512_set1_ps(c);
    AMPI_EACH_X16(ampi_row_affine_x16, t, n, y, x, va, vb, vc);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_row_affine_avx512(amp_dtype t, void* y, const float* x, float a, float b, float c,
                                                       size_t n) {
    AMPI_FOR_TYPE(ampi_row_affine_typed, t, y, x, a, b, c, n);
}

AMPI_TARGET_AVX2 AMPI_INLINE void ampi_row_max_x8(amp_dtype t, size_t i, size_t m, int upper, __m256* max,
                                                  const void* x) {
    const __m256 v = _mm256_max_ps(ampi_read8_avx2(x, t, i, m), max[upper]);
    if (upper == 0) AMPI_AHEAD(x, i * amp_dtype_size(t));
    max[upper] = m < 8 ? _mm256_blendv_ps(max[upper], v, _mm256_castsi256_ps(AMPI_V8_MASK(m))) : v;
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_row_exp_x8(amp_dtype t, size_t i, size_t m, int upper, float* tile,
                                                  ampi_wide8* acc, const void* x, __m256 max) {
    const __m256 e = ampi_exp_x8(_mm256_sub_ps(ampi_read8_avx2(x, t, i, m), max));
    _mm256_storeu_ps(tile + i % AMPI_TILE, e);
    ampi_wide8_add(acc + upper, ampi_widen_x8(ampi_first_x8(e, m)));
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_row_exp_avx2(float* tile, double* acc, ampi_part x, float max) {
    const __m256 m = _mm256_set1_ps(max);
    ampi_wide8 a[2];
    ampi_load_lanes8(a, acc);
    AMPI_ALL_X8(ampi_row_exp_x8, x.t, x.n, tile, a, x.data, m);
    ampi_store_lanes8(acc, a);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_row_measure_typed8(amp_dtype t, const void* x, size_t d, float* max, float* sum,
                                                          float* tile) {
    __m256 m[2];
    __m128 c;
    ampi_wide8 acc[2];
    m[0] = m[1] = _mm256_set1_ps(*max);
    acc[0].low = acc[0].high = acc[1].low = acc[1].high = _mm256_setzero_pd();
    AMPI_EACH_X8(ampi_row_max_x8, t, d, m, x);
    m[0] = _mm256_max_ps(m[1], m[0]);
    c = _mm_max_ps(_mm256_extractf128_ps(m[0], 1), _mm256_castps256_ps128(m[0]));
    c = _mm_max_ps(_mm_movehl_ps(c, c), c);
    *max = _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(c), c));
    m[0] = _mm256_set1_ps(*max);
    AMPI_EACH_X8(ampi_row_exp_x8, t, d, tile, acc, x, m[0]);
    *sum = (float)ampi_wide8_total(acc);
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_row_measure_avx2(amp_dtype t, const void* x, size_t d, float* max, float* sum,
                                                    float* tile) {
    AMPI_FOR_TYPE(ampi_row_measure_typed8, t, x, d, max, sum, tile);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_row_affine_x8(amp_dtype t, size_t i, size_t m, int upper, void* y,
                                                     const float* x, __m256 a, __m256 b, __m256 c) {
    ampi_put_x8(t, y, i, m, upper, _mm256_mul_ps(_mm256_fmsub_ps(_mm256_loadu_ps(x + i), a, b), c));
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_row_affine_avx2(amp_dtype t, void* y, const float* x, float a, float b, float c,
                                                   size_t n) {
    const __m256 va = _mm256_set1_ps(a), vb = _mm256_set1_ps(b), vc = _mm256_set1_ps(c);
    AMPI_ALL_X8(ampi_row_affine_x8, t, n, y, x, va, vb, vc);
}
#endif

/* Elements [at, at+n) of y: tile * a - b, times c. */
AMPI_FN void ampi_row_affine(void* y, amp_dtype yt, size_t at, float* tile, float a, float b, float c, size_t n) {
    float* v;
#if AMPI_X86
    if (ampi_simd() >= AMP_ISA_AVX2) {
        AMPI_BY_HAND(ampi_row_affine, yt, (char*)y + at * amp_dtype_size(yt), tile, a, b, c, n);
        return;
    }
#endif
    v = ampi_open(y, yt, at, n, tile);
    ampi_row_affine_plain(v, tile, a, b, c, ampi_padded(n));
    ampi_close(y, yt, at, n, v);
}

/* tile = exp(x - max) for elements [at, at+n), whose sums by lanes are added to acc. */
AMPI_FN void ampi_row_exp(const void* x, amp_dtype t, size_t at, size_t n, float max, float* tile, double* acc) {
    ampi_part v = ampi_part_of(x, t, at, n, ampi_typed_both(t, t), tile);
#if AMPI_X86
    if (ampi_simd() >= AMP_ISA_AVX2) { AMPI_BY_HAND(ampi_row_exp, tile, acc, v, max); return; }
#endif
    ampi_row_exp_plain(tile, (const float*)v.data, max, ampi_padded(n));
    ampi_lane_sum_plain(acc, tile, n);
}
/* The sum of exp(x - max) over a row, and max, its maximum. A row that fits leaves its terms in `tile`. */
AMPI_FN float ampi_row_measure(const void* x, amp_dtype t, size_t start, size_t d, float* max, float* tile) {
    double acc[AMPI_LANES];
    size_t i;
    *max = ampi_float(0xff800000u);
#if AMPI_X86
    if (ampi_simd() >= AMP_ISA_AVX2) {
        float sum;
        AMPI_BY_HAND(ampi_row_measure, t, (const char*)x + start * amp_dtype_size(t), d, max, &sum, tile);
        return sum;
    }
#endif
    memset(acc, 0, sizeof acc);
    for (i = 0; i < d; i += AMPI_TILE) {
        size_t n = ampi_tile_size(d, i);
        ampi_row_max_plain(max, ampi_view(x, t, start + i, n, tile), (uint32_t)n);
    }
    for (i = 0; i < d; i += AMPI_TILE) ampi_row_exp(x, t, start + i, ampi_tile_size(d, i), *max, tile, acc);
    return (float)ampi_lane_total(acc);
}

AMP_DEF amp_result amp_softmax_forward(const void* x, amp_dtype x_dtype, void* y, amp_dtype y_dtype,
                                       size_t rows, size_t d, const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, x_dtype, 0 }, { "y", y, y_dtype, 0 } };
    int64_t row;
    amp_result r = AMPI_CHECK(exec, "softmax", ampi_area(rows, d), list);
    if (r != AMP_OK || d == 0) return r;
    AMPI_PARALLEL_FOR(rows * d >= AMPI_PARALLEL_MIN)
    for (row = 0; row < (int64_t)rows; row++) {
        float tile[AMPI_TILE];
        double unused[AMPI_LANES] = { 0 };
        size_t start = (size_t)row * d, i, n;
        float max, inverse = 1.0f / ampi_row_measure(x, x_dtype, start, d, &max, tile);
        for (i = 0; i < d; i += n) {
            n = ampi_tile_size(d, i);
            if (d > AMPI_TILE) ampi_row_exp(x, x_dtype, start + i, n, max, tile, unused);
            ampi_row_affine(y, y_dtype, start + i, tile, inverse, 0.0f, 1.0f, n);
        }
    }
    return AMP_OK;
}

/* dx = y * (dy - sum(dy * y)). */
AMPI_INLINE void ampi_softmax_dx_plain_body(int hw, float* dx, const float* dy, const float* y, float sum,
                                            size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) v[l] = y[i + l] * (dy[i + l] - sum);
        memcpy(dx + i, v, sizeof v);
    }
}
AMPI_KERNEL_AVX2(ampi_softmax_dx_plain, (float* dx, const float* dy, const float* y, float sum, size_t n), dx, dy, y,
                 sum, n)

#if AMPI_X86
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_softmax_dx_x16(amp_dtype t, size_t i, __mmask16 m, void* dx, const void* dy,
                                                        const void* y, __m512 sum) {
    const __m512 g = _mm512_sub_ps(ampi_get_x16(t, dy, i, m), sum);
    ampi_put_x16(t, dx, i, m, _mm512_mul_ps(ampi_get_x16(t, y, i, m), g));
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_softmax_dx_typed(amp_dtype t, void* dx, const void* dy, const void* y,
                                                          float sum, size_t n) {
    const __m512 s = _mm512_set1_ps(sum);
    AMPI_EACH_X16(ampi_softmax_dx_x16, t, n, dx, dy, y, s);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_softmax_dx_avx512(void* dx, ampi_part dy, ampi_part y, float sum) {
    AMPI_FOR_TYPE(ampi_softmax_dx_typed, y.t, dx, dy.data, y.data, sum, y.n);
}
AMPI_TARGET_AVX2 AMPI_INLINE void ampi_softmax_dx_x8(amp_dtype t, size_t i, size_t m, int upper, void* dx,
                                                     const void* dy, const void* y, __m256 sum) {
    const __m256 g = _mm256_sub_ps(ampi_read8_avx2(dy, t, i, m), sum);
    ampi_put_x8(t, dx, i, m, upper, _mm256_mul_ps(ampi_read8_avx2(y, t, i, m), g));
}
AMPI_TARGET_AVX2 AMPI_FN void ampi_softmax_dx_avx2(void* dx, ampi_part dy, ampi_part y, float sum) {
    const __m256 s = _mm256_set1_ps(sum);
    AMPI_ALL_X8(ampi_softmax_dx_x8, y.t, y.n, dx, dy.data, y.data, s);
}
#endif

/* Elements [at, at+n) of a row. */
AMPI_FN void ampi_softmax_dx(const void* dy, amp_dtype dyt, const void* y, amp_dtype yt, void* dx, amp_dtype dxt,
                             size_t at, size_t n, float sum) {
    float g_tile[AMPI_TILE], y_tile[AMPI_TILE], *v;
#if AMPI_X86
    if (ampi_typed_both(dyt, yt) && ampi_typed_both(dxt, yt)) {
        AMPI_BY_HAND(ampi_softmax_dx, (char*)dx + at * amp_dtype_size(dxt), ampi_part_of(dy, dyt, at, n, 1, NULL),
                     ampi_part_of(y, yt, at, n, 1, NULL), sum);
        return;
    }
#endif
    v = ampi_open(dx, dxt, at, n, g_tile);
    ampi_softmax_dx_plain(v, ampi_view(dy, dyt, at, n, g_tile), ampi_view(y, yt, at, n, y_tile), sum, ampi_padded(n));
    ampi_close(dx, dxt, at, n, v);
}

AMP_DEF amp_result amp_softmax_backward(const void* dy, amp_dtype dy_dtype, const void* y,
                                        amp_dtype y_dtype, void* dx, amp_dtype dx_dtype, size_t rows,
                                        size_t d, const amp_exec* exec) {
    const ampi_argument list[] = { { "dy", dy, dy_dtype, 0 },
                                   { "y", y, y_dtype, 0 },
                                   { "dx", dx, dx_dtype, 1 } };
    const int typed = ampi_typed_both(dy_dtype, y_dtype);
    int64_t row;
    amp_result r = AMPI_CHECK(exec, "softmax backward", ampi_area(rows, d), list);
    if (r != AMP_OK || !dx || d == 0) return r;
    AMPI_PARALLEL_FOR(rows * d >= AMPI_PARALLEL_MIN)
    for (row = 0; row < (int64_t)rows; row++) {
        float g_tile[AMPI_TILE], y_tile[AMPI_TILE], zero[AMPI_LANES], sum;
        double unused[AMPI_LANES], dot[AMPI_LANES];
        size_t start = (size_t)row * d, i, n;
        memset(zero, 0, sizeof zero);
        memset(unused, 0, sizeof unused);
        memset(dot, 0, sizeof dot);
        for (i = 0; i < d; i += n) {
            ampi_part g = ampi_part_of(dy, dy_dtype, start + i, ampi_tile_size(d, i), typed, g_tile);
            n = g.n;
            ampi_lane_dot(unused, dot, g, ampi_part_of(y, y_dtype, start + i, n, typed, y_tile), zero);
        }
        sum = (float)ampi_lane_total(dot);
        for (i = 0; i < d; i += n) {
            n = ampi_tile_size(d, i);
            ampi_softmax_dx(dy, dy_dtype, y, y_dtype, dx, dx_dtype, start + i, n, sum);
        }
    }
    return AMP_OK;
}

/* --- dropout, sum, concat ---------------------------------------------------------------- */

/* Random words of positions [4*counter, 4*counter + 4*LANES): one Philox block per lane, as ampi_philox;
   behind the last counter, 2^62 - 1, comes 0. The rounds are written out so that the lanes stay in
   registers. */
#define AMPI_PHILOX_ROUND(r)                                                                        \
    for (l = 0; l < AMPI_LANES; l++) {                                                              \
        uint64_t a = (uint64_t)x0[l] * 0xD2511F53u, b = (uint64_t)x2[l] * 0xCD9E8D57u;              \
        x0[l] = (uint32_t)(b >> 32) ^ x1[l] ^ (k0 + (r) * 0x9E3779B9u);                             \
        x1[l] = (uint32_t)b;                                                                        \
        x2[l] = (uint32_t)(a >> 32) ^ x3[l] ^ (k1 + (r) * 0xBB67AE85u);                             \
        x3[l] = (uint32_t)a;                                                                        \
    }
AMPI_INLINE void ampi_philox_lanes(uint64_t seed, uint64_t counter, uint32_t* out) {
    uint32_t x0[AMPI_LANES], x1[AMPI_LANES], x2[AMPI_LANES], x3[AMPI_LANES];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    size_t l;
    for (l = 0; l < AMPI_LANES; l++) {
        x0[l] = (uint32_t)(counter + l);
        x1[l] = (uint32_t)((counter + l) >> 32) & 0x3fffffffu;
        x2[l] = x3[l] = 0;
    }
    AMPI_PHILOX_ROUND(0u)
    AMPI_PHILOX_ROUND(1u) AMPI_PHILOX_ROUND(2u) AMPI_PHILOX_ROUND(3u) AMPI_PHILOX_ROUND(4u)
        AMPI_PHILOX_ROUND(5u) AMPI_PHILOX_ROUND(6u) AMPI_PHILOX_ROUND(7u) AMPI_PHILOX_ROUND(8u)
            AMPI_PHILOX_ROUND(9u) for (l = 0; l < AMPI_LANES; l++) {
        out[4 * l] = x0[l]; out[4 * l + 1] = x1[l]; out[4 * l + 2] = x2[l]; out[4 * l + 3] = x3[l];
    }
}
/* bits[i] = amp_random_bits(seed, index + i) for n positions, n a multiple of 64 and index of 4. */
AMPI_INLINE void ampi_random_fill_body(int hw, uint32_t* bits, uint64_t seed, uint64_t index, size_t n) {
    size_t i;
    (void)hw;
    for (i = 0; i < n; i += 4 * AMPI_LANES) ampi_philox_lanes(seed, (index + i) >> 2, bits + i);
}
AMPI_KERNEL(ampi_random_fill, (uint32_t* bits, uint64_t seed, uint64_t index, size_t n), bits, seed, index, n)

/* y = 0 where the random number is below p, else x * scale. y may be x. */
AMPI_INLINE void ampi_drop_body(int hw, float* y, const float* x, const uint32_t* bits, float p,
                                float scale, size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) {
            float u = (float)(int32_t)(bits[i + l] >> 8) * (1.0f / 16777216.0f);
            v[l] = ampi_float(ampi_bits(x[i + l] * scale) & ~ampi_mask(u < p));
        }
        memcpy(y + i, v, sizeof v);
    }
}
AMPI_KERNEL(ampi_drop, (float* y, const float* x, const uint32_t* bits, float p, float scale, size_t n),
            y, x, bits, p, scale, n)

AMP_DEF amp_result amp_dropout_forward(const void* x, amp_dtype x_dtype, void* y, amp_dtype y_dtype,
                                       size_t n, float p, uint64_t seed, uint64_t offset,
                                       const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, x_dtype, 0 }, { "y", y, y_dtype, 0 } };
    int64_t i;
    amp_result r = AMPI_CHECK(exec, "dropout", n, list);
    if (r != AMP_OK) return r;
    if (!(p >= 0.0f && p < 1.0f))
        return ampi_fail(ampi_exec_logger(exec), AMP_ERR_DESC, "dropout: probability %g is outside [0,1)",
                         (double)p);
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < ampi_tiles(n); i++) {
        float x_tile[AMPI_TILE], y_tile[AMPI_TILE];
        uint32_t bits[AMPI_TILE + 4 * AMPI_LANES];
        size_t start = (size_t)i * AMPI_TILE, count = ampi_tile_size(n, start),
               skip = (size_t)((offset + start) & 3u);
        size_t wanted =
            (skip + ampi_padded(count) + 4 * AMPI_LANES - 1) / (4 * AMPI_LANES) * (4 * AMPI_LANES);
        float* v = ampi_open(y, y_dtype, start, count, y_tile);
        ampi_random_fill(bits, seed, offset + start - skip, wanted);
        ampi_drop(v, ampi_view(x, x_dtype, start, count, x_tile), bits + skip, p, 1.0f / (1.0f - p),
                  ampi_padded(count));
        ampi_close(y, y_dtype, start, count, v);
    }
    return AMP_OK;
}

/* y = a + b; y may be a or b. */
AMPI_INLINE void ampi_sum_body(int hw, float* y, const float* a, const float* b, size_t n) {
    size_t i, l;
    (void)hw;
    for (i = 0; i < n; i += AMPI_LANES) {
        float v[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) v[l] = a[i + l] + b[i + l];
        memcpy(y + i, v, sizeof v);
    }
}
AMPI_KERNEL(ampi_sum, (float* y, const float* a, const float* b, size_t n), y, a, b, n)

/* One tile of y[y_start...] = a[a_start...] + b[b_start...]. */
AMPI_FN void ampi_sum_tile(const void* a, amp_dtype at, size_t a_start, const void* b, amp_dtype bt,
                           size_t b_start, void* y, amp_dtype yt, size_t y_start, size_t n) {
    float a_tile[AMPI_TILE], b_tile[AMPI_TILE];
    float* v = ampi_open(y, yt, y_start, n, a_tile);
    ampi_sum(v, ampi_view(a, at, a_start, n, a_tile), ampi_view(b, bt, b_start, n, b_tile), ampi_padded(n));
    ampi_close(y, yt, y_start, n, v);
}

AMP_DEF amp_result amp_add_forward(const void* a, amp_dtype a_dtype, const void* b, amp_dtype b_dtype,
                                   void* y, amp_dtype y_dtype, size_t n, const amp_exec* exec) {
    const ampi_argument list[] = { { "a", a, a_dtype, 0 }, { "b", b, b_dtype, 0 }, { "y", y, y_dtype, 0 } };
    int64_t i;
    amp_result r = AMPI_CHECK(exec, "add", n, list);
    if (r != AMP_OK) return r;
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < ampi_tiles(n); i++) {
        size_t start = (size_t)i * AMPI_TILE;
        ampi_sum_tile(a, a_dtype, start, b, b_dtype, start, y, y_dtype, start, ampi_tile_size(n, start));
    }
    return AMP_OK;
}

/* dst[to...] = src[from...], n elements; equal types are copied as they are. */
AMPI_FN void ampi_copy_elements(void* dst, amp_dtype dt, size_t to, const void* src, amp_dtype st,
                                size_t from, size_t n) {
    float tile[AMPI_TILE];
    size_t size = amp_dtype_size(dt), i, count;
    if (ampi_dtype(dt) == ampi_dtype(st)) {
        memcpy((char*)dst + to * size, (const char*)src + from * size, n * size);
        return;
    }
    for (i = 0; i < n; i += count) {
        count = ampi_tile_size(n, i);
        ampi_load_f32(tile, src, st, from + i, count);
        ampi_store_f32(dst, dt, to + i, tile, count);
    }
}

AMPI_FN amp_result ampi_check_columns(const amp_exec* exec, const char* op, size_t d, size_t d_total,
                                      size_t column) {
    if (d <= d_total && column <= d_total - d) return AMP_OK;
    return ampi_fail(ampi_exec_logger(exec), AMP_ERR_SHAPE, "%s: columns %.0f..%.0f+%.0f do not fit in %.0f",
                     op, (double)column, (double)column, (double)d, (double)d_total);
}

AMP_DEF amp_result amp_concat_forward(const void* x, amp_dtype x_dtype, size_t d, void* y,
                                      amp_dtype y_dtype, size_t d_total, size_t column, size_t rows,
                                      const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, x_dtype, d == 0 }, { "y", y, y_dtype, d == 0 } };
    int64_t i;
    amp_result r = AMPI_CHECK(exec, "concat", ampi_area(rows, d_total), list);
    if (r != AMP_OK || (r = ampi_check_columns(exec, "concat", d, d_total, column)) != AMP_OK || d == 0)
        return r;
    AMPI_PARALLEL_FOR(rows * d >= AMPI_PARALLEL_MIN)
    for (i = 0; i < (int64_t)rows; i++)
        ampi_copy_elements(y, y_dtype, (size_t)i * d_total + column, x, x_dtype, (size_t)i * d, d);
    return AMP_OK;
}

AMP_DEF amp_result amp_concat_backward(const void* y, amp_dtype y_dtype, size_t d_total, size_t column,
                                       void* x, amp_dtype x_dtype, size_t d, size_t rows, int accumulate,
                                       const amp_exec* exec) {
    const ampi_argument list[] = { { "y", y, y_dtype, d == 0 }, { "x", x, x_dtype, d == 0 } };
    int64_t row;
    amp_result r = AMPI_CHECK(exec, "uncat", ampi_area(rows, d_total), list);
    if (r != AMP_OK || (r = ampi_check_columns(exec, "uncat", d, d_total, column)) != AMP_OK || d == 0)
        return r;
    AMPI_PARALLEL_FOR(rows * d >= AMPI_PARALLEL_MIN)
    for (row = 0; row < (int64_t)rows; row++) {
        size_t from = (size_t)row * d_total + column, to = (size_t)row * d, i;
        if (!accumulate) ampi_copy_elements(x, x_dtype, to, y, y_dtype, from, d);
        for (i = 0; accumulate && i < d; i += AMPI_TILE)
            ampi_sum_tile(x, x_dtype, to + i, y, y_dtype, from + i, x, x_dtype, to + i, ampi_tile_size(d, i));
    }
    return AMP_OK;
}

/* --- losses ------------------------------------------------------------------------------ */

/* (*loss_scale) * weight / n, the factor of every loss gradient. */
AMPI_HD AMPI_FN float ampi_loss_factor(const float* loss_scale, float weight, size_t n) {
    double scale = loss_scale ? (double)*loss_scale : 1.0;
    return (float)(scale * (double)weight / (double)n);
}

AMPI_FN amp_result ampi_check_labels(const amp_exec* exec, const int32_t* labels, float smoothing, size_t n,
                                     size_t classes) {
    const amp_logger* log = ampi_exec_logger(exec);
    size_t i;
    if (n < 1 || classes < 1 || classes > INT32_MAX)
        return ampi_fail(log, AMP_ERR_SHAPE,
                         "softmax cross-entropy: %.0f rows of %.0f classes need sizes of 1 to 2^31-1", (double)n,
                         (double)classes);
    if (!(smoothing >= 0.0f && smoothing < 1.0f))
        return ampi_fail(log, AMP_ERR_DESC, "softmax cross-entropy: smoothing %g is outside [0,1)",
                         (double)smoothing);
    if (!labels) return ampi_fail(log, AMP_ERR_ARGUMENT, "softmax cross-entropy: labels is NULL");
    for (i = 0; i < n; i++)
        if (labels[i] < 0 || (size_t)labels[i] >= classes)
            return ampi_fail(log, AMP_ERR_ARGUMENT,
                             "softmax cross-entropy: label %ld at row %.0f is outside 0..%.0f",
                             (long)labels[i], (double)i, (double)(classes - 1));
    return AMP_OK;
}

/* *v = log(*v) + a * b, and *v += a * b. */
AMPI_INLINE void ampi_log_one_body(int hw, float* v, float a, float b) { *v = ampi_fma(hw, a, b, ampi_log(hw, *v)); }
AMPI_KERNEL(ampi_log_one, (float* v, float a, float b), v, a, b)
AMPI_INLINE void ampi_fma_one_body(int hw, float* v, float a, float b) { *v = ampi_fma(hw, a, b, *v); }
AMPI_KERNEL(ampi_fma_one, (float* v, float a, float b), v, a, b)

/* One row: log(sum(exp(z))) - (1-smoothing) * z[label] - smoothing * mean(z), z = x - max. */
AMPI_FN float ampi_cross_entropy_row(const void* x, amp_dtype t, size_t start, size_t k, size_t label,
                                     float smoothing) {
    float tile[AMPI_TILE], max, loss = ampi_row_measure(x, t, start, k, &max, tile);
    float z = ampi_load_one(x, t, start + label, 0.0f);
    ampi_log_one(&loss, smoothing - 1.0f, z - max);
    if (smoothing > 0.0f) {
        double acc[AMPI_LANES];
        size_t i, n;
        memset(acc, 0, sizeof acc);
        for (i = 0; i < k; i += n) {
            n = ampi_tile_size(k, i);
            ampi_lane_sum(acc, ampi_part_of(x, t, start + i, n, ampi_typed_both(t, t), tile));
        }
        z = (float)(ampi_lane_total(acc) / (double)k - (double)max);
        ampi_fma_one(&loss, -smoothing, z);
    }
    return loss;
}

AMP_DEF amp_result amp_softmax_cross_entropy_forward(const void* logits, amp_dtype logits_dtype,
                                                     const int32_t* labels, float smoothing, float* loss,
                                                     size_t n, size_t classes, const amp_exec* exec) {
    const ampi_argument list[] = { { "logits", logits, logits_dtype, 0 }, { "loss", loss, AMP_F32, 0 } };
    double parts[AMPI_PARTS];
    int64_t i;
    amp_result r = AMPI_CHECK(exec, "softmax cross-entropy", ampi_area(n, classes), list);
    if (r != AMP_OK || (r = ampi_check_labels(exec, labels, smoothing, n, classes)) != AMP_OK) return r;
    AMPI_PARALLEL_FOR(n * classes >= AMPI_PARALLEL_MIN)
    for (i = 0; i < AMPI_PARTS; i++) {
        double sum = 0.0;
        size_t row, end = ampi_part_start(n, i + 1);
        for (row = ampi_part_start(n, i); row < end; row++)
            sum += (double)ampi_cross_entropy_row(logits, logits_dtype, row * classes, classes,
                                                  (size_t)labels[row], smoothing);
        parts[i] = sum;
    }
    *loss = (float)(ampi_parts_total(parts) / (double)n);
    return AMP_OK;
}

/* dlogits = (softmax - target) * factor for one row. */
AMPI_FN void ampi_cross_entropy_row_backward(const void* x, amp_dtype t, size_t start, size_t k, size_t label,
                                             float smoothing, float factor, void* dx, amp_dtype dxt) {
    float tile[AMPI_TILE], max, inverse = 1.0f / ampi_row_measure(x, t, start, k, &max, tile);
    float base = smoothing / (float)k, target = (smoothing - 1.0f) - base;
    double unused[AMPI_LANES] = { 0 };
    size_t i, n;
    for (i = 0; i < k; i += n) {
        n = ampi_tile_size(k, i);
        if (k > AMPI_TILE) ampi_row_exp(x, t, start + i, n, max, tile, unused);
        if (label - i < n) ampi_fma_one(&target, tile[label - i], inverse);
        ampi_row_affine(dx, dxt, start + i, tile, inverse, base, factor, n);
    }
    target *= factor;
    ampi_store_f32(dx, dxt, start + label, &target, 1);
}

AMP_DEF amp_result amp_softmax_cross_entropy_backward(const void* logits, amp_dtype logits_dtype,
                                                      const int32_t* labels, float smoothing,
                                                      const float* loss_scale, float weight, void* dlogits,
                                                      amp_dtype dlogits_dtype, size_t n, size_t classes,
                                                      const amp_exec* exec) {
    const ampi_argument list[] = { { "logits", logits, logits_dtype, 0 },
                                   { "dlogits", dlogits, dlogits_dtype, 1 } };
    float factor;
    int64_t i;
    amp_result r = AMPI_CHECK(exec, "softmax cross-entropy backward", ampi_area(n, classes), list);
    if (r != AMP_OK || (r = ampi_check_labels(exec, labels, smoothing, n, classes)) != AMP_OK) return r;
    if (!dlogits) return AMP_OK;
    factor = ampi_loss_factor(loss_scale, weight, n);
    AMPI_PARALLEL_FOR(n * classes >= AMPI_PARALLEL_MIN)
    for (i = 0; i < (int64_t)n; i++)
        ampi_cross_entropy_row_backward(logits, logits_dtype, (size_t)i * classes, classes,
                                        (size_t)labels[i], smoothing, factor, dlogits, dlogits_dtype);
    return AMP_OK;
}

/* The two losses that are a mean over single elements: the terms of each, and the slopes. */
typedef enum ampi_loss { AMPI_MSE, AMPI_BCE } ampi_loss;

/* max(x,0) - x*t + log(1 + exp(-|x|)). */
AMPI_HD AMPI_INLINE float ampi_bce_term(int hw, float x, float target) {
    return ampi_fma(hw, -x, target, ampi_relu(x)) + ampi_log1p(hw, ampi_exp(hw, -ampi_abs(x)));
}
/* v = terms whose sum is the loss: x - target (to be squared in double), or the cross-entropy. */
AMPI_INLINE void ampi_loss_terms_body(int hw, ampi_loss kind, float* v, const float* x, const float* target,
                                      size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES) {
        float w[AMPI_LANES];
        if (kind == AMPI_MSE) for (l = 0; l < AMPI_LANES; l++) w[l] = x[i + l] - target[i + l];
        else
            for (l = 0; l < AMPI_LANES; l++) w[l] = ampi_bce_term(hw, x[i + l], target[i + l]);
        memcpy(v + i, w, sizeof w);
    }
}
AMPI_KERNEL(ampi_loss_terms, (ampi_loss kind, float* v, const float* x, const float* target, size_t n),
            kind, v, x, target, n)

/* v = (x - target) * factor, or (sigmoid(x) - target) * factor. */
AMPI_INLINE void ampi_loss_slope_body(int hw, ampi_loss kind, float* v, const float* x, const float* target,
                                      float factor, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES) {
        float w[AMPI_LANES];
        if (kind == AMPI_MSE) for (l = 0; l < AMPI_LANES; l++) w[l] = (x[i + l] - target[i + l]) * factor;
        else for (l = 0; l < AMPI_LANES; l++) w[l] = (ampi_sigmoid(hw, x[i + l]) - target[i + l]) * factor;
        memcpy(v + i, w, sizeof w);
    }
}
AMPI_KERNEL(ampi_loss_slope,
            (ampi_loss kind, float* v, const float* x, const float* target, float factor, size_t n), kind,
            v, x, target, factor, n)

AMPI_FN amp_result ampi_loss_forward(ampi_loss kind, const char* op, const void* x, amp_dtype xt,
                                     const void* target, amp_dtype tt, float* loss, size_t n,
                                     const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, xt, 0 },
                                   { "target", target, tt, 0 },
                                   { "loss", loss, AMP_F32, 0 } };
    double parts[AMPI_PARTS];
    float zero[AMPI_LANES];
    size_t tiles = (size_t)ampi_tiles(n);
    int64_t part;
    amp_result r = AMPI_CHECK(exec, op, n, list);
    if (r != AMP_OK) return r;
    if (n == 0)
        return ampi_fail(ampi_exec_logger(exec), AMP_ERR_SHAPE,
                         "%s: the mean of no elements is not defined", op);
    memset(zero, 0, sizeof zero);
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (part = 0; part < AMPI_PARTS; part++) {
        float tile[AMPI_TILE], x_tile[AMPI_TILE], t_tile[AMPI_TILE];
        double acc[AMPI_LANES], unused[AMPI_LANES];
        ampi_part terms;
        size_t i, end = ampi_part_start(tiles, part + 1);
        memset(acc, 0, sizeof acc);
        memset(unused, 0, sizeof unused);
        for (i = ampi_part_start(tiles, part); i < end; i++) {
            size_t start = i * AMPI_TILE, count = ampi_tile_size(n, start);
            ampi_loss_terms(kind, tile, ampi_view(x, xt, start, count, x_tile),
                            ampi_view(target, tt, start, count, t_tile), ampi_padded(count));
            terms = ampi_part_of(tile, AMP_F32, 0, count, 1, NULL);
            if (kind == AMPI_MSE) ampi_lane_dot(unused, acc, terms, terms, zero);
            else                  ampi_lane_sum(acc, terms);
        }
        parts[part] = ampi_lane_total(acc);
    }
    *loss = (float)(ampi_parts_total(parts) / (double)n);
    return AMP_OK;
}

AMPI_FN amp_result ampi_loss_backward(ampi_loss kind, const char* op, const void* x, amp_dtype xt,
                                      const void* target, amp_dtype tt, const float* loss_scale,
                                      float weight, void* dx, amp_dtype dxt, size_t n, const amp_exec* exec) {
    const ampi_argument list[] = { { "x", x, xt, 0 }, { "target", target, tt, 0 }, { "dx", dx, dxt, 1 } };
    float factor;
    int64_t i;
    amp_result r = AMPI_CHECK(exec, op, n, list);
    if (r != AMP_OK) return r;
    if (n == 0)
        return ampi_fail(ampi_exec_logger(exec), AMP_ERR_SHAPE,
                         "%s: the mean of no elements is not defined", op);
    if (!dx) return AMP_OK;
    factor = ampi_loss_factor(loss_scale, weight, n);
    if (kind == AMPI_MSE) factor *= 2.0f;
    AMPI_PARALLEL_FOR(n >= AMPI_PARALLEL_MIN)
    for (i = 0; i < ampi_tiles(n); i++) {
        float x_tile[AMPI_TILE], t_tile[AMPI_TILE];
        size_t start = (size_t)i * AMPI_TILE, count = ampi_tile_size(n, start);
        float* v = ampi_open(dx, dxt, start, count, x_tile);
        ampi_loss_slope(kind, v, ampi_view(x, xt, start, count, x_tile),
                        ampi_view(target, tt, start, count, t_tile), factor, ampi_padded(count));
        ampi_close(dx, dxt, start, count, v);
    }
    return AMP_OK;
}

AMP_DEF amp_result amp_mse_forward(const void* x, amp_dtype x_dtype, const void* target,
                                   amp_dtype target_dtype, float* loss, size_t n, const amp_exec* exec) {
    return ampi_loss_forward(AMPI_MSE, "mse", x, x_dtype, target, target_dtype, loss, n, exec);
}
AMP_DEF amp_result amp_mse_backward(const void* x, amp_dtype x_dtype, const void* target,
                                    amp_dtype target_dtype, const float* loss_scale, float weight, void* dx,
                                    amp_dtype dx_dtype, size_t n, const amp_exec* exec) {
    return ampi_loss_backward(AMPI_MSE, "mse backward", x, x_dtype, target, target_dtype,
                              loss_scale, weight, dx, dx_dtype, n, exec);
}
AMP_DEF amp_result amp_bce_with_logits_forward(const void* x, amp_dtype x_dtype, const void* target,
                                               amp_dtype target_dtype, float* loss, size_t n,
                                               const amp_exec* exec) {
    return ampi_loss_forward(AMPI_BCE, "bce with logits", x, x_dtype, target, target_dtype, loss, n, exec);
}
AMP_DEF amp_result amp_bce_with_logits_backward(const void* x, amp_dtype x_dtype, const void* target,
                                                amp_dtype target_dtype, const float* loss_scale,
                                                float weight, void* dx, amp_dtype dx_dtype, size_t n,
                                                const amp_exec* exec) {
    return ampi_loss_backward(AMPI_BCE, "bce with logits backward", x, x_dtype, target, target_dtype,
                              loss_scale, weight, dx, dx_dtype, n, exec);
}

/* ======================================================================================== */
/* >>impl-policy                                                                              */
/* ======================================================================================== */

AMP_DEF const char* amp_op_name(amp_op op) {
    switch (op) {
#define AMPI_X(name, text, o1, o2) case AMP_OP_##name: return text;
        AMP_OP_LIST(AMPI_X)
#undef AMPI_X
        case AMP_OP_COUNT: case AMPI_OP_MAX: break;
    }
    return "?";
}

AMP_DEF int amp_op_from_name(const char* name, amp_op* op) {
    int i;
    for (i = 0; name && op && i < AMP_OP_COUNT; i++)
        if (strcmp(name, amp_op_name((amp_op)i)) == 0) { *op = (amp_op)i; return 1; }
    return 0;
}

AMP_DEF const char* amp_rule_name(amp_rule rule) {
    switch (rule) {
        case AMP_RULE_LOW: return "LOW";
        case AMP_RULE_FP32: return "FP32";
        case AMP_RULE_PROMOTE: return "PROMOTE";
        case AMP_RULE_FOLLOW: return "FOLLOW";
        case AMPI_RULE_MAX: break;
    }
    return "?";
}

AMP_DEF const char* amp_level_name(amp_level level) {
    switch (level) {
        case AMP_O0: return "O0";
        case AMP_O1: return "O1";
        case AMP_O2: return "O2";
        case AMP_O3: return "O3";
        case AMPI_LEVEL_MAX: break;
    }
    return "?";
}

AMP_DEF const char* amp_reason_name(amp_reason reason) {
    switch (reason) {
        case AMP_REASON_LEVEL: return "level list";
        case AMP_REASON_WHITE: return "white list";
        case AMP_REASON_BLACK: return "black list";
        case AMP_REASON_RULE: return "set by hand";
        case AMP_REASON_KEEP_BN: return "keep_batchnorm_fp32";
        case AMP_REASON_REGION: return "region";
        case AMP_REASON_PIN: return "pinned";
        case AMPI_REASON_MAX: break;
    }
    return "?";
}

AMPI_FN int ampi_op_is_valid(amp_op op) { return (int)op >= 0 && (int)op < AMP_OP_COUNT; }
AMPI_FN int ampi_op_is_loss(amp_op op) {
    return op == AMP_OP_SOFTMAX_CROSS_ENTROPY || op == AMP_OP_MSE || op == AMP_OP_BCE_WITH_LOGITS;
}
/* These two only pass their input's type on: no rule of a list applies to them. */
AMPI_FN int ampi_op_is_transparent(amp_op op) { return op == AMP_OP_INPUT || op == AMP_OP_FLATTEN; }

AMPI_FN amp_rule ampi_level_rule(amp_level level, amp_op op) {
    static const amp_rule o1[] = {
#define AMPI_X(name, text, o1_rule, o2_rule) AMP_RULE_##o1_rule,
        AMP_OP_LIST(AMPI_X)
#undef AMPI_X
    };
    static const amp_rule o2[] = {
#define AMPI_X(name, text, o1_rule, o2_rule) AMP_RULE_##o2_rule,
        AMP_OP_LIST(AMPI_X)
#undef AMPI_X
    };
    if (ampi_op_is_transparent(op)) return AMP_RULE_FOLLOW;
    if (level == AMP_O0 || ampi_op_is_loss(op)) return AMP_RULE_FP32;
    if (level == AMP_O3) return AMP_RULE_LOW;
    return level == AMP_O1 ? o1[op] : o2[op];
}

/* What the levels allow: O1 keeps the model in FP32 and casts per operator, so it has no cast model, no
   choice about batch norm and no choice about masters (Apex refuses the same three); O0 has nothing to
   choose at all. */
AMPI_FN amp_result ampi_policy_check_desc(const amp_policy_desc* d) {
    const char* level = amp_level_name(d->level);
    if ((int)d->level < AMP_O0 || (int)d->level > AMP_O3)
        return ampi_fail(d->logger, AMP_ERR_POLICY, "policy: level %d does not exist (O0 to O3)",
                         (int)d->level);
    if (d->low_dtype != AMP_DTYPE_DEFAULT && d->low_dtype != AMP_F16 && d->low_dtype != AMP_BF16)
        return ampi_fail(d->logger, AMP_ERR_POLICY, "policy: low_dtype must be f16 or bf16, not %s",
                         amp_dtype_name(d->low_dtype));
    if ((int)d->style < AMP_STYLE_PYTORCH || (int)d->style > AMP_STYLE_MINDSPORE)
        return ampi_fail(d->logger, AMP_ERR_POLICY, "policy: style %d does not exist", (int)d->style);
    if (d->style != AMP_STYLE_PYTORCH && d->level != AMP_O1)
        return ampi_fail(d->logger, AMP_ERR_POLICY, "policy: style belongs to O1; %s has one style only",
                         level);
    if (d->level <= AMP_O1 && d->cast_model == 1)
        return ampi_fail(d->logger, AMP_ERR_POLICY,
                         "policy: %s keeps the model in FP32, cast_model needs O2 or O3", level);
    if (d->level <= AMP_O1 && d->keep_batchnorm_fp32 != 0)
        return ampi_fail(d->logger, AMP_ERR_POLICY,
                         "policy: keep_batchnorm_fp32 needs O2 or O3; %s does not cast the model", level);
    if (d->level <= AMP_O1 && d->master_weights != 0)
        return ampi_fail(d->logger, AMP_ERR_POLICY,
                         "policy: master_weights needs O2 or O3; the weights of %s are FP32 already",
                         level);
    if (d->level >= AMP_O2 && d->cast_model == AMP_ZERO)
        return ampi_fail(d->logger, AMP_ERR_POLICY,
                         "policy: %s casts the model; for FP32 weights cast per operator take O1", level);
    if (d->keep_batchnorm_fp32 < AMP_ZERO || d->keep_batchnorm_fp32 > 1 || d->master_weights < AMP_ZERO
        || d->master_weights > 1 || d->cast_model < AMP_ZERO || d->cast_model > 1)
        return ampi_fail(
            d->logger, AMP_ERR_POLICY,
            "policy: cast_model, keep_batchnorm_fp32 and master_weights take 0, 1 or AMP_ZERO");
    return AMP_OK;
}

AMPI_FN amp_result ampi_policy_check_lists(const amp_policy_desc* d) {
    int i;
    if (d->white_count < 0 || d->black_count < 0 || (d->white_count && !d->white)
        || (d->black_count && !d->black))
        return ampi_fail(d->logger, AMP_ERR_POLICY,
                         "policy: a list has a count but no entries, or a count below 0");
    if (d->level == AMP_O0 && (d->white_count || d->black_count))
        return ampi_fail(d->logger, AMP_ERR_POLICY, "policy: O0 runs everything in FP32, it takes no lists");
    if (d->white_count && d->black_count)
        return ampi_fail(d->logger, AMP_ERR_POLICY,
                         "policy: give a white or a black list, not both; for more take amp_policy_set_rule");
    for (i = 0; i < d->white_count + d->black_count; i++) {
        amp_op op = i < d->white_count ? d->white[i] : d->black[i - d->white_count];
        if (!ampi_op_is_valid(op) || ampi_op_is_transparent(op))
            return ampi_fail(d->logger, AMP_ERR_POLICY,
                             "policy: entry %d of the lists is not an operator with a type of its own: %d",
                             i, (int)op);
        if (i < d->white_count && ampi_op_is_loss(op))
            return ampi_fail(d->logger, AMP_ERR_POLICY,
                             "policy: %s on the white list: a loss is FP32 at every level",
                             amp_op_name(op));
    }
    return AMP_OK;
}

AMPI_FN void ampi_policy_put(amp_policy* p, amp_op op, amp_rule rule, amp_reason reason) {
    p->rules[op] = rule;
    p->reasons[op] = reason;
}

AMP_DEF amp_result amp_policy_init(amp_policy* p, const amp_policy_desc* desc) {
    amp_policy_desc d;
    amp_policy out;
    amp_result r;
    int i;
    if (!p)
        return ampi_fail(desc ? desc->logger : NULL, AMP_ERR_ARGUMENT,
                         "amp_policy_init: the policy is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if ((r = ampi_policy_check_desc(&d)) != AMP_OK || (r = ampi_policy_check_lists(&d)) != AMP_OK) return r;
    memset(&out, 0, sizeof out);
    out.level = d.level;
    out.low_dtype = d.low_dtype == AMP_DTYPE_DEFAULT ? AMP_F16 : d.low_dtype;
    out.cast_back = d.level == AMP_O1 && d.style == AMP_STYLE_MINDSPORE;
    out.master_weights = d.level == AMP_O3 ? d.master_weights == 1 : d.master_weights != AMP_ZERO;
    for (i = 0; i < AMP_OP_COUNT; i++)
        ampi_policy_put(&out, (amp_op)i, ampi_level_rule(d.level, (amp_op)i), AMP_REASON_LEVEL);
    if (d.keep_batchnorm_fp32 != 0)
        ampi_policy_put(&out, AMP_OP_BATCH_NORM, d.keep_batchnorm_fp32 == 1 ? AMP_RULE_FP32 : AMP_RULE_LOW,
                        AMP_REASON_KEEP_BN);
    for (i = 0; i < d.white_count; i++) ampi_policy_put(&out, d.white[i], AMP_RULE_LOW, AMP_REASON_WHITE);
    for (i = 0; i < d.black_count; i++) ampi_policy_put(&out, d.black[i], AMP_RULE_FP32, AMP_REASON_BLACK);
    *p = out;
    return AMP_OK;
}

/* A policy that the user may have edited: rules that exist, losses in FP32, a 16-bit low type. */
AMPI_FN amp_result ampi_policy_check(const amp_policy* p, const amp_logger* logger) {
    int i;
    if ((int)p->level < AMP_O0 || (int)p->level > AMP_O3)
        return ampi_fail(logger, AMP_ERR_POLICY, "policy: level %d does not exist (O0 to O3)", (int)p->level);
    if (p->low_dtype != AMP_F16 && p->low_dtype != AMP_BF16)
        return ampi_fail(logger, AMP_ERR_POLICY,
                         "policy: low_dtype must be f16 or bf16; start from amp_policy_init");
    for (i = 0; i < AMP_OP_COUNT; i++) {
        amp_op op = (amp_op)i;
        int rule = (int)p->rules[i];
        if (rule < 0 || rule > AMP_RULE_FOLLOW || (ampi_op_is_loss(op) && rule != AMP_RULE_FP32)
            || (ampi_op_is_transparent(op) && rule != AMP_RULE_FOLLOW))
            return ampi_fail(logger, AMP_ERR_POLICY, "policy: %s cannot have the rule %s (%d)",
                             amp_op_name(op), amp_rule_name(p->rules[i]), rule);
    }
    return AMP_OK;
}

AMP_DEF amp_result amp_policy_set_rule(amp_policy* p, amp_op op, amp_rule rule) {
    if (!p) return AMP_ERR_ARGUMENT;
    if (!ampi_op_is_valid(op) || ampi_op_is_transparent(op) || (int)rule < 0 || (int)rule > AMP_RULE_FOLLOW
        || (ampi_op_is_loss(op) && rule != AMP_RULE_FP32)) return AMP_ERR_POLICY;
    ampi_policy_put(p, op, rule, AMP_REASON_RULE);
    return AMP_OK;
}

AMPI_FN int ampi_policy_list(const amp_policy* p, amp_rule rule, amp_op* out, int capacity) {
    int i, count = 0;
    for (i = 0; p && i < AMP_OP_COUNT; i++) {
        if (p->rules[i] != rule) continue;
        if (out && count < capacity) out[count] = (amp_op)i;
        count++;
    }
    return count;
}
AMP_DEF int amp_policy_white_list(const amp_policy* p, amp_op* out, int capacity) {
    return ampi_policy_list(p, AMP_RULE_LOW, out, capacity);
}
AMP_DEF int amp_policy_black_list(const amp_policy* p, amp_op* out, int capacity) {
    return ampi_policy_list(p, AMP_RULE_FP32, out, capacity);
}

/* ======================================================================================== */
/* >>impl-scaler                                                                              */
/* ======================================================================================== */

/* --- presets and validation ----------------------------------------------------------------- */

typedef struct ampi_scaler_row {
    const char* text;
    float init;
    int interval, late, start;
    float growth, backoff, min, max;
    amp_scaler_guard guard;
    int hysteresis;
    amp_scaler_refill refill;
    amp_scaler_limit at_min;
    int max_skips;
} ampi_scaler_row;

/* The row of a preset; NULL for a value that is not one. */
AMPI_FN const ampi_scaler_row* ampi_scaler_preset(amp_scaler_preset p) {
    static const ampi_scaler_row rows[] = {
#define AMPI_X(name, text, init, interval, late, start, growth, backoff, min, max, guard, h, refill, at, n) \
        { text, init, interval, late, start, growth, backoff, min, max, AMP_GUARD_##guard, h,               \
          AMP_REFILL_##refill, AMP_LIMIT_##at, n },
        AMP_SCALER_PRESET_LIST(AMPI_X)
#undef AMPI_X
    };
    return (unsigned)p < (unsigned)AMP_SCALER_PRESET_COUNT ? &rows[p] : NULL;
}

AMP_DEF const char* amp_scaler_preset_name(amp_scaler_preset p) {
    const ampi_scaler_row* row = ampi_scaler_preset(p);
    return row ? row->text : "?";
}

/* Makes the compiler forget what it knows about the memory at p. Without it -ffast-math would conclude that
   computed values are finite and drop the test of their bits. */
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__) && !defined(__CUDA_ARCH__)
  #define AMPI_FORGET(p) __asm__ volatile("" : : "r"(p) : "memory")
#else
  #define AMPI_FORGET(p) ((void)(p))
#endif

/* Tests on bits in memory, so that they hold for NaN under any compiler flag. */
AMPI_HD AMPI_FN uint32_t ampi_bits_at(const float* p) {
    uint32_t u;
    AMPI_FORGET(p);
    memcpy(&u, p, sizeof u);
    return u;
}
AMPI_HD AMPI_FN int ampi_is_zero(const float* p) { return (ampi_bits_at(p) & 0x7fffffffu) == 0; }
AMPI_FN int ampi_is_finite(const float* p) { return (ampi_bits_at(p) & 0x7f800000u) != 0x7f800000u; }
AMPI_HD AMPI_FN int ampi_is_off(const float* p) { return ampi_bits_at(p) == 0xbf800000u; }   /* AMP_ZERO */

/* A scale whose inverse is a finite float: positive, finite, above 2^-128 (which is subnormal). */
#define AMPI_SMALLEST_SCALE 0x00200000u
AMPI_HD AMPI_FN int ampi_scale_usable(const float* p) {
    uint32_t u = ampi_bits_at(p);
    return u > AMPI_SMALLEST_SCALE && u < 0x7f800000u;
}

/* Unset fields take the preset's value; AMP_ZERO stays, so that the kept desc can be used again. */
AMPI_FN void ampi_scaler_fill(amp_scaler_desc* d, const ampi_scaler_row* row) {
    if (ampi_is_zero(&d->init_scale)) d->init_scale = row->init;
    if (d->growth_interval == 0) d->growth_interval = row->interval ? row->interval : AMP_ZERO;
    if (ampi_is_zero(&d->growth_factor)) d->growth_factor = row->growth;
    if (ampi_is_zero(&d->backoff_factor))
        d->backoff_factor = row->backoff > 0.0f || !(d->growth_factor > 1.0f)
                                ? row->backoff : (float)(1.0 / (double)d->growth_factor);
    if (ampi_is_zero(&d->min_scale)) d->min_scale = row->min > 0.0f ? row->min : (float)AMP_ZERO;
    if (d->guard == AMP_GUARD_DEFAULT) d->guard = row->guard;
    if (ampi_is_zero(&d->max_scale) && row->max > 0.0f) d->max_scale = row->max;
    if (ampi_is_zero(&d->max_scale) || ampi_is_off(&d->max_scale))
        d->max_scale = d->guard == AMP_GUARD_CLAMP ? AMPI_FLT_MAX : (float)AMP_ZERO;
    if (d->hysteresis == 0) d->hysteresis = row->hysteresis;
    if (d->refill == AMP_REFILL_DEFAULT) d->refill = row->refill;
    if (d->at_min == AMP_LIMIT_DEFAULT) d->at_min = row->at_min;
    if (d->max_skips == 0) d->max_skips = row->max_skips ? row->max_skips : AMP_ZERO;
    if (d->at_max_skips == AMP_LIMIT_DEFAULT) d->at_max_skips = AMP_LIMIT_ERROR;
}

#define AMPI_REFUSE_DESC(condition, ...) \
    do { if (condition) return ampi_fail(logger, AMP_ERR_DESC, __VA_ARGS__); } while (0)

/* Fields that a static scale has no use for, and enumerators: looked at before the defaults are filled
   in. */
AMPI_FN amp_result ampi_scaler_check_given(const amp_scaler_desc* d, const ampi_scaler_row* row) {
    const amp_logger* logger = d->logger;
    int is_static = row->interval == 0;
    AMPI_REFUSE_DESC(is_static && d->growth_interval > 0,
                     "scaler: growth_interval %d means nothing to the static preset %s",
                     d->growth_interval, row->text);
    AMPI_REFUSE_DESC(
        is_static && !(ampi_is_zero(&d->growth_factor) && ampi_is_zero(&d->backoff_factor)),
        "scaler: growth_factor %g and backoff_factor %g mean nothing to the static preset %s",
        (double)d->growth_factor, (double)d->backoff_factor, row->text);
    AMPI_REFUSE_DESC((unsigned)d->guard > (unsigned)AMP_GUARD_NONE,
                     "scaler: guard %d is not an amp_scaler_guard", (int)d->guard);
    AMPI_REFUSE_DESC((unsigned)d->refill > (unsigned)AMP_REFILL_EVERY_H,
                     "scaler: refill %d is not an amp_scaler_refill", (int)d->refill);
    AMPI_REFUSE_DESC((unsigned)d->at_min > (unsigned)AMP_LIMIT_CALLBACK,
                     "scaler: at_min %d is not an amp_scaler_limit", (int)d->at_min);
    AMPI_REFUSE_DESC((unsigned)d->at_max_skips > (unsigned)AMP_LIMIT_CALLBACK,
                     "scaler: at_max_skips %d is not an amp_scaler_limit", (int)d->at_max_skips);
    AMPI_REFUSE_DESC((d->at_min == AMP_LIMIT_CALLBACK || d->at_max_skips == AMP_LIMIT_CALLBACK) &&
                         !d->on_limit,
                     "scaler: AMP_LIMIT_CALLBACK needs on_limit, which is NULL");
    AMPI_REFUSE_DESC(d->ignore_overflow && !is_static,
                     "scaler: ignore_overflow is for static presets, not for %s", row->text);
    AMPI_REFUSE_DESC(ampi_is_zero(&d->init_scale) && row->init <= 0.0f,
                     "scaler: init_scale 0: the preset %s has no default, give one", row->text);
    return AMP_OK;
}

/* Ranges, after the defaults were filled in. */
AMPI_FN amp_result ampi_scaler_check_ranges(const amp_scaler_desc* d, const ampi_scaler_row* row) {
    const amp_logger* logger = d->logger;
    double init = (double)d->init_scale, growth = (double)d->growth_factor,
           backoff = (double)d->backoff_factor;
    int no_min = ampi_is_off(&d->min_scale), no_max = ampi_is_off(&d->max_scale);
    AMPI_REFUSE_DESC(!ampi_scale_usable(&d->init_scale),
                     "scaler: init_scale %g must be finite and greater than 2^-128", init);
    AMPI_REFUSE_DESC(!ampi_is_finite(&d->growth_factor) || growth <= 1.0,
                     "scaler: growth_factor %g must be finite and greater than 1", growth);
    AMPI_REFUSE_DESC(!ampi_is_finite(&d->backoff_factor) || backoff <= 0.0 || backoff >= 1.0,
                     "scaler: backoff_factor %g must lie between 0 and 1", backoff);
    AMPI_REFUSE_DESC(d->preset == AMP_SCALER_ONEFLOW && d->backoff_factor != (float)(1.0 / growth),
                     "scaler: backoff_factor %g must be 1/growth_factor = %g for the preset oneflow",
                     backoff, 1.0 / growth);
    AMPI_REFUSE_DESC(d->growth_interval < 1 && d->growth_interval != AMP_ZERO,
                     "scaler: growth_interval %d must be at least 1", d->growth_interval);
    AMPI_REFUSE_DESC(!no_min && (!ampi_is_finite(&d->min_scale) || d->min_scale < 0.0f),
                     "scaler: min_scale %g must be finite and positive", (double)d->min_scale);
    AMPI_REFUSE_DESC(!no_min && d->min_scale > d->init_scale,
                     "scaler: min_scale %g is greater than init_scale %g", (double)d->min_scale, init);
    AMPI_REFUSE_DESC(!no_max && (!ampi_is_finite(&d->max_scale) || d->max_scale < 0.0f),
                     "scaler: max_scale %g must be finite and positive", (double)d->max_scale);
    AMPI_REFUSE_DESC(!no_max && d->max_scale < d->init_scale && d->max_scale != row->max,
                     "scaler: max_scale %g is less than init_scale %g", (double)d->max_scale, init);
    AMPI_REFUSE_DESC(d->hysteresis < 1, "scaler: hysteresis %d must be at least 1", d->hysteresis);
    AMPI_REFUSE_DESC(d->max_skips < AMP_ZERO, "scaler: max_skips %d must not be negative", d->max_skips);
    return AMP_OK;
}

/* The machine's parameters from a complete desc. */
AMPI_FN void ampi_scaler_make_rule(amp_scaler_rule* r, const amp_scaler_desc* d,
                                   const ampi_scaler_row* row) {
    int interval = d->growth_interval == AMP_ZERO ? 0 : d->growth_interval;
    memset(r, 0, sizeof *r);
    r->growth = d->growth_factor;
    r->backoff = d->backoff_factor;
    r->min = ampi_is_off(&d->min_scale) ? 0.0f : d->min_scale;
    r->max = ampi_is_off(&d->max_scale) ? 0.0f : d->max_scale;
    r->interval = interval > INT32_MAX - row->late ? INT32_MAX : interval + row->late;
    r->start = row->start;
    r->hysteresis = d->hysteresis;
    r->guard = (int32_t)d->guard;
    r->refill = (int32_t)d->refill;
    r->at_min = (int32_t)d->at_min;
    r->max_skips = d->max_skips == AMP_ZERO ? 0 : d->max_skips;
    r->at_max_skips = (int32_t)d->at_max_skips;
    r->ignore_overflow = d->ignore_overflow != 0;
    r->is_static = row->interval == 0;
}

/* The inverse is formed in double: one rounding. */
AMPI_HD AMPI_FN void ampi_scaler_use_scale(amp_scaler_state* state) {
    state->scale_in_use = state->scale;
    state->inverse = ampi_scale_usable(&state->scale) ? (float)(1.0 / (double)state->scale) : 0.0f;
}

AMPI_HD AMPI_FN void ampi_overflow_clear(amp_overflow_info* info) {
    memset(info, 0, sizeof *info);
    info->first_tensor = -1;
}

AMP_DEF amp_result amp_scaler_init(amp_scaler* s, const amp_scaler_desc* desc) {
    const ampi_scaler_row* row;
    amp_scaler_desc d;
    amp_result r;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!s) return ampi_fail(d.logger, AMP_ERR_ARGUMENT, "amp_scaler_init: the scaler is NULL");
    row = ampi_scaler_preset(d.preset);
    if (!row)
        return ampi_fail(d.logger, AMP_ERR_DESC, "scaler: preset %d is not an amp_scaler_preset",
                         (int)d.preset);
    r = ampi_scaler_check_given(&d, row);
    if (r != AMP_OK) return r;
    ampi_scaler_fill(&d, row);
    r = ampi_scaler_check_ranges(&d, row);
    if (r != AMP_OK) return r;
    memset(s, 0, sizeof *s);
    s->desc = d;
    ampi_scaler_make_rule(&s->rule, &d, row);
    s->state.scale = d.init_scale;
    s->state.tracker = s->rule.start;
    s->state.hysteresis_left = s->rule.hysteresis;
    ampi_scaler_use_scale(&s->state);
    ampi_overflow_clear(&s->info);
    return AMP_OK;
}

/* --- the rule ------------------------------------------------------------------------------- */

/* Half way between the largest float and 2^128: what rounds to infinity. Products of two floats are
   exact in double, so comparing there needs no arithmetic on infinities. */
#define AMPI_FLT_OVERFLOW 3.4028235677973366e38

AMPI_HD AMPI_FN void ampi_scaler_grow(const amp_scaler_rule* rule, amp_scaler_state* state) {
    double grown = (double)state->scale * (double)rule->growth;
    if (rule->max > 0.0f && grown > (double)rule->max) state->scale = rule->max;
    else if (grown < AMPI_FLT_OVERFLOW || rule->guard == AMP_GUARD_NONE) state->scale = (float)grown;
    state->tracker = 0;
    if (rule->refill == AMP_REFILL_GROWTH) state->hysteresis_left = rule->hysteresis;
}

AMPI_HD AMPI_FN void ampi_scaler_clean_step(const amp_scaler_rule* rule, amp_scaler_state* state) {
    state->applied++;
    state->consecutive_skips = 0;
    if (rule->refill != AMP_REFILL_GROWTH) state->hysteresis_left = rule->hysteresis;
    if (state->tracker < INT32_MAX) state->tracker++;
    if (rule->interval > 0 && state->tracker >= rule->interval) ampi_scaler_grow(rule, state);
}

AMPI_HD AMPI_FN int ampi_scaler_overflow_step(const amp_scaler_rule* rule, amp_scaler_state* state) {
    int hit = 0;
    state->skipped++;
    if (state->consecutive_skips < INT32_MAX) state->consecutive_skips++;
    if (rule->max_skips > 0 && state->consecutive_skips > rule->max_skips) hit = 2;
    state->tracker = rule->start;
    if (state->hysteresis_left > 0) state->hysteresis_left--;
    if (rule->is_static || state->hysteresis_left > 0) return hit;
    if (state->scale <= rule->min) hit |= 1;
    state->scale = state->scale * rule->backoff;
    if (state->scale < rule->min) state->scale = rule->min;
    if (rule->refill == AMP_REFILL_EVERY_H) state->hysteresis_left = rule->hysteresis;
    return hit;
}

AMPI_HD AMP_DEF int amp_scaler_advance(const amp_scaler_rule* rule, amp_scaler_state* state) {
    int hit = 0;
    if (state->found_inf) hit = ampi_scaler_overflow_step(rule, state);
    else ampi_scaler_clean_step(rule, state);
    state->found_inf = 0;
    return hit;
}

/* --- lists of tensors, cut into chunks ------------------------------------------------------- */

/* Tensors that lie in an array of any struct: `at` gives the i-th. */
typedef struct ampi_tensors {
    const void* list;
    int count;
    amp_tensor (*at)(const void* list, int i);
} ampi_tensors;

AMPI_FN amp_tensor ampi_tensor_at(const void* list, int i) { return ((const amp_tensor*)list)[i]; }
AMPI_FN ampi_tensors ampi_tensors_of(const amp_tensor* list, int count) {
    ampi_tensors t;
    t.list = list; t.count = count; t.at = ampi_tensor_at;
    return t;
}

AMPI_FN uint64_t ampi_tensors_elements(const ampi_tensors* t) {
    uint64_t n = 0;
    int i;
    for (i = 0; i < t->count; i++) n += t->at(t->list, i).count;
    return n;
}

AMPI_FN const void* ampi_tensors_first(const ampi_tensors* t) {
    int i;
    for (i = 0; i < t->count; i++) {
        amp_tensor x = t->at(t->list, i);
        if (x.count) return x.data;
    }
    return NULL;
}

/* Work is done on chunks of one tensor each. They are handed out in waves that fit the stack; the chunks
   of a wave may run in parallel, their results are combined in order. Neither size depends on the
   machine. */
#define AMPI_CHUNK 16384
#define AMPI_WAVE  512
#define AMPI_ABREAST 4      /* chunks that are checked together */
#define AMPI_BLOCK 1024     /* elements converted at a time, on the stack */

typedef struct ampi_chunk {
    int      tensor, count;         /* count: chunks that a call of work finishes, this one and those behind it */
    size_t   offset, n;
    double   sum, sum2;             /* results: sums of squares */
    uint64_t inf, nan, first;       /* results of a check; first is valid if inf + nan > 0 */
} ampi_chunk;

typedef struct ampi_cursor { int tensor; size_t offset; } ampi_cursor;

/* The next chunks, at most AMPI_WAVE; returns how many, and their elements. */
AMPI_FN int ampi_fill_wave(const ampi_tensors* t, ampi_cursor* at, ampi_chunk* wave, size_t* elements) {
    int n = 0;
    *elements = 0;
    while (n < AMPI_WAVE && at->tensor < t->count) {
        size_t left = t->at(t->list, at->tensor).count - at->offset;
        if (left == 0) { at->tensor++; at->offset = 0; continue; }
        memset(&wave[n], 0, sizeof wave[n]);
        wave[n].tensor = at->tensor;
        wave[n].offset = at->offset;
        wave[n].n = left < AMPI_CHUNK ? left : AMPI_CHUNK;
        at->offset += wave[n].n;
        *elements += wave[n].n;
        n++;
    }
    return n;
}

typedef void (*ampi_chunk_fn)(void* context, ampi_chunk* chunk);

/* work(context, chunk) for every chunk, or every few where that leaves enough for all threads; then
   combine(context, chunk), if there is one, in order. */
AMPI_FN void ampi_each_chunk(const ampi_tensors* t, int few, ampi_chunk_fn work, ampi_chunk_fn combine,
                             void* context) {
    ampi_chunk wave[AMPI_WAVE];
    ampi_cursor at = { 0, 0 };
    size_t elements;
    int64_t i, n, step;
    while ((n = ampi_fill_wave(t, &at, wave, &elements)) > 0) {
        step = (size_t)n >= (size_t)few * ampi_threads() ? few : 1;
        AMPI_PARALLEL_FOR(elements > 2 * AMPI_CHUNK)
        for (i = 0; i < n; i += step) {
            wave[i].count = (int)(n - i < step ? n - i : step);
            work(context, &wave[i]);
        }
        for (i = 0; combine && i < n; i++) combine(context, &wave[i]);
    }
}

/* --- check ------------------------------------------------------------------------------------ */

/* Sum of squares of n floats, in double, where each square is exact (so fused or not is the same): 32
   lanes, added up in a fixed tree. And a test of the bits: a magnitude above `last` makes the difference
   negative, and its sign bit stays in the OR of all. */
#define AMPI_SCAN_LANES 32

/* n is a multiple of 32; acc[32] and *over go on from what they hold. The arrays are local so that
   compilers can keep them in registers. */
AMPI_FN void ampi_scan_plain(const float* x, size_t n, uint32_t last, double* acc, uint32_t* over) {
    uint32_t u, any[AMPI_SCAN_LANES] = { 0 };
    double sum[AMPI_SCAN_LANES];
    size_t i;
    int l;
    memcpy(sum, acc, sizeof sum);
    for (i = 0; i < n; i += AMPI_SCAN_LANES)
        for (l = 0; l < AMPI_SCAN_LANES; l++) {
            memcpy(&u, x + i + l, sizeof u);
            any[l] |= last - (u & 0x7fffffffu);
            sum[l] += (double)x[i + (size_t)l] * (double)x[i + (size_t)l];
        }
    memcpy(acc, sum, sizeof sum);
    for (l = 0; l < AMPI_SCAN_LANES; l++) *over |= any[l];
}

/* Adds the sum of squares of any n floats to *sum, and raises *hit if a magnitude is above `last`. The
   rest goes through a padded copy: zeros add nothing. */
AMPI_FN void ampi_scan_f32_plain(const float* x, size_t n, uint32_t last, double* sum, uint32_t* hit) {
    double acc[AMPI_SCAN_LANES] = { 0 };
    float pad[AMPI_SCAN_LANES] = { 0 };
    size_t whole = n - n % AMPI_SCAN_LANES;
    uint32_t over = 0;
    int l, width;
    ampi_scan_plain(x, whole, last, acc, &over);
    if (n > whole) {
        memcpy(pad, x + whole, (n - whole) * sizeof(float));
        ampi_scan_plain(pad, AMPI_SCAN_LANES, last, acc, &over);
    }
    for (width = AMPI_SCAN_LANES / 2; width > 0; width /= 2)
        for (l = 0; l < width; l++) acc[l] += acc[l + width];
    *hit |= over >> 31;
    *sum += acc[0];
}

/* The test alone, on 16-bit elements. */
AMPI_FN void ampi_scan_16_plain(const uint16_t* AMPI_RESTRICT x, size_t n, uint32_t last, uint32_t* hit) {
    uint16_t over[AMPI_SCAN_LANES] = { 0 };
    uint32_t any = 0;
    size_t i = 0;
    int l;
    for (; n - i >= AMPI_SCAN_LANES; i += AMPI_SCAN_LANES)
        for (l = 0; l < AMPI_SCAN_LANES; l++)
            over[l] = (uint16_t)(over[l] | (uint16_t)(last - (x[i + (size_t)l] & 0x7fffu)));
    for (l = 0; i < n; i++, l++) over[l] = (uint16_t)(over[l] | (uint16_t)(last - (x[i] & 0x7fffu)));
    for (l = 0; l < AMPI_SCAN_LANES; l++) any |= over[l];
    *hit |= (any >> 15) & 1u;
}

#if AMPI_X86
/* Both by hand and in one pass, for each type: the lanes and the tree of the plain code. square() adds to as many
   lanes as a vector has, over() folds 32 elements into the test, signs() are its top bits. */
AMPI_TARGET_AVX2 AMPI_INLINE __m256d ampi_square_f32_avx2(const float* x, __m256d sum) {
    __m256d wide = _mm256_cvtps_pd(_mm_loadu_ps(x));
    return _mm256_fmadd_pd(wide, wide, sum);
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256d ampi_square_half_avx2(const uint16_t* x, __m256d sum) {
    __m256d wide = _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)(const void*)x)));
    return _mm256_fmadd_pd(wide, wide, sum);
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256d ampi_square_bf16_avx2(const uint16_t* x, __m256d sum) {
    __m128i u = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)(const void*)x));
    __m256d wide = _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(u, 16)));
    return _mm256_fmadd_pd(wide, wide, sum);
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_over_f32_avx2(__m256i any, const float* x, uint32_t last) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), limit = _mm256_set1_epi32((int)last);
    int k;
    for (k = 0; k < 4; k++) {
        __m256i u = _mm256_loadu_si256((const __m256i*)(const void*)(x + 8 * k));
        any = _mm256_or_si256(any, _mm256_sub_epi32(limit, _mm256_and_si256(u, magnitude)));
    }
    return any;
}
AMPI_TARGET_AVX2 AMPI_INLINE __m256i ampi_over_16_avx2(__m256i any, const uint16_t* x, uint32_t last) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff), limit = _mm256_set1_epi16((short)last);
    __m256i a = _mm256_loadu_si256((const __m256i*)(const void*)x);
    __m256i b = _mm256_loadu_si256((const __m256i*)(const void*)(x + 16));
    any = _mm256_or_si256(any, _mm256_sub_epi16(limit, _mm256_and_si256(a, magnitude)));
    return _mm256_or_si256(any, _mm256_sub_epi16(limit, _mm256_and_si256(b, magnitude)));
}
#define AMPI_SIGNS_F32_AVX2(any) _mm256_movemask_ps(_mm256_castsi256_ps(any))
#define AMPI_SIGNS_16_AVX2(any) ((uint32_t)_mm256_movemask_epi8(any) & 0xaaaaaaaau)
AMPI_TARGET_AVX2 AMPI_INLINE double ampi_tree_avx2(__m256d even, __m256d odd) {
    double lane[4];
    _mm256_storeu_pd(lane, _mm256_add_pd(even, odd));
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

/* The processor prefetches up to the end of a page; this is one page ahead. */
#define AMPI_SCAN_FETCH(p)                                       \
    _mm_prefetch((const char*)(p) + 4096, _MM_HINT_T0);          \
    _mm_prefetch((const char*)((p) + 16) + 4096, _MM_HINT_T0)
/* The 32 elements at x + i, or a padded copy of the last few. */
#define AMPI_SCAN_TURN(x, i, n, pad) \
    (n - i < AMPI_SCAN_LANES ? (memcpy(pad, x + i, (n - i) * sizeof *x), pad) : x + i)
#define AMPI_SCAN_AVX2(name, type, over, signs)                                                          \
    AMPI_TARGET_AVX2 AMPI_FN void ampi_scan_##name##_avx2(const type* x, size_t n, uint32_t last,        \
                                                          double* sum, uint32_t* hit) {                  \
        __m256d s0 = _mm256_setzero_pd(), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0; \
        __m256i any = _mm256_setzero_si256();                                                            \
        type pad[AMPI_SCAN_LANES] = { 0 };                                                               \
        size_t i;                                                                                        \
        for (i = 0; i < n; i += AMPI_SCAN_LANES) {                                                       \
            const type* p = AMPI_SCAN_TURN(x, i, n, pad);                                                \
            AMPI_SCAN_FETCH(p);                                                                          \
            any = over(any, p, last);                                                                    \
            s0 = ampi_square_##name##_avx2(p, s0);                                                       \
            s1 = ampi_square_##name##_avx2(p + 4, s1);                                                   \
            s2 = ampi_square_##name##_avx2(p + 8, s2);                                                   \
            s3 = ampi_square_##name##_avx2(p + 12, s3);                                                  \
            s4 = ampi_square_##name##_avx2(p + 16, s4);                                                  \
            s5 = ampi_square_##name##_avx2(p + 20, s5);                                                  \
            s6 = ampi_square_##name##_avx2(p + 24, s6);                                                  \
            s7 = ampi_square_##name##_avx2(p + 28, s7);                                                  \
        }                                                                                                \
        s0 = _mm256_add_pd(_mm256_add_pd(s0, s4), _mm256_add_pd(s2, s6));                                \
        s1 = _mm256_add_pd(_mm256_add_pd(s1, s5), _mm256_add_pd(s3, s7));                                \
        *sum += ampi_tree_avx2(s0, s1);                                                                  \
        *hit |= signs(any) != 0;                                                                         \
        ampi_clear_upper();                                                                              \
    }
AMPI_SCAN_AVX2(f32, float, ampi_over_f32_avx2, AMPI_SIGNS_F32_AVX2)
AMPI_SCAN_AVX2(half, uint16_t, ampi_over_16_avx2, AMPI_SIGNS_16_AVX2)
AMPI_SCAN_AVX2(bf16, uint16_t, ampi_over_16_avx2, AMPI_SIGNS_16_AVX2)

/* Adds the squares of eight floats, and of 32 elements [i, i+32), to the lanes of s. Of bfloat16 the even elements
   are taken apart from the odd ones, so each holds every other lane. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_square_x8(__m256 x, __m512d* s) {
    const __m512d wide = _mm512_maskz_cvtps_pd(0xff, x);
    *s = _mm512_fmadd_pd(wide, wide, *s);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_square_pairs_x16(const uint16_t* x, __m512d* even, __m512d* odd) {
    const __m256i u = _mm256_loadu_si256((const __m256i*)(const void*)x);
    ampi_square_x8(_mm256_castsi256_ps(_mm256_slli_epi32(u, 16)), even);
    ampi_square_x8(_mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u))), odd);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_square_x32(amp_dtype t, const void* x, size_t i, __m512d* s) {
    if (t == AMP_BF16) {
        ampi_square_pairs_x16((const uint16_t*)x + i, s, s + 1);
        ampi_square_pairs_x16((const uint16_t*)x + i + 16, s + 2, s + 3);
        return;
    }
    ampi_square_x8(ampi_get_x8(t, x, i), s);
    ampi_square_x8(ampi_get_x8(t, x, i + 8), s + 1);
    ampi_square_x8(ampi_get_x8(t, x, i + 16), s + 2);
    ampi_square_x8(ampi_get_x8(t, x, i + 24), s + 3);
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_over_f32_avx512(__m512i any, const float* x, uint32_t last) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), limit = _mm512_set1_epi32((int)last);
    __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), magnitude);
    __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude);
    any = _mm512_or_si512(any, _mm512_sub_epi32(limit, a));
    return _mm512_or_si512(any, _mm512_sub_epi32(limit, b));
}
AMPI_TARGET_AVX512 AMPI_INLINE __m512i ampi_over_16_avx512(__m512i any, const uint16_t* x, uint32_t last) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff), limit = _mm512_set1_epi16((short)last);
    __m512i u = _mm512_and_si512(_mm512_loadu_si512(x), magnitude);
    return _mm512_or_si512(any, _mm512_sub_epi16(limit, u));
}
AMPI_TARGET_AVX512 AMPI_INLINE double ampi_tree_avx512(__m512d x) {
    double lane[8];
    _mm512_storeu_pd(lane, x);
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}
AMPI_TARGET_AVX512 AMPI_INLINE double ampi_squares_total(amp_dtype t, const __m512d* s) {
    const __m512d a = _mm512_add_pd(s[0], s[2]), b = _mm512_add_pd(s[1], s[3]);
    return t == AMP_BF16 ? ampi_tree_avx512(a) + ampi_tree_avx512(b) : ampi_tree_avx512(_mm512_add_pd(a, b));
}
#define AMPI_SCAN_AVX512(name, type, t, over, signs)                                                     \
    AMPI_TARGET_AVX512 AMPI_FN void ampi_scan_##name##_avx512(const type* x, size_t n, uint32_t last,    \
                                                              double* sum, uint32_t* hit) {              \
        __m512d zero = _mm512_setzero_pd(), s[4] = { zero, zero, zero, zero };                           \
        __m512i any = _mm512_setzero_si512();                                                            \
        type pad[AMPI_SCAN_LANES] = { 0 };                                                               \
        size_t i;                                                                                        \
        for (i = 0; i < n; i += AMPI_SCAN_LANES) {                                                       \
            const type* p = AMPI_SCAN_TURN(x, i, n, pad);                                                \
            AMPI_SCAN_FETCH(p);                                                                          \
            any = over(any, p, last);                                                                    \
            ampi_square_x32(t, p, 0, s);                                                                 \
        }                                                                                                \
        *sum += ampi_squares_total(t, s);                                                                \
        *hit |= signs(any) != 0;                                                                         \
        ampi_clear_upper();                                                                              \
    }
AMPI_SCAN_AVX512(f32, float, AMP_F32, ampi_over_f32_avx512, _mm512_movepi32_mask)
AMPI_SCAN_AVX512(half, uint16_t, AMP_F16, ampi_over_16_avx512, _mm512_movepi16_mask)
AMPI_SCAN_AVX512(bf16, uint16_t, AMP_BF16, ampi_over_16_avx512, _mm512_movepi16_mask)

/* The sums of squares of four runs of n elements, a chunk apart: memory is read faster in several places at once. */
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_square_ahead_x32(amp_dtype t, const void* x, size_t i, __m512d* s) {
    const char* p = (const char*)x + i * amp_dtype_size(t) + 1024;
    _mm_prefetch(p, _MM_HINT_T0);
    if (t == AMP_F32) _mm_prefetch(p + 64, _MM_HINT_T0);
    ampi_square_x32(t, x, i, s);
}
AMPI_TARGET_AVX512 AMPI_INLINE void ampi_squares_typed(amp_dtype t, const void* x, size_t n, double* sums) {
    const __m512d z = _mm512_setzero_pd();
    __m512d a[4] = { z, z, z, z }, b[4] = { z, z, z, z }, c[4] = { z, z, z, z }, d[4] = { z, z, z, z };
    size_t i;
    for (i = 0; i < n; i += AMPI_SCAN_LANES) {
        ampi_square_ahead_x32(t, x, i, a);
        ampi_square_ahead_x32(t, x, i + AMPI_CHUNK, b);
        ampi_square_ahead_x32(t, x, i + 2 * AMPI_CHUNK, c);
        ampi_square_ahead_x32(t, x, i + 3 * AMPI_CHUNK, d);
    }
    sums[0] = ampi_squares_total(t, a);
    sums[1] = ampi_squares_total(t, b);
    sums[2] = ampi_squares_total(t, c);
    sums[3] = ampi_squares_total(t, d);
}
AMPI_TARGET_AVX512 AMPI_FN void ampi_squares_avx512(amp_dtype t, const void* x, size_t n, double* sums) {
    AMPI_FOR_TYPE(ampi_squares_typed, t, x, n, sums);
    ampi_clear_upper();
}
#endif

AMPI_FN void ampi_scan_f32(const float* x, size_t n, uint32_t last, double* sum, uint32_t* hit) {
#if AMPI_X86
    if (ampi_simd() == AMP_ISA_AVX512) { ampi_scan_f32_avx512(x, n, last, sum, hit); return; }
    if (ampi_simd() == AMP_ISA_AVX2) { ampi_scan_f32_avx2(x, n, last, sum, hit); return; }
#endif
    ampi_scan_f32_plain(x, n, last, sum, hit);
}

/* The same for n <= AMPI_BLOCK elements of 16 bits. */
AMPI_FN void ampi_scan_16(const uint16_t* x, amp_dtype t, size_t n, uint32_t last, double* sum, uint32_t* hit) {
    float wide[AMPI_BLOCK];
    uint32_t ignored = 0;
#if AMPI_X86
    amp_isa isa = ampi_simd();
    if (isa == AMP_ISA_AVX512 && t == AMP_F16) { ampi_scan_half_avx512(x, n, last, sum, hit); return; }
    if (isa == AMP_ISA_AVX512) { ampi_scan_bf16_avx512(x, n, last, sum, hit); return; }
    if (isa == AMP_ISA_AVX2 && t == AMP_F16) { ampi_scan_half_avx2(x, n, last, sum, hit); return; }
    if (isa == AMP_ISA_AVX2) { ampi_scan_bf16_avx2(x, n, last, sum, hit); return; }
#endif
    ampi_scan_16_plain(x, n, last, hit);
    ampi_load_f32(wide, x, t, 0, n);
    ampi_scan_f32_plain(wide, n, 0x7f7fffffu, sum, &ignored);
}

/* Magnitude bits of infinity in a type; what lies above them is NaN. */
AMPI_HD AMPI_FN uint32_t ampi_inf_bits(amp_dtype t) {
    return t == AMP_F16 ? 0x7c00u : t == AMP_BF16 ? 0x7f80u : 0x7f800000u;
}

AMPI_HD AMPI_FN float ampi_widen_bits(uint32_t u, amp_dtype t) {
    return ampi_float(t == AMP_F16 ? ampi_half_widen((uint16_t)u) : t == AMP_BF16 ? u << 16 : u);
}

/* Would x * inverse, rounded to float and then to `to`, be infinite? x is finite. */
AMPI_HD AMPI_FN int ampi_would_overflow(float x, float inverse, amp_dtype to) {
    double product = (double)x * (double)inverse;
    if (product >= AMPI_FLT_OVERFLOW) return 1;
    if (to == AMP_F16) return (float)product >= 65520.0f;
    return to == AMP_BF16 && (float)product >= ampi_float(0x7f7f8000u);
}

/* The largest magnitude, as bits of type `from`, that stays finite when multiplied by inverse and stored
   as `to`. The product grows with the bits, so bisection finds it. */
AMPI_HD AMPI_FN uint32_t ampi_last_finite(amp_dtype from, amp_dtype to, float inverse) {
    uint32_t good = 0, bad = ampi_inf_bits(from), mid;
    if (!ampi_would_overflow(ampi_widen_bits(bad - 1, from), inverse, to)) return bad - 1;
    while (bad - good > 1) {
        mid = good + (bad - good) / 2;
        if (ampi_would_overflow(ampi_widen_bits(mid, from), inverse, to)) bad = mid;
        else good = mid;
    }
    return good;
}

AMPI_FN uint32_t ampi_magnitude_at(const void* data, amp_dtype t, size_t i) {
    uint32_t u;
    uint16_t h;
    if (t == AMP_F32) {
        memcpy(&u, (const float*)data + i, sizeof u);
        return u & 0x7fffffffu;
    }
    memcpy(&h, (const uint16_t*)data + i, sizeof h);
    return h & 0x7fffu;
}

/* The slow path, for blocks that are known to be bad. `base` is the index of element 0. */
AMPI_FN void ampi_count_bad(const void* data, amp_dtype t, size_t n, uint32_t last, size_t base,
                            ampi_chunk* c) {
    uint32_t inf = ampi_inf_bits(t), u;
    size_t i;
    for (i = 0; i < n; i++) {
        u = ampi_magnitude_at(data, t, i);
        if (u <= last) continue;
        if (c->inf + c->nan == 0) c->first = base + i;
        if (u > inf) c->nan++;
        else c->inf++;
    }
}

/* Checks n elements of type t against the largest allowed magnitude; `base` is the index of element 0. */
AMPI_FN void ampi_scan(const void* data, amp_dtype t, size_t base, size_t n, uint32_t last,
                       ampi_chunk* c) {
    size_t done, m;
    uint32_t hit = 0;
    if (t == AMP_F32) {
        ampi_scan_f32((const float*)data, n, last, &c->sum, &hit);
        if (hit) ampi_count_bad(data, t, n, last, base, c);
        return;
    }
    for (done = 0; done < n; done += m) {
        const uint16_t* x = (const uint16_t*)data + done;
        m = n - done < AMPI_BLOCK ? n - done : AMPI_BLOCK;
        hit = 0;
        ampi_scan_16(x, t, m, last, &c->sum, &hit);
        if (hit) ampi_count_bad(x, t, m, last, base + done, c);
    }
}

AMPI_FN const void* ampi_element(const amp_tensor* x, size_t i) {
    return (const unsigned char*)x->data + i * amp_dtype_size(x->dtype);
}

/* A pass over lists: src is checked, or moved to dst. */
typedef struct ampi_grad_pass {
    const ampi_tensors* src;
    const ampi_tensors* dst;        /* gives the types of the results; NULL = FP32 */
    float inverse;
    double sum;
    amp_overflow_info* info;
} ampi_grad_pass;

AMPI_FN void ampi_check_chunk(void* context, ampi_chunk* c) {
    const ampi_grad_pass* pass = (const ampi_grad_pass*)context;
    amp_tensor x = pass->src->at(pass->src->list, c->tensor);
    amp_dtype from = ampi_dtype(x.dtype), to = AMP_F32;
    if (pass->dst) to = ampi_dtype(pass->dst->at(pass->dst->list, c->tensor).dtype);
    ampi_scan(ampi_element(&x, c->offset), from, c->offset, c->n,
              ampi_last_finite(from, to, pass->inverse), c);
}

#if AMPI_X86
/* Four whole chunks of one tensor. A sum of squares is finite where each element is: a square of the largest
   float is far from the end of double. */
AMPI_FN void ampi_check_abreast(const void* data, amp_dtype t, ampi_chunk* c) {
    const size_t block = t == AMP_F32 ? AMPI_CHUNK : AMPI_BLOCK, size = amp_dtype_size(t);
    double sums[AMPI_ABREAST];
    size_t i;
    int k;
    for (i = 0; i < AMPI_CHUNK; i += block) {
        const char* x = (const char*)data + (c->offset + i) * size;
        ampi_squares_avx512(t, x, block, sums);
        AMPI_FORGET(sums);
        for (k = 0; k < AMPI_ABREAST; k++, x += AMPI_CHUNK * size) {
            c[k].sum += sums[k];
            if ((ampi_bits64(sums[k]) & 0x7ff0000000000000u) == 0x7ff0000000000000u)
                ampi_count_bad(x, t, block, ampi_inf_bits(t) - 1, c[k].offset + i, &c[k]);
        }
    }
}
#endif

/* Chunks c[0] to c[count-1]. */
AMPI_FN void ampi_check_chunks(void* context, ampi_chunk* c) {
    int k;
#if AMPI_X86
    const ampi_grad_pass* pass = (const ampi_grad_pass*)context;
    const ampi_chunk* end = c + AMPI_ABREAST - 1;
    amp_tensor x = pass->src->at(pass->src->list, c->tensor);
    amp_dtype from = ampi_dtype(x.dtype), to = AMP_F32;
    if (pass->dst) to = ampi_dtype(pass->dst->at(pass->dst->list, c->tensor).dtype);
    if (ampi_simd() == AMP_ISA_AVX512 && c->count == AMPI_ABREAST && end->tensor == c->tensor
        && end->n == AMPI_CHUNK && ampi_last_finite(from, to, pass->inverse) == ampi_inf_bits(from) - 1) {
        ampi_check_abreast(x.data, from, c);
        return;
    }
#endif
    for (k = 0; k < c->count; k++) ampi_check_chunk(context, &c[k]);
}

/* Chunks arrive in order, so the first bad one is the first of the list. */
AMPI_FN void ampi_check_combine(void* context, ampi_chunk* c) {
    ampi_grad_pass* pass = (ampi_grad_pass*)context;
    amp_overflow_info* info = pass->info;
    if (c->inf + c->nan > 0 && !info->found_inf) {
        const char* name = pass->src->at(pass->src->list, c->tensor).name;
        info->found_inf = 1;
        info->first_tensor = c->tensor;
        info->first_index = c->first;
        if (name) strncpy(info->first_name, name, sizeof info->first_name - 1);
    }
    info->inf_count += c->inf;
    info->nan_count += c->nan;
    pass->sum += c->sum;
}

/* Fills info with what one pass over src finds. */
AMPI_FN void ampi_check_pass(const ampi_tensors* src, const ampi_tensors* dst, float inverse,
                             ampi_chunk_fn work, amp_overflow_info* info) {
    ampi_grad_pass pass;
    fenv_t floats;
    pass.src = src; pass.dst = dst; pass.inverse = inverse; pass.sum = 0.0; pass.info = info;
    ampi_overflow_clear(info);
    feholdexcept(&floats);      /* squares of inf, NaN and the largest floats are formed too */
    ampi_each_chunk(src, work == ampi_check_chunks ? AMPI_ABREAST : 1, work, ampi_check_combine, &pass);
    fesetenv(&floats);
    info->norm = info->found_inf ? ampi_double(0x7ff0000000000000u) : sqrt(pass.sum);
}

/* Read-only: what is inf or NaN, or would be when multiplied by inverse and stored in dst's types (NULL
   = FP32), and the norm of the products. */
AMPI_FN void ampi_check(const ampi_tensors* src, const ampi_tensors* dst, float inverse,
                        amp_overflow_info* info) {
    ampi_check_pass(src, dst, inverse, ampi_check_chunks, info);
    if (!info->found_inf) info->norm *= (double)inverse;
}

AMPI_FN void ampi_check_tensors(const amp_tensor* list, int count, float inverse,
                                amp_overflow_info* info) {
    ampi_tensors t = ampi_tensors_of(list, count);
    ampi_check(&t, NULL, inverse, info);
}

/* --- unscale ---------------------------------------------------------------------------------- */

AMPI_INLINE void ampi_scale_f32_body(int hw, float* y, const float* x, size_t n, float factor) {
    size_t i = 0;
    int l;
    (void)hw;
    for (; n - i >= 16; i += 16)
        for (l = 0; l < 16; l++) y[i + (size_t)l] = x[i + (size_t)l] * factor;
    for (; i < n; i++) y[i] = x[i] * factor;
}
AMPI_KERNEL(ampi_scale_f32, (float* y, const float* x, size_t n, float factor), y, x, n, factor)

AMPI_INLINE void ampi_axpy_f32_body(int hw, float* AMPI_RESTRICT y, const float* AMPI_RESTRICT x,
                                    size_t n, float a) {
    size_t i = 0;
    int l;
    for (; n - i >= 16; i += 16)
        for (l = 0; l < 16; l++) y[i + (size_t)l] = ampi_fma(hw, x[i + (size_t)l], a, y[i + (size_t)l]);
    for (; i < n; i++) y[i] = ampi_fma(hw, x[i], a, y[i]);
}
AMPI_KERNEL(ampi_axpy_f32, (float* y, const float* x, size_t n, float a), y, x, n, a)

/* Elements of the block that starts at i. */
AMPI_FN size_t ampi_block_size(const ampi_chunk* c, size_t i) {
    size_t left = c->offset + c->n - i;
    return left < AMPI_BLOCK ? left : AMPI_BLOCK;
}

/* n elements from `offset` as floats: where they lie if they are floats, else converted into the tile. */
AMPI_FN const float* ampi_widen_block(const amp_tensor* x, size_t offset, size_t n, float* tile) {
    if (ampi_dtype(x->dtype) == AMP_F32) return (const float*)x->data + offset;
    ampi_load_f32(tile, x->data, x->dtype, offset, n);
    return tile;
}

/* dst = src * inverse. */
AMPI_FN void ampi_unscale_chunk(void* context, ampi_chunk* c) {
    const ampi_grad_pass* pass = (const ampi_grad_pass*)context;
    amp_tensor x = pass->src->at(pass->src->list, c->tensor),
               y = pass->dst->at(pass->dst->list, c->tensor);
    int direct = ampi_dtype(y.dtype) == AMP_F32;
    float tile[AMPI_BLOCK];
    size_t i, n;
    for (i = c->offset; i < c->offset + c->n; i += n) {
        const float* from;
        n = ampi_block_size(c, i);
        from = ampi_widen_block(&x, i, n, tile);
        ampi_scale_f32(direct ? (float*)y.data + i : tile, from, n, pass->inverse);
        if (!direct) ampi_store_f32(y.data, y.dtype, i, tile, n);
    }
}

/* sum[n] = dst + src * inverse, from element i on. */
AMPI_FN void ampi_accumulate_block(const amp_tensor* y, const amp_tensor* x, size_t i, size_t n,
                                   float inverse, float* sum) {
    float tile[AMPI_BLOCK];
    ampi_load_f32(sum, y->data, y->dtype, i, n);
    ampi_axpy_f32(sum, ampi_widen_block(x, i, n, tile), n, inverse);
}

AMPI_FN void ampi_accumulate_chunk(void* context, ampi_chunk* c) {
    const ampi_grad_pass* pass = (const ampi_grad_pass*)context;
    amp_tensor x = pass->src->at(pass->src->list, c->tensor),
               y = pass->dst->at(pass->dst->list, c->tensor);
    float sum[AMPI_BLOCK];
    size_t i, n;
    for (i = c->offset; i < c->offset + c->n; i += n) {
        n = ampi_block_size(c, i);
        ampi_accumulate_block(&y, &x, i, n, pass->inverse, sum);
        ampi_store_f32(y.data, y.dtype, i, sum, n);
    }
}

/* Checks the sums as they will be stored. */
AMPI_FN void ampi_check_sums_chunk(void* context, ampi_chunk* c) {
    const ampi_grad_pass* pass = (const ampi_grad_pass*)context;
    amp_tensor x = pass->src->at(pass->src->list, c->tensor),
               y = pass->dst->at(pass->dst->list, c->tensor);
    amp_dtype t = ampi_dtype(y.dtype);
    union { float f32[AMPI_BLOCK]; uint16_t f16[AMPI_BLOCK]; } stored;
    float sum[AMPI_BLOCK];
    size_t i, n;
    for (i = c->offset; i < c->offset + c->n; i += n) {
        n = ampi_block_size(c, i);
        ampi_accumulate_block(&y, &x, i, n, pass->inverse, sum);
        ampi_store_f32(&stored, t, 0, sum, n);
        AMPI_FORGET(&stored);
        ampi_scan(&stored, t, i, n, ampi_inf_bits(t) - 1, c);
    }
}

/* --- windows ---------------------------------------------------------------------------------- */

enum { AMPI_CHECKED = 1, AMPI_UNSCALED = 2, AMPI_STEPPED = 4 };

/* No desc leads to a hysteresis of 0: such a scaler is zeroed memory that amp_scaler_init never saw. */
AMPI_FN amp_result ampi_scaler_ready(const amp_scaler* s) {
    return !s ? AMP_ERR_ARGUMENT : s->rule.hysteresis < 1 ? AMP_ERR_STATE : AMP_OK;
}

/* A window begins with the first loss or report after an update. */
AMPI_FN void ampi_scaler_open(amp_scaler* s) {
    if (!s->scaled && !s->recorded) ampi_overflow_clear(&s->info);
}

/* The entry of the list that begins at `data`; NULL if there is none. */
AMPI_FN amp_scaler_list* ampi_scaler_entry(amp_scaler* s, const void* data) {
    int i;
    for (i = 0; i < s->list_count; i++)
        if (s->lists[i].data == data) return &s->lists[i];
    return NULL;
}

/* What was done in this window to lists that begin with one of these tensors, and to how many elements the
   unscaled ones of them amount. */
AMPI_FN uint32_t ampi_scaler_seen(const amp_scaler* s, const ampi_tensors* t, uint64_t* unscaled) {
    uint32_t done = 0;
    int i, k;
    *unscaled = 0;
    for (i = 0; i < t->count && s->list_count > 0; i++) {
        amp_tensor x = t->at(t->list, i);
        for (k = 0; x.count && k < s->list_count; k++) {
            if (s->lists[k].data != x.data) continue;
            done |= s->lists[k].done;
            if (s->lists[k].done & AMPI_UNSCALED) *unscaled += s->lists[k].elements;
        }
    }
    return done;
}

/* Remembers what was done to a list. Where its first tensor was unscaled as a list of its own, that list's size
   stays. A check that finds the table full is forgotten: the step will check again. */
AMPI_FN void ampi_scaler_note(amp_scaler* s, const ampi_tensors* t, uint32_t done, double norm) {
    const void* data = ampi_tensors_first(t);
    amp_scaler_list* entry = ampi_scaler_entry(s, data);
    if (!entry) {
        if (s->list_count == AMP_SCALER_MAX_LISTS) return;
        entry = &s->lists[s->list_count++];
        memset(entry, 0, sizeof *entry);
        entry->data = data;
    }
    if (!(entry->done & AMPI_UNSCALED)) entry->elements = ampi_tensors_elements(t);
    entry->done |= done;
    entry->norm = norm;
}

AMPI_FN amp_result ampi_scaler_need_room(amp_scaler* s, const ampi_tensors* t, const char* place) {
    if (s->list_count < AMP_SCALER_MAX_LISTS || ampi_scaler_entry(s, ampi_tensors_first(t)))
        return AMP_OK;
    return ampi_fail(s->desc.logger, AMP_ERR_STATE,
                     "%s: more than %d lists of gradients in one window; put the tensors in one list",
                     place, AMP_SCALER_MAX_LISTS);
}

AMPI_FN amp_result ampi_tensors_validate(const ampi_tensors* t, const amp_logger* logger,
                                         const char* place) {
    int i;
    if (t->count < 0 || (t->count > 0 && !t->list))
        return ampi_fail(logger, AMP_ERR_ARGUMENT, "%s: the list is NULL or its count %d is negative",
                         place, t->count);
    for (i = 0; i < t->count; i++) {
        amp_tensor x = t->at(t->list, i);
        if (!ampi_is_compute_dtype(x.dtype))
            return ampi_fail(logger, AMP_ERR_DTYPE,
                             "%s: tensor %d (%s): data type %d is not F32, F16 or BF16", place, i,
                             x.name ? x.name : "no name", (int)x.dtype);
        if (x.count > SIZE_MAX / 16)
            return ampi_fail(logger, AMP_ERR_ARGUMENT, "%s: tensor %d (%s): no memory holds %lu elements", place,
                             i, x.name ? x.name : "no name", (unsigned long)x.count);
        if (x.count > 0 && !x.data)
            return ampi_fail(logger, AMP_ERR_ARGUMENT, "%s: tensor %d (%s): data is NULL, count is %lu",
                             place, i, x.name ? x.name : "no name", (unsigned long)x.count);
    }
    return AMP_OK;
}

/* What check, unscale and step have in common: a valid list, in a window whose loss was scaled. */
AMPI_FN amp_result ampi_scaler_enter(const amp_scaler* s, const ampi_tensors* t, const char* place) {
    if (!s) return AMP_ERR_ARGUMENT;
    if (!s->scaled)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE, "%s: no loss was scaled since the last update",
                         place);
    return ampi_tensors_validate(t, s->desc.logger, place);
}

/* Has this window unscaled these gradients already? *all is 1 if all of them, 0 if none. */
AMPI_FN amp_result ampi_scaler_unscaled(const amp_scaler* s, const ampi_tensors* t, const char* place,
                                        int* all) {
    uint64_t unscaled, elements = ampi_tensors_elements(t);
    ampi_scaler_seen(s, t, &unscaled);
    *all = unscaled != 0;
    if (unscaled == 0 || unscaled == elements) return AMP_OK;
    return ampi_fail(s->desc.logger, AMP_ERR_STATE,
                     "%s: lists with %lu elements of these gradients were unscaled, but there are %lu",
                     place, (unsigned long)unscaled, (unsigned long)elements);
}

/* Adds the findings of one list to the window's. */
AMPI_HD AMPI_FN void ampi_overflow_add(amp_overflow_info* all, const amp_overflow_info* found) {
    uint64_t inf = all->inf_count + found->inf_count, nan = all->nan_count + found->nan_count;
    if (found->found_inf && !all->found_inf) *all = *found;
    all->inf_count = inf;
    all->nan_count = nan;
    all->norm = found->norm;
}

/* Takes the findings of one list into the window. Returns 1 if the list may be used. */
AMPI_FN int ampi_scaler_record(amp_scaler* s, amp_overflow_info* found, const char* place) {
    if (!ampi_scale_usable(&s->state.scale_in_use)) {
        found->found_inf = 1;
        found->norm = ampi_double(0x7ff0000000000000u);
        ampi_fail(s->desc.logger, AMP_ERR_OVERFLOW,
                  "%s: the loss scale %g has no finite inverse; this step will be skipped", place,
                  (double)s->state.scale_in_use);
    }
    ampi_overflow_add(&s->info, found);
    s->recorded = 1;
    if (!found->found_inf || s->rule.ignore_overflow) return 1;
    s->state.found_inf = 1;
    return 0;
}

AMP_DEF float amp_scaler_scale_loss(amp_scaler* s, float loss) {
    int i;
    if (ampi_scaler_ready(s) != AMP_OK) return ampi_float(0x7fc00000u);
    ampi_scaler_open(s);
    if (!s->scaled) ampi_scaler_use_scale(&s->state);
    s->scaled = 1;
    for (i = 0; i < s->list_count; i++)                 /* new gradients will come */
        s->lists[i].done &= ~(uint32_t)AMPI_CHECKED;
    return loss * s->state.scale_in_use;
}

AMP_DEF amp_result amp_scaler_check(amp_scaler* s, const amp_tensor* grads, int count,
                                    amp_overflow_info* info) {
    ampi_tensors t = ampi_tensors_of(grads, count);
    amp_overflow_info found;
    int unscaled;
    amp_result r = ampi_scaler_enter(s, &t, "amp_scaler_check");
    if (r == AMP_OK) r = ampi_scaler_unscaled(s, &t, "amp_scaler_check", &unscaled);
    if (r != AMP_OK) return r;
    ampi_check(&t, NULL, unscaled ? 1.0f : s->state.inverse, &found);
    if (ampi_tensors_first(&t)) {
        ampi_scaler_record(s, &found, "amp_scaler_check");
        ampi_scaler_note(s, &t, AMPI_CHECKED, found.norm);
    }
    if (info) *info = found;
    return AMP_OK;
}

/* May this list be unscaled in this window? */
AMPI_FN amp_result ampi_scaler_enter_unscale(amp_scaler* s, const ampi_tensors* t, const char* place) {
    uint64_t unscaled;
    uint32_t done = ampi_scaler_seen(s, t, &unscaled);
    if (done & AMPI_STEPPED)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE,
                         "%s: these gradients were stepped already; call update first", place);
    if (done & AMPI_UNSCALED)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE,
                         "%s: these gradients were unscaled already in this window", place);
    return ampi_scaler_need_room(s, t, place);
}

/* Shared by amp_scaler_unscale and amp_optimizer_unscale. */
AMPI_FN amp_result ampi_scaler_unscale(amp_scaler* s, const ampi_tensors* t, const char* place,
                                       amp_overflow_info* found) {
    ampi_grad_pass pass;
    amp_result r = ampi_scaler_enter_unscale(s, t, place);
    if (r != AMP_OK) return r;
    ampi_check(t, t, s->state.inverse, found);
    if (!ampi_tensors_first(t)) return AMP_OK;
    if (ampi_scaler_record(s, found, place) && s->state.inverse != 1.0f) {
        memset(&pass, 0, sizeof pass);
        pass.src = t; pass.dst = t; pass.inverse = s->state.inverse;
        ampi_each_chunk(t, 1, ampi_unscale_chunk, NULL, &pass);
    }
    ampi_scaler_note(s, t, AMPI_UNSCALED, found->norm);
    return AMP_OK;
}

AMP_DEF amp_result amp_scaler_unscale(amp_scaler* s, const amp_tensor* grads, int count,
                                      amp_overflow_info* info) {
    ampi_tensors t = ampi_tensors_of(grads, count);
    amp_overflow_info found;
    amp_result r = ampi_scaler_enter(s, &t, "amp_scaler_unscale");
    if (r == AMP_OK) r = ampi_scaler_unscale(s, &t, "amp_scaler_unscale", &found);
    if (r == AMP_OK && info) *info = found;
    return r;
}

AMPI_FN amp_result ampi_scaler_into_validate(amp_scaler* s, const ampi_tensors* dst,
                                             const ampi_tensors* src, const char* place) {
    uint64_t unscaled;
    int i;
    amp_result r = ampi_scaler_enter(s, src, place);
    if (r == AMP_OK) r = ampi_tensors_validate(dst, s->desc.logger, place);
    if (r != AMP_OK) return r;
    for (i = 0; i < src->count; i++) {
        amp_tensor x = src->at(src->list, i), y = dst->at(dst->list, i);
        if (x.count != y.count)
            return ampi_fail(s->desc.logger, AMP_ERR_ARGUMENT,
                             "%s: tensor %d: dst has %lu elements, src has %lu", place, i,
                             (unsigned long)y.count, (unsigned long)x.count);
        if (x.count && x.data == y.data)
            return ampi_fail(s->desc.logger, AMP_ERR_ARGUMENT,
                             "%s: tensor %d: dst and src are the same; use amp_scaler_unscale", place, i);
    }
    if (ampi_scaler_seen(s, dst, &unscaled) & AMPI_STEPPED)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE, "%s: dst was stepped already; call update first",
                         place);
    if (ampi_scaler_seen(s, src, &unscaled) & AMPI_UNSCALED)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE, "%s: src was unscaled already in this window",
                         place);
    return ampi_scaler_need_room(s, dst, place);
}

AMP_DEF amp_result amp_scaler_unscale_into(amp_scaler* s, const amp_tensor* dst, const amp_tensor* src,
                                           int count, int accumulate, amp_overflow_info* info) {
    ampi_tensors to = ampi_tensors_of(dst, count), from = ampi_tensors_of(src, count);
    ampi_grad_pass pass;
    amp_overflow_info found;
    amp_result r = ampi_scaler_into_validate(s, &to, &from, "amp_scaler_unscale_into");
    if (r != AMP_OK) return r;
    memset(&pass, 0, sizeof pass);
    pass.src = &from; pass.dst = &to; pass.inverse = s->state.inverse;
    if (accumulate) ampi_check_pass(&from, &to, pass.inverse, ampi_check_sums_chunk, &found);
    else ampi_check(&from, &to, pass.inverse, &found);
    if (ampi_tensors_first(&to)) {
        if (ampi_scaler_record(s, &found, "amp_scaler_unscale_into"))
            ampi_each_chunk(&from, 1, accumulate ? ampi_accumulate_chunk : ampi_unscale_chunk, NULL, &pass);
        ampi_scaler_note(s, &to, AMPI_UNSCALED, found.norm);
    }
    if (info) *info = found;
    return AMP_OK;
}

AMP_DEF amp_result amp_scaler_report_overflow(amp_scaler* s) {
    amp_result r = ampi_scaler_ready(s);
    if (r != AMP_OK) return r;
    ampi_scaler_open(s);
    s->recorded = 1;
    s->info.found_inf = 1;
    if (!s->rule.ignore_overflow) s->state.found_inf = 1;
    return AMP_OK;
}

AMP_DEF int amp_scaler_may_step(const amp_scaler* s) {
    if (!s) return AMP_ERR_ARGUMENT;
    return s->recorded ? !s->state.found_inf : (int)AMP_ERR_STATE;
}

/* What to do about a limit that was reached. */
AMPI_FN amp_result ampi_scaler_limit(const amp_scaler* s, int32_t action, const char* what) {
    if (action == AMP_LIMIT_CLAMP) return AMP_OK;
    if (action == AMP_LIMIT_CALLBACK && s->desc.on_limit(s, s->desc.user_data) == 0) return AMP_OK;
    return ampi_fail(s->desc.logger, AMP_ERR_OVERFLOW,
                     "amp_scaler_update: %s: loss scale %g, %d overflows in a row", what,
                     (double)s->state.scale, (int)s->state.consecutive_skips);
}

/* What amp_scaler_advance returned, as a result. */
AMPI_FN amp_result ampi_scaler_limits(const amp_scaler* s, int hit) {
    amp_result r = AMP_OK;
    if (hit & 1)
        r = ampi_scaler_limit(s, s->rule.at_min, "an overflow although the scale is at its floor");
    if (r == AMP_OK && (hit & 2))
        r = ampi_scaler_limit(s, s->rule.at_max_skips, "more overflows in a row than max_skips");
    return r;
}

AMP_DEF amp_result amp_scaler_update(amp_scaler* s) {
    int hit;
    if (!s) return AMP_ERR_ARGUMENT;
    if (!s->recorded)
        return ampi_fail(
            s->desc.logger, AMP_ERR_STATE,
            "amp_scaler_update: nothing was checked, unscaled or stepped since the last update");
    hit = amp_scaler_advance(&s->rule, &s->state);
    s->scaled = s->recorded = s->list_count = 0;
    return ampi_scaler_limits(s, hit);
}

AMP_DEF amp_result amp_scaler_set_scale(amp_scaler* s, float scale) {
    amp_result r = ampi_scaler_ready(s);
    if (r != AMP_OK) return r;
    if (s->scaled || s->recorded)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE,
                         "amp_scaler_set_scale: not between scale_loss and update");
    if (!ampi_scale_usable(&scale))
        return ampi_fail(s->desc.logger, AMP_ERR_ARGUMENT,
                         "amp_scaler_set_scale: %g must be finite and greater than 2^-128",
                         (double)scale);
    s->state.scale = scale;
    ampi_scaler_use_scale(&s->state);
    return AMP_OK;
}

/* --- save and load ------------------------------------------------------------------------------ */

/* Bytes 0..3 "AMPS", 4..7 version, 8..63 the rule (14 words), 64..79 scale, tracker, hysteresis left,
   skips in a row, 80..95 applied and skipped, 96..123 zero, 124..127 CRC-32 of all before. */
#define AMPI_SCALER_VERSION 1u
#define AMPI_SCALER_CRC_AT (AMP_SCALER_STATE_BYTES - 4)

AMPI_FN void ampi_put32(unsigned char* p, uint32_t u) {
    int i;
    for (i = 0; i < 4; i++) p[i] = (unsigned char)((u >> (8 * i)) & 0xffu);
}
AMPI_FN uint32_t ampi_get32(const unsigned char* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
AMPI_FN void ampi_put64(unsigned char* p, uint64_t u) {
    ampi_put32(p, (uint32_t)u);
    ampi_put32(p + 4, (uint32_t)(u >> 32));
}
AMPI_FN uint64_t ampi_get64(const unsigned char* p) {
    return (uint64_t)ampi_get32(p) | (uint64_t)ampi_get32(p + 4) << 32;
}

/* Row k: what a byte does to the remainder when k more bytes follow. */
AMPI_FN void ampi_crc32_table(uint32_t table[8][256]) {
    uint32_t byte, crc;
    int k;
    for (byte = 0; byte < 256; byte++) {
        for (crc = byte, k = 0; k < 8; k++) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
        table[0][byte] = crc;
    }
    for (k = 1; k < 8; k++)
        for (byte = 0; byte < 256; byte++)
            table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 0xffu];
}
/* CRC-32 (ISO-HDLC, polynomial 0xEDB88320 reflected) of bytes with the CRC `crc` (0 = none) and n more, eight at
   a time. */
AMPI_FN uint32_t ampi_crc32(uint32_t crc, const void* bytes, size_t n) {
    const unsigned char* p = (const unsigned char*)bytes;
    uint32_t table[8][256];
    ampi_crc32_table(table);
    for (crc = ~crc; n >= 8; p += 8, n -= 8) {
        uint32_t low = crc ^ ampi_get32(p), high = ampi_get32(p + 4);
        crc = table[7][low & 0xffu] ^ table[6][low >> 8 & 0xffu] ^ table[5][low >> 16 & 0xffu]
            ^ table[4][low >> 24] ^ table[3][high & 0xffu] ^ table[2][high >> 8 & 0xffu]
            ^ table[1][high >> 16 & 0xffu] ^ table[0][high >> 24];
    }
    for (; n > 0; n--) crc = crc >> 8 ^ table[0][(crc ^ *p++) & 0xffu];
    return ~crc;
}

/* Magic, version and rule: what must be the same on loading. */
#define AMPI_SCALER_HEAD 64
AMPI_FN void ampi_scaler_put_head(const amp_scaler_rule* r, unsigned char* p) {
    const int32_t words[] = {
        r->interval, r->start,     r->hysteresis,   r->guard,           r->refill,
        r->at_min,   r->max_skips, r->at_max_skips, r->ignore_overflow, r->is_static
    };
    int i;
    memcpy(p, "AMPS", 4);
    ampi_put32(p + 4, AMPI_SCALER_VERSION);
    ampi_put32(p + 8, ampi_bits_at(&r->growth));
    ampi_put32(p + 12, ampi_bits_at(&r->backoff));
    ampi_put32(p + 16, ampi_bits_at(&r->min));
    ampi_put32(p + 20, ampi_bits_at(&r->max));
    for (i = 0; i < 10; i++) ampi_put32(p + 24 + 4 * i, (uint32_t)words[i]);
}

AMP_DEF amp_result amp_scaler_save(const amp_scaler* s, void* bytes, size_t size) {
    unsigned char* p = (unsigned char*)bytes;
    amp_result r = ampi_scaler_ready(s);
    if (r != AMP_OK) return r;
    if (!bytes || size < AMP_SCALER_STATE_BYTES)
        return ampi_fail(s->desc.logger, AMP_ERR_ARGUMENT,
                         "amp_scaler_save: %lu bytes are not enough, or NULL", (unsigned long)size);
    if (s->scaled || s->recorded)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE,
                         "amp_scaler_save: not between scale_loss and update");
    memset(p, 0, AMP_SCALER_STATE_BYTES);
    ampi_scaler_put_head(&s->rule, p);
    ampi_put32(p + 64, ampi_bits_at(&s->state.scale));
    ampi_put32(p + 68, (uint32_t)s->state.tracker);
    ampi_put32(p + 72, (uint32_t)s->state.hysteresis_left);
    ampi_put32(p + 76, (uint32_t)s->state.consecutive_skips);
    ampi_put64(p + 80, (uint64_t)s->state.applied);
    ampi_put64(p + 88, (uint64_t)s->state.skipped);
    ampi_put32(p + AMPI_SCALER_CRC_AT, ampi_crc32(0, p, AMPI_SCALER_CRC_AT));
    return AMP_OK;
}

/* What every saved state fulfils: a scale from 0 to infinity, counters that can go on counting. */
AMPI_FN int ampi_scaler_state_is_sound(const amp_scaler_rule* r, const unsigned char* p) {
    int32_t tracker = (int32_t)ampi_get32(p + 68), left = (int32_t)ampi_get32(p + 72);
    return ampi_get32(p + 64) <= 0x7f800000u && tracker >= r->start && left >= 0 && left <= r->hysteresis
        && ampi_get32(p + 76) <= INT32_MAX && ampi_get64(p + 80) < (uint64_t)1 << 62
        && ampi_get64(p + 88) < (uint64_t)1 << 62;
}

AMP_DEF amp_result amp_scaler_load(amp_scaler* s, const void* bytes, size_t size) {
    const unsigned char* p = (const unsigned char*)bytes;
    unsigned char head[AMPI_SCALER_HEAD];
    uint32_t scale;
    amp_result r = ampi_scaler_ready(s);
    if (r != AMP_OK) return r;
    if (s->scaled || s->recorded)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE,
                         "amp_scaler_load: not between scale_loss and update");
    if (!bytes || size != AMP_SCALER_STATE_BYTES)
        return ampi_fail(s->desc.logger, AMP_ERR_FORMAT, "amp_scaler_load: a state has %d bytes, not %lu",
                         AMP_SCALER_STATE_BYTES, bytes ? (unsigned long)size : 0ul);
    ampi_scaler_put_head(&s->rule, head);
    if (memcmp(p, head, 8) != 0 ||
        ampi_get32(p + AMPI_SCALER_CRC_AT) != ampi_crc32(0, p, AMPI_SCALER_CRC_AT))
        return ampi_fail(s->desc.logger, AMP_ERR_FORMAT,
                         "amp_scaler_load: not a scaler state of this version, or damaged");
    if (memcmp(p, head, sizeof head) != 0)
        return ampi_fail(s->desc.logger, AMP_ERR_FORMAT,
                         "amp_scaler_load: the state was saved by a scaler with another rule");
    if (!ampi_scaler_state_is_sound(&s->rule, p))
        return ampi_fail(s->desc.logger, AMP_ERR_FORMAT,
                         "amp_scaler_load: the state holds a scale or a count that no scaler has");
    scale = ampi_get32(p + 64);
    s->state.scale = ampi_float(scale);
    s->state.tracker = (int32_t)ampi_get32(p + 68);
    s->state.hysteresis_left = (int32_t)ampi_get32(p + 72);
    s->state.consecutive_skips = (int32_t)ampi_get32(p + 76);
    s->state.applied = (int64_t)ampi_get64(p + 80);
    s->state.skipped = (int64_t)ampi_get64(p + 88);
    ampi_scaler_use_scale(&s->state);
    ampi_overflow_clear(&s->info);
    return AMP_OK;
}

/* ======================================================================================== */
/* >>impl-optim                                                                               */
/* ======================================================================================== */

/* --- schedule ------------------------------------------------------------------------------- */

/* A product in double that no compiler fuses with a following sum. */
AMPI_HD AMPI_FN double ampi_mul64(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a, b);
#else
    volatile double product = a * b;
    return product;
#endif
}

/* x^n for n >= 0, by repeated squaring. */
AMPI_HD AMPI_FN double ampi_pow_int(double x, int64_t n) {
    double result = 1.0;
    for (; n > 0; n >>= 1) {
        if (n & 1) result = ampi_mul64(result, x);
        x = ampi_mul64(x, x);
    }
    return result;
}

/* sin(pi/2 * u) and cos(pi/2 * u) for u in [0, 1/2]: Taylor series; the first term left out is below
   2^-57. */
AMPI_HD AMPI_FN double ampi_quarter_series(double u, int odd) {
    double y = ampi_mul64(1.5707963267948966, u), y2 = ampi_mul64(y, y), sum = 1.0;
    int k;
    for (k = 16 + odd; k > 1; k -= 2) sum = 1.0 - ampi_mul64(y2 / (double)(k * (k - 1)), sum);
    return odd ? ampi_mul64(y, sum) : sum;
}

/* (1 + cos(pi * part / whole)) / 2 = cos(pi/2 * part/whole)^2, relatively exact down to the end. */
AMPI_HD AMPI_FN double ampi_cosine_factor(int64_t part, int64_t whole) {
    double c = part <= whole - part ? ampi_quarter_series((double)part / (double)whole, 0)
                                    : ampi_quarter_series((double)(whole - part) / (double)whole, 1);
    return ampi_mul64(c, c);
}

AMPI_HD AMPI_FN double ampi_schedule_factor(const amp_schedule* s, int64_t t) {
    int64_t warmup = s->warmup_steps > 0 ? s->warmup_steps : 0, after = t - warmup;
    int64_t whole = s->total_steps > warmup ? s->total_steps - warmup : 0;
    double floor_factor = (double)s->floor;
    if (after < 0) return (double)(t + 1) / ((double)warmup + 1.0);
    switch (s->kind) {
        case AMP_SCHEDULE_STEP:
            return ampi_pow_int(ampi_is_zero(&s->gamma) ? (double)0.1f : (double)s->gamma,
                                s->step_size > 0 ? after / s->step_size : 0);
        case AMP_SCHEDULE_LINEAR:
            return after >= whole ? floor_factor
                                  : 1.0 - ampi_mul64(1.0 - floor_factor, (double)after / (double)whole);
        case AMP_SCHEDULE_COSINE:
            return after >= whole
                       ? floor_factor
                       : floor_factor + ampi_mul64(1.0 - floor_factor, ampi_cosine_factor(after, whole));
        case AMP_SCHEDULE_CONSTANT: case AMPI_SCHEDULE_MAX: break;
    }
    return 1.0;
}

AMPI_HD AMP_DEF float amp_schedule_lr(const amp_schedule* s, float base_lr, int64_t t) {
    return s ? (float)ampi_mul64((double)base_lr, ampi_schedule_factor(s, t < 0 ? 0 : t)) : base_lr;
}

/* --- validation ------------------------------------------------------------------------------- */

/* low <= *p <= high, on a value whose bits are finite. */
AMPI_FN int ampi_in_range(const float* p, float low, float high) {
    return ampi_is_finite(p) && *p >= low && *p <= high;
}
/* Rates that must stay below one. */
#define AMPI_BELOW_ONE 0.99999994f

AMPI_HD AMPI_FN float ampi_default_at(const float* p, float value) {
    return ampi_is_zero(p) ? value : ampi_is_off(p) ? 0.0f : *p;
}

AMPI_FN void ampi_optimizer_fill(amp_optimizer_desc* d) {
    d->lr = ampi_default_at(&d->lr, d->kind == AMP_SGD ? 0.01f : 0.001f);
    d->momentum = ampi_default_at(&d->momentum, 0.0f);
    d->dampening = ampi_default_at(&d->dampening, 0.0f);
    d->beta1 = ampi_default_at(&d->beta1, 0.9f);
    d->beta2 = ampi_default_at(&d->beta2, 0.999f);
    if (ampi_is_zero(&d->eps)) d->eps = d->kind == AMP_LAMB ? 1e-6f : 1e-8f;
    d->weight_decay = ampi_default_at(&d->weight_decay, d->kind == AMP_ADAMW ? 0.01f : 0.0f);
    if (ampi_is_zero(&d->schedule.gamma)) d->schedule.gamma = 0.1f;
}

AMPI_FN amp_result ampi_schedule_validate(const amp_schedule* s, const amp_logger* logger) {
    int ends = s->kind == AMP_SCHEDULE_LINEAR || s->kind == AMP_SCHEDULE_COSINE;
    AMPI_REFUSE_DESC((unsigned)s->kind > (unsigned)AMP_SCHEDULE_COSINE,
                     "optimizer: schedule.kind %d is not an amp_schedule_kind", (int)s->kind);
    AMPI_REFUSE_DESC(s->warmup_steps < 0, "optimizer: schedule.warmup_steps %ld is negative",
                     (long)s->warmup_steps);
    AMPI_REFUSE_DESC(ends && s->total_steps <= s->warmup_steps,
                     "optimizer: schedule.total_steps %ld must be greater than warmup_steps %ld",
                     (long)s->total_steps, (long)s->warmup_steps);
    AMPI_REFUSE_DESC(s->kind == AMP_SCHEDULE_STEP && s->step_size < 1,
                     "optimizer: schedule.step_size %ld must be at least 1", (long)s->step_size);
    AMPI_REFUSE_DESC(!ampi_in_range(&s->gamma, 0.0f, 1.0f),
                     "optimizer: schedule.gamma %g must lie in (0,1]", (double)s->gamma);
    AMPI_REFUSE_DESC(!ampi_in_range(&s->floor, 0.0f, 1.0f),
                     "optimizer: schedule.floor %g must lie in [0,1]", (double)s->floor);
    return AMP_OK;
}

/* Ranges, after the defaults were filled in. */
AMPI_FN amp_result ampi_optimizer_validate(const amp_optimizer_desc* d) {
    const amp_logger* logger = d->logger;
    AMPI_REFUSE_DESC((unsigned)d->kind > (unsigned)AMP_LAMB,
                     "optimizer: kind %d is not an amp_optimizer_kind", (int)d->kind);
    AMPI_REFUSE_DESC(!ampi_in_range(&d->lr, 0.0f, AMPI_FLT_MAX),
                     "optimizer: lr %g must be finite and not negative", (double)d->lr);
    AMPI_REFUSE_DESC(!ampi_in_range(&d->momentum, 0.0f, AMPI_BELOW_ONE),
                     "optimizer: momentum %g must lie in [0,1)", (double)d->momentum);
    AMPI_REFUSE_DESC(!ampi_in_range(&d->dampening, 0.0f, 1.0f),
                     "optimizer: dampening %g must lie in [0,1]", (double)d->dampening);
    AMPI_REFUSE_DESC(d->nesterov && (d->momentum <= 0.0f || d->dampening > 0.0f),
                     "optimizer: nesterov needs momentum > 0 and no dampening, not %g and %g",
                     (double)d->momentum, (double)d->dampening);
    AMPI_REFUSE_DESC(!ampi_in_range(&d->beta1, 0.0f, AMPI_BELOW_ONE),
                     "optimizer: beta1 %g must lie in [0,1)", (double)d->beta1);
    AMPI_REFUSE_DESC(!ampi_in_range(&d->beta2, 0.0f, AMPI_BELOW_ONE),
                     "optimizer: beta2 %g must lie in [0,1)", (double)d->beta2);
    AMPI_REFUSE_DESC(!ampi_in_range(&d->eps, AMPI_FLT_MIN, AMPI_FLT_MAX),
                     "optimizer: eps %g must be finite and positive", (double)d->eps);
    AMPI_REFUSE_DESC(!ampi_in_range(&d->weight_decay, 0.0f, AMPI_FLT_MAX),
                     "optimizer: weight_decay %g must be finite and not negative",
                     (double)d->weight_decay);
    AMPI_REFUSE_DESC(!ampi_in_range(&d->clip_norm, 0.0f, AMPI_FLT_MAX),
                     "optimizer: clip_norm %g must be finite and positive", (double)d->clip_norm);
    AMPI_REFUSE_DESC(
        d->group_count < 0 || d->group_count > AMP_MAX_GROUPS || (d->group_count > 0 && !d->groups),
        "optimizer: group_count %d must lie in 0..%d, with groups given", d->group_count, AMP_MAX_GROUPS);
    return ampi_schedule_validate(&d->schedule, logger);
}

AMPI_FN amp_result ampi_groups_validate(const amp_optimizer_desc* d) {
    const amp_logger* logger = d->logger;
    int i;
    for (i = 0; i < d->group_count; i++) {
        const amp_param_group* g = &d->groups[i];
        AMPI_REFUSE_DESC(!ampi_is_off(&g->lr) && !ampi_in_range(&g->lr, 0.0f, AMPI_FLT_MAX),
                         "optimizer: group %d: lr %g must be finite and not negative", i, (double)g->lr);
        AMPI_REFUSE_DESC(!ampi_is_off(&g->weight_decay) &&
                             !ampi_in_range(&g->weight_decay, 0.0f, AMPI_FLT_MAX),
                         "optimizer: group %d: weight_decay %g must be finite and not negative", i,
                         (double)g->weight_decay);
    }
    return AMP_OK;
}

AMPI_FN int ampi_moment_count(const amp_optimizer_desc* d) {
    return d->kind != AMP_SGD ? 2 : d->momentum > 0.0f ? 1 : 0;
}

AMP_DEF int amp_optimizer_moments(const amp_optimizer_desc* desc) {
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    ampi_optimizer_fill(&d);
    return ampi_optimizer_validate(&d) == AMP_OK ? ampi_moment_count(&d) : -1;
}

AMPI_FN int ampi_param_frozen(const amp_optimizer* o, const amp_param* p) {
    return ampi_is_off(&o->groups[p->group].lr);
}

#define AMPI_REFUSE_PARAM(condition, code, what)                                              \
    do {                                                                                      \
        if (condition)                                                                        \
            return ampi_fail(logger, code, "optimizer: parameter %d (%s): " what, i,          \
                             p->name ? p->name : "no name");                                  \
    } while (0)

AMPI_FN amp_result ampi_param_validate(const amp_optimizer* o, const amp_param* p, int i) {
    const amp_logger* logger = o->desc.logger;
    int groups = o->desc.group_count > 0 ? o->desc.group_count : 1, moments = ampi_moment_count(&o->desc);
    AMPI_REFUSE_PARAM(p->group < 0 || p->group >= groups, AMP_ERR_ARGUMENT, "its group does not exist");
    AMPI_REFUSE_PARAM(!ampi_is_compute_dtype(p->grad_dtype), AMP_ERR_DTYPE,
                      "grad_dtype must be F32, F16 or BF16");
    AMPI_REFUSE_PARAM(p->low && p->low_dtype != AMP_F16 && p->low_dtype != AMP_BF16, AMP_ERR_DTYPE,
                      "low_dtype must be F16 or BF16");
    if (p->count == 0) return AMP_OK;
    AMPI_REFUSE_PARAM(p->count > SIZE_MAX / 16, AMP_ERR_ARGUMENT, "no memory holds that many elements");
    AMPI_REFUSE_PARAM(!p->master && !p->low, AMP_ERR_ARGUMENT, "neither master nor low is given");
    if (ampi_param_frozen(o, p)) return AMP_OK;
    AMPI_REFUSE_PARAM(!p->grad, AMP_ERR_ARGUMENT, "grad is NULL");
    AMPI_REFUSE_PARAM(moments > 0 && !p->m, AMP_ERR_ARGUMENT, "m is NULL, but this optimizer needs it");
    AMPI_REFUSE_PARAM(moments > 1 && !p->v, AMP_ERR_ARGUMENT, "v is NULL, but this optimizer needs it");
    return AMP_OK;
}

AMPI_FN amp_result ampi_params_validate(const amp_optimizer* o, const amp_param* params, int count) {
    amp_result r = AMP_OK;
    int i;
    if (!params || count < 1)
        return ampi_fail(o->desc.logger, AMP_ERR_ARGUMENT, "optimizer: no parameters (count %d)", count);
    for (i = 0; i < count && r == AMP_OK; i++) r = ampi_param_validate(o, &params[i], i);
    return r;
}

/* All of amp_optimizer_init but the low copies: nothing that params point to is touched. */
AMPI_FN amp_result ampi_optimizer_make(amp_optimizer* o, const amp_optimizer_desc* desc, amp_param* params,
                                       int count, const char* place) {
    amp_optimizer made;
    amp_result r;
    int i;
    memset(&made, 0, sizeof made);
    if (desc) made.desc = *desc;
    if (!o)
        return ampi_fail(made.desc.logger, AMP_ERR_ARGUMENT, "%s: the optimizer is NULL", place);
    ampi_optimizer_fill(&made.desc);
    r = ampi_optimizer_validate(&made.desc);
    if (r == AMP_OK) r = ampi_groups_validate(&made.desc);
    if (r != AMP_OK) return r;
    for (i = 0; i < made.desc.group_count; i++) made.groups[i] = made.desc.groups[i];
    made.desc.groups = NULL;
    r = ampi_params_validate(&made, params, count);
    if (r != AMP_OK) return r;
    made.params = params;
    made.count = count;
    made.state.lr = made.desc.lr;
    *o = made;
    return AMP_OK;
}

AMP_DEF amp_result amp_optimizer_init(amp_optimizer* o, const amp_optimizer_desc* desc, amp_param* params,
                                      int count) {
    amp_result r = ampi_optimizer_make(o, desc, params, count, "amp_optimizer_init");
    int i;
    for (i = 0; r == AMP_OK && i < count; i++)
        if (params[i].master && params[i].low)
            ampi_store_f32(params[i].low, params[i].low_dtype, 0, params[i].master, params[i].count);
    return r;
}

/* --- kernels ------------------------------------------------------------------------------------ */

/* Constants of one step for one group; all products and quotients of them were formed in double. */
typedef struct ampi_update {
    float mult;             /* gradient factor: clip coefficient / loss scale; negative to ascend */
    float l2;               /* added to the gradient: l2 * w */
    float b1, c1, b2, c2;   /* m = b1*m + c1*g, v = b2*v + c2*g^2 */
    float r1, r2, eps;      /* bias corrections 1/(1-b1^t), 1/sqrt(1-b2^t) */
    float buf, raw;         /* SGD: direction buf*m + raw*g */
    float wd;               /* LAMB: direction + wd*w */
    float decay, step;      /* w = decay*w + step*direction; step is negative */
    int   frozen;
} ampi_update;

typedef void (*ampi_update_fn)(float* w, float* g, float* m, float* v, size_t n, const ampi_update* u);

/* The same few operations on 16, 8, 4 or 1 floats. flush: a value with exponent zero becomes +0. fetch: some lines
   ahead, as the processor's own prefetchers do not keep up with four arrays. end: what a kernel ends with. */
#define ampi_v_scalar float
#define ampi_load_scalar(p) (*(p))
#define ampi_put_scalar(p, x) (*(p) = (x))
#define ampi_set_scalar(x) (x)
#define ampi_mul_scalar(a, b) ((a) * (b))
#define ampi_div_scalar(a, b) ((a) / (b))
#define ampi_fetch_scalar(p) ((void)0)
#define ampi_end_scalar() ((void)0)
#define ampi_sqrt_scalar(a) sqrtf(a)
#define ampi_fma_scalar(a, b, c) ampi_fma(AMPI_FMA_NATIVE, a, b, c)
AMPI_HD AMPI_INLINE float ampi_flush_scalar(float x) {
    return (ampi_bits(x) & 0x7f800000u) ? x : 0.0f;
}

#if AMPI_X86
#define ampi_v_avx2 __m256
#define ampi_load_avx2 _mm256_loadu_ps
#define ampi_put_avx2 _mm256_storeu_ps
#define ampi_set_avx2 _mm256_set1_ps
#define ampi_mul_avx2 _mm256_mul_ps
#define ampi_div_avx2 _mm256_div_ps
#define ampi_fetch_avx2(p) _mm_prefetch((const char*)(p) + 1024, _MM_HINT_T0)
#define ampi_end_avx2 ampi_clear_upper
#define ampi_sqrt_avx2 _mm256_sqrt_ps
#define ampi_fma_avx2 _mm256_fmadd_ps
AMPI_TARGET_AVX2 AMPI_INLINE __m256 ampi_flush_avx2(__m256 x) {
    __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7f800000));
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256())), x);
}
#define ampi_v_avx512 __m512
#define ampi_load_avx512 _mm512_loadu_ps
#define ampi_put_avx512 _mm512_storeu_ps
#define ampi_set_avx512 _mm512_set1_ps
#define ampi_mul_avx512 _mm512_mul_ps
#define ampi_div_avx512 _mm512_div_ps
#define ampi_fetch_avx512 ampi_fetch_avx2
#define ampi_end_avx512 ampi_clear_upper
/* gcc 12 warns about the plain _mm512_sqrt_ps. */
#define ampi_sqrt_avx512(a) _mm512_maskz_sqrt_ps((__mmask16)0xffff, a)
#define ampi_fma_avx512 _mm512_fmadd_ps
AMPI_TARGET_AVX512 AMPI_INLINE __m512 ampi_flush_avx512(__m512 x) {
    return _mm512_maskz_mov_ps(
        _mm512_test_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000)), x);
}
#endif

#if AMPI_NEON
#define ampi_v_neon float32x4_t
#define ampi_load_neon vld1q_f32
#define ampi_put_neon vst1q_f32
#define ampi_set_neon vdupq_n_f32
#define ampi_mul_neon vmulq_f32
#define ampi_div_neon vdivq_f32
#define ampi_fetch_neon(p) ((void)0)
#define ampi_end_neon() ((void)0)
#define ampi_sqrt_neon vsqrtq_f32
#define ampi_fma_neon(a, b, c) vfmaq_f32(c, a, b)
AMPI_INLINE float32x4_t ampi_flush_neon(float32x4_t x) {
    uint32x4_t u = vreinterpretq_u32_f32(x);
    return vreinterpretq_f32_u32(vandq_u32(u, vtstq_u32(u, vdupq_n_u32(0x7f800000u))));
}
#endif

/* The kernels of one instruction set, as functions of the signature ampi_update_fn. n is a multiple of
   16; there is no sum outside an fma. lamb_moments leaves the direction in g, lamb_direction forms it
   again from the moments. */
#define AMPI_UPDATE_PARAMS float *w, float *g, float *m, float *v, size_t n, const ampi_update *u
#define AMPI_OPTIMIZER_KERNELS(isa, target, lanes)                                                       \
    typedef ampi_v_##isa ampi_vector_##isa;                                                              \
    /* mult*g + l2*w */                                                                                  \
    target AMPI_INLINE ampi_vector_##isa ampi_gradient_##isa(const float* w, const float* g,             \
                                                             const ampi_update* u) {                     \
        ampi_fetch_##isa(w);                                                                             \
        ampi_fetch_##isa(g);                                                                             \
        return ampi_fma_##isa(ampi_set_##isa(u->l2), ampi_load_##isa(w),                                 \
                              ampi_mul_##isa(ampi_set_##isa(u->mult), ampi_load_##isa(g)));              \
    }                                                                                                    \
    /* m = b1*m + c1*g */                                                                                \
    target AMPI_INLINE ampi_vector_##isa ampi_first_moment_##isa(float* m, ampi_vector_##isa g,          \
                                                                 const ampi_update* u) {                 \
        ampi_vector_##isa part = ampi_mul_##isa(ampi_set_##isa(u->c1), g);                               \
        ampi_vector_##isa x = ampi_fma_##isa(ampi_set_##isa(u->b1), ampi_load_##isa(m), part);           \
        x = ampi_flush_##isa(x);                                                                         \
        ampi_fetch_##isa(m);                                                                             \
        ampi_put_##isa(m, x);                                                                            \
        return x;                                                                                        \
    }                                                                                                    \
    /* v = b2*v + c2*g*g */                                                                              \
    target AMPI_INLINE ampi_vector_##isa ampi_second_moment_##isa(float* v, ampi_vector_##isa g,         \
                                                                  const ampi_update* u) {                \
        ampi_vector_##isa part = ampi_mul_##isa(ampi_set_##isa(u->b2), ampi_load_##isa(v));              \
        ampi_vector_##isa x = ampi_fma_##isa(ampi_mul_##isa(ampi_set_##isa(u->c2), g), g, part);         \
        x = ampi_flush_##isa(x);                                                                         \
        ampi_fetch_##isa(v);                                                                             \
        ampi_put_##isa(v, x);                                                                            \
        return x;                                                                                        \
    }                                                                                                    \
    /* m / (sqrt(v)*r2 + eps) */                                                                         \
    target AMPI_INLINE ampi_vector_##isa ampi_quotient_##isa(ampi_vector_##isa m, ampi_vector_##isa v,   \
                                                             const ampi_update* u) {                     \
        return ampi_div_##isa(m, ampi_fma_##isa(ampi_sqrt_##isa(v), ampi_set_##isa(u->r2),               \
                                                ampi_set_##isa(u->eps)));                                \
    }                                                                                                    \
    /* w = decay*w + step*direction */                                                                   \
    target AMPI_INLINE void ampi_move_##isa(float* w, ampi_vector_##isa direction, const ampi_update* u) { \
        ampi_vector_##isa kept = ampi_mul_##isa(ampi_load_##isa(w), ampi_set_##isa(u->decay));           \
        ampi_put_##isa(w, ampi_fma_##isa(ampi_set_##isa(u->step), direction, kept));                     \
    }                                                                                                    \
    target AMPI_FN void ampi_sgd_##isa(AMPI_UPDATE_PARAMS) {                                             \
        size_t i;                                                                                        \
        (void)m; (void)v;                                                                                \
        for (i = 0; i < n; i += lanes) ampi_move_##isa(w + i, ampi_gradient_##isa(w + i, g + i, u), u);  \
        ampi_end_##isa();                                                                                \
    }                                                                                                    \
    target AMPI_FN void ampi_momentum_##isa(AMPI_UPDATE_PARAMS) {                                        \
        size_t i;                                                                                        \
        (void)v;                                                                                         \
        for (i = 0; i < n; i += lanes) {                                                                 \
            ampi_vector_##isa x = ampi_gradient_##isa(w + i, g + i, u);                                  \
            ampi_vector_##isa buffer = ampi_first_moment_##isa(m + i, x, u);                             \
            ampi_vector_##isa part = ampi_mul_##isa(ampi_set_##isa(u->raw), x);                          \
            ampi_move_##isa(w + i, ampi_fma_##isa(ampi_set_##isa(u->buf), buffer, part), u);             \
        }                                                                                                \
        ampi_end_##isa();                                                                                \
    }                                                                                                    \
    target AMPI_FN void ampi_adam_##isa(AMPI_UPDATE_PARAMS) {                                            \
        size_t i;                                                                                        \
        for (i = 0; i < n; i += lanes) {                                                                 \
            ampi_vector_##isa x = ampi_gradient_##isa(w + i, g + i, u);                                  \
            ampi_vector_##isa first = ampi_first_moment_##isa(m + i, x, u);                              \
            ampi_vector_##isa second = ampi_second_moment_##isa(v + i, x, u);                            \
            ampi_move_##isa(w + i, ampi_quotient_##isa(first, second, u), u);                            \
        }                                                                                                \
        ampi_end_##isa();                                                                                \
    }                                                                                                    \
    target AMPI_FN void ampi_lamb_direction_##isa(AMPI_UPDATE_PARAMS) {                                  \
        size_t i;                                                                                        \
        for (i = 0; i < n; i += lanes) {                                                                 \
            ampi_vector_##isa first = ampi_mul_##isa(ampi_load_##isa(m + i), ampi_set_##isa(u->r1));     \
            ampi_vector_##isa x = ampi_quotient_##isa(first, ampi_load_##isa(v + i), u);                 \
            ampi_put_##isa(g + i, ampi_fma_##isa(ampi_set_##isa(u->wd), ampi_load_##isa(w + i), x));     \
        }                                                                                                \
        ampi_end_##isa();                                                                                \
    }                                                                                                    \
    target AMPI_FN void ampi_lamb_moments_##isa(AMPI_UPDATE_PARAMS) {                                    \
        size_t i;                                                                                        \
        for (i = 0; i < n; i += lanes) {                                                                 \
            ampi_vector_##isa x = ampi_gradient_##isa(w + i, g + i, u);                                  \
            ampi_first_moment_##isa(m + i, x, u);                                                        \
            ampi_second_moment_##isa(v + i, x, u);                                                       \
        }                                                                                                \
        ampi_lamb_direction_##isa(w, g, m, v, n, u);                                                     \
    }

AMPI_OPTIMIZER_KERNELS(scalar, AMPI_HD, 1)
#if AMPI_X86
AMPI_OPTIMIZER_KERNELS(avx2, AMPI_TARGET_AVX2, 8)
AMPI_OPTIMIZER_KERNELS(avx512, AMPI_TARGET_AVX512, 16)
#endif
#if AMPI_NEON
AMPI_OPTIMIZER_KERNELS(neon, , 4)
#endif

typedef enum ampi_update_kind {
    AMPI_UPDATE_SGD, AMPI_UPDATE_MOMENTUM, AMPI_UPDATE_ADAM, AMPI_LAMB_MOMENTS, AMPI_LAMB_DIRECTION
} ampi_update_kind;

#define AMPI_UPDATE_ROW(isa) \
    { \
        ampi_sgd_##isa, ampi_momentum_##isa, ampi_adam_##isa, ampi_lamb_moments_##isa, \
            ampi_lamb_direction_##isa \
    }
AMPI_FN ampi_update_fn ampi_update_kernel(ampi_update_kind kind) {
    static const ampi_update_fn scalar[] = AMPI_UPDATE_ROW(scalar);
#if AMPI_X86
    static const ampi_update_fn avx2[] = AMPI_UPDATE_ROW(avx2), avx512[] = AMPI_UPDATE_ROW(avx512);
    if (ampi_simd() == AMP_ISA_AVX512) return avx512[kind];
    if (ampi_simd() == AMP_ISA_AVX2) return avx2[kind];
#elif AMPI_NEON
    static const ampi_update_fn neon[] = AMPI_UPDATE_ROW(neon);
    if (ampi_simd() == AMP_ISA_NEON) return neon[kind];
#endif
    return scalar[kind];
}

/* Runs a kernel on any n: the rest after the last 16 goes through padded copies. */
AMPI_FN void ampi_update_run(ampi_update_kind kind, float* w, float* g, float* m, float* v, size_t n,
                             const ampi_update* u) {
    ampi_update_fn fn = ampi_update_kernel(kind);
    size_t whole = n - n % 16, rest = (n - whole) * sizeof(float);
    float pad[4][16];
    fn(w, g, m, v, whole, u);
    if (rest == 0) return;
    memset(pad, 0, sizeof pad);
    memcpy(pad[0], w + whole, rest);
    memcpy(pad[1], g + whole, rest);
    if (m) memcpy(pad[2], m + whole, rest);
    if (v) memcpy(pad[3], v + whole, rest);
    fn(pad[0], pad[1], pad[2], pad[3], 16, u);
    memcpy(w + whole, pad[0], rest);
    if (kind >= AMPI_LAMB_MOMENTS) memcpy(g + whole, pad[1], rest);
    if (m) memcpy(m + whole, pad[2], rest);
    if (v) memcpy(v + whole, pad[3], rest);
}

/* --- passes over the parameters ------------------------------------------------------------------ */

AMPI_FN amp_tensor ampi_grad_at(const void* list, int i) {
    const amp_param* p = (const amp_param*)list + i;
    amp_tensor t;
    t.data = p->grad; t.dtype = p->grad_dtype; t.count = p->grad ? p->count : 0; t.name = p->name;
    return t;
}
AMPI_FN ampi_tensors ampi_grads_of(const amp_param* params, int count) {
    ampi_tensors t;
    t.list = params; t.count = count; t.at = ampi_grad_at;
    return t;
}

typedef struct ampi_step {
    const amp_param* params;        /* the pass's first parameter */
    const ampi_update* updates;     /* by group */
    ampi_update_kind kind;
    double w_sum, direction_sum;    /* LAMB: sums of squares */
    float trust;                    /* LAMB: -lr * ratio */
} ampi_step;

/* Weights of a block as floats: the master's, or the low ones widened. And back, both copies. */
AMPI_FN float* ampi_weights(const amp_param* p, size_t i, size_t n, float* tile) {
    if (p->master) return p->master + i;
    ampi_load_f32(tile, p->low, p->low_dtype, i, n);
    return tile;
}

AMPI_FN void ampi_update_chunk(void* context, ampi_chunk* c) {
    const ampi_step* step = (const ampi_step*)context;
    const amp_param* p = &step->params[c->tensor];
    const ampi_update* u = &step->updates[p->group];
    float w_tile[AMPI_BLOCK], g_tile[AMPI_BLOCK];
    size_t i, n;
    for (i = c->offset; i < c->offset + c->n && !u->frozen; i += n) {
        float *w, *g = g_tile;
        n = ampi_block_size(c, i);
        w = ampi_weights(p, i, n, w_tile);
        if (ampi_dtype(p->grad_dtype) == AMP_F32) g = (float*)p->grad + i;
        else ampi_load_f32(g_tile, p->grad, p->grad_dtype, i, n);
        ampi_update_run(step->kind, w, g, p->m ? p->m + i : NULL, p->v ? p->v + i : NULL, n, u);
        if (p->low) ampi_store_f32(p->low, p->low_dtype, i, w, n);
    }
}

/* LAMB, first pass: moments, and the norms of weights and direction. */
AMPI_FN void ampi_lamb_moments_chunk(void* context, ampi_chunk* c) {
    const ampi_step* step = (const ampi_step*)context;
    const amp_param* p = &step->params[c->tensor];
    float w_tile[AMPI_BLOCK], g[AMPI_BLOCK];
    uint32_t ignored = 0;
    size_t i, n;
    for (i = c->offset; i < c->offset + c->n; i += n) {
        float* w;
        n = ampi_block_size(c, i);
        w = ampi_weights(p, i, n, w_tile);
        ampi_load_f32(g, p->grad, p->grad_dtype, i, n);
        ampi_update_run(AMPI_LAMB_MOMENTS, w, g, p->m + i, p->v + i, n, &step->updates[p->group]);
        ampi_scan_f32(w, n, 0x7f7fffffu, &c->sum, &ignored);
        ampi_scan_f32(g, n, 0x7f7fffffu, &c->sum2, &ignored);
    }
}
AMPI_FN void ampi_lamb_combine(void* context, ampi_chunk* c) {
    ampi_step* step = (ampi_step*)context;
    step->w_sum += c->sum;
    step->direction_sum += c->sum2;
}

/* LAMB, second pass: w += trust * direction. */
AMPI_FN void ampi_lamb_move_chunk(void* context, ampi_chunk* c) {
    const ampi_step* step = (const ampi_step*)context;
    const amp_param* p = &step->params[c->tensor];
    float w_tile[AMPI_BLOCK], direction[AMPI_BLOCK];
    size_t i, n;
    for (i = c->offset; i < c->offset + c->n; i += n) {
        float* w;
        n = ampi_block_size(c, i);
        w = ampi_weights(p, i, n, w_tile);
        ampi_update_run(AMPI_LAMB_DIRECTION, w, direction, p->m + i, p->v + i, n,
                        &step->updates[p->group]);
        ampi_axpy_f32(w, direction, n, step->trust);
        if (p->low) ampi_store_f32(p->low, p->low_dtype, i, w, n);
    }
}

AMPI_FN void ampi_lamb_step(const amp_optimizer* o, const ampi_update* updates) {
    int i;
    for (i = 0; i < o->count; i++) {
        ampi_tensors t = ampi_grads_of(&o->params[i], 1);
        const ampi_update* u = &updates[o->params[i].group];
        ampi_step step;
        double ratio = 1.0;
        if (u->frozen) continue;
        memset(&step, 0, sizeof step);
        step.params = &o->params[i];
        step.updates = updates;
        ampi_each_chunk(&t, 1, ampi_lamb_moments_chunk, ampi_lamb_combine, &step);
        if (step.w_sum > 0.0 && step.direction_sum > 0.0)
            ratio = sqrt(step.w_sum) / sqrt(step.direction_sum);
        step.trust = (float)ampi_mul64((double)u->step, ratio);
        ampi_each_chunk(&t, 1, ampi_lamb_move_chunk, NULL, &step);
    }
}

/* --- the step ------------------------------------------------------------------------------------- */

AMPI_HD AMPI_FN void ampi_update_of_sgd(ampi_update* u, const amp_optimizer* o) {
    const amp_optimizer_desc* d = &o->desc;
    int first = o->state.step == 0;     /* the buffer starts as the gradient itself */
    u->b1 = first ? 0.0f : d->momentum;
    u->c1 = first ? 1.0f : (float)(1.0 - (double)d->dampening);
    u->buf = d->nesterov ? d->momentum : 1.0f;
    u->raw = d->nesterov ? 1.0f : 0.0f;
}

/* Bias corrections by b^t with t counted from 1. Products of two floats are exact in double. */
AMPI_HD AMPI_FN void ampi_update_of_adam(ampi_update* u, const amp_optimizer* o, float lr, float wd) {
    const amp_optimizer_desc* d = &o->desc;
    double correction1 = 1.0 - ampi_pow_int((double)d->beta1, o->state.step + 1);
    double correction2 = 1.0 - ampi_pow_int((double)d->beta2, o->state.step + 1);
    u->b1 = d->beta1;
    u->b2 = d->beta2;
    u->c1 = (float)(1.0 - (double)d->beta1);
    u->c2 = (float)(1.0 - (double)d->beta2);
    u->r1 = (float)(1.0 / correction1);
    u->r2 = (float)(1.0 / sqrt(correction2));
    u->eps = d->eps;
    if (d->kind != AMP_LAMB) u->step = (float)(-(double)lr / correction1);
    if (d->kind == AMP_ADAMW) u->decay = (float)(1.0 - (double)lr * (double)wd);
    if (d->kind == AMP_LAMB) u->wd = wd;
    if (d->kind != AMP_ADAM) u->l2 = 0.0f;
}

/* The constants of this step for one group. */
AMPI_HD AMPI_FN void ampi_update_of_group(ampi_update* u, const amp_optimizer* o, const amp_param_group* g,
                                          float mult) {
    float base = ampi_is_zero(&g->lr) ? o->state.lr : g->lr;
    float lr = amp_schedule_lr(&o->desc.schedule, base, o->state.step);
    float wd = ampi_default_at(&g->weight_decay, o->desc.weight_decay);
    memset(u, 0, sizeof *u);
    u->frozen = ampi_is_off(&g->lr);
    u->mult = o->desc.maximize ? -mult : mult;
    u->l2 = wd;
    u->decay = 1.0f;
    u->step = -lr;
    if (o->desc.kind == AMP_SGD) ampi_update_of_sgd(u, o);
    else ampi_update_of_adam(u, o, lr, wd);
}

AMPI_FN void ampi_optimizer_apply(amp_optimizer* o, float mult) {
    ampi_update updates[AMP_MAX_GROUPS];
    ampi_tensors t = ampi_grads_of(o->params, o->count);
    ampi_step step;
    int i;
    for (i = 0; i < AMP_MAX_GROUPS; i++) ampi_update_of_group(&updates[i], o, &o->groups[i], mult);
    if (o->desc.kind == AMP_LAMB) {
        ampi_lamb_step(o, updates);
    } else {
        memset(&step, 0, sizeof step);
        step.params = o->params;
        step.updates = updates;
        step.kind = o->desc.kind != AMP_SGD   ? AMPI_UPDATE_ADAM
                    : o->desc.momentum > 0.0f ? AMPI_UPDATE_MOMENTUM
                                              : AMPI_UPDATE_SGD;
        ampi_each_chunk(&t, 1, ampi_update_chunk, NULL, &step);
    }
    o->state.step++;
}

/* The parameters may have changed since init: they are the caller's. */
AMPI_FN amp_result ampi_optimizer_enter(const amp_optimizer* o, ampi_tensors* t, const char* place) {
    amp_result r;
    if (!o || !o->params) return AMP_ERR_ARGUMENT;
    r = ampi_params_validate(o, o->params, o->count);
    if (r != AMP_OK) return r;
    *t = ampi_grads_of(o->params, o->count);
    if (!ampi_tensors_first(t))
        return ampi_fail(o->desc.logger, AMP_ERR_STATE, "%s: no parameter has a gradient", place);
    return AMP_OK;
}

AMP_DEF amp_result amp_optimizer_unscale(amp_optimizer* o, amp_scaler* s) {
    static const char place[] = "amp_optimizer_unscale";
    amp_overflow_info found;
    ampi_tensors t;
    amp_result r = ampi_optimizer_enter(o, &t, place);
    if (r == AMP_OK && !s) return ampi_fail(o->desc.logger, AMP_ERR_ARGUMENT, "%s: the scaler is NULL", place);
    if (r == AMP_OK) r = ampi_scaler_enter(s, &t, place);
    return r == AMP_OK ? ampi_scaler_unscale(s, &t, place, &found) : r;
}

/* May these gradients be stepped in this window, and are they unscaled already? */
AMPI_FN amp_result ampi_optimizer_enter_window(amp_scaler* s, const ampi_tensors* t, const char* place,
                                               int* all_unscaled) {
    uint64_t unscaled;
    amp_result r = ampi_scaler_enter(s, t, place);
    if (r != AMP_OK) return r;
    if (ampi_scaler_seen(s, t, &unscaled) & AMPI_STEPPED)
        return ampi_fail(s->desc.logger, AMP_ERR_STATE,
                         "%s: these gradients were stepped already; call amp_scaler_update first", place);
    r = ampi_scaler_unscaled(s, t, place, all_unscaled);
    return r == AMP_OK ? ampi_scaler_need_room(s, t, place) : r;
}

/* The check that has seen just these gradients, and was the last thing done to them; NULL if there is none. */
AMPI_FN const amp_scaler_list* ampi_optimizer_seen(amp_scaler* s, const ampi_tensors* t) {
    const amp_scaler_list* seen = s ? ampi_scaler_entry(s, ampi_tensors_first(t)) : NULL;
    return seen && seen->done == AMPI_CHECKED && seen->elements == ampi_tensors_elements(t) ? seen : NULL;
}

/* Nobody asked to look at the gradients: they are not scaled, nor clipped, and need not be finite. */
AMPI_FN int ampi_optimizer_blind(const amp_optimizer* o, const amp_scaler* s) {
    return !s && o->desc.unchecked && o->desc.clip_norm <= 0.0f;
}

/* Norm and overflows of the gradients: by a pass over them, or from the check that saw them last.
   Returns 1 if the step may be applied. */
AMPI_FN int ampi_optimizer_look(const amp_optimizer* o, amp_scaler* s, const ampi_tensors* t,
                                float factor, amp_overflow_info* found) {
    const amp_scaler_list* seen = ampi_optimizer_seen(s, t);
    if (ampi_optimizer_blind(o, s)) {
        ampi_overflow_clear(found);
        return 1;
    }
    if (seen) {
        *found = s->info;
        found->norm = seen->norm;
        return !s->state.found_inf;
    }
    ampi_check(t, NULL, factor, found);
    if (!s) return !found->found_inf;
    ampi_scaler_record(s, found, "amp_optimizer_step");
    return !s->state.found_inf;
}

AMPI_HD AMPI_FN double ampi_clip_coefficient(const amp_optimizer* o, double norm) {
    double coefficient = o->desc.clip_norm > 0.0f ? (double)o->desc.clip_norm / (norm + 1e-6) : 1.0;
    return coefficient < 1.0 ? coefficient : 1.0;
}

AMP_DEF amp_result amp_optimizer_step(amp_optimizer* o, amp_scaler* s, amp_optimizer_info* info) {
    static const char place[] = "amp_optimizer_step";
    amp_optimizer_info report;
    double coefficient;
    float factor;
    int unscaled = 1;
    ampi_tensors t;
    amp_result r = ampi_optimizer_enter(o, &t, place);
    if (r == AMP_OK && s) r = ampi_optimizer_enter_window(s, &t, place, &unscaled);
    if (r != AMP_OK) return r;
    factor = s && !unscaled ? s->state.inverse : 1.0f;
    memset(&report, 0, sizeof report);
    report.lr = amp_schedule_lr(&o->desc.schedule, o->state.lr, o->state.step);
    report.applied = ampi_optimizer_look(o, s, &t, factor, &report.overflow);
    report.grad_norm = report.overflow.norm;
    coefficient = report.applied ? ampi_clip_coefficient(o, report.grad_norm) : 1.0;
    report.clip_coefficient = (float)coefficient;
    if (report.applied) ampi_optimizer_apply(o, (float)((double)factor * coefficient));
    if (s) {
        ampi_scaler_note(s, &t, AMPI_STEPPED, report.grad_norm);
        report.overflow = s->info;
    }
    if (info) *info = report;
    return AMP_OK;
}

AMP_DEF amp_result amp_optimizer_set_lr(amp_optimizer* o, float lr) {
    if (!o) return AMP_ERR_ARGUMENT;
    if (!ampi_in_range(&lr, 0.0f, AMPI_FLT_MAX))
        return ampi_fail(o->desc.logger, AMP_ERR_ARGUMENT,
                         "amp_optimizer_set_lr: %g must be finite and not negative", (double)lr);
    o->state.lr = lr;
    return AMP_OK;
}

AMP_DEF amp_result amp_optimizer_zero_grad(amp_optimizer* o) {
    int i;
    if (!o || !o->params) return AMP_ERR_ARGUMENT;
    for (i = 0; i < o->count; i++)
        if (o->params[i].grad && o->params[i].count)
            memset(o->params[i].grad, 0, o->params[i].count * amp_dtype_size(o->params[i].grad_dtype));
    return AMP_OK;
}

/* ======================================================================================== */
/* >>impl-backend                                                                             */
/* ======================================================================================== */

AMPI_FN void* ampi_cpu_alloc(size_t bytes, const amp_allocator* a) { return ampi_alloc(a, bytes); }
AMPI_FN void ampi_cpu_free(void* p, const amp_allocator* a) { ampi_free(a, p); }
AMPI_FN amp_result ampi_cpu_zero(void* p, size_t bytes, const amp_exec* exec) {
    (void)exec;
    memset(p, 0, bytes);
    return AMP_OK;
}
AMPI_FN amp_result ampi_cpu_copy(void* dst, const void* src, size_t bytes, const amp_exec* exec) {
    (void)exec;
    memcpy(dst, src, bytes);
    return AMP_OK;
}
AMPI_FN amp_result ampi_cpu_convert(void* dst, amp_dtype dst_dtype, const void* src, amp_dtype src_dtype,
                                    size_t n, const amp_exec* exec) {
    amp_convert_desc d;
    memset(&d, 0, sizeof d);
    d.logger = ampi_exec_logger(exec);
    return amp_convert_with(dst, dst_dtype, src, src_dtype, n, &d);
}

AMPI_FN amp_result ampi_cpu_dropout(const void* x, amp_dtype x_dtype, void* y, amp_dtype y_dtype, size_t n,
                                    float p, uint64_t seed, uint64_t offset, const uint64_t* position,
                                    uint64_t stride, const amp_exec* exec) {
    if (position) offset += *position * stride;
    return amp_dropout_forward(x, x_dtype, y, y_dtype, n, p, seed, offset, exec);
}

AMPI_FN amp_result ampi_cpu_training_open(amp_training* t, const amp_optimizer_desc* desc, amp_param* params,
                                          int count, const amp_exec* exec) {
    (void)exec;
    return amp_optimizer_init(&t->optimizer, desc, params, count);
}
AMPI_FN void ampi_cpu_training_close(amp_training* t, const amp_exec* exec) { (void)t; (void)exec; }

AMPI_FN amp_result ampi_cpu_training_begin(amp_training* t, int window, const amp_exec* exec) {
    (void)exec;
    if (window) t->scale_used = amp_scaler_scale_loss(&t->scaler, 1.0f);
    t->loss_scale = window ? &t->scaler.state.scale_in_use : &t->scaler.state.scale;
    t->position = NULL;
    return AMP_OK;
}
AMPI_FN amp_result ampi_cpu_training_check(amp_training* t, const amp_tensor* grads, int count, float* flag,
                                           const amp_exec* exec) {
    amp_result r = amp_scaler_check(&t->scaler, grads, count, NULL);
    (void)exec;
    *flag = t->scaler.state.found_inf ? 1.0f : 0.0f;
    return r;
}
AMPI_FN amp_result ampi_cpu_training_agree(amp_training* t, const float* flag, const amp_exec* exec) {
    (void)exec;
    return *flag != 0.0f ? amp_scaler_report_overflow(&t->scaler) : AMP_OK;
}
AMPI_FN amp_result ampi_cpu_training_step(amp_training* t, void* now, const void* saved, size_t bytes,
                                          const amp_exec* exec) {
    amp_result r = amp_optimizer_step(&t->optimizer, &t->scaler, &t->last);
    (void)exec;
    if (r != AMP_OK) return r;
    t->limit = amp_scaler_update(&t->scaler);
    if (!t->last.applied && bytes) memcpy(now, saved, bytes);
    return AMP_OK;
}
AMPI_FN amp_result ampi_cpu_training_read(amp_training* t, const amp_exec* exec) {
    (void)t; (void)exec;
    return AMP_OK;
}
/* Closes the window if it is open. */
AMPI_FN void ampi_cpu_training_abandon(amp_training* t, const amp_exec* exec) {
    (void)exec;
    t->scaler.scaled = t->scaler.recorded = t->scaler.list_count = 0;
    t->scaler.state.found_inf = 0;
}

/* The operators are the public ones themselves. */
AMP_DEF const amp_backend* amp_cpu_backend(void) {
    static const amp_backend cpu = { "cpu",
                                     0,
                                     NULL,
                                     NULL,
                                     ampi_cpu_alloc,
                                     ampi_cpu_free,
                                     NULL,
                                     ampi_cpu_zero,
                                     ampi_cpu_copy,
                                     ampi_cpu_copy,
                                     ampi_cpu_copy,
                                     ampi_cpu_convert,
                                     ampi_cpu_convert,
                                     ampi_cpu_convert,
                                     amp_gemm_workspace,
                                     amp_conv2d_workspace,
                                     amp_linear_forward,
                                     amp_linear_backward,
                                     amp_conv2d_forward,
                                     amp_conv2d_backward,
                                     amp_pool2d_forward,
                                     amp_pool2d_backward,
                                     amp_batch_norm_forward,
                                     amp_batch_norm_backward,
                                     amp_layer_norm_forward,
                                     amp_layer_norm_backward,
                                     amp_activation_forward,
                                     amp_activation_backward,
                                     amp_softmax_forward,
                                     amp_softmax_backward,
                                     ampi_cpu_dropout,
                                     amp_add_forward,
                                     amp_concat_forward,
                                     amp_concat_backward,
                                     amp_softmax_cross_entropy_forward,
                                     amp_softmax_cross_entropy_backward,
                                     amp_mse_forward,
                                     amp_mse_backward,
                                     amp_bce_with_logits_forward,
                                     amp_bce_with_logits_backward,
                                     ampi_cpu_training_open,
                                     ampi_cpu_training_close,
                                     ampi_cpu_training_begin,
                                     NULL,
                                     ampi_cpu_training_check,
                                     ampi_cpu_training_agree,
                                     ampi_cpu_training_step,
                                     ampi_cpu_training_read,
                                     ampi_cpu_training_abandon,
                                     NULL,
                                     NULL };
    return &cpu;
}

/* ======================================================================================== */
/* >>impl-model                                                                               */
/* ======================================================================================== */

#define AMPI_NONE (-1)
#define AMPI_ALIGN 64u

/* A node is one layer, or one cast that finalize has placed; it makes one value, known by the node's
   index. */
typedef struct ampi_node {
    amp_layer layer;              /* what the user may see; the first layer_count nodes are layers */
    int is_cast;
    int inputs[2], input_count;   /* nodes, as built */
    int reads[2];                 /* nodes whose memory is really read: behind flatten, or a cast */
    int has_region;               /* the innermost region says region_dtype */
    amp_dtype region_dtype, pin_dtype;
    amp_dtype visible;            /* the type that rules of later layers see */
    int order;                    /* position in the order of execution */
    int users;                    /* how many reads[] name this node */
    int on_loss_path, needs_grad; /* reaches a loss; has parameters behind it */
    int weight, bias;             /* parameters, or AMPI_NONE */
    int group, index;             /* optimizer group; running number of an input or a loss */
    amp_init init;
    size_t fan_in, fan_out;
    /* what the operator needs */
    amp_conv2d_shape conv;
    amp_pool2d_shape pool;
    float eps, momentum, p, loss_weight, smoothing;
    size_t stats_offset;          /* norms: floats from the start of the statistics block */
    /* memory: the node that owns the bytes, and where they are */
    int data_root, grad_root;
    size_t data_offset, grad_offset, temp_offset[2];
    int needs_temp[2], grad_written;
} ampi_node;

/* One allocation of the model. */
typedef struct ampi_allocation { void* raw; char* base; size_t bytes; int on_host; } ampi_allocation;
enum {
    AMPI_BLOCK_ARENA,
    AMPI_BLOCK_MASTERS,
    AMPI_BLOCK_LOW,
    AMPI_BLOCK_GRADS,
    AMPI_BLOCK_MOMENTS,
    AMPI_BLOCK_STATS,
    AMPI_BLOCK_STATS_SAVED,
    AMPI_BLOCK_WORKSPACE,
    AMPI_BLOCK_TARGETS,
    AMPI_BLOCK_LOSSES,
    AMPI_BLOCK_PARAMS,
    AMPI_BLOCK_NAMES,
    AMPI_BLOCK_GRAD_LIST,
    AMPI_BLOCK_ORDER,
    AMPI_BLOCK_ROW,
    AMPI_BLOCK_COUNT
};

struct amp_model {
    amp_model_desc desc;
    amp_policy policy;
    amp_comm comm;
    amp_scaler_desc scaler_desc;  /* copies of what the user's desc points at */
    amp_param_group groups[AMP_MAX_GROUPS];
    const amp_backend* backend;
    amp_exec exec;
    amp_logger op_logger;         /* keeps the sentence of an operator, then passes it on */
    char error[512];
    amp_result build_result;      /* the first mistake of the graph */
    amp_dtype regions[AMP_MAX_REGIONS];
    int region_count;
    ampi_node* nodes;
    int node_count, node_capacity, layer_count;
    int* order;
    int input_count, loss_count, param_count;
    int inputs[AMP_MAX_INPUTS], losses[AMP_MAX_LOSSES];
    ampi_allocation blocks[AMPI_BLOCK_COUNT];
    size_t target_offset[AMP_MAX_LOSSES];
    size_t stats_floats;
    amp_param* params;
    amp_tensor* grad_list;
    amp_training training;
    int training_open;            /* the backend has opened it */
    int stale;                    /* steps were made since it was last read */
    int stepped;                  /* a step was made */
    int finalized;
    int micro;                    /* micro-batches of the current step already done */
    /* what a forward pass of this step did wrong; "" if nothing */
    char trouble[sizeof ((amp_step_info*)0)->message];
    amp_layer_stats* observed;    /* while amp_model_stats runs */
};

/* --- errors ---------------------------------------------------------------------------- */

AMPI_FN void ampi_model_remember(amp_result code, const char* sentence, void* user_data) {
    amp_model* m = (amp_model*)user_data;
    size_t n = strlen(sentence);
    if (n >= sizeof m->error) n = sizeof m->error - 1;
    memcpy(m->error, sentence, n);
    m->error[n] = 0;
    if (m->desc.logger.log) m->desc.logger.log(code, sentence, m->desc.logger.user_data);
}
#define ampi_model_fail(m, ...) ampi_fail(&(m)->op_logger, __VA_ARGS__)

AMP_DEF const char* amp_model_error(const amp_model* m) { return m ? m->error : "the model is NULL"; }

/* Remembers the first mistake of the graph; what is built on it is silently nothing. */
#define ampi_build_fail(m, ...) \
    ((m)->build_result == AMP_OK ? ((m)->build_result = ampi_fail(&(m)->op_logger, __VA_ARGS__)) : (m)->build_result)

/* Takes an operator's sentence down, so that the layer can be named before it is reported. */
typedef struct ampi_note { char text[256]; } ampi_note;
AMPI_FN void ampi_take_note(amp_result code, const char* sentence, void* user_data) {
    (void)code;
    snprintf(((ampi_note*)user_data)->text, sizeof ((ampi_note*)user_data)->text, "%s", sentence);
}
AMPI_FN amp_exec ampi_noting_exec(amp_logger* logger, ampi_note* note) {
    amp_exec exec;
    memset(&exec, 0, sizeof exec);
    note->text[0] = 0;
    logger->log = ampi_take_note;
    logger->user_data = note;
    exec.logger = logger;
    return exec;
}

/* --- memory ---------------------------------------------------------------------------- */

AMPI_FN const amp_allocator* ampi_model_allocator(const amp_model* m) { return &m->desc.allocator; }

AMPI_FN size_t ampi_align(size_t n) { return (n + (AMPI_ALIGN - 1u)) & ~(size_t)(AMPI_ALIGN - 1u); }

AMPI_FN void ampi_block_free(amp_model* m, int which) {
    ampi_allocation* b = &m->blocks[which];
    if (b->on_host) ampi_free(&m->desc.allocator, b->raw);
    else if (b->raw) m->backend->free(b->raw, &m->desc.allocator);
    memset(b, 0, sizeof *b);
}

/* Zeroed memory, aligned to a cache line. */
AMPI_FN amp_result ampi_block_alloc(amp_model* m, int which, size_t bytes, int on_host) {
    ampi_allocation* b = &m->blocks[which];
    size_t room;
    amp_result r;
    if (bytes == 0) return AMP_OK;
    if (!ampi_add_size(bytes, AMPI_ALIGN, &room))
        return ampi_model_fail(m, AMP_ERR_MEMORY, "model: a block of %lu bytes does not fit memory",
                               (unsigned long)bytes);
    b->raw = on_host ? ampi_alloc(&m->desc.allocator, room) : m->backend->alloc(room, &m->desc.allocator);
    if (!b->raw)
        return ampi_model_fail(m, AMP_ERR_MEMORY, "model: out of memory, %lu bytes wanted",
                               (unsigned long)room);
    b->on_host = on_host;
    b->bytes = bytes;
    b->base = (char*)b->raw + (AMPI_ALIGN - (size_t)((uintptr_t)b->raw % AMPI_ALIGN)) % AMPI_ALIGN;
    if (on_host) { memset(b->base, 0, bytes); return AMP_OK; }
    r = m->backend->zero(b->base, bytes, &m->exec);
    if (r != AMP_OK) ampi_block_free(m, which);
    return r;
}

/* --- life ------------------------------------------------------------------------------ */

AMPI_FN amp_result ampi_model_check_desc(amp_model* m) {
    const amp_model_desc* d = &m->desc;
    if (d->batch < 1)
        return ampi_model_fail(m, AMP_ERR_DESC, "model: batch is %d, at least 1 is needed", d->batch);
    if (!ampi_is_compute_dtype(d->grad_dtype))
        return ampi_model_fail(m, AMP_ERR_DESC, "model: grad_dtype must be f32, f16 or bf16");
    if (d->accumulate < 0)
        return ampi_model_fail(m, AMP_ERR_DESC, "model: accumulate is %d, below 0", d->accumulate);
    if (d->max_replays < 0)
        return ampi_model_fail(m, AMP_ERR_DESC, "model: max_replays is %d, below 0", d->max_replays);
    if (d->max_replays > 0 && d->accumulate > 1)
        return ampi_model_fail(m, AMP_ERR_DESC,
                               "model: max_replays needs accumulate = 1: earlier micro-batches are gone");
    if (d->sums != AMP_SUMS_FIXED && d->sums != AMP_SUMS_FAST)
        return ampi_model_fail(m, AMP_ERR_DESC, "model: sums is %d; it must be AMP_SUMS_FIXED or AMP_SUMS_FAST",
                               (int)d->sums);
    if ((d->allocator.alloc == NULL) != (d->allocator.free == NULL))
        return ampi_model_fail(m, AMP_ERR_DESC, "model: allocator needs both alloc and free, or neither");
    if (d->comm
        && (!d->comm->all_reduce_sum || d->comm->size < 1 || d->comm->rank < 0
            || d->comm->rank >= d->comm->size))
        return ampi_model_fail(m, AMP_ERR_DESC,
                               "model: comm needs all_reduce_sum, size >= 1 and a rank below size");
    if (d->optimizer.group_count < 0 || d->optimizer.group_count > AMP_MAX_GROUPS
        || (d->optimizer.group_count > 0 && !d->optimizer.groups))
        return ampi_model_fail(m, AMP_ERR_DESC,
                               "model: optimizer.group_count %d must lie in 0..%d, with groups given",
                               d->optimizer.group_count, AMP_MAX_GROUPS);
    return AMP_OK;
}

/* The policy: the user's own, or one made from `precision`. */
AMPI_FN amp_result ampi_model_take_policy(amp_model* m) {
    amp_policy_desc precision = m->desc.precision;
    precision.logger = &m->op_logger;
    if (!m->desc.policy) return amp_policy_init(&m->policy, &precision);
    m->policy = *m->desc.policy;
    return ampi_policy_check(&m->policy, &m->op_logger);
}

/* Whatever the desc points at may be gone after create: from here on it points at copies. */
AMPI_FN void ampi_model_take_desc(amp_model* m) {
    amp_model_desc* d = &m->desc;
    m->comm.size = 1;
    if (d->comm) m->comm = *d->comm;
    if (d->scaler) m->scaler_desc = *d->scaler;
    if (d->optimizer.group_count > 0)
        memcpy(m->groups, d->optimizer.groups, (size_t)d->optimizer.group_count * sizeof m->groups[0]);
    d->comm = &m->comm;
    d->scaler = d->scaler ? &m->scaler_desc : NULL;
    d->optimizer.groups = d->optimizer.group_count > 0 ? m->groups : NULL;
    d->policy = &m->policy;
    d->backend_desc = NULL;
    d->precision.white = d->precision.black = NULL;
    d->precision.white_count = d->precision.black_count = 0;
    if (d->accumulate == 0) d->accumulate = 1;
}

AMP_DEF amp_result amp_model_create(amp_model** out, const amp_model_desc* desc) {
    amp_model* m;
    amp_result r;
    const amp_logger* logger = desc ? &desc->logger : NULL;
    if (out) *out = NULL;
    if (!out || !desc)
        return ampi_fail(logger, AMP_ERR_ARGUMENT, "amp_model_create: out and desc must not be NULL");
    if ((desc->allocator.alloc == NULL) != (desc->allocator.free == NULL))
        return ampi_fail(logger, AMP_ERR_DESC, "model: allocator needs both alloc and free, or neither");
    m = (amp_model*)ampi_alloc(&desc->allocator, sizeof *m);
    if (!m) return ampi_fail(logger, AMP_ERR_MEMORY, "amp_model_create: out of memory");
    memset(m, 0, sizeof *m);
    m->desc = *desc;
    m->backend = desc->backend ? desc->backend : amp_cpu_backend();
    m->op_logger.log = ampi_model_remember;
    m->op_logger.user_data = m;
    m->exec.logger = &m->op_logger;
    m->exec.sums = desc->sums;
    r = ampi_model_check_desc(m);
    if (r == AMP_OK) r = ampi_model_take_policy(m);
    if (r == AMP_OK && m->backend->open) r = m->backend->open(&m->exec, desc->backend_desc, &desc->allocator);
    if (r != AMP_OK) { ampi_free(&desc->allocator, m); return r; }
    ampi_model_take_desc(m);
    *out = m;
    return AMP_OK;
}

AMPI_FN void ampi_close_training(amp_model* m) {
    if (m->training_open) m->backend->training_close(&m->training, &m->exec);
    m->training_open = 0;
}

AMP_DEF void amp_model_destroy(amp_model* m) {
    amp_allocator allocator;
    int i;
    if (!m) return;
    ampi_close_training(m);
    for (i = 0; i < AMPI_BLOCK_COUNT; i++) ampi_block_free(m, i);
    allocator = m->desc.allocator;
    if (m->backend->close) m->backend->close(&m->exec, &allocator);
    ampi_free(&allocator, m->nodes);
    ampi_free(&allocator, m);
}

/* --- building -------------------------------------------------------------------------- */

AMPI_FN amp_value ampi_no_value(void) { amp_value v; v.id = 0; return v; }
AMPI_FN amp_value ampi_value_of(int node) { amp_value v; v.id = node + 1; return v; }

/* After a mistake nothing more is built, and nothing after finalize. */
AMPI_FN int ampi_can_build(amp_model* m, const char* what) {
    if (!m || m->build_result != AMP_OK) return 0;
    if (m->finalized)
        ampi_model_fail(m, AMP_ERR_STATE, "%s: the model is finalized, nothing can be added", what);
    return !m->finalized;
}

/* The node of a value, or NULL when the graph has a mistake already; a foreign handle is a mistake. */
AMPI_FN ampi_node* ampi_node_of(amp_model* m, amp_value v, const char* what) {
    if (!ampi_can_build(m, what)) return NULL;
    if (v.id < 1 || v.id > m->node_count) {
        ampi_build_fail(m, AMP_ERR_ARGUMENT, "%s: value %d is not one of this model", what, v.id);
        return NULL;
    }
    return &m->nodes[v.id - 1];
}

AMPI_FN amp_result ampi_grow_nodes(amp_model* m) {
    int capacity = m->node_capacity ? m->node_capacity * 2 : 32;
    ampi_node* grown = (ampi_node*)ampi_alloc(&m->desc.allocator, (size_t)capacity * sizeof *grown);
    if (!grown) return ampi_model_fail(m, AMP_ERR_MEMORY, "model: out of memory for %d layers", capacity);
    if (m->node_count) memcpy(grown, m->nodes, (size_t)m->node_count * sizeof *grown);
    ampi_free(&m->desc.allocator, m->nodes);
    m->nodes = grown;
    m->node_capacity = capacity;
    return AMP_OK;
}

/* Appends a node of shape c,h,w; NULL when there is no memory. Pointers to nodes are void afterwards. */
AMPI_FN ampi_node* ampi_node_add(amp_model* m, amp_op op, int c, int h, int w) {
    ampi_node* n;
    if (m->node_count == m->node_capacity && ampi_grow_nodes(m) != AMP_OK) return NULL;
    n = &m->nodes[m->node_count++];
    memset(n, 0, sizeof *n);
    n->layer.op = op;
    n->layer.channels = c;
    n->layer.height = h;
    n->layer.width = w;
    n->weight = n->bias = AMPI_NONE;
    return n;
}

AMPI_FN void ampi_default_name(amp_model* m, ampi_node* n) {
    int i, same = 1;
    for (i = 0; &m->nodes[i] != n; i++) same += m->nodes[i].layer.op == n->layer.op;
    snprintf(n->layer.name, sizeof n->layer.name, "%.21s%d", amp_op_name(n->layer.op), same);
}

/* A layer on inputs a and b (or AMPI_NONE), in the current region. */
AMPI_FN ampi_node* ampi_layer_add(amp_model* m, amp_op op, int a, int b, int c, int h, int w) {
    ampi_node* n;
    if ((a != AMPI_NONE && ampi_op_is_loss(m->nodes[a].layer.op))
        || (b != AMPI_NONE && ampi_op_is_loss(m->nodes[b].layer.op))) {
        ampi_build_fail(m, AMP_ERR_SHAPE, "%s on a loss: nothing can be built on it", amp_op_name(op));
        return NULL;
    }
    n = ampi_node_add(m, op, c, h, w);
    if (!n) { m->build_result = AMP_ERR_MEMORY; return NULL; }
    n->inputs[0] = a;
    n->inputs[1] = b;
    n->input_count = (a != AMPI_NONE) + (b != AMPI_NONE);
    if (m->region_count && m->regions[m->region_count - 1] != AMP_DTYPE_DEFAULT) {
        n->has_region = 1;
        n->region_dtype = m->regions[m->region_count - 1];
    }
    ampi_default_name(m, n);
    m->layer_count = m->node_count;
    return n;
}

AMPI_FN amp_value ampi_last_value(const amp_model* m, const ampi_node* n) {
    return n ? ampi_value_of(m->node_count - 1) : ampi_no_value();
}

/* Elements of a node's output per sample; building has made sure that the product fits. */
AMPI_FN size_t ampi_features(const ampi_node* n) {
    return (size_t)n->layer.channels * (size_t)n->layer.height * (size_t)n->layer.width;
}

/* c*h*w elements of batch samples must be countable, with room for 8 bytes each. */
AMPI_FN int ampi_shape_fits(const amp_model* m, int c, int h, int w) {
    size_t n = 0;
    return c >= 1 && h >= 1 && w >= 1 && ampi_mul_size((size_t)c, (size_t)h, &n)
           && ampi_mul_size(n, (size_t)w, &n) && n <= 0x7fffffffu
           && ampi_mul_size(n, (size_t)m->desc.batch, &n) && n <= SIZE_MAX / 64;
}

AMP_DEF amp_value amp_input(amp_model* m, int channels, int height, int width) {
    ampi_node* n;
    if (!ampi_can_build(m, "input")) return ampi_no_value();
    if (m->input_count == AMP_MAX_INPUTS) {
        ampi_build_fail(m, AMP_ERR_SHAPE, "input: a model has at most %d inputs", AMP_MAX_INPUTS);
        return ampi_no_value();
    }
    if (!ampi_shape_fits(m, channels, height, width)) {
        ampi_build_fail(m, AMP_ERR_SHAPE,
                        "input: %d x %d x %d for a batch of %d is not a size that can be had", channels,
                        height, width, m->desc.batch);
        return ampi_no_value();
    }
    n = ampi_layer_add(m, AMP_OP_INPUT, AMPI_NONE, AMPI_NONE, channels, height, width);
    if (n) { n->index = m->input_count; m->inputs[m->input_count++] = m->node_count - 1; }
    return ampi_last_value(m, n);
}

/* An operator whose output has its input's shape. */
AMPI_FN ampi_node* ampi_same_shape(amp_model* m, amp_op op, amp_value x) {
    const ampi_node* in = ampi_node_of(m, x, amp_op_name(op));
    if (!in) return NULL;
    return ampi_layer_add(m, op, x.id - 1, AMPI_NONE, in->layer.channels, in->layer.height, in->layer.width);
}
AMP_DEF amp_value amp_relu(amp_model* m, amp_value x) {
    return ampi_last_value(m, ampi_same_shape(m, AMP_OP_RELU, x));
}
AMP_DEF amp_value amp_gelu(amp_model* m, amp_value x) {
    return ampi_last_value(m, ampi_same_shape(m, AMP_OP_GELU, x));
}
AMP_DEF amp_value amp_tanh(amp_model* m, amp_value x) {
    return ampi_last_value(m, ampi_same_shape(m, AMP_OP_TANH, x));
}
AMP_DEF amp_value amp_sigmoid(amp_model* m, amp_value x) {
    return ampi_last_value(m, ampi_same_shape(m, AMP_OP_SIGMOID, x));
}
AMP_DEF amp_value amp_softmax(amp_model* m, amp_value x) {
    return ampi_last_value(m, ampi_same_shape(m, AMP_OP_SOFTMAX, x));
}

AMP_DEF amp_value amp_dropout(amp_model* m, amp_value x, float p) {
    ampi_node* n;
    if (!ampi_node_of(m, x, "dropout")) return ampi_no_value();
    if (!(p >= 0.0f && p < 1.0f)) {
        ampi_build_fail(m, AMP_ERR_DESC, "dropout: the probability is %g, it must be in [0,1)", (double)p);
        return ampi_no_value();
    }
    n = ampi_same_shape(m, AMP_OP_DROPOUT, x);
    if (n) n->p = p;
    return ampi_last_value(m, n);
}

AMP_DEF amp_value amp_flatten(amp_model* m, amp_value x) {
    const ampi_node* in = ampi_node_of(m, x, "flatten");
    if (!in) return ampi_no_value();
    return ampi_last_value(
        m, ampi_layer_add(m, AMP_OP_FLATTEN, x.id - 1, AMPI_NONE, (int)ampi_features(in), 1, 1));
}

AMP_DEF amp_value amp_linear(amp_model* m, amp_value x, int out) {
    amp_linear_desc d;
    memset(&d, 0, sizeof d);
    d.out = out;
    return amp_linear_with(m, x, &d);
}

/* Marks a layer's parameters; they get their numbers in finalize. */
AMPI_FN void ampi_has_params(ampi_node* n, int has_bias, amp_init init, size_t fan_in, size_t fan_out) {
    n->weight = 0;
    n->bias = has_bias ? 0 : AMPI_NONE;
    n->init = init;
    n->fan_in = fan_in;
    n->fan_out = fan_out;
}

AMPI_FN int ampi_init_is_valid(amp_init init) {
    return (int)init >= AMP_INIT_HE && (int)init <= AMP_INIT_ZERO;
}

AMP_DEF amp_value amp_linear_with(amp_model* m, amp_value x, const amp_linear_desc* desc) {
    const ampi_node* in = ampi_node_of(m, x, "linear");
    size_t fan_in, weights;
    ampi_node* n;
    if (!in) return ampi_no_value();
    fan_in = ampi_features(in);
    if (!desc || desc->out < 1 || !ampi_shape_fits(m, desc->out, 1, 1)
        || !ampi_mul_size(fan_in, (size_t)desc->out, &weights) || weights > SIZE_MAX / 64) {
        ampi_build_fail(m, AMP_ERR_DESC,
                        "linear after '%s': %d outputs from %lu inputs is not a size that can be had",
                        in->layer.name, desc ? desc->out : 0, (unsigned long)fan_in);
        return ampi_no_value();
    }
    if (!ampi_init_is_valid(desc->init)) {
        ampi_build_fail(m, AMP_ERR_DESC, "linear after '%s': there is no init %d", in->layer.name,
                        (int)desc->init);
        return ampi_no_value();
    }
    n = ampi_layer_add(m, AMP_OP_LINEAR, x.id - 1, AMPI_NONE, desc->out, 1, 1);
    if (n) ampi_has_params(n, !desc->no_bias, desc->init, fan_in, (size_t)desc->out);
    return ampi_last_value(m, n);
}

/* The field for one direction: the specific one, or the one for both. */
AMPI_FN int ampi_either(int specific, int both) { return specific ? specific : both; }

AMPI_FN amp_conv2d_shape ampi_conv_shape(const amp_model* m, const ampi_node* in, const amp_conv2d_desc* d) {
    amp_conv2d_shape s;
    memset(&s, 0, sizeof s);
    s.n = m->desc.batch;
    s.channels = in->layer.channels;
    s.height = in->layer.height;
    s.width = in->layer.width;
    s.out_channels = d->out_channels;
    s.kernel_h = ampi_either(d->kernel_h, d->kernel);
    s.kernel_w = ampi_either(d->kernel_w, d->kernel);
    s.stride_h = ampi_either(ampi_either(d->stride_h, d->stride), 1);
    s.stride_w = ampi_either(ampi_either(d->stride_w, d->stride), 1);
    s.pad_h = ampi_either(d->padding_h, d->padding);
    s.pad_w = ampi_either(d->padding_w, d->padding);
    s.dilation_h = ampi_either(ampi_either(d->dilation_h, d->dilation), 1);
    s.dilation_w = ampi_either(ampi_either(d->dilation_w, d->dilation), 1);
    s.groups = ampi_either(d->groups, 1);
    return s;
}

AMP_DEF amp_value amp_conv2d(amp_model* m, amp_value x, const amp_conv2d_desc* desc) {
    const ampi_node* in = ampi_node_of(m, x, "conv2d");
    amp_conv2d_shape s;
    amp_result r;
    amp_logger logger;
    amp_exec exec;
    ampi_note note;
    ampi_node* n;
    size_t area = 0, weights = 0;
    int oh = 0, ow = 0;
    if (!in) return ampi_no_value();
    if (!desc || !ampi_init_is_valid(desc->init)) {
        ampi_build_fail(m, AMP_ERR_DESC, "conv2d after '%s': the desc is NULL or its init does not exist",
                        in->layer.name);
        return ampi_no_value();
    }
    s = ampi_conv_shape(m, in, desc);
    exec = ampi_noting_exec(&logger, &note);
    r = amp_conv2d_output(&s, &oh, &ow, &exec);
    if (r == AMP_OK && !ampi_shape_fits(m, s.out_channels, oh, ow))
        r = ampi_fail(&logger, AMP_ERR_SHAPE, "conv2d: its output %dx%dx%d is too large", s.out_channels,
                      oh, ow);
    if (r == AMP_OK && (!ampi_mul_size((size_t)s.kernel_h, (size_t)s.kernel_w, &area)
        || !ampi_mul_size(area, (size_t)(s.channels / s.groups), &weights)
        || !ampi_mul_size(weights, (size_t)s.out_channels, &weights) || weights > SIZE_MAX / 64))
        r = ampi_fail(&logger, AMP_ERR_SHAPE, "conv2d: a %dx%d kernel has too many weights", s.kernel_h,
                      s.kernel_w);
    if (r != AMP_OK) {
        ampi_build_fail(m, r, "layer %d after '%s': %s", m->node_count, in->layer.name, note.text);
        return ampi_no_value();
    }
    n = ampi_layer_add(m, AMP_OP_CONV2D, x.id - 1, AMPI_NONE, s.out_channels, oh, ow);
    if (!n) return ampi_no_value();
    n->conv = s;
    ampi_has_params(n, !desc->no_bias, desc->init, (size_t)(s.channels / s.groups) * area,
                    (size_t)(s.out_channels / s.groups) * area);
    return ampi_last_value(m, n);
}

AMP_DEF amp_value amp_pool2d(amp_model* m, amp_value x, const amp_pool2d_desc* desc) {
    const ampi_node* in = ampi_node_of(m, x, "pool2d");
    amp_pool2d_shape s;
    amp_result r;
    amp_logger logger;
    amp_exec exec;
    ampi_note note;
    ampi_node* n;
    int oh = 0, ow = 0;
    if (!in) return ampi_no_value();
    if (!desc) {
        ampi_build_fail(m, AMP_ERR_DESC, "pool2d after '%s': the desc is NULL", in->layer.name);
        return ampi_no_value();
    }
    memset(&s, 0, sizeof s);
    s.kind = desc->kind;
    s.n = m->desc.batch;
    s.channels = in->layer.channels;
    s.height = in->layer.height;
    s.width = in->layer.width;
    s.kernel_h = ampi_either(desc->kernel_h, desc->kernel);
    s.kernel_w = ampi_either(desc->kernel_w, desc->kernel);
    s.stride_h = ampi_either(ampi_either(desc->stride_h, desc->stride), s.kernel_h);
    s.stride_w = ampi_either(ampi_either(desc->stride_w, desc->stride), s.kernel_w);
    s.pad_h = ampi_either(desc->padding_h, desc->padding);
    s.pad_w = ampi_either(desc->padding_w, desc->padding);
    s.exclude_pad = desc->exclude_pad;
    exec = ampi_noting_exec(&logger, &note);
    r = amp_pool2d_output(&s, &oh, &ow, &exec);
    if (r == AMP_OK && !ampi_shape_fits(m, s.channels, oh, ow))
        r = ampi_fail(&logger, AMP_ERR_SHAPE, "pool2d: its output %dx%dx%d is too large", s.channels, oh, ow);
    if (r != AMP_OK) {
        ampi_build_fail(m, r, "layer %d after '%s': %s", m->node_count, in->layer.name, note.text);
        return ampi_no_value();
    }
    n = ampi_layer_add(m, s.kind == AMP_POOL_MAX ? AMP_OP_MAX_POOL2D : AMP_OP_AVG_POOL2D, x.id - 1,
                       AMPI_NONE, s.channels, oh, ow);
    if (n) n->pool = s;
    return ampi_last_value(m, n);
}

AMPI_FN amp_value ampi_square_pool(amp_model* m, amp_value x, amp_pool kind, int kernel_h, int kernel_w) {
    amp_pool2d_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.kernel_h = kernel_h;
    d.kernel_w = kernel_w;
    return amp_pool2d(m, x, &d);
}
AMP_DEF amp_value amp_maxpool2d(amp_model* m, amp_value x, int kernel) {
    return ampi_square_pool(m, x, AMP_POOL_MAX, kernel, kernel);
}
AMP_DEF amp_value amp_avgpool2d(amp_model* m, amp_value x, int kernel) {
    return ampi_square_pool(m, x, AMP_POOL_AVERAGE, kernel, kernel);
}
AMP_DEF amp_value amp_global_avgpool2d(amp_model* m, amp_value x) {
    const ampi_node* in = ampi_node_of(m, x, "global_avgpool2d");
    return in ? ampi_square_pool(m, x, AMP_POOL_AVERAGE, in->layer.height, in->layer.width) : ampi_no_value();
}

AMPI_FN amp_value ampi_norm(amp_model* m, amp_op op, amp_value x, const amp_norm_desc* desc) {
    amp_norm_desc d;
    const ampi_node* in = ampi_node_of(m, x, amp_op_name(op));
    ampi_node* n;
    if (!in) return ampi_no_value();
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!(d.eps >= 0.0f && d.eps < 1.0f)
        || !(d.momentum == (float)AMP_ZERO || (d.momentum >= 0.0f && d.momentum <= 1.0f))) {
        ampi_build_fail(m, AMP_ERR_DESC, "%s after '%s': eps %g must be in [0,1) and momentum %g in [0,1]",
                        amp_op_name(op), in->layer.name, (double)d.eps, (double)d.momentum);
        return ampi_no_value();
    }
    n = ampi_same_shape(m, op, x);
    if (!n) return ampi_no_value();
    n->eps = d.eps;
    n->momentum = d.momentum;
    ampi_has_params(n, 1, AMP_INIT_ZERO, 1, 1);
    return ampi_last_value(m, n);
}
AMP_DEF amp_value amp_batch_norm(amp_model* m, amp_value x, const amp_norm_desc* d) {
    return ampi_norm(m, AMP_OP_BATCH_NORM, x, d);
}
AMP_DEF amp_value amp_layer_norm(amp_model* m, amp_value x, const amp_norm_desc* d) {
    return ampi_norm(m, AMP_OP_LAYER_NORM, x, d);
}

AMP_DEF amp_value amp_add(amp_model* m, amp_value a, amp_value b) {
    const ampi_node *x = ampi_node_of(m, a, "add"), *y = ampi_node_of(m, b, "add");
    if (!x || !y) return ampi_no_value();
    if (x->layer.channels != y->layer.channels || x->layer.height != y->layer.height
        || x->layer.width != y->layer.width) {
        ampi_build_fail(m, AMP_ERR_SHAPE, "add: '%s' is %dx%dx%d, but '%s' is %dx%dx%d", x->layer.name,
                        x->layer.channels, x->layer.height, x->layer.width, y->layer.name,
                        y->layer.channels, y->layer.height, y->layer.width);
        return ampi_no_value();
    }
    return ampi_last_value(m, ampi_layer_add(m, AMP_OP_ADD, a.id - 1, b.id - 1, x->layer.channels,
                                             x->layer.height, x->layer.width));
}

AMP_DEF amp_value amp_concat(amp_model* m, amp_value a, amp_value b) {
    const ampi_node *x = ampi_node_of(m, a, "concat"), *y = ampi_node_of(m, b, "concat");
    if (!x || !y) return ampi_no_value();
    if (x->layer.height != y->layer.height || x->layer.width != y->layer.width
        || x->layer.channels > 0x7fffffff - y->layer.channels
        || !ampi_shape_fits(m, x->layer.channels + y->layer.channels, x->layer.height, x->layer.width)) {
        ampi_build_fail(m, AMP_ERR_SHAPE,
                        "concat: '%s' is %dx%dx%d, '%s' is %dx%dx%d; height and width must agree",
                        x->layer.name, x->layer.channels, x->layer.height, x->layer.width, y->layer.name,
                        y->layer.channels, y->layer.height, y->layer.width);
        return ampi_no_value();
    }
    return ampi_last_value(m, ampi_layer_add(m, AMP_OP_CONCAT, a.id - 1, b.id - 1,
                                             x->layer.channels + y->layer.channels, x->layer.height,
                                             x->layer.width));
}

AMPI_FN amp_value ampi_loss_add(amp_model* m, amp_op op, amp_value x, const amp_loss_desc* desc) {
    amp_loss_desc d;
    const ampi_node* in = ampi_node_of(m, x, amp_op_name(op));
    ampi_node* n;
    if (!in) return ampi_no_value();
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (m->loss_count == AMP_MAX_LOSSES) {
        ampi_build_fail(m, AMP_ERR_SHAPE, "%s: a model has at most %d losses", amp_op_name(op),
                        AMP_MAX_LOSSES);
        return ampi_no_value();
    }
    if (!(d.smoothing >= 0.0f && d.smoothing < 1.0f) || !(d.weight >= 0.0f && d.weight <= 3e38f)) {
        ampi_build_fail(m, AMP_ERR_DESC,
                        "%s on '%s': smoothing %g must be in [0,1), weight %g positive and finite",
                        amp_op_name(op), in->layer.name, (double)d.smoothing, (double)d.weight);
        return ampi_no_value();
    }
    n = ampi_layer_add(m, op, x.id - 1, AMPI_NONE, 1, 1, 1);
    if (!n) return ampi_no_value();
    n->index = m->loss_count;
    n->loss_weight = d.weight == 0.0f ? 1.0f : d.weight;
    n->smoothing = d.smoothing;
    m->losses[m->loss_count++] = m->node_count - 1;
    return ampi_last_value(m, n);
}
AMP_DEF amp_value amp_softmax_cross_entropy(amp_model* m, amp_value logits, const amp_loss_desc* desc) {
    return ampi_loss_add(m, AMP_OP_SOFTMAX_CROSS_ENTROPY, logits, desc);
}
AMP_DEF amp_value amp_mse(amp_model* m, amp_value x, const amp_loss_desc* desc) {
    return ampi_loss_add(m, AMP_OP_MSE, x, desc);
}
AMP_DEF amp_value amp_bce_with_logits(amp_model* m, amp_value x, const amp_loss_desc* desc) {
    return ampi_loss_add(m, AMP_OP_BCE_WITH_LOGITS, x, desc);
}

AMP_DEF void amp_autocast_push(amp_model* m, amp_dtype dtype) {
    if (!ampi_can_build(m, "autocast_push")) return;
    if (dtype != AMP_DTYPE_DEFAULT && !ampi_is_compute_dtype(dtype))
        ampi_build_fail(m, AMP_ERR_DTYPE, "autocast_push: %s is not a type that layers run in",
                        amp_dtype_name(dtype));
    else if (m->region_count == AMP_MAX_REGIONS)
        ampi_build_fail(m, AMP_ERR_STATE, "autocast_push: regions are nested deeper than %d",
                        AMP_MAX_REGIONS);
    else m->regions[m->region_count++] = dtype;
}
AMP_DEF void amp_autocast_pop(amp_model* m) {
    if (!ampi_can_build(m, "autocast_pop")) return;
    if (m->region_count == 0) ampi_build_fail(m, AMP_ERR_STATE, "autocast_pop: no region is open");
    else m->region_count--;
}

/* F32 before F16 before BF16: the order of the enum is that order. */
AMP_DEF void amp_pin(amp_model* m, amp_value v, amp_dtype dtype) {
    ampi_node* n = ampi_node_of(m, v, "pin");
    if (!n) return;
    if (dtype == AMP_DTYPE_DEFAULT || !ampi_is_compute_dtype(dtype))
        ampi_build_fail(m, AMP_ERR_DTYPE, "pin '%s': f32, f16 or bf16 is needed", n->layer.name);
    else if (ampi_op_is_transparent(n->layer.op))
        ampi_build_fail(m, AMP_ERR_POLICY, "pin '%s': %s has no arithmetic of its own", n->layer.name,
                        amp_op_name(n->layer.op));
    else if (ampi_op_is_loss(n->layer.op) && dtype != AMP_F32)
        ampi_build_fail(m, AMP_ERR_POLICY, "pin '%s': a loss is FP32 always", n->layer.name);
    else if (n->pin_dtype == AMP_DTYPE_DEFAULT || dtype < n->pin_dtype) n->pin_dtype = dtype;
}

AMP_DEF void amp_name(amp_model* m, amp_value v, const char* name) {
    ampi_node* n = ampi_node_of(m, v, "name");
    int i;
    if (!n) return;
    if (!name || !*name || strlen(name) >= sizeof n->layer.name) {
        ampi_build_fail(m, AMP_ERR_ARGUMENT, "name for '%s': 1 to %d characters are needed", n->layer.name,
                        (int)sizeof n->layer.name - 1);
        return;
    }
    for (i = 0; i < m->node_count; i++)
        if (&m->nodes[i] != n && strcmp(m->nodes[i].layer.name, name) == 0) {
            ampi_build_fail(m, AMP_ERR_ARGUMENT, "name: there are two layers named '%s'", name);
            return;
        }
    strcpy(n->layer.name, name);
}

AMP_DEF void amp_group(amp_model* m, amp_value v, int group) {
    ampi_node* n = ampi_node_of(m, v, "group");
    int groups = m ? (m->desc.optimizer.group_count > 0 ? m->desc.optimizer.group_count : 1) : 0;
    if (!n) return;
    if (group < 0 || group >= groups)
        ampi_build_fail(m, AMP_ERR_ARGUMENT, "group of '%s' is %d, the optimizer has %d", n->layer.name,
                        group, groups);
    else n->group = group;
}

/* --- finalize, 1: which type each layer computes in, and each value is kept in ------------- */

/* Behind flatten: the node whose memory it is. */
AMPI_FN int ampi_source(const amp_model* m, int node) {
    while (m->nodes[node].layer.op == AMP_OP_FLATTEN && !m->nodes[node].is_cast)
        node = m->nodes[node].inputs[0];
    return node;
}

/* Pin, then region, then the policy's rule. A loss is not moved by a region. */
AMPI_FN void ampi_resolve_rule(const amp_model* m, ampi_node* n) {
    amp_layer* l = &n->layer;
    amp_dtype forced = n->pin_dtype;
    l->rule = m->policy.rules[l->op];
    l->reason = m->policy.reasons[l->op];
    l->compute_dtype = m->policy.low_dtype;
    if (forced != AMP_DTYPE_DEFAULT) l->reason = AMP_REASON_PIN;
    else if (n->has_region && !ampi_op_is_transparent(l->op) && !ampi_op_is_loss(l->op)) {
        forced = n->region_dtype;
        l->reason = AMP_REASON_REGION;
    }
    if (forced == AMP_DTYPE_DEFAULT) return;
    l->rule = forced == AMP_F32 ? AMP_RULE_FP32 : AMP_RULE_LOW;
    l->compute_dtype = forced;
}

AMPI_FN void ampi_resolve_types(amp_model* m) {
    int i;
    for (i = 0; i < m->layer_count; i++) {
        ampi_node* n = &m->nodes[i];
        amp_dtype first, second;
        ampi_resolve_rule(m, n);
        first = n->input_count > 0 ? m->nodes[n->inputs[0]].visible : AMP_F32;
        second = n->input_count > 1 ? m->nodes[n->inputs[1]].visible : first;
        if (n->layer.rule == AMP_RULE_FP32) n->layer.compute_dtype = AMP_F32;
        else if (n->layer.rule == AMP_RULE_FOLLOW) n->layer.compute_dtype = first;
        else if (n->layer.rule == AMP_RULE_PROMOTE)
            n->layer.compute_dtype = first == second ? first : AMP_F32;
        n->visible = n->layer.compute_dtype;
        if (n->layer.rule == AMP_RULE_LOW && m->policy.cast_back) n->visible = AMP_F32;
    }
}

/* A value that every consumer wants in the same 16-bit type is written in it at once: the bits are those
   of an FP32 result followed by a cast, without the FP32 copy. Widening is never a copy: operators read 16
   bits. */
AMPI_FN void ampi_resolve_storage(amp_model* m) {
    int i, j, k;
    for (i = 0; i < m->layer_count; i++) {
        ampi_node* n = &m->nodes[i];
        amp_dtype wanted = AMP_DTYPE_DEFAULT;
        int agree = 1;
        n->layer.storage_dtype = n->layer.rule == AMP_RULE_LOW ? n->layer.compute_dtype : n->visible;
        if (n->layer.storage_dtype != AMP_F32 || n->layer.op == AMP_OP_FLATTEN) continue;
        for (k = i + 1; k < m->layer_count; k++) {
            const ampi_node* user = &m->nodes[k];
            for (j = 0; j < user->input_count; j++) {
                if (user->layer.op == AMP_OP_FLATTEN || ampi_source(m, user->inputs[j]) != i) continue;
                if (wanted != AMP_DTYPE_DEFAULT && wanted != user->layer.compute_dtype) agree = 0;
                wanted = user->layer.compute_dtype;
            }
        }
        if (agree && wanted != AMP_DTYPE_DEFAULT) n->layer.storage_dtype = wanted;
    }
    for (i = 0; i < m->layer_count; i++)
        if (m->nodes[i].layer.op == AMP_OP_FLATTEN)
            m->nodes[i].layer.storage_dtype = m->nodes[ampi_source(m, i)].layer.storage_dtype;
}

/* The cast of `source` to dtype: the one that exists, or a new node at the end of the order. */
AMPI_FN int ampi_cast_of(amp_model* m, int source, amp_dtype dtype, int* placed) {
    const amp_layer* from = &m->nodes[source].layer;
    ampi_node* cast;
    int i;
    for (i = m->layer_count; i < m->node_count; i++)
        if (m->nodes[i].reads[0] == source && m->nodes[i].layer.storage_dtype == dtype) return i;
    cast = ampi_node_add(m, AMP_OP_FLATTEN, from->channels, from->height, from->width);
    if (!cast) return AMPI_NONE;
    cast->is_cast = 1;
    cast->input_count = 1;
    cast->inputs[0] = cast->reads[0] = source;
    cast->layer.storage_dtype = cast->layer.compute_dtype = cast->visible = dtype;
    strcpy(cast->layer.name, "cast");
    m->order[(*placed)++] = m->node_count - 1;
    return m->node_count - 1;
}

/* Order of execution: each layer, with the casts it is the first to need before it. */
AMPI_FN amp_result ampi_place_casts(amp_model* m) {
    int i, j, placed = 0;
    for (i = 0; i < m->layer_count; i++) {
        int casts_before = m->node_count;
        for (j = 0; j < m->nodes[i].input_count; j++) {
            int source = ampi_source(m, m->nodes[i].inputs[j]);
            amp_dtype has = m->nodes[source].layer.storage_dtype, wanted = m->nodes[i].layer.compute_dtype;
            if (m->nodes[i].layer.op != AMP_OP_FLATTEN && wanted != AMP_F32 && wanted != has) {
                source = ampi_cast_of(m, source, wanted, &placed);
                if (source == AMPI_NONE) return AMP_ERR_MEMORY;
            }
            m->nodes[i].reads[j] = source;
        }
        m->nodes[i].layer.casts = m->node_count - casts_before;
        m->order[placed++] = i;
    }
    for (i = 0; i < m->node_count; i++) m->nodes[m->order[i]].order = i;
    return AMP_OK;
}

/* --- finalize, 2: who needs a gradient ----------------------------------------------------- */

AMPI_FN amp_result ampi_mark_paths(amp_model* m) {
    int i, j;
    for (i = 0; i < m->node_count; i++) {
        ampi_node* n = &m->nodes[m->order[i]];
        n->needs_grad = n->weight != AMPI_NONE;
        for (j = 0; j < n->input_count; j++) {
            if (n->layer.op != AMP_OP_FLATTEN || n->is_cast) m->nodes[n->reads[j]].users++;
            if (m->nodes[n->reads[j]].needs_grad) n->needs_grad = 1;
        }
    }
    for (i = m->node_count - 1; i >= 0; i--) {
        ampi_node* n = &m->nodes[m->order[i]];
        if (ampi_op_is_loss(n->layer.op)) n->on_loss_path = 1;
        for (j = 0; j < n->input_count && n->on_loss_path; j++) m->nodes[n->reads[j]].on_loss_path = 1;
    }
    for (i = 0; i < m->layer_count && m->loss_count > 0; i++)
        if (m->nodes[i].weight != AMPI_NONE && !m->nodes[i].on_loss_path)
            return ampi_model_fail(m, AMP_ERR_SHAPE, "layer %d '%s' has weights, but no loss depends on it",
                                   i, m->nodes[i].layer.name);
    return AMP_OK;
}

/* --- finalize, 3: memory of values --------------------------------------------------------- */

AMPI_FN int ampi_backward_reads_output(amp_op op) {
    return op == AMP_OP_RELU || op == AMP_OP_TANH || op == AMP_OP_SIGMOID || op == AMP_OP_SOFTMAX;
}
AMPI_FN int ampi_backward_reads_input(amp_op op) {
    return op == AMP_OP_CONV2D || op == AMP_OP_LINEAR || op == AMP_OP_MAX_POOL2D || op == AMP_OP_BATCH_NORM
        || op == AMP_OP_LAYER_NORM || op == AMP_OP_GELU || ampi_op_is_loss(op);
}
AMPI_FN int ampi_is_view(const ampi_node* n) { return n->layer.op == AMP_OP_FLATTEN && !n->is_cast; }

/* The output may take its input's place if nobody else reads the input, now or in the backward pass. */
AMPI_FN int ampi_can_be_in_place(const amp_model* m, const ampi_node* n) {
    const ampi_node* in;
    if (n->is_cast || n->input_count != 1) return 0;
    if (n->layer.op != AMP_OP_RELU && n->layer.op != AMP_OP_TANH && n->layer.op != AMP_OP_SIGMOID
        && n->layer.op != AMP_OP_DROPOUT)
        return 0;
    in = &m->nodes[n->reads[0]];
    return in->users == 1 && in->layer.op != AMP_OP_INPUT && in->layer.storage_dtype == n->layer.storage_dtype
        && (in->is_cast || !ampi_backward_reads_output(in->layer.op));
}
/* The gradient of the input may take the place of the output's. */
AMPI_FN int ampi_can_share_gradient(const amp_model* m, const ampi_node* n) {
    const ampi_node* in;
    amp_op op = n->layer.op;
    if (n->is_cast || n->input_count != 1) return 0;
    if (op != AMP_OP_RELU && op != AMP_OP_TANH && op != AMP_OP_SIGMOID && op != AMP_OP_GELU
        && op != AMP_OP_DROPOUT && op != AMP_OP_BATCH_NORM)
        return 0;
    in = &m->nodes[n->reads[0]];
    return in->users == 1 && in->layer.storage_dtype == n->layer.storage_dtype;
}

AMPI_FN void ampi_share_memory(amp_model* m) {
    int i, node;
    for (i = 0; i < m->node_count; i++) {
        ampi_node* n = &m->nodes[node = m->order[i]];
        n->data_root = node;
        if (ampi_is_view(n)) n->data_root = m->nodes[n->reads[0]].data_root;
        else if (ampi_can_be_in_place(m, n)) {
            n->data_root = m->nodes[n->reads[0]].data_root;
            n->layer.in_place = 1;
        }
    }
    for (i = m->node_count - 1; i >= 0; i--) m->nodes[m->order[i]].grad_root = m->order[i];
    for (i = m->node_count - 1; i >= 0; i--) {
        const ampi_node* n = &m->nodes[m->order[i]];
        if (ampi_can_share_gradient(m, n)) m->nodes[n->reads[0]].grad_root = n->grad_root;
    }
}

/* A stretch of the arena that is in use from time `first` to `last`; step i of the forward pass is time
   i, of the backward pass 2*steps-1-i. */
typedef struct ampi_lease { size_t bytes, offset; int first, last; } ampi_lease;

AMPI_FN void ampi_lease_use(ampi_lease* l, int time) {
    if (l->first > time) l->first = time;
    if (l->last < time) l->last = time;
}

AMPI_FN size_t ampi_value_bytes(const amp_model* m, const ampi_node* n) {
    return ampi_align(ampi_features(n) * (size_t)m->desc.batch * amp_dtype_size(n->layer.storage_dtype));
}

/* Whether the backward pass hands a gradient from n to its input j. */
AMPI_FN int ampi_gives_gradient(const amp_model* m, const ampi_node* n, int j) {
    return n->on_loss_path && !ampi_is_view(n) && m->nodes[n->reads[j]].needs_grad;
}

/* leases: node_count for data, then node_count for gradients, then 2*node_count for second contributions
   to a gradient, which are formed apart and added. */
AMPI_FN void ampi_lease_times(amp_model* m, ampi_lease* leases) {
    int i, j, count = m->node_count, end = 2 * count - 1;
    for (i = 0; i < 4 * count; i++) {
        leases[i].first = end + 1;
        leases[i].last = -1;
        leases[i].bytes = leases[i].offset = 0;
    }
    for (i = count - 1; i >= 0; i--) {
        int node = m->order[i];
        ampi_node* n = &m->nodes[node];
        ampi_lease* own = &leases[n->data_root];
        if (ampi_op_is_loss(n->layer.op) && !n->is_cast) own = NULL;
        if (own) ampi_lease_use(own, n->input_count ? i : 0);   /* inputs are filled before the first layer runs */
        if (own && n->data_root == node) own->bytes = ampi_value_bytes(m, n);
        if (own && n->on_loss_path && !n->is_cast && n->needs_grad && ampi_backward_reads_output(n->layer.op))
            ampi_lease_use(own, end - i);
        for (j = 0; j < n->input_count && !ampi_is_view(n); j++) {
            ampi_node* in = &m->nodes[n->reads[j]];
            ampi_lease_use(&leases[in->data_root], i);
            if (n->on_loss_path && n->needs_grad && !n->is_cast && ampi_backward_reads_input(n->layer.op))
                ampi_lease_use(&leases[in->data_root], end - i);
            if (!ampi_gives_gradient(m, n, j)) continue;
            ampi_lease_use(&leases[count + in->grad_root], end - i);
            ampi_lease_use(&leases[count + in->grad_root], end - in->order);
            leases[count + in->grad_root].bytes = ampi_value_bytes(m, in);
            n->needs_temp[j] = in->grad_written;
            in->grad_written = 1;
            if (!n->needs_temp[j]) continue;
            ampi_lease_use(&leases[2 * count + 2 * node + j], end - i);
            leases[2 * count + 2 * node + j].bytes = ampi_value_bytes(m, in);
        }
    }
}

/* Largest first, each at the lowest place that no lease of the same time holds: close to optimal for
   such graphs. Returns the bytes needed in all; SIZE_MAX if they cannot be counted. */
AMPI_FN size_t ampi_place_leases(ampi_lease* leases, int count) {
    size_t total = 0;
    int placed, i;
    for (placed = 0; placed < count; placed++) {
        ampi_lease* best = NULL;
        size_t offset = 0;
        int moved = 1;
        for (i = 0; i < count; i++)
            if (leases[i].bytes && leases[i].offset == SIZE_MAX && (!best || leases[i].bytes > best->bytes))
                best = &leases[i];
        if (!best) break;
        while (moved) {
            moved = 0;
            for (i = 0; i < count; i++) {
                const ampi_lease* o = &leases[i];
                if (!o->bytes || o->offset == SIZE_MAX || o->last < best->first || o->first > best->last)
                    continue;
                if (offset < o->offset + o->bytes && o->offset < offset + best->bytes) {
                    offset = o->offset + o->bytes;
                    moved = 1;
                }
                if (offset > SIZE_MAX - best->bytes) return SIZE_MAX;
            }
        }
        best->offset = offset;
        if (total < offset + best->bytes) total = offset + best->bytes;
    }
    return total;
}

AMPI_FN amp_result ampi_plan_arena(amp_model* m, size_t* arena_bytes) {
    int i, count = m->node_count;
    ampi_lease* leases = (ampi_lease*)ampi_alloc(&m->desc.allocator, 4 * (size_t)count * sizeof *leases);
    if (!leases) return ampi_model_fail(m, AMP_ERR_MEMORY, "model: out of memory while planning");
    ampi_lease_times(m, leases);
    for (i = 0; i < 4 * count; i++) leases[i].offset = SIZE_MAX;
    *arena_bytes = ampi_place_leases(leases, 4 * count);
    for (i = 0; i < 4 * count; i++) if (!leases[i].bytes) leases[i].offset = 0;
    for (i = 0; i < count; i++) {
        ampi_node* n = &m->nodes[i];
        n->data_offset = leases[n->data_root].offset;
        n->grad_offset = leases[count + n->grad_root].offset;
        n->temp_offset[0] = leases[2 * count + 2 * i].offset;
        n->temp_offset[1] = leases[2 * count + 2 * i + 1].offset;
        n->layer.activation_bytes = n->data_root == i && !ampi_op_is_loss(n->layer.op) ? leases[i].bytes : 0;
    }
    ampi_free(&m->desc.allocator, leases);
    return AMP_OK;
}

/* --- finalize, 4: parameters ---------------------------------------------------------------- */

AMPI_FN size_t ampi_weight_count(const ampi_node* n) {
    if (n->layer.op == AMP_OP_CONV2D) return (size_t)n->layer.channels * n->fan_in;
    if (n->layer.op == AMP_OP_LINEAR) return (size_t)n->layer.channels * n->fan_in;
    return n->layer.op == AMP_OP_BATCH_NORM ? (size_t)n->layer.channels : ampi_features(n);
}
AMPI_FN size_t ampi_bias_count(const ampi_node* n) {
    return n->layer.op == AMP_OP_LAYER_NORM ? ampi_features(n) : (size_t)n->layer.channels;
}
AMPI_FN int ampi_is_norm(const ampi_node* n) {
    return n->layer.op == AMP_OP_BATCH_NORM || n->layer.op == AMP_OP_LAYER_NORM;
}

/* Matrix layers read their weights in the type they compute in. Norms read FP32, unless there are no
   masters at all. */
AMPI_FN amp_dtype ampi_param_dtype(const amp_model* m, const ampi_node* n) {
    if (ampi_is_norm(n) && (m->policy.master_weights || n->layer.rule != AMP_RULE_LOW)) return AMP_F32;
    return n->layer.compute_dtype;
}

/* Counts parameters, and where each buffer goes in its block. */
typedef struct ampi_param_plan { size_t masters, low, grads, moments; } ampi_param_plan;

/* A sum that stays at SIZE_MAX, which no allocation can give, when it does not fit. */
AMPI_FN void ampi_count_bytes(size_t* sum, size_t bytes) {
    if (!ampi_add_size(*sum, bytes, sum)) *sum = SIZE_MAX;
}

AMPI_FN void ampi_param_bytes(const amp_model* m, const ampi_node* n, size_t count, int moments,
                              ampi_param_plan* at) {
    if (n->layer.param_dtype == AMP_F32 || m->policy.master_weights)
        ampi_count_bytes(&at->masters, ampi_align(count * 4));
    if (n->layer.param_dtype != AMP_F32) ampi_count_bytes(&at->low, ampi_align(count * 2));
    ampi_count_bytes(&at->grads, ampi_align(count * amp_dtype_size(m->desc.grad_dtype)));
    ampi_count_bytes(&at->moments, ampi_align(count * 4) * (size_t)moments);
}

/* First pass: numbers and sums. */
AMPI_FN void ampi_plan_params(amp_model* m, int moments, ampi_param_plan* sum) {
    int i;
    memset(sum, 0, sizeof *sum);
    for (i = 0; i < m->layer_count; i++) {
        ampi_node* n = &m->nodes[i];
        if (n->weight == AMPI_NONE) continue;
        n->layer.param_dtype = ampi_param_dtype(m, n);
        n->weight = m->param_count++;
        n->layer.parameters = ampi_weight_count(n);
        ampi_param_bytes(m, n, ampi_weight_count(n), moments, sum);
        if (n->bias == AMPI_NONE) continue;
        n->bias = m->param_count++;
        n->layer.parameters += ampi_bias_count(n);
        ampi_param_bytes(m, n, ampi_bias_count(n), moments, sum);
    }
}

#define AMPI_PARAM_NAME 48
/* Second pass: pointers. */
AMPI_FN void ampi_bind_param(amp_model* m, const ampi_node* n, int index, size_t count, const char* suffix,
                             int moments, ampi_param_plan* at) {
    amp_param* p = &m->params[index];
    char* name = m->blocks[AMPI_BLOCK_NAMES].base + (size_t)index * AMPI_PARAM_NAME;
    snprintf(name, AMPI_PARAM_NAME, "%s.%s", n->layer.name, suffix);
    p->name = name;
    p->count = count;
    p->group = n->group;
    p->grad_dtype = ampi_dtype(m->desc.grad_dtype);
    if (n->layer.param_dtype == AMP_F32 || m->policy.master_weights)
        p->master = (float*)(void*)(m->blocks[AMPI_BLOCK_MASTERS].base + at->masters);
    if (n->layer.param_dtype != AMP_F32) {
        p->low = m->blocks[AMPI_BLOCK_LOW].base + at->low;
        p->low_dtype = n->layer.param_dtype;
    }
    p->grad = m->blocks[AMPI_BLOCK_GRADS].base + at->grads;
    if (moments > 0) p->m = (float*)(void*)(m->blocks[AMPI_BLOCK_MOMENTS].base + at->moments);
    if (moments > 1)
        p->v = (float*)(void*)(m->blocks[AMPI_BLOCK_MOMENTS].base + at->moments + ampi_align(count * 4));
    m->grad_list[index].data = p->grad;
    m->grad_list[index].dtype = p->grad_dtype;
    m->grad_list[index].count = count;
    m->grad_list[index].name = name;
    ampi_param_bytes(m, n, count, moments, at);
}

AMPI_FN void ampi_bind_params(amp_model* m, int moments) {
    ampi_param_plan at;
    int i;
    memset(&at, 0, sizeof at);
    for (i = 0; i < m->layer_count; i++) {
        const ampi_node* n = &m->nodes[i];
        if (n->weight != AMPI_NONE)
            ampi_bind_param(m, n, n->weight, ampi_weight_count(n), "weight", moments, &at);
        if (n->bias != AMPI_NONE) ampi_bind_param(m, n, n->bias, ampi_bias_count(n), "bias", moments, &at);
    }
}

/* One random weight. Each parameter has a stream of its own: the weights do not depend on the order of
   building the rest. */
AMPI_FN float ampi_initial_weight(const ampi_node* n, int is_bias, uint64_t seed, uint64_t i) {
    float u;
    if (ampi_is_norm(n)) return is_bias ? 0.0f : 1.0f;
    if (n->init == AMP_INIT_ZERO || (is_bias && n->init != AMP_INIT_TORCH)) return 0.0f;
    if (n->init == AMP_INIT_HE) return amp_random_normal(seed, i) * sqrtf(2.0f / (float)n->fan_in);
    u = 2.0f * amp_random_uniform(seed, i) - 1.0f;
    if (n->init == AMP_INIT_XAVIER) return u * sqrtf(6.0f / (float)(n->fan_in + n->fan_out));
    return u / sqrtf((float)n->fan_in);
}

/* A stream's seed from the model's seed and the stream's number (one Weyl step and a multiplication, so
   that near seeds are far apart). */
AMPI_FN uint64_t ampi_stream(const amp_model* m, int number) {
    uint64_t x = m->desc.seed + 0x9E3779B97F4A7C15u * (uint64_t)(number + 1);
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
    return x ^ (x >> 32);
}

AMPI_FN amp_result ampi_init_param(amp_model* m, const ampi_node* n, int index, int is_bias) {
    enum { CHUNK = 256 };
    const amp_param* p = &m->params[index];
    float values[CHUNK];
    size_t at, i;
    for (at = 0; at < p->count; at += CHUNK) {
        size_t count = p->count - at < CHUNK ? p->count - at : (size_t)CHUNK;
        amp_dtype t = p->low_dtype;
        char* to = p->master ? (char*)(void*)p->master : (char*)p->low;
        amp_result r;
        if (p->master) t = AMP_F32;
        for (i = 0; i < count; i++)
            values[i] = ampi_initial_weight(n, is_bias, ampi_stream(m, index), at + i);
        r = m->backend->upload(to + at * amp_dtype_size(t), t, values, AMP_F32, count, &m->exec);
        if (r != AMP_OK) return r;
    }
    return AMP_OK;
}

/* --- finalize, 5: the rest ------------------------------------------------------------------ */

/* Batch norm keeps running mean and variance (all of them first, so that they can be saved as one
   stretch), then in the same order the statistics of the batch; after them come those of layer norm's rows.
   */
AMPI_FN size_t ampi_plan_stats(amp_model* m, size_t* running) {
    size_t at = 0;
    int i;
    for (i = 0; i < m->layer_count; i++) {
        if (m->nodes[i].layer.op != AMP_OP_BATCH_NORM) continue;
        m->nodes[i].stats_offset = at;
        at += 2 * (size_t)m->nodes[i].layer.channels;
    }
    *running = at;
    at *= 2;
    for (i = 0; i < m->layer_count; i++) {
        if (m->nodes[i].layer.op != AMP_OP_LAYER_NORM) continue;
        m->nodes[i].stats_offset = at;
        at += 2 * (size_t)m->desc.batch;
    }
    return at;
}

AMPI_FN size_t ampi_plan_targets(amp_model* m) {
    size_t at = 0;
    int i;
    for (i = 0; i < m->loss_count; i++) {
        const ampi_node* n = &m->nodes[m->losses[i]];
        size_t per_row =
            n->layer.op == AMP_OP_SOFTMAX_CROSS_ENTROPY ? 1 : ampi_features(&m->nodes[n->reads[0]]);
        m->target_offset[i] = at;
        at += ampi_align(per_row * (size_t)m->desc.batch * 4);
    }
    return at;
}

AMPI_FN size_t ampi_plan_workspace(const amp_model* m) {
    size_t most = 0, batch = (size_t)m->desc.batch;
    int i;
    for (i = 0; i < m->layer_count; i++) {
        const ampi_node* n = &m->nodes[i];
        size_t bytes = 0, other;
        if (n->layer.op == AMP_OP_CONV2D) bytes = m->backend->conv2d_workspace(&n->conv);
        if (n->layer.op == AMP_OP_LINEAR) {
            size_t in = n->fan_in, out = (size_t)n->layer.channels;
            bytes = m->backend->gemm_workspace(batch, out, in);
            other = m->backend->gemm_workspace(batch, in, out);
            if (bytes < other) bytes = other;
            other = m->backend->gemm_workspace(out, in, batch);
            if (bytes < other) bytes = other;
        }
        if (most < bytes) most = bytes;
    }
    return most;
}

/* Rows of `classes` logits that evaluation brings to the host at a time. */
AMPI_FN size_t ampi_rows_at_once(size_t classes) { return classes < 8192 ? 8192 / classes : 1; }

/* Room for such rows and their labels. */
AMPI_FN size_t ampi_plan_row(const amp_model* m) {
    size_t most = 0;
    int i;
    for (i = 0; i < m->loss_count; i++) {
        const ampi_node* x = &m->nodes[m->nodes[m->losses[i]].reads[0]];
        size_t classes = ampi_features(x), room = ampi_rows_at_once(classes) * (classes + 1) * sizeof(float);
        if (m->nodes[m->losses[i]].layer.op == AMP_OP_SOFTMAX_CROSS_ENTROPY && most < room) most = room;
    }
    return most;
}

AMPI_FN amp_result ampi_alloc_blocks(amp_model* m, size_t arena, const ampi_param_plan* p, size_t stats,
                                     size_t running) {
    const size_t params = (size_t)m->param_count;
    amp_result r = AMP_OK;
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_ARENA, arena, 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_MASTERS, p->masters, 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_LOW, p->low, 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_GRADS, p->grads, 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_MOMENTS, p->moments, 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_STATS, stats * 4, 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_STATS_SAVED, running * 4, 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_WORKSPACE, ampi_plan_workspace(m), 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_TARGETS, ampi_plan_targets(m), 0);
    if (r == AMP_OK)
        r = ampi_block_alloc(m, AMPI_BLOCK_LOSSES, (size_t)(m->loss_count + 1) * sizeof(float), 0);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_PARAMS, params * sizeof(amp_param), 1);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_NAMES, params * AMPI_PARAM_NAME, 1);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_GRAD_LIST, params * sizeof(amp_tensor), 1);
    if (r == AMP_OK) r = ampi_block_alloc(m, AMPI_BLOCK_ROW, ampi_plan_row(m), 1);
    return r;
}

AMPI_FN float* ampi_running(const amp_model* m, const ampi_node* n) {
    return (float*)(void*)m->blocks[AMPI_BLOCK_STATS].base + n->stats_offset;
}
/* Statistics of the batch: behind all running ones for batch norm. */
AMPI_FN float* ampi_batch_stats(const amp_model* m, const ampi_node* n) {
    size_t running = n->layer.op == AMP_OP_BATCH_NORM ? m->blocks[AMPI_BLOCK_STATS_SAVED].bytes / 4 : 0;
    return ampi_running(m, n) + running;
}

AMPI_FN amp_result ampi_init_weights(amp_model* m) {
    const float one = 1.0f;
    amp_result r = AMP_OK;
    int i, c;
    for (i = 0; i < m->layer_count && r == AMP_OK; i++) {
        const ampi_node* n = &m->nodes[i];
        if (n->weight != AMPI_NONE) r = ampi_init_param(m, n, n->weight, 0);
        if (r == AMP_OK && n->bias != AMPI_NONE) r = ampi_init_param(m, n, n->bias, 1);
        for (c = 0; n->layer.op == AMP_OP_BATCH_NORM && r == AMP_OK && c < n->layer.channels; c++)
            r = m->backend->copy_in(ampi_running(m, n) + n->layer.channels + c, &one, sizeof one, &m->exec);
    }
    return r;
}

/* The scaler of a level, when the user gives none: dynamic where half gradients can underflow, otherwise
   scale 1. */
AMPI_FN amp_result ampi_init_scaler(amp_model* m) {
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    if (m->desc.scaler) d = *m->desc.scaler;
    else if (m->policy.low_dtype != AMP_F16 || (m->policy.level != AMP_O1 && m->policy.level != AMP_O2)) {
        d.preset = AMP_SCALER_STATIC;
        d.init_scale = 1.0f;
    }
    d.logger = &m->op_logger;
    return amp_scaler_init(&m->training.scaler, &d);
}

AMPI_FN amp_result ampi_check_graph(amp_model* m) {
    int i, j;
    if (m->region_count)
        return ampi_model_fail(m, AMP_ERR_STATE, "model: %d autocast region%s not closed", m->region_count,
                               m->region_count > 1 ? "s are" : " is");
    if (m->input_count == 0) return ampi_model_fail(m, AMP_ERR_SHAPE, "model: there is no input");
    for (i = 0; i < m->layer_count; i++)
        for (j = 0; j < i; j++)
            if (strcmp(m->nodes[i].layer.name, m->nodes[j].layer.name) == 0)
                return ampi_model_fail(m, AMP_ERR_ARGUMENT, "model: there are two layers named '%s'",
                                       m->nodes[i].layer.name);
    return AMP_OK;
}

/* Everything that finalize does; on failure the caller takes it all back. */
AMPI_FN amp_result ampi_finalize(amp_model* m) {
    amp_optimizer_desc od = m->desc.optimizer;
    ampi_param_plan plan;
    size_t arena = 0, stats, running = 0;
    amp_result r;
    int moments;
    od.logger = &m->op_logger;
    moments = amp_optimizer_moments(&od);
    if (moments < 0) return AMP_ERR_DESC;
    if ((r = ampi_init_scaler(m)) != AMP_OK) return r;
    ampi_resolve_types(m);
    ampi_resolve_storage(m);
    r = ampi_block_alloc(m, AMPI_BLOCK_ORDER, 3 * (size_t)m->layer_count * sizeof(int), 1);
    if (r != AMP_OK) return r;
    m->order = (int*)(void*)m->blocks[AMPI_BLOCK_ORDER].base;
    if ((r = ampi_place_casts(m)) != AMP_OK || (r = ampi_mark_paths(m)) != AMP_OK) return r;
    ampi_share_memory(m);
    if ((r = ampi_plan_arena(m, &arena)) != AMP_OK) return r;
    ampi_plan_params(m, moments, &plan);
    stats = ampi_plan_stats(m, &running);
    m->stats_floats = running;
    if ((r = ampi_alloc_blocks(m, arena, &plan, stats, running)) != AMP_OK) return r;
    m->params = (amp_param*)(void*)m->blocks[AMPI_BLOCK_PARAMS].base;
    m->grad_list = (amp_tensor*)(void*)m->blocks[AMPI_BLOCK_GRAD_LIST].base;
    m->exec.workspace = m->blocks[AMPI_BLOCK_WORKSPACE].base;
    m->exec.workspace_size = m->blocks[AMPI_BLOCK_WORKSPACE].bytes;
    ampi_bind_params(m, moments);
    if ((r = ampi_init_weights(m)) != AMP_OK) return r;
    if (m->param_count == 0) return AMP_OK;
    r = m->backend->training_open(&m->training, &od, m->params, m->param_count, &m->exec);
    m->training_open = r == AMP_OK;
    return r;
}

/* Back to the graph as it was built. */
AMPI_FN void ampi_unfinalize(amp_model* m) {
    int i;
    ampi_close_training(m);
    for (i = 0; i < AMPI_BLOCK_COUNT; i++) ampi_block_free(m, i);
    m->node_count = m->layer_count;
    m->param_count = 0;
    m->params = NULL;
    m->grad_list = NULL;
    m->order = NULL;
    m->exec.workspace = NULL;
    m->exec.workspace_size = 0;
    for (i = 0; i < m->layer_count; i++) {
        ampi_node* n = &m->nodes[i];
        n->users = n->on_loss_path = n->needs_grad = n->grad_written = n->needs_temp[0] = n->needs_temp[1] =
            0;
        n->layer.in_place = 0;
        if (n->weight != AMPI_NONE) n->weight = 0;
        if (n->bias != AMPI_NONE) n->bias = 0;
    }
}

AMP_DEF amp_result amp_model_finalize(amp_model* m) {
    amp_result r;
    if (!m) return AMP_ERR_ARGUMENT;
    if (m->finalized)
        return ampi_model_fail(m, AMP_ERR_STATE, "amp_model_finalize: the model is finalized already");
    if (m->build_result != AMP_OK) return m->build_result;
    r = ampi_check_graph(m);
    if (r == AMP_OK) r = ampi_finalize(m);
    if (r != AMP_OK) { ampi_unfinalize(m); return r; }
    m->finalized = 1;
    return AMP_OK;
}

/* --- looking inside ------------------------------------------------------------------------- */

AMP_DEF int amp_model_layer_count(const amp_model* m) { return m && m->finalized ? m->layer_count : 0; }
AMP_DEF const amp_layer* amp_model_layer(const amp_model* m, int i) {
    return m && m->finalized && i >= 0 && i < m->layer_count ? &m->nodes[i].layer : NULL;
}
AMP_DEF int amp_model_layer_of(const amp_model* m, amp_value v) {
    return m && v.id >= 1 && v.id <= m->layer_count ? v.id - 1 : -1;
}

AMP_DEF amp_result amp_model_memory(const amp_model* m, amp_memory* out) {
    int i;
    if (!m) return AMP_ERR_ARGUMENT;
    if (!out) return ampi_model_fail(m, AMP_ERR_ARGUMENT, "amp_model_memory: out is NULL");
    if (!m->finalized) return ampi_model_fail(m, AMP_ERR_STATE, "amp_model_memory: the model is not finalized");
    memset(out, 0, sizeof *out);
    out->activation_bytes = m->blocks[AMPI_BLOCK_ARENA].bytes;
    out->parameter_bytes = m->blocks[AMPI_BLOCK_MASTERS].bytes;
    out->low_parameter_bytes = m->blocks[AMPI_BLOCK_LOW].bytes;
    out->gradient_bytes = m->blocks[AMPI_BLOCK_GRADS].bytes;
    out->optimizer_bytes = m->blocks[AMPI_BLOCK_MOMENTS].bytes;
    out->workspace_bytes = m->blocks[AMPI_BLOCK_WORKSPACE].bytes;
    out->total_bytes = sizeof *m + (size_t)m->node_capacity * sizeof *m->nodes;
    for (i = 0; i < AMPI_BLOCK_COUNT; i++) out->total_bytes += m->blocks[i].bytes;
    return AMP_OK;
}

AMP_DEF amp_param* amp_model_params(amp_model* m, int* count) {
    if (count) *count = m && m->finalized ? m->param_count : 0;
    return m && m->finalized ? m->params : NULL;
}
AMP_DEF amp_param* amp_model_find_param(amp_model* m, const char* name) {
    int i;
    for (i = 0; m && m->finalized && name && i < m->param_count; i++)
        if (strcmp(m->params[i].name, name) == 0) return &m->params[i];
    return NULL;
}

AMPI_FN amp_result ampi_check_param(amp_model* m, const amp_param* p, const void* values, const char* what) {
    int i;
    if (!m) return AMP_ERR_ARGUMENT;
    for (i = 0; i < m->param_count; i++) if (p == &m->params[i] && values) return AMP_OK;
    return ampi_model_fail(m, AMP_ERR_ARGUMENT, "%s: p is not a parameter of this model, or values is NULL", what);
}

AMP_DEF amp_result amp_model_read_param(amp_model* m, const amp_param* p, float* out) {
    amp_result r = ampi_check_param(m, p, out, "read param");
    if (r != AMP_OK) return r;
    return p->master ? m->backend->copy_out(out, p->master, p->count * sizeof *out, &m->exec)
                     : m->backend->download(out, AMP_F32, p->low, p->low_dtype, p->count, &m->exec);
}

AMP_DEF amp_result amp_model_write_param(amp_model* m, const amp_param* p, const float* values) {
    amp_result r = ampi_check_param(m, p, values, "write param");
    if (r == AMP_OK && p->master)
        r = m->backend->copy_in(p->master, values, p->count * sizeof *values, &m->exec);
    if (r == AMP_OK && p->low)
        r = m->backend->upload(p->low, p->low_dtype, values, AMP_F32, p->count, &m->exec);
    return r;
}

AMP_DEF amp_result amp_model_sync_params(amp_model* m) {
    amp_result r = AMP_OK;
    int i;
    if (!m) return AMP_ERR_ARGUMENT;
    if (!m->finalized)
        return ampi_model_fail(m, AMP_ERR_STATE, "amp_model_sync_params: the model is not finalized");
    for (i = 0; i < m->param_count && r == AMP_OK; i++) {
        const amp_param* p = &m->params[i];
        if (p->master && p->low)
            r = m->backend->convert(p->low, p->low_dtype, p->master, AMP_F32, p->count, &m->exec);
    }
    return r;
}

/* Brings the training state up to date with what the backend has. */
AMPI_FN amp_result ampi_refresh(amp_model* m) {
    amp_result r = AMP_OK;
    if (m->stale) r = m->backend->training_read(&m->training, &m->exec);
    m->stale = 0;
    return r;
}
AMP_DEF amp_scaler* amp_model_scaler(amp_model* m) {
    if (!m || !m->finalized) return NULL;
    ampi_refresh(m);
    return &m->training.scaler;
}
AMP_DEF amp_optimizer* amp_model_optimizer(amp_model* m) {
    if (!m || !m->finalized || !m->param_count) return NULL;
    ampi_refresh(m);
    return &m->training.optimizer;
}
AMP_DEF const amp_policy* amp_model_policy(const amp_model* m) { return m ? &m->policy : NULL; }

/* --- what a checkpoint needs ----------------------------------------------------------------- */

AMPI_FN int ampi_model_ready(const amp_model* m) { return m->finalized; }
AMPI_FN int ampi_model_mid_step(const amp_model* m) { return m->micro != 0; }
AMPI_FN uint64_t ampi_model_pass_count(const amp_model* m) { return m->training.passes; }

AMPI_FN uint64_t ampi_hash_words(uint64_t h, const uint32_t* words, size_t count) {
    size_t i;
    for (i = 0; i < count; i++) h = (h ^ words[i]) * 1099511628211u;
    return h;
}

/* One number for everything that decides the arithmetic of a pass and is not a weight: operators, their wiring,
   types and settings (FNV-1a, 64 bits). The batch size is left out: predicting with another one is common. */
AMPI_FN uint64_t ampi_model_fingerprint(const amp_model* m) {
    uint64_t h = 14695981039346656037u;
    int i;
    for (i = 0; i < m->layer_count; i++) {
        const ampi_node* n = &m->nodes[i];
        const amp_layer* l = &n->layer;
        amp_conv2d_shape conv = n->conv;
        amp_pool2d_shape pool = n->pool;
        uint32_t shapes[(sizeof conv + sizeof pool) / 4];     /* both are ints only */
        const uint32_t words[] = {
            (uint32_t)l->op, (uint32_t)l->compute_dtype, (uint32_t)l->storage_dtype, (uint32_t)l->param_dtype,
            (uint32_t)l->channels, (uint32_t)l->height, (uint32_t)l->width, (uint32_t)n->group,
            (uint32_t)n->inputs[0], (uint32_t)n->inputs[1], ampi_bits(n->p), ampi_bits(n->eps),
            ampi_bits(n->momentum), ampi_bits(n->loss_weight), ampi_bits(n->smoothing)
        };
        conv.n = pool.n = 0;
        memcpy(shapes, &conv, sizeof conv);
        memcpy(shapes + sizeof conv / 4, &pool, sizeof pool);
        h = ampi_hash_words(h, words, sizeof words / sizeof words[0]);
        h = ampi_hash_words(h, shapes, sizeof shapes / sizeof shapes[0]);
    }
    return h;
}
AMPI_FN void ampi_model_set_pass_count(amp_model* m, uint64_t n) { m->training.passes = n; }
AMPI_FN amp_result ampi_model_download(amp_model* m, void* host, const void* from, size_t bytes) {
    return m->backend->copy_out(host, from, bytes, &m->exec);
}
AMPI_FN amp_result ampi_model_upload(amp_model* m, void* to, const void* host, size_t bytes) {
    return m->backend->copy_in(to, host, bytes, &m->exec);
}

/* State tensor i: for each parameter its weights, m and v; then the running statistics of each batch norm. */
AMPI_FN int ampi_model_state_count(const amp_model* m) {
    int i, count = 0;
    for (i = 0; i < m->param_count; i++) count += 1 + (m->params[i].m != NULL) + (m->params[i].v != NULL);
    for (i = 0; i < m->layer_count; i++) count += m->nodes[i].layer.op == AMP_OP_BATCH_NORM ? 2 : 0;
    return count;
}

/* Shape of a parameter: conv2d weight [O,C/groups,KH,KW], linear weight [O,I], everything else [count]. */
AMPI_FN void ampi_param_shape(const amp_model* m, int param, int* rank, size_t shape[4]) {
    int i;
    *rank = 1;
    shape[0] = m->params[param].count;
    for (i = 0; i < m->layer_count; i++) {
        const ampi_node* n = &m->nodes[i];
        if (n->weight != param) continue;
        if (n->layer.op == AMP_OP_LINEAR) {
            *rank = 2;
            shape[0] = (size_t)n->layer.channels;
            shape[1] = n->fan_in;
        }
        if (n->layer.op == AMP_OP_CONV2D) {
            *rank = 4;
            shape[0] = (size_t)n->conv.out_channels;
            shape[1] = (size_t)(n->conv.channels / n->conv.groups);
            shape[2] = (size_t)n->conv.kernel_h;
            shape[3] = (size_t)n->conv.kernel_w;
        }
    }
}

AMPI_FN void ampi_param_state(amp_model* m, int param, int which, char name[80], amp_dtype* dtype,
                              int* rank, size_t shape[4], void** data) {
    amp_param* p = &m->params[param];
    static const char* const suffix[] = { "", ".m", ".v" };
    if (which == 1 && !p->m) which = 2;
    snprintf(name, 80, "%s%s", p->name, suffix[which]);
    ampi_param_shape(m, param, rank, shape);
    *dtype = which == 0 && !p->master ? p->low_dtype : AMP_F32;
    *data = which == 0 ? (p->master ? (void*)p->master : p->low) : (void*)(which == 1 ? p->m : p->v);
}

AMPI_FN void ampi_model_state_tensor(amp_model* m, int i, char name[80], amp_dtype* dtype, int* rank,
                                     size_t shape[4], void** data) {
    int k;
    *rank = 0;
    for (k = 0; k < m->param_count; k++) {
        int own = 1 + (m->params[k].m != NULL) + (m->params[k].v != NULL);
        if (i < own) { ampi_param_state(m, k, i, name, dtype, rank, shape, data); return; }
        i -= own;
    }
    for (k = 0; k < m->layer_count; k++) {
        const ampi_node* n = &m->nodes[k];
        if (n->layer.op != AMP_OP_BATCH_NORM) continue;
        if (i < 2) {
            snprintf(name, 80, "%s.running_%s", n->layer.name, i ? "var" : "mean");
            *dtype = AMP_F32;
            *rank = 1;
            shape[0] = (size_t)n->layer.channels;
            *data = ampi_running(m, n) + i * n->layer.channels;
            return;
        }
        i -= 2;
    }
}

/* ======================================================================================== */
/* >>impl-train                                                                               */
/* ======================================================================================== */

AMP_DEF const char* amp_outcome_name(amp_outcome o) {
    switch (o) {
        case AMP_STEP_APPLIED: return "applied";
        case AMP_STEP_ACCUMULATED: return "accumulated";
        case AMP_STEP_SKIPPED_OVERFLOW: return "skipped: overflow";
        case AMP_STEP_SKIPPED_MODEL: return "skipped: model";
        case AMPI_OUTCOME_MAX: break;
    }
    return "?";
}

/* --- where things are ----------------------------------------------------------------------- */

AMPI_FN void* ampi_data(const amp_model* m, const ampi_node* n) {
    return m->blocks[AMPI_BLOCK_ARENA].base + n->data_offset;
}
AMPI_FN void* ampi_grad(const amp_model* m, const ampi_node* n) {
    return m->blocks[AMPI_BLOCK_ARENA].base + n->grad_offset;
}
AMPI_FN void* ampi_target(const amp_model* m, int loss) {
    return m->blocks[AMPI_BLOCK_TARGETS].base + m->target_offset[loss];
}
AMPI_FN float* ampi_loss_value(const amp_model* m, int loss) {
    return (float*)(void*)m->blocks[AMPI_BLOCK_LOSSES].base + loss;
}
/* The weights as a layer reads them. */
AMPI_FN const void* ampi_layer_weights(const amp_model* m, const ampi_node* n, int param) {
    if (param == AMPI_NONE) return NULL;
    return n->layer.param_dtype == AMP_F32 ? (const void*)m->params[param].master : m->params[param].low;
}
AMPI_FN void* ampi_weight_grad(const amp_model* m, int param) {
    return param == AMPI_NONE ? NULL : m->params[param].grad;
}

/* One run over the graph. */
typedef struct ampi_pass {
    int n;                     /* samples */
    int training;
    int keep_running;          /* leave batch norm's running statistics alone: looking, not training */
    float grad_factor;         /* 1 / (micro-batches * ranks) */
    int accumulate;            /* add to the weight gradients */
} ampi_pass;

/* --- forward ---------------------------------------------------------------------------------- */

AMPI_FN amp_activation ampi_activation_of(amp_op op) {
    if (op == AMP_OP_GELU) return AMP_GELU;
    if (op == AMP_OP_TANH) return AMP_TANH;
    return op == AMP_OP_SIGMOID ? AMP_SIGMOID : AMP_RELU;
}

AMPI_FN amp_result ampi_forward_matrix(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[0]];
    const void *w = ampi_layer_weights(m, n, n->weight), *b = ampi_layer_weights(m, n, n->bias);
    amp_dtype wt = n->layer.param_dtype;
    amp_conv2d_shape s = n->conv;
    if (n->layer.op == AMP_OP_LINEAR)
        return m->backend->linear_forward(ampi_data(m, x), x->layer.storage_dtype, w, wt, b, wt,
                                          ampi_data(m, n), n->layer.storage_dtype, (size_t)p->n, n->fan_in,
                                          (size_t)n->layer.channels, &m->exec);
    s.n = p->n;
    return m->backend->conv2d_forward(&s, ampi_data(m, x), x->layer.storage_dtype, w, wt, b, wt,
                                      ampi_data(m, n), n->layer.storage_dtype, &m->exec);
}

AMPI_FN amp_batch_norm_shape ampi_batch_norm_shape_of(const ampi_node* n, const ampi_pass* p) {
    amp_batch_norm_shape s;
    s.n = p->n;
    s.channels = n->layer.channels;
    s.spatial = n->layer.height * n->layer.width;
    s.eps = n->eps;
    s.momentum = p->keep_running ? (float)AMP_ZERO : n->momentum;
    return s;
}

AMPI_FN amp_result ampi_forward_norm(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[0]];
    const void *gamma = ampi_layer_weights(m, n, n->weight), *beta = ampi_layer_weights(m, n, n->bias);
    float *stats = ampi_batch_stats(m, n), *running = ampi_running(m, n);
    amp_batch_norm_shape s;
    if (n->layer.op == AMP_OP_LAYER_NORM)
        return m->backend->layer_norm_forward(ampi_data(m, x), x->layer.storage_dtype, gamma, beta,
                                              n->layer.param_dtype, n->eps, stats, stats + m->desc.batch,
                                              ampi_data(m, n), n->layer.storage_dtype, (size_t)p->n,
                                              ampi_features(n), &m->exec);
    s = ampi_batch_norm_shape_of(n, p);
    return m->backend->batch_norm_forward(&s, p->training, ampi_data(m, x), x->layer.storage_dtype, gamma,
                                          beta, n->layer.param_dtype, running, running + s.channels, stats,
                                          stats + s.channels, ampi_data(m, n), n->layer.storage_dtype,
                                          &m->exec);
}

AMPI_FN amp_result ampi_forward_loss(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[0]];
    const void *data = ampi_data(m, x), *target = ampi_target(m, n->index);
    size_t features = ampi_features(x), rows = (size_t)p->n;
    amp_dtype t = x->layer.storage_dtype;
    float* out = ampi_loss_value(m, n->index);
    if (n->layer.op == AMP_OP_MSE)
        return m->backend->mse_forward(data, t, target, AMP_F32, out, rows * features, &m->exec);
    if (n->layer.op == AMP_OP_BCE_WITH_LOGITS)
        return m->backend->bce_with_logits_forward(data, t, target, AMP_F32, out, rows * features, &m->exec);
    return m->backend->softmax_cross_entropy_forward(data, t, (const int32_t*)target, n->smoothing, out,
                                                     rows, features, &m->exec);
}

/* Dropout's stream is the layer's own; the position counts elements over all passes and ranks, so that k
   micro-batches, or k ranks, draw what one batch of k times the size would draw. */
AMPI_FN amp_result ampi_run_dropout(amp_model* m, const ampi_node* n, const ampi_pass* p, const void* from,
                                    amp_dtype from_dtype, void* to, amp_dtype to_dtype) {
    size_t count = (size_t)p->n * ampi_features(n);
    const amp_training* training = &m->training;
    uint64_t each = (uint64_t)ampi_features(n) * (uint64_t)m->desc.batch;
    uint64_t stride = each * (uint64_t)m->comm.size, offset = each * (uint64_t)m->comm.rank;
    if (!training->position) offset += training->passes * stride;
    if (!p->training) {
        if (from == to) return AMP_OK;
        return m->backend->convert(to, to_dtype, from, from_dtype, count, &m->exec);
    }
    return m->backend->dropout_forward(from, from_dtype, to, to_dtype, count, n->p,
                                       ampi_stream(m, -2 - (int)(n - m->nodes)), offset, training->position,
                                       stride, &m->exec);
}

AMPI_FN amp_result ampi_forward_pair(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node *a = &m->nodes[n->reads[0]], *b = &m->nodes[n->reads[1]];
    size_t rows = (size_t)p->n, fa = ampi_features(a), fb = ampi_features(b);
    amp_dtype t = n->layer.storage_dtype;
    amp_result r;
    if (n->layer.op == AMP_OP_ADD)
        return m->backend->add_forward(ampi_data(m, a), a->layer.storage_dtype, ampi_data(m, b),
                                       b->layer.storage_dtype, ampi_data(m, n), t, rows * fa, &m->exec);
    r = m->backend->concat_forward(ampi_data(m, a), a->layer.storage_dtype, fa, ampi_data(m, n), t, fa + fb,
                                   0, rows, &m->exec);
    if (r != AMP_OK) return r;
    return m->backend->concat_forward(ampi_data(m, b), b->layer.storage_dtype, fb, ampi_data(m, n), t,
                                      fa + fb, fa, rows, &m->exec);
}

AMPI_FN amp_result ampi_forward_node(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[0]];
    const void* from = n->input_count ? ampi_data(m, x) : NULL;
    amp_dtype ft = x->layer.storage_dtype, t = n->layer.storage_dtype;
    void* to = ampi_op_is_loss(n->layer.op) ? NULL : ampi_data(m, n);
    size_t count = (size_t)p->n * ampi_features(n);
    amp_pool2d_shape pool = n->pool;
    pool.n = p->n;
    if (n->is_cast) return m->backend->convert(to, t, from, ft, count, &m->exec);
    switch (n->layer.op) {
        case AMP_OP_INPUT: case AMP_OP_FLATTEN: return AMP_OK;
        case AMP_OP_CONV2D: case AMP_OP_LINEAR: return ampi_forward_matrix(m, n, p);
        case AMP_OP_MAX_POOL2D:
        case AMP_OP_AVG_POOL2D: return m->backend->pool2d_forward(&pool, from, ft, to, t, &m->exec);
        case AMP_OP_BATCH_NORM: case AMP_OP_LAYER_NORM: return ampi_forward_norm(m, n, p);
        case AMP_OP_RELU: case AMP_OP_GELU: case AMP_OP_TANH: case AMP_OP_SIGMOID:
            return m->backend->activation_forward(ampi_activation_of(n->layer.op), from, ft, to, t, count,
                                                  &m->exec);
        case AMP_OP_SOFTMAX:
            return m->backend->softmax_forward(from, ft, to, t, (size_t)p->n, ampi_features(n), &m->exec);
        case AMP_OP_DROPOUT: return ampi_run_dropout(m, n, p, from, ft, to, t);
        case AMP_OP_ADD: case AMP_OP_CONCAT: return ampi_forward_pair(m, n, p);
        case AMP_OP_SOFTMAX_CROSS_ENTROPY:
        case AMP_OP_MSE:
        case AMP_OP_BCE_WITH_LOGITS: return ampi_forward_loss(m, n, p);
        case AMP_OP_COUNT: case AMPI_OP_MAX: break;
    }
    return AMP_ERR_UNSUPPORTED;
}

AMPI_FN amp_result ampi_collect(amp_model* m, amp_stats* out, const void* data, amp_dtype dtype, size_t n);

/* Whether a pass that is about the losses may leave n out: a head that only predictions use. */
AMPI_FN int ampi_is_idle(const amp_model* m, const ampi_node* n) { return !n->on_loss_path && !m->observed; }

/* Runs the nodes up to and with `last`: with the losses and what leads to them, or everything but the
   losses. */
AMPI_FN amp_result ampi_forward(amp_model* m, const ampi_pass* p, int last, int with_losses) {
    int i;
    for (i = 0; i <= last; i++) {
        const ampi_node* n = &m->nodes[m->order[i]];
        amp_result r;
        if (with_losses ? ampi_is_idle(m, n) : ampi_op_is_loss(n->layer.op)) continue;
        r = ampi_forward_node(m, n, p);
        if (r == AMP_OK && m->observed && !n->is_cast && !ampi_op_is_loss(n->layer.op))
            r = ampi_collect(m, &m->observed[m->order[i]].output, ampi_data(m, n), n->layer.storage_dtype,
                             (size_t)p->n * ampi_features(n));
        if (r != AMP_OK) return r;
    }
    return AMP_OK;
}

/* --- backward --------------------------------------------------------------------------------- */

/* Where node n writes its contribution to the gradient of input j: the gradient itself, or, if another
   consumer has written there before, a buffer apart. NULL if nobody wants it. */
AMPI_FN void* ampi_grad_out(amp_model* m, const ampi_node* n, int j) {
    if (!ampi_gives_gradient(m, n, j)) return NULL;
    return n->needs_temp[j] ? (void*)(m->blocks[AMPI_BLOCK_ARENA].base + n->temp_offset[j])
                            : ampi_grad(m, &m->nodes[n->reads[j]]);
}

/* Adds the contribution that was formed apart. */
AMPI_FN amp_result ampi_grad_done(amp_model* m, const ampi_node* n, int j, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[j]];
    void *sum = ampi_grad(m, x), *part = ampi_grad_out(m, n, j);
    amp_dtype t = x->layer.storage_dtype;
    if (!part || !n->needs_temp[j]) return AMP_OK;
    return m->backend->add_forward(sum, t, part, t, sum, t, (size_t)p->n * ampi_features(x), &m->exec);
}

AMPI_FN amp_result ampi_backward_matrix(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[0]];
    const void *dy = ampi_grad(m, n), *w = ampi_layer_weights(m, n, n->weight);
    amp_dtype t = n->layer.storage_dtype, xt = x->layer.storage_dtype, gt = ampi_dtype(m->desc.grad_dtype);
    void *dx = ampi_grad_out(m, n, 0), *dw = ampi_weight_grad(m, n->weight),
         *db = ampi_weight_grad(m, n->bias);
    amp_conv2d_shape s = n->conv;
    if (n->layer.op == AMP_OP_LINEAR)
        return m->backend->linear_backward(dy, t, ampi_data(m, x), xt, w, n->layer.param_dtype, dx, xt, dw,
                                           gt, db, gt, p->accumulate, (size_t)p->n, n->fan_in,
                                           (size_t)n->layer.channels, &m->exec);
    s.n = p->n;
    return m->backend->conv2d_backward(&s, dy, t, ampi_data(m, x), xt, w, n->layer.param_dtype, dx, xt, dw,
                                       gt, db, gt, p->accumulate, &m->exec);
}

AMPI_FN amp_result ampi_backward_norm(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[0]];
    const float* stats = ampi_batch_stats(m, n);
    const void *dy = ampi_grad(m, n), *gamma = ampi_layer_weights(m, n, n->weight);
    amp_dtype t = n->layer.storage_dtype, xt = x->layer.storage_dtype, gt = ampi_dtype(m->desc.grad_dtype);
    void *dx = ampi_grad_out(m, n, 0), *dw = ampi_weight_grad(m, n->weight),
         *db = ampi_weight_grad(m, n->bias);
    amp_batch_norm_shape s;
    if (n->layer.op == AMP_OP_LAYER_NORM)
        return m->backend->layer_norm_backward(dy, t, ampi_data(m, x), xt, gamma, n->layer.param_dtype,
                                               stats, stats + m->desc.batch, dx, xt, dw, db, gt,
                                               p->accumulate, (size_t)p->n, ampi_features(n), &m->exec);
    s = ampi_batch_norm_shape_of(n, p);
    return m->backend->batch_norm_backward(&s, dy, t, ampi_data(m, x), xt, gamma, n->layer.param_dtype,
                                           stats, stats + s.channels, dx, xt, dw, db, gt, p->accumulate,
                                           &m->exec);
}

AMPI_FN amp_result ampi_backward_loss(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[0]];
    const void *data = ampi_data(m, x), *target = ampi_target(m, n->index);
    size_t features = ampi_features(x), rows = (size_t)p->n;
    amp_dtype t = x->layer.storage_dtype;
    void* dx = ampi_grad_out(m, n, 0);
    float weight = n->loss_weight * p->grad_factor;
    if (!dx) return AMP_OK;
    if (n->layer.op == AMP_OP_MSE)
        return m->backend->mse_backward(data, t, target, AMP_F32, m->training.loss_scale, weight, dx, t,
                                        rows * features, &m->exec);
    if (n->layer.op == AMP_OP_BCE_WITH_LOGITS)
        return m->backend->bce_with_logits_backward(data, t, target, AMP_F32, m->training.loss_scale, weight, dx, t,
                                                    rows * features, &m->exec);
    return m->backend->softmax_cross_entropy_backward(data, t, (const int32_t*)target, n->smoothing,
                                                      m->training.loss_scale, weight, dx, t, rows, features,
                                                      &m->exec);
}

AMPI_FN amp_result ampi_backward_pair(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const size_t total = ampi_features(n), rows = (size_t)p->n;
    size_t column = 0;
    int j;
    for (j = 0; j < 2; j++) {
        const ampi_node* x = &m->nodes[n->reads[j]];
        size_t features = ampi_features(x);
        void* dx = ampi_grad_out(m, n, j);
        amp_result r = AMP_OK;
        if (dx && n->layer.op == AMP_OP_ADD)
            r = m->backend->convert(dx, x->layer.storage_dtype, ampi_grad(m, n), n->layer.storage_dtype,
                                    rows * total, &m->exec);
        else if (dx)
            r = m->backend->concat_backward(ampi_grad(m, n), n->layer.storage_dtype, total, column, dx,
                                            x->layer.storage_dtype, features, rows, 0, &m->exec);
        if (r == AMP_OK) r = ampi_grad_done(m, n, j, p);
        if (r != AMP_OK) return r;
        column += features;
    }
    return AMP_OK;
}

/* Operators with one input and no parameters. */
AMPI_FN amp_result ampi_backward_simple(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    const ampi_node* x = &m->nodes[n->reads[0]];
    const void *dy = ampi_grad(m, n), *saved = ampi_data(m, n->layer.op == AMP_OP_GELU ? x : n);
    amp_dtype t = n->layer.storage_dtype, xt = x->layer.storage_dtype;
    size_t count = (size_t)p->n * ampi_features(n);
    void* dx = ampi_grad_out(m, n, 0);
    amp_pool2d_shape pool = n->pool;
    pool.n = p->n;
    if (!dx) return AMP_OK;
    if (n->is_cast) return m->backend->convert(dx, xt, dy, t, count, &m->exec);
    switch (n->layer.op) {
        case AMP_OP_MAX_POOL2D: case AMP_OP_AVG_POOL2D:
            return m->backend->pool2d_backward(&pool, dy, t,
                                               n->layer.op == AMP_OP_MAX_POOL2D ? ampi_data(m, x) : NULL,
                                               xt, dx, xt, &m->exec);
        case AMP_OP_SOFTMAX:
            return m->backend->softmax_backward(dy, t, saved, t, dx, xt, (size_t)p->n, ampi_features(n),
                                                &m->exec);
        case AMP_OP_DROPOUT: return ampi_run_dropout(m, n, p, dy, t, dx, xt);
        default:
            return m->backend->activation_backward(ampi_activation_of(n->layer.op), dy, t, saved,
                                                   n->layer.op == AMP_OP_GELU ? xt : t, dx, xt, count,
                                                   &m->exec);
    }
}

AMPI_FN amp_result ampi_backward_node(amp_model* m, const ampi_node* n, const ampi_pass* p) {
    amp_result r;
    if (ampi_is_view(n) || n->input_count == 0) return AMP_OK;
    if (n->input_count == 2) return ampi_backward_pair(m, n, p);
    if (!n->is_cast && (n->layer.op == AMP_OP_CONV2D || n->layer.op == AMP_OP_LINEAR))
        r = ampi_backward_matrix(m, n, p);
    else if (!n->is_cast && ampi_is_norm(n)) r = ampi_backward_norm(m, n, p);
    else if (!n->is_cast && ampi_op_is_loss(n->layer.op)) r = ampi_backward_loss(m, n, p);
    else r = ampi_backward_simple(m, n, p);
    return r == AMP_OK ? ampi_grad_done(m, n, 0, p) : r;
}

AMPI_FN amp_result ampi_backward(amp_model* m, const ampi_pass* p) {
    int i;
    for (i = m->node_count - 1; i >= 0; i--) {
        const ampi_node* n = &m->nodes[m->order[i]];
        amp_result r = AMP_OK;
        if (!n->on_loss_path || !n->needs_grad) continue;
        if (m->observed && !n->is_cast && !ampi_op_is_loss(n->layer.op) && !ampi_is_view(n))
            r = ampi_collect(m, &m->observed[m->order[i]].output_gradient, ampi_grad(m, n),
                             n->layer.storage_dtype, (size_t)p->n * ampi_features(n));
        if (r == AMP_OK) r = ampi_backward_node(m, n, p);
        if (r != AMP_OK) return r;
    }
    return AMP_OK;
}

/* --- data --------------------------------------------------------------------------------------- */

AMPI_FN amp_result ampi_batch_labels(amp_model* m, const amp_batch* b, const ampi_node* loss) {
    const int32_t* labels = (const int32_t*)b->targets[loss->index];
    int i, classes = (int)ampi_features(&m->nodes[loss->reads[0]]);
    for (i = 0; i < b->n; i++)
        if (labels[i] < 0 || labels[i] >= classes)
            return ampi_model_fail(m, AMP_ERR_ARGUMENT,
                                   "layer '%s': label %ld of sample %d is outside 0..%d", loss->layer.name,
                                   (long)labels[i], i, classes - 1);
    return AMP_OK;
}

AMPI_FN int ampi_batch_lies_right(const amp_model* m, const amp_batch* b, const void* p) {
    return !b->on_device || !m->backend->reaches || m->backend->reaches(p);
}
AMPI_FN amp_result ampi_check_batch(amp_model* m, const amp_batch* b, const char* what, int with_targets) {
    int i;
    if (!m->finalized) return ampi_model_fail(m, AMP_ERR_STATE, "%s: the model is not finalized", what);
    if (!b) return ampi_model_fail(m, AMP_ERR_ARGUMENT, "%s: the batch is NULL", what);
    if (b->n < 1 || b->n > m->desc.batch)
        return ampi_model_fail(m, AMP_ERR_ARGUMENT, "%s: %d samples, the model takes 1 to %d", what, b->n,
                               m->desc.batch);
    if (amp_dtype_size(b->input_dtype) == 0)
        return ampi_model_fail(m, AMP_ERR_DTYPE, "%s: input_dtype %d does not exist", what,
                               (int)b->input_dtype);
    for (i = 0; i < m->input_count; i++)
        if (!b->inputs[i]) return ampi_model_fail(m, AMP_ERR_ARGUMENT, "%s: inputs[%d] is NULL", what, i);
        else if (!ampi_batch_lies_right(m, b, b->inputs[i]))
            return ampi_model_fail(m, AMP_ERR_ARGUMENT, "%s: inputs[%d] is not memory of the backend '%s'", what, i,
                                   m->backend->name);
    for (i = 0; with_targets && i < m->loss_count; i++) {
        const ampi_node* loss = &m->nodes[m->losses[i]];
        amp_result r;
        if (!b->targets[i])
            return ampi_model_fail(m, AMP_ERR_ARGUMENT, "%s: targets[%d] for '%s' is NULL", what, i,
                                   loss->layer.name);
        if (!ampi_batch_lies_right(m, b, b->targets[i]))
            return ampi_model_fail(m, AMP_ERR_ARGUMENT, "%s: targets[%d] is not memory of the backend '%s'", what, i,
                                   m->backend->name);
        if (loss->layer.op != AMP_OP_SOFTMAX_CROSS_ENTROPY || b->on_device) continue;
        if ((r = ampi_batch_labels(m, b, loss)) != AMP_OK) return r;
    }
    return AMP_OK;
}

AMPI_FN amp_result ampi_load_inputs(amp_model* m, const amp_batch* b) {
    amp_result r = AMP_OK;
    int i;
    for (i = 0; i < m->input_count && r == AMP_OK; i++) {
        const ampi_node* n = &m->nodes[m->inputs[i]];
        r = (b->on_device ? m->backend->convert : m->backend->upload)(
            ampi_data(m, n), n->layer.storage_dtype, b->inputs[i], b->input_dtype,
            (size_t)b->n * ampi_features(n), &m->exec);
    }
    return r;
}

AMPI_FN amp_result ampi_load_targets(amp_model* m, const amp_batch* b) {
    amp_result r = AMP_OK;
    int i;
    for (i = 0; i < m->loss_count && r == AMP_OK; i++) {
        const ampi_node* loss = &m->nodes[m->losses[i]];
        size_t per_row =
            loss->layer.op == AMP_OP_SOFTMAX_CROSS_ENTROPY ? 1 : ampi_features(&m->nodes[loss->reads[0]]);
        r = (b->on_device ? m->backend->copy : m->backend->copy_in)(
            ampi_target(m, i), b->targets[i], (size_t)b->n * per_row * 4, &m->exec);
    }
    return r;
}

/* Weighted sum of the losses of the last forward pass. */
AMPI_FN amp_result ampi_total_loss(amp_model* m, float* total) {
    double sum = 0.0;
    int i;
    for (i = 0; i < m->loss_count; i++) {
        float value = 0.0f;
        amp_result r = m->backend->copy_out(&value, ampi_loss_value(m, i), sizeof value, &m->exec);
        if (r != AMP_OK) return r;
        sum += (double)m->nodes[m->losses[i]].loss_weight * (double)value;
    }
    *total = (float)sum;
    return AMP_OK;
}

/* --- the step ------------------------------------------------------------------------------------- */

/* Batch norm's running statistics, so that a skipped step can put them back. */
AMPI_FN amp_result ampi_copy_running(amp_model* m, int restore) {
    char *now = m->blocks[AMPI_BLOCK_STATS].base, *saved = m->blocks[AMPI_BLOCK_STATS_SAVED].base;
    if (m->stats_floats == 0) return AMP_OK;
    return m->backend->copy(restore ? now : saved, restore ? saved : now, m->stats_floats * sizeof(float),
                            &m->exec);
}

AMPI_FN int ampi_first_bad(amp_model* m, const ampi_node* n, int samples, size_t* index, const char** what) {
    enum { CHUNK = 2048 };
    float values[CHUNK];
    size_t at, i, count = (size_t)samples * ampi_features(n), size = amp_dtype_size(n->layer.storage_dtype);
    for (at = 0; at < count; at += CHUNK) {
        size_t k = count - at < CHUNK ? count - at : (size_t)CHUNK;
        if (m->backend->download(values, AMP_F32, (const char*)ampi_data(m, n) + at * size,
                                 n->layer.storage_dtype, k, &m->exec)
            != AMP_OK)
            return 0;
        for (i = 0; i < k; i++) {
            if (amp_float_is_finite(&values[i])) continue;
            *index = at + i;
            *what = amp_float_is_nan(&values[i]) ? "nan" : "inf";
            return 1;
        }
    }
    return 0;
}

/* Runs the forward pass once more, looking at each value as it is made, and says where inf or NaN began.
   Returns 0 if they begin nowhere: then only the loss scale is to blame. The arena holds only forward
   values afterwards. */
AMPI_FN int ampi_diagnose_forward(amp_model* m, const amp_batch* b, const ampi_pass* pass, float loss,
                                  char* message, size_t size) {
    ampi_pass p = *pass;
    int i;
    p.keep_running = 1;
    if (ampi_load_inputs(m, b) != AMP_OK) return 0;
    for (i = 0; i < m->node_count; i++) {
        const ampi_node* n = &m->nodes[m->order[i]];
        const char *what = "", *name = n->is_cast ? m->nodes[n->reads[0]].layer.name : n->layer.name;
        size_t index = 0;
        if (ampi_is_idle(m, n) || ampi_op_is_loss(n->layer.op)) continue;
        if (n->input_count && ampi_forward_node(m, n, &p) != AMP_OK) return 0;
        if (!ampi_first_bad(m, n, p.n, &index, &what)) continue;
        snprintf(
            message, size,
            "the model produces %s: first in the %s of '%s', element %lu; a lower loss scale does not help",
            what, n->is_cast ? "16-bit copy" : "output", name, (unsigned long)index);
        return 1;
    }
    AMPI_FORGET(&loss);
    if (amp_float_is_finite(&loss)) return 0;
    snprintf(message, size, "the loss is %s although every layer's output is finite: look at the targets",
             amp_float_is_nan(&loss) ? "nan" : "inf");
    return 1;
}

AMPI_FN void ampi_describe_overflow(const amp_model* m, const amp_step_info* info, char* message,
                                    size_t size) {
    const amp_overflow_info* o = &info->overflow;
    const amp_scaler_rule* rule = &m->training.scaler.rule;
    int at_floor = rule->min > 0.0f && info->scale_before <= rule->min;
    if (o->inf_count + o->nan_count == 0)
        snprintf(message, size, "a gradient of another rank is not finite with loss scale %g",
                 (double)info->scale_before);
    else
        snprintf(message, size,
                 "gradient of '%s' is not finite at element %lu; %lu inf, %lu nan in all; loss scale %.17g%s",
                 o->first_name[0] ? o->first_name : "?", (unsigned long)o->first_index,
                 (unsigned long)o->inf_count, (unsigned long)o->nan_count, (double)info->scale_before,
                 rule->is_static ? "; the scale is static"
                 : at_floor      ? "; the scale is at its floor"
                                 : "");
}

/* *flag = 1 if it is not 0 on any rank. */
AMPI_FN amp_result ampi_any_rank(amp_model* m, int* flag) {
    float *sum = ampi_loss_value(m, m->loss_count), found = *flag ? 1.0f : 0.0f;
    amp_result r = AMP_OK;
    if (m->comm.size == 1) return AMP_OK;
    r = m->backend->copy_in(sum, &found, sizeof found, &m->exec);
    if (r == AMP_OK && m->comm.all_reduce_sum(sum, AMP_F32, 1, m->exec.stream, m->comm.user_data) != AMP_OK)
        r = ampi_model_fail(m, AMP_ERR_COMM, "train step: the sum of a flag over the ranks failed");
    if (r == AMP_OK) r = m->backend->copy_out(&found, sum, sizeof found, &m->exec);
    if (r == AMP_OK) *flag = found != 0.0f;
    return r;
}

/* Sums the gradients over the ranks; a rank that saw an overflow makes all skip. */
AMPI_FN amp_result ampi_reduce_gradients(amp_model* m) {
    const ampi_allocation* grads = &m->blocks[AMPI_BLOCK_GRADS];
    const amp_comm* comm = &m->comm;
    amp_dtype t = ampi_dtype(m->desc.grad_dtype);
    float* flag = ampi_loss_value(m, m->loss_count);
    amp_result r;
    if (comm->size == 1) return AMP_OK;
    if (comm->all_reduce_sum(grads->base, t, grads->bytes / amp_dtype_size(t), m->exec.stream, comm->user_data)
        != AMP_OK)
        return ampi_model_fail(m, AMP_ERR_COMM, "train step: the sum of the gradients over the ranks failed");
    r = m->backend->training_check(&m->training, m->grad_list, m->param_count, flag, &m->exec);
    if (r == AMP_OK && comm->all_reduce_sum(flag, AMP_F32, 1, m->exec.stream, comm->user_data) != AMP_OK)
        r = ampi_model_fail(m, AMP_ERR_COMM, "train step: the sum of a flag over the ranks failed");
    return r == AMP_OK ? m->backend->training_agree(&m->training, flag, &m->exec) : r;
}

AMPI_FN ampi_pass ampi_training_pass(const amp_model* m, int n) {
    ampi_pass p;
    memset(&p, 0, sizeof p);
    p.n = n;
    p.training = 1;
    p.grad_factor = (float)(1.0 / ((double)m->desc.accumulate * (double)m->comm.size));
    p.accumulate = m->micro > 0;
    return p;
}

/* Says why a step was skipped. The ranks agree on the outcome, so that they repeat the batch together or not
   at all. */
AMPI_FN amp_result ampi_explain_skip(amp_model* m, const amp_batch* b, const ampi_pass* p,
                                     amp_step_info* info) {
    int own = m->trouble[0] || ampi_diagnose_forward(m, b, p, info->loss, m->trouble, sizeof m->trouble),
        any = own;
    amp_result r = ampi_any_rank(m, &any);
    if (!any) return r;
    info->outcome = AMP_STEP_SKIPPED_MODEL;
    if (own) memcpy(info->message, m->trouble, sizeof info->message);
    else snprintf(info->message, sizeof info->message, "the model produces inf or nan on another rank");
    return r;
}

/* What the last step did, from the training state as read. */
AMPI_FN void ampi_tell_step(const amp_model* m, amp_step_info* info) {
    const amp_training* t = &m->training;
    info->scale_before = t->scale_used;
    info->scale_after = t->scaler.state.scale;
    info->step = t->optimizer.state.step;
    info->skipped = t->scaler.state.skipped;
    info->lr = t->last.lr;
    info->overflow = t->last.overflow;
    info->grad_norm = t->last.applied ? t->last.grad_norm : ampi_double(0x7ff0000000000000u);
    info->outcome = t->last.applied ? AMP_STEP_APPLIED : AMP_STEP_SKIPPED_OVERFLOW;
    info->message[0] = 0;
    if (!t->last.applied) ampi_describe_overflow(m, info, info->message, sizeof info->message);
}

/* Takes a failed step back, so that the next call starts afresh: the running statistics, and the
   scaler's window if it is still open. */
AMPI_FN amp_result ampi_abandon_step(amp_model* m, amp_result why) {
    m->micro = 0;
    ampi_copy_running(m, 1);
    m->backend->training_abandon(&m->training, &m->exec);
    return why;
}

/* The work that is the same for each batch: forward, backward, and with the last micro-batch the end of the
   window: all-reduce, check, step or skip, move the scale. */
AMPI_FN amp_result ampi_run_step(amp_model* m, const ampi_pass* p) {
    char *now = m->blocks[AMPI_BLOCK_STATS].base, *saved = m->blocks[AMPI_BLOCK_STATS_SAVED].base;
    amp_result r = AMP_OK;
    if (m->backend->training_pass) r = m->backend->training_pass(&m->training, &m->exec);
    if (r == AMP_OK && !p->accumulate) r = ampi_copy_running(m, 0);
    if (r == AMP_OK) r = ampi_forward(m, p, m->node_count - 1, 1);
    if (r == AMP_OK) r = ampi_backward(m, p);
    if (r != AMP_OK || m->micro < m->desc.accumulate) return r;
    r = ampi_reduce_gradients(m);
    if (r != AMP_OK) return r;
    return m->backend->training_step(&m->training, now, saved, m->stats_floats * sizeof(float), &m->exec);
}

/* The same, or a replay of its record. What differs between calls is in the key. */
AMPI_FN amp_result ampi_replay_step(amp_model* m, const ampi_pass* p) {
    uint64_t place = (p->accumulate ? 1u : 0u) | (m->micro == m->desc.accumulate ? 2u : 0u);
    amp_record mode = AMP_RECORD_OFF;
    amp_result r;
    if (m->backend->record) {
        r = m->backend->record(&m->training, (uint64_t)p->n << 2 | place, &mode, &m->exec);
        if (r != AMP_OK || mode == AMP_RECORD_REPLAYED) return r;
    }
    r = ampi_run_step(m, p);
    return mode == AMP_RECORD_ON ? m->backend->record_end(&m->training, r, &m->exec) : r;
}

/* Reads what the caller wants to know. */
AMPI_FN void ampi_tell_micro_batch(const amp_model* m, amp_step_info* info) {
    info->outcome = AMP_STEP_ACCUMULATED;
    info->step = m->training.optimizer.state.step;
    info->skipped = m->training.scaler.state.skipped;
    info->scale_before = info->scale_after = m->training.scaler.state.scale;
    info->overflow.first_tensor = -1;
}
AMPI_FN amp_result ampi_report_step(amp_model* m, const amp_batch* b, const ampi_pass* p,
                                    amp_step_info* info) {
    amp_result r = ampi_total_loss(m, &info->loss);
    AMPI_FORGET(&info->loss);      /* its bits will be tested */
    if (r == AMP_OK) r = ampi_refresh(m);
    if (r != AMP_OK) return r;
    if (m->micro == m->desc.accumulate) {
        ampi_tell_step(m, info);
        return m->training.last.applied ? AMP_OK : ampi_explain_skip(m, b, p, info);
    }
    ampi_tell_micro_batch(m, info);
    /* This batch will be gone when the step ends. */
    if (!m->trouble[0] && !amp_float_is_finite(&info->loss))
        ampi_diagnose_forward(m, b, p, info->loss, m->trouble, sizeof m->trouble);
    return AMP_OK;
}

/* info is NULL if nobody waits for the outcome. */
AMPI_FN amp_result ampi_attempt(amp_model* m, const amp_batch* b, amp_step_info* info) {
    ampi_pass p = ampi_training_pass(m, b->n);
    int last = m->micro + 1 == m->desc.accumulate;
    amp_result r;
    if (m->micro++ == 0) m->trouble[0] = 0;
    r = m->backend->training_begin(&m->training, 1, &m->exec);
    if (r == AMP_OK) r = ampi_load_inputs(m, b);
    if (r == AMP_OK) r = ampi_load_targets(m, b);
    if (r == AMP_OK) r = ampi_replay_step(m, &p);
    if (r == AMP_OK) m->stale = m->backend->asynchronous;
    if (r == AMP_OK && info) r = ampi_report_step(m, b, &p, info);
    if (r != AMP_OK) return ampi_abandon_step(m, r);
    m->training.passes++;
    if (!last) return AMP_OK;
    m->micro = 0;
    m->stepped = 1;
    return info ? m->training.limit : AMP_OK;   /* a limit of the scaler: the step was skipped all the same */
}

/* What must hold for a training pass beyond what evaluation needs. */
AMPI_FN amp_result ampi_check_training(amp_model* m, const amp_batch* b, const char* what) {
    int i;
    if (m->loss_count == 0) return ampi_model_fail(m, AMP_ERR_STATE, "%s: the model has no loss", what);
    if (m->param_count == 0)
        return ampi_model_fail(m, AMP_ERR_STATE, "%s: the model has no parameters", what);
    for (i = 0; i < m->layer_count; i++) {
        const amp_layer* l = &m->nodes[i].layer;
        if (l->op == AMP_OP_BATCH_NORM && b->n == 1 && l->height == 1 && l->width == 1)
            return ampi_model_fail(
                m, AMP_ERR_ARGUMENT,
                "%s: layer '%s' needs more than one value per channel, but the batch has 1 sample", what,
                l->name);
    }
    return AMP_OK;
}

AMP_DEF amp_result amp_train_step(amp_model* m, const amp_batch* batch, amp_step_info* info) {
    amp_step_info own;
    fenv_t floats;
    amp_result r;
    if (!m) return AMP_ERR_ARGUMENT;
    if ((r = ampi_check_batch(m, batch, "train step", 1)) != AMP_OK) return r;
    if ((r = ampi_check_training(m, batch, "train step")) != AMP_OK) return r;
    if (!info && m->backend->asynchronous && m->desc.max_replays == 0) return ampi_attempt(m, batch, NULL);
    if (!info) info = &own;
    memset(info, 0, sizeof *info);
    info->step = m->training.optimizer.state.step;
    info->skipped = m->training.scaler.state.skipped;
    info->overflow.first_tensor = -1;
    feholdexcept(&floats);      /* an overflow is data here, not a trap */
    do {
        info->message[0] = 0;
        info->attempts++;
        r = ampi_attempt(m, batch, info);
    } while (r == AMP_OK && info->outcome == AMP_STEP_SKIPPED_OVERFLOW
             && info->attempts <= m->desc.max_replays);
    fesetenv(&floats);
    return r;
}

AMP_DEF amp_result amp_train_read(amp_model* m, amp_step_info* info) {
    amp_result r;
    if (!m) return AMP_ERR_ARGUMENT;
    if (!info) return ampi_model_fail(m, AMP_ERR_ARGUMENT, "train read: info is NULL");
    if (!m->finalized || (!m->stepped && m->micro == 0))
        return ampi_model_fail(m, AMP_ERR_STATE, "train read: no step was made");
    memset(info, 0, sizeof *info);
    r = ampi_total_loss(m, &info->loss);
    if (r == AMP_OK) r = ampi_refresh(m);
    if (r != AMP_OK) return r;
    info->attempts = 1;
    if (m->micro > 0) {
        ampi_tell_micro_batch(m, info);
        return AMP_OK;
    }
    ampi_tell_step(m, info);
    return m->training.limit;
}

/* --- evaluation ------------------------------------------------------------------------------------ */

/* How many rows have their largest logit at the label; the first of equal ones counts, as with argmax
   elsewhere. */
AMPI_FN amp_result ampi_count_correct(amp_model* m, const amp_batch* b, const ampi_node* loss, int* correct) {
    const ampi_node* x = &m->nodes[loss->reads[0]];
    const size_t classes = ampi_features(x), size = amp_dtype_size(x->layer.storage_dtype);
    const size_t most = ampi_rows_at_once(classes);
    float* rows = (float*)(void*)m->blocks[AMPI_BLOCK_ROW].base;
    int32_t* labels = (int32_t*)(void*)(rows + most * classes);
    size_t i, j, n;
    for (i = 0; i < (size_t)b->n; i += n) {
        amp_result r;
        n = ampi_min_size((size_t)b->n - i, most);
        r = m->backend->download(rows, AMP_F32, (const char*)ampi_data(m, x) + i * classes * size,
                                 x->layer.storage_dtype, n * classes, &m->exec);
        if (r == AMP_OK)
            r = m->backend->copy_out(labels, (const int32_t*)ampi_target(m, loss->index) + i,
                                     n * sizeof *labels, &m->exec);
        if (r != AMP_OK) return r;
        for (j = 0; j < n; j++) {
            const float* row = rows + j * classes;
            size_t k, best = 0;
            for (k = 1; k < classes; k++) if (row[k] > row[best]) best = k;
            *correct += (int64_t)best == labels[j] && !amp_float_is_nan(&row[best]);
        }
    }
    return AMP_OK;
}

/* Logits may give their memory to later layers, so answers are counted right after each loss. */
AMP_DEF amp_result amp_evaluate(amp_model* m, const amp_batch* batch, amp_eval_info* info) {
    ampi_pass p;
    fenv_t floats;
    amp_result r;
    int i;
    if (!m) return AMP_ERR_ARGUMENT;
    if (!info) return ampi_model_fail(m, AMP_ERR_ARGUMENT, "evaluate: info is NULL");
    if ((r = ampi_check_batch(m, batch, "evaluate", 1)) != AMP_OK) return r;
    memset(info, 0, sizeof *info);
    memset(&p, 0, sizeof p);
    p.n = batch->n;
    feholdexcept(&floats);
    r = ampi_load_inputs(m, batch);
    if (r == AMP_OK) r = ampi_load_targets(m, batch);
    for (i = 0; i < m->node_count && r == AMP_OK; i++) {
        const ampi_node* n = &m->nodes[m->order[i]];
        if (ampi_is_idle(m, n)) continue;
        r = ampi_forward_node(m, n, &p);
        if (r == AMP_OK && n->layer.op == AMP_OP_SOFTMAX_CROSS_ENTROPY)
            r = ampi_count_correct(m, batch, n, &info->correct);
    }
    if (r == AMP_OK) r = ampi_total_loss(m, &info->loss);
    fesetenv(&floats);
    return r;
}

AMP_DEF amp_result amp_predict(amp_model* m, const amp_batch* batch, amp_value v, float* out) {
    const ampi_node* n;
    ampi_pass p;
    fenv_t floats;
    amp_result r;
    if (!m) return AMP_ERR_ARGUMENT;
    if ((r = ampi_check_batch(m, batch, "predict", 0)) != AMP_OK) return r;
    if (!out || v.id < 1 || v.id > m->layer_count || ampi_op_is_loss(m->nodes[v.id - 1].layer.op))
        return ampi_model_fail(m, AMP_ERR_ARGUMENT,
                               "predict: out is NULL, or value %d is not an output of this model", v.id);
    n = &m->nodes[ampi_source(m, v.id - 1)];    /* before a layer that works in place has been there */
    memset(&p, 0, sizeof p);
    p.n = batch->n;
    feholdexcept(&floats);
    r = ampi_load_inputs(m, batch);
    if (r == AMP_OK) r = ampi_forward(m, &p, n->order, 0);
    if (r == AMP_OK)
        r = m->backend->download(out, AMP_F32, ampi_data(m, n), n->layer.storage_dtype,
                                 (size_t)p.n * ampi_features(n), &m->exec);
    fesetenv(&floats);
    return r;
}

/* ======================================================================================== */
/* >>impl-checkpoint                                                                          */
/* ======================================================================================== */
#if !defined(AMP_NO_STDIO)
#include <errno.h>
#if defined(__unix__) || defined(__APPLE__)
  #include <fcntl.h>
  #include <unistd.h>
#endif

/* The format, after the description in https://github.com/huggingface/safetensors:
     8 bytes   N, little-endian
     N bytes   a JSON object in UTF-8 that begins with '{' and may end in spaces:
                 "name": {"dtype": "F32", "shape": [2,3], "data_offsets": [begin, end]}, ...
                 "__metadata__": {"key": "text", ...}   (optional)
     the rest  data, row-major, little-endian, found through the offsets; it has neither holes nor overlaps
               nor anything behind the last tensor.
   The CRC-32 of a tensor's bytes is the text "amp.crc32.<name>" of __metadata__, in eight hexadecimal digits.
   A file may come from anywhere, so nothing in it is believed before it was compared with something else,
   nothing recurses, and the work is at most n log n in the size of the header. */
#define AMPI_FILE_MAX_HEADER 100000000u   /* the limit of the format's own library */
#define AMPI_FILE_MAX_RANK 4
#define AMPI_CRC_KEY "amp.crc32."
#define AMPI_CRC_KEY_LENGTH (sizeof AMPI_CRC_KEY - 1)

/* Every type of the format, because tensors that nobody asked for must be measured too. The first four are
   ours. */
typedef struct ampi_file_type { const char* name; amp_dtype dtype; unsigned bits; } ampi_file_type;
static const ampi_file_type ampi_file_types[] = {
    { "F32", AMP_F32, 32 }, { "F16", AMP_F16, 16 }, { "BF16", AMP_BF16, 16 }, { "F64", AMP_F64, 64 },
    { "BOOL", AMP_DTYPE_DEFAULT, 8 }, { "U8", AMP_DTYPE_DEFAULT, 8 }, { "I8", AMP_DTYPE_DEFAULT, 8 },
    { "I16", AMP_DTYPE_DEFAULT, 16 }, { "U16", AMP_DTYPE_DEFAULT, 16 }, { "I32", AMP_DTYPE_DEFAULT, 32 },
    { "U32", AMP_DTYPE_DEFAULT, 32 }, { "I64", AMP_DTYPE_DEFAULT, 64 }, { "U64", AMP_DTYPE_DEFAULT, 64 },
    { "C64", AMP_DTYPE_DEFAULT, 64 }, { "F4", AMP_DTYPE_DEFAULT, 4 }, { "F6_E2M3", AMP_DTYPE_DEFAULT, 6 },
    { "F6_E3M2", AMP_DTYPE_DEFAULT, 6 }, { "F8_E4M3", AMP_DTYPE_DEFAULT, 8 },
    { "F8_E5M2", AMP_DTYPE_DEFAULT, 8 }, { "F8_E8M0", AMP_DTYPE_DEFAULT, 8 },
    { "F8_E4M3FNUZ", AMP_DTYPE_DEFAULT, 8 }, { "F8_E5M2FNUZ", AMP_DTYPE_DEFAULT, 8 }
};
#define AMPI_FILE_TYPE_COUNT (sizeof ampi_file_types / sizeof ampi_file_types[0])

/* The format's name for one of our types; NULL if it is not an amp_dtype. */
AMPI_FN const ampi_file_type* ampi_file_type_of(amp_dtype t) {
    size_t i;
    for (i = 0; i < 4; i++)
        if (ampi_file_types[i].dtype == ampi_dtype(t)) return &ampi_file_types[i];
    return NULL;
}

/* --- sorting and searching records that begin with their name ---------------------------- */

typedef int (*ampi_less)(const void* a, const void* b);

/* The name that a record begins with. */
AMPI_FN const char* ampi_name_of(const void* record) { return *(const char* const*)record; }
AMPI_FN int ampi_name_less(const void* a, const void* b) {
    return strcmp(ampi_name_of(a), ampi_name_of(b)) < 0;
}

/* Exchanges two records byte by byte: they may be of any size and alignment. */
AMPI_FN void ampi_swap_records(unsigned char* a, unsigned char* b, size_t size) {
    size_t i;
    for (i = 0; i < size; i++) { unsigned char t = a[i]; a[i] = b[i]; b[i] = t; }
}

/* Lets the record at `root` sink until no child is larger: children of i are 2i+1 and 2i+2. */
AMPI_FN void ampi_sift_down(unsigned char* base, size_t root, size_t n, size_t size, ampi_less less) {
    size_t child;
    while ((child = 2 * root + 1) < n) {
        if (child + 1 < n && less(base + child * size, base + (child + 1) * size)) child++;
        if (!less(base + root * size, base + child * size)) return;
        ampi_swap_records(base + root * size, base + child * size, size);
        root = child;
    }
}

/* Heap sort: in place, and n log n for every input. qsort promises neither, and a hostile file would ask. */
AMPI_FN void ampi_sort(void* records, size_t n, size_t size, ampi_less less) {
    unsigned char* base = (unsigned char*)records;
    size_t i;
    for (i = n / 2; i-- > 0;) ampi_sift_down(base, i, n, size, less);
    for (i = n; i-- > 1;) {
        ampi_swap_records(base, base + i * size, size);
        ampi_sift_down(base, 0, i, size, less);
    }
}

/* Sorts by name and returns a name that occurs twice; NULL if there is none. */
AMPI_FN const char* ampi_sort_names(void* records, size_t n, size_t size) {
    const unsigned char* base = (const unsigned char*)records;
    size_t i;
    ampi_sort(records, n, size, ampi_name_less);
    for (i = 1; i < n; i++)
        if (strcmp(ampi_name_of(base + (i - 1) * size), ampi_name_of(base + i * size)) == 0)
            return ampi_name_of(base + i * size);
    return NULL;
}

/* The record of that name among n sorted ones, or NULL. */
AMPI_FN void* ampi_find_name(void* records, size_t n, size_t size, const char* name) {
    unsigned char* base = (unsigned char*)records;
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(ampi_name_of(base + middle * size), name);
        if (order == 0) return base + middle * size;
        if (order < 0) low = middle + 1; else high = middle;
    }
    return NULL;
}

/* --- texts and bytes ------------------------------------------------------------------- */

/* Length of the UTF-8 character at s, or 0 if it is not a valid one (Unicode, table 3-7): too long a form, a
   surrogate, above U+10FFFF or cut off. */
AMPI_FN size_t ampi_utf8_length(const char* text, size_t available) {
    const unsigned char* s = (const unsigned char*)text;
    unsigned low = 0x80, high = 0xbf;
    size_t n, i;
    if (available == 0) return 0;
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xc2 || s[0] > 0xf4) return 0;
    n = s[0] < 0xe0 ? 2 : (s[0] < 0xf0 ? 3 : 4);
    if (n > available) return 0;
    if (s[0] == 0xe0) low = 0xa0;
    if (s[0] == 0xed) high = 0x9f;
    if (s[0] == 0xf0) low = 0x90;
    if (s[0] == 0xf4) high = 0x8f;
    if (s[1] < low || s[1] > high) return 0;
    for (i = 2; i < n; i++)
        if (s[i] < 0x80 || s[i] > 0xbf) return 0;
    return n;
}

/* 1 if the whole of a C string is valid UTF-8. */
AMPI_FN int ampi_is_utf8(const char* s) {
    size_t left = strlen(s), n;
    for (; left > 0; s += n, left -= n)
        if ((n = ampi_utf8_length(s, left)) == 0) return 0;
    return 1;
}

/* A name out of a file, made fit for a sentence: no control characters, at most 60 bytes. */
#define AMPI_SHOWN 64
AMPI_FN const char* ampi_show(const char* name, char out[AMPI_SHOWN]) {
    size_t i, n = strlen(name), kept = n > 60 ? 57 : n;
    for (i = 0; i < kept; i++) out[i] = (unsigned char)name[i] < 0x20 || name[i] == 0x7f ? '?' : name[i];
    memcpy(out + kept, n > 60 ? "..." : "", n > 60 ? 4 : 1);
    return out;
}

/* "[6,1,5,5]"; of more than four dimensions the first four. */
#define AMPI_SHOWN_SHAPE 112
AMPI_FN const char* ampi_show_shape(uint64_t rank, const uint64_t* shape, char out[AMPI_SHOWN_SHAPE]) {
    size_t at = 0;
    uint64_t i;
    out[at++] = '[';
    for (i = 0; i < rank && i < AMPI_FILE_MAX_RANK; i++)
        at += (size_t)snprintf(out + at, 24, i ? ",%llu" : "%llu", (unsigned long long)shape[i]);
    memcpy(out + at, i < rank ? ",...]" : "]", i < rank ? 6 : 2);
    return out;
}

/* Bytes as text and back. */
AMPI_FN void ampi_hex_encode(const unsigned char* bytes, size_t n, char* out) {
    size_t i;
    for (i = 0; i < n; i++) snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}
AMPI_FN int ampi_hex_decode(const char* text, unsigned char* bytes, size_t n) {
    static const char digits[] = "0123456789abcdef";
    size_t i;
    if (strlen(text) != 2 * n) return 0;
    for (i = 0; i < 2 * n; i++) {
        const char* d = strchr(digits, text[i]);
        if (!d) return 0;
        bytes[i / 2] = (unsigned char)(i % 2 ? bytes[i / 2] << 4 | (d - digits) : d - digits);
    }
    return 1;
}
/* A number of exactly eight digits. */
AMPI_FN int ampi_hex_number(const char* text, uint32_t* out) {
    unsigned char b[4];
    if (!ampi_hex_decode(text, b, 4)) return 0;
    *out = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
    return 1;
}

/* A CRC-32 as text. */
#define AMPI_CRC_TEXT 9
AMPI_FN const char* ampi_show_crc(uint32_t crc, char out[AMPI_CRC_TEXT]) {
    snprintf(out, AMPI_CRC_TEXT, "%08lx", (unsigned long)crc);
    return out;
}

/* What errno says; some C libraries leave it at 0. */
AMPI_FN const char* ampi_error_text(int error_number) {
    return error_number ? strerror(error_number) : "unknown cause";
}

/* The byte order of this machine; compilers fold this to a constant. */
AMPI_FN int ampi_is_little_endian(void) {
    const uint16_t one = 1;
    unsigned char first;
    memcpy(&first, &one, 1);
    return first == 1;
}

/* Between the file's byte order and the host's: nothing to do on most machines. */
AMPI_FN void ampi_swap_endian(void* data, size_t bytes, size_t element) {
    unsigned char* p = (unsigned char*)data;
    size_t i, k;
    for (i = 0; i < bytes; i += element)
        for (k = 0; k < element / 2; k++) {
            unsigned char t = p[i + k];
            p[i + k] = p[i + element - 1 - k];
            p[i + element - 1 - k] = t;
        }
}

/* --- what the caller hands in ------------------------------------------------------------ */

/* Memory from one function must not be freed by another. */
AMPI_FN amp_result ampi_file_check_desc(const amp_file_desc* d) {
    if (!d || (d->allocator.alloc != NULL) == (d->allocator.free != NULL)) return AMP_OK;
    return ampi_fail(d->logger, AMP_ERR_DESC, "checkpoint: allocator needs both alloc and free, or neither");
}

/* Bytes of a tensor whose count was checked. */
AMPI_FN size_t ampi_file_bytes(const amp_file_tensor* t) {
    return t->tensor.count * amp_dtype_size(t->tensor.dtype);
}

/* One tensor of the caller: its name can be written, its type is known, and its shape, count and bytes agree
   without an overflow. */
AMPI_FN amp_result ampi_file_check_tensor(const amp_file_tensor* t, int index, const amp_logger* log) {
    const char* name = t->tensor.name;
    char shown[AMPI_SHOWN];
    size_t count = 1, bytes;
    int k, fits = 1;
    if (!name || !ampi_is_utf8(name))
        return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: tensor %d has no name in UTF-8", index);
    if (strcmp(name, "__metadata__") == 0)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: tensor %d: the name __metadata__ is reserved",
                         index);
    if (!ampi_file_type_of(t->tensor.dtype))
        return ampi_fail(log, AMP_ERR_DTYPE, "checkpoint: tensor '%s': %d is not a data type",
                         ampi_show(name, shown), (int)t->tensor.dtype);
    if (t->rank < 0 || t->rank > AMPI_FILE_MAX_RANK)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: tensor '%s': rank %d is not 0 to %d",
                         ampi_show(name, shown), t->rank, AMPI_FILE_MAX_RANK);
    for (k = 0; k < t->rank; k++) fits = fits && ampi_mul_size(count, t->shape[k], &count);
    if (!fits || count != t->tensor.count || !ampi_mul_size(count, amp_dtype_size(t->tensor.dtype), &bytes))
        return ampi_fail(log, AMP_ERR_ARGUMENT,
                         "checkpoint: tensor '%s': its shape does not have %.0f elements",
                         ampi_show(name, shown), (double)t->tensor.count);
    if (count > 0 && !t->tensor.data)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: tensor '%s': data is NULL",
                         ampi_show(name, shown));
    return AMP_OK;
}

/* All of them, and the path. */
AMPI_FN amp_result ampi_file_check_tensors(const char* path, const amp_file_tensor* t, int count,
                                           const amp_logger* log) {
    amp_result r = AMP_OK;
    int i;
    if (!path || !path[0]) return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: no path is given");
    if (count < 0 || (count > 0 && !t))
        return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: %d tensors at %s", count,
                         t ? "a pointer" : "NULL");
    for (i = 0; i < count && r == AMP_OK; i++) r = ampi_file_check_tensor(&t[i], i, log);
    return r;
}

/* Metadata: keys and values must be there, and UTF-8, because JSON is. */
AMPI_FN amp_result ampi_file_check_texts(const amp_file_text* texts, int count, const amp_logger* log) {
    int i;
    if (count < 0 || (count > 0 && !texts))
        return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: %d texts at %s", count,
                         texts ? "a pointer" : "NULL");
    for (i = 0; i < count; i++)
        if (!texts[i].key || !texts[i].value || !ampi_is_utf8(texts[i].key) || !ampi_is_utf8(texts[i].value))
            return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: text %d has no key or value in UTF-8", i);
        else if (strncmp(texts[i].key, AMPI_CRC_KEY, AMPI_CRC_KEY_LENGTH) == 0)
            return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: text %d: keys with " AMPI_CRC_KEY " are reserved", i);
    return AMP_OK;
}

/* --- writing --------------------------------------------------------------------------- */

/* Where bytes go. Without a stream they are only counted: the header is written twice, first to learn its
   length. */
typedef struct ampi_sink { FILE* stream; uint64_t bytes; int failed, error_number; } ampi_sink;

/* Writes, or only counts. After the first failure nothing more is written, and its errno is the one told. */
AMPI_FN void ampi_sink_put(ampi_sink* s, const void* data, size_t n) {
    s->bytes += n;
    if (!s->stream || s->failed || n == 0) return;
    errno = 0;
    if (fwrite(data, 1, n, s->stream) == n) return;
    s->failed = 1;
    s->error_number = errno;
}
AMPI_FN void ampi_sink_text(ampi_sink* s, const char* text) { ampi_sink_put(s, text, strlen(text)); }
AMPI_FN void ampi_sink_number(ampi_sink* s, uint64_t n) {
    char digits[24];
    ampi_sink_put(s, digits, (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)n));
}

/* What JSON does not allow to stand for itself in a string. */
AMPI_FN int ampi_needs_escape(char c) { return c == '"' || c == '\\' || (unsigned char)c < 0x20; }

/* A string in quotes, of two parts: runs of plain characters as they are, the others as \u00XX, which is always
   allowed. */
AMPI_FN void ampi_put_json_part(ampi_sink* s, const char* text) {
    char escape[8];
    while (*text) {
        size_t run = 0;
        while (text[run] && !ampi_needs_escape(text[run])) run++;
        ampi_sink_put(s, text, run);
        text += run;
        if (!*text) break;
        snprintf(escape, sizeof escape, "\\u%04x", (unsigned)(unsigned char)*text++);
        ampi_sink_put(s, escape, 6);
    }
}
AMPI_FN void ampi_put_json_string(ampi_sink* s, const char* first, const char* second) {
    ampi_sink_text(s, "\"");
    ampi_put_json_part(s, first);
    ampi_put_json_part(s, second);
    ampi_sink_text(s, "\"");
}

/* What a file is made of. fetch brings a tensor's data into host memory; NULL = it is there already. */
typedef struct ampi_file_content {
    const amp_file_tensor* tensors;
    int count;
    const amp_file_text* texts;
    int text_count;
    uint32_t* crcs;      /* of each tensor, known when its data has been written; 0 before */
    amp_result (*fetch)(void* user_data, const amp_file_tensor* t, const void** host);
    void* user_data;
} ampi_file_content;

/* The order in the file: large elements first, so that each tensor is aligned to its element. Starts with *i
   = -1 and *element = 8; 0 at the end. */
AMPI_FN int ampi_next_tensor(const ampi_file_content* c, int* i, size_t* element) {
    for (; *element >= 2; *element /= 2, *i = -1)
        while (++*i < c->count)
            if (amp_dtype_size(c->tensors[*i].tensor.dtype) == *element) return 1;
    return 0;
}

/* "name":{"dtype":"F32","shape":[2,3],"data_offsets":[begin,end]} */
AMPI_FN void ampi_put_tensor_header(ampi_sink* s, const amp_file_tensor* t, uint64_t begin) {
    int k;
    ampi_put_json_string(s, t->tensor.name, "");
    ampi_sink_text(s, ":{\"dtype\":\"");
    ampi_sink_text(s, ampi_file_type_of(t->tensor.dtype)->name);
    ampi_sink_text(s, "\",\"shape\":[");
    for (k = 0; k < t->rank; k++) {
        if (k) ampi_sink_text(s, ",");
        ampi_sink_number(s, t->shape[k]);
    }
    ampi_sink_text(s, "],\"data_offsets\":[");
    ampi_sink_number(s, begin);
    ampi_sink_text(s, ",");
    ampi_sink_number(s, begin + ampi_file_bytes(t));
    ampi_sink_text(s, "]}");
}

/* "__metadata__":{"key":"value",...,"amp.crc32.name":"01234567",...} */
AMPI_FN void ampi_put_texts(ampi_sink* s, const ampi_file_content* c) {
    char crc[AMPI_CRC_TEXT];
    int i;
    ampi_sink_text(s, "\"__metadata__\":{");
    for (i = 0; i < c->text_count + c->count; i++) {
        const int tensor = i - c->text_count;
        if (i) ampi_sink_text(s, ",");
        if (tensor < 0) ampi_put_json_string(s, c->texts[i].key, "");
        else ampi_put_json_string(s, AMPI_CRC_KEY, c->tensors[tensor].tensor.name);
        ampi_sink_text(s, ":");
        ampi_put_json_string(s, tensor < 0 ? c->texts[i].value : ampi_show_crc(c->crcs[tensor], crc), "");
    }
    ampi_sink_text(s, "}");
}

/* The JSON text, padded with spaces to a multiple of 8 bytes. */
AMPI_FN void ampi_put_header(ampi_sink* s, const ampi_file_content* c) {
    uint64_t begin = 0, start = s->bytes;
    size_t element = 8;
    int i = -1, first = c->text_count == 0 && c->count == 0;
    ampi_sink_text(s, "{");
    if (!first) ampi_put_texts(s, c);
    while (ampi_next_tensor(c, &i, &element)) {
        if (!first) ampi_sink_text(s, ",");
        first = 0;
        ampi_put_tensor_header(s, &c->tensors[i], begin);
        begin += ampi_file_bytes(&c->tensors[i]);
    }
    ampi_sink_text(s, "}");
    while ((s->bytes - start) % 8) ampi_sink_text(s, " ");
}

/* The elements in the file's byte order, and their CRC-32; on a big-endian machine by way of a small buffer, since
   the caller's data is not ours to change. */
AMPI_FN uint32_t ampi_put_data(ampi_sink* s, const void* data, size_t bytes, size_t element) {
    const unsigned char* p = (const unsigned char*)data;
    unsigned char chunk[4096];
    uint32_t crc = 0;
    size_t i, n;
    if (ampi_is_little_endian()) {
        ampi_sink_put(s, data, bytes);
        return ampi_crc32(0, data, bytes);
    }
    for (i = 0; i < bytes; i += n) {
        n = bytes - i < sizeof chunk ? bytes - i : sizeof chunk;
        memcpy(chunk, p + i, n);
        ampi_swap_endian(chunk, n, element);
        ampi_sink_put(s, chunk, n);
        crc = ampi_crc32(crc, chunk, n);
    }
    return crc;
}

/* The header once more, now that the CRCs are known: it is as long as before. */
AMPI_FN void ampi_put_header_again(ampi_sink* s, const ampi_file_content* c) {
    errno = 0;
    if (s->failed || fseek(s->stream, 8, SEEK_SET) == 0) { ampi_put_header(s, c); return; }
    s->failed = 1;
    s->error_number = errno;
}

/* The whole file. A failed write is remembered in the sink. */
AMPI_FN amp_result ampi_put_file(ampi_sink* s, const ampi_file_content* c, uint64_t header_bytes) {
    unsigned char length[8];
    size_t element = 8;
    int i;
    for (i = 0; i < 8; i++) length[i] = (unsigned char)(header_bytes >> (8 * i) & 0xff);
    ampi_sink_put(s, length, 8);
    ampi_put_header(s, c);
    for (i = -1; ampi_next_tensor(c, &i, &element) && !s->failed;) {
        const void* host = c->tensors[i].tensor.data;
        if (c->fetch) {
            amp_result r = c->fetch(c->user_data, &c->tensors[i], &host);
            if (r != AMP_OK) return r;
        }
        c->crcs[i] = ampi_put_data(s, host, ampi_file_bytes(&c->tensors[i]), element);
    }
    ampi_put_header_again(s, c);
    return AMP_OK;
}

/* Asks the system to have the file on the disk before it replaces the old one: otherwise a power cut can
   leave the new name on an empty file. A file system that cannot (EINVAL) is taken as is. 0, or an errno. */
AMPI_FN int ampi_sync_to_disk(const char* path) {
    int error_number = 0;
#if defined(_POSIX_VERSION)
    int fd = open(path, O_WRONLY);
    if (fd < 0) return errno;
    if (fsync(fd) != 0 && errno != EINVAL) error_number = errno;
    close(fd);
#else
    (void)path;
#endif
    return error_number;
}

/* Flush, sync, close; each can be the one that finds the disk full. */
AMPI_FN void ampi_sink_close(ampi_sink* s, const char* path) {
    int error_number = 0;
    errno = 0;
    if (!s->failed && fflush(s->stream) != 0) { s->failed = 1; s->error_number = errno; }
    if (!s->failed) error_number = ampi_sync_to_disk(path);
    if (error_number) { s->failed = 1; s->error_number = error_number; }
    errno = 0;
    if (fclose(s->stream) != 0 && !s->failed) { s->failed = 1; s->error_number = errno; }
}

/* Moves the finished file over the old one: 1, or 0 if nothing changed. Windows does not replace by renaming,
   so there the old file goes first; -1 if that was all that could be done, and the new one must stay where it
   is. */
AMPI_FN int ampi_replace_file(const char* from, const char* to) {
    errno = 0;
    if (rename(from, to) == 0) return 1;
#if defined(_WIN32)
    if (remove(to) == 0) return rename(from, to) == 0 ? 1 : -1;
#endif
    return 0;
}

/* Everything between opening the temporary file and renaming it. Whatever goes wrong, the temporary file goes
   too; one that could not be opened was not ours. */
AMPI_FN amp_result ampi_file_write(const char* path, const char* temporary, const ampi_file_content* c,
                                   uint64_t header_bytes, const amp_logger* log) {
    ampi_sink s = { NULL, 0, 0, 0 };
    int replaced = 0;
    amp_result r;
    errno = 0;
    s.stream = fopen(temporary, "wb");
    if (!s.stream)
        return ampi_fail(log, AMP_ERR_IO, "checkpoint: cannot open '%s' for writing: %s", temporary,
                         ampi_error_text(errno));
    r = ampi_put_file(&s, c, header_bytes);
    ampi_sink_close(&s, temporary);
    if (r == AMP_OK && s.failed)
        r = ampi_fail(log, AMP_ERR_IO, "checkpoint: cannot write '%s': %s", temporary,
                      ampi_error_text(s.error_number));
    if (r == AMP_OK && (replaced = ampi_replace_file(temporary, path)) != 1)
        r = ampi_fail(log, AMP_ERR_IO, "checkpoint: cannot rename '%s' to '%s': %s", temporary, path,
                      ampi_error_text(errno));
    if (r != AMP_OK && replaced == 0) remove(temporary);
    return r;
}

/* No tensor name and no text key may occur twice. */
AMPI_FN amp_result ampi_file_check_names(const ampi_file_content* c, const amp_allocator* a,
                                         const amp_logger* log) {
    size_t bytes, i, tensors = (size_t)c->count, texts = (size_t)c->text_count;
    const char** names;
    const char* twice;
    char shown[AMPI_SHOWN];
    names = ampi_mul_size(tensors + texts, sizeof *names, &bytes) ? (const char**)ampi_alloc(a, bytes) : NULL;
    if (!names)
        return ampi_fail(log, AMP_ERR_MEMORY, "checkpoint: no memory for a list of %.0f names",
                         (double)(tensors + texts));
    for (i = 0; i < tensors; i++) names[i] = c->tensors[i].tensor.name;
    for (i = 0; i < texts; i++) names[tensors + i] = c->texts[i].key;
    twice = ampi_sort_names(names, tensors, sizeof *names);
    if (!twice) twice = ampi_sort_names(names + tensors, texts, sizeof *names);
    ampi_free(a, names);
    if (!twice) return AMP_OK;
    return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: the name '%s' is used twice",
                     ampi_show(twice, shown));
}

/* All checks first, then the length of the header, then the file. */
AMPI_FN amp_result ampi_file_save(const char* path, ampi_file_content* c, const amp_allocator* a,
                                  const amp_logger* log) {
    ampi_sink measure = { NULL, 0, 0, 0 };
    amp_result r = ampi_file_check_tensors(path, c->tensors, c->count, log);
    size_t length, count = (size_t)c->count;
    char* temporary;
    if (r == AMP_OK) r = ampi_file_check_texts(c->texts, c->text_count, log);
    if (r == AMP_OK) r = ampi_file_check_names(c, a, log);
    if (r != AMP_OK) return r;
    length = strlen(path);
    c->crcs = (uint32_t*)ampi_alloc(a, count * sizeof *c->crcs + length + 5);
    if (!c->crcs)
        return ampi_fail(log, AMP_ERR_MEMORY, "checkpoint: no memory for checksums and the name of a temporary file");
    memset(c->crcs, 0, count * sizeof *c->crcs);
    temporary = (char*)(c->crcs + count);
    memcpy(temporary, path, length);
    memcpy(temporary + length, ".tmp", 5);
    ampi_put_header(&measure, c);
    if (measure.bytes <= AMPI_FILE_MAX_HEADER) r = ampi_file_write(path, temporary, c, measure.bytes, log);
    else r = ampi_fail(log, AMP_ERR_ARGUMENT,
                       "checkpoint: names and texts make a header of %.0f bytes; %u are allowed",
                       (double)measure.bytes, AMPI_FILE_MAX_HEADER);
    ampi_free(a, c->crcs);
    return r;
}

AMP_DEF amp_result amp_file_save(const char* path, const amp_file_tensor* tensors, int count,
                                 const amp_file_text* texts, int text_count, const amp_file_desc* desc) {
    ampi_file_content c;
    amp_result r = ampi_file_check_desc(desc);
    if (r != AMP_OK) return r;
    memset(&c, 0, sizeof c);
    c.tensors = tensors;
    c.count = count;
    c.texts = texts;
    c.text_count = text_count;
    return ampi_file_save(path, &c, desc ? &desc->allocator : NULL, desc ? desc->logger : NULL);
}

/* --- JSON, as much as a header may hold --------------------------------------------------- */

/* A cursor. Strings are decoded where they stand: no escape is shorter than what it means, and the closing
   quote leaves room for the final 0. Functions return 1, or 0 with the first error set. */
typedef struct ampi_json { char* start; char* at; char* end; const char* error; } ampi_json;

/* Remembers the first error and returns 0. */
AMPI_FN int ampi_json_fail(ampi_json* j, const char* error) {
    if (!j->error) j->error = error;
    return 0;
}

/* The next character that is not white space, or 0 at the end. */
AMPI_FN char ampi_json_peek(ampi_json* j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r')) j->at++;
    return j->at < j->end ? *j->at : '\0';
}

/* Steps over one character that must come next. */
AMPI_FN int ampi_json_expect(ampi_json* j, char c, const char* error) {
    if (ampi_json_peek(j) != c) return ampi_json_fail(j, error);
    j->at++;
    return 1;
}

/* Before each member of a list: 1 if there is one more, 0 if the list is closed (or broken: see error). */
AMPI_FN int ampi_json_more(ampi_json* j, char close, int first) {
    if (j->error) return 0;
    if (ampi_json_peek(j) == close) { j->at++; return 0; }
    return first || ampi_json_expect(j, ',', "a comma or a closing bracket is missing");
}

/* Exactly four hexadecimal digits, as they follow \u. */
AMPI_FN int ampi_json_hex4(ampi_json* j, unsigned* out) {
    unsigned value = 0;
    int i;
    if (j->end - j->at < 4) return ampi_json_fail(j, "an escape is cut off");
    for (i = 0; i < 4; i++) {
        char c = *j->at++;
        if (c >= '0' && c <= '9') value = value * 16 + (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f') value = value * 16 + (unsigned)(c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') value = value * 16 + (unsigned)(c - 'A' + 10);
        else return ampi_json_fail(j, "an escape \\u is not followed by four hexadecimal digits");
    }
    *out = value;
    return 1;
}

/* The code point of an escape \u, two of them for one above U+FFFF. */
AMPI_FN int ampi_json_code_point(ampi_json* j, unsigned* out) {
    unsigned low;
    if (!ampi_json_hex4(j, out)) return 0;
    if (*out == 0) return ampi_json_fail(j, "a text holds a zero character");
    if (*out < 0xd800 || *out > 0xdfff) return 1;
    if (*out > 0xdbff || j->end - j->at < 2 || j->at[0] != '\\' || j->at[1] != 'u')
        return ampi_json_fail(j, "an escape is half of a surrogate pair");
    j->at += 2;
    if (!ampi_json_hex4(j, &low)) return 0;
    if (low < 0xdc00 || low > 0xdfff) return ampi_json_fail(j, "an escape is half of a surrogate pair");
    *out = 0x10000 + ((*out - 0xd800) << 10) + (low - 0xdc00);
    return 1;
}

/* Appends a code point of up to 21 bits in one to four bytes: 0xxxxxxx, 110xxxxx, 1110xxxx or 11110xxx, and
   six bits in each byte that follows. */
AMPI_FN char* ampi_utf8_encode(char* w, unsigned c) {
    if (c < 0x80) { *w++ = (char)c; return w; }
    if (c < 0x800) *w++ = (char)(0xc0 | c >> 6);
    else {
        if (c < 0x10000) *w++ = (char)(0xe0 | c >> 12);
        else {
            *w++ = (char)(0xf0 | c >> 18);
            *w++ = (char)(0x80 | (c >> 12 & 0x3f));
        }
        *w++ = (char)(0x80 | (c >> 6 & 0x3f));
    }
    *w++ = (char)(0x80 | (c & 0x3f));
    return w;
}

/* Decodes the escape behind a backslash to *w. */
AMPI_FN int ampi_json_escape(ampi_json* j, char** w) {
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    const char* found;
    unsigned code;
    char c;
    if (j->at == j->end) return ampi_json_fail(j, "a text is not closed");
    c = *j->at++;
    if (c == 'u') {
        if (!ampi_json_code_point(j, &code)) return 0;
        *w = ampi_utf8_encode(*w, code);
        return 1;
    }
    found = c ? strchr(letters, c) : NULL;
    if (!found) return ampi_json_fail(j, "an unknown escape");
    *(*w)++ = meanings[found - letters];
    return 1;
}

/* A string. Raw control characters and whatever is not UTF-8 are refused, so names mean one thing only. */
AMPI_FN int ampi_json_string(ampi_json* j, const char** out) {
    char* w;
    if (!ampi_json_expect(j, '"', "a text in quotes is missing")) return 0;
    for (w = j->at, *out = w; j->at < j->end;) {
        size_t n;
        if (*j->at == '"') { j->at++; *w = '\0'; return 1; }
        if (*j->at == '\\') {
            j->at++;
            if (!ampi_json_escape(j, &w)) return 0;
            continue;
        }
        n = ampi_utf8_length(j->at, (size_t)(j->end - j->at));
        if (n == 0) return ampi_json_fail(j, "a text is not UTF-8");
        if ((unsigned char)*j->at < 0x20) return ampi_json_fail(j, "a text holds a control character");
        for (; n > 0; n--) *w++ = *j->at++;
    }
    return ampi_json_fail(j, "a text is not closed");
}

/* A whole number: digits without a sign, a leading zero, a fraction or an exponent. */
AMPI_FN int ampi_json_number(ampi_json* j, uint64_t* out) {
    uint64_t value = 0;
    char c = ampi_json_peek(j);
    const char* first = j->at;
    if (c < '0' || c > '9') return ampi_json_fail(j, "a whole number is missing");
    for (; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++) {
        unsigned digit = (unsigned)(*j->at - '0');
        if (value > (UINT64_MAX - digit) / 10) return ampi_json_fail(j, "a number is too large");
        value = value * 10 + digit;
    }
    if (c == '0' && j->at - first > 1) return ampi_json_fail(j, "a number begins with a zero");
    *out = value;
    return 1;
}

/* --- the header ------------------------------------------------------------------------ */

/* One tensor of the file. name must be first: see ampi_name_of. */
typedef struct ampi_file_entry {
    const char* name;
    const ampi_file_type* type;
    uint64_t rank, shape[AMPI_FILE_MAX_RANK];   /* further dimensions only count in `count` */
    uint64_t count, begin, end;
    int      wanted;                            /* 1 = to be read to offset `place` of the staging memory */
    size_t   place;
    int      has_crc;
    uint32_t crc;
} ampi_file_entry;

/* An open file. */
typedef struct ampi_file {
    const char* path;
    const amp_allocator* allocator;
    const amp_logger* logger;
    FILE* stream;
    char* header;
    size_t header_bytes;
    ampi_file_entry* entries;                   /* sorted by name */
    amp_file_text* texts;                       /* likewise */
    size_t count, text_count;
    uint64_t data_bytes;
} ampi_file;

/* "F32" and so on. */
AMPI_FN int ampi_json_dtype(ampi_json* j, ampi_file_entry* e) {
    const char* name;
    size_t i;
    if (!ampi_json_string(j, &name)) return 0;
    for (i = 0; i < AMPI_FILE_TYPE_COUNT; i++)
        if (strcmp(name, ampi_file_types[i].name) == 0) { e->type = &ampi_file_types[i]; return 1; }
    return ampi_json_fail(j, "an unknown dtype");
}

/* [2,3]: any rank, as long as the product of the sizes fits 64 bits; [] has one element. */
AMPI_FN int ampi_json_shape(ampi_json* j, ampi_file_entry* e) {
    uint64_t size;
    e->count = 1;
    e->rank = 0;
    if (!ampi_json_expect(j, '[', "a shape is not a list")) return 0;
    while (ampi_json_more(j, ']', e->rank == 0)) {
        if (!ampi_json_number(j, &size)) return 0;
        if (size != 0 && e->count > UINT64_MAX / size)
            return ampi_json_fail(j, "a shape has too many elements");
        e->count *= size;
        if (e->rank < AMPI_FILE_MAX_RANK) e->shape[e->rank] = size;
        e->rank++;
    }
    return !j->error;
}

/* [begin,end] in bytes from the start of the data. */
AMPI_FN int ampi_json_offsets(ampi_json* j, ampi_file_entry* e) {
    static const char error[] = "data_offsets is not a list of two numbers";
    return ampi_json_expect(j, '[', error) && ampi_json_number(j, &e->begin)
        && ampi_json_expect(j, ',', error) && ampi_json_number(j, &e->end) && ampi_json_expect(j, ']', error);
}

/* One field of a tensor's description; its bit is set in *seen. */
AMPI_FN int ampi_json_field(ampi_json* j, ampi_file_entry* e, unsigned* seen) {
    static const char* const keys[3] = { "dtype", "shape", "data_offsets" };
    const char* key;
    unsigned i;
    if (!ampi_json_string(j, &key) || !ampi_json_expect(j, ':', "a colon is missing")) return 0;
    for (i = 0; i < 3 && strcmp(key, keys[i]) != 0; i++) { }
    if (i == 3) return ampi_json_fail(j, "a tensor has an unknown field");
    if (*seen >> i & 1u) return ampi_json_fail(j, "a tensor has a field twice");
    *seen |= 1u << i;
    if (i == 0) return ampi_json_dtype(j, e);
    return i == 1 ? ampi_json_shape(j, e) : ampi_json_offsets(j, e);
}

/* The description of a tensor: each of the three fields once, in any order, and
   end - begin = elements * bits of one / 8, without an overflow or a rest. */
AMPI_FN int ampi_json_tensor(ampi_json* j, ampi_file_entry* e) {
    unsigned seen = 0, first;
    if (!ampi_json_expect(j, '{', "a tensor is not described by an object")) return 0;
    for (first = 1; ampi_json_more(j, '}', (int)first); first = 0)
        if (!ampi_json_field(j, e, &seen)) return 0;
    if (j->error) return 0;
    if (seen != 7) return ampi_json_fail(j, "a tensor lacks its dtype, shape or data_offsets");
    if (e->count > UINT64_MAX / e->type->bits || e->count * e->type->bits % 8 != 0 || e->begin > e->end
        || e->count * e->type->bits / 8 != e->end - e->begin)
        return ampi_json_fail(j, "data_offsets do not fit the dtype and shape of their tensor");
    return 1;
}

/* How often c occurs: an upper bound for a table, found before it is allocated. */
AMPI_FN size_t ampi_count_char(const char* at, const char* end, char c) {
    size_t n = 0;
    for (; at < end; at++) n += *at == c;
    return n;
}

/* The metadata. A text takes four quotes, and at least six characters ("":"",). */
AMPI_FN amp_result ampi_file_parse_texts(ampi_file* f, ampi_json* j) {
    const size_t shortest = 6, left = (size_t)(j->end - j->at);
    size_t capacity = ampi_count_char(j->at, j->end, '"') / 4 + 1, bytes;
    int first;
    if (capacity > left / shortest + 1) capacity = left / shortest + 1;
    if (f->texts) { ampi_json_fail(j, "__metadata__ occurs twice"); return AMP_OK; }
    if (ampi_mul_size(capacity, sizeof *f->texts, &bytes))
        f->texts = (amp_file_text*)ampi_alloc(f->allocator, bytes);
    if (!f->texts)
        return ampi_fail(f->logger, AMP_ERR_MEMORY, "checkpoint: no memory for %.0f texts", (double)capacity);
    if (!ampi_json_expect(j, '{', "__metadata__ is not an object")) return AMP_OK;
    for (first = 1; ampi_json_more(j, '}', first); first = 0) {
        amp_file_text* t = &f->texts[f->text_count];
        if (!ampi_json_string(j, &t->key) || !ampi_json_expect(j, ':', "a colon is missing")
            || !ampi_json_string(j, &t->value)) return AMP_OK;
        f->text_count++;
    }
    return AMP_OK;
}

/* The top level; the list of entries is large enough. A syntax error is left in j. */
AMPI_FN amp_result ampi_file_parse_members(ampi_file* f, ampi_json* j) {
    const char* name;
    int first;
    if (*j->at++ != '{') { ampi_json_fail(j, "a header begins with {"); return AMP_OK; }
    for (first = 1; ampi_json_more(j, '}', first); first = 0) {
        if (!ampi_json_string(j, &name) || !ampi_json_expect(j, ':', "a colon is missing")) return AMP_OK;
        if (strcmp(name, "__metadata__") == 0) {
            amp_result r = ampi_file_parse_texts(f, j);
            if (r != AMP_OK || j->error) return r;
            continue;
        }
        memset(&f->entries[f->count], 0, sizeof *f->entries);
        f->entries[f->count].name = name;
        if (!ampi_json_tensor(j, &f->entries[f->count])) return AMP_OK;
        f->count++;
    }
    if (!j->error) while (j->at < j->end && *j->at == ' ') j->at++;
    if (j->at < j->end) ampi_json_fail(j, "something follows the header's last bracket");
    return AMP_OK;
}

/* A tensor takes one opening brace, and at least 48 characters
   ("":{"dtype":"U8","shape":[],"data_offsets":[0,1]}). */
AMPI_FN amp_result ampi_file_parse(ampi_file* f) {
    const size_t shortest = 48;
    ampi_json j = { f->header, f->header, f->header + f->header_bytes, NULL };
    size_t capacity = ampi_count_char(j.at, j.end, '{'), bytes;
    amp_result r;
    if (capacity > f->header_bytes / shortest + 1) capacity = f->header_bytes / shortest + 1;
    if (ampi_mul_size(capacity + 1, sizeof *f->entries, &bytes))
        f->entries = (ampi_file_entry*)ampi_alloc(f->allocator, bytes);
    if (!f->entries)
        return ampi_fail(f->logger, AMP_ERR_MEMORY, "checkpoint: no memory for a table of %.0f tensors",
                         (double)capacity);
    r = ampi_file_parse_members(f, &j);
    if (r == AMP_OK && j.error)
        r = ampi_fail(f->logger, AMP_ERR_FORMAT, "checkpoint: '%s', byte %ld of the header: %s", f->path,
                      (long)(j.at - j.start), j.error);
    return r;
}

/* By offset; of two tensors that begin together the empty one comes first. */
AMPI_FN int ampi_place_less(const void* a, const void* b) {
    const ampi_file_entry* x = (const ampi_file_entry*)a;
    const ampi_file_entry* y = (const ampi_file_entry*)b;
    return x->begin < y->begin || (x->begin == y->begin && x->end < y->end);
}

/* The texts that hold a CRC-32. Without its tensor such a text says nothing. */
AMPI_FN amp_result ampi_file_take_crcs(ampi_file* f) {
    char shown[AMPI_SHOWN];
    size_t i;
    for (i = 0; i < f->text_count; i++) {
        const amp_file_text* t = &f->texts[i];
        void* found;
        ampi_file_entry* e;
        if (strncmp(t->key, AMPI_CRC_KEY, AMPI_CRC_KEY_LENGTH) != 0) continue;
        found = ampi_find_name(f->entries, f->count, sizeof *e, t->key + AMPI_CRC_KEY_LENGTH);
        if (!found) continue;
        e = (ampi_file_entry*)found;
        e->has_crc = 1;
        if (!ampi_hex_number(t->value, &e->crc))
            return ampi_fail(f->logger, AMP_ERR_FORMAT, "checkpoint: '%s': text '%s' is not eight hexadecimal digits",
                             f->path, ampi_show(t->key, shown));
    }
    return AMP_OK;
}

/* Names and keys are unique; the tensors cover the data from 0 to data_bytes exactly once. Ends sorted by
   name. */
AMPI_FN amp_result ampi_file_check(ampi_file* f) {
    const char* twice;
    char shown[AMPI_SHOWN];
    size_t i;
    ampi_sort(f->entries, f->count, sizeof *f->entries, ampi_place_less);
    for (i = 0; i < f->count; i++) {
        const ampi_file_entry* e = &f->entries[i];
        if (e->begin != f->data_bytes)
            return ampi_fail(f->logger, AMP_ERR_FORMAT,
                             "checkpoint: '%s': tensor '%s' begins at %.0f, %s %.0f",
                             f->path, ampi_show(e->name, shown), (double)e->begin,
                             e->begin < f->data_bytes ? "inside the one before it, which ends at"
                                                      : "leaving a hole behind",
                             (double)f->data_bytes);
        f->data_bytes = e->end;
    }
    twice = ampi_sort_names(f->entries, f->count, sizeof *f->entries);
    if (!twice && f->texts) twice = ampi_sort_names(f->texts, f->text_count, sizeof *f->texts);
    if (!twice) return ampi_file_take_crcs(f);
    return ampi_fail(f->logger, AMP_ERR_FORMAT, "checkpoint: '%s': the name '%s' occurs twice", f->path,
                     ampi_show(twice, shown));
}

/* --- reading --------------------------------------------------------------------------- */

/* Says why there are fewer bytes than expected: the disk, or the file's end. */
AMPI_FN amp_result ampi_file_short(ampi_file* f, const char* what) {
    if (ferror(f->stream))
        return ampi_fail(f->logger, AMP_ERR_IO, "checkpoint: cannot read '%s': %s", f->path,
                         ampi_error_text(errno));
    return ampi_fail(f->logger, AMP_ERR_FORMAT, "checkpoint: '%s' is truncated: it ends inside %s", f->path,
                     what);
}

/* Exactly n bytes, or an error. */
AMPI_FN amp_result ampi_file_get(ampi_file* f, void* out, size_t n, const char* what) {
    errno = 0;
    return fread(out, 1, n, f->stream) == n ? AMP_OK : ampi_file_short(f, what);
}

/* Steps over n bytes and makes sure that they exist, by reading the last byte of each step. */
AMPI_FN amp_result ampi_file_skip(ampi_file* f, uint64_t n, const char* what) {
    const uint64_t longest = 0x40000000;
    while (n > 0) {
        uint64_t step = n < longest ? n : longest;
        errno = 0;
        if (fseek(f->stream, (long)(step - 1), SEEK_CUR) != 0)
            return ampi_fail(f->logger, AMP_ERR_IO, "checkpoint: cannot seek in '%s': %s", f->path,
                             ampi_error_text(errno));
        if (fgetc(f->stream) == EOF) return ampi_file_short(f, what);
        n -= step;
    }
    return AMP_OK;
}

/* The file must end here. */
AMPI_FN amp_result ampi_file_expect_end(ampi_file* f) {
    if (fgetc(f->stream) != EOF)
        return ampi_fail(f->logger, AMP_ERR_FORMAT, "checkpoint: '%s' goes on after its last tensor",
                         f->path);
    return ferror(f->stream) ? ampi_file_short(f, "its data") : AMP_OK;
}

/* Reads the header into f->header. Before memory is asked for, the file must show that it is that long. */
AMPI_FN amp_result ampi_file_read_header(ampi_file* f) {
    unsigned char length[8];
    uint64_t n = 0;
    int i;
    amp_result r = ampi_file_get(f, length, 8, "the length of its header");
    if (r != AMP_OK) return r;
    for (i = 7; i >= 0; i--) n = n << 8 | length[i];
    if (n < 2 || n > AMPI_FILE_MAX_HEADER)
        return ampi_fail(f->logger, AMP_ERR_FORMAT,
                         "checkpoint: '%s' has a header of %.0f bytes; 2 to %u are allowed",
                         f->path, (double)n, AMPI_FILE_MAX_HEADER);
    r = ampi_file_skip(f, n, "its header");
    if (r != AMP_OK) return r;
    if (fseek(f->stream, 8, SEEK_SET) != 0)
        return ampi_fail(f->logger, AMP_ERR_IO, "checkpoint: cannot seek in '%s': %s", f->path,
                         ampi_error_text(errno));
    f->header_bytes = (size_t)n;
    f->header = (char*)ampi_alloc(f->allocator, f->header_bytes);
    if (!f->header)
        return ampi_fail(f->logger, AMP_ERR_MEMORY, "checkpoint: no memory for a header of %.0f bytes",
                         (double)n);
    return ampi_file_get(f, f->header, f->header_bytes, "its header");
}

/* Gives everything back, also of a file that was refused half way. */
AMPI_FN void ampi_file_close(ampi_file* f) {
    if (f->stream) fclose(f->stream);
    ampi_free(f->allocator, f->texts);
    ampi_free(f->allocator, f->entries);
    ampi_free(f->allocator, f->header);
}

/* Opens a file, reads its header and checks all of it. ampi_file_close is due in any case. */
AMPI_FN amp_result ampi_file_open(ampi_file* f, const char* path, const amp_allocator* a,
                                  const amp_logger* log) {
    amp_result r;
    memset(f, 0, sizeof *f);
    f->path = path;
    f->allocator = a;
    f->logger = log;
    errno = 0;
    f->stream = fopen(path, "rb");
    if (!f->stream)
        return ampi_fail(log, AMP_ERR_IO, "checkpoint: cannot open '%s': %s", path, ampi_error_text(errno));
    r = ampi_file_read_header(f);
    if (r == AMP_OK) r = ampi_file_parse(f);
    if (r == AMP_OK) r = ampi_file_check(f);
    return r;
}

/* Compares a tensor of the caller with the file's, and marks that one as wanted. `owner` says where the
   caller's is. */
AMPI_FN amp_result ampi_file_want(ampi_file* f, const amp_file_tensor* t, size_t place, const char* owner) {
    ampi_file_entry* e = (ampi_file_entry*)ampi_find_name(f->entries, f->count, sizeof *e, t->tensor.name);
    uint64_t shape[AMPI_FILE_MAX_RANK] = { 0, 0, 0, 0 };
    char name[AMPI_SHOWN], theirs[AMPI_SHOWN_SHAPE], ours[AMPI_SHOWN_SHAPE];
    int k;
    ampi_show(t->tensor.name, name);
    if (!e) return ampi_fail(f->logger, AMP_ERR_FORMAT, "checkpoint: '%s' has no tensor '%s'", f->path, name);
    if (e->wanted)
        return ampi_fail(f->logger, AMP_ERR_ARGUMENT, "checkpoint: tensor '%s' is asked for twice", name);
    if (e->type->dtype != ampi_dtype(t->tensor.dtype))
        return ampi_fail(f->logger, AMP_ERR_FORMAT, "checkpoint: tensor '%s' is %s in the file, but %s in %s",
                         name, e->type->dtype ? amp_dtype_name(e->type->dtype) : e->type->name,
                         amp_dtype_name(t->tensor.dtype), owner);
    for (k = 0; k < t->rank; k++) shape[k] = t->shape[k];
    if (e->rank != (uint64_t)t->rank || memcmp(e->shape, shape, sizeof shape) != 0)
        return ampi_fail(f->logger, AMP_ERR_FORMAT,
                         "checkpoint: tensor '%s' has the shape %s in the file, but %s in %s",
                         name, ampi_show_shape(e->rank, e->shape, theirs),
                         ampi_show_shape((uint64_t)t->rank, shape, ours), owner);
    e->wanted = 1;
    e->place = place;
    return AMP_OK;
}

/* Reads one tensor; its bytes must be those that were written. */
AMPI_FN amp_result ampi_file_read_tensor(ampi_file* f, const ampi_file_entry* e, char* place) {
    size_t bytes = (size_t)(e->end - e->begin);
    char shown[AMPI_SHOWN];
    amp_result r = AMP_OK;
    uint32_t crc;
    if (bytes > 0) r = ampi_file_get(f, place, bytes, ampi_show(e->name, shown));
    if (r != AMP_OK) return r;
    if (e->has_crc && (crc = ampi_crc32(0, place, bytes)) != e->crc)
        return ampi_fail(f->logger, AMP_ERR_FORMAT,
                         "checkpoint: '%s': tensor '%s' is damaged: its CRC-32 is %08lx, the file says %08lx", f->path,
                         ampi_show(e->name, shown), (unsigned long)crc, (unsigned long)e->crc);
    if (!ampi_is_little_endian()) ampi_swap_endian(place, bytes, e->type->bits / 8);
    return AMP_OK;
}

/* Reads the wanted tensors to their places and steps over the others. */
AMPI_FN amp_result ampi_file_read_data(ampi_file* f, char* staging) {
    amp_result r = AMP_OK;
    size_t i;
    ampi_sort(f->entries, f->count, sizeof *f->entries, ampi_place_less);
    for (i = 0; i < f->count && r == AMP_OK; i++) {
        const ampi_file_entry* e = &f->entries[i];
        char shown[AMPI_SHOWN];
        r = e->wanted ? ampi_file_read_tensor(f, e, staging + e->place)
                      : ampi_file_skip(f, e->end - e->begin, ampi_show(e->name, shown));
    }
    return r == AMP_OK ? ampi_file_expect_end(f) : r;
}

/* Reads tensors into one block of new memory, one after the other in the order asked for. */
AMPI_FN amp_result ampi_file_stage(ampi_file* f, const amp_file_tensor* t, int count, const char* owner,
                                   char** out) {
    size_t total = 0;
    amp_result r = AMP_OK;
    int i;
    for (i = 0; i < count && r == AMP_OK; i++) {
        r = ampi_file_want(f, &t[i], total, owner);
        if (r == AMP_OK && !ampi_add_size(total, ampi_file_bytes(&t[i]), &total))
            r = ampi_fail(f->logger, AMP_ERR_ARGUMENT, "checkpoint: the tensors are larger than the memory");
    }
    if (r != AMP_OK) return r;
    *out = (char*)ampi_alloc(f->allocator, total);
    if (!*out)
        return ampi_fail(f->logger, AMP_ERR_MEMORY, "checkpoint: no memory for %.0f bytes of tensors",
                         (double)total);
    r = ampi_file_read_data(f, *out);
    if (r == AMP_OK) return AMP_OK;
    ampi_free(f->allocator, *out);
    *out = NULL;
    return r;
}

AMP_DEF amp_result amp_file_load(const char* path, const amp_file_tensor* tensors, int count,
                                 const amp_file_desc* desc) {
    const amp_logger* log = desc ? desc->logger : NULL;
    ampi_file f;
    char* staging = NULL;
    size_t at = 0;
    int i;
    amp_result r = ampi_file_check_desc(desc);
    if (r == AMP_OK) r = ampi_file_check_tensors(path, tensors, count, log);
    if (r != AMP_OK) return r;
    r = ampi_file_open(&f, path, desc ? &desc->allocator : NULL, log);
    if (r == AMP_OK) r = ampi_file_stage(&f, tensors, count, "memory", &staging);
    for (i = 0; i < count && r == AMP_OK; i++) {
        size_t bytes = ampi_file_bytes(&tensors[i]);
        if (bytes > 0) memcpy(tensors[i].tensor.data, staging + at, bytes);
        at += bytes;
    }
    ampi_free(f.allocator, staging);
    ampi_file_close(&f);
    return r;
}

/* The text under a key, or NULL. */
AMPI_FN const char* ampi_file_text_at(const ampi_file* f, const char* key) {
    const void* found = ampi_find_name(f->texts, f->text_count, sizeof *f->texts, key);
    const amp_file_text* t = (const amp_file_text*)found;
    return t ? t->value : NULL;
}

/* Out is written only when the whole text fits. */
AMPI_FN amp_result ampi_file_copy_text(ampi_file* f, const char* key, char* out, size_t size) {
    const char* text = ampi_file_text_at(f, key);
    char shown[AMPI_SHOWN];
    size_t length;
    if (!text)
        return ampi_fail(f->logger, AMP_ERR_FORMAT, "checkpoint: '%s' has no text '%s'", f->path,
                         ampi_show(key, shown));
    length = strlen(text);
    if (length >= size)
        return ampi_fail(f->logger, AMP_ERR_FORMAT,
                         "checkpoint: text '%s' of '%s' needs %.0f bytes; there is room for %.0f",
                         ampi_show(key, shown), f->path, (double)length + 1.0, (double)size);
    memcpy(out, text, length + 1);
    return AMP_OK;
}

AMP_DEF amp_result amp_file_text_of(const char* path, const char* key, char* out, size_t size,
                                    const amp_file_desc* desc) {
    const amp_logger* log = desc ? desc->logger : NULL;
    ampi_file f;
    amp_result r = ampi_file_check_desc(desc);
    if (r != AMP_OK) return r;
    if (!path || !path[0] || !key || !out || size == 0)
        return ampi_fail(log, AMP_ERR_ARGUMENT, "checkpoint: path, key or out is missing");
    r = ampi_file_open(&f, path, desc ? &desc->allocator : NULL, log);
    if (r == AMP_OK) r = ampi_file_skip(&f, f.data_bytes, "its data");
    if (r == AMP_OK) r = ampi_file_expect_end(&f);
    if (r == AMP_OK) r = ampi_file_copy_text(&f, key, out, size);
    ampi_file_close(&f);
    return r;
}

/* --- checkpoints of a model -------------------------------------------------------------- */

/* Besides tensors a checkpoint holds the scaler's bytes and these numbers, as metadata "amp.<key>". An
   integer is written in decimal; a float as the eight hexadecimal digits of its bits, which is exact. */
typedef struct ampi_field { char key[40]; char text[24]; int is_float; } ampi_field;
#define AMPI_MAX_FIELDS (32 + 2 * AMP_MAX_GROUPS)
typedef struct ampi_fields { ampi_field list[AMPI_MAX_FIELDS]; int count, state_count; } ampi_fields;

/* Appends one number under its key. */
AMPI_FN void ampi_field_add(ampi_fields* f, const char* key, int is_float, uint64_t value) {
    ampi_field* x = &f->list[f->count++];
    snprintf(x->key, sizeof x->key, "amp.%s", key);
    snprintf(x->text, sizeof x->text, is_float ? "%08llx" : "%llu", (unsigned long long)value);
    x->is_float = is_float;
}
AMPI_FN void ampi_field_int(ampi_fields* f, const char* key, int64_t v) {
    ampi_field_add(f, key, 0, (uint64_t)v);
}
AMPI_FN void ampi_field_float(ampi_fields* f, const char* key, float v) {
    ampi_field_add(f, key, 1, ampi_bits(v));
}

/* All settings that an optimizer's arithmetic depends on, but the base learning rate: that one is state. */
AMPI_FN void ampi_fields_of_optimizer(ampi_fields* f, const amp_optimizer* o) {
    const amp_optimizer_desc* d = &o->desc;
    char key[32];
    int i;
    ampi_field_int(f, "optimizer", (int64_t)d->kind);
    ampi_field_float(f, "momentum", d->momentum);
    ampi_field_float(f, "dampening", d->dampening);
    ampi_field_int(f, "nesterov", d->nesterov != 0);
    ampi_field_float(f, "beta1", d->beta1);
    ampi_field_float(f, "beta2", d->beta2);
    ampi_field_float(f, "eps", d->eps);
    ampi_field_float(f, "weight_decay", d->weight_decay);
    ampi_field_float(f, "clip_norm", d->clip_norm);
    ampi_field_int(f, "maximize", d->maximize != 0);
    ampi_field_int(f, "schedule", (int64_t)d->schedule.kind);
    ampi_field_int(f, "schedule.warmup_steps", d->schedule.warmup_steps);
    ampi_field_int(f, "schedule.total_steps", d->schedule.total_steps);
    ampi_field_int(f, "schedule.step_size", d->schedule.step_size);
    ampi_field_float(f, "schedule.gamma", d->schedule.gamma);
    ampi_field_float(f, "schedule.floor", d->schedule.floor);
    ampi_field_int(f, "groups", d->group_count);
    for (i = 0; i < d->group_count && i < AMP_MAX_GROUPS; i++) {
        snprintf(key, sizeof key, "group%d.lr", i);
        ampi_field_float(f, key, o->groups[i].lr);
        snprintf(key, sizeof key, "group%d.weight_decay", i);
        ampi_field_float(f, key, o->groups[i].weight_decay);
    }
}

/* First what loading sets (state_count of them), then what must be equal in the file and in the model; the
   graph last. */
AMPI_FN void ampi_fields_of(ampi_fields* f, amp_model* m) {
    const amp_optimizer* o = amp_model_optimizer(m);
    const amp_policy* p = amp_model_policy(m);
    f->count = 0;
    ampi_field_int(f, "step", o->state.step);
    ampi_field_float(f, "lr", o->state.lr);
    ampi_field_add(f, "pass", 0, ampi_model_pass_count(m));
    f->state_count = f->count;
    ampi_field_int(f, "format", 1);
    ampi_field_int(f, "level", (int64_t)p->level);
    ampi_field_int(f, "low_dtype", (int64_t)p->low_dtype);
    ampi_field_add(f, "seed", 0, m->desc.seed);
    ampi_field_int(f, "accumulate", m->desc.accumulate);
    ampi_field_int(f, "grad_dtype", (int64_t)ampi_dtype(m->desc.grad_dtype));
    ampi_fields_of_optimizer(f, o);
    ampi_field_add(f, "graph", 0, ampi_model_fingerprint(m));
}

/* The model's state as a list of file tensors with their names; data is in the backend's memory. */
typedef struct ampi_state_list { amp_file_tensor* tensors; int count; size_t largest; } ampi_state_list;

/* Asks the model for its tensors. Names live behind the tensors, in the same allocation. */
AMPI_FN amp_result ampi_state_list_make(ampi_state_list* s, amp_model* m) {
    typedef char state_name[80];
    size_t count = (size_t)ampi_model_state_count(m), bytes, i;
    int k, rank = 0;
    state_name* names;
    s->count = (int)count;
    s->largest = 0;
    s->tensors = NULL;
    if (ampi_mul_size(count, sizeof *s->tensors + sizeof *names, &bytes))
        s->tensors = (amp_file_tensor*)ampi_alloc(ampi_model_allocator(m), bytes);
    if (!s->tensors)
        return ampi_model_fail(m, AMP_ERR_MEMORY, "checkpoint: no memory for a list of %d tensors", s->count);
    names = (state_name*)(void*)(s->tensors + count);
    for (i = 0; i < count; i++) {
        amp_file_tensor* t = &s->tensors[i];
        memset(t, 0, sizeof *t);
        ampi_model_state_tensor(m, (int)i, names[i], &t->tensor.dtype, &rank, t->shape, &t->tensor.data);
        t->rank = rank;
        t->tensor.name = names[i];
        for (t->tensor.count = 1, k = 0; k < rank; k++) t->tensor.count *= t->shape[k];
        if (ampi_file_bytes(t) > s->largest) s->largest = ampi_file_bytes(t);
    }
    return AMP_OK;
}

/* What both directions need: a finalized model with parameters, between two steps. */
AMPI_FN amp_result ampi_checkpoint_ready(amp_model* m, const char* path) {
    if (!m) return AMP_ERR_ARGUMENT;
    if (!path || !path[0]) return ampi_model_fail(m, AMP_ERR_ARGUMENT, "checkpoint: no path is given");
    if (!ampi_model_ready(m))
        return ampi_model_fail(m, AMP_ERR_STATE, "checkpoint: the model is not finalized");
    if (!amp_model_optimizer(m))
        return ampi_model_fail(m, AMP_ERR_STATE, "checkpoint: the model has no parameters");
    if (ampi_model_mid_step(m))
        return ampi_model_fail(m, AMP_ERR_STATE,
                               "checkpoint: between the micro-batches of a step; finish the step first");
    return AMP_OK;
}

/* Brings one tensor into host memory while the file is written. */
typedef struct ampi_fetcher { amp_model* m; void* host; } ampi_fetcher;
AMPI_FN amp_result ampi_checkpoint_fetch(void* user_data, const amp_file_tensor* t, const void** host) {
    ampi_fetcher* f = (ampi_fetcher*)user_data;
    *host = f->host;
    if (ampi_file_bytes(t) == 0) return AMP_OK;
    return ampi_model_download(f->m, f->host, t->tensor.data, ampi_file_bytes(t));
}

/* Metadata and tensors to the file. Only one tensor at a time is copied to the host. */
AMPI_FN amp_result ampi_checkpoint_write(amp_model* m, const char* path, const ampi_state_list* s,
                                         const char* scaler) {
    const amp_allocator* a = ampi_model_allocator(m);
    amp_file_text texts[AMPI_MAX_FIELDS + 2];
    char crc_text[AMPI_CRC_TEXT];
    uint32_t crc = 0;
    ampi_fields fields;
    ampi_fetcher fetcher;
    ampi_file_content c;
    amp_result r;
    int i;
    ampi_fields_of(&fields, m);
    for (i = 0; i < fields.count; i++) {
        texts[i].key = fields.list[i].key;
        texts[i].value = fields.list[i].text;
        if (i < fields.state_count) crc = ampi_crc32(crc, texts[i].value, strlen(texts[i].value) + 1);
    }
    texts[i].key = "amp.scaler";
    texts[i].value = scaler;
    texts[i + 1].key = "amp.crc32";
    texts[i + 1].value = ampi_show_crc(crc, crc_text);
    fetcher.m = m;
    fetcher.host = ampi_alloc(a, s->largest);
    if (!fetcher.host)
        return ampi_model_fail(m, AMP_ERR_MEMORY, "checkpoint: no memory for a copy of %.0f bytes",
                               (double)s->largest);
    c.tensors = s->tensors;
    c.count = s->count;
    c.texts = texts;
    c.text_count = fields.count + 2;
    c.crcs = NULL;
    c.fetch = ampi_checkpoint_fetch;
    c.user_data = &fetcher;
    r = ampi_file_save(path, &c, a, &m->op_logger);
    ampi_free(a, fetcher.host);
    return r;
}

AMP_DEF amp_result amp_checkpoint_save(amp_model* m, const char* path) {
    unsigned char bytes[AMP_SCALER_STATE_BYTES];
    char scaler[2 * AMP_SCALER_STATE_BYTES + 1];
    ampi_state_list s;
    amp_result r = ampi_checkpoint_ready(m, path);
    if (r != AMP_OK) return r;
    r = amp_scaler_save(amp_model_scaler(m), bytes, sizeof bytes);
    if (r != AMP_OK)
        return ampi_model_fail(m, r, "checkpoint: the scaler is inside a step; finish the step first");
    ampi_hex_encode(bytes, sizeof bytes, scaler);
    r = ampi_state_list_make(&s, m);
    if (r == AMP_OK) r = ampi_checkpoint_write(m, path, &s, scaler);
    ampi_free(ampi_model_allocator(m), s.tensors);
    return r;
}

/* A field's text as a person would write it. */
AMPI_FN const char* ampi_show_field(const char* text, int is_float, char out[AMPI_SHOWN]) {
    uint32_t bits;
    if (!is_float || !ampi_hex_number(text, &bits)) return ampi_show(text, out);
    snprintf(out, AMPI_SHOWN, "%.9g", (double)ampi_float(bits));
    return out;
}

/* What loading will set, once everything is known to fit. */
typedef struct ampi_restored { amp_scaler scaler; int64_t step; float lr; uint64_t passes; } ampi_restored;

/* Every field must be there, and those that loading does not set must be the model's. Texts are compared, not
   numbers: what save writes is unique for a value. */
AMPI_FN amp_result ampi_checkpoint_check_fields(amp_model* m, const ampi_file* f) {
    char theirs[AMPI_SHOWN], ours[AMPI_SHOWN];
    ampi_fields fields;
    int i;
    ampi_fields_of(&fields, m);
    for (i = 0; i < fields.count; i++) {
        const ampi_field* x = &fields.list[i];
        const char* text = ampi_file_text_at(f, x->key);
        if (!text)
            return ampi_model_fail(m, AMP_ERR_FORMAT, "checkpoint: '%s' has no text '%s'; was it written by "
                                   "amp_checkpoint_save?", f->path, x->key);
        if (i >= fields.state_count && i < fields.count - 1 && strcmp(text, x->text) != 0)
            return ampi_model_fail(m, AMP_ERR_FORMAT, "checkpoint: %s is %s in the file, but %s in the model",
                                   x->key, ampi_show_field(text, x->is_float, theirs),
                                   ampi_show_field(x->text, x->is_float, ours));
    }
    return AMP_OK;
}

/* The last field is the graph's fingerprint. It is compared after the tensors, which can say more. */
AMPI_FN amp_result ampi_checkpoint_check_graph(amp_model* m, const ampi_file* f) {
    ampi_fields fields;
    ampi_fields_of(&fields, m);
    if (strcmp(ampi_file_text_at(f, "amp.graph"), fields.list[fields.count - 1].text) == 0) return AMP_OK;
    return ampi_model_fail(m, AMP_ERR_FORMAT, "checkpoint: '%s' was saved by a model with other layers, types or "
                           "settings of layers", f->path);
}

/* A decimal number and nothing else; NULL is none. */
AMPI_FN int ampi_parse_decimal(const char* text, uint64_t* out) {
    char copy[24];
    ampi_json j = { copy, copy, copy, NULL };
    size_t n = text ? strlen(text) : sizeof copy;
    if (n >= sizeof copy) return 0;
    memcpy(copy, text, n + 1);
    j.end = copy + n;
    return text[0] >= '0' && text[0] <= '9' && ampi_json_number(&j, out) && j.at == j.end;
}

/* The CRC-32 of the state's texts, each with its final 0, in the file. */
AMPI_FN uint32_t ampi_checkpoint_state_crc(const ampi_file* f) {
    static const char* const keys[] = { "amp.step", "amp.lr", "amp.pass" };
    uint32_t crc = 0;
    int i;
    for (i = 0; i < 3; i++) {
        const char* text = ampi_file_text_at(f, keys[i]);
        crc = ampi_crc32(crc, text, strlen(text) + 1);
    }
    return crc;
}

/* The numbers that loading sets. The rate must be one that an optimizer can have: finite, not negative. */
AMPI_FN amp_result ampi_checkpoint_read_state(amp_model* m, const ampi_file* f, ampi_restored* out) {
    const char* crc = ampi_file_text_at(f, "amp.crc32");
    char computed[AMPI_CRC_TEXT], shown[AMPI_SHOWN];
    uint64_t step = 0;
    uint32_t lr = 0xffffffffu;
    if (!ampi_hex_number(ampi_file_text_at(f, "amp.lr"), &lr) || lr >= 0x7f800000u
        || !ampi_parse_decimal(ampi_file_text_at(f, "amp.step"), &step) || step >> 62
        || !ampi_parse_decimal(ampi_file_text_at(f, "amp.pass"), &out->passes))
        return ampi_model_fail(m, AMP_ERR_FORMAT,
                               "checkpoint: '%s': amp.step, amp.lr or amp.pass is malformed", f->path);
    if (crc && strcmp(crc, ampi_show_crc(ampi_checkpoint_state_crc(f), computed)) != 0)
        return ampi_model_fail(m, AMP_ERR_FORMAT, "checkpoint: '%s' is damaged: amp.step, amp.lr and amp.pass have "
                               "the CRC-32 %s, amp.crc32 says %s", f->path, computed, ampi_show(crc, shown));
    out->step = (int64_t)step;
    out->lr = ampi_float(lr);
    return AMP_OK;
}

/* Loads the scaler's bytes into a copy, which speaks through the model's logger while it is checked. */
AMPI_FN amp_result ampi_checkpoint_read_scaler(amp_model* m, const ampi_file* f, ampi_restored* out) {
    unsigned char bytes[AMP_SCALER_STATE_BYTES];
    const char* text = ampi_file_text_at(f, "amp.scaler");
    amp_result r;
    if (!text || !ampi_hex_decode(text, bytes, sizeof bytes))
        return ampi_model_fail(m, AMP_ERR_FORMAT, "checkpoint: '%s': amp.scaler is missing or malformed",
                               f->path);
    out->scaler = *amp_model_scaler(m);
    out->scaler.desc.logger = &m->op_logger;
    r = amp_scaler_load(&out->scaler, bytes, sizeof bytes);
    out->scaler.desc.logger = amp_model_scaler(m)->desc.logger;
    return r;
}

/* A tensor of the file that the model does not have is a difference too. */
AMPI_FN amp_result ampi_checkpoint_check_extra(amp_model* m, const ampi_file* f) {
    char shown[AMPI_SHOWN];
    size_t i;
    for (i = 0; i < f->count; i++)
        if (!f->entries[i].wanted)
            return ampi_model_fail(m, AMP_ERR_FORMAT,
                                   "checkpoint: tensor '%s' is in the file, but not in the model",
                                   ampi_show(f->entries[i].name, shown));
    return AMP_OK;
}

/* Everything was checked: from here on only the backend's copies could fail. */
AMPI_FN amp_result ampi_checkpoint_apply(amp_model* m, const ampi_state_list* s, const char* staging,
                                         const ampi_restored* restored) {
    amp_result r = AMP_OK;
    int i;
    for (i = 0; i < s->count && r == AMP_OK; i++) {
        size_t bytes = ampi_file_bytes(&s->tensors[i]);
        if (bytes > 0) r = ampi_model_upload(m, s->tensors[i].tensor.data, staging, bytes);
        staging += bytes;
    }
    if (r != AMP_OK) return r;
    *amp_model_scaler(m) = restored->scaler;
    amp_model_optimizer(m)->state.step = restored->step;
    amp_model_optimizer(m)->state.lr = restored->lr;
    ampi_model_set_pass_count(m, restored->passes);
    return amp_model_sync_params(m);
}

/* Checks in the order in which a person would want to hear of differences: settings, scaler, tensors. */
AMPI_FN amp_result ampi_checkpoint_read(amp_model* m, ampi_file* f, const ampi_state_list* s) {
    char* staging = NULL;
    ampi_restored restored;
    amp_result r = ampi_checkpoint_check_fields(m, f);
    if (r == AMP_OK) r = ampi_checkpoint_read_state(m, f, &restored);
    if (r == AMP_OK) r = ampi_checkpoint_read_scaler(m, f, &restored);
    if (r == AMP_OK) r = ampi_file_stage(f, s->tensors, s->count, "the model", &staging);
    if (r == AMP_OK) r = ampi_checkpoint_check_extra(m, f);
    if (r == AMP_OK) r = ampi_checkpoint_check_graph(m, f);
    if (r == AMP_OK) r = ampi_checkpoint_apply(m, s, staging, &restored);
    ampi_free(f->allocator, staging);
    return r;
}

AMP_DEF amp_result amp_checkpoint_load(amp_model* m, const char* path) {
    ampi_state_list s;
    ampi_file f;
    amp_result r = ampi_checkpoint_ready(m, path);
    if (r != AMP_OK) return r;
    r = ampi_state_list_make(&s, m);
    if (r != AMP_OK) return r;
    r = ampi_file_open(&f, path, ampi_model_allocator(m), &m->op_logger);
    if (r == AMP_OK) r = ampi_checkpoint_read(m, &f, &s);
    ampi_file_close(&f);
    ampi_free(ampi_model_allocator(m), s.tensors);
    return r;
}

#endif /* AMP_NO_STDIO */

/* ======================================================================================== */
/* >>impl-report                                                                              */
/* ======================================================================================== */

/* What a type can hold: its smallest normal number is 2^min_exponent, its largest number (2 - 2^-fraction) *
   2^max_exponent. */
typedef struct ampi_range { int max_exponent, min_exponent, fraction; } ampi_range;
AMPI_FN ampi_range ampi_range_of(amp_dtype t) {
    ampi_range r = { 127, -126, 23 };
    if (t == AMP_F16) { r.max_exponent = 15; r.min_exponent = -14; r.fraction = 10; }
    if (t == AMP_BF16) r.fraction = 7;
    if (t == AMP_F64) { r.max_exponent = 1023; r.min_exponent = -1022; r.fraction = 52; }
    return r;
}

/* Bits of |x|, and of infinity. Everything is done on doubles, in which each of the types is exact. */
#define AMPI_INF64 0x7ff0000000000000u
AMPI_FN uint64_t ampi_magnitude64(double x) { return ampi_bits64(x) & 0x7fffffffffffffffu; }

/* floor(log2|x|) of a finite number that is not zero, from its bits. */
AMPI_FN int ampi_exponent(uint64_t magnitude) {
    int e = (int)(magnitude >> 52);
    if (e > 0) return e - 1023;
    for (e = -1023; !(magnitude & 0x8000000000000u); e--) magnitude <<= 1;
    return e;
}

/* The magnitude after rounding to the target: what decides over underflow and overflow. */
AMPI_FN uint64_t ampi_rounded_magnitude(double x, amp_dtype target) {
    if (target == AMP_F16) return ampi_magnitude64(amp_half_to_double(amp_half_from_double(x)));
    if (target == AMP_BF16) return ampi_magnitude64(amp_bfloat16_to_double(amp_bfloat16_from_double(x)));
    return ampi_magnitude64((double)(float)x);
}

/* |x| as a float, within the range of finite floats that are not zero. */
AMPI_FN float ampi_clamped_float(uint64_t magnitude) {
    int e = ampi_exponent(magnitude);
    float f = e < -149 ? 0.0f : e > 127 ? AMPI_FLT_MAX : (float)ampi_double(magnitude);
    if (f < ampi_float(1)) return ampi_float(1);
    return f > AMPI_FLT_MAX ? AMPI_FLT_MAX : f;
}

AMPI_FN void ampi_stats_add(amp_stats* s, double x, const ampi_range* own, const ampi_range* range,
                            amp_dtype target) {
    uint64_t a = ampi_magnitude64(x), rounded;
    float f;
    int e;
    if (a == 0) { s->zeros++; return; }
    if (a > AMPI_INF64) { s->nans++; return; }
    if (a == AMPI_INF64) { s->infs++; return; }
    e = ampi_exponent(a);
    if (e < own->min_exponent) s->subnormals++;
    rounded = ampi_rounded_magnitude(x, target);
    if (rounded == 0) s->would_underflow++;
    else if (rounded == AMPI_INF64) s->would_overflow++;
    else if (ampi_exponent(rounded) < range->min_exponent) s->would_be_subnormal++;
    e -= AMP_STATS_MIN_EXPONENT;
    s->histogram[e < 0 ? 0 : e >= AMP_STATS_BINS ? AMP_STATS_BINS - 1 : e]++;
    f = ampi_clamped_float(a);
    if (s->largest == 0.0f || f > s->largest) s->largest = f;
    if (s->smallest == 0.0f || f < s->smallest) s->smallest = f;
}

/* largest = f * 2^e with f in [1,2): times 2^(max_exponent - 1 - e) it is at most half of the target's
   largest number unless f exceeds that number's own fraction, 2 - 2^-fraction. */
AMPI_FN void ampi_suggest_scale(amp_stats* s, const ampi_range* range) {
    uint32_t last = (0x007fffffu << (23 - range->fraction)) & 0x007fffffu;
    double largest = (double)s->largest;
    int e;
    s->suggested_scale = 0.0f;
    if (s->largest == 0.0f) return;
    e = range->max_exponent - 1 - ampi_exponent(ampi_bits64(largest));
    if (((ampi_bits64(largest) >> 29) & 0x007fffffu) > last) e--;
    s->suggested_scale = ampi_float((uint32_t)((e > 127 ? 127 : e) + 127) << 23);
}

AMP_DEF amp_result amp_stats_collect(amp_stats* out, const void* x, amp_dtype dtype, size_t n,
                                     amp_dtype target, int add) {
    enum { CHUNK = 256 };
    ampi_range own, range;
    double tile[CHUNK];
    size_t at, i;
    if (!out || (!x && n) || n > SIZE_MAX / 16) return AMP_ERR_ARGUMENT;
    if (target == AMP_DTYPE_DEFAULT) target = AMP_F16;
    if (amp_dtype_size(dtype) == 0 || !ampi_is_compute_dtype(target)) return AMP_ERR_DTYPE;
    own = ampi_range_of(ampi_dtype(dtype));
    range = ampi_range_of(target);
    if (!add) memset(out, 0, sizeof *out);
    out->count += n;
    for (at = 0; at < n; at += CHUNK) {
        size_t k = n - at < CHUNK ? n - at : (size_t)CHUNK;
        amp_convert(tile, AMP_F64, (const char*)x + at * amp_dtype_size(dtype), dtype, k);
        for (i = 0; i < k; i++) ampi_stats_add(out, tile[i], &own, &range, target);
    }
    ampi_suggest_scale(out, &range);
    return AMP_OK;
}

/* The same for memory of the backend. */
AMPI_FN amp_result ampi_collect(amp_model* m, amp_stats* out, const void* data, amp_dtype dtype, size_t n) {
    enum { CHUNK = 512 };
    float tile[CHUNK];
    size_t at, size = amp_dtype_size(dtype);
    for (at = 0; at < n; at += CHUNK) {
        size_t k = n - at < CHUNK ? n - at : (size_t)CHUNK;
        amp_result r = m->backend->download(tile, dtype, (const char*)data + at * size, dtype, k, &m->exec);
        if (r != AMP_OK) return r;
        amp_stats_collect(out, tile, dtype, k, m->policy.low_dtype, 1);
    }
    return AMP_OK;
}

AMP_DEF amp_result amp_model_stats(amp_model* m, const amp_batch* batch, amp_layer_stats* stats,
                                   int capacity) {
    ampi_pass p;
    fenv_t floats;
    amp_result r;
    int i;
    if (!m) return AMP_ERR_ARGUMENT;
    if ((r = ampi_check_batch(m, batch, "model stats", 1)) != AMP_OK) return r;
    if ((r = ampi_check_training(m, batch, "model stats")) != AMP_OK) return r;
    if (m->micro)
        return ampi_model_fail(m, AMP_ERR_STATE, "model stats: a step with micro-batches is not finished");
    if (!stats || capacity < m->layer_count)
        return ampi_model_fail(m, AMP_ERR_ARGUMENT, "model stats: room for %d layers, %d are needed",
                               stats ? capacity : 0, m->layer_count);
    memset(stats, 0, (size_t)m->layer_count * sizeof *stats);
    p = ampi_training_pass(m, batch->n);
    p.keep_running = 1;
    feholdexcept(&floats);
    r = m->backend->training_begin(&m->training, 0, &m->exec);
    if (r == AMP_OK) r = ampi_load_inputs(m, batch);
    if (r == AMP_OK) r = ampi_load_targets(m, batch);
    m->observed = stats;
    if (r == AMP_OK) r = ampi_forward(m, &p, m->node_count - 1, 1);
    if (r == AMP_OK) r = ampi_backward(m, &p);
    m->observed = NULL;
    for (i = 0; i < m->layer_count && r == AMP_OK; i++) {
        const ampi_node* n = &m->nodes[i];
        int k;
        for (k = 0; k < 2 && r == AMP_OK; k++) {
            int param = k == 0 ? n->weight : n->bias;
            if (param != AMPI_NONE)
                r = ampi_collect(m, &stats[i].weight_gradient, m->params[param].grad,
                                 m->params[param].grad_dtype, m->params[param].count);
        }
    }
    fesetenv(&floats);
    return r;
}

#if !defined(AMP_NO_STDIO)
AMP_DEF amp_result amp_model_print(const amp_model* m, FILE* out) {
    amp_memory mem;
    size_t parameters = 0;
    int i;
    if (!m) return AMP_ERR_ARGUMENT;
    if (!out) return ampi_model_fail(m, AMP_ERR_ARGUMENT, "amp_model_print: out is NULL");
    if (!m->finalized) return ampi_model_fail(m, AMP_ERR_STATE, "amp_model_print: the model is not finalized");
    fprintf(out, "%s%s%s, batch %d\n", amp_level_name(m->policy.level), m->policy.level == AMP_O0 ? "" : " ",
            m->policy.level == AMP_O0 ? "" : amp_dtype_name(m->policy.low_dtype), m->desc.batch);
    fprintf(out, "%-24s %-22s %-14s %-7s %-7s %-7s %-8s %-20s %10s %12s\n", "layer", "operator", "output",
            "compute", "stored", "weights", "rule", "chosen by", "parameters", "bytes");
    for (i = 0; i < m->layer_count; i++) {
        const amp_layer* l = &m->nodes[i].layer;
        char shape[48];
        snprintf(shape, sizeof shape, "%dx%dx%d", l->channels, l->height, l->width);
        fprintf(out, "%-24s %-22s %-14s %-7s %-7s %-7s %-8s %-20s %10lu ", l->name, amp_op_name(l->op),
                shape, amp_dtype_name(l->compute_dtype), amp_dtype_name(l->storage_dtype),
                l->parameters ? amp_dtype_name(l->param_dtype) : "-", amp_rule_name(l->rule),
                amp_reason_name(l->reason), (unsigned long)l->parameters);
        if (l->in_place || l->op == AMP_OP_FLATTEN) fprintf(out, "%12s", "in place");
        else fprintf(out, "%12lu", (unsigned long)l->activation_bytes);
        fprintf(out, l->casts ? "  (+%d cast)\n" : "\n", l->casts);
        parameters += l->parameters;
    }
    memset(&mem, 0, sizeof mem);
    amp_model_memory(m, &mem);
    fprintf(out,
            "%lu parameters; bytes: activations %lu, weights f32 %lu, weights 16-bit %lu, gradients %lu, "
            "moments %lu, workspace %lu\n",
            (unsigned long)parameters, (unsigned long)mem.activation_bytes,
            (unsigned long)mem.parameter_bytes, (unsigned long)mem.low_parameter_bytes,
            (unsigned long)mem.gradient_bytes, (unsigned long)mem.optimizer_bytes,
            (unsigned long)mem.workspace_bytes);
    return ferror(out) ? AMP_ERR_IO : AMP_OK;
}

AMP_DEF amp_result amp_stats_print(const amp_stats* s, FILE* out) {
    static const char bar[] = "##################################################";
    uint64_t most = 1;
    int i, first = AMP_STATS_BINS, last = -1;
    if (!s || !out) return AMP_ERR_ARGUMENT;
    fprintf(out, "%lu values: %lu zero, %lu subnormal, %lu inf, %lu nan; |x| %g to %g\n",
            (unsigned long)s->count, (unsigned long)s->zeros, (unsigned long)s->subnormals,
            (unsigned long)s->infs, (unsigned long)s->nans, (double)s->smallest, (double)s->largest);
    fprintf(out, "after a cast: %lu to zero, %lu to subnormal, %lu to inf; suggested scale %g\n",
            (unsigned long)s->would_underflow, (unsigned long)s->would_be_subnormal,
            (unsigned long)s->would_overflow, (double)s->suggested_scale);
    for (i = 0; i < AMP_STATS_BINS; i++) {
        if (!s->histogram[i]) continue;
        if (i < first) first = i;
        last = i;
        if (s->histogram[i] > most) most = s->histogram[i];
    }
    for (i = first; i <= last; i++)
        fprintf(out, "2^%-5d %10lu %.*s\n", i + AMP_STATS_MIN_EXPONENT, (unsigned long)s->histogram[i],
                (int)((s->histogram[i] * (sizeof bar - 1) + most - 1) / most), bar);
    return ferror(out) ? AMP_ERR_IO : AMP_OK;
}
#endif

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* AMP_IMPLEMENTATION */

/* ======================================================================================== */
/* >>license                                                                                  */
/* ======================================================================================== */
/* MIT License. Copyright (c) 2026 the amp authors.
   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction, including
   without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the
   following conditions: The above copyright notice and this permission notice shall be included in all
   copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY
   KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A
   PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR
   ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
