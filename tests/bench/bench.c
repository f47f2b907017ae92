/* bench.c - how fast amp.h is, and how fast this processor could be. `make bench` runs it through bench.py, which puts
   other libraries beside it; alone it prints its own figures.

     bench                        every case: ours, the limit, and the share of it
     bench quick                  the cases marked with a star below
     bench list                   the cases, one line each: what, shape, type, starred, unit, work
     bench serve                  answers bench.py: "open LINE", "ours" and "limit" (seconds per call)
     bench serve processor        the same in seconds of the processor, for one thread on a busy machine
     bench count WHAT SHAPE TYPE  runs one call inside measured(), for an instruction counter (counts.sh)
     bench first                  seconds of the first matrix product of the process, and of a second one

   A type with "-fast" behind it runs with AMP_SUMS_FAST; without a matrix unit there are no such lines.
   The limit of arithmetic is a loop of FP32 fmas in registers, of the instruction set in use, in bursts between calls of
   the case, so at the clock that the processor holds under its load; that of the rest a pass over arrays of the same
   sizes that only reads, writes (through the caches or past them), or does both, in the fastest of a few orders. Both
   use as many threads as the case. */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L       /* clock_gettime */
#endif
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../../examples/chart.h"
#include "gpt.h"
#include "networks.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
  #include <omp.h>
#endif

enum { ROUNDS = 7, MAX_SPANS = 6, MAX_BLOCKS = 64, THREADED_BYTES = 1 << 20 };
#define SAMPLE 0.01                     /* seconds that a sample takes at least */
#define WARM 0.01                       /* and those before it: some processors wake their memory that slowly */
#define LENGTH(a) (sizeof(a) / sizeof *(a))
#if defined(__GNUC__)
  #define NOINLINE __attribute__((noinline))
#else
  #define NOINLINE
#endif

static int processor_time;              /* not the clock's, but this process's */
static double now(void) {
#if defined(_WIN32)
    return (double)clock() / CLOCKS_PER_SEC;
#else
    struct timespec t;
    clock_gettime(processor_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#endif
}

static int threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static void use_threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

static void die(const char* sentence, const char* detail) {
    fprintf(stderr, "bench: %s: %s\n", sentence, detail);
    exit(1);
}

/* ---------------------------------------------------------------------------------------- */
/* The case that is open: one call of ours, its work, and the arrays it passes over.          */
/* ---------------------------------------------------------------------------------------- */

/* use: 'r' read, 'w' written, 'u' both; first: read to its end before the others begin */
typedef struct span { char* data; size_t bytes; char use, first; } span;

typedef struct open_case {
    amp_result (*call)(void);
    amp_dtype type;
    double flops;                       /* 0 = bound by memory */
    double took;                        /* seconds of a call, when it was last timed */
    span spans[MAX_SPANS];
    int span_count;
    void* blocks[MAX_BLOCKS];                   /* to be freed */
    int block_count;
    amp_exec exec;
    /* operands of the calls below */
    void *a, *b, *c, *d, *e;
    float *f, *g, *h, *i;
    int32_t* labels;
    size_t m, n, k;
    amp_transpose trans_a, trans_b;
    amp_conv2d_shape conv;
    amp_pool2d_shape pool;
    amp_activation activation;
    amp_batch_norm_shape norm;
    amp_attention_shape attention;
    amp_tensor tensor;
    amp_scaler scaler;
    amp_optimizer optimizer;
    amp_param param;
    amp_model* model;
    amp_batch batch;
    gpt gpt;
    int32_t* tokens;
} open_case;
static open_case now_open;

/* Memory of the case, zeroed, on a cache line; *base is for free. */
static void* take(size_t bytes) {
    open_case* o = &now_open;
    char* base = (char*)malloc(bytes + 128);
    if (!base || o->block_count == MAX_BLOCKS) die("no memory", "");
    o->blocks[o->block_count++] = base;
    memset(base, 0, bytes + 128);
    return base + (64 - (uintptr_t)base % 64);
}

/* n values between -1 and 1 that repeat after 1009. bench.py fills its arrays in the same way. */
static void fill(void* p, amp_dtype t, size_t n) {
    float pattern[1009];
    size_t i, m;
    for (i = 0; i < 1009; i++) pattern[i] = (float)(i * 377 % 1009) / 504.5f - 1.0f;
    for (i = 0; i < n; i += m) {
        m = n - i < 1009 ? n - i : 1009;
        amp_convert(amp_ref_of((char*)p + i * amp_dtype_size(t), t), amp_f32(pattern), m);
    }
}

static void* array(amp_dtype t, size_t n, char use) {
    open_case* o = &now_open;
    char* p = (char*)take(n * amp_dtype_size(t));
    fill(p, t, n);
    if (use) {
        span s;
        s.data = p; s.bytes = n * amp_dtype_size(t); s.use = use; s.first = 0;
        o->spans[o->span_count++] = s;
    }
    return p;
}
static void* low_array(size_t n, char use) { return array(now_open.type, n, use); }
static float* f32_array(size_t n, char use) { return (float*)array(AMP_F32, n, use); }

static void workspace(size_t bytes) {
    now_open.exec.workspace = take(bytes);
    now_open.exec.workspace_size = bytes;
}

static double bytes_moved(void) {
    double sum = 0.0;
    int i;
    for (i = 0; i < now_open.span_count; i++)
        sum += (double)now_open.spans[i].bytes * (now_open.spans[i].use == 'u' ? 2.0 : 1.0);
    return sum;
}

static void close_case(void) {
    open_case* o = &now_open;
    amp_model_destroy(o->model);
    gpt_free(&o->gpt);
    while (o->block_count > 0) free(o->blocks[--o->block_count]);
    memset(o, 0, sizeof *o);
}

/* ---------------------------------------------------------------------------------------- */
/* Limits of the processor.                                                                  */
/* ---------------------------------------------------------------------------------------- */

/* A vector as wide as a register, for gcc keeps a wider one in memory. */
#if defined(__GNUC__)
  #define WIDE(bytes) uint32_t __attribute__((vector_size(bytes)))
  #define SPREAD(wide, x) ((wide){ 0 } + (x))
#else
  #define WIDE(bytes) uint64_t
  #define SPREAD(wide, x) ((wide)(x))
#endif
enum { PAGE_BYTES = 4096, AHEAD_BYTES = 4096, TURN_BYTES = 256, CHAINS = 12, PEAK_TURNS = 125000, BURSTS = 8 };
static volatile uint32_t sink;          /* zero, but the compiler does not know */

/* The processor's own prefetchers stop at the end of a page. */
#if defined(__GNUC__)
  #define FETCH(p, bytes_on) __builtin_prefetch((char*)(p) + (bytes_on))
#else
  #define FETCH(p, bytes_on) ((void)0)
#endif
#define LINE_AHEAD(p) FETCH(p, AHEAD_BYTES)
/* Each line of four vectors. */
#define FOUR_AHEAD(p) do {                                                 \
    LINE_AHEAD(p);                                                         \
    if (sizeof *(p) > 16) LINE_AHEAD((p) + 2);                             \
    if (sizeof *(p) > 32) { LINE_AHEAD((p) + 1); LINE_AHEAD((p) + 3); }    \
} while (0)
/* One line of a page that is 16 on, where a page begins. */
#define PAGE_AHEAD(p) do {                                                                                          \
    if (((uintptr_t)(const void*)(p) & (PAGE_BYTES - 1)) < 4 * sizeof *(p)) FETCH(p, 16 * PAGE_BYTES);              \
} while (0)
#define NOT_AHEAD(p) ((void)0)

