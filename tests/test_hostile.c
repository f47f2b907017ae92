/* test_hostile.c - wrong arguments, traps and interruptions: every refusal has a sentence and changes nothing, and
   a checkpoint on the disk is whole whenever the process dies. */
#if defined(__unix__) || defined(__APPLE__)
  #define _GNU_SOURCE                      /* feenableexcept */
  #include <sys/types.h>
  #include <sys/resource.h>
  #include <sys/wait.h>
  #include <dirent.h>
  #include <signal.h>
  #include <unistd.h>
  #define HAVE_FORK 1
#else
  #define HAVE_FORK 0
#endif
#include "small_model.h"
#include "upper.h"
#include <fenv.h>
#include <limits.h>
#include <stdint.h>
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__TINYC__)
  #include <immintrin.h>
  #define HAVE_MXCSR 1
#else
  #define HAVE_MXCSR 0
#endif

/* --- refusals ------------------------------------------------------------------------------------ */

/* Everything that calls get to read and write; a refused one must leave it as it is. */
static unsigned char memory[32768], copy[32768];
static float* const F = (float*)(void*)memory;
static amp_exec quiet;

static void prepare(void) {
    memset(memory, 0x3e, sizeof memory);
    memcpy(copy, memory, sizeof memory);
    memset(&quiet, 0, sizeof quiet);
    quiet.logger = &LISTENER;
    refusals = 0;
    heard[0] = 0;
}
#define REFUSED(code, what, call)                                                                          \
    do {                                                                                                   \
        amp_result result_;                                                                                \
        prepare();                                                                                         \
        result_ = (call);                                                                                  \
        CHECK_MSG(result_ != AMP_OK && ((code) == AMP_OK || result_ == (code)), "%s: %d", what, (int)result_); \
        CHECK_MSG(refusals == 1, "%s: %d sentences, '%s'", what, refusals, heard);                        \
        CHECK_MSG(memcmp(memory, copy, sizeof memory) == 0, "%s has changed something", what);            \
    } while (0)
#define ANY AMP_OK

