/* test_report.c - statistics of tensors and models, and what is printed for people. */
#if defined(__unix__) || defined(__APPLE__)
  #define _GNU_SOURCE
#endif
#include "small_model.h"
#include <fenv.h>
#include <locale.h>
#include <math.h>
#include <float.h>

static const float inf = (float)HUGE_VAL;
static float nan_value(void) { return inf - inf; }
static uint64_t bin(const amp_stats* s, int exponent) { return s->histogram[exponent - AMP_STATS_MIN_EXPONENT]; }
static uint64_t binned(const amp_stats* s) {
    uint64_t n = 0;
    int i;
    for (i = 0; i < AMP_STATS_BINS; i++) n += s->histogram[i];
    return n;
}

/* --- counts -------------------------------------------------------------------------------- */

/* Floats around every border of half. */
static void test_f32_for_half(void) {
    float x[] = { 0.0f, -0.0f, 1.0f, -2.5f, 65504.0f, 65519.99f, 65520.0f, -70000.0f,  /* the border to inf is 65520 */
                  2.98023224e-8f,                  /* 2^-25: a tie that goes to 0 */
                  2.98023259e-8f, 5.9604645e-8f,   /* just above it; 2^-24 */
                  1e-8f, -1e-30f, 1e-45f,          /* to 0; the last is a subnormal float */
                  6.0e-5f, 6.1035156e-5f,          /* a subnormal half; 2^-14 */
                  6.1034e-5f,                      /* below 2^-14, but rounds up to it */
                  0, 0, 0, FLT_MAX };
    amp_stats s;
    x[17] = inf; x[18] = -inf; x[19] = nan_value();
    CHECK(amp_stats_collect(&s, x, AMP_F32, sizeof x / sizeof *x, AMP_DTYPE_DEFAULT, 0) == AMP_OK);
    CHECK(s.count == 21 && s.zeros == 2 && s.infs == 2 && s.nans == 1 && binned(&s) == 16);
    CHECK_MSG(s.subnormals == 1, "%lu", (unsigned long)s.subnormals);
    CHECK_MSG(s.would_underflow == 4, "%lu", (unsigned long)s.would_underflow);
    CHECK_MSG(s.would_be_subnormal == 3, "%lu", (unsigned long)s.would_be_subnormal);
    CHECK_MSG(s.would_overflow == 3, "%lu", (unsigned long)s.would_overflow);
    CHECK(s.smallest == 1e-45f && s.largest == FLT_MAX);
    CHECK(bin(&s, 0) == 1 && bin(&s, 1) == 1 && bin(&s, 15) == 3 && bin(&s, 16) == 1 && bin(&s, 127) == 1);
    CHECK(bin(&s, -25) == 2 && bin(&s, -24) == 1 && bin(&s, -27) == 1 && bin(&s, -100) == 1 && bin(&s, -149) == 1);
    CHECK(bin(&s, -15) == 2 && bin(&s, -14) == 1);
    /* bfloat16 has FLT_MAX's exponent, but FLT_MAX rounds up to inf. */
    CHECK(amp_stats_collect(&s, x, AMP_F32, sizeof x / sizeof *x, AMP_BF16, 0) == AMP_OK);
    CHECK(s.would_underflow == 1 && s.would_be_subnormal == 0 && s.would_overflow == 1);
    CHECK(amp_stats_collect(&s, x, AMP_F32, sizeof x / sizeof *x, AMP_F32, 0) == AMP_OK);
    CHECK(s.would_underflow == 0 && s.would_be_subnormal == 1 && s.would_overflow == 0);
}

/* Doubles beyond the histogram go to its ends. */
static void test_ends_of_the_histogram(void) {
    double x[6];
    amp_stats s;
    x[0] = ldexp(1.0, 127); x[1] = ldexp(-1.0, 128); x[2] = ldexp(1.0, 1000);
    x[3] = ldexp(1.0, -149); x[4] = ldexp(1.0, -150); x[5] = ldexp(-1.0, -1074);
    memset(&s, 0xff, sizeof s);
    CHECK(amp_stats_collect(&s, x, AMP_F64, 6, AMP_F16, 0) == AMP_OK && s.count == 6 && binned(&s) == 6);
    CHECK(bin(&s, 127) == 3 && bin(&s, -149) == 3);
}

/* All 65536 halves, against counts that follow from the format. */
static void test_every_half(void) {
    static amp_half x[65536];
    amp_stats s;
    int i;
    for (i = 0; i < 65536; i++) x[i].bits = (uint16_t)i;
    CHECK(amp_stats_collect(&s, x, AMP_F16, 65536, AMP_F16, 0) == AMP_OK);
    CHECK(s.count == 65536 && s.zeros == 2 && s.infs == 2 && s.nans == 2 * 1023 && s.subnormals == 2 * 1023);
    CHECK(s.would_underflow == 0 && s.would_overflow == 0 && s.would_be_subnormal == 2 * 1023);
    CHECK(s.smallest == AMP_HALF_TRUE_MIN && s.largest == AMP_HALF_MAX && s.suggested_scale == 0.5f);
    for (i = -14; i <= 15; i++) CHECK(bin(&s, i) == 2048);
    for (i = -24; i < -14; i++) CHECK(bin(&s, i) == (uint64_t)2 << (i + 24));
    /* As bfloat16: the largest stay finite (65504 is 65536 there), nothing is subnormal. */
    CHECK(amp_stats_collect(&s, x, AMP_F16, 65536, AMP_BF16, 0) == AMP_OK);
    CHECK(s.would_underflow == 0 && s.would_overflow == 0 && s.would_be_subnormal == 0 && s.subnormals == 2 * 1023);
}

static void test_every_bfloat16(void) {
    static amp_bfloat16 x[65536];
    amp_stats s;
    int i;
    for (i = 0; i < 65536; i++) x[i].bits = (uint16_t)i;
    CHECK(amp_stats_collect(&s, x, AMP_BF16, 65536, AMP_F16, 0) == AMP_OK);
    CHECK(s.zeros == 2 && s.infs == 2 && s.nans == 2 * 127 && s.subnormals == 2 * 127);
    /* 2^-25 itself is a tie and becomes 0; from 2^-24 down to the numbers above 2^-25 stay. Exponents -126..-26 and the
       subnormals are lost. 2^16 and above is inf; 65280 = 1.9921875 * 2^15, the largest below, is not. */
    CHECK(s.would_underflow == 2 * (101 * 128 + 127 + 1));
    CHECK(s.would_overflow == 2 * (127 - 16 + 1) * 128);
    CHECK(s.would_be_subnormal == 2 * (11 * 128 - 1));
    CHECK(bin(&s, -126) == 256 && bin(&s, 127) == 256 && bin(&s, -127) == 128 && bin(&s, -133) == 2
          && bin(&s, -134) == 0);
}

static void test_f64(void) {
    double x[] = { 1e-320, 1e-300, 1e-40, 0.1, 65519.999999999, 65520.0, 1e300, 0.0, 0.0 };
    amp_stats s;
    x[8] = (double)inf;
    CHECK(amp_stats_collect(&s, x, AMP_F64, 9, AMP_F16, 0) == AMP_OK);
    CHECK(s.count == 9 && s.zeros == 1 && s.infs == 1 && s.subnormals == 1 && s.would_underflow == 3
          && s.would_overflow == 2);
    CHECK(bin(&s, -149) == 2 && bin(&s, -133) == 1 && bin(&s, -4) == 1 && bin(&s, 15) == 2 && bin(&s, 127) == 1);
    CHECK_MSG(s.smallest == 1e-45f && s.largest == FLT_MAX, "%g %g", (double)s.smallest, (double)s.largest);
    CHECK(amp_stats_collect(&s, x + 3, AMP_F64, 1, AMP_F16, 0) == AMP_OK && s.largest == 0.1f
          && s.smallest == 0.1f);
}

