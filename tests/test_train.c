/* test_train.c - the training step: learning at every level, skipped steps that leave no trace, accumulation, replay, ranks,
   evaluation, dropout, and the same bits whatever runs beside it. */
#define AMP_BACKEND_API
#include "small_model.h"
#include <math.h>

/* -Ofast promises no bits and no NaN in arithmetic; what is checked on the bits of stored values must hold all the same. */
#if defined(FAST_MATH) || defined(__FAST_MATH__)
enum { FAST = 1 };
#else
enum { FAST = 0 };
#endif

/* --- a small problem --------------------------------------------------------------------- */

/* Three kinds of 8x8 picture: a bright row, a bright column, a bright diagonal, with noise. */
enum { SIDE = TOY_SIDE, PIXELS = SIDE * SIDE, SAMPLES = 24, CLASSES = TOY_CLASSES };
static float pictures[SAMPLES * PIXELS];
static int32_t labels[SAMPLES];
static float wishes[SAMPLES * CLASSES];      /* the labels as targets for MSE */

static void make_pictures(void) {
    int s, i;
    test_seed = 7;
    for (s = 0; s < SAMPLES; s++) {
        int kind = s % CLASSES, at = (int)(test_random() % SIDE);
        for (i = 0; i < PIXELS; i++) pictures[s * PIXELS + i] = 0.25f * test_uniform();
        for (i = 0; i < SIDE; i++) pictures[s * PIXELS + (kind == 0 ? at * SIDE + i : kind == 1 ? i * SIDE + at : i * SIDE + (i + at) % SIDE)] += 1.0f;
        labels[s] = kind;
        for (i = 0; i < CLASSES; i++) wishes[s * CLASSES + i] = i == kind ? 1.0f : 0.0f;
    }
}
static amp_batch batch_of(int first, int n) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = n;
    b.inputs[0] = pictures + first * PIXELS;
    b.targets[0] = labels + first;
    return b;
}

static amp_model_desc toy_desc(int batch, amp_level level, amp_dtype low) {
    amp_model_desc d = model_desc(batch, level, low);
    d.optimizer.lr = 0.05f;
    d.optimizer.momentum = 0.9f;
    d.seed = 5;
    return d;
}

/* --- everything that a step may change ------------------------------------------------------ */

enum { SNAP = 65536 };
typedef struct snapshot { size_t n; unsigned char bytes[SNAP]; } snapshot;
static void snap_bytes(snapshot* s, const void* p, size_t n) {
    if (!p || s->n + n > SNAP) { CHECK(p == NULL); return; }
    memcpy(s->bytes + s->n, p, n);
    s->n += n;
}
static void snap_params(snapshot* s, amp_model* m) {
    int i, count;
    const amp_param* p = amp_model_params(m, &count);
    for (i = 0; i < count; i++) {
        snap_bytes(s, p[i].master, p[i].count * 4);
        snap_bytes(s, p[i].low, p[i].count * 2);
        snap_bytes(s, p[i].m, p[i].count * 4);
        snap_bytes(s, p[i].v, p[i].count * 4);
    }
}
/* Weights, moments, optimizer counters; and the running statistics, by what the model answers in evaluation. */
static void snap(snapshot* s, toy t) {
    amp_batch b = batch_of(0, 3);
    float out[3 * 8 * 9 * 4];
    const amp_optimizer_state* o = &amp_model_optimizer(t.m)->state;
    s->n = 0;
    snap_params(s, t.m);
    snap_bytes(s, &o->step, sizeof o->step);
    snap_bytes(s, &o->lr, sizeof o->lr);
    CHECK(amp_predict(t.m, &b, t.v[2], out) == AMP_OK);
    snap_bytes(s, out, 3 * 4 * 36 * 4);
    CHECK(amp_predict(t.m, &b, t.v[10], out) == AMP_OK);
    snap_bytes(s, out, 3 * CLASSES * 4);
}
static snapshot snap_a, snap_b, snap_c;
static int same(const snapshot* a, const snapshot* b) {
    return a->n == b->n && memcmp(a->bytes, b->bytes, a->n) == 0;
}

static float steps(toy t, int count, int n) {
    amp_step_info info;
    int i;
    memset(&info, 0, sizeof info);
    for (i = 0; i < count; i++) {
        amp_batch b = batch_of(i * n % SAMPLES, n);
        CHECK_MSG(amp_train_step(t.m, &b, &info) == AMP_OK, "%s", amp_model_error(t.m));
    }
    return info.loss;
}

/* --- learning ---------------------------------------------------------------------------------- */

static void test_learning(void) {
    static const struct { amp_optimizer_kind kind; float lr, momentum; const char* name; } kinds[] = {
        { AMP_SGD, 0.5f, 0.0f, "SGD" }, { AMP_SGD, 0.05f, 0.9f, "momentum" }, { AMP_ADAM, 0.01f, 0.0f, "Adam" },
        { AMP_ADAMW, 0.01f, 0.0f, "AdamW" }, { AMP_LAMB, 0.02f, 0.0f, "LAMB" },
        { AMP_RMSPROP, 0.01f, 0.0f, "RMSprop" }, { AMP_RMSPROP, 0.005f, 0.9f, "RMSprop with momentum" } };
    int k, level, low, style;
    for (k = 0; k < COUNT(kinds); k++)
        for (level = 0; level <= 3; level++)
            for (low = AMP_F16; low <= AMP_BF16; low++)
                for (style = 0; style <= (level == 1); style++) {
                    amp_model_desc d = toy_desc(SAMPLES, (amp_level)level, (amp_dtype)low);
                    amp_batch b = batch_of(0, SAMPLES);
                    amp_eval_info before, after;
                    toy t;
                    if (level == 3) d.grad_dtype = (amp_dtype)low;       /* half to the end, as Apex's O3 */
                    d.precision.style = (amp_style)style;
                    d.optimizer.kind = kinds[k].kind; d.optimizer.lr = kinds[k].lr; d.optimizer.momentum = kinds[k].momentum;
                    t = make_toy(&d, 1, 0.0f);
                    steps(t, 1, SAMPLES);               /* batch norm has seen something */
                    amp_evaluate(t.m, &b, &before);
                    steps(t, 40, SAMPLES);
                    amp_evaluate(t.m, &b, &after);
                    CHECK_MSG(after.loss < 0.7f * before.loss && after.correct > 16,
                              "%s %s %s: loss %g, then %g with %d right", kinds[k].name,
                              amp_level_name((amp_level)level), amp_dtype_name((amp_dtype)low), (double)before.loss,
                              (double)after.loss, (int)after.correct);
                    CHECK(amp_model_optimizer(t.m)->state.step + amp_model_scaler(t.m)->state.skipped == 41);
                    CHECK((amp_model_params(t.m, NULL)[0].master == NULL) == (level == 3));
                    amp_model_destroy(t.m);
                }
}

/* Ten bytes a weight: bfloat16, 16 bits beside, a gradient and two moments in bfloat16; what is FP32 takes 16 less what
   its moments and gradient save. It learns, and weights go out and in bit for bit. */
static void test_ten_bytes(void) {
    static const amp_dtype moments[] = { AMP_F32, AMP_BF16 };
    int k, i, count;
    for (k = 0; k < 2; k++) {
        amp_model_desc d = toy_desc(SAMPLES, AMP_O2, AMP_BF16);
        amp_batch b = batch_of(0, SAMPLES);
        amp_eval_info before, after;
        amp_memory memory;
        size_t low = 0, high = 0;
        amp_param* p;
        toy t;
        d.grad_dtype = AMP_BF16;
        d.split_masters = 1;
        d.moment_dtype = moments[k];
        d.optimizer.kind = AMP_ADAMW; d.optimizer.lr = 0.01f; d.optimizer.beta2 = 0.95f;
        t = make_toy(&d, 1, 0.0f);
        p = amp_model_params(t.m, &count);
        for (i = 0; i < count; i++) *(p[i].low ? &low : &high) += p[i].count;
        CHECK(amp_model_memory(t.m, &memory) == AMP_OK && low > 0 && high > 0);
        CHECK_MSG(memory.parameter_bytes - (2 * low + 4 * high) < 64u * (unsigned)count, "%ld", (long)memory.parameter_bytes);
        CHECK(memory.low_parameter_bytes - 2 * low < 64u * (unsigned)count);
        CHECK(memory.optimizer_bytes - (k ? 4 : 8) * (low + high) < 128u * (unsigned)count);
        steps(t, 1, SAMPLES);
        amp_evaluate(t.m, &b, &before);
        steps(t, 40, SAMPLES);
        amp_evaluate(t.m, &b, &after);
        CHECK_MSG(after.loss < 0.7f * before.loss && after.correct > 16, "loss %g, then %g", (double)before.loss, (double)after.loss);
        for (i = 0; i < count; i++) {
            float w[2][2000];
            size_t j;
            CHECK(p[i].count <= 2000 && (p[i].rest != NULL) == (p[i].low != NULL) && !p[i].master == (p[i].low != NULL));
            for (j = 0; j < p[i].count; j++) w[0][j] = test_uniform();
            CHECK(amp_model_write_param(t.m, &p[i], w[0]) == AMP_OK && amp_model_read_param(t.m, &p[i], w[1]) == AMP_OK);
            CHECK(memcmp(w[0], w[1], 4 * p[i].count) == 0);
        }
        amp_model_destroy(t.m);
    }
}

/* What a level brings when the user gives no scaler. */
static void test_default_scaler(void) {
    int level, low;
    for (level = 0; level <= 3; level++)
        for (low = AMP_F16; low <= AMP_BF16; low++) {
            amp_model_desc d = toy_desc(4, (amp_level)level, (amp_dtype)low);
            toy t = make_toy(&d, 1, 0.0f);
            int dynamic = low == AMP_F16 && (level == 1 || level == 2);
            CHECK(amp_model_scaler(t.m)->rule.is_static == !dynamic
                  && amp_model_scaler(t.m)->state.scale == (dynamic ? 65536.0f : 1.0f));
            amp_model_destroy(t.m);
        }
}

/* A layer put in half by hand needs the scaler of a level that does so: its gradients underflow as theirs do. */
static void test_default_scaler_of_half_layers(void) {
    amp_policy policy;
    int level, how, low;
    for (level = 0; level <= 3; level++)
        for (low = AMP_F16; low <= AMP_BF16; low++)
            for (how = 0; how < 4; how++) {
                amp_model_desc d = toy_desc(4, (amp_level)level, (amp_dtype)low);
                amp_model* m;
                amp_value x;
                int half = how > 0, dynamic;
                if (how == 3) {
                    CHECK(amp_policy_init(&policy, &d.precision) == AMP_OK);
                    CHECK(amp_policy_set_rule(&policy, AMP_OP_LINEAR, AMP_RULE_LOW) == AMP_OK);
                    d.policy = &policy;
                    half = level == 0 || low == AMP_F16;
                }
                dynamic = level != 3 && (half || (level && low == AMP_F16));
                m = new_model(&d);
                x = amp_relu(m, amp_linear(m, amp_input(m, PIXELS, 1, 1), 4));
                if (how == 1) amp_autocast_push(m, AMP_F16);
                x = amp_linear(m, x, CLASSES);
                if (how == 1) amp_autocast_pop(m);
                if (how == 2) amp_pin(m, x, AMP_F16);
                amp_softmax_cross_entropy(m, x);
                CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
                CHECK_MSG(amp_model_scaler(m)->state.scale == (dynamic ? 65536.0f : 1.0f), "O%d %d %d: %g", level, low, how,
                          (double)amp_model_scaler(m)->state.scale);
                amp_model_destroy(m);
            }
}

/* Three dense layers. Where the backward pass overflows, all layers before it do, and the last of them is named. */
static void test_where_it_began(void) {
    static const struct { float scale, second; const char *last, *piece; } row[3] = {
        { 16777216.0f, 1.0f, "linear3.bias", ", nearest to the loss in linear3.bias; loss scale 16777216" },
        { 64.0f, 30000.0f, "linear1.bias", ", nearest to the loss in linear1.bias; loss scale 64" },
        { 64.0f, 1.0f, "", "" } };
    static const float x[2] = { 1.0f, 1.0f }, zeros[2] = { 0.0f, 0.0f }, target = -30.0f;
    float ones[4], second[4];
    int i, k;
    for (i = 0; i < 3; i++) {
        amp_model_desc d = toy_desc(1, AMP_O2, AMP_F16);
        amp_scaler_desc s;
        amp_step_info info;
        amp_batch b;
        amp_model* m;
        amp_value v;
        memset(&s, 0, sizeof s);
        memset(&b, 0, sizeof b);
        s.init_scale = row[i].scale;
        d.scaler = &s;
        b.n = 1;
        b.inputs[0] = x;
        b.targets[0] = &target;
        m = new_model(&d);
        v = amp_linear(m, amp_linear(m, amp_input(m, 2, 1, 1), 2), 2);
        amp_mse(m, amp_linear(m, v, 1));
        CHECK(amp_model_finalize(m) == AMP_OK);
        for (k = 0; k < 4; k++) { ones[k] = 0.5f; second[k] = k % 2 ? -row[i].second : row[i].second; }
        CHECK(amp_model_write_param(m, amp_model_find_param(m, "linear1.weight"), ones) == AMP_OK);
        CHECK(amp_model_write_param(m, amp_model_find_param(m, "linear2.weight"), second) == AMP_OK);
        CHECK(amp_model_write_param(m, amp_model_find_param(m, "linear3.weight"), ones) == AMP_OK);
        for (k = 0; k < 3; k++) CHECK(amp_model_write_param(m, amp_model_params(m, NULL) + 2 * k + 1, zeros) == AMP_OK);
        CHECK(amp_train_step(m, &b, &info) == AMP_OK);
        CHECK_MSG(strcmp(info.overflow.last_name, row[i].last) == 0 && strstr(info.message, row[i].piece), "%d: %s: %s", i,
                  info.overflow.last_name, info.message);
        CHECK(strcmp(info.overflow.first_name, i < 2 ? "linear1.weight" : "") == 0);
        CHECK(info.overflow.last_tensor == (i == 0 ? 5 : i == 1 ? 1 : -1));
        amp_model_destroy(m);
    }
}

static void test_step_info(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    toy t;
    int i;
    d.optimizer.schedule.kind = AMP_SCHEDULE_LINEAR;
    d.optimizer.schedule.total_steps = 10;
    d.optimizer.clip_norm = 1e-3f;
    t = make_toy(&d, 1, 0.0f);
    for (i = 0; i < 4; i++) {
        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
        CHECK(info.outcome == AMP_STEP_APPLIED && info.attempts == 1 && info.step == i + 1 && info.skipped == 0);
        CHECK(info.lr == amp_schedule_lr(&d.optimizer.schedule, 0.05f, i) && info.message[0] == 0);
        CHECK(info.scale_before == 65536.0f && info.scale_after == 65536.0f);
        CHECK(info.grad_norm > 1e-3 && info.grad_norm < 100.0 && info.overflow.found_inf == 0
              && info.overflow.first_tensor == -1);
        CHECK(info.loss > 0.1f && info.loss < 3.0f);
    }
    CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK && amp_model_optimizer(t.m)->state.step == 5);
    amp_model_destroy(t.m);
    CHECK(strcmp(amp_outcome_name(AMP_STEP_APPLIED), "applied") == 0);
    CHECK(strcmp(amp_outcome_name(AMP_STEP_ACCUMULATED), "accumulated") == 0);
    CHECK(strcmp(amp_outcome_name(AMP_STEP_SKIPPED_OVERFLOW), "skipped: overflow") == 0);
    CHECK(strcmp(amp_outcome_name(AMP_STEP_SKIPPED_MODEL), "skipped: model") == 0);
    CHECK(strcmp(amp_outcome_name((amp_outcome)99), "?") == 0);
}

/* What the update cannot do is told with the step, and to the logger once of each kind. The bias of a layer before a
   sigmoid may be as large as it likes. */
static void test_update_overflows(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    amp_param* bias;
    toy t;
    int i;
    const uint32_t nan_bits = 0x7fc00000u;
    float stays, values[16];
    uint16_t low;
    t = make_toy(&d, 1, 0.0f);
    bias = &amp_model_optimizer(t.m)->params[7];
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.update_overflows + info.saturated == 0 && !info.message[0]);
    for (i = 0; i < 2; i++) {
        heard[0] = 0;
        bias->master[2] = 70000.0f;
        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
        CHECK(info.saturated == 1 && info.update_overflows == 0 && info.step == 2 + i);
        CHECK(strstr(info.message, "the first is element 2 of '") && strstr(info.message, bias->name));
        CHECK(i == 0 ? strncmp(heard, "train step: 1 weights", 21) == 0 && strstr(heard, info.message) : heard[0] == 0);
        memcpy(&low, (uint16_t*)bias->low + 2, sizeof low);
        CHECK(low == 0x7bff);
    }
    bias->master[2] = 0;
    stays = bias->master[3];
    memcpy((float*)bias->m + 3, &nan_bits, sizeof nan_bits);
    for (i = 0; i < 2; i++) {
        heard[0] = 0;
        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
        CHECK(info.update_overflows == 1 && info.saturated == 0 && bias->master[3] == stays);
        CHECK(strncmp(info.message, "the update overflows: 1 weights stay", 36) == 0 && strstr(info.message, bias->name));
        CHECK(i == 0 ? strstr(heard, info.message) != NULL : heard[0] == 0);
    }
    ((float*)bias->m)[3] = 0;
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && !info.message[0] && bias->master[3] != stays);
    CHECK(amp_model_read_param(t.m, bias, values) == AMP_OK);
    values[5] = -70000.0f;
    CHECK(amp_model_write_param(t.m, bias, values) == AMP_OK && bias->master[5] == -70000.0f);
    memcpy(&low, (uint16_t*)bias->low + 5, sizeof low);
    CHECK(low == 0xfbff);
    bias->master[6] = 1e30f;
    CHECK(amp_model_sync_params(t.m) == AMP_OK);
    memcpy(&low, (uint16_t*)bias->low + 6, sizeof low);
    CHECK(low == 0x7bff);
    amp_model_destroy(t.m);
}

/* Running statistics that would be infinite stay, and the step says so: with all its micro-batches, until there are none,
   to the logger once. A frozen norm has none to hold. */