/* Goes once over a part of an array, a whole number of TURN_BYTES. */
#define PASS(name, wide, target, ahead)                                                                         \
target static NOINLINE void name(char* data, size_t bytes, char use) {                                          \
    wide *p = (wide*)(void*)data, *end = p + bytes / sizeof *p, w = SPREAD(wide, sink), x = w, y = w, z = w;    \
    if (use == 'r') for (; p < end; p += 4) { ahead(p); w ^= p[0]; x ^= p[1]; y ^= p[2]; z ^= p[3]; }           \
    if (use == 'w') for (; p < end; p += 4) { p[0] = w; p[1] = x; p[2] = y; p[3] = z; }                         \
    if (use == 'u') for (; p < end; p += 4) { ahead(p); p[0] ^= w; p[1] ^= x; p[2] ^= y; p[3] ^= z; }           \
    w ^= x; y ^= z;                                                                                             \
    if (use == 'r' && bytes > 0 && memcmp(&w, &y, sizeof w) == 0) end[-1] ^= w ^ y;                             \
}

/* Twelve independent chains hide the latency of the fma. */
#define FMAS(isa, target, lanes, vector, set1, load, store, fma)                                                \
target static NOINLINE void fmas_##isa(float* x) {                                                              \
    vector a = set1(-1.0f), b = load(x + 12 * lanes);                                                           \
    vector x0 = load(x), x1 = load(x + lanes), x2 = load(x + 2 * lanes), x3 = load(x + 3 * lanes),              \
           x4 = load(x + 4 * lanes), x5 = load(x + 5 * lanes), x6 = load(x + 6 * lanes), x7 = load(x + 7 * lanes),\
           x8 = load(x + 8 * lanes), x9 = load(x + 9 * lanes), y0 = load(x + 10 * lanes), y1 = load(x + 11 * lanes);\
    int i;                                                                                                      \
    for (i = 0; i < PEAK_TURNS; i++) {                                                                          \
        x0 = fma(x0, a, b); x1 = fma(x1, a, b); x2 = fma(x2, a, b);                                             \
        x3 = fma(x3, a, b); x4 = fma(x4, a, b); x5 = fma(x5, a, b);                                             \
        x6 = fma(x6, a, b); x7 = fma(x7, a, b); x8 = fma(x8, a, b);                                             \
        x9 = fma(x9, a, b); y0 = fma(y0, a, b); y1 = fma(y1, a, b);                                             \
    }                                                                                                           \
    x0 = fma(x1, x2, fma(x3, x4, fma(x5, x6, x0)));                                                             \
    x0 = fma(x7, x8, fma(x9, y0, fma(y1, b, x0)));                                                              \
    store(x, x0);                                                                                               \
}