static void test_adding(void) {
    static float x[1000];
    amp_stats all, parts;
    int i;
    for (i = 0; i < 1000; i++) x[i] = ldexpf(test_uniform(), (int)(test_random() % 60) - 40);
    CHECK(amp_stats_collect(&all, x, AMP_F32, 1000, AMP_F16, 0) == AMP_OK);
    memset(&parts, 0xff, sizeof parts);
    CHECK(amp_stats_collect(&parts, x, AMP_F32, 300, AMP_F16, 0) == AMP_OK);
    CHECK(amp_stats_collect(&parts, x + 300, AMP_F32, 1, AMP_F16, 1) == AMP_OK);
    CHECK(amp_stats_collect(&parts, x + 301, AMP_F32, 699, AMP_F16, 1) == AMP_OK);
    CHECK(amp_stats_collect(&parts, NULL, AMP_F32, 0, AMP_F16, 1) == AMP_OK);
    CHECK(memcmp(&all, &parts, sizeof all) == 0);
    CHECK(amp_stats_collect(&parts, NULL, AMP_F32, 0, AMP_F16, 0) == AMP_OK && parts.count == 0
          && parts.suggested_scale == 0.0f);
    CHECK(parts.largest == 0.0f && parts.smallest == 0.0f);
    CHECK(amp_stats_collect(NULL, x, AMP_F32, 1, AMP_F16, 0) == AMP_ERR_ARGUMENT);
    CHECK(amp_stats_collect(&parts, NULL, AMP_F32, 1, AMP_F16, 0) == AMP_ERR_ARGUMENT);
    CHECK(amp_stats_collect(&parts, x, (amp_dtype)9, 1, AMP_F16, 0) == AMP_ERR_DTYPE);
    CHECK(amp_stats_collect(&parts, x, AMP_F32, 1, AMP_F64, 0) == AMP_ERR_DTYPE);
    CHECK(parts.count == 0);
}

/* The largest power of two with largest * scale <= max / 2: the next one is too large, and what is scaled can be cast. */
static void test_suggested_scale(void) {
    static const amp_dtype targets[] = { AMP_F16, AMP_BF16, AMP_F32 };
    static const double most[] = { 65504.0, 3.3895313892515355e38, 3.4028234663852886e38 };
    int t, i;
    for (t = 0; t < 3; t++)
        for (i = 0; i < 20000; i++) {
            float x = ldexpf(1.0f + (float)(test_random() & 0x7fffffu) / 8388608.0f, (int)(test_random() % 277) - 149);
            amp_stats s;
            double scaled;
            amp_half half;
            if (i % 3 == 0) x = ldexpf(2.0f - ldexpf(1.0f, -(int)(test_random() % 24)), (int)(test_random() % 100) - 50);   /* 1.99.. */
            if (i == 0) x = 1.0f;
            if (i == 1) x = FLT_MAX;
            if (i == 2) x = 1e-45f;
            CHECK(amp_stats_collect(&s, &x, AMP_F32, 1, targets[t], 0) == AMP_OK);
            scaled = (double)x * (double)s.suggested_scale;
            if (s.suggested_scale < 1e38f)
                CHECK_MSG(scaled <= most[t] / 2.0 && 2.0 * scaled > most[t] / 2.0, "%g: %g", (double)x,
                          (double)s.suggested_scale);
            else CHECK(s.suggested_scale == 1.7014118346046923e38f && scaled <= most[t] / 2.0);
            CHECK(frexpf(s.suggested_scale, &(int){ 0 }) == 0.5f);
            half = amp_half_from_double(scaled);
            CHECK(amp_is_finite(amp_f16(&half)) || t > 0);
        }
}

/* --- models ---------------------------------------------------------------------------------- */

enum { N = 6 };
static float pictures[N * 36];
static int32_t labels[N];
typedef struct model { amp_model* m; amp_value v[8]; } model;
static const char *name_of_conv, *name_of_dense;    /* of make_model's layers; NULL = the default */

static model make_model(amp_level level, amp_dtype low, float dropout, int accumulate) {
    amp_model_desc d = model_desc(N, level, low);
    amp_conv2d_desc c;
    model t;
    memset(&c, 0, sizeof c);
    d.accumulate = accumulate;
    d.optimizer.momentum = 0.9f;
    t.m = new_model(&d);
    c.out_channels = 4; c.kernel = 3;
    t.v[0] = amp_input(t.m, 1, 6, 6);
    t.v[1] = amp_conv2d_with(t.m, t.v[0], &c);
    t.v[2] = amp_batch_norm(t.m, t.v[1]);
    t.v[3] = amp_relu(t.m, t.v[2]);
    t.v[4] = amp_flatten(t.m, t.v[3]);
    t.v[5] = amp_dropout(t.m, t.v[4], dropout);
    t.v[6] = amp_linear(t.m, t.v[5], 3);
    t.v[7] = amp_softmax(t.m, t.v[6]);
    amp_softmax_cross_entropy(t.m, t.v[6]);
    if (name_of_conv) amp_name(t.m, t.v[1], name_of_conv);
    if (name_of_dense) amp_name(t.m, t.v[6], name_of_dense);
    CHECK_MSG(amp_model_finalize(t.m) == AMP_OK, "%s", amp_model_error(t.m));
    return t;
}
static amp_batch full_batch(void) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = N; b.inputs[0] = pictures; b.targets[0] = labels;
    return b;
}

/* Everything that a step can change, as bytes. */
static size_t state_bytes(model t, unsigned char* out, size_t room) {
    size_t n = 0;
    int i, count;
    amp_batch b = full_batch();
    float answers[N * 64];
    amp_param* p = amp_model_params(t.m, &count);
    for (i = 0; i < count; i++) {
        if (p[i].master) { memcpy(out + n, p[i].master, p[i].count * 4); n += p[i].count * 4; }
        if (p[i].low) { memcpy(out + n, p[i].low, p[i].count * 2); n += p[i].count * 2; }
        if (p[i].m) { memcpy(out + n, p[i].m, p[i].count * 4); n += p[i].count * 4; }
    }
    memcpy(out + n, &amp_model_scaler(t.m)->state, sizeof(amp_scaler_state)); n += sizeof(amp_scaler_state);
    memcpy(out + n, &amp_model_optimizer(t.m)->state, sizeof(amp_optimizer_state)); n += sizeof(amp_optimizer_state);
    CHECK(amp_predict(t.m, &b, t.v[2], answers) == AMP_OK);     /* shows the running statistics */
    memcpy(out + n, answers, sizeof answers); n += sizeof answers;
    CHECK(n <= room);
    return n;
}