static void test_held_statistics(void) {
    enum { WIDE = 3 };
    int k, i, step;
    for (k = 0; k < 4; k++) {                   /* plain, two micro-batches, frozen, momentum 0 */
        amp_model_desc d = toy_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
        amp_norm_desc norm;
        float x[4 * WIDE], y[4 * WIDE], out[4 * WIDE];
        amp_step_info info, again;
        amp_value v;
        amp_batch b;
        amp_model* m;
        memset(&norm, 0, sizeof norm);
        norm.frozen = k == 2;
        if (k == 3) norm.momentum = AMP_ZERO;
        d.accumulate = k == 1 ? 2 : 1;
        m = new_model(&d);
        v = amp_batch_norm_with(m, amp_input(m, WIDE, 1, 1), &norm);
        amp_name(m, v, "norm");
        amp_mse(m, amp_batch_norm(m, amp_linear(m, v, WIDE)));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        memset(&b, 0, sizeof b);
        b.n = 4; b.inputs[0] = x; b.targets[0] = y;
        remarks = 0;
        for (step = 0; step < 4; step++) {
            const int large = step < 2, held = k < 2 && large;
            for (i = 0; i < 4 * WIDE; i++) {
                x[i] = (float)(i / WIDE) * (large && i % WIDE == 1 && k != 2 ? 1e20f : 1.0f);
                y[i] = 0.5f * (float)(i % 5);
            }
            heard[0] = 0;
            CHECK(amp_train_step(m, &b, &info) == AMP_OK);
            if (k == 1) {
                CHECK(info.outcome == AMP_STEP_ACCUMULATED && info.held_statistics == 0 && !info.message[0]);
                for (i = 0; i < 4 * WIDE; i++) x[i] = (float)(i / WIDE);
                CHECK(amp_train_step(m, &b, &info) == AMP_OK);
            }
            CHECK(info.outcome == AMP_STEP_APPLIED && info.held_statistics == (uint64_t)held);
            CHECK_MSG(held ? strcmp(info.message, "the running statistics of 1 channels stay as they were, where those of the batch are "
                                    "not finite; the first is channel 1 of 'norm'") == 0 && strcmp(info.culprit, "norm") == 0
                           : !info.message[0] && !info.culprit[0], "%d %d: %s", k, step, info.message);
            CHECK(held && step == 0 ? strncmp(heard, "train step: ", 12) == 0 && strcmp(heard + 12, info.message) == 0 : !heard[0]);
            CHECK(amp_train_read(m, &again) == AMP_OK && again.held_statistics == info.held_statistics
                  && strcmp(again.message, info.message) == 0);
            if (step == 1) {
                CHECK(amp_predict(m, &b, v, out) == AMP_OK);
                for (i = 1; i < 4 * WIDE && k == 0; i += WIDE)
                    CHECK(x[i] == 0.0f || fabsf(out[i]) > 1e19f);      /* mean 0, variance 1 still */
            }
        }
        CHECK(remarks == (k < 2));
        amp_model_destroy(m);
    }
}

/* --- skipped steps -------------------------------------------------------------------------------- */

/* A scale at which every half gradient overflows: 2^40 times a gradient of 1e-3 is far above 65504. */
static amp_scaler_desc huge_scale(void) {
    amp_scaler_desc s;
    memset(&s, 0, sizeof s);
    s.init_scale = 1099511627776.0f;
    return s;
}

static void test_overflow_leaves_no_trace(void) {
    static const amp_optimizer_kind kinds[] = { AMP_SGD, AMP_ADAMW, AMP_LAMB };
    int k, level;
    for (k = 0; k < 3; k++)
        for (level = 1; level <= 3; level++) {
            amp_model_desc d = toy_desc(8, (amp_level)level, AMP_F16);
            amp_batch b = batch_of(0, 8);
            amp_scaler_desc s = huge_scale();
            amp_step_info info;
            toy t;
            d.optimizer.kind = kinds[k];
            d.optimizer.lr = 0.01f;
            if (kinds[k] != AMP_SGD) d.optimizer.momentum = 0.0f;
            d.optimizer.schedule.kind = AMP_SCHEDULE_COSINE;
            d.optimizer.schedule.total_steps = 20;
            d.scaler = &s;
            t = make_toy(&d, 1, 0.0f);
            CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 64.0f) == AMP_OK);
            steps(t, 3, 8);                                     /* moments and statistics are not zero any more */
            CHECK(amp_model_optimizer(t.m)->state.step == 3);
            CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 1099511627776.0f) == AMP_OK);
            snap(&snap_a, t);
            CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
            snap(&snap_b, t);
            CHECK_MSG(same(&snap_a, &snap_b), "optimizer %d at O%d", k, level);
            CHECK(info.outcome == AMP_STEP_SKIPPED_OVERFLOW && info.attempts == 1 && info.step == 3
                  && info.skipped == 1);
            CHECK(info.scale_before == 1099511627776.0f && info.scale_after == 549755813888.0f);
            CHECK(amp_model_scaler(t.m)->state.scale == 549755813888.0f);
            CHECK(info.overflow.found_inf == 1 && info.overflow.inf_count + info.overflow.nan_count > 0
                  && info.overflow.first_tensor >= 0);
            CHECK_MSG(strstr(info.message, info.overflow.first_name) && strstr(info.message, "1099511627776"), "%s",
                      info.message);
            CHECK(info.overflow.last_tensor >= info.overflow.first_tensor && strstr(info.message, info.overflow.last_name));
            CHECK(info.grad_norm > 1e300 && info.loss > 0.0f && info.loss < 10.0f);
            /* The schedule has not moved: the next applied step has the rate of step 3. */
            CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 64.0f) == AMP_OK);
            CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
            CHECK(info.outcome == AMP_STEP_APPLIED && info.step == 4
                  && info.lr == amp_schedule_lr(&d.optimizer.schedule, 0.01f, 3));
            snap(&snap_b, t);
            CHECK(!same(&snap_a, &snap_b));
            amp_model_destroy(t.m);
        }
}

/* A run with skipped steps among the others ends in the same bits as the run without them. */
static void test_skips_change_nothing_later(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_scaler_desc s;
    float* poison = (float*)malloc(8 * PIXELS * sizeof *poison);
    toy a, b;
    int i;
    memset(&s, 0, sizeof s);
    s.preset = AMP_SCALER_STATIC;
    s.init_scale = 256.0f;
    d.scaler = &s;
    memcpy(poison, pictures, 8 * PIXELS * sizeof *poison);
    poison[77] = (float)HUGE_VAL;
    a = make_toy(&d, 1, 0.0f);
    b = make_toy(&d, 1, 0.0f);
    for (i = 0; i < 6; i++) {
        amp_batch good = batch_of(8 * (i % 3), 8), bad = good;
        amp_step_info info;
        bad.inputs[0] = poison;
        CHECK(amp_train_step(a.m, &good, NULL) == AMP_OK);
        if (i % 2) {
            CHECK(amp_train_step(b.m, &bad, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_MODEL);
            CHECK(info.scale_after == 256.0f);
        }
        CHECK(amp_train_step(b.m, &good, NULL) == AMP_OK);
        snap(&snap_a, a);
        snap(&snap_b, b);
        CHECK_MSG(same(&snap_a, &snap_b), "step %d", i);
    }
    free(poison);
    amp_model_destroy(a.m);
    amp_model_destroy(b.m);
}

static void test_replay(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_scaler_desc s = huge_scale();
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    toy t, calm;
    d.scaler = &s;
    d.max_replays = 60;
    t = make_toy(&d, 1, 0.0f);
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
    CHECK(info.outcome == AMP_STEP_APPLIED && info.attempts > 5 && info.step == 1
          && info.skipped == info.attempts - 1);
    CHECK(info.scale_after * ldexpf(1.0f, info.attempts - 1) == 1099511627776.0f && info.message[0] == 0
          && info.grad_norm < 100.0);
    /* The same as a model that had this scale from the start. */
    s.init_scale = info.scale_after;
    calm = make_toy(&d, 1, 0.0f);
    CHECK(amp_train_step(calm.m, &b, &info) == AMP_OK && info.attempts == 1);
    snap(&snap_a, t);
    snap(&snap_b, calm);
    CHECK(same(&snap_a, &snap_b));
    amp_model_destroy(t.m);
    amp_model_destroy(calm.m);
    /* Fewer replays than needed: the step is skipped in the end. */
    s = huge_scale();
    d.max_replays = 2;
    t = make_toy(&d, 1, 0.0f);
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW
          && info.attempts == 3);
    CHECK(info.skipped == 3 && info.step == 0 && info.scale_after == 1099511627776.0f / 8.0f);
    amp_model_destroy(t.m);
}

/* inf or NaN that the model makes by itself is told apart from a scale that is too high, and the layer is named. */
static void test_model_trouble(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    float* poison = (float*)malloc(8 * PIXELS * sizeof *poison);
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    amp_param* p;
    toy t;
    int i;
    d.max_replays = 5;                      /* no replay will be tried */
    t = make_toy(&d, 1, 0.0f);
    steps(t, 2, 8);
    snap(&snap_a, t);
    memcpy(poison, pictures, 8 * PIXELS * sizeof *poison);
    poison[130] = (float)HUGE_VAL - (float)HUGE_VAL;
    b.inputs[0] = poison;
    remarks = 0;
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
    CHECK(info.outcome == AMP_STEP_SKIPPED_MODEL && info.attempts == 1 && info.step == 2 && info.skipped == 1);
    CHECK(info.overflow.unsound == 1 && info.scale_after == info.scale_before && remarks == 1 && strstr(heard, info.message));
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && remarks == 1);    /* the same cause is told once */
    CHECK_MSG(strstr(info.message, "nan") && strstr(info.message, "'input1'") && strstr(info.message, "130"), "%s",
              info.message);
    snap(&snap_b, t);
    CHECK(same(&snap_a, &snap_b));
    poison[130] = 1e6f;                     /* finite, but not in half */
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_MODEL && remarks == 1);
    CHECK_MSG(strstr(info.message, "inf") && strstr(info.message, "'input1'"), "%s", info.message);
    /* Weights so large that a channel of the second convolution overflows; the sigmoid behind it makes everything finite
       again, so that loss and logits look well, but the gradient of the dense layer between is 0 * inf. */
    b = batch_of(0, 8);
    p = amp_model_find_param(t.m, "conv2d2.weight");
    for (i = 0; i < 36; i++) p->master[i] = 60000.0f;
    p = amp_model_find_param(t.m, "linear1.weight");
    for (i = 0; i < (int)p->count; i++) p->master[i] = 0.01f;
    CHECK(amp_model_sync_params(t.m) == AMP_OK);
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
    CHECK_MSG(amp_is_finite(amp_f32(&info.loss)) && info.outcome == AMP_STEP_SKIPPED_MODEL && info.attempts == 1,
              "%s: %s", amp_outcome_name(info.outcome), info.message);
    CHECK_MSG(strstr(info.message, "inf") && strstr(info.message, "'conv2d2'"), "%s", info.message);
    CHECK(info.scale_after == info.scale_before && remarks == 2 && amp_model_scaler(t.m)->state.consecutive_unsound == 4);
    free(poison);
    amp_model_destroy(t.m);
}

/* In a window of micro-batches the batch that does it may be long gone when the step ends. */
static void test_model_trouble_early(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    float* poison = (float*)malloc(8 * PIXELS * sizeof *poison);
    amp_batch b = batch_of(0, 8), good = b;
    amp_step_info info;
    toy t;
    d.accumulate = 3;
    t = make_toy(&d, 1, 0.0f);
    steps(t, 3, 8);
    snap(&snap_a, t);
    memcpy(poison, pictures, 8 * PIXELS * sizeof *poison);
    poison[7] = (float)HUGE_VAL - (float)HUGE_VAL;
    b.inputs[0] = poison;
    CHECK(amp_train_step(t.m, &good, &info) == AMP_OK && info.outcome == AMP_STEP_ACCUMULATED);
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_ACCUMULATED);
    CHECK(amp_train_step(t.m, &good, &info) == AMP_OK);
    if (FAST) CHECK(info.outcome == AMP_STEP_SKIPPED_MODEL || info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    else CHECK_MSG(info.outcome == AMP_STEP_SKIPPED_MODEL && strstr(info.message, "'input1'") && strstr(info.message, "element 7"), "%s",
                   info.message);
    snap(&snap_b, t);
    CHECK(same(&snap_a, &snap_b));
    CHECK(amp_train_step(t.m, &good, &info) == AMP_OK && amp_train_step(t.m, &good, &info) == AMP_OK
          && amp_train_step(t.m, &good, &info) == AMP_OK);
    CHECK(info.outcome == AMP_STEP_APPLIED && info.message[0] == 0);
    free(poison);
    amp_model_destroy(t.m);
}

/* tanh takes an infinite input of an early micro-batch in: its loss is finite, and nobody can look at it when the step ends.
   That is not to be blamed on the loss scale alone. */
static void test_model_trouble_unseen(void) {
    int accumulate;
    for (accumulate = 1; accumulate <= 2; accumulate++) {
        amp_model_desc d = toy_desc(1, AMP_O1, AMP_F16);
        const int32_t label = 0;
        float x[2];
        amp_model* m = NULL;
        amp_step_info info;
        amp_batch b;
        int k;
        x[0] = (float)HUGE_VAL; x[1] = 1.0f;
        d.accumulate = accumulate;
        m = new_model(&d);
        amp_softmax_cross_entropy(m, amp_linear(m, amp_tanh(m, amp_linear(m, amp_input(m, 1, 1, 1), 4)), 2));
        CHECK(amp_model_finalize(m) == AMP_OK);
        for (k = 0; k < accumulate; k++) {
            memset(&b, 0, sizeof b);
            b.n = 1; b.inputs[0] = &x[k]; b.targets[0] = &label;
            CHECK(amp_train_step(m, &b, &info) == AMP_OK && amp_is_finite(amp_f32(&info.loss)));
        }
        CHECK(info.outcome == (accumulate == 1 ? AMP_STEP_SKIPPED_MODEL : AMP_STEP_SKIPPED_OVERFLOW));
        CHECK_MSG((strstr(info.message, "earlier micro-batch") != NULL) == (accumulate == 2), "%s", info.message);
        amp_model_destroy(m);
    }
}

static void test_bad_target(void) {
    amp_model_desc d = toy_desc(2, AMP_O0, AMP_DTYPE_DEFAULT);
    float x[4] = { 1, 2, 3, 4 }, target[2] = { 1, 0 };
    amp_model* m = NULL;
    amp_batch b;
    amp_step_info info;
    target[1] = (float)HUGE_VAL - (float)HUGE_VAL;
    m = new_model(&d);
    amp_mse(m, amp_linear(m, amp_input(m, 2, 1, 1), 1));
    CHECK(amp_model_finalize(m) == AMP_OK);
    memset(&b, 0, sizeof b);
    b.n = 2; b.inputs[0] = x; b.targets[0] = target;
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_MODEL);
    CHECK_MSG(strstr(info.message, "targets"), "%s", info.message);
    amp_model_destroy(m);
}

/* A layer whose weights overflow in half: each step is skipped, the scale stays, and more than 20 in a row are an error. A
   sound batch breaks the row; the weights' repair, too. */
static void test_dead_model(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    amp_param* p;
    toy t;
    int i;
    d.max_replays = 3;
    t = make_toy(&d, 1, 0.0f);
    p = amp_model_find_param(t.m, "linear2.weight");
    for (i = 0; i < (int)p->count; i++) p->master[i] = 30000.0f;
    CHECK(amp_model_sync_params(t.m) == AMP_OK);
    remarks = 0;
    for (i = 1; i <= 22; i++) {
        amp_result r = amp_train_step(t.m, &b, &info);
        CHECK_MSG(r == (i <= 20 ? AMP_OK : AMP_ERR_OVERFLOW), "step %d: %s", i, amp_result_string(r));
        CHECK(info.outcome == AMP_STEP_SKIPPED_MODEL && info.attempts == 1 && info.skipped == i && info.scale_after == 65536.0f);
        CHECK_MSG(strstr(info.message, "'linear2'"), "%s", info.message);
    }
    CHECK(remarks == 1 && strstr(amp_model_error(t.m), "max_unsound is 20"));
    for (i = 0; i < (int)p->count; i++) p->master[i] = 0.1f;
    CHECK(amp_model_sync_params(t.m) == AMP_OK && amp_train_step(t.m, &b, &info) == AMP_OK);
    CHECK(info.outcome == AMP_STEP_APPLIED && amp_model_scaler(t.m)->state.consecutive_unsound == 0);
    amp_model_destroy(t.m);
}

/* inf in every tenth batch, for longer than the default scaler took to come down to 0. */
static void test_bad_batches(void) {
    amp_model_desc d = toy_desc(1, AMP_O2, AMP_F16);
    float x[2] = { 1.0f, 0.5f }, bad[2] = { 1.0f, 0.5f }, target = 0.25f;
    amp_linear_desc linear;
    amp_model* m = NULL;
    amp_batch b;
    int i, applied = 0;
    bad[1] = (float)HUGE_VAL;
    d.optimizer.lr = 1e-3f;
    memset(&linear, 0, sizeof linear);
    linear.out_features = 1;
    linear.init = AMP_INIT_ZERO;
    m = new_model(&d);
    amp_mse(m, amp_linear_with(m, amp_input(m, 2, 1, 1), &linear));
    CHECK(amp_model_finalize(m) == AMP_OK);
    memset(&b, 0, sizeof b);
    b.n = 1; b.targets[0] = &target;
    for (i = 0; i < 3000; i++) {
        amp_step_info info;
        b.inputs[0] = i % 10 == 9 ? bad : x;
        CHECK(amp_train_step(m, &b, &info) == AMP_OK);
        applied += info.outcome == AMP_STEP_APPLIED;
    }
    CHECK_MSG(applied == 2700 && amp_model_scaler(m)->state.scale >= 65536.0f, "%d applied, scale %g", applied,
              (double)amp_model_scaler(m)->state.scale);
    amp_model_destroy(m);
}

/* Targets of 1e20: in FP32 the loss is infinite, the gradient is not. A scaler that ignores overflows applies such a step, and
   that somebody had a look at the first micro-batch must not show in the running statistics; any other skips it. */
static void test_looking_leaves_statistics(void) {
    amp_model_desc d = toy_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    float x[12], target[12], out[3][12];
    amp_scaler_desc s;
    amp_step_info info;
    int k, i;
    memset(&s, 0, sizeof s);
    s.preset = AMP_SCALER_MINDSPORE_FIXED; s.init_scale = 1.0f;
    d.accumulate = 2; d.optimizer.lr = (float)AMP_ZERO; d.scaler = &s;
    for (i = 0; i < 12; i++) x[i] = (float)i;
    for (k = 0; k < 3; k++) {
        s.ignore_overflow = k < 2;
        amp_model* m = NULL;
        amp_value v;
        amp_batch b;
        m = new_model(&d);
        v = amp_batch_norm(m, amp_input(m, 3, 1, 1));
        amp_mse(m, v);
        CHECK(amp_model_finalize(m) == AMP_OK);
        for (i = 0; i < 12; i++) target[i] = k ? 1e20f : 1.0f;
        memset(&b, 0, sizeof b);
        b.n = 4; b.inputs[0] = x; b.targets[0] = target;
        CHECK(amp_train_step(m, &b, &info) == AMP_OK && amp_is_inf(amp_f32(&info.loss)) == (k > 0));
        CHECK(amp_train_step(m, &b, &info) == AMP_OK);
        CHECK(info.outcome == (k < 2 ? AMP_STEP_APPLIED : AMP_STEP_SKIPPED_MODEL));
        CHECK(k < 2 || (info.overflow.inf_count + info.overflow.nan_count == 0 && strstr(info.message, "targets")));
        CHECK(amp_predict(m, &b, v, out[k]) == AMP_OK);
        amp_model_destroy(m);
    }
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
}

static void test_floor_and_limits(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_scaler_desc s = huge_scale();
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    toy t;
    int i;
    s.min_scale = 1099511627776.0f;
    d.scaler = &s;
    t = make_toy(&d, 1, 0.0f);
    for (i = 1; i <= 3; i++) {
        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
        CHECK(info.scale_after == 1099511627776.0f && info.skipped == i);
        CHECK_MSG(strstr(info.message, "floor"), "%s", info.message);
    }
    amp_model_destroy(t.m);
    /* DeepSpeed's rule: an error, and the model can go on. Hysteresis 2: the first overflow is still free. */
    s.preset = AMP_SCALER_DEEPSPEED;
    t = make_toy(&d, 1, 0.0f);
    snap(&snap_a, t);
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    CHECK(amp_train_step(t.m, &b, &info) == AMP_ERR_OVERFLOW);
    CHECK_MSG(strstr(amp_model_error(t.m), "floor"), "%s", amp_model_error(t.m));
    CHECK(info.outcome == AMP_STEP_SKIPPED_OVERFLOW && info.skipped == 2 && info.message[0] != 0);
    snap(&snap_b, t);
    CHECK(same(&snap_a, &snap_b));
    CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 128.0f) == AMP_OK);
    CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED && info.step == 1);
    amp_model_destroy(t.m);
    /* A limit on overflows in a row. */
    s = huge_scale();
    s.max_skips = 2;
    t = make_toy(&d, 1, 0.0f);
    for (i = 0; i < 2; i++) CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
    CHECK(amp_train_step(t.m, &b, &info) == AMP_ERR_OVERFLOW && strstr(amp_model_error(t.m), "max_skips"));
    amp_model_destroy(t.m);
}

