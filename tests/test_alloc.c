/* test_alloc.c - memory that runs out: the k-th allocation fails, for every k, while a model is built, finalized, saved and
   loaded. Always a clean error with a sentence, no leak, and an object that can still be used or destroyed. */
#define AMP_BACKEND_API
#include "small_model.h"

static void* user_mark;      /* the allocator's user_data must come back */
static void* marked_alloc(size_t n, void* user) { CHECK(user == &user_mark); return failing_alloc(n, NULL); }
static void marked_free(void* p, void* user) { CHECK(user == &user_mark); failing_free(p, NULL); }

/* --- LeNet-5 with batch norm and more: 32 layers, which fill the first array of nodes, so that the casts of O1 need a
   second one --- */

static amp_scaler_desc calm;         /* a scale at which no step is skipped */

static amp_model_desc desc_of(amp_level level) {
    amp_model_desc d = model_desc(4, level, AMP_DTYPE_DEFAULT);
    d.optimizer.kind = AMP_ADAM;
    calm.preset = AMP_SCALER_STATIC; calm.init_scale = 4.0f;
    d.scaler = &calm;
    d.allocator.alloc = marked_alloc; d.allocator.free = marked_free; d.allocator.user_data = &user_mark;
    return d;
}
static void build(amp_model* m) {
    amp_value x = amp_input(m, 1, 32, 32), y;
    int i;
    x = amp_max_pool2d(m, amp_relu(m, amp_batch_norm(m, amp_conv2d(m, x, 6, 5, 1, 0))), 2);
    x = amp_max_pool2d(m, amp_relu(m, amp_batch_norm(m, amp_conv2d(m, x, 16, 5, 1, 0))), 2);
    x = amp_relu(m, amp_linear(m, x, 120));
    amp_autocast_push(m, AMP_F32);
    x = amp_layer_norm(m, amp_linear(m, x, 84));
    for (i = 0; i < 5; i++) x = amp_add(m, x, amp_tanh(m, x));
    amp_autocast_pop(m);
    for (i = 0, y = amp_linear(m, x, 84); i < 2; i++) y = amp_linear(m, amp_relu(m, y), 84);
    x = amp_add(m, amp_relu(m, x), x);
    amp_softmax_cross_entropy(m, amp_add(m, x, y));
}
static float pictures[4 * 1024];
static int32_t labels[4] = { 1, 2, 3, 4 };
static amp_batch full_batch(void) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = 4; b.inputs[0] = pictures; b.targets[0] = labels;
    return b;
}
static uint64_t hash_of(amp_model* m) {
    uint64_t h = 14695981039346656037u;
    int i, count;
    size_t k;
    const amp_param* p = amp_model_params(m, &count);
    for (i = 0; i < count; i++)
        for (k = 0; k < p[i].count; k++) {
            uint32_t u = 0;
            if (p[i].master) memcpy(&u, &p[i].master[k], 4);
            else memcpy(&u, (const unsigned short*)p[i].low + k, 2);
            h = (h ^ u) * 1099511628211u;
        }
    return h;
}

/* create + build + finalize with every single failure; after a failed finalize a second one works, and trains to the same
   bits as a model that never failed. */
