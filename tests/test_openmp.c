/* test_openmp.c - operators, convolutions and a model large enough that OpenMP's threads share them: the same bits with
   one thread and with several. check.sh also runs it under ThreadSanitizer. Without -fopenmp it has nothing to say. */
#if defined(__linux__)
  #define _GNU_SOURCE     /* RUSAGE_THREAD */
#endif
#include "../amp.h"
#include "test.h"
#include <fenv.h>
#ifdef _OPENMP
  #include <omp.h>
  #if defined(__linux__)
    #include <sys/mman.h>
    #include <sys/resource.h>
  #endif

enum { SIDE = 20, BATCH = 32, STEPS = 2, N = 300000, GUARD = 65536 };

static uint64_t hash_bytes(uint64_t h, const void* p, size_t n) {
    const unsigned char* b = (const unsigned char*)p;
    size_t i;
    for (i = 0; b && i < n; i++) h = (h ^ b[i]) * 1099511628211u;
    return h;
}

/* A layer of each kind, and widths that need more than one tile. */
static int build(amp_model** m, amp_dtype low, amp_sums sums) {
    amp_model_desc d;
    amp_conv2d_desc c;
    amp_value x, y;
    memset(&d, 0, sizeof d);
    memset(&c, 0, sizeof c);
    d.batch = BATCH;
    d.seed = 3;
    d.sums = sums;
    d.precision.level = AMP_O2;
    d.precision.low_dtype = low;
    d.optimizer.kind = AMP_LAMB;
    d.optimizer.clip_norm = 1.0f;
    if (amp_model_create(m, &d) != AMP_OK) return 0;
    c.out_channels = 8;
    c.kernel = 3;
    c.pad = 1;
    x = amp_relu(*m, amp_conv2d_with(*m, amp_input(*m, 1, SIDE, SIDE), &c));
    x = amp_batch_norm(*m, x);
    y = amp_gelu(*m, amp_conv2d_with(*m, x, &c));
    x = amp_concat(*m, amp_max_pool2d(*m, amp_add(*m, x, y), 2), amp_avg_pool2d(*m, y, 2));
    x = amp_dropout(*m, amp_layer_norm(*m, amp_linear(*m, x, 160)), 0.1f);
    amp_softmax_cross_entropy(*m, amp_linear(*m, amp_tanh(*m, x), 10));
    return amp_model_finalize(*m) == AMP_OK;
}

static uint64_t trained(amp_dtype low, amp_sums sums) {
    static float x[BATCH * SIDE * SIDE];
    int32_t labels[BATCH];
    amp_model* m = NULL;
    amp_batch b;
    amp_param* p;
    uint64_t h = 1469598103934665603u;
    int i, k, count = 0;
    memset(&b, 0, sizeof b);
    b.n = BATCH;
    b.inputs[0] = x;
    b.targets[0] = labels;
    CHECK(build(&m, low, sums));
    for (k = 0; k < STEPS; k++) {
        for (i = 0; i < BATCH * SIDE * SIDE; i++) x[i] = amp_random_normal(5, (uint64_t)(k * BATCH * SIDE * SIDE + i));
        for (i = 0; i < BATCH; i++) labels[i] = (int32_t)(amp_random_bits(6, (uint64_t)(k * BATCH + i)) % 10u);
        CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
    }
    p = amp_model_params(m, &count);
    for (i = 0; i < count; i++) h = hash_bytes(h, p[i].master, p[i].count * sizeof(float));
    amp_model_destroy(m);
    return h;
}

/* A user's function for amp_map. */
static void square(const float* dy, const float* x, float* y, size_t n, void* user_data) {
    size_t i;
    (void)user_data;
    for (i = 0; i < n; i++) y[i] = dy ? 2.0f * dy[i] * x[i] : x[i] * x[i];
}