/* Overflows that only the caller saw drive a scale without a floor to 0, from where it does not come back by itself: an error.
   NaN in the data does not. None of these is another rank's. */
static void test_skips_of_no_gradient(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_scaler_desc s;
    amp_batch good = batch_of(0, 8), bad = good;
    float* nan = (float*)malloc(8 * PIXELS * sizeof *nan);
    amp_step_info info;
    toy t;
    int i;
    for (i = 0; i < 8 * PIXELS; i++) nan[i] = (float)HUGE_VAL - (float)HUGE_VAL;
    bad.inputs[0] = nan;
    memset(&s, 0, sizeof s);
    s.backoff_factor = (double)1e-30f;
    d.scaler = &s;
    t = make_toy(&d, 1, 0.0f);
    CHECK(amp_scaler_report_overflow(amp_model_scaler(t.m)) == AMP_OK);
    CHECK(amp_train_step(t.m, &good, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    CHECK_MSG(strstr(info.message, "amp_scaler_report_overflow"), "%s", info.message);
    CHECK(amp_train_step(t.m, &bad, &info) == AMP_OK && info.scale_after == info.scale_before);
    CHECK(amp_scaler_report_overflow(amp_model_scaler(t.m)) == AMP_OK);
    CHECK(amp_train_step(t.m, &good, &info) == AMP_ERR_OVERFLOW && info.scale_after < 1e-30f);
    CHECK_MSG(strstr(amp_model_error(t.m), "amp_scaler_set_scale brings it back"), "%s", amp_model_error(t.m));
    CHECK(amp_train_step(t.m, &good, &info) == AMP_ERR_OVERFLOW && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    CHECK_MSG(strstr(info.message, "has no finite inverse"), "%s", info.message);
    CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 1024.0f) == AMP_OK);
    CHECK(amp_train_step(t.m, &good, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
    amp_model_destroy(t.m);
    free(nan);
}

/* --- refusals ------------------------------------------------------------------------------------- */

static void test_refusals(void) {
    amp_model_desc d = toy_desc(8, AMP_O1, AMP_F16);
    toy t = make_toy(&d, 1, 0.0f);
    amp_batch good = batch_of(0, 8), b;
    amp_step_info info;
    amp_eval_info eval;
    int32_t wrong[8] = { 0, 1, 2, 0, 1, 3, 0, 0 };
    int k;
    steps(t, 2, 8);
    snap(&snap_a, t);
    for (k = 0; k < 12; k++) {
        amp_result want = k < 7 ? AMP_ERR_ARGUMENT : AMP_ERR_DTYPE;
        const char* word = "";
        b = good;
        if (k == 0) { b.targets[0] = wrong; word = "label 3 of sample 5 is outside 0..2"; }
        if (k == 1) { wrong[5] = -1; b.targets[0] = wrong; word = "label -1 of sample 5"; }
        if (k == 2) { b.n = 0; word = "0 samples"; }
        if (k == 3) { b.n = 9; word = "9 samples"; }
        if (k == 4) { b.n = -1; word = "-1"; }
        if (k == 5) { b.inputs[0] = NULL; word = "inputs[0]"; }
        if (k == 6) { b.targets[0] = NULL; word = "targets[0]"; }
        if (k == 7) { b.input_dtype = (amp_dtype)9; word = "input_dtype"; }
        if (k == 8) { b.input_dtype = AMP_I32; word = "input_dtype is i32 (6)"; }
        if (k == 9) { b.input_dtype = AMP_I64; word = "input_dtype is i64 (7)"; }
        if (k == 10) { b.label_dtype = AMP_F32; word = "label_dtype is f32 (1)"; }
        if (k == 11) { b.label_dtype = (amp_dtype)9; word = "label_dtype is ? (9)"; }
        CHECK(amp_train_step(t.m, &b, &info) == want);
        CHECK_MSG(strstr(amp_model_error(t.m), word), "wanted '%s': %s", word, amp_model_error(t.m));
        CHECK(amp_evaluate(t.m, &b, &eval) == want);
    }
    CHECK(amp_train_step(t.m, NULL, &info) == AMP_ERR_ARGUMENT);
    snap(&snap_b, t);
    CHECK(same(&snap_a, &snap_b));
    CHECK(amp_train_step(t.m, &good, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
    amp_model_destroy(t.m);
}

static amp_result broken_sum(void* data, amp_dtype t, size_t n, void* stream, void* user_data) {
    (void)data; (void)t; (void)n; (void)stream; (void)user_data;
    return AMP_ERR_IO;
}
/* Calls before init or finalize name themselves and what is missing. */
static void test_calls_too_early(void) {
    static const amp_logger ear = { listen, NULL };
    amp_model_desc d = toy_desc(1, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_scaler_desc sd;
    amp_scaler s;
    amp_optimizer zeroed;
    amp_step_info info;
    amp_model* m;
    float x = 0.0f;
    memset(&sd, 0, sizeof sd);
    memset(&zeroed, 0, sizeof zeroed);
    sd.logger = &ear;
    CHECK(amp_scaler_init(&s, &sd) == AMP_OK);
    CHECK(amp_scaler_may_step(&s) == 0 && strstr(heard, "amp_scaler_may_step: nothing was checked"));
    CHECK(amp_optimizer_step(&zeroed, &s, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "amp_optimizer_step: amp_optimizer_init"));
    CHECK(amp_optimizer_unscale(&zeroed, &s) == AMP_ERR_ARGUMENT && strstr(heard, "amp_optimizer_unscale: amp_optimizer_init"));
    m = new_model(&d);
    CHECK(amp_model_read_param(m, NULL, &x) == AMP_ERR_STATE && strstr(heard, "read param: the model is not finalized"));
    CHECK(amp_model_write_param(m, NULL, &x) == AMP_ERR_STATE && strstr(heard, "write param: the model is not finalized"));
    CHECK(amp_train_read(m, &info) == AMP_ERR_STATE && strstr(heard, "train read: the model is not finalized"));
    amp_model_destroy(m);
}

/* An error leaves info as it was, however late it is found. */
static void test_errors_leave_info(void) {
    static const int32_t wrong[8] = { 0, 1, 2, 0, 1, 3, 0, 0 };
    amp_model_desc d = toy_desc(8, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_comm comm = { broken_sum, 0, 2, NULL, NULL, NULL, 0 };
    amp_batch good = batch_of(0, 8), bad = good;
    amp_step_info info, before;
    amp_eval_info eval, eval_before;
    toy alone = make_toy(&d, 1, 0.0f), ranked;
    d.comm = &comm;
    ranked = make_toy(&d, 1, 0.0f);
    memset(&before, 0x5a, sizeof before);
    memset(&eval_before, 0x5a, sizeof eval_before);
    info = before;
    eval = eval_before;
    CHECK(amp_train_step(ranked.m, &good, &info) == AMP_ERR_COMM && memcmp(&info, &before, sizeof info) == 0);
    bad.targets[0] = wrong;
    bad.on_device = 1;
    CHECK(amp_train_step(alone.m, &bad, &info) == AMP_ERR_ARGUMENT && memcmp(&info, &before, sizeof info) == 0);
    CHECK(amp_evaluate(alone.m, &bad, &eval) == AMP_ERR_ARGUMENT && memcmp(&eval, &eval_before, sizeof eval) == 0);
    amp_model_destroy(alone.m);
    amp_model_destroy(ranked.m);
}

/* A processor whose part `broken` fails once. */
static int broken;
static amp_result frail(int part) {
    if (broken != part) return AMP_OK;
    broken = 0;
    return AMP_ERR_DEVICE;
}
static amp_result frail_begin(amp_training* t, int window, const amp_exec* e) {
    amp_result r = frail(1);
    return r == AMP_OK ? amp_cpu_backend()->training_begin(t, window, e) : r;
}
static amp_result frail_upload(amp_ref to, amp_ref from, size_t n, const amp_exec* e) {
    amp_result r = frail(2);
    return r == AMP_OK ? amp_cpu_backend()->upload(to, from, n, e) : r;
}
static amp_result frail_copy_in(void* to, const void* from, size_t n, const amp_exec* e) {
    amp_result r = frail(3);
    return r == AMP_OK ? amp_cpu_backend()->copy_in(to, from, n, e) : r;
}
static amp_result frail_pass(amp_training* t, const amp_exec* e) { (void)t; (void)e; return frail(4); }
static amp_result frail_loss(amp_ref x, const int32_t* label, const amp_cross_entropy_desc* desc,
        float* loss, size_t n, size_t classes, const amp_exec* e) {
    amp_result r = frail(5);
    return r == AMP_OK ? amp_cpu_backend()->softmax_cross_entropy_forward(x, label, desc, loss, n,
        classes, e) : r;
}
static amp_result frail_copy_out(void* to, const void* from, size_t n, const amp_exec* e) {
    amp_result r = frail(6);
    return r == AMP_OK ? amp_cpu_backend()->copy_out(to, from, n, e) : r;
}
static amp_backend frail_backend(void) {
    amp_backend b = *amp_cpu_backend();
    b.training_begin = frail_begin;
    b.upload = frail_upload;
    b.copy_in = frail_copy_in;
    b.training_pass = frail_pass;
    b.softmax_cross_entropy_forward = frail_loss;
    b.copy_out = frail_copy_out;
    return b;
}
/* Wherever a step fails, in its first micro-batch or a later one, the model is what it was before the step: also the running
   statistics, and the numbers that dropout draws next. */
static void check_failed_step(int part, int at, int accumulate) {
    const amp_backend backend = frail_backend();
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_BF16);
    amp_batch b = batch_of(0, 8);
    toy t, twin;
    int i;
    d.backend = &backend; d.accumulate = accumulate;
    t = make_toy(&d, 1, 0.4f);
    twin = make_toy(&d, 1, 0.4f);
    for (i = 0; i < 2 * accumulate; i++)
        CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK && amp_train_step(twin.m, &b, NULL) == AMP_OK);
    for (i = 0; i < at; i++) CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK);
    broken = part;
    CHECK(amp_train_step(t.m, &b, NULL) == AMP_ERR_DEVICE && broken == 0);
    snap(&snap_a, twin);
    snap(&snap_b, t);
    CHECK_MSG(same(&snap_a, &snap_b), "part %d, micro-batch %d of %d", part, at, accumulate);
    CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 1.0f) == AMP_OK);
    for (i = 0; i < accumulate; i++)
        CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK && amp_train_step(twin.m, &b, NULL) == AMP_OK);
    snap(&snap_a, twin);
    snap(&snap_b, t);
    CHECK_MSG(same(&snap_a, &snap_b), "the step after part %d, micro-batch %d of %d", part, at, accumulate);
    amp_model_destroy(t.m);
    amp_model_destroy(twin.m);
}
static void test_failed_steps_leave_nothing(void) {
    int accumulate, at, part;
    for (accumulate = 1; accumulate <= 3; accumulate += 2)
        for (at = 0; at < accumulate; at++)
            for (part = 1; part <= 5 + (at + 1 < accumulate); part++) check_failed_step(part, at, accumulate);
}
/* What can be known before a step is: a refused micro-batch takes none of the earlier ones with it. */
static void test_refused_micro_batches(void) {
    static const int32_t wrong[8] = { 0, 1, 2, 0, 1, 2, 3, 0 };
    const amp_backend backend = frail_backend();
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_BF16);
    amp_batch good = batch_of(0, 8), bad = good;
    amp_step_info info;
    toy t, twin;
    int i;
    d.accumulate = 3; d.backend = &backend;
    t = make_toy(&d, 1, 0.4f);
    twin = make_toy(&d, 1, 0.4f);
    bad.targets[0] = wrong;
    for (i = 0; i < 6; i++) {
        for (bad.on_device = 0; bad.on_device < 2; bad.on_device++) {
            CHECK(amp_train_step(t.m, &bad, &info) == AMP_ERR_ARGUMENT);
            CHECK_MSG(strstr(heard, "label 3 of sample 6"), "%s", heard);
        }
        broken = 6;                                             /* while the labels are fetched */
        CHECK(amp_train_step(t.m, &bad, &info) == AMP_ERR_DEVICE && broken == 0);
        amp_model_optimizer(t.m)->groups[0].lr = -2.0f;
        CHECK(amp_train_step(t.m, &good, &info) == AMP_ERR_ARGUMENT);
        amp_model_optimizer(t.m)->groups[0].lr = 0.0f;
        CHECK(amp_train_step(t.m, &good, &info) == AMP_OK && amp_train_step(twin.m, &good, NULL) == AMP_OK);
        CHECK(info.outcome == (i % 3 < 2 ? AMP_STEP_ACCUMULATED : AMP_STEP_APPLIED));
    }
    snap(&snap_a, twin);
    snap(&snap_b, t);
    CHECK(same(&snap_a, &snap_b));
    amp_model_destroy(t.m);
    amp_model_destroy(twin.m);
}

/* Nothing to learn from, nothing to learn, one value per channel. */
static void test_untrainable(void) {
    amp_model_desc d = toy_desc(2, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_model* m;
    float x[4] = { 1, 2, 3, 4 }, out[8];
    amp_value v;
    amp_batch b;
    amp_step_info info;
    amp_eval_info eval;
    memset(&b, 0, sizeof b);
    b.n = 2; b.inputs[0] = x; b.targets[0] = x;
    m = new_model(&d);
    v = amp_linear(m, amp_input(m, 2, 1, 1), 4);
    CHECK(amp_model_finalize(m) == AMP_OK);                         /* a model for predictions only */
    CHECK(amp_predict(m, &b, v, out) == AMP_OK && amp_evaluate(m, &b, &eval) == AMP_OK && eval.loss == 0.0f);
    CHECK(amp_train_step(m, &b, &info) == AMP_ERR_STATE && strstr(amp_model_error(m), "no loss"));
    amp_model_destroy(m);
    m = new_model(&d);
    amp_mse(m, amp_relu(m, amp_input(m, 2, 1, 1)));
    CHECK(amp_model_finalize(m) == AMP_OK);
    CHECK(amp_evaluate(m, &b, &eval) == AMP_OK && eval.loss == 0.0f);
    CHECK(amp_train_step(m, &b, &info) == AMP_ERR_STATE && strstr(amp_model_error(m), "no parameters"));
    CHECK(amp_model_optimizer(m) == NULL);
    amp_model_destroy(m);
    m = new_model(&d);
    amp_mse(m, amp_batch_norm(m, amp_input(m, 2, 1, 1)));
    CHECK(amp_model_finalize(m) == AMP_OK);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK);
    b.n = 1;
    CHECK(amp_train_step(m, &b, &info) == AMP_ERR_ARGUMENT && strstr(amp_model_error(m), "batch_norm1"));
    CHECK(amp_evaluate(m, &b, &eval) == AMP_OK);
    amp_model_destroy(m);
}

/* A model for predictions alone has weights and what its values need: no gradients, no moments, all groups frozen. */
static void test_predictions_need_no_gradients(void) {
    int level, kind, k;
    for (level = AMP_O0; level <= AMP_O3; level++)
        for (kind = AMP_SGD; kind <= AMP_RMSPROP; kind++) {
            amp_model_desc d = toy_desc(8, (amp_level)level, AMP_BF16);
            amp_param_group groups[2];
            amp_model* m[4];
            amp_memory memory[4];
            amp_value y[4];
            amp_batch b = batch_of(0, 8);
            float out[4][8 * CLASSES], weights[CLASSES * 4];
            amp_param* p;
            int i, count;
            memset(groups, 0, sizeof groups);
            d.optimizer.kind = (amp_optimizer_kind)kind;
            for (k = 0; k < 4; k++) {           /* with a loss, without; with groups in the desc; loaded */
                amp_value x;
                d.optimizer.groups = groups;
                d.optimizer.group_count = k == 2 ? 2 : 0;
                d.seed = k == 3 ? 6 : 5;
                m[k] = new_model(&d);
                x = amp_batch_norm(m[k], amp_linear(m[k], amp_input(m[k], 1, SIDE, SIDE), 4));
                y[k] = amp_linear(m[k], x, CLASSES);
                if (k == 2) amp_group(m[k], y[k], 1);
                if (k == 0) amp_softmax_cross_entropy(m[k], y[k]);
                CHECK_MSG(amp_model_finalize(m[k]) == AMP_OK, "%s", amp_model_error(m[k]));
                CHECK(amp_model_memory(m[k], &memory[k]) == AMP_OK);
            }
            CHECK(memory[0].gradient_bytes > 0 && memory[0].optimizer_bytes > 0);
            CHECK(amp_model_finalize(m[0]) == AMP_ERR_STATE);
            CHECK(amp_checkpoint_save(m[1], "test_train.safetensors") == AMP_OK);
            CHECK(amp_checkpoint_load_weights(m[3], "test_train.safetensors", &count) == AMP_OK && count == 8);
            for (k = 0; k < 4; k++)
                CHECK(amp_predict(m[k], &b, y[k], out[k]) == AMP_OK && memcmp(out[k], out[0], sizeof out[0]) == 0);
            for (k = 1; k < 4; k++) {
                amp_optimizer* o = amp_model_optimizer(m[k]);
                CHECK(memory[k].gradient_bytes == 0 && memory[k].optimizer_bytes == 0);
                CHECK(memory[k].parameter_bytes == memory[0].parameter_bytes
                      && memory[k].low_parameter_bytes == memory[0].low_parameter_bytes);
                p = amp_model_params(m[k], &count);
                for (i = 0; i < count; i++) CHECK(!p[i].grad && !p[i].m && !p[i].v);
                CHECK(count == 6 && o && o->groups[0].frozen && o->desc.group_count == (k == 2 ? 2 : 0));
                o->groups[0].frozen = 0;
                CHECK(amp_train_step(m[k], &b, NULL) == AMP_ERR_STATE && strstr(amp_model_error(m[k]), "no loss"));
                CHECK(amp_optimizer_step(o, NULL, NULL) == AMP_ERR_ARGUMENT);
                CHECK(amp_predict(m[k], &b, y[k], out[0]) == AMP_OK && memcmp(out[k], out[0], sizeof out[0]) == 0);
                p = amp_model_find_param(m[k], "linear2.weight");
                for (i = 0; i < CLASSES * 4; i++) weights[i] = 0.0f;
                CHECK(amp_model_write_param(m[k], p, weights) == AMP_OK && amp_model_sync_params(m[k]) == AMP_OK);
                CHECK(amp_predict(m[k], &b, y[k], out[0]) == AMP_OK && memcmp(out[k], out[0], sizeof out[0]) != 0);
            }
            if (level == AMP_O2) {
                CHECK(amp_checkpoint_load(m[1], "test_train.safetensors") == AMP_OK);
                CHECK(amp_predict(m[1], &b, y[1], out[0]) == AMP_OK && memcmp(out[1], out[0], sizeof out[0]) == 0);
            }
            remove("test_train.safetensors");
            for (k = 0; k < 4; k++) amp_model_destroy(m[k]);
        }
}