static void test_build(void) {
    int level;
    for (level = 0; level <= 3; level++) {
        amp_model_desc d = desc_of((amp_level)level);
        amp_batch b = full_batch();
        amp_model* m = NULL;
        amp_step_info info;
        amp_memory memory, again;
        uint64_t want;
        long k, total, finalize_failures = 0, build_failures = 0;
        int i, casts;
        fail_at_call(0);
        m = new_model(&d);
        build(m);
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        total = alloc_calls;
        CHECK(amp_model_memory(m, &memory) == AMP_OK);
        CHECK_MSG(amp_model_layer_count(m) == 32, "%d", amp_model_layer_count(m));
        for (i = casts = 0; i < 32; i++) casts += amp_model_layer(m, i)->casts;
        CHECK((casts > 0) == (level == 1));
        want = hash_of(m);
        CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
        CHECK(alloc_calls == total && hash_of(m) != want);
        want = hash_of(m);
        amp_model_destroy(m);
        CHECK(alloc_live == 0);
        for (k = 1; k <= total; k++) {
            amp_result r;
            long before;
            heard_count = 0; heard[0] = 0;
            fail_at_call(k);
            r = amp_model_create(&m, &d);
            if (r != AMP_OK) {
                CHECK(r == AMP_ERR_MEMORY && m == NULL && heard_count == 1 && alloc_live == 0);
                continue;
            }
            build(m);
            before = alloc_calls;
            r = amp_model_finalize(m);
            CHECK_MSG(r == AMP_ERR_MEMORY, "allocation %ld: %s", k, amp_result_string(r));
            CHECK_MSG(heard_count == 1 && strstr(heard, "memory") && strcmp(heard, amp_model_error(m)) == 0,
                      "%d: %s", heard_count, heard);
            CHECK(amp_train_step(m, &b, NULL) == AMP_ERR_STATE);
            CHECK(amp_model_params(m, NULL) == NULL);
            if (before < k) {
                finalize_failures++;
                CHECK_MSG(amp_model_finalize(m) == AMP_OK, "after allocation %ld: %s", k, amp_model_error(m));
                CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
                CHECK(hash_of(m) == want);
                CHECK(amp_model_memory(m, &again) == AMP_OK && memcmp(&memory, &again, sizeof memory) == 0);
            } else {
                build_failures++;
                CHECK(amp_model_finalize(m) == AMP_ERR_MEMORY);       /* the graph is not whole */
            }
            amp_model_destroy(m);
            CHECK_MSG(alloc_live == 0, "allocation %ld: %ld blocks are left", k, alloc_live);
        }
        CHECK(finalize_failures >= 9 && build_failures >= 1);     /* a block for each kind of memory */
    }
    CHECK(alloc_wrong_frees == 0);
}

/* A create that is refused for another reason gives its memory back, too. */
static void test_refused_create(void) {
    amp_model_desc d = desc_of(AMP_O1);
    amp_model* m = NULL;
    fail_at_call(0);
    d.precision.master_weights = 1;
    CHECK(amp_model_create(&m, &d) == AMP_ERR_POLICY && m == NULL && alloc_live == 0);
    d = desc_of(AMP_O1);
    d.accumulate = -1;
    CHECK(amp_model_create(&m, &d) == AMP_ERR_DESC && m == NULL && alloc_live == 0);
}

/* --- files ------------------------------------------------------------------------------------- */

static const char* path = "test_alloc.tmp.safetensors";

static void test_file(void) {
    float a[6] = { 1, 2, 3, 4, 5, 6 }, b[3] = { 7, 8, 9 }, in_a[6], in_b[3];
    amp_file_tensor t[2], in[2];
    amp_file_text text;
    amp_file_desc d;
    amp_logger logger;
    char out[16];
    long k, total;
    memset(t, 0, sizeof t);
    memset(&d, 0, sizeof d);
    d.allocator.alloc = marked_alloc; d.allocator.free = marked_free; d.allocator.user_data = &user_mark;
    logger.log = listen; logger.user_data = NULL;
    d.logger = &logger;
    t[0].tensor.data = a; t[0].tensor.count = 6; t[0].tensor.name = "a"; t[0].rank = 2; t[0].shape[0] = 2; t[0].shape[1] = 3;
    t[1].tensor.data = b; t[1].tensor.count = 3; t[1].tensor.name = "b"; t[1].rank = 1; t[1].shape[0] = 3;
    memcpy(in, t, sizeof in);
    in[0].tensor.data = in_a; in[1].tensor.data = in_b;
    text.key = "key"; text.value = "value";
    fail_at_call(0);
    CHECK(amp_file_save(path, t, 2, &text, 1, &d) == AMP_OK && alloc_live == 0);
    total = alloc_calls;
    for (k = 1; k <= total; k++) {
        fail_at_call(k); heard_count = 0;
        a[0] = 100.0f;                              /* must not get into the file */
        CHECK(amp_file_save(path, t, 2, &text, 1, &d) == AMP_ERR_MEMORY);
        CHECK(heard_count == 1 && heard[0] && alloc_live == 0);
    }
    fail_at_call(0);
    CHECK(amp_file_load(path, in, 2, &d) == AMP_OK && in_a[0] == 1.0f && in_b[2] == 9.0f && alloc_live == 0);
    total = alloc_calls;
    for (k = 1; k <= total; k++) {
        fail_at_call(k); heard_count = 0;
        in_a[0] = in_b[0] = -1.0f;
        CHECK(amp_file_load(path, in, 2, &d) == AMP_ERR_MEMORY);
        CHECK(heard_count == 1 && heard[0] && alloc_live == 0 && in_a[0] == -1.0f && in_b[0] == -1.0f);
    }
    fail_at_call(0);
    CHECK(amp_file_text_of(path, "key", out, sizeof out, &d) == AMP_OK && strcmp(out, "value") == 0 && alloc_live == 0);
    total = alloc_calls;
    for (k = 1; k <= total; k++) {
        fail_at_call(k); heard_count = 0;
        strcpy(out, "before");
        CHECK(amp_file_text_of(path, "key", out, sizeof out, &d) == AMP_ERR_MEMORY);
        CHECK(heard_count == 1 && alloc_live == 0 && strcmp(out, "before") == 0);
    }
    CHECK(remove(path) == 0 && alloc_wrong_frees == 0);
}