/* Conversions, the checks of a scaler and an optimizer on memory of the caller's own. */
static uint64_t converted(void) {
    float* x = (float*)malloc(N * sizeof *x);
    uint16_t* h = (uint16_t*)malloc(N * sizeof *h);
    size_t clamped = 0, i;
    amp_convert_desc d;
    amp_scaler s;
    amp_tensor t;
    amp_overflow_info info;
    uint64_t hash = 1469598103934665603u;
    CHECK(x && h);
    for (i = 0; x && i < N; i++) x[i] = amp_random_normal(7, i) * 40000.0f;
    memset(&d, 0, sizeof d);
    memset(&t, 0, sizeof t);
    d.saturate = 1;
    d.saturated = &clamped;
    CHECK(amp_convert_with(amp_f16(h), amp_f32(x), N, &d) == AMP_OK && clamped > 0);
    t.data = h;
    t.dtype = AMP_F16;
    t.count = N;
    CHECK(amp_scaler_init(&s, NULL) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, &t, 1, &info) == AMP_OK && amp_scaler_may_step(&s) == 1);
    hash = hash_bytes(hash, h, N * sizeof *h);
    hash = hash_bytes(hash, &clamped, sizeof clamped);
    hash = hash_bytes(hash, &info.norm, sizeof info.norm);
    CHECK(amp_map(square, NULL, amp_ref_of(h, AMP_F16), amp_f32(x), amp_f32(x), N, NULL) == AMP_OK);
    hash = hash_bytes(hash, x, N * sizeof *x);
    free(x);
    free(h);
    return hash;
}

static void test_threads_change_no_bit(void) {
    uint64_t model[3], bfloat16[3], fast[3], memory[3];
    int k;
    for (k = 0; k < 3; k++) {
        omp_set_num_threads(k + 1);
        model[k] = trained(AMP_F16, AMP_SUMS_FIXED);
        bfloat16[k] = trained(AMP_BF16, AMP_SUMS_FIXED);
        fast[k] = trained(AMP_BF16, AMP_SUMS_FAST);
        memory[k] = converted();
    }
    for (k = 1; k < 3; k++)
        CHECK_MSG(model[k] == model[0] && bfloat16[k] == bfloat16[0] && fast[k] == fast[0] && memory[k] == memory[0],
                  "%d threads", k + 1);
    CHECK((fast[0] != bfloat16[0]) == amp_cpu_has_fast_sums());
}
/* Attention forward and backward: batch, queries, heads, kv_heads, head_size, causal, window. Gradients of few kv heads
   take two passes over tiles, of many one. */
static const int ATTENTIONS[][7] = {
    { 1, 320, 2, 2, 40, 1, 0 }, { 2, 150, 6, 3, 16, 1, 50 }, { 12, 40, 4, 4, 24, 0, 0 }, { 1, 257, 4, 1, 33, 0, 0 } };