/* --- accumulation ------------------------------------------------------------------------------------ */

/* Small whole numbers: every product and sum is exact, so k micro-batches, or two ranks, must give the bits of one batch. */
static float whole_x[8 * 4], whole_t[8 * 2];
static amp_model* whole_model(int batch, int accumulate, const amp_comm* comm) {
    amp_model_desc d;
    amp_model* m = NULL;
    int i;
    memset(&d, 0, sizeof d);
    d.batch = batch; d.accumulate = accumulate; d.comm = comm; d.logger.log = listen;
    d.optimizer.lr = 0.125f; d.optimizer.momentum = 0.5f;
    m = new_model(&d);
    amp_mse(m, amp_linear(m, amp_linear(m, amp_input(m, 4, 1, 1), 3), 2));
    CHECK(amp_model_finalize(m) == AMP_OK);
    for (i = 0; i < 12; i++) amp_model_find_param(m, "linear1.weight")->master[i] = (float)(i % 5 - 2);
    for (i = 0; i < 6; i++) amp_model_find_param(m, "linear2.weight")->master[i] = (float)(i % 3 - 1);
    for (i = 0; i < 3; i++) amp_model_find_param(m, "linear1.bias")->master[i] = (float)(i - 1);
    for (i = 0; i < 2; i++) amp_model_find_param(m, "linear2.bias")->master[i] = (float)(1 - 2 * i);
    for (i = 0; i < 32; i++) whole_x[i] = (float)(i * 7 % 5 - 2);
    for (i = 0; i < 16; i++) whole_t[i] = (float)(i * 5 % 7 - 3);
    return m;
}
static amp_batch whole_batch(int first, int n) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = n; b.inputs[0] = whole_x + 4 * first; b.targets[0] = whole_t + 2 * first;
    return b;
}

static void test_accumulation_exact(void) {
    amp_model *big = whole_model(8, 1, NULL), *small = whole_model(2, 4, NULL);
    amp_batch b = whole_batch(0, 8);
    amp_step_info info;
    int i;
    CHECK(amp_train_step(big, &b, NULL) == AMP_OK);
    for (i = 0; i < 4; i++) {
        b = whole_batch(2 * i, 2);
        snap_a.n = 0; snap_params(&snap_a, small);
        CHECK(amp_train_step(small, &b, &info) == AMP_OK);
        CHECK(info.outcome == (i < 3 ? AMP_STEP_ACCUMULATED : AMP_STEP_APPLIED) && info.step == i / 3);
        snap_b.n = 0; snap_params(&snap_b, small);
        CHECK(same(&snap_a, &snap_b) == (i < 3));
    }
    snap_a.n = 0; snap_params(&snap_a, big);
    CHECK(same(&snap_a, &snap_b));
    amp_model_destroy(big);
    amp_model_destroy(small);
}

/* On a convolutional net sums are formed in another order. A gradient is a sum of at most 24 * 36 terms of either way: they
   differ by at most 2 * 864 * 2^-24 = 1e-4 of the magnitudes, and one step by lr times that; 1e-5 is asked for. */
static void test_accumulation_net(void) {
    amp_model_desc d = toy_desc(24, AMP_O0, AMP_DTYPE_DEFAULT);
    toy big, small;
    amp_step_info info;
    int i, k, count;
    size_t j;
    double worst = 0.0;
    big = make_toy(&d, 0, 0.0f);
    d.batch = 8; d.accumulate = 3;
    small = make_toy(&d, 0, 0.0f);
    steps(big, 5, 24);
    for (i = 0; i < 15; i++) {
        amp_batch b = batch_of(8 * (i % 3), 8);
        float scale = amp_model_scaler(small.m)->state.scale;
        CHECK(amp_train_step(small.m, &b, &info) == AMP_OK);
        CHECK(info.scale_before == scale && info.scale_after == scale && info.step == (i + 1) / 3);
        CHECK(info.outcome == (i % 3 < 2 ? AMP_STEP_ACCUMULATED : AMP_STEP_APPLIED));
    }
    amp_model_params(big.m, &count);
    for (k = 0; k < count; k++)
        for (j = 0; j < amp_model_params(big.m, NULL)[k].count; j++) {
            double e = fabs((double)amp_model_params(big.m, NULL)[k].master[j] - (double)amp_model_params(small.m, NULL)[k].master[j]);
            if (e > worst) worst = e;
        }
    CHECK_MSG(worst < 1e-5, "%g", worst);
    amp_model_destroy(big.m);
    amp_model_destroy(small.m);
}

/* With a scale that wants to grow on every step it still waits for the end of the window, and counts windows. */
static void test_scale_stays_in_window(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_scaler_desc s;
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    toy t;
    int i;
    memset(&s, 0, sizeof s);
    s.init_scale = 16.0f; s.growth_interval = 1;
    d.scaler = &s; d.accumulate = 4;
    t = make_toy(&d, 1, 0.0f);
    for (i = 0; i < 12; i++) {
        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK);
        CHECK(info.scale_before == ldexpf(16.0f, i / 4) && info.scale_after == ldexpf(16.0f, (i + 1) / 4));
        if (i % 4 < 3) CHECK(amp_scaler_set_scale(amp_model_scaler(t.m), 2.0f) == AMP_ERR_STATE);
    }
    /* Evaluation inside a window disturbs nothing. */
    {
        toy u = make_toy(&d, 1, 0.0f), w = make_toy(&d, 1, 0.0f);
        amp_eval_info eval;
        float out[8 * CLASSES];
        for (i = 0; i < 8; i++) {
            CHECK(amp_train_step(u.m, &b, NULL) == AMP_OK && amp_train_step(w.m, &b, NULL) == AMP_OK);
            CHECK(amp_evaluate(u.m, &b, &eval) == AMP_OK && amp_predict(u.m, &b, u.v[10], out) == AMP_OK);
        }
        snap(&snap_a, u); snap(&snap_b, w);
        CHECK(same(&snap_a, &snap_b));
        amp_model_destroy(u.m); amp_model_destroy(w.m);
    }
    amp_model_destroy(t.m);
}

/* --- evaluation and prediction ------------------------------------------------------------------------- */

static void test_evaluation_changes_nothing(void) {
    static const int sizes[TOY_VALUES] = { 64, 144, 144, 144, 36, 72, 72, 16, 16, 16, 3 };
    int level, i;
    for (level = 0; level <= 3; level++) {
        amp_model_desc d = toy_desc(8, (amp_level)level, AMP_BF16);
        toy t = make_toy(&d, 1, 0.25f);
        amp_batch b = batch_of(0, 8);
        amp_scaler before, after;
        amp_eval_info e1, e2;
        float out[8 * 144], logits[8 * CLASSES];
        int correct = 0;
        double loss = 0.0;
        steps(t, 4, 8);
        snap_a.n = 0; snap_params(&snap_a, t.m);
        before = *amp_model_scaler(t.m);
        CHECK(amp_evaluate(t.m, &b, &e1) == AMP_OK);
        b.targets[0] = NULL;
        for (i = 0; i < TOY_VALUES; i++) {
            int k, finite = 1;
            CHECK_MSG(amp_predict(t.m, &b, t.v[i], out) == AMP_OK, "value %d", i);
            for (k = 0; k < 8 * sizes[i]; k++) finite &= amp_is_finite(amp_f32(&out[k]));
            CHECK(finite);
            if (i == 3 || i == 6) {       /* relu works in place, and its input was asked for before */
                for (k = 0; k < 8 * sizes[i]; k++) CHECK(out[k] >= 0.0f);
                CHECK(amp_predict(t.m, &b, t.v[i - 1], out) == AMP_OK);
                for (k = 0, finite = 0; k < 8 * sizes[i]; k++) finite |= out[k] < 0.0f;
                CHECK(finite);
            }
        }
        b.targets[0] = labels;
        CHECK(amp_evaluate(t.m, &b, &e2) == AMP_OK);
        CHECK(e1.loss == e2.loss && e1.correct == e2.correct);
        after = *amp_model_scaler(t.m);
        snap_b.n = 0; snap_params(&snap_b, t.m);
        CHECK(same(&snap_a, &snap_b) && memcmp(&before, &after, sizeof before) == 0);
        /* The loss and the count are those of the logits. */
        CHECK(amp_predict(t.m, &b, t.v[10], logits) == AMP_OK);
        for (i = 0; i < 8; i++) {
            const float* l = logits + 3 * i;
            int best = l[1] > l[0] ? 1 : 0;
            if (l[2] > l[best]) best = 2;
            correct += best == labels[i];
            loss += (log(exp((double)l[0]) + exp((double)l[1]) + exp((double)l[2])) - (double)l[labels[i]]) / 8.0;
        }
        CHECK_MSG(correct == e1.correct && fabs(loss - (double)e1.loss) < 1e-6, "%d %d, %g %g", correct, (int)e1.correct,
                  loss, (double)e1.loss);
        amp_model_destroy(t.m);
    }
}

/* A model of NaNs is right about nothing. */
static void test_nan_is_never_right(void) {
    amp_model_desc d = toy_desc(8, AMP_O0, AMP_DTYPE_DEFAULT);
    toy t = make_toy(&d, 1, 0.0f);
    amp_batch b = batch_of(0, 8);
    amp_eval_info e;
    int i;
    for (i = 0; i < 3; i++) amp_model_find_param(t.m, "linear2.bias")->master[i] = (float)HUGE_VAL - (float)HUGE_VAL;
    CHECK(amp_evaluate(t.m, &b, &e) == AMP_OK && e.correct == 0 && amp_is_nan(amp_f32(&e.loss)));
    amp_model_destroy(t.m);
}

/* Equal logits: the first class is the answer. */
static void test_ties(void) {
    float x[4] = { 1, 2, 3, 4 };
    int32_t answers[2];
    amp_model_desc d;
    amp_linear_desc l;
    amp_model* m;
    amp_batch b;
    amp_eval_info e;
    int k;
    memset(&d, 0, sizeof d);
    memset(&l, 0, sizeof l);
    memset(&b, 0, sizeof b);
    d.batch = b.n = 2;
    l.out_features = 5;
    l.init = AMP_INIT_ZERO;
    b.inputs[0] = x;
    b.targets[0] = answers;
    m = new_model(&d);
    amp_softmax_cross_entropy(m, amp_linear_with(m, amp_input(m, 2, 1, 1), &l));
    CHECK(amp_model_finalize(m) == AMP_OK);
    for (k = 0; k < 5; k++) {
        answers[0] = answers[1] = k;
        CHECK(amp_evaluate(m, &b, &e) == AMP_OK && e.correct == (k == 0 ? 2 : 0));
    }
    amp_model_destroy(m);
}

/* Right answers: labels of a cross-entropy, elements of a BCE by their side of 0 and 1/2, none of an MSE; all are summed. */
static void test_right_answers(void) {
    enum { WIDE = 700, ROWS = 3 };
    static float x[ROWS * 4], targets[ROWS * WIDE], out[ROWS * WIDE];
    static const int32_t answers[ROWS] = { 5, 1, 699 };
    int losses, i, k;
    for (losses = 1; losses < 8; losses++) {            /* bits: 1 cross-entropy, 2 BCE, 4 MSE */
        amp_model_desc d = toy_desc(ROWS, losses & 1 ? AMP_O2 : AMP_O0, AMP_F16);
        amp_batch b;
        amp_eval_info e;
        amp_model* m;
        amp_value logits;
        int correct = 0, predictions = 0;
        memset(&b, 0, sizeof b);
        m = new_model(&d);
        logits = amp_linear(m, amp_input(m, 4, 1, 1), WIDE);
        for (i = 0; i < ROWS * 4; i++) x[i] = test_uniform();
        for (i = 0; i < ROWS * WIDE; i++) targets[i] = (float)(test_random() % 5u) / 4.0f;
        b.n = ROWS;
        b.inputs[0] = x;
        for (i = k = 0; i < 3; i++) {
            if (!(losses >> i & 1)) continue;
            b.targets[k++] = i == 0 ? (const void*)answers : (const void*)targets;
            if (i == 0) amp_softmax_cross_entropy(m, logits);
            else if (i == 1) amp_bce_with_logits(m, logits);
            else amp_mse(m, logits);
        }
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        CHECK(amp_predict(m, &b, logits, out) == AMP_OK);
        for (k = 0; k < ROWS; k++) {
            int best = 0;
            for (i = 0; i < WIDE; i++) {
                const float z = out[k * WIDE + i], t = targets[k * WIDE + i];
                if (z > out[k * WIDE + best]) best = i;
                if (losses & 2) correct += t > 0.5f ? z > 0.0f : z <= 0.0f;
            }
            if (losses & 1) correct += best == answers[k];
        }
        if (losses & 1) predictions += ROWS;
        if (losses & 2) predictions += ROWS * WIDE;
        CHECK_MSG(amp_evaluate(m, &b, &e) == AMP_OK && e.correct == correct && e.predictions == predictions,
                  "losses %d: %d of %d, not %d of %d", losses, (int)e.correct, (int)e.predictions, correct, predictions);
        put_bits(&x[4], 0x7fc00000u);                   /* a NaN is on neither side */
        for (i = 0; i < ROWS * WIDE; i++) targets[i] = 0.0f;
        for (i = correct = 0; i < ROWS * WIDE; i++) correct += i / WIDE != 1 && out[i] <= 0.0f;
        if (losses == 2) CHECK(amp_evaluate(m, &b, &e) == AMP_OK && e.correct == correct && e.predictions == predictions);
        amp_model_destroy(m);
    }
}

/* An evaluation whose loss is not finite says where that began; the logger hears it beside AMP_OK. */
static void test_evaluation_not_finite(void) {
    static float x[3 * 4], targets[3 * 2];
    amp_model_desc d = toy_desc(3, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_batch b;
    amp_eval_info e;
    amp_step_info info;
    amp_model* m;
    amp_param* w;
    amp_value y;
    int i, before;
    memset(&b, 0, sizeof b);
    d.accumulate = 2; d.logger = LISTENER;
    m = new_model(&d);
    y = amp_linear(m, amp_input(m, 4, 1, 1), 2);
    amp_mse(m, y);
    amp_mse(m, y);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
    b.n = 3;
    b.inputs[0] = x;
    b.targets[0] = b.targets[1] = targets;
    memset(&e, 0x5a, sizeof e);
    before = heard_count;
    CHECK(amp_evaluate(m, &b, &e) == AMP_OK && !e.message[0] && !e.culprit[0] && heard_count == before);
    put_bits(&x[1], 0x7fc00000u);                       /* a micro-batch of a training step has found its own */
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_ACCUMULATED);
    CHECK(strstr(heard, "'input1', element 1;"));
    x[1] = 0.0f;
    put_bits(&x[9], 0xff800000u);
    for (i = 0; i < 2; i++) {                           /* each time */
        heard[0] = 0;
        CHECK(amp_evaluate(m, &b, &e) == AMP_OK && heard_code == AMP_OK && strcmp(e.culprit, "input1") == 0);
        CHECK_MSG(strcmp(e.message, "the model produces inf: first in the output of 'input1', element 1 of sample 2") == 0, "%s",
                  e.message);
        CHECK(strncmp(heard, "evaluate: ", 10) == 0 && strcmp(heard + 10, e.message) == 0);
    }
    x[9] = 0.0f;
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_MODEL);
    CHECK_MSG(strstr(info.message, "'input1', element 1;") && strcmp(info.culprit, "input1") == 0, "%s", info.message);
    put_bits(&targets[3], 0x7fc00000u);
    CHECK(amp_evaluate(m, &b, &e) == AMP_OK && strcmp(e.culprit, "mse1") == 0);
    CHECK_MSG(strcmp(e.message, "the loss 'mse1' is nan although every layer's output is finite: look at the targets of samples "
                     "0 to 2") == 0, "%s", e.message);
    for (i = 0; i < 6; i++) targets[i] = 1.5e19f;       /* squares of 2.25e38, whose sum is too large */
    CHECK(amp_evaluate(m, &b, &e) == AMP_OK && !amp_is_finite(amp_f32(&e.loss)) && !e.culprit[0]);
    CHECK_MSG(strcmp(e.message, "the weighted sum of the losses is not finite") == 0, "%s", e.message);
    w = amp_model_find_param(m, "linear1.bias");
    put_bits(&w->master[1], 0x7f800000u);
    CHECK(amp_model_sync_params(m) == AMP_OK && amp_evaluate(m, &b, &e) == AMP_OK && strcmp(e.culprit, "linear1") == 0);
    CHECK_MSG(strstr(e.message, "'linear1', element 1 of sample 0"), "%s", e.message);
    amp_model_destroy(m);
}

/* A batch that is not full gives what a model of just that size gives. */
static void test_smaller_batch(void) {
    int level;
    for (level = 0; level <= 3; level++) {
        amp_model_desc d = toy_desc(24, (amp_level)level, AMP_F16);
        toy large = make_toy(&d, 1, 0.0f), fitting;
        d.batch = 5;
        fitting = make_toy(&d, 1, 0.0f);
        steps(large, 4, 5);
        steps(fitting, 4, 5);
        snap(&snap_a, large);
        snap(&snap_b, fitting);
        CHECK(same(&snap_a, &snap_b));
        amp_model_destroy(large.m);
        amp_model_destroy(fitting.m);
    }
}

/* Inputs of other types are converted: pictures that every type can hold give the same bits. */
/* Labels of any type train as those of int32 do, and what does not fit a class is told. */
static void test_label_types(void) {
    static const int64_t far[4] = { 3, -1, 4294967296, -4294967295 };
    amp_model_desc d = toy_desc(8, AMP_O1, AMP_F16);
    int64_t i64[8];
    uint8_t u8[8];
    int i, k, correct = 0;
    for (i = 0; i < 8; i++) { i64[i] = labels[i]; u8[i] = (uint8_t)labels[i]; }
    for (k = 0; k < 6; k++) {
        toy t = make_toy(&d, 1, 0.0f);
        amp_batch b = batch_of(0, 8);
        amp_eval_info eval;
        b.on_device = k >= 3;
        if (k % 3 == 1) { b.targets[0] = i64; b.label_dtype = AMP_I64; }
        if (k % 3 == 2) { b.targets[0] = u8; b.label_dtype = AMP_U8; }
        for (i = 0; i < 20; i++) CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK);
        CHECK(amp_evaluate(t.m, &b, &eval) == AMP_OK && eval.correct == (k ? correct : eval.correct));
        correct = (int)eval.correct;
        snap(k ? &snap_b : &snap_a, t);
        if (k) CHECK_MSG(same(&snap_a, &snap_b), "%s", amp_dtype_name(b.label_dtype));
        for (i = 0; k % 3 == 1 && i < 4; i++) {
            char word[64];
            i64[6] = far[i];
            snprintf(word, sizeof word, "label %lld of sample 6 is outside 0..2", (long long)far[i]);
            CHECK(amp_train_step(t.m, &b, NULL) == AMP_ERR_ARGUMENT && strstr(amp_model_error(t.m), word));
        }
        i64[6] = labels[6];
        u8[7] = 200;
        if (k % 3 == 2) CHECK(amp_train_step(t.m, &b, NULL) == AMP_ERR_ARGUMENT && strstr(amp_model_error(t.m), "label 200 of sample 7"));
        u8[7] = (uint8_t)labels[7];
        amp_model_destroy(t.m);
    }
}