static void test_model_stats_change_nothing(void) {
    static unsigned char before[20000], after[20000];
    int level, i;
    for (level = 0; level <= 3; level++) {
        model t = make_model((amp_level)level, AMP_F16, 0.5f, 0), u = make_model((amp_level)level, AMP_F16, 0.5f, 0);
        amp_batch b = full_batch();
        amp_layer_stats stats[9];
        amp_step_info info;
        amp_scaler scaler;
        size_t n;
        for (i = 0; i < 3; i++) CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK);
        n = state_bytes(t, before, sizeof before);
        scaler = *amp_model_scaler(t.m);
        CHECK_MSG(amp_model_stats(t.m, &b, stats, 9) == AMP_OK, "%s", amp_model_error(t.m));
        CHECK(state_bytes(t, after, sizeof after) == n && memcmp(before, after, n) == 0);
        CHECK(memcmp(&scaler, amp_model_scaler(t.m), sizeof scaler) == 0);
        /* Nor anything that shows later: dropout goes on where it was. */
        for (i = 0; i < 3; i++) CHECK(amp_train_step(u.m, &b, NULL) == AMP_OK);
        for (i = 0; i < 3; i++) {
            CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && amp_train_step(u.m, &b, NULL) == AMP_OK);
            CHECK(amp_model_stats(t.m, &b, stats, 9) == AMP_OK);
        }
        n = state_bytes(t, before, sizeof before);
        CHECK(state_bytes(u, after, sizeof after) == n && memcmp(before, after, n) == 0);
        amp_model_destroy(t.m);
        amp_model_destroy(u.m);
    }
}

/* The statistics are those of the buffers: outputs as predictions show them (no dropout; the batch norm and what follows it
   differ between training and evaluation), weight gradients as a step leaves them. */
static void test_model_stats_are_right(void) {
    static const size_t sizes[9] = { 36, 64, 64, 64, 64, 64, 3, 3, 0 };
    static const amp_dtype lows[] = { AMP_F16, AMP_BF16 };
    int k, i, count;
    for (k = 0; k < 2; k++) {
        model t = make_model(AMP_O2, lows[k], 0.0f, 0);
        amp_batch b = full_batch();
        amp_layer_stats stats[10];
        float out[N * 64];
        amp_stats want;
        amp_param* p = amp_model_params(t.m, &count);
        memset(stats, 0x55, sizeof stats);
        CHECK(amp_model_stats(t.m, &b, stats, 10) == AMP_OK);
        CHECK(stats[9].output.count == 0x5555555555555555u);            /* layer 9 does not exist */
        for (i = 0; i < 9; i++) {
            CHECK_MSG(stats[i].output.count == N * sizes[i], "layer %d: %lu", i,
                      (unsigned long)stats[i].output.count);
            /* The input needs no gradient, flatten is no buffer of its own, the softmax leads to no loss. */
            CHECK_MSG(stats[i].output_gradient.count == (i == 0 || i == 4 || i == 7 || i == 8 ? 0 : N * sizes[i]),
                      "layer %d", i);
            CHECK((stats[i].weight_gradient.count > 0) == (i == 1 || i == 2 || i == 6));
            CHECK(stats[i].weight.count == stats[i].weight_gradient.count);
        }
        for (i = 0; i < 2; i++) {
            CHECK(amp_predict(t.m, &b, t.v[i], out) == AMP_OK);
            CHECK(amp_stats_collect(&want, out, AMP_F32, N * sizes[i], lows[k], 0) == AMP_OK);
            want.subnormals = stats[i].output.subnormals;               /* in the type that is stored */
            CHECK_MSG(memcmp(&want, &stats[i].output, sizeof want) == 0, "output of layer %d", i);
        }
        /* relu, and before it */
        CHECK(stats[3].output.zeros > 0 && stats[2].output.zeros < stats[3].output.zeros);
        CHECK(amp_stats_collect(&want, p[4].master, AMP_F32, p[4].count, lows[k], 0) == AMP_OK);
        CHECK(amp_stats_collect(&want, p[5].master, AMP_F32, p[5].count, lows[k], 1) == AMP_OK);
        CHECK(memcmp(&want, &stats[6].weight, sizeof want) == 0);
        CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK);
        CHECK(amp_stats_collect(&want, p[4].grad, AMP_F32, p[4].count, lows[k], 0) == AMP_OK);
        CHECK(amp_stats_collect(&want, p[5].grad, AMP_F32, p[5].count, lows[k], 1) == AMP_OK);
        CHECK(memcmp(&want, &stats[6].weight_gradient, sizeof want) == 0);
        amp_model_destroy(t.m);
    }
}

static void test_model_stats_errors(void) {
    model t = make_model(AMP_O1, AMP_F16, 0.0f, 2);
    amp_batch b = full_batch();
    amp_layer_stats stats[9];
    amp_step_info info;
    CHECK(amp_model_stats(NULL, &b, stats, 9) == AMP_ERR_ARGUMENT);
    CHECK(amp_model_stats(t.m, &b, NULL, 9) == AMP_ERR_ARGUMENT);
    CHECK(amp_model_stats(t.m, &b, stats, 8) == AMP_ERR_ARGUMENT && strstr(amp_model_error(t.m), "9 are needed"));
    CHECK(amp_model_stats(t.m, NULL, stats, 9) == AMP_ERR_ARGUMENT);
    b.n = N + 1;
    CHECK(amp_model_stats(t.m, &b, stats, 9) == AMP_ERR_ARGUMENT);
    b.n = N;
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_ACCUMULATED);
    CHECK(amp_model_stats(t.m, &b, stats, 9) == AMP_ERR_STATE && strstr(amp_model_error(t.m), "micro-batches"));
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
    CHECK(amp_model_stats(t.m, &b, stats, 9) == AMP_OK);
    amp_model_destroy(t.m);
}

/* --- print --------------------------------------------------------------------------------------- */

static char text[65536];
static const char* read_back(FILE* f) {
    size_t n;
    rewind(f);
    n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    fclose(f);
    return text;
}
/* The line that begins with a layer's name. */
static const char* line_of(const char* name) {
    static char line[512];
    const char* at = text;
    size_t n = strlen(name), k;
    while (at && !(strncmp(at, name, n) == 0 && at[n] == ' ')) { at = strchr(at, '\n'); if (at) at++; }
    if (!at) return "";
    for (k = 0; at[k] && at[k] != '\n' && k < sizeof line - 1; k++) line[k] = at[k];
    line[k] = 0;
    return line;
}

static void test_print_model(void) {
    model t = make_model(AMP_O2, AMP_BF16, 0.5f, 0);
    FILE* f = tmpfile();
    char number[32];
    amp_memory memory;
    int i;
    if (!f) { TEST_SKIP("no temporary file"); amp_model_destroy(t.m); return; }
    CHECK(amp_model_print(t.m, f) == AMP_OK);
    read_back(f);
    CHECK(strncmp(text, "O2 bf16, style pytorch, batch 6\n", 32) == 0);
    for (i = 0; i < amp_model_layer_count(t.m); i++) {
        const amp_layer* l = amp_model_layer(t.m, i);
        const char* line = line_of(l->name);
        char shape[40];
        snprintf(shape, sizeof shape, " %dx%dx%d ", l->channels, l->height, l->width);
        CHECK_MSG(strstr(line, amp_op_name(l->op)) && strstr(line, amp_rule_name(l->rule))
                  && strstr(line, amp_reason_name(l->reason)) && strstr(line, shape)
                  && strstr(line, amp_dtype_name(l->compute_dtype))
                  && strstr(line, amp_dtype_name(l->storage_dtype)), "%s: %s", l->name, line);
        CHECK((strstr(line, "in place") != NULL) == (l->in_place || l->op == AMP_OP_FLATTEN));
    }
    CHECK(amp_model_memory(t.m, &memory) == AMP_OK);
    snprintf(number, sizeof number, "activations %lu", (unsigned long)memory.activation_bytes);
    CHECK(strstr(text, number) != NULL);
    CHECK(strstr(text, "\nSGD: lr 0.01, momentum 0.9, weight decay 0, clip off\n") != NULL);
    CHECK(strstr(text, "243 parameters") != NULL);       /* 36+4, 4+4, 192+3 */
    CHECK(amp_model_print(NULL, stdout) == AMP_ERR_ARGUMENT && amp_model_print(t.m, NULL) == AMP_ERR_ARGUMENT);
    amp_model_destroy(t.m);
}