/* One wrong value of one field. */
typedef struct bad { const char* name; size_t offset; char kind; double value; } bad;
#define INT(type, field, v) { #type "." #field " = " #v, offsetof(type, field), 'i', (double)(v) }
#define I64(type, field, v) { #type "." #field " = " #v, offsetof(type, field), 'l', (double)(v) }
#define DBL(type, field, v) { #type "." #field " = " #v, offsetof(type, field), 'd', v }
#define FLT(type, field, v) { #type "." #field " = " #v, offsetof(type, field), 'f', (double)(v) }
#define NOT(type, field) { #type "." #field " = nan", offsetof(type, field), 'n', 0 }, \
                         { #type "." #field " = inf", offsetof(type, field), 'p', 0 }, \
                         { #type "." #field " = -inf", offsetof(type, field), 'm', 0 }
#define NOT64(type, field) { #type "." #field " = nan", offsetof(type, field), 'N', 0 }, \
                           { #type "." #field " = inf", offsetof(type, field), 'P', 0 }, \
                           { #type "." #field " = -inf", offsetof(type, field), 'M', 0 }

static void put(void* desc, const bad* b) {
    unsigned char* p = (unsigned char*)desc + b->offset;
    uint32_t bits = b->kind == 'n' ? 0x7fc00000u : b->kind == 'p' ? 0x7f800000u : 0xff800000u;
    uint64_t bits64 = b->kind == 'N' ? 0x7ff8000000000000u : b->kind == 'P' ? 0x7ff0000000000000u : 0xfff0000000000000u;
    int i;
    int64_t l;
    float f;
    if (b->kind == 'd') memcpy(p, &b->value, sizeof b->value);
    else if (strchr("NPM", b->kind)) memcpy(p, &bits64, sizeof bits64);
    else if (b->kind == 'i') { i = (int)b->value; memcpy(p, &i, sizeof i); }
    else if (b->kind == 'l') { l = (int64_t)b->value; memcpy(p, &l, sizeof l); }
    else if (b->kind == 'f') { f = (float)b->value; memcpy(p, &f, sizeof f); }
    else memcpy(p, &bits, sizeof bits);
}

static void convert_desc_fields(void) {
    static const bad list[] = { INT(amp_convert_desc, rounding, 2), INT(amp_convert_desc, rounding, -1),
                                INT(amp_convert_desc, rounding, INT_MAX) };
    int i;
    for (i = 0; i < COUNT(list); i++) {
        amp_convert_desc d;
        memset(&d, 0, sizeof d);
        d.logger = &LISTENER;
        put(&d, &list[i]);
        REFUSED(AMP_ERR_DESC, list[i].name, amp_convert_with(amp_ref_of(F, AMP_F16), amp_f32(F + 100), 10, &d));
    }
}

static amp_conv2d_shape conv_shape(void) {
    amp_conv2d_shape s = { 1, 2, 5, 5, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0 };
    return s;
}
static void conv_shape_fields(void) {
#define S(field, v) INT(amp_conv2d_shape, field, v)
    static const bad list[] = {
        S(n, 0), S(n, -1), S(n, INT_MIN), S(channels, 0), S(channels, -1), S(height, 0), S(height, -5), S(width, 0),
        S(width, INT_MIN), S(out_channels, 0), S(out_channels, -1), S(kernel_h, 0), S(kernel_h, -1), S(kernel_h, 8),
        S(kernel_w, 0), S(kernel_w, INT_MIN), S(kernel_w, INT_MAX), S(stride_h, -1), S(stride_w, -1), S(pad_h, -1),
        S(pad_w, INT_MIN), S(dilation_h, -1), S(dilation_h, 4), S(dilation_w, -1), S(dilation_w, INT_MAX), S(groups, -1),
        S(groups, 3), S(groups, INT_MAX)
    };
#undef S
    amp_conv2d_shape s = conv_shape();
    int i, oh = -7, ow = -7;
    prepare();
    CHECK(amp_conv2d_forward(&s, amp_f32(F), amp_f32(F + 100), AMP_NONE, amp_f32(F + 200), &quiet) == AMP_OK);
    for (i = 0; i < COUNT(list); i++) {
        s = conv_shape();
        put(&s, &list[i]);
        REFUSED(ANY, list[i].name, amp_conv2d_output(&s, &oh, &ow, &quiet));
        REFUSED(ANY, list[i].name, amp_conv2d_forward(&s, amp_f32(F), amp_f32(F + 100), AMP_NONE,
            amp_f32(F + 200), &quiet));
        REFUSED(ANY, list[i].name, amp_conv2d_backward(&s, amp_f32(F), amp_f32(F), amp_f32(F),
            amp_f32(F + 100), amp_f32(F + 200), amp_f32(F + 300), 0, &quiet));
        CHECK(amp_conv2d_workspace(&s) == 0 && oh == -7 && ow == -7);
    }
}

static void pool_shape_fields(void) {
#define S(field, v) INT(amp_pool2d_shape, field, v)
    static const bad list[] = {
        S(kind, -1), S(kind, 3), S(n, 0), S(n, INT_MIN), S(channels, 0), S(channels, -1), S(height, 0), S(height, -1),
        S(height, INT_MAX), S(width, 0), S(width, INT_MIN), S(width, INT_MAX), S(kernel_h, 0), S(kernel_h, -1),
        S(kernel_h, 7), S(kernel_w, 0), S(kernel_w, INT_MAX), S(stride_h, -1), S(stride_w, INT_MIN), S(pad_h, -1),
        S(pad_h, 2), S(pad_w, -1), S(pad_w, INT_MAX)
    };
#undef S
    static const amp_pool2d_shape good = { AMP_POOL_AVERAGE, 1, 2, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0, 0 };
    amp_pool2d_shape s = good;
    int i, oh = -7, ow = -7;
    prepare();
    CHECK(amp_pool2d_forward(&s, amp_f32(F), amp_f32(F + 100), &quiet) == AMP_OK);
    for (i = 0; i < COUNT(list); i++) {
        s = good;
        put(&s, &list[i]);
        REFUSED(ANY, list[i].name, amp_pool2d_output(&s, &oh, &ow, &quiet));
        REFUSED(ANY, list[i].name, amp_pool2d_forward(&s, amp_f32(F), amp_f32(F + 100), &quiet));
        REFUSED(ANY, list[i].name, amp_pool2d_backward(&s, amp_f32(F), amp_f32(F),
            amp_f32(F + 100), 0, &quiet));
        CHECK(oh == -7 && ow == -7);
    }
    s = good;                                                /* a kernel that is nearly all padding takes no time */
    s.width = 1000; s.kernel_w = INT_MAX - 1000; s.pad_w = s.kernel_w / 2; s.stride_w = INT_MAX;
    for (i = 0; i < 2; i++) {
        s.kind = i ? AMP_POOL_MAX : AMP_POOL_AVERAGE;
        prepare();
        F[7700] = 1.0f;                                      /* dy; x is all the same */
        CHECK(amp_pool2d_output(&s, &oh, &ow, &quiet) == AMP_OK && oh == 2 && ow == 1);
        s.channels = 1; s.height = s.kernel_h = 5; s.pad_h = 0;
        CHECK(amp_pool2d_forward(&s, amp_ref_of(F, AMP_F16), amp_f32(F + 7800), &quiet) == AMP_OK && (i == 0 || F[7800] > 1.0f));
        CHECK(amp_pool2d_backward(&s, amp_f32(F + 7700), amp_ref_of(F, AMP_F16), amp_f32(F + 2600), 0, &quiet) == AMP_OK);
        CHECK(i ? F[2600] == 1.0f && F[2601] == 0.0f : F[2600] == F[7599] && F[2600] > 0.0f && F[2600] < 1e-9f);
        s.channels = 2; s.height = 4; s.kernel_h = 3; s.pad_h = 1; oh = ow = -7;
    }
    s = good;                                                /* one window, however large the stride */
    s.n = s.channels = s.height = s.kernel_h = 1; s.width = 5; s.kernel_w = 3; s.stride_h = s.stride_w = INT_MAX;
    s.pad_h = s.pad_w = 0;
    for (i = 0; i < 2; i++) {
        s.kind = i ? AMP_POOL_MAX : AMP_POOL_AVERAGE;
        prepare();
        F[0] = 1.0f; F[1] = 2.0f; F[2] = 6.0f; F[20] = 3.0f;
        CHECK(amp_pool2d_forward(&s, amp_f32(F), amp_f32(F + 10), &quiet) == AMP_OK && F[10] == (i ? 6.0f : 3.0f));
        CHECK(amp_pool2d_backward(&s, amp_f32(F + 20), amp_f32(F), amp_f32(F + 30), 0, &quiet) == AMP_OK);
        CHECK(F[30] == (i ? 0.0f : 1.0f) && F[32] == (i ? 3.0f : 1.0f) && F[33] == 0.0f && F[34] == 0.0f);
    }
    s = good;                                                /* an output side of 2^31 */
    s.kernel_w = 2; s.stride_w = 1; s.height = 1; s.kernel_h = s.stride_h = 1; s.pad_h = 0; s.width = INT_MAX;
    /* 2^33 inputs are more than a memory of 32 bits holds, which is found first */
    REFUSED(sizeof(size_t) > 4 ? AMP_ERR_SHAPE : AMP_ERR_ARGUMENT, "pool2d: 2^31 outputs", amp_pool2d_output(&s, &oh, &ow, &quiet));
    s.n = s.channels = INT_MAX;
    REFUSED(ANY, "pool2d: 2^93 inputs", amp_pool2d_output(&s, &oh, &ow, &quiet));
}

static amp_result batch_norm(const amp_batch_norm_shape* s, int training) {
    return amp_batch_norm_forward(s, training, amp_f32(F), amp_f32(F + 50), amp_f32(F + 60),
        F + 70, F + 80, F + 90, F + 100, amp_f32(F + 200), &quiet);
}
static void batch_norm_fields(void) {
#define S(field, v) INT(amp_batch_norm_shape, field, v)
    static const bad list[] = {
        S(n, 0), S(n, -1), S(channels, 0), S(channels, INT_MIN), S(spatial, 0), S(spatial, -1),
        FLT(amp_batch_norm_shape, eps, -1e-5), FLT(amp_batch_norm_shape, momentum, -0.5),
        FLT(amp_batch_norm_shape, momentum, 1.5), { "eps = nan", offsetof(amp_batch_norm_shape, eps), 'n', 0 },
        NOT(amp_batch_norm_shape, momentum)
    };
#undef S
    static const amp_batch_norm_shape good = { 2, 2, 4, 0.0f, 0.0f, 0, NULL };
    amp_batch_norm_shape s = good;
    int i;
    prepare();
    CHECK(batch_norm(&s, 1) == AMP_OK);
    for (i = 0; i < COUNT(list); i++) {
        s = good;
        put(&s, &list[i]);
        REFUSED(ANY, list[i].name, batch_norm(&s, 1));
        REFUSED(ANY, list[i].name, batch_norm(&s, 0));
        REFUSED(ANY, list[i].name, amp_batch_norm_backward(&s, amp_f32(F), amp_f32(F), amp_f32(F),
            F, F, amp_f32(F + 100), amp_f32(F + 200), amp_f32(F + 300), 0, &quiet));
    }
    s = good;
    s.n = s.spatial = 1;
    REFUSED(AMP_ERR_SHAPE, "batch norm of one value", batch_norm(&s, 1));
    s.n = s.channels = s.spatial = INT_MAX;
    REFUSED(AMP_ERR_ARGUMENT, "batch norm of 2^93 values", batch_norm(&s, 1));
}

static void policy_fields(void) {
#define P(field, v) INT(amp_policy_desc, field, v)
    static const bad list[] = {
        P(level, -1), P(level, 4), P(low_dtype, 1), P(low_dtype, 4), P(low_dtype, -1), P(style, 5), P(style, -1), P(style, 4),
        P(white_count, -1), P(white_count, 1), P(black_count, INT_MIN), P(black_count, 1), P(keep_batchnorm_fp32, 2),
        P(keep_batchnorm_fp32, -2), P(master_weights, 2), P(master_weights, INT_MIN)
    };
#undef P
    int i;
    for (i = 0; i < COUNT(list); i++) {
        amp_policy_desc d;
        memset(&d, 0, sizeof d);
        d.level = AMP_O2;
        d.logger = &LISTENER;
        put(&d, &list[i]);
        REFUSED(AMP_ERR_POLICY, list[i].name, amp_policy_init((amp_policy*)(void*)memory, &d));
        if (list[i].offset != offsetof(amp_policy_desc, style) || list[i].value == 4) continue;
        d.level = AMP_O1;                                    /* the level that has OneFlow's, too */
        REFUSED(AMP_ERR_POLICY, list[i].name, amp_policy_init((amp_policy*)(void*)memory, &d));
    }
}

static void scaler_fields(void) {
#define S(field, v) INT(amp_scaler_desc, field, v)
#define R(field, v) FLT(amp_scaler_desc, field, v)
#define D(field, v) DBL(amp_scaler_desc, field, v)
    static const bad list[] = {
        S(preset, -1), S(preset, AMP_SCALER_PRESET_COUNT), S(preset, AMP_SCALER_STATIC), R(init_scale, -1),
        NOT(amp_scaler_desc, init_scale), S(growth_interval, -2), S(growth_interval, INT_MIN), D(growth_factor, 1),
        D(growth_factor, 0.5), D(growth_factor, -2), D(growth_factor, 1e-45), NOT64(amp_scaler_desc, growth_factor),
#if !defined(__FAST_MATH__)         /* which reads subnormals as zero, the default */
        R(init_scale, 1e-45),
#endif
        D(backoff_factor, 1), D(backoff_factor, -0.5), NOT64(amp_scaler_desc, backoff_factor), R(min_scale, -2),
        R(min_scale, 1e30), NOT(amp_scaler_desc, min_scale), R(max_scale, 1), R(max_scale, -2), NOT(amp_scaler_desc, max_scale),
        S(hysteresis, -1), S(hysteresis, INT_MIN), S(at_min, 5), S(at_min, -1), S(at_min, AMP_LIMIT_CALLBACK),
        S(max_skips, -2), S(max_unsound, -2), S(ignore_overflow, 1)
    };
#undef D
#undef S
#undef R
    int i;
    for (i = 0; i < COUNT(list); i++) {
        amp_scaler_desc d;
        memset(&d, 0, sizeof d);
        d.logger = &LISTENER;
        put(&d, &list[i]);
        REFUSED(AMP_ERR_DESC, list[i].name, amp_scaler_init((amp_scaler*)(void*)memory, &d));
    }
}

static amp_param param(void) {
    amp_param p;
    memset(&p, 0, sizeof p);
    p.master = F + 4000; p.grad = F + 4100; p.m = F + 4200; p.v = F + 4300; p.count = 10;
    return p;
}
static void optimizer_fields(void) {
#define O(field, v) INT(amp_optimizer_desc, field, v)
#define R(field, v) FLT(amp_optimizer_desc, field, v)
    static const bad list[] = {
        O(kind, 5), O(kind, -1), R(lr, -0.1), NOT(amp_optimizer_desc, lr), R(momentum, 1), R(momentum, -0.1),
        NOT(amp_optimizer_desc, momentum), R(dampening, 1.1), R(dampening, -0.1), NOT(amp_optimizer_desc, dampening),
        O(nesterov, 1), R(beta1, 1), R(beta1, -0.1), NOT(amp_optimizer_desc, beta1), R(beta2, 1), R(beta2, -0.1),
        NOT(amp_optimizer_desc, beta2), R(eps, -1), NOT(amp_optimizer_desc, eps), R(weight_decay, -0.1),
        NOT(amp_optimizer_desc, weight_decay), R(clip_norm, -1), NOT(amp_optimizer_desc, clip_norm), O(schedule.kind, 4),
        O(schedule.kind, -1), O(schedule.kind, AMP_SCHEDULE_STEP), O(schedule.kind, AMP_SCHEDULE_LINEAR),
        O(schedule.kind, AMP_SCHEDULE_COSINE), I64(amp_optimizer_desc, schedule.warmup_steps, -1), R(schedule.gamma, 1.5),
        R(schedule.gamma, -0.1), NOT(amp_optimizer_desc, schedule.gamma), R(schedule.floor, 1.5), R(schedule.floor, -0.1),
        NOT(amp_optimizer_desc, schedule.floor), O(group_count, -1), O(group_count, 1), O(group_count, AMP_MAX_GROUPS + 1)
    };
    static const bad params[] = {
        INT(amp_param, group, -1), INT(amp_param, group, 1), INT(amp_param, grad_dtype, AMP_F64), INT(amp_param, grad_dtype, -1)
    };
    static const bad groups[] = {
        FLT(amp_param_group, lr, -0.5), NOT(amp_param_group, lr), FLT(amp_param_group, weight_decay, -0.5),
        NOT(amp_param_group, weight_decay)
    };
#undef O
#undef R
    amp_optimizer* o = (amp_optimizer*)(void*)memory;
    amp_optimizer_desc d;
    amp_param_group g;
    int i;
    for (i = 0; i < COUNT(list) + COUNT(params) + COUNT(groups); i++) {
        const bad* b = i < COUNT(list) ? &list[i] : i < COUNT(list) + COUNT(params) ? &params[i - COUNT(list)]
                                                  : &groups[i - COUNT(list) - COUNT(params)];
        amp_param p = param();
        memset(&d, 0, sizeof d);
        memset(&g, 0, sizeof g);
        d.logger = &LISTENER;
        if (i >= COUNT(list) + COUNT(params)) { d.groups = &g; d.group_count = 1; put(&g, b); }
        else put(i < COUNT(list) ? (void*)&d : (void*)&p, b);
        REFUSED(ANY, b->name, amp_optimizer_init(o, &d, &p, 1));
        if (i < COUNT(list)) CHECK_MSG(amp_optimizer_moments(&d) == -1, "%s", b->name);
    }
}

static amp_result no_reduce(void* data, amp_dtype t, size_t n, void* stream, void* user_data) {
    (void)data; (void)t; (void)n; (void)stream; (void)user_data;
    return AMP_OK;
}

/* Create, a graph of one input, one layer and one loss, and finalize: which of them refuses is open. */
static amp_result whole_model(const amp_model_desc* d) {
    amp_model* m = (amp_model*)&refusals;
    amp_result r = amp_model_create(&m, d);
    amp_value x;
    if (r != AMP_OK) {
        CHECK(m == NULL);
        return r;
    }
    x = amp_linear(m, amp_input(m, 3, 1, 1), 2);
    amp_mse(m, x);
    r = amp_model_finalize(m);
    CHECK(r == AMP_OK || strcmp(amp_model_error(m), heard) == 0);
    amp_model_destroy(m);
    return r;
}
static void model_fields(void) {
#define M(field, v) INT(amp_model_desc, field, v)
    static const bad list[] = {
        M(batch, 0), M(batch, -1), M(batch, INT_MIN), M(grad_dtype, AMP_F64), M(grad_dtype, -1), M(accumulate, -1),
        M(accumulate, INT_MIN), M(max_replays, -1), M(precision.level, 4), M(precision.level, -1), M(precision.low_dtype, 1),
        M(precision.style, 7), M(precision.white_count, 1), M(optimizer.kind, 9), M(optimizer.kind, -1),
        FLT(amp_model_desc, optimizer.lr, -3), NOT(amp_model_desc, optimizer.momentum), M(optimizer.group_count, 1),
        M(optimizer.group_count, -1), M(optimizer.group_count, 1000)
    };
#undef M
    static amp_comm comms[] = { { NULL, 0, 1, NULL, NULL, NULL, 0 }, { no_reduce, -1, 1, NULL, NULL, NULL, 0 },
        { no_reduce, 1, 1, NULL, NULL, NULL, 0 }, { no_reduce, 0, 0, NULL, NULL, NULL, 0 } };
    amp_scaler_desc scaler;
    amp_policy policy;
    amp_logger unused = { NULL, NULL };
    amp_model_desc d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    int i;
    prepare();
    CHECK(whole_model(&d) == AMP_OK);
    for (i = 0; i < COUNT(list); i++) {
        d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
        d.precision.logger = d.optimizer.logger = &unused;     /* the model's logger hears it all the same */
        put(&d, &list[i]);
        REFUSED(ANY, list[i].name, whole_model(&d));
    }
    for (i = 0; i < COUNT(comms); i++) {
        d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
        d.comm = &comms[i];
        REFUSED(AMP_ERR_DESC, "comm", whole_model(&d));
    }
    d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    d.allocator.alloc = failing_alloc;
    REFUSED(AMP_ERR_DESC, "half an allocator", whole_model(&d));
    d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    d.accumulate = d.max_replays = 2;
    REFUSED(AMP_ERR_DESC, "replays of micro-batches", whole_model(&d));
    d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    memset(&scaler, 0, sizeof scaler);
    scaler.hysteresis = -1;
    scaler.logger = &unused;
    d.scaler = &scaler;
    REFUSED(AMP_ERR_DESC, "the scaler's desc", whole_model(&d));
    d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    memset(&policy, 0, sizeof policy);
    d.policy = &policy;
    REFUSED(AMP_ERR_POLICY, "a policy of zeros", whole_model(&d));
    REFUSED(AMP_ERR_ARGUMENT, "nowhere to put a model", amp_model_create(NULL, &d));
    { amp_model* m = (amp_model*)&d;
      CHECK(amp_model_create(&m, NULL) == AMP_ERR_ARGUMENT && m == NULL); }
}

/* A graph with one wrong layer: building goes on, finalize reports. */
enum { CONV, LINEAR, POOL, NORM, LOSS };
static amp_result with_layer(int layer, const bad* b) {
    union { amp_conv2d_desc conv; amp_linear_desc linear; amp_pool2d_desc pool; amp_norm_desc norm; amp_loss_desc loss; } u;
    amp_model_desc d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_model* m;
    amp_value x, y;
    amp_result r = amp_model_create(&m, &d);
    if (r != AMP_OK) return r;
    memset(&u, 0, sizeof u);
    x = amp_input(m, 2, 6, 6);
    if (layer == CONV) { u.conv.out_channels = 2; u.conv.kernel = 3; }
    if (layer == LINEAR) u.linear.out_features = 2;
    if (layer == POOL) u.pool.kernel = 2;
    if (b) put(&u, b);
    if (layer == CONV) x = amp_conv2d_with(m, x, &u.conv);
    if (layer == LINEAR) x = amp_linear_with(m, x, &u.linear);
    if (layer == POOL) x = amp_pool2d_with(m, x, &u.pool);
    if (layer == NORM) x = amp_batch_norm_with(m, x, &u.norm);
    y = amp_linear(m, amp_relu(m, x), 2);
    if (layer == LOSS) amp_softmax_cross_entropy_with(m, y, &u.loss);
    r = amp_model_finalize(m);
    amp_model_destroy(m);
    return r;
}
static void layer_fields(void) {
    static const struct { int layer; bad b; } list[] = {
#define C(field, v) { CONV, INT(amp_conv2d_desc, field, v) }
        C(out_channels, 0), C(out_channels, -1), C(out_channels, INT_MAX), C(kernel, 0), C(kernel, -1), C(kernel, INT_MAX),
        C(kernel_h, -1), C(kernel_w, 7), C(stride, -1), C(stride_h, INT_MIN), C(pad, -1), C(pad, INT_MAX),
        C(pad_w, -1), C(dilation, -1), C(dilation, INT_MAX), C(dilation_w, -2), C(groups, -1), C(groups, 3), C(init, 5), C(init, -1),
        C(output_pad, 1), C(output_pad_h, -1),
#undef C
#define C(field, v) { LINEAR, INT(amp_linear_desc, field, v) }
        C(out_features, 0), C(out_features, -1), C(out_features, INT_MIN), C(init, 5), C(init, -1),
#undef C
#define C(field, v) { POOL, INT(amp_pool2d_desc, field, v) }
        C(kind, 3), C(kind, -1), C(kernel, 0), C(kernel, -1), C(kernel, INT_MAX), C(kernel_h, 7), C(kernel_w, -1), C(stride, -1),
        C(stride_w, INT_MIN), C(pad, -1), C(pad, 2), C(pad_h, INT_MAX),
#undef C
        { NORM, FLT(amp_norm_desc, eps, -1) }, { NORM, FLT(amp_norm_desc, eps, 2) }, { NORM, FLT(amp_norm_desc, momentum, 1.5) },
        { NORM, FLT(amp_norm_desc, momentum, -0.5) }, { LOSS, FLT(amp_loss_desc, weight, -1) },
        { LINEAR, FLT(amp_linear_desc, sd, 0.5) }, { LOSS, INT(amp_loss_desc, classes, 3) }, { LOSS, INT(amp_loss_desc, classes, INT_MIN) },
        { LOSS, FLT(amp_loss_desc, smoothing, 1) }, { LOSS, FLT(amp_loss_desc, smoothing, -0.1) },
        { LOSS, { "weight = inf", offsetof(amp_loss_desc, weight), 'p', 0 } },
        { LOSS, { "smoothing = nan", offsetof(amp_loss_desc, smoothing), 'n', 0 } }
    };
    int i;
    for (i = 0; i < 5; i++) { prepare(); CHECK_MSG(with_layer(i, NULL) == AMP_OK, "%s", heard); }
    for (i = 0; i < COUNT(list); i++) REFUSED(ANY, list[i].b.name, with_layer(list[i].layer, &list[i].b));
}

/* Numbers that no operator can take, also where the compiler has been told that there are none. */
static void operator_numbers(void) {
    static const uint32_t bits[] = { 0x7fc00000u, 0xffc00000u, 0x7f800000u, 0xff800000u };
    static const char* const names[] = { "nan", "-nan", "inf", "-inf" };
    static const int32_t labels[2] = { 0, 1 };
    int i;
    for (i = 0; i < COUNT(bits); i++) {
        amp_cross_entropy_desc smooth = { 0, 0, NULL, NULL, 0 };
        float v;
        memcpy(&v, &bits[i], sizeof v);
        smooth.smoothing = v;
        REFUSED(AMP_ERR_DESC, names[i], amp_dropout_forward(amp_f32(F), amp_f32(F + 50), 4, v, 1,
            0, &quiet));
        REFUSED(AMP_ERR_DESC, names[i], amp_leaky_relu_forward(amp_f32(F), amp_f32(F + 50), 4, v,
            &quiet));
        REFUSED(AMP_ERR_DESC, names[i], amp_leaky_relu_backward(amp_f32(F), amp_f32(F),
            amp_f32(F + 50), 0, 4, v, &quiet));
        REFUSED(AMP_ERR_DESC, names[i], amp_layer_norm_forward(amp_f32(F), AMP_NONE, AMP_NONE, v,
            NULL, NULL, amp_f32(F + 50), 2, 2, &quiet));
        REFUSED(AMP_ERR_DESC, names[i], amp_rms_norm_forward(amp_f32(F), AMP_NONE, v, NULL, amp_f32(F + 50), 2, 2, &quiet));
        REFUSED(AMP_ERR_DESC, names[i], amp_softmax_cross_entropy_forward(amp_f32(F), labels, &smooth,
            F + 50, 2, 2, &quiet));
        REFUSED(AMP_ERR_DESC, names[i], amp_softmax_cross_entropy_backward(amp_f32(F), labels, &smooth,
            NULL, 1, amp_f32(F + 50), 2, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, names[i], amp_softmax_cross_entropy_backward(amp_f32(F), labels,
            NULL, NULL, v, amp_f32(F + 50), 2, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, names[i], amp_mse_backward(amp_f32(F), amp_f32(F), NULL, v,
            amp_f32(F + 50), 4, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, names[i], amp_bce_with_logits_backward(amp_f32(F), amp_f32(F),
            NULL, v, AMP_NONE, 4, &quiet));
    }
}

/* --- NULL, sizes, overlaps --------------------------------------------------------------------------- */

static const amp_group_norm_shape groups_of_2 = { 2, 4, 3, 2, 0.0f };
static void null_operands(void) {
    amp_conv2d_shape c = conv_shape();
    amp_pool2d_shape p = { AMP_POOL_MAX, 1, 2, 4, 4, 2, 2, 0, 0, 0, 0, 0, 0, 0 };
    amp_batch_norm_shape b = { 2, 2, 4, 0.0f, 0.0f, 0, NULL };
    float *x = F, *y = F + 500, *z = F + 1000;
    int32_t labels[2] = { 0, 1 };
    int k;
#define N(i, pointer) (k == (i) ? NULL : (pointer))
#define T AMP_F32
    for (k = 0; k < 3; k++) {
        REFUSED(AMP_ERR_ARGUMENT, "gemm", amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, 2, 2, 2),
            1, amp_ref_of(N(0, x), T), amp_ref_of(N(1, y), T), 0, amp_ref_of(N(2, z), T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "gemm shape", amp_gemm(NULL, 1, amp_ref_of(x, T),
            amp_ref_of(y, T), 0, amp_ref_of(z, T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "gemm batched", amp_gemm(PRODUCTS(AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, 2, 2, 2, 3, 4, 4, 4),
            1, amp_ref_of(N(0, x), T), amp_ref_of(N(1, y), T), 0, amp_ref_of(N(2, z), T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "linear", amp_linear_forward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), AMP_NONE, amp_ref_of(N(2, z), T), 2, 2, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "linear backward", amp_linear_backward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, x), T), amp_ref_of(N(2, y), T), amp_ref_of(z, T),
            amp_ref_of(z + 50, T), amp_ref_of(z + 100, T), 0, 2, 2, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "conv2d", amp_conv2d_forward(&c, amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), AMP_NONE, amp_ref_of(N(2, z), T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "conv2d backward", amp_conv2d_backward(&c,
            amp_ref_of(N(0, x), T), amp_ref_of(N(1, x), T), amp_ref_of(N(2, y), T),
            amp_ref_of(z, T), amp_ref_of(z + 100, T), amp_ref_of(z + 200, T), 0, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "transposed", amp_conv_transpose2d_forward(&c,
            amp_ref_of(N(0, x), T), amp_ref_of(N(1, y), T), AMP_NONE, amp_ref_of(N(2, z), T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "transposed backward", amp_conv_transpose2d_backward(&c,
            amp_ref_of(N(0, x), T), amp_ref_of(N(1, x), T), amp_ref_of(N(2, y), T),
            amp_ref_of(z, T), amp_ref_of(z + 100, T), amp_ref_of(z + 200, T), 0, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "add", amp_add_forward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), amp_ref_of(N(2, z), T), 5, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "mul", amp_mul_forward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), amp_ref_of(N(2, z), T), 6, 3, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "mul backward", amp_mul_backward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), amp_ref_of(N(2, y), T), amp_ref_of(z, T), amp_ref_of(z + 50, T),
            0, 6, 3, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "cross-entropy", amp_softmax_cross_entropy_forward(amp_ref_of(N(0, x), T),
            N(1, labels), NULL, N(2, z), 2, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "mse", amp_mse_forward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), N(2, z), 5, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "bce", amp_bce_with_logits_forward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), N(2, z), 5, &quiet));
    }
    for (k = 0; k < 2; k++) {
        REFUSED(AMP_ERR_ARGUMENT, "pool2d", amp_pool2d_forward(&p, amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, z), T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "pool2d backward", amp_pool2d_backward(&p,
            amp_ref_of(N(0, x), T), amp_ref_of(N(1, y), T), amp_ref_of(z, T), 0, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "layer norm", amp_layer_norm_forward(amp_ref_of(N(0, x), T),
            AMP_NONE, AMP_NONE, 0, NULL, NULL, amp_ref_of(N(1, z), T), 2, 4, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "layer norm backward", amp_layer_norm_backward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, x), T), AMP_NONE, 0.0f, y, y, amp_ref_of(z, T),
            amp_ref_of(z + 8, T), amp_ref_of(z + 12, T), 0, 2, 4, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "group norm", amp_group_norm_forward(&groups_of_2, amp_ref_of(N(0, x), T), AMP_NONE,
            AMP_NONE, NULL, NULL, amp_ref_of(N(1, z), T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "group norm backward", amp_group_norm_backward(&groups_of_2, amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, x), T), AMP_NONE, y, y, amp_ref_of(z, T), AMP_NONE, AMP_NONE, 0, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "rms norm", amp_rms_norm_forward(amp_ref_of(N(0, x), T), AMP_NONE, 0, NULL,
            amp_ref_of(N(1, z), T), 2, 4, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "rms norm backward", amp_rms_norm_backward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, x), T), AMP_NONE, 0.0f, y, amp_ref_of(z, T), amp_ref_of(z + 8, T), 0, 2, 4, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "activation", amp_activation_forward(AMP_GELU,
            amp_ref_of(N(0, x), T), amp_ref_of(N(1, z), T), 5, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "activation backward", amp_activation_backward(AMP_GELU,
            amp_ref_of(N(0, x), T), amp_ref_of(N(1, y), T), amp_ref_of(z, T), 0, 5, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "leaky relu", amp_leaky_relu_forward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, z), T), 5, 0.1f, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "leaky relu backward", amp_leaky_relu_backward(
            amp_ref_of(N(0, x), T), amp_ref_of(N(1, y), T), amp_ref_of(z, T), 0, 5, 0.1f, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "softmax", amp_softmax_forward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, z), T), 2, 4, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "softmax backward", amp_softmax_backward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), amp_ref_of(z, T), 0, 2, 4, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "dropout", amp_dropout_forward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, z), T), 5, 0.5f, 1, 0, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "concat", amp_concat_forward(amp_ref_of(N(0, x), T), 2,
            amp_ref_of(N(1, z), T), 4, 1, 3, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "concat backward", amp_concat_backward(amp_ref_of(N(0, x), T),
            4, 1, amp_ref_of(N(1, z), T), 2, 3, 0, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "cross-entropy backward", amp_softmax_cross_entropy_backward(amp_ref_of(N(0, x), T),
            N(1, labels), NULL, NULL, 1, amp_ref_of(z, T), 2, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "mse backward", amp_mse_backward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), NULL, 1, amp_ref_of(z, T), 5, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "bce backward", amp_bce_with_logits_backward(amp_ref_of(N(0, x), T),
            amp_ref_of(N(1, y), T), NULL, 1, amp_ref_of(z, T), 5, &quiet));
    }
    for (k = 0; k < 4; k++) {
        REFUSED(AMP_ERR_ARGUMENT, "batch norm", amp_batch_norm_forward(&b, 1,
            amp_ref_of(N(0, x), T), AMP_NONE, AMP_NONE, y, y + 2, N(1, y + 4), N(2, y + 6),
            amp_ref_of(N(3, z), T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "batch norm backward", amp_batch_norm_backward(&b,
            amp_ref_of(N(0, x), T), amp_ref_of(N(1, x), T), AMP_NONE, N(2, y), N(3, y),
            amp_ref_of(z, T), amp_ref_of(z + 16, T), amp_ref_of(z + 18, T), 0, &quiet));
    }
    k = 0;
    REFUSED(AMP_ERR_ARGUMENT, "no shape", amp_conv2d_output(NULL, NULL, NULL, &quiet));
    REFUSED(AMP_ERR_ARGUMENT, "no shape", amp_pool2d_output(NULL, NULL, NULL, &quiet));
    REFUSED(AMP_ERR_ARGUMENT, "no shape", amp_pool2d_backward(NULL, amp_ref_of(x, T),
        amp_ref_of(x, T), amp_ref_of(z, T), 0, &quiet));
    REFUSED(AMP_ERR_ARGUMENT, "no shape", batch_norm(NULL, 1));
}

/* Functions that have no logger, or get their object as NULL: a code, and no crash. */
static void null_objects(void) {
    amp_value none = { 0 };
    amp_op op;
    amp_policy policy;
    int n = 7;
    CHECK(amp_convert(AMP_NONE, amp_f32(F), 1) == AMP_ERR_ARGUMENT && amp_convert(amp_f32(F),
        AMP_NONE, 1) == AMP_ERR_ARGUMENT);
    CHECK(amp_convert(AMP_NONE, AMP_NONE, 0) == AMP_OK);
    CHECK(amp_policy_init(NULL, NULL) == AMP_ERR_ARGUMENT && amp_policy_init(&policy, NULL) == AMP_OK);
    CHECK(amp_policy_set_rule(NULL, AMP_OP_ADD, AMP_RULE_LOW) == AMP_ERR_ARGUMENT && amp_policy_white_list(NULL, NULL, 0) == 0);
    CHECK(amp_policy_black_list(&policy, NULL, -5) > 0 && !amp_op_from_name(NULL, &op) && !amp_op_from_name("relu2", NULL));
    CHECK(amp_scaler_init(NULL, NULL) == AMP_ERR_ARGUMENT && amp_scaler_update(NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_optimizer_init(NULL, NULL, NULL, 0) == AMP_ERR_ARGUMENT && amp_optimizer_step(NULL, NULL, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_optimizer_unscale(NULL, NULL) == AMP_ERR_ARGUMENT && amp_optimizer_set_lr(NULL, 1) == AMP_ERR_ARGUMENT);
    CHECK(amp_optimizer_zero_grad(NULL) == AMP_ERR_ARGUMENT && amp_schedule_lr(NULL, 0.5f, -1) == 0.5f);
    CHECK(amp_model_error(NULL)[0] != 0 && amp_input(NULL, 1, 1, 1).id == 0 && amp_relu(NULL, none).id == 0);
    CHECK(amp_conv2d_with(NULL, none, NULL).id == 0 && amp_linear(NULL, none, 1).id == 0 && amp_add(NULL, none, none).id == 0);
    CHECK(amp_mse(NULL, none).id == 0 && amp_global_avg_pool2d(NULL, none).id == 0 && amp_layer_norm(NULL, none).id == 0);
    amp_autocast_push(NULL, AMP_F32); amp_autocast_pop(NULL); amp_pin(NULL, none, AMP_F32);
    amp_name(NULL, none, NULL); amp_group(NULL, none, 0); amp_group_vectors(NULL, 0); amp_model_destroy(NULL);
    CHECK(amp_model_finalize(NULL) == AMP_ERR_ARGUMENT && amp_model_layer_count(NULL) == 0 && !amp_model_layer(NULL, 0));
    CHECK(amp_model_layer_of(NULL, none) == -1 && amp_model_memory(NULL, NULL) == AMP_ERR_ARGUMENT);
    CHECK(!amp_model_params(NULL, &n) && n == 0 && !amp_model_find_param(NULL, "a") && !amp_model_policy(NULL));
    CHECK(!amp_model_scaler(NULL) && !amp_model_optimizer(NULL) && amp_model_sync_params(NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_train_step(NULL, NULL, NULL) == AMP_ERR_ARGUMENT && amp_evaluate(NULL, NULL, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_predict(NULL, NULL, none, NULL) == AMP_ERR_ARGUMENT && amp_model_stats(NULL, NULL, NULL, 0) == AMP_ERR_ARGUMENT);
    CHECK(amp_checkpoint_save(NULL, "x") == AMP_ERR_ARGUMENT && amp_checkpoint_load(NULL, "x") == AMP_ERR_ARGUMENT);
    CHECK(amp_stats_collect(NULL, F, AMP_F32, 1, AMP_F16, 0) == AMP_ERR_ARGUMENT && amp_model_print(NULL, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_stats_print(NULL, NULL) == AMP_ERR_ARGUMENT && amp_conv2d_workspace(NULL) == 0);
    CHECK(amp_report_svg(NULL, NULL, NULL) == AMP_ERR_ARGUMENT && amp_report_print(NULL, NULL, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_history_svg(NULL, NULL, NULL) == AMP_ERR_ARGUMENT && amp_history_print(NULL, NULL) == AMP_ERR_ARGUMENT);
    amp_history_add(NULL, NULL);
}

/* A logger without a function is silence; no control character of a name reaches one that has one. */
static void loggers(void) {
    static const char name[] = "a\001\n\020\037\177z";
    const amp_logger nobody = { NULL, NULL };
    amp_scaler_desc d;
    amp_scaler s;
    amp_tensor t;
    amp_exec e;
    const char* p;
    memset(&d, 0, sizeof d);
    memset(&e, 0, sizeof e);
    memset(&t, 0, sizeof t);
    d.growth_factor = -1.0;
    d.logger = e.logger = &nobody;
    CHECK(amp_scaler_init(&s, &d) == AMP_ERR_DESC && amp_add_forward(AMP_NONE, amp_f32(F),
        amp_f32(F), 1, &e) == AMP_ERR_ARGUMENT);
    d.growth_factor = 0.0;
    d.logger = &LISTENER;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    t.name = name;
    t.count = 1;
    REFUSED(AMP_ERR_ARGUMENT, "a tensor with a name of control characters", amp_scaler_check(&s, &t, 1, NULL));
    CHECK(strchr(heard, 'z') != NULL);
    for (p = heard; *p; p++) CHECK((unsigned char)*p >= 0x20);
}

/* The last checks that have a logger to talk to. */
static void missing_parts(void) {
    amp_model_desc d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_scaler_desc fixed;
    amp_scaler s;
    amp_optimizer_desc od;
    amp_optimizer o;
    amp_param p;
    amp_batch batch;
    amp_schedule wild = { AMP_SCHEDULE_COSINE, INT64_MIN, INT64_MIN, INT64_MIN, 0.0f, 0.5f };
    amp_model* m = NULL;
    prepare();
    memset(&od, 0, sizeof od);
    memset(&batch, 0, sizeof batch);
    memset(&fixed, 0, sizeof fixed);
    od.logger = &LISTENER;
    p = param();
    CHECK(amp_optimizer_init(&o, &od, &p, 1) == AMP_OK && amp_model_create(&m, &d) == AMP_OK);
    REFUSED(AMP_ERR_ARGUMENT, "optimizer unscale", amp_optimizer_unscale(&o, NULL));
    REFUSED(AMP_ERR_STATE, "memory", amp_model_memory(m, (amp_memory*)(void*)memory));
    REFUSED(AMP_ERR_STATE, "print", amp_model_print(m, stdout));
    REFUSED(AMP_ERR_STATE, "train step", amp_train_step(m, &batch, NULL));
    REFUSED(AMP_ERR_STATE, "evaluate", amp_evaluate(m, &batch, (amp_eval_info*)(void*)memory));
    REFUSED(AMP_ERR_STATE, "stats", amp_model_stats(m, &batch, (amp_layer_stats*)(void*)memory, 9));
    REFUSED(AMP_ERR_STATE, "report", amp_report_svg(m, &batch, "/nowhere/x"));
    REFUSED(AMP_ERR_STATE, "save", amp_checkpoint_save(m, "/nowhere/x"));
    REFUSED(AMP_ERR_SHAPE, "finalize an empty model", amp_model_finalize(m));
    amp_mse(m, amp_linear(m, amp_input(m, 3, 1, 1), 2));
    CHECK(amp_model_finalize(m) == AMP_OK);
    REFUSED(AMP_ERR_ARGUMENT, "evaluate", amp_evaluate(m, &batch, NULL));
    REFUSED(AMP_ERR_ARGUMENT, "memory", amp_model_memory(m, NULL));
    REFUSED(AMP_ERR_ARGUMENT, "print", amp_model_print(m, NULL));
    REFUSED(AMP_ERR_ARGUMENT, "no samples", amp_train_step(m, &batch, NULL));
    batch.n = 5;
    REFUSED(AMP_ERR_ARGUMENT, "too many samples", amp_train_step(m, &batch, NULL));
    batch.n = 1;
    REFUSED(AMP_ERR_ARGUMENT, "no inputs", amp_train_step(m, &batch, NULL));
    batch.inputs[0] = F;
    REFUSED(AMP_ERR_ARGUMENT, "no targets", amp_train_step(m, &batch, NULL));
    batch.input_dtype = (amp_dtype)9;
    REFUSED(AMP_ERR_DTYPE, "no such type", amp_train_step(m, &batch, NULL));
    amp_model_destroy(m);
    CHECK(amp_schedule_lr(&wild, 1.0f, INT64_MIN) == 0.5f && amp_schedule_lr(&wild, 1.0f, INT64_MAX) == 0.5f);
    prepare();
    CHECK(amp_softmax_forward(amp_ref_of(F, T), amp_ref_of(F, T), SIZE_MAX / 2, 0, &quiet) == AMP_OK);     /* no elements, so no time */
    fixed.preset = AMP_SCALER_MINDSPORE_FIXED;
    fixed.ignore_overflow = 1;
    CHECK(amp_scaler_init(&s, &fixed) == AMP_OK && amp_scaler_report_overflow(&s) == AMP_OK && amp_scaler_may_step(&s) == 1);
}

static int big_endian(void) {
    const uint16_t one = 1;
    unsigned char first;
    memcpy(&first, &one, 1);
    return first == 0;
}

/* A saved scaler with numbers that no scaler has, and a checksum that fits them. */
static void damaged_scaler_states(void) {
    static const bad list[] = {
        { "scale nan", 64, 'n', 0 }, { "scale -inf", 64, 'm', 0 }, { "scale -1", 64, 'f', -1 }, { "tracker", 68, 'i', -5 },
        { "hysteresis", 72, 'i', 9 }, { "hysteresis below 0", 72, 'i', -1 }, { "skips", 76, 'i', -1 },
        { "applied", 80, 'l', -1 }, { "skipped", 88, 'l', 9e18 }
    };
    int i;
    for (i = -1; i < COUNT(list); i++) {
        unsigned char p[AMP_SCALER_STATE_BYTES];
        uint32_t crc = 0xffffffffu, k, bit, size = i >= 0 && list[i].kind == 'l' ? 8 : 4;
        amp_scaler* s = (amp_scaler*)(void*)copy;
        CHECK(amp_scaler_init(s, NULL) == AMP_OK && amp_scaler_save(s, p, sizeof p) == AMP_OK);
        if (i >= 0) put(p, &list[i]);
        for (k = 0; i >= 0 && k < size / 2 && big_endian(); k++) {                         /* as a scaler is saved */
            unsigned char first = p[list[i].offset + k];
            p[list[i].offset + k] = p[list[i].offset + size - 1 - k];
            p[list[i].offset + size - 1 - k] = first;
        }
        for (k = 0; k < 124; k++)
            for (crc ^= p[k], bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
        for (k = 0; k < 4; k++) p[124 + k] = (unsigned char)(~crc >> (8 * k));
        if (i < 0) { CHECK(amp_scaler_load(s, p, sizeof p) == AMP_OK); continue; }
        prepare();
        s = (amp_scaler*)(void*)memory;
        CHECK(amp_scaler_init(s, NULL) == AMP_OK);
        s->logger = LISTENER;
        memcpy(copy, memory, sizeof copy);
        CHECK_MSG(amp_scaler_load(s, p, sizeof p) == AMP_ERR_FORMAT && refusals == 1, "%s", list[i].name);
        CHECK_MSG(memcmp(memory, copy, sizeof copy) == 0, "%s has changed something", list[i].name);
    }
}

/* Lists whose counts no memory holds: the scaler, the optimizer and the statistics refuse them before they read. */
static void huge_lists(void) {
    static const size_t sizes[] = { SIZE_MAX, SIZE_MAX / 2, SIZE_MAX / 4 + 1, SIZE_MAX / 8 + 1 };
    int i;
    for (i = 0; i < COUNT(sizes); i++) {
        amp_scaler s;
        amp_scaler_desc sd;
        amp_optimizer o;
        amp_optimizer_desc od;
        amp_stats stats;
        amp_tensor t;
        amp_param p;
        memset(&sd, 0, sizeof sd); memset(&od, 0, sizeof od); memset(&t, 0, sizeof t); memset(&p, 0, sizeof p);
        sd.logger = od.logger = &LISTENER;
        CHECK(amp_scaler_init(&s, &sd) == AMP_OK);
        amp_scaler_scale_loss(&s, 1.0f);
        t.data = F; t.count = sizes[i];
        REFUSED(AMP_ERR_ARGUMENT, "check", amp_scaler_check(&s, &t, 1, NULL));
        REFUSED(AMP_ERR_ARGUMENT, "unscale", amp_scaler_unscale(&s, &t, 1, NULL));
        REFUSED(AMP_ERR_ARGUMENT, "unscale into", amp_scaler_unscale_into(&s, &t, &t, 1, 0, NULL));
        p.master = F; p.grad = F; p.count = sizes[i];
        REFUSED(AMP_ERR_ARGUMENT, "optimizer", amp_optimizer_init(&o, &od, &p, 1));
        CHECK(amp_stats_collect(&stats, F, AMP_F32, sizes[i], AMP_F16, 0) == AMP_ERR_ARGUMENT);
    }
}

/* Products of sizes that do not fit a size_t, and those that fit, but no memory holds. */
static void huge_sizes(void) {
    static const size_t sizes[] = { SIZE_MAX, SIZE_MAX - 1, SIZE_MAX / 2, SIZE_MAX / 2 + 1, SIZE_MAX / 4 + 1, SIZE_MAX / 8 + 1 };
    const size_t half = (size_t)1 << (sizeof(size_t) * 4);
    int32_t label = 0;
    int i;
    for (i = 0; i < COUNT(sizes); i++) {
        size_t n = sizes[i];
        amp_convert_desc d;
        memset(&d, 0, sizeof d);
        d.logger = &LISTENER;
        REFUSED(AMP_ERR_ARGUMENT, "convert", amp_convert_with(amp_ref_of(F, AMP_F64), amp_f32(F),
            n, &d));
        REFUSED(AMP_ERR_ARGUMENT, "gemm m", amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, n, 2, 2, 2, 2, 2),
            1, amp_ref_of(F, T), amp_ref_of(F, T), 0, amp_ref_of(F, T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "gemm n", amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 2, n, 2, 2, n, n),
            1, amp_ref_of(F, T), amp_ref_of(F, T), 0, amp_ref_of(F, T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "gemm k", amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_TRANS, 2, 2, n, n, n, 2),
            1, amp_ref_of(F, T), amp_ref_of(F, T), 0, amp_ref_of(F, T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "gemm batch", amp_gemm(PRODUCTS(AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, 2, 2, 2, n, 4, 0, 4),
            1, amp_ref_of(F, T), amp_ref_of(F, T), 0, amp_ref_of(F, T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "gemm stride", amp_gemm(PRODUCTS(AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, 2, 2, 2, 2, n, 0, 4),
            1, amp_ref_of(F, T), amp_ref_of(F, T), 0, amp_ref_of(F, T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "gemm ld", amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, n, 2, 2),
            1, amp_ref_of(F, T), amp_ref_of(F, T), 0, amp_ref_of(F, T), &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "linear", amp_linear_forward(amp_ref_of(F, T), amp_ref_of(F, T),
            AMP_NONE, amp_ref_of(F, T), n, 2, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "layer norm", amp_layer_norm_forward(amp_ref_of(F, T), AMP_NONE,
            AMP_NONE, 0, NULL, NULL, amp_ref_of(F, T), n, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "activation", amp_activation_forward(AMP_RELU, amp_ref_of(F, T),
            amp_ref_of(F, T), n, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "softmax", amp_softmax_forward(amp_ref_of(F, T),
            amp_ref_of(F, T), 2, n, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "dropout", amp_dropout_forward(amp_ref_of(F, T),
            amp_ref_of(F, T), n, 0.5f, 0, 0, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "add", amp_add_forward(amp_ref_of(F, T), amp_ref_of(F, T),
            amp_ref_of(F, T), n, &quiet));
        REFUSED(ANY, "mul", amp_mul_forward(amp_ref_of(F, T), amp_ref_of(F, T), amp_ref_of(F, T),
            n, 1, &quiet));
        REFUSED(ANY, "mul", amp_mul_forward(amp_ref_of(F, T), amp_ref_of(F, T), amp_ref_of(F, T),
            3, n, &quiet));
        REFUSED(ANY, "concat", amp_concat_forward(amp_ref_of(F, T), 2, amp_ref_of(F, T), n, n - 1,
            2, &quiet));
        REFUSED(ANY, "cross-entropy", amp_softmax_cross_entropy_forward(amp_ref_of(F, T), &label,
            NULL, F, n, 2, &quiet));
        REFUSED(ANY, "cross-entropy", amp_softmax_cross_entropy_backward(amp_ref_of(F, T), &label,
            NULL, NULL, 1, amp_ref_of(F, T), n, 2, &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "mse", amp_mse_forward(amp_ref_of(F, T), amp_ref_of(F, T), F, n,
            &quiet));
        REFUSED(AMP_ERR_ARGUMENT, "bce", amp_bce_with_logits_backward(amp_ref_of(F, T),
            amp_ref_of(F, T), NULL, 1, amp_ref_of(F, T), n, &quiet));
    }
    REFUSED(AMP_ERR_ARGUMENT, "gemm of 2^64 elements", amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, half, half, 1, 1, half, half),
        1, amp_ref_of(F, T), amp_ref_of(F, T), 0, amp_ref_of(F, T), &quiet));
    REFUSED(AMP_ERR_ARGUMENT, "softmax of 2^64 elements", amp_softmax_forward(amp_ref_of(F, T),
        amp_ref_of(F, T), half, half, &quiet));
    CHECK(amp_gemm_workspace(half, half, half) == 0 && amp_gemm_workspace(SIZE_MAX, 1, 1) == 0);
    REFUSED(AMP_ERR_SHAPE, "mean of nothing", amp_mse_backward(amp_ref_of(F, T), amp_ref_of(F, T),
        NULL, 1, amp_ref_of(F, T), 0, &quiet));
}

static void overlaps(void) {
    amp_scaler s;
    amp_tensor t;
    amp_convert_desc d;
    memset(&d, 0, sizeof d);
    d.logger = &LISTENER;
    REFUSED(AMP_ERR_ARGUMENT, "convert onto itself, shifted", amp_convert_with(amp_f32(F + 1),
        amp_f32(F), 10, &d));
    REFUSED(AMP_ERR_ARGUMENT, "convert onto itself, shifted back", amp_convert_with(amp_ref_of(F, AMP_F16),
        amp_f32(F + 1), 10, &d));
    REFUSED(AMP_ERR_ARGUMENT, "convert onto its end", amp_convert_with(amp_ref_of(F + 9, AMP_F64),
        amp_f32(F), 10, &d));
    CHECK(amp_scaler_init(&s, NULL) == AMP_OK);
    s.logger = LISTENER;
    memset(&t, 0, sizeof t);
    t.data = F;
    t.count = 5;
    amp_scaler_scale_loss(&s, 1.0f);
    REFUSED(AMP_ERR_ARGUMENT, "unscale into itself", amp_scaler_unscale_into(&s, &t, &t, 1, 0, NULL));
}

/* Results over operands. Each call comes with all its operands apart, then with one of them where another one is, by
   its own beginning and by one element of both. */
typedef amp_result (*overlap_call)(void* const* p);
static amp_result call_linear(void* const* p) {
    return amp_linear_forward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        amp_ref_of(p[3], T), 3, 4, 5, &quiet);
}
static amp_result call_linear_backward(void* const* p) {
    return amp_linear_backward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        amp_ref_of(p[3], T), amp_ref_of(p[4], T), amp_ref_of(p[5], T), 0, 3, 4, 5, &quiet);
}
static amp_result call_conv(void* const* p) {
    const amp_conv2d_shape s = { 2, 3, 5, 5, 4, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };
    return amp_conv2d_forward(&s, amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        amp_ref_of(p[3], T), &quiet);
}
static amp_result call_conv_backward(void* const* p) {
    const amp_conv2d_shape s = { 2, 3, 5, 5, 4, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };
    return amp_conv2d_backward(&s, amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        amp_ref_of(p[3], T), amp_ref_of(p[4], T), amp_ref_of(p[5], T), 0, &quiet);
}
static amp_result call_transposed(void* const* p) {
    const amp_conv2d_shape s = { 1, 3, 3, 3, 4, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };
    return amp_conv_transpose2d_forward(&s, amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        amp_ref_of(p[3], T), &quiet);
}
static amp_result call_transposed_backward(void* const* p) {
    const amp_conv2d_shape s = { 1, 3, 3, 3, 4, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };
    return amp_conv_transpose2d_backward(&s, amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        amp_ref_of(p[3], T), amp_ref_of(p[4], T), amp_ref_of(p[5], T), 0, &quiet);
}
static amp_result call_pool(void* const* p) {
    const amp_pool2d_shape s = { AMP_POOL_MAX, 2, 3, 6, 6, 2, 2, 0, 0, 0, 0, 0, 0, 0 };
    return amp_pool2d_forward(&s, amp_ref_of(p[0], T), amp_ref_of(p[1], T), &quiet);
}
static amp_result call_pool_backward(void* const* p) {
    const amp_pool2d_shape s = { AMP_POOL_MAX, 2, 3, 6, 6, 2, 2, 0, 0, 0, 0, 0, 0, 0 };
    return amp_pool2d_backward(&s, amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        0, &quiet);
}
static const amp_batch_norm_shape norm_of_3 = { 2, 3, 4, 0.0f, 0.0f, 0, NULL };
static amp_result call_batch_norm(void* const* p) {
    return amp_batch_norm_forward(&norm_of_3, 1, amp_ref_of(p[0], T), amp_ref_of(p[1], T),
        amp_ref_of(p[2], T), (float*)p[3], (float*)p[4], (float*)p[5], (float*)p[6],
        amp_ref_of(p[7], T), &quiet);
}
static amp_result call_batch_norm_backward(void* const* p) {
    return amp_batch_norm_backward(&norm_of_3, amp_ref_of(p[0], T), amp_ref_of(p[1], T),
        amp_ref_of(p[2], T), (const float*)p[3], (const float*)p[4], amp_ref_of(p[5], T),
        amp_ref_of(p[6], T), amp_ref_of(p[7], T), 0, &quiet);
}
static amp_result call_layer_norm(void* const* p) {
    return amp_layer_norm_forward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        0.0f, (float*)p[3], (float*)p[4], amp_ref_of(p[5], T), 4, 6, &quiet);
}
static amp_result call_layer_norm_backward(void* const* p) {
    return amp_layer_norm_backward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        0.0f, (const float*)p[3], (const float*)p[4], amp_ref_of(p[5], T), amp_ref_of(p[6], T),
        amp_ref_of(p[7], T), 0, 4, 6, &quiet);
}
static amp_result call_group_norm(void* const* p) {
    return amp_group_norm_forward(&groups_of_2, amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T), (float*)p[3],
        (float*)p[4], amp_ref_of(p[5], T), &quiet);
}
static amp_result call_group_norm_backward(void* const* p) {
    return amp_group_norm_backward(&groups_of_2, amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        (const float*)p[3], (const float*)p[4], amp_ref_of(p[5], T), amp_ref_of(p[6], T), amp_ref_of(p[7], T), 0, &quiet);
}
static amp_result call_rms_norm(void* const* p) {
    return amp_rms_norm_forward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), 0.0f, (float*)p[2], amp_ref_of(p[3], T), 4, 6, &quiet);
}
static amp_result call_rms_norm_backward(void* const* p) {
    return amp_rms_norm_backward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T), 0.0f, (const float*)p[3],
        amp_ref_of(p[4], T), amp_ref_of(p[5], T), 0, 4, 6, &quiet);
}
static amp_result call_activation(void* const* p) { return amp_activation_forward(AMP_TANH,
    amp_ref_of(p[0], T), amp_ref_of(p[1], T), 9, &quiet); }
static amp_result call_activation_of_types(void* const* p) {
    return amp_activation_forward(AMP_TANH, amp_ref_of(p[0], T), amp_bf16(p[1]), 9, &quiet);
}
static amp_result call_activation_backward(void* const* p) {
    return amp_activation_backward(AMP_TANH, amp_ref_of(p[0], T), amp_ref_of(p[1], T),
        amp_ref_of(p[2], T), 0, 9, &quiet);
}
static amp_result call_leaky(void* const* p) {
    return amp_leaky_relu_forward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), 9, 3.0f, &quiet);
}
static amp_result call_leaky_backward(void* const* p) {
    return amp_leaky_relu_backward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        0, 9, 3.0f, &quiet);
}
static void twice(const float* dy, const float* x, float* y, size_t n, void* user_data) {
    (void)user_data;
    while (n-- > 0) y[n] = dy ? 2.0f * dy[n] : 2.0f * x[n];
}
static amp_result call_map(void* const* p) {
    return amp_map(twice, NULL, amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T), 9, &quiet);
}
static amp_result call_softmax(void* const* p) { return amp_softmax_forward(amp_ref_of(p[0], T),
    amp_ref_of(p[1], T), 3, 5, &quiet); }
static amp_result call_softmax_backward(void* const* p) {
    return amp_softmax_backward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T), 0,
        3, 5, &quiet);
}
static amp_result call_dropout(void* const* p) { return amp_dropout_forward(amp_ref_of(p[0], T),
    amp_ref_of(p[1], T), 9, 0.5f, 1, 0, &quiet); }
static amp_result call_add(void* const* p) { return amp_add_forward(amp_ref_of(p[0], T),
    amp_ref_of(p[1], T), amp_ref_of(p[2], T), 9, &quiet); }
static amp_result call_mul(void* const* p) { return amp_mul_forward(amp_ref_of(p[0], T),
    amp_ref_of(p[1], T), amp_ref_of(p[2], T), 9, 1, &quiet); }
static amp_result call_mul_runs(void* const* p) { return amp_mul_forward(amp_ref_of(p[0], T),
    amp_ref_of(p[1], T), amp_ref_of(p[2], T), 9, 3, &quiet); }
static amp_result call_mul_backward(void* const* p) {
    return amp_mul_backward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), amp_ref_of(p[2], T),
        amp_ref_of(p[3], T), amp_ref_of(p[4], T), 0, 9, 3, &quiet);
}
static amp_result call_concat(void* const* p) { return amp_concat_forward(amp_ref_of(p[0], T), 2,
    amp_ref_of(p[1], T), 5, 1, 3, &quiet); }
static amp_result call_concat_backward(void* const* p) {
    return amp_concat_backward(amp_ref_of(p[0], T), 5, 1, amp_ref_of(p[1], T), 2, 3, 0, &quiet);
}
static amp_result call_transpose(void* const* p) { return amp_transpose_forward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), 2, 3, 4, &quiet); }
static const int32_t three_tokens[3] = { 3, 0, 3 };
static amp_result call_embedding(void* const* p) { return amp_embedding_forward(three_tokens, amp_ref_of(p[0], T),
    amp_ref_of(p[1], T), 3, 4, 5, &quiet); }
static amp_result call_embedding_backward(void* const* p) {
    return amp_embedding_backward(amp_ref_of(p[0], T), three_tokens, amp_ref_of(p[1], T), 0, 3, 4, 5, &quiet);
}
static const int32_t two_labels[2] = { 0, 1 };
static amp_result call_cross_entropy(void* const* p) {
    return amp_softmax_cross_entropy_forward(amp_ref_of(p[0], T), two_labels, NULL, (float*)p[1],
        2, 3, &quiet);
}
static amp_result call_cross_entropy_backward(void* const* p) {
    return amp_softmax_cross_entropy_backward(amp_ref_of(p[0], T), two_labels, NULL, NULL, 1.0f,
        amp_ref_of(p[1], T), 2, 3, &quiet);
}
static amp_result call_mse(void* const* p) { return amp_mse_forward(amp_ref_of(p[0], T),
    amp_ref_of(p[1], T), (float*)p[2], 7, &quiet); }
static amp_result call_mse_backward(void* const* p) {
    return amp_mse_backward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), NULL, 1.0f,
        amp_ref_of(p[2], T), 7, &quiet);
}
/* Bytes of each operand up to a 0, which of them are results, and the pairs (operand, result) that may be the same. */
typedef struct overlap_case {
    const char* name;
    overlap_call call;
    int bytes[9];
    unsigned results;
    int same[5];
} overlap_case;
static const overlap_case overlap_cases[] = {
    { "linear", call_linear, { 48, 80, 20, 60 }, 8u, { -1 } },
    { "linear backward", call_linear_backward, { 60, 48, 80, 48, 80, 20 }, 0x38u, { -1 } },
    { "conv2d", call_conv, { 600, 432, 16, 288 }, 8u, { -1 } },
    { "conv2d backward", call_conv_backward, { 288, 600, 432, 600, 432, 16 }, 0x38u, { -1 } },
    { "transposed", call_transposed, { 108, 432, 16, 400 }, 8u, { -1 } },
    { "transposed backward", call_transposed_backward, { 400, 108, 432, 108, 432, 16 }, 0x38u, { -1 } },
    { "pool2d", call_pool, { 864, 216 }, 2u, { -1 } },
    { "pool2d backward", call_pool_backward, { 216, 864, 864 }, 4u, { -1 } },
    { "batch norm", call_batch_norm, { 96, 12, 12, 12, 12, 12, 12, 96 }, 0xf8u, { -1 } },
    { "batch norm backward", call_batch_norm_backward, { 96, 96, 12, 12, 12, 96, 12, 12 }, 0xe0u, { 0, 5, -1 } },
    { "layer norm", call_layer_norm, { 96, 24, 24, 16, 16, 96 }, 0x38u, { -1 } },
    { "layer norm backward", call_layer_norm_backward, { 96, 96, 24, 16, 16, 96, 24, 24 }, 0xe0u, { -1 } },
    { "group norm", call_group_norm, { 96, 16, 16, 16, 16, 96 }, 0x38u, { -1 } },
    { "group norm backward", call_group_norm_backward, { 96, 96, 16, 16, 16, 96, 16, 16 }, 0xe0u, { -1 } },
    { "rms norm", call_rms_norm, { 96, 24, 16, 96 }, 0xcu, { -1 } },
    { "rms norm backward", call_rms_norm_backward, { 96, 96, 24, 16, 96, 24 }, 0x30u, { -1 } },
    { "activation", call_activation, { 36, 36 }, 2u, { 0, 1, -1 } },
    { "activation, two types", call_activation_of_types, { 36, 18 }, 2u, { -1 } },
    { "activation backward", call_activation_backward, { 36, 36, 36 }, 4u, { 0, 2, -1 } },
    { "leaky relu", call_leaky, { 36, 36 }, 2u, { 0, 1, -1 } },
    { "leaky relu backward", call_leaky_backward, { 36, 36, 36 }, 4u, { 0, 2, -1 } },
    { "map", call_map, { 36, 36, 36 }, 4u, { 0, 2, 1, 2, -1 } },
    { "softmax", call_softmax, { 60, 60 }, 2u, { 0, 1, -1 } },
    { "softmax backward", call_softmax_backward, { 60, 60, 60 }, 4u, { -1 } },
    { "dropout", call_dropout, { 36, 36 }, 2u, { 0, 1, -1 } },
    { "add", call_add, { 36, 36, 36 }, 4u, { 0, 2, 1, 2, -1 } },
    { "mul", call_mul, { 36, 36, 36 }, 4u, { 0, 2, 1, 2, -1 } },
    { "mul of runs", call_mul_runs, { 36, 12, 36 }, 4u, { 0, 2, -1 } },
    { "mul backward", call_mul_backward, { 36, 36, 12, 36, 12 }, 0x18u, { -1 } },
    { "concat", call_concat, { 24, 60 }, 2u, { -1 } },
    { "concat backward", call_concat_backward, { 60, 24 }, 2u, { -1 } },
    { "transpose", call_transpose, { 96, 96 }, 2u, { -1 } },
    { "embedding", call_embedding, { 80, 60 }, 2u, { -1 } },
    { "embedding backward", call_embedding_backward, { 60, 80 }, 2u, { -1 } },
    { "cross-entropy", call_cross_entropy, { 24, 4 }, 2u, { -1 } },
    { "cross-entropy backward", call_cross_entropy_backward, { 24, 24 }, 2u, { -1 } },
    { "mse", call_mse, { 28, 28, 4 }, 4u, { -1 } },
    { "mse backward", call_mse_backward, { 28, 28, 28 }, 4u, { -1 } }
};

/* Operand i at byte `at` of the memory, the others two kilobytes apart. */
static void overlap_places(void* p[8], int i, size_t at) {
    int k;
    for (k = 0; k < 8; k++) p[k] = memory + 2048 * (k + 1);
    p[i] = memory + at;
}
static int may_be_same(const overlap_case* c, int i, int k) {
    int j;
    for (j = 0; j < 4 && c->same[j] >= 0; j += 2)
        if ((c->same[j] == i && c->same[j + 1] == k) || (c->same[j] == k && c->same[j + 1] == i)) return 1;
    return 0;
}
/* Operand i moves over operand k: just before it, over its first element, on it, over its last, just behind it. */
static void overlap_pair(const overlap_case* c, int i, int k) {
    const int a = c->bytes[i], b = c->bytes[k], unit = strstr(c->name, "two types") ? 2 : 4;
    const int moves[5] = { -a, unit - a, 0, b - unit, b };
    const int written = ((c->results >> i) | (c->results >> k)) & 1u;
    void* p[8];
    int m;
    for (m = 0; m < 5; m++) {
        const int apart = m == 0 || m == 4 || !written || (m == 2 && may_be_same(c, i, k));
        overlap_places(p, i, (size_t)(2048 * (k + 1) + moves[m]));
        if (apart) {
            prepare();
            CHECK_MSG(c->call(p) == AMP_OK, "%s: %d at %d of %d: %s", c->name, i, m, k, heard);
        } else
            REFUSED(AMP_ERR_ARGUMENT, c->name, c->call(p));
    }
}
static void results_over_operands(void) {
    size_t n;
    int i, k;
    for (n = 0; n < sizeof overlap_cases / sizeof overlap_cases[0]; n++)
        for (i = 0; overlap_cases[n].bytes[i]; i++)
            for (k = 0; overlap_cases[n].bytes[k]; k++)
                if (i != k) overlap_pair(&overlap_cases[n], i, k);
}

/* Operators under masked exceptions leave no flag; alone all that compute raise one of these numbers. */
static void fill_overflowing(void) {
    for (size_t i = 0; i < sizeof memory / sizeof(float); i++) {
        const float x = (i % 3 == 1 ? -3e38f : 3e38f) / (float)(1 + i % 5);
        memcpy(memory + i * sizeof x, &x, sizeof x);
    }
}
static amp_result call_gemm(void* const* p) {
    return amp_gemm(PRODUCT(0, 0, 3, 4, 5, 0, 0, 0), 1.0f, amp_ref_of(p[0], T),
        amp_ref_of(p[1], T), 0.0f, amp_ref_of(p[2], T), &quiet);
}
static amp_result call_batch(void* const* p) {
    return amp_gemm(PRODUCTS(0, 1, 3, 4, 5, 0, 0, 0, 3, 15, 20, 12), 2.0f, amp_ref_of(p[0], T),
        amp_ref_of(p[1], T), 1.0f, amp_ref_of(p[2], T), &quiet);
}
static amp_result call_bce(void* const* p) {
    return amp_bce_with_logits_forward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), (float*)p[2], 7,
        &quiet);
}
static amp_result call_bce_backward(void* const* p) {
    return amp_bce_with_logits_backward(amp_ref_of(p[0], T), amp_ref_of(p[1], T), NULL, 3e38f,
        amp_ref_of(p[2], T), 7, &quiet);
}
static amp_result call_convert(void* const* p) {
    const amp_convert_desc d = { .mask_exceptions = quiet.mask_exceptions };
    return amp_convert_with(amp_f16(p[1]), amp_ref_of(p[0], T), 37, &d);
}
static amp_result call_average(void* const* p) {
    const amp_pool2d_shape s = { AMP_POOL_AVERAGE, 2, 3, 6, 6, 2, 2, 0, 0, 0, 0, 0, 0, 0 };
    return amp_pool2d_forward(&s, amp_ref_of(p[0], T), amp_ref_of(p[1], T), &quiet);
}
static amp_result call_average_backward(void* const* p) {
    const amp_pool2d_shape s = { AMP_POOL_AVERAGE, 2, 3, 6, 6, 3, 3, 0, 0, 0, 0, 0, 0, 0 };
    return amp_pool2d_backward(&s, amp_ref_of(p[0], T), AMP_NONE, amp_ref_of(p[2], T), 0, &quiet);
}
static int flags_of(overlap_call call, int mask) {
    void* p[8];
    prepare();
    fill_overflowing();
    quiet.mask_exceptions = mask;
    overlap_places(p, 0, 2048);
    feclearexcept(FE_ALL_EXCEPT);
    CHECK_MSG(call(p) == AMP_OK, "%s", heard);
    return fetestexcept(FE_ALL_EXCEPT);
}
static void masked_exceptions(void) {
    static const overlap_call more[] = { call_gemm, call_batch, call_bce, call_bce_backward, call_average,
                                         call_average_backward, call_convert };
    for (int isa = 0; isa < COUNT(ISAS); isa++)
        for (int i = 0; i < COUNT(overlap_cases) + COUNT(more) && amp_cpu_force_isa(ISAS[isa]) == AMP_OK; i++) {
            const int among = i < COUNT(overlap_cases);
            const overlap_call call = among ? overlap_cases[i].call : more[i - COUNT(overlap_cases)];
            const char* name = among ? overlap_cases[i].name : "more";
            const int masked = flags_of(call, 1), raised = flags_of(call, 0);
            CHECK_MSG(masked == 0, "%s, %s: flags %x", amp_isa_name(ISAS[isa]), name, (unsigned)masked);
            if (strstr(name, "concat") || strstr(name, "pool2d") || !strcmp(name, "embedding") || !strcmp(name, "transpose")) continue;     /* copies and maxima */
            if (call == call_convert && ISAS[isa] == AMP_ISA_SCALAR) continue;  /* bits alone */
            CHECK_MSG(raised != 0, "%s, %s", amp_isa_name(ISAS[isa]), name);
        }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* Matrices of any leading dimension in one small piece of memory: a product is refused if, byte by byte, C meets A or B
   and that can be told, which is not so between two matrices with gaps of different lengths. */
typedef struct strided { size_t at, rows, cols, ld, size; } strided;
static strided random_strided(uint64_t i, size_t rows, size_t cols, amp_dtype t) {
    strided s = { 0, 0, 0, 0, 0 };
    s.size = amp_dtype_size(t);
    s.rows = rows; s.cols = cols;
    s.ld = cols + (amp_random_bits(50, 4 * i) % 3 ? amp_random_bits(50, 4 * i + 1) % 2 * 6 : 8 - cols);
    s.at = s.size * (amp_random_bits(50, 4 * i + 2) % 60) + 128;
    return s;
}
static int packed(const strided* s) { return s->rows == 1 || s->cols == s->ld; }
static int strided_meet(const strided* a, const strided* b) {
    unsigned char used[1024];
    size_t i, k;
    int meet = 0;
    memset(used, 0, sizeof used);
    for (i = 0; i < a->rows; i++) memset(used + a->at + i * a->ld * a->size, 1, a->cols * a->size);
    for (i = 0; i < b->rows; i++)
        for (k = 0; k < b->cols * b->size; k++) meet |= used[b->at + i * b->ld * b->size + k];
    if (!packed(a) && !packed(b) && a->ld * a->size != b->ld * b->size) return meet ? -1 : 0;
    return meet;
}
static void products_over_operands(void) {
    int seen[2][2] = { { 0, 0 }, { 0, 0 } };
    uint64_t i;
    for (i = 0; i < 60000; i++) {
        const amp_dtype t = amp_random_bits(51, i) % 2 ? AMP_F16 : AMP_F32;
        const size_t m = 1 + amp_random_bits(52, i) % 5, n = 1 + amp_random_bits(53, i) % 5, k = 1 + amp_random_bits(54, i) % 5;
        const strided a = random_strided(3 * i, m, k, AMP_F32), b = random_strided(3 * i + 1, k, n, AMP_F32),
                      c = random_strided(3 * i + 2, m, n, t);
        const int over_a = strided_meet(&a, &c), over_b = strided_meet(&b, &c), refused = over_a > 0 || over_b > 0;
        amp_result r;
        prepare();
        r = amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, m, n, k, a.ld, b.ld, c.ld), 1.0f,
            amp_ref_of(memory + a.at, T), amp_ref_of(memory + b.at, T), 0.0f,
            amp_ref_of(memory + c.at, t), &quiet);
        CHECK_MSG(r == (refused ? AMP_ERR_ARGUMENT : AMP_OK), "%d: %dx%dx%d %s", (int)i, (int)m, (int)n, (int)k, heard);
        seen[packed(&c)][refused]++;
    }
    CHECK(seen[0][0] > 3000 && seen[0][1] > 3000 && seen[1][0] > 3000 && seen[1][1] > 3000);
}