#define LIMITS(isa, target, register_bytes)                       \
    typedef WIDE(register_bytes) wide_##isa;                      \
    PASS(pass_##isa, wide_##isa, target, NOT_AHEAD)               \
    PASS(pass_ahead_##isa, wide_##isa, target, FOUR_AHEAD)        \
    PASS(pass_pages_##isa, wide_##isa, target, PAGE_AHEAD)

#define SAME(x) (x)
#define LOAD(p) (*(p))
#define STORE(p, x) (void)(*(p) = (x))
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
FMAS(scalar, , 1, float, SAME, LOAD, STORE, MULTIPLY_ADD)
LIMITS(scalar, , 16)
#if AMPI_X86
FMAS(avx2, AMPI_TARGET_AVX2, 8, __m256, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps)
LIMITS(avx2, AMPI_TARGET_AVX2, 32)
FMAS(avx512, AMPI_TARGET_AVX512, 16, __m512, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps)
LIMITS(avx512, AMPI_TARGET_AVX512, 64)
#endif
#if AMPI_NEON
#define NEON_FMA(a, b, c) vfmaq_f32(c, a, b)
FMAS(neon, , 4, float32x4_t, vdupq_n_f32, vld1q_f32, vst1q_f32, NEON_FMA)
LIMITS(neon, , 16)
#endif

/* Writes past the caches, where the processor can. */
static NOINLINE void write_past(char* data, size_t bytes, int pages) {
#if AMPI_X86
    size_t i;
    for (i = 0; i + 16 <= bytes; i += 16) {
        if (pages) PAGE_AHEAD((uint32_t*)(void*)(data + i));
        _mm_stream_si128((__m128i*)(void*)(data + i), _mm_setzero_si128());
    }
#else
    (void)pages;
    memset(data, 0, bytes);
#endif
}

typedef struct limit_kernels {
    void (*fmas)(float* x);
    void (*pass[3])(char* data, size_t bytes, char use);        /* [1] prefetches all lines, [2] one of each page */
    int lanes;
} limit_kernels;
static limit_kernels limits(void) {
    const limit_kernels scalar = { fmas_scalar, { pass_scalar, pass_ahead_scalar, pass_pages_scalar }, 1 };
#if AMPI_X86
    const limit_kernels avx2 = { fmas_avx2, { pass_avx2, pass_ahead_avx2, pass_pages_avx2 }, 8 };
    const limit_kernels avx512 = { fmas_avx512, { pass_avx512, pass_ahead_avx512, pass_pages_avx512 }, 16 };
    if (ampi_simd() == AMP_ISA_AVX512) return avx512;
    if (ampi_simd() == AMP_ISA_AVX2) return avx2;
#endif
#if AMPI_NEON
    const limit_kernels neon = { fmas_neon, { pass_neon, pass_ahead_neon, pass_pages_neon }, 4 };
    if (ampi_simd() == AMP_ISA_NEON) return neon;
#endif
    return scalar;
}

/* Seconds of a fraction of a millisecond's worth of nothing but fmas, on all threads. */
static double burst_of_fmas(int count) {
    const limit_kernels k = limits();
    double start = now();
    int t;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(count)
#endif
    for (t = 0; t < count; t++) {
        float x[13 * 16];               /* each chain starts elsewhere: equal ones would be merged */
        fill(x, AMP_F32, LENGTH(x));
        k.fmas(x);
    }
    return now() - start;
}
/* Seconds that the flops of the case take at the peak of all its threads, in bursts between calls of ours: so the
   processor keeps the clock that it has under that load. Left alone with fmas it would raise it. */
static double limit_of_arithmetic(void) {
    const int count = threads();
    double seconds = 0.0;
    int i;
    for (i = 0; i < BURSTS; i++) {
        if (now_open.took < SAMPLE) now_open.call();
        seconds += burst_of_fmas(count);
    }
    return seconds * now_open.flops / (2.0 * CHAINS * PEAK_TURNS * BURSTS * limits().lanes * count);
}

/* A way to pass over the arrays: `streams` pages at a time, each cut into so many pieces, one piece of each in turn;
   with prefetches of all lines (ahead 1) or one of each page (2); past the caches where it only writes. One page after
   the other leaves some memories idle, many at once are slow on others, and a short piece costs a call. */
typedef struct way { size_t streams, page, pieces; int ahead, past; } way;

/* One piece of the largest array and as much of the others. */
static void pass_piece(const limit_kernels* k, int first, const way* w, size_t piece, size_t pieces) {
    int s;
    for (s = 0; s < now_open.span_count; s++) {
        const span* a = &now_open.spans[s];
        size_t turns = a->bytes / TURN_BYTES, from = turns * piece / pieces, past = turns * (piece + 1) / pieces;
        size_t bytes = (past - from) * TURN_BYTES;
        char* data = a->data + from * TURN_BYTES;
        if (a->first != first) continue;
        if (w->past && a->use == 'w') write_past(data, bytes, w->ahead == 2);
        else k->pass[w->ahead](data, bytes, a->use);
    }
}
static void pass_part(const limit_kernels* k, int first, const way* w, size_t part, size_t parts) {
    const open_case* o = &now_open;
    size_t largest = 0, groups, g, i, q;
    int s;
    for (s = 0; s < o->span_count; s++) if (o->spans[s].bytes > largest) largest = o->spans[s].bytes;
    groups = (largest - 1) / (w->page * w->streams) + 1;
    for (g = groups * part / parts; g < groups * (part + 1) / parts; g++)
        for (i = 0; i < w->pieces; i++)
            for (q = 0; q < w->streams; q++)
                pass_piece(k, first, w, (g * w->streams + q) * w->pieces + i, groups * w->streams * w->pieces);
}
static double seconds_of_pass(const way* w) {
    const limit_kernels k = limits();
    const int parts = bytes_moved() < THREADED_BYTES ? 1 : threads();
    const int firsts = now_open.span_count > 0 && now_open.spans[now_open.span_count - 1].first;
    int t, first, calls = 0;
    double start = now();
    do {
        for (first = firsts; first >= 0; first--) {
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
#endif
            for (t = 0; t < parts; t++) pass_part(&k, first, w, (size_t)t, (size_t)parts);
        }
        calls++;
    } while (now() - start < SAMPLE / 3.0);
    return (now() - start) / calls;
}
static double limit_of_memory(void) {
    static const way ways[] = { { 1, 16384, 1, 0, 0 }, { 1, 16384, 1, 1, 0 }, { 8, 4096, 4, 1, 0 }, { 1, 1 << 20, 1, 2, 0 },
                                { 1, 16384, 1, 0, 1 }, { 1, 16384, 1, 1, 1 }, { 8, 4096, 4, 1, 1 }, { 1, 16384, 1, 2, 1 } };
    double least = seconds_of_pass(&ways[0]);
    size_t i;
    for (i = 1; i < LENGTH(ways); i++) {
        double seconds = seconds_of_pass(&ways[i]);
        if (seconds < least) least = seconds;
    }
    return least;
}
static double limit_seconds(void) {
    return now_open.flops > 0.0 ? limit_of_arithmetic() : limit_of_memory();
}

/* ---------------------------------------------------------------------------------------- */
/* The cases. Each function reads the shape, makes the operands, and names the call.          */
/* ---------------------------------------------------------------------------------------- */

static size_t count_of(const char* shape) {
    unsigned long n;
    if (sscanf(shape, "%lu", &n) != 1) die("not a count", shape);
    return (size_t)n;
}
/* R x D */
static void rows_of(const char* shape) {
    unsigned long r, d;
    if (sscanf(shape, "%lux%lu", &r, &d) != 2) die("not rows", shape);
    now_open.m = (size_t)r; now_open.n = (size_t)d;
}

/* --- matrix product: NT:MxNxK, all three matrices of one type --- */

static amp_result call_gemm(void) {
    const open_case* o = &now_open;
    const amp_gemm_shape s = { .trans_a = o->trans_a, .trans_b = o->trans_b, .m = o->m, .n = o->n, .k = o->k };
    return amp_gemm(&s, 1.0f, amp_ref_of(o->a, o->type), amp_ref_of(o->b, o->type), 0.0f,
        amp_ref_of(o->c, o->type), &o->exec);
}
static void open_gemm(const char* shape) {
    open_case* o = &now_open;
    unsigned long m, n, k;
    char ta, tb;
    if (sscanf(shape, "%c%c:%lux%lux%lu", &ta, &tb, &m, &n, &k) != 5) die("not a product", shape);
    o->trans_a = ta == 'T' ? AMP_TRANS : AMP_NO_TRANS;
    o->trans_b = tb == 'T' ? AMP_TRANS : AMP_NO_TRANS;
    o->m = (size_t)m; o->n = (size_t)n; o->k = (size_t)k;
    o->flops = 2.0 * (double)m * (double)n * (double)k;
    o->a = low_array(o->m * o->k, 0); o->b = low_array(o->k * o->n, 0); o->c = low_array(o->m * o->n, 0);
    workspace(amp_gemm_workspace(o->m, o->n, o->k));
    o->call = call_gemm;
}
/* The same in small blocks on the stack, as a call without an exec has it. */
static void open_gemm_alone(const char* shape) { open_gemm(shape); workspace(0); }

/* --- convolution: NxCxHxW:OxKHxKW:sSTRIDEpPADDING --- */

static amp_result call_conv_forward(void) {
    const open_case* o = &now_open;
    return amp_conv2d_forward(&o->conv, amp_ref_of(o->a, o->type), amp_ref_of(o->b, o->type),
        AMP_NONE, amp_ref_of(o->c, o->type), &o->exec);
}
static amp_result call_conv_backward(void) {
    const open_case* o = &now_open;
    return amp_conv2d_backward(&o->conv, amp_ref_of(o->c, o->type), amp_ref_of(o->a, o->type),
        amp_ref_of(o->b, o->type), amp_ref_of(o->d, o->type), amp_f32(o->f), AMP_NONE, 0, &o->exec);
}
static void open_conv(const char* shape) {
    open_case* o = &now_open;
    amp_conv2d_shape* s = &o->conv;
    size_t kernel, pixels;
    int oh = 0, ow = 0;
    if (sscanf(shape, "%dx%dx%dx%d:%dx%dx%d:s%dp%d", &s->n, &s->channels, &s->height, &s->width, &s->out_channels,
               &s->kernel_h, &s->kernel_w, &s->stride_h, &s->pad_h) != 9) die("not a convolution", shape);
    s->stride_w = s->stride_h; s->pad_w = s->pad_h;
    if (amp_conv2d_output(s, &oh, &ow, NULL) != AMP_OK) die("not a convolution", shape);
    kernel = (size_t)(s->channels * s->kernel_h * s->kernel_w);
    pixels = (size_t)(s->n * oh * ow);
    o->flops = 2.0 * (double)kernel * (double)pixels * s->out_channels;
    o->a = low_array((size_t)(s->n * s->channels * s->height) * (size_t)s->width, 0);
    o->b = low_array(kernel * (size_t)s->out_channels, 0);
    o->c = low_array(pixels * (size_t)s->out_channels, 0);
    workspace(amp_conv2d_workspace(s));
}
static void open_conv_forward(const char* shape) { open_conv(shape); now_open.call = call_conv_forward; }
static void open_conv_alone(const char* shape) { open_conv_forward(shape); workspace(0); }
static void open_conv_dx(const char* shape) {
    const amp_conv2d_shape* s = &now_open.conv;
    open_conv(shape);
    now_open.d = low_array((size_t)(s->n * s->channels * s->height) * (size_t)s->width, 0);
    now_open.call = call_conv_backward;
}
static void open_conv_dx_alone(const char* shape) { open_conv_dx(shape); workspace(0); }
static void open_conv_dw(const char* shape) {
    const amp_conv2d_shape* s = &now_open.conv;
    open_conv(shape);
    now_open.f = f32_array((size_t)(s->out_channels * s->channels) * (size_t)(s->kernel_h * s->kernel_w), 0);
    now_open.call = call_conv_backward;
}

/* --- conversions: COUNT --- */

static amp_result call_narrow(void) { return amp_convert(amp_ref_of(now_open.a, now_open.type),
    amp_f32(now_open.f), now_open.n); }
static amp_result call_widen(void) { return amp_convert(amp_f32(now_open.f),
    amp_ref_of(now_open.a, now_open.type), now_open.n); }
static void open_narrow(const char* shape) {
    now_open.n = count_of(shape);
    now_open.f = f32_array(now_open.n, 'r');
    now_open.a = low_array(now_open.n, 'w');
    now_open.call = call_narrow;
}
static void open_widen(const char* shape) {
    now_open.n = count_of(shape);
    now_open.a = low_array(now_open.n, 'r');
    now_open.f = f32_array(now_open.n, 'w');
    now_open.call = call_widen;
}

/* --- gradients under a loss scale of 1: COUNT --- */

static amp_result call_check(void) {
    amp_scaler_scale_loss(&now_open.scaler, 1.0f);
    return amp_scaler_check(&now_open.scaler, &now_open.tensor, 1, NULL);
}
static amp_result call_unscale(void) {
    amp_result r;
    amp_scaler_scale_loss(&now_open.scaler, 1.0f);
    r = amp_scaler_unscale(&now_open.scaler, &now_open.tensor, 1, NULL);
    return r != AMP_OK ? r : amp_scaler_update(&now_open.scaler);
}
static void open_scaler(void) {
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = AMP_SCALER_STATIC;
    d.init_scale = 1.0f;
    if (amp_scaler_init(&now_open.scaler, &d) != AMP_OK) die("no scaler", "");
}
static void open_grads(const char* shape, char use) {
    open_scaler();
    now_open.tensor.count = count_of(shape);
    now_open.tensor.dtype = now_open.type;
    now_open.tensor.data = low_array(now_open.tensor.count, use);
}
static void open_check(const char* shape) { open_grads(shape, 'r'); now_open.call = call_check; }
static void open_unscale(const char* shape) { open_grads(shape, 'u'); now_open.call = call_unscale; }

/* --- optimizers: COUNT. F32: weights and gradients in FP32, nothing else. F16, BF16: check, unscale, clipping and
   a low copy beside, gradients in FP32 --- */

static amp_result call_step(void) {
    amp_result r;
    if (now_open.type == AMP_F32) return amp_optimizer_step(&now_open.optimizer, NULL, NULL);
    amp_scaler_scale_loss(&now_open.scaler, 1.0f);
    r = amp_optimizer_step(&now_open.optimizer, &now_open.scaler, NULL);
    return r != AMP_OK ? r : amp_scaler_update(&now_open.scaler);
}
static void open_optimizer(const char* shape, amp_optimizer_kind kind, float momentum) {
    open_case* o = &now_open;
    amp_param* p = &o->param;
    amp_optimizer_desc d;
    span grads;
    memset(&d, 0, sizeof d);
    d.kind = kind; d.momentum = momentum; d.unchecked = 1;
    if (kind == AMP_ADAMW) d.weight_decay = 0.01f;
    p->count = count_of(shape);
    p->master = f32_array(p->count, 'u');
    p->grad = f32_array(p->count, 'r');
    grads = o->spans[o->span_count - 1];
    p->m = f32_array(p->count, 'u');
    if (kind != AMP_SGD) p->v = f32_array(p->count, 'u');
    memset(p->m, 0, p->count * sizeof(float));
    if (p->v) memset(p->v, 0, p->count * sizeof(float));
    if (o->type != AMP_F32) {
        p->low = low_array(p->count, 'w');
        p->low_dtype = o->type;
        grads.first = 1;                            /* the check reads them before: it forms their norm */
        o->spans[o->span_count++] = grads;
        d.clip_norm = 1.0f;
        open_scaler();
    }
    if (amp_optimizer_init(&o->optimizer, &d, p, 1) != AMP_OK) die("no optimizer", shape);
    o->call = call_step;
}
static void open_adam(const char* shape) { open_optimizer(shape, AMP_ADAM, 0.0f); }
static void open_adamw(const char* shape) { open_optimizer(shape, AMP_ADAMW, 0.0f); }
static void open_sgd(const char* shape) { open_optimizer(shape, AMP_SGD, 0.9f); }

/* --- norms: RxD, or NxCxS for batch norm --- */

static amp_result call_layer_norm(void) {
    const open_case* o = &now_open;
    return amp_layer_norm_forward(amp_ref_of(o->a, o->type), amp_f32(o->f), amp_f32(o->f), 0.0f,
        o->g, o->h, amp_ref_of(o->b, o->type), o->m, o->n, NULL);
}
static amp_result call_layer_norm_backward(void) {
    const open_case* o = &now_open;
    return amp_layer_norm_backward(amp_ref_of(o->b, o->type), amp_ref_of(o->a, o->type),
        amp_f32(o->f), 0.0f, o->g, o->h, amp_ref_of(o->c, o->type), amp_f32(o->i),
        amp_f32(o->i + o->n), 0, o->m, o->n, &o->exec);
}
static void open_layer_norm(const char* shape) {
    open_case* o = &now_open;
    rows_of(shape);
    o->a = low_array(o->m * o->n, 'r'); o->b = low_array(o->m * o->n, 'w');
    o->f = f32_array(o->n, 0); o->g = f32_array(o->m, 0); o->h = f32_array(o->m, 0);
    o->call = call_layer_norm;
}
static void open_layer_norm_backward(const char* shape) {
    open_case* o = &now_open;
    open_layer_norm(shape);
    if (call_layer_norm() != AMP_OK) die("layer norm", shape);
    o->spans[1].use = 'r';
    o->c = low_array(o->m * o->n, 'w');
    o->i = f32_array(2 * o->n, 0);
    workspace(amp_layer_norm_workspace(o->m, o->n));
    o->call = call_layer_norm_backward;
}
static amp_result call_batch_norm(void) {
    const open_case* o = &now_open;
    size_t c = o->n;
    return amp_batch_norm_forward(&o->norm, 1, amp_ref_of(o->a, o->type), amp_f32(o->f),
        amp_f32(o->f), o->g, o->g + c, o->h, o->h + c, amp_ref_of(o->b, o->type), NULL);
}
static amp_result call_batch_norm_backward(void) {
    const open_case* o = &now_open;
    size_t c = o->n;
    return amp_batch_norm_backward(&o->norm, amp_ref_of(o->b, o->type), amp_ref_of(o->a, o->type),
        amp_f32(o->f), o->h, o->h + c, amp_ref_of(o->c, o->type), amp_f32(o->i),
        amp_f32(o->i + c), 0, NULL);
}
static void open_batch_norm(const char* shape) {
    open_case* o = &now_open;
    amp_batch_norm_shape* s = &o->norm;
    size_t all;
    if (sscanf(shape, "%dx%dx%d", &s->n, &s->channels, &s->spatial) != 3) die("not N x C x S", shape);
    o->n = (size_t)s->channels;
    all = (size_t)s->n * (size_t)s->channels * (size_t)s->spatial;
    o->a = low_array(all, 'r'); o->b = low_array(all, 'w');
    o->f = f32_array(o->n, 0); o->g = f32_array(2 * o->n, 0); o->h = f32_array(2 * o->n, 0);
    o->call = call_batch_norm;
}
static void open_batch_norm_backward(const char* shape) {
    open_case* o = &now_open;
    open_batch_norm(shape);
    if (call_batch_norm() != AMP_OK) die("batch norm", shape);
    o->spans[1].use = 'r';
    o->c = low_array(o->spans[0].bytes / amp_dtype_size(o->type), 'w');
    o->i = f32_array(2 * o->n, 0);
    o->call = call_batch_norm_backward;
}

/* --- attention: BxTxHxD, and behind a colon 1 if causal; rows of heads, as a dense layer writes them --- */

static amp_result call_attention(void) {
    const open_case* o = &now_open;
    return amp_attention_forward(&o->attention, amp_ref_of(o->a, o->type), amp_ref_of(o->b, o->type), amp_ref_of(o->c, o->type),
        amp_ref_of(o->d, o->type), o->f, &o->exec);
}
static amp_result call_attention_both(void) {
    const open_case* o = &now_open;
    const size_t all = o->m * o->n;
    const amp_result r = call_attention();
    if (r != AMP_OK) return r;
    return amp_attention_backward(&o->attention, amp_ref_of(o->a, o->type), amp_ref_of(o->a, o->type), amp_ref_of(o->b, o->type),
        amp_ref_of(o->c, o->type), amp_ref_of(o->d, o->type), o->f, amp_ref_of(o->e, o->type),
        amp_ref_of((char*)o->e + all * amp_dtype_size(o->type), o->type),
        amp_ref_of((char*)o->e + 2 * all * amp_dtype_size(o->type), o->type), 0, &o->exec);
}
static void open_attention(const char* shape) {
    open_case* o = &now_open;
    amp_attention_shape* s = &o->attention;
    unsigned batch, queries, heads, head_size;
    if (sscanf(shape, "%ux%ux%ux%u:%d", &batch, &queries, &heads, &head_size, &s->causal) != 5) die("not B x T x H x D:CAUSAL", shape);
    s->batch = batch; s->queries = queries; s->heads = heads; s->head_size = head_size;
    o->m = s->batch * s->queries; o->n = s->heads * s->head_size;
    o->a = low_array(o->m * o->n, 0); o->b = low_array(o->m * o->n, 0); o->c = low_array(o->m * o->n, 0);
    o->d = low_array(o->m * o->n, 0);
    o->f = f32_array(o->m * s->heads, 0);
    workspace(amp_attention_workspace(s));
    /* a causal one needs half of two products */
    o->flops = (s->causal ? 2.0 : 4.0) * (double)o->m * (double)o->n * (double)s->queries;
    o->call = call_attention;
}
static void open_attention_both(const char* shape) {
    open_attention(shape);
    now_open.e = low_array(3 * now_open.m * now_open.n, 0);
    now_open.flops *= 3.5;              /* seven products */
    now_open.call = call_attention_both;
}

/* --- softmax and cross-entropy: RxD; the loss and its gradient in one call --- */

static amp_result call_softmax(void) {
    const open_case* o = &now_open;
    return amp_softmax_forward(amp_ref_of(o->a, o->type), amp_ref_of(o->b, o->type), o->m, o->n,
        NULL);
}
static amp_result call_cross_entropy(void) {
    const open_case* o = &now_open;
    float loss;
    amp_result r = amp_softmax_cross_entropy_forward(amp_ref_of(o->a, o->type), o->labels, NULL,
        &loss, o->m, o->n, NULL);
    if (r != AMP_OK) return r;
    return amp_softmax_cross_entropy_backward(amp_ref_of(o->a, o->type), o->labels, NULL, NULL,
        1.0f, amp_ref_of(o->b, o->type), o->m, o->n, NULL);
}
static void open_softmax(const char* shape) {
    rows_of(shape);
    now_open.a = low_array(now_open.m * now_open.n, 'r');
    now_open.b = low_array(now_open.m * now_open.n, 'w');
    now_open.call = call_softmax;
}
static int32_t* labels_of(size_t n, size_t classes) {
    int32_t* labels = (int32_t*)take(n * sizeof(int32_t));
    size_t i;
    for (i = 0; i < n; i++) labels[i] = (int32_t)(i * 7 % classes);
    return labels;
}
static void open_cross_entropy(const char* shape) {
    open_softmax(shape);
    now_open.labels = labels_of(now_open.m, now_open.n);
    now_open.call = call_cross_entropy;
}

/* --- activations: COUNT; pooling: NxCxHxW, 2 x 2, or NxCxHxW:KERNELsSTRIDEpPADDING --- */

static amp_result call_activation(void) {
    const open_case* o = &now_open;
    return amp_activation_forward(o->activation, amp_ref_of(o->a, o->type),
        amp_ref_of(o->b, o->type), o->n, &o->exec);
}
static amp_result call_activation_backward(void) {
    const open_case* o = &now_open;
    return amp_activation_backward(o->activation, amp_ref_of(o->b, o->type),
        amp_ref_of(o->a, o->type), amp_ref_of(o->c, o->type), 0, o->n, &o->exec);
}
static void open_activation(const char* shape, amp_activation f) {
    now_open.n = count_of(shape);
    now_open.activation = f;
    now_open.a = low_array(now_open.n, 'r'); now_open.b = low_array(now_open.n, 'w');
    workspace(AMP_ACTIVATION_WORKSPACE);
    now_open.call = call_activation;
}
static void open_gelu(const char* shape) { open_activation(shape, AMP_GELU); }
static void open_tanh(const char* shape) { open_activation(shape, AMP_TANH); }
static void open_sigmoid(const char* shape) { open_activation(shape, AMP_SIGMOID); }
static void open_relu(const char* shape) { open_activation(shape, AMP_RELU); }
static void open_slope(const char* shape, amp_activation f) {
    open_activation(shape, f);
    now_open.spans[1].use = 'r';
    now_open.c = low_array(now_open.n, 'w');
    now_open.call = call_activation_backward;
}
static void open_gelu_backward(const char* shape) { open_slope(shape, AMP_GELU); }
static void open_relu_backward(const char* shape) { open_slope(shape, AMP_RELU); }
static amp_result call_pool(void) {
    return amp_pool2d_forward(&now_open.pool, amp_ref_of(now_open.a, now_open.type),
        amp_ref_of(now_open.b, now_open.type), NULL);
}
static amp_result call_pool_backward(void) {
    const open_case* o = &now_open;
    return amp_pool2d_backward(&o->pool, amp_ref_of(o->b, o->type), amp_ref_of(o->a, o->type),
        amp_ref_of(o->c, o->type), 0, NULL);
}
static void open_pool(const char* shape) {
    open_case* o = &now_open;
    amp_pool2d_shape* s = &o->pool;
    int oh = 0, ow = 0, given;
    s->kernel_h = s->stride_h = 2;
    given = sscanf(shape, "%dx%dx%dx%d:%ds%dp%d", &s->n, &s->channels, &s->height, &s->width, &s->kernel_h, &s->stride_h,
                   &s->pad_h);
    s->kernel_w = s->kernel_h; s->stride_w = s->stride_h; s->pad_w = s->pad_h;
    if (given < 4 || amp_pool2d_output(s, &oh, &ow, NULL) != AMP_OK) die("not images", shape);
    o->n = (size_t)(s->n * s->channels) * (size_t)(s->height * s->width);
    o->a = low_array(o->n, 'r'); o->b = low_array((size_t)(s->n * s->channels) * (size_t)(oh * ow), 'w');
    o->call = call_pool;
}
static void open_average_pool(const char* shape) { now_open.pool.kind = AMP_POOL_AVERAGE; open_pool(shape); }
static void open_pool_backward(const char* shape) {
    open_pool(shape);
    now_open.spans[1].use = 'r';
    now_open.c = low_array(now_open.n, 'w');
    now_open.call = call_pool_backward;
}
static void open_average_pool_backward(const char* shape) {
    now_open.pool.kind = AMP_POOL_AVERAGE;
    open_pool_backward(shape);
}

/* --- a training step: BATCH, or the widths of a dense network and the batch, 784x512x512x10:256. F32 is O0,
   F16 and BF16 are O1, which is what PyTorch's autocast does --- */

static amp_result call_train(void) { return amp_train_step(now_open.model, &now_open.batch, NULL); }

static amp_model* new_model(int batch, amp_optimizer_kind kind) {
    amp_model_desc d;
    amp_model* m;
    memset(&d, 0, sizeof d);
    d.batch = batch;
    d.precision.level = now_open.type == AMP_F32 ? AMP_O0 : AMP_O1;
    if (now_open.type != AMP_F32) d.precision.low_dtype = now_open.type;
    d.optimizer.kind = kind;
    if (kind == AMP_ADAMW) d.optimizer.weight_decay = 0.01f;
    d.sums = now_open.exec.sums;
    if (amp_model_create(&m, &d) != AMP_OK) die("no model", "");
    return m;
}
static void train_on(const building* b, amp_value logits, int classes, size_t features) {
    amp_softmax_cross_entropy(b->m, logits);
    if (amp_model_finalize(b->m) != AMP_OK) die("no model", amp_model_error(b->m));
    now_open.model = b->m;
    now_open.flops = b->flops;
    now_open.batch.n = b->batch;
    now_open.batch.inputs[0] = f32_array((size_t)b->batch * features, 0);
    now_open.batch.targets[0] = labels_of((size_t)b->batch, (size_t)classes);
    now_open.call = call_train;
}

static void open_mlp(const char* shape) {
    int width[4], batch;
    building b;
    if (sscanf(shape, "%dx%dx%dx%d:%d", &width[0], &width[1], &width[2], &width[3], &batch) != 5)
        die("not a dense network", shape);
    b = building_begin(new_model(batch, AMP_ADAM), batch, width[0], 1);
    train_on(&b, building_dense(&b, width, 4), width[3], (size_t)width[0]);
}
static void open_lenet(const char* shape) {
    const int batch = (int)count_of(shape);
    building b = building_begin(new_model(batch, AMP_ADAM), batch, 1, 28);
    train_on(&b, building_lenet(&b), 10, 28 * 28);
}
/* A convolutional network: NAME:BATCH. */
static void open_network(const char* shape) {
    char name[32];
    int batch;
    const network* n = sscanf(shape, "%31[^:]:%d", name, &batch) == 2 ? network_named(name) : NULL;
    building b;
    if (!n) die("no such network", shape);
    b = building_begin(new_model(batch, AMP_ADAM), batch, 3, n->side);
    train_on(&b, building_network(&b, n, 1), n->classes, (size_t)(3 * n->side * n->side));
}

/* --- a training step of GPT-2 with AdamW: BATCHxTOKENS; F16 has a loss scaler. In the graph, and by hand --- */

static void open_gpt2(const char* shape) {
    open_case* o = &now_open;
    gpt_shape s;
    rows_of(shape);
    s = gpt2_shape(o->m, o->n, o->type);
    o->model = new_model((int)o->m, AMP_ADAMW);
    amp_softmax_cross_entropy(o->model, building_gpt2(o->model, &s));
    if (amp_model_finalize(o->model) != AMP_OK) die("no model", amp_model_error(o->model));
    o->batch.n = (int)o->m;
    o->batch.inputs[0] = labels_of(o->m * o->n, s.vocabulary);
    o->batch.targets[0] = labels_of(o->m * o->n, s.vocabulary);
    o->flops = gpt_flops(&s);
    o->call = call_train;
}

static amp_result call_gpt2_by_hand(void) {
    open_case* o = &now_open;
    amp_scaler* scaler = o->type == AMP_F16 ? &o->scaler : NULL;
    float loss_scale = 1.0f;
    amp_result r;
    gpt_forward(&o->gpt, o->tokens, o->gpt.s.batch);
    gpt_loss(&o->gpt, o->labels);
    if (scaler) loss_scale = amp_scaler_scale_loss(scaler, 1.0f);
    gpt_backward(&o->gpt, o->tokens, o->labels, &loss_scale);
    r = amp_optimizer_step(&o->optimizer, scaler, NULL);
    return r == AMP_OK && scaler ? amp_scaler_update(scaler) : r;
}
static void open_gpt2_by_hand(const char* shape) {
    open_case* o = &now_open;
    gpt_shape s;
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    rows_of(shape);
    s = gpt2_shape(o->m, o->n, o->type);
    d.kind = AMP_ADAMW; d.weight_decay = 0.01f; d.unchecked = 1; d.groups = gpt_groups; d.group_count = 2;
    if (!gpt_create(&o->gpt, &s)) die("no memory", shape);
    o->gpt.exec.sums = o->exec.sums;
    if (amp_optimizer_init(&o->optimizer, &d, o->gpt.params, o->gpt.count) != AMP_OK) die("no optimizer", shape);
    amp_scaler_init(&o->scaler, NULL);
    o->tokens = labels_of(o->m * o->n, s.vocabulary);
    o->labels = labels_of(o->m * o->n, s.vocabulary);
    o->flops = gpt_flops(&s);
    o->call = call_gpt2_by_hand;
}

/* --- all of them; a star marks the short list --- */

typedef struct subject {
    const char *what, *shapes, *types;
    void (*open)(const char* shape);
} subject;

#define CONVOLUTIONS                                                                                     \
    "64x1x28x28:6x5x5:s1p2 *64x6x14x14:16x5x5:s1p0 *8x64x28x28:64x3x3:s1p1 8x256x14x14:256x3x3:s1p1 "    \
    "8x512x7x7:512x3x3:s1p1 8x64x28x28:128x3x3:s2p1 8x256x14x14:64x1x1:s1p0"

#define WIDE_CONVOLUTIONS "*8x64x28x28:64x3x3:s1p1 8x256x14x14:256x3x3:s1p1 8x64x28x28:128x3x3:s2p1 8x256x14x14:64x1x1:s1p0"
#define ATTENTIONS "16x64x12x64:1 *4x256x12x64:1 1x1024x12x64:1"
#define FAST "f16-fast bf16-fast"

static const subject subjects[] = {
    { "gemm", "NN:64x64x64 NN:128x128x128 NN:256x256x256 NT:256x256x256 TN:256x256x256 *NN:512x512x512 NN:1024x1024x1024 "
      "*NN:2048x2048x2048 *NT:256x512x784 NN:256x784x512 TN:784x512x256 NT:256x10x512 NT:16x1024x1024 NN:16x6400x150 "
      "NN:64x6272x576 NN:512x392x4608 *NT:1x4096x4096 NN:1x4096x4096 NT:4x4096x4096", "f32 f16 bf16", open_gemm },
    { "gemm", "NN:128x128x128 *NN:512x512x512 *NN:2048x2048x2048 *NT:256x512x784 TN:784x512x256", FAST, open_gemm },
    { "gemm without workspace", "NN:512x512x512 NT:256x512x784 NT:64x120x400", "f32 f16 bf16", open_gemm_alone },
    { "conv forward", CONVOLUTIONS, "f32 f16 bf16", open_conv_forward },
    { "conv forward", WIDE_CONVOLUTIONS, FAST, open_conv_forward },
    { "conv forward without workspace", "8x64x28x28:64x3x3:s1p1", "f32 f16 bf16", open_conv_alone },
    { "conv dx", CONVOLUTIONS, "f32 f16 bf16", open_conv_dx },
    { "conv dx", WIDE_CONVOLUTIONS, FAST, open_conv_dx },
    { "conv dx without workspace", "8x64x28x28:128x3x3:s2p1", "f32 f16 bf16", open_conv_dx_alone },
    { "conv dw", CONVOLUTIONS, "f32 f16 bf16", open_conv_dw },
    { "conv dw", WIDE_CONVOLUTIONS, FAST, open_conv_dw },
    { "convert from f32", "65536 *16777216 67108864", "f16 bf16", open_narrow },
    { "convert to f32", "65536 *16777216 67108864", "f16 bf16", open_widen },
    { "check and norm", "65536 *16777216", "f32 f16 bf16", open_check },
    { "unscale, check and norm", "65536 *16777216", "f32 f16 bf16", open_unscale },
    { "adam", "65536 *10000000", "f32 f16", open_adam },
    { "adamw", "65536 10000000", "f32 f16", open_adamw },
    { "sgd momentum", "65536 *10000000", "f32 f16", open_sgd },
    { "layer norm forward", "*4096x768 1024x4096", "f32 f16 bf16", open_layer_norm },
    { "layer norm backward", "4096x768 1024x4096", "f32 f16 bf16", open_layer_norm_backward },
    { "batch norm forward", "*64x64x784 256x1024x1", "f32 f16 bf16", open_batch_norm },
    { "batch norm backward", "64x64x784 256x1024x1", "f32 f16 bf16", open_batch_norm_backward },
    { "softmax", "*4096x1000 65536x10", "f32 f16 bf16", open_softmax },
    { "cross-entropy, both ways", "*4096x1000 65536x10", "f32 f16 bf16", open_cross_entropy },
    { "attention forward", ATTENTIONS " 1x1024x12x64:0", "f32 f16 bf16", open_attention },
    { "attention, both ways", ATTENTIONS " 1x1024x12x64:0", "f32 f16 bf16", open_attention_both },
    { "attention, both ways", ATTENTIONS, FAST, open_attention_both },
    { "gelu forward", "*4194304", "f32 f16 bf16", open_gelu },
    { "gelu backward", "4194304", "f32 f16 bf16", open_gelu_backward },
    { "relu forward", "4194304", "f32 f16 bf16", open_relu },
    { "relu backward", "4194304", "f32 f16 bf16", open_relu_backward },
    { "tanh forward", "4194304", "f32 f16 bf16", open_tanh },
    { "sigmoid forward", "4194304", "f32 f16 bf16", open_sigmoid },
    { "max pool forward", "*64x64x28x28 16x64x56x56:3s2p1", "f32 f16 bf16", open_pool },
    { "max pool backward", "64x64x28x28 16x64x56x56:3s2p1", "f32 f16 bf16", open_pool_backward },
    { "average pool forward", "64x64x28x28 64x64x28x28:3s1p1", "f32 f16 bf16", open_average_pool },
    { "average pool backward", "64x64x28x28 64x64x28x28:3s1p1", "f32 f16 bf16", open_average_pool_backward },
    { "train lenet5", "*64", "f32 f16 bf16", open_lenet },
    { "train mlp", "*784x512x512x10:256 784x512x512x10:1 784x512x512x10:4 784x512x512x10:16 784x512x512x10:64 "
      "784x512x512x10:1024 784x64x64x10:256 784x256x256x10:256 784x1024x1024x10:256 784x2048x2048x10:256 "
      "784x4096x4096x10:256", "f32 f16 bf16", open_mlp },
    { "train mlp", "*784x512x512x10:256 784x2048x2048x10:256", FAST, open_mlp },
    { "train network", "*stack:16 *residual:16 *separable:16 *bottleneck:16", "f32 f16 bf16 bf16-fast", open_network },
    { "train network", "vgg16:16 resnet34_32:8", "f32 bf16 bf16-fast", open_network },    /* half takes PyTorch minutes */
    { "train gpt2", "*4x64 1x1024", "f32 f16 bf16", open_gpt2 },
    { "train gpt2", "*4x64", FAST, open_gpt2 },
    { "train gpt2 by hand", "4x64", "f32 f16 bf16", open_gpt2_by_hand }
};

/* ---------------------------------------------------------------------------------------- */
/* Going through the cases, and timing one.                                                  */
/* ---------------------------------------------------------------------------------------- */

typedef struct line { const subject* s; char shape[64]; amp_dtype type; amp_sums sums; int starred; } line;

static const char* name_of(const line* l) {
    static char name[16];
    snprintf(name, sizeof name, "%s%s", amp_dtype_name(l->type), l->sums == AMP_SUMS_FAST ? "-fast" : "");
    return name;
}
static void set_type(line* l, const char* name) {
    static const amp_dtype all[] = { AMP_F32, AMP_F16, AMP_BF16 };
    size_t i;
    for (i = 0; i < 2 * LENGTH(all); i++) {
        l->type = all[i / 2];
        l->sums = i % 2 ? AMP_SUMS_FAST : AMP_SUMS_FIXED;
        if (!strcmp(name_of(l), name)) return;
    }
    die("no such type", name);
}
static const subject* subject_of(const char* what) {
    size_t i;
    for (i = 0; i < LENGTH(subjects); i++) if (!strcmp(subjects[i].what, what)) return &subjects[i];
    die("no such case", what);
    return NULL;
}
/* Copies the next word of *text, moves behind it; 0 at the end. */
static int next_word(const char** text, char word[64]) {
    size_t n = 0;
    while (**text == ' ') ++*text;
    while (**text && **text != ' ' && n < 63) word[n++] = *(*text)++;
    word[n] = 0;
    return n > 0;
}
/* Line number `want` of the list; 0 if there are fewer. */
static int find_line(int want, line* l) {
    size_t s;
    for (s = 0; s < LENGTH(subjects); s++) {
        const char* shapes = subjects[s].shapes;
        char shape[64], type[64];
        while (next_word(&shapes, shape)) {
            const char* types = subjects[s].types;
            while (next_word(&types, type)) {
                set_type(l, type);
                if ((l->sums == AMP_SUMS_FAST && !amp_cpu_has_fast_sums()) || want-- > 0) continue;
                l->s = &subjects[s];
                l->starred = shape[0] == '*';
                strcpy(l->shape, shape + l->starred);
                return 1;
            }
        }
    }
    return 0;
}

static void open_line(const line* l) {
    close_case();
    now_open.type = l->type;
    now_open.exec.sums = l->sums;
    l->s->open(l->shape);
    if (now_open.call() != AMP_OK) die("a call was refused", l->s->what);
}
static int is_train(const line* l) { return !strncmp(l->s->what, "train", 5); }
static const char* unit_of(const line* l) {
    return is_train(l) ? "ms" : now_open.flops > 0.0 ? "GFLOP/s" : "GB/s";
}
static double work(void) { return now_open.flops > 0.0 ? now_open.flops : bytes_moved(); }
static double figure(const line* l, double seconds) { return is_train(l) ? 1e3 * seconds : 1e-9 * work() / seconds; }

static double seconds_of(int calls) {
    double start = now();
    int i;
    if (now_open.took < 0.2) do now_open.call(); while (now() - start < WARM);  /* what was evicted comes back */
    start = now();
    for (i = 0; i < calls; i++) now_open.call();
    return now_open.took = (now() - start) / calls;
}
static int calls_of_sample(void) {
    int calls = 1;
    double seconds;
    while ((seconds = seconds_of(calls) * calls) < SAMPLE / 4.0) calls *= 2;
    return 1 + (int)(SAMPLE / seconds * calls);
}

static int by_size(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}
static double median(double x[ROUNDS]) {
    qsort(x, ROUNDS, sizeof *x, by_size);
    return x[ROUNDS / 2];
}

static void print_row(const line* l) {
    enum { LONGEST = 24 };
    double ours[ROUNDS], limit[ROUNDS], share[ROUNDS], part;
    int calls, bar, r;
    open_line(l);
    calls = calls_of_sample();
    for (r = 0; r < ROUNDS; r++) {
        ours[r] = seconds_of(calls);
        limit[r] = limit_seconds();
        share[r] = limit[r] / ours[r];
    }
    part = fmin(1.0, median(share));      /* of a limit as measured: what passes it has reached it */
    bar = (int)(LONGEST * part + 0.5);
    printf("%-26s %-24s %-9s %7d %9.3g %-7s %9.3g %-7s %5.0f %%  %.*s\n", l->s->what, l->shape, name_of(l), threads(),
           figure(l, median(ours)), unit_of(l), figure(l, median(limit)), unit_of(l), 100.0 * part, bar,
           "########################");
    fflush(stdout);
}
/* On one thread and on all; on a terminal with a bar that tells how far it is. */
static void print_table(int quick) {
    const int most = threads();
    line l;
    int i, count = 0, done = 0;
    for (i = 0; find_line(i, &l); i++) count += l.starred || !quick;
    printf("amp.h on %s beside the limit of this processor, which tests/bench/bench.c explains; %d cases\n%-26s %-24s "
           "%-9s %7s %17s %17s %7s\n", amp_isa_name(amp_cpu_isa()), count, "what", "shape", "type", "threads", "amp.h", "limit",
           "share");
    for (i = 0; find_line(i, &l); i++) {
        if (quick && !l.starred) continue;
        chart_progress(l.s->what, done++, count);
        use_threads(1);
        print_row(&l);
        use_threads(most);
        if (most > 1) print_row(&l);
        chart_progress("", 1, 1);
    }
}

static void print_list(void) {
    line l;
    int i;
    for (i = 0; find_line(i, &l); i++)
        printf("%s\t%s\t%s\t%d\n", l.s->what, l.shape, name_of(&l), l.starred);
}

/* One answer for each line of the input. */
static void serve(void) {
    char request[64];
    line l;
    int calls = 1;
    printf("%s %d\n", amp_isa_name(amp_cpu_isa()), threads());
    for (fflush(stdout); fgets(request, sizeof request, stdin); fflush(stdout)) {
        if (!strncmp(request, "open ", 5)) {
            if (!find_line(atoi(request + 5), &l)) die("no such line", request);
            open_line(&l);
            calls = calls_of_sample();
            printf("%s %.17g\n", unit_of(&l), work());
        } else if (!strncmp(request, "ours", 4)) printf("%.9g\n", seconds_of(calls));
        else if (!strncmp(request, "limit", 5)) printf("%.9g\n", limit_seconds());
        else die("no such request", request);
    }
}

/* An instruction counter collects inside this function only (callgrind --toggle-collect=measured). */
NOINLINE void measured(void);
NOINLINE void measured(void) { now_open.call(); }

static void count(const char* what, const char* shape, const char* type) {
    line l;
    l.s = subject_of(what);
    if (strlen(shape) >= sizeof l.shape) die("no such shape", shape);
    strcpy(l.shape, shape);
    set_type(&l, type);
    open_line(&l);
    (void)amp_cpu_isa();  /* chosen before instructions are counted */
    measured();
    printf("%s\n", amp_isa_name(amp_cpu_isa()));
}

static void first_call(void) {
    double start, first;
    now_open.type = AMP_F32;
    open_gemm("NN:64x64x64");
    start = now();
    call_gemm();
    first = now() - start;
    start = now();
    call_gemm();
    printf("%.9g %.9g\n", first, now() - start);
}

int main(int argc, char** argv) {
    const char* mode = argc > 1 ? argv[1] : "";
    if (!strcmp(mode, "list")) print_list();
    else if (!strcmp(mode, "serve")) {
        processor_time = argc > 2;
        serve();
    }
    else if (!strcmp(mode, "first")) first_call();
    else if (!strcmp(mode, "count") && argc == 5) count(argv[2], argv[3], argv[4]);
    else if (!strcmp(mode, "") || !strcmp(mode, "quick")) print_table(!strcmp(mode, "quick"));
    else die("not a mode", mode);
    close_case();
    return 0;
}