/* Each group has a line with the settings that it follows. */
static void test_print_groups(void) {
    amp_optimizer_desc own;
    amp_param_group groups[4];
    amp_model_desc d;
    amp_model* m;
    amp_value x;
    FILE* f = tmpfile();
    if (!f) { TEST_SKIP("no temporary file"); return; }
    memset(&own, 0, sizeof own);
    memset(groups, 0, sizeof groups);
    memset(&d, 0, sizeof d);
    own.lr = 0.5f; own.momentum = 0.25f;
    groups[1].optimizer = &own;
    groups[2].frozen = 1;
    groups[3].lr = 0.125f; groups[3].weight_decay = 2.0f;
    d.batch = 1;
    d.optimizer.kind = AMP_ADAMW;
    d.optimizer.groups = groups; d.optimizer.group_count = 4;
    d.optimizer.schedule.kind = AMP_SCHEDULE_COSINE;
    d.optimizer.schedule.warmup_steps = 10; d.optimizer.schedule.total_steps = 160;
    CHECK(amp_model_create(&m, &d) == AMP_OK);
    x = amp_linear(m, amp_input(m, 2, 1, 1), 2);
    amp_group(m, x, 1);
    amp_mse(m, x);
    CHECK(amp_model_finalize(m) == AMP_OK && amp_model_print(m, f) == AMP_OK);
    read_back(f);
    CHECK_MSG(strstr(text, "\nAdamW: lr 0.001, betas 0.9 0.999, eps 1e-08, weight decay 0, clip off, "
                           "schedule cosine: warm-up 10, steps 160\n"
                           "group 0: AdamW: lr 0.001, betas 0.9 0.999, eps 1e-08, weight decay 0\n"
                           "group 1: SGD: lr 0.5, momentum 0.25, weight decay 0\n"
                           "group 2: frozen\n"
                           "group 3: AdamW: lr 0.125, betas 0.9 0.999, eps 1e-08, weight decay 2\n"), "%s", text);
    amp_model_destroy(m);
}

static void test_print_casts(void) {
    amp_model_desc d;
    amp_model* m = NULL;
    amp_value x, y;
    FILE* f = tmpfile();
    memset(&d, 0, sizeof d);
    d.batch = 2; d.precision.level = AMP_O1;
    if (!f) { TEST_SKIP("no temporary file"); return; }
    m = new_model(&d);
    CHECK(amp_model_print(m, stdout) == AMP_ERR_STATE);
    x = amp_input(m, 4, 1, 1);
    y = amp_tanh(m, x);                           /* FP32, as its input */
    amp_name(m, y, "both");
    x = amp_linear(m, y, 4);
    amp_mse(m, amp_add(m, x, y));
    CHECK(amp_model_finalize(m) == AMP_OK);
    CHECK(amp_model_print(m, f) == AMP_OK);
    read_back(f);
    CHECK_MSG(strstr(line_of("linear1"), "(+1 cast)") && !strstr(line_of("both"), "cast"), "%s", text);
    amp_model_destroy(m);
}

static void test_print_stats(void) {
    static float x[300];
    amp_stats s;
    FILE* f = tmpfile();
    int i;
    if (!f) { TEST_SKIP("no temporary file"); return; }
    for (i = 0; i < 300; i++) x[i] = i < 200 ? 1.5f : i < 250 ? 5.0f : i < 299 ? 0.0f : inf;
    CHECK(amp_stats_collect(&s, x, AMP_F32, 300, AMP_F16, 0) == AMP_OK);
    CHECK(amp_stats_print(&s, f) == AMP_OK);
    read_back(f);
    CHECK_MSG(strstr(text, "300 values: 49 zero") && strstr(text, "1 inf, 0 nan")
              && strstr(text, "suggested scale 4096"), "%s", text);
    CHECK(strlen(line_of("2^0")) - strlen(strstr(line_of("2^0"), "200")) < 30 && strstr(line_of("2^0"), "200 ##"));
    CHECK(strstr(line_of("2^2"), "50 #") && strstr(line_of("2^1"), "0"));
    CHECK(!strstr(text, "2^3") && !strstr(text, "2^-1"));
    CHECK(amp_stats_print(NULL, stdout) == AMP_ERR_ARGUMENT && amp_stats_print(&s, NULL) == AMP_ERR_ARGUMENT);
    f = tmpfile();
    if (!f) { TEST_SKIP("no temporary file"); return; }
    CHECK(amp_stats_collect(&s, x, AMP_F32, 0, AMP_F16, 0) == AMP_OK && amp_stats_print(&s, f) == AMP_OK);
    read_back(f);
    CHECK(strstr(text, "0 values") != NULL);
    f = tmpfile();
    if (!f) { TEST_SKIP("no temporary file"); return; }
    s.count = s.zeros = 5000000000u;                        /* more than a long holds everywhere */
    s.would_overflow = s.histogram[0] = UINT64_MAX / 64;
    CHECK(amp_stats_print(&s, f) == AMP_OK);
    read_back(f);
    CHECK_MSG(strstr(text, "5000000000 values: 5000000000 zero, 0 sub") && strstr(text, ", 288230376151711743 to inf"), "%s", text);
    CHECK(strstr(line_of("2^-149"), " 288230376151711743 ##") != NULL);
}

/* inf, NaN and what overflows the target are data here: no flag is raised, and none is taken away. */
static void test_no_flags(void) {
    static const double x64[] = { 1e300, -1e-300, 1.0, 0.1, 1e-45 };
    static const uint32_t x32[] = { 0x7f800001u, 0x7f7fffffu, 1u, 0x7f800000u };
    static const uint16_t x16[] = { 0x7c01u, 0x7f81u, 1u };
    static const amp_dtype to[] = { AMP_F32, AMP_F16, AMP_BF16 };
    amp_stats s;
    int i;
    for (i = 0; i < 3; i++) {
        feclearexcept(FE_ALL_EXCEPT);
        CHECK(amp_stats_collect(&s, x64, AMP_F64, 5, to[i], 0) == AMP_OK && !fetestexcept(FE_ALL_EXCEPT));
        CHECK(s.would_overflow == 1 && s.would_underflow >= 1);
        CHECK(amp_stats_collect(&s, x32, AMP_F32, 4, to[i], 0) == AMP_OK && !fetestexcept(FE_ALL_EXCEPT));
        CHECK(amp_stats_collect(&s, x16, i == 0 ? AMP_BF16 : to[i], 3, to[i], 0) == AMP_OK && !fetestexcept(FE_ALL_EXCEPT));
    }
#ifdef FE_INEXACT
    feraiseexcept(FE_INEXACT);
    CHECK(amp_stats_collect(&s, x64, AMP_F64, 5, AMP_F32, 0) == AMP_OK && fetestexcept(FE_ALL_EXCEPT) == FE_INEXACT);
#endif
    feclearexcept(FE_ALL_EXCEPT);
}

/* --- the precision report --------------------------------------------------------------------------- */

/* A file's text; "" if there is none. */
static const char* read_file(const char* path) {
    FILE* f = fopen(path, "rb");
    text[0] = 0;
    return f ? read_back(f) : text;
}
static const char* printed_report(amp_model* m, const amp_batch* b) {
    FILE* f = tmpfile();
    text[0] = 0;
    if (!f) { TEST_SKIP("no temporary file"); return text; }
    CHECK_MSG(amp_report_print(m, b, f) == AMP_OK, "%s", amp_model_error(m));
    return read_back(f);
}
static const char SVG[] = "report_test.svg";