static uint64_t attended(const int z[7], amp_dtype t) {
    const size_t each = amp_dtype_size(t);
    amp_attention_shape s;
    amp_exec exec;
    size_t q, kv, i, k;
    char* low[8];
    float *source, *lse;
    uint64_t h = 1469598103934665603u;
    memset(&s, 0, sizeof s);
    memset(&exec, 0, sizeof exec);
    s.batch = (size_t)z[0]; s.queries = (size_t)z[1]; s.heads = (size_t)z[2]; s.kv_heads = (size_t)z[3];
    s.head_size = (size_t)z[4]; s.causal = z[5]; s.window = (size_t)z[6];
    q = s.batch * s.queries * s.heads * s.head_size;
    kv = s.batch * s.queries * s.kv_heads * s.head_size;
    exec.workspace_size = amp_attention_workspace(&s);
    exec.workspace = malloc(exec.workspace_size);
    source = (float*)malloc(q * sizeof *source);
    lse = (float*)malloc(s.batch * s.heads * s.queries * sizeof *lse);
    CHECK(exec.workspace && source && lse);
    for (k = 0; k < 8; k++) {        /* q, k, v, dy, y, dq, dk, dv */
        const size_t n = k == 1 || k == 2 || k > 5 ? kv : q;
        low[k] = (char*)malloc(n * each);
        for (i = 0; i < n; i++) source[i] = amp_random_normal(8 + k, i);
        CHECK(low[k] && amp_convert(amp_ref_of(low[k], t), amp_f32(source), n) == AMP_OK);
    }
#define LOW(k) amp_ref_of(low[k], t)
    CHECK(amp_attention_forward(&s, LOW(0), LOW(1), LOW(2), LOW(4), lse, &exec) == AMP_OK);
    CHECK(amp_attention_backward(&s, LOW(3), LOW(0), LOW(1), LOW(2), LOW(4), lse, LOW(5), LOW(6), LOW(7), 0, &exec) == AMP_OK);
#undef LOW
    h = hash_bytes(h, lse, s.batch * s.heads * s.queries * sizeof *lse);
    for (k = 4; k < 8; k++) h = hash_bytes(h, low[k], (k > 5 ? kv : q) * each);
    for (k = 0; k < 8; k++) free(low[k]);
    free(exec.workspace); free(source); free(lse);
    return h;
}
/* Steps of a transformer, a block of each kind. */
static uint64_t transformed(amp_dtype low) {
    enum { T = 48, SEQUENCES = 6, D = 64, VOCABULARY = 300 };
    static int32_t tokens[SEQUENCES * T], next[SEQUENCES * T];
    static const int32_t lengths[SEQUENCES] = { T, 3, T, 20, T, T };
    amp_model_desc d;
    amp_transformer_desc block;
    amp_model* m = NULL;
    amp_value x, words;
    amp_batch b;
    amp_param* p;
    uint64_t h = 1469598103934665603u;
    int i, count = 0;
    memset(&d, 0, sizeof d);
    memset(&block, 0, sizeof block);
    memset(&b, 0, sizeof b);
    d.batch = SEQUENCES; d.seed = 4; d.precision.level = AMP_O2; d.precision.low_dtype = low;
    d.optimizer.kind = AMP_ADAMW; d.optimizer.clip_norm = 1.0f;
    CHECK(amp_model_create(&m, &d) == AMP_OK);
    words = amp_embedding(m, amp_tokens(m, T), VOCABULARY, D);
    x = amp_position_embedding(m, words);
    block.heads = 4; block.dropout = 0.1f;
    x = amp_transformer_block(m, x, &block);
    memset(&block, 0, sizeof block);
    block.kind = AMP_BLOCK_LLAMA; block.heads = 4; block.kv_heads = 2;
    x = amp_transformer_block(m, x, &block);
    amp_softmax_cross_entropy(m, amp_tied_linear(m, amp_rms_norm(m, x), words));
    CHECK(amp_model_finalize(m) == AMP_OK);
    for (i = 0; i < SEQUENCES * T; i++) {
        tokens[i] = (int32_t)(amp_random_bits(9, (uint64_t)i) % VOCABULARY);
        next[i] = (tokens[i] * 7 + 1) % VOCABULARY;
    }
    b.n = SEQUENCES; b.inputs[0] = tokens; b.targets[0] = next; b.lengths = lengths;
    for (i = 0; i < STEPS; i++) CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
    p = amp_model_params(m, &count);
    for (i = 0; i < count; i++) h = hash_bytes(h, p[i].master, p[i].count * sizeof(float));
    amp_model_destroy(m);
    return h;
}
static void test_threads_change_no_attention(void) {
    static const amp_dtype types[] = { AMP_F32, AMP_F16, AMP_BF16 };
    uint64_t first[4][3] = { { 0 } }, steps[2] = { 0 };
    int k, i, t;
    for (k = 0; k < 3; k++) {
        omp_set_num_threads(k + 1);
        for (i = 0; i < 4; i++) for (t = 0; t < 3; t++) {
            const uint64_t h = attended(ATTENTIONS[i], types[t]);
            if (k == 0) first[i][t] = h;
            CHECK_MSG(h == first[i][t], "attention %d, type %d, %d threads", i, t, k + 1);
        }
        for (t = 0; t < 2; t++) {
            const uint64_t h = transformed(types[1 + t]);
            if (k == 0) steps[t] = h;
            CHECK_MSG(h == steps[t], "a transformer, type %d, %d threads", 1 + t, k + 1);
        }
    }
}

