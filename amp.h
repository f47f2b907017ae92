/* amp.h - train neural networks in mixed precision, from one C header.  MIT licence, at the end.

   In ONE C or C++ file of your program:          Everywhere else (and twice does no harm):
       #define AMP_IMPLEMENTATION                     #include "amp.h"
       #include "amp.h"
   Any C99 or C++11 compiler builds it, with no flag and no library but -lm.

   [TOC]   jump: search for ">>name"
     guide        what there is
     config       version, option macros
     base         result codes, data types, logger, allocator, random numbers
     cpu          the instruction set in use
     half         IEEE half and bfloat16, conversions
     ops          operators on raw pointers: gemm, dense, convolution, norms, attention, ...
     policy       autocast: which operator runs in which type, O0 to O3
     scaler       the loss scale
     optim        optimizers on FP32 master weights
     model        a network as a graph
     train        the training step, evaluation, training over a data set
     checkpoint   save and load (safetensors)
     report       what a person wants to see
     backend      the processor a model runs on: with AMP_BACKEND_API
     impl         the implementation: impl-base, impl-cpu, impl-half, impl-vector, impl-kernels,
                  impl-convert, impl-scan, impl-gemm, impl-conv, impl-math, impl-tiles, impl-pool,
                  impl-elementwise, impl-rows, impl-loss, impl-attention, impl-policy, impl-scaler,
                  impl-optim, impl-backend, impl-model, impl-train, impl-file, impl-checkpoint,
                  impl-report
     since        what has changed since earlier versions
     license      MIT */

/* >>guide    Read this once. */
/*
   Three ways in.
   1. You have a training loop and its memory. Take single parts, which own nothing: amp_convert and
      amp_gemm for half operands, amp_scaler_* for the loss scale, amp_optimizer_* for master
      weights.
          once:      amp_scaler_init(&scaler, NULL);
                     amp_optimizer_init(&optimizer, &desc, params, count);
          per step:  loss gradient = amp_scaler_scale_loss(&scaler, 1.0f) * d;   your backward pass;
                     amp_optimizer_step(&optimizer, &scaler, &info);   amp_scaler_update(&scaler);
          to stop:   amp_optimizer_save(&optimizer, &scaler, path, NULL, 0, NULL);
          to go on:  amp_optimizer_load.
      amp_mixed is both in one object, which owns masters and moments: amp_mixed_init, then for each
      step amp_mixed_scale and amp_mixed_step. FP32 arrays may stay: operands of amp_exec rounds
      them inside of products.
   2. You want to train a network: amp_model_create, amp_conv2d, amp_relu, ..., amp_model_finalize,
      then amp_fit for a data set, or amp_train_step for each batch. A loss of your own is a seed
      (amp_output, amp_forward, amp_backward, amp_update) or, as any operator, amp_custom.
   3. You want to look: amp_model_print, amp_stats_collect, amp_report_svg, amp_history_svg.

   Words.     half: IEEE binary16. low: the 16-bit type in use, half or bfloat16. master weights:
   the FP32 weights that an optimizer updates, with a low copy. loss scale: the factor that keeps
   small gradients out of half's underflow. unscale: to divide it out, in FP32. found_inf: a
   gradient is inf or NaN, so the step is skipped. window: from one amp_scaler_update to the next.
   Letters.   N images or rows, C channels, H x W pixels, I inputs, O outputs, K classes, R rows, D
   their length.
   Numbers.   Operands are stored in 16 bits; products and sums are carried in FP32; each result is
   rounded once, to nearest even, as on a Tensor Core. Losses, norm statistics, softmax and
   optimizers are FP32 inside. inf and NaN are found by their bits in memory, under -Ofast too. A
   NaN that a CPU operator stores is 0x7fc00000 rounded to its type; conversions and concat keep its
   sign and what fits of its payload.
   The same bits everywhere. CPU results do not depend on instruction set, compiler, optimisation
   level or thread count: every multiply-add is an fma, every sum has a fixed order (a product's: k
   ascending), exp and its kin are the header's own. Exceptions: -Ofast, -ffast-math, clang's
   -ffp-model=fast and icx's default (amp_self_test finds them); a changed rounding mode, flush to
   zero, floats carried wider than they are (FLT_EVAL_METHOD 2: x87), AMP_SUMS_FAST, and a GPU.
   Errors.    A function that can fail on bad input returns an amp_result (0 = AMP_OK) and then has
   changed nothing: AMP_ERR_ARGUMENT, _DESC, _SHAPE, _DTYPE, and what its comment names. The logger
   gets one sentence that names the place. Nothing prints, exits or aborts. An overflow in training
   is no error: amp_step_info tells it. Numbers in texts and pictures have a decimal point in every
   locale.
   Operands.  amp_f32(p), amp_f16(p), amp_bf16(p) or AMP_REF(p) say where elements lie and of which
   type they are; AMP_NONE is no operand. Gradients come first, then what they are computed from,
   then the results.
   Descs.     In a zeroed struct each field is its default. AMP_ZERO (-1) is a real zero where 0
   means something else. A NULL desc is all defaults, a NULL info not wanted, a NULL logger silent
   unless the implementation is built with AMP_LOG_DEFAULT. In C++ {} works where a desc is
   expected.
   Pointers.  Each must be aligned for its element type (unchecked). Sizes count elements unless
   bytes are named.
   Threads.   Objects are independent; two threads must not use one object at once. With -fopenmp
   large operators use threads, in the caller's floating-point environment. A process forked
   after that hangs in GNU's OpenMP: fork before, or call omp_set_num_threads(1) in the child.
   GPUs.      amp_cuda.cuh has a backend on which the same model trains.
   Memory.    Parts on raw pointers allocate nothing, but for files and amp_workspace. A model
   allocates in create, build and finalize, never in a step. 128 KB of stack are enough (192 with
   clang, AVX-512 and no optimisation). Adam costs 16 bytes per parameter in FP32 and 18 in mixed
   precision, 16 with 16-bit weight gradients; the halving is in the activations. With split masters
   and moments in BF16 too it is 10.
   Floating-point exceptions, where a host unmasks them (feenableexcept): steps, evaluation,
   predictions, statistics, gradient checks and saturating casts mask them and leave no flag.
   mask_exceptions in amp_exec and amp_convert_desc does so for one call of a loop of your own,
   where a loss scale that is too high overflows. Other functions raise what IEEE 754 says; a
   convolution may also raise for sums that it does not store.
   Include it with quotes: <amp.h> is another header on Windows (C++ AMP). The declarations, as a
   preprocessor leaves them, are a cdef for Python's cffi. */

#ifndef AMPI_PASS    /* see impl-vector */
#ifndef AMP_H_INCLUDED
#define AMP_H_INCLUDED

/* >>config   Version, and the option macros (define them before the include). */
#include <stddef.h>
#include <stdint.h>
#if !defined(AMP_NO_STDIO)
  #include <stdio.h>
#endif

#define AMP_VERSION_MAJOR 0
#define AMP_VERSION_MINOR 3
#define AMP_VERSION_PATCH 0
#define AMP_VERSION (AMP_VERSION_MAJOR * 10000 + AMP_VERSION_MINOR * 100 + AMP_VERSION_PATCH)

/* Option macros. None changes the layout of a struct, so files may differ in them.
     AMP_IMPLEMENTATION  emit the implementation here: in exactly one file
     AMP_STATIC          every function static: a private copy, beside AMP_IMPLEMENTATION
     AMP_BACKEND_API     declares the fields of amp_backend too; amp_cuda.cuh defines it
     AMP_DEF             linkage of public functions, e.g. __declspec(dllexport)
     AMP_SELF            this file's name in quotes, if not "amp.h"
     AMP_NO_SIMD         portable C: no intrinsics, no cpuid; the same bits, slower
     AMP_NO_AVX512       no kernels for AVX-512, BF16 or AMX: compiles sooner; the same bits
     AMP_NO_OPENMP       no threads, even where OpenMP is on
     AMP_NO_STDIO        no FILE: removes checkpoint, print and the stderr logger
     AMP_LOG_DEFAULT     beside AMP_IMPLEMENTATION: the log function of calls without a logger,
                         as amp_log_stderr */
#ifndef AMP_DEF
  #if defined(AMP_STATIC) && !defined(AMP_IMPLEMENTATION)
    #error "AMP_STATIC: this file needs AMP_IMPLEMENTATION too, before the include"
    #define AMP_DEF extern
  #elif defined(AMP_STATIC) && (defined(__GNUC__) || defined(__clang__))
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

/* >>base     Result codes, data types, logger, allocator, execution context, random numbers. */

#define AMP_RESULT_LIST(X) \
    X(OK, 0, "success") \
    X(ERR_ARGUMENT, -1, "a pointer or a size is not valid") \
    X(ERR_DESC, -2, "a desc field is out of its range") \
    X(ERR_SHAPE, -3, "shapes do not fit together") \
    X(ERR_DTYPE, -4, "this data type is not supported here") \
    X(ERR_MEMORY, -5, "the allocator returned NULL") \
    X(ERR_STATE, -6, "the call comes at the wrong time") \
    X(ERR_POLICY, -7, "an illegal combination of precision settings") \
    X(ERR_OVERFLOW, -8, "overflow persists: the limit set in the desc is reached") \
    X(ERR_IO, -9, "a file could not be opened, read or written") \
    X(ERR_FORMAT, -10, "the data is truncated, foreign or malformed") \
    X(ERR_UNSUPPORTED, -11, "not available in this build or on this machine") \
    X(ERR_COMM, -12, "the communication hook reported a failure") \
    X(ERR_DEVICE, -13, "the GPU or its driver reported an error")
/* A type that holds any int, named or not. */
#ifdef __cplusplus
  #define AMPI_ENUM(name) enum name : int
#else
  #define AMPI_ENUM(name) enum name
#endif
#define AMPI_COUNT(...) + 1
#define AMPI_X(name, code, text) AMP_##name = code,
typedef AMPI_ENUM(amp_result) { AMP_RESULT_LIST(AMPI_X) } amp_result;
#undef AMPI_X

/* Text of a result code; never NULL. */
AMP_DEF const char* amp_result_string(amp_result r);

/* In a desc: really zero, where 0 means the default. */
#define AMP_ZERO (-1)

typedef AMPI_ENUM(amp_dtype) {
    AMP_DTYPE_DEFAULT = 0,  /* AMP_F32 unless a field says otherwise */
    AMP_F32  = 1,  /* float */
    AMP_F16  = 2,  /* amp_half: IEEE binary16, max 65504 */
    AMP_BF16 = 3,  /* amp_bfloat16: upper half of a float */
    AMP_F64  = 4,  /* double; conversions, statistics, inputs */
    AMP_U8   = 5,  /* uint8_t; images and labels of a batch */
    AMP_I32  = 6,  /* int32_t; labels of a batch */
    AMP_I64  = 7,  /* int64_t; labels of a batch */
} amp_dtype;

/* Bytes of one element and a name, as "bf16"; 0 and "?" for another value. AMP_DTYPE_DEFAULT counts
   as AMP_F32. */
AMP_DEF size_t amp_dtype_size(amp_dtype t);
AMP_DEF const char* amp_dtype_name(amp_dtype t);

/* Receives one sentence (no newline) for each refused call: what is wrong, and where. With AMP_OK:
   what may surprise after a call that went well, such as a file without some weights. */
typedef struct amp_logger {
    void (*log)(amp_result code, const char* sentence, void* user_data);
    void* user_data;
} amp_logger;

#if !defined(AMP_NO_STDIO)
/* A log function: writes "amp: <sentence>" and a newline to stderr. */
AMP_DEF void amp_log_stderr(amp_result code, const char* sentence, void* user_data);
#endif

/* Memory source: both functions or neither (malloc and free). alloc returns memory aligned as
   malloc's, or NULL. */
typedef struct amp_allocator {
    void* (*alloc)(size_t size, void* user_data);
    void  (*free)(void* ptr, void* user_data);
    void* user_data;
} amp_allocator;

/* The order of sums in a product of two BF16 operands, m x k and k x n, also of a convolution: m
   counts outputs of a group or, for the input gradient, channels. FIXED: k ascending, on every
   processor. FAST: the matrix unit's (Intel's AMX on Linux), several times as fast, where m, n >=
   16 and k >= 32. Subnormals and sums below 2^-126 are zero then; the bits depend on the processor,
   not on threads. */
typedef AMPI_ENUM(amp_sums) { AMP_SUMS_FIXED = 0, AMP_SUMS_FAST = 1 } amp_sums;

typedef struct amp_backend amp_backend;  /* a processor; >>backend tells what it is made of */
/* The processor that this file's functions run on. Never NULL. */
AMP_DEF const amp_backend* amp_cpu_backend(void);

/* Scratch memory that calls enlarge to what they can use. It never shrinks, and is the caller's to
   free. Without memory for more, a call runs as with no workspace. */
typedef struct amp_workspace {
    const amp_backend* backend;   /* whose memory it is; NULL = the CPU's */
    amp_allocator      allocator; /* of the CPU's */
    void*              data;      /* NULL at first */
    size_t             size;      /* bytes */
} amp_workspace;
/* Frees the memory; the next call that needs some takes it anew. */
AMP_DEF void amp_workspace_free(amp_workspace* w);

/* How an operator runs. A workspace changes no bits, but makes products and convolutions faster. */
typedef struct amp_exec {
    void*  workspace;       /* scratch (GPU memory on a GPU), any alignment; NULL = none */
    size_t workspace_size;  /* bytes */
    const amp_logger* logger;
    void*  stream;          /* cudaStream_t on a GPU; ignored by the CPU */
    void*  context;         /* the backend's own, set by a model or amp_cuda_exec; else NULL */
    amp_sums sums;
    int    mask_exceptions; /* 1 = floating-point exceptions of the CPU are masked for the call, and
                               leave no flag */
    amp_workspace* grows;   /* NULL, or used in place of `workspace`, one call at a time */
    amp_dtype operands;     /* 0, or F16 or BF16: products and convolutions round operands of FP32
                               to it as they read them, with the bits of 16-bit arrays. Gradients
                               of biases are sums of dy as stored. Not on a GPU */
} amp_exec;

/* A list of tensors is an array of these. Nothing is owned. */
typedef struct amp_tensor {
    void*       data;   /* count elements; may be NULL if count is 0 */
    amp_dtype   dtype;  /* 0 = AMP_F32 */
    size_t      count;
    const char* name;   /* for messages; may be NULL */
} amp_tensor;

/* Random numbers (Philox4x32-10; Salmon et al., SC 2011), a pure function of seed and position: 32
   uniform bits; floats in [0,1) with 24 random bits; a standard normal deviate (of positions
   2*index and 2*index+1). */
AMPI_HD AMP_DEF uint32_t amp_random_bits(uint64_t seed, uint64_t index);
AMPI_HD AMP_DEF float    amp_random_uniform(uint64_t seed, uint64_t index);
AMP_DEF float    amp_random_normal(uint64_t seed, uint64_t index);

/* >>cpu      Which instructions the kernels use. Results have the same bits on each. */

typedef AMPI_ENUM(amp_isa) {
    AMP_ISA_AUTO   = 0,  /* the best that this processor has */
    AMP_ISA_SCALAR = 1,  /* portable C */
    AMP_ISA_NEON   = 2,  /* aarch64 */
    AMP_ISA_AVX2   = 3,  /* AVX2 + FMA + F16C */
    AMP_ISA_AVX512 = 4,  /* AVX-512 F, BW, DQ, VL */
    AMP_ISA_AVX512_BF16 = 5,  /* and vdpbf16ps for products of bfloat16: the best on AMD, slower
                                 than fma on Intel */
} amp_isa;

/* The instruction set in use: the best at the first call, or the available one that the environment
   variable AMP_ISA names (scalar | neon | avx2 | avx512 | avx512_bf16). */
AMP_DEF amp_isa amp_cpu_isa(void);
/* For tests: sets it for the whole process, while no thread is in the library. AMP_ERR_UNSUPPORTED
   if unavailable. */
AMP_DEF amp_result amp_cpu_force_isa(amp_isa isa);
/* 1 if AMP_SUMS_FAST has a matrix unit with the instruction set in use, else 0. On Linux this asks
   for it. */
AMP_DEF int amp_cpu_has_fast_sums(void);
/* Compares conversions, products, sums, exp, an optimizer's steps and loss scales with their known
   bits, in less than a millisecond. AMP_ERR_UNSUPPORTED if any differ, as with -ffast-math, clang's
   -ffp-model=fast, or icx without -fp-model=precise: the logger hears which. So let a file of its
   own hold the implementation, compiled by -O2. */
AMP_DEF amp_result amp_self_test(const amp_logger* logger);
/* "auto", "scalar", ..., "avx512_bf16"; "?" for another value. */
AMP_DEF const char* amp_isa_name(amp_isa isa);

/* >>half     IEEE half and bfloat16, conversions one by one and in bulk. */

/* Structs, never a bare uint16_t: adding two halves must not compile. */
typedef struct amp_half     { uint16_t bits; } amp_half;  /* 1 sign, 5 exponent, 10 fraction bits */
/* 1 sign, 8 exponent, 7 fraction bits */
typedef struct amp_bfloat16 { uint16_t bits; } amp_bfloat16;

/* An operand: where its elements lie, and their type. By value; nothing is owned. */
typedef struct amp_ref {
    void*     data;   /* an operand that is only read is not written to */
    amp_dtype dtype;  /* 0 = AMP_F32 */
} amp_ref;
/* References by type: amp_f32(x), amp_f16(x), amp_bf16(x); or of a type known at run time. */
AMP_DEF amp_ref amp_f32(const float* p);
AMP_DEF amp_ref amp_f16(const amp_half* p);
AMP_DEF amp_ref amp_bf16(const amp_bfloat16* p);
AMP_DEF amp_ref amp_ref_of(const void* p, amp_dtype dtype);
/* No operand. */
#define AMP_NONE amp_f32(NULL)
/* A reference whose type is that of the pointer p, from C11 or C++ on. */
#if !defined(__cplusplus)
  #define AMP_REF(p) \
    _Generic((p), float*: amp_f32, const float*: amp_f32, \
        amp_half*: amp_f16, const amp_half*: amp_f16, \
        amp_bfloat16*: amp_bf16, const amp_bfloat16*: amp_bf16)(p)
#else
  #define AMP_REF(p) amp_ref_to(p)
#endif

#define AMP_HALF_MAX      65504.0f  /* largest finite half */
#define AMP_HALF_MIN      6.103515625e-5f  /* smallest normal half, 2^-14 */
#define AMP_HALF_TRUE_MIN 5.9604644775390625e-8f /* smallest subnormal, 2^-24 */

/* To 16 bits: to nearest, ties to even; too large becomes infinity, too small a subnormal or a
   signed zero. A NaN is made quiet and keeps its payload's upper bits. From double directly:
   through float it would round twice. */
AMP_DEF amp_half     amp_half_from_float(float f);
AMP_DEF amp_half     amp_half_from_double(double d);
AMP_DEF amp_bfloat16 amp_bfloat16_from_float(float f);
AMP_DEF amp_bfloat16 amp_bfloat16_from_double(double d);
/* From 16 bits: exact; a signalling NaN is made quiet. */
AMP_DEF float  amp_half_to_float(amp_half h);
AMP_DEF double amp_half_to_double(amp_half h);
AMP_DEF float  amp_bfloat16_to_float(amp_bfloat16 h);
AMP_DEF double amp_bfloat16_to_double(amp_bfloat16 h);
/* Tests on the bits of one element, of type F32, F16, BF16 or F64. Other types are finite. */
AMP_DEF int amp_is_nan(amp_ref x);
AMP_DEF int amp_is_inf(amp_ref x);
AMP_DEF int amp_is_finite(amp_ref x);

/* Converts n elements; equal types are copied bit by bit. dst == src is allowed, another overlap
   AMP_ERR_ARGUMENT. */
AMP_DEF amp_result amp_convert(amp_ref dst, amp_ref src, size_t n);

/* NEAREST: ties to even. STOCHASTIC: away from zero with a probability of the fraction cut off (its
   first 32 bits); above the largest finite value the next one is infinity. */
typedef AMPI_ENUM(amp_rounding) { AMP_ROUND_NEAREST = 0, AMP_ROUND_STOCHASTIC = 1 } amp_rounding;

typedef struct amp_convert_desc {
    int          saturate;   /* 1 = infinity, read or made, becomes the largest finite value of
                                dst's type */
    amp_rounding rounding;   /* 0 = nearest; stochastic needs a dst of 16 bits */
    uint64_t     seed;       /* of the stochastic stream */
    uint64_t     offset;     /* element i uses stream position offset + i */
    size_t*      saturated;  /* NULL, or a counter to which clamped elements are added */
    const amp_logger* logger;
    int          mask_exceptions;  /* as in amp_exec; saturate masks them too */
} amp_convert_desc;
/* amp_convert with options. */
AMP_DEF amp_result amp_convert_with(amp_ref dst, amp_ref src, size_t n,
    const amp_convert_desc* desc);
/* The same for rows x cols elements of matrices whose rows are dst_ld and src_ld (>= cols) elements
   apart; element (i, j) uses offset + i * cols + j. dst == src is allowed if rows are equally many
   bytes apart. */
AMP_DEF amp_result amp_convert_rows(amp_ref dst, size_t dst_ld, amp_ref src, size_t src_ld,
    size_t rows, size_t cols, const amp_convert_desc* desc);

/* >>ops      Operators on raw pointers, usable alone. */

/* Rules for all: tensors are row-major and packed (amp_gemm's aside), images are N,C,H,W. Each
   operand has its own type: F32, F16 or BF16. A gradient output may be AMP_NONE, not wanted (x of
   amp_concat_backward aside). A result may not overlap an operand or another result; where they
   "may be the same", they have one type and one address. */

/* `accumulate` of a backward function, a sum of these: 0 overwrites all gradients, _PARAMS adds to
   the parameters' (dw, db, dgamma, dbeta), _INPUT to dx. Sums are FP32, rounded once. */
typedef AMPI_ENUM(amp_accumulate) {
    AMP_ACCUMULATE_PARAMS = 1, AMP_ACCUMULATE_INPUT = 2
} amp_accumulate;

/* --- matrix product --- */

typedef AMPI_ENUM(amp_transpose) { AMP_NO_TRANS = 0, AMP_TRANS = 1 } amp_transpose;

/* C = alpha * op(A) * op(B) + beta * C: op(A) is m x k, op(B) is k x n, C is m x n. */
typedef struct amp_gemm_shape {
    amp_transpose trans_a, trans_b;  /* A is stored m x k, or k x m if transposed; B likewise */
    size_t m, n, k;
    size_t lda, ldb, ldc;            /* elements from a stored row to the next; 0 = packed */
    size_t batch;                    /* products of this shape; 0 = 1 */
    size_t a_stride, b_stride;       /* elements from a matrix of the batch to the next; 0 = one for
                                        all */
    size_t c_stride;                 /* likewise; matrices of C may not overlap */
} amp_gemm_shape;

/* beta == 0 overwrites C unread (it may hold NaN). k == 0 or alpha == 0: C = beta * C.
   Attention over h heads: batch = h, a head's rows lda apart, a_stride from head to head. */
AMP_DEF amp_result amp_gemm(const amp_gemm_shape* s, float alpha, amp_ref a, amp_ref b,
    float beta, amp_ref c, const amp_exec* exec);
/* Bytes of workspace for amp_gemm's full speed at this size: at most about 3 MB for each thread;
   less is used as far as it goes. 0 if the size overflows. A dense layer's forward call is a
   product of (n, out, in), its backward call two, of (n, in, out) and (out, in, n). */
AMP_DEF size_t amp_gemm_workspace(size_t m, size_t n, size_t k);

/* --- dense layer --- */

/* y[N,O] = x[N,I] * w[O,I]^T + b[O]. b may be NULL. */
AMP_DEF amp_result amp_linear_forward(amp_ref x, amp_ref w, amp_ref b, amp_ref y, size_t n,
    size_t in, size_t out, const amp_exec* exec);
/* dx[N,I] = dy * w,  dw[O,I] = dy^T * x,  db[O] = column sums of dy. */
AMP_DEF amp_result amp_linear_backward(amp_ref dy, amp_ref x, amp_ref w, amp_ref dx, amp_ref dw,
    amp_ref db, int accumulate, size_t n, size_t in, size_t out, const amp_exec* exec);

/* --- convolution --- */

/* 2-D convolution: x[N,C,H,W], w[O,C/groups,KH,KW], b[O], y[N,O,OH,OW] with
   OH = (H + pad_h + pad_end_h - dilation_h*(KH-1) - 1) / stride_h + 1, and OW likewise. */
typedef struct amp_conv2d_shape {
    int n, channels, height, width;  /* of x; each >= 1 */
    int out_channels;                /* >= 1, a multiple of groups */
    int kernel_h, kernel_w;          /* >= 1 */
    int stride_h, stride_w;          /* 0 = 1 */
    int pad_h, pad_w;                /* zeros above and to the left; 0 = none */
    int dilation_h, dilation_w;      /* 0 = 1 */
    int groups;                      /* 0 = 1; divides channels; groups == channels is depthwise */
    int pad_end_h, pad_end_w;        /* below and to the right; 0 = as pad_h, pad_w, AMP_ZERO =
                                        none. TensorFlow's SAME has pad_end of pad or pad + 1 */
    int output_pad_h, output_pad_w;  /* of a transposed convolution, less than the stride; else 0 */
} amp_conv2d_shape;

/* OH and OW of a shape, with the operators' errors. */
AMP_DEF amp_result amp_conv2d_output(const amp_conv2d_shape* s, int* out_h, int* out_w,
    const amp_exec* exec);
/* Bytes of workspace with which the two calls below run several times as fast: usually 1 to 10 MB
   for each thread, and up to 16 MB for the weights as FP32. 0 if the shape is not valid. */
AMP_DEF size_t amp_conv2d_workspace(const amp_conv2d_shape* s);
/* b may be NULL. Backward: dx, dw, db from dy[N,O,OH,OW]. */
AMP_DEF amp_result amp_conv2d_forward(const amp_conv2d_shape* s, amp_ref x, amp_ref w, amp_ref b,
    amp_ref y, const amp_exec* exec);
AMP_DEF amp_result amp_conv2d_backward(const amp_conv2d_shape* s, amp_ref dy, amp_ref x,
    amp_ref w, amp_ref dx, amp_ref dw, amp_ref db, int accumulate, const amp_exec* exec);

/* Transposed convolution: x[N,C,H,W], w[C,O/groups,KH,KW], b[O], y[N,O,OH,OW] with
   OH = (H-1)*stride_h - pad_h - pad_end_h + dilation_h*(KH-1) + 1 + output_pad_h, and OW likewise:
   y is the dx of a convolution that turns such a y into x. */
AMP_DEF amp_result amp_conv_transpose2d_output(const amp_conv2d_shape* s, int* out_h, int* out_w,
    const amp_exec* exec);
AMP_DEF size_t amp_conv_transpose2d_workspace(const amp_conv2d_shape* s);
AMP_DEF amp_result amp_conv_transpose2d_forward(const amp_conv2d_shape* s, amp_ref x, amp_ref w,
    amp_ref b, amp_ref y, const amp_exec* exec);
AMP_DEF amp_result amp_conv_transpose2d_backward(const amp_conv2d_shape* s, amp_ref dy, amp_ref x,
    amp_ref w, amp_ref dx, amp_ref dw, amp_ref db, int accumulate, const amp_exec* exec);

/* --- pooling --- */

/* SUM is an average that divides by 1. Its backward call is nearest upsampling by the kernel's
   size; its forward call is the gradient of that. */
typedef AMPI_ENUM(amp_pool) {
    AMP_POOL_MAX = 0, AMP_POOL_AVERAGE = 1, AMP_POOL_SUM = 2
} amp_pool;

/* x[N,C,H,W] -> y[N,C,OH,OW], OH = (H + pad_h + pad_end_h - kernel_h) / stride_h + 1. Padding never
   wins a maximum; an average counts padding as zeros unless exclude_pad. A global pool has kernel =
   height, width. */
typedef struct amp_pool2d_shape {
    amp_pool kind;
    int n, channels, height, width;  /* of x; each >= 1 */
    int kernel_h, kernel_w;          /* >= 1 */
    int stride_h, stride_w;          /* 0 = the kernel's size */
    int pad_h, pad_w;                /* at most half of the kernel */
    int exclude_pad;                 /* average only: divide by the pixels that exist */
    int pad_end_h, pad_end_w;        /* as in amp_conv2d_shape; at most half of the kernel */
} amp_pool2d_shape;

/* As amp_conv2d_output. */
AMP_DEF amp_result amp_pool2d_output(const amp_pool2d_shape* s, int* out_h, int* out_w,
    const amp_exec* exec);
/* A NaN in a window makes its maximum NaN. */
AMP_DEF amp_result amp_pool2d_forward(const amp_pool2d_shape* s, amp_ref x, amp_ref y,
    const amp_exec* exec);
/* dx from dy. The gradient of a maximum goes to the first position that holds it; x may be NULL for
   an average or sum. */
AMP_DEF amp_result amp_pool2d_backward(const amp_pool2d_shape* s, amp_ref dy, amp_ref x,
    amp_ref dx, int accumulate, const amp_exec* exec);

/* --- normalisation --- */

/* Batch norm over x[N,C,S] (S = H*W, or 1): y = (x - mean_c) / sqrt(var_c + eps) * gamma_c +
   beta_c.
   training: mean and (biased) variance are the batch's, and running = (1-momentum)*running +
   momentum*batch
     (unbiased variance), as in PyTorch; those of a channel that would become inf or NaN stay.
   evaluation (training == 0): the running ones. Mean and 1/sqrt(var_c + eps) go to save_mean[C] and
   save_invstd[C]. */
typedef struct amp_batch_norm_shape {
    int   n, channels, spatial;  /* each >= 1; n*spatial >= 2 in training, unless frozen */
    float eps;                   /* 0 = 1e-5; > 0 */
    float momentum;              /* 0 = 0.1; in (0,1], AMP_ZERO = leave the running statistics
                                    alone */
    int   frozen;                /* 1 = bn.eval() in PyTorch: forward always evaluates, backward is
                                    its gradient */
    unsigned char* held;         /* [channels] training sets those to 1 whose running statistics
                                    stay; NULL = none */
} amp_batch_norm_shape;

/* gamma[C], beta[C]; NULL: 1, 0. running_mean[C], running_var[C] may be NULL in training, save_* in
   evaluation. */
AMP_DEF amp_result amp_batch_norm_forward(const amp_batch_norm_shape* s, int training, amp_ref x,
    amp_ref gamma, amp_ref beta, float* running_mean, float* running_var, float* save_mean,
    float* save_invstd, amp_ref y, const amp_exec* exec);
/* save_*: as forward filled them. dx and dy may be the same. */
AMP_DEF amp_result amp_batch_norm_backward(const amp_batch_norm_shape* s, amp_ref dy, amp_ref x,
    amp_ref gamma, const float* save_mean, const float* save_invstd, amp_ref dx, amp_ref dgamma,
    amp_ref dbeta, int accumulate, const amp_exec* exec);

/* Layer norm over the rows of x[R,D], D >= 1. gamma[D], beta[D], or NULL (1 and 0); save_mean[R],
   save_invstd[R] for the backward pass, or NULL. eps: 0 = 1e-5; > 0. Backward computes both anew,
   with eps, where one is NULL. */
AMP_DEF amp_result amp_layer_norm_forward(amp_ref x, amp_ref gamma, amp_ref beta, float eps,
    float* save_mean, float* save_invstd, amp_ref y, size_t rows, size_t d, const amp_exec* exec);
AMP_DEF amp_result amp_layer_norm_backward(amp_ref dy, amp_ref x, amp_ref gamma, float eps,
        const float* save_mean, const float* save_invstd, amp_ref dx, amp_ref dgamma,
        amp_ref dbeta, int accumulate, size_t rows, size_t d, const amp_exec* exec);
/* Bytes of workspace that speed backward up on long rows: at most 256 KB, and as much for each
   thread. */
AMP_DEF size_t amp_layer_norm_workspace(size_t rows, size_t d);

/* RMS norm: y = x / sqrt(mean(x^2) + eps) * gamma (Zhang and Sennrich, 2019), so layer norm without
   mean and beta. eps: 0 = 1e-6. Arguments and workspace are as there; backward computes save_invstd
   anew where it is NULL. */
AMP_DEF amp_result amp_rms_norm_forward(amp_ref x, amp_ref gamma, float eps, float* save_invstd,
    amp_ref y, size_t rows, size_t d, const amp_exec* exec);
AMP_DEF amp_result amp_rms_norm_backward(amp_ref dy, amp_ref x, amp_ref gamma, float eps,
    const float* save_invstd, amp_ref dx, amp_ref dgamma, int accumulate, size_t rows, size_t d,
    const amp_exec* exec);

/* --- element by element --- */

/* Activations: X(NAME, name, reads, slow).
   reads: the `saved` of backward: y (OUTPUT) or x (INPUT).
   slow: 1 = f takes an exponential: a workspace speeds up many 16-bit elements of forward and, if
   it reads x, of backward.
   To add one: a row at the end and one of this NAME in AMP_OP_LIST; ampi_act_name and
   ampi_slope_name in impl-elementwise; the new hash in ampi_probes. */
#define AMP_ACTIVATION_LIST(X) \
    X(RELU,      relu,      OUTPUT, 0)  /* max(x, 0); NaN stays NaN */ \
    X(GELU,      gelu,      INPUT,  1)  /* x * Phi(x), the exact form (erf) */ \
    X(GELU_TANH, gelu_tanh, INPUT,  1)  /* 0.5*x*(1 + tanh(sqrt(2/pi)*(x + 0.044715*x^3))) */ \
    X(TANH,      tanh,      OUTPUT, 1) \
    X(SIGMOID,   sigmoid,   OUTPUT, 1)  /* 1 / (1 + exp(-x)) */ \
    X(SILU,      silu,      INPUT,  1)  /* x * sigmoid(x), also called swish */ \
    X(HARD_SWISH, hard_swish, INPUT, 0) /* x * min(max(x + 3, 0), 6) / 6 */
#define AMPI_X(NAME, ...) AMP_##NAME,
typedef AMPI_ENUM(amp_activation) { AMP_ACTIVATION_LIST(AMPI_X) } amp_activation;
#undef AMPI_X
enum { AMP_ACTIVATION_COUNT = 0 AMP_ACTIVATION_LIST(AMPI_COUNT) };

/* Bytes of that workspace. */
enum { AMP_ACTIVATION_WORKSPACE = 65536 * 4 + 64 };

/* y = f(x), n elements; x and y may be the same. */
AMP_DEF amp_result amp_activation_forward(amp_activation f, amp_ref x, amp_ref y, size_t n,
    const amp_exec* exec);
/* dx = dy * f'. `saved` is what the list says. dx and dy may be the same, unless dx is added to. */
AMP_DEF amp_result amp_activation_backward(amp_activation f, amp_ref dy, amp_ref saved,
    amp_ref dx, int accumulate, size_t n, const amp_exec* exec);

/* y = x where x > 0, else slope * x; slope is finite and >= 0. x and y may be the same. */
AMP_DEF amp_result amp_leaky_relu_forward(amp_ref x, amp_ref y, size_t n, float slope,
    const amp_exec* exec);
/* dx = dy where `saved`, x or y, is > 0, else slope * dy. dx and dy may be the same, unless dx is
   added to. */
AMP_DEF amp_result amp_leaky_relu_backward(amp_ref dy, amp_ref saved, amp_ref dx, int accumulate,
    size_t n, float slope, const amp_exec* exec);

/* Softmax of the rows of x[R,D]; a row of -inf only gives NaN, as in PyTorch. x and y may be the
   same. */
AMP_DEF amp_result amp_softmax_forward(amp_ref x, amp_ref y, size_t rows, size_t d,
    const amp_exec* exec);
/* dx = y * (dy - sum(dy*y)). */
AMP_DEF amp_result amp_softmax_backward(amp_ref dy, amp_ref y, amp_ref dx, int accumulate,
        size_t rows, size_t d, const amp_exec* exec);

/* Dropout with probability p in [0,1): y = 0 where amp_random_uniform(seed, offset + i) < p, else
   x/(1-p). Backward is the same call on the gradient. x and y may be the same. */
AMP_DEF amp_result amp_dropout_forward(amp_ref x, amp_ref y, size_t n, float p, uint64_t seed,
    uint64_t offset, const amp_exec* exec);

/* y = a + b, n elements; y may be the same as a or b. */
AMP_DEF amp_result amp_add_forward(amp_ref a, amp_ref b, amp_ref y, size_t n, const amp_exec* exec);

/* y[i] = a[i] * b[i / repeat], n elements, a multiple of repeat >= 1: with repeat 1 element by
   element, with H*W by one value a channel and sample. y may be the same as a, or with repeat 1 as
   b. */
AMP_DEF amp_result amp_mul_forward(amp_ref a, amp_ref b, amp_ref y, size_t n, size_t repeat,
    const amp_exec* exec);
/* da = dy * b; an element of db is the sum of its dy * a. */
AMP_DEF amp_result amp_mul_backward(amp_ref dy, amp_ref a, amp_ref b, amp_ref da, amp_ref db,
    int accumulate, size_t n, size_t repeat, const amp_exec* exec);

/* Copies x[R,D] into columns [column, column+D) of y[R,D_total], converting: one call per part.
   Backward copies the columns back, or adds them to x if accumulate. */
AMP_DEF amp_result amp_concat_forward(amp_ref x, size_t d, amp_ref y, size_t d_total,
    size_t column, size_t rows, const amp_exec* exec);
AMP_DEF amp_result amp_concat_backward(amp_ref y, size_t d_total, size_t column, amp_ref x,
    size_t d, size_t rows, int accumulate, const amp_exec* exec);

/* Row i of y[N,D] is row tokens[i] of w[V,D], converted. A token outside of 0..V-1 is
   AMP_ERR_ARGUMENT. */
AMP_DEF amp_result amp_embedding_forward(const int32_t* tokens, amp_ref w, amp_ref y, size_t n,
    size_t vocabulary, size_t d, const amp_exec* exec);
/* A row of dw[V,D] is the sum of the rows of dy[N,D] with its token, in ascending order. */
AMP_DEF amp_result amp_embedding_backward(amp_ref dy, const int32_t* tokens, amp_ref dw,
    int accumulate, size_t n, size_t vocabulary, size_t d, const amp_exec* exec);

/* --- attention --- */

/* Attention, head by head: y = softmax(scale * q * k^T) * v, D = head_size. A position is a row:
   q and y[B,queries,heads*D], k and v[B,keys,kv_heads*D]. heads / kv_heads neighbouring heads of q
   share one of k and v. */
typedef struct amp_attention_shape {
    size_t batch;               /* B, sequences */
    size_t queries, keys;       /* positions of q, and of k and v; each >= 1; keys: 0 = queries */
    size_t heads, kv_heads;     /* heads >= 1; kv_heads: 0 = heads; divides heads */
    size_t head_size;           /* >= 1 */
    size_t ldq, ldk, ldv, ldy;  /* elements from a position to the next; 0 = packed. In rows [q|k|v]
                                   the first three are (heads + 2*kv_heads) * D. Gradients lie as
                                   their operands do */
    size_t key_stride;          /* positions from a sequence's k, v to the next one's; 0 = keys.
                                   More: a cache with room */
    int    causal;              /* 1 = query i sees keys up to number i + keys - queries */
    size_t window;              /* if causal: only the last `window` of these; 0 = all */
    float  scale;               /* finite; 0 = 1 / sqrt(D) */
    const int32_t* lengths;     /* [B], each in 0..keys, where q lies: keys from there on are
                                   neither seen nor read; NULL = keys */
} amp_attention_shape;

/* Bytes of workspace with which the two calls below run several times as fast: for each thread 1 MB
   and, for backward, as much as q of one kv head in FP32. 0 if the shape is not valid. */
AMP_DEF size_t amp_attention_workspace(const amp_attention_shape* s);
/* lse[B,heads,queries], the log of the sum of e^score, serves backward; NULL = not wanted. A query
   that sees no key: y = 0, lse = -inf, no gradient. Scores, softmax and sums are FP32. Weights are
   rounded to the type of v before their product with it (as are those of dv), gradients of scores
   to that of q. Memory is O(queries + keys). inf and NaN of keys and values reach the queries that
   see them, and may reach up to 63 neighbours of these. */
AMP_DEF amp_result amp_attention_forward(const amp_attention_shape* s, amp_ref q, amp_ref k,
    amp_ref v, amp_ref y, float* lse, const amp_exec* exec);
/* y and lse: as forward wrote them. AMP_ACCUMULATE_INPUT adds to dq, dk and dv. */
AMP_DEF amp_result amp_attention_backward(const amp_attention_shape* s, amp_ref dy, amp_ref q,
    amp_ref k, amp_ref v, amp_ref y, const float* lse, amp_ref dq, amp_ref dk, amp_ref dv,
    int accumulate, const amp_exec* exec);

/* Rotary position embedding (Su et al. 2021): element pair i of a head at position t is turned by
   the angle (offset + t) * theta^(-2i/head_size), exact to 1e-7 at any position. */
typedef struct amp_rope_shape {
    size_t batch, positions;  /* x and y[batch,positions,width] */
    size_t heads, head_size;  /* a row's first heads are turned; head_size is even, at most 1024 */
    size_t width;             /* elements of a row; 0 = heads * head_size. Those behind the heads
                                 are copied: with rows [q|k|v], heads are those of q and k */
    float  theta;             /* 0 = 10000; >= 1 */
    int    interleaved;       /* pairs: 0 = i and i + head_size/2 (GPT-NeoX, Hugging Face);
                                 1 = 2i and 2i + 1 (Meta) */
    size_t offset;            /* position of the first row of each sequence */
} amp_rope_shape;

/* x and y may be the same. */
AMP_DEF amp_result amp_rope_forward(const amp_rope_shape* s, amp_ref x, amp_ref y,
    const amp_exec* exec);
/* dx and dy may be the same, unless dx is added to. */
AMP_DEF amp_result amp_rope_backward(const amp_rope_shape* s, amp_ref dy, amp_ref dx,
    int accumulate, const amp_exec* exec);

/* --- losses, in FP32 --- */

/* Each forward writes the mean loss of the batch to *loss; n = 0 is AMP_ERR_SHAPE. Each backward
   writes the gradient of (*loss_scale) * weight * loss, weight finite; NULL = 1; on a GPU the scale
   lies on the device. With a scaler of your own: `float s = amp_scaler_scale_loss(&scaler, 1.0f);`
   and pass &s: not 1/n, which the mean has divided by. */

typedef struct amp_cross_entropy_desc {
    float smoothing;         /* in [0,1): a target is (1-smoothing) on the label plus smoothing/K
                                everywhere */
    size_t ld;               /* elements from a row of x to the next, and of dx; 0 = K. What lies
                                between rows is left alone */
    const int32_t* ignored;  /* NULL, or a label whose rows have no loss and a gradient of 0. The
                                mean is over the others; it is 0 where there are none (PyTorch's
                                is NaN) */
    const float* class_weights;  /* [K], each finite and >= 0, where x lies; NULL = 1. Terms of a
                                    class are multiplied by its weight; the mean divides by the sum
                                    of the labels' weights, as in PyTorch */
    size_t pixels;           /* of maps x[N/pixels,K,pixels], in which a pixel is a row and has a
                                label: N is a multiple of pixels, ld is 0. 0 = 1: rows x[N,K] */
} amp_cross_entropy_desc;
/* Softmax cross-entropy of logits x[N,K] with labels[N] in 0..K-1, else AMP_ERR_ARGUMENT. desc may
   be NULL, all defaults. */
AMP_DEF amp_result amp_softmax_cross_entropy_forward(amp_ref x, const int32_t* labels,
    const amp_cross_entropy_desc* desc, float* loss, size_t n, size_t classes,
    const amp_exec* exec);
AMP_DEF amp_result amp_softmax_cross_entropy_backward(amp_ref x, const int32_t* labels,
    const amp_cross_entropy_desc* desc, const float* loss_scale, float weight, amp_ref dx,
    size_t n, size_t classes, const amp_exec* exec);
/* Mean squared error over n elements: mean((x - target)^2). */
AMP_DEF amp_result amp_mse_forward(amp_ref x, amp_ref target, float* loss, size_t n,
    const amp_exec* exec);
AMP_DEF amp_result amp_mse_backward(amp_ref x, amp_ref target, const float* loss_scale,
    float weight, amp_ref dx, size_t n, const amp_exec* exec);
/* Binary cross-entropy of logits x with targets in [0,1]: mean(max(x,0) - x*t + log(1 +
   exp(-|x|))). */
AMP_DEF amp_result amp_bce_with_logits_forward(amp_ref x, amp_ref target, float* loss, size_t n,
    const amp_exec* exec);
AMP_DEF amp_result amp_bce_with_logits_backward(amp_ref x, amp_ref target,
    const float* loss_scale, float weight, amp_ref dx, size_t n, const amp_exec* exec);

/* >>policy   Autocast: which operator runs in which type. */

/* The operators of a model: X(NAME, "name", O1, O2, kind, reads, shares).
   O1, O2: the rule at these levels in PyTorch's style. At O0 all are FP32, at O3 all but the losses
   LOW.
   kind: MATRIX and NORM have parameters, LOSS is FP32 always, DATA has no arithmetic.
   reads: what backward reads of the forward pass: all inputs, its output, or both.
   shares: the output may take the input's memory, and the input's gradient the output's (BOTH, or
   GRAD alone).
   To add an operator:
     1. a row at the end of this list: append only, as numbers stand in checkpoints
     2. its two functions on raw pointers in >>ops, and their entries in amp_backend
     3. its cases in the forward and the backward switch of impl-train, which -Wswitch names
     4. the call that builds it, in >>model
     5. its rule in other styles, in AMP_STYLE_RULES, where that differs
     6. kernels and table entries in amp_cuda.cuh
     7. tests: test_ops.c, layer_with_op in test_model.c, the lists of test_policy.c,
        emu/test_cuda_nn.cpp
   For an activation, a row of AMP_ACTIVATION_LIST stands for 2, 3, 4 and 6. */
#define AMP_OP_LIST(X) \
    X(INPUT,      "input",      FOLLOW,  FOLLOW,  DATA,   NONE,   NONE) \
    X(CONV2D,     "conv2d",     LOW,     LOW,     MATRIX, INPUT,  NONE) \
    X(LINEAR,     "linear",     LOW,     LOW,     MATRIX, INPUT,  NONE) \
    X(MAX_POOL2D, "max_pool2d", FOLLOW,  LOW,     PLAIN,  INPUT,  NONE) \
    X(AVG_POOL2D, "avg_pool2d", FOLLOW,  LOW,     PLAIN,  NONE,   NONE) \
    X(BATCH_NORM, "batch_norm", FOLLOW,  FP32,    NORM,   INPUT,  GRAD) \
    X(LAYER_NORM, "layer_norm", FP32,    FP32,    NORM,   INPUT,  NONE) \
    X(RELU,       "relu",       FOLLOW,  LOW,     PLAIN,  OUTPUT, BOTH) \
    X(GELU,       "gelu",       FOLLOW,  LOW,     PLAIN,  INPUT,  GRAD) \
    X(TANH,       "tanh",       FOLLOW,  LOW,     PLAIN,  OUTPUT, BOTH) \
    X(SIGMOID,    "sigmoid",    FOLLOW,  LOW,     PLAIN,  OUTPUT, BOTH) \
    X(SOFTMAX,    "softmax",    FP32,    LOW,     PLAIN,  OUTPUT, NONE) \
    X(DROPOUT,    "dropout",    FOLLOW,  LOW,     PLAIN,  NONE,   BOTH) \
    X(ADD,        "add",        PROMOTE, LOW,     PLAIN,  NONE,   NONE) \
    X(CONCAT,     "concat",     PROMOTE, LOW,     PLAIN,  NONE,   NONE) \
    X(FLATTEN,    "flatten",    FOLLOW,  FOLLOW,  DATA,   NONE,   NONE) \
    X(SOFTMAX_CROSS_ENTROPY, "softmax_cross_entropy", FP32, FP32, LOSS, INPUT, NONE) \
    X(MSE,        "mse",        FP32,    FP32,    LOSS,   INPUT,  NONE) \
    X(BCE_WITH_LOGITS, "bce_with_logits", FP32, FP32, LOSS, INPUT, NONE) \
    X(GELU_TANH,  "gelu_tanh",  FOLLOW,  LOW,     PLAIN,  INPUT,  GRAD) \
    X(SILU,       "silu",       FOLLOW,  LOW,     PLAIN,  INPUT,  GRAD) \
    X(HARD_SWISH, "hard_swish", FOLLOW,  LOW,     PLAIN,  INPUT,  GRAD) \
    X(LEAKY_RELU, "leaky_relu", FOLLOW,  LOW,     PLAIN,  OUTPUT, BOTH) \
    X(MUL,        "mul",        PROMOTE, LOW,     PLAIN,  INPUT,  NONE) \
    X(UPSAMPLE,   "upsample",   FOLLOW,  LOW,     PLAIN,  NONE,   NONE) \
    X(CUSTOM,     "custom",     FP32,    FP32,    PLAIN,  BOTH,   NONE)  /* rules: its desc's */ \
    X(MEAN,       "mean",       FP32,    FP32,    LOSS,   INPUT,  NONE) \
    X(CONV_TRANSPOSE2D, "conv_transpose2d", LOW, LOW, MATRIX, INPUT, NONE) \
    X(RMS_NORM,   "rms_norm",   FP32,    FP32,    NORM,   INPUT,  NONE) \
    X(EMBEDDING,  "embedding",  FP32,    LOW,     MATRIX, INPUT,  NONE)  /* its weight's type */ \
    X(POSITION_EMBEDDING, "position_embedding", FP32, LOW, MATRIX, NONE, BOTH)  /* likewise */
#define AMPI_X(name, ...) AMP_OP_##name,
typedef AMPI_ENUM(amp_op) { AMP_OP_LIST(AMPI_X) } amp_op;
#undef AMPI_X
enum { AMP_OP_COUNT = 0 AMP_OP_LIST(AMPI_COUNT) };

typedef AMPI_ENUM(amp_rule) {
    AMP_RULE_LOW = 0,      /* operands in the 16-bit type */
    AMP_RULE_FP32 = 1,     /* operands and result in FP32 */
    AMP_RULE_PROMOTE = 2,  /* the widest type among the inputs */
    AMP_RULE_FOLLOW = 3,   /* the type of the first input */
    AMP_RULE_GRAY = 4,     /* LOW on a path of GRAY or FOLLOW from a 16-bit input to LOW or a
                              graph's end; else FP32 */
} amp_rule;

typedef AMPI_ENUM(amp_level) { AMP_O0 = 0, AMP_O1 = 1, AMP_O2 = 2, AMP_O3 = 3 } amp_level;

/* Whose lists a policy has:
   X(NAME, "name", a bit for each level, cast_back, o3_masters, low_norm, scaler at O1, at O2).
   cast_back: at O1 results of LOW operators are cast back to FP32. o3_masters: O3 keeps FP32
   weights, too. low_norm: a norm that runs LOW reads LOW weights; batch norms never do while
   there are masters. scaler: the preset where the desc has none; STATIC is a scale of 1.
   Sources: torch.amp, whose lists are those for CUDA (on a CPU its softmax, layer norm and sums
   stay in 16 bits); MindSpore 2.10; the final apex.amp; NNabla 1.39 with type_config="half";
   OneFlow's graph pass, where a bias is added by a GRAY operator: a last layer's bias and its
   logits are FP32. */
#define AMP_STYLE_LIST(X) \
    X(PYTORCH,   "pytorch",   0xfu, 0, 0, 0, PYTORCH, PYTORCH) \
    X(MINDSPORE, "mindspore", 0xfu, 1, 1, 0, STATIC,  MINDSPORE_MANAGER) \
    X(APEX,      "apex",      0xfu, 0, 0, 1, APEX,    APEX) \
    X(NNABLA,    "nnabla",    0x5u, 0, 0, 0, NNABLA,  NNABLA)  /* O0 and O2 */ \
    X(ONEFLOW,   "oneflow",   0x3u, 0, 0, 1, STATIC,  STATIC)  /* O0, O1; or your .scaler */
#define AMPI_X(name, ...) AMP_STYLE_##name,
typedef AMPI_ENUM(amp_style) { AMP_STYLE_LIST(AMPI_X) } amp_style;
#undef AMPI_X
enum { AMP_STYLE_COUNT = 0 AMP_STYLE_LIST(AMPI_COUNT) };

/* Where a style differs from AMP_OP_LIST: X(STYLE, level, OPERATOR, RULE). A norm's statistics are
   FP32 in every rule. OneFlow lists the losses, too; here they are FP32. */
#define AMP_STYLE_RULES(X) \
    X(MINDSPORE, O1, RELU, LOW) \
    X(MINDSPORE, O2, RMS_NORM, LOW) \
    X(APEX, O1, GELU, FP32) \
    X(APEX, O1, GELU_TANH, FP32) \
    X(APEX, O1, UPSAMPLE, FP32) \
    X(APEX, O2, LAYER_NORM, LOW) \
    X(APEX, O2, RMS_NORM, LOW) \
    X(NNABLA, O2, SOFTMAX, FP32) \
    X(NNABLA, O2, BATCH_NORM, LOW) \
    X(NNABLA, O2, LAYER_NORM, LOW) \
    X(NNABLA, O2, RMS_NORM, LOW) \
    X(ONEFLOW, O1, CONV_TRANSPOSE2D, FP32) \
    X(ONEFLOW, O1, AVG_POOL2D, GRAY) \
    X(ONEFLOW, O1, BATCH_NORM, GRAY) \
    X(ONEFLOW, O1, LAYER_NORM, GRAY) \
    X(ONEFLOW, O1, RMS_NORM, GRAY) \
    X(ONEFLOW, O1, GELU, GRAY) \
    X(ONEFLOW, O1, GELU_TANH, GRAY) \
    X(ONEFLOW, O1, SILU, GRAY) \
    X(ONEFLOW, O1, HARD_SWISH, FP32) \
    X(ONEFLOW, O1, LEAKY_RELU, FP32) \
    X(ONEFLOW, O1, TANH, GRAY) \
    X(ONEFLOW, O1, SIGMOID, GRAY) \
    X(ONEFLOW, O1, SOFTMAX, GRAY) \
    X(ONEFLOW, O1, DROPOUT, GRAY) \
    X(ONEFLOW, O1, ADD, GRAY) \
    X(ONEFLOW, O1, MUL, GRAY) \
    X(ONEFLOW, O1, CONCAT, FOLLOW) \
    X(ONEFLOW, O1, POSITION_EMBEDDING, GRAY)

/* AMP_ZERO in the int fields means "no" where the level would say "yes". */
typedef struct amp_policy_desc {
    amp_level level;          /* 0 = O0, plain FP32 */
    amp_dtype low_dtype;      /* 0 = AMP_F16; or AMP_BF16 */
    amp_style style;          /* 0 = AMP_STYLE_PYTORCH */
    const amp_op* white;      /* operators to run LOW besides the level's; copied */
    int white_count;
    const amp_op* black;      /* operators to run in FP32; give one list or the other */
    int black_count;
    int keep_batchnorm_fp32;  /* 0 = the level's (O2 yes, O3 no); 1, AMP_ZERO: O2 and O3 only, as in
                                 Apex */
    int master_weights;       /* 0 = the level's (O3 no, but for MindSpore; else yes); 1, AMP_ZERO:
                                 as above */
    const amp_logger* logger;
} amp_policy_desc;

/* Who decided the type of an operator or a node. */
typedef AMPI_ENUM(amp_reason) {
    AMP_REASON_LEVEL = 0,    /* the level's list */
    AMP_REASON_WHITE = 1,    /* the user's white list */
    AMP_REASON_BLACK = 2,    /* the user's black list */
    AMP_REASON_RULE = 3,     /* amp_policy_set_rule */
    AMP_REASON_KEEP_BN = 4,  /* keep_batchnorm_fp32 */
    AMP_REASON_REGION = 5,   /* amp_autocast_push */
    AMP_REASON_PIN = 6,      /* amp_pin */
} amp_reason;

/* A policy: plain data, to be copied and edited. */
typedef struct amp_policy {
    amp_level  level;
    amp_dtype  low_dtype;
    amp_style  style;
    int        cast_back;       /* 1 = results of LOW operators are cast back to FP32 */
    int        master_weights;  /* 0 = parameters of LOW operators exist in 16 bits only */
    amp_rule   rules[AMP_OP_COUNT];
    amp_reason reasons[AMP_OP_COUNT];
} amp_policy;

/* AMP_ERR_POLICY: an unknown level or operator, both lists at once, a loss on the white list; a
   level that the style lacks, an override that the level lacks. */
AMP_DEF amp_result amp_policy_init(amp_policy* p, const amp_policy_desc* desc);
/* Replaces one rule. AMP_ERR_POLICY: an unknown operator or rule, a loss that is not FP32, input or
   flatten. */
AMP_DEF amp_result amp_policy_set_rule(amp_policy* p, amp_op op, amp_rule rule);
/* Copies the operators whose rule is LOW (white) or FP32 (black) to out[0..capacity), or NULL;
   returns how many. */
AMP_DEF int amp_policy_white_list(const amp_policy* p, amp_op* out, int capacity);
AMP_DEF int amp_policy_black_list(const amp_policy* p, amp_op* out, int capacity);
/* 1 and *op, or 0 if no operator has this name. */
AMP_DEF int amp_op_from_name(const char* name, amp_op* op);
/* "conv2d"; "LOW"; "O1"; "mindspore"; "level list", "white list", "pinned", ...; "?" if out of
   range. */
AMP_DEF const char* amp_op_name(amp_op op);
AMP_DEF const char* amp_rule_name(amp_rule rule);
AMP_DEF const char* amp_level_name(amp_level level);
AMP_DEF const char* amp_style_name(amp_style style);
AMP_DEF const char* amp_reason_name(amp_reason reason);

/* >>scaler   The loss scale. */

/* One state machine follows the systems below step by step: scale s, tracker c of clean steps,
   hysteresis left h.
     overflow step: c = start; h -= 1; if h <= 0, and the share of overflows is not below the
     tolerance:
                    s = max(s * backoff, min).
     clean step:    c += 1; if c >= interval: s = s * growth, c = 0.
     unsound step:  the forward pass gave inf or NaN, which no scale mends: skipped, s, c, h stay */

/* What growth beyond the largest float does. A max_scale holds under each. */
typedef AMPI_ENUM(amp_scaler_guard) {
    AMP_GUARD_KEEP  = 1,  /* s stays */
    AMP_GUARD_CLAMP = 2,  /* s becomes max_scale, else the largest float */
    AMP_GUARD_NONE  = 3,  /* s becomes infinite: every step is skipped then, as update says */
} amp_scaler_guard;

/* When the hysteresis is refilled, besides at growth. */
typedef AMPI_ENUM(amp_scaler_refill) {
    AMP_REFILL_GROWTH  = 1,  /* then alone (Megatron-LM, DeepSpeed) */
    AMP_REFILL_CLEAN   = 2,  /* on every clean step (DeepSpeed consecutive_hysteresis) */
    AMP_REFILL_EVERY_H = 3,  /* on every clean step and after each reduction (Paddle
                                decr_every_n) */
    AMP_REFILL_REDUCTION = 4,  /* after each reduction, and not at growth (Fairseq) */
} amp_scaler_refill;

/* What an overflow with the scale at its floor does; KEEP: one that would bring it there. */
typedef AMPI_ENUM(amp_scaler_limit) {
    AMP_LIMIT_DEFAULT  = 0,  /* the preset's */
    AMP_LIMIT_CLAMP    = 1,  /* the step is skipped, the scale stays */
    AMP_LIMIT_ERROR    = 2,  /* amp_scaler_update returns AMP_ERR_OVERFLOW */
    AMP_LIMIT_CALLBACK = 3,  /* on_limit decides */
    AMP_LIMIT_KEEP     = 4,  /* the scale stays above its floor; AMP_ERR_OVERFLOW (Fairseq) */
} amp_scaler_limit;

/* Presets, with each system's own values. Sources: torch.amp.GradScaler; mindspore.amp
   DynamicLossScaler, DynamicLossScaleManager, FixedLossScaleManager; apex.amp;
   oneflow.amp.GradScaler; keras LossScaleOptimizer; flax DynamicScale; nnabla
   DynamicLossScalingUpdater; Megatron-LM; DeepSpeed v0.17.1, and up to v0.17.0; paddle's AmpScaler
   and update_loss_scaling (GradScaler in dynamic graphs: growth_interval 2000, min_scale AMP_ZERO);
   jmp; TensorFlow 1; mindspore.nn.DynamicLossScaleUpdateCell, which is the manager in FP32;
   fairseq.optim's DynamicLossScaler (.tolerance; threshold_loss_scale is min_scale with
   AMP_LIMIT_CLAMP).
   X(NAME, text, kind, init, interval, late, start, backoff, min, max, guard, hysteresis, refill,
     at_min, skips)
     kind      factors are floats (FLOAT), doubles (MIXED), or with the scale doubles (DOUBLE: its
               float scales the loss). _DIV: an overflow divides by growth instead of multiplying
     init      0: must be given
     interval  0: the scale never moves
     late      clean steps added to the interval
     start     the tracker at first and after overflows
     backoff   0: 1/growth; growth is 2
     min, max  0: none
     skips     overflows allowed in a row, 0 = any number */
#define AMPI_FLT_MIN 1.17549435082228751e-38f
#define AMPI_FLT_MAX 3.40282346638528860e38f
#define AMP_SCALER_PRESET_LIST(X) \
    X(PYTORCH, "pytorch", MIXED, 65536, 2000, 0, 0, 0.5f, 0, 0, KEEP, 1, GROWTH, CLAMP, 0) \
    X(MINDSPORE, "mindspore", FLOAT_DIV, 0, 2000, 0, 0, 0, 1, 0, KEEP, 1, GROWTH, CLAMP, 0) \
    X(MINDSPORE_MANAGER, "mindspore_manager", DOUBLE, 16777216, 2000, 0, 0, 0, 1, 0, NONE, 1, \
        GROWTH, CLAMP, 1000) \
    X(MINDSPORE_FIXED, "mindspore_fixed", FLOAT, 128, 0, 0, 0, 0, 0, 0, KEEP, 1, GROWTH, CLAMP, 0) \
    X(APEX, "apex", DOUBLE_DIV, 65536, 2000, 0, 0, 0, 0, 16777216, CLAMP, 1, GROWTH, CLAMP, 0) \
    X(ONEFLOW, "oneflow", FLOAT_DIV, 65536, 2000, 0, 0, 0, 1, AMPI_FLT_MAX, CLAMP, 1, GROWTH, \
        CLAMP, 0) \
    X(KERAS, "keras", FLOAT, 32768, 2000, 0, 0, 0, 0, 0, NONE, 1, GROWTH, CLAMP, 0) \
    X(FLAX, "flax", FLOAT, 65536, 2000, 1, 0, 0.5f, AMPI_FLT_MIN, AMPI_FLT_MAX, CLAMP, 1, GROWTH, \
        CLAMP, 0) \
    X(NNABLA, "nnabla", DOUBLE_DIV, 8, 2000, 1, -1, 0, 0, 0, NONE, 1, GROWTH, CLAMP, 100) \
    X(MEGATRON, "megatron", FLOAT, 4294967296.0f, 1000, 0, 0, 0.5f, 1, 0, NONE, 2, GROWTH, CLAMP, \
        0) \
    X(DEEPSPEED, "deepspeed", DOUBLE_DIV, 65536, 1000, 0, -1, 0, 1, 0, NONE, 2, GROWTH, ERROR, 0) \
    X(DEEPSPEED_CONSECUTIVE, "deepspeed_consecutive", DOUBLE_DIV, \
        65536, 1000, 0, -1, 0, 1, 0, NONE, 2, CLEAN, ERROR, 0) \
    X(DEEPSPEED_0_17_0, "deepspeed_0_17_0", DOUBLE_DIV, 65536, 1000, 0, 0, 0, 1, 0, NONE, 2, \
        GROWTH, ERROR, 0) \
    X(PADDLE, "paddle", FLOAT, 65536, 1000, 0, 0, 0.5f, 1, 0, KEEP, 1, EVERY_H, CLAMP, 0) \
    X(JMP, "jmp", FLOAT_DIV, 0, 2000, 0, 0, 0, 1, 0, KEEP, 1, GROWTH, CLAMP, 0) \
    X(TF_LEGACY, "tf_legacy", FLOAT_DIV, 0, 2000, 0, 0, 0, 1, 0, KEEP, 1, GROWTH, CLAMP, 0) \
    X(STATIC, "static", FLOAT, 0, 0, 0, 0, 0, 0, 0, KEEP, 1, GROWTH, CLAMP, 0) \
    X(MINDSPORE_CELL, "mindspore_cell", FLOAT, 16777216, 2000, 0, 0, 0, 1, 0, NONE, 1, GROWTH, \
        CLAMP, 0) \
    X(FAIRSEQ, "fairseq", DOUBLE_DIV, 32768, 2000, 0, 0, 0, 1e-4f, 0, NONE, 1, REDUCTION, KEEP, 0)
#define AMPI_X(name, ...) AMP_SCALER_##name,
typedef AMPI_ENUM(amp_scaler_preset) { AMP_SCALER_PRESET_LIST(AMPI_X) } amp_scaler_preset;
#undef AMPI_X
enum { AMP_SCALER_PRESET_COUNT = 0 AMP_SCALER_PRESET_LIST(AMPI_COUNT) };

/* "pytorch", "mindspore_manager", ...; "?" for another value. */
AMP_DEF const char* amp_scaler_preset_name(amp_scaler_preset p);

typedef struct amp_scaler amp_scaler;

/* A field that is not 0 replaces the preset's value. Static presets take no growth_*,
   backoff_factor, hysteresis, refill and tolerance. */
typedef struct amp_scaler_desc {
    amp_scaler_preset preset;  /* 0 = AMP_SCALER_PYTORCH */
    float init_scale;          /* finite, > 2^-128, so that 1/scale is finite */
    double growth_factor;      /* finite, > 1 */
    double backoff_factor;     /* in (0,1); where the preset has none 0 = 1/growth_factor, OneFlow's
                                  only value */
    /* Clean steps before growth, >= 1; AMP_ZERO = never. Flax and NNabla add one: AMP_ZERO = every
       step. */
    int   growth_interval;
    float min_scale;           /* floor, <= init_scale; AMP_ZERO = none */
    float max_scale;           /* ceiling, >= init_scale (Apex starts at the lesser); AMP_ZERO =
                                  none */
    int   hysteresis;          /* overflows before the scale is reduced; >= 1 */
    amp_scaler_refill refill;  /* 0 = the preset's */
    /* With AMP_REFILL_REDUCTION: an overflow reduces the scale only if overflows since the last
       reduction, divided by windows since the scale last moved, are at least this; in 0..1,
       Fairseq's 0 = each does. Not saved. */
    double tolerance;
    amp_scaler_limit at_min;   /* an overflow with the scale at its floor; with min_scale AMP_ZERO:
                                  at 0 */
    int   max_skips;           /* overflows in a row before AMP_ERR_OVERFLOW; AMP_ZERO = any
                                  number */
    int   max_unsound;         /* likewise of unsound windows; 0 = 20. Not saved */
    /* Static presets: 1 = overflows count, but skip no step (MindSpore's
       drop_overflow_update=false). */
    int   ignore_overflow;
    /* For AMP_LIMIT_CALLBACK, after the window: may set the scale; 0 = go on, else update returns
       AMP_ERR_OVERFLOW. */
    int (*on_limit)(const amp_scaler* s, void* user_data);
    void* user_data;
    const amp_logger* logger;  /* copied */
} amp_scaler_desc;

/* What a window's checks have found. */
typedef struct amp_overflow_info {
    int      found_inf;       /* 1 if any gradient was inf or NaN, or would be when unscaled */
    int      unsound;         /* 1 if the forward pass was to blame */
    uint64_t inf_count;       /* elements that are +-inf, or would be when unscaled */
    uint64_t nan_count;
    int      first_tensor;    /* index in the list of the first check that found one; -1 if none */
    uint64_t first_index;     /* element in that tensor */
    char     first_name[48];  /* its name, cut to fit; "" if it has none */
    int      last_tensor;     /* likewise the last: where infinities began, if the list is in
                                 forward order */
    char     last_name[48];
    double   norm;            /* L2 norm of the unscaled gradients of the last list checked; inf if
                                 not finite */
} amp_overflow_info;

/* The state that moves: a plain struct, the same on host and GPU. */
typedef struct amp_scaler_state {
    float    scale;             /* the current loss scale */
    float    inverse;           /* (float)(1 / (double)scale_in_use) */
    float    scale_in_use;      /* the scale that multiplied this window's loss */
    int32_t  tracker;           /* clean steps in a row */
    int32_t  hysteresis_left;   /* below 0: further overflows, within the tolerance */
    int32_t  found_inf;         /* stays up until update */
    int32_t  consecutive_skips;
    int32_t  unsound;           /* likewise, raised with found_inf: the forward pass gave inf or
                                   NaN */
    int64_t  applied, skipped;  /* windows ended by update, by their outcome */
    double   exact_scale;       /* what scale was rounded from, of presets that keep a double; of
                                   others = scale */
    int32_t  consecutive_unsound;
    int32_t  since_rescale;     /* windows since the scale last moved, but for unsound ones */
} amp_scaler_state;

/* The machine's rule: the preset's values, or the desc's; you may write it between windows. */
typedef struct amp_scaler_rule {
    double growth, backoff;         /* backoff 0: an overflow divides by growth */
    double tolerance;               /* see amp_scaler_desc */
    float min, max;                 /* 0 = none */
    int32_t interval, start, hysteresis; /* interval 0 = never grow */
    int32_t guard, refill, at_min;  /* an amp_scaler_guard, _refill, _limit */
    int32_t max_skips, ignore_overflow, is_static;
    int32_t max_unsound;            /* max_skips, max_unsound: 0 = any number */
    int32_t is_double;              /* the scale is a double */
} amp_scaler_rule;

/* A list of gradients of this window. `done` is a sum of 1 checked, 2 unscaled, 4 stepped. */
#define AMP_SCALER_MAX_LISTS 64
#define AMP_SCALER_MAX_SPANS 512
typedef struct amp_scaler_list {
    uint64_t    key;   /* of the memory and types of its tensors, whatever their order */
    double      norm;  /* as found by the last check */
    uint32_t    done;
} amp_scaler_list;

/* A plain struct, which owns nothing and may be copied between windows. */
struct amp_scaler {
    amp_scaler_rule   rule;
    amp_scaler_state  state;
    amp_overflow_info info;    /* of the current window; of the last one after update */
    amp_logger        logger;
    int             (*on_limit)(const amp_scaler* s, void* user_data);
    void*             user_data;
    int               scaled;  /* 1 once this window's loss was scaled */
    int               recorded; /* 1 once it has a check, an unscale or a report */
    int               list_count, span_count;
    amp_scaler_list   lists[AMP_SCALER_MAX_LISTS];
    uint64_t          spans[AMP_SCALER_MAX_SPANS][2];  /* memory, from and to, of lists that were
                                                          unscaled or stepped */
    uint8_t           span_list[AMP_SCALER_MAX_SPANS];
};

/* Starts a scaler; NULL: PyTorch's. */
AMP_DEF amp_result amp_scaler_init(amp_scaler* s, const amp_scaler_desc* desc);

/* loss * scale in FP32; the scale stays until update. A loss of inf or NaN makes the window
   unsound. 1.0f gives the factor itself, to seed a backward pass by hand; call it with the loss,
   too. NaN if s is NULL or zeroed memory, where other calls are AMP_ERR_STATE. */
AMP_DEF float amp_scaler_scale_loss(amp_scaler* s, float loss);

/* The next three look at `count` tensors (F32, F16, BF16). Elements that are inf or NaN, or become
   so when unscaled to FP32 (check) or to the stored type, are counted and raise found_inf; s->info
   names the first. A scale without a finite inverse raises it, too. To let one overflow stop
   several optimizers, check all lists before the first step. `info`: what this call alone has
   found, and its norm.
   AMP_ERR_STATE: before any scale_loss, or for memory of a list that was unscaled or stepped in
   this window. But lists unscaled one by one may be checked or stepped as one, and stepped lists
   checked. Beyond AMP_SCALER_MAX_SPANS pieces of memory in a window, gaps between tensors count as
   theirs.
   One clip over several optimizers: check all gradients as one list, multiply them by
   min(1, clip / (info.norm + 1e-6)), and step each optimizer without a clip_norm. */
/* Reads only; repeated calls count elements again. amp_optimizer_step trusts the last: check again
   after a change. */
AMP_DEF amp_result amp_scaler_check(amp_scaler* s, const amp_tensor* grads, int count,
    amp_overflow_info* info);
/* g *= 1/scale in place, rounded to its tensor's type, once per window, before the step; at most
   AMP_SCALER_MAX_LISTS lists (AMP_ERR_STATE). No two tensors share memory. Gradients stay if any is
   not finite. */
AMP_DEF amp_result amp_scaler_unscale(amp_scaler* s, const amp_tensor* grads, int count,
    amp_overflow_info* info);
/* dst = src / scale, or dst += src / scale if accumulate (one fma in FP32, one rounding to dst's
   type); dst[i] and src[i] have equal counts, types may differ; no dst overlaps another or any src.
   May be repeated with new micro-batches in src; a src that was unscaled in place, or a dst that
   was stepped, is AMP_ERR_STATE. If any result is not finite dst stays. The norm is the
   results'. */
AMP_DEF amp_result amp_scaler_unscale_into(amp_scaler* s, const amp_tensor* dst,
    const amp_tensor* src, int count, int accumulate, amp_overflow_info* info);
/* Raises found_inf, e.g. after an all-reduce of flags; before scale_loss, too. */
AMP_DEF amp_result amp_scaler_report_overflow(amp_scaler* s);

/* 1 = all checks of this window were clean; 0 = skip this step, or s is NULL, or unchecked (logger:
   AMP_ERR_STATE). */
AMP_DEF int amp_scaler_may_step(const amp_scaler* s);

/* Ends the window: moves the scale by the rule, counts, and clears found_inf. AMP_ERR_STATE if
   nothing was recorded. AMP_ERR_OVERFLOW, after the window's end: at_min, max_skips, max_unsound,
   or a scale infinite or <= 2^-128, with which all steps are skipped until amp_scaler_set_scale. */
AMP_DEF amp_result amp_scaler_update(amp_scaler* s);

/* Sets the scale between windows (else AMP_ERR_STATE), finite and > 2^-128; the counters stay. */
AMP_DEF amp_result amp_scaler_set_scale(amp_scaler* s, float scale);

/* The rule alone, a pure function for host and device: reads and clears state->found_inf and
   unsound. Returns a sum: 1 an overflow at the floor; 2 more overflows in a row than allowed; 4
   more unsound windows; 8 a scale of no use (see amp_scaler_update). 0 if an argument is NULL. */
AMPI_HD AMP_DEF int amp_scaler_advance(const amp_scaler_rule* rule, amp_scaler_state* state);

/* State to and from AMP_SCALER_STATE_BYTES bytes, the same on each machine. AMP_ERR_STATE inside a
   window. Loading what save did not write, another size, or the state of another rule is
   AMP_ERR_FORMAT. */
#define AMP_SCALER_STATE_BYTES 128
AMP_DEF amp_result amp_scaler_save(const amp_scaler* s, void* bytes, size_t size);
AMP_DEF amp_result amp_scaler_load(amp_scaler* s, const void* bytes, size_t size);

/* >>optim    Optimizers on FP32 master weights; clip, unscale and half copy in the same pass. */

/* In FP32, with g = gradient / loss scale * clip coefficient and wd = weight_decay:
     SGD    g += wd*w (L2); buf = momentum*buf + (1-dampening)*g (first step: buf = g);
            w -= lr * (nesterov ? g + momentum*buf : momentum ? buf : g)
     ADAM   g += wd*w (L2); m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2;
            w -= lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)
     ADAMW  w -= lr*wd*w, then as ADAM without L2
     LAMB   u = mhat/(sqrt(vhat)+eps) + wd*w; w -= lr * |w|/|u| * u per tensor (1 if a norm is 0)
     RMSPROP  g += wd*w (L2); v = b2*v + (1-b2)*g^2; u = g / (sqrt(v)+eps), or g / sqrt(v+eps);
            with momentum m = momentum*m + u, u = m; w -= lr*u. It is never centered
   (Kingma & Ba 2015; Loshchilov & Hutter 2019; You et al. 2020; all but LAMB are torch.optim's.)
   A subnormal moment becomes zero. t counts from 1 the steps of a group that is not frozen, the
   schedule all steps. */
typedef AMPI_ENUM(amp_optimizer_kind) {
    AMP_SGD = 0, AMP_ADAM = 1, AMP_ADAMW = 2, AMP_LAMB = 3, AMP_RMSPROP = 4
} amp_optimizer_kind;

/* The rate's factor at applied step t = 0, 1, ...: (t+1)/(warmup_steps+1) for t < warmup_steps;
   afterwards, with t' = t - warmup_steps and T = total_steps - warmup_steps:
     CONSTANT 1;  STEP gamma^(t' / step_size);  LINEAR from 1 to floor over T;
     COSINE floor + (1-floor)*(1+cos(pi*t'/T))/2 */
typedef AMPI_ENUM(amp_schedule_kind) {
    AMP_SCHEDULE_CONSTANT = 0, AMP_SCHEDULE_STEP = 1, AMP_SCHEDULE_LINEAR = 2,
        AMP_SCHEDULE_COSINE = 3
} amp_schedule_kind;
typedef struct amp_schedule {
    amp_schedule_kind kind;  /* 0 = constant */
    int64_t warmup_steps;    /* 0 = none */
    int64_t total_steps;     /* LINEAR, COSINE: > warmup_steps; then the floor holds */
    int64_t step_size;       /* STEP: >= 1 */
    float   gamma;           /* STEP: 0 = 0.1; in (0,1] */
    float   floor;           /* LINEAR, COSINE: the last factor, in [0,1] */
} amp_schedule;
/* base_lr times the factor at step t (below 0 counts as 0). A NULL schedule is constant. */
AMPI_HD AMP_DEF float amp_schedule_lr(const amp_schedule* s, float base_lr, int64_t t);

/* Settings of one parameter group. */
typedef struct amp_param_group {
    float lr;            /* 0 = the desc's; AMP_ZERO = 0 */
    float weight_decay;  /* 0 = the desc's; AMP_ZERO = none */
    int   frozen;        /* 1 = weights and moments stay; gradients are NULL, or checked and in the
                            norm */
    /* NULL = the desc's kind and settings; else its kind to weight_decay, copied by init: an
       optimizer of the group's own, which skips with the others. The rest of it must be 0. */
    const struct amp_optimizer_desc* optimizer;
} amp_param_group;

typedef struct amp_optimizer_desc {
    amp_optimizer_kind kind;   /* 0 = SGD */
    float lr;                  /* 0 = 0.01 for SGD and RMSPROP, else 0.001; AMP_ZERO = 0 */
    float momentum;            /* SGD, RMSPROP: 0 = none; [0,1) */
    float dampening;           /* SGD: 0 = none; [0,1] */
    int   nesterov;            /* SGD: 1 needs momentum > 0 and no dampening */
    float beta1, beta2;        /* 0 = 0.9, 0.999; [0,1), AMP_ZERO = 0. RMSPROP: beta2 is
                                  torch.optim's alpha, kann's decay, 0 = 0.99 */
    float eps;                 /* 0 = 1e-8 (LAMB 1e-6); > 0 */
    int   eps_in_root;         /* RMSPROP: 1 = sqrt(v+eps), as in Keras and kann (eps 1e-6) */
    float weight_decay;        /* 0 = none, for ADAMW too (torch.optim: 0.01); >= 0 */
    float clip_norm;           /* 0 = off; > 0: g *= min(1, clip_norm / (norm + 1e-6)), norm over
                                  all parameters */
    int   maximize;            /* 1 = ascend: for gradients kept with inverted sign */
    int   unchecked;           /* 1 = no check for inf and NaN without a scaler: elements with one
                                  stay as they were */
    amp_schedule schedule;
    const amp_param_group* groups; /* copied, at most AMP_MAX_GROUPS; NULL = one with the desc's
                                      settings */
    int   group_count;
    const amp_logger* logger;  /* copied */
} amp_optimizer_desc;
#define AMP_MAX_GROUPS 16

/* One parameter tensor. All memory is the caller's. */
typedef struct amp_param {
    float*      master;      /* [count] FP32 weights; NULL = `low` itself is trained (O3), or with
                                `rest` */
    void*       low;         /* [count] 16-bit copy; NULL = none */
    amp_dtype   low_dtype;   /* AMP_F16 or AMP_BF16 if low is given */
    void*       grad;        /* [count]; times the loss scale, before and after a step */
    amp_dtype   grad_dtype;  /* 0 = AMP_F32 */
    void*       m;           /* [count] momentum or first moment, zeros at first; NULL if not
                                needed */
    void*       v;           /* [count] second moment; likewise */
    size_t      count;
    int         group;       /* index into desc.groups */
    const char* name;        /* for messages; may be NULL */
    amp_dtype   moment_dtype; /* of m and v: 0 = AMP_F32, as they are computed; BF16; of m without v
                                F16 too. Rounded to nearest, at most the largest finite value */
    uint16_t*   rest;        /* [count] the masters' lower 16 bits: see amp_master_split */
} amp_param;

/* Split masters, bit for bit those of FP32 at 4 bytes in place of 6: low is the upper half of n
   masters w, rounded to bfloat16 to nearest, ties away from zero; rest is their lower 16 bits, from
   0x8000 on less than 0. Nothing else differs in training, but that a weight which would pass the
   largest bfloat16 stays as it is. Splitting makes it the largest, and any NaN 0x7fc00000. With
   moments and gradients in BF16 too, a weight of Adam takes 10 bytes.
   BF16 has 8 bits: an m is off by up to 0.4 %, and v stands still while (1-beta2) * |g^2/v - 1| is
   below 2^-9 to 2^-8: beta2 of 0.99 or less suits it (the logger hears of one above 0.996). */
AMP_DEF void amp_master_split(void* low, uint16_t* rest, const float* w, size_t n);
AMP_DEF void amp_master_join(float* w, const void* low, const uint16_t* rest, size_t n);

/* How many of m and v an optimizer needs, of its groups the one with most: 0; 1, which is m (of
   RMSPROP without momentum v); 2; -1 if the desc or a group's setting is invalid. */
AMP_DEF int amp_optimizer_moments(const amp_optimizer_desc* desc);

/* The part that moves: a plain struct, equal on host and GPU. */
typedef struct amp_optimizer_state {
    int64_t step;  /* applied steps; a skipped step advances nothing */
    float   lr;    /* base rate; the schedule is applied on top of it */
    float   reserved;
    int64_t frozen_steps[AMP_MAX_GROUPS];  /* of them, those with the group frozen */
} amp_optimizer_state;

typedef struct amp_optimizer {
    amp_optimizer_desc  desc;  /* defaults filled in, AMP_ZERO is 0, groups and logger are NULL */
    amp_logger          logger;
    amp_param_group     groups[AMP_MAX_GROUPS]; /* may be written between steps; without groups in
                                                   the desc, [0] */
    amp_optimizer_desc  own[AMP_MAX_GROUPS];  /* of groups with an optimizer; of others eps is 0 */
    amp_optimizer_state state;
    amp_param*          params; /* the caller's array */
    int                 count;
} amp_optimizer;

/* Writes the low copies of masters. params must outlive *o. AMP_ERR_ARGUMENT: a missing buffer, no
   parameter, or two arrays that share memory (moments that are not needed may, of a frozen group
   too). An error changes nothing. */
AMP_DEF amp_result amp_optimizer_init(amp_optimizer* o, const amp_optimizer_desc* desc,
    amp_param* params, int count);

/* What a step did. */
typedef struct amp_optimizer_info {
    int    applied;             /* 1 = weights were updated; 0 = skipped because of an overflow */
    float  lr;                  /* the base learning rate of this step, schedule included */
    double grad_norm;           /* of the unscaled gradients, before clipping; inf if not finite, or
                                   skipped; 0 if nobody looked (no scaler, no clip_norm, and
                                   unchecked) */
    float  clip_coefficient;    /* 1 = not clipped */
    amp_overflow_info overflow; /* of the window; without a scaler, of this step */
    uint64_t update_overflows;  /* elements that stay: m, v or w would be inf or NaN (without a
                                   master, in 16 bits) */
    uint64_t saturated;         /* low copies at the largest finite value, of larger masters */
    int      update_tensor;     /* the first parameter with either; -1 if none */
    uint64_t update_index;      /* element in it */
    char     update_name[48];   /* its name, cut to fit */
} amp_optimizer_info;

/* Unscales the gradients in place, to look at or clip by hand; amp_optimizer_step knows, and checks
   them again. AMP_ERR_STATE: twice in a window, or after the step. */
AMP_DEF amp_result amp_optimizer_unscale(amp_optimizer* o, amp_scaler* s);

/* One step: check, then skip, or unscale, clip and update in one pass. Gradients that
   amp_scaler_check saw as just this list since the last scale_loss are not checked again. Unscaled
   ones are not unscaled again, if all are (else AMP_ERR_STATE). s == NULL: gradients are not
   scaled. The caller calls amp_scaler_update after the scaler's last optimizer: an overflow in one
   step or check skips the next ones. So several skip together if a check saw all their gradients.
   AMP_ERR_STATE: before any scale_loss, twice in a window, no parameter with a gradient.
   AMP_ERR_ARGUMENT: a gradient is missing, a rate or a group's weight decay is negative or not
   finite, or state is nonsense. */
AMP_DEF amp_result amp_optimizer_step(amp_optimizer* o, amp_scaler* s, amp_optimizer_info* info);

/* Sets the base rate, finite and >= 0, which the schedule multiplies (the logger hears where the
   factor stays 0). A group's own rate stays: write o->groups[i].lr. */
AMP_DEF amp_result amp_optimizer_set_lr(amp_optimizer* o, float lr);
/* Sets every gradient to zero, also inf and NaN. AMP_ERR_ARGUMENT before amp_optimizer_init. */
AMP_DEF amp_result amp_optimizer_zero_grad(amp_optimizer* o);

/* --- both, in one object, for a training loop of your own --- */

typedef struct amp_mixed_desc {
    const amp_param* params;   /* copied, with names for those that have none. What is NULL of
                                  master (then read from low), low (if low_dtype is given), m and v
                                  (if needed, zeros) is the object's own memory */
    int count;
    amp_optimizer_desc optimizer;
    amp_scaler_desc scaler;
    amp_allocator allocator;
    const amp_logger* logger;  /* of the optimizer and the scaler too, if they have none */
} amp_mixed_desc;

/* A plain struct. Its fields may be used as if alone: amp_optimizer_set_lr(&x.optimizer, lr),
   x.optimizer.params[0].grad = g, x.scaler.state.skipped. */
typedef struct amp_mixed {
    amp_optimizer optimizer;
    amp_scaler    scaler;
    amp_allocator allocator;
    void*         memory;
} amp_mixed;

/* Overwrites *x. Errors are those of amp_optimizer_init and amp_scaler_init, and AMP_ERR_MEMORY. */
AMP_DEF amp_result amp_mixed_init(amp_mixed* x, const amp_mixed_desc* desc);
/* Frees what init allocated; x may be NULL, or zeroed. */
AMP_DEF void amp_mixed_free(amp_mixed* x);
/* The low copy of the weights from p on, an address in a master; p itself if there is none. */
AMP_DEF amp_ref amp_mixed_low(const amp_mixed* x, const float* p);
/* seed times the loss scale: where your backward pass begins (1 for a mean loss, 1/n for a sum's).
   A loss of inf or NaN makes the window unsound. NaN if x is NULL or zeroed memory. */
AMP_DEF float amp_mixed_scale(amp_mixed* x, float loss, float seed);
/* amp_optimizer_step, then amp_scaler_update: checks the gradients, then skips, or updates weights
   and low copies; moves the scale. info may be NULL. */
AMP_DEF amp_result amp_mixed_step(amp_mixed* x, amp_optimizer_info* info);

/* >>model    A static graph: build it with calls that read like the maths, then finalize. */

typedef struct amp_model amp_model;

/* A handle of a layer's output: images [N,C,H,W], or rows of C*H*W features. In a sequence each of
   T positions has those: [N,T,C,H,W]. Models with other layers up to there refuse it. */
typedef struct amp_value { int id; uint32_t tag; } amp_value;

/* Data-parallel training: sums over ranks, in place, in the backend's memory. amp_train_step first
   waits for the sum of a flag: a batch refused on one rank is refused on all. */
typedef struct amp_comm {
    amp_result (*all_reduce_sum)(void* data, amp_dtype dtype, size_t count, void* stream,
        void* user_data);
    int   rank, size;
    void* user_data;
    /* Both NULL, or both given: then sums of gradients begin during the backward pass. start begins
       one, as all_reduce_sum, but may return before it ends; the array is left alone up to wait,
       which waits for all that began. Ranks start the same sums in the same order. */
    amp_result (*start)(void* data, amp_dtype dtype, size_t count, void* stream, void* user_data);
    amp_result (*wait)(void* stream, void* user_data);
    size_t start_bytes;  /* layers are started together until they have as many; 0 = 1 MiB */
} amp_comm;

/* What the desc points at is copied, but for backend and user_data. */
typedef struct amp_model_desc {
    int batch;                      /* largest N of a step; >= 1. Dropout's bits depend on it */
    amp_policy_desc precision;      /* level, type, lists; zeroed = O0 */
    const amp_policy* policy;       /* an edited policy, in place of `precision` */
    const amp_scaler_desc* scaler;  /* NULL = the style's preset for O1 and O2 in F16, and below O3
                                       where a layer runs in F16; else static 1 */
    amp_optimizer_desc optimizer;   /* zeroed = SGD with lr 0.01 */
    amp_dtype grad_dtype;           /* of weight gradients: 0 = AMP_F32; F16, BF16 */
    amp_dtype moment_dtype;         /* as in amp_param */
    int split_masters;              /* 1 = of weights in BF16: amp_master_split */
    int accumulate;                 /* micro-batches per step; 0 = 1. The gradient is their mean,
                                       whatever each n */
    int max_replays;                /* repeats of an overflowing batch at the lower scale; not with
                                       accumulate > 1 */
    int inference;                  /* 1 = for predictions and evaluation only: no gradients, no
                                       moments, and no masters of weights in 16 bits. A trained
                                       model's come by amp_checkpoint_load_weights */
    amp_sums sums;
    uint64_t seed;                  /* of weights and dropout; any value */
    const amp_backend* backend;     /* NULL = CPU */
    const void* backend_desc;       /* its options, e.g. an amp_cuda_desc, read by create */
    const amp_comm* comm;           /* NULL = alone */
    amp_allocator allocator;
    amp_logger logger;              /* of the parts too, in place of their descs' loggers */
} amp_model_desc;

/* Creates an empty graph in *out (NULL on failure). AMP_ERR_DESC, AMP_ERR_POLICY, AMP_ERR_MEMORY;
   AMP_ERR_ARGUMENT for a NULL desc. amp_model_finalize checks `optimizer` and `scaler`. */
AMP_DEF amp_result amp_model_create(amp_model** out, const amp_model_desc* desc);
/* Frees everything. NULL is fine. */
AMP_DEF void amp_model_destroy(amp_model* m);
/* The last error sentence; "" if none. */
AMP_DEF const char* amp_model_error(const amp_model* m);

/* --- building: an error is remembered, later calls do nothing, and finalize returns it --- */

/* How weights start. Torch (and MindSpore, OneFlow): weights and biases uniform within
   +-1/sqrt(fan_in); embeddings normal, sd 1. He: normal, sd sqrt(2/fan_in), biases 0. Xavier:
   uniform within +-sqrt(6/(fan_in+fan_out)), biases 0. Normal: the sd of the desc, or 0.02, biases
   0. */
typedef AMPI_ENUM(amp_init) {
    AMP_INIT_TORCH = 0, AMP_INIT_HE = 1, AMP_INIT_XAVIER = 2, AMP_INIT_ZERO = 3,
        AMP_INIT_NORMAL = 4
} amp_init;

/* An input is loaded as (x * scale - mean) / std. Each operation is rounded to FP32, the result to
   the type in use. */
typedef struct amp_input_desc {
    int channels, height, width;  /* >= 1 */
    float scale;                  /* 0 = AMP_U8 is divided by 255, other types stay, as
                                     torchvision's ToTensor */
    const float *mean, *std;      /* [channels], std > 0; NULL = none */
    int positions;                /* T, the most of a sequence; 0 = 1: images or rows */
} amp_input_desc;
/* kernel is square; kernel_h and kernel_w replace it where not 0. Likewise for stride, pad,
   dilation. */
typedef struct amp_conv2d_desc {
    int out_channels;                /* >= 1 */
    int kernel, kernel_h, kernel_w;
    int stride, stride_h, stride_w;  /* 0 = 1 */
    int pad, pad_h, pad_w;
    int dilation, dilation_h, dilation_w; /* 0 = 1 */
    int groups;                      /* 0 = 1 */
    int no_bias;                     /* 1 = without one */
    amp_init init;
    int pad_end_h, pad_end_w;        /* as in amp_conv2d_shape */
    int output_pad, output_pad_h, output_pad_w; /* likewise */
} amp_conv2d_desc;
typedef struct amp_linear_desc {
    int out_features;  /* >= 1 */
    int no_bias;
    amp_init init;
    float sd;          /* of AMP_INIT_NORMAL; 0 = 0.02 */
} amp_linear_desc;
typedef struct amp_embedding_desc {
    int vocabulary, features;  /* >= 1; of a position embedding 0, or what they are */
    amp_init init;
    float sd;                  /* of AMP_INIT_NORMAL; 0 = 0.02 */
} amp_embedding_desc;
typedef struct amp_pool2d_desc {
    amp_pool kind;                   /* 0 = AMP_POOL_MAX */
    int kernel, kernel_h, kernel_w;
    int stride, stride_h, stride_w;  /* 0 = the kernel's size */
    int pad, pad_h, pad_w;           /* at most half of the kernel */
    int exclude_pad;                 /* as in amp_pool2d_shape */
    int pad_end_h, pad_end_w;
} amp_pool2d_desc;
typedef struct amp_norm_desc {
    float eps;       /* 0 = 1e-5, of RMS norm 1e-6; in (0,1) */
    float momentum;  /* like `frozen` as in amp_batch_norm_shape */
    int   frozen;    /* gamma and beta still train; with a frozen group: Keras' trainable = False */
} amp_norm_desc;
typedef struct amp_loss_desc {
    float weight;     /* of this loss in the sum; 0 = 1; > 0 */
    /* of softmax cross-entropy alone, as in amp_cross_entropy_desc; what they point at is copied */
    float smoothing;
    const int32_t* ignored;      /* a label that does not count, of any value; NULL = none */
    const float* class_weights;  /* [K] */
    const amp_scaler_desc* scaler; /* NULL = the model's. A loss scale of this loss alone, as Apex's
                                      loss_id: a backward pass and a finding of its own. All losses
                                      have one, or none; FP32 gradients on the CPU. Copied */
    int classes;      /* of softmax cross-entropy: logits from there on only fill up a vocabulary,
                         with no probability and a gradient of 0; 0 = all C logits are classes */
} amp_loss_desc;

/* A layer's short call takes numbers, or nothing; the one that ends in _with takes a desc, NULL =
   all defaults where it has them.
   Sequences. What is said of a sample's C*H*W features holds for each position of a sequence: a
   dense layer, layer norm, softmax, activation, dropout, sum, product, concat or loss knows rows
   alone, which are n * T. Pairs have equal positions. Convolutions, pools, upsampling and batch
   norm refuse sequences. */

/* x[N,C,H,W]; rows of D features are (D,1,1). */
AMP_DEF amp_value amp_input(amp_model* m, int channels, int height, int width);
AMP_DEF amp_value amp_input_with(amp_model* m, const amp_input_desc* desc);
/* A sequence of numbers 0..V-1, int32 [n,positions], for an embedding. */
AMP_DEF amp_value amp_tokens(amp_model* m, int positions);
/* Rows of a learned w[V,D], by token. */
AMP_DEF amp_value amp_embedding(amp_model* m, amp_value tokens, int vocabulary, int features);
AMP_DEF amp_value amp_embedding_with(amp_model* m, amp_value tokens,
    const amp_embedding_desc* desc);
/* x + w, with a learned row of w[T,D] for each position. */
AMP_DEF amp_value amp_position_embedding(amp_model* m, amp_value x);
AMP_DEF amp_value amp_position_embedding_with(amp_model* m, amp_value x,
    const amp_embedding_desc* desc);
/* x * w^T with the weight w[V,D] of the layer that made `embedding`: V logits. Gradients add. */
AMP_DEF amp_value amp_tied_linear(amp_model* m, amp_value x, amp_value embedding);
AMP_DEF amp_value amp_conv2d(amp_model* m, amp_value x, int out_channels, int kernel, int stride,
    int pad);
AMP_DEF amp_value amp_conv2d_with(amp_model* m, amp_value x, const amp_conv2d_desc* desc);
/* transposed; AMP_INIT_TORCH's fan_in is PyTorch's, out_channels/groups * kernel area */
AMP_DEF amp_value amp_conv_transpose2d(amp_model* m, amp_value x, int out_channels, int kernel,
    int stride, int pad);
AMP_DEF amp_value amp_conv_transpose2d_with(amp_model* m, amp_value x,
    const amp_conv2d_desc* desc);
/* flattens x to rows first */
AMP_DEF amp_value amp_linear(amp_model* m, amp_value x, int out_features);
AMP_DEF amp_value amp_linear_with(amp_model* m, amp_value x, const amp_linear_desc* desc);
AMP_DEF amp_value amp_max_pool2d(amp_model* m, amp_value x, int kernel);  /* stride = kernel */
AMP_DEF amp_value amp_avg_pool2d(amp_model* m, amp_value x, int kernel);
AMP_DEF amp_value amp_pool2d_with(amp_model* m, amp_value x, const amp_pool2d_desc* desc);
AMP_DEF amp_value amp_global_avg_pool2d(amp_model* m, amp_value x);  /* [N,C,1,1] */
/* nearest: a pixel becomes factor x factor of them */
AMP_DEF amp_value amp_upsample(amp_model* m, amp_value x, int factor);
AMP_DEF amp_value amp_batch_norm(amp_model* m, amp_value x);
AMP_DEF amp_value amp_batch_norm_with(amp_model* m, amp_value x, const amp_norm_desc* desc);
/* over C*H*W */
AMP_DEF amp_value amp_layer_norm(amp_model* m, amp_value x);
AMP_DEF amp_value amp_layer_norm_with(amp_model* m, amp_value x, const amp_norm_desc* desc);
/* likewise; one parameter, "weight" */
AMP_DEF amp_value amp_rms_norm(amp_model* m, amp_value x);
AMP_DEF amp_value amp_rms_norm_with(amp_model* m, amp_value x, const amp_norm_desc* desc);
/* Each activation: amp_relu(m, x), amp_gelu, ... */
#define AMPI_X(NAME, name, ...) AMP_DEF amp_value amp_##name(amp_model* m, amp_value x);
AMP_ACTIVATION_LIST(AMPI_X)
#undef AMPI_X
/* slope >= 0, of x < 0: 0.01 in PyTorch */
AMP_DEF amp_value amp_leaky_relu(amp_model* m, amp_value x, float slope);
AMP_DEF amp_value amp_softmax(amp_model* m, amp_value x);  /* over C*H*W */
/* p in [0,1); nothing in evaluation */
AMP_DEF amp_value amp_dropout(amp_model* m, amp_value x, float p);
AMP_DEF amp_value amp_add(amp_model* m, amp_value a, amp_value b);  /* residual; equal shapes */
/* a * b; b has a's shape, or is [C,1,1] */
AMP_DEF amp_value amp_mul(amp_model* m, amp_value a, amp_value b);
/* along channels; equal H, W */
AMP_DEF amp_value amp_concat(amp_model* m, amp_value a, amp_value b);
AMP_DEF amp_value amp_flatten(amp_model* m, amp_value x);  /* [N,C*H*W,1,1]; costs nothing */
/* The model's loss is the weighted sum of these. The i-th call reads targets[i] of a batch. Logits
   are [N,K,1,1], or maps [N,K,H,W] in which each pixel has a label, or either at each position. */
AMP_DEF amp_value amp_softmax_cross_entropy(amp_model* m, amp_value logits);
AMP_DEF amp_value amp_softmax_cross_entropy_with(amp_model* m, amp_value logits,
    const amp_loss_desc* desc);
AMP_DEF amp_value amp_mse(amp_model* m, amp_value x);
AMP_DEF amp_value amp_mse_with(amp_model* m, amp_value x, const amp_loss_desc* desc);
AMP_DEF amp_value amp_bce_with_logits(amp_model* m, amp_value x);
AMP_DEF amp_value amp_bce_with_logits_with(amp_model* m, amp_value x, const amp_loss_desc* desc);
/* The mean of x, for losses made of layers or of a custom operator; it has no target. */
AMP_DEF amp_value amp_mean(amp_model* m, amp_value x);
AMP_DEF amp_value amp_mean_with(amp_model* m, amp_value x, const amp_loss_desc* desc);

/* The layer that made v, once more, on x: the same weights, whose gradients add. x has the shape of
   the layer's input; a convolution takes other heights and widths. AMP_ERR_ARGUMENT: a layer
   without weights, a batch norm, a custom operator of several inputs. */
AMP_DEF amp_value amp_reuse(amp_model* m, amp_value v, amp_value x);

/* --- an operator of your own, with what it computes given as functions --- */
#define AMP_MAX_OPERANDS 4

/* What its functions get. x, y, dy and dx are arrays [n,C,H,W] of `dtype`, of sequences
   [n,positions,C,H,W]; w has the type in which layers read weights, dw the model's grad_dtype. */
typedef struct amp_custom_call {
    int n;                        /* samples of this pass */
    int training;                 /* 0 = evaluation */
    amp_dtype dtype;              /* AMP_F32, or the 16-bit type where the rule is LOW */
    amp_ref x[AMP_MAX_OPERANDS];  /* inputs */
    amp_ref y;                    /* output; backward may read it, as x */
    amp_ref dy;                   /* backward: gradient of y, times the loss scale */
    amp_ref dx[AMP_MAX_OPERANDS]; /* backward writes each; AMP_NONE = not wanted */
    amp_ref w[AMP_MAX_OPERANDS];  /* parameters */
    amp_ref dw[AMP_MAX_OPERANDS]; /* backward writes each, or adds; AMP_NONE = frozen */
    int add_dw;                   /* 1 = add to dw */
    void* saved;                  /* n * saved_bytes, aligned to 64, from forward to backward */
    const amp_exec* exec;         /* for amp's operators; its workspace has workspace_bytes, its
                                     stream is a GPU's */
    void* user_data;
    int positions;                /* of x[0] in this pass; 1 = no sequence */
    const int32_t* lengths;       /* those of the batch, in the backend's memory; NULL = none */
} amp_custom_call;

/* A parameter: "<layer>.<name>". */
typedef struct amp_custom_param {
    const char* name;        /* 1 to 7 bytes */
    size_t count;            /* >= 1 */
    amp_init init;
    size_t fan_in, fan_out;  /* of init; 0 = count */
    float value;             /* with AMP_INIT_ZERO: what it starts with; NORMAL: the sd */
} amp_custom_param;

/* Copied, with params and rules. */
typedef struct amp_custom_desc {
    const char* name;               /* default names begin with it; NULL = "custom" */
    int channels, height, width;    /* of the output; all 0 = those of the first input */
    const amp_rule* rules;          /* [4], at O0 to O3; NULL = FP32 at each */
    const amp_custom_param* params;
    int param_count;                /* 0 to AMP_MAX_OPERANDS */
    size_t saved_bytes;             /* a sample */
    size_t workspace_bytes;
    /* Computes y; computes dx and dw. A result that is not AMP_OK ends the step as an error does.
       backward may be NULL where no gradient is wanted. */
    amp_result (*forward)(const amp_custom_call* call);
    amp_result (*backward)(const amp_custom_call* call);
    void* user_data;
    int positions;                  /* of the output; 0 = those of the first input, 1 = one */
} amp_custom_desc;
/* Adds such an operator on `count` inputs (1 to AMP_MAX_OPERANDS). A loss of your own is one with
   an output of one element a sample, and amp_mean of it. Its data lies in the backend's memory.
   amp has no LSTM and no GRU: one such operator over all steps of a sequence computes either. */
AMP_DEF amp_value amp_custom(amp_model* m, const amp_value* inputs, int count,
    const amp_custom_desc* desc);

/* Makes v an output: amp_model_read_value reads it after amp_forward, and amp_backward takes its
   gradient from the caller, so that a loss may be computed anywhere. The i-th call is gradients[i]
   of amp_seeds. Of a loss: AMP_ERR_ARGUMENT. */
#define AMP_MAX_OUTPUTS 8
AMP_DEF void amp_output(amp_model* m, amp_value v);
/* Keeps the gradient of v, an input too, for amp_model_read_gradient. */
AMP_DEF void amp_retain_gradient(amp_model* m, amp_value v);

/* Layers built between push and pop run in dtype. AMP_F32 is autocast(enabled=False);
   AMP_DTYPE_DEFAULT goes back to the level's rules. Regions nest. */
#define AMP_MAX_REGIONS 32
AMP_DEF void amp_autocast_push(amp_model* m, amp_dtype dtype);
AMP_DEF void amp_autocast_pop(amp_model* m);
/* Pins the layer that made v to a type, over every region and rule. Of several pins F32 beats F16
   beats BF16. Input and flatten take no pin, losses only F32. */
AMP_DEF void amp_pin(amp_model* m, amp_value v, amp_dtype dtype);
/* Names the layer that made v: UTF-8, 1 to 127 bytes, unique. Default names are "conv2d1", ... */
AMP_DEF void amp_name(amp_model* m, amp_value v, const char* name);
/* Puts the parameters of the layer that made v, which has some, into an optimizer group. Those of a
   frozen group have no gradient (but where all are frozen), and the backward pass stops where no
   other parameter lies. To freeze and unfreeze write amp_model_optimizer(m)->groups[i].frozen
   between steps; unfreezing between micro-batches is AMP_ERR_STATE. Only amp_norm_desc freezes
   batch norm's running statistics. */
AMP_DEF void amp_group(amp_model* m, amp_value v, int group);

/* Checks the graph, infers types, places casts, plans memory, allocates and initialises. Returns
   the first mistake of the graph. Only training steps need a loss or an output, and parameters:
   without one all groups are frozen, and there are no gradients and moments. */
AMP_DEF amp_result amp_model_finalize(amp_model* m);

/* --- looking inside --- */

/* One layer as it runs. */
typedef struct amp_layer {
    amp_op     op;
    char       name[128];
    int        channels, height, width;  /* of the output, per sample and position */
    int        positions;                /* of the output; 1 = no sequence */
    amp_dtype  compute_dtype;            /* of its operands */
    amp_dtype  storage_dtype;            /* of its output (F32 only if somebody needs it) */
    amp_dtype  param_dtype;              /* of the weights it reads; 0 if none */
    amp_rule   rule;
    amp_reason reason;                   /* who chose the rule */
    int        in_place;                 /* 1 = shares its input's memory */
    int        casts;                    /* of its inputs, just before it */
    size_t     parameters;               /* count */
    size_t     activation_bytes;         /* of the output for the whole batch; 0 if in place */
} amp_layer;
/* Number of layers, and layer i in building order; 0 and NULL before finalize. NULL if out of
   range. */
AMP_DEF int amp_model_layer_count(const amp_model* m);
AMP_DEF const amp_layer* amp_model_layer(const amp_model* m, int i);
/* The layer that made v; -1 if none. */
AMP_DEF int amp_model_layer_of(const amp_model* m, amp_value v);

typedef struct amp_memory {
    size_t activation_bytes;  /* activations and their gradients, which share memory over time */
    size_t parameter_bytes, low_parameter_bytes;  /* weights in FP32, and in 16 bits */
    size_t gradient_bytes;   /* weight gradients */
    size_t optimizer_bytes;  /* moments */
    size_t workspace_bytes;  /* scratch of the operators */
    size_t total_bytes;      /* these and the rest (statistics, targets, graph) */
} amp_memory;
/* AMP_ERR_STATE before finalize, as from all that follow. */
AMP_DEF amp_result amp_model_memory(const amp_model* m, amp_memory* out);

/* The parameters in building order, weight before bias, and their count; or the one of that name
   ("<layer>.weight", "<layer>.bias"). NULL if none. After a step, grad is NULL where the group was
   frozen. */
AMP_DEF amp_param* amp_model_params(amp_model* m, int* count);
AMP_DEF amp_param* amp_model_find_param(amp_model* m, const char* name);
/* Copies the weights of p, one of amp_model_params, to out[count] on the host; and back to masters
   and 16-bit weights, in which a value beyond the type becomes its largest finite one. */
AMP_DEF amp_result amp_model_read_param(amp_model* m, const amp_param* p, float* out);
AMP_DEF amp_result amp_model_write_param(amp_model* m, const amp_param* p, const float* values);
/* Writes the 16-bit copies, after masters were changed by hand. */
AMP_DEF amp_result amp_model_sync_params(amp_model* m);
/* The parts; they live as long as the model. NULL before finalize; no optimizer without parameters.
   On an asynchronous backend each call waits for the steps under way. The next step uses your
   changes. */
AMP_DEF amp_scaler* amp_model_scaler(amp_model* m);
AMP_DEF amp_optimizer* amp_model_optimizer(amp_model* m);
/* The scaler of a loss that has its own, else NULL. The model's scale is 1 then. */
AMP_DEF amp_scaler* amp_model_loss_scaler(amp_model* m, amp_value loss);
/* The policy in use, from amp_model_create on. */
AMP_DEF const amp_policy* amp_model_policy(const amp_model* m);

/* >>train    The step: forward, FP32 loss, scaled backward, check, skip or update, adjust. */

#define AMP_MAX_INPUTS 8
#define AMP_MAX_LOSSES 8

/* Data of one step. Nothing is kept. */
typedef struct amp_batch {
    int n;                                /* samples; 1 .. desc.batch */
    const void* inputs[AMP_MAX_INPUTS];   /* [n,C,H,W] each, [n,t,C,H,W] of a sequence, in the order
                                             of the amp_input and amp_tokens calls */
    amp_dtype   input_dtype;              /* 0 = AMP_F32; a float type or AMP_U8, see
                                             amp_input_desc. Tokens are AMP_I32 always */
    const void* targets[AMP_MAX_LOSSES];  /* per loss: labels[n,H,W] for cross-entropy, else
                                             float[n,C,H,W]; behind n the t of a sequence */
    amp_dtype   label_dtype;              /* 0 = AMP_I32; AMP_I64, AMP_U8. Without cross-entropy
                                             0 */
    int on_device;                        /* 1 = in the backend's memory; there a GPU makes a bad
                                             label a NaN loss */
    int positions;                        /* t of each sequence in this batch; 0 = the model's T, of
                                             which none may be less */
    const int32_t* lengths;               /* [n] on the host: positions of each sample that count,
                                             1 to t; NULL = all. Later ones have no loss, the mean
                                             is over the others, and attention does not see them.
                                             What lies there must be valid, but for labels */
} amp_batch;

typedef AMPI_ENUM(amp_outcome) {
    AMP_STEP_APPLIED          = 0,  /* weights were updated */
    AMP_STEP_ACCUMULATED      = 1,  /* a micro-batch; the update comes with a later one */
    AMP_STEP_SKIPPED_OVERFLOW = 2,  /* a gradient overflowed at this loss scale: nothing changed but
                                       the scale */
    AMP_STEP_SKIPPED_MODEL    = 3,  /* the forward pass gave inf or NaN: no lower scale helps, the
                                       scale stays */
} amp_outcome;
/* "applied", "accumulated", "skipped: overflow", "skipped: model". */
AMP_DEF const char* amp_outcome_name(amp_outcome o);

typedef struct amp_step_info {
    float    loss;               /* weighted sum of the losses of this call, unscaled */
    amp_outcome outcome;
    int      attempts;           /* 1, or more if the batch was replayed */
    int64_t  step, skipped;      /* steps so far: applied, and skipped */
    float    scale_before, scale_after;
    float    lr;                 /* the base rate of this step, schedule included */
    double   grad_norm;          /* of the unscaled gradients; inf if skipped; 0 for a
                                    micro-batch */
    amp_overflow_info overflow;  /* of the weight gradients */
    uint64_t update_overflows, saturated;  /* as in amp_optimizer_info */
    uint64_t held_statistics;  /* channels whose running statistics stay: they would be inf or
                                  NaN */
    char     message[512];  /* a sentence if skipped or one of these three is not 0; else "" */
    char     culprit[136];  /* the layer or parameter that it blames; "" if none */
} amp_step_info;

/* One training step on a batch, or one of desc.accumulate micro-batches. An overflow is no error.
   Errors leave *info as is, but for AMP_ERR_OVERFLOW (a limit of the scaler), whose step was made.
   AMP_ERR_ARGUMENT: NULL data, n or a label out of range, an invalid rate; one value per channel
   for a batch norm not frozen; a refusal of another rank's batch. AMP_ERR_STATE: not finalized, no
   loss, no parameters. AMP_ERR_DTYPE, AMP_ERR_COMM.
   A step is skipped if a gradient or a micro-batch's loss is not finite. The scale stays where a
   loss, or a layer's output in the last micro-batch, is not finite. A GPU looks at outputs only
   with info, after the scale has moved. The logger hears (AMP_OK) once of each layer where inf or
   NaN begin. A skipped step changes only scaler and counters. A bad batch or rate is found first:
   earlier micro-batches stay. A later failure undoes the step's micro-batches too. On an
   asynchronous backend a call without info (and without max_replays) waits for other ranks only; an
   error shows at the next call that waits. All ranks give info, or none. */
AMP_DEF amp_result amp_train_step(amp_model* m, const amp_batch* batch, amp_step_info* info);
/* Waits for the last amp_train_step and tells what it did, for steps without info. A skipped step's
   message names the gradient, not its cause in the model. AMP_ERR_STATE before the first step,
   AMP_ERR_OVERFLOW as amp_train_step. */
AMP_DEF amp_result amp_train_read(amp_model* m, amp_step_info* info);

/* The parts of amp_train_step, for own losses and own treatment of gradients. A step is
   desc.accumulate times amp_forward and amp_backward, then amp_update:
     amp_forward(m, &batch, &loss);  amp_backward(m, NULL);  amp_update(m, &info);
   In between nothing else may run the model: AMP_ERR_STATE. Errors are those of amp_train_step; one
   within a part drops the step. Replays and records of a backend are amp_train_step's alone. */

/* The gradients of a loss of the caller's with respect to each output: [n,C,H,W] of F32, F16, BF16
   or F64. One with inf or NaN skips the step; on the CPU the loss scale stays, unless `scaled`. */
typedef struct amp_seeds {
    amp_ref gradients[AMP_MAX_OUTPUTS];  /* in the order of the amp_output calls; AMP_NONE = 0 */
    int scaled;     /* 1 = times the loss scale already; 0 = amp_backward multiplies with it, and
                       divides by desc.accumulate and the number of ranks */
    int on_device;  /* 1 = in the backend's memory */
} amp_seeds;

/* The training pass up to the losses; *loss (may be NULL) is their weighted sum. The data of the
   batch must stay until amp_backward returns. */
AMP_DEF amp_result amp_forward(amp_model* m, const amp_batch* batch, float* loss);
/* The gradients of the last amp_forward, from the losses and from seeds (NULL = none; needed where
   there is no loss): those of weights are added to the step's earlier ones. */
AMP_DEF amp_result amp_backward(amp_model* m, const amp_seeds* seeds);
/* Sum over ranks, check, then skip or update, as the end of amp_train_step. info may be NULL. */
AMP_DEF amp_result amp_update(amp_model* m, amp_step_info* info);
/* Drops an open step, its gradients, and what it did to running statistics. */
AMP_DEF amp_result amp_discard(amp_model* m);

/* Copies an output to out[n,C,H,W] on the host, from amp_forward until the model runs again. */
AMP_DEF amp_result amp_model_read_value(amp_model* m, amp_value v, float* out);
/* Likewise a retained gradient after amp_backward, divided by the loss scale. AMP_ERR_OVERFLOW
   where a gradient of a weight was not finite, AMP_ERR_STATE after amp_discard. */
AMP_DEF amp_result amp_model_read_gradient(amp_model* m, amp_value v, float* out);
/* Between amp_backward and amp_update: the gradient of parameter p to or from the host, without the
   loss scale. AMP_ERR_STATE where its group is frozen. inf and NaN stay what they are. */
AMP_DEF amp_result amp_model_read_param_gradient(amp_model* m, const amp_param* p, float* out);
AMP_DEF amp_result amp_model_write_param_gradient(amp_model* m, const amp_param* p,
    const float* values);
/* Likewise: each finite element of all gradients is held within +-limit (> 0, finite), as
   torch.nn.utils.clip_grad_value_. On a GPU they pass through the host. */
AMP_DEF amp_result amp_model_clip_gradients(amp_model* m, float limit);
/* Likewise: the Euclidean norm of p's gradient, NULL = of all. */
AMP_DEF amp_result amp_model_gradient_norm(amp_model* m, const amp_param* p, double* out);

typedef struct amp_eval_info {
    float   loss;         /* as in training, without dropout and with the running statistics */
    int64_t correct;      /* of all losses: labels of a cross-entropy where the largest logit is,
                             and elements of a BCE whose logit is > 0 as the target is > 1/2 */
    int64_t predictions;  /* labels that are not ignored, and elements in all; 0 = none: an MSE
                             has no right answers */
    char    message[288]; /* a sentence if the loss is not finite, which the logger hears, too; else
                             "" */
    char    culprit[136];  /* the layer that it blames; "" if none */
} amp_eval_info;
/* Evaluation mode with losses. Errors: as of amp_train_step's batch. */
AMP_DEF amp_result amp_evaluate(amp_model* m, const amp_batch* batch, amp_eval_info* info);
/* Forward pass in evaluation mode without targets: v as float out[n,C,H,W] on the host. A loss:
   AMP_ERR_ARGUMENT. */
AMP_DEF amp_result amp_predict(amp_model* m, const amp_batch* batch, amp_value v, float* out);

typedef struct amp_generate_desc {
    float    temperature;  /* logits are divided by it; 0 = 1; AMP_ZERO = the largest logit wins */
    int      top_k;        /* tokens are drawn from the k largest logits, the first of equals; 0 =
                              all */
    int      classes;      /* as in amp_loss_desc */
    uint64_t seed;         /* of the draws */
    /* Hears each token; a result other than 0 ends the text. */
    int    (*on_token)(int32_t token, void* user_data);
    void*    user_data;
} amp_generate_desc;
/* Continues prompt[prompt_count], at least one token, by out[count]: each is drawn from the softmax
   of the last position of `logits`. The model's one input is amp_tokens; it sees as many of the
   last tokens as that has positions. -1 fills out where on_token ended the text. Allocates for the
   call. Errors: as amp_predict; AMP_ERR_OVERFLOW where a logit is NaN or inf, or all are -inf. */
AMP_DEF amp_result amp_generate(amp_model* m, amp_value logits, const int32_t* prompt,
    int prompt_count, int32_t* out, int count, const amp_generate_desc* desc);

/* Samples to train or evaluate with: arrays in host memory, or a function that reads some. The
   struct is copied when a call begins. */
typedef struct amp_data {
    int64_t     count;                   /* samples; >= 1 */
    const void* inputs[AMP_MAX_INPUTS];  /* as in amp_batch, with `count` for n */
    amp_dtype   input_dtype;
    const void* targets[AMP_MAX_LOSSES];
    amp_dtype   label_dtype;
    /* If not NULL, in place of the arrays: fills *batch, zeroed but for n, with samples
       indices[0..n), each below count. Its data must stay until the next call. A result other than
       AMP_OK ends the run. */
    amp_result (*read)(amp_batch* batch, const int64_t* indices, void* user_data);
    void*       user_data;
    int         positions;               /* as in amp_batch */
    const int32_t* lengths;              /* [count] */
} amp_data;
/* amp_evaluate over all samples: mean loss per sample, both counts, the first message. Allocates
   for the call. Errors: as amp_evaluate, and as amp_fit for the data. */
AMP_DEF amp_result amp_evaluate_data(amp_model* m, const amp_data* data, amp_eval_info* info);

typedef struct amp_fit_epoch {
    int     epoch;           /* from 1 */
    int64_t steps, skipped;  /* optimizer steps applied, and skipped */
    float   loss;            /* in training: mean per sample, without skipped batches */
    float   eval_loss;       /* of the evaluation data; 0 without. Where not finite the logger has
                                heard why */
    double  accuracy;        /* correct / predictions of the evaluation data; -1 where there are
                                none */
    float   scale, lr;       /* loss scale and base rate at its end */
    int     best;            /* 1 = eval_loss (loss if there is none) is this run's lowest */
} amp_fit_epoch;
typedef AMPI_ENUM(amp_fit_end) {
    /* on_step or on_epoch */
    AMP_FIT_EPOCHS = 0, AMP_FIT_STEPS = 1, AMP_FIT_PATIENCE = 2, AMP_FIT_CALLBACK = 3
} amp_fit_end;
typedef struct amp_fit_info {
    int           epochs;      /* of this run, the last one in part if `end` came within it */
    amp_fit_epoch last, best;  /* zeroed while there is none; whole epochs, also where writing
                                  best_path failed */
    amp_fit_end   end;         /* what ended it */
} amp_fit_info;

typedef struct amp_fit_desc {
    int      epochs;             /* 0 = 1 */
    int      first_epoch;        /* epochs that an earlier run did */
    int64_t  max_steps;          /* ends the run after so many applied steps in all; 0 = no limit */
    uint64_t seed;               /* of the order; 0 = the model's */
    int      in_order;           /* 1 = the samples in their own order */
    int      drop_last;          /* 1 = without a smaller last batch */
    const amp_data* evaluation;  /* evaluated after each epoch; NULL = none */
    int      patience;           /* ends the run after so many epochs in a row without a better
                                    loss; 0 = never */
    const char* best_path;       /* checkpoint after each epoch that is best so far, tried before
                                    the first step, when a file at the path stays; NULL = none */
    amp_fit_epoch* history;      /* [epochs - first_epoch]; NULL = not wanted */
    void (*print)(const char* text, void* user_data);  /* a line per epoch, e.g. amp_print_stdout;
                                                          NULL = silent */
    int      terminal;   /* 1 = also a bar within an epoch, redrawn on its line */
    /* After each amp_train_step and epoch: 0 = go on, else the run ends when the step's
       micro-batches are done. */
    int (*on_step)(amp_model* m, const amp_step_info* step, void* user_data);
    int (*on_epoch)(amp_model* m, const amp_fit_epoch* epoch, void* user_data);
    void*    user_data;  /* of print, on_step and on_epoch */
} amp_fit_desc;
#if !defined(AMP_NO_STDIO)
/* Ready-made print function. */
AMP_DEF void amp_print_stdout(const char* text, void* user_data);
#endif
/* Trains: each epoch takes every sample once, in batches of the model's size and a smaller last
   one; with `accumulate` it leaves out batches that do not fill a step. The order depends on seed,
   epoch and count alone. After a skipped step the next batch follows.
   Several ranks share each step's samples, but for fewer samples than ranks at the end. An error or
   the end of patience on one ends the fit of all (AMP_ERR_ARGUMENT on the others). Their callbacks
   must decide alike, patience needs evaluation data, best_path one rank.
   Resuming behind a whole epoch: amp_checkpoint_load, then first_epoch = the epochs done; equal
   data, seed and batch give the same bits as a run without a stop. `best` and `patience` know
   nothing of earlier epochs.
   desc NULL = one epoch. An error undoes a step's earlier micro-batches, and info is valid. Errors:
   as amp_train_step (AMP_ERR_OVERFLOW: a dead model), amp_evaluate and amp_checkpoint_save; what
   data.read returns; AMP_ERR_MEMORY, AMP_ERR_STATE (between micro-batches), AMP_ERR_UNSUPPORTED
   (best_path with AMP_NO_STDIO). */
AMP_DEF amp_result amp_fit(amp_model* m, const amp_data* data, const amp_fit_desc* desc,
    amp_fit_info* info);

/* >>checkpoint  Everything that training needs to go on, in the safetensors format. */
#if !defined(AMP_NO_STDIO)

/* A named tensor of a file. shape has `rank` entries whose product is tensor.count. */
typedef struct amp_file_tensor {
    amp_tensor tensor;  /* name is needed; dtype F32, F16, BF16 or F64 */
    int        rank;    /* 0..4 */
    size_t     shape[4];
} amp_file_tensor;
/* Text of the file's __metadata__. */
typedef struct amp_file_text { const char* key; const char* value; } amp_file_text;

typedef struct amp_file_desc {
    amp_allocator allocator;  /* for the header and a copy buffer */
    const amp_logger* logger;
} amp_file_desc;

/* Writes a safetensors file as "<path>.<8 hexadecimal digits>.tmp" and renames it: `path` is the
   old file or the new one, whoever else saves or loads there. POSIX: the old file's mode is kept, a
   symbolic link replaced. Windows: a file held open elsewhere is waited for, a second or two. Names
   (each once), keys and values are UTF-8, larger elements come first. Text "amp.crc32.<name>" is a
   tensor's CRC-32. AMP_ERR_MEMORY; AMP_ERR_IO, also for a device, pipe or directory, or, with the
   new file in place, where its directory fails to flush. */
AMP_DEF amp_result amp_file_save(const char* path, const amp_file_tensor* tensors, int count,
    const amp_file_text* texts, int text_count, const amp_file_desc* desc);
/* Reads tensors by name, each once; type, shape and any CRC-32 must be the file's. Others may have
   any type. A hostile file costs at most memory of five times its header (100 MB at most).
   AMP_ERR_FORMAT, AMP_ERR_IO, AMP_ERR_MEMORY. */
AMP_DEF amp_result amp_file_load(const char* path, const amp_file_tensor* tensors, int count,
    const amp_file_desc* desc);
/* Copies a metadata text with its final 0. AMP_ERR_FORMAT: also no such key, or no room. */
AMP_DEF amp_result amp_file_text_of(const char* path, const char* key, char* out, size_t size,
    const amp_file_desc* desc);

/* A file of amp_file_save: masters (or 16-bit weights without masters) under the parameters' names;
   moments "<parameter>.m" and ".v"; running statistics "<layer>.running_mean" and "_var"; scaler,
   step and skip counts, random-number position. Resuming gives the bits of a run without a stop.
   AMP_ERR_STATE between micro-batches; AMP_ERR_ARGUMENT, and the old file stays, for a rate or a
   state that amp_optimizer_step refuses.
   Loading needs equal names, shapes, level, types (of gradients and moments too; split masters are
   FP32 in the file), seed, accumulate, optimizer kind, maximize, groups and scaler rule, but not
   batch; otherwise, or for a damaged file, AMP_ERR_FORMAT with the first difference. Rates are
   loaded; other optimizer settings stay, and the logger hears (AMP_OK) of each that differs. Saving
   takes little memory, loading as much as the file. */
AMP_DEF amp_result amp_checkpoint_save(amp_model* m, const char* path);
AMP_DEF amp_result amp_checkpoint_load(amp_model* m, const char* path);

/* For fine-tuning: weights and running statistics by name, from a checkpoint or another safetensors
   file (PyTorch's layers have the same shapes, and with amp_name the same names; a "module." before
   all names is left out); types are converted, and a value beyond the weights' type becomes its
   largest finite one. What the file lacks stays. The logger hears of either (AMP_OK). *count, if
   not NULL: tensors read. AMP_ERR_FORMAT: another shape, or none read. */
AMP_DEF amp_result amp_checkpoint_load_weights(amp_model* m, const char* path, int* count);

/* A checkpoint of a training loop of your own: weights and moments of o's parameters, step and
   rates; the state of s (NULL = no scaler); `count` tensors more, such as the place in the data.
   Host memory only. Each parameter needs its own name of at most 141 bytes. Loading writes 16-bit
   copies too. The rest is as with models; AMP_ERR_STATE inside a window of s, or if s was never
   initialised. */
AMP_DEF amp_result amp_optimizer_save(amp_optimizer* o, amp_scaler* s, const char* path,
    const amp_file_tensor* more, int count, const amp_file_desc* desc);
AMP_DEF amp_result amp_optimizer_load(amp_optimizer* o, amp_scaler* s, const char* path,
    const amp_file_tensor* more, int count, const amp_file_desc* desc);
/* The same of an amp_mixed, without more tensors. */
AMP_DEF amp_result amp_mixed_save(amp_mixed* x, const char* path);
AMP_DEF amp_result amp_mixed_load(amp_mixed* x, const char* path);

#endif

/* >>report   What a person wants to see. */

/* Exponent histogram: bin b counts values with floor(log2|x|) == b + AMP_STATS_MIN_EXPONENT,
   subnormals included. */
#define AMP_STATS_MIN_EXPONENT (-149)
#define AMP_STATS_BINS 277  /* 2^-149 .. 2^127 */

typedef struct amp_stats {
    uint64_t count, zeros, infs, nans;
    uint64_t subnormals;          /* in the buffer's own type */
    uint64_t would_underflow;     /* not zero, but zero when cast to the target type */
    uint64_t would_be_subnormal;  /* not zero, and a subnormal of the target type */
    uint64_t would_overflow;      /* finite, but infinite in the target type */
    float    smallest, largest;   /* of |x|, finite and not zero; 0 if none */
    float    suggested_scale;     /* largest power of two with largest * scale <= max(target) / 2; 0
                                     if unknown */
    uint64_t histogram[AMP_STATS_BINS];
} amp_stats;

/* Statistics of n elements of any type; target is what they would be cast to (0 = AMP_F16; not
   F64). Values beyond the histogram count in its end bins. Adds to *out if `add`, else starts
   anew. */
AMP_DEF amp_result amp_stats_collect(amp_stats* out, const void* x, amp_dtype dtype, size_t n,
    amp_dtype target, int add);

/* One layer in one forward and backward pass. */
typedef struct amp_layer_stats {
    amp_stats output;           /* activations */
    amp_stats output_gradient;  /* scaled by the current loss scale; count 0 if it has none */
    amp_stats weight_gradient;  /* likewise; of all its parameters. Count 0 of both: frozen */
    amp_stats weight;           /* of the masters, where there are */
} amp_layer_stats;
/* Runs a training pass without an optimizer step and fills stats[i] for layer i (after an error,
   some); capacity is at least amp_model_layer_count. Batch and errors: as amp_train_step;
   AMP_ERR_STATE also between micro-batches. */
AMP_DEF amp_result amp_model_stats(amp_model* m, const amp_batch* batch, amp_layer_stats* stats,
    int capacity);

#if !defined(AMP_NO_STDIO)
/* A line per layer: output shape, types, the rule and who chose it, parameters, bytes; then sums
   and the settings in use of the optimizer and each group. AMP_ERR_STATE before finalize;
   AMP_ERR_IO. */
AMP_DEF amp_result amp_model_print(const amp_model* m, FILE* out);
/* The counts and a bar chart of the histogram in plain text. AMP_ERR_IO. */
AMP_DEF amp_result amp_stats_print(const amp_stats* s, FILE* out);

/* amp_model_stats as a picture or text: each layer's type and who chose it; exponents from 2^-40 to
   2^19 under the formats' ranges; shares that a cast to the policy's low_dtype makes 0 or infinite;
   a loss scale for the largest gradient, and where inf or NaN begin. Errors: as there;
   AMP_ERR_MEMORY, AMP_ERR_IO. A picture is SVG in ASCII, for white and for black, and saved as by
   amp_file_save. */
AMP_DEF amp_result amp_report_svg(amp_model* m, const amp_batch* batch, const char* path);
AMP_DEF amp_result amp_report_print(amp_model* m, const amp_batch* batch, FILE* out);
#endif

/* The last steps, zeroed at first; step i, from 0, is steps[i % AMP_HISTORY_STEPS]. */
#define AMP_HISTORY_STEPS 128
typedef struct amp_history { uint64_t count; amp_step_info steps[AMP_HISTORY_STEPS]; } amp_history;

/* Adds a step, but no accumulated micro-batch. */
AMP_DEF void amp_history_add(amp_history* h, const amp_step_info* info);
#if !defined(AMP_NO_STDIO)
/* Loss, loss scale and gradient norm by step, and the steps that each culprit cost. AMP_ERR_IO. */
AMP_DEF amp_result amp_history_svg(const amp_history* h, const char* path,
    const amp_file_desc* desc);
AMP_DEF amp_result amp_history_print(const amp_history* h, FILE* out);
#endif

#ifdef __cplusplus
} /* extern "C" */

/* In C++ a desc may be written in place: amp_scaler_init(&s, {}) or, since C++20, (&s, {.init_scale
   = 1024}). The include may stand in an extern "C". */
extern "C++" {
static inline amp_ref amp_ref_to(const float* p) { return amp_f32(p); }
static inline amp_ref amp_ref_to(const amp_half* p) { return amp_f16(p); }
static inline amp_ref amp_ref_to(const amp_bfloat16* p) { return amp_bf16(p); }
static inline amp_result amp_convert_with(amp_ref dst, amp_ref src, size_t n,
    const amp_convert_desc& d) { return amp_convert_with(dst, src, n, &d); }
#define AMPI_INIT(name, type, desc) \
    static inline amp_result name(type* x, const desc& d) { return name(x, &d); }
AMPI_INIT(amp_policy_init, amp_policy, amp_policy_desc)
AMPI_INIT(amp_scaler_init, amp_scaler, amp_scaler_desc)
AMPI_INIT(amp_mixed_init, amp_mixed, amp_mixed_desc)
AMPI_INIT(amp_model_create, amp_model*, amp_model_desc)
static inline amp_result amp_optimizer_init(amp_optimizer* o, const amp_optimizer_desc& d,
    amp_param* params, int count) { return amp_optimizer_init(o, &d, params, count); }
static inline amp_result amp_fit(amp_model* m, const amp_data* data, const amp_fit_desc& d,
        amp_fit_info* info)
    { return amp_fit(m, data, &d, info); }
#define AMPI_LAYER(name, type) \
    static inline amp_value name(amp_model* m, amp_value x, const type& d) { \
        return name(m, x, &d); }
static inline amp_value amp_input_with(amp_model* m, const amp_input_desc& d) {
    return amp_input_with(m, &d);
}

AMPI_LAYER(amp_conv2d_with, amp_conv2d_desc)
AMPI_LAYER(amp_linear_with, amp_linear_desc)
AMPI_LAYER(amp_embedding_with, amp_embedding_desc)
AMPI_LAYER(amp_position_embedding_with, amp_embedding_desc)
AMPI_LAYER(amp_pool2d_with, amp_pool2d_desc)
AMPI_LAYER(amp_batch_norm_with, amp_norm_desc)
AMPI_LAYER(amp_layer_norm_with, amp_norm_desc)
AMPI_LAYER(amp_rms_norm_with, amp_norm_desc)
AMPI_LAYER(amp_softmax_cross_entropy_with, amp_loss_desc)
AMPI_LAYER(amp_mse_with, amp_loss_desc)
AMPI_LAYER(amp_bce_with_logits_with, amp_loss_desc)
#undef AMPI_INIT
#undef AMPI_LAYER
} /* extern "C++" */
#endif
#endif /* AMP_H_INCLUDED */

/* >>backend  The processor a model runs on: what its authors write, and raw calls of its operators.
   Declared with AMP_BACKEND_API. */
#if (defined(AMP_BACKEND_API) || defined(AMP_IMPLEMENTATION)) && !defined(AMPI_BACKEND_ONCE)
#define AMPI_BACKEND_ONCE
#ifdef __cplusplus
extern "C" {
#endif

/* State of training, and what the last step did; of an asynchronous backend, as last read from its
   own memory. */
typedef struct amp_training {
    amp_scaler         scaler;
    amp_optimizer      optimizer;
    amp_optimizer_info last;
    amp_result         limit;         /* what amp_scaler_update returned */
    float              scale_used;  /* the loss scale of the last step */
    uint64_t           passes;      /* training passes so far: dropout's position */
    const float*       loss_scale;  /* of this pass, in the backend's memory */
    const uint64_t*    position;    /* likewise; NULL = `passes` is it */
    void*              resident;    /* the backend's own */
} amp_training;

/* How data of a batch is read: element i belongs to channel i / pixels % channels. */
typedef struct amp_reading {
    size_t channels, pixels;
    float  scale;            /* as in amp_input_desc */
    const float* constants;  /* mean[channels], then std[channels]; host memory if the data is; NULL
                                = none */
} amp_reading;

/* A step is to run, is recorded while it runs, or has been replayed. */
typedef AMPI_ENUM(amp_record) { AMP_RECORD_OFF = 0, AMP_RECORD_ON = 1,
        AMP_RECORD_REPLAYED = 2 } amp_record;

/* Memory, and an entry per operator with the public function's type. What amp_cpu_backend() leaves
   NULL may be NULL. */
#define AMPI_ENTRY(name, ...) amp_result (*name)(__VA_ARGS__, const amp_exec* exec);
struct amp_backend {
    const char* name;
    int asynchronous;  /* 1 = operators return before they are done */
    /* Of a model; open may set exec->stream and exec->context. */
    amp_result (*open)(amp_exec* exec, const void* desc, const amp_allocator* a);
    void (*close)(amp_exec* exec, const amp_allocator* a);
    /* Memory of the processor: alloc returns NULL on failure; zero, copy_in (from the host) and
       copy_out (to the host) count bytes; upload and download convert n elements on the way.
       reaches: may data lie at p? NULL = anywhere. */
    void* (*alloc)(size_t bytes, const amp_allocator* a);
    void  (*free)(void* p, const amp_allocator* a);
    int   (*reaches)(const void* p);
    AMPI_ENTRY(zero, void* p, size_t bytes)
    AMPI_ENTRY(copy, void* dst, const void* src, size_t bytes)
    AMPI_ENTRY(copy_in, void* dst, const void* host, size_t bytes)
    AMPI_ENTRY(copy_out, void* host, const void* src, size_t bytes)
    AMPI_ENTRY(upload, amp_ref, amp_ref, size_t n)
    AMPI_ENTRY(download, amp_ref, amp_ref, size_t n)
    AMPI_ENTRY(convert, amp_ref, amp_ref, size_t n)
    /* Inputs as amp_input_desc says, or labels to AMP_I32, -2^31 where one does not fit. from_host:
       the source lies there. */
    AMPI_ENTRY(load, amp_ref, amp_ref, size_t n, int from_host, const amp_reading* how)
    size_t (*gemm_workspace)(size_t m, size_t n, size_t k);
    size_t (*conv2d_workspace)(const amp_conv2d_shape* s);
    size_t (*layer_norm_workspace)(size_t rows, size_t d);  /* of rms_norm too */
    size_t (*attention_workspace)(const amp_attention_shape* s);
    /* The operators. Dropout is at offset + *position * stride; without position at offset. */
    AMPI_ENTRY(gemm, const amp_gemm_shape*, float, amp_ref, amp_ref, float, amp_ref)
    AMPI_ENTRY(linear_forward, amp_ref, amp_ref, amp_ref, amp_ref, size_t, size_t, size_t)
    AMPI_ENTRY(linear_backward, amp_ref, amp_ref, amp_ref, amp_ref, amp_ref, amp_ref, int,
        size_t, size_t, size_t)
    AMPI_ENTRY(conv2d_forward, const amp_conv2d_shape*, amp_ref, amp_ref, amp_ref, amp_ref)
    AMPI_ENTRY(conv2d_backward, const amp_conv2d_shape*, amp_ref, amp_ref, amp_ref, amp_ref,
        amp_ref, amp_ref, int)
    AMPI_ENTRY(conv_transpose2d_forward, const amp_conv2d_shape*, amp_ref, amp_ref, amp_ref,
        amp_ref)
    AMPI_ENTRY(conv_transpose2d_backward, const amp_conv2d_shape*, amp_ref, amp_ref, amp_ref,
        amp_ref, amp_ref, amp_ref, int)
    AMPI_ENTRY(pool2d_forward, const amp_pool2d_shape*, amp_ref, amp_ref)
    AMPI_ENTRY(pool2d_backward, const amp_pool2d_shape*, amp_ref, amp_ref, amp_ref, int)
    AMPI_ENTRY(batch_norm_forward, const amp_batch_norm_shape*, int, amp_ref, amp_ref, amp_ref,
        float*, float*, float*, float*, amp_ref)
    AMPI_ENTRY(batch_norm_backward, const amp_batch_norm_shape*, amp_ref, amp_ref, amp_ref,
        const float*, const float*, amp_ref, amp_ref, amp_ref, int)
    AMPI_ENTRY(layer_norm_forward, amp_ref, amp_ref, amp_ref, float, float*, float*,
        amp_ref, size_t, size_t)
    AMPI_ENTRY(layer_norm_backward, amp_ref, amp_ref, amp_ref, float, const float*, const float*,
        amp_ref, amp_ref, amp_ref, int, size_t, size_t)
    AMPI_ENTRY(rms_norm_forward, amp_ref, amp_ref, float, float*, amp_ref, size_t, size_t)
    AMPI_ENTRY(rms_norm_backward, amp_ref, amp_ref, amp_ref, float, const float*, amp_ref, amp_ref,
        int, size_t, size_t)
    AMPI_ENTRY(activation_forward, amp_activation, amp_ref, amp_ref, size_t)
    AMPI_ENTRY(activation_backward, amp_activation, amp_ref, amp_ref, amp_ref, int, size_t)
    AMPI_ENTRY(leaky_relu_forward, amp_ref, amp_ref, size_t, float)
    AMPI_ENTRY(leaky_relu_backward, amp_ref, amp_ref, amp_ref, int, size_t, float)
    AMPI_ENTRY(softmax_forward, amp_ref, amp_ref, size_t, size_t)
    AMPI_ENTRY(softmax_backward, amp_ref, amp_ref, amp_ref, int, size_t, size_t)
    AMPI_ENTRY(dropout_forward, amp_ref, amp_ref, size_t, float p, uint64_t seed, uint64_t offset,
        const uint64_t* position, uint64_t stride)
    AMPI_ENTRY(add_forward, amp_ref, amp_ref, amp_ref, size_t)
    AMPI_ENTRY(mul_forward, amp_ref, amp_ref, amp_ref, size_t, size_t)
    AMPI_ENTRY(mul_backward, amp_ref, amp_ref, amp_ref, amp_ref, amp_ref, int, size_t, size_t)
    AMPI_ENTRY(concat_forward, amp_ref, size_t, amp_ref, size_t, size_t, size_t)
    AMPI_ENTRY(concat_backward, amp_ref, size_t, size_t, amp_ref, size_t, size_t, int)
    AMPI_ENTRY(embedding_forward, const int32_t* tokens, amp_ref, amp_ref, size_t, size_t, size_t)
    AMPI_ENTRY(embedding_backward, amp_ref, const int32_t* tokens, amp_ref, int, size_t, size_t,
        size_t)
    AMPI_ENTRY(attention_forward, const amp_attention_shape*, amp_ref, amp_ref, amp_ref, amp_ref,
        float*)
    AMPI_ENTRY(attention_backward, const amp_attention_shape*, amp_ref, amp_ref, amp_ref, amp_ref,
        amp_ref, const float*, amp_ref, amp_ref, amp_ref, int)
    AMPI_ENTRY(rope_forward, const amp_rope_shape*, amp_ref, amp_ref)
    AMPI_ENTRY(rope_backward, const amp_rope_shape*, amp_ref, amp_ref, int)
    AMPI_ENTRY(softmax_cross_entropy_forward, amp_ref, const int32_t*,
        const amp_cross_entropy_desc*, float*, size_t, size_t)
    AMPI_ENTRY(softmax_cross_entropy_backward, amp_ref, const int32_t*,
        const amp_cross_entropy_desc*, const float*, float, amp_ref, size_t, size_t)
    AMPI_ENTRY(mse_forward, amp_ref, amp_ref, float*, size_t)
    AMPI_ENTRY(mse_backward, amp_ref, amp_ref, const float*, float, amp_ref, size_t)
    AMPI_ENTRY(bce_with_logits_forward, amp_ref, amp_ref, float*, size_t)
    AMPI_ENTRY(bce_with_logits_backward, amp_ref, amp_ref, const float*, float, amp_ref, size_t)
    /* As of the losses above; the second reference is the first. */
    AMPI_ENTRY(mean_forward, amp_ref, amp_ref, float*, size_t)
    AMPI_ENTRY(mean_backward, amp_ref, amp_ref, const float*, float, amp_ref, size_t)
    /* Training, on gradients and weights in the processor's memory. open: t->scaler is
       initialised. begin: takes over what the caller has changed in t, and sets t->loss_scale and
       t->position of a pass; window 0 = no step follows. pass: the first work of each pass.
       losses: one not finite makes the window unsound. check: flags[0] (in the backend's memory) =
       1 if a gradient is not finite, flags[1] = 1 if the window is unsound, else 0. agree: takes
       over flags that are not 0. step: skips or updates, moves the loss scale, and after a skip
       copies `bytes` bytes from saved to now. read: waits, and brings t up to date. abandon: after
       an error. */
    AMPI_ENTRY(training_open, amp_training* t, const amp_optimizer_desc* desc, amp_param* params,
        int count)
    void (*training_close)(amp_training* t, const amp_exec* exec);
    AMPI_ENTRY(training_begin, amp_training* t, int window)
    AMPI_ENTRY(training_pass, amp_training* t)
    AMPI_ENTRY(training_losses, amp_training* t, const float* losses, int count)
    AMPI_ENTRY(training_check, amp_training* t, const amp_tensor* grads, int count, float* flags)
    AMPI_ENTRY(training_agree, amp_training* t, const float* flags)
    AMPI_ENTRY(training_step, amp_training* t, void* now, const void* saved, size_t bytes)
    AMPI_ENTRY(training_read, amp_training* t)
    void (*training_abandon)(amp_training* t, const amp_exec* exec);
    /* Work of a step that is equal for each batch may be recorded once under a key and replayed.
       record_end returns the result of the recorded calls, or its own failure, after which nothing
       recorded has run. */
    AMPI_ENTRY(record, amp_training* t, uint64_t key, amp_record* mode)
    AMPI_ENTRY(record_end, amp_training* t, amp_result body)
    /* linear_forward and conv2d_forward, then ReLU. */
    AMPI_ENTRY(linear_relu_forward, amp_ref, amp_ref, amp_ref, amp_ref, size_t, size_t, size_t)
    AMPI_ENTRY(conv2d_relu_forward, const amp_conv2d_shape*, amp_ref, amp_ref, amp_ref, amp_ref)
};
#undef AMPI_ENTRY
#ifdef __cplusplus
} /* extern "C" */
#endif
#endif

/* >>impl     Stop here if you only want the interface. */
#if defined(AMP_IMPLEMENTATION) && !defined(AMPI_IMPLEMENTATION_ONCE)
#define AMPI_IMPLEMENTATION_ONCE

/* >>impl-base   What all rooms use: compilers, messages, memory, arithmetic that rounds the same
   everywhere, random numbers.
   Words. refuse: to return a result code after the logger has its sentence. span: the addresses
   of an array. This room calls no other.
   Macros that use variables of the function around them. `logger`: AMPI_REFUSE_CALL. `exec`:
   AMPI_REFUSE_OP, AMPI_COMPUTE_OP, AMPI_DONE_OP, AMPI_GROW_WORKSPACE, AMPI_CHECK. The model
   `m`: AMPI_EACH_NODE, AMPI_DRAFT, AMPI_OF_MODEL, AMPI_REFUSE, AMPI_REFUSE_LAYER, ampi_run,
   ampi_model_fail, ampi_build_fail. The file `f`: AMPI_REFUSE_AS, AMPI_REFUSE_FILE,
   AMPI_BAD_PATH. Arguments of an operator on rows, `f`: AMPI_OPEN_READER. Others are undefined
   where their table or switch ends. */

/* not with -fshort-enums */
typedef char ampi_enums_are_int[sizeof(amp_result) == sizeof(int) ? 1 : -1];
#include <fenv.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* FN: a private function, perhaps unused (AMP_NO_STDIO, AMP_STATIC, other processors). APART: its
   large arrays are on the stack only while it runs. INLINE goes into each instruction set's copy of
   a kernel, even where a host has defined `inline` away. MAYBE: a parameter, perhaps unused. FETCH
   asks for a cache line, perhaps outside of all arrays. ALIGNED: for arrays on the stack read as
   vectors, which are slow across two cache lines. FORGET: the compiler forgets what it knows of the
   memory at p; -ffast-math would take values for finite and drop the test of their bits. */
#if (defined(__GNUC__) || defined(__clang__)) && !defined(__TINYC__)
  #define AMPI_GNU 1
  #define AMPI_FN static __attribute__((unused))
  #define AMPI_APART static __attribute__((noinline, unused))
  #define AMPI_INLINE static __inline__ __attribute__((always_inline, unused))
  #define AMPI_MAYBE __attribute__((unused))
  #define AMPI_RESTRICT __restrict__
  #define AMPI_FETCH(p, byte) __builtin_prefetch((const void*)((uintptr_t)(p) + (byte)))
  #define AMPI_ALIGNED __attribute__((aligned(64)))
  #define AMPI_LOAD_RELAXED(p) __atomic_load_n(p, __ATOMIC_RELAXED)
  #define AMPI_STORE_RELAXED(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#else
  #define AMPI_GNU 0
  #define AMPI_FN static
  #define AMPI_APART static
  #define AMPI_MAYBE
  #if defined(_MSC_VER)
    #define AMPI_INLINE static __forceinline
    #define AMPI_RESTRICT __restrict
  #else
    #define AMPI_INLINE static
    #define AMPI_RESTRICT
  #endif
  #define AMPI_FETCH(p, byte) ((void)(p), (void)(byte))
  #define AMPI_ALIGNED
  #define AMPI_LOAD_RELAXED(p) (*(volatile int*)(p))
  #define AMPI_STORE_RELAXED(p, v) (*(volatile int*)(p) = (v))
#endif
#if AMPI_GNU && !defined(__CUDA_ARCH__)
  #define AMPI_FORGET(p) __asm__ volatile("" : : "r"(p) : "memory")
#else
  #define AMPI_FORGET(p) ((void)(p))
#endif
/* Functions of vectors: calls where nothing is optimised, since inlined copies would each take
   stack. */
#if AMPI_GNU && !defined(__OPTIMIZE__)
  #define AMPI_VECTOR AMPI_FN
#else
  #define AMPI_VECTOR AMPI_INLINE
#endif
/* Around rooms whose loops need no speed: gcc takes two thirds of the time. */
#if AMPI_GNU && !defined(__clang__) && defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__)
  #define AMPI_COMPILE_QUICKLY _Pragma("GCC push_options") _Pragma("GCC optimize(\"O1\")")
  #define AMPI_COMPILE_WELL _Pragma("GCC pop_options")
#else
  #define AMPI_COMPILE_QUICKLY
  #define AMPI_COMPILE_WELL
#endif

/* Loops over fewer elements stay on one thread. */
#define AMPI_PARALLEL_MIN 65536u
/* Loops run over chunks of a fixed size, so bits do not depend on the number of threads.
   PARALLEL_FOR has its `for`, over an int64_t, twice, since a region costs time even where its `if`
   is false. PARALLEL_ORDERED: threads share `work`; the rest they do in the loop's order. In a
   REGION each thread has the caller's floating-point environment, with the exceptions that it
   masks. */
#if defined(_OPENMP) && !defined(AMP_NO_OPENMP)
  #include <omp.h>
  #define AMPI_PRAGMA(x) _Pragma(#x)
  #define AMPI_REGION(...) { \
        fenv_t caller_; \
        fegetenv(&caller_); \
        AMPI_PRAGMA(omp parallel) { \
            fenv_t own_; \
            fegetenv(&own_); \
            if (omp_get_thread_num() > 0) fesetenv(&caller_); \
            __VA_ARGS__; \
            if (omp_get_thread_num() > 0) fesetenv(&own_); \
        } }
  #define AMPI_PARALLEL_FOR(condition, ...) do { \
        if (condition) \
            AMPI_REGION(AMPI_PRAGMA(omp for schedule(static)) __VA_ARGS__) else { \
                __VA_ARGS__; } } while (0)
  #define AMPI_PARALLEL_ORDERED(condition, head, work, ...) do { \
        if (condition) AMPI_REGION(AMPI_PRAGMA(omp for schedule(static, 1) ordered) \
            head { work; AMPI_PRAGMA(omp ordered) { __VA_ARGS__; } }) \
        else { head { work; __VA_ARGS__; } } } while (0)
#else
  #define AMPI_PARALLEL_FOR(condition, ...) __VA_ARGS__
  #define AMPI_PARALLEL_ORDERED(condition, head, work, ...) head { work; __VA_ARGS__; }
#endif
#define AMPI_PARALLEL_OVER(elements, ...) \
    AMPI_PARALLEL_FOR((elements) >= AMPI_PARALLEL_MIN, __VA_ARGS__)

/* With strict -std=, gcc for s390x can sum floats in double (FLT_EVAL_METHOD 1): other bits. */
#if defined(__GNUC__) && !defined(__clang__) \
    && defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ == 1
  #define AMPI_PLAIN_FLOATS 1
  #pragma GCC push_options
  #pragma GCC optimize("excess-precision=fast")
#endif

#ifdef __cplusplus
extern "C" {
#endif

AMP_DEF const char* amp_result_string(amp_result r) {
    switch (r) {
#define AMPI_X(name, code, text) case AMP_##name: return text;
        AMP_RESULT_LIST(AMPI_X)
#undef AMPI_X
    }
    return "unknown result code";
}

/* Bytes of a floating-point element; 0 for another type. */
AMPI_INLINE size_t ampi_type_size(amp_dtype t) {
    return t == AMP_F16 || t == AMP_BF16 ? 2 : t == AMP_F32 || t == AMP_DTYPE_DEFAULT ? 4
        : t == AMP_F64 ? 8 : 0;
}

AMP_DEF size_t amp_dtype_size(amp_dtype t) {
    return t == AMP_U8 ? 1 : t == AMP_I32 ? 4 : t == AMP_I64 ? 8 : ampi_type_size(t);
}

/* The name of an enumerator; values count from 0. Each name ends with a 0, the last with two. */
AMPI_FN const char* ampi_name_among(const char* names, unsigned value) {
    for (; value > 0 && *names; value--) names += strlen(names) + 1;
    return *names ? names : "?";
}

/* One struct for operands that are read and for results: const is dropped here. */
AMP_DEF amp_ref amp_ref_of(const void* p, amp_dtype dtype) {
    amp_ref x;
    x.data = (void*)(uintptr_t)p;
    x.dtype = dtype;
    return x;
}

AMP_DEF amp_ref amp_f32(const float* p) { return amp_ref_of(p, AMP_F32); }
AMP_DEF amp_ref amp_f16(const amp_half* p) { return amp_ref_of(p, AMP_F16); }
AMP_DEF amp_ref amp_bf16(const amp_bfloat16* p) { return amp_ref_of(p, AMP_BF16); }

#define AMPI_NAMES(function, type, names) \
    AMP_DEF const char* function(type value) { return ampi_name_among(names, (unsigned)value); }
AMPI_NAMES(amp_dtype_name, amp_dtype, "f32\0f32\0f16\0bf16\0f64\0u8\0i32\0i64\0")
/* The type that a field means: 0 is F32. */
AMPI_HD AMPI_INLINE amp_dtype ampi_dtype_or_f32(amp_dtype t) {
    return t == AMP_DTYPE_DEFAULT ? AMP_F32 : t;
}

/* A type that operators compute on. */
AMPI_FN int ampi_is_compute_dtype(amp_dtype t) {
    return ampi_type_size(t) == 2 || ampi_type_size(t) == 4;
}

#if !defined(AMP_NO_STDIO)
AMP_DEF void amp_log_stderr(amp_result code, const char* sentence, void* user_data) {
    (void)code; (void)user_data;
    fprintf(stderr, "amp: %s\n", sentence);
}
#endif

typedef unsigned long long ampi_ull;  /* sizes and counts for "%llu" */
/* A caller's size for "%lld": one that was negative before it became a size_t is so again. */
AMPI_FN long long ampi_shown(size_t n) { return (long long)(ptrdiff_t)n; }

/* Bits of a float and back; memcpy is the only punning that every compiler honours. */
AMPI_HD AMPI_INLINE uint32_t ampi_bits(float f) { uint32_t u; memcpy(&u, &f, sizeof u); return u; }
AMPI_HD AMPI_INLINE uint32_t ampi_magnitude(float f) { return ampi_bits(f) & 0x7fffffffu; }
AMPI_HD AMPI_INLINE float ampi_float(uint32_t u) { float f; memcpy(&f, &u, sizeof f); return f; }

/* The bits of a double. */
AMPI_HD AMPI_INLINE uint64_t ampi_bits64(double d) {
    uint64_t u;
    memcpy(&u, &d, sizeof u);
    return u;
}

AMPI_HD AMPI_INLINE double ampi_double(uint64_t u) { double d; memcpy(&d, &u, sizeof d); return d; }
#define AMPI_HASH_START 14695981039346656037u
/* FNV-1a over 32-bit words, as the same on each machine. */
AMPI_FN uint64_t ampi_hash_words(uint64_t h, const void* words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, (const char*)words + 4 * i, 4);
        h = (h ^ word) * 1099511628211u;
    }
    return h;
}

#define AMPI_INF64 0x7ff0000000000000u  /* of an infinite double; those of a NaN are more */

/* Bits in memory tell a NaN under any compiler flag. */
AMPI_FN uint64_t ampi_bits64_at(const double* p) {
    uint64_t u;
    AMPI_FORGET(p);
    memcpy(&u, p, sizeof u);
    return u;
}

AMPI_FN size_t ampi_min_size(size_t a, size_t b) { return a < b ? a : b; }

/* --- texts: what printf writes, in whatever locale the program is --- */
/* Digits of a double, as many as any has. */
enum { AMPI_DIGITS = 1100 };

/* The decimal digits of a finite double, exact, the lowest first, with zeros above. magnitude: its
   bits without the sign. Returns how many; d[*ones] is that of the ones. */
AMPI_FN int ampi_decimal(uint64_t magnitude, char d[AMPI_DIGITS], int* ones) {
    uint64_t integer = magnitude & 0xfffffffffffffu;
    int power = (int)(magnitude >> 52), count = 0, factor = 2;
    memset(d, 0, AMPI_DIGITS);

    /* The number is integer * 2^power. */
    if (power > 0) integer |= (uint64_t)1 << 52;
    else power = 1;  /* a subnormal */
    power -= 1075;
    for (; power < 0 && integer % 2 == 0; power++) integer /= 2;
    for (; integer > 0; integer /= 10) d[count++] = (char)(integer % 10);

    /* Digits times 2^power. 2^-k is 5^k / 10^k, so that k digits stand behind the point. */
    *ones = power < 0 ? -power : 0;
    if (power < 0) { power = -power; factor = 5; }
    for (; power > 0; power--) {
        int i, carry = 0;
        for (i = 0; i < count || carry > 0; i++) {
            carry += d[i] * factor;
            d[i] = (char)(carry % 10);
            carry /= 10;
        }
        count = i;
    }
    return count;
}

/* Rounds the lowest `drop` of `count` digits away; a tie goes to even. Returns how many digits
   there are then. */
AMPI_FN int ampi_decimal_round(char d[AMPI_DIGITS], int count, int drop) {
    int rest = 0, i;  /* rest: not 0 if any digit below the first one dropped is */
    if (drop <= 0) return count;
    for (i = 0; i < drop - 1; i++) rest |= d[i];
    int up = d[drop - 1] > 5 || (d[drop - 1] == 5 && (rest || d[drop] % 2));
    memset(d, 0, (size_t)drop);

    for (i = drop; up; i++) {
        up = d[i] == 9;
        d[i] = (char)(up ? 0 : d[i] + 1);
        if (i >= count) count = i + 1;
    }
    return count;
}

/* A number in a base, with zeros before it to at least so many digits. Returns the text's
   length. */
AMPI_FN size_t ampi_write_unsigned(char* out, uint64_t value, unsigned base, size_t least) {
    size_t n = 0;
    for (uint64_t rest = value; n < least || rest > 0; rest /= base) n++;
    for (size_t i = n; i > 0; value /= base) out[--i] = "0123456789abcdef"[value % base];
    return n;
}

/* x as by "%.<precision>g", or f, in the C locale. Returns the text's length. */
AMPI_FN size_t ampi_write_float(char* out, double x, int precision, char kind) {
    const uint64_t bits = ampi_bits64_at(&x), magnitude = bits & ~((uint64_t)1 << 63);
    /* Digits, the lowest first; d[ones] stands before the point, `decimals` of them behind it. */
    char d[AMPI_DIGITS], *at = out;
    int ones, exponent = 0, decimals = precision;
    if (bits != magnitude) *at++ = '-';
    if (magnitude >= AMPI_INF64) {
        memcpy(at, magnitude == AMPI_INF64 ? "inf" : "nan", 3);
        return (size_t)(at + 3 - out);
    }
    int count = ampi_decimal(magnitude, d, &ones);

    if (kind == 'f') count = ampi_decimal_round(d, count, ones - decimals);
    else {
        if (precision == 0) precision = 1;
        count = ampi_decimal_round(d, count, count - precision);
        if (count > 0) exponent = count - 1 - ones;
        /* With an exponent the point stands behind the first digit. */
        if (exponent >= -4 && exponent < precision) exponent = 0;
        else ones = count - 1;
        for (decimals = ones; decimals > 0 && d[ones - decimals] == 0;) decimals--;
    }

    /* Digits from the first one or the ones on; those that d lacks at its end are 0. */
    for (int i = count > ones ? count - 1 : ones; i >= ones - decimals; i--) {
        *at++ = (char)('0' + (i < 0 ? 0 : d[i]));
        if (i == ones && decimals > 0) *at++ = '.';
    }
    if (exponent != 0) {
        *at++ = 'e';
        *at++ = exponent < 0 ? '-' : '+';
        at += ampi_write_unsigned(at, (uint64_t)(exponent < 0 ? -exponent : exponent), 10, 2);
    }
    return (size_t)(at - out);
}

/* The next of the arguments, as by "%d", u or x, with ll before it if `is_long`. Returns the text's
   length. */
AMPI_FN size_t ampi_write_integer(char* out, va_list* args, int is_long, char kind, size_t least) {
    const int64_t x = kind == 'd' ? (is_long ? va_arg(*args, long long) : va_arg(*args, int))
        : is_long ? (int64_t)va_arg(*args, ampi_ull) : va_arg(*args, unsigned);
    const int sign = kind == 'd' && x < 0;
    *out = '-';
    return (size_t)sign
        + ampi_write_unsigned(out + sign, sign ? 0 - (uint64_t)x : (uint64_t)x,
            kind == 'x' ? 16 : 10, least);
}

/* The width or precision at *format: digits, or * for the next of the arguments. */
AMPI_FN int ampi_format_size(const char** format, va_list* args) {
    int size = 0;
    if (**format == '*') { ++*format; return va_arg(*args, int); }
    for (; **format >= '0' && **format <= '9'; ++*format) size = 10 * size + **format - '0';
    return size;
}

/* Adds n bytes of a text, or with text = NULL n spaces, behind *at bytes of out[size]; leaves out
   what does not fit. */
AMPI_FN void ampi_append(char* out, size_t size, size_t* at, const char* text, size_t n) {
    n = ampi_min_size(n, size - 1 - *at);
    if (text) memcpy(out + *at, text, n);
    else memset(out + *at, ' ', n);
    *at += n;
}

/* vsnprintf in no locale, of %s %c %d %u %x %g %f %% with -, width, precision and ll. Returns the
   length of what fitted. */
AMPI_FN size_t ampi_format(char* out, size_t size, const char* format, va_list* args) {
    char number[AMPI_DIGITS];
    size_t at = 0;
    for (;;) {
        /* The text up to the next %, or to the end. */
        size_t n = strcspn(format, "%");
        ampi_append(out, size, &at, format, n);
        format += n;
        if (!*format) break;

        /* %-<width>.<precision>ll<kind> */
        const int is_left = *++format == '-';
        format += is_left;
        const size_t width = (size_t)ampi_format_size(&format, args);
        const int is_precise = *format == '.';
        format += is_precise;
        const int precision = ampi_format_size(&format, args);
        const int is_long = *format == 'l';
        format += 2 * is_long;
        const char kind = *format++, *text = number;

        /* The argument as a text of n bytes. */
        n = 1;
        if (kind == 's') {
            text = va_arg(*args, const char*);
            for (n = 0; !(is_precise && n == (size_t)precision) && text[n];) n++;
        } else if (kind == 'g' || kind == 'f')
            n = ampi_write_float(number, va_arg(*args, double), is_precise ? precision : 6, kind);
        else if (kind == 'c') number[0] = (char)va_arg(*args, int);
        else if (kind == '%') number[0] = '%';
        else
            n = ampi_write_integer(number, args, is_long, kind, is_precise ? (size_t)precision : 1);

        /* Spaces up to the width, before the text or behind it. */
        const size_t pad = width > n ? width - n : 0;
        if (!is_left) ampi_append(out, size, &at, NULL, pad);
        ampi_append(out, size, &at, text, n);
        if (is_left) ampi_append(out, size, &at, NULL, pad);
    }
    out[at] = 0;
    return at;
}

#if AMPI_GNU
  #define AMPI_PRINTF(sentence, first) __attribute__((format(printf, sentence, first), unused))
#else
  #define AMPI_PRINTF(sentence, first)
#endif
/* Formats into out[size] and returns the text's length; SAY: into an array. */
AMPI_PRINTF(3, 4) static size_t ampi_say(char* out, size_t size, const char* format, ...) {
    va_list args;
    va_start(args, format);
    size = ampi_format(out, size, format, &args);
    va_end(args);
    return size;
}

#define AMPI_SAY(text, ...) ampi_say(text, sizeof (text), __VA_ARGS__)

#if !defined(AMP_NO_STDIO)
/* Writes a text of less than 600 bytes. */
AMPI_PRINTF(2, 3) static void ampi_print(FILE* out, const char* format, ...) {
    char text[600];
    va_list args;
    va_start(args, format);
    ampi_format(text, sizeof text, format, &args);
    va_end(args);
    fputs(text, out);
}
#endif

/* What hears of calls without a logger. */
#if defined(AMP_LOG_DEFAULT)
void AMP_LOG_DEFAULT(amp_result code, const char* sentence, void* user_data);
static const amp_logger ampi_default_logger = { AMP_LOG_DEFAULT, NULL };
#else
static const amp_logger ampi_default_logger = { NULL, NULL };
#endif

/* Formats a sentence for the logger and returns the code. */
AMPI_PRINTF(3, 4) static amp_result ampi_fail(const amp_logger* logger, amp_result code,
        const char* format, ...) {
    char sentence[512], *p;
    va_list args;
    if (!logger || !logger->log) logger = &ampi_default_logger;
    if (!logger->log) return code;
    va_start(args, format);
    ampi_format(sentence, sizeof sentence, format, &args);
    va_end(args);
    /* a name may hold anything */
    for (p = sentence; *p; p++) if ((unsigned char)*p < 0x20) *p = ' ';
    (logger->log)(code, sentence, logger->user_data);  /* log: perhaps a macro */
    return code;
}

/* A sentence beside a call that went well. */
#define ampi_remark(logger, ...) ((void)ampi_fail(logger, AMP_OK, __VA_ARGS__))
/* All return from the function: REFUSE on a condition, with a code and a sentence for a logger
   (REFUSE_CALL: `logger`, REFUSE_OP: that of `exec`); TRY on a failed call. */
#define AMPI_REFUSE_WITH(logger, condition, ...) \
    do { if (condition) return ampi_fail(logger, __VA_ARGS__); } while (0)
#define AMPI_REFUSE_CALL(...) AMPI_REFUSE_WITH(logger, __VA_ARGS__)
#define AMPI_REFUSE_OP(...) AMPI_REFUSE_WITH(ampi_exec_logger(exec), __VA_ARGS__)
#define AMPI_TRY(call) do { const amp_result r_ = (call); if (r_ != AMP_OK) return r_; } while (0)

AMPI_FN const amp_logger* ampi_exec_logger(const amp_exec* exec) {
    return exec ? exec->logger : NULL;
}

/* Refuses an exec whose operands are no type that products round to. */
AMPI_FN amp_result ampi_check_exec(const amp_exec* exec, const char* call) {
    const amp_dtype t = exec ? exec->operands : AMP_DTYPE_DEFAULT;
    AMPI_REFUSE_OP(t != AMP_DTYPE_DEFAULT && t != AMP_F16 && t != AMP_BF16, AMP_ERR_DTYPE,
        "%s: the exec's operands are %s (%d); they must be f16, bf16 or 0", call,
        amp_dtype_name(t), (int)t);
    return AMP_OK;
}

/* Every operator computes between these two, behind its checks. Exceptions that exec masks are as
   they were at the end, where DONE_OP returns AMP_OK. */
#define AMPI_COMPUTE_OP \
    fenv_t floats; \
    const int masked = exec && exec->mask_exceptions; \
    if (masked) feholdexcept(&floats)
#define AMPI_DONE_OP do { if (masked) fesetenv(&floats); return AMP_OK; } while (0)

/* Is a C string valid UTF-8 (Unicode, table 3-7)? Too long a form, a surrogate, a code above
   U+10FFFF are not. */
AMPI_FN int ampi_is_utf8(const char* text) {
    static const uint32_t least[] = { 0, 0x80, 0x800, 0x10000 };
    const unsigned char* s;
    for (s = (const unsigned char*)text; *s; s++) {
        int more = *s < 0x80 ? 0 : *s < 0xe0 ? 1 : *s < 0xf0 ? 2 : 3, i;
        uint32_t code = more ? *s & (0x3fu >> more) : *s;
        if ((*s & 0xc0) == 0x80 || *s >= 0xf8) return 0;
        for (i = 0; i < more; i++) {
            if ((*++s & 0xc0) != 0x80) return 0;
            code = code << 6 | (*s & 0x3fu);
        }
        if (code < least[more] || code >> 11 == 0xd800 >> 11 || code > 0x10ffff) return 0;
    }
    return 1;
}

/* Elements of an array. */
#define AMPI_LENGTH(array) (sizeof (array) / sizeof *(array))
#define AMPI_CLEAR(x) memset(&(x), 0, sizeof (x))

AMPI_FN size_t ampi_round_up(size_t a, size_t b) { return (a + b - 1) / b * b; }

/* at least 1 */
AMPI_FN size_t ampi_div_up(size_t a, size_t b) { return a <= b ? 1 : (a + b - 1) / b; }

/* *out = a * b; returns 0 where that does not fit a size_t. */
AMPI_FN int ampi_mul_size(size_t a, size_t b, size_t* out) {
    *out = a * b;
    return b == 0 || a <= SIZE_MAX / b;
}

/* *out = a + b; 0 if that overflows. */
AMPI_FN int ampi_add_size(size_t a, size_t b, size_t* out) {
    *out = a + b;
    return a <= SIZE_MAX - b;
}

/* An operand of a call: `rows` rows of `cols` elements, `ld` elements apart. It is read (IN) or
   written (OUT) or added to (ADDS), may be NULL, or the call ignores it (UNUSED); two that are SAME
   may be one. */
enum { AMPI_IN = 0, AMPI_OUT = 1, AMPI_SAME = 2, AMPI_NULL = 4, AMPI_UNUSED = 8, AMPI_ADDS = 16 };
typedef struct ampi_argument {
    const char* name;
    const void* data;
    amp_dtype   dtype;
    int         use;  /* a sum of the above */
    size_t      rows, cols, ld;
} ampi_argument;
#define AMPI_FLAT(n) 1, (n), (n)  /* a vector or a packed tensor of n elements */

/* Do two operands share a byte? Row j of q begins d + (j - i) * pitch bytes behind row i of p. They
   meet if that is above -width[1] and below width[0], width being a row's bytes. Packed rows are
   one long row. Different pitches count as apart. */
AMPI_FN int ampi_arguments_meet(const ampi_argument* p, const ampi_argument* q) {
    const int64_t d = (int64_t)((uint64_t)(uintptr_t)q->data - (uint64_t)(uintptr_t)p->data);
    int64_t count[2], width[2], pitch = 1;  /* of p and q: rows, bytes of a row */
    for (int i = 0; i < 2; i++) {
        const ampi_argument* a = i ? q : p;
        const int64_t size = (int64_t)ampi_type_size(a->dtype);
        /* there is no such memory */
        if (a->rows == 0 || a->cols == 0 || a->ld > SIZE_MAX / 16 / a->rows) return 0;
        int64_t step = (int64_t)a->ld * size;
        count[i] = (int64_t)a->rows;
        width[i] = (int64_t)a->cols * size;
        if (step == width[i]) { width[i] *= count[i]; count[i] = 1; }
        if (count[i] == 1) continue;
        if (pitch != 1 && pitch != step) return 0;
        pitch = step;
    }

    /* The least t = j - i with which a row of q ends behind the beginning of one of p. */
    int64_t t = 1 - count[0];
    if (d + t * pitch <= -width[1]) t += (-width[1] - (d + t * pitch)) / pitch + 1;
    return t < count[1] && d + t * pitch < width[0];
}

/* Refuses a call that would overwrite an operand it still needs. */
AMPI_FN amp_result ampi_check_apart(const amp_logger* logger, const char* call,
        const ampi_argument* list, size_t count) {
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < count; k++) {
            const ampi_argument *w = &list[i], *o = &list[k];  /* written, other */
            const int one = (w->use & o->use & AMPI_SAME) && w->data == o->data
                && ampi_dtype_or_f32(w->dtype) == ampi_dtype_or_f32(o->dtype);
            if (i == k || one || !(w->use & AMPI_OUT) || ((w->use | o->use) & AMPI_UNUSED))
                continue;
            AMPI_REFUSE_CALL(w->data && o->data && ampi_arguments_meet(w, o), AMP_ERR_ARGUMENT,
                "%s: %s would be written over %s: their memory overlaps", call, w->name, o->name);
        }
    return AMP_OK;
}

/* One of many arrays: bytes `from` up to `to`; none if these are equal. at(list, id) gives array
   id. */
typedef struct ampi_array { uint64_t from, to; int written; } ampi_array;
typedef ampi_array (*ampi_array_fn)(const void* list, size_t id);
/* An array's addresses; an empty span for NULL. */
AMPI_FN ampi_array ampi_array_of(const void* data, size_t bytes, int written) {
    const uint64_t from = (uint64_t)(uintptr_t)data;
    const ampi_array a = { from, data ? from + bytes : from, written };
    return a;
}

enum { AMPI_SPANS = 16 };

/* Widens the nearest of a list's spans, or begins one more, so that they hold x. Returns 1 if x met
   one of them. */
AMPI_FN int ampi_spans_add(ampi_array* spans, int* count, ampi_array x) {
    ampi_array* nearest = spans;
    uint64_t least = UINT64_MAX;
    int meets = 0;
    for (ampi_array* s = spans; s < spans + *count; s++) {
        const uint64_t gap = x.from > s->to ? x.from - s->to : s->from > x.to ? s->from - x.to : 0;
        meets |= x.from < s->to && s->from < x.to;
        if (gap < least) nearest = s;
        if (gap < least) least = gap;
    }

    if (least > 0 && *count < AMPI_SPANS) {
        spans[(*count)++] = x;
        return 0;
    }
    if (x.from < nearest->from) nearest->from = x.from;
    if (x.to > nearest->to) nearest->to = x.to;
    return meets;
}

/* Do two arrays share a byte, one of them written? *a < *b are then such two. An array is compared
   with those before it only if it meets one of the spans that hold them. */
AMPI_FN int ampi_arrays_meet(const void* list, ampi_array_fn at, size_t count, size_t* a,
        size_t* b) {
    ampi_array spans[AMPI_SPANS];
    int span_count = 0;
    for (size_t i = 0; i < count; i++) {
        const ampi_array y = at(list, i);
        if (y.from == y.to || !ampi_spans_add(spans, &span_count, y)) continue;
        for (size_t k = 0; k < i; k++) {
            const ampi_array x = at(list, k);
            if (x.from >= x.to || x.from >= y.to || y.from >= x.to || !(x.written | y.written))
                continue;
            *a = k;
            *b = i;
            return 1;
        }
    }
    return 0;
}

/* Memory from the allocator, or malloc; never of size 0. */
AMPI_FN void* ampi_alloc(size_t size, const amp_allocator* a) {
    if (size == 0) size = 1;
    return a && a->alloc ? (a->alloc)(size, a->user_data) : malloc(size);
}

AMPI_FN void ampi_free(void* p, const amp_allocator* a) {
    if (!p) return;
    if (a && a->free) (a->free)(p, a->user_data);
    else free(p);
}

/* Frees the memory; NULL is fine. */
AMP_DEF void amp_workspace_free(amp_workspace* w) {
    if (!w) return;
    if (w->backend && w->data) w->backend->free(w->data, &w->allocator);
    else ampi_free(w->data, &w->allocator);
    w->data = NULL;
    w->size = 0;
}

/* A copy of *exec whose workspace is the one that grows: of `bytes` bytes at least, or none where
   there is no memory for them. The copy grows no further. */
AMPI_FN amp_exec ampi_exec_grown(const amp_exec* exec, size_t bytes) {
    amp_exec own = *exec;
    amp_workspace* w = exec->grows;
    if (w->size < bytes) {
        amp_workspace_free(w);
        w->data = w->backend ? w->backend->alloc(bytes, &w->allocator)
            : ampi_alloc(bytes, &w->allocator);
        if (w->data) w->size = bytes;
    }
    own.workspace = w->data;
    own.workspace_size = w->size;
    own.grows = NULL;
    return own;
}

/* Gives a call whose exec may grow its workspace a copy of it with that many bytes. */
#define AMPI_GROW_WORKSPACE(bytes) \
    amp_exec grown; \
    if (exec && exec->grows) { grown = ampi_exec_grown(exec, bytes); exec = &grown; }

AMPI_FN void ampi_swap_records(unsigned char* a, unsigned char* b, size_t size) {
    for (; size > 0; size--, a++, b++) { const unsigned char t = *a; *a = *b; *b = t; }
}

/* Of records that begin with their name. */
AMPI_FN int ampi_by_name(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

/* Merges two sorted runs of records that stand one behind the other. */
AMPI_FN void ampi_merge(char* to, size_t left, size_t right, size_t size,
        int (*order)(const void*, const void*), char* scratch) {
    const char *a = scratch, *a_end = a + left, *b = to + left, *b_end = b + right;
    if (left == 0 || right == 0 || order(b - size, b) <= 0) return;
    memcpy(scratch, to, left);
    for (; a < a_end; to += size)
        if (b < b_end && order(a, b) > 0) { memcpy(to, b, size); b += size; }
        else { memcpy(to, a, size); a += size; }
}

/* Merge sort: n log n for every input, hostile ones too, which qsort does not promise. Names are
   read in the order of memory, while heap sort waits for each. scratch: room for half of the
   records, rounded up. */
AMPI_FN void ampi_sort(void* records, size_t n, size_t size,
        int (*order)(const void*, const void*), void* scratch) {
    char* base = (char*)records;
    uint64_t parts = 1;
    while (parts < n) parts *= 2;
    for (; parts > 1; parts /= 2)
        for (uint64_t i = 0; i < parts; i += 2) {
            const size_t at = (size_t)(n * i / parts), middle = (size_t)(n * (i + 1) / parts);
            const size_t end = (size_t)(n * (i + 2) / parts);
            ampi_merge(base + at * size, (middle - at) * size, (end - middle) * size, size, order,
                (char*)scratch);
        }
}

/* Sorts by name, with the scratch of ampi_sort, and returns a name that occurs twice, or NULL. */
AMPI_FN const char* ampi_sort_names(void* records, size_t n, size_t size, void* scratch) {
    const char* record = (const char*)records;
    ampi_sort(records, n, size, ampi_by_name, scratch);
    for (; n > 1; n--, record += size)
        if (ampi_by_name(record, record + size) == 0)
            return *(const char* const*)(const void*)record;
    return NULL;
}

/* Tests of bits in memory hold for NaN under any compiler flag. */
AMPI_HD AMPI_FN uint32_t ampi_bits_at(const float* p) {
    uint32_t u;
    AMPI_FORGET(p);
    memcpy(&u, p, sizeof u);
    return u;
}

AMPI_HD AMPI_FN int ampi_is_zero(const float* p) { return ampi_bits_at(p) << 1 == 0; }
AMPI_HD AMPI_FN int ampi_has_finite_bits(const float* p) {
    return (ampi_bits_at(p) & 0x7f800000u) != 0x7f800000u;
}

AMPI_FN int ampi_is_zero64(const double* p) { return ampi_bits64_at(p) << 1 == 0; }
AMPI_FN int ampi_is_finite64(const double* p) {
    return (ampi_bits64_at(p) & AMPI_INF64) != AMPI_INF64;
}

/* AMP_ZERO */
AMPI_HD AMPI_FN int ampi_is_off(const float* p) { return ampi_bits_at(p) == 0xbf800000u; }
AMPI_FN int ampi_in_range(const float* p, float low, float upper) {
    return ampi_has_finite_bits(p) && *p >= low && *p <= upper;
}

/* Rates that must stay below one. */
#define AMPI_BELOW_ONE 0.99999994f

/* Desc fields: 0 = default, AMP_ZERO = really zero. */
AMPI_HD AMPI_FN float ampi_default_at(const float* p, float value) {
    return ampi_is_zero(p) ? value : ampi_is_off(p) ? 0.0f : *p;
}

AMPI_FN int ampi_default_int(int v, int def) { return v == 0 ? def : (v == AMP_ZERO ? 0 : v); }

/* a*b + c rounded once, without the processor's instruction: the sum is formed in double, where a
   product of floats is exact, and rounded to odd, then to float (Boldo & Melquiond 2008). */
AMPI_HD AMPI_FN float ampi_fma_soft(float a, float b, float c) {
    volatile double p = (double)a * (double)b, s = p + (double)c;
    double t = s - p, sum = s;
    volatile double err = (p - (s - t)) + ((double)c - t);
    uint64_t u = ampi_bits64(sum);
    if (err != 0.0 && !(u & 1u) && (u & AMPI_INF64) != AMPI_INF64)
        u = ((err > 0.0) == (sum > 0.0)) ? u + 1u : u - 1u;
    return (float)ampi_double(u);
}

/* Rounding the double sum errs only exactly between two floats, or below the normal floats. */
AMPI_HD AMPI_INLINE float ampi_fma_emulated(float a, float b, float c) {
    double sum = (double)a * (double)b + (double)c;
    uint64_t u = ampi_bits64(sum), magnitude = u & 0x7fffffffffffffffu;
    if ((u & 0x1fffffffu) != 0x10000000u && (magnitude >= 0x3810000000000000u || magnitude == 0))
        return (float)sum;
    return ampi_fma_soft(a, b, c);
}

AMPI_HD AMPI_APART float ampi_fma_plain(float a, float b, float c) {
    return ampi_fma_emulated(a, b, c);
}

/* Is the whole file compiled for a processor with fma? */
#if defined(__FP_FAST_FMAF) || defined(__aarch64__) || (defined(__FMA__) && defined(__GNUC__))
  #define AMPI_FMA_NATIVE 1
#else
  #define AMPI_FMA_NATIVE 0
#endif
/* a*b + c rounded once. hw, a constant: 1 in kernels for processors with the instruction. */
AMPI_HD AMPI_INLINE float ampi_fma(int hw, float a, float b, float c) {
    (void)hw;
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#elif AMPI_GNU
    return hw || AMPI_FMA_NATIVE ? __builtin_fmaf(a, b, c) : ampi_fma_plain(a, b, c);
#else
    return ampi_fma_plain(a, b, c);
#endif
}

/* Philox4x32-10: ten rounds of two 32x32->64 multiplications on a 128-bit counter under a 64-bit
   key. */
AMPI_HD AMPI_FN void ampi_philox(uint64_t seed, uint64_t counter, uint32_t out[4]) {
    uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32), x2 = 0, x3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
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

/* >>impl-cpu    The instruction set in use, and how functions are compiled for each.
   AMPI_KERNEL defines a function that runs in the code of the instruction set in use; inside,
   `hw` is 1 where an fma is one instruction. This room calls impl-base. */

/* Which instruction sets this compiler can emit for single functions. */
#if !defined(AMP_NO_SIMD) && (defined(__x86_64__) || defined(__i386__)) && AMPI_GNU \
    && (defined(__clang__) || __GNUC__ >= 9)
  #define AMPI_X86 1
  #include <immintrin.h>
  #if defined(_MSC_VER)  /* clang-cl leaves out what the command line does not allow */
    #include <smmintrin.h>
    #include <avxintrin.h>
    #include <avx2intrin.h>
    #include <f16cintrin.h>
    #include <fmaintrin.h>
    #include <avx512fintrin.h>
    #include <avx512vlintrin.h>
    #include <avx512bwintrin.h>
    #include <avx512dqintrin.h>
    #include <avx512vlbwintrin.h>
    #include <avx512bf16intrin.h>
  #endif
  #include <cpuid.h>
  #define AMPI_TARGET(more) __attribute__((target("avx2,fma,f16c" more)))
  #define AMPI_TARGET_AVX2   AMPI_TARGET("")
  #define AMPI_TARGET_AVX512 AMPI_TARGET(",avx512f,avx512bw,avx512dq,avx512vl")
  #define AMPI_TARGET_PAIRS  AMPI_TARGET(",avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
  #define AMPI_TARGET_AMX \
      AMPI_TARGET(",avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
  #define AMPI_ALL16 ((__mmask16)0xffffu)
#else
  #define AMPI_X86 0
#endif
#if AMPI_X86 && !defined(AMP_NO_AVX512)
  #define AMPI_AVX512 1
#else
  #define AMPI_AVX512 0
#endif
#if AMPI_AVX512 && defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
  #define AMPI_PAIRS 1
#else
  #define AMPI_PAIRS 0
#endif
#if AMPI_PAIRS && defined(__linux__) \
    && ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
  #define AMPI_AMX 1
#else
  #define AMPI_AMX 0
#endif
#if !defined(AMP_NO_SIMD) && defined(__aarch64__) && AMPI_GNU && defined(__ARM_NEON)
  #define AMPI_NEON 1
  #include <arm_neon.h>
#else
  #define AMPI_NEON 0
#endif

/* gcc clears the upper halves of vector registers behind AVX code (vzeroupper) only from -O2 on.
   Left in use, they make later code with SSE and AVX up to 40 times slower. So each kernel with
   AVX, or its call, ends with this. */
#if AMPI_X86
AMPI_TARGET_AVX2 AMPI_FN void ampi_clear_upper(void) { _mm256_zeroupper(); }
#else
AMPI_FN void ampi_clear_upper(void) {}
#endif

/* One body, one copy per instruction set, one dispatcher. Write
       AMPI_KERNEL(ampi_foo, (float* y, size_t n), y, n) { ... ampi_fma(hw, a, b, c) ... }
   and call ampi_foo(y, n). The body is plain C: loops over a constant number of lanes, which every
   compiler vectorises. Its hw is 1 where it may use hardware fma. Copies give the same bits:
   ampi_fma leaves no a*b + c to contract. */
#define AMPI_KERNEL_PARAMS(...) __VA_ARGS__
#define AMPI_KERNEL_BODY(name, params) \
    AMPI_INLINE void name##_body(int hw AMPI_MAYBE, AMPI_KERNEL_PARAMS params)
#if AMPI_X86
  #define AMPI_KERNEL(name, params, ...) \
    AMPI_KERNEL_BODY(name, params); \
    AMPI_TARGET_AVX512 AMPI_FN void name##_avx512 params { \
        name##_body(1, __VA_ARGS__); ampi_clear_upper(); } \
    static void name##_scalar params { name##_body(0, __VA_ARGS__); } \
    AMPI_TARGET_AVX2 static void name##_avx2 params { \
        name##_body(1, __VA_ARGS__); ampi_clear_upper(); } \
    AMPI_FN void name params { \
        if (AMPI_IN_AVX512) name##_avx512(__VA_ARGS__); \
        else if (ampi_simd() == AMP_ISA_AVX2) name##_avx2(__VA_ARGS__); \
        else name##_scalar(__VA_ARGS__); \
    } \
    AMPI_KERNEL_BODY(name, params)
#else
  #define AMPI_KERNEL(name, params, ...) \
    AMPI_KERNEL_BODY(name, params); \
    AMPI_FN void name params { name##_body(AMPI_FMA_NATIVE, __VA_ARGS__); } \
    AMPI_KERNEL_BODY(name, params)
#endif

#if AMPI_X86
enum { AMPI_EAX, AMPI_EBX, AMPI_ECX, AMPI_EDX };

/* Does cpuid set all these bits? */
AMPI_FN int ampi_cpu_has(unsigned leaf, unsigned subleaf, int which, unsigned bits) {
    unsigned r[4];
    return __get_cpuid_count(leaf, subleaf, &r[0], &r[1], &r[2], &r[3])
        && (r[which] & bits) == bits;
}

/* Does the system save this state? Bits of XCR0: 1, 2 for AVX, and 5 to 7 for AVX-512, 17, 18 for
   AMX. */
AMPI_FN int ampi_system_saves(unsigned state) {
    unsigned low;
    if (!ampi_cpu_has(1, 0, AMPI_ECX, 1u << 27)) return 0;  /* OSXSAVE */
    __asm__ volatile("xgetbv" : "=a"(low) : "c"(0) : "edx");
    return (low & state) == state;
}

/* The best instruction set that the processor has and the system saves the registers of. */
AMPI_FN amp_isa ampi_widest_isa(void) {
    const unsigned avx_fma_f16c = 1u << 28 | 1u << 12 | 1u << 29;
    const unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    if (!ampi_system_saves(0x6u) || !ampi_cpu_has(1, 0, AMPI_ECX, avx_fma_f16c)
        || !ampi_cpu_has(7, 0, AMPI_EBX, 1u << 5)) return AMP_ISA_SCALAR;
    if (!AMPI_AVX512 || !ampi_system_saves(0xe6u) || !ampi_cpu_has(7, 0, AMPI_EBX, f_dq_bw_vl))
        return AMP_ISA_AVX2;
    return AMP_ISA_AVX512;
}

/* Has the processor vdpbf16ps? */
AMPI_FN int ampi_has_pairs(void) {
    return AMPI_PAIRS && ampi_widest_isa() == AMP_ISA_AVX512
        && ampi_cpu_has(7, 1, AMPI_EAX, 1u << 5);
}

/* Is the processor's vendor "AuthenticAMD"? */
AMPI_FN int ampi_is_amd(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == 0x68747541u && d == 0x69746e65u
        && c == 0x444d4163u;
}
#else
/* The best instruction set that the processor has and the system saves the registers of. */
AMPI_FN amp_isa ampi_widest_isa(void) { return AMPI_NEON ? AMP_ISA_NEON : AMP_ISA_SCALAR; }

/* Has the processor vdpbf16ps? */
AMPI_FN int ampi_has_pairs(void) { return 0; }

/* Is the processor's vendor "AuthenticAMD"? */
AMPI_FN int ampi_is_amd(void) { return 0; }
#endif
AMPI_FN amp_isa ampi_best_isa(void) {
    return ampi_is_amd() && ampi_has_pairs() ? AMP_ISA_AVX512_BF16 : ampi_widest_isa();
}

/* Scalar code runs anywhere, AVX2 wherever AVX-512 does. */
AMPI_FN int ampi_isa_available(amp_isa isa) {
    const amp_isa widest = ampi_widest_isa();
    if (isa == AMP_ISA_AVX512_BF16) return ampi_has_pairs();
    return isa == AMP_ISA_SCALAR || isa == widest
        || (isa == AMP_ISA_AVX2 && widest == AMP_ISA_AVX512);
}

AMPI_NAMES(amp_isa_name, amp_isa, "auto\0scalar\0neon\0avx2\0avx512\0avx512_bf16\0")

/* This and ampi_amx_cache are the library's only variables: caches of what cpuid and the system
   say; 0 = not asked yet. Racing threads write the same. */
static int ampi_isa_cache;

/* Takes what AMP_ISA names, or the best, at the first call; later calls read the cache. */
AMP_DEF amp_isa amp_cpu_isa(void) {
    int known = AMPI_LOAD_RELAXED(&ampi_isa_cache);
    if (known) return (amp_isa)known;
    const char* wanted = getenv("AMP_ISA");
    amp_isa isa = ampi_best_isa();
    if (wanted) {
        for (int i = AMP_ISA_SCALAR; i <= AMP_ISA_AVX512_BF16; i++)
            if (strcmp(wanted, amp_isa_name((amp_isa)i)) == 0 && ampi_isa_available((amp_isa)i))
                isa = (amp_isa)i;
    }
    AMPI_STORE_RELAXED(&ampi_isa_cache, (int)isa);
    return isa;
}

/* Overwrites the cache of amp_cpu_isa, unless the processor lacks the instructions. */
AMP_DEF amp_result amp_cpu_force_isa(amp_isa isa) {
    if (isa == AMP_ISA_AUTO) isa = ampi_best_isa();
    if (!ampi_isa_available(isa)) return AMP_ERR_UNSUPPORTED;
    AMPI_STORE_RELAXED(&ampi_isa_cache, (int)isa);
    return AMP_OK;
}

/* The instruction set for all but products of bfloat16. */
AMPI_FN amp_isa ampi_simd(void) {
    amp_isa isa = amp_cpu_isa();
    return isa == AMP_ISA_AVX512_BF16 ? AMP_ISA_AVX512 : isa;
}

/* Is AVX-512 in use, with products of pairs? A constant 0 where left out: what only it guards is
   not compiled. */
#define AMPI_IN_AVX512 (AMPI_AVX512 && ampi_simd() == AMP_ISA_AVX512)
#define AMPI_IN_PAIRS  (AMPI_PAIRS && amp_cpu_isa() == AMP_ISA_AVX512_BF16)

#if AMPI_AMX
static int ampi_amx_cache;
/* Linux grants the matrix unit once, to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, 18),
   see its Documentation/arch/x86/xstate.rst. */
AMPI_FN int ampi_amx_granted(void) {
    long result = 158;  /* SYS_arch_prctl */
    __asm__ volatile("syscall" : "+a"(result) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return result == 0;
}

/* Is there a matrix unit (AMX-BF16, AMX-TILE), or with `ask` may it be used? Cached: 1 no, 2 found,
   3 granted. */
AMPI_FN int ampi_amx(int ask) {
    const unsigned bf16_tile = 1u << 22 | 1u << 24;
    int known = AMPI_LOAD_RELAXED(&ampi_amx_cache), before = known;
    if (ampi_simd() != AMP_ISA_AVX512) return 0;
    if (known == 0)
        known = ampi_has_pairs() && ampi_system_saves(0x60000u)
            && ampi_cpu_has(7, 0, AMPI_EDX, bf16_tile) ? 2 : 1;
    if (known == 2 && ask) known = ampi_amx_granted() ? 3 : 1;
    if (known != before) AMPI_STORE_RELAXED(&ampi_amx_cache, known);
    return known > 1;
}
#else
AMPI_FN int ampi_amx(int ask) { (void)ask; return 0; }
#endif
AMP_DEF int amp_cpu_has_fast_sums(void) { return ampi_amx(1); }

/* >>impl-half   Conversions of single values and of sixteen lanes, on bits.
   Words. narrow: to round to fewer bits. widen: to bring to FP32, exactly. payload: the fraction
   bits of a NaN. This room calls impl-base and impl-cpu. */

/* --- one value: formulas on bits, to nearest even (half - 1 + the last kept bit is added) --- */

/* float -> half. The magnitude is sig * 2^(e-150) with a 24-bit sig. Its k lowest bits are cut (13,
   and one for each step below the smallest normal exponent, 113). The exponent goes above the rest;
   the leading 1 of sig adds one to it, a carry another. k = 25 cuts all, float's subnormals too. */
AMPI_HD AMPI_INLINE uint16_t ampi_half_bits(uint32_t u) {
    uint32_t mag = u & 0x7fffffffu, e = mag >> 23, sig = (mag & 0x7fffffu) | 0x800000u;
    uint32_t below = e < 113u ? 113u - e : 0u, k = 13u + (below < 12u ? below : 12u);
    uint32_t nearest = (1u << (k - 1u)) - 1u + ((sig >> k) & 1u);
    uint32_t h = ((e + below - 113u) << 10) + ((sig + nearest) >> k);
    h = h > 0x7c00u ? 0x7c00u : h;
    h = mag > 0x7f800000u ? 0x7e00u | (mag >> 13 & 0x3ffu) : h;
    return (uint16_t)((u >> 16 & 0x8000u) | h);
}

/* float -> bfloat16: the upper half, rounded; a carry out of the fraction may reach infinity. */
AMPI_HD AMPI_INLINE uint16_t ampi_bf16_bits(uint32_t u) {
    uint32_t rounded = u + 0x7fffu + (u >> 16 & 1u), quiet = u | 0x400000u;
    return (uint16_t)(((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded) >> 16);
}

/* half -> float: 112 = 127 - 15, of the biases, twice for inf and NaN. A subnormal is an integer
   times 2^-24. */
AMPI_HD AMPI_INLINE uint32_t ampi_half_widen(uint16_t h) {
    uint32_t mag = h & 0x7fffu, u = (mag << 13) + (112u << 23),
        tiny = ampi_bits((float)(int32_t)mag);
    u = mag < 0x400u ? tiny - (24u << 23) : u;
    u = mag == 0u ? 0u : u;
    u = mag >= 0x7c00u ? u + (112u << 23) : u;
    u = mag > 0x7c00u ? u | 0x400000u : u;
    return (uint32_t)(h & 0x8000u) << 16 | u;
}

/* bfloat16 -> float: the upper half of the result, quietened if it is a NaN. */
AMPI_HD AMPI_INLINE uint32_t ampi_bf16_widen(uint16_t h) {
    return (uint32_t)h << 16 | ((h & 0x7fffu) > 0x7f80u ? 0x400000u : 0u);
}

/* float -> double, likewise (896, 2^-149): a processor that treats subnormals as zero would lose
   them. */
AMPI_HD AMPI_INLINE uint64_t ampi_f32_widen(uint32_t f) {
    uint32_t mag = f & 0x7fffffffu;
    uint64_t u = ((uint64_t)mag << 29) + ((uint64_t)896u << 52),
        tiny = ampi_bits64((double)(int32_t)mag);
    u = mag < 0x800000u ? tiny - ((uint64_t)149u << 52) : u;
    u = mag == 0u ? 0u : u;
    u = mag >= 0x7f800000u ? u + ((uint64_t)896u << 52) : u;
    u = mag > 0x7f800000u ? u | (uint64_t)1u << 51 : u;
    return (uint64_t)(f >> 31) << 63 | u;
}

/* fraction_bits and bias of ampi_narrow */
#define AMPI_F16_FORM  10u, 15u
#define AMPI_BF16_FORM 7u, 127u
/* The bits of a double rounded to a type of so many fraction bits and that exponent bias: to
   nearest even, or, with 32 random bits, away from zero with the probability of what is cut off.
   NaNs keep what fits of their payload. */
AMPI_HD AMPI_INLINE uint32_t ampi_narrow(uint64_t u, const uint32_t* random,
        uint32_t fraction_bits, uint32_t bias) {
    /* cut: fraction bits that are lost; lowest: the exponent field of the least normal result */
    const uint64_t mag = u & 0x7fffffffffffffffu, one = (uint64_t)1u << 52,
        cut = 52u - fraction_bits;
    const uint64_t lowest = 1024u - bias, inf = (uint64_t)(2u * bias + 1u) << fraction_bits;
    uint64_t v = mag - ((lowest - 1u) << 52), r;  /* with the result's bias; rounded */
    if (mag >> 52 < lowest) {  /* subnormal: shifted first; lost bits set its last */
        const uint64_t below = lowest - (mag >> 52), shift = below < 54u ? below : 54u;
        const uint64_t sig = one | (mag & (one - 1u));
        v = sig >> shift | ((sig & (((uint64_t)1u << shift) - 1u)) != 0u);
    }

    /* Half of the last bit, less one if that is even, rounds to nearest; the complement of random
       bits, in the first 32 that are cut off, rounds up where these bits are more. */
    r = v + (random ? (uint64_t)~*random << (cut - 32u) : ((uint64_t)1u << (cut - 1u)) - 1u
        + (v >> cut & 1u));
    r = r >> cut > inf ? inf : r >> cut;
    if (mag > AMPI_INF64) r = inf | 1u << (fraction_bits - 1u) | (mag & (one - 1u)) >> cut;
    return (uint32_t)(r | (u >> 63) << (fraction_bits == 23u ? 31 : 15));
}

AMP_DEF amp_half amp_half_from_float(float f) {
    amp_half h = { ampi_half_bits(ampi_bits(f)) };
    return h;
}

AMP_DEF amp_half amp_half_from_double(double d) {
    amp_half h = { (uint16_t)ampi_narrow(ampi_bits64(d), NULL, AMPI_F16_FORM) };
    return h;
}

AMP_DEF amp_bfloat16 amp_bfloat16_from_float(float f) {
    amp_bfloat16 h = { ampi_bf16_bits(ampi_bits(f)) };
    return h;
}

AMP_DEF amp_bfloat16 amp_bfloat16_from_double(double d) {
    amp_bfloat16 h = { (uint16_t)ampi_narrow(ampi_bits64(d), NULL, AMPI_BF16_FORM) };
    return h;
}

AMP_DEF float amp_half_to_float(amp_half h) { return ampi_float(ampi_half_widen(h.bits)); }
AMP_DEF double amp_half_to_double(amp_half h) {
    return ampi_double(ampi_f32_widen(ampi_half_widen(h.bits)));
}

AMP_DEF float amp_bfloat16_to_float(amp_bfloat16 h) { return ampi_float(ampi_bf16_widen(h.bits)); }
AMP_DEF double amp_bfloat16_to_double(amp_bfloat16 h) {
    return ampi_double(ampi_f32_widen(ampi_bf16_widen(h.bits)));
}

/* An element's bits as an integer: a compiler may change a float or assume it finite. 0 for types
   of other sizes. */
AMPI_FN uint64_t ampi_element_bits(const void* x, amp_dtype dtype) {
    uint64_t wide = 0;
    uint32_t single;
    uint16_t low;
    switch (ampi_type_size(dtype)) {
        case 2: memcpy(&low, x, sizeof low); return low;
        case 4: memcpy(&single, x, sizeof single); return single;
        case 8: memcpy(&wide, x, sizeof wide);
    }
    return wide;
}

/* Magnitude bits of infinity; above them is NaN. */
AMPI_HD AMPI_FN uint32_t ampi_inf_bits(amp_dtype t) {
    return t == AMP_F16 ? 0x7c00u : t == AMP_BF16 ? 0x7f80u : 0x7f800000u;
}

/* An element's magnitude beside infinity: below 0 if finite, above if NaN. */
AMPI_FN int ampi_beside_inf(amp_ref x) {
    const size_t size = ampi_type_size(x.dtype);
    const uint64_t inf = size == 8 ? AMPI_INF64 : ampi_inf_bits(x.dtype);
    const uint64_t sign = (uint64_t)1 << (size == 8 ? 63 : size == 4 ? 31 : 15);
    const uint64_t magnitude = ampi_element_bits(x.data, x.dtype) & ~sign;
    return (magnitude > inf) - (magnitude < inf);
}

AMP_DEF int amp_is_nan(amp_ref x) { return ampi_beside_inf(x) > 0; }
AMP_DEF int amp_is_inf(amp_ref x) { return ampi_beside_inf(x) == 0; }
AMP_DEF int amp_is_finite(amp_ref x) { return ampi_beside_inf(x) < 0; }

/* --- sixteen values in plain C --- */

/* Compilers vectorise these loops; no processor mode changes integers. Sixteen easy values (zero or
   normal in both formats) are rounded by a shift, others one by one. The top bit of ampi_hard32 is
   set for a magnitude above `upper`, or below `low` but not 0: not every instruction set compares
   unsigned vectors. */
AMPI_INLINE uint32_t ampi_hard32(uint32_t mag, uint32_t low, uint32_t upper) {
    return ((mag - low) & (0u - mag)) | (upper - mag);
}

/* All ones if mag is not 0, else 0. */
AMPI_INLINE uint32_t ampi_mask32(uint32_t mag) { return 0u - ((0u - mag) >> 31); }

/* Easy: zero, or from 2^-14 to below 2^16. A carry may reach infinity. */
AMPI_INLINE void ampi_lanes_f32_to_half(uint16_t* AMPI_RESTRICT dst,
        const float* AMPI_RESTRICT src) {
    uint32_t hard = 0;
    for (int l = 0; l < 16; l++)
        hard |= ampi_hard32(ampi_magnitude(src[l]), 113u << 23, (143u << 23) - 1u);
    if ((hard >> 31) != 0u)
        for (int l = 0; l < 16; l++) dst[l] = ampi_half_bits(ampi_bits(src[l]));
    if (hard >> 31) return;
    for (int l = 0; l < 16; l++) {
        uint32_t u = ampi_bits(src[l]), mag = u & 0x7fffffffu;
        uint32_t h = (mag - (112u << 23) + 0xfffu + (mag >> 13 & 1u)) >> 13;
        dst[l] = (uint16_t)((h & ampi_mask32(mag)) | (u >> 16 & 0x8000u));
    }
}

/* Sixteen halves, widened. */
AMPI_INLINE void ampi_lanes_half_to_f32(float* AMPI_RESTRICT dst,
        const uint16_t* AMPI_RESTRICT src) {
    for (int l = 0; l < 16; l++) dst[l] = ampi_float(ampi_half_widen(src[l]));
}

/* Sixteen floats, rounded to bfloat16. */
AMPI_INLINE void ampi_lanes_f32_to_bf16(uint16_t* AMPI_RESTRICT dst,
        const float* AMPI_RESTRICT src) {
    for (int l = 0; l < 16; l++) dst[l] = ampi_bf16_bits(ampi_bits(src[l]));
}

/* Sixteen bfloat16, widened. */
AMPI_INLINE void ampi_lanes_bf16_to_f32(float* AMPI_RESTRICT dst,
        const uint16_t* AMPI_RESTRICT src) {
    for (int l = 0; l < 16; l++) dst[l] = ampi_float(ampi_bf16_widen(src[l]));
}

/* Makes NaNs of sixteen lanes quiet, with their bits in `kept`. */
AMPI_FN void ampi_quiet_lanes(float* x, uint32_t kept) {
    for (int l = 0; l < 16; l++) {
        const uint32_t u = ampi_bits(x[l]);
        x[l] = ampi_float((u & 0x7fffffffu) > 0x7f800000u ? (u & kept) | 0x7fc00000u : u);
    }
}

/* A finite x whose magnitude is at most the one with the bits `limit`; inf and NaN stay. */
AMPI_HD AMPI_INLINE float ampi_within(float x, uint32_t limit) {
    const uint32_t u = ampi_bits(x), size = u & 0x7fffffffu;
    return ampi_float(size > limit && size < 0x7f800000u ? (u & 0x80000000u) | limit : u);
}

/* The bits of the largest magnitude that a 16-bit type does not round to infinity: below 65520, or
   2^128 - 2^119. */
AMPI_HD AMPI_INLINE uint32_t ampi_last_rounded(amp_dtype t) {
    return t == AMP_F16 ? 0x477fefffu : 0x7f7f7fffu;
}

/* The bits of a master that is about to be split, as its upper half can hold it. */
AMPI_HD AMPI_INLINE uint32_t ampi_bits_to_split(float w) {
    const uint32_t u = ampi_bits(ampi_within(w, ampi_last_rounded(AMP_BF16)));
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : u;
}

/* Their upper half, rounded to nearest, ties away from zero. */
AMPI_HD AMPI_INLINE uint16_t ampi_upper_half(uint32_t u) { return (uint16_t)((u + 0x8000u) >> 16); }

/* A master of its two halves; the lower one is negative from 0x8000 on. */
AMPI_HD AMPI_INLINE float ampi_joined(uint32_t low, uint32_t rest) {
    return ampi_float((low << 16) + rest - ((rest & 0x8000u) << 1));
}

/* >>impl-vector  Sixteen lanes of FP32 on every instruction set; what the kernels are called
                  with. */

/* Each kernel is a C function over v16 (sixteen lanes) and operations below. Its text, in
   impl-kernels, is compiled for each instruction set: this file includes itself with AMPI_PASS set
   to avx2, then avx512; the baseline (NEON or plain C) follows in ordinary flow. AMPI_K(name) is
   this pass's copy. */
#ifndef AMP_SELF
  #define AMP_SELF "amp.h"
#endif
#if defined(__has_include) && AMPI_X86
  #if !__has_include(AMP_SELF)
    #error "define AMP_SELF to the name of this file: its implementation includes itself"
  #endif
#endif
/* `how` of fma: products are exact, see the one in plain C; pairs of bfloat16; 0: neither. */
enum { AMPI_EXACT = 1, AMPI_OF_PAIRS = 2 };
#define AMPI_JOIN_(a, b) ampi_##a##_##b
#define AMPI_JOIN(a, b) AMPI_JOIN_(a, b)
#define AMPI_K(name) AMPI_JOIN(name, AMPI_PASS)
/* Sixteen lanes of FP32, and what kernels do with them: */
#define AMPI_V16 AMPI_K(v16)
#define ampi_v_set1 AMPI_K(v_set1)                /* x in each lane */
#define ampi_v_load AMPI_K(v_load)                /* sixteen neighbours in memory */
#define ampi_v_store AMPI_K(v_store)
#define ampi_v_load_typed AMPI_K(v_load_typed)    /* the same of any type, widened or rounded */
#define ampi_v_store_typed AMPI_K(v_store_typed)
#define ampi_v_load_any AMPI_K(v_load_any)        /* the first `count` of them, if fewer */
#define ampi_v_store_any AMPI_K(v_store_any)
#define ampi_v_add AMPI_K(v_add)                  /* x + y; x * y; x * y + z rounded once */
#define ampi_v_mul AMPI_K(v_mul)
#define ampi_v_fma AMPI_K(v_fma)
#define ampi_v_quiet AMPI_K(v_quiet)              /* NaNs made quiet */
#define ampi_v_transpose AMPI_K(v_transpose)      /* 16 x 16 elements in memory */
#define ampi_v_widen AMPI_K(v_widen)              /* arrays: to FP32; to zeros */
#define ampi_v_clear AMPI_K(v_clear)
/* The micro-tile of C: MR rows, NV vectors of columns, which are NR columns. NC: columns of a
   macro-tile. */
#define AMPI_MR AMPI_K(mr)
#define AMPI_NV AMPI_K(nv)
#define AMPI_NR AMPI_K(nr)
#define AMPI_NC AMPI_K(nc)
/* Arguments of the micro-kernel; what the loops of a product share; rows of bfloat16: structs of
   impl-kernels. */
#define AMPI_MICRO_ARGS AMPI_K(micro_args)
#define AMPI_LOOPS AMPI_K(loops)
#define AMPI_LOW_ROWS AMPI_K(low_rows)
/* A kernel; an operation on vectors, or a function called with constants. */
#define AMPI_KERNEL_FN AMPI_PASS_TARGET AMPI_FN
#define AMPI_LANES_FN AMPI_PASS_TARGET AMPI_VECTOR
#if defined(__clang__)
  #define AMPI_UNROLL _Pragma("clang loop unroll(full)")
#elif AMPI_GNU
  #define AMPI_UNROLL _Pragma("GCC unroll 16")
  #if defined(__NVCC_DIAG_PRAGMA_SUPPORT__)
    #pragma nv_diagnostic push
    #pragma nv_diag_suppress 1675  /* nvcc warns, but hands it on */
  #endif
#else
  #define AMPI_UNROLL
#endif

/* The height or width of a convolution's image. Grid pixel i and kernel position j meet at source
   pixel i * step + first + j * next; beyond the source's `size` pixels lie margins of zeros. */
typedef struct ampi_side {
    size_t count,   /* grid pixels */
           kernel;  /* kernel positions in use */
    int    first,   /* source pixel of grid pixel 0 at kernel position 0; below 0 in a margin */
           next,    /* source pixels from one kernel position to the next; may be negative */
           step,    /* source pixels from one grid pixel to the next: the stride */
           size;    /* source pixels */
    int    low;     /* the least of first + j * next: the first source pixel of grid pixel 0 */
    size_t span;    /* source pixels from there to the greatest of first + j * next */
    size_t phases,  /* planes that a padded copy has for this side: at most `step` */
           over,    /* places that the kernel reads behind that of a grid pixel */
           padded;  /* places from one row, or one image, of a padded plane to the next */
} ampi_side;

/* A convolution's image as a matrix that is never formed (im2col). Row channel * area + kernel
   position, column image * pixels + pixel: the source pixel that this kernel position meets there,
   or 0 in a margin. Forward, pixels are those of y, and the source is x. For the input gradient
   they are one phase of dx, pixels that meet the same kernel positions; the source is dy. */
typedef struct ampi_im2col {
    ampi_side h, w;      /* vertical and horizontal side */
    size_t pixels,       /* grid pixels of one image: h.count * w.count */
           area;         /* kernel positions in use: h.kernel * w.kernel */
    size_t channels,     /* source channels that the rows stand for */
           plane,        /* elements from one source channel to the next */
           image;        /* elements from one source image to the next */
    size_t elements;     /* elements of the whole source, counted from the operand's data on */
    int    in_place;     /* the micro-kernel reads windows, or padded planes whose grid this is;
                            no packed copy is made */
} ampi_im2col;

AMPI_FN size_t ampi_max_size(size_t a, size_t b) { return a > b ? a : b; }

/* A product's operand may have a type of its own: AMPI_ROUNDED + t are FP32 elements that are
   rounded to t as they are read. */
enum { AMPI_ROUNDED = 16 };

/* Bytes of an element, of such an operand too. */
AMPI_INLINE size_t ampi_element_size(amp_dtype t) {
    return (int)t > AMPI_ROUNDED ? 4 : ampi_type_size(t);
}

/* Element i of an array, or NULL. */
AMPI_FN const void* ampi_at(const void* data, amp_dtype t, size_t i) {
    return data ? (const char*)data + i * ampi_element_size(t) : NULL;
}

/* The address of a result, which descriptions of calls keep like those of operands. */
AMPI_INLINE void* ampi_mutable(const void* data) { return (void*)(uintptr_t)data; }

/* An operand from its element i on. */
AMPI_FN amp_ref ampi_from(amp_ref x, size_t i) {
    return amp_ref_of(ampi_at(x.data, x.dtype, i), x.dtype);
}

/* Pixels x, x + step, ... of a source row, `count` in all, of which some may lie in margins. */
typedef struct ampi_row_pixels {
    size_t count,   /* all of them: left, then inside, then those behind the row */
           left,    /* those before the row */
           inside,  /* those in the row */
           first,   /* the first of these: a pixel of the row */
           step;    /* row pixels from one to the next */
} ampi_row_pixels;

/* How many steps of `step` pixels cover a distance in pixels: from 0 to `limit`. */
AMPI_FN size_t ampi_steps(int64_t distance, int step, size_t limit) {
    if (distance <= 0) return 0;
    return ampi_min_size(step == 1 ? (size_t)distance : (size_t)((distance + step - 1) / step),
        limit);
}

/* Splits `count` pixels x, x + step, ... of a row of `width` pixels, where x may be below 0. */
AMPI_FN ampi_row_pixels ampi_row_pixels_of(int width, int64_t x, int step, size_t count) {
    const size_t left = ampi_steps(-x, step, count);
    const size_t inside = ampi_max_size(ampi_steps(width - x, step, count), left) - left;
    const ampi_row_pixels r = { count, left, inside, (size_t)(x + (int64_t)left * step),
        (size_t)step };
    return r;
}

/* An operand op(X) of a product, as rows of neighbours in memory. If along_k, k changes along a
   row: a row of op(A) or column of op(B). Else a row has one k: a column of op(A) or row of
   op(B). */
typedef struct ampi_operand {
    const void* data;
    amp_dtype   dtype;
    int         along_k,   /* k changes along a row */
                is_image,  /* an im2col matrix, else a matrix or weights */
                paired;    /* rows along k that are pairs already; ld counts words */
    size_t      ld;        /* a matrix: elements from one row to the next */
    ampi_im2col image;     /* if is_image: its rows are the operand's */
    /* Weights of an input gradient, if area > 0. Row c is, output by output, those of channel c at
       the kernel positions in use: */
    size_t      area,      /* their number for one output and channel */
                kernel_w,  /* how many of them a kernel row has */
                next_h,    /* elements from one kernel row in use to the next */
                next_w,    /* elements from one kernel column in use to the next */
                output;    /* elements from one output to the next */
} ampi_operand;

/* Where the columns of C lie in memory. Column j belongs to block j / size; let r = j % size. There
   it lies in row r / pitch, at x = r % pitch. It is element
       block * next_block + row * next_row + x * next
   of its row of C. Columns with x >= width or r >= used are computed, but stored nowhere.
     a matrix   one endless row: size = pitch = width = used = SIZE_MAX
     y and dx   a block is an image, a row one of pixels; where planes are read in place,
                columns from `width` on are margins of the padded plane
     dw         windows: a block is a kernel column, a row a kernel row, x a channel */
typedef struct ampi_columns {
    size_t size,        /* columns of a block */
           pitch,       /* columns of a row */
           width,       /* columns of a row that are stored, from its first on */
           used;        /* columns of a block that may be stored, from its first on */
    size_t next_block,  /* elements of C from a block, a row, a column to the next */
           next_row,
           next;
} ampi_columns;

/* The columns of a matrix. */
AMPI_FN ampi_columns ampi_endless_row(void) {
    const ampi_columns c = { SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX, 0, 0, 1 };
    return c;
}

/* A column that is stored, in the terms of ampi_columns. */
typedef struct ampi_column {
    size_t number,  /* j, its number in C */
           x,       /* its place in its row */
           row;     /* r - x: where its row begins in its block; a multiple of pitch */
} ampi_column;

/* Moves `by` columns on, and from there to the first column that is stored: from behind a row's
   stored columns to its end, from there to the next row or block. */
AMPI_INLINE void ampi_column_move(ampi_column* p, const ampi_columns* c, size_t by) {
    p->number += by;
    p->x += by;
    while (p->x >= c->width || p->row >= c->used) {
        p->number += ampi_max_size(p->x, c->pitch) - p->x;
        p->x = ampi_max_size(p->x, c->pitch) - c->pitch;
        p->row += c->pitch;
        if (p->row >= c->size) p->row = 0;
    }
}

/* The first stored column from column number `number` on. */
AMPI_FN ampi_column ampi_column_of(const ampi_columns* c, size_t number) {
    const size_t r = number % c->size;
    ampi_column p = { number, r % c->pitch, r - r % c->pitch };
    ampi_column_move(&p, c, 0);
    return p;
}

/* Stored columns that are neighbours in one row of C. */
typedef struct ampi_piece {
    size_t at,     /* the first one's element, counted from the row's first */
           from,   /* the first one's column, counted from the first of the macro-tile */
           count;
} ampi_piece;

/* Cuts the stored ones of columns [column, column + n) of C into pieces x; returns how many, at
   most n. */
AMPI_FN size_t ampi_pieces_of(ampi_piece* x, const ampi_columns* c, size_t column, size_t n) {
    ampi_column p = ampi_column_of(c, column);
    size_t count = 0;
    while (p.number < column + n) {
        x[count].at = p.number / c->size * c->next_block + p.row / c->pitch * c->next_row
            + p.x * c->next;
        x[count].from = p.number - column;
        x[count].count = ampi_min_size(column + n - p.number, c->width - p.x);
        ampi_column_move(&p, c, x[count].count);
        count++;
    }
    return count;
}

/* C, and what becomes of the sums: C[i][j] = alpha * sum + beta * C[i][j] + bias, rounded once. */
typedef struct ampi_epilogue {
    void*        data;          /* element of row 0, column 0 */
    amp_dtype    dtype;
    size_t       ld;            /* elements from one row of C to the next */
    ampi_columns columns;       /* where a row's columns lie */
    float        alpha, beta;
    const void*  bias;          /* NULL = none */
    amp_dtype    bias_dtype;
    int          bias_per_row;  /* bias has an element for each row of C, else for each column */
} ampi_epilogue;

/* C[m,n] = op(A)[m,k] * op(B)[k,n], then its epilogue. */
typedef struct ampi_product {
    size_t m, n, k;
    ampi_operand a, b;
    ampi_epilogue c;
    int exact;  /* products of two elements are exact in FP32 */
    int form;   /* how it is packed, see below */
} ampi_product;

/* How operands are packed: FP32, or two bfloat16 to a 32-bit word, that of even k in the high half:
   for vdpbf16ps, which adds that product first, or the matrix unit. */
enum { AMPI_FP32 = 0, AMPI_PAIRS_OF_BF16 = 1, AMPI_AMX_PAIRS = 2 };

/* Windows: an image for a weight gradient, read in place; an example stands at the head of
   impl-kernels. For kc pixels, row by row, each column of the padded image becomes the `height`
   values that all kernel rows and channels meet there: by kernel rows, in these by channels. A
   pixel's window is its kernel_w such columns, which are neighbours.
   Scratch memory holds where windows begin (kc offsets), then 16 rows, then the columns. */
typedef struct ampi_windows {
    size_t height,  /* values of a column: kernel rows * channels */
           reused,  /* the first ones of a column that stand in the column of the pixel row above
                       too, one kernel row on */
           ld,      /* floats from one of the 16 rows to the next */
           rows,    /* where the rows begin in scratch memory, in floats */
           first,   /* where the columns begin, in floats */
           floats;  /* all of it */
} ampi_windows;

/* How a product is computed: in shares, one for a thread, and these by blocks, in BLIS's terms.
   Where k takes several blocks, sums wait between them in scratch memory. */
typedef struct ampi_plan {
    size_t shares,    /* threads */
           units,     /* micro-tiles that they share out: of C's columns, or of its rows */
           unit;      /* columns, or rows, of such a micro-tile */
    int by_rows;      /* C is shared out by rows, as it has more micro-tiles one below another */
    size_t mc,        /* rows, columns of a macro-tile; k of a panel */
           nc,
           kc,
           sum_rows,  /* rows of C whose sums wait together */
           packed,    /* floats: a packed block of B */
           rows,      /* floats: 16 rows, for packing */
           padded,    /* floats: an image's padded copy or windows, 0 if too large */
           floats;    /* floats: all scratch memory of a share */
    ampi_windows windows;
} ampi_plan;

/* How the micro-kernel reads B. PACKED: from micro-panels; pairs always, as they are made while
   packing. IN_ROWS: a matrix's rows where they are. Few rows of A do not pay for packing: one takes
   a half to a third of the time so. IN_PLANES, IN_WINDOWS: FP32 of an image, from padded planes or
   windows in scratch memory; packing the im2col matrix would cost as much as 16 rows of A. */
enum { AMPI_B_PACKED, AMPI_B_IN_ROWS, AMPI_B_IN_PLANES, AMPI_B_IN_WINDOWS };

/* Scratch memory for packing. */
typedef struct ampi_pack_room {
    float *rows,     /* 16 rows */
          *padded;   /* a padded copy of planes, or windows */
    size_t floats;   /* how many floats `padded` holds; 0: no copy */
} ampi_pack_room;

/* --- updates of one weight --- */

/* One step's constants for a group, formed in double. */
typedef struct ampi_update {
    float mult;            /* gradient factor: clip coefficient / loss scale; negative to ascend */
    float l2;              /* added to the gradient: l2 * w */
    float b1, c1, b2, c2;  /* m = b1*m + c1*g, v = b2*v + c2*g^2 */
    float r1, r2, eps;     /* bias corrections 1/(1-b1^t) (LAMB; Adam's is in step),
                              1/sqrt(1-b2^t); added to the deviation sqrt(v) * r2 */
    float inside;          /* RMSPROP: added to v inside the root */
    float buf, raw;        /* SGD: direction buf*m + raw*g */
    float wd;              /* LAMB: direction + wd*w */
    float decay, step;     /* w = decay*w + step*direction; step is negative */
    int   frozen;          /* the group's weights stay as they are */
    int   kind;            /* an ampi_update_kind; of LAMB the second of its passes */
} ampi_update;

/* BUFFERED: RMSPROP with momentum. LAMB_DIRECTION only leaves LAMB's direction in g: 0 where w
   stays. */
typedef enum ampi_update_kind {
    AMPI_UPDATE_SGD, AMPI_UPDATE_MOMENTUM, AMPI_UPDATE_RMSPROP, AMPI_UPDATE_BUFFERED,
    AMPI_UPDATE_ADAM, AMPI_UPDATE_LAMB, AMPI_LAMB_DIRECTION
} ampi_update_kind;

/* Does an ampi_update_kind use the first moment, and the second? */
AMPI_HD AMPI_INLINE int ampi_uses_m(int kind) {
    return kind != AMPI_UPDATE_SGD && kind != AMPI_UPDATE_RMSPROP;
}

AMPI_HD AMPI_INLINE int ampi_uses_v(int kind) { return kind >= AMPI_UPDATE_RMSPROP; }

/* What is an overflow of an update, and what was met. Limits are kept in memory, or a compiler for
   finite floats alone could drop their tests. */
typedef struct ampi_update_overflow {
    uint32_t finite;     /* bits of the largest finite magnitude: of a float */
    uint32_t last;       /* of a weight, as it is stored */
    uint32_t low;        /* of a weight whose 16-bit copy is finite: never above `last` */
    uint32_t held;       /* elements that stay as they were */
    uint32_t saturated;  /* 16-bit copies that saturate */
    size_t   base;       /* the number of the element that a kernel calls 0 */
    size_t   first;      /* the number of the first element held or saturated */
} ampi_update_overflow;

/* One weight, its unscaled gradient, and its first and second moment. */
typedef struct ampi_weight { float w, g, m, v; } ampi_weight;

/* A value with exponent 0 becomes +0: idle moments are never slow subnormals. */
AMPI_HD AMPI_INLINE float ampi_flush(float x) {
    const uint32_t u = ampi_bits(x);
    return ampi_float((u & 0x7f800000u) != 0 ? u : 0u);
}

/* Weight i with its unscaled gradient and new moments; of BUFFERED m is the old one, as the new one
   is its direction. No sum of products is outside an fma. */
AMPI_HD AMPI_INLINE ampi_weight ampi_update_moments(int hw, int kind, const ampi_update* u,
        const float* w, const float* g, const float* m, const float* v, size_t i) {
    ampi_weight x = { w[i], ampi_fma(hw, u->l2, w[i], u->mult * g[i]), 0.0f, 0.0f };
    if (kind == AMPI_UPDATE_BUFFERED) x.m = m[i];
    else if (ampi_uses_m(kind)) x.m = ampi_flush(ampi_fma(hw, u->b1, m[i], u->c1 * x.g));
    if (ampi_uses_v(kind)) x.v = ampi_flush(ampi_fma(hw, u->c2 * x.g, x.g, u->b2 * v[i]));
    return x;
}

/* Is `inside` added to the second moment before its root is taken? */
AMPI_HD AMPI_INLINE int ampi_is_rmsprop(int kind) {
    return kind == AMPI_UPDATE_RMSPROP || kind == AMPI_UPDATE_BUFFERED;
}

/* The direction in which the kind of optimizer moves weight x; root: the square root of its second
   moment (RMSPROP: and `inside`). */
AMPI_HD AMPI_INLINE float ampi_update_direction(int hw, int kind, const ampi_update* u,
        ampi_weight x, float root) {
    const float deviation = ampi_fma(hw, root, u->r2, u->eps);
    if (kind == AMPI_UPDATE_SGD) return x.g;
    if (kind == AMPI_UPDATE_MOMENTUM) return ampi_fma(hw, u->buf, x.m, u->raw * x.g);
    if (kind == AMPI_UPDATE_RMSPROP) return x.g / deviation;
    if (kind == AMPI_UPDATE_BUFFERED) return ampi_flush(ampi_fma(hw, u->b1, x.m, x.g / deviation));
    if (kind == AMPI_UPDATE_ADAM) return x.m / deviation;
    return ampi_fma(hw, u->wd, x.w, x.m * u->r1 / deviation);
}

/* A direction of LAMB as its norm counts it: 0 where it or the second moment overflows. */
AMPI_HD AMPI_INLINE float ampi_sound_direction(float direction, float v, uint32_t finite) {
    return ampi_float(ampi_magnitude(direction) > finite || ampi_magnitude(v) > finite ? 0u
        : ampi_bits(direction));
}

/* Does element i stay as it was, if its weight would become w, its second moment v? `over` counts
   it, and one whose 16-bit copy saturates. A first moment needs no look: where it overflows, w
   does. */
AMPI_HD AMPI_FN int ampi_update_stays(float w, float v, size_t i, ampi_update_overflow* over) {
    const uint32_t size = ampi_magnitude(w);
    const int stays = size > over->last || ampi_magnitude(v) > over->finite;
    if (!stays && size <= over->low) return 0;
    if (over->held + over->saturated == 0) over->first = over->base + i;
    if (stays) over->held++;
    else over->saturated++;
    return stays;
}

/* Updates element i in plain C, or leaves it where it would overflow; LAMB_DIRECTION only writes
   its direction to g. */
AMPI_HD AMPI_INLINE void ampi_update_element(int kind, float* w, float* g, float* m, float* v,
        size_t i, const ampi_update* u, ampi_update_overflow* over) {
    const ampi_weight x = ampi_update_moments(AMPI_FMA_NATIVE, kind, u, w, g, m, v, i);
    const float root = sqrtf(ampi_is_rmsprop(kind) ? x.v + u->inside : x.v);
    const float direction = ampi_update_direction(AMPI_FMA_NATIVE, kind, u, x, root);
    const float moved = ampi_fma(AMPI_FMA_NATIVE, u->step, direction, x.w * u->decay);
    if (kind == AMPI_LAMB_DIRECTION) {
        g[i] = ampi_sound_direction(direction, x.v, over->finite);
        return;
    }
    if (ampi_update_stays(moved, x.v, i, over)) return;
    w[i] = moved;
    if (ampi_uses_m(kind)) m[i] = kind == AMPI_UPDATE_BUFFERED ? direction : x.m;
    if (ampi_uses_v(kind)) v[i] = x.v;
}

/* An optimizer step of some weights, in FP32. */
typedef struct ampi_update_job {
    float *w, *g, *m, *v;        /* weights, gradients, first and second moments, if any */
    const ampi_update* u;
    ampi_update_overflow* over;
} ampi_update_job;

/* Elements [i, end), without a vector unit or with an overflow among them. */
AMPI_APART void ampi_update_singly(int kind, const ampi_update_job* job, size_t i, size_t end) {
    for (; i < end; i++)
        ampi_update_element(kind, job->w, job->g, job->m, job->v, i, job->u, job->over);
}

/* What a pass offers. mr x nr: the micro-tile; nc: columns of a macro-tile. */
typedef struct ampi_kernels {
    size_t mr, nr, nc;
    void (*product)(const ampi_product* s, const ampi_plan* b, size_t i0, size_t m, size_t j0,
        size_t n, float* scratch);
    void (*depthwise)(const ampi_product* s, size_t channel, size_t image, size_t images,
        float* scratch);
    void (*rows)(float* dst, size_t ld, const ampi_operand* v, size_t first, size_t rows,
        size_t at, size_t count, const ampi_pack_room* room);
    void (*column_sums)(float* sums, const void* x, amp_dtype t, size_t ld, size_t rows,
        size_t width);
    unsigned (*least_exponent)(const uint16_t* x, size_t n);  /* NULL: no products of pairs */
    void (*pair_along_k)(float* x, size_t ld, size_t m, size_t k);
    void (*update)(int kind, const ampi_update_job* job, size_t n);
    void (*convert)(void* dst, amp_dtype to, const void* src, amp_dtype from, size_t n,
        const float* factor, int clean);
    void (*add_squares)(double* sum, const void* x, amp_dtype t, size_t n);
    void (*lanes_in)(float* tile, size_t ld, const void* x, size_t step, amp_dtype t, size_t rows,
        size_t n, size_t readable);
    void (*lanes_out)(void* x, amp_dtype t, size_t step, const float* tile, size_t rows, size_t n);
} ampi_kernels;

/* How far ahead loops fetch: past the end of a page no processor does so by itself. */
enum { AMPI_AHEAD_BYTES = 1024 };

AMPI_INLINE int ampi_min_int(int a, int b) { return a < b ? a : b; }
AMPI_INLINE int ampi_max_int(int a, int b) { return a > b ? a : b; }

enum { AMPI_LANES = 16, AMPI_TILE = 1024,  /* elements of a tile, see impl-tiles */
       AMPI_KC = 256,          /* k of a packed panel */
       AMPI_PAIRED_ROWS = 32,  /* so few rows of A that pairs of a convolution's B do not pay */
       AMPI_FEW_ROWS = 16,     /* so few rows of A that a row of B is not packed */
       AMPI_L1_FLOATS = 4096,  /* half a first-level cache */
       AMPI_PAD = 16 };        /* floats behind each row of scratch memory: rows share no cache
                                  sets */

/* Words for k elements as pairs, in whole vectors. */
AMPI_FN size_t ampi_pairs(size_t k) { return ampi_round_up((k + 1) / 2, AMPI_LANES); }

/* Quiet NaN 0x7fc00000 for any NaN: processors differ in which one they hand on. */
AMPI_HD AMPI_INLINE float ampi_clean_nan(float v) {
    return ampi_float(ampi_magnitude(v) > 0x7f800000u ? 0x7fc00000u : ampi_bits(v));
}

/* A side, of whose fields these six are given. Its padded copy is FP32 with margins of zeros. It
   has a plane for each place in the strides that the kernel meets, `phases` of a side. So 16
   neighbouring pixels of a grid row see 16 neighbouring floats at each kernel position. The planes
   of all images follow each other: place (image * h.padded + row) * w.padded + column. A side has
   its `count` pixels and the `over` ones that the kernel sees behind the last. */
AMPI_FN ampi_side ampi_side_of(size_t count, size_t kernel, int first, int next, int step,
        int size) {
    ampi_side s = { count, kernel, first, next, step, size, 0, 0, 0, 0, 0 };
    size_t before, end;  /* places of the front margin; the first place behind the source's
                            pixels */
    s.span = kernel > 1 ? (kernel - 1) * (size_t)(next < 0 ? -next : next) : 0;
    s.low = next < 0 ? first - (int)s.span : first;
    s.phases = ampi_min_size((size_t)step, s.span + 1);
    s.over = s.span / (size_t)step;

    /* The margin behind and that before the next row or image are one, as far as both are zeros. */
    before = s.low < 0 ? (size_t)(-(int64_t)s.low / step) : 0;
    end = size > s.low ? (size_t)(((int64_t)size - s.low + step - 1) / step) : 0;
    s.padded = count + s.over;
    end = ampi_max_size(end, s.padded > before ? s.padded - before : 0);
    s.padded = ampi_max_size(count, ampi_min_size(s.padded, end));
    return s;
}

/* Is each source pixel read once, in order? */
AMPI_FN int ampi_side_is_plain(const ampi_side* s) {
    return s->kernel == 1 && s->step == 1 && s->first == 0 && s->count == (size_t)s->size;
}

/* Floats of the padded copy that `rows` rows of the im2col matrix need in n columns; 0 if over
   `limit`. Doubles do not overflow. */
AMPI_FN size_t ampi_padded_floats(const ampi_im2col* g, size_t rows, size_t n, size_t limit) {
    /* The most channels that rows meet, with a plane for each pair of phases. */
    const size_t channels = ampi_min_size(g->channels, (rows + g->area - 2) / g->area + 1);
    const double planes = (double)channels * (double)g->h.phases * (double)g->w.phases;
    /* A plane has n pixels; the margins between their grid rows and between images; what the
       kernel reads behind the last pixel. A last vector and pad_rows' rounding come on top. */
    const double padded = (double)g->w.padded;
    const double reach = (double)g->h.over * padded + (double)g->w.over;
    const double gaps = (double)ampi_div_up(n, g->w.count) * (padded - (double)g->w.count)
        + (double)ampi_div_up(n, g->pixels) * (double)(g->h.padded - g->h.count) * padded;
    const double floats = planes * ((double)n + gaps + reach + 4 * AMPI_LANES);
    return floats <= (double)limit ? (size_t)floats : 0;
}

/* A grid column's place in a padded plane. */
AMPI_FN size_t ampi_padded_place(const ampi_im2col* g, size_t column) {
    const size_t image = column / g->pixels, pixel = column % g->pixels;
    return (image * g->h.padded + pixel / g->w.count) * g->w.padded + pixel % g->w.count;
}

/* at[i]: where row first + i of the im2col matrix begins in a padded copy whose planes are `step`
   floats apart. Planes lie channel by channel, in these by vertical, then horizontal phase. */
AMPI_FN void ampi_padded_table(const ampi_im2col* g, size_t step, size_t first, size_t rows,
        uint32_t* at) {
    const uint32_t sh = (uint32_t)g->h.step, sw = (uint32_t)g->w.step;
    size_t i, plane = 0, h = first % g->area / g->w.kernel, w = first % g->w.kernel;

    /* Rows of the first `area` kernel positions, which begin in channel 0 and may end in 1. */
    for (i = 0; i < ampi_min_size(rows, g->area); i++) {
        /* The source pixel that grid pixel 0 meets, counted from the padded image's first. */
        const uint32_t y = (uint32_t)(g->h.first + (int)h * g->h.next - g->h.low);
        const uint32_t x = (uint32_t)(g->w.first + (int)w * g->w.next - g->w.low);
        at[i] = (uint32_t)(((plane + y % sh) * g->w.phases + x % sw) * step + y / sh * g->w.padded
            + x / sw);
        if (++w < g->w.kernel) continue;
        w = 0;
        if (++h < g->h.kernel) continue;
        h = 0;
        plane = g->h.phases;
    }

    /* The others are those of the channel before, one channel on. */
    for (; i < rows; i++) at[i] = at[i - g->area] + (uint32_t)(g->h.phases * g->w.phases * step);
}

/* The layout in scratch memory of the windows of kc pixels. */
AMPI_FN ampi_windows ampi_windows_of(const ampi_im2col* g, size_t kc) {
    const size_t step = (size_t)g->w.step;
    const size_t rows = (kc + g->w.count - 2) / g->w.count + 1;  /* grid rows, or parts of them */
    ampi_windows d;
    d.height = g->h.kernel * g->channels;
    d.reused = g->h.step == 1 && g->h.next == 1 ? d.height - g->channels : 0;
    d.ld = ampi_round_up(ampi_min_size(g->w.count, kc) * step + g->w.span, AMPI_LANES) + AMPI_PAD;
    d.rows = kc;
    d.first = d.rows + AMPI_LANES * d.ld;
    /* Each pixel has `step` columns of its own, and a row at most span + 1 more; whole vectors and
       the last panel reach behind. */
    d.floats = d.first + (kc * step + rows * (g->w.span + 1)) * d.height + 4 * AMPI_LANES;
    return d;
}

/* The row of the im2col matrix that holds value i of a window: i counts by kernel columns, in these
   by kernel rows, in these by channels. */
AMPI_FN size_t ampi_window_row(const ampi_im2col* g, size_t i) {
    return i % g->channels * g->area + i / g->channels % g->h.kernel * g->w.kernel
        + i / g->channels / g->h.kernel;
}

/* Scratch memory for 16 channels, side by side, of a depthwise convolution. It begins with offsets
   in the padded image of kernel positions, then of a grid row's pixels. Each part has room behind
   it for whole vectors. */
typedef struct ampi_channels {
    size_t rows,     /* rows of the padded image */
           pitch,    /* floats from one of these rows to the next */
           weights,  /* where weights, or their gradient's sums, begin, in floats */
           pixels,   /* where pixels of y or dy begin, in floats */
           padded,   /* where the source image with its margins of zeros begins, in floats */
           floats;   /* all of it */
} ampi_channels;

/* The layout in scratch memory of 16 channels of a depthwise convolution. */
AMPI_FN ampi_channels ampi_channels_of(const ampi_im2col* g) {
    ampi_channels d;
    d.rows = (g->h.count - 1) * (size_t)g->h.step + g->h.span + 1;
    d.pitch = ((g->w.count - 1) * (size_t)g->w.step + g->w.span + 1) * AMPI_LANES;
    d.weights = ampi_round_up(g->area + g->w.count, AMPI_LANES);
    d.pixels = d.weights + ampi_round_up(g->area, AMPI_LANES) * AMPI_LANES;
    d.padded = d.pixels + ampi_round_up(g->pixels, AMPI_LANES) * AMPI_LANES;
    d.floats = d.padded + d.rows * d.pitch + AMPI_LANES * AMPI_LANES;
    return d;
}

/* at: offsets in the padded image, in floats: of kernel positions, then of a grid row's pixels. */
AMPI_FN void ampi_channels_table(const ampi_im2col* g, const ampi_channels* d, uint32_t* at) {
    for (size_t h = 0; h < g->h.kernel; h++)
        for (size_t w = 0; w < g->w.kernel; w++)
            *at++ = (uint32_t)((size_t)(g->h.first + (int)h * g->h.next - g->h.low) * d->pitch
                + (size_t)(g->w.first + (int)w * g->w.next - g->w.low) * AMPI_LANES);
    for (size_t w = 0; w < g->w.count; w++) *at++ = (uint32_t)(w * (size_t)g->w.step * AMPI_LANES);
}

/* An FP32 or low element, widened; an operand's may be rounded before. */
AMPI_INLINE float ampi_element_f32(const void* data, amp_dtype t, size_t i) {
    const uint16_t* low = (const uint16_t*)data;
    if (t == AMP_F32) return ((const float*)data)[i];
    if ((int)t == AMPI_ROUNDED + (int)AMP_F16)
        return ampi_float(ampi_half_widen(ampi_half_bits(ampi_bits_at((const float*)data + i))));
    if ((int)t == AMPI_ROUNDED + (int)AMP_BF16)
        return ampi_float(ampi_bf16_widen(ampi_bf16_bits(ampi_bits_at((const float*)data + i))));
    return ampi_float(t == AMP_F16 ? ampi_half_widen(low[i]) : ampi_bf16_widen(low[i]));
}

/* What a pass says: nr = nv vectors, a register of AMPI_PASS_WIDTH floats, its operations, and a
   transpose. above_reg: is a magnitude above `limit`, both as bits? store_low writes the sixteen of
   registers q in 16 bits; NaNs come quiet, with a low half of 0 if to bfloat16, as rounding may
   carry. square_reg: s + x * x, a float for each double of s; of bfloat16, the even or odd ones of
   twice as many. */
#if AMPI_X86
/* --- pass 1: AVX2 --- */
#define AMPI_PASS avx2
#define AMPI_PASS_TARGET AMPI_TARGET_AVX2
#define AMPI_PASS_WIDTH 8
enum { AMPI_MR = 6, AMPI_NV = 1, AMPI_NR = 16, AMPI_NC = 512 };
typedef __m256 AMPI_K(reg);
typedef __m256d AMPI_K(doubles);
AMPI_LANES_FN __m256 AMPI_K(set1_reg)(float x) { return _mm256_set1_ps(x); }
AMPI_LANES_FN __m256 AMPI_K(fma_reg)(__m256 x, __m256 y, __m256 z) {
    return _mm256_fmadd_ps(x, y, z);
}

AMPI_LANES_FN __m256 AMPI_K(sqrt_reg)(__m256 x) { return _mm256_sqrt_ps(x); }

/* Is a magnitude above `limit`, both as bits? Larger ones leave a negative difference. */
AMPI_LANES_FN int AMPI_K(above_reg)(__m256 x, uint32_t limit) {
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x),
        _mm256_set1_epi32(0x7fffffff));
    return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32((int)limit),
        magnitude)));
}

/* s + x * x in double, for four elements at p; of bfloat16 for the even or the odd of eight. */
AMPI_LANES_FN __m256d AMPI_K(square_reg)(__m256d s, const void* p, amp_dtype t, int odd) {
    const __m128i x = t == AMP_F16 ? _mm_loadl_epi64((const __m128i*)p)
        : _mm_loadu_si128((const __m128i*)p);
    const __m128i one = t == AMP_F32 ? x : odd ? _mm_and_si128(x, _mm_set1_epi32(-0x10000))
        : _mm_slli_epi32(x, 16);
    const __m256d wide = _mm256_cvtps_pd(t == AMP_F16 ? _mm_cvtph_ps(x) : _mm_castsi128_ps(one));
    return _mm256_fmadd_pd(wide, wide, s);
}

/* A register of neighbours of type t, widened to FP32. */
AMPI_LANES_FN __m256 AMPI_K(load_reg)(const void* p, amp_dtype t) {
    const __m128i low = _mm_loadu_si128((const __m128i*)p);
    if (t == AMP_F32) return _mm256_loadu_ps((const float*)p);
    return t == AMP_F16 ? _mm256_cvtph_ps(low)
        : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 16));
}

/* To bfloat16, not packed yet. */
AMPI_LANES_FN __m256i AMPI_K(round_reg)(__m256 x) {
    const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16),
        _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff)),
        16);
}

/* packus works on each half, so quarters come as 0, 2, 1, 3. */
AMPI_LANES_FN void AMPI_K(store_low)(void* p, amp_dtype t, const __m256* q) {
    const __m256i quarters = _mm256_packus_epi32(AMPI_K(round_reg)(q[0]), AMPI_K(round_reg)(q[1]));
    if (t == AMP_BF16) _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(quarters, 0xd8));
    else {
        _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(q[0], 0));
        _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(q[1], 0));
    }
}

/* dst[j * ldd + i] = src[i][j], 8 x 8: src has rows `step` bytes apart, dst floats. */
AMPI_LANES_FN void AMPI_K(transpose8)(float* dst, size_t ldd, const char* src, size_t step,
        amp_dtype type) {
    __m256 r[8], t[8];
    int i;
    AMPI_UNROLL for (i = 0; i < 8; i++) r[i] = AMPI_K(load_reg)(src + (size_t)i * step, type);

    /* Blocks of 2 x 2 elements are transposed, then of 4 x 4, in each half of a register. */
    AMPI_UNROLL for (i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    AMPI_UNROLL for (i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }

    /* Rows i and i + 4 of the result are the lower and the upper halves of r[i] and r[i + 4]. */
    AMPI_UNROLL for (i = 0; i < 4; i++) {
        _mm256_storeu_ps(dst + (size_t)i * ldd, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(dst + (size_t)(i + 4) * ldd, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

/* dst[j * ldd + i] = src[i][j], 16 x 16: src has rows `step` bytes apart, dst floats. */
AMPI_KERNEL_FN void ampi_v_transpose(float* dst, size_t ldd, const void* src, size_t step,
        amp_dtype t) {
    const char* from = (const char*)src;
    for (int i = 0; i < 2; i++, dst += 8 * ldd, from += t == AMP_F32 ? 32 : 16) {
        AMPI_K(transpose8)(dst, ldd, from, step, t);
        AMPI_K(transpose8)(dst + 8, ldd, from + 8 * step, step, t);
    }
}

#include AMP_SELF
#ifdef AMPI_PASS  /* impl-kernels ends it */
  #error "define AMP_SELF to the name of this file: its implementation includes itself"
#endif
#endif

#if AMPI_AVX512
/* --- pass 2: AVX-512. Masked forms with all lanes on are the plain instructions, without gcc 12's
   warnings. --- */
#define AMPI_PASS avx512
#if AMPI_PAIRS
#define AMPI_PASS_TARGET AMPI_TARGET_PAIRS  /* no compiler emits vdpbf16ps by itself */
#define AMPI_PASS_PAIRS
#else
#define AMPI_PASS_TARGET AMPI_TARGET_AVX512
#endif
#define AMPI_PASS_WIDTH 16
enum { AMPI_MR = 12, AMPI_NV = 2, AMPI_NR = 32, AMPI_NC = 512 };
typedef __m512 AMPI_K(reg);
typedef __m512d AMPI_K(doubles);
AMPI_LANES_FN __m512 AMPI_K(set1_reg)(float x) { return _mm512_set1_ps(x); }
AMPI_LANES_FN __m512 AMPI_K(fma_reg)(__m512 x, __m512 y, __m512 z) {
    return _mm512_fmadd_ps(x, y, z);
}

AMPI_LANES_FN __m512 AMPI_K(sqrt_reg)(__m512 x) { return _mm512_maskz_sqrt_ps(AMPI_ALL16, x); }

/* Is a magnitude above `limit`, both as bits? Larger ones leave a negative difference. */
AMPI_LANES_FN int AMPI_K(above_reg)(__m512 x, uint32_t limit) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x),
        _mm512_set1_epi32(0x7fffffff));
    if (limit == 0x7f800000u) return _mm512_fpclass_ps_mask(x, 0x81) != 0;
    return _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32((int)limit)) != 0;
}

/* s + x * x in double, for elements at p; of bfloat16 for the even or the odd ones. */
AMPI_LANES_FN __m512d AMPI_K(square_reg)(__m512d s, const void* p, amp_dtype t, int odd) {
    const __m256 all = ampi_load_reg_avx2(p, t == AMP_F16 ? t : AMP_F32);
    const __m256i pairs = _mm256_castps_si256(all);
    const __m256i one = odd ? _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000))
        : _mm256_slli_epi32(pairs, 16);
    const __m256 x = t == AMP_BF16 ? _mm256_castsi256_ps(one) : all;
    const __m512d wide = _mm512_maskz_cvtps_pd(0xff, x);
    return _mm512_fmadd_pd(wide, wide, s);
}

/* Sixteen 16-bit elements in FP32. */
AMPI_LANES_FN __m512 AMPI_K(widen_reg)(__m256i low, amp_dtype t) {
    if (t == AMP_F16) return _mm512_maskz_cvtph_ps(AMPI_ALL16, low);
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(AMPI_ALL16,
        _mm512_maskz_cvtepu16_epi32(AMPI_ALL16, low), 16));
}

/* To bfloat16: u + 0x7fff + odd, which is u - ~(odd | 0x7ffe), and of that the upper halves. */
AMPI_LANES_FN __m256i AMPI_K(narrow_reg)(__m512 x, amp_dtype t) {
    const __m512i u = _mm512_castps_si512(x), one = _mm512_set1_epi32(1),
        carry = _mm512_set1_epi32(0x7ffe);
    const __m512i less = _mm512_ternarylogic_epi32(_mm512_maskz_srli_epi32(AMPI_ALL16, u, 16), one,
        carry, 0x15);
    const __m512i upper = _mm512_set_epi64(0, 0, 0, 0, 0x1f001d001b0019, 0x17001500130011,
        0xf000d000b0009, 0x7000500030001);
    const __m512i halves = _mm512_maskz_permutexvar_epi16(0xffffffffu, upper,
        _mm512_sub_epi32(u, less));
    return t == AMP_F16 ? _mm512_maskz_cvtps_ph(AMPI_ALL16, x, 0)
        : _mm512_maskz_extracti64x4_epi64(0xf, halves, 0);
}

/* A register of neighbours of type t, widened to FP32. */
AMPI_LANES_FN __m512 AMPI_K(load_reg)(const void* p, amp_dtype t) {
    return t == AMP_F32 ? _mm512_loadu_ps(p)
        : AMPI_K(widen_reg)(_mm256_loadu_si256((const __m256i*)p), t);
}

/* Stores sixteen lanes in 16 bits, rounded to nearest even. */
AMPI_LANES_FN void AMPI_K(store_low)(void* p, amp_dtype t, const __m512* q) {
    _mm256_storeu_si256((__m256i*)p, AMPI_K(narrow_reg)(*q, t));
}

AMPI_LANES_FN void ampi_v_transpose(float* dst, size_t ldd, const void* src, size_t step,
        amp_dtype t) {
    ampi_v_transpose_avx2(dst, ldd, src, step, t);
}

#include AMP_SELF
#endif

/* --- the baseline: NEON, or plain C --- */
#define AMPI_PASS base
#define AMPI_PASS_TARGET
enum { AMPI_MR = AMPI_NEON ? 6 : 4, AMPI_NV = 1, AMPI_NR = 16, AMPI_NC = 256 };
typedef double AMPI_K(doubles);
/* s + x * x in double, for elements at p; of bfloat16 for the even or the odd ones. */
AMPI_LANES_FN double AMPI_K(square_reg)(double s, const void* p, amp_dtype t, int odd) {
    const float x = ampi_element_f32(p, t, t == AMP_BF16 && odd);
    return s + (double)x * (double)x;
}

#if AMPI_NEON
#define AMPI_PASS_WIDTH 4
typedef float32x4_t AMPI_K(reg);
AMPI_LANES_FN float32x4_t AMPI_K(set1_reg)(float x) { return vdupq_n_f32(x); }
AMPI_LANES_FN float32x4_t AMPI_K(fma_reg)(float32x4_t x, float32x4_t y, float32x4_t z) {
    return vfmaq_f32(z, x, y);
}

AMPI_LANES_FN float32x4_t AMPI_K(sqrt_reg)(float32x4_t x) { return vsqrtq_f32(x); }

/* Is a magnitude above `limit`, both as bits? Larger ones leave a negative difference. */
AMPI_LANES_FN int AMPI_K(above_reg)(float32x4_t x, uint32_t limit) {
    return vmaxvq_u32(vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fffffffu))) > limit;
}

/* A register of neighbours of type t, widened to FP32. */
AMPI_LANES_FN float32x4_t AMPI_K(load_reg)(const void* p, amp_dtype t) {
    float wide[4];
    if (t == AMP_F32) return vld1q_f32((const float*)p);
    if (t == AMP_BF16) return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p), 16));
    /* whatever the processor's modes */
    for (int l = 0; l < 4; l++) wide[l] = ampi_element_f32(p, t, (size_t)l);
    return vld1q_f32(wide);
}

/* Stores sixteen lanes in 16 bits, rounded to nearest even. */
AMPI_LANES_FN void AMPI_K(store_low)(void* p, amp_dtype t, const float32x4_t* q) {
    float wide[16];
    AMPI_UNROLL for (int i = 0; i < 4; i++) {
        const uint32x4_t u = vreinterpretq_u32_f32(q[i]),
            odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(vaddq_u32(u, odd), vdupq_n_u32(0x7fff));
        if (t == AMP_BF16) vst1_u16((uint16_t*)p + 4 * i, vshrn_n_u32(rounded, 16));
        else vst1q_f32(wide + 4 * i, q[i]);
    }
    if (t == AMP_F16) ampi_lanes_f32_to_half((uint16_t*)p, wide);
}
#else
#if !AMPI_FMA_NATIVE  /* an emulated fma hides the cost of calls, and the code is half as large */
  #undef AMPI_LANES_FN
  #undef AMPI_UNROLL
  #define AMPI_LANES_FN AMPI_FN
  #define AMPI_UNROLL
#endif
#define AMPI_PASS_WIDTH 1
typedef float AMPI_K(reg);
AMPI_LANES_FN float AMPI_K(set1_reg)(float x) { return x; }
#endif
#define AMPI_PASS_BASE 1
#endif /* AMP_IMPLEMENTATION */
#endif /* !AMPI_PASS */

#ifdef AMPI_PASS
/* >>impl-kernels  Products and convolutions, compiled once for each instruction set. */
/*
   This room holds the kernels that the rooms below call through ampi_kernels. It calls impl-base to
   impl-vector only.

   A product, C[m,n] = A[m,k] * B[k,n], in the five loops of BLIS (Van Zee and van de Geijn, ACM
   TOMS 2015). Left stands the function that holds a loop:
       product     5  for jc in n by NC          columns of C; around it rows, if sums wait
                   4    for pc in k by KC        B, KC x NC, is packed for the second-level cache
       block_of_k  3      for ic in m by MC      A, MC x KC, is packed
       macro_tile  2        for jr in NC by NR   a micro-panel of B comes into the first-level cache
       micro_rows  1          for ir in MC by MR   a micro-tile of C, MR x NR sums, is in registers
       micro_tile               for p in KC      an fma for each sum, which so takes k ascending
       store_tile         the epilogue, after the last pc: alpha, beta, bias, one rounding

   Packed layouts, drawn with MR = 2, NR = 4, KC = 3, NC = 8; aij and bij are elements of A and B:
       B      b00 b01 b02 b03   b04 b05 b06 b07    micro-panels [NC / NR][KC + 1][NR]
              b10 b11 b12 b13   b14 b15 b16 b17    one more row behind each: panels share no
              b20 b21 b22 b23   b24 b25 b26 b27    cache sets
       A      a00 a01 a02       a10 a11 a12        rows along k, if FP32 as in memory; else widened,
                                                   [MC][KC + PAD]
       A^T    a00 a10   a01 a11   a02 a12          micro-panels [MC / MR][KC + PAD][MR]
       pairs  b00|b10   b01|b11   ...              two bfloat16 a word, the even row high, packed in
                                                   one pass from rows of 16 bits

   A convolution is this product with B the im2col matrix, of which only the blocks in use are
   formed. As an example serves one row of five pixels, a to e, kernel positions j = 0, 1, 2,
   padding 1, stride 1. Grid pixel i is an output. It meets source pixel i - 1 + j: step 1, first
   -1, next 1.
       im2col    j = 0   0 a b c d        padded plane    0 a b c d e  0 a' b' c' d' e'  0
                 j = 1   a b c d e        at[j] = j       a' to e' are the row below.
                 j = 2   b c d e 0                        One margin serves two rows.
   So 16 grid pixels see 16 neighbouring floats at each kernel position, and the micro-kernel
   reads B in place. The grid then has six columns a row, as the plane has: the sixth is margin,
   and its sum is not stored. Pairs are packed from such a copy in 16 bits, without margins:
   loads of two rows serve as many sums as A has rows. In two dimensions at[kernel row, kernel
   column] = kernel row * 6 + kernel column. With stride 2 the plane is two, one for each phase,
   0 b d and a c e: grid pixel i meets place i + j / 2 of plane j % 2.
   For a weight gradient k runs over grid pixels, and B's columns are kernel positions and channels.
   The window of grid pixel i is columns i, i + 1, i + 2 of the padded image, each with all kernel
   rows and channels. Windows overlap in memory, at[i] = i * height (see ampi_windows):
       0 a b | a b c | b c d | ...    lie there as    0 a b c d e 0

   Words.  grid pixel: a column of the im2col matrix. kernel position: one of kernel_h x kernel_w.
   place: an index of a padded plane. margin: the zeros of padding. phase: pixels that meet the same
   kernel positions of a strided kernel, or the plane for them. piece: neighbours of C that are
   stored together. pair: two bfloat16 in 32 bits.
   Letters.  s: a product. v, a, b: operands. c: the epilogue of C. g: an im2col matrix. q: what
   loops of a product share. u: arguments of the micro-kernel. t: a type. at: offsets in floats.
   Rows in scratch memory are written in whole vectors: up to 15 floats behind, which are spare or
   written later. */

/* --- sixteen lanes --- */

#define AMPI_REGISTERS (AMPI_LANES / AMPI_PASS_WIDTH)
typedef struct { AMPI_K(reg) q[AMPI_REGISTERS]; } AMPI_V16;

/* Sixteen lanes that are all x. */
AMPI_LANES_FN AMPI_V16 ampi_v_set1(float x) {
    AMPI_V16 r;
    AMPI_UNROLL for (int i = 0; i < AMPI_REGISTERS; i++) r.q[i] = AMPI_K(set1_reg)(x);
    return r;
}

/* x + y in each lane. */
AMPI_LANES_FN AMPI_V16 ampi_v_add(AMPI_V16 x, AMPI_V16 y) {
    AMPI_UNROLL for (int i = 0; i < AMPI_REGISTERS; i++) x.q[i] += y.q[i];
    return x;
}

/* x * y in each lane. */
AMPI_LANES_FN AMPI_V16 ampi_v_mul(AMPI_V16 x, AMPI_V16 y) {
    AMPI_UNROLL for (int i = 0; i < AMPI_REGISTERS; i++) x.q[i] *= y.q[i];
    return x;
}

#if AMPI_PASS_WIDTH > 1
/* x * y + z in each lane, rounded once; with AMPI_OF_PAIRS two products of bfloat16 a lane are
   added to z. */
AMPI_LANES_FN AMPI_V16 ampi_v_fma(int how, AMPI_V16 x, AMPI_V16 y, AMPI_V16 z) {
    (void)how;
#ifdef AMPI_PASS_PAIRS
    if (how == AMPI_OF_PAIRS) {
        z.q[0] = _mm512_dpbf16_ps(z.q[0], (__m512bh)x.q[0], (__m512bh)y.q[0]);
        return z;
    }
#endif
    AMPI_UNROLL for (int i = 0; i < AMPI_REGISTERS; i++)
        z.q[i] = AMPI_K(fma_reg)(x.q[i], y.q[i], z.q[i]);
    return z;
}

/* Has any lane a magnitude above `limit`, both as bits? */
AMPI_LANES_FN int AMPI_K(above)(AMPI_V16 x, uint32_t limit) {
    int i, any = 0;
    AMPI_UNROLL for (i = 0; i < AMPI_REGISTERS; i++) any |= AMPI_K(above_reg)(x.q[i], limit);
    return any;
}

/* Sixteen neighbours of type t, widened to FP32. */
AMPI_LANES_FN AMPI_V16 ampi_v_load_typed(const void* p, amp_dtype t) {
    const int bytes = AMPI_PASS_WIDTH * (t == AMP_F32 ? 4 : 2);
    AMPI_V16 r;
    AMPI_UNROLL for (int i = 0; i < AMPI_REGISTERS; i++)
        r.q[i] = AMPI_K(load_reg)((const char*)p + i * bytes, t);
    return r;
}

AMPI_LANES_FN void AMPI_K(store_reg)(float* p, AMPI_K(reg) x) { memcpy(p, &x, sizeof x); }

/* Stores sixteen lanes as type t, rounded to nearest even. */
AMPI_LANES_FN void ampi_v_store_typed(void* p, amp_dtype t, AMPI_V16 x) {
    if (t != AMP_F32) { AMPI_K(store_low)(p, t, x.q); return; }
    AMPI_UNROLL for (int i = 0; i < AMPI_REGISTERS; i++)
        AMPI_K(store_reg)((float*)p + i * AMPI_PASS_WIDTH, x.q[i]);
}
#else
/* AMPI_EXACT: products are exact in FP32, so a multiply and an add round as an fma. */
AMPI_LANES_FN AMPI_V16 ampi_v_fma(int how, AMPI_V16 x, AMPI_V16 y, AMPI_V16 z) {
    if (how == AMPI_EXACT) for (int l = 0; l < 16; l++) z.q[l] += x.q[l] * y.q[l];
    else if (AMPI_FMA_NATIVE)
        for (int l = 0; l < 16; l++) z.q[l] = ampi_fma(1, x.q[l], y.q[l], z.q[l]);
    else for (int l = 0; l < 16; l++) z.q[l] = ampi_fma_emulated(x.q[l], y.q[l], z.q[l]);
    return z;
}

/* Has any lane a magnitude above `limit`, both as bits? */
AMPI_LANES_FN int AMPI_K(above)(AMPI_V16 x, uint32_t limit) {
    uint32_t any = 0;
    for (int l = 0; l < 16; l++) any |= limit - (ampi_bits(x.q[l]) & 0x7fffffffu);
    return any >> 31 != 0;
}

/* Sixteen neighbours of type t, widened to FP32. */
AMPI_LANES_FN AMPI_V16 ampi_v_load_typed(const void* p, amp_dtype t) {
    AMPI_V16 r;
    if (t == AMP_F16) ampi_lanes_half_to_f32(r.q, (const uint16_t*)p);
    else if (t == AMP_BF16) ampi_lanes_bf16_to_f32(r.q, (const uint16_t*)p);
    else memcpy(r.q, p, sizeof r.q);
    return r;
}

/* Stores sixteen lanes as type t, rounded to nearest even. */
AMPI_LANES_FN void ampi_v_store_typed(void* p, amp_dtype t, AMPI_V16 x) {
    if (t == AMP_F16) ampi_lanes_f32_to_half((uint16_t*)p, x.q);
    else if (t == AMP_BF16) ampi_lanes_f32_to_bf16((uint16_t*)p, x.q);
    else memcpy(p, x.q, sizeof x.q);
}
#endif
/* Sixteen neighbouring floats. */
AMPI_LANES_FN AMPI_V16 ampi_v_load(const float* p) { return ampi_v_load_typed(p, AMP_F32); }

/* Stores sixteen floats. */
AMPI_LANES_FN void ampi_v_store(float* p, AMPI_V16 x) { ampi_v_store_typed(p, AMP_F32, x); }

/* Makes NaNs quiet and keeps only the bits of their sign and payload that `kept` has; 0 leaves
   0x7fc00000. The branch pays, as NaNs are rare. */
AMPI_LANES_FN AMPI_V16 ampi_v_quiet(AMPI_V16 x, uint32_t kept) {
    float v[AMPI_LANES];
    if (!AMPI_K(above)(x, 0x7f800000u)) return x;
    ampi_v_store(v, x);
    ampi_quiet_lanes(v, kept);
    return ampi_v_load(v);
}

#if AMPI_PASS_WIDTH == 16
/* A mask of the first `count` <= 16 lanes. */
AMPI_LANES_FN __mmask16 AMPI_K(first)(size_t count) { return (__mmask16)((1u << count) - 1u); }

/* The first `count` of sixteen neighbours; the other lanes are 0, and not read. */
AMPI_LANES_FN AMPI_V16 AMPI_K(load_part)(const void* p, amp_dtype t, size_t count) {
    const __mmask16 m = AMPI_K(first)(count);
    AMPI_V16 x;
    x.q[0] = t == AMP_F32 ? _mm512_maskz_loadu_ps(m, p)
        : AMPI_K(widen_reg)(_mm256_maskz_loadu_epi16(m, p), t);
    return x;
}

/* Stores the first `count` of sixteen lanes as type t. */
AMPI_LANES_FN void AMPI_K(store_part)(void* p, amp_dtype t, AMPI_V16 x, size_t count) {
    if (t == AMP_F32) _mm512_mask_storeu_ps(p, AMPI_K(first)(count), x.q[0]);
    else _mm256_mask_storeu_epi16(p, AMPI_K(first)(count), AMPI_K(narrow_reg)(x.q[0], t));
}
#else
/* The first `count` of sixteen neighbours; the other lanes are 0, and not read. */
AMPI_KERNEL_FN AMPI_V16 AMPI_K(load_part)(const void* p, amp_dtype t, size_t count) {
    float whole[AMPI_LANES] = { 0 };
    memcpy(whole, p, count * (t == AMP_F32 ? 4 : 2));
    return ampi_v_load_typed(whole, t);
}

/* Stores the first `count` of sixteen lanes as type t. */
AMPI_KERNEL_FN void AMPI_K(store_part)(void* p, amp_dtype t, AMPI_V16 x, size_t count) {
    float whole[AMPI_LANES];
    ampi_v_store_typed(whole, t, x);
    memcpy(p, whole, count * (t == AMP_F32 ? 4 : 2));
}
#endif
#if AMPI_PASS_WIDTH < 8
/* dst[j][i] = src[i][j], 16 x 16; ldd counts floats, step bytes. */
AMPI_KERNEL_FN void ampi_v_transpose(float* dst, size_t ldd, const void* src, size_t step,
        amp_dtype t) {
    float rows[AMPI_LANES][AMPI_LANES];
    for (size_t i = 0; i < AMPI_LANES; i++)
        ampi_v_store(rows[i], ampi_v_load_typed((const char*)src + i * step, t));
    for (size_t j = 0; j < AMPI_LANES; j++)
        for (size_t i = 0; i < AMPI_LANES; i++) dst[j * ldd + i] = rows[i][j];
}
#endif
#ifdef AMPI_PASS_PAIRS
/* Pairs of two vectors of bfloat16, widened to FP32; `even` goes into the high halves. */
AMPI_LANES_FN AMPI_V16 AMPI_K(pair)(__m512 even, __m512 odd) {
    const __m512i low = _mm512_maskz_srli_epi32(AMPI_ALL16, _mm512_castps_si512(odd), 16);
    AMPI_V16 x;
    x.q[0] = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(even), low));
    return x;
}

/* Sixteen pairs, as `pair` makes them, of 32 neighbouring bfloat16 widened to FP32. */
AMPI_LANES_FN AMPI_V16 AMPI_K(load_pairs)(const float* p) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2,
        0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    const __m512 x = _mm512_loadu_ps(p), y = _mm512_loadu_ps(p + 16);
    return AMPI_K(pair)(_mm512_permutex2var_ps(x, even, y), _mm512_permutex2var_ps(x, odd, y));
}

/* The least exponent field of n bfloat16 that are not 0; 256 if all are. */
AMPI_KERNEL_FN unsigned AMPI_K(least_exponent)(const uint16_t* x, size_t n) {
    uint16_t lanes[32], less;
    unsigned least = 0x7fff;
    size_t i;

    /* The least magnitude, less 1: this turns zero into 0xffff, which is never the minimum. */
    memset(lanes, 0xff, sizeof lanes);
    for (i = 0; i + 32 <= n; i += 32)
        for (size_t l = 0; l < 32; l++) {
            less = (uint16_t)((x[i + l] & 0x7fffu) - 1u);
            lanes[l] = lanes[l] < less ? lanes[l] : less;
        }
    for (; i < n; i++) {
        less = (uint16_t)((x[i] & 0x7fffu) - 1u);
        if (less < least) least = less;
    }
    for (size_t l = 0; l < 32; l++) if (lanes[l] < least) least = lanes[l];

    return (least + 1u) >> 7;  /* the exponent field; 256 where `least` is as it began */
}
#endif
/* The first `count` of sixteen neighbours, all of them if it is 16 or more; other lanes are 0. */
AMPI_LANES_FN AMPI_V16 ampi_v_load_any(const void* p, amp_dtype t, size_t count) {
    return count >= AMPI_LANES ? ampi_v_load_typed(p, t) : AMPI_K(load_part)(p, t, count);
}

/* load_any of FP32 elements that are rounded to type `to`, into memory. The function is not
   inlined, as few operands are rounded. */
AMPI_PASS_TARGET AMPI_APART void AMPI_K(round_part)(float* dst, const void* p, amp_dtype to,
        size_t count) {
    float low[AMPI_LANES] = { 0 };  /* loads of a type known at run time may reach as far */
    AMPI_V16 x = ampi_v_load_any(p, AMP_F32, count);
    if (to == AMP_BF16) x = ampi_v_quiet(x, 0xffff0000u);
    ampi_v_store_typed(low, to, x);
    ampi_v_store(dst, ampi_v_load_typed(low, to));
}

/* load_any of an operand, whose elements may be rounded: see AMPI_ROUNDED. */
AMPI_LANES_FN AMPI_V16 AMPI_K(load_operand)(const void* p, amp_dtype t, size_t count) {
    float rounded[AMPI_LANES];
    if ((int)t < AMPI_ROUNDED) return ampi_v_load_any(p, t, count);
    AMPI_K(round_part)(rounded, p, (amp_dtype)((int)t - AMPI_ROUNDED), count);
    return ampi_v_load(rounded);
}

/* Stores the first `count` lanes, all of them if it is 16 or more. */
AMPI_LANES_FN void ampi_v_store_any(void* p, amp_dtype t, AMPI_V16 x, size_t count) {
    if (count >= AMPI_LANES) ampi_v_store_typed(p, t, x);
    else AMPI_K(store_part)(p, t, x, count);
}

/* `count` neighbours in FP32, and zeros up to whole vectors. */
AMPI_KERNEL_FN void ampi_v_widen(float* dst, const void* src, amp_dtype t, size_t count) {
    for (size_t i = 0; i < count; i += AMPI_LANES)
        ampi_v_store(dst + i, AMPI_K(load_operand)(ampi_at(src, t, i), t, count - i));
}

AMPI_KERNEL_FN void ampi_v_clear(float* dst, size_t count) {
    for (size_t i = 0; i < count; i += AMPI_LANES) ampi_v_store(dst + i, ampi_v_set1(0.0f));
}

/* --- the micro-kernel --- */

/* What the micro-kernel adds: sums[i][j] += sum over p < k of a[i * row_step + p * k_step] *
   b[p][j]. Each sum takes p in ascending order, one fma for each. */
typedef struct AMPI_MICRO_ARGS {
    size_t k;            /* rows of b; each holds one k, or a pair of them */
    const float* a;      /* rows of op(A), in FP32 or as pairs */
    size_t row_step,     /* floats from one row of op(A) to the next */
           k_step;       /* floats from one k of it to the next; 0: a is micro-panels */
    const float* b;      /* the panel of op(B): row p begins at b + p * NR, */
    const uint32_t* at;  /* or at b + at[p] (planes, windows), if this is not NULL */
    float* sums;         /* of the micro-tile's first row and column */
    size_t ld,           /* floats from one row of sums to the next */
           next;         /* floats from the first vector of columns to the second, in sums and b */
    int first,           /* sums begin as 0 */
        exact;           /* products of two elements are exact in FP32 */
} AMPI_MICRO_ARGS;

/* A micro-tile of `rows` rows and `vectors` vectors of columns. pairs: a and b hold pairs of
   bfloat16. These three are constants where it is called, so that all sums stay in registers. */
AMPI_LANES_FN void AMPI_K(micro_tile)(int rows, int vectors, int pairs,
        const AMPI_MICRO_ARGS* u) {
    AMPI_V16 acc[AMPI_MR][AMPI_NV], x[AMPI_NV];  /* the sums; a row of b */
    /* Every fourth row of a: a pointer for each would take too many registers. */
    const float* a[(AMPI_MR + 3) / 4] = { 0 };
    const uint32_t* at = u->at;
    const size_t row_step = u->row_step, k_step = u->k_step, k = u->k, next = u->next;
    const int how = pairs ? (int)AMPI_OF_PAIRS : AMPI_PASS_WIDTH == 1 && u->exact;
    int i, j;

    AMPI_UNROLL for (i = 0; i < rows; i++)
        AMPI_UNROLL for (j = 0; j < vectors; j++)
            acc[i][j] = u->first ? ampi_v_set1(0.0f) : ampi_v_load(u->sums + (size_t)i * u->ld
                + next * (size_t)j);

    for (size_t p = 0; p < k; p++) {
        const float* row = u->b + (at ? at[p] : p * AMPI_NR);
        AMPI_UNROLL for (i = 0; i < rows; i += 4)
            a[i / 4] = u->a + (size_t)i * row_step + p * k_step;
        AMPI_UNROLL for (j = 0; j < vectors; j++) x[j] = ampi_v_load(row + next * (size_t)j);

        AMPI_UNROLL for (i = 0; i < rows; i++) {
            const AMPI_V16 y = ampi_v_set1(a[i / 4][(size_t)(i % 4) * row_step]);
            AMPI_UNROLL for (j = 0; j < vectors; j++)
                acc[i][j] = ampi_v_fma(how, y, x[j], acc[i][j]);
        }
    }

    AMPI_UNROLL for (i = 0; i < rows; i++)
        AMPI_UNROLL for (j = 0; j < vectors; j++)
            ampi_v_store(u->sums + (size_t)i * u->ld + next * (size_t)j, acc[i][j]);
}

/* How many of `left` rows the next micro-tile takes. A last MR + 2 is split, as sums of two rows do
   not hide the latency of an fma. */
AMPI_INLINE size_t AMPI_K(tile_rows)(size_t left) {
    if (left == AMPI_MR + 2) return AMPI_MR > 8 ? 8 : 4;
    if (left >= AMPI_MR) return AMPI_MR;
    return left >= 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* Loop 1: micro-tiles, one below another, until all rows have their sums. */
AMPI_LANES_FN void AMPI_K(micro_rows)(size_t rows, int vectors, int pairs,
        const AMPI_MICRO_ARGS* args) {
    size_t count;
    for (size_t i = 0; i < rows; i += count) {
        AMPI_MICRO_ARGS u = *args;
        count = AMPI_K(tile_rows)(rows - i);
        u.sums += i * u.ld;
        if (u.k_step == 0) {  /* micro-panels, with room for k + PAD; one k on is `count` floats */
            u.a += i * (u.k + AMPI_PAD);
            u.k_step = count;
        } else
            u.a += i * u.row_step;

        if (count == AMPI_MR) AMPI_K(micro_tile)(AMPI_MR, vectors, pairs, &u);
        else if (AMPI_MR > 8 && count == 8) AMPI_K(micro_tile)(8, vectors, pairs, &u);
        else if (AMPI_MR > 6 && count == 6) AMPI_K(micro_tile)(6, vectors, pairs, &u);
        else if (AMPI_MR > 4 && count == 4) AMPI_K(micro_tile)(4, vectors, pairs, &u);
        else if (count == 2) AMPI_K(micro_tile)(2, vectors, pairs, &u);
        else AMPI_K(micro_tile)(1, vectors, pairs, &u);
    }
}

#if defined(AMPI_PASS_PAIRS) && AMPI_AMX
/* The matrix unit: tdpbf16ps adds to 16 x 16 sums the product of 16 rows of 16 pairs of A with 16
   pairs of 16 columns of B. Its order (Intel SDM): products of low halves in one chain of fma from
   +0, those of high halves in another; the two are added, then to the old sum. Rows and pairs are
   padded to 16. Tiles 0 and 1 are sums of the first and, if `two`, the second 16 columns; 2 is A;
   3 and 4 are B. */
AMPI_TARGET_AMX AMPI_FN void AMPI_K(micro_amx)(size_t rows, int two, const AMPI_MICRO_ARGS* u) {
    /* bytes from row to row of sums, of A and of B */
    const ptrdiff_t ld = (ptrdiff_t)(u->ld * sizeof(float));
    const ptrdiff_t a_step = (ptrdiff_t)(u->row_step * sizeof(float));
    const ptrdiff_t b_step = (ptrdiff_t)(AMPI_NR * sizeof(float));
    AMPI_FORGET(u->a);  /* gcc does not know that tile loads read memory */

    for (size_t i = 0; i < rows; i += AMPI_LANES) {
        const float *a = u->a + i * u->row_step, *b = u->b;
        float* sums = u->sums + i * u->ld;
        _tile_zero(0); _tile_zero(1);
        if (!u->first) _tile_loadd(0, sums, ld);
        if (!u->first && two) _tile_loadd(1, sums + AMPI_LANES, ld);

        for (size_t p = 0; p < u->k; p += AMPI_LANES) {
            _tile_loadd(2, a + p, a_step);
            _tile_loadd(3, b + p * AMPI_NR, b_step);
            _tile_dpbf16ps(0, 2, 3);
            if (!two) continue;
            _tile_loadd(4, b + p * AMPI_NR + AMPI_LANES, b_step);
            _tile_dpbf16ps(1, 2, 4);
        }

        _tile_stored(0, sums, ld);
        if (two) _tile_stored(1, sums + AMPI_LANES, ld);
    }
}
#endif

/* Sums of any number of rows and one vector of columns, or `two`; form: that of the product. The
   function is not inlined: the caller's variables would spill the registers of sums. */
AMPI_PASS_TARGET AMPI_APART void AMPI_K(micro)(int form, size_t rows, int two,
        const AMPI_MICRO_ARGS* u) {
    (void)form;
#if defined(AMPI_PASS_PAIRS) && AMPI_AMX
    if (form == AMPI_AMX_PAIRS) { AMPI_K(micro_amx)(rows, two, u); return; }
#endif
#ifdef AMPI_PASS_PAIRS
    if (form == AMPI_PAIRS_OF_BF16 && two) AMPI_K(micro_rows)(rows, AMPI_NV, 1, u);
    else if (form == AMPI_PAIRS_OF_BF16) AMPI_K(micro_rows)(rows, 1, 1, u);
    else
#endif
    if (two && AMPI_NV > 1) AMPI_K(micro_rows)(rows, AMPI_NV, 0, u);
    else AMPI_K(micro_rows)(rows, 1, 0, u);
}

/* --- rows of operands --- */

/* `count` zeros: most often one vector, for which gcc would call memset. */
AMPI_LANES_FN void AMPI_K(margin)(float* dst, size_t count) {
    if (count > AMPI_LANES) ampi_v_clear(dst, count);
    else if (count > 0) ampi_v_store(dst, ampi_v_set1(0.0f));
}

/* `count` elements, `step` apart, in FP32. Up to a step of 4 all elements between are widened
   together, then picked from; else elements are widened one by one. */
AMPI_PASS_TARGET AMPI_APART void AMPI_K(strided_row)(float* dst, const void* src, amp_dtype t,
        size_t step, size_t count) {
    float floats[4 * AMPI_LANES];
    for (size_t i = 0; i < count; i += AMPI_LANES) {
        const size_t n = ampi_min_size(count - i, AMPI_LANES);
        const void* from = ampi_at(src, t, i * step);
        if (step <= 4) ampi_v_widen(floats, from, t, (n - 1) * step + 1);
        for (size_t l = 0; l < n; l++)
            dst[i + l] = step <= 4 ? floats[l * step] : ampi_element_f32(from, t, l * step);
    }
}

/* Pixels `row` of row y of a source plane in FP32, and zeros for those outside of it. v: the image;
   plane: the number of the plane's first element in it. */
AMPI_LANES_FN void AMPI_K(source_row)(float* dst, const ampi_operand* v, size_t plane, int64_t y,
        const ampi_row_pixels* row) {
    const ampi_im2col* g = &v->image;
    const size_t size = ampi_element_size(v->dtype), inside = row->inside,
        behind = row->left + inside;
    const char* src;
    size_t first;
    if (y < 0 || y >= g->h.size || inside == 0) {  /* the row is margin */
        AMPI_K(margin)(dst, row->count);
        return;
    }

    first = plane + (size_t)y * (size_t)g->w.size + row->first;
    src = (const char*)v->data + first * size;
    AMPI_K(margin)(dst, row->left);
    dst += row->left;
    if (row->step > 1) {
        AMPI_K(strided_row)(dst, src, v->dtype, row->step, inside);
    } else if (first + inside + AMPI_LANES > g->elements) {
        ampi_v_widen(dst, src, v->dtype, inside);
    } else {  /* whole vectors may be read, as the source has one more behind the row */
        for (size_t i = 0; i < inside; i += AMPI_LANES)
            ampi_v_store(dst + i, AMPI_K(load_operand)(src + i * size, v->dtype, AMPI_LANES));
    }
    AMPI_K(margin)(dst + inside, row->count - behind);
}

#ifdef AMPI_PASS_PAIRS
/* `count` elements of 16 bits in whole vectors; zeros if src is NULL, as then no lane is loaded. */
AMPI_LANES_FN void AMPI_K(copy_low)(uint16_t* dst, const uint16_t* src, size_t count) {
    for (size_t i = 0; i < count; i += AMPI_LANES) {
        const __mmask16 lanes = AMPI_K(first)(src ? ampi_min_size(count - i, AMPI_LANES) : 0);
        _mm256_storeu_si256((__m256i*)(void*)(dst + i), _mm256_maskz_loadu_epi16(lanes,
            src ? src + i : dst));
    }
}

/* source_row for bfloat16, which stay as they are. */
AMPI_KERNEL_FN void AMPI_K(low_row)(uint16_t* dst, const ampi_operand* v, size_t plane, int64_t y,
        const ampi_row_pixels* row) {
    const ampi_im2col* g = &v->image;
    const uint16_t* src = (const uint16_t*)v->data;
    if (y < 0 || y >= g->h.size || row->inside == 0) {  /* the row is margin */
        AMPI_K(copy_low)(dst, NULL, row->count);
        return;
    }

    src += plane + (size_t)y * (size_t)g->w.size + row->first;
    AMPI_K(copy_low)(dst, NULL, row->left);
    dst += row->left;
    if (row->step == 1) AMPI_K(copy_low)(dst, src, row->inside);
    else for (size_t i = 0; i < row->inside; i++) dst[i] = src[i * row->step];
    AMPI_K(copy_low)(dst + row->inside, NULL, row->count - row->left - row->inside);
}
#endif

/* Places [from, from + count) of a channel's padded planes of phase (h, w), row by row and image by
   image; behind the last image, zeros. low: bfloat16 stay such, in place of FP32. */
AMPI_KERNEL_FN void AMPI_K(pad)(void* dst, int low, const ampi_operand* v, size_t channel,
        size_t h, size_t w, size_t from, size_t count) {
    const ampi_im2col* g = &v->image;
    /* The source pixel of a row's first place, and all pixels of a row. */
    const int64_t left = (int64_t)w + g->w.low;
    const ampi_row_pixels whole = ampi_row_pixels_of(g->w.size, left, g->w.step, g->w.padded);
    /* Where the next place lies: its column, its row, the first element of its source plane. */
    size_t p, n, x = from % g->w.padded, row = from / g->w.padded % g->h.padded;
    size_t plane = from / g->w.padded / g->h.padded * g->image + channel * g->plane;

    for (p = 0; p < count; p += n) {
        /* A row outside of the source, as h.size is, gives zeros. */
        const int64_t y = plane < g->elements ? (int64_t)(row * (size_t)g->h.step + h) + g->h.low
            : g->h.size;
        ampi_row_pixels pixels = whole;
        n = ampi_min_size(g->w.padded - x, count - p);
        if (n < g->w.padded)  /* the first or last row, of which a part is wanted */
            pixels = ampi_row_pixels_of(g->w.size, (int64_t)(x * (size_t)g->w.step) + left,
                g->w.step, n);
#ifdef AMPI_PASS_PAIRS
        if (low) AMPI_K(low_row)((uint16_t*)dst + p, v, plane, y, &pixels);
#endif
        if (!low) AMPI_K(source_row)((float*)dst + p, v, plane, y, &pixels);

        x = 0;
        row++;
        if (row == g->h.padded) {
            row = 0;
            plane += g->image;
        }
    }
}

/* The padded planes that rows [first, first + rows) of an im2col matrix read in `count` columns
   from `column` on: channel by channel, in these phase by phase. at[i]: where row first + i begins
   there. low: see pad. */
AMPI_KERNEL_FN void AMPI_K(pad_rows)(float* dst, int low, uint32_t* at, const ampi_operand* v,
        size_t first, size_t rows, size_t column, size_t count) {
    const ampi_im2col* g = &v->image;
    /* Places of the columns, whose last vector is read whole, and what the kernel reads behind. */
    const size_t from = ampi_padded_place(g, column);
    const size_t to = ampi_padded_place(g, column + count - 1) + AMPI_LANES;
    const size_t place_count = to - from + g->h.over * g->w.padded + g->w.over;
    /* An odd number of vectors from plane to plane: planes share no cache sets. */
    const size_t step = ((ampi_div_up(place_count, AMPI_LANES) + 1) | 1) * AMPI_LANES;
    ampi_padded_table(g, step, first, rows, at);
    for (size_t channel = first / g->area; channel <= (first + rows - 1) / g->area; channel++)
        for (size_t h = 0; h < g->h.phases; h++)
            for (size_t w = 0; w < g->w.phases; w++, dst += low ? step / 2 : step)
                AMPI_K(pad)(dst, low, v, channel, h, w, from, place_count);
}

/* Columns [column, column + count) of a row of an im2col matrix, all in one row of the grid. */
AMPI_KERNEL_FN void AMPI_K(im2col_row)(float* dst, const ampi_operand* v, size_t row,
        size_t column, size_t count) {
    const ampi_im2col* g = &v->image;
    const size_t pixel = column % g->pixels, position = row % g->area;
    const size_t kernel_row = position / g->w.kernel, kernel_column = position % g->w.kernel;
    const int64_t y = (int64_t)(pixel / g->w.count) * g->h.step + g->h.first
        + (int64_t)kernel_row * g->h.next;
    const int64_t x = (int64_t)(pixel % g->w.count) * g->w.step + g->w.first
        + (int64_t)kernel_column * g->w.next;
    const ampi_row_pixels pixels = ampi_row_pixels_of(g->w.size, x, g->w.step, count);
    AMPI_K(source_row)(dst, v, column / g->pixels * g->image + row / g->area * g->plane, y,
        &pixels);
}

/* `rows` rows of an im2col matrix from a padded copy, in which row r begins at copy + at[r]:
   columns [column, column + count), `ld` floats from row to row. The margins of the copy are left
   out. */
AMPI_KERNEL_FN void AMPI_K(im2col_of_copy)(float* dst, size_t ld, const ampi_im2col* g,
        size_t rows, size_t column, size_t count, const float* copy, const uint32_t* at) {
    const size_t from = ampi_padded_place(g, column);
    size_t height, width;
    for (size_t i = 0; i < count; i += height * width) {
        const size_t pixel = (column + i) % g->pixels, place = ampi_padded_place(g, column + i)
            - from;
        /* At once: part of a grid row, or all whole grid rows that follow in this image. */
        width = ampi_min_size(g->w.count - pixel % g->w.count, count - i);
        height = width < g->w.count ? 1 : ampi_min_size(g->h.count - pixel / g->w.count,
            (count - i) / width);

        for (size_t r = 0; r < rows; r++) {
            const float* src = copy + at[r] + place;
            float* to = dst + r * ld + i;
            for (size_t y = 0; y < height; y++, src += g->w.padded, to += width)
                for (size_t x = 0; x < width; x += AMPI_LANES)
                    ampi_v_store(to + x, ampi_v_load(src + x));
        }
    }
}

/* Rows [first, first + rows) of an im2col matrix, at most AMPI_KC, in columns [column, column +
   count), `ld` floats from row to row. With several kernel positions, which read a pixel again, a
   padded copy is made first, if `room` holds it. */
AMPI_KERNEL_FN void AMPI_K(im2col)(float* dst, size_t ld, const ampi_operand* v, size_t first,
        size_t rows, size_t column, size_t count, const ampi_pack_room* room) {
    const ampi_im2col* g = &v->image;
    uint32_t at[AMPI_KC];
    size_t width;
    if (g->area > 1 && ampi_padded_floats(g, rows, count, room->floats) > 0) {
        AMPI_K(pad_rows)(room->padded, 0, at, v, first, rows, column, count);
        AMPI_K(im2col_of_copy)(dst, ld, g, rows, column, count, room->padded, at);
        return;
    }

    for (size_t i = 0; i < count; i += width) {  /* grid row by grid row */
        width = ampi_min_size(g->w.count - (column + i) % g->w.count, count - i);
        for (size_t r = 0; r < rows; r++)
            AMPI_K(im2col_row)(dst + r * ld + i, v, first + r, column + i, width);
    }
}

/* Values [first, height) of the windows' columns that pixels `row` of source row y are: value e is
   that of kernel row e / channels, channel e % channels. v: the image; plane: its first element;
   rows: 16 rows of scratch memory, ld floats apart. */
AMPI_KERNEL_FN void AMPI_K(window_values)(float* dst, float* rows, const ampi_windows* d,
        const ampi_operand* v, size_t plane, int64_t y, const ampi_row_pixels* row, size_t first) {
    const ampi_im2col* g = &v->image;
    float block[AMPI_LANES][AMPI_LANES];  /* 16 columns of 16 values */
    size_t i, n;
    for (size_t e = first; e < d->height; e += n) {
        /* Up to 16 values of all columns, as rows. */
        n = ampi_min_size(d->height - e, AMPI_LANES);
        for (i = 0; i < n; i++)
            AMPI_K(source_row)(rows + i * d->ld, v, plane + (e + i) % g->channels * g->plane,
                y + (int64_t)((e + i) / g->channels) * g->h.next, row);

        /* Rows become columns: singly where they are few, as a vector would overwrite the next
           column; else by blocks. */
        if (n < AMPI_LANES) {
            for (i = 0; i < n; i++)
                for (size_t x = 0; x < row->count; x++)
                    dst[x * d->height + e + i] = rows[i * d->ld + x];
            continue;
        }
        for (size_t x = 0; x < row->count; x += AMPI_LANES) {
            ampi_v_transpose(block[0], AMPI_LANES, rows + x, d->ld * sizeof *rows, AMP_F32);
            for (i = 0; i < ampi_min_size(row->count - x, AMPI_LANES); i++)
                ampi_v_store(dst + (x + i) * d->height + e, ampi_v_load(block[i]));
        }
    }
}

/* The windows (see ampi_windows, whose layout d is) of grid pixels [k0, k0 + k) of image v, grid
   row by grid row. */
AMPI_KERNEL_FN void AMPI_K(read_windows)(float* scratch, const ampi_windows* d,
        const ampi_operand* v, size_t k0, size_t k) {
    const ampi_im2col* g = &v->image;
    const size_t step = (size_t)g->w.step, height = d->height;
    /* floats of a whole grid row's columns */
    const size_t whole_row = ((g->w.count - 1) * step + g->w.span + 1) * height;
    uint32_t* const at = (uint32_t*)(void*)scratch;
    float *const windows = scratch + d->first, *to = windows;
    size_t pixels;
    for (size_t p = 0; p < k; p += pixels) {
        /* The next pixels of one grid row: their image, source row, and columns from `left` on. */
        const size_t pixel = (k0 + p) % g->pixels, image = (k0 + p) / g->pixels * g->image;
        const int64_t y = (int64_t)(pixel / g->w.count) * g->h.step + g->h.first;
        const int64_t left = (int64_t)(pixel % g->w.count) * g->w.step + g->w.low;
        const int row_above = p >= g->w.count && pixel >= g->w.count;  /* was just read, whole */
        const float* above = to - (row_above ? whole_row : 0) + g->channels;
        ampi_row_pixels columns;
        pixels = ampi_min_size(g->w.count - pixel % g->w.count, k - p);
        columns = ampi_row_pixels_of(g->w.size, left, 1, (pixels - 1) * step + g->w.span + 1);

        for (size_t i = 0; i < pixels; i++)
            at[p + i] = (uint32_t)((size_t)(to - windows) + i * step * height);

        /* The row above has the first values one kernel row, which is `channels` values, on. What
           whole vectors copy too much of is overwritten by the other values. */
        if (row_above) {
            for (size_t x = 0; x < columns.count; x++)
                for (size_t e = 0; e < d->reused; e += AMPI_LANES)
                    ampi_v_store(to + x * height + e, ampi_v_load(above + x * height + e));
        }
        AMPI_K(window_values)(to, scratch + d->rows, d, v, image, y, &columns,
            row_above ? d->reused : 0);
        to += columns.count * height;
    }
    ampi_v_clear(to, AMPI_NR);  /* the last panel reads behind the last window */
}

/* `count` weights of a channel, by outputs and in these by kernel positions in use, from number
   `at` on. v: weights of an input gradient, see ampi_operand. */
AMPI_KERNEL_FN void AMPI_K(kernel_row)(float* dst, const ampi_operand* v, size_t channel,
        size_t at, size_t count) {
    const size_t height = v->area / v->kernel_w;  /* kernel rows in use */
    /* elements from the first to the last position: `area` if these are neighbours in memory */
    const size_t reach = (height - 1) * v->next_h + (v->kernel_w - 1) * v->next_w + 1;
    size_t from = at / v->area * v->output + channel * v->ld;  /* the output's first element */
    size_t h = at % v->area / v->kernel_w, w = at % v->kernel_w, i = 0;

    while (i < count) {  /* the output's positions from (h, w) on */
        const void* kernel = ampi_at(v->data, v->dtype, from);
        if (h + w == 0 && reach == v->area && reach > 1) {
            ampi_v_widen(dst + i, kernel, v->dtype, ampi_min_size(reach, count - i));
            i += reach;
        } else {
            for (; h < height && i < count; h++, w = 0)
                for (; w < v->kernel_w && i < count; w++)
                    dst[i++] = ampi_element_f32(kernel, v->dtype, h * v->next_h + w * v->next_w);
        }
        h = 0;
        from += v->output;
    }
}

/* In FP32: elements [at, at + count) of an operand's rows [first, first + rows), `ld` floats from
   row to row. */
AMPI_KERNEL_FN void AMPI_K(rows)(float* dst, size_t ld, const ampi_operand* v, size_t first,
        size_t rows, size_t at, size_t count, const ampi_pack_room* room) {
    if (v->is_image) {
        AMPI_K(im2col)(dst, ld, v, first, rows, at, count, room);
        return;
    }
    for (size_t r = first; r < first + rows; r++, dst += ld) {
        if (v->area) AMPI_K(kernel_row)(dst, v, r, at, count);
        else
            ampi_v_widen(dst, ampi_at(v->data, v->dtype, r * v->ld + at), v->dtype, count);
    }
}

/* --- packing --- */

/* A call of `product`: what its loops share. Scratch memory is laid out by ampi_plan_blocks. */
typedef struct AMPI_LOOPS {
    const ampi_product* s;
    const ampi_plan* plan;

    float *a_block,        /* scratch memory: packed rows of A; */
          *b_block,        /* a packed block of B; */
          *sums;           /* sums of a macro-tile, or of all rows whose sums wait */
    ampi_pack_room room;

    int b_form;            /* AMPI_B_PACKED, ... */
    const float* planes;   /* of planes and windows, whose row k is at planes + at[k] */
    const uint32_t* at;    /* NULL for other forms */

    size_t nc,             /* columns of a macro-tile */
           ld,             /* floats from one row of sums to the next */
           depth;          /* rows of a packed micro-panel of B */
    int sums_wait;         /* k takes several blocks, between which sums are kept */

    size_t column,         /* the block of B at hand: its first column, */
           n,              /* its columns, */
           k0,             /* its first row, */
           k;              /* its rows */
    ampi_piece pieces[AMPI_NC];  /* where C stores these columns */
    size_t piece_count;
} AMPI_LOOPS;

/* dst[p * ldd + i] = src[i][p]: up to 16 rows of k elements, `step` bytes apart; lanes of other
   rows are 0. k is rounded up to whole vectors: with zeros, or with any floats if the last row has
   that many elements, `readable`. */
AMPI_KERNEL_FN void AMPI_K(lanes_in)(float* dst, size_t ldd, const void* src, size_t step,
        amp_dtype t, size_t rows, size_t k, size_t readable) {
    float block[AMPI_LANES][AMPI_LANES];
    for (size_t p = 0; p < k; p += AMPI_LANES) {
        const char* from = (const char*)ampi_at(src, t, p);
        if (rows == AMPI_LANES && readable - p >= AMPI_LANES && (int)t < AMPI_ROUNDED) {
            ampi_v_transpose(dst + p * ldd, ldd, from, step, t);
            continue;
        }
        for (size_t i = 0; i < AMPI_LANES; i++)
            ampi_v_store(block[i], i < rows ? AMPI_K(load_operand)(from + i * step, t, k - p)
                : ampi_v_set1(0.0f));
        ampi_v_transpose(dst + p * ldd, ldd, block, sizeof block[0], AMP_F32);
    }
}

/* Where column j of the packed block of B begins, in its micro-panel. */
AMPI_INLINE float* AMPI_K(packed_column)(const AMPI_LOOPS* q, size_t j) {
    return q->b_block + j / AMPI_NR * AMPI_NR * q->depth + j % AMPI_NR;
}

/* Row p of the packed block of B from its n elements, neighbours in memory. */
AMPI_KERNEL_FN void AMPI_K(pack_row)(const AMPI_LOOPS* q, size_t p, const void* src, amp_dtype t) {
    const size_t size = ampi_element_size(t);
    for (size_t j = 0; j < q->n; j += AMPI_LANES)
        ampi_v_store(AMPI_K(packed_column)(q, j) + p * AMPI_NR,
            AMPI_K(load_operand)((const char*)src + j * size, t, q->n - j));
}

/* Packs columns of B along k: rows of a matrix, or the planes of a 1x1 convolution, which lie image
   by image. */
AMPI_KERNEL_FN void AMPI_K(pack_columns)(const AMPI_LOOPS* q) {
    const ampi_operand* b = &q->s->b;
    const ampi_im2col* g = &b->image;
    const size_t step = b->is_image ? g->plane : b->ld;
    size_t count;
    for (size_t j = 0; j < q->n; j += AMPI_LANES)
        for (size_t p = 0; p < q->k; p += count) {
            /* The elements of a column from k on, as far as they are neighbours: `count` from
               element `at` on. */
            const size_t columns = ampi_min_size(q->n - j, AMPI_LANES), k = q->k0 + p;
            size_t at = k;
            count = q->k - p;
            if (b->is_image) {
                at = k / g->pixels * g->image + k % g->pixels;
                count = ampi_min_size(g->pixels - k % g->pixels, count);
            }
            AMPI_K(lanes_in)(AMPI_K(packed_column)(q, j) + p * AMPI_NR, AMPI_NR,
                ampi_at(b->data, b->dtype, (q->column + j) * step + at),
                step * ampi_element_size(b->dtype), b->dtype, columns, count, count);
        }
}

/* Packs columns of B along k that are rows of an im2col matrix, in the order of windows. */
AMPI_KERNEL_FN void AMPI_K(pack_windows)(const AMPI_LOOPS* q) {
    const ampi_operand* b = &q->s->b;
    const ampi_pack_room* room = &q->room;
    const size_t ld = q->k + 2 * AMPI_PAD;
    for (size_t j = 0; j < q->n; j += AMPI_LANES) {
        const size_t columns = ampi_min_size(q->n - j, AMPI_LANES);
        for (size_t i = 0; i < columns; i++) {
            const size_t row = ampi_window_row(&b->image, q->column + j + i);
            AMPI_K(im2col)(room->rows + i * ld, ld, b, row, 1, q->k0, q->k, room);
        }
        AMPI_K(lanes_in)(AMPI_K(packed_column)(q, j), AMPI_NR, room->rows, ld * sizeof(float),
            AMP_F32, columns, q->k, q->k);
    }
}

/* Packs rows of B that are rows of an im2col matrix, at most 16 together: if channels have fewer
   positions, whole channels, of which a padded copy is made once. */
AMPI_KERNEL_FN void AMPI_K(pack_im2col)(const AMPI_LOOPS* q) {
    const ampi_operand* b = &q->s->b;
    const ampi_pack_room* room = &q->room;
    const size_t ld = q->n + 2 * AMPI_PAD, area = b->image.area;
    const size_t together = AMPI_LANES - (area < AMPI_LANES ? AMPI_LANES % area : 0);
    size_t rows;
    for (size_t p = 0; p < q->k; p += rows) {
        /* up to the end of a channel, or of the whole channels that are taken together */
        rows = ampi_min_size(q->k - p, together - (q->k0 + p) % ampi_min_size(area, together));
        AMPI_K(im2col)(room->rows, ld, b, q->k0 + p, rows, q->column, q->n, room);
        for (size_t i = 0; i < rows; i++) AMPI_K(pack_row)(q, p + i, room->rows + i * ld, AMP_F32);
    }
}

/* Rows [i0, i0 + m) of a transposed A, in the block's part of k, as micro-panels: in each, a k has
   its rows side by side. */
AMPI_KERNEL_FN void AMPI_K(pack_a_panels)(const AMPI_LOOPS* q, AMPI_MICRO_ARGS* u, size_t i0,
        size_t m) {
    const ampi_operand* a = &q->s->a;
    size_t rows;
    u->row_step = 1;
    u->k_step = 0;  /* see micro_rows: the rows of each micro-panel */
    for (size_t p = 0; p < u->k; p++)
        for (size_t i = 0; i < m; i += rows) {
            rows = AMPI_K(tile_rows)(m - i);
            ampi_v_store(q->a_block + i * (u->k + AMPI_PAD) + p * rows,
                AMPI_K(load_operand)(ampi_at(a->data, a->dtype, (q->k0 + p) * a->ld + i0 + i),
                a->dtype, m - i));
        }
}

/* Rows [i0, i0 + m) of op(A), in the block's part of k, as floats: where they are, if FP32 and
   along k; else in a_block, as rows that share no cache sets, or as micro-panels. Sets u->a and its
   steps. */
AMPI_KERNEL_FN void AMPI_K(pack_a)(const AMPI_LOOPS* q, AMPI_MICRO_ARGS* u, size_t i0, size_t m) {
    const ampi_operand* a = &q->s->a;
    /* The block in memory: rows from `row` on, in these `length` elements from `at` on. */
    const size_t row = a->along_k ? i0 : q->k0, at = a->along_k ? q->k0 : i0;
    const size_t rows = a->along_k ? m : u->k, length = a->along_k ? u->k : m;
    const int in_place = a->along_k && a->dtype == AMP_F32 && !a->is_image && !a->area;
    const size_t ld = in_place ? a->ld : ampi_round_up(length, AMPI_LANES) + AMPI_PAD;
    u->a = q->a_block;
    if (!a->along_k && q->s->form == AMPI_FP32 && m > AMPI_FEW_ROWS) {
        AMPI_K(pack_a_panels)(q, u, i0, m);
        return;
    }

    u->row_step = a->along_k ? ld : 1;
    u->k_step = a->along_k ? 1 : ld;
    if (a->paired) {
        u->a = (const float*)a->data + row * a->ld + at / 2;
        u->k = ampi_pairs(u->k);
    } else if (!in_place) AMPI_K(rows)(q->a_block, ld, a, row, rows, at, length, &q->room);
    else if (u->k > 0) u->a = (const float*)a->data + row * ld + at;
}

#ifdef AMPI_PASS_PAIRS
/* Packed rows become pairs in place: row p of rows 2p and 2p + 1. k is rounded up to whole vectors
   of pairs. */
AMPI_KERNEL_FN void AMPI_K(pair_rows)(float* x, size_t ld, size_t width, size_t k) {
    const size_t pairs = ampi_pairs(k);
    for (size_t p = k; p < 2 * pairs; p++) ampi_v_clear(x + p * ld, width);
    for (size_t p = 0; p < pairs; p++, x += ld)
        for (size_t i = 0; i < width; i += AMPI_LANES)
            ampi_v_store(x + i, AMPI_K(pair)(ampi_v_load(x + p * ld + i).q[0],
                ampi_v_load(x + (p + 1) * ld + i).q[0]));
}

/* m rows of k floats, `ld` apart, become rows of pairs in place; zeros fill the last vector. */
AMPI_KERNEL_FN void AMPI_K(pair_along_k)(float* x, size_t ld, size_t m, size_t k) {
    float last[2 * AMPI_LANES] = { 0 };
    for (; m > 0; m--, x += ld)
        for (size_t p = 0; 2 * p < k; p += AMPI_LANES) {
            const float* from = x + 2 * p;
            if (k - 2 * p < 2 * AMPI_LANES)
                from = (const float*)memcpy(last, from, (k - 2 * p) * sizeof *x);
            ampi_v_store(x + p, AMPI_K(load_pairs)(from));
        }
}

/* `count` rows of bfloat16 wherever they lie: row r begins at element at[r] of data or, if at is
   NULL, r * step. type: AMP_BF16, or AMP_F32 for such numbers in FP32. A vector's columns are runs
   of neighbours: lane l, one of a run's lanes, is element from + l of its row. */
typedef struct AMPI_LOW_ROWS {
    const void* data;
    amp_dtype type;
    size_t count, step;
    const uint32_t* at;
    struct { __mmask16 lanes; size_t from; } runs[AMPI_LANES];
} AMPI_LOW_ROWS;

/* A vector of row r in the high or low halves of words; zeros behind the last row, which is not
   looked for if `whole`. All but r are constants where it is called. */
AMPI_LANES_FN __m512i AMPI_K(load_low)(const AMPI_LOW_ROWS* b, amp_dtype type, size_t run_count,
        int high, int whole, size_t r) {
    const __mmask16 there = (__mmask16)(whole || r < b->count ? 0xffff : 0);
    const size_t row = whole ? r : ampi_min_size(r, b->count - 1);
    const size_t from = b->at ? b->at[row] : row * b->step;
    const uint16_t* low = (const uint16_t*)b->data + from;
    __m256i x = _mm256_setzero_si256();
    __m512i word;
    if (type == AMP_F32) {
        word = _mm512_maskz_loadu_epi32(b->runs[0].lanes & there,
            (const float*)b->data + from + b->runs[0].from);
        return high ? word : _mm512_maskz_srli_epi32(AMPI_ALL16, word, 16);
    }
    for (size_t i = 0; i < run_count; i++)
        x = _mm256_mask_loadu_epi16(x, b->runs[i].lanes & there, low + b->runs[i].from);
    word = _mm512_maskz_cvtepu16_epi32(AMPI_ALL16, x);
    return high ? _mm512_maskz_slli_epi32(AMPI_ALL16, word, 16) : word;
}

/* A vector of columns of a micro-panel of pairs: word p is of rows 2p and 2p + 1. */
AMPI_LANES_FN void AMPI_K(pair_columns)(float* dst, const AMPI_LOW_ROWS* rows, amp_dtype type,
        size_t run_count) {
    const AMPI_LOW_ROWS b = *rows;
    size_t p = 0;
    for (; p < b.count / 2; p++, dst += AMPI_NR)
        _mm512_storeu_si512(dst, _mm512_or_si512(
            AMPI_K(load_low)(&b, type, run_count, 1, 1, 2 * p),
            AMPI_K(load_low)(&b, type, run_count, 0, 1, 2 * p + 1)));
    for (; p < ampi_pairs(b.count); p++, dst += AMPI_NR)
        _mm512_storeu_si512(dst, _mm512_or_si512(
            AMPI_K(load_low)(&b, type, run_count, 1, 0, 2 * p),
            AMPI_K(load_low)(&b, type, run_count, 0, 0, 2 * p + 1)));
}

/* Rows of the block of B at hand, and in *columns where its columns lie in a row, `*first` elements
   on: those of a matrix, of the planes of a 1x1 convolution, of a padded copy or of windows, which
   are read first. Returns 0 for other rows. */
AMPI_KERNEL_FN int AMPI_K(find_low_rows)(const AMPI_LOOPS* q, AMPI_LOW_ROWS* rows,
        ampi_columns* columns, size_t* first) {
    const ampi_operand* b = &q->s->b;
    const ampi_im2col* g = &b->image;
    const size_t room = q->room.floats;
    rows->count = q->k;
    rows->type = AMP_BF16;
    rows->step = b->is_image ? g->plane : b->ld;
    rows->data = ampi_at(b->data, AMP_BF16, q->k0 * rows->step);
    rows->at = NULL;
    *columns = ampi_endless_row();
    *first = 0;
    if (!b->is_image) return !b->along_k;

    if (b->along_k) {
        if (!g->in_place || room == 0) return 0;
        AMPI_K(read_windows)(q->room.padded, &q->plan->windows, b, q->k0, q->k);
        rows->at = (const uint32_t*)(const void*)q->room.padded;
        rows->data = q->room.padded + q->plan->windows.first;
        rows->type = AMP_F32;
        return 1;
    }

    columns->size = columns->used = g->pixels;
    columns->width = columns->pitch = g->w.count;
    columns->next_row = g->w.count;
    columns->next_block = g->image;
    if (ampi_side_is_plain(&g->h) && ampi_side_is_plain(&g->w)) return 1;

    if (ampi_padded_floats(g, q->k, q->n, room) == 0) return 0;
    AMPI_K(pad_rows)(q->room.padded, 1, (uint32_t*)(void*)q->room.rows, b, q->k0, q->k, q->column,
        q->n);
    rows->at = (const uint32_t*)(const void*)q->room.rows;
    rows->data = q->room.padded;
    columns->next_row = g->w.padded;
    columns->next_block = g->h.padded * g->w.padded;
    *first = ampi_padded_place(g, q->column);
    return 1;
}

/* Packs the block of B at hand as pairs in one pass; returns 0 if its rows do not lie so. */
AMPI_KERNEL_FN int AMPI_K(pack_pairs)(const AMPI_LOOPS* q) {
    AMPI_LOW_ROWS rows;
    ampi_columns columns;
    size_t first;
    if (!AMPI_K(find_low_rows)(q, &rows, &columns, &first)) return 0;

    for (size_t j = 0; j < q->n; j += AMPI_LANES) {
        ampi_piece pieces[AMPI_LANES];
        const size_t count = ampi_pieces_of(pieces, &columns, q->column + j,
            ampi_min_size(q->n - j, AMPI_LANES));
        float* to = AMPI_K(packed_column)(q, j);
        for (size_t i = 0; i < count; i++) {
            rows.runs[i].lanes = (__mmask16)(((1u << pieces[i].count) - 1u) << pieces[i].from);
            rows.runs[i].from = pieces[i].at - first - pieces[i].from;
        }

        if (rows.type == AMP_F32) AMPI_K(pair_columns)(to, &rows, AMP_F32, 1);
        else if (count == 1) AMPI_K(pair_columns)(to, &rows, AMP_BF16, 1);
        else if (count == 2) AMPI_K(pair_columns)(to, &rows, AMP_BF16, 2);
        else AMPI_K(pair_columns)(to, &rows, AMP_BF16, count);
    }
    return 1;
}

/* The packed rows of A, m of them, become pairs: along k in place, else by pair_rows, then
   transposed for the matrix unit. Sets u->k to their number, and where they are. */
AMPI_KERNEL_FN void AMPI_K(pair_a)(const AMPI_LOOPS* q, AMPI_MICRO_ARGS* u, size_t m) {
    const size_t k = u->k, pairs = ampi_pairs(k), ld = u->k_step;
    float *x = q->a_block, *transposed = x + pairs * ld;
    u->k = pairs;
    if (u->k_step == 1) {
        AMPI_K(pair_along_k)(x, u->row_step, m, k);
        return;
    }

    AMPI_K(pair_rows)(x, ld, m, k);
    if (q->s->form != AMPI_AMX_PAIRS) return;

    u->a = transposed;
    u->k_step = 1;
    u->row_step = pairs + AMPI_PAD;
    for (size_t i = 0; i < m; i += AMPI_LANES)
        for (size_t p = 0; p < pairs; p += AMPI_LANES)
            ampi_v_transpose(transposed + i * u->row_step + p, u->row_step, x + p * ld + i,
                ld * sizeof *x, AMP_F32);
}
#endif

/* --- the epilogue --- */

/* n neighbours become alpha * sum + bias, rounded. */
AMPI_LANES_FN void AMPI_K(store_plain)(char* to, amp_dtype t, const float* sums, size_t n,
        AMPI_V16 alpha, AMPI_V16 bias) {
    const size_t size = ampi_type_size(t);
    for (size_t i = 0; i < n; i += AMPI_LANES) {
        const AMPI_V16 x = ampi_v_add(ampi_v_mul(alpha, ampi_v_load(sums + i)), bias);
        ampi_v_store_any(to + i * size, t, ampi_v_quiet(x, 0), n - i);
    }
}

/* The first `count` of 16 results, `step` elements apart. */
AMPI_LANES_FN void AMPI_K(scatter)(char* to, amp_dtype t, size_t step, AMPI_V16 x, size_t count) {
    float lanes[AMPI_LANES];
    ampi_v_store_typed(lanes, t, x);
    if (t == AMP_F32) for (size_t l = 0; l < count; l++) memcpy(to + 4 * l * step, &lanes[l], 4);
    else for (size_t l = 0; l < count; l++)
        memcpy(to + 2 * l * step, (const char*)lanes + 2 * l, 2);
}

/* n elements of C, from address `to` on and columns.next apart, become alpha * sum + beta * C +
   bias, rounded. `column`: the number of the first one's column. Biases of columns are taken in
   place of `bias`, that of the row. */
AMPI_KERNEL_FN void AMPI_K(store_any_piece)(const ampi_epilogue* c, char* to, size_t column,
        const float* sums, size_t n, AMPI_V16 bias) {
    const amp_dtype t = c->dtype;
    const size_t step = c->columns.next, size = ampi_type_size(t);
    float old[AMPI_LANES] = { 0 };
    for (size_t i = 0; i < n; i += AMPI_LANES, to += AMPI_LANES * step * size) {
        const size_t count = ampi_min_size(n - i, AMPI_LANES);
        AMPI_V16 x = ampi_v_mul(ampi_v_set1(c->alpha), ampi_v_load(sums + i));
        if (c->beta != 0.0f) {
            for (size_t l = 0; l < count; l++) old[l] = ampi_element_f32(to, t, l * step);
            x = ampi_v_fma(0, ampi_v_set1(c->beta), ampi_v_load(old), x);
        }
        if (c->bias && !c->bias_per_row)
            bias = ampi_v_load_any(ampi_at(c->bias, c->bias_dtype, column + i), c->bias_dtype,
                count);
        x = ampi_v_quiet(ampi_v_add(x, bias), 0);

        if (step == 1) ampi_v_store_any(to, t, x, count);
        else AMPI_K(scatter)(to, t, step, x, count);
    }
}

/* The epilogue of rows [i, i + m) of C, in `count` pieces of the columns from j on. sums: of row i,
   column j; ld floats to the next row. If bias is NULL, -0, the identity of addition, is added. */
AMPI_KERNEL_FN void AMPI_K(store_tile)(const ampi_epilogue* c, size_t i, size_t m, size_t j,
        const ampi_piece* pieces, size_t count, const float* sums, size_t ld) {
    const size_t size = ampi_type_size(c->dtype);
    const int row_bias = c->bias && c->bias_per_row;
    const int plain = c->columns.next == 1 && c->beta == 0.0f && (!c->bias || row_bias);
    const AMPI_V16 alpha = ampi_v_set1(c->alpha);
    AMPI_V16 bias = ampi_v_set1(-0.0f);
    for (; m > 0; m--, i++, sums += ld) {
        if (row_bias) bias = ampi_v_set1(ampi_element_f32(c->bias, c->bias_dtype, i));
        for (size_t p = 0; p < count; p++) {
            char* const to = (char*)c->data + (i * c->ld + pieces[p].at) * size;
            const float* from = sums + pieces[p].from;
            if (plain) AMPI_K(store_plain)(to, c->dtype, from, pieces[p].count, alpha, bias);
            else AMPI_K(store_any_piece)(c, to, j + pieces[p].from, from, pieces[p].count, bias);
        }
    }
}

/* --- the product --- */

/* Lays out scratch memory, and chooses how B is read, for m rows of C. */
AMPI_KERNEL_FN void AMPI_K(loops_init)(AMPI_LOOPS* q, const ampi_product* s,
        const ampi_plan* plan, size_t m, float* scratch) {
    const int few = m <= AMPI_FEW_ROWS && s->form == AMPI_FP32 && !s->b.is_image && s->k > 0;
    q->s = s;
    q->plan = plan;
    q->a_block = scratch;
    q->b_block = q->a_block + (plan->mc + 2 * AMPI_PAD) * (plan->kc + 2 * AMPI_PAD);
    q->room.rows = q->b_block + plan->packed;
    q->room.padded = q->room.rows + plan->rows;
    q->room.floats = plan->padded;
    q->sums = q->room.padded + plan->padded;

    /* The form of B. Few rows of A do not pay for packing rows of B. */
    q->b_form = AMPI_B_PACKED;
    q->planes = q->room.padded;
    q->at = NULL;
    if (s->b.image.in_place && plan->padded > 0 && s->form == AMPI_FP32) {
        q->b_form = s->b.along_k ? AMPI_B_IN_WINDOWS : AMPI_B_IN_PLANES;
        q->at = (const uint32_t*)(const void*)(s->b.along_k ? q->room.padded : q->room.rows);
        if (s->b.along_k) q->planes += plan->windows.first;
    } else if (few && !s->b.along_k)
        q->b_form = AMPI_B_IN_ROWS;

    /* Macro-tiles. For few rows of A the first-level cache holds one packed panel of B. If B is
       read in rows, it holds all sums instead, which lie where B would be packed. */
    q->nc = few ? (size_t)AMPI_NR : plan->nc;
    if (q->b_form == AMPI_B_IN_ROWS) {
        q->nc = ampi_min_size(AMPI_L1_FLOATS, plan->packed) / m / AMPI_LANES * AMPI_LANES
            - AMPI_PAD;
        q->sums = q->b_block;
    }
    q->ld = q->nc + AMPI_PAD;
    q->depth = plan->kc + 1;
    q->sums_wait = s->k > plan->kc;

    /* Pieces of an image are read in whole vectors, which reach behind the last panel. */
    if (s->b.is_image) {
        const size_t rows = q->sums_wait ? ampi_min_size(m, plan->sum_rows) : plan->mc;
        ampi_v_clear(q->sums, rows * q->ld);
    }
}

/* Makes the block of B at hand ready: reads windows or planes, or packs it as micro-panels, `depth`
   rows deep, whose last vector is filled with zeros. */
AMPI_KERNEL_FN void AMPI_K(read_b)(const AMPI_LOOPS* q) {
    const ampi_operand* b = &q->s->b;
    const ampi_im2col* g = &b->image;
    if (q->b_form == AMPI_B_IN_ROWS || q->k == 0) return;  /* without k, B may be NULL */
#ifdef AMPI_PASS_PAIRS
    if (q->s->form != AMPI_FP32 && AMPI_K(pack_pairs)(q)) return;
#endif

    if (q->b_form == AMPI_B_IN_WINDOWS)
        AMPI_K(read_windows)(q->room.padded, &q->plan->windows, b, q->k0, q->k);
    else if (q->b_form == AMPI_B_IN_PLANES)
        AMPI_K(pad_rows)(q->room.padded, 0, (uint32_t*)(void*)q->room.rows, b, q->k0, q->k,
            q->column, q->n);
    else if (b->is_image && !b->along_k) AMPI_K(pack_im2col)(q);
    else if (b->is_image && !(ampi_side_is_plain(&g->h) && ampi_side_is_plain(&g->w)))
        AMPI_K(pack_windows)(q);
    else if (b->along_k) AMPI_K(pack_columns)(q);
    else {
        for (size_t p = 0; p < q->k; p++)
            AMPI_K(pack_row)(q, p, ampi_at(b->data, b->dtype, (q->k0 + p) * b->ld + q->column),
                b->dtype);
    }
#ifdef AMPI_PASS_PAIRS
    if (q->s->form == AMPI_FP32) return;
    for (size_t j = 0; j < q->n; j += AMPI_NR)
        AMPI_K(pair_rows)(q->b_block + j * q->depth, AMPI_NR, ampi_min_size(q->n - j, AMPI_NR),
            q->k);
#endif
}

/* The sums of a few rows of A, held in L1, with rows of B read once, where they are stored.
   `together` rows of B are in registers while each row of A adds their products in turn. */
AMPI_KERNEL_FN void AMPI_K(few_rows)(const AMPI_LOOPS* q, size_t rows,
        const AMPI_MICRO_ARGS* u) {
    enum { together = AMPI_MR > 8 ? 8 : 4 };
    const ampi_operand* b = &q->s->b;
    const int exact = AMPI_PASS_WIDTH == 1 && u->exact;
    for (size_t p = 0; p < u->k; p += together) {
        const size_t count = ampi_min_size(u->k - p, together);
        for (size_t j = 0; j < q->n; j += AMPI_LANES) {
            /* Behind the last row of B that one is loaded again, but not added. */
            AMPI_V16 x[together];
            AMPI_UNROLL for (size_t r = 0; r < together; r++) {
                const size_t k = q->k0 + p + ampi_min_size(r, count - 1);
                x[r] = AMPI_K(load_operand)(ampi_at(b->data, b->dtype, k * b->ld + q->column + j),
                    b->dtype, q->n - j);
            }

            for (size_t i = 0; i < rows; i++) {
                const float* a = u->a + i * u->row_step + p * u->k_step;
                float* const sums = u->sums + i * u->ld + j;
                AMPI_V16 sum = u->first && p == 0 ? ampi_v_set1(0.0f) : ampi_v_load(sums);
                AMPI_UNROLL for (size_t r = 0; r < together; r++)
                    if (r < count)
                        sum = ampi_v_fma(exact, ampi_v_set1(a[r * u->k_step]), x[r], sum);
                ampi_v_store(sums, sum);
            }
        }
    }
}

/* Loop 2: sums of `rows` rows from args->sums on, panel by panel of one or two vectors. In padded
   planes a vector begins at a stored column, so that margins cost little; else columns follow each
   other. */
AMPI_KERNEL_FN void AMPI_K(macro_tile)(const AMPI_LOOPS* q, size_t rows,
        const AMPI_MICRO_ARGS* args) {
    const size_t end = q->column + q->n;
    const ampi_columns columns = q->b_form == AMPI_B_IN_PLANES ? q->s->c.columns
        : ampi_endless_row();
    ampi_column at = ampi_column_of(&columns, q->column);
    AMPI_MICRO_ARGS u = *args;
    while (at.number < end) {
        /* The panel's first vector begins at column j of the block, its second, if any, `next`
           columns on. */
        const size_t j = at.number - q->column;
        int two;
        ampi_column_move(&at, &columns, AMPI_LANES);
        two = AMPI_NV > 1 && at.number < end;
        u.next = at.number - q->column - j;
        if (two) ampi_column_move(&at, &columns, AMPI_LANES);

        u.b = q->b_block + j * q->depth;
        if (q->b_form == AMPI_B_IN_PLANES) u.b = q->planes + j;
        if (q->b_form == AMPI_B_IN_WINDOWS) u.b = q->planes + q->column + j;
        u.sums = args->sums + j;
        AMPI_K(micro)(q->s->form, rows, two, &u);
    }
}

/* Loop 3: the block of B at hand with rows [i0, i0 + m) of A, and the epilogue after the last block
   of k. */
AMPI_KERNEL_FN void AMPI_K(block_of_k)(const AMPI_LOOPS* q, size_t i0, size_t m) {
    const ampi_product* s = q->s;
    size_t mc;
    AMPI_K(read_b)(q);
    for (size_t i = 0; i < m; i += mc) {
        AMPI_MICRO_ARGS u;
        AMPI_CLEAR(u);
        mc = ampi_min_size(m - i, q->plan->mc);

        u.k = q->k;
        u.first = q->k0 == 0;
        u.exact = s->exact;
        u.at = q->at;
        u.sums = q->sums + (q->sums_wait ? i * q->ld : 0);
        u.ld = q->ld;
        AMPI_K(pack_a)(q, &u, i0 + i, mc);
#ifdef AMPI_PASS_PAIRS
        if (s->form != AMPI_FP32 && !s->a.paired) AMPI_K(pair_a)(q, &u, mc);
#endif

        if (q->b_form == AMPI_B_IN_ROWS) AMPI_K(few_rows)(q, mc, &u);
        else AMPI_K(macro_tile)(q, mc, &u);
        if (q->k0 + q->k == s->k)
            AMPI_K(store_tile)(&s->c, i0 + i, mc, q->column, q->pieces, q->piece_count, u.sums,
                u.ld);
    }
}

/* Loops 5 and 4: rows [i0, i0 + m), columns [j0, j0 + n) of C, with plan->floats of scratch
   memory. Packed FP32 is the plain form. Four others stay beside it, each for steps that it makes
   faster:
     planes and windows   FP32 of an image; packing its im2col matrix costs as much as 16 rows of A
     few rows             a batch of at most 16 samples; its rows of A do not pay for packing B
     pairs                bfloat16 where vdpbf16ps does two products in the time of an fma, with the
                          same bits; always packed
     pairs for AMX        the same panels; sums in another order, so only with AMP_SUMS_FAST */
AMPI_KERNEL_FN void AMPI_K(product)(const ampi_product* s, const ampi_plan* plan, size_t i0,
        size_t m, size_t j0, size_t n, float* scratch) {
    AMPI_LOOPS q;
    AMPI_K(loops_init)(&q, s, plan, m, scratch);
    for (size_t i = 0; i < m; i += plan->sum_rows) {
        const size_t rows = ampi_min_size(m - i, plan->sum_rows);
        for (size_t j = 0; j < n; j += q.nc) {
            q.column = j0 + j;
            q.n = ampi_min_size(n - j, q.nc);
            q.piece_count = ampi_pieces_of(q.pieces, &s->c.columns, q.column, q.n);

            /* A product with k = 0 has one block too, which stores beta * C + bias. */
            q.k0 = 0;
            do {
                q.k = ampi_min_size(s->k - q.k0, plan->kc);
                AMPI_K(block_of_k)(&q, i0 + i, rows);
                q.k0 += q.k;
            } while (q.k0 < s->k);
        }
    }
}

/* --- depthwise convolution --- */

/* The padded image (see ampi_channels) of up to 16 planes of image v: the first begins at its
   element `plane`. */
AMPI_KERNEL_FN void AMPI_K(pad_channels)(float* padded, const ampi_operand* v,
        const ampi_channels* d, size_t plane, size_t channels) {
    const ampi_im2col* g = &v->image;
    const size_t size = ampi_element_size(v->dtype);
    const ampi_row_pixels row = ampi_row_pixels_of(g->w.size, g->w.low, 1, d->pitch / AMPI_LANES);
    /* Floats of a row before the source's pixels, and up to their end. */
    const size_t left = row.left * AMPI_LANES, end = left + row.inside * AMPI_LANES;
    for (size_t i = 0; i < d->rows; i++, padded += d->pitch) {
        const int64_t y = (int64_t)i + g->h.low;
        const size_t from = plane + (size_t)y * (size_t)g->w.size + row.first;
        if (y < 0 || y >= g->h.size || row.inside == 0) {  /* the row is margin */
            ampi_v_clear(padded, d->pitch);
            continue;
        }

        ampi_v_clear(padded, left);
        AMPI_K(lanes_in)(padded + left, AMPI_LANES, ampi_at(v->data, v->dtype, from),
            g->plane * size, v->dtype, channels, row.inside,
            g->elements - (from + (channels - 1) * g->plane));
        ampi_v_clear(padded + end, d->pitch - end);
    }
}

/* `count` sums of vectors, each lane a channel: sums[i] = (first ? 0 : sums[i]) + sum over p < k of
   f[p] * x[at[i] + step[p]], p ascending. f and sums are arrays of vectors; at and step count
   floats. `count` is a constant where it is called. */
AMPI_LANES_FN void AMPI_K(depthwise_tile)(int count, const float* f, const float* x,
        const uint32_t* at, const uint32_t* step, size_t k, int first, float* sums) {
    AMPI_V16 acc[AMPI_MR];
    const float* from[AMPI_MR];
    AMPI_UNROLL for (int i = 0; i < count; i++) {
        from[i] = x + at[i];
        acc[i] = first ? ampi_v_set1(0.0f) : ampi_v_load(sums + AMPI_LANES * i);
    }
    for (size_t p = 0; p < k; p++) {
        const AMPI_V16 factor = ampi_v_load(f + p * AMPI_LANES);
        AMPI_UNROLL for (int i = 0; i < count; i++)
            acc[i] = ampi_v_fma(0, factor, ampi_v_load(from[i] + step[p]), acc[i]);
    }
    AMPI_UNROLL for (int i = 0; i < count; i++) ampi_v_store(sums + AMPI_LANES * i, acc[i]);
}

/* The sums of depthwise_tile, any number of them, as many at a time as registers hold. For y these
   are pixels of a grid row, and k runs over kernel positions; for dw kernel positions, and k runs
   over a grid row's pixels. */
AMPI_KERNEL_FN void AMPI_K(depthwise_row)(size_t count, const float* f, const float* x,
        const uint32_t* at, const uint32_t* step, size_t k, int first, float* sums) {
    enum { limit = AMPI_MR > 8 ? 9 : AMPI_MR > 4 ? 5 : 4 };
    size_t n;
    for (size_t i = 0; i < count; i += n, at += n, sums += n * AMPI_LANES) {
        n = count - i >= limit ? limit : count - i >= 3 ? 3 : 1;
        if (n == limit) AMPI_K(depthwise_tile)(limit, f, x, at, step, k, first, sums);
        else if (n == 3) AMPI_K(depthwise_tile)(3, f, x, at, step, k, first, sums);
        else AMPI_K(depthwise_tile)(1, f, x, at, step, k, first, sums);
    }
}

/* The epilogue of `count` sums of vectors, each lane a channel: rows [channel, channel + channels)
   of C, columns [column, column + count). sums: rounded up to 16 vectors. */
AMPI_KERNEL_FN void AMPI_K(store_channels)(const ampi_epilogue* c, size_t channel, size_t channels,
        size_t column, size_t count, const float* sums) {
    /* 16 sums of 16 channels, as rows; the last piece's vector may reach behind them */
    float block[AMPI_LANES + 1][AMPI_LANES];
    ampi_piece pieces[AMPI_LANES];
    ampi_v_clear(block[AMPI_LANES], AMPI_LANES);
    for (size_t i = 0; i < count; i += AMPI_LANES) {
        ampi_v_transpose(block[0], AMPI_LANES, sums + i * AMPI_LANES, sizeof block[0], AMP_F32);
        AMPI_K(store_tile)(c, channel, channels, 0, pieces, ampi_pieces_of(pieces, &c->columns,
            column + i, ampi_min_size(count - i, AMPI_LANES)), block[0], AMPI_LANES);
    }
}

/* Up to 16 channels of a depthwise convolution from `channel` on, in images [image, image +
   images): y, where A is FP32 rows of weights, B x; or dw, stored after the last image, where A is
   dy. */
AMPI_KERNEL_FN void AMPI_K(depthwise)(const ampi_product* s, size_t channel, size_t image,
        size_t images, float* scratch) {
    const int dw = s->a.is_image;
    const ampi_im2col *g = &s->b.image, *dy = &s->a.image;
    const ampi_channels d = ampi_channels_of(g);
    const size_t channels = ampi_min_size(g->channels - channel, AMPI_LANES), cols = g->w.count;
    uint32_t *const kernel_at = (uint32_t*)(void*)scratch, *const pixels_at = kernel_at + g->area;
    float *const w = scratch + d.weights, *const pixels = scratch + d.pixels,
        *const padded = scratch + d.padded;
    /* A channel's results, of all images or of one; those from `zeros` on begin as 0: dw, and what
       fills y up to whole vectors. */
    float* const sums = dw ? w : pixels;
    const size_t results = dw ? g->area : g->pixels, zeros = dw ? 0 : results;
    ampi_channels_table(g, &d, kernel_at);
    ampi_v_clear(sums + zeros * AMPI_LANES,
        (ampi_round_up(results, AMPI_LANES) - zeros) * AMPI_LANES);
    if (!dw)
        AMPI_K(lanes_in)(w, AMPI_LANES, (const float*)s->a.data + channel * g->area,
            g->area * sizeof(float), AMP_F32, channels, g->area, g->area);

    for (size_t n = image; n < image + images; n++) {
        AMPI_K(pad_channels)(padded, &s->b, &d, n * g->image + channel * g->plane, channels);
        if (dw)
            AMPI_K(lanes_in)(pixels, AMPI_LANES,
                ampi_at(s->a.data, s->a.dtype, n * dy->image + channel * dy->plane),
                dy->plane * ampi_element_size(s->a.dtype), s->a.dtype, channels, dy->pixels,
                dy->pixels);

        for (size_t y = 0; y < g->h.count; y++) {
            const float* x = padded + y * (size_t)g->h.step * d.pitch;
            float* const row = pixels + y * cols * AMPI_LANES;
            if (dw) AMPI_K(depthwise_row)(g->area, row, x, kernel_at, pixels_at, cols, 0, w);
            else AMPI_K(depthwise_row)(cols, w, x, pixels_at, kernel_at, g->area, 1, row);
        }
        if (!dw)
            AMPI_K(store_channels)(&s->c, channel, channels, n * g->pixels, results, sums);
    }
    if (dw) AMPI_K(store_channels)(&s->c, channel, channels, 0, results, sums);
}

/* --- gradients of biases --- */

/* sums[j] += x[0][j] + x[1][j] + ... in this order, j < width; sums has whole vectors, rows of x
   are ld elements apart. */
AMPI_KERNEL_FN void AMPI_K(column_sums)(float* sums, const void* x, amp_dtype t, size_t ld,
        size_t rows, size_t width) {
    for (size_t j = 0; j < width; j += AMPI_LANES) {
        AMPI_V16 sum = ampi_v_load(sums + j);
        for (size_t i = 0; i < rows; i++)
            sum = ampi_v_add(sum, ampi_v_load_any(ampi_at(x, t, i * ld + j), t, width - j));
        ampi_v_store(sums + j, sum);
    }
}

/* --- updates of weights --- */

#if AMPI_PASS_WIDTH > 1
/* Updates n elements, a register at a time. The elements of a register go one by one if a weight
   would pass `low`, the least limit, or a second moment overflow; so do those behind the last whole
   register. kind is a constant where it is called. Loops over a register's lanes keep arrays in
   registers. */
AMPI_LANES_FN void AMPI_K(update_all)(int kind, const ampi_update_job* job, size_t n) {
    enum { width = AMPI_PASS_WIDTH };
    const ampi_update u = *job->u;
    const uint32_t low = job->over->low, finite = job->over->finite;
    float *const w = job->w, *const g = job->g, *const m = job->m, *const v = job->v;
    const int hw = 1;
    size_t i, l;
    for (i = 0; i + width <= n; i += width) {
        float grad[width], first[width], second[width], root[width] = { 0 }, direction[width],
            moved[width];
        AMPI_K(reg) new_w, new_v;
        ampi_weight x;
        AMPI_FETCH(w + i, AMPI_AHEAD_BYTES);
        AMPI_FETCH(g + i, AMPI_AHEAD_BYTES);
        if (ampi_uses_m(kind)) AMPI_FETCH(m + i, AMPI_AHEAD_BYTES);
        if (ampi_uses_v(kind)) AMPI_FETCH(v + i, AMPI_AHEAD_BYTES);

        /* gradients and moments */
        for (l = 0; l < width; l++) {
            x = ampi_update_moments(hw, kind, &u, w, g, m, v, i + l);
            grad[l] = x.g;
            first[l] = x.m;
            second[l] = x.v;
            if (ampi_is_rmsprop(kind)) root[l] = x.v + u.inside;
        }
        new_v = AMPI_K(load_reg)(second, AMP_F32);
        if (ampi_uses_v(kind))
            AMPI_K(store_reg)(root, AMPI_K(sqrt_reg)(ampi_is_rmsprop(kind)
                ? AMPI_K(load_reg)(root, AMP_F32) : new_v));

        /* directions, and where weights move */
        for (l = 0; l < width; l++) {
            x.w = w[i + l]; x.g = grad[l]; x.m = first[l]; x.v = second[l];
            direction[l] = ampi_update_direction(hw, kind, &u, x, root[l]);
            moved[l] = ampi_fma(hw, u.step, direction[l], x.w * u.decay);
            if (kind == AMPI_UPDATE_BUFFERED) first[l] = direction[l];
        }
        if (kind == AMPI_LAMB_DIRECTION) {
            for (l = 0; l < width; l++)
                g[i + l] = ampi_sound_direction(direction[l], second[l], finite);
            continue;
        }

        /* overflows, else results */
        new_w = AMPI_K(load_reg)(moved, AMP_F32);
        if (AMPI_K(above_reg)(new_w, low) | (ampi_uses_v(kind)
            && AMPI_K(above_reg)(new_v, finite))) {
            ampi_update_singly(kind, job, i, i + width);
            continue;
        }
        AMPI_K(store_reg)(w + i, new_w);
        if (ampi_uses_m(kind)) AMPI_K(store_reg)(m + i, AMPI_K(load_reg)(first, AMP_F32));
        if (ampi_uses_v(kind)) AMPI_K(store_reg)(v + i, new_v);
    }
    if (i < n) ampi_update_singly(kind, job, i, n);
}

/* RMSprop for n elements. Not inlined: the loops of the others would lose registers. */
AMPI_PASS_TARGET AMPI_APART void AMPI_K(update_rmsprop)(int kind, const ampi_update_job* job,
        size_t n) {
    if (kind == AMPI_UPDATE_RMSPROP) AMPI_K(update_all)(AMPI_UPDATE_RMSPROP, job, n);
    else AMPI_K(update_all)(AMPI_UPDATE_BUFFERED, job, n);
}
#endif
/* One optimizer step for n elements, in the code of its kind. */
AMPI_KERNEL_FN void AMPI_K(update)(int kind, const ampi_update_job* job, size_t n) {
#if AMPI_PASS_WIDTH > 1
    switch (kind) {
        case AMPI_UPDATE_SGD: AMPI_K(update_all)(AMPI_UPDATE_SGD, job, n); break;
        case AMPI_UPDATE_MOMENTUM: AMPI_K(update_all)(AMPI_UPDATE_MOMENTUM, job, n); break;
        case AMPI_UPDATE_ADAM: AMPI_K(update_all)(AMPI_UPDATE_ADAM, job, n); break;
        case AMPI_UPDATE_LAMB: AMPI_K(update_all)(AMPI_UPDATE_LAMB, job, n); break;
        case AMPI_LAMB_DIRECTION: AMPI_K(update_all)(AMPI_LAMB_DIRECTION, job, n); break;
        case AMPI_UPDATE_RMSPROP:
        case AMPI_UPDATE_BUFFERED: AMPI_K(update_rmsprop)(kind, job, n); break;
    }
#else
    ampi_update_singly(kind, job, 0, n);
#endif
}

/* --- conversions and sums of squares --- */

/* dst = src, or src * *factor, `count` <= 16 elements. With `clean` a NaN becomes 0x7fc00000; else
   it becomes quiet and keeps its sign and upper payload bits: halves do so by themselves. */
AMPI_LANES_FN void AMPI_K(convert_lanes)(char* dst, amp_dtype to, const char* src, amp_dtype from,
        const float* factor, int clean, size_t count) {
    AMPI_V16 x = ampi_v_load_any(src, from, count);
    if (factor) x = ampi_v_mul(x, ampi_v_set1(*factor));
    if (clean || to == AMP_BF16 || from == AMP_BF16) x = ampi_v_quiet(x, clean ? 0 : 0xffff0000u);
    ampi_v_store_any(dst, to, x, count);
}

/* Converts whole groups of sixteen elements; types and flags are constants where it is called. */
AMPI_LANES_FN void AMPI_K(convert_typed)(char* dst, amp_dtype to, const char* src, amp_dtype from,
        size_t n, const float* factor, int clean) {
    const size_t ahead = n > AMPI_AHEAD_BYTES / 4 ? AMPI_AHEAD_BYTES : 0;
    for (; n >= AMPI_LANES; n -= AMPI_LANES) {
        AMPI_FETCH(clean ? dst : src, ahead);  /* clean: from a tile */
        AMPI_K(convert_lanes)(dst, to, src, from, factor, clean, AMPI_LANES);
        src += AMPI_LANES * ampi_type_size(from);
        dst += AMPI_LANES * ampi_type_size(to);
    }
}

/* dst = src, or src * *factor, n elements; clean: every NaN becomes 0x7fc00000. Pairs of types that
   speed matters for have code of their own, with types and flags as constants. */
AMPI_KERNEL_FN void AMPI_K(convert)(void* dst, amp_dtype to, const void* src, amp_dtype from,
        size_t n, const float* factor, int clean) {
    const size_t whole = n / AMPI_LANES * AMPI_LANES;
    const char* x = (const char*)src;
    char* y = (char*)dst;

    /* whole vectors, if any */
#define AMPI_WAY(t, f, scaled, cleans) \
    else if (to == t && from == f && clean == cleans && (scaled || !factor)) \
        AMPI_K(convert_typed)(y, t, x, f, n, scaled ? factor : NULL, cleans);
    if (whole == 0) {}
    AMPI_WAY(AMP_F32, AMP_F16, 0, 0)
    AMPI_WAY(AMP_F32, AMP_BF16, 0, 0)
    AMPI_WAY(AMP_F16, AMP_F32, 0, 0)
    AMPI_WAY(AMP_BF16, AMP_F32, 0, 0)
    AMPI_WAY(AMP_F32, AMP_F32, 0, 1)
    AMPI_WAY(AMP_F16, AMP_F32, 0, 1)
    AMPI_WAY(AMP_BF16, AMP_F32, 0, 1)
    AMPI_WAY(AMP_F32, AMP_F32, 1, 0)
    AMPI_WAY(AMP_F16, AMP_F16, 1, 0)
    AMPI_WAY(AMP_BF16, AMP_BF16, 1, 0)
    else AMPI_K(convert_typed)(y, to, x, from, n, factor, clean);
#undef AMPI_WAY

    /* the rest */
    if (n == whole) return;
    AMPI_K(convert_lanes)(y + whole * ampi_type_size(to), to, x + whole * ampi_type_size(from),
        from, factor, clean, n - whole);
}

/* *sum += n squares, each exact in double: element i is added to sum i % 32, and a fixed tree adds
   these. */
AMPI_LANES_FN void AMPI_K(squares_typed)(double* sum, const void* x, amp_dtype t, size_t n) {
    enum { lanes = 2 * AMPI_LANES, width = sizeof(AMPI_K(doubles)) / 8 };
    const size_t size = ampi_type_size(t);
    uint32_t rest[lanes] = { 0 };
    double all[lanes] = { 0 }, tree[AMPI_LANES];
    AMPI_K(doubles) sums[lanes / width];
    size_t l;

    /* Of bfloat16 register 2l takes the even ones of 2 * width elements, 2l + 1 the odd ones. */
    memcpy(sums, all, sizeof sums);
    for (size_t i = 0; i < n; i += lanes) {
        const char* from = (const char*)x + i * size;
        AMPI_FETCH(from, AMPI_AHEAD_BYTES);
        AMPI_FETCH(from, AMPI_AHEAD_BYTES + AMPI_LANES * size);
        if (n - i < lanes) from = (const char*)memcpy(rest, from, (n - i) * size);
        AMPI_UNROLL for (l = 0; l < lanes / width; l++)
            sums[l] = AMPI_K(square_reg)(sums[l], from + (t == AMP_BF16 ? l & ~(size_t)1
                : l) * width * size, t, l % 2);
    }

    /* The tree: 32 sums to 16, which come into the order of elements, to 8, 4, 2 and 1. */
    memcpy(all, sums, sizeof all);
    for (l = 0; l < 16; l++) all[l] += all[l + 16];
    AMPI_UNROLL for (l = 0; l < 16; l++)
        tree[t == AMP_BF16 ? l / (2 * width) * 2 * width + l % width * 2 + l / width % 2 : l] =
            all[l];
    for (l = 0; l < 8; l++) tree[l] += tree[l + 8];
    for (l = 0; l < 4; l++) tree[l] += tree[l + 4];
    *sum += (tree[0] + tree[2]) + (tree[1] + tree[3]);
}

/* Adds the sum of n squares to *sum, in the code of its type. */
AMPI_KERNEL_FN void AMPI_K(add_squares)(double* sum, const void* x, amp_dtype t, size_t n) {
    if (t == AMP_F16) AMPI_K(squares_typed)(sum, x, AMP_F16, n);
    else if (t == AMP_BF16) AMPI_K(squares_typed)(sum, x, AMP_BF16, n);
    else AMPI_K(squares_typed)(sum, x, AMP_F32, n);
}

/* x[i][p] = tile[p][i] for n elements of up to 16 rows, `step` bytes apart, rounded; every NaN is
   0x7fc00000. tile has 16 lanes in each row. */
AMPI_KERNEL_FN void AMPI_K(lanes_out)(void* x, amp_dtype t, size_t step, const float* tile,
        size_t rows, size_t n) {
    const size_t size = t == AMP_F32 ? 4 : 2;
    float block[AMPI_LANES][AMPI_LANES], last[AMPI_LANES * AMPI_LANES] = { 0 };
    for (size_t i = 0; i < n; i += AMPI_LANES, tile += AMPI_LANES * AMPI_LANES) {
        if (n - i < AMPI_LANES) tile = (const float*)memcpy(last, tile, (n - i) * sizeof block[0]);
        ampi_v_transpose(block[0], AMPI_LANES, tile, sizeof block[0], AMP_F32);
        for (size_t l = 0; l < rows; l++)
            ampi_v_store_any((char*)x + l * step + i * size, t,
                ampi_v_quiet(ampi_v_load(block[l]), 0), n - i);
    }
}

static const ampi_kernels AMPI_K(kernels) = {
    AMPI_MR, AMPI_NR, AMPI_NC, AMPI_K(product), AMPI_K(depthwise),
    AMPI_K(rows), AMPI_K(column_sums),
#ifdef AMPI_PASS_PAIRS
    AMPI_K(least_exponent), AMPI_K(pair_along_k),
#else
    NULL, NULL,
#endif
    AMPI_K(update), AMPI_K(convert), AMPI_K(add_squares), AMPI_K(lanes_in), AMPI_K(lanes_out) };
#undef AMPI_REGISTERS
#undef AMPI_PASS
#undef AMPI_PASS_TARGET
#undef AMPI_PASS_WIDTH
#undef AMPI_PASS_PAIRS
#endif /* AMPI_PASS */

#ifdef AMPI_PASS_BASE
#undef AMPI_PASS_BASE
/* >>impl-convert Conversions of arrays, by the kernels of the instruction set in use.
   A conversion runs in blocks: through FP32, or through double where a type or stochastic
   rounding needs it. This room calls impl-kernels by its table, and rooms above it. */

/* The kernels of the instruction set in use. */
AMPI_FN const ampi_kernels* ampi_kernels_now(void) {
#if AMPI_AVX512
    if (AMPI_IN_AVX512) return &ampi_kernels_avx512;
#endif
#if AMPI_X86
    if (ampi_simd() == AMP_ISA_AVX2) return &ampi_kernels_avx2;
#endif
    return &ampi_kernels_base;
}

/* Called behind a table's kernels: see ampi_clear_upper, which needs AVX. */
AMPI_FN void ampi_kernels_end(void) { if (amp_cpu_isa() != AMP_ISA_SCALAR) ampi_clear_upper(); }

/* Normal floats are widened exactly in every processor mode; others go by bits. */
AMPI_FN void ampi_f32_to_f64(double* dst, const float* src, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t u = ampi_bits(src[i]);
        dst[i] = (u & 0x7fffffffu) - 0x800000u < 0x7f000000u ? (double)src[i]
            : ampi_double(ampi_f32_widen(u));
    }
}

/* bits[i] = amp_random_bits(seed, index + i); n and index are multiples of 4. */
AMPI_FN void ampi_random_fill(uint32_t* bits, uint64_t seed, uint64_t index, size_t n) {
    for (; n > 0; n -= 4, index += 4, bits += 4) ampi_philox(seed, index >> 2, bits);
}

/* Doubles to type t, to nearest or, given a random word for each, stochastically. */
AMPI_FN void ampi_f64_narrow(void* dst, amp_dtype t, const double* src, size_t n,
        const uint32_t* random) {
    const uint32_t fraction_bits = t == AMP_F32 ? 23u : t == AMP_F16 ? 10u : 7u,
        bias = t == AMP_F16 ? 15u : 127u;
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = ampi_narrow(ampi_bits64(src[i]), random ? random + i : NULL,
            fraction_bits, bias);
        if (t == AMP_F32) memcpy((float*)dst + i, &bits, sizeof bits);
        else ((uint16_t*)dst)[i] = (uint16_t)bits;
    }
}

/* n elements without overlap; the types are equal, or one is FP32. */
AMPI_FN void ampi_convert_directly(void* dst, amp_dtype to, const void* src, amp_dtype from,
        size_t n) {
    if (n == 0) return;
    if (to == from) memcpy(dst, src, n * ampi_type_size(to));
    else if (from == AMP_F64) ampi_f64_narrow(dst, to, (const double*)src, n, NULL);
    else if (to == AMP_F64) ampi_f32_to_f64((double*)dst, (const float*)src, n);
    else {
        ampi_kernels_now()->convert(dst, to, src, from, n, NULL, 0);
        ampi_kernels_end();
    }
}

/* dst[i] = src[offset + i] as float, i < n; no overlap. */
AMPI_FN void ampi_load_f32(float* dst, const void* src, amp_dtype t, size_t offset, size_t n) {
    ampi_convert_directly(dst, AMP_F32, ampi_at(src, t, offset), ampi_dtype_or_f32(t), n);
}

/* Elements [offset, offset + n) of an array from n floats, rounded to its type. */
AMPI_FN void ampi_store_f32(void* dst, amp_dtype t, size_t offset, const float* src, size_t n) {
    ampi_convert_directly(ampi_mutable(ampi_at(dst, t, offset)), ampi_dtype_or_f32(t), src,
        AMP_F32, n);
}

#define AMPI_F64_BLOCK 256 /* elements in a block of doubles */
#define AMPI_CONVERT_TILE 1024 /* elements in a block that goes through the stack */
#define AMPI_CONVERT_BLOCK 16384 /* elements in another block: one thread's unit */

/* One row of a conversion. */
typedef struct ampi_convert_job {
    char* dst;
    const char* src;
    amp_dtype dst_dtype, src_dtype;
    size_t to, from; /* bytes of an element */
    size_t n, block; /* elements in all, and in one block */
    amp_convert_desc desc;
} ampi_convert_job;
/* A conversion's operands and settings in one struct; types are those of FP32 where 0 was given. */
AMPI_FN ampi_convert_job ampi_convert_job_of(amp_ref dst, amp_ref src,
        const amp_convert_desc* desc) {
    ampi_convert_job job;
    AMPI_CLEAR(job);
    job.dst = (char*)dst.data; job.dst_dtype = ampi_dtype_or_f32(dst.dtype);
    job.to = ampi_type_size(dst.dtype);
    job.src = (const char*)src.data; job.src_dtype = ampi_dtype_or_f32(src.dtype);
    job.from = ampi_type_size(src.dtype);
    if (desc) job.desc = *desc;
    return job;
}

/* n elements, through FP32 if neither type is. Doubles never become 16 bits here: that rounds
   twice. */
AMPI_FN void ampi_convert_nearest(void* dst, amp_dtype to, const void* src, amp_dtype from,
        size_t n) {
    float tile[AMPI_CONVERT_TILE];
    if (to == from || to == AMP_F32 || from == AMP_F32)
        ampi_convert_directly(dst, to, src, from, n);
    else for (size_t m, i = 0; i < n; i += m) {
        m = ampi_min_size(n - i, AMPI_CONVERT_TILE);
        ampi_load_f32(tile, src, from, i, m);
        ampi_store_f32(dst, to, i, tile, m);
    }
}

/* n elements from element `first` of the row on, rounded once from double. */
AMPI_FN void ampi_convert_by_double(const ampi_convert_job* job, void* dst, const void* src,
        size_t first, size_t n) {
    const int random = job->desc.rounding == AMP_ROUND_STOCHASTIC;
    uint32_t bits[AMPI_F64_BLOCK + 4];
    double wide[AMPI_F64_BLOCK];
    for (size_t m, skip = 0, i = 0; i < n; i += m) {
        const uint64_t position = job->desc.offset + first + i;
        m = ampi_min_size(n - i, AMPI_F64_BLOCK);
        ampi_convert_nearest(wide, AMP_F64, (const char*)src + i * job->from, job->src_dtype, m);
        if (random) skip = (size_t)(position & 3u);
        if (random)
            ampi_random_fill(bits, job->desc.seed, position - skip, ampi_round_up(skip + m, 4));
        ampi_f64_narrow((char*)dst + i * job->to, job->dst_dtype, wide, m, random ? bits + skip
            : NULL);
    }
}

/* Infinity becomes the largest finite value: its bits minus one. Returns how many it clamped. */
AMPI_FN size_t ampi_saturate(void* p, amp_dtype t, size_t n) {
    const size_t size = ampi_type_size(t);
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        char* x = (char*)p + i * size;
        const uint64_t largest = ampi_element_bits(x, t) - 1u;
        const uint32_t single = (uint32_t)largest;
        const uint16_t low = (uint16_t)largest;
        if (!amp_is_inf(amp_ref_of(x, t))) continue;
        memcpy(x, size == 2 ? (const void*)&low : size == 4 ? (const void*)&single
            : (const void*)&largest, size);
        count++;
    }
    return count;
}

/* One block; returns how many elements were clamped. In place a block fits `copy`, where its source
   goes first. */
AMPI_FN size_t ampi_convert_block(const ampi_convert_job* job, size_t index) {
    double copy[AMPI_CONVERT_TILE];
    const size_t first = index * job->block, n = ampi_min_size(job->n - first, job->block);
    char* dst = job->dst + first * job->to;
    const void* src = job->src + first * job->from;
    if (job->dst == job->src) src = memcpy(copy, src, n * job->from);
    if (job->dst_dtype != job->src_dtype && job->to == 2
        && (job->from == 8 || job->desc.rounding == AMP_ROUND_STOCHASTIC))
        ampi_convert_by_double(job, dst, src, first, n);
    else
        ampi_convert_nearest(dst, job->dst_dtype, src, job->src_dtype, n);
    return job->desc.saturate ? ampi_saturate(dst, job->dst_dtype, n) : 0;
}

/* All blocks; in place one by one, from the end if elements grow: none overwrites what another
   still reads. Blocks that saturate go one by one too: only this thread's exceptions are masked. */
AMPI_FN size_t ampi_convert_blocks(const ampi_convert_job* job) {
    const int in_place = job->dst == job->src, alone = in_place || job->desc.saturate;
    const int backwards = in_place && job->to > job->from;
    const int64_t blocks = (int64_t)ampi_div_up(job->n, job->block);
    size_t clamped = 0;
    int64_t i;
    if (alone) {
        for (i = 0; i < blocks; i++)
            clamped += ampi_convert_block(job, (size_t)(backwards ? blocks - 1 - i : i));
    }
    if (alone) return clamped;
    AMPI_PARALLEL_OVER(job->n, for (i = 0; i < blocks; i++) ampi_convert_block(job, (size_t)i));
    return 0;
}

/* Refuses types, shapes and overlaps that a conversion does not take. n, the elements from the
   first to the last, wraps only for inputs that are refused, or empty, before it is used. */
AMPI_FN amp_result ampi_convert_check(const ampi_convert_job* job, size_t dst_ld, size_t src_ld,
        size_t rows, size_t cols) {
    const amp_logger* logger = job->desc.logger;
    const size_t to = job->to, from = job->from, largest = ampi_max_size(to, from);
    const size_t ld = ampi_max_size(dst_ld, src_ld), n = (rows - 1) * ld + cols;
    const uintptr_t d = (uintptr_t)job->dst, s = (uintptr_t)job->src;

    /* settings */
    AMPI_REFUSE_CALL(to == 0 || from == 0, AMP_ERR_DTYPE,
        "amp_convert: %s_dtype %d is not a data type", to ? "src" : "dst",
        (int)(to ? job->src_dtype : job->dst_dtype));
    const int rounding = (int)job->desc.rounding, stochastic = rounding == AMP_ROUND_STOCHASTIC;
    AMPI_REFUSE_CALL(rounding != AMP_ROUND_NEAREST && !stochastic, AMP_ERR_DESC,
        "amp_convert: rounding %d is not 0 (nearest) or 1 (stochastic)", rounding);
    AMPI_REFUSE_CALL(stochastic && to != 2, AMP_ERR_DESC,
        "amp_convert: stochastic rounding is to f16 or bf16, not to %s",
        amp_dtype_name(job->dst_dtype));

    /* arrays */
    if (rows == 0 || cols == 0) return AMP_OK;
    AMPI_REFUSE_CALL(dst_ld < cols || src_ld < cols || (rows > 1 && ld > SIZE_MAX / 16 / rows),
        AMP_ERR_ARGUMENT,
        "amp_convert_rows: %llu rows of %llu elements do not fit a dst_ld of %llu or a src_ld of "
        "%llu", (ampi_ull)rows, (ampi_ull)cols, (ampi_ull)dst_ld, (ampi_ull)src_ld);
    AMPI_REFUSE_CALL(!d || !s, AMP_ERR_ARGUMENT,
        "amp_convert: %s is NULL but there are %lld elements", d ? "src" : "dst", ampi_shown(n));
    AMPI_REFUSE_CALL(n > (SIZE_MAX >> 1) / largest, AMP_ERR_ARGUMENT,
        "amp_convert: no memory holds %lld elements of %lld bytes", ampi_shown(n),
        ampi_shown(largest));

    /* In place, rows must lie on the rows they come from; else arrays lie apart. */
    AMPI_REFUSE_CALL(d != s && d < s + ((rows - 1) * src_ld + cols) * from
        && s < d + ((rows - 1) * dst_ld + cols) * to, AMP_ERR_ARGUMENT,
        "amp_convert: dst and src overlap, %llu bytes apart; only dst == src is allowed",
        (ampi_ull)(d < s ? s - d : d - s));
    AMPI_REFUSE_CALL(d == s && rows > 1 && dst_ld * to != src_ld * from, AMP_ERR_ARGUMENT,
        "amp_convert_rows: dst and src are the same, but their rows are %llu and %llu bytes apart",
        (ampi_ull)(dst_ld * to), (ampi_ull)(src_ld * from));
    return AMP_OK;
}

/* Checks, joins rows that follow each other, and converts row by row. */
AMP_DEF amp_result amp_convert_rows(amp_ref dst, size_t dst_ld, amp_ref src, size_t src_ld,
        size_t rows, size_t cols, const amp_convert_desc* desc) {
    ampi_convert_job job = ampi_convert_job_of(dst, src, desc);
    const int masked = job.desc.saturate || job.desc.mask_exceptions;
    fenv_t floats;
    size_t clamped = 0;
    AMPI_TRY(ampi_convert_check(&job, dst_ld, src_ld, rows, cols));
    if (dst_ld == cols && src_ld == cols) {  /* one row holds all elements */
        cols *= rows;
        rows = 1;
    }
    job.n = cols;
    job.block = dst.data == src.data ? AMPI_CONVERT_TILE : AMPI_CONVERT_BLOCK;

    if (masked) feholdexcept(&floats);
    if (cols == 0) rows = 0;
    for (size_t i = 0; i < rows; i++, job.desc.offset += cols) {
        job.dst = (char*)dst.data + i * dst_ld * job.to;
        job.src = (const char*)src.data + i * src_ld * job.from;
        clamped += ampi_convert_blocks(&job);
    }
    if (masked) fesetenv(&floats);
    if (job.desc.saturated) *job.desc.saturated += clamped;
    return AMP_OK;
}

AMP_DEF amp_result amp_convert_with(amp_ref dst, amp_ref src, size_t n,
        const amp_convert_desc* desc) {
    return amp_convert_rows(dst, n, src, n, 1, n, desc);
}

AMP_DEF amp_result amp_convert(amp_ref dst, amp_ref src, size_t n) {
    return amp_convert_with(dst, src, n, NULL);
}

/* >>impl-scan   Passes over lists of tensors: inf and NaN, norms, unscaling, statistics.
   Words. chunk: a part of one tensor that one task takes. wave: chunks that run at once; what
   they found is combined in their order. A pass's result does not depend on threads. */

/* Half way from the largest float to 2^128: rounds to infinity. */
#define AMPI_FLT_OVERFLOW 3.4028235677973366e38

/* An info that has seen nothing. */
AMPI_HD AMPI_FN void ampi_overflow_clear(amp_overflow_info* info) {
    AMPI_CLEAR(*info);
    info->first_tensor = info->last_tensor = -1;
}

/* Tensors in an array of any struct: `at` gives the i-th. */
typedef struct ampi_tensors {
    const void* list;
    int count;
    amp_tensor (*at)(const void* list, int i);
    int apart; /* 1 = no two are known to share memory */
    const char* place; /* what sentences begin with */
} ampi_tensors;

AMPI_FN const char* ampi_name_or_none(const char* name) { return name ? name : "no name"; }

AMPI_FN amp_tensor ampi_tensor_at(const void* list, int i) { return ((const amp_tensor*)list)[i]; }

/* An array of amp_tensor as a list that passes walk; place: what messages call it. */
AMPI_FN ampi_tensors ampi_tensors_of(const amp_tensor* list, int count, const char* place) {
    const ampi_tensors t = { list, count, ampi_tensor_at, 0, place };
    return t;
}

/* Any change of z flips about half of the bits. Factors: golden ratio, sqrt(2). */
AMPI_FN uint64_t ampi_mix(uint64_t z) {
    z = (z ^ z >> 32) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 29) * 0xb504f333f9de6485u;
    return z ^ z >> 32;
}

/* Tells lists apart by memory and types: the sum of mix(end) - mix(begin) over tensors. Their
   order, empty ones and cuts of an array do not matter; the key of two lists is the sum of
   theirs. */
AMPI_FN uint64_t ampi_tensors_key(const ampi_tensors* t) {
    uint64_t key = 0;
    for (int i = 0; i < t->count; i++) {
        const amp_tensor x = t->at(t->list, i);
        const uint64_t begin = (uint64_t)(uintptr_t)x.data,
            type = (uint64_t)ampi_dtype_or_f32(x.dtype) << 61;
        key += ampi_mix(type ^ (begin + x.count * ampi_type_size(x.dtype)))
            - ampi_mix(type ^ begin);
    }
    return key;
}

/* Has any tensor of the list an element? */
AMPI_FN int ampi_tensors_any(const ampi_tensors* t) {
    for (int i = 0; i < t->count; i++)
        if (t->at(t->list, i).count > 0) return 1;
    return 0;
}

/* Work goes by chunks of AMPI_CHUNK elements of a tensor, in waves of AMPI_WAVE chunks on the
   stack. A wave's may run in parallel. */
#define AMPI_CHUNK 16384
#define AMPI_WAVE  512
#define AMPI_BLOCK 1024 /* elements on the stack, or in a checked block of 16 bits */

typedef struct ampi_chunk {
    int      tensor;
    size_t   offset, n;
    double   sum, sum2; /* results: sums of squares */
    uint64_t inf, nan;         /* results of a check */
    uint64_t held, saturated;  /* results of an update */
    uint64_t first;            /* the first element that any of these four counts */
} ampi_chunk;

typedef void (*ampi_chunk_fn)(void* context, ampi_chunk* chunk);

/* work(context, chunk) for each chunk of the list; then combine, if given, in order. Empty tensors
   have no chunk. */
AMPI_FN void ampi_each_chunk(const ampi_tensors* t, ampi_chunk_fn work, ampi_chunk_fn combine,
        void* context) {
    ampi_chunk wave[AMPI_WAVE];
    int tensor = 0;     /* where the next chunk begins: at element `offset` of this one */
    size_t offset = 0, elements;
    int64_t n;
    while (tensor < t->count) {
        /* the next wave */
        for (n = 0, elements = 0; n < AMPI_WAVE && tensor < t->count;) {
            ampi_chunk* const c = &wave[n];
            AMPI_CLEAR(*c);
            c->tensor = tensor;
            c->offset = offset;
            c->n = ampi_min_size(t->at(t->list, tensor).count - offset, AMPI_CHUNK);
            offset += c->n;
            elements += c->n;
            if (c->n > 0) n++;
            else { tensor++; offset = 0; }  /* this tensor has no more elements */
        }

        AMPI_PARALLEL_FOR(elements > 2 * AMPI_CHUNK, for (int64_t i = 0; i < n; i++) work(context,
            &wave[i]));
        if (combine)
            for (int64_t i = 0; i < n; i++) combine(context, &wave[i]);
    }
}

AMPI_HD AMPI_FN float ampi_widen_bits(uint32_t u, amp_dtype t) {
    return ampi_float(t == AMP_F16 ? ampi_half_widen((uint16_t)u) : t == AMP_BF16 ? u << 16 : u);
}

/* Would x * inverse, both >= 0, rounded to float, then to `to`, be infinite? x is finite. Limits
   lie half way. */
AMPI_HD AMPI_FN int ampi_would_overflow(float x, float inverse, amp_dtype to) {
    const double product = (double)x * (double)inverse;
    if (product >= AMPI_FLT_OVERFLOW) return 1;
    if (to == AMP_F16) return (float)product >= 65520.0f;
    return to == AMP_BF16 && (float)product >= ampi_float(0x7f7f8000u);
}

/* The largest magnitude, as bits of type `from`, whose product with inverse is finite as `to`. */
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

/* Counts magnitudes above `last` in elements [i, end), finite ones as inf; base: the index of
   data[0]. */
AMPI_FN void ampi_count_bad(const void* data, amp_dtype t, size_t i, size_t end, uint32_t last,
        size_t base, ampi_chunk* c) {
    for (; i < end; i++) {
        const uint32_t u = t == AMP_F32 ? ampi_bits_at((const float*)data + i) & 0x7fffffffu
                                        : ((const uint16_t*)data)[i] & 0x7fffu;
        if (u <= last) continue;
        if (c->inf + c->nan == 0) c->first = base + i;
        if (u > ampi_inf_bits(t)) c->nan++;
        else c->inf++;
    }
}

/* Checks n elements, data[0] being number `base`, against `last`, bits of the largest allowed
   magnitude, and adds their squares to c->sum. No square exceeds a block's sum, which is finite if
   all elements are: a sum up to `clear` clears the block, or elements are looked at singly. */
AMPI_FN void ampi_scan(const void* data, amp_dtype t, size_t base, size_t n, uint32_t last,
        ampi_chunk* c) {
    const size_t block = t == AMP_F32 ? n : AMPI_BLOCK;
    const double limit = (double)ampi_widen_bits(last, t);
    const uint64_t clear = last == ampi_inf_bits(t) - 1 ? AMPI_INF64 - 1
        : ampi_bits64(limit * limit);
    size_t m;
    for (size_t i = 0; i < n; i += m) {
        double sum = 0.0;
        m = ampi_min_size(n - i, block);
        ampi_kernels_now()->add_squares(&sum, ampi_at(data, t, i), t, m);
        ampi_kernels_end();
        if (ampi_bits64_at(&sum) << 1 > clear << 1)
            ampi_count_bad(data, t, i, i + m, last, base, c);
        c->sum += sum;
    }
}

/* A pass over lists forms src * inverse, or dst + src * inverse to accumulate, and checks what dst
   would hold; without `info` it stores that unchecked. */
typedef struct ampi_list_pass {
    const ampi_tensors *src, *dst; /* dst NULL: the results would be FP32 */
    float inverse;
    int accumulate;
    amp_overflow_info* info;
    double sum; /* of squares of src, or of results if accumulate */
} ampi_list_pass;

/* y[i] += a * x[i], one fma each. */
AMPI_KERNEL(ampi_axpy_f32, (float* AMPI_RESTRICT y, const float* AMPI_RESTRICT x, size_t n,
        float a), y, x, n, a) {
    size_t i = 0;
    for (; n - i >= 16; i += 16)
        for (int l = 0; l < 16; l++)
            y[i + (size_t)l] = ampi_fma(hw, x[i + (size_t)l], a, y[i + (size_t)l]);
    for (; i < n; i++) y[i] = ampi_fma(hw, x[i], a, y[i]);
}

/* Each x[i] within `limit`, see ampi_within. */
AMPI_KERNEL(ampi_limit_f32, (float* x, size_t n, uint32_t limit), x, n, limit) {
    size_t i = 0;
    for (; n - i >= 16; i += 16)
        for (int l = 0; l < 16; l++) x[i + (size_t)l] = ampi_within(x[i + (size_t)l], limit);
    for (; i < n; i++) x[i] = ampi_within(x[i], limit);
}

/* Halves of n masters. */
AMPI_KERNEL(ampi_split, (uint16_t* AMPI_RESTRICT low, uint16_t* AMPI_RESTRICT rest,
        const float* AMPI_RESTRICT w, size_t n), low, rest, w, n) {
    uint32_t bits[16];
    for (size_t i = 0, count; i < n; i += count) {
        count = n - i < 16 ? n - i : 16;
        for (size_t l = 0; l < count; l++) bits[l] = ampi_bits_to_split(w[i + l]);
        for (size_t l = 0; l < count; l++) low[i + l] = ampi_upper_half(bits[l]);
        for (size_t l = 0; l < count; l++) rest[i + l] = (uint16_t)bits[l];
    }
}

/* n masters of their halves. */
AMPI_KERNEL(ampi_join, (float* AMPI_RESTRICT w, const uint16_t* AMPI_RESTRICT low,
        const uint16_t* AMPI_RESTRICT rest, size_t n), w, low, rest, n) {
    size_t i = 0;
    for (; n - i >= 16; i += 16)
        for (size_t l = i; l < i + 16; l++) w[l] = ampi_joined(low[l], rest[l]);
    for (; i < n; i++) w[i] = ampi_joined(low[i], rest[i]);
}

/* y + x * inverse: checked as it would be stored, or stored. */
AMPI_FN void ampi_accumulate_chunk(const ampi_list_pass* pass, const amp_tensor* y,
        const amp_tensor* x, ampi_chunk* c) {
    const amp_dtype t = ampi_dtype_or_f32(y->dtype);
    union { float f32[AMPI_BLOCK]; uint16_t f16[AMPI_BLOCK]; } stored;
    AMPI_ALIGNED float sum[AMPI_BLOCK], tile[AMPI_BLOCK];
    size_t n;
    for (size_t i = c->offset; i < c->offset + c->n; i += n) {
        n = ampi_min_size(c->offset + c->n - i, AMPI_BLOCK);
        ampi_load_f32(sum, y->data, t, i, n);
        ampi_load_f32(tile, x->data, x->dtype, i, n);
        ampi_axpy_f32(sum, tile, n, pass->inverse);
        if (!pass->info) { ampi_store_f32(y->data, t, i, sum, n); continue; }
        ampi_store_f32(&stored, t, 0, sum, n);
        AMPI_FORGET(&stored);
        ampi_scan(&stored, t, i, n, ampi_inf_bits(t) - 1, c);
    }
}

/* What a pass over a list does with one chunk: accumulate, look for inf and NaN, or convert with
   a factor. */
AMPI_FN void ampi_list_pass_chunk(void* context, ampi_chunk* c) {
    const ampi_list_pass* pass = (const ampi_list_pass*)context;
    const amp_tensor x = pass->src->at(pass->src->list, c->tensor),
        none = { NULL, AMP_F32, 0, NULL };
    const amp_tensor y = pass->dst ? pass->dst->at(pass->dst->list, c->tensor) : none;
    const amp_dtype from = ampi_dtype_or_f32(x.dtype), to = ampi_dtype_or_f32(y.dtype);
    const void* src = ampi_at(x.data, from, c->offset);
    if (pass->accumulate) { ampi_accumulate_chunk(pass, &y, &x, c); return; }
    if (pass->info) {
        ampi_scan(src, from, c->offset, c->n, ampi_last_finite(from, to, pass->inverse), c);
        return;
    }
    ampi_kernels_now()->convert(ampi_mutable(ampi_at(y.data, to, c->offset)), to, src, from, c->n,
        &pass->inverse, 0);
    ampi_kernels_end();
}

/* Adds what a chunk found to the pass's info, in the order of the list. */
AMPI_FN void ampi_list_pass_combine(void* context, ampi_chunk* c) {
    ampi_list_pass* pass = (ampi_list_pass*)context;
    amp_overflow_info* info = pass->info;
    if (c->inf + c->nan > 0 && info->last_tensor != c->tensor) {
        const char* name = pass->src->at(pass->src->list, c->tensor).name;
        info->last_tensor = c->tensor;
        memset(info->last_name, 0, sizeof info->last_name);
        if (name) strncpy(info->last_name, name, sizeof info->last_name - 1);
        if (!info->found_inf) {
            info->found_inf = 1;
            info->first_tensor = c->tensor;
            info->first_index = c->first;
            memcpy(info->first_name, info->last_name, sizeof info->first_name);
        }
    }
    info->inf_count += c->inf;
    info->nan_count += c->nan;
    pass->sum += c->sum;
}

/* One pass. With info nothing is stored: info tells what is inf or NaN, or would be in dst, and the
   results' norm. */
AMPI_FN void ampi_unscale(const ampi_tensors* src, const ampi_tensors* dst, float inverse,
        int accumulate, amp_overflow_info* info) {
    ampi_list_pass pass = { src, dst, inverse, accumulate, info, 0.0 };
    fenv_t floats;
    if (!info) { ampi_each_chunk(src, ampi_list_pass_chunk, NULL, &pass); return; }
    ampi_overflow_clear(info);
    feholdexcept(&floats); /* squares of inf and NaN are formed too */
    ampi_each_chunk(src, ampi_list_pass_chunk, ampi_list_pass_combine, &pass);
    fesetenv(&floats);
    info->norm = info->found_inf ? ampi_double(AMPI_INF64)
        : sqrt(pass.sum) * (accumulate ? 1.0 : (double)inverse);
}

AMPI_COMPILE_QUICKLY

/* A type's least normal number is 2^min_exponent, its largest (2 - 2^-fraction) *
   2^max_exponent. */
static const struct ampi_range { int max_exponent, min_exponent, fraction; } ampi_ranges[] = {
    /* by amp_dtype */
    { 0, 0, 0 }, { 127, -126, 23 }, { 15, -14, 10 }, { 127, -126, 7 }, { 1023, -1022, 52 } };

/* Bits of |x| as a double, which holds each type exactly. */
AMPI_FN uint64_t ampi_magnitude64(double x) { return ampi_bits64(x) & 0x7fffffffffffffffu; }

/* floor(log2|x|) of a finite number that is not zero, from its bits. */
AMPI_FN int ampi_exponent(uint64_t magnitude) {
    int e = (int)(magnitude >> 52);
    if (e > 0) return e - 1023;
    for (e = -1023; !(magnitude & 0x8000000000000u); e--) magnitude <<= 1;
    return e;
}

/* Counts element x of type `dtype`. Rounding to the target decides on underflow and overflow. */
AMPI_FN void ampi_stats_add(amp_stats* s, double x, amp_dtype dtype, amp_dtype target) {
    const uint64_t a = ampi_magnitude64(x);
    if (a == 0) { s->zeros++; return; }
    if (a > AMPI_INF64) { s->nans++; return; }
    if (a == AMPI_INF64) { s->infs++; return; }

    /* By its binary exponent e: bins, those at both ends for all beyond. */
    const int e = ampi_exponent(a), bin = e - AMP_STATS_MIN_EXPONENT;
    s->histogram[bin < 0 ? 0 : bin >= AMP_STATS_BINS ? AMP_STATS_BINS - 1 : bin]++;
    if (e < ampi_ranges[dtype].min_exponent) s->subnormals++;

    /* as it would be stored */
    const uint64_t rounded = ampi_magnitude64(
        target == AMP_F16 ? amp_half_to_double(amp_half_from_double(x))
        : target == AMP_BF16 ? amp_bfloat16_to_double(amp_bfloat16_from_double(x))
        : (double)(float)x);
    if (rounded == 0) s->would_underflow++;
    else if (rounded == AMPI_INF64) s->would_overflow++;
    else if (ampi_exponent(rounded) < ampi_ranges[target].min_exponent) s->would_be_subnormal++;

    /* The magnitude as a float that is finite and not zero: its least one is ampi_float(1). */
    float f = e < -149 ? 0.0f : e > 127 ? AMPI_FLT_MAX : (float)ampi_double(a);
    f = f < ampi_float(1) ? ampi_float(1) : f > AMPI_FLT_MAX ? AMPI_FLT_MAX : f;
    if (s->largest == 0.0f || f > s->largest) s->largest = f;
    if (s->smallest == 0.0f || f < s->smallest) s->smallest = f;
}

/* largest = f * 2^e with f in [1,2): times 2^(max_exponent - 1 - e) this is at most half of the
   target's largest number unless f exceeds that number's fraction, 2 - 2^-fraction. */
AMPI_FN void ampi_suggest_scale(amp_stats* s, amp_dtype target) {
    const struct ampi_range* range = &ampi_ranges[target];
    const uint32_t last = (0x007fffffu << (23 - range->fraction)) & 0x007fffffu;
    const uint64_t largest = ampi_bits64((double)s->largest);
    s->suggested_scale = 0.0f;
    if (s->largest == 0.0f) return;
    const int e = range->max_exponent - 1 - ampi_exponent(largest)
        - (((largest >> 29) & 0x007fffffu) > last);
    s->suggested_scale = ampi_float((uint32_t)((e > 127 ? 127 : e) + 127) << 23);
}

/* Counts elements by exponent in blocks of doubles, while exceptions are masked. */
AMP_DEF amp_result amp_stats_collect(amp_stats* out, const void* x, amp_dtype dtype, size_t n,
        amp_dtype target, int add) {
    double tile[AMPI_BLOCK];
    fenv_t floats;
    if (!out || (!x && n) || n > SIZE_MAX / 16) return AMP_ERR_ARGUMENT;
    if (!target) target = AMP_F16;
    if (ampi_type_size(dtype) == 0 || !ampi_is_compute_dtype(target)) return AMP_ERR_DTYPE;
    if (!add) AMPI_CLEAR(*out);
    out->count += n;

    feholdexcept(&floats);
    for (size_t at = 0; at < n; at += AMPI_BLOCK) {
        const size_t k = ampi_min_size(n - at, AMPI_BLOCK);
        amp_convert(amp_ref_of(tile, AMP_F64), amp_ref_of(ampi_at(x, dtype, at), dtype), k);
        for (size_t i = 0; i < k; i++)
            ampi_stats_add(out, tile[i], ampi_dtype_or_f32(dtype), target);
    }
    ampi_suggest_scale(out, target);
    fesetenv(&floats);
    return AMP_OK;
}

/* >>impl-gemm   The matrix product and the dense layer: what is computed, in which blocks, by which
   threads. Sums themselves are in impl-kernels.
   Words. share: what one thread takes. plan: the blocks of a product, and its scratch memory.
   form: how operands are packed. */

AMPI_FN float* ampi_align64(void* p) {
    return (float*)(void*)(((uintptr_t)p + 63u) & ~(uintptr_t)63u);
}

/* Floats of a workspace once aligned. */
AMPI_FN size_t ampi_room(const amp_exec* exec) {
    return exec && exec->workspace && exec->workspace_size > 64
        ? (exec->workspace_size - 64) / sizeof(float) : 0;
}

#if defined(_OPENMP) && !defined(AMP_NO_OPENMP)
/* Threads that a call may use: one inside of another parallel region. */
AMPI_FN size_t ampi_threads(void) {
    const int t = omp_get_active_level() < omp_get_max_active_levels() ? omp_get_max_threads() : 1;
    return t > 0 ? (size_t)t : 1;
}
#else
/* Threads that a call may use: one inside of another parallel region. */
AMPI_FN size_t ampi_threads(void) { return 1; }
#endif
/* The first of n tasks that share number `share` takes; n for number `shares`. */
AMPI_FN size_t ampi_share(size_t n, size_t shares, size_t share) {
    return n / shares * share + (share < n % shares ? share : n % shares);
}

enum { AMPI_MC = 96, AMPI_SUM_ROWS = 768,
       AMPI_STACK_FLOATS = 14 * 1024 }; /* scratch memory without a workspace */

/* Threads that a product is worth, one below a million multiplications: an element from memory
   counts as 4. */
AMPI_FN size_t ampi_gemm_threads(size_t m, size_t n, size_t k) {
    const double a = (double)m, b = (double)n, c = (double)k;
    return a * b * c + 4.0 * (a * b + b * c + a * c) < 1e6 ? 1 : ampi_threads();
}

/* Blocks for a share of m rows, n columns of C. Each cut about halves mc, nc and kc, and quarters
   sum_rows. */
AMPI_FN void ampi_plan_blocks(ampi_plan* p, const ampi_kernels* g, const ampi_product* s, size_t m,
        size_t n, int cut) {
    const ampi_operand* b = &s->b;
    /* The largest blocks. */
    const size_t mc = ampi_round_up((size_t)AMPI_MC >> cut, AMPI_LANES);
    const size_t nc = ampi_max_size((g->nc >> cut) / g->nr, 1) * g->nr;
    const size_t kc = ampi_max_size((size_t)AMPI_KC >> cut, 32);

    /* Blocks of k, in whole vectors of pairs, and of columns, in whole micro-tiles, are about equal
       to each other. */
    p->kc = ampi_round_up(ampi_div_up(ampi_max_size(s->k, 1), ampi_div_up(s->k, kc)),
        2 * AMPI_LANES);
    p->nc = ampi_round_up(ampi_div_up(n, ampi_div_up(n, nc)), g->nr);
    p->mc = ampi_min_size(m, mc);
    p->sum_rows = s->k <= p->kc ? m : ampi_min_size(m,
        ampi_max_size((size_t)AMPI_SUM_ROWS >> 2 * cut, mc));

    /* Scratch memory for B: a packed block (kc + 1: panels share no cache sets), unless B is read
       in place, as no pairs are; 16 rows along k or, of an im2col matrix, along columns; a padded
       copy or windows, if at most twice that block. */
    p->packed = (p->kc + 1) * p->nc;
    p->rows = AMPI_LANES * (ampi_max_size(p->kc, b->is_image ? p->nc : 0) + 2 * AMPI_PAD);
    p->padded = 0;
    if (b->image.in_place && b->along_k) {
        p->windows = ampi_windows_of(&b->image, p->kc);
        p->padded = p->windows.floats <= 2 * p->packed ? p->windows.floats : 0;
    } else if (b->is_image && !b->along_k)
        p->padded = ampi_padded_floats(&b->image, p->kc, p->nc, 2 * p->packed);
    if (b->image.in_place && p->padded > 0 && s->form == AMPI_FP32) p->packed = 0;

    /* All of it: a panel of A; B; sums, with 16 rows behind for the matrix unit; a vector. */
    p->floats = (p->mc + 2 * AMPI_PAD) * (p->kc + 2 * AMPI_PAD) + p->packed + p->rows + p->padded
        + ((s->k > p->kc ? p->sum_rows : p->mc) + AMPI_LANES) * (p->nc + AMPI_PAD) + AMPI_LANES;
}

/* A product's plan: the largest blocks whose shares fit `room` floats together or, from two cuts
   on, each its stack. The least blocks (32 deep, 16 rows, nr columns) fit the stack, so the loop
   ends. */
AMPI_FN ampi_plan ampi_plan_of(const ampi_kernels* g, const ampi_product* s, size_t room) {
    const size_t rows = ampi_div_up(s->m, g->mr), columns = ampi_div_up(s->n, g->nr);
    ampi_plan p;
    int cut = 0;
    AMPI_CLEAR(p);
    p.by_rows = rows > columns;
    p.unit = p.by_rows ? g->mr : g->nr;
    p.units = p.by_rows ? rows : columns;
    p.shares = ampi_min_size(ampi_gemm_threads(s->m, s->n, s->k), p.units);

    const size_t each = ampi_div_up(p.units, p.shares) * p.unit;  /* the largest share */
    do ampi_plan_blocks(&p, g, s, p.by_rows ? ampi_min_size(s->m, each) : s->m,
        p.by_rows ? s->n : ampi_min_size(s->n, each), cut);
    while (p.shares * p.floats > room && (cut++ < 2 || p.floats > AMPI_STACK_FLOATS));
    return p;
}

/* The least exponent field in an operand but for zeros, which add nothing; 256 if all are zero. */
AMPI_FN unsigned ampi_operand_exponent(const ampi_kernels* g, const ampi_operand* v, size_t rows,
        size_t length) {
    const uint16_t* x = (const uint16_t*)v->data;
    unsigned least = 256;
    if (v->is_image) return g->least_exponent(x, v->image.elements);
    if (v->area > 0)  /* from the first to the last weight in use, and those between */
        return g->least_exponent(x, (length / v->area - 1) * v->output + (rows - 1) * v->ld
            + (v->area / v->kernel_w - 1) * v->next_h + (v->kernel_w - 1) * v->next_w + 1);
    for (size_t r = 0; r < rows; r++) {
        const unsigned one = g->least_exponent(x + r * v->ld, length);
        if (one < least) least = one;
    }
    return least;
}

/* How a product is packed. Pairs pay for bfloat16 of some size. vdpbf16ps takes subnormals as zero.
   With least exponent fields a, b >= 1 of the factors, all sums of products are multiples of
   2^(a + b - 268); of at least 2^-126 none is subnormal. */
AMPI_FN int ampi_gemm_form(const ampi_kernels* g, const ampi_product* s, const amp_exec* exec) {
    const ampi_operand *a = &s->a, *b = &s->b;
    const int image = a->is_image || b->is_image;
    if (a->paired) return s->form;
    if (a->dtype != AMP_BF16 || b->dtype != AMP_BF16 || s->m < 16 || s->n < 16 || s->k < 32)
        return AMPI_FP32;
    if (exec && exec->sums == AMP_SUMS_FAST && ampi_amx(1)) return AMPI_AMX_PAIRS;
    if (!AMPI_IN_PAIRS || (image && s->m <= AMPI_PAIRED_ROWS)) return AMPI_FP32;

    const unsigned a_least = ampi_operand_exponent(g, a, a->along_k ? s->m : s->k,
        a->along_k ? s->k : s->m);
    const unsigned b_least = ampi_operand_exponent(g, b, b->along_k ? s->n : s->k,
        b->along_k ? s->k : s->n);
    return a_least >= 1 && b_least >= 1 && a_least + b_least >= 268 - 126 ? AMPI_PAIRS_OF_BF16
        : AMPI_FP32;
}

#if AMPI_AMX
/* Gives a thread's tiles their form (Intel SDM, LDTILECFG): palette 1, 16 rows of 64 bytes. */
AMPI_TARGET_AMX AMPI_FN void ampi_amx_begin(void) {
    static const struct { uint8_t palette, start_row,
        reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } c = {
        1, 0, { 0 }, { 64, 64, 64, 64, 64 }, { 16, 16, 16, 16, 16 } };
    _tile_loadconfig(&c);
}

AMPI_TARGET_AMX AMPI_FN void ampi_amx_end(void) { _tile_release(); }
#endif

/* One share, in p->floats of scratch memory; 16 more align them on the stack. */
AMPI_FN void ampi_share_run(const ampi_kernels* g, const ampi_product* s, const ampi_plan* p,
        size_t share, float* scratch) {
    const size_t from = ampi_share(p->units, p->shares, share) * p->unit;
    const size_t to = ampi_min_size(ampi_share(p->units, p->shares, share + 1) * p->unit,
        p->by_rows ? s->m : s->n);
#if AMPI_AMX
    if (s->form == AMPI_AMX_PAIRS) ampi_amx_begin();
#endif
    if (p->by_rows) g->product(s, p, from, to - from, 0, s->n, scratch);
    else g->product(s, p, 0, s->m, from, to - from, scratch);
#if AMPI_AMX
    if (s->form == AMPI_AMX_PAIRS) ampi_amx_end();
#endif
    ampi_kernels_end();
}

/* Runs one share with scratch memory on the stack. */
AMPI_APART void ampi_share_on_stack(const ampi_kernels* g, const ampi_product* s,
        const ampi_plan* p, size_t share) {
    float scratch[AMPI_STACK_FLOATS + 16];
    ampi_share_run(g, s, p, share, ampi_align64(scratch));
}

/* Floats for a product's full speed. */
AMPI_FN size_t ampi_gemm_floats(const ampi_product* s) {
    const ampi_plan p = ampi_plan_of(ampi_kernels_now(), s, SIZE_MAX);
    return p.shares * p.floats;
}

/* Bytes of a workspace that holds that many floats behind its first multiple of 64 bytes. */
AMPI_FN size_t ampi_floats_workspace(size_t floats) { return floats * sizeof(float) + 128; }

/* Operands of FP32 get the type that the exec has them rounded to. */
AMPI_FN void ampi_product_round(ampi_product* s, const amp_exec* exec) {
    const int to = exec && exec->operands ? AMPI_ROUNDED + (int)exec->operands : (int)AMP_F32;
    if (s->a.dtype == AMP_F32) s->a.dtype = (amp_dtype)to;
    if (s->b.dtype == AMP_F32) s->b.dtype = (amp_dtype)to;
}

/* Are both operands halves, as stored or rounded? */
AMPI_FN int ampi_product_is_exact(const ampi_product* s) {
    return (int)s->a.dtype % AMPI_ROUNDED == AMP_F16 && (int)s->b.dtype % AMPI_ROUNDED == AMP_F16;
}

/* Computes a checked product, in the workspace if its blocks fit there. */
AMPI_FN void ampi_gemm_run(const ampi_product* product, const amp_exec* exec) {
    const ampi_kernels* g = ampi_kernels_now();
    ampi_product s = *product;
    if (s.m == 0 || s.n == 0) return;
    ampi_product_round(&s, exec);
    s.exact |= ampi_product_is_exact(&s);
    s.form = ampi_gemm_form(g, &s, exec);

    AMPI_GROW_WORKSPACE(ampi_floats_workspace(ampi_gemm_floats(&s)))
    const size_t room = ampi_room(exec);
    ampi_plan p = ampi_plan_of(g, &s, room);
    float* memory = p.shares * p.floats <= room ? ampi_align64(exec->workspace) : NULL;
    AMPI_PARALLEL_FOR(p.shares > 1, for (int64_t i = 0; i < (int64_t)p.shares; i++) {
        if (memory) ampi_share_run(g, &s, &p, (size_t)i, memory + (size_t)i * p.floats);
        else ampi_share_on_stack(g, &s, &p, (size_t)i);
    });
}

/* Refuses a matrix whose type is not computed on, whose rows are longer than ld, that memory could
   not hold, or that is NULL. */
AMPI_FN amp_result ampi_check_matrix(const amp_logger* logger, const char* call,
        const ampi_argument* p) {
    const long long rows = ampi_shown(p->rows), cols = ampi_shown(p->cols), ld = ampi_shown(p->ld);
    size_t elements;
    AMPI_REFUSE_CALL(!ampi_is_compute_dtype(p->dtype), AMP_ERR_DTYPE,
        "%s: %s has type %s (%d); it must be f32, f16 or "
        "bf16", call, p->name, amp_dtype_name(p->dtype), (int)p->dtype);
    if (rows == 0 || cols == 0) return AMP_OK;
    AMPI_REFUSE_CALL(p->ld < p->cols, AMP_ERR_ARGUMENT,
        "%s: ld%s is %lld, but a row of %s has %lld elements", call, p->name, ld, p->name, cols);
    AMPI_REFUSE_CALL(!ampi_mul_size(p->rows, p->ld, &elements) || elements > SIZE_MAX / 8,
        AMP_ERR_ARGUMENT, "%s: %s is too large: %lld rows of %lld elements", call, p->name, rows,
        ld);
    AMPI_REFUSE_CALL(!p->data, AMP_ERR_ARGUMENT, "%s: %s is NULL, but it has %lld x %lld elements",
        call, p->name, rows, cols);
    return AMP_OK;
}

/* Refuses operands that are not valid one by one, then results that lie over other operands. */
AMPI_FN amp_result ampi_check_matrices(const amp_logger* logger, const char* call,
        const ampi_argument* list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!(list[i].use & AMPI_UNUSED) && (list[i].data || !(list[i].use & AMPI_NULL)))
            AMPI_TRY(ampi_check_matrix(logger, call, &list[i]));
    return ampi_check_apart(logger, call, list, count);
}

#define AMPI_CHECK_MATRICES(logger, call, list) \
    ampi_check_matrices(logger, call, list, AMPI_LENGTH(list))

/* A matrix of rows ld elements apart as an operand. */
AMPI_FN ampi_operand ampi_matrix(amp_ref x, size_t ld, int along_k) {
    ampi_operand v;
    AMPI_CLEAR(v);
    v.data = x.data; v.dtype = ampi_dtype_or_f32(x.dtype);
    v.ld = ld;
    v.along_k = along_k;
    return v;
}

/* A product into a plain matrix C, still without operands. */
AMPI_FN void ampi_product_init(ampi_product* s, size_t m, size_t n, size_t k, amp_ref c,
        size_t ldc) {
    AMPI_CLEAR(*s);
    s->m = m; s->n = n; s->k = k;
    s->c.data = c.data; s->c.dtype = ampi_dtype_or_f32(c.dtype);
    s->c.ld = ldc;
    s->c.columns = ampi_endless_row();
    s->c.alpha = 1.0f;
}

/* Bytes for full speed, see the interface; 0 if a size overflows. */
AMP_DEF size_t amp_gemm_workspace(size_t m, size_t n, size_t k) {
    ampi_product s;
    size_t elements;
    if (!ampi_mul_size(m, n, &elements) || !ampi_mul_size(m, k, &elements)
        || !ampi_mul_size(n, k, &elements) || m > SIZE_MAX / 8 || n > SIZE_MAX / 8
        || k > SIZE_MAX / 8) return 0;
    ampi_product_init(&s, m, n, k, AMP_NONE, n);
    return ampi_floats_workspace(ampi_gemm_floats(&s));
}

/* Matrix i of a series, an operand's in a batch. A stride is the elements from one to the next; 0:
   all are one. */
AMPI_FN ampi_argument ampi_series_at(const ampi_argument* first, size_t stride, size_t i) {
    ampi_argument x = *first;
    x.data = ampi_at(x.data, x.dtype, i * stride);
    return x;
}

/* The bytes from a batch's first to its last matrix, count >= 1. */
AMPI_FN ampi_array ampi_series_span(const ampi_argument* p, size_t stride, size_t count) {
    const size_t elements = p->rows > 0 && p->cols > 0
        ? (count - 1) * stride + (p->rows - 1) * p->ld + p->cols : 0;
    return ampi_array_of(p->data, elements * ampi_type_size(p->dtype), 0);
}

/* Does a matrix of one batch share a byte with one of another? Each has `count` or, with stride 0,
   one. */
AMPI_FN int ampi_series_meet(const ampi_argument* p, size_t p_stride, const ampi_argument* q,
        size_t q_stride, size_t count) {
    const ampi_array a = ampi_series_span(p, p_stride, count),
        b = ampi_series_span(q, q_stride, count);
    const size_t p_count = p_stride ? count : 1, q_count = q_stride ? count : 1;
    if (a.from >= b.to || b.from >= a.to) return 0;
    for (size_t i = 0; i < p_count; i++)
        for (size_t k = 0; k < q_count; k++) {
            const ampi_argument x = ampi_series_at(p, p_stride, i),
                y = ampi_series_at(q, q_stride, k);
            if (ampi_arguments_meet(&x, &y)) return 1;
        }
    return 0;
}

/* Refuses a stride with which a batch has more elements than memory holds. */
AMPI_FN amp_result ampi_check_stride(const amp_logger* logger, const char* call, const char* name,
        size_t batch, size_t stride) {
    size_t reach;
    AMPI_REFUSE_CALL(batch > 1 && (!ampi_mul_size(batch, stride, &reach) || reach > SIZE_MAX / 16),
        AMP_ERR_ARGUMENT, "%s: %s is too large: a batch of %lld, %lld elements apart", call, name,
        ampi_shown(batch), ampi_shown(stride));
    return AMP_OK;
}

/* A batch's checks beside those of its first product; list: a, b, c. */
AMPI_FN amp_result ampi_check_batched(const amp_logger* logger, const char* call,
        const ampi_argument* list, const amp_gemm_shape* s) {
    const ampi_argument *a = &list[0], *b = &list[1], *c = &list[2];
    const size_t strides[] = { s->a_stride, s->b_stride, s->c_stride };
    for (int i = 0; i < 3; i++)
        AMPI_TRY(ampi_check_stride(logger, call, list[i].name, s->batch, strides[i]));
    if (s->batch == 1 || s->m == 0 || s->n == 0) return AMP_OK;

    /* Matrices of c are equally far apart: those that the first one does not meet do not meet. */
    const ampi_argument second = ampi_series_at(c, s->c_stride, 1);
    AMPI_REFUSE_CALL(ampi_series_meet(c, 0, &second, s->c_stride, s->batch - 1), AMP_ERR_ARGUMENT,
        "%s: c_stride is %lld, matrices of c overlap", call, ampi_shown(s->c_stride));
    AMPI_REFUSE_CALL(ampi_series_meet(a, s->a_stride, c, s->c_stride, s->batch)
        || ampi_series_meet(b, s->b_stride, c, s->c_stride, s->batch), AMP_ERR_ARGUMENT,
        "%s: a matrix of c would be written over one of a or b", call);
    return AMP_OK;
}

/* Checks amp_gemm's arguments: gives the batch's first product, and the shape with its defaults. */
AMPI_FN amp_result ampi_gemm_product(ampi_product* p, amp_gemm_shape* s, const amp_logger* logger,
        const char* call, const amp_gemm_shape* shape, float alpha, amp_ref a, amp_ref b,
        float beta, amp_ref c) {
    AMPI_CLEAR(*s);
    AMPI_REFUSE_CALL(!shape, AMP_ERR_ARGUMENT, "%s: the shape is NULL", call);
    *s = *shape;
    const int ta = s->trans_a == AMP_TRANS, tb = s->trans_b == AMP_TRANS;
    AMPI_REFUSE_CALL((!ta && s->trans_a != AMP_NO_TRANS) || (!tb && s->trans_b != AMP_NO_TRANS),
        AMP_ERR_ARGUMENT, "%s: trans_a is %d, trans_b is %d; they must be 0 or 1", call,
        (int)s->trans_a, (int)s->trans_b);

    /* Rows and columns of matrices as they are stored, the latter the least leading dimensions. */
    const size_t a_rows = ta ? s->k : s->m, a_cols = ta ? s->m : s->k;
    const size_t b_rows = tb ? s->n : s->k, b_cols = tb ? s->k : s->n;
    if (s->lda == 0) s->lda = a_cols;
    if (s->ldb == 0) s->ldb = b_cols;
    if (s->ldc == 0) s->ldc = s->n;
    if (s->batch == 0) s->batch = 1;
    const ampi_argument list[] = { { "a", a.data, a.dtype, AMPI_IN, a_rows, a_cols, s->lda },
                                   { "b", b.data, b.dtype, AMPI_IN, b_rows, b_cols, s->ldb },
                                   { "c", c.data, c.dtype, AMPI_OUT, s->m, s->n, s->ldc } };
    AMPI_TRY(AMPI_CHECK_MATRICES(logger, call, list));
    AMPI_TRY(ampi_check_batched(logger, call, list, s));

    /* With alpha 0 nothing is multiplied, and A and B may hold NaN. Then the sums are +0: times -1
       they change nothing in beta * C, not even the sign of a -0. */
    ampi_product_init(p, s->m, s->n, alpha == 0.0f ? 0 : s->k, c, s->ldc);
    p->c.alpha = p->k > 0 ? alpha : beta != 0.0f ? -1.0f : 1.0f;
    p->c.beta = beta;
    p->a = ampi_matrix(a, s->lda, !ta);
    p->b = ampi_matrix(b, s->ldb, tb);
    return AMP_OK;
}

/* Threads take whole products if these suffice for equal shares, or if one (`work` multiplications)
   is too short to be shared. Else products run one by one, each shared by ampi_gemm_run. */
AMPI_FN void ampi_gemm_batch_run(const ampi_product* first, const amp_gemm_shape* s,
        const amp_exec* exec) {
    const double work = (double)s->m * (double)s->n * (double)s->k;
    const size_t threads = ampi_threads();
    const size_t shares = s->batch >= 4 * threads || work < 4e6 ? ampi_min_size(threads, s->batch)
        : 1;
    AMPI_GROW_WORKSPACE(shares * amp_gemm_workspace(s->m, s->n, s->k))
    /* bytes of workspace for a share, whole cache lines */
    const size_t step = exec && exec->workspace ? exec->workspace_size / shares / 64 * 64 : 0;
    AMPI_PARALLEL_FOR(shares > 1 && work * (double)s->batch >= AMPI_PARALLEL_MIN,
                      for (int64_t i = 0; i < (int64_t)shares; i++) {
        const size_t end = ampi_share(s->batch, shares, (size_t)i + 1);
        amp_exec own;
        AMPI_CLEAR(own);
        if (exec) own = *exec;
        own.workspace = step ? (char*)exec->workspace + (size_t)i * step : NULL;
        own.workspace_size = step;

        for (size_t k = ampi_share(s->batch, shares, (size_t)i); k < end; k++) {
            ampi_product one = *first;
            one.a.data = ampi_at(first->a.data, one.a.dtype, k * s->a_stride);
            one.b.data = ampi_at(first->b.data, one.b.dtype, k * s->b_stride);
            one.c.data = ampi_mutable(ampi_at(first->c.data, one.c.dtype, k * s->c_stride));
            ampi_gemm_run(&one, &own);
        }
    });
}

/* Checks a product or a batch of them, then computes it. */
AMP_DEF amp_result amp_gemm(const amp_gemm_shape* s, float alpha, amp_ref a, amp_ref b,
        float beta, amp_ref c, const amp_exec* exec) {
    amp_gemm_shape full;
    ampi_product first;
    AMPI_TRY(ampi_gemm_product(&first, &full, ampi_exec_logger(exec), "amp_gemm", s, alpha, a,
        b, beta, c));
    AMPI_TRY(ampi_check_exec(exec, "amp_gemm"));
    if (full.m == 0 || full.n == 0) return AMP_OK;
    AMPI_COMPUTE_OP;
    if (full.batch == 1) ampi_gemm_run(&first, exec);
    else ampi_gemm_batch_run(&first, &full, exec);
    AMPI_DONE_OP;
}

/* dst[offset..] = sum, or dst + sum, n <= 256. */
AMPI_FN void ampi_store_sum(void* dst, amp_dtype t, size_t offset, float* sum, size_t n,
        int accumulate) {
    float old[256];
    if (accumulate) ampi_load_f32(old, dst, t, offset, n);
    for (size_t i = 0; i < n; i++) sum[i] = ampi_clean_nan(accumulate ? old[i] + sum[i] : sum[i]);
    ampi_store_f32(dst, t, offset, sum, n);
}

/* A call's tensors. Backward y is dy, and a NULL gradient is not wanted. */
typedef struct ampi_layer_refs { amp_ref x, w, b, y, dx, dw, db; int accumulate; } ampi_layer_refs;

/* Rows and columns of x, w, b and y. */
typedef struct ampi_layer_sizes { size_t x[2], w[2], b[2], y[2]; } ampi_layer_sizes;

/* size: rows, columns. */
#define AMPI_LAYER_ARG(name, t, use, size) \
    { name, (t).data, (t).dtype, use, (size)[0], (size)[1], (size)[1] }
/* Refuses operands of a layer that are not valid. Backward, where b is none, dw alone needs x, and
   dx w; forward there are no gradients. */
AMPI_FN amp_result ampi_check_layer(const amp_logger* logger, const char* call,
        const ampi_layer_refs* t, const ampi_layer_sizes* z, int backward) {
    const int dx = t->dx.data ? 0 : AMPI_UNUSED, dw = t->dw.data ? 0 : AMPI_UNUSED;
    const ampi_argument list[] = {
        AMPI_LAYER_ARG(backward ? "dy" : "y", t->y, backward ? AMPI_IN : AMPI_OUT, z->y),
        AMPI_LAYER_ARG("x", t->x, backward ? AMPI_IN | dw : AMPI_IN, z->x),
        AMPI_LAYER_ARG("w", t->w, backward ? AMPI_IN | dx : AMPI_IN, z->w),
        AMPI_LAYER_ARG("b", t->b, AMPI_NULL, z->b),
        AMPI_LAYER_ARG("dx", t->dx, AMPI_OUT | dx, z->x),
        AMPI_LAYER_ARG("dw", t->dw, AMPI_OUT | dw, z->w),
        AMPI_LAYER_ARG("db", t->db, AMPI_OUT | AMPI_NULL, z->b) };
    return AMPI_CHECK_MATRICES(logger, call, list);
}

/* db[o] = sum over n of dy[n][o], n ascending; 256 columns of 64 rows at a time, which a
   first-level cache holds. */
AMPI_FN void ampi_linear_db_chunk(const ampi_layer_refs* t, size_t n, size_t out, size_t o) {
    const amp_dtype type = ampi_dtype_or_f32(t->y.dtype);
    float sums[256];
    const size_t width = ampi_min_size(out - o, 256);
    AMPI_CLEAR(sums);
    for (size_t row = 0; row < n; row += 64)
        ampi_kernels_now()->column_sums(sums, ampi_at(t->y.data, type, row * out + o), type, out,
            ampi_min_size(n - row, 64), width);
    ampi_kernels_end();
    ampi_store_sum(t->db.data, t->db.dtype, o, sums, width,
        t->accumulate & AMP_ACCUMULATE_PARAMS);
}

/* Refuses operands of a dense layer that are not valid. */
AMPI_FN amp_result ampi_check_linear(const amp_logger* logger, const ampi_layer_refs* t, size_t n,
        size_t in, size_t out, int backward) {
    const ampi_layer_sizes z = { { n, in }, { out, in }, { 1, out }, { n, out } };
    return ampi_check_layer(logger, backward ? "linear backward" : "linear", t, &z, backward);
}

/* y[n,o] = sum over i of x[n,i] * w[o,i], + b[o]. */
AMPI_FN void ampi_linear_y(ampi_product* s, const ampi_layer_refs* t, size_t n, size_t in,
        size_t out) {
    ampi_product_init(s, n, out, in, t->y, out);
    s->c.bias = t->b.data; s->c.bias_dtype = ampi_dtype_or_f32(t->b.dtype);
    s->a = ampi_matrix(t->x, in, 1);
    s->b = ampi_matrix(t->w, in, 1);
}

/* dx[n,i] = sum over o of dy[n,o] * w[o,i]. */
AMPI_FN void ampi_linear_dx(ampi_product* s, const ampi_layer_refs* t, size_t n, size_t in,
        size_t out) {
    ampi_product_init(s, n, in, out, t->dx, in);
    s->c.beta = t->accumulate & AMP_ACCUMULATE_INPUT ? 1.0f : 0.0f;
    s->a = ampi_matrix(t->y, out, 1);
    s->b = ampi_matrix(t->w, in, 0);
}

/* dw[o,i] = sum over n of dy[n,o] * x[n,i]. */
AMPI_FN void ampi_linear_dw(ampi_product* s, const ampi_layer_refs* t, size_t n, size_t in,
        size_t out) {
    ampi_product_init(s, out, in, n, t->dw, in);
    s->c.beta = t->accumulate & AMP_ACCUMULATE_PARAMS ? 1.0f : 0.0f;
    s->a = ampi_matrix(t->y, out, 0);
    s->b = ampi_matrix(t->x, in, 0);
}

/* Checks the operands, then computes one product. */
AMP_DEF amp_result amp_linear_forward(amp_ref x, amp_ref w, amp_ref b, amp_ref y, size_t n,
        size_t in, size_t out, const amp_exec* exec) {
    const ampi_layer_refs t = { x, w, b, y, AMP_NONE, AMP_NONE, AMP_NONE, 0 };
    ampi_product s;
    AMPI_TRY(ampi_check_linear(ampi_exec_logger(exec), &t, n, in, out, 0));
    AMPI_TRY(ampi_check_exec(exec, "linear"));
    AMPI_COMPUTE_OP;
    ampi_linear_y(&s, &t, n, in, out);
    ampi_gemm_run(&s, exec);
    AMPI_DONE_OP;
}

/* Checks the operands, then computes the wanted ones of two products and a sum of columns. */
AMP_DEF amp_result amp_linear_backward(amp_ref dy, amp_ref x, amp_ref w, amp_ref dx, amp_ref dw,
        amp_ref db, int accumulate, size_t n, size_t in, size_t out, const amp_exec* exec) {
    const ampi_layer_refs t = { x, w, AMP_NONE, dy, dx, dw, db, accumulate };
    ampi_product s;
    AMPI_TRY(ampi_check_linear(ampi_exec_logger(exec), &t, n, in, out, 1));
    AMPI_TRY(ampi_check_exec(exec, "linear backward"));
    AMPI_COMPUTE_OP;
    if (dx.data) { ampi_linear_dx(&s, &t, n, in, out); ampi_gemm_run(&s, exec); }
    if (dw.data) { ampi_linear_dw(&s, &t, n, in, out); ampi_gemm_run(&s, exec); }
    if (db.data) AMPI_PARALLEL_FOR(out > 256 && n * out >= AMPI_PARALLEL_MIN,
        for (int64_t o = 0; o < (int64_t)out; o += 256)
            ampi_linear_db_chunk(&t, n, out, (size_t)o));
    AMPI_DONE_OP;
}

/* >>impl-conv   Convolution: three products whose B is an im2col matrix, see impl-kernels;
   depthwise convolution by channels.
   Words. group: channels that meet only each other. phase: pixels of x that meet the same kernel
   positions of a strided kernel. This room calls impl-gemm. */

/* A checked shape with its defaults, and its sizes. */
typedef struct ampi_conv2d_sizes {
    amp_conv2d_shape s;
    int out_h, out_w;                  /* sides of y, in pixels */
    size_t cg, og;                     /* channels and outputs of one group */
    size_t area;                       /* kernel_h * kernel_w */
    size_t in_pixels, out_pixels;      /* of one plane of x, of y */
    size_t x_count, w_count, y_count;  /* elements of operands */
} ampi_conv2d_sizes;

/* The output's side; 0 if the kernel is too large, -1 if the padded side is no int. */
AMPI_FN int ampi_conv2d_side(int size, int pad, int pad_end, int kernel, int dilation,
        int stride) {
    const int64_t padded = (int64_t)size + pad + pad_end,
        room = padded - (int64_t)dilation * (kernel - 1) - 1;
    return padded > 0x7fffffff ? -1 : room < 0 ? 0 : (int)(room / stride) + 1;
}

/* a*b*c*d elements of at most 8 bytes, or 0 if too many. */
AMPI_FN size_t ampi_count4(int a, int b, int c, int d) {
    size_t n = (size_t)a;
    if (!ampi_mul_size(n, (size_t)b, &n) || !ampi_mul_size(n, (size_t)c, &n)
        || !ampi_mul_size(n, (size_t)d, &n)) return 0;
    return n > SIZE_MAX / 8 ? 0 : n;
}

/* A shape with its defaults. It is 18 ints as in `names`; the first 7 have no default, both pad_end
   may be AMP_ZERO. */
AMPI_FN amp_result ampi_conv2d_defaults(amp_conv2d_shape* s, const amp_conv2d_shape* shape,
        const amp_logger* logger) {
    static const char* const names[] = { "n", "channels", "height", "width", "out_channels",
                                         "kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h",
                                         "pad_w", "dilation_h", "dilation_w", "groups",
                                         "pad_end_h", "pad_end_w", "output_pad_h",
                                         "output_pad_w" };
    int values[18], i;
    AMPI_REFUSE_CALL(!shape, AMP_ERR_ARGUMENT, "conv2d: the shape is NULL");
    *s = *shape;
    memcpy(values, s, sizeof values);
    for (i = 0; i < 18; i++) {
        const int least = i < 7 ? 1 : i < 14 || i > 15 ? 0 : AMP_ZERO;
        AMPI_REFUSE_CALL(values[i] < least, AMP_ERR_DESC,
            "conv2d: %s is %d, it must be at least %d", names[i], values[i], least);
    }

    s->pad_end_h = ampi_default_int(s->pad_end_h, s->pad_h);
    s->pad_end_w = ampi_default_int(s->pad_end_w, s->pad_w);
    s->stride_h = ampi_max_int(s->stride_h, 1);
    s->stride_w = ampi_max_int(s->stride_w, 1);
    s->dilation_h = ampi_max_int(s->dilation_h, 1);
    s->dilation_w = ampi_max_int(s->dilation_w, 1);
    s->groups = ampi_max_int(s->groups, 1);
    AMPI_REFUSE_CALL(s->channels % s->groups != 0 || s->out_channels % s->groups != 0,
        AMP_ERR_SHAPE, "conv2d: %d groups do not divide %d channels and %d out_channels",
        s->groups, s->channels, s->out_channels);
    return AMP_OK;
}

/* Checks a shape; gives its defaults and sizes. */
AMPI_FN amp_result ampi_conv2d_init(ampi_conv2d_sizes* c, const amp_conv2d_shape* shape,
        const amp_logger* logger) {
    amp_conv2d_shape* s = &c->s;
    AMPI_TRY(ampi_conv2d_defaults(s, shape, logger));
    AMPI_REFUSE_CALL(s->output_pad_h || s->output_pad_w, AMP_ERR_DESC,
        "conv2d: output_pad %dx%d is for transposed convolutions", s->output_pad_h,
        s->output_pad_w);
    c->out_h = ampi_conv2d_side(s->height, s->pad_h, s->pad_end_h, s->kernel_h, s->dilation_h,
        s->stride_h);
    c->out_w = ampi_conv2d_side(s->width, s->pad_w, s->pad_end_w, s->kernel_w, s->dilation_w,
        s->stride_w);
    AMPI_REFUSE_CALL(c->out_h < 0 || c->out_w < 0, AMP_ERR_SHAPE,
        "conv2d: a %dx%d input padded by %dx%d has sides over 2^31 - 1", s->height, s->width,
        s->pad_h, s->pad_w);
    AMPI_REFUSE_CALL(c->out_h == 0 || c->out_w == 0, AMP_ERR_SHAPE,
        "conv2d: kernel %dx%d with dilation %dx%d is larger than its %dx%d input padded by %dx%d",
        s->kernel_h, s->kernel_w, s->dilation_h, s->dilation_w, s->height, s->width, s->pad_h,
        s->pad_w);

    c->cg = (size_t)(s->channels / s->groups);
    c->og = (size_t)(s->out_channels / s->groups);
    c->area = (size_t)s->kernel_h * (size_t)s->kernel_w;
    c->in_pixels = (size_t)s->height * (size_t)s->width;
    c->out_pixels = (size_t)c->out_h * (size_t)c->out_w;
    c->x_count = ampi_count4(s->n, s->channels, s->height, s->width);
    c->w_count = ampi_count4(s->out_channels, s->channels / s->groups, s->kernel_h, s->kernel_w);
    c->y_count = ampi_count4(s->n, s->out_channels, c->out_h, c->out_w);
    AMPI_REFUSE_CALL(c->x_count == 0 || c->w_count == 0 || c->y_count == 0, AMP_ERR_SHAPE,
        "conv2d: %s has more elements than memory can hold", c->x_count == 0 ? "x"
        : c->w_count == 0 ? "w" : "y");
    return AMP_OK;
}

/* The output's sides of a checked shape. */
AMP_DEF amp_result amp_conv2d_output(const amp_conv2d_shape* s, int* out_h, int* out_w,
        const amp_exec* exec) {
    ampi_conv2d_sizes c;
    AMPI_TRY(ampi_conv2d_init(&c, s, ampi_exec_logger(exec)));
    if (out_h) *out_h = c.out_h;
    if (out_w) *out_w = c.out_w;
    return AMP_OK;
}

/* The output's side of a transposed convolution; 0 if it has no pixel or is no int. */
AMPI_FN int ampi_transposed_side(int size, int64_t pads, int kernel, int dilation, int stride) {
    const int64_t side = (int64_t)(size - 1) * stride + (int64_t)dilation * (kernel - 1) + 1 - pads;
    return side < 1 || side > INT32_MAX ? 0 : (int)side;
}

/* The convolution of which a shape's is the transpose, from its y to its x. */
AMPI_FN amp_result ampi_transposed_shape(amp_conv2d_shape* conv, const amp_conv2d_shape* shape,
        const amp_logger* logger) {
    amp_conv2d_shape s;
    AMPI_TRY(ampi_conv2d_defaults(&s, shape, logger));
    AMPI_REFUSE_CALL(s.output_pad_h >= s.stride_h || s.output_pad_w >= s.stride_w, AMP_ERR_DESC,
        "conv_transpose2d: output_pad %dx%d must be less than the stride, %dx%d", s.output_pad_h,
        s.output_pad_w, s.stride_h, s.stride_w);
    *conv = *shape;
    conv->channels = s.out_channels;
    conv->out_channels = s.channels;
    conv->height = ampi_transposed_side(s.height, (int64_t)s.pad_h + s.pad_end_h
        - s.output_pad_h, s.kernel_h, s.dilation_h, s.stride_h);
    conv->width = ampi_transposed_side(s.width, (int64_t)s.pad_w + s.pad_end_w
        - s.output_pad_w, s.kernel_w, s.dilation_w, s.stride_w);
    conv->output_pad_h = conv->output_pad_w = 0;
    AMPI_REFUSE_CALL(!conv->height || !conv->width, AMP_ERR_SHAPE,
        "conv_transpose2d: the sides of a %dx%d input's output are not within 1..2^31-1", s.height,
        s.width);
    return AMP_OK;
}

/* The output's sides of a checked shape. */
AMP_DEF amp_result amp_conv_transpose2d_output(const amp_conv2d_shape* s, int* out_h, int* out_w,
        const amp_exec* exec) {
    amp_conv2d_shape conv;
    AMPI_TRY(ampi_transposed_shape(&conv, s, ampi_exec_logger(exec)));
    AMPI_TRY(amp_conv2d_output(&conv, NULL, NULL, exec));
    if (out_h) *out_h = conv.height;
    if (out_w) *out_w = conv.width;
    return AMP_OK;
}

/* The first group's product, and elements from one group's operands to the next one's. */
typedef struct ampi_convolution {
    ampi_product s;
    size_t groups, images;
    size_t a_group, b_group, c_group, bias_group;
} ampi_convolution;

/* Moves an operand `elements` on; an image has as many fewer behind its beginning. */
AMPI_FN void ampi_operand_advance(ampi_operand* v, size_t elements) {
    v->data = ampi_at(v->data, v->dtype, elements);
    if (v->is_image) v->image.elements -= elements;
}

/* The product of one group of a convolution. */
AMPI_FN ampi_product ampi_group_of(const ampi_convolution* v, size_t group) {
    ampi_product s = v->s;
    ampi_operand_advance(&s.a, group * v->a_group);
    ampi_operand_advance(&s.b, group * v->b_group);
    s.c.data = ampi_mutable(ampi_at(s.c.data, s.c.dtype, group * v->c_group));
    s.c.bias = ampi_at(s.c.bias, s.c.bias_dtype, group * v->bias_group);
    return s;
}

/* x or, if is_dy, dy of the first group as an operand, with these sides of its im2col matrix. */
AMPI_FN ampi_operand ampi_image_of(const ampi_conv2d_sizes* c, amp_ref t, int is_dy,
        int along_k, ampi_side h, ampi_side w) {
    const size_t channels = (size_t)(is_dy ? c->s.out_channels : c->s.channels);
    ampi_operand v = ampi_matrix(t, 0, along_k);
    ampi_im2col* g = &v.image;
    v.is_image = 1;
    g->pixels = h.count * w.count;
    g->area = h.kernel * w.kernel;
    g->channels = channels / (size_t)c->s.groups;
    g->plane = (size_t)h.size * (size_t)w.size;
    g->image = channels * g->plane;
    g->elements = (size_t)c->s.n * g->image;
    /* A plane whose pixels are read once, in order, counts as one long row. */
    if (ampi_side_is_plain(&h) && ampi_side_is_plain(&w) && g->pixels <= 0x7fffffff) {
        h = ampi_side_of(1, 1, 0, 1, 1, 1);
        w = ampi_side_of(g->pixels, 1, 0, 1, 1, (int)g->pixels);
    }
    g->h = h;
    g->w = w;
    return v;
}

/* x as the operand of y and dw: its im2col matrix has y's pixels as columns. */
AMPI_FN ampi_operand ampi_image_x(const ampi_conv2d_sizes* c, amp_ref x, int along_k) {
    const amp_conv2d_shape* s = &c->s;
    const size_t h = (size_t)c->out_h, w = (size_t)c->out_w;
    return ampi_image_of(c, x, 0, along_k,
        ampi_side_of(h, (size_t)s->kernel_h, -s->pad_h, s->dilation_h, s->stride_h, s->height),
        ampi_side_of(w, (size_t)s->kernel_w, -s->pad_w, s->dilation_w, s->stride_w, s->width));
}

/* A product of the first group whose result is `out`, added to if `add`. */
AMPI_FN void ampi_convolution_init(ampi_convolution* v, const ampi_conv2d_sizes* c,
        amp_ref out, int add, size_t m, size_t n, size_t k) {
    AMPI_CLEAR(*v);
    ampi_product_init(&v->s, m, n, k, out, 0);
    v->s.c.beta = add ? 1.0f : 0.0f;
    v->groups = (size_t)c->s.groups; v->images = (size_t)c->s.n;
}

/* Adds b, one for each of a group's rows of C, to a product. */
AMPI_FN void ampi_convolution_bias(ampi_convolution* v, amp_ref b) {
    v->s.c.bias = b.data;
    v->s.c.bias_dtype = ampi_dtype_or_f32(b.dtype);
    v->s.c.bias_per_row = 1;
    v->bias_group = v->s.m;
}

/* Forward, group by group: y[o][pixel] = sum over (c, kh, kw) of w[o][c][kh][kw] * x. A is w, B the
   im2col matrix of x. A row of C is an output's planes, each a block of columns. */
AMPI_FN void ampi_conv2d_y(ampi_convolution* v, const ampi_conv2d_sizes* c,
        const ampi_layer_refs* t) {
    const size_t k = c->cg * c->area;
    ampi_columns* y = &v->s.c.columns;
    ampi_convolution_init(v, c, t->y, t->accumulate & AMP_ACCUMULATE_INPUT, c->og,
        (size_t)c->s.n * c->out_pixels, k);
    ampi_convolution_bias(v, t->b);
    v->s.a = ampi_matrix(t->w, k, 1);
    v->s.b = ampi_image_x(c, t->x, 0);

    y->size = y->used = y->width = y->pitch = c->out_pixels;
    y->next_row = (size_t)c->out_w;  /* for ampi_set_planes */
    y->next_block = (size_t)c->s.out_channels * c->out_pixels;
    v->s.c.ld = c->out_pixels;

    v->a_group = c->og * k;
    v->b_group = c->cg * c->in_pixels;
    v->c_group = c->og * c->out_pixels;
}

/* Pixels phase, phase + stride, ... of one side of the input. Pixel i of them meets output i +
   offset at kernel position `first`, and `step` outputs on at each next one. */
typedef struct ampi_phase {
    size_t count,   /* kernel positions that these pixels meet */
           pixels;  /* how many pixels there are */
    int    first,   /* the first kernel position, and from one to the next */
           next,
           offset,  /* see above, in outputs; step is 0 or less */
           step;
} ampi_phase;

/* The least k >= 0 with k * step = target modulo n, or -1; *period: from one such k to the next.
   Euclid's algorithm keeps k * step = a and `back` * step = b modulo n. */
AMPI_FN int64_t ampi_solve_modulo(int64_t step, int64_t target, int64_t n, int64_t* period) {
    int64_t a = step % n, b = n, k = 1, back = 0;
    while (a > 0) {
        const int64_t times = b / a, rest = b % a, next = back - times * k;
        b = a; back = k;
        a = rest; k = next;
    }
    *period = n / b;
    if (target % b != 0) return -1;
    return (back % *period + *period) % *period * (target / b % *period) % *period;
}

/* Output o and kernel position j meet at padded pixel o * stride + j * dilation. */
AMPI_FN ampi_phase ampi_phase_of(int phase, int size, int pad, int kernel, int dilation,
        int stride) {
    const int64_t pixel = (int64_t)phase + pad;
    int64_t period, first = ampi_solve_modulo(dilation, pixel, stride, &period);
    ampi_phase p;
    AMPI_CLEAR(p);
    p.pixels = phase < size ? (size_t)((size - phase - 1) / stride + 1) : 0;
    p.next = 1;
    if (first >= 0 && first < kernel) {
        p.count = (size_t)((kernel - 1 - first) / period) + 1;
        p.first = (int)first;
        p.offset = (int)((pixel - first * dilation) / stride);
    }
    if (p.count > 1) p.next = (int)period;
    p.step = -(int)((int64_t)p.next * dilation / stride);
    return p;
}

/* dx of the phase that begins at pixel (h, w): dx[c][pixel] = sum over (o, kh, kw) of
   w[o][c][kh][kw] * dy, kh and kw those that the phase meets, + b[c] of a transposed convolution. A
   is w as [c][o, kh, kw], B the im2col matrix of dy. */
AMPI_FN void ampi_conv2d_dx(ampi_convolution* v, const ampi_conv2d_sizes* c,
        const ampi_layer_refs* t, int h, int w) {
    const amp_conv2d_shape* s = &c->s;
    const ampi_phase ph = ampi_phase_of(h, s->height, s->pad_h, s->kernel_h, s->dilation_h,
        s->stride_h);
    const ampi_phase pw = ampi_phase_of(w, s->width, s->pad_w, s->kernel_w, s->dilation_w,
        s->stride_w);
    const size_t area = ph.count * pw.count, pixels = ph.pixels * pw.pixels;
    const size_t kernel_w = (size_t)s->kernel_w, width = (size_t)s->width;
    ampi_columns* dx = &v->s.c.columns;
    ampi_operand* a = &v->s.a;
    ampi_convolution_init(v, c, t->dx, t->accumulate & AMP_ACCUMULATE_INPUT, c->cg,
        (size_t)s->n * pixels, c->og * area);
    ampi_convolution_bias(v, t->b);

    /* weights, from the first kernel position that the phase meets */
    *a = ampi_matrix(ampi_from(t->w, (size_t)ph.first * kernel_w + (size_t)pw.first), c->area, 1);
    a->area = area;
    a->kernel_w = pw.count;
    a->next_h = (size_t)ph.next * kernel_w;
    a->next_w = (size_t)pw.next;
    a->output = c->cg * c->area;
    v->s.b = ampi_image_of(c, t->y, 1, 0, ampi_side_of(ph.pixels, ph.count, ph.offset, ph.step, 1,
        c->out_h), ampi_side_of(pw.pixels, pw.count, pw.offset, pw.step, 1, c->out_w));
    v->s.b.is_image = area > 0;  /* no kernel position: B is not read */

    /* every stride-th pixel of dx; where both strides are 1 rows are neighbours, and join */
    v->s.c.data = ampi_from(t->dx, (size_t)h * width + (size_t)w).data;
    v->s.c.ld = c->in_pixels;
    dx->next = (size_t)s->stride_w;
    dx->size = dx->used = pixels;
    dx->width = dx->pitch = s->stride_h == 1 && s->stride_w == 1 ? pixels : pw.pixels;
    dx->next_row = (size_t)s->stride_h * width;
    dx->next_block = (size_t)s->channels * c->in_pixels;

    v->a_group = c->og * c->cg * c->area;
    v->b_group = c->og * c->out_pixels;
    v->c_group = c->cg * c->in_pixels;
}

/* dw[o][c][kh][kw] = sum over (n, oh, ow) of dy * x. A is dy, B the im2col matrix of x. */
AMPI_FN void ampi_conv2d_dw(ampi_convolution* v, const ampi_conv2d_sizes* c,
        const ampi_layer_refs* t) {
    const size_t weights = c->cg * c->area;
    ampi_convolution_init(v, c, t->dw, t->accumulate & AMP_ACCUMULATE_PARAMS, c->og, weights,
        (size_t)c->s.n * c->out_pixels);
    v->s.a = ampi_image_of(c, t->y, 1, 1, ampi_side_of((size_t)c->out_h, 1, 0, 1, 1, c->out_h),
        ampi_side_of((size_t)c->out_w, 1, 0, 1, 1, c->out_w));
    v->s.b = ampi_image_x(c, t->x, 1);
    v->s.c.ld = weights;
    v->a_group = c->og * c->out_pixels;
    v->b_group = c->cg * c->in_pixels;
    v->c_group = c->og * weights;
}

/* Floats of all groups' weights as FP32 rows, with 16 rows behind that the matrix unit may read; 0
   if A is an image, or such rows already. */
AMPI_FN size_t ampi_widened_floats(const ampi_convolution* v) {
    const ampi_operand* a = &v->s.a;
    if (a->is_image || (a->dtype == AMP_F32 && a->area == 0)) return 0;
    return ampi_round_up((v->groups * v->s.m + AMPI_LANES) * v->s.k, AMPI_LANES);
}

/* Makes these rows the new A, as pairs where the product's form wants them. */
AMPI_FN void ampi_widen_weights(ampi_convolution* v, float* room) {
    const ampi_operand all = v->s.a;
    const size_t rows = v->s.m * v->s.k;
    if (ampi_widened_floats(v) == 0) return;
    for (size_t group = 0; group < v->groups; group++) {
        ampi_operand w = all;
        ampi_operand_advance(&w, group * v->a_group);
        ampi_kernels_now()->rows(room + group * rows, v->s.k, &w, 0, v->s.m, 0, v->s.k, NULL);
    }
    ampi_kernels_end();
    v->s.exact = ampi_product_is_exact(&v->s);
    v->s.a = ampi_matrix(amp_f32(room), v->s.k, 1);
    v->a_group = rows;
    if (v->s.form == AMPI_FP32) return;
    v->s.a.paired = 1;
    ampi_kernels_now()->pair_along_k(room, v->s.k, v->groups * v->s.m, v->s.k);
}

/* Channels of one product for a weight gradient: about equal parts that fit a macro-tile, or
   one. */
AMPI_FN size_t ampi_window_channels(const ampi_im2col* g) {
    const size_t limit = ampi_kernels_now()->nc / g->area, unit = limit < AMPI_LANES ? 1
        : AMPI_LANES;
    const size_t parts = ampi_div_up(g->channels, ampi_max_size(limit / unit * unit, 1));
    return ampi_min_size(g->channels, ampi_round_up(ampi_div_up(g->channels, parts), unit));
}

/* The weight gradient of `channels` channels from `first` on, in the order of windows, read in
   place or packed: C's images are kernel columns, their rows kernel rows. */
AMPI_FN void ampi_set_windows(ampi_convolution* v, size_t first, size_t channels) {
    ampi_im2col* g = &v->s.b.image;
    ampi_columns* c = &v->s.c.columns;
    ampi_operand_advance(&v->s.b, first * g->plane);
    v->s.c.data = ampi_mutable(ampi_at(v->s.c.data, v->s.c.dtype, first * g->area));
    c->next = g->area;
    c->next_row = g->w.kernel;
    c->next_block = 1;
    c->width = c->pitch = g->channels = channels;
    c->size = c->used = channels * g->h.kernel;
    v->s.n = channels * g->area;
    g->in_place = g->area > 1 && (g->w.next == 1 || g->w.kernel == 1);
}

/* Columns of y, or of a phase of dx, become places of padded planes, which the micro-kernel reads
   in place. Sums of places that are no pixel are not stored; where these cost more than packing (16
   rows of A), columns stay pixels. */
AMPI_FN void ampi_set_planes(ampi_convolution* v) {
    ampi_im2col* g = &v->s.b.image;
    ampi_columns* c = &v->s.c.columns;
    const uint64_t size = (uint64_t)g->h.padded * g->w.padded;
    if (v->s.k == 0 || (double)(size - g->pixels) * (double)v->s.m > 16.0 * (double)g->pixels)
        return;
    g->in_place = 1;
    if (size == g->pixels) return;
    c->width = g->w.count;
    c->pitch = g->w.padded;
    c->used = (g->h.count - 1) * g->w.padded + g->w.count;
    g->h.count = g->h.padded; g->w.count = g->w.padded;
    g->pixels = c->size = (size_t)size;
    v->s.n = v->images * c->size;
}

/* Depthwise convolution: each channel is a group with one output. A task is 16 channels of one
   image, or of all images if A is an image (weight gradient). */
typedef struct ampi_depthwise {
    size_t blocks,  /* groups of 16 channels */
           tasks,
           shares,  /* threads that take them; 0 for another convolution */
           floats;  /* scratch memory of a share */
} ampi_depthwise;

/* How a depthwise convolution is shared out; no shares for another convolution. */
AMPI_FN ampi_depthwise ampi_depthwise_of(const ampi_convolution* v) {
    ampi_depthwise d = { 0, 0, 0, 0 };
    if (!v->s.b.is_image || v->s.b.image.channels != 1 || v->s.m != 1 || v->groups == 1
        || v->s.k == 0) return d;
    d.blocks = ampi_div_up(v->groups, AMPI_LANES);
    d.tasks = d.blocks * (v->s.a.is_image ? 1 : v->images);
    d.shares = ampi_min_size(ampi_gemm_threads(1, v->s.n * v->groups, v->s.k), d.tasks);
    d.floats = ampi_channels_of(&v->s.b.image).floats;
    return d;
}

/* Runs all tasks; returns 0 for another convolution, or if the workspace is too small. */
AMPI_FN int ampi_depthwise_run(const ampi_convolution* v, const amp_exec* exec) {
    const ampi_kernels* g = ampi_kernels_now();
    const ampi_depthwise d = ampi_depthwise_of(v);
    const size_t weights = ampi_widened_floats(v), images = v->s.a.is_image ? v->images : 1;
    ampi_convolution own = *v;
    float* memory;
    if (d.shares == 0 || ampi_room(exec) < weights + d.shares * d.floats) return 0;

    /* Workspace: weights as FP32 rows, then the scratch memory of shares. All channels are one
       image of the product. */
    memory = ampi_align64(exec->workspace);
    ampi_widen_weights(&own, memory);
    own.s.b.image.channels = v->groups;
    AMPI_PARALLEL_FOR(d.shares > 1, for (int64_t i = 0; i < (int64_t)d.shares; i++) {
        const size_t end = ampi_share(d.tasks, d.shares, (size_t)i + 1);
        size_t task = ampi_share(d.tasks, d.shares, (size_t)i);
        for (; task < end; task++)
            g->depthwise(&own.s, task % d.blocks * AMPI_LANES, task / d.blocks, images,
                memory + weights + (size_t)i * d.floats);
        ampi_kernels_end();
    });
    return 1;
}

/* Floats of workspace: FP32 weights, and the most that depthwise, packing or reading in place
   takes, by all shares. */
AMPI_FN size_t ampi_convolution_floats(const ampi_convolution* v) {
    const ampi_depthwise d = ampi_depthwise_of(v);
    ampi_convolution in_place = *v;
    size_t floats = ampi_max_size(ampi_gemm_floats(&v->s), d.shares * d.floats);
    if (v->s.b.along_k) ampi_set_windows(&in_place, 0, ampi_window_channels(&v->s.b.image));
    else ampi_set_planes(&in_place);
    floats = ampi_max_size(floats, ampi_gemm_floats(&in_place.s));
    in_place.s.form = AMPI_PAIRS_OF_BF16;
    floats = ampi_max_size(floats, ampi_gemm_floats(&in_place.s));
    return ampi_widened_floats(v) + floats;
}

/* y, dw by parts of channels, or one phase of dx. */
AMPI_FN void ampi_convolution_run(ampi_convolution* v, const amp_exec* exec) {
    ampi_product_round(&v->s, exec);
    const int is_dw = v->s.b.along_k;
    const size_t all = v->s.b.image.channels, weights = ampi_widened_floats(v);
    const size_t channels = is_dw ? ampi_window_channels(&v->s.b.image) : all;
    ampi_convolution own = *v;
    amp_exec rest;
    AMPI_GROW_WORKSPACE(ampi_floats_workspace(ampi_convolution_floats(v)))
    if (ampi_depthwise_run(v, exec)) return;

    /* Weights of dx, and those that become pairs, are laid out at the beginning of the workspace,
       if it has room: products would do so again and again. The rest is theirs. */
    AMPI_CLEAR(rest);
    if (exec) rest = *exec;
    rest.operands = AMP_DTYPE_DEFAULT;
    if (!is_dw) own.s.form = ampi_gemm_form(ampi_kernels_now(), &v->s, exec);
    if (weights > 0 && (v->s.a.area > 0 || own.s.form != AMPI_FP32)
        && ampi_room(exec) >= weights + AMPI_STACK_FLOATS) {
        float* memory = ampi_align64(exec->workspace);
        ampi_widen_weights(&own, memory);
        rest.workspace = memory + weights;
        rest.workspace_size = (ampi_room(exec) - weights) * sizeof(float) + 64; /* see ampi_room */
    }

    if (!is_dw && own.s.form == AMPI_FP32) ampi_set_planes(&own);
    for (size_t first = 0; first < all; first += channels)
        for (size_t group = 0; group < v->groups; group++) {
            ampi_convolution part = own;
            ampi_product s;
            if (is_dw) ampi_set_windows(&part, first, ampi_min_size(all - first, channels));
            s = ampi_group_of(&part, group);
            ampi_gemm_run(&s, &rest);
        }
}

/* dx, phase by phase. Round 0 only looks for phases that meet no kernel position; if there are, dx
   begins as zeros, to which only a bias is added. */
AMPI_FN void ampi_conv2d_dx_run(const ampi_conv2d_sizes* c, const ampi_layer_refs* t,
        const amp_exec* exec) {
    int zero, run;
    for (zero = 0, run = 0; run < 2; run++) {
        for (int h = 0; h < c->s.stride_h && h < c->s.height; h++)
            for (int w = 0; w < c->s.stride_w && w < c->s.width; w++) {
                ampi_convolution v;
                ampi_conv2d_dx(&v, c, t, h, w);
                if (v.s.k == 0) zero = 1;
                if (run && (v.s.k > 0 || t->b.data)) ampi_convolution_run(&v, exec);
            }
        if (zero && !run && !(t->accumulate & AMP_ACCUMULATE_INPUT))
            memset(t->dx.data, 0, c->x_count * ampi_type_size(t->dx.dtype));
    }
}

/* db[o] = sum of dy over images and pixels: pixel p of a plane is added to sum p % 16, image after
   image; then a tree adds the 16 sums, first 0+8, 1+9, ... */
AMPI_FN void ampi_conv2d_db(const ampi_conv2d_sizes* c, const ampi_layer_refs* t, size_t o) {
    const amp_dtype type = ampi_dtype_or_f32(t->y.dtype);
    float sums[16];
    size_t whole;
    memset(sums, 0, sizeof sums);
    for (size_t n = 0; n < (size_t)c->s.n; n++)
        for (size_t i = 0; i < c->out_pixels; i += whole) {
            const size_t at = (n * (size_t)c->s.out_channels + o) * c->out_pixels + i;
            whole = ampi_max_size((c->out_pixels - i) / 16 * 16, 16);
            ampi_kernels_now()->column_sums(sums, ampi_at(t->y.data, type, at), type, 16,
                whole / 16, ampi_min_size(c->out_pixels - i, 16));
        }
    ampi_kernels_end();
    for (size_t n = 8; n > 0; n /= 2)
        for (size_t i = 0; i < n; i++) sums[i] += sums[i + n];
    ampi_store_sum(t->db.data, t->db.dtype, o, sums, 1,
        t->accumulate & AMP_ACCUMULATE_PARAMS);
}

/* Phases of a side that are looked at; one that needs more gets smaller blocks. */
enum { AMPI_PHASES = 32 };

/* Bytes for the largest of y, each phase of dx, and dw; 0 if the shape is not valid. */
AMP_DEF size_t amp_conv2d_workspace(const amp_conv2d_shape* s) {
    ampi_layer_refs none;
    ampi_convolution v;
    ampi_conv2d_sizes c;
    size_t floats;
    if (ampi_conv2d_init(&c, s, NULL) != AMP_OK) return 0;
    AMPI_CLEAR(none);
    none.w.dtype = AMP_F16;  /* takes most */
    ampi_conv2d_y(&v, &c, &none);
    floats = ampi_convolution_floats(&v);
    for (int h = 0; h < ampi_min_int(c.s.height, ampi_min_int(c.s.stride_h, AMPI_PHASES)); h++)
        for (int w = 0; w < ampi_min_int(c.s.width, ampi_min_int(c.s.stride_w, AMPI_PHASES)); w++) {
            ampi_conv2d_dx(&v, &c, &none, h, w);
            if (v.s.k > 0) floats = ampi_max_size(floats, ampi_convolution_floats(&v));
        }
    ampi_conv2d_dw(&v, &c, &none);
    return ampi_floats_workspace(ampi_max_size(floats, ampi_convolution_floats(&v)));
}

/* Refuses a shape or operands of a convolution that are not valid. */
AMPI_FN amp_result ampi_check_conv2d(ampi_conv2d_sizes* c, const amp_conv2d_shape* shape,
        const amp_logger* logger, const ampi_layer_refs* t, int backward) {
    AMPI_TRY(ampi_conv2d_init(c, shape, logger));
    const ampi_layer_sizes z = { { 1, c->x_count }, { 1, c->w_count },
                                 { 1, (size_t)c->s.out_channels }, { 1, c->y_count } };
    return ampi_check_layer(logger, backward ? "conv2d backward" : "conv2d", t, &z, backward);
}

/* Checks the operands, then computes y. */
AMP_DEF amp_result amp_conv2d_forward(const amp_conv2d_shape* shape, amp_ref x, amp_ref w,
        amp_ref b, amp_ref y, const amp_exec* exec) {
    const ampi_layer_refs t = { x, w, b, y, AMP_NONE, AMP_NONE, AMP_NONE, 0 };
    ampi_convolution v;
    ampi_conv2d_sizes c;
    AMPI_TRY(ampi_check_conv2d(&c, shape, ampi_exec_logger(exec), &t, 0));
    AMPI_TRY(ampi_check_exec(exec, "conv2d"));
    AMPI_COMPUTE_OP;
    ampi_conv2d_y(&v, &c, &t);
    ampi_convolution_run(&v, exec);
    AMPI_DONE_OP;
}

/* Checks the operands, then computes those of dx, dw and db that are wanted. */
AMP_DEF amp_result amp_conv2d_backward(const amp_conv2d_shape* shape, amp_ref dy, amp_ref x,
        amp_ref w, amp_ref dx, amp_ref dw, amp_ref db, int accumulate, const amp_exec* exec) {
    const ampi_layer_refs t = { x, w, AMP_NONE, dy, dx, dw, db, accumulate };
    ampi_convolution v;
    ampi_conv2d_sizes c;
    AMPI_TRY(ampi_check_conv2d(&c, shape, ampi_exec_logger(exec), &t, 1));
    AMPI_TRY(ampi_check_exec(exec, "conv2d backward"));
    AMPI_COMPUTE_OP;
    if (dx.data) ampi_conv2d_dx_run(&c, &t, exec);
    if (dw.data) {
        ampi_conv2d_dw(&v, &c, &t);
        ampi_convolution_run(&v, exec);
    }
    if (db.data) AMPI_PARALLEL_OVER(c.y_count,
        for (int64_t o = 0; o < c.s.out_channels; o++) ampi_conv2d_db(&c, &t, (size_t)o));
    AMPI_DONE_OP;
}

/* --- transposed convolution --- */

AMP_DEF size_t amp_conv_transpose2d_workspace(const amp_conv2d_shape* s) {
    amp_conv2d_shape conv;
    return ampi_transposed_shape(&conv, s, NULL) == AMP_OK ? amp_conv2d_workspace(&conv) : 0;
}

/* Refuses a shape or operands of a transposed convolution that are not valid; c: the convolution,
   whose x is y here. */
AMPI_FN amp_result ampi_check_transposed(ampi_conv2d_sizes* c, const amp_conv2d_shape* shape,
        const amp_logger* logger, const ampi_layer_refs* t, int backward) {
    amp_conv2d_shape conv;
    AMPI_TRY(ampi_transposed_shape(&conv, shape, logger));
    AMPI_TRY(ampi_conv2d_init(c, &conv, logger));
    const ampi_layer_sizes z = { { 1, c->y_count }, { 1, c->w_count },
                                 { 1, (size_t)c->s.channels }, { 1, c->x_count } };
    return ampi_check_layer(logger, backward ? "conv_transpose2d backward" : "conv_transpose2d", t,
        &z, backward);
}

/* Checks the operands, then computes y, the dx of the convolution. */
AMP_DEF amp_result amp_conv_transpose2d_forward(const amp_conv2d_shape* shape, amp_ref x,
        amp_ref w, amp_ref b, amp_ref y, const amp_exec* exec) {
    const ampi_layer_refs t = { x, w, b, y, AMP_NONE, AMP_NONE, AMP_NONE, 0 };
    const ampi_layer_refs conv = { AMP_NONE, w, b, x, y, AMP_NONE, AMP_NONE, 0 };
    ampi_conv2d_sizes c;
    AMPI_TRY(ampi_check_transposed(&c, shape, ampi_exec_logger(exec), &t, 0));
    AMPI_TRY(ampi_check_exec(exec, "conv_transpose2d"));
    AMPI_COMPUTE_OP;
    ampi_conv2d_dx_run(&c, &conv, exec);
    AMPI_DONE_OP;
}

/* Checks the operands, then computes those of dx, dw and db that are wanted: the y, the dw and, of
   planes of its x, the db of the convolution. */
AMP_DEF amp_result amp_conv_transpose2d_backward(const amp_conv2d_shape* shape, amp_ref dy,
        amp_ref x, amp_ref w, amp_ref dx, amp_ref dw, amp_ref db, int accumulate,
        const amp_exec* exec) {
    const ampi_layer_refs t = { x, w, AMP_NONE, dy, dx, dw, db, accumulate };
    ampi_layer_refs conv = { dy, w, AMP_NONE, dx, AMP_NONE, dw, db, accumulate };
    ampi_convolution v;
    ampi_conv2d_sizes c;
    AMPI_TRY(ampi_check_transposed(&c, shape, ampi_exec_logger(exec), &t, 1));
    AMPI_TRY(ampi_check_exec(exec, "conv_transpose2d backward"));
    AMPI_COMPUTE_OP;
    if (dx.data) {
        ampi_conv2d_y(&v, &c, &conv);
        ampi_convolution_run(&v, exec);
    }
    if (dw.data) {
        conv.y = x;
        ampi_conv2d_dw(&v, &c, &conv);
        ampi_convolution_run(&v, exec);
    }
    if (db.data) {
        c.s.out_channels = c.s.channels;
        c.out_pixels = c.in_pixels;
        AMPI_PARALLEL_OVER(c.x_count,
            for (int64_t o = 0; o < c.s.channels; o++) ampi_conv2d_db(&c, &t, (size_t)o));
    }
    AMPI_DONE_OP;
}

AMPI_COMPILE_WELL

/* >>impl-math  exp, log, tanh and the like, the same bits everywhere. */

/* Polynomials over ampi_fma for AMPI_KERNEL bodies, without branches: cases are chosen on bits.
   Coefficients are minimax fits (Remez, relative error), rounded one by one, the rest fitted anew.
   Errors: the largest over every third float against libm's doubles, in units of the last place. */

/* mask: all ones if the condition is 1, else all zeros. select: a where the mask is ones, b
   elsewhere. */
AMPI_HD AMPI_INLINE uint32_t ampi_mask(int condition) { return 0u - (uint32_t)condition; }
AMPI_HD AMPI_INLINE uint32_t ampi_select_bits(uint32_t mask, uint32_t a, uint32_t b) {
    return b ^ ((a ^ b) & mask);
}

AMPI_HD AMPI_INLINE float ampi_select(uint32_t mask, float a, float b) {
    return ampi_float(ampi_select_bits(mask, ampi_bits(a), ampi_bits(b)));
}

AMPI_HD AMPI_INLINE uint32_t ampi_nan_mask(float x) {
    return ampi_mask(ampi_magnitude(x) > 0x7f800000u);
}

AMPI_HD AMPI_INLINE float ampi_abs(float x) { return ampi_float(ampi_magnitude(x)); }
AMPI_HD AMPI_INLINE float ampi_copysign(float x, float sign) {
    return ampi_float(ampi_magnitude(x) | (ampi_bits(sign) & 0x80000000u));
}

/* The smaller of |x| and upper; of a NaN upper. */
AMPI_HD AMPI_INLINE float ampi_least_magnitude(float x, float upper) {
    const uint32_t a = ampi_magnitude(x), b = ampi_bits(upper);
    return ampi_float(a < b ? a : b);
}

/* x, of magnitude `upper` at most; a NaN stays. */
AMPI_HD AMPI_INLINE float ampi_clamp(float x, float upper) {
    /* wraps for less; NaNs lie behind infinity */
    const uint32_t above = ampi_magnitude(x) - (ampi_bits(upper) + 1u);
    return ampi_select(ampi_mask(above < 0x7f800000u - ampi_bits(upper)), ampi_copysign(upper, x),
        x);
}

/* Reduces x = n*ln2 + r with |r| <= ln2/2: returns r, and *scale = 2^n if -127 < n < 128. Adding
   1.5 * 2^23 (bits 0x4b400000) leaves n in the sum's low bits. ln2 has two parts; x - n*first is
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

/* exp(x) where that is a normal number. */
AMPI_HD AMPI_INLINE float ampi_exp_inside(int hw, float x) {
    float scale, y = 1.0f + ampi_expm1(hw, ampi_exp_reduce(hw, x, &scale));
    return y * scale;
}

/* exp(x) for x <= 88. Subnormal results, slow on some processors, are 0. The product by a power of
   two is exact, so a compiler may make one fma of 1 + exp(x). Error: 1.02. */
AMPI_HD AMPI_INLINE float ampi_exp(int hw, float x) {
    const uint32_t least = 0xc2aeac4fu;  /* the bits of -87.3365402; below it, down to -inf */
    const uint32_t below = ampi_bits(x) - (least + 1u);
    return ampi_float(ampi_bits(ampi_exp_inside(hw, x)) & ~ampi_mask(below < 0xff800000u - least));
}

/* tanh(x): x + x^3 P(x^2) up to 5/8, then 1 - 2 / (exp(2|x|) + 1), 1 from 20 on. Error: 1.34. */
AMPI_HD AMPI_INLINE float ampi_act_tanh(int hw, float x) {
    const float a = ampi_least_magnitude(x, 20.0f),
        large = 1.0f - 2.0f / (1.0f + ampi_exp_inside(hw, a + a));
    /* up to infinity; a NaN takes the polynomial */
    const uint32_t from = ampi_magnitude(x) - 0x3f200000u;
    float z = x * x, p = ampi_fma(hw, -0.00569229666f, z, 0.0206281673f);
    p = ampi_fma(hw, p, z, -0.0537365153f);
    p = ampi_fma(hw, p, z, 0.133314058f);
    p = ampi_fma(hw, p, z, -0.333332807f);
    p = ampi_fma(hw, p * z, x, x);
    return ampi_copysign(ampi_select(ampi_mask(from <= 0x7f800000u - 0x3f200000u), large, p), x);
}

/* 1 / (1 + exp(-x)), without overflow and accurate in both tails: 1/(1+e) or e/(1+e), e =
   exp(-|x|). Error: 2.41. */
AMPI_HD AMPI_INLINE float ampi_act_sigmoid(int hw, float x) {
    float e = ampi_exp(hw, -ampi_abs(x));
    return ampi_select(ampi_mask((int)(ampi_bits(x) >> 31)), e, 1.0f) / (1.0f + e);
}

/* log(1 + f) for f in [sqrt(1/2)-1, 1]: 2 atanh(s) = 2s + s^3 P(s^2) with s = f / (2 + f). As 2s =
   f - s*f, f enters exactly and only a correction is rounded. Error: 1.08. */
AMPI_HD AMPI_INLINE float ampi_log1p(int hw, float f) {
    float s = f / (2.0f + f), z = s * s, p;
    p = ampi_fma(hw, 0.280067801f, z, 0.280030251f);
    p = ampi_fma(hw, p, z, 0.400214374f);
    p = ampi_fma(hw, p, z, 0.666664183f);
    return ampi_fma(hw, -s, ampi_fma(hw, -z, p, f), f);
}

/* log(x), x = m * 2^e with m in [sqrt(1/2), sqrt(2)). A subnormal is multiplied by 2^25 first.
   special: of 0, inf, less than 0 and NaN. Error: 0.98. */
AMPI_HD AMPI_INLINE float ampi_log(int hw, float x) {
    uint32_t u = ampi_bits(x), tiny = ampi_mask(u < 0x00800000u), special;
    uint32_t v = ampi_select_bits(tiny, ampi_bits(x * 33554432.0f), u);
    int32_t e = (int32_t)((v + 0x00cafb0du) >> 23) - 128;  /* 0x00cafb0d = 2^30 - bits(sqrt(1/2)) */
    float k = (float)(e - (int32_t)(tiny & 25u));
    float y = ampi_log1p(hw, ampi_float(v - ((uint32_t)e << 23)) - 1.0f);
    y = ampi_fma(hw, k, 0.693147182f, ampi_fma(hw, k, -1.90465432e-9f, y));
    special = ampi_select_bits(ampi_mask((u << 1) == 0), 0xff800000u, 0x7fc00000u);
    special = ampi_select_bits(ampi_mask(u == 0x7f800000u), u, special);
    return ampi_float(ampi_select_bits(ampi_mask(u - 1u >= 0x7f7fffffu), special, ampi_bits(y)));
}

/* The normal distribution: returns Phi(x) = (1 + erf(x / sqrt(2))) / 2, and *density = exp(-x^2/2).
   The tail Phi(-a), a >= 0, is exp(-a^2/2) * P(w), w = t - 7/64, t = 1/(a + 109/32) (after Shepherd
   and Laframboise 1981 for erfc). With this shift eight powers are enough, w is exact, and little
   cancels. a^2 has two parts, and t is corrected for its rounding. Beyond 12.9 the tail, no normal
   float there, is 0. Errors: 3.6, density 1.2. */
AMPI_HD AMPI_INLINE float ampi_normal_cdf(int hw, float x, float* density) {
    float a = ampi_least_magnitude(x, 12.9f), t = 1.0f / (a + 3.40625f);
    float w = ampi_fma(hw, t, ampi_fma(hw, -t, a, ampi_fma(hw, -3.40625f, t, 1.0f)), t - 0.109375f);
    float square = a * a, rest = ampi_fma(hw, a, a, -square), scale, q, p;
    uint32_t inside = ampi_mask(ampi_bits(a) < 0x414e6666u);  /* a < 12.9 */
    q = ampi_expm1(hw, ampi_fma(hw, -0.5f, rest, ampi_exp_reduce(hw, -0.5f * square, &scale)));
    *density = ampi_float(ampi_bits((1.0f + q) * scale) & inside);
    p = ampi_fma(hw, 722.593262f, w, -369.943909f);
    p = ampi_fma(hw, p, w, -79.3061066f);
    p = ampi_fma(hw, p, w, 33.3689537f);
    p = ampi_fma(hw, p, w, 31.9140224f);
    p = ampi_fma(hw, p, w, 13.5778379f);
    p = ampi_fma(hw, p, w, 4.02952099f);
    p = ampi_fma(hw, p, w, 0.932649493f);
    p = ampi_fma(hw, p, w, 0.0675983354f);
    p = ampi_float(ampi_bits(ampi_fma(hw, p, q, p) * scale) & inside);
    return ampi_select(ampi_mask((int)(ampi_bits(x) >> 31)), p, 1.0f - p);
}

/* cos and sin of 2 pi (r + quarter / 4), |r| <= 1/8. Errors: 1.57, 1.57. */
AMPI_HD AMPI_INLINE void ampi_turn(int hw, float r, int quarter, float* cosine, float* sine) {
    const float z = r * r;
    float c, s;
    c = ampi_fma(hw, 58.6210594f, z, -85.4245224f);
    c = ampi_fma(hw, c, z, 64.9391479f);
    c = ampi_fma(hw, c, z, -19.7392082f);
    c = ampi_fma(hw, c, z, 1.0f);
    s = ampi_fma(hw, -76.7749557f, z, 81.6256256f);
    s = ampi_fma(hw, s, z, -41.3418655f);
    s = ampi_fma(hw, s, z, 6.28318548f) * r;
    *cosine = quarter & 1 ? s : c;
    *sine = quarter & 1 ? c : s;
    if ((quarter + 1) & 2) *cosine = -*cosine;
    if (quarter & 2) *sine = -*sine;
}

/* cos(2 pi u) for u in [0,1]: the nearest quarter turn is taken off exactly; the rest, an eighth at
   most, goes to a polynomial of cosine or sine. */
AMPI_HD AMPI_INLINE float ampi_cos_turns(int hw, float u) {
    const int32_t q = (int32_t)ampi_fma(hw, 4.0f, u, 0.5f);
    float c, s;
    ampi_turn(hw, ampi_fma(hw, (float)q, -0.25f, u), q, &c, &s);
    return c;
}

/* Box-Muller: sqrt(-2 log(u1)) * cos(2 pi u2), u1 in (0,1], so the largest deviate is sqrt(48 ln2)
   = 5.77. */
AMP_DEF float amp_random_normal(uint64_t seed, uint64_t index) {
    float u1 = 1.0f - amp_random_uniform(seed, 2 * index),
        u2 = amp_random_uniform(seed, 2 * index + 1);
    return sqrtf(-2.0f * ampi_log(AMPI_FMA_NATIVE, u1)) * ampi_cos_turns(AMPI_FMA_NATIVE, u2);
}

/* A product in double that no compiler fuses with a following sum. */
AMPI_HD AMPI_FN double ampi_mul64(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a, b);
#else
    volatile double product = a * b;
    return product;
#endif
}

/* x to the power n >= 0, by squares, each product rounded to double. */
AMPI_HD AMPI_FN double ampi_pow_int(double x, int64_t n) {
    double result = 1.0;
    for (; n > 0; n >>= 1) {
        if (n & 1) result = ampi_mul64(result, x);
        x = ampi_mul64(x, x);
    }
    return result;
}

/* >>impl-tiles  What the operators below share: their operands, tiles and sums.
   Operators work in tiles. Each widens a tile to floats on the stack, or takes FP32 operands in
   place, runs a kernel over it, and narrows it back. Kernels take AMPI_LANES elements at a time;
   zeros fill tiles up. Sums have AMPI_LANES double accumulators, which one fixed tree adds up;
   element i of a row goes to accumulator i % AMPI_LANES. */

/* Refuses NULL if there are elements, types not computed on, sizes beyond any memory, and results
   over operands. */
AMPI_FN amp_result ampi_check_operands(const amp_exec* exec, const char* op, size_t n,
        const ampi_argument* list, size_t count) {
    AMPI_REFUSE_OP(n > SIZE_MAX / 16, AMP_ERR_ARGUMENT,
        "%s: an operand has more elements than memory can hold, or a negative size", op);
    for (size_t i = 0; i < count; i++)
        if (list[i].data || (n > 0 && !(list[i].use & AMPI_NULL)))
            AMPI_TRY(ampi_check_matrix(ampi_exec_logger(exec), op, &list[i]));
    return n > 0 ? ampi_check_apart(ampi_exec_logger(exec), op, list, count) : AMP_OK;
}

/* An operand of a call as a row of its list: a reference, or floats; its use and size. */
#define AMPI_ARG(v, use, n) { #v, (v).data, (v).dtype, use, AMPI_FLAT(n) }
#define AMPI_ARG_F32(v, use, n) { #v, v, AMP_F32, use, AMPI_FLAT(n) }
#define AMPI_CHECK(op, n, list) AMPI_TRY(ampi_check_operands(exec, op, n, list, AMPI_LENGTH(list)))

/* How far ahead, in bytes, loops over rows of n floats prefetch: 0 for short rows, which processors
   prefetch themselves. */
AMPI_INLINE size_t ampi_ahead(size_t n) {
    return n > AMPI_AHEAD_BYTES / sizeof(float) ? AMPI_AHEAD_BYTES : 0;
}

/* to[i] = value, an expression of i and its lane ampi_l, for i from 0 to n in whole groups of
   lanes; `to` may be in it. gcc is told that no lane reads what another writes. Others vectorise
   the detour through an array. */
#if AMPI_GNU && !defined(__clang__)
  #define AMPI_LOOP(to, n, value) \
    do { \
        const size_t ampi_bytes = ampi_ahead(n); \
        size_t ampi_i, ampi_l; \
        for (ampi_i = 0; ampi_i < (n); ampi_i += AMPI_LANES) { \
            AMPI_FETCH((to) + ampi_i, ampi_bytes); \
            _Pragma("GCC ivdep") for (ampi_l = 0; ampi_l < AMPI_LANES; ampi_l++) { \
                const size_t i = ampi_i + ampi_l; \
                (to)[i] = value; \
            } \
        } \
    } while (0)
  /* before a loop over AMPI_LANES sums in double */
  #define AMPI_IN_REGISTERS _Pragma("GCC unroll 4")
#else
  #define AMPI_LOOP(to, n, value) \
    do { \
        size_t ampi_i, ampi_l; \
        for (ampi_i = 0; ampi_i < (n); ampi_i += AMPI_LANES) { \
            float ampi_v[AMPI_LANES]; \
            for (ampi_l = 0; ampi_l < AMPI_LANES; ampi_l++) { \
                const size_t i = ampi_i + ampi_l; \
                ampi_v[ampi_l] = value; \
            } \
            memcpy((to) + ampi_i, ampi_v, sizeof ampi_v); \
        } \
    } while (0)
  #define AMPI_IN_REGISTERS
#endif
/* Masks of a group's lanes, of which n are in its row: all ones, then all zeros. */
AMPI_INLINE const uint32_t* ampi_lanes_in(size_t n) {
    static const uint32_t masks[2 * AMPI_LANES] = {
        ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u };
    return masks + AMPI_LANES - ampi_min_size(n, AMPI_LANES);
}

/* n times the same value, in whole groups of lanes, which each compiler writes as vectors. */
AMPI_FN void ampi_fill(float* x, size_t n, float value) {
    for (size_t i = 0; i < n; i += AMPI_LANES)
        for (size_t l = 0; l < AMPI_LANES; l++) x[i + l] = value;
}

/* x, or 0 where the mask has no ones. */
AMPI_INLINE float ampi_and(float x, uint32_t mask) { return ampi_float(ampi_bits(x) & mask); }

/* a * b, or SIZE_MAX on overflow, which ampi_check_operands refuses. */
AMPI_FN size_t ampi_area(size_t a, size_t b) {
    size_t n;
    return ampi_mul_size(a, b, &n) ? n : SIZE_MAX;
}

/* n rounded up to whole groups of lanes; elements of a tile that begins at `start`. */
AMPI_INLINE size_t ampi_padded(size_t n) { return ampi_round_up(n, AMPI_LANES); }
AMPI_FN size_t ampi_tile_size(size_t n, size_t start) {
    return ampi_min_size(n - start, AMPI_TILE);
}

/* A tile of rows holds as many whole rows of d > 0 elements as fit, at most AMPI_ROWS; or part of a
   longer one, from column `start` on. Kernels read and write whole groups of lanes: a tile has room
   for one behind the last row, and the next row overwrites a row's surplus. */
enum { AMPI_ROWS = 64, AMPI_PART = 2048, AMPI_ROWS_TILE = AMPI_PART + AMPI_LANES };
AMPI_FN size_t ampi_rows_of_tile(size_t d) {
    return d < AMPI_PART ? ampi_min_size(AMPI_PART / d, AMPI_ROWS) : 1;
}

AMPI_FN size_t ampi_part_size(size_t d, size_t start) {
    return ampi_min_size(d - start, AMPI_PART);
}

/* Places in a call's list: what it reads, its result (dx of a gradient), what it reads besides,
   then those of norms. */
enum { AMPI_ARG_X, AMPI_ARG_Y, AMPI_ARG_DY, AMPI_ARG_GAMMA, AMPI_ARG_MEAN, AMPI_ARG_INVSTD,
       AMPI_ARG_DGAMMA, AMPI_ARG_DBETA,
       AMPI_ARG_BETA = 2 };  /* of norms' forward calls, which have no dy */

/* May kernels run on an operand itself: floats in rows of whole groups of lanes? */
AMPI_FN int ampi_direct(const ampi_argument* v, size_t d) {
    return ampi_dtype_or_f32(v->dtype) == AMP_F32 && d % AMPI_LANES == 0;
}

/* Elements [i, i + n), rows of d, as floats to read: in place if a group of lanes may be read
   behind them, or widened into `tile`. all: elements of the operand, or 0 if a result is written
   over it. */
AMPI_FN const float* ampi_view_rows(const ampi_argument* v, size_t i, size_t n, size_t d,
        size_t all, float* tile) {
    if (n == 0 || ampi_direct(v, d) || (ampi_dtype_or_f32(v->dtype) == AMP_F32
        && i + n + AMPI_LANES <= all))
        return (const float*)v->data + i;
    ampi_load_f32(tile, v->data, v->dtype, i, n);
    memset(tile + n, 0, (d < n ? (size_t)AMPI_LANES : ampi_padded(n) - n) * sizeof *tile);
    return tile;
}

AMPI_FN const float* ampi_view(const ampi_argument* v, size_t i, size_t n, float* tile) {
    return ampi_view_rows(v, i, n, n, 0, tile);
}

/* How a gradient is written: added to if bit `which` of `accumulate` is set. */
AMPI_FN int ampi_gradient_use(int accumulate, amp_accumulate which) {
    return accumulate & (int)which ? AMPI_OUT | AMPI_ADDS | AMPI_NULL : AMPI_OUT | AMPI_NULL;
}

/* Where elements of a result are formed for ampi_store: in place, or in `tile`. */
AMPI_FN float* ampi_open(const ampi_argument* y, size_t i, size_t d, float* tile) {
    return ampi_direct(y, d) && !(y->use & AMPI_ADDS) ? (float*)(uintptr_t)y->data + i : tile;
}

/* v[l] += element i + l of y, n of them, at most AMPI_ROWS_TILE. */
AMPI_FN void ampi_add_stored(const ampi_argument* y, size_t i, float* v, size_t n) {
    float old[AMPI_ROWS_TILE];
    ampi_load_f32(old, y->data, y->dtype, i, n);
    for (size_t l = 0; l < n; l++) v[l] += old[l];
}

/* Stores elements [i, i + n) of a result, if any, from v, which may lie there; v becomes the sum
   where the result is added to. Every NaN becomes 0x7fc00000, rounded to the type, as processors
   differ in NaNs. */
AMPI_FN void ampi_store(const ampi_argument* y, size_t i, float* v, size_t n) {
    if (!y->data) return;
    if (y->use & AMPI_ADDS) ampi_add_stored(y, i, v, n);
    ampi_kernels_now()->convert(ampi_mutable(ampi_at(y->data, y->dtype, i)),
        ampi_dtype_or_f32(y->dtype), v, AMP_F32, n, NULL, 1);
    ampi_kernels_end();
}

/* --- sums --- */

/* The product of two floats is exact in double, so a fused operation gives the same bits. */
AMPI_INLINE double ampi_add_product(int hw, float a, float b, double sum) {
#if AMPI_GNU
    if (hw) return __builtin_fma((double)a, (double)b, sum);
#endif
    (void)hw;
    return sum + (double)a * (double)b;
}

/* The fixed tree: 16 -> 8 -> 4 -> 2 -> 1. */
AMPI_INLINE double ampi_lane_total(const double* acc) {
    double a[AMPI_LANES / 2];
    for (size_t l = 0; l < 8; l++) a[l] = acc[l] + acc[l + 8];
    for (size_t l = 0; l < 4; l++) a[l] += a[l + 4];
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* A long sum has this many parts of whole tiles (or rows), of `count`, which threads share. */
enum { AMPI_PARTS = 64 };
AMPI_FN size_t ampi_part_start(size_t count, int64_t part) {
    return ampi_share(count, AMPI_PARTS, (size_t)part);
}

/* Stores the total of all parts of a sum, divided by n. */
AMPI_FN void ampi_store_mean(const ampi_argument* mean, const double* parts, double n) {
    double total = 0.0;
    for (int i = 0; i < AMPI_PARTS; i++) total += parts[i];
    float value = (float)(total / n);
    ampi_store(mean, 0, &value, 1);
}

/* >>impl-pool   Pooling: windows sum pixels or take their maxima, sixteen planes at a time.
   Words. window: the pixels of one output. task: what windows do with pixels. quads: windows of
   2x2 side by side, which need no transposing. */

/* The height, or the width, of planes, in pixels. */
typedef struct ampi_pool_side {
    int size, out;       /* of x; of y, whose pixels are windows */
    int kernel, stride;  /* of a window; from one window to the next, at most `size` */
    int pad;             /* before the first pixel of x */
} ampi_pool_side;

/* A checked shape with its defaults. A plane is one channel of one image. */
typedef struct ampi_pool_plan {
    int max, sum, exclude_pad; /* maxima, or sums, not averages? do averages divide by pixels of x
                                  alone? */
    ampi_pool_side h, w;
    size_t planes, x_n, y_n;   /* planes; elements of x, of y */
} ampi_pool_plan;

/* One side of a pooling shape, whose fields are in range. out = 0: no window fits. */
AMPI_FN ampi_pool_side ampi_pool_side_of(int size, int kernel, int stride, int pad, int pad_end) {
    const int64_t last = (int64_t)size + pad + pad_end - kernel;  /* where the last window may
                                                                     begin */
    ampi_pool_side s;
    stride = ampi_default_int(stride, kernel);
    s.size = size;
    s.kernel = kernel;
    s.pad = pad;
    s.out = last < 0 ? 0 : (int)(last / stride) + 1;
    s.stride = ampi_min_int(stride, size);  /* a larger one leaves one window as well */
    return s;
}

/* Refuses a field of a pooling shape that is out of range. end_h, end_w: its pad_end, with the
   default. Padding of at most half of a kernel leaves each window a pixel of x; planes below 2^31-1
   pixels leave `out` an int. */
AMPI_FN amp_result ampi_pool_check(const amp_pool2d_shape* s, int end_h, int end_w,
        const amp_logger* logger) {
    AMPI_REFUSE_CALL((unsigned)s->kind > AMP_POOL_SUM, AMP_ERR_DESC,
        "pool2d: kind %d is not an amp_pool", (int)s->kind);
    AMPI_REFUSE_CALL(s->n < 1 || s->channels < 1 || s->height < 1 || s->width < 1
        || (int64_t)s->height * s->width >= INT32_MAX, AMP_ERR_SHAPE,
        "pool2d: input %dx%dx%dx%d needs sizes >= 1 and planes below 2^31-1", s->n, s->channels,
        s->height, s->width);
    AMPI_REFUSE_CALL(s->kernel_h < 1 || s->kernel_w < 1 || s->stride_h < 0 || s->stride_w < 0,
        AMP_ERR_DESC, "pool2d: kernel %dx%d, stride %dx%d: kernel needs >= 1, stride >= 0",
        s->kernel_h, s->kernel_w, s->stride_h, s->stride_w);
    AMPI_REFUSE_CALL(s->pad_h < 0 || s->pad_w < 0 || s->pad_h > s->kernel_h / 2
        || s->pad_w > s->kernel_w / 2, AMP_ERR_DESC,
        "pool2d: padding %dx%d is outside 0..half of the %dx%d kernel", s->pad_h, s->pad_w,
        s->kernel_h, s->kernel_w);
    AMPI_REFUSE_CALL(end_h < 0 || end_w < 0 || end_h > s->kernel_h / 2 || end_w > s->kernel_w / 2,
        AMP_ERR_DESC, "pool2d: pad_end %dx%d is outside 0..half of the %dx%d kernel", end_h, end_w,
        s->kernel_h, s->kernel_w);
    return AMP_OK;
}

/* The plan of a pooling shape, which is checked. */
AMPI_FN amp_result ampi_pool_plan_make(const amp_pool2d_shape* s, ampi_pool_plan* p,
        const amp_logger* logger) {
    AMPI_CLEAR(*p);
    AMPI_REFUSE_CALL(!s, AMP_ERR_ARGUMENT, "pool2d: the shape is NULL");
    const int end_h = ampi_default_int(s->pad_end_h, s->pad_h),
        end_w = ampi_default_int(s->pad_end_w, s->pad_w);
    AMPI_TRY(ampi_pool_check(s, end_h, end_w, logger));

    p->max = s->kind == AMP_POOL_MAX;
    p->sum = s->kind == AMP_POOL_SUM;
    p->exclude_pad = s->exclude_pad != 0;
    p->h = ampi_pool_side_of(s->height, s->kernel_h, s->stride_h, s->pad_h, end_h);
    p->w = ampi_pool_side_of(s->width, s->kernel_w, s->stride_w, s->pad_w, end_w);

    /* y has at most 4 times the elements of x, so its number is a size_t, too */
    p->planes = ampi_area((size_t)s->n, (size_t)s->channels);
    p->x_n = ampi_area(p->planes, (size_t)p->h.size * (size_t)p->w.size);
    p->y_n = p->planes * ((size_t)p->h.out * (size_t)p->w.out);
    AMPI_REFUSE_CALL(p->x_n > SIZE_MAX / 16, AMP_ERR_ARGUMENT,
        "pool2d: input %dx%dx%dx%d is more than memory can hold", s->n, s->channels, s->height,
        s->width);
    AMPI_REFUSE_CALL(p->y_n == 0, AMP_ERR_SHAPE,
        "pool2d: kernel %dx%d is larger than its %dx%d input with padding %dx%d", s->kernel_h,
        s->kernel_w, s->height, s->width, s->pad_h, s->pad_w);
    return AMP_OK;
}

AMP_DEF amp_result amp_pool2d_output(const amp_pool2d_shape* s, int* out_h, int* out_w,
        const amp_exec* exec) {
    ampi_pool_plan p;
    AMPI_TRY(ampi_pool_plan_make(s, &p, ampi_exec_logger(exec)));
    if (out_h) *out_h = p.h.out;
    if (out_w) *out_w = p.w.out;
    return AMP_OK;
}

/* Pixels [first, last) of a plane's row (or column) that window `o` covers, without padding. */
typedef struct ampi_span { int first, last; } ampi_span;

/* The pixels of x that window o covers along a side, without padding. */
AMPI_HD AMPI_FN ampi_span ampi_window(ampi_pool_side side, int o) {
    int64_t start = (int64_t)o * side.stride - side.pad;
    ampi_span s;
    s.first = (int)(start > 0 ? start : 0);
    s.last = (int)(start + side.kernel < side.size ? start + side.kernel : side.size);
    return s;
}

/* The windows that cover any of the pixels [first, last) of a side. Those up to number `before /
   stride` end at pixel `first` or sooner; those from `end` on begin at `last` or later. */
AMPI_FN ampi_span ampi_window_range(ampi_pool_side side, int first, int last) {
    const int64_t before = (int64_t)first + side.pad - side.kernel;
    const int64_t end = ((int64_t)last - 1 + side.pad) / side.stride + 1;
    ampi_span s;
    s.first = before < 0 ? 0 : ampi_min_int((int)(before / side.stride) + 1, side.out);
    s.last = (int)(end < side.out ? end : side.out);
    return s;
}

/* What the sum of window (oh, ow) is divided by: the pixels of an average, or 1. */
AMPI_HD AMPI_INLINE float ampi_pool_count(const ampi_pool_plan* p, int oh, int ow) {
    if (p->sum) return 1.0f;
    ampi_span rows = ampi_window(p->h, oh), columns = ampi_window(p->w, ow);
    if (!p->exclude_pad) return (float)((double)p->h.kernel * (double)p->w.kernel);
    return (float)((double)(rows.last - rows.first) * (double)(columns.last - columns.first));
}

/* An integer that orders numbers as a maximum does: -0 equals 0, NaNs are the largest, all equal.
   Subtracting 0x800000 wraps negative NaNs to large keys. Keys are above 0x80808080, which memset
   can write. */
AMPI_HD AMPI_INLINE int32_t ampi_pool_key(float x) {
    const uint32_t u = ampi_bits(x), sign = 0u - (u >> 31), nan = 0x7f000001u;
    const int32_t key = (int32_t)(((u & 0x7fffffffu) ^ sign) - sign - 0x800000u);
    return (key < (int32_t)nan ? key : (int32_t)nan) + 0x808081;
}

/* A tile holds pixels or windows of 16 planes in FP32, those of plane l in lane l, so no row ends
   inside a vector.
   Orders of sums, the same for any tiles:
     average, small plane       the pixels of a window row by row, from left to right;
     average, other plane       each column of the window from the top, then the columns;
     gradient, small plane      the windows that hold a pixel, in their order;
     gradient of maxima         likewise;
     gradient, other average    of each row of windows those that hold the pixel, last to first, in
                                blocks of AMPI_POOL_BLOCK; then these sums, from the top.
   Blocks count from the first window on each band of AMPI_POOL_BAND columns. */
enum { AMPI_POOL_COLUMNS = 128, /* columns of a tile, if its windows are not wider */
       AMPI_POOL_PIXELS = 384,  /* its pixels, at most: 3 rows for windows of 3x3 */
       AMPI_POOL_MAXIMA = 128,  /* windows whose maxima are searched at a time */
       AMPI_POOL_BLOCK = 256, AMPI_POOL_BAND = 4096 };
/* Floats for n pixels or windows, and for 16 behind them as vectors are whole. */
#define AMPI_POOL_ROOM(n) (((n) + 16) * 16)

/* See the orders of sums. */
AMPI_FN int ampi_pool_is_small(const ampi_pool_plan* p) {
    return p->w.out <= AMPI_LANES && p->h.out <= AMPI_LANES
        && p->h.size <= AMPI_POOL_BAND / p->w.size;
}

/* Rows [r0, r1), columns [c0, c1) of planes. */
typedef struct ampi_rect { int r0, r1, c0, c1; } ampi_rect;
AMPI_INLINE size_t ampi_rect_width(const ampi_rect* d) { return (size_t)(d->c1 - d->c0); }
AMPI_INLINE size_t ampi_rect_size(const ampi_rect* d) {
    return (size_t)(d->r1 - d->r0) * ampi_rect_width(d);
}

/* Windows take the sum of their pixels, or the maximum, or search for its place; they give their
   gradient to all their pixels, or to the maximum. */
typedef enum ampi_pool_task {
    AMPI_POOL_TAKE_SUM, AMPI_POOL_TAKE_MAX, AMPI_POOL_SEARCH, AMPI_POOL_GIVE, AMPI_POOL_GIVE_MAX
} ampi_pool_task;

/* Windows of 16 planes under way, with their pixels. Arrays hold 16 floats a pixel or window, one a
   plane. */
typedef struct ampi_pool_tile {
    const ampi_pool_plan* p;
    const ampi_argument* list;  /* of the call: AMPI_ARG_X, AMPI_ARG_Y (dx) and AMPI_ARG_DY */
    size_t plane;               /* the one in lane 0 */
    int two_stages;  /* averages of planes that are not small, whose sums begin in `sums` */
    ampi_rect y;     /* the windows: rows and columns of y */
    float* windows;  /* their y or dy, row after row */
    float* pixels;   /* of x, a rectangle at a time */
    float* sums;     /* of two stages: a row of pixels, the sums of columns or of gradients */
    int32_t* best;   /* the greatest key that each window met in a search, see ampi_pool_key */
    uint32_t* at;    /* the kernel position where: row * width of x + column */
} ampi_pool_tile;

/* A tile of planes from `plane` on, without pixels, places and windows q->y. */
AMPI_FN ampi_pool_tile ampi_pool_tile_of(const ampi_pool_plan* p, const ampi_argument* list,
        size_t plane, float* windows, float* sums) {
    ampi_pool_tile q;
    AMPI_CLEAR(q);
    q.p = p;
    q.list = list;
    q.plane = plane;
    q.two_stages = !p->max && !ampi_pool_is_small(p);
    q.windows = windows;
    q.sums = sums;
    return q;
}

/* Adds n pixels of `count` planes, which begin at `row` and lie `pitch` bytes apart, to a tile. */
AMPI_FN void ampi_pool_add_row(float* tile, const char* row, amp_dtype t, size_t pitch,
        size_t count, size_t n) {
    AMPI_ALIGNED float old[AMPI_LANES * AMPI_LANES];
    for (size_t pixels, i = 0; i < n; i += pixels, row += pixels * ampi_type_size(t)) {
        pixels = ampi_min_size(n - i, AMPI_LANES);
        ampi_kernels_now()->lanes_in(old, AMPI_LANES, row, pitch, t, count, pixels, pixels);
        for (size_t l = 0; l < pixels * AMPI_LANES; l++) tile[i * AMPI_LANES + l] += old[l];
    }
}

/* Fills a tile, q->windows or pixels, from rectangle d of the operand at `arg`. A result
   (AMPI_ARG_Y) goes the other way; the tile becomes the sum where the result is added to. */
AMPI_FN void ampi_pool_move(const ampi_pool_tile* q, int arg, const ampi_rect* d, float* tile) {
    const ampi_kernels* k = ampi_kernels_now();
    const ampi_argument* v = &q->list[arg];
    const amp_dtype t = ampi_dtype_or_f32(v->dtype);

    /* the operand: elements of a row of a plane, bytes from a plane to the next */
    const size_t w = (size_t)(tile == q->windows ? q->p->w.out : q->p->w.size);
    const size_t size = ampi_type_size(t), pitch = v->cols / q->p->planes * size;
    const size_t count = ampi_min_size(q->p->planes - q->plane, AMPI_LANES);
    char* first = (char*)(uintptr_t)v->data + q->plane * pitch
        + ((size_t)d->r0 * w + (size_t)d->c0) * size;

    /* a run of neighbours is one row of d, or all of d where its rows join */
    const size_t width = ampi_rect_width(d), pixels = ampi_rect_size(d);
    const size_t run = width == w ? pixels : width;
    for (size_t i = 0; i < pixels; i += run) {
        char* row = first + i / width * w * size;
        float* to = tile + i * AMPI_LANES;
        if (v->use & AMPI_ADDS) ampi_pool_add_row(to, row, t, pitch, count, run);
        if (arg == AMPI_ARG_Y) k->lanes_out(row, t, pitch, to, count, run);
        else k->lanes_in(to, AMPI_LANES, row, pitch, t, count, run, run);
    }
    ampi_kernels_end();
}

/* The larger of x and y. If they are equal, or y alone is a NaN, it is y; a NaN in x is x. */
AMPI_INLINE float ampi_pool_larger(float x, float y) {
    const int nan = (int32_t)ampi_magnitude(x) > 0x7f800000;
    return ((x > y) | nan) ? x : y;
}

/* A task for windows [i, end) and the pixels that they meet at kernel position `place`: pixel j for
   the first one, `step` further for each next one. i, end, j and step count floats of arrays of
   ampi_pool_tile; x is its pixels or sums, y its windows. */
AMPI_INLINE void ampi_pool_position(ampi_pool_task task, float* AMPI_RESTRICT y,
        int32_t* AMPI_RESTRICT best, uint32_t* AMPI_RESTRICT at, float* AMPI_RESTRICT x, size_t i,
        size_t end, size_t j, size_t step, uint32_t place) {
    for (; i < end; i += AMPI_LANES, j += step)
        AMPI_IN_REGISTERS for (size_t l = 0; l < AMPI_LANES; l++) {
            float* const pixel = &x[j + l];
            if (task == AMPI_POOL_TAKE_SUM) y[i + l] += *pixel;
            else if (task == AMPI_POOL_GIVE) *pixel += y[i + l];
            else if (task == AMPI_POOL_GIVE_MAX)
                *pixel += ampi_and(y[i + l], ampi_mask(at[i + l] == place));
            else if (task == AMPI_POOL_TAKE_MAX)
                y[i + l] = ampi_pool_larger(*pixel, y[i + l]);
            else {
                /* only a greater key replaces one: of equal ones the first stays */
                const int32_t key = ampi_pool_key(*pixel);
                at[i + l] = key > best[i + l] ? place : at[i + l];
                best[i + l] = key > best[i + l] ? key : best[i + l];
            }
        }
}

/* to[i] += x[i], n elements in whole groups of lanes. */
AMPI_INLINE void ampi_pool_add(float* AMPI_RESTRICT to, const float* AMPI_RESTRICT x, size_t n) {
    size_t i, l;
    for (i = 0; i < n; i += AMPI_LANES)
        for (l = 0; l < AMPI_LANES; l++) to[i + l] += x[i + l];
}

/* A task for a row of windows, from number `row` in q->windows on, and `rows` rows of pixels x in
   columns [d->c0, d->c1). place: the kernel position where a window's first column meets the first
   of these rows, see ampi_pool_tile.at. */
AMPI_INLINE void ampi_pool_windows(ampi_pool_task task, const ampi_pool_tile* q, size_t row,
        const ampi_rect* d, float* x, int rows, uint32_t place) {
    const int64_t sw = q->p->w.stride, width = d->c1 - d->c0, n = q->y.c1 - q->y.c0;

    /* where the first and the last window begin, in columns of d, perhaps outside; the kernel
       columns [c0, c1) then meet d at all */
    const int64_t first = q->y.c0 * sw - q->p->w.pad - d->c0, last = first + (n - 1) * sw;
    const int64_t c0 = last < 0 ? -last : 0;
    const int64_t c1 = width - first < q->p->w.kernel ? width - first : q->p->w.kernel;

    for (; rows > 0; rows--, x += width * AMPI_LANES, place += (uint32_t)q->p->w.size)
        for (int64_t c = c0; c < c1; c++) {
            /* a pixel meets its windows in their order from the last kernel column to the first */
            const int64_t k = task >= AMPI_POOL_GIVE && !q->two_stages ? c0 + c1 - 1 - c : c;

            /* of the n windows, `left` meet a pixel before d here, then `inside` one of d */
            const ampi_row_pixels u = ampi_row_pixels_of((int)width, first + k, (int)sw, (size_t)n);
            const size_t i = (row + u.left) * AMPI_LANES;
            ampi_pool_position(task, q->windows, q->best, q->at, x, i, i + u.inside * AMPI_LANES,
                u.first * AMPI_LANES, (size_t)sw * AMPI_LANES, place + (uint32_t)k);
        }
}

/* A task for row `oh` of the windows and the pixels of rectangle d. In two stages, windows meet one
   row, q->sums, in place of the rows of d. An average's q->sums are those of all rows of its
   windows, so windows sum it when the last row is in. A gradient's q->sums go to each row. */
AMPI_KERNEL(ampi_pool_row, (ampi_pool_task task, const ampi_pool_tile* q, int oh,
        const ampi_rect* d, float* pixels), task, q, oh, d, pixels) {
    /* rows [r0, r1) of d belong to these windows, whose own rows are `span` */
    const ampi_span span = ampi_window(q->p->h, oh);
    const int r0 = ampi_max_int(span.first, d->r0), r1 = ampi_min_int(span.last, d->r1);

    /* ld: floats of a row of d; row: number of the first window; x: the first of the rows; v: what
       windows meet; place: where, see ampi_pool_windows */
    const size_t ld = ampi_rect_width(d) * AMPI_LANES,
        row = (size_t)(oh - q->y.r0) * ampi_rect_width(&q->y);
    const uint32_t place = (uint32_t)(r0 - span.first) * (uint32_t)q->p->w.size;
    float *const x = pixels + (size_t)(r0 - d->r0) * ld, *const v = q->two_stages ? q->sums : x;
    const int takes = q->two_stages && task == AMPI_POOL_TAKE_SUM,
        gives = q->two_stages && task == AMPI_POOL_GIVE;
    int r;
    if (r0 >= r1) return;

    /* first stage of an average */
    if (gives || (takes && r0 == span.first)) memset(q->sums, 0, ld * sizeof(float));
    for (r = r0; takes && r < r1; r++) ampi_pool_add(q->sums, x + (size_t)(r - r0) * ld, ld);
    if (takes && r1 < span.last) return;

#define AMPI_CASE(number) \
    case number: ampi_pool_windows(number, q, row, d, v, v == x ? r1 - r0 : 1, place); break
    switch (task) {
        AMPI_CASE(AMPI_POOL_TAKE_SUM);
        AMPI_CASE(AMPI_POOL_TAKE_MAX);
        AMPI_CASE(AMPI_POOL_SEARCH);
        AMPI_CASE(AMPI_POOL_GIVE);
        AMPI_CASE(AMPI_POOL_GIVE_MAX);
    }
#undef AMPI_CASE

    /* second stage of a gradient */
    for (r = r0; gives && r < r1; r++) ampi_pool_add(x + (size_t)(r - r0) * ld, q->sums, ld);
}

/* Divides each window's sum by the pixels that its average counts. */
AMPI_KERNEL(ampi_pool_divide, (const ampi_pool_tile* q), q) {
    float* v = q->windows;
    int oh, ow, l;
    for (oh = q->y.r0; oh < q->y.r1; oh++)
        for (ow = q->y.c0; ow < q->y.c1; ow++, v += AMPI_LANES) {
            const float count = ampi_pool_count(q->p, oh, ow);
            for (l = 0; l < AMPI_LANES; l++) v[l] /= count;
        }
}

/* A task that reads x, for the windows q->y: a value or a place each, once all their pixels have
   passed through a tile. */
AMPI_FN void ampi_pool_take(ampi_pool_tile* q, ampi_pool_task task) {
    /* the pixels of all these windows: rows [r0, r1), columns [c0, c1) */
    const ampi_pool_plan* p = q->p;
    const int r0 = ampi_window(p->h, q->y.r0).first, r1 = ampi_window(p->h, q->y.r1 - 1).last,
              c0 = ampi_window(p->w, q->y.c0).first, c1 = ampi_window(p->w, q->y.c1 - 1).last;

    /* tiles of `rows` x `columns` pixels, `down` x `across` of them */
    const int columns = ampi_min_int(c1 - c0, AMPI_POOL_PIXELS), rows = AMPI_POOL_PIXELS / columns;
    const int down = (r1 - r0 + rows - 1) / rows, across = (c1 - c0 + columns - 1) / columns;

    /* windows begin with 0, with a key below all (0x80808080), or with -infinity */
    const size_t floats = ampi_rect_size(&q->y) * AMPI_LANES;
    if (task == AMPI_POOL_TAKE_SUM) memset(q->windows, 0, floats * sizeof(float));
    else if (task == AMPI_POOL_SEARCH) memset(q->best, 0x80, floats * sizeof(float));
    else ampi_fill(q->windows, floats, ampi_float(0xff800000u));

    /* row after row of tiles, as the first maximum stays; in two stages column after column, since
       q->sums holds those of one */
    for (int64_t t = 0; t < (int64_t)down * across; t++) {
        const int r = (int)(q->two_stages ? t % down : t / across) * rows + r0;
        const int c = (int)(q->two_stages ? t / down : t % across) * columns + c0;
        const ampi_rect d = { r, ampi_min_int(r1 - r, rows) + r, c,
            ampi_min_int(c1 - c, columns) + c };
        ampi_pool_move(q, AMPI_ARG_X, &d, q->pixels);
        for (int oh = q->y.r0; oh < q->y.r1; oh++) ampi_pool_row(task, q, oh, &d, q->pixels);
    }
}

/* Windows in columns of q->y, from row q->y.r0 on: the end of as many rows as have their pixels in
   one tile. At least one row; none from `end` on; at most `limit` windows otherwise. */
AMPI_FN int ampi_pool_rows_end(const ampi_pool_tile* q, int end, int limit) {
    const ampi_pool_plan* p = q->p;
    const int width = ampi_window(p->w, q->y.c1 - 1).last - ampi_window(p->w, q->y.c0).first;
    const int fit = (AMPI_POOL_PIXELS / width - p->h.kernel) / p->h.stride + 1;
    return q->y.r0 + ampi_max_int(1, ampi_min_int(ampi_min_int(fit, limit / (q->y.c1 - q->y.c0)),
        end - q->y.r0));
}

/* Pools 16 planes from `plane` on: rectangles of windows whose pixels fit a tile, if a window's
   do. */
AMPI_APART void ampi_pool_forward_planes(const ampi_pool_plan* p, const ampi_argument* list,
        size_t plane) {
    AMPI_ALIGNED float pixels[AMPI_POOL_ROOM(AMPI_POOL_PIXELS)],
        sums[AMPI_POOL_ROOM(AMPI_POOL_PIXELS)];
    AMPI_ALIGNED float windows[AMPI_POOL_ROOM(AMPI_POOL_BLOCK)];
    const int columns = ampi_max_int(1, (AMPI_POOL_COLUMNS - p->w.kernel) / p->w.stride + 1);
    ampi_pool_tile q = ampi_pool_tile_of(p, list, plane, windows, sums);
    q.pixels = pixels;
    for (q.y.c0 = 0; q.y.c0 < p->w.out; q.y.c0 = q.y.c1) {
        q.y.c1 = ampi_min_int(p->w.out - q.y.c0, columns) + q.y.c0;
        for (q.y.r0 = 0; q.y.r0 < p->h.out; q.y.r0 = q.y.r1) {
            q.y.r1 = ampi_pool_rows_end(&q, p->h.out, AMPI_POOL_BLOCK);
            ampi_pool_take(&q, p->max ? AMPI_POOL_TAKE_MAX : AMPI_POOL_TAKE_SUM);
            if (!p->max) ampi_pool_divide(&q);
            ampi_pool_move(&q, AMPI_ARG_Y, &q.y, windows);
        }
    }
}

/* Rows of windows from q->y.r0 to `end` give gradients to dx, a tile of the pixels of d; q->y.r0
   becomes `end`. Windows come in blocks: several whole rows, or `limit` of one row, counted from
   the first window on the band that d lies in. */
AMPI_FN void ampi_pool_give_rows(ampi_pool_tile* q, int end, const ampi_rect* d, float* dx) {
    const ampi_pool_plan* p = q->p;
    const int limit = p->max ? AMPI_POOL_MAXIMA : AMPI_POOL_BLOCK;
    const int band = d->c0 / AMPI_POOL_BAND * AMPI_POOL_BAND;  /* its first column */
    const int base = ampi_window_range(p->w, band, d->c1).first;
    const ampi_span o = ampi_window_range(p->w, d->c0, d->c1);
    for (; q->y.r0 < end; q->y.r0 = q->y.r1)
        for (q->y.c0 = o.first, q->y.r1 = q->y.r0 + 1; q->y.c0 < o.last; q->y.c0 = q->y.c1) {
            q->y.c1 = ampi_min_int(o.last, base + ((q->y.c0 - base) / limit + 1) * limit);
            if (q->y.c0 == o.first && q->y.c1 == o.last)
                q->y.r1 = ampi_pool_rows_end(q, end, limit);

            /* where the maxima are, if any; dy; then each row of windows to its pixels */
            if (p->max) ampi_pool_take(q, AMPI_POOL_SEARCH);
            ampi_pool_move(q, AMPI_ARG_DY, &q->y, q->windows);
            if (!p->max) ampi_pool_divide(q);
            for (int oh = q->y.r0; oh < q->y.r1; oh++)
                ampi_pool_row(p->max ? AMPI_POOL_GIVE_MAX : AMPI_POOL_GIVE, q, oh, d, dx);
        }
}

/* The gradient of columns [d.c0, d.c1) of x, a tile of at most `max_rows` rows at a time, from the
   top down. Each row of windows gives once, when a tile holds all its pixels; one that goes on
   below waits, and the rows of pixels that it begins in are kept for the next tile. Windows of more
   rows than a tile give to each tile that they meet. */
AMPI_FN void ampi_pool_backward_columns(ampi_pool_tile* q, ampi_rect d, float* sums) {
    const ampi_pool_plan* p = q->p;
    const size_t row = ampi_rect_width(&d) * AMPI_LANES;  /* floats */
    const int max_rows = AMPI_POOL_PIXELS / (d.c1 - d.c0);
    const int exceeds_tile = ampi_min_int(p->h.kernel, p->h.size) > max_rows;
    int complete, kept = 0;  /* rows of a tile: stored and left; moved to the top of the next */
    q->y.r0 = 0;
    for (d.r0 = 0; d.r0 < p->h.size; d.r0 += complete) {
        d.r1 = ampi_min_int(p->h.size - d.r0, max_rows) + d.r0;
        memset(sums + (size_t)kept * row, 0, (size_t)(d.r1 - d.r0 - kept) * row * sizeof *sums);

        /* rows of windows from q->y.r0, the first that has not given, to `end` give */
        const ampi_span meet = ampi_window_range(p->h, d.r0, d.r1);
        if (exceeds_tile) q->y.r0 = meet.first;
        int end = exceeds_tile ? meet.last : q->y.r0;
        while (end < meet.last && ampi_window(p->h, end).last <= d.r1) end++;
        ampi_pool_give_rows(q, end, &d, sums);

        /* rows above the next window are complete */
        const int next = end < p->h.out ? ampi_window(p->h, end).first : d.r1;
        complete = ampi_min_int(d.r1, next) - d.r0;
        kept = d.r1 - d.r0 - complete;
        d.r1 = d.r0 + complete;
        ampi_pool_move(q, AMPI_ARG_Y, &d, sums);
        memmove(sums, sums + (size_t)complete * row, (size_t)kept * row * sizeof *sums);
    }
}

/* The gradient of 16 planes from `plane` on. A tile is as tall as a window if 32 columns, of maxima
   one, leave it room. Averages read no x: its pixels serve as q.sums. */
AMPI_APART void ampi_pool_backward_planes(const ampi_pool_plan* p, const ampi_argument* list,
        size_t plane) {
    AMPI_ALIGNED float pixels[AMPI_POOL_ROOM(AMPI_POOL_PIXELS)],
        sums[AMPI_POOL_ROOM(AMPI_POOL_PIXELS)];
    AMPI_ALIGNED float windows[AMPI_POOL_ROOM(AMPI_POOL_BLOCK)];
    AMPI_ALIGNED int32_t best[AMPI_POOL_ROOM(AMPI_POOL_MAXIMA)];
    AMPI_ALIGNED uint32_t at[AMPI_POOL_ROOM(AMPI_POOL_MAXIMA)];
    const int fit = AMPI_POOL_PIXELS / ampi_min_int(p->h.kernel, p->h.size);
    const int columns = ampi_min_int(AMPI_POOL_COLUMNS, ampi_max_int(p->max ? 1 : 32, fit));
    ampi_pool_tile q = ampi_pool_tile_of(p, list, plane, windows, pixels);
    q.pixels = pixels;
    q.best = best;
    q.at = at;

    /* strips of columns, none of them in two bands */
    ampi_rect d = { 0, 0, 0, 0 };
    for (; d.c0 < p->w.size; d.c0 = d.c1) {
        d.c1 = ampi_min_int(ampi_min_int(p->w.size - d.c0, columns),
            AMPI_POOL_BAND - d.c0 % AMPI_POOL_BAND) + d.c0;
        ampi_pool_backward_columns(&q, d, sums);
    }
}

/* Windows of 2x2 side by side, on planes of even sides, need no transposing: planes join, and lanes
   are neighbours in a row of w.out windows, which fits a tile. Surplus lanes read what is behind;
   the next row overwrites what they write. */
AMPI_FN int ampi_pool_is_quads(const ampi_pool_plan* p) {
    return p->h.kernel == 2 && p->w.kernel == 2 && p->h.stride == 2 && p->w.stride == 2
        && p->h.pad == 0 && p->w.pad == 0 && p->h.size == 2 * p->h.out
        && p->w.size == 2 * p->w.out && p->w.out <= AMPI_PART / 4;
}

/* `rows` rows of `ow` windows of 2x2 take their sums, times `share`, or maxima to y. The place of a
   maximum, 2 * row + column, goes to `at`. columns: each window's columns are summed first. */
AMPI_INLINE void ampi_quads_take(ampi_pool_task task, int columns, float share,
        float* AMPI_RESTRICT y, uint32_t* AMPI_RESTRICT at, const float* AMPI_RESTRICT x, size_t ow,
        size_t rows) {
    for (; rows > 0; rows--, x += 4 * ow, y += ow, at += ow)
        for (size_t i = 0; i < ow; i += AMPI_LANES) {
            const uint32_t* const in = ampi_lanes_in(ow - i);
            for (size_t l = 0; l < AMPI_LANES; l++) {
                /* pixels a b above c d; zeros in surplus lanes of a sum, which could overflow */
                const uint32_t keep = task == AMPI_POOL_TAKE_SUM ? in[l] : ~0u;
                const float *const above = x + 2 * (i + l), *const below = above + 2 * ow;
                const float a = ampi_and(above[0], keep), b = ampi_and(above[1], keep);
                const float c = ampi_and(below[0], keep), d = ampi_and(below[1], keep);

                /* 0 + makes -0 to 0, as sums that begin with 0 do */
                if (task == AMPI_POOL_TAKE_SUM && columns)
                    y[i + l] = (0.0f + a + c + (b + d)) * share;
                else if (task == AMPI_POOL_TAKE_SUM) y[i + l] = (0.0f + a + b + c + d) * share;
                else if (task == AMPI_POOL_TAKE_MAX)
                    y[i + l] = ampi_pool_larger(d, ampi_pool_larger(c, ampi_pool_larger(b, a)));
                else {
                    /* the first of the greatest keys */
                    const int32_t second = ampi_pool_key(b), third = ampi_pool_key(c);
                    int32_t best = ampi_pool_key(a);
                    uint32_t place = second > best ? 1u : 0u;
                    best = second > best ? second : best;
                    place = third > best ? 2u : place;
                    best = third > best ? third : best;
                    at[i + l] = ampi_pool_key(d) > best ? 3u : place;
                }
            }
        }
}

/* `rows` rows of `ow` windows give dy to dx: to the pixel at place at[], or times `share` to each.
   The upper pixels of a row of windows come first, then the lower ones. */
AMPI_INLINE void ampi_quads_give(ampi_pool_task task, float share, float* AMPI_RESTRICT dx,
        const uint32_t* AMPI_RESTRICT at, const float* AMPI_RESTRICT dy, size_t ow, size_t rows) {
    const int max = task == AMPI_POOL_GIVE_MAX;
    size_t i, l;
    uint32_t place;
    for (; rows > 0; rows--, dy += ow, at += ow)
        for (place = 0; place < 4; place += 2, dx += 2 * ow)
            for (i = 0; i < ow; i += AMPI_LANES)
                for (l = 0; l < AMPI_LANES; l++) {
                    const float g = max ? dy[i + l] : dy[i + l] * share;
                    dx[2 * (i + l)] = 0.0f + (max ? ampi_and(g, ampi_mask(at[i + l] == place)) : g);
                    dx[2 * (i + l) + 1] = 0.0f + (max ? ampi_and(g,
                        ampi_mask(at[i + l] == place + 1)) : g);
                }
}

/* A task of ampi_quads_take or ampi_quads_give, with task and columns as constants. */
AMPI_KERNEL(ampi_pool_quads, (ampi_pool_task task, int columns, float share, float* to,
        uint32_t* at, const float* from, size_t ow, size_t rows), task, columns, share, to, at,
        from, ow, rows) {
    if (task == AMPI_POOL_TAKE_MAX)
        ampi_quads_take(AMPI_POOL_TAKE_MAX, 0, share, to, at, from, ow, rows);
    else if (task == AMPI_POOL_SEARCH)
        ampi_quads_take(AMPI_POOL_SEARCH, 0, share, to, at, from, ow, rows);
    else if (task == AMPI_POOL_GIVE_MAX)
        ampi_quads_give(AMPI_POOL_GIVE_MAX, share, to, at, from, ow, rows);
    else if (task == AMPI_POOL_GIVE)
        ampi_quads_give(AMPI_POOL_GIVE, share, to, at, from, ow, rows);
    else if (columns) ampi_quads_take(AMPI_POOL_TAKE_SUM, 1, share, to, at, from, ow, rows);
    else ampi_quads_take(AMPI_POOL_TAKE_SUM, 0, share, to, at, from, ow, rows);
}

/* Elements [i, i + n) of `all` as floats; two groups of lanes can be read behind them. */
AMPI_FN const float* ampi_quads_view(const ampi_argument* v, size_t i, size_t n, size_t all,
        float* tile) {
    if (ampi_dtype_or_f32(v->dtype) == AMP_F32 && i + n + 2 * AMPI_LANES <= all)
        return (const float*)v->data + i;
    ampi_load_f32(tile, v->data, v->dtype, i, n);
    memset(tile + n, 0, 2 * AMPI_LANES * sizeof *tile);
    return tile;
}

/* Pools 16 planes of 2x2 windows side by side from `plane` on, forward or backward: as many whole
   rows of windows at a time as a tile holds. */
AMPI_APART void ampi_pool_quads_planes(const ampi_pool_plan* p, const ampi_argument* list,
        size_t plane, int backward) {
    AMPI_ALIGNED float tile[AMPI_PART + 2 * AMPI_LANES], result[AMPI_PART + 2 * AMPI_LANES];
    uint32_t at[AMPI_PART / 4 + AMPI_LANES];  /* of maxima: their places */
    const ampi_pool_task take = p->max ? AMPI_POOL_TAKE_MAX : AMPI_POOL_TAKE_SUM,
        give = p->max ? AMPI_POOL_GIVE_MAX : AMPI_POOL_GIVE;
    const int columns = !ampi_pool_is_small(p);
    const float share = p->sum ? 1.0f : 0.25f;   /* of a pixel */
    const ampi_argument* y = &list[AMPI_ARG_Y];  /* y, or dx */
    const size_t size = backward ? 4 : 1;        /* its elements for each window */

    /* windows [i, end) of all planes, n at a time: whole rows */
    const size_t ow = (size_t)p->w.out, windows = ow * (size_t)p->h.out;
    const size_t end = ampi_min_size(p->y_n, (plane + AMPI_LANES) * windows);
    for (size_t n, i = plane * windows; i < end; i += n) {
        float* const to = ampi_open(y, i * size, ow, result);  /* in place without surplus lanes */
        n = ampi_min_size(end - i, AMPI_PART / 4 / ow * ow);
        if (p->max || !backward) {
            const float* x = ampi_quads_view(&list[AMPI_ARG_X], 4 * i, 4 * n, p->x_n, tile);
            ampi_pool_quads(backward ? AMPI_POOL_SEARCH : take, columns, share, to, at, x, ow,
                n / ow);
        }
        if (backward) {
            const float* dy = ampi_quads_view(&list[AMPI_ARG_DY], i, n, p->y_n, tile);
            ampi_pool_quads(give, columns, share, to, at, dy, ow, n / ow);
        }
        ampi_store(y, i * size, to, n * size);
    }
}

/* Works on all planes, 16 at a time. */
AMPI_FN void ampi_pool_all(const ampi_pool_plan* p, const ampi_argument* list, int backward) {
    AMPI_PARALLEL_OVER(p->x_n,
        for (int64_t i = 0; i < (int64_t)p->planes; i += AMPI_LANES) {
            if (ampi_pool_is_quads(p)) ampi_pool_quads_planes(p, list, (size_t)i, backward);
            else if (backward) ampi_pool_backward_planes(p, list, (size_t)i);
            else ampi_pool_forward_planes(p, list, (size_t)i);
        });
}

/* Checks shape and operands, then pools plane by plane. */
AMP_DEF amp_result amp_pool2d_forward(const amp_pool2d_shape* s, amp_ref x, amp_ref y,
        const amp_exec* exec) {
    ampi_pool_plan p;
    AMPI_TRY(ampi_pool_plan_make(s, &p, ampi_exec_logger(exec)));
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN, p.x_n),
        AMPI_ARG(y, AMPI_OUT, p.y_n)
    };
    AMPI_CHECK("pool2d", p.x_n, list);
    AMPI_COMPUTE_OP;
    ampi_pool_all(&p, list, 0);
    AMPI_DONE_OP;
}

/* Checks shape and operands, then gives dy to dx plane by plane. */
AMP_DEF amp_result amp_pool2d_backward(const amp_pool2d_shape* s, amp_ref dy, amp_ref x,
        amp_ref dx, int accumulate, const amp_exec* exec) {
    ampi_pool_plan p;
    AMPI_TRY(ampi_pool_plan_make(s, &p, ampi_exec_logger(exec)));
    const ampi_argument list[] = {
        AMPI_ARG(x, p.max ? AMPI_IN : AMPI_NULL, p.x_n),
        AMPI_ARG(dx, ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT), p.x_n),
        AMPI_ARG(dy, AMPI_IN, p.y_n)
    };
    AMPI_CHECK("pool2d backward", p.x_n, list);
    AMPI_COMPUTE_OP;
    if (dx.data) ampi_pool_all(&p, list, 1);
    AMPI_DONE_OP;
}

/* >>impl-elementwise Operators element by element: activations, terms of losses, dropout, sum,
   concat. */

/* GELU_TANH is x * sigmoid(x * (C0 + C1 x^2)), as (1 + tanh(u)) / 2 = sigmoid(2u). */
#define AMPI_GELU_C0 1.59576912f  /* 2 * sqrt(2/pi) */
#define AMPI_GELU_C1 0.0713548163f  /* C0 * 0.044715 */

/* Each activation: ampi_act_name is its value at x; ampi_slope_name is dy times its derivative,
   computed from s, its x or y as AMP_ACTIVATION_LIST says. */

/* dy where s, ReLU's x or y, is above 0 or a NaN; else 0. */
AMPI_HD AMPI_INLINE float ampi_slope_relu(int hw AMPI_MAYBE, float dy, float s) {
    const uint32_t pass = ampi_mask(ampi_bits(s) - 1u < 0x7fffffffu) | ampi_nan_mask(s);
    return ampi_float(ampi_bits(dy) & pass);
}

AMPI_HD AMPI_INLINE float ampi_act_relu(int hw, float x) { return ampi_slope_relu(hw, x, x); }

/* x times the probability that a standard normal deviate is below x. */
AMPI_HD AMPI_INLINE float ampi_act_gelu(int hw, float x) {
    float density;
    return x * ampi_normal_cdf(hw, x, &density);
}

AMPI_HD AMPI_INLINE float ampi_act_gelu_tanh(int hw, float x) {
    return x * ampi_act_sigmoid(hw, x * ampi_fma(hw, AMPI_GELU_C1, x * x, AMPI_GELU_C0));
}

AMPI_HD AMPI_INLINE float ampi_act_silu(int hw, float x) {
    return x * ampi_act_sigmoid(hw, x);
}

/* min(max(x + 3, 0), 6) / 6; of a NaN a NaN. */
AMPI_HD AMPI_INLINE float ampi_hard_sigmoid(float x) {
    return (ampi_clamp(x, 3.0f) + 3.0f) * 0.166666672f;
}

AMPI_HD AMPI_INLINE float ampi_act_hard_swish(int hw AMPI_MAYBE, float x) {
    return x * ampi_hard_sigmoid(x);
}

/* dy times the derivative of x * cdf(x), cdf + x * density of the normal distribution. */
AMPI_HD AMPI_INLINE float ampi_slope_gelu(int hw, float dy, float x) {
    float density, cdf = ampi_normal_cdf(hw, x, &density);
    /* infinity * 0 would be a NaN */
    x = ampi_float(ampi_bits(x) & ~ampi_mask(ampi_magnitude(x) == 0x7f800000u));
    return dy * ampi_fma(hw, x * 0.398942280f, density, cdf);
}

/* dy times the derivative of x * s, s the logistic function of z: s + x * s * (1 - s) * slope,
   slope that of z. */
AMPI_HD AMPI_INLINE float ampi_slope_gated(int hw, float dy, float x, float z, float slope) {
    /* the smaller of s and 1-s: s*(1-s) is accurate */
    float e = ampi_exp(hw, -ampi_abs(z)), tail = e / (1.0f + e);
    return dy * ampi_fma(hw, x * (tail * (1.0f - tail)), slope,
        ampi_select(ampi_mask((int)(ampi_bits(z) >> 31)), tail, 1.0f - tail));
}

/* Of the tanh form of GELU. Beyond |x| = 16 the derivative is 0 or 1 in float; x is clamped there,
   so that no infinity * 0 becomes a NaN. */
AMPI_HD AMPI_INLINE float ampi_slope_gelu_tanh(int hw, float dy, float x) {
    const float c = ampi_clamp(x, 16.0f), square = c * c;
    return ampi_slope_gated(hw, dy, c, c * ampi_fma(hw, AMPI_GELU_C1, square, AMPI_GELU_C0),
        ampi_fma(hw, 3.0f * AMPI_GELU_C1, square, AMPI_GELU_C0));
}

/* Clamped likewise, where exp(-|x|) is 0. */
AMPI_HD AMPI_INLINE float ampi_slope_silu(int hw, float dy, float x) {
    const float c = ampi_clamp(x, 128.0f);
    return ampi_slope_gated(hw, dy, c, c, 1.0f);
}

/* The derivative is x/3 + 1/2 within |x| < 3, and 0 or 1, which the hard sigmoid is, elsewhere. */
AMPI_HD AMPI_INLINE float ampi_slope_hard_swish(int hw, float dy, float x) {
    const uint32_t inside = ampi_mask(ampi_magnitude(x) < ampi_bits(3.0f));
    return dy * ampi_select(inside, ampi_fma(hw, x, 0.333333343f, 0.5f), ampi_hard_sigmoid(x));
}

AMPI_HD AMPI_INLINE float ampi_slope_tanh(int hw, float dy, float y) {
    return dy * ampi_fma(hw, -y, y, 1.0f);
}

AMPI_HD AMPI_INLINE float ampi_slope_sigmoid(int hw AMPI_MAYBE, float dy, float y) {
    return dy * (y * (1.0f - y));
}

/* x where s, leaky ReLU's x or y, is above 0, else slope * x. */
AMPI_HD AMPI_INLINE float ampi_leaky(float x, float s, float slope) {
    return ampi_select(ampi_mask(ampi_bits(s) - 1u < 0x7f800000u), x, slope * x);
}

/* x: a logit. */
AMPI_HD AMPI_INLINE float ampi_bce_term(int hw, float x, float target) {
    return ampi_fma(hw, -x, target, ampi_act_relu(hw, x))
        + ampi_log1p(hw, ampi_exp(hw, -ampi_abs(x)));
}

/* Terms and slopes of losses that are means over elements. */
typedef enum ampi_loss {
    AMPI_MSE = 2 * (AMP_ACTIVATION_COUNT + 1), AMPI_BCE, AMPI_MEAN, AMPI_MSE_SLOPE,
    AMPI_BCE_SLOPE, AMPI_MEAN_SLOPE
} ampi_loss;

/* Operations on elements a and b: an activation f of a, or leaky ReLU; its gradient AMPI_SLOPE + f,
   where a is dy and b is `saved`; a loss, where b is the target; the logarithm of a, p * a + b, a +
   b, a * b. p: a factor. */
enum {
    AMPI_LEAKY = AMP_ACTIVATION_COUNT, AMPI_SLOPE,
    AMPI_ADD = AMPI_MEAN_SLOPE + 1, AMPI_LOG, AMPI_ADD_TO_PRODUCT, AMPI_MULTIPLY
};

enum { AMPI_VALUES = 65536 };  /* of a type of 16 bits */

/* What backward reads of the forward pass. */
enum { AMPI_READS_NONE, AMPI_READS_INPUT, AMPI_READS_OUTPUT, AMPI_READS_BOTH };  /* bits */

/* y[i] = op of a[i], or of a[i] and b[i], see the operations above; n elements in whole groups of
   lanes. y may be a or b. A loop for each operation: of a switch in a loop, compilers would inline
   all. */
AMPI_KERNEL(ampi_elementwise, (int op, float* y, const float* a, const float* b, float p,
        size_t n), op, y, a, b, p, n) {
#define AMPI_CASE(number, value) case number: AMPI_LOOP(y, n, value); break
    switch (op) {
#define AMPI_X(NAME, name, ...) \
        AMPI_CASE(AMP_##NAME, ampi_act_##name(hw, a[i])); \
        AMPI_CASE(AMPI_SLOPE + (int)AMP_##NAME, ampi_slope_##name(hw, a[i], b[i]));
        AMP_ACTIVATION_LIST(AMPI_X)
#undef AMPI_X
        AMPI_CASE(AMPI_LEAKY, ampi_leaky(a[i], a[i], p));
        AMPI_CASE(AMPI_SLOPE + AMPI_LEAKY, ampi_leaky(a[i], b[i], p));

        AMPI_CASE(AMPI_MSE, a[i] - b[i]);
        AMPI_CASE(AMPI_BCE, ampi_bce_term(hw, a[i], b[i]));
        AMPI_CASE(AMPI_MEAN, a[i]);
        AMPI_CASE(AMPI_MSE_SLOPE, (a[i] - b[i]) * p);
        AMPI_CASE(AMPI_BCE_SLOPE, (ampi_act_sigmoid(hw, a[i]) - b[i]) * p);
        AMPI_CASE(AMPI_MEAN_SLOPE, ((void)i, p));

        AMPI_CASE(AMPI_LOG, ampi_log(hw, a[i]));
        AMPI_CASE(AMPI_ADD_TO_PRODUCT, ampi_fma(hw, p, a[i], b[i]));
        AMPI_CASE(AMPI_ADD, a[i] + b[i]);
        AMPI_CASE(AMPI_MULTIPLY, a[i] * b[i]);
        default: break;
    }
#undef AMPI_CASE
}

/* Elements [i, i + n) of a list's y = op(x, dy), or op(x) of an activation; n is at most AMPI_TILE.
   y may be an operand of its type. */
AMPI_FN void ampi_elements_tile(int op, float p, const ampi_argument* list, size_t i, size_t n) {
    AMPI_ALIGNED float a[AMPI_TILE], b[AMPI_TILE];
    float* y = ampi_open(&list[AMPI_ARG_Y], i, n, a);
    const float* x = ampi_view(&list[AMPI_ARG_X], i, n, a);
    const float* dy = op < AMPI_SLOPE ? NULL : ampi_view(&list[AMPI_ARG_DY], i, n, b);
    ampi_elementwise(op, y, x, dy, p, ampi_padded(n));
    ampi_store(&list[AMPI_ARG_Y], i, y, n);
}

/* An element-wise operator over n elements, in tiles that threads share. */
AMPI_FN void ampi_elements(int op, float p, const ampi_argument* list, size_t n) {
    if (!list[AMPI_ARG_Y].data) return;
    AMPI_PARALLEL_OVER(n, for (int64_t i = 0; i < (int64_t)n; i += AMPI_TILE)
        ampi_elements_tile(op, p, list, (size_t)i, ampi_tile_size(n, (size_t)i)));
}

/* A table of an activation f, or of its gradient AMPI_SLOPE + f, pays for many elements of 16 bits
   if it saves an exponential. One of y as `saved` takes none. */
AMPI_FN int ampi_table_pays(int op, amp_dtype t, size_t n) {
    static const unsigned char slow[] = {
#define AMPI_X(NAME, name, reads, slow) slow,
        AMP_ACTIVATION_LIST(AMPI_X) 0,
#undef AMPI_X
#define AMPI_X(NAME, name, reads, slow) slow && AMPI_READS_##reads == AMPI_READS_INPUT,
        AMP_ACTIVATION_LIST(AMPI_X)
#undef AMPI_X
    };
    return slow[op] && ampi_type_size(t) == 2 && n >= 4 * AMPI_VALUES;
}

/* table[bits] = f of the number with these 16 bits, of type t; of a gradient, its factor of dy. */
AMPI_FN void ampi_table_fill(int op, amp_dtype t, float* table) {
    AMPI_PARALLEL_FOR(1, for (int64_t i = 0; i < AMPI_VALUES; i += AMPI_TILE) {
        float v[AMPI_TILE], one[AMPI_TILE];
        uint16_t* const bits = (uint16_t*)(void*)(table + i);  /* where the results will lie */
        for (size_t l = 0; l < AMPI_TILE; l++) bits[l] = (uint16_t)((size_t)i + l);
        ampi_load_f32(v, bits, t, 0, AMPI_TILE);
        ampi_fill(one, AMPI_TILE, 1.0f);
        ampi_elementwise(op, table + i, op < AMPI_SLOPE ? v : one, v, 0.0f, AMPI_TILE);
    });
}

/* y = f(x), or of AMPI_SLOPE + f dx = dy * f'(saved), n elements: from a table of f or f' in the
   workspace where that pays. */
AMPI_FN void ampi_activation_run(int op, const ampi_argument* list, size_t n,
        const amp_exec* exec) {
    const int back = op >= AMPI_SLOPE;
    const ampi_argument* x = &list[back ? AMPI_ARG_DY : AMPI_ARG_X];  /* of backward: `saved` */
    const int tabled = ampi_table_pays(op, x->dtype, n) && list[AMPI_ARG_Y].data;
    AMPI_GROW_WORKSPACE(tabled ? AMP_ACTIVATION_WORKSPACE : 0)
    if (!tabled || !exec || !exec->workspace || exec->workspace_size < AMP_ACTIVATION_WORKSPACE) {
        ampi_elements(op, 0.0f, list, n);
        return;
    }

    float* table = ampi_align64(exec->workspace);
    ampi_table_fill(op, x->dtype, table);
    AMPI_PARALLEL_FOR(1, for (int64_t i = 0; i < (int64_t)n; i += AMPI_TILE) {
        AMPI_ALIGNED float v[AMPI_TILE], dy[AMPI_TILE];
        const size_t at = (size_t)i, count = ampi_tile_size(n, at), padded = ampi_padded(count);
        const uint16_t* bits = (const uint16_t*)x->data + at;
        for (size_t l = 0; l < count; l++) v[l] = table[bits[l]];
        memset(v + count, 0, (padded - count) * sizeof *v);
        if (back)
            ampi_elementwise(AMPI_MULTIPLY, v, ampi_view(&list[AMPI_ARG_X], at, count, dy), v,
                0.0f, padded);
        ampi_store(&list[AMPI_ARG_Y], at, v, count);
    });
}

/* Refuses a number that is no amp_activation. */
AMPI_FN amp_result ampi_check_activation(const amp_exec* exec, amp_activation f) {
    AMPI_REFUSE_OP((unsigned)f >= AMP_ACTIVATION_COUNT, AMP_ERR_DESC,
        "activation: %d is not an amp_activation", (int)f);
    return AMP_OK;
}

/* Checks the operands, then applies the function in tiles. */
AMP_DEF amp_result amp_activation_forward(amp_activation f, amp_ref x, amp_ref y, size_t n,
        const amp_exec* exec) {
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_SAME, n),
        AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n)
    };
    AMPI_TRY(ampi_check_activation(exec, f));
    AMPI_CHECK("activation", n, list);
    AMPI_COMPUTE_OP;
    ampi_activation_run((int)f, list, n, exec);
    AMPI_DONE_OP;
}

/* Checks the operands, then multiplies dy by the slope in tiles. */
AMP_DEF amp_result amp_activation_backward(amp_activation f, amp_ref dy, amp_ref saved,
        amp_ref dx, int accumulate, size_t n, const amp_exec* exec) {
    const int same = accumulate & AMP_ACCUMULATE_INPUT ? AMPI_IN : AMPI_SAME;
    const ampi_argument list[] = {
        AMPI_ARG(dy, same, n),
        AMPI_ARG(dx, ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT) | same, n),
        AMPI_ARG(saved, AMPI_IN, n)
    };
    AMPI_TRY(ampi_check_activation(exec, f));
    AMPI_CHECK("activation backward", n, list);
    AMPI_COMPUTE_OP;
    ampi_activation_run(AMPI_SLOPE + (int)f, list, n, exec);
    AMPI_DONE_OP;
}

/* Refuses a slope of leaky ReLU that is negative, infinite or a NaN. */
AMPI_FN amp_result ampi_check_leaky(const amp_exec* exec, float slope) {
    AMPI_REFUSE_OP(!ampi_in_range(&slope, 0.0f, AMPI_FLT_MAX), AMP_ERR_DESC,
        "leaky relu: slope %g must be finite and not negative", (double)slope);
    return AMP_OK;
}

/* Checks the operands, then applies the function in tiles. */
AMP_DEF amp_result amp_leaky_relu_forward(amp_ref x, amp_ref y, size_t n, float slope,
        const amp_exec* exec) {
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_SAME, n),
        AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n)
    };
    AMPI_TRY(ampi_check_leaky(exec, slope));
    AMPI_CHECK("leaky relu", n, list);
    AMPI_COMPUTE_OP;
    ampi_elements(AMPI_LEAKY, slope, list, n);
    AMPI_DONE_OP;
}

/* Checks the operands, then multiplies dy by 1 or the slope in tiles. */
AMP_DEF amp_result amp_leaky_relu_backward(amp_ref dy, amp_ref saved, amp_ref dx, int accumulate,
        size_t n, float slope, const amp_exec* exec) {
    const int same = accumulate & AMP_ACCUMULATE_INPUT ? AMPI_IN : AMPI_SAME;
    const ampi_argument list[] = {
        AMPI_ARG(dy, same, n),
        AMPI_ARG(dx, ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT) | same, n),
        AMPI_ARG(saved, AMPI_IN, n)
    };
    AMPI_TRY(ampi_check_leaky(exec, slope));
    AMPI_CHECK("leaky relu backward", n, list);
    AMPI_COMPUTE_OP;
    ampi_elements(AMPI_SLOPE + AMPI_LEAKY, slope, list, n);
    AMPI_DONE_OP;
}

/* --- dropout, sum, concat --- */

/* y = 0 where the uniform number of 24 bits is below p, else x * scale. y may be x. */
AMPI_KERNEL(ampi_drop, (float* y, const float* x, const uint32_t* bits, float p, float scale,
        size_t n), y, x, bits, p, scale, n) {
    AMPI_LOOP(y, n, ampi_float(ampi_bits(x[i] * scale)
        & ~ampi_mask((float)(int32_t)(bits[i] >> 8) * (1.0f / 16777216.0f) < p)));
}

/* Checks, then drops tile by tile. Element i takes random word `offset` + i of the seed; words come
   in fours, of which a tile's first may lie inside one. */
AMP_DEF amp_result amp_dropout_forward(amp_ref x, amp_ref y, size_t n, float p, uint64_t seed,
        uint64_t offset, const amp_exec* exec) {
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_SAME, n),
        AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n)
    };
    AMPI_CHECK("dropout", n, list);
    AMPI_REFUSE_OP(!ampi_in_range(&p, 0.0f, AMPI_BELOW_ONE), AMP_ERR_DESC,
        "dropout: probability %g is outside [0,1)", (double)p);
    AMPI_COMPUTE_OP;
    AMPI_PARALLEL_OVER(n, for (int64_t i = 0; i < (int64_t)n; i += AMPI_TILE) {
        float x_tile[AMPI_TILE], y_tile[AMPI_TILE];
        const size_t start = (size_t)i, count = ampi_tile_size(n, start),
            padded = ampi_padded(count);

        uint32_t words[AMPI_TILE + 4];
        const uint64_t word = offset + start;
        const size_t skip = (size_t)(word & 3u);
        ampi_random_fill(words, seed, word - skip, ampi_round_up(skip + padded, 4));

        float* v = ampi_open(&list[AMPI_ARG_Y], start, count, y_tile);
        ampi_drop(v, ampi_view(&list[AMPI_ARG_X], start, count, x_tile), words + skip, p,
            1.0f / (1.0f - p), padded);
        ampi_store(&list[AMPI_ARG_Y], start, v, count);
    });
    AMPI_DONE_OP;
}

/* Checks the operands, then adds in tiles. */
AMP_DEF amp_result amp_add_forward(amp_ref a, amp_ref b, amp_ref y, size_t n,
        const amp_exec* exec) {
    const ampi_argument list[] = {
        AMPI_ARG(a, AMPI_SAME, n),
        AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n),
        AMPI_ARG(b, AMPI_SAME, n)
    };
    AMPI_CHECK("add", n, list);
    AMPI_COMPUTE_OP;
    ampi_elements(AMPI_ADD, 0.0f, list, n);
    AMPI_DONE_OP;
}

/* Refuses columns [column, column + d) that lie outside of d_total. */
AMPI_FN amp_result ampi_check_columns(const amp_exec* exec, const char* op, size_t d,
        size_t d_total, size_t column) {
    AMPI_REFUSE_OP(d > d_total || column > d_total - d, AMP_ERR_SHAPE,
        "%s: columns %lld..%lld+%lld do not fit in %lld", op, ampi_shown(column),
        ampi_shown(column), ampi_shown(d), ampi_shown(d_total));
    return AMP_OK;
}

/* Checks, then copies row by row. */
AMP_DEF amp_result amp_concat_forward(amp_ref x, size_t d, amp_ref y, size_t d_total,
        size_t column, size_t rows, const amp_exec* exec) {
    const int none = d == 0 ? AMPI_NULL : 0;
    const size_t n = ampi_area(rows, d_total);
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN | none, rows * d),
        AMPI_ARG(y, AMPI_OUT | none, n)
    };
    AMPI_CHECK("concat", n, list);
    AMPI_TRY(ampi_check_columns(exec, "concat", d, d_total, column));
    if (d == 0) return AMP_OK;
    AMPI_COMPUTE_OP;
    AMPI_PARALLEL_OVER(rows * d, for (int64_t i = 0; i < (int64_t)rows; i++)
        amp_convert(ampi_from(y, (size_t)i * d_total + column), ampi_from(x, (size_t)i * d), d));
    AMPI_DONE_OP;
}

/* x of `rows` rows of d elements becomes, or with ACCUMULATE_INPUT is added to, columns [column,
   column + d) of y, whose rows have d_total elements. */
AMP_DEF amp_result amp_concat_backward(amp_ref y, size_t d_total, size_t column, amp_ref x,
        size_t d, size_t rows, int accumulate, const amp_exec* exec) {
    const int none = d == 0 ? AMPI_NULL : 0;  /* operands of no elements may be NULL */
    const int adds = accumulate & AMP_ACCUMULATE_INPUT;
    const size_t n = ampi_area(rows, d_total);
    const ampi_argument list[] = {
        AMPI_ARG(y, AMPI_IN | none, n),
        AMPI_ARG(x, AMPI_OUT | none | (adds ? AMPI_ADDS : 0), rows * d)
    };
    AMPI_CHECK("concat backward", n, list);
    AMPI_TRY(ampi_check_columns(exec, "concat backward", d, d_total, column));
    if (d == 0) return AMP_OK;

    AMPI_COMPUTE_OP;
    AMPI_PARALLEL_OVER(rows * d, for (int64_t row = 0; row < (int64_t)rows; row++) {
        const size_t from = (size_t)row * d_total + column, to = (size_t)row * d;
        float tile[AMPI_TILE];
        size_t count;
        if (!adds) amp_convert(ampi_from(x, to), ampi_from(y, from), d);
        else for (size_t i = 0; i < d; i += count) {
            count = ampi_tile_size(d, i);
            ampi_load_f32(tile, y.data, y.dtype, from + i, count);
            ampi_store(&list[AMPI_ARG_Y], to + i, tile, count);
        }
    });
    AMPI_DONE_OP;
}

/* --- embedding --- */
/* Refuses tokens that are no rows of a vocabulary. */
AMPI_FN amp_result ampi_check_tokens(const amp_exec* exec, const char* op, const int32_t* tokens,
        size_t n, size_t vocabulary) {
    AMPI_REFUSE_OP(n > 0 && !tokens, AMP_ERR_ARGUMENT, "%s: tokens is NULL", op);
    for (size_t i = 0; i < n; i++)
        AMPI_REFUSE_OP(tokens[i] < 0 || (size_t)tokens[i] >= vocabulary, AMP_ERR_ARGUMENT,
            "%s: token %d at position %llu is outside 0..%lld", op, (int)tokens[i], (ampi_ull)i,
            ampi_shown(vocabulary) - 1);
    return AMP_OK;
}

/* Checks, then copies row by row. */
AMP_DEF amp_result amp_embedding_forward(const int32_t* tokens, amp_ref w, amp_ref y, size_t n,
        size_t vocabulary, size_t d, const amp_exec* exec) {
    const size_t count = ampi_area(n, d), all = ampi_area(vocabulary, d);
    const ampi_argument list[] = {
        AMPI_ARG(w, AMPI_IN | AMPI_NULL, all),
        AMPI_ARG(y, AMPI_OUT | (count ? 0 : AMPI_NULL), count)
    };
    AMPI_CHECK("embedding", ampi_max_size(count, all), list);
    AMPI_TRY(ampi_check_tokens(exec, "embedding", tokens, n, vocabulary));
    AMPI_REFUSE_OP(count > 0 && !w.data, AMP_ERR_ARGUMENT, "embedding: w is NULL");
    AMPI_COMPUTE_OP;
    AMPI_PARALLEL_OVER(count, for (int64_t i = 0; i < (int64_t)n; i++)
        amp_convert(ampi_from(y, (size_t)i * d), ampi_from(w, (size_t)tokens[i] * d), d));
    AMPI_DONE_OP;
}

/* The first of tokens [from, to) that is `token`, or `to`. Groups are compared at once. */
AMPI_FN size_t ampi_find_token(const int32_t* tokens, size_t from, size_t to, int32_t token) {
    for (int found = 0; from + AMPI_LANES <= to; from += AMPI_LANES) {
        for (size_t l = 0; l < AMPI_LANES; l++) found |= tokens[from + l] == token;
        if (found) break;
    }
    while (from < to && tokens[from] != token) from++;
    return from;
}

/* The row of dw of the token at position `first`, unless an earlier position has it too: the sum of
   the rows of dy at its positions, as they ascend. */
AMPI_FN void ampi_embedding_row(const ampi_argument* dy, const ampi_argument* dw,
        const int32_t* tokens, size_t first, size_t n, size_t d) {
    float sum[AMPI_ROWS_TILE], row[AMPI_ROWS_TILE];
    const int32_t token = tokens[first];
    if (ampi_find_token(tokens, 0, first, token) < first) return;
    for (size_t count, start = 0; start < d; start += count) {
        count = ampi_part_size(d, start);
        ampi_load_f32(sum, dy->data, dy->dtype, first * d + start, count);
        for (size_t i = first; (i = ampi_find_token(tokens, i + 1, n, token)) < n; ) {
            ampi_load_f32(row, dy->data, dy->dtype, i * d + start, count);
            for (size_t k = 0; k < count; k++) sum[k] += row[k];
        }
        ampi_store(dw, (size_t)token * d + start, sum, count);
    }
}

/* Checks; rows without a token become 0, unless gradients are added; then sums row by row. */
AMP_DEF amp_result amp_embedding_backward(amp_ref dy, const int32_t* tokens, amp_ref dw,
        int accumulate, size_t n, size_t vocabulary, size_t d, const amp_exec* exec) {
    const size_t count = ampi_area(n, d), all = ampi_area(vocabulary, d);
    const int use = ampi_gradient_use(accumulate, AMP_ACCUMULATE_PARAMS);
    const ampi_argument list[] = {
        AMPI_ARG(dy, AMPI_IN | (count ? 0 : AMPI_NULL), count),
        AMPI_ARG(dw, use, all)
    };
    AMPI_CHECK("embedding backward", ampi_max_size(count, all), list);
    AMPI_TRY(ampi_check_tokens(exec, "embedding backward", tokens, n, vocabulary));
    if (!dw.data) return AMP_OK;
    if (!(use & AMPI_ADDS)) memset(dw.data, 0, all * ampi_type_size(dw.dtype));
    AMPI_COMPUTE_OP;
    AMPI_PARALLEL_OVER(count, for (int64_t i = 0; i < (int64_t)n; i++)
        ampi_embedding_row(&list[0], &list[1], tokens, (size_t)i, n, d));
    AMPI_DONE_OP;
}

/* >>impl-rows   Operators over rows: batch norm, layer norm, RMS norm, softmax, products.
   A row is the D features of a layer norm or softmax, or the pixels of one channel and image of
   a batch norm. Sums of rows, or of columns over rows, come first; then each row is written in
   one pass. */

/* An operator over rows of d elements. */
typedef struct ampi_rows {
    const ampi_argument* list;
    size_t rows, d;
    double eps;              /* of layer norm */
    int rms;                 /* 1: of RMS norm, which takes 0 for the mean */
    size_t ld;               /* elements from a row to the next */
    size_t pixels;           /* rows of an image, if these are pixels of maps, else 1 */
    const int32_t* labels;   /* of a cross-entropy, one a row; NULL: softmax alone */
    const int32_t* ignored;  /* the label of rows that do not count; NULL: none */
    const float* weights;    /* one a class; NULL: 1 */
    float smoothing;         /* of a cross-entropy: the part of the target shared by all classes */
    float shared_weight;     /* smoothing * the mean of all weights */
    float factor;            /* of a result of softmax, or of the gradient */
} ampi_rows;

/* Columns [column, column + n) of rows [row, row + rows), pixels of maps v[images, f->d, pixels],
   between these and a tile where each row's are neighbours; out: from the tile to the maps. */
AMPI_FN void ampi_map_turn(const ampi_rows* f, const ampi_argument* v, size_t row, size_t column,
        size_t rows, size_t n, float* tile, int out) {
    float run[AMPI_ROWS];  /* pixels of one class, which lie side by side */
    for (size_t k; rows > 0; rows -= k, row += k, tile += k * n) {
        const size_t pixel = row % f->pixels, image = (row - pixel) * f->d;
        k = ampi_min_size(rows, f->pixels - pixel);
        for (size_t c = 0; c < n; c++) {
            const size_t at = image + (column + c) * f->pixels + pixel;
            if (!out) ampi_load_f32(run, v->data, v->dtype, at, k);
            for (size_t i = 0; i < k; i++) {
                if (out) run[i] = tile[i * n + c];
                else tile[i * n + c] = run[i];
            }
            if (out) ampi_store(v, at, run, k);
        }
    }
}

/* An operand as floats, a part at a time: in place, or in the tile until another part is asked for.
   missing: each element of a NULL operand. all: see ampi_view_rows. */
typedef struct ampi_reader {
    AMPI_ALIGNED float tile[AMPI_ROWS_TILE];
    const ampi_argument* v;
    const ampi_rows* maps;  /* whose rows are pixels of maps; or NULL */
    float missing;
    size_t all, at, n;
    const float* floats;  /* elements [at, at + n) */
} ampi_reader;
/* Begins to read an operand of a call row by row; a missing gamma reads as 1, other missing ones
   as 0. */
AMPI_FN void ampi_reader_open(ampi_reader* r, const ampi_argument* list, int arg) {
    r->v = &list[arg];
    r->maps = NULL;
    r->missing = arg == AMPI_ARG_GAMMA ? 1.0f : 0.0f;
    r->all = r->v->data == list[AMPI_ARG_Y].data ? 0 : r->v->cols;
    r->floats = NULL;
}

/* Declares reader r of f's operand at `arg`. */
#define AMPI_OPEN_READER(r, arg) ampi_reader r; ampi_reader_open(&r, f->list, arg)
/* Elements [at, at + n), rows of d. */
AMPI_FN const float* ampi_read(ampi_reader* r, size_t at, size_t n, size_t d) {
    if (r->floats && r->at == at && r->n == n) return r->floats;
    if (!r->v->data) ampi_fill(r->tile, n, r->missing);
    if (r->maps) {
        ampi_map_turn(r->maps, r->v, at / r->maps->d, at % r->maps->d, n / d, d, r->tile, 0);
        memset(r->tile + n, 0, AMPI_LANES * sizeof *r->tile);
    }
    r->floats = r->v->data && !r->maps ? ampi_view_rows(r->v, at, n, d, r->all, r->tile) : r->tile;
    r->at = at;
    r->n = n;
    return r->floats;
}

/* What is done to rows:
     NORM         y = (x - mean) * scale * gamma + beta
     NORM_DX      y = (dy * gamma - a - (x - mean) * b) * scale
     EXP          y = exp(x - mean)
     DIVIDE       y = (x * scale - base) * factor
     SOFTMAX_DX   y = x * (dy - mean) */
typedef enum ampi_row_op { AMPI_NORM, AMPI_NORM_DX, AMPI_EXP, AMPI_DIVIDE,
        AMPI_SOFTMAX_DX } ampi_row_op;
/* The numbers of an operation on rows. NULL: of each column or row 0, of scale and gamma 1. */
typedef struct ampi_row_args {
    const float *mean, *scale, *a, *b;  /* one a row, or if statistics_by_column one a column */
    const float *gamma, *beta;          /* one a row, or if params_by_column one a column */
    int statistics_by_column, params_by_column;
    float base, factor;                 /* of all rows */
} ampi_row_args;

/* Arguments of which all are absent or 0. */
AMPI_INLINE ampi_row_args ampi_no_row_args(void) {
    ampi_row_args q;
    AMPI_CLEAR(q);
    return q;
}

/* An array of ampi_row_args beside a row. */
typedef struct ampi_row_lanes {
    const float* first;      /* the 16 numbers from column i on lie at first + step * i */
    size_t step;             /* 1: one a column; 0: all of them are `same` */
    float same[AMPI_LANES];
} ampi_row_lanes;
/* The numbers of array v beside row `row`; `missing`: those of NULL. */
AMPI_INLINE void ampi_row_lanes_of(ampi_row_lanes* q, const float* v, int by_column, size_t row,
        float missing) {
    const float same = v && !by_column ? v[row] : missing;
    q->step = v && by_column;
    q->first = q->step ? v : q->same;
    for (size_t l = 0; l < AMPI_LANES; l++) q->same[l] = same;
}

/* In AMPI_LOOP: the number beside element i. */
#define AMPI_LANE_OF(q) (q).first[ampi_i * (q).step + ampi_l]

/* NORM_DX if dy, else NORM. A missing beta is -0, as adding +0 would change -0. */
AMPI_INLINE void ampi_norm_row(int hw, const ampi_row_args* q, float* y, const float* dy,
        const float* x, size_t row, size_t n) {
    const int by_column = q->statistics_by_column;
    ampi_row_lanes mean, scale, a, b, gamma, beta;
    ampi_row_lanes_of(&mean, q->mean, by_column, row, 0.0f);
    ampi_row_lanes_of(&scale, q->scale, by_column, row, 1.0f);
    ampi_row_lanes_of(&a, q->a, by_column, row, 0.0f);
    ampi_row_lanes_of(&b, q->b, by_column, row, 0.0f);
    ampi_row_lanes_of(&gamma, q->gamma, q->params_by_column, row, 1.0f);
    ampi_row_lanes_of(&beta, q->beta, q->params_by_column, row, -0.0f);
    if (dy) AMPI_LOOP(y, n, ampi_fma(hw, AMPI_LANE_OF(mean) - x[i], AMPI_LANE_OF(b),
            ampi_fma(hw, dy[i], AMPI_LANE_OF(gamma), -AMPI_LANE_OF(a))) * AMPI_LANE_OF(scale));
    else
        AMPI_LOOP(y, n, ampi_fma(hw, (x[i] - AMPI_LANE_OF(mean)) * AMPI_LANE_OF(scale),
            AMPI_LANE_OF(gamma),
        AMPI_LANE_OF(beta)));
}

/* A row operator over `rows` rows of n floats, which lie one behind another; op is a constant
   where it is called. */
AMPI_INLINE void ampi_rows_each_as(int hw, ampi_row_op op, const ampi_row_args* q, float* y,
        const float* dy, const float* x, size_t rows, size_t n) {
    for (size_t r = 0; r < rows; r++, y += n, x += n) {
        const float mean = op >= AMPI_EXP ? q->mean[r] : 0.0f, scale = op == AMPI_DIVIDE
            ? q->scale[r] : 1.0f;
        const float base = q->base, factor = q->factor, *g = dy ? dy + r * n : NULL;
        if (op <= AMPI_NORM_DX) ampi_norm_row(hw, q, y, op == AMPI_NORM ? NULL : g, x, r, n);
        else if (op == AMPI_EXP) AMPI_LOOP(y, n, ampi_exp(hw, x[i] - mean));
        else if (op == AMPI_DIVIDE) AMPI_LOOP(y, n, ampi_fma(hw, x[i], scale, -base) * factor);
        else AMPI_LOOP(y, n, x[i] * (g[i] - mean));
    }
}

/* ampi_rows_each_as with each operator as a constant. */
AMPI_KERNEL(ampi_rows_each, (ampi_row_op op, const ampi_row_args* q, float* y, const float* dy,
        const float* x, size_t rows, size_t n), op, q, y, dy, x, rows, n) {
#define AMPI_CASE(number) case number: ampi_rows_each_as(hw, number, q, y, dy, x, rows, n); break
    switch (op) {
        AMPI_CASE(AMPI_NORM);
        AMPI_CASE(AMPI_NORM_DX);
        AMPI_CASE(AMPI_EXP);
        AMPI_CASE(AMPI_DIVIDE);
        AMPI_CASE(AMPI_SOFTMAX_DX);
    }
#undef AMPI_CASE
}

/* What is summed in double. */
typedef enum ampi_terms {
    AMPI_SUM,          /* sum: x */
    AMPI_PRODUCTS,     /* dot: y * x */
    AMPI_DISTANCES,    /* dot: (x - sum)^2, where sum holds the row's mean */
    AMPI_DOT,          /* sum: y * gamma; dot: y * gamma * (x - mean) * scale */
    AMPI_SQUARES,      /* sum: x; dot: (x - mean)^2 */
    AMPI_SQUARES_LESS  /* sum: x - mean; dot: (x - mean)^2 */
} ampi_terms;
/* Sums of each row of a call; those of a single row also by lanes, from which a call can go on. */
typedef struct ampi_row_sums {
    double sum[AMPI_ROWS], dot[AMPI_ROWS], sum_lanes[AMPI_LANES], dot_lanes[AMPI_LANES];
} ampi_row_sums;

/* An element's terms, see ampi_terms: `sum`, and g * d for dot. */
typedef struct ampi_term { float sum, g, d; } ampi_term;

/* What one element adds to the sums of a kind of terms: sum takes t.sum, dot takes the product
   of t.g and t.d. y: y * gamma in sums of rows; center: a mean in double. */
AMPI_INLINE ampi_term ampi_term_of(ampi_terms terms, float y, float x, float mean, float scale,
        double center) {
    ampi_term t;
    t.d = terms >= AMPI_DOT ? x - mean : terms == AMPI_DISTANCES ? (float)((double)x - center) : x;
    if (terms == AMPI_DOT) t.d *= scale;
    t.g = terms == AMPI_PRODUCTS || terms == AMPI_DOT ? y : t.d;
    t.sum = terms == AMPI_DOT ? y : terms == AMPI_SQUARES_LESS ? t.d : x;
    return t;
}

/* Sixteen elements; in: a mask of those that count, NULL for all. */
AMPI_INLINE void ampi_add_terms(int hw, ampi_terms terms, double* sum, double* dot, const float* y,
        const float* x, const float* gamma, float mean, float scale, double center,
        const uint32_t* in) {
    AMPI_IN_REGISTERS for (size_t l = 0; l < AMPI_LANES; l++) {
        const ampi_term t = ampi_term_of(terms, gamma ? y[l] * gamma[l] : y[l], x[l], mean, scale,
            center);
        const float d = in ? ampi_and(t.d, in[l]) : t.d;
        if (terms == AMPI_SUM || terms >= AMPI_DOT)
            sum[l] += (double)(in ? ampi_and(t.sum, in[l]) : t.sum);
        if (terms != AMPI_SUM)
            dot[l] = ampi_add_product(hw, in ? ampi_and(t.g, in[l]) : t.g, d, dot[l]);
    }
}

/* Sums of `rows` rows of n elements of y and x, one behind another, to s->sum and s->dot: those
   that `terms` have. more: a single row goes on from its lanes in s. */
AMPI_INLINE void ampi_sum_rows_as(int hw, ampi_terms terms, ampi_row_sums* s, const float* y,
        const float* x, const ampi_row_args* q, size_t rows, size_t n, int more) {
    const size_t ahead = ampi_ahead(n);
    ampi_row_lanes gamma;
    for (size_t r = 0; r < rows; r++, y += n, x += n) {
        const float mean = terms >= AMPI_DOT && q->mean ? q->mean[r] : 0.0f;
        const float scale = terms >= AMPI_DOT && q->scale ? q->scale[r] : 1.0f;
        const double center = terms == AMPI_DISTANCES ? s->sum[r] : 0.0;  /* the mean */
        double sum[AMPI_LANES] = { 0 }, dot[AMPI_LANES] = { 0 };
        if (more) {
            memcpy(sum, s->sum_lanes, sizeof sum);
            memcpy(dot, s->dot_lanes, sizeof dot);
        }
        if (terms == AMPI_DOT) ampi_row_lanes_of(&gamma, q->gamma, q->params_by_column, r, 1.0f);

        for (size_t i = 0; i < n; i += AMPI_LANES) {
            const float* g = terms == AMPI_DOT ? gamma.first + i * gamma.step : NULL;
            if (terms != AMPI_DISTANCES) AMPI_FETCH(x + i, ahead);  /* whose x are in the cache */
            if (terms == AMPI_PRODUCTS || terms == AMPI_DOT) AMPI_FETCH(y + i, ahead);

            /* whole groups need no mask */
            if (n - i >= AMPI_LANES)
                ampi_add_terms(hw, terms, sum, dot, y + i, x + i, g, mean, scale, center, NULL);
            else
                ampi_add_terms(hw, terms, sum, dot, y + i, x + i, g, mean, scale, center,
                    ampi_lanes_in(n - i));
        }

        /* what a kind does not sum stays in s */
        if (terms == AMPI_SUM || terms >= AMPI_DOT) s->sum[r] = ampi_lane_total(sum);
        if (terms != AMPI_SUM) s->dot[r] = ampi_lane_total(dot);
        if (rows > 1) continue;
        memcpy(s->sum_lanes, sum, sizeof sum);
        memcpy(s->dot_lanes, dot, sizeof dot);
    }
}

/* Sums of rows of n elements; `more`: one row goes on from s. y may be x. With hw each kind has its
   own loop. */
AMPI_KERNEL(ampi_sum_rows, (ampi_terms terms, ampi_row_sums* s, const float* y, const float* x,
        const ampi_row_args* q, size_t rows, size_t n, int more), terms, s, y, x, q, rows, n,
        more) {
#define AMPI_CASE(number) \
    case number: ampi_sum_rows_as(hw, number, s, y, x, q, rows, n, more); break
    switch (hw ? (int)terms : -1) {
        AMPI_CASE(AMPI_SUM);
        AMPI_CASE(AMPI_PRODUCTS);
        AMPI_CASE(AMPI_DISTANCES);
        AMPI_CASE(AMPI_DOT);
        AMPI_CASE(AMPI_SQUARES);
        AMPI_CASE(AMPI_SQUARES_LESS);
        default: ampi_sum_rows_as(hw, terms, s, y, x, q, rows, n, more);
    }
#undef AMPI_CASE
}

/* Adds to sum[i] and dot[i] what `rows` rows of n elements of y and x have in column i, see
   ampi_terms: SQUARES and the like of x, or DOT with gamma 1. Columns are summed in whole groups of
   lanes. */
AMPI_INLINE void ampi_sum_columns_as(int hw, ampi_terms terms, double* AMPI_RESTRICT sum,
        double* AMPI_RESTRICT dot, const float* AMPI_RESTRICT y, const float* AMPI_RESTRICT x,
        const ampi_row_args* q, size_t rows, size_t n) {
    const size_t ahead = ampi_ahead(n);
    ampi_row_lanes mean, scale;
    for (size_t r = 0; r < rows; r++, y += n, x += n) {
        ampi_row_lanes_of(&mean, q->mean, q->statistics_by_column, r, 0.0f);
        ampi_row_lanes_of(&scale, q->scale, q->statistics_by_column, r, 1.0f);

        /* ampi_i and ampi_l: the group and the lane of AMPI_LANE_OF */
        for (size_t ampi_i = 0; ampi_i < n; ampi_i += AMPI_LANES) {
            AMPI_FETCH(x + ampi_i, ahead);
            if (terms == AMPI_DOT) AMPI_FETCH(y + ampi_i, ahead);
            AMPI_IN_REGISTERS for (size_t ampi_l = 0; ampi_l < AMPI_LANES; ampi_l++) {
                const size_t i = ampi_i + ampi_l;
                const ampi_term t = ampi_term_of(terms, y[i], x[i], AMPI_LANE_OF(mean),
                    AMPI_LANE_OF(scale), 0.0);
                sum[i] += (double)t.sum;
                dot[i] = ampi_add_product(hw, t.g, t.d, dot[i]);
            }
        }
    }
}

/* ampi_sum_columns_as with each kind of terms as a constant, where an fma is cheap. */
AMPI_KERNEL(ampi_sum_columns, (ampi_terms terms, double* sum, double* dot, const float* y,
        const float* x, const ampi_row_args* q, size_t rows, size_t n), terms, sum, dot, y, x, q,
        rows, n) {
    if (!hw) ampi_sum_columns_as(hw, terms, sum, dot, y, x, q, rows, n);
    else if (terms == AMPI_DOT) ampi_sum_columns_as(hw, AMPI_DOT, sum, dot, y, x, q, rows, n);
    else if (terms == AMPI_SQUARES)
        ampi_sum_columns_as(hw, AMPI_SQUARES, sum, dot, y, x, q, rows, n);
    else ampi_sum_columns_as(hw, AMPI_SQUARES_LESS, sum, dot, y, x, q, rows, n);
}

/* Has a row of a loss the label that is ignored? */
AMPI_INLINE int ampi_is_ignored(const ampi_rows* f, size_t row) {
    return f->ignored && f->labels[row] == *f->ignored;
}

/* Rows of a call without parameters, losses or accumulation. */
AMPI_FN ampi_rows ampi_rows_of(const ampi_argument* list, size_t rows, size_t d) {
    ampi_rows f;
    AMPI_CLEAR(f);
    f.list = list;
    f.rows = rows;
    f.d = f.ld = d;
    f.pixels = 1;
    return f;
}

/* Work on rows [row, row + rows), which fit a tile or are one row; and on all rows. */
typedef void (*ampi_rows_work)(const ampi_rows* f, size_t row, size_t rows);
/* Rows worked on at a time: as many as a tile holds, or one if they are apart. */
AMPI_FN size_t ampi_row_step(const ampi_rows* f) {
    return f->ld == f->d ? ampi_rows_of_tile(f->d) : 1;
}

/* Runs `work` over all rows, some at a time. */
AMPI_FN void ampi_rows_all(ampi_rows_work work, const ampi_rows* f) {
    const int64_t step = (int64_t)ampi_row_step(f), n = (int64_t)f->rows;
    AMPI_PARALLEL_OVER(f->rows * f->d, for (int64_t i = 0; i < n; i += step)
        work(f, (size_t)i, ampi_min_size(f->rows - (size_t)i, (size_t)step)));
}

/* Sums of whole rows of d elements, from element `at` of x and y on. y may be x. */
AMPI_FN void ampi_sum_operand(ampi_terms terms, ampi_row_sums* s, ampi_reader* y, ampi_reader* x,
        size_t at, size_t rows, size_t d) {
    for (size_t n, i = 0; (n = ampi_part_size(d, i)) > 0; i += n)
        ampi_sum_rows(terms, s, ampi_read(y, at + i, rows * n, n),
            ampi_read(x, at + i, rows * n, n), NULL, rows, n, i > 0);
}

/* A result, if any, from n <= AMPI_TILE sums. */
AMPI_FN void ampi_store_sums(const ampi_argument* y, size_t i, const double* sums, size_t n) {
    float v[AMPI_TILE];
    if (!y->data) return;
    for (size_t l = 0; l < n; l++) v[l] = (float)sums[l];
    ampi_store(y, i, v, n);
}

/* Writes dx if q->a is set, else y, of rows of d elements from element `at` on. gamma and beta are
   of columns, or NULL. */
AMPI_FN void ampi_norm_apply(ampi_row_args* q, ampi_reader* dy, ampi_reader* x, ampi_reader* gamma,
        ampi_reader* beta, const ampi_argument* y, size_t at, size_t rows, size_t d) {
    AMPI_ALIGNED float tile[AMPI_ROWS_TILE];
    for (size_t n, i = 0; (n = ampi_part_size(d, i)) > 0; i += n, at += n) {
        const float* v = ampi_read(x, at, rows * n, n);
        float* to = ampi_open(y, at, n, tile);
        if (gamma) q->gamma = ampi_read(gamma, i, n, n);
        if (beta) q->beta = ampi_read(beta, i, n, n);
        const float* g = q->a ? ampi_read(dy, at, rows * n, n) : NULL;
        ampi_rows_each(g ? AMPI_NORM_DX : AMPI_NORM, q, to, g, v, rows, n);
        ampi_store(y, at, to, rows * n);
    }
}

/* --- batch norm --- */

/* Channels are summed and normed in groups: as many as fit a tile, at most AMPI_BN_GROUP. A channel
   of several pixels is summed by lanes, a tile at a time: as many of its planes as fit, or a part
   of one. A plane of 128 pixels or more, in whole groups of lanes, is a tile: its pixels stay on
   their lanes, and it is read in place. Channels of one pixel are columns, summed image after
   image. */
enum { AMPI_BN_GROUP = 512 };
typedef struct ampi_bn_plan {
    size_t n, channels, spatial;  /* images, channels of one, pixels of a plane */
    size_t groups, per_group;     /* groups of channels, channels in one */
    size_t planes;                /* of one channel, in a tile */
    float eps, momentum;
    unsigned char* held;          /* of amp_batch_norm_shape */
} ampi_bn_plan;

/* Frozen statistics are constants: both passes are those of evaluation. */
AMPI_FN int ampi_bn_trains(const amp_batch_norm_shape* s, int training) {
    return training && s && !s->frozen;
}

/* Checks the shape of a batch norm, and finds how channels are grouped. */
AMPI_FN amp_result ampi_bn_plan_make(const amp_batch_norm_shape* s, int training, ampi_bn_plan* p,
        const amp_logger* logger) {
    AMPI_CLEAR(*p);
    AMPI_REFUSE_CALL(!s, AMP_ERR_ARGUMENT, "batch norm: the shape is NULL");
    AMPI_REFUSE_CALL(s->n < 1 || s->channels < 1 || s->spatial < 1, AMP_ERR_SHAPE,
        "batch norm: input %dx%dx%d needs sizes >= 1", s->n, s->channels, s->spatial);
    AMPI_REFUSE_CALL(ampi_bn_trains(s, training) && s->n == 1 && s->spatial == 1, AMP_ERR_SHAPE,
        "batch norm: training needs more than one value per channel, not 1x%dx1", s->channels);
    p->eps = ampi_is_zero(&s->eps) ? 1e-5f : s->eps;
    p->momentum = ampi_default_at(&s->momentum, 0.1f);
    AMPI_REFUSE_CALL(!ampi_has_finite_bits(&p->eps) || p->eps <= 0.0f, AMP_ERR_DESC,
        "batch norm: eps %g must be greater than 0 and finite", (double)s->eps);
    AMPI_REFUSE_CALL(!ampi_in_range(&p->momentum, 0.0f, 1.0f), AMP_ERR_DESC,
        "batch norm: momentum %g must lie in 0..1", (double)s->momentum);

    p->n = (size_t)s->n;
    p->channels = (size_t)s->channels;
    p->spatial = (size_t)s->spatial;
    p->held = s->held;

    /* see AMPI_BN_GROUP */
    p->planes = p->spatial < AMPI_TILE ? AMPI_TILE / p->spatial : 1;
    p->per_group = ampi_min_size(p->planes, AMPI_BN_GROUP);
    p->groups = ampi_div_up(p->channels, p->per_group);
    if (p->spatial >= 8 * AMPI_LANES && p->spatial % AMPI_LANES == 0) p->planes = 1;
    return AMP_OK;
}

/* A call of batch norm. */
typedef struct ampi_bn {
    ampi_bn_plan p;
    const ampi_argument* list;
    float *running_mean, *running_var;  /* one a channel; forward alone */
    int constant;  /* are the statistics constants: of evaluation forward, frozen backward? */
} ampi_bn;
/* Channels [first, first + width), and numbers of each: those of ampi_row_args, and sums. scale is
   1/sqrt(variance + eps), backward at last times gamma. */
typedef struct ampi_bn_group {
    size_t first, width;
    float mean[AMPI_BN_GROUP], scale[AMPI_BN_GROUP], gamma[AMPI_BN_GROUP], beta[AMPI_BN_GROUP];
    float a[AMPI_BN_GROUP], b[AMPI_BN_GROUP];
    double sum[AMPI_BN_GROUP], dot[AMPI_BN_GROUP];
} ampi_bn_group;
/* The group's elements of the operand at `arg`, one a channel; `missing` of a NULL one. */
AMPI_FN void ampi_bn_read(const ampi_bn* f, const ampi_bn_group* g, int arg, float missing,
        float* lanes) {
    const ampi_argument* v = &f->list[arg];
    if (v->data) ampi_load_f32(lanes, v->data, v->dtype, g->first, g->width);
    else ampi_fill(lanes, g->width, missing);
}

/* The channels of group number `group`, with their gamma. */
AMPI_FN void ampi_bn_group_open(const ampi_bn* f, size_t group, ampi_bn_group* g) {
    AMPI_CLEAR(*g);
    g->first = group * f->p.per_group;
    g->width = ampi_min_size(f->p.channels - g->first, f->p.per_group);
    ampi_bn_read(f, g, AMPI_ARG_GAMMA, 1.0f, g->gamma);
}

/* n elements of a channel as floats, from element `at` on: of a plane, or of several whole ones. */
AMPI_FN const float* ampi_bn_tile(const ampi_bn_plan* p, ampi_reader* x, size_t at, size_t n) {
    if (n <= p->spatial) return ampi_read(x, at, n, n);
    for (size_t i = 0; i < n; i += p->spatial)
        ampi_load_f32(x->tile + i, x->v->data, x->v->dtype, at + i * p->channels, p->spatial);
    memset(x->tile + n, 0, AMPI_LANES * sizeof *x->tile);
    x->floats = NULL;
    return x->tile;
}

/* Sums of a group's channels to g->sum and g->dot, see ampi_terms, with mean g->mean: AMPI_DOT of
   dy (y there) and x, other terms of x alone. */
AMPI_FN void ampi_bn_sums(const ampi_bn* f, ampi_bn_group* g, ampi_terms terms) {
    const ampi_bn_plan* p = &f->p;
    const size_t image = p->channels * p->spatial, first = g->first * p->spatial;  /* elements */
    ampi_row_args q = ampi_no_row_args();
    AMPI_OPEN_READER(x, AMPI_ARG_X);
    AMPI_OPEN_READER(dy, AMPI_ARG_DY);
    q.mean = g->mean;

    /* channels of one pixel are columns, an image is their row */
    if (p->spatial == 1) {
        q.statistics_by_column = 1;
        for (size_t at = first; at < p->n * image; at += image) {
            const float* v = ampi_read(&x, at, g->width, g->width);
            const float* u = terms == AMPI_DOT ? ampi_read(&dy, at, g->width, g->width) : v;
            ampi_sum_columns(terms, g->sum, g->dot, u, v, &q, 1, g->width);
        }
        return;
    }

    /* other channels are a row each: a tile of whole planes, or of a part of one, goes on from the
       tile before */
    for (size_t c = 0; c < g->width; c++, q.mean++) {
        ampi_row_sums s;
        AMPI_CLEAR(s);  /* kinds of terms without products leave s.dot */
        for (size_t i = 0; i < p->n; i += p->planes)
            for (size_t k = 0; k < p->spatial; k += AMPI_TILE) {
                const size_t at = i * image + first + c * p->spatial + k;
                const size_t n = ampi_min_size(p->n - i, p->planes) * ampi_tile_size(p->spatial, k);
                const float* v = ampi_bn_tile(p, &x, at, n);
                const float* u = terms == AMPI_DOT ? ampi_bn_tile(p, &dy, at, n) : v;
                ampi_sum_rows(terms, &s, u, v, &q, 1, n, i + k > 0);
            }
        g->sum[c] = s.sum[0];
        g->dot[c] = s.dot[0];
    }
}

/* g->mean becomes a pivot near each channel's mean: the mean of its first pixels (at most 16) in
   x's type, so differences from it are exact floats unless much larger than x. It is 0 if that mean
   is no number or a difference might be infinite. */
AMPI_FN void ampi_bn_pivot(const ampi_bn* f, ampi_bn_group* g) {
    const ampi_argument* x = &f->list[AMPI_ARG_X];
    const amp_dtype t = ampi_dtype_or_f32(x->dtype);

    /* of one pixel a plane, channels are neighbours */
    const size_t n = ampi_min_size(f->p.spatial, AMPI_LANES);
    if (n == 1) ampi_bn_read(f, g, AMPI_ARG_X, 0.0f, g->mean);
    for (size_t c = 0; c < g->width && n > 1; c++) {
        float v[AMPI_LANES];
        double sum = 0.0;
        ampi_load_f32(v, x->data, t, (g->first + c) * f->p.spatial, n);
        for (size_t l = 0; l < n; l++) sum += (double)v[l];
        g->mean[c] = (float)(sum / (double)n);
    }

    /* rounded to x's type; compilers see that one of 16 bits fits the array */
    if (t != AMP_F32) {
        uint16_t rounded[AMPI_BN_GROUP];
        const amp_dtype low = t == AMP_BF16 ? AMP_BF16 : AMP_F16;
        ampi_store_f32(rounded, low, 0, g->mean, g->width);
        ampi_load_f32(g->mean, rounded, low, 0, g->width);
    }
    for (size_t c = 0; c < g->width; c++)
        if (!(fabs((double)g->mean[c]) < 1e30)) g->mean[c] = 0.0f;
}

/* Means to g->sum, and the sum of squared distances from them to g->dot, in one pass over a
   channel's M = `values` values: squares = q - M (mean - pivot)^2, where q sums (x - pivot)^2.
   Little cancels: the pivot is the mean of m values, so (mean - pivot)^2 is at most M/m times the
   variance. The mean comes from the sum of x, or of x - pivot for types of 16 bits. No compiler may
   contract a quotient. */
AMPI_FN void ampi_bn_measure(const ampi_bn* f, ampi_bn_group* g, double values) {
    const int of_x = ampi_dtype_or_f32(f->list[AMPI_ARG_X].dtype) == AMP_F32;
    ampi_bn_pivot(f, g);
    ampi_bn_sums(f, g, of_x ? AMPI_SQUARES : AMPI_SQUARES_LESS);
    for (size_t c = 0; c < g->width; c++) {
        const double pivot = (double)g->mean[c], first = g->sum[c] / values;
        const double distance = of_x ? first - pivot : first;  /* of the mean from the pivot */
        g->sum[c] = of_x ? first : pivot + first;
        g->dot[c] -= distance * distance / (1.0 / values);
        /* below 0, no NaN */
        if (ampi_bits64(g->dot[c]) - 0x8000000000000001u < AMPI_INF64) g->dot[c] = 0.0;
    }
}

/* (1 - momentum) * old + momentum * value for both statistics of a channel. Where one were not
   finite, both stay, and held[c], if held is given, becomes 1. */
AMPI_HD AMPI_FN void ampi_bn_run(float* mean, float* var, unsigned char* held, size_t c,
        float momentum, float batch_mean, float batch_var) {
    const float old = 1.0f - momentum;
    const float next_mean = mean ? ampi_fma(AMPI_FMA_NATIVE, momentum, batch_mean, old * mean[c])
        : 0.0f;
    const float next_var = var ? ampi_fma(AMPI_FMA_NATIVE, momentum, batch_var, old * var[c])
        : 0.0f;
    if (!ampi_has_finite_bits(&next_mean) || !ampi_has_finite_bits(&next_var)) {
        if (held) held[c] = 1;
        return;
    }
    if (mean) mean[c] = next_mean;
    if (var) var[c] = next_var;
}

/* A group's mean and 1/sqrt(variance + eps), from its values or from the running statistics, which
   training updates with the unbiased variance. */
AMPI_FN void ampi_bn_statistics(const ampi_bn* f, ampi_bn_group* g) {
    const double values = f->constant ? 1.0 : (double)f->p.n * (double)f->p.spatial;
    size_t c;
    if (!f->constant) ampi_bn_measure(f, g, values);
    for (c = 0; c < g->width; c++) {
        if (f->constant) {
            g->sum[c] = (double)f->running_mean[g->first + c];
            g->dot[c] = (double)f->running_var[g->first + c];
        }
        g->mean[c] = (float)g->sum[c];
        g->scale[c] = (float)(1.0 / sqrt(g->dot[c] / values + (double)f->p.eps));
    }
    ampi_store(&f->list[AMPI_ARG_MEAN], g->first, g->mean, g->width);
    ampi_store(&f->list[AMPI_ARG_INVSTD], g->first, g->scale, g->width);
    if (!f->constant && f->p.momentum != 0.0f) {
        for (c = 0; c < g->width; c++)
            ampi_bn_run(f->running_mean, f->running_var, f->p.held, g->first + c, f->p.momentum,
                g->mean[c], (float)(g->dot[c] / (values - 1.0)));
    }
}

/* y of a group from x, or with q->a dx from dy and x. arg: where x stands, or dy if frozen. */
AMPI_FN void ampi_bn_apply(const ampi_bn* f, ampi_row_args* q, const ampi_bn_group* g, int arg) {
    const ampi_bn_plan* p = &f->p;
    const int columns = p->spatial == 1;
    q->statistics_by_column = q->params_by_column = columns;
    AMPI_OPEN_READER(x, arg);
    AMPI_OPEN_READER(dy, AMPI_ARG_DY);
    for (size_t image = 0; image < p->n; image++)
        ampi_norm_apply(q, &dy, &x, NULL, NULL, &f->list[AMPI_ARG_Y],
            (image * p->channels + g->first) * p->spatial, columns ? 1 : g->width,
            columns ? g->width : p->spatial);
}

/* The forward pass of one group of channels: statistics, then the result. */
AMPI_FN void ampi_bn_forward_group(const ampi_bn* f, size_t group) {
    ampi_bn_group g;
    ampi_row_args q = ampi_no_row_args();
    q.mean = g.mean;
    q.scale = g.scale;
    q.gamma = g.gamma;
    q.beta = g.beta;
    ampi_bn_group_open(f, group, &g);
    ampi_bn_statistics(f, &g);
    ampi_bn_read(f, &g, AMPI_ARG_BETA, 0.0f, g.beta);
    ampi_bn_apply(f, &q, &g, AMPI_ARG_X);
}

/* Checks shape and operands, then runs group by group. */
AMP_DEF amp_result amp_batch_norm_forward(const amp_batch_norm_shape* s, int training, amp_ref x,
        amp_ref gamma, amp_ref beta, float* running_mean, float* running_var, float* save_mean,
        float* save_invstd, amp_ref y, const amp_exec* exec) {
    ampi_bn_plan p;
    AMPI_TRY(ampi_bn_plan_make(s, training, &p, ampi_exec_logger(exec)));
    const size_t n = ampi_area(ampi_area(p.n, p.channels), p.spatial);

    /* training updates the running statistics and saves the batch's; else the former are read */
    const int constant = !ampi_bn_trains(s, training);
    const int running = constant ? AMPI_IN : AMPI_OUT | AMPI_NULL,
        saved = constant ? AMPI_OUT | AMPI_NULL : AMPI_OUT;
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN, n),
        AMPI_ARG(y, AMPI_OUT, n),
        AMPI_ARG(beta, AMPI_NULL, p.channels),
        AMPI_ARG(gamma, AMPI_NULL, p.channels),
        AMPI_ARG_F32(save_mean, saved, p.channels),
        AMPI_ARG_F32(save_invstd, saved, p.channels),
        AMPI_ARG_F32(running_mean, running, p.channels),
        AMPI_ARG_F32(running_var, running, p.channels)
    };
    const ampi_bn f = { p, list, running_mean, running_var, constant };
    AMPI_CHECK("batch norm", n, list);

    AMPI_COMPUTE_OP;
    AMPI_PARALLEL_OVER(n,
        for (int64_t i = 0; i < (int64_t)p.groups; i++) ampi_bn_forward_group(&f, (size_t)i));
    AMPI_DONE_OP;
}

/* The backward pass of a norm over M values, xhat = (x - mean) * invstd, g = dy * gamma:
     dx = invstd * (g - sum(g)/M - xhat * sum(g*xhat)/M),  dgamma = sum(dy*xhat),  dbeta = sum(dy).
   Here dx = (dy - a - (x - mean) * b) * scale, scale = invstd * gamma; or dy * scale, if statistics
   are constants. */
AMPI_FN void ampi_bn_backward_group(const ampi_bn* f, size_t group) {
    const double values = (double)f->p.n * (double)f->p.spatial;  /* M */
    const ampi_argument *dgamma = &f->list[AMPI_ARG_DGAMMA], *dbeta = &f->list[AMPI_ARG_DBETA];
    ampi_bn_group g;
    ampi_bn_group_open(f, group, &g);
    ampi_bn_read(f, &g, AMPI_ARG_MEAN, 0.0f, g.mean);
    ampi_bn_read(f, &g, AMPI_ARG_INVSTD, 0.0f, g.scale);

    /* sums of dy, and of dy * (x - mean), which becomes dgamma */
    if (!f->constant || dgamma->data || dbeta->data) ampi_bn_sums(f, &g, AMPI_DOT);
    for (size_t c = 0; c < g.width; c++) {
        g.dot[c] *= (double)g.scale[c];
        g.a[c] = (float)(g.sum[c] / values);
        g.b[c] = (float)(g.dot[c] * (double)g.scale[c] / values);
        g.scale[c] *= g.gamma[c];
    }
    ampi_store_sums(dgamma, g.first, g.dot, g.width);
    ampi_store_sums(dbeta, g.first, g.sum, g.width);
    if (!f->list[AMPI_ARG_Y].data) return;

    /* dx; with constants y = dy * scale, which reads no x */
    ampi_row_args q = ampi_no_row_args();
    q.scale = g.scale;
    if (!f->constant) {
        q.mean = g.mean;
        q.a = g.a;
        q.b = g.b;
    }
    ampi_bn_apply(f, &q, &g, f->constant ? AMPI_ARG_DY : AMPI_ARG_X);
}

/* Checks shape and operands, then runs group by group. */
AMP_DEF amp_result amp_batch_norm_backward(const amp_batch_norm_shape* s, amp_ref dy, amp_ref x,
        amp_ref gamma, const float* save_mean, const float* save_invstd, amp_ref dx,
        amp_ref dgamma, amp_ref dbeta, int accumulate, const amp_exec* exec) {
    ampi_bn_plan p;
    AMPI_TRY(ampi_bn_plan_make(s, 1, &p, ampi_exec_logger(exec)));
    const size_t n = ampi_area(ampi_area(p.n, p.channels), p.spatial);
    const int params = ampi_gradient_use(accumulate, AMP_ACCUMULATE_PARAMS);
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN, n),
        AMPI_ARG(dx, AMPI_SAME | ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT), n),
        AMPI_ARG(dy, AMPI_SAME, n),
        AMPI_ARG(gamma, AMPI_NULL, p.channels),
        AMPI_ARG_F32(save_mean, AMPI_IN, p.channels),
        AMPI_ARG_F32(save_invstd, AMPI_IN, p.channels),
        AMPI_ARG(dgamma, params, p.channels),
        AMPI_ARG(dbeta, params, p.channels)
    };
    const ampi_bn f = { p, list, NULL, NULL, s->frozen != 0 };
    AMPI_CHECK("batch norm backward", n, list);

    AMPI_COMPUTE_OP;
    AMPI_PARALLEL_OVER(n,
        for (int64_t i = 0; i < (int64_t)p.groups; i++) ampi_bn_backward_group(&f, (size_t)i));
    AMPI_DONE_OP;
}

/* --- layer norm, and RMS norm --- */

/* Refuses rows of no elements and an eps that is not above 0; sets f's. */
AMPI_FN amp_result ampi_ln_check(const amp_exec* exec, const char* op, ampi_rows* f, float eps) {
    AMPI_REFUSE_OP(f->d < 1, AMP_ERR_SHAPE, "%s: rows of no elements have no mean", op);
    eps = !ampi_is_zero(&eps) ? eps : f->rms ? 1e-6f : 1e-5f;
    AMPI_REFUSE_OP(!ampi_has_finite_bits(&eps) || eps <= 0.0f, AMP_ERR_DESC,
        "%s: eps %g must be greater than 0 and finite", op, (double)eps);
    f->eps = (double)eps;
    return AMP_OK;
}

/* The means of `rows` rows from `row` on (0 of RMS norm), and 1/sqrt(variance + eps), the variance
   about them. */
AMPI_FN void ampi_ln_statistics(const ampi_rows* f, ampi_reader* x, size_t row, size_t rows,
        float* mean, float* invstd) {
    ampi_row_sums s;
    size_t r;
    if (f->rms) AMPI_CLEAR(s.sum);
    else ampi_sum_operand(AMPI_SUM, &s, x, x, row * f->d, rows, f->d);
    for (r = 0; r < rows; r++) s.sum[r] /= (double)f->d;
    ampi_sum_operand(AMPI_DISTANCES, &s, x, x, row * f->d, rows, f->d);
    for (r = 0; r < rows; r++) {
        mean[r] = (float)s.sum[r];
        invstd[r] = (float)(1.0 / sqrt(s.dot[r] / (double)f->d + f->eps));
    }
}

/* Layer norm of `rows` rows from `row` on: statistics, then the result. */
AMPI_FN void ampi_ln_forward_rows(const ampi_rows* f, size_t row, size_t rows) {
    float mean[AMPI_ROWS], invstd[AMPI_ROWS];
    ampi_row_args q = ampi_no_row_args();
    AMPI_OPEN_READER(x, AMPI_ARG_X);
    AMPI_OPEN_READER(gamma, AMPI_ARG_GAMMA);
    AMPI_OPEN_READER(beta, AMPI_ARG_BETA);
    q.mean = mean;
    q.scale = invstd;
    q.params_by_column = 1;
    ampi_ln_statistics(f, &x, row, rows, mean, invstd);
    ampi_norm_apply(&q, NULL, &x, &gamma, &beta, &f->list[AMPI_ARG_Y], row * f->d, rows, f->d);
    ampi_store(&f->list[AMPI_ARG_MEAN], row, mean, rows);
    ampi_store(&f->list[AMPI_ARG_INVSTD], row, invstd, rows);
}

/* Layer norm, or with `rms` RMS norm: checks the operands, then runs tile by tile of rows. */
AMPI_FN amp_result ampi_ln_forward(const char* op, int rms, amp_ref x, amp_ref gamma, amp_ref beta,
        float eps, float* save_mean, float* save_invstd, amp_ref y, size_t rows, size_t d,
        const amp_exec* exec) {
    const size_t all = ampi_area(rows, d);
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN, all),
        AMPI_ARG(y, AMPI_OUT, all),
        AMPI_ARG(beta, AMPI_NULL, d),
        AMPI_ARG(gamma, AMPI_NULL, d),
        AMPI_ARG_F32(save_mean, AMPI_OUT | AMPI_NULL, rows),
        AMPI_ARG_F32(save_invstd, AMPI_OUT | AMPI_NULL, rows)
    };
    ampi_rows f = ampi_rows_of(list, rows, d);
    f.rms = rms;
    AMPI_CHECK(op, all, list);
    AMPI_TRY(ampi_ln_check(exec, op, &f, eps));
    AMPI_COMPUTE_OP;
    ampi_rows_all(ampi_ln_forward_rows, &f);
    AMPI_DONE_OP;
}

AMP_DEF amp_result amp_layer_norm_forward(amp_ref x, amp_ref gamma, amp_ref beta, float eps,
        float* save_mean, float* save_invstd, amp_ref y, size_t rows, size_t d,
        const amp_exec* exec) {
    return ampi_ln_forward("layer norm", 0, x, gamma, beta, eps, save_mean, save_invstd, y, rows, d,
        exec);
}

AMP_DEF amp_result amp_rms_norm_forward(amp_ref x, amp_ref gamma, float eps, float* save_invstd,
        amp_ref y, size_t rows, size_t d, const amp_exec* exec) {
    return ampi_ln_forward("rms norm", 1, x, gamma, AMP_NONE, eps, NULL, save_invstd, y, rows, d,
        exec);
}

/* The backward pass of rows [row, past), see that of batch norm. sums, if not NULL: columns [start,
   start + width) add to those of dgamma, then those of dbeta, both padded. If these are all
   columns, rows of dx, if wanted, are (dy * gamma - a - (x - mean) * b) * invstd; of RMS norm mean
   and a are 0. Fewer columns than all come with d > AMPI_TILE, where a tile holds one row. */
AMPI_FN void ampi_ln_backward_rows(const ampi_rows* f, size_t row, size_t past, size_t start,
        size_t width, double* sums) {
    const float* mean = (const float*)f->list[AMPI_ARG_MEAN].data;
    const float* invstd = (const float*)f->list[AMPI_ARG_INVSTD].data;
    const int saved = invstd && (mean || f->rms);
    const int with_dx = f->list[AMPI_ARG_Y].data && width == f->d;
    float own_mean[AMPI_ROWS], own_invstd[AMPI_ROWS], a[AMPI_ROWS], b[AMPI_ROWS];
    ampi_row_sums s;
    size_t rows, n;
    AMPI_OPEN_READER(dy, AMPI_ARG_DY);
    AMPI_OPEN_READER(x, AMPI_ARG_X);
    AMPI_OPEN_READER(gamma, AMPI_ARG_GAMMA);
    for (; row < past; row += rows) {
        /* a tile of rows, with statistics that the forward pass saved, or their own */
        ampi_row_args q = ampi_no_row_args();
        rows = ampi_min_size(past - row, ampi_rows_of_tile(f->d));
        if (!saved) ampi_ln_statistics(f, &x, row, rows, own_mean, own_invstd);
        q.mean = !saved ? own_mean : mean ? mean + row : NULL;
        q.scale = saved ? invstd + row : own_invstd;
        q.params_by_column = 1;

        /* sums of columns for the parameters, sums of rows for dx */
        for (size_t i = 0; (n = ampi_part_size(width, i)) > 0; i += n) {
            const size_t at = row * f->d + start + i;
            const float *g = ampi_read(&dy, at, rows * n, n), *v = ampi_read(&x, at, rows * n, n);
            if (sums)
                ampi_sum_columns(AMPI_DOT, sums + ampi_padded(width) + i, sums + i, g, v, &q, rows,
                    n);
            if (with_dx) q.gamma = ampi_read(&gamma, start + i, n, n);
            if (with_dx) ampi_sum_rows(AMPI_DOT, &s, g, v, &q, rows, n, i > 0);
        }
        if (!with_dx) continue;

        for (size_t r = 0; r < rows; r++) {
            a[r] = f->rms ? 0.0f : (float)(s.sum[r] / (double)f->d);
            b[r] = (float)(s.dot[r] * (double)q.scale[r] / (double)f->d);
        }
        q.a = a;
        q.b = b;
        ampi_norm_apply(&q, &dy, &x, &gamma, NULL, &f->list[AMPI_ARG_Y], row * f->d, rows, f->d);
    }
}

AMPI_FN void ampi_ln_dx_rows(const ampi_rows* f, size_t row, size_t rows) {
    ampi_ln_backward_rows(f, row, row + rows, 0, f->d, NULL);
}

/* Rows of a part. A column's sum adds its parts' sums in order, so threads can share parts. These
   are few, as adding their sums is not shared. */
AMPI_FN size_t ampi_ln_part_rows(size_t rows) { return ampi_round_up(ampi_div_up(rows, 32), 64); }

/* How many parts of rows are summed at a time: one for each thread. */
AMPI_FN size_t ampi_ln_parts_at_once(size_t rows, size_t d) {
    return rows * d < AMPI_PARALLEL_MIN ? 1 : ampi_min_size(ampi_threads(),
        ampi_div_up(rows, ampi_ln_part_rows(rows)));
}

/* Columns at most whose sums the second-level cache keeps besides the rows. */
enum { AMPI_LN_MAX_COLUMNS = 16384 };

/* Bytes in which the sums of dgamma and dbeta of several parts of rows fit; 0 where they fit the
   stack. */
AMP_DEF size_t amp_layer_norm_workspace(size_t rows, size_t d) {
    if (d <= AMPI_TILE || d > AMPI_LN_MAX_COLUMNS || rows == 0 || rows > SIZE_MAX / d) return 0;
    return (1 + ampi_ln_parts_at_once(rows, d)) * 2 * ampi_padded(d) * sizeof(double) + 64;
}

/* dgamma and dbeta of columns [start, start + n), and dx if these are all. Threads take parts of
   rows, whose sums are added in order. The total and the sums of each part under way lie in `room`,
   at_once + 1 times `width` doubles; without it, on the stack, for AMPI_TILE columns at most. */
AMPI_FN void ampi_ln_params(const ampi_rows* f, size_t start, size_t n, double* room) {
    AMPI_ALIGNED double own[2 * AMPI_TILE];
    const size_t width = 2 * ampi_padded(n);  /* sums of a part: of dgamma, then of dbeta */
    const size_t at_once = ampi_ln_parts_at_once(f->rows, f->d);
    const int64_t rows = (int64_t)ampi_ln_part_rows(f->rows);
    double* sums = room ? room : own;
    memset(sums, 0, width * sizeof *sums);
    AMPI_PARALLEL_ORDERED(f->rows * f->d >= AMPI_PARALLEL_MIN,
        for (int64_t i = 0; i < (int64_t)f->rows; i += rows),

        /* shared among threads: part number i / rows; at most at_once are under way */
        AMPI_ALIGNED double own_part[2 * AMPI_TILE];
        double* part = room ? room + (1 + (size_t)(i / rows) % at_once) * width : own_part;
        memset(part, 0, width * sizeof *part);
        ampi_ln_backward_rows(f, (size_t)i, ampi_min_size((size_t)(i + rows), f->rows), start, n,
            part),

        /* in order */
        for (size_t l = 0; l < width; l++) sums[l] += part[l]);

    for (size_t m, k = 0; (m = ampi_tile_size(n, k)) > 0; k += m) {
        ampi_store_sums(&f->list[AMPI_ARG_DGAMMA], start + k, sums + k, m);
        ampi_store_sums(&f->list[AMPI_ARG_DBETA], start + k, sums + width / 2 + k, m);
    }
}

/* dgamma and dbeta from sums down the columns, dx from sums along the rows: in one pass over dy and
   x where the sums of all columns have room. */
AMPI_FN amp_result ampi_ln_backward(const char* op, int rms, amp_ref dy, amp_ref x, amp_ref gamma,
        float eps, const float* save_mean, const float* save_invstd, amp_ref dx, amp_ref dgamma,
        amp_ref dbeta, int accumulate, size_t rows, size_t d, const amp_exec* exec) {
    const size_t all = ampi_area(rows, d);
    const int params = ampi_gradient_use(accumulate, AMP_ACCUMULATE_PARAMS);
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN, all),
        AMPI_ARG(dx, ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT), all),
        AMPI_ARG(dy, AMPI_IN, all),
        AMPI_ARG(gamma, AMPI_NULL, d),
        AMPI_ARG_F32(save_mean, AMPI_NULL, rows),
        AMPI_ARG_F32(save_invstd, AMPI_NULL, rows),
        AMPI_ARG(dgamma, params, d),
        AMPI_ARG(dbeta, params, d)
    };
    ampi_rows f = ampi_rows_of(list, rows, d);
    f.rms = rms;
    AMPI_CHECK(op, all, list);
    AMPI_TRY(ampi_ln_check(exec, op, &f, eps));

    /* columns whose sums have room at a time: in a workspace all, else on the stack */
    const size_t bytes = amp_layer_norm_workspace(rows, d);
    AMPI_GROW_WORKSPACE(bytes)
    const int fits = bytes > 0 && exec && exec->workspace && exec->workspace_size >= bytes;
    double* room = fits ? (double*)(void*)ampi_align64(exec->workspace) : NULL;
    const size_t columns = room ? d : ampi_min_size(d, AMPI_TILE);

    /* no rows add nothing; else they set dgamma and dbeta to 0 */
    if (rows == 0 && accumulate & AMP_ACCUMULATE_PARAMS) return AMP_OK;
    AMPI_COMPUTE_OP;
    const int sums = dgamma.data || dbeta.data;
    for (size_t start = 0; start < d && sums; start += columns)
        ampi_ln_params(&f, start, ampi_min_size(d - start, columns), room);
    if (dx.data && !(sums && columns == d)) ampi_rows_all(ampi_ln_dx_rows, &f);
    AMPI_DONE_OP;
}

AMP_DEF amp_result amp_layer_norm_backward(amp_ref dy, amp_ref x, amp_ref gamma, float eps,
        const float* save_mean, const float* save_invstd, amp_ref dx, amp_ref dgamma,
        amp_ref dbeta, int accumulate, size_t rows, size_t d, const amp_exec* exec) {
    return ampi_ln_backward("layer norm backward", 0, dy, x, gamma, eps, save_mean, save_invstd, dx,
        dgamma, dbeta, accumulate, rows, d, exec);
}

AMP_DEF amp_result amp_rms_norm_backward(amp_ref dy, amp_ref x, amp_ref gamma, float eps,
        const float* save_invstd, amp_ref dx, amp_ref dgamma, int accumulate, size_t rows, size_t d,
        const amp_exec* exec) {
    return ampi_ln_backward("rms norm backward", 1, dy, x, gamma, eps, NULL, save_invstd, dx,
        dgamma, AMP_NONE, accumulate, rows, d, exec);
}

/* --- softmax --- */

AMPI_INLINE float ampi_larger(float a, float b) { return a > b ? a : b; }

/* The largest of max[r] and the elements of row r. NaNs are passed over, and come back through
   exp. */
AMPI_KERNEL(ampi_rows_max, (float* max, const float* x, size_t rows, size_t n), max, x, rows, n) {
    size_t r, i, l;
    for (r = 0; r < rows; r++, x += n) {
        float m[AMPI_LANES];
        for (l = 0; l < AMPI_LANES; l++) m[l] = max[r];
        for (i = 0; i < n; i += AMPI_LANES) {
            const uint32_t* in = ampi_lanes_in(n - i);
            AMPI_FETCH(x + i, ampi_ahead(n));
            for (l = 0; l < AMPI_LANES; l++)
                m[l] = ampi_larger(ampi_float(ampi_select_bits(in[l], ampi_bits(x[i + l]),
                    0xff800000u)), m[l]);
        }
        for (l = 0; l < 8; l++) m[l] = ampi_larger(m[l + 8], m[l]);
        for (l = 0; l < 4; l++) m[l] = ampi_larger(m[l + 4], m[l]);
        for (l = 0; l < 2; l++) m[l] = ampi_larger(m[l + 2], m[l]);
        max[r] = ampi_larger(m[1], m[0]);
    }
}

/* Each row's maximum, and in s->sum the sum of exp(x - max). Rows that fit a tile leave those terms
   in e. */
AMPI_FN void ampi_softmax_measure(ampi_reader* x, size_t at, size_t rows, size_t d, float* max,
        ampi_row_sums* s, float* e) {
    ampi_row_args q = ampi_no_row_args();
    size_t i, n;
    q.mean = max;
    ampi_fill(max, rows, ampi_float(0xff800000u));
    for (i = 0; (n = ampi_part_size(d, i)) > 0; i += n)
        ampi_rows_max(max, ampi_read(x, at + i, rows * n, n), rows, n);
    for (i = 0; (n = ampi_part_size(d, i)) > 0; i += n) {
        ampi_rows_each(AMPI_EXP, &q, e, NULL, ampi_read(x, at + i, rows * n, n), rows, n);
        ampi_sum_rows(AMPI_SUM, s, e, e, NULL, rows, n, i > 0);
    }
}

/* What a row's softmax counts in the gradient of its loss: the weighted sum of its target. *label:
   the label's weight. Both are 0 where the row is ignored. */
AMPI_FN float ampi_row_weight(const ampi_rows* f, size_t row, float* label) {
    const int ignored = ampi_is_ignored(f, row);
    *label = ignored ? 0.0f : f->weights[f->labels[row]];
    return ignored ? 0.0f : ampi_fma(AMPI_FMA_NATIVE, 1.0f - f->smoothing, *label,
        f->shared_weight);
}

/* Columns [i, i + n) of the gradients of weighted rows from e = exp(x - max) and 1 / sum(e):
   (A * softmax - w_c * target_c) * factor, see ampi_row_weight for A. */
AMPI_FN void ampi_weighted_rows(const ampi_rows* f, size_t row, size_t i, size_t rows, size_t n,
        const float* inverse, const float* e, float* y) {
    const float base = f->smoothing / (float)f->d * f->factor;
    float shared[AMPI_ROWS_TILE], scale[AMPI_ROWS], label[AMPI_ROWS];
    ampi_row_args q = ampi_no_row_args();
    q.scale = scale;
    q.beta = shared;
    q.params_by_column = 1;
    for (size_t c = 0; c < n; c++) shared[c] = -base * f->weights[i + c];
    memset(shared + n, 0, AMPI_LANES * sizeof *shared);
    for (size_t r = 0; r < rows; r++)
        scale[r] = ampi_row_weight(f, row + r, &label[r]) * inverse[r] * f->factor;
    ampi_rows_each(AMPI_NORM, &q, y, NULL, e, rows, n);

    for (size_t r = 0; r < rows; r++) {
        const size_t column = (size_t)f->labels[row + r] - i, k = r * n + column;
        const float own = (f->smoothing - 1.0f) * f->factor;
        if (column < n)
            y[k] = ampi_fma(AMPI_FMA_NATIVE, e[k], scale[r],
                ampi_fma(AMPI_FMA_NATIVE, own, label[r], shared[column]));
    }
}

/* Softmax of rows [row, row + rows), which fit a tile or are one row. With labels the gradient of
   its cross-entropy: (softmax - target) * factor, where the target of a label is `target`, of
   another class `base`. */
AMPI_FN void ampi_softmax_rows(const ampi_rows* f, size_t row, size_t rows) {
    AMPI_ALIGNED float e[AMPI_ROWS_TILE], tile[AMPI_ROWS_TILE];
    const float base = f->smoothing / (float)f->d, target = base - (f->smoothing - 1.0f);
    float max[AMPI_ROWS], inverse[AMPI_ROWS];
    ampi_row_args q = ampi_no_row_args();
    ampi_row_sums s;
    size_t n, r;
    AMPI_OPEN_READER(x, AMPI_ARG_X);
    if (f->pixels > 1) x.maps = f;
    ampi_softmax_measure(&x, row * f->ld, rows, f->d, max, &s, e);
    for (r = 0; r < rows; r++) inverse[r] = 1.0f / (float)s.sum[r];
    q.mean = max;
    q.scale = inverse;
    q.base = base;
    q.factor = f->factor;

    /* whole rows, or columns [i, i + n) of one, whose exponentials are not in e any more */
    for (size_t i = 0; (n = ampi_part_size(f->d, i)) > 0; i += n) {
        const size_t at = row * f->ld + i;
        float* y = x.maps ? tile : ampi_open(&f->list[AMPI_ARG_Y], at, n, tile);
        if (f->d > AMPI_PART) ampi_rows_each(AMPI_EXP, &q, e, NULL, ampi_read(&x, at, n, n), 1, n);
        if (f->weights) ampi_weighted_rows(f, row, i, rows, n, inverse, e, y);
        else ampi_rows_each(AMPI_DIVIDE, &q, y, NULL, e, rows, n);

        /* a label left of these columns wraps to a large column, as one right of them is */
        for (r = 0; r < rows && f->labels; r++) {
            const size_t column = (size_t)f->labels[row + r] - i, k = r * n + column;
            if (ampi_is_ignored(f, row + r)) memset(y + r * n, 0, n * sizeof *y);
            else if (column < n && !f->weights)
                y[k] = ampi_fma(AMPI_FMA_NATIVE, e[k], inverse[r], -target) * f->factor;
        }
        if (x.maps) ampi_map_turn(f, &f->list[AMPI_ARG_Y], row, i, rows, n, y, 1);
        else ampi_store(&f->list[AMPI_ARG_Y], at, y, rows * n);
    }
}

/* Checks the operands, then runs tile by tile of rows. */
AMP_DEF amp_result amp_softmax_forward(amp_ref x, amp_ref y, size_t rows, size_t d,
        const amp_exec* exec) {
    const size_t all = ampi_area(rows, d);
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_SAME, all),
        AMPI_ARG(y, AMPI_OUT | AMPI_SAME, all)
    };
    ampi_rows f = ampi_rows_of(list, rows, d);
    f.factor = 1.0f;
    AMPI_CHECK("softmax", all, list);
    AMPI_COMPUTE_OP;
    if (d > 0) ampi_rows_all(ampi_softmax_rows, &f);
    AMPI_DONE_OP;
}

/* dx = y * (dy - sum(dy * y)). */
AMPI_FN void ampi_softmax_back_rows(const ampi_rows* f, size_t row, size_t rows) {
    AMPI_ALIGNED float tile[AMPI_ROWS_TILE];
    float dot[AMPI_ROWS];
    ampi_row_args q = ampi_no_row_args();
    ampi_row_sums s;
    size_t i, n;
    AMPI_OPEN_READER(dy, AMPI_ARG_DY);
    AMPI_OPEN_READER(y, AMPI_ARG_X);
    q.mean = dot;
    ampi_sum_operand(AMPI_PRODUCTS, &s, &dy, &y, row * f->d, rows, f->d);
    for (i = 0; i < rows; i++) dot[i] = (float)s.dot[i];
    for (i = 0; (n = ampi_part_size(f->d, i)) > 0; i += n) {
        const size_t at = row * f->d + i;
        float* dx = ampi_open(&f->list[AMPI_ARG_Y], at, n, tile);
        ampi_rows_each(AMPI_SOFTMAX_DX, &q, dx, ampi_read(&dy, at, rows * n, n),
            ampi_read(&y, at, rows * n, n), rows, n);
        ampi_store(&f->list[AMPI_ARG_Y], at, dx, rows * n);
    }
}

/* Checks the operands, then runs tile by tile of rows. */
AMP_DEF amp_result amp_softmax_backward(amp_ref dy, amp_ref y, amp_ref dx, int accumulate,
        size_t rows, size_t d, const amp_exec* exec) {
    const size_t all = ampi_area(rows, d);
    const ampi_argument list[] = {
        AMPI_ARG(y, AMPI_IN, all),
        AMPI_ARG(dx, ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT), all),
        AMPI_ARG(dy, AMPI_IN, all)
    };
    const ampi_rows f = ampi_rows_of(list, rows, d);
    AMPI_CHECK("softmax backward", all, list);
    AMPI_COMPUTE_OP;
    if (dx.data && d > 0) ampi_rows_all(ampi_softmax_back_rows, &f);
    AMPI_DONE_OP;
}

/* --- products --- */

/* y = x * b, one b a row, which the list has at AMPI_ARG_DY. The norm's product by 1 and its sum
   with -0 change nothing. */
AMPI_FN void ampi_mul_rows(const ampi_rows* f, size_t row, size_t rows) {
    const ampi_argument* b = &f->list[AMPI_ARG_DY];
    float scale[AMPI_ROWS];
    ampi_row_args q = ampi_no_row_args();
    AMPI_OPEN_READER(x, AMPI_ARG_X);
    ampi_load_f32(scale, b->data, b->dtype, row, rows);
    q.scale = scale;
    ampi_norm_apply(&q, NULL, &x, NULL, NULL, &f->list[AMPI_ARG_Y], row * f->d, rows, f->d);
}

/* An element of y for each row: the sum of dy * x. */
AMPI_FN void ampi_mul_sums(const ampi_rows* f, size_t row, size_t rows) {
    ampi_row_sums s;
    AMPI_OPEN_READER(x, AMPI_ARG_X);
    AMPI_OPEN_READER(dy, AMPI_ARG_DY);
    ampi_sum_operand(AMPI_PRODUCTS, &s, &dy, &x, row * f->d, rows, f->d);
    ampi_store_sums(&f->list[AMPI_ARG_Y], row, s.dot, rows);
}

/* Products of n elements: y = x * dy of the list one by one, or `work` on rows of `repeat`. */
AMPI_FN void ampi_mul_run(ampi_rows_work work, const ampi_argument* list, size_t n,
        size_t repeat) {
    const ampi_rows f = ampi_rows_of(list, n / repeat, repeat);
    if (repeat == 1) ampi_elements(AMPI_MULTIPLY, 0.0f, list, n);
    else if (list[AMPI_ARG_Y].data) ampi_rows_all(work, &f);
}

/* Refuses elements that are not whole runs of `repeat`. */
AMPI_FN amp_result ampi_check_repeat(const amp_exec* exec, const char* op, size_t n,
        size_t repeat) {
    AMPI_REFUSE_OP(repeat == 0 || n % repeat != 0, AMP_ERR_SHAPE,
        "%s: %lld elements are not whole runs of %lld", op, ampi_shown(n), ampi_shown(repeat));
    return AMP_OK;
}

/* Checks the operands, then multiplies in tiles. */
AMP_DEF amp_result amp_mul_forward(amp_ref a, amp_ref b, amp_ref y, size_t n, size_t repeat,
        const amp_exec* exec) {
    AMPI_TRY(ampi_check_repeat(exec, "mul", n, repeat));
    const ampi_argument list[] = {
        AMPI_ARG(a, AMPI_SAME, n),
        AMPI_ARG(y, AMPI_OUT | AMPI_SAME, n),
        AMPI_ARG(b, repeat == 1 ? AMPI_SAME : AMPI_IN, n / repeat)
    };
    AMPI_CHECK("mul", n, list);
    AMPI_COMPUTE_OP;
    ampi_mul_run(ampi_mul_rows, list, n, repeat);
    AMPI_DONE_OP;
}

/* Checks the operands, then computes those of da and db that are wanted: each has a list of three,
   its operands around it. */
AMP_DEF amp_result amp_mul_backward(amp_ref dy, amp_ref a, amp_ref b, amp_ref da, amp_ref db,
        int accumulate, size_t n, size_t repeat, const amp_exec* exec) {
    const int use = ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT);
    AMPI_TRY(ampi_check_repeat(exec, "mul backward", n, repeat));
    const ampi_argument list[] = {
        AMPI_ARG(dy, AMPI_IN, n), AMPI_ARG(da, use, n), AMPI_ARG(b, AMPI_IN, n / repeat),
        AMPI_ARG(a, AMPI_IN, n), AMPI_ARG(db, use, n / repeat), AMPI_ARG(dy, AMPI_IN, n)
    };
    AMPI_CHECK("mul backward", n, list);
    AMPI_COMPUTE_OP;
    ampi_mul_run(ampi_mul_rows, list, n, repeat);
    ampi_mul_run(ampi_mul_sums, list + 3, n, repeat);
    AMPI_DONE_OP;
}

/* >>impl-loss   Losses: softmax cross-entropy by rows; mean squared error and binary cross-entropy
   by elements.
   A forward call sums in AMPI_PARTS parts, whatever the threads. A gradient is that of
   loss_scale * weight * loss. */

AMPI_HD AMPI_FN float ampi_loss_factor(const float* loss_scale, float weight, double n) {
    return (float)((loss_scale ? (double)*loss_scale : 1.0) * (double)weight / n);
}

/* Refuses a mean of no elements, and a weight of a loss that is not finite. */
AMPI_FN amp_result ampi_check_mean(const amp_exec* exec, const char* op, size_t n, float weight) {
    AMPI_REFUSE_OP(n == 0, AMP_ERR_SHAPE, "%s: the mean of no elements is not defined", op);
    AMPI_REFUSE_OP(!ampi_has_finite_bits(&weight), AMP_ERR_ARGUMENT, "%s: weight %g is not finite",
        op, (double)weight);
    return AMP_OK;
}

/* Refuses a desc's ld and pixels that do not fit n rows; *pixels: of an image, 1 of rows. */
AMPI_FN amp_result ampi_cross_entropy_maps(const amp_exec* exec, const char* op,
        const amp_cross_entropy_desc* desc, size_t n, size_t ld, size_t classes, size_t* pixels) {
    *pixels = desc && desc->pixels ? desc->pixels : 1;
    AMPI_REFUSE_OP(ld < classes, AMP_ERR_ARGUMENT, "%s: ld is %lld, but a row has %lld classes",
        op, ampi_shown(ld), ampi_shown(classes));
    AMPI_REFUSE_OP(*pixels > 1 && ld != classes, AMP_ERR_ARGUMENT,
        "%s: ld is %lld, but maps are packed", op, ampi_shown(ld));
    AMPI_REFUSE_OP(n % *pixels != 0, AMP_ERR_SHAPE,
        "%s: %lld labels are not whole maps of %lld pixels", op, ampi_shown(n),
        ampi_shown(*pixels));
    return AMP_OK;
}

/* Takes over class weights, if any. Refuses one that is negative or not finite. */
AMPI_FN amp_result ampi_cross_entropy_weights(ampi_rows* f, const amp_exec* exec,
        const float* weights) {
    double sum = 0.0;
    for (size_t c = 0; weights && c < f->d; c++) {
        AMPI_REFUSE_OP(!ampi_in_range(&weights[c], 0.0f, AMPI_FLT_MAX), AMP_ERR_ARGUMENT,
            "softmax cross-entropy: the weight %g of class %lld must be finite and not negative",
            (double)weights[c], ampi_shown(c));
        sum += (double)weights[c];
    }
    f->weights = weights;
    f->shared_weight = (float)((double)f->smoothing * sum / (double)f->d);
    return AMP_OK;
}

/* Completes f, rows of logits, to a cross-entropy; *used: what the mean divides by, the rows whose
   labels count, or their weights. Refuses sizes, a desc or labels that are out of range. */
AMPI_FN amp_result ampi_cross_entropy_init(ampi_rows* f, const amp_exec* exec,
        const int32_t* labels, const amp_cross_entropy_desc* desc, double* used) {
    const size_t classes = f->d;
    AMPI_REFUSE_OP(f->rows < 1 || classes < 1 || classes > INT32_MAX, AMP_ERR_SHAPE,
        "softmax cross-entropy: %lld rows of %lld classes need sizes of 1 to 2^31-1",
        ampi_shown(f->rows), ampi_shown(classes));
    if (desc) {
        f->smoothing = desc->smoothing;
        f->ignored = desc->ignored;
    }
    AMPI_REFUSE_OP(!ampi_in_range(&f->smoothing, 0.0f, AMPI_BELOW_ONE), AMP_ERR_DESC,
        "softmax cross-entropy: smoothing %g is outside [0,1)", (double)f->smoothing);
    AMPI_TRY(ampi_cross_entropy_maps(exec, "softmax cross-entropy", desc, f->rows, f->ld, classes,
        &f->pixels));
    AMPI_TRY(ampi_cross_entropy_weights(f, exec, desc ? desc->class_weights : NULL));
    AMPI_REFUSE_OP(!labels, AMP_ERR_ARGUMENT, "softmax cross-entropy: labels is NULL");
    f->labels = labels;

    *used = 0.0;
    for (size_t i = 0; i < f->rows; i++) {
        if (ampi_is_ignored(f, i)) continue;
        AMPI_REFUSE_OP(labels[i] < 0 || (size_t)labels[i] >= classes, AMP_ERR_ARGUMENT,
            "softmax cross-entropy: label %d at row %llu is outside 0..%llu", (int)labels[i],
            (ampi_ull)i, (ampi_ull)(classes - 1));
        *used += f->weights ? (double)f->weights[labels[i]] : 1.0;
    }
    if (*used == 0.0) *used = ampi_double(AMPI_INF64);  /* a mean of nothing is 0 */
    return AMP_OK;
}

/* Adds to sums[r], of rows [row, row + rows), the weighted sum of their z = x - max. */
AMPI_FN void ampi_weigh_rows(const ampi_rows* f, ampi_reader* x, size_t row, size_t rows,
        const float* max, double* sums) {
    for (size_t n, i = 0; (n = ampi_part_size(f->d, i)) > 0; i += n) {
        const float* v = ampi_read(x, row * f->ld + i, rows * n, n);
        for (size_t r = 0; r < rows; r++, v += n)
            for (size_t c = 0; c < n; c++)
                sums[r] = ampi_add_product(AMPI_FMA_NATIVE, f->weights[i + c], v[c] - max[r],
                    sums[r]);
    }
}

/* The losses of rows [row, row + rows), which fit a tile or are one row, with z = x - max of the
   row: log(sum(exp(z))) - (1 - smoothing) * z[label] - smoothing * mean(z). With weights of the
   classes each term of a class has its weight. Losses of rows that are ignored mean nothing.
   `loss` has room for whole groups of lanes. */
AMPI_FN void ampi_cross_entropy_rows(const ampi_rows* f, size_t row, size_t rows, float* loss) {
    AMPI_ALIGNED float e[AMPI_ROWS_TILE];
    float max[AMPI_ROWS];
    const size_t at = row * f->ld, padded = ampi_padded(rows);
    ampi_row_sums s;
    AMPI_OPEN_READER(x, AMPI_ARG_X);
    if (f->pixels > 1) x.maps = f;
    ampi_softmax_measure(&x, at, rows, f->d, max, &s, e);

    /* of each row sum(exp(z)), z[label] and mean(z), which only smoothing asks for; the reader
       still has rows that fit a tile */
    float sum[AMPI_ROWS] = { 0.0f }, z[AMPI_ROWS] = { 0.0f }, mean[AMPI_ROWS] = { 0.0f };
    for (size_t r = 0; r < rows; r++) {
        const size_t label = ampi_is_ignored(f, row + r) ? 0 : (size_t)f->labels[row + r];
        if (f->d <= AMPI_PART) z[r] = x.floats[r * f->d + label];
        else z[r] = *ampi_read(&x, at + label, 1, 1);
        z[r] -= max[r];
        sum[r] = (float)s.sum[r];
    }
    if (f->smoothing > 0.0f && f->weights) {
        memset(s.dot, 0, sizeof s.dot);
        ampi_weigh_rows(f, &x, row, rows, max, s.dot);
        for (size_t r = 0; r < rows; r++) mean[r] = (float)(s.dot[r] / (double)f->d);
    } else if (f->smoothing > 0.0f) {
        ampi_sum_operand(AMPI_SUM, &s, &x, &x, at, rows, f->d);
        for (size_t r = 0; r < rows; r++)
            mean[r] = (float)(s.sum[r] / (double)f->d - (double)max[r]);
    }

    ampi_elementwise(AMPI_LOG, sum, sum, NULL, 0.0f, padded);
    for (size_t r = 0; r < rows && f->weights; r++) {
        float label;
        const float all = ampi_row_weight(f, row + r, &label);
        z[r] *= label;
        sum[r] *= all;
    }
    ampi_elementwise(AMPI_ADD_TO_PRODUCT, loss, z, sum, f->smoothing - 1.0f, padded);
    ampi_elementwise(AMPI_ADD_TO_PRODUCT, loss, mean, loss, -f->smoothing, padded);
}

/* parts[i], for parts i of all rows from `first` to before `last`: the sum of their losses. */
AMPI_FN void ampi_cross_entropy_parts(const ampi_rows* f, double* parts, int64_t first,
        int64_t last) {
    const size_t end = ampi_part_start(f->rows, last), step = ampi_row_step(f);
    size_t row, count, r;
    float loss[AMPI_ROWS];
    memset(parts + first, 0, (size_t)(last - first) * sizeof *parts);
    for (row = ampi_part_start(f->rows, first); row < end; row += count) {
        count = ampi_min_size(end - row, step);
        ampi_cross_entropy_rows(f, row, count, loss);
        for (r = 0; r < count; r++) {
            /* the part of row `row + r`; parts may be empty */
            while (row + r >= ampi_part_start(f->rows, first + 1)) first++;
            if (!ampi_is_ignored(f, row + r)) parts[first] += (double)loss[r];
        }
    }
}

/* Elements from the first to the last of n rows, ld apart: those of a desc, or packed; SIZE_MAX if
   too many. */
AMPI_FN size_t ampi_cross_entropy_span(const amp_cross_entropy_desc* desc, size_t n,
        size_t classes, size_t* ld) {
    *ld = desc && desc->ld ? desc->ld : classes;
    if (ampi_area(n, ampi_max_size(*ld, classes)) == SIZE_MAX) return SIZE_MAX;
    return n == 0 ? 0 : (n - 1) * *ld + classes;
}

/* Checks, then sums the rows' losses in AMPI_PARTS parts. */
AMP_DEF amp_result amp_softmax_cross_entropy_forward(amp_ref logits, const int32_t* labels,
        const amp_cross_entropy_desc* desc, float* loss, size_t n, size_t classes,
        const amp_exec* exec) {
    double used;
    size_t ld;
    const size_t all = ampi_cross_entropy_span(desc, n, classes, &ld);
    const ampi_argument list[] = {
        AMPI_ARG(logits, AMPI_IN, all),
        AMPI_ARG_F32(loss, AMPI_OUT, 1)
    };
    ampi_rows f = ampi_rows_of(list, n, classes);
    f.ld = ld;
    AMPI_CHECK("softmax cross-entropy", all, list);
    AMPI_TRY(ampi_cross_entropy_init(&f, exec, labels, desc, &used));

    /* a call sums one part; on one thread all, as tiles of few rows may then span parts */
    const int64_t per_call = all < AMPI_PARALLEL_MIN ? AMPI_PARTS : 1;
    double parts[AMPI_PARTS];
    AMPI_COMPUTE_OP;
    AMPI_PARALLEL_OVER(all, for (int64_t i = 0; i < AMPI_PARTS; i += per_call)
        ampi_cross_entropy_parts(&f, parts, i, i + per_call));
    ampi_store_mean(&list[AMPI_ARG_Y], parts, used);
    AMPI_DONE_OP;
}

/* Checks, then writes the gradient of each row. */
AMP_DEF amp_result amp_softmax_cross_entropy_backward(amp_ref logits, const int32_t* labels,
        const amp_cross_entropy_desc* desc, const float* loss_scale, float weight,
        amp_ref dlogits, size_t n, size_t classes, const amp_exec* exec) {
    double used;
    size_t ld;
    const size_t all = ampi_cross_entropy_span(desc, n, classes, &ld);
    const ampi_argument list[] = {
        AMPI_ARG(logits, AMPI_IN, all),
        AMPI_ARG(dlogits, AMPI_OUT | AMPI_NULL, all)
    };
    ampi_rows f = ampi_rows_of(list, n, classes);
    f.ld = ld;
    AMPI_CHECK("softmax cross-entropy backward", all, list);
    AMPI_TRY(ampi_cross_entropy_init(&f, exec, labels, desc, &used));
    AMPI_TRY(ampi_check_mean(exec, "softmax cross-entropy backward", n, weight));
    AMPI_COMPUTE_OP;
    f.factor = ampi_loss_factor(loss_scale, weight, used);
    if (dlogits.data) ampi_rows_all(ampi_softmax_rows, &f);
    AMPI_DONE_OP;
}

/* The mean of an element-wise loss: of (x - target)^2 for MSE, of ampi_bce_term for BCE, of x for
   MEAN. It is summed in AMPI_PARTS parts of whole tiles. */
AMPI_FN amp_result ampi_loss_forward(ampi_loss kind, const char* op, amp_ref x, amp_ref target,
        float* loss, size_t n, const amp_exec* exec) {
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN, n),
        AMPI_ARG_F32(loss, AMPI_OUT, 1),
        AMPI_ARG(target, AMPI_IN, n)
    };
    AMPI_CHECK(op, n, list);
    AMPI_TRY(ampi_check_mean(exec, op, n, 1.0f));
    AMPI_COMPUTE_OP;

    /* the elements of MSE are differences, which the sum squares */
    const ampi_terms terms = kind == AMPI_MSE ? AMPI_PRODUCTS : AMPI_SUM;
    const size_t tiles = ampi_div_up(n, AMPI_TILE);
    double parts[AMPI_PARTS];
    AMPI_PARALLEL_OVER(n, for (int64_t part = 0; part < AMPI_PARTS; part++) {
        AMPI_ALIGNED float tile[AMPI_TILE], x_tile[AMPI_TILE], t_tile[AMPI_TILE];
        const size_t first = ampi_part_start(tiles, part), end = ampi_part_start(tiles, part + 1);
        ampi_row_sums s;
        s.sum[0] = s.dot[0] = 0.0;
        for (size_t i = first; i < end; i++) {
            const size_t start = i * AMPI_TILE, count = ampi_tile_size(n, start);
            ampi_elementwise((int)kind, tile, ampi_view(&list[AMPI_ARG_X], start, count, x_tile),
                ampi_view(&list[AMPI_ARG_DY], start, count, t_tile), 0.0f, ampi_padded(count));
            ampi_sum_rows(terms, &s, tile, tile, NULL, 1, count, i > first);
        }
        parts[part] = kind == AMPI_MSE ? s.dot[0] : s.sum[0];
    });
    ampi_store_mean(&list[AMPI_ARG_Y], parts, (double)n);
    AMPI_DONE_OP;
}

/* The gradient of an element-wise loss. */
AMPI_FN amp_result ampi_loss_backward(ampi_loss kind, const char* op, amp_ref x, amp_ref target,
        const float* loss_scale, float weight, amp_ref dx, size_t n, const amp_exec* exec) {
    const ampi_argument list[] = {
        AMPI_ARG(x, AMPI_IN, n),
        AMPI_ARG(dx, AMPI_OUT | AMPI_NULL, n),
        AMPI_ARG(target, AMPI_IN, n)
    };
    AMPI_CHECK(op, n, list);
    AMPI_TRY(ampi_check_mean(exec, op, n, weight));
    AMPI_COMPUTE_OP;
    float factor = ampi_loss_factor(loss_scale, weight, (double)n);
    ampi_elements((int)kind, kind == AMPI_MSE_SLOPE ? 2.0f * factor : factor, list, n);
    AMPI_DONE_OP;
}

#define AMPI_LOSS(def, name, kind, words) \
    def amp_result name##_forward(amp_ref x, amp_ref target, float* loss, size_t n, \
            const amp_exec* exec) { \
        return ampi_loss_forward(kind, words, x, target, loss, n, exec); \
    } \
    def amp_result name##_backward(amp_ref x, amp_ref target, const float* loss_scale, \
            float weight, amp_ref dx, size_t n, const amp_exec* exec) { \
        return ampi_loss_backward(kind##_SLOPE, words " backward", x, target, loss_scale, weight, \
            dx, n, exec); \
    }
AMPI_LOSS(AMP_DEF, amp_mse, AMPI_MSE, "mse")
AMPI_LOSS(AMP_DEF, amp_bce_with_logits, AMPI_BCE, "bce with logits")
AMPI_LOSS(AMPI_FN, ampi_mean, AMPI_MEAN, "mean")

AMPI_COMPILE_QUICKLY

/* >>impl-attention Attention, and the rotary embedding of positions.
   Scores are never a matrix of all queries and keys: they are formed in tiles, 64 queries by 256
   keys. Forward, a row keeps the maximum and the sum of its tiles so far (Milakov and Gimelshein
   2018). Backward forms each tile anew (Dao 2023):
       S = scale * Q K^T      P = e^(S - lse)        dP = dO V^T     D = rowsum(O * dO)
       dS = P * (dP - D)      dQ = scale * dS K      dK = scale * dS^T Q      dV = P^T dO

   Its tiles are transposed, a row for each key: two of three products read P^T and dS^T. Same bits:
   blocks of queries begin at multiples of 64, tiles at multiples of 256. A tile ends with the keys
   that its block sees. Tiles add to results in ascending order of keys, in these by head, then by
   query. Memory and threads choose only how much of a tile is formed at a time. They also choose
   whether dQ shares its tiles with dK and dV.
   Words. block: neighbouring queries of a head. task: what one thread does at a time. pass: all
   tasks of one kind. Letters. b: a sequence. h: a head of q. g: one of k and v. i: a query. j: a
   key. This room calls impl-gemm, impl-math, impl-tiles and impl-rows. */

enum { AMPI_QUERIES = AMPI_ROWS, AMPI_KEYS = 256 };

/* Numbers from `from` up to `to`; none if these are equal. */
typedef struct ampi_interval { size_t from, to; } ampi_interval;
/* A call, checked; absent operands are NULL. */
typedef struct ampi_attention {
    amp_attention_shape s;  /* with its defaults */
    size_t group;           /* heads of q for one of k and v */
    amp_ref q, k, v, y, dy, dq, dk, dv;
    float* lse;
    amp_dtype weight, slope;  /* types of P and dS in products */
    int accumulate;
} ampi_attention;

/* Scratch memory of a task. */
typedef struct ampi_attention_room {
    float *tile, *slopes;  /* S and P; dP and dS, if backward */
    float* sums;           /* of results */
    size_t queries, keys;  /* at most, of a tile */
    size_t columns;        /* of results that are summed at a time */
    amp_exec exec;         /* of products */
} ampi_attention_room;

typedef void (*ampi_attention_work)(const ampi_attention* a, size_t task,
    const ampi_attention_room* r);

/* The keys that query i sees. */
AMPI_FN ampi_interval ampi_keys_of(const amp_attention_shape* s, size_t b, size_t i) {
    const size_t limit = s->lengths ? (size_t)s->lengths[b] : s->keys;
    const size_t end = i + s->keys + 1 > s->queries ? i + s->keys + 1 - s->queries : 0;
    ampi_interval r = { 0, limit };
    if (!s->causal) return r;
    if (s->window > 0 && end > s->window) r.from = ampi_min_size(end - s->window, limit);
    r.to = ampi_min_size(end, limit);
    return r;
}

/* The queries that see key j, if its sequence has it. */
AMPI_FN ampi_interval ampi_queries_of(const amp_attention_shape* s, size_t b, size_t j) {
    ampi_interval r = { 0, s->queries };
    (void)b;
    if (!s->causal) return r;
    r.from = j + s->queries > s->keys ? j + s->queries - s->keys : 0;
    if (s->window > 0) {
        const size_t end = j + s->queries + s->window;
        r.to = end > s->keys ? ampi_min_size(end - s->keys, s->queries) : 0;
    }
    return r;
}

/* What two ranges share. */
AMPI_FN ampi_interval ampi_overlap(ampi_interval a, size_t from, size_t to) {
    a.from = ampi_min_size(ampi_max_size(a.from, from), to);
    a.to = ampi_max_size(ampi_min_size(a.to, to), a.from);
    return a;
}

/* The keys that any query of the block of query i sees, from a multiple of 16 on: so a key belongs
   to the same lane of sums in each block. */
AMPI_FN ampi_interval ampi_keys_of_block(const amp_attention_shape* s, size_t b, size_t i) {
    const size_t first = i / AMPI_QUERIES * AMPI_QUERIES;
    const size_t last = ampi_min_size(first + AMPI_QUERIES, s->queries) - 1;
    ampi_interval r = ampi_keys_of(s, b, last);
    r.from = ampi_min_size(ampi_keys_of(s, b, first).from / AMPI_LANES * AMPI_LANES, r.to);
    return r;
}

/* Operands from a position and head on: of q or y, and of k or v. */
AMPI_FN amp_ref ampi_query_at(const ampi_attention* a, amp_ref x, size_t ld, size_t b, size_t i,
        size_t h) {
    return ampi_from(x, (b * a->s.queries + i) * ld + h * a->s.head_size);
}

/* Of k or v, from a position and head on. */
AMPI_FN amp_ref ampi_key_at(const ampi_attention* a, amp_ref x, size_t ld, size_t b, size_t j,
        size_t g) {
    return ampi_from(x, (b * a->s.key_stride + j) * ld + g * a->s.head_size);
}

/* A product of tiles: c[m,n] = alpha * a * b + beta * c. */
AMPI_FN void ampi_tile_product(const ampi_attention_room* r, const ampi_operand* a,
        const ampi_operand* b, size_t m, size_t n, size_t k, float alpha, float beta, float* c,
        size_t ldc) {
    ampi_product s;
    ampi_product_init(&s, m, n, k, amp_f32(c), ldc);
    s.a = *a;
    s.b = *b;
    s.c.alpha = alpha;
    s.c.beta = beta;
    ampi_gemm_run(&s, &r->exec);
}

/* Rows of a result, rounded to its type. */
AMPI_FN void ampi_tile_out(amp_ref to, size_t ld, const float* tile, size_t tile_ld, size_t rows,
        size_t n) {
    const amp_dtype t = ampi_dtype_or_f32(to.dtype);
    for (size_t i = 0; i < rows; i++)
        ampi_kernels_now()->convert(ampi_from(to, i * ld).data, t, tile + i * tile_ld, AMP_F32, n,
            NULL, 1);
    ampi_kernels_end();
}

/* A tile becomes one of type t, in its memory. */
AMPI_FN void ampi_tile_round(float* tile, amp_dtype t, size_t n) {
    if (t == AMP_F32) return;
    ampi_kernels_now()->convert(tile, t, tile, AMP_F32, n, NULL, 1);
    ampi_kernels_end();
}

/* Sets what is not seen in a tile's rows [first, first + rows) to `value`: columns outside of those
   from `column` on that of(s, b, row) has, and those behind n up to whole vectors. */
AMPI_FN void ampi_tile_mask(const ampi_attention* a, size_t b,
        ampi_interval (*of)(const amp_attention_shape*, size_t, size_t), float* tile, size_t first,
        size_t rows, size_t column, size_t n, float value) {
    const size_t ld = ampi_padded(n);
    for (size_t r = 0; r < rows; r++, tile += ld) {
        const ampi_interval seen = ampi_overlap(of(&a->s, b, first + r), column, column + n);
        for (size_t c = 0; c < seen.from - column; c++) tile[c] = value;
        for (size_t c = seen.to - column; c < ld; c++) tile[c] = value;
    }
}

/* --- forward --- */

/* A row's maximum, and the sum of e^(score - maximum), of the keys so far; `keep` is what a new
   maximum leaves of earlier sums. */
typedef struct ampi_softmax_state {
    float max[AMPI_QUERIES], sum[AMPI_QUERIES], keep[AMPI_QUERIES];
} ampi_softmax_state;
/* Scores of a tile become weights. */
AMPI_FN void ampi_softmax_step(ampi_softmax_state* state, float* tile, size_t rows, size_t ld) {
    ampi_row_args q = ampi_no_row_args();
    ampi_row_sums sums;
    memcpy(state->keep, state->max, sizeof state->keep);
    ampi_rows_max(state->max, tile, rows, ld);
    q.mean = state->max;
    ampi_rows_each(AMPI_EXP, &q, tile, NULL, tile, rows, ld);
    ampi_sum_rows(AMPI_SUM, &sums, tile, tile, NULL, rows, ld, 0);
    for (size_t r = 0; r < rows; r++) {
        state->keep[r] = ampi_exp(AMPI_FMA_NATIVE, state->keep[r] - state->max[r]);
        state->sum[r] = ampi_fma(AMPI_FMA_NATIVE, state->sum[r], state->keep[r],
            (float)sums.sum[r]);
    }
}

/* x *= factor, row by row. */
AMPI_FN void ampi_rows_scale(float* x, const float* factor, size_t rows, size_t ld) {
    ampi_row_args q = ampi_no_row_args();
    q.mean = q.scale = factor;  /* no mean is taken off */
    q.factor = 1.0f;
    ampi_rows_each(AMPI_DIVIDE, &q, x, NULL, x, rows, ld);
}

/* Weighted sums of n columns of values, from `column` on, in r->sums, not yet divided by the sums
   of weights: of queries [i, i + rows) of one block. */
AMPI_FN void ampi_attention_sums(const ampi_attention* a, const ampi_attention_room* r, size_t b,
        size_t h, size_t i, size_t rows, size_t column, size_t n, ampi_softmax_state* state) {
    const amp_attention_shape* s = &a->s;
    const ampi_interval seen = ampi_keys_of_block(s, b, i);
    const ampi_operand q = ampi_matrix(ampi_query_at(a, a->q, s->ldq, b, i, h), s->ldq, 1);
    size_t keys;
    ampi_fill(state->max, AMPI_QUERIES, -AMPI_FLT_MAX);
    ampi_fill(state->sum, AMPI_QUERIES, 0.0f);
    if (seen.from == seen.to) memset(r->sums, 0, rows * ampi_padded(n) * sizeof *r->sums);
    for (size_t j = seen.from; j < seen.to; j += keys) {
        keys = ampi_min_size(AMPI_KEYS - j % AMPI_KEYS, seen.to - j);
        const size_t ld = ampi_padded(keys);
        const ampi_operand k = ampi_matrix(ampi_key_at(a, a->k, s->ldk, b, j, h / a->group),
            s->ldk, 1);
        const ampi_operand v = ampi_matrix(ampi_from(ampi_key_at(a, a->v, s->ldv, b, j,
            h / a->group), column), s->ldv, 0);
        const ampi_operand weights = ampi_matrix(amp_ref_of(r->tile, a->weight), ld, 1);
        ampi_tile_product(r, &q, &k, rows, keys, s->head_size, s->scale, 0.0f, r->tile, ld);
        ampi_tile_mask(a, b, ampi_keys_of, r->tile, i, rows, j, keys, ampi_float(0xff800000u));
        ampi_softmax_step(state, r->tile, rows, ld);
        ampi_tile_round(r->tile, a->weight, rows * ld);
        if (j > seen.from) ampi_rows_scale(r->sums, state->keep, rows, ampi_padded(n));
        ampi_tile_product(r, &weights, &v, rows, n, keys, 1.0f, j > seen.from, r->sums,
            ampi_padded(n));
    }
}

/* y and lse of some queries of a head; a query that sees no key has zeros. */
AMPI_FN void ampi_attention_queries(const ampi_attention* a, const ampi_attention_room* r,
        size_t b, size_t h, size_t i, size_t rows) {
    const amp_attention_shape* s = &a->s;
    ampi_softmax_state state;
    size_t n;
    for (size_t column = 0; column < s->head_size; column += n) {
        n = ampi_min_size(s->head_size - column, r->columns);
        ampi_attention_sums(a, r, b, h, i, rows, column, n, &state);
        for (size_t m = 0; m < rows; m++) {
            const ampi_interval seen = ampi_keys_of(s, b, i + m);
            const int none = seen.from == seen.to;
            if (none) memset(r->sums + m * ampi_padded(n), 0, n * sizeof *r->sums);
            state.keep[m] = none ? 0.0f : 1.0f / state.sum[m];
            if (a->lse && column == 0)
                a->lse[(b * s->heads + h) * s->queries + i + m] = none ? ampi_float(0xff800000u)
                    : ampi_clean_nan(state.max[m] + ampi_log(AMPI_FMA_NATIVE, state.sum[m]));
        }
        ampi_rows_scale(r->sums, state.keep, rows, ampi_padded(n));
        ampi_tile_out(ampi_from(ampi_query_at(a, a->y, s->ldy, b, i, h), column), s->ldy, r->sums,
            ampi_padded(n), rows, n);
    }
}

/* A block of queries of a head. */
AMPI_FN void ampi_attention_y_task(const ampi_attention* a, size_t task,
        const ampi_attention_room* r) {
    const amp_attention_shape* s = &a->s;
    const size_t blocks = ampi_div_up(s->queries, AMPI_QUERIES), head = task / blocks;
    const size_t first = task % blocks * AMPI_QUERIES;
    const size_t end = ampi_min_size(first + AMPI_QUERIES, s->queries);
    for (size_t i = first; i < end; i += r->queries)
        ampi_attention_queries(a, r, head / s->heads, head % s->heads, i,
            ampi_min_size(r->queries, end - i));
}

/* --- backward --- */

/* A gradient while it is summed in FP32: where it lies, or in scratch memory. */
typedef struct ampi_slope_sums {
    amp_ref to;      /* data NULL: not wanted */
    size_t  ld, rows, n;
    float*  sums;
    size_t  sums_ld;
} ampi_slope_sums;
/* Where a gradient is summed; scratch: for one of 16 bits. */
AMPI_FN ampi_slope_sums ampi_slope_sums_of(amp_ref to, size_t ld, size_t rows, size_t n,
        float* scratch) {
    const int direct = ampi_dtype_or_f32(to.dtype) == AMP_F32;
    const ampi_slope_sums g = { to, ld, rows, n, direct ? (float*)to.data : scratch,
        direct ? ld : ampi_padded(n) };
    return g;
}

/* Sums begin with zeros, or with what the gradient holds if it is added to. */
AMPI_FN void ampi_slope_sums_begin(const ampi_attention* a, const ampi_slope_sums* g) {
    const int add = a->accumulate & AMP_ACCUMULATE_INPUT;
    for (size_t i = 0; i < g->rows && g->to.data; i++) {
        float* row = g->sums + i * g->sums_ld;
        if (!add) memset(row, 0, g->n * sizeof *row);
        else if (g->sums != (const float*)g->to.data)
            ampi_load_f32(row, g->to.data, g->to.dtype, i * g->ld, g->n);
    }
}

/* Stores what was summed in scratch memory. */
AMPI_FN void ampi_slope_sums_end(const ampi_slope_sums* g) {
    if (g->to.data && g->sums != (const float*)g->to.data)
        ampi_tile_out(g->to, g->ld, g->sums, g->sums_ld, g->rows, g->n);
}

/* Scores become weights, gradients of weights those of scores. lse, dot: one a column. */
AMPI_KERNEL(ampi_attention_slopes, (float* tile, float* slopes, const float* lse,
        const float* dot, size_t rows, size_t n), tile, slopes, lse, dot, rows, n) {
    for (size_t r = 0; r < rows; r++, tile += n, slopes += n) {
        AMPI_LOOP(tile, n, ampi_exp(hw, tile[i] - lse[i]));
        AMPI_LOOP(slopes, n, tile[i] * (slopes[i] - dot[i]));
    }
}

/* dot[r] = sum of y * dy over row r of some queries of a head. */
AMPI_FN void ampi_attention_dots(const ampi_attention* a, size_t b, size_t h, size_t i,
        size_t rows, float* dot) {
    AMPI_ALIGNED float y[AMPI_KEYS], dy[AMPI_KEYS];
    ampi_row_sums sums;
    for (size_t r = 0; r < rows; r++) {
        const amp_ref from = ampi_query_at(a, a->y, a->s.ldy, b, i + r, h);
        const amp_ref slope = ampi_query_at(a, a->dy, a->s.ldy, b, i + r, h);
        for (size_t n, c = 0; c < a->s.head_size; c += n) {
            n = ampi_min_size(a->s.head_size - c, AMPI_KEYS);
            ampi_load_f32(y, from.data, from.dtype, c, n);
            ampi_load_f32(dy, slope.data, slope.dtype, c, n);
            memset(y + n, 0, (ampi_padded(n) - n) * sizeof *y);
            memset(dy + n, 0, (ampi_padded(n) - n) * sizeof *dy);
            ampi_sum_rows(AMPI_PRODUCTS, &sums, y, dy, NULL, 1, n, c > 0);
        }
        dot[r] = (float)sums.dot[0];
    }
}

/* P^T in r->tile and dS^T in r->slopes, rounded to their types: of keys [j, j + keys) by queries
   [i, i + rows), padded(rows) elements from row to row. */
AMPI_FN void ampi_attention_tiles(const ampi_attention* a, const ampi_attention_room* r, size_t b,
        size_t h, size_t i, size_t rows, size_t j, size_t keys) {
    const amp_attention_shape* s = &a->s;
    const size_t g = h / a->group, ld = ampi_padded(rows);
    const ampi_operand q = ampi_matrix(ampi_query_at(a, a->q, s->ldq, b, i, h), s->ldq, 1);
    const ampi_operand k = ampi_matrix(ampi_key_at(a, a->k, s->ldk, b, j, g), s->ldk, 1);
    const ampi_operand v = ampi_matrix(ampi_key_at(a, a->v, s->ldv, b, j, g), s->ldv, 1);
    const ampi_operand dy = ampi_matrix(ampi_query_at(a, a->dy, s->ldy, b, i, h), s->ldy, 1);
    const float* saved = a->lse + (b * s->heads + h) * s->queries + i;
    float lse[AMPI_QUERIES] = { 0 }, dot[AMPI_QUERIES] = { 0 };
    ampi_tile_product(r, &k, &q, keys, rows, s->head_size, s->scale, 0.0f, r->tile, ld);
    ampi_tile_product(r, &v, &dy, keys, rows, s->head_size, 1.0f, 0.0f, r->slopes, ld);
    for (size_t m = 0; m < keys; m++) {
        memset(r->tile + m * ld + rows, 0, (ld - rows) * sizeof *r->tile);
        memset(r->slopes + m * ld + rows, 0, (ld - rows) * sizeof *r->slopes);
    }

    /* -inf: a query that sees nothing, whose row the mask clears */
    for (size_t m = 0; m < rows; m++)
        lse[m] = ampi_bits(saved[m]) == 0xff800000u ? 0.0f : saved[m];
    ampi_attention_dots(a, b, h, i, rows, dot);
    ampi_attention_slopes(r->tile, r->slopes, lse, dot, keys, ld);
    ampi_tile_mask(a, b, ampi_queries_of, r->tile, j, keys, i, rows, 0.0f);
    ampi_tile_mask(a, b, ampi_queries_of, r->slopes, j, keys, i, rows, 0.0f);
    ampi_tile_round(r->tile, a->weight, keys * ld);
    ampi_tile_round(r->slopes, a->slope, keys * ld);
}

/* The dq of a head of a sequence, of queries [i, i + rows) in n columns. */
AMPI_FN ampi_slope_sums ampi_attention_dq(const ampi_attention* a, size_t b, size_t h, size_t i,
        size_t rows, size_t column, size_t n, float* scratch) {
    return ampi_slope_sums_of(ampi_from(ampi_query_at(a, a->dq, a->s.ldq, b, i, h), column),
        a->s.ldq, rows, n, scratch);
}

/* Adds to dq, of `rows` queries from its row `from` on, what a tile of keys from j on gives. */
AMPI_FN void ampi_attention_add_dq(const ampi_attention* a, const ampi_attention_room* r,
        size_t b, size_t h, size_t rows, size_t j, size_t keys, size_t column,
        const ampi_slope_sums* dq, size_t from) {
    const ampi_operand slopes = ampi_matrix(amp_ref_of(r->slopes, a->slope), ampi_padded(rows), 0);
    const ampi_operand k = ampi_matrix(ampi_from(ampi_key_at(a, a->k, a->s.ldk, b, j,
        h / a->group), column), a->s.ldk, 0);
    if (dq->to.data)
        ampi_tile_product(r, &slopes, &k, rows, dq->n, keys, a->s.scale, 1.0f,
            dq->sums + from * dq->sums_ld, dq->sums_ld);
}

/* Adds what a tile of queries [i, i + rows) gives to dk and dv: to `keys` rows from `from` on, in
   columns from `column` on. */
AMPI_FN void ampi_attention_add_dkv(const ampi_attention* a, const ampi_attention_room* r,
        size_t b, size_t h, size_t i, size_t rows, size_t keys, size_t column,
        const ampi_slope_sums* dk, const ampi_slope_sums* dv, size_t from) {
    const amp_attention_shape* s = &a->s;
    const ampi_operand slopes = ampi_matrix(amp_ref_of(r->slopes, a->slope), ampi_padded(rows), 1);
    const ampi_operand weights = ampi_matrix(amp_ref_of(r->tile, a->weight), ampi_padded(rows), 1);
    const ampi_operand q = ampi_matrix(ampi_from(ampi_query_at(a, a->q, s->ldq, b, i, h), column),
        s->ldq, 0);
    const ampi_operand dy = ampi_matrix(ampi_from(ampi_query_at(a, a->dy, s->ldy, b, i, h),
        column), s->ldy, 0);
    if (dv->to.data)
        ampi_tile_product(r, &weights, &dy, keys, dv->n, rows, 1.0f, 1.0f,
            dv->sums + from * dv->sums_ld, dv->sums_ld);
    if (dk->to.data)
        ampi_tile_product(r, &slopes, &q, keys, dk->n, rows, s->scale, 1.0f,
            dk->sums + from * dk->sums_ld, dk->sums_ld);
}

/* dk and dv of keys [j, j + keys), of one tile, in n columns; where they are all columns, and
   `with_dq`, the tile adds to dq too, whose sums lie in scratch memory head by head. */
AMPI_FN void ampi_attention_keys(const ampi_attention* a, const ampi_attention_room* r, size_t b,
        size_t g, size_t j, size_t keys, size_t column, size_t n, int with_dq) {
    const amp_attention_shape* s = &a->s;
    const size_t ld = ampi_padded(n);
    const ampi_slope_sums dk = ampi_slope_sums_of(ampi_from(ampi_key_at(a, a->dk, s->ldk, b, j, g),
        column), s->ldk, keys, n, r->sums);
    const ampi_slope_sums dv = ampi_slope_sums_of(ampi_from(ampi_key_at(a, a->dv, s->ldv, b, j, g),
        column), s->ldv, keys, n, r->sums + r->keys * ld);
    size_t rows;
    ampi_slope_sums_begin(a, &dk);
    ampi_slope_sums_begin(a, &dv);
    for (size_t h = 0; h < a->group; h++) {
        const size_t head = g * a->group + h;
        const ampi_slope_sums dq = ampi_attention_dq(a, b, head, 0, s->queries, 0, n,
            r->sums + (2 * r->keys + h * s->queries) * ld);
        for (size_t i = 0; i < s->queries; i += rows) {
            const ampi_interval seen = ampi_overlap(ampi_keys_of_block(s, b, i), j, j + keys);
            const size_t from = seen.from, count = seen.to - from;
            rows = ampi_min_size(s->queries - i, AMPI_QUERIES);
            if (count == 0) continue;
            ampi_attention_tiles(a, r, b, head, i, rows, from, count);
            ampi_attention_add_dkv(a, r, b, head, i, rows, count, column, &dk, &dv, from - j);
            if (with_dq) ampi_attention_add_dq(a, r, b, head, rows, from, count, 0, &dq, i);
        }
    }
    ampi_slope_sums_end(&dk);
    ampi_slope_sums_end(&dv);
}

/* All gradients of one head of k and v. */
AMPI_FN void ampi_attention_all_task(const ampi_attention* a, size_t task,
        const ampi_attention_room* r) {
    const amp_attention_shape* s = &a->s;
    const size_t b = task / s->kv_heads, g = task % s->kv_heads, d = s->head_size;
    for (int end = 0; end < 2; end++) {
        for (size_t h = 0; h < a->group; h++) {
            const ampi_slope_sums dq = ampi_attention_dq(a, b, g * a->group + h, 0, s->queries, 0,
                d, r->sums + (2 * r->keys + h * s->queries) * ampi_padded(d));
            if (end) ampi_slope_sums_end(&dq);
            else ampi_slope_sums_begin(a, &dq);
        }
        for (size_t j = 0; j < s->keys && !end; j += AMPI_KEYS)
            ampi_attention_keys(a, r, b, g, j, ampi_min_size(s->keys - j, AMPI_KEYS), 0, d, 1);
    }
}

/* dk and dv of r->keys keys. */
AMPI_FN void ampi_attention_dkv_task(const ampi_attention* a, size_t task,
        const ampi_attention_room* r) {
    const amp_attention_shape* s = &a->s;
    const size_t runs = ampi_div_up(s->keys, r->keys), head = task / runs;
    const size_t j = task % runs * r->keys, keys = ampi_min_size(s->keys - j, r->keys);
    for (size_t c = 0; c < s->head_size; c += r->columns)
        ampi_attention_keys(a, r, head / s->kv_heads, head % s->kv_heads, j, keys, c,
            ampi_min_size(s->head_size - c, r->columns), 0);
}

/* dq of a block of queries, r->queries at a time. */
AMPI_FN void ampi_attention_dq_task(const ampi_attention* a, size_t task,
        const ampi_attention_room* r) {
    const amp_attention_shape* s = &a->s;
    const size_t blocks = ampi_div_up(s->queries, AMPI_QUERIES), head = task / blocks;
    const size_t b = head / s->heads, h = head % s->heads, first = task % blocks * AMPI_QUERIES;
    const size_t end = ampi_min_size(first + AMPI_QUERIES, s->queries);
    const ampi_interval seen = ampi_keys_of_block(s, b, first);
    size_t keys;
    for (size_t i = first; i < end; i += r->queries)
        for (size_t c = 0; c < s->head_size; c += r->columns) {
            const size_t rows = ampi_min_size(end - i, r->queries);
            const ampi_slope_sums dq = ampi_attention_dq(a, b, h, i, rows, c,
                ampi_min_size(s->head_size - c, r->columns), r->sums);
            ampi_slope_sums_begin(a, &dq);
            for (size_t j = seen.from; j < seen.to; j += keys) {
                keys = ampi_min_size(AMPI_KEYS - j % AMPI_KEYS, seen.to - j);
                ampi_attention_tiles(a, r, b, h, i, rows, j, keys);
                ampi_attention_add_dq(a, r, b, h, rows, j, keys, c, &dq, 0);
            }
            ampi_slope_sums_end(&dq);
        }
}

/* --- passes --- */

/* Forward; all gradients; dk and dv alone; dq alone. */
typedef enum ampi_attention_kind { AMPI_ATTENTION_Y, AMPI_ATTENTION_ALL, AMPI_ATTENTION_DKV,
        AMPI_ATTENTION_DQ } ampi_attention_kind;
/* Tasks of one kind, and what a thread's scratch memory holds beside that of products. */
typedef struct ampi_attention_pass {
    ampi_attention_work work;
    size_t tasks, queries, keys, columns;  /* as in ampi_attention_room */
    size_t tiles, rows;                    /* tiles; rows of results */
    size_t floats;
} ampi_attention_pass;
enum { AMPI_ATTENTION_STACK = 9216 };  /* floats of a pass on the stack, at most */

/* A pass in a workspace, or on the stack. */
AMPI_FN ampi_attention_pass ampi_attention_pass_of(const ampi_attention* a,
        ampi_attention_kind kind, int on_stack) {
    static const ampi_attention_work work[] = { ampi_attention_y_task, ampi_attention_all_task,
        ampi_attention_dkv_task, ampi_attention_dq_task };
    const amp_attention_shape* s = &a->s;
    const int by_keys = kind == AMPI_ATTENTION_ALL || kind == AMPI_ATTENTION_DKV;
    ampi_attention_pass p;
    p.work = work[kind];
    p.queries = on_stack && !by_keys ? 16 : AMPI_QUERIES;
    p.keys = on_stack && by_keys ? 32 : AMPI_KEYS;
    p.columns = on_stack ? ampi_min_size(s->head_size, by_keys ? 32 : 64) : s->head_size;
    p.tasks = s->batch * s->heads * ampi_div_up(s->queries, AMPI_QUERIES);
    if (by_keys) p.tasks = s->batch * s->kv_heads;
    if (kind == AMPI_ATTENTION_DKV) p.tasks *= ampi_div_up(s->keys, p.keys);

    p.tiles = kind == AMPI_ATTENTION_Y ? 1 : 2;
    p.rows = by_keys ? 2 * p.keys : p.queries;
    if (kind == AMPI_ATTENTION_ALL) p.rows += a->group * s->queries;
    p.floats = p.tiles * p.queries * p.keys + p.rows * ampi_padded(p.columns);
    return p;
}

/* Floats that products of tiles work in at full speed, on one thread. */
AMPI_FN size_t ampi_attention_products(const amp_attention_shape* s) {
    const size_t side = ampi_max_size(AMPI_KEYS, s->head_size);
    ampi_product product;
    ampi_plan p;
    ampi_product_init(&product, side, side, side, AMP_NONE, side);
    AMPI_CLEAR(p);
    ampi_plan_blocks(&p, ampi_kernels_now(), &product, side, side, 0);
    return ampi_padded(p.floats);
}

/* Threads that share a pass: one for less than a million multiplications. */
AMPI_FN size_t ampi_attention_shares(const amp_attention_shape* s, size_t tasks) {
    const double each = (double)s->queries * (double)s->keys * (double)s->head_size;
    return (double)(s->batch * s->heads) * each < 1e6 ? 1 : ampi_min_size(ampi_threads(), tasks);
}

/* Every shares-th task from number `share` on. memory: p->floats, then those of products, if
   any. */
AMPI_FN void ampi_attention_share(const ampi_attention* a, const ampi_attention_pass* p,
        const amp_exec* exec, float* memory, size_t products, size_t share, size_t shares) {
    const size_t tile = p->queries * p->keys;
    ampi_attention_room r;
    AMPI_CLEAR(r);
    r.tile = memory;
    r.slopes = memory + (p->tiles - 1) * tile;
    r.sums = memory + p->tiles * tile;
    r.queries = p->queries;
    r.keys = p->keys;
    r.columns = p->columns;
    if (exec) r.exec = *exec;
    r.exec.workspace = products > 0 ? memory + p->floats : NULL;
    r.exec.workspace_size = products * sizeof *memory;
    for (size_t task = share; task < p->tasks; task += shares) p->work(a, task, &r);
}

/* A share without a workspace. */
AMPI_APART void ampi_attention_share_on_stack(const ampi_attention* a,
        const ampi_attention_pass* p, const amp_exec* exec, size_t share, size_t shares) {
    float memory[AMPI_ATTENTION_STACK + 16];
    ampi_attention_share(a, p, exec, ampi_align64(memory), 0, share, shares);
}

/* Floats that a thread's share of a pass takes in a workspace. */
AMPI_FN size_t ampi_attention_each(const ampi_attention* a, ampi_attention_kind kind) {
    return ampi_attention_pass_of(a, kind, 0).floats + ampi_attention_products(&a->s) + 32;
}

/* Runs a pass in the workspace, with as many threads as that has room for, else on their stacks. */
AMPI_FN void ampi_attention_run(const ampi_attention* a, ampi_attention_kind kind,
        const amp_exec* exec) {
    const size_t each = ampi_attention_each(a, kind), fit = ampi_room(exec) / each;
    const ampi_attention_pass p = ampi_attention_pass_of(a, kind, fit == 0);
    size_t shares = ampi_attention_shares(&a->s, p.tasks);
    if (fit > 0) shares = ampi_min_size(shares, fit);
    float* memory = fit > 0 ? ampi_align64(exec->workspace) : NULL;
    AMPI_PARALLEL_FOR(shares > 1, for (int64_t i = 0; i < (int64_t)shares; i++) {
        if (memory) ampi_attention_share(a, &p, exec, memory + (size_t)i * each, each - p.floats,
                (size_t)i, shares);
        else ampi_attention_share_on_stack(a, &p, exec, (size_t)i, shares);
    });
}

/* --- calls --- */

/* Refuses a shape that is not valid; gives it its defaults. */
AMPI_FN amp_result ampi_attention_check(ampi_attention* a, const char* op,
        const amp_attention_shape* shape, const amp_exec* exec) {
    amp_attention_shape* s = &a->s;
    size_t n;
    AMPI_CLEAR(*a);
    AMPI_REFUSE_OP(!shape, AMP_ERR_ARGUMENT, "%s: the shape is NULL", op);
    *s = *shape;
    if (s->keys == 0) s->keys = s->queries;
    if (s->kv_heads == 0) s->kv_heads = s->heads;
    AMPI_REFUSE_OP(s->queries == 0 || s->heads == 0 || s->head_size == 0, AMP_ERR_SHAPE,
        "%s: %lld queries, %lld heads of %lld elements; each must be 1 or more", op,
        ampi_shown(s->queries), ampi_shown(s->heads), ampi_shown(s->head_size));
    AMPI_REFUSE_OP(s->heads % s->kv_heads != 0, AMP_ERR_SHAPE,
        "%s: %lld heads are not whole groups for %lld kv_heads", op, ampi_shown(s->heads),
        ampi_shown(s->kv_heads));
    AMPI_REFUSE_OP(s->window > 0 && !s->causal, AMP_ERR_SHAPE,
        "%s: the window is %lld, but only causal attention has one", op, ampi_shown(s->window));
    if (s->key_stride == 0) s->key_stride = s->keys;
    AMPI_REFUSE_OP(s->key_stride < s->keys, AMP_ERR_SHAPE,
        "%s: key_stride is %lld, but a sequence has %lld keys", op, ampi_shown(s->key_stride),
        ampi_shown(s->keys));
    AMPI_REFUSE_OP(!ampi_in_range(&s->scale, -AMPI_FLT_MAX, AMPI_FLT_MAX), AMP_ERR_DESC,
        "%s: the scale is not finite", op);
    /* No product of sizes below overflows, or any sum of two. */
    n = ampi_area(ampi_area(ampi_max_size(s->batch, 1), s->heads), s->head_size);
    n = ampi_area(n, ampi_max_size(s->queries, s->key_stride));
    AMPI_REFUSE_OP(n > SIZE_MAX / 64 || s->window > SIZE_MAX / 4, AMP_ERR_ARGUMENT,
        "%s: an operand has more elements than memory can hold, or a negative size", op);

    if (s->scale == 0.0f) s->scale = (float)(1.0 / sqrt((double)s->head_size));
    if (s->ldq == 0) s->ldq = s->heads * s->head_size;
    if (s->ldk == 0) s->ldk = s->kv_heads * s->head_size;
    if (s->ldv == 0) s->ldv = s->kv_heads * s->head_size;
    if (s->ldy == 0) s->ldy = s->heads * s->head_size;
    a->group = s->heads / s->kv_heads;
    return AMP_OK;
}

/* Refuses lengths outside of the keys. */
AMPI_FN amp_result ampi_attention_check_lengths(const amp_attention_shape* s, const char* op,
        const amp_exec* exec) {
    for (size_t b = 0; b < s->batch && s->lengths; b++)
        AMPI_REFUSE_OP(s->lengths[b] < 0 || (size_t)s->lengths[b] > s->keys, AMP_ERR_ARGUMENT,
            "%s: lengths[%lld] is %d, outside of 0 to %lld keys", op, ampi_shown(b),
            (int)s->lengths[b], ampi_shown(s->keys));
    return AMP_OK;
}

/* The type of a tile that is multiplied by x: that of x, as products read it, if 16 bits. */
AMPI_FN amp_dtype ampi_tile_type(amp_ref x, const amp_exec* exec) {
    const amp_dtype t = ampi_dtype_or_f32(x.dtype);
    return t == AMP_F32 && exec && exec->operands ? exec->operands : t;
}

/* Bytes for full speed, see the interface. */
AMP_DEF size_t amp_attention_workspace(const amp_attention_shape* s) {
    ampi_attention a;
    size_t floats = 0;
    if (ampi_attention_check(&a, "attention", s, NULL) != AMP_OK) return 0;
    for (int i = AMPI_ATTENTION_Y; i <= AMPI_ATTENTION_DQ; i++) {
        const ampi_attention_kind kind = (ampi_attention_kind)i;
        floats = ampi_max_size(floats, ampi_attention_each(&a, kind) * ampi_attention_shares(&a.s,
            ampi_attention_pass_of(&a, kind, 0).tasks));
    }
    return ampi_floats_workspace(floats);
}

/* The operands' checks; gradients: NULL in a forward call. */
AMP_DEF amp_result amp_attention_forward(const amp_attention_shape* shape, amp_ref q, amp_ref k,
        amp_ref v, amp_ref y, float* lse, const amp_exec* exec) {
    const char* op = "attention";
    ampi_attention a;
    AMPI_TRY(ampi_attention_check(&a, op, shape, exec));
    const amp_attention_shape* s = &a.s;
    const size_t rows = s->batch * s->queries, d = s->heads * s->head_size;
    const size_t kv_d = s->kv_heads * s->head_size;
    const size_t kv_rows = s->batch > 0 ? (s->batch - 1) * s->key_stride + s->keys : 0;
    const ampi_argument list[] = {
        { "q", q.data, q.dtype, AMPI_IN, rows, d, s->ldq },
        { "k", k.data, k.dtype, AMPI_IN, kv_rows, kv_d, s->ldk },
        { "v", v.data, v.dtype, AMPI_IN, kv_rows, kv_d, s->ldv },
        { "y", y.data, y.dtype, AMPI_OUT, rows, d, s->ldy },
        AMPI_ARG_F32(lse, AMPI_OUT | AMPI_NULL, rows * s->heads),
        { "lengths", s->lengths, AMP_F32, AMPI_NULL, AMPI_FLAT(s->batch) }
    };
    AMPI_TRY(AMPI_CHECK_MATRICES(ampi_exec_logger(exec), op, list));
    AMPI_TRY(ampi_attention_check_lengths(s, op, exec));
    AMPI_TRY(ampi_check_exec(exec, op));
    AMPI_COMPUTE_OP;
    a.q = q; a.k = k; a.v = v; a.y = y;
    a.lse = lse;
    a.weight = ampi_tile_type(v, exec);
    AMPI_GROW_WORKSPACE(amp_attention_workspace(s))
    ampi_attention_run(&a, AMPI_ATTENTION_Y, exec);
    AMPI_DONE_OP;
}

/* One pass over tiles for all gradients; or two, which form tiles twice, where memory or heads of k
   and v are few. */
AMP_DEF amp_result amp_attention_backward(const amp_attention_shape* shape, amp_ref dy, amp_ref q,
        amp_ref k, amp_ref v, amp_ref y, const float* lse, amp_ref dq, amp_ref dk, amp_ref dv,
        int accumulate, const amp_exec* exec) {
    const char* op = "attention backward";
    const int use = ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT);
    ampi_attention a;
    AMPI_TRY(ampi_attention_check(&a, op, shape, exec));
    const amp_attention_shape* s = &a.s;
    const size_t rows = s->batch * s->queries, d = s->heads * s->head_size;
    const size_t kv_d = s->kv_heads * s->head_size;
    const size_t kv_rows = s->batch > 0 ? (s->batch - 1) * s->key_stride + s->keys : 0;
    const ampi_argument list[] = {
        { "dy", dy.data, dy.dtype, AMPI_IN, rows, d, s->ldy },
        { "q", q.data, q.dtype, AMPI_IN, rows, d, s->ldq },
        { "k", k.data, k.dtype, AMPI_IN, kv_rows, kv_d, s->ldk },
        { "v", v.data, v.dtype, AMPI_IN, kv_rows, kv_d, s->ldv },
        { "y", y.data, y.dtype, AMPI_IN, rows, d, s->ldy },
        AMPI_ARG_F32(lse, AMPI_IN, rows * s->heads),
        { "dq", dq.data, dq.dtype, use, rows, d, s->ldq },
        { "dk", dk.data, dk.dtype, use, kv_rows, kv_d, s->ldk },
        { "dv", dv.data, dv.dtype, use, kv_rows, kv_d, s->ldv },
        { "lengths", s->lengths, AMP_F32, AMPI_NULL, AMPI_FLAT(s->batch) }
    };
    AMPI_TRY(AMPI_CHECK_MATRICES(ampi_exec_logger(exec), op, list));
    AMPI_TRY(ampi_attention_check_lengths(s, op, exec));
    AMPI_TRY(ampi_check_exec(exec, op));
    AMPI_COMPUTE_OP;
    a.q = q; a.k = k; a.v = v; a.y = y; a.dy = dy; a.dq = dq; a.dk = dk; a.dv = dv;
    a.lse = (float*)ampi_mutable(lse);
    a.accumulate = accumulate;
    a.weight = ampi_tile_type(v, exec);
    a.slope = ampi_tile_type(q, exec);
    AMPI_GROW_WORKSPACE(amp_attention_workspace(s))

    /* Tiles take five products, those of two passes together seven. */
    const size_t all = ampi_attention_shares(s, s->batch * s->kv_heads);
    const size_t threads = ampi_attention_shares(s, SIZE_MAX);
    if (7 * all >= 5 * threads && ampi_room(exec) >= ampi_attention_each(&a, AMPI_ATTENTION_ALL)) {
        ampi_attention_run(&a, AMPI_ATTENTION_ALL, exec);
    } else {
        if (dk.data || dv.data) ampi_attention_run(&a, AMPI_ATTENTION_DKV, exec);
        if (dq.data) ampi_attention_run(&a, AMPI_ATTENTION_DQ, exec);
    }
    AMPI_DONE_OP;
}

/* --- rope --- */

enum { AMPI_ROPE_PAIRS = 512 };  /* of a head, at most */

/* A call, checked. list: x, y. */
typedef struct ampi_rope {
    amp_rope_shape s;  /* with its defaults */
    const ampi_argument* list;
    float direction;   /* -1 turns back */
    uint64_t turns[AMPI_ROPE_PAIRS];  /* of a pair from a position to the next, times 2^64 */
} ampi_rope;

/* theta^(-i / pairs) / (2 pi), times 2^64, for each pair i. The root x = theta^(-1 / pairs) comes
   from Newton's method, which falls to it from 1: by a factor of about e^(1 / pairs) each time
   while it is far. */
AMPI_FN void ampi_rope_turns(ampi_rope* r, double theta) {
    const int64_t pairs = (int64_t)(r->s.head_size / 2);
    const double to = 1.0 / theta;
    double x = 1.0;
    for (int n = 0; n < 128; n++) {
        const double power = ampi_pow_int(x, pairs - 1);
        x -= (ampi_mul64(x, power) - to) / ampi_mul64((double)pairs, power);
    }
    for (int64_t i = 0; i < pairs; i++)
        r->turns[i] = (uint64_t)ampi_mul64(ampi_mul64(ampi_pow_int(x, i), 0.15915494309189535),
            18446744073709551616.0);
}

/* What each element of a head and its partner in the pair are multiplied by at a position, for n
   elements, whole heads. */
AMPI_FN void ampi_rope_factors(const ampi_rope* r, uint64_t position, float* own, float* other,
        size_t n) {
    const size_t d = r->s.head_size, pairs = d / 2;
    for (size_t i = 0; i < pairs; i++) {
        /* the angle as a fraction of 2^64, less the nearest of four quarters: an eighth at most */
        const uint64_t turn = position * r->turns[i], quarter = (turn + ((uint64_t)1 << 61)) >> 62;
        const int64_t rest = (int64_t)(turn - (quarter << 62));
        const size_t first = r->s.interleaved ? 2 * i : i;
        const size_t second = r->s.interleaved ? 2 * i + 1 : i + pairs;
        float c, s;
        ampi_turn(AMPI_FMA_NATIVE, (float)rest * 5.42101086e-20f, (int)quarter, &c, &s);
        own[first] = own[second] = c;
        other[first] = -s * r->direction;
        other[second] = s * r->direction;
    }
    for (size_t i = d; i < n; i++) {
        own[i] = own[i - d];
        other[i] = other[i - d];
    }
}

/* x = x * own + partner * other. */
AMPI_KERNEL(ampi_rope_apply, (float* x, const float* partner, const float* own,
        const float* other, size_t n), x, partner, own, other, n) {
    AMPI_LOOP(x, n, ampi_fma(hw, x[i], own[i], partner[i] * other[i]));
}

/* n elements of a row, from element `at` on, whole heads. */
AMPI_FN void ampi_rope_heads(const ampi_rope* r, size_t at, size_t n, const float* own,
        const float* other) {
    AMPI_ALIGNED float x[AMPI_ROWS_TILE], partner[AMPI_ROWS_TILE];
    const size_t d = r->s.head_size, pairs = d / 2;
    ampi_load_f32(x, r->list[0].data, r->list[0].dtype, at, n);
    for (size_t i = 0; i < n && r->s.interleaved; i++) partner[i] = x[i ^ 1];
    for (size_t i = 0; i < n && !r->s.interleaved; i += d) {
        memcpy(partner + i, x + i + pairs, pairs * sizeof *x);
        memcpy(partner + i + pairs, x + i, pairs * sizeof *x);
    }
    memset(x + n, 0, AMPI_LANES * sizeof *x);
    memset(partner + n, 0, AMPI_LANES * sizeof *x);
    ampi_rope_apply(x, partner, own, other, n);
    ampi_store(&r->list[1], at, x, n);
}

/* All sequences at one position. */
AMPI_FN void ampi_rope_position(const ampi_rope* r, size_t t) {
    AMPI_ALIGNED float own[AMPI_ROWS_TILE] = { 0 }, other[AMPI_ROWS_TILE] = { 0 };
    const amp_rope_shape* s = &r->s;
    const size_t all = s->heads * s->head_size;
    const size_t together = ampi_min_size(all, AMPI_PART / s->head_size * s->head_size);
    ampi_rope_factors(r, (uint64_t)(s->offset + t), own, other, together);
    for (size_t b = 0; b < s->batch; b++) {
        const size_t row = (b * s->positions + t) * s->width;
        for (size_t i = 0; i < all; i += together)
            ampi_rope_heads(r, row + i, ampi_min_size(all - i, together), own, other);
        for (size_t n, i = all; (n = ampi_part_size(s->width, i)) > 0; i += n) {
            float x[AMPI_PART];
            ampi_load_f32(x, r->list[0].data, r->list[0].dtype, row + i, n);
            ampi_store(&r->list[1], row + i, x, n);
        }
    }
}

/* Checks the operands x and y, with y's use, then turns position by position. */
AMPI_FN amp_result ampi_rope_run(const char* op, const amp_rope_shape* shape, amp_ref x,
        amp_ref y, const char* const names[2], int use, float direction, const amp_exec* exec) {
    ampi_rope r;
    AMPI_REFUSE_OP(!shape, AMP_ERR_ARGUMENT, "%s: the shape is NULL", op);
    r.s = *shape;
    r.direction = direction;
    AMPI_REFUSE_OP(r.s.head_size == 0 || r.s.head_size % 2 != 0
        || r.s.head_size > 2 * AMPI_ROPE_PAIRS, AMP_ERR_SHAPE,
        "%s: head_size is %lld; it must be even, from 2 to 1024", op, ampi_shown(r.s.head_size));
    const size_t heads = ampi_area(r.s.heads, r.s.head_size);
    if (r.s.width == 0) r.s.width = heads;
    AMPI_REFUSE_OP(r.s.width < heads, AMP_ERR_SHAPE,
        "%s: the width is %lld, but a row has %lld heads of %lld elements", op,
        ampi_shown(r.s.width), ampi_shown(r.s.heads), ampi_shown(r.s.head_size));
    if (r.s.theta == 0.0f) r.s.theta = 10000.0f;
    AMPI_REFUSE_OP(!ampi_in_range(&r.s.theta, 1.0f, AMPI_FLT_MAX), AMP_ERR_DESC,
        "%s: theta must be finite and at least 1", op);
    const size_t n = ampi_area(ampi_area(r.s.batch, r.s.positions), r.s.width);
    const ampi_argument list[] = {
        { names[0], x.data, x.dtype, AMPI_SAME, AMPI_FLAT(n) },
        { names[1], y.data, y.dtype, use, AMPI_FLAT(n) }
    };
    AMPI_CHECK(op, n, list);
    AMPI_COMPUTE_OP;
    r.list = list;
    ampi_rope_turns(&r, (double)r.s.theta);
    const int64_t positions = n > 0 && y.data ? (int64_t)r.s.positions : 0;
    AMPI_PARALLEL_OVER(n, for (int64_t t = 0; t < positions; t++)
        ampi_rope_position(&r, (size_t)t));
    AMPI_DONE_OP;
}

/* A rotation forward. */
AMP_DEF amp_result amp_rope_forward(const amp_rope_shape* s, amp_ref x, amp_ref y,
        const amp_exec* exec) {
    static const char* const names[] = { "x", "y" };
    return ampi_rope_run("rope", s, x, y, names, AMPI_OUT | AMPI_SAME, 1.0f, exec);
}

/* A rotation's transpose is the rotation back. */
AMP_DEF amp_result amp_rope_backward(const amp_rope_shape* s, amp_ref dy, amp_ref dx,
        int accumulate, const amp_exec* exec) {
    static const char* const names[] = { "dy", "dx" };
    const int add = ampi_gradient_use(accumulate, AMP_ACCUMULATE_INPUT);
    return ampi_rope_run("rope backward", s, dy, dx, names,
        add & AMPI_ADDS ? add : add | AMPI_SAME, -1.0f, exec);
}

/* >>impl-policy Which operator runs in which type: one table of operators, one list of rules for
   each level and style.
   Words. LOW, FP32, PROMOTE, FOLLOW, GRAY: see amp_rule. This room knows no model and no memory. */

enum { AMPI_KIND_PLAIN, AMPI_KIND_DATA, AMPI_KIND_MATRIX, AMPI_KIND_NORM, AMPI_KIND_LOSS };
enum { AMPI_SHARES_NONE, AMPI_SHARES_GRAD, AMPI_SHARES_BOTH };

/* A row of AMP_OP_LIST, which explains the columns. */
typedef struct ampi_op_row {
    const char* name;
    amp_rule o1, o2;
    int kind, reads, shares;  /* an AMPI_KIND_, AMPI_READS_, AMPI_SHARES_ */
} ampi_op_row;

/* A cast that finalize adds: its input in another type. No layer and no rule has this operator. */
#define AMPI_OP_CAST ((amp_op)AMP_OP_COUNT)

AMPI_FN int ampi_op_is_valid(amp_op op) { return (unsigned)op < AMP_OP_COUNT; }

/* The row of AMP_OP_LIST that describes op; of a cast, or of no operator, one named "?". */
AMPI_FN const ampi_op_row* ampi_op_row_of(amp_op op) {
    static const ampi_op_row rows[] = {
#define AMPI_X(name, text, o1, o2, kind, reads, shares) \
        { text, AMP_RULE_##o1, AMP_RULE_##o2, AMPI_KIND_##kind, AMPI_READS_##reads, \
            AMPI_SHARES_##shares },
        AMP_OP_LIST(AMPI_X)
#undef AMPI_X
        { "?", AMP_RULE_FOLLOW, AMP_RULE_FOLLOW, AMPI_KIND_PLAIN, AMPI_READS_NONE,
            AMPI_SHARES_NONE }  /* cast */
    };
    return &rows[ampi_op_is_valid(op) ? op : AMPI_OP_CAST];
}

AMPI_FN int ampi_op_is_loss(amp_op op) { return ampi_op_row_of(op)->kind == AMPI_KIND_LOSS; }

AMPI_FN int ampi_op_is_data(amp_op op) { return ampi_op_row_of(op)->kind == AMPI_KIND_DATA; }

AMP_DEF const char* amp_op_name(amp_op op) { return ampi_op_row_of(op)->name; }

AMP_DEF int amp_op_from_name(const char* name, amp_op* op) {
    for (int i = 0; name && op && i < AMP_OP_COUNT; i++)
        if (strcmp(name, amp_op_name((amp_op)i)) == 0) { *op = (amp_op)i; return 1; }
    return 0;
}

#define AMPI_X(name, text, ...) text "\0"
AMPI_NAMES(amp_style_name, amp_style, AMP_STYLE_LIST(AMPI_X))
AMPI_NAMES(amp_scaler_preset_name, amp_scaler_preset, AMP_SCALER_PRESET_LIST(AMPI_X))
#undef AMPI_X
AMPI_NAMES(amp_rule_name, amp_rule, "LOW\0FP32\0PROMOTE\0FOLLOW\0GRAY\0")
AMPI_NAMES(amp_level_name, amp_level, "O0\0O1\0O2\0O3\0")
AMPI_NAMES(amp_reason_name, amp_reason, "level list\0white list\0black list\0"
    "set by hand\0keep_batchnorm_fp32\0region\0pinned\0")

/* The columns of AMP_STYLE_LIST, by style. */
static const struct {
    unsigned levels;  /* bit k: the style has level k */
    int cast_back, o3_masters, low_norm;
    amp_scaler_preset o1_scaler, o2_scaler;
} ampi_styles[] = {
#define AMPI_X(name, text, levels, cast_back, o3_masters, low_norm, o1_scaler, o2_scaler) \
    { levels, cast_back, o3_masters, low_norm, AMP_SCALER_##o1_scaler, AMP_SCALER_##o2_scaler },
    AMP_STYLE_LIST(AMPI_X)
#undef AMPI_X
};

/* The rule of an operator under a level: that of the style, where it has its own, else the
   list's. */
AMPI_FN amp_rule ampi_level_rule(amp_level level, amp_style style, amp_op op) {
    static const struct { amp_style style; amp_level level; amp_op op; amp_rule rule; } rules[] = {
#define AMPI_X(name, level, op, rule) \
    { AMP_STYLE_##name, AMP_##level, AMP_OP_##op, AMP_RULE_##rule },
        AMP_STYLE_RULES(AMPI_X)
#undef AMPI_X
    };
    for (size_t i = 0; i < AMPI_LENGTH(rules); i++)
        if (rules[i].style == style && rules[i].level == level && rules[i].op == op)
            return rules[i].rule;
    if (ampi_op_is_data(op)) return AMP_RULE_FOLLOW;
    if (level == AMP_O0 || ampi_op_is_loss(op)) return AMP_RULE_FP32;
    if (level == AMP_O3) return AMP_RULE_LOW;
    return level == AMP_O1 ? ampi_op_row_of(op)->o1 : ampi_op_row_of(op)->o2;
}

#define AMPI_REFUSE_POLICY(condition, ...) \
    AMPI_REFUSE_CALL(condition, AMP_ERR_POLICY, "policy: " __VA_ARGS__)

/* Refuses a level or a style that does not exist. */
AMPI_FN amp_result ampi_policy_check_choice(amp_level level, amp_style style,
        const amp_logger* logger) {
    AMPI_REFUSE_POLICY((unsigned)level > AMP_O3, "level %d does not exist (O0 to O3)", level);
    AMPI_REFUSE_POLICY((unsigned)style >= AMP_STYLE_COUNT, "style %d does not exist", style);
    return AMP_OK;
}

AMPI_FN int ampi_is_switch(int field) { return field >= AMP_ZERO && field <= 1; }

/* Refuses a desc of a policy that is out of range or contradicts itself. As in Apex, O0 and O1 keep
   the model in FP32 and leave no choice of batch norm or masters. */
AMPI_FN amp_result ampi_policy_check_desc(const amp_policy_desc* d) {
    const amp_logger* logger = d->logger;
    const char* level = amp_level_name(d->level);
    const int white = d->white_count, black = d->black_count;

    /* Level, types and switches. */
    AMPI_TRY(ampi_policy_check_choice(d->level, d->style, logger));
    AMPI_REFUSE_POLICY(d->low_dtype && ampi_type_size(d->low_dtype) != 2,
        "low_dtype must be f16 or bf16, not %s", amp_dtype_name(d->low_dtype));
    AMPI_REFUSE_POLICY(!(ampi_styles[d->style].levels >> d->level & 1u), "the style %s has no %s",
        amp_style_name(d->style), level);
    AMPI_REFUSE_POLICY(d->level <= AMP_O1 && d->keep_batchnorm_fp32 != 0,
        "keep_batchnorm_fp32 needs O2 or O3; %s does not cast the model", level);
    AMPI_REFUSE_POLICY(d->level <= AMP_O1 && d->master_weights != 0,
        "master_weights needs O2 or O3; the weights of %s are FP32 already", level);
    AMPI_REFUSE_POLICY(!ampi_is_switch(d->keep_batchnorm_fp32)
        || !ampi_is_switch(d->master_weights),
        "keep_batchnorm_fp32 and master_weights take 0, 1 or AMP_ZERO, not %d and %d",
        d->keep_batchnorm_fp32, d->master_weights);

    /* The lists of operators: at most one has entries. */
    AMPI_REFUSE_POLICY(white < 0 || black < 0 || (white && !d->white) || (black && !d->black),
        "a list has a count but no entries, or a count below 0");
    AMPI_REFUSE_POLICY(d->level == AMP_O0 && (white || black),
        "O0 runs everything in FP32, it takes no lists");
    AMPI_REFUSE_POLICY(white && black,
        "give a white or a black list, not both; for more take amp_policy_set_rule");
    for (int i = 0; i < white + black; i++) {
        const amp_op op = white ? d->white[i] : d->black[i];
        AMPI_REFUSE_POLICY(!ampi_op_is_valid(op) || ampi_op_is_data(op),
            "entry %d of the lists is not an operator with a type of its own: %d", i, op);
        AMPI_REFUSE_POLICY(white && ampi_op_is_loss(op),
            "%s on the white list: a loss is FP32 at every level", amp_op_name(op));
    }
    return AMP_OK;
}

/* Sets an operator's rule and who chose it. */
AMPI_FN void ampi_policy_put(amp_policy* p, amp_op op, amp_rule rule, amp_reason reason) {
    p->rules[op] = rule;
    p->reasons[op] = reason;
}

/* Checks the desc, then fills *p: the level's rules, then those of its lists. */
AMP_DEF amp_result amp_policy_init(amp_policy* p, const amp_policy_desc* desc) {
    amp_policy_desc d;
    amp_policy out;
    AMPI_CLEAR(d);
    if (desc) d = *desc;
    AMPI_REFUSE_WITH(d.logger, !p, AMP_ERR_ARGUMENT, "amp_policy_init: the policy is NULL");
    AMPI_TRY(ampi_policy_check_desc(&d));

    AMPI_CLEAR(out);
    out.level = d.level;
    out.low_dtype = d.low_dtype ? d.low_dtype : AMP_F16;
    out.style = d.style;
    out.cast_back = d.level == AMP_O1 && ampi_styles[d.style].cast_back;
    out.master_weights = d.level != AMP_O3 || ampi_styles[d.style].o3_masters;
    if (d.master_weights) out.master_weights = d.master_weights == 1;

    for (int i = 0; i < AMP_OP_COUNT; i++)
        ampi_policy_put(&out, (amp_op)i, ampi_level_rule(d.level, d.style, (amp_op)i),
            AMP_REASON_LEVEL);
    if (d.keep_batchnorm_fp32 != 0)
        ampi_policy_put(&out, AMP_OP_BATCH_NORM, d.keep_batchnorm_fp32 == 1 ? AMP_RULE_FP32
            : AMP_RULE_LOW, AMP_REASON_KEEP_BN);
    for (int i = 0; i < d.white_count; i++)
        ampi_policy_put(&out, d.white[i], AMP_RULE_LOW, AMP_REASON_WHITE);
    for (int i = 0; i < d.black_count; i++)
        ampi_policy_put(&out, d.black[i], AMP_RULE_FP32, AMP_REASON_BLACK);
    *p = out;
    return AMP_OK;
}

/* May an operator have this rule? Losses are FP32, and input and flatten follow. */
AMPI_FN int ampi_rule_fits(amp_op op, amp_rule rule) {
    if ((unsigned)rule > AMP_RULE_GRAY) return 0;
    if (ampi_op_is_loss(op)) return rule == AMP_RULE_FP32;
    return !ampi_op_is_data(op) || rule == AMP_RULE_FOLLOW;
}

/* A policy that the user may have edited. */
AMPI_FN amp_result ampi_policy_check(const amp_policy* p, const amp_logger* logger) {
    AMPI_TRY(ampi_policy_check_choice(p->level, p->style, logger));
    AMPI_REFUSE_POLICY(ampi_type_size(p->low_dtype) != 2,
        "low_dtype must be f16 or bf16; start from amp_policy_init");
    for (int i = 0; i < AMP_OP_COUNT; i++)
        AMPI_REFUSE_POLICY(!ampi_rule_fits((amp_op)i, p->rules[i]),
            "%s cannot have the rule %s (%d)", amp_op_name((amp_op)i), amp_rule_name(p->rules[i]),
            p->rules[i]);
    return AMP_OK;
}

/* Sets one operator's rule, if it may have it. */
AMP_DEF amp_result amp_policy_set_rule(amp_policy* p, amp_op op, amp_rule rule) {
    if (!p) return AMP_ERR_ARGUMENT;
    if (!ampi_op_is_valid(op) || ampi_op_is_data(op) || !ampi_rule_fits(op, rule))
        return AMP_ERR_POLICY;
    ampi_policy_put(p, op, rule, AMP_REASON_RULE);
    return AMP_OK;
}

/* Writes the operators with that rule to out, as far as they fit; returns how many there are. */
AMPI_FN int ampi_policy_list(const amp_policy* p, amp_rule rule, amp_op* out, int capacity) {
    int count = 0;
    for (int i = 0; p && i < AMP_OP_COUNT; i++) {
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

/* >>impl-scaler The loss scale: a rule, its state, and what was done to lists of gradients since
   the last update.
   Words. window: from one update to the next. list: gradients that are checked, unscaled or
   stepped together; a key tells lists apart. unsound: the model itself made inf or NaN. */

/* --- fields of descs, an optimizer's too --- */
/* A field of a struct and its range, both ends included. */
typedef struct ampi_desc_field {
    const char* name;
    size_t at;          /* its offset in the struct */
    char kind;          /* d double, f float, i int or enumerator */
    double low, high;
    const char* range;  /* the end of a sentence: "NAME 7 must " and this */
} ampi_desc_field;

/* A field of a struct as a double; kind as in ampi_desc_field. */
AMPI_FN double ampi_field_value(const void* p, char kind) {
    int whole;
    if (kind == 'd') return *(const double*)p;
    if (kind == 'f') return (double)*(const float*)p;
    memcpy(&whole, p, sizeof whole);  /* an enumerator has another type */
    return whole;
}

#define AMPI_REFUSE_DESC(condition, ...) AMPI_REFUSE_CALL(condition, AMP_ERR_DESC, __VA_ARGS__)
/* Refuses a field of a desc that is out of the range in its row of a table. */
AMPI_FN amp_result ampi_check_field(const void* desc, const ampi_desc_field* f, const char* what,
        const amp_logger* logger) {
    const double value = ampi_field_value((const char*)desc + f->at, f->kind);
    AMPI_REFUSE_DESC(value < f->low || value > f->high || !ampi_is_finite64(&value),
        "%s: %s %.*g must %s", what, f->name, f->kind == 'i' ? 10 : 6, value, f->range);
    return AMP_OK;
}

/* --- presets and validation --- */
/* Kinds of presets, sums of bits: 1 an overflow divides by growth, 2 factors are doubles, 4 the
   scale is one. */
enum { AMPI_SCALE_FLOAT = 0, AMPI_SCALE_FLOAT_DIV = 1, AMPI_SCALE_MIXED = 2, AMPI_SCALE_DOUBLE = 6,
       AMPI_SCALE_DOUBLE_DIV = 7 };

/* The rows of AMP_SCALER_PRESET_LIST, which explains the columns. */
static const struct ampi_scaler_row { int kind,
        late; float init; amp_scaler_rule rule; } ampi_scaler_presets[] = {
#define AMPI_X(name, text, kind, init, interval, late, start, \
        backoff, min, max, guard, h, refill, at, skips) \
    { AMPI_SCALE_##kind, late, init, { 2, (double)backoff, 0, min, max, interval, start, h, \
        AMP_GUARD_##guard, \
      AMP_REFILL_##refill, AMP_LIMIT_##at, skips, 0, interval == 0, 20, \
          AMPI_SCALE_##kind >= AMPI_SCALE_DOUBLE } },
    AMP_SCALER_PRESET_LIST(AMPI_X)
#undef AMPI_X
};

/* A scale whose inverse is a finite float: finite and above 2^-128 (a subnormal). */
AMPI_HD AMPI_FN int ampi_scale_usable(const float* p) {
    const uint32_t u = ampi_bits_at(p);
    return u > 0x00200000u && u < 0x7f800000u;
}

/* Fields of a desc that replace a preset's values where they are not 0. field: that of the scaler;
   from: offset of that of the desc; zero: 1 = AMP_ZERO makes 0 of it. */
static const struct { ampi_desc_field field; size_t from; int zero; } ampi_scaler_fields[] = {
#define AMPI_X(name, place, zero, kind, low, high, range) \
    { { #name, offsetof(amp_scaler, place), kind, (double)low, (double)high, range }, \
      offsetof(amp_scaler_desc, name), zero },
    AMPI_X(init_scale, state.scale, 0, 'f', 0, AMPI_FLT_MAX, "be finite and greater than 2^-128")
    AMPI_X(growth_interval, rule.interval, 1, 'i', 0, INT32_MAX, "be at least 1")
    AMPI_X(growth_factor, rule.growth, 0, 'd', 1.0000000000000002, 1.7976931348623157e308,
           "be finite and greater than 1")
    AMPI_X(backoff_factor, rule.backoff, 0, 'd', 1e-307, 0.99999999999999989, "lie between 0 and 1")
    AMPI_X(min_scale, rule.min, 1, 'f', 0, AMPI_FLT_MAX, "be finite and positive")
    AMPI_X(max_scale, rule.max, 1, 'f', 0, AMPI_FLT_MAX, "be finite and positive")
    AMPI_X(hysteresis, rule.hysteresis, 0, 'i', 1, INT32_MAX, "be at least 1")
    AMPI_X(refill, rule.refill, 0, 'i', 1, AMP_REFILL_REDUCTION, "be an amp_scaler_refill")
    AMPI_X(tolerance, rule.tolerance, 0, 'd', 0, 1, "lie between 0 and 1")
    AMPI_X(at_min, rule.at_min, 0, 'i', 1, AMP_LIMIT_KEEP, "be an amp_scaler_limit")
    AMPI_X(max_skips, rule.max_skips, 1, 'i', 0, INT32_MAX, "not be negative")
    AMPI_X(max_unsound, rule.max_unsound, 1, 'i', 0, INT32_MAX, "not be negative")
#undef AMPI_X
};

/* Does backing off undo growth? */
AMPI_FN int ampi_scaler_undoes(const amp_scaler_rule* r) {
    return (float)r->backoff == (float)(1.0 / r->growth);
}

/* A scaler of the desc's preset, with each field that the desc sets in place of the preset's. */
AMPI_FN void ampi_scaler_fill(amp_scaler* x, const amp_scaler_desc* d) {
    amp_scaler_rule* r = &x->rule;
    const struct ampi_scaler_row* row = &ampi_scaler_presets[d->preset];
    const int in_float = !(row->kind & 2);  /* factors are floats */
    const double zero = 0.0;  /* told by its bits: -Ofast reads subnormals as zero */
    AMPI_CLEAR(*x);
    x->rule = row->rule;
    x->state.scale = row->init;

    for (size_t i = 0; i < AMPI_LENGTH(ampi_scaler_fields); i++) {
        const ampi_desc_field* f = &ampi_scaler_fields[i].field;
        const char* from = (const char*)d + ampi_scaler_fields[i].from;
        const size_t size = f->kind == 'd' ? 8 : 4;
        const double value = ampi_field_value(from, f->kind);
        if (ampi_scaler_fields[i].zero && ampi_bits64_at(&value) == ampi_bits64(AMP_ZERO))
            memset((char*)x + f->at, 0, size);
        else if (memcmp(from, &zero, size) != 0) memcpy((char*)x + f->at, from, size);
    }

    /* What follows from fields of both. */
    if (in_float) r->growth = (double)(float)r->growth;
    if (ampi_is_zero64(&r->backoff)) r->backoff = 1.0 / r->growth;
    if (in_float) r->backoff = (double)(float)r->backoff;
    if (r->interval < INT32_MAX) r->interval += row->late;
    if (ampi_is_zero(&r->max) && r->guard == AMP_GUARD_CLAMP) r->max = AMPI_FLT_MAX;
    if (d->preset == AMP_SCALER_APEX && ampi_scale_usable(&x->state.scale) && r->max > 0.0f
        && x->state.scale > r->max)
        x->state.scale = r->max;  /* Apex starts at the lesser; an infinite scale is refused
                                     later */
    r->ignore_overflow = d->ignore_overflow != 0;
}

/* Refuses what a desc may not ask for. d: as given; x: filled from it by ampi_scaler_fill. */
AMPI_FN amp_result ampi_scaler_check_desc(const amp_scaler_desc* d, const amp_scaler* x) {
    const amp_logger* logger = d->logger;
    const amp_scaler_rule* r = &x->rule;
    const float init = x->state.scale;
    const char* preset = amp_scaler_preset_name(d->preset);
    const int asks_to_move = d->growth_interval > 0 || !ampi_is_zero64(&d->growth_factor)
        || !ampi_is_zero64(&d->backoff_factor) || d->hysteresis || d->refill
        || !ampi_is_zero64(&d->tolerance);

    /* Fields that do not go together, or with the preset. */
    AMPI_REFUSE_DESC(r->is_static && asks_to_move,
        "scaler: the static preset %s takes no growth_interval, growth_factor, backoff_factor, "
        "hysteresis, refill or tolerance", preset);
    AMPI_REFUSE_DESC(!ampi_is_zero64(&d->tolerance) && r->refill != AMP_REFILL_REDUCTION,
        "scaler: tolerance needs the refill AMP_REFILL_REDUCTION, which the preset fairseq has");
    AMPI_REFUSE_DESC(r->at_min == AMP_LIMIT_CALLBACK && !d->on_limit,
        "scaler: AMP_LIMIT_CALLBACK needs on_limit, which is NULL");
    AMPI_REFUSE_DESC(r->ignore_overflow && !r->is_static,
        "scaler: ignore_overflow is for static presets, not for %s", preset);
    AMPI_REFUSE_DESC(ampi_is_zero(&init),
        "scaler: init_scale 0: the preset %s has no default, give one", preset);

    /* Ranges, first of single fields. */
    for (size_t i = 0; i < AMPI_LENGTH(ampi_scaler_fields); i++)
        AMPI_TRY(ampi_check_field(x, &ampi_scaler_fields[i].field, "scaler", logger));
    AMPI_REFUSE_DESC(!ampi_scale_usable(&init),
        "scaler: init_scale %g must be greater than 2^-128", (double)init);
    AMPI_REFUSE_DESC(d->preset == AMP_SCALER_ONEFLOW && !ampi_scaler_undoes(r),
        "scaler: backoff_factor %g must be 1/growth_factor = %g for the preset oneflow", r->backoff,
        1.0 / r->growth);
    AMPI_REFUSE_DESC(r->min > init, "scaler: min_scale %g is greater than init_scale %g",
        (double)r->min, (double)init);
    AMPI_REFUSE_DESC(r->max > 0 && r->max < init, "scaler: max_scale %g is less than init_scale %g",
        (double)r->max, (double)init);
    return AMP_OK;
}

/* Makes the scale that of the next window, with its inverse: formed in double, one rounding. */
AMPI_HD AMPI_FN void ampi_scaler_use_scale(amp_scaler_state* state) {
    state->scale_in_use = state->scale;
    state->inverse = ampi_scale_usable(&state->scale) ? (float)(1.0 / (double)state->scale) : 0.0f;
}

/* Checks the desc, then fills *s; an error leaves it as it was. */
AMP_DEF amp_result amp_scaler_init(amp_scaler* s, const amp_scaler_desc* desc) {
    amp_scaler_desc d;
    amp_scaler x;
    AMPI_CLEAR(d);
    if (desc) d = *desc;
    const amp_logger* logger = d.logger;
    AMPI_REFUSE_CALL(!s, AMP_ERR_ARGUMENT, "amp_scaler_init: the scaler is NULL");
    AMPI_REFUSE_DESC((unsigned)d.preset >= AMP_SCALER_PRESET_COUNT,
        "scaler: preset %d is not an amp_scaler_preset", d.preset);
    ampi_scaler_fill(&x, &d);
    AMPI_TRY(ampi_scaler_check_desc(&d, &x));

    if (ampi_scaler_presets[d.preset].kind & 1 && ampi_scaler_undoes(&x.rule))
        x.rule.backoff = 0.0;  /* divide by growth, which rounds once */
    x.state.exact_scale = (double)x.state.scale;
    x.state.tracker = x.rule.start;
    x.state.hysteresis_left = x.rule.hysteresis;
    ampi_scaler_use_scale(&x.state);
    if (logger) x.logger = *logger;
    x.on_limit = d.on_limit;
    x.user_data = d.user_data;
    ampi_overflow_clear(&x.info);
    *s = x;
    return AMP_OK;
}

/* --- the rule --- */
/* Limits that the end of a window meets, as bits; see amp_scaler_advance. */
enum { AMPI_HIT_FLOOR = 1, AMPI_HIT_SKIPS = 2, AMPI_HIT_UNSOUND = 4, AMPI_HIT_USELESS = 8 };

/* The scale before it is rounded to float. Factors times it are formed in double: those of floats
   round to float as if formed there. */
AMPI_HD AMPI_FN double ampi_scaler_exact(const amp_scaler_rule* r, const amp_scaler_state* x) {
    return r->is_double ? x->exact_scale : (double)x->scale;
}

/* Sets the scale, in FP32 and, for rules whose state is a double, in double. */
AMPI_HD AMPI_FN void ampi_scaler_keep(const amp_scaler_rule* r, amp_scaler_state* x, double scale) {
    x->scale = scale < AMPI_FLT_OVERFLOW ? (float)scale : ampi_float(0x7f800000u);
    x->exact_scale = r->is_double ? scale : (double)x->scale;
}

/* A window without overflow: counts it, and grows the scale after `interval` of them. */
AMPI_HD AMPI_FN void ampi_scaler_clean_step(const amp_scaler_rule* r, amp_scaler_state* x) {
    const double grown = ampi_scaler_exact(r, x) * r->growth;
    const int too_much = r->max > 0.0f && grown > (double)r->max;
    x->applied++;
    x->consecutive_skips = 0;
    if (r->refill == AMP_REFILL_CLEAN || r->refill == AMP_REFILL_EVERY_H)
        x->hysteresis_left = r->hysteresis;
    if (x->tracker < INT32_MAX) x->tracker++;
    if (r->interval == 0 || x->tracker < r->interval) return;
    if (too_much || grown < AMPI_FLT_OVERFLOW || r->guard == AMP_GUARD_NONE)
        ampi_scaler_keep(r, x, too_much ? (double)r->max : grown);
    x->tracker = x->since_rescale = 0;
    if (r->refill != AMP_REFILL_REDUCTION) x->hysteresis_left = r->hysteresis;
}

/* 1 = an overflow just counted leaves the scale alone: hysteresis is left, or the share of
   overflows is tolerated. */
AMPI_HD AMPI_FN int ampi_scaler_tolerates(const amp_scaler_rule* r, const amp_scaler_state* x) {
    const double overflows = (double)r->hysteresis - x->hysteresis_left;
    return x->hysteresis_left > 0 || (r->tolerance > 0.0
        && overflows / x->since_rescale < r->tolerance);
}

/* A window with an overflow: counts it, and backs the scale off unless it is tolerated. Returns the
   limits that it meets, as amp_scaler_advance does. */
AMPI_HD AMPI_FN int ampi_scaler_overflow_step(const amp_scaler_rule* r, amp_scaler_state* x) {
    const double scale = ampi_scaler_exact(r, x), min = (double)r->min;
    const double reduced = r->backoff > 0.0 ? scale * r->backoff : scale / r->growth;
    int hit = 0;
    x->skipped++;
    if (x->consecutive_skips < INT32_MAX) x->consecutive_skips++;
    if (r->max_skips > 0 && x->consecutive_skips > r->max_skips) hit = AMPI_HIT_SKIPS;
    if (x->unsound) return hit;  /* no scale mends that */

    /* With a tolerance, hysteresis counts on below 0: its overflows are a share of windows. */
    x->tracker = r->start;
    if (x->hysteresis_left > (r->tolerance > 0.0 ? -INT32_MAX : 0)) x->hysteresis_left--;
    if (r->is_static || ampi_scaler_tolerates(r, x)) return hit;

    ampi_scaler_keep(r, x, reduced < min ? min : reduced);
    if (r->at_min == AMP_LIMIT_KEEP && ampi_scaler_exact(r, x) <= min) {
        ampi_scaler_keep(r, x, scale);
        return hit | AMPI_HIT_FLOOR;
    }
    x->since_rescale = 0;
    if (r->refill >= AMP_REFILL_EVERY_H) x->hysteresis_left = r->hysteresis;
    return scale <= min ? hit | AMPI_HIT_FLOOR : hit;
}

/* One window's end; see the interface for the sum that it returns. */
AMPI_HD AMP_DEF int amp_scaler_advance(const amp_scaler_rule* r, amp_scaler_state* x) {
    int hit = 0;
    if (!r || !x) return 0;
    if (!x->unsound && x->since_rescale < INT32_MAX) x->since_rescale++;
    if (x->found_inf) hit = ampi_scaler_overflow_step(r, x);
    else ampi_scaler_clean_step(r, x);

    if (!x->unsound) x->consecutive_unsound = 0;
    else if (x->consecutive_unsound < INT32_MAX) x->consecutive_unsound++;
    if (r->max_unsound > 0 && x->consecutive_unsound > r->max_unsound) hit |= AMPI_HIT_UNSOUND;

    /* A double above all floats spoils just the next window, whose overflow brings it back. */
    const int comes_back = r->is_double && x->exact_scale >= AMPI_FLT_OVERFLOW
        && ampi_bits64(x->exact_scale) < AMPI_INF64;
    if (!ampi_scale_usable(&x->scale) && !comes_back) hit |= AMPI_HIT_USELESS;
    x->found_inf = x->unsound = 0;
    return hit;
}

/* --- windows --- */
/* What was done to a list of gradients in a window, as bits. */
enum { AMPI_CHECKED = 1, AMPI_UNSCALED = 2, AMPI_STEPPED = 4 };

/* A hysteresis of 0 is zeroed memory that amp_scaler_init never saw. */
AMPI_FN amp_result ampi_scaler_ready(const amp_scaler* s) {
    return !s ? AMP_ERR_ARGUMENT : s->rule.hysteresis < 1 ? AMP_ERR_STATE : AMP_OK;
}

/* Refuses a call inside of a window. */
AMPI_FN amp_result ampi_scaler_between(const amp_scaler* s, const char* place) {
    AMPI_TRY(ampi_scaler_ready(s));
    AMPI_REFUSE_WITH(&s->logger, s->scaled || s->recorded, AMP_ERR_STATE,
        "%s: not between scale_loss and update", place);
    return AMP_OK;
}

/* The first loss or report after an update opens a window. */
AMPI_FN void ampi_scaler_open(amp_scaler* s) {
    if (!s->scaled && !s->recorded) ampi_overflow_clear(&s->info);
}

/* What is known in this window of the list with that key; NULL if nothing. */
AMPI_FN amp_scaler_list* ampi_scaler_entry(amp_scaler* s, uint64_t key) {
    for (int i = 0; i < s->list_count; i++)
        if (s->lists[i].key == key) return &s->lists[i];
    return NULL;
}

/* Where tensor i of a list lies in memory. */
AMPI_FN ampi_array ampi_tensor_span(const ampi_tensors* t, int i, int written) {
    const amp_tensor x = t->at(t->list, i);
    return ampi_array_of(x.data, x.count * ampi_type_size(x.dtype), written);
}

/* Bit i: list i was unscaled or stepped in this window and shares, or may share, memory with t. */
AMPI_FN uint64_t ampi_scaler_sharing(const amp_scaler* s, const ampi_tensors* t) {
    uint64_t set = 0;
    for (int i = 0; i < t->count && s->list_count > 0; i++) {
        const ampi_array x = ampi_tensor_span(t, i, 0);
        for (int k = 0; k < s->span_count && x.from < x.to; k++)
            if (x.from < s->spans[k][1] && x.to > s->spans[k][0])
                set |= (uint64_t)1 << s->span_list[k];
    }
    return set;
}

/* Adds memory of a list: to its last span where they touch, or where the table has at most one span
   left for each list; the span then covers the gap, too. Else begins a span. */
AMPI_FN void ampi_scaler_add_span(amp_scaler* s, const ampi_array* x, int list) {
    const int count = s->span_count, full = count >= AMP_SCALER_MAX_SPANS - AMP_SCALER_MAX_LISTS;
    const int is_first = count == 0 || s->span_list[count - 1] != list;
    uint64_t* span = s->spans[is_first ? count : count - 1];  /* its last, or the next to begin */
    if (x->from == x->to) return;
    if (is_first || (!full && (x->from > span[1] || x->to < span[0]))) {
        span = s->spans[count];
        span[0] = x->from;
        span[1] = x->to;
        s->span_list[s->span_count++] = (uint8_t)list;
    }
    if (x->from < span[0]) span[0] = x->from;
    if (x->to > span[1]) span[1] = x->to;
}

/* Remembers what was done to a list: `done` is one of AMPI_CHECKED, ...; norm: that of its unscaled
   gradients. A check is not remembered when the table is full: the step checks again. */
AMPI_FN void ampi_scaler_note(amp_scaler* s, const ampi_tensors* t, uint32_t done, double norm) {
    const uint64_t key = ampi_tensors_key(t);
    const uint64_t sharing = done == AMPI_CHECKED ? 0 : ampi_scaler_sharing(s, t);
    amp_scaler_list* entry = ampi_scaler_entry(s, key);
    if (!entry) {
        if (s->list_count == AMP_SCALER_MAX_LISTS) return;
        if (s->list_count == 0) s->span_count = 0;  /* of the last window */
        entry = &s->lists[s->list_count++];
        AMPI_CLEAR(*entry);
        entry->key = key;
    }

    /* The memory of a list that was not unscaled or stepped before, in whole or in part. */
    if (done != AMPI_CHECKED && sharing == 0)
        for (int i = 0; i < t->count; i++) {
            const ampi_array x = ampi_tensor_span(t, i, 0);
            ampi_scaler_add_span(s, &x, (int)(entry - s->lists));
        }

    /* Stepping a list that was unscaled in several parts steps each of them. An unscale voids
       earlier checks of others, which may hold the same gradients. */
    for (int i = 0; i < s->list_count; i++) {
        amp_scaler_list* l = &s->lists[i];
        if (sharing >> i & 1 && l->done & AMPI_UNSCALED) l->done |= done & AMPI_STEPPED;
        if (done & AMPI_UNSCALED && l != entry) l->done &= ~(uint32_t)AMPI_CHECKED;
    }
    entry->done |= done;
    entry->norm = norm;
}

/* Refuses a list whose count, tensors or types are not valid. */
AMPI_FN amp_result ampi_tensors_validate(const ampi_tensors* t, const amp_logger* logger) {
    const char* place = t->place;
    AMPI_REFUSE_CALL(t->count < 0, AMP_ERR_ARGUMENT, "%s: the list's count %d is negative", place,
        t->count);
    AMPI_REFUSE_CALL(t->count > 0 && !t->list, AMP_ERR_ARGUMENT,
        "%s: the list is NULL, its count is %d", place, t->count);
    for (int i = 0; i < t->count; i++) {
        const amp_tensor x = t->at(t->list, i);
        const char* name = ampi_name_or_none(x.name);
        AMPI_REFUSE_CALL(!ampi_is_compute_dtype(x.dtype), AMP_ERR_DTYPE,
            "%s: tensor %d (%s): data type %d is not F32, F16 or BF16", place, i, name,
            x.dtype);
        AMPI_REFUSE_CALL(x.count > SIZE_MAX / 16, AMP_ERR_ARGUMENT,
            "%s: tensor %d (%s): no memory holds %lld elements", place, i, name,
            ampi_shown(x.count));
        AMPI_REFUSE_CALL(x.count > 0 && !x.data, AMP_ERR_ARGUMENT,
            "%s: tensor %d (%s): data is NULL, count is %lld", place, i, name, ampi_shown(x.count));
    }
    return AMP_OK;
}

/* Lists of a pass that writes dst and reads src. */
typedef struct ampi_two_lists { const ampi_tensors *dst, *src; } ampi_two_lists;

/* Where array `id` of two lists lies: those of dst first, which are written, then those of src. */
AMPI_FN ampi_array ampi_tensor_array(const void* lists, size_t id) {
    const ampi_two_lists* two = (const ampi_two_lists*)lists;
    const int count = two->dst->count, i = (int)id;
    return i < count ? ampi_tensor_span(two->dst, i, 1) : ampi_tensor_span(two->src, i - count, 0);
}

/* Refuses a tensor of dst that shares memory with another or with one of src: it would be unscaled
   twice. src: NULL, or a list of equal length. */
AMPI_FN amp_result ampi_tensors_apart(const amp_scaler* s, const ampi_tensors* dst,
        const ampi_tensors* src) {
    const size_t count = (size_t)dst->count;
    const ampi_two_lists lists = { dst, src };
    size_t a, b;  /* a < b, and one of them is written: a is of dst */
    if (!ampi_arrays_meet(&lists, ampi_tensor_array, src ? 2 * count : count, &a, &b))
        return AMP_OK;
    return ampi_fail(&s->logger, AMP_ERR_ARGUMENT,
        "%s: tensor %d%s and tensor %d%s overlap in memory", dst->place, (int)a,
        src ? " of dst" : "", (int)(b % count), !src ? "" : b < count ? " of dst" : " of src");
}

/* Refuses what may not be done to a list in this window. what: AMPI_CHECKED, AMPI_UNSCALED or
   AMPI_STEPPED. *unscaled: 1 if all of the list was unscaled in this window, 0 if none. */
AMPI_FN amp_result ampi_scaler_enter(amp_scaler* s, const ampi_tensors* t, uint32_t what,
        int* unscaled) {
    uint32_t done = 0;  /* to any list that shares its memory */
    uint64_t sum = 0;   /* of the keys of the unscaled ones: its own key, if they are its parts */
    if (!s) return AMP_ERR_ARGUMENT;
    AMPI_REFUSE_WITH(&s->logger, !s->scaled, AMP_ERR_STATE,
        "%s: no loss was scaled since the last update", t->place);
    AMPI_TRY(ampi_tensors_validate(t, &s->logger));

    const uint64_t sharing = ampi_scaler_sharing(s, t), key = ampi_tensors_key(t);
    for (int k = 0; k < s->list_count; k++) {
        if (!(sharing >> k & 1)) continue;
        done |= s->lists[k].done;
        if (s->lists[k].done & AMPI_UNSCALED) sum += s->lists[k].key;
    }
    *unscaled = (done & AMPI_UNSCALED) != 0;

    const char* wrong = NULL;
    if (what != AMPI_CHECKED && done & AMPI_STEPPED)
        wrong = "were stepped already; call amp_scaler_update first";
    else if (what == AMPI_UNSCALED && *unscaled) wrong = "were unscaled already in this window";
    else if (*unscaled && sum != key)
        wrong = "were unscaled in this window, but not all, or together with others";
    else if (what != AMPI_CHECKED && s->list_count == AMP_SCALER_MAX_LISTS
        && !ampi_scaler_entry(s, key))
        wrong =
            "are more than AMP_SCALER_MAX_LISTS lists in one window; put the tensors in one list";
    AMPI_REFUSE_WITH(&s->logger, wrong, AMP_ERR_STATE, "%s: these gradients %s", t->place, wrong);
    return what == AMPI_UNSCALED && !t->apart ? ampi_tensors_apart(s, t, NULL) : AMP_OK;
}

/* Enters src as checked and dst as stepped in this window, if neither contradicts what was done
   in it. */
AMPI_FN amp_result ampi_scaler_enter_into(amp_scaler* s, const ampi_tensors* dst,
        const ampi_tensors* src) {
    int src_unscaled, dst_unscaled;
    AMPI_TRY(ampi_scaler_enter(s, src, AMPI_CHECKED, &src_unscaled));
    AMPI_TRY(ampi_scaler_enter(s, dst, AMPI_STEPPED, &dst_unscaled));
    AMPI_REFUSE_WITH(&s->logger, src_unscaled, AMP_ERR_STATE,
        "%s: src was unscaled already in this window", src->place);
    for (int i = 0; i < src->count; i++) {
        const size_t from = src->at(src->list, i).count, to = dst->at(dst->list, i).count;
        AMPI_REFUSE_WITH(&s->logger, from != to, AMP_ERR_ARGUMENT,
            "%s: tensor %d: dst has %lld elements, src has %lld", src->place, i, ampi_shown(to),
            ampi_shown(from));
    }
    return ampi_tensors_apart(s, dst, src);
}

/* Adds what a pass found to what earlier ones did, whose first tensor stays. */
AMPI_HD AMPI_FN void ampi_overflow_add(amp_overflow_info* all, const amp_overflow_info* found) {
    const amp_overflow_info before = *all;
    if (found->found_inf && all->first_tensor < 0) *all = *found;  /* a report names nothing */
    all->unsound = before.unsound;
    all->inf_count = before.inf_count + found->inf_count;
    all->nan_count = before.nan_count + found->nan_count;
    all->norm = found->norm;
}

/* Adds a list's findings to the window. Returns 1 if the list may be used. */
AMPI_FN int ampi_scaler_record(amp_scaler* s, amp_overflow_info* found, const char* place) {
    if (!ampi_scale_usable(&s->state.scale_in_use)) {
        found->found_inf = 1;
        found->norm = ampi_double(AMPI_INF64);
        if (!s->recorded && s->state.consecutive_skips == 0)  /* later ones have one cause */
            ampi_fail(&s->logger, AMP_ERR_OVERFLOW,
                "%s: the loss scale %g has no finite inverse; this step will be skipped", place,
                (double)s->state.scale_in_use);
    }
    ampi_overflow_add(&s->info, found);
    s->recorded = 1;
    if (!found->found_inf || s->rule.ignore_overflow) return 1;
    s->state.found_inf = 1;
    return 0;
}

/* Raises found_inf where the rule heeds it; unsound: blames the forward pass. */
AMPI_FN void ampi_scaler_raise(amp_scaler* s, int unsound) {
    ampi_scaler_open(s);
    s->recorded = 1;
    s->info.found_inf = 1;
    if (unsound) s->info.unsound = s->state.unsound = 1;
    if (!s->rule.ignore_overflow) s->state.found_inf = 1;
}

/* Closes the window if it is open. */
AMPI_FN void ampi_scaler_close(amp_scaler* s) {
    s->scaled = s->recorded = s->list_count = 0;
    s->state.found_inf = s->state.unsound = 0;
}

/* The loss times the scale of this window, which the first call of a window fixes. */
AMP_DEF float amp_scaler_scale_loss(amp_scaler* s, float loss) {
    if (ampi_scaler_ready(s) != AMP_OK) return ampi_float(0x7fc00000u);
    ampi_scaler_open(s);
    if (!s->scaled) ampi_scaler_use_scale(&s->state);
    s->scaled = 1;
    for (int i = 0; i < s->list_count; i++)  /* new gradients will come */
        s->lists[i].done &= ~(uint32_t)AMPI_CHECKED;
    if (!ampi_has_finite_bits(&loss)) ampi_scaler_raise(s, 1);
    return loss * s->state.scale_in_use;
}

/* Checks src times `inverse`, and moves or adds the product to dst if not NULL; info may be
   NULL. */
AMPI_FN amp_result ampi_scaler_pass(amp_scaler* s, const ampi_tensors* src,
        const ampi_tensors* dst, float inverse, int accumulate, amp_overflow_info* info) {
    amp_overflow_info found;
    ampi_unscale(src, dst, inverse, accumulate, &found);
    if (ampi_tensors_any(src)) {
        if (ampi_scaler_record(s, &found, src->place) && dst && (src != dst || inverse != 1.0f))
            ampi_unscale(src, dst, inverse, accumulate, NULL);
        ampi_scaler_note(s, dst ? dst : src, dst ? AMPI_UNSCALED : AMPI_CHECKED, found.norm);
    }
    if (info) *info = found;
    return AMP_OK;
}

/* Checks a list, or unscales it in place, and records that. */
AMPI_FN amp_result ampi_scaler_look(amp_scaler* s, const ampi_tensors* t, uint32_t what,
        amp_overflow_info* info) {
    int unscaled;
    AMPI_TRY(ampi_scaler_enter(s, t, what, &unscaled));
    return ampi_scaler_pass(s, t, what == AMPI_UNSCALED ? t : NULL,
        unscaled ? 1.0f : s->state.inverse, 0, info);
}

/* Looks at gradients without writing. */
AMP_DEF amp_result amp_scaler_check(amp_scaler* s, const amp_tensor* grads, int count,
        amp_overflow_info* info) {
    const ampi_tensors t = ampi_tensors_of(grads, count, "amp_scaler_check");
    return ampi_scaler_look(s, &t, AMPI_CHECKED, info);
}

/* Divides gradients by the loss scale, in place. */
AMP_DEF amp_result amp_scaler_unscale(amp_scaler* s, const amp_tensor* grads, int count,
        amp_overflow_info* info) {
    const ampi_tensors t = ampi_tensors_of(grads, count, "amp_scaler_unscale");
    return ampi_scaler_look(s, &t, AMPI_UNSCALED, info);
}

/* dst = src / scale, or dst += src / scale to accumulate. */
AMP_DEF amp_result amp_scaler_unscale_into(amp_scaler* s, const amp_tensor* dst,
        const amp_tensor* src, int count, int accumulate, amp_overflow_info* info) {
    const char* place = "amp_scaler_unscale_into";
    const ampi_tensors to = ampi_tensors_of(dst, count, place),
        from = ampi_tensors_of(src, count, place);
    AMPI_TRY(ampi_scaler_enter_into(s, &to, &from));
    return ampi_scaler_pass(s, &from, &to, s->state.inverse, accumulate, info);
}

AMP_DEF amp_result amp_scaler_report_overflow(amp_scaler* s) {
    AMPI_TRY(ampi_scaler_ready(s));
    ampi_scaler_raise(s, 0);
    return AMP_OK;
}

/* May optimizers step in this window? A window in which nothing was looked at may not. */
AMP_DEF int amp_scaler_may_step(const amp_scaler* s) {
    if (s && !s->recorded)
        ampi_fail(&s->logger, AMP_ERR_STATE,
            "amp_scaler_may_step: nothing was checked, unscaled or stepped");
    return s && s->recorded && !s->state.found_inf;
}

/* What amp_scaler_advance returned, as a result. on_limit is asked here, and may set the scale. */
AMPI_FN amp_result ampi_scaler_limits(const amp_scaler* s, int hit) {
    const amp_logger* logger = &s->logger;
    const double scale = (double)s->state.scale;
    const int at_min = s->rule.at_min;
    const char* what = NULL;
    int stops = hit & (AMPI_HIT_FLOOR | AMPI_HIT_USELESS) && at_min != AMP_LIMIT_CLAMP;
    if (stops && at_min == AMP_LIMIT_CALLBACK) stops = s->on_limit(s, s->user_data);

    if (stops && hit & AMPI_HIT_USELESS) what = "the scale is of no use any more";
    else if (stops)
        what = at_min == AMP_LIMIT_KEEP ? "an overflow that would bring the scale to its floor"
            : "an overflow although the scale is at its floor";
    else if (hit & AMPI_HIT_SKIPS) what = "more overflows in a row than max_skips";
    AMPI_REFUSE_CALL(what, AMP_ERR_OVERFLOW,
        "amp_scaler_update: %s: loss scale %g, %d overflows in a row", what, scale,
        (int)s->state.consecutive_skips);
    AMPI_REFUSE_CALL(hit & AMPI_HIT_UNSOUND, AMP_ERR_OVERFLOW,
        "amp_scaler_update: the forward pass gave inf or NaN %d times in a row, which no loss "
        "scale mends: max_unsound is %d", (int)s->state.consecutive_unsound,
        (int)s->rule.max_unsound);
    AMPI_REFUSE_CALL(hit & AMPI_HIT_USELESS && !ampi_scale_usable(&s->state.scale),
        AMP_ERR_OVERFLOW,
        "amp_scaler_update: with the loss scale %g all steps will be skipped: min_scale and "
        "max_scale keep it in range, amp_scaler_set_scale brings it back", scale);
    return AMP_OK;
}

/* Ends the window. */
AMP_DEF amp_result amp_scaler_update(amp_scaler* s) {
    if (!s) return AMP_ERR_ARGUMENT;
    AMPI_REFUSE_WITH(&s->logger, !s->recorded, AMP_ERR_STATE,
        "amp_scaler_update: nothing was checked, unscaled or stepped since the last update");
    const int hit = amp_scaler_advance(&s->rule, &s->state);
    s->scaled = s->recorded = s->list_count = 0;
    return ampi_scaler_limits(s, hit);
}

/* Sets a usable scale between two windows. */
AMP_DEF amp_result amp_scaler_set_scale(amp_scaler* s, float scale) {
    AMPI_TRY(ampi_scaler_between(s, "amp_scaler_set_scale"));
    AMPI_REFUSE_WITH(&s->logger, !ampi_scale_usable(&scale), AMP_ERR_ARGUMENT,
        "amp_scaler_set_scale: %g must be finite and greater than 2^-128", (double)scale);
    ampi_scaler_keep(&s->rule, &s->state, (double)scale);
    ampi_scaler_use_scale(&s->state);
    return AMP_OK;
}

/* --- save and load --- */
/* Bytes 0..3 "AMPS", 4..7 version, 8..15 growth and backoff as floats, 124..127 CRC-32 of all
   before. A table has the other fields of rule and state: a row is neighbours of one size. Version
   2 has no count at 52; version 1 has no doubles either, and at 96 what later ones have at 120. */
#define AMPI_SCALER_VERSION 3u
#define AMPI_SCALER_CRC_AT (AMP_SCALER_STATE_BYTES - 4)
static const struct {
    size_t at, size, count;  /* of a row: the first byte, bytes of an element, elements */
    size_t field;            /* offset of the first element in amp_scaler */
} ampi_saved_fields[] = {
    { 16, 4, 9, offsetof(amp_scaler, rule.min) },  /* up to max_skips */
    { 52, 4, 1, offsetof(amp_scaler, state.since_rescale) },
    { 56, 4, 2, offsetof(amp_scaler, rule.ignore_overflow) },  /* and is_static */
    { 64, 4, 1, offsetof(amp_scaler, state.scale) },
    { 68, 4, 2, offsetof(amp_scaler, state.tracker) },  /* and hysteresis_left */
    { 76, 4, 1, offsetof(amp_scaler, state.consecutive_skips) },
    { 80, 8, 2, offsetof(amp_scaler, state.applied) },  /* and skipped */
    { 96, 8, 2, offsetof(amp_scaler, rule.growth) },    /* and backoff */
    { 112, 8, 1, offsetof(amp_scaler, state.exact_scale) },
    { 120, 4, 1, offsetof(amp_scaler, state.consecutive_unsound) } };

/* A number of `size` bytes, the lowest first. */
AMPI_FN uint64_t ampi_get(const unsigned char* p, size_t size) {
    uint64_t u = 0;
    while (size > 0) u = u << 8 | p[--size];
    return u;
}

AMPI_FN uint32_t ampi_get32(const unsigned char* p) { return (uint32_t)ampi_get(p, 4); }

/* CRC-32 (ISO-HDLC, polynomial 0xEDB88320 reflected) of bytes with CRC `crc` (0 = none) and n
   more. */
AMPI_FN uint32_t ampi_crc32(uint32_t crc, const void* bytes, size_t n) {
    const unsigned char* p = (const unsigned char*)bytes;
    uint32_t table[256];
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int k = 0; k < 8; k++)
            table[i] = (table[i] >> 1) ^ (0xEDB88320u & (0u - (table[i] & 1u)));
    }
    for (crc = ~crc; n > 0; n--) crc = crc >> 8 ^ table[(crc ^ *p++) & 0xffu];
    return ~crc;
}

/* Between a file's byte order, little-endian, and the host's. */
AMPI_FN void ampi_swap_endian(unsigned char* p, size_t bytes, size_t element) {
    const uint16_t one = 1;
    if (*(const unsigned char*)&one == 1) return;
    for (size_t i = 0; i < bytes; i += element)
        for (size_t k = 0; k < element / 2; k++)
            ampi_swap_records(p + i + k, p + i + element - 1 - k, 1);
}

/* Writes an integer, the lowest byte first. */
AMPI_FN void ampi_put32(unsigned char* p, uint32_t u) {
    memcpy(p, &u, sizeof u);
    ampi_swap_endian(p, sizeof u, sizeof u);
}

/* Copies the fields of ampi_saved_fields to the bytes, or if `load` from them. */
AMPI_FN void ampi_scaler_move(amp_scaler* x, unsigned char* bytes, int load) {
    for (size_t i = 0; i < AMPI_LENGTH(ampi_saved_fields); i++) {
        const size_t size = ampi_saved_fields[i].size, n = size * ampi_saved_fields[i].count;
        unsigned char *p = bytes + ampi_saved_fields[i].at,
            *field = (unsigned char*)x + ampi_saved_fields[i].field;
        memcpy(load ? field : p, load ? p : field, n);
        ampi_swap_endian(load ? field : p, n, size);
    }
}

/* The state in AMP_SCALER_STATE_BYTES bytes: a mark, the version, the rule, the counters. */
AMPI_FN void ampi_scaler_write(const amp_scaler* s, unsigned char* p) {
    amp_scaler saved = *s;
    const float growth = (float)s->rule.growth;
    const float backoff = (float)(s->rule.backoff > 0.0 ? s->rule.backoff : 1.0 / (double)growth);
    memcpy(p, "AMPS", 4);
    ampi_put32(p + 4, AMPI_SCALER_VERSION);
    ampi_put32(p + 8, ampi_bits_at(&growth));
    ampi_put32(p + 12, ampi_bits_at(&backoff));
    ampi_scaler_move(&saved, p, 0);
    ampi_put32(p + AMPI_SCALER_CRC_AT, ampi_crc32(0, p, AMPI_SCALER_CRC_AT));
}

/* Number i of a saved rule: four floats, ten integers, two doubles. */
AMPI_FN double ampi_scaler_number(const unsigned char* p, int i) {
    if (i >= 14) return ampi_double(ampi_get(p + 96 + 8 * (i - 14), 8));
    return i < 4 ? (double)ampi_float(ampi_get32(p + 8 + 4 * i))
        : (double)(int32_t)ampi_get32(p + 8 + 4 * i);
}

/* Refuses a state of another rule, and names the first number that differs. "a count" is none of
   the rule's: the caller makes both alike. */
AMPI_FN amp_result ampi_scaler_check_rule(const amp_scaler* s, const unsigned char* theirs,
        const unsigned char* ours) {
    static const char names[] =
        "growth_factor\0backoff_factor\0min_scale\0max_scale\0growth_interval\0"
        "the tracker's start\0hysteresis\0guard\0refill\0at_min\0max_skips\0a count\0"
        "ignore_overflow\0static\0"
        "exact growth_factor\0exact backoff_factor (0: division)\0";
    int i = 0;
    while (i < 16 && ampi_scaler_number(theirs, i) == ampi_scaler_number(ours, i)) i++;
    const int digits = i < 14 ? 6 : 17;
    AMPI_REFUSE_WITH(&s->logger, i < 16, AMP_ERR_FORMAT,
        "amp_scaler_load: the state was saved by a scaler with another rule: "
        "%s is %.*g there, but %.*g here", ampi_name_among(names, (unsigned)i), digits,
        ampi_scaler_number(theirs, i), digits, ampi_scaler_number(ours, i));
    return AMP_OK;
}

/* Writes the state to `bytes`. */
AMP_DEF amp_result amp_scaler_save(const amp_scaler* s, void* bytes, size_t size) {
    AMPI_TRY(ampi_scaler_between(s, "amp_scaler_save"));
    AMPI_REFUSE_WITH(&s->logger, !bytes || size < AMP_SCALER_STATE_BYTES, AMP_ERR_ARGUMENT,
        "amp_scaler_save: a state has %d bytes", AMP_SCALER_STATE_BYTES);
    ampi_scaler_write(s, (unsigned char*)bytes);
    return AMP_OK;
}

/* May a scaler with rule r have state x? Its scale lies in 0 to infinity, and its counters can go
   on counting. */
AMPI_FN int ampi_scaler_can_have(const amp_scaler_rule* r, const amp_scaler_state* x) {
    return ampi_bits_at(&x->scale) <= 0x7f800000u && ampi_bits64_at(&x->exact_scale) <= AMPI_INF64
        && x->tracker >= r->start && x->since_rescale >= 0
        && x->hysteresis_left <= r->hysteresis && (x->hysteresis_left >= 0 || r->tolerance > 0.0)
        && x->consecutive_skips >= 0 && x->consecutive_unsound >= 0
        && (uint64_t)x->applied >> 62 == 0 && (uint64_t)x->skipped >> 62 == 0;
}

/* Checks all of a state's bytes, then takes its counters and scale, which are all that a state of
   the same rule can change. */
AMP_DEF amp_result amp_scaler_load(amp_scaler* s, const void* bytes, size_t size) {
    unsigned char theirs[AMP_SCALER_STATE_BYTES], ours[AMP_SCALER_STATE_BYTES];
    AMPI_TRY(ampi_scaler_between(s, "amp_scaler_load"));
    const amp_logger* logger = &s->logger;
    AMPI_REFUSE_CALL(!bytes || size != sizeof theirs, AMP_ERR_FORMAT,
        "amp_scaler_load: a state has %d bytes", AMP_SCALER_STATE_BYTES);
    memcpy(theirs, bytes, size);
    ampi_scaler_write(s, ours);
    const uint32_t version = ampi_get32(theirs + 4);
    AMPI_REFUSE_CALL(memcmp(theirs, ours, 4) != 0 || version < 1 || version > AMPI_SCALER_VERSION ||
        ampi_get32(theirs + AMPI_SCALER_CRC_AT) != ampi_crc32(0, theirs, AMPI_SCALER_CRC_AT),
        AMP_ERR_FORMAT, "amp_scaler_load: not a scaler state of this version, or damaged");

    /* An earlier version becomes this one: no count, and doubles as they are in ours. */
    if (version < 3) memset(theirs + 52, 0, 4);
    memcpy(ours + 52, theirs + 52, 4);
    if (version == 1) {
        memcpy(theirs + 120, theirs + 96, 4);
        memcpy(theirs + 96, ours + 96, 24);
    }
    AMPI_TRY(ampi_scaler_check_rule(s, theirs, ours));

    amp_scaler saved = *s;
    ampi_scaler_move(&saved, theirs, 1);
    AMPI_REFUSE_CALL(!ampi_scaler_can_have(&s->rule, &saved.state), AMP_ERR_FORMAT,
        "amp_scaler_load: the state holds a scale or a count that no scaler has");

    s->state = saved.state;
    ampi_scaler_keep(&s->rule, &s->state,  /* version 1 has no double */
        version > 1 ? ampi_scaler_exact(&s->rule, &s->state) : (double)s->state.scale);
    ampi_scaler_use_scale(&s->state);
    ampi_overflow_clear(&s->info);
    return AMP_OK;
}

/* >>impl-optim  Optimizers on master weights. An update is one pass: unscale, clip, moments,
   weight, low copy.
   Words. moment: m, v. held: an element that stays, as its update would overflow. The arithmetic
   of one weight is in impl-vector. This room calls impl-scaler and impl-scan. */

/* --- schedule --- */
/* sin(pi/2 * u) if odd, or cos, for u in [0, 1/2]: Taylor series whose first omitted term is below
   2^-57. */
AMPI_HD AMPI_FN double ampi_quarter_series(double u, int odd) {
    double y = ampi_mul64(1.5707963267948966, u), y2 = ampi_mul64(y, y), sum = 1.0;
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
    #pragma unroll 1  /* eight divisions in a row are mostly time to fetch code */
#endif
    for (int k = 16 + odd; k > 1; k -= 2) sum = 1.0 - ampi_mul64(y2 / (double)(k * (k - 1)), sum);
    return odd ? ampi_mul64(y, sum) : sum;
}

/* The rate's factor at applied step t, see amp_schedule. */
AMPI_HD AMPI_FN double ampi_schedule_factor(const amp_schedule* s, int64_t t) {
    const int64_t warmup = s->warmup_steps > 0 ? s->warmup_steps : 0, after = t - warmup;
    const int64_t whole = s->total_steps > warmup ? s->total_steps - warmup : 0;
    const double last = (double)s->floor, above = 1.0 - last;
    if (after < 0) return (double)(t + 1) / ((double)warmup + 1.0);
    if (s->kind == AMP_SCHEDULE_STEP)
        return ampi_pow_int((double)(ampi_is_zero(&s->gamma) ? 0.1f : s->gamma),
            s->step_size > 0 ? after / s->step_size : 0);
    if (s->kind != AMP_SCHEDULE_LINEAR && s->kind != AMP_SCHEDULE_COSINE) return 1.0;
    if (after >= whole) return last;
    if (s->kind == AMP_SCHEDULE_LINEAR)
        return 1.0 - ampi_mul64(above, (double)after / (double)whole);
    /* (1 + cos(pi * after / whole)) / 2 = cos(pi/2 * after/whole)^2, relatively exact down to the
       end. */
    const int late = after > whole - after;
    const double c = ampi_quarter_series((double)(late ? whole - after : after) / (double)whole,
        late);
    return last + ampi_mul64(above, ampi_mul64(c, c));
}

AMPI_HD AMP_DEF float amp_schedule_lr(const amp_schedule* s, float base_lr, int64_t t) {
    return s ? (float)ampi_mul64((double)base_lr, ampi_schedule_factor(s, t < 0 ? 0 : t)) : base_lr;
}

/* --- validation --- */
/* Puts the defaults of a desc's kind where its fields are 0, and 0 where they are AMP_ZERO. */
AMPI_FN void ampi_optimizer_fill(amp_optimizer_desc* d) {
    const int is_rmsprop = d->kind == AMP_RMSPROP;
    d->lr = ampi_default_at(&d->lr, d->kind == AMP_SGD || is_rmsprop ? 0.01f : 0.001f);
    d->momentum = ampi_default_at(&d->momentum, 0.0f);
    d->dampening = ampi_default_at(&d->dampening, 0.0f);
    d->beta1 = ampi_default_at(&d->beta1, 0.9f);
    d->beta2 = ampi_default_at(&d->beta2, is_rmsprop ? 0.99f : 0.999f);
    if (ampi_is_zero(&d->eps)) d->eps = d->kind == AMP_LAMB ? 1e-6f : 1e-8f;
    d->weight_decay = ampi_default_at(&d->weight_decay, 0.0f);
    if (ampi_is_zero(&d->schedule.gamma)) d->schedule.gamma = 0.1f;
}

/* Ranges of a desc's fields once its defaults are filled in. */
static const ampi_desc_field ampi_optimizer_fields[] = {
#define AMPI_X(field, kind, low, high, range) \
    { #field, offsetof(amp_optimizer_desc, field), kind, (double)low, (double)high, range },
    AMPI_X(kind, 'i', 0, AMP_RMSPROP, "be an amp_optimizer_kind")
    AMPI_X(lr, 'f', 0, AMPI_FLT_MAX, "be finite and not negative")
    AMPI_X(momentum, 'f', 0, AMPI_BELOW_ONE, "lie in [0,1)")
    AMPI_X(dampening, 'f', 0, 1, "lie in [0,1]")
    AMPI_X(beta1, 'f', 0, AMPI_BELOW_ONE, "lie in [0,1)")
    AMPI_X(beta2, 'f', 0, AMPI_BELOW_ONE, "lie in [0,1)")
    AMPI_X(eps, 'f', AMPI_FLT_MIN, AMPI_FLT_MAX, "be finite and positive")
    AMPI_X(weight_decay, 'f', 0, AMPI_FLT_MAX, "be finite and not negative")
    AMPI_X(clip_norm, 'f', 0, AMPI_FLT_MAX, "be finite and positive")
    AMPI_X(schedule.kind, 'i', 0, AMP_SCHEDULE_COSINE, "be an amp_schedule_kind")
    AMPI_X(schedule.gamma, 'f', 0, 1, "lie in (0,1]")
    AMPI_X(schedule.floor, 'f', 0, 1, "lie in [0,1]")
    AMPI_X(group_count, 'i', 0, AMP_MAX_GROUPS, "lie in 0..AMP_MAX_GROUPS")
#undef AMPI_X
};

/* A rate or a weight decay; a group may have AMP_ZERO. */
AMPI_FN int ampi_lr_is_valid(const float* lr, int of_group) {
    return (of_group && ampi_is_off(lr)) || ampi_in_range(lr, 0.0f, AMPI_FLT_MAX);
}

/* Refuses a rate or a weight decay of a group that is negative or not finite. */
AMPI_FN amp_result ampi_groups_check(const amp_param_group* groups, int count, amp_result code,
        const char* place, const amp_logger* logger) {
    for (int i = 0; i < 2 * count; i++) {
        const float* value = i % 2 ? &groups[i / 2].weight_decay : &groups[i / 2].lr;
        AMPI_REFUSE_CALL(!ampi_lr_is_valid(value, 1), code,
            "%s: groups[%d].%s %g must be finite and not negative, or AMP_ZERO", place, i / 2,
            i % 2 ? "weight_decay" : "lr", (double)*value);
    }
    return AMP_OK;
}

/* Refuses a desc that is out of range or contradicts itself; its defaults are filled in. */
AMPI_FN amp_result ampi_optimizer_validate(const amp_optimizer_desc* d) {
    const amp_logger* logger = d->logger;
    const amp_schedule* s = &d->schedule;
    for (size_t i = 0; i < AMPI_LENGTH(ampi_optimizer_fields); i++)
        AMPI_TRY(ampi_check_field(d, &ampi_optimizer_fields[i], "optimizer", logger));
    AMPI_REFUSE_DESC(d->nesterov && (d->momentum <= 0.0f || d->dampening > 0.0f),
        "optimizer: nesterov needs momentum > 0 and no dampening");
    AMPI_REFUSE_DESC(s->warmup_steps < 0, "optimizer: schedule.warmup_steps is negative");
    AMPI_REFUSE_DESC(s->kind >= AMP_SCHEDULE_LINEAR && s->total_steps <= s->warmup_steps,
        "optimizer: schedule.total_steps must be greater than schedule.warmup_steps");
    AMPI_REFUSE_DESC(s->kind == AMP_SCHEDULE_STEP && s->step_size < 1,
        "optimizer: schedule.step_size must be at least 1");
    AMPI_REFUSE_DESC(d->group_count > 0 && !d->groups,
        "optimizer: group_count is not 0, but groups is NULL");
    return ampi_groups_check(d->groups, d->group_count, AMP_ERR_DESC, "optimizer", logger);
}

/* The groups in use: one with the desc's settings, if it has none. */
AMPI_HD AMPI_FN int ampi_group_count(const amp_optimizer* o) {
    return o->desc.group_count > 0 ? o->desc.group_count : 1;
}

/* How an optimizer of this desc updates weights, an ampi_update_kind; of LAMB the second of its two
   passes. */
AMPI_HD AMPI_FN int ampi_update_kind_of(const amp_optimizer_desc* d) {
    const int buffered = d->momentum > 0.0f;
    if (d->kind == AMP_SGD) return buffered ? AMPI_UPDATE_MOMENTUM : AMPI_UPDATE_SGD;
    if (d->kind == AMP_RMSPROP) return buffered ? AMPI_UPDATE_BUFFERED : AMPI_UPDATE_RMSPROP;
    return d->kind == AMP_LAMB ? AMPI_UPDATE_LAMB : AMPI_UPDATE_ADAM;
}

/* The kind of a group of a desc that is not yet checked. */
AMPI_FN int ampi_kind_in_group(const amp_optimizer_desc* d, int group) {
    const int exists = d->groups && group >= 0 && group < d->group_count
        && d->group_count <= AMP_MAX_GROUPS;
    return ampi_update_kind_of(exists && d->groups[group].optimizer ? d->groups[group].optimizer
        : d);
}

/* The desc that a group follows: its own, or the optimizer's. */
AMPI_HD AMPI_FN const amp_optimizer_desc* ampi_group_desc(const amp_optimizer* o, int group) {
    return o->own[group].eps > 0.0f ? &o->own[group] : &o->desc;
}

AMPI_HD AMPI_FN int ampi_group_kind(const amp_optimizer* o, int group) {
    return ampi_update_kind_of(ampi_group_desc(o, group));
}

/* The kinds of all groups, a bit for each. */
AMPI_FN unsigned ampi_kinds(const amp_optimizer* o) {
    unsigned kinds = 0;
    for (int i = 0; i < ampi_group_count(o); i++) kinds |= 1u << ampi_group_kind(o, i);
    return kinds;
}

/* Copies group i's own optimizer, if it has one; its rate and weight decay where the group gives
   none. */
AMPI_FN amp_result ampi_group_take(amp_optimizer* o, int i) {
    const amp_logger* logger = &o->logger;
    amp_param_group* g = &o->groups[i];
    amp_optimizer_desc* own = &o->own[i];
    if (!g->optimizer) return AMP_OK;

    *own = *g->optimizer;
    AMPI_REFUSE_DESC(own->clip_norm != 0.0f || own->maximize || own->unchecked || own->group_count
        || own->schedule.kind || own->schedule.warmup_steps, "optimizer: groups[%d].optimizer has "
        "clip_norm, maximize, unchecked, a schedule or groups, which are for all groups", i);
    own->logger = logger;
    ampi_optimizer_fill(own);
    AMPI_TRY(ampi_optimizer_validate(own));
    own->groups = NULL;
    own->logger = NULL;
    g->optimizer = NULL;
    if (ampi_is_zero(&g->lr)) g->lr = own->lr > 0.0f ? own->lr : (float)AMP_ZERO;
    if (ampi_is_zero(&g->weight_decay))
        g->weight_decay = own->weight_decay > 0.0f ? own->weight_decay : (float)AMP_ZERO;
    return AMP_OK;
}

/* Fills in an optimizer's settings, of which nothing is left at the caller. */
AMPI_FN amp_result ampi_settings_take(amp_optimizer* o, const amp_optimizer_desc* desc) {
    amp_optimizer_desc* d = &o->desc;
    AMPI_CLEAR(*o);
    if (desc) *d = *desc;
    ampi_optimizer_fill(d);
    AMPI_TRY(ampi_optimizer_validate(d));
    if (d->logger) o->logger = *d->logger;
    for (int i = 0; i < d->group_count; i++) {
        o->groups[i] = d->groups[i];
        AMPI_TRY(ampi_group_take(o, i));
    }
    d->groups = NULL;
    d->logger = NULL;
    return AMP_OK;
}

/* Moments of a weight that an optimizer of this desc needs; -1 for a bad desc. */
AMP_DEF int amp_optimizer_moments(const amp_optimizer_desc* desc) {
    amp_optimizer o;
    int most = 0;
    if (ampi_settings_take(&o, desc) != AMP_OK) return -1;
    for (int i = 0; i < ampi_group_count(&o); i++) {
        const int kind = ampi_group_kind(&o, i);
        most = ampi_max_int(most, ampi_uses_m(kind) + ampi_uses_v(kind));
    }
    return most;
}

AMPI_FN int ampi_param_frozen(const amp_optimizer* o, const amp_param* p) {
    return o->groups[p->group].frozen;
}

/* In ampi_param_validate: AMPI_REFUSE_CALL about parameter p, number i. */
#define AMPI_REFUSE_PARAM(condition, code, what) \
    AMPI_REFUSE_CALL(condition, code, "optimizer: parameter %d (%s): " what, i, \
        ampi_name_or_none(p->name))

/* Refuses parameter i if its group, types or arrays are not valid. */
AMPI_FN amp_result ampi_param_validate(const amp_optimizer* o, int i) {
    const amp_param* p = &o->params[i];
    const amp_logger* logger = &o->logger;
    AMPI_REFUSE_PARAM(p->group < 0 || p->group >= ampi_group_count(o), AMP_ERR_ARGUMENT,
        "its group does not exist");
    const int kind = ampi_group_kind(o, p->group);
    AMPI_REFUSE_PARAM(!ampi_is_compute_dtype(p->grad_dtype), AMP_ERR_DTYPE,
        "grad_dtype must be F32, F16 or BF16");
    AMPI_REFUSE_PARAM(p->low && ampi_type_size(p->low_dtype) != 2, AMP_ERR_DTYPE,
        "low_dtype must be F16 or BF16");
    AMPI_REFUSE_PARAM(!ampi_is_compute_dtype(p->moment_dtype), AMP_ERR_DTYPE,
        "moment_dtype must be F32, BF16 or F16");
    AMPI_REFUSE_PARAM(p->moment_dtype == AMP_F16 && ampi_uses_v(kind), AMP_ERR_DTYPE,
        "v would underflow in F16: moment_dtype must be F32 or BF16");
    AMPI_REFUSE_PARAM(p->rest && (p->master || !p->low || p->low_dtype != AMP_BF16),
        AMP_ERR_ARGUMENT, "rest needs a low of BF16 and no master");

    /* Arrays: of no elements none is needed, of a frozen parameter the weights alone. */
    if (p->count == 0) return AMP_OK;
    AMPI_REFUSE_PARAM(p->count > SIZE_MAX / 16, AMP_ERR_ARGUMENT,
        "no memory holds that many elements");
    AMPI_REFUSE_PARAM(!p->master && !p->low, AMP_ERR_ARGUMENT, "neither master nor low is given");
    if (ampi_param_frozen(o, p)) return AMP_OK;
    AMPI_REFUSE_PARAM(!p->grad, AMP_ERR_ARGUMENT, "grad is NULL");
    AMPI_REFUSE_PARAM(ampi_uses_m(kind) && !p->m, AMP_ERR_ARGUMENT,
        "m is NULL, but this optimizer needs it");
    AMPI_REFUSE_PARAM(ampi_uses_v(kind) && !p->v, AMP_ERR_ARGUMENT,
        "v is NULL, but this optimizer needs it");
    return AMP_OK;
}

/* Refuses a list without parameters, or with one that is not valid. */
AMPI_FN amp_result ampi_params_validate(const amp_optimizer* o) {
    AMPI_REFUSE_WITH(&o->logger, !o->params, AMP_ERR_ARGUMENT, "optimizer: params is NULL");
    AMPI_REFUSE_WITH(&o->logger, o->count < 1, AMP_ERR_ARGUMENT,
        "optimizer: there are no parameters, count is %d", o->count);
    for (int i = 0; i < o->count; i++) AMPI_TRY(ampi_param_validate(o, i));
    return AMP_OK;
}

/* Arrays of a parameter: master, low, grad, m, v, rest. */
enum { AMPI_PARAM_ARRAYS = 6 };

/* Where array `id` of all parameters lies, counted through the first parameter's arrays, then the
   second's. Unused moments, a frozen parameter's too, lie nowhere. */
AMPI_FN ampi_array ampi_param_array(const void* list, size_t id) {
    const amp_optimizer* o = (const amp_optimizer*)list;
    const amp_param* p = &o->params[id / AMPI_PARAM_ARRAYS];
    const int moves = !ampi_param_frozen(o, p), kind = ampi_group_kind(o, p->group);
    const void* const data[] = { p->master, p->low, p->grad,
        moves && ampi_uses_m(kind) ? p->m : NULL, moves && ampi_uses_v(kind) ? p->v : NULL,
        p->rest };
    const size_t moment = ampi_type_size(p->moment_dtype);
    const size_t sizes[] = { 4, 2, ampi_type_size(p->grad_dtype), moment, moment, 2 };
    return ampi_array_of(data[id % AMPI_PARAM_ARRAYS], p->count * sizes[id % AMPI_PARAM_ARRAYS], 1);
}

/* Refuses two arrays that share memory: a step would update it twice. */
AMPI_FN amp_result ampi_params_apart(const amp_optimizer* o) {
    static const char* const array[AMPI_PARAM_ARRAYS] = { "master", "low", "grad", "m", "v",
        "rest" };
    const size_t n = AMPI_PARAM_ARRAYS;
    size_t a, b;
    if (!ampi_arrays_meet(o, ampi_param_array, (size_t)o->count * n, &a, &b)) return AMP_OK;
    return ampi_fail(&o->logger, AMP_ERR_ARGUMENT,
        "optimizer: %s of parameter %d (%s) and %s of parameter %d (%s) overlap in memory",
        array[a % n], (int)(a / n), ampi_name_or_none(o->params[a / n].name),
        array[b % n], (int)(b / n), ampi_name_or_none(o->params[b / n].name));
}

/* Tells the logger of the first second moments in 16 bits that hardly move. */
AMPI_FN void ampi_remark_idle(const amp_optimizer* o) {
    for (int i = 0; i < o->count; i++) {
        const amp_param* p = &o->params[i];
        const float beta2 = ampi_group_desc(o, p->group)->beta2;
        if (p->moment_dtype != AMP_BF16 || !ampi_uses_v(ampi_group_kind(o, p->group))
                || beta2 <= 255.0f / 256) continue;
        ampi_remark(&o->logger,
            "optimizer: parameter %d (%s): v in bf16 hardly moves with beta2 %g; 0.99 suits it", i,
            ampi_name_or_none(p->name), (double)beta2);
        return;
    }
}

/* Checks a desc and parameters, and makes an optimizer of them. Of amp_optimizer_init only the low
   copies are missing: what params point to stays as it is. place: what sentences begin with. */
AMPI_FN amp_result ampi_optimizer_make(amp_optimizer* o, const amp_optimizer_desc* desc,
        amp_param* params, int count, const char* place) {
    amp_optimizer made;
    AMPI_REFUSE_WITH(desc ? desc->logger : NULL, !o, AMP_ERR_ARGUMENT,
        "%s: the optimizer is NULL", place);
    AMPI_TRY(ampi_settings_take(&made, desc));
    made.params = params;
    made.count = count;
    AMPI_TRY(ampi_params_validate(&made));
    AMPI_TRY(ampi_params_apart(&made));
    made.state.lr = made.desc.lr;
    ampi_remark_idle(&made);
    *o = made;
    return AMP_OK;
}

/* Stores n weights in 16 bits; those too large become the largest finite value. */
AMPI_FN void ampi_store_saturated(uint16_t* low, amp_dtype t, const float* w, size_t n) {
    ampi_store_f32(low, t, 0, w, n);
    ampi_saturate(low, t, n);
}

/* Writes the 16-bit copies of all masters, saturated; leaves no flag, as saturating casts do. */
AMPI_FN void ampi_params_write_low(const amp_optimizer* o) {
    fenv_t floats;

    feholdexcept(&floats);
    for (const amp_param* p = o->params; p < o->params + o->count; p++)
        if (p->master && p->low)
            ampi_store_saturated((uint16_t*)p->low, p->low_dtype, p->master, p->count);
    fesetenv(&floats);
}

AMP_DEF void amp_master_split(void* low, uint16_t* rest, const float* w, size_t n) {
    ampi_split((uint16_t*)low, rest, w, n);
}

AMP_DEF void amp_master_join(float* w, const void* low, const uint16_t* rest, size_t n) {
    ampi_join(w, (const uint16_t*)low, rest, n);
}

/* Makes an optimizer of valid parameters, and writes their low copies. */
AMP_DEF amp_result amp_optimizer_init(amp_optimizer* o, const amp_optimizer_desc* desc,
        amp_param* params, int count) {
    AMPI_TRY(ampi_optimizer_make(o, desc, params, count, "amp_optimizer_init"));
    ampi_params_write_low(o);
    return AMP_OK;
}

/* --- passes over the parameters --- */
/* The gradient of parameter i of an array, empty if the parameter has none. */
AMPI_FN amp_tensor ampi_grad_at(const void* list, int i) {
    const amp_param* p = (const amp_param*)list + i;
    const amp_tensor t = { p->grad, p->grad_dtype, p->grad ? p->count : 0, p->name };
    return t;
}

/* The gradients of parameters as a list that passes walk. */
AMPI_FN ampi_tensors ampi_grads_of(const amp_param* params, int count) {
    const ampi_tensors t = { params, count, ampi_grad_at, 0, NULL };
    return t;
}

/* A pass that updates parameters, chunk by chunk. */
typedef struct ampi_step {
    const amp_param* params;      /* the pass's first parameter */
    const ampi_update* updates;   /* by group */
    int lamb;                     /* its pass, an ampi_update_kind; 0 = of all other kinds */
    int first;                    /* number of params[0] among the optimizer's */
    amp_optimizer_info* info;     /* for overflows of the update */
    double w_sum, direction_sum;  /* LAMB: sums of squares of weights and of their direction */
} ampi_step;

/* The limits beyond which an update overflows, none met so far. A weight without a master must fit
   its 16 bits; a copy saturates. */
AMPI_HD AMPI_FN void ampi_update_limits(ampi_update_overflow* over, int has_master, int has_low,
        amp_dtype low) {
    AMPI_CLEAR(*over);
    over->finite = 0x7f7fffffu;
    over->low = has_low ? ampi_last_rounded(low) : over->finite;
    over->last = has_master ? over->finite : over->low;
}

/* Elements [i, i + n) of an array as floats: where they lie or, of 16 bits, in a tile; or NULL. */
AMPI_FN float* ampi_as_floats(void* x, amp_dtype t, size_t i, size_t n, float* tile) {
    if (!x) return NULL;
    if (ampi_dtype_or_f32(t) == AMP_F32) return (float*)x + i;
    ampi_load_f32(tile, x, t, i, n);
    return tile;
}

/* Elements [i, i + n) of moments of 16 bits from a tile; others lie where they belong. */
AMPI_FN void ampi_moments_store(void* x, amp_dtype t, size_t i, size_t n, float* tile) {
    if (!x || ampi_dtype_or_f32(t) == AMP_F32) return;
    ampi_limit_f32(tile, n, ampi_last_rounded(t));
    ampi_store_f32(x, t, i, tile, n);
}

/* Elements [i, i + n) of split or 16-bit weights, or of a copy of masters, which saturates. */
AMPI_FN void ampi_low_store(const amp_param* p, size_t i, size_t n, const float* w, int saturate) {
    uint16_t* low = (uint16_t*)p->low;
    if (p->rest) ampi_split(low + i, p->rest + i, w, n);
    else if (p->master && low && saturate) ampi_store_saturated(low + i, p->low_dtype, w, n);
    else if (low) ampi_store_f32(low, p->low_dtype, i, w, n);
}

/* Updates the weights of a chunk, or sums the squares of its weights and of LAMB's direction. */
AMPI_FN void ampi_update_chunk(void* context, ampi_chunk* c) {
    const ampi_step* step = (const ampi_step*)context;
    const amp_param* p = &step->params[c->tensor];
    const ampi_update* u = &step->updates[p->group];
    const ampi_kernels* kernels = ampi_kernels_now();
    const int kind = step->lamb ? step->lamb : u->kind, direction = kind == AMPI_LAMB_DIRECTION;
    const size_t end = c->offset + c->n;
    void* const m = ampi_uses_m(kind) ? p->m : NULL;
    void* const v = ampi_uses_v(kind) ? p->v : NULL;
    const amp_dtype type = p->moment_dtype;
    AMPI_ALIGNED float w_tile[AMPI_BLOCK], g_tile[AMPI_BLOCK];
    AMPI_ALIGNED float m_tile[AMPI_BLOCK], v_tile[AMPI_BLOCK];
    ampi_update_overflow over;
    size_t n;
    if (u->frozen || (u->kind == AMPI_UPDATE_LAMB && !step->lamb)) return;
    ampi_update_limits(&over, p->master != NULL, p->low != NULL, p->low_dtype);
    for (size_t i = c->offset; i < end; i += n) {
        /* Weights and gradients as floats: where they lie, or in tiles. A direction is left in a
           tile, as the gradient must stay. */
        float *w = w_tile, *g = g_tile;
        n = ampi_min_size(end - i, AMPI_BLOCK);
        if (p->master) w = p->master + i;
        else if (p->rest) ampi_join(w, (const uint16_t*)p->low + i, p->rest + i, n);
        else ampi_load_f32(w, p->low, p->low_dtype, i, n);
        if (ampi_dtype_or_f32(p->grad_dtype) == AMP_F32 && !direction) g = (float*)p->grad + i;
        else ampi_load_f32(g, p->grad, p->grad_dtype, i, n);

        over.base = i;
        const ampi_update_job job = { w, g, ampi_as_floats(m, type, i, n, m_tile),
            ampi_as_floats(v, type, i, n, v_tile), u, &over };
        kernels->update(kind, &job, n);
        if (direction) {
            kernels->add_squares(&c->sum, w, AMP_F32, n);
            kernels->add_squares(&c->sum2, g, AMP_F32, n);
            continue;
        }

        ampi_moments_store(m, type, i, n, m_tile);
        ampi_moments_store(v, type, i, n, v_tile);
        ampi_low_store(p, i, n, w, over.held + over.saturated > 0);
    }
    ampi_kernels_end();
    c->held = over.held;
    c->saturated = over.saturated;
    c->first = over.first;
}

/* Adds what a chunk's update met to the step's info. Chunks of a pass arrive in order. */
AMPI_FN void ampi_update_combine(void* context, ampi_chunk* c) {
    ampi_step* step = (ampi_step*)context;
    amp_optimizer_info* info = step->info;
    step->w_sum += c->sum;
    step->direction_sum += c->sum2;
    const int before = info->update_tensor < 0 || step->first + c->tensor < info->update_tensor;
    if (c->held + c->saturated > 0 && before) {
        const char* name = step->params[c->tensor].name;
        info->update_tensor = step->first + c->tensor;
        info->update_index = c->first;
        AMPI_CLEAR(info->update_name);
        if (name) strncpy(info->update_name, name, sizeof info->update_name - 1);
    }
    info->update_overflows += c->held;
    info->saturated += c->saturated;
}

/* Updates the parameters of LAMB's groups, one by one in two passes. */
AMPI_FN void ampi_lamb_step(const amp_optimizer* o, ampi_update* updates, ampi_step* step) {
    for (int i = 0; i < o->count; i++) {
        const ampi_tensors t = ampi_grads_of(&o->params[i], 1);
        ampi_update* u = &updates[o->params[i].group];
        const float rate = u->step;  /* -lr, of the whole group */
        double ratio = 1.0;
        if (u->frozen || u->kind != AMPI_UPDATE_LAMB) continue;

        /* The norms of its weights and of their direction. */
        step->params = &o->params[i];
        step->first = i;
        step->w_sum = step->direction_sum = 0.0;
        step->lamb = AMPI_LAMB_DIRECTION;
        ampi_each_chunk(&t, ampi_update_chunk, ampi_update_combine, step);
        if (step->w_sum > 0.0 && step->direction_sum > 0.0)
            ratio = sqrt(step->w_sum) / sqrt(step->direction_sum);

        /* The step, by -lr times their ratio. */
        u->step = (float)ampi_mul64((double)rate, ratio);
        step->lamb = AMPI_UPDATE_LAMB;
        ampi_each_chunk(&t, ampi_update_chunk, ampi_update_combine, step);
        u->step = rate;
    }
}

/* --- the step --- */
/* The constants of a step of Adam, AdamW or LAMB. t: steps that moved the group so far; lr, wd: its
   rate and weight decay. Products of two floats are exact in double. */
AMPI_HD AMPI_FN void ampi_update_of_adam(ampi_update* u, const amp_optimizer_desc* d, int64_t t,
        float lr, float wd) {
    const double correction = 1.0 - ampi_pow_int((double)d->beta1, t + 1);
    u->b1 = d->beta1;
    u->b2 = d->beta2;
    u->c1 = (float)(1.0 - (double)d->beta1);
    u->c2 = (float)(1.0 - (double)d->beta2);
    u->r1 = (float)(1.0 / correction);
    u->r2 = (float)(1.0 / sqrt(1.0 - ampi_pow_int((double)d->beta2, t + 1)));
    u->eps = d->eps;
    if (d->kind != AMP_LAMB) u->step = (float)((double)-lr / correction);
    if (d->kind == AMP_ADAMW) u->decay = (float)(1.0 - (double)lr * (double)wd);
    if (d->kind == AMP_LAMB) u->wd = wd;
    if (d->kind != AMP_ADAM) u->l2 = 0.0f;
}

/* The constants of this step for one group. mult: what gradients are multiplied by; factor: the
   schedule's. */
AMPI_HD AMPI_FN void ampi_update_of_group(ampi_update* u, const amp_optimizer* o, int group,
        float mult, double factor) {
    const amp_param_group* g = &o->groups[group];
    const amp_optimizer_desc* d = ampi_group_desc(o, group);
    const int64_t t = o->state.step - o->state.frozen_steps[group];  /* steps that moved it */
    const float lr = (float)ampi_mul64((double)ampi_default_at(&g->lr, o->state.lr), factor);
    const float wd = ampi_default_at(&g->weight_decay, d->weight_decay);

    /* Of all kinds; Adam and its kin change some. */
    AMPI_CLEAR(*u);
    u->frozen = g->frozen;
    u->kind = ampi_update_kind_of(d);
    u->mult = o->desc.maximize ? -mult : mult;
    u->l2 = wd;
    u->decay = 1.0f;
    u->step = -lr;
    if (d->kind == AMP_RMSPROP) {
        u->b1 = d->momentum;
        u->b2 = d->beta2;
        u->c2 = (float)(1.0 - (double)d->beta2);
        u->r2 = 1.0f;
        *(d->eps_in_root ? &u->inside : &u->eps) = d->eps;
        return;
    }
    if (d->kind != AMP_SGD) { ampi_update_of_adam(u, d, t, lr, wd); return; }

    /* SGD's buffer starts as the gradient itself. */
    u->b1 = t == 0 ? 0.0f : d->momentum;
    u->c1 = t == 0 ? 1.0f : (float)(1.0 - (double)d->dampening);
    u->buf = d->nesterov ? d->momentum : 1.0f;
    u->raw = d->nesterov ? 1.0f : 0.0f;
}

/* Updates all parameters with gradients times `mult`; two passes for LAMB, one for other kinds. */
AMPI_FN void ampi_optimizer_apply(amp_optimizer* o, float mult, amp_optimizer_info* info) {
    ampi_update updates[AMP_MAX_GROUPS];
    const double factor = ampi_schedule_factor(&o->desc.schedule, o->state.step);
    const ampi_tensors t = ampi_grads_of(o->params, o->count);
    const unsigned kinds = ampi_kinds(o), lamb = 1u << AMPI_UPDATE_LAMB;
    ampi_step step = { o->params, updates, 0, 0, info, 0.0, 0.0 };
    fenv_t floats;

    feholdexcept(&floats);  /* an update that overflows is counted, not trapped */
    for (int i = 0; i < ampi_group_count(o); i++)
        ampi_update_of_group(&updates[i], o, i, mult, factor);
    if (kinds & ~lamb) ampi_each_chunk(&t, ampi_update_chunk, ampi_update_combine, &step);
    if (kinds & lamb) ampi_lamb_step(o, updates, &step);
    for (int i = 0; i < AMP_MAX_GROUPS; i++)
        if (o->groups[i].frozen) o->state.frozen_steps[i]++;
    o->state.step++;
    fesetenv(&floats);
}

/* Refuses a state that the caller may have written and that is not valid. */
AMPI_FN amp_result ampi_optimizer_check_state(const amp_optimizer_state* s,
        const amp_logger* logger, const char* place) {
    AMPI_REFUSE_CALL(!ampi_lr_is_valid(&s->lr, 0), AMP_ERR_ARGUMENT,
        "%s: state.lr %g must be finite and not negative", place, (double)s->lr);
    AMPI_REFUSE_CALL(s->step < 0 || s->step >> 62, AMP_ERR_ARGUMENT,
        "%s: state.step %lld must lie in 0..2^62-1", place, (long long)s->step);
    for (int i = 0; i < AMP_MAX_GROUPS; i++)
        AMPI_REFUSE_CALL(s->frozen_steps[i] < 0 || s->frozen_steps[i] > s->step, AMP_ERR_ARGUMENT,
            "%s: state.frozen_steps[%d] %lld must lie in 0..%lld, the steps", place, i,
            (long long)s->frozen_steps[i], (long long)s->step);
    return AMP_OK;
}

/* Refuses a state or a group's settings that a caller wrote and that are not valid. */
AMPI_FN amp_result ampi_optimizer_check_rates(const amp_optimizer* o, const char* place) {
    for (int i = 0; i < AMP_MAX_GROUPS; i++)
        AMPI_REFUSE_WITH(&o->logger, o->groups[i].optimizer, AMP_ERR_ARGUMENT,
            "%s: groups[%d].optimizer is read by amp_optimizer_init alone", place, i);
    AMPI_TRY(ampi_optimizer_check_state(&o->state, &o->logger, place));
    return ampi_groups_check(o->groups, ampi_group_count(o), AMP_ERR_ARGUMENT, place, &o->logger);
}

/* Checks an optimizer before a call, as the caller may have changed what it points at, and lists
   its gradients in *t. */
AMPI_FN amp_result ampi_optimizer_enter(const amp_optimizer* o, const amp_scaler* s,
        ampi_tensors* t, const char* place) {
    const amp_logger* logger = o && o->params ? &o->logger : s ? &s->logger : NULL;
    AMPI_REFUSE_CALL(!o || !o->params, AMP_ERR_ARGUMENT, "%s: amp_optimizer_init was not called",
        place);
    AMPI_TRY(ampi_optimizer_check_rates(o, place));
    AMPI_TRY(ampi_params_validate(o));
    *t = ampi_grads_of(o->params, o->count);
    t->place = place;
    AMPI_REFUSE_CALL(!ampi_tensors_any(t), AMP_ERR_STATE, "%s: no parameter has a gradient", place);
    return AMP_OK;
}

/* The check of just these gradients, if nothing was done to them since; else NULL. */
AMPI_FN const amp_scaler_list* ampi_optimizer_checked(amp_scaler* s, const ampi_tensors* t) {
    const amp_scaler_list* list = s ? ampi_scaler_entry(s, ampi_tensors_key(t)) : NULL;
    return list && list->done == AMPI_CHECKED ? list : NULL;
}

/* Gradients are neither checked, scaled nor clipped, and need not be finite. */
AMPI_FN int ampi_optimizer_blind(const amp_optimizer* o, const amp_scaler* s) {
    return !s && o->desc.unchecked && o->desc.clip_norm <= 0.0f;
}

/* Norm and overflows of the gradients, from a pass or their last check. Returns 1 if the step may
   be applied. */
AMPI_FN int ampi_optimizer_look(const amp_optimizer* o, amp_scaler* s, const ampi_tensors* t,
        float factor, amp_overflow_info* found) {
    const amp_scaler_list* checked = ampi_optimizer_checked(s, t);
    if (ampi_optimizer_blind(o, s)) ampi_overflow_clear(found);
    else if (checked) {
        *found = s->info;
        found->norm = checked->norm;
    } else {
        ampi_unscale(t, NULL, factor, 0, found);
        if (s) ampi_scaler_record(s, found, t->place);
    }
    return s ? !s->state.found_inf : !found->found_inf;
}

/* What gradients of that norm are multiplied by: min(1, clip_norm / (norm + 1e-6)), or 1. */
AMPI_HD AMPI_FN double ampi_clip_coefficient(const amp_optimizer* o, double norm) {
    double coefficient = o->desc.clip_norm > 0.0f ? (double)o->desc.clip_norm / (norm + 1e-6) : 1.0;
    return coefficient < 1.0 ? coefficient : 1.0;
}

/* A step whose gradients are listed in t: check and norm, then skip or apply. s, info: or NULL. */
AMPI_FN amp_result ampi_optimizer_step_list(amp_optimizer* o, amp_scaler* s, const ampi_tensors* t,
        amp_optimizer_info* info) {
    amp_optimizer_info report;
    int unscaled = 1;  /* without a scaler gradients are as they should be */
    if (s) AMPI_TRY(ampi_scaler_enter(s, t, AMPI_STEPPED, &unscaled));
    const float factor = s && !unscaled ? s->state.inverse : 1.0f;

    AMPI_CLEAR(report);
    report.update_tensor = -1;
    report.lr = amp_schedule_lr(&o->desc.schedule, o->state.lr, o->state.step);
    report.applied = ampi_optimizer_look(o, s, t, factor, &report.overflow);
    report.grad_norm = report.overflow.norm;
    const double coefficient = report.applied ? ampi_clip_coefficient(o, report.grad_norm) : 1.0;
    report.clip_coefficient = (float)coefficient;
    if (report.applied) ampi_optimizer_apply(o, (float)((double)factor * coefficient), &report);

    if (s) {
        ampi_scaler_note(s, t, AMPI_STEPPED, report.grad_norm);
        report.overflow = s->info;
    }
    if (!report.applied) report.grad_norm = ampi_double(AMPI_INF64);
    if (info) *info = report;
    return AMP_OK;
}

/* Steps (what = AMPI_STEPPED), or unscales (AMPI_UNSCALED). A scaler without a logger uses the
   optimizer's meanwhile. */
AMPI_FN amp_result ampi_optimizer_call(amp_optimizer* o, amp_scaler* s, uint32_t what,
        const char* place, amp_optimizer_info* info) {
    ampi_tensors t;
    AMPI_TRY(ampi_optimizer_enter(o, s, &t, place));
    if (!s && what == AMPI_STEPPED) return ampi_optimizer_step_list(o, NULL, &t, info);
    AMPI_REFUSE_WITH(&o->logger, !s, AMP_ERR_ARGUMENT, "%s: the scaler is NULL", place);
    const amp_logger own = s->logger;
    if (!own.log) s->logger = o->logger;
    amp_result r = what == AMPI_STEPPED ? ampi_optimizer_step_list(o, s, &t, info)
        : ampi_scaler_look(s, &t, what, NULL);
    s->logger = own;
    return r;
}

AMP_DEF amp_result amp_optimizer_unscale(amp_optimizer* o, amp_scaler* s) {
    return ampi_optimizer_call(o, s, AMPI_UNSCALED, "amp_optimizer_unscale", NULL);
}

AMP_DEF amp_result amp_optimizer_step(amp_optimizer* o, amp_scaler* s, amp_optimizer_info* info) {
    return ampi_optimizer_call(o, s, AMPI_STEPPED, "amp_optimizer_step", info);
}

/* Sets a valid base rate; the logger hears if the schedule makes nothing of it. */
AMP_DEF amp_result amp_optimizer_set_lr(amp_optimizer* o, float lr) {
    if (!o || !o->params) return AMP_ERR_ARGUMENT;
    AMPI_REFUSE_WITH(&o->logger, !ampi_lr_is_valid(&lr, 0), AMP_ERR_ARGUMENT,
        "amp_optimizer_set_lr: %g must be finite and not negative", (double)lr);
    o->state.lr = lr;
    if (lr > 0.0f && ampi_schedule_factor(&o->desc.schedule, o->state.step) <= 0.0)
        ampi_remark(&o->logger,
            "amp_optimizer_set_lr: the schedule has ended: at step %lld it makes 0 of every rate",
            (long long)o->state.step);
    return AMP_OK;
}

/* Sets all gradients that there are to 0. */
AMP_DEF amp_result amp_optimizer_zero_grad(amp_optimizer* o) {
    if (!o || !o->params) return AMP_ERR_ARGUMENT;
    for (const amp_param* p = o->params; p < o->params + o->count; p++)
        if (p->grad) memset(p->grad, 0, p->count * ampi_type_size(p->grad_dtype));
    return AMP_OK;
}

/* --- optimizer and scaler in one object --- */
enum { AMPI_MIXED_NAME = 16 };

/* The next `bytes` of a block, zeros; without base they are counted only. A sum beyond size_t
   becomes SIZE_MAX. */
AMPI_FN void* ampi_mixed_take(char* base, size_t* at, size_t bytes) {
    void* p = base ? base + *at : NULL;
    if (!ampi_add_size(*at, ampi_round_up(bytes, 64), at)) *at = SIZE_MAX;
    return p;
}

/* Gives parameter number i what it lacks, from a block that begins with `base` or, without base,
   only counts its bytes. kind: an ampi_update_kind. */
AMPI_FN void ampi_mixed_place(amp_param* p, int i, int kind, char* base, size_t* at) {
    const size_t floats = p->count * sizeof(float),
        moments = p->count * ampi_type_size(p->moment_dtype);
    if (!p->name) {
        char* name = (char*)ampi_mixed_take(base, at, AMPI_MIXED_NAME);
        if (name) ampi_say(name, AMPI_MIXED_NAME, "param%d", i);
        p->name = name;
    }
    if (p->count > SIZE_MAX / 16) return;  /* will be refused */

    if (p->low && !p->master && !p->rest) p->master = (float*)ampi_mixed_take(base, at, floats);
    else if (p->master && !p->low && p->low_dtype)
        p->low = ampi_mixed_take(base, at, floats / 2);
    if (ampi_uses_m(kind) && !p->m) p->m = ampi_mixed_take(base, at, moments);
    if (ampi_uses_v(kind) && !p->v) p->v = ampi_mixed_take(base, at, moments);
}

/* A copy of the desc's parameters with all they need, from a block that begins with `base`; without
   base, NULL and the bytes of such a block. */
AMPI_FN amp_param* ampi_mixed_params(const amp_mixed_desc* desc, char* base, size_t* bytes) {
    size_t at = 0;
    amp_param* params = (amp_param*)ampi_mixed_take(base, &at,
        (size_t)desc->count * sizeof *params);
    for (int i = 0; i < desc->count; i++) {
        amp_param p = desc->params[i];
        ampi_mixed_place(&p, i, ampi_kind_in_group(&desc->optimizer, p.group), base, &at);
        if (params) params[i] = p;
    }
    *bytes = at;
    return params;
}

/* Makes optimizer and scaler of parameters that lack nothing, and fills masters and low copies. */
AMPI_FN amp_result ampi_mixed_make(amp_mixed* x, const amp_mixed_desc* desc, amp_param* params) {
    amp_optimizer_desc o = desc->optimizer;
    amp_scaler_desc s = desc->scaler;
    if (!o.logger) o.logger = desc->logger;
    if (!s.logger) s.logger = desc->logger;
    AMPI_TRY(ampi_optimizer_make(&x->optimizer, &o, params, desc->count, "amp_mixed_init"));
    AMPI_TRY(amp_scaler_init(&x->scaler, &s));
    for (int i = 0; i < desc->count; i++)
        if (!desc->params[i].master && params[i].master)
            ampi_load_f32(params[i].master, params[i].low, params[i].low_dtype, 0, params[i].count);
    ampi_params_write_low(&x->optimizer);
    return AMP_OK;
}

AMP_DEF amp_result amp_mixed_init(amp_mixed* x, const amp_mixed_desc* desc) {
    const amp_logger* logger = desc ? desc->logger : NULL;
    amp_mixed made;
    size_t bytes;
    AMPI_REFUSE_CALL(!x, AMP_ERR_ARGUMENT, "amp_mixed_init: the object is NULL");
    AMPI_REFUSE_CALL(!desc || !desc->params || desc->count < 1, AMP_ERR_ARGUMENT,
        "amp_mixed_init: there are no parameters");
    AMPI_REFUSE_DESC(!desc->allocator.alloc != !desc->allocator.free,
        "amp_mixed_init: allocator needs both alloc and free, or neither");

    AMPI_CLEAR(made);
    made.allocator = desc->allocator;
    ampi_mixed_params(desc, NULL, &bytes);
    if (bytes < SIZE_MAX) made.memory = ampi_alloc(bytes, &made.allocator);
    AMPI_REFUSE_CALL(!made.memory, AMP_ERR_MEMORY,
        "amp_mixed_init: out of memory, %llu bytes wanted", (ampi_ull)bytes);
    memset(made.memory, 0, bytes);

    const amp_result r = ampi_mixed_make(&made, desc,
        ampi_mixed_params(desc, (char*)made.memory, &bytes));
    if (r == AMP_OK) *x = made;
    else ampi_free(made.memory, &made.allocator);
    return r;
}

AMP_DEF void amp_mixed_free(amp_mixed* x) {
    if (!x) return;
    ampi_free(x->memory, &x->allocator);
    AMPI_CLEAR(*x);
}

/* Looks for the master that p lies in. */
AMP_DEF amp_ref amp_mixed_low(const amp_mixed* x, const float* p) {
    const int count = x ? x->optimizer.count : 0;
    for (int i = 0; i < count; i++) {
        const amp_param* q = &x->optimizer.params[i];
        const uintptr_t bytes = (uintptr_t)p - (uintptr_t)q->master;  /* large before it */
        if (q->master && q->low && bytes < q->count * sizeof *p)
            return ampi_from(amp_ref_of(q->low, q->low_dtype), bytes / sizeof *p);
    }
    return amp_f32(p);
}

AMP_DEF float amp_mixed_scale(amp_mixed* x, float loss, float seed) {
    amp_scaler* s = x ? &x->scaler : NULL;
    amp_scaler_scale_loss(s, loss);
    return amp_scaler_scale_loss(s, seed);
}

AMP_DEF amp_result amp_mixed_step(amp_mixed* x, amp_optimizer_info* info) {
    if (!x) return AMP_ERR_ARGUMENT;
    AMPI_TRY(ampi_optimizer_call(&x->optimizer, &x->scaler, AMPI_STEPPED, "amp_mixed_step", info));
    return amp_scaler_update(&x->scaler);
}

/* --- the self test: each probe fills `out` from uniform numbers x in [-2,2) --- */
enum { AMPI_PROBE = 512 };  /* numbers in x and in out */

/* The numbers that conversions give. */
AMPI_FN void ampi_probe_conversions(float* out, const float* x) {
    static const amp_dtype types[] = { AMP_F16, AMP_BF16 };
    const size_t elements = AMPI_PROBE / 2;
    uint16_t low[AMPI_PROBE / 2];

    for (size_t i = 0; i < 2; i++) {
        amp_convert(amp_ref_of(low, types[i]), amp_f32(x + i * elements), elements);
        amp_convert(amp_f32(out + i * elements), amp_ref_of(low, types[i]), elements);
    }
}

/* The numbers that products give. */
AMPI_FN void ampi_probe_products(float* out, const float* x) {
    const amp_gemm_shape shape = { AMP_NO_TRANS, AMP_TRANS, 13, 19, 16, 0, 0, 0, 0, 0, 0, 0 };
    amp_bfloat16 low[AMPI_PROBE];

    amp_convert(amp_bf16(low), amp_f32(x), AMPI_PROBE);
    amp_gemm(&shape, 0.7f, amp_f32(x), amp_f32(x + 208), 0.0f, amp_f32(out), NULL);
    amp_gemm(&shape, 1.0f, amp_bf16(low), amp_bf16(low + 208), 0.0f, amp_f32(out + 247), NULL);
}

/* The numbers that sums give. */
AMPI_FN void ampi_probe_sums(float* out, const float* x) {
    amp_layer_norm_forward(amp_f32(x), AMP_NONE, AMP_NONE, 0.0f, NULL, NULL, amp_f32(out), 8,
        AMPI_PROBE / 8, NULL);
}

/* The numbers that exp, log and activations give. */
AMPI_FN void ampi_probe_exp(float* out, const float* x) {
    /* Runs of COUNT numbers: 2 of each activation, 2 of softmax, 2 of dropout; then a loss. */
    enum { COUNT = AMPI_PROBE / (2 * AMP_ACTIVATION_COUNT + 6) };

    for (int f = 0; f < AMP_ACTIVATION_COUNT; f++) {
        amp_activation_forward((amp_activation)f, amp_f32(x), amp_f32(out), COUNT, NULL);
        amp_activation_backward((amp_activation)f, amp_f32(x + COUNT), amp_f32(x),
            amp_f32(out + COUNT), 0, COUNT, NULL);
        out += 2 * COUNT;
    }
    amp_softmax_forward(amp_f32(x), amp_f32(out), 2, COUNT, NULL);
    amp_dropout_forward(amp_f32(x), amp_f32(out + 2 * COUNT), 2 * COUNT, 0.1f, 1, 0, NULL);
    amp_bce_with_logits_forward(amp_f32(x), amp_f32(x + COUNT), out + 4 * COUNT, COUNT, NULL);
}

/* The numbers that optimizer steps give. */
AMPI_FN void ampi_probe_optimizer(float* out, const float* x) {
    enum { QUARTER = AMPI_PROBE / 4 };
    amp_optimizer_desc desc;
    amp_optimizer o;
    amp_param p;

    AMPI_CLEAR(desc);
    AMPI_CLEAR(p);
    desc.kind = AMP_ADAMW;
    desc.weight_decay = 0.01f;
    desc.clip_norm = 1.0f;
    p.master = out;
    p.m = out + QUARTER;
    p.v = out + 2 * QUARTER;
    p.grad = ampi_mutable(x);
    p.count = QUARTER;
    if (amp_optimizer_init(&o, &desc, &p, 1) != AMP_OK) return;
    for (int i = 0; i < 3; i++) amp_optimizer_step(&o, NULL, NULL);
}

/* The numbers that a scaler gives: scaled losses and inverses, with overflows in between. */
AMPI_FN void ampi_probe_scale(float* out, const float* x) {
    const float one = 1.0f, inf = ampi_float(0x7f800000u);
    amp_scaler_desc desc;
    amp_tensor grad;
    amp_scaler s;

    AMPI_CLEAR(desc);
    AMPI_CLEAR(grad);
    desc.growth_factor = 1.7;
    desc.backoff_factor = 0.3;
    desc.growth_interval = 2;
    grad.count = 1;
    if (amp_scaler_init(&s, &desc) != AMP_OK) return;
    for (int i = 0; i < AMPI_PROBE / 8; i++) {
        out[2 * i] = amp_scaler_scale_loss(&s, x[i]);
        grad.data = ampi_mutable(x[i] < -1.0f ? &inf : &one);  /* every fourth overflows */
        amp_scaler_check(&s, &grad, 1, NULL);
        amp_scaler_update(&s);
        out[2 * i + 1] = s.state.inverse;
    }
}

/* Probes, what a sentence calls them, and the hash of the bits that they give everywhere. */
static const struct {
    const char* name;
    void (*run)(float* out, const float* x);
    uint64_t hash;
} ampi_probes[] = {
    { "conversions", ampi_probe_conversions, 0x3bf33cb49c244b25u },
    { "products", ampi_probe_products, 0x0b48544edb7bd895u },
    { "sums", ampi_probe_sums, 0xcf24d2e4ea24d908u },
    { "exp, log and activations", ampi_probe_exp, 0xe0e47242e51a1f02u },
    { "optimizer steps", ampi_probe_optimizer, 0x19c5644098ed4aa3u },
    { "loss scales", ampi_probe_scale, 0x3ecede27b5528162u },
};

/* Compares the hash of each probe with the known one; the first that differs is told. */
AMP_DEF amp_result amp_self_test(const amp_logger* logger) {
    float x[AMPI_PROBE], out[AMPI_PROBE];

    for (int i = 0; i < AMPI_PROBE; i++) x[i] = 4.0f * amp_random_uniform(1, (uint64_t)i) - 2.0f;
    for (size_t i = 0; i < AMPI_LENGTH(ampi_probes); i++) {
        AMPI_CLEAR(out);
        ampi_probes[i].run(out, x);
        AMPI_FORGET(out);
        AMPI_REFUSE_CALL(ampi_hash_words(AMPI_HASH_START, out, AMPI_PROBE) != ampi_probes[i].hash,
            AMP_ERR_UNSUPPORTED,
            "self test: %s have other bits on %s: compile the implementation with -O2, without "
            "-ffast-math and its like", ampi_probes[i].name, amp_isa_name(amp_cpu_isa()));
    }
    return AMP_OK;
}

/* >>impl-backend The CPU's table of functions, by which a model runs. Each entry has the form that
   amp_backend declares. */

/* Functions as the table's AMPI_ENTRY declares them. */
#define AMPI_CPU(name, ...) \
    AMPI_FN amp_result ampi_cpu_##name(__VA_ARGS__, const amp_exec* exec AMPI_MAYBE)
AMPI_CPU(zero, void* p, size_t bytes) {
    memset(p, 0, bytes);
    return AMP_OK;
}

AMPI_CPU(copy, void* dst, const void* src, size_t bytes) {
    memcpy(dst, src, bytes);
    return AMP_OK;
}

/* amp_convert with the logger of exec. */
AMPI_CPU(convert, amp_ref dst, amp_ref src, size_t n) {
    amp_convert_desc d;
    AMPI_CLEAR(d);
    d.logger = ampi_exec_logger(exec);
    return amp_convert_with(dst, src, n, &d);
}

/* A label of any type, as the operators take it: -2^31 is no class. */
AMPI_HD AMPI_INLINE int64_t ampi_label_at(const void* labels, amp_dtype t, size_t i) {
    if (t == AMP_U8) return ((const uint8_t*)labels)[i];
    return t == AMP_I64 ? ((const int64_t*)labels)[i] : ((const int32_t*)labels)[i];
}

AMPI_HD AMPI_INLINE int32_t ampi_label_fit(int64_t label) {
    return label < -0x7fffffff || label > 0x7fffffff ? -0x7fffffff - 1 : (int32_t)label;
}

/* x, elements [at, at + n) of a batch, become (x - mean) / std of their channel; see
   amp_reading. */
AMPI_FN void ampi_normalize(float* x, size_t at, size_t n, const amp_reading* how) {
    for (size_t taken, i = 0; i < n; i += taken) {
        const size_t pixel = (at + i) % how->pixels;
        const float* mean = how->constants + (at + i) / how->pixels % how->channels;
        taken = ampi_min_size(n - i, how->pixels - pixel);  /* the rest of a channel */
        for (size_t k = i; k < i + taken; k++) x[k] = (x[k] - mean[0]) / mean[how->channels];
    }
}

/* Labels as int32, or inputs scaled and normalised, a tile of floats at a time. Bytes without a
   scale are divided by 255. */
AMPI_CPU(load, amp_ref dst, amp_ref src, size_t n, int from_host AMPI_MAYBE,
        const amp_reading* how) {
    float x[AMPI_TILE];
    size_t count, i;
    if (dst.dtype == AMP_I32) {
        for (i = 0; i < n; i++)
            ((int32_t*)dst.data)[i] = ampi_label_fit(ampi_label_at(src.data, src.dtype, i));
        return AMP_OK;
    }
    for (size_t at = 0; at < n; at += count) {
        count = ampi_min_size(n - at, AMPI_TILE);
        if (src.dtype != AMP_U8) ampi_load_f32(x, src.data, src.dtype, at, count);
        else for (i = 0; i < count; i++) x[i] = (float)((const uint8_t*)src.data)[at + i];

        if (how->scale != 0.0f) for (i = 0; i < count; i++) x[i] *= how->scale;
        else if (src.dtype == AMP_U8) for (i = 0; i < count; i++) x[i] /= 255.0f;

        AMPI_FORGET(x);  /* product and difference round apart */
        if (how->constants) ampi_normalize(x, at, count, how);
        ampi_store_f32(dst.data, dst.dtype, at, x, count);
    }
    return AMP_OK;
}

AMPI_CPU(dropout, amp_ref x, amp_ref y, size_t n, float p, uint64_t seed, uint64_t offset,
        const uint64_t* position, uint64_t stride) {
    return amp_dropout_forward(x, y, n, p, seed,
        offset + (position ? *position * stride : 0), exec);
}

AMPI_CPU(open, amp_training* t, const amp_optimizer_desc* desc, amp_param* params, int count) {
    return amp_optimizer_init(&t->optimizer, desc, params, count);
}

AMPI_FN void ampi_cpu_close(amp_training* t AMPI_MAYBE, const amp_exec* exec AMPI_MAYBE) {}

/* The loss scale of a pass: that of its window, or the current one where no step follows. */
AMPI_CPU(begin, amp_training* t, int window) {
    if (window) t->scale_used = amp_scaler_scale_loss(&t->scaler, 1.0f);
    t->loss_scale = window ? &t->scaler.state.scale_in_use : &t->scaler.state.scale;
    t->position = NULL;
    return AMP_OK;
}

AMPI_CPU(losses, amp_training* t, const float* losses, int count) {
    while (count-- > 0) amp_scaler_scale_loss(&t->scaler, *losses++);
    return AMP_OK;
}

/* Looks for inf and NaN in the gradients; flags: found, window unsound. */
AMPI_CPU(check, amp_training* t, const amp_tensor* grads, int count, float* flags) {
    amp_result r = amp_scaler_check(&t->scaler, grads, count, NULL);
    flags[0] = t->scaler.state.found_inf ? 1.0f : 0.0f;
    flags[1] = t->scaler.state.unsound ? 1.0f : 0.0f;
    return r;
}

AMPI_CPU(agree, amp_training* t, const float* flags) {
    if (flags[0] != 0.0f || flags[1] != 0.0f) ampi_scaler_raise(&t->scaler, flags[1] != 0.0f);
    return AMP_OK;
}

/* Updates the weights and the loss scale; a skipped step takes back the running statistics. */
AMPI_CPU(step, amp_training* t, void* now, const void* saved, size_t bytes) {
    AMPI_TRY(amp_optimizer_step(&t->optimizer, &t->scaler, &t->last));
    t->limit = amp_scaler_update(&t->scaler);
    if (!t->last.applied && bytes) memcpy(now, saved, bytes);
    return AMP_OK;
}

AMPI_CPU(read, amp_training* t AMPI_MAYBE) { return AMP_OK; }

AMPI_FN void ampi_cpu_abandon(amp_training* t, const amp_exec* exec AMPI_MAYBE) {
    ampi_scaler_close(&t->scaler);
}

#define AMPI_BOTH(op) amp_##op##_forward, amp_##op##_backward
/* The CPU's table, in the order of amp_backend. Most operators are the public functions. An entry
   of another name than its function, or NULL, stands in a comment. */
AMP_DEF const amp_backend* amp_cpu_backend(void) {
    static const amp_backend cpu = {
        "cpu", 0 /* asynchronous */, NULL /* open */, NULL /* close */,

        /* memory and inputs */
        ampi_alloc, ampi_free, NULL /* reaches */,
        ampi_cpu_zero, ampi_cpu_copy, ampi_cpu_copy /* copy_in */, ampi_cpu_copy /* copy_out */,
        ampi_cpu_convert /* upload */, ampi_cpu_convert /* download */, ampi_cpu_convert,
        ampi_cpu_load,

        /* operators */
        amp_gemm_workspace, amp_conv2d_workspace, amp_layer_norm_workspace,
        amp_attention_workspace,
        amp_gemm, AMPI_BOTH(linear), AMPI_BOTH(conv2d), AMPI_BOTH(conv_transpose2d),
        AMPI_BOTH(pool2d), AMPI_BOTH(batch_norm), AMPI_BOTH(layer_norm), AMPI_BOTH(rms_norm),
        AMPI_BOTH(activation), AMPI_BOTH(leaky_relu),
        AMPI_BOTH(softmax), ampi_cpu_dropout, amp_add_forward, AMPI_BOTH(mul), AMPI_BOTH(concat),
        AMPI_BOTH(embedding), AMPI_BOTH(attention), AMPI_BOTH(rope),
        AMPI_BOTH(softmax_cross_entropy), AMPI_BOTH(mse), AMPI_BOTH(bce_with_logits),
        ampi_mean_forward, ampi_mean_backward,

        /* training_open and so on */
        ampi_cpu_open, ampi_cpu_close, ampi_cpu_begin, NULL /* training_pass */, ampi_cpu_losses,
        ampi_cpu_check, ampi_cpu_agree, ampi_cpu_step, ampi_cpu_read, ampi_cpu_abandon,

        NULL /* record */, NULL /* record_end */,
        NULL /* linear_relu_forward */, NULL /* conv2d_relu_forward */
    };
    return &cpu;
}

/* >>impl-model  The graph: nodes are added by calls, then finalize chooses types, plans memory and
   fills it.
   Words. node: a layer, an input, a loss, or a cast that finalize adds. draft: the node that a
   call builds. arena: the memory of values, shared by those whose live ranges do not meet.
   visible: the type that a node's readers see. */

#define AMPI_NONE (-1)
#define AMPI_ALIGN 64u

/* A stretch of the arena in use from time `first` to `last`. Node i runs forward at time i,
   backward at 2*nodes-1-i. */
typedef struct ampi_live_range {
    size_t bytes;      /* 0 = not in use */
    size_t offset;     /* in the arena, in bytes */
    int first, last;
    struct ampi_live_range* home;  /* while planning: the node's live range of which this is a
                                      copy */
} ampi_live_range;

/* The live ranges of a node: its value, the value's gradient, what a custom operator saves.
   SUMMAND + j: what it adds to the gradient of input j, where another node has written that. */
enum { AMPI_LIVE_DATA, AMPI_LIVE_GRAD, AMPI_LIVE_SAVED, AMPI_LIVE_SUMMAND,
        AMPI_LIVE_RANGES = AMPI_LIVE_SUMMAND + AMP_MAX_OPERANDS };

/* A custom operator: a copy of what the caller gave, in one allocation. */
typedef struct ampi_custom {
    amp_custom_desc desc;
    char name[22];
    amp_rule rules[4];
    amp_custom_param params[AMP_MAX_OPERANDS];
    char param_names[AMP_MAX_OPERANDS][8];
} ampi_custom;
enum { AMPI_WEIGHT, AMPI_BIAS };  /* of params of amp's own operators */

/* A layer, or a cast that finalize has placed. */
typedef struct ampi_node {
    amp_layer layer;         /* what the user may see */
    const ampi_op_row* row;  /* of its operator */
    struct ampi_node *prev, *next;  /* in the order of execution: layers as built, a cast before its
                                       first reader */
    struct ampi_node* skip;  /* an earlier layer, see ampi_nth */
    int number;              /* in the order of building; AMPI_NONE for a cast */
    int time;                /* in the order of execution, see ampi_live_range */
    uint32_t tag;            /* in its value, see ampi_node_tag */
    struct ampi_node* inputs[AMP_MAX_OPERANDS];  /* as built */
    struct ampi_node* reads[AMP_MAX_OPERANDS];   /* whose memory it reads: behind flatten, or a
                                                     cast */
    int input_count;              /* of both */
    size_t features;              /* elements of its value at a position of a sample */
    int is_sequence;              /* 1 = a batch says how many positions, up to its layer's */
    size_t rows;                  /* of this pass: samples times positions */
    amp_dtype region_dtype, pin_dtype;  /* of the innermost region, and of amp_pin; 0 = none */
    int params[AMP_MAX_OPERANDS]; /* numbers of the parameters, weight before bias, or AMPI_NONE */
    int shares_params;       /* 1 = those of an earlier node, see amp_reuse */
    int adds_grads;          /* 1 = a later node has them, too, and has written their gradients */
    int group;               /* of the optimizer, for its parameters */
    int index;               /* running number of an input or a loss */
    int blamed;              /* 1 = the logger was told that inf or NaN began here */
    /* what the operator needs */
    amp_init init;           /* how its weights start */
    float sd;                /* of AMP_INIT_NORMAL; 0 = 0.02 */
    struct ampi_custom* custom;  /* NULL for amp's own operators */
    size_t fan_in, fan_out;  /* products in an element of its output, and of the input's gradient;
                                of a transposed convolution the other way round; of an embedding
                                its features and rows */
    amp_conv2d_shape conv;
    amp_pool2d_shape pool;
    amp_batch_norm_shape norm;   /* of a layer norm: eps */
    float p;                     /* dropout: the share of elements that become 0; leaky ReLU: the
                                    slope */
    float loss_weight, smoothing;
    size_t labels;               /* of a cross-entropy: in a row of logits, one a pixel */
    size_t classes;              /* likewise: those that count, of the logits of a label */
    int ignores;                 /* 1 = the label `ignored` does not count */
    int32_t ignored;
    float *running, *stats;      /* norms: means, then variances; running, and of the batch */
    void* target;                /* of a loss: labels or floats of the batch */
    float* constants;            /* inputs: of `reading`; a cross-entropy: weights of classes; on
                                    the host, NULL = none */
    size_t constant_count;
    amp_reading reading;         /* inputs: how they are read; its constants lie with the backend,
                                    as those of a loss do */
    /* what finalize finds */
    int leads;                   /* 1 = a GRAY operator may be LOW before it */
    int f32_bias;                /* 1 = a LOW product whose bias and result are FP32 */
    amp_dtype visible;           /* the type that rules of later layers see */
    amp_dtype wanted;            /* that in which all readers read; 0 = no reader */
    int users;                   /* how many reads[] name this node */
    int on_loss_path;            /* 1 = a loss or an output depends on it */
    int is_output;               /* its gradient comes from the caller, see amp_output */
    int keeps_grad;              /* see amp_retain_gradient */
    int needs_grad;              /* 1 = it has a parameter or keeps_grad, or depends on such */
    int wants_grad;              /* needs_grad, and one of them is not frozen in this step */
    int grad_written;            /* while planning: a reader has written its gradient */
    struct ampi_node* casts[3];  /* of its value to F32, F16, BF16; or NULL */
    struct ampi_node *data_root, *grad_root;  /* owners of the memory of value and gradient */
    ampi_live_range live[AMPI_LIVE_RANGES];
    void *data, *grad, *saved;   /* value, gradient, what a custom operator saves: in the arena */
    void* parts[AMP_MAX_OPERANDS]; /* its summands, by input; NULL = it writes that gradient
                                       itself */
} ampi_node;

/* One run over the graph. */
typedef struct ampi_pass {
    const amp_batch* batch;     /* `data`; NULL = it is the caller's again */
    amp_batch data;
    const amp_seeds* seeds;     /* of the caller, while amp_backward runs; or NULL */
    size_t samples;
    int has_lengths;            /* 1 = positions from data.lengths on do not count */
    size_t counted;             /* positions of all samples that do, where has_lengths is 1 */
    int training;
    int accumulate;             /* add to the weight gradients */
    float grad_factor;          /* 1 / (micro-batches * ranks) */
    int looking;                /* leave batch norm's running statistics alone */
    const ampi_node* only;      /* the loss that this backward pass is of; NULL = of all */
    amp_eval_info* told;        /* in which predictions are counted; or NULL */
    int64_t first;              /* evaluation: the batch's first sample in its data */
    amp_layer_stats* observed;  /* statistics of each layer; or NULL */
} ampi_pass;

/* One allocation of the model: in the backend's memory or, from AMPI_BLOCK_HOST on, on the host. */
typedef struct ampi_allocation {
    void* raw;     /* as allocated */
    char* base;    /* aligned; NULL while bytes are counted */
    size_t bytes;  /* from base on */
    size_t at;     /* where the next array begins */
} ampi_allocation;
enum {
    AMPI_BLOCK_ARENA,    /* values and their gradients */
    AMPI_BLOCK_MASTERS, AMPI_BLOCK_LOW, AMPI_BLOCK_GRADS, AMPI_BLOCK_MOMENTS,  /* of parameters */
    AMPI_BLOCK_RUNNING,  /* statistics of batch norms */
    AMPI_BLOCK_RUNNING_SAVED,  /* the same from before this step */
    AMPI_BLOCK_HELD,     /* see amp_batch_norm_shape */
    AMPI_BLOCK_WORKSPACE,
    AMPI_BLOCK_STEP,     /* statistics, targets and losses of a step */
    AMPI_BLOCK_HOST, AMPI_BLOCK_COUNT
};

struct amp_model {
    amp_model_desc desc;          /* the user's, with defaults; it points at copies */
    amp_policy policy;
    amp_comm comm;                /* size 1 = alone */
    amp_scaler_desc scaler_desc;  /* the copy of what desc.scaler pointed at */
    amp_param_group groups[AMP_MAX_GROUPS];  /* of what desc.optimizer.groups did */
    amp_optimizer_desc group_optimizers[AMP_MAX_GROUPS];  /* and of what those point at */
    const amp_backend* backend;
    amp_exec exec;                /* of every call of the backend */
    amp_logger op_logger;         /* keeps an operator's sentence and passes it on */
    char error[512];              /* the sentence of the last error */
    amp_result build_result;      /* the first mistake of the graph */
    amp_logger draft_logger;      /* for mistakes of the draft, see ampi_draft_refused */
    amp_exec draft_exec;          /* for operators that check the draft's shape */
    amp_dtype regions[AMP_MAX_REGIONS];  /* that are open, the innermost last */
    int region_count;
    ampi_node draft;              /* of the layer that is being built */
    ampi_node *first, *last;      /* in the order of execution */
    int layer_count, input_count, loss_count, output_count, param_count;
    unsigned op_counts[AMP_OP_COUNT];  /* layers of each operator */
    ampi_node *inputs[AMP_MAX_INPUTS], *losses[AMP_MAX_LOSSES], *outputs[AMP_MAX_OUTPUTS];
    ampi_allocation blocks[AMPI_BLOCK_COUNT];
    amp_param* params;            /* from here on what lies in them */
    amp_tensor* grad_list;        /* where each gradient lies; count is 0 while it is frozen */
    float* loss_values;           /* behind them two flags: a gradient, the loss is not finite */
    unsigned char* held;          /* of all batch norms, see amp_batch_norm_shape, on the host */
    float* rows;                  /* logits on the host, see ampi_rows_at_once */
    int32_t* lengths;             /* [desc.batch] of a batch's samples, if an input is a sequence;
                                     behind them see ampi_load_lengths */
    amp_training training;
    ampi_pass pass;               /* the current one */
    int stale;                    /* steps were made since `training` was last read */
    int stepped;                  /* a step was made */
    int finalized;
    int micro;                    /* micro-batches of the current step already done */
    int unsummed;                 /* sums over ranks began for gradients from this parameter on */
    int awaits_backward;          /* amp_forward was called */
    int own_scalers;              /* losses that have a scaler of their own: none, or all */
    amp_scaler loss_scalers[AMP_MAX_LOSSES];
    const ampi_node* overflowed;  /* the first such loss that overflowed in this step, or NULL */
    int holds_values, holds_grads; /* outputs, retained gradients: of the last pass, in the arena */
    int labels_known;             /* labels were looked at, see ampi_doubt_labels */
    int extra_known;              /* the logger knows of an array that nothing reads */
    int told_update;              /* bits: the logger knows of 1 overflows of the update,
                                     2 saturated copies, 4 held statistics */
    int saved;                    /* running statistics from before this step exist */
    char trouble[sizeof ((amp_step_info*)0)->message];  /* what went wrong in this step's forward
                                                           pass; or "" */
    const ampi_node* suspect;     /* where it did */
};

/* Of model m: each node; function f of the backend. */
#define AMPI_EACH_NODE(n) for (ampi_node* n = m->first; n; n = n->next)
#define ampi_run(f, ...) m->backend->f(__VA_ARGS__, &m->exec)
#define AMPI_RUN(...) AMPI_TRY(ampi_run(__VA_ARGS__))

/* --- errors --- */
AMPI_FN void ampi_model_remember(amp_result code, const char* sentence, void* user_data) {
    amp_model* m = (amp_model*)user_data;
    if (code != AMP_OK) AMPI_SAY(m->error, "%s", sentence);
    if (m->desc.logger.log) m->desc.logger.log(code, sentence, m->desc.logger.user_data);
}

/* In functions of model m: a failure told to its logger; AMPI_REFUSE_CALL with it; and in functions
   that return a value, the same about the draft, see ampi_draft_refused. */
#define ampi_model_fail(...) ampi_fail(&m->op_logger, __VA_ARGS__)
#define AMPI_REFUSE(...) AMPI_REFUSE_WITH(&m->op_logger, __VA_ARGS__)
#define AMPI_REFUSE_NULL(call, p) AMPI_REFUSE(!(p), AMP_ERR_ARGUMENT, call ": " #p " is NULL")
#define AMPI_REFUSE_LAYER(condition, ...) \
    do { if (condition) { ampi_fail(&m->draft_logger, \
        __VA_ARGS__); return ampi_no_value(); } } while (0)

AMP_DEF const char* amp_model_error(const amp_model* m) {
    return m ? m->error : "the model is NULL";
}

AMPI_FN int ampi_is_final(const amp_model* m) { return m && m->finalized; }

/* Can the model train: is it meant to, and has it a loss or an output? */
AMPI_FN int ampi_is_trainable(const amp_model* m) {
    return !m->desc.inference && m->loss_count + m->output_count > 0;
}

/* Refuses a model that is NULL or not finalized. */
AMPI_FN amp_result ampi_check_finalized(const amp_model* m, const char* what) {
    if (!m) return AMP_ERR_ARGUMENT;
    return m->finalized ? AMP_OK : ampi_model_fail(AMP_ERR_STATE, "%s: the model is not finalized",
        what);
}

/* Remembers and tells a mistake of the graph: nothing more is built, and finalize returns it. */
#define ampi_build_fail(...) ((void)(m->build_result = ampi_model_fail(__VA_ARGS__)))

/* Log function for the draft, whose first mistake is the graph's: puts before the sentence which
   operator on which input. */
AMPI_FN void ampi_draft_refused(amp_result code, const char* sentence, void* user_data) {
    amp_model* m = (amp_model*)user_data;
    const ampi_node* n = &m->draft;
    if (m->build_result != AMP_OK) return;
    if (n->input_count == 0) ampi_build_fail(code, "%s: %s", n->row->name, sentence);
    else
        ampi_build_fail(code, "%s %s '%s': %s", n->row->name,
            n->row->kind == AMPI_KIND_LOSS ? "on" : "after", n->layer.name, sentence);
}

/* What a call returns that added no layer. Calls that take it add none, and say nothing. */
AMPI_FN amp_value ampi_no_value(void) { amp_value v = { 0, 0 }; return v; }

/* --- memory --- */
AMPI_FN size_t ampi_align(size_t n) { return ampi_round_up(n, AMPI_ALIGN); }

/* Allocates the bytes that were counted for block `which`, zeroed and aligned to a cache line; no
   block for 0 bytes. */
AMPI_FN amp_result ampi_block_alloc(amp_model* m, int which) {
    const int on_host = which >= AMPI_BLOCK_HOST;
    ampi_allocation* b = &m->blocks[which];
    size_t room;  /* and the bytes that alignment may skip */
    b->bytes = b->at;
    b->at = 0;
    if (b->bytes == 0) return AMP_OK;

    AMPI_REFUSE(!ampi_add_size(b->bytes, AMPI_ALIGN, &room), AMP_ERR_MEMORY,
        "model: a block of %llu bytes does not fit memory", (ampi_ull)b->bytes);
    b->raw = (on_host ? ampi_alloc : m->backend->alloc)(room, &m->desc.allocator);
    AMPI_REFUSE(!b->raw, AMP_ERR_MEMORY, "model: out of memory, %llu bytes wanted", (ampi_ull)room);
    b->base = (char*)ampi_align64(b->raw);
    return on_host ? ampi_cpu_zero(b->base, b->bytes, NULL) : ampi_run(zero, b->base, b->bytes);
}

/* The next `bytes` of block `which`; NULL while sizes are counted. A sum beyond size_t becomes
   SIZE_MAX, which ampi_block_alloc refuses. */
AMPI_FN void* ampi_block_take(amp_model* m, int which, size_t bytes) {
    ampi_allocation* b = &m->blocks[which];
    void* p = b->base ? b->base + b->at : NULL;
    if (!ampi_add_size(b->at, ampi_align(bytes), &b->at)) b->at = SIZE_MAX;
    return p;
}

AMPI_FN float* ampi_floats_take(amp_model* m, int which, size_t count) {
    return (float*)ampi_block_take(m, which, count * sizeof(float));
}

/* --- life --- */
/* A name, and all functions: from `open` on the table has nothing else. */
AMPI_FN int ampi_backend_is_whole(const amp_backend* b) {
    typedef void (*function)(void);
    const function none = NULL;
    const char *theirs = (const char*)b, *cpu = (const char*)amp_cpu_backend();
    for (size_t at = offsetof(amp_backend, open); at + sizeof none <= sizeof *b; at += sizeof none)
        if (memcmp(cpu + at, &none, sizeof none) != 0
            && memcmp(theirs + at, &none, sizeof none) == 0) return 0;
    return b->name != NULL;
}

/* Refuses a desc of a model that is out of range or contradicts itself, and a policy that is not
   valid; else makes m->policy from the desc. */
AMPI_FN amp_result ampi_model_check_desc(amp_model* m) {
    const amp_model_desc* d = &m->desc;
    const amp_logger* logger = &m->op_logger;
    const amp_comm* c = d->comm;
    const int groups = d->optimizer.group_count;
    AMPI_REFUSE_DESC(d->batch < 1, "model: batch is %d, at least 1 is needed", d->batch);
    AMPI_REFUSE_DESC(!ampi_is_compute_dtype(d->grad_dtype),
        "model: grad_dtype is %s (%d), it must be f32, f16 or bf16", amp_dtype_name(d->grad_dtype),
        d->grad_dtype);
    AMPI_REFUSE_DESC(!ampi_is_compute_dtype(d->moment_dtype),
        "model: moment_dtype is %d, it must be f32, bf16 or f16", d->moment_dtype);
    AMPI_REFUSE_DESC(d->accumulate < 0 || d->max_replays < 0,
        "model: accumulate is %d and max_replays %d, none may be below 0", d->accumulate,
        d->max_replays);
    AMPI_REFUSE_DESC(d->max_replays > 0 && d->accumulate > 1,
        "model: max_replays needs accumulate = 1, whose batch is still there");
    AMPI_REFUSE_DESC(d->sums != AMP_SUMS_FIXED && d->sums != AMP_SUMS_FAST,
        "model: sums is %d, not AMP_SUMS_FIXED or AMP_SUMS_FAST", d->sums);
    AMPI_REFUSE_DESC(!ampi_backend_is_whole(m->backend),
        "model: backend lacks its name, or a function that the CPU's has");
    AMPI_REFUSE_DESC(c && (!c->all_reduce_sum || c->rank < 0 || c->rank >= c->size),
        "model: comm needs all_reduce_sum, size >= 1 and a rank below size");
    AMPI_REFUSE_DESC(c && !c->start != !c->wait, "model: comm has one of start and wait");
    AMPI_REFUSE_DESC(groups < 0 || groups > AMP_MAX_GROUPS || (groups > 0 && !d->optimizer.groups),
        "model: optimizer.group_count %d must lie in 0..%d, with groups given", groups,
        AMP_MAX_GROUPS);

    if (!d->policy) return amp_policy_init(&m->policy, &d->precision);
    m->policy = *d->policy;
    return ampi_policy_check(&m->policy, logger);
}

/* Makes an empty model of a valid desc. What the desc points at may be gone afterwards, so what is
   needed later is copied. */
AMP_DEF amp_result amp_model_create(amp_model** out, const amp_model_desc* desc) {
    const amp_logger* logger = desc ? &desc->logger : NULL;
    if (out) *out = NULL;
    AMPI_REFUSE_CALL(!out || !desc, AMP_ERR_ARGUMENT,
        "amp_model_create: out and desc must not be NULL");
    AMPI_REFUSE_DESC(!desc->allocator.alloc != !desc->allocator.free,
        "model: allocator needs both alloc and free, or neither");
    amp_model* m = (amp_model*)ampi_alloc(sizeof *m, &desc->allocator);
    AMPI_REFUSE_CALL(!m, AMP_ERR_MEMORY, "amp_model_create: out of memory");

    /* All parts speak through the model, which keeps their sentences. */
    AMPI_CLEAR(*m);
    amp_model_desc* d = &m->desc;
    *d = *desc;
    if (!d->logger.log) d->logger = ampi_default_logger;
    m->backend = desc->backend ? desc->backend : amp_cpu_backend();
    m->op_logger.log = ampi_model_remember;
    m->draft_logger.log = ampi_draft_refused;
    m->op_logger.user_data = m->draft_logger.user_data = m;
    m->exec.logger = d->precision.logger = d->optimizer.logger = &m->op_logger;
    m->exec.sums = desc->sums;
    m->draft_exec.logger = &m->draft_logger;

    amp_result r = ampi_model_check_desc(m);
    if (r == AMP_OK && m->backend->open)
        r = m->backend->open(&m->exec, desc->backend_desc, &desc->allocator);
    if (r != AMP_OK) { ampi_free(m, &desc->allocator); return r; }

    /* Copies of what the desc points at, and defaults. */
    m->comm.size = 1;
    if (d->comm) m->comm = *d->comm;
    if (d->scaler) { m->scaler_desc = *d->scaler; d->scaler = &m->scaler_desc; }
    for (int i = 0; i < d->optimizer.group_count; i++) {
        const amp_param_group* g = &d->optimizer.groups[i];
        m->groups[i] = *g;
        if (!g->optimizer) continue;
        m->group_optimizers[i] = *g->optimizer;
        m->groups[i].optimizer = &m->group_optimizers[i];
    }
    d->optimizer.groups = d->optimizer.group_count > 0 ? m->groups : NULL;
    if (d->accumulate == 0) d->accumulate = 1;
    *out = m;
    return AMP_OK;
}

/* Takes the model back to the graph as built: frees the blocks of memory and the casts. */
AMPI_FN void ampi_unfinalize(amp_model* m) {
    if (m->finalized && m->param_count) ampi_run(training_close, &m->training);

    for (int i = 0; i < AMPI_BLOCK_COUNT; i++)
        if (m->blocks[i].raw)
            (i < AMPI_BLOCK_HOST ? m->backend->free : ampi_free)(m->blocks[i].raw,
                &m->desc.allocator);
    AMPI_CLEAR(m->blocks);

    for (ampi_node *n = m->first, *next; n; n = next) {
        next = n->next;
        if (n->layer.op != AMPI_OP_CAST) continue;
        n->prev->next = next;  /* a cast has layers on both sides */
        next->prev = n->prev;
        ampi_free(n, &m->desc.allocator);
    }
}

/* Frees what finalize made, then the nodes, then the backend's context. */
AMP_DEF void amp_model_destroy(amp_model* m) {
    if (!m) return;
    const amp_allocator* a = &m->desc.allocator;

    ampi_unfinalize(m);
    for (ampi_node *n = m->first, *next; n; n = next) {
        next = n->next;
        ampi_free(n->constants, a);
        if (!n->shares_params) ampi_free(n->custom, a);
        ampi_free(n, a);
    }
    if (m->backend->close) m->backend->close(&m->exec, a);
    ampi_free(m, a);
}

/* --- building --- */
/* A value is its node's number, from 1, and tag, a hash (FNV-1a) of what leads to the node: by it
   the value of another model shows. */
/* That hash: of a node's operator, shape and inputs' tags. */
AMPI_FN uint32_t ampi_node_tag(const ampi_node* n) {
    const int own[] = { (int)n->layer.op, n->layer.channels, n->layer.height, n->layer.width,
        n->layer.positions };
    const size_t count = n->layer.positions > 1 ? 5 : 4;
    uint32_t inputs[AMP_MAX_OPERANDS + 2] = { 0 };  /* the last two carry the others up to the
                                                        tag */
    for (int i = 0; i < n->input_count; i++) inputs[i] = n->inputs[i]->tag;
    const uint64_t h = ampi_hash_words(AMPI_HASH_START, own, count);
    return (uint32_t)(ampi_hash_words(h, inputs, AMPI_LENGTH(inputs)) >> 32);
}

/* Layer i, or NULL if there is none: in a skip list, where each layer points to the one whose
   number lacks its lowest bit. */
AMPI_FN ampi_node* ampi_nth(const amp_model* m, int i) {
    ampi_node* n = i < 0 || i >= m->layer_count ? NULL : m->last;
    while (n && n->number != i) n = (n->number & (n->number - 1)) >= i ? n->skip : n->prev;
    return n;
}

/* The node of a value, or NULL if the value is not of this model. */
AMPI_FN ampi_node* ampi_find(const amp_model* m, amp_value v) {
    ampi_node* n = v.id < 1 ? NULL : ampi_nth(m, v.id - 1);
    return n && n->tag == v.tag ? n : NULL;
}

/* May a call of this name add to the graph? Not after a mistake or after finalize. */
AMPI_FN int ampi_can_build(amp_model* m, const char* what) {
    if (!m || m->build_result != AMP_OK) return 0;
    if (m->finalized)
        ampi_model_fail(AMP_ERR_STATE, "%s: the model is finalized, nothing can be added", what);
    return !m->finalized;
}

/* The node of a value, or NULL when the graph has a mistake; a foreign handle is one. */
AMPI_FN ampi_node* ampi_node_of(amp_model* m, amp_value v, const char* what) {
    if (!ampi_can_build(m, what)) return NULL;
    ampi_node* n = ampi_find(m, v);
    if (!n) ampi_build_fail(AMP_ERR_ARGUMENT, "%s: value %d is not one of this model", what, v.id);
    return n;
}

AMPI_FN int ampi_is_loss(const ampi_node* n) { return n->row->kind == AMPI_KIND_LOSS; }
AMPI_FN amp_dtype ampi_stored(const ampi_node* n) { return n->layer.storage_dtype; }

/* A node's output, and the gradient of it. */
AMPI_FN amp_ref ampi_output_of(const ampi_node* n) { return amp_ref_of(n->data, ampi_stored(n)); }
AMPI_FN amp_ref ampi_gradient_of(const ampi_node* n) { return amp_ref_of(n->grad, ampi_stored(n)); }
AMPI_FN int ampi_is_norm(const ampi_node* n) { return n->row->kind == AMPI_KIND_NORM; }
#define ampi_is(n, op_name) ((n)->layer.op == AMP_OP_##op_name)

/* Is n a norm of rows? */
AMPI_FN int ampi_norms_rows(const ampi_node* n) {
    return ampi_is(n, LAYER_NORM) || ampi_is(n, RMS_NORM);
}

AMPI_FN int ampi_is_tokens(const ampi_node* n) { return ampi_stored(n) == AMP_I32; }

/* Has it a weight of rank 2, [fan_out, fan_in]? */
AMPI_FN int ampi_is_dense(const ampi_node* n) {
    return ampi_is(n, LINEAR) || ampi_is(n, EMBEDDING) || ampi_is(n, POSITION_EMBEDDING);
}

/* Behind flatten: the node that owns the memory. */
AMPI_FN ampi_node* ampi_source(ampi_node* n) {
    while (ampi_is(n, FLATTEN)) n = n->inputs[0];
    return n;
}

/* Sets the shape of a node's output. */
AMPI_FN void ampi_set_shape(ampi_node* n, int c, int h, int w) {
    n->layer.channels = c;
    n->layer.height = h;
    n->layer.width = w;
}

/* The draft of a node on `in` or NULL, whose shape and, for messages, name the draft takes. */
AMPI_FN ampi_node* ampi_draft(amp_model* m, amp_op op, ampi_node* in) {
    ampi_node* n = &m->draft;
    AMPI_CLEAR(*n);
    n->row = ampi_op_row_of(op);
    n->layer.op = op;
    n->number = AMPI_NONE;
    for (int k = 0; k < AMP_MAX_OPERANDS; k++) n->params[k] = AMPI_NONE;
    n->layer.positions = 1;
    if (!in) return n;
    ampi_set_shape(n, in->layer.channels, in->layer.height, in->layer.width);
    n->layer.positions = in->layer.positions;
    n->is_sequence = in->is_sequence;
    n->features = in->features;
    memcpy(n->layer.name, in->layer.name, sizeof n->layer.name);
    n->inputs[n->input_count++] = in;
    return n;
}

/* Operators that know neighbours or channels of an image, and no positions. */
AMPI_FN int ampi_is_for_images(const ampi_node* n) {
    return ampi_is(n, CONV2D) || ampi_is(n, CONV_TRANSPOSE2D) || ampi_is(n, MAX_POOL2D)
           || ampi_is(n, AVG_POOL2D) || ampi_is(n, UPSAMPLE) || ampi_is(n, BATCH_NORM);
}

/* The draft of a layer on x, or NULL if the graph has a mistake. */
AMPI_FN ampi_node* ampi_draft_on(amp_model* m, amp_op op, amp_value x) {
    ampi_node* in = ampi_node_of(m, x, amp_op_name(op));
    if (!in) return NULL;
    ampi_node* n = ampi_draft(m, op, in);
    if (!ampi_is_for_images(n) || n->layer.positions == 1) return n;
    ampi_fail(&m->draft_logger, AMP_ERR_SHAPE, "it is for images, not for %d positions",
        n->layer.positions);
    return NULL;
}

/* Declares n as that draft, or returns no value. */
#define AMPI_DRAFT(n, op, x) \
    ampi_node* n = ampi_draft_on(m, op, x); \
    if (!n) return ampi_no_value()
#define AMPI_REFUSE_NULL_DESC(d) AMPI_REFUSE_LAYER(!(d), AMP_ERR_DESC, "the desc is NULL")

/* Records a mistake of the draft if its number `what`, *x, is negative, not finite or above
   `limit`; building goes on, and finalize returns the mistake. */
AMPI_FN void ampi_draft_range(amp_model* m, const char* what, const float* x, float limit) {
    if (!ampi_in_range(x, 0.0f, limit))
        ampi_fail(&m->draft_logger, AMP_ERR_DESC, limit < 1.0f ? "%s %g must lie in [0,1)"
            : "%s %g must be finite and not negative", what, (double)*x);
}

/* The draft as a node of its own; NULL without memory. */
AMPI_FN ampi_node* ampi_node_new(amp_model* m) {
    ampi_node* n = (ampi_node*)ampi_alloc(sizeof *n, &m->desc.allocator);
    if (n) *n = m->draft;
    else ampi_model_fail(AMP_ERR_MEMORY, "model: out of memory for a layer");
    return n;
}

/* Can a value have this shape, at each of so many positions? Its elements are an int, and those of
   a whole batch a size_t, even at 64 bytes each: sums of what a model keeps of them do not wrap. */
AMPI_FN int ampi_shape_fits(const amp_model* m, int positions, int c, int h, int w) {
    const double elements = (double)c * h * w * positions;
    return positions >= 1 && c >= 1 && h >= 1 && w >= 1 && elements <= INT32_MAX
        && elements * m->desc.batch < (double)(SIZE_MAX / 64);
}

/* A layer's shape as text, with its positions in front if it has several. */
enum { AMPI_SHAPE_TEXT = 48 };
AMPI_FN const char* ampi_shape_text(const amp_layer* l, char out[AMPI_SHAPE_TEXT]) {
    size_t length = 0;
    if (l->positions > 1) length = ampi_say(out, AMPI_SHAPE_TEXT, "%dx", l->positions);
    ampi_say(out + length, AMPI_SHAPE_TEXT - length, "%dx%dx%d", l->channels, l->height, l->width);
    return out;
}

/* Makes the draft a layer of the graph, in the innermost region and with a name: "conv2d3" is the
   third convolution. No value after a mistake, an earlier one of this draft too. */
AMPI_FN amp_value ampi_layer_add(amp_model* m) {
    ampi_node* n = &m->draft;
    amp_layer* l = &n->layer;
    char shape[AMPI_SHAPE_TEXT];
    if (m->build_result != AMP_OK) return ampi_no_value();
    for (int i = 0; i < n->input_count; i++) {
        AMPI_REFUSE_LAYER(ampi_is_loss(n->inputs[i]), AMP_ERR_SHAPE,
            "nothing can be built on a loss");
        const int tokens = ampi_is_tokens(n->inputs[i]);
        AMPI_REFUSE_LAYER(tokens != ampi_is(n, EMBEDDING), AMP_ERR_SHAPE, "'%s' has %s",
            n->inputs[i]->layer.name, tokens ? "tokens, which only an embedding reads"
            : "no tokens, as an embedding reads");
    }
    AMPI_REFUSE_LAYER(!ampi_shape_fits(m, l->positions, l->channels, l->height, l->width),
        AMP_ERR_SHAPE, "its output %s is too large", ampi_shape_text(l, shape));

    if (m->region_count) n->region_dtype = m->regions[m->region_count - 1];
    n->features = (size_t)l->channels * (size_t)l->height * (size_t)l->width;
    n->tag = ampi_node_tag(n);
    AMPI_SAY(l->name, "%.21s%u", n->custom ? n->custom->name : n->row->name,
        ++m->op_counts[l->op]);
    n->number = m->layer_count;
    n->skip = ampi_nth(m, n->number & (n->number - 1));
    n->prev = m->last;

    ampi_node* added = ampi_node_new(m);
    if (!added) { m->build_result = AMP_ERR_MEMORY; return ampi_no_value(); }
    if (m->last) m->last->next = added;
    else m->first = added;
    m->last = added;
    const amp_value v = { ++m->layer_count, n->tag };
    return v;
}

/* Adds the draft as a layer with a weight and, unless no_bias, a bias; sd 0: the init's. */
AMPI_FN amp_value ampi_layer_add_params(amp_model* m, int no_bias, amp_init init, float sd,
        size_t fan_in, size_t fan_out) {
    ampi_node* n = &m->draft;
    AMPI_REFUSE_LAYER((unsigned)init > AMP_INIT_NORMAL, AMP_ERR_DESC, "init %d does not exist",
        init);
    AMPI_REFUSE_LAYER(sd != 0.0f && init != AMP_INIT_NORMAL, AMP_ERR_DESC,
        "sd %g is for AMP_INIT_NORMAL only", (double)sd);
    ampi_draft_range(m, "sd", &sd, AMPI_FLT_MAX);
    n->sd = sd;
    n->params[AMPI_WEIGHT] = m->param_count++;
    if (!no_bias) n->params[AMPI_BIAS] = m->param_count++;
    n->init = init;
    n->fan_in = fan_in;
    n->fan_out = fan_out;
    return ampi_layer_add(m);
}

/* Room for n constants of the draft, which its node frees; NULL without memory. */
AMPI_FN float* ampi_constants_new(amp_model* m, size_t n) {
    m->draft.constants = (float*)ampi_alloc(n * sizeof(float), &m->desc.allocator);
    m->draft.constant_count = n;
    if (!m->draft.constants) ampi_fail(&m->draft_logger, AMP_ERR_MEMORY, "out of memory");
    return m->draft.constants;
}

/* Keeps the constants of the draft, an input, on the host: the mean of each channel, then the std
   of each, 0 and 1 where d has none. If they are not valid, ampi_layer_add adds nothing, and the
   caller frees them. */
AMPI_FN amp_result ampi_keep_constants(amp_model* m, const amp_input_desc* d) {
    const amp_logger* logger = &m->draft_logger;
    const size_t channels = (size_t)d->channels;
    if (!d->mean && !d->std) return AMP_OK;

    float* constants = ampi_constants_new(m, 2 * channels);
    if (!constants) return AMP_ERR_MEMORY;
    for (size_t c = 0; c < channels; c++) {
        const float mean = d->mean ? d->mean[c] : 0.0f, std = d->std ? d->std[c] : 1.0f;
        AMPI_REFUSE_DESC(!ampi_has_finite_bits(&mean) || std == 0.0f
            || !ampi_in_range(&std, 0.0f, AMPI_FLT_MAX),
            "mean and std of channel %d must be finite, and std above 0", (int)c);
        constants[c] = mean;
        constants[channels + c] = std;
    }
    return AMP_OK;
}

/* Adds the draft, an input. */
AMPI_FN amp_value ampi_input_add(amp_model* m) {
    ampi_node* n = &m->draft;
    AMPI_REFUSE_LAYER(m->input_count == AMP_MAX_INPUTS, AMP_ERR_SHAPE,
        "a model has at most %d inputs", AMP_MAX_INPUTS);
    n->index = m->input_count;
    const amp_value v = ampi_layer_add(m);
    if (v.id) m->inputs[m->input_count++] = m->last;
    else ampi_free(n->constants, &m->desc.allocator);
    return v;
}

/* Adds a sequence of tokens, one element at a position. */
AMP_DEF amp_value amp_tokens(amp_model* m, int positions) {
    if (!ampi_can_build(m, "tokens")) return ampi_no_value();
    ampi_node* n = ampi_draft(m, AMP_OP_INPUT, NULL);
    AMPI_REFUSE_LAYER(!ampi_shape_fits(m, positions, 1, 1, 1), AMP_ERR_SHAPE,
        "tokens at %d positions for a batch of %d are not a size that can be had", positions,
        m->desc.batch);
    ampi_set_shape(n, 1, 1, 1);
    n->layer.positions = positions;
    n->is_sequence = positions > 1;
    n->layer.storage_dtype = AMP_I32;
    return ampi_input_add(m);
}

/* Adds an input, if its sizes, scale, mean and std are valid. */
AMP_DEF amp_value amp_input_with(amp_model* m, const amp_input_desc* d) {
    if (!ampi_can_build(m, "input")) return ampi_no_value();
    ampi_node* n = ampi_draft(m, AMP_OP_INPUT, NULL);
    AMPI_REFUSE_NULL_DESC(d);
    const int positions = d->positions ? d->positions : 1;
    AMPI_REFUSE_LAYER(!ampi_shape_fits(m, positions, d->channels, d->height, d->width),
        AMP_ERR_SHAPE,
        "%d x %d x %d at %d positions for a batch of %d is not a size that can be had", d->channels,
        d->height, d->width, positions, m->desc.batch);

    ampi_set_shape(n, d->channels, d->height, d->width);
    n->layer.positions = positions;
    n->is_sequence = positions > 1;
    n->reading.channels = (size_t)d->channels;
    n->reading.pixels = (size_t)d->height * (size_t)d->width;
    n->reading.scale = d->scale;
    ampi_draft_range(m, "scale", &d->scale, AMPI_FLT_MAX);
    ampi_keep_constants(m, d);
    return ampi_input_add(m);
}

AMP_DEF amp_value amp_input(amp_model* m, int channels, int height, int width) {
    const amp_input_desc d = { channels, height, width, 0.0f, NULL, NULL, 0 };
    return amp_input_with(m, &d);
}

#define AMPI_UNARY(OP, name) AMP_DEF amp_value amp_##name(amp_model* m, amp_value x) { \
    return ampi_draft_on(m, AMP_OP_##OP, x) ? ampi_layer_add(m) : ampi_no_value(); }
#define AMPI_X(NAME, name, ...) AMPI_UNARY(NAME, name)
AMP_ACTIVATION_LIST(AMPI_X)
#undef AMPI_X
AMPI_UNARY(SOFTMAX, softmax)

/* Adds a layer with a number p, which is at least 0; refuses one above `limit`. */
AMPI_FN amp_value ampi_unary_with(amp_model* m, amp_op op, amp_value x, const char* what, float p,
        float limit) {
    AMPI_DRAFT(n, op, x);
    ampi_draft_range(m, what, &p, limit);
    n->p = p;
    return ampi_layer_add(m);
}

AMP_DEF amp_value amp_dropout(amp_model* m, amp_value x, float p) {
    return ampi_unary_with(m, AMP_OP_DROPOUT, x, "probability", p, AMPI_BELOW_ONE);
}

AMP_DEF amp_value amp_leaky_relu(amp_model* m, amp_value x, float slope) {
    return ampi_unary_with(m, AMP_OP_LEAKY_RELU, x, "slope", slope, AMPI_FLT_MAX);
}

/* Adds a view of x as rows; it never runs, its readers read x. */
AMP_DEF amp_value amp_flatten(amp_model* m, amp_value x) {
    AMPI_DRAFT(n, AMP_OP_FLATTEN, x);
    ampi_set_shape(n, (int)n->features, 1, 1);
    return ampi_layer_add(m);
}

/* Adds a dense layer over all features of x. */
AMP_DEF amp_value amp_linear_with(amp_model* m, amp_value x, const amp_linear_desc* d) {
    AMPI_DRAFT(n, AMP_OP_LINEAR, x);
    AMPI_REFUSE_NULL_DESC(d);
    AMPI_REFUSE_LAYER(!ampi_shape_fits(m, 1, d->out_features, 1, 1)
        || n->features > SIZE_MAX / 64 / (size_t)d->out_features, AMP_ERR_DESC,
        "%d outputs from %llu inputs is not a size that can be had", d->out_features,
        (ampi_ull)n->features);
    ampi_set_shape(n, d->out_features, 1, 1);
    return ampi_layer_add_params(m, d->no_bias, d->init, d->sd, n->features,
        (size_t)d->out_features);
}

AMP_DEF amp_value amp_linear(amp_model* m, amp_value x, int out_features) {
    const amp_linear_desc d = { out_features, 0, AMP_INIT_TORCH, 0.0f };
    return amp_linear_with(m, x, &d);
}

/* Adds the draft, an embedding of that many rows; Torch's begins as a normal one of sd 1. */
AMPI_FN amp_value ampi_embedding_add(amp_model* m, const amp_embedding_desc* d, int rows) {
    ampi_node* n = &m->draft;
    const int is_torch = d->init == AMP_INIT_TORCH && d->sd == 0.0f;
    const size_t features = (size_t)n->layer.channels * (size_t)n->layer.height
        * (size_t)n->layer.width;
    AMPI_REFUSE_LAYER(!ampi_shape_fits(m, rows, n->layer.channels, n->layer.height,
        n->layer.width), AMP_ERR_DESC, "%d rows of %d features are not a size that can be had",
        rows, n->layer.channels);
    return ampi_layer_add_params(m, 1 /* no bias */, is_torch ? AMP_INIT_NORMAL : d->init,
        is_torch ? 1.0f : d->sd, features, (size_t)rows);
}

/* Adds an embedding, if x are tokens. */
AMP_DEF amp_value amp_embedding_with(amp_model* m, amp_value tokens, const amp_embedding_desc* d) {
    AMPI_DRAFT(n, AMP_OP_EMBEDDING, tokens);
    AMPI_REFUSE_NULL_DESC(d);
    ampi_set_shape(n, d->features, 1, 1);
    return ampi_embedding_add(m, d, d->vocabulary);
}

AMP_DEF amp_value amp_embedding(amp_model* m, amp_value tokens, int vocabulary, int features) {
    const amp_embedding_desc d = { vocabulary, features, AMP_INIT_TORCH, 0.0f };
    return amp_embedding_with(m, tokens, &d);
}

/* Adds an embedding whose rows are positions. */
AMP_DEF amp_value amp_position_embedding_with(amp_model* m, amp_value x,
        const amp_embedding_desc* desc) {
    const amp_embedding_desc defaults = { 0, 0, AMP_INIT_TORCH, 0.0f }, *d = desc ? desc
        : &defaults;
    AMPI_DRAFT(n, AMP_OP_POSITION_EMBEDDING, x);
    AMPI_REFUSE_LAYER((d->vocabulary && d->vocabulary != n->layer.positions)
        || (d->features && (size_t)d->features != n->features), AMP_ERR_DESC,
        "its weight is %dx%llu, not %dx%d", n->layer.positions, (ampi_ull)n->features,
        d->vocabulary, d->features);
    return ampi_embedding_add(m, d, n->layer.positions);
}

AMP_DEF amp_value amp_position_embedding(amp_model* m, amp_value x) {
    return amp_position_embedding_with(m, x, NULL);
}

/* The first of two fields that is not 0, or the value that 0 stands for. */
AMPI_FN int ampi_first_set(int field, int general, int fallback) {
    return field ? field : general ? general : fallback;
}

/* A field of desc d for both axes, height and width: `field`_h and `field`_w where they are set,
   else `field`, else h and w. */
#define AMPI_SIDES(field, h, w) \
    ampi_first_set(d->field##_h, d->field, h), ampi_first_set(d->field##_w, d->field, w)

/* Adds a convolution or a transposed one, if its shape is valid: a refusal of that becomes the
   graph's. */
AMPI_FN amp_value ampi_convolution_add(amp_model* m, amp_op op, amp_value x,
        const amp_conv2d_desc* d) {
    const int transposed = op == AMP_OP_CONV_TRANSPOSE2D;
    AMPI_DRAFT(n, op, x);
    AMPI_REFUSE_NULL_DESC(d);
    const amp_conv2d_shape s = {
        m->desc.batch, n->layer.channels, n->layer.height, n->layer.width,  /* of x */
        d->out_channels, AMPI_SIDES(kernel, 0, 0), AMPI_SIDES(stride, 1, 1),
        AMPI_SIDES(pad, 0, 0), AMPI_SIDES(dilation, 1, 1), d->groups ? d->groups : 1,
        d->pad_end_h, d->pad_end_w, AMPI_SIDES(output_pad, 0, 0)
    };
    if ((transposed ? amp_conv_transpose2d_output : amp_conv2d_output)(&s, &n->layer.height,
        &n->layer.width, &m->draft_exec) != AMP_OK) return ampi_no_value();
    n->conv = s;
    n->layer.channels = s.out_channels;
    const size_t area = (size_t)s.kernel_h * (size_t)s.kernel_w,
        in = (size_t)(s.channels / s.groups) * area,
        out = (size_t)(s.out_channels / s.groups) * area;
    return ampi_layer_add_params(m, d->no_bias, d->init, 0.0f, transposed ? out : in,
        transposed ? in : out);
}

/* Adds one with square windows, one group and a bias. */
AMPI_FN amp_value ampi_plain_convolution(amp_model* m, amp_op op, amp_value x, int out_channels,
        int kernel, int stride, int pad) {
    amp_conv2d_desc d;
    AMPI_CLEAR(d);
    d.out_channels = out_channels;
    d.kernel = kernel;
    d.stride = stride;
    d.pad = pad;
    return ampi_convolution_add(m, op, x, &d);
}

#define AMPI_CONVOLUTION(OP, name) \
    AMP_DEF amp_value name##_with(amp_model* m, amp_value x, const amp_conv2d_desc* d) { \
        return ampi_convolution_add(m, AMP_OP_##OP, x, d); } \
    AMP_DEF amp_value name(amp_model* m, amp_value x, int out_channels, int kernel, int stride, \
            int pad) { \
        return ampi_plain_convolution(m, AMP_OP_##OP, x, out_channels, kernel, stride, pad); }
AMPI_CONVOLUTION(CONV2D, amp_conv2d)
AMPI_CONVOLUTION(CONV_TRANSPOSE2D, amp_conv_transpose2d)

/* Adds a pool, if its shape is valid: a refusal of amp_pool2d_output becomes the graph's. */
AMP_DEF amp_value amp_pool2d_with(amp_model* m, amp_value x, const amp_pool2d_desc* d) {
    const int sums = d && (d->kind == AMP_POOL_AVERAGE || d->kind == AMP_POOL_SUM);
    AMPI_DRAFT(n, sums ? AMP_OP_AVG_POOL2D : AMP_OP_MAX_POOL2D, x);
    AMPI_REFUSE_NULL_DESC(d);
    const int kernel[] = { AMPI_SIDES(kernel, 0, 0) };
    const amp_pool2d_shape s = {
        d->kind, m->desc.batch, n->layer.channels, n->layer.height, n->layer.width,  /* of x */
        kernel[0], kernel[1], AMPI_SIDES(stride, kernel[0], kernel[1]), AMPI_SIDES(pad, 0, 0),
        d->exclude_pad, d->pad_end_h, d->pad_end_w
    };
    n->pool = s;
    amp_pool2d_output(&s, &n->layer.height, &n->layer.width, &m->draft_exec);
    return ampi_layer_add(m);
}

/* Adds a pool with the kernel as stride and without padding. */
AMPI_FN amp_value ampi_plain_pool(amp_model* m, amp_value x, amp_pool kind, int kernel_h,
        int kernel_w) {
    amp_pool2d_desc d;
    AMPI_CLEAR(d);
    d.kind = kind;
    d.kernel_h = kernel_h;
    d.kernel_w = kernel_w;
    return amp_pool2d_with(m, x, &d);
}

AMP_DEF amp_value amp_max_pool2d(amp_model* m, amp_value x, int kernel) {
    return ampi_plain_pool(m, x, AMP_POOL_MAX, kernel, kernel);
}

AMP_DEF amp_value amp_avg_pool2d(amp_model* m, amp_value x, int kernel) {
    return ampi_plain_pool(m, x, AMP_POOL_AVERAGE, kernel, kernel);
}

/* Adds a pool whose window is the whole image. */
AMP_DEF amp_value amp_global_avg_pool2d(amp_model* m, amp_value x) {
    const ampi_node* in = ampi_node_of(m, x, "global_avg_pool2d");
    return in ? ampi_plain_pool(m, x, AMP_POOL_AVERAGE, in->layer.height, in->layer.width)
        : ampi_no_value();
}

/* Adds a nearest upsampling, if its shape is valid as that of the pool whose gradient it is. */
AMP_DEF amp_value amp_upsample(amp_model* m, amp_value x, int factor) {
    AMPI_DRAFT(n, AMP_OP_UPSAMPLE, x);
    amp_layer* l = &n->layer;
    AMPI_REFUSE_LAYER(factor < 1 || factor > INT32_MAX / ampi_max_int(l->height, l->width),
        AMP_ERR_DESC, "factor %d of %dx%d pixels is not one that can be had", factor, l->height,
        l->width);
    ampi_set_shape(n, l->channels, l->height * factor, l->width * factor);
    const amp_pool2d_shape s = { AMP_POOL_SUM, m->desc.batch, l->channels, l->height, l->width,
        factor, factor, 0, 0, 0, 0, 0, 0, 0 };
    n->pool = s;
    amp_pool2d_output(&s, NULL, NULL, &m->draft_exec);
    return ampi_layer_add(m);
}

/* Adds a batch norm over channels, or a layer norm or RMS norm over all features; desc NULL: all
   defaults. */
AMPI_FN amp_value ampi_norm(amp_model* m, amp_op op, amp_value x, const amp_norm_desc* desc) {
    const amp_norm_desc defaults = { 0.0f, 0.0f, 0 }, *d = desc ? desc : &defaults;
    AMPI_DRAFT(n, op, x);
    const amp_batch_norm_shape s = { m->desc.batch, n->layer.channels,
        n->layer.height * n->layer.width, d->eps, d->momentum, d->frozen != 0, NULL };
    ampi_draft_range(m, "eps", &d->eps, AMPI_BELOW_ONE);
    AMPI_REFUSE_LAYER(!ampi_is_off(&d->momentum) && !ampi_in_range(&d->momentum, 0.0f, 1.0f),
        AMP_ERR_DESC, "momentum %g must lie in [0,1], or be AMP_ZERO", (double)d->momentum);
    n->norm = s;
    /* gamma and beta start as 1 and 0 */
    return ampi_layer_add_params(m, op == AMP_OP_RMS_NORM, AMP_INIT_ZERO, 0.0f, 1, 1);
}

/* Adds a sum or product of x and y, whose shapes are equal; a product with one value of y a
   channel; or a concat, where the channels of y follow those of x. */
AMPI_FN amp_value ampi_pair(amp_model* m, amp_op op, amp_value x, amp_value y) {
    ampi_node *n = ampi_draft_on(m, op, x), *second = ampi_node_of(m, y, amp_op_name(op));
    if (!n || !second) return ampi_no_value();
    amp_layer *a = &n->layer, *b = &second->layer;
    char left[AMPI_SHAPE_TEXT], right[AMPI_SHAPE_TEXT];
    const int fits = op == AMP_OP_CONCAT ? a->channels <= INT32_MAX - b->channels
        : a->channels == b->channels;
    const int meet = (a->height == b->height && a->width == b->width)
        || (op == AMP_OP_MUL && b->height == 1 && b->width == 1);
    AMPI_REFUSE_LAYER(!fits || !meet || a->positions != b->positions, AMP_ERR_SHAPE,
        "%s does not fit %s of '%s'", ampi_shape_text(a, left), ampi_shape_text(b, right), b->name);
    AMPI_REFUSE_LAYER(n->is_sequence != second->is_sequence, AMP_ERR_SHAPE,
        "of this and '%s' only one has the positions of a batch", b->name);
    if (op == AMP_OP_CONCAT) a->channels += b->channels;
    n->inputs[n->input_count++] = second;
    return ampi_layer_add(m);
}

AMP_DEF amp_value amp_add(amp_model* m, amp_value a, amp_value b) {
    return ampi_pair(m, AMP_OP_ADD, a, b);
}

AMP_DEF amp_value amp_mul(amp_model* m, amp_value a, amp_value b) {
    return ampi_pair(m, AMP_OP_MUL, a, b);
}

AMP_DEF amp_value amp_concat(amp_model* m, amp_value a, amp_value b) {
    return ampi_pair(m, AMP_OP_CONCAT, a, b);
}

/* A label that no row with a loss has. */
enum { AMPI_NO_LABEL = -0x7fffffff };

/* Gives the draft, a cross-entropy over its channels, the labels of d: how many, which one does not
   count, and copies of the classes' weights. */
AMPI_FN amp_result ampi_keep_labels(amp_model* m, const amp_loss_desc* d) {
    const amp_logger* logger = &m->draft_logger;
    ampi_node* n = &m->draft;
    const int all = n->layer.channels, count = d->classes ? d->classes : all;
    const size_t classes = (size_t)count;
    n->labels = (size_t)n->layer.height * (size_t)n->layer.width;
    n->ignores = d->ignored != NULL;
    n->ignored = d->ignored ? *d->ignored : AMPI_NO_LABEL;
    AMPI_REFUSE_DESC(count < 1 || count > all, "classes is %d, it must lie in 1..%d", count, all);
    AMPI_REFUSE_DESC(count < all && n->labels > 1, "classes is %d, but maps have all %d", count,
        all);
    n->classes = classes;
    if (!d->class_weights) return AMP_OK;

    if (!ampi_constants_new(m, classes)) return AMP_ERR_MEMORY;
    memcpy(n->constants, d->class_weights, classes * sizeof(float));
    for (size_t c = 0; c < classes; c++)
        AMPI_REFUSE_DESC(!ampi_in_range(&n->constants[c], 0.0f, AMPI_FLT_MAX),
            "weight %g of class %d must be finite and not negative", (double)n->constants[c],
            (int)c);
    return AMP_OK;
}

/* Adds a loss over x, one number for the batch; desc NULL: weight 1, no smoothing. */
AMPI_FN amp_value ampi_loss_add(amp_model* m, amp_op op, amp_value x, const amp_loss_desc* desc) {
    const amp_loss_desc defaults = { 0.0f, 0.0f, NULL, NULL, NULL, 0 };
    const amp_loss_desc* d = desc ? desc : &defaults;
    const int has_labels = op == AMP_OP_SOFTMAX_CROSS_ENTROPY;
    AMPI_DRAFT(n, op, x);
    AMPI_REFUSE_LAYER(m->loss_count == AMP_MAX_LOSSES, AMP_ERR_SHAPE,
        "a model has at most %d losses", AMP_MAX_LOSSES);
    ampi_draft_range(m, "smoothing", &d->smoothing, AMPI_BELOW_ONE);
    AMPI_REFUSE_LAYER(!has_labels && d->smoothing != 0.0f, AMP_ERR_DESC,
        "smoothing %g is for softmax_cross_entropy only", (double)d->smoothing);
    AMPI_REFUSE_LAYER(!has_labels && (d->ignored || d->class_weights || d->classes), AMP_ERR_DESC,
        "ignored, class_weights and classes are for softmax_cross_entropy only");
    ampi_draft_range(m, "weight", &d->weight, AMPI_FLT_MAX);
    if (d->scaler) {
        amp_scaler* s = &m->loss_scalers[m->loss_count];
        amp_scaler_desc own = *d->scaler;
        own.logger = &m->draft_logger;
        if (amp_scaler_init(s, &own) != AMP_OK) return ampi_no_value();
        s->logger = m->op_logger;
    }
    if (has_labels) ampi_keep_labels(m, d);

    ampi_set_shape(n, 1, 1, 1);
    n->layer.positions = 1;
    n->index = m->loss_count;
    n->loss_weight = d->weight == 0.0f ? 1.0f : d->weight;
    n->smoothing = d->smoothing;
    const amp_value v = ampi_layer_add(m);
    if (v.id) {
        m->losses[m->loss_count++] = m->last;
        m->own_scalers += d->scaler != NULL;
    } else ampi_free(n->constants, &m->desc.allocator);
    return v;
}

/* Adds the draft, whose parameters are an earlier layer's: the backward pass comes to it first. */
AMPI_FN amp_value ampi_layer_add_sharing(amp_model* m) {
    m->draft.shares_params = 1;
    AMPI_EACH_NODE(each) each->adds_grads |= each->params[0] == m->draft.params[0];
    return ampi_layer_add(m);
}

/* A layer's draft once more, on another input. What is of one layer alone begins anew. */
AMP_DEF amp_value amp_reuse(amp_model* m, amp_value v, amp_value x) {
    ampi_node *of = ampi_node_of(m, v, "reuse"), *in = ampi_node_of(m, x, "reuse");
    if (!of || !in) return ampi_no_value();
    ampi_node* n = ampi_draft(m, of->layer.op, in);
    const amp_layer *a = &in->layer, *b = of->inputs[0] ? &of->inputs[0]->layer : a;
    const int keeps_positions = of->layer.positions == b->positions;
    char left[AMPI_SHAPE_TEXT], right[AMPI_SHAPE_TEXT];
    AMPI_REFUSE_LAYER(of->params[0] == AMPI_NONE || ampi_is(of, BATCH_NORM) || of->input_count > 1,
        AMP_ERR_ARGUMENT, "'%s' is no layer that can be used again", of->layer.name);
    AMPI_REFUSE_LAYER(a->channels != b->channels || (!ampi_is(of, CONV2D)
        && (a->height != b->height || a->width != b->width))
        || (a->positions > 1 && ampi_is_for_images(of))
        || (a->positions != b->positions && ampi_is(of, POSITION_EMBEDDING)), AMP_ERR_SHAPE,
        "'%s' takes %s, not %s", of->layer.name, ampi_shape_text(b, left),
        ampi_shape_text(a, right));

    *n = *of;
    n->next = NULL;
    n->inputs[0] = in;
    if (keeps_positions) {
        n->layer.positions = a->positions;
        n->is_sequence = in->is_sequence;
    }
    n->pin_dtype = n->region_dtype = AMP_DTYPE_DEFAULT;
    n->is_output = n->keeps_grad = n->adds_grads = 0;
    if (ampi_is(n, CONV2D)) {
        n->conv.height = a->height;
        n->conv.width = a->width;
        if (amp_conv2d_output(&n->conv, &n->layer.height, &n->layer.width, &m->draft_exec)
            != AMP_OK) return ampi_no_value();
    }
    return ampi_layer_add_sharing(m);
}

/* Adds a dense layer without bias, whose weight is an embedding's. */
AMP_DEF amp_value amp_tied_linear(amp_model* m, amp_value x, amp_value embedding) {
    const ampi_node* of = ampi_node_of(m, embedding, "tied_linear");
    AMPI_DRAFT(n, AMP_OP_LINEAR, x);
    AMPI_REFUSE_LAYER(!ampi_is(of, EMBEDDING), AMP_ERR_ARGUMENT, "'%s' is no embedding",
        of->layer.name);
    AMPI_REFUSE_LAYER(n->features != of->fan_in, AMP_ERR_SHAPE,
        "'%s' has %llu features, not %llu", of->layer.name, (ampi_ull)of->fan_in,
        (ampi_ull)n->features);
    ampi_set_shape(n, (int)of->fan_out, 1, 1);
    n->params[AMPI_WEIGHT] = of->params[AMPI_WEIGHT];
    n->fan_in = of->fan_in;
    n->fan_out = of->fan_out;
    return ampi_layer_add_sharing(m);
}

/* Refuses a desc of a custom operator on the draft; else a copy of it becomes the draft's. */
AMPI_FN amp_result ampi_keep_custom(amp_model* m, const amp_custom_desc* d) {
    const amp_logger* logger = &m->draft_logger;
    amp_op op;
    AMPI_REFUSE_DESC(amp_op_from_name(d->name, &op), "its name '%s' is that of amp's own operator",
        d->name);
    AMPI_REFUSE_DESC(d->name && (!*d->name || strlen(d->name) > 20 || !ampi_is_utf8(d->name)),
        "its name must have 1 to 20 bytes of UTF-8");
    AMPI_REFUSE_DESC(!d->forward, "forward is NULL");
    AMPI_REFUSE_DESC(d->param_count < 0 || d->param_count > AMP_MAX_OPERANDS
        || (d->param_count > 0 && !d->params),
        "param_count %d must lie in 0..%d, with params given", d->param_count, AMP_MAX_OPERANDS);
    AMPI_REFUSE_DESC(d->saved_bytes > SIZE_MAX / 64 / (size_t)m->desc.batch
        || d->workspace_bytes > SIZE_MAX / 64, "saved_bytes or workspace_bytes is too large");
    for (int k = 0; d->rules && k < 4; k++)
        AMPI_REFUSE_DESC((unsigned)d->rules[k] > AMP_RULE_GRAY, "rule %d of O%d does not exist",
            d->rules[k], k);
    for (int k = 0; k < d->param_count; k++) {
        const amp_custom_param* p = &d->params[k];
        AMPI_REFUSE_DESC(!p->name || !*p->name || strlen(p->name) > 7 || !ampi_is_utf8(p->name),
            "the name of parameter %d must have 1 to 7 bytes of UTF-8", k);
        AMPI_REFUSE_DESC(p->count < 1 || p->count > INT32_MAX, "parameter '%s' has %llu elements",
            p->name, (ampi_ull)p->count);
        AMPI_REFUSE_DESC((unsigned)p->init > AMP_INIT_NORMAL, "init %d does not exist", p->init);
    }

    ampi_custom* c = (ampi_custom*)ampi_alloc(sizeof *c, &m->desc.allocator);
    AMPI_REFUSE_CALL(!c, AMP_ERR_MEMORY, "out of memory");
    AMPI_CLEAR(*c);
    c->desc = *d;
    AMPI_SAY(c->name, "%s", d->name ? d->name : "custom");
    for (int k = 0; k < 4; k++) c->rules[k] = d->rules ? d->rules[k] : AMP_RULE_FP32;
    for (int k = 0; k < d->param_count; k++) {
        c->params[k] = d->params[k];
        AMPI_SAY(c->param_names[k], "%s", d->params[k].name);
    }
    m->draft.custom = c;
    return AMP_OK;
}

/* Adds a custom operator, whose parameters stand in the order of its desc. */
AMP_DEF amp_value amp_custom(amp_model* m, const amp_value* inputs, int count,
        const amp_custom_desc* d) {
    const amp_value none = ampi_no_value();
    AMPI_DRAFT(n, AMP_OP_CUSTOM, inputs && count > 0 ? inputs[0] : none);
    AMPI_REFUSE_NULL_DESC(d);
    AMPI_REFUSE_LAYER(count > AMP_MAX_OPERANDS, AMP_ERR_ARGUMENT, "%d inputs, at most %d can be",
        count, AMP_MAX_OPERANDS);
    for (int j = 1; j < count; j++) {
        ampi_node* in = ampi_node_of(m, inputs[j], "custom");
        if (!in) return none;
        n->inputs[n->input_count++] = in;
    }
    if (d->channels || d->height || d->width) {
        AMPI_REFUSE_LAYER(!ampi_shape_fits(m, 1, d->channels, d->height, d->width), AMP_ERR_SHAPE,
            "its output %dx%dx%d is not a size that can be had", d->channels, d->height, d->width);
        ampi_set_shape(n, d->channels, d->height, d->width);
    }
    AMPI_REFUSE_LAYER(d->positions < 0, AMP_ERR_DESC, "positions is %d", d->positions);
    if (d->positions && d->positions != n->layer.positions) {
        n->layer.positions = d->positions;
        n->is_sequence = 0;
    }
    if (ampi_keep_custom(m, d) != AMP_OK) return none;

    for (int k = 0; k < d->param_count; k++) n->params[k] = m->param_count++;
    const amp_value v = ampi_layer_add(m);
    if (!v.id) ampi_free(m->draft.custom, &m->desc.allocator);
    return v;
}

#define AMPI_LAYER_WITH(name, add, OP, type) \
    AMP_DEF amp_value name##_with(amp_model* m, amp_value x, const type* desc) { \
        return add(m, AMP_OP_##OP, x, desc); } \
    AMP_DEF amp_value name(amp_model* m, amp_value x) { return add(m, AMP_OP_##OP, x, NULL); }
AMPI_LAYER_WITH(amp_batch_norm, ampi_norm, BATCH_NORM, amp_norm_desc)
AMPI_LAYER_WITH(amp_layer_norm, ampi_norm, LAYER_NORM, amp_norm_desc)
AMPI_LAYER_WITH(amp_rms_norm, ampi_norm, RMS_NORM, amp_norm_desc)
AMPI_LAYER_WITH(amp_softmax_cross_entropy, ampi_loss_add, SOFTMAX_CROSS_ENTROPY, amp_loss_desc)
AMPI_LAYER_WITH(amp_mse, ampi_loss_add, MSE, amp_loss_desc)
AMPI_LAYER_WITH(amp_bce_with_logits, ampi_loss_add, BCE_WITH_LOGITS, amp_loss_desc)
AMPI_LAYER_WITH(amp_mean, ampi_loss_add, MEAN, amp_loss_desc)

/* Refuses a type that is not computed on, and too many regions inside one another. */
AMP_DEF void amp_autocast_push(amp_model* m, amp_dtype dtype) {
    if (!ampi_can_build(m, "autocast_push")) return;
    if (!ampi_is_compute_dtype(dtype))
        ampi_build_fail(AMP_ERR_DTYPE, "autocast_push: %s is not a type that layers run in",
            amp_dtype_name(dtype));
    else if (m->region_count == AMP_MAX_REGIONS)
        ampi_build_fail(AMP_ERR_STATE, "autocast_push: regions are nested deeper than %d",
            AMP_MAX_REGIONS);
    else m->regions[m->region_count++] = dtype;
}

AMP_DEF void amp_autocast_pop(amp_model* m) {
    if (!ampi_can_build(m, "autocast_pop")) return;
    if (m->region_count == 0) ampi_build_fail(AMP_ERR_STATE, "autocast_pop: no region is open");
    else m->region_count--;
}

/* F32 before F16 before BF16, the order of the enum. */
AMP_DEF void amp_pin(amp_model* m, amp_value v, amp_dtype dtype) {
    ampi_node* n = ampi_node_of(m, v, "pin");
    if (!n) return;
    if (!dtype || !ampi_is_compute_dtype(dtype))
        ampi_build_fail(AMP_ERR_DTYPE, "pin '%s': f32, f16 or bf16 is needed", n->layer.name);
    else if (n->row->kind == AMPI_KIND_DATA)
        ampi_build_fail(AMP_ERR_POLICY, "pin '%s': %s has no arithmetic of its own", n->layer.name,
            n->row->name);
    else if (ampi_is_loss(n) && dtype != AMP_F32)
        ampi_build_fail(AMP_ERR_POLICY, "pin '%s': a loss is FP32 always", n->layer.name);
    else if (!n->pin_dtype || dtype < n->pin_dtype) n->pin_dtype = dtype;
}

/* The node that owns the memory of value v, for a call of this name; NULL after a mistake. A loss
   is one. */
AMPI_FN ampi_node* ampi_owner_of(amp_model* m, amp_value v, const char* what) {
    ampi_node* n = ampi_node_of(m, v, what);
    const char* is = !n ? NULL : ampi_is_loss(n) ? "is a loss" : ampi_is_tokens(n) ? "has tokens"
        : NULL;
    if (is) ampi_build_fail(AMP_ERR_ARGUMENT, "%s: '%s' %s", what, n->layer.name, is);
    return n && !is ? ampi_source(n) : NULL;
}

/* Adds a value to the outputs, unless it is one. */
AMP_DEF void amp_output(amp_model* m, amp_value v) {
    ampi_node* n = ampi_owner_of(m, v, "output");
    if (!n) return;
    if (n->is_output)
        ampi_build_fail(AMP_ERR_ARGUMENT, "output: '%s' is one already", n->layer.name);
    else if (m->output_count == AMP_MAX_OUTPUTS)
        ampi_build_fail(AMP_ERR_SHAPE, "output: a model has at most %d", AMP_MAX_OUTPUTS);
    else {
        m->outputs[m->output_count++] = n;
        n->is_output = 1;
    }
}

AMP_DEF void amp_retain_gradient(amp_model* m, amp_value v) {
    ampi_node* n = ampi_owner_of(m, v, "retain_gradient");
    if (n) n->keeps_grad = 1;
}

/* Names a layer, if the name fits and is UTF-8. */
AMP_DEF void amp_name(amp_model* m, amp_value v, const char* name) {
    ampi_node* n = ampi_node_of(m, v, "name");
    if (!n) return;
    if (!name || !*name || strlen(name) >= sizeof n->layer.name)
        ampi_build_fail(AMP_ERR_ARGUMENT, "name for '%s': 1 to %d characters are needed",
            n->layer.name, (int)sizeof n->layer.name - 1);
    else if (!ampi_is_utf8(name))
        ampi_build_fail(AMP_ERR_ARGUMENT, "name for '%s': it is not UTF-8", n->layer.name);
    else strcpy(n->layer.name, name);
}

/* Puts a layer's parameters into an optimizer group that exists. */
AMP_DEF void amp_group(amp_model* m, amp_value v, int group) {
    ampi_node* n = ampi_node_of(m, v, "group");
    if (!n) return;
    const int groups = ampi_default_int(m->desc.optimizer.group_count, 1);  /* 0: one for all */
    if (n->shares_params)
        ampi_build_fail(AMP_ERR_ARGUMENT, "group of '%s': its weights are another layer's",
            n->layer.name);
    else if (n->params[0] == AMPI_NONE)
        ampi_build_fail(AMP_ERR_ARGUMENT, "group of '%s': it has no parameters", n->layer.name);
    else if (group < 0 || group >= groups)
        ampi_build_fail(AMP_ERR_ARGUMENT, "group of '%s' is %d, the optimizer has %d",
            n->layer.name, group, groups);
    else n->group = group;
}

/* --- finalize, 1: the types that layers compute in and values are kept in --- */
/* Sets a layer's rule, who chose it, and the type of a LOW one: by its pin, else its region, else
   the policy. A region moves no loss. */
AMPI_FN void ampi_resolve_rule(const amp_model* m, ampi_node* n) {
    amp_layer* l = &n->layer;
    amp_dtype forced = n->pin_dtype;  /* 0 = by nobody */
    l->rule = m->policy.rules[l->op];
    l->reason = m->policy.reasons[l->op];
    if (n->custom && l->reason == AMP_REASON_LEVEL) l->rule = n->custom->rules[m->policy.level];
    l->compute_dtype = m->policy.low_dtype;
    if (forced) l->reason = AMP_REASON_PIN;
    else if (n->region_dtype && n->row->kind != AMPI_KIND_DATA && !ampi_is_loss(n)) {
        forced = n->region_dtype;
        l->reason = AMP_REASON_REGION;
    }
    if (!forced) return;
    l->rule = forced == AMP_F32 ? AMP_RULE_FP32 : AMP_RULE_LOW;
    l->compute_dtype = forced;
}

/* For GRAY: `leads` is 1 if a LOW node or an end of the graph is reached through GRAY and FOLLOW
   nodes alone. OneFlow's biases are added by GRAY operators of their own, unless a pin or a region
   moves the layer as a whole. */
AMPI_FN void ampi_resolve_leads(amp_model* m) {
    AMPI_EACH_NODE(n) n->leads = AMPI_NONE;  /* an end, so far */
    for (ampi_node* n = m->last; n; n = n->prev) {
        const int passes = n->layer.rule == AMP_RULE_GRAY || n->layer.rule == AMP_RULE_FOLLOW;
        n->f32_bias = m->policy.style == AMP_STYLE_ONEFLOW && n->layer.rule == AMP_RULE_LOW
            && n->layer.reason < AMP_REASON_REGION && n->params[AMPI_BIAS] != AMPI_NONE
            && n->leads == 0;
        n->leads = n->layer.rule == AMP_RULE_LOW || (passes && n->leads != 0);
        for (int j = 0; j < n->input_count; j++)
            if (n->leads || n->inputs[j]->leads == AMPI_NONE) n->inputs[j]->leads = n->leads;
    }
}

/* The type of each node's output and of what others see of it, by pins, regions and rules, in
   building order. */
AMPI_FN void ampi_resolve_types(amp_model* m) {
    AMPI_EACH_NODE(n) ampi_resolve_rule(m, n);
    ampi_resolve_leads(m);
    AMPI_EACH_NODE(n) {
        const amp_rule rule = n->layer.rule;
        amp_dtype* t = &n->layer.compute_dtype;  /* that of a LOW layer, so far */
        const amp_dtype first = n->inputs[0] ? n->inputs[0]->visible : AMP_F32;
        int are_equal = 1, gray_is_low = n->leads && first != AMP_F32;
        for (int j = 1; j < n->input_count; j++) {
            const amp_dtype other = n->inputs[j]->visible;
            are_equal &= other == first;
            gray_is_low |= n->leads && other != AMP_F32;
        }

        if (rule == AMP_RULE_FOLLOW) *t = first;
        else if (rule == AMP_RULE_PROMOTE) *t = are_equal ? first : AMP_F32;
        else if (rule == AMP_RULE_FP32 || (rule == AMP_RULE_GRAY && !gray_is_low)) *t = AMP_F32;

        n->visible = n->f32_bias || (rule == AMP_RULE_LOW && m->policy.cast_back) ? AMP_F32 : *t;
        n->wanted = AMP_DTYPE_DEFAULT;  /* by no reader so far, see ampi_resolve_storage */
    }
}

/* The type in which each value is kept. One that every reader wants in one 16-bit type is written
   in it, with the bits of a cast from FP32. Widening is no copy: operators read 16 bits. */
AMPI_FN void ampi_resolve_storage(amp_model* m) {
    /* The type in which all readers of a value compute; FP32 if they differ. */
    AMPI_EACH_NODE(user)
        if (!ampi_is(user, FLATTEN)) {
            for (int j = 0; j < user->input_count; j++) {
                ampi_node* n = ampi_source(user->inputs[j]);
                const amp_dtype t = user->layer.compute_dtype;
                n->wanted = !n->wanted || n->wanted == t ? t : AMP_F32;
            }
        }

    AMPI_EACH_NODE(n) {
        amp_dtype* t = &n->layer.storage_dtype;
        if (ampi_is_tokens(n)) continue;
        *t = n->layer.rule == AMP_RULE_LOW && !n->f32_bias ? n->layer.compute_dtype : n->visible;
        if (ampi_is(n, FLATTEN)) *t = ampi_stored(n->inputs[0]);
        else if (n->custom) *t = n->layer.compute_dtype;
        else if (*t == AMP_F32 && n->wanted) *t = n->wanted;
    }
}

/* The cast of `source` to dtype: an old one, or a new node before `user`. NULL without memory. */
AMPI_FN ampi_node* ampi_cast_of(amp_model* m, ampi_node* source, amp_dtype dtype, ampi_node* user) {
    ampi_node **old = &source->casts[dtype - AMP_F32], *cast = *old;
    if (cast) return cast;

    cast = ampi_draft(m, AMPI_OP_CAST, source);
    cast->reads[0] = source;
    cast->layer.storage_dtype = cast->layer.compute_dtype = dtype;
    cast->needs_grad = source->needs_grad;
    cast->prev = user->prev;
    cast->next = user;
    cast = ampi_node_new(m);
    if (!cast) return NULL;

    *old = cast;
    user->prev = cast->prev->next = cast->data_root = cast->grad_root = cast;
    user->layer.casts++;
    source->users++;
    return cast;
}

/* Finds whose memory each node reads, placing casts before their first reader. Finds, too, which
   nodes have or follow parameters: the backward pass must reach them. A flatten has the type of its
   input, needs no cast and is in no node's reads. */
AMPI_FN amp_result ampi_place_casts(amp_model* m) {
    AMPI_EACH_NODE(n) {
        const amp_dtype wanted = n->layer.compute_dtype;
        n->data_root = n->grad_root = n;
        n->needs_grad = !m->desc.inference && (n->params[0] != AMPI_NONE || n->keeps_grad);
        n->users = n->is_output;
        n->on_loss_path = n->layer.casts = 0;
        AMPI_CLEAR(n->casts);
        for (int j = 0; j < n->input_count; j++) {
            ampi_node* source = ampi_source(n->inputs[j]);
            if ((wanted != AMP_F32 || n->custom) && wanted != ampi_stored(source)
                && !ampi_is_tokens(source))
                source = ampi_cast_of(m, source, wanted, n);
            if (!source) return AMP_ERR_MEMORY;
            n->reads[j] = source;
            n->needs_grad |= source->needs_grad;
            source->users += !ampi_is(n, FLATTEN);
        }
    }
    return AMP_OK;
}

/* --- finalize, 2: memory of values --- */
/* May n's gradient (what = AMPI_SHARES_GRAD), or its output too (AMPI_SHARES_BOTH), lie in the
   memory of its input's? No other node, nor the caller, may read that input. */
AMPI_FN int ampi_can_share(const ampi_node* n, int what) {
    const ampi_node* in = n->reads[0];
    if (n->row->shares < what || n->keeps_grad || in->users != 1) return 0;
    if (ampi_stored(in) != ampi_stored(n)) return 0;
    if (what == AMPI_SHARES_GRAD) return 1;
    return !ampi_is(in, INPUT) && !(in->row->reads & AMPI_READS_OUTPUT);
}

/* Finds which nodes lead to a loss or share memory, and the times of execution. Refuses a layer
   whose weights no loss would train. */
AMPI_FN amp_result ampi_mark_paths(amp_model* m) {
    int time = 0;

    /* From the end, as the owner of a gradient's memory must be known before those that share
       it. */
    for (ampi_node* n = m->last; n; n = n->prev) {
        n->on_loss_path |= ampi_is_loss(n) || n->is_output;
        for (int j = 0; j < n->input_count; j++) n->reads[j]->on_loss_path |= n->on_loss_path;
        if (ampi_can_share(n, AMPI_SHARES_GRAD)) n->reads[0]->grad_root = n->grad_root;
        AMPI_REFUSE(ampi_is_trainable(m) && n->params[0] != AMPI_NONE && !n->on_loss_path,
            AMP_ERR_SHAPE, "layer %d '%s' has weights, but no loss depends on it", n->number,
            n->layer.name);
        AMPI_REFUSE(n->custom && !n->custom->desc.backward && n->on_loss_path && n->needs_grad,
            AMP_ERR_DESC, "layer '%s' has no backward function, but a loss depends on it",
            n->layer.name);
        AMPI_REFUSE(n->keeps_grad && !n->on_loss_path, AMP_ERR_SHAPE,
            "the gradient of '%s' is to be retained, but no loss depends on it", n->layer.name);
    }

    /* From the start, as the owner of a value's memory must be. */
    AMPI_EACH_NODE(n) {
        n->time = time++;
        n->layer.in_place = ampi_can_share(n, AMPI_SHARES_BOTH);
        if (n->layer.in_place || ampi_is(n, FLATTEN)) n->data_root = n->reads[0]->data_root;
    }
    return AMP_OK;
}

AMPI_FN ampi_live_range* ampi_live_data(const ampi_node* n) {
    return &n->data_root->live[AMPI_LIVE_DATA];
}

AMPI_FN ampi_live_range* ampi_live_grad(const ampi_node* n) {
    return &n->grad_root->live[AMPI_LIVE_GRAD];
}

/* Widens a live range to hold `time`, and sets its size. */
AMPI_FN void ampi_live_range_use(ampi_live_range* l, int time, size_t bytes) {
    if (!l->bytes || l->first > time) l->first = time;
    if (!l->bytes || l->last < time) l->last = time;
    l->bytes = bytes;
}

/* Rows of a value in the largest pass. */
AMPI_FN size_t ampi_most_rows(const amp_model* m, const ampi_node* n) {
    return (size_t)m->desc.batch * (size_t)n->layer.positions;
}

AMPI_FN size_t ampi_value_bytes(const amp_model* m, const ampi_node* n) {
    return ampi_align(n->features * ampi_most_rows(m, n) * amp_dtype_size(ampi_stored(n)));
}

/* Finds each live range's size and times of use. Values that share memory have one size. */
AMPI_FN void ampi_live_range_times(amp_model* m) {
    const int end = 2 * m->last->time + 1;  /* node n runs backward at end - n->time */
    const int start = end - m->last->time;
    AMPI_EACH_NODE(n) {
        AMPI_CLEAR(n->live);
        n->grad_written = n->is_output;  /* by the seed */
    }

    /* In the order of the backward pass: its first contribution to a gradient is written in place,
       others are summands. */
    for (ampi_node* n = m->last; n; n = n->prev) {
        /* Several backward passes read values to the end. */
        const int back = end - n->time, read = m->own_scalers ? end : back;
        const int reads = n->on_loss_path && n->needs_grad ? n->row->reads : AMPI_READS_NONE;
        const size_t own = ampi_value_bytes(m, n);

        /* Its own value; those of inputs are filled before the first node runs. */
        if (!ampi_is_loss(n)) {
            ampi_live_range_use(ampi_live_data(n), n->input_count ? n->time : 0, own);
            if (reads & AMPI_READS_OUTPUT) ampi_live_range_use(ampi_live_data(n), read, own);
        }

        /* What a custom operator saves. */
        if (n->custom && n->custom->desc.saved_bytes > 0) {
            const size_t bytes = ampi_align(n->custom->desc.saved_bytes * (size_t)m->desc.batch);
            ampi_live_range_use(&n->live[AMPI_LIVE_SAVED], n->time, bytes);
            if (reads != AMPI_READS_NONE)
                ampi_live_range_use(&n->live[AMPI_LIVE_SAVED], read, bytes);
        }

        /* What the caller reads stays to the end. The seed of an output is there from the start of
           the backward pass. */
        if (n->is_output) ampi_live_range_use(ampi_live_data(n), end, own);
        if (n->is_output && n->needs_grad) ampi_live_range_use(ampi_live_grad(n), start, own);
        if (n->keeps_grad && n->needs_grad) ampi_live_range_use(ampi_live_grad(n), end, own);

        /* Its inputs' values, and their gradients where the backward pass hands them one: until
           each input's own turn. No loss depends on a flatten: its readers read its input. */
        for (int j = 0; j < n->input_count; j++) {
            ampi_node* in = n->reads[j];
            const size_t bytes = ampi_value_bytes(m, in);
            ampi_live_range_use(ampi_live_data(in), n->time, bytes);
            if (reads & AMPI_READS_INPUT) ampi_live_range_use(ampi_live_data(in), read, bytes);
            if (!n->on_loss_path || !in->needs_grad) continue;
            ampi_live_range_use(ampi_live_grad(in), back, bytes);
            ampi_live_range_use(ampi_live_grad(in), end - in->time, bytes);
            if (in->grad_written)
                ampi_live_range_use(&n->live[AMPI_LIVE_SUMMAND + j], back, bytes);
            in->grad_written = 1;
        }
    }
}

/* The order of planning: the largest live range first; equals stay in the order of execution, as
   ampi_sort keeps it. */
AMPI_FN int ampi_by_size(const void* a, const void* b) {
    const size_t x = ((const ampi_live_range*)a)->bytes, y = ((const ampi_live_range*)b)->bytes;
    return x < y ? 1 : x == y ? 0 : -1;
}

/* The lowest offset at which l meets none of the `count` placed live ranges that are in use at its
   times; those are sorted by offset. SIZE_MAX if it would end beyond size_t. */
AMPI_FN size_t ampi_live_range_place(const ampi_live_range* l, const ampi_live_range* placed,
        size_t count) {
    size_t offset = 0;
    for (const ampi_live_range* o = placed; o < placed + count; o++) {
        if (o->offset >= offset + l->bytes) break;  /* the gap before o is large enough */
        if (o->last < l->first || o->first > l->last) continue;
        offset = ampi_max_size(offset, o->offset + o->bytes);
        if (offset > SIZE_MAX - l->bytes) return SIZE_MAX;
    }
    return offset;
}

/* Places the live ranges of a list one by one, and tells their nodes. Those before list[i] are
   placed, and sorted by offset. Returns the bytes needed, SIZE_MAX for too many. */
AMPI_FN size_t ampi_live_ranges_place(ampi_live_range* list, size_t count) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        ampi_live_range l = list[i];
        size_t at = i;
        l.offset = l.home->offset = ampi_live_range_place(&l, list, i);
        if (l.offset == SIZE_MAX) return SIZE_MAX;
        total = ampi_max_size(total, l.offset + l.bytes);
        for (; at > 0 && list[at - 1].offset > l.offset; at--) list[at] = list[at - 1];
        list[at] = l;
    }
    return total;
}

/* Plans the arena, the largest live range first, close to optimal for such graphs. Counts its bytes
   in its block. */
AMPI_FN amp_result ampi_plan_arena(amp_model* m) {
    const amp_allocator* a = &m->desc.allocator;
    const size_t capacity = ((size_t)m->last->time + 1) * AMPI_LIVE_RANGES,
        scratch = capacity / 2 + 1;  /* of ampi_sort */
    ampi_live_range* list = (ampi_live_range*)ampi_alloc((capacity + scratch) * sizeof *list, a);
    size_t count = 0;
    AMPI_REFUSE(!list, AMP_ERR_MEMORY, "model: out of memory for the plan of %llu arrays",
        (ampi_ull)capacity);

    ampi_live_range_times(m);
    AMPI_EACH_NODE(n) {
        n->layer.activation_bytes = n->live[AMPI_LIVE_DATA].bytes;
        for (int k = 0; k < AMPI_LIVE_RANGES; k++) {
            if (!n->live[k].bytes) continue;
            list[count] = n->live[k];
            list[count++].home = &n->live[k];
        }
    }

    ampi_sort(list, count, sizeof *list, ampi_by_size, list + count);
    m->blocks[AMPI_BLOCK_ARENA].at = ampi_live_ranges_place(list, count);
    ampi_free(list, a);
    return AMP_OK;
}

/* --- finalize, 3: parameters --- */
#define AMPI_PARAM_NAME 136  /* a layer's and ".weight" */
/* The type of the weights that n reads. Norms read FP32. Exceptions: a norm of rule LOW without
   masters, and all but a batch norm in a style with low_norm, which read their compute_dtype. */
AMPI_FN amp_dtype ampi_weight_dtype(const amp_model* m, const ampi_node* n) {
    const amp_layer* l = &n->layer;
    const int low_norm = !ampi_is(n, BATCH_NORM) && ampi_styles[m->policy.style].low_norm;
    if (n->params[0] == AMPI_NONE) return AMP_DTYPE_DEFAULT;
    if (!ampi_is_norm(n) || low_norm) return l->compute_dtype;
    return m->policy.master_weights || l->rule != AMP_RULE_LOW ? AMP_F32 : l->compute_dtype;
}

/* The type in which a parameter of n is kept for its readers: 16 bits where one reads them. Of an
   embedding's weight *in_f32 is 1 where others read FP32: the tied layer, or the embedding. */
AMPI_FN amp_dtype ampi_kept_dtype(const amp_model* m, const ampi_node* n, int* in_f32) {
    amp_dtype kept = n->layer.param_dtype;
    *in_f32 = 0;
    if (!ampi_is(n, EMBEDDING)) return kept;
    AMPI_EACH_NODE(user) {
        const amp_dtype t = user->params[0] == n->params[0] ? ampi_weight_dtype(m, user) : kept;
        if (t == AMP_F32) *in_f32 = 1;
        else kept = t;
    }
    return kept;
}

/* Places parameter k of n in each block, and describes it in m->params; before there are blocks,
   counts its bytes only. */
AMPI_FN void ampi_place_param(amp_model* m, ampi_node* n, int k) {
    const int index = n->params[k], is_bias = k == AMPI_BIAS && !n->custom;
    if (index == AMPI_NONE || n->shares_params) return;
    int in_f32;
    const amp_dtype kept = ampi_kept_dtype(m, n, &in_f32);
    const int is_low = kept != AMP_F32 && !(is_bias && n->f32_bias);
    amp_param p;
    AMPI_CLEAR(p);
    p.count = n->custom ? n->custom->params[k].count : ampi_norms_rows(n) ? n->features
        : ampi_is_dense(n) && !is_bias ? n->fan_in * n->fan_out
        : (size_t)n->layer.channels * (is_bias ? 1 : ampi_is(n, CONV_TRANSPOSE2D) ? n->fan_out
            : n->fan_in);
    p.group = n->group;
    p.grad_dtype = ampi_dtype_or_f32(m->desc.grad_dtype);
    n->layer.parameters += p.count;

    /* What exists of it: a low copy, a master, a gradient, moments; each in a block of its own. */
    if (is_low) {
        p.low = ampi_block_take(m, AMPI_BLOCK_LOW, p.count * 2);
        p.low_dtype = kept;
    }
    const int has_master = !is_low || in_f32 || (m->policy.master_weights && !m->desc.inference);
    if (has_master && p.low_dtype == AMP_BF16 && m->desc.split_masters && !in_f32)
        p.rest = (uint16_t*)ampi_block_take(m, AMPI_BLOCK_MASTERS, p.count * 2);
    else if (has_master) p.master = ampi_floats_take(m, AMPI_BLOCK_MASTERS, p.count);
    if (ampi_is_trainable(m)) {
        const int kind = ampi_kind_in_group(&m->desc.optimizer, p.group);
        p.grad = ampi_block_take(m, AMPI_BLOCK_GRADS, p.count * ampi_type_size(p.grad_dtype));
        p.moment_dtype = m->desc.moment_dtype;
        const size_t bytes = p.count * ampi_type_size(p.moment_dtype);
        if (ampi_uses_m(kind)) p.m = ampi_block_take(m, AMPI_BLOCK_MOMENTS, bytes);
        if (ampi_uses_v(kind)) p.v = ampi_block_take(m, AMPI_BLOCK_MOMENTS, bytes);
    }

    char* name = (char*)ampi_block_take(m, AMPI_BLOCK_HOST, AMPI_PARAM_NAME);
    if (!name) return;  /* sizes are counted */
    ampi_say(name, AMPI_PARAM_NAME, "%s.%s", n->layer.name, n->custom ? n->custom->param_names[k]
        : is_bias ? "bias" : "weight");
    p.name = name;
    m->params[index] = p;
    m->grad_list[index] = ampi_grad_at(&p, 0);
}

/* Weight number i of an init, drawn from the stream of that seed. */
AMPI_FN float ampi_drawn_weight(amp_init init, float sd, size_t fan_in, size_t fan_out,
        uint64_t seed, uint64_t i) {
    if (init == AMP_INIT_ZERO) return 0.0f;
    if (init == AMP_INIT_NORMAL) return amp_random_normal(seed, i) * (sd == 0.0f ? 0.02f : sd);
    if (init == AMP_INIT_HE) return amp_random_normal(seed, i) * sqrtf(2.0f / (float)fan_in);
    const float u = 2.0f * amp_random_uniform(seed, i) - 1.0f;
    if (init == AMP_INIT_XAVIER) return u * sqrtf(6.0f / (float)(fan_in + fan_out));
    return u / sqrtf((float)fan_in);
}

/* Element i of a parameter of a custom operator at the start. */
AMPI_FN float ampi_initial_custom(const amp_custom_param* p, uint64_t seed, uint64_t i) {
    if (p->init == AMP_INIT_ZERO) return p->value;
    return ampi_drawn_weight(p->init, p->value, p->fan_in ? p->fan_in : p->count,
        p->fan_out ? p->fan_out : p->count, seed, i);
}

/* Element i of a layer's weight or bias at the start, by its layer's init. */
AMPI_FN float ampi_initial_weight(const ampi_node* n, int is_bias, uint64_t seed, uint64_t i) {
    if (ampi_is_norm(n)) return is_bias ? 0.0f : 1.0f;
    if (is_bias && n->init != AMP_INIT_TORCH) return 0.0f;
    return ampi_drawn_weight(n->init, n->sd, n->fan_in, n->fan_out, seed, i);
}

/* The seed of a stream of random numbers: near model seeds and near streams become far apart. */
AMPI_FN uint64_t ampi_stream(const amp_model* m, int number) {
    uint64_t x = m->desc.seed + 0x9E3779B97F4A7C15u * (uint64_t)(number + 1);
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
    return x ^ (x >> 32);
}

/* Splits n masters on the host into the model's memory. */
AMPI_APART amp_result ampi_write_split(amp_model* m, uint16_t* low, uint16_t* rest,
        const float* values, size_t n) {
    uint16_t halves[2][4 * AMPI_BLOCK];
    for (size_t i = 0, count; i < n; i += count) {
        count = ampi_min_size(n - i, 4 * AMPI_BLOCK);
        ampi_split(halves[0], halves[1], values + i, count);
        AMPI_RUN(copy_in, low + i, halves[0], count * sizeof *low);
        AMPI_RUN(copy_in, rest + i, halves[1], count * sizeof *rest);
    }
    return AMP_OK;
}

/* Joins n masters on the host from the model's memory. */
AMPI_APART amp_result ampi_read_split(amp_model* m, const uint16_t* low, const uint16_t* rest,
        float* values, size_t n) {
    uint16_t halves[2][4 * AMPI_BLOCK];
    for (size_t i = 0, count; i < n; i += count) {
        count = ampi_min_size(n - i, 4 * AMPI_BLOCK);
        AMPI_RUN(copy_out, halves[0], low + i, count * sizeof *low);
        AMPI_RUN(copy_out, halves[1], rest + i, count * sizeof *rest);
        ampi_join(values + i, halves[0], halves[1], count);
    }
    return AMP_OK;
}

/* Fills parameter k of n from a stream of its own: other parameters do not change
   it. Its low copy is written by ampi_open_training. */
AMPI_FN amp_result ampi_init_param(amp_model* m, const ampi_node* n, int k) {
    const int index = n->params[k];
    if (index == AMPI_NONE || n->shares_params) return AMP_OK;
    const amp_param* p = &m->params[index];
    const uint64_t seed = ampi_stream(m, index);
    float values[AMPI_BLOCK];
    size_t count;
    for (size_t at = 0; at < p->count; at += count) {
        count = ampi_min_size(p->count - at, AMPI_BLOCK);
        for (size_t i = 0; i < count; i++)
            values[i] = n->custom ? ampi_initial_custom(&n->custom->params[k], seed, at + i)
                : ampi_initial_weight(n, k == AMPI_BIAS, seed, at + i);
        if (p->master) AMPI_RUN(copy_in, p->master + at, values, count * sizeof *values);
        else if (p->rest)
            AMPI_TRY(ampi_write_split(m, (uint16_t*)p->low + at, p->rest + at, values, count));
        else AMPI_RUN(upload, amp_ref_of((uint16_t*)p->low + at, p->low_dtype), amp_f32(values),
            count);
    }
    return AMP_OK;
}

/* --- finalize, 4: the rest --- */
AMPI_FN size_t ampi_workspace_of(const amp_model* m, const ampi_node* n) {
    const size_t rows = ampi_most_rows(m, n), in = n->fan_in, out = (size_t)n->layer.channels;
    const amp_backend* f = m->backend;
    amp_conv2d_shape conv = n->conv;
    if (n->custom) return n->custom->desc.workspace_bytes;
    if (ampi_is(n, CONV_TRANSPOSE2D)) ampi_transposed_shape(&conv, &n->conv, NULL);
    if (conv.channels) return f->conv2d_workspace(&conv);
    if (ampi_norms_rows(n)) return f->layer_norm_workspace(rows, n->features);
    if (!ampi_is(n, LINEAR)) return 0;
    return ampi_max_size(f->gemm_workspace(rows, out, in),
        ampi_max_size(f->gemm_workspace(rows, in, out), f->gemm_workspace(out, in, rows)));
}

AMPI_FN int ampi_has_labels(const ampi_node* loss) { return ampi_is(loss, SOFTMAX_CROSS_ENTROPY); }

/* 32-bit numbers in the targets of a row: labels, or floats. */
AMPI_FN size_t ampi_target_size(const ampi_node* loss) {
    if (ampi_is(loss, MEAN)) return 0;
    return ampi_has_labels(loss) ? loss->labels : loss->reads[0]->features;
}

/* Logits of a label, more than its classes where some only fill up. */
AMPI_FN size_t ampi_logits(const ampi_node* loss) {
    return loss->reads[0]->features / loss->labels;
}

/* Predictions of a cross-entropy whose logits evaluation copies to the host at once: rows, or the
   pixels of a map. */
AMPI_FN size_t ampi_rows_at_once(const ampi_node* loss) {
    const size_t logits = ampi_logits(loss);
    return loss->labels > 1 ? loss->labels : logits < 8192 ? 8192 / logits : 1;
}

/* Places what a node has outside of the arena, or counts its bytes before there are blocks. */
AMPI_FN void ampi_place_node(amp_model* m, ampi_node* n) {
    const int is_batch_norm = ampi_is(n, BATCH_NORM);
    const size_t groups = is_batch_norm ? (size_t)n->layer.channels : ampi_most_rows(m, n);
    n->layer.param_dtype = ampi_weight_dtype(m, n);
    n->layer.parameters = 0;
    for (int k = 0; k < AMP_MAX_OPERANDS; k++) ampi_place_param(m, n, k);
    if (n->constants)
        n->reading.constants = ampi_floats_take(m, AMPI_BLOCK_STEP, n->constant_count);

    /* A mean and a variance of each channel, or of each row. */
    if (ampi_is_norm(n)) n->stats = ampi_floats_take(m, AMPI_BLOCK_STEP, 2 * groups);
    if (!is_batch_norm) return;
    n->running = ampi_floats_take(m, AMPI_BLOCK_RUNNING, 2 * groups);
    ampi_floats_take(m, AMPI_BLOCK_RUNNING_SAVED, 2 * groups);  /* at the same offset */
    n->norm.held = (unsigned char*)ampi_block_take(m, AMPI_BLOCK_HELD, groups);
}

/* Places everything outside the arena, or counts bytes before there are blocks. */
AMPI_FN void ampi_place_all(amp_model* m) {
    const size_t params = (size_t)m->param_count;
    size_t workspace = 0;  /* bytes of the operator that wants most */
    size_t rows = 0;       /* floats: logits and labels of the loss with most, see
                              ampi_count_right */
    int is_sequence = 0;   /* 1 = an input is one */

    m->params = (amp_param*)ampi_block_take(m, AMPI_BLOCK_HOST, params * sizeof *m->params);
    m->grad_list = (amp_tensor*)ampi_block_take(m, AMPI_BLOCK_HOST, params * sizeof *m->grad_list);
    AMPI_EACH_NODE(n) {
        ampi_place_node(m, n);
        workspace = ampi_max_size(workspace, ampi_workspace_of(m, n));
    }
    m->held = (unsigned char*)ampi_block_take(m, AMPI_BLOCK_HOST, m->blocks[AMPI_BLOCK_HELD].at);

    for (int i = 0; i < m->loss_count; i++) {
        ampi_node* n = m->losses[i];
        n->target = ampi_floats_take(m, AMPI_BLOCK_STEP,
            ampi_target_size(n) * ampi_most_rows(m, n->reads[0]));
        if (ampi_has_labels(n))
            rows = ampi_max_size(rows, ampi_rows_at_once(n) * (ampi_logits(n) + 1));
    }
    for (int i = 0; i < m->input_count; i++) is_sequence |= m->inputs[i]->is_sequence;
    if (is_sequence)
        m->lengths = (int32_t*)ampi_block_take(m, AMPI_BLOCK_STEP,
            3 * (size_t)m->desc.batch * sizeof *m->lengths);
    m->loss_values = ampi_floats_take(m, AMPI_BLOCK_STEP, (size_t)m->loss_count + 2);
    m->rows = ampi_floats_take(m, AMPI_BLOCK_HOST, rows);
    m->exec.workspace = ampi_block_take(m, AMPI_BLOCK_WORKSPACE, workspace);
    m->exec.workspace_size = workspace;
}

/* Tells each node where its live ranges are, and fills what does not begin as 0. */
AMPI_FN amp_result ampi_init_values(amp_model* m) {
    char* arena = m->blocks[AMPI_BLOCK_ARENA].base;
    const float one = 1.0f;
    AMPI_EACH_NODE(n) {
        /* Where it is. A value without a live range is never touched. */
        n->data = arena + ampi_live_data(n)->offset;
        n->grad = arena + ampi_live_grad(n)->offset;
        n->saved = arena + n->live[AMPI_LIVE_SAVED].offset;
        for (int j = 0; j < AMP_MAX_OPERANDS; j++) {
            const ampi_live_range* part = &n->live[AMPI_LIVE_SUMMAND + j];
            n->parts[j] = part->bytes ? arena + part->offset : NULL;
        }

        /* What it starts with. */
        if (n->constants)
            AMPI_RUN(copy_in, ampi_mutable(n->reading.constants), n->constants,
                n->constant_count * sizeof(float));
        for (int k = 0; k < AMP_MAX_OPERANDS; k++) AMPI_TRY(ampi_init_param(m, n, k));
        if (n->running) {
            for (int c = n->layer.channels; c < 2 * n->layer.channels; c++)  /* variances */
                AMPI_RUN(copy_in, n->running + c, &one, sizeof one);
        }
    }
    return AMP_OK;
}

/* Refuses scalers of losses where some have none, or where one backward pass for each cannot be. */
AMPI_FN amp_result ampi_check_loss_scalers(amp_model* m) {
    if (m->own_scalers == 0) return AMP_OK;
    AMPI_REFUSE(m->own_scalers < m->loss_count || m->desc.scaler, AMP_ERR_DESC,
        "model: %d of %d losses have a scaler of their own; all need one, and the model none",
        m->own_scalers, m->loss_count);
    AMPI_REFUSE(m->backend->asynchronous || m->backend->reaches, AMP_ERR_UNSUPPORTED,
        "model: losses with a scaler of their own are for the CPU, not '%s'", m->backend->name);
    AMPI_REFUSE(ampi_dtype_or_f32(m->desc.grad_dtype) != AMP_F32, AMP_ERR_DTYPE,
        "model: losses with a scaler of their own need grad_dtype f32");
    AMPI_EACH_NODE(n)
        AMPI_REFUSE(n->keeps_grad, AMP_ERR_UNSUPPORTED,
            "model: the gradient of '%s' cannot be retained, as losses have scalers of their own",
            n->layer.name);
    return AMP_OK;
}

/* A level's scaler, when the user gives none: the style's where half gradients can underflow, else
   scale 1. */
AMPI_FN amp_result ampi_init_scaler(amp_model* m) {
    const amp_level level = m->policy.level;
    int dynamic = m->policy.low_dtype == AMP_F16 && (level == AMP_O1 || level == AMP_O2);
    amp_scaler_desc d;
    AMPI_CLEAR(d);

    /* A pin or a region may have made a layer half at O0, or in BF16. */
    AMPI_EACH_NODE(n) dynamic |= level != AMP_O3 && n->layer.compute_dtype == AMP_F16;
    d.preset = !dynamic || m->own_scalers ? AMP_SCALER_STATIC
        : level == AMP_O2 ? ampi_styles[m->policy.style].o2_scaler
            : ampi_styles[m->policy.style].o1_scaler;
    if (d.preset == AMP_SCALER_STATIC) d.init_scale = 1.0f;

    if (m->desc.scaler) d = *m->desc.scaler;
    d.logger = &m->op_logger;
    return amp_scaler_init(&m->training.scaler, &d);
}

/* Refuses a name of two layers. */
AMPI_FN amp_result ampi_check_names(amp_model* m) {
    const amp_allocator* a = &m->desc.allocator;
    const size_t count = (size_t)m->layer_count, scratch = count / 2 + 1;  /* of ampi_sort */
    const char **names = (const char**)ampi_alloc((count + scratch) * sizeof *names, a), *twice;
    AMPI_REFUSE(!names, AMP_ERR_MEMORY, "model: out of memory for %d names", m->layer_count);
    AMPI_EACH_NODE(n) names[n->number] = n->layer.name;
    twice = ampi_sort_names(names, count, sizeof *names, names + count);
    ampi_free(names, a);
    AMPI_REFUSE(twice, AMP_ERR_ARGUMENT, "model: there are two layers named '%s'", twice);
    return AMP_OK;
}

/* Opens the optimizer. Without a loss or an output each group is frozen, the one that stands for
   none, too: parameters have no gradients and no moments then, which only frozen ones may. */
AMPI_FN amp_result ampi_open_training(amp_model* m) {
    amp_optimizer_desc d = m->desc.optimizer;
    amp_param_group groups[AMP_MAX_GROUPS];

    if (!ampi_is_trainable(m)) {
        memcpy(groups, m->groups, sizeof groups);
        for (int i = 0; i < AMP_MAX_GROUPS; i++) groups[i].frozen = 1;
        d.groups = groups;
        d.group_count = ampi_default_int(d.group_count, 1);
    }

    AMPI_TRY(ampi_run(training_open, &m->training, &d, m->params, m->param_count));
    m->training.optimizer.desc.group_count = m->desc.optimizer.group_count;
    return AMP_OK;
}

/* All of finalize; on failure the caller takes it back. */
AMPI_FN amp_result ampi_finalize(amp_model* m) {
    /* What building could not know. */
    AMPI_REFUSE(m->region_count, AMP_ERR_STATE, "model: %d autocast region%s not closed",
        m->region_count, m->region_count > 1 ? "s are" : " is");
    AMPI_REFUSE(m->input_count == 0, AMP_ERR_SHAPE, "model: there is no input");
    AMPI_TRY(ampi_check_names(m));
    AMPI_TRY(ampi_check_loss_scalers(m));
    if (amp_optimizer_moments(&m->desc.optimizer) < 0) return AMP_ERR_DESC;

    /* Types, then the nodes as they run. */
    ampi_resolve_types(m);
    AMPI_TRY(ampi_init_scaler(m));
    ampi_resolve_storage(m);
    AMPI_TRY(ampi_place_casts(m));
    AMPI_TRY(ampi_mark_paths(m));

    /* Memory: the bytes of each block are counted, then allocated, then given out in the same
       order. */
    AMPI_TRY(ampi_plan_arena(m));
    ampi_place_all(m);
    for (int i = 0; i < AMPI_BLOCK_COUNT; i++) AMPI_TRY(ampi_block_alloc(m, i));
    ampi_place_all(m);
    AMPI_TRY(ampi_init_values(m));
    m->unsummed = m->param_count;
    return m->param_count ? ampi_open_training(m) : AMP_OK;
}

/* Tells the logger what is allowed and rarely meant. */
AMPI_FN void ampi_remark_doubts(amp_model* m) {
    const amp_optimizer_desc* o = &m->desc.optimizer;

    /* Sizes in the order height, width, colours: 28, 28, 3. */
    for (int i = 0; i < m->input_count; i++) {
        const amp_layer* l = &m->inputs[i]->layer;
        const int has_colours = l->width == 3 || l->width == 4;
        if (has_colours && l->channels == l->height && l->height > l->width)
            ampi_remark(&m->op_logger,
                "'%s' has %d channels of %dx%d pixels: sizes and data are in the order channels, "
                "height, width", l->name, l->channels, l->height, l->width);
    }

    /* A softmax of a softmax, and one of a single number. */
    for (int i = 0; i < m->loss_count; i++) {
        const ampi_node *loss = m->losses[i], *x = ampi_source(loss->inputs[0]);
        if (!ampi_has_labels(loss)) continue;
        if (ampi_is(x, SOFTMAX))
            ampi_remark(&m->op_logger,
                "'%s' takes logits and has a softmax of its own: '%s' before it is one too many",
                loss->layer.name, x->layer.name);
        if (loss->classes == 1)
            ampi_remark(&m->op_logger, "'%s' has one class, so it is 0 whatever the logit: "
                "amp_bce_with_logits takes one logit for two classes", loss->layer.name);
    }

    if (o->kind != AMP_SGD && o->kind != AMP_RMSPROP && o->momentum != 0.0f)
        ampi_remark(&m->op_logger, "optimizer: momentum %g is for SGD, here only beta1 counts",
            (double)o->momentum);
    if ((o->kind == AMP_SGD || o->kind == AMP_RMSPROP) && o->beta1 > 0.0f)
        ampi_remark(&m->op_logger, "optimizer: beta1 %g is for Adam, here only momentum counts",
            (double)o->beta1);

    int split = !m->desc.split_masters || m->desc.inference || m->param_count == 0;
    int moves = !ampi_is_trainable(m) || m->param_count == 0;
    for (int i = 0; i < m->param_count; i++) {
        split |= m->params[i].rest != NULL;
        moves |= !m->groups[m->params[i].group].frozen;
    }
    if (!moves)
        ampi_remark(&m->op_logger, "model: all parameters are in frozen groups, so none moves");
    if (!split)
        ampi_remark(&m->op_logger,
            "model: split_masters splits nothing, as no weight with a master is in BF16");
}

/* Checks and allocates in ampi_finalize; a failure frees all that it allocated. */
AMP_DEF amp_result amp_model_finalize(amp_model* m) {
    if (!m) return AMP_ERR_ARGUMENT;
    AMPI_REFUSE(m->finalized, AMP_ERR_STATE, "amp_model_finalize: the model is finalized already");
    if (m->build_result != AMP_OK) return m->build_result;

    const amp_result r = ampi_finalize(m);
    if (r != AMP_OK) { ampi_unfinalize(m); return r; }
    m->finalized = 1;
    ampi_remark_doubts(m);
    return AMP_OK;
}

/* --- looking inside --- */
AMP_DEF int amp_model_layer_count(const amp_model* m) {
    return ampi_is_final(m) ? m->layer_count : 0;
}

AMP_DEF const amp_layer* amp_model_layer(const amp_model* m, int i) {
    const ampi_node* n = ampi_is_final(m) ? ampi_nth(m, i) : NULL;
    return n ? &n->layer : NULL;
}

AMP_DEF int amp_model_layer_of(const amp_model* m, amp_value v) {
    const ampi_node* n = m ? ampi_find(m, v) : NULL;
    return n ? n->number : AMPI_NONE;
}

/* The bytes of each of a model's blocks. */
AMP_DEF amp_result amp_model_memory(const amp_model* m, amp_memory* out) {
    AMPI_TRY(ampi_check_finalized(m, "amp_model_memory"));
    AMPI_REFUSE_NULL("amp_model_memory", out);
    const ampi_allocation* b = m->blocks;
    const amp_memory sizes = { b[AMPI_BLOCK_ARENA].bytes, b[AMPI_BLOCK_MASTERS].bytes,
        b[AMPI_BLOCK_LOW].bytes, b[AMPI_BLOCK_GRADS].bytes, b[AMPI_BLOCK_MOMENTS].bytes,
            b[AMPI_BLOCK_WORKSPACE].bytes, sizeof *m };
    *out = sizes;
    for (int i = 0; i < AMPI_BLOCK_COUNT; i++) out->total_bytes += b[i].bytes;
    AMPI_EACH_NODE(n)
        out->total_bytes += sizeof *n + n->constant_count * sizeof *n->constants;
    return AMP_OK;
}

AMP_DEF amp_param* amp_model_params(amp_model* m, int* count) {
    if (count) *count = ampi_is_final(m) ? m->param_count : 0;
    return ampi_is_final(m) ? m->params : NULL;
}

/* The parameter of that name, or NULL. */
AMP_DEF amp_param* amp_model_find_param(amp_model* m, const char* name) {
    for (int i = 0; ampi_is_final(m) && name && i < m->param_count; i++)
        if (strcmp(m->params[i].name, name) == 0) return &m->params[i];
    return NULL;
}

/* Refuses an array of values that is NULL, and a parameter that is not the model's. */
AMPI_FN amp_result ampi_check_param(amp_model* m, const amp_param* p, const void* values,
        const char* what) {
    AMPI_TRY(ampi_check_finalized(m, what));
    AMPI_REFUSE(!values, AMP_ERR_ARGUMENT, "%s: the array of values is NULL", what);
    for (int i = 0; i < m->param_count; i++) if (p == &m->params[i]) return AMP_OK;
    return ampi_model_fail(AMP_ERR_ARGUMENT, "%s: p is not a parameter of this model", what);
}

/* Copies a parameter to the host: its master, or its 16-bit weights widened. */
AMP_DEF amp_result amp_model_read_param(amp_model* m, const amp_param* p, float* out) {
    AMPI_TRY(ampi_check_param(m, p, out, "read param"));
    if (p->rest) return ampi_read_split(m, (const uint16_t*)p->low, p->rest, out, p->count);
    return p->master ? ampi_run(copy_out, out, p->master, p->count * sizeof *out)
                     : ampi_run(download, amp_f32(out), amp_ref_of(p->low, p->low_dtype), p->count);
}

/* The 16-bit weights, saturated, of values on the host or, if NULL, of the masters. */
AMPI_APART amp_result ampi_model_write_low(amp_model* m, const amp_param* p, const float* values) {
    float tile[4 * AMPI_BLOCK];
    uint16_t low[4 * AMPI_BLOCK];
    size_t n;
    for (size_t i = 0; i < p->count; i += n) {
        n = ampi_min_size(p->count - i, 4 * AMPI_BLOCK);
        if (values) memcpy(tile, values + i, n * sizeof *tile);
        else AMPI_RUN(copy_out, tile, p->master + i, n * sizeof *tile);
        ampi_store_saturated(low, p->low_dtype, tile, n);
        AMPI_RUN(copy_in, (uint16_t*)p->low + i, low, n * sizeof *low);
    }
    return AMP_OK;
}

/* Sets a parameter to values on the host: its master and its 16-bit weights. */
AMP_DEF amp_result amp_model_write_param(amp_model* m, const amp_param* p, const float* values) {
    AMPI_TRY(ampi_check_param(m, p, values, "write param"));
    if (p->rest) return ampi_write_split(m, (uint16_t*)p->low, p->rest, values, p->count);
    if (p->master) AMPI_RUN(copy_in, p->master, values, p->count * sizeof *values);
    return p->low ? ampi_model_write_low(m, p, values) : AMP_OK;
}

/* Writes the 16-bit copies of all masters. */
AMP_DEF amp_result amp_model_sync_params(amp_model* m) {
    AMPI_TRY(ampi_check_finalized(m, "amp_model_sync_params"));
    for (const amp_param* p = m->params; p < m->params + m->param_count; p++)
        if (p->master && p->low) AMPI_TRY(ampi_model_write_low(m, p, NULL));
    return AMP_OK;
}

/* Reads the scaler and optimizer back from the backend, if steps ran since. */
AMPI_FN amp_result ampi_refresh(amp_model* m) {
    amp_result r = m->stale ? ampi_run(training_read, &m->training) : AMP_OK;
    m->stale = 0;
    return r;
}

AMP_DEF amp_scaler* amp_model_scaler(amp_model* m) {
    if (!ampi_is_final(m)) return NULL;
    ampi_refresh(m);
    return &m->training.scaler;
}

AMP_DEF amp_optimizer* amp_model_optimizer(amp_model* m) {
    if (!ampi_is_final(m) || !m->param_count) return NULL;
    ampi_refresh(m);
    return &m->training.optimizer;
}

AMP_DEF amp_scaler* amp_model_loss_scaler(amp_model* m, amp_value loss) {
    const ampi_node* n = ampi_is_final(m) && m->own_scalers ? ampi_find(m, loss) : NULL;
    return n && ampi_is_loss(n) ? &m->loss_scalers[n->index] : NULL;
}

AMP_DEF const amp_policy* amp_model_policy(const amp_model* m) { return m ? &m->policy : NULL; }

/* --- what a checkpoint needs --- */
/* A hash of a pass's arithmetic, weights and batch size aside: operators, wiring, types,
   settings. */
AMPI_FN uint64_t ampi_model_fingerprint(const amp_model* m) {
    uint64_t h = AMPI_HASH_START;
    AMPI_EACH_NODE(n) {
        const amp_layer* l = &n->layer;
        const int numbers[] = { (int)l->op, (int)l->compute_dtype, (int)l->storage_dtype,
            (int)l->param_dtype, l->channels, l->height, l->width, n->group,
                n->inputs[0] ? n->inputs[0]->number : AMPI_NONE,
            n->inputs[1] ? n->inputs[1]->number : AMPI_NONE };
        const float settings[] = { n->p, n->norm.eps, n->norm.momentum, n->loss_weight,
            n->smoothing };
        amp_conv2d_shape conv = n->conv;
        amp_pool2d_shape pool = n->pool;
        conv.n = pool.n = 0;  /* the batch size */
        if (l->op == AMPI_OP_CAST) continue;

        /* Of shapes, which are ints only, all but pad_end: that shows in the output's size. Fields
           that are younger than checkpoints, frozen and scale, count where they are set. */
        h = ampi_hash_words(h, numbers, AMPI_LENGTH(numbers));
        for (int j = 2; j < n->input_count; j++)
            h = ampi_hash_words(h, &n->inputs[j]->number, 1);
        h = ampi_hash_words(h, settings, AMPI_LENGTH(settings));
        if (n->shares_params) h = ampi_hash_words(h, n->params, 1);
        if (n->norm.frozen) h = ampi_hash_words(h, &n->norm.frozen, 1);
        if (l->positions > 1) h = ampi_hash_words(h, &l->positions, 1);
        if (n->labels && n->classes < ampi_logits(n)) {
            const int classes = (int)n->classes;
            h = ampi_hash_words(h, &classes, 1);
        }
        h = ampi_hash_words(h, &conv, offsetof(amp_conv2d_shape, pad_end_h) / 4);
        h = ampi_hash_words(h, &pool, offsetof(amp_pool2d_shape, pad_end_h) / 4);
        if (n->reading.scale != 0.0f) h = ampi_hash_words(h, &n->reading.scale, 1);
        if (n->constants) h = ampi_hash_words(h, n->constants, n->constant_count);
        if (n->ignores) h = ampi_hash_words(h, &n->ignored, 1);
    }
    return h;
}

/* Shape of a parameter: conv2d weight [O,C/groups,KH,KW], of a transposed one [C,O/groups,KH,KW],
   linear weight [O,I], embedding weight [V,D] or [T,D], others [count]. */
AMPI_FN void ampi_param_shape(const amp_model* m, int param, int* rank, size_t shape[4]) {
    const ampi_node* n = m->first;
    while (n && n->params[0] != param) n = n->next;
    *rank = !n || n->row->kind != AMPI_KIND_MATRIX ? 1 : ampi_is_dense(n) ? 2 : 4;
    shape[0] = *rank == 2 ? n->fan_out : m->params[param].count;
    if (*rank == 2) shape[1] = n->fan_in;
    if (*rank < 4) return;
    const amp_conv2d_shape* s = &n->conv;
    const int transposed = ampi_is(n, CONV_TRANSPOSE2D);
    shape[0] = (size_t)(transposed ? s->channels : n->layer.channels);
    shape[1] = (size_t)((transposed ? s->out_channels : s->channels) / s->groups);
    shape[2] = (size_t)s->kernel_h;
    shape[3] = (size_t)s->kernel_w;
}

/* >>impl-train  The step: forward, losses, backward, check, update; evaluation and training over
   data sets.
   Words. pass: one batch through the graph. micro-batch: one of several that make a step. feed:
   a data set, gathered batch by batch. The one call to a later room is that of a fit, which
   saves a checkpoint. */

AMPI_NAMES(amp_outcome_name, amp_outcome,
        "applied\0accumulated\0skipped: overflow\0skipped: model\0")

/* Positions of n in a batch that gives its sequences so many; 0 = all. */
AMPI_FN size_t ampi_positions(const ampi_node* n, int given) {
    return (size_t)(n->is_sequence && given ? given : n->layer.positions);
}

/* Those of the model's sequences, by the first; 1 without one. */
AMPI_FN size_t ampi_batch_positions(const amp_model* m, int given) {
    for (int i = 0; i < m->input_count; i++)
        if (m->inputs[i]->is_sequence) return ampi_positions(m->inputs[i], given);
    return 1;
}

/* Begins a pass over a batch: its size is written to the layers' shapes. The first micro-batch of a
   step overwrites the weight gradients, later ones add. */
AMPI_FN void ampi_start_pass(amp_model* m, const amp_batch* b, int training) {
    AMPI_CLEAR(m->pass);
    m->pass.data = *b;
    m->pass.batch = &m->pass.data;
    m->pass.samples = (size_t)b->n;
    m->pass.training = training;
    m->pass.accumulate = m->micro > 0 ? AMP_ACCUMULATE_PARAMS : 0;
    m->pass.grad_factor = (float)(1.0 / ((double)m->desc.accumulate * m->comm.size));
    m->holds_values = m->holds_grads = 0;
    AMPI_EACH_NODE(n) {
        n->conv.n = n->pool.n = n->norm.n = b->n;
        n->rows = (size_t)b->n * ampi_positions(n, b->positions);
    }
    for (int i = 0; b->lengths && i < b->n; i++) {
        m->pass.counted += (size_t)b->lengths[i];
        m->pass.has_lengths |= (size_t)b->lengths[i] < ampi_batch_positions(m, b->positions);
    }
}

/* What n reads of its parameter k: the low copy, or the master. An embedding in FP32 may have both,
   see ampi_kept_dtype. */
AMPI_FN amp_ref ampi_weights(const amp_model* m, const ampi_node* n, int k) {
    if (n->params[k] == AMPI_NONE) return AMP_NONE;
    const amp_param* p = &m->params[n->params[k]];
    const int in_f32 = ampi_is(n, EMBEDDING) && n->layer.param_dtype == AMP_F32;
    return p->low && !in_f32 ? amp_ref_of(p->low, p->low_dtype) : amp_f32(p->master);
}

/* What an optimizer trains: the masters, or without them the low weights. */
AMPI_FN amp_ref ampi_trained(const amp_param* p) {
    return p->master ? amp_f32(p->master) : amp_ref_of(p->low, p->low_dtype);
}

/* The gradient of parameter number `param`; its data is NULL while the parameter is frozen. */
AMPI_FN amp_ref ampi_weight_grad(const amp_model* m, int param) {
    if (param == AMPI_NONE) return AMP_NONE;
    return amp_ref_of(m->params[param].grad, m->params[param].grad_dtype);
}

/* Of a norm: the variance of the batch for each channel (batch norm, which has running statistics)
   or row (layer norm). It lies behind as many means. */
AMPI_FN float* ampi_variance(const amp_model* m, const ampi_node* n) {
    return n->stats + (n->running ? (size_t)n->layer.channels : ampi_most_rows(m, n));
}

/* Dropout of a value in training, or of its gradient, which needs the same random numbers; else a
   copy. Each layer has a stream, whose position counts elements over all passes and ranks: k
   micro-batches, or k ranks, draw what one batch of k times the size would. */
AMPI_FN amp_result ampi_run_dropout(amp_model* m, const ampi_node* n, amp_ref x, amp_ref y) {
    const amp_training* t = &m->training;
    const size_t count = n->rows * n->features;
    if (!m->pass.training) return x.data == y.data ? AMP_OK : ampi_run(convert, y, x, count);

    /* Elements of a rank in a pass, and of all ranks. A backend with a position of its own counts
       passes there. */
    const uint64_t each = (uint64_t)n->features * (uint64_t)ampi_most_rows(m, n);
    const uint64_t stride = each * (uint64_t)m->comm.size;
    const uint64_t offset = each * (uint64_t)m->comm.rank + (t->position ? 0 : t->passes * stride);
    return ampi_run(dropout_forward, x, y, count, n->p, ampi_stream(m, -2 - n->number), offset,
        t->position, stride);
}

/* Do the gradients of n's parameters add to what is there: of an earlier micro-batch, or of a later
   node that shares them? */
AMPI_FN int ampi_adds_grads(const amp_model* m, const ampi_node* n) {
    return n->adds_grads ? AMP_ACCUMULATE_PARAMS : m->pass.accumulate;
}

/* Calls a custom operator's forward function or, where dx lists the gradients of its inputs (NULL =
   not wanted), backward. */
AMPI_FN amp_result ampi_run_custom(amp_model* m, const ampi_node* n, void* const* dx) {
    const amp_custom_desc* d = &n->custom->desc;
    amp_custom_call c;
    AMPI_CLEAR(c);
    c.n = (int)m->pass.samples;
    c.positions = (int)(n->reads[0]->rows / m->pass.samples);
    c.lengths = m->pass.has_lengths ? m->lengths : NULL;
    c.training = m->pass.training;
    c.dtype = n->layer.compute_dtype;
    c.y = ampi_output_of(n);
    c.saved = n->saved;
    c.exec = &m->exec;
    c.user_data = d->user_data;
    for (int j = 0; j < n->input_count; j++) c.x[j] = ampi_output_of(n->reads[j]);
    for (int k = 0; k < d->param_count; k++) c.w[k] = ampi_weights(m, n, k);
    if (dx) {
        c.dy = ampi_gradient_of(n);
        c.add_dw = ampi_adds_grads(m, n) != 0;
        for (int j = 0; j < n->input_count; j++)
            if (dx[j]) c.dx[j] = amp_ref_of(dx[j], c.dtype);
        for (int k = 0; k < d->param_count; k++) c.dw[k] = ampi_weight_grad(m, n->params[k]);
    }

    const amp_result r = (dx ? d->backward : d->forward)(&c);
    if (r == AMP_OK) return AMP_OK;
    return ampi_model_fail(r, "layer '%s': its %s function says: %s", n->layer.name,
        dx ? "backward" : "forward", amp_result_string(r));
}

/* --- forward --- */
/* Does the backend compute the ReLU behind n with n, in n's place? Then nobody sees n's own output:
   it must have no other reader, and a pass that observes outputs must see each. */
AMPI_FN int ampi_takes_relu(const amp_model* m, const ampi_node* n) {
    const ampi_node* next = n->next;
    const int offered = (ampi_is(n, LINEAR) && m->backend->linear_relu_forward)
                        || (ampi_is(n, CONV2D) && m->backend->conv2d_relu_forward);
    return offered && !m->pass.observed && next && ampi_is(next, RELU) && next->layer.in_place
           && next->reads[0] == n;
}

/* Does row `row` of n count, or does it lie beyond its sample's length? */
AMPI_FN int ampi_counts(const amp_model* m, const ampi_node* n, size_t row) {
    const size_t positions = n->rows / m->pass.samples;
    return !n->is_sequence || !m->pass.has_lengths
        || row % positions < (size_t)m->pass.data.lengths[row / positions];
}

/* Is there a label that does not count: the desc's, or that of positions beyond lengths? */
AMPI_FN int ampi_ignores(const amp_model* m, const ampi_node* loss) {
    return loss->ignores || (m->pass.has_lengths && loss->is_sequence);
}

/* What a cross-entropy's functions want to know of it. */
AMPI_FN amp_cross_entropy_desc ampi_cross_entropy_of(const amp_model* m, const ampi_node* n) {
    const amp_cross_entropy_desc d = { n->smoothing, n->labels > 1 ? 0 : ampi_logits(n),
        ampi_ignores(m, n) ? &n->ignored : NULL, n->reading.constants, n->labels };
    return d;
}

/* Counts a loss's predictions, and the right ones, before later layers overwrite its logits. A
   cross-entropy has one for each label but those it ignores: the largest logit, the first of
   equals, is at the label. A BCE has one an element: the logit is > 0 as the target is > 1/2. No
   prediction with a NaN is right. */
AMPI_FN amp_result ampi_count_right(amp_model* m, const ampi_node* loss) {
    const ampi_node* logits = loss->reads[0];
    const int has_labels = ampi_has_labels(loss);
    const size_t width = has_labels ? ampi_logits(loss) : 1;  /* logits of a prediction */
    const size_t classes = has_labels ? loss->classes : 1;
    const size_t count = logits->rows * logits->features / width;
    const size_t at_once = has_labels ? ampi_rows_at_once(loss) : AMPI_BLOCK;
    float tile[2 * AMPI_BLOCK], *x = has_labels ? m->rows : tile;
    float* targets = x + at_once * width;  /* or int32 labels, of the same size */
    size_t n;

    for (size_t i = 0; i < count; i += n) {
        n = ampi_min_size(count - i, at_once);
        const int maps = has_labels && loss->labels > 1;
        const size_t step = maps ? n : 1;  /* from a prediction's logit to its next */
        AMPI_RUN(download, amp_f32(x), ampi_from(ampi_output_of(logits), i * width), n * width);
        AMPI_RUN(copy_out, targets, (const float*)loss->target + i, n * sizeof *targets);
        for (size_t j = 0; j < n; j++) {
            const uint32_t label = ampi_bits_at(&targets[j]);
            const float* row = x + (maps ? j : j * width);
            size_t best = 0;
            if (has_labels ? ampi_ignores(m, loss) && label == (uint32_t)loss->ignored
                : !ampi_counts(m, logits, (i + j) / logits->features)) continue;
            for (size_t k = 1; k < classes; k++)
                if (row[k * step] > row[best * step]) best = k;
            const int right = has_labels ? best == label
                : (*row > 0.0f) == (targets[j] > 0.5f);
            m->pass.told->correct += right && !amp_is_nan(amp_f32(&row[best * step]));
            m->pass.told->predictions++;
        }
    }
    return AMP_OK;
}

/* The mean of loss n, one by elements, over `count` elements from `at` on. */
AMPI_FN amp_result ampi_elements_loss(amp_model* m, const ampi_node* n, size_t at, size_t count,
        float* loss) {
    const amp_backend* f = m->backend;
    const amp_exec* e = &m->exec;
    const amp_ref x = ampi_from(ampi_output_of(n->reads[0]), at);
    const amp_ref target = amp_f32((const float*)n->target + at);
    if (ampi_is(n, MSE)) return f->mse_forward(x, target, loss, count, e);
    if (ampi_is(n, MEAN)) return f->mean_forward(x, x, loss, count, e);
    return f->bce_with_logits_forward(x, target, loss, count, e);
}

/* Does loss n, one by elements, leave out positions? Then it runs sample by sample. */
AMPI_FN int ampi_is_by_sample(const amp_model* m, const ampi_node* n) {
    return !ampi_has_labels(n) && m->pass.has_lengths && n->is_sequence;
}

/* The mean of loss n over its batch, to its number among m->loss_values. By samples it is the
   product of their shares and their means. */
AMPI_FN amp_result ampi_loss_value(amp_model* m, const ampi_node* n) {
    const ampi_node* in = n->reads[0];
    float* loss = &m->loss_values[n->index];
    if (ampi_has_labels(n)) {
        const amp_cross_entropy_desc d = ampi_cross_entropy_of(m, n);
        return ampi_run(softmax_cross_entropy_forward, ampi_output_of(in),
            (const int32_t*)n->target, &d, loss, in->rows * n->labels, n->classes);
    }
    const size_t each = in->rows * in->features / m->pass.samples;  /* elements of a sample */
    if (!ampi_is_by_sample(m, n)) return ampi_elements_loss(m, n, 0, each * m->pass.samples, loss);

    float *shares = (float*)(m->lengths + m->desc.batch), *means = shares + m->desc.batch;
    for (size_t i = 0; i < m->pass.samples; i++)
        AMPI_TRY(ampi_elements_loss(m, n, i * each,
            (size_t)m->pass.data.lengths[i] * in->features, &means[i]));
    amp_gemm_shape s;
    AMPI_CLEAR(s);
    s.m = s.n = 1;
    s.k = m->pass.samples;
    return ampi_run(gemm, &s, 1.0f, amp_f32(shares), amp_f32(means), 0.0f, amp_f32(loss));
}

/* The value y of a norm n. The statistics of the batch lie at n->stats: means, then variances;
   behind running means lie running variances. */
AMPI_FN amp_result ampi_forward_norm(amp_model* m, const ampi_node* n, amp_ref x, amp_ref w,
        amp_ref b, amp_ref y) {
    float *mean = n->stats, *variance = ampi_variance(m, n);
    amp_batch_norm_shape norm = n->norm;
    if (ampi_is(n, LAYER_NORM))
        return ampi_run(layer_norm_forward, x, w, b, norm.eps, mean, variance, y, n->rows,
            n->features);
    if (ampi_is(n, RMS_NORM))
        return ampi_run(rms_norm_forward, x, w, norm.eps, variance, y, n->rows, n->features);
    if (m->pass.looking) norm.momentum = AMP_ZERO;  /* running statistics stay */
    return ampi_run(batch_norm_forward, &norm, m->pass.training, x, w, b, n->running,
        n->running + norm.channels, mean, variance, y);
}

/* The gradients of a norm n; with statistics as forward left them, eps is not read. */
AMPI_FN amp_result ampi_backward_norm(amp_model* m, const ampi_node* n, amp_ref dy, amp_ref x,
        amp_ref w, amp_ref dx, amp_ref dw, amp_ref db) {
    const float *mean = n->stats, *variance = ampi_variance(m, n);
    const int add = ampi_adds_grads(m, n);
    if (ampi_is(n, LAYER_NORM))
        return ampi_run(layer_norm_backward, dy, x, w, 0.0f, mean, variance, dx, dw, db, add,
            n->rows, n->features);
    if (ampi_is(n, RMS_NORM))
        return ampi_run(rms_norm_backward, dy, x, w, 0.0f, variance, dx, dw, add, n->rows,
            n->features);
    return ampi_run(batch_norm_backward, &n->norm, dy, x, w, mean, variance, dx, dw, db, add);
}

/* The value y of an operator of sequences. Positions are added sample by sample: they are rows of
   w. */
AMPI_FN amp_result ampi_forward_sequence(amp_model* m, const ampi_node* n, amp_ref x, amp_ref w,
        amp_ref y) {
    const size_t count = n->rows * n->features, each = count / m->pass.samples;
    if (ampi_is(n, EMBEDDING))
        return ampi_run(embedding_forward, (const int32_t*)x.data, w, y, n->rows, n->fan_out,
            n->features);
    for (size_t i = 0; i < count; i += each)
        AMPI_RUN(add_forward, ampi_from(x, i), w, ampi_from(y, i), each);
    return AMP_OK;
}

/* The case of an activation, by its name in AMP_ACTIVATION_LIST, with locals of the function
   below. */
#define AMPI_CASE_FORWARD(NAME, ...) \
    case AMP_OP_##NAME: return f->activation_forward(AMP_##NAME, x, y, count, e);
/* Computes the value y of node n, from its input x (and a second one), weights w and bias b.
   relu: n is a product that computes the ReLU behind it, too. Counts: rows are samples times
   positions, count is the elements of y. */
AMPI_FN amp_result ampi_forward_node(amp_model* m, const ampi_node* n, int relu) {
    const amp_backend* f = m->backend;
    const amp_exec* e = &m->exec;
    const ampi_node *in = n->reads[0], *second = n->reads[1];
    if (!in) return AMP_OK;  /* ampi_load_inputs has filled it */
    const amp_ref x = ampi_output_of(in), y = ampi_output_of(n);
    const amp_ref w = ampi_weights(m, n, AMPI_WEIGHT);
    const amp_ref b = ampi_weights(m, n, AMPI_BIAS);
    const size_t rows = n->rows, count = rows * n->features;

    switch (n->layer.op) {
        case AMP_OP_INPUT: case AMP_OP_FLATTEN: return AMP_OK;  /* flatten is its input */
        case AMP_OP_CONV2D:
            return (relu ? f->conv2d_relu_forward : f->conv2d_forward)(&n->conv, x, w, b, y, e);
        case AMP_OP_CONV_TRANSPOSE2D: return f->conv_transpose2d_forward(&n->conv, x, w, b, y, e);
        case AMP_OP_LINEAR:
            return (relu ? f->linear_relu_forward : f->linear_forward)(x, w, b, y, rows,
                in->features, n->features, e);
        case AMP_OP_MAX_POOL2D: case AMP_OP_AVG_POOL2D:
            return f->pool2d_forward(&n->pool, x, y, e);
        case AMP_OP_UPSAMPLE:  /* the gradient of a pool of sums, which turns y's shape into x's */
            return f->pool2d_backward(&n->pool, x, AMP_NONE, y, 0 /* accumulate */, e);
        case AMP_OP_BATCH_NORM: case AMP_OP_LAYER_NORM: case AMP_OP_RMS_NORM:
            return ampi_forward_norm(m, n, x, w, b, y);
        AMP_ACTIVATION_LIST(AMPI_CASE_FORWARD)
        case AMP_OP_LEAKY_RELU: return f->leaky_relu_forward(x, y, count, n->p, e);
        case AMP_OP_SOFTMAX: return f->softmax_forward(x, y, rows, n->features, e);
        case AMP_OP_DROPOUT: return ampi_run_dropout(m, n, x, y);
        case AMP_OP_ADD: return f->add_forward(x, ampi_output_of(second), y, count, e);
        case AMP_OP_MUL:
            return f->mul_forward(x, ampi_output_of(second), y, count,
                n->features / second->features, e);
        case AMP_OP_CONCAT:
            /* The second input's features begin behind those of the first. */
            AMPI_TRY(f->concat_forward(x, in->features, y, n->features, 0, rows, e));
            return f->concat_forward(ampi_output_of(second), second->features, y, n->features,
                in->features, rows, e);
        case AMP_OP_EMBEDDING: case AMP_OP_POSITION_EMBEDDING:
            return ampi_forward_sequence(m, n, x, w, y);
        case AMP_OP_SOFTMAX_CROSS_ENTROPY: case AMP_OP_MSE: case AMP_OP_BCE_WITH_LOGITS:
        case AMP_OP_MEAN: return ampi_loss_value(m, n);
        case AMP_OP_CUSTOM: return ampi_run_custom(m, n, NULL /* forward */);
    }
    return f->convert(y, x, count, e);  /* AMPI_OP_CAST, which no user can name */
}

/* Adds statistics of n elements x in the backend's memory to *out. */
AMPI_FN amp_result ampi_collect(amp_model* m, amp_stats* out, amp_ref x, size_t n) {
    float tile[AMPI_BLOCK];
    for (size_t at = 0; at < n; at += AMPI_BLOCK) {
        const size_t k = ampi_min_size(n - at, AMPI_BLOCK);
        AMPI_RUN(download, amp_ref_of(tile, x.dtype), ampi_from(x, at), k);
        amp_stats_collect(out, tile, x.dtype, k, m->policy.low_dtype, 1);
    }
    return AMP_OK;
}

/* Where the pass observes layers: statistics of a layer's output, or (is_gradient) of that output's
   gradient, for amp_model_stats. Casts and losses are left out. */
AMPI_FN amp_result ampi_observe(amp_model* m, const ampi_node* n, int is_gradient) {
    if (!m->pass.observed || n->layer.op == AMPI_OP_CAST || ampi_is_loss(n) || ampi_is_tokens(n))
        return AMP_OK;
    amp_layer_stats* to = &m->pass.observed[n->number];
    return ampi_collect(m, is_gradient ? &to->output_gradient : &to->output, is_gradient
        ? ampi_gradient_of(n) : ampi_output_of(n), n->rows * n->features);
}

/* May a pass for the losses leave n out: a head that only predictions use? */
AMPI_FN int ampi_is_idle(const amp_model* m, const ampi_node* n) {
    return !n->on_loss_path && !m->pass.observed;
}

/* Runs the nodes up to and with `last`: the losses and what leads to them, or all but the losses.
   Predictions are counted where the pass has somewhere to count them. */
AMPI_FN amp_result ampi_forward(amp_model* m, const ampi_node* last, int with_losses) {
    for (const ampi_node* n = m->first; n && n->time <= last->time; n = n->next) {
        if (with_losses ? ampi_is_idle(m, n) : ampi_is_loss(n)) continue;
        const int relu = n != last && ampi_takes_relu(m, n);
        AMPI_TRY(ampi_forward_node(m, n, relu));
        AMPI_TRY(ampi_observe(m, n, 0 /* output */));
        if (m->pass.told && (ampi_has_labels(n) || ampi_is(n, BCE_WITH_LOGITS)))
            AMPI_TRY(ampi_count_right(m, n));
        if (relu) n = n->next;
    }
    return AMP_OK;
}

/* --- backward --- */
/* The gradient of loss n, one by elements, over `count` elements from `at` on, into those of dx. */
AMPI_FN amp_result ampi_elements_gradient(amp_model* m, const ampi_node* n, size_t at, size_t count,
        float share, amp_ref dx) {
    const amp_backend* f = m->backend;
    const amp_exec* e = &m->exec;
    const amp_ref x = ampi_from(ampi_output_of(n->reads[0]), at), to = ampi_from(dx, at);
    const amp_ref target = amp_f32((const float*)n->target + at);
    const float* scale = m->training.loss_scale;
    if (ampi_is(n, MSE)) return f->mse_backward(x, target, scale, share, to, count, e);
    if (ampi_is(n, MEAN)) return f->mean_backward(x, x, scale, share, to, count, e);
    return f->bce_with_logits_backward(x, target, scale, share, to, count, e);
}

/* dx, the gradient of loss n's input: it begins with the loss scale and n's own share in the step's
   sum, which is 0 in a pass of another loss. What has no loss gets 0 first. */
AMPI_FN amp_result ampi_loss_gradient(amp_model* m, const ampi_node* n, amp_ref dx) {
    const ampi_node* in = n->reads[0];
    const size_t count = in->rows * in->features;
    const int is_wanted = !m->pass.only || m->pass.only == n, by_sample = ampi_is_by_sample(m, n);
    const float share = is_wanted ? n->loss_weight * m->pass.grad_factor : 0.0f;
    if (by_sample || (ampi_has_labels(n) && n->classes < ampi_logits(n)))
        AMPI_RUN(zero, dx.data, count * ampi_type_size(dx.dtype));
    if (ampi_has_labels(n)) {
        const amp_cross_entropy_desc d = ampi_cross_entropy_of(m, n);
        return ampi_run(softmax_cross_entropy_backward, ampi_output_of(in),
            (const int32_t*)n->target, &d, m->training.loss_scale, share, dx, in->rows * n->labels,
            n->classes);
    }
    if (!by_sample) return ampi_elements_gradient(m, n, 0, count, share, dx);

    for (size_t i = 0; i < m->pass.samples; i++) {
        const size_t length = (size_t)m->pass.data.lengths[i];
        AMPI_TRY(ampi_elements_gradient(m, n, i * (count / m->pass.samples), length * in->features,
            share * (float)((double)length / (double)m->pass.counted), dx));
    }
    return AMP_OK;
}

/* dw of a position embedding: the sum of dy over samples, as of the bias of a dense layer on rows
   of all positions. Those beyond the batch's have 0. */
AMPI_FN amp_result ampi_positions_gradient(amp_model* m, const ampi_node* n, amp_ref dy, amp_ref dw,
        int add) {
    const size_t each = n->rows * n->features / m->pass.samples, all = n->fan_in * n->fan_out;
    if (!dw.data) return AMP_OK;
    if (!add && each < all)
        AMPI_RUN(zero, ampi_mutable(ampi_from(dw, each).data),
            (all - each) * ampi_type_size(dw.dtype));
    return ampi_run(linear_backward, dy, dy, dy, AMP_NONE, AMP_NONE, dw, add, m->pass.samples, 1,
        each);
}

/* The gradients of an operator of sequences: dx, if its data is not NULL, and dw. */
AMPI_FN amp_result ampi_backward_sequence(amp_model* m, const ampi_node* n, amp_ref dy, amp_ref dx,
        amp_ref dw) {
    const int add = ampi_adds_grads(m, n);
    if (ampi_is(n, EMBEDDING))
        return ampi_run(embedding_backward, dy, (const int32_t*)n->reads[0]->data, dw, add, n->rows,
            n->fan_out, n->features);
    AMPI_TRY(ampi_positions_gradient(m, n, dy, dw, add));
    if (!dx.data || dx.data == dy.data) return AMP_OK;
    return ampi_run(convert, dx, dy, n->rows * n->features);
}

/* As AMPI_CASE_FORWARD; dx is written, not added to. */
#define AMPI_CASE_BACKWARD(NAME, ...) case AMP_OP_##NAME: \
    return f->activation_backward(AMP_##NAME, dy, saved, dx, 0, count, e);
/* From dy, the gradient of node n's output: dx, that of its input number j, into `to` if not NULL,
   and those of its weights (dw) and bias (db). `add` adds dw and db to those of earlier
   micro-batches. saved: the value that the operator's backward function reads, n's input or its
   output. rows are samples times positions, count is the elements of dx. A custom operator's turn
   comes in ampi_backward, for all its inputs. */
AMPI_FN amp_result ampi_backward_input(amp_model* m, const ampi_node* n, int j, void* to) {
    const amp_backend* f = m->backend;
    const amp_exec* e = &m->exec;
    const ampi_node* in = n->reads[j];
    if (!to && n->params[0] == AMPI_NONE) return AMP_OK;  /* nothing is wanted */
    const int from_input = n->row->reads == AMPI_READS_INPUT, add = ampi_adds_grads(m, n);
    const amp_ref dy = ampi_gradient_of(n), dx = amp_ref_of(to, ampi_stored(in));
    const amp_ref saved = ampi_output_of(from_input ? in : n);
    const amp_ref w = ampi_weights(m, n, AMPI_WEIGHT);
    const amp_ref dw = ampi_weight_grad(m, n->params[AMPI_WEIGHT]);
    const amp_ref db = ampi_weight_grad(m, n->params[AMPI_BIAS]);
    const size_t rows = n->rows, count = in->rows * in->features;

    switch (n->layer.op) {
        case AMP_OP_INPUT: case AMP_OP_FLATTEN: case AMP_OP_CUSTOM: return AMP_OK;  /* as above */
        case AMP_OP_ADD: break;
        case AMP_OP_CONV2D:
            return f->conv2d_backward(&n->conv, dy, saved, w, dx, dw, db, add, e);
        case AMP_OP_CONV_TRANSPOSE2D:
            return f->conv_transpose2d_backward(&n->conv, dy, saved, w, dx, dw, db, add, e);
        case AMP_OP_LINEAR:
            return f->linear_backward(dy, saved, w, dx, dw, db, add, rows, in->features,
                n->features, e);
        case AMP_OP_MAX_POOL2D: case AMP_OP_AVG_POOL2D:
            return f->pool2d_backward(&n->pool, dy, from_input ? saved : AMP_NONE, dx,
                0 /* accumulate */, e);
        case AMP_OP_UPSAMPLE: return f->pool2d_forward(&n->pool, dy, dx, e);
        case AMP_OP_BATCH_NORM: case AMP_OP_LAYER_NORM: case AMP_OP_RMS_NORM:
            return ampi_backward_norm(m, n, dy, saved, w, dx, dw, db);
        AMP_ACTIVATION_LIST(AMPI_CASE_BACKWARD)
        case AMP_OP_LEAKY_RELU:
            return f->leaky_relu_backward(dy, saved, dx, 0 /* accumulate */, count, n->p, e);
        case AMP_OP_SOFTMAX:
            return f->softmax_backward(dy, saved, dx, 0 /* accumulate */, rows, n->features, e);
        case AMP_OP_DROPOUT: return ampi_run_dropout(m, n, dy, dx);
        case AMP_OP_MUL:
            return f->mul_backward(dy, ampi_output_of(n->reads[0]), ampi_output_of(n->reads[1]),
                j ? AMP_NONE : dx, j ? dx : AMP_NONE, 0 /* accumulate */, rows * n->features,
                n->features / n->reads[1]->features, e);
        case AMP_OP_CONCAT:
            /* The second input's features lie last in a row of dy. */
            return f->concat_backward(dy, n->features, j ? n->features - in->features : 0, dx,
                in->features, rows, 0 /* accumulate */, e);
        case AMP_OP_EMBEDDING: case AMP_OP_POSITION_EMBEDDING:
            return ampi_backward_sequence(m, n, dy, dx, dw);
        case AMP_OP_SOFTMAX_CROSS_ENTROPY: case AMP_OP_MSE: case AMP_OP_BCE_WITH_LOGITS:
        case AMP_OP_MEAN: return ampi_loss_gradient(m, n, dx);
    }
    return f->convert(dx, dy, count, e);  /* a sum hands its gradient to both; AMPI_OP_CAST */
}

/* Writes the gradients of outputs, from `seeds` or, where there is none, as 0. The loss scale
   multiplies before the rounding to 16 bits. */
AMPI_FN amp_result ampi_load_seeds(amp_model* m, const amp_seeds* seeds) {
    amp_reading how;
    AMPI_CLEAR(how);
    if (seeds && !seeds->scaled) {
        AMPI_TRY(ampi_refresh(m));
        how.scale = m->pass.grad_factor * (m->pass.only ? *m->training.loss_scale
            : m->training.scaler.state.scale_in_use);
    }
    for (int i = 0; i < m->output_count; i++) {
        const ampi_node* n = m->outputs[i];
        const size_t count = n->rows * n->features;
        const amp_ref to = ampi_gradient_of(n), from = seeds ? seeds->gradients[i] : AMP_NONE;
        if (!n->wants_grad) continue;
        if (from.data) AMPI_RUN(load, to, from, count, !seeds->on_device, &how);
        else AMPI_RUN(zero, to.data, count * ampi_type_size(to.dtype));
    }
    return AMP_OK;
}

/* --- gradients of ranks --- */
/* AMP_OK, or the error of a hook that was to sum `what`. */
AMPI_FN amp_result ampi_summed(amp_model* m, amp_result r, const char* what) {
    if (r == AMP_OK) return AMP_OK;
    return ampi_model_fail(AMP_ERR_COMM, "train step: the sum of %s over the ranks failed", what);
}

/* Where the gradient of parameter i begins, or all gradients end. */
AMPI_FN char* ampi_gradient_begin(const amp_model* m, int i) {
    const ampi_allocation* grads = &m->blocks[AMPI_BLOCK_GRADS];
    return i < m->param_count ? (char*)m->grad_list[i].data : grads->base + grads->bytes;
}

/* Sums over the ranks, or begins to, the gradients from parameter `first` on, up to those begun
   before: all between two frozen ones in one call, with the bytes that align them. */
AMPI_FN amp_result ampi_sum_gradients(amp_model* m, int first) {
    const amp_comm* c = &m->comm;
    const amp_dtype t = ampi_dtype_or_f32(m->desc.grad_dtype);
    const int to = m->unsummed;
    int end;  /* the next frozen parameter */
    m->unsummed = first;
    for (int i = first; i < to; i = end + 1) {
        char* from = ampi_gradient_begin(m, i);
        for (end = i; end < to && m->grad_list[end].count; end++) continue;
        if (end == i) continue;
        const size_t count = (size_t)(ampi_gradient_begin(m, end) - from) / ampi_type_size(t);
        AMPI_TRY(ampi_summed(m,
            (c->start ? c->start : c->all_reduce_sum)(from, t, count, m->exec.stream, c->user_data),
            "the gradients"));
    }
    return AMP_OK;
}

/* Waits for the sums of gradients that began. */
AMPI_FN amp_result ampi_end_sums(amp_model* m) {
    const int began = m->unsummed < m->param_count;
    m->unsummed = m->param_count;
    if (!began || !m->comm.wait) return AMP_OK;
    return ampi_summed(m, m->comm.wait(m->exec.stream, m->comm.user_data), "the gradients");
}

/* Begins sums after the backward pass of n, if those not begun have enough bytes. Parameters are
   numbered as built, so all from n's own on are complete, though later nodes use them again. */
AMPI_FN amp_result ampi_start_sums(amp_model* m, const ampi_node* n) {
    const size_t least = m->comm.start_bytes ? m->comm.start_bytes : (size_t)1 << 20;
    const int first = n->params[0];
    if (first == AMPI_NONE || n->shares_params) return AMP_OK;

    const char *from = ampi_gradient_begin(m, first), *to = ampi_gradient_begin(m, m->unsummed);
    return (size_t)(to - from) < least ? AMP_OK : ampi_sum_gradients(m, first);
}

/* --- backward --- */
/* From the losses up. A contribution to a gradient that another reader of the value has already
   written is formed apart, in parts[], then added. starts: weight gradients are complete with this
   pass, and their sums over ranks may begin in it. */
AMPI_FN amp_result ampi_backward(amp_model* m, int starts) {
    for (const ampi_node* n = m->last; n; n = n->prev) {
        if (!n->on_loss_path || !n->wants_grad || ampi_is(n, FLATTEN)) continue;
        AMPI_TRY(ampi_observe(m, n, 1 /* gradient */));
        void* dx[AMP_MAX_OPERANDS] = { NULL };
        for (int j = 0; j < n->input_count; j++) {
            const ampi_node* x = n->reads[j];
            if (x->wants_grad) dx[j] = n->parts[j] ? n->parts[j] : x->grad;
            AMPI_TRY(ampi_backward_input(m, n, j, dx[j]));
        }
        if (n->custom) AMPI_TRY(ampi_run_custom(m, n, dx));
        for (int j = 0; j < n->input_count; j++) {
            const ampi_node* x = n->reads[j];
            const amp_ref sum = ampi_gradient_of(x);
            if (dx[j] && dx[j] != x->grad)
                AMPI_RUN(add_forward, sum, amp_ref_of(dx[j], sum.dtype), sum,
                    x->rows * x->features);
        }
        if (starts) AMPI_TRY(ampi_start_sums(m, n));
    }
    return AMP_OK;
}

/* --- data --- */
/* An array of a batch, or a data set, has a number: inputs first, then targets. */
enum { AMPI_ARRAYS = AMP_MAX_INPUTS + AMP_MAX_LOSSES };
#define AMPI_ARRAY(of, i) \
    (*((i) < AMP_MAX_INPUTS ? &(of)->inputs[i] : &(of)->targets[(i) - AMP_MAX_INPUTS]))
/* What sentences call the arrays of which array i is one. */
AMPI_FN const char* ampi_array_name(int i) { return i < AMP_MAX_INPUTS ? "inputs" : "targets"; }

/* The input or loss that reads array i, or NULL. */
AMPI_FN const ampi_node* ampi_array_node(const amp_model* m, int i) {
    return i < AMP_MAX_INPUTS ? m->inputs[i] : m->losses[i - AMP_MAX_INPUTS];
}

/* Whole numbers of a batch that must lie below a limit: labels of a loss, or tokens. */
typedef struct ampi_numbers {
    const void* data;
    amp_dtype dtype;
    const char *what, *layer;  /* for sentences: "label", and who reads them */
    size_t positions, each;    /* of a sample, and numbers at each */
    size_t limit;
    const int32_t *ignored, *lengths;  /* one that need not, and where they end; NULL = none */
} ampi_numbers;

/* Refuses a number that is out of its range. Those on an asynchronous backend go unchecked: a check
   would wait. */
AMPI_FN amp_result ampi_check_numbers(amp_model* m, const amp_batch* b, const ampi_numbers* of) {
    const size_t size = amp_dtype_size(of->dtype), sample = of->positions * of->each;
    const size_t count = (size_t)b->n * sample;
    char where[AMPI_SHAPE_TEXT] = "";
    size_t n;
    if (b->on_device && m->backend->asynchronous) return AMP_OK;
    for (size_t at = 0; at < count; at += n) {
        int64_t copy[AMPI_BLOCK];  /* room for numbers of any type */
        const void* data = (const char*)of->data + at * size;
        n = ampi_min_size(count - at, AMPI_BLOCK);
        if (b->on_device) {
            AMPI_RUN(copy_out, copy, data, n * size);
            data = copy;
        }
        for (size_t i = 0; i < n; i++) {
            const int64_t number = ampi_label_at(data, of->dtype, i);
            const int k = (int)((at + i) / sample);
            const int position = (int)((at + i) % sample / of->each);
            if (number >= 0 && number < (int64_t)of->limit) continue;
            if (of->ignored && number == *of->ignored) continue;
            if (of->lengths && position >= of->lengths[k]) continue;
            if (of->positions > 1) AMPI_SAY(where, ", position %d,", position);
            return ampi_model_fail(AMP_ERR_ARGUMENT,
                "layer '%s': %s %lld of sample %d%s is outside 0..%d", of->layer, of->what,
                (long long)number, k, where, (int)of->limit - 1);
        }
    }
    return AMP_OK;
}

/* Refuses a label of a batch that is no class of the loss, nor ignored, nor beyond a length. */
AMPI_FN amp_result ampi_check_labels(amp_model* m, const amp_batch* b, const ampi_node* loss) {
    const ampi_numbers labels = { b->targets[loss->index], b->label_dtype, "label",
        loss->layer.name, ampi_positions(loss->reads[0], b->positions), loss->labels,
        loss->classes, loss->ignores ? &loss->ignored : NULL,
        loss->is_sequence ? b->lengths : NULL };
    return ampi_check_numbers(m, b, &labels);
}

/* Refuses a token that is no row of an embedding which reads the input. */
AMPI_FN amp_result ampi_check_token_input(amp_model* m, const amp_batch* b, const ampi_node* in) {
    AMPI_EACH_NODE(n) {
        const ampi_numbers tokens = { b->inputs[in->index], AMP_I32, "token", n->layer.name,
            ampi_positions(in, b->positions), 1, n->fan_out, NULL, NULL };
        if (n->inputs[0] == in) AMPI_TRY(ampi_check_numbers(m, b, &tokens));
    }
    return AMP_OK;
}

/* Refuses types of inputs and labels (0 = int32 or none), of a batch or a data set, that the model
   does not read. what: the call, for sentences, here and below. */
AMPI_FN amp_result ampi_check_types(amp_model* m, amp_dtype input, amp_dtype label,
        const char* what) {
    AMPI_REFUSE(ampi_type_size(input) == 0 && input != AMP_U8, AMP_ERR_DTYPE,
        "%s: input_dtype is %s (%d), not f32, f16, bf16, "
        "f64 or u8", what, amp_dtype_name(input), (int)input);
    if (!label) return AMP_OK;
    AMPI_REFUSE(label != AMP_I32 && label != AMP_I64 && label != AMP_U8, AMP_ERR_DTYPE,
        "%s: label_dtype is %s (%d), it must be i32, i64 or u8", what, amp_dtype_name(label),
        (int)label);

    /* Somebody must read labels. */
    for (int i = 0; i < m->loss_count; i++)
        if (ampi_has_labels(m->losses[i])) return AMP_OK;
    AMPI_REFUSE(m->loss_count, AMP_ERR_DTYPE,
        "%s: label_dtype is %s, but the loss '%s' reads targets[0] as floats; "
        "labels are for softmax_cross_entropy", what, amp_dtype_name(label),
        m->losses[0]->layer.name);
    return AMP_OK;
}

/* Remarks of labels, read as int32 by default, that look like int64 ones: read in pairs, every high
   word is 0, and at least half of the low words are not. A model looks once, at its first 16
   samples or more. */
AMPI_FN void ampi_doubt_labels(amp_model* m, const void* const* targets, amp_dtype said,
        size_t count, int positions, const char* what) {
    if (said || count < 16 || m->labels_known) return;
    m->labels_known = 1;

    for (int i = 0; i < m->loss_count; i++) {
        const ampi_node* loss = m->losses[i];
        const size_t each = loss->labels * ampi_positions(loss->reads[0], positions);
        const size_t labels = count * each;  /* 0 where each target is a float */
        size_t k = labels / 2;  /* pairs to be looked at */
        size_t set = 0;  /* low words that are not 0 */
        for (; k > 0; k--) {
            uint64_t label;
            memcpy(&label, (const int32_t*)targets[i] + 2 * (k - 1), sizeof label);
            if (label >> 32) break;
            set += label != 0;
        }
        if (labels == 0 || k > 0 || set * 4 < labels) continue;
        ampi_remark(&m->op_logger,
            "%s: every second label of targets[%d] is 0: int64 labels need label_dtype AMP_I64, "
            "others AMP_I32", what, i);
        return;
    }
}

/* Refuses positions that a sequence does not have, and n lengths beyond them; 0 and NULL are
   none. */
AMPI_FN amp_result ampi_check_positions(amp_model* m, int given, const int32_t* lengths, int n,
        const char* what) {
    const size_t positions = ampi_batch_positions(m, given);
    int sequences = 0;
    for (int i = 0; i < m->input_count; i++) {
        const ampi_node* in = m->inputs[i];
        if (!in->is_sequence) continue;
        sequences++;
        AMPI_REFUSE(given < 0 || given > in->layer.positions, AMP_ERR_ARGUMENT,
            "%s: positions is %d, '%s' has 1 to %d", what, given, in->layer.name,
            in->layer.positions);
        AMPI_REFUSE(lengths && ampi_positions(in, given) != positions, AMP_ERR_ARGUMENT,
            "%s: lengths are for sequences of equal positions, but '%s' has %d", what,
            in->layer.name, in->layer.positions);
    }
    AMPI_REFUSE(!sequences && (given || lengths), AMP_ERR_ARGUMENT,
        "%s: positions or lengths are given, but no input is a sequence", what);
    for (int i = 0; lengths && i < n; i++)
        AMPI_REFUSE(lengths[i] < 1 || (size_t)lengths[i] > positions, AMP_ERR_ARGUMENT,
            "%s: the length %d of sample %d is outside 1..%d", what, (int)lengths[i], i,
            (int)positions);
    return AMP_OK;
}

/* Refuses a batch whose size, types, arrays or labels the model does not take. */
AMPI_FN amp_result ampi_check_batch(amp_model* m, const amp_batch* b, const char* what,
        int with_targets) {
    AMPI_TRY(ampi_check_finalized(m, what));
    AMPI_REFUSE(m->awaits_backward, AMP_ERR_STATE,
        "%s: amp_forward waits for amp_backward, or amp_discard", what);
    AMPI_REFUSE(!b, AMP_ERR_ARGUMENT, "%s: the batch is NULL", what);
    AMPI_REFUSE(b->n < 1 || b->n > m->desc.batch, AMP_ERR_ARGUMENT,
        "%s: %d samples, the model takes 1 to %d", what, b->n, m->desc.batch);
    AMPI_TRY(ampi_check_types(m, b->input_dtype, with_targets ? b->label_dtype : AMP_DTYPE_DEFAULT,
        what));
    AMPI_TRY(ampi_check_positions(m, b->positions, b->lengths, b->n, what));

    for (int i = 0; i < (with_targets ? AMPI_ARRAYS : AMP_MAX_INPUTS); i++) {
        const ampi_node* n = ampi_array_node(m, i);
        const void* data = AMPI_ARRAY(b, i);
        if (!n && data && !m->extra_known && (i < AMP_MAX_INPUTS || m->loss_count > 0)) {
            m->extra_known = 1;
            ampi_remark(&m->op_logger, "%s: %s[%d] is given, but nothing in the model reads it",
                what, ampi_array_name(i), i % AMP_MAX_INPUTS);
        }
        if (!n || (ampi_is_loss(n) && ampi_target_size(n) == 0)) continue;
        AMPI_REFUSE(!data, AMP_ERR_ARGUMENT, "%s: %s[%d] is NULL", what, ampi_array_name(i),
            n->index);
        AMPI_REFUSE(b->on_device && m->backend->reaches && !m->backend->reaches(data),
            AMP_ERR_ARGUMENT, "%s: %s[%d] is not memory of the backend '%s'", what,
            ampi_array_name(i), n->index, m->backend->name);
        if (ampi_has_labels(n)) AMPI_TRY(ampi_check_labels(m, b, n));
        if (ampi_is_tokens(n)) AMPI_TRY(ampi_check_token_input(m, b, n));
    }
    if (with_targets && !b->on_device)
        ampi_doubt_labels(m, b->targets, b->label_dtype, (size_t)b->n, b->positions, what);
    return AMP_OK;
}

/* Loads the lengths of the batch and, behind them, the samples' shares in a mean over all positions
   that count. Behind those is room for means of the samples, see ampi_loss_value. */
AMPI_FN amp_result ampi_load_lengths(amp_model* m) {
    const int32_t* lengths = m->pass.data.lengths;
    float shares[AMPI_BLOCK], *to = (float*)(m->lengths + m->desc.batch);
    AMPI_RUN(copy_in, m->lengths, lengths, m->pass.samples * sizeof *lengths);
    for (size_t n, at = 0; at < m->pass.samples; at += n) {
        n = ampi_min_size(m->pass.samples - at, AMPI_BLOCK);
        for (size_t i = 0; i < n; i++)
            shares[i] = (float)((double)lengths[at + i] / (double)m->pass.counted);
        AMPI_RUN(copy_in, to + at, shares, n * sizeof *shares);
    }
    return AMP_OK;
}

/* Loads each input of the batch, scaled, shifted and converted to the type in use. */
AMPI_FN amp_result ampi_load_inputs(amp_model* m) {
    const amp_batch* b = m->pass.batch;
    if (m->pass.has_lengths) AMPI_TRY(ampi_load_lengths(m));
    for (int i = 0; i < m->input_count; i++) {
        const ampi_node* n = m->inputs[i];
        const amp_ref to = ampi_output_of(n), from = amp_ref_of(b->inputs[i], b->input_dtype);
        const size_t count = n->rows * n->features;
        amp_reading how = n->reading;
        if (ampi_is_tokens(n)) {
            AMPI_TRY((b->on_device ? m->backend->copy : m->backend->copy_in)(n->data, b->inputs[i],
                count * sizeof(int32_t), &m->exec));
            continue;
        }
        if (!b->on_device) how.constants = n->constants;  /* where the data lies */
        if (how.constants || how.scale != 0.0f || from.dtype == AMP_U8)
            AMPI_RUN(load, to, from, count, !b->on_device, &how);
        else if (b->on_device) AMPI_RUN(convert, to, from, count);
        else AMPI_RUN(upload, to, from, count);
    }
    return AMP_OK;
}

/* Gives positions beyond their sample's length the label of loss n that does not count. */
AMPI_FN amp_result ampi_mask_labels(amp_model* m, const ampi_node* n) {
    const size_t each = n->reads[0]->rows / m->pass.samples * n->labels;  /* labels of a sample */
    int32_t none[AMPI_BLOCK];
    if (!m->pass.has_lengths || !n->is_sequence) return AMP_OK;
    for (size_t i = 0; i < AMPI_BLOCK; i++) none[i] = n->ignored;
    for (size_t i = 0; i < m->pass.samples; i++) {
        size_t count, at = (size_t)m->pass.data.lengths[i] * n->labels;
        for (; at < each; at += count) {
            count = ampi_min_size(each - at, AMPI_BLOCK);
            AMPI_RUN(copy_in, (int32_t*)n->target + i * each + at, none, count * sizeof *none);
        }
    }
    return AMP_OK;
}

/* Loads inputs, targets as they are, and labels as int32. */
AMPI_FN amp_result ampi_load_batch(amp_model* m) {
    const amp_batch* b = m->pass.batch;
    AMPI_TRY(ampi_load_inputs(m));
    for (int i = 0; i < m->loss_count; i++) {
        const ampi_node* n = m->losses[i];
        const void* from = b->targets[i];
        const size_t count = n->reads[0]->rows * ampi_target_size(n), bytes = count * 4;
        if (count == 0) continue;  /* a mean has no target */
        if (ampi_has_labels(n) && (b->label_dtype == AMP_I64 || b->label_dtype == AMP_U8))
            AMPI_RUN(load, amp_ref_of(n->target, AMP_I32), amp_ref_of(from, b->label_dtype), count,
                !b->on_device, NULL);
        else if (b->on_device) AMPI_RUN(copy, n->target, from, bytes);
        else AMPI_RUN(copy_in, n->target, from, bytes);
        if (ampi_has_labels(n)) AMPI_TRY(ampi_mask_labels(m, n));
    }
    return AMP_OK;
}

/* The weighted sum of the model's losses. */
AMPI_FN amp_result ampi_total_loss(amp_model* m, float* total) {
    float values[AMP_MAX_LOSSES];
    double sum = 0.0;
    AMPI_RUN(copy_out, values, m->loss_values, (size_t)m->loss_count * sizeof *values);
    for (int i = 0; i < m->loss_count; i++)
        sum += (double)m->losses[i]->loss_weight * (double)values[i];
    *total = (float)sum;
    AMPI_FORGET(total);  /* its bits will be tested */
    return AMP_OK;
}

/* --- what is frozen --- */
/* Do the current rates freeze p? A group number that the caller spoilt is refused later. */
AMPI_FN int ampi_is_frozen_now(const amp_model* m, const amp_param* p) {
    return p->group >= 0 && p->group < AMP_MAX_GROUPS && ampi_param_frozen(&m->training.optimizer,
        p);
}

/* At the start of a step: which parameters have a gradient, and which values need one. With all
   parameters frozen, none is treated so. */
AMPI_FN void ampi_freeze(amp_model* m) {
    int frozen = 0;
    for (int i = 0; i < m->param_count; i++) frozen += ampi_is_frozen_now(m, &m->params[i]);
    for (int i = 0; i < m->param_count; i++) {
        amp_param* p = &m->params[i];
        if (frozen < m->param_count && ampi_is_frozen_now(m, p)) p->grad = NULL;
        else if (!p->grad) p->grad = m->grad_list[i].data;
        m->grad_list[i].count = p->grad ? p->count : 0;
    }
    AMPI_EACH_NODE(n) {
        n->wants_grad = n->keeps_grad;
        for (int k = 0; k < AMP_MAX_OPERANDS; k++)
            n->wants_grad |= ampi_weight_grad(m, n->params[k]).data != NULL;
        for (int j = 0; j < n->input_count; j++) n->wants_grad |= n->reads[j]->wants_grad;
    }
}

/* --- why a step was skipped --- */
/* Copies batch norm's running statistics from one block to another of the same size: a skipped step
   puts them back. */
AMPI_FN amp_result ampi_copy_running(amp_model* m, int from, int to) {
    const ampi_allocation* source = &m->blocks[from];
    if (source->bytes == 0) return AMP_OK;
    return ampi_run(copy, m->blocks[to].base, source->base, source->bytes);
}

/* Index of the first inf or NaN of `count` values in the backend's memory, with its name in *what;
   `count` if none is found or readable. */
AMPI_FN size_t ampi_first_bad(amp_model* m, amp_ref x, size_t count, const char** what) {
    float values[AMPI_BLOCK];
    for (size_t at = 0; at < count; at += AMPI_BLOCK) {
        const size_t k = ampi_min_size(count - at, AMPI_BLOCK);
        if (ampi_run(download, amp_f32(values), ampi_from(x, at), k) != AMP_OK) return count;
        for (size_t i = 0; i < k; i++) {
            if (ampi_has_finite_bits(&values[i])) continue;
            *what = amp_is_nan(amp_f32(&values[i])) ? "nan" : "inf";
            return at + i;
        }
    }
    return count;
}

/* Says in out[size] which of the caller's gradients is inf or NaN by itself. Returns its node, or
   NULL. Those on the device, or times the loss scale already, are not looked at. */
AMPI_FN ampi_node* ampi_find_bad_seed(const amp_model* m, char* out, size_t size) {
    const amp_seeds* seeds = m->pass.seeds;
    if (!seeds || seeds->scaled || seeds->on_device) return NULL;
    for (int i = 0; i < m->output_count; i++) {
        ampi_node* n = m->outputs[i];
        const size_t count = seeds->gradients[i].data ? n->rows * n->features : 0;
        for (size_t k = 0; k < count; k++) {
            if (amp_is_finite(ampi_from(seeds->gradients[i], k))) continue;
            ampi_say(out, size, "gradients[%d], given for the output '%s', is not finite at "
                "element %llu; a lower loss scale does not help", i, n->layer.name, (ampi_ull)k);
            return n;
        }
    }
    return NULL;
}

/* Runs the pass's forward work again, checks each value as it is made, and says in out[size] where
   inf or NaN began. Returns that node, or NULL if values are finite or unreadable. */
AMPI_FN ampi_node* ampi_find_trouble(amp_model* m, char* out, size_t size) {
    const char* what = "";
    const ampi_ull first = (ampi_ull)m->pass.first, last = first + m->pass.samples - 1;
    char where[80];
    m->pass.looking = 1;
    if (ampi_load_inputs(m) != AMP_OK) return NULL;

    /* Evaluation tells of the sample in the data; in training the batch is the caller's. A node
       without a number is a cast. */
    AMPI_EACH_NODE(n) {
        const size_t count = n->rows * n->features, each = count / m->pass.samples;
        if (ampi_is_idle(m, n) || ampi_is_loss(n) || ampi_is_tokens(n)) continue;
        if (ampi_forward_node(m, n, 0 /* without ReLU */) != AMP_OK) return NULL;
        const size_t bad = ampi_first_bad(m, ampi_output_of(n), count, &what);
        if (bad == count) continue;
        if (m->pass.training)
            AMPI_SAY(where, "%llu; a lower loss scale does not help", (ampi_ull)bad);
        else
            AMPI_SAY(where, "%llu of sample %llu", (ampi_ull)(bad % each), first + bad / each);
        ampi_say(out, size, "the model produces %s: first in the %s of '%s', element %s", what,
            n->number == AMPI_NONE ? "16-bit copy" : "output", n->layer.name, where);
        return n;
    }

    /* All layers are sound. The losses are those of the pass that went before. */
    for (int i = 0; i < m->loss_count; i++) {
        if (ampi_first_bad(m, amp_f32(&m->loss_values[i]), 1, &what) == 1) continue;
        AMPI_SAY(where, " of samples %llu to %llu", first, last);
        ampi_say(out, size,
            "the loss '%s' is %s although every layer's output is finite: look at the targets%s",
            m->losses[i]->layer.name, what, m->pass.training ? "" : where);
        return m->losses[i];
    }
    return ampi_find_bad_seed(m, out, size);
}

/* Is the model to blame for a step that is not finite? Then m->trouble says why, and the logger
   hears of each layer once. If not, the loss scale is. */
AMPI_FN int ampi_is_to_blame(amp_model* m) {
    if (m->trouble[0]) return 1;
    if (!m->pass.batch) return 0;  /* amp_backward has looked */
    ampi_node* n = ampi_find_trouble(m, m->trouble, sizeof m->trouble);
    if (!n) return 0;
    m->suspect = n;
    if (!n->blamed) ampi_remark(&m->op_logger, "train step: %s", m->trouble);
    return n->blamed = 1;
}

/* The name of tensor i of the model's list, of which an info keeps the beginning in `kept`; `kept`
   itself if the caller's own list was looked at. */
AMPI_FN const char* ampi_whole_name(const amp_model* m, int i, const char* kept) {
    const char* name = *kept && i >= 0 && i < m->param_count ? m->params[i].name : kept;
    return strncmp(name, kept, strlen(kept)) == 0 ? name : kept;
}

/* Writes the sentence of a step that overflowed: which gradients, how many, and what helps. Not
   counted are inf and NaN that the caller has reported, or that another rank has. */
AMPI_FN void ampi_describe_overflow(const amp_model* m, amp_step_info* info) {
    const amp_overflow_info* o = &info->overflow;
    const amp_scaler_rule* rule = &m->training.scaler.rule;
    const int at_floor = rule->min > 0.0f && info->scale_before <= rule->min;
    const int counted = o->inf_count + o->nan_count > 0, alone = m->comm.size == 1;
    const int several = o->last_tensor != o->first_tensor;
    const double scale = (double)info->scale_before;
    if (!ampi_scale_usable(&info->scale_before))
        AMPI_SAY(info->message,
            "the loss scale %g has no finite inverse: call amp_scaler_set_scale; min_scale and "
            "max_scale keep it in range", scale);
    else if (o->unsound)
        AMPI_SAY(info->message,
            "the loss is not finite%s: the forward pass gave inf or NaN; a lower loss scale does "
            "not help", alone ? "" : ", here or on another rank");
    else if (m->overflowed) {
        AMPI_SAY(info->culprit, "%s", m->overflowed->layer.name);
        AMPI_SAY(info->message, "a gradient of the loss '%s' is not finite with its loss scale %g",
            m->overflowed->layer.name,
            (double)m->loss_scalers[m->overflowed->index].state.scale_in_use);
    } else if (!counted && alone) AMPI_SAY(info->message, "amp_scaler_report_overflow was called");
    else if (!counted)
        AMPI_SAY(info->message, "a gradient of another rank is not finite with loss scale %g",
            scale);
    else
        AMPI_SAY(info->message,
            "gradient of '%s' is not finite at element %llu; %llu inf, %llu nan in all%s%s; loss "
            "scale %.17g%s", o->first_name[0] ? ampi_whole_name(m, o->first_tensor, o->first_name)
            : "?", (ampi_ull)o->first_index,
            (ampi_ull)o->inf_count, (ampi_ull)o->nan_count, several ? ", nearest to the loss in "
            : "", several ? info->culprit : "", scale, rule->is_static ? "; the scale is static"
            : at_floor ? "; the scale is at its floor" : "");
}

/* --- flags of ranks --- */
/* Sums flags[count], in the backend's memory, over the ranks. */
AMPI_FN amp_result ampi_sum_flags(amp_model* m, float* flags, size_t count) {
    const amp_comm* c = &m->comm;
    return ampi_summed(m, c->all_reduce_sum(flags, AMP_F32, count, m->exec.stream, c->user_data),
        "a flag");
}

/* *flag becomes 1 if it is not 0 on any rank; a rank alone keeps it. The float behind the losses
   carries it. */
AMPI_FN amp_result ampi_any_rank(amp_model* m, int* flag) {
    float *sum = m->loss_values + m->loss_count, found = *flag ? 1.0f : 0.0f;
    if (m->comm.size == 1) return AMP_OK;
    AMPI_RUN(copy_in, sum, &found, sizeof found);
    AMPI_TRY(ampi_sum_flags(m, sum, 1));
    AMPI_RUN(copy_out, &found, sum, sizeof found);
    *flag = found != 0.0f;
    return AMP_OK;
}

/* Sums the gradients over the ranks and checks them; one rank's finding counts for all. An
   asynchronous backend without other ranks checks in training_step. Others ask at once whether the
   model is to blame. Flags: [0] a gradient is not finite, [1] the model is to blame. */
AMPI_FN amp_result ampi_agree(amp_model* m) {
    float *flags = m->loss_values + m->loss_count, found[2];
    if (m->comm.size == 1 && m->backend->asynchronous) return AMP_OK;
    if (m->comm.size > 1) {
        AMPI_TRY(ampi_sum_gradients(m, 0));
        AMPI_TRY(ampi_end_sums(m));
    }
    AMPI_RUN(training_check, &m->training, m->grad_list, m->param_count, flags);
    if (!m->backend->asynchronous) {
        AMPI_RUN(copy_out, found, flags, sizeof found);
        if (found[0] != 0.0f && ampi_is_to_blame(m)) found[1] = 1.0f;
        AMPI_RUN(copy_in, flags, found, sizeof found);
    }
    if (m->comm.size > 1) AMPI_TRY(ampi_sum_flags(m, flags, 2));
    return ampi_run(training_agree, &m->training, flags);
}

/* --- the step --- */
/* Says why a step was skipped, where the model is to blame and not the loss scale. Asynchronous
   backends check the model only now; then ranks agree, as they must repeat the step or not. */
AMPI_FN amp_result ampi_explain_skip(amp_model* m, amp_step_info* info) {
    int blamed = info->outcome == AMP_STEP_SKIPPED_MODEL;
    if (m->backend->asynchronous) {
        blamed |= ampi_is_to_blame(m);
        AMPI_TRY(ampi_any_rank(m, &blamed));
    }
    if (blamed) {
        info->outcome = AMP_STEP_SKIPPED_MODEL;
        AMPI_SAY(info->culprit, "%s", m->trouble[0] ? m->suspect->layer.name : "");
        if (m->trouble[0]) memcpy(info->message, m->trouble, sizeof info->message);
        else if (m->comm.size > 1)
            AMPI_SAY(info->message, "the model produces inf or nan on another rank");
    } else if (m->desc.accumulate > 1) {
        const size_t said = strlen(info->message);
        ampi_say(info->message + said, sizeof info->message - said,
            "; or the model made it in an earlier micro-batch");
    }
    return AMP_OK;
}

/* Counts in an applied step's info the running statistics that stayed. The first is named if the
   info has no message yet. */
AMPI_FN amp_result ampi_read_held(amp_model* m, amp_step_info* info) {
    const ampi_allocation* held = &m->blocks[AMPI_BLOCK_HELD];
    const ampi_node* first = NULL;
    size_t channel = 0;  /* of the first */
    if (held->bytes == 0) return AMP_OK;

    AMPI_RUN(copy_out, m->held, held->base, held->bytes);
    AMPI_EACH_NODE(n) {
        if (!n->norm.held) continue;
        /* A byte a channel, in the backend's block: its place in the host's copy. */
        const unsigned char* own = m->held + (n->norm.held - (unsigned char*)held->base);
        for (size_t c = 0; c < (size_t)n->layer.channels; c++) {
            if (!own[c]) continue;
            info->held_statistics++;
            if (first) continue;
            first = n;
            channel = c;
        }
    }

    if (!first || info->message[0]) return AMP_OK;
    AMPI_SAY(info->culprit, "%s", first->layer.name);
    AMPI_SAY(info->message,
        "the running statistics of %llu channels stay as they were, where those of the batch are "
        "not finite; the first is channel %llu of '%s'", (ampi_ull)info->held_statistics,
        (ampi_ull)channel, first->layer.name);
    return AMP_OK;
}

/* Writes the sentence of an applied step in which weights or their copies overflow: how many, and
   the first, which is of the tensor called `name`. */
AMPI_FN void ampi_describe_update(const amp_optimizer_info* last, const char* name,
        amp_step_info* info) {
    if (last->update_overflows > 0)
        AMPI_SAY(info->message,
            "the update overflows: %llu weights stay as they were, their moments too; the first of "
            "%s is element %llu of '%s'", (ampi_ull)last->update_overflows,
            last->saturated ? "them and of saturated copies" : "them",
            (ampi_ull)last->update_index, name);
    else if (last->saturated > 0)
        AMPI_SAY(info->message,
            "%llu weights are too large for 16 bits, where they are the largest finite value; the "
            "first is element %llu of '%s'", (ampi_ull)last->saturated,
            (ampi_ull)last->update_index, name);
}

/* Fills what is told of a step: losses, scale, norm, counts and a sentence. A micro-batch before
   the last (is_whole 0) tells of no update. */
AMPI_FN amp_result ampi_read_step(amp_model* m, int is_whole, amp_step_info* info) {
    const amp_training* t = &m->training;
    const amp_optimizer_info* last = &t->last;
    AMPI_TRY(ampi_total_loss(m, &info->loss));
    AMPI_TRY(ampi_refresh(m));
    info->step = t->optimizer.state.step;
    info->skipped = t->scaler.state.skipped;
    info->scale_before = is_whole ? t->scale_used : t->scaler.state.scale;
    info->scale_after = t->scaler.state.scale;
    info->outcome = AMP_STEP_ACCUMULATED;
    ampi_overflow_clear(&info->overflow);
    if (!is_whole) return AMP_OK;

    info->lr = last->lr;
    info->overflow = last->overflow;
    info->update_overflows = last->update_overflows;
    info->saturated = last->saturated;
    info->message[0] = 0;
    if (last->applied) {
        const char* name = ampi_whole_name(m, last->update_tensor, last->update_name);
        info->outcome = AMP_STEP_APPLIED;
        info->grad_norm = last->grad_norm;
        AMPI_SAY(info->culprit, "%s", name);
        ampi_describe_update(last, name, info);
        return ampi_read_held(m, info);
    }
    info->outcome = last->overflow.unsound ? AMP_STEP_SKIPPED_MODEL : AMP_STEP_SKIPPED_OVERFLOW;
    info->grad_norm = ampi_double(AMPI_INF64);
    AMPI_SAY(info->culprit, "%s",
        ampi_whole_name(m, last->overflow.last_tensor, last->overflow.last_name));
    ampi_describe_overflow(m, info);
    return AMP_OK;
}

/* Undoes a failed step and its earlier micro-batches: running statistics, random numbers, the
   scaler's window, retained gradients. m->micro counts the failed micro-batch, which is no pass
   yet. Returns `why`. */
AMPI_FN amp_result ampi_abandon_step(amp_model* m, amp_result why) {
    ampi_end_sums(m);  /* of arrays that the next step writes */
    m->training.passes -= (uint64_t)(m->micro - 1);
    m->micro = m->holds_grads = 0;
    if (m->saved) ampi_copy_running(m, AMPI_BLOCK_RUNNING_SAVED, AMPI_BLOCK_RUNNING);
    ampi_run(training_abandon, &m->training);
    for (int i = 0; i < m->own_scalers; i++) ampi_scaler_close(&m->loss_scalers[i]);
    m->stale = m->backend->asynchronous;
    return why;
}

/* The same between two micro-batches, after an error; nothing where no step is open. */
AMPI_FN amp_result ampi_abandon_open_step(amp_model* m, amp_result why) {
    if (m->micro == 0) return why;
    m->micro++;
    return ampi_abandon_step(m, why);
}

/* The training pass up to the losses. The first of a step saves the running statistics, and clears
   the marks of those that stay. */
AMPI_FN amp_result ampi_run_forward(amp_model* m) {
    const ampi_allocation* held = &m->blocks[AMPI_BLOCK_HELD];
    if (m->backend->training_pass) AMPI_RUN(training_pass, &m->training);
    if (!m->pass.accumulate) {
        AMPI_TRY(ampi_copy_running(m, AMPI_BLOCK_RUNNING, AMPI_BLOCK_RUNNING_SAVED));
        if (held->bytes) AMPI_RUN(zero, held->base, held->bytes);
    }
    m->saved = 1;
    AMPI_TRY(ampi_forward(m, m->last, 1 /* with losses */));
    if (m->loss_count == 0) return AMP_OK;
    for (int i = 0; i < m->own_scalers; i++)  /* on the CPU: fixes the window's scale */
        amp_scaler_scale_loss(&m->loss_scalers[i], m->loss_values[i]);
    return ampi_run(training_losses, &m->training, m->loss_values, m->loss_count);
}

/* Of the gradient of parameter p, or of all (p NULL), times the loss scale: counts of inf and NaN,
   and the sum of squares, in *found. */
AMPI_FN amp_result ampi_scan_gradients(amp_model* m, const amp_param* p, ampi_chunk* found) {
    float tile[AMPI_BLOCK];
    AMPI_CLEAR(*found);
    for (int k = 0; k < m->param_count; k++) {
        const amp_tensor* t = &m->grad_list[k];
        if (p && p != &m->params[k]) continue;
        for (size_t n, at = 0; at < t->count; at += n) {
            n = ampi_min_size(t->count - at, AMPI_BLOCK);
            AMPI_RUN(download, amp_f32(tile), ampi_from(amp_ref_of(t->data, t->dtype), at), n);
            ampi_scan(tile, AMP_F32, at, n, ampi_inf_bits(AMP_F32) - 1, found);
        }
    }
    return AMP_OK;
}

/* Multiplies all weight gradients, FP32 on the CPU. */
AMPI_FN void ampi_scale_gradients(amp_model* m, double factor) {
    for (const amp_tensor* t = m->grad_list; t < m->grad_list + m->param_count; t++) {
        float* g = (float*)t->data;
        for (size_t i = 0; i < t->count; i++) g[i] = (float)((double)g[i] * factor);
    }
}

/* The backward pass of one loss with a scale of its own; what other passes have made is brought to
   that scale and back. Gradients that are not finite become 0, and their scaler and the model's
   know. */
AMPI_FN amp_result ampi_backward_loss(amp_model* m, int i, const amp_seeds* seeds) {
    amp_scaler* s = &m->loss_scalers[i];
    const float *scale = m->training.loss_scale, own = s->state.scale_in_use;
    ampi_chunk found;
    if (m->pass.accumulate) ampi_scale_gradients(m, (double)own);
    m->pass.only = m->losses[i];
    m->training.loss_scale = &s->state.scale_in_use;
    amp_result r = ampi_load_seeds(m, seeds);
    if (r == AMP_OK) r = ampi_backward(m, 0 /* starts */);
    m->training.loss_scale = scale;
    m->pass.only = NULL;
    AMPI_TRY(r);

    m->pass.accumulate = AMP_ACCUMULATE_PARAMS;
    s->recorded = 1;
    AMPI_TRY(ampi_scan_gradients(m, NULL, &found));
    if (found.inf + found.nan > 0) {
        if (!m->overflowed) m->overflowed = m->losses[i];
        ampi_scaler_raise(s, 0);
        ampi_scaler_raise(&m->training.scaler, 0);
        memset(m->blocks[AMPI_BLOCK_GRADS].base, 0, m->blocks[AMPI_BLOCK_GRADS].bytes);
    } else ampi_scale_gradients(m, 1.0 / (double)own);
    return AMP_OK;
}

/* The backward pass, or one for each loss, the first with the seeds. starts: see ampi_backward. */
AMPI_FN amp_result ampi_run_backward(amp_model* m, const amp_seeds* seeds, int starts) {
    for (int i = 0; i < m->own_scalers; i++)
        AMPI_TRY(ampi_backward_loss(m, i, i == 0 ? seeds : NULL));
    if (m->own_scalers) return AMP_OK;
    AMPI_TRY(ampi_load_seeds(m, seeds));
    return ampi_backward(m, starts);
}

/* Moves the scales of losses by what each pass of the step has found on any rank. The model's fault
   is none of a scale's. */
AMPI_FN amp_result ampi_update_loss_scalers(amp_model* m) {
    amp_result limit = AMP_OK;
    for (int i = 0; i < m->own_scalers; i++) {
        amp_scaler* s = &m->loss_scalers[i];
        int found = s->state.found_inf != 0;
        AMPI_TRY(ampi_any_rank(m, &found));
        if (found) ampi_scaler_raise(s, m->training.last.overflow.unsound);
        const amp_result r = amp_scaler_update(s);
        if (limit == AMP_OK) limit = r;
    }
    if (m->own_scalers) m->training.limit = limit;
    return AMP_OK;
}

/* The end of a step: sum over ranks, check, step or skip, new scale. */
AMPI_FN amp_result ampi_run_update(amp_model* m) {
    const ampi_allocation *now = &m->blocks[AMPI_BLOCK_RUNNING],
        *saved = &m->blocks[AMPI_BLOCK_RUNNING_SAVED];
    AMPI_TRY(ampi_agree(m));
    AMPI_RUN(training_step, &m->training, now->base, saved->base, saved->bytes);
    return ampi_update_loss_scalers(m);
}

/* The same work for each batch, with the last micro-batch the update. */
AMPI_FN amp_result ampi_run_step(amp_model* m) {
    const int is_last = m->micro == m->desc.accumulate;
    AMPI_TRY(ampi_run_forward(m));
    AMPI_TRY(ampi_run_backward(m, NULL, is_last && m->comm.size > 1 && m->comm.start));
    return is_last ? ampi_run_update(m) : AMP_OK;
}

/* The work of a step, or a replay of its record. The key has what differs between calls: samples
   and positions of the batch, whether some do not count, and whether it is the first (1) or the
   last (2) micro-batch. Losses by samples differ with each length, and are not recorded. */
AMPI_FN amp_result ampi_replay_step(amp_model* m) {
    const uint64_t place = (m->pass.accumulate ? 1u : 0u) | (m->micro == m->desc.accumulate ? 2u
        : 0u);
    const uint64_t shape = (uint64_t)m->pass.samples * ((uint64_t)INT32_MAX + 1)
        + (uint64_t)m->pass.data.positions;
    amp_record mode = AMP_RECORD_OFF;
    int by_sample = 0;
    for (int i = 0; i < m->loss_count; i++) by_sample |= ampi_is_by_sample(m, m->losses[i]);
    if (m->backend->record && !by_sample)
        AMPI_RUN(record, &m->training, (shape << 1 | (m->pass.has_lengths ? 1u : 0u)) << 2 | place,
            &mode);
    if (mode == AMP_RECORD_REPLAYED) {
        m->saved = 1;
        return AMP_OK;
    }
    amp_result r = ampi_run_step(m);
    if (mode != AMP_RECORD_ON) return r;

    /* Where the record fails, nothing of it has run: only earlier micro-batches saved. */
    r = ampi_run(record_end, &m->training, r);
    if (r != AMP_OK) m->saved = m->pass.accumulate;
    return r;
}

/* Tells what a step did, or why it was skipped. The logger hears once of weights that stay (bit 1),
   of saturated copies (2), of held statistics (4): the message is of these, in this order. */
AMPI_FN amp_result ampi_report_step(amp_model* m, amp_step_info* info) {
    const int is_whole = m->micro == m->desc.accumulate;
    AMPI_TRY(ampi_read_step(m, is_whole, info));
    const int weights = (info->update_overflows > 0 ? 1 : 0) | (info->saturated > 0 ? 2 : 0);
    const int causes = weights ? weights : info->held_statistics > 0 ? 4 : 0;
    if (causes & ~m->told_update) ampi_remark(&m->op_logger, "train step: %s", info->message);
    m->told_update |= causes;
    if (is_whole) return m->training.last.applied ? AMP_OK : ampi_explain_skip(m, info);

    /* The next micro-batch overwrites the values that a diagnosis needs. */
    if (!ampi_has_finite_bits(&info->loss)) ampi_is_to_blame(m);
    return AMP_OK;
}

/* Begins the next micro-batch of a step on a batch that was checked. */
AMPI_FN amp_result ampi_begin_micro(amp_model* m, const amp_batch* b) {
    ampi_start_pass(m, b, 1 /* training */);
    if (m->micro++ == 0) {
        m->trouble[0] = 0;
        m->overflowed = NULL;
        m->saved = 0;
        ampi_freeze(m);
    }
    AMPI_RUN(training_begin, &m->training, 1 /* a step follows */);
    return ampi_load_batch(m);
}

/* Runs the next micro-batch of a step on a batch that was checked; after a failure the whole step
   is undone. info: NULL if nobody waits for the outcome. */
AMPI_FN amp_result ampi_attempt(amp_model* m, const amp_batch* b, amp_step_info* info) {
    const int is_last = m->micro + 1 == m->desc.accumulate;
    amp_result r = ampi_begin_micro(m, b);
    if (r == AMP_OK) r = ampi_replay_step(m);
    if (r != AMP_OK) return ampi_abandon_step(m, r);

    /* A step whose update is made stays, even if its outcome cannot be read. */
    m->stale = m->backend->asynchronous;
    if (info) r = ampi_report_step(m, info);
    if (r != AMP_OK && !is_last) return ampi_abandon_step(m, r);
    m->training.passes++;
    if (!is_last) return AMP_OK;
    m->micro = 0;
    m->stepped = 1;
    return info && r == AMP_OK ? m->training.limit : r;  /* a limit of the scaler: the step was
                                                            skipped */
}

/* A rank that fails may not leave others waiting for its sums: all fail. Theirs is the sentence. */
AMPI_FN amp_result ampi_fail_together(amp_model* m, amp_result own, const char* sentence) {
    int failed = own != AMP_OK;
    amp_result r = ampi_any_rank(m, &failed);
    if (r != AMP_OK) return ampi_abandon_open_step(m, r);
    if (own != AMP_OK) return own;
    return failed ? ampi_model_fail(AMP_ERR_ARGUMENT, "%s", sentence) : AMP_OK;
}

AMPI_FN amp_result ampi_agree_on_batch(amp_model* m, amp_result own) {
    return ampi_fail_together(m, own, "train step: the batch of another rank was refused");
}

/* A training pass needs more than evaluation. */
AMPI_FN amp_result ampi_check_training(amp_model* m, const amp_batch* b, const char* what) {
    AMPI_TRY(ampi_check_batch(m, b, what, 1 /* with targets */));
    AMPI_REFUSE(m->desc.inference, AMP_ERR_STATE, "%s: the model was made for inference", what);
    AMPI_REFUSE(!ampi_is_trainable(m), AMP_ERR_STATE, "%s: the model has no loss", what);
    AMPI_REFUSE(m->param_count == 0, AMP_ERR_STATE, "%s: the model has no parameters", what);
    AMPI_EACH_NODE(n)
        AMPI_REFUSE(n->running && !n->norm.frozen && b->n == 1 && n->norm.spatial == 1,
            AMP_ERR_ARGUMENT,
            "%s: layer '%s' needs more than one value per channel, but the batch has 1 sample",
            what, n->layer.name);

    AMPI_REFUSE(m->micro == m->desc.accumulate, AMP_ERR_STATE,
        "%s: the step waits for amp_update, or amp_discard", what);

    /* Earlier micro-batches have made no gradient of what is unfrozen between them. */
    if (m->micro == 0) return AMP_OK;
    for (const amp_param* p = m->params; p < m->params + m->param_count; p++)
        AMPI_REFUSE(!p->grad && !ampi_is_frozen_now(m, p), AMP_ERR_STATE,
            "%s: '%s' was frozen when this step began; "
            "unfreeze group %d before the first micro-batch of a step", what, p->name, p->group);
    return AMP_OK;
}

/* Checks the batch, lets ranks agree on it, then runs the step with exceptions masked. A step that
   overflowed is repeated with the lower scale, if the model's desc says so. */
AMP_DEF amp_result amp_train_step(amp_model* m, const amp_batch* batch, amp_step_info* info) {
    amp_step_info told;
    fenv_t floats;
    amp_result r = ampi_check_training(m, batch, "train step");
    if (!ampi_is_final(m)) return r;
    if (r == AMP_OK && m->loss_count == 0)
        r = ampi_model_fail(AMP_ERR_STATE,
            "train step: the model has no loss; amp_backward takes gradients of its outputs");
    if (r == AMP_OK) r = ampi_optimizer_check_rates(&m->training.optimizer, "train step");
    AMPI_TRY(ampi_agree_on_batch(m, r));
    /* nobody asks for the outcome: it is not waited for */
    if (!info && m->backend->asynchronous && m->desc.max_replays == 0)
        return ampi_attempt(m, batch, NULL);

    AMPI_CLEAR(told);
    feholdexcept(&floats);  /* an overflow is data here, not a trap */
    do {
        told.message[0] = 0;
        told.attempts++;
        r = ampi_attempt(m, batch, &told);
    } while (r == AMP_OK && told.outcome == AMP_STEP_SKIPPED_OVERFLOW
        && told.attempts <= m->desc.max_replays);
    fesetenv(&floats);
    /* a limit comes after a step */
    if (info && (r == AMP_OK || r == AMP_ERR_OVERFLOW)) *info = told;
    return r;
}

/* Reads back what the last step did, on a backend that did not wait for it. */
AMP_DEF amp_result amp_train_read(amp_model* m, amp_step_info* info) {
    amp_step_info told;
    AMPI_TRY(ampi_check_finalized(m, "train read"));
    AMPI_REFUSE_NULL("train read", info);
    AMPI_REFUSE(!m->stepped && m->micro == 0, AMP_ERR_STATE, "train read: no step was made");
    AMPI_CLEAR(told);
    told.attempts = 1;
    AMPI_TRY(ampi_read_step(m, m->micro == 0, &told));
    *info = told;
    return m->micro > 0 ? AMP_OK : m->training.limit;
}

/* --- the parts of a step --- */
/* Drops the open step; between its passes m->micro counts whole ones. Returns `why`. */
AMPI_FN amp_result ampi_drop_step(amp_model* m, amp_result why) {
    const int in_pass = m->awaits_backward;
    m->awaits_backward = 0;
    return in_pass ? ampi_abandon_step(m, why) : ampi_abandon_open_step(m, why);
}

/* Runs the pass up to the losses, and leaves it open for amp_backward. */
AMP_DEF amp_result amp_forward(amp_model* m, const amp_batch* batch, float* loss) {
    fenv_t floats;
    amp_result r = ampi_check_training(m, batch, "forward");
    if (!ampi_is_final(m)) return r;
    AMPI_TRY(ampi_agree_on_batch(m, r));

    feholdexcept(&floats);
    r = ampi_begin_micro(m, batch);
    if (r == AMP_OK) r = ampi_run_forward(m);
    if (r == AMP_OK && loss) r = ampi_total_loss(m, loss);
    fesetenv(&floats);
    if (r != AMP_OK) return ampi_abandon_step(m, r);
    m->awaits_backward = m->holds_values = 1;
    return AMP_OK;
}

/* Refuses a call without amp_forward, and seeds of which one is no gradient of its output. */
AMPI_FN amp_result ampi_check_seeds(amp_model* m, const amp_seeds* seeds) {
    AMPI_REFUSE(!m->awaits_backward, AMP_ERR_STATE, "backward: amp_forward comes first");
    AMPI_REFUSE(!seeds && m->loss_count == 0, AMP_ERR_ARGUMENT,
        "backward: the model has no loss, and seeds is NULL: all gradients would be 0");
    for (int i = 0; seeds && i < AMP_MAX_OUTPUTS; i++) {
        const amp_ref g = seeds->gradients[i];
        if (!g.data) continue;
        AMPI_REFUSE(i >= m->output_count, AMP_ERR_ARGUMENT,
            "backward: gradients[%d] is given, but the model has %d outputs", i, m->output_count);
        AMPI_REFUSE(!ampi_type_size(g.dtype), AMP_ERR_DTYPE,
            "backward: gradients[%d] is %s, not f32, f16, bf16 or f64", i,
            amp_dtype_name(g.dtype));
        AMPI_REFUSE(seeds->on_device && m->backend->reaches && !m->backend->reaches(g.data),
            AMP_ERR_ARGUMENT, "backward: gradients[%d] is not memory of the backend '%s'", i,
            m->backend->name);
    }
    return AMP_OK;
}

/* Where a gradient of the pass is not finite, looks for the cause, while the batch is there. The
   search runs the model. */
AMPI_FN amp_result ampi_look_for_trouble(amp_model* m) {
    ampi_chunk found;
    AMPI_TRY(ampi_scan_gradients(m, NULL, &found));
    if (found.inf + found.nan == 0) return AMP_OK;
    ampi_is_to_blame(m);
    m->holds_values = m->holds_grads = 0;
    return AMP_OK;
}

/* Runs the pass down from losses and outputs. An asynchronous backend would have to wait for a look
   at what it made, so amp_model_read_gradient looks. */
AMP_DEF amp_result amp_backward(amp_model* m, const amp_seeds* seeds) {
    fenv_t floats;
    AMPI_TRY(ampi_check_finalized(m, "backward"));
    AMPI_TRY(ampi_fail_together(m, ampi_check_seeds(m, seeds),
        "backward: the seeds of another rank were refused"));

    feholdexcept(&floats);
    m->pass.seeds = seeds;
    amp_result r = ampi_run_backward(m, seeds, 0 /* starts: the caller may look at gradients */);
    m->holds_grads = r == AMP_OK;
    if (r == AMP_OK && !m->backend->asynchronous) r = ampi_look_for_trouble(m);
    m->pass.seeds = NULL;
    fesetenv(&floats);
    if (r != AMP_OK) return ampi_drop_step(m, r);
    m->awaits_backward = 0;
    m->pass.batch = NULL;
    m->training.passes++;
    m->stale = m->backend->asynchronous;
    return AMP_OK;
}

/* Refuses what needs gradients, for a call of this name: no whole pass, or (all) not all of a
   step's. */
AMPI_FN amp_result ampi_check_passes(amp_model* m, int all, const char* what) {
    AMPI_TRY(ampi_check_finalized(m, what));
    AMPI_REFUSE(m->awaits_backward || m->micro == 0, AMP_ERR_STATE, "%s: amp_backward comes first",
        what);
    AMPI_REFUSE(all && m->micro < m->desc.accumulate, AMP_ERR_STATE,
        "%s: %d of the step's %d micro-batches were made", what, m->micro, m->desc.accumulate);
    return AMP_OK;
}

/* Ends a step, and tells of it as amp_train_step does. */
AMP_DEF amp_result amp_update(amp_model* m, amp_step_info* info) {
    amp_step_info told;
    fenv_t floats;
    AMPI_TRY(ampi_check_passes(m, 1 /* all */, "update"));
    AMPI_TRY(ampi_fail_together(m,
        ampi_optimizer_check_rates(&m->training.optimizer, "update"),
        "update: the rates of another rank were refused"));
    AMPI_CLEAR(told);
    told.attempts = 1;

    feholdexcept(&floats);
    amp_result r = ampi_run_update(m);
    if (r == AMP_OK) {
        m->stale = m->backend->asynchronous;
        if (info) r = ampi_report_step(m, &told);
        m->micro = 0;
        m->stepped = 1;
        if (r == AMP_OK && info) r = m->training.limit;
    } else ampi_abandon_open_step(m, r);
    fesetenv(&floats);
    if (info && (r == AMP_OK || r == AMP_ERR_OVERFLOW)) *info = told;
    return r;
}

AMP_DEF amp_result amp_discard(amp_model* m) {
    AMPI_TRY(ampi_check_finalized(m, "discard"));
    return ampi_drop_step(m, AMP_OK);
}

/* --- what lies between the parts --- */
/* Divides x[count] by the loss scale of the step, which amp_update may have closed. */
AMPI_FN void ampi_divide_by_scale(const amp_model* m, float* x, size_t count) {
    const amp_training* t = &m->training;
    const double inverse = 1.0 / (double)(m->micro ? t->scaler.state.scale_in_use : t->scale_used);
    for (size_t i = 0; i < count; i++) x[i] = (float)((double)x[i] * inverse);
}

AMP_DEF amp_result amp_model_read_value(amp_model* m, amp_value v, float* out) {
    AMPI_TRY(ampi_check_finalized(m, "read value"));
    AMPI_REFUSE_NULL("read value", out);
    ampi_node* n = ampi_find(m, v);
    if (n) n = ampi_source(n);
    AMPI_REFUSE(!n || !n->is_output, AMP_ERR_ARGUMENT, "read value: value %d is no output", v.id);
    AMPI_REFUSE(!m->holds_values, AMP_ERR_STATE,
        "read value: there is none since the model ran last; amp_forward comes first");
    return ampi_run(download, amp_f32(out), ampi_output_of(n), n->rows * n->features);
}

AMP_DEF amp_result amp_model_read_gradient(amp_model* m, amp_value v, float* out) {
    AMPI_TRY(ampi_check_finalized(m, "read gradient"));
    AMPI_REFUSE_NULL("read gradient", out);
    ampi_node* n = ampi_find(m, v);
    if (n) n = ampi_source(n);
    AMPI_REFUSE(!n || !n->keeps_grad, AMP_ERR_ARGUMENT,
        "read gradient: amp_retain_gradient was not called for value %d", v.id);
    if (m->holds_grads && m->backend->asynchronous) AMPI_TRY(ampi_look_for_trouble(m));
    AMPI_REFUSE(m->micro && !m->awaits_backward && !m->holds_grads && !m->pass.batch,
        AMP_ERR_OVERFLOW, "read gradient: %s", m->trouble[0] ? m->trouble
        : "gradients overflow at this loss scale");
    AMPI_REFUSE(!m->holds_grads, AMP_ERR_STATE,
        "read gradient: there is none since the model ran last; amp_backward comes first");
    const size_t count = n->rows * n->features;
    AMPI_TRY(ampi_refresh(m));
    AMPI_RUN(download, amp_f32(out), ampi_gradient_of(n), count);
    ampi_divide_by_scale(m, out, count);
    return AMP_OK;
}

/* The gradient of p, a parameter of m, in *g; its scale is read back. */
AMPI_FN amp_result ampi_gradient_to_read(amp_model* m, const amp_param* p, const void* values,
        amp_ref* g, const char* what) {
    AMPI_TRY(ampi_check_param(m, p, values, what));
    AMPI_TRY(ampi_check_passes(m, 0, what));
    AMPI_REFUSE(!p->grad, AMP_ERR_STATE, "%s: '%s' is frozen", what, p->name);
    *g = amp_ref_of(p->grad, p->grad_dtype);
    return ampi_refresh(m);
}

AMP_DEF amp_result amp_model_read_param_gradient(amp_model* m, const amp_param* p, float* out) {
    amp_ref g;
    AMPI_TRY(ampi_gradient_to_read(m, p, out, &g, "read param gradient"));
    AMPI_RUN(download, amp_f32(out), g, p->count);
    ampi_divide_by_scale(m, out, p->count);
    return AMP_OK;
}

/* Multiplies with the loss scale in tiles, before the rounding to the gradient's type. */
AMP_DEF amp_result amp_model_write_param_gradient(amp_model* m, const amp_param* p,
        const float* values) {
    float tile[AMPI_BLOCK];
    amp_ref g;
    AMPI_TRY(ampi_gradient_to_read(m, p, values, &g, "write param gradient"));
    const float scale = m->training.scaler.state.scale_in_use;
    for (size_t n, at = 0; at < p->count; at += n) {
        n = ampi_min_size(p->count - at, AMPI_BLOCK);
        for (size_t i = 0; i < n; i++) tile[i] = values[at + i] * scale;
        AMPI_RUN(upload, ampi_from(g, at), amp_f32(tile), n);
    }
    return AMP_OK;
}

/* Clamps gradients as they are, times the loss scale, in tiles on the host. */
AMP_DEF amp_result amp_model_clip_gradients(amp_model* m, float limit) {
    float tile[AMPI_BLOCK];
    AMPI_TRY(ampi_check_passes(m, 0, "clip gradients"));
    AMPI_REFUSE(limit == 0.0f || !ampi_in_range(&limit, 0.0f, AMPI_FLT_MAX), AMP_ERR_ARGUMENT,
        "clip gradients: limit %g must be finite and above 0", (double)limit);
    AMPI_TRY(ampi_refresh(m));
    limit *= m->training.scaler.state.scale_in_use;
    for (const amp_tensor* t = m->grad_list; t < m->grad_list + m->param_count; t++) {
        const amp_ref g = amp_ref_of(t->data, t->dtype);
        for (size_t n, at = 0; at < t->count; at += n) {
            n = ampi_min_size(t->count - at, AMPI_BLOCK);
            AMPI_RUN(download, amp_f32(tile), ampi_from(g, at), n);
            for (size_t i = 0; i < n; i++)
                if (ampi_has_finite_bits(&tile[i]))
                    tile[i] = tile[i] > limit ? limit : tile[i] < -limit ? -limit : tile[i];
            AMPI_RUN(upload, ampi_from(g, at), amp_f32(tile), n);
        }
    }
    return AMP_OK;
}

AMP_DEF amp_result amp_model_gradient_norm(amp_model* m, const amp_param* p, double* out) {
    ampi_chunk found;
    AMPI_TRY(ampi_check_passes(m, 0, "gradient norm"));
    AMPI_REFUSE_NULL("gradient norm", out);
    if (p) AMPI_TRY(ampi_check_param(m, p, out, "gradient norm"));
    AMPI_TRY(ampi_refresh(m));
    AMPI_TRY(ampi_scan_gradients(m, p, &found));
    *out = sqrt(found.sum) / (double)m->training.scaler.state.scale_in_use;
    return AMP_OK;
}

/* --- evaluation --- */
/* Says in *info why the loss of the pass is not finite. */
AMPI_FN void ampi_explain_loss(amp_model* m, amp_eval_info* info) {
    const ampi_node* n = ampi_find_trouble(m, info->message, sizeof info->message);
    if (n) AMPI_SAY(info->culprit, "%s", n->layer.name);
    else AMPI_SAY(info->message, "the weighted sum of the losses is not finite");
}

/* A pass in evaluation mode over a batch that begins at sample `first` of its data: the losses into
   *told, cleared, or, if NULL, the value of `last` into out. */
AMPI_FN amp_result ampi_evaluate_nodes(amp_model* m, const amp_batch* b, int64_t first,
        const ampi_node* last, amp_eval_info* told, float* out) {
    fenv_t floats;
    ampi_start_pass(m, b, 0 /* not training */);
    m->pass.first = first;
    m->pass.told = told;
    feholdexcept(&floats);
    amp_result r = told ? ampi_load_batch(m) : ampi_load_inputs(m);
    if (r == AMP_OK) r = ampi_forward(m, last, told != NULL);
    if (r == AMP_OK) r = told ? ampi_total_loss(m, &told->loss)
        : ampi_run(download, amp_f32(out), ampi_output_of(last), last->rows * last->features);
    if (told && r == AMP_OK && !ampi_has_finite_bits(&told->loss)) ampi_explain_loss(m, told);
    fesetenv(&floats);
    return r;
}

/* amp_evaluate without its remark, for a batch that begins at sample `first` of its data. */
AMPI_FN amp_result ampi_evaluate_losses(amp_model* m, const amp_batch* batch, int64_t first,
        amp_eval_info* told) {
    AMPI_CLEAR(*told);
    AMPI_TRY(ampi_check_batch(m, batch, "evaluate", 1 /* with targets */));
    return ampi_evaluate_nodes(m, batch, first, m->last, told, NULL);
}

/* The loss and right answers of one batch. */
AMP_DEF amp_result amp_evaluate(amp_model* m, const amp_batch* batch, amp_eval_info* info) {
    amp_eval_info told;
    if (!m) return AMP_ERR_ARGUMENT;
    AMPI_REFUSE_NULL("evaluate", info);
    AMPI_TRY(ampi_evaluate_losses(m, batch, 0, &told));
    if (told.message[0]) ampi_remark(&m->op_logger, "evaluate: %s", told.message);
    *info = told;
    return AMP_OK;
}

/* Runs the network in evaluation mode up to v, and writes that value in FP32. */
AMP_DEF amp_result amp_predict(amp_model* m, const amp_batch* batch, amp_value v, float* out) {
    AMPI_TRY(ampi_check_batch(m, batch, "predict", 0 /* without targets */));
    ampi_node* n = ampi_find(m, v);
    AMPI_REFUSE_NULL("predict", out);
    AMPI_REFUSE(!n, AMP_ERR_ARGUMENT, "predict: value %d is not of this model", v.id);
    AMPI_REFUSE(ampi_is_loss(n) || ampi_is_tokens(n), AMP_ERR_ARGUMENT, "predict: '%s' %s",
        n->layer.name, ampi_is_loss(n) ? "is a loss" : "has tokens");
    /* before a layer that works in place */
    return ampi_evaluate_nodes(m, batch, 0, ampi_source(n), NULL, out);
}

/* --- text --- */
/* Bits of a number that is no NaN, in the order of numbers. */
AMPI_FN uint32_t ampi_ordered(float x) {
    const uint32_t b = ampi_bits(x);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

/* The largest bound, in that order, which at least k of n numbers reach: bit by bit. */
AMPI_FN uint32_t ampi_kth_largest(const float* x, size_t n, size_t k) {
    uint32_t bound = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        size_t reach = 0;
        for (size_t i = 0; i < n; i++) reach += ampi_ordered(x[i]) >= (bound | bit);
        if (reach >= k) bound |= bit;
    }
    return bound;
}

/* Makes n logits the probabilities of a draw, those of all but the k largest 0. 0 where a logit is
   NaN or +inf, or all are -inf; else 1. */
AMPI_FN int ampi_draw_weights(float* x, size_t n, size_t k, float temperature) {
    for (size_t i = 0; i < n; i++)
        if (ampi_nan_mask(x[i]) || ampi_bits(x[i]) == 0x7f800000u) return 0;
    const uint32_t bound = ampi_kth_largest(x, n, k);
    size_t above = 0, equal = 0;
    for (size_t i = 0; i < n; i++) above += ampi_ordered(x[i]) > bound;
    for (size_t i = 0; i < n; i++) {
        const uint32_t at = ampi_ordered(x[i]);
        const int is_in = at > bound || (at == bound && equal++ < k - above);
        x[i] = is_in ? x[i] / temperature : ampi_float(0xff800000u);
    }
    amp_softmax_forward(amp_f32(x), amp_f32(x), 1, n, NULL);
    return !ampi_nan_mask(x[0]);  /* of -inf alone */
}

/* A text that grows. */
typedef struct ampi_text {
    amp_model* m;
    const ampi_node* logits;
    amp_generate_desc desc;
    size_t most;        /* positions of the model */
    size_t count;       /* tokens that it sees: the last ones of the text */
    int32_t* tokens;    /* [most] */
    float* row;         /* [features of logits] */
} ampi_text;

/* Logits behind the last token, to t->row. */
AMPI_FN amp_result ampi_text_logits(ampi_text* t) {
    amp_model* m = t->m;
    const ampi_node* n = t->logits;
    fenv_t floats;
    amp_batch b;
    AMPI_CLEAR(b);
    b.n = 1;
    b.positions = (int)t->count;
    b.inputs[0] = t->tokens;
    AMPI_TRY(ampi_check_batch(m, &b, "generate", 0 /* without targets */));
    ampi_start_pass(m, &b, 0 /* not training */);
    feholdexcept(&floats);
    amp_result r = ampi_load_inputs(m);
    if (r == AMP_OK) r = ampi_forward(m, n, 0 /* without losses */);
    if (r == AMP_OK) r = ampi_run(download, amp_f32(t->row),
        ampi_from(ampi_output_of(n), (n->rows - 1) * n->features), n->features);
    fesetenv(&floats);
    return r;
}

/* Token number `i` of the text, drawn from t->row; -1 where its logits are not finite. The sums of
   probabilities are in double, in order. */
AMPI_FN int32_t ampi_text_draw(const ampi_text* t, uint64_t i) {
    const size_t n = (size_t)t->desc.classes;
    double sum = 0.0, reached = 0.0;
    size_t last = 0;
    if (!ampi_draw_weights(t->row, n, (size_t)t->desc.top_k, t->desc.temperature)) return -1;

    for (size_t k = 0; k < n; k++) sum += (double)t->row[k];
    const double drawn = sum * (double)amp_random_uniform(t->desc.seed, i);
    for (size_t k = 0; k < n && reached <= drawn; k++) {
        if (t->row[k] > 0.0f) last = k;  /* never a token without weight */
        reached += (double)t->row[k];
    }
    return (int32_t)last;
}

/* Puts a token behind those that the model sees; the first one leaves where there are as many as
   positions. */
AMPI_FN void ampi_text_add(ampi_text* t, int32_t token) {
    if (t->count == t->most)
        memmove(t->tokens, t->tokens + 1, --t->count * sizeof *t->tokens);
    t->tokens[t->count++] = token;
}

/* Checks amp_generate's arguments, and fills a text's fields but for its memory. */
AMPI_FN amp_result ampi_text_check(ampi_text* t, amp_model* m, amp_value logits,
        const int32_t* prompt, int prompt_count, const int32_t* out, int count,
        const amp_generate_desc* desc) {
    AMPI_CLEAR(*t);
    AMPI_TRY(ampi_check_finalized(m, "generate"));
    AMPI_REFUSE_NULL("generate", prompt);
    AMPI_REFUSE(prompt_count < 1, AMP_ERR_ARGUMENT,
        "generate: prompt_count is %d, at least 1 is needed", prompt_count);
    AMPI_REFUSE(count < 0 || (count > 0 && !out), AMP_ERR_ARGUMENT,
        "generate: count is %d, and out must have room for as many tokens", count);
    AMPI_REFUSE(m->input_count != 1 || !ampi_is_tokens(m->inputs[0]), AMP_ERR_ARGUMENT,
        "generate: the model's one input must be amp_tokens");
    ampi_node* n = ampi_find(m, logits);
    const amp_logger* logger = &m->op_logger;
    AMPI_REFUSE(!n, AMP_ERR_ARGUMENT, "generate: value %d is not of this model", logits.id);
    AMPI_REFUSE(ampi_is_loss(n) || ampi_is_tokens(n) || !n->is_sequence, AMP_ERR_ARGUMENT,
        "generate: '%s' has no logits at each position", n->layer.name);

    if (desc) t->desc = *desc;
    amp_generate_desc* d = &t->desc;
    const int features = (int)n->features;
    AMPI_REFUSE_DESC(d->classes < 0 || d->classes > features || d->top_k < 0,
        "generate: classes is %d of %d logits, top_k %d; none may be below 0", d->classes, features,
        d->top_k);
    AMPI_REFUSE_DESC(!ampi_has_finite_bits(&d->temperature)
        || (d->temperature < 0.0f && d->temperature != (float)AMP_ZERO),
        "generate: temperature is %g, it must be positive, or AMP_ZERO",
        (double)d->temperature);
    if (d->classes == 0) d->classes = features;
    if (d->top_k == 0 || d->top_k > d->classes) d->top_k = d->classes;
    if (d->temperature < 0.0f) d->top_k = 1;
    if (d->temperature <= 0.0f) d->temperature = 1.0f;
    t->m = m;
    t->logits = ampi_source(n);
    t->most = (size_t)m->inputs[0]->layer.positions;
    return AMP_OK;
}

/* Draws token after token. */
AMPI_FN amp_result ampi_text_grow(ampi_text* t, int32_t* out, int count) {
    amp_model* m = t->m;
    int i = 0, ended = 0;
    for (; i < count && !ended; i++) {
        AMPI_TRY(ampi_text_logits(t));
        const int32_t token = ampi_text_draw(t, (uint64_t)i);
        AMPI_REFUSE(token < 0, AMP_ERR_OVERFLOW, "generate: logits of token %d are not finite", i);
        ampi_text_add(t, token);
        out[i] = token;
        ended = t->desc.on_token && t->desc.on_token(token, t->desc.user_data) != 0;
    }
    for (; i < count; i++) out[i] = -1;
    return AMP_OK;
}

/* Continues a text: the graph runs up to the logits once a token. */
AMP_DEF amp_result amp_generate(amp_model* m, amp_value logits, const int32_t* prompt,
        int prompt_count, int32_t* out, int count, const amp_generate_desc* desc) {
    ampi_text t;
    AMPI_TRY(ampi_text_check(&t, m, logits, prompt, prompt_count, out, count, desc));
    const amp_allocator* a = &m->desc.allocator;
    t.tokens = (int32_t*)ampi_alloc(t.most * sizeof *t.tokens, a);
    t.row = (float*)ampi_alloc(t.logits->features * sizeof *t.row, a);
    amp_result r = AMP_OK;
    if (!t.tokens || !t.row)
        r = ampi_model_fail(AMP_ERR_MEMORY, "generate: out of memory");
    for (int i = 0; r == AMP_OK && i < prompt_count; i++) ampi_text_add(&t, prompt[i]);
    if (r == AMP_OK) r = ampi_text_grow(&t, out, count);
    ampi_free(t.row, a);
    ampi_free(t.tokens, a);
    return r;
}

/* --- data sets --- */
/* Draws batches from a data set: the order of samples, and memory for one batch. */
typedef struct ampi_feed {
    amp_model* m;
    amp_data data;               /* as it was at the start: `order` has its count */
    const char* what;            /* the call, for messages */
    int64_t* order;              /* [data.count] numbers of samples */
    void* buffers[AMPI_ARRAYS];  /* each array of a batch */
    size_t bytes[AMPI_ARRAYS];   /* of a sample in it; 0 = no such array */
    int32_t* lengths;            /* of a batch; NULL = none */
} ampi_feed;

/* Frees the arrays in which batches are gathered. */
AMPI_FN void ampi_feed_close(ampi_feed* f) {
    if (!f->m) return;
    const amp_allocator* a = &f->m->desc.allocator;
    for (int i = 0; i < AMPI_ARRAYS; i++) ampi_free(f->buffers[i], a);
    ampi_free(f->lengths, a);
    ampi_free(f->order, a);
}

/* A feed over data: memory for the order of samples, and for a batch, unless data has a function
   that reads. A feed is closed after a failure too. */
AMPI_FN amp_result ampi_feed_open(ampi_feed* f, amp_model* m, const amp_data* data,
        const char* what) {
    int missing = 0;  /* 1 = an allocation failed */
    AMPI_CLEAR(*f);
    f->m = m;
    f->what = what;
    AMPI_TRY(ampi_check_finalized(m, what));
    const amp_allocator* a = &m->desc.allocator;
    AMPI_REFUSE(!data || data->count < 1 || (uint64_t)data->count > SIZE_MAX / sizeof(int64_t),
        AMP_ERR_ARGUMENT, "%s: data is NULL, or its count is not a number of samples", what);
    f->data = *data;

    if (!data->read) {
        AMPI_TRY(ampi_check_types(m, data->input_dtype, data->label_dtype, what));
        AMPI_TRY(ampi_check_positions(m, data->positions, data->lengths, 0, what));
        for (int i = 0; i < AMPI_ARRAYS; i++) {
            const ampi_node* n = ampi_array_node(m, i);
            if (!n) continue;
            AMPI_REFUSE(!AMPI_ARRAY(data, i), AMP_ERR_ARGUMENT,
                "%s: data.%s[%d] is NULL, and so is read", what, ampi_array_name(i), n->index);
            const amp_dtype t = ampi_is_tokens(n) ? AMP_I32 : !ampi_is_loss(n) ? data->input_dtype
                : ampi_has_labels(n) ? data->label_dtype : AMP_F32;
            f->bytes[i] = (ampi_is_loss(n) ? ampi_target_size(n) : n->features) * amp_dtype_size(t)
                * ampi_positions(ampi_is_loss(n) ? n->reads[0] : n, data->positions);
            f->buffers[i] = ampi_alloc(f->bytes[i] * (size_t)m->desc.batch, a);
            missing |= !f->buffers[i];
        }
        ampi_doubt_labels(m, data->targets, data->label_dtype, (size_t)data->count,
            data->positions, what);
    }
    if (data->lengths) {
        f->lengths = (int32_t*)ampi_alloc((size_t)m->desc.batch * sizeof *f->lengths, a);
        missing |= !f->lengths;
    }
    f->order = (int64_t*)ampi_alloc((size_t)data->count * sizeof(int64_t), a);
    AMPI_REFUSE(missing || !f->order, AMP_ERR_MEMORY,
        "%s: out of memory for the order of %lld samples and a batch", what,
        (long long)data->count);
    return AMP_OK;
}

/* Puts the samples in an order: their own without a seed (NULL), else that of Fisher and Yates. A
   sample takes two positions of the random numbers, an epoch those of as many samples. */
AMPI_FN void ampi_feed_shuffle(ampi_feed* f, const uint64_t* seed, int epoch) {
    const int64_t n = f->data.count;
    for (int64_t i = 0; i < n; i++) f->order[i] = i;
    if (!seed) return;
    for (int64_t i = n - 1; i > 0; i--) {
        const uint64_t at = 2 * ((uint64_t)epoch * (uint64_t)n + (uint64_t)i);
        const uint64_t bits = (uint64_t)amp_random_bits(*seed, at) << 32
            | amp_random_bits(*seed, at + 1);
        const int64_t j = (int64_t)(bits % ((uint64_t)i + 1)), other = f->order[j];
        f->order[j] = f->order[i];
        f->order[i] = other;
    }
}

/* Gathers in *b the n samples from place `at` of the order on, or lets the caller's function
   read them. */
AMPI_FN amp_result ampi_feed_read(ampi_feed* f, int64_t at, int n, amp_batch* b) {
    const amp_data* d = &f->data;
    AMPI_CLEAR(*b);
    b->n = n;
    if (d->read) {
        const amp_result r = d->read(b, f->order + at, d->user_data);
        b->n = n;
        return r == AMP_OK ? r : ampi_fail(&f->m->op_logger, r,
            "%s: the data's read returned '%s' for the %d samples "
            "from place %lld on", f->what, amp_result_string(r), n, (long long)at);
    }

    b->input_dtype = d->input_dtype;
    b->label_dtype = d->label_dtype;
    b->positions = d->positions;
    b->lengths = f->lengths;
    for (int k = 0; f->lengths && k < n; k++) f->lengths[k] = d->lengths[f->order[at + k]];
    for (int i = 0; i < AMPI_ARRAYS; i++) {
        const size_t bytes = f->bytes[i];
        AMPI_ARRAY(b, i) = f->buffers[i];
        if (bytes == 0) continue;
        for (int k = 0; k < n; k++)
            memcpy((char*)f->buffers[i] + (size_t)k * bytes,
                   (const char*)AMPI_ARRAY(d, i) + (size_t)f->order[at + k] * bytes, bytes);
    }
    return AMP_OK;
}

/* The loss per sample and the counts of the whole data; of its messages the first, which is
   logged. */
AMPI_FN amp_result ampi_feed_evaluate(ampi_feed* f, amp_eval_info* info) {
    double sum = 0.0;  /* of the losses of all samples */
    int n;
    ampi_feed_shuffle(f, NULL /* in order */, 0);
    AMPI_CLEAR(*info);
    for (int64_t at = 0; at < f->data.count; at += n) {
        amp_eval_info part;
        amp_batch b;
        n = (int)ampi_min_size((size_t)(f->data.count - at), (size_t)f->m->desc.batch);
        AMPI_TRY(ampi_feed_read(f, at, n, &b));
        AMPI_TRY(ampi_evaluate_losses(f->m, &b, at, &part));
        sum += (double)part.loss * n;
        info->correct += part.correct;
        info->predictions += part.predictions;
        if (!part.message[0] || info->message[0]) continue;
        memcpy(info->message, part.message, sizeof info->message);
        memcpy(info->culprit, part.culprit, sizeof info->culprit);
        ampi_remark(&f->m->op_logger, "%s: %s", f->what, info->message);
    }
    info->loss = (float)(sum / (double)f->data.count);
    return AMP_OK;
}

/* The mean loss and right answers over a data set. */
AMP_DEF amp_result amp_evaluate_data(amp_model* m, const amp_data* data, amp_eval_info* info) {
    amp_eval_info told;
    ampi_feed f;
    if (!m) return AMP_ERR_ARGUMENT;
    AMPI_REFUSE_NULL("evaluate data", info);
    amp_result r = ampi_feed_open(&f, m, data, "evaluate data");
    if (r == AMP_OK) r = ampi_feed_evaluate(&f, &told);
    ampi_feed_close(&f);
    if (r == AMP_OK) *info = told;
    return r;
}

/* --- fit --- */
typedef struct ampi_fit_run {
    amp_model* m;
    amp_fit_desc d;     /* the caller's, with its defaults */
    amp_fit_info info;  /* what the caller will be told; info.end != 0 ends the run */
    amp_fit_epoch now;  /* the epoch that runs */
    ampi_feed train, evaluation;
    double loss_sum;    /* of this rank in the epoch so far, over `samples`, whose steps were not */
    int64_t samples;    /* skipped */
    int waited;         /* epochs since the best one */
} ampi_fit_run;

#if !defined(AMP_NO_STDIO)
AMPI_FN amp_result ampi_checkpoint_try(amp_model* m, const char* path);  /* see impl-checkpoint */
AMP_DEF void amp_print_stdout(const char* text, void* user_data) {
    (void)user_data;
    fputs(text, stdout);
    fflush(stdout);
}
#endif

/* Prints the bar, if the samples from `from` up to `to` complete a hundredth of the epoch. */
AMPI_FN void ampi_fit_draw(const ampi_fit_run* f, int64_t from, int64_t to) {
    enum { CELLS = 30 };
    const int64_t count = f->train.data.count;
    const int percent = (int)(100 * to / count), cells = percent * CELLS / 100;
    char text[160];
    if (!f->d.print || !f->d.terminal || (int)(100 * from / count) == percent) return;
    AMPI_SAY(text, "\repoch %d/%d [%.*s%*s] %3d %%  loss %-10.4g", f->now.epoch, f->d.epochs, cells,
        "==============================", CELLS - cells, "", percent,
        f->samples ? f->loss_sum / (double)f->samples : 0.0);
    f->d.print(text, f->d.user_data);
}

/* Prints one epoch in a line. */
AMPI_FN void ampi_fit_print_epoch(const ampi_fit_run* f) {
    const amp_fit_epoch* e = &f->now;
    char text[240], evaluated[40] = "", accuracy[40] = "";
    if (!f->d.print) return;
    if (f->d.evaluation) AMPI_SAY(evaluated, "  evaluation %.4g", (double)e->eval_loss);
    if (e->accuracy >= 0.0) AMPI_SAY(accuracy, ", %.2f %%", 100.0 * e->accuracy);
    AMPI_SAY(text, "%sepoch %d/%d  loss %.4g%s%s  applied %lld  skipped %lld  scale %g%s%*s\n",
        f->d.terminal ? "\r" : "", e->epoch, f->d.epochs, (double)e->loss, evaluated, accuracy,
        (long long)e->steps, (long long)e->skipped, (double)e->scale, e->best ? "  best" : "",
        f->d.terminal ? 20 : 0, "");
    f->d.print(text, f->d.user_data);
}

/* amp_train_step with this rank's part of `total` samples, from place `at` of the order on; what it
   did counts for the epoch. Ranks split the samples evenly. A batch that cannot be read is refused
   on all ranks. */
AMPI_FN amp_result ampi_fit_step(ampi_fit_run* f, int64_t at, int64_t total) {
    const amp_comm* comm = &f->m->comm;
    const int64_t from = total * comm->rank / comm->size,
        to = total * (comm->rank + 1) / comm->size;
    amp_step_info step;
    amp_batch b;
    amp_result r = ampi_feed_read(&f->train, at + from, (int)(to - from), &b);
    if (r != AMP_OK) return ampi_agree_on_batch(f->m, r);
    AMPI_TRY(amp_train_step(f->m, &b, &step));

    /* Every attempt but a last one that was not skipped. */
    int done = step.outcome == AMP_STEP_APPLIED || step.outcome == AMP_STEP_ACCUMULATED;
    f->now.steps += step.outcome == AMP_STEP_APPLIED;
    f->now.skipped += step.attempts - done;
    if (step.outcome != AMP_STEP_ACCUMULATED) f->now.lr = step.lr;
    if (done && ampi_has_finite_bits(&step.loss)) {
        f->loss_sum += (double)step.loss * (double)(to - from);
        f->samples += to - from;
    }
    if (f->d.max_steps > 0 && step.step >= f->d.max_steps) f->info.end = AMP_FIT_STEPS;
    if (f->d.on_step && f->d.on_step(f->m, &step, f->d.user_data)) f->info.end = AMP_FIT_CALLBACK;
    return AMP_OK;
}

/* Samples of an epoch. `each` is what all ranks take at once, a micro-batch of a step. The last one
   may be smaller, if each rank has a sample. Those that do not fill a step are left out. */
AMPI_FN int64_t ampi_fit_samples(const ampi_fit_run* f) {
    const int64_t count = f->train.data.count, ranks = f->m->comm.size,
        each = f->m->desc.batch * ranks;
    const int64_t rest = f->d.drop_last ? 0 : count % each,
        batches = count / each + (rest >= ranks);
    const int64_t whole = batches - batches % f->m->desc.accumulate;
    return whole < batches || rest < ranks ? whole * each : count;
}

/* Trains over the data once, in a shuffled order. A run that ends finishes its step of
   micro-batches. The epoch's loss is a NaN if all its steps were skipped. */
AMPI_FN amp_result ampi_fit_pass(ampi_fit_run* f) {
    const int64_t count = ampi_fit_samples(f), each = (int64_t)f->m->desc.batch * f->m->comm.size;
    const uint64_t seed = f->d.seed ? f->d.seed : ampi_stream(f->m, -1);
    int64_t total;
    ampi_feed_shuffle(&f->train, f->d.in_order ? NULL : &seed, f->now.epoch);
    f->loss_sum = 0.0;
    f->samples = 0;
    for (int64_t at = 0; at < count && (!f->info.end || f->m->micro); at += total) {
        total = count - at < each ? count - at : each;
        AMPI_TRY(ampi_fit_step(f, at, total));
        ampi_fit_draw(f, at, at + total);
    }
    f->now.loss = f->samples ? (float)(f->loss_sum / (double)f->samples) : ampi_float(0x7fc00000u);
    f->now.scale = f->m->training.scaler.state.scale;
    return AMP_OK;
}

AMPI_FN amp_result ampi_fit_agree(amp_model* m, amp_result own) {
    return ampi_fail_together(m, own, "fit: another rank failed, and its logger has the reason");
}

/* Evaluates the epoch, enters it in the books, and saves the best one: the epoch of the least
   finite loss, in evaluation, or without that in training. */
AMPI_FN amp_result ampi_fit_judge(ampi_fit_run* f) {
    amp_eval_info told;
    float loss = f->now.loss, least = f->info.best.loss;

    f->now.accuracy = -1.0;
    if (f->d.evaluation) {
        AMPI_TRY(ampi_feed_evaluate(&f->evaluation, &told));
        loss = f->now.eval_loss = told.loss;
        least = f->info.best.eval_loss;
        if (told.predictions > 0) f->now.accuracy = (double)told.correct / (double)told.predictions;
    }
    f->now.best = ampi_has_finite_bits(&loss) && (!f->info.best.best || loss < least);
    f->waited = f->now.best ? 0 : f->waited + 1;
    if (f->now.best) f->info.best = f->now;
    if (f->d.patience > 0 && f->waited >= f->d.patience) f->info.end = AMP_FIT_PATIENCE;

    f->info.last = f->now;
    if (f->d.history) f->d.history[f->info.epochs] = f->now;
    f->info.epochs++;
#if !defined(AMP_NO_STDIO)
    if (f->now.best && f->d.best_path) return amp_checkpoint_save(f->m, f->d.best_path);
#endif
    return AMP_OK;
}

/* Ranks agree on what one finds behind an epoch: that it failed, or that patience ends. */
AMPI_FN amp_result ampi_fit_one_epoch(ampi_fit_run* f, int epoch) {
    AMPI_CLEAR(f->now);
    f->now.epoch = epoch + 1;
    AMPI_TRY(ampi_fit_pass(f));
    AMPI_TRY(ampi_fit_agree(f->m, ampi_fit_judge(f)));
    int waited = f->info.end == AMP_FIT_PATIENCE;
    if (f->d.patience > 0) AMPI_TRY(ampi_any_rank(f->m, &waited));
    if (waited) f->info.end = AMP_FIT_PATIENCE;

    ampi_fit_print_epoch(f);
    if (f->d.on_epoch && f->d.on_epoch(f->m, &f->now, f->d.user_data))
        f->info.end = AMP_FIT_CALLBACK;
    return AMP_OK;
}

/* All epochs, to the end or the first error, which leaves no step open. */
AMPI_FN amp_result ampi_fit_epochs(ampi_fit_run* f) {
    for (int i = f->d.first_epoch; i < f->d.epochs && !f->info.end; i++) {
        const amp_result r = ampi_fit_one_epoch(f, i);
        if (r != AMP_OK) return ampi_abandon_open_step(f->m, r);
    }
    return AMP_OK;
}

/* Refuses settings of a fit that are out of range or contradict each other, and a best_path that
   cannot be written. A model that has made max_steps ends the run before it begins. */
AMPI_FN amp_result ampi_fit_check(ampi_fit_run* f) {
    amp_model* m = f->m;
    const amp_fit_desc* d = &f->d;
    AMPI_REFUSE(d->epochs < 1 || d->first_epoch < 0 || d->first_epoch > d->epochs || d->patience < 0
        || d->max_steps < 0, AMP_ERR_ARGUMENT,
        "fit: epochs %d, first_epoch %d, patience %d or max_steps %lld is out "
        "of its range", d->epochs, d->first_epoch, d->patience, (long long)d->max_steps);
    AMPI_REFUSE(d->patience && !d->evaluation && m->comm.size > 1, AMP_ERR_ARGUMENT,
        "fit: patience needs evaluation " "data: each rank has its own loss");
    AMPI_REFUSE(m->micro, AMP_ERR_STATE,
        "fit: a step of micro-batches is under way: its rest comes first");
    if (d->max_steps > 0 && amp_model_optimizer(m)
        && m->training.optimizer.state.step >= d->max_steps)
        f->info.end = AMP_FIT_STEPS;
    AMPI_REFUSE(ampi_fit_samples(f) <= 0, AMP_ERR_ARGUMENT,
        "fit: %lld samples do not fill a step of %d micro-batches "
        "on %d ranks", (long long)f->train.data.count, m->desc.accumulate, m->comm.size);
#if defined(AMP_NO_STDIO)
    AMPI_REFUSE(d->best_path, AMP_ERR_UNSUPPORTED,
        "fit: best_path needs files: AMP_NO_STDIO is set");
    return AMP_OK;
#else
    return d->best_path ? ampi_checkpoint_try(m, d->best_path) : AMP_OK;
#endif
}

/* Opens the data, runs the epochs, closes the data; what happened stands in *info. */
AMP_DEF amp_result amp_fit(amp_model* m, const amp_data* data, const amp_fit_desc* desc,
        amp_fit_info* info) {
    ampi_fit_run f;
    if (!m) return AMP_ERR_ARGUMENT;
    AMPI_CLEAR(f);
    f.m = m;
    if (desc) f.d = *desc;
    if (f.d.epochs == 0) f.d.epochs = 1;
    amp_result r = ampi_feed_open(&f.train, m, data, "fit");
    if (r == AMP_OK && f.d.evaluation)
        r = ampi_feed_open(&f.evaluation, m, f.d.evaluation, "fit: evaluation");
    if (r == AMP_OK) r = ampi_fit_check(&f);
    if (m->finalized) r = ampi_fit_agree(m, r);
    if (r == AMP_OK) r = ampi_fit_epochs(&f);
    ampi_feed_close(&f.evaluation);
    ampi_feed_close(&f.train);
    if (info) *info = f.info;
    return r;
}

/* >>impl-file   Safetensors files: read and written whole, checked before anything is handed on.
   Words. entry: a tensor of the file. text: a string of its metadata. trial: a file that is written
   and removed, to see whether it can be. A file is written under a temporary name, then renamed.
   The JSON reader takes what a header may hold and refuses the rest. */
#if !defined(AMP_NO_STDIO)
#include <errno.h>
#include <time.h>

#if defined(__unix__) || defined(__APPLE__)
  #include <fcntl.h>
  #include <sys/stat.h>
  #include <unistd.h>
  #define AMPI_OS(name) name
  #define AMPI_OS64(name) name
  #define AMPI_OS_IS_FILE(st) S_ISREG((st).st_mode)
  #define AMPI_OS_FLAGS O_NONBLOCK  /* a pipe without a writer must not stop open */
  /* EINVAL: this file system cannot */
  #define AMPI_OS_SYNC(f) (fsync(fileno(f)) == 0 || errno == EINVAL)
  #define AMPI_OS_WAIT(tries) 0
  #if defined(__STRICT_ANSI__) && !defined(__cplusplus) && !defined(__USE_POSIX)
extern FILE* (fdopen)(int, const char*);  /* hidden by -std=c99 */
extern int (fileno)(FILE*);
extern int (fchmod)(int, mode_t);
  #endif
#elif defined(_WIN32)
  #include <fcntl.h>
  #include <io.h>
  #include <sys/stat.h>
  #define AMPI_OS(name) _##name
  #define AMPI_OS64(name) _##name##64
  #define AMPI_OS_IS_FILE(st) (((st).st_mode & _S_IFMT) == _S_IFREG)
  #define AMPI_OS_FLAGS (_O_BINARY | _O_NOINHERIT)
  #define AMPI_OS_SYNC(f) (_commit(_fileno(f)) == 0)
/* Windows opens no file that is being replaced, and replaces no open file. */
  #define AMPI_OS_WAIT(tries) (++(tries) <= 200 ? (Sleep(5), 1) : 0)
/* Declared as in windows.h, which may stand before or behind. */
__declspec(dllimport) int __stdcall MoveFileExA(const char*, const char*, unsigned long);
__declspec(dllimport) int __stdcall MoveFileExW(const wchar_t*, const wchar_t*, unsigned long);
__declspec(dllimport) void __stdcall Sleep(unsigned long);
#else
  #define AMPI_OS_SYNC(f) 1
#endif

/* The format, after the description in https://github.com/huggingface/safetensors:
     8 bytes   N, little-endian
     N bytes   a JSON object in UTF-8, from '{' on; may end in spaces:
                 "name": {"dtype": "F32", "shape": [2,3], "data_offsets": [begin, end]}, ...
                 "__metadata__": {"key": "text", ...}   (optional)
     the rest  data, row-major, little-endian, without holes or overlaps, and nothing behind it.
   A file may come from anywhere: nothing recurses, and work is at most n log n in the header's
   size. */
#define AMPI_MAX_HEADER 100000000u  /* bytes; the limit of the format's own library */
#define AMPI_CHUNK_BYTES ((size_t)1 << 18)  /* written at once: whole elements of any type */
#define AMPI_CRC_KEY "amp.crc32."  /* and a tensor's name: the key of its checksum's text */

/* The format's names of types: first those of amp_dtype in its order, so that F32 is also the name
   of 0, its default. The number in a name is an element's bits; BOOL has 8. */
static const char* const ampi_file_types[] = {
    "F32", "F32", "F16", "BF16", "F64",
    "BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64", "F4", "F6_E2M3",
    "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"
};
enum { AMPI_FILE_TYPES = AMPI_LENGTH(ampi_file_types), AMPI_MAX_RANK = 4 };

/* A tensor of a file that is read. */
typedef struct ampi_entry {
    const char* name;          /* the first field, where ampi_by_name looks */
    const char* crc;           /* the file's text of its checksum; NULL = the file has none */
    size_t rank;               /* dimensions, perhaps more than */
    size_t shape[AMPI_MAX_RANK];  /* holds: the first four */
    uint64_t begin, end;       /* its bytes, counted from the file's first byte of data */
    const amp_tensor* wanted;  /* the caller's tensor that takes it; NULL = stepped over */
    size_t place;              /* of a wanted one: its first byte in ampi_file.data */
    int number;                /* of that tensor in the caller's list */
    int type;                  /* an index of ampi_file_types */
    amp_dtype dtype;           /* the same as an amp_dtype; 0 = amp has no such type */
} ampi_entry;

/* Bytes of a name, a path or a shape in a sentence. */
#define AMPI_SHOWN 200

/* A file that is being written or read. */
typedef struct ampi_file {
    struct ampi_picture* picture;
    void (*draw)(struct ampi_picture* p, FILE* out);  /* writes `picture` in place of tensors; or
                                                         NULL */
    char path[AMPI_SHOWN];           /* as sentences show it */
    char name[AMPI_SHOWN];           /* what ampi_show has shown last */
    amp_file_desc desc;              /* the caller's allocator and logger */
    const amp_file_tensor* tensors;  /* the caller's: to be written, or to be read to */
    const amp_file_text* texts;      /* to be written */
    uint16_t** rests;                /* by tensor: not NULL for split masters, FP32 in the file,
                                        whose data is their upper halves; NULL = none are split */
    int count, text_count;           /* of `tensors` and of `texts` */
    int is_trial;                    /* what was written is removed, and the file at the path
                                        stays */
    amp_model* model;                /* of which the tensors are; NULL = they lie on the host */
    const char* owner;               /* whose tensors they are: "memory", "the model", ... */
    FILE* stream;                    /* NULL = closed */
    char* data;                      /* writing: a chunk of a tensor; reading: all wanted
                                        tensors */
    uint32_t* crcs;                  /* writing: the checksum of each tensor */
    char missing[4 * 64];            /* names of the first three tensors that the file lacks */
    int missing_count;               /* how many it lacks in all */
    /* Of a file that is read; the tables lie in one block, which begins at `entries`. */
    uint64_t bytes;                  /* of the whole file; of its data once the header is known */
    ampi_entry* entries;             /* its tensors, sorted by name, or by place while they are
                                        read; then scratch for sorting */
    amp_file_text* found;            /* its texts, sorted by key; then the header's text */
    size_t entry_count, found_count;
} ampi_file;

#define AMPI_EACH_ENTRY(f, e) \
    for (ampi_entry* e = (f)->entries; e < (f)->entries + (f)->entry_count; e++)

/* --- sorting and searching --- */
/* Does a stand behind b, by offset? Of two that begin together the empty tensor is first. */
AMPI_FN int ampi_by_place(const void* a, const void* b) {
    const ampi_entry *x = (const ampi_entry*)a, *y = (const ampi_entry*)b;
    return x->begin != y->begin ? x->begin > y->begin : x->end > y->end;
}

/* The file's tensor of that name, or NULL. */
AMPI_FN ampi_entry* ampi_file_find(const ampi_file* f, const char* name) {
    return (ampi_entry*)bsearch(&name, f->entries, f->entry_count, sizeof *f->entries,
        ampi_by_name);
}

/* The file's text of that key, or NULL. */
AMPI_FN const char* ampi_text_of(const ampi_file* f, const char* key) {
    const void* found = bsearch(&key, f->found, f->found_count, sizeof *f->found, ampi_by_name);
    return found ? ((const amp_file_text*)found)->value : NULL;
}

/* --- sentences and numbers --- */
/* Failures, which the logger of file f hears: of a path; or, returning from the function on a
   condition, of the caller's list of tensors or texts (LIST) or of the file (FILE). */
#define AMPI_BAD_PATH(code, ...) ampi_fail(f->desc.logger, code, "file: " __VA_ARGS__)
#define AMPI_REFUSE_AS(condition, code, ...) \
    AMPI_REFUSE_WITH(f->desc.logger, condition, code, "checkpoint: " __VA_ARGS__)
#define AMPI_REFUSE_LIST(condition, ...) AMPI_REFUSE_AS(condition, AMP_ERR_ARGUMENT, __VA_ARGS__)
#define AMPI_REFUSE_FILE(condition, ...) AMPI_REFUSE_AS(condition, AMP_ERR_FORMAT, __VA_ARGS__)

/* The system refused to open, read, write, ... the file; errno says why, but some C libraries leave
   it 0. */
AMPI_FN amp_result ampi_file_cannot(const ampi_file* f, const char* verb) {
    return AMPI_BAD_PATH(AMP_ERR_IO, "cannot %s '%s': %s", verb, f->path, errno ? strerror(errno)
        : "unknown cause");
}

/* Memory for a file's work; a refusal tells how much was wanted. */
AMPI_FN void* ampi_file_alloc(const ampi_file* f, uint64_t bytes) {
    void* p = bytes == (size_t)bytes ? ampi_alloc((size_t)bytes, &f->desc.allocator) : NULL;
    if (!p) AMPI_BAD_PATH(AMP_ERR_MEMORY, "no memory for %llu bytes", (ampi_ull)bytes);
    return p;
}

/* Closes the file, frees its memory, and returns r. */
AMPI_FN amp_result ampi_file_close(ampi_file* f, amp_result r) {
    if (f->stream) fclose(f->stream);
    ampi_free(f->data, &f->desc.allocator);
    ampi_free(f->entries, &f->desc.allocator);
    return r;
}

/* Is c a byte of a character of UTF-8, but not its first? */
AMPI_FN int ampi_is_inside(char c) { return ((unsigned char)c & 0xc0) == 0x80; }

/* Can a tensor have this name? The format keeps one for its texts. */
AMPI_FN int ampi_is_free_name(const char* s) {
    return s && ampi_is_utf8(s) && strcmp(s, "__metadata__") != 0;
}

/* The text behind a prefix; NULL if the text does not begin with it. */
AMPI_FN const char* ampi_behind(const char* prefix, const char* text) {
    const size_t n = strlen(prefix);
    return strncmp(text, prefix, n) == 0 ? text + n : NULL;
}

/* A text for a sentence: of a long one the first `head` and last `tail` bytes, with no character
   cut and "..." between them. */
AMPI_FN const char* ampi_show_ends(const char* text, size_t head, size_t tail,
        char out[AMPI_SHOWN]) {
    const size_t n = strlen(text);
    const int cut = n > head + tail + 3;
    if (!cut) { head = n; tail = 0; }
    while (head > 0 && ampi_is_inside(text[head])) head--;
    while (tail > 0 && ampi_is_inside(text[n - tail])) tail--;
    ampi_say(out, AMPI_SHOWN, "%.*s%s%s", (int)head, text, cut ? "..." : "", text + n - tail);
    return out;
}

/* A name for a sentence, until the next call. */
AMPI_FN const char* ampi_show(ampi_file* f, const char* name) {
    return ampi_show_ends(name, 57, 0, f->name);
}

/* "[6,1,5,5]"; of more than four dimensions the first four. */
AMPI_FN const char* ampi_show_shape(size_t rank, const size_t* shape, char out[AMPI_SHOWN]) {
    size_t at = 1, i;
    strcpy(out, "[");
    for (i = 0; i < rank && i < AMPI_MAX_RANK; i++)  /* 20 digits, a comma and the final 0 */
        at += ampi_say(out + at, 24, i ? ",%llu" : "%llu", (ampi_ull)shape[i]);
    strcpy(out + at, i < rank ? ",...]" : "]");
    return out;
}

/* Bytes of a number's text. */
enum { AMPI_NUMBER = 24 };

/* A number's only text, written to `out`: in base 10; or in base 16, for a float's bits or a
   CRC-32, with eight digits. */
AMPI_FN const char* ampi_show_number(uint64_t n, int base, char out[AMPI_NUMBER]) {
    ampi_say(out, AMPI_NUMBER, base == 16 ? "%.8llx" : "%llu", (ampi_ull)n);
    return out;
}

/* Reads what ampi_show_number writes; returns 0 for any other text, and in base 16 for more than 32
   bits. */
AMPI_FN int ampi_read_number(const char* text, int base, uint64_t* n) {
    char again[AMPI_NUMBER];
    *n = strtoull(text, NULL, base);
    return strcmp(ampi_show_number(*n, base, again), text) == 0
        && (base == 10 || *n <= UINT32_MAX);
}

/* Refuses tensor i of the caller's list whose name, type, shape, count or data no file can have. */
AMPI_FN amp_result ampi_file_check_tensor(ampi_file* f, int i) {
    const amp_file_tensor* listed = &f->tensors[i];
    const amp_tensor* t = &listed->tensor;
    const size_t size = ampi_type_size(t->dtype);
    size_t bytes = size;
    int fits = listed->rank >= 0 && listed->rank <= AMPI_MAX_RANK;
    AMPI_REFUSE_LIST(!ampi_is_free_name(t->name),
        "tensor %d has no name in UTF-8, or a reserved one", i);
    const char* name = ampi_show(f, t->name);
    AMPI_REFUSE_AS(size == 0, AMP_ERR_DTYPE, "tensor '%s': not a file's dtype", name);

    /* A shape whose product overflows is no count. */
    for (int k = 0; fits && k < listed->rank; k++)
        fits = ampi_mul_size(bytes, listed->shape[k], &bytes);
    AMPI_REFUSE_LIST(!fits || bytes / size != t->count,
        "tensor '%s': count is not the product of its shape, or rank not 0..4", name);
    AMPI_REFUSE_LIST(bytes > 0 && !t->data, "tensor '%s': data is NULL", name);
    return AMP_OK;
}

/* Starts to save or load: fills *f, which owns nothing yet, and checks path, list and names. */
AMPI_FN amp_result ampi_file_begin(ampi_file* f, const char* path, const amp_file_tensor* tensors,
        int count, const amp_file_desc* desc) {
    AMPI_CLEAR(*f);
    if (desc) f->desc = *desc;
    f->owner = "memory";
    f->tensors = tensors;
    f->count = count;
    if (!f->desc.allocator.alloc != !f->desc.allocator.free)
        return AMPI_BAD_PATH(AMP_ERR_DESC, "allocator needs both alloc and free, or neither");
    if (!path || !path[0]) return AMPI_BAD_PATH(AMP_ERR_ARGUMENT, "no path is given");
    ampi_show_ends(path, 60, 130, f->path);

    AMPI_REFUSE_LIST(count < 0 || (count > 0 && !tensors), "%d tensors at %s", count,
        tensors ? "a pointer" : "NULL");
    for (int i = 0; i < count; i++) AMPI_TRY(ampi_file_check_tensor(f, i));
    return AMP_OK;
}

/* --- files of the system --- */
#if defined(_WIN32)
/* Moves a file in one step, over one that is there, and waits for programs that hold that open.
   MoveFileExA, unlike fopen, ignores a UTF-8 locale: names become wide ones there. */
AMPI_FN int ampi_replace_file(const char* from, const char* to) {
    enum { ROOM = 1024, REPLACE_AND_FLUSH = 1 | 8 };
    wchar_t a[ROOM], b[ROOM];
    const int utf8 = MB_CUR_MAX > 2 && mbstowcs(a, from, ROOM) < ROOM
        && mbstowcs(b, to, ROOM) < ROOM;
    int tries = 0;
    errno = EACCES;
    while (!(utf8 ? MoveFileExW(a, b, REPLACE_AND_FLUSH) : MoveFileExA(from, to,
        REPLACE_AND_FLUSH)))
        if (!AMPI_OS_WAIT(tries)) return 0;
    return 1;
}
#else
  #define ampi_replace_file(from, to) (rename(from, to) == 0)
#endif

#define AMPI_SUFFIX sizeof ".01234567.tmp"
/* The name of a temporary file beside path, another for each `draw`: path, its name cut to 200
   bytes, and a number that no other process (time) or thread (its stack) is likely to draw. */
AMPI_FN void ampi_name_temporary(const char* path, int draw, char* out) {
    const uint64_t seed = (uint64_t)time(NULL) << 32 ^ (uint64_t)clock()
        ^ (uint64_t)(uintptr_t)&draw << 20;
    size_t length, name = 0, n;  /* name: where the file's name begins */
    for (length = 0; path[length]; length++)
        if (path[length] == '/' || path[length] == '\\') name = length + 1;

    n = ampi_min_size(length, name + 200);
    while (n > name && ampi_is_inside(path[n])) n--;
    memcpy(out, path, n);
    ampi_say(out + n, AMPI_SUFFIX, ".%.8x.tmp", (unsigned)amp_random_bits(seed, (uint64_t)draw));
}

/* Opens the regular file at path to read, and finds its size. Or, with room for a name at
   `temporary`, creates a new file beside it to write, with its mode, and gives the new file's
   name. */
AMPI_FN amp_result ampi_file_stream(ampi_file* f, const char* path, char* temporary) {
    const char *verb = temporary ? "save" : "open", *name = temporary ? temporary : path;
    const char* how = temporary ? "wb" : "rb";
    errno = 0;
#if defined(AMPI_OS)
    /* Permissions of a file that is there; of a new one those that the umask leaves of 0666. */
    struct AMPI_OS64(stat) st;
    const int is_there = AMPI_OS64(stat)(path, &st) == 0;
    const unsigned mode = is_there ? (unsigned)st.st_mode & 0777u : 0666u;
    const int flags = AMPI_OS_FLAGS | (temporary
        ? AMPI_OS(O_WRONLY) | AMPI_OS(O_CREAT) | AMPI_OS(O_EXCL) : 0);
    int fd, tries = 0;
    if (is_there && !AMPI_OS_IS_FILE(st))
        return AMPI_BAD_PATH(AMP_ERR_IO, "'%s' is not a regular file", f->path);

    /* O_EXCL fails where a file has the name: another is drawn. On Windows reading waits while the
       file is being replaced. */
    do {
        if (temporary) ampi_name_temporary(path, tries, temporary);
        fd = AMPI_OS(open)(name, flags, mode);
    } while (fd < 0 && (temporary ? errno == EEXIST && ++tries < 100 : errno == EACCES
        && AMPI_OS_WAIT(tries)));
    if (fd < 0) return ampi_file_cannot(f, verb);
  #if !defined(_WIN32)
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (temporary && is_there) (void)fchmod(fd, (mode_t)mode);  /* what the umask took */
  #endif

    if (AMPI_OS64(fstat)(fd, &st) == 0) f->bytes = (uint64_t)st.st_size;
    f->stream = AMPI_OS(fdopen)(fd, how);
    if (!f->stream) {
        AMPI_OS(close)(fd);
        if (temporary) remove(temporary);
    }
#else
    /* A system of which nothing is known but C's library. */
    if (temporary) ampi_name_temporary(path, 0, temporary);
    f->stream = fopen(name, how);
    if (f->stream && fseek(f->stream, 0, SEEK_END) == 0) f->bytes = (uint64_t)ftell(f->stream);
    if (f->stream) rewind(f->stream);
#endif
    return f->stream ? AMP_OK : ampi_file_cannot(f, verb);
}

/* --- writing --- */
/* A string in quotes: a plain prefix, then a text in which JSON's own characters become \u00XX. */
AMPI_FN void ampi_put_string(FILE* out, const char* prefix, const char* text) {
    putc('"', out);
    fputs(prefix, out);
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == '"' || *text == '\\')
            ampi_print(out, "\\u%.4x", (unsigned)*text);
        else putc(*text, out);
    putc('"', out);
}

/* For each tensor number i of file f, in the order of the file's data: larger elements come first,
   so that each element is aligned. */
#define AMPI_LARGEST_FIRST(f, i) \
    for (size_t element_ = 8; element_ >= 2; element_ /= 2) \
        for (int i = 0; i < (f)->count; i++) \
            if (ampi_type_size((f)->tensors[i].tensor.dtype) == element_)

/* The header behind its length: texts, CRC-32s, tensors, and spaces up to a multiple of 8 bytes.
   Returns its length, which is known only once it was written, and is then written over `length`
   by a second call. */
AMPI_FN uint64_t ampi_put_header(const ampi_file* f, uint64_t length) {
    FILE* out = f->stream;
    char shape[AMPI_SHOWN], crc[AMPI_NUMBER];
    uint64_t begin = 0;  /* of the next tensor's bytes in the data */
    for (int i = 0; i < 8; i++) putc((int)(length >> 8 * i & 0xff), out);

    /* "__metadata__", if there are any: the texts, then the checksum of each tensor k. */
    for (int i = 0; i < f->text_count + f->count; i++) {
        const int k = i - f->text_count;
        fputs(i ? "," : "{\"__metadata__\":{", out);
        ampi_put_string(out, k < 0 ? "" : AMPI_CRC_KEY, k < 0 ? f->texts[i].key
            : f->tensors[k].tensor.name);
        putc(':', out);
        ampi_put_string(out, "", k < 0 ? f->texts[i].value : ampi_show_number(f->crcs[k], 16, crc));
    }
    putc(f->text_count + f->count > 0 ? '}' : '{', out);

    /* A comma stands before each tensor: its checksum is before it. */
    AMPI_LARGEST_FIRST(f, i) {
        const amp_file_tensor* t = &f->tensors[i];
        const uint64_t end = begin + t->tensor.count * ampi_type_size(t->tensor.dtype);
        putc(',', out);
        ampi_put_string(out, "", t->tensor.name);
        ampi_print(out, ":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}",
                ampi_file_types[t->tensor.dtype],
                ampi_show_shape((size_t)t->rank, t->shape, shape), (ampi_ull)begin, (ampi_ull)end);
        begin = end;
    }

    /* One bracket and at most seven spaces; the length's own 8 bytes do not count. */
    const uint64_t at = (uint64_t)ftell(out);
    ampi_print(out, "}%*s", (int)(7 - at % 8), "");
    return at / 8 * 8;
}

/* The rest of tensor i's masters if they are split, or NULL. */
AMPI_FN uint16_t* ampi_file_rest(const ampi_file* f, int i) {
    return f->rests ? f->rests[i] : NULL;
}

/* Bytes [at, at + n) of tensor i as the file holds them, to f->data. */
AMPI_FN amp_result ampi_file_fetch(const ampi_file* f, int i, size_t at, size_t n) {
    const char* from = (const char*)f->tensors[i].tensor.data;
    const uint16_t *rest = ampi_file_rest(f, i), *low = (const uint16_t*)(const void*)from;
    float* joined = (float*)(void*)f->data;
    amp_model* m = f->model;
    if (rest && m) return ampi_read_split(m, low + at / 4, rest + at / 4, joined, n / 4);
    if (m) return ampi_run(copy_out, f->data, from + at, n);
    if (rest) ampi_join(joined, low + at / 4, rest + at / 4, n / 4);
    else memcpy(f->data, from + at, n);
    return AMP_OK;
}

/* Writes the elements of tensor i, little-endian, chunk by chunk, and takes their CRC-32. */
AMPI_FN amp_result ampi_put_data(ampi_file* f, int i) {
    const amp_tensor* t = &f->tensors[i].tensor;
    const size_t size = ampi_type_size(t->dtype), bytes = t->count * size;
    for (size_t at = 0, n; at < bytes && !ferror(f->stream); at += n) {
        n = ampi_min_size(bytes - at, AMPI_CHUNK_BYTES);
        AMPI_TRY(ampi_file_fetch(f, i, at, n));
        ampi_swap_endian((unsigned char*)f->data, n, size);
        fwrite(f->data, 1, n, f->stream);
        f->crcs[i] = ampi_crc32(f->crcs[i], f->data, n);
    }
    return AMP_OK;
}

/* The header, to find its length, the data, and the header again with its length and the CRCs. The
   caller looks for errors of the stream. */
AMPI_FN amp_result ampi_put_tensors(ampi_file* f) {
    const uint64_t header = ampi_put_header(f, 0);
    AMPI_REFUSE_LIST(header > AMPI_MAX_HEADER, "a header of %llu bytes; %u are allowed",
        (ampi_ull)header, AMPI_MAX_HEADER);
    AMPI_LARGEST_FIRST(f, i) AMPI_TRY(ampi_put_data(f, i));
    if (fseek(f->stream, 0, SEEK_SET) != 0) return ampi_file_cannot(f, "write");
    ampi_put_header(f, header);
    return AMP_OK;
}

/* Refuses two tensors, or two texts, of one name. names: room for the longer list and half of it
   again, in which ampi_sort_names sorts. */
AMPI_FN amp_result ampi_file_check_names(ampi_file* f, const char** names) {
    for (int i = 0; i < f->count; i++) names[i] = f->tensors[i].tensor.name;
    const char* twice = ampi_sort_names(names, (size_t)f->count, sizeof *names, names + f->count);
    if (!twice) {
        for (int i = 0; i < f->text_count; i++) names[i] = f->texts[i].key;
        twice = ampi_sort_names(names, (size_t)f->text_count, sizeof *names, names + f->text_count);
    }
    AMPI_REFUSE_LIST(twice, "the name '%s' is used twice", ampi_show(f, twice));
    return AMP_OK;
}

/* Writes the picture or the tensors, flushes them and closes the file. Without the flush before the
   caller's rename, a power cut can leave the new name on an empty file. */
AMPI_FN amp_result ampi_file_write(ampi_file* f) {
    amp_result r = AMP_OK;
    if (f->draw) f->draw(f->picture, f->stream);
    else r = ampi_put_tensors(f);
    int failed = ferror(f->stream) || fflush(f->stream) != 0 || !AMPI_OS_SYNC(f->stream);
    failed |= fclose(f->stream) != 0;
    f->stream = NULL;
    return r == AMP_OK && failed ? ampi_file_cannot(f, "write") : r;
}

#if defined(AMPI_OS) && !defined(_WIN32)
/* Flushes the new name, too, where a directory can be flushed. `temporary`, the name that the file
   had, becomes the directory's. */
AMPI_FN amp_result ampi_flush_directory(const ampi_file* f, char* temporary) {
    amp_result r = AMP_OK;
    char* slash = strrchr(temporary, '/');
    strcpy(slash ? slash + 1 : temporary, slash ? "" : ".");
    const int fd = open(temporary, O_RDONLY | AMPI_OS_FLAGS);
    if (fd >= 0 && fsync(fd) != 0 && errno == EIO)
        r = ampi_file_cannot(f, "flush the directory of");
    if (fd >= 0) close(fd);
    return r;
}
#else
  #define ampi_flush_directory(f, temporary) AMP_OK
#endif

/* Writes a temporary file beside path and renames it to path; removes it after a failure or a
   trial. The caller has set what is to be written. */
AMPI_FN amp_result ampi_save_file(ampi_file* f, const char* path) {
    const size_t capacity = ampi_max_size((size_t)f->count, (size_t)f->text_count);
    const size_t name_capacity = capacity + capacity / 2 + 1;

    /* One block: a chunk of data; names to be checked, later checksums; the file's name. */
    f->data = (char*)ampi_file_alloc(f, AMPI_CHUNK_BYTES + name_capacity * sizeof(char*)
        + strlen(path) + AMPI_SUFFIX);
    if (!f->data) return AMP_ERR_MEMORY;
    const char** names = (const char**)(void*)(f->data + AMPI_CHUNK_BYTES);
    char* temporary = (char*)(names + name_capacity);
    AMPI_TRY(ampi_file_check_names(f, names));
    f->crcs = (uint32_t*)(void*)names;
    memset(f->crcs, 0, (size_t)f->count * sizeof *f->crcs);

    AMPI_TRY(ampi_file_stream(f, path, temporary));
    amp_result r = ampi_file_write(f);
    if (r == AMP_OK && !f->is_trial && !ampi_replace_file(temporary, path))
        r = ampi_file_cannot(f, "replace");
    if (r == AMP_OK && !f->is_trial) return ampi_flush_directory(f, temporary);
    remove(temporary);
    return r;
}

/* Checks the list, then writes a temporary file and renames it. */
AMP_DEF amp_result amp_file_save(const char* path, const amp_file_tensor* tensors, int count,
        const amp_file_text* texts, int text_count, const amp_file_desc* desc) {
    ampi_file file, *f = &file;
    AMPI_TRY(ampi_file_begin(f, path, tensors, count, desc));
    f->texts = texts;
    f->text_count = text_count;
    AMPI_REFUSE_LIST(text_count < 0 || (text_count > 0 && !texts), "%d texts at %s", text_count,
        texts ? "a pointer" : "NULL");
    for (int i = 0; i < text_count; i++)
        AMPI_REFUSE_LIST(!texts[i].key || !texts[i].value || !ampi_is_utf8(texts[i].key)
            || !ampi_is_utf8(texts[i].value) || ampi_behind(AMPI_CRC_KEY, texts[i].key),
            "text %d must be UTF-8; keys with " AMPI_CRC_KEY " are reserved", i);
    return ampi_file_close(f, ampi_save_file(f, path));
}

/* --- JSON, as much as a header may hold --- */
/* A cursor over a text. Strings are decoded in place: none grows. After the first error the cursor
   stays, and all that is read is empty or 0. */
typedef struct ampi_json {
    char *at, *end;     /* the next character; the text's final 0 */
    const char* error;  /* the first one; NULL = none yet */
    char missing[20];   /* room for an error's text */
} ampi_json;

/* Notes an error, if it is the first. */
AMPI_FN void ampi_json_fail(ampi_json* j, const char* error) { if (!j->error) j->error = error; }

/* Steps over white space, and over c if it comes next. */
AMPI_FN int ampi_json_skip(ampi_json* j, char c) {
    if (j->error) return 0;
    j->at += strspn(j->at, " \t\n\r");
    if (*j->at != c) return 0;
    j->at++;
    return 1;
}

/* Skips character c, or records that it is missing. */
AMPI_FN void ampi_json_expect(ampi_json* j, char c) {
    if (ampi_json_skip(j, c) || j->error) return;
    AMPI_SAY(j->missing, "'%c' is missing", c);
    j->error = j->missing;
}

/* Is there one more member of the list in these two brackets, of which n were read? Then n grows.
   The cursor steps over the bracket or comma before the member, or over the last bracket. */
AMPI_FN int ampi_json_more(ampi_json* j, const char* brackets, size_t* n) {
    if (*n == 0) ampi_json_expect(j, brackets[0]);
    if (ampi_json_skip(j, brackets[1])) return 0;
    if (*n > 0) ampi_json_expect(j, ',');
    ++*n;
    return !j->error;
}

/* The value of the uXXXX at the cursor; 0, and an error, if something else stands there. The digits
   are copied, since strtoul would read on. */
AMPI_FN unsigned ampi_json_unit(ampi_json* j) {
    char digits[5] = "";
    if (strspn(j->at + 1, "0123456789abcdefABCDEF") < 4)
        ampi_json_fail(j, "an escape \\u is not followed by four hexadecimal digits");
    else {
        memcpy(digits, j->at + 1, 4);
        j->at += 5;
    }
    return (unsigned)strtoul(digits, NULL, 16);
}

/* Decodes the escape behind a backslash, a letter, \u or two \u, to UTF-8 at w; returns the end of
   what is written. */
AMPI_FN char* ampi_json_escape(ampi_json* j, char* w) {
    static const char letters[] = "\"\\/bfnrtu", meanings[] = "\"\\/\b\f\n\r\t";
    static const unsigned char heads[] = { 0, 0xc0, 0xe0, 0xf0 };
    const char* found = (const char*)memchr(letters, *j->at, sizeof letters - 1);
    if (!found) {
        ampi_json_fail(j, "an unknown escape");
        return w;
    }
    if (*found != 'u') {
        j->at++;
        *w = meanings[found - letters];
        return w + 1;
    }

    /* A code above U+FFFF is two units, a surrogate pair: 0xd800 to 0xdbff, 0xdc00 to 0xdfff. */
    unsigned code = ampi_json_unit(j);
    if (code == 0) ampi_json_fail(j, "a text holds a zero character");
    if (code >> 10 == 0xd800 >> 10 && strncmp(j->at, "\\u", 2) == 0) {
        j->at++;
        const unsigned low = ampi_json_unit(j);
        if (low >> 10 == 0xdc00 >> 10) code = 0x10000 + ((code & 0x3ff) << 10 | (low & 0x3ff));
    }
    if (code >> 11 == 0xd800 >> 11) ampi_json_fail(j, "an escape is half of a surrogate pair");

    /* UTF-8: the highest bits behind a head that tells the length, then six bits a byte. */
    int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  /* bytes behind it */
    *w++ = (char)(heads[more] | code >> 6 * more);
    while (more-- > 0) *w++ = (char)(0x80 | (code >> 6 * more & 0x3f));
    return w;
}

/* A UTF-8 string without control characters, decoded over its own text, which is never shorter; ""
   after an error. Steps over `next` behind it, if not 0. */
AMPI_FN const char* ampi_json_string(ampi_json* j, char next) {
    ampi_json_expect(j, '"');
    char *text = j->at, *w = text;  /* w: where the next decoded byte goes */
    while (!j->error && *j->at != '"') {
        if (*j->at == '\\') {
            j->at++;
            w = ampi_json_escape(j, w);
        } else if (j->at == j->end) ampi_json_fail(j, "a text is not closed");
        else if ((unsigned char)*j->at < 0x20)
            ampi_json_fail(j, "a text holds a control character");
        else *w++ = *j->at++;
    }
    if (j->error) return "";

    *w = '\0';
    if (!ampi_is_utf8(text)) ampi_json_fail(j, "a text is not UTF-8");
    j->at++;
    if (next) ampi_json_expect(j, next);
    return text;
}

/* A whole number: digits alone, without a leading zero. */
AMPI_FN uint64_t ampi_json_number(ampi_json* j) {
    const int zero = ampi_json_skip(j, '0'), more = *j->at >= '0' && *j->at <= '9';
    if (zero == more)
        ampi_json_fail(j, zero ? "a number begins with a zero" : "a whole number is missing");
    if (j->error || zero) return 0;
    errno = 0;
    const uint64_t n = strtoull(j->at, &j->at, 10);
    if (errno == ERANGE) ampi_json_fail(j, "a number is too large");
    return n;
}

/* The name of a type, for e. Returns an element's bits; 0 for an unknown type, an error. */
AMPI_FN uint64_t ampi_json_dtype(ampi_json* j, ampi_entry* e) {
    const char* name = ampi_json_string(j, '\0');
    e->type = AMP_F32;
    while (e->type < AMPI_FILE_TYPES && strcmp(name, ampi_file_types[e->type]) != 0) e->type++;
    if (e->type == AMPI_FILE_TYPES) ampi_json_fail(j, "an unknown dtype");
    e->dtype = e->type <= AMP_F64 ? (amp_dtype)e->type : AMP_DTYPE_DEFAULT;
    return strcmp(name, "BOOL") == 0 ? 8 : strtoul(name + strcspn(name, "0123456789"), NULL, 10);
}

/* A list of sizes, for e. Returns their product; 1 for [], the shape of a single element. */
AMPI_FN uint64_t ampi_json_shape(ampi_json* j, ampi_entry* e) {
    uint64_t count = 1;
    while (ampi_json_more(j, "[]", &e->rank)) {
        const uint64_t size = ampi_json_number(j);
        if (size != 0 && count > UINT64_MAX / size)
            ampi_json_fail(j, "a shape has too many elements");
        count *= size;
        if (e->rank <= AMPI_MAX_RANK)
            e->shape[e->rank - 1] = size < SIZE_MAX ? (size_t)size : SIZE_MAX;
    }
    return count;
}

/* A tensor's description: each of three fields once, in any order. */
AMPI_FN void ampi_json_tensor(ampi_json* j, ampi_entry* e) {
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4, UNKNOWN = 8 };
    uint64_t count = 1, bits = 1;  /* elements, and bits of one */
    size_t n = 0;
    int found = 0;  /* fields, as a sum */
    while (ampi_json_more(j, "{}", &n)) {
        const char* key = ampi_json_string(j, ':');
        const int field = !strcmp(key, "dtype") ? DTYPE : !strcmp(key, "shape") ? SHAPE
            : !strcmp(key, "data_offsets") ? OFFSETS : UNKNOWN;
        if (field == UNKNOWN || (found & field))
            ampi_json_fail(j, "a tensor has an unknown field, or a field twice");
        found |= field;
        if (field == DTYPE) bits = ampi_json_dtype(j, e);
        else if (field == SHAPE) count = ampi_json_shape(j, e);
        else {
            ampi_json_expect(j, '[');
            e->begin = ampi_json_number(j);
            ampi_json_expect(j, ',');
            e->end = ampi_json_number(j);
            ampi_json_expect(j, ']');
        }
    }

    if (found != DTYPE + SHAPE + OFFSETS)
        ampi_json_fail(j, "a tensor lacks its dtype, shape or data_offsets");
    if (!j->error && (count > UINT64_MAX / bits || count * bits % 8 != 0 || e->begin > e->end
            || count * bits / 8 != e->end - e->begin))
        ampi_json_fail(j, "data_offsets do not fit the dtype and shape of their tensor");
}

/* The header, into the tables of f: entries grow up, texts down. Both are large enough, see
   ampi_file_open. */
AMPI_FN void ampi_json_header(ampi_json* j, ampi_file* f) {
    size_t n = 0;
    int has_texts = 0;
    if (*j->at != '{') ampi_json_fail(j, "a header begins with {");
    while (ampi_json_more(j, "{}", &n)) {
        const char* name = ampi_json_string(j, ':');
        if (strcmp(name, "__metadata__") != 0) {
            ampi_entry* e = &f->entries[f->entry_count++];
            AMPI_CLEAR(*e);
            e->name = name;
            ampi_json_tensor(j, e);
            continue;
        }

        if (has_texts++) ampi_json_fail(j, "__metadata__ occurs twice");
        while (ampi_json_more(j, "{}", &f->found_count)) {
            amp_file_text* t = --f->found;
            t->key = ampi_json_string(j, ':');
            t->value = ampi_json_string(j, '\0');
        }
    }

    if (!j->error) j->at += strspn(j->at, " ");
    if (j->at < j->end) ampi_json_fail(j, "something follows the header's last bracket");
}

/* --- reading --- */
/* Refuses tensors that leave holes in the data, overlap or go beyond, and names or keys that occur
   twice. Sorts both by name, and takes each checksum to its tensor. */
AMPI_FN amp_result ampi_file_check(ampi_file* f) {
    ampi_entry* scratch = f->entries + f->entry_count;
    uint64_t end = 0, crc;
    ampi_sort(f->entries, f->entry_count, sizeof *f->entries, ampi_by_place, scratch);
    AMPI_EACH_ENTRY(f, e) {
        AMPI_REFUSE_FILE(e->begin != end, "'%s': tensor '%s' begins %s", f->path,
            ampi_show(f, e->name), e->begin > end ? "behind a hole" : "inside the one before");
        end = e->end;
    }
    AMPI_REFUSE_FILE(end > f->bytes, "'%s' is truncated: it ends inside a tensor", f->path);
    AMPI_REFUSE_FILE(end < f->bytes, "'%s' goes on after its last tensor", f->path);

    const char* twice = ampi_sort_names(f->entries, f->entry_count, sizeof *f->entries, scratch);
    if (!twice) twice = ampi_sort_names(f->found, f->found_count, sizeof *f->found, scratch);
    AMPI_REFUSE_FILE(twice, "'%s': the name '%s' occurs twice", f->path, ampi_show(f, twice));

    for (size_t i = 0; i < f->found_count; i++) {
        const amp_file_text* t = &f->found[i];
        const char* name = ampi_behind(AMPI_CRC_KEY, t->key);
        ampi_entry* e = name ? ampi_file_find(f, name) : NULL;
        if (!e) continue;
        e->crc = t->value;
        AMPI_REFUSE_FILE(!ampi_read_number(e->crc, 16, &crc),
            "'%s': text '%s' is not eight hexadecimal digits", f->path, ampi_show(f, t->key));
    }
    return AMP_OK;
}

/* Reads n bytes, or with out = NULL steps over them: at most 2^30 at a time, since a long may have
   32 bits. */
AMPI_FN amp_result ampi_file_get(ampi_file* f, void* out, uint64_t n) {
    uint64_t step;
    if (out) return fread(out, 1, (size_t)n, f->stream) == n ? AMP_OK : ampi_file_cannot(f, "read");
    for (; n > 0; n -= step) {
        step = n < 0x40000000 ? n : 0x40000000;
        if (fseek(f->stream, (long)step, SEEK_CUR) != 0) return ampi_file_cannot(f, "read");
    }
    return AMP_OK;
}

/* Reads the header's length, with which a file begins, and refuses files of other formats. */
AMPI_FN amp_result ampi_file_read_length(ampi_file* f, uint64_t* length) {
    static const char* const foreign[][2] = {  /* first bytes, and what they are */
        { "PK\003\004", "a zip archive of torch.save or numpy.savez" },
        { "\200\002", "a pickle of torch.save" },
        { "\211HDF", "an HDF5 file" },
        { "\223NUMPY", "a file of numpy.save" },
        { "GGUF", "a GGUF file" }
    };
    unsigned char first[8];
    AMPI_REFUSE_FILE(f->bytes < 8, "'%s' is truncated: it ends inside its first number", f->path);
    AMPI_TRY(ampi_file_get(f, first, 8));
    *length = ampi_get(first, 8);

    /* The bytes of a valid length may happen to be those of another format. */
    const int valid = *length >= 2 && *length <= AMPI_MAX_HEADER;
    if (!valid)
        for (size_t i = 0; i < AMPI_LENGTH(foreign); i++)
            AMPI_REFUSE_FILE(memcmp(first, foreign[i][0], strlen(foreign[i][0])) == 0,
                "'%s' is %s; needed is a "
                "safetensors file, as safetensors.torch.save_file writes", f->path, foreign[i][1]);
    AMPI_REFUSE_FILE(!valid, "'%s': header of %llu bytes; 2 to %u are valid", f->path,
        (ampi_ull)*length, AMPI_MAX_HEADER);
    AMPI_REFUSE_FILE(*length > f->bytes - 8, "'%s' is truncated: it ends inside its header",
        f->path);
    return AMP_OK;
}

/* Opens a file, reads its header into tables, and checks it. ampi_file_close is always due. */
AMPI_FN amp_result ampi_file_open(ampi_file* f, const char* path) {
    uint64_t n = 0;  /* bytes of the header */
    AMPI_TRY(ampi_file_stream(f, path, NULL));
    AMPI_TRY(ampi_file_read_length(f, &n));
    f->bytes -= 8 + n;

    /* A tensor takes at least 48 characters, ("":{"dtype":"U8","shape":[],"data_offsets":[0,1]}),
       a text six, ("":"",). So four bytes a character hold both tables, that of texts growing down
       from the end, and half of either to sort it. The header lies behind them. */
    const size_t tables = ampi_round_up(4 * (size_t)n + 2 * sizeof *f->entries
        + 2 * sizeof *f->found, 8);
    f->entries = (ampi_entry*)ampi_file_alloc(f, (uint64_t)tables + n + 1);
    if (!f->entries) return AMP_ERR_MEMORY;
    char* header = (char*)f->entries + tables;
    f->found = (amp_file_text*)(void*)header;

    ampi_json j = { header, header + n, NULL, "" };
    *j.end = '\0';
    AMPI_TRY(ampi_file_get(f, header, n));
    ampi_json_header(&j, f);
    AMPI_REFUSE_FILE(j.error, "'%s', byte %lld of the header: %s", f->path,
        (long long)(j.at - header), j.error);
    return ampi_file_check(f);
}

/* Counts a tensor that the file lacks, and keeps the first three names for a sentence. */
AMPI_FN void ampi_file_miss(ampi_file* f, const char* name) {
    const size_t at = strlen(f->missing);
    if (f->missing_count++ < 3)
        ampi_say(f->missing + at, sizeof f->missing - at, at ? ", '%s'" : "'%s'", name);
}

/* Finds the caller's tensors in the file, compares them, and makes room for their data. Weights
   alone may have any of amp's types or be missing. */
AMPI_FN amp_result ampi_file_want(ampi_file* f, int weights_alone) {
    char theirs[AMPI_SHOWN], ours[AMPI_SHOWN];
    uint64_t total = 0;  /* bytes of room so far */
    for (int i = 0; i < f->count; i++) {
        const amp_file_tensor* t = &f->tensors[i];
        const char* name = ampi_show(f, t->tensor.name);
        ampi_entry* e = ampi_file_find(f, t->tensor.name);
        if (!e && weights_alone) {
            ampi_file_miss(f, name);
            continue;
        }

        AMPI_REFUSE_FILE(!e, "'%s' has no tensor '%s'", f->path, name);
        AMPI_REFUSE_LIST(e->wanted, "tensor '%s' is asked for twice", name);
        /* F32 stands in for a type that amp does not have. */
        const amp_dtype dtype = ampi_dtype_or_f32(weights_alone ? e->dtype : t->tensor.dtype);
        AMPI_REFUSE_FILE(e->dtype != dtype, "tensor '%s' is %s in the file, but %s in %s", name,
            e->dtype ? amp_dtype_name(e->dtype) : ampi_file_types[e->type], amp_dtype_name(dtype),
            f->owner);
        ampi_show_shape((size_t)t->rank, t->shape, ours);
        ampi_show_shape(e->rank, e->shape, theirs);
        AMPI_REFUSE_FILE(strcmp(theirs, ours) != 0,
            "tensor '%s' has the shape %s in the file, but %s in %s", name, theirs, ours, f->owner);

        /* Whole units of 8 bytes; two for one where a model's 16 bits may become FP32 in place. */
        e->wanted = &t->tensor;
        e->number = i;
        e->place = (size_t)total;
        total += (e->end - e->begin + 7) / 8 * (f->model && ampi_type_size(e->dtype) == 2 ? 16 : 8);
    }
    f->data = (char*)ampi_file_alloc(f, total);
    return f->data ? AMP_OK : AMP_ERR_MEMORY;
}

/* Writes what was read of tensor e over the model's. Another type is converted in place; where it
   is no wider, values beyond it become its largest finite one, and the logger hears how many. */
AMPI_FN amp_result ampi_file_hand(ampi_file* f, const ampi_entry* e) {
    amp_model* m = f->model;
    const amp_tensor* to = e->wanted;
    uint16_t* rest = ampi_file_rest(f, e->number);
    const amp_dtype type = ampi_dtype_or_f32(to->dtype);
    const size_t size = ampi_type_size(type);
    char* data = f->data + e->place;
    size_t beyond = 0;  /* values that became the largest */
    amp_convert_desc how;
    AMPI_CLEAR(how);
    how.saturate = size <= ampi_type_size(e->dtype);
    how.saturated = &beyond;

    if (e->dtype != type) AMPI_TRY(amp_convert_with(amp_ref_of(data, type),
        amp_ref_of(data, e->dtype), to->count, &how));
    if (beyond > 0)
        ampi_remark(f->desc.logger,
            "checkpoint: %llu of %llu values of '%s' are beyond %s and become its largest",
            (ampi_ull)beyond, (ampi_ull)to->count, ampi_show(f, e->name), amp_dtype_name(type));
    if (rest) return ampi_write_split(m, (uint16_t*)to->data, rest, (float*)(void*)data, to->count);
    AMPI_RUN(copy_in, to->data, data, to->count * size);
    return AMP_OK;
}

/* Writes what was read of tensor e over the caller's. */
AMPI_FN void ampi_file_hand_host(const ampi_file* f, const ampi_entry* e) {
    uint16_t* rest = ampi_file_rest(f, e->number);
    void* data = f->data + e->place;
    if (rest) amp_master_split(e->wanted->data, rest, (const float*)data, e->wanted->count);
    else memcpy(e->wanted->data, data, (size_t)(e->end - e->begin));
}

/* Reads the wanted tensors in the order of the file; hands them over if all are sound. */
AMPI_FN amp_result ampi_file_read(ampi_file* f) {
    char crc[AMPI_NUMBER];
    ampi_sort(f->entries, f->entry_count, sizeof *f->entries, ampi_by_place,
        f->entries + f->entry_count);
    AMPI_EACH_ENTRY(f, e) {
        char* data = e->wanted ? f->data + e->place : NULL;
        const size_t bytes = (size_t)(e->end - e->begin);
        AMPI_TRY(ampi_file_get(f, data, e->end - e->begin));
        if (!data) continue;
        AMPI_REFUSE_FILE(e->crc && strcmp(ampi_show_number(ampi_crc32(0, data, bytes), 16, crc),
            e->crc) != 0, "'%s': tensor '%s' is damaged: its CRC-32 is %s, the file says %s",
            f->path, ampi_show(f, e->name), crc, e->crc);
        ampi_swap_endian((unsigned char*)data, bytes, ampi_type_size(e->dtype));
    }

    AMPI_EACH_ENTRY(f, e) {
        if (!e->wanted || e->begin == e->end) continue;
        if (f->model) AMPI_TRY(ampi_file_hand(f, e));
        else ampi_file_hand_host(f, e);
    }
    return AMP_OK;
}

/* Opens and checks a file, then hands over the tensors that are listed. */
AMP_DEF amp_result amp_file_load(const char* path, const amp_file_tensor* tensors, int count,
        const amp_file_desc* desc) {
    ampi_file f;
    AMPI_TRY(ampi_file_begin(&f, path, tensors, count, desc));
    amp_result r = ampi_file_open(&f, path);
    if (r == AMP_OK) r = ampi_file_want(&f, 0 /* all */);
    if (r == AMP_OK) r = ampi_file_read(&f);
    return ampi_file_close(&f, r);
}

/* Copies one text of a file's metadata. */
AMP_DEF amp_result amp_file_text_of(const char* path, const char* key, char* out, size_t size,
        const amp_file_desc* desc) {
    ampi_file file, *f = &file;
    AMPI_TRY(ampi_file_begin(f, path, NULL, 0, desc));
    AMPI_REFUSE_LIST(!key || !out || size == 0, "key or out is missing");
    amp_result r = ampi_file_open(f, path);
    if (r == AMP_OK) {
        const char* text = ampi_text_of(f, key);
        if (text && strlen(text) < size) strcpy(out, text);
        else
            r = ampi_fail(f->desc.logger, AMP_ERR_FORMAT,
                "checkpoint: '%s' has no text '%s' shorter than %llu", f->path, ampi_show(f, key),
                (ampi_ull)size);
    }
    return ampi_file_close(f, r);
}

/* >>impl-checkpoint Checkpoints of a model, and of a loop of the caller's: which tensors and texts
   a file holds. */
/* What loading does with a number. */
enum { AMPI_AGREES,   /* must be equal in the file and here */
       AMPI_LOADED,   /* state, which loading sets */
       AMPI_KEPT,     /* a setting: loading keeps it and reports a difference */
       AMPI_GRAPH };  /* must be equal; compared after tensors, which say more */

/* A number of a checkpoint, which the file holds as a text. */
typedef struct ampi_number {
    void* at;            /* where it is here; only what is AMPI_LOADED may be written */
    int kind;            /* of 32 bits: 'f' float, 'i' int; of 64: 'l', and 's', a count of steps */
    int role;            /* what loading does */
    int of_group;        /* 1 = of a parameter group */
    int optional;        /* 1 = left out of the file where it is 0 */
    const char* theirs;  /* the file's text */
    char key[40];        /* the text's key: "amp.<name>", "amp.group<i>.<name>" */
    char text[AMPI_NUMBER];  /* the number here, as a text */
} ampi_number;
enum { AMPI_MAX_NUMBERS = 32 + 5 * AMP_MAX_GROUPS, AMPI_MAX_SCALERS = 1 + AMP_MAX_LOSSES };

#define AMPI_TENSOR_NAME 144  /* bytes of a name and the longest suffix, ".running_mean" */

/* A checkpoint is of a model, or of a loop's optimizer, scaler and more tensors. */
typedef struct ampi_checkpoint {
    ampi_file file;               /* its model is NULL for a loop */
    const char* saver;            /* the function that writes such a file, for sentences */
    amp_optimizer *optimizer, o;  /* the caller's; a copy with the file's logger, to which loading
                                     writes until all is checked */
    amp_scaler *scalers[AMPI_MAX_SCALERS], s[AMPI_MAX_SCALERS];  /* likewise; a model's, then those
                                                                   of its losses */
    int scaler_count;
    uint64_t passes;              /* likewise of a model: its passes in training so far */
    ampi_number numbers[AMPI_MAX_NUMBERS];
    int number_count;
    amp_file_tensor* tensors;     /* an allocation: all tensors of the file, and their names */
    char (*names)[AMPI_TENSOR_NAME];
    int tensor_count;             /* of those that have a name there: all but the caller's */
} ampi_checkpoint;

#define AMPI_EACH_NUMBER(c, x) \
    for (ampi_number* x = (c)->numbers; x < (c)->numbers + (c)->number_count; x++)

/* Lists a number of a group, or of none (-1). Optional are a group's frozen flag and steps, and,
   without groups in the desc, all numbers of group 0, where the caller may have written. */
AMPI_FN void ampi_number_add(ampi_checkpoint* c, int group, const char* name, void* at, int kind,
        int role) {
    ampi_number* x = &c->numbers[c->number_count++];
    uint32_t word;
    uint64_t value;
    memcpy(&word, at, sizeof word);  /* 'f' and 'i' come before 'l' and 's' */
    if (kind < 'l') value = word;
    else memcpy(&value, at, sizeof value);
    x->at = at;
    x->kind = kind;
    x->role = role;
    x->of_group = group >= 0;
    x->optional = x->of_group && (kind != 'f' || c->o.desc.group_count == 0);
    if (x->of_group) AMPI_SAY(x->key, "amp.group%d.%s", group, name);
    else AMPI_SAY(x->key, "amp.%s", name);
    ampi_show_number(value, kind == 'f' ? 16 : 10, x->text);
}

#define AMPI_OF_MODEL(name, member, kind) { name, m ? &m->member : NULL, kind, AMPI_AGREES }
#define AMPI_SETTING(member, kind) { #member, &d->member, kind, AMPI_KEPT }
/* Lists the numbers of a checkpoint: the step first, since it bounds others (ampi_numbers_read); a
   hash of the graph, or of a loop's groups of parameters, last. `at` is NULL for numbers of models
   in a loop. */
AMPI_FN void ampi_numbers_list(ampi_checkpoint* c) {
    amp_model* m = c->file.model;
    amp_optimizer* o = &c->o;
    amp_optimizer_desc* d = &o->desc;
    int32_t format = 1, grad_dtype = m ? (int32_t)ampi_dtype_or_f32(m->desc.grad_dtype) : 0;
    uint64_t hash = m ? ampi_model_fingerprint(m) : AMPI_HASH_START;
    const struct { const char* name; void* at; int kind, role; } rows[] = {
        { "step", &o->state.step, 's', AMPI_LOADED },
        { "lr", &o->state.lr, 'f', AMPI_LOADED },
        { "pass", &c->passes, 'l', AMPI_LOADED },
        { "format", &format, 'i', AMPI_AGREES },
        AMPI_OF_MODEL("level", policy.level, 'i'),
        AMPI_OF_MODEL("low_dtype", policy.low_dtype, 'i'),
        AMPI_OF_MODEL("seed", desc.seed, 'l'),
        AMPI_OF_MODEL("accumulate", desc.accumulate, 'i'),
        { "grad_dtype", m ? &grad_dtype : NULL, 'i', AMPI_AGREES },
        { "optimizer", &d->kind, 'i', AMPI_AGREES },
        { "maximize", &d->maximize, 'i', AMPI_AGREES },
        AMPI_SETTING(momentum, 'f'), AMPI_SETTING(dampening, 'f'), AMPI_SETTING(nesterov, 'i'),
        AMPI_SETTING(beta1, 'f'), AMPI_SETTING(beta2, 'f'), AMPI_SETTING(eps, 'f'),
        AMPI_SETTING(weight_decay, 'f'), AMPI_SETTING(clip_norm, 'f'),
        { "schedule", &d->schedule.kind, 'i', AMPI_KEPT },
        AMPI_SETTING(schedule.warmup_steps, 'l'), AMPI_SETTING(schedule.total_steps, 'l'),
        AMPI_SETTING(schedule.step_size, 'l'),
        AMPI_SETTING(schedule.gamma, 'f'), AMPI_SETTING(schedule.floor, 'f'),
        { "groups", &d->group_count, 'i', AMPI_AGREES }
    };
    for (size_t i = 0; i < AMPI_LENGTH(rows); i++)
        if (rows[i].at)
            ampi_number_add(c, -1, rows[i].name, rows[i].at, rows[i].kind, rows[i].role);

    for (int i = 0; i < ampi_group_count(o) && i < AMP_MAX_GROUPS; i++) {
        ampi_number_add(c, i, "lr", &o->groups[i].lr, 'f', AMPI_LOADED);
        ampi_number_add(c, i, "weight_decay", &o->groups[i].weight_decay, 'f', AMPI_KEPT);
        ampi_number_add(c, i, "frozen", &o->groups[i].frozen, 'i', AMPI_LOADED);
        ampi_number_add(c, i, "frozen_steps", &o->state.frozen_steps[i], 's', AMPI_LOADED);
        const amp_optimizer_desc* own = ampi_group_desc(o, i);
        int32_t kind = own == d ? 0 : (int32_t)own->kind + 1;  /* 0: the desc's */
        ampi_number_add(c, i, "optimizer", &kind, 'i', AMPI_AGREES);
    }

    if (!m) {
        for (int i = 0; i < o->count; i++) {
            const uint32_t group = (uint32_t)o->params[i].group;
            hash = ampi_hash_words(hash, &group, 1);
        }
    }
    ampi_number_add(c, -1, "eps_in_root", &d->eps_in_root, 'i', AMPI_KEPT);
    c->numbers[c->number_count - 1].optional = 1;  /* younger than checkpoints */
    ampi_number_add(c, -1, m ? "graph" : "grouping", &hash, 'l', AMPI_GRAPH);
}

/* Lists a tensor "<name><suffix>" of `count` elements. param: the number of the model's parameter
   whose shape the tensor has; AMPI_NONE = a vector. */
AMPI_FN void ampi_state_add(ampi_checkpoint* c, const char* name, const char* suffix, amp_ref x,
        size_t count, int param) {
    amp_file_tensor* t = &c->tensors[c->tensor_count];
    char* whole = c->names[c->tensor_count++];
    const amp_tensor tensor = { x.data, x.dtype, count, whole };
    ampi_say(whole, AMPI_TENSOR_NAME, "%s%s", name, suffix);
    t->tensor = tensor;
    t->rank = 1;
    t->shape[0] = count;
    if (c->file.model && param != AMPI_NONE)
        ampi_param_shape(c->file.model, param, &t->rank, t->shape);
}

/* Lists the tensors of a checkpoint: each parameter's weights and moments (or weights alone), a
   model's running statistics, then those that a loop's caller has listed. */
AMPI_FN amp_result ampi_state_list(ampi_checkpoint* c, int weights_alone) {
    const amp_optimizer* o = c->optimizer;
    ampi_file* f = &c->file;
    const amp_model* m = f->model;
    /* A parameter has at most three tensors, and a batch norm of two parameters two statistics. */
    const uint64_t limit = 4 * (uint64_t)o->count + (uint64_t)f->count;
    c->tensors = (amp_file_tensor*)ampi_file_alloc(f, limit * (sizeof *c->tensors
        + sizeof *f->rests + sizeof *c->names));
    if (!c->tensors) return AMP_ERR_MEMORY;
    f->rests = (uint16_t**)(void*)(c->tensors + limit);
    memset(f->rests, 0, (size_t)limit * sizeof *f->rests);
    c->names = (char (*)[AMPI_TENSOR_NAME])(void*)(f->rests + limit);

    for (int i = 0; i < o->count; i++) {
        const amp_param* p = &o->params[i];
        AMPI_REFUSE_LIST(!ampi_is_free_name(p->name) || !p->name[0]
            || strlen(p->name) + sizeof ".m" > AMPI_TENSOR_NAME,
            "parameter %d needs a name of 1 to %d bytes in UTF-8", i, AMPI_TENSOR_NAME - 3);
        f->rests[c->tensor_count] = p->rest;
        ampi_state_add(c, p->name, "", p->rest ? amp_f32((const float*)p->low) : ampi_trained(p),
            p->count, i);
        if (weights_alone) continue;
        if (p->m) ampi_state_add(c, p->name, ".m", amp_ref_of(p->m, p->moment_dtype), p->count, i);
        if (p->v) ampi_state_add(c, p->name, ".v", amp_ref_of(p->v, p->moment_dtype), p->count, i);
    }
    for (const ampi_node* n = m ? m->first : NULL; n; n = n->next) {
        const size_t channels = (size_t)n->layer.channels;
        if (!ampi_is(n, BATCH_NORM)) continue;
        ampi_state_add(c, n->layer.name, ".running_mean", amp_f32(n->running), channels, AMPI_NONE);
        ampi_state_add(c, n->layer.name, ".running_var", amp_f32(n->running + channels), channels,
            AMPI_NONE);
    }

    if (f->count) memcpy(c->tensors + c->tensor_count, f->tensors,
        (size_t)f->count * sizeof *f->tensors);
    f->count += c->tensor_count;
    f->tensors = c->tensors;
    return AMP_OK;
}

enum { AMPI_SCALER_TEXT = 2 * AMP_SCALER_STATE_BYTES + 1 };

/* The key of a scaler's text: "amp.scaler", "amp.scaler1", ... */
typedef struct ampi_scaler_key { char text[16]; } ampi_scaler_key;
AMPI_FN ampi_scaler_key ampi_scaler_key_of(int i) {
    ampi_scaler_key key;
    AMPI_SAY(key.text, i ? "amp.scaler%d" : "amp.scaler", i);
    return key;
}

/* A scaler's state as hexadecimal text. */
AMPI_FN const char* ampi_show_scaler(const unsigned char* bytes, char out[AMPI_SCALER_TEXT]) {
    for (size_t i = 0; i < AMP_SCALER_STATE_BYTES; i++) ampi_say(out + 2 * i, 3, "%.2x", bytes[i]);
    return out;
}

/* Writes numbers, scaler and tensors to a file, after the checks that loading would make. The text
   amp.crc32 is the CRC-32 of the texts that loading sets, each with its final 0. */
AMPI_FN amp_result ampi_state_save(ampi_checkpoint* c, const char* path) {
    amp_file_text texts[AMPI_MAX_NUMBERS + AMPI_MAX_SCALERS + 1];
    unsigned char bytes[AMP_SCALER_STATE_BYTES];
    ampi_scaler_key keys[AMPI_MAX_SCALERS];
    char scalers[AMPI_MAX_SCALERS][AMPI_SCALER_TEXT], crc_text[AMPI_NUMBER];
    uint32_t crc = 0;
    int n = 0;
    AMPI_TRY(ampi_optimizer_check_rates(&c->o, c->saver));
    for (int i = 0; i < c->scaler_count; i++) {
        AMPI_TRY(amp_scaler_save(&c->s[i], bytes, sizeof bytes));
        ampi_show_scaler(bytes, scalers[i]);
    }
    AMPI_TRY(ampi_state_list(c, 0 /* not weights alone */));

    AMPI_EACH_NUMBER(c, x) {
        const int is_zero = !x->text[strspn(x->text, "0")];
        if (x->optional && is_zero) continue;
        texts[n].key = x->key;
        texts[n++].value = x->text;
        if (x->role == AMPI_LOADED) crc = ampi_crc32(crc, x->text, strlen(x->text) + 1);
    }

    for (int i = 0; i < c->scaler_count; i++) {
        keys[i] = ampi_scaler_key_of(i);
        texts[n].key = keys[i].text;
        texts[n++].value = scalers[i];
    }
    texts[n].key = "amp.crc32";
    texts[n++].value = ampi_show_number(crc, 16, crc_text);
    c->file.texts = texts;
    c->file.text_count = n;
    return ampi_save_file(&c->file, path);
}

/* Tells how a number differs, floats in decimal, and what that means; returns `code`. */
AMPI_FN amp_result ampi_number_tell(ampi_checkpoint* c, const ampi_number* x, amp_result code,
        const char* outcome) {
    const char* texts[] = { x->theirs, x->text };
    char shown[2][AMPI_SHOWN];
    uint64_t bits;
    for (int i = 0; i < 2; i++)
        if (x->kind == 'f' && ampi_read_number(texts[i], 16, &bits))
            AMPI_SAY(shown[i], "%.9g", (double)ampi_float((uint32_t)bits));
        else ampi_show_ends(texts[i], 57, 0, shown[i]);
    return ampi_fail(c->file.desc.logger, code, "checkpoint: %s is %s in the file, but %s in %s%s",
        x->key, shown[0], shown[1], c->file.owner, outcome);
}

/* Loads a number from the file's text, and gives its value or bits. Returns 0 for a text that
   saving never writes: a rate that no optimizer or group can have, more than `limit` steps, an int
   of more than 32 bits. */
AMPI_FN int ampi_number_load(const ampi_number* x, uint64_t limit, uint64_t* value) {
    const int is_rate = x->kind == 'f', sound = ampi_read_number(x->theirs, is_rate ? 16 : 10,
        value);
    const uint32_t word = (uint32_t)*value;
    if (x->kind < 'l') memcpy(x->at, &word, sizeof word);
    else memcpy(x->at, value, sizeof *value);
    if (is_rate && !ampi_lr_is_valid((const float*)x->at, x->of_group)) return 0;
    return sound && (x->kind == 'l' || *value <= (x->kind == 's' ? limit : UINT32_MAX));
}

/* Finds the file's text of each number, compares those that must agree, and loads state into the
   copy. Steps are fewer than 2^62; frozen ones are at most as many as steps. A file has all of its
   CRC-32, or none. */
AMPI_FN amp_result ampi_numbers_read(ampi_checkpoint* c) {
    ampi_file* f = &c->file;
    const char* crc_text = ampi_text_of(f, "amp.crc32");
    char computed[AMPI_NUMBER];
    uint64_t value, limit = ((uint64_t)1 << 62) - 1;
    uint32_t crc = 0;
    AMPI_CLEAR(c->o.state.frozen_steps);
    AMPI_EACH_NUMBER(c, x) {
        const char* text = ampi_text_of(f, x->key);
        x->theirs = text || !x->optional ? text : x->kind == 'f' ? "00000000" : "0";
        AMPI_REFUSE_FILE(!x->theirs, "'%s' has no '%s'; was it written by %s?", f->path, x->key,
            c->saver);
        if (x->role == AMPI_AGREES && strcmp(x->theirs, x->text) != 0)
            return ampi_number_tell(c, x, AMP_ERR_FORMAT, "");
        if (x->role != AMPI_LOADED) continue;
        AMPI_REFUSE_FILE(!ampi_number_load(x, limit, &value), "'%s': %s is malformed", f->path,
            x->key);
        if (x == c->numbers) limit = value;  /* the step, which comes first */
        if (text) crc = ampi_crc32(crc, text, strlen(text) + 1);
    }

    AMPI_REFUSE_FILE(crc_text && strcmp(crc_text, ampi_show_number(crc, 16, computed)) != 0,
        "'%s' is damaged: the " "state's numbers have the CRC-32 %s, amp.crc32 says %s", f->path,
        computed, ampi_show(f, crc_text));
    AMPI_EACH_ENTRY(f, e)
        AMPI_REFUSE_FILE(!e->crc != !crc_text, "'%s' is damaged: CRC-32 are missing", f->path);
    return AMP_OK;
}

/* Loads the state of scaler i from the file's hexadecimal text into the copy; refuses a text for
   which there is no scaler. */
AMPI_FN amp_result ampi_scaler_read(ampi_checkpoint* c, int i) {
    unsigned char bytes[AMP_SCALER_STATE_BYTES] = { 0 };
    unsigned byte = 0;
    char again[AMPI_SCALER_TEXT];
    ampi_file* f = &c->file;
    const ampi_scaler_key key = ampi_scaler_key_of(i);
    const char* text = ampi_text_of(f, key.text);
    if (i >= c->scaler_count) {
        AMPI_REFUSE_FILE(text, "'%s' holds a scaler, but none is given", f->path);
        return AMP_OK;
    }
    const int fits = text && strlen(text) == sizeof again - 1;

    /* Where sscanf finds no digits, the text is not what ampi_show_scaler makes of the bytes. */
    for (size_t k = 0; fits && k < sizeof bytes; k++) {
        sscanf(text + 2 * k, "%2x", &byte);
        bytes[k] = (unsigned char)byte;
    }
    AMPI_REFUSE_FILE(!fits || strcmp(ampi_show_scaler(bytes, again), text) != 0,
        "'%s': %s is missing or malformed", f->path, key.text);
    return amp_scaler_load(&c->s[i], bytes, sizeof bytes);
}

/* Gives the loaded state to the caller's objects, and tells of numbers that differ. */
AMPI_FN amp_result ampi_state_take(ampi_checkpoint* c) {
    amp_model* m = c->file.model;
    amp_optimizer* o = c->optimizer;
    o->state = c->o.state;
    memcpy(o->groups, c->o.groups, sizeof o->groups);
    for (int i = 0; i < c->scaler_count; i++) {
        c->s[i].logger = c->scalers[i]->logger;
        *c->scalers[i] = c->s[i];
    }
    if (m) {
        m->training.passes = c->passes;
        AMPI_TRY(amp_model_sync_params(m));
    } else ampi_params_write_low(o);

    AMPI_EACH_NUMBER(c, x) {
        const int is_rate = x->role == AMPI_LOADED && x->kind == 'f';
        if ((x->role == AMPI_KEPT || is_rate) && strcmp(x->theirs, x->text) != 0)
            ampi_number_tell(c, x, AMP_OK, is_rate ? ", which takes the file's"
                : ", which keeps its own");
    }
    return AMP_OK;
}

/* Checks in the order in which a person wants to hear of differences; changes come after all
   checks. */
AMPI_FN amp_result ampi_state_load(ampi_checkpoint* c) {
    ampi_file* f = &c->file;
    const ampi_number* graph = &c->numbers[c->number_count - 1];
    AMPI_TRY(ampi_numbers_read(c));
    for (int i = 0; i < AMPI_MAX_SCALERS; i++) AMPI_TRY(ampi_scaler_read(c, i));
    AMPI_TRY(ampi_file_want(f, 0 /* all */));
    AMPI_EACH_ENTRY(f, e)
        AMPI_REFUSE_FILE(!e->wanted, "tensor '%s' is in the file, but not in %s",
            ampi_show(f, e->name), f->owner);
    AMPI_REFUSE_FILE(strcmp(graph->theirs, graph->text) != 0, "'%s' was saved by %s", f->path,
        f->model ? "a model with other layers, types or settings of layers"
                 : "an optimizer with its parameters in other groups");
    AMPI_TRY(ampi_file_read(f));
    return ampi_state_take(c);
}

/* Leaves out the "module." that PyTorch's DataParallel puts before all names, unless the model has
   such names. Entries are sorted: the first and the last name tell of all. */
AMPI_FN void ampi_file_strip(ampi_file* f) {
    static const char prefix[] = "module.";
    if (f->entry_count > 0 && !ampi_behind(prefix, f->tensors->tensor.name)
            && ampi_behind(prefix, f->entries->name)
            && ampi_behind(prefix, f->entries[f->entry_count - 1].name))
        AMPI_EACH_ENTRY(f, e) e->name += sizeof prefix - 1;
}

/* Loads weights by name from an open file, and tells how many; the logger hears of those that it
   lacks. */
AMPI_FN amp_result ampi_weights_load(ampi_checkpoint* c, int* count) {
    ampi_file* f = &c->file;
    ampi_file_strip(f);
    AMPI_TRY(ampi_file_want(f, 1 /* weights alone */));
    const char* more = f->missing_count > 3 ? ", ..." : "";
    AMPI_REFUSE_FILE(f->missing_count == f->count,
        "'%s' has no weight of the model: its first name is '%s', the model has %s%s; "
        "amp_name renames a layer", f->path,
        f->entry_count ? ampi_show(f, f->entries->name) : "", f->missing, more);
    AMPI_TRY(ampi_file_read(f));
    AMPI_TRY(amp_model_sync_params(f->model));
    if (f->missing_count > 0)
        ampi_remark(f->desc.logger,
            "checkpoint: %d of %d tensors of the model were not found and left alone: %s%s; the "
            "file is '%s'", f->missing_count, f->count, f->missing, more, f->path);
    if (count) *count = f->count - f->missing_count;
    return AMP_OK;
}

/* What a call does; the first two write a file. */
enum { AMPI_SAVE, AMPI_TRY_SAVE, AMPI_LOAD, AMPI_LOAD_WEIGHTS };

/* Checks what a checkpoint is of, a model or with m = NULL a loop, and fills in *c what
   ampi_file_begin has not. The desc's flags become 0 or 1, as they are compared. */
AMPI_FN amp_result ampi_checkpoint_begin(ampi_checkpoint* c, amp_model* m, amp_optimizer* o,
        amp_scaler* s) {
    ampi_file* f = &c->file;
    AMPI_REFUSE_AS(m && !m->finalized, AMP_ERR_STATE, "the model is not finalized");
    AMPI_REFUSE_AS(m && !o, AMP_ERR_STATE, "the model has no parameters");
    AMPI_REFUSE_AS(m && m->micro, AMP_ERR_STATE, "finish the micro-batches of the step first");
    AMPI_REFUSE_AS(!o || !o->params, AMP_ERR_ARGUMENT, "there is no optimizer");
    AMPI_REFUSE_AS(s && ampi_scaler_ready(s), AMP_ERR_STATE, "amp_scaler_init was never called");
    f->model = m;
    f->owner = m ? "the model" : "the optimizer";
    c->saver = m ? "amp_checkpoint_save" : "amp_optimizer_save";
    c->passes = m ? m->training.passes : 0;

    c->optimizer = o;
    c->o = *o;
    c->o.desc.maximize = o->desc.maximize != 0;
    c->o.desc.nesterov = o->desc.nesterov != 0;
    c->o.desc.eps_in_root = o->desc.eps_in_root != 0;
    AMPI_CLEAR(c->o.logger);
    if (f->desc.logger) c->o.logger = *f->desc.logger;
    if (s) c->scalers[c->scaler_count++] = s;
    for (int i = 0; m && i < m->own_scalers; i++)
        c->scalers[c->scaler_count++] = &m->loss_scalers[i];
    for (int i = 0; i < c->scaler_count; i++) {
        c->s[i] = *c->scalers[i];
        c->s[i].logger = c->o.logger;
    }

    ampi_numbers_list(c);
    return m ? AMP_OK : ampi_params_validate(&c->o);  /* a loop may have changed them since init */
}

/* Saves or loads all that a checkpoint holds. more: tensors of the caller's beside those of o. */
AMPI_FN amp_result ampi_checkpoint_do(int what, amp_model* m, amp_optimizer* o, amp_scaler* s,
        const char* path, const amp_file_tensor* more, int more_count, const amp_file_desc* desc,
        int* count) {
    ampi_checkpoint c;
    amp_result r;
    AMPI_CLEAR(c);
    AMPI_TRY(ampi_file_begin(&c.file, path, more, more_count, desc));
    AMPI_TRY(ampi_checkpoint_begin(&c, m, o, s));
    c.file.is_trial = what == AMPI_TRY_SAVE;

    if (what <= AMPI_TRY_SAVE) r = ampi_state_save(&c, path);
    else {
        r = ampi_state_list(&c, what == AMPI_LOAD_WEIGHTS);
        if (r == AMP_OK) r = ampi_file_open(&c.file, path);
        if (r == AMP_OK) r = what == AMPI_LOAD ? ampi_state_load(&c)
            : ampi_weights_load(&c, count);
    }
    ampi_free(c.tensors, &c.file.desc.allocator);
    return ampi_file_close(&c.file, r);
}

/* Saves or loads a model's checkpoint. */
AMPI_FN amp_result ampi_model_do(amp_model* m, int what, const char* path, int* count) {
    if (!m) return AMP_ERR_ARGUMENT;
    const amp_file_desc desc = { m->desc.allocator, &m->op_logger };
    return ampi_checkpoint_do(what, m, amp_model_optimizer(m), amp_model_scaler(m), path, NULL, 0,
        &desc, count);
}

AMP_DEF amp_result amp_checkpoint_save(amp_model* m, const char* path) {
    return ampi_model_do(m, AMPI_SAVE, path, NULL);
}

/* Writes what amp_checkpoint_save would, beside path, and removes it: can the model be saved
   there? */
AMPI_FN amp_result ampi_checkpoint_try(amp_model* m, const char* path) {
    return ampi_model_do(m, AMPI_TRY_SAVE, path, NULL);
}

AMP_DEF amp_result amp_checkpoint_load(amp_model* m, const char* path) {
    return ampi_model_do(m, AMPI_LOAD, path, NULL);
}

AMP_DEF amp_result amp_checkpoint_load_weights(amp_model* m, const char* path, int* count) {
    return ampi_model_do(m, AMPI_LOAD_WEIGHTS, path, count);
}

AMP_DEF amp_result amp_optimizer_save(amp_optimizer* o, amp_scaler* s, const char* path,
        const amp_file_tensor* more, int count, const amp_file_desc* desc) {
    return ampi_checkpoint_do(AMPI_SAVE, NULL, o, s, path, more, count, desc, NULL);
}

AMP_DEF amp_result amp_optimizer_load(amp_optimizer* o, amp_scaler* s, const char* path,
        const amp_file_tensor* more, int count, const amp_file_desc* desc) {
    return ampi_checkpoint_do(AMPI_LOAD, NULL, o, s, path, more, count, desc, NULL);
}

/* Saves or loads the optimizer and the scaler of *x. */
AMPI_FN amp_result ampi_mixed_do(int what, amp_mixed* x, const char* path) {
    if (!x) return AMP_ERR_ARGUMENT;
    const amp_file_desc desc = { x->allocator, &x->optimizer.logger };
    return ampi_checkpoint_do(what, NULL, &x->optimizer, &x->scaler, path, NULL, 0, &desc, NULL);
}

AMP_DEF amp_result amp_mixed_save(amp_mixed* x, const char* path) {
    return ampi_mixed_do(AMPI_SAVE, x, path);
}

AMP_DEF amp_result amp_mixed_load(amp_mixed* x, const char* path) {
    return ampi_mixed_do(AMPI_LOAD, x, path);
}

#endif /* AMP_NO_STDIO */

AMPI_COMPILE_WELL

/* >>impl-report What a person sees: settings, statistics, the precision report and the history, as
   text or as SVG.
   Words. picture: a list of titles and bars that is drawn as an SVG or printed. Numbers go
   through ampi_print, which knows no locale. */


/* A training pass without an update, which observes outputs and their gradients; then numbers of
   each layer's parameters and of their gradients. */
AMPI_FN amp_result ampi_stats_pass(amp_model* m, amp_layer_stats* stats) {
    AMPI_RUN(training_begin, &m->training, 0 /* no step follows */);
    AMPI_TRY(ampi_load_batch(m));
    AMPI_TRY(ampi_forward(m, m->last, 1 /* with losses */));
    AMPI_TRY(ampi_load_seeds(m, NULL));
    AMPI_TRY(ampi_backward(m, 0 /* starts */));
    AMPI_EACH_NODE(n)
        for (int k = 0; k < AMP_MAX_OPERANDS; k++) {
            const int param = n->params[k];
            amp_layer_stats* to = &stats[n->number];
            if (param == AMPI_NONE) continue;
            const amp_param* p = &m->params[param];
            AMPI_TRY(ampi_collect(m, &to->weight, ampi_trained(p), p->count));
            if (p->grad) AMPI_TRY(ampi_collect(m, &to->weight_gradient,
                ampi_weight_grad(m, param), p->count));
        }
    return AMP_OK;
}

/* Runs a training pass without an update, and collects numbers of each layer. The running
   statistics stay. */
AMP_DEF amp_result amp_model_stats(amp_model* m, const amp_batch* batch, amp_layer_stats* stats,
        int capacity) {
    fenv_t floats;
    AMPI_TRY(ampi_check_training(m, batch, "model stats"));
    AMPI_REFUSE(m->micro, AMP_ERR_STATE, "model stats: a step with micro-batches is not finished");
    AMPI_REFUSE(!stats || capacity < m->layer_count, AMP_ERR_ARGUMENT,
        "model stats: room for %d layers, %d are needed", stats ? capacity : 0, m->layer_count);
    memset(stats, 0, (size_t)m->layer_count * sizeof *stats);
    ampi_start_pass(m, batch, 1 /* training */);
    m->pass.looking = 1;
    m->pass.observed = stats;
    ampi_freeze(m);
    feholdexcept(&floats);
    amp_result r = ampi_stats_pass(m, stats);
    fesetenv(&floats);
    return r;
}

#if !defined(AMP_NO_STDIO)
/* Prints the settings of a desc with this rate and weight decay. */
AMPI_FN void ampi_settings_print(const amp_optimizer_desc* d, float lr, float decay, FILE* out) {
    ampi_print(out, "%s: lr %g, ", ampi_name_among("SGD\0Adam\0AdamW\0LAMB\0RMSprop\0",
        (unsigned)d->kind), (double)lr);
    if (d->kind == AMP_SGD)
        ampi_print(out, "momentum %g%s", (double)d->momentum, d->nesterov ? " (nesterov)" : "");
    else if (d->kind == AMP_RMSPROP)
        ampi_print(out, "alpha %g, eps %g, momentum %g", (double)d->beta2, (double)d->eps,
            (double)d->momentum);
    else ampi_print(out, "betas %g %g, eps %g", (double)d->beta1, (double)d->beta2, (double)d->eps);
    ampi_print(out, ", weight decay %g", (double)decay);
}

/* Prints an optimizer's settings in a line, and a line for each group. */
AMPI_FN void ampi_optimizer_print(const amp_optimizer* o, FILE* out) {
    const amp_optimizer_desc* d = &o->desc;
    ampi_settings_print(d, o->state.lr, d->weight_decay, out);
    ampi_print(out, d->clip_norm > 0.0f ? ", clip %g\n" : ", clip off\n", (double)d->clip_norm);
    for (int i = 0; i < d->group_count; i++) {
        const amp_param_group* g = &o->groups[i];
        const amp_optimizer_desc* own = ampi_group_desc(o, i);
        ampi_print(out, g->frozen ? "group %d: frozen" : "group %d: ", i);
        if (!g->frozen)
            ampi_settings_print(own, ampi_default_at(&g->lr, o->state.lr),
                ampi_default_at(&g->weight_decay, own->weight_decay), out);
        ampi_print(out, "\n");
    }
}

/* Prints a layer's row of the table whose head amp_model_print prints. width: columns of the
   name. */
AMPI_FN void ampi_layer_print(const amp_layer* l, int width, FILE* out) {
    char shape[AMPI_SHAPE_TEXT];
    ampi_shape_text(l, shape);
    ampi_print(out, "%-*s %-22s %-14s %-7s %-7s %-7s %-8s %-20s %10llu ", width, l->name,
            amp_op_name(l->op), shape, amp_dtype_name(l->compute_dtype),
            amp_dtype_name(l->storage_dtype), l->parameters ? amp_dtype_name(l->param_dtype)
            : "-", amp_rule_name(l->rule), amp_reason_name(l->reason), (ampi_ull)l->parameters);
    if (l->in_place || l->op == AMP_OP_FLATTEN) ampi_print(out, "%12s", "in place");
    else ampi_print(out, "%12llu", (ampi_ull)l->activation_bytes);
    ampi_print(out, l->casts ? "  (+%d cast)\n" : "\n", l->casts);
}

/* Prints settings, layers with their types and who chose them, and memory. */
AMP_DEF amp_result amp_model_print(const amp_model* m, FILE* out) {
    amp_memory mem;
    size_t parameters = 0;
    int width = 24;  /* columns of the longest name, or more */
    if (!m) return AMP_ERR_ARGUMENT;
    AMPI_REFUSE_NULL("amp_model_print", out);
    AMPI_TRY(ampi_check_finalized(m, "amp_model_print"));
    fputs(amp_level_name(m->policy.level), out);
    if (m->policy.level != AMP_O0)
        ampi_print(out, " %s, style %s", amp_dtype_name(m->policy.low_dtype),
            amp_style_name(m->policy.style));
    ampi_print(out, ", batch %d\n", m->desc.batch);

    for (int i = 0; i < m->layer_count; i++) {
        const amp_layer* l = amp_model_layer(m, i);
        const int length = (int)strlen(l->name);
        if (length > width) width = length;
        parameters += l->parameters;
    }
    ampi_print(out, "%-*s %-22s %-14s %-7s %-7s %-7s %-8s %-20s %10s %12s\n", width, "layer",
            "operator", "output", "compute", "stored", "weights", "rule", "chosen by", "parameters",
            "bytes");
    for (int i = 0; i < m->layer_count; i++) ampi_layer_print(amp_model_layer(m, i), width, out);

    AMPI_TRY(amp_model_memory(m, &mem));
    ampi_print(out,
            "%llu parameters; bytes: activations %llu, weights f32 %llu, weights 16-bit %llu, "
            "gradients %llu, "
            "moments %llu, workspace %llu\n",
            (ampi_ull)parameters, (ampi_ull)mem.activation_bytes,
            (ampi_ull)mem.parameter_bytes, (ampi_ull)mem.low_parameter_bytes,
            (ampi_ull)mem.gradient_bytes, (ampi_ull)mem.optimizer_bytes,
            (ampi_ull)mem.workspace_bytes);
    if (m->param_count > 0) ampi_optimizer_print(&m->training.optimizer, out);
    return ferror(out) ? AMP_ERR_IO : AMP_OK;
}

/* Prints counts and a histogram: a line for each exponent from the smallest found to the largest.
   The fullest bin has 50 marks, one that is not empty at least one. */
AMP_DEF amp_result amp_stats_print(const amp_stats* s, FILE* out) {
    static const char bar[] = "##################################################";
    uint64_t fullest = 1;
    int first = AMP_STATS_BINS, last = -1;
    if (!s || !out) return AMP_ERR_ARGUMENT;
    ampi_print(out, "%llu values: %llu zero, %llu subnormal, %llu inf, %llu nan; |x| %g to %g\n",
            (ampi_ull)s->count, (ampi_ull)s->zeros, (ampi_ull)s->subnormals, (ampi_ull)s->infs,
            (ampi_ull)s->nans, (double)s->smallest, (double)s->largest);
    ampi_print(out,
            "after a cast: %llu to zero, %llu to subnormal, %llu to inf; suggested scale %g\n",
            (ampi_ull)s->would_underflow, (ampi_ull)s->would_be_subnormal,
            (ampi_ull)s->would_overflow, (double)s->suggested_scale);

    for (int i = 0; i < AMP_STATS_BINS; i++) {
        if (!s->histogram[i]) continue;
        first = ampi_min_int(first, i);
        last = i;
        if (s->histogram[i] > fullest) fullest = s->histogram[i];
    }
    for (int i = first; i <= last; i++)
        ampi_print(out, "2^%-5d %10llu %.*s\n", i + AMP_STATS_MIN_EXPONENT,
                (ampi_ull)s->histogram[i],
                (int)((s->histogram[i] * (sizeof bar - 1) + fullest - 1) / fullest), bar);
    return ferror(out) ? AMP_ERR_IO : AMP_OK;
}

/* --- the precision report and the history: rows of bars, as a picture or as text --- */

typedef struct ampi_picture {
    void (*list)(struct ampi_picture* p);  /* gives ampi_title and ampi_bars each row */
    amp_model* m;                  /* of a report, with */
    const amp_layer_stats* stats;  /* of each layer */
    const amp_history* history;    /* of a history */
    int count;       /* bars of a row */
    int svg;         /* 1 = SVG, 0 = text */
    int y;           /* pixels from an SVG's top to its last row */
    int height;      /* pixels of the whole SVG */
    FILE* out;       /* NULL while a picture is measured: only y moves */
} ampi_picture;

/* Text in ASCII, with nothing that XML would interpret, the end of a CDATA section "]]>"
   included. bad: 1 = in the color of faults. */
AMPI_FN void ampi_svg_text(const ampi_picture* p, int x, int bad, const char* text) {
    ampi_print(p->out, "<text x=\"%d\" y=\"%d\"%s>", x, p->y, bad ? " class=\"bad\"" : "");
    for (; *text; text++)
        if (*text == '<' || *text == '>' || *text == '&') ampi_print(p->out, "&#%d;", *text);
        else putc(*text >= 32 && *text < 127 ? *text : '?', p->out);
    fputs("</text>\n", p->out);
}

/* A row that is a title. */
AMPI_FN void ampi_title(ampi_picture* p, const char* text) {
    p->y += 36;
    if (p->out && p->svg) ampi_svg_text(p, 10, 0, text);
    else if (p->out) ampi_print(p->out, "%s\n", text);
}

/* A row of bars between a name and what is told of them. The largest is `height` pixels, or in text
   the last of eight characters; a bar that is not 0 can be seen. bad: 1 = a fault. */
AMPI_FN void ampi_bars(ampi_picture* p, int bad, const char* name, const uint64_t* bars, int height,
        const char* told) {
    const double width = 540.0 / p->count;  /* pixels from bar to bar */
    uint64_t largest = 1;
    char shown[AMPI_SHOWN];
    p->y += height + 6;
    if (!p->out) return;
    name = ampi_show_ends(name, 5, 14, shown);
    if (p->svg) {
        ampi_svg_text(p, 20, bad, name);
        ampi_svg_text(p, 700, bad, told);
        ampi_print(p->out, "<path%s stroke-width=\"%.1f\" d=\"", bad ? " class=\"bad\"" : "",
            0.8 * width);
    } else ampi_print(p->out, "  %-22s|", name);

    for (int i = 0; i < p->count; i++) if (bars[i] > largest) largest = bars[i];
    for (int i = 0; i < p->count; i++) {
        const double share = (double)bars[i] / (double)largest;
        if (!p->svg) putc(" .:-=+*#@"[share > 0.0 ? 1 + (int)(7.0 * share) : 0], p->out);
        else if (share > 0.0)
            ampi_print(p->out, "M%.1f %dv-%.1f", 150.0 + width * (i + 0.5), p->y,
                1.0 + height * share);
    }
    ampi_print(p->out, p->svg ? "\"/>\n" : "| %s\n", told);
}

/* A row of numbers: `first` and each tenth one behind it, below or above their bars; with powers as
   exponents of 2. */
AMPI_FN void ampi_axis(ampi_picture* p, int powers, int64_t first) {
    char number[32];
    p->y += 18;
    if (!p->out) return;
    if (!p->svg) ampi_print(p->out, "%25s", "");
    for (int i = 0; i < p->count; i += 10) {
        AMPI_SAY(number, powers ? "2^%lld" : "%lld", (long long)(first + i));
        if (p->svg) ampi_svg_text(p, 150 + 540 * i / p->count, 0, number);
        else ampi_print(p->out, "%-10s", number);
    }
    if (!p->svg) putc('\n', p->out);
}

/* Writes a picture whose rows are listed twice: first only their height is found, which SVG's first
   line tells. Colors are those of the reader's setting, light or dark. */
AMPI_FN void ampi_picture_draw(ampi_picture* p, FILE* out) {
    p->list(p);
    p->height = p->y + 12;
    ampi_print(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1060\" height=\"%d\" "
            "viewBox=\"0 0 1060 %d\" "
            "font-family=\"sans-serif\" font-size=\"13\">\n", p->height, p->height);
    fputs("<style>text{fill:#4d535c}path{stroke:#4d535c}.bad{stroke:#a01008}text.bad{stroke:none;"
        "fill:#a01008}\n@media(prefers-color-scheme:dark){text{fill:#a9b1bc}path{stroke:#a9b1bc}"
        ".bad{stroke:#ff6b5e}text.bad{fill:#ff6b5e}}</style>\n", out);
    p->y = 0;
    p->out = out;
    p->list(p);
    fputs("</svg>\n", out);
}

/* As text to `out` or, if NULL, as a picture into the file `path`. */
AMPI_FN amp_result ampi_picture_put(ampi_picture* p, FILE* out, const char* path,
        const amp_file_desc* desc) {
    ampi_file f;
    p->out = out;
    p->svg = !out;
    if (out) {
        p->list(p);
        return ferror(out) ? AMP_ERR_IO : AMP_OK;
    }
    AMPI_TRY(ampi_file_begin(&f, path, NULL, 0, desc));
    f.draw = ampi_picture_draw;
    f.picture = p;
    return ampi_file_close(&f, ampi_save_file(&f, path));
}

/* Exponents that a report shows, and the least of them: 2^-40 to 2^19. */
enum { AMPI_REPORT_BINS = 60, AMPI_REPORT_LEAST = -40 };

/* The ranges of the small formats as bars on the axis of exponents, those of subnormals lower. */
AMPI_FN void ampi_report_formats(ampi_picture* p) {
    /* Exponents of the largest, the smallest normal and the smallest subnormal number. */
    static const struct { const char* name; int max, normal, min; } formats[] = {
        { "fp16", 15, -14, -24 }, { "bf16", 127, -126, -133 },
        { "e4m3", 8, -6, -9 }, { "e5m2", 15, -14, -16 }
    };
    uint64_t bars[AMPI_REPORT_BINS];
    char told[80];
    for (size_t i = 0; i < AMPI_LENGTH(formats); i++) {
        for (int k = 0, e = AMPI_REPORT_LEAST; k < AMPI_REPORT_BINS; k++, e++)
            bars[k] = e < formats[i].min || e > formats[i].max ? 0 : e < formats[i].normal ? 1
                : 3;
        AMPI_SAY(told, "2^%d to 2^%d, subnormals from 2^%d", formats[i].normal, formats[i].max,
            formats[i].min);
        ampi_bars(p, 0, formats[i].name, bars, 12, told);
    }
    ampi_axis(p, 1, AMPI_REPORT_LEAST);
    if (p->out && p->svg)
        ampi_print(p->out,
            "<path stroke-width=\"0\" fill=\"#3578ff\" fill-opacity=\".15\" "
            "d=\"M294 %dh360v%dh-360z\"/>\n",
            p->y + 6, p->height - p->y - 40);  /* 2^-24 to 2^16, behind the rows that follow */
}

/* A row of the histogram of s, whose values a cast makes 0 or infinite in these shares; what there
   is none of goes without saying. A fault is inf or NaN, or 5 % that become 0. */
AMPI_FN void ampi_report_row(ampi_picture* p, const char* name, const amp_stats* s) {
    const double percent = 100.0 / (double)s->count;
    char told[300], under[24] = "", over[24] = "", bad[64] = "";
    if (s->would_underflow)
        AMPI_SAY(under, ", %.3g %% under", percent * (double)s->would_underflow);
    if (s->would_overflow) AMPI_SAY(over, ", %.3g %% over", percent * (double)s->would_overflow);
    if (s->infs + s->nans > 0)
        AMPI_SAY(bad, ", %llu inf, %llu nan", (ampi_ull)s->infs, (ampi_ull)s->nans);
    AMPI_SAY(told, "%.3g %% zero%s%s%s", percent * (double)s->zeros, under, over, bad);
    ampi_bars(p, s->infs + s->nans > 0 || s->would_underflow >= s->count / 20 + 1, name,
        s->histogram + (AMPI_REPORT_LEAST - AMP_STATS_MIN_EXPONENT), 12, told);
}

/* The report: four rows a layer, and where inf or NaN begin. The forward pass goes down the list:
   the first output or weight that has them is to blame. Where none has them it is the last
   gradient, as the backward pass goes up. */
AMPI_FN void ampi_report_list(ampi_picture* p) {
    static const char* const names[] = { "outputs", "weights", "weight gradients",
        "output gradients" };
    const amp_policy* policy = &p->m->policy;
    const double scale = (double)amp_model_scaler(p->m)->state.scale;
    double suggested = 0.0;  /* by which to multiply the scale: the least of all gradients */
    int forward = 0;         /* 1 = an output or weight has inf or NaN */
    char text[300], trouble[200] = "";
    AMPI_SAY(text, "%s, shares of a cast to %s", amp_level_name(policy->level),
        amp_dtype_name(policy->low_dtype));
    ampi_title(p, text);
    ampi_report_formats(p);

    for (int i = 0; i < 4 * p->m->layer_count; i++) {
        const int k = i % 4;
        const amp_layer* l = amp_model_layer(p->m, i / 4);
        const amp_layer_stats* of = &p->stats[i / 4];
        const amp_stats* const all[] = { &of->output, &of->weight, &of->weight_gradient,
            &of->output_gradient };
        const amp_stats* s = all[k];
        const double limit = (double)s->suggested_scale;
        if (s->count == 0) continue;
        AMPI_SAY(text, "%s: %s in %s (%s)", l->name, amp_op_name(l->op),
            amp_dtype_name(l->compute_dtype), amp_reason_name(l->reason));
        if (k == 0) ampi_title(p, text);
        ampi_report_row(p, names[k], s);

        if (k > 1 && limit > 0.0 && (suggested <= 0.0 || limit < suggested)) suggested = limit;
        if (s->infs + s->nans == 0 || forward) continue;
        AMPI_SAY(trouble, "; inf or NaN begin in the %s of '%s'", names[k], l->name);
        forward = k < 2;
    }
    AMPI_SAY(text, "loss scale %.9g, suggested %.9g%s", scale, scale * suggested, trouble);
    ampi_title(p, text);
}

/* The precision report of a batch, as text or as a picture in the file `path`. */
AMPI_FN amp_result ampi_report(amp_model* m, const amp_batch* batch, FILE* out, const char* path) {
    ampi_picture p;
    AMPI_TRY(ampi_check_finalized(m, "report"));
    const amp_file_desc desc = { m->desc.allocator, &m->op_logger };
    const size_t bytes = (size_t)m->layer_count * sizeof(amp_layer_stats);
    amp_layer_stats* stats = (amp_layer_stats*)ampi_alloc(bytes, &desc.allocator);
    AMPI_REFUSE(!stats, AMP_ERR_MEMORY, "report: no memory for %llu bytes", (ampi_ull)bytes);
    AMPI_CLEAR(p);
    p.list = ampi_report_list;
    p.m = m;
    p.stats = stats;
    p.count = AMPI_REPORT_BINS;

    amp_result r = amp_model_stats(m, batch, stats, m->layer_count);
    if (r == AMP_OK) r = ampi_picture_put(&p, out, path, &desc);
    ampi_free(stats, &desc.allocator);
    return r;
}

AMP_DEF amp_result amp_report_svg(amp_model* m, const amp_batch* batch, const char* path) {
    return ampi_report(m, batch, NULL, path);
}

AMP_DEF amp_result amp_report_print(amp_model* m, const amp_batch* batch, FILE* out) {
    return ampi_report(m, batch, out, NULL);
}

/* A curve of bars from 0, or from the smallest of y[count] if that is less, to the largest. A
   number that is not finite is a gap. */
AMPI_FN void ampi_history_curve(ampi_picture* p, const char* name, const double* y, int count) {
    uint64_t bars[AMP_HISTORY_STEPS] = { 0 };
    double low = 0.0, upper = 0.0;
    int known = 0;  /* finite numbers so far */
    char told[100];
    for (int i = 0; i < count; i++) {
        if (!ampi_is_finite64(&y[i])) continue;
        if (!known || y[i] < low) low = y[i];
        if (!known++ || y[i] > upper) upper = y[i];
    }
    AMPI_SAY(told, "%.4g to %.4g", low, upper);
    if (low > 0.0) low = 0.0;
    for (int i = 0; i < count; i++)
        if (ampi_is_finite64(&y[i]))
            bars[i] = 1 + (uint64_t)(upper > low ? 999 * (y[i] - low) / (upper - low) : 0);
    ampi_bars(p, 0, name, bars, 60, told);
}

/* A row for each culprit of skipped steps, at its first one: a bar for each step that it cost. */
AMPI_FN void ampi_history_culprits(ampi_picture* p, const amp_step_info* const* kept, int count) {
    uint64_t bars[AMP_HISTORY_STEPS] = { 0 };
    char told[100];
    for (int i = 0; i < count; i++) {
        int times = 0, first = count;
        for (int j = count - 1; j >= 0; j--) {
            bars[j] = kept[j]->outcome > AMP_STEP_ACCUMULATED
                && !strcmp(kept[j]->culprit, kept[i]->culprit);
            if (!bars[j]) continue;
            times++;
            first = j;
        }
        AMPI_SAY(told, "%s, %d times", amp_outcome_name(kept[i]->outcome), times);
        if (first == i) ampi_bars(p, 1, kept[i]->culprit, bars, 12, told);
    }
}

/* The history: three curves over the steps that it keeps, the oldest first, then the culprits. */
AMPI_FN void ampi_history_list(ampi_picture* p) {
    static const char* const names[] = { "loss", "log2 of loss scale", "log2 of gradient norm" };
    const amp_history* h = p->history;
    const int count = (int)ampi_min_size((size_t)h->count, AMP_HISTORY_STEPS);
    const amp_step_info* kept[AMP_HISTORY_STEPS];
    double y[AMP_HISTORY_STEPS];
    char text[100];
    for (int i = 0; i < count; i++)
        kept[i] = &h->steps[(h->count - (uint64_t)(count - i)) % AMP_HISTORY_STEPS];
    AMPI_SAY(text, "the last %d of %llu steps", count, (ampi_ull)h->count);
    ampi_title(p, text);

    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < count; i++) {
            y[i] = k == 0 ? (double)kept[i]->loss : k == 1 ? (double)kept[i]->scale_before
                : kept[i]->grad_norm;
            /* A logarithm of 0 or less is a gap. */
            if (k > 0 && ampi_is_finite64(&y[i]))
                y[i] = y[i] > 0.0 ? log2(y[i]) : ampi_double(AMPI_INF64);
        }
        ampi_history_curve(p, names[k], y, count);
    }
    ampi_history_culprits(p, kept, count);
    ampi_axis(p, 0, (int64_t)(h->count - (uint64_t)count) + 1);
}

/* Writes the picture or the text of a history. */
AMPI_FN amp_result ampi_history_put(const amp_history* h, FILE* out, const char* path,
        const amp_file_desc* desc) {
    ampi_picture p;
    AMPI_CLEAR(p);
    p.list = ampi_history_list;
    p.history = h;
    p.count = AMP_HISTORY_STEPS;
    return h ? ampi_picture_put(&p, out, path, desc) : AMP_ERR_ARGUMENT;
}

AMP_DEF amp_result amp_history_svg(const amp_history* h, const char* path,
        const amp_file_desc* desc) {
    return ampi_history_put(h, NULL, path, desc);
}

AMP_DEF amp_result amp_history_print(const amp_history* h, FILE* out) {
    return ampi_history_put(h, out, NULL, NULL);
}
#endif

AMP_DEF void amp_history_add(amp_history* h, const amp_step_info* info) {
    if (h && info && info->outcome != AMP_STEP_ACCUMULATED)
        h->steps[h->count++ % AMP_HISTORY_STEPS] = *info;
}

#ifdef __cplusplus
} /* extern "C" */
#endif
#if defined(__NVCC_DIAG_PRAGMA_SUPPORT__) && !defined(__clang__)
  #pragma nv_diagnostic pop
#endif
#if defined(AMPI_PLAIN_FLOATS)
  #pragma GCC pop_options
#endif
#endif /* AMP_IMPLEMENTATION */

/* >>since    What a program written for an earlier version meets.
   (!): it compiles, and does something else. */
/*
   Since 0.2.1
   (!) AMP_SUMS_FAST holds for convolutions too: their bits are the matrix unit's.
   Operators and conversions on raw pointers take an amp_ref by value where they took a pointer and
   a type: amp_linear_forward(x, AMP_F32, ...) is amp_linear_forward(amp_f32(x), ...), NULL is
   AMP_NONE, amp_ref_of(p, type) serves a type known at run time. gamma, beta and their gradients
   have a type each. So have the entries of amp_backend, which has gemm.
   Backward calls of activations, pools and softmax have `accumulate` behind dx.
   AMP_ACCUMULATE_INPUT is 2, and accumulate a sum of bits, in amp_concat_backward, too: 1 adds to
   no dx. amp_layer_norm_backward has eps behind gamma. amp_softmax_cross_entropy_* take an
   amp_cross_entropy_desc (NULL = defaults) for smoothing.
   The graph: a layer's short call takes numbers, its _with call a desc. amp_conv2d, amp_pool2d,
   amp_batch_norm, amp_layer_norm and the losses with a desc are amp_conv2d_with, ...; without one
   amp_conv2d(m, x, out_channels, kernel, stride, pad), amp_batch_norm(m, x), amp_mse(m, x).
   amp_maxpool2d, amp_avgpool2d, amp_global_avgpool2d are amp_max_pool2d, amp_avg_pool2d,
   amp_global_avg_pool2d; padding is pad in descs, .out of a linear desc is .out_features.
   New: names of 127 bytes (amp_layer.name), gelu_tanh in the graph, gemm in amp_backend (before
   linear_forward). Convolutions and pools have pad_end_h and pad_end_w: zero the shapes. The fields
   of amp_backend are declared with AMP_BACKEND_API alone. amp_exec may name a workspace that grows.
   A step has parts: amp_forward, amp_backward, amp_update, amp_discard; outputs take gradients of
   yours, values keep theirs, gradients are read, written and clipped between. Operators of your own
   (amp_custom), amp_mean as a loss, layers used again (amp_reuse), models for inference, scalers of
   single losses. Groups with an optimizer of their own, RMSprop, split masters, moments in 16 bits,
   amp_mixed. operands of amp_exec, buckets of gradients (amp_comm's start and wait). Layers: silu,
   hard_swish, leaky_relu, mul, upsample, conv_transpose2d, rms_norm; cross-entropy of [C,H,W] is
   no error.
   m and v of amp_param are void*. Structs that grew at their ends: amp_loss_desc, amp_param,
   amp_param_group, amp_comm, amp_conv2d_desc, amp_conv2d_shape; amp_model_desc and
   amp_optimizer_desc have new fields within. A backend of your own needs the table's new entries.
   Operators: amp_attention_*, amp_rope_*, which a backend of your own needs too.
   Cross-entropy has ld and an ignored label; layer norm's backward pass needs no saved statistics.
   Sequences: positions and lengths of amp_batch, amp_data, amp_input_desc, amp_layer, amp_custom;
   classes of amp_loss_desc. Zero these structs.
   The logger hears of a cross-entropy of one class, beta1 for SGD, masters that split_masters does
   not split. It also hears of arrays that nothing reads, and of groups that are all frozen.
   amp_group refuses a layer without parameters. amp_backward without seeds is an error in a model
   without a loss, and seeds with inf or NaN leave the loss scale alone.
   amp_generate continues a text.
   amp_cuda.cuh: operators on raw device pointers are entries of amp_cuda_backend()'s table:
   amp_cuda_linear_forward(...) is amp_cuda_backend()->linear_forward(...).

   Since 0.2.0
   (!) .style: MindSpore's O3 keeps FP32 weights, its O1 has no loss scaler, and neither has
       OneFlow's: give one in .scaler. OneFlow's last bias and logits are FP32. Its layer norms and
       Apex's at O2 read half weights.
   (!) amp_eval_info counts right answers of BCE too, in int64_t; new are predictions, message and
       culprit. accuracy of amp_fit_epoch is -1 where there is none, as for MSE alone; it was 0.
   (!) amp_checkpoint_load_weights: a value beyond the weights' type becomes its largest finite one;
       it was inf. A "module." that begins all names of a file is left out.
   (!) label_dtype without a cross-entropy is AMP_ERR_DTYPE: the labels were read as floats.
   (!) A model without a loss has no gradients and no moments, and its groups are frozen.
   (!) amp_fit tries best_path before its first step, undoes a step in which it fails, and copies
       its data structs. With ranks it agrees on failures by one more sum at its start and after
       each epoch.
   (!) Updates of optimizers raise no floating-point exception. OpenMP's threads compute in the
       caller's floating-point environment.
   Two layers of one name are refused by amp_model_finalize, no longer by amp_name. The logger hears
   of int64 labels read as int32 and of inputs that look like height, width, channels. It also hears
   of an evaluation whose loss is not finite. AMP_STATIC without AMP_IMPLEMENTATION is an error.
   New: amp_self_test, AMP_LOG_DEFAULT, mask_exceptions of amp_exec and amp_convert_desc,
   held_statistics of amp_step_info, held of amp_batch_norm_shape (zero the shape). A desc of a
   scaler may name .refill and .tolerance; presets fairseq and mindspore_cell, AMP_LIMIT_KEEP. A
   scaler's state has version 3; versions 1 and 2 are read.
   amp_cuda.cuh: amp_cuda_scaler_check_loss refuses host memory, and each call the memory of another
   device that it cannot reach.

   Since 0.1.0
   (!) init 0 is AMP_INIT_TORCH, for biases too; it was AMP_INIT_HE, with biases of 0.
   (!) weight_decay 0 is none for ADAMW, too; it was 0.01.
   (!) A group whose lr is AMP_ZERO has a rate of 0; .frozen = 1 is what freezes it.
   (!) A loss of inf or NaN leaves the loss scale alone; it was reduced. max_unsound such windows in
       a row are an error.
   (!) The preset deepspeed is v0.17.1 and later; what it was is deepspeed_0_17_0. Factors that are
       no powers of two move each scale as in its system. Apex's scale begins at max_scale at most.
   (!) AMP_STYLE_MINDSPORE is all of MindSpore's lists and its scaler; it was O1's cast back alone.
   (!) amp_scaler_may_step is 0 where it was negative.
   (!) AMP_ACTIVATION_WORKSPACE is 262,208 bytes; with the 131,136 of 0.2.0's first days activations
       are slower.
   (!) CPU results have other bits: every sum of a product goes up k.
   amp_gemm takes an amp_gemm_shape, whose .batch replaces amp_gemm_batched. amp_is_nan, amp_is_inf
   and amp_is_finite take an element of any type. Gone: .guard and .at_max_skips of a scaler's desc,
   .cast_model of a policy's. */

/* >>license */
/* MIT License. Copyright (c) 2026 the amp authors.
   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions: The above copyright notice and this
   permission notice shall be included in all copies or substantial portions of the Software. THE
   SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
   LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