/* Labels of a batch whose losses all want floats are a mistake: nobody would read them as such. */
static void test_labels_for_floats(void) {
    static const amp_dtype types[] = { AMP_U8, AMP_I32, AMP_I64 };
    int kind, k;
    for (kind = 0; kind < 3; kind++) {
        amp_model_desc d = toy_desc(8, AMP_O0, AMP_DTYPE_DEFAULT);
        amp_batch b = batch_of(0, 8);
        amp_data data;
        amp_eval_info eval;
        amp_value x, y;
        amp_model* m;
        float out[8 * CLASSES];
        m = new_model(&d);
        x = amp_linear(m, amp_input(m, 1, SIDE, SIDE), CLASSES);
        y = kind == 1 ? amp_bce_with_logits(m, x) : amp_mse(m, x);
        amp_name(m, y, "error");
        if (kind == 2) amp_softmax_cross_entropy(m, x);
        CHECK(amp_model_finalize(m) == AMP_OK);
        b.targets[0] = wishes;
        b.targets[1] = labels;
        CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
        memset(&data, 0, sizeof data);
        data.count = 8;
        data.inputs[0] = pictures;
        data.targets[0] = wishes;
        b.label_dtype = AMP_I32;
        if (kind == 2) {                        /* one loss reads them */
            CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
            amp_model_destroy(m);
            continue;
        }
        for (k = 0; k < COUNT(types); k++) {
            char word[160];
            data.label_dtype = b.label_dtype = types[k];
            snprintf(word, sizeof word, "label_dtype is %s, but the loss 'error' reads targets[0] as floats; labels are for "
                     "softmax_cross_entropy", amp_dtype_name(types[k]));
            CHECK(amp_train_step(m, &b, NULL) == AMP_ERR_DTYPE);
            CHECK_MSG(strncmp(heard, "train step: ", 12) == 0 && strcmp(heard + 12, word) == 0, "%s", heard);
            CHECK(amp_evaluate(m, &b, &eval) == AMP_ERR_DTYPE && strncmp(heard, "evaluate: ", 10) == 0);
            CHECK(amp_evaluate_data(m, &data, &eval) == AMP_ERR_DTYPE);
            CHECK_MSG(strstr(heard, word), "%s", heard);
            CHECK(amp_predict(m, &b, x, out) == AMP_OK);
        }
        CHECK(amp_model_optimizer(m)->state.step == 1);
        amp_model_destroy(m);
    }
}

/* Labels of 64 bits handed as the default, 32: the logger hears of it once, and of nothing that only resembles it. */
static void test_labels_of_another_size(void) {
    enum { LONG = 40 };
    amp_model_desc d = toy_desc(24, AMP_O0, AMP_DTYPE_DEFAULT);
    static float images[LONG * PIXELS];
    int i, k;
    for (k = 0; k < 7; k++) {
        toy t = make_toy(&d, 0, 0.0f);
        amp_batch b = batch_of(0, k == 1 ? 15 : 16);
        amp_data data;
        amp_eval_info eval;
        int64_t wide[LONG];
        int32_t narrow[LONG];
        for (i = 0; i < LONG; i++) { wide[i] = k == 2 ? 0 : i % CLASSES; narrow[i] = i % 8 == 7 ? 0 : i % CLASSES; }
        if (k == 3) for (i = 0; i < LONG; i++) narrow[i] = i == 2;      /* one label, which may stand anywhere */
        b.targets[0] = k < 3 || k > 4 ? (const void*)wide : narrow;
        if (k == 5) b.label_dtype = AMP_I32;                            /* said, so meant */
        memset(&data, 0, sizeof data);
        data.count = LONG / 2;
        data.inputs[0] = images;
        data.targets[0] = wide;
        heard[0] = 0;
        remarks = 0;
        for (i = 0; i < 2; i++)
            CHECK((k == 6 ? amp_evaluate_data(t.m, &data, &eval) : amp_train_step(t.m, &b, NULL)) == AMP_OK);
        CHECK_MSG(remarks == (k == 0 || k == 6) && heard_code == AMP_OK, "%d: %d, %s", k, remarks, heard);
        CHECK_MSG(!remarks || strcmp(heard + (k == 6 ? 15 : 12), "every second label of targets[0] is 0: int64 labels need "
            "label_dtype AMP_I64, others AMP_I32") == 0, "%s", heard);
        amp_model_destroy(t.m);
    }
}

/* Inputs as the model sees them: the values of PyTorch for 0, 1, 100 and 255, (x / 255 - 0.1307) / 0.3081, and the bits of
   single operations for three channels of more than one block, whatever the type of the data. */
enum { WIDE_PIXELS = 500, WIDE_INPUT = 2 * 3 * WIDE_PIXELS };
static void see_input(const amp_input_desc* d, amp_level level, amp_batch b, float* out) {
    amp_model_desc md = toy_desc(2, level, AMP_F16);
    amp_value x;
    amp_model* m;
    m = new_model(&md);
    x = amp_input_with(m, d);
    amp_softmax_cross_entropy(m, amp_linear(m, x, CLASSES));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    b.targets[0] = labels;
    CHECK(amp_predict(m, &b, x, out) == AMP_OK && amp_train_step(m, &b, NULL) == AMP_OK);
    amp_model_destroy(m);
}
static void test_images(void) {
    static const uint8_t four[4] = { 0, 1, 100, 255 };
    static const uint32_t divided[4] = { 0x0u, 0x3b808081u, 0x3ec8c8c9u, 0x3f800000u };
    static const uint32_t normal[4] = { 0xbed93271u, 0xbed2ae20u, 0x3f593e88u, 0x4034933du };
    static uint8_t u8[WIDE_INPUT];
    static float f32[WIDE_INPUT], out[WIDE_INPUT];
    static double f64[WIDE_INPUT];
    const float mean[3] = { 0.485f, -3.7f, 0.1307f }, std[3] = { 0.229f, 1.7f, 0.3081f };
    amp_input_desc d;
    amp_batch b;
    int i, k;
    memset(&d, 0, sizeof d);
    memset(&b, 0, sizeof b);
    d.channels = 1; d.height = 2; d.width = 2;
    b.n = 1; b.inputs[0] = four; b.input_dtype = AMP_U8;
    see_input(&d, AMP_O0, b, out);
    CHECK(FAST || memcmp(out, divided, sizeof divided) == 0);
    d.mean = mean + 2; d.std = std + 2;
    see_input(&d, AMP_O0, b, out);
    CHECK(FAST || memcmp(out, normal, sizeof normal) == 0);
    for (i = 0; i < WIDE_INPUT; i++) { u8[i] = (uint8_t)test_random(); f32[i] = u8[i]; f64[i] = u8[i]; }
    d.channels = 3; d.height = 5; d.width = WIDE_PIXELS / 5; d.mean = mean; d.std = std;
    b.n = 2;
    for (k = 0; k < 72; k++) {
        const int type = k % 3, half = k / 3 % 2;
        d.mean = k < 48 ? mean : NULL;
        d.std = k < 24 || k >= 48 ? std : NULL;
        d.scale = k / 12 % 2 ? 0.0f : 0.0123f;
        b.on_device = k / 6 % 2;
        b.inputs[0] = type == 0 ? (const void*)u8 : type == 1 ? (const void*)f32 : (const void*)f64;
        b.input_dtype = type == 0 ? AMP_U8 : type == 1 ? AMP_F32 : AMP_F64;
        see_input(&d, half ? AMP_O2 : AMP_O0, b, out);
        for (i = 0; i < WIDE_INPUT && !FAST; i++) {
            const int c = i / WIDE_PIXELS % 3;
            volatile float v = d.scale != 0.0f ? f32[i] * d.scale : type == 0 ? f32[i] / 255.0f : f32[i];
            if (d.mean) v = v - mean[c];
            if (d.std) v = v / std[c];
            if (half) v = amp_half_to_float(amp_half_from_float(v));
            CHECK_MSG(to_bits(out[i]) == to_bits(v), "%d: %d: %.9g %.9g", k, i, (double)out[i], (double)v);
        }
    }
}

static void test_input_types(void) {
    static float f[8 * PIXELS];
    static double d64[8 * PIXELS];
    static amp_half f16[8 * PIXELS];
    static amp_bfloat16 b16[8 * PIXELS];
    amp_model_desc d = toy_desc(8, AMP_O1, AMP_F16);
    amp_batch b = batch_of(0, 8);
    int i, k;
    for (i = 0; i < 8 * PIXELS; i++) {
        f[i] = (float)((int)(test_random() % 17) - 8) * 0.125f;
        d64[i] = (double)f[i]; f16[i] = amp_half_from_float(f[i]); b16[i] = amp_bfloat16_from_float(f[i]);
    }
    for (k = 0; k < 5; k++) {
        static const amp_dtype types[5] = { AMP_DTYPE_DEFAULT, AMP_F32, AMP_F16, AMP_BF16, AMP_F64 };
        toy t = make_toy(&d, 1, 0.0f);
        b.input_dtype = types[k];
        b.inputs[0] = k < 2 ? (const void*)f : k == 2 ? (const void*)f16 : k == 3 ? (const void*)b16 : (const void*)d64;
        CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK);
        snap(k ? &snap_b : &snap_a, t);
        if (k) CHECK(same(&snap_a, &snap_b));
        amp_model_destroy(t.m);
    }
}

/* --- dropout -------------------------------------------------------------------------------------------- */

/* One sample, x = 1: linear (identity) -> dropout -> linear to one number -> MSE with target 0. The gradient of the last
   weights shows the mask, the loss that the forward pass used it, the gradient of the first ones that the backward pass
   used the same. */
static void test_dropout(void) {
    enum { D = 4000 };
    amp_model_desc desc;
    amp_model* m = NULL;
    amp_linear_desc first, last;
    amp_value x, hidden, dropped, y;
    amp_batch b;
    amp_step_info info;
    static float in[4], target[1], out[D];
    static unsigned char mask[D], old[D];
    amp_param *w1, *w2;
    int i, pass, kept, changed;
    memset(&desc, 0, sizeof desc);
    memset(&first, 0, sizeof first);
    desc.batch = 1; desc.seed = 99; desc.optimizer.lr = (float)AMP_ZERO; desc.logger.log = listen;
    m = new_model(&desc);
    first.out_features = D; first.no_bias = 1;
    last = first; last.out_features = 1;
    x = amp_input(m, 1, 1, 1);
    hidden = amp_linear_with(m, x, &first);
    dropped = amp_dropout(m, hidden, 0.25f);
    y = amp_linear_with(m, dropped, &last);
    amp_mse(m, y);
    CHECK(amp_model_finalize(m) == AMP_OK);
    w1 = amp_model_find_param(m, "linear1.weight"); w2 = amp_model_find_param(m, "linear2.weight");
    for (i = 0; i < D; i++) { w1->master[i] = 1.0f; w2->master[i] = 1.0f / 1024.0f; }
    in[0] = 1.0f;
    memset(&b, 0, sizeof b);
    b.n = 1; b.inputs[0] = in; b.targets[0] = target;
    for (pass = 0; pass < 2; pass++) {
        double sum = 0.0, slope;
        CHECK(amp_train_step(m, &b, &info) == AMP_OK);
        for (i = 0, kept = 0, changed = 0; i < D; i++) {
            mask[i] = ((const float*)w2->grad)[i] != 0.0f;
            kept += mask[i];
            changed += mask[i] != old[i];
            old[i] = mask[i];
            if (mask[i]) sum += (double)(1.0f / 0.75f) / 1024.0;
        }
        /* 4000 draws at 3/4: sd 27; five of those. */
        CHECK_MSG(abs(kept - 3000) < 137, "%d kept", kept);
        CHECK(pass == 0 || (changed > 1300 && changed < 1700));         /* 2 * 3/16 of 4000 = 1500 */
        /* A sum of 3000 positive terms is off by at most 3000 * 2^-24, its square by twice that. */
        CHECK_MSG(fabs((double)info.loss - sum * sum) < 3.6e-4 * sum * sum, "%g %g", (double)info.loss, sum * sum);
        slope = 2.0 * sqrt((double)info.loss) / 1024.0 / 0.75;      /* a handful of roundings away */
        for (i = 0; i < D; i++) {
            double g = (double)((const float*)w1->grad)[i];
            if (mask[i] ? fabs(g - slope) > 1e-6 * slope : g != 0.0) break;
        }
        CHECK_MSG(i == D, "gradient %d is %g, mask %d", i, (double)((const float*)w1->grad)[i], mask[i]);
    }
    CHECK(amp_predict(m, &b, dropped, out) == AMP_OK);
    for (i = 0; i < D && out[i] == 1.0f; i++) {}
    CHECK(i == D);
    amp_model_destroy(m);
}

/* Four micro-batches draw the masks of one batch of four times the size. */
static void test_dropout_in_micro_batches(void) {
    amp_model_desc d = toy_desc(24, AMP_O0, AMP_DTYPE_DEFAULT);
    toy big = make_toy(&d, 0, 0.5f), small;
    amp_step_info info;
    double loss = 0.0, want;
    int i;
    d.batch = 6; d.accumulate = 4;
    small = make_toy(&d, 0, 0.5f);
    want = (double)steps(big, 1, 24);
    for (i = 0; i < 4; i++) {
        amp_batch b = batch_of(6 * i, 6);
        CHECK(amp_train_step(small.m, &b, &info) == AMP_OK);
        loss += (double)info.loss / 4.0;
    }
    CHECK_MSG(fabs(loss - want) < 1e-6 * want, "%.9g %.9g", loss, want);
    amp_model_destroy(big.m);
    amp_model_destroy(small.m);
}

/* --- ranks ------------------------------------------------------------------------------------------------- */

/* Two ranks in one thread. A rank that records gives the hook its gradients and is told that the sum failed: its step is
   taken back. Then each rank runs in earnest and adds what the other has recorded; flags (found_inf, unsound) are known to
   agree unless the test says otherwise. The first sum of a step is that of refused batches. */
typedef struct fake_rank {
    int recording, calls;
    float refused, other_refused;
    float other_flag[2];           /* what the other rank's flags are */
    float mine[4096];
    const float* others;
    size_t count;
    amp_comm comm;
} fake_rank;
static amp_result fake_sum(void* data, amp_dtype t, size_t n, void* stream, void* user) {
    fake_rank* r = (fake_rank*)user;
    float* x = (float*)data;
    size_t i;
    (void)stream;
    CHECK(t == AMP_F32);
    if (r->calls++ == 0) {
        CHECK(n == 1);
        r->refused = x[0];
        x[0] += r->other_refused;
        return AMP_OK;
    }
    if (r->calls == 2) {
        CHECK(n <= 4096);
        r->count = n;
        for (i = 0; i < n; i++) {
            if (r->recording) r->mine[i] = x[i];
            else x[i] += r->others[i];
        }
        return r->recording ? AMP_ERR_IO : AMP_OK;
    }
    CHECK(n == 2 && r->calls == 3);
    x[0] += r->other_flag[0];
    x[1] += r->other_flag[1];
    return AMP_OK;
}
static fake_rank ranks[2];
static void reset_ranks(void) {
    int k;
    memset(ranks, 0, sizeof ranks);
    for (k = 0; k < 2; k++) {
        ranks[k].comm.all_reduce_sum = fake_sum;
        ranks[k].comm.rank = k;
        ranks[k].comm.size = 2;
        ranks[k].comm.user_data = &ranks[k];
        ranks[k].others = ranks[1 - k].mine;
    }
}
/* One step of both; returns 1 if both succeeded. */
static int step_ranks(amp_model* a, const amp_batch* ba, amp_model* b, const amp_batch* bb, amp_step_info info[2]) {
    amp_scaler* s;
    int k;
    for (k = 0; k < 2; k++) {
        ranks[k].recording = 1; ranks[k].calls = 0;
        CHECK(amp_train_step(k ? b : a, k ? bb : ba, &info[k]) == AMP_ERR_COMM);
        CHECK(strstr(amp_model_error(k ? b : a), "ranks") != NULL);
        s = amp_model_scaler(k ? b : a);            /* the window is closed again */
        CHECK(amp_scaler_set_scale(s, s->state.scale) == AMP_OK);
        ranks[k].recording = 0; ranks[k].calls = 0;
    }
    return amp_train_step(a, ba, &info[0]) == AMP_OK && amp_train_step(b, bb, &info[1]) == AMP_OK && ranks[0].calls == ranks[1].calls;
}

static void test_ranks_exact(void) {
    amp_model *one = whole_model(8, 1, NULL), *a, *b;
    amp_batch all = whole_batch(0, 8), ba = whole_batch(0, 4), bb = whole_batch(4, 4);
    amp_step_info info[2];
    reset_ranks();
    a = whole_model(4, 1, &ranks[0].comm);
    b = whole_model(4, 1, &ranks[1].comm);
    CHECK(amp_train_step(one, &all, NULL) == AMP_OK);
    CHECK(step_ranks(a, &ba, b, &bb, info));
    CHECK(info[0].outcome == AMP_STEP_APPLIED && info[1].outcome == AMP_STEP_APPLIED
          && info[0].grad_norm == info[1].grad_norm);
    snap_a.n = snap_b.n = snap_c.n = 0;
    snap_params(&snap_a, one); snap_params(&snap_b, a); snap_params(&snap_c, b);
    CHECK(same(&snap_b, &snap_c));
    CHECK(same(&snap_a, &snap_b));
    amp_model_destroy(one); amp_model_destroy(a); amp_model_destroy(b);
}

/* The convolutional net with dropout: the ranks stay equal bit for bit, and near the one with the double batch (the bound is
   that of test_accumulation_net). */
static void test_ranks_net(void) {
    amp_model_desc d = toy_desc(16, AMP_O1, AMP_BF16);
    toy one, a, b;
    amp_step_info info[2];
    size_t j;
    int i, k, count;
    double worst = 0.0;
    d.precision.level = AMP_O0; d.precision.low_dtype = AMP_DTYPE_DEFAULT;
    one = make_toy(&d, 0, 0.5f);
    reset_ranks();
    d.batch = 8;
    d.comm = &ranks[0].comm; a = make_toy(&d, 0, 0.5f);
    d.comm = &ranks[1].comm; b = make_toy(&d, 0, 0.5f);
    for (i = 0; i < 4; i++) {
        amp_batch all = batch_of(0, 16), ba = batch_of(0, 8), bb = batch_of(8, 8);
        CHECK(amp_train_step(one.m, &all, NULL) == AMP_OK);
        CHECK(step_ranks(a.m, &ba, b.m, &bb, info));
        CHECK(info[0].step == i + 1 && info[1].step == i + 1);
    }
    snap(&snap_a, a); snap(&snap_b, b);
    CHECK(same(&snap_a, &snap_b));
    amp_model_params(one.m, &count);
    for (k = 0; k < count; k++)
        for (j = 0; j < amp_model_params(one.m, NULL)[k].count; j++) {
            double e = fabs((double)amp_model_params(one.m, NULL)[k].master[j] - (double)amp_model_params(a.m, NULL)[k].master[j]);
            if (e > worst) worst = e;
        }
    CHECK_MSG(worst < 1e-5, "%g", worst);
    amp_model_destroy(one.m); amp_model_destroy(a.m); amp_model_destroy(b.m);
}