/* Convolutions that are worth several threads: n, channels, side, out_channels, kernel, stride, padding, groups. */
static const int CONVOLUTIONS[][8] = {
    { 64, 7, 13, 17, 5, 1, 0, 1 },     /* directly, several images to each thread */
    { 40, 12, 9, 10, 3, 1, 1, 2 },
    { 32, 1, 16, 7, 5, 1, 2, 1 },
    { 24, 2, 16, 24, 5, 1, 2, 2 },
    { 32, 2, 20, 6, 3, 1, 1, 1 },
    { 32, 6, 13, 10, 5, 1, 0, 1 },
    { 48, 8, 17, 9, 3, 2, 0, 1 },      /* dx in phases */
    { 3, 16, 20, 30, 3, 1, 1, 1 },     /* fewer images than threads */
    { 5, 9, 15, 70, 3, 2, 1, 1 },
    { 17, 32, 16, 24, 1, 1, 0, 1 },    /* a plain product */
    { 3, 32, 32, 32, 3, 1, 1, 32 },    /* depthwise */
    { 5, 70, 14, 66, 3, 1, 1, 1 },
    { 1, 96, 20, 40, 3, 1, 1, 2 },
    { 3, 100, 7, 190, 3, 1, 1, 1 },    /* a product of the im2col matrix, shared by rows, */
    { 5, 70, 17, 66, 3, 2, 1, 1 },     /* or by columns */
    { 2, 96, 7, 112, 3, 1, 1, 1 },
    { 7, 32, 15, 48, 3, 1, 1, 1 }
};

/* y, dx, and twice dw and db, by as many threads as there are now, in the workspace or a part of it, and not beyond. */
static uint64_t convolved(const int z[8], amp_dtype t, amp_sums sums, size_t part) {
    amp_conv2d_shape s;
    size_t x, w, y, i;
    char *low, *weights, *dy;
    float *source, *results;
    amp_exec exec;
    uint64_t h = 1469598103934665603u;
    int oh = 0, ow = 0;
    memset(&s, 0, sizeof s);
    memset(&exec, 0, sizeof exec);
    s.n = z[0]; s.channels = z[1]; s.height = s.width = z[2]; s.out_channels = z[3];
    s.kernel_h = s.kernel_w = z[4]; s.stride_h = s.stride_w = z[5]; s.pad_h = s.pad_w = z[6]; s.groups = z[7];
    CHECK(amp_conv2d_output(&s, &oh, &ow, NULL) == AMP_OK);
    x = (size_t)(s.n * s.channels * s.height * s.width);
    w = (size_t)(s.out_channels * (s.channels / s.groups) * s.kernel_h * s.kernel_w);
    y = (size_t)(s.n * s.out_channels * oh * ow);
    exec.workspace_size = amp_conv2d_workspace(&s) / part;
    exec.workspace = malloc(exec.workspace_size + GUARD);
    memset((char*)exec.workspace + exec.workspace_size, 7, GUARD);
    exec.sums = sums;
    source = (float*)malloc((x + w + y) * sizeof *source);
    results = (float*)malloc((x + w + y + (size_t)z[3]) * sizeof *results);
    low = (char*)malloc((x + w + y) * sizeof *source);
    weights = low + x * amp_dtype_size(t);
    dy = weights + w * amp_dtype_size(t);
    for (i = 0; i < x + w + y; i++) source[i] = amp_random_normal(13, i);
    memset(results, 0x55, (x + w + y + (size_t)z[3]) * sizeof *results);     /* not what another run has left there */
    CHECK(amp_convert(amp_ref_of(low, t), amp_f32(source), x + w + y) == AMP_OK);
    CHECK(amp_conv2d_forward(&s, amp_ref_of(low, t), amp_ref_of(weights, t), AMP_NONE,
        amp_f32(results), &exec) == AMP_OK);
    CHECK(amp_conv2d_backward(&s, amp_ref_of(dy, t), amp_ref_of(low, t), amp_ref_of(weights, t),
        amp_f32(results + y), amp_f32(results + y + x), amp_f32(results + y + x + w), 0, &exec) == AMP_OK);
    CHECK(amp_conv2d_backward(&s, amp_ref_of(dy, t), amp_ref_of(low, t), AMP_NONE, AMP_NONE,
        amp_f32(results + y + x), amp_f32(results + y + x + w), 1, &exec) == AMP_OK);
    for (i = 0; i < GUARD; i++) if (((char*)exec.workspace)[exec.workspace_size + i] != 7) break;
    CHECK(i == GUARD);
    h = hash_bytes(h, results, (x + w + y + (size_t)z[3]) * sizeof *results);
    free(exec.workspace); free(source); free(results); free(low);
    return h;
}
static void test_threads_and_convolutions(void) {
    static const amp_dtype types[] = { AMP_F32, AMP_F16, AMP_BF16 };
    static const int threads[] = { 2, 3, 6, 7 };
    size_t i, t, k;
    for (i = 0; i < sizeof CONVOLUTIONS / sizeof CONVOLUTIONS[0]; i++)
        for (t = 0; t < 3; t++) {
            uint64_t alone, fast;
            omp_set_num_threads(1);
            alone = convolved(CONVOLUTIONS[i], types[t], AMP_SUMS_FIXED, 1);
            fast = convolved(CONVOLUTIONS[i], types[t], AMP_SUMS_FAST, 1);
            for (k = 0; k < 4; k++) {
                omp_set_num_threads(threads[k]);
                CHECK_MSG(convolved(CONVOLUTIONS[i], types[t], AMP_SUMS_FIXED, 1) == alone
                              && convolved(CONVOLUTIONS[i], types[t], AMP_SUMS_FIXED, 2) == alone
                              && convolved(CONVOLUTIONS[i], types[t], AMP_SUMS_FAST, 1) == fast
                              && convolved(CONVOLUTIONS[i], types[t], AMP_SUMS_FAST, 2) == fast,
                          "convolution %lu, %s, %d threads", (unsigned long)i, amp_dtype_name(types[t]), threads[k]);
            }
        }
}