/* Does a matrix of a batch meet one of another, or of the same batch a later one? */
static int series_meet(strided a, size_t a_stride, strided b, size_t b_stride, size_t batch, int self) {
    size_t i, k, from = a.at, other = b.at;
    for (i = 0; i < batch; i++)
        for (k = self ? i + 1 : 0; k < batch; k++) {
            a.at = from + i * a_stride * a.size;
            b.at = other + k * b_stride * b.size;
            if (strided_meet(&a, &b) > 0) return 1;
        }
    return 0;
}
static void batches_over_operands(void) {
    int seen[2] = { 0, 0 };
    uint64_t i;
    for (i = 0; i < 20000; i++) {
        const size_t m = 1 + amp_random_bits(55, i) % 3, n = 1 + amp_random_bits(56, i) % 3, k = 1 + amp_random_bits(57, i) % 3;
        const size_t batch = 2 + amp_random_bits(58, i) % 3, as = amp_random_bits(59, i) % 12, bs = amp_random_bits(60, i) % 12;
        const size_t cs = 1 + amp_random_bits(61, i) % 12;
        strided a = random_strided(3 * i, m, k, AMP_F32), b = random_strided(3 * i + 1, k, n, AMP_F32),
                c = random_strided(3 * i + 2, m, n, AMP_F32);
        int refused;
        amp_result r;
        a.at %= 100; b.at = 400 + b.at % 100 / 4 * 4; c.at = 300 + c.at % 200 / 4 * 4;
        a.at -= a.at % 4;
        refused = series_meet(c, cs, c, cs, batch, 1) || series_meet(a, as, c, cs, batch, 0)
                || series_meet(b, bs, c, cs, batch, 0);
        prepare();
        r = amp_gemm(PRODUCTS(AMP_NO_TRANS, AMP_NO_TRANS, m, n, k, a.ld, b.ld, c.ld, batch, as, bs, cs),
            1.0f, amp_ref_of(memory + a.at, T), amp_ref_of(memory + b.at, T), 0.0f,
            amp_ref_of(memory + c.at, T), &quiet);
        CHECK_MSG(r == (refused ? AMP_ERR_ARGUMENT : AMP_OK), "%d: %d of %dx%dx%d %s", (int)i, (int)batch, (int)m, (int)n,
                  (int)k, heard);
        seen[refused]++;
    }
    CHECK_MSG(seen[0] > 3000 && seen[1] > 3000, "%d and %d", seen[0], seen[1]);
}