/* An overflow on one rank makes both skip, alike; NaN in one rank's model is told on both. */
static void test_ranks_skip_together(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_scaler_desc s = huge_scale();
    float* loud = (float*)malloc(8 * PIXELS * sizeof *loud);
    amp_batch ba = batch_of(0, 8), bb = batch_of(8, 8);
    amp_step_info info[2];
    toy a, b;
    int i;
    d.scaler = &s;
    reset_ranks();
    d.comm = &ranks[0].comm; a = make_toy(&d, 1, 0.0f);
    d.comm = &ranks[1].comm; b = make_toy(&d, 1, 0.0f);
    amp_scaler_set_scale(amp_model_scaler(a.m), 1024.0f);
    amp_scaler_set_scale(amp_model_scaler(b.m), 1024.0f);
    CHECK(step_ranks(a.m, &ba, b.m, &bb, info) && info[0].outcome == AMP_STEP_APPLIED
          && info[1].outcome == AMP_STEP_APPLIED);
    /* Rank 0 reports inf through its weights' gradients: its pictures are NaN. */
    for (i = 0; i < 8 * PIXELS; i++) loud[i] = (float)HUGE_VAL - (float)HUGE_VAL;
    ba.inputs[0] = loud;
    ranks[0].other_flag[0] = 1.0f; ranks[1].other_flag[0] = 1.0f;       /* both see NaN in the sum */
    ranks[0].other_flag[1] = 0.0f; ranks[1].other_flag[1] = 1.0f;       /* only rank 0's model is to blame */
    snap(&snap_a, a); snap(&snap_b, b);
    CHECK(step_ranks(a.m, &ba, b.m, &bb, info));
    CHECK(info[0].outcome == AMP_STEP_SKIPPED_MODEL && info[1].outcome == AMP_STEP_SKIPPED_MODEL);
    CHECK_MSG(strstr(info[0].message, "'input1'") && strstr(info[1].message, "another rank"), "%s / %s",
              info[0].message, info[1].message);
    CHECK(amp_model_scaler(a.m)->state.scale == 1024.0f && amp_model_scaler(b.m)->state.scale == 1024.0f);
    snap(&snap_c, a); CHECK(same(&snap_a, &snap_c));
    snap(&snap_c, b); CHECK(same(&snap_b, &snap_c));
    /* A flag alone, as from a GPU whose sum has hidden the inf: rank 1 skips although its gradients are finite. */
    ba = batch_of(0, 8);
    memset(ranks[0].other_flag, 0, sizeof ranks[0].other_flag);
    memset(ranks[1].other_flag, 0, sizeof ranks[1].other_flag);
    ranks[0].other_flag[0] = 1.0f; ranks[1].other_flag[0] = 1.0f;
    CHECK(step_ranks(a.m, &ba, b.m, &bb, info));
    CHECK(info[0].outcome == AMP_STEP_SKIPPED_OVERFLOW && info[1].outcome == AMP_STEP_SKIPPED_OVERFLOW);
    CHECK_MSG(strstr(info[1].message, "another rank"), "%s", info[1].message);
    CHECK(info[0].grad_norm > 1e300 && amp_model_scaler(b.m)->state.scale == 512.0f);
    snap(&snap_c, b); CHECK(same(&snap_b, &snap_c));
    free(loud);
    amp_model_destroy(a.m);
    amp_model_destroy(b.m);
}

/* Whatever one rank's step is refused for, the other refuses as well, after one sum of flags: nobody waits for gradients. */
static void test_ranks_refuse_together(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    static const char* const words[7] = { "label 3 of sample 5", "9 samples", "inputs[0] is NULL", "targets[0]", "batch is NULL",
                                          "input_dtype", "state.lr -1" };
    int32_t wrong[8] = { 0, 1, 2, 0, 1, 3, 0, 0 };
    amp_step_info info[2];
    toy a, b;
    int k, micro;
    for (micro = 0; micro < 2; micro++) {
        reset_ranks();
        d.accumulate = 1 + micro;
        d.comm = &ranks[0].comm; a = make_toy(&d, 1, 0.0f);
        d.comm = &ranks[1].comm; b = make_toy(&d, 1, 0.0f);
        for (k = 0; k < 7; k++) {
            amp_batch good = batch_of(0, 8), bad = batch_of(8, 8);
            const float rate = amp_model_optimizer(b.m)->state.lr;
            if (k == 0) bad.targets[0] = wrong;
            if (k == 1) bad.n = 9;
            if (k == 2) bad.inputs[0] = NULL;
            if (k == 3) bad.targets[0] = NULL;
            if (k == 5) bad.input_dtype = AMP_I64;
            if (k == 6) amp_model_optimizer(b.m)->state.lr = -1.0f;
            if (micro) {
                ranks[0].calls = ranks[1].calls = 0;
                ranks[0].other_refused = 0.0f;
                if (k == 0) CHECK(amp_train_step(a.m, &good, NULL) == AMP_OK && ranks[0].calls == 1);
            }
            snap(&snap_a, a);
            ranks[0].calls = ranks[1].calls = 0;
            ranks[1].refused = 0.0f;
            CHECK(amp_train_step(b.m, k == 4 ? NULL : &bad, &info[1]) == (k == 5 ? AMP_ERR_DTYPE : AMP_ERR_ARGUMENT));
            CHECK_MSG(strstr(amp_model_error(b.m), words[k]), "%s", amp_model_error(b.m));
            CHECK(ranks[1].calls == 1 && ranks[1].refused == 1.0f);
            ranks[0].other_refused = ranks[1].refused;
            CHECK(amp_train_step(a.m, &good, &info[0]) == AMP_ERR_ARGUMENT && ranks[0].calls == 1);
            CHECK_MSG(strstr(amp_model_error(a.m), "another rank was refused"), "%s", amp_model_error(a.m));
            snap(&snap_b, a);
            CHECK(same(&snap_a, &snap_b));
            amp_model_optimizer(b.m)->state.lr = rate;
        }
        amp_model_destroy(a.m);
        amp_model_destroy(b.m);
    }
}

/* A sum of flags that fails takes the micro-batches before it back, as any failure does. */
static int sums_fail;      /* 1 all, 2 those of gradients */
static amp_result unsure_sum(void* data, amp_dtype t, size_t n, void* stream, void* user) {
    (void)data; (void)t; (void)stream; (void)user;
    return sums_fail == 1 || (sums_fail == 2 && n > 1) ? AMP_ERR_IO : AMP_OK;
}
static void test_no_agreement(void) {
    static const amp_comm comm = { unsure_sum, 0, 2, NULL, NULL, NULL, 0 };
    amp_model_desc d = toy_desc(8, AMP_O1, AMP_BF16);
    amp_batch b = batch_of(0, 8);
    amp_step_info info, before;
    toy t;
    int i;
    d.comm = &comm; d.accumulate = 2;
    t = make_toy(&d, 1, 0.4f);
    snap(&snap_a, t);

    /* Between the parts of a step, too. */
    CHECK(amp_forward(t.m, &b, NULL) == AMP_OK);
    sums_fail = 1;
    CHECK(amp_backward(t.m, NULL) == AMP_ERR_COMM);
    sums_fail = 0;
    snap(&snap_b, t);
    CHECK(same(&snap_a, &snap_b));
    for (i = 1; i <= 2; i++) {
        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_ACCUMULATED);
        memset(&info, 0x5a, sizeof info);
        before = info;
        sums_fail = i;
        CHECK(amp_train_step(t.m, &b, &info) == AMP_ERR_COMM && memcmp(&info, &before, sizeof info) == 0);
        sums_fail = 0;
        if (i == 2) continue;
        snap(&snap_b, t);
        CHECK(same(&snap_a, &snap_b));
    }
    for (i = 0; i < 2; i++)
        CHECK(amp_train_step(t.m, &b, &info) == AMP_OK && info.outcome == (i ? AMP_STEP_APPLIED : AMP_STEP_ACCUMULATED));
    amp_model_destroy(t.m);
}

/* --- k ranks as k micro-batches --- */

/* Ranks in one thread: each in turn records its gradients, whose sum is then told to have failed; then each in turn adds all
   in the order of the ranks. Flags stay its own: all find in the sums what one finds. */
enum { CROWD = 4, CROWD_FLOATS = 4096 };
static float crowd_grads[CROWD][CROWD_FLOATS];
static int crowd_reversed;          /* 1 = in the other order */
typedef struct crowd_rank { amp_comm comm; int calls, recording; } crowd_rank;
static amp_result crowd_sum(void* data, amp_dtype t, size_t n, void* stream, void* user) {
    crowd_rank* r = (crowd_rank*)user;
    const int size = r->comm.size;
    float* x = (float*)data;
    size_t i;
    int k;
    (void)stream;
    CHECK(t == AMP_F32 && n <= CROWD_FLOATS);
    if (r->calls++ != 1) return AMP_OK;             /* the first tells of refusals, the last of inf */
    if (r->recording) memcpy(crowd_grads[r->comm.rank], x, n * sizeof *x);
    for (i = 0; i < n && !r->recording; i++) {
        x[i] = crowd_grads[crowd_reversed ? size - 1 : 0][i];
        for (k = 1; k < size; k++) x[i] += crowd_grads[crowd_reversed ? size - 1 - k : k][i];
    }
    return r->recording ? AMP_ERR_IO : AMP_OK;
}

/* A step of `size` ranks, each with a batch of 4; the outcome of the last. */
static amp_outcome step_crowd(crowd_rank* ranked, toy* t, int size, int first) {
    amp_step_info info;
    int k, recording;
    memset(&info, 0, sizeof info);
    for (recording = size > 1; recording >= 0; recording--)
        for (k = 0; k < size; k++) {
            amp_batch b = batch_of((first + 4 * k) % SAMPLES, 4);
            amp_scaler* s = amp_model_scaler(t[k].m);
            ranked[k].recording = recording;
            ranked[k].calls = 0;
            CHECK(amp_train_step(t[k].m, &b, &info) == (recording ? AMP_ERR_COMM : AMP_OK));
            if (recording) CHECK(amp_scaler_set_scale(s, s->state.scale) == AMP_OK);    /* closes the window */
        }
    return info.outcome;
}

/* Trains by `size` ranks, and by one with as many micro-batches; in half, a step between has too large a scale. Returns whether
   all end with the same bits. */
static int crowd_agrees(amp_level level, int size) {
    amp_model_desc d = toy_desc(4, level, AMP_F16);
    crowd_rank ranked[CROWD];
    amp_step_info info;
    toy one, t[CROWD];
    int i, k, skipped = 0, equal = 1;
    d.accumulate = size;
    d.optimizer.lr = 0.5f;
    one = make_toy(&d, 0, 0.5f);
    d.accumulate = 1;
    memset(ranked, 0, sizeof ranked);
    for (k = 0; k < size; k++) {
        ranked[k].comm.all_reduce_sum = crowd_sum;
        ranked[k].comm.rank = k; ranked[k].comm.size = size;
        ranked[k].comm.user_data = &ranked[k];
        d.comm = &ranked[k].comm;
        t[k] = make_toy(&d, 0, 0.5f);
    }
    for (i = 0; i < 8; i++) {
        if (level != AMP_O0 && (i == 2 || i == 3)) {
            const float scale = i == 2 ? 67108864.0f : 1024.0f;
            CHECK(amp_scaler_set_scale(amp_model_scaler(one.m), scale) == AMP_OK);
            for (k = 0; k < size; k++) CHECK(amp_scaler_set_scale(amp_model_scaler(t[k].m), scale) == AMP_OK);
        }
        for (k = 0; k < size; k++) {
            amp_batch b = batch_of((4 * size * i + 4 * k) % SAMPLES, 4);
            CHECK(amp_train_step(one.m, &b, &info) == AMP_OK);
        }
        CHECK(step_crowd(ranked, t, size, 4 * size * i) == info.outcome);
        skipped += info.outcome == AMP_STEP_SKIPPED_OVERFLOW;
    }
    CHECK_MSG(skipped == (level != AMP_O0), "level %d, %d ranks: %d steps skipped", (int)level, size, skipped);
    snap(&snap_a, one);
    for (k = 0; k < size; k++) {
        snap(&snap_b, t[k]);
        equal &= same(&snap_a, &snap_b);
        amp_model_destroy(t[k].m);
    }
    amp_model_destroy(one.m);
    return equal;
}
static void test_ranks_as_micro_batches(void) {
    int size;
    for (size = 1; size <= CROWD; size++) {
        CHECK_MSG(crowd_agrees(AMP_O0, size), "FP32, %d ranks", size);
        CHECK_MSG(crowd_agrees(AMP_O2, size), "FP16, %d ranks", size);
    }
    crowd_reversed = 1;         /* the order of the sum is seen */
    CHECK(!crowd_agrees(AMP_O0, 3) && !crowd_agrees(AMP_O2, 3));
    crowd_reversed = 0;
}

/* --- sums that begin during the backward pass --- */

/* Another rank has the same gradients: a sum doubles. What was begun is doubled by wait, and must lie until then as it
   was; whether the first layer's gradient was still to come at the first start is seen, too. */
enum { LATE = 16 };
typedef struct late_sums {
    amp_comm comm;
    int sums, waits, begun, early, fails_at;        /* begun: in this step; early: before the first layer was through */
    float* data[LATE];
    size_t count[LATE];
    float kept[LATE][CROWD_FLOATS];
    const float* first;                             /* the first parameter's gradient */
    float first_then;
} late_sums;
static amp_result late_now(void* data, amp_dtype t, size_t n, void* stream, void* user) {
    late_sums* l = (late_sums*)user;
    float* x = (float*)data;
    size_t i;
    (void)stream;
    CHECK(t == AMP_F32 && l->waits == (l->begun > 0));       /* no flags between start and wait */
    for (i = 0; i < n; i++) x[i] += x[i];
    l->sums++;
    return AMP_OK;
}
static amp_result late_start(void* data, amp_dtype t, size_t n, void* stream, void* user) {
    late_sums* l = (late_sums*)user;
    (void)stream;
    CHECK(t == AMP_F32 && n <= CROWD_FLOATS && l->begun < LATE);
    l->data[l->begun] = (float*)data;
    l->count[l->begun] = n;
    memcpy(l->kept[l->begun], data, n * sizeof(float));
    if (l->begun == 0 && l->first) l->first_then = *l->first;
    l->begun++;
    return l->begun == l->fails_at ? AMP_ERR_IO : AMP_OK;
}
static amp_result late_wait(void* stream, void* user) {
    late_sums* l = (late_sums*)user;
    size_t i;
    int k;
    (void)stream;
    l->early = l->first && l->first_then != *l->first;
    for (k = 0; k < l->begun; k++) {
        CHECK_MSG(memcmp(l->data[k], l->kept[k], l->count[k] * sizeof(float)) == 0, "sum %d was written to", k);
        CHECK(k == 0 || l->data[k] + l->count[k] <= l->data[k - 1]);
        for (i = 0; i < l->count[k]; i++) l->data[k][i] += l->data[k][i];
    }
    l->waits++;
    return AMP_OK;
}
static late_sums late;
static void late_hooks(int starts, size_t bytes) {
    memset(&late, 0, sizeof late);
    late.comm.all_reduce_sum = late_now;
    late.comm.size = 2;
    late.comm.user_data = &late;
    late.comm.start_bytes = bytes;
    if (starts) { late.comm.start = late_start; late.comm.wait = late_wait; }
}

/* The toy, or a net of linear layers whose first is used again behind the second. */
static amp_model* late_model(const amp_model_desc* d, int again) {
    amp_model* m;
    amp_value x, a, b;
    if (!again) return make_toy(d, 0, 0.5f).m;
    m = new_model(d);
    x = amp_linear(m, amp_input(m, 1, TOY_SIDE, TOY_SIDE), 8);
    a = amp_linear(m, x, 8);
    b = amp_tanh(m, amp_linear(m, amp_tanh(m, a), 8));
    amp_softmax_cross_entropy(m, amp_linear(m, amp_reuse(m, a, b), TOY_CLASSES));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    return m;
}

/* Whatever the buckets, the bits are those of sums behind the backward pass; only the last micro-batch begins any. */
static void test_sums_begin_early(void) {
    static const struct { size_t bytes; int begun[2]; } buckets[] = { { 1, { 4, 4 } }, { 1500, { 2, 1 } }, { 0, { 1, 1 } } };
    int again, k, i;
    for (again = 0; again < 2; again++)
        for (k = -1; k < 3; k++) {
            amp_model_desc d = toy_desc(4, AMP_O2, AMP_F16);
            amp_model* m;
            d.accumulate = 2;
            late_hooks(k >= 0, k >= 0 ? buckets[k].bytes : 0);
            d.comm = &late.comm;
            m = late_model(&d, again);
            late.first = (const float*)amp_model_params(m, NULL)[0].grad;
            for (i = 0; i < 6; i++) {
                amp_batch b = batch_of(4 * i, 4);
                late.begun = late.waits = 0;
                CHECK_MSG(amp_train_step(m, &b, NULL) == AMP_OK, "%s", amp_model_error(m));
                if (k < 0) continue;
                CHECK_MSG(late.begun == (i % 2 ? buckets[k].begun[again] : 0) && late.waits == i % 2, "%d begun", late.begun);
                CHECK(i % 2 == 0 || late.early == (late.begun > 1));
            }
            snap_b.n = 0; snap_params(&snap_b, m);
            if (k < 0) snap_a = snap_b;
            CHECK_MSG(same(&snap_a, &snap_b), "buckets of %d bytes", k < 0 ? -1 : (int)buckets[k].bytes);
            amp_model_destroy(m);
        }
}

/* Between amp_backward and amp_update the caller sees gradients of its own rank: sums begin in the update. */
static void test_sums_begin_in_update(void) {
    amp_model_desc d = toy_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_batch b = batch_of(0, 4);
    amp_model* m;
    late_hooks(1, 1);
    d.comm = &late.comm;
    m = make_toy(&d, 0, 0.0f).m;
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK && late.begun == 0);
    CHECK(amp_update(m, NULL) == AMP_OK && late.begun == 1 && late.waits == 1);
    late.begun = late.waits = 0;
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK && amp_discard(m) == AMP_OK);
    CHECK(late.begun == 0 && late.waits == 0);
    amp_model_destroy(m);
}

/* A start that fails ends the step, after those that began; the next step is as if there had been none. */
static void test_start_fails(void) {
    amp_model_desc d = toy_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_batch b = batch_of(0, 4);
    int k;
    for (k = 0; k < 2; k++) {
        amp_model* m;
        late_hooks(1, 1);
        d.comm = &late.comm;
        m = make_toy(&d, 0, 0.5f).m;
        if (k == 1) {
            late.fails_at = 2;
            CHECK(amp_train_step(m, &b, NULL) == AMP_ERR_COMM && late.begun == 2 && late.waits == 1);
            CHECK(strstr(heard, "the sum of the gradients over the ranks failed") != NULL);
            late.fails_at = late.begun = late.waits = 0;
        }
        CHECK(amp_train_step(m, &b, NULL) == AMP_OK && late.begun == 4 && late.waits == 1);
        snap_b.n = 0; snap_params(&snap_b, m);
        if (k == 0) snap_a = snap_b;
        CHECK(same(&snap_a, &snap_b));
        amp_model_destroy(m);
    }
}

/* A hook of one rank is never called. */
static void test_single_rank(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    toy a, b;
    reset_ranks();
    ranks[0].comm.size = 1;
    a = make_toy(&d, 1, 0.0f);
    d.comm = &ranks[0].comm;
    b = make_toy(&d, 1, 0.0f);
    steps(a, 3, 8); steps(b, 3, 8);
    snap(&snap_a, a); snap(&snap_b, b);
    CHECK(ranks[0].calls == 0 && same(&snap_a, &snap_b));
    amp_model_destroy(a.m); amp_model_destroy(b.m);
}

/* --- the same bits --------------------------------------------------------------------------------------------- */