/* Weights and values of 24 heads of 40 tokens, and three large products, by as many threads as there are now. */
static uint64_t multiplied(size_t batch, size_t side) {
    const size_t each = side * side, all = batch * each;
    float* source = (float*)malloc(2 * all * sizeof *source);
    char* low = (char*)malloc(2 * all * 2);
    amp_exec exec;
    uint64_t h;
    size_t i;
    memset(&exec, 0, sizeof exec);
    exec.workspace_size = amp_gemm_workspace(side, side, side);
    exec.workspace = malloc(exec.workspace_size + GUARD);
    memset((char*)exec.workspace + exec.workspace_size, 7, GUARD);
    for (i = 0; i < 2 * all; i++) source[i] = amp_random_normal(14, i);
    CHECK(amp_convert(amp_f16(low), amp_f32(source), 2 * all) == AMP_OK);
    CHECK(amp_gemm(PRODUCTS(AMP_NO_TRANS, AMP_TRANS, side, side, side, side, side, side * batch, batch, each, each, side),
        1.0f, amp_f16(low), amp_f16(low + 2 * all), 0.0f, amp_f32(source), &exec) == AMP_OK);
    for (i = 0; i < GUARD; i++) if (((char*)exec.workspace)[exec.workspace_size + i] != 7) break;
    CHECK(i == GUARD);
    h = hash_bytes(1469598103934665603u, source, all * sizeof *source);
    free(exec.workspace); free(source); free(low);
    return h;
}
static void test_threads_and_batches(void) {
    uint64_t many[5], large[5];
    int k;
    for (k = 0; k < 5; k++) {
        omp_set_num_threads(k + 1);
        many[k] = multiplied(24, 40);
        large[k] = multiplied(3, 170);
        CHECK_MSG(many[k] == many[0] && large[k] == large[0], "%d threads", k + 1);
    }
}

/* All threads compute in the floating-point environment of the caller, masks and rounding, and keep their own. */
static void test_threads_take_the_environment(void) {
    enum { MANY = 256 * 1024 };
    static float one[MANY], tiny[MANY], sum[MANY];
    int i, pass, others = 0;
    for (i = 0; i < MANY; i++) { one[i] = 1.0f; tiny[i] = 1e-30f; }
    omp_set_num_threads(4);
#pragma omp parallel
    {
#pragma omp atomic
        others += omp_get_num_threads() != 4;
    }
    for (pass = 0; pass < 2; pass++) {
        const float expected = pass ? 1.0f : 1.00000012f;
        fesetround(pass ? FE_TONEAREST : FE_UPWARD);
        CHECK(amp_add_forward(amp_f32(one), amp_f32(tiny), amp_f32(sum), MANY, NULL) == AMP_OK);
        fesetround(FE_TONEAREST);
        for (i = 0; i < MANY; i++) others += sum[i] != expected;
    }
    CHECK_MSG(others == 0, "%d sums", others);
#pragma omp parallel
    {
#pragma omp critical
        CHECK(fegetround() == FE_TONEAREST);
    }
}