/* --- floating-point traps, flushed subnormals --------------------------------------------------------- */

/* Values that make trouble; the ninth is a signalling NaN. */
static void fill_hostile(float* x, int n) {
    static const uint32_t bits[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f7fffffu, 0xff7fffffu, 0x00000001u, 0x807fffffu,
                                     0x477ff000u, 0x7fa00000u, 0x33000000u, 0x3f800000u, 0u };
    int i;
    for (i = 0; i < n; i++) memcpy(&x[i], &bits[i % COUNT(bits)], 4);
}

/* Saturating conversions between all types, and a scaler's whole window, over such values. 0 if all is well. */
static int hostile_numbers(void) {
    static float x[300], y[300];
    static double wide[300];
    static unsigned char half[1200];
    amp_convert_desc d;
    amp_overflow_info info;
    amp_scaler s;
    amp_tensor t;
    amp_dtype to, from;
    int n, wrong = 0;
    memset(&d, 0, sizeof d);
    d.saturate = 1;
    for (n = 0; n < 300; n++) { uint64_t u = 0x7fefffffffffffffu - (uint64_t)n; memcpy(&wide[n], &u, 8); }
    for (n = 1; n < 300; n += 97) {
        wrong += amp_convert_with(amp_ref_of(half, AMP_F16), amp_ref_of(wide, AMP_F64), (size_t)n, &d) != AMP_OK;
        wrong += amp_convert_with(amp_ref_of(half, AMP_F32), amp_ref_of(wide, AMP_F64), (size_t)n, &d) != AMP_OK;
        for (from = AMP_F16; from <= AMP_BF16; from = (amp_dtype)(from + 1))
            for (to = AMP_F32; to <= AMP_BF16; to = (amp_dtype)(to + 1)) {
                fill_hostile(x, 300);
                wrong += amp_convert_with(amp_ref_of(half, from), amp_f32(x), (size_t)n, &d) != AMP_OK;
                wrong += amp_convert_with(amp_ref_of(y, to), amp_ref_of(half, from), (size_t)n, &d) != AMP_OK;
            }
    }
    wrong += amp_scaler_init(&s, NULL) != AMP_OK;
    memset(&t, 0, sizeof t);
    t.data = x;
    t.count = 300;
    fill_hostile(x, 300);
    amp_scaler_scale_loss(&s, 1.0f);
    wrong += amp_scaler_check(&s, &t, 1, &info) != AMP_OK || info.inf_count != 50 || info.nan_count != 50;
    wrong += amp_scaler_unscale(&s, &t, 1, &info) != AMP_OK || !s.state.found_inf;
    wrong += amp_scaler_update(&s) != AMP_OK || s.state.scale != 32768.0f;
    return wrong;
}