static void test_seeds(void) {
    int level;
    for (level = 0; level <= 3; level++) {
        amp_model_desc d = toy_desc(8, (amp_level)level, AMP_F16);
        toy a = make_toy(&d, 1, 0.5f), b = make_toy(&d, 1, 0.5f), c;
        d.seed = 6;
        c = make_toy(&d, 1, 0.5f);
        steps(a, 3, 8); steps(b, 3, 8); steps(c, 3, 8);
        snap(&snap_a, a); snap(&snap_b, b); snap(&snap_c, c);
        CHECK(same(&snap_a, &snap_b) && !same(&snap_a, &snap_c));
        amp_model_destroy(a.m); amp_model_destroy(b.m); amp_model_destroy(c.m);
    }
}

static void test_two_models_interleaved(void) {
    amp_model_desc da = toy_desc(8, AMP_O2, AMP_F16), db = toy_desc(6, AMP_O1, AMP_BF16);
    toy a, b, c, d;
    int i;
    db.optimizer.kind = AMP_ADAM; db.optimizer.momentum = 0.0f; db.optimizer.lr = 0.01f; db.seed = 8;
    a = make_toy(&da, 1, 0.5f); b = make_toy(&db, 1, 0.25f);
    steps(a, 4, 8);
    steps(b, 4, 6);
    c = make_toy(&da, 1, 0.5f); d = make_toy(&db, 1, 0.25f);
    for (i = 0; i < 4; i++) {
        amp_batch bc = batch_of(i * 8 % SAMPLES, 8), bd = batch_of(i * 6 % SAMPLES, 6);
        CHECK(amp_train_step(c.m, &bc, NULL) == AMP_OK && amp_train_step(d.m, &bd, NULL) == AMP_OK);
    }
    snap(&snap_a, a); snap(&snap_b, c); CHECK(same(&snap_a, &snap_b));
    snap(&snap_a, b); snap(&snap_b, d); CHECK(same(&snap_a, &snap_b));
    amp_model_destroy(a.m); amp_model_destroy(b.m); amp_model_destroy(c.m); amp_model_destroy(d.m);
}

/* Ten steps on every instruction set of this machine, at every level and in both types. */
static void test_every_isa(void) {
    int level, low, k, tried = 0;
    if (FAST) { TEST_SKIP("bits of instruction sets: compiled with -Ofast"); return; }
    for (level = 0; level <= 3; level++)
        for (low = AMP_F16; low <= AMP_BF16; low++) {
            amp_model_desc d = toy_desc(8, (amp_level)level, (amp_dtype)low);
            d.optimizer.kind = low == AMP_F16 ? AMP_SGD : AMP_ADAMW;
            d.optimizer.momentum = low == AMP_F16 ? 0.9f : 0.0f;
            d.optimizer.clip_norm = 1.0f;
            for (k = 0; k < COUNT(ISAS); k++) {
                toy t;
                if (amp_cpu_force_isa(ISAS[k]) != AMP_OK) continue;
                t = make_toy(&d, 1, 0.25f);
                steps(t, 10, 8);
                snap(k ? &snap_b : &snap_a, t);
                if (k) CHECK_MSG(same(&snap_a, &snap_b), "O%d %s on %s", level, amp_dtype_name((amp_dtype)low), amp_isa_name(ISAS[k]));
                tried += k > 0;
                amp_model_destroy(t.m);
            }
        }
    amp_cpu_force_isa(AMP_ISA_AUTO);
    if (!tried) TEST_SKIP("bits of instruction sets: this machine has only one");
}

/* --- fine-tuning: what is frozen --------------------------------------------------------------------------------- */

/* A residual backbone in two parts, each a group, and a head. Its parameters: 0..3 stem, 4..5 block, 6..9 head. */
enum { STEM = 0, BLOCK = 4, HEAD = 6, ALL = 10, FEATURES = 4 * SIDE * SIDE };
static amp_param_group tune_groups[3];
static amp_value add_head(amp_model* m, amp_value x, int group) {
    amp_value y = amp_linear(m, x, 16);
    amp_group(m, y, group);
    y = amp_linear(m, amp_sigmoid(m, y), CLASSES);
    amp_group(m, y, group);
    amp_softmax_cross_entropy(m, y);
    return y;
}
static amp_model* make_backbone(amp_model_desc d, int frozen_norm, amp_value* features) {
    amp_model* m = NULL;
    amp_conv2d_desc c;
    amp_norm_desc n;
    amp_value x, y;
    memset(&c, 0, sizeof c);
    memset(&n, 0, sizeof n);
    c.out_channels = 4; c.kernel = 3; c.pad = 1;
    n.frozen = frozen_norm;
    d.optimizer.groups = tune_groups; d.optimizer.group_count = 3;
    m = new_model(&d);
    x = amp_conv2d_with(m, amp_input(m, 1, SIDE, SIDE), &c);
    amp_group(m, x, 0);
    x = amp_batch_norm_with(m, x, &n);
    amp_group(m, x, 0);
    x = amp_relu(m, x);
    y = amp_conv2d_with(m, x, &c);
    amp_group(m, y, 1);
    *features = amp_relu(m, amp_add(m, y, x));
    add_head(m, *features, 2);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    return m;
}
static amp_model* make_head(amp_model_desc d) {
    amp_model* m = NULL;
    m = new_model(&d);
    add_head(m, amp_input(m, 4, SIDE, SIDE), 0);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    return m;
}
static void freeze_groups(amp_model* m, int stem, int block) {
    amp_model_optimizer(m)->groups[0].frozen = stem;
    amp_model_optimizer(m)->groups[1].frozen = block;
}
/* Copies `count` parameters of a, from `from` on, over those of b. */
static void give_params(amp_model* a, int from, amp_model* b, int to, int count) {
    float values[FEATURES * 16];
    int i;
    for (i = 0; i < count; i++) {
        CHECK(amp_model_read_param(a, &amp_model_params(a, NULL)[from + i], values) == AMP_OK);
        CHECK(amp_model_write_param(b, &amp_model_params(b, NULL)[to + i], values) == AMP_OK);
    }
}
static int same_params(amp_model* a, int from, amp_model* b, int to, int count) {
    float x[FEATURES * 16], y[FEATURES * 16];
    int i, equal = 1;
    for (i = 0; i < count; i++) {
        const amp_param *p = &amp_model_params(a, NULL)[from + i], *q = &amp_model_params(b, NULL)[to + i];
        CHECK(p->count == q->count && amp_model_read_param(a, p, x) == AMP_OK && amp_model_read_param(b, q, y) == AMP_OK);
        equal = equal && memcmp(x, y, p->count * sizeof *x) == 0;
    }
    return equal;
}
static int grads_given(amp_model* m, int from, int count) {
    const amp_param* p = amp_model_params(m, NULL) + from;
    int i, given = 0;
    for (i = 0; i < count; i++) given += p[i].grad != NULL;
    return given;
}

/* A frozen backbone is as good as none: its features, fed to a model that is the head alone, train that head to the same
   bits, with the same norm, clipping, loss and scale. Nothing is written where its gradients were. */
static void compare_with_head(amp_level level, amp_dtype low, amp_optimizer_kind kind) {
    static float features[SAMPLES * FEATURES], before[SAMPLES * FEATURES];
    amp_model_desc d = toy_desc(8, level, low);
    amp_model *whole, *head, *start;
    amp_value f, ignored;
    void* grads[HEAD];
    int i, k;
    d.optimizer.kind = kind; d.optimizer.lr = 0.02f; d.optimizer.clip_norm = 0.5f; d.optimizer.weight_decay = 0.01f;
    if (kind != AMP_SGD) d.optimizer.momentum = 0.0f;
    if (level == AMP_O3) d.grad_dtype = low;
    whole = make_backbone(d, 1, &f);
    start = make_backbone(d, 1, &ignored);
    head = make_head(d);
    give_params(whole, HEAD, head, 0, ALL - HEAD);
    for (i = 0; i < HEAD; i++) {
        const amp_param* p = &amp_model_params(whole, NULL)[i];
        grads[i] = p->grad;
        memset(p->grad, 0x5a, p->count * amp_dtype_size(p->grad_dtype));
    }
    freeze_groups(whole, 1, 1);
    for (i = 0; i < 6; i++) {
        amp_batch b = batch_of(i * 8 % SAMPLES, 8), h = b;
        amp_step_info one, other;
        CHECK(amp_predict(whole, &b, f, features) == AMP_OK);
        if (i == 0) memcpy(before, features, 8 * FEATURES * sizeof *before);
        h.inputs[0] = features;
        CHECK_MSG(amp_train_step(whole, &b, &one) == AMP_OK, "%s", amp_model_error(whole));
        CHECK_MSG(amp_train_step(head, &h, &other) == AMP_OK, "%s", amp_model_error(head));
        CHECK_MSG(memcmp(&one.grad_norm, &other.grad_norm, sizeof one.grad_norm) == 0 && one.loss == other.loss
                  && one.outcome == other.outcome && one.scale_after == other.scale_after, "O%d %s %d: %g %g", (int)level,
                  amp_dtype_name(low), i, one.grad_norm, other.grad_norm);
        CHECK(same_params(whole, HEAD, head, 0, ALL - HEAD));
        CHECK(grads_given(whole, 0, HEAD) == 0 && grads_given(whole, HEAD, ALL - HEAD) == ALL - HEAD);
    }
    CHECK(amp_model_optimizer(whole)->state.step > 0 && !same_params(whole, HEAD, start, HEAD, ALL - HEAD));
    CHECK(same_params(whole, 0, start, 0, HEAD));
    CHECK(amp_optimizer_zero_grad(amp_model_optimizer(whole)) == AMP_OK);
    for (i = 0; i < HEAD; i++) {
        const amp_param* p = &amp_model_params(whole, NULL)[i];
        for (k = 0; k < (int)(p->count * amp_dtype_size(p->grad_dtype)); k++) CHECK(((unsigned char*)grads[i])[k] == 0x5a);
        for (k = 0; p->m && k < (int)p->count; k++) CHECK(((float*)p->m)[k] == 0.0f);
    }
    {   /* running statistics: the features are those of the beginning */
        amp_batch b = batch_of(0, 8);
        CHECK(amp_predict(whole, &b, f, features) == AMP_OK && memcmp(features, before, 8 * FEATURES * 4) == 0);
    }
    amp_model_destroy(whole); amp_model_destroy(start); amp_model_destroy(head);
}
static void test_frozen_backbone_is_absent(void) {
    static const amp_optimizer_kind kinds[] = { AMP_SGD, AMP_ADAMW, AMP_LAMB };
    int level, low, k;
    for (level = 0; level <= 3; level++)
        for (low = AMP_F16; low <= AMP_BF16; low++)
            for (k = 0; k < 3; k++) compare_with_head((amp_level)level, (amp_dtype)low, kinds[k]);
}

/* Convolution, batch norm, dense, layer norm, dense; all biases and norms in group 1, or all parameters in group 0. */
static amp_model* make_with_vectors(const amp_model_desc* d, int vectors) {
    amp_model* m = new_model(d);
    amp_value x = amp_relu(m, amp_batch_norm(m, amp_conv2d(m, amp_input(m, 1, SIDE, SIDE), 4, 3, 1, 1)));
    if (vectors) amp_group_vectors(m, 1);       /* of layers before and after */
    x = amp_tanh(m, amp_layer_norm(m, amp_linear(m, x, 16)));
    amp_softmax_cross_entropy(m, amp_linear(m, x, CLASSES));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    return m;
}
/* Weight decay of matrices alone, and either kind frozen: after a first step, whose gradients are those of any setting, each
   parameter is that of a model in which its group's setting holds for all. */
static void test_group_of_vectors(void) {
    static const amp_param_group settings[][2] = {
        { { 0.0f, 0.0f, 0, NULL }, { 0.0f, AMP_ZERO, 0, NULL } },       /* nanoGPT's */
        { { 0.0f, 0.0f, 0, NULL }, { 0.0f, 0.0f, 1, NULL } }, { { 0.0f, 0.0f, 1, NULL }, { 0.0f, 0.0f, 0, NULL } }
    };
    int i, k, level;
    for (level = 0; level <= 3; level++)
        for (k = 0; k < COUNT(settings); k++) {
            amp_model* m[3];
            int vectors = 0;
            const amp_batch b = batch_of(0, 8);
            for (i = 0; i < 3; i++) {
                amp_model_desc d = toy_desc(8, (amp_level)level, AMP_BF16);
                d.optimizer.kind = AMP_ADAMW; d.optimizer.lr = 0.02f; d.optimizer.momentum = 0.0f;
                d.optimizer.weight_decay = 0.5f;
                d.optimizer.groups = i < 2 ? &settings[k][i] : settings[k];
                d.optimizer.group_count = i < 2 ? 1 : 2;
                m[i] = make_with_vectors(&d, i == 2);
                CHECK_MSG(amp_train_step(m[i], &b, NULL) == AMP_OK, "%s", amp_model_error(m[i]));
            }
            for (i = 0; i < 10; i++) {
                const amp_param* p = &amp_model_params(m[2], NULL)[i];
                const int is_vector = strstr(p->name, "bias") || strstr(p->name, "norm");
                vectors += is_vector;
                CHECK(p->group == is_vector);
                CHECK_MSG(same_params(m[2], i, m[is_vector], i, 1), "O%d, setting %d: %s", level, k, p->name);
            }
            CHECK(vectors == 7);
            for (i = 0; i < 3; i++) amp_model_destroy(m[i]);
        }
}

/* What trains below a frozen layer is reached through it: the first step is the same whether that layer is frozen or not.
   What lies beneath a layer that trains, and is frozen, stays. Unfreezing gives the gradients back, where they were. */
static void test_freezing_by_hand(void) {
    amp_model_desc d = toy_desc(8, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_value f;
    amp_model *a, *b, *c;
    amp_batch batch = batch_of(0, 8), next = batch_of(8, 8);
    amp_step_info info, all;
    void* grads[ALL];
    int i;
    d.optimizer.momentum = 0.0f;
    a = make_backbone(d, 1, &f); b = make_backbone(d, 1, &f); c = make_backbone(d, 1, &f);
    for (i = 0; i < ALL; i++) grads[i] = amp_model_params(a, NULL)[i].grad;
    freeze_groups(a, 0, 1);
    CHECK(amp_train_step(a, &batch, &info) == AMP_OK && amp_train_step(b, &batch, &all) == AMP_OK);
    CHECK(same_params(a, STEM, b, STEM, BLOCK) && same_params(a, HEAD, b, HEAD, ALL - HEAD));
    CHECK(same_params(a, BLOCK, c, BLOCK, HEAD - BLOCK) && !same_params(b, BLOCK, c, BLOCK, HEAD - BLOCK));
    CHECK(info.grad_norm < all.grad_norm && grads_given(a, BLOCK, HEAD - BLOCK) == 0 && grads_given(a, 0, ALL) == 8);
    freeze_groups(a, 1, 0);
    give_params(a, 0, c, 0, ALL);
    CHECK(amp_train_step(a, &next, &info) == AMP_OK && amp_train_step(c, &next, &all) == AMP_OK);
    CHECK(same_params(a, BLOCK, c, BLOCK, ALL - BLOCK) && !same_params(a, STEM, c, STEM, BLOCK));
    freeze_groups(a, 0, 0);
    give_params(a, 0, c, 0, ALL);
    CHECK(amp_train_step(a, &batch, &info) == AMP_OK && amp_train_step(c, &batch, &all) == AMP_OK);
    CHECK(same_params(a, 0, c, 0, ALL) && info.grad_norm == all.grad_norm);
    for (i = 0; i < ALL; i++) CHECK(amp_model_params(a, NULL)[i].grad == grads[i]);
    /* all of them: as ever, but the weights stay */
    freeze_groups(a, 1, 1); freeze_groups(b, 0, 0);
    amp_model_optimizer(a)->groups[2].frozen = 1;
    give_params(a, 0, b, 0, ALL);
    CHECK(amp_train_step(a, &next, &info) == AMP_OK && amp_train_step(b, &next, &all) == AMP_OK);
    CHECK(info.outcome == AMP_STEP_APPLIED && info.step == 4 && info.grad_norm == all.grad_norm && grads_given(a, 0, ALL) == ALL);
    CHECK(same_params(a, 0, c, 0, ALL) && !same_params(a, 0, b, 0, ALL));
    amp_model_destroy(a); amp_model_destroy(b); amp_model_destroy(c);
}

/* Within a step of micro-batches: what was frozen at its beginning has no gradient, so it stays frozen to its end; what is
   frozen then counts from the next step on. */
static void test_freezing_in_a_window(void) {
    amp_model_desc d = toy_desc(4, AMP_O2, AMP_F16);
    amp_value f;
    amp_model *m, *start;
    amp_batch b = batch_of(0, 4);
    amp_step_info info;
    d.accumulate = 3;
    m = make_backbone(d, 1, &f); start = make_backbone(d, 1, &f);
    freeze_groups(m, 1, 1);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_ACCUMULATED);
    freeze_groups(m, 1, 0);
    CHECK(amp_train_step(m, &b, &info) == AMP_ERR_STATE);
    CHECK_MSG(strstr(amp_model_error(m), "'conv2d2.weight' was frozen") && strstr(amp_model_error(m), "group 1"), "%s",
              amp_model_error(m));
    freeze_groups(m, 1, 1);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_ACCUMULATED);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED && info.step == 1);
    CHECK(same_params(m, 0, start, 0, HEAD));
    freeze_groups(m, 0, 0);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_ACCUMULATED && grads_given(m, 0, ALL) == ALL);
    freeze_groups(m, 1, 1);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && grads_given(m, 0, ALL) == ALL);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED && same_params(m, 0, start, 0, HEAD));
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && grads_given(m, 0, ALL) == ALL - HEAD);
    amp_model_destroy(m); amp_model_destroy(start);
}

/* An overflow is named among those that have gradients, and a skipped step of a frozen batch norm leaves no trace. */
static void test_frozen_overflow(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_scaler_desc s = huge_scale();
    amp_layer_stats stats[16];
    amp_value f;
    amp_model* m;
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    int i;
    d.scaler = &s;
    d.max_replays = 60;
    m = make_backbone(d, 1, &f);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.attempts > 1);
    freeze_groups(m, 1, 1);
    CHECK(amp_scaler_set_scale(amp_model_scaler(m), 1e12f) == AMP_OK);
    CHECK_MSG(amp_train_step(m, &b, &info) == AMP_OK && info.attempts > 1 && info.outcome == AMP_STEP_APPLIED, "%d %s",
              info.attempts, info.message);
    CHECK(amp_model_stats(m, &b, stats, 16) == AMP_OK);
    for (i = 0; i < amp_model_layer_count(m); i++) {
        const amp_layer* l = amp_model_layer(m, i);
        int head = i > amp_model_layer_of(m, f), loss = l->op == AMP_OP_SOFTMAX_CROSS_ENTROPY;
        CHECK_MSG((stats[i].output_gradient.count > 0) == (head && !loss) && (stats[i].output.count > 0) == !loss
                  && (stats[i].weight_gradient.count > 0) == (l->op == AMP_OP_LINEAR), "%s", l->name);
    }
    amp_model_destroy(m);
    d.max_replays = 0;
    m = make_backbone(d, 1, &f);
    freeze_groups(m, 1, 1);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    CHECK_MSG(strncmp(info.overflow.first_name, "linear", 6) == 0 && info.overflow.first_tensor >= HEAD, "%s",
              info.overflow.first_name);
    amp_model_destroy(m);
}

/* Frozen batch norm alone: gamma and beta train, one value per channel is enough, and what a step sees is what evaluation
   sees. Without `frozen` neither holds. */