#if defined(__linux__)
/* Pages that thread number 1 was the first to touch, so far. */
static long pages_of_second(void) {
    long pages = 0;
#pragma omp parallel num_threads(2)
    if (omp_get_thread_num() == 1) {
        struct rusage u;
        getrusage(RUSAGE_THREAD, &u);
        pages = u.ru_minflt;
    }
    return pages;
}
/* Memory that no thread has touched, in small pages. */
static float* untouched(size_t floats) {
    void* p = mmap(NULL, floats * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    madvise(p, floats * sizeof(float), MADV_NOHUGEPAGE);
    return (float*)p;
}
/* One call of each kind of loop that threads share: y is written, or read by the check. */
static void fill(int kind, const float* a, float* y, size_t side) {
    amp_gemm_shape product;
    amp_conv2d_shape image;
    amp_scaler s;
    amp_tensor t;
    memset(&product, 0, sizeof product);
    memset(&image, 0, sizeof image);
    memset(&t, 0, sizeof t);
    product.m = product.n = side;
    product.k = 8;
    image.n = image.channels = 4;
    image.height = image.width = (int)side / 8;
    image.out_channels = 16;
    image.kernel_h = image.kernel_w = 3;
    image.pad_h = image.pad_w = 1;
    t.data = y;
    t.dtype = AMP_F32;
    t.count = side * side;
    if (kind == 0) CHECK(amp_add_forward(amp_f32(a), amp_f32(a), amp_f32(y), side * side, NULL) == AMP_OK);
    if (kind == 1) CHECK(amp_gemm(&product, 1.0f, amp_f32(a), amp_f32(a), 0.0f, amp_f32(y), NULL) == AMP_OK);
    if (kind == 2) CHECK(amp_conv2d_forward(&image, amp_f32(a), amp_f32(a), AMP_NONE, amp_f32(y),
        NULL) == AMP_OK);
    if (kind < 3) return;
    CHECK(amp_scaler_init(&s, NULL) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_OK);
}
/* Of an operator's new pages the second thread touches some: it has worked. */
static void test_second_thread_works(void) {
    enum { M = 1024, PAGES = M * M / 1024 };
    static float a[M * M];
    int kind;
    omp_set_num_threads(2);
    for (kind = 0; kind < 4; kind++) {
        float* y = untouched(M * M);
        const long before = pages_of_second();
        fill(kind, a, y, M);
        CHECK_MSG(pages_of_second() - before > PAGES / 8, "case %d: the second thread touched %ld of %d pages", kind,
                  pages_of_second() - before, PAGES);
        munmap(y, M * M * sizeof *y);
    }
}
#else
static void test_second_thread_works(void) { TEST_SKIP("pages of a thread are counted on Linux"); }
#endif
#else
static void test_second_thread_works(void) { TEST_SKIP("no OpenMP"); }
static void test_threads_and_batches(void) { TEST_SKIP("no OpenMP"); }
static void test_threads_take_the_environment(void) { TEST_SKIP("no OpenMP"); }
static void test_threads_and_convolutions(void) { TEST_SKIP("no OpenMP"); }
static void test_threads_change_no_bit(void) { TEST_SKIP("no OpenMP"); }
static void test_threads_change_no_attention(void) { TEST_SKIP("no OpenMP"); }
#endif

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_threads_change_no_bit);
    TEST(test_threads_change_no_attention);
    TEST(test_threads_and_convolutions);
    TEST(test_threads_and_batches);
    TEST(test_second_thread_works);
    TEST(test_threads_take_the_environment);
    TEST_END();
}