static void test_checkpoint(void) {
    amp_model_desc d = desc_of(AMP_O2);
    amp_batch b = full_batch();
    amp_model *m = NULL, *fresh = NULL;
    long k, total, base;
    uint64_t saved, other;
    amp_step_info info;
    fail_at_call(0);
    m = new_model(&d);
    build(m);
    CHECK(amp_model_finalize(m) == AMP_OK && amp_train_step(m, &b, NULL) == AMP_OK);
    saved = hash_of(m);
    base = alloc_live;
    fail_at_call(0);
    CHECK_MSG(amp_checkpoint_save(m, path) == AMP_OK, "%s", amp_model_error(m));
    total = alloc_calls;
    CHECK(total > 0 && alloc_live == base);
    CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
    other = hash_of(m);
    CHECK(other != saved);
    for (k = 1; k <= total; k++) {
        fail_at_call(k); heard_count = 0;
        CHECK(amp_checkpoint_save(m, path) == AMP_ERR_MEMORY);
        CHECK(heard_count == 1 && heard[0] && alloc_live == base && hash_of(m) == other);
    }
    /* The file is still the first one; every failing load leaves the model alone. */
    fail_at_call(0);
    fresh = new_model(&d);
    build(fresh);
    CHECK(amp_model_finalize(fresh) == AMP_OK);
    base = alloc_live;
    other = hash_of(fresh);
    fail_at_call(0);
    CHECK_MSG(amp_checkpoint_load(m, path) == AMP_OK, "%s", amp_model_error(m));
    total = alloc_calls;
    CHECK(hash_of(m) == saved && alloc_live == base);
    for (k = 1; k <= total; k++) {
        fail_at_call(k); heard_count = 0;
        CHECK(amp_checkpoint_load(fresh, path) == AMP_ERR_MEMORY);
        CHECK(heard_count == 1 && heard[0] && alloc_live == base && hash_of(fresh) == other);
    }
    fail_at_call(0);
    CHECK(amp_checkpoint_load(fresh, path) == AMP_OK && hash_of(fresh) == saved);
    CHECK(amp_train_step(fresh, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
    CHECK(amp_train_step(m, &b, NULL) == AMP_OK && amp_model_optimizer(m)->state.step == info.step);
    CHECK(hash_of(fresh) == hash_of(m));
    amp_model_destroy(m);
    amp_model_destroy(fresh);
    CHECK(alloc_live == 0 && alloc_wrong_frees == 0);
    CHECK(remove(path) == 0);
}

/* The precision report: statistics, and a file. */
static void test_report(void) {
    amp_model_desc d = desc_of(AMP_O2);
    amp_batch b = full_batch();
    amp_model* m = NULL;
    long k, total, base;
    fail_at_call(0);
    m = new_model(&d);
    build(m);
    CHECK(amp_model_finalize(m) == AMP_OK);
    base = alloc_live;
    fail_at_call(0);
    CHECK_MSG(amp_report_svg(m, &b, path) == AMP_OK && remove(path) == 0, "%s", amp_model_error(m));
    total = alloc_calls;
    CHECK(total >= 2 && alloc_live == base);
    for (k = 1; k <= total; k++) {
        fail_at_call(k); heard_count = 0;
        CHECK(amp_report_svg(m, &b, path) == AMP_ERR_MEMORY && heard_count == 1 && alloc_live == base);
        CHECK_MSG(strstr(heard, "no memory for"), "%s", heard);
        CHECK(remove(path) != 0);
    }
    amp_model_destroy(m);
    CHECK(alloc_live == 0 && alloc_wrong_frees == 0);
}

/* A model without parameters has nothing to checkpoint, and says so or does it, but does not crash. */
static void test_checkpoint_of_nothing(void) {
    amp_model_desc d = desc_of(AMP_O0);
    amp_model* m = NULL;
    fail_at_call(0);
    m = new_model(&d);
    amp_softmax(m, amp_input(m, 3, 1, 1));
    CHECK(amp_model_finalize(m) == AMP_OK);
    CHECK(amp_checkpoint_save(m, path) == AMP_ERR_STATE);
    CHECK(remove(path) != 0);               /* no file */
    amp_model_destroy(m);
    CHECK(alloc_live == 0);
}

/* A processor whose large blocks are only numbers. */
static char vast;
static size_t vast_bytes[64];
static int vast_count;
static void* vast_alloc(size_t bytes, const amp_allocator* a) {
    if (bytes < 1000000) return amp_cpu_backend()->alloc(bytes, a);
    if (vast_count < 64) vast_bytes[vast_count++] = bytes;
    return &vast;
}
static void vast_free(void* p, const amp_allocator* a) { if (p != &vast) amp_cpu_backend()->free(p, a); }
static amp_result vast_zero(void* p, size_t bytes, const amp_exec* e) {
    return bytes < 900000 ? amp_cpu_backend()->zero(p, bytes, e) : AMP_OK;
}
/* The statistics of 16 layer norms over 2^25 + 1 rows are 2^32 + 128 bytes: where that is no size, finalize says so. */
static void test_sizes_that_do_not_fit(void) {
    const size_t rows = ((size_t)1 << 25) + 1;
    amp_backend backend = *amp_cpu_backend();
    amp_model_desc d;
    amp_model* m = NULL;
    amp_value v;
    amp_result r;
    int i, found = 0;
    backend.alloc = vast_alloc; backend.free = vast_free; backend.zero = vast_zero;
    memset(&d, 0, sizeof d);
    d.batch = (int)rows; d.backend = &backend; d.logger.log = listen;
    m = new_model(&d);
    v = amp_input(m, 1, 1, 1);
    for (i = 0; i < 16; i++) v = amp_layer_norm(m, v);
    r = amp_model_finalize(m);
    if (rows > SIZE_MAX / 128) CHECK_MSG(r == AMP_ERR_MEMORY && strstr(heard, "does not fit"), "%d: %s", (int)r, heard);
    else {
        for (i = 0; i < vast_count; i++) found += vast_bytes[i] >= rows * 128 && vast_bytes[i] < rows * 128 + 4096;
        CHECK_MSG(r == AMP_OK && found == 1, "%d: %s", (int)r, heard);
    }
    amp_model_destroy(m);
}

/* So is an arena of saved values of 2^31-1 elements for 10^8 samples, whose sum is no size where one of them is. */
static void test_arena_that_does_not_fit(void) {
    amp_model_desc d;
    amp_model* m;
    amp_value v;
    int i;
    memset(&d, 0, sizeof d);
    d.batch = 100000000; d.logger.log = listen;
    m = new_model(&d);
    v = amp_linear(m, amp_input(m, 1, 1, 1), 0x7fffffff);
    for (i = 0; i < 25; i++) v = amp_gelu(m, v);
    amp_mse(m, v);
    if (SIZE_MAX > 0xffffffffu)
        CHECK_MSG(amp_model_finalize(m) == AMP_ERR_MEMORY && strstr(heard, "does not fit"), "%s", heard);
    else CHECK_MSG(amp_model_finalize(m) == AMP_ERR_DESC, "%s", heard);
    amp_model_destroy(m);
}

/* --- a workspace that grows --- */

enum { GROWING_CALLS = 6, GROWING = 300 * 1024 };
static uint16_t growing_x[GROWING], growing_dy[GROWING];
static float growing_w[128 * 128];

/* Call `call` into y, which holds zeros; how much workspace its documentation tells. */
static size_t growing_call(int call, float* y, const amp_exec* exec) {
    const amp_conv2d_shape conv = { 2, 16, 24, 24, 16, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0 };
    const amp_conv2d_shape depthwise = { 2, 16, 24, 24, 16, 3, 3, 1, 1, 1, 1, 1, 1, 16, 0, 0, 0, 0 };
    const amp_ref x = amp_bf16((amp_bfloat16*)growing_x), dy = amp_bf16((amp_bfloat16*)growing_dy), w = amp_f32(growing_w);
    amp_gemm_shape product;
    memset(&product, 0, sizeof product);
    product.m = product.n = product.k = 100;
    if (call == 1) {
        product.batch = 3;
        product.a_stride = product.c_stride = 10000;
    }
    switch (call) {
    case 0: case 1:
        CHECK(amp_gemm(&product, 1.0f, x, w, 0.0f, amp_f32(y), exec) == AMP_OK);
        return amp_gemm_workspace(100, 100, 100);
    case 2:
        CHECK(amp_conv2d_backward(&conv, dy, x, w, amp_f32(y + 4096), amp_f32(y), AMP_NONE, 0, exec) == AMP_OK);
        return amp_conv2d_workspace(&conv);
    case 3:
        CHECK(amp_conv2d_forward(&depthwise, x, w, AMP_NONE, amp_f32(y), exec) == AMP_OK);
        return amp_conv2d_workspace(&depthwise);
    case 4:
        CHECK(amp_activation_forward(AMP_GELU, x, amp_f32(y), GROWING, exec) == AMP_OK);
        return AMP_ACTIVATION_WORKSPACE;
    default:
        CHECK(amp_layer_norm_backward(dy, x, AMP_NONE, 0.0f, NULL, NULL, amp_f32(y), amp_f32(y + 220000),
            amp_f32(y + 221100), 0, 200, 1100, exec) == AMP_OK);
        return amp_layer_norm_workspace(200, 1100);
    }
}

/* The bits are those of a call without a workspace, whether there is memory for one or not; it grows to what the
   documentation tells at most, is used, and never shrinks. */
static void test_workspace_grows(void) {
    static float plain[GROWING], y[GROWING];
    const size_t bytes = sizeof y;
    amp_workspace kept, w;
    amp_exec exec;
    int i, call, fails;
    memset(&exec, 0, sizeof exec);
    memset(&kept, 0, sizeof kept);
    kept.allocator.alloc = failing_alloc; kept.allocator.free = failing_free;
    for (i = 0; i < GROWING; i++) {
        growing_x[i] = (uint16_t)(0x3f00 + i % 251 + (i % 3 == 0 ? 0x8000 : 0));
        growing_dy[i] = (uint16_t)(0x3e80 + i % 199 + (i % 7 < 3 ? 0x8000 : 0));
    }
    for (i = 0; i < COUNT(growing_w); i++) growing_w[i] = (float)(i % 101) / 64 - 0.75f;
    for (call = 0; call < GROWING_CALLS; call++) {
        size_t before = kept.size, told, used, k;
        memset(plain, 0, bytes);
        growing_call(call, plain, NULL);
        for (fails = 0; fails < 2; fails++) {
            w = kept;
            w.data = NULL; w.size = 0;
            exec.grows = &w;
            memset(y, 0, bytes);
            fail_at_call(fails);
            alloc_fails_on = 1;
            told = growing_call(call, y, &exec);
            CHECK_MSG(memcmp(y, plain, bytes) == 0, "call %d, no memory %d: other bits", call, fails);
            CHECK_MSG(fails ? w.size == 0 && !w.data : w.size > 1000 && w.size <= (call == 1 ? 3 : 1) * (told + 128),
                "call %d, no memory %d: %lu bytes of %lu", call, fails, (unsigned long)w.size, (unsigned long)told);
            for (used = 0, k = 0; k < w.size; k++) used += ((unsigned char*)w.data)[k] != 0xa5;
            CHECK_MSG(fails || used > w.size / 8, "call %d: %lu bytes of %lu are used", call, (unsigned long)used,
                (unsigned long)w.size);
            amp_workspace_free(&w);
            CHECK(w.size == 0 && !w.data);
        }
        fail_at_call(0);
        alloc_fails_on = 0;
        exec.grows = &kept;
        memset(y, 0, bytes);
        growing_call(call, y, &exec);
        CHECK(kept.size >= before && memcmp(y, plain, bytes) == 0);
        fail_at_call(0);
        growing_call(call, y, &exec);
        CHECK_MSG(alloc_calls == 0, "call %d takes memory again", call);
    }
    amp_workspace_free(&kept);
    amp_workspace_free(&kept);
    amp_workspace_free(NULL);
    memset(&w, 0, sizeof w);           /* malloc's memory; then a backend's */
    for (i = 0; i < 2; i++) {
        w.backend = i ? amp_cpu_backend() : NULL;
        exec.grows = &w;
        growing_call(0, y, &exec);
        CHECK(w.size > 0 && w.data);
        amp_workspace_free(&w);
    }
    CHECK(alloc_live == 0 && alloc_wrong_frees == 0);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    int i;
    for (i = 0; i < 4 * 1024; i++) pictures[i] = test_uniform();
    TEST(test_build);
    TEST(test_refused_create);
    TEST(test_file);
    TEST(test_checkpoint);
    TEST(test_report);
    TEST(test_checkpoint_of_nothing);
    TEST(test_sizes_that_do_not_fit);
    TEST(test_arena_that_does_not_fit);
    TEST(test_workspace_grows);
    TEST_END();
}