static void test_frozen_norm_trains(void) {
    amp_model_desc d = toy_desc(4, AMP_O0, AMP_DTYPE_DEFAULT);
    static const float x[8] = { 1, -2, 3, 4, -5, 6, 7, -8 };
    amp_batch b;
    int frozen;
    memset(&b, 0, sizeof b);
    b.inputs[0] = x; b.targets[0] = x;
    for (frozen = 0; frozen < 2; frozen++) {
        amp_model* m = NULL;
        amp_norm_desc n;
        amp_step_info info;
        amp_eval_info eval;
        amp_value v;
        float out[8], gamma[2];
        memset(&n, 0, sizeof n);
        n.frozen = frozen;
        m = new_model(&d);
        v = amp_batch_norm_with(m, amp_input(m, 2, 1, 1), &n);
        amp_mse(m, v);
        CHECK(amp_model_finalize(m) == AMP_OK);
        b.n = 4;
        CHECK(amp_evaluate(m, &b, &eval) == AMP_OK && amp_train_step(m, &b, &info) == AMP_OK);
        CHECK((info.loss == eval.loss) == frozen);
        CHECK(amp_model_read_param(m, amp_model_find_param(m, "batch_norm1.weight"), gamma) == AMP_OK && gamma[0] != 1.0f);
        b.n = 1;
        CHECK(amp_train_step(m, &b, &info) == (frozen ? AMP_OK : AMP_ERR_ARGUMENT));
        /* running mean 0 and variance 1 still: y(0) is beta, y(1) - y(0) nearly gamma */
        CHECK(amp_predict(m, &b, v, out) == AMP_OK);
        CHECK(amp_model_read_param(m, amp_model_find_param(m, "batch_norm1.weight"), gamma) == AMP_OK);
        {
            static const float zero[2] = { 0, 0 };
            float at_zero[2], beta[2];
            amp_batch z = b;
            z.inputs[0] = zero;
            CHECK(amp_model_read_param(m, amp_model_find_param(m, "batch_norm1.bias"), beta) == AMP_OK);
            CHECK(amp_predict(m, &z, v, at_zero) == AMP_OK);
            CHECK((at_zero[0] == beta[0]) == frozen);
        }
        amp_model_destroy(m);
    }
}

/* Ranks sum what has a gradient, and nothing else. */
typedef struct heard_sums { int calls; size_t floats; const char *from[32], *to[32]; amp_comm comm; } heard_sums;
static amp_result listen_sum(void* data, amp_dtype t, size_t n, void* stream, void* user) {
    heard_sums* h = (heard_sums*)user;
    (void)stream;
    if (h->calls < 32) {
        h->from[h->calls] = (const char*)data;
        h->to[h->calls] = (const char*)data + n * amp_dtype_size(t);
    }
    h->calls++;
    return AMP_OK;
}
/* How many gradients from `first` on one of the calls has covered, and how many one has touched. */
static void sums_over(const heard_sums* h, void* const* grads, amp_model* m, int first, int count, int* whole, int* touched) {
    int i, k;
    *whole = *touched = 0;
    for (i = first; i < first + count; i++) {
        const char *p = (const char*)grads[i], *end = p + amp_model_params(m, NULL)[i].count * 4;
        for (k = 0; k < h->calls; k++) {
            *whole += h->from[k] <= p && end <= h->to[k];
            *touched += h->from[k] < end && p < h->to[k];
        }
    }
}
static amp_result listen_wait(void* stream, void* user) {
    (void)stream;
    return user ? AMP_OK : AMP_ERR_IO;
}
static void frozen_ranks(int starts) {
    amp_model_desc d = toy_desc(8, AMP_O0, AMP_DTYPE_DEFAULT);
    static heard_sums h;
    amp_value f;
    amp_model* m;
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    void* grads[ALL];
    int i, whole, touched;
    memset(&h, 0, sizeof h);
    h.comm.all_reduce_sum = listen_sum; h.comm.size = 2; h.comm.user_data = &h;
    if (starts) { h.comm.start = listen_sum; h.comm.wait = listen_wait; h.comm.start_bytes = 1; }
    d.comm = &h.comm;
    m = make_backbone(d, 1, &f);
    for (i = 0; i < ALL; i++) grads[i] = amp_model_params(m, NULL)[i].grad;
    for (i = 0; i < 3; i++) {
        static const int frozen[3][2] = { { 0, 0 }, { 0, 1 }, { 1, 1 } };
        h.calls = 0;
        freeze_groups(m, frozen[i][0], frozen[i][1]);
        CHECK_MSG(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED, "%s", amp_model_error(m));
        CHECK(starts ? h.calls < 32 : h.calls == (i == 1 ? 4 : 3));     /* with two flags */
        sums_over(&h, grads, m, HEAD, ALL - HEAD, &whole, &touched);
        CHECK(whole == ALL - HEAD && touched == ALL - HEAD);
        sums_over(&h, grads, m, STEM, BLOCK, &whole, &touched);
        CHECK(whole == (frozen[i][0] ? 0 : BLOCK) && touched == whole);
        sums_over(&h, grads, m, BLOCK, HEAD - BLOCK, &whole, &touched);
        CHECK(whole == (frozen[i][1] ? 0 : HEAD - BLOCK) && touched == whole);
    }
    amp_model_destroy(m);
}

static void test_frozen_ranks(void) { frozen_ranks(0); frozen_ranks(1); }

/* --- AMP_SUMS_FAST ----------------------------------------------------------------------------------------------- */

/* Trains a dense net on all pictures, twice over in a batch, and returns its loss; weights: where its weights begin and
   end up. */
enum { WIDE = 64, DENSE_WEIGHTS = WIDE * PIXELS };
static float dense_net(amp_dtype low, amp_sums sums, float* start, float* weights) {
    static float x[2 * SAMPLES * PIXELS];
    int32_t y[2 * SAMPLES];
    amp_model_desc d = toy_desc(2 * SAMPLES, AMP_O2, low);
    amp_model* m = NULL;
    amp_step_info info;
    amp_value v;
    amp_batch b;
    int i, count;
    d.sums = sums;
    memset(&b, 0, sizeof b);
    memset(&info, 0, sizeof info);
    for (i = 0; i < 2; i++) {
        memcpy(x + i * SAMPLES * PIXELS, pictures, sizeof pictures);
        memcpy(y + i * SAMPLES, labels, sizeof labels);
    }
    b.n = 2 * SAMPLES;
    b.inputs[0] = x;
    b.targets[0] = y;
    m = new_model(&d);
    v = amp_relu(m, amp_linear(m, amp_input(m, 1, SIDE, SIDE), WIDE));
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, amp_linear(m, v, WIDE)), CLASSES));
    CHECK(amp_model_finalize(m) == AMP_OK);
    memcpy(start, amp_model_params(m, &count)[0].master, DENSE_WEIGHTS * sizeof *start);
    for (i = 0; i < 80; i++) CHECK(amp_train_step(m, &b, &info) == AMP_OK);
    memcpy(weights, amp_model_params(m, &count)[0].master, DENSE_WEIGHTS * sizeof *weights);
    amp_model_destroy(m);
    return info.loss;
}

/* Another order of the sums moves the weights by rounding errors only: a hundredth of what training moved them. */
static void test_fast_sums_train(void) {
    static float start[DENSE_WEIGHTS], fixed[DENSE_WEIGHTS], fast[DENSE_WEIGHTS];
    int low, i;
    for (low = AMP_F16; low <= AMP_BF16; low++) {
        double moved = 0, apart = 0;
        float loss = dense_net((amp_dtype)low, AMP_SUMS_FIXED, start, fixed);
        float other = dense_net((amp_dtype)low, AMP_SUMS_FAST, start, fast);
        for (i = 0; i < DENSE_WEIGHTS; i++) {
            moved += pow((double)fixed[i] - (double)start[i], 2);
            apart += pow((double)fixed[i] - (double)fast[i], 2);
        }
        CHECK_MSG(sqrt(apart) < 0.01 * sqrt(moved) && loss < 0.05f && other < 0.05f,
                  "%s: apart %g, moved %g, losses %g %g", amp_dtype_name((amp_dtype)low), sqrt(apart), sqrt(moved),
                  (double)loss, (double)other);
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static void test_no_allocation_in_steps(void) {
    int level;
    for (level = 0; level <= 3; level++) {
        amp_model_desc d = toy_desc(8, (amp_level)level, AMP_F16);
        amp_batch b = batch_of(0, 8), bad = b;
        static float poison[8 * PIXELS];
        amp_eval_info e;
        amp_layer_stats* stats;
        float out[8 * CLASSES];
        toy t;
        long before;
        d.allocator.alloc = failing_alloc; d.allocator.free = failing_free;
        fail_at_call(0);
        t = make_toy(&d, 1, 0.5f);
        CHECK(alloc_calls > 0);
        before = alloc_calls;
        poison[3] = (float)HUGE_VAL;
        bad.inputs[0] = poison;
        stats = (amp_layer_stats*)malloc((size_t)amp_model_layer_count(t.m) * sizeof *stats);
        CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK && amp_train_step(t.m, &bad, NULL) == AMP_OK);
        CHECK(amp_evaluate(t.m, &b, &e) == AMP_OK && amp_predict(t.m, &b, t.v[10], out) == AMP_OK);
        CHECK(amp_model_stats(t.m, &b, stats, amp_model_layer_count(t.m)) == AMP_OK
              && amp_model_sync_params(t.m) == AMP_OK);
        CHECK(alloc_calls == before);
        free(stats);
        amp_model_destroy(t.m);
        CHECK(alloc_live == 0 && alloc_wrong_frees == 0);
    }
}

/* --- a backend that nobody waits for -------------------------------------------------------- */

static int reads;
static amp_result counting_read(amp_training* t, const amp_exec* exec) {
    reads++;
    return amp_cpu_backend()->training_read(t, exec);
}
static amp_result always_off(amp_training* t, uint64_t key, amp_record* mode, const amp_exec* exec) {
    (void)t; (void)key; (void)exec;
    *mode = AMP_RECORD_OFF;
    return AMP_OK;
}

/* A backend that records is asked by one key for each kind of step: of so many rows, first of a window or not, last or not. */
static uint64_t asked_keys[16];
static int asked_count;
static amp_result note_key(amp_training* t, uint64_t key, amp_record* mode, const amp_exec* exec) {
    asked_keys[asked_count++ % 16] = key;
    return always_off(t, key, mode, exec);
}
static void test_keys_of_recordings(void) {
    amp_backend noting = *amp_cpu_backend();
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    toy t;
    int i, k;
    noting.record = note_key;
    d.backend = &noting;
    d.accumulate = 3;
    t = make_toy(&d, 1, 0.0f);
    asked_count = 0;
    for (i = 0; i < 12; i++) {          /* windows of 1, 2, 3 and again 1 rows */
        amp_batch b = batch_of(0, 1 + i / 3 % 3);
        CHECK(amp_train_step(t.m, &b, NULL) == AMP_OK);
    }
    CHECK(asked_count == 12);
    for (i = 0; i < 9; i++)
        for (k = 0; k < i; k++) CHECK_MSG(asked_keys[i] != asked_keys[k], "steps %d and %d", k, i);
    for (i = 0; i < 3; i++) CHECK(asked_keys[9 + i] == asked_keys[i]);
    amp_model_destroy(t.m);
}

/* Steps without info read nothing back; amp_train_read tells what the last one did, as its info would have. */
static void test_reading_later(void) {
    amp_backend lazy = *amp_cpu_backend();
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_step_info asked, later;
    amp_batch b = batch_of(0, 8);
    toy now = make_toy(&d, 1, 0.25f), then;
    int i;
    lazy.asynchronous = 1;
    lazy.training_read = counting_read;
    lazy.record = always_off;
    d.backend = &lazy;
    then = make_toy(&d, 1, 0.25f);
    memset(&asked, 0, sizeof asked);
    CHECK(amp_train_read(then.m, &later) == AMP_ERR_STATE && strstr(heard, "no step was made"));
    CHECK(amp_train_read(NULL, &later) == AMP_ERR_ARGUMENT && amp_train_read(then.m, NULL) == AMP_ERR_ARGUMENT);
    reads = 0;
    for (i = 0; i < 5; i++) {
        CHECK(amp_train_step(now.m, &b, &asked) == AMP_OK);
        CHECK(amp_train_step(then.m, &b, NULL) == AMP_OK);
    }
    CHECK(reads == 0);
    CHECK(amp_train_read(then.m, &later) == AMP_OK && reads == 1);
    CHECK(memcmp(&asked, &later, sizeof asked) == 0);
    CHECK(amp_train_read(then.m, &later) == AMP_OK && reads == 1);
    CHECK(amp_train_step(then.m, &b, NULL) == AMP_OK && reads == 1);
    CHECK(amp_model_scaler(then.m)->state.applied == 6 && reads == 2);
    CHECK(amp_model_optimizer(then.m)->state.step == 6 && reads == 2);
    amp_model_destroy(now.m);
    amp_model_destroy(then.m);
}
static void test_reading_micro_batches(void) {
    amp_model_desc d = toy_desc(8, AMP_O2, AMP_F16);
    amp_step_info told, read;
    amp_batch b = batch_of(0, 8);
    toy now, then;
    int i;
    d.accumulate = 3;
    now = make_toy(&d, 1, 0.0f);
    then = make_toy(&d, 1, 0.0f);
    for (i = 0; i < 7; i++) {
        CHECK(amp_train_step(now.m, &b, &told) == AMP_OK && amp_train_step(then.m, &b, NULL) == AMP_OK);
        CHECK(amp_train_read(then.m, &read) == AMP_OK);
        CHECK_MSG(memcmp(&told, &read, sizeof told) == 0, "call %d: %s, %s", i, amp_outcome_name(told.outcome),
                  amp_outcome_name(read.outcome));
        CHECK((read.outcome == AMP_STEP_ACCUMULATED) == (i % 3 < 2));
    }
    amp_model_destroy(now.m);
    amp_model_destroy(then.m);
}

/* A batch in the backend's memory trains and counts like one on the host. */
static void test_batch_on_device(void) {
    amp_model_desc d = toy_desc(8, AMP_O1, AMP_BF16);
    amp_batch host = batch_of(0, 8), device = host;
    amp_step_info a, b;
    amp_eval_info ea, eb;
    toy s = make_toy(&d, 1, 0.0f), t = make_toy(&d, 1, 0.0f);
    int i;
    device.on_device = 1;
    for (i = 0; i < 3; i++)
        CHECK(amp_train_step(s.m, &host, &a) == AMP_OK && amp_train_step(t.m, &device, &b) == AMP_OK);
    CHECK(memcmp(&a, &b, sizeof a) == 0);
    CHECK(amp_evaluate(s.m, &host, &ea) == AMP_OK && amp_evaluate(t.m, &device, &eb) == AMP_OK);
    CHECK(ea.loss == eb.loss && ea.correct == eb.correct && ea.correct > 0);
    amp_model_destroy(s.m);
    amp_model_destroy(t.m);
}

/* Weights go out and come back; what is written is rounded to the 16-bit copy too. */
static void test_reading_parameters(void) {
    static const amp_level levels[3] = { AMP_O0, AMP_O2, AMP_O3 };
    static float out[65536], in[65536];
    int l, i, count, k;
    for (l = 0; l < 3; l++) {
        amp_model_desc d = toy_desc(4, levels[l], AMP_F16);
        toy t = make_toy(&d, 1, 0.0f);
        amp_param* p = amp_model_params(t.m, &count);
        for (i = 0; i < count; i++) {
            CHECK(p[i].count <= 65536 && amp_model_read_param(t.m, &p[i], out) == AMP_OK);
            for (k = 0; k < (int)p[i].count; k++) {
                amp_half h;
                float now = p[i].master ? p[i].master[k] : amp_half_to_float(((amp_half*)p[i].low)[k]);
                CHECK(memcmp(&now, &out[k], sizeof now) == 0);
                in[k] = out[k] * 0.7f + 0.001f * (float)k;
                h = amp_half_from_float(in[k]);
                out[k] = p[i].master ? in[k] : amp_half_to_float(h);
            }
            CHECK(amp_model_write_param(t.m, &p[i], in) == AMP_OK);
            CHECK(amp_model_read_param(t.m, &p[i], in) == AMP_OK && memcmp(in, out, p[i].count * 4) == 0);
            for (k = 0; k < (int)p[i].count && p[i].low; k++)
                CHECK(((amp_half*)p[i].low)[k].bits == amp_half_from_float(in[k]).bits);
        }
        CHECK(amp_model_read_param(t.m, p, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "read param: the array of values is NULL"));
        CHECK(amp_model_write_param(t.m, p + count, in) == AMP_ERR_ARGUMENT && strstr(heard, "write param: p is not"));
        CHECK(amp_model_read_param(NULL, p, out) == AMP_ERR_ARGUMENT);
        amp_model_destroy(t.m);
    }
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    make_pictures();
    TEST(test_learning);
    TEST(test_ten_bytes);
    TEST(test_default_scaler);
    TEST(test_default_scaler_of_half_layers);
    TEST(test_step_info);
    TEST(test_update_overflows);
    TEST(test_held_statistics);
    TEST(test_where_it_began);
    TEST(test_overflow_leaves_no_trace);
    TEST(test_skips_change_nothing_later);
    TEST(test_replay);
    TEST(test_model_trouble);
    TEST(test_model_trouble_early);
    TEST(test_model_trouble_unseen);
    TEST(test_bad_target);
    TEST(test_looking_leaves_statistics);
    TEST(test_dead_model);
    TEST(test_bad_batches);
    TEST(test_floor_and_limits);
    TEST(test_skips_of_no_gradient);
    TEST(test_refusals);
    TEST(test_calls_too_early);
    TEST(test_errors_leave_info);
    TEST(test_failed_steps_leave_nothing);
    TEST(test_refused_micro_batches);
    TEST(test_untrainable);
    TEST(test_predictions_need_no_gradients);
    TEST(test_accumulation_exact);
    TEST(test_accumulation_net);
    TEST(test_scale_stays_in_window);
    TEST(test_evaluation_changes_nothing);
    TEST(test_nan_is_never_right);
    TEST(test_smaller_batch);
    TEST(test_input_types);
    TEST(test_label_types);
    TEST(test_labels_for_floats);
    TEST(test_labels_of_another_size);
    TEST(test_images);
    TEST(test_dropout);
    TEST(test_dropout_in_micro_batches);
    TEST(test_ranks_exact);
    TEST(test_ranks_net);
    TEST(test_ranks_skip_together);
    TEST(test_ranks_refuse_together);
    TEST(test_no_agreement);
    TEST(test_ranks_as_micro_batches);
    TEST(test_sums_begin_early);
    TEST(test_sums_begin_in_update);
    TEST(test_start_fails);
    TEST(test_single_rank);
    TEST(test_seeds);
    TEST(test_two_models_interleaved);
    TEST(test_every_isa);
    TEST(test_frozen_backbone_is_absent);
    TEST(test_group_of_vectors);
    TEST(test_freezing_by_hand);
    TEST(test_freezing_in_a_window);
    TEST(test_frozen_overflow);
    TEST(test_frozen_norm_trains);
    TEST(test_frozen_ranks);
    TEST(test_fast_sums_train);
    TEST(test_no_allocation_in_steps);
    TEST(test_reading_parameters);
    TEST(test_keys_of_recordings);
    TEST(test_reading_later);
    TEST(test_reading_micro_batches);
    TEST(test_batch_on_device);
    TEST(test_ties);
    TEST(test_right_answers);
    TEST(test_evaluation_not_finite);
    TEST_END();
}