/* What a row says of s: what there is none of goes without saying. */
static void row_text(const amp_stats* s, int form, char* line, size_t size) {
    const double percent = 100.0 / (double)s->count;
    size_t n = (size_t)snprintf(line, size, "%.3g %% zero", percent * (double)s->zeros);
    if (s->would_underflow) n += (size_t)snprintf(line + n, size - n, ", %.3g %% under", percent * (double)s->would_underflow);
    if (s->would_overflow) n += (size_t)snprintf(line + n, size - n, ", %.3g %% over", percent * (double)s->would_overflow);
    if (s->infs + s->nans)
        n += (size_t)snprintf(line + n, size - n, ", %lu inf, %lu nan", (unsigned long)s->infs, (unsigned long)s->nans);
    snprintf(line + n, size - n, form ? "<" : "\n");
}

/* Both forms say what amp_model_stats finds: shares, bars, the smallest suggestion of all gradients. */
static void test_report_has_the_numbers(void) {
    static const amp_level levels[] = { AMP_O0, AMP_O2, AMP_O3 };
    static amp_layer_stats stats[9];
    int form, level, i, k, e, rows;
    for (level = 0; level < 3; level++)
        for (form = 0; form < 2; form++) {
            model t = make_model(levels[level], AMP_F16, 0.0f, 0);
            amp_batch b = full_batch();
            char line[200], bars[4000];
            const char* at;
            double suggested = 0.0, scale = (double)amp_model_scaler(t.m)->state.scale;
            CHECK(amp_model_stats(t.m, &b, stats, 9) == AMP_OK);
            if (form == 0) printed_report(t.m, &b);
            else { CHECK(amp_report_svg(t.m, &b, SVG) == AMP_OK); read_file(SVG); }
            snprintf(line, sizeof line, "O%d, shares of a cast to f16", (int)levels[level]);
            CHECK_MSG(strstr(text, line), "%s", line);
            rows = 0;
            at = text;
            while ((at = strstr(at, " % zero")) != NULL) { at++; rows++; }
            at = text;
            for (i = 0; i < 9; i++) {
                const amp_stats* all[] = { &stats[i].output, &stats[i].weight, &stats[i].weight_gradient, &stats[i].output_gradient };
                const amp_layer* l = amp_model_layer(t.m, i);
                for (k = 0; k < 4; k++) {
                    const amp_stats* s = all[k];
                    uint64_t most = 1;
                    size_t n = 0;
                    if (s->count == 0) continue;
                    rows--;
                    snprintf(line, sizeof line, "%s: %s in %s (%s)", l->name, amp_op_name(l->op), amp_dtype_name(l->compute_dtype),
                             amp_reason_name(l->reason));
                    if (k == 0) CHECK_MSG((at = strstr(at, line)) != NULL, "%s", line);
                    if (k > 1 && s->suggested_scale > 0.0f && (suggested <= 0.0 || (double)s->suggested_scale < suggested))
                        suggested = (double)s->suggested_scale;
                    for (e = -40; e < 20; e++) if (bin(s, e) > most) most = bin(s, e);
                    bars[0] = 0;
                    for (e = -40; e < 20; e++) {
                        double share = (double)bin(s, e) / (double)most;
                        if (form == 0) bars[n++] = " .:-=+*#@"[bin(s, e) ? 1 + (int)(7.0 * share) : 0], bars[n] = 0;
                        else if (bin(s, e)) n += (size_t)snprintf(bars + n, 40, "M%.1f %%dv-%.1f", 150.0 + 9.0 * (e + 40.5), 1.0 + 12.0 * share);
                    }
                    row_text(s, form, line, sizeof line);
                    if (form == 0) { CHECK_MSG(at && (at = strstr(at, bars)) != NULL, "%s, row %d: '%s'", l->name, k, bars); }
                    CHECK_MSG(at && (at = strstr(at, line)) != NULL, "%s, row %d: %s", l->name, k, line);
                    if (form == 1 && at && n > 0) {      /* the bars stand behind, on the line of the text before */
                        char want[4000];
                        const char *y = at;
                        int row;
                        while (y > text && strncmp(y, " y=\"", 4) != 0) y--;
                        row = atoi(y + 4);
                        for (e = -40, n = 0; e < 20; e++)
                            if (bin(s, e))
                                n += (size_t)snprintf(want + n, 40, "M%.1f %dv-%.1f", 150.0 + 9.0 * (e + 40.5), row,
                                                      1.0 + 12.0 * (double)bin(s, e) / (double)most);
                        snprintf(want + n, sizeof want - n, "\"/>");
                        at = strstr(at, " d=\"");
                        CHECK_MSG(at && strncmp(at + 4, want, strlen(want)) == 0, "%s, row %d: %s", l->name, k, want);
                    }
                }
            }
            snprintf(line, sizeof line, "loss scale %.9g, suggested %.9g", scale, scale * suggested);
            CHECK_MSG(suggested > 0.0 && at && strstr(at, line) && !strstr(at, "inf or NaN begin"), "%s", line);
            CHECK(rows == 0 && strstr(text, "2^-14 to 2^15, subnormals from 2^-24"));
            CHECK(form == 1 || strstr(text, "  e4m3                  |                               ---@@@@@@@@@@@@@@@           | 2^-6"));
            amp_model_destroy(t.m);
        }
    remove(SVG);
}

/* A picture is ASCII and in pairs of brackets, whatever layers are called; it takes the place of an older one. */
static void test_picture_is_svg(void) {
    amp_model_desc d;
    amp_model* m = NULL;
    amp_value x;
    float data[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    amp_batch b;
    int round, i, open = 0, close = 0, wrong = 0;
    memset(&d, 0, sizeof d);
    memset(&b, 0, sizeof b);
    d.batch = 2; d.logger.log = listen;
    b.n = 2; b.inputs[0] = data; b.targets[0] = data;
    m = new_model(&d);
    x = amp_linear(m, amp_input(m, 4, 1, 1), 4);
    amp_name(m, x, "a<b>&\"'gr\xc3\xbc\xc3\x9f ]]> \1\x7f<!--");
    amp_mse(m, x);
    CHECK(amp_model_finalize(m) == AMP_OK);
    for (round = 0; round < 2; round++) CHECK_MSG(amp_report_svg(m, &b, SVG) == AMP_OK, "%s", amp_model_error(m));
    read_file(SVG);
    for (i = 0; text[i]; i++) {
        wrong += (text[i] < 32 && text[i] != '\n') || text[i] > 126;
        open += text[i] == '<';
        close += text[i] == '/' && (text[i - 1] == '<' || text[i + 1] == '>');
    }
    /* each tag closes itself or is half of a pair: <a/>, or <a>...</a> */
    for (i = 0; text[i]; i++) close += text[i] == '<' && text[i + 1] != '/' && strchr(&text[i], '>')[-1] != '/';
    CHECK_MSG(wrong == 0 && open == close && open > 20, "%d, %d, %d", wrong, open, close);
    CHECK(strstr(text, ">a&#60;b&#62;&#38;\"'gr???? ]]&#62; ??&#60;!--: linear in f32 (level list)</text>") && !strstr(text, "]]>"));
    CHECK(strstr(text, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"") == text && strstr(text, "</svg>\n"));
    amp_model_destroy(m);
    if (!getenv("TEST_KEEP")) remove(SVG);      /* `make check` has a parser read it */
}

/* A layer whose outputs overflow is named, and its row is red; so is the last gradient that does, where no output is to
   blame. A step says the same. */
static void test_report_names_the_culprit(void) {
    int i;
    for (i = 0; i < 2; i++) {
        model t = make_model(AMP_O2, AMP_F16, 0.0f, 0);
        amp_batch b = full_batch();
        amp_step_info info;
        amp_param* p = amp_model_find_param(t.m, "conv2d1.weight");
        size_t k;
        if (i == 0) for (k = 0; k < p->count; k++) p->master[k] = k % 2 ? 6e4f : -6e4f;
        if (i == 0) CHECK(amp_model_sync_params(t.m) == AMP_OK);
        if (i == 1) CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 1e30f) == AMP_OK);
        printed_report(t.m, &b);
        CHECK_MSG(strstr(text, i ? "; inf or NaN begin in the output gradients of 'linear1'\n"
                               : "; inf or NaN begin in the outputs of 'conv2d1'\n"), "%s", text);
        CHECK(amp_report_svg(t.m, &b, SVG) == AMP_OK);
        CHECK(strstr(read_file(SVG), " class=\"bad\">outputs<") ? i == 0 : i == 1);
        CHECK(strstr(text, " class=\"bad\">output gradients<") != NULL);
        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
        CHECK(info.outcome == (i ? AMP_STEP_SKIPPED_OVERFLOW : AMP_STEP_SKIPPED_MODEL));
        CHECK_MSG(strcmp(info.culprit, i ? info.overflow.last_name : "conv2d1") == 0, "%s: %s", info.culprit, info.message);
        CHECK(i == 0 || strcmp(info.culprit, "linear1.bias") == 0);
        for (k = 0; i == 1 && k < 200 && info.outcome != AMP_STEP_APPLIED; k++) CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
        CHECK(i == 0 || (info.outcome == AMP_STEP_APPLIED && info.culprit[0] == 0));
        amp_model_destroy(t.m);
    }
    remove(SVG);
}