/* A model whose loss scale begins so high that steps are skipped, then trains; 0 if all is well. */
static int hostile_training(void) {
    static float x[4 * 64], y[4 * 10], out[4 * 10];
    amp_model_desc d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_scaler_desc s;
    amp_layer_stats stats[8];
    amp_model* m = NULL;
    amp_value v;
    amp_batch b;
    amp_step_info info;
    amp_eval_info before, after;
    int i, wrong = 0;
    memset(&s, 0, sizeof s);
    memset(&b, 0, sizeof b);
    s.init_scale = 1.8446744e19f;
    d.batch = b.n = 4;
    d.precision.level = AMP_O2;
    d.scaler = &s;
    d.optimizer.lr = 0.05f;
    if (amp_model_create(&m, &d) != AMP_OK) return 100;
    v = amp_linear(m, amp_gelu(m, amp_linear(m, amp_input(m, 64, 1, 1), 40)), 10);
    amp_mse(m, v);
    if (amp_model_finalize(m) != AMP_OK) return 101;
    b.inputs[0] = x;
    b.targets[0] = y;
    for (i = 0; i < 4 * 64; i++) x[i] = amp_random_normal(1, (uint64_t)i);
    for (i = 0; i < 4 * 10; i++) y[i] = amp_random_normal(2, (uint64_t)i);
    wrong += amp_model_stats(m, &b, stats, 8) != AMP_OK || amp_evaluate(m, &b, &before) != AMP_OK;
    for (i = 0; i < 150; i++) wrong += amp_train_step(m, &b, &info) != AMP_OK;
    wrong += amp_evaluate(m, &b, &after) != AMP_OK || !(after.loss < 0.5f * before.loss);
    wrong += info.skipped < 20 || info.step + info.skipped != 150;
    x[0] = 1e30f;                                  /* inf in half: a NaN of a loss, told and skipped */
    wrong += amp_train_step(m, &b, &info) != AMP_OK || info.outcome != AMP_STEP_SKIPPED_MODEL;
    wrong += amp_evaluate(m, &b, &after) != AMP_OK || amp_predict(m, &b, v, out) != AMP_OK;
    amp_model_destroy(m);
    return wrong;
}