/* Gradients of which a twentieth or more becomes 0 are marked, and none else; the exponents have numbers, and FP16's
   range is shaded as far as the rows go. */
static void test_report_marks_underflow(void) {
    int i;
    for (i = 0; i < 2; i++) {
        model t = make_model(AMP_O0, AMP_F16, 0.0f, 0);
        amp_batch b = full_batch();
        const char* shade;
        int from, deep, height;
        CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), i ? 1e-9f : 1.0f) == AMP_OK);
        printed_report(t.m, &b);
        CHECK(strstr(text, "\n                         2^-40     2^-30     2^-20     2^-10     2^0       2^10      \n"));
        CHECK(amp_report_svg(t.m, &b, SVG) == AMP_OK);
        CHECK((strstr(read_file(SVG), " class=\"bad\">output gradients<") != NULL) == i);
        CHECK(!strstr(text, " class=\"bad\">outputs<") && strstr(text, "prefers-color-scheme:dark"));
        CHECK(strstr(text, "<text x=\"150\" ") && strstr(text, ">2^-40</text>") && strstr(text, ">2^10</text>"));
        shade = strstr(text, "d=\"M294 ");
        CHECK(shade && sscanf(shade, "d=\"M294 %dh360v%dh", &from, &deep) == 2);
        CHECK(sscanf(strstr(text, " height=\"") + 9, "%d", &height) == 1);
        CHECK_MSG(from > 100 && from + deep > height - 60 && from + deep < height - 20, "%d %d %d", from, deep, height);
        amp_model_destroy(t.m);
    }
    remove(SVG);
}

static void test_report_errors(void) {
    model t = make_model(AMP_O1, AMP_F16, 0.0f, 2);
    amp_model_desc d;
    amp_model* m = NULL;
    amp_batch b = full_batch();
    FILE* full = fopen("/dev/full", "w");
    CHECK(amp_report_svg(NULL, &b, SVG) == AMP_ERR_ARGUMENT && amp_report_print(NULL, &b, stdout) == AMP_ERR_ARGUMENT);
    CHECK(amp_report_svg(t.m, NULL, SVG) == AMP_ERR_ARGUMENT && strstr(heard, "batch is NULL"));
    CHECK(amp_report_svg(t.m, &b, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "no path"));
    CHECK(amp_report_svg(t.m, &b, "") == AMP_ERR_ARGUMENT && amp_report_print(t.m, &b, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_report_svg(t.m, &b, "no/such/directory/x.svg") == AMP_ERR_IO);
    CHECK_MSG(strstr(heard, "file: cannot save 'no/such/directory/x.svg': "), "%s", heard);
    CHECK(amp_report_svg(t.m, &b, ".") == AMP_ERR_IO && strstr(heard, "not a regular file"));
    if (full) {
        setvbuf(full, NULL, _IONBF, 0);
        CHECK(amp_report_print(t.m, &b, full) == AMP_ERR_IO);
        fclose(full);
    }
    CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK && amp_report_svg(t.m, &b, SVG) == AMP_ERR_STATE);
    CHECK(fopen(SVG, "rb") == NULL);
    amp_model_destroy(t.m);
    memset(&d, 0, sizeof d);
    d.batch = 1; d.logger.log = listen;
    CHECK(amp_model_create(&m, &d) == AMP_OK && amp_report_print(m, &b, stdout) == AMP_ERR_STATE);
    CHECK_MSG(strstr(heard, "report: the model is not finalized"), "%s", heard);
    amp_model_destroy(m);
}

/* --- history ---------------------------------------------------------------------------------- */

static amp_step_info step_of(amp_outcome outcome, float loss, float scale, double norm, const char* culprit) {
    amp_step_info s;
    memset(&s, 0, sizeof s);
    s.outcome = outcome; s.loss = loss; s.scale_before = scale; s.grad_norm = norm;
    snprintf(s.culprit, sizeof s.culprit, "%s", culprit);
    return s;
}
static const char* printed_history(const amp_history* h) {
    FILE* f = tmpfile();
    text[0] = 0;
    if (!f) { TEST_SKIP("no temporary file"); return text; }
    CHECK(amp_history_print(h, f) == AMP_OK);
    return read_back(f);
}
/* A row's bars. */
static const char* row_of(const char* name) {
    static char row[AMP_HISTORY_STEPS + 1];
    char begin[40];
    const char* at;
    snprintf(begin, sizeof begin, "\n  %-22s|", name);
    at = strstr(text, begin);
    memset(row, 0, sizeof row);
    if (at) memcpy(row, at + strlen(begin), AMP_HISTORY_STEPS);
    return row;
}

/* Where the column of operators begins in each of the ten lines of layers. */
static void check_columns(const char* line, size_t column) {
    for (int i = 0; i < 10; i++) {
        const char* end = strchr(line, '\n');
        CHECK_MSG(end && line[column] != ' ' && line[column - 1] == ' ', "%.200s", line);
        if (!end) return;
        line = end + 1;
    }
}

/* Names as PyTorch's, of 127 bytes that are equal but for the last: a table keeps its columns, who is blamed is told in
   full, and files keep the names. */
static void test_long_names(void) {
    static amp_history h;
    static char name[2][128];
    for (int i = 0; i < 2; i++) {
        memset(name[i], '.', 127);
        memcpy(name[i], "encoder.layers.10.self_attn.q_proj", 34);
        name[i][126] = (char)('a' + i);
    }
    name_of_conv = name[0];
    name_of_dense = name[1];
    for (int i = 0; i < 2; i++) {
        model t = make_model(AMP_O2, AMP_F16, 0.0f, 0);
        amp_batch b = full_batch();
        amp_step_info info;
        amp_param* p = amp_model_params(t.m, NULL);
        char blamed[160];
        int count = 0;
        FILE* f = tmpfile();
        if (!f) { TEST_SKIP("no temporary file"); amp_model_destroy(t.m); break; }
        CHECK(amp_model_print(t.m, f) == AMP_OK);
        read_back(f);
        check_columns(strchr(text, '\n') + 1, 128);
        for (size_t k = 0; i == 0 && k < p->count; k++) p->master[k] = k % 2 ? 6e4f : -6e4f;
        CHECK(amp_model_sync_params(t.m) == AMP_OK);
        if (i == 1) CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 1e30f) == AMP_OK);
        printed_report(t.m, &b);
        snprintf(blamed, sizeof blamed, "; inf or NaN begin in the output%s of '%s'\n", i ? " gradients" : "s", name[i]);
        CHECK_MSG(strstr(text, blamed), "%s", text);

        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
        snprintf(blamed, sizeof blamed, i ? "%s.bias" : "%s", name[i]);
        CHECK_MSG(strcmp(info.culprit, blamed) == 0 && strstr(info.message, blamed), "%s: %s", info.culprit, info.message);
        memset(&h, 0, sizeof h);
        amp_history_add(&h, &info);
        printed_history(&h);
        CHECK_MSG(row_of(i ? "encod...........b.bias" : "encod................a")[0] == '@', "%s", text);
        CHECK(amp_checkpoint_save(t.m, SVG) == AMP_OK && amp_checkpoint_load(t.m, SVG) == AMP_OK);
        CHECK_MSG(amp_checkpoint_load_weights(t.m, SVG, &count) == AMP_OK && count == 8, "%d", count);
        amp_model_destroy(t.m);
    }
    name_of_conv = name_of_dense = NULL;
    remove(SVG);
}

static void test_history_wraps(void) {
    static amp_history h;
    amp_step_info s;
    int i, kept = AMP_HISTORY_STEPS, all = AMP_HISTORY_STEPS + 5;
    memset(&h, 0, sizeof h);
    feclearexcept(FE_ALL_EXCEPT);
    CHECK(strstr(printed_history(&h), "the last 0 of 0 steps\n") && strspn(row_of("loss"), " ") == (size_t)kept);
    for (i = 0; i < all; i++) {
        s = step_of(i % 2 ? AMP_STEP_ACCUMULATED : AMP_STEP_APPLIED, (float)i, 1024.0f, 0.0, "");
        amp_history_add(&h, &s);
        s.outcome = AMP_STEP_APPLIED;
        if (i % 2) amp_history_add(&h, &s);
        if (i == 2) CHECK(h.count == 3 && strstr(printed_history(&h), "0 to 2\n") && row_of("loss")[2] == '@' && row_of("loss")[3] == ' ');
    }
    CHECK(h.count == (uint64_t)all && h.steps[0].loss == (float)kept && h.steps[5].loss == 5.0f);
    printed_history(&h);
    snprintf(heard, sizeof heard, "the last %d of %d steps\n", kept, all);
    CHECK_MSG(strstr(text, heard), "%s", text);
    snprintf(heard, sizeof heard, "5 to %d\n", all - 1);                /* step 5 is the oldest that is left */
    CHECK(strstr(text, heard) && row_of("loss")[0] == '.' && row_of("loss")[kept - 1] == '@');
    CHECK(strstr(text, "\n                         6         16        26 "));     /* the numbers of steps */
    CHECK(strstr(text, "10 to 10\n") && strspn(row_of("log2 of gradient norm"), " ") == (size_t)kept);
    amp_history_add(NULL, &s); amp_history_add(&h, NULL);
    CHECK(h.count == (uint64_t)all && !fetestexcept(FE_DIVBYZERO | FE_INVALID));
}

/* A skipped step has its mark in its culprit's row, and a gap where it has no norm. */
static void test_history_marks_culprits(void) {
    static amp_history h;
    static const struct { amp_outcome outcome; const char* culprit; } steps[] = {
        { AMP_STEP_SKIPPED_OVERFLOW, "fc<1>.weight" }, { AMP_STEP_SKIPPED_OVERFLOW, "fc<1>.weight" }, { AMP_STEP_APPLIED, "" },
        { AMP_STEP_SKIPPED_MODEL, "conv" }, { AMP_STEP_APPLIED, "fc<1>.weight" }, { AMP_STEP_SKIPPED_OVERFLOW, "fc<1>.weight" } };
    amp_step_info s;
    amp_file_desc d;
    int i;
    memset(&h, 0, sizeof h);
    memset(&d, 0, sizeof d);
    d.logger = &LISTENER;
    for (i = 0; i < COUNT(steps); i++) {
        double norm = steps[i].outcome == AMP_STEP_APPLIED ? 8.0 : (double)inf;
        s = step_of(steps[i].outcome, i == 3 ? nan_value() : 2.0f, ldexpf(1.0f, 20 - i), norm, steps[i].culprit);
        amp_history_add(&h, &s);
    }
    printed_history(&h);
    CHECK_MSG(strncmp(row_of("fc<1>.weight"), "@@   @ ", 7) == 0 && strstr(text, "| skipped: overflow, 3 times\n"), "%s", text);
    CHECK(strncmp(row_of("conv"), "   @   ", 7) == 0 && strstr(text, "| skipped: model, 1 times\n"));
    CHECK(strncmp(row_of("loss"), "@@@ @@ ", 7) == 0);
    CHECK(strncmp(row_of("log2 of gradient norm"), "  @ @  ", 7) == 0 && strstr(text, "3 to 3\n") && strstr(text, "15 to 20\n"));
    CHECK(amp_history_svg(&h, SVG, NULL) == AMP_OK);
    CHECK(strstr(read_file(SVG), ">fc&#60;1&#62;.weight</text>") && strstr(text, ">skipped: overflow, 3 times</text>"));
    snprintf(h.steps[3].culprit, sizeof h.steps[3].culprit, "]]>\xff\xc3\x02<![CDATA[");     /* a caller's own */
    CHECK(amp_history_svg(&h, SVG, NULL) == AMP_OK && strstr(read_file(SVG), ">]]&#62;???&#60;![CDATA[</text>"));
    CHECK(amp_history_svg(NULL, SVG, NULL) == AMP_ERR_ARGUMENT && amp_history_print(NULL, stdout) == AMP_ERR_ARGUMENT);
    CHECK(amp_history_print(&h, NULL) == AMP_ERR_ARGUMENT && amp_history_svg(&h, NULL, &d) == AMP_ERR_ARGUMENT);
    check_refused(AMP_ERR_ARGUMENT, AMP_ERR_ARGUMENT, "file: no path is given");
    CHECK(amp_history_svg(&h, "no/such/directory/x.svg", &d) == AMP_ERR_IO);
    CHECK_MSG(strstr(heard, "file: cannot save 'no/such/directory/x.svg': "), "%s", heard);
    if (!getenv("TEST_KEEP")) remove(SVG);
}

/* --- numbers in texts ------------------------------------------------------------------------------- */