#if HAVE_FORK
/* Runs f in a child; its exit status, or 1000 + the signal that ended it. */
static int in_child(int (*f)(void)) {
    int status = 0;
    pid_t pid;
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        signal(SIGFPE, SIG_DFL);                /* a sanitizer would catch it */
        _exit(f());
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return -1;
    return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}
#endif

#if defined(__GLIBC__) && defined(__x86_64__) && HAVE_FORK
/* Statistics of what overflows their target. */
static int hostile_statistics(void) {
    const double x[] = { 1e300, -1e-300, 1 };
    amp_stats s;
    return amp_stats_collect(&s, x, AMP_F64, 3, AMP_F32, 0) != AMP_OK || s.would_overflow != 1;
}
/* Every operator, and a step of an optimizer whose update overflows. */
static int hostile_operators(void) {
    static float w[20], g[20], m[20], v[20];
    amp_half low[20];
    amp_param param = { .master = w, .low = low, .low_dtype = AMP_F16, .grad = g, .m = m, .v = v, .count = 20 };
    const amp_optimizer_desc desc = { .kind = AMP_ADAM, .lr = 1e38f };
    amp_optimizer_info info;
    amp_optimizer o;
    void* p[8];
    int wrong = 0;
    for (int i = 0; i < COUNT(overlap_cases); i++) {
        prepare();
        fill_overflowing();
        quiet.mask_exceptions = 1;
        overlap_places(p, 0, 2048);
        wrong += overlap_cases[i].call(p) != AMP_OK;
    }
    for (int i = 0; i < 20; i++) w[i] = g[i] = i % 2 ? 1e30f : 1.0f;
    wrong += amp_optimizer_init(&o, &desc, &param, 1) != AMP_OK || amp_optimizer_step(&o, NULL, &info) != AMP_OK;
    return wrong + (info.update_overflows == 0);
}
static int trapping(void) {
    feclearexcept(FE_ALL_EXCEPT);
    feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
    return hostile_numbers() + hostile_training() + hostile_statistics() + hostile_operators()
           + (fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW) != 0)
           + (fegetexcept() != (FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW));
}
static int trap_works(void) {
    volatile float zero = 0.0f, one = 1.0f;
    feenableexcept(FE_DIVBYZERO);
    one = one / zero;
    return 0;
}
static void traps(void) {
    static const amp_isa all[] = { AMP_ISA_SCALAR, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    int i, status;
    CHECK(in_child(trap_works) == 1000 + SIGFPE);
    for (i = 0; i < COUNT(all); i++) {
        if (amp_cpu_force_isa(all[i]) != AMP_OK) continue;
        status = in_child(trapping);
        CHECK_MSG(status == 0, "%s: status %d", amp_isa_name(all[i]), status);
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}
#else
static void traps(void) { TEST_SKIP("no feenableexcept here"); }
#endif

#if HAVE_MXCSR
/* All halves and all bfloat16 to float and back, and a check of gradients, with subnormals flushed by the host. */
static void flushed_subnormals(void) {
    static uint16_t h[65536], back[65536], low[65536];
    static float f[65536];
    unsigned i, old = _mm_getcsr(), differ = 0;
    int normal, flushed;
    for (i = 0; i < 65536; i++) h[i] = (uint16_t)i;
    normal = hostile_numbers() + hostile_training();
    _mm_setcsr(old | 0x8040u);
    flushed = hostile_numbers() + hostile_training();
    CHECK(amp_convert(amp_f32(f), amp_ref_of(h, AMP_F16), 65536) == AMP_OK && amp_convert(amp_ref_of(back, AMP_F16),
        amp_f32(f), 65536) == AMP_OK);
    CHECK(amp_convert(amp_f32(f), amp_ref_of(h, AMP_BF16), 65536) == AMP_OK && amp_convert(amp_ref_of(low, AMP_BF16),
        amp_f32(f), 65536) == AMP_OK);
    _mm_setcsr(old);
    for (i = 0; i < 65536; i++)                              /* the subnormal ones are subnormal floats */
        differ += h[i] != low[i] && !((h[i] & 0x7f80) == 0x7f80 && low[i] == (h[i] | 0x40));
    for (i = 0; i < 65536; i++)
        differ += h[i] != back[i] && !((h[i] & 0x7c00) == 0x7c00 && back[i] == (h[i] | 0x200));   /* NaNs become quiet */
    CHECK_MSG(normal == 0 && flushed == 0 && differ == 0, "%d %d, %u values differ", normal, flushed, differ);
}
#else
static void flushed_subnormals(void) { TEST_SKIP("no MXCSR here"); }
#endif

/* --- registers -------------------------------------------------------------------------------------------- */

/* Every path leaves the upper halves of the vector registers unused, whatever the compiler does by itself. */
#define LEAVES_NONE(call)                                                                              \
    do {                                                                                               \
        CHECK((call) == AMP_OK);                                                                       \
        CHECK_MSG(upper_in_use() != 1, "%s: %s", amp_isa_name(amp_cpu_isa()), #call);                  \
    } while (0)
static float wide[4][64 * 1024];
static void upper_halves_of_products(amp_dtype t) {
    static const amp_conv2d_shape s = { 2, 32, 12, 12, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0 };
    static float room[1024 * 1024];
    amp_exec exec;
    int sums;
    memset(&exec, 0, sizeof exec);
    exec.workspace = room;
    exec.workspace_size = sizeof room;
    for (sums = AMP_SUMS_FIXED; sums <= AMP_SUMS_FAST; sums++) {
        exec.sums = (amp_sums)sums;
        LEAVES_NONE(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 16, 16, 16, 16, 16, 16), 1.0f,
            amp_ref_of(wide[0], t), amp_ref_of(wide[1], t), 0.0f, amp_f32(wide[2]), NULL));
        LEAVES_NONE(amp_gemm(PRODUCT(AMP_TRANS, AMP_TRANS, 200, 129, 150, 200, 150, 129), 1.0f,
            amp_ref_of(wide[0], t), amp_ref_of(wide[1], t), 0.0f, amp_ref_of(wide[2], t), &exec));
        LEAVES_NONE(amp_conv2d_forward(&s, amp_ref_of(wide[0], t), amp_ref_of(wide[1], t),
            AMP_NONE, amp_ref_of(wide[2], t), &exec));
        LEAVES_NONE(amp_conv2d_backward(&s, amp_ref_of(wide[2], t), amp_ref_of(wide[0], t),
            amp_ref_of(wide[1], t), amp_ref_of(wide[3], t), AMP_NONE, AMP_NONE, 0, &exec));
        LEAVES_NONE(amp_conv2d_backward(&s, amp_ref_of(wide[2], t), amp_ref_of(wide[0], t),
            amp_ref_of(wide[1], t), AMP_NONE, amp_f32(wide[3]), AMP_NONE, 0, &exec));
        LEAVES_NONE(amp_conv2d_backward(&s, amp_ref_of(wide[2], t), amp_ref_of(wide[0], t),
            amp_ref_of(wide[1], t), AMP_NONE, AMP_NONE, amp_f32(wide[3]), 0, &exec));
    }
}
static void upper_halves_of_rows(amp_dtype t) {
    static const amp_pool2d_shape window = { AMP_POOL_MAX, 2, 8, 12, 12, 2, 2, 2, 2, 0, 0, 0, 0, 0 };
    static const amp_batch_norm_shape norm = { 2, 8, 100, 0.0f, 0.0f, 0, NULL };
    static float mean[64], var[64], save[2][64], params[64];
    const size_t n = 64 * 40;
    LEAVES_NONE(amp_convert(amp_f32(wide[0]), amp_ref_of(wide[1], t), 1));
    LEAVES_NONE(amp_convert(amp_f32(wide[0]), amp_ref_of(wide[1], t), n + 5));
    LEAVES_NONE(amp_convert(amp_ref_of(wide[1], t), amp_f32(wide[0]), n + 5));
    LEAVES_NONE(amp_pool2d_forward(&window, amp_ref_of(wide[0], t), amp_ref_of(wide[2], t), NULL));
    LEAVES_NONE(amp_pool2d_backward(&window, amp_ref_of(wide[2], t), amp_ref_of(wide[0], t),
        amp_ref_of(wide[3], t), 0, NULL));
    LEAVES_NONE(amp_batch_norm_forward(&norm, 1, amp_ref_of(wide[0], t), amp_f32(params),
        amp_f32(params), mean, var, save[0], save[1], amp_ref_of(wide[2], t), NULL));
    LEAVES_NONE(amp_layer_norm_forward(amp_ref_of(wide[0], t), amp_f32(params), amp_f32(params),
        0.0f, save[0], save[1], amp_ref_of(wide[2], t), 64, 40, NULL));
    LEAVES_NONE(amp_softmax_forward(amp_ref_of(wide[0], t), amp_ref_of(wide[2], t), 64, 40, NULL));
    LEAVES_NONE(amp_activation_forward(AMP_GELU, amp_ref_of(wide[0], t), amp_ref_of(wide[2], t),
        n, NULL));
}
static void upper_halves_of_a_step(void) {
    amp_param p;
    amp_optimizer_desc d;
    amp_optimizer o;
    amp_scaler s;
    amp_tensor grads;
    int kind;
    memset(wide, 0, sizeof wide);
    for (kind = AMP_SGD; kind <= AMP_RMSPROP; kind++) {
        memset(&d, 0, sizeof d);
        memset(&p, 0, sizeof p);
        memset(&grads, 0, sizeof grads);
        d.kind = (amp_optimizer_kind)kind;
        p.master = wide[0];
        p.grad = grads.data = wide[1];
        p.m = wide[2];
        p.v = wide[3];
        p.count = grads.count = 1000;
        CHECK(amp_scaler_init(&s, NULL) == AMP_OK && amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
        (void)amp_scaler_scale_loss(&s, 1.0f);
        LEAVES_NONE(amp_scaler_unscale(&s, &grads, 1, NULL));
        LEAVES_NONE(amp_optimizer_step(&o, &s, NULL));
    }
}
static void upper_halves(void) {
    const amp_isa before = amp_cpu_isa();
    int isa, t;
    if (upper_in_use() < 0) { TEST_SKIP("nobody tells what of the registers is in use"); return; }
    for (isa = AMP_ISA_SCALAR; isa <= AMP_ISA_AVX512_BF16; isa++) {
        if (amp_cpu_force_isa((amp_isa)isa) != AMP_OK) continue;
        for (t = AMP_F32; t <= AMP_BF16; t++) {
            upper_halves_of_products((amp_dtype)t);
            upper_halves_of_rows((amp_dtype)t);
        }
        upper_halves_of_a_step();
    }
    CHECK(amp_cpu_force_isa(before) == AMP_OK);
}

/* --- interruptions ---------------------------------------------------------------------------------------- */

#if HAVE_FORK
static char directory[260], path[300];
static amp_model* small_model(void) {
    amp_model_desc d = model_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_model* m = NULL;
    d.optimizer.kind = AMP_ADAM;
    if (amp_model_create(&m, &d) != AMP_OK) return NULL;
    amp_mse(m, amp_linear(m, amp_linear(m, amp_input(m, 64, 1, 1), 200), 10));
    if (amp_model_finalize(m) == AMP_OK) return m;
    amp_model_destroy(m);
    return NULL;
}
/* All parameters of a checkpoint of round k hold k: a mixture of two files would show. */
static void set_params(amp_model* m, float value) {
    int count, i;
    size_t k;
    amp_param* p = amp_model_params(m, &count);
    for (i = 0; i < count; i++) for (k = 0; k < p[i].count; k++) p[i].master[k] = value;
}
static int params_agree(amp_model* m) {
    int count, i;
    size_t k;
    amp_param* p = amp_model_params(m, &count);
    for (i = 0; i < count; i++) for (k = 0; k < p[i].count; k++) if (p[i].master[k] != p[0].master[0]) return 0;
    return p[0].master[0] >= 1.0f;
}
static int save_for_ever(void) {
    amp_model* m = small_model();
    float round;
    for (round = 1.0f; m; round += 1.0f) {
        set_params(m, round);
        if (amp_checkpoint_save(m, path) != AMP_OK) break;
    }
    return 1;
}
static void killed_while_saving(void) {
    amp_model* m = small_model();
    int i, loaded = 0, status;
    CHECK(m != NULL);
    if (!m) return;
    set_params(m, 1.0f);
    CHECK(amp_checkpoint_save(m, path) == AMP_OK);
    for (i = 0; i < 30; i++) {
        pid_t pid;
        fflush(stdout);
        pid = fork();
        if (pid == 0) _exit(save_for_ever());
        usleep(2000 + test_random() % 20000);
        kill(pid, SIGKILL);
        CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
        set_params(m, 0.0f);
        loaded += amp_checkpoint_load(m, path) == AMP_OK && params_agree(m);
    }
    CHECK_MSG(loaded == 30, "%d of 30 files are whole: %s", loaded, heard);
    amp_model_destroy(m);
}

/* No room for the file: at every limit below its size a sentence, and the old file as it was. */
static int save_without_room(void) {
    amp_model* m = small_model();
    int refused = 0, limit, limits = 0;
    signal(SIGXFSZ, SIG_IGN);
    for (limit = 0; limit < 150000 && m; limit += 15000, limits++) {
        struct rlimit room;
        room.rlim_cur = (rlim_t)limit;
        room.rlim_max = RLIM_INFINITY;
        if (setrlimit(RLIMIT_FSIZE, &room) != 0) return 50;
        set_params(m, 99.0f);
        refusals = 0;
        refused += amp_checkpoint_save(m, path) == AMP_ERR_IO && refusals == 1 && amp_model_error(m)[0] != 0;
    }
    return refused == limits ? 0 : 1 + refused;
}
static void no_room(void) {
    amp_model* m = small_model();
    int count, status;
    CHECK(m != NULL);
    if (!m) return;
    set_params(m, 7.0f);
    CHECK(amp_checkpoint_save(m, path) == AMP_OK);
    status = in_child(save_without_room);
    CHECK_MSG(status == 0, "status %d", status);
    set_params(m, 0.0f);
    CHECK(amp_checkpoint_load(m, path) == AMP_OK && params_agree(m) && amp_model_params(m, &count)->master[0] == 7.0f);
    amp_model_destroy(m);
    CHECK_MSG(remove(path) == 0 && rmdir(directory) == 0, "files are left in %s", directory);
}
static void choose_path(void) {
    const char* parent = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%.200s/amp_hostile_XXXXXX",
             parent ? parent : access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    CHECK(mkdtemp(directory) != NULL);
    snprintf(path, sizeof path, "%s/model", directory);
}
/* A process that dies leaves its temporary file. */
static void remove_leftovers(void) {
    DIR* d = opendir(directory);
    struct dirent* e;
    char name[600];
    while (d && (e = readdir(d)) != NULL) {
        snprintf(name, sizeof name, "%s/%s", directory, e->d_name);
        if (strncmp(e->d_name, "model.", 6) == 0) remove(name);
    }
    if (d) closedir(d);
}
#endif

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(convert_desc_fields);
    TEST(conv_shape_fields);
    TEST(pool_shape_fields);
    TEST(batch_norm_fields);
    TEST(policy_fields);
    TEST(scaler_fields);
    TEST(optimizer_fields);
    TEST(model_fields);
    TEST(layer_fields);
    TEST(operator_numbers);
    TEST(null_operands);
    TEST(null_objects);
    TEST(loggers);
    TEST(missing_parts);
    TEST(damaged_scaler_states);
    TEST(huge_sizes);
    TEST(huge_lists);
    TEST(overlaps);
    TEST(results_over_operands);
    TEST(masked_exceptions);
    TEST(products_over_operands);
    TEST(batches_over_operands);
    TEST(traps);
    TEST(flushed_subnormals);
    TEST(upper_halves);
#if HAVE_FORK
    choose_path();
    TEST(killed_while_saving);
    remove_leftovers();
    TEST(no_room);
#else
    TEST_SKIP("no fork here: interrupted saving");
#endif
    TEST_END();
}