/* Writes numbers with a decimal comma from here on; 0 if no such locale is there. glibc's localedef makes one. */
static int set_decimal_comma(void) {
    static const char* const names[] = { "de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "de_DE", "German_Germany.1252" };
    int i, set = 0;
    for (i = 0; i < COUNT(names) && !set; i++) set = setlocale(LC_ALL, names[i]) && *localeconv()->decimal_point == ',';
#if defined(__GLIBC__)
    char folder[] = "/tmp/amp_report_XXXXXX", name[60], command[200];
    FILE* f;
    if (set || !mkdtemp(folder)) return set;
    snprintf(name, sizeof name, "%s/map", folder);
    if ((f = fopen(name, "w")) != NULL) {
        fputs("<code_set_name> ASCII\n<comment_char> %\n<escape_char> /\nCHARMAP\n", f);
        for (i = 0; i < 128; i++) fprintf(f, "<U%04X> /x%02x c\n", (unsigned)i, (unsigned)i);
        fputs("END CHARMAP\n", f);
        fclose(f);
    }
    snprintf(name, sizeof name, "%s/source", folder);
    if ((f = fopen(name, "w")) != NULL) {
        fputs("LC_NUMERIC\ndecimal_point \",\"\nthousands_sep \".\"\ngrouping 3;3\nEND LC_NUMERIC\n", f);
        fclose(f);
    }
    snprintf(command, sizeof command, "cd %s && localedef -c -f ./map -i ./source ./comma > log 2>&1", folder);
    set = system(command) >= 0 && setenv("LOCPATH", folder, 1) == 0 && setlocale(LC_ALL, "comma");
    unsetenv("LOCPATH");
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) == 0 && set;
#else
    return set;
#endif
}

static char fit_line[300];
static void keep_line(const char* line, void* user_data) {
    (void)user_data;
    snprintf(fit_line, sizeof fit_line, "%s", line);
}

/* Whatever amp.h writes with numbers in it, one after the other: pictures, texts, a refusal, a step's message. */
static void write_everything(char* out, size_t size) {
    static amp_history h;
    model t = make_model(AMP_O2, AMP_F16, 0.25f, 0);
    amp_batch b = full_batch();
    amp_data data;
    amp_fit_desc fit;
    amp_step_info info;
    amp_stats s;
    FILE* f = tmpfile();
    size_t n = 0;
    int i;
    memset(&h, 0, sizeof h);
    memset(&s, 0, sizeof s);
    memset(&fit, 0, sizeof fit);
    memset(&data, 0, sizeof data);
    s.smallest = 2.93874e-39f; s.largest = 1234.5f; s.suggested_scale = 0.5f;
    data.count = N; data.inputs[0] = pictures; data.targets[0] = labels;
    fit.evaluation = &data; fit.print = keep_line;
    CHECK_MSG(amp_report_svg(t.m, &b, SVG) == AMP_OK, "%s", amp_model_error(t.m));
    n += (size_t)snprintf(out + n, size - n, "%s", read_file(SVG));
    n += (size_t)snprintf(out + n, size - n, "%s", printed_report(t.m, &b));
    for (i = 0; i < 3; i++) { CHECK(amp_train_step(t.m, &b, &info) == AMP_OK); amp_history_add(&h, &info); }
    CHECK(amp_history_svg(&h, SVG, NULL) == AMP_OK);
    n += (size_t)snprintf(out + n, size - n, "%s", read_file(SVG));
    if (f) {
        CHECK(amp_model_print(t.m, f) == AMP_OK && amp_stats_print(&s, f) == AMP_OK);
        n += (size_t)snprintf(out + n, size - n, "%s", read_back(f));
    }
    CHECK(amp_fit(t.m, &data, &fit, NULL) == AMP_OK);
    CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 2.5e-39f) == AMP_ERR_ARGUMENT);
    n += (size_t)snprintf(out + n, size - n, "%s%s\n", fit_line, heard);
    CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 1e38f) == AMP_OK && amp_train_step(t.m, &b, &info) == AMP_OK);
    n += (size_t)snprintf(out + n, size - n, "%s\n", info.message);
    CHECK_MSG(n < size, "%lu", (unsigned long)n);
    amp_model_destroy(t.m);
    remove(SVG);
}

/* A program's locale changes no picture and no text. */
static void test_no_decimal_comma(void) {
    static char plain[60000], comma[60000];
    size_t n;
    write_everything(plain, sizeof plain);
    CHECK(strstr(plain, "M154.5 ") && strstr(plain, "|x| 2.93874e-39 to 1234.5\n") && strstr(plain, ": 2.5e-39 must be"));
    if (!set_decimal_comma()) { TEST_SKIP("no locale with a decimal comma"); return; }
    snprintf(comma, sizeof comma, "%g", 1.5);
    CHECK_MSG(strcmp(comma, "1,5") == 0, "%s", comma);
    write_everything(comma, sizeof comma);
    setlocale(LC_ALL, "C");
    for (n = 0; plain[n] && plain[n] == comma[n]; n++) {}
    CHECK_MSG(plain[n] == comma[n], "...%.60s", comma + (n < 30 ? 0 : n - 30));
}

/* The same digits as printf's %g, of every exponent, ties and carries among them. */
static void test_numbers_are_printfs(void) {
    static const uint32_t bits[] = { 0, 1, 2, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u, 0x7fc00000u, 0x49742408u /* 1000000.5 */,
        0x4996b43au /* 1234567.25 */, 0x501502f9u /* 9.9999999e9 */, 0x447a0000u, 0x38d1b717u /* 1e-4 */, 0x38d1b716u, 0x3dcccccdu, 0x3f7fffffu,
        0x49742404u /* 1000000.25 */, 0x497423f8u /* 999999.5 */, 0x497423f0u, 0x47c35008u /* 100000.0625 */, 0x48f423f8u };
    amp_stats s;
    int i, k;
    memset(&s, 0, sizeof s);
    for (i = 0; i < 2000; i++) {
        FILE* f = tmpfile();
        char want[100];
        uint32_t x[3];
        if (!f) { TEST_SKIP("no temporary file"); return; }
        for (k = 0; k < 3; k++) x[k] = i < COUNT(bits) ? bits[i] ^ (uint32_t)k << 31 : (test_random() << 16 ^ test_random());
        if (i % 2 && i >= COUNT(bits)) put_bits(&s.smallest, to_bits((float)(int)(x[0] % 20000000) * 0.5f));    /* ties */
        else put_bits(&s.smallest, x[0]);
        put_bits(&s.largest, x[1]);
        put_bits(&s.suggested_scale, x[2] & 0x7fffffffu);
        if (s.largest != s.largest) put_bits(&s.largest, to_bits(s.largest) & 0x7fffffffu);   /* printf may print its sign */
        if (s.smallest != s.smallest) put_bits(&s.smallest, to_bits(s.smallest) & 0x7fffffffu);
        CHECK(amp_stats_print(&s, f) == AMP_OK);
        read_back(f);
        snprintf(want, sizeof want, "|x| %g to %g\n", (double)s.smallest, (double)s.largest);
        CHECK_MSG(strstr(text, want), "%.120s, not %s", text, want);
        snprintf(want, sizeof want, "suggested scale %g\n", (double)s.suggested_scale);
        CHECK_MSG(strstr(text, want), "%.200s, not %s", text, want);
    }
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    int i;
    for (i = 0; i < N * 36; i++) pictures[i] = test_uniform();
    for (i = 0; i < N; i++) labels[i] = i % 3;
    TEST(test_f32_for_half);
    TEST(test_ends_of_the_histogram);
    TEST(test_every_half);
    TEST(test_every_bfloat16);
    TEST(test_f64);
    TEST(test_adding);
    TEST(test_suggested_scale);
    TEST(test_model_stats_change_nothing);
    TEST(test_model_stats_are_right);
    TEST(test_model_stats_errors);
    TEST(test_print_model);
    TEST(test_print_groups);
    TEST(test_print_casts);
    TEST(test_print_stats);
    TEST(test_no_flags);
    TEST(test_report_has_the_numbers);
    TEST(test_picture_is_svg);
    TEST(test_report_names_the_culprit);
    TEST(test_long_names);
    TEST(test_report_marks_underflow);
    TEST(test_report_errors);
    TEST(test_history_wraps);
    TEST(test_history_marks_culprits);
    TEST(test_numbers_are_printfs);
    TEST(test_no_decimal_comma);
    TEST_END();
}
